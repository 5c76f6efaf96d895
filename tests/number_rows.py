"""Rows of numbers, and whether their sum is positive: what scripts of the tests train on."""

import torch


class Numbers(torch.utils.data.Dataset):
    fingerprint = "numbers"

    def __len__(self):
        return 500

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()
