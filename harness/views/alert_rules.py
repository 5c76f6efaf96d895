"""The rules of alerts that ship: every fact that hurts, with a severity and an entry in
docs/RUNBOOK.md of the same name.

A rule looks at single facts as they come (`says`), or at what holds at a moment (`holds`). It is a
plain function of what is known (`RunSoFar`) and keeps nothing; counting, waiting (`for_s`) and
cooling down are the evaluator's (`alerts.py`). Rules of users are made in `alert_own.py`.

Pure: no store, no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from harness.bucket.alerts import CRITICAL, INFO, WARNING
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.setups import HARDWARE
from harness.core.world import DRAINED, FENCED, STOPPED
from harness.views.alert_state import SLOWER, RunSoFar
from harness.views.rows import BAD_ENDS
from harness.views.words import clock, duration, money, percent

MINUTE, HOUR = 60.0, 3600.0
LITTLE_LEFT = 0.9  # of a budget


@dataclass(frozen=True)
class Symptom:
    """What a rule found. `subject`: what it is about, where alerts of one rule are counted apart;
    `since_s`: since when it holds, if that is known (wall clock)."""

    title: str
    text: str
    subject: str = ""
    since_s: float | None = None


Says = Callable[[Stamped, RunSoFar], "Symptom | Iterable[Symptom] | None"]
Holds = Callable[[RunSoFar, float], Iterable[Symptom]]


@dataclass(frozen=True)
class AlertRule:
    """`kinds`: the facts that it is about. It fires when `says` found something `count` times
    within `within_s` (s), or when something `holds` for `for_s`; then not again about the same
    subject for `cool_down_s`."""

    name: str
    severity: str
    kinds: tuple[type[f.Fact], ...]
    says: Says | None = None
    holds: Holds | None = None
    for_s: float = 0.0
    cool_down_s: float = 10 * MINUTE
    count: int = 1
    within_s: float = 0.0


def _who(run: RunSoFar, member: str) -> str:
    return f"node {run.live.attempt_of.get(member, member)}"


# ---- single facts --------------------------------------------------------------------------------
def _notice(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    until = "" if fact.deadline_s is None else f" at {clock(fact.deadline_s)}"
    kind = {"soft": "may be taken", "maintenance": "goes into maintenance"}
    verb = kind.get(fact.notice, "will be taken")
    who = _who(run, fact.member)
    return Symptom(f"{who} {verb}", f"{fact.notice} notice from {fact.source}{until}", fact.member)


def _grace(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.step <= fact.committed_step:
        return None
    text = f"{_who(run, fact.member)} is at step {fact.step}, {fact.committed_step} is committed"
    return Symptom("a notice's time is over", f"{text}. {fact.verdict}", fact.member)


def _drain_lost(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.committed:
        return None
    text = (
        f"{_who(run, fact.member)}: rank {fact.rank}'s share did not arrive in time (forecast: "
        f"{fact.need_s:.1f} s of {fact.left_s:.1f} s); step {fact.last_good_step} is committed"
    )
    return Symptom(f"snapshot of step {fact.step} was lost at a deadline", text)


def _hung(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if not fact.guilty:
        return None
    where = f"silent for {fact.silent_s:.0f} s in {fact.place} at step {fact.step}"
    return Symptom(f"rank {fact.rank} hangs", f"{_who(run, fact.member)}: {where}. {fact.what}")


def _worker(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    """Told when its epoch's end is judged: what fails because a peer was lost is no failure of its
    own."""
    match stamped.fact:
        case f.EpochLeft(epoch, member, "failed" | "killed"):
            mine = [w for w in run.failures if (w.epoch, w.member) == (epoch, member)]
            who = f"{_who(run, member)}, epoch {epoch}"
            if mine:
                return Symptom(
                    f"rank {mine[0].rank} failed", f"{who}: {mine[0].error}: {mine[0].message}"
                )
            return Symptom(f"workers of {_who(run, member)} failed", who)
    return None


def _crash_loop(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    if len(run.broken) < 3:
        return None
    epochs = ", ".join(map(str, run.broken[-5:]))
    step = run.live.committed[0]
    text = f"epochs {epochs} broke one after the other, and nothing was committed after step {step}"
    return Symptom(f"{len(run.broken)} epochs broke without a new snapshot", text)


def _node_lost(stamped: Stamped, run: RunSoFar) -> Iterator[Symptom]:
    """Its controller says so, or the next world, which is sooner there: the same subject."""
    match stamped.fact:
        case f.AttemptEnded(attempt, end, reason=reason) if end in BAD_ENDS:
            why = f": {reason}" if reason and reason != end else ""
            text = f"attempt {attempt} ended: {end}{why}"
            yield Symptom(f"node {attempt} is lost", text, str(attempt))
        # "start": all of the last world are gone, and some of them may have said nothing
        case f.EpochStarted(epoch, members, world, "loss" | "start"):
            before = max((n for n in run.live.epochs if n < epoch), default=0)
            old = run.live.epochs[before].members if before else ()
            left = run.live.left.get(before, {})
            text = f"epoch {epoch} goes on with {len(members)} nodes and {world} ranks"
            gone = [m for m in old if m not in members and m not in left]
            for name in sorted({run.live.attempt_of.get(m, m) for m in gone}):
                yield Symptom(f"node {name} is lost", text, name)


def _agent_ended(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.exit_code in (0, DRAINED, STOPPED):
        return None
    who = _who(run, fact.member)
    return Symptom(f"{who} left with status {fact.exit_code}", fact.reason, fact.member)


def _gpu(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.action == "ignore":
        return None
    done = f" The node: {fact.action}." if fact.action else ""
    text = f"{_who(run, fact.member)}, GPU {fact.gpu or '(driver)'}: {fact.message}.{done}"
    return Symptom(f"GPU: {fact.what}", text, fact.member)


def _guard(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    return Symptom(f"guard: {fact.what}", f"step {fact.step}: {fact.value:g}")


def _loss_spike(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    """Against the steps before it."""
    fact: Any = stamped.fact
    if not math.isfinite(fact.loss):
        return Symptom("the loss is not finite", f"step {fact.step}: {fact.loss}")
    if fact.loss <= run.losses.limit:
        return None
    text = f"step {fact.step}: {fact.loss:.4g}, usual is {run.losses.usual:.4g}"
    return Symptom("the loss spikes", text)


def _snapshot_failed(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    return Symptom(f"snapshot of step {fact.step} failed", fact.why)


def _quarantined(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    return Symptom(f"snapshot of step {fact.step} is not used", f"epoch {fact.epoch}: {fact.why}")


def _weakened(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    subject = re.sub(r"[^A-Za-z]+", " ", fact.what)[:60]  # the same again, with other numbers
    return Symptom("a promise is weakened", f"step {fact.step}: {fact.what}", subject)


def _setup(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    if fact.action == "accepted" or all(c.get("level") == HARDWARE for c in fact.changes):
        return None
    said = [f"{c.get('name', '?')}: {c.get('was', '')} -> {c.get('now', '')}" for c in fact.changes]
    text = "; ".join(said) + (f"; and {fact.more} more" if fact.more else "")
    return Symptom(f"the run's setup changed ({fact.action})", f"epoch {fact.epoch}: {text}")


def _helper(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    text = f"{_who(run, fact.member)}: it ended with status {fact.exit_code}: {fact.why}"
    return Symptom(f"the {fact.helper} beside rank 0 died", text, fact.helper)


def _publisher(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    return _helper(stamped, run) if fact.helper == "trackers" else None


def _other_helper(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    fact: Any = stamped.fact
    return _helper(stamped, run) if fact.helper != "trackers" else None


def _run_ended(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    match stamped.fact:
        case f.RunEnded(outcome, reason, step) if outcome != "done":
            return Symptom(f"run {outcome}", f"after step {step}: {reason}")
        case f.AgentEnded(_, code, reason) if (
            code == STOPPED and run.live.lease is None
        ):  # nobody leads it
            return Symptom("run stopped", f"after step {run.live.committed[0]}: {reason}")
    return None


def _store(stamped: Stamped, run: RunSoFar) -> Symptom | None:
    match stamped.fact:
        case f.AgentEnded(member, code, reason) if code == FENCED:
            return Symptom("a node had to give the bucket up", f"{_who(run, member)}: {reason}")
        case f.WorkerFailed(error=error, message=message) if error.startswith("Store"):
            return Symptom("a worker had no answer from the bucket", f"{error}: {message}")
        case f.Decided("skip", reason) if "cannot be read" in reason:
            return Symptom("facts in the bucket cannot be read", reason)
    return None


# ---- what holds ----------------------------------------------------------------------------------
def _bucket_silent(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    silent_s = run.sight.bucket_silent_s
    if silent_s is not None and silent_s >= MINUTE:
        text = f"the bucket did not answer for {duration(silent_s)}; it does again"
        yield Symptom("the bucket was silent", text, since_s=now_s)


def _no_capacity(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    if run.refused_s is not None and not run.nodes_up and not run.live.over:
        text = f"refused {run.live.refused} times since {clock(run.refused_s)}, and no node is up"
        yield Symptom("no capacity", text, since_s=run.refused_s)


def _leader_gone(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    since_s = run.sight.leader_silent_s
    if since_s is not None and run.live.lease is not None and not run.live.over:
        text = f"the controller {run.live.lease[1].holder} is silent since {clock(since_s)}"
        yield Symptom(
            "nobody leads the run", f"{text}; lost nodes are not replaced", since_s=since_s
        )


def _deadline_s(run: RunSoFar) -> float | None:
    """Of the run, wall clock: `--max-hours`, or a policy's own `deadline_h`."""
    if run.live.asked is None or run.started_s is None:
        return None
    asked = run.live.asked[1]
    hours = asked.max_hours
    if hours is None:
        said = dict(parse_qsl(asked.policy.partition("?")[2])).get("deadline_h", "")
        hours = float(said) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", said) else None
    return None if hours is None else run.started_s + hours * HOUR


def _deadline(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
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


def _budget(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
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


def _snapshot_late(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    if not run.trains or run.session_s is None:
        return
    limit_s = run.snapshot_limit_s()
    last_s = max([run.session_s, *(t for t, _ in list(run.commits)[-1:])])
    if now_s - last_s > limit_s:
        step = run.live.committed[0]
        text = (
            f"nothing was committed for {duration(now_s - last_s)}, more than {duration(limit_s)}; "
            f"step {step} is committed, training is at {run.live.step}"
        )
        yield Symptom("no new snapshot", text, since_s=last_s + limit_s)


def _replica_behind(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    for url, (_, step) in run.replicated.items():
        if (since_s := run.behind_s(url)) is not None:
            text = f"step {step} is there, {run.live.committed[0]} is committed"
            yield Symptom("the second bucket is behind", text, since_s=since_s)


def _idle_gpu(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
    if not run.trains or run.session_s is None:
        return
    training = set(run.live.training())
    for member in sorted({m for m, _ in run.idle_s if m in training}):
        gpus = [(gpu, s) for (m, gpu), s in run.idle_s.items() if m == member]
        since_s = max(min(s for _, s in gpus), run.session_s)
        names = ", ".join(gpu for gpu, _ in gpus)
        text = f"{_who(run, member)}: {names} below 10 % since {clock(since_s)}, while it trains"
        yield Symptom("an idle GPU", text, member, since_s)


def _slower(run: RunSoFar, now_s: float) -> Iterator[Symptom]:
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
    AlertRule("worker-hung", CRITICAL, (f.WorkerHung,), _hung, cool_down_s=5 * MINUTE),
    AlertRule("crash-loop", CRITICAL, (f.EpochLeft,), _crash_loop, cool_down_s=HOUR),
    AlertRule("gpu-health", WARNING, (f.HealthSeen,), _gpu),
    AlertRule("guard-tripped", CRITICAL, (f.GuardTripped,), _guard),
    AlertRule("loss-spike", WARNING, (f.StepDone,), _loss_spike, cool_down_s=30 * MINUTE),
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

# facts that need no rule, and why
HARMLESS: dict[type[f.Fact], str] = {
    f.AttemptIntended: "a node is asked for",
    f.AttemptUp: "a node is there",
    f.SnapshotExported: "a person did it",
    f.AttemptDoubted: "follows from a notice, which has a rule",
    f.AgentStarted: "a node is there",
    f.NoticeCancelled: "good news",
    f.NoticeAcknowledged: "the cloud was told; a notice has a rule",
    f.NodeFound: "where a node is and what it costs",
    f.NodeBilled: "what was paid, told later",
    f.PricesSeen: "a measurement; a budget has rules",
    f.SessionStarted: "training begins",
    f.SessionEnded: "rank 0 left on purpose; why has a rule where it hurts",
    f.StepsTimed: "a measurement; slower steps have a rule",
    f.ProfileTaken: "somebody asked for it",
    f.Validated: "a measurement",
}
