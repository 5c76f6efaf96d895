"""The second bucket: what is copied, what it may cost, and what it is good for."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.core.facts import SessionStarted, SnapshotReplicated, Warned
from harness.uploader.bucket_replica import Replica
from storage import MemoryStore, Ref, SnapshotCorrupt, Snapshots
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import FaultyStore, corrupt
from storage.tiers.tiers import Tiered
from support.worlds import TRAINER, newest, train

CHUNK = 1000


def commit(store, step, body):
    snapshots = Snapshots(store, CHUNK)
    snapshots.write(Ref(1, step), 0, 1, {"a.bin": body}, {}, {}, "t")
    manifest = snapshots.commit(Ref(1, step), 1)
    assert manifest is not None
    return manifest


@pytest.fixture
def buckets():
    source, target = MemoryStore("memory://one", {}), MemoryStore("memory://two", {})
    source.put("run.json", b"{}")
    source.put("samples/a.jsonl", b"records")
    return source, target


def replica(source, target, **limits):
    return Replica(
        source,
        target,
        Journal(source, "replica-x", time.time),
        here="aws/us-east-1",
        there="gcp",
        **limits,
    )


def test_the_newest_is_copied_and_told_with_its_price(buckets):
    source, target = buckets
    one = replica(source, target)
    assert one.look() is None  # nothing is committed yet
    for step in (1, 2, 3):
        commit(source, step, random.Random(step).randbytes(5 * CHUNK))
    assert one.look() == Ref(1, 3) and one.look() is None
    commit(source, 4, random.Random(4).randbytes(5 * CHUNK))
    commit(source, 5, random.Random(5).randbytes(5 * CHUNK))
    assert one.look() == Ref(1, 5)
    commit(source, 6, random.Random(6).randbytes(5 * CHUNK))
    assert one.look() == Ref(1, 6)
    assert Snapshots(target).refs() == [Ref(1, 6), Ref(1, 5)]
    for ref in Snapshots(target).refs():
        Snapshots(target).verify(Snapshots(target).load(ref))
    assert target.get("run.json") == b"{}" and target.get("samples/a.jsonl") == b"records"
    told = [s.fact for s in read_facts(source) if isinstance(s.fact, SnapshotReplicated)]
    assert [f.step for f in told] == [3, 5, 6] and all(f.nbytes == 5 * CHUNK for f in told)
    assert told[0].usd == pytest.approx(5 * CHUNK / 1e9 * 0.09)  # leaving AWS
    # known to the next one
    assert replica(source, target).spent_usd == pytest.approx(3 * told[0].usd)


def test_nothing_is_copied_beyond_the_cap(buckets):
    source, target = buckets
    one = replica(source, target, cap_usd=1.5 * 5 * CHUNK / 1e9 * 0.09)
    for step in (1, 2, 3):
        commit(source, step, random.Random(step).randbytes(5 * CHUNK))
        one.look()
    assert Snapshots(target).refs() == [Ref(1, 1)]
    [warned] = [s.fact for s in read_facts(source) if isinstance(s.fact, Warned)]
    assert "raise replica_cap_usd" in warned.what


def test_a_silent_second_bucket_is_tried_again(buckets, monkeypatch):
    monkeypatch.setattr("harness.uploader.bucket_replica.LOOK_S", 0.02)
    source, target = buckets
    commit(source, 1, b"x" * 3000)
    said, stop = [], threading.Event()
    faulty = FaultyStore(target, random.Random(1), unavailable=0.2)
    thread = threading.Thread(target=replica(source, faulty).run, args=(stop, said.append))
    thread.start()
    deadline_s = time.monotonic() + 60
    while not Snapshots(target).refs() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    stop.set()
    thread.join(60)
    assert Snapshots(target).refs() == [Ref(1, 1)]


def test_what_is_damaged_in_the_first_bucket_is_read_from_the_second(buckets):
    source, target = buckets
    body = random.Random(1).randbytes(20 * CHUNK)
    manifest = commit(source, 1, body)
    replica(source, target).look()
    key, told = manifest.parts[0].key, []
    for damage in ("flip", "truncate"):
        corrupt(source, key, damage, random.Random(2))
        both = Tiered(
            source, manifest, [], lambda tier, what: told.append(tier), replica=lambda: target
        )
        assert Snapshots(both, CHUNK).read(manifest, key, 0, len(body)) == body
        assert both.tier == "bucket+replica" and set(told) == {"bucket"}
        with pytest.raises(SnapshotCorrupt):
            Snapshots(Tiered(source, manifest, []), CHUNK).read(manifest, key, 0, len(body))
    source.delete(key)
    assert (
        Snapshots(Tiered(source, manifest, [], replica=lambda: target), CHUNK).read(
            manifest, key, 0, len(body)
        )
        == body
    )
    target.put(key, b"x" * len(body))
    with pytest.raises(SnapshotCorrupt):
        Snapshots(Tiered(source, manifest, [], replica=lambda: target), CHUNK).read(
            manifest, key, 0, len(body)
        )


@pytest.mark.proof
def test_a_run_goes_on_in_its_second_bucket(tmp_path):
    run, second = tmp_path / "run", tmp_path / "second"
    flags = ("--total", "60", "--every", "10", "--reduce", "exact")
    words = [
        sys.executable,
        "-m",
        "harness.cli",
        "run",
        "--run",
        str(run),
        "--replica",
        str(second),
        "--",
        TRAINER,
        *flags,
    ]
    ended = subprocess.run(
        words, env={**os.environ, "HARNESS_NODE_DIR": str(tmp_path / "node")}, timeout=180
    )
    assert ended.returncode == 0
    assert [
        s.fact for s in read_facts(open_store(str(run))) if isinstance(s.fact, SnapshotReplicated)
    ][-1].step == 60
    weights = newest(second).data["weights"]
    assert weights == newest(run).data["weights"]
    train(second, 1, "--total", 70, *flags[2:])
    assert newest(second).step == 70
    [started] = [
        s.fact for s in read_facts(open_store(str(second))) if isinstance(s.fact, SessionStarted)
    ]
    assert started.resumed_step == 60
