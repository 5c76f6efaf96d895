"""Whatever lies at a key of a run: a value, or the one named error, in bounded time and memory.
(What views, trackers and watchers write: tests/look/test_look_objects.py.)"""

import contextlib
import dataclasses
import json
import tarfile
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bucket import layout
from harness.bucket.controller_lease import AttemptPrice, RunLimits
from harness.bucket.layout import (
    ChunkServerAt,
    Claim,
    Epoch,
    Identity,
    Member,
    MemberHeader,
    Published,
    StopOrder,
    Term,
    secret_of,
)
from harness.bucket.setup_objects import decode_setup, encoded
from harness.core import decoding, facts
from harness.core import step_records as rec
from harness.core.decoding import NewerProtocol, Within
from harness.core.facts import KINDS, Chain, ChainReader, Fact, Stamped, Unreadable
from harness.core.setup_record import GitState, Setup
from storage.canonical_json import BadObject, canonical, digest, parsed
from storage.snapshots.manifest import (
    Manifest,
    Part,
    PartList,
    Ref,
    SnapshotCorrupt,
    SnapshotTooNew,
)
from storage.snapshots.retention import parsed_metrics
from storage.snapshots.snapshots import mark, why_of
from storage.stores import probe
from support.decoders import (
    DEEP,
    JSONS,
    QUICK,
    Decoder,
    bears_any_bytes,
    bears_any_change,
    reads_what_is_real,
)

DATA = Path(__file__).parents[1] / "fixtures" / "run" / "run.tar.gz"


def real_run() -> dict[str, bytes]:
    with tarfile.open(DATA) as archive:
        return {
            m.name.removeprefix("./"): archive.extractfile(m).read()  # type: ignore[union-attr]
            for m in archive.getmembers()
            if m.isfile()
        }


REAL = real_run()
MANIFEST = "snapshots/manifests/0000000014-e000001.json"
LIST = "snapshots/parts/0000000014-e000001/list-r00000.json"
SAMPLES = next(k for k in REAL if k.startswith("samples/"))


def of(prefix: str) -> tuple[bytes, ...]:
    return tuple(REAL[key] for key in sorted(REAL) if key.startswith(prefix))


def chain(data: bytes) -> list[Fact]:
    lines = data.decode(errors="replace").splitlines()
    reader = ChainReader("w")
    found = [s.fact for i, line in enumerate(lines) for s in reader.read(str(i), line)]
    assert len(found) >= len(lines)  # whatever cannot be read is told
    return found


ORDER = StopOrder("it fails", "m1", True, ("a", "b")).to_json()
LIMITS = RunLimits(2, 7, 30.0, 600.0, 100.0, 40.0, 3600.0, attempts=(AttemptPrice(1, 6.0, 480.0),))
PUBLISHED = Published(9, "trackers/jsonl/1/", {"a.jsonl": "0"}, "ab", 1, run_id="r", t=1.7e9)
FACTS = tuple(line + b"\n" for line in b"".join(of("facts/")).splitlines()[::9])
SETUP = encoded(
    Setup(
        argv=("x.py", "--lr", "1"), config={"a": {"b": [1, None]}}, git=GitState("ab" * 20, "main"),
        packages={"torch": "2.13.0"}, people={"owner": "me"}, left_out=("b",),
    )
)  # fmt: skip
BAD = (BadObject,)
DECODERS = [
    Decoder("run.json", Identity.decode, BAD, of("run.json")),
    Decoder("member", Member.decode, BAD, of("rdzv/members/")),
    Decoder("epoch", Epoch.decode, BAD, of("rdzv/epochs/")),
    Decoder("glance", MemberHeader.of, (), of("rdzv/members/")),
    Decoder("lease term", Term.decode, (), of("lease/000001.json")),
    Decoder("stop order", StopOrder.from_json, (), (ORDER, *of("control/stop.json"))),
    Decoder("limits", RunLimits.decode, BAD, (LIMITS.encode(),)),
    Decoder("chunk server", ChunkServerAt.decode, BAD, (ChunkServerAt("10.0.0.1", 5).encode(),)),
    Decoder("secret", secret_of, BAD, (json.dumps("0f" * 32).encode(),)),
    Decoder("published", lambda d: Published.decode(d, 1), BAD, (PUBLISHED.encode(),)),
    Decoder("claim", Claim.decode, BAD, (Claim("me", 1.7e9).encode(),)),
    Decoder("setup", decode_setup, BAD, (SETUP,)),
    Decoder("numbers told later", parsed_metrics, (), (b'{"metrics":{"eval/loss":2.5},"ref":"x"}',)),
    Decoder("facts", chain, (), FACTS, "h"),
    Decoder("records", lambda d: rec.decode(d, "k"), (rec.BrokenRecords,), (REAL[SAMPLES],), "h"),
    Decoder(
        "manifest", Manifest.from_json, (SnapshotCorrupt, SnapshotTooNew), (REAL[MANIFEST],), "hash"
    ),
    Decoder(
        "part list", PartList.from_json, (SnapshotCorrupt, SnapshotTooNew), (REAL[LIST],), "hash"
    ),
    Decoder(
        "part", Part.from_json, (SnapshotCorrupt,),
        tuple(p.to_json().encode() for p in Manifest.from_json(REAL[MANIFEST]).parts),
    ),
    Decoder("what a store does", probe.decode, BAD, of("control/store.json")),
    Decoder("mark", lambda d: why_of(d, "unsaid"), (), (mark(Ref(1, 2), "bad", host="a"),)),
]  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_what_is_real_is_read(decoder: Decoder) -> None:
    reads_what_is_real(decoder)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_bytes_are_a_value_or_the_one_error(decoder: Decoder) -> None:
    bears_any_bytes(decoder)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_change_is_a_value_or_the_one_error(decoder: Decoder) -> None:
    bears_any_change(decoder, use)


def use(found: Any) -> None:
    """What was accepted holds what its readers do with it."""
    match found:
        case Manifest():
            assert found.nbytes >= 0 and found.own_nbytes <= sum(found.objects.values())
            assert set(found.stored) == set(found.objects)
            Manifest.from_json(found.to_json())
        case PartList():
            PartList.from_json(found.to_json())
            with contextlib.suppress(SnapshotCorrupt):
                Manifest.merge([found])
        case Epoch():
            assert len([found.ranks(m) for m in found.members]) == len(found.members)
            found.encode()
        case Member() | Term() | RunLimits() | Published() | Claim() | ChunkServerAt():
            found.encode()
        case Identity():
            assert found.micro_batches >= 0 and rec.genesis(found.body)
        case StopOrder():
            assert StopOrder.from_json(found.to_json()) == found


def test_no_text_is_parsed_beyond_its_bounds() -> None:
    with pytest.raises(BadObject, match="at most 1048576 bytes"):
        parsed(b"[" + b"1," * (1 << 20) + b"1]")
    for deep in DEEP:
        with pytest.raises(BadObject, match=r"nested deeper than 64|something else"):
            parsed(deep)
    assert parsed(b"[" * 64 + b"]" * 64)  # and no sooner
    big = Member("m" * (layout.SMALL_NBYTES + 1), "ready", 0, "x", 1, 2, nproc=1).encode()
    with pytest.raises(BadObject, match="at most"):
        Member.decode(big)
    assert MemberHeader.of(big) == MemberHeader()
    tail = StopOrder("x" * 10_000, log_tail=("y" * 10_000,) * 500).to_json()
    order = StopOrder.from_json(tail if len(tail) < 1 << 20 else tail[: 1 << 20])
    assert len(order.reason) <= layout.LONGEST and len(order.log_tail) <= layout.TAIL_LINES


def test_an_object_that_would_fill_the_memory_is_refused() -> None:
    """A few bytes may claim an object of terabytes, in chunks of one byte."""
    place = ["snapshots/parts/a/b", 0, 4, 1 << 49]
    body = {"key": "snapshots/parts/a/c", "nbytes": 4, "chunk_nbytes": 1, "hashes": ["b3." + "0" * 32] * 4}
    with pytest.raises(SnapshotCorrupt, match="its places do not make up"):
        Part.from_json(json.dumps({**body, "places": [place]}))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_must_be_finite_are(text: str) -> None:
    with pytest.raises(BadObject, match="finite"):
        Identity.decode(b'{"version":1,"data":"x","note":[%s]}' % text.encode())
    said = Member("m", "ready", 0, "x", 1, 2, nproc=1).encode()
    with pytest.raises(BadObject, match="speed: wanted a number"):
        Member.decode(said.replace(b'"speed": 1.0', b'"speed": %s' % text.encode()))


# ---- round trips ---------------------------------------------------------------------------------
WORDS = st.text(max_size=10)


def made_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = next((b for b in inside[1:] if isinstance(b, Within)), None)
        if inside[0] is float:
            low, high = (bounds.low, bounds.high) if bounds else (None, None)
            return st.floats(low, high, allow_nan=False, allow_infinity=bounds is None)
        assert bounds
        return st.integers(int(bounds.low), int(bounds.high))
    if origin in (typing.Union, types.UnionType):
        return st.none() | made_of(next(i for i in inside if i is not type(None)))
    if origin is tuple:
        return st.lists(made_of(inside[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(WORDS, made_of(inside[1]), max_size=3)
    return {
        str: WORDS,
        bool: st.booleans(),
        int: st.integers(-(2**53), 2**53),
        float: st.floats(-1e15, 1e15),
        Any: st.none() | st.booleans() | WORDS,
    }[hint]


def any_of(cls: type[Any], **given: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: made_of(hints[f.name]) for f in dataclasses.fields(cls)}
    return st.builds(cls, **{**fields, **{k: v for k, v in given.items() if k in fields}})


SPOKEN = {"protocol": st.just(1)}
TRIPS = [
    (any_of(Member, **SPOKEN), Member.decode),
    (
        st.integers(1, 4).flatmap(
            lambda n: any_of(
                Epoch, **SPOKEN,
                members=st.lists(WORDS, min_size=n, max_size=n).map(tuple),
                nproc=st.lists(st.integers(0, 99), min_size=n, max_size=n).map(tuple),
                speeds=st.lists(st.floats(0, 9), min_size=n, max_size=n).map(tuple),
                replica_ranks=st.just(1),
            )
        ),
        Epoch.decode,
    ),
    (any_of(Term, ttl_s=st.floats(0.1, 600), newer=st.just(0)), Term.decode),
    (any_of(Claim), Claim.decode),
    (
        any_of(Published, folder=st.just(""), files=st.just({"a": "b"}), first=st.just(1),
               last=st.integers(1, 99)),
        lambda d: Published.decode(d, 1),
    ),
    (any_of(ChunkServerAt, addr=st.just("a"), port=st.integers(1, 65535)), ChunkServerAt.decode),
]  # fmt: skip


@pytest.mark.parametrize(("made", "decode"), TRIPS)
def test_what_is_written_is_read(made: st.SearchStrategy[Any], decode: Callable[..., Any]) -> None:
    @QUICK
    @given(made)
    def check(value: Any) -> None:
        assert decode(value.encode()) == value

    check()


@pytest.mark.parametrize(("made", "decode"), TRIPS[:-1])
def test_fields_of_a_newer_version_are_ignored(
    made: st.SearchStrategy[Any], decode: Callable[..., Any]
) -> None:
    @QUICK
    @given(made, st.dictionaries(WORDS.map(lambda w: f"new-{w}"), JSONS, max_size=3))
    def check(value: Any, more: dict[str, Any]) -> None:
        body = {**more, **json.loads(value.encode())}
        assert decode(json.dumps(body).encode()) == value

    check()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_fact_comes_back(kind: str) -> None:
    @settings(QUICK, max_examples=15)
    @given(any_of(KINDS[kind]), st.floats(0, 4e9))
    def check(fact: Fact, t: float) -> None:
        line = Chain("w").line(t, fact)
        assert ChainReader("w").read("k", line) == [Stamped(t, "w", fact)]

    check()


def test_a_fact_with_new_fields_is_the_same_and_keeps_its_hash() -> None:
    said = json.loads(Chain("w").line(1.0, facts.Warned(1, 2, "x")))
    said.pop("h")
    said |= {"joules": 5.0, "nested": {"a": [1]}}
    sealed = json.dumps({**said, "h": digest(canonical(said))})
    assert [s.fact for s in ChainReader("w").read("k", sealed)] == [facts.Warned(1, 2, "x")]
    changed = sealed.replace("5.0", "6.0")
    assert isinstance(ChainReader("w").read("k", changed)[0].fact, Unreadable)


def test_replicas_are_whole() -> None:
    whole = Epoch(1, ("a", "b"), (2, 2), (1.0, 1.0), "x", 1, "start", replica_ranks=2)
    assert Epoch.decode(whole.encode()) == whole and b"replica_ranks" in whole.encode()
    for ranks in (0, 3):
        with pytest.raises(BadObject, match="wanted whole replicas"):
            Epoch.decode(dataclasses.replace(whole, replica_ranks=ranks).encode())


def test_a_newer_protocol_is_told_from_damage() -> None:
    newer = json.dumps({"protocol": decoding.PROTOCOL + 1, "epoch": ["of", "another", "kind"]})
    for decode in (Epoch.decode, Member.decode):
        with pytest.raises(NewerProtocol, match="update the package"):
            decode(newer.encode())
    for text in ('{"protocol":0}', '{"protocol":"2"}', '{"protocol":1e400}', '{"protocol":true}'):
        with pytest.raises(BadObject, match="whole number"):
            Epoch.decode(text.encode())


# ---- keys ----------------------------------------------------------------------------------------
@QUICK
@given(st.text(max_size=40) | st.text("0123456789/.jsonrdzvepchmaisltfcx-", max_size=40))
def test_any_key_is_ours_or_somebody_elses(key: str) -> None:
    for known in ("", "rdzv/epochs/", "rdzv/members/", "lease/", "facts/"):
        layout.epoch_of(known + key)
        layout.member_of(known + key)
        layout.newest_term([known + key])
        layout.SEGMENT.fullmatch(known + key)
    layout.attempt_of(key)


def test_a_term_that_nobody_can_follow_is_no_term() -> None:
    real = [layout.term_key(1), layout.term_key(2)]
    assert layout.newest_term(["lease/999999999999.json"]) == 0
    assert layout.newest_term([*real, "lease/999999999999.json"]) == 2


def test_keys_and_what_they_name() -> None:
    assert layout.epoch_of(layout.epoch_key(7)) == 7 and layout.epoch_of("rdzv/epochs/x.json") == 0
    assert layout.member_of(layout.member_key("m0003-ab")) == "m0003-ab"
    assert layout.attempt_of("m0003-ab") == 3 and layout.attempt_of("t12") == 0
    assert layout.newest_term([layout.term_key(3), layout.term_key(9, "beat"), "lease/x"]) == 3
    assert layout.SEGMENT.fullmatch(layout.segment_key("w", 12))
    ours = [key for key in REAL if not key.startswith(("snapshots/", "samples/", "control/"))]
    known = [layout.epoch_of, layout.member_of, lambda k: layout.newest_term([k]),
             layout.SEGMENT.fullmatch, lambda k: k in ("run.json", "lease/000001.beat")]  # fmt: skip
    assert [key for key in ours if not any(name(key) for name in known)] == []
