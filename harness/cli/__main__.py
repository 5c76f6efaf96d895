"""`python -m harness.cli` is the `harness` command."""

from harness.cli.command import main

main()
