"""How a run was set up, and sessions that say it."""

from harness.bucket.archive import read_facts
from harness.core import facts as f
from harness.core.setup_record import (
    GitState,
    Setup,
)
from harness.worker.run_context import Run

BEGAN = Setup(
    argv=("jobs/train.py", "--lr", "0.1", "data", "--fast"),
    script="ab" * 32,
    config={"model": {"width": 8, "layers": [1, 2]}},
    git=GitState("0a" * 20, "main", "https://example.org/x.git"),
    packages={"torch": "2.13.0+cpu", "rich": "13.0", "spotharness": "0.1.0 @ file:"},
    software={"python": "3.11.7", "torch": "2.13.0+cpu", "image": "nvcr.io/x:1"},
    hardware={"device": "H100", "driver": "550.1"},
    environment={"NCCL_ALGO": "Ring"},
    people={"owner": "me", "purpose": "to see [bold]it[/]"},
)


def told(run: Run) -> list[f.Fact]:
    run.flush()
    return [s.fact for s in read_facts(run.store)]
