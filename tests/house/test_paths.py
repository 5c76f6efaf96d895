"""A training step with no option on walks through few files (benchmarks/paths.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import paths


def test_a_step_walks_through_few_files(tmp_path):
    found = paths.step_walk(tmp_path)
    assert {"harness/worker/step.py", "harness/bucket/journal.py"} <= found
    assert len(found) <= paths.CEILINGS["step"], "\n".join(sorted(found))
