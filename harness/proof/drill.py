"""`harness drill`: every fault in every phase, with real processes, until the run has finished by
itself with the very same weights.

A cell of the matrix is one tiny exact training (`exercise.py`) on two nodes. Its processes are held
where the phase is (`sabotage.py`), the fault happens, and they are let go. Then nobody helps,
except that a node is launched by the same command when none is left. Passed: the run ends; `harness
verify` proves it; the weights' hash is the calm run's; no process is left; the fault's alerts
reached a webhook, each exactly once. As root on Linux every
node has a network namespace of its own, and a cut is a link that is down; elsewhere those cells are
skipped. Knows processes, signals and links; reads the bucket only to judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.world import DRAINED, BadInput
from harness.proof.drill_alerts import listening
from harness.proof.scene import (
    ANYBODY,
    EVERY,
    PHASES,
    REACH_S,
    STEPS,
    Bridge,
    NotReached,
    Scene,
    can_isolate,
    kept_folder,
    train,
    wait_until,
)
from harness.proof.sore_points import FAULTS, STAND_S
from harness.views.audit import audit
from storage.errors import StoreError
from storage.opening import open_store
from storage.snapshots import Snapshots

FINISH_S = 180.0  # for the run to end after the fault
END_S = 60.0  # for the last processes to be gone
RELAUNCHES = 5


# ---- cells ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    fault: str
    phase: str
    outcome: str  # "passed" | "FAILED" | "skipped"
    why: str = ""
    seconds: float = 0.0
    epochs: int = 0
    launches: int = 0
    exit_codes: tuple[int, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class Ground:
    """What all cells share: the calm run's hash, and a run that was drained half-way."""

    folder: Path
    weights: str
    isolated: bool
    keep: bool = False

    @property
    def half(self) -> Path:
        return self.folder / "half"


def prepare(folder: Path, isolated: bool, keep: bool = False) -> Ground:
    """Train calmly, once to the end and once to the middle."""
    train(folder / "half", STEPS, EVERY, "--drain-at", str(STEPS // 2 + 3), wanted=DRAINED)
    return Ground(folder, train(folder / "calm", STEPS, EVERY), isolated, keep)


def drill(ground: Ground, fault: str, phase: str, seed: int) -> Result:
    """One cell. Never raises: what went wrong is the result."""
    t0 = time.monotonic()
    if fault == "cut" and not ground.isolated:
        return Result(fault, phase, "skipped", "needs root and network namespaces")
    folder = ground.folder / f"{fault}-{phase}-{seed}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        net = (
            stack.enter_context(Bridge(f"hd{os.getpid() % 100000}{_unique()}"))
            if ground.isolated
            else None
        )
        scene = Scene(folder, net, random.Random(f"{fault} {phase} {seed}"))
        stack.callback(scene.close)
        try:
            outcome, why = "passed", ""
            listened = stack.enter_context(listening(scene.run))
            play(ground, scene, fault, phase)
            judge(ground, scene)
            listened.judge(fault, phase)
        except (
            AssertionError,
            NotReached,
            StoreError,
            OSError,
            subprocess.SubprocessError,
            RuntimeError,
            ValueError,
        ) as e:
            outcome, why = "FAILED", f"{type(e).__name__}: {e}"
        codes = tuple(
            n.process.poll() if n.process.poll() is not None else -999 for n in scene.nodes
        )
        epochs = (
            len(list((scene.run / "rdzv" / "epochs").glob("*.json"))) if scene.run.exists() else 0
        )
    result = Result(
        fault,
        phase,
        outcome,
        "; ".join([why, *scene.notes]).strip("; "),
        time.monotonic() - t0,
        epochs,
        len(scene.nodes),
        tuple(int(c or 0) for c in codes),
        str(folder) if outcome == "FAILED" or ground.keep else "",
    )
    if outcome == "passed" and not ground.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return result


_count = iter(range(1 << 30))


def _unique() -> str:
    return f"{next(_count):x}"[-3:]


def play(ground: Ground, s: Scene, fault: str, phase: str) -> None:
    """Start, wait for the phase, let the fault happen, and see the run to its end."""
    if phase == "resume":
        shutil.copytree(ground.half, s.run)
    hold = {"phase": phase, "after_step": {"step": EVERY + 2, "staging": EVERY}.get(phase, 0)}
    chosen = s.rng.randrange(2)
    for i in range(2):
        s.launch(hold if phase in ANYBODY or i == chosen else None)
    wait_until(
        lambda: any((n.folder / "reached").exists() for n in s.nodes),
        REACH_S,
        s,
        NotReached(f"nobody came to the phase {phase!r}"),
    )
    s.victim = next(i for i, n in enumerate(s.nodes) if (n.folder / "reached").exists())
    s.reached = int((s.node.folder / "reached").read_text() or 0)
    time.sleep(s.rng.uniform(0.0, 0.2))
    FAULTS[fault](s)
    time.sleep(STAND_S.get(fault, 0.3))  # what was done to them happens while they stand there
    for node in s.nodes:
        node.forget("hold.json")
    relaunched = 0
    deadline_s = time.monotonic() + FINISH_S
    while any(n.process.poll() is None for n in s.nodes) or not s.final():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not finished {FINISH_S:.0f} s after the fault")
        if all(n.process.poll() is not None for n in s.nodes) and not s.final():
            if relaunched == RELAUNCHES:
                raise AssertionError(f"launched again {RELAUNCHES} times, and still not finished")
            relaunched += 1
            s.launch()
        time.sleep(0.1)


def judge(ground: Ground, s: Scene) -> None:
    """The oracle. Raises AssertionError."""
    store = open_store(str(s.run))
    manifest = Snapshots(store).latest()
    if manifest is None or not Snapshots(store).ended(manifest):
        raise AssertionError("there is no final snapshot")
    if manifest.data["weights"] != ground.weights:
        raise AssertionError(
            f"the weights are {manifest.data['weights']}, the calm run's {ground.weights}"
        )
    found = audit(store)
    if not found.ok:
        raise AssertionError(
            "verify: " + "; ".join(f"{c.name}: {c.detail}" for c in found.checks if not c.ok)
        )
    left = [p.pid for n in s.nodes for p in n.processes()]
    deadline_s = time.monotonic() + END_S
    while left and time.monotonic() < deadline_s:
        time.sleep(0.2)
        left = [p.pid for n in s.nodes for p in n.processes()]
    if left:
        raise AssertionError(f"still running: {left}")


# ---- the command ---------------------------------------------------------------------------------
def cells(only: Iterable[str]) -> list[tuple[str, str]]:
    """Those that match any of `fault:phase` (either side may be empty or *). Raises BadInput
    for unknown names."""
    chosen = []
    for word in only or ("*:*",):
        fault, _, phase = word.partition(":")
        fault, phase = fault or "*", phase or "*"
        if fault not in ("*", *FAULTS) or phase not in ("*", *PHASES):
            raise BadInput(
                f"--only {word}: wanted FAULT:PHASE, of {', '.join(FAULTS)} and "
                f"{', '.join(PHASES)}; * for all"
            )
        chosen += [
            (f, p) for f in FAULTS for p in PHASES if fault in ("*", f) and phase in ("*", p)
        ]
    return list(dict.fromkeys(chosen))


def matrix(ground: Ground, chosen: list[tuple[str, str]], seed: int, jobs: int) -> Iterator[Result]:
    """Results as they come."""
    # threads that outlive their cells: nodes die with the thread that started them
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda cell: drill(ground, cell[0], cell[1], seed), chosen)


def command(
    only: tuple[str, ...],
    seed: int,
    jobs: int,
    as_json: bool,
    keep: str,
    console: Console,
) -> int:
    """`harness drill`. 0: every cell passed or was skipped for a reason."""
    chosen = cells(only)
    results: list[Result] = []
    isolated = can_isolate()
    with kept_folder(keep, "harness-drill-") as folder:
        ground = prepare(folder, isolated, bool(keep))
        for r in matrix(ground, chosen, seed, jobs):
            results.append(r)
            if not as_json:
                colour = {"passed": "green", "skipped": "yellow"}.get(r.outcome, "red")
                text = (
                    f" {r.fault}:{r.phase}  {r.seconds:.1f} s, {r.epochs} epochs, {r.launches} "
                    "nodes" + (f"  {r.why}" if r.why else "")
                )
                console.print(Text.assemble((f"{r.outcome:8}", colour), text))
                if r.outcome == "FAILED":
                    console.print(_last_words(Path(r.folder)), markup=False, highlight=False)
    if as_json:
        print(json.dumps([asdict(r) for r in results], indent=2))
    else:
        console.print(table(results))
        for r in results:
            if r.outcome == "FAILED":
                console.print(
                    f"again: harness drill --seed {seed} --only {r.fault}:{r.phase} --keep FOLDER",
                    highlight=False,
                )
    return 1 if any(r.outcome == "FAILED" for r in results) else 0


def _last_words(folder: Path) -> str:
    return "\n".join(
        f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
        for p in sorted(folder.glob("node*.log"))
    )


def table(results: list[Result]) -> Table:
    """Faults down, phases across; seconds of those that passed."""
    phases = [p for p in PHASES if any(r.phase == p for r in results)]
    made = Table("fault", *phases)
    for fault in FAULTS:
        of = {r.phase: r for r in results if r.fault == fault}
        if of:
            made.add_row(fault, *(_mark(of[p]) if p in of else "" for p in phases))
    return made


def _mark(r: Result) -> Text:
    return {
        "passed": Text(f"{r.seconds:.0f} s", "green"),
        "skipped": Text("skipped", "yellow"),
    }.get(r.outcome, Text("FAILED", "red"))
