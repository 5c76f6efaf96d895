"""Workers that run out of memory, in real worlds of real processes: told from a crash, with what
held the memory, and with a smaller micro-batch by choice."""

import json
import re

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import OUT_OF_MEMORY, EpochStarted, SessionStarted, WorkerFailed
from harness.lab.replay import replay
from harness.look.alerts.alert_evaluator import fired
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support import hungry_trainer
from support.hungry_trainer import GLOBAL, MICRO, TOTAL
from support.worlds import history, train

SCRIPT = hungry_trainer.__file__


def stop_of(url):
    return json.loads(open_store(url).get("control/stop.json"))


@pytest.mark.parametrize(
    ("world", "how"),
    [
        pytest.param(1, "host", marks=pytest.mark.proof),
        (2, "gpu"),
        pytest.param(3, "host", marks=pytest.mark.proof),
    ],
)
def test_it_is_told_with_what_held_the_memory(nodes, world, how):
    last = world - 1
    nodes.start(
        *("--most", 2, "--at", 8, "--on", last, "--how", how),
        script=SCRIPT,
        agent=("--nproc", str(world)),
    )
    assert nodes.codes() == [35], nodes.logs()
    mine = [f for f in nodes.facts(WorkerFailed) if f.error != "PeerLost"]
    assert [(f.rank, f.error) for f in mine] == [(last, OUT_OF_MEMORY)] * 3, nodes.logs()
    said = f"rank {last} is out of memory in step 8, in micro-batches of 4: this process ("
    for one in mine:
        assert one.message.startswith(said)
        assert " holds weights 2.4 kB, gradients " in one.message
        assert "optimizer 4.9 kB, buffers 0 B, activations and others that" in one.message
        assert "the greatest tensors: a tensor (" in one.message
        assert ("CUDA out of memory" if how == "gpu" else "1152921504606846976") in one.message
    stop = stop_of(nodes.url)
    assert "3 times in a row at the same point (after step 7): OutOfMemoryError" in stop["reason"]
    assert any(said in line for line in stop["log_tail"])
    facts = read_facts(open_store(nodes.url))
    told = [alert for alert in fired(facts, facts[-1].t) if alert.rule == "out-of-memory"]
    assert told and told[0].title == f"rank {last} ran out of memory"


# ---- half the micro-batch, by choice -------------------------------------------------------------
HALVE = ("--set", "oom=halve")


def halving(nodes, world, *flags, codes=(0,), agents=1):
    """Train under agents that halve the micro-batch; return the weights' hash."""
    out = nodes.run.parent / "weights.json"
    for _ in range(agents):
        said = ("--nproc", str(world), "--min-nodes", str(agents), *HALVE)
        nodes.start(*flags, "--out", out, script=SCRIPT, agent=said)
    assert {*nodes.codes()} == {*codes}, nodes.logs()
    return json.loads(out.read_text()) if out.exists() else ""


def alone(run, *flags, **kwargs):
    """Train in one undisturbed process; return the weights' hash."""
    out = run.with_suffix(".json")
    train(run, 1, *flags, "--out", out, script=SCRIPT, **kwargs)
    return json.loads(out.read_text())


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.proof) for n in (1, 2, 3)])
def test_the_next_try_is_that_of_a_run_with_half_the_micro_batch(nodes, tmp_path, world):
    """It did not fit from the first step on, so the whole run is the other one, to the bit: losses,
    dropout, weights."""
    found = halving(nodes, world, "--most", 2, "--on", world - 1)
    assert found == alone(tmp_path / "half", "--micro", 2)
    mine, theirs = history(nodes.run), history(tmp_path / "half")
    assert [(r.digest, r.loss, r.metrics["grad_norm"]) for r in mine] == [
        (r.digest, r.loss, r.metrics["grad_norm"]) for r in theirs
    ]
    assert {(r.micro_batch, sum(r.shares), r.samples) for r in mine} == {(2, GLOBAL // 2, GLOBAL)}
    assert {(r.micro_batch, sum(r.shares), r.samples) for r in theirs} == {(0, GLOBAL // 2, GLOBAL)}
    assert nodes.facts(SessionStarted)[-1].micro_batch == 2
    assert len(nodes.facts(EpochStarted)) == 2
    assert json.loads(open_store(nodes.url).get("run.json"))["micro_batch"] == MICRO
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation


@pytest.mark.proof
def test_amid_a_run_any_world_goes_on_alike_and_the_proof_holds(nodes, tmp_path):
    """Two nodes of two ranks; from step 8 on a micro-batch of 2 does not fit either."""
    flags = ["--most", 1, "--at", 8, "--on", 3, "--every", 7, "--patient"]
    found = halving(nodes, 2, *flags, agents=2)
    records = history(nodes.run)
    assert [r.micro_batch for r in records] == [0] * 7 + [1] * (TOTAL - 7), nodes.logs()
    assert [r.samples for r in records] == [GLOBAL] * TOTAL
    failed = [f for f in nodes.facts(WorkerFailed) if f.error != "PeerLost"]
    assert [(f.rank, f.error) for f in failed] == [(3, OUT_OF_MEMORY)] * 2
    assert len(nodes.facts(EpochStarted)) == 3
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation
    # one process that trains 7 steps, and goes on with the halved micro-batch
    other = tmp_path / "other"
    alone(other, "--total", 7)
    assert alone(other, env={"HARNESS_HALVINGS": 2}) == found
    assert [(r.digest, r.loss) for r in history(other)] == [(r.digest, r.loss) for r in records]
    (tmp_path / "again").mkdir()
    again = replay(open_store(nodes.url), tmp_path / "again", 7, 5, 1, [SCRIPT])
    assert again.identical and (again.first, again.last) == (8, 12), again


def test_one_sample_that_does_not_fit_ends_the_run_with_the_report(nodes):
    halving(nodes, 1, "--most", 0, "--at", 3, "--micro", 6, codes=(35,))
    sizes = [re.search("in micro-batches of (.)", f.message)[1] for f in nodes.facts(WorkerFailed)]
    assert sizes == ["6", "3", "1"]
    reason = stop_of(nodes.url)["reason"]
    assert reason.startswith("memory ran out after step 2 with one sample in a micro-batch, which")
    assert "rank 0 is out of memory in step 3, in micro-batches of 1: this process (" in reason
    assert "holds weights 2.4 kB" in reason


@pytest.mark.parametrize("loop", ["loader", "safe_point"])
def test_a_loop_that_cuts_its_own_micro_batches_is_refused(tmp_path, loop):
    ended = train(
        tmp_path / "run", 1, "--loop", loop, script=SCRIPT, env={"HARNESS_OOM": "halve"}, codes=(1,)
    )
    assert "BadInput: --set oom=halve: wanted micro-batches that the harness" in ended.output
    assert f"found run.{loop}" in ended.output


def test_the_order_of_samples_stays_that_of_the_script(tmp_path):
    """Blocks of neighbours depend on the micro-batch that the script asks for."""
    flags = ["--shuffle", "blocks", "--total", 20]
    alone(tmp_path / "asked", *flags)
    alone(tmp_path / "halved", *flags, env={"HARNESS_HALVINGS": 1})
    mine, asked = history(tmp_path / "halved"), history(tmp_path / "asked")
    assert [r.digest for r in mine] == [r.digest for r in asked]
    assert {r.micro_batch for r in mine} == {2}
    report = audit(open_store(str(tmp_path / "halved")))
    assert report.ok, report.first_violation
