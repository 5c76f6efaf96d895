"""`make guards`: many trainings that go wrong, each in a way of its own, and many that do not.

What goes wrong must be found at the right steps and named right; the weights must be those of
a training on another number of ranks whose script leaves out the same updates and has no fault; and
`harness prove verify` must hold and name the steps. A healthy training must raise no alarm, and
have the weights of one without guards.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from pathlib import Path

from rich.table import Table

from harness.core.facts import GuardTripped, StepSkipped
from harness.core.world import RESIZE
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from storage.terminal_text import Console
from support.guarded_runs import SCRIPT, SETTINGS, comes, facts, guarded, owner
from support.guarded_trainer import SAMPLES, TOTAL
from support.worlds import history, newest, train

KINDS = ("nan", "inf", "poisoned", "spike", "rewind")
HEALTHY_STEPS = 160  # beyond the warm-up of the default settings
LEFT_OUT = 8


def scenario(seed: int) -> tuple[str, int, int, str, int]:
    """Return what goes wrong, the sample or the step, and how many ranks of which kind train; and
    the ranks of the training to compare with."""
    dice = random.Random(seed)
    kind, world = KINDS[seed % len(KINDS)], dice.randint(1, 3)
    late = [one for one in range(SAMPLES) if min(comes(one), default=0) > SETTINGS["warm_up"] + 1]
    at = dice.choice(late) if kind in ("nan", "inf", "poisoned") else dice.randint(25, TOTAL - 1)
    return kind, at, world, dice.choice(("ddp", "fsdp2")), dice.choice([1, 2, 3])


def far_above(run: Path) -> list[int]:
    """Return the steps whose gradient norm is above 20 times the mean of those applied before."""
    found, applied = [], list[float]()
    for record in history(run):
        norm, usual = record.metrics["grad_norm"], applied[-SETTINGS["window"] :]
        if len(applied) >= SETTINGS["warm_up"] and norm > 20.0 * math.fsum(usual) / len(usual):
            found.append(record.step)
        else:
            applied.append(norm)
    return found


def faulty(seed: int, folder: Path) -> str:
    """Train with a fault; return what was wrong about how it was met, "": nothing."""
    kind, at, world, parallel, other = scenario(seed)
    settings = {**SETTINGS, "clip_sigmas": 0.0}
    if kind == "rewind":
        settings |= {"spike": "rewind", "skip_above": 0.0, "rewind_steps": LEFT_OUT}
    guards, run = folder / "guards.yaml", folder / "run"
    guards.write_text(json.dumps(settings))
    flag = "spike" if kind == "rewind" else kind
    flags = ["--guards", guards, "--parallel", parallel, "--every", 5, f"--{flag}", at]
    if kind == "rewind":
        train(run, world, *flags, script=SCRIPT, codes=(RESIZE,))
    found, _ = guarded(run, world, *flags)
    wanted = sorted(comes(at)) if kind in ("nan", "inf") else [at]
    if kind == "poisoned":  # one that the model gets right by chance has no great gradient
        wanted = far_above(run)
        if not set(wanted) <= set(comes(at)):
            return f"wanted only the steps {sorted(comes(at))} to be far above, found {wanted}"
    if kind == "rewind":
        wanted = list(range(at - LEFT_OUT + 1, at + 1))
    skipped = {one.step: one for one in facts(run, StepSkipped)}
    if sorted(skipped) != wanted:
        return f"wanted the steps {wanted} to be skipped, found {sorted(skipped)}"
    if kind in ("nan", "inf"):  # of a gradient alone: from the second time on
        for step in wanted[kind == "inf" :]:
            micro, one = comes(at)[step], skipped[step]
            who = owner(micro, world)
            if (one.micro_batches, one.ranks) != ((micro,), (who,)) or f" {at}" not in one.samples:
                return f"step {step}: wanted micro-batch {micro} of rank {who}, found {one}"
    left_out = ",".join(map(str, wanted))
    same = ["--poisoned", at] if kind == "poisoned" else []  # some of its steps are applied
    calm, _ = guarded(folder / "calm", other, "--leave-out", left_out, "--every", 5, *same)
    if found != calm:
        return f"other weights than those of {other} ranks with the same steps left out"
    report = audit(open_store(str(run)))
    notes = " ".join(one for one in report.notes if "guards" in one)
    if not report.ok or not all(f"step {step}: " in notes for step in wanted):
        return f"verify: {report.first_violation or notes}"
    return ""


def healthy(seed: int, folder: Path) -> tuple[str, int]:
    """Train without a fault; return what was wrong, "": nothing, and how many norms were clipped."""
    dice = random.Random(seed)
    flags = ["--seed", seed + 1, "--total", HEALTHY_STEPS, "--every", 80]
    flags += ["--reduce", dice.choice(("exact", "fast"))]
    world, run = dice.randint(1, 2), folder / "run"
    found, _ = guarded(run, world, *flags, "--guards", "default")
    alarms = [*facts(run, StepSkipped), *facts(run, GuardTripped)]
    if alarms:
        return f"a false alarm: {alarms[0]}", 0
    clipped = newest(run).data["state"]["guards"]["clipped"]
    if not clipped and guarded(folder / "plain", world, *flags)[0] != found:
        return "other weights than without guards", 0
    return "", clipped


def command(faults: int, calm: int, first: int, console: Console) -> int:
    """Run so many trainings of both kinds; print a table, and return 0 if all were as they must
    be."""
    good, bad, clipped = Counter[str](), list[str](), 0
    for seed in range(first, first + faults):
        with tempfile.TemporaryDirectory(prefix="harness-guards-") as folder:
            what = faulty(seed, Path(folder))
        kind = scenario(seed)[0]
        good[kind] += not what
        if what:
            bad.append(f"{kind}, seed {seed} {scenario(seed)[1:]}: {what}")
    for seed in range(first, first + calm):
        with tempfile.TemporaryDirectory(prefix="harness-guards-") as folder:
            what, some = healthy(seed, Path(folder))
        good["healthy"] += not what
        clipped += bool(some)
        if what:
            bad.append(f"healthy, seed {seed}: {what}")
    table = Table("training", "as it must be", "of")
    for place, kind in enumerate(KINDS):
        table.add_row(kind, str(good[kind]), str(len(range((place - first) % 5, faults, 5))))
    table.add_row(f"healthy ({clipped} clipped a norm)", str(good["healthy"]), str(calm))
    console.print(table)
    for line in bad:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if bad else 0
