"""The built-in alert rules: one for every harmful fact, each with a severity and an entry of the
same name in docs/RUNBOOK.md.

A rule looks at single facts as they come (`says`) or at conditions that hold at a moment (`holds`).
It is a plain function of the run's state (`AlertState`) and keeps no state; counting, waiting
(`for_s`) and cooling down belong to the evaluator (`alert_evaluator.py`). `custom_rules.py` makes
users' rules.

Pure: no store, no clock.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import parse_qsl

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.formatting import clock, duration, money, percent
from harness.core.setup_record import HARDWARE
from harness.core.world import DRAINED, FENCED, STOPPED
from harness.ledger.bill import BAD_ENDS
from harness.ledger.run_state import RunState
from harness.look.alerts.alert_log import CRITICAL, INFO, WARNING

# The state that alert rules read: a fold of a run's facts, with a short memory.

IDLE_BELOW = 10.0  # percent of a GPU's time
RECENT, BASE = 20, 500  # steps
COMMITS = 64  # newest snapshots from which a run's pace is computed
SLOWER = 1.3  # times the usual step
SPIKE, FREAK = 1.5, 10.0  # multiples of the usual loss, and of the usual distance from it
BROKEN = ("failed", "killed", "hung", "unfit", "peer-lost")  # facts.EpochLeft.why


@dataclass(frozen=True)
class EvaluatorInputs:
    """Observations that an evaluator makes without facts, by its own clock. None: it does not look,
    or all is well. Times are wall clock seconds."""

    leader_silent_s: float | None = None  # since when the lease's heartbeat stands still
    bucket_silent_s: float | None = None  # how long the bucket did not answer, until just now


@dataclass
class Speeds:
    """Step times by world size: slower steps on another number of ranks are no regression."""

    world: int = 0
    epoch: int = 0
    base: dict[int, deque[float]] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _count: int = 0
    _every: int = 1  # every n-th step enters the base; n grows while steps are much slower

    def add(self, step: f.StepDone, world: int) -> None:
        if step.epoch < self.epoch:
            return
        self._count += 1
        if (world, step.epoch) != (self.world, self.epoch):
            self.recent.clear()
            self.world, self.epoch, self._every = world, step.epoch, 1
        if len(self.recent) == RECENT and self._count % self._every == 0:
            self.base.setdefault(world, deque(maxlen=BASE)).append(self.recent[0])
        self.recent.append(step.seconds)
        if self._count % RECENT == 0:
            found = self.slowdown()
            self._every = 10 if found and found[0] > SLOWER * found[1] else 1

    def slowdown(self) -> tuple[float, float] | None:
        """Return the median seconds of the recent steps, and of earlier ones of this world size.
        None: too few steps."""
        known = self.base.get(self.world, ())
        if len(known) < RECENT or len(self.recent) < RECENT:
            return None
        return median(self.recent), median(known)


@dataclass
class RecentLosses:
    """The losses of the last steps. `limit`: the bound that the newest loss is compared with. It is
    updated only every few steps, so that a million of them cost little."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    usual: float = math.nan
    limit: float = math.inf
    _next_limit: float = math.inf
    _count: int = 0

    def add(self, loss: float) -> None:
        self.limit = self._next_limit
        if not math.isfinite(loss):
            return
        self.recent.append(loss)
        self._count += 1
        if self._count % RECENT == 0 and len(self.recent) >= 50:
            self.usual = median(self.recent)
            far = median(abs(x - self.usual) for x in self.recent)
            self._next_limit = self.usual + max(FREAK * far, (SPIKE - 1) * abs(self.usual))


@dataclass
class AlertState:
    """The state that rules may read, kept by `apply`."""

    live: RunState = field(default_factory=RunState)
    sight: EvaluatorInputs = field(default_factory=EvaluatorInputs)
    started_s: float | None = None  # when this run was first requested
    session_s: float | None = None  # when the newest world was ready to train
    replicated: dict[str, tuple[int, int]] = field(default_factory=dict)  # (epoch, step) by URL
    broken: list[int] = field(default_factory=list)  # generations that broke since the last commit
    refused_s: float | None = None  # since when there is no capacity while no node is up
    speeds: Speeds = field(default_factory=Speeds)
    losses: RecentLosses = field(default_factory=RecentLosses)
    idle_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (member, GPU) -> since
    last_s: dict[str, float] = field(default_factory=dict)  # kind of fact -> time of the newest one

    def apply(self, stamped: Stamped) -> None:
        t, fact = stamped.t, stamped.fact
        self.live.add(stamped)
        self.last_s[fact.kind] = max(t, self.last_s.get(fact.kind, t))
        match fact:
            case f.RunAsked():
                self.started_s = t if self.started_s is None else min(t, self.started_s)
            case f.SessionStarted(epoch) if epoch >= self.live.epoch:
                self.session_s = t
            case f.SnapshotCommitted():
                self.broken.clear()
            case f.SnapshotReplicated(step, epoch, url):
                self.replicated[url] = max((epoch, step), self.replicated.get(url, (0, 0)))
            case f.EpochLeft(epoch, _, why) if why in BROKEN and epoch not in self.broken:
                self.broken.append(epoch)
            case f.AttemptEnded(_, "no-capacity"):
                self.refused_s = t if self.refused_s is None else self.refused_s
            case f.AttemptUp() | f.AgentStarted():
                self.refused_s = None
            case f.StepDone():
                self.losses.add(fact.loss)
                world = self.live.worlds.get(fact.epoch)
                self.speeds.add(fact, world.world if world else 0)
            case f.NodeMeasured():
                self._measured(t, fact)

    def _measured(self, t: float, fact: f.NodeMeasured) -> None:
        for name, value in fact.metrics.items():
            gpu, _, what = name.partition("/")
            if gpu.startswith("gpu") and what == "percent":
                if value < IDLE_BELOW:
                    self.idle_s.setdefault((fact.member, gpu), t - fact.seconds)
                else:
                    self.idle_s.pop((fact.member, gpu), None)

    @property
    def commits(self) -> list[tuple[float, f.SnapshotCommitted]]:
        """The newest snapshots, each with the time of its commit."""
        return self.live.snapshots[-COMMITS:]

    # ---- values that several rules need ----------------------------------------------------------
    @property
    def trains(self) -> bool:
        """True if a world is ready and no member has left it."""
        return self.live.begun and bool(self.live.training())

    @property
    def nodes_up(self) -> int:
        return sum(
            n.alive and (n.up_s is not None or bool(n.members)) for n in self.live.nodes.values()
        )

    def hours_left(self, now_s: float) -> float | None:
        """Return the hours until the last step at the pace of the newest commits, interruptions
        included. None: not known."""
        if len(self.commits) < 2 or not self.live.total:
            return None
        (begin_s, first), step = self.commits[0], self.live.committed[0]
        done, spent_s = step - first.step, now_s - begin_s
        if done <= 0 or spent_s <= 0:
            return None
        return max(0, self.live.total - step) * spent_s / done / 3600

    def snapshot_limit_s(self) -> float:
        """Return the age (s) from which the newest snapshot counts as late: three times the usual
        time between two snapshots, at least five minutes; two hours while that time is unknown."""
        epoch = self.live.epoch
        same = [t for t, c in self.commits if c.epoch == epoch]
        gaps = [b - a for a, b in itertools.pairwise(same) if b > a]
        return max(300.0, 3 * median(gaps[-10:])) if gaps else 7200.0

    def behind_s(self, url: str) -> float | None:
        """Return since when a second bucket lacks a committed snapshot; None: it lacks nothing."""
        there = self.replicated[url]
        return next((t for t, c in self.commits if (c.epoch, c.step) > there), None)


MINUTE, HOUR = 60.0, 3600.0
LITTLE_LEFT = 0.9  # share of a budget


@dataclass(frozen=True)
class Symptom:
    """A rule's finding. `subject`: what it is about; alerts of one rule are counted per subject.
    `since_s`: since when it holds (wall clock, s), if known."""

    title: str
    text: str
    subject: str = ""
    since_s: float | None = None


Says = Callable[[Stamped, AlertState], "Symptom | Iterable[Symptom] | None"]
Holds = Callable[[AlertState, float], Iterable[Symptom]]


@dataclass(frozen=True)
class AlertRule:
    """A rule of one of two forms, which does not fire again about the same subject for
    `cool_down_s` (s).

    `says` is called with each fact of `kinds`. The rule fires when it found something `count` times
    within `within_s`, and counts as firing for some minutes. `holds` is called with the state of
    the run, and the rule fires when a condition has held for `for_s`, for as long as it holds;
    `kinds` then only names the facts that the rule answers for."""

    name: str
    severity: str
    kinds: tuple[type[f.Fact], ...]
    says: Says | None = None
    holds: Holds | None = None
    for_s: float = 0.0
    cool_down_s: float = 10 * MINUTE
    count: int = 1
    within_s: float = 0.0


def _who(run: AlertState, member: str) -> str:
    return f"node {run.live.attempt_of.get(member, member)}"


# ---- single facts --------------------------------------------------------------------------------
def _notice(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    until = "" if fact.deadline_s is None else f" at {clock(fact.deadline_s)}"
    kind = {"soft": "may be preempted", "maintenance": "goes into maintenance"}
    verb = kind.get(fact.notice, "will be preempted")
    who = _who(run, fact.member)
    return Symptom(f"{who} {verb}", f"{fact.notice} notice from {fact.source}{until}", fact.member)


def _grace(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.step <= fact.committed_step:
        return None
    text = f"{_who(run, fact.member)} is at step {fact.step}, {fact.committed_step} is committed"
    return Symptom("a notice's time is over", f"{text}. {fact.verdict}", fact.member)


def _drain_lost(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.committed:
        return None
    text = (
        f"{_who(run, fact.member)}: rank {fact.rank}'s share did not arrive in time (forecast: "
        f"{fact.need_s:.1f} s of {fact.left_s:.1f} s); step {fact.last_good_step} is committed"
    )
    return Symptom(f"snapshot of step {fact.step} was lost at a deadline", text)


def _hung(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if not fact.guilty:
        return None
    where = f"silent for {fact.silent_s:.0f} s in {fact.place} at step {fact.step}"
    return Symptom(f"rank {fact.rank} hangs", f"{_who(run, fact.member)}: {where}. {fact.what}")


def _worker(stamped: Stamped, run: AlertState) -> Symptom | None:
    """Return a finding at the end of the generation (the code's `epoch`). A failure that the loss
    of a peer caused has another `why` and does not count as the worker's own."""
    match stamped.fact:
        case f.EpochLeft(epoch, member, "failed" | "killed"):
            world = run.live.worlds[epoch]
            mine = [w for w in world.failures if w.member == member]
            if any(w.error in f.MEMORY_RAN_OUT for w in mine):
                return None  # another rule tells it
            who = f"{_who(run, member)}, generation {epoch}"
            if mine:
                return Symptom(
                    f"rank {mine[0].rank} failed", f"{who}: {mine[0].error}: {mine[0].message}"
                )
            return Symptom(f"workers of {_who(run, member)} failed", who)
    return None


def _out_of_memory(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.error not in f.MEMORY_RAN_OUT:
        return None
    text = f"{_who(run, fact.member)}, generation {fact.epoch}: {fact.message}"
    return Symptom(f"rank {fact.rank} ran out of memory", text)


def _crash_loop(stamped: Stamped, run: AlertState) -> Symptom | None:
    if len(run.broken) < 3:
        return None
    numbers = ", ".join(map(str, run.broken[-5:]))
    step = run.live.committed[0]
    text = f"generations {numbers} broke in a row; nothing was committed after step {step}"
    return Symptom(f"{len(run.broken)} generations broke without a new snapshot", text)


def _node_lost(stamped: Stamped, run: AlertState) -> Iterator[Symptom]:
    """Yield lost nodes. The controller's fact and the next world's (often sooner) count once."""
    match stamped.fact:
        case f.AttemptEnded(attempt, end, reason=reason) if end in BAD_ENDS:
            why = f": {reason}" if reason and reason != end else ""
            text = f"attempt {attempt} ended: {end}{why}"
            yield Symptom(f"node {attempt} is lost", text, str(attempt))
        # "start": the whole last world is gone, and some members may have recorded no reason
        case f.EpochStarted(epoch, members, world, "loss" | "start"):
            earlier = [w for n, w in run.live.worlds.items() if n < epoch and w.begun]
            before = max(earlier, key=lambda w: w.number, default=None)
            old = before.begun.members if before and before.begun else ()
            left = {fact.member for _, fact in before.left} if before else set()
            text = f"generation {epoch} goes on with {len(members)} nodes and {world} ranks"
            gone = [m for m in old if m not in members and m not in left]
            for name in sorted({run.live.attempt_of.get(m, m) for m in gone}):
                yield Symptom(f"node {name} is lost", text, name)


def _agent_ended(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.exit_code in (0, DRAINED, STOPPED):
        return None
    who = _who(run, fact.member)
    return Symptom(f"{who} left with status {fact.exit_code}", fact.reason, fact.member)


def _gpu(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.action == "ignore":
        return None
    done = f" The node: {fact.action}." if fact.action else ""
    text = f"{_who(run, fact.member)}, GPU {fact.gpu or '(driver)'}: {fact.message}.{done}"
    return Symptom(f"GPU: {fact.what}", text, fact.member)


def _guard(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.what == f.LOSS_SPIKE:
        return None  # `_loss_spike`
    return Symptom(f"guard: {fact.what}", f"step {fact.step}: {fact.value:g}")


def _skipped(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    where = f"; {fact.samples}" if fact.samples else ""
    return Symptom("an update is skipped", f"step {fact.step}: {fact.why}{where}")


def _loss_spike(stamped: Stamped, run: AlertState) -> Symptom | None:
    """Compare the loss with those of the steps before it, or take a guard's word for it."""
    fact: Any = stamped.fact
    if isinstance(fact, f.GuardTripped):
        text = f"step {fact.step}: {fact.value:.4g}"
        return Symptom("the loss spikes", text) if fact.what == f.LOSS_SPIKE else None
    if not math.isfinite(fact.loss):
        return Symptom("the loss is not finite", f"step {fact.step}: {fact.loss}")
    if fact.loss <= run.losses.limit:
        return None
    text = f"step {fact.step}: {fact.loss:.4g}, usual is {run.losses.usual:.4g}"
    return Symptom("the loss spikes", text)


def _snapshot_failed(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    return Symptom(f"snapshot of step {fact.step} failed", fact.why)


def _quarantined(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    text = f"generation {fact.epoch}: {fact.why}"
    return Symptom(f"snapshot of step {fact.step} is not used", text)


def _weakened(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    subject = re.sub(r"[^A-Za-z]+", " ", fact.what)[:60]  # its numbers may differ
    if fact.what.startswith(f.NOT_ELASTIC):
        return Symptom(f.NOT_ELASTIC, fact.what.removeprefix(f.NOT_ELASTIC).lstrip(". "), subject)
    return Symptom("a promise is weakened", f"step {fact.step}: {fact.what}", subject)


def _setup(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.action == "accepted" or all(c.get("level") == HARDWARE for c in fact.changes):
        return None
    said = [f"{c.get('name', '?')}: {c.get('was', '')} -> {c.get('now', '')}" for c in fact.changes]
    text = "; ".join(said) + (f"; and {fact.more} more" if fact.more else "")
    return Symptom(f"the run's setup changed ({fact.action})", f"generation {fact.epoch}: {text}")


def _helper(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    text = f"{_who(run, fact.member)}: it ended with status {fact.exit_code}: {fact.why}"
    where = "of a node" if fact.helper == "uploader" else "beside rank 0"
    return Symptom(f"the {fact.helper} {where} died", text, fact.helper)


def _publisher(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    return _helper(stamped, run) if fact.helper == "trackers" else None


def _other_helper(stamped: Stamped, run: AlertState) -> Symptom | None:
    fact: Any = stamped.fact
    return _helper(stamped, run) if fact.helper != "trackers" else None


def _run_ended(stamped: Stamped, run: AlertState) -> Symptom | None:
    match stamped.fact:
        case f.RunEnded(outcome, reason, step) if outcome != "done":
            return Symptom(f"run {outcome}", f"after step {step}: {reason}")
        case f.AgentEnded(_, code, reason) if (
            code == STOPPED and run.live.lease is None
        ):  # no controller is there to record the end
            return Symptom("run stopped", f"after step {run.live.committed[0]}: {reason}")
    return None


def _store(stamped: Stamped, run: AlertState) -> Symptom | None:
    match stamped.fact:
        case f.AgentEnded(member, code, reason) if code == FENCED:
            return Symptom("a node had to give the bucket up", f"{_who(run, member)}: {reason}")
        case f.WorkerFailed(error=error, message=message) if error.startswith("Store"):
            return Symptom("a worker had no answer from the bucket", f"{error}: {message}")
        case f.Decided("skip", reason) if "cannot be read" in reason:
            return Symptom("facts in the bucket cannot be read", reason)
    return None


# ---- what holds ----------------------------------------------------------------------------------
def _bucket_silent(run: AlertState, now_s: float) -> Iterator[Symptom]:
    silent_s = run.sight.bucket_silent_s
    if silent_s is not None and silent_s >= MINUTE:
        text = f"the bucket did not answer for {duration(silent_s)}; it does again"
        yield Symptom("the bucket was silent", text, since_s=now_s)


def _no_capacity(run: AlertState, now_s: float) -> Iterator[Symptom]:
    if run.refused_s is not None and not run.nodes_up and not run.live.over:
        text = f"refused {run.live.refused} times since {clock(run.refused_s)}, and no node is up"
        yield Symptom("no capacity", text, since_s=run.refused_s)


def _leader_gone(run: AlertState, now_s: float) -> Iterator[Symptom]:
    since_s = run.sight.leader_silent_s
    if since_s is not None and run.live.lease is not None and not run.live.over:
        text = f"the controller {run.live.lease[1].holder} is silent since {clock(since_s)}"
        yield Symptom(
            "nobody leads the run", f"{text}; lost nodes are not replaced", since_s=since_s
        )


def _deadline_s(run: AlertState) -> float | None:
    """Return the deadline (wall clock, s): `--max-hours`, or a policy's `deadline_h`; else None."""
    if run.live.asked is None or run.started_s is None:
        return None
    asked = run.live.asked[1]
    hours = asked.max_hours
    if hours is None:
        said = dict(parse_qsl(asked.policy.partition("?")[2])).get("deadline_h", "")
        hours = float(said) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", said) else None
    return None if hours is None else run.started_s + hours * HOUR


def _deadline(run: AlertState, now_s: float) -> Iterator[Symptom]:
    deadline_s, hours = _deadline_s(run), run.hours_left(now_s)
    if deadline_s is None or hours is None or run.live.over:
        return
    late_s = now_s + hours * HOUR - deadline_s
    if late_s > 0 and hours > 0:
        text = (
            f"at this pace the last step comes in {duration(hours * HOUR)}, and "
            f"{duration(max(0.0, deadline_s - now_s))} are left: {duration(late_s)} too late"
        )
        yield Symptom("the deadline is at risk", text)


def _budget(run: AlertState, now_s: float) -> Iterator[Symptom]:
    budget = run.live.asked[1].budget_usd if run.live.asked else None
    if not budget or run.live.over:
        return
    spent, _ = run.live.spent(now_s)
    rate, hours = run.live.usd_per_h(), run.hours_left(now_s)
    said = f"{money(spent)} of {money(budget)} are spent, at {money(rate)} an hour"
    if hours is not None and spent + rate * hours > budget:
        needs = money(spent + rate * hours)
        yield Symptom("the budget is at risk", f"{said}; at this pace the run needs {needs}")
    elif spent >= LITTLE_LEFT * budget and (hours is None or hours > 0):
        yield Symptom("the budget is at risk", f"{said}: {percent(spent / budget)}")


def _snapshot_late(run: AlertState, now_s: float) -> Iterator[Symptom]:
    if not run.trains or run.session_s is None:
        return
    limit_s = run.snapshot_limit_s()
    last_s = max([run.session_s, *(t for t, _ in run.commits[-1:])])
    if now_s - last_s > limit_s:
        step = run.live.committed[0]
        text = (
            f"nothing was committed for {duration(now_s - last_s)}, more than {duration(limit_s)}; "
            f"step {step} is committed, training is at {run.live.step}"
        )
        yield Symptom("no new snapshot", text, since_s=last_s + limit_s)


def _replica_behind(run: AlertState, now_s: float) -> Iterator[Symptom]:
    for url, (_, step) in run.replicated.items():
        if (since_s := run.behind_s(url)) is not None:
            text = f"step {step} is there, {run.live.committed[0]} is committed"
            yield Symptom("the second bucket is behind", text, since_s=since_s)


def _idle_gpu(run: AlertState, now_s: float) -> Iterator[Symptom]:
    if not run.trains or run.session_s is None:
        return
    training = set(run.live.training())
    for member in sorted({m for m, _ in run.idle_s if m in training}):
        gpus = [(gpu, s) for (m, gpu), s in run.idle_s.items() if m == member]
        since_s = max(min(s for _, s in gpus), run.session_s)
        names = ", ".join(gpu for gpu, _ in gpus)
        text = f"{_who(run, member)}: {names} below 10 % since {clock(since_s)}, while it trains"
        yield Symptom("an idle GPU", text, member, since_s)


def _slower(run: AlertState, now_s: float) -> Iterator[Symptom]:
    found = run.speeds.slowdown() if run.trains else None
    if found is not None and found[0] > SLOWER * found[1]:
        text = f"{found[0]:.3g} s a step, {found[1]:.3g} s were usual with {run.speeds.world} ranks"
        yield Symptom("steps are slower", text)


# ---- the table -----------------------------------------------------------------------------------
BUILT_IN: tuple[AlertRule, ...] = (
    AlertRule("notice-seen", INFO, (f.NoticeSeen,), _notice),
    AlertRule("grace-spent", WARNING, (f.GraceSpent,), _grace),
    AlertRule("drain-lost", WARNING, (f.DrainVerdict,), _drain_lost, cool_down_s=5 * MINUTE),
    AlertRule("node-lost", WARNING, (f.AttemptEnded, f.EpochStarted), _node_lost),
    AlertRule("agent-ended", WARNING, (f.AgentEnded,), _agent_ended),
    AlertRule(
        "worker-failed", WARNING, (f.WorkerFailed, f.EpochLeft), _worker, cool_down_s=5 * MINUTE
    ),
    AlertRule("out-of-memory", WARNING, (f.WorkerFailed,), _out_of_memory, cool_down_s=5 * MINUTE),
    AlertRule("worker-hung", CRITICAL, (f.WorkerHung,), _hung, cool_down_s=5 * MINUTE),
    AlertRule("crash-loop", CRITICAL, (f.EpochLeft,), _crash_loop, cool_down_s=HOUR),
    AlertRule("gpu-health", WARNING, (f.HealthSeen,), _gpu),
    AlertRule("guard-tripped", CRITICAL, (f.GuardTripped,), _guard),
    AlertRule("step-skipped", WARNING, (f.StepSkipped,), _skipped, cool_down_s=30 * MINUTE),
    AlertRule(
        "loss-spike",
        WARNING,
        (f.StepDone, f.GuardTripped),
        _loss_spike,
        cool_down_s=30 * MINUTE,
    ),
    AlertRule("snapshot-failed", WARNING, (f.SnapshotFailed,), _snapshot_failed),
    AlertRule("snapshot-quarantined", WARNING, (f.SnapshotQuarantined,), _quarantined),
    AlertRule("promise-weakened", WARNING, (f.Warned,), _weakened, cool_down_s=6 * HOUR),
    AlertRule("setup-changed", WARNING, (f.SetupChanged,), _setup, cool_down_s=HOUR),
    AlertRule("publisher-dead", WARNING, (f.HelperEnded,), _publisher, cool_down_s=HOUR),
    AlertRule("helper-dead", WARNING, (f.HelperEnded,), _other_helper, cool_down_s=HOUR),
    AlertRule("run-ended-badly", CRITICAL, (f.RunEnded, f.AgentEnded), _run_ended, cool_down_s=60),
    AlertRule(
        "store-trouble",
        WARNING,
        (f.AgentEnded, f.WorkerFailed, f.Decided),
        _store,
        _bucket_silent,
        cool_down_s=30 * MINUTE,
    ),
    AlertRule(
        "no-capacity",
        WARNING,
        (f.AttemptEnded,),
        holds=_no_capacity,
        for_s=10 * MINUTE,
        cool_down_s=3 * HOUR,
    ),
    AlertRule(
        "controller-gone",
        CRITICAL,
        (f.LeaseTaken,),
        holds=_leader_gone,
        for_s=MINUTE,
        cool_down_s=HOUR,
    ),
    AlertRule(
        "deadline-at-risk",
        WARNING,
        (f.RunAsked,),
        holds=_deadline,
        for_s=10 * MINUTE,
        cool_down_s=12 * HOUR,
    ),
    AlertRule(
        "budget-at-risk",
        WARNING,
        (f.RunAsked,),
        holds=_budget,
        for_s=5 * MINUTE,
        cool_down_s=12 * HOUR,
    ),
    AlertRule(
        "snapshot-late", WARNING, (f.SnapshotCommitted,), holds=_snapshot_late, cool_down_s=HOUR
    ),
    AlertRule(
        "replica-behind",
        WARNING,
        (f.SnapshotReplicated,),
        holds=_replica_behind,
        for_s=15 * MINUTE,
        cool_down_s=6 * HOUR,
    ),
    AlertRule(
        "idle-gpu",
        WARNING,
        (f.NodeMeasured,),
        holds=_idle_gpu,
        for_s=10 * MINUTE,
        cool_down_s=6 * HOUR,
    ),
    AlertRule(
        "throughput-regression",
        WARNING,
        (f.StepDone,),
        holds=_slower,
        for_s=2 * MINUTE,
        cool_down_s=2 * HOUR,
    ),
)
