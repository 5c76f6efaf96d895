"""Test suites of frameworks, run as scripts of the harness: each test by pytest in a process of its
own, once left alone and once adapted, on a run of its own.

    cd accelerate-1.15.0 && python -m support.own_tests tests/test_state_checkpointing.py
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import pytest

from harness.node import forkserver
from support.trainer_script import ENV
from support.worlds import Nursery, environment

PRELOAD = "torch,transformers,accelerate,lightning.pytorch,pytest"
# what comes after the test is not judged: Lightning fails there for threads that a session keeps
ONE = """
import sys, pytest

class Outcome:
    code = 0
    def pytest_runtest_logreport(self, report):
        self.code |= report.failed and report.when != "teardown"

outcome = Outcome()
pytest.main([*sys.argv[1:], "-qq", "--tb=short"], [outcome])
sys.exit(int(outcome.code))
"""
MOST_S = 120
ENDS = {0: "passed", 1: "failed"}


class Warm(Nursery):
    def __init__(self) -> None:
        self._warm = forkserver.ForkServerClient(environment() | {"HARNESS_PRELOAD": PRELOAD})


class Collected:
    """A plugin of pytest that notes the tests which are not skipped by a mark."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        skips = [[m.args for m in item.iter_markers("skipif")] for item in session.items]
        self.ids = [
            item.nodeid
            for item, marks in zip(session.items, skips, strict=True)
            if not any(args and args[0] is True for args in marks) and not item.get_closest_marker("skip")
        ]


def main() -> int:
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*sys.argv[1:], "--collect-only", "-qq", "-p", "no:cacheprovider"], [found])
    if code:
        sys.exit(said.getvalue())
    nursery, differ = Warm(), 0
    for name in found.ids:
        ends, output = [], ""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "one.py")
            script.write_text(ONE)
            for adapt in ("none", "auto"):
                env = ENV | {"HARNESS_ADAPT": adapt, "HARNESS_ATTACH": '{"seed": 1}'}
                words = (name, f"--basetemp={folder}/{adapt}", "-p", "no:cacheprovider")
                ended = nursery.train(
                    f"{folder}/run", 1, *words, script=script, env=env, timeout_s=MOST_S, codes=range(-64, 256)
                )
                ends.append(ENDS.get(ended.codes[0], f"code {ended.codes[0]}"))
                output = ended.output
        print("\t".join((*ends, name)), flush=True)
        if ends[1] != ends[0]:
            differ += 1
            print(output[-3000:], flush=True)
    nursery.close()
    print(f"{len(found.ids)} tests, {differ} end otherwise when adapted")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
