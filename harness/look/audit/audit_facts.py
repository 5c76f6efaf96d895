"""Checks of facts in an audit: the archive's volumes, each alone (`prove`) and as a chain, and the
live segments.

Pure but for the store it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.bucket import volumes as tiers
from harness.bucket.archive import BRIEF, STEPS, Cursor, Live, raw_key, read_volumes, segments
from harness.bucket.layout import segment_key
from harness.bucket.volumes import (
    Block,
    DamagedArchive,
    WriterSpan,
    brief_of,
    columns_of,
    digested,
    fact_in_line,
    joined_briefs,
    joined_columns,
    reader_after,
    sealed,
    unsealed,
    volume_of,
)
from harness.core import step_records
from harness.core.facts import Stamped, StepDone, Unreadable
from harness.core.step_records import NONE, Columns
from harness.look.audit.audit_rules import RuleBroken, whole_lines
from harness.look.audit.proof_cache import Prover
from storage.canonical_json import digest
from storage.stores.objects import ObjectStore

AuditProgress = Callable[[str, int, int], None]  # what, done, of how many


def prove(key: str, data: bytes, context: str) -> bytes:
    """Return a proof of one volume: its place in the chain and its content, or what is wrong."""
    try:
        volume = volume_of(data, key)
        for writer, segment, lines in volume.segments():
            for _ in whole_lines(f"{key}: {segment_key(writer, segment)}", lines):
                pass
    except (DamagedArchive, RuleBroken) as e:
        return sealed({"violation": str(e)}, (), b"")
    brief, steps = digested(volume, data)
    head = {"violation": "", "number": volume.number, "prev": volume.prev, "hash": digest(data)}
    return sealed({**head, "brief": len(brief)}, volume.runs, brief + steps)


@dataclass
class Found:
    """The facts of a run. `facts`: of all writers, without steps, by time. `steps`: each once.
    `lines`: the number of facts."""

    facts: list[Stamped] = field(default_factory=list)
    steps: Columns = field(default_factory=lambda: NONE)
    unread: list[Unreadable] = field(default_factory=list)
    writers: int = 0
    lines: int = 0

    def take(self, told: Iterable[Stamped]) -> None:
        for stamped in told:
            if isinstance(stamped.fact, Unreadable):
                self.unread.append(stamped.fact)
            else:
                self.facts.append(stamped)


def read(store: ObjectStore, prover: Prover, progress: AuditProgress) -> Found:
    """Read every fact, whole and in its place. Raises RuleBroken, StoreError."""
    live = Live.read(store).segments  # before the archive, as every reader does
    found = Found()
    cursors, rows = _archived(store, prover, found, progress)
    for done, (writer, parts) in enumerate(live.items(), 1):
        cursor = cursors.setdefault(writer, Cursor())
        reader = reader_after(writer, cursor.head)
        fresh = [(number, data) for number, data in parts if number >= cursor.next]
        for wanted, (number, data) in enumerate(fresh, cursor.next):
            key = segment_key(writer, number)
            if number != wanted:
                raise RuleBroken(
                    f"facts of {writer}: wanted segments numbered without a gap, found {key} where "
                    f"{segment_key(writer, wanted)} should be"
                )
            for where, line in whole_lines(key, data):
                found.take(reader.read(where, line))
        progress("facts", done, len(live))
    told = [s.fact for s in found.facts if isinstance(s.fact, StepDone)]
    found.facts = sorted(
        (s for s in found.facts if not isinstance(s.fact, StepDone)), key=lambda s: s.t
    )
    steps = step_records.joined([*rows, step_records.of_facts(told)])
    rows.clear()  # they take as much memory as all steps
    found.writers, found.lines = len(cursors), len(found.facts) + len(steps)
    found.steps = step_records.newest_told(steps)
    return found


def _archived(
    store: ObjectStore, prover: Prover, found: Found, progress: AuditProgress
) -> tuple[dict[str, Cursor], list[Columns]]:
    """Read the archive's volumes. Return how far they go, by writer, and the steps."""
    cursors: dict[str, Cursor] = {}
    prev, briefs, steps = "", list[bytes](), list[bytes]()
    runs: Sequence[WriterSpan] = ()
    count = sum(1 for _ in _numbers(store))
    proofs = prover.each(store, (raw_key(n) for n in range(count)), prove, "")
    for number, (key, proof) in enumerate(proofs):
        if proof is None:
            raise RuleBroken(f"{key}: missing, but later volumes follow from it")
        head, runs, body = unsealed(proof, key)
        if head["violation"]:
            raise RuleBroken(head["violation"])
        if (head["number"], head["prev"]) != (number, prev):
            raise RuleBroken(
                f"{key}: wanted volume {number} after {prev or 'none'}, found volume "
                f"{head['number']} after {head['prev'] or 'none'}"
            )
        prev = head["hash"]
        for run in runs:
            cursor = cursors.setdefault(run.writer, Cursor())
            if (run.first, run.head) != (cursor.next, cursor.head):
                raise RuleBroken(
                    f"{key}: wanted facts of {run.writer} from segment {cursor.next} on, found "
                    f"them from {run.first} on"
                )
            cursor.next = run.end
        briefs.append(body[: head["brief"]])
        steps.append(body[head["brief"] :])
        brief = brief_of(briefs[-1], key)
        for run in brief.runs:
            cursors[run.writer].head = run.head
        found.take(fact_in_line(writer, line) for writer, _, line in brief.lines())
        progress("volumes", number + 1, count)
    there = segments(store) if count else {}  # segments are deleted only after blocks exist
    for kind, parts, join in ((BRIEF, briefs, joined_briefs), (STEPS, steps, joined_columns)):
        end = 0
        for block, data in tiers.read(store, kind):
            end = block.end if block.first == end else end
            _compare(store, kind, block, data, parts[block.first : block.end], join)
        _check_all_there(kind, end, count, runs, there)
    return cursors, [columns_of(data, "steps") for data in steps]


def _check_all_there(
    kind: str,
    end: int,
    count: int,
    runs: Sequence[WriterSpan],
    there: Mapping[str, Collection[int]],
) -> None:
    """Check that blocks cover the volumes up to `end` of `count`. Only the newest volume (of
    `runs`) may lack its blocks, while its segments are still `there`. Raises RuleBroken."""
    kept = all(set(there.get(run.writer, ())).issuperset(range(run.first, run.end)) for run in runs)
    if end < count - kept:
        raise RuleBroken(
            f"{Block(0, end).key(kind)}: wanted blocks of all {count} volumes, found none from "
            f"volume {end} on; they were lost"
        )


def _compare(
    store: ObjectStore,
    kind: str,
    block: Block,
    data: bytes,
    parts: list[bytes],
    join: Callable[[list[bytes]], bytes],
) -> None:
    """Check that a block is what its volumes make. Raises RuleBroken."""
    if len(parts) < block.end - block.first:  # the block is newer than our reading of the volumes
        last = raw_key(block.end - 1)
        if not store.list(last):
            raise RuleBroken(
                f"{block.key(kind)}: wanted volumes up to {last}, found no such object"
            )
    elif data != (join(parts) if len(parts) > 1 else parts[0]):
        raise RuleBroken(
            f"{block.key(kind)}: wanted what volumes {block.first} to {block.end - 1} make, found "
            "another; it was changed"
        )


def _numbers(store: ObjectStore) -> Iterator[int]:
    """Yield the numbers of the existing volumes."""
    listed = set(store.list(raw_key(0).rpartition("/")[0] + "/"))
    number = 0
    while raw_key(number) in listed:
        yield number
        number += 1
    for _ in read_volumes(store, number):  # not listed yet
        yield number
        number += 1
