"""Export of a snapshot's model weights as safetensors, in the form that Hugging Face reads. No
torch; memory for one piece of a tensor.

    export(snapshots, manifest, Path("out"), dtype="bf16")

Writes one file `model.safetensors`, or several and `model.safetensors.index.json` when they are
big. Every byte is verified as it is read. Tensors with the same contents and shape (tied weights)
are stored once, and the file records it, as safetensors' own `save_model` does. Tensors of a model
that `hf_layouts.py` knows get the names and the layout that `transformers` gives them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound
from storage.export.hf_layouts import (
    TABLES,
    TURNED,
    TensorIndex,
    laid_out,
    layout_moves,
    order_of,
    to_theirs,
)
from storage.snapshots.manifest import Manifest
from storage.snapshots.snapshots import Memory, Snapshots
from storage.snapshots.transfer import Exported
from storage.stores.objects import ObjectStore, get_each, read_into
from storage.tensors.tensor_names import plain_name

PREFIX = "model/"
ADAPTER = "adapter_model.safetensors"
SHARD_NBYTES = 5 * 10**9  # bytes of one file
READ_NBYTES = 32 << 20  # bytes of one read
SAMPLE_NBYTES = 4096  # bytes compared first to find tensors that may be tied
NAMES = {  # dtype of the manifest -> (safetensors' name, bytes)
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # accepted values of `dtype`


def export(
    snapshots: Snapshots,
    manifest: Manifest,
    out: Path,
    *,
    dtype: str = "",
    prefix: str = PREFIX,
    shard_nbytes: int = SHARD_NBYTES,
    keep_tied: bool = False,
    config: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the tensors whose names begin with `prefix` (which is removed) into the folder `out`,
    which must be new or empty.

    dtype: "fp32", "bf16" or "fp16" for floating-point tensors; "": as saved. config: a config.json
    to put beside them; by default the snapshot's own, if it has one. With the config of a family in
    `hf_layouts.TABLES`, tensors with our names get Hugging Face's. `progress(bytes done, bytes in
    all)`. Raises ValueError (input), SnapshotCorrupt, StoreError.
    """
    if dtype and dtype not in FLOATS:
        raise ValueError(f"wanted one of {', '.join(FLOATS)} as dtype, found {dtype!r}")
    check_empty(out)
    found: TensorIndex = {
        _plain(name.removeprefix(prefix)): entry
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }
    if not found:
        tops = sorted({name.partition("/")[0] + "/" for name in manifest.tensors})
        raise ValueError(
            f"snapshot {manifest.ref} has no tensors under {prefix!r}; it has some under "
            f"{', '.join(tops)}: name one as prefix"
        )
    said = _config(config, manifest)
    if said.get("model_type") in TABLES and (moved := layout_moves(said, found)):
        found = to_theirs(found, moved)
    reader = _Reader(snapshots, manifest)
    tied = {} if keep_tied else _tied(reader, found)
    wanted = [
        _Tensor(name, entry, FLOATS.get(dtype, ""))
        for name, entry in sorted(found.items())
        if name not in tied
    ]
    out.mkdir(parents=True, exist_ok=True)
    names = _write(reader, wanted, tied, out, shard_nbytes, progress)
    if config is not None:
        shutil.copyfile(config, out / "config.json")
    elif said:
        (out / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    return Exported(names, len(wanted), sum(t.nbytes for t in wanted), tied)


def _config(config: Path | None, manifest: Manifest) -> Mapping[str, Any]:
    """Return the model's config: the given file, else the snapshot's; {} if it has none. Raises
    ValueError."""
    if config is None:
        said = manifest.data.get("config")
        return said if isinstance(said, dict) else {}
    said = parsed(config.read_bytes())
    if not isinstance(said, dict):
        raise ValueError(f"{config}: wanted a config.json, found {type(said).__name__}")
    return said


def _write(
    reader: _Reader,
    wanted: list[_Tensor],
    tied: dict[str, str],
    out: Path,
    shard_nbytes: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[str, ...]:
    """Write one file or several, and their index; return the names of the files."""
    shards = list(_shards(wanted, shard_nbytes))
    n = len(shards)
    names = (
        ["model.safetensors"]
        if n == 1
        else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    )
    total, done = sum(t.nbytes for t in wanted), 0
    for shard, file in zip(shards, names, strict=True):
        temporary = out / f".{file}.tmp"
        here = {t.name for t in shard}
        with _create(temporary, shard, {k: v for k, v in tied.items() if v in here}) as views:
            for nbytes in _fill(reader, shard, views):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        temporary.rename(out / file)
    if len(shards) > 1:  # last, so that whoever finds the index finds all files
        where = {t.name: file for shard, file in zip(shards, names, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return tuple(names)


def export_adapter(
    snapshots: Snapshots,
    manifest: Manifest,
    out: Path,
    adapter: str = "default",
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write one of the adapters that PEFT put into the model, and nothing of the model, into the
    folder `out` (new or empty), in the form that `PeftModel.from_pretrained` reads.

    Raises ValueError (input), SnapshotCorrupt, StoreError.
    """
    check_empty(out)
    told = manifest.data.get("adapters")
    found = told.get(adapter) if isinstance(told, dict) else None
    if not found:
        names = ", ".join(map(repr, told)) if isinstance(told, dict) and told else "none"
        raise ValueError(
            f"snapshot {manifest.ref} names no adapter {adapter!r}, it names {names}; adapters are "
            "those of a PEFT model that was prepared (run.prepare, or an adapter of a trainer)"
        )
    missing = [key for key in found["tensors"].values() if key not in manifest.tensors]
    if missing:
        raise ValueError(f"snapshot {manifest.ref} has no tensor {missing[0]!r} of {adapter!r}")
    tensors = [
        _Tensor(name, manifest.tensors[key], "") for name, key in sorted(found["tensors"].items())
    ]
    out.mkdir(parents=True, exist_ok=True)
    total, done, temporary = sum(t.nbytes for t in tensors), 0, out / f".{ADAPTER}.tmp"
    with _create(temporary, tensors, {}) as views:
        for nbytes in _fill(_Reader(snapshots, manifest), tensors, views):
            done += nbytes
            if progress is not None:
                progress(done, total)
    temporary.rename(out / ADAPTER)
    text = json.dumps(found["config"], indent=2, sort_keys=True)
    (out / "adapter_config.json").write_text(text + "\n")
    return Exported((ADAPTER, "adapter_config.json"), len(tensors), total, {})


def check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: wanted a new or an empty folder")


def _plain(name: str) -> str:
    """Return the original name: undoes the escapes of `split` for '/', and removes the wrappers
    that old snapshots name."""
    plain = ".".join(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))
    return plain_name(plain)


class _Tensor:
    def __init__(self, name: str, entry: dict[str, Any], wanted: str):
        self.name, self.entry = name, entry
        self.layout = str(entry.get("layout", ""))
        shape = tuple(int(n) for n in entry["shape"])
        self.shape = shape[::-1] if self.layout == TURNED else shape  # the shape in the file
        self.saved = str(entry["dtype"])
        if self.saved not in NAMES:
            raise ValueError(f"{name!r} has dtype {self.saved}, which safetensors does not know")
        self.dtype = (
            wanted
            if wanted and self.saved in ("float64", "float32", "float16", "bfloat16")
            else self.saved
        )
        self.nbytes = math.prod(self.shape) * NAMES[self.dtype][1]


def _shards(tensors: list[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if shard and nbytes + tensor.nbytes > limit:
            yield shard
            shard, nbytes = [], 0
        shard.append(tensor)
        nbytes += tensor.nbytes
    yield shard


class _create:
    """A new safetensors file with its header, open for writing: maps each tensor's name to a view
    of its bytes."""

    def __init__(self, path: Path, tensors: list[_Tensor], tied: dict[str, str]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
        at = 0
        # widest first, so that each lies at a multiple of its width
        for t in sorted(tensors, key=lambda t: -NAMES[t.dtype][1]):
            header[t.name] = {
                "dtype": NAMES[t.dtype][0],
                "shape": list(t.shape),
                "data_offsets": [at, at + t.nbytes],
            }
            at += t.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header, self._start, self._nbytes, self._path = header, 8 + len(text), at, path
        with open(path, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(self._start + at)

    def __enter__(self) -> dict[str, np.ndarray[Any, Any]]:
        if self._nbytes == 0:
            return {name: np.empty(0, np.uint8) for name in self._header}
        self._map: Any = np.memmap(self._path, np.uint8, "r+", self._start, (self._nbytes,))
        return {
            name: self._map[slice(*entry["data_offsets"])]
            for name, entry in self._header.items()
            if name != "__metadata__"
        }

    def __exit__(self, kind: object, *_: object) -> None:
        if self._nbytes:
            self._map.flush()
            del self._map
        if kind is not None:
            self._path.unlink(missing_ok=True)


def _fill(
    reader: _Reader, tensors: list[_Tensor], views: dict[str, np.ndarray[Any, Any]]
) -> Iterator[int]:
    """Copy all tensors into their views, in the order of the bytes in the parts. Yields the bytes
    written."""
    boxes = [
        (chunk["part"], chunk["start"], i, chunk)
        for i, t in enumerate(tensors)
        for chunk in t.entry["chunks"]
    ]
    for _, _, i, chunk in sorted(boxes, key=lambda box: box[:3]):
        t = tensors[i]
        width, saved_width = NAMES[t.dtype][1], NAMES[t.saved][1]
        whole = views[t.name].reshape(*t.shape, width)
        if t.layout == TURNED:
            whole = whole.swapaxes(0, 1)
        if not chunk["sizes"]:  # a scalar has no rows
            whole[...] = _cast(
                reader.read(chunk["part"], chunk["start"], chunk["end"]), t.saved, t.dtype
            ).reshape(width)
            yield width
            continue
        first_row, *offsets = chunk["offsets"]
        beside = tuple(slice(o, o + n) for o, n in zip(offsets, chunk["sizes"][1:], strict=True))
        order = order_of(t.layout, whole.shape[0])
        inner = math.prod(chunk["sizes"][1:]) * saved_width  # bytes of one row
        most = max(1, READ_NBYTES // max(1, inner))
        for first in range(0, chunk["sizes"][0], most):
            n = min(most, chunk["sizes"][0] - first)
            start = chunk["start"] + first * inner
            raw = _cast(reader.read(chunk["part"], start, start + n * inner), t.saved, t.dtype)
            at = slice(first_row + first, first_row + first + n)
            rows = at if order is None else order[at]
            whole[(rows, *beside)] = raw.reshape(n, *chunk["sizes"][1:], width)
            yield n * math.prod(chunk["sizes"][1:]) * width


def _cast(raw: np.ndarray[Any, Any], saved: str, wanted: str) -> np.ndarray[Any, Any]:
    """Convert bytes of one floating-point type to another, rounded to nearest, ties to even."""
    if saved == wanted:
        return raw
    if saved == "bfloat16":
        values = (raw.view("<u2").astype("<u4") << 16).view("<f4")
    else:
        values = raw.view({"float64": "<f8", "float32": "<f4", "float16": "<f2"}[saved])
    if wanted != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype({"float32": "<f4", "float16": "<f2"}[wanted]).view(np.uint8)
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values.astype("<f4")).view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype("<u2").view(np.uint8)


class _Reader:
    """Verified reads through one window of a part, so that neighbours share the chunks that must be
    fetched whole."""

    def __init__(self, snapshots: Snapshots, manifest: Manifest):
        self._snapshots, self.manifest = snapshots, manifest
        self._part, self._low, self._window = "", 0, np.empty(0, np.uint8)

    def read(self, part: str, start: int, end: int) -> np.ndarray[Any, Any]:
        """Return bytes [start, end) of a part, as a copy."""
        if part != self._part or start < self._low or end > self._low + len(self._window):
            size = self.manifest.part(part)
            low = start // size.chunk_nbytes * size.chunk_nbytes
            high = min(
                size.nbytes,
                max(low + READ_NBYTES, -(-end // size.chunk_nbytes) * size.chunk_nbytes),
            )
            self._window = np.frombuffer(
                self._snapshots.read(self.manifest, part, low, high), np.uint8
            )
            self._part, self._low = part, low
        return self._window[start - self._low : end - self._low].copy()


def _tied(reader: _Reader, found: TensorIndex) -> dict[str, str]:
    """Return matrices that hold the same bytes: name -> the name that is kept. Constant ones (fresh
    norms, zeros) are never tied."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, entry in sorted(found.items()):
        boxes = tuple((tuple(c["offsets"]), tuple(c["sizes"])) for c in entry["chunks"])
        if len(entry["shape"]) > 1 and math.prod(entry["shape"]) > 0:
            layout = entry.get("layout", "")
            groups[(tuple(entry["shape"]), entry["dtype"], layout, boxes)].append(name)
    for look in (_sample, _hash):
        finer: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for group, names in groups.items():
            if len(names) > 1:
                for name in names:
                    seen = look(reader, found[name])
                    if seen is not None:
                        finer[(*group, seen)].append(name)
        groups = finer
    # Keep the embedding: readers tie a head to its embedding, and look for that.
    first = {
        group: min(names, key=lambda n: (not re.search("emb|wte|shared", n), n))
        for group, names in groups.items()
    }
    return {
        name: first[group]
        for group, names in groups.items()
        for name in names
        if name != first[group]
    }


def _sample(reader: _Reader, entry: dict[str, Any]) -> bytes | None:
    chunk = entry["chunks"][0]
    seen = reader.read(
        chunk["part"], chunk["start"], min(chunk["end"], chunk["start"] + SAMPLE_NBYTES)
    )
    width = NAMES.get(str(entry["dtype"]), ("", 1))[1]
    elements = seen.reshape(-1, width)
    return None if bool((elements == elements[0]).all()) else seen.tobytes()


def _hash(reader: _Reader, entry: dict[str, Any]) -> str:
    digest = blake3.blake3()
    for chunk in entry["chunks"]:
        for start in range(chunk["start"], chunk["end"], READ_NBYTES):
            digest.update(
                reader.read(chunk["part"], start, min(start + READ_NBYTES, chunk["end"])).data
            )
    return digest.hexdigest()


# Safetensors files in a store, read by ranges: the index of their tensors, and bytes of any part.

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_NBYTES = 100_000_000  # the limit of safetensors' own reader
MOST_INDEX_NBYTES = 64 << 20
_DTYPES = {theirs: (ours, width) for ours, (theirs, width) in NAMES.items()}


class SafetensorsFiles:
    """The files of one model. `index`: name -> shape, dtype and place, as in `Manifest.tensors`;
    its parts are files, and names from `hf_layouts.laid_out`. The constructor raises ValueError for
    an invalid folder, and StoreError."""

    def __init__(self, store: ObjectStore):
        self.store = store
        self.index: TensorIndex = {}
        for file in self._files():
            self.index |= self._header(file)
        self._lock = threading.Lock()  # one tensor at a time is converted
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
        """Return bytes [start, end) of a part, in memory from the caller. Raises ValueError if the
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
        """Return all bytes of one tensor, converted to our layout."""
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
    """Return the index entry for a header's tensor. Raises ValueError, KeyError, TypeError."""
    dtype, width = _DTYPES[told["dtype"]]
    shape = [int(n) for n in told["shape"]]
    start, end = (at + int(n) for n in told["data_offsets"])
    if min(shape, default=0) < 0 or not at <= start <= end <= size:
        raise ValueError(f"bytes [{start}, {end}) for {shape} in a file of {size} bytes")
    if end - start != math.prod(shape) * width:
        raise ValueError(f"{end - start} bytes for {shape} of {dtype}")
    chunk = {"offsets": [0] * len(shape), "sizes": shape, "part": file, "start": start, "end": end}
    return {"shape": shape, "dtype": dtype, "chunks": [chunk]}
