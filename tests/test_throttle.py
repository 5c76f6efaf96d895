"""How hard sending presses the training: the throttle alone, on simulated machines, and the
uploader that obeys it."""

import threading
import time

import pytest
from test_upload import R1, R2, VIEW, WAIT_S, Told, job, until

from harness.core.facts import SnapshotCommitted
from harness.node.progress import ProgressFile, WorkerPhase
from harness.uploader.client import Local
from storage import MemoryStore
from storage.throttle import SAFE, Throttle, levels
from storage.upload import Uploader

LEVELS = levels(4, 8)


def drive(slowdowns, rates, windows=40, throttle=None):
    """A machine on which level n slows steps by slowdowns[n] and sends rates[n] bytes per
    second. The levels it went through."""
    throttle = throttle or Throttle(len(slowdowns))
    seen = []
    for _ in range(windows):
        level = throttle.allowed(1.0, 1e9)
        seen.append(level)
        throttle.observe(level, slowdowns[level], 1000, 1000 / rates[level])
    return seen


def test_levels_halve_the_puts_then_the_requests():
    assert LEVELS == ((4, 8), (2, 8), (1, 8), (1, 4), (1, 2), (1, 1))
    assert levels(3, 1) == ((3, 1), (1, 1)) and levels(1, 1) == ((1, 1),)


@pytest.mark.parametrize(
    ("slowdowns", "rates", "best"),
    [
        ((0.0, 0.0, 0.0), (100, 90, 50), 0),  # nobody is disturbed
        ((0.6, 0.02, 0.0), (100, 80, 50), 1),  # a core is left for the training from here on
        ((0.6, 0.4, 0.02), (100, 90, 45), 2),
        ((0.6, 0.28, 0.13), (100, 50, 25), 0),  # half as slow for twice as long: nothing is gained
        ((0.3, 0.3, 0.3), (100, 50, 25), 0),  # it is not our doing
    ],
)
def test_it_settles_where_training_loses_least_per_byte(slowdowns, rates, best):
    seen = drive(slowdowns, rates)
    assert seen[0] == 0 and seen.count(best) >= 30


def test_it_returns_to_full_speed_when_nobody_is_disturbed_any_more():
    throttle = Throttle(3)
    assert drive((0.5, 0.4, 0.0), (100, 90, 80), throttle=throttle)[-1] == 2
    assert drive((0.0, 0.0, 0.0), (100, 90, 80), 60, throttle)[-1] == 0


def test_it_never_makes_a_snapshot_late():
    throttle = Throttle(3)
    drive((0.5, 0.4, 0.0), (100, 80, 40), throttle=throttle)
    assert throttle.level == 2
    assert throttle.allowed(1000, 1000 / 40 / SAFE + 1) == 2
    assert throttle.allowed(1000, 1000 / 40) == 1  # it would just end in time, or not
    assert throttle.allowed(1000, 1000 / 80) == 0
    assert throttle.allowed(1000, -1.0) == 0
    assert Throttle(3).allowed(1000, 1e9) == 0


def test_a_level_that_was_never_tried_is_expected_to_be_half_as_fast():
    throttle = Throttle(4)
    assert throttle.rate(0) is None
    throttle.observe(0, 0.5, 1000, 10.0)
    assert (throttle.rate(0), throttle.rate(1), throttle.rate(3)) == (100, 50, 12.5)
    throttle.observe(9, 0.5, 1000, 10.0)  # no such level
    throttle.observe(1, 0.5, 0, 10.0)  # nothing was sent: that says nothing
    assert throttle.rate(1) == 50


class Slow(MemoryStore):
    """Puts take a moment; they could be made of so many requests."""

    puts_at_once, put_s = 2, 0.01

    def put(self, key, data):
        if "/parts/" in key:
            time.sleep(self.put_s)
        super().put(key, data)


class Training:
    """Does a step at every look, but never as fast as it says it did before."""

    def __init__(self):
        self.steps, self.waits, self.looked = 0, False, threading.Event()

    def __call__(self, where):
        assert where == "here"
        self.steps += 1
        self.looked.set()
        return self.steps, self.waits


def watched(ref=R1, **more):
    return job(ref, nbytes=1, n=4000, step_s=1e-3, watch="here", **{"within_s": 1e6, **more})


def test_less_is_sent_at_once_beside_a_slow_training_and_all_when_it_matters():
    store, told, training = Slow(objects={}), Told(), Training()
    uploader = Uploader(store, watch=training)
    uploader.submit(watched(), VIEW, told)
    until(lambda: uploader._lanes.limit < 4)
    assert 0 < uploader._pacer.level <= uploader.throttle.level
    training.waits = True  # for a snapshot: it stands still
    until(lambda: uploader._lanes.limit == 4 and store.puts_at_once == 2)
    training.waits = False
    until(lambda: uploader._lanes.limit < 4)
    uploader.drain(time.monotonic() + 10 * WAIT_S)
    assert (uploader._lanes.limit, store.puts_at_once, uploader._pacer.level) == (4, 2, 0)  # at once
    uploader.drain(None)
    store.put_s = 0.0  # all is seen
    outcome = told.wait()
    assert (
        outcome.state == "committed" and outcome.slowdown > 0 and outcome.requests in (1, 2, 4, 8)
    )


def test_what_may_not_take_longer_is_sent_at_full_speed():
    store, told, training = Slow(objects={}), Told(), Training()
    uploader = Uploader(store, watch=training)
    for _ in range(3):
        uploader.throttle.observe(uploader.throttle.level, 0.5, 1000, 10.0)
    assert uploader.throttle.level > 0
    uploader.submit(job(R1, n=8, within_s=0.0, watch="here", step_s=1e-3), VIEW, told)
    assert uploader._pacer.level == 0 and told.wait().requests == 8
    assert not training.looked.is_set()  # nobody needs to
    uploader.submit(watched(R2), VIEW, told)
    assert uploader._pacer.level > 0  # what was learnt is used
    store.put_s = 0.0  # all is seen
    uploader.drain(time.monotonic() + 10 * WAIT_S)
    assert told.wait(2).state == "committed"


def test_a_session_of_its_own_is_watched_without_a_file(tmp_path):
    progress, told = ProgressFile(None), Told()
    progress.tell(WorkerPhase.COMPUTE, 7)
    local = Local(MemoryStore(objects={}), lambda job, outcome: None, progress)
    assert local._uploader._pacer._watch("here") == (7, False)
    progress.tell(WorkerPhase.SAVING)
    assert local._uploader._pacer._watch("here") == (7, True)
    local.send(job(), local.segment(4000), told)
    assert told.wait().state == "committed"
    assert SnapshotCommitted(1, 1, 1, 0.1, 0.2, "interval", 0.0).slowdown == 0.0
