"""Common parts of the audit's rules, and the rules on bills, setups and trackers' streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from harness.bucket.archive import RecordsPart
from harness.bucket.layout import EPOCH_NBYTES, Epoch, attempt_of, epoch_key
from harness.bucket.setup_objects import DIFF_NBYTES, SETUP_NBYTES, decode_setup, kept_digest
from harness.bucket.volumes import sealed, unsealed
from harness.core.decoding import amount
from harness.core.facts import AttemptEnded, AttemptIntended, RunEnded, Stamped, is_spelled
from harness.core.sample_order import batching_of
from harness.core.step_records import Columns, Committed
from harness.core.world import BadInput
from harness.ledger.bill import NANO, AttemptRow, ns, price
from harness.ledger.ledger import Ledger
from harness.look.audit.proof_cache import Prover
from harness.look.trackers.stream_objects import STEP, STREAM, batch_key, decode_batch, newest_batch
from storage.canonical_json import BadObject, canonical, digest, parsed
from storage.stores.objects import ObjectStore, get_each

FIELDS = {
    "version": int,
    "seed": int,
    "samples": int,
    "global_batch": int,
    "micro_batch": int,
    "shuffle": bool,
}


class RuleBroken(Exception):
    """A violation: what was wanted, what was found, in which object."""


def json_of(key: str, data: bytes) -> Any:
    """Parse JSON. Raises RuleBroken."""
    try:
        return parsed(data, most_nbytes=EPOCH_NBYTES)
    except ValueError as e:
        raise RuleBroken(
            f"{key}: wanted JSON, found {len(data)} bytes that are not ({e}); it was changed"
        ) from e


def identity_of(key: str, data: bytes) -> dict[str, Any]:
    """Return the content of run.json, or of a later phase's identity, which must be in its one
    spelling. Raises RuleBroken."""
    found = json_of(key, data)
    if not isinstance(found, dict) or canonical(found) != data:
        raise RuleBroken(
            f"{key}: wanted canonical JSON as it was created, found another spelling; it was "
            "changed"
        )
    for name, kind in FIELDS.items():
        if type(found.get(name)) is not kind:
            raise RuleBroken(
                f"{key}: wanted {name} of type {kind.__name__}, found {found.get(name)!r}; "
                "it was changed"
            )
    try:
        batching_of(found)
    except BadInput as e:
        raise RuleBroken(f"{key}: {e}") from e
    return found


def whole_lines(key: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (place, line) for a fact segment, each in exactly the spelling of facts.Chain.

    Raises RuleBroken.
    """
    *lines, rest = data.split(b"\n")
    if rest or not lines:
        raise RuleBroken(
            f"{key}: wanted whole lines, found {len(rest)} bytes after the last; it was cut or "
            "changed"
        )
    for number, line in enumerate(lines, 1):
        body = json_of(f"{key}, line {number}", line)
        if not is_spelled(body, line):
            raise RuleBroken(
                f"{key}, line {number}: wanted the fact as it was written, found another spelling; "
                "it was changed"
            )
        yield f"{key}, line {number}", line.decode()


# Checks of bills in an audit: each alone, and all of them against the ledger. Pure.

SECONDS, USD = 1e-6, 1e-9  # tolerances: a clock's float has less than a nanosecond's precision


def check_bills(facts: Sequence[Stamped]) -> tuple[int, dict[int, AttemptEnded]]:
    """Check each attempt's bill alone. Return the number of intents and how each attempt ended.

    Raises RuleBroken.
    """
    intended: dict[int, tuple[float, AttemptIntended]] = {}
    ended: dict[int, AttemptEnded] = {}
    run_ended_t = max((s.t for s in facts if isinstance(s.fact, RunEnded)), default=None)
    for stamped in facts:
        if isinstance(stamped.fact, AttemptIntended):
            intended.setdefault(stamped.fact.attempt, (stamped.t, stamped.fact))
        elif isinstance(stamped.fact, AttemptEnded):
            ended[stamped.fact.attempt] = stamped.fact  # a later one replaces an earlier one
    for number, e in ended.items():
        if number not in intended:
            raise RuleBroken(
                f"attempt {number}: wanted an intent before its end, found AttemptEnded alone"
            )
        seconds = 0.0 if e.up_s is None else max(0.0, e.gone_s - e.up_s)
        usd_per_h = amount(intended[number][1].offer.get("usd_per_h"))
        usd = price(ns(seconds), usd_per_h) / NANO
        near = USD + usd_per_h * SECONDS / 3600
        if abs(e.billed_s - seconds) > SECONDS or abs(e.usd - usd) > near:
            raise RuleBroken(
                f"attempt {number}: wanted a bill of {seconds} s and {usd} USD (from up to gone at "
                f"its price), found {e.billed_s} s and {e.usd} USD"
            )
    for number, (t, _) in intended.items():
        if run_ended_t is not None and t <= run_ended_t and number not in ended:
            raise RuleBroken(
                f"attempt {number}: wanted its end before the run's, found RunEnded but no "
                "AttemptEnded"
            )
    return len(intended), ended


def check_launched(
    facts: Iterable[Stamped], worlds: Mapping[int, Epoch], somebody_led: bool
) -> None:
    """Check that each member with an attempt's number has an intent, if any controller ever held
    the lease: a controller records its intent before it requests a node. Raises RuleBroken."""
    if not somebody_led:  # then the agents' starter numbered them
        return
    wanted = {s.fact.attempt for s in facts if isinstance(s.fact, AttemptIntended)}
    for number, epoch in worlds.items():
        for member in epoch.members:
            if (attempt := attempt_of(member)) and attempt not in wanted:
                raise RuleBroken(
                    f"{epoch_key(number)}: wanted a fact that attempt {attempt} was asked for, "
                    f"since {member} takes part; found none: facts of a controller were lost"
                )


def check_buckets(
    facts: Sequence[Stamped], records: Committed, steps: Columns, ended: dict[int, AttemptEnded]
) -> None:
    """Check that the ledger's rows, which are sums of buckets, agree with the facts' bills, which
    are not, to the nanosecond and the nano-dollar. Raises RuleBroken."""
    now_s = max((s.t for s in facts), default=0.0)
    now_s = max(now_s, float(steps["end"].max(initial=0.0)))
    for row in Ledger.of(facts, records, now_s, steps).attempts:
        e = ended.get(row.attempt)
        if row.name != str(row.attempt):
            check_stranger(row)
        if e is None or row.name != str(row.attempt):
            continue  # not billed to the end yet, or not launched by a controller
        wanted_ns = 0 if e.up_s is None else max(0, ns(e.gone_s) - ns(e.up_s))
        painted_ns = sum(b - a for a, b, _ in row.segments)
        if not row.billed_ns == painted_ns == wanted_ns or row.billed_nusd != ns(e.usd):
            raise RuleBroken(
                f"attempt {row.attempt}: wanted buckets that add up to {wanted_ns} ns and "
                f"{ns(e.usd)} nano-USD, found {row.billed_ns} ns ({painted_ns} painted) and "
                f"{row.billed_nusd} nano-USD"
            )


def check_stranger(row: AttemptRow) -> None:
    """Check a node that no controller launched: no fact holds its bill, so it must be its time
    multiplied by its price. Raises RuleBroken."""
    painted_ns = sum(b - a for a, b, _ in row.segments)
    wanted_nusd = price(painted_ns, row.usd_per_h)
    if row.billed_ns != painted_ns or row.billed_nusd != wanted_nusd:
        raise RuleBroken(
            f"node {row.name}: wanted buckets that add up to {painted_ns} ns and {wanted_nusd} "
            f"nano-USD (at ${row.usd_per_h:g} an hour), found {row.billed_ns} ns and "
            f"{row.billed_nusd} nano-USD"
        )


# The check in an audit that each setup and each patch is as it was written. Pure but for the
# store it is given.


def check_setups(store: ObjectStore, keys: Sequence[str]) -> tuple[int, str]:
    """Return how many objects of `keys` (under `setup/`) are ours, and what was proved.

    Raises RuleBroken, StoreError.
    """
    ours = {key: named for key in keys if (named := kept_digest(key))}
    patches: set[str] = set()
    wanted: dict[str, str] = {}  # digest of a patch -> the setup that names it
    for key, data in get_each(store, ours):
        if data is None or len(data) > max(SETUP_NBYTES, DIFF_NBYTES) or digest(data) != ours[key]:
            raise RuleBroken(f"{key}: wanted what its name has the digest of; it was changed")
        if key.endswith(".patch"):
            patches.add(ours[key])
            continue
        try:
            setup = decode_setup(data)
        except BadObject as e:
            raise RuleBroken(f"{key}: wanted a setup, found something else ({e})") from e
        if setup.git.diff_key:
            wanted[setup.git.diff_key] = key
    for name, key in wanted.items():
        if name not in patches:
            raise RuleBroken(f"{key} names a patch that is not there (setup/diff-{name}.patch)")
    return len(ours), "how the run was set up is as it was written"


# Checks of the trackers' stream in an audit: each batch alone (`prove`), then its steps against
# their records.

LOSS = "train/loss"
_OWN = {"loss", LOSS}  # names that a script may use for its own values; such steps are skipped
_ROW = np.dtype([("step", "<i8"), ("t", "<f8"), ("loss", "<f8")])


def prove(key: str, data: bytes, context: str) -> bytes:
    """Return a proof of one batch: the range of its rows, and its steps; or what is wrong."""
    number = newest_batch([key])
    try:
        header, rows = decode_batch(data, number)
    except BadObject as e:
        violation = (
            f"{key}: wanted a batch of the stream, found another object ({e}); it was changed"
        )
        return sealed({"violation": violation}, (), b"")
    steps = [(r.step, r.t, r.values[LOSS]) for r in rows if r.kind == STEP and LOSS in r.values]
    head = {"violation": "", "first": header.first_row, "end": header.end_row}
    return sealed(head, (), np.array(steps, _ROW).tobytes())


def check_stream(
    store: ObjectStore, prover: Prover, parts: Sequence[RecordsPart], recorded: Columns
) -> tuple[int, str]:
    """Check the stream. `parts`: on the run's line, whose steps are `recorded`.

    Raises RuleBroken, StoreError.
    """
    own = [step for part in parts for step, named in part.metrics if not _OWN.isdisjoint(named)]
    count, rows = newest_batch(store.list(STREAM)) + 1, 0
    end = 0
    for key, proof in prover.each(store, map(batch_key, range(count)), prove, ""):
        if proof is None:
            raise RuleBroken(f"{key}: missing, but later batches follow from it")
        head, _, body = unsealed(proof, key)
        if head["violation"]:
            raise RuleBroken(head["violation"])
        if head["first"] > end:
            raise RuleBroken(
                f"{key}: wanted rows from {end} on, or a rewind to an earlier one; found them from "
                f"{head['first']} on"
            )
        end = head["end"]
        rows += _check_batch(key, np.frombuffer(body, _ROW), own, recorded)
    return rows, "of the stream, with the losses of their records"


def _check_batch(key: str, told: Columns, own: Sequence[int], recorded: Columns) -> int:
    """Compare losses. Only steps with the record's end time count: a redone step ended later."""
    steps = told["step"]
    told = told[(steps > 0) & (steps <= len(recorded)) & ~np.isin(steps, own)]
    records = recorded[told["step"] - 1]
    same = (records["end"] == told["t"]) & (records["step"] == told["step"])
    told, records = told[same], records[same]
    right = (told["loss"] == records["loss"]) | (np.isnan(told["loss"]) & np.isnan(records["loss"]))
    if not right.all():
        row, record = (each[int(np.argmin(right))] for each in (told, records))
        raise RuleBroken(
            f"{key}: wanted the loss {record['loss']} of the record of step {row['step']}, found "
            f"{row['loss']}"
        )
    return len(told)
