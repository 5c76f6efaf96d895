"""The time of this rank's steps by phase, its peak memory, and what a step costs in arithmetic, for
tokens per second, MFU and HFU. Runs in the worker.

MFU divides the FLOP that the model needs for the samples it learned from by the peak. HFU divides
the FLOP that were executed, including recomputed activations, repeated micro-batches and fillers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from harness.core.facts import PHASES
from harness.core.hardware import peak_flops
from harness.core.world import BadInput
from harness.worker.gradients.sharding import is_sharded
from harness.worker.staged_model import StagedModel

# What torch.compile(module) returns, and the attribute that module.compile() sets.
OPTIMIZED, COMPILED_CALL = "OptimizedModule", "_compiled_call_impl"


class Precision:
    """The dtype of most of a model's matrix products, observed in its forward. Parameters, autocast
    and FSDP's mixed precision all influence it, and the dtype of a layer's output shows the result.

    The model is observed until `name` is read: by hooks, but not inside modules that torch.compile
    compiles, since a hook in there is compiled as well, and compiled anew when it goes. These are
    observed from outside: they count with the dtype of autocast where they are called, else with
    that of most of their parameters.
    """

    def __init__(self, model: nn.Module):
        self._seen: dict[str, int] = {}
        self._undo: list[Callable[[], object]] = []
        self._observe(model)

    def _observe(self, module: nn.Module) -> None:
        if type(module).__name__ == OPTIMIZED:
            see = functools.partial(self._see_compiled, module)
            self._undo.append(module.register_forward_pre_hook(see).remove)
        elif (compiled := getattr(module, COMPILED_CALL, None)) is not None:

            def call(*args: Any, **kwargs: Any) -> Any:
                self._see_compiled(module)
                return compiled(*args, **kwargs)

            setattr(module, COMPILED_CALL, call)
            self._undo.append(functools.partial(setattr, module, COMPILED_CALL, compiled))
        else:
            if _weight(module):
                self._undo.append(module.register_forward_hook(self._see).remove)
            for child in module.children():
                self._observe(child)

    def _see_compiled(self, module: nn.Module, *_: object) -> None:
        weights: dict[torch.dtype, int] = {}
        kind = "cpu"
        for part in module.modules():
            for p in part.parameters(recurse=False) if _weight(part) else ():
                weights[p.dtype] = weights.get(p.dtype, 0) + p.numel()
                kind = p.device.type
        if weights:
            dtype = max(weights, key=lambda dtype: weights[dtype])
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
            name = str(dtype).removeprefix("torch.")
            self._seen[name] = self._seen.get(name, 0) + sum(weights.values())

    def _see(self, module: nn.Module, _: object, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if (dtype := getattr(first, "dtype", None)) is not None:
            name = str(dtype).removeprefix("torch.")
            self._seen[name] = self._seen.get(name, 0) + _weight(module)

    @functools.cached_property
    def name(self) -> str:
        """The dtype's name: "bfloat16", "float16", "tf32", "float32" or another; "none" if no
        layer was seen."""
        for undo in self._undo:
            undo()
        found = max(self._seen, key=lambda name: self._seen[name], default="none")
        return (
            "tf32"
            if found == "float32" and torch.get_float32_matmul_precision() != "highest"
            else found
        )


def _weight(module: nn.Module) -> int:
    """Return the number of elements of the module's own matrices, as its share of the work; 0 for
    an embedding, which multiplies nothing."""
    if type(module).__name__.startswith("Embedding"):
        return 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)


# The peak memory of this process, on the host and on its GPU.

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory in bytes, since the process began or since `reset`."""

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None

    def now(self) -> int:
        """Return the current resident set on the host; where the system does not report it, the
        peak."""
        return _status("VmRSS:") or _most()

    def taken(self) -> tuple[int, int]:
        """Return the peaks of the host and of the GPU (torch's allocator; 0: there is no GPU)."""
        gpu = 0 if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)
        return _status("VmHWM:") or _most(), gpu

    def reset(self) -> None:
        """Count from now on; the host's peak only where Linux permits it."""
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)


def _status(key: str) -> int:
    """Return a value of /proc/self/status in bytes; 0: this system does not report it."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _most() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


UNKNOWN_GFLOPS = -(1 << 50)  # from one rank, this makes the sum over all ranks negative
LEAST_PEAK, MOST_PEAK = 1e9, 1e17  # FLOP/s of one device; beyond these it is a mistake
MOST_FLOPS = 1e30  # FLOP of one sample
SIX_PT, COUNTED = "6PT", "counted"
MOST_FORWARDS = 16  # forwards of one micro-batch that are counted


class FlopCount:
    """The FLOP of one micro-batch's forward and backward, from torch's own counter, which knows
    matrix products, convolutions and attention.

    The counter does not run around the training itself: under it torch chooses other kernels for
    some gradients, so their last bits change. Instead, the model's inputs are noted, and a copy of
    the model without data (on the meta device) repeats the forward and backward.
    """

    def __init__(self, model: nn.Module):
        self.armed = False
        self._model = model
        self._given: list[Any] = []
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.armed and len(self._given) < MOST_FORWARDS:
            self._given.append(tree_map(_without_data, (args, kwargs)))

    def count(self) -> tuple[int, int]:
        """Return the FLOP of the forwards seen since `armed`, and of their backwards. Raises
        whatever the model raises without data."""
        self._hook.remove()
        forward = backward = 0
        model = _hollow(self._model)
        for args, kwargs in self._given:
            with FlopCounterMode(display=False) as counter:
                found = model(*args, **kwargs)
            forward += counter.get_total_flops()
            leaves = [t for t in tree_leaves(found) if getattr(t, "requires_grad", False)]
            if leaves:
                with FlopCounterMode(display=False) as counter:
                    torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])
                backward += counter.get_total_flops()
        return forward, backward


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)


def _hollow(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device. No tensor's data is copied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for module in model.modules():
        for value in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, torch.Tensor):
                memo[id(value)] = torch.empty_like(value, device="meta")
    return copy.deepcopy(model, memo)


class Rates:
    """The rates of this rank's training. `peak_flops`: the device's peak in FLOP/s; None: derived
    from its name and the model's precision. `doubts`: messages about refused values that are not
    yet reported."""

    def __init__(self, device: torch.device, peak_flops: float | None = None):
        """Check `peak_flops`. Raises BadInput for a peak that no device has."""
        if peak_flops is not None and not LEAST_PEAK <= peak_flops <= MOST_PEAK:
            raise BadInput(
                f"attach(peak_flops={peak_flops}): wanted FLOP/s of one device, from "
                f"{LEAST_PEAK:g} to {MOST_PEAK:g}; leave it out to take it from the device's name"
            )
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        # of one micro-batch, including recomputation; 0: not counted
        self.flops_per_micro = 0.0
        self.count: FlopCount | None = None  # until a micro-batch was counted
        self.doubts: list[str] = []
        self._refused: set[str] = set()
        self._peak_flops = peak_flops
        self._device = device
        self._precision: Precision | None = None

    def watch(
        self,
        model: nn.Module,
        tokens_per_sample: int,
        flops_per_sample: float | str,
        replica_ranks: int = 1,
    ) -> None:
        """Begin to measure this model, with the options given to `steps`. Raises BadInput if these
        are wrong."""
        _check(tokens_per_sample, flops_per_sample, replica_ranks)
        self.tokens_per_sample = tokens_per_sample
        if flops_per_sample == SIX_PT:
            parameters = (
                model.numel
                if isinstance(model, StagedModel) and model.total > 1
                else sum(p.numel() for p in model.parameters())
            )
            self.flops_per_sample = 6.0 * parameters * tokens_per_sample
        elif flops_per_sample == COUNTED:
            self._begin_to_count(model)
        else:
            self.flops_per_sample = float(flops_per_sample)
        if self._precision is None and flops_per_sample:
            self._precision = Precision(model)

    def _begin_to_count(self, model: nn.Module) -> None:
        if self.flops_per_micro or self.count is not None:
            return  # an earlier loop has begun
        if any(_is_compiled(m) for m in model.modules()):
            self._not_counted("the model is compiled, and torch's counter sees no kernels")
        elif is_sharded(model):
            self._not_counted("the model is sharded, and no copy of it can be made")
        else:
            self.count = FlopCount(model)

    def arm(self) -> None:
        """Mark that a micro-batch that counts begins."""
        if self.count is not None:
            self.count.armed = True

    def counted(self, samples: int) -> None:
        """Count a micro-batch of `samples` samples after its backward, if that was requested and
        none has been counted."""
        count = self.count
        if count is None or not count.armed:
            return
        self.count = None
        try:
            forward, backward = count.count()
        except Exception as e:  # a model without data may raise anything
            self._not_counted(f"without data the model raises {type(e).__name__}: {e}"[:300])
            return
        if not forward:
            self._not_counted(
                "no arithmetic was seen in the model's forward (does the script call its parts "
                "instead of the model?)"
            )
        # A backward costs at most two forwards; more than that is recomputation.
        self.flops_per_sample = (forward + min(backward, 2 * forward)) / samples
        self.flops_per_micro = float(forward + backward)

    def _not_counted(self, why: str) -> None:
        self._doubt(
            "counted",
            f"flops_per_sample='counted': {why}; give a number, or '6PT' with tokens_per_sample. "
            "MFU and HFU are not told",
        )

    # ---- shares of a peak ------------------------------------------------------------------------
    @functools.cached_property
    def peak_gflops(self) -> int:
        """The peak of this rank's device in GFLOP/s, or `UNKNOWN_GFLOPS`. The sum over ranks is
        what MFU divides by. Must first be read after the first forward, which shows the
        precision."""
        precision = self._precision.name if self._precision is not None else "none"
        known = (
            peak_flops(torch.cuda.get_device_name(self._device), precision)
            if self._device.type == "cuda"
            else None
        )
        peak = self._peak_flops or known
        return int(peak / 1e9) if peak else UNKNOWN_GFLOPS

    def mfu(self, samples: int, seconds: float, peak_gflops: int) -> float | None:
        """Return the MFU, or None if it is unknown or above 1. `peak_gflops`: sum of all ranks."""
        return self._share("MFU", self.flops_per_sample * samples, seconds, peak_gflops)

    def hfu(self, flops: float, seconds: float, peak_gflops: int) -> float | None:
        """Return the HFU, or None as `mfu` does. `flops`: executed on all ranks."""
        return self._share("HFU", flops, seconds, peak_gflops)

    def _share(self, name: str, flops: float, seconds: float, peak_gflops: int) -> float | None:
        if flops <= 0 or seconds <= 0 or peak_gflops <= 0:
            return None
        share = flops / seconds / (peak_gflops * 1e9)
        if share <= 1:
            return share
        self._doubt(
            name,
            f"{name} would be {share:.3g}, wanted at most 1: {flops:.3g} FLOP in {seconds:.3g} s "
            f"on devices that do {peak_gflops * 1e9:.3g} a second; it is not told. Look at "
            "flops_per_sample (the whole model's, forward and backward, of one sample) and at "
            "peak_flops (of one rank's device)",
        )
        return None

    def _doubt(self, what: str, text: str) -> None:
        """Add a message to `doubts`, once per `what`."""
        if what not in self._refused:
            self._refused.add(what)
            self.doubts.append(text)


def _check(tokens: int, flops: float | str, replica_ranks: int) -> None:
    """Check the arguments given to `steps`. Raises BadInput."""
    if tokens < 0:
        raise BadInput(f"steps(tokens_per_sample={tokens}): wanted a number from 0 on")
    if isinstance(flops, str):
        if flops not in (SIX_PT, COUNTED):
            raise BadInput(
                f"steps(flops_per_sample={flops!r}): wanted a number, '{SIX_PT}' (six times "
                f"parameters times tokens) or '{COUNTED}'"
            )
        if flops == SIX_PT and not tokens:
            raise BadInput(f"steps(flops_per_sample='{SIX_PT}') needs tokens_per_sample")
        if flops == COUNTED and replica_ranks > 1:
            raise BadInput(
                f"steps(flops_per_sample='{COUNTED}'): each of the {replica_ranks} ranks of a "
                "replica does a part of the model, and what the others do is not seen; give a "
                "number"
            )
    elif not (math.isfinite(flops) and 0 <= flops <= MOST_FLOPS):
        raise BadInput(
            f"steps(flops_per_sample={flops}): wanted FLOP of one sample, forward and backward, "
            f"from 0 (not known) to {MOST_FLOPS:g}"
        )


def _is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == OPTIMIZED or getattr(module, COMPILED_CALL, None) is not None
    )


# The time of this rank's steps by phase, measured between marks.

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, SNAPSHOT, HARNESS, OTHER = range(len(PHASES))
# further codes: a step begins, its update ends (OTHER follows both), timing stops
BEGIN, END, REST = range(len(PHASES), len(PHASES) + 3)


class Marks(Protocol):
    """A source of marks."""

    def take(self) -> Any:
        """Return a mark of the present moment."""

    def between(self, a: Any, b: Any) -> float:
        """Return the seconds between two marks, both of which must have passed."""

    def wait(self, mark: Any) -> None:
        """Wait until a mark has passed."""

    def give_back(self, marks: list[Any]) -> None:
        """Release marks that are not needed any more."""


class HostMarks:
    """Marks that are readings of the host's clock."""

    take = staticmethod(time.perf_counter)

    def between(self, a: float, b: float) -> float:
        return b - a

    def wait(self, mark: float) -> None: ...

    def give_back(self, marks: list[float]) -> None: ...


class DeviceMarks:
    """Marks that are events on this thread's stream; a few events are reused."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record()
        return event

    def between(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        b.synchronize()  # returns at once, unless a script uses several streams
        milliseconds: float = a.elapsed_time(b)
        return max(0.0, milliseconds / 1e3)

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def give_back(self, marks: list[torch.cuda.Event]) -> None:
        self._free += marks


def marks_of(device: torch.device) -> Marks:
    return DeviceMarks() if device.type == "cuda" else HostMarks()


class PhaseTimer:
    """The timer of phases. `begin`, `enter` and `end` are called during a step and only take a
    mark; `settle` adds up the marks that have passed.

    `seconds`: by phase, over the `steps` steps that ended since they were last taken; `last`: the
    number of the last of these steps.
    """

    def __init__(self, marks: Marks):
        self._marks = marks
        self._taken: list[Any] = []
        self._codes: list[int] = []  # the phase that begins at each of these marks
        self._on = self._paused = False
        self._last: Any = None  # the newest mark that was evaluated, and the phase that began there
        self._code = REST
        self._numbers: list[int] = []  # numbers of the steps that begin in `_codes`
        # the step under evaluation: its number, whether its update ended, and its first mark
        self._number, self._ended = 0, False
        self._begun: Any = None
        self._open = [0.0] * len(PHASES)
        self.seconds, self.steps, self.last = [0.0] * len(PHASES), 0, 0

    # ---- during a step ---------------------------------------------------------------------------
    def begin(self, step: int) -> None:
        """Mark the begin of a step. The time since the last step's `end` was between the two."""
        self._on = not self._paused
        if self._on:
            self._numbers.append(step)
        self.enter(BEGIN)

    def enter(self, phase: int) -> None:
        if self._on:
            self._codes.append(phase)
            self._taken.append(self._marks.take())

    def end(self) -> None:
        """Mark the end of the step's update."""
        self.enter(END)

    def rest(self) -> None:
        """Stop timing, because no step follows, or not at once."""
        self.enter(REST)
        self._on = False

    def pause(self, paused: bool) -> None:
        """Take no marks from now on; or, with False, take them again from the next step on."""
        self._paused = paused
        if paused:
            self.rest()

    # ---- afterwards ------------------------------------------------------------------------------
    def settle(self) -> float | None:
        """Return the seconds from the begin to the end of the update, which must have passed, of
        the oldest step that is not settled yet. None: it was not timed."""
        if END not in self._codes:
            return None
        self._look(self._codes.index(END) + 1)
        return self._marks.between(self._begun, self._last)

    def close(self) -> None:
        """Wait for all remaining marks and evaluate them."""
        if self._taken:
            self._marks.wait(self._taken[-1])
            self._look(len(self._taken))

    def take_seconds(self) -> tuple[list[float], int, int]:
        """Return the seconds by phase, summed over steps, the number of these steps and the last
        step, and reset them."""
        told = self.seconds, self.steps, self.last
        self.seconds, self.steps = [0.0] * len(PHASES), 0
        return told

    def _look(self, count: int) -> None:
        """Evaluate the oldest `count` marks."""
        done = []
        for code, mark in zip(self._codes[:count], self._taken[:count], strict=True):
            if self._code < REST:
                phase = self._code if self._code < BEGIN else OTHER
                self._open[phase] += self._marks.between(self._last, mark)
            if self._last is not None and self._last is not self._begun:
                done.append(self._last)
            if code in (BEGIN, REST):
                self._over()
            if code == BEGIN:
                done += [] if self._begun is None else [self._begun]
                self._number, self._begun = self._numbers.pop(0), mark
            self._ended |= code == END
            self._code, self._last = code, mark
        del self._codes[:count], self._taken[:count]
        self._marks.give_back(done)

    def _over(self) -> None:
        """Close the step under evaluation. A step whose update did not end does not count."""
        if self._ended:
            self.seconds = [a + b for a, b in zip(self.seconds, self._open, strict=True)]
            self.steps, self.last = self.steps + 1, self._number
        self._open, self._ended = [0.0] * len(PHASES), False
