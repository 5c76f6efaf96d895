"""Facts in an audit: the archive's volumes, each by itself (`prove`) and as a chain, and what is
live.

Pure but for the store it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.bucket import tiers
from harness.bucket.archive import BRIEF, STEPS, Cursor, Live, raw_key, segments, volumes
from harness.bucket.layout import segment_key
from harness.bucket.tiers import Block
from harness.bucket.volumes import (
    DamagedArchive,
    WriterSpan,
    brief_of,
    columns_of,
    digested,
    fact_of,
    joined_briefs,
    joined_columns,
    reader_after,
    sealed,
    unsealed,
    volume_of,
)
from harness.core import columns
from harness.core.columns import NONE, Columns
from harness.core.facts import Stamped, StepDone, Unreadable
from harness.core.values import digest
from harness.views.audit_rules import RuleBroken, whole_lines
from harness.views.proving import Prover
from storage.objects import ObjectStore

AuditProgress = Callable[[str, int, int], None]  # what, done, of how many


def prove(key: str, data: bytes, context: str) -> bytes:
    """Of one volume: its place in the chain, and what is made of it; or why it is none."""
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
    """`facts`: of all writers, without the steps, by time. `steps`: each once. `lines`: how many
    facts there were."""

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
    """Every fact, whole and in its place. Raises RuleBroken, StoreError."""
    live = Live.read(store).segments  # before the archive, as every reader
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
    steps = columns.joined([*rows, columns.of_facts(told)])
    rows.clear()  # as large as all steps
    found.writers, found.lines = len(cursors), len(found.facts) + len(steps)
    found.steps = columns.newest_told(steps)
    return found


def _archived(
    store: ObjectStore, prover: Prover, found: Found, progress: AuditProgress
) -> tuple[dict[str, Cursor], list[Columns]]:
    """Facts of the archive's volumes: how far they go, by writer, and the steps."""
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
        found.take(fact_of(writer, line) for writer, _, line in brief.lines())
        progress("volumes", number + 1, count)
    there = segments(store) if count else {}  # before blocks: they go when those have come
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
    """Blocks are there up to volume `end` of `count`. Only of the newest volume, which consists of
    `runs`, they may be missing while its segments are `there` still. Raises RuleBroken."""
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
    """Is a block what its volumes make? Raises RuleBroken."""
    if len(parts) < block.end - block.first:  # it has come since we read the volumes
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
    """Numbers of the volumes that are there."""
    listed = set(store.list(raw_key(0).rpartition("/")[0] + "/"))
    number = 0
    while raw_key(number) in listed:
        yield number
        number += 1
    for _ in volumes(store, number):  # not listed yet
        yield number
        number += 1
