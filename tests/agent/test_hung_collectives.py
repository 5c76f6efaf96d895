"""Ranks that wait in different collectives are found in seconds, and named; whoever works is left
alone, however long it takes."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

import harness
from harness.agent.verdicts import Evidence, WorkerEnd
from harness.agent.worker_stacks import MainStack, StackAnswers, mismatch, parse
from harness.bucket.archive import read_facts
from harness.core.facts import (
    AgentEnded,
    EpochLeft,
    EpochStarted,
    Fact,
    SessionStarted,
    StackSeen,
    WorkerFailed,
    WorkerHung,
)
from harness.core.world import STOPPED
from harness.node.heartbeat import SURE_S, Limits, ProgressFile, WorkerHeartbeat, WorkerPhase
from storage.stores.store_urls import open_store
from support.nodes import Nodes
from support.outside import environment, said_of, start, train_begin, until

# ---- where a rank stands -------------------------------------------------------------------------
TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D, LOGGER = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/distributed/c10d_logger.py"
OURS = Path(harness.__path__[0])
REDUCE = next(
    (OURS / "worker/gradients/parallel.py", i)
    for i, line in enumerate((OURS / "worker/gradients/parallel.py").read_text().splitlines(), 1)
    if line.strip() == "work.wait()"
)


def stood(*calls: tuple[object, int, str]) -> MainStack:
    """By what faulthandler writes: another thread, and the main one."""
    other = 'Thread 0x00007f (most recent call first):\n  File "/a/thread.py", line 1 in run\n\n'
    frames = [f'  File "{file}", line {line} in {function}\n' for file, line, function in calls]
    forked = '  File "<frozen runpy>", line 88 in _run_code\n  File "/h/fork.py", line 9 in serve\n'
    return parse(f"{other}Current thread 0x00007f (most recent call first):\n{''.join(frames)}{forked}")


SCRIPT = ("/mine/train.py", 41, "<module>")
ALL_REDUCE = stood((C10D, 3252, "all_reduce"), (LOGGER, 83, "wrapper"), SCRIPT)
UPDATE = stood(
    (*REDUCE, "reduce"), (OURS / "worker/step.py", 9, "update"), ("/mine/train.py", 43, "main")
)


def test_the_main_threads_collective_is_named_with_the_line_that_called_it():
    assert [str(frame) for frame in ALL_REDUCE.frames] == [
        "torch/distributed/distributed_c10d.py:3252 all_reduce",
        "torch/distributed/c10d_logger.py:83 wrapper",
        "/mine/train.py:41 <module>",
    ]
    assert ALL_REDUCE.collective == "all_reduce (train.py:41)"
    assert UPDATE.collective == "the harness's update (train.py:43)"
    gather = stood((C10D, 4287, "all_gather"), (C10D, 3513, "all_gather_object"), SCRIPT)
    assert gather.collective == "all_gather_object (train.py:41)"
    functional = f"{TORCH}/distributed/_functional_collectives.py"
    eager = stood((f"{TORCH}/_ops.py", 1, "__call__"), (functional, 2, "wait_tensor"), SCRIPT)
    assert eager.collective == "wait_tensor (train.py:41)"


def test_a_wait_for_what_was_begun_before_is_a_stand(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("work = dist.all_reduce(x, async_op=True)\nwork.wait()\n")
    assert stood((script, 2, "<module>")).collective == "wait (train.py:2)"
    assert stood((script, 1, "<module>")).collective == ""


@pytest.mark.parametrize(
    "calls",
    [
        [(C10D, 3000, "_tensor_to_object"), (C10D, 3513, "all_gather_object"), SCRIPT],
        [("/usr/lib/python3.11/threading.py", 331, "wait"), SCRIPT],
        [SCRIPT, (C10D, 3252, "all_reduce"), SCRIPT],  # such as a hook
        [(f"{TORCH}/nn/functional.py", 7, "linear"), SCRIPT],
        [],
    ],
    ids=["unpickles", "waits for a thread", "is called back", "computes", "silent"],
)
def test_work_is_no_stand(calls):
    assert stood(*calls).collective == ""


def test_a_dump_without_its_oldest_thread_says_nothing():
    text = f'Thread 0x1 (most recent call first):\n  File "{C10D}", line 1 in barrier\n...\n'
    assert parse(text) == MainStack()


def test_ranks_are_apart_only_if_all_wait_and_not_in_the_same():
    barrier = stood((C10D, 5000, "barrier"), SCRIPT)
    works = stood(SCRIPT)
    assert mismatch({0: ALL_REDUCE, 1: ALL_REDUCE}) is None
    assert mismatch({0: ALL_REDUCE, 1: works}) is None and mismatch({0: ALL_REDUCE}) is None
    assert mismatch({0: barrier, 1: works, 2: UPDATE}) is None
    two = mismatch({0: ALL_REDUCE, 1: UPDATE})
    assert two is not None and two.odd == {0}  # who waits in our sum is where all should be
    assert two.what == (
        "ranks wait in different collectives: rank 0 in all_reduce (train.py:41), which rank 1 did "
        "not enter; rank 1 in the harness's update (train.py:43), which rank 0 did not enter"
    )
    three = mismatch({0: barrier, 1: UPDATE, 2: barrier})
    assert three is not None and three.odd == {1}
    assert "ranks 0, 2 in barrier (train.py:41), which rank 1 did not enter" in three.what


def test_who_moves_or_computes_between_two_questions_is_not_judged():
    before = StackAnswers(100.0, {0: ALL_REDUCE, 1: UPDATE}, {0: 7.0, 1: 7.0})
    assert StackAnswers(103.0, before.stacks, {0: 7.1, 1: 7.0}).still(before)
    assert not StackAnswers(103.0, before.stacks, {0: 7.1, 1: 9.0}).still(before)  # it sends or receives
    assert not StackAnswers(103.0, {0: ALL_REDUCE, 1: stood(SCRIPT)}, {0: 7.0, 1: 7.0}).still(before)
    assert not before.still(StackAnswers())


# ---- for how long --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step_s", "bound_s"), [(0.1, SURE_S), (4.0, 12.0), (100.0, 60.0)], ids=["quick", "slow", "long"]
)
def test_where_slow_work_is_no_reason_three_steps_are_enough(tmp_path: Path, step_s, bound_s):
    pulse, now = WorkerHeartbeat(tmp_path / "sign", Limits()), 0.0
    worker = ProgressFile(str(pulse.path))
    for step in range(6):
        worker.tell(WorkerPhase.COMPUTE, step)
        pulse.look(now)
        assert pulse.sure_s == (60.0 if step < 3 else bound_s)
        # a validation before one of them does not count
        now += step_s if step != 4 else 50 * step_s
    silent_s = pulse.since_s + bound_s
    assert not pulse.hung(silent_s - 0.1, "T") and pulse.hung(silent_s + 0.1, "T")
    assert not pulse.hung(silent_s + 0.1, "S")
    pulse.forgive(5.0)  # the machine was suspended
    assert not pulse.hung(silent_s + 4.9, "T")


def test_steps_of_the_last_generation_count_until_there_are_new_ones_and_an_order_always(tmp_path):
    assert WorkerHeartbeat(tmp_path / "sign", Limits(), usual_s=4.0).sure_s == 12.0
    assert WorkerHeartbeat(tmp_path / "sign", Limits(hang_after_s=30.0), usual_s=4.0).sure_s == 30.0


def test_ranks_that_are_apart_are_the_scripts_failure():
    def failed(rank: int, text: str) -> WorkerEnd:
        return WorkerEnd(rank, -9, "CollectiveMismatch", text, hung=text, guilty=rank == 0)

    found = [
        Evidence((-9, -9), (failed(0, f"a; {n}"), failed(1, f"a; {n}"))).signature for n in "xy"
    ]
    assert found == ["CollectiveMismatch: a"] * 2


# ---- with real workers ---------------------------------------------------------------------------
TRAINS = """\
import time, torch, torch.distributed as dist, harness
run = harness.attach(seed=0, snapshot_every_steps=2)
class Model(torch.nn.Linear):
    def forward(self, x):
        if COMPILES and run.rank == 1 and run.step == 4 and not seen:
            seen.append(x)
            time.sleep(13.0)
        return super().forward(x)
class Rows(torch.utils.data.Dataset):
    fingerprint = "rows"
    def __len__(self): return 640
    def __getitem__(self, i):
        if SLOW_ROW == i: time.sleep(13.0)
        return torch.full((4,), i / 640)
COMPILES, SLOW_ROW, seen = False, None, []
model = Model(4, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
group = dist.new_group() if run.world > 1 else None
"""
LOOP = """\
for step in run.steps(Rows(), total=TOTAL, global_batch=12, micro_batch=2):
    for x in step:
        step.backward(model(x).square().mean())
    step.update()
    time.sleep(0.05)
"""
ON_RANK_0 = f"""{TRAINS}{LOOP.replace("TOTAL", "30")}
    if step.number == 5 and run.rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
"""
NOT_ON_RANK_1 = f"""{TRAINS}{LOOP.replace("TOTAL", "30")}
    if step.number == 5 and run.rank != 1:
        dist.barrier(group)
"""
LINE = ON_RANK_0.splitlines().index("        dist.all_reduce(torch.ones(3), group=group)") + 1


def facts(run: Path, kind: type[Fact]) -> list[Fact]:
    return [s.fact for s in read_facts(open_store(str(run))) if isinstance(s.fact, kind)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("script", "ranks", "odd", "where", "missing"),
    [
        (ON_RANK_0, 2, 0, f"rank 0 in all_reduce (script.py:{LINE})", "rank 1"),
        (ON_RANK_0, 3, 0, f"rank 0 in all_reduce (script.py:{LINE})", "ranks 1, 2"),
        (NOT_ON_RANK_1, 3, 1, f"ranks 0, 2 in barrier (script.py:{LINE})", "rank 1"),
    ],
    ids=["one of two", "one of three", "all but one"],
)
def test_a_collective_that_not_all_ranks_enter_stops_the_run_and_is_named(
    tmp_path: Path, script, ranks, odd, where, missing
):
    (tmp_path / "script.py").write_text(script)
    run = tmp_path / "run"
    code, said = said_of(train_begin(run, "--nproc", ranks, folder=tmp_path), 150)
    assert code == STOPPED, said
    named = f"{where}, which {missing} did not enter"
    hung = facts(run, WorkerHung)
    assert {h.rank for h in hung if h.guilty} == {odd} and all(named in h.what for h in hung)
    assert len(hung) == 3 * ranks and len(facts(run, EpochStarted)) == 3
    assert [end.why for end in facts(run, EpochLeft)] == ["hung"] * 3
    (ended,) = facts(run, AgentEnded)
    assert "the script failed 3 times in a row at the same point (after step 5)" in ended.reason
    guilty = [f for f in facts(run, WorkerFailed) if f.rank == odd]
    assert [f.error for f in guilty] == ["CollectiveMismatch"] * 3
    stacks = {s.rank: s for s in facts(run, StackSeen) if s.epoch == 1}
    assert sorted(stacks) == list(range(ranks)) and all(s.collective for s in stacks.values())
    post = start("runs", "postmortem", run, 1, env=environment(COLUMNS="1200"))
    code, told = said_of(post)
    assert code == 0 and named in told, told
    for rank in range(ranks):
        assert f"rank {rank} waits in {stacks[rank].collective}: " in told, told
    assert f"script.py:{LINE} <module>" in told, told


ON_ONE_NODE = f"""{TRAINS}{LOOP.replace("TOTAL", "4000")}
    if run.world == 2 and run.rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
"""


@pytest.mark.proof
def test_each_node_of_a_world_tells_where_its_ranks_stand(nodes: Nodes, tmp_path: Path):
    """Neither knows of the other, so none is to blame the script; the record has both."""
    (tmp_path / "script.py").write_text(ON_ONE_NODE)
    for _ in range(2):
        nodes.start(script=tmp_path / "script.py", agent=("--set", "hang_after_s=6"))
    nodes.until(lambda: {s.rank for s in nodes.facts(StackSeen)} == {0, 1})
    stacks = {s.rank: s for s in nodes.facts(StackSeen)}
    assert stacks[0].member != stacks[1].member
    assert stacks[0].collective == f"all_reduce (script.py:{LINE})"
    assert stacks[1].collective.startswith("the harness's ")
    hung = nodes.facts(WorkerHung)
    assert hung and all("it waits in " in h.what for h in hung)
    assert "CollectiveMismatch" not in {f.error for f in nodes.facts(WorkerFailed)}


@pytest.mark.proof
def test_a_stopped_worker_is_found_by_the_time_of_its_steps(tmp_path: Path):
    (tmp_path / "script.py").write_text(f"{TRAINS}{LOOP.replace('TOTAL', '60')}")
    run = tmp_path / "run"
    agent = train_begin(run, folder=tmp_path)
    until(lambda: len(list(run.glob("snapshots/manifests/*.json"))) > 2, "snapshots", of=agent)
    everybody = psutil.Process(agent.pid).children(recursive=True)
    next(p for p in everybody if p.name() == "rank-0").send_signal(signal.SIGSTOP)
    code, said = said_of(agent, 90)
    assert code == 0, said
    (hung,) = facts(run, WorkerHung)
    assert hung.guilty and f"bound {SURE_S:.0f} s (stopped by a signal)" in hung.what


WORKS = f"""{TRAINS}
COMPILES, SLOW_ROW = True, 100
{LOOP.replace("TOTAL", "54")}
    if step.number == 8:
        if run.rank == 0:
            time.sleep(13.0)
        dist.barrier(group)
"""


@pytest.mark.proof
def test_no_hang_is_a_validation_a_compilation_or_a_slow_data_set(tmp_path: Path):
    """Each is much longer than what is enough for ranks that are apart, and the others wait."""
    (tmp_path / "script.py").write_text(WORKS)
    run, node = tmp_path / "run", tmp_path / "node"
    words = environment(HARNESS_NODE_DIR=str(node))
    code, said = said_of(train_begin(run, "--nproc", 2, folder=tmp_path, env=words), 150)
    assert code == 0, said
    assert not facts(run, WorkerHung) and not facts(run, StackSeen)
    assert len(facts(run, SessionStarted)) == 1
    # they were asked, and nobody reads it in the log
    assert "most recent call first" not in said
    assert all("most recent call first" in file.read_text() for file in node.glob("stacks-*"))
