"""One part of `make gpu`, in a process of its own; started by `__main__.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.gpu.bench import Bench

if __name__ == "__main__":
    name, module, rows, folder, began_s, limit_s, *tiny = sys.argv[1:]
    importlib.import_module(module).run(
        Bench(name, Path(rows), Path(folder), bool(tiny), float(began_s), float(limit_s))
    )
