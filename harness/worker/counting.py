"""What this rank's micro-batches of a step add up to as integers, and whether all of it fitted:
the bookkeeping of exact sums (`exact.py`). Runs in the worker."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
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
    exact_norm,
)

MAX_REPEATS = 4  # one is enough when backward is deterministic


class Counting:
    """What this rank's micro-batches of a step added up to, and whether everything fitted.
    Shared by both exact strategies. Every rank knows the units of the whole model, of which it may
    have a stage only."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[int, str],
        word: int,
        whole: Sequence[str] = (),
    ):
        """`names`: by id of the parameter; `whole`: of all that train in the model, in its order;
        (): `parameters` are all."""
        for p in parameters:
            if not p.is_floating_point():
                raise BadInput(
                    f"exact sums are of real gradients, found a parameter of {p.dtype}; keep "
                    "complex parameters as pairs"
                )
        self.parameters, self.word = parameters, word
        self.device = parameters[0].device
        # where in the whole model each parameter is
        order = {name: i for i, name in enumerate(whole)}
        self._at = [order.get(names.get(id(p), ""), i) for i, p in enumerate(parameters)]
        self.scales = Scales(len(whole) or len(parameters), word)
        self.scratch = Scratch()
        self._names = names
        self._peaks = torch.zeros(len(parameters), dtype=torch.float64, device=self.device)
        self._found: list[float] = []  # the peaks over all ranks, once they are agreed
        self._seen: set[int] = set()  # in this micro-batch
        # parameters whose gradients come in several parts for one micro-batch: of all ranks (here;
        # in the whole model), and those that were found in this step
        self.in_parts: set[int] = set()
        self._all_in_parts: set[int] = set()
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
        shifts = [self.scales.shift(self._at[i]) for i in members]
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
        peaks = torch.zeros(len(self.scales.exponents), dtype=torch.float64, device=self.device)
        peaks[self._at] = torch.nan_to_num(self._peaks, nan=math.inf, posinf=math.inf)
        bits = peaks.view(torch.int64)
        parts = torch.zeros_like(bits)
        parts[[self._at[i] for i in sorted(self._new_parts)]] = 1
        both = torch.cat([bits, parts])
        if self.world > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
        bits, parts = both[: len(bits)], both[len(bits) :]
        self._found = bits.view(torch.float64).tolist()
        if bool(parts.any()):
            self._come_in_parts(parts.nonzero().view(-1).tolist())
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

    def _come_in_parts(self, places: Iterable[int]) -> None:
        """Parameters of the whole model."""
        self._all_in_parts |= set(places)
        self.in_parts = {i for i, at in enumerate(self._at) if at in self._all_in_parts}

    def norm(
        self,
        parts: Iterable[torch.Tensor],
        shards: Sequence[dist.ProcessGroup] = (),
        stages: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Of gradients, real numbers of (n,) each. `shards`: groups of ranks that share
        parameters; `stages`: ranks that have other ones."""
        numel = sum(p.numel() for p in self.parameters)
        if stages is not None:
            every = torch.tensor(numel, device=self.device)
            dist.all_reduce(every, group=stages)
            numel = int(every)
        there = [*shards, *([] if stages is None else [stages])]

        def over(op: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor], None]:
            def all_reduce(t: torch.Tensor) -> None:
                for group in there:
                    dist.all_reduce(t, op=op, group=group)

            return all_reduce

        return exact_norm(
            parts, numel, self.device, over(dist.ReduceOp.MAX), over(dist.ReduceOp.SUM)
        )

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
            divide_into(out, total, weight, self.scales.shift(self._at[i]), self.scratch)

    def applied(self) -> None:
        """The gradients of this step have been made."""
        if self.verdict is RoundingVerdict.GOOD:
            self.scales.advance(self._found)

    def state_dict(self) -> dict[str, Any]:
        parts = {"in_parts": sorted(self._all_in_parts)} if self._all_in_parts else {}
        return {"word": self.word, "exponents": list(self.scales.exponents), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["word"] != self.word or len(state["exponents"]) != len(self.scales.exponents):
            raise BadInput(
                f"the snapshot's sums have {state['word']} bits and {len(state['exponents'])} "
                f"parameters, this script's {self.word} and "
                f"{len(self.scales.exponents)}; resume with the same model and the same reduce="
            )
        self.scales.exponents = list(state["exponents"])
        self._all_in_parts = set()
        self._come_in_parts(state.get("in_parts", ()))
