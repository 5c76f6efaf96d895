"""A true small run passes the audit; a single changed byte in any object does not, and the
report says where."""

import io
import json
import random

import pytest
from rich.console import Console

from harness.bucket.layout import epoch_key
from harness.core import facts
from harness.look.audit import audit_records
from harness.look.audit.audit import audit, print_audit
from harness.look.audit.audit_records import read_part
from harness.look.audit.proof_cache import Prover
from harness.look.trackers.publisher import publisher_of
from harness.look.trackers.tracker_registry import RunInfo
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Ref
from storage.snapshots.retention import Keep
from storage.stores.folder_store import MemoryStore
from support.tampering import TellingRun, archived
from support.truerun import IDENTITY, TrueRun


@pytest.fixture
def run():
    return TrueRun().train(7, world=2).train(12, world=3).train(20, world=1, final=True).end()


def violation(store):
    report = audit(store)
    assert not report.ok
    assert report.first_violation
    return report.first_violation


def test_true_run_is_proved(run):
    seen = []
    report = audit(run.store, lambda what, done, of: seen.append((what, done, of)))
    assert report.ok, report.first_violation
    assert report.first_violation is None
    assert [c.name for c in report.checks] == [
        "identity",
        "facts",
        "manifests",
        "epochs",
        "records",
        "other records",
        "lineage",
        "commits",
        "losses",
        "snapshots",
        "ledger",
        "run end",
    ]
    by_name = {c.name: c for c in report.checks}
    assert by_name["records"].n == 20
    assert "every sample exactly once" in by_name["records"].detail
    assert by_name["snapshots"].n == len(run.snapshots.refs()) == 6
    assert seen[-1][0].startswith("snapshot ")
    out = io.StringIO()
    print_audit(report, Console(file=out, width=150))
    assert "Everything holds." in out.getvalue()


def test_a_run_that_no_controller_led_is_said_to_have_ended(run):
    store = MemoryStore(objects={})
    for key in run.store.list(""):
        data = run.store.get(key)
        if not (key.startswith("facts/") and b'"RunEnded"' in data):
            store.put(key, data)
    (end,) = [c for c in audit(store).checks if c.name == "run end"]
    assert end.detail == "no controller led it to its end: finished with step 20"


def classes(store):
    """Keys of every audited class of objects."""
    found = {}
    for key in store.list(""):
        depth = 2 if key.startswith(("snapshots", "rdzv")) else 1
        name = "part lists" if "/list-" in key else "/".join(key.split("/")[:depth])
        found.setdefault(name, []).append(key)
    return found


def test_every_flipped_byte_is_found(run):
    rng = random.Random(1)
    by_class = classes(run.store)
    assert set(by_class) == {
        "facts",
        "run.json",
        "rdzv/epochs",
        "samples",
        "snapshots/manifests",
        "snapshots/parts",
        "part lists",
    }
    missed = []
    for keys in by_class.values():
        for _ in range(45):
            key = rng.choice(keys)
            data = run.store.get(key)
            at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
            run.store.put(key, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            report = audit(run.store)
            if report.ok or not report.first_violation:
                missed.append((key, at, bit))
            run.store.put(key, data)
    assert missed == []
    assert audit(run.store).ok


def test_an_epoch_without_its_hash_is_refused(run):
    key = run.store.list("rdzv/epochs/")[0]
    data = run.store.get(key)
    run.store.put(key, data.replace(b'"h":', b'"`":'))
    assert "wanted hash None" in audit(run.store).first_violation
    run.store.put(key, data)


@pytest.mark.parametrize(
    "prefix",
    [
        "facts/controller",
        "run.json",
        "rdzv/epochs/",
        "samples/",
        "snapshots/manifests/",
        "snapshots/parts/0000000020",
    ],
)
def test_white_space_and_line_ends_are_found(run, prefix):
    for key in [k for k in run.store.list(prefix) if "-w" not in k]:
        data = run.store.get(key)
        swapped = data.replace(b"\n", b"\x0b", 1), data.replace(b":", b": ", 1)
        for changed in (data + b"\n", data + b" ", b" " + data, data[:-1], *swapped, b""):
            if changed != data:
                run.store.put(key, changed)
                assert not audit(run.store).ok, (key, changed[:50])
        run.store.put(key, data)


@pytest.mark.parametrize(
    "prefix",
    [
        "facts/controller-000001/000000",
        "run.json",
        "samples/",
        "rdzv/epochs/000001",
        "snapshots/parts/0000000020-e000003/r",
    ],
)
def test_lost_object_is_found(run, prefix):
    run.store.delete(run.store.list(prefix)[0])
    assert violation(run.store)


def test_wrong_sample_is_named(run):
    """The record is whole and well chained, but a rank loaded something else."""
    run.train(22, digest="00000000deadbeef")
    found = violation(run.store)
    assert "step 22" in found
    assert "(seed 7, step 22)" in found
    assert "deadbeef" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 6}, "global batch of 8 samples, found 6"),
        ({"shares": (2, 1)}, "wanted 4 micro-batches"),
        ({"shares": (2, 1, 1)}, "over 2 ranks"),
        ({"micro_batch": 1}, "wanted 8 micro-batches"),
        ({"micro_batch": 4}, "micro-batches of 2 samples, or equal parts of them, found 4"),
        ({"micro_batch": -1}, "found -1"),
        ({"weight": 0.0}, "positive weight"),
        ({"loss": float("nan")}, "finite loss"),
        ({"epoch": 1}, "the 2 ranks of generation 1"),
    ],
)
def test_broken_step_is_named(changes, words):
    run = TrueRun().train(3, world=1).train(6, world=2, **changes)
    assert words in violation(run.store)


def test_epoch_that_goes_back_is_named():
    run = TrueRun().train(3, world=1).train(6, world=1)
    run.train(8, world=1, new_epoch=False, epoch=1)
    found = violation(run.store)
    assert "generations that never go back, found generation 2 before generation 1" in found


def test_skipped_step_is_named():
    run = TrueRun().train(3)
    run.step = 4
    run.train(6)
    assert "wanted step 4" in violation(run.store)


def test_run_of_another_identity_is_named():
    run = TrueRun().train(3)
    run.store.put("run.json", canonical({**IDENTITY, "created_by": "somebody"}))
    assert "run.json was changed" in violation(run.store)
    run.store.put("run.json", canonical({k: v for k, v in IDENTITY.items() if k != "seed"}))
    assert "wanted seed of type int, found None" in violation(run.store)


def two_phases():
    return TrueRun().train(7).next_phase(global_batch=4, data="other").train(10, world=1).train(12)


def test_phases_are_proved_each_by_its_own_identity():
    run = two_phases()
    found = audit(run.store)
    assert found.ok, found.first_violation
    said = {check.name: check.detail for check in found.checks}
    assert "phase 2 from step 8 on, global batch 4" in said["identity"]
    assert "steps 1-12 (7 of phase 1, 5 of phase 2), in each phase" in said["records"]
    assert "4 or 8 per step" in said["records"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"begins": 6}, "wanted one of phase 2, which made step 7, found phase 1"),
        ({"data": "another"}, "step 12: wanted a step of phase 2 with the identity"),
        ({"phase": 3}, "wanted phase 2, from step 0 or later on, found phase 3 from step 7 on"),
        ({"seed": None}, "control/phases/000002.json: wanted seed of type int"),
    ],
)
def test_a_changed_phase_is_named(change, words):
    run = two_phases()
    run.store.put("control/phases/000002.json", canonical(run.identity | change))
    assert words in violation(run.store)


def test_a_lost_phase_and_a_step_of_the_wrong_one_are_named():
    run = two_phases()
    run.store.delete("control/phases/000002.json")
    assert "wanted one of phase 1, which made step 12, found phase 2" in violation(run.store)
    run = two_phases().train(13, phase=1, identity="")
    assert "step 13: wanted a step of phase 2" in violation(run.store)


def test_zombie_branch_is_a_note():
    """An old world went on although a newer one began from an older snapshot; it is superseded,
    and that is allowed."""
    run = TrueRun().train(10, every=5, world=1)
    run.train(15, world=2)
    run.begin_epoch(2)
    run.rewind(Ref(epoch=1, step=10))
    run.loss = lambda step: 1.0 / step
    run.train(14, new_epoch=False, final=True).end()
    report = audit(run.store)
    assert report.ok, report.first_violation
    assert any("0000000015-e000002" in note for note in report.notes)
    assert any("not on the run's line" in note for note in report.notes)


def test_two_histories_in_one_epoch_are_a_violation():
    run = TrueRun().train(10, every=5, world=1)
    run.train(12, every=2, world=2)
    run.rewind(Ref(epoch=1, step=10))
    run.loss = lambda step: 1.0 / step
    run.train(14, every=14, world=2, new_epoch=False)
    assert "another history" in violation(run.store)


def train_unanswered(run, to, silent):
    """Commits of the steps `silent` land, but nobody answers: each later snapshot carries their
    records once more."""
    run.begin_epoch(2)
    unsaved = []
    while run.step < to:
        run.step += 1
        unsaved.append(run.record(run.step, 2).chained(run.head))
        run.head = unsaved[-1].h
        run.t += 1
        if run.step in (*silent, to):
            run.snapshot(unsaved, 2)
    return run


def test_commit_that_was_not_answered_is_on_the_line(tmp_path):
    run = train_unanswered(TrueRun(), 40, silent=(10, 20))
    train_unanswered(run, 50, silent=(45,))
    assert [key[len("samples/") :][:21] for key in run.store.list("samples/")] == [
        "0000000001-0000000010",
        "0000000001-0000000020",
        "0000000001-0000000040",
        "0000000041-0000000045",
        "0000000041-0000000050",
    ]
    prover = Prover(memory=tmp_path / "proofs")
    for remembered in (False, True):
        report = audit(run.store, prover=prover)
        assert report.ok, report.first_violation
        by_name = {c.name: c for c in report.checks}
        assert by_name["lineage"].detail == "5 on one line"
        assert bool(prover.remembered) == remembered


def test_head_that_no_record_of_the_chain_has_is_a_violation():
    """Its records are whole, of the same steps and epoch, but the newest snapshot's are others."""
    run = TrueRun(loss=lambda step: 1.0 / step)
    run.begin_epoch(2)
    forged = [run.record(1, 2).chained(run.head)]
    run.step, run.epoch = 1, 2
    run.snapshot(forged, 2)
    run.step, run.epoch, run.loss = 0, 1, lambda step: 2.0 / step
    train_unanswered(run, 9, silent=(4,))
    found = violation(run.store)
    assert "wanted the record of step 1" in found
    assert "another history" in found


@pytest.mark.parametrize("other", [10, 20])
def test_head_of_another_step_is_a_violation(other):
    """The record is one of the chain, but not that of the snapshot's step."""
    run = train_unanswered(TrueRun(), 40, silent=(10, 20))
    named = run.snapshots.load(Ref(epoch=1, step=other)).data["samples"]
    run.step, run.parent, run.named = 15, None, {**named, "last": 15}
    run.snapshot([], 2)
    found = violation(run.store)
    assert "wanted the record of step 15" in found
    assert "said to be of steps 1-15" in found


def test_older_epoch_with_the_head_of_another_step_is_not_superseded():
    """It was, since nobody looked of which step the record is that it names."""
    run = TrueRun().train(10, every=5, world=1).train(20, every=5, world=1)
    named = run.snapshots.load(Ref(epoch=1, step=5)).data["samples"]
    run.epoch, run.step, run.parent, run.named = 1, 7, None, {**named, "last": 7}
    run.snapshot([], 1)
    assert "wanted the record of step 7" in violation(run.store)


def test_superseded_snapshot_needs_all_its_records():
    run = TrueRun().train(10, every=5, world=1)
    run.train(25, every=5, world=2).begin_epoch(2)
    run.rewind(Ref(epoch=1, step=10))
    run.loss = lambda step: 1.0 / step
    run.train(14, new_epoch=False)
    assert audit(run.store).ok
    run.store.delete(run.store.list("samples/0000000011-0000000015")[0])
    run.store.delete(run.store.list("snapshots/manifests/0000000015-e000002.json")[0])
    assert "that samples/0000000016-0000000020" in violation(run.store)


def test_record_inside_an_object_is_read_only_where_it_is_wanted(monkeypatch):
    read = []
    monkeypatch.setattr(audit_records, "read_part", lambda *a: read.append(a[1]) or read_part(*a))
    assert audit(TrueRun().train(20, every=5).store).ok
    assert read == []
    run = train_unanswered(TrueRun().train(20, every=5), 60, silent=(30, 40))
    assert audit(run.store).ok
    assert [key[len("samples/") :][:21] for key in read] == ["0000000021-0000000060"]


def test_snapshot_at_step_0_and_snapshot_without_new_steps():
    run = TrueRun()
    run.begin_epoch(2)
    run.snapshot([], 2)
    assert audit(run.store).ok
    run.train(3)
    run.begin_epoch(1)
    run.snapshot([], 1)
    report = audit(run.store)
    assert report.ok, report.first_violation


def test_quarantined_snapshot_is_a_note():
    run = TrueRun().train(10)
    run.snapshots.quarantine(Ref(epoch=1, step=10), "bad")
    run.rewind(Ref(epoch=1, step=5))
    run.train(12)
    report = audit(run.store)
    assert report.ok, report.first_violation
    assert any("quarantined" in note for note in report.notes)


def test_contents_of_a_stream_are_there_or_not_as_the_identity_says():
    stream = {**IDENTITY, "samples": 0, "shuffle": False}
    hashed = audit(
        TrueRun(identity={**stream, "contents": True}).train(10, contents="0123456789abcdef").store
    )
    assert hashed.ok, hashed.first_violation
    detail = next(c.detail for c in hashed.checks if c.name == "records")
    assert (
        "every position exactly once" in detail
        and "which only a second run can be compared with" in detail
    )
    assert "wanted a hash of contents" in violation(
        TrueRun(identity={**stream, "contents": True}).train(10).store
    )
    assert "wanted a hash of contents" in violation(
        TrueRun(identity=stream).train(10, contents="0123456789abcdef").store
    )


def test_iterable_dataset_is_proved_by_position():
    run = TrueRun(identity={**IDENTITY, "samples": 0, "shuffle": False}).train(6)
    report = audit(run.store)
    assert report.ok, report.first_violation
    assert "every position exactly once" in report.checks[4].detail


def test_bill_that_does_not_add_up():
    assert "wanted a bill" in violation(TrueRun().train(5, final=True).end(billed_s=3.0).store)
    assert "wanted a bill" in violation(TrueRun().train(5, final=True).end(usd=0.1).store)
    run = TrueRun().train(5, final=True)
    run.controller.record(facts.RunEnded("done", "", 5))
    run.controller.flush()
    assert "no AttemptEnded" in violation(run.store)


def test_done_without_a_final_snapshot():
    assert "wanted a final snapshot of step 5" in violation(TrueRun().train(5).end().store)
    assert audit(TrueRun().train(5).end("stopped").store).ok
    run = TrueRun(identity={**IDENTITY, "total_steps": 9}).train(5, final=True).end()
    assert "wanted the final one at step 9" in violation(run.store)


def test_gap_in_fact_segments():
    run = TrueRun().train(5).end("stopped")
    assert len(run.store.list("facts/controller-000001/")) == 2
    run.store.delete("facts/controller-000001/000000.jsonl")
    assert "numbered without a gap" in violation(run.store)


def test_epoch_that_a_fact_contradicts():
    run = TrueRun().train(5)
    body = json.loads(run.store.get(epoch_key(1)))
    body["nproc"] = [3]
    del body["h"]
    body["h"] = digest(canonical(body))
    run.store.put(epoch_key(1), json.dumps(body).encode())
    assert "wanted what its maker recorded" in violation(run.store)


def test_manifest_that_nobody_pruned_is_missed():
    run = TellingRun().train(10).train(20, final=True).end()
    key = run.store.list("snapshots/manifests/")[1]
    data = run.store.get(key)
    run.store.delete(key)
    assert "it was deleted by hand" in violation(run.store)
    run.store.put(key, data)
    run.snapshots.prune(Keep(last=1))
    assert audit(run.store).ok


def test_blocks_of_the_archive_are_missed():
    run = TellingRun().train(10)
    archived(run.store)
    run.train(20, final=True).end()
    archived(run.store)
    for kind in ("brief", "steps"):
        for key in run.store.list(f"archive/{kind}/"):
            data = run.store.get(key)
            run.store.delete(key)
            assert "wanted blocks of all 2 volumes" in violation(run.store)
            run.store.put(key, data)
    assert audit(run.store).ok


def test_compactor_that_died_before_the_blocks_is_no_violation():
    run = TellingRun().train(10)
    kept = {key: run.store.get(key) for key in run.store.list("facts/")}
    archived(run.store)
    for key, data in kept.items():
        run.store.put(key, data)
    run.store.delete(run.store.list("archive/brief/")[-1])
    assert audit(run.store).ok


def test_loss_that_trackers_were_told_is_compared():
    run = TrueRun().train(10, final=True).end()
    writer = publisher_of(run.store, RunInfo.of(run.store), 0.0)
    writer.round(last=True)
    report = audit(run.store)
    assert report.ok, report.first_violation
    assert next(c.n for c in report.checks if c.name == "trackers") == 10
    key = next(k for k in run.store.list("trackers/stream/") if b'"train/loss"' in run.store.get(k))
    data = run.store.get(key)
    run.store.put(key, data.replace(b'"train/loss": 1.0,', b'"train/loss": 0.5,'))
    assert "wanted the loss 1.0 of the record of step 1, found 0.5" in violation(run.store)
    run.store.put(key, data[:-20])
    assert "wanted a batch of the stream" in violation(run.store)


def test_nothing_there():
    assert "wanted a run" in violation(MemoryStore("memory://empty", {}))


def test_violation_is_printed(run):
    run.store.delete(run.store.list("samples/")[0])
    report = audit(run.store)
    out = io.StringIO()
    print_audit(report, Console(file=out, width=300))
    assert f"First violation: {report.first_violation}" in out.getvalue()
