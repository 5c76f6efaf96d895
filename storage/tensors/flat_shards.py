"""Tensors of which this rank holds some boxes: for layouts that DTensor cannot express, such as
flat partitions (ZeRO) and other libraries' sharded tensors.

Snapshots store such a tensor under its whole shape, like any other, so it can be loaded whole, as a
DTensor, or as other pieces. It has no arithmetic; use the boxes for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Offsets = tuple[int, ...]


class Pieces(torch.Tensor):
    """A tensor's boxes on this rank. `boxes` maps offsets in the whole tensor to views of existing
    memory; over all ranks no element occurs twice. {}: this rank holds none of it."""

    boxes: dict[Offsets, torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Mapping[Offsets, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Pieces:
        made: Pieces = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made.boxes = dict(boxes)
        return made

    @classmethod
    def of_flat(cls, shape: Sequence[int], first: int, part: torch.Tensor) -> Pieces:
        """Return the pieces for `part` (n,), which holds elements [first, first + n) of the whole
        tensor in row-major order."""
        boxes, at = {}, 0
        for offsets, sizes in flat_boxes(tuple(shape), first, first + part.numel()):
            n = math.prod(sizes)
            boxes[offsets] = part[at : at + n].view(sizes)
            at += n
        return cls(shape, boxes, part.dtype, part.device)

    def copy_from(self, other: Pieces) -> None:
        """Copy each box of `other` into the same box here."""
        with torch.no_grad():
            for offsets, box in self.boxes.items():
                box.copy_(other.boxes[offsets])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pieces(shape={tuple(self.shape)}, boxes at {list(self.boxes)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        how = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]._like(lambda box: box)
        if func in (torch.ops.aten.empty_like.default, torch.ops.aten._to_copy.default):
            kept = {key: how[key] for key in ("dtype", "device") if how.get(key) is not None}
            return args[0]._like(lambda box: func(box, **kept), **kept)
        if func is torch.ops.aten.copy_.default:
            args[0].copy_from(args[1])
            return args[0]
        raise NotImplementedError(
            f"{func} of Pieces: it stands for a tensor in snapshots and has no arithmetic; use "
            "its boxes"
        )

    def _like(
        self, made: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Pieces:
        boxes = {offsets: made(box) for offsets, box in self.boxes.items()}
        return Pieces(self.shape, boxes, dtype or self.dtype, device or self.device)

    # ---- interface for the planners of torch.distributed.checkpoint ------------------------------
    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), box.size()),
                    properties=TensorProperties.create_from_tensor(box),
                    size=self.size(),
                ),
            )
            for offsets, box in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), box.size())
            for offsets, box in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes[tuple(index.offset or ())]


def flat_boxes(shape: Offsets, start: int, stop: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield the elements [start, stop) of a tensor in row-major order as few boxes: (offsets,
    sizes) of each, in order. Each box is contiguous."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, inner)
        rows = (stop - start) // inner if within == 0 else 0
        if rows:
            yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in flat_boxes(shape[1:], within, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        start = end


def held_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of a plain tensor, a DTensor or pieces that this rank holds."""
    if isinstance(tensor, Pieces):
        return sum(box.numel() for box in tensor.boxes.values())
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor is spread over ranks, for comparison with another time; () if each rank
    holds all of it."""
    if isinstance(tensor, Pieces):
        return tuple((offsets, box.shape) for offsets, box in tensor.boxes.items())
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
