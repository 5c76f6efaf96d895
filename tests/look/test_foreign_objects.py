"""One object that is damaged, of a newer version or not ours stops no reader: each goes on, and
says what it left out."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease, LeaseWatch
from harness.bucket.journal import Follower
from harness.core import facts as f
from harness.core import step_records as rec
from harness.lab.simulation.sim_world import VirtualClock
from harness.ledger.ledger import Ledger
from harness.look.audit.audit import audit
from harness.look.audit.audit_records import read_part
from harness.look.pages.report_page import page
from harness.look.reports.compare import compare
from harness.look.reports.live_view import follow, status
from harness.look.reports.report import print_report, to_json
from harness.look.reports.summary import summarize
from harness.look.trackers.tracker_registry import Jsonl, RunInfo
from harness.look.trackers.trackers import Publisher
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from support.histories import TOTAL, whole_run
from support.truerun import TrueRun

DEEP = b"[" * 100_000
BASE = whole_run().store


def copy_of(store: ObjectStore) -> MemoryStore:
    made = MemoryStore("memory://copy", {})
    for key in store.list(""):
        made.put(key, store.get(key))
    return made


def segment(writer: str, *bodies: dict[str, Any]) -> bytes:
    """Facts that are whole and well chained, whatever they say."""
    head, lines = digest(writer.encode()), []
    for body in bodies:
        sealed = {**body, "prev": head}
        head = digest(canonical(sealed))
        lines.append(json.dumps({**sealed, "h": head}, separators=(",", ":")))
    return ("\n".join(lines) + "\n").encode()


def read_all(store: ObjectStore, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Let every reader of a run look at it. What the report calls problems, and which facts
    `status` calls unread."""
    summary = summarize(store, now=lambda: 1.8e9)
    out = io.StringIO()
    print_report(summary, Console(file=out, width=300))
    json.dumps(to_json(summary), allow_nan=False)
    page(summary)
    assert summary.step == TOTAL and summary.state == "done"
    Ledger.of(read_facts(store), [], 1.8e9)
    follow(store, threading.Event().is_set, Console(file=out, width=300), now=lambda: 1.8e9)
    seen = status(store, watch_s=0.0, now=lambda: 1.8e9)
    assert seen["state"] == "done" and seen["step"] == TOTAL
    assert LeaseWatch(store).look(0.0) is False  # released
    publisher = Publisher(store, RunInfo.of(store), [Jsonl()], now=lambda: 1.8e9)
    assert publisher.round(last=True)
    assert compare(store, store).same(0.0)
    return list(summary.problems), list(seen.get("unread_facts", ()))


WHOLE = {
    "fact": "AgentStarted",
    "t": 1.7e9,
    "member": "m0009-x",
    "attempt": 9,
    "host": "h",
    "nproc": 1,
    "accelerator": "",
    "pid": 1,
}


@pytest.mark.parametrize(
    "body",
    [
        {**WHOLE, "colour": "of a newer version"},
        {**WHOLE, "fact": "OfANewerVersion"},
        {"fact": "AgentStarted", "t": 1.7e9, "member": "m0009-x", "attempt": 9},
        {
            "fact": "StepDone",
            "t": 1.7e9,
            "step": 1,
            "epoch": 1,
            "loss": float("nan"),
            "t_start": 1.7e9,
            "seconds": 1,
            "lr": float("inf"),
        },
    ],
    ids=["unknown field", "unknown kind", "missing fields", "not finite"],
)
def test_facts_of_other_versions_are_read(body: dict[str, Any], tmp_path: Path) -> None:
    store = copy_of(BASE)
    store.put("facts/agent-m0009-x/000000.jsonl", segment("agent-m0009-x", body))
    assert read_all(store, tmp_path) == ([], [])


@pytest.mark.parametrize(
    "body",
    [
        {k: v for k, v in WHOLE.items() if k != "attempt"},
        {**WHOLE, "attempt": "<b>9</b>"},
        {**WHOLE, "attempt": 10**300},
        {**WHOLE, "nproc": 2**40},
        {**WHOLE, "t": float("inf")},
        {**WHOLE, "t": "soon"},
        {"fact": "AttemptUp", "t": 1.7e9, "attempt": 1, "up_s": float("nan")},
        {"fact": "AttemptEnded", "t": 1.7e9, "attempt": 1, "end": "lost"},
        {"fact": "EpochStarted", "t": 1.7e9, "epoch": 99, "members": "abc", "world": 3},
        {"fact": "Validated", "t": 1.7e9, "step": 1, "epoch": 1, "metrics": {"val_loss": [1]}},
    ],
)
def test_a_fact_with_wrong_fields_is_left_out_and_told(
    body: dict[str, Any], tmp_path: Path
) -> None:
    store = copy_of(BASE)
    store.put(
        "facts/agent-m0009-x/000000.jsonl",
        segment("agent-m0009-x", WHOLE, body, {**WHOLE, "t": 1.7e9 + 1}),
    )
    problems, unread = read_all(store, tmp_path)
    assert len(problems) == 1 and "1 fact could not be read" in problems[0] and len(unread) == 1
    assert "facts/agent-m0009-x/000000.jsonl, line 2" in problems[0] and unread[0] in problems[0]
    assert next(c for c in audit(store).checks if c.name == "facts").detail == unread[0]
    assert (
        len([s for s in read_facts(store, "agent-m0009-x") if isinstance(s.fact, f.AgentStarted)])
        == 2
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"no JSON\n" + data,
        lambda data: data[: len(data) // 2],
        lambda data: DEEP + b"\n" + data,
        lambda data: b"\xff\xfe\x00" + data,
        lambda data: b'{"fact":"RunAsked","t":' + b"9" * 5000 + b"}\n" + data,
        lambda data: b"[]\n5\nnull\n" + data,
        lambda data: data.replace(b'"fact":"', b'"fact":"X', 1),
    ],
    ids=["empty", "no JSON", "cut", "deep", "no text", "huge number", "other JSON", "changed"],
)
@pytest.mark.parametrize("writer", ["controller-1", "worker-e000003-ab"])
def test_a_damaged_segment_stops_nobody(
    damage: Callable[[bytes], bytes], writer: str, tmp_path: Path
) -> None:
    store = copy_of(BASE)
    key = store.list(f"facts/{writer}/")[3]
    store.put(key, damage(store.get(key)))
    problems, _ = read_all(store, tmp_path)
    assert (
        len(problems) == 1
        and f"facts/{writer}/00000" in problems[0]
        and "harness prove verify" in problems[0]
    )
    (found,) = [c for c in audit(store).checks if c.name == "facts"]
    assert not found.ok and f"facts/{writer}/00000" in found.detail


def test_what_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    store = copy_of(BASE)
    for key in (
        "facts/readme.txt", "facts/controller-1/000000.jsonl~", "facts/controller-1/x/y", "samples/readme.txt", "samples/a-b.jsonl",
        "lease/notes.json", "lease/x.json~", "lease/zzz.beat", "rdzv/epochs/000003.json~",
    ):  # fmt: skip
        store.put(key, DEEP)
    assert read_all(store, tmp_path) == ([], [])
    notes = " ".join(audit(store).notes)
    assert (
        "3 objects under facts/ are none of ours" in notes
        and "2 objects under samples/ are none of ours" in notes
    )


def test_a_verified_run_may_have_foreign_objects() -> None:
    run = TrueRun().train(6, final=True).end()
    run.store.put("facts/readme.txt", b"hello")
    run.store.put("samples/readme.txt", b"hello")
    report = audit(run.store)
    assert report.ok, report.first_violation


def test_a_live_view_goes_on_behind_damage() -> None:
    store = copy_of(BASE)
    follower = Follower(store)
    follower.poll()
    store.put("facts/agent-m0009-x/000000.jsonl", DEEP)
    store.put("facts/agent-m0009-x/000001.jsonl", segment("agent-m0009-x", WHOLE))
    assert [type(s.fact) for s in follower.poll()] == [f.Unreadable, f.AgentStarted]
    assert follower.poll() == []


# ---- lease ---------------------------------------------------------------------------------------
def test_foreign_objects_do_not_keep_the_lease() -> None:
    store, clock = MemoryStore("memory://lease", {}), VirtualClock()
    Lease(store, clock, "a").acquire()
    for key in ("lease/notes.json", "lease/x.json~", "lease/000009.txt"):
        store.put(key, b"{}")
    assert Lease(store, clock, "b").acquire() == 2


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", DEEP, b'{"holder":5,"ttl_s":"x"}', b'{"holder":"a","ttl_s":Infinity}'],
)
def test_a_damaged_term_is_waited_for_and_followed(body: bytes) -> None:
    store, clock = MemoryStore("memory://lease", {}), VirtualClock()
    first = Lease(store, clock, "a")
    first.acquire()
    store.put("lease/000001.json", body)
    assert Lease(store, clock, "b").acquire() == 2
    assert 5 <= clock.now() <= 60
    with pytest.raises(Exception, match="has taken over this run"):
        first.check()


# ---- records and manifests -----------------------------------------------------------------------
def newer(record: rec.StepRecord, prev: str) -> str:
    """A record as a newer version may write it."""
    body = {**json.loads(record.to_line()), "joules": 5.0, "prev": prev}
    del body["h"]
    return json.dumps({**body, "h": digest(canonical(body))}, separators=(",", ":"))


def test_a_record_with_a_new_field_keeps_its_place_in_the_chain() -> None:
    run = TrueRun().train(2)
    (key,) = run.store.list("samples/")
    records = rec.decode(run.store.get(key), key)
    head, lines = records[0].prev, list[str]()
    for record in records:
        lines.append(newer(record, head))
        head = json.loads(lines[-1])["h"]
    data = "".join(line + "\n" for line in lines).encode()
    found = rec.decode(data, "x")
    assert [r.step for r in found] == [1, 2]
    run.store.put(rec.key(found), data)
    assert read_part(run.store, rec.key(found)) == found  # its spelling is looked at as well
    with pytest.raises(rec.BrokenRecords, match="was changed"):
        rec.decode(data.replace(b'"joules":5.0', b'"joules":6.0', 1), "x")
    with pytest.raises(rec.BrokenRecords, match="line 1: not a step record"):
        rec.decode(DEEP, "x")


@pytest.mark.parametrize(
    "named",
    [
        "text",
        ["a"],
        {"key": "samples/x"},
        {"key": 1, "head": 2, "first": 3, "last": 4},
        {"last": 10**40},
    ],
)
def test_a_manifest_that_names_no_records_is_told(named: object, tmp_path: Path) -> None:
    store = copy_of(BASE)
    snapshots, ref = Snapshots(store), Ref(99, TOTAL)
    snapshots.write(
        ref, 0, 1, {"state": b"x"}, {}, {"final": True, "samples": named, "parent": [1]}, "t"
    )
    assert snapshots.commit(ref, 1)
    summary = summarize(store, now=lambda: 1.8e9)
    assert len(summary.problems) == 1 and "wanted the name of step records" in summary.problems[0]
    assert not next(c for c in audit(store).checks if c.name == "manifests").ok
    assert not Publisher(store, RunInfo.of(store), [Jsonl()], now=lambda: 1.8e9).round(last=True)


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        b'{"version":1,"ref":"0000000001-e000001","world":Infinity}',
        b'{"hash":1e999,"version":1e999}',
    ],
)
def test_numbers_and_depths_that_python_cannot_hold_are_damage(text: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        Manifest.from_json(text)
