"""A picture of what a script's names lead to at one moment, each piece as a digest: for `harness
check`, inside a worker.

The walk begins at names (globals, locals, the generators) and goes breadth first through containers
and attributes, so that each piece gets its shortest path. Objects of the script's own are taken
completely; of a library's objects only what carries state: tensors, generators, a `state_dict`, a
sampler's epoch. Nothing is changed, and objects of the harness are skipped.
"""

from __future__ import annotations

import enum
import itertools
import operator
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from harness.check.evidence import Leaf

MOST_LEAVES = 20_000
LARGE = 1 << 22  # bytes; of larger numpy arrays only a sample is digested
MOST_OBJECTS = 60_000
MOST_DEPTH = 12
MOST_ITEMS = 200  # of a container of mixed values; a long one of plain values is one leaf
PLAIN = (bool, int, float, complex, str, bytes, type(None))
KINDS = {bool: "number", int: "number", float: "float", complex: "float"}
# attributes of nn.Module that describe its structure, not its state
UNTOLD = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}


@dataclass(frozen=True)
class Spot:
    """A value at a path. `owner`: path and type of the object that holds it; `ours`: it belongs to
    the script, so plain values count; `saved`: it lies in something that `prepare` was given."""

    path: str
    value: Any
    owner: tuple[str, str]
    ours: bool
    saved: bool = False
    keeps: bool = False  # its owner has state_dict and load_state_dict
    depth: int = 0
    inside: bool = False  # its owner is a module, which is named as the owner of those within it


class Album:
    """Maker of pictures. `own`: returns whether a module of that name belongs to the script;
    `saved`: returns ids of the objects that `prepare` was given."""

    def __init__(self, own: Callable[[str], bool], saved: Callable[[], set[int]]):
        self._own, self._saved_ids = own, saved
        self._digests = Digests()

    def picture(self, roots: Mapping[str, Any]) -> dict[str, Leaf]:
        """Return leaves by path; at most MOST_LEAVES."""
        return _Walk(self._own, self._saved_ids(), self._digests).all(roots)


class Digests:
    """Digests of tensors, cached for large ones until they change: a dataset in memory is read
    once."""

    def __init__(self) -> None:
        # by id: the tensor if it still lives, its version counter, its digest
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, bytes]] = {}

    def of(self, tensor: torch.Tensor, raw: Callable[[], Any]) -> bytes:
        """Return the digest of a tensor. `raw`: returns its bytes."""
        large = tensor.numel() * tensor.element_size() >= LARGE and not tensor.is_inference()
        version = tensor._version if large else 0
        known = self._known.get(id(tensor))
        if large and known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        digest = xxhash.xxh3_128_digest(raw())
        if large:
            self._known[id(tensor)] = (weakref.ref(tensor), version, digest)
        return digest


class _Walk:
    def __init__(self, own: Callable[[str], bool], saved: set[int], digests: Digests):
        self._own, self._saved, self._digests = own, saved, digests
        self._seen: set[int] = set()
        # objects made during the walk must live until its end, or their ids are reused
        self._kept: list[Any] = []
        self.leaves: dict[str, Leaf] = {}

    def all(self, roots: Mapping[str, Any]) -> dict[str, Leaf]:
        spots = deque(Spot(name, value, ("", ""), True) for name, value in roots.items())
        while spots and len(self.leaves) < MOST_LEAVES and len(self._seen) < MOST_OBJECTS:
            spot = spots.popleft()
            if spot.depth > MOST_DEPTH:
                continue
            try:
                spots.extend(list(self._look(spot)))
            except Exception:
                # foreign code, called when it does not expect it: a look may raise anything, and
                # what cannot be looked at is not told
                continue
        return self.leaves

    # ---- one spot --------------------------------------------------------------------------------
    def _look(self, spot: Spot) -> Iterator[Spot]:
        """Record a leaf, or yield what lies below."""
        value = spot.value
        if isinstance(value, (*PLAIN, enum.Enum, PurePath)):
            if spot.ours:
                self._plain(spot)
            return
        if id(value) in self._seen or _untold(value):
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if (state := carried(value, self._digests)) is not None:
            self._note(spot, state[0], state[1], state[2])
        elif isinstance(value, (dict, types.MappingProxyType)):
            yield from self._items(spot, [(_key(k), v) for k, v in list(value.items())])
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            yield from self._sequence(spot, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(spot, value)
        elif isinstance(value, types.MethodType):
            yield _below(spot, spot.path, value.__self__)
        elif isinstance(value, types.GeneratorType):
            yield from self._generator(spot, value)
        elif isinstance(value, type):
            if self._own(value.__module__):
                held = {k: v for k, v in vars(value).items() if isinstance(v, (*PLAIN, list, dict))}
                yield from self._fields(spot, {k: v for k, v in held.items() if k[:2] != "__"})
        else:
            yield from self._object(spot)

    def _plain(self, spot: Spot) -> None:
        value = spot.value
        self._note(spot, KINDS.get(type(value), "text"), f"{type(value).__name__} {value!r}", None)

    def _note(self, spot: Spot, kind: str, said: str | bytes, shown: str | None) -> None:
        data = said.encode(errors="replace") if isinstance(said, str) else said
        self.leaves[spot.path] = Leaf(
            kind,
            xxhash.xxh3_64_hexdigest(data),
            f"{spot.value!r:.60}" if shown is None else shown,
            spot.owner[0],
            spot.owner[1],
            spot.keeps,
            spot.saved,
        )

    def _items(self, spot: Spot, items: list[tuple[str, Any]]) -> Iterator[Spot]:
        if len(items) > MOST_ITEMS and all(isinstance(v, PLAIN) for _, v in items):
            if spot.ours:
                self._note(spot, "series", repr(items), f"{len(items)} items")
            return
        for key, value in items[: 10 * MOST_ITEMS]:
            yield _below(spot, f"{spot.path}[{key}]", value)

    def _sequence(self, spot: Spot, value: Any) -> Iterator[Spot]:
        plain = all(isinstance(v, PLAIN) for v in value)
        if plain and not isinstance(value, tuple):
            if spot.ours:
                said = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
                word = f"{type(value).__name__} of {len(value)}"
                self._note(spot, "series", repr(list(said)), word)
            return
        if not isinstance(value, (set, frozenset)):
            for i, item in enumerate(itertools.islice(value, MOST_ITEMS)):
                yield _below(spot, f"{spot.path}[{i}]", item)

    def _function(self, spot: Spot, value: types.FunctionType) -> Iterator[Spot]:
        if not self._own(value.__module__ or ""):
            return
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        for name, cell in cells:
            try:
                yield _below(spot, f"{spot.path}.<{name}>", cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        yield from self._fields(spot, dict(vars(value)))

    def _generator(self, spot: Spot, value: types.GeneratorType[Any, Any, Any]) -> Iterator[Spot]:
        """Yield the local variables of a generator function of the script, which are its state."""
        frame = value.gi_frame
        if frame is not None and self._own(str(frame.f_globals.get("__name__", ""))):
            for name, found in dict(frame.f_locals).items():
                yield _below(spot, f"{spot.path}().{name}", found)

    def _fields(self, spot: Spot, held: Mapping[str, Any]) -> Iterator[Spot]:
        for name, value in held.items():
            yield _below(spot, f"{spot.path}.{name}", value)

    def _object(self, spot: Spot) -> Iterator[Spot]:
        value, kind = spot.value, type(spot.value)
        ours = self._own(kind.__module__)
        keeps = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
        saved = spot.saved or id(value) in self._saved
        module = isinstance(value, nn.Module)
        owner = spot.owner if module and spot.inside else (spot.path, kind.__qualname__)
        here = Spot(spot.path, value, owner, ours, saved, keeps, spot.depth, module)
        held = _held(value)
        if module:
            for part in ("_parameters", "_buffers", "_modules"):
                yield from self._fields(here, dict(held.get(part) or {}))
            held = {k: v for k, v in held.items() if k not in UNTOLD and not k.endswith("_hooks")}
        elif keeps and not ours and (state := _state_of(value)) is not None:
            self._kept.append(state)
            told = replace(here, value=state, ours=True)
            yield from self._items(told, [(_key(k), v) for k, v in state.items()])
        if not ours and hasattr(value, "set_epoch"):
            told = replace(here, ours=True)
            yield from self._fields(told, {"epoch": getattr(value, "epoch", None)})
        yield from self._fields(here, held)


def _below(spot: Spot, path: str, value: Any) -> Spot:
    return replace(spot, path=path, value=value, depth=spot.depth + 1)


def _key(key: Any) -> str:
    return f"{key!r:.40}" if isinstance(key, (*PLAIN, tuple)) else type(key).__name__


def _held(value: Any) -> dict[str, Any]:
    """Return what the value holds by name: its attributes, and its slots."""
    held = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if (
                name not in held
                and hasattr(value, name)
                and name not in ("__dict__", "__weakref__")
            ):
                held[name] = getattr(value, name)
    return held


def _state_of(value: Any) -> dict[Any, Any] | None:
    try:
        state = value.state_dict()
    except Exception:
        # foreign code, called when it does not expect it; the attributes alone are used instead
        return None
    return state if isinstance(state, dict) else None


OURS = ("harness", "storage")
MACHINERY: tuple[str, ...] = (
    "threading",
    "logging",
    "_thread",
    "socket",
    "weakref",
    "subprocess",
    "concurrent",
)
MACHINERY += ("multiprocessing", "asyncio", "queue", "_io", "io", "rich", "tqdm", "argparse")


def _untold(value: Any) -> bool:
    """Return whether a value is no training state: the harness's own, modules, threads, files,
    loggers."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.CodeType)):
        return True
    module = str(getattr(type(value), "__module__", "") or "").partition(".")[0]
    return module in OURS or module in MACHINERY


def carried(value: Any, digests: Digests) -> tuple[str, bytes, str] | None:
    """Return (kind, bytes, description) of a value that carries state by itself; None for
    others."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, digests)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        told = f"array {value.dtype} {value.shape}"
        if isinstance(value, np.memmap):  # a file, not state in memory
            return "tensor", told.encode(), told
        some = value[:: value.nbytes // LARGE] if value.nbytes >= 2 * LARGE else value
        return "tensor", told.encode() + np.ascontiguousarray(some).tobytes(), told
    if isinstance(value, torch.Generator):
        return "generator", value.get_state().numpy().tobytes(), "torch.Generator"
    if isinstance(value, random.Random):
        return "generator", repr(value.getstate()).encode(), "random.Random"
    if isinstance(value, np.random.Generator):
        return "generator", repr(value.bit_generator.state).encode(), "numpy.random.Generator"
    if isinstance(value, np.random.RandomState):
        state = repr(value.get_state(legacy=False)).encode()
        return "generator", state, "numpy.random.RandomState"
    if isinstance(value, itertools.count):
        return "number", repr(value).encode(), repr(value)
    if type(value).__module__ == "builtins" and type(value).__name__.endswith("_iterator"):
        left = operator.length_hint(value, -1)
        return "number", f"{left} left".encode(), f"{left} items left"
    return None


def _tensor(value: torch.Tensor, digests: Digests) -> tuple[str, bytes, str]:
    told = f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    local = getattr(value, "to_local", None)  # a DTensor: this rank's own part
    here = (local() if local is not None else value).detach()
    if here.is_meta or here.layout is not torch.strided or _is_freed(here):
        return "tensor", told.encode(), told
    try:
        digest = digests.of(value, lambda: raw_bytes(here))
    except RuntimeError:  # a wrapper (quantised, fake): only its shape is known
        digest = b""
    return "tensor", told.encode() + digest, told


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether FSDP2 has freed the values of a parameter that it gathers when needed."""
    return bool(tensor.numel()) and tensor.untyped_storage().nbytes() == 0


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, of a copy: FSDP2 cannot resize storage that numpy has seen."""
    return tensor.to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy().data
