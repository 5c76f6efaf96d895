"""Where a step's time goes: by marks on a clock that is played, and in real sessions on both paths of
the votes, where what a script has slept is found again in its bucket."""

import ast
import gzip
import itertools
import json
import math

import pytest
import torch

from harness.bucket.archive import read_facts
from harness.core.facts import PHASES, ProfileTaken, SessionStarted, StepDone, StepsTimed, Warned
from harness.core.flags import StepsAsked
from harness.core.world import BadInput
from harness.ledger.world_speed import speed_of
from harness.worker.step_log import begun
from harness.worker.step_timing import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    HARNESS,
    OTHER,
    HostMarks,
    PhaseTimer,
    Rates,
)
from storage.stores.store_urls import open_store
from support.worlds import history, train


# ---- a device that is played ---------------------------------------------------------------------
class Device:
    """A host that asks, and a device that does it in order, later. As `timing.Marks`."""

    def __init__(self):
        self.host_s = self.free_s = 0.0  # ... and when the device has done all that it was asked
        self.out = 0  # marks that were not given back

    def sleep(self, seconds):
        self.host_s += seconds

    def ask(self, seconds):
        """Work for the device, which costs the host next to nothing."""
        self.free_s = max(self.free_s, self.host_s) + seconds

    def synchronize(self):
        self.host_s = max(self.host_s, self.free_s)

    def take(self):
        self.out += 1
        return [max(self.free_s, self.host_s)]

    def between(self, a, b):
        assert a and b, "asked of a mark that was given back"
        return b[0] - a[0]

    def wait(self, mark):
        self.host_s = max(self.host_s, mark[0])

    def give_back(self, marks):
        self.out -= len(marks)
        for mark in marks:
            mark.clear()


def run_steps(device, timer, count, *, data=0.0, forward=1.0, backward=2.0, between=lambda: None):
    """Steps whose numbers are looked at one step later: their durations."""
    found = []
    for step in range(1, count + 1):
        timer.begin(step)
        timer.enter(DATA)
        device.sleep(data)
        timer.enter(FORWARD)
        device.ask(forward)
        timer.enter(BACKWARD)
        device.ask(backward)
        timer.enter(COMMUNICATION)
        if step > 1:
            found.append(timer.settle())
        timer.end()
        between()
        timer.enter(HARNESS)
    timer.rest()
    timer.close()
    return found


def test_the_device_is_timed_not_the_host_that_asks_it():
    device = Device()
    timer = PhaseTimer(device)
    assert run_steps(device, timer, 10) == [3.0] * 9  # the host needs no time at all
    seconds, steps, last = timer.take_seconds()
    assert (steps, last, sum(seconds)) == (10, 10, 30.0)
    assert seconds[FORWARD] == 10 and seconds[BACKWARD] == 20
    assert timer.take_seconds() == ([0.0] * len(PHASES), 0, 10)
    assert device.out <= 2  # the same few marks, again and again


def test_a_script_that_waits_for_the_device_changes_no_duration():
    device = Device()
    timer = PhaseTimer(device)
    # `step.loss` after every update: the host waits between two steps for what belongs to one
    assert run_steps(device, timer, 5, between=device.synchronize) == [3.0] * 4
    assert timer.take_seconds()[0][OTHER] == 0


def test_data_counts_where_the_device_runs_dry_for_it():
    hidden, dry = Device(), Device()
    timer = PhaseTimer(hidden)
    run_steps(hidden, timer, 9, data=2.0)
    assert timer.take_seconds()[0][DATA] == 2.0  # the first; the others were read beside the work
    timer = PhaseTimer(dry)
    assert run_steps(dry, timer, 9, data=2.0, between=dry.synchronize) == [5.0] * 8
    seconds, steps, _ = timer.take_seconds()
    assert seconds[DATA] == 18.0 and sum(seconds) == 9 * 5.0 and steps == 9


def test_what_did_not_come_to_its_end_does_not_count():
    device = Device()
    timer = PhaseTimer(device)
    timer.enter(FORWARD)  # no step has begun: a loop of the script's own
    assert timer.settle() is None
    timer.begin(1)
    timer.enter(FORWARD)
    device.ask(5.0)
    timer.rest()  # a break
    timer.close()
    assert timer.take_seconds() == ([0.0] * len(PHASES), 0, 0)
    run_steps(device, timer, 2)
    device.sleep(100.0)  # nobody trains
    assert timer.take_seconds()[:2] == (timer_seconds(forward=2.0, backward=4.0), 2)
    timer.pause(True)
    assert run_steps(device, timer, 3) == [None, None]
    assert timer.take_seconds()[1] == 0


def timer_seconds(**seconds):
    return [seconds.get(phase, 0.0) for phase in PHASES]


def test_the_host_s_clock_needs_no_marks_back():
    timer = PhaseTimer(HostMarks())
    timer.begin(1)
    timer.end()
    assert timer.settle() >= 0
    timer.rest()
    timer.close()
    assert timer.take_seconds()[1] == 1


def test_steps_follow_each_other_on_the_wall_clock():
    # the host was ready at 10.0; the device was busy with the step before until 10.4
    assert begun(10.0, 10.4, most_s=2.0, latest_s=99.0) == 10.4
    assert begun(10.0, 9.0, 2.0, 99.0) == 10.0  # it had been waiting
    assert begun(10.0, 3610.0, 2.0, 99.0) == 10.0  # the clock was set back by an hour
    assert begun(10.0, 10.4, 2.0, latest_s=10.2) == 10.2  # a device whose clock is slow


# ---- what a peak is divided by -------------------------------------------------------------------
CPU = torch.device("cpu")


def test_shares_that_cannot_be_are_refused_once():
    rates = Rates(CPU, 1e12)
    rates.watch(torch.nn.Linear(4, 4), 0, 1e9)
    assert rates.mfu(100, 1.0, 1000) == pytest.approx(0.1)
    assert rates.mfu(100, 0.01, 1000) is None and rates.mfu(100, 0.001, 1000) is None
    assert rates.hfu(1e15, 1.0, 1000) is None
    mfu, hfu = rates.doubts
    assert mfu.startswith("MFU would be 10, wanted at most 1") and hfu.startswith(
        "HFU would be 1e+03"
    )
    assert rates.mfu(100, 0.0, 1000) is None and rates.mfu(100, 1.0, -5) is None


@pytest.mark.parametrize("peak", [0, -1e12, float("nan"), float("inf"), 1e18, 989])
def test_a_peak_that_no_device_has_is_refused(peak):
    with pytest.raises(BadInput, match=r"peak_flops=.*from 1e\+09 to 1e\+17"):
        Rates(CPU, peak)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((0, -1.0), "from 0"),
        ((0, math.nan), "from 0"),
        ((0, math.inf), "from 0"),
        ((-1, 0.0), "tokens_per_sample=-1"),
        ((0, "6PT"), "needs tokens_per_sample"),
        ((7, "6pt"), "wanted a number, '6PT'"),
        ((7, "counted", 2), "each of the 2 ranks of a replica"),
    ],
)
def test_what_no_sample_costs_is_refused(given, why):
    with pytest.raises(BadInput, match=why):
        Rates(CPU).watch(torch.nn.Linear(4, 4), *given)


class Block(torch.nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first, self.again = torch.nn.Linear(8, 8, bias=False), again
        self.rest = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        x = self.first(x)
        if self.again:
            return torch.utils.checkpoint.checkpoint(self.rest, x, use_reentrant=False)
        return self.rest(x)


@pytest.mark.parametrize(("again", "extra"), [(False, 0), (True, 2)])
def test_torch_counts_one_micro_batch(again, extra):
    """2 * 4 * 8 * 8 FLOP for each product: four forward, seven backward (nobody wants the input's
    gradient), and what is computed again (the last product's result is not needed)."""
    rates, model, product = Rates(CPU, 1e12), Block(again), 2 * 4 * 8 * 8
    x = torch.randn(4, 8)
    model(x)  # before anything is given out
    rates.watch(model, 0, "counted")
    for _ in range(2):
        rates.arm()
        model(x).square().mean().backward()
        rates.counted(4)
    assert rates.count is None and not model._forward_pre_hooks and rates.doubts == []
    # of what a step needs, eight products at most are the backward's
    assert rates.flops_per_sample == product * min(11 + extra, 12) / 4
    assert rates.flops_per_micro == product * (11 + extra)


def test_to_be_counted_changes_nothing():
    """Neither gradients nor buffers, nor what is drawn, nor the model's memory of its inputs."""
    found = []
    for how in ("counted", 0.0):
        torch.manual_seed(3)
        model = torch.nn.Sequential(Block(), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        rates, x = Rates(CPU), torch.randn(4, 8)
        rates.watch(model, 0, how)
        for _ in range(2):
            rates.arm()
            model(x).square().mean().backward()
            rates.counted(4)
        found.append([*(p.grad for p in model.parameters()), *model.buffers(), torch.randn(3)])
        assert (rates.flops_per_sample > 0) == (how == "counted")
    assert all(map(torch.equal, *found))


def test_six_times_parameters_times_tokens():
    rates = Rates(CPU)
    rates.watch(Block(), 10, "6PT")
    assert rates.flops_per_sample == 6 * (8 * 8 * 4 + 24) * 10


def test_what_torch_cannot_count_is_told_once():
    rates, model = Rates(CPU), Block()
    model.compile()
    for _ in range(2):
        rates.watch(model, 0, "counted")
    assert rates.count is None and len(rates.doubts) == 1 and "compiled" in rates.doubts[0]
    rates, model = Rates(CPU), Block()
    rates.watch(model, 0, "counted")
    rates.arm()
    model.rest(torch.randn(4, 8)).sum().backward()  # not the model: a part of it
    rates.counted(4)
    assert "no arithmetic was seen" in rates.doubts[0] and rates.flops_per_sample == 0

    class Looks(Block):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    rates, model = Rates(CPU), Looks()
    rates.watch(model, 0, "counted")
    rates.arm()
    model(torch.randn(4, 8)).sum().backward()
    rates.counted(4)
    assert "without data the model raises RuntimeError" in rates.doubts[0]
    assert rates.flops_per_sample == 0


# ---- real sessions -------------------------------------------------------------------------------
SLEEPER = """
import os, time, torch, harness
rank = int(os.environ["RANK"])
slept = {}
def sleep(where, seconds):
    t0 = time.perf_counter()
    time.sleep(seconds)
    slept[where] = slept.get(where, 0.0) + time.perf_counter() - t0

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        sleep("data", 0.002)
        return torch.full((8,), i / 64)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x):
        if x.device.type != "meta":  # where it is only counted
            sleep("forward", 0.01 * (1 + 2 * rank))
        return self.layer(x)
class SGD(torch.optim.SGD):
    def step(self, *a):
        sleep("optimizer", 0.02)
        return super().step(*a)
class Extra:
    def state_dict(self):
        if run.step:  # while a snapshot is taken
            sleep("snapshot", 0.03)
        return {"x": 1}
    def load_state_dict(self, state): pass

run = harness.attach(snapshot_every_steps=4, votes_late=LATE, reduce=REDUCE, peak_flops=1e12)
model = Model()
run.prepare(model, SGD(model.parameters(), lr=0.01), state={"extra": Extra()})
bodies, again, first = 0.0, 0, None
for step in run.steps(Slow(), total=11, global_batch=8, micro_batch=2, tokens_per_sample=5, flops_per_sample="counted"):
    if step.number == 1:
        slept.clear()  # `steps` has looked at a few samples
    t0 = time.perf_counter()
    first = first or t0
    for x in step:
        again += step.attempt > 0
        loss = model(x).square().mean()
        step.backward(loss * (1e9 if step.number == 6 else 1) * (1 + rank))
    step.update(clip_norm=1.0)
    bodies += time.perf_counter() - t0
    sleep("other", 0.02)
    if step.number == 11:
        print(f"rank{rank}=", (bodies, time.perf_counter() - first, again, slept), flush=True)
"""


@pytest.mark.parametrize(
    ("world", "late", "reduce"), [(1, False, "fast"), (2, False, "exact"), (2, True, "exact")]
)
def test_what_a_script_slept_is_found_in_its_bucket(tmp_path, world, late, reduce):
    """And the steps' durations are what the script measures around them: with steps that are done
    again, with snapshots, and (`late`) as on a GPU with numbers that come one step late."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER.replace("LATE", str(late)).replace("REDUCE", repr(reduce)))
    output = train(tmp_path / "run", world, script=script).output
    said = [
        ast.literal_eval(output.partition(f"rank{r}=")[2].split("\n")[0].strip())
        for r in range(world)
    ]
    facts = read_facts(open_store(str(tmp_path / "run")))
    (timed,) = [s.fact for s in facts if isinstance(s.fact, StepsTimed)]
    records = history(tmp_path / "run")
    bodies, wall_s, again, _ = said[0]
    assert (again > 0) == (reduce == "exact")
    assert sum(r.dt for r in records) == pytest.approx(bodies, rel=0.02)
    for before, after in itertools.pairwise(records):
        assert after.t - after.dt >= before.t - 1e-6
    assert (timed.first, timed.last, set(timed.seconds)) == (1, 11, set(PHASES))
    # mean over the ranks, which go in step; the last step's end is not the script's last word
    assert sum(timed.seconds.values()) * 11 >= wall_s * 0.98
    buckets = {phase: seconds * 11 * world for phase, seconds in timed.seconds.items()}
    for phase in ("data", "forward", "optimizer", "snapshot", "other"):
        slept = sum(slept.get(phase, 0.0) for *_, slept in said)
        assert buckets[phase] >= 0.98 * slept > 0, (phase, buckets, said)
    assert timed.samples == 8 and timed.tokens == 40
    if world == 2:  # rank 1 does as much in longer, and rank 0 waits for it
        assert timed.own_ranks == (0, 1) and timed.loss_ranks == (0, 1)
        ahead = said[1][3]["forward"] - said[0][3]["forward"]
        assert buckets["communication"] >= 0.5 * ahead
    assert timed.hfu > 0 and 0 < timed.mfu <= 1
    # a step that is done again is executed twice, and learned from once
    needed = timed.mfu * 12 / 11 if reduce == "exact" else timed.mfu
    assert timed.hfu == pytest.approx(needed, rel=0.01)
    speed = speed_of(facts)
    assert speed.newest.world == world and speed.worlds[0].efficiency == 1
    assert speed.shares["other"] > 0 and speed.tokens_per_s == pytest.approx(40 / speed.step_s)


OFTEN = """
import torch, harness
from harness.worker import step_log as steptimes
steptimes.LEAST_EVERY_S = steptimes.MOST_EVERY_S = 0.0  # after every step
run = harness.attach(snapshot_every_steps=3, votes_late=True)
model = torch.nn.Linear(8, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
for total in (5, 9):
    for step in run.steps(data, total=total, global_batch=4, micro_batch=2):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
run.finish()
"""


def test_every_step_is_told_once_however_often_ranks_tell(tmp_path):
    script = tmp_path / "often.py"
    script.write_text(OFTEN)
    train(tmp_path / "run", 2, script=script)
    facts = [s.fact for s in read_facts(open_store(str(tmp_path / "run")))]
    timed = [f for f in facts if isinstance(f, StepsTimed)]
    assert [s for f in timed for s in range(f.first, f.last + 1)] == list(range(1, 10))
    assert len(timed) >= 8 and all(len(f.own_s) == len(f.loss) == 3 for f in timed)


NONSENSE = """
import torch, harness
run = harness.attach(snapshot_every_steps=5, peak_flops=1e9)
model = torch.nn.Linear(8, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
for step in run.steps(data, total=5, global_batch=4, micro_batch=2, flops_per_sample=1e25):
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
"""


def test_nonsense_is_told_once_and_not_published(tmp_path):
    script = tmp_path / "nonsense.py"
    script.write_text(NONSENSE)
    train(tmp_path / "run", 1, script=script)
    facts = [s.fact for s in read_facts(open_store(str(tmp_path / "run")))]
    assert {f.mfu for f in facts if isinstance(f, StepDone)} == {None}
    assert [f.mfu for f in facts if isinstance(f, StepsTimed)] == [None]
    (warned,) = [f.what for f in facts if isinstance(f, Warned)]
    assert "wanted at most 1" in warned and "peak_flops" in warned
    assert any(isinstance(f, SessionStarted) for f in facts)


# ---- profiles ------------------------------------------------------------------------------------
PLAIN = """
import torch, harness
run = harness.attach(snapshot_every_steps=5)
model = torch.nn.Linear(8, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
for step in run.steps(data, total=6, global_batch=4, micro_batch=2):
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
"""


def profiled(tmp_path, asked, world=1):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    train(tmp_path / "run", world, script=script, env={"HARNESS_PROFILE": asked})
    store = open_store(str(tmp_path / "run"))
    assert [r.step for r in history(tmp_path / "run")] == list(range(1, 7))
    return store, [s.fact for s in read_facts(store)]


def test_a_profile_of_some_steps_is_in_the_bucket_by_rank(tmp_path):
    store, facts = profiled(tmp_path, "3:4", world=2)
    taken = sorted((f for f in facts if isinstance(f, ProfileTaken)), key=lambda f: f.rank)
    assert [(f.epoch, f.rank, f.first, f.last) for f in taken] == [(1, 0, 3, 4), (1, 1, 3, 4)]
    for fact in taken:
        (key,) = fact.keys
        assert key == f"profiles/e000001/r0000{fact.rank}-0000000003-0000000004.trace.json.gz"
        data = store.get(key)
        events = json.loads(gzip.decompress(data))["traceEvents"]
        assert len(data) == fact.nbytes
        assert [e["name"] for e in events if "Optimizer.step" in e.get("name", "")] == (
            ["Optimizer.step#SGD.step"] * 2
        )


def test_a_profile_that_goes_beyond_the_end_is_of_the_steps_there_were(tmp_path):
    _, facts = profiled(tmp_path, "6:99")
    (fact,) = [f for f in facts if isinstance(f, ProfileTaken)]
    assert (fact.first, fact.last) == (6, 6)


def test_what_cannot_be_profiled_stops_no_training(tmp_path):
    _, facts = profiled(tmp_path, "3:4000")
    (warned,) = [f.what for f in facts if isinstance(f, Warned)]
    assert "no profile is taken" in warned and "at most 100 steps, found 3998" in warned


@pytest.mark.parametrize("text", ["", "x", "0:3", "4:3", "1:2:3", "-1", "1:"])
def test_steps_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="such as 20 or 20:23"):
        StepsAsked.parse(text)


def test_steps_are_named_by_their_first_and_last():
    assert StepsAsked.parse("20:23") == StepsAsked(20, 23)
    assert StepsAsked.parse(" 7 ") == StepsAsked(7, 7)
