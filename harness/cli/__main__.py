"""The module that makes `python -m harness.cli` the `harness` command."""

from harness.cli.command import main

main()
