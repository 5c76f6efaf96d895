"""Tables that ship with the package: CSV, with comments that name their sources."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources


def rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of `harness/core/<name>`; lines that begin with # are comments."""
    lines = resources.files("harness.core").joinpath(name).read_text().splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))
