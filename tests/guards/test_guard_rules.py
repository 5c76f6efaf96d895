"""The rules of the guards, without a run: settings, bounds beside plain PyTorch, false alarms."""

import json
import math
import random

import pytest
import torch

from harness.core.world import BadInput
from harness.guards.guard_rules import Guards, StepRules, guards_of


def judged(rules, norms, losses=None, first=1):
    """The findings of steps with these norms."""
    losses = [1.0] * len(norms) if losses is None else losses
    return [
        rules.judge(first + k, loss, norm)
        for k, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


# ---- settings ------------------------------------------------------------------------------------
def test_what_can_be_asked_for(tmp_path):
    assert guards_of(None) is guards_of("off") is guards_of("") is None
    assert guards_of("default") == Guards() == guards_of({})
    file = tmp_path / "guards.yaml"
    file.write_text("skip_above: 30\nskip: hold\nwarm_up: 5\n")
    wanted = Guards(skip_above=30, skip="hold", warm_up=5)
    assert guards_of(str(file)) == guards_of(wanted) == wanted
    assert guards_of(json.dumps({"skip_above": 30, "skip": "hold", "warm_up": 5})) == wanted
    file.write_text("spike: off\n")  # a boolean, to YAML
    assert guards_of(file) == Guards(spike="off")
    file.write_text("")
    assert guards_of(file) == Guards()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skip_abov: 30", "'skip_abov' is not known; wanted clip_sigmas, clip_least, skip_above"),
        ("skip_above: many", "skip_above='many': wanted a number"),
        ("skip_above: -1", "skip_above=-1: wanted 0"),
        ("skip_above: .nan", "skip_above=nan"),
        ("clip_sigmas: true", "clip_sigmas=True: wanted a number"),
        ("window: 1", "window=1: wanted 2 to 100000"),
        ("window: 2.5", "wanted a whole number"),
        ("warm_up: 1", "wanted at least 2 steps"),
        ("skip: later", "skip='later': wanted advance or hold"),
        ("rewind_steps: 0", "rewind_steps=0: wanted 1 to 100000 at least"),
        ("spike: 3", "wanted a word"),
        ("spike: stop", "wanted alert, rewind or off"),
        ("[1, 2]", "wanted settings such as skip_above: 20"),
        ("a: 1\n---\nb: 2", "wanted one YAML document, found 2"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path, text, says):
    file = tmp_path / "guards.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as refused:
        guards_of(str(file))
    assert says in str(refused.value)


def test_what_is_no_setting_is_refused(tmp_path):
    for asked, says in [
        (tmp_path / "none.yaml", "none.yaml"),
        ("{not json", "as JSON"),
        (7, "wanted 'default', 'off', a file, or harness.Guards"),
    ]:
        with pytest.raises(BadInput, match=says):
            guards_of(asked)


# ---- clip and skip -------------------------------------------------------------------------------
def trained(guard, steps=400):
    """A regression in float64 with sudden large batches; returns (weights, norm, bound, applied)
    of each step. `guard(norm)`: the norm to clip to (None: no bound), and whether to skip."""
    torch.manual_seed(0)
    w = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    true = torch.randn(8, dtype=torch.float64)
    found = []
    for k in range(steps):
        x = torch.randn(16, 8, dtype=torch.float64) * (1 + 3 * (k % 37 == 36) + 60 * (k == 200))
        (x @ (w - true) + torch.randn(16, dtype=torch.float64)).square().mean().backward()
        norm = w.grad.norm()
        most, skip = guard(float(norm))
        if most is not None:
            torch.nn.utils.clip_grad_norm_([w], most)
        with torch.no_grad():
            if not skip:
                w -= 0.01 * w.grad
        w.grad = None
        found.append((w.detach().clone(), float(norm), most, skip))
    return found


class PublishedFormula:
    """Clip at max(1, mu + 4 sigma), skip beyond 20 mu, in plain PyTorch."""

    def __init__(self):
        self.window = torch.zeros(0, dtype=torch.float64)
        self.applied = 0

    def __call__(self, norm):
        most, skip = None, False
        if self.applied >= 100:
            mu, sigma = self.window.mean(), self.window.std(correction=0)
            most = max(1.0, float(mu + 4 * sigma))
            skip = norm > 20 * float(mu)
        if not skip:
            self.applied += 1
            one = torch.tensor([norm if most is None else min(norm, most)], dtype=torch.float64)
            self.window = torch.cat([self.window, one])[-128:]
        return most, skip


def test_the_bounds_are_those_of_the_published_formula():
    rules = StepRules(Guards())

    def ours(norm):
        found = rules.judge(rules.applied + rules.skipped + 1, 1.0, norm)
        return found.most_norm, bool(found.skip)

    mine, plain = trained(ours), trained(PublishedFormula())
    assert [skip for *_, skip in mine] == [skip for *_, skip in plain]
    assert [k for k, (*_, skip) in enumerate(mine) if skip] == [200]
    assert rules.clipped >= 3
    for (w, norm, most, _), (plain_w, plain_norm, plain_most, skip) in zip(mine, plain, strict=True):
        torch.testing.assert_close(w, plain_w, rtol=1e-12, atol=1e-12)
        assert norm == pytest.approx(plain_norm, rel=1e-12)
        if not skip and plain_most is not None:
            assert most == pytest.approx(plain_most, rel=1e-12)


def test_a_norm_below_one_is_never_clipped_and_zeros_skip_nothing():
    rules = StepRules(Guards(warm_up=5))
    assert not any(f.skip for f in judged(rules, [0.0] * 10 + [0.5]))
    found = judged(StepRules(Guards(warm_up=5)), [0.1] * 10 + [0.9])[-1]
    assert found.most_norm == 1.0 and not found.skip


def test_a_spike_does_not_widen_the_bounds():
    rules = StepRules(Guards(warm_up=10, window=16))
    calm = judged(rules, [2.0, 2.1] * 10)[-1].most_norm
    skipped, clipped = judged(rules, [500.0, 30.0], first=21)
    assert skipped.skip.startswith("the gradient norm 500 is above 20 times its mean 2.05")
    assert clipped.most_norm == pytest.approx(calm) and not clipped.skip
    after = judged(rules, [2.0], first=23)[0].most_norm
    assert after == pytest.approx(calm, rel=0.1)


def test_bounds_that_are_off():
    rules = StepRules(Guards(warm_up=2, clip_sigmas=0, skip_above=0, spike="off"))
    found = judged(rules, [1.0] * 50 + [1e9], [1.0] * 50 + [1e9])[-1]
    assert (found.skip, found.most_norm, found.spike) == ("", None, None)
    assert judged(rules, [math.nan])[0].skip == "the gradient norm is nan"


@pytest.mark.parametrize(
    ("loss", "norm", "says", "in_gradients"),
    [
        (math.nan, 1.0, "the loss is nan", False),
        (math.inf, math.nan, "the loss is inf", False),
        (1.0, math.inf, "the gradient norm is inf", True),
    ],
)
def test_what_is_not_finite_is_skipped_from_the_first_step_on(loss, norm, says, in_gradients):
    rules = StepRules(Guards())
    found = rules.judge(1, loss, norm)
    assert (found.skip, found.in_gradients) == (says, in_gradients)
    assert (rules.skipped, rules.applied, list(rules.norms)) == (1, 0, [])
    assert [rules.watches(step) for step in (2, 101, 102)] == [in_gradients, in_gradients, False]


def test_a_gradscaler_answers_for_its_overflows():
    rules = StepRules(Guards(most_bad=0))
    assert rules.judge(1, 1.0, math.inf, scaled=True).skip == ""
    assert rules.judge(2, math.nan, math.inf, scaled=True).skip == "the loss is nan"
    assert (rules.skipped, rules.applied) == (1, 0)


def test_ten_bad_steps_in_a_hundred_are_the_limit():
    rules = StepRules(Guards())
    bad = set(range(3, 103, 10))  # ten of the first hundred
    found = [rules.judge(k, math.nan if k in bad else 1.0, 1.0) for k in range(1, 103)]
    assert max(f.bad for f in found) == 0 and rules.skipped == 10
    assert rules.judge(103, math.nan, 1.0).bad == 0  # that of step 3 counts no longer
    assert rules.judge(104, math.nan, 1.0).bad == 11


# ---- spikes of the loss --------------------------------------------------------------------------
def test_a_spike_is_told_once_when_it_begins():
    rules = StepRules(Guards(warm_up=20))
    losses = [2.0 + 0.01 * (k % 5) for k in range(60)] + [3.2, 3.3, 2.0, 100.0]
    found = judged(rules, [1.0] * len(losses), losses)
    told = [(k, f.spike) for k, f in enumerate(found) if f.spike]
    assert told == [(60, (3.2, 2.02)), (63, (100.0, 2.02))]
    # the same before the warm-up, and a fall: nothing
    assert not any(f.spike for f in judged(StepRules(Guards()), [1.0] * 64, losses))
    assert not any(f.spike for f in judged(StepRules(Guards()), [1.0] * 200, [9.0] * 150 + [1.0] * 50))


def heavy(rng, degrees=4):
    """Student's t: tails that are much heavier than a normal's."""
    chi = sum(rng.gauss(0, 1) ** 2 for _ in range(degrees))
    return rng.gauss(0, 1) / math.sqrt(chi / degrees)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_thousand_healthy_steps_raise_no_alarm(seed):
    """The loss falls from 11 to 2, with noise of 1 %; the norm from 8 to 0.4, with noise of 15 %."""
    rng, rules = random.Random(seed), StepRules(Guards())
    for step in range(1, 100_001):
        loss = (2.0 + 9.0 / (1 + step / 300)) * (1 + 0.01 * heavy(rng))
        norm = (0.4 + 7.6 / (1 + step / 500)) * abs(1 + 0.15 * heavy(rng))
        found = rules.judge(step, loss, norm)
        assert not (found.skip or found.spike or found.bad), (step, loss, norm, found)
    assert (rules.skipped, rules.applied) == (0, 100_000)


# ---- state ---------------------------------------------------------------------------------------
def test_a_resumed_judge_says_what_the_first_would_have_said():
    rng = random.Random(5)
    norms = [rng.lognormvariate(0, 1.5) for _ in range(600)]
    losses = [math.nan if k % 41 == 40 else rng.lognormvariate(0, 0.6) for k in range(600)]
    whole = StepRules(Guards(warm_up=20, most_bad=600))
    wanted = judged(whole, norms, losses)
    first = StepRules(whole.guards)
    before = judged(first, norms[:313], losses[:313])
    state = json.loads(json.dumps(first.state_dict()))
    assert guards_of(state["settings"]) == whole.guards
    second = StepRules(whole.guards)
    second.load_state_dict(state)
    after = judged(second, norms[313:], losses[313:], 314)
    assert before + after == wanted and second.state_dict() == whole.state_dict()
    assert whole.skipped > 10 < whole.clipped and any(f.spike for f in wanted)
    # a smaller window keeps the newest
    small = StepRules(Guards(window=4))
    small.load_state_dict(state)
    assert list(small.norms) == state["norms"][-4:]
