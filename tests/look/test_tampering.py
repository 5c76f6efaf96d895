"""Whoever may write to the bucket changes a run, and makes every hash anew that an outsider can
make: what `harness prove verify` finds, with and without the run's key."""

import pytest

from harness.bucket.journal import Journal
from harness.bucket.layout import epoch_key
from harness.bucket.signed_heads import Head, SignedStore, Signer, head_key
from harness.cli import main
from harness.core.facts import Warned
from harness.core.masking import masked
from harness.core.signing import VARIABLE, key_in, key_of
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from harness.look.audit.audit_signatures import with_signatures
from storage.canonical_json import digest
from storage.errors import StoreUnavailable
from storage.snapshots.manifest import Ref
from storage.snapshots.retention import Keep
from storage.stores.folder_store import FileStore, MemoryStore
from support.half_store import HalfAtFirst
from support.tampering import (
    EIGHTEEN,
    TABLE,
    TellingRun,
    archived,
    copied,
    drop,
    edit_facts,
    restored,
    small_run,
)
from support.tampering_seeded import seeded

KEY = key_of("hsk_" + "5a" * 32, "test")


def proved(store, key=KEY, seen=None):
    return with_signatures(audit(store), store, key, seen)


@pytest.fixture(scope="module")
def whole():
    """A signed run, what lay in its bucket after its first epoch, and what a person remembers."""
    run = TellingRun(KEY).train(7, world=2)
    old = copied(run.store)
    run.train(12, world=3).train(20, world=1, final=True).end()
    report, seen = proved(run.store)
    assert report.ok, report.first_violation
    return copied(run.store), old, seen


def test_nothing_is_found_in_a_run_that_nobody_touched():
    report = audit(small_run().store)
    assert report.ok, report.first_violation


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_tampering(whole, one):
    store = copied(whole[0])
    one.do(store, whole[1])
    report = audit(store)
    assert report.ok != one.alone, report.first_violation
    with_key, _ = with_signatures(report, store, KEY, None)
    assert with_key.ok == one.seen, with_key.first_violation
    remembering, newest = with_signatures(report, store, KEY, whole[2])
    assert not remembering.ok
    if not one.alone:
        assert newest is None and remembering.first_violation


def contents(store):
    return {key: store.get(key) for key in store.list("")}


SEEDS = 50


def test_seeded_tamperings_are_found(whole):
    """Of a run as it lies, and of one whose facts were archived in part."""
    run = TellingRun(KEY).train(7, world=2)
    archived(run.store)
    run = run.train(12, world=3)
    archived(run.store)
    some = copied(run.train(20, world=1, final=True).end().store)
    assert len(some.list("archive/raw/")) == 2
    missed = []
    for seed in range(SEEDS):
        before = some if seed % 3 == 2 else whole[0]
        store = copied(before)
        what = seeded(store, seed)
        assert contents(store) != contents(before), what
        report, _ = proved(store)
        if report.ok:
            missed.append(what)
    assert missed == []


# ---- clean runs ----------------------------------------------------------------------------------
def begun(key=KEY, **more):
    return TellingRun(key, **more).train(10, world=2)


def archived_twice():
    run = begun()
    archived(run.store)
    run.train(15, world=3)
    archived(run.store)
    return run.train(20, world=1, final=True).end()


def pruned():
    run = begun().train(15, world=3).train(20, world=1, final=True)
    assert run.snapshots.prune(Keep(last=1))
    return run.end()


def quarantined_for_good():
    run = begun()
    ref = Ref(epoch=1, step=10)
    key = run.store.list(f"snapshots/parts/{ref.name}/r00000")[0]
    run.store.put(key, b"damaged")
    run.snapshots.doubt(ref, "a", "bad")
    run.snapshots.quarantine(ref, "bad")
    return run.rewind(Ref(epoch=1, step=5)).train(20, final=True).end()


def pardoned():
    run = begun()
    ref = Ref(epoch=1, step=10)
    run.snapshots.doubt(ref, "a", "bad")
    run.snapshots.quarantine(ref, "bad")
    run.snapshots.pardon(ref)
    return run.train(20, final=True).end()


def rewound():
    """A person deleted what was there, and allowed to begin from an older snapshot."""
    run = begun()
    for ref in run.snapshots.refs()[:-1]:
        drop(run.store, ref)
    run.store.create("control/rewind-000002.json", b"{}")
    return run.rewind(Ref(epoch=1, step=5)).train(20, final=True).end()


def superseded():
    run = begun().train(15, world=2)
    run.begin_epoch(2)
    run.rewind(Ref(epoch=1, step=10))
    run.loss = lambda step: 1.0 / step
    return run.train(14, new_epoch=False, final=True).end()


def signed_later():
    """The first epoch was trained without a key."""
    plain = begun(None)
    archived(plain.store)
    plain.train(15, world=3)
    run = TellingRun(KEY, store=plain.store, begin=False)
    for name in ("head", "step", "epoch", "t", "named", "parent", "sessions"):
        setattr(run, name, getattr(plain, name))
    run.controller = Journal(run.store, "controller-000002", lambda: run.t)
    run.uploader = Journal(run.store, "uploader-m0001-bb", lambda: run.t)
    return run.train(20, final=True).end()


def still_training():
    return begun()


CLEAN = (
    *(archived_twice, pruned, quarantined_for_good, pardoned, rewound, superseded, signed_later),
    still_training,
)


@pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
def test_nothing_is_found_in_a_clean_run(make):
    report, seen = proved(make().store)
    assert report.ok, report.first_violation
    assert seen is not None


def test_what_was_there_before_the_first_head_is_fixed_by_it():
    store = copied(signed_later().store)
    edit_facts(store, "agent-e2", lambda body: body.update(t=body["t"] + 1))
    assert "wanted a last line with this key's signature" in proved(store)[0].first_violation


# ---- keys ----------------------------------------------------------------------------------------
def test_public_key_verifies_and_does_not_sign():
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ed25519

    private = ed25519.Ed25519PrivateKey.generate()
    pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = private.public_key().public_bytes(
        form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
    )
    key, reader = key_of(pem.decode(), "test"), key_of(public.decode(), "test")
    store = small_run(key).store
    assert proved(store, reader)[0].ok
    assert not proved(store)[0].ok  # another key
    assert key.signs and not reader.signs
    assert key_in({VARIABLE: pem.decode().replace("\n", "\\n")}).signs  # as one line
    with pytest.raises(BadInput, match="found a public one"):
        key_in({VARIABLE: public.decode()})


@pytest.mark.parametrize("text", ["", "secret", "hsk_12", "os:getcwd", "no.such:thing", "-----BEGIN X"])
def test_what_is_no_key_is_refused_and_not_told(text):
    with pytest.raises(BadInput) as e:
        key_of(text, "FILE")
    assert str(e.value).startswith("FILE")
    assert not text.startswith(("secret", "hsk")) or text not in str(e.value)


def given_by_a_manager():
    return "hsk_" + "5a" * 32


def test_a_key_may_come_from_a_function():
    assert key_of("test_tampering:given_by_a_manager", "test") == KEY


def test_a_key_is_masked_wherever_it_stands():
    assert masked(f"using {given_by_a_manager()} today") == "using *** today"
    pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA\n-----END PRIVATE KEY-----"
    assert masked(pem) == "***"


def test_two_signers_make_one_sequence():
    store = MemoryStore("memory://two", {})
    a, b = (SignedStore(store, Signer(store, KEY, who, lambda: 1.0)) for who in "ab")
    for number, one in enumerate([a, b, b, a, b], 1):
        assert one.create(epoch_key(number), b"{}")
    heads = [Head.decode(store.get(key)) for key in store.list("heads/")]
    assert [(h.number, h.by) for h in heads] == [(i, who) for i, who in enumerate("abbab", 1)]
    assert heads[-1].prev == digest(store.get(store.list("heads/")[-2]))


def test_a_head_that_is_read_by_half_is_not_followed():
    store = HalfAtFirst("half-heads", broken=False)
    for name in "ab":  # the second one reads what the first wrote
        signing = SignedStore(store, Signer(store, KEY, name, lambda: 1.0))
        store.broken = name == "b"
        if store.broken:
            with pytest.raises(StoreUnavailable, match="half-heads/heads"):
                signing.create(epoch_key(2), b"{}")
        assert signing.create(epoch_key(1 + (name == "b")), b"{}")
    store.broken = False
    first, second = (store.get(key) for key in store.list("heads/"))
    assert Head.decode(second).prev == digest(first)


def status(words):
    with pytest.raises(SystemExit) as e:
        main(words)
    return e.value.code


def test_verify_with_a_key_at_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = TellingRun(KEY, store=FileStore(f"file://{tmp_path}/run"))
    old = copied(run.train(5).store)
    run.train(10, final=True).end()
    key, state = tmp_path / "key", tmp_path / "state.json"
    key.write_text(given_by_a_manager() + "\n")
    words = ["prove", "verify", f"{tmp_path}/run", "--key", str(key), "--state", str(state)]
    assert status(words) == 0
    assert "signatures" in capsys.readouterr().out
    assert status(["prove", "verify", f"{tmp_path}/run"]) == 0
    assert "without --key this proves nothing against" in capsys.readouterr().out
    restored(FileStore(f"file://{tmp_path}/run"), old)
    assert status(words[:5]) == 0
    assert status(words) == 1
    assert "the bucket was rolled back" in " ".join(capsys.readouterr().out.split())
    key.write_text("\n")  # an empty file is no wish to verify without a key
    assert status(words) == 2
    assert "found an empty one" in " ".join(capsys.readouterr().err.split())


def test_an_export_of_a_clean_run_leaves_it_clean(tmp_path, capsys, monkeypatch):
    """It is told in the run's record, by a writer of its own, after the run's last head."""
    monkeypatch.setenv("HOME", str(tmp_path))
    url = f"file://{tmp_path}/run"
    run = TellingRun(KEY, store=FileStore(url))
    run.train(10, final=True).end()
    key, state = tmp_path / "key", tmp_path / "state.json"
    key.write_text(given_by_a_manager() + "\n")
    words = ["prove", "verify", url, "--key", str(key), "--state", str(state)]
    assert status(words) == 0
    monkeypatch.setenv(VARIABLE, given_by_a_manager())
    for turn in range(2):
        assert status(["snapshots", "export", url, str(tmp_path / f"out-{turn}")]) == 0
    assert len(FileStore(url).list("facts/person-")) == 2
    capsys.readouterr()
    assert status(words) == 0, capsys.readouterr().out
    monkeypatch.delenv(VARIABLE)  # and one by somebody who has no key is seen
    assert status(["snapshots", "export", url, str(tmp_path / "out-2")]) == 0
    assert status(words) == 1


def test_the_table_has_what_the_audit_tried():
    assert len(TABLE) > EIGHTEEN
    assert len({one.name for one in TABLE}) == len(TABLE)


# ---- one key for two runs ------------------------------------------------------------------------
def test_a_writer_of_another_run_with_the_same_key_is_found():
    """Its facts are signed, and no head of this run counts them."""
    mine, other = begun().train(20, final=True).end(), begun().train(20, final=True).end()
    assert proved(mine.store)[0].ok
    guest = Journal(other.store, "helper-guest", lambda: 5.0)
    guest.record(Warned(1, 1, "nothing to see"))
    guest.flush()
    assert proved(other.store)[0].ok
    (key,) = [key for key in other.store.list("facts/") if "helper-guest" in key]
    mine.store.inner.create(key, other.store.get(key))
    report, _ = proved(mine.store)
    assert not report.ok and "it is another run's" in report.first_violation


def test_a_run_from_before_there_were_ids_still_holds(monkeypatch):
    monkeypatch.setattr("harness.bucket.signed_heads.secrets.token_hex", lambda n: "")
    old = begun()
    monkeypatch.undo()
    assert b'"run"' not in old.store.get(head_key(1))
    report, _ = proved(old.train(20, final=True).end().store)
    assert report.ok, report.first_violation
