"""Exact sums: the integer core against fractions, and the same bits from real worlds that
differ in everything they may differ in."""

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.core.world import BadInput, HarnessError
from harness.worker.gradients import exact_sums, fixed_point
from harness.worker.gradients.fixed_point import (
    HEADROOM,
    INTEGERS,
    RoundingVerdict,
    Scales,
    add_rounded,
    add_rounded_together,
    divide_into,
    exact_norm,
)
from harness.worker.gradients.parallel import Replicated
from harness.worker.setup_check import differences
from support.worlds import PRETRAIN, Nursery, history, newest

U = 2.0**-24


# ---- the integer core ----------------------------------------------------------------------------
def gradients(micro_batches, n, seed, spread=6.0):
    """Magnitudes over `spread` decades, signs mixed; (M, n) float32."""
    g = torch.Generator().manual_seed(seed)
    size = 10.0 ** (-spread * torch.rand(n, generator=g))
    return torch.randn(micro_batches, n, generator=g) * size


def scales_for(grads, word):
    scales = Scales(1, word)
    scales.start(len(grads))
    peaks = [float(grads.abs().max())]
    fits = peaks[0] == 0 or scales.least(0) <= peaks[0] <= scales.limit(0)  # the guess
    assert scales.judge(peaks) is (RoundingVerdict.GOOD if fits else RoundingVerdict.AGAIN)
    assert scales.judge(peaks) is RoundingVerdict.GOOD
    scales.exponents = [math.frexp(peaks[0])[1] if peaks[0] else None]
    return scales


def summed(grads, word, order, weight=1.0):
    """The mean as the strategies make it, adding in `order`."""
    scales, scratch = scales_for(grads, word), fixed_point.Scratch()
    total = torch.zeros(grads.shape[1], dtype=INTEGERS[word])
    for m in order:
        assert add_rounded([grads[m].clone()], [scales.shift(0)], total, scratch) == [
            float(grads[m].abs().max())
        ]
    out = torch.empty(grads.shape[1], dtype=torch.float32)
    divide_into(out, total, weight, scales.shift(0), scratch)
    return out


@pytest.mark.parametrize("word", [64, 32])
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-90, 90),
    spread=st.floats(0, 12),
)
def test_the_error_is_within_its_bound(word, m, seed, exponent, spread):
    """Every element, against fractions; the bounds are those of the module's docstring."""
    grads = gradients(m, 11, seed, spread) * 2.0**exponent
    peak, length = Fraction(float(grads.abs().max())), m.bit_length()
    bound = m * peak * Fraction(2) ** ({64: length + 9 - 64, 32: length + 3 - 32}[word])
    result = summed(grads, word, range(m))
    for j in range(grads.shape[1]):
        column = [Fraction(float(x)) for x in grads[:, j]]
        true = sum(column)
        error, rounding = (
            abs(Fraction(float(result[j])) - true),
            abs(true) * Fraction(U * (1 + 2**-20)),
        )
        assert error <= bound * (1 + Fraction(U)) + rounding + Fraction(2) ** -149
        if word == 64 and sum(map(abs, column)) > peak * Fraction(2) ** (length - 30) and m > 1:
            # what an fp32 sum may be off by
            assert bound < (m - 1) * Fraction(U) * sum(map(abs, column))


def test_it_is_closer_to_the_truth_than_float32(capsys):
    grads = gradients(48, 20_000, seed=3, spread=4)
    true, fp32 = grads.double().sum(0), torch.zeros(20_000)
    for g in grads:
        fp32 += g
    error = {w: (summed(grads, w, range(48)).double() - true).abs() for w in (64, 32)}
    fast = (fp32.double() - true).abs()
    assert error[64].mean() < 0.3 * fast.mean() and error[64].max() <= U * true.abs().max()
    # the greatest elements; the smallest ones are the price of 32 bits
    assert error[32].max() < fast.max()


@pytest.mark.parametrize("word", [64, 32])
def test_order_and_grouping_do_not_matter(word):
    grads = gradients(12, 70_001, seed=1)
    one = summed(grads, word, range(12), weight=48.0)
    assert torch.equal(one, summed(grads, word, torch.randperm(12).tolist(), weight=48.0))
    scales, scratch = scales_for(grads, word), fixed_point.Scratch()
    ranks = [torch.zeros(70_001, dtype=INTEGERS[word]) for _ in range(3)]
    for m in range(12):
        add_rounded([grads[m]], [scales.shift(0)], ranks[m * m % 3], scratch)
    out = torch.empty(70_001)
    # and neither does where a parameter is cut
    for part in ((0, 17), (17, 66_000), (66_000, 70_001)):
        divide_into(
            out[slice(*part)],
            sum(ranks)[slice(*part)],
            torch.tensor(48.0, dtype=torch.float64),
            scales.shift(0),
            scratch,
        )
    assert torch.equal(out, one)
    total, pieces, shifts = (
        torch.zeros(70_001, dtype=INTEGERS[word]),
        [40_000, 1, 30_000],
        [scales.shift(0)] * 3,
    )
    for m in range(12):  # the GPU's way
        peaks = torch.zeros(3, dtype=torch.float64)
        add_rounded_together(grads[m].split(pieces), shifts, total, peaks, (0, 1, 2))
        assert peaks.tolist() == [float(part.abs().max()) for part in grads[m].split(pieces)]
    assert torch.equal(total, sum(ranks))


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton (pip install triton)")
def test_the_kernels_of_a_gpu_make_the_same_integers():
    """Triton's interpreter runs them on the CPU, in a process of its own, as it must be asked for
    before Triton is imported. `make gpu` runs them compiled."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.gpu_kernels"],
        env=env,
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize("weight", [24.0, torch.tensor(24.0, dtype=torch.float64), 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_divided_together_have_the_bits_of_those_divided_alone(weight, dtype):
    """What a GPU does in few passes is what a CPU does piece by piece; subnormals are rounded once."""
    sizes, shifts = [3, 0, 500, 70], [149, 7, -20, 61]
    total = torch.randint(-(2**62), 2**62, (sum(sizes),), generator=torch.Generator().manual_seed(1))
    total[:3] = torch.tensor([1, 3, -77])
    wanted, found = ([torch.empty(n, dtype=dtype) for n in sizes] for _ in range(2))
    for out, piece, shift in zip(wanted, torch.split(total, sizes), shifts, strict=True):
        divide_into(out, piece, weight, shift, fixed_point.Scratch())
    fixed_point.division(found, total.split(sizes), shifts)(weight)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    narrow = total.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    divide_into(wanted[2], narrow[3:503], weight, 3, fixed_point.Scratch())
    fixed_point.division(found[2:3], [narrow[3:503]], [3])(weight)
    assert torch.equal(wanted[2], found[2])


def test_small_gradients_are_taken_together_each_in_its_own_unit():
    total, scratch = torch.zeros(1000, dtype=torch.int64), fixed_point.Scratch()
    parts, shifts = [torch.randn(10), torch.randn(990) * 2.0**-140, torch.zeros(0)], [40, 149, 7]
    assert add_rounded(parts, shifts, total, scratch) == [
        float(parts[0].abs().max()),
        float(parts[1].abs().max()),
        0.0,
    ]
    wanted = [
        round(Fraction(float(x)) * 2**shift)
        for part, shift in zip(parts, shifts, strict=True)
        for x in part
    ]
    assert total.tolist() == wanted
    again = torch.zeros_like(total)
    peaks = torch.zeros(3, dtype=torch.float64)
    add_rounded_together(parts, shifts, again, peaks, (2, 0, 1))
    assert torch.equal(again, total) and peaks.tolist()[:2] == [float(parts[1].abs().max()), 0.0]
    add_rounded_together(parts[2:], shifts[2:], again[:0], peaks, (1,))
    assert peaks[1] == 0.0


@pytest.mark.parametrize("word", [64, 32])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 12, 255, 256])
def test_the_largest_sums_do_not_wrap(word, m):
    """M micro-batches that are all as large as the limit allows."""
    scales = Scales(1, word)
    scales.start(m)
    if word == 32:  # of 64, the guess itself
        scales.advance([1.5])
    limit = scales.limit(0)
    assert scales.judge([limit]) is RoundingVerdict.GOOD and limit >= 1.5 * 2 ** (HEADROOM[word] - 1)
    grad, total = torch.full((3,), limit), torch.zeros(3, dtype=INTEGERS[word])
    for sign in (1, -1):
        total.zero_()
        for _ in range(m):
            add_rounded([sign * grad], [scales.shift(0)], total, fixed_point.Scratch())
        out = torch.empty(3, dtype=torch.float64)
        divide_into(out, total, 1.0, scales.shift(0), fixed_point.Scratch())
        assert out.tolist() == [sign * m * limit] * 3
    assert (
        scales.judge([math.nextafter(limit, math.inf)]) is RoundingVerdict.AGAIN and scales.limit(0) > limit
    )


def test_units_follow_the_peaks():
    scales = Scales(2, 64)
    scales.start(12)
    assert scales.judge([0.0, 0.0]) is RoundingVerdict.GOOD and scales.exponents == [None, None]
    # the guess was too narrow
    assert scales.judge([3e5, 0.0]) is RoundingVerdict.AGAIN and scales.exponents == [19, None]
    scales.exponents = [None, None]
    # or too coarse
    assert scales.judge([3e-11, 0.0]) is RoundingVerdict.AGAIN and scales.exponents == [-34, None]
    scales.exponents = [None, None]
    # or good: the unit stays for this step
    assert scales.judge([3.0, 0.0]) is RoundingVerdict.GOOD and scales.exponents == [None, None]
    scales.advance([3.0, 0.0])
    assert scales.exponents == [2, None]
    scales.advance([3.0 / 64, 0.0])
    assert scales.exponents == [1, None]  # downwards by one bit a step
    scales.advance([100.0, 0.0])
    assert scales.exponents == [7, None]  # upwards at once
    scales.advance([0.0, 0.0])
    assert scales.exponents == [7, None]
    for bad in (math.nan, math.inf):
        assert scales.judge([1e30, bad]) is RoundingVerdict.BAD and scales.exponents == [7, None]
    tiny = Scales(1, 64)
    tiny.start(12)
    tiny.judge([2.0**-149])
    assert tiny.shift(0) == fixed_point.MAX_SHIFT and tiny.limit(0) >= 2.0**-149


def test_32_bits_begin_with_64_and_what_is_seen_there_is_known_afterwards():
    scales = Scales(3, 32)
    scales.start(12)
    assert scales.width == 64 and scales.judge([3.0, 3e-3, 0.0]) is RoundingVerdict.GOOD
    assert scales.judge([math.nan] * 3) is RoundingVerdict.BAD and scales.width == 64
    scales.advance([3.0, 3e-3, 0.0])
    assert scales.width == 32 and scales.exponents == [2, -8, None]
    assert scales.judge([3.0, 3e-3, 0.0]) is RoundingVerdict.GOOD
    # a first gradient that comes later
    assert scales.judge([3.0, 3e-3, 5.0]) is RoundingVerdict.AGAIN and scales.exponents == [2, -8, 3]
    # a first step that must be done again is done again once, in 32 bits
    scales.exponents = [None] * 3
    assert scales.judge([3e6, 3e-3, 0.0]) is RoundingVerdict.AGAIN and scales.width == 32
    assert scales.judge([3e6, 3e-3, 0.0]) is RoundingVerdict.GOOD


def test_too_many_micro_batches_for_32_bits_are_refused():
    with pytest.raises(BadInput, match="micro_batch"):
        Scales(1, 32).start(1 << 20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 5, 99_999])
def test_what_is_not_finite_is_seen(bad, where):
    grad = torch.ones(100_000)
    grad[where] = bad
    total, peaks = torch.zeros(100_000, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    add_rounded_together([grad], [10], total, peaks, (0,))
    for found in (add_rounded([grad], [10], total, fixed_point.Scratch())[0], float(peaks[0])):
        assert not math.isfinite(found)
    assert math.isnan(float(exact_norm([grad], 100_000, grad.device)))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-120, 120),
    spread=st.floats(0, 12),
    cuts=st.integers(1, 9),
)
def test_the_norm_is_exact_and_does_not_know_of_cuts(n, seed, exponent, spread, cuts):
    x = gradients(1, n, seed, spread)[0] * 2.0**exponent
    true = (
        math.sqrt(sum(Fraction(float(v)) ** 2 for v in x) * Fraction(2) ** (-2 * exponent))
        * 2.0**exponent
    )
    norm = exact_norm([x], n, x.device)
    assert float(norm) == pytest.approx(true, rel=2 * U)
    assert torch.equal(exact_norm(list(torch.tensor_split(x, cuts)), n, x.device), norm)
    assert torch.equal(exact_norm([x.flip(0)], n, x.device), norm)
    wide = x.double()
    assert torch.equal(exact_norm([wide], n, x.device), norm) and torch.equal(wide, x.double())


def test_the_norm_of_a_great_model_is_still_exact():
    """As if there were 2**36 elements: narrower limbs, more of them."""
    x = gradients(1, 5000, 0)[0]
    assert float(exact_norm([x], 1 << 36, x.device)) == pytest.approx(
        float(x.double().norm()), rel=2 * U
    )
    assert float(exact_norm([], 1, x.device)) == 0.0


# ---- the strategies, in one process --------------------------------------------------------------
@pytest.fixture(params=["in chunks", "together"])
def way(request, monkeypatch):
    """As a CPU takes gradients, and as a GPU does."""
    if request.param == "together":
        monkeypatch.setattr(fixed_point, "CHUNKED", set())


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 8),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.Tanh(),
        nn.Linear(16, 3, bias=False),
    ).to(dtype)


def run_step(model, strategy, micros, factor=1.0):
    """Forward and backward over all micro-batches, again if the strategy says so; returns how
    often."""
    times = 0
    while True:
        times += 1
        for i, m in enumerate(micros):
            strategy.micro(last=i == len(micros) - 1)
            x = torch.randint(50, (4, 4), generator=torch.Generator().manual_seed(m))
            (model(x).float().square().sum() * factor).backward()
            strategy.micro_done()
        if not strategy.again():
            return times


def make(word=64, micro_batches=6, **how):
    model = net(**how)
    strategy = exact_sums.ExactReplicated(model, word, bucket_bytes=1000)
    strategy.start(micro_batches)
    strategy.zero()
    return model, strategy


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_in_any_order_gives_the_same_gradients(dtype):
    results = []
    for order in (range(6), [5, 3, 1, 0, 2, 4]):
        model, strategy = make(dtype=dtype)
        assert run_step(model, strategy, list(order)) == 1  # a guess will do at first
        strategy.reduce()
        strategy.divide(24.0)
        results.append([p.grad.clone() for p in model.parameters()])
        norm = strategy.norm()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        strategy.zero()
        assert run_step(model, strategy, list(order)) == 1
        strategy.reduce()
        strategy.divide(24.0)
        torch.testing.assert_close(strategy.norm(), norm)  # now the units are known, and finer
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    reference = net(dtype)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    for m in range(6):
        reference.zero_grad()
        x = torch.randint(50, (4, 4), generator=torch.Generator().manual_seed(m))
        reference(x).float().square().sum().backward()
        for total, p in zip(sums, reference.parameters(), strict=True):
            total += p.grad
    for total, g in zip(sums, results[0], strict=True):
        torch.testing.assert_close(g, (total / 24).to(dtype), rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("way")
def test_the_first_step_of_32_bits_is_done_once():
    results = []
    for order in (range(6), [5, 3, 1, 0, 2, 4]):
        model, strategy = make(32)
        for _ in range(2):  # in 64 bits, then in 32
            assert run_step(model, strategy, list(order)) == 1
            strategy.reduce(), strategy.divide(24.0)
            results.append([p.grad.clone() for p in model.parameters()])
            strategy.zero()
        assert all(total.dtype is torch.int32 for total in strategy._sums)
    wide, narrow, *others = results
    for a, b, c, d in zip(wide, narrow, *others, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_a_spike_repeats_the_step_and_the_state_travels():
    model, strategy = make()
    run_step(model, strategy, range(6))
    strategy.reduce(), strategy.divide(24.0), strategy.zero()
    state = json.loads(json.dumps(strategy.state_dict()))
    assert run_step(model, strategy, range(6), factor=1e6) == 2
    strategy.reduce(), strategy.divide(24.0)
    grads = [p.grad.clone() for p in model.parameters()]
    model, other = make()
    other.load_state_dict(state)
    assert run_step(model, other, range(6), factor=1e6) == 2 and other.state_dict() != state
    other.reduce(), other.divide(24.0)
    assert other.state_dict() == strategy.state_dict()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    with pytest.raises(BadInput, match="32 and"):
        make(32)[1].load_state_dict(state)
    assert differences({"torch": "1.0"}, {"torch": "2.0"}) == "torch was '1.0', here it is '2.0'"


@pytest.mark.usefixtures("way")
def test_a_gradient_that_is_not_finite_spoils_all_and_changes_no_unit():
    model, strategy = make()
    run_step(model, strategy, range(6))
    strategy.reduce(), strategy.divide(24.0), strategy.zero()
    before = strategy.state_dict()
    assert run_step(model, strategy, range(6), factor=math.inf) == 1
    strategy.reduce(), strategy.divide(24.0)
    assert all(p.grad.isnan().all() for p in model.parameters()) and math.isnan(strategy.norm())
    assert strategy.state_dict() == before


@pytest.mark.usefixtures("way")
def test_unusual_steps_are_told_apart():
    model, strategy = make()
    strategy.micro(last=False)
    with pytest.raises(BadInput, match="before all micro-batches"):
        strategy.reduce()
    strategy.micro(last=True)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()


def chunks(model, m):
    """A loss that is gone backward from in two halves."""
    x = torch.randint(50, (4, 4), generator=torch.Generator().manual_seed(m))
    for half in (x[:2], x[2:]):
        yield model(half).float().square().sum()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("word", [32, 64])
def test_gradients_may_come_in_parts(word):
    """The first step is done again, for nobody knew; then each micro-batch is added up whole."""
    results = []
    for order in (range(6), [5, 3, 1, 0, 2, 4]):
        model, strategy = make(word)
        state = None
        for _ in range(2):
            times = 0
            while True:
                times += 1
                for i, m in enumerate(order):
                    strategy.micro(last=i == 5)
                    for loss in chunks(model, m):
                        loss.backward()
                        strategy.micro_done()
                if not strategy.again():
                    break
            assert times == (2 if state is None else 1)
            strategy.reduce(), strategy.divide(24.0)
            results.append([p.grad.clone() for p in model.parameters()])
            strategy.zero()
            state = strategy.state_dict()
        assert state["in_parts"] == list(range(4)) and json.loads(json.dumps(state)) == state
        other = make(word)[1]
        other.load_state_dict(state)
        assert other.counting.in_parts == set(range(4))
    first, second, *others = results
    for a, b, c, d in zip(first, second, *others, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    model, strategy = make()
    run_step(model, strategy, range(6))
    strategy.reduce(), strategy.divide(24.0)
    for p, g in zip(model.parameters(), second, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_float_sums_in_parts_are_not_sent_too_early():
    model, whole = net(), net()
    strategy = Replicated(model.parameters(), bucket_bytes=1000)
    sent = []
    strategy._sum_over_group = sent.append
    for step in range(2):
        for m in range(3):
            strategy.micro(last=m == 2)
            for loss in chunks(model, m):
                loss.backward()
                assert not sent
            strategy.micro_done()
            if step == 0:
                sum(chunks(whole, m)).backward()
        strategy.reduce()
        assert len(sent) == len(strategy._flats)
        sent.clear()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        strategy.zero()
    model = net()
    strategy = Replicated(model.parameters())
    strategy.micro(last=True)
    sum(chunks(model, 0)).backward()
    strategy.reduce()
    strategy.micro(last=True)
    first, second = chunks(model, 1)
    first.backward()
    with pytest.raises(BadInput, match="came in two parts in one micro-batch"):
        second.backward()


@pytest.mark.usefixtures("way")
def test_a_backward_that_gives_other_numbers_each_time_ends_with_a_reason():
    model, strategy = make()
    # the last of several repeats raises
    with pytest.raises(HarnessError, match="deterministic kernels"):  # noqa: PT012
        for k in range(1, 9):
            strategy.micro(last=True)
            (model(torch.zeros(1, 4, dtype=torch.long)).square().sum() * 1e4**k).backward()
            strategy.again()


@pytest.mark.usefixtures("way")
def test_parameters_that_take_no_part_stay_still():
    model, strategy = make()
    model.spare = nn.Parameter(torch.ones(3))  # after the strategy: unknown to it
    strategy.micro(last=True)
    model[2](torch.ones(1, 32)).sum().backward()
    strategy.reduce()
    strategy.divide(1.0)
    assert (
        float(model[4].weight.grad.abs().max()) == 0.0 and float(model[2].weight.grad.max()) == 1.0
    )
    assert strategy.counting.scales.exponents == [None, 1, 1, None]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "make_optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)]
)
def test_ordinary_optimizers_do_not_know_of_cuts(make_optimizer):
    """Sharded parameters end elsewhere, so the ends of vectors must be treated like their
    middle. (Fused ones fail this on a CPU.)"""
    results = []
    for cuts in ([], [500], list(range(1, 1003, 5))):
        pieces = [
            nn.Parameter(c.clone()) for c in torch.tensor_split(gradients(1, 1003, 0)[0], cuts)
        ]
        optimizer = make_optimizer(pieces)
        for k in range(1, 5):
            for p, g in zip(
                pieces, torch.tensor_split(gradients(1, 1003, k)[0], cuts), strict=True
            ):
                p.grad = g.clone()
            optimizer.step()
        results.append(torch.cat([p.detach() for p in pieces]))
    assert all(torch.equal(r, results[0]) for r in results)


# ---- real worlds ---------------------------------------------------------------------------------
FSDP2 = ["--parallel", "fsdp2"]
SPIKE = ["--spike-at", 6]  # 10^8 times the loss: does not fit, so all ranks do that step again


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def ended(nursery):
    def train(run, world, *flags, reduce="exact", env=None, total=8):
        """Train (or go on) to `total`; the hash of the whole weights and the bits of what the
        records say."""
        out = run.parent / f"{run.name}.json"
        nursery.train(
            run,
            world,
            "--reduce",
            reduce,
            "--total",
            total,
            "--every",
            4,
            "--out",
            out,
            *flags,
            env=env,
        )
        return json.loads(out.read_text())["weights"], [
            (r.loss.hex(), r.weight, str(r.metrics["grad_norm"])) for r in history(run)
        ]

    return train


@pytest.fixture(scope="module")
def one(ended, tmp_path_factory):
    """One worker that nothing happened to."""
    run = tmp_path_factory.mktemp("one") / "run"
    return *ended(run, 1, *SPIKE), newest(run)


WORLDS = [
    (3, [], None),
    (5, [], None),
    (2, [], {"HARNESS_SPEEDS": "[5.0, 1.0]"}),
    (1, FSDP2, None),
    (2, FSDP2, None),
    (3, FSDP2, None),
]


@pytest.mark.parametrize(("world", "flags", "env"), WORLDS)
def test_every_world_ends_with_the_same_bits(one, ended, tmp_path, world, flags, env):
    """Uneven shares, shares by speed, fillers, shards that are uneven or empty; and a step that
    must be done again."""
    weights, records, manifest = one
    assert float.fromhex(records[5][0]) > 1e7  # the spike
    assert ended(tmp_path / "run", world, *SPIKE, *flags, env=env) == (weights, records)
    mine = newest(tmp_path / "run")
    assert mine.data["state"]["reduce"] == manifest.data["state"]["reduce"]
    if not flags:
        assert mine.data["weights"] == manifest.data["weights"] is not None


def test_stops_and_other_worlds_on_the_way_change_no_bit(one, ended, tmp_path):
    run = tmp_path / "run"
    for world, total, flags in ((3, 3, []), (2, 6, FSDP2), (1, 8, [])):
        result = ended(run, world, *SPIKE, *flags, total=total)
    assert result == one[:2]
    assert [r.world for r in history(run)] == [3] * 3 + [2] * 3 + [1] * 2


GPT = [
    "--steps",
    25,
    "--layers",
    1,
    "--dim",
    32,
    "--heads",
    2,
    "--seq",
    16,
    "--micro-batch",
    2,
    "--global-batch",
    24,
    "--dropout",
    0.1,
]
GPT += ["--eval-every", 0, "--snapshot-every-steps", 2]
WALK = (1, 4, 3, 5, 2)


@pytest.mark.proof
def test_a_walk_through_five_worlds(nursery, tmp_path):
    """The reference trainer, each fifth of its steps in another world, DDP and FSDP2 in turn, one
    of them SIGKILLed first.

    `make walk` does the same over 300 steps, for each alone, with a kill in each world, and shows
    that float sums do not pass it.
    """
    run = tmp_path / "run"
    nursery.train(tmp_path / "calm", 1, *GPT, "--reduce", "exact", script=PRETRAIN)
    for i, (world, parallel) in enumerate(
        zip(WALK, ("ddp", "fsdp2", "ddp", "fsdp2", "ddp"), strict=True), 1
    ):
        flags = [*GPT, "--reduce", "exact", "--parallel", parallel]
        until = {"HARNESS_UNTIL_STEP": str(25 * i // len(WALK))}
        if world == 3:
            nursery.train(
                run, world, *flags, env=until, script=PRETRAIN, kill_after_s=1.5, codes=(0, -9)
            )
        nursery.train(run, world, *flags, env=until, script=PRETRAIN)
    assert [(r.step, r.world) for r in history(run)][4::5] == [
        (5 * i, world) for i, world in enumerate(WALK, 1)
    ]
    assert (
        newest(run).step == 25
        and newest(run).data["weights"] == newest(tmp_path / "calm").data["weights"]
    )


def test_float_sums_do_depend_on_the_world(ended, tmp_path):
    """So these tests can fail."""
    assert (
        ended(tmp_path / "one", 1, reduce="fast")[0] != ended(tmp_path / "two", 2, reduce="fast")[0]
    )


def test_half_precision_skips_the_same_steps_everywhere(ended, tmp_path):
    """A GradScaler that begins far too high, weights by tokens; 32 bits on the wire."""
    flags = ["--fp16", "--tokens"]
    alone = ended(tmp_path / "one", 1, *flags, reduce="exact32")
    assert ended(tmp_path / "ddp", 3, *flags, reduce="exact32") == alone
    assert ended(tmp_path / "fsdp2", 2, *flags, *FSDP2, reduce="exact32") == alone
    skipped = [norm == "nan" for _, _, norm in alone[1]]
    assert any(skipped) and not all(skipped) and alone[1][0][1] != 48.0


def test_what_is_not_finite_is_never_committed(nursery, tmp_path):
    stopped = nursery.train(
        tmp_path / "run", 2, "--reduce", "exact", "--nan-at", 6, "--every", 4, "--patient", codes=(1,)
    )
    assert "NonFiniteLoss" in stopped.output and newest(tmp_path / "run").step == 4
