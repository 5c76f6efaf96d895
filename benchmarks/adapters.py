"""What an adapter costs a step: the same unchanged script plain and under `harness run`, one worker
each, interleaved. No assertions.

    .venv-adapters/bin/python benchmarks/adapters.py
    .venv-adapters/bin/python benchmarks/adapters.py --only transformers --rounds 8 --width 512

A step is timed by the script itself, from one forward of a step's first micro-batch to the next;
the first ten steps are not counted. Snapshots are left out (one at the end), so what remains is
what every step pays: our loader, hashing what was read, seeding, the reduction, records.
Every round takes plain and adapted once, in an order that rotates; a ratio is the median of the
ratios within a round. Look at `uptime` before you believe it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARM_STEPS = 10
ACCUMULATION = 2


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, n: int, width: int):
        self.n, self.width = n, width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.full((self.width,), float(i % 17) / 17)
        return {"x": x, "labels": x[:1]}


class Net(nn.Module):
    """`times`: when each forward began."""

    def __init__(self, width: int, layers: int = 6):
        super().__init__()
        self.body = nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU()))
        )
        self.head = nn.Linear(width, 1)
        self.times: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.times.append(time.perf_counter())
        out = self.head(self.body(x))
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def hf(net: Net, data: Rows, batch: int, steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=net, args=arguments, train_dataset=data).train()


def accelerate_loop(net: Net, data: Rows, batch: int, steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=not torch.cuda.is_available()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for i, rows in enumerate(loader):
        if i >= steps * ACCUMULATION:
            break
        with accelerator.accumulate(model):
            accelerator.backward(model(**rows)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def lightning_trainer(net: Net, data: Rows, batch: int, steps: int) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            return self.net(**rows)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
    lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATION,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    ).fit(Module(), loader)


def fabric_loop(net: Net, data: Rows, batch: int, steps: int) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(devices=1)
    fabric.launch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
    )
    for i, rows in enumerate(loader):
        if i >= steps * ACCUMULATION:
            break
        last = (i + 1) % ACCUMULATION == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(**rows)["loss"] / ACCUMULATION)
        if last:
            optimizer.step()
            optimizer.zero_grad()


WAYS = {
    "transformers": hf,
    "accelerate": accelerate_loop,
    "lightning": lightning_trainer,
    "fabric": fabric_loop,
}


def one(name: str, a: argparse.Namespace) -> None:
    """Train, and write what each step took."""
    torch.manual_seed(0)
    net = Net(a.width)
    data = Rows(a.batch * ACCUMULATION * (a.steps + 1), a.width)
    WAYS[name](net, data, a.batch, a.steps)
    begins = net.times[::ACCUMULATION][WARM_STEPS:]
    spans = [b - a for a, b in itertools.pairwise(begins)]
    Path(a.out).write_text(json.dumps(spans))


def measure(name: str, adapted: bool, a: argparse.Namespace) -> float:
    """Seconds of a step, the median."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "spans.json"
        script = [__file__, "--one", name, "--out", str(out)]
        for flag in ("steps", "width", "batch"):
            script += [f"--{flag}", str(getattr(a, flag))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable]
        if adapted:
            command += ["-m", "harness.cli", "run", "--run", f"{folder}/run", "--nproc", "1"]
            command += ["--attach", "snapshot_every_s=3600", "--"]
        done = subprocess.run(
            [*command, *script], env=env, capture_output=True, text=True, timeout=600
        )
        if done.returncode or not out.exists():
            sys.exit(f"{name}, adapted={adapted}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return statistics.median(json.loads(out.read_text()))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--only", choices=WAYS)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--out", default="", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one:
        one(a.one, a)
        return
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"{'':14}{'plain ms':>10}{'adapted ms':>12}{'ratio':>8}   each round   (target 1.02)")
    for name in [a.only] if a.only else WAYS:
        plain, adapted = [], []
        for n in range(a.rounds):
            for which in (False, True) if n % 2 == 0 else (True, False):
                (adapted if which else plain).append(measure(name, which, a))
        ratios = [b / a for a, b in zip(plain, adapted, strict=True)]
        print(
            f"{name:14}{1e3 * statistics.median(plain):10.1f}"
            f"{1e3 * statistics.median(adapted):12.1f}{statistics.median(ratios):8.3f}   "
            f"{' '.join(f'{r:.3f}' for r in ratios)}   "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
