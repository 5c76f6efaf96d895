"""Tensors <-> parts of a snapshot, through the planners of torch.distributed.checkpoint. The only
torch import in `storage`.

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
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from storage.copying import ALIGN, Copying, Layout, Move, Staged, pin, version_of
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots import Snapshots, scratch
from storage.staging import Beside
from storage.trees import dtype_name, join, split

__all__ = ["Saver", "Staged", "destinations", "join", "load", "pin", "split"]

# a rank's bytes are cut into files of about this size: what one failed request repeats
FILE_NBYTES = 256 << 20
# one request of a load, whole hash chunks: so little that it stays in a processor's cache until it
# is copied
READ_NBYTES = 8 << 20
READ_THREADS = 16

if sys.byteorder != "little":  # the index has no byte order, so it must have only one
    raise ImportError("storage.dcp stores tensors little-endian; this machine is not")


class Saver:
    """Saves this rank's share of a state. `group`: all ranks that save together (gloo), None for
    one process alone.

    Plain tensors are taken to be the same on all ranks: each is written once, by the rank with the
    least to write. Who calls this has to
    make sure (harness/worker/replicas.py does); tensors that differ between ranks need different
    names.
    """

    def __init__(
        self, snapshots: Snapshots, group: dist.ProcessGroup | None = None, own_memory: bool = True
    ):
        """`own_memory`: False for who gives `begin` a buffer each time."""
        self.snapshots, self._group, self._own_memory = snapshots, group, own_memory
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._beside = Beside("stage")
        self._layout: Layout | None = None
        self._free: list[torch.Tensor] = []  # two at most: one being written, one being filled
        self._base: Manifest | None = None  # the last that we committed

    def plan(self, tensors: dict[str, torch.Tensor]) -> None:
        """Agree who writes what. Collective: all ranks call it together. Quick when no rank's
        structure has changed.

        Raises ValueError on all ranks alike if they disagree about a tensor or leave a hole.
        """
        structure = _structure(tensors)
        changed = self._layout is None or self._layout.structure != structure
        if not any(self._gather(changed)):
            return
        planner = _save_planner(tensors)
        try:
            local: Any = planner.create_local_plan()
        except (ValueError, RuntimeError, TypeError) as e:
            # told to all, or they would wait for us for ever
            local = f"rank {self.rank} cannot save its tensors: {e}"
        plans = self._gather(local)
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
                        f"{wanted[item.index.fqn]} on a lower one; "
                        "give tensors that differ between ranks different names"
                    )
        # the same on all ranks, as their input is
        mine = planner.create_global_plan(plans)[0][self.rank]
        self._layout = _lay_out(structure, tensors, mine.items)
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
    ) -> Staged:
        """Like `stage`, but those named in `later` are copied beside the caller, who must `wait`
        before anything changes them.

        `buffer`: uint8, of `nbytes` at least, for who has shared memory; by default one of ours.
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
        for item, (start, end) in zip(layout.items, layout.places, strict=True):
            source = planner.resolve_data(item).detach()
            target = buffer[start:end].view(source.dtype).view(source.shape)
            (then if item.index.fqn in later else now).append(
                Move(item.index.fqn, source, target, version_of(source))
            )
        return Staged(layout, buffer, self, Copying(now, then, self._beside), own)

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

    def _gather(self, mine: Any) -> list[Any]:
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def _take_back(self, buffer: torch.Tensor, layout: Layout) -> None:
        if layout is self._layout and len(self._free) < 2:
            self._free.append(buffer)


def _structure(tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    def one(t: torch.Tensor) -> tuple[Any, ...]:
        spread = (t.device_mesh, t.placements) if isinstance(t, DTensor) else ()
        return (t.shape, t.dtype, t.device, *spread)

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
    structure: tuple[Any, ...], tensors: dict[str, torch.Tensor], items: Iterable[WriteItem]
) -> Layout:
    # Large ones first, of the model, then of what comes after it: so adapters lie together behind
    # the frozen weights, whose chunks stay the same from snapshot to snapshot, and who wants the
    # model alone reads neighbours.
    top = {name.partition("/")[0]: None for name in tensors}
    rank = {name: i for i, name in enumerate(top)}
    by_size = sorted(
        tensors,
        key=lambda name: (
            rank[name.partition("/")[0]],
            -tensors[name].numel() * tensors[name].element_size(),
        ),
    )
    order = {name: i for i, name in enumerate(by_size)}
    kept: list[WriteItem] = []
    places: list[tuple[int, int]] = []
    index: dict[str, Any] = {}
    files: dict[str, tuple[int, int]] = {}
    at, name, first = 0, "0000.bin", 0
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
        if at > first and at + nbytes - first > FILE_NBYTES:
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


def _buffer(layout: Layout) -> torch.Tensor:
    # Filled, not just reserved: page faults would be paid in the first stall, and padding must not
    # differ between attempts.
    return torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=layout.pinned).fill_(0)


# ---- loading -------------------------------------------------------------------------------------
def destinations(
    manifest: Manifest,
    have: dict[str, torch.Tensor],
    like: Callable[[str, tuple[int, ...]], torch.Tensor | None] = lambda name, shape: None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, torch.Tensor]:
    """`have`, plus a new tensor for every saved one that the program does not have yet (optimizer
    state before its first step).

    `wanted(name)`: False for those that it does not need either. `like(name, global shape)` returns
    the tensor it belongs to, or None. If that has the same global shape the new one is `empty_like`
    it (so a DTensor's placement and the device follow), else a plain CPU tensor. Always of the
    saved dtype.
    """
    made = dict(have)
    for name, entry in manifest.tensors.items():
        if name in made or not wanted(name):
            continue
        shape, dtype = tuple(entry["shape"]), _dtype_of(manifest, name)
        pattern = like(name, shape)
        if pattern is not None and tuple(pattern.shape) == shape:
            made[name] = torch.empty_like(pattern.detach(), dtype=dtype)
        else:
            made[name] = torch.empty(shape, dtype=dtype)
    return made


@dataclass(frozen=True)
class _Piece:
    """A box of a saved chunk and where it goes. Bytes [start, end) of the part span it; strides
    are the chunk's, in elements."""

    part: str
    start: int
    end: int
    strides: tuple[int, ...]
    target: torch.Tensor  # of the box's shape


def load(
    snapshots: Snapshots,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    threads: int = READ_THREADS,
) -> None:
    """Fill `tensors` (plain or DTensor, CPU or GPU) in place with what `manifest` has under their
    names.

    Only the byte ranges that this rank needs are fetched, in parallel, and every byte is verified.
    No collectives. Raises ValueError if a name is missing or shape or dtype differ (before anything
    is changed); SnapshotCorrupt if stored bytes are not what was committed (then the tensors hold a
    mixture: load an older snapshot into them).
    """
    metadata = Metadata({name: _metadata(manifest, name, t) for name, t in tensors.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    chunks = {
        (name, tuple(c["offsets"])): c for name in tensors for c in manifest.tensors[name]["chunks"]
    }
    pieces: list[_Piece] = []
    planned = dict.fromkeys(tensors, 0)
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            if math.prod(item.lengths) > 0:
                name = item.storage_index.fqn
                planned[name] += math.prod(item.lengths)
                pieces.extend(
                    _pieces(
                        chunks[name, tuple(item.storage_index.offset or ())],
                        item,
                        planner.resolve_tensor(item).detach(),
                    )
                )
    for name, t in tensors.items():
        wanted = (t.to_local() if isinstance(t, DTensor) else t).numel()
        if planned[name] != wanted:
            raise SnapshotCorrupt(
                f"snapshot {manifest.ref}: {name!r}: {wanted} elements wanted here, its index has "
                f"{planned[name]}; use an older snapshot"
            )
    batches = _batches(pieces)
    if len(batches) < 2:
        for batch in batches:
            _fill(snapshots, manifest, batch)
        return
    with ThreadPoolExecutor(min(threads, len(batches)), "snapshot-load") as pool:
        running = [pool.submit(_fill, snapshots, manifest, batch) for batch in batches]
        try:
            for one in running:
                one.result()
        except BaseException:
            # do not fetch the rest of what is no use
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _metadata(manifest: Manifest, name: str, tensor: torch.Tensor) -> TensorStorageMetadata:
    entry = manifest.tensors.get(name)
    if entry is None:
        raise ValueError(
            f"snapshot {manifest.ref} has no tensor {name!r} (it has {len(manifest.tensors)}); was "
            "it saved by another model or "
            "optimizer? Resume with the script that saved it, or start a new run URL"
        )
    shape, dtype = tuple(entry["shape"]), _dtype_of(manifest, name)
    if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
        raise ValueError(
            f"snapshot {manifest.ref}: {name!r} was saved as {dtype} {shape}, this program wants "
            f"{tensor.dtype} {tuple(tensor.shape)}; "
            "resume with the model that saved it, or start a new run URL"
        )
    boxes = [
        ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
        for c in entry["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)


def _dtype_of(manifest: Manifest, name: str) -> torch.dtype:
    found = getattr(torch, str(manifest.tensors[name]["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"snapshot {manifest.ref}: {name!r} has dtype {manifest.tensors[name]['dtype']!r}, "
            f"which torch {torch.__version__} does not "
            "know; use the torch that saved it"
        )
    return found


def _pieces(chunk: dict[str, Any], item: ReadItem, target: torch.Tensor) -> Iterable[_Piece]:
    """Cut a box until each piece spans at most READ_NBYTES: what is contiguous here and there at
    multiples of that, so that no hash chunk is read twice; else along its first dimensions."""
    strides, step = [], 1
    for size in reversed(chunk["sizes"]):
        strides.append(step)
        step *= size
    strides.reverse()
    width = target.element_size()
    nbytes = chunk["end"] - chunk["start"]
    if nbytes != step * width:
        raise SnapshotCorrupt(
            f"{item.storage_index.fqn!r}: {step} elements of {width} bytes in {nbytes} bytes; use "
            "an older snapshot"
        )

    def at_multiples(at: int, flat: torch.Tensor) -> Iterable[_Piece]:
        done = 0
        while done < len(flat):
            n = min(max(1, (READ_NBYTES - at % READ_NBYTES) // width), len(flat) - done)
            yield _Piece(chunk["part"], at, at + n * width, (1,), flat[done : done + n])
            done, at = done + n, at + n * width

    def cut(offsets: list[int], box: torch.Tensor) -> Iterable[_Piece]:
        span = (sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1) * width
        dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
        start = chunk["start"] + sum(o * s for o, s in zip(offsets, strides, strict=True)) * width
        if span == box.numel() * width and box.is_contiguous():
            yield from at_multiples(start, box.reshape(-1))
            return
        if span <= READ_NBYTES or dim is None:
            yield _Piece(chunk["part"], start, start + span, tuple(strides), box)
            return
        rows = max(1, READ_NBYTES // (strides[dim] * width))
        for first in range(0, box.shape[dim], rows):
            moved = [o + first if d == dim else o for d, o in enumerate(offsets)]
            yield from cut(moved, box.narrow(dim, first, min(rows, box.shape[dim] - first)))

    return cut(list(item.storage_offsets), target)


def _batches(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Neighbouring pieces of a part, read with one request of about READ_NBYTES."""
    batches: list[list[_Piece]] = []
    end = 0
    for piece in sorted(pieces, key=lambda p: (p.part, p.start)):
        last = batches[-1] if batches else None
        near = (
            last is not None
            and last[0].part == piece.part
            and piece.start - end <= READ_NBYTES // 4
        )
        if last is not None and near and piece.start // READ_NBYTES == last[0].start // READ_NBYTES:
            last.append(piece)
            end = max(end, piece.end)
        else:
            batches.append([piece])
            end = piece.end
    return batches


_mine = threading.local()


def _fill(snapshots: Snapshots, manifest: Manifest, batch: list[_Piece]) -> None:
    if not hasattr(_mine, "memory"):
        _mine.memory = scratch()
    start, end = batch[0].start, max(piece.end for piece in batch)
    data = snapshots.read_into(manifest, batch[0].part, start, end, _mine.memory)
    with torch.no_grad():  # per thread
        for piece in batch:
            found, target = data[piece.start - start : piece.end - start], piece.target
            if (
                target.is_contiguous()
                and not target.is_cuda
                and not target.is_conj()
                and not target.is_neg()
            ):
                # as in _copy_bytes
                np.copyto(
                    target.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(found, np.uint8)
                )
                continue
            # aligned for any dtype, which `data` is not
            raw = torch.empty(piece.end - piece.start, dtype=torch.uint8)
            raw.numpy().data[:] = found
            target.copy_(raw.view(target.dtype).as_strided(target.shape, piece.strides))
