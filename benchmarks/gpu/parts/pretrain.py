"""Tokens per second and MFU of the reference trainer under a session, beside the same model, data
and optimizer in plain PyTorch.

Both train in this process, in turns of a few steps. A step is one micro-batch, so that what the
session does per step weighs most.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset

import harness
from benchmarks.gpu.bench import ROOT, Bench
from harness.core.facts import StepDone
from harness.core.hardware import peak_flops

PLAIN = "plain PyTorch"
SEQ, VOCAB = 1024, 256
CLIP, TOTAL = 1.0, 100_000
WARM_STEPS = 4  # compiles; the session measures the model's precision in the first
LEAST_BLOCKS = 2
AGREES = 0.05  # share by which the session's own figures may differ from the clock's
TINY_PEAK = 1e12  # of a CPU, so that there is an MFU
SMALL = 4  # layers of the tiny model


@dataclass(frozen=True)
class Case:
    """`steps`: of a turn. `wanted_s`: begin it only with so much time left."""

    size: str
    micro_batch: int
    steps: int
    wanted_s: float


CASES = (
    Case("124m", 32, 10, 40.0),
    Case("350m", 16, 8, 40.0),
    Case("1b", 8, 8, 40.0),
)
TINY = (Case("1m", 2, 3, 5.0),)
BLOCKS = 4  # turns of each


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random bytes in memory, in windows of `seq` tokens and those one later."""

    def __init__(self, count: int, seq: int):
        self.count, self.seq = count, seq
        g = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCAB, (count * seq + 1,), generator=g)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        at = self.tokens[i * self.seq : (i + 1) * self.seq + 1]
        return at[:-1], at[1:]

    @property
    def fingerprint(self) -> str:
        return f"random:{self.count}:{self.seq}"


class Models:
    """Makes both models alike, as `examples/pretrain.py` does."""

    def __init__(self, bench: Bench, case: Case, run: Any, compiled: bool):
        import pretrain  # of examples

        self.compiled = compiled
        self.bench, self.case, self.run, self.reference = bench, case, run, pretrain
        self.seq = 32 if bench.tiny else SEQ
        # compiled below, so that the miniature needs no compiler of C
        self.flags = pretrain.Flags(
            size=case.size,
            layers=SMALL if bench.tiny else None,
            dim=32 if bench.tiny else None,
            heads=2 if bench.tiny else None,
            seq=self.seq,
            dtype="bf16",
            eval_every=0,
        )

    def make(self, code: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer, Any, float]:
        """Return a model, its optimizer, its scheduler and FLOPs of a token. `code`: the module of
        the model; what is compiled belongs to its functions."""
        torch.manual_seed(0)
        with (
            mock.patch.object(self.reference, "GPT", code.GPT),
            torch.device(self.bench.device),
        ):
            model, _, flops = self.reference.build(self.flags, self.run)
        for block in model.blocks if self.compiled else ():
            block.compile(**({"backend": "eager"} if self.bench.tiny else {}))
        optimizer = torch.optim.AdamW(
            code.decay_groups(model, self.flags.weight_decay),
            lr=self.reference.LEARNING_RATES[self.case.size],
            betas=(0.9, 0.95),
            fused=not self.bench.tiny,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            functools.partial(self.reference.schedule, warmup=20, total=TOTAL),
        )
        return model, optimizer, scheduler, flops

    @property
    def graphs(self) -> int:
        """Number of graphs that dynamo has made in this process."""
        return int(counters["stats"]["unique_graphs"])


def own_code() -> ModuleType:
    """Return the module of the examples' GPT with functions of its own, so that what one side
    compiles, or fails to, does not serve the other."""
    spec = importlib.util.spec_from_file_location("own_gpt", ROOT / "examples" / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_gpt"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


class Session:
    """Steps under the session, by its own generator."""

    def __init__(self, models: Models, data: Tokens):
        self.run, self.loss_of = models.run, models.reference.loss_of
        self.facts = list[StepDone]()
        record = self.run.journal.record

        def noted(fact: Any) -> None:
            if isinstance(fact, StepDone):
                self.facts.append(fact)
            record(fact)

        self.run.journal.record = noted
        self.model, optimizer, scheduler, flops = models.make(own_code())
        self.flops_per_token = flops
        self.run.prepare(self.model, optimizer, scheduler)
        micro = models.case.micro_batch
        self.steps = self.run.steps(
            data,
            total=TOTAL,
            global_batch=micro,
            micro_batch=micro,
            tokens_per_sample=data.seq,
            flops_per_sample=flops * data.seq,
        )

    def go(self, count: int) -> None:
        for _ in range(count):
            step = next(self.steps)
            for x, y in step:
                step.backward(self.loss_of(self.model, x, y))
            step.update(clip_norm=CLIP)
        self.newest = step

    @property
    def loss(self) -> float:
        return float(self.newest.loss)

    def close(self) -> None:
        self.steps.close()


class Plain:
    """The same steps as people write them without us."""

    def __init__(self, models: Models, data: Tokens):
        self.device, self.loss_of = models.bench.device, models.reference.loss_of
        self.model, self.optimizer, self.scheduler, _ = models.make(own_code())
        self.model.train()
        self.loader = DataLoader(
            data,
            batch_size=models.case.micro_batch,
            shuffle=True,
            drop_last=True,
            pin_memory=not models.bench.tiny,
        )
        self.batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def go(self, count: int) -> None:
        for _ in range(count):
            x, y = (t.to(self.device, non_blocking=True) for t in next(self.batches))
            loss = self.loss_of(self.model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.newest = loss

    @property
    def loss(self) -> float:
        return float(self.newest.detach())


def measure(bench: Bench, case: Case, compiled: bool) -> None:
    torch._dynamo.reset()
    run = harness.attach(seed=0, peak_flops=TINY_PEAK if bench.tiny else None)
    models = Models(bench, case, run, compiled)
    data = Tokens(64 if bench.tiny else 4096, models.seq)
    took_s, graphs = dict[str, float](), dict[str, int]()
    # plain first: what it compiles is in inductor's cache when the session compiles the same
    sides: dict[str, Any] = {}
    for name, make in ((PLAIN, Plain), ("session", Session)):
        before, t0 = models.graphs, time.monotonic()
        sides[name] = make(models, data)
        sides[name].go(WARM_STEPS)
        bench.settle()
        took_s[name], graphs[name] = time.monotonic() - t0, models.graphs - before
    say_begun(bench, case, sides, took_s, graphs if compiled else {})
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    own = list[StepDone]()
    names = ["session", PLAIN]
    for i in range(LEAST_BLOCKS if bench.tiny else BLOCKS):
        if i >= LEAST_BLOCKS and bench.left_s < 3 * sum(s[-1] for s in seconds.values()) + 3:
            break
        for name in names[:: -1 if i % 2 else 1]:  # which is first changes from turn to turn
            seen = len(sides["session"].facts)
            seconds[name].append(bench.seconds(lambda: sides[name].go(case.steps)))  # noqa: B023
            own += sides["session"].facts[seen:]
    show(bench, case, models, sides["session"], seconds, own)
    sides["session"].close()


def say_begun(
    bench: Bench,
    case: Case,
    sides: dict[str, Any],
    took_s: dict[str, float],
    graphs: dict[str, int],
) -> None:
    """Write what the first steps took, and whether the session's model is compiled as the plain one
    is. `graphs`: those that dynamo made; {}: nothing is compiled."""
    if graphs:
        bench.checked(
            f"{case.size}: the session's blocks are compiled no more often than plain PyTorch's",
            0 < graphs["session"] <= graphs[PLAIN],
            f"{graphs['session']} graphs, plain {graphs[PLAIN]}",
        )
    what = f"{case.size}: first {WARM_STEPS} steps, with making and compiling the model"
    note = "the session comes second and finds the compiler's cache"
    bench.measured(what, took_s["session"], "s", PLAIN, took_s[PLAIN], note)
    losses = {name: side.loss for name, side in sides.items()}
    near = abs(losses["session"] - losses[PLAIN]) < 0.5  # other samples of the same random text
    bench.checked(
        f"{case.size}: the losses of both after {WARM_STEPS} steps are alike",
        all(map(math.isfinite, losses.values())) and near,
        f"{losses['session']:.3f}, plain {losses[PLAIN]:.3f}",
    )


def show(
    bench: Bench,
    case: Case,
    models: Models,
    session: Session,
    seconds: dict[str, list[float]],
    own: list[StepDone],
) -> None:
    step_tokens = case.micro_batch * models.seq
    tokens = case.steps * step_tokens
    speed = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    ratios = [p / o for o, p in zip(seconds["session"], seconds[PLAIN], strict=True)]
    compiled = "" if models.compiled else ", NOT COMPILED"
    note = (
        f"bf16{compiled}, {case.micro_batch} x {models.seq} tokens a step; {len(ratios)} turns of "
        f"{case.steps} steps, ratio of turns {statistics.median(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f})"
    )
    bench.measured(
        f"{case.size}: tokens per second", speed["session"], "tokens/s", PLAIN, speed[PLAIN], note
    )
    name = "CPU" if bench.tiny else torch.cuda.get_device_name(bench.device)
    peak = TINY_PEAK if bench.tiny else peak_flops(name, "bfloat16")
    if peak is None:
        bench.missing(f"{case.size}: MFU", f"peaks.csv does not know {name!r}")
    else:
        mfu = {key: 100 * of * session.flops_per_token / peak for key, of in speed.items()}
        note = f"of {peak / 1e12:.0f} TFLOP/s (bf16, dense) of {name}"
        bench.measured(f"{case.size}: MFU", mfu["session"], "%", PLAIN, mfu[PLAIN], note)
    if not own:
        bench.checked(f"{case.size}: the session tells its steps", False, "it told none")
        return
    told = statistics.median(fact.tokens / fact.seconds for fact in own)
    what, clock = "tokens per second that the session tells", "by the clock"
    bench.measured(f"{case.size}: {what}", told, "tokens/s", clock, speed["session"])
    apart = 2.0 if bench.tiny else AGREES  # processors are shared
    bench.checked(
        f"{case.size}: the session's tokens per second are the clock's within {apart:.0%}",
        abs(told / speed["session"] - 1) <= apart,
        f"{told / speed['session']:.3f}",
    )
    shares = [100 * fact.mfu for fact in own if fact.mfu is not None]
    if peak is not None:
        share, wanted = statistics.median(shares) if shares else math.nan, told
        wanted *= 100 * session.flops_per_token / peak
        bench.checked(
            f"{case.size}: the session's MFU is that of its tokens per second and peaks.csv",
            abs(share / wanted - 1) <= AGREES,
            f"{share:.1f} %, wanted {wanted:.1f} %",
        )


def tried(do: Callable[[], None]) -> str:
    """Return the error's first line; "": none."""
    try:
        do()
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}".splitlines()[0][:300]
    return ""


def clear(bench: Bench) -> None:
    gc.collect()
    if not bench.tiny:
        torch.cuda.empty_cache()


def run(bench: Bench) -> None:
    if bench.tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(bench.device)
    for case in TINY if bench.tiny else CASES:
        if bench.left_s < case.wanted_s:
            why = f"the part had {bench.left_s:.0f} s left, wanted {case.wanted_s:.0f}"
            bench.missing(f"{case.size}: tokens per second", why)
            continue
        why = tried(functools.partial(measure, bench, case, True))
        clear(bench)
        if not why:
            continue
        bench.checked(f"{case.size}: trains with compiled blocks", False, why)
        if bench.left_s < case.wanted_s / 2:
            continue
        # without a compiler of C there are figures all the same
        if again := tried(functools.partial(measure, bench, case, False)):
            bench.checked(f"{case.size}: trains without compiled blocks", False, again)
        clear(bench)
