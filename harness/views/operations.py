"""Operations as rows of numbers: what a run's facts say at a moment, for trackers.

The numbers are the ledger's (`ledger.py`), so that a chart of W&B and `harness report` cannot
disagree. Their x axis is wall time, not steps: a run costs money, waits and recovers while it makes
no step.

Knows facts and the ledger; knows no tracker. Near live: facts arrive when their writers flush them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.bucket.alerts import SEVERITIES, Alert, AlertLog
from harness.bucket.journal import Follower
from harness.bucket.orders import stop_order
from harness.bucket.streamed import ExportTold
from harness.core import columns, prices
from harness.core import facts as f
from harness.core.columns import NONE, Columns
from harness.core.facts import Stamped
from harness.core.values import canonical, digest
from harness.views.alert_rules import BUILT_IN, AlertRule
from harness.views.alerts import AlertWatch
from harness.views.committed import Lineage
from harness.views.events import RunEvent, ToldSoFar, events_of, hardware
from harness.views.ledger import Ledger
from harness.views.painting import NANO
from harness.views.rows import AttemptRow, EpochRow
from harness.views.snapshot_costs import snapshot_costs
from harness.views.speed import speed_of
from storage.manifest import Ref
from storage.objects import ObjectStore

MOST_LIVE = 1000  # steps that are kept as they were told
MOST_MOMENTS = 300  # that are filled in after a time without a publisher
MOST_MEASURED = 5000  # facts of each kind that come at a pace of their own
MOST_WAITS = 20_000  # told every ten seconds or so: two days
RECENT_S = 600.0  # what was told of steps, and alerts that were fired, are news so long
MANY = (f.StepDone, f.NodeMeasured, f.StepsTimed)  # of which a run may have millions
TURNING_POINTS = (
    f.AttemptUp,
    f.AttemptEnded,
    f.EpochStarted,
    f.EpochLeft,
    f.SessionStarted,
    f.SnapshotCommitted,
    f.NoticeSeen,
    f.RunEnded,
)


@dataclass
class RecentFacts:
    """The newest of those of which there are many."""

    steps: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_LIVE))
    measured: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_MEASURED))
    timed: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_MEASURED))
    # what a ledger needs of `timed`, of the whole run; of a long one's past a part, evenly
    waits: list[Stamped] = field(default_factory=list)

    def take(self, new: Sequence[Stamped]) -> None:
        self.steps.extend(s for s in new if isinstance(s.fact, f.StepDone))
        self.measured.extend(s for s in new if isinstance(s.fact, f.NodeMeasured))
        self.timed.extend(s for s in new if isinstance(s.fact, f.StepsTimed))
        for s in new:
            if isinstance(s.fact, f.StepsTimed) and s.fact.own_s:
                brief = dataclasses.replace(s.fact, seconds={}, loss=(), loss_ranks=())
                self.waits.append(dataclasses.replace(s, fact=brief))
        if len(self.waits) > MOST_WAITS:
            half = MOST_WAITS // 2
            self.waits = self.waits[:half:2] + self.waits[half:]


@dataclass
class Operations:
    """Follows a run's facts. One reader of its own, fed by `poll`. Of steps, of which there may be
    millions, it keeps columns, and the newest ones as they were told."""

    store: ObjectStore
    lineage: Lineage
    rules: Sequence[AlertRule] = BUILT_IN
    facts: list[Stamped] = field(default_factory=list)
    cost_s: float = 0.0  # what the last row took to compute

    def __post_init__(self) -> None:
        self._follower = Follower(self.store, whole=True)
        self._alerts, self._new_alerts = AlertWatch(self.rules), list[Alert]()
        self._log = AlertLog(self.store)
        self._lock = threading.Lock()
        self._told: list[Columns] = []  # steps, as they came
        self._recent = RecentFacts()
        self._epochs: tuple[EpochRow, ...] = ()  # of the last row
        self._count = 0

    def poll(self) -> None:
        """Read what is new; from any thread. Raises StoreError."""
        with self._lock:
            new = [s for s in self._follower.poll() if not isinstance(s.fact, f.Unreadable)]
            self._count += len(new)
            self._new_alerts += self._alerts.see(new)
            steps = [s for s in new if isinstance(s.fact, f.StepDone)]
            self._recent.take(new)
            if others := [s for s in new if not isinstance(s.fact, MANY)]:
                self.facts = sorted([*self.facts, *others], key=lambda s: s.t)
            told = columns.of_facts(s.fact for s in steps if isinstance(s.fact, f.StepDone))
            self._told += [told] if len(told) else []
            archived = self._follower.archived_steps()
            self._told += [archived] if len(archived) else []

    @property
    def known(self) -> int:
        """How many facts were read."""
        return self._count

    def steps(self) -> Columns:
        """All that were told live, each once."""
        with self._lock:
            if len(self._told) > 1:
                self._told = [columns.newest_told(columns.joined(self._told))]
            return self._told[0] if self._told else NONE

    def last_s(self) -> float:
        """When the newest of what is known was told."""
        newest_s = self._recent.steps[-1].t if self._recent.steps else 0.0
        return max(self.facts[-1].t if self.facts else 0.0, newest_s)

    def started_s(self, now_s: float) -> float:
        return min((s.t for s in self.facts), default=now_s)

    # ---- what has happened -----------------------------------------------------------------------
    def end(self, final: bool) -> str:
        """How the run has ended; "": it goes on, or may. `final`: its last snapshot is committed
        and all its steps are read."""
        if final:
            return "done"
        last = next(
            (
                s.fact
                for s in reversed(self.facts)
                if isinstance(s.fact, (f.RunEnded, f.LeaseTaken))
            ),
            None,
        )
        if isinstance(last, f.RunEnded):
            return last.outcome if last.outcome != "done" else ""
        epoch = max(
            (s.fact.epoch for s in self.facts if isinstance(s.fact, f.EpochStarted)), default=0
        )
        why = {
            s.fact.why
            for s in self.facts
            if isinstance(s.fact, f.EpochLeft) and s.fact.epoch == epoch
        }
        if why & {"stopped", "unfinished"} and (order := stop_order(self.store)):
            return "failed" if order.failed else "stopped"
        return ""

    def snapshots(self, told: str) -> list[str]:
        """Names of snapshots that were committed after the one that was told last, oldest
        first."""
        after = Ref.parse(told) if told else Ref(0, 0)
        found = {
            Ref(s.fact.epoch, s.fact.step)
            for s in self.facts
            if isinstance(s.fact, f.SnapshotCommitted)
        }
        return [ref.name for ref in sorted(found) if ref > after]

    def alerts(self, told: Sequence[str]) -> list[Alert]:
        """That were fired, by whomever, and not told. Raises StoreError."""
        for alert in list(self._new_alerts):
            self._log.fire(alert, self._alerts.cool_down_s[alert.rule])
            self._new_alerts.remove(alert)
        self._log.read()
        known, fired = set(told), self._log.alerts
        # they are told in order, and `told` is the newest of them
        last = max((n for n, a in enumerate(fired) if a is not None and a.id in known), default=-1)
        return [a for a in fired[last + 1 :] if a is not None][:100]  # the rest comes later

    def exports(self, told: Sequence[str]) -> list[ExportTold]:
        """That are not told yet, oldest first."""
        known, found = set(told), list[ExportTold]()
        for s in self.facts:
            if isinstance(s.fact, f.SnapshotExported) and s.fact.step >= 0 <= s.fact.epoch:
                said = dataclasses.asdict(s.fact)
                name = digest(canonical([s.writer, s.t, said]))[:16]
                found += [ExportTold(name, **said)] if name not in known else []
        return found

    def happened(self, heard: ToldSoFar) -> list[RunEvent]:
        """What was not told yet, by time. Recoveries are known when a row was computed."""
        found = events_of(self.facts, list(self._recent.measured), self._epochs)
        return [one for one in found if heard.misses(one)]

    def _tokens_per_sample(self) -> float:
        """As the steps say that were told last; 0: they do not say."""
        told = (s.fact for s in [*reversed(self._recent.steps), *reversed(self._recent.timed)])
        kinds = (f.StepDone, f.StepsTimed)
        known = (one for one in told if isinstance(one, kinds) and one.tokens and one.samples)
        return next((one.tokens / one.samples for one in known), 0.0)

    def _fired(self, t: float) -> dict[str, float]:
        """Alerts by `t`; and in the minutes before."""
        fired = [a for a in self._log.alerts if a is not None and a.t <= t]
        found: dict[str, float] = {f"alerts/{severity}": 0 for severity in SEVERITIES}
        found["alerts/firing"] = len([a for a in fired if t - a.t < RECENT_S])
        for alert in fired:
            found[f"alerts/{alert.severity}"] += 1
        return found

    def moments(self, since_s: float, now_s: float, gap_s: float, over: bool) -> list[float]:
        """When a row is due after `since_s`: now, or at the end of what is known of a run that is
        `over` (its last words may come from another machine's clock); and at the turning points
        between, if nobody told them for `gap_s`."""
        if over and self.facts:
            ends = [s.fact.gone_s for s in self.facts if isinstance(s.fact, f.AttemptEnded)]
            now_s = max([self.last_s(), *ends, since_s + 1e-3])
        found: list[float] = []
        if now_s - since_s > gap_s:
            turns = [
                s.t
                for s in self.facts
                if isinstance(s.fact, TURNING_POINTS) and since_s < s.t < now_s
            ]
            found = sorted(set(turns))[:: len(turns) // MOST_MOMENTS + 1]
        return [*found, now_s]

    # ---- numbers ---------------------------------------------------------------------------------
    def values(self, t: float) -> dict[str, float]:
        """Everything, as it was known at `t`."""
        began_s = time.perf_counter()
        facts = [s for s in self.facts if s.t <= t]
        self.lineage.refresh()
        records, samples = self.lineage.until(t)
        told = self.steps()
        told = told[told["end"] <= t]
        waits = [s for s in self._recent.waits if s.t <= t]
        ledger = Ledger.of([*facts, *waits], records, t, told)
        self._epochs = ledger.epochs
        found = {
            **_money(ledger, len(records.rows), samples, self._tokens_per_sample()),
            **_time_use(ledger),
            **_troubles(ledger),
            **_world(ledger, facts, t),
            **_snapshots(facts, records.rows, told),
            **_restores(facts),
            **_live([s for s in list(self._recent.steps) if s.t <= t], told),
            **hardware(list(self._recent.measured), facts, t),
            **_speed([s for s in list(self._recent.timed) if t - RECENT_S < s.t <= t]),
            **self._fired(t),
        }
        span = t - facts[0].t if facts else 0.0
        kept = len({s.fact.step for s in facts if isinstance(s.fact, f.SnapshotCommitted)})
        if bill := prices.estimate(self.store.url, facts, min(kept, 2), span):
            found["cost/egress_usd"], found["cost/storage_usd"] = bill.moved_usd, bill.storage_usd
            found["cost/requests_usd"] = prices.requests_usd(self.store.url, ledger.billed_s)
        self.cost_s = time.perf_counter() - began_s
        return {k: v for k, v in found.items() if math.isfinite(v)}


def name_of(text: str) -> str:
    """A part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", text) or "unknown"


def living(ledger: Ledger) -> list[AttemptRow]:
    return [a for a in ledger.attempts if a.up_s is not None and a.gone_s is None and not a.end]


def _money(ledger: Ledger, steps: int, samples: int, tokens_each: float) -> dict[str, float]:
    """Of so many committed steps, with so many samples of so many tokens each (0: not known)."""
    cost = ledger.cost
    found = {
        "cost/usd_total": ledger.usd,
        "cost/usd_per_h": sum(a.usd_per_h for a in living(ledger)),
        "cost/on_demand_usd": cost.on_demand_usd,
        "cost/saved_usd": cost.saved_usd,
        "cost/saved_fraction": cost.saved,
        "cost/saved_undisturbed_fraction": cost.saved_undisturbed,
        "cost/node_hours": ledger.billed_s / 3600,
    }
    if steps:
        found["cost/usd_per_1k_steps"] = ledger.usd / steps * 1000
    if samples:
        found["cost/usd_per_1m_samples"] = ledger.usd / samples * 1e6
        if tokens_each:
            found["cost/usd_per_1m_tokens"] = ledger.usd / samples / tokens_each * 1e6
    by_cloud: dict[str, float] = {}
    for a in ledger.attempts:
        cloud = name_of(a.offer.partition("/")[0])
        by_cloud[cloud] = by_cloud.get(cloud, 0.0) + a.usd
    return found | {f"cost/usd_by_cloud/{cloud}": usd for cloud, usd in by_cloud.items()}


def _time_use(ledger: Ledger) -> dict[str, float]:
    """The waterfall: billed seconds by what they went into."""
    return {
        "goodput/fraction": ledger.goodput,
        "goodput/billed_s": ledger.billed_s,
        **{f"goodput/{bucket}_s": spent / NANO for bucket, spent in ledger.ns.items()},
        **{f"goodput/{bucket}_usd": spent / NANO for bucket, spent in ledger.nusd.items()},
    }


def _troubles(ledger: Ledger) -> dict[str, float]:
    ended = [e for e in ledger.epochs if e.ended]
    broken = [e for e in ended if e.ended not in ("finished", "stopped")]
    gaps = [e.gap_s for e in ledger.epochs if e.gap_s is not None]
    found = {
        "spot/notices": len([n for n in ledger.notices if not n.cancelled]),
        "spot/notices_in_time": len([n for n in ledger.notices if n.in_time]),
        "spot/losses": len(
            [a for a in ledger.attempts if a.end in ("preempted", "lost", "failed")]
        ),
        "spot/interruptions": len(broken),
        "spot/resizes": len(
            [
                e
                for e, after in zip(ledger.epochs, ledger.epochs[1:], strict=False)
                if e.world != after.world
            ]
        ),
        "spot/steps_lost": ledger.steps_lost,
        "spot/lost_s": sum(e.lost_s for e in broken),
        "spot/recoveries": len(gaps),
    }
    if gaps:
        found |= {"spot/recover_last_s": gaps[-1], "spot/recover_max_s": max(gaps)}
        found["spot/recover_mean_s"] = sum(gaps) / len(gaps)
    return found


def _world(ledger: Ledger, facts: Sequence[Stamped], t: float) -> dict[str, float]:
    now = next((e for e in reversed(ledger.epochs) if not e.ended and e.end_s is None), None)
    asked = next((s.fact for s in reversed(facts) if isinstance(s.fact, f.RunAsked)), None)
    found: dict[str, float] = {
        "world/size": now.world if now else 0,
        "world/members": len(now.members) if now else 0,
        "world/accumulation": now.accumulation if now else 0,
        "world/epoch": max((e.epoch for e in ledger.epochs), default=0),
        "world/nodes": len(living(ledger)),
        "world/nodes_asked": len([a for a in ledger.attempts if a.up_s is None and not a.end]),
    }
    if asked:
        found |= {"world/min_nodes": asked.min_nodes, "world/max_nodes": asked.max_nodes}
    # a place that has had nodes stays at 0, so that its line comes down
    places = {name_of(a.offer or "unlisted"): 0.0 for a in ledger.attempts}
    for a in living(ledger):
        places[name_of(a.offer or "unlisted")] += 1
    return found | {f"nodes/{place}": count for place, count in places.items()}


def _snapshots(facts: Sequence[Stamped], committed: Columns, told: Columns) -> dict[str, float]:
    made = [s.fact for s in facts if isinstance(s.fact, f.SnapshotCommitted)]
    failed = len([s for s in facts if isinstance(s.fact, f.SnapshotFailed)])
    bad = len([s for s in facts if isinstance(s.fact, f.SnapshotQuarantined)])
    found: dict[str, float] = {"ckpt/committed": len(made), "ckpt/failed": failed}
    found |= {"ckpt/quarantined": bad, "ckpt/step": _last_step(committed)}
    if len(told):
        found["ckpt/lag_steps"] = max(0, _last_step(told) - _last_step(committed))
    if made:
        last = made[-1]
        found |= {
            "ckpt/stall_s": last.stall_s,
            "ckpt/stall_total_s": sum(m.stall_s for m in made),
            "ckpt/durable_s": last.commit_s,
            "ckpt/bytes": last.nbytes,
            "ckpt/throttle_slowdown": last.slowdown,
            "ckpt/throttle_pace": last.pace,
            "ckpt/cost_total_s": snapshot_costs(made).total_s,
        }
    return found


def _restores(facts: Sequence[Stamped]) -> dict[str, float]:
    sessions = [s.fact for s in facts if isinstance(s.fact, f.SessionStarted)]
    restored = [s for s in {s.epoch: s for s in sessions}.values() if s.resumed_step]
    found: dict[str, float] = {"restore/count": len(restored)}
    if restored:
        found["restore/last_s"] = restored[-1].restore_s
        found["restore/total_s"] = sum(s.restore_s for s in restored)
    for session in restored:
        key = f"restore/from_{name_of(session.tier)}"
        found[key] = found.get(key, 0) + 1
        for tier, count in session.read_nbytes.items():
            key = f"restore/bytes_from_{name_of(tier)}"
            found[key] = found.get(key, 0) + count
    return found


def _last_step(rows: Columns) -> int:
    """Of the step that was done last."""
    return int(rows["step"][rows["end"].argmax()]) if len(rows) else 0


def _speed(timed: Sequence[Stamped]) -> dict[str, float]:
    """Of the newest steps that rank 0 told of."""
    window = speed_of(timed).newest
    if window is None:
        return {}
    found = {f"split/{phase}_s": spent for phase, spent in window.seconds.items()}
    for name, spread in (("ranks/own_s", window.own), ("ranks/loss", window.loss)):
        if spread is not None:
            found |= {
                f"{name}_least": spread.least,
                f"{name}_median": spread.median,
                f"{name}_most": spread.most,
                f"{name}_most_rank": spread.most_rank,
            }
    rates = {
        "live/samples_per_s": window.samples_per_s,
        "live/tokens_per_s": window.tokens_per_s,
        "live/mfu": window.mfu,
        "live/hfu": window.hfu,
    }
    return found | {name: rate for name, rate in rates.items() if rate is not None}


def _live(newest: Sequence[Stamped], told: Columns) -> dict[str, float]:
    """The newest step that was done, committed or not: W&B need not wait for a snapshot."""
    if not len(told):
        return {}
    row = told[told["end"].argmax()]
    found = {
        "live/step": int(row["step"]),
        "live/loss": float(row["loss"]),
        "live/step_s": float(row["seconds"]),
    }
    step = newest[-1].fact if newest else None
    if isinstance(step, f.StepDone) and step.mfu is not None:
        found["live/mfu"] = step.mfu
    return found
