"""Where gradients lie between a backward and the optimizer, with sums in floating point."""

import pytest
import torch
from torch import nn

from harness.worker.gradients.parallel import Replicated, Single, strategy_for


class Rows(nn.Module):
    """`spare` takes part when it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, sparse=True)
        self.spare, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, rows, spare):
        x = self.table(rows)
        return self.out(self.spare(x) if spare else x).square().mean()


def steps(strategy, model, parts):
    """Gradients of each step, whose micro-batches say whether `spare` takes part."""
    found = []
    for step in parts:
        strategy.zero()
        for m, spare in enumerate(step):
            strategy.micro(last=m == len(step) - 1)
            model(torch.tensor([m, m + 1, 1]), spare).backward()
            strategy.micro_done()
        strategy.reduce()
        strategy.divide(4.0)
        found.append([p.grad.clone() for p in model.parameters()])
        found[-1].append(strategy.norm())
    return found


PARTS = [[True, True], [False, False], [False, True], [True, False], [True, True]]


def test_alone_gradients_are_what_buckets_hold():
    one, other = Rows(), Rows()
    assert isinstance(strategy_for(one), Single)
    small = Replicated(other.parameters(), bucket_bytes=50)
    alone, together = steps(strategy_for(one), one, PARTS), steps(small, other, PARTS)
    for wanted, found in zip(alone, together, strict=True):
        for a, b in zip(wanted[:-1], found[:-1], strict=True):
            assert torch.equal(a, b)
        torch.testing.assert_close(wanted[-1], found[-1])


@pytest.mark.parametrize("kind", [Single, Replicated])
def test_a_step_does_not_find_gradients_of_the_one_before(kind):
    model = Rows()
    strategy = kind(model.parameters())
    for step, parts in zip(steps(strategy, model, PARTS), PARTS, strict=True):
        assert bool(step[1].any()) == any(parts)


@pytest.mark.parametrize("kind", [Single, Replicated])
def test_what_the_script_puts_there_counts(kind):
    """... by hand, or after it has let go of what was there."""
    model = nn.Linear(2, 1)
    strategy = kind(model.parameters())
    strategy.zero()
    strategy.micro(last=True)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = torch.full((1,), 5.0)
    strategy.reduce()
    assert model.weight.grad.tolist() == [[1.0, 1.0]] and float(model.bias.grad) == 5.0
    assert abs(float(strategy.norm()) - 27**0.5) < 1e-5
