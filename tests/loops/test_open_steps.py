"""Steps that are cut open: several optimizers, phases, closures, losses in parts; in any world."""

import json
from pathlib import Path

import pytest
import torch

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, train

pytestmark = pytest.mark.proof
SCRIPT = Path(__file__).parents[1] / "support" / "open_trainer.py"


def told(folder, kind, reduce, world, leave=False):
    run, out = folder / f"run-{world}-{reduce}-{leave}", folder / f"{world}-{reduce}-{leave}.json"
    args = (kind, reduce, out)
    if leave:
        train(run, world, *args, script=SCRIPT, env={"LEAVE": "1"}, codes=(9, 1, -9))
    train(run, 3 - world if leave else world, *args, script=SCRIPT)
    return json.loads(out.read_text()), run


def test_half_precision_has_phases_as_well(tmp_path):
    told_by = [told(tmp_path, "scaled", "exact", world)[0] for world in (1, 3)]
    assert told_by[0]["weights"] == told_by[1]["weights"]
    assert told_by[0]["losses"][-1] < told_by[0]["losses"][0]


def close(a, b, kind):
    # LBFGS divides by differences of gradients
    most = {"rtol": 1e-2, "atol": 1e-3} if kind == "lbfgs" else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in a["state"].items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(b["state"][name]), **most)
    torch.testing.assert_close(a["losses"], b["losses"], **most)


@pytest.mark.parametrize("kind", ["gan", "lbfgs", "chunks"])
def test_any_loop_trains_the_same_in_any_world(tmp_path, kind):
    alone, run = told(tmp_path, kind, "fast", 1)
    assert [r.step for r in history(run)] == [1, 2, 3, 4, 5, 6]
    report = audit(open_store(str(run)))
    assert report.ok, report.first_violation
    records = history(run)
    per_step = len(alone["losses"]) / 6
    assert per_step > 1 if kind != "chunks" else per_step == 1
    assert records[0].loss == pytest.approx(alone["losses"][0]) and records[0].samples == 20
    exact, _ = told(tmp_path, kind, "exact", 1)
    close(alone, exact, kind)
    assert alone["between"] == exact["between"]
    if kind == "gan":
        others, _ = told(tmp_path, kind, "fast", 3)
        close(alone, others, kind)
        assert alone["between"] == others["between"]
    if kind == "chunks":
        return
    # a loss of all nodes, and another world afterwards
    resumed, run = told(tmp_path, kind, "exact", 2, leave=True)
    assert resumed["weights"] == exact["weights"]
    assert resumed["between"] == exact["between"][-len(resumed["between"]) :]
    assert history(run)[-1].h and audit(open_store(str(run))).ok
