"""Evaluation beside the training: the loss of each snapshot of `pretrain.py` over held-out text.

    harness snapshots watch s3://bucket/runs/x --name val -- examples/evaluate.py --size 124m

It takes the flags of `pretrain.py`; give it those that say what the model and the text are. Its
numbers are `val/loss` and `val/perplexity` of the snapshot's step (docs/WATCH.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from gpt import GPT
from pretrain import loss_of, parse
from text import prepare, split


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    flags, snapshot = parse(argv), harness.watched()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, held_out = split(prepare(flags.data, Path(flags.cache).expanduser()), flags.seq)
    model = GPT(flags.shape, flags.seq).to(device)
    snapshot.restore(model)
    model.eval()
    count = min(flags.eval_windows, len(held_out))
    total = 0.0
    for i in range(count):
        x, y = (t[None].to(device) for t in held_out[i * len(held_out) // count])
        total += float(loss_of(model, x, y))
    loss = total / count
    snapshot.log(loss=loss, perplexity=math.exp(loss))
    print(f"step {snapshot.step}: loss {loss:.4f} over {count} windows")


if __name__ == "__main__":
    main()
