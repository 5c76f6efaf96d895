"""Which of eight made-up languages is a line of text written in? A PyTorch script, made elastic.

Written by `harness init`. The lines marked with +++ are all that makes it run on spot machines
that come and go; put them into a script of your own, and this one aside.
"""

import harness  # +++
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    """`count` lines of 40 letters. A language is a table of which letter likes to follow which;
    lines differ by `first`."""

    def __init__(self, first: int, count: int, languages: int = 8, letters: int = 32):
        tables = (
            torch.rand(languages, letters, letters, generator=torch.Generator().manual_seed(7)) ** 8
        )
        draw = torch.Generator().manual_seed(first)
        self.label = torch.randint(languages, (count,), generator=draw)
        text = [torch.randint(letters, (count,), generator=draw)]
        for _ in range(39):
            text.append(
                torch.multinomial(tables[self.label, text[-1]], 1, generator=draw).squeeze(1)
            )
        self.text = torch.stack(text, dim=1)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.text[i], self.label[i]


class Classifier(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.embed = nn.Embedding(32, dim)
        self.pairs = nn.Conv1d(dim, 2 * dim, kernel_size=2)
        self.head = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 8)
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.gelu(self.pairs(self.embed(text).transpose(1, 2)))
        return self.head(seen.mean(dim=2))


@torch.no_grad()
def accuracy(model: nn.Module, lines: Dataset, device: str) -> float:
    model.eval()
    hits = [
        (model(x.to(device)).argmax(1) == y.to(device)).float().mean().item()
        for x, y in DataLoader(lines, batch_size=256)
    ]
    return sum(hits) / len(hits)


def main() -> None:
    torch.manual_seed(0)
    run = harness.attach(seed=0)  # +++
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, test = Lines(first=0, count=2048), Lines(first=1, count=1024)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2560)
    run.prepare(model, optimizer, scheduler)  # +++
    for step in run.steps(train, total=2560, global_batch=64, micro_batch=8):  # +++
        for x, y in step:  # +++
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            step.backward(loss)  # +++
        step.update(clip_norm=1.0)  # +++
        if step.number % 128 == 0:  # +++
            run.print(f"step {step.number}: loss {step.loss:.3f}")  # +++
    print(f"test accuracy {accuracy(model, test, device):.3f}")


if __name__ == "__main__":
    main()
