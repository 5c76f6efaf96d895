"""Checks of step records in an audit: each object alone (`prove`), then the chain that they make.

Pure but for the store it is given. Everything that one object alone shows is a proof, made by any
process and remembered (`proof_cache.py`); the chain is followed from proof to proof.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.bucket import archive
from harness.bucket.archive import RecordsPart
from harness.bucket.layout import SAMPLES, Epoch, epoch_key
from harness.bucket.volumes import sealed, unsealed
from harness.core import step_records as rec
from harness.core.batch import Batching, digest, expected_digests, sample_hash
from harness.core.mesh import copy_ranks, parse
from harness.core.sample_order import batching_of
from harness.look.audit.audit_rules import RuleBroken
from storage.errors import NotFound
from storage.stores.objects import ObjectStore


# ---- one object ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Proof:
    """The findings in one object. `broken`: why it is no object of records ("": it is one; then
    `part` has its content). `violation`: the rule that one of its records breaks. `worlds`: each
    change of world, newest first: epoch, ranks, ranks of a replica, step."""

    broken: str
    violation: str
    worlds: tuple[tuple[int, int, int, int], ...]
    part: RecordsPart | None
    # for steps of a foreign trainer: the position of the first sample, and the one behind the last
    # sample; -1: the steps are our own
    begins: int = -1
    ends: int = -1
    skipped: tuple[tuple[int, str], ...] = ()  # steps whose update the guards skipped, and why

    def encode(self) -> bytes:
        head = {
            "broken": self.broken,
            "violation": self.violation,
            "worlds": self.worlds,
            "range": [self.begins, self.ends],
            "skipped": self.skipped,
        }
        return sealed(head, (), archive.encode([self.part] if self.part else []))

    @classmethod
    def decode(cls, data: bytes) -> Proof:
        head, _, body = unsealed(data, "a proof")
        parts = archive.decode(body, "a proof")
        worlds = tuple((e, ranks, size, step) for e, ranks, size, step in head["worlds"])
        part = parts[0] if parts else None
        skipped = tuple((step, why) for step, why in head["skipped"])
        begins, ends = head["range"]
        return cls(head["broken"], head["violation"], worlds, part, begins, ends, skipped)


def prove(key: str, data: bytes, context: str) -> bytes:
    """Return an encoded `Proof`. `context`: a list of the identities of the run's phases, run.json
    first; "" checks only that the object is whole."""
    try:
        part = _part(key, data)
    except rec.BrokenRecords as e:
        return Proof(str(e), "", (), None).encode()
    violation, worlds = "", list[tuple[int, int, int, int]]()
    if context:
        try:
            for phase, of_phase in _by_phase(key, part, json.loads(context)):
                _obey(key, of_phase, phase)
        except RuleBroken as e:
            violation = str(e)
    for r in reversed(part):
        world = (r.epoch, r.world, r.replica_ranks)
        if not worlds or worlds[-1][:3] != world:
            worlds.append((*world, r.step))
    begins, ends = part[0].begins, part[-1].begins + part[-1].samples
    if begins < 0:
        ends = -1
    skipped = tuple((r.step, r.skipped) for r in part if r.skipped)
    made = RecordsPart.of(key, part)
    return Proof("", violation, tuple(worlds), made, begins, ends, skipped).encode()


def _by_phase(
    key: str, part: list[rec.StepRecord], identities: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[rec.StepRecord]]]:
    """Yield the records of each phase, newest first, with the phase's identity. Raises RuleBroken
    for a record that is not of the phase that made its step."""
    begins = [int(one.get("begins", 0)) for one in identities]
    for number, records in itertools.groupby(
        reversed(part), lambda r: max(1, bisect_left(begins, r.step))
    ):
        of_phase, identity = list(records)[::-1], identities[number - 1]
        wanted = (number, rec.genesis(identity)[:16] if number > 1 else "")
        for r in reversed(of_phase):
            if (r.phase, r.identity) != wanted:
                raise RuleBroken(
                    f"{key}, step {r.step}: wanted a step of phase {number} with the identity "
                    f"{wanted[1] or 'of run.json'}, found phase {r.phase} with "
                    f"{r.identity or 'that of run.json'}"
                )
        first = of_phase[0]
        if first.step == begins[number - 1] + 1 and first.begins > 0:
            raise RuleBroken(
                f"{key}, step {first.step}: wanted the first step of phase {number} to begin at "
                f"position 0, found {first.begins}"
            )
        yield identity, of_phase


def _obey(key: str, part: list[rec.StepRecord], identity: dict[str, Any]) -> None:
    """Check the rules for each record alone. Raises RuleBroken for the newest violation."""
    batching, hashed = batching_of(identity), rec.records_contents(identity)
    if foreign := rec.is_foreign(identity):
        wanted = np.array([_digest_of(r, batching.global_batch) for r in part], np.uint64)
        _follow_on(key, part)
    else:
        wanted = expected_digests(batching, part[0].step - identity.get("begins", 0), len(part))
    later_epoch = part[-1].epoch
    for r, right in zip(reversed(part), reversed(wanted.tolist()), strict=True):
        _rules(f"{key}, step {r.step}", r, batching, f"{right:016x}", hashed, foreign)
        if r.epoch > later_epoch:
            raise RuleBroken(_went_back(key, r.step, r.epoch, later_epoch))
        later_epoch = r.epoch


def _went_back(key: str, step: int, epoch: int, later: int) -> str:
    return (
        f"{key}, step {step}: wanted generations that never go back, found generation {epoch} "
        f"before generation {later}"
    )


def _digest_of(r: rec.StepRecord, most: int) -> int:
    """Return the digest that a foreign trainer's step must have, given its recorded begin."""
    if r.begins < 0 or not 0 <= r.samples <= most:
        return 0  # another rule rejects it
    where = np.arange(r.begins, r.begins + r.samples, dtype=np.int64)
    return digest(sample_hash(where, where))


def _follow_on(key: str, part: list[rec.StepRecord]) -> None:
    """Check that each step of a foreign trainer begins where the step before it ended."""
    for before, r in itertools.pairwise(part):
        wanted = before.begins + before.samples
        if r.begins != wanted:
            raise RuleBroken(
                f"{key}, step {r.step}: wanted samples from position {wanted} on, where step "
                f"{before.step} has ended; found {r.begins}"
            )


def _rules(
    where: str, r: rec.StepRecord, batching: Batching, wanted: str, hashed: bool, foreign: bool
) -> None:
    if foreign:
        if not 0 < r.samples <= batching.global_batch or r.begins < 0:
            raise RuleBroken(
                f"{where}: wanted 1 to {batching.global_batch} samples from a position on, found "
                f"{r.samples} from {r.begins}"
            )
    elif r.samples != batching.global_batch:
        raise RuleBroken(
            f"{where}: wanted a global batch of {batching.global_batch} samples, found {r.samples}"
        )
    size = r.replica_ranks
    whole = len(r.shares) * size == r.world
    micro_batch = r.micro_batch or batching.micro_batch
    if not 0 < micro_batch <= batching.micro_batch or batching.micro_batch % micro_batch:
        raise RuleBroken(
            f"{where}: wanted micro-batches of {batching.micro_batch} samples, or equal parts of "
            f"them, found {micro_batch}"
        )
    done, wanted_micros = sum(r.shares), batching.global_batch // micro_batch
    fewer = foreign and 0 < done < wanted_micros  # at the end of a pass over the data
    if not (done == wanted_micros or fewer) or min(r.shares) < 0 or not whole:
        raise RuleBroken(
            f"{where}: wanted {wanted_micros} micro-batches over {r.world} ranks"
            f"{f' in replicas of {size}' * (size > 1)}, found shares {list(r.shares)}"
        )
    if r.digest != wanted:
        raise RuleBroken(
            f"{where}: wanted the samples of (seed {batching.seed}, step {r.step}), digest "
            f"{wanted}; found {r.digest}"
        )
    if bool(r.contents) != hashed:
        found = repr(r.contents) if r.contents else "none"
        raise RuleBroken(
            f"{where}: wanted a hash of contents exactly where run.json says that contents are "
            f"recorded, found {found}"
        )
    empty = r.weight == 0 and r.loss == 0  # the script has skipped all of it
    if not empty and not (r.weight > 0 and math.isfinite(r.weight)):
        raise RuleBroken(f"{where}: wanted a positive weight, found {r.weight}")
    if not (math.isfinite(r.loss) or r.skipped):
        raise RuleBroken(f"{where}: wanted a finite loss, found {r.loss}")


def _part(key: str, data: bytes) -> list[rec.StepRecord]:
    part = rec.decode(data, key, exact=True)
    if len(part) != data.count(b"\n"):  # an additional empty line, or another line end
        raise rec.BrokenRecords(
            f"{key}: wanted records as they were written, found another spelling; it was changed"
        )
    if rec.key(part) != key:
        raise rec.BrokenRecords(
            f"{key}: wanted records that fit this name, found those of {rec.key(part)}"
        )
    return part


def read_part(store: ObjectStore, key: str) -> list[rec.StepRecord]:
    """Read one object of records, whole to the byte. Raises BrokenRecords."""
    try:
        data = store.get(key)
    except NotFound:
        raise rec.BrokenRecords(_missing(key)) from None
    return _part(key, data)


def _missing(key: str) -> str:
    return f"{key}: missing, but a manifest or later records follow from it"


# ---- the chain -----------------------------------------------------------------------------------
def walk(
    store: ObjectStore, named: rec.RecordsRef, genesis: str
) -> Iterator[tuple[str, list[rec.StepRecord]]]:
    """Yield the objects of records from `named` (a manifest's `data["samples"]`) back to step 1,
    newest first, one at a time. The records of an object are in ascending order of steps. Raises
    BrokenRecords at the first that does not fit."""
    by_head = rec.heads(store.list(SAMPLES))
    key, want, step = named.key, named.head, named.last
    while True:
        part = read_part(store, key)
        _check_end(key, part[-1].step, part[-1].h, step, want)
        yield key, part
        want, step = part[0].prev, part[0].step - 1
        if want == genesis or step < 1:
            break
        key = _before(by_head, want, step)
    _check_begin(key, want, step, genesis)


def chain(
    proofs: dict[str, Proof],
    named: rec.RecordsRef,
    genesis: str,
    worlds: dict[int, Epoch],
    epoch: int,
    firsts: Container[int] = (),
) -> Iterator[tuple[str, RecordsPart]]:
    """Yield the same chain as `walk`, from proofs, and check every rule. `epoch`: the manifest's;
    `firsts`: the steps that begin a later phase, and read their data from the start.

    Raises BrokenRecords, RuleBroken.
    """
    by_head = rec.heads(proofs)
    key, want, step, ended = named.key, named.head, named.last, -1
    while True:
        part = _obeyed(proofs, key, worlds, epoch)
        ended = _joins(key, proofs[key], ended)
        first, last = int(part.rows["step"][0]), int(part.rows["step"][-1])
        _check_end(key, last, part.head, step, want)
        yield key, part
        want, step, epoch = part.prev, first - 1, int(part.rows["epoch"][0])
        if first in firsts:
            ended = -1
        if want == genesis or step < 1:
            break
        key = _before(by_head, want, step)
    _check_begin(key, want, step, genesis)


def _joins(key: str, proof: Proof, ended: int) -> int:
    """Check that a foreign trainer's object ends at position `ended`, where the next object begins
    (-1: there is none). Return where this one begins. Raises RuleBroken."""
    if ended >= 0 and proof.ends != ended:
        raise RuleBroken(
            f"{key}: wanted its samples to end at position {ended}, where the next step begins; "
            f"found {proof.ends}"
        )
    return proof.begins


def heads_at(
    store: ObjectStore, key: str, part: RecordsPart, steps: Sequence[int]
) -> dict[int, str]:
    """Return the hashes of the chain's records at those of `steps` (ascending) that lie in this
    object.

    A snapshot's record may lie before the end of an object: when its commit got no answer, or
    another snapshot overtook it, a later one carries its records again. Proofs do not remember the
    hash of every record, so only then is the object read again; its end, which the chain has fixed,
    fixes all of it. Raises BrokenRecords.
    """
    first, last = int(part.rows["step"][0]), int(part.rows["step"][-1])
    wanted = steps[bisect_left(steps, first) : bisect_right(steps, last)]
    if all(step == last for step in wanted):
        return dict.fromkeys(wanted, part.head)
    records = read_part(store, key)
    _check_end(key, records[-1].step, records[-1].h, last, part.head)
    return {step: records[step - first].h for step in wanted}


def _obeyed(
    proofs: dict[str, Proof], key: str, worlds: dict[int, Epoch], later: int
) -> RecordsPart:
    proof = proofs.get(key)
    if proof is None or proof.part is None:
        raise rec.BrokenRecords(proof.broken if proof else _missing(key))
    if proof.violation:
        raise RuleBroken(proof.violation)
    for epoch, ranks, size, step in proof.worlds:
        if epoch > later:
            raise RuleBroken(_went_back(key, step, epoch, later))
        if worlds and (epoch not in worlds or worlds[epoch].world != ranks):
            found = f"{worlds[epoch].world} ranks" if epoch in worlds else "no such generation"
            raise RuleBroken(
                f"{key}, step {step}: wanted the {ranks} ranks of generation {epoch}; "
                f"{epoch_key(epoch)} says {found}"
            )
        if worlds and size not in _replica_sizes(worlds[epoch]):
            raise RuleBroken(
                f"{key}, step {step}: wanted replicas of {worlds[epoch].replica_ranks} ranks, as "
                f"{epoch_key(epoch)} says, found replicas of {size}"
            )
        later = epoch
    return proof.part


def _replica_sizes(epoch: Epoch) -> tuple[int, ...]:
    """Return the ranks that a replica may have: for a foreign trainer it is a whole copy of the
    mesh, whose ranks share out a micro-batch themselves."""
    mesh = parse(epoch.mesh) if epoch.mesh else None
    return epoch.replica_ranks, copy_ranks(mesh, epoch.replica_ranks)


def _check_end(key: str, last: int, head: str, step: int, want: str) -> None:
    if head != want or last != step:
        raise rec.BrokenRecords(
            f"{key}: wanted step {step} with hash {want[:16]} at its end, found step {last} with "
            f"{head[:16]}"
        )


def _before(by_head: dict[str, str], want: str, step: int) -> str:
    if want[:16] not in by_head:
        raise rec.BrokenRecords(
            f"records up to step {step} are missing: step {step + 1} follows one with hash "
            f"{want[:16]}, found none"
        )
    return by_head[want[:16]]


def _check_begin(key: str, want: str, step: int, genesis: str) -> None:
    if (want, step) != (genesis, 0):
        raise rec.BrokenRecords(
            f"{key}: wanted step 1 to follow the run's identity ({genesis[:16]}), found step "
            f"{step + 1} after {want[:16]}; run.json was changed, or the records are of another run"
        )


def compare_archive(found: archive.Recorded, proofs: dict[str, Proof]) -> int:
    """Check that every entry of the archive matches the object that it names. Return their number.

    Raises RuleBroken.
    """
    if found.damage:
        raise RuleBroken(found.damage[0])
    for key, part in found.parts.items():
        proof = proofs.get(key)
        if proof is None or proof.part is None:
            raise RuleBroken(
                f"{key}: the archive has an entry of it, and it is not there, or broken"
            )
        if archive.encode([proof.part]) != archive.encode([part]):
            raise RuleBroken(f"archive/records/: its entry of {key} is not made of that object")
    return len(found.parts)
