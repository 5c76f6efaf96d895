"""Operations as rows of numbers for trackers: the state of a run at a moment, from its facts.

The numbers are the ledger's (`ledger.py`), so that a chart of W&B and `harness runs report` cannot
disagree. Their x axis is wall time, not steps: a run costs money, waits and recovers while it makes
no step.

It knows facts and the ledger, but no tracker. Near live: facts arrive when their writers flush
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from harness.bucket.journal import Follower
from harness.bucket.orders import stop_order
from harness.core import facts as f
from harness.core import step_records
from harness.core.facts import Stamped
from harness.core.step_records import NONE, Columns
from harness.ledger import bill as prices
from harness.ledger.bill import BAD_ENDS, NANO, AttemptRow, EpochRow
from harness.ledger.ledger import Ledger
from harness.ledger.run_state import RunState
from harness.ledger.world_speed import speed_of
from harness.look.alerts.alert_evaluator import AlertWatch
from harness.look.alerts.alert_log import SEVERITIES, Alert, AlertLog
from harness.look.alerts.alert_rules import BUILT_IN, AlertRule
from harness.look.postmortems.postmortem import interruptions
from harness.look.reports.summary import snapshot_costs
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.stream_objects import ExportRow
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Ref
from storage.stores.objects import ObjectStore

# Events of a run as rows of numbers: notices, losses, recoveries, and what a node's hardware did
# in the minute before.

MOST_HEARD = 128  # writers whose watermarks are kept
OLD_S = 90.0  # a measurement is outdated after this or three times its duration, if longer
READING = re.compile(r"(?:gpu\d{1,3}/)?[a-z_]{1,40}(?:/[a-z_]{1,40})?")  # "gpu0/watts"
RECOVERED = "recovered"  # stands for a writer: these events come from the ledger


@dataclass(frozen=True)
class RunEvent:
    """One event. `by`: the writer, in short. `place`: its position among the writer's events; it
    grows. `step`: the step that a side job measured; 0: of no step."""

    by: str
    t: float
    values: dict[str, float]
    place: float
    step: int = 0


@dataclass(frozen=True)
class EventWatermark:
    """Watermarks of the published events: the place, by writer. For a writer that is not in `by`,
    events up to `floor_s` are published or never will be."""

    by: Mapping[str, float]
    floor_s: float = 0.0

    def misses(self, one: RunEvent) -> bool:
        return one.place > self.by.get(one.by, 0.0 if one.by == RECOVERED else self.floor_s)

    def after(self, told: Iterable[RunEvent]) -> EventWatermark:
        """Return the watermarks after these events too. The oldest writers are forgotten."""
        by, floor_s = dict(self.by), self.floor_s
        for one in told:
            by[one.by] = max(one.place, by.get(one.by, 0.0))
        writers = sorted(by.keys() - {RECOVERED}, key=lambda name: by[name])
        for name in writers[: max(0, len(writers) - MOST_HEARD)]:
            floor_s = max(floor_s, by.pop(name))
        return EventWatermark(by, floor_s)


def events_of(
    facts: Sequence[Stamped],
    measured: Sequence[Stamped],
    epochs: Sequence[EpochRow],
    state: RunState,
) -> list[RunEvent]:
    """Return all known events, by time. `measured`: the facts of measurements; `state`: of the run
    that `facts` tell of."""
    slots = slots_of(facts)
    nodes = {name: one.attempt for name, one in state.members.items()}
    found: list[RunEvent] = []
    side_jobs = set[tuple[str, int, int]]()
    for s in facts:
        if values := _event(s.fact, nodes):
            found.append(RunEvent(_short(s.writer), s.t, values, s.t))
        elif isinstance(s.fact, f.Validated) and s.fact.by and s.fact.step > 0:
            one = (s.fact.by, s.fact.epoch, s.fact.step)
            if one not in side_jobs:
                values = {"train/step": s.fact.step, **s.fact.metrics}
                found.append(RunEvent(_short(s.writer), s.t, values, s.t, s.fact.step))
            side_jobs.add(one)
    for s in measured:
        if values := _readings(s.fact, nodes, slots):
            found.append(RunEvent(_short(s.writer), s.t, values, s.t))
    for epoch in epochs:
        if epoch.gap_s is not None and epoch.first_s is not None:
            values = {"event/recovered_s": epoch.gap_s}
            found.append(RunEvent(RECOVERED, epoch.first_s, values, epoch.epoch))
    return sorted(found, key=lambda one: one.t)


@functools.lru_cache(maxsize=10_000)
def _short(writer: str) -> str:
    return digest(writer.encode())[:8]


def _event(fact: f.Fact, nodes: Mapping[str, int]) -> dict[str, float]:
    """Return a fact's numbers. A node is its number, so that a chart has a line for each node."""
    match fact:
        case f.AttemptUp(attempt):
            return {"event/node_up": attempt}
        case f.AttemptEnded(attempt, end) as ended if ended.up_s is not None:
            return {"event/node_lost" if end in BAD_ENDS else "event/node_gone": attempt}
        case f.NoticeSeen(member):
            return {"event/notice": nodes.get(member, 0)}
        case f.WorkerFailed(member):
            return {"event/worker_failed": nodes.get(member, 0)}
        case f.WorkerHung(member) as hung if hung.guilty:
            return {"event/worker_hung": nodes.get(member, 0)}
        case f.EpochStarted() as epoch:
            return {"event/world": epoch.world}
        case f.SnapshotQuarantined(step):
            return {"event/quarantined_step": step}
        case f.GuardTripped(step) | f.StepSkipped(step):
            return {"event/guard_step": step}
    return {}


# ---- nodes ---------------------------------------------------------------------------------------
def slots_of(facts: Iterable[Stamped]) -> dict[str, int]:
    """Give each member a number from 1 on, the lowest that no living node has. So a run of hundreds
    of nodes, a few at once, needs only a few lines in a chart."""
    slots: dict[str, int] = {}
    held: dict[str, int] = {}  # by node: its attempt, or its member
    for s in facts:
        match s.fact:
            case f.AgentStarted(member, attempt):
                node = str(attempt or member)
                free = next(n for n in range(1, len(held) + 2) if n not in held.values())
                slots[member] = held.setdefault(node, free)
            case f.AgentEnded(member) if slots.get(member) in held.values():
                held = {node: slot for node, slot in held.items() if slot != slots[member]}
            case f.AttemptEnded(attempt):
                held.pop(str(attempt), None)
    return slots


def _readings(fact: f.Fact, nodes: Mapping[str, int], slots: Mapping[str, int]) -> dict[str, float]:
    assert isinstance(fact, f.NodeMeasured)
    if (slot := slots.get(fact.member)) is None:
        return {}
    readings = {f"node/{slot}/{name}": value for name, value in _good(fact)}
    return {f"node/{slot}/number": nodes.get(fact.member, 0), **readings} if readings else {}


def _good(fact: f.NodeMeasured) -> list[tuple[str, float]]:
    """Return the valid readings. Names become those of charts, so unknown kinds are left out."""
    return [
        (name, value)
        for name, value in fact.metrics.items()
        if READING.fullmatch(name) and math.isfinite(value)
    ]


def hardware(measured: Iterable[Stamped], state: RunState, t: float) -> dict[str, float]:
    """Return sums and means of nodes that live at `t` and measured lately. `state`: at `t`."""
    newest: dict[str, f.NodeMeasured] = {}
    for s in measured:
        if isinstance(s.fact, f.NodeMeasured) and s.t <= t:
            newest[s.fact.member] = s.fact
            if t - s.t > max(OLD_S, 3 * s.fact.seconds):
                del newest[s.fact.member]
    for name, one in state.members.items():
        node = state.nodes.get(state.attempt_of.get(name, ""))
        if one.ended or (node and node.ended):
            newest.pop(name, None)
    values: dict[str, list[float]] = {}
    for fact in newest.values():
        for name, value in _good(fact):
            values.setdefault(re.sub(r"^gpu\d+/", "gpu_", name), []).append(value)
    found: dict[str, float] = {}
    for name, each in values.items():
        flat = name.replace("/", "_")
        if name == "gpu_watts" or name.endswith("_per_s"):
            found[f"hardware/{flat}"] = sum(each)
            continue
        found |= {f"hardware/{flat}": fmean(each), f"hardware/{flat}_max": max(each)}
        if name == "gpu_percent":
            found["hardware/gpu_percent_min"] = min(each)  # the idlest GPU while others work
    return found


MOST_LIVE = 1000  # newest steps that are kept as facts
MOST_MOMENTS = 300  # rows that are filled in after a gap without a publisher
MOST_MEASURED = 5000  # facts of each kind that come at their own pace
MOST_WAITS = 20_000  # one comes about every ten seconds, so this is two days
RECENT_S = 600.0  # measurements of steps and fired alerts count as current for so long
MANY = (f.StepDone, f.NodeMeasured, f.StepsTimed)  # kinds of which a run may have millions
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
    """The newest facts of the most frequent kinds."""

    steps: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_LIVE))
    measured: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_MEASURED))
    timed: deque[Stamped] = field(default_factory=lambda: deque(maxlen=MOST_MEASURED))
    # the part of `timed` that a ledger needs, of the whole run; evenly thinned in a long run
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
    """The follower of a run's facts; `poll` reads them. Of steps, which may be millions, it keeps
    columns, and only the newest as facts."""

    store: ObjectStore
    lineage: Lineage
    rules: Sequence[AlertRule] = BUILT_IN
    facts: list[Stamped] = field(default_factory=list)
    state: RunState = field(default_factory=RunState)  # of all facts but the most frequent kinds
    cost_s: float = 0.0  # time to compute the last row

    def __post_init__(self) -> None:
        self._follower = Follower(self.store, whole=True)
        self._alerts, self._new_alerts = AlertWatch(self.rules), list[Alert]()
        self._log = AlertLog(self.store)
        self._lock = threading.Lock()
        self._told: list[Columns] = []  # steps, in order of arrival
        self._recent = RecentFacts()
        self._epochs: tuple[EpochRow, ...] = ()  # of the last row
        self._count = 0

    def poll(self) -> None:
        """Read new facts; any thread may call it. Raises StoreError."""
        with self._lock:
            new = [s for s in self._follower.poll() if not isinstance(s.fact, f.Unreadable)]
            self._count += len(new)
            self._new_alerts += self._alerts.see(new)
            steps = [s for s in new if isinstance(s.fact, f.StepDone)]
            self._recent.take(new)
            if others := [s for s in new if not isinstance(s.fact, MANY)]:
                self.facts = sorted([*self.facts, *others], key=lambda s: s.t)
                for stamped in others:
                    self.state.add(stamped)
            told = step_records.of_facts(s.fact for s in steps if isinstance(s.fact, f.StepDone))
            self._told += [told] if len(told) else []
            archived = self._follower.archived_steps()
            self._told += [archived] if len(archived) else []

    @property
    def known(self) -> int:
        """Number of facts that were read."""
        return self._count

    def steps(self) -> Columns:
        """Return all steps in live facts, each once."""
        with self._lock:
            if len(self._told) > 1:
                self._told = [step_records.newest_told(step_records.joined(self._told))]
            return self._told[0] if self._told else NONE

    def last_s(self) -> float:
        """Return the time of the newest known fact."""
        newest_s = self._recent.steps[-1].t if self._recent.steps else 0.0
        return max(self.facts[-1].t if self.facts else 0.0, newest_s)

    def started_s(self, now_s: float) -> float:
        return min((s.t for s in self.facts), default=now_s)

    # ---- events ----------------------------------------------------------------------------------
    def end(self, final: bool) -> str:
        """Return how the run ended; "": it goes on, or may. `final`: its last snapshot is committed
        and all its steps are read."""
        if final:
            return "done"
        with self._lock:
            ended = self.state.end
            why = {left.why for _, left in self.state.newest.left}
        if ended:
            return ended.outcome if ended.outcome != "done" else ""
        if why & {"stopped", "unfinished"} and (order := stop_order(self.store)):
            return "failed" if order.failed else "stopped"
        return ""

    def snapshots(self, told: str) -> list[str]:
        """Return names of snapshots committed after `told` (the last published), oldest first."""
        after = Ref.parse(told) if told else Ref(0, 0)
        with self._lock:
            found = {Ref(one.epoch, one.step) for _, one in self.state.snapshots}
        return [ref.name for ref in sorted(found) if ref > after]

    def alerts(self, told: Sequence[str]) -> list[Alert]:
        """Return alerts that any evaluator fired and that are not in `told`. Raises StoreError."""
        for alert in list(self._new_alerts):
            self._log.fire(alert, self._alerts.cool_down_s[alert.rule])
            self._new_alerts.remove(alert)
        self._log.read()
        known, fired = set(told), self._log.alerts
        # they are published in order, so all up to the newest one in `told` are done
        last = max((n for n, a in enumerate(fired) if a is not None and a.id in known), default=-1)
        return [a for a in fired[last + 1 :] if a is not None][:100]  # the rest comes later

    def exports(self, told: Sequence[str]) -> list[ExportRow]:
        """Return the exports that are not published yet, oldest first."""
        known, found = set(told), list[ExportRow]()
        for s in self.facts:
            if isinstance(s.fact, f.SnapshotExported) and s.fact.step >= 0 <= s.fact.epoch:
                said = dataclasses.asdict(s.fact)
                name = digest(canonical([s.writer, s.t, said]))[:16]
                found += [ExportRow(name, **said)] if name not in known else []
        return found

    def happened(self, heard: EventWatermark) -> list[RunEvent]:
        """Return unpublished events, by time. Recoveries are known once a row was computed."""
        with self._lock:
            measured = list(self._recent.measured)
            found = events_of(self.facts, measured, self._epochs, self.state)
        return [one for one in found if heard.misses(one)]

    def _tokens_per_sample(self) -> float:
        """Return the tokens per sample from the newest steps; 0: not recorded."""
        told = (s.fact for s in [*reversed(self._recent.steps), *reversed(self._recent.timed)])
        kinds = (f.StepDone, f.StepsTimed)
        known = (one for one in told if isinstance(one, kinds) and one.tokens and one.samples)
        return next((one.tokens / one.samples for one in known), 0.0)

    def _fired(self, t: float) -> dict[str, float]:
        """Return the numbers of alerts by severity up to `t`, and of those that fire at `t`."""
        fired = [a for a in self._log.alerts if a is not None and a.t <= t]
        found: dict[str, float] = {f"alerts/{severity}": 0 for severity in SEVERITIES}
        found["alerts/firing"] = len([a for a in fired if t - a.t < RECENT_S])
        for alert in fired:
            found[f"alerts/{alert.severity}"] += 1
        return found

    def moments(self, since_s: float, now_s: float, gap_s: float, over: bool) -> list[float]:
        """Return the times (wall clock, s) at which rows are due after `since_s`: now (or the end
        of known facts, if the run is `over`, because its last facts may have another machine's
        clock), and the turning points before it, if no row was published for `gap_s`."""
        if over and self.facts:
            with self._lock:
                ends = [node.ended.gone_s for node in self.state.nodes.values() if node.ended]
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
        """Return all numbers as of `t` (wall clock, s)."""
        began_s = time.perf_counter()
        facts = [s for s in self.facts if s.t <= t]
        self.lineage.refresh()
        records, samples = self.lineage.until(t)
        told = self.steps()
        told = told[told["end"] <= t]
        waits = [s for s in self._recent.waits if s.t <= t]
        state = RunState.of(sorted([*facts, *waits], key=lambda s: s.t))
        ledger = Ledger.from_state(state, records, t, told)
        self._epochs = ledger.epochs
        found = {
            **_money(ledger, len(records.rows), samples, self._tokens_per_sample()),
            **_time_use(ledger),
            **_troubles(ledger),
            "spot/interruptions": len(interruptions(facts, ledger, told, records)),
            **_world(ledger, state),
            **_snapshots(facts, state, records.rows, told),
            **_restores(state),
            **_live([s for s in list(self._recent.steps) if s.t <= t], told),
            **hardware(list(self._recent.measured), state, t),
            **_speed([s for s in list(self._recent.timed) if t - RECENT_S < s.t <= t]),
            **self._fired(t),
        }
        span = t - facts[0].t if facts else 0.0
        kept = len({one.step for _, one in state.snapshots})
        if bill := prices.estimate(self.store.url, facts, min(kept, 2), span):
            found["cost/egress_usd"], found["cost/storage_usd"] = bill.moved_usd, bill.storage_usd
            found["cost/requests_usd"] = prices.requests_usd(self.store.url, ledger.billed_s)
        self.cost_s = time.perf_counter() - began_s
        return {k: v for k, v in found.items() if math.isfinite(v)}


def name_of(text: str) -> str:
    """Return `text` as a part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", text) or "unknown"


def living(ledger: Ledger) -> list[AttemptRow]:
    return [a for a in ledger.attempts if a.up_s is not None and a.gone_s is None and not a.end]


def _money(ledger: Ledger, steps: int, samples: int, tokens_each: float) -> dict[str, float]:
    """Return costs of committed `steps` and `samples`. `tokens_each`: per sample, 0: not known."""
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
    """Return the waterfall: billed time and money by bucket."""
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
            [a for a in ledger.attempts if a.end in ("preempted", "lost", "failed", "killed")]
        ),
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


def _world(ledger: Ledger, state: RunState) -> dict[str, float]:
    now = next((e for e in reversed(ledger.epochs) if not e.ended and e.end_s is None), None)
    found: dict[str, float] = {
        "world/size": now.world if now else 0,
        "world/members": len(now.members) if now else 0,
        "world/accumulation": now.accumulation if now else 0,
        "world/epoch": max((e.epoch for e in ledger.epochs), default=0),
        "world/nodes": len(living(ledger)),
        "world/nodes_asked": len([a for a in ledger.attempts if a.up_s is None and not a.end]),
    }
    if state.asked:
        asked = state.asked[1]
        found |= {"world/min_nodes": asked.min_nodes, "world/max_nodes": asked.max_nodes}
    # a place that has had nodes stays at 0, so that its line goes down
    places = {name_of(a.offer or "unlisted"): 0.0 for a in ledger.attempts}
    for a in living(ledger):
        places[name_of(a.offer or "unlisted")] += 1
    return found | {f"nodes/{place}": count for place, count in places.items()}


def _snapshots(
    facts: Sequence[Stamped], state: RunState, committed: Columns, told: Columns
) -> dict[str, float]:
    made = [one for _, one in state.snapshots]
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


def _restores(state: RunState) -> dict[str, float]:
    sessions = [world.session for _, world in sorted(state.worlds.items())]
    restored = [s for s in sessions if s and s.resumed_step]
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
    """Return the number of the step that was done last."""
    return int(rows["step"][rows["end"].argmax()]) if len(rows) else 0


def _speed(timed: Sequence[Stamped]) -> dict[str, float]:
    """Return the numbers of the newest steps that rank 0 measured."""
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
    """Return the newest step, committed or not: W&B need not wait for a snapshot."""
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
