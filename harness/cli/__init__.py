"""The `harness` command: the only place that builds the real world."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `main` on first use. `harness.cli:main` is the command's entry point."""
    if name == "main":
        from harness.cli.command import main

        return main
    raise AttributeError(f"module 'harness.cli' has no attribute {name!r}")
