"""`harness runs bisect`: run the steps before a failure again, on any number of workers, and name
the first bad step, its micro-batch and its samples.

The script records the loss and the norm of the gradients of each micro-batch
(`guards/gradient_watch.py`). The steps are judged by the rules of the run's guards, or by the
defaults, which remember what the run has recorded of the steps before. The run itself is only read;
everything happens in a scratch folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from harness.bucket.archive import read_facts
from harness.bucket.phases import phase_at, read_phases
from harness.core.facts import Fact, GuardTripped, SessionStarted, StepDone, StepSkipped
from harness.core.world import BadInput, HarnessError
from harness.guards.guard_rules import LEFT_OUT, SETTINGS, Guards, StepRules
from harness.lab.replay import copy_snapshot, environment_of, execute, halvings_of
from storage.snapshots.manifest import Manifest
from storage.snapshots.restore import ALLOWED, left_behind, rewinds
from storage.snapshots.retention import lineage
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store

BEFORE = 16  # steps that are run again before the one in question, at least
MOST_ANEW = 200  # steps that are run again from the beginning, if there is no snapshot
STANDS_OUT = 3.0  # times the median of the other micro-batches
MOST_SAME = 0.01  # relative difference of a loss that is the run's own, on another machine
# Without guards nothing stops the replay: what is not finite is left out.
WATCH_ONLY = Guards(clip_sigmas=0, skip_above=0)


@dataclass(frozen=True)
class StepLine:
    """A step as it was run again. `losses`, `norms`, `samples`: by micro-batch; `norms`: of its
    gradients, 0.0 where they are not known."""

    step: int
    loss: float
    norm: float
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    samples: tuple[str, ...]


@dataclass(frozen=True)
class Bisection:
    """The result. `why`: what is wrong with `line`, the first bad step; "": none was bad, and it is
    the last one. `micros`: its micro-batches that stand out; `ranks`: who did them in the run, by
    micro-batch; `before`: the loss of that step in the run (NaN: not recorded)."""

    first: int
    last: int
    line: StepLine
    why: str
    micros: tuple[int, ...]
    ranks: Mapping[int, int]
    before: float

    @property
    def differs(self) -> bool:
        """True if the run recorded another loss of the step, so that its machine is suspect."""
        known = math.isfinite(self.before) and math.isfinite(self.line.loss)
        return known and not math.isclose(self.before, self.line.loss, rel_tol=MOST_SAME)


def step_in_question(facts: Sequence[Fact]) -> int:
    """Return the newest step that guards or checks have named, not one that a rewind has left out.
    Raises BadInput."""
    named = [
        fact.step
        for fact in facts
        if isinstance(fact, GuardTripped)
        or (isinstance(fact, StepSkipped) and not fact.why.startswith(LEFT_OUT))
    ]
    if not named:
        raise BadInput(
            "no guard has named a step of this run; say which one: --step K "
            "(`harness data spikes` lists those that stand out)"
        )
    return named[-1]


def bisect(
    store: ObjectStore,
    scratch: Path,
    step: int,
    world: int,
    argv: Sequence[str],
    timeout_s: float = 3600.0,
) -> Bisection:
    """Run the steps up to `step` again with `world` workers of the script `argv`, in `scratch` (an
    empty folder), and judge them. `step` 0: see `step_in_question`.

    Raises BadInput (nothing to begin from, no whole replicas), HarnessError (the script failed).
    """
    facts = [one.fact for one in read_facts(store)]
    step = step or step_in_question(facts)
    manifest = _snapshot_before(store, step)
    identity = phase_at(read_phases(store), step).identity or {}
    done, start = _done(facts, step), manifest.step if manifest else 0
    told = _session_of(facts, step)
    first = told.epoch, told.world // max(1, len(told.shares))
    extra = environment_of(store, manifest, first, identity, world)
    state = manifest.data["state"].get("guards") if manifest else None
    guards = Guards(**state[SETTINGS]) if state else None
    path = scratch / "steps.jsonl"
    extra |= {
        "HARNESS_UNTIL_STEP": str(step),
        "HARNESS_HALVINGS": str(halvings_of(identity["micro_batch"], told.micro_batch)),
        "HARNESS_GUARDS": json.dumps(asdict(guards or WATCH_ONLY)),
        "HARNESS_STEP_LINES": str(path),
    }
    orders = [one for one in rewinds(store) if 0 < one.last < step]
    keys = [f"{ALLOWED}{one.epoch:06d}.json" for one in orders]
    copy_snapshot(store, open_store(str(scratch)), manifest, keys)
    execute(scratch, extra, world, argv, timeout_s)
    lines = read_lines(path)
    if [one.step for one in lines] != list(range(start + 1, step + 1)):
        raise HarnessError(
            f"the replay covered steps {[one.step for one in lines]}, wanted {start + 1} to {step}"
        )
    rules = StepRules(guards or Guards())
    # those that an earlier rewind has left out are known, and have spoiled nothing
    past = {n for order in orders for n in range(order.first, order.last + 1)}
    for one in done:
        if one.step <= start and one.grad_norm is not None and one.step not in past:
            rules.judge(one.step, one.loss, one.grad_norm)
    line, why = first_bad(rules, [one for one in lines if one.step not in past])
    before = next((one.loss for one in done if one.step == line.step), math.nan)
    micros = stand_out(line)
    ranks = owners(told.shares, len(line.losses))
    return Bisection(start + 1, step, line, why, micros, ranks, before)


def _done(facts: Sequence[Fact], step: int) -> list[StepDone]:
    """Return the steps up to `step` as they were done last, in order."""
    done = {one.step: one for one in facts if isinstance(one, StepDone) and one.step <= step}
    return [done[number] for number in sorted(done)]


def _session_of(facts: Sequence[Fact], step: int) -> SessionStarted:
    """Return the session that did this step last, or the newest one. Raises BadInput."""
    now = found = None
    for fact in facts:
        if isinstance(fact, SessionStarted):
            now = fact
        elif isinstance(fact, StepDone | StepSkipped | GuardTripped) and fact.step == step:
            found = now
    told = found or now
    if told is None:
        raise BadInput("this run has done no step, so none can be done again")
    return told


def _snapshot_before(store: ObjectStore, step: int) -> Manifest | None:
    """Return the newest snapshot of the run's line that leaves `BEFORE` steps to `step`, or its
    oldest one; None: begin anew. Raises BadInput if that would be a long way."""
    snapshots = Snapshots(store)
    refs = set(snapshots.refs())
    line = [one for one in lineage(refs - left_behind(refs, rewinds(store))) if one.step < step]
    if not line and step > MOST_ANEW:
        raise BadInput(
            f"there is no snapshot before step {step}; keep more with "
            "attach(keep_every_steps=...)"
        )
    ref = next((one for one in line if one.step <= step - BEFORE), line[-1] if line else None)
    return snapshots.load(ref) if ref else None


def read_lines(path: Path) -> list[StepLine]:
    """Return the steps that a script has recorded in this file; [] if there is none."""
    if not path.exists():
        return []
    found: list[StepLine] = []
    for text in path.read_text().splitlines():
        body: dict[str, Any] = json.loads(text)
        lists = {name: tuple(body[name]) for name in ("losses", "norms", "samples")}
        found.append(StepLine(**(body | lists)))
    return found


def first_bad(rules: StepRules, lines: Sequence[StepLine]) -> tuple[StepLine, str]:
    """Return the first step that the rules find bad, and why; the last step and "" if none is."""
    for line in lines:
        found = rules.judge(line.step, line.loss, line.norm)
        if found.skip:
            return line, found.skip
        if found.spike is not None:
            return line, f"the loss is {line.loss:.4g}, {found.spike[1]:.4g} is usual"
    return lines[-1], ""


def stand_out(line: StepLine) -> tuple[int, ...]:
    """Return the micro-batches whose loss or gradients are not finite, or else those far above the
    others'; (): they are all alike."""
    pairs = list(zip(line.losses, line.norms, strict=True))
    bad = tuple(m for m, pair in enumerate(pairs) if not all(map(math.isfinite, pair)))
    if bad:
        return bad
    found = set[int]()
    for values in zip(*pairs, strict=True):
        for micro, value in enumerate(values):
            others = [abs(other) for m, other in enumerate(values) if m != micro]
            if others and abs(value) > STANDS_OUT * median(others):
                found.add(micro)
    return tuple(sorted(found))


def owners(shares: Sequence[int], micro_batches: int) -> dict[int, int]:
    """Return the replica that did each micro-batch, by the shares of a generation; {} if these are
    not known."""
    found = [replica for replica, share in enumerate(shares) for _ in range(share)]
    return dict(enumerate(found)) if len(found) == micro_batches else {}


def print_bisection(found: Bisection, console: Console, url: str) -> int:
    """Print the result; return exit status 0 if a bad step was found."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    line = found.line
    if not found.why:
        say(f"steps {found.first}-{found.last} are as usual when they are run again")
        if found.micros:
            say(f"of step {line.step} these stand out:")
        if found.differs:
            say(
                f"the run had a loss of {found.before:.6g} in step {line.step}, here it is "
                f"{line.loss:.6g}: suspect the machine that computed it"
            )
    else:
        say(f"step {line.step} is the first bad one: {found.why}")
    if found.why and not found.micros:
        say(
            f"its micro-batches ({len(line.losses)}) are alike, so no sample is to blame: look at "
            "the learning rate, the precision and the steps before"
        )
    for micro in found.micros:
        who = f"rank {found.ranks[micro]}'s" if micro in found.ranks else "a"
        say(
            f"  micro-batch {micro} ({who} in the run): loss {line.losses[micro]:.4g}, gradient "
            f"norm {line.norms[micro]:.4g}; {line.samples[micro]}"
        )
    if found.micros:
        say(f"see them: harness data show CORPUS --run {url} --step {line.step}")
    return 0 if found.why or found.micros else 1
