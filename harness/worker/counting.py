"""What this rank's micro-batches of a step add up to as integers, and whether all of it fitted:
the bookkeeping of exact sums (`exact.py`). Runs in the worker."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput, HarnessError
from harness.worker.environment import differences, environment
from harness.worker.rounding import (
    CHUNK,
    INTEGERS,
    RoundingVerdict,
    Scales,
    Scratch,
    add_rounded,
    add_rounded_together,
    divide_into,
)

MAX_REPEATS = 4  # one is enough when backward is deterministic


class Counting:
    """What this rank's micro-batches of a step added up to, and whether everything fitted.
    Shared by both exact strategies."""

    def __init__(self, parameters: list[nn.Parameter], names: dict[int, str], word: int):
        for p in parameters:
            if not p.is_floating_point():
                raise BadInput(
                    f"exact sums are of real gradients, found a parameter of {p.dtype}; keep "
                    "complex parameters as pairs"
                )
        self.parameters, self.word = parameters, word
        self.device = parameters[0].device
        self.scales = Scales(len(parameters), word)
        self.scratch = Scratch()
        self._names = names
        self._peaks = torch.zeros(len(parameters), dtype=torch.float64, device=self.device)
        self._found: list[float] = []  # the peaks over all ranks, once they are agreed
        self._seen: set[int] = set()  # in this micro-batch
        # parameters whose gradients come in several parts for one micro-batch: of all ranks, and
        # those that were found in this step
        self.in_parts: set[int] = set()
        self._new_parts: set[int] = set()
        self._repeats = 0
        self.verdict: RoundingVerdict | None = None  # None: micro-batches are still to come

    @property
    def integers(self) -> torch.dtype:
        """Of the step to come. It changes between steps only: behind the first of a run."""
        return INTEGERS[self.scales.width]

    @property
    def world(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def start(self, micro_batches: int) -> None:
        self.scales.start(micro_batches)
        if self.world > 1:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, environment(self.device))
            if dist.get_rank() == 0:
                for rank, other in enumerate(every):
                    if unlike := differences(every[0], other):
                        warnings.warn(
                            f"rank {rank} differs from rank 0, so sums are exact but gradients are "
                            f"not: {unlike}",
                            stacklevel=2,
                        )

    def clear(self) -> None:
        """A step begins, or begins again."""
        self._peaks.zero_()
        self._seen.clear()
        self._new_parts.clear()
        self.verdict = None

    def micro(self) -> None:
        self._seen.clear()

    def units(self, members: list[int]) -> list[list[int]]:
        """Cut a run of parameters into what `add` takes at a time: on a CPU, a chunk of small
        ones or a single large one."""
        units: list[list[int]] = []
        size = 0
        for i in members:
            numel = self.parameters[i].numel()
            if not units or (self.device.type == "cpu" and size + numel > CHUNK):
                units.append([])
                size = 0
            units[-1].append(i)
            size += numel
        return units

    def see(self, i: int) -> bool:
        """The gradient of parameter i has come. False: so did another part of it, which nobody
        knew before; the step must be done again."""
        if i in self._seen:
            self._new_parts.add(i)
            return False
        self._seen.add(i)
        return True

    def name_of(self, i: int) -> str:
        return self._names.get(id(self.parameters[i]), "a parameter")

    def add(self, members: list[int], grads: list[torch.Tensor], total: torch.Tensor) -> None:
        """Add one micro-batch's gradients of the parameters `members`, which lie in `total`
        (n,) one after the other."""
        flat = [(g.to_dense() if g.is_sparse else g).reshape(-1) for g in grads]
        widest = torch.float64 if any(g.dtype is torch.float64 for g in flat) else torch.float32
        flat = [g if g.dtype is widest else g.to(widest) for g in flat]
        shifts = [self.scales.shift(i) for i in members]
        if self.device.type == "cpu":
            mine = self._peaks.numpy()
            for i, peak in zip(
                members, add_rounded(flat, shifts, total, self.scratch), strict=True
            ):
                if not peak <= mine[i]:  # so for NaN as well
                    mine[i] = math.inf if math.isnan(peak) else peak
        else:
            where = torch.tensor(members, device=self.device)
            peaks = add_rounded_together(flat, shifts, total)
            self._peaks[where] = torch.maximum(self._peaks[where], peaks.double())

    def must_be_done(self, done: bool) -> None:
        """Before `agree`: are all micro-batches `done`? Raises BadInput."""
        if not done:
            raise BadInput(
                "step.update() came before all micro-batches of the step were done; let `for batch "
                "in step` run to its end"
            )

    def agree(self) -> bool:
        """After the last micro-batch: True if all must be done again. All ranks say the same."""
        bits = torch.nan_to_num(self._peaks, nan=math.inf, posinf=math.inf).view(torch.int64)
        parts = torch.zeros_like(bits)
        parts[sorted(self._new_parts)] = 1
        both = torch.cat([bits, parts])
        if self.world > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
        bits, parts = both[: len(bits)], both[len(bits) :]
        self._found = bits.view(torch.float64).tolist()
        if bool(parts.any()):
            self.in_parts |= set(parts.nonzero().view(-1).tolist())
            self.verdict = RoundingVerdict.AGAIN  # of half a gradient no unit is made
        else:
            self.verdict = self.scales.judge(self._found)
        if self.verdict is not RoundingVerdict.AGAIN:
            self._repeats = 0
            return False
        self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise HarnessError(
                f"the gradients of a step did not fit {self._repeats} times although the units "
                "follow them; backward gives other numbers each time it is asked: use "
                "deterministic kernels (torch.use_deterministic_algorithms)"
            )
        return True

    def must_not_repeat(self, again: Callable[[], bool]) -> None:
        """Before sums are taken; `again` is asked if nobody has asked it yet. Raises BadInput."""
        if self.verdict is None and again():
            raise BadInput(
                "a gradient did not fit and the step must be done again, but `for batch in step` "
                "did not run to its end"
            )

    def write(
        self, i: int, total: torch.Tensor, weight: float | torch.Tensor, out: torch.Tensor
    ) -> None:
        """The gradient of (a piece of) parameter i."""
        if self.verdict is RoundingVerdict.BAD:
            out.fill_(math.nan)
        else:
            divide_into(out, total, weight, self.scales.shift(i), self.scratch)

    def applied(self) -> None:
        """The gradients of this step have been made."""
        if self.verdict is RoundingVerdict.GOOD:
            self.scales.advance(self._found)

    def state_dict(self) -> dict[str, Any]:
        parts = {"in_parts": sorted(self.in_parts)} if self.in_parts else {}
        return {"word": self.word, "exponents": list(self.scales.exponents), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["word"] != self.word or len(state["exponents"]) != len(self.scales.exponents):
            raise BadInput(
                f"the snapshot's sums have {state['word']} bits and {len(state['exponents'])} "
                f"parameters, this script's {self.word} and "
                f"{len(self.scales.exponents)}; resume with the same model and the same reduce="
            )
        self.scales.exponents = list(state["exponents"])
        self.in_parts = set(state.get("in_parts", ()))
