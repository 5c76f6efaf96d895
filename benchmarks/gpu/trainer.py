"""The training of the parts `ranks` and `start`: under `harness run`, or plain (also torchrun).

    trainer.py ours FOLDER STEPS EVERY      EVERY: steps between snapshots
    trainer.py plain FOLDER STEPS EVERY

Writes FOLDER/marks/PID.log, lines of JSON: [time, what, step, world, rank]; and, at the end of
ours, FOLDER/weights: a hash of the weights. KILL="collective:5,staging:8" has the highest rank kill
itself (SIGKILL) once before the exchange of gradients of step 5, while the others wait in it, and
once in the step after step 8, whose snapshot is being copied. Steps are slow (1 s) while the file
FOLDER/slow exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, STEPS, EVERY = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
GLOBAL_BATCH, MICRO_BATCH, LENGTH = 12, 2, 64


def say(what: str, step: int = 0, world: int = 0) -> None:
    line = [time.time(), what, step, world, int(os.environ.get("RANK", 0))]
    with open(FOLDER / "marks" / f"{os.getpid()}.log", "a") as f:
        f.write(json.dumps(line) + "\n")


(FOLDER / "marks").mkdir(parents=True, exist_ok=True)
say("script")

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, SIZES  # noqa: E402


def killed_once(when: str, step: int, last: bool) -> None:
    """Die here, if this is the moment that KILL names, for the first time, and the last rank."""
    if last and f"{when}:{step}" in os.environ.get("KILL", "").split(","):
        mark = FOLDER / f"killed-{when}-{step}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(256, (LENGTH + 1,), generator=drawn) for _ in range(1024)]
    return [(row[:-1], row[1:]) for row in rows]


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def ours() -> None:
    import harness

    run = harness.attach(snapshot_every_steps=EVERY, reduce="exact")
    say("attached", 0, run.world)
    torch.manual_seed(0)
    model = GPT(SIZES["1m"], LENGTH, 0.1).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.prepare(model, optimizer)
    say("prepared", run.step, run.world)
    last, began = run.world > 1 and run.rank == run.world - 1, time.time()
    for step in run.steps(data(), total=STEPS, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH):
        while (FOLDER / "slow").exists() and time.time() < began + 1.0:
            time.sleep(0.02)
        began = time.time()
        killed_once("staging", step.number - 1, last)
        for x, y in step:
            step.backward(loss_of(model, x, y))
        killed_once("collective", step.number, last)
        step.update()
        say("step", step.number, run.world)
    if run.rank == 0:
        found = hashlib.sha256()
        for tensor in model.state_dict().values():
            found.update(tensor.detach().cpu().numpy().tobytes())
        (FOLDER / "weights.new").write_text(found.hexdigest())
        (FOLDER / "weights.new").replace(FOLDER / "weights")


def plain() -> None:
    """The same training as people write it without us: DistributedDataParallel, torch.save."""
    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(SIZES["1m"], LENGTH, 0.1).to(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    say("attached", 0, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, begun, rows = FOLDER / "checkpoint.pt", 0, data()
    if saved.exists():
        found = torch.load(saved, map_location=device, weights_only=True)
        begun = found["step"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    say("prepared", begun, world)
    for step in range(begun + 1, STEPS + 1):
        for i in range(rank, GLOBAL_BATCH // MICRO_BATCH, world):
            at = step * GLOBAL_BATCH + i * MICRO_BATCH
            chosen = [rows[(at + j) % len(rows)] for j in range(MICRO_BATCH)]
            x, y = (torch.stack(t).to(device) for t in zip(*chosen, strict=True))
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        float(next(model.parameters()).flatten()[0])  # the step is done on the device as well
        say("step", step, world)
        if rank == 0 and step % EVERY == 0:
            new = saved.with_suffix(".new")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, new)
            new.replace(saved)


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]]()
