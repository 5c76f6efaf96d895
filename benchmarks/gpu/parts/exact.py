"""The exact reduction of gradients on the device is the CPU's, integer by integer; and fingerprints
of tensors on the device are what plain arithmetic gives.

Gradients are given, not computed, so that the CPU and the device sum the same ones. Ranks are
several strategies in this process; what their all-reduce would do is done by `World.exchange`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.bench import Bench
from harness.worker.gradients import fixed_point
from harness.worker.gradients.exact_sums import exact_strategy_for
from harness.worker.gradients.fixed_point import INTEGERS, WORDS, RoundingVerdict
from storage.tensors import dcp

MICRO_BATCHES = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# who does which micro-batch, in which order
SHARES = (
    ((5, 3, 1, 0, 2, 4),),
    ((4, 0, 2), (1, 5, 3)),
    ((3,), (0, 1, 2), (5, 4)),
    ((2,), (1, 4), (0,), (5,), (3,)),
)
Gradients = list[torch.Tensor]


def run(bench: Bench) -> None:
    if bench.tiny:
        torch.set_num_threads(1)
    f = 1 << 10 if bench.tiny else 1 << 20
    small = [(), (1,), (7,), (33, 129), (-51, 301), (16, 8, -3, 3), (1000,)]
    # of many blocks, and at odd places behind small ones
    large = [*small, (f - 1,), (f,), (5,), (f + 1,), (3 * f + 17,)]
    bench.attempt("fingerprints", fingerprints)
    _compare(bench, "small gradients", small, ("fp32", "exact"))
    bench.attempt("what is not finite: small gradients", lambda b: not_finite(b, small))
    bench.attempt("overflows: small gradients", lambda b: overflows(b, small))
    there = compiled(bench)
    bench.attempt("the device's way to round", lambda b: rounding(b, large))
    what = "small and large gradients" if there else "gradients in single steps"
    kinds = [("fp32", "exact"), ("bf16", "exact32"), ("fp16", "exact")]
    if not bench.tiny:
        kinds += [("fp32", "exact32"), ("bf16", "exact"), ("fp16", "exact32")]
    for kind in kinds:
        _compare(bench, what, large, kind)
    bench.attempt("what is not finite", lambda b: not_finite(b, [(7,), (f + 1,), (3,)]))
    bench.attempt("overflows", lambda b: overflows(b, [(7,), (f + 1,), (3,)]))
    bench.attempt("a real model", real_model)
    bench.attempt("norms", norms)
    bench.attempt("weights of a division", weights)
    bench.attempt("a parameter without elements", no_elements)
    if not bench.tiny:  # more than a bucket holds
        _compare(bench, "a gradient of its own bucket", [(7,), (7_000_001,), (3,)], kinds[0], 9)
    if there:
        bench.attempt("seconds of the kernels", speed)


def _compare(
    bench: Bench,
    what: str,
    shapes: Sequence[tuple[int, ...]],
    kind: tuple[str, str],
    wanted_s: float = 4.0,
) -> None:
    name = f"{what}, {' '.join(kind)}"
    if bench.left_s < wanted_s:
        bench.missing(name, f"{bench.left_s:.0f} s were left")
        return
    bench.attempt(name, lambda b: sums(b, name, shapes, *kind))


# ---- ranks in one process ------------------------------------------------------------------------
class Given(nn.Module):
    """A model whose gradients are given. A negative size: dimensions lie in memory in reverse."""

    def __init__(
        self, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.all = nn.ParameterList(
            nn.Parameter(laid_out(shape, torch.zeros, dtype=dtype, device=device))
            for shape in shapes
        )

    def backward(self, grads: Gradients) -> None:
        torch.autograd.backward(list(self.all), [g.clone() for g in grads])


def laid_out(
    shape: tuple[int, ...], make: Callable[..., torch.Tensor], **how: Any
) -> torch.Tensor:
    sizes = tuple(map(abs, shape))
    if sizes == shape:
        return make(sizes, **how)
    return make(sizes[::-1], **how).permute(*reversed(range(len(sizes))))


@dataclass
class Found:
    """What a step makes of the gradients; all on the CPU."""

    times: int
    verdict: RoundingVerdict | None
    integers: Gradients
    grads: Gradients
    norm: torch.Tensor
    exponents: list[int | None]

    def unlike(self, other: Found) -> str:
        """Return what differs; "": nothing."""
        for what in ("times", "verdict", "exponents"):
            if getattr(self, what) != getattr(other, what):
                return f"{what}: {getattr(self, what)} and {getattr(other, what)}"[:300]
        for what in ("integers", "grads"):
            for i, (a, b) in enumerate(zip(getattr(self, what), getattr(other, what), strict=True)):
                if not same(a, b):
                    return f"{what} of parameter {i} {tuple(a.shape)}, {differing(a, b)}"
        if not same(self.norm, other.norm):
            return f"norm: {float(self.norm)} and {float(other.norm)}"
        return ""


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(BITS[t.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether they are the same to the bit (but for which NaN a NaN is)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and bool(a.isnan().any()):
        nan = a.isnan()
        return torch.equal(nan, b.isnan()) and same(a[~nan], b[~nan])
    return torch.equal(bits(a), bits(b))


def differing(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    at = (bits(a) != bits(b)).nonzero().view(-1)
    first = int(at[0])
    one, other = a.contiguous().view(-1)[first].item(), b.contiguous().view(-1)[first].item()
    return f"{len(at)} of {a.numel()} elements differ, the first at {first}: {one!r} and {other!r}"


class World:
    """So many ranks in this process, each with its own copy of the model."""

    def __init__(
        self,
        ranks: int,
        reduce: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.device = device
        self.models = [Given(shapes, dtype, device) for _ in range(ranks)]
        self.strategies = [exact_strategy_for(model, reduce) for model in self.models]
        for strategy in self.strategies:
            strategy.start(MICRO_BATCHES)
            strategy.zero()

    def step(
        self, shares: Sequence[Sequence[int]], micros: list[Gradients], weight: float | torch.Tensor
    ) -> Found:
        times = 0
        while True:
            times += 1
            for model, strategy, share in zip(self.models, self.strategies, shares, strict=True):
                for n, m in enumerate(share):
                    strategy.micro(last=n == len(share) - 1)
                    model.backward(micros[m])
                    strategy.micro_done()
            self.exchange()
            repeats = {strategy.again() for strategy in self.strategies}
            assert len(repeats) == 1, "ranks disagree about the step"
            if not repeats.pop():
                break
        every = [self._ended(times, strategy, weight) for strategy in self.strategies]
        for other in every[1:]:
            assert not (unlike := every[0].unlike(other)), f"ranks differ: {unlike}"
        return every[0]

    def _ended(self, times: int, strategy: Any, weight: float | torch.Tensor) -> Found:
        counting = strategy.counting
        integers = [total.to("cpu", copy=True) for total in strategy._totals]
        verdict = counting.verdict
        strategy.reduce()
        if isinstance(weight, torch.Tensor):
            weight = weight.to(self.device)
        strategy.divide(weight)
        norm = strategy.norm().cpu()
        grads = [p.grad.to("cpu", copy=True) for p in strategy.parameters]
        strategy.zero()
        return Found(times, verdict, integers, grads, norm, list(counting.scales.exponents))

    def exchange(self) -> None:
        """Give every rank the greatest peaks and the sums of all ranks' integers."""
        if len(self.strategies) == 1:
            return
        peaks = torch.stack([s.counting._peaks for s in self.strategies]).amax(0)
        buckets = zip(*(s._sums for s in self.strategies), strict=True)
        totals = [torch.stack(bucket).sum(0, dtype=bucket[0].dtype) for bucket in buckets]
        for strategy in self.strategies:
            strategy.counting._peaks.copy_(peaks)
            for mine, total in zip(strategy._sums, totals, strict=True):
                mine.copy_(total)


def gradients(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int, factor: float = 1.0
) -> Gradients:
    """Gradients of one micro-batch, on the CPU: magnitudes over 40 binary digits; zeros, negative
    zeros and denormals among them; parameters of only denormals, and of only zeros."""
    generator = torch.Generator().manual_seed(seed)
    least = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[dtype]
    low = dtype is torch.float16
    # by parameter, in turns; 0.0: only denormals
    sizes = (1.0, 2.0**-9 if low else 2.0**-100, 2.0**7, 0.0, 2.0**-6 if low else 2.0**-30)
    made: Gradients = []
    for i, shape in enumerate(shapes):
        numel = math.prod(abs(n) for n in shape)
        g = torch.randn(numel, generator=generator)
        if (size := sizes[i % len(sizes)]) == 0.0:
            g = (g * 40).round_() * least
        else:
            g *= torch.exp2(-40 * torch.rand(numel, generator=generator)) * size * factor
            g[2::11] = 3 * least
        g[0 if numel > 1 else 1 :: 7] = 0.0
        g[1::7] = -0.0
        if i % 6 == 5:
            g.zero_()
        flat = g.to(dtype)
        made.append(laid_out(shape, lambda sizes, flat=flat: flat.view(sizes)))
    return made


def on(device: torch.device, micros: list[Gradients]) -> list[Gradients]:
    """Return them on the device, laid out alike."""
    return [[g.to(device) for g in grads] for grads in micros]


# ---- checks --------------------------------------------------------------------------------------
def sums(
    bench: Bench, name: str, shapes: Sequence[tuple[int, ...]], dtype_name: str, reduce: str
) -> None:
    """Two steps: units are guessed in the first and known in the second, which also is the first
    of 32 bits."""
    dtype = DTYPES[dtype_name]
    micros = [gradients(shapes, dtype, seed) for seed in range(MICRO_BATCHES)]
    there = on(bench.device, micros)
    order = (tuple(range(MICRO_BATCHES)),)
    # no power of two as a tensor; as a number, torch multiplies by its reciprocal on a GPU
    divisors = (torch.tensor(24.0, dtype=torch.float64), 16.0)
    host = World(1, reduce, shapes, dtype, torch.device("cpu"))
    wanted = [host.step(order, micros, d) for d in divisors]
    world = World(1, reduce, shapes, dtype, bench.device)
    found = [world.step(order, there, d) for d in divisors]
    unlike = [f.unlike(w) for f, w in zip(found, wanted, strict=True)]
    words = [str(f.integers[0].dtype).removeprefix("torch.") for f in found]
    elements = sum(g.numel() for g in micros[0])
    note = f"{elements} elements, {MICRO_BATCHES} micro-batches, {found[0].times} + "
    note += f"{found[1].times} passes, {words[0]} then {words[1]}, norm {float(found[1].norm):.6g}"
    # a first step that is done again is done again in the run's own words
    right = words[1] == f"int{WORDS[reduce]}" and (words[0] == "int64" or found[0].times > 1)
    bench.checked(
        f"{name}: integers, gradients, units and norm of the device are the CPU's",
        right and not any(unlike),
        "; ".join(filter(None, unlike)) or note,
    )
    unlike = []
    for shares in SHARES:
        world = World(len(shares), reduce, shapes, dtype, bench.device)
        for w, d in zip(found, divisors, strict=True):
            if said := world.step(shares, there, d).unlike(w):
                unlike.append(f"{len(shares)} groups: {said}")
    bench.checked(
        f"{name}: 1, 2, 3 and 5 groups in other orders end with the same bits",
        not unlike,
        "; ".join(unlike)[:500],
    )


def rounding(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> None:
    """The function that GPUs use, against the one that CPUs use, with units of all kinds."""
    sizes = [math.prod(abs(n) for n in shape) for shape in shapes]
    generator = torch.Generator().manual_seed(1)
    shifts = [(40, 3, 141, 149, 0, 20, 126, 127)[i % 8] for i in range(len(sizes))]
    for word in INTEGERS.values():
        grads = [
            torch.randn(n, generator=generator) * 2.0 ** (10 - shift)
            for n, shift in zip(sizes, shifts, strict=True)
        ]
        wanted, scratch = torch.zeros(sum(sizes), dtype=word), fixed_point.Scratch()
        found = torch.zeros(sum(sizes) + 1, dtype=word, device=bench.device)[1:]
        peaks = [
            fixed_point.add_rounded([g], [shift], part, scratch)[0]
            for g, shift, part in zip(grads, shifts, wanted.split(sizes), strict=True)
        ]
        with torch.no_grad():  # as in a hook of autograd's
            there = torch.zeros(len(sizes), dtype=torch.float64, device=bench.device)
            fixed_point.add_rounded_together(
                [g.to(bench.device) for g in grads], shifts, found, there, tuple(range(len(sizes)))
            )
        unlike = "" if same(found.cpu(), wanted) else differing(found.cpu(), wanted)
        if there.tolist() != peaks:
            unlike += f" peaks {there.tolist()} and {peaks}"
        bench.checked(
            f"the device's way to round is the CPU's, {word}".replace("torch.", ""),
            not unlike,
            unlike[:400] or f"{sum(sizes)} elements of {len(sizes)} gradients",
        )


def compiled(bench: Bench) -> bool:
    """Compile the kernels, and write what that takes."""
    t0 = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernels = fixed_point.gpu_kernels(bench.device)
    if kernels is None:
        why = next((str(w.message) for w in seen if "exact sums" in str(w.message)), "on a CPU")
        bench.missing("the kernels of a GPU", why[:400].replace("\n", " "))
        return False
    bench.measured("compiling the kernels for both words", time.perf_counter() - t0, "s")
    return True


def not_finite(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> None:
    """One bad element anywhere: the step is BAD, all gradients are NaN, and no unit changes."""
    wrong, count = [], 0
    for reduce in WORDS:
        worlds = [
            World(1, reduce, shapes, torch.float32, device)
            for device in (torch.device("cpu"), bench.device)
        ]
        micros = [gradients(shapes, torch.float32, seed) for seed in range(MICRO_BATCHES)]
        order = (tuple(range(MICRO_BATCHES)),)
        before = [world.step(order, on(world.device, micros), 8.0).exponents for world in worlds]
        for k, bad in enumerate((math.nan, math.inf, -math.inf)):
            i = sorted(range(len(shapes)), key=lambda i: -math.prod(map(abs, shapes[i])))[k % 2]
            spoiled = [[g.clone() for g in grads] for grads in micros]
            flat = spoiled[k][i].view(-1) if spoiled[k][i].is_contiguous() else spoiled[k][i][0]
            flat[(0, len(flat) // 2, -1)[k]] = bad
            host, found = (world.step(order, on(world.device, spoiled), 8.0) for world in worlds)
            count += 1
            for f, exponents in zip((host, found), before, strict=True):
                if (
                    f.verdict is not RoundingVerdict.BAD
                    or f.exponents != exponents
                    or not all(bool(g.isnan().all()) for g in f.grads)
                    or not math.isnan(float(f.norm))
                    or f.times != 1
                ):
                    wrong.append(f"{bad} in parameter {i}: {f.verdict}, {f.times} times")
            after = [world.step(order, on(world.device, micros), 8.0) for world in worlds]
            if unlike := after[1].unlike(after[0]):
                wrong.append(f"the step after {bad}: {unlike}")
    bench.checked(
        f"NaN and infinity spoil the whole step on the device as on the CPU, {len(shapes)} "
        f"parameters, largest of {max(math.prod(map(abs, s)) for s in shapes)}",
        not wrong,
        "; ".join(wrong)[:500] or f"{count} steps",
    )


def overflows(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> None:
    """Steps that must be repeated: a first unit that is too small or too coarse, and a spike."""
    wrong, times = [], []
    order = (tuple(range(MICRO_BATCHES)),)
    for reduce in WORDS:
        for factors in ((1.0, 2.0**20, 1.0), (2.0**22, 1.0), (2.0**-30, 2.0**-35)):
            worlds = [
                World(1, reduce, shapes, torch.float32, device)
                for device in (torch.device("cpu"), bench.device)
            ]
            repeated = False
            for factor in factors:
                micros = [
                    gradients(shapes, torch.float32, seed, factor) for seed in range(MICRO_BATCHES)
                ]
                host, found = (world.step(order, on(world.device, micros), 8.0) for world in worlds)
                times.append(found.times)
                repeated |= found.times > 1
                if unlike := found.unlike(host):
                    wrong.append(f"{reduce}, factor {factor}: {unlike}")
            if not repeated:
                wrong.append(f"{reduce}, factors {factors}: no step was repeated")
    bench.checked(
        f"what does not fit is done again on the device as on the CPU, {len(shapes)} parameters, "
        f"largest of {max(math.prod(map(abs, s)) for s in shapes)}",
        not wrong,
        "; ".join(wrong)[:500] or f"passes of each step: {times}",
    )


def real_model(bench: Bench) -> None:
    """Gradients that a model computes on the device in bf16, caught on their way and given to the
    CPU."""
    torch.manual_seed(0)
    rows, width = (64, 16) if bench.tiny else (4096, 128)
    device = bench.device
    model = nn.Sequential(
        nn.Embedding(rows, width),
        nn.Linear(width, 3 * width),
        nn.GELU(),
        nn.Linear(3 * width, rows),
    ).to(device)
    strategy = exact_strategy_for(model, "exact")
    strategy.start(MICRO_BATCHES)
    strategy.zero()
    parameters = list(model.parameters())
    caught: list[dict[int, torch.Tensor]] = []
    for i, p in enumerate(parameters):
        p.register_hook(lambda g, i=i: caught[-1].__setitem__(i, g.detach().clone()))
    for m in range(MICRO_BATCHES):
        caught.append({})
        strategy.micro(last=m == MICRO_BATCHES - 1)
        x = torch.randint(rows, (8, 33), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x[:, :-1])
        nn.functional.cross_entropy(
            logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum"
        ).backward()
        strategy.micro_done()
    assert not strategy.again(), "the first step's units did not fit"
    integers = [total.to("cpu", copy=True) for total in strategy._totals]
    strategy.reduce()
    strategy.divide(256.0)
    norm, grads = strategy.norm().cpu(), [p.grad.to("cpu", copy=True) for p in parameters]
    shapes = [tuple(p.shape) for p in parameters]
    host = World(1, "exact", shapes, torch.float32, torch.device("cpu"))
    micros = [[one[i].cpu() for i in range(len(parameters))] for one in caught]
    wanted = host.step((tuple(range(MICRO_BATCHES)),), micros, 256.0)
    unlike = Found(
        1,
        strategy.counting.verdict,
        integers,
        grads,
        norm,
        list(strategy.counting.scales.exponents),
    ).unlike(wanted)
    bench.checked(
        "gradients of a bf16 model with a large embedding, summed on the device as on the CPU",
        not unlike,
        unlike or f"{sum(g.numel() for g in grads)} elements, norm {float(norm):.6g}",
    )


def norms(bench: Bench) -> None:
    """The norm of the same numbers, in other cuts, on the device and on the CPU."""
    n = 30_001 if bench.tiny else (1 << 24) + 3  # more than one piece of the device's
    generator = torch.Generator().manual_seed(4)
    wrong, count = [], 0
    for exponent in (0, -130, 100):
        x = torch.randn(n, generator=generator) * 2.0**exponent
        there = x.to(bench.device)
        wanted = fixed_point.exact_norm([x], n, x.device)
        for parts in ([there], list(there.tensor_split(7)), [there.flip(0)]):
            count += 1
            found = fixed_point.exact_norm(parts, n, bench.device)
            if not same(found.cpu(), wanted):
                wrong.append(f"2**{exponent}, {len(parts)} parts: {float(found)}, {float(wanted)}")
    bench.checked(
        f"the norm of {n} numbers is the CPU's, in any cut",
        not wrong,
        "; ".join(wrong)[:300] or f"{count} cuts and scales",
    )


def weights(bench: Bench) -> None:
    """Division by a weight that is no power of two, as a number and as a tensor."""
    n = 10_000 if bench.tiny else 8_000_000
    generator = torch.Generator().manual_seed(5)
    total = torch.randint(-(1 << 52), 1 << 52, (n,), generator=generator)
    there, scratch, shift = total.to(bench.device), fixed_point.Scratch(), 40
    for what, weight in (("number", 24.0), ("tensor", torch.tensor(24.0, dtype=torch.float64))):
        wanted, found = torch.empty(n), torch.empty(n, device=bench.device)
        fixed_point.divide_into(wanted, total, weight, shift, scratch)
        moved = weight if isinstance(weight, float) else weight.to(bench.device)
        fixed_point.division([found], [there], [shift])(moved)
        differ = int((bits(found.cpu()) != bits(wanted)).sum())
        bench.checked(
            f"divided by a weight in a {what}, every gradient is the CPU's",
            differ == 0,
            f"{differ} of {n} differ",
        )


def no_elements(bench: Bench) -> None:
    shapes = [(3,), (0, 4), (2, 2)]
    micros = [gradients(shapes, torch.float32, seed) for seed in range(MICRO_BATCHES)]
    order = (tuple(range(MICRO_BATCHES)),)
    host = World(1, "exact", shapes, torch.float32, torch.device("cpu")).step(order, micros, 8.0)
    world = World(1, "exact", shapes, torch.float32, bench.device)
    unlike = world.step(order, on(bench.device, micros), 8.0).unlike(host)
    total = torch.zeros(3, dtype=torch.int64, device=bench.device)
    some = [torch.ones(3, device=bench.device), torch.ones(0, device=bench.device)]
    told = torch.zeros(2, dtype=torch.float64, device=bench.device)
    fixed_point.add_rounded_together(some, [3, 3], total, told, (0, 1))
    if (peaks := told.tolist()) != [1.0, 0.0]:
        unlike += f" peaks {peaks}"
    bench.checked("a model with a parameter without elements", not unlike, unlike)


def speed(bench: Bench) -> None:
    """A rough figure, since other parts share the GPU: one pass beside single steps."""
    n = 1 << 26
    grad = torch.randn(n, device=bench.device)
    total = torch.zeros(n, dtype=torch.int64, device=bench.device)
    peaks = torch.zeros(1, dtype=torch.float64, device=bench.device)

    def add() -> None:
        with torch.no_grad():
            fixed_point.add_rounded_together([grad], [40], total, peaks, (0,))

    def steps() -> None:
        with torch.no_grad():
            fixed_point._add_in_steps([grad], [40], total)

    taken = bench.in_turns({"one pass": add, "steps": steps}, 3)
    bench.measured(
        f"rounding and adding one gradient of {n} elements",
        1e3 * taken["one pass"],
        "ms",
        "single steps",
        1e3 * taken["steps"],
        "other parts share the GPU",
    )


# ---- fingerprints --------------------------------------------------------------------------------
ODD = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def expected(raw: bytes) -> str:
    """The fingerprint of bytes, by Python's integers if there are few, else by numpy's."""
    whole = len(raw) // 4 * 4
    words, rest = np.frombuffer(raw[:whole], "<i4"), np.frombuffer(raw[whole:], np.uint8)
    numbers = np.concatenate([words.astype(np.int64), rest.astype(np.int64)])
    if len(numbers) <= 5000:
        total = 0
        for i, number in enumerate(numbers.tolist()):
            place = (i + 1) * ODD & MASK
            signed = place - (1 << 64) if place >> 63 else place
            total += ((signed ^ (signed >> 29)) | 1) * number
    else:
        place = np.arange(1, len(numbers) + 1, dtype=np.int64) * np.int64(ODD - (1 << 64))
        total = int((((place ^ (place >> 29)) | 1) * numbers).sum())
    return f"{total & MASK:016x}"


def fingerprint(tensor: torch.Tensor) -> str:
    """The product's; without a GPU, the same by the function that it uses on a GPU."""
    if tensor.is_cuda or not tensor.numel():
        return dcp.fingerprint(tensor)
    return f"{int(dcp.weighted(tensor.contiguous().view(-1).view(torch.uint8))) & MASK:016x}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fingerprints(bench: Bench) -> None:
    chunk = 1000 if bench.tiny else dcp.CHUNK
    generator = torch.Generator().manual_seed(9)

    def some(n: int) -> torch.Tensor:
        return torch.randint(256, (n,), dtype=torch.uint8, generator=generator).to(bench.device)

    with patch.object(dcp, "CHUNK", chunk):
        matrix = some(4 * 999 * 77).view(torch.float32).view(999, 77)
        cases = {
            "floats": matrix,
            "turned": matrix.t(),
            "cut": matrix[5:, 3:9],
            "bf16": matrix.to(torch.bfloat16),
            "int64": torch.arange(-50, 5000, device=bench.device),
            "0-d": torch.tensor(-0.0, device=bench.device),
            "bytes": some(4001),
            **{f"{n} bytes": some(n) for n in (1, 3, 4, 5)},
            **{f"a chunk {k:+d} words": some(4 * (chunk + k)) for k in (-1, 0, 1)},
            "two chunks and 3 bytes": some(8 * chunk + 3),
        }
        wrong = [name for name, t in cases.items() if fingerprint(t) != expected(bytes_of(t))]
        bench.checked(
            "fingerprints on the device are what plain integers give",
            not wrong and fingerprint(matrix[:0]) == "empty",
            ", ".join(wrong) or f"{len(cases)} tensors",
        )
        wrong = [name for name, t in cases.items() if fingerprint(t.clone()) != fingerprint(t)]
        bench.checked("equal bytes have equal fingerprints", not wrong, ", ".join(wrong))
        large = cases["two chunks and 3 bytes"]
        before, seen = fingerprint(large), []
        places = (0, 1, 4 * chunk - 1, 4 * chunk, 8 * chunk - 1, 8 * chunk, len(large) - 1)
        for at in places:
            for bit in (0, 7):
                flipped = large.clone()
                flipped[at] ^= 1 << bit
                seen.append(fingerprint(flipped))
        bench.checked(
            "one flipped bit is seen",
            before not in seen and len(set(seen)) == len(seen),
            f"{len(seen)} flips, also at the ends of chunks",
        )
        with patch.object(dcp, "CHUNK", 777):
            again = fingerprint(large[: 4 * 5000].clone())
        with patch.object(dcp, "CHUNK", 5000):
            other = fingerprint(large[: 4 * 5000].clone())
        whole = fingerprint(large[: 4 * 5000].clone())
        bench.checked("the size of a chunk does not matter", again == other == whole)
        what = "a tensor at an odd address has the fingerprint of its bytes"
        odd = matrix.to(torch.bfloat16).view(-1)[1:]
        try:
            bench.checked(what, fingerprint(odd) == expected(bytes_of(odd)), "bf16, from element 1")
        except RuntimeError as e:
            bench.checked(what, False, f"{e}"[:200])
