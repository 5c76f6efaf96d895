"""What an adapter costs a step: the same unchanged script plain and under `harness run`, one worker
each. No assertions.

    .venv-adapters/bin/python benchmarks/adapters.py
    .venv-adapters/bin/python benchmarks/adapters.py --only transformers --rounds 8 --width 512

In a round both scripts live at the same time and take turns, a few steps each, so both see what the
machine is doing in the same second. A script is timed by itself, from one forward of a step's first
micro-batch to the next; the first turns are not counted. Snapshots are left out (one at the end),
so what remains is what every step pays: our loader, hashing what was read, seeding, the reduction,
records. Every round starts two new processes, since where their memory lies makes steps differ by
some percent.

For each adapter three ratios, adapted to plain, each the median over the rounds:

    wall    median over the turns of the ratio of neighbouring turns
    best    ratio of each one's fastest turns (the mean of a quarter of them)
    cpu     ratio of the processor time of all threads

Look at `uptime` before you believe any: on a busy machine `wall` and `best` are noise, and `cpu` is
too high. What an adapter does in Python is slowed down more by others' use of the caches than
arithmetic is, and what threads do every so many milliseconds (gloo's, a flush of facts) counts for
more where a step takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
from torch import nn

TARGET = 1.02
TITAN_CPU = Path(__file__).parents[1] / "tests/adapters/titan_cpu"
TURN_STEPS = 4
WARM_TURNS = 3
ACCUMULATION = 2
CLIP = 1.0  # the largest norm of gradients; what transformers' Trainer takes if nobody says so
# glibc keeps what a tensor has let go of. Else it depends on the process whether gradients come
# from the kernel anew in each step, and that alone makes steps differ by a tenth.
MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
START_S = 300.0  # until both scripts are at their first step
TURN_S = 120.0


class Turns:
    """Of one script, which works in its own turns and waits in the other's. Tells how long each
    turn took, and the processor time of all its threads in it."""

    def __init__(self, address: str):
        self._referee = Client(address, "AF_UNIX")
        self._steps, self._began, self._busy_s = 0, 0.0, 0.0

    def step(self) -> None:
        """A step begins."""
        if self._steps % TURN_STEPS == 0 and not self._referee.closed:
            try:
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                self._referee.send((wall_s - self._began, cpu_s - self._busy_s))
                self._referee.recv()
            except (EOFError, OSError):  # it has seen enough
                self._referee.close()
            self._began, self._busy_s = time.perf_counter(), time.process_time()
        self._steps += 1


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, n: int, width: int):
        self.n, self.width = n, width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.full((self.width,), float(i % 17) / 17)
        return {"x": x, "labels": x[:1]}


class Net(nn.Module):
    """Tells `turns` of each step's first forward; `micro_batches`: of a step."""

    def __init__(self, width: int, turns: Turns, layers: int = 6):
        super().__init__()
        self.body = nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU()))
        )
        self.head = nn.Linear(width, 1)
        self.turns, self.micro_batches, self._forwards = turns, ACCUMULATION, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.begins()
        out = self.head(self.body(x))
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    def begins(self) -> None:
        """A forward does."""
        if self._forwards % self.micro_batches == 0:
            self.turns.step()
        self._forwards += 1


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
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
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
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    ).fit(Module(), loader)


def fabric_loop(net: Net, data: Rows, batch: int, steps: int) -> None:
    """A step has one micro-batch: Fabric leaves accumulation to the script, which would have to be
    changed for ours."""
    from lightning.fabric import Fabric

    net.micro_batches = 1
    fabric = Fabric(devices=1)
    fabric.launch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(data, batch_size=batch * ACCUMULATION, shuffle=True)
    )
    for i, rows in enumerate(loader):
        if i >= steps:
            break
        fabric.backward(model(**rows)["loss"])
        fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()


def titan(net: Net, data: Rows, batch: int, steps: int) -> None:
    """torchtitan's debug model with two layers, on a CPU what tests/adapters/titan_cpu stubs for
    it. 64 of `batch` are one sequence of 32 tokens; `--width` has no meaning here."""
    sys.path.insert(0, str(TITAN_CPU))
    import titan_assets
    import titan_stubs

    os.environ["TITAN_PLAIN"] = "1"
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    titan_stubs.when_needed()
    from torchtitan.trainer import Trainer

    made = Trainer.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.model_parts[0].register_forward_pre_hook(lambda *_: net.begins())

    Trainer.__init__ = watched
    sequences = max(1, batch // 64)
    sizes = {"local": sequences, "global": sequences * ACCUMULATION}
    flags = list(titan_assets.FLAGS)
    for name, size in sizes.items():
        flags[flags.index(f"--training.{name}_batch_size") + 1] = str(size)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        titan_assets.make()
        sys.argv = ["torchtitan.train", *flags, "--training.steps", str(steps)]
        runpy.run_module("torchtitan.train", run_name="__main__")


WAYS = {
    "transformers": hf,
    "accelerate": accelerate_loop,
    "lightning": lightning_trainer,
    "fabric": fabric_loop,
    "torchtitan": titan,
}


def one(name: str, a: argparse.Namespace) -> None:
    """Train."""
    torch.manual_seed(0)
    net = Net(a.width, Turns(a.address))
    data = Rows(a.batch * ACCUMULATION * (a.steps + 3), a.width)
    WAYS[name](net, data, a.batch, a.steps + 2)  # the last turn ends with a step that begins


def begin(name: str, adapted: bool, folder: str, a: argparse.Namespace) -> subprocess.Popen[bytes]:
    script = [__file__, "--one", name, "--address", f"{folder}/turns"]
    for flag in ("steps", "width", "batch"):
        script += [f"--{flag}", str(getattr(a, flag))]
    env = {**os.environ, **MEMORY, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable]
    if adapted:
        command += ["-m", "harness.cli", "run", "--run", f"{folder}/run", "--nproc", "1"]
        command += ["--attach", "snapshot_every_s=3600", "--"]
    with open(f"{folder}/{'adapted' if adapted else 'plain'}.log", "ab") as log:
        return subprocess.Popen([*command, *script], env=env, stdout=log, stderr=log)


@dataclass
class Seen:
    """Of a script in one round. `wall_s`, `cpu_s`: of a step, by turn."""

    wall_s: list[float]
    cpu_s: list[float]

    def best_s(self) -> float:
        return statistics.fmean(sorted(self.wall_s)[: max(1, len(self.wall_s) // 4)])


def hear(peer: Any) -> tuple[float, float]:
    """A script's turn is over. Raises TimeoutError, EOFError."""
    if not peer.poll(TURN_S):
        raise TimeoutError(f"wanted {TURN_STEPS} steps within {TURN_S} s")
    said: tuple[float, float] = peer.recv()
    return said


def measure(name: str, adapted_first: bool, a: argparse.Namespace) -> tuple[Seen, Seen]:
    """One round: plain, adapted."""
    order = (True, False) if adapted_first else (False, True)
    said: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with Listener(f"{folder}/turns", "AF_UNIX") as door:
                door._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
                peers = {}
                for which in order:
                    processes.append(begin(name, which and not a.itself, folder, a))
                    peers[which] = door.accept()
                for which in order:
                    hear(peers[which])  # it is at its first step
                for _ in range(a.steps // TURN_STEPS):
                    for which in order:
                        peers[which].send("go")
                        said[which].append(hear(peers[which]))
                for peer in peers.values():
                    peer.close()
            codes = [process.wait(START_S) for process in processes]
            if any(codes):
                raise ChildProcessError(f"wanted both scripts to end well, found {codes}")
        except (OSError, EOFError, subprocess.TimeoutExpired) as e:
            logs = "".join(path.read_text()[-2000:] for path in sorted(Path(folder).glob("*.log")))
            sys.exit(f"{name}: {e!r}\n{logs}")
        finally:
            for process in processes:
                process.terminate()
    plain, adapted = (seen(said[which]) for which in (False, True))
    return plain, adapted


def seen(said: list[tuple[float, float]]) -> Seen:
    """But for the first turns."""
    wall_s, cpu_s = zip(*said[WARM_TURNS:], strict=True)
    return Seen([s / TURN_STEPS for s in wall_s], [s / TURN_STEPS for s in cpu_s])


@dataclass
class Ratios:
    """Of a round; see the module."""

    wall: float
    best: float
    cpu: float

    @classmethod
    def of(cls, plain: Seen, adapted: Seen) -> Ratios:
        pairs = zip(plain.wall_s, adapted.wall_s, strict=True)
        return cls(
            statistics.median(b / a for a, b in pairs),
            adapted.best_s() / plain.best_s(),
            sum(adapted.cpu_s) / sum(plain.cpu_s),
        )


def report(name: str, rounds: list[tuple[Seen, Seen]]) -> str:
    plain_s = statistics.median(s for plain, _ in rounds for s in plain.wall_s)
    busy_s = statistics.median(s for plain, _ in rounds for s in plain.cpu_s)
    ratios = [Ratios.of(*one) for one in rounds]
    wall, best, cpu = (
        statistics.median(getattr(r, kind) for r in ratios) for kind in ("wall", "best", "cpu")
    )
    spread = " ".join(f"{r.wall:.3f}/{r.cpu:.3f}" for r in ratios)
    load = os.getloadavg()[0]
    return (
        f"{name:14}{1e3 * plain_s:10.1f}{1e3 * busy_s:8.1f}{wall:8.3f}{best:8.3f}{cpu:8.3f}"
        f"   load {load:4.1f}   {spread}"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--only", choices=WAYS)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--itself", action="store_true", help="plain against plain: what chance does")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--address", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one:
        one(a.one, a)
        return
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(
        f"{'':14}{'plain ms':>10}{'cpu ms':>8}{'wall':>8}{'best':>8}{'cpu':>8}   target {TARGET}   "
        "wall/cpu of each round"
    )
    for name in [a.only] if a.only else WAYS:
        print(report(name, [measure(name, n % 2 == 1, a) for n in range(a.rounds)]), flush=True)


if __name__ == "__main__":
    main()
