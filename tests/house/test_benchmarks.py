"""Every benchmark starts: a page quotes its figures, and a move of a module must not end it
unseen."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv, told = [path, "--help"], io.StringIO()
    sys.path.insert(0, path.rpartition("/")[0])
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_path(path, run_name="__main__")
        end = "went on behind its flags"
    except SystemExit as e:
        end = e.code or ("" if told.getvalue().startswith("usage:") else "said no usage")
    except BaseException as e:
        end = repr(e)
    if end:
        print(path, end)
    sys.path.pop(0)
"""


def test_every_benchmark_starts(tmp_path):
    """With all of its imports, up to the reading of its flags. One process, for what they share."""
    paths = sorted(map(str, (ROOT / "benchmarks").glob("*.py")))
    assert len(paths) > 20
    said = subprocess.run(
        [sys.executable, "-c", START, *paths], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == "" and list(tmp_path.iterdir()) == []
