"""The report of a worker whose memory has run out: bytes by kind, and the greatest tensors.
Runs in the worker, after the error and while the script's frames still hold their tensors.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.core.formatting import nbytes
from harness.worker.training_state import Training

KINDS = ("weights", "gradients", "optimizer", "buffers")
OTHERS = "activations and others"
GREATEST = 5  # tensors that are named
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class HeldTensor:
    """A tensor in memory. `storage`: the address of its memory, which other tensors may share."""

    kind: str
    name: str
    nbytes: int
    storage: int


def memory_report(training: Training, device: torch.device) -> str:
    """Return in words what holds the memory of `device`: weights, gradients, optimizer, buffers,
    activations and others, on a GPU the allocator's cache; and the greatest tensors by name."""
    named = list(_once(_named(training, device)))
    storages = {t.storage for t in named}
    others = [t for t in _once(_seen_by_python(device)) if t.storage not in storages]
    sizes = {kind: sum(t.nbytes for t in named if t.kind == kind) for kind in KINDS}
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        sizes[OTHERS] = max(0, allocated - sum(sizes.values()))
        sizes["cache"] = torch.cuda.memory_reserved(device) - allocated
        free, total = torch.cuda.mem_get_info(device)
        where = f"{device} ({nbytes(total)}, {nbytes(free)} free)"
    else:
        # saved for a backward only, a tensor is not seen by Python
        sizes[f"{OTHERS} that Python sees"] = sum(t.nbytes for t in others)
        where = f"this process ({_resident()})"
    held = ", ".join(f"{kind} {nbytes(size)}" for kind, size in sizes.items())
    greatest = sorted([*named, *others], key=lambda t: -t.nbytes)[:GREATEST]
    names = ", ".join(f"{t.name} {nbytes(t.nbytes)}" for t in greatest)
    return f"{where} holds {held}; the greatest tensors: {names or 'none'}"


def _once(tensors: Iterator[HeldTensor]) -> Iterator[HeldTensor]:
    """Yield each tensor once: tied weights are one, and so are two views of the same memory that
    are of one size."""
    seen = set[tuple[int, int]]()
    for one in tensors:
        if (one.storage, one.nbytes) not in seen:
            seen.add((one.storage, one.nbytes))
            yield one


def _named(training: Training, device: torch.device) -> Iterator[HeldTensor]:
    """Yield the tensors of the prepared objects, with their names."""
    if training.model is None:
        return
    names = dict[int, str]()
    for name, p in training.model.named_parameters():
        names[id(p)] = name
        yield from _held("weights", name, p, device)
        yield from _held("gradients", f"gradient of {name}", p.grad, device)
    for name, buffer in training.model.named_buffers():
        yield from _held("buffers", name, buffer, device)
    for optimizer in training.optimizers:
        for p, state in getattr(optimizer, "state", {}).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                of = names.get(id(p), "a parameter")
                yield from _held("optimizer", f"{key} of {of}", value, device)


def _held(kind: str, name: str, value: Any, device: torch.device) -> Iterator[HeldTensor]:
    """Yield the part of a tensor that lies on `device`; nothing for other objects."""
    value = getattr(value, "_local_tensor", value)  # of a DTensor
    if not issubclass(type(value), torch.Tensor) or value.device != device:
        return
    with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse, or only described
        storage = value.untyped_storage()
        size = value.numel() * value.element_size()
        yield HeldTensor(kind, name, min(size, storage.nbytes()), storage.data_ptr())


def _seen_by_python(device: torch.device) -> Iterator[HeldTensor]:
    """Yield whole storages of all tensors that Python code holds, named by shape and type."""
    seen = set[int]()
    for one in gc.get_objects():
        # not isinstance, which would ask proxies for what they stand for
        if not issubclass(type(one), torch.Tensor):
            continue
        for t in _held(OTHERS, f"a tensor {tuple(one.shape)} of {one.dtype}", one, device):
            if t.storage not in seen:
                seen.add(t.storage)
                yield HeldTensor(t.kind, t.name, one.untyped_storage().nbytes(), t.storage)


def _resident() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^VmRSS:\s+(\d+) kB", STATUS.read_text(), re.M):
            return f"{nbytes(1024 * int(found[1]))} resident"
    return "its size is not known"
