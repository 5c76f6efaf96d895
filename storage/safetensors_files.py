"""Safetensors in a store, read by ranges: the index of what there is, and bytes of any part of it.

No torch. What lies there may be anybody's: sizes and places are checked before they are believed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from storage.errors import NotFound
from storage.export import NAMES
from storage.hf_names import TURNED, TensorIndex, laid_out, order_of
from storage.json_text import BadObject, parsed
from storage.objects import ObjectStore, get_each, read_into
from storage.snapshots import Memory

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_NBYTES = 100_000_000  # as safetensors' own reader has it
MOST_INDEX_NBYTES = 64 << 20
_DTYPES = {theirs: (ours, width) for ours, (theirs, width) in NAMES.items()}


class SafetensorsFiles:
    """One model's. `index`: name -> shape, dtype and place, as in `Manifest.tensors`; its parts are
    files, and what `hf_names.laid_out` names. Raises ValueError for what is no such folder,
    StoreError."""

    def __init__(self, store: ObjectStore):
        self.store = store
        self.index: TensorIndex = {}
        for file in self._files():
            self.index |= self._header(file)
        self._lock = threading.Lock()  # one tensor is laid out at a time
        self._laid_out: tuple[str, memoryview] = ("", memoryview(b""))

    def _files(self) -> Iterable[str]:
        found = dict(get_each(self.store, (INDEX,)))[INDEX]
        if found is None:
            return (ONE,)
        try:
            where = parsed(found, most_nbytes=MOST_INDEX_NBYTES)["weight_map"]
            return sorted({str(file) for file in where.values()})
        except (BadObject, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{self.store.url}/{INDEX}: wanted a weight_map, found {e}") from e

    def _header(self, file: str) -> TensorIndex:
        where = f"{self.store.url}/{file}"
        try:
            nbytes = int.from_bytes(self.store.get(file, 0, 8), "little")
            if nbytes > MOST_HEADER_NBYTES:
                raise ValueError(f"{where}: wanted a header of safetensors, found {nbytes} bytes")
            text, size = self.store.get(file, 8, 8 + nbytes), self.store.size(file)
        except NotFound:
            raise ValueError(
                f"{self.store.url}: wanted {file}, as `save_pretrained` writes it; found none"
            ) from None
        try:
            told = parsed(text, most_nbytes=MOST_HEADER_NBYTES)
            return {
                str(name): _entry(entry, file, 8 + nbytes, size)
                for name, entry in told.items()
                if name != "__metadata__"
            }
        except (BadObject, KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"{where}: wanted a header of safetensors, found {e!r:.200}") from e

    def read_into(self, part: str, start: int, end: int, memory: Memory) -> memoryview:
        """Bytes [start, end) of a part, in memory that the caller has. Raises ValueError if the
        file is shorter than its header says, StoreError."""
        layout, _, name = part.partition("/")
        if name in self.index and part == laid_out(name, layout):
            with self._lock:
                if self._laid_out[0] != part:
                    self._laid_out = part, self._lay_out(name, layout)
                return self._laid_out[1][start:end]
        view = memory(end - start)[: end - start]
        if (found := read_into(self.store, part, start, view)) != end - start:
            raise ValueError(
                f"{self.store.url}/{part}: wanted bytes [{start}, {end}), found {found} of them"
            )
        return view

    def _lay_out(self, name: str, layout: str) -> memoryview:
        """All of one tensor's bytes, as ours has it."""
        entry = self.index[name]
        (chunk,) = entry["chunks"]
        whole = memoryview(bytearray(chunk["end"] - chunk["start"]))
        self.read_into(chunk["part"], chunk["start"], chunk["end"], lambda nbytes: whole)
        width = NAMES[entry["dtype"]][1]
        found = np.frombuffer(whole, np.uint8).reshape(*entry["shape"], width)
        order = order_of(layout, entry["shape"][0])
        laid = found.swapaxes(0, 1) if layout == TURNED else found[order]
        return np.ascontiguousarray(laid).reshape(-1).data.cast("B")


def _entry(told: dict[str, Any], file: str, at: int, size: int) -> dict[str, Any]:
    """Raises ValueError, KeyError, TypeError."""
    dtype, width = _DTYPES[told["dtype"]]
    shape = [int(n) for n in told["shape"]]
    start, end = (at + int(n) for n in told["data_offsets"])
    if min(shape, default=0) < 0 or not at <= start <= end <= size:
        raise ValueError(f"bytes [{start}, {end}) for {shape} in a file of {size} bytes")
    if end - start != math.prod(shape) * width:
        raise ValueError(f"{end - start} bytes for {shape} of {dtype}")
    chunk = {"offsets": [0] * len(shape), "sizes": shape, "part": file, "start": start, "end": end}
    return {"shape": shape, "dtype": dtype, "chunks": [chunk]}
