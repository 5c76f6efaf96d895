"""The state of random number generators: read, restored, and kept separate. Runs in the worker.

The global generators are Python's, numpy's and torch's CPU generator. Generators of devices are not
touched, since data is read on the host.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from storage.tensors import state_tree

State = dict[str, Any]


def generators_state() -> State:
    """Return the state of the global generators, in a form that a snapshot can hold."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": torch.from_numpy(np.array(numbers, np.uint32).view(np.uint8)),
        "python_more": [version, gauss],
        "numpy": torch.from_numpy(np.array(keys, np.uint32).view(np.uint8)),
        "numpy_more": [str(kind), int(position), int(has_gauss), float(cached)],
        "torch": torch.default_generator.get_state(),
    }


def put(state: State) -> None:
    """Set the global generators to a state that `generators_state` returned."""
    version, gauss = state["python_more"]
    numbers = state["python"].numpy().view(np.uint32).tolist()
    random.setstate((version, tuple(numbers), gauss))
    kind, position, has_gauss, cached = state["numpy_more"]
    keys = state["numpy"].numpy().view(np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.default_generator.set_state(state["torch"])


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the global generators on exit, whatever was drawn or seeded inside the block."""
    python, numbers = random.getstate(), np.random.get_state(legacy=True)
    cpu = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.default_generator.set_state(cpu)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Restore the global generators on exit like `kept`, in half the time; used once per batch.
    Inside, numpy's global functions draw from another bit generator. One thing is lost: the second
    of two normal numbers that numpy had drawn as a pair (`np.random.randn`)."""
    python, cpu = random.getstate(), torch.default_generator.get_state()
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(_SPARE)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]
        random.setstate(python)
        torch.default_generator.set_state(cpu)


_SPARE = np.random.MT19937()


class Apart:
    """A second set of global generators, which continues where the last `with` block left it.

    with apart: ...     # afterwards the ordinary generators are as before
    """

    def __init__(self, state: State):
        self.state = state
        self._kept: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Apart:
        self._kept = kept()
        self._kept.__enter__()
        put(self.state)
        return self

    def __exit__(self, *why: Any) -> None:
        self.state = generators_state()
        assert self._kept is not None
        self._kept.__exit__(*why)


class SamplerMemory:
    """The state of a loader's samplers: generators and integers in their attributes and in those of
    nested samplers, and their `state_dict` where they have one. The loader's own attributes count
    too, except integers."""

    def __init__(self, loader: Any):
        self._things: dict[str, Any] = {}
        self._add("loader", loader)

    def _add(self, name: str, thing: Any) -> None:
        if any(thing is known for known in self._things.values()) or not hasattr(thing, "__dict__"):
            return
        self._things[name] = thing
        for key, value in vars(thing).items():
            if isinstance(value, Sampler) or key in ("sampler", "batch_sampler", "base_sampler"):
                self._add(f"{name}.{key}", value)

    def samplers(self) -> dict[str, Any]:
        """Return the samplers by name, without the loader."""
        return {name: s for name, s in self._things.items() if not isinstance(s, DataLoader)}

    def taken(self) -> State:
        """Return the state by sampler and attribute, in a form that a snapshot can hold. Raises
        TypeError for a sampler's `state_dict` that a snapshot cannot hold."""
        state: State = {}
        samplers = self.samplers()
        for name, thing in self._things.items():
            for key, value in vars(thing).items():
                found = _spelled(value)
                if found is not None and (name in samplers or type(value) is not int):
                    state[f"{name}.{key}"] = found
        for name, sampler in samplers.items():
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
                own = copy.deepcopy(sampler.state_dict())
                state_tree.split(own)  # fails now rather than when a snapshot is due
                state[f"{name}()"] = own
        return state

    def put(self, state: State) -> None:
        """Restore a state that `taken` returned. Entries whose attribute is gone are ignored."""
        for name, thing in self._things.items():
            if f"{name}()" in state:
                thing.load_state_dict(copy.deepcopy(state[f"{name}()"]))
            for key, value in list(vars(thing).items()):
                if f"{name}.{key}" in state:
                    _restore(thing, key, value, state[f"{name}.{key}"])


def equal_entries(one: Any, two: Any) -> bool:
    """Return whether two entries of a `SamplerMemory` are equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return type(one) is type(two) and repr(one) == repr(two)


def _spelled(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return json.dumps(value.bit_generator.state, default=lambda array: array.tolist())
    if isinstance(value, np.random.RandomState):
        return json.dumps(value.get_state(legacy=False), default=lambda array: array.tolist())
    if isinstance(value, random.Random):
        return json.dumps(value.getstate())
    return value if type(value) is int else None


def _restore(thing: Any, key: str, value: Any, found: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(found)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = json.loads(found)
    elif isinstance(value, np.random.RandomState):
        value.set_state(json.loads(found))
    elif isinstance(value, random.Random):
        version, numbers, gauss = json.loads(found)
        value.setstate((version, tuple(numbers), gauss))
    elif type(value) is int and value != found:
        setattr(thing, key, found)
