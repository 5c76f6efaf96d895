"""What the tests' training scripts share."""

import torch


class Numbers(torch.utils.data.Dataset):
    """Sample i is a function of i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()
