"""Repeating, or skipping, the forward pass of an Accelerate script. Runs in the worker.

It is repeated where one run of the loop's body does several micro-batches, and skipped in
iterations that need no work.

Between the loader and `accelerator.backward(loss)` a script maps a batch to a loss, by calling its
prepared models and torch. `Tape` records these calls and repeats them with another batch. It
refuses what it cannot guarantee: numbers that left the tensors and differ from batch to batch,
draws from Python's and numpy's generators, batches that hold more than tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from harness.adapters.whole_copies import reshard
from harness.core.world import BadInput
from harness.worker.batches import rng_state

ADVICE = (
    "start the run with --script-world 1 and as many times the gradient accumulation: then no rank "
    "ever does two micro-batches in one iteration"
)


@dataclass(frozen=True)
class TapedCall:
    """One recorded call. `grad`: gradients were enabled; `autocast`: see `_autocast`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    grad: bool
    autocast: tuple[bool, torch.dtype | None]


class Tape(TorchFunctionMode):
    """A recorder of torch calls. `device_type`: the device whose autocast state is recorded."""

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type
        self._calls: list[TapedCall] = []
        self._batch: Any = None
        self._on = False
        self._models = 0
        self._drawn: Any = None
        self._drew = False

    # ---- recording -------------------------------------------------------------------------------
    def begin(self, batch: Any) -> None:
        """Start recording: the script now has `batch`."""
        self._calls, self._batch, self._models, self._drew = [], batch, 0, False
        self._drawn = _draws()
        self._on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop recording: the script has its loss. Harmless if nothing was begun."""
        if self._on:
            self._on = False
            self._drew |= _draws() != self._drawn
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Drop what was recorded."""
        self._calls, self._batch = [], None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, result)
        return result

    def model(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a prepared model and record it as one call, without the calls inside."""
        if not self._on:
            return function(*args, **kwargs)
        self._drew |= _draws() != self._drawn
        self._on = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            result = function(*args, **kwargs)
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._on = True
            self._drawn = _draws()
        self._models += 1
        self._write(function, args, kwargs, result)
        return result

    def _write(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._calls.append(
            TapedCall(function, args, kwargs, result, torch.is_grad_enabled(), self._autocast())
        )

    def _autocast(self) -> tuple[bool, torch.dtype | None]:
        if not torch.is_autocast_enabled(self._device_type):
            return False, None
        return True, torch.get_autocast_dtype(self._device_type)

    # ---- repeating -------------------------------------------------------------------------------
    def again(self, batch: Any, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for another batch. Raises BadInput if it cannot be computed."""
        self._check(batch)
        calls = self._up_to(loss)
        found: dict[int, Any] = {}
        _pair(self._batch, batch, found)
        outer = {id(t) for t in _tensors(self._batch)}
        for call in calls:
            if _changes(call) and not self._is_ours(call.args[0], found, outer):
                continue  # a sum that the script keeps
            result = self._repeat(call, found)
            self._compare(call, result)
            _pair(call.result, result, found)
        made: torch.Tensor | None = found.get(id(loss))
        if made is None:
            raise BadInput(f"wanted a loss that comes from the batch, found another; {ADVICE}")
        return made

    def _check(self, batch: Any) -> None:
        if not self._models:
            raise BadInput(
                "wanted a loss that comes from a prepared model, found none was called with the "
                f"batch; {ADVICE}"
            )
        if self._drew:
            raise BadInput(
                "this rank does several micro-batches in one iteration, but the loop's body draws "
                f"from Python's or numpy's generators, which cannot be done again; {ADVICE}"
            )
        mine, other = list(_plain(self._batch)), list(_plain(batch))
        if mine != other:
            raise BadInput(
                "this rank does several micro-batches in one iteration, but batches hold more than "
                f"tensors ({type((mine or other)[0]).__name__}), so the body cannot be done again "
                f"for each; {ADVICE}"
            )

    def _up_to(self, loss: torch.Tensor) -> list[TapedCall]:
        """Return the calls up to the one that produced the loss."""
        for number in range(len(self._calls) - 1, -1, -1):
            if any(t is loss for t in _tensors(self._calls[number].result)):
                return self._calls[: number + 1]
        raise BadInput(f"wanted a loss that torch made in this iteration, found another; {ADVICE}")

    def _is_ours(self, target: Any, found: dict[int, Any], outer: set[int]) -> bool:
        return id(target) in found or id(target) in outer

    def _repeat(self, call: TapedCall, found: dict[int, Any]) -> Any:
        args, kwargs = _swap(call.args, found), _swap(call.kwargs, found)
        on, dtype = call.autocast
        with (
            torch.set_grad_enabled(call.grad),
            torch.autocast(self._device_type, dtype=dtype, enabled=on),
        ):
            return call.function(*args, **kwargs)

    def _compare(self, call: TapedCall, result: Any) -> None:
        """Raise BadInput if a number that left the tensors differs: the body may have used it."""
        before, now = list(_plain(call.result)), list(_plain(result))
        if before == now or _is_loss_as_number(call):
            return
        raise BadInput(
            "this rank does several micro-batches in one iteration, but the loop's body takes a "
            f"number from its tensors ({getattr(call.function, '__name__', '')}) that differs from "
            f"batch to batch ({str(before[:1])[1:-1]} and {str(now[:1])[1:-1]}); {ADVICE}"
        )


def _is_loss_as_number(call: TapedCall) -> bool:
    """Return whether the call is loss.item(), for a sum that the script keeps."""
    target = call.args[0] if call.args else None
    return (
        isinstance(target, torch.Tensor)
        and target.dim() == 0
        and target.is_floating_point()
        and isinstance(call.result, float)
        and (target.requires_grad or getattr(call.function, "__name__", "") == "item")
    )


def _changes(call: TapedCall) -> bool:
    """Return whether the call changes its first argument."""
    name = getattr(call.function, "__name__", "")
    if not (call.args and isinstance(call.args[0], torch.Tensor)):
        return False
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name in IN_PLACE)


IN_PLACE = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _draws() -> Any:
    """Return a fingerprint of the state of Python's and numpy's generators."""
    numbers: Any = np.random.get_state(legacy=True)
    return hash(random.getstate()), numbers[2], numbers[3], hash(numbers[1].tobytes())


def _children(value: Any) -> list[Any] | None:
    if hasattr(value, "keys") and hasattr(value, "values"):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return list(vars(value).values())
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif (inner := _children(value)) is not None:
        for one in inner:
            yield from _tensors(one)


def _plain(value: Any) -> Iterator[Any]:
    """Yield the plain values (numbers, strings, arrays as bytes) in `value`, skipping tensors."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, np.ndarray):
        yield value.tobytes()
    elif (inner := _children(value)) is not None:
        for one in inner:
            yield from _plain(one)
    elif isinstance(value, (bool, int, float, complex, str, bytes)):
        yield value


def _pair(one: Any, two: Any, found: dict[int, Any]) -> None:
    """Map each tensor and container of `one` to its counterpart in `two`, by id, in `found`."""
    if isinstance(one, torch.Tensor):
        found[id(one)] = two
        return
    inner = _children(one)
    if inner is not None:
        found[id(one)] = two
        for left, right in zip(inner, _children(two) or [], strict=False):
            _pair(left, right, found)


def _swap(value: Any, found: dict[int, Any]) -> Any:
    if id(value) in found:
        return found[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_swap(one, found) for one in value)
    if type(value) is dict:
        return {key: _swap(one, found) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(*(_swap(v, found) for v in (value.start, value.stop, value.step)))
    return value


class Answers:
    """The recorded outputs of models, for iterations that need no work."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._last: dict[int, Any] = {}

    def remember(self, model: Any, result: Any) -> None:
        """Store the model's output for the last micro-batch, detached from its graph."""
        self._last[id(model)] = _detached(result)

    def forget(self) -> None:
        self._last.clear()

    def last(self, model: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if id(model) in self._last:
            return self._last[id(model)]
        return self.any(model, function, args, kwargs)

    def any(self, model: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return an output for inputs of these shapes, computed once without side effects."""
        shapes = tuple(tuple(t.shape) for t in _tensors([args, kwargs]))
        key = (id(model), model.training, shapes)
        if key not in self._known:
            with torch.no_grad(), rng_state.kept(), _same_buffers(model):
                self._known[key] = _detached(function(*args, **kwargs))
            reshard(model)  # no backward does it
        return self._known[key]


@contextmanager
def _same_buffers(model: Any) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _detached(value: Any) -> Any:
    from accelerate.utils import recursively_apply

    return recursively_apply(lambda t: t.detach(), value)
