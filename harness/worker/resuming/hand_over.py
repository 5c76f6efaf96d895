"""Going on from what survivors of the last world keep (`kept_state.py`), instead of from the last
snapshot. Runs in the worker.

Rank 0 chooses, among what all nodes keep, the newest step that comes after the newest committed
snapshot. Nodes without that state receive it from those with it, in pieces, from several at once.
Every byte is checked by its hash, as a snapshot's is. Either all ranks load the state, or all load
the snapshot.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from harness.core import step_records as rec
from harness.core.world import HarnessError
from harness.worker.process_group import Peers
from harness.worker.resuming.kept_state import KeptState, drop, read
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, Ref
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
    """The report of one rank about its node. `leads`: it is the node's first rank, which reads,
    sends and receives; `kept`: what the node keeps, without records and manifest; None: nothing."""

    leads: bool
    kept: KeptState | None


@dataclass(frozen=True)
class Chosen:
    """The state that the world goes on from. `holders`: ranks that have it, in order; `takers`:
    ranks that receive it; `doubt`: which rank held another state, or why none is used."""

    step: int = 0
    content: str = ""
    holders: tuple[int, ...] = ()
    takers: tuple[int, ...] = ()
    doubt: str = ""


def choose(
    holdings: Sequence[Holding], run: str, phase: int, newest: str, orders: Sequence[RewindOrder]
) -> Chosen:
    """Choose from all ranks' holdings, in rank order. `newest`: name of the newest snapshot, "":
    none is committed; `orders`: the rewinds so far. A Chosen without holders: none is usable."""
    least = Ref.parse(newest).step if newest else 0
    found = {
        rank: holding.kept
        for rank, holding in enumerate(holdings)
        if holding.kept is not None
        and (holding.kept.run, holding.kept.phase) == (run, phase)
        and newest in holding.kept.behind
        and holding.kept.step > least
        and not left_behind([holding.kept.ref], orders)
    }
    if not found:
        return Chosen()
    step = max(kept.step for kept in found.values())
    last = {rank: kept.content for rank, kept in found.items() if kept.step == step}
    content, times = Counter(last.values()).most_common(1)[0]
    odd = sorted(rank for rank, one in last.items() if one != content)
    if 2 * times <= len(last):
        return Chosen(doubt=f"survivors hold different states of step {step}; none is used")
    doubt = f"rank {odd[0]} held another state of step {step} than the others" if odd else ""
    holders = tuple(rank for rank, one in last.items() if one == content)
    takers = tuple(r for r, holding in enumerate(holdings) if holding.leads and r not in holders)
    return Chosen(step, content, holders, takers, doubt)


def plan(chosen: Chosen, nbytes: int) -> list[tuple[int, int, int, int]]:
    """Return who sends what: (holder, taker, start, end) of each piece, in order. Each taker begins
    with another holder."""
    pieces = [(at, min(at + PIECE_NBYTES, nbytes)) for at in range(0, nbytes, PIECE_NBYTES)]
    return [
        (chosen.holders[(turn + number) % len(chosen.holders)], taker, start, end)
        for turn, taker in enumerate(chosen.takers)
        for number, (start, end) in enumerate(pieces)
    ]


class Survivors:
    """The state that this rank's node keeps, and the way to and from the other nodes. `folder`: the
    node's stage; None: there is no agent. `tell`: warns, on rank 0."""

    def __init__(self, peers: Peers, folder: Path | None, tell: Callable[[str], None]):
        self._peers, self._folder, self._tell = peers, folder, tell
        self._holdings: list[Holding] = []

    def meet(self, said: T) -> list[T]:
        """Exchange what all nodes keep. Return what all ranks have said, in rank order."""
        leads = self._folder is not None and self._peers.local_rank == 0
        kept = read(self._folder) if leads else None
        holding = Holding(leads, None if kept is None else replace(kept, records="", manifest=""))
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
        peers = self._peers
        kept = read(self._folder) if peers.rank == chosen.holders[0] else None
        kept = self._from(chosen.holders[0], kept)
        nbytes = max((end for _, end in kept.places.values()), default=0)
        why = ""
        try:
            self._exchange(chosen, kept, nbytes)
        except (StageFull, OSError) as e:
            why = str(e)
        if self._fails(why):
            return None
        mine = read(self._folder)
        try:
            assert mine is not None
            chained(mine.steps(), after, "")  # raises for a gap
            # plain values that differ by rank are the first holder's
            first = Manifest.from_json(kept.manifest)
            manifest = replace(Manifest.from_json(mine.manifest), data=first.data)
            places = {key: (mine.file, *place) for key, place in mine.places.items()}
            near = Tiered(store, manifest, [SegmentTier(manifest, places)])
            load(manifest, Snapshots(near))
        except (StoreError, ValueError, KeyError) as e:
            why = str(e)
        if self._fails(why):  # other ranks have loaded it, so this world cannot begin elsewhere
            if self._folder is not None and peers.local_rank == 0:
                drop(self._folder)
            raise HarnessError("a state of survivors was bad: the next world begins without it")
        return kept

    def _fails(self, why: str) -> bool:
        found = [said for said in self._peers.gather(why) if said]
        if found:
            self._tell(f"the state that survivors hold cannot be used: {found[0]}")
        return bool(found)

    def _from(self, source: int, kept: KeptState | None) -> KeptState:
        if self._peers.control is None:
            assert kept is not None
            return kept
        box = [kept]
        dist.broadcast_object_list(box, src=source, group=self._peers.control)
        assert box[0] is not None
        return box[0]

    def _exchange(self, chosen: Chosen, kept: KeptState, nbytes: int) -> None:
        """Send and receive what some nodes lack. Raises StageFull, OSError on a taker without room;
        then it receives into memory that is thrown away, for the holders' sake."""
        rank, control = self._peers.rank, self._peers.control
        mine = [one for one in plan(chosen, nbytes) if rank in one[:2]]
        if not mine:
            return
        path, failed = None, None
        if rank in chosen.takers:
            assert self._folder is not None
            path = self._folder / f"kept-{secrets.token_hex(4)}.segment"
            try:
                if free_nbytes(self._folder) < 2 * nbytes:
                    raise StageFull(f"{self._folder}: no room for {nbytes >> 20} MiB twice")
                segment = Segment.create(path, nbytes)
            except (StageFull, OSError) as e:
                segment, failed = Segment.anonymous(nbytes), e
        else:
            held = read(self._folder)
            assert held is not None
            segment = Segment.open(Path(held.file), writable=True)
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
