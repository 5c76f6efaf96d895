"""The gradient norm that our records hold is the one that a trainer clips by, computed once."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from harness.worker.gradients import parallel
from harness.worker.gradients.parallel import NormOnce, Single


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> NormOnce:
    """Asked by torch during this test only."""
    fresh = NormOnce()
    for module in (parallel.clip_grad, parallel.utils):
        for name in parallel.NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("harness.worker.gradients.parallel.once", fresh)
    fresh.install()
    return fresh


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model(torch.randn(3, 8)).square().sum().backward()
    return model


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each norm was computed of."""
    real, seen = torch._foreach_norm, list[int]()

    def counted(tensors: list[torch.Tensor], *more: object) -> list[torch.Tensor]:
        seen.append(len(tensors))
        return real(tensors, *more)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    return seen


def test_clipping_takes_the_norm_that_is_known(
    once: NormOnce, model: nn.Module, norms: list[int]
) -> None:
    ours = Single(model.parameters()).norm()
    theirs = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norms == [4]
    assert torch.equal(ours, theirs) and theirs is not ours
    assert torch.equal(nn.utils.get_total_norm([p.grad for p in model.parameters()]), theirs) is (
        False
    )  # they were clipped since
    assert norms == [4, 4]


@pytest.mark.parametrize("what", ["some", "written", "replaced", "another norm", "step over"])
def test_torch_computes_what_is_not_known(
    once: NormOnce, model: nn.Module, norms: list[int], what: str
) -> None:
    parameters, norm_type = list(model.parameters()), 2.0
    Single(parameters).norm()
    if what == "some":
        parameters = parameters[1:]
    elif what == "written":
        parameters[2].grad.mul_(3.0)
    elif what == "replaced":
        parameters[2].grad = parameters[2].grad * 3.0
    elif what == "another norm":
        norm_type = 1.0
    else:
        once.forget()
    wanted = torch.cat([p.grad.flatten() for p in parameters]).norm(norm_type)
    found = nn.utils.clip_grad_norm_(parameters, 1e9, norm_type)
    assert len(norms) == 2
    torch.testing.assert_close(found, wanted)


def test_low_precision_is_left_to_torch(once: NormOnce, norms: list[int]) -> None:
    """Its norm of such gradients is rounded to their type, ours is not."""
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    layer(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    Single(layer.parameters()).norm()
    assert nn.utils.clip_grad_norm_(layer.parameters(), 1.0).dtype == torch.bfloat16
    assert len(norms) == 2


def test_nothing_is_kept_alive(once: NormOnce, model: nn.Module) -> None:
    Single(model.parameters()).norm()
    freed = []
    for p in model.parameters():
        weakref.finalize(p.grad, freed.append, 1)
        p.grad = None
    assert freed == [1, 1, 1, 1]
