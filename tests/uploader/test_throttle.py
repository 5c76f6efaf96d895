"""How fast a snapshot is sent: the search for a rate alone, on simulated machines, the gate, and the
uploader that obeys it."""

import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from harness.core.facts import SnapshotCommitted
from harness.node.heartbeat import ProgressFile, WorkerPhase
from harness.uploader.handoff import InProcessSender, UploaderClient, UploaderConnection
from storage import MemoryStore, Snapshots, open_store
from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.pacer import (
    AT_NICE,
    FIRST,
    LAST,
    LEAST_RATE,
    SAFE,
    SHY_WINDOWS,
    IdlePriority,
    Pacer,
    RateSearch,
    TokenBucket,
    TrainingSeen,
    can_come_back,
    slowdown,
    typical_s,
)
from storage.snapshots.staging import Stage
from storage.snapshots.upload import Ahead, Running, TrainingBeside, Uploader, UploadPool
from storage.stores.objects import PutsPaced, put_paced
from storage.stores.retries import Retrying
from support.uploads import R1, R2, VIEW, WAIT_S, Told, job, start_uploader
from support.worlds import until

MB = 1 << 20
LARGE = memoryview(os.urandom(MB) * 16)
LARGE40 = b"".join(os.urandom(8) + bytes(MB - 8) for _ in range(40))
PACED = functools.partial(TrainingBeside, watch="here")  # (step_s, within_s, pace)


# ---- the search ----------------------------------------------------------------------------------
class Machine:
    """Steps take `base_s`, and longer by a tenth for each `felt_at` bytes per second above that.
    The store takes `most` bytes per second."""

    def __init__(self, felt_at, base_s=0.5, noise=0.0, most=math.inf, seed=1):
        self.felt_at, self.base_s, self.noise, self.most = felt_at, base_s, noise, most
        self.rng, self.lost_s, self.now = random.Random(seed), 0.0, 0.0

    def snapshot(self, search, nbytes, within_s):
        """Seconds until it is durable, and the rates that were tried."""
        began, left, rates = self.now, float(nbytes), []
        while left > 0:
            pace = search.allowed(left, SAFE * within_s - (self.now - began))
            rate = min(pace, self.most)
            longer = 0.1 * max(0.0, rate - self.felt_at) / self.felt_at
            step_s = self.base_s * (1 + longer) * max(0.5, self.rng.gauss(1.0, self.noise))
            sent = min(left, rate * step_s)
            left, self.now = left - sent, self.now + step_s
            self.lost_s += step_s - self.base_s
            rates.append(rate)
            search.observe(step_s, self.base_s, round(sent), 1, pace)
        return self.now - began, rates


def test_it_finds_what_is_not_felt_and_stays_below():
    machine, search = Machine(felt_at=200 * MB), RateSearch()
    taken = [machine.snapshot(search, 1000 * MB, 60.0) for _ in range(60)]
    assert taken[0][0] <= 60 and all(seconds <= 60 for seconds, _ in taken)
    late = [rate for _, rates in taken[-20:] for rate in rates]
    assert 0.5 * machine.felt_at < min(late) and max(late) < 1.3 * machine.felt_at
    felt = sum(rate > 1.2 * machine.felt_at for rate in late)  # by more than two percent
    assert felt <= 0.1 * len(late)
    # a sixtieth of the time or less, and in far less than it may take
    assert machine.lost_s < 0.02 * machine.now and taken[-1][0] < 15


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_not_taken_for_what_is_felt(seed):
    machine, search = Machine(200 * MB, noise=0.1, seed=seed), RateSearch()
    taken = [machine.snapshot(search, 1000 * MB, 60.0) for _ in range(60)]
    assert all(seconds <= 60 * 1.05 for seconds, _ in taken)
    late = [rate for _, rates in taken[-20:] for rate in rates]
    assert sum(late) / len(late) > 1000 * MB / (60 * SAFE)  # more than it had to
    assert sum(rate > 1.5 * machine.felt_at for rate in late) < 0.05 * len(late)


def test_it_follows_a_machine_that_gets_slower_and_faster():
    machine, search = Machine(felt_at=200 * MB), RateSearch()
    for felt_at, snapshots in ((200 * MB, 30), (40 * MB, 30), (400 * MB, 120)):
        machine.felt_at = felt_at
        for _ in range(snapshots):
            seconds, rates = machine.snapshot(search, 600 * MB, 60.0)
            assert seconds <= 60
        assert 0.5 * felt_at < rates[-1] < 1.3 * felt_at


def test_it_is_never_late_whatever_is_felt():
    machine, search = Machine(felt_at=10 * MB, base_s=0.02), RateSearch()
    for within_s in (10.0, 60.0, 5.0, 600.0):
        for _ in range(5):
            seconds, _ = machine.snapshot(search, 1000 * MB, within_s)
            assert seconds <= within_s + 1.0  # the last step beside it
    assert search.allowed(1000, 0.0) == math.inf and search.allowed(1000, -3.0) == math.inf
    assert search.allowed(80 * MB, 2.0) >= 40 * MB


def test_what_a_slow_store_takes_is_what_is_learned():
    machine, search = Machine(felt_at=900 * MB, most=20 * MB), RateSearch(500 * MB)
    for _ in range(5):
        machine.snapshot(search, 1000 * MB, 60.0)
    assert search.rate == 500 * MB  # nothing was felt, and nothing was tried out
    search = RateSearch()
    for _ in range(5):
        machine.snapshot(search, 1000 * MB, 60.0)
    assert search.rate < 3 * machine.most


def test_a_rate_that_was_felt_is_approached_in_small_steps():
    search = RateSearch()
    for n in range(SHY_WINDOWS + 2):
        pace = search.rate or 100 * MB
        for _ in range(5):
            search.observe(1.5 if n == 0 else 1.0, 1.0, round(2 * pace), 1, pace)
        assert search.rate < (1.1 if n <= SHY_WINDOWS else 2) * pace
    assert search.rate > 1.4 * pace  # nothing was felt for long
    assert RateSearch(7.0).allowed(0, 1.0) == 7.0


@pytest.mark.parametrize(
    "wrong", [(0.0, 1.0, 1, 1, 1.0), (1.0, 0.0, 1, 1, 1.0), (1.0, 1.0, 1, 1, math.inf), (1.0, 1.0, 1, 1, 0.0)]
)
def test_what_says_nothing_is_passed_over(wrong):
    search = RateSearch()
    for _ in range(100):
        search.observe(*wrong)
    assert search.rate == 0


def test_little_that_was_sent_says_nothing_yet():
    search = RateSearch()
    for _ in range(15):
        search.observe(2.0, 1.0, MB, 1, MB / 2)
    assert search.rate == 0  # a request is larger
    search.observe(2.0, 1.0, MB, 1, MB / 2)
    assert search.rate == pytest.approx(0.6 * MB / 2)


def test_what_steps_take_and_how_much_longer():
    assert typical_s([1.0, 1.1, 0.9, 50.0]) == pytest.approx(1.0)
    assert slowdown([1.2] * 5, 1.0) == pytest.approx(0.2)
    assert slowdown([1.2] * 4, 1.0) == slowdown([], 1.0) == slowdown([1.2] * 9, 0.0) == 0.0
    assert slowdown([1.4, 0.8, 1.1, 0.9, 1.2], 1.0) == 0.0  # nobody can tell
    assert slowdown([0.9] * 5, 1.0) == 0.0


# ---- the bucket and the gate ---------------------------------------------------------------------
def test_each_taker_waits_for_those_before_it():
    bucket = TokenBucket(100.0)
    assert bucket.wait_s(bucket.take(10**9, 100.0), 100.0) == 0.0  # full speed
    bucket.set(10.0, 100.0)
    first, second, third = (bucket.take(20, 100.0) for _ in range(3))
    assert [bucket.wait_s(turn, 100.0) for turn in (first, second, third)] == [0.0, 2.0, 4.0]
    assert [bucket.wait_s(turn, 101.0) for turn in (first, second, third)] == [0.0, 1.0, 3.0]
    bucket.set(40.0, 101.0)
    assert bucket.wait_s(third, 101.0) == 0.75
    bucket.set(math.inf, 101.5)
    assert bucket.wait_s(third, 101.5) == 0.0
    bucket.set(10.0, 101.5)
    assert bucket.wait_s(bucket.take(5, 1000.0), 1000.0) == 0.0  # and nothing was saved up
    assert bucket.wait_s(bucket.take(5, 1000.0), 1000.0) == 0.5


class Training:
    """Says what it is told to say."""

    def __init__(self, steps=0, waits=False):
        self.seen, self.looks = TrainingSeen(steps, waits, 0.0), 0

    def __call__(self, where):
        assert where == "here"
        self.looks += 1
        return self.seen


def running(one):
    return Running(one, VIEW, lambda outcome: None, 0, one.nbytes, time.monotonic())


def pacer(training, *jobs, now=time.monotonic):
    sending = [running(one) for one in jobs]
    line = IdlePriority()
    return Pacer(UploadPool(4, line), lambda: sending, training, line, now), sending


def test_the_rate_follows_from_the_time_and_all_jobs():
    made, sending = pacer(Training(), job(nbytes=2 * MB, beside=PACED(1.0, 1000.0)))
    assert not made.paced
    made.begin(sending[0])
    assert made.paced and made._lanes.paced and made.rate == LEAST_RATE
    sending.append(running(job(nbytes=1 << 30, beside=PACED(1.0, 1000.0))))
    made.set()
    assert made.rate == pytest.approx(1.2 * 4 * ((1 << 30) + 2 * MB) / (1000 * SAFE), rel=0.01)
    sending.append(running(job(R2)))  # who waits for that?
    made.set()
    assert not made.paced and not made._lanes.paced
    sending.clear()
    made.set()
    assert not made.paced


@pytest.mark.parametrize("how", ["drained", "waited for", "gone", "over"])
def test_who_is_at_the_gate_is_let_through_when_it_matters(how):
    training, at = Training(), [1000.0]
    big = job(nbytes=1 << 40, beside=PACED(1.0, 1e9))
    made, sending = pacer(training, big, now=lambda: at[0])
    sending[0].t_start = at[0]
    made.begin(sending[0])
    through = []
    made.gate(1 << 40)  # the first goes at once

    def second():
        through.append(made.gate(1))

    waiting = threading.Thread(target=second)
    waiting.start()
    until(lambda: made._bucket._taken > 1 << 40)
    assert not through and made.paced
    if how == "drained":
        made.draining = True
        made.set()
    elif how == "over":
        at[0] += 1e9
    else:
        training.seen = TrainingSeen(5, True, 1.0) if how == "waited for" else None
    waiting.join(WAIT_S)
    assert through == [False]
    sending.clear()
    until(lambda: not made._looking)


class Places(IdlePriority):
    def stand(self, place):
        self.at = place


def test_who_is_behind_does_not_stay_last_in_line():
    at, line = [0.0], Places()
    one = running(job(nbytes=1 << 30, beside=PACED(1.0, 100.0)))
    one.t_start = 0.0
    made = Pacer(UploadPool(4, line), lambda: [one], Training(), line, lambda: at[0])
    told = []
    for now, left in ((0, 1.0), (20, 1.0), (40, 1.0), (40, 0.6), (79, 0.1), (81, 0.1), (81, 1e-4)):
        at[0], one.left = float(now), round(left * (1 << 32))
        made.set()
        told.append((line.at, made.paced))
    assert told == [
        (LAST, True), (LAST, True), (AT_NICE, True), (LAST, True), (AT_NICE, True),
        (FIRST, False), (AT_NICE, False),
    ]  # fmt: skip
    made.draining = True
    made.set()
    assert line.at == FIRST


def test_a_pace_that_was_learned_is_used_by_the_same_world_only():
    made, sending = pacer(Training(), job(nbytes=1 << 30, beside=PACED(1.0, 1e9, 5e6)))
    made.begin(sending[0])
    assert made.rate == 5e6
    made.search.rate = 7e6  # learned here
    made.begin(sending[0])
    assert made.rate == 7e6
    sending[:] = [running(job(world=2, nbytes=1 << 30, beside=PACED(1.0, 1e9)))]
    made.begin(sending[0])
    assert made.rate == LEAST_RATE
    sending.clear()


def test_steps_beside_the_sending_are_counted_from_end_to_end():
    made, (one,) = pacer(Training(), job(nbytes=1 << 30, beside=PACED(1.0, 1e3, 1e6)))
    one.t_start, last = made._now(), None
    for steps, t_s in ((7, 3.0), (8, 4.5), (8, 4.5), (9, 6.0), (11, 8.0)):
        made._watch.seen = TrainingSeen(steps, False, t_s)
        last = made._look_at(one, last)
    assert one.steps_s == [1.5, 1.0]  # of step 8 nobody knows how much was beside it


# ---- who sends -----------------------------------------------------------------------------------
class Pieces(MemoryStore):
    """Takes an object piece by piece, and remembers them. Fails once after so many."""

    def __init__(self, fail_after=None, piece=100):
        super().__init__(objects={})
        self.pieces, self.fail_after, self.piece = [], fail_after, piece

    def put_paced(self, key, data, gate):
        for at in range(0, len(data), self.piece):
            self.pieces.append((key, gate(len(data[at : at + self.piece]))))
            if self.fail_after is not None and len(self.pieces) > self.fail_after:
                self.fail_after = None
                raise StoreUnavailable("no answer")
        self.put(key, data)


@pytest.mark.parametrize("wrap", [lambda s: s, Retrying, lambda s: Retrying(Retrying(s))])
def test_what_is_paced_goes_piece_by_piece_through_wrappers(wrap):
    inner, asked = Pieces(fail_after=1), []
    store = wrap(inner)
    assert isinstance(store, PutsPaced)
    data = bytes(range(250))
    if store is inner:
        with pytest.raises(StoreUnavailable):
            put_paced(store, "k", data, lambda n: asked.append(n) or True)
        assert inner.list("") == []
    put_paced(store, "k", data, lambda n: asked.append(n) or True)
    assert inner.get("k") == data
    assert asked[-3:] == [100, 100, 50]


def test_time_at_the_gate_is_no_silence_of_the_store():
    store = Retrying(Pieces(fail_after=2), within_s=0.2)
    put_paced(store, "k", bytes(250), lambda n: time.sleep(0.1) or True)  # it fails at 0.3 s
    assert store.get("k") == bytes(250)


def test_a_store_without_pieces_takes_whole_objects():
    store, asked = MemoryStore(objects={}), []
    put_paced(store, "k", b"abc", lambda n: asked.append(n) or True)
    assert asked == [3] and store.get("k") == b"abc"
    with pytest.raises(StoreError, match="stop"):
        put_paced(store, "other", b"abc", never)
    assert store.list("") == ["k"]


def never(nbytes):
    raise StoreError("stop")


def test_what_is_left_is_right_whatever_happens_on_the_way():
    lanes, store = UploadPool(2, IdlePriority()), Retrying(Pieces(fail_after=7))
    one = running(job(nbytes=250, n=4))
    lanes.paced = True
    left = []

    def gate(nbytes):
        left.append(one.left)
        return True

    ahead = Ahead(store, lanes, one, lambda one: None, gate)
    for n in range(3):  # of four: one is as it was
        ahead.put(f"parts/{n}", VIEW[n * 250 : (n + 1) * 250])
    assert ahead.list("") == [f"parts/{n}" for n in range(3)]
    assert one.left == 0 and all(0 <= n <= 1000 for n in left)
    broken = Ahead(Pieces(fail_after=1), lanes, one, lambda one: None, gate)
    one.left = one.job.nbytes
    broken.put("parts/x", VIEW[:1000])
    with pytest.raises(StoreUnavailable):
        broken.list("")
    assert one.left == 1000


def test_lanes_send_one_thing_at_a_time_and_learn_nothing_while_paced():
    lanes, gate, at_once, most = UploadPool(4, IdlePriority()), threading.Event(), [0], [0]
    lock = threading.Lock()

    def task(nbytes=10**12):
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        gate.wait(WAIT_S)
        with lock:
            at_once[0] -= 1
        return nbytes

    guess, lanes.paced = lanes.nbytes_per_s, True
    futures = [lanes.submit(R1, task) for _ in range(6)]
    until(lambda: at_once[0] == 1)
    assert most[0] == 1 and lanes.nbytes_per_s == guess
    lanes.paced = False  # at once
    until(lambda: at_once[0] == 4)
    lanes.paced = True
    gate.set()
    for future in futures:
        future.result(WAIT_S)
    until(lambda: lanes._busy == 0)
    assert lanes.nbytes_per_s == guess
    lanes.paced = False
    lanes.submit(R1, task).result(WAIT_S)
    until(lambda: lanes._busy == 0)
    assert lanes.nbytes_per_s > guess


def test_a_paced_snapshot_is_sent_at_once_when_there_is_a_deadline():
    store, told, training = Pieces(piece=1 << 18), Told(), Training()
    uploader = Uploader(store, watch=training)
    # at the least rate it would take four minutes
    uploader.submit(job(beside=PACED(1.0, 1e6, 1.0), nbytes=4 << 20), LARGE, told)
    until(lambda: training.looks > 2)
    assert uploader._pacer.paced and uploader._lanes.paced and not told.outcomes
    uploader.drain(time.monotonic() + 10 * WAIT_S)
    outcome = told.wait()
    assert outcome.state == "committed" and outcome.pace == 1.0 and outcome.slowdown == 0.0
    assert not uploader._pacer.paced
    Snapshots(store).verify(Snapshots(store).latest())
    uploader.drain(None)
    uploader.submit(job(R2, nbytes=2000, beside=TrainingBeside(1.0)), VIEW, told)
    assert told.wait(2).state == "committed"  # full speed is what it is without a time


def test_what_was_not_felt_is_learned_and_told():
    def steady(where):  # a step every tenth of a second, whatever we do
        steps = int(time.monotonic() * 10)
        return TrainingSeen(steps, False, steps / 10)

    store, told = Pieces(piece=1 << 20), Told()
    uploader = Uploader(store, watch=steady)
    uploader.submit(job(beside=PACED(0.1, 8.0), nbytes=10 << 20), memoryview(LARGE40), told)
    outcome = told.wait()
    assert outcome.state == "committed" and outcome.slowdown == 0.0
    assert outcome.pace > 1.2 * (40 << 20) / (SAFE * 8.0)  # more than it had to
    assert uploader.nbytes_per_s > 0.6 * outcome.pace
    fresh = Uploader(MemoryStore(objects={}), watch=Training())  # of a node that was restarted
    again = running(job(R2, nbytes=1 << 30, beside=PACED(0.1, 1e6, outcome.pace)))
    fresh._running[0] = again
    fresh._pacer.begin(again)
    assert fresh._pacer.rate == outcome.pace
    fresh._running.clear()


def test_out_of_time_in_the_middle_of_a_paced_object_leaves_nothing():
    store, told = Pieces(piece=1 << 18), Told()
    uploader = Uploader(store, watch=Training(), lanes=1)
    uploader.submit(job(beside=PACED(1.0, 1e9), nbytes=5 << 20, n=1), LARGE, told)
    until(lambda: store.pieces)
    uploader.drain(time.monotonic())  # it is over
    assert told.wait().kind == "OutOfTime"
    assert Snapshots(store).latest() is None and not store.list("snapshots/manifests/")


def test_a_session_of_its_own_is_watched_without_a_file(tmp_path):
    progress, told = ProgressFile(None), Told()
    progress.tell(WorkerPhase.COMPUTE, 7)
    local = InProcessSender(MemoryStore(objects={}), lambda job, outcome: None, progress)
    seen = local._uploader._pacer._watch("here")
    assert (seen.steps, seen.waits) == (7, False) and 0 < seen.t_s <= time.monotonic()
    progress.tell(WorkerPhase.SAVING)
    assert local._uploader._pacer._watch("here") == TrainingSeen(7, True, seen.t_s)
    local.send(job(), local.segment(4000), told)
    assert told.wait().state == "committed"
    assert SnapshotCommitted(1, 1, 1, 0.1, 0.2, "interval", 0.0).slowdown == 0.0


# ---- last in line --------------------------------------------------------------------------------
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")


@linux
def test_members_wait_for_others_and_come_back():
    line, places, go = IdlePriority(10, idle=True), [], threading.Event()
    if not can_come_back(10):
        pytest.skip("this user may not raise a priority")

    def scheduling():
        me = threading.get_native_id()
        return os.sched_getscheduler(me), os.getpriority(os.PRIO_PROCESS, me)

    def member():
        with line.member():
            for place in (LAST, FIRST, AT_NICE):
                line.stand(place)
                places.append(scheduling())
        go.set()

    threading.Thread(target=member).start()
    assert go.wait(WAIT_S) and line._members == set()
    assert places == [(os.SCHED_IDLE, 10), (os.SCHED_OTHER, 0), (os.SCHED_OTHER, 10)]
    assert scheduling()[0] == os.SCHED_OTHER  # who is no member stays


@linux
def test_who_was_started_by_a_member_comes_back_with_it():
    if not can_come_back():
        pytest.skip("this user may not raise a priority")
    line, told, over = IdlePriority(idle=True), [], threading.Event()

    def member():
        with line.member():
            line.stand(LAST)
            child = threading.Thread(target=over.wait, args=(WAIT_S,))
            child.start()  # as a pool's thread is
            for place in (LAST, FIRST):
                line.stand(place)
                told.append(os.sched_getscheduler(child.native_id))
            over.set()

    thread = threading.Thread(target=member)
    thread.start()
    thread.join(WAIT_S)
    assert told == [os.SCHED_IDLE, os.SCHED_OTHER]


@linux
def test_cores_that_trainers_are_bound_to_are_left_to_them():
    every = os.sched_getaffinity(0)
    if len(every) < 2 or not can_come_back():
        pytest.skip("there is one processor, or priorities stay down")
    line, seen, theirs = IdlePriority(idle=True), [], min(every)
    trainer = subprocess.Popen(["taskset", "-c", str(theirs), "sleep", str(WAIT_S)])
    try:
        until(lambda: os.sched_getaffinity(trainer.pid) == {theirs})
        line.trainers = {trainer.pid}

        def member():
            with line.member():
                for place in (LAST, FIRST):
                    line.stand(place)
                    seen.append(os.sched_getaffinity(threading.get_native_id()))

        thread = threading.Thread(target=member)
        thread.start()
        thread.join(WAIT_S)
        assert seen == [every - {theirs}, every]
    finally:
        trainer.kill()
        trainer.wait()


# ---- the process ---------------------------------------------------------------------------------
def schedulers(pid):
    found = set()
    for tid in os.listdir(f"/proc/{pid}/task"):
        try:
            found.add(os.sched_getscheduler(int(tid)))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "how",
    ["a notice", *(pytest.param(h, marks=pytest.mark.proof) for h in ("the end", "a worker that dies"))],
)
def test_a_paced_upload_of_a_real_process_is_finished_at_once(tmp_path, how):
    """It would take minutes; the drain, the wait or the death of the worker ends that."""
    stage, run = Stage(tmp_path, 1 << 30), f"file://{tmp_path}/run"
    progress, told = ProgressFile(str(tmp_path / "progress")), Told()
    progress.tell(WorkerPhase.COMPUTE, 3)
    uploader = start_uploader(stage.folder, run)
    local = InProcessSender(open_store(run), lambda job, outcome: None)
    beside = TrainingBeside(0.1, 200.0, 0.0, progress.path)
    try:
        if how == "a worker that dies":
            words = [sys.executable, "-c", DIES, str(stage.folder), run, progress.path]
            worker = subprocess.run(words)
            assert worker.returncode == -signal.SIGKILL
        else:
            remote = UploaderClient(stage.folder, 1, 0, local)
            segment = remote.segment(16 << 20)
            segment.view[:] = LARGE
            remote.send(job(nbytes=16 << 20, n=1, beside=beside), segment, told)
            agent = UploaderConnection(stage.folder)
            until(lambda: list((tmp_path / "run").rglob("*.tmp")))  # in the middle of an object
            assert agent.ask("busy")["busy"] == 1 and not told.outcomes
            if sys.platform.startswith("linux") and can_come_back(10):
                until(lambda: os.SCHED_IDLE in schedulers(uploader.pid))
            if how == "a notice":
                agent.ask("drain", deadline_s=time.time() + WAIT_S)
            else:
                progress.tell(WorkerPhase.SAVING)
            until(lambda: told.outcomes, within_s=60)
            assert told.outcomes[0].state == "committed"
            if sys.platform.startswith("linux"):
                assert schedulers(uploader.pid) == {os.SCHED_OTHER}
            agent.close()
        snapshots = Snapshots(open_store(run))
        until(lambda: snapshots.latest() is not None)
        snapshots.verify(snapshots.latest())
    finally:
        uploader.stdin.close()
        uploader.wait(WAIT_S)
        stage.close()
    assert not list((tmp_path / "run").rglob("*.tmp"))


DIES = """
import os, signal, sys
from pathlib import Path
from support.uploads import job
from harness.uploader.handoff import InProcessSender as Local, UploaderClient as Remote
from storage import open_store
from storage.snapshots.upload import TrainingBeside
remote = Remote(Path(sys.argv[1]), 1, 0, Local(open_store(sys.argv[2]), lambda job, outcome: None))
segment = remote.segment(64 << 20)
segment.view[:] = os.urandom(1 << 20) * 64
beside = TrainingBeside(0.1, 1e7, 0.0, sys.argv[3])
remote.send(job(nbytes=16 << 20, beside=beside), segment, lambda outcome: None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_jobs_carry_the_training_beside_them():
    from storage.snapshots.upload import UploadJob

    one = job(beside=TrainingBeside(0.1, 2.0, 3.0, "x"))
    assert UploadJob.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert one.beside.may_last
    assert not TrainingBeside(0.1, 2.0).may_last and not TrainingBeside(watch="x").may_last
