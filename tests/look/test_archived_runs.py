"""A run whose facts were archived is shown and proved as before."""

import pytest

from storage.stores.folder_store import MemoryStore


def test_the_report_of_an_archived_run_is_the_same():
    from harness.look.reports.report import to_json
    from harness.look.reports.summary import summarize
    from harness.uploader.archiver import LogArchiver
    from support.histories import whole_run

    h = whole_run()
    before = summarize(h.store, lambda: h.t)
    LogArchiver(h.store, lambda: 0.0).archive_all()
    assert h.store.list("archive/records/") and not h.store.list("facts/")
    after = summarize(h.store, lambda: h.t)
    assert to_json(after) == to_json(before)
    assert after == before


@pytest.mark.parametrize("large", [0, 10, 10**6])
@pytest.mark.parametrize("piece", [1, 7, 1024])
@pytest.mark.parametrize("groups", [3, 128])
def test_a_ledger_by_pieces_is_exact(monkeypatch, large, piece, groups):
    from harness.ledger import ledger, time_spans
    from harness.look.reports.summary import summarize
    from support.histories import whole_run

    h = whole_run()
    wanted = summarize(h.store, lambda: h.t).ledger
    monkeypatch.setattr(ledger, "LARGE", large)
    monkeypatch.setattr(time_spans, "PIECE", piece)
    monkeypatch.setattr(time_spans, "MOST_SEGMENTS", 4 * groups)
    monkeypatch.setattr(time_spans, "GROUPS", groups)
    found = summarize(h.store, lambda: h.t).ledger
    assert (found.ns, found.nusd, found.epochs, found.cost) == (
        wanted.ns,
        wanted.nusd,
        wanted.epochs,
        wanted.cost,
    )
    for mine, theirs in zip(found.attempts, wanted.attempts, strict=True):
        assert (mine.ns, mine.nusd) == (theirs.ns, theirs.nusd)
        assert sum(b - a for a, b, _ in mine.segments) == mine.billed_ns
        edges = [t for a, b, _ in mine.segments for t in (a, b)]
        assert edges == sorted(edges)


def test_damaged_records_are_named_whether_archived_or_not():
    from harness.look.reports.summary import summarize
    from harness.uploader.archiver import LogArchiver
    from support.histories import whole_run

    h = whole_run()
    LogArchiver(h.store, lambda: 0.0).archive_all()
    key = h.store.list("archive/records/")[0]
    data = h.store.get(key)
    h.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    # the objects themselves are there still
    assert not summarize(h.store, lambda: h.t).problems
    h.store.delete(h.store.list("samples/")[0])
    assert "missing" in summarize(h.store, lambda: h.t).problems[0]


@pytest.fixture(scope="module")
def proven():
    """A true run, archived in two volumes: its objects."""
    from harness.uploader.archiver import LogArchiver
    from support.truerun import TrueRun

    run = TrueRun().train(7, world=2).train(12, world=3).train(20, world=1, final=True).end()
    LogArchiver(run.store, lambda: 0.0).archive_all()
    return {key: run.store.get(key) for key in run.store.list("")}


def test_an_archived_run_is_proven(proven):
    from harness.look.audit.audit import audit

    store = MemoryStore("memory://p", dict(proven))
    assert not store.list("facts/")
    found = audit(store)
    assert found.ok, found.first_violation


@pytest.mark.parametrize("kind", ["raw", "brief", "steps", "records"])
@pytest.mark.parametrize("how", ["flip", "cut", "lose", "forge"])
def test_what_is_done_to_an_archive_is_found(proven, kind, how):
    from harness.bucket.volumes import sealed, unsealed
    from harness.look.audit.audit import audit

    store = MemoryStore("memory://p", dict(proven))
    key = store.list(f"archive/{kind}/")[0]
    data = store.get(key)
    if how == "flip":
        store.put(key, data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    elif how == "cut":
        store.put(key, data[:-40])
    elif how == "lose":
        store.delete(key)
    else:  # hashes that fit, and other content
        head, runs, body = unsealed(data, key)
        names = ("archive", "runs", "body")
        kept = {k: v for k, v in head.items() if k not in names}
        store.put(key, sealed(kept, runs, body[:-9] + bytes([body[-9] ^ 4]) + body[-8:]))
    found = audit(store)
    if how == "lose" and kind != "raw":  # it can be made again from what is there
        return
    assert not found.ok and "archive/" in (found.first_violation or ""), found


def test_proofs_are_remembered_and_believed_of_the_same_bytes_only(
    proven, tmp_path, monkeypatch
):
    from harness.look.audit import proof_cache
    from harness.look.audit.audit import audit
    from harness.look.audit.proof_cache import Prover

    store, memory = MemoryStore("memory://p", dict(proven)), tmp_path / "proofs"
    assert audit(store, prover=Prover(0, memory)).ok
    again = Prover(0, memory)
    assert audit(store, prover=again).ok
    objects = len(store.list("samples/")) + len(store.list("archive/raw/"))
    assert again.remembered == objects
    # it was interrupted: what is whole of its memory is believed
    memory.write_bytes(memory.read_bytes()[:-7])
    assert audit(store, prover=(cut := Prover(0, memory))).ok and cut.remembered == objects - 1
    # its machine lost power: what was not written yet is zeros
    memory.write_bytes(memory.read_bytes()[:-7] + bytes(4096))
    assert audit(store, prover=(cut := Prover(0, memory))).ok and cut.remembered == objects - 1
    # older code had other rules
    monkeypatch.setattr(proof_cache, "RULES", proof_cache.RULES + 1)
    assert audit(store, prover=(anew := Prover(0, memory))).ok and anew.remembered == 0
    key = store.list("samples/")[0]
    store.put(key, store.get(key).replace(b'"lr":', b'"lR":', 1))
    changed = audit(store, prover=Prover(0, memory))
    assert not changed.ok and key in changed.first_violation


def test_several_processes_prove_the_same(proven, monkeypatch):
    from harness.look.audit import proof_cache
    from harness.look.audit.audit import audit

    monkeypatch.setattr(proof_cache, "FEW", 0)
    store = MemoryStore("memory://p", dict(proven))
    assert audit(store, prover=proof_cache.Prover(2)) == audit(store)
