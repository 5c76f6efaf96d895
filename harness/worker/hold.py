"""Host memory that this rank's share of a snapshot is copied to, and who writes which share. Runs
in the worker."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.core.world import BadInput
from harness.uploader.client import Courier, Local, courier_at
from harness.worker import replicas
from harness.worker.environment import environment
from harness.worker.peers import Peers
from harness.worker.run import Run
from harness.worker.training import common
from storage import dcp
from storage.copying import Filled, Layout
from storage.errands import ErrandThread, start_thread
from storage.staging import Segment, StageFull
from storage.upload_job import Unchanged

# tensors by name -> which of them training leaves alone
LeftAlone = Callable[[Collection[str]], set[str]]


class Hold:
    """`courier_at`: the folder of the node's uploader; None: this process sends for itself."""

    def __init__(self, peers: Peers, run: Run, courier_at: str | None):
        self._peers, self._run, self._courier_at = peers, run, courier_at
        self._courier: Courier | None = None
        self._meeting = threading.Lock()
        self._preparing: threading.Thread | None = None
        self._sent: _Sent | None = None

    @functools.cached_property
    def saver(self) -> dcp.Saver:
        return dcp.Saver(self._run.snapshots, self._peers.control, own_memory=False)

    @functools.cached_property
    def sender(self) -> ErrandThread:
        """The thread from which snapshots are sent."""
        return ErrandThread("snapshot")

    @property
    def courier(self) -> Courier:
        """Who takes a snapshot to the bucket. Any thread may ask."""
        with self._meeting:
            if self._courier is None:
                self._courier = self._met()
            return self._courier

    def _met(self) -> Courier:
        local = Local(self._run.store, self._run.record_outcome, self._peers.life)
        if not self._courier_at:
            return local
        return courier_at(Path(self._courier_at), self._run.epoch, self._peers.local_rank, local)

    def prepare(self, state: Callable[[], dict[str, Any]], left_alone: LeftAlone) -> None:
        """Once, after the first step, when the optimizer has its state: plan, and take the memory
        before the first snapshot needs it."""
        if self._run.url and self._preparing is None:
            tensors, plain = dcp.split(state())
            if not self.saver.planned:
                self.plan(tensors, plain, left_alone(tensors))
            self.sender  # noqa: B018 - starts it
            take = functools.partial(self._take_memory, self.saver.nbytes)
            self._preparing = start_thread("stage", take)

    def plan(
        self, tensors: dict[str, torch.Tensor], plain: dict[str, Any], still: Collection[str]
    ) -> None:
        """Agree who writes what; `still` in files of its own. Raises BadInput on all ranks if they
        do not hold the same."""
        if self._peers.control is not None:
            size = self._peers.copy_ranks
            mine = replicas.held(common(tensors), common(plain), within_replicas=size > 1)
            said = (mine.total(), mine.shards_total(), environment(self._peers.device))
            totals, shards, kinds = zip(*self._peers.gather(said), strict=True)
            apart = any(len(set(shards[place::size])) > 1 for place in range(size))
            if apart or any(len(set(one.values())) > 1 for one in self._peers.by_stage(totals)):
                self.refuse_differences(mine, alike=all(kind == kinds[0] for kind in kinds))
        self.saver.plan(tensors, still)

    def refuse_differences(self, mine: replicas.Held, alike: bool = True) -> None:
        """All ranks come here. `alike`: they are of one kind; else their arithmetic may differ,
        and so may what it made. Raises BadInput."""
        leaves, shards = zip(*self._peers.gather((mine.leaves(), mine.shards)), strict=True)
        found, size = [], self._peers.copy_ranks
        for stage in self._peers.by_stage(leaves):
            found += replicas.differing(list(stage.values()), list(stage))
        for place in range(size):
            ranks = range(place, self._peers.world, size)
            found += replicas.differing(shards[place::size], ranks)
        if (
            found
            and not alike
            and all(
                path in mine.tensors and path.startswith(("model/", "optimizer/"))
                for path, _ in found
            )
        ):
            self._run.warn(
                "ranks are of different kinds (device or library), and their copies of "
                f"{found[0][0]!r} (one of {len(found)}) are no longer the same to the bit; a "
                "snapshot takes each tensor from one of them"
            )
            return
        raise BadInput(replicas.explain(found))

    def since_last(self, staged: dcp.Staged, name: str) -> Unchanged:
        """What of it is as it was in the last one that was handed over. `name`: its own."""
        last, now = self._sent, _Sent(staged.layout, dict(staged.still()), name)
        self._sent = now
        if last is None or last.layout is not now.layout:
            return Unchanged()
        same = {place for place, found in now.prints.items() if last.prints.get(place) == found}
        return Unchanged(last.name, now.layout.ranges(same))

    def _take_memory(self, nbytes: int) -> None:
        with contextlib.suppress(StageFull):  # said when a snapshot needs it
            segment = self.courier.segment(nbytes)
            dcp.pin(tensor_of(segment))
            self.courier.give_back(segment)

    def segment(self, make_room: Callable[[], None]) -> Segment:
        """Memory for this rank's share. `make_room`: waits until all that was sent has landed.
        Raises StageFull."""
        if self._preparing is not None:
            self._preparing.join()
        try:
            segment = self.courier.segment(self.saver.nbytes)
        except StageFull:
            make_room()  # one buffer it is, then
            segment = self.courier.segment(self.saver.nbytes)
        dcp.pin(tensor_of(segment))
        return segment


@dataclass(frozen=True)
class _Sent:
    """A snapshot that was handed over: its layout, fingerprints of what training leaves alone."""

    layout: Layout
    prints: dict[int, str]
    name: str


def filled_of(segment: Segment) -> Filled:
    """What it holds already."""
    if segment.filled is None:
        segment.filled = Filled()
    found: Filled = segment.filled
    return found


def tensor_of(segment: Segment) -> torch.Tensor:
    """Its bytes, uint8."""
    return torch.frombuffer(segment.view, dtype=torch.uint8)
