"""Whatever order compactors, readers, writers and crashes come in: every fact is read once."""

import contextlib
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.bucket import archive, volumes
from harness.bucket.archive import Compactor, read_facts, read_past
from harness.bucket.journal import Follower, Journal
from harness.bucket.volumes import DamagedArchive
from harness.core import facts as f
from harness.core import step_records
from storage.errors import NotFound, StoreUnavailable
from storage.stores.folder_store import FileStore, MemoryStore
from support.archives import names
from support.half_store import HalfAtFirst


class Died(BaseException):
    pass


class Turns:
    """One store operation at a time, of the actor whom `choose` names; each runs in a thread."""

    def __init__(self, store, choose):
        self.store, self.choose = store, choose
        self.waiting, self.go, self.results = {}, {}, {}
        self.changed = threading.Condition()

    def run(self, actors):
        threads = []
        for name, act in actors.items():
            self.waiting[name], self.go[name] = False, threading.Semaphore(0)
            threads.append(threading.Thread(target=self._act, args=(name, act), daemon=True))
        for thread in threads:
            thread.start()
        while True:
            with self.changed:
                assert self.changed.wait_for(
                    lambda: all(self.waiting[n] or n in self.results for n in actors), 30
                )
                ready = sorted(n for n in actors if n not in self.results)
                if not ready:
                    break
                name = ready[self.choose(len(ready))]
                self.waiting[name] = False
            self.go[name].release()
        for thread in threads:
            thread.join(30)
        for found in self.results.values():
            if isinstance(found, BaseException) and not isinstance(found, Died):
                raise found
        return self.results

    def _act(self, name, act):
        try:
            found = act(Seat(self, name))
        except BaseException as e:
            found = e
        with self.changed:
            self.results[name] = found
            self.changed.notify_all()

    def turn(self, name):
        with self.changed:
            self.waiting[name] = True
            self.changed.notify_all()
        assert self.go[name].acquire(timeout=120)


class Seat:
    """The store as one actor has it; it dies before its `dies_at`-th operation. Listings are as
    old as `old()` says."""

    url = "memory://"

    def __init__(self, turns, name):
        self.turns, self.name, self.ops, self.dies_at = turns, name, 0, None
        self.old = lambda: 0

    def __getattr__(self, op):
        def call(*words):
            self.turns.turn(self.name)
            self.ops += 1
            if self.ops == self.dies_at:
                raise Died
            if op == "list":
                return self.turns.store.list(*words, old=self.old())
            return getattr(self.turns.store, op)(*words)

        if op in ("get", "put", "create", "list", "delete", "size"):
            return call
        raise AttributeError(op)


class Remembering(MemoryStore):
    """Lists what was there some changes ago."""

    def __init__(self):
        super().__init__("memory://x", {})
        self.past = [[]]

    def create(self, key, data):
        made = super().create(key, data)
        self.past.append(super().list(""))
        return made

    def delete(self, key):
        super().delete(key)
        self.past.append(super().list(""))

    def list(self, prefix, old=0):
        keys = self.past[max(0, len(self.past) - 1 - old)]
        return sorted(k for k in keys if k.startswith(prefix))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(volumes, "FANOUT", 2)


def fill(store, writers=3, each=4, t=0.0):
    """Facts of a few writers; what they were."""
    told = []
    for w in range(writers):
        clock = [t + w]
        journal = Journal(
            store, f"{('worker', 'agent', 'controller')[w % 3]}-{w}", lambda c=clock: c[0]
        )
        for i in range(each):
            clock[0] += 10.0
            journal.record(f.Warned(i, w, f"fact {i}"))
            journal.record(f.StepDone(i, w, 1.0 / (i + 1), clock[0], 0.5, 8))
            told += [
                (journal.writer, clock[0], "Warned", i),
                (journal.writer, clock[0], "StepDone", i),
            ]
            journal.flush()
    return sorted(told)


def without_steps(told):
    return [x for x in told if x[2] != "StepDone"]


def test_what_is_archived_is_read_as_before():
    store = MemoryStore("memory://x", {})
    told, whole = fill(store), read_facts(store)
    past = read_past(store)
    assert names(whole) == told
    done = Compactor(store, most_nbytes=900).compact(all_of_them=True)
    assert done == 12 and store.list("facts/") == []
    assert len(store.list("archive/raw/")) > 2
    assert read_facts(store) == whole
    assert read_facts(store, "controller-") == [s for s in whole if s.writer == "controller-2"]
    again = read_past(store)
    assert again.facts == past.facts
    assert (step_records.newest_told(again.steps) == step_records.newest_told(past.steps)).all()
    assert names(Follower(store).poll())[-1] and without_steps(
        names(Follower(store).poll())
    ) == without_steps(told)


def test_writers_go_on_after_their_facts_were_archived():
    store, clock = MemoryStore("memory://x", {}), [1.0]
    journal, compactor = Journal(store, "agent-1", lambda: clock[0]), Compactor(store)
    follower, told = Follower(store), []
    for i in range(9):
        journal.record(f.Warned(i, 1, "x"))
        journal.flush()
        if i % 3 == 1:
            compactor.compact(all_of_them=True)
        told += follower.poll()
    assert [s.fact.step for s in told] == list(range(9))
    assert [s.fact.step for s in read_facts(store)] == list(range(9))
    assert not [s for s in read_facts(store) if isinstance(s.fact, f.Unreadable)]


def test_a_segment_that_its_writer_writes_again_counts_once():
    """Its create was not answered, and it was archived before the next try."""
    store = MemoryStore("memory://x", {})
    told = fill(store, 1, 3)
    kept = {k: store.get(k) for k in store.list("facts/")}
    Compactor(store).compact(all_of_them=True)
    for key, data in kept.items():
        assert store.create(key, data)
    assert names(read_facts(store)) == told
    assert without_steps(names(Follower(store).poll())) == without_steps(told)
    Compactor(store).compact(all_of_them=True)
    assert store.list("facts/") == [] and names(read_facts(store)) == told


def test_a_flush_that_was_not_answered_and_is_archived_meanwhile_is_no_stranger():
    class Archived(MemoryStore):
        def create(self, key, data):
            return False

        def get(self, key, start=None, end=None):
            raise NotFound(key)

    journal = Journal(Archived("memory://x", {}), "agent-1", lambda: 1.0)
    journal.record(f.Warned(1, 1, "x"))
    journal.flush()


def test_a_segment_that_is_read_by_half_is_archived_later():
    store = HalfAtFirst("half-segments", broken=False)
    fill(store)
    before = read_facts(store)
    store.broken = True
    for _ in range(40):
        with contextlib.suppress(StoreUnavailable):  # half of what is archived, too
            Compactor(store).compact(all_of_them=True)
    store.broken = False
    assert not archive.segments(store) and read_facts(store) == before


def test_a_gap_is_not_archived_and_is_told():
    store = MemoryStore("memory://x", {})
    fill(store, 1, 4)
    store.delete("facts/worker-0/000001.jsonl")
    Compactor(store).compact(all_of_them=True)
    assert store.list("facts/") == ["facts/worker-0/000002.jsonl", "facts/worker-0/000003.jsonl"]
    assert any(isinstance(s.fact, f.Unreadable) for s in read_facts(store))


def test_damage_in_a_segment_stays_told_where_it_was():
    store = MemoryStore("memory://x", {})
    fill(store, 1, 4)
    key = "facts/worker-0/000001.jsonl"
    store.put(key, store.get(key).replace(b"fact 1", b"fact 7"))
    before = [s.fact for s in read_facts(store) if isinstance(s.fact, f.Unreadable)]
    Compactor(store).compact(all_of_them=True)
    for facts in (read_facts(store), read_facts(store, steps=False), Follower(store).poll()):
        assert [s.fact for s in facts if isinstance(s.fact, f.Unreadable)] == before


@pytest.mark.parametrize("kind", ["raw", "brief", "steps"])
def test_a_damaged_archive_is_told_and_not_continued(kind):
    store = MemoryStore("memory://x", {})
    fill(store, 1, 4)
    Compactor(store).compact(all_of_them=True)
    key = store.list(f"archive/{kind}/")[0]
    data = store.get(key)
    store.put(key, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    found = read_facts(store) if kind == "raw" else read_past(store).facts
    assert [key in str(s.fact) for s in found if isinstance(s.fact, f.Unreadable)] == [True]
    if kind == "brief":
        fill(store, 1, 4)
        with pytest.raises(DamagedArchive, match=key):
            Compactor(store).compact(all_of_them=True)


def act(kind, choose, old):
    def do(seat):
        seat.old = old
        if kind == "compactor":
            Compactor(seat, fewest=1, most_nbytes=900).compact(all_of_them=True)
            return None
        if kind == "follower":
            follower = Follower(seat)
            found = [s for _ in range(3) for s in follower.poll()]
            seat.old = lambda: 0
            return found + follower.poll()
        if kind == "writer":
            return fill(seat, 1, 3, t=1000.0)
        return {"facts": read_facts, "told": lambda s: read_facts(s, steps=False)}[kind](seat)

    def dying(seat):
        seat.dies_at = choose(40) + 1
        return do(seat)

    return dying if kind == "compactor" and choose(2) else do


def check(choose, late):
    store = Remembering()
    told = fill(store, 2, 3)
    if late or choose(2):  # of an archive that was begun long ago
        Compactor(store, most_nbytes=1).compact(all_of_them=True)
        told = sorted(told + fill_more(store))
    store.past = [store.past[-1]]  # what was done before is known to all
    old = (lambda: choose(4)) if late else (lambda: 0)
    kinds = {"a": "compactor", "b": "compactor", "r": "facts", "s": "told", "f": "follower"}
    before = set(told)
    results = Turns(store, choose).run({n: act(k, choose, old) for n, k in kinds.items()})
    assert set(names(results["r"])) == before and len(results["r"]) == len(before)
    assert names(results["s"]) == without_steps(told)
    assert without_steps(names(results["f"])) == without_steps(told)
    # whoever comes next finishes what was left
    Compactor(store).compact(all_of_them=True)
    assert store.list("facts/") == [] and names(read_facts(store)) == told
    assert without_steps(names(Follower(store).poll())) == without_steps(told)
    past = read_past(store)
    assert len(step_records.newest_told(past.steps)) == len([x for x in told if x[2] == "StepDone"])


def fill_more(store):
    """Facts of a writer that comes later."""
    clock, told = [500.0], []
    journal = Journal(store, "uploader-9", lambda: clock[0])
    for i in range(3):
        clock[0] += 1.0
        journal.record(f.Warned(i, 9, "later"))
        journal.flush()
        told.append(("uploader-9", clock[0], "Warned", i))
    return told


@given(st.randoms(use_true_random=False))
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_fact_is_read_once_in_every_interleaving(rng):
    check(rng.randrange, late=False)


@given(st.randoms(use_true_random=False))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_also_when_listings_are_old(rng):
    check(rng.randrange, late=True)


@pytest.mark.parametrize("seat", ["facts", "told", "follower"])
def test_a_compactor_may_die_before_each_of_its_operations(seat):
    for at in range(1, 60):
        store = Remembering()
        told = fill(store, 2, 3)

        def dying(mine, at=at):
            mine.dies_at = at
            Compactor(mine, most_nbytes=900).compact(all_of_them=True)

        died = Turns(store, lambda n: 0).run({"a": dying})["a"]
        reader = act(seat, random.Random(at).randrange, lambda: 0)
        found = Turns(store, lambda n: 0).run({"r": reader})["r"]
        assert without_steps(names(found)) == without_steps(told), at
        Compactor(store, most_nbytes=900).compact(all_of_them=True)
        assert names(read_facts(store)) == told and store.list("facts/") == []
        if died is None:
            return
    raise AssertionError("it has more operations than that")


def test_a_long_archive_is_read_by_few_requests(monkeypatch):
    monkeypatch.setattr(volumes, "FANOUT", 4)
    store, gets = MemoryStore("memory://x", {}), []
    compactor = Compactor(store)
    clock = [0.0]
    journal = Journal(store, "agent-1", lambda: clock[0])
    for i in range(200):
        clock[0] = float(i)
        journal.record(f.Warned(i, 1, "x"))
        journal.flush()
        compactor.compact(all_of_them=True)
    assert len(store.list("archive/raw/")) == 200
    assert len(store.list("archive/brief/")) <= 3 * 4
    plain = store.get
    store.get = lambda *words: gets.append(words[0]) or plain(*words)
    assert len(read_facts(store, steps=False)) == 200
    assert len(gets) <= 3 * 4 + 1
    assert archive.segments(store) == {}


# ---- records -------------------------------------------------------------------------------------


def test_worlds_that_overlap_are_shared_out_exactly(monkeypatch):
    """A world that did not know yet that it was replaced; a snapshot that began before it."""
    from harness.ledger import time_spans
    from harness.ledger.bill import PRECEDENCE, paint, totals

    monkeypatch.setattr(time_spans, "PIECE", 3)
    rng = np.random.default_rng(0)
    for _ in range(60):
        worlds, layers = [], []
        for begin in (0, 60, 110, 150):
            starts = np.sort(rng.integers(begin, begin + 70, 8))
            ends = starts + rng.integers(0, 15, 8)
            levels = rng.integers(0, 4, 8)  # snapshot, useful, redone, other
            worlds.append(time_spans.WorldSpans(time_spans.painted(starts, ends, levels)))
            rows = zip(starts.tolist(), ends.tolist(), levels.tolist(), strict=True)
            layers += [(a, b, PRECEDENCE[level]) for a, b, level in rows]
        around, known = [(0, 50, "start"), (40, 200, "idle")], {}
        for start, end in ((0, 230), (17, 130), (70, 190)):
            found = time_spans.share_between(worlds, around, start, end, known)
            assert totals(found) == totals(paint([*layers, *around], start, end))
            assert [a for a, _, _ in found] == [start, *(b for _, b, _ in found[:-1])]
            assert time_spans.share_between(worlds, around, start, end, known) == found


def test_two_record_compactors_and_a_dead_one():
    from harness.bucket.archive import RecordCompactor, read_committed
    from harness.core import step_records as rec
    from storage.snapshots.snapshots import Snapshots
    from support.histories import whole_run

    h = whole_run()
    named = rec.named(Snapshots(h.store).latest().data)
    genesis = rec.genesis(__import__("json").loads(h.store.get("run.json")))
    wanted = read_committed(h.store, named, genesis)
    for at in range(1, 40):
        store = Remembering()
        for key in h.store.list(""):
            store.create(key, h.store.get(key))

        def dying(mine, at=at):
            mine.dies_at = at
            RecordCompactor(mine, fewest=2).compact(all_of_them=True)

        def whole(mine):
            RecordCompactor(mine, fewest=2).compact(all_of_them=True)

        rng = random.Random(at)
        Turns(store, rng.randrange).run({"a": dying, "b": whole})
        found = read_committed(store, named, genesis)
        assert (found.rows == wanted.rows).all() and found.metrics == wanted.metrics
        assert found.worlds == wanted.worlds


# ---- members -------------------------------------------------------------------------------------
def test_members_that_are_gone_or_dead_are_taken_away():
    import json

    from harness.uploader.archiver import DEAD_S, LogArchiver

    store, clock = MemoryStore("memory://x", {}), [0.0]
    keeper = LogArchiver(store, lambda: clock[0])

    def say(name, state, beat):
        body = {"member": name, "state": state, "beat": beat, "beat_s": 1.0}
        store.put(f"rdzv/members/{name}.json", json.dumps(body).encode())

    say("m0001-gone", "gone", 1)
    say("m0002-dead", "in", 1)
    say("m0003-lives", "in", 1)
    assert keeper.sweep() == 1
    for beat in range(2, 6):
        clock[0] += DEAD_S / 2
        say("m0003-lives", "in", beat)
        keeper.sweep()
    assert store.list("rdzv/members/") == ["rdzv/members/m0003-lives.json"]


# ---- the keeper's process ------------------------------------------------------------------------
def test_the_keeper_rests_before_it_imports_anything_and_gives_way(tmp_path):
    code = f"""
import os, sys, time
from harness.uploader import archiver as keeper

imported = []

def rest(seconds):
    imported.append("storage" in sys.modules)
    if len(imported) == 3:
        print(imported, os.getpriority(os.PRIO_PROCESS, 0) >= keeper.NICE)
        sys.exit()

time.sleep = rest
keeper.main([{str(tmp_path)!r}])
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[False, True, True] True\n", done


def test_the_keeper_archives_everything_at_once(tmp_path):
    store = FileStore(f"file://{tmp_path}")
    journal = Journal(store, "controller-a", lambda: 1.0)
    journal.record(f.LeaseTaken(1, "me"))
    journal.flush()
    before = read_facts(store)
    words = [sys.executable, "-m", "harness.uploader.archiver", str(tmp_path), "--once"]
    subprocess.run(words, check=True, timeout=60)
    assert not store.list("facts/") and store.list("archive/")
    assert read_facts(store) == before != []


# ---- audits --------------------------------------------------------------------------------------




def test_half_of_our_own_segment_is_not_another_writer() -> None:
    store = HalfAtFirst("half-segment")
    journal = Journal(store, "agent-a", lambda: 0.0)
    journal.record(f.AgentEnded("a", 0, ""))
    store.put("facts/agent-a/000000.jsonl", (journal._pending[0] + "\n").encode())
    with pytest.raises(StoreUnavailable, match="found"):
        journal.flush()
    journal.flush()
    assert not journal._pending
