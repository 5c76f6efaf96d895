"""Whatever lies at a key of a run: a value, or the one named error, in bounded time and memory.

Every decoder gets any bytes, and every kind of change to a real object (hypothesis; the same
examples at every run).
"""

import contextlib
import dataclasses
import json
import tarfile
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.bucket import layout
from harness.bucket.alerts import Alert, AlertReceipt
from harness.bucket.layout import (
    ChunkServerAt,
    Claim,
    Epoch,
    Glance,
    Identity,
    Member,
    Published,
    StopOrder,
    Term,
    secret_of,
)
from harness.bucket.limits import AttemptPrice, RunLimits
from harness.bucket.notes import LogbookEntry
from harness.bucket.setups import decode_setup, encoded
from harness.bucket.side_jobs import SideClaim, SideOutcome
from harness.bucket.streamed import (
    BatchHeader,
    StreamRow,
    ToldNodes,
    ToldWandb,
    decode_batch,
    encode_batch,
    machine_said,
    mlflow_run_of,
)
from harness.core import facts, values
from harness.core import records as rec
from harness.core.fact_lines import Chain, ChainReader
from harness.core.facts import KINDS, Fact, Stamped, Unreadable
from harness.core.setups import GitState, Setup
from harness.core.values import BadObject, NewerProtocol, Within, parsed
from storage import probe
from storage.json_text import canonical, digest
from storage.manifest import Manifest, PartList, SnapshotCorrupt, SnapshotTooNew
from storage.marks import mark, why_of
from storage.measured import metrics_of
from storage.parts import Part, Ref

QUICK = settings(
    max_examples=200, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
DATA = Path(__file__).parent / "data" / "run-b30688c" / "run.tar.gz"


def old_run() -> dict[str, bytes]:
    with tarfile.open(DATA) as archive:
        return {
            m.name.removeprefix("./"): archive.extractfile(m).read()  # type: ignore[union-attr]
            for m in archive.getmembers()
            if m.isfile()
        }


OLD = old_run()
MANIFEST = "snapshots/manifests/0000000018-e000003.json"
LIST = "snapshots/parts/0000000018-e000003/list-r00000.json"
SAMPLES = next(k for k in OLD if k.startswith("samples/"))


@dataclass(frozen=True)
class Decoder:
    """`errors`: all that it may raise. `real`: objects as they are written."""

    name: str
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    real: tuple[bytes, ...]
    reseal: str = ""  # the field that holds the hash of the rest

    def __str__(self) -> str:
        return self.name


def of(prefix: str) -> tuple[bytes, ...]:
    return tuple(OLD[key] for key in sorted(OLD) if key.startswith(prefix))


def chain(data: bytes) -> list[Fact]:
    lines = data.decode(errors="replace").splitlines()
    reader = ChainReader("w")
    found = [s.fact for i, line in enumerate(lines) for s in reader.read(str(i), line)]
    assert len(found) >= len(lines)  # whatever cannot be read is told
    return found


ORDER = StopOrder("it fails", "m1", True, ("a", "b")).to_json()
LIMITS = RunLimits(2, 7, 30.0, 600.0, 100.0, 40.0, 3600.0, attempts=(AttemptPrice(1, 6.0, 480.0),))
PUBLISHED = Published(9, "trackers/jsonl/1/", {"a.jsonl": "0"}, "ab", 1, run_id="r", t=1.7e9)
ALERT = dataclasses.asdict(Alert("a1", "rank 1 hangs", "silent", 1.7e9, "critical"))
HEADER = BatchHeader(
    3, 9, 2, last_step=4, head="ab", best={"val_loss": (0.5, 4)}, snapshots=("0000000004-e000001",),
    newest="0000000004-e000001", alerts=("a1",), new_alerts=(ALERT,),
    exported=("e1",), new_exports=({"id": "e1", "step": 4, "epoch": 1, "files": ["a"]},),
    heard={"0a": 1.7e9}, heard_floor_s=1.6e9,
)  # fmt: skip
ROWS = [
    StreamRow(9, "step", 1.7e9, {"time/wall_s": 5.0, "train/loss": float("nan")}, step=4),
    StreamRow(10, "ops", 1.7e9, {"time/wall_s": 6.0, "world/size": 2}, again=True),
]
BATCH = encode_batch(HEADER, ROWS)
TOLD = ToldWandb(3, 11, 1, -1, 2).encode("p", "r1")
FACTS = tuple(line + b"\n" for line in b"".join(of("facts/")).splitlines()[::9])
SETUP = encoded(
    Setup(
        argv=("x.py", "--lr", "1"), config={"a": {"b": [1, None]}}, git=GitState("ab" * 20, "main"),
        packages={"torch": "2.13.0"}, people={"owner": "me"}, left_out=("b",),
    )
)  # fmt: skip
NOTE = canonical(dataclasses.asdict(LogbookEntry(1.7e9, "why", "me", 3)))
DONE = SideOutcome("done", {"eval/loss": 2.5}, 2, 3.5, "me")
BAD = (BadObject,)
DECODERS = [
    Decoder("run.json", Identity.decode, BAD, of("run.json")),
    Decoder("member", Member.decode, BAD, of("rdzv/members/")),
    Decoder("epoch", Epoch.decode, BAD, of("rdzv/epochs/")),
    Decoder("glance", Glance.of, (), of("rdzv/members/")),
    Decoder("lease term", Term.decode, (), of("lease/000001.json")),
    Decoder("stop order", StopOrder.from_json, (), (ORDER, *of("control/stop.json"))),
    Decoder("limits", RunLimits.decode, BAD, (LIMITS.encode(),)),
    Decoder("chunk server", ChunkServerAt.decode, BAD, (ChunkServerAt("10.0.0.1", 5).encode(),)),
    Decoder("secret", secret_of, BAD, (json.dumps("0f" * 32).encode(),)),
    Decoder("published", lambda d: Published.decode(d, 1), BAD, (PUBLISHED.encode(),)),
    Decoder("claim", Claim.decode, BAD, (Claim("me", 1.7e9).encode(),)),
    Decoder("alert", Alert.decode, BAD, (json.dumps(ALERT).encode(),)),
    Decoder("alert receipt", AlertReceipt.decode, (), (AlertReceipt("sent", 1.7e9, "a").encode(),)),
    Decoder("batch of the stream", lambda d: decode_batch(d, 3), BAD, (BATCH,)),
    Decoder("how far W&B is", ToldWandb.decode, BAD, (TOLD,)),
    Decoder(
        "how far W&B is with nodes", ToldNodes.decode, BAD,
        (ToldNodes(3, {"1": 7}, {"1": 0}).encode(),),
    ),
    Decoder("generation at MLflow", mlflow_run_of, BAD, (b'{"run_id":"0a1b"}',)),
    Decoder("rank 0's machine", machine_said, BAD, (b'{"git":{"commit":"ab"},"flags":{"lr":1}}',)),
    Decoder("setup", decode_setup, BAD, (SETUP,)),
    Decoder("note", LogbookEntry.decode, BAD, (NOTE,)),
    Decoder("outcome of a side job", SideOutcome.of, (), (DONE.encode(),)),
    Decoder("claim of a side job", SideClaim.of, (), (SideClaim("me", 60.0).encode(),)),
    Decoder("numbers told later", metrics_of, (), (b'{"metrics":{"eval/loss":2.5},"ref":"x"}',)),
    Decoder("facts", chain, (), FACTS, "h"),
    Decoder("records", lambda d: rec.decode(d, "k"), (rec.BrokenRecords,), (OLD[SAMPLES],), "h"),
    Decoder(
        "manifest", Manifest.from_json, (SnapshotCorrupt, SnapshotTooNew), (OLD[MANIFEST],), "hash"
    ),
    Decoder(
        "part list", PartList.from_json, (SnapshotCorrupt, SnapshotTooNew), (OLD[LIST],), "hash"
    ),
    Decoder(
        "part", Part.from_json, (SnapshotCorrupt,),
        tuple(p.to_json().encode() for p in Manifest.from_json(OLD[MANIFEST]).parts),
    ),
    Decoder("what a store does", probe.decode, BAD, of("control/store.json")),
    Decoder("mark", lambda d: why_of(d, "unsaid"), (), (mark(Ref(1, 2), "bad", host="a"),)),
]  # fmt: skip

# ---- what may lie there --------------------------------------------------------------------------
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**64, 10**40])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=12)
JSONS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
DEEP = [b"[" * n for n in (70, 1000, 100_000)] + [
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b"[" * 200 + b"]" * 200,
]
STRANGE = st.sampled_from(
    [*DEEP, b"", b"null", b"[]", b"{}", b"5", b"\xff\xfe\x00", b'"\\ud800"', b"9" * 5000, b"1e999",
     b"Infinity", b'{"protocol":-1}', b'{"protocol":"2"}', b'{"version":NaN}', b"\n\n", b"{}\n[]"]
)  # fmt: skip
ANYTHING = STRANGE | st.binary(max_size=60) | JSONS.map(lambda v: json.dumps(v).encode())


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = (
        value.items() if isinstance(value, dict)
        else enumerate(value) if isinstance(value, list)
        else ()
    )  # fmt: skip
    return [at, *(p for key, one in inside for p in paths(one, (*at, key)))]


def change(draw: st.DrawFn, value: Any) -> Any:
    """One place of it is another value, is gone, or has a neighbour."""
    place = draw(st.sampled_from(paths(value)))
    if not place:
        return draw(JSONS) if draw(st.booleans()) else value
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    how = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
    if how == "replace":
        inside[place[-1]] = draw(JSONS)
    elif how == "drop":
        del inside[place[-1]]
    elif isinstance(inside, dict):
        inside[draw(st.text(max_size=8))] = draw(JSONS)
    else:
        inside.insert(place[-1], draw(JSONS))
    return value


@st.composite
def damaged(draw: st.DrawFn, decoder: Decoder) -> bytes:
    """A real object with a few changes: to its values, which are sealed again, or to its bytes."""
    data = draw(st.sampled_from(decoder.real))
    if draw(st.integers(0, 3)) == 0:
        cut, length = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
        return data[:cut] + draw(st.binary(max_size=8)) + data[cut + length :]
    lines = []
    for line in data.splitlines():
        value = json.loads(line)
        for _ in range(draw(st.integers(0, 3))):
            value = change(draw, value)
        if decoder.reseal and isinstance(value, dict) and draw(st.booleans()):
            value.pop(decoder.reseal, None)
            value[decoder.reseal] = digest(canonical(value))
        lines.append(json.dumps(value).encode())
    return b"\n".join(lines)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_what_is_real_is_read(decoder: Decoder) -> None:
    for data in decoder.real:
        assert decoder.decode(data)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_bytes_are_a_value_or_the_one_error(decoder: Decoder) -> None:
    @QUICK
    @given(ANYTHING)
    def check(data: bytes) -> None:
        with contextlib.suppress(*decoder.errors):
            decoder.decode(data)

    check()


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_change_is_a_value_or_the_one_error(decoder: Decoder) -> None:
    @QUICK
    @given(damaged(decoder))
    def check(data: bytes) -> None:
        with contextlib.suppress(*decoder.errors):
            use(decoder.decode(data))

    check()


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
        case Alert() | AlertReceipt():
            found.encode()
        case ToldWandb():
            found.encode("p", "r")
        case ToldNodes() | SideOutcome():
            found.encode()
        case SideClaim():
            assert 0 < found.lease_s <= 3600
        case (BatchHeader() as header, list() as rows):
            assert [row.number for row in rows] == list(range(header.first_row, header.end_row))
            assert all(int(row.values["time/wall_s"]) < 2**60 for row in rows)
            assert all(len(alert.title) >= 0 for alert in header.told_alerts())
            assert all(export.step >= 0 for export in header.told_exports())
            encode_batch(header, rows)
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
    assert Glance.of(big) == Glance()
    tail = StopOrder("x" * 10_000, log_tail=("y" * 10_000,) * 500).to_json()
    order = StopOrder.from_json(tail if len(tail) < 1 << 20 else tail[: 1 << 20])
    assert len(order.reason) <= layout.LONGEST and len(order.log_tail) <= layout.TAIL_LINES


def test_an_object_that_would_fill_the_memory_is_refused() -> None:
    """A few bytes may claim an object of terabytes, in chunks of one byte."""
    place = ["snapshots/parts/a/b", 0, 4, 1 << 49]
    body = {"key": "snapshots/parts/a/c", "nbytes": 4, "chunk_nbytes": 1, "hashes": ["0" * 32] * 4}
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


def test_a_batch_of_the_stream_comes_back() -> None:
    header, rows = decode_batch(BATCH, 3)
    assert (header, rows[1]) == (HEADER, ROWS[1]) and repr(rows[0]) == repr(ROWS[0])
    first, *lines = BATCH.splitlines()
    for bad, words in (
        (first + b"\n" + lines[0] + b"\n", "wanted 2 rows, found 1"),
        (BATCH.replace(b"time/wall_s", b"time/wall_h"), "wanted time/wall_s"),
        (BATCH.replace(b"0000000004-e000001", b"4"), "names of snapshots"),
        (BATCH.replace(b"[0.5, 4]", b"[0.5]"), "wanted a value and a step"),
        (BATCH.replace(b'"rank 1 hangs"', b"7"), "title: wanted str"),
    ):
        with pytest.raises(BadObject, match=words):
            decode_batch(bad, 3)
    with pytest.raises(BadObject, match="wanted batch 4, found batch 3"):
        decode_batch(BATCH, 4)


def test_replicas_are_whole() -> None:
    whole = Epoch(1, ("a", "b"), (2, 2), (1.0, 1.0), "x", 1, "start", replica_ranks=2)
    assert Epoch.decode(whole.encode()) == whole and b"replica_ranks" in whole.encode()
    for ranks in (0, 3):
        with pytest.raises(BadObject, match="wanted whole replicas"):
            Epoch.decode(dataclasses.replace(whole, replica_ranks=ranks).encode())


def test_a_newer_protocol_is_told_from_damage() -> None:
    newer = json.dumps({"protocol": values.PROTOCOL + 1, "epoch": ["of", "another", "kind"]})
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


def test_keys_and_what_they_name() -> None:
    assert layout.epoch_of(layout.epoch_key(7)) == 7 and layout.epoch_of("rdzv/epochs/x.json") == 0
    assert layout.member_of(layout.member_key("m0003-ab")) == "m0003-ab"
    assert layout.attempt_of("m0003-ab") == 3 and layout.attempt_of("t12") == 0
    assert layout.newest_term([layout.term_key(3), layout.term_key(9, "beat"), "lease/x"]) == 3
    assert layout.SEGMENT.fullmatch(layout.segment_key("w", 12))
    ours = [key for key in OLD if not key.startswith(("snapshots/", "samples/", "control/"))]
    known = [layout.epoch_of, layout.member_of, lambda k: layout.newest_term([k]),
             layout.SEGMENT.fullmatch, lambda k: k in ("run.json", "lease/000001.beat")]  # fmt: skip
    assert [key for key in ours if not any(name(key) for name in known)] == []
