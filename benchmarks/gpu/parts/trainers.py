"""Other people's trainers on the GPU, their scripts unchanged: killed and resumed by `harness run`,
with the losses of the script alone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.bench import Bench, Process, process

SCRIPTS = Path(__file__).parents[1] / "unchanged"
WAYS = {  # name -> script, module that it needs
    "transformers' Trainer": ("hf_trainer.py", "transformers"),
    "a loop with Accelerate": ("accelerate_loop.py", "accelerate"),
    "Lightning's Trainer": ("lightning_fit.py", "lightning"),
}
STEPS, EVERY, KILLED_AT = 60, 5, 23
CLOSE = 5e-3  # of a loss, in bf16 with kernels that are not deterministic
SPARE_S = 5.0


def losses(events: Path) -> dict[int, float]:
    """The loss of each step, as told last."""
    return {step: loss for step, loss, _ in told(events)}


def told(events: Path) -> list[tuple[int, float, int]]:
    """Step, loss and process of each line."""
    lines = events.read_text().split("\n")[:-1] if events.exists() else []
    words = [line.split() for line in lines]
    return [(int(step), float(loss), int(pid)) for step, loss, pid in words]


@contextlib.contextmanager
def started(folder: Path, name: str, words: list[str]) -> Iterator[Process]:
    """A process of this Python in `folder`, which is killed at the end if it is still there."""
    env = {"HARNESS_NODE_DIR": folder / "node", "HF_HUB_OFFLINE": 1}
    begun = process(words, folder / f"{name}.log", folder, **env)
    try:
        yield begun
    finally:
        begun.kill()
        begun.wait()


def ended(begun: Process, folder: Path, name: str, ends_s: float) -> None:
    """Raises RuntimeError, with the log's end, unless the process ends with 0 in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        begun.wait(max(0.1, ends_s - time.monotonic()))
    if begun.returncode != 0:
        log = (folder / f"{name}.log").read_text(errors="replace")
        print(f"{folder.name} {name}:\n{log}", file=sys.stderr)
        last = [line for line in log.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"{name} ended with {begun.returncode}: {' '.join(last)}"[:250])


def survived(folder: Path, script: Path, nproc: int, limit_s: float) -> str:
    """Train alone, and under `harness run` with a SIGKILL of rank 0's worker; return what was
    compared. Raises RuntimeError if the losses are not alike."""
    folder.mkdir(parents=True)
    ends_s = time.monotonic() + limit_s
    plain, ours = folder / "plain.losses", folder / "ours.losses"
    run = ["-m", "harness.cli", "run", "--run", str(folder / "run"), "--nproc", str(nproc)]
    how = ["--script-world", "1", "--notices", "none", "--attach", f"snapshot_every_steps={EVERY}"]
    with started(folder, "plain", [str(script), str(plain), "out"]) as begun:
        ended(begun, folder, "plain", ends_s)
    with started(folder, "ours", [*run, *how, "--", str(script), str(ours), "out"]) as agent:
        killed = 0
        while not killed and agent.poll() is None and time.monotonic() < ends_s:
            reached = [pid for step, _, pid in told(ours) if step >= KILLED_AT]
            if reached:
                killed = reached[0]
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.002)
        ended(agent, folder, "ours", ends_s)
    found, wanted = losses(ours), losses(plain)
    pids = {pid for _, _, pid in told(ours)}
    if len(pids) < 2 or sorted(found) != sorted(wanted) or len(wanted) != STEPS:
        raise RuntimeError(f"{len(found)} of {len(wanted)} steps by {len(pids)} processes")
    apart = max(abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted)
    again = len(told(ours)) - len(found)
    if apart > CLOSE:
        raise RuntimeError(f"losses are up to {apart:.1e} apart")
    return f"losses of {STEPS} steps at most {apart:.1e} apart; {again} steps done again"


def run(bench: Bench) -> None:
    def one(what: str) -> str:
        name, nproc = asked[what]
        script = SCRIPTS / WAYS[name][0]
        return survived(bench.folder / f"{script.stem}-{nproc}", script, nproc, limit_s)

    asked, limit_s = dict[str, tuple[str, int]](), bench.left_s - SPARE_S
    for name, (_, module) in WAYS.items():
        for nproc, ranks in ((1, "one rank"), (2, "two ranks that share the GPU")):
            what = f"{name}, {ranks}: killed, resumed, the losses of the script alone"
            if importlib.util.find_spec(module) is None:
                bench.missing(what, f"no module {module}")
            else:
                asked[what] = (name, nproc)
    with ThreadPoolExecutor(2 if bench.tiny else 6) as pool:
        found = {what: pool.submit(one, what) for what in asked}
        for what, future in found.items():
            with bench.going_on(what):
                bench.checked(what, True, future.result(max(1.0, bench.left_s - 1)))
