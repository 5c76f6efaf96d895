"""Going on from what survivors of the last world keep (`kept_state.py`), instead of from the last
snapshot. Runs in the worker.

Rank 0 chooses, among what all nodes keep, the newest step that comes after the newest committed
snapshot, and of which every part is there: one, or those of all places in a copy of the model.
Nodes without a part that they need receive it from those with it, in pieces, from several at once.
Every byte is checked by its hash, as a snapshot's is. Either all ranks load the state, or all load
the snapshot.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from harness.core import step_records as rec
from harness.core.world import HarnessError
from harness.worker.process_group import Peers
from harness.worker.resuming.kept_state import KeptState, as_stored, drop, read
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, PartList, Ref
from storage.snapshots.restore import RewindOrder, left_behind
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.staging import Segment, StageFull, free_nbytes
from storage.stores.objects import ObjectStore
from storage.tiers.tiers import SegmentTier, Tiered

T = TypeVar("T")
TIER = "survivors"  # what facts call it
PIECE_NBYTES = 16 << 20


@dataclass(frozen=True)
class Holding:
    """The report of one rank. `leads`: it is its node's first rank, which reads, sends and
    receives; `kept`: what the node keeps, without records and part lists; `place`: the rank's place
    in a copy of the model, of `copy_ranks` ranks."""

    leads: bool
    kept: tuple[KeptState, ...] = ()
    place: int = 0
    copy_ranks: int = 1


@dataclass(frozen=True)
class ChosenPart:
    """The part of one place. `holders`: ranks that have it, in order; `takers`: ranks that receive
    it."""

    holders: tuple[int, ...]
    takers: tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """The state that the world goes on from. `parts`: of each place in a copy of the model; none:
    no state is usable; `doubt`: which rank held another state, or why none is used."""

    step: int = 0
    parts: tuple[ChosenPart, ...] = ()
    doubt: str = ""


def choose(
    holdings: Sequence[Holding], run: str, phase: int, newest: str, orders: Sequence[RewindOrder]
) -> Chosen:
    """Choose from all ranks' holdings, in rank order. `newest`: name of the newest snapshot, "":
    none is committed; `orders`: the rewinds so far."""
    least = Ref.parse(newest).step if newest else 0
    found = [
        (rank, kept)
        for rank, holding in enumerate(holdings)
        for kept in holding.kept
        if (kept.run, kept.phase) == (run, phase)
        and newest in kept.behind
        and kept.step > least
        and not left_behind([kept.ref], orders)
    ]
    for step, ranks in sorted({(kept.step, kept.copy_ranks) for _, kept in found}, reverse=True):
        last = [(r, k) for r, k in found if (k.step, k.copy_ranks) == (step, ranks)]
        places = [{r: k.content for r, k in last if k.place == place} for place in range(ranks)]
        if not all(places):
            continue  # of some part nobody has this step
        parts, doubt = [], ""
        for place, held in enumerate(places):
            content, times = Counter(held.values()).most_common(1)[0]
            if 2 * times <= len(held):
                return Chosen(
                    doubt=f"survivors hold different states of step {step}; none is used"
                )
            odd = sorted(rank for rank, one in held.items() if one != content)
            if odd:
                doubt = f"rank {odd[0]} held another state of step {step} than the others"
            holders = tuple(rank for rank, one in held.items() if one == content)
            parts.append(ChosenPart(holders, takers(holdings, place, ranks, holders)))
        return Chosen(step, tuple(parts), doubt)
    return Chosen()


def takers(
    holdings: Sequence[Holding], place: int, copy_ranks: int, holders: Collection[int]
) -> tuple[int, ...]:
    """Return the first ranks of the nodes that lack the part of a place and need it: all nodes, or
    those with that place, if copies are still of as many ranks."""
    found: list[int] = []
    leader = 0
    for rank, holding in enumerate(holdings):
        leader = rank if holding.leads else leader
        needs = holding.copy_ranks != copy_ranks or holding.place == place
        if needs and holdings[leader].leads and leader not in (*holders, *found):
            found.append(leader)
    return tuple(found)


def plan(part: ChosenPart, nbytes: int) -> list[tuple[int, int, int, int]]:
    """Return who sends what: (holder, taker, start, end) of each piece, in order. Each taker begins
    with another holder."""
    pieces = [(at, min(at + PIECE_NBYTES, nbytes)) for at in range(0, nbytes, PIECE_NBYTES)]
    return [
        (part.holders[(turn + number) % len(part.holders)], taker, start, end)
        for turn, taker in enumerate(part.takers)
        for number, (start, end) in enumerate(pieces)
    ]


class Survivors:
    """The state that this rank's node keeps, and the way to and from the other nodes. `folder`: the
    node's stage; None: there is no agent. `tell`: warns, on rank 0."""

    def __init__(self, peers: Peers, folder: Path | None, tell: Callable[[str], None]):
        self._peers, self._folder, self._tell = peers, folder, tell
        self._holdings: list[Holding] = []
        self._mine: dict[int, KeptState] = {}  # on the node's first rank

    def meet(self, said: T) -> list[T]:
        """Exchange what all nodes keep. Return what all ranks have said, in rank order."""
        peers = self._peers
        leads = self._folder is not None and peers.local_rank == 0
        self._mine = read(self._folder) if leads else {}
        told = tuple(replace(one, records="", part_list="") for one in self._mine.values())
        holding = Holding(leads, told, peers.place, peers.copy_ranks)
        every = self._peers.gather((said, holding))
        self._holdings = [holding for _, holding in every]
        return [one for one, _ in every]

    def choose(self, run: str, phase: int, newest: str, orders: Sequence[RewindOrder]) -> Chosen:
        """Call `choose` with the ranks' holdings."""
        return choose(self._holdings, run, phase, newest, orders)

    def take(
        self,
        chosen: Chosen,
        after: int,
        store: ObjectStore,
        load: Callable[[Manifest, Snapshots], None],
    ) -> KeptState | None:
        """Load the chosen state on all ranks, which call this together, and return it; None: not
        all nodes could get it. `after`: step of the snapshot that it comes after; `load`: loads a
        snapshot. Raises HarnessError if some rank could not load it; then no node keeps it any
        more."""
        peers, why = self._peers, ""
        parts: list[KeptState] = []
        for place, part in enumerate(chosen.parts):
            kept = self._from(part.holders[0], place)
            parts.append(kept)
            try:
                self._exchange(part, kept)
            except (StageFull, OSError) as e:
                why = why or str(e)
        if self._fails(why):
            return None
        try:
            chained(parts[0].steps(), after, "")  # raises for a gap
            manifest = Manifest.merge([PartList.from_json(kept.part_list) for kept in parts])
            place = peers.place if len(parts) == peers.copy_ranks else 0
            manifest = replace(manifest, tensors=as_stored(manifest.tensors, place))
            mine = read(self._folder).values()
            spans = {key: (kept.file, *span) for kept in mine for key, span in kept.spans.items()}
            near = Tiered(store, manifest, [SegmentTier(manifest.parts, spans)])
            load(manifest, Snapshots(near))
        except (StoreError, ValueError, KeyError) as e:
            why = str(e)
        if self._fails(why):  # other ranks have loaded it, so this world cannot begin elsewhere
            if self._folder is not None and peers.local_rank == 0:
                drop(self._folder)
            raise HarnessError("a state of survivors was bad: the next world begins without it")
        return parts[0]

    def _fails(self, why: str) -> bool:
        found = [said for said in self._peers.gather(why) if said]
        if found:
            self._tell(f"the state that survivors hold cannot be used: {found[0]}")
        return bool(found)

    def _from(self, source: int, place: int) -> KeptState:
        """Return what rank `source` keeps of a place, on all ranks."""
        box = [self._mine[place] if self._peers.rank == source else None]
        if self._peers.control is not None:
            dist.broadcast_object_list(box, src=source, group=self._peers.control)
        assert box[0] is not None
        return box[0]

    def _exchange(self, part: ChosenPart, kept: KeptState) -> None:
        """Send and receive what some nodes lack of one part. Raises StageFull, OSError on a taker
        without room; then it receives into memory that is thrown away, for the holders' sake."""
        rank, control = self._peers.rank, self._peers.control
        nbytes = max((end for _, end in kept.spans.values()), default=0)
        mine = [one for one in plan(part, nbytes) if rank in one[:2]]
        if not mine:
            return
        path, failed = None, None
        if rank in part.takers:
            assert self._folder is not None
            path = self._folder / f"kept-{secrets.token_hex(4)}.segment"
            try:
                if free_nbytes(self._folder) < 2 * nbytes:
                    raise StageFull(f"{self._folder}: no room for {nbytes >> 20} MiB twice")
                segment = Segment.create(path, nbytes)
            except (StageFull, OSError) as e:
                segment, failed = Segment.anonymous(nbytes), e
        else:
            segment = Segment.open(Path(self._mine[kept.place].file), writable=True)
        memory = torch.frombuffer(segment.view, dtype=torch.uint8)
        works = [
            dist.isend(memory[start:end], taker, group=control)
            if rank == holder
            else dist.irecv(memory[start:end], holder, group=control)
            for holder, taker, start, end in mine
        ]
        for work in works:
            if work is not None:
                work.wait()
        if failed is not None:
            raise failed
        if path is not None:
            assert self._folder is not None
            replace(kept, file=str(path)).write(self._folder)


def chained(records: Sequence[rec.StepRecord], after: int, head: str) -> list[rec.StepRecord]:
    """Return the records behind step `after` as a chain that goes on from `head`: their keeper was
    not rank 0, whose times of steps the chain before holds. Raises ValueError for a gap."""
    found: list[rec.StepRecord] = []
    for record in records:
        if record.step <= after:
            continue
        if record.step != after + len(found) + 1:
            raise ValueError(f"wanted the record of step {after + len(found) + 1}")
        found.append(record.chained(found[-1].h if found else head))
    return found
