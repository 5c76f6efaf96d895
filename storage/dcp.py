"""Tensors <-> parts of a snapshot, through the planners of torch.distributed.checkpoint. Torch is
imported here and in `loading.py`, `copying.py`, `fingerprints.py`, `pieces.py`, `trees.py`,
`ranks.py` and `state.py`, and nowhere else in `storage`.

DCP's planners decide who writes what and who reads what, so FSDP2, TP, HSDP and DDP state is saved
on one world and loaded on another. The layout beneath is ours: raw little-endian tensor bytes in
hashed parts, an index in the manifest, and JSON for the rest. Nothing that comes from a store is
ever unpickled. The one exchange between ranks is `Saver.plan`; loading has none.

    tensors, data = split(state)                       join(tensors, data) -> state
    saver.plan(tensors)      collective, when the structure is new
    staged = saver.stage(tensors)                      a copy in host memory; training may go on
    staged = saver.begin(tensors, later)    ... or go on at once, and staged.wait() before anything
                                            changes `later`
    saver.write(staged, ref, {"state": data}, token)   no collectives: any thread
    load(snapshots, manifest, destinations(manifest, tensors, like))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from storage.copying import ALIGN, Copying, Filled, Layout, Move, Staged, pin, version_of
from storage.errands import ErrandThread
from storage.loading import destinations, like_parameters, load
from storage.manifest import Manifest, Ref
from storage.pieces import spread
from storage.ranks import gathered
from storage.snapshots import Snapshots
from storage.trees import dtype_name, join, split

__all__ = [
    "Saver",
    "Staged",
    "destinations",
    "join",
    "like_parameters",
    "load",
    "pin",
    "split",
]

# a rank's bytes are cut into files of about this size: what one failed request repeats
FILE_NBYTES = 256 << 20
ALONE_NBYTES = 4 << 20  # of a tensor that training leaves alone: it gets a file of its own

if sys.byteorder != "little":  # the index has no byte order, so it must have only one
    raise ImportError("storage.dcp stores tensors little-endian; this machine is not")


class Saver:
    """Saves this rank's share of a state. `group`: all ranks that save together (gloo), None for
    one process alone.

    Plain tensors are taken to be the same on all ranks: each is written once, by the rank with the
    least to write. Who calls this has to make sure (harness/worker/replicas.py does); tensors that
    differ between ranks need different names.
    """

    def __init__(
        self, snapshots: Snapshots, group: dist.ProcessGroup | None = None, own_memory: bool = True
    ):
        """`own_memory`: False for who gives `begin` a buffer each time."""
        self.snapshots, self._group, self._own_memory = snapshots, group, own_memory
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._beside = ErrandThread("stage")
        self._layout: Layout | None = None
        self._free: list[torch.Tensor] = []  # two at most: one being written, one being filled
        self._base: Manifest | None = None  # the last that we committed

    def plan(self, tensors: dict[str, torch.Tensor], still: Collection[str] = ()) -> None:
        """Agree who writes what. Collective: all ranks call it together. Quick when no rank's
        structure has changed. `still`: names of what training leaves alone, which gets files of its
        own.

        Raises ValueError on all ranks alike if they disagree about a tensor or leave a hole.
        """
        structure = _structure(tensors)
        changed = self._layout is None or self._layout.structure != structure
        if not any(gathered(changed, self._group)):
            return
        planner = _save_planner(tensors)
        try:
            local: Any = planner.create_local_plan()
        except (ValueError, RuntimeError, TypeError) as e:
            # told to all, or they would wait for us for ever
            local = f"rank {self.rank} cannot save its tensors: {e}"
        plans = gathered(local, self._group)
        for plan in plans:
            if isinstance(plan, str):
                raise ValueError(plan)
        wanted: dict[str, tuple[Any, ...]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                found = (tuple(item.tensor_data.size), str(item.tensor_data.properties.dtype))
                if wanted.setdefault(item.index.fqn, found) != found:
                    raise ValueError(
                        f"tensor {item.index.fqn!r} is {found} on rank {rank} and "
                        f"{wanted[item.index.fqn]} on a lower one; give tensors that differ "
                        "between ranks different names"
                    )
        # the same on all ranks, as their input is
        mine = planner.create_global_plan(plans)[0][self.rank]
        self._layout = _lay_out(structure, tensors, mine.items, still)
        self._free = [_buffer(self._layout)] if self._own_memory else []

    @property
    def planned(self) -> bool:
        return self._layout is not None

    @property
    def nbytes(self) -> int:
        """Of this rank's share. Raises RuntimeError before `plan`."""
        return self._planned().nbytes

    def fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Is the structure of these tensors the planned one? If not (on any rank), all ranks
        must `plan` again."""
        return self._layout is not None and self._layout.structure == _structure(tensors)

    def stage(self, tensors: dict[str, torch.Tensor]) -> Staged:
        """Copy what this rank writes to host memory; the caller may change the tensors once it
        returns. No collectives.

        Raises RuntimeError if the structure is not the planned one.
        """
        staged = self.begin(tensors)
        staged.arrive()
        return staged

    def begin(
        self,
        tensors: dict[str, torch.Tensor],
        later: Collection[str] = (),
        buffer: torch.Tensor | None = None,
        still: Collection[str] = (),
        filled: Filled | None = None,
    ) -> Staged:
        """Like `stage`, but those named in `later` are copied beside the caller, who must `wait`
        before anything changes them.

        `buffer`: uint8, of `nbytes` at least, for who has shared memory; by default one of ours.
        `still`: those of `later` that are copied only if they are not what `filled` says is in the
        buffer already; that is brought up to date.
        """
        layout = self._planned()
        if layout.structure != _structure(tensors):
            raise RuntimeError(
                "the tensors' names, shapes or placements are not the planned ones: call "
                "plan(tensors) on all ranks first"
            )
        own = buffer is None
        if buffer is None:
            buffer = self._free.pop() if self._free else _buffer(layout)
        else:
            layout.clear_gaps(buffer)
        planner = _save_planner(tensors)
        now: list[Move] = []
        then: list[Move] = []
        alone: list[Move] = []
        if filled is not None and filled.layout is not layout:
            filled.layout, filled.prints = layout, {}
        for item, (start, end) in zip(layout.items, layout.places, strict=True):
            source = planner.resolve_data(item).detach()
            target = buffer[start:end].view(source.dtype).view(source.shape)
            move = Move(item.index.fqn, source, target, version_of(source), start)
            if filled is not None and not (move.name in later and move.name in still):
                filled.prints.pop(start, None)
            if move.name not in later:
                now.append(move)
            elif filled is not None and move.name in still:
                alone.append(move)
            else:
                then.append(move)
        return Staged(layout, buffer, self, Copying(now, then, self._beside, alone, filled), own)

    def _planned(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("nothing is planned yet: call plan(tensors) on all ranks first")
        return self._layout

    def write(self, staged: Staged, ref: Ref, data: dict[str, Any], token: str) -> Manifest | None:
        """Store what was staged and try to commit: the manifest, or None while other ranks are
        still writing.

        No collectives, safe in a background thread. `token` is unique to this attempt. After an
        error `staged` still holds its bytes: write it again with the same token, or `release` it.
        """
        staged.arrive()
        base = (
            self._base if self._base is not None and self.snapshots.stay([self._base.ref]) else None
        )
        self.snapshots.write(
            ref, self.rank, self.world, staged.files(), staged.layout.index, data, token, base
        )
        manifest = self.snapshots.commit(ref, self.world)
        self._base = manifest or base
        staged.release()
        return manifest

    def _take_back(self, buffer: torch.Tensor, layout: Layout) -> None:
        if layout is self._layout and len(self._free) < 2:
            self._free.append(buffer)


def _structure(tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    def one(t: torch.Tensor) -> tuple[Any, ...]:
        return (t.shape, t.dtype, t.device, *spread(t))

    return tuple((name, *one(t)) for name, t in tensors.items())


def _save_planner(tensors: dict[str, torch.Tensor]) -> Any:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # DCP gives each replicated tensor, in order, to the rank with the least so far: largest first
    # makes that even.
    ordered = sorted(
        tensors, key=lambda name: (-tensors[name].numel() * tensors[name].element_size(), name)
    )
    planner.set_up_planner({name: tensors[name] for name in ordered})
    return planner


def _lay_out(
    structure: tuple[Any, ...],
    tensors: dict[str, torch.Tensor],
    items: Iterable[WriteItem],
    still: Collection[str],
) -> Layout:
    # What training leaves alone first, in files of its own, whose chunks stay the same from
    # snapshot to snapshot; large tensors of it one by one, whose chunks are the same on any world.
    # Then large ones first, of the model, then of what comes after it: so who
    # wants the model alone reads neighbours.
    top = {name.partition("/")[0]: None for name in tensors}
    rank = {name: i for i, name in enumerate(top)}
    by_size = sorted(
        tensors,
        key=lambda name: (
            name not in still,
            rank[name.partition("/")[0]],
            -tensors[name].numel() * tensors[name].element_size(),
        ),
    )
    order = {name: i for i, name in enumerate(by_size)}
    kept: list[WriteItem] = []
    places: list[tuple[int, int]] = []
    index: dict[str, Any] = {}
    files: dict[str, tuple[int, int]] = {}
    at, name, first, kind = 0, "0000.bin", 0, ""
    for item in sorted(items, key=lambda i: order[i.index.fqn]):
        assert item.tensor_data is not None
        dtype, sizes = item.tensor_data.properties.dtype, list(item.tensor_data.chunk.sizes)
        entry = index.setdefault(
            item.index.fqn,
            {"shape": list(item.tensor_data.size), "dtype": dtype_name(dtype), "chunks": []},
        )
        nbytes = math.prod(sizes) * dtype.itemsize
        # an empty tensor, or this rank's empty share of an uneven one: its shape is all there is
        if nbytes == 0:
            continue
        at = -(-at // ALIGN) * ALIGN
        before, kind = kind, _kind(item.index.fqn in still, nbytes)
        ends = kind != before or kind == "alone" or at + nbytes - first > FILE_NBYTES
        if at > first and ends:
            name, first = f"{len(files):04d}.bin", at
        files[name] = (first, at + nbytes)
        kept.append(item)
        places.append((at, at + nbytes))
        entry["chunks"].append(
            {
                "offsets": list(item.tensor_data.chunk.offsets),
                "sizes": sizes,
                "part": name,
                "start": at - first,
                "end": at - first + nbytes,
            }
        )
        at += nbytes
    pinned = any(t.is_cuda for t in tensors.values())
    return Layout(structure, tuple(kept), tuple(places), files, index, pinned)


def _kind(still: bool, nbytes: int) -> str:
    """Tensors of one kind share files."""
    return ("alone" if nbytes >= ALONE_NBYTES else "still") if still else "trained"


def _buffer(layout: Layout) -> torch.Tensor:
    # Filled, not just reserved: page faults would be paid in the first stall, and padding must not
    # differ between attempts.
    return torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=layout.pinned).fill_(0)
