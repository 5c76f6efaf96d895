"""What a step costs in arithmetic, and what this rank's device could do at most: for tokens per
second, MFU and HFU. Runs in the worker.

MFU divides what the model needs for what was learned by the peak; HFU divides what was executed:
with activations that are computed again, micro-batches that are done again, and fillers.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from harness.core.hardware import peak_flops
from harness.core.world import BadInput
from harness.worker.guards import Precision
from harness.worker.pipeline import Pipeline
from harness.worker.sharding import is_sharded

UNKNOWN_GFLOPS = -(1 << 50)  # one rank's makes the sum of all negative
LEAST_PEAK, MOST_PEAK = 1e9, 1e17  # FLOP/s of one device; beyond these it is a mistake
MOST_FLOPS = 1e30  # of one sample
SIX_PT, COUNTED = "6PT", "counted"
MOST_FORWARDS = 16  # of one micro-batch


class FlopCount:
    """What one micro-batch's forward and backward cost, counted by torch's own counter, which knows
    matrix products, convolutions and attention.

    The counter is not put around the training: under it torch takes other kernels for some
    gradients, so their last bits change. What the model is given is noted, and then a copy of the
    model without any data (on the meta device) does the same, beside everything else.
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
        """FLOP of the forwards that were seen since `armed`, and of their backward. Raises what
        the model raises without data."""
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
    """A copy whose tensors hold nothing. No tensor is copied on the way."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for module in model.modules():
        for value in (*module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, torch.Tensor):
                memo[id(value)] = torch.empty_like(value, device="meta")
    return copy.deepcopy(model, memo)


class Rates:
    """`peak_flops`: of the device, per second; None: from its name and what the model is computed
    in. `doubts`: what was refused, in words, until somebody tells them."""

    def __init__(self, device: torch.device, peak_flops: float | None = None):
        """Raises BadInput for a peak that no device has."""
        if peak_flops is not None and not LEAST_PEAK <= peak_flops <= MOST_PEAK:
            raise BadInput(
                f"attach(peak_flops={peak_flops}): wanted FLOP/s of one device, from "
                f"{LEAST_PEAK:g} to {MOST_PEAK:g}; leave it out to take it from the device's name"
            )
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        # of one micro-batch, with what is computed again; 0: not counted
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
        """From here on. In which precision the model is computed is seen if anybody wants to
        know. Raises BadInput."""
        _check(tokens_per_sample, flops_per_sample, replica_ranks)
        self.tokens_per_sample = tokens_per_sample
        if flops_per_sample == SIX_PT:
            parameters = (
                model.numel
                if isinstance(model, Pipeline) and model.total > 1
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
            return  # an earlier loop has
        if any(_is_compiled(m) for m in model.modules()):
            self._not_counted("the model is compiled, and torch's counter sees no kernels")
        elif is_sharded(model):
            self._not_counted("the model is sharded, and no copy of it can be made")
        else:
            self.count = FlopCount(model)

    def arm(self) -> None:
        """A micro-batch is given out that counts."""
        if self.count is not None:
            self.count.armed = True

    def counted(self, samples: int) -> None:
        """After the backward of a micro-batch of so many samples: count it, if that was asked for
        and not done."""
        count = self.count
        if count is None or not count.armed:
            return
        self.count = None
        try:
            forward, backward = count.count()
        except Exception as e:  # whatever a model does that is given no data
            self._not_counted(f"without data the model raises {type(e).__name__}: {e}"[:300])
            return
        if not forward:
            self._not_counted(
                "no arithmetic was seen in the model's forward (does the script call its parts "
                "instead of the model?)"
            )
        # A backward is at most two forwards; what is above that was computed again.
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
        """What this rank adds to the sum by which MFU divides; asked for after the first
        forward."""
        precision = self._precision.name if self._precision is not None else "none"
        known = (
            peak_flops(torch.cuda.get_device_name(self._device), precision)
            if self._device.type == "cuda"
            else None
        )
        peak = self._peak_flops or known
        return int(peak / 1e9) if peak else UNKNOWN_GFLOPS

    def mfu(self, samples: int, seconds: float, peak_gflops: int) -> float | None:
        """`peak_gflops`: of all ranks together. None: unknown, or no share of a peak."""
        return self._share("MFU", self.flops_per_sample * samples, seconds, peak_gflops)

    def hfu(self, flops: float, seconds: float, peak_gflops: int) -> float | None:
        """`flops`: executed on all ranks."""
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
        """Once."""
        if what not in self._refused:
            self._refused.add(what)
            self.doubts.append(text)


def _check(tokens: int, flops: float | str, replica_ranks: int) -> None:
    """What `steps` was given. Raises BadInput."""
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
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
