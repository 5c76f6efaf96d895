"""The head's loss by chunks: as torch's, with the logits of one chunk."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness import BadInput, chunked_cross_entropy

TOKENS, DIM, WORDS = 12, 8, 50


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.found = max(self.found, one.numel())
        return made


def made(dtype=torch.float32, scale=3.0):
    draws = torch.Generator().manual_seed(2)
    hidden = (scale * torch.randn(3, TOKENS // 3, DIM, generator=draws)).to(dtype)
    head = torch.randn(WORDS, DIM, generator=draws).to(dtype)
    targets = torch.randint(WORDS, (3, TOKENS // 3), generator=draws)
    targets[1, 2] = targets[2] = -100
    return hidden.requires_grad_(), head.requires_grad_(), targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunks", [1, 2, 5, 12, 40])
def test_loss_and_gradients_are_those_of_torch(chunks, reduction):
    hidden, head, targets = made()
    plain = F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten(), reduction=reduction)
    wanted = torch.autograd.grad(3.0 * plain, (hidden, head))
    loss = chunked_cross_entropy(hidden, head, targets, chunks=chunks, reduction=reduction)
    found = torch.autograd.grad(3.0 * loss, (hidden, head))
    torch.testing.assert_close(loss, plain)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_it_is_as_near_as_torch():
    exact = made()
    true = F.cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), exact[2].flatten())
    wanted = torch.autograd.grad(true, exact[:2])
    apart = {}
    for chunks in (0, 4):
        hidden, head, targets = made(torch.bfloat16)
        if chunks:
            loss = chunked_cross_entropy(hidden, head, targets, chunks=chunks)
        else:
            loss = F.cross_entropy((hidden @ head.T).float().flatten(0, 1), targets.flatten())
        found = torch.autograd.grad(loss, (hidden, head))
        assert {g.dtype for g in found} == {torch.bfloat16}
        apart[chunks] = [
            float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)
        ]
    for ours, theirs in zip(apart[4], apart[0], strict=True):
        assert ours < 1.5 * theirs


def test_logits_of_one_chunk_are_all_that_there_is():
    hidden, head, targets = made()
    with Largest() as largest:
        chunked_cross_entropy(hidden, head, targets, chunks=6).backward()
    # 2 tokens by 50 words are less than the head itself
    assert largest.found == WORDS * DIM
    with Largest() as largest:
        F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten()).backward()
    assert largest.found == TOKENS * WORDS


def test_what_needs_no_gradient_gets_none():
    hidden, head, targets = made()
    head.requires_grad_(False)
    chunked_cross_entropy(hidden, head, targets).backward()
    assert hidden.grad is not None and head.grad is None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, head, targets).requires_grad
    nothing = torch.full_like(targets, -100)
    assert chunked_cross_entropy(hidden, head, nothing).item() == 0.0


def test_what_cannot_be_is_refused():
    hidden, head, targets = made()
    with pytest.raises(BadInput, match="wanted hidden of shape"):
        chunked_cross_entropy(hidden, head, targets[:2])
    with pytest.raises(BadInput, match="wanted reduction 'mean' or 'sum' and at least 1 chunk"):
        chunked_cross_entropy(hidden, head, targets, reduction="none")
    loss = chunked_cross_entropy(hidden, head, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(BadInput, match="once only"):
        loss.backward()
