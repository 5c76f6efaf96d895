"""Sequences of words, and how positions are told: what scripts of the tests train on."""

import torch

WORDS = 12


class Sequences(torch.utils.data.Dataset):
    """Of words that add up."""

    fingerprint = "sequences"

    def __init__(self, length, some=False):
        """`some`: of their targets some are not counted."""
        self.length, self.some = length, some

    def __len__(self):
        return 500

    def __getitem__(self, i):
        x = torch.randint(WORDS, (self.length,), generator=torch.Generator().manual_seed(i))
        y = x.cumsum(0) % WORDS
        return x, torch.where(x == 0, -100, y) if self.some else y


def rotated(x, positions):
    """RoPE; x: (batch, heads, positions, size)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / 100.0 ** (torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
