"""Seconds from the command to the first step, and from the loss of a rank to the next step; beside
a plain script, and torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.nodes import Nodes

EVERY = 5


def first(folder: Path, ours: bool, limit_s: float) -> dict[str, float]:
    """Seconds until each mark of the first step, from the command."""
    it = Nodes(folder, 1, 1)
    try:
        t0 = time.time()
        it.agent(1) if ours else it.plain()
        it.until(lambda m: m.what == "step", limit_s)
        return {m.what: m.t - t0 for m in it.marks()}
    finally:
        it.close()


def recovery(folder: Path, ours: bool, limit_s: float) -> dict[str, float]:
    """Seconds from the SIGKILL of one of two ranks that share the GPU to the end of the first step
    of new ones, by mark."""
    it = Nodes(folder, 100_000, EVERY)
    try:
        it.agent(2) if ours else it.plain(2)
        it.until(lambda m: m.what == "step" and m.step >= 3 * EVERY, limit_s)
        before = {m.pid for m in it.marks()}
        victim = max((m for m in it.marks() if m.what == "step"), key=lambda m: (m.rank, m.t)).pid
        t0 = time.time()
        os.kill(victim, signal.SIGKILL)
        step = it.until(
            lambda m: m.what == "step" and m.t > t0 and m.pid not in before and m.world == 2,
            limit_s,
        )
        return {m.what: m.t - t0 for m in reversed(it.marks()) if m.pid == step.pid}
    finally:
        it.close()


def said(found: dict[str, float]) -> str:
    """Where the seconds go."""
    words, last = [], 0.0
    for mark in ("script", "attached", "prepared", "step"):
        if mark in found:
            words.append(f"until {mark} {found[mark] - last:.2f}")
            last = found[mark]
    return ", ".join(words)


def run(bench: Bench) -> None:
    def tried(name: str, do: object, *how: object) -> dict[str, float]:
        try:
            return do(bench.folder / name, *how, max(5.0, bench.left_s - 2))  # type: ignore[operator]
        except Exception as e:
            traceback.print_exc(file=sys.stderr)
            bench.checked(name, False, str(e).splitlines()[0][:300])
            return {}

    for kind in ("cold", "warm"):
        plain = tried(f"plain-{kind}", first, False)
        ours = tried(f"ours-{kind}", first, True)
        if ours and plain:
            bench.measured(
                f"from `harness run` to the end of the first step, {kind}",
                ours["step"],
                "s",
                "plain script",
                plain["step"],
                f"ours: {said(ours)}; plain: {said(plain)}",
            )
    rounds = 1 if bench.tiny else 3
    ours_all = [found for i in range(rounds) if (found := tried(f"recovery-{i}", recovery, True))]
    if not ours_all:
        return
    middle = sorted(ours_all, key=lambda f: f["step"])[len(ours_all) // 2]
    what = "one of two ranks killed, to the next step"
    note = f"median of {len(ours_all)}; ours: {said(middle)}"
    waits_s = bench.left_s - 3
    try:
        peer = recovery(bench.folder / "recovery-torchrun", False, 10 if bench.tiny else waits_s)
    except RuntimeError:
        bench.measured(what, middle["step"], "s", note=note)
        bench.missing(f"{what}, by torchrun", f"not within {waits_s:.0f} s, training included")
    else:
        bench.measured(what, middle["step"], "s", "torchrun", peer["step"], note)
