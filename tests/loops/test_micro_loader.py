"""`run.loader`: loops over epochs of the script's own, in any world, resumed at any place."""

import json
from pathlib import Path

import pytest

from harness.look.audit.audit import audit
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.worlds import history, newest, train

pytestmark = pytest.mark.proof
SCRIPT = Path(__file__).parents[1] / "support" / "loader_trainer.py"


def loop(folder, world, *flags, run="run", codes=(0,), agent=True):
    out = folder / "out"
    env = {"HARNESS_MARK": str(folder / "mark.json")} if agent else None
    ended = train(
        folder / run, world, *flags, "--out", out, script=SCRIPT, codes=codes, env=env
    )
    if codes != (0,):
        return ended.output
    return [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(world)]


def samples(told):
    """What each step consumed."""
    found = {}
    for rank in told:
        for step, _, which in rank["seen"]:
            found.setdefault(step, set()).update(which)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return loop(tmp_path_factory.mktemp("alone"), 1, "--reduce", "exact")[0]


def test_epochs_are_whole_and_the_last_step_is_short(alone, tmp_path):
    assert [line[:2] for line in alone["lines"]] == [[0, 3], [1, 6], [2, 9]]
    assert alone["accumulation"] == 4 and alone["len"] == 10
    found = samples([alone])
    assert [len(found[step]) for step in range(1, 10)] == [20, 20, 6] * 3
    for epoch in range(3):
        of = [found[3 * epoch + k] for k in (1, 2, 3)]
        assert set.union(*of) == set(range(46))
    assert found[1] != found[4]  # another order
    dropped = loop(tmp_path, 2, "--drop-last", "--workers", 2, "--epochs", 2)
    assert [len(s) for s in samples(dropped).values()] == [20] * 4
    assert dropped[0]["len"] == dropped[1]["len"] == 4


@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_any_world_at_any_time_ends_with_the_same_bits(alone, tmp_path, plain):
    told = loop(tmp_path, 3, "--reduce", "exact", *plain)
    assert samples(told) == samples([alone])  # rank 2 has none of the short steps: a filler
    assert all(t["weights"] == alone["weights"] and t["lines"] == alone["lines"] for t in told)
    # in an epoch, behind its last step
    for i, leave_at in enumerate((2,) if plain else (3, 5)):
        run = f"run{i}"
        flags = ("--reduce", "exact", "--leave-at", leave_at, *plain)
        loop(tmp_path, 2, *flags, run=run, codes=(9, 1, -9))
        told = loop(tmp_path, 3, *flags, run=run)
        assert told[0]["weights"] == alone["weights"] and told[0]["lines"] == alone["lines"]
        records = history(tmp_path / run)
        assert [r.step for r in records] == list(range(1, 10))
        assert [r.samples for r in records] == [20, 20, 6] * 3
        report = audit(open_store(str(tmp_path / run)))
        assert report.ok, report.first_violation


@pytest.mark.parametrize("order", ["in order", "weighted"])
def test_samplers_give_every_rank_the_same_order(tmp_path, order):
    flags = ("--order", order, "--epochs", 2)
    one = loop(tmp_path, 1, *flags, run="one")
    assert samples(one) == samples(loop(tmp_path, 2, *flags, run="two"))
    if order == "in order":
        assert samples(one)[1] == set(range(20))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--order", "by-rank"), "wanted the same order on every rank"),
        (("--order", "distributed"), "shares the data out by itself"),
    ],
)
def test_orders_that_cannot_be_are_refused(tmp_path, flags, says):
    assert says in loop(tmp_path, 2, *flags, codes=(1, -9))


def test_a_step_that_must_be_done_again_comes_again(alone, tmp_path):
    flags = ("--reduce", "exact32", "--spike")
    told = [loop(tmp_path, world, *flags, run=f"run{world}") for world in (1, 2)]
    assert told[0][0]["weights"] == told[1][0]["weights"] == told[1][1]["weights"]
    steps = [step for step, _, _ in told[0][0]["seen"]]
    assert steps.count(4) == 8 and steps.count(1) == steps.count(5) == 4
    assert [r.samples for r in history(tmp_path / "run2")] == [20, 20, 6] * 3


def test_one_rank_may_end_the_run_early(tmp_path):
    told = loop(tmp_path, 2, "--stop-at", 4, agent=False)
    assert [t["step"] for t in told] == [5, 5] and len(told[0]["lines"]) == 2
    manifest = newest(tmp_path / "run")
    assert manifest.data["ended"] == "ended early at step 5 of 9: the loss is small enough"
    told = loop(tmp_path, 2, "--stop-behind", 0, run="other")
    assert [t["step"] for t in told] == [3, 3]
    store = open_store(str(tmp_path / "other"))
    snapshots = Snapshots(store)
    assert snapshots.ended(snapshots.latest()) == "ended early at step 3 of 9: it has converged"


def test_an_epoch_may_be_left_in_the_middle(tmp_path):
    told = loop(tmp_path, 1, "--most", 5)
    assert [line[:2] for line in told[0]["lines"]] == [[0, 1], [1, 2], [2, 3]]
    assert audit(open_store(str(tmp_path / "run"))).ok
