"""Seconds from the command to the first step, and from the loss of a rank to the next step; beside
a plain script, and torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.bench import Bench, environment
from benchmarks.gpu.nodes import Nodes
from harness.bucket.archive import read_facts
from harness.core.facts import EpochStarted, WorkerFailed
from harness.node.worker_gpus import UNTOUCHED
from storage.stores.store_urls import open_store

EVERY = 5


def first(folder: Path, ours: bool, limit_s: float) -> dict[str, float]:
    """Seconds until each mark of the first step, from the command."""
    it = Nodes(folder, 1, 1)
    try:
        t0 = time.time()
        it.agent(1) if ours else it.plain()
        it.until(lambda m: m.what == "step", limit_s)
        marks = {m.what: m.t - t0 for m in it.marks()}
        return {**facts_after(folder, t0), **marks} if ours else marks
    finally:
        it.close()


def recoveries(folder: Path, ours: bool, kills: int, limit_s: float) -> list[dict[str, float]]:
    """For each SIGKILL of one of two ranks that share the GPU: seconds until the end of the first
    step of new ones, and until what came before, by mark."""
    it, found = Nodes(folder, 100_000, EVERY), list[dict[str, float]]()
    ends_s = time.monotonic() + limit_s
    try:
        it.agent(2) if ours else it.plain(2)
        begun = it.until(lambda m: m.what == "step", limit_s)
        for _ in range(kills):
            before, from_step = {m.pid for m in it.marks()}, begun.step + 3 * EVERY
            it.until(
                lambda m, to=from_step: m.what == "step" and m.step >= to,  # type: ignore[misc]
                ends_s - time.monotonic(),
            )
            newest = [m for m in it.marks() if m.what == "step" and m.pid in before]
            victim = max(newest[-4:], key=lambda m: (m.rank, m.t)).pid
            t0 = time.time()
            os.kill(victim, signal.SIGKILL)
            begun = it.until(
                lambda m, t=t0, old=before: (  # type: ignore[misc]
                    m.what == "step" and m.t > t and m.pid not in old and m.world == 2
                ),
                ends_s - time.monotonic(),
            )
            marks = {m.what: m.t - t0 for m in reversed(it.marks()) if m.pid == begun.pid}
            found.append({**facts_after(folder, t0), **marks})
    except RuntimeError:
        if not found:
            raise
    finally:
        it.close()
    return found


def facts_after(folder: Path, t0: float) -> dict[str, float]:
    """Seconds from `t0` until the agent tells of a failed worker, and of the next epoch."""
    found = dict[str, float]()
    for told in read_facts(open_store(str(folder / "run")), "agent-", steps=False):
        mark = {WorkerFailed: "seen", EpochStarted: "next world"}.get(type(told.fact))
        if mark and told.t > t0:
            found.setdefault(mark, told.t - t0)
    return found


LOADS = """
import importlib, json, os, sys, time
from harness.node.forkserver import LOADED
found, t0 = {}, time.perf_counter()
for name in LOADED:
    importlib.import_module(name)
    found[name], t0 = time.perf_counter() - t0, time.perf_counter()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, b"%d" % sys.modules["torch"].cuda._is_in_bad_fork())
    os._exit(0)
found["bad"] = int(os.read(read, 1))
found["cuda"] = 0.0
if sys.modules["torch"].cuda.is_available():
    t0 = time.perf_counter()
    sys.modules["torch"].zeros(1, device="cuda")
    found["cuda"] = time.perf_counter() - t0
print(json.dumps(found))
"""


def loads(bench: Bench) -> None:
    """Measure what the warm process loads, and whether CUDA can be used in a fork of it."""
    out = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=environment(**UNTOUCHED),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    found = json.loads(out.stdout.splitlines()[-1])
    note = ", ".join(f"{name} {s:.2f}" for name, s in found.items() if name not in ("bad", "cuda"))
    total = sum(s for name, s in found.items() if name not in ("bad", "cuda"))
    bench.measured("modules that the warm process loads", total, "s", note=note)
    bench.measured("CUDA's first use in a process", found["cuda"], "s")
    bench.checked("nothing that the warm process loads touches CUDA", not found["bad"])


def said(found: dict[str, float]) -> str:
    """Where the seconds go."""
    words, last = [], 0.0
    for mark in ("seen", "next world", "script", "attached", "prepared", "step"):
        if mark in found:
            words.append(f"until {mark} {found[mark] - last:.2f}")
            last = found[mark]
    return ", ".join(words)


def run(bench: Bench) -> None:
    what = "one of two ranks killed, to the next step"
    with bench.going_on(what):
        share_s = bench.left_s / 3
        kills = 1 if bench.tiny else 6
        found = recoveries(bench.folder / "recovery", True, kills, share_s)
        for one in found:
            print(f"recovery: {one['step']:.2f} s: {said(one)}")
        found.sort(key=lambda one: one["step"])
        middle = found[(len(found) - 1) // 2]
        note = f"median of {len(found)}, most {found[-1]['step']:.2f}; ours: {said(middle)}"
        try:
            peer = recoveries(bench.folder / "torchrun", False, 1, share_s)[0]["step"]
        except RuntimeError:
            bench.measured(what, middle["step"], "s", note=note)
            bench.missing(f"{what}, by torchrun", f"not within {share_s:.0f} s, training included")
        else:
            bench.measured(what, middle["step"], "s", "torchrun", peer, note)
    bench.attempt("what the warm process loads", loads, wanted_s=5.0)
    for kind in ("cold", "warm"):
        with bench.going_on(f"the first step, {kind}"):
            plain = first(bench.folder / f"plain-{kind}", False, max(5.0, bench.left_s - 2))
            ours = first(bench.folder / f"ours-{kind}", True, max(5.0, bench.left_s - 2))
            bench.measured(
                f"from `harness run` to the end of the first step, {kind}",
                ours["step"],
                "s",
                "plain script",
                plain["step"],
                f"ours: {said(ours)}; plain: {said(plain)}",
            )
