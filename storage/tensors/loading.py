"""Loading of tensors from parts of a snapshot: only the needed bytes, in parallel, verified.

The planners of torch.distributed.checkpoint decide what is needed (`storage/tensors/dcp.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from storage.snapshots.manifest import Manifest, SnapshotCorrupt
from storage.snapshots.snapshots import Memory, Snapshots, scratch
from storage.tensors.flat_shards import held_numel
from storage.tensors.state_tree import path_name

# one request of a load, in whole hash chunks: small enough to stay in a processor's cache until it
# is copied
READ_NBYTES = 8 << 20
READ_THREADS, LEAST_THREADS = 16, 2
# share of the loaded bytes that threads may hold at once: there is room for the state, and for
# little beside it
HELD_SHARE = 0.1

# (name, global shape) of a tensor -> the tensor that it belongs to
Like = Callable[[str, tuple[int, ...]], torch.Tensor | None]
# returns bytes [start, end) of a part, in reusable memory from the caller
ReadPart = Callable[[str, int, int, Memory], memoryview]


def destinations(
    manifest: Manifest,
    have: dict[str, torch.Tensor],
    like: Like = lambda name, shape: None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, torch.Tensor]:
    """Return `have`, plus a new tensor for every saved one that the program does not have yet
    (optimizer state before its first step).

    `wanted(name)`: False for tensors that it does not need either. `like(name, global shape)`
    returns the tensor it belongs to, or None. If that has the same global shape, the new one is
    made by `empty_like` (so it has a DTensor's placement, the boxes of pieces, and the device),
    otherwise a plain CPU tensor. Always of the saved dtype.
    """
    made = dict(have)
    for name, entry in manifest.tensors.items():
        if name in made or not wanted(name):
            continue
        shape = tuple(entry["shape"])
        dtype = _dtype_of(f"snapshot {manifest.ref}", manifest.tensors, name)
        pattern = like(name, shape)
        if pattern is not None and tuple(pattern.shape) == shape:
            made[name] = torch.empty_like(pattern.detach(), dtype=dtype)
        else:
            made[name] = torch.empty(shape, dtype=dtype)
    return made


def like_parameters(state: Any) -> Like:
    """Return a `like` for `destinations`: optimizer state that does not exist yet is laid out like
    its parameter. `state`: the optimizers, or dicts, lists and tuples of them."""
    held = dict(_optimizers(state, ()))

    def like(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        for prefix, parameters in held.items():
            number = name.removeprefix(prefix).partition("/")[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)]
        return None

    return like


def _optimizers(value: Any, path: tuple[str, ...]) -> list[tuple[str, list[torch.Tensor]]]:
    """Return, for each optimizer in a state, the prefix of its tensors' names, and its parameters
    in its own order."""
    if hasattr(value, "param_groups"):  # an optimizer, or a wrapper of one
        parameters = [p for group in value.param_groups for p in group["params"]]
        if hasattr(value, "parts"):  # it keeps only a part of each (ZeRO)
            parameters = value.parts()
        return [(f"{path_name((*path, 'state'))}/", parameters)]
    inside: list[tuple[str, list[torch.Tensor]]] = []
    if isinstance(value, dict):
        for key, one in value.items():
            inside += _optimizers(one, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            inside += _optimizers(one, (*path, str(i)))
    return inside


@dataclass(frozen=True)
class _Piece:
    """A box of a saved chunk and its target. Bytes [start, end) of the part span it; strides are
    the chunk's, in elements."""

    part: str
    start: int
    end: int
    strides: tuple[int, ...]
    target: torch.Tensor  # has the box's shape


def load(
    snapshots: Snapshots,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    threads: int | None = None,
) -> None:
    """Fill `tensors` (plain or DTensor, CPU or GPU) in place with what `manifest` has under their
    names.

    Only the byte ranges that this rank needs are fetched, in parallel (`threads`; None: as many as
    their size is worth), and every byte is verified. No collectives. Raises ValueError if a name is
    missing or shape or dtype differ (before anything is changed); SnapshotCorrupt if stored bytes
    are not what was committed (then the tensors hold a mixture: load an older snapshot into them).
    """

    def read(part: str, start: int, end: int, memory: Memory) -> memoryview:
        return snapshots.read_into(manifest, part, start, end, memory)

    load_parts(read, f"snapshot {manifest.ref}", manifest.tensors, tensors, threads)


def load_parts(
    read: ReadPart,
    what: str,
    index: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    threads: int | None = None,
) -> None:
    """Fill tensors like `load`, from any source: `index` is like `Manifest.tensors`, `read` returns
    bytes of its parts, and `what` names the source in messages. Also raises what `read` raises."""
    metadata = Metadata({name: _metadata(what, index, name, t) for name, t in tensors.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    chunks = {(name, tuple(c["offsets"])): c for name in tensors for c in index[name]["chunks"]}
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
        wanted = held_numel(t)
        if planned[name] != wanted:
            raise SnapshotCorrupt(
                f"{what}: {name!r}: {wanted} elements wanted here, its index has "
                f"{planned[name]}; use an older snapshot"
            )
    if threads is None:
        held = int(sum(piece.target.nbytes for piece in pieces) * HELD_SHARE)
        # bytes per thread: as received, and as checked or on the way to a GPU
        each = 2 * READ_NBYTES
        threads = min(READ_THREADS, max(LEAST_THREADS, held // each))
    for device in {piece.target.device for piece in pieces if piece.target.is_cuda}:
        # threads have streams of their own: not before what the caller has queued on its stream
        torch.cuda.current_stream(device).synchronize()
    batches = _batches(pieces)
    if len(batches) < 2:
        for batch in batches:
            _fill(read, batch)
        return
    with ThreadPoolExecutor(min(threads, len(batches)), "snapshot-load") as pool:
        running = [pool.submit(_fill, read, batch) for batch in batches]
        try:
            for one in running:
                one.result()
        except BaseException:
            # do not fetch the rest, which is of no use
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _metadata(
    what: str, index: Mapping[str, Any], name: str, tensor: torch.Tensor
) -> TensorStorageMetadata:
    entry = index.get(name)
    if entry is None:
        raise ValueError(
            f"{what} has no tensor {name!r} (it has {len(index)}); was "
            "it saved by another model or optimizer? Resume with the script that saved it, or "
            "start a new run URL"
        )
    shape, dtype = tuple(entry["shape"]), _dtype_of(what, index, name)
    if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
        raise ValueError(
            f"{what}: {name!r} was saved as {dtype} {shape}, this program wants "
            f"{tensor.dtype} {tuple(tensor.shape)}; resume with the model that saved it, or start "
            "a new run URL"
        )
    boxes = [
        ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
        for c in entry["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)


def _dtype_of(what: str, index: Mapping[str, Any], name: str) -> torch.dtype:
    found = getattr(torch, str(index[name]["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"{what}: {name!r} has dtype {index[name]['dtype']!r}, "
            f"which torch {torch.__version__} does not know; use the torch that saved it"
        )
    return found


def _pieces(chunk: dict[str, Any], item: ReadItem, target: torch.Tensor) -> Iterable[_Piece]:
    """Cut a box until each piece spans at most READ_NBYTES: a box that is contiguous in both places
    at multiples of that, so that no hash chunk is read twice; others along their first dimensions.
    """
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
    """Group neighbouring pieces of a part into requests of about READ_NBYTES."""
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


def _fill(read: ReadPart, batch: list[_Piece]) -> None:
    if not hasattr(_mine, "memory"):
        _mine.memory = scratch()
    start, end = batch[0].start, max(piece.end for piece in batch)
    data = read(batch[0].part, start, end, _mine.memory)
    with torch.no_grad():  # this mode is per thread
        for piece in batch:
            found, target = data[piece.start - start : piece.end - start], piece.target
            if (
                # else the bytes are not contiguous: columns of a wider chunk
                len(found) == target.nbytes
                and target.is_contiguous()
                and not target.is_cuda
                and not target.is_conj()
                and not target.is_neg()
            ):
                # numpy, as in copying._copy_bytes
                np.copyto(
                    target.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(found, np.uint8)
                )
                continue
            # memory that is aligned for any dtype, unlike `data`
            raw = torch.empty(piece.end - piece.start, dtype=torch.uint8)
            raw.numpy().data[:] = found
            target.copy_(raw.view(target.dtype).as_strided(target.shape, piece.strides))
