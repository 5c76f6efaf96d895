"""Workers that run out of memory, in real worlds of real processes: told from a crash, with what
held the memory, and with a smaller micro-batch by choice."""

import json

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import OUT_OF_MEMORY, WorkerFailed
from harness.look.alerts.alert_evaluator import fired
from storage.stores.store_urls import open_store
from support import hungry_trainer

SCRIPT = hungry_trainer.__file__


def stop_of(url):
    return json.loads(open_store(url).get("control/stop.json"))


@pytest.mark.parametrize(("world", "how"), [(1, "host"), (2, "gpu"), (3, "host")])
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
