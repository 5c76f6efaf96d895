"""Ranks on the GPU: one, two and three, kills in a collective and amid a snapshot's copy, nodes
that come and go. All must end with the same weights, to the bit."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.nodes import Nodes

STEPS, EVERY = 40, 4
KILLED_AT = 10  # slow steps before, enough to know how long they are and to keep a state


def calm(it: Nodes, limit_s: float) -> None:
    it.agent(1)


def two(it: Nodes, limit_s: float) -> None:
    it.agent(2)


def killed(it: Nodes, limit_s: float) -> None:
    it.agent(3, KILL="collective:6,staging:12")


def moving(it: Nodes, limit_s: float) -> None:
    """One rank, then three, whose node is killed, then two."""
    slow = it.folder / "slow"
    slow.touch()
    ends_s = time.monotonic() + limit_s
    it.agent(1)
    it.until(lambda m: m.what == "step" and m.step >= EVERY, limit_s)
    second = it.agent(2)
    it.until(lambda m: m.what == "step" and m.world == 3, ends_s - time.monotonic())
    second.send_signal(signal.SIGKILL)
    it.agent(1)
    it.until(lambda m: m.what == "step" and m.world == 2, ends_s - time.monotonic())
    slow.unlink()


def ahead(it: Nodes, limit_s: float) -> None:
    """Two ranks, one of which is killed. The bucket has no snapshot, but the nodes keep a state."""
    it.every = 10 * STEPS
    slow, ends_s = it.folder / "slow", time.monotonic() + limit_s
    slow.touch()
    it.agent(2, KILL=f"collective:{KILLED_AT}")
    before = it.until(lambda m: m.step == KILLED_AT - 1, limit_s)
    again = it.until(
        lambda m: m.what == "step" and m.pid != before.pid and m.t > before.t + 0.5,
        ends_s - time.monotonic(),
    )
    slow.unlink()
    if again.step == 1:
        raise RuntimeError("the run began anew: no node had kept a state")


WAYS: dict[str, Callable[[Nodes, float], None]] = {
    "one rank": calm,
    "two ranks that share it": two,
    "three, SIGKILL of one in a collective and of one amid a snapshot's copy": killed,
    "nodes that come and go: 1, 3 and 2 ranks": moving,
    "two, SIGKILL of one before the first snapshot": ahead,
}


SPARE_S = 8.0  # of the part's limit, to tell how it ended


def run(bench: Bench) -> None:
    def one(name: str) -> str:
        it = Nodes(bench.folder / WAYS[name].__name__, STEPS, EVERY)
        try:
            WAYS[name](it, bench.left_s - SPARE_S)
            return it.weights(max(1.0, bench.left_s - SPARE_S))
        except Exception:
            traceback.print_exc()
            print(it.tail(), file=sys.stderr)
            raise
        finally:
            for mark in it.marks():
                if mark.what != "step" or mark.step % EVERY == 0:
                    print(f"{name}: {mark}", file=sys.stderr)
            it.close()

    with ThreadPoolExecutor(2 if bench.tiny else len(WAYS)) as pool:
        found = {name: pool.submit(one, name) for name in WAYS}
        wanted = ""
        for name, future in found.items():
            try:
                weights = future.result(bench.left_s)
            except Exception as e:
                bench.checked(name, False, str(e).splitlines()[0][:300])
                continue
            wanted = wanted or weights
            bench.checked(
                f"{name}: trained to the end"
                if weights is wanted
                else f"{name}: the weights of the first to the bit",
                weights == wanted,
                weights[:12],
            )
