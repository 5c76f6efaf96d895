"""State that nobody gave to the run, such as an average of the weights: tensors, and objects with a
state_dict, that the script's names lead to and that change between steps. Runs in the worker.

What is there when the training begins is walked through, as `harness check` does it, and each piece
gets a sum of its bits. A piece whose sum is another at a snapshot is part of it; what never changes
(a frozen encoder) costs nothing. Prepared objects are left out, and so is all that shares memory
with them.
"""

from __future__ import annotations

import json
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.core.world import BadInput
from storage.tensors import state_tree

MOST_OBJECTS = 50_000  # looked at in one walk
MOST_DEPTH = 6
MOST_ITEMS = 5_000  # of one container
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CODE = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    type,
)
READERS = (Dataset, DataLoader, Sampler, LRScheduler)  # data, and what the adapters keep themselves
# packages whose objects are no training state
MACHINERY = {
    *("harness", "storage", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("logging", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "queue"),
    *("io", "_io", "socket", "subprocess", "tqdm", "rich", "argparse", "datasets", "tokenizers"),
    *("wandb", "tensorboard", "PIL", "pathlib", "weakref"),
}
# integers of the same size, whose sum shows whether any bit has changed
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PathStep = tuple[str, Any]  # ("attribute", name), ("key", key) or ("index", number)
Roots = Mapping[str, MutableMapping[str, Any]]  # function or object -> its variables
# path -> sum of the bits, plain part of the state
SignedPieces = dict[tuple[PathStep, ...], tuple[int, str]]


@dataclass(frozen=True)
class UnsavedPiece:
    """A tensor, or an object with a state_dict. `state`: the object's, else the tensor."""

    path: tuple[PathStep, ...]
    value: Any
    state: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def name_of(path: tuple[PathStep, ...]) -> str:
    """Return a path for messages, without the function that it begins in."""
    words = [str(name) if how == "attribute" else f"[{name!r}]" for how, name in path[1:]]
    return ".".join(words).replace(".[", "[")


class UnsavedState:
    """The unsaved state of one training. `known`: objects that the run saves, or that are none of
    the training's."""

    def __init__(self) -> None:
        self._begun: SignedPieces = {}
        self._tops: set[tuple[PathStep, ...]] = set()  # the variables that there were
        self._known: Callable[[], Iterable[Any]] = tuple

    def begin(self, roots: Roots, known: Callable[[], Iterable[Any]]) -> None:
        """Note what is there, when the training begins. Raises BadInput."""
        self._known = known
        self._begun = _signed(_whole(self._pieces(roots)))
        self._tops = {_top(name, key) for name, held in roots.items() for key in held}

    def state(self, roots: Roots) -> list[dict[str, Any]]:
        """Return what has changed since `begin`, for a snapshot. Variables that were bound later
        are passing ones."""
        pieces = _whole([p for p in self._pieces(roots) if p.path[:2] in self._tops])
        now = _signed(pieces)
        found = []
        for piece in pieces:
            if self._begun.get(piece.path) != now[piece.path]:
                path = [list(step) for step in piece.path]
                found.append({"path": path, "tensor": piece.is_tensor, "state": piece.state})
        return found

    def restore(self, roots: Roots, state: Iterable[Mapping[str, Any]]) -> list[str]:
        """Put back what `state` returned. Return the names of what has no place any more."""
        pieces = {piece.path: piece for piece in self._pieces(roots)}
        missed = []
        for one in state:
            path = tuple((how, name) for how, name in one["path"])
            piece = pieces.get(path)
            value = one["state"]
            if piece is not None and not piece.is_tensor and not one["tensor"]:
                piece.value.load_state_dict(_like(piece.state, value))
            elif piece is not None and piece.is_tensor and _fits(piece.value, value):
                with torch.no_grad():
                    piece.value.copy_(value)
            elif not one["tensor"] or not _put(roots, path, value):
                missed.append(name_of(path))
        return missed

    def objects(self, roots: Roots, state: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the objects that `restore` gives their state as a whole."""
        wanted = {tuple(map(tuple, one["path"])) for one in state if not one["tensor"]}
        return [p.value for p in self._pieces(roots) if p.path in wanted and not p.is_tensor]

    def _pieces(self, roots: Roots) -> list[UnsavedPiece]:
        known = list(self._known())
        return list(_walk(roots, {id(one) for one in known}, _memory_of(known)))


def _whole(pieces: list[UnsavedPiece]) -> list[UnsavedPiece]:
    """Return the pieces. Raises BadInput for those of which each rank holds a part."""
    for piece in pieces:
        tensors, _ = state_tree.split({"": piece.state})
        if any(hasattr(tensor, "to_local") for tensor in tensors.values()):
            raise BadInput(
                f"{name_of(piece.path)}: found a copy of sharded weights, which rank 0 cannot save "
                "for all; give the object that holds it to accelerator.register_for_checkpointing"
            )
    return pieces


def _top(root: str, variable: str) -> tuple[PathStep, ...]:
    return ("root", root), ("attribute", variable)


# ---- the walk ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Spot:
    path: tuple[PathStep, ...]
    value: Any
    within: bool = False  # within a module, whose depth has no limit


def _walk(roots: Roots, known: set[int], memory: set[int]) -> Iterator[UnsavedPiece]:
    """Yield the pieces, breadth first. `memory`: addresses of storages that belong to the run."""
    seen: set[int] = set()
    spots: deque[_Spot] = deque()
    for name, held in roots.items():
        for key, value in held.items():
            if not key.startswith("__"):
                spots.append(_Spot(_top(name, key), value))
    while spots and len(seen) < MOST_OBJECTS:
        spot = spots.popleft()
        value = spot.value
        if isinstance(value, (*PLAIN, *CODE)) or id(value) in seen or id(value) in known:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if (address := _address(value)) and address not in memory:
                yield UnsavedPiece(spot.path, value, value)
            continue
        if isinstance(value, READERS) or _package(value) in MACHINERY:
            continue
        if (state := _state_of(value)) is not None:
            yield UnsavedPiece(spot.path, value, state)
        elif len(spot.path) < MOST_DEPTH + 2 or spot.within or isinstance(value, nn.Module):
            spots.extend(_below(spot))


def _below(spot: _Spot) -> Iterator[_Spot]:
    value = spot.value
    steps: Iterable[tuple[PathStep, Any]]
    if isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        steps = [(("key", key), one) for key, one in items if type(key) in (str, int)]
    elif isinstance(value, (list, tuple)):
        steps = [(("index", i), one) for i, one in enumerate(value[:MOST_ITEMS])]
    else:
        held = vars(value) if hasattr(type(value), "__dict__") and _has_dict(value) else {}
        steps = [(("attribute", name), one) for name, one in list(held.items())]
    within = spot.within or isinstance(value, nn.Module)
    for step, one in steps:
        yield _Spot((*spot.path, step), one, within)


def _has_dict(value: Any) -> bool:
    try:
        vars(value)
    except TypeError:  # it has slots only
        return False
    return True


def _package(value: Any) -> str:
    return str(getattr(type(value), "__module__", "")).partition(".")[0]


def _state_of(value: Any) -> Any:
    """Return the state of an object that keeps one and is no module; None for others."""
    kind = type(value)
    keeps = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    if isinstance(value, nn.Module) or not keeps:
        return None
    try:
        state = value.state_dict()
        state_tree.split(state)
    except Exception:
        # foreign code, called when it does not expect it; the attributes alone are looked at then
        return None
    return state


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a dense tensor's memory; 0 for others."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return 0
    if hasattr(tensor, "to_local"):
        if not tensor.ndim:
            return 0  # a norm or a loss
        tensor = tensor.to_local()
    if not tensor.numel():
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a wrapper of other tensors
        return 0


def _memory_of(known: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for one in known:
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(one, nn.Module):
            tensors = [*one.parameters(), *one.buffers()]
        elif isinstance(one, torch.optim.Optimizer):
            tensors = [p for group in one.param_groups for p in group["params"]]
        found |= {address for t in tensors if (address := _address(t))}
    return found


# ---- what has changed ----------------------------------------------------------------------------
def _signed(pieces: list[UnsavedPiece]) -> SignedPieces:
    """Return the sum of the bits of each piece, with one transfer from each device."""
    parts: dict[tuple[PathStep, ...], tuple[list[torch.Tensor], str]] = {}
    for piece in pieces:
        tensors, plain = state_tree.split({"": piece.state})
        parts[piece.path] = (list(tensors.values()), json.dumps(plain, sort_keys=True))
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensors_of, _ in parts.values():
        for tensor in tensors_of:
            sums.setdefault(tensor.device, []).append(bits_of(tensor))
    numbers = {device: iter(torch.stack(each).tolist()) for device, each in sums.items()}
    return {
        path: (hash(tuple(next(numbers[t.device]) for t in tensors_of)), plain)
        for path, (tensors_of, plain) in parts.items()
    }


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, read as integers. ()"""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(BITS[tensor.element_size()]).sum(dtype=torch.int64)


# ---- putting back --------------------------------------------------------------------------------
def _fits(now: torch.Tensor, found: Any) -> bool:
    return (
        isinstance(found, torch.Tensor)
        and (now.shape, now.dtype) == (found.shape, found.dtype)
        and not now.is_inference()
    )


def _like(now: Any, found: Any) -> Any:
    """Move tensors of a loaded state to the devices of the present one's."""
    if isinstance(found, torch.Tensor):
        return found.to(now.device) if isinstance(now, torch.Tensor) else found
    if isinstance(found, dict):
        known = now if isinstance(now, dict) else {}
        return {name: _like(known.get(name), one) for name, one in found.items()}
    if isinstance(found, (list, tuple)):
        old = now if isinstance(now, (list, tuple)) and len(now) == len(found) else found
        return type(found)(_like(a, b) for a, b in zip(old, found, strict=True))
    return found


def _put(roots: Roots, path: tuple[PathStep, ...], value: Any) -> bool:
    """Put a tensor where none like it is. Return whether there is such a place."""
    (_, root), (_, variable), *steps = path
    if root not in roots:
        return False
    holder: Any = roots[root]
    for how, name in [("key", variable), *steps][:-1]:
        held = vars(holder) if how == "attribute" and _has_dict(holder) else holder
        try:
            holder = held[name]
        except (KeyError, IndexError, TypeError):
            return False
    how, name = steps[-1] if steps else ("key", variable)
    if how == "attribute":
        setattr(holder, name, value)
    elif isinstance(holder, list) and name == len(holder):
        holder.append(value)
    elif isinstance(holder, tuple) or (isinstance(holder, list) and name > len(holder)):
        return False
    else:
        holder[name] = value
    return True
