"""The summary of a run from its facts and records, which the report, the page and JSON render."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from harness.bucket.archive import read_committed, read_past
from harness.bucket.layout import (
    IDENTITY,
    PHASES,
    SAMPLES,
    Epoch,
    Identity,
    epoch_key,
    epoch_numbers,
)
from harness.bucket.phases import RunPhase, read_phases
from harness.core import step_records
from harness.core import step_records as rec
from harness.core.facts import (
    DrainVerdict,
    EpochStarted,
    GraceSpent,
    GuardTripped,
    HealthSeen,
    LeaseTaken,
    RunAsked,
    RunEnded,
    SessionStarted,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotQuarantined,
    Stamped,
    StepSkipped,
    Unreadable,
    Validated,
    Warned,
    WorkerFailed,
    WorkerHung,
)
from harness.core.formatting import (
    plural,
)
from harness.core.loss_rates import ORDERLY, cost_s
from harness.core.step_records import NONE, Columns, Committed
from harness.ledger import bill as egress
from harness.ledger.bill import EpochRow
from harness.ledger.ledger import Ledger
from harness.ledger.run_state import RunState
from harness.ledger.world_speed import SpeedSummary, speed_of
from harness.look.alerts.alert_evaluator import fired
from harness.look.alerts.alert_log import Alert, AlertLog
from harness.look.postmortems.postmortem import Postmortem, postmortem
from harness.look.reports.setup_report import (
    Logbook,
    SetupSummary,
    read_logbook,
    summarize_setups,
)
from harness.look.watch.side_jobs import SideJobRows, side_jobs
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.snapshots.manifest import Manifest, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore, get_each

# The cost of snapshots to training, in seconds and as a share of it, by cause. Pure.


@dataclass(frozen=True)
class SnapshotCosts:
    """Costs in seconds of wall time of the whole world. `trained_s`: the sum over worlds of the
    time from the first step to the last one."""

    blocked_s: float = 0.0
    slower_s: float = 0.0
    waited_s: float = 0.0
    trained_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.blocked_s + self.slower_s + self.waited_s

    @property
    def share(self) -> float:
        """Share of the time spent on training and on waiting for snapshots; 0: no such time."""
        return self.total_s / max(self.trained_s + self.waited_s, self.total_s, 1e-9)

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "total_s": self.total_s, "share": self.share}


def snapshot_costs(
    committed: Iterable[SnapshotCommitted], epochs: Iterable[EpochRow] = ()
) -> SnapshotCosts:
    blocked_s = slower_s = waited_s = 0.0
    for one in committed:
        stall_s = max(0.0, one.stall_s)
        blocked_s += stall_s
        if one.why in ORDERLY:
            waited_s += max(0.0, one.commit_s - stall_s)
        else:
            slower_s += cost_s(stall_s, one.slowdown, one.commit_s) - stall_s
    trained_s = sum(
        max(0.0, e.last_s - e.first_s)
        for e in epochs
        if e.first_s is not None and e.last_s is not None
    )
    return SnapshotCosts(blocked_s, slower_s, waited_s, trained_s)


def unread_text(unread: Sequence[Unreadable]) -> str:
    return (
        f"{plural(len(unread), 'fact')} could not be read (see: harness prove verify), the first: "
        f"{unread[0]}"
    )


MOST_POINTS = 20_000  # points of a curve
MOST_JUDGED = 30_000  # most facts for which unfired alerts are computed
MOST_SAMPLED = 40  # objects of step records that are read for gradient norms
NO_RECORDS = Committed(NONE, {}, {})


@dataclass(frozen=True)
class Point:
    """One executed step as a point of the loss curve."""

    step: int
    loss: float
    epoch: int
    t: float
    seconds: float


@dataclass(frozen=True)
class TimelineMark:
    """An event at one moment."""

    t: float
    # "failed" | "guard" | "snapshot failed" | "quarantined" | "hung" | "health" | "drain" |
    # "too late" | "warned"
    what: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Summary:
    """Everything that the renderings need."""

    url: str
    # "done" | "stopped" | "failed" | "going on" | "finished" (a final snapshot, but no record of
    # the end by a controller)
    state: str
    reason: str
    step: int  # committed
    total_steps: int
    started_s: float
    ended_s: float  # as far as is known
    away_s: float  # total seconds between an end of the run and the next launch
    ledger: Ledger
    # committed steps, and those after the newest snapshot of a run that goes on
    curve: tuple[Point, ...]
    lost: tuple[Point, ...]  # executed steps that were lost
    validation_name: str
    validation: tuple[tuple[int, float], ...]
    snapshots: tuple[SnapshotCommitted, ...]
    kept: int  # snapshots that are in the bucket now
    marks: tuple[TimelineMark, ...]
    session: SessionStarted | None
    asked: RunAsked | None
    postmortem: Postmortem
    problems: tuple[str, ...] = ()
    store: egress.Estimate | None = None
    data: egress.DataRead | None = None  # read by steps; None: not counted
    speed: SpeedSummary = field(default_factory=SpeedSummary)
    facts: tuple[Stamped, ...] = ()  # by time, without the steps
    norms: tuple[tuple[int, float], ...] = ()  # gradient norms by step; a sample if the run is long
    tokens_per_step: float = 0.0  # 0: not known
    alerts: tuple[Alert, ...] = ()  # oldest first
    setups: SetupSummary = field(default_factory=SetupSummary)
    logbook: Logbook = field(default_factory=Logbook)
    side_jobs: tuple[SideJobRows, ...] = ()  # by watch
    phases: tuple[RunPhase, ...] = ()

    @property
    def tokens(self) -> float:
        """Number of tokens in the committed steps; 0: not known."""
        return self.step * self.tokens_per_step

    @property
    def simulated(self) -> bool:
        """True if the run's cloud is the local one, whose prices are made up."""
        return self.asked is not None and bool(self.asked.market)

    @property
    def usd_per_1m_tokens(self) -> float | None:
        """Dollars per million tokens; `None`: not known."""
        return 1e6 * self.ledger.usd / self.tokens if self.tokens else None

    @property
    def wall_s(self) -> float:
        return max(0.0, self.ended_s - self.started_s - self.away_s)

    @property
    def losses(self) -> tuple[float, float] | None:
        """The first and the last loss of the curve; `None` if there is no curve."""
        return (self.curve[0].loss, self.curve[-1].loss) if self.curve else None

    @property
    def validations(self) -> tuple[float, float] | None:
        return (self.validation[0][1], self.validation[-1][1]) if self.validation else None

    @property
    def worlds(self) -> tuple[int, int]:
        """Smallest and largest world that did a step."""
        found = [e.world for e in self.ledger.epochs if e.steps]
        return (min(found), max(found)) if found else (0, 0)


# ---- reading -------------------------------------------------------------------------------------
def summarize(store: ObjectStore, now: Callable[[], float] = time.time) -> Summary:
    """Read the whole run. Damaged objects are listed in `problems` and skipped. Raise StoreError
    if the bucket fails."""
    problems: list[str] = []
    past = read_past(store)
    steps = step_records.newest_told(past.steps)
    facts = [s for s in past.facts if not isinstance(s.fact, Unreadable)]
    state = RunState.of(past.facts)
    if state.unread:
        problems.append(f"{unread_text(state.unread)}; the numbers below may be wrong")
    if unsaid := _lost_epochs(store, state):
        facts = sorted([*facts, *unsaid], key=lambda s: s.t)
        state = RunState.of(facts)
    tokens = [s.tokens for s in past.newest if s.tokens]
    del past
    manifest, kept = _newest(store, problems)
    records = _records(store, manifest, problems)
    last = state.end
    final = bool(manifest and Snapshots(store).ended(manifest))
    over = last is not None or (final and not (state.ended or state.lease))
    told_s = [state.last_s, *([float(steps["end"].max())] if len(steps) else [])]
    until_s = max(told_s) if over and max(told_s) > 0 else now()
    ledger = Ledger.from_state(state, records, until_s, steps)
    if over:  # include what nodes did after the controller's last fact
        until_s = max([until_s, *(a.gone_s for a in ledger.attempts if a.gone_s)])
    started_s = min((s.t for s in facts), default=until_s)
    curve, lost = _curves(steps, records.rows, ledger.epochs)
    name, validation = _validation(facts, records, ledger.epochs)
    setups = summarize_setups(store, facts)
    committed = tuple(one for _, one in state.snapshots)
    return Summary(
        url=store.url,
        state=last.outcome if last else "finished" if final else "going on",
        reason=last.reason if last else "",
        step=manifest.step if manifest else 0,
        total_steps=state.total,
        started_s=started_s,
        ended_s=until_s,
        away_s=_away(facts),
        ledger=ledger,
        curve=curve,
        lost=lost,
        validation_name=name,
        validation=validation,
        snapshots=committed,
        kept=kept,
        marks=_marks(facts),
        session=state.session,
        asked=state.asked[1] if state.asked else None,
        postmortem=postmortem(facts, ledger, steps, records),
        problems=tuple(problems),
        store=egress.estimate(store.url, facts, kept, until_s - started_s),
        data=egress.data_read(facts),
        facts=tuple(facts),
        norms=_norms(store, records.rows),
        tokens_per_step=sum(tokens) / len(tokens) if tokens else 0.0,
        alerts=_alerts(store, facts, until_s),
        speed=speed_of(facts, steps, records),
        setups=setups,
        logbook=read_logbook(store, setups.people),
        side_jobs=tuple(side_jobs(facts, committed)),
        phases=_phases(store, problems),
    )


def _lost_epochs(store: ObjectStore, state: RunState) -> list[Stamped]:
    """Return facts for worlds whose creator died before it recorded them. Their members are known
    from their objects in the rendezvous."""
    begun = {n: w.session_s for n, w in state.worlds.items() if w.session_s and not w.begun}
    lost = [n for n in epoch_numbers(store) if n in begun]
    found: list[Stamped] = []
    objects = get_each(store, map(epoch_key, lost))
    for number, (_, data) in zip(lost, objects, strict=True):
        # `harness prove verify` reports damaged objects
        with contextlib.suppress(BadObject):
            epoch = Epoch.decode(data or b"")
            if epoch.epoch == number:
                fact = EpochStarted(number, epoch.members, epoch.world, epoch.reason)
                found.append(Stamped(begun[number], "rendezvous", fact))
    return found


def _newest(store: ObjectStore, problems: list[str]) -> tuple[Manifest | None, int]:
    """Return the newest readable manifest and the number of snapshots. Unlike `Snapshots.latest`
    it marks no snapshot, because a report must not write."""
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    for ref in refs:
        try:
            return snapshots.load(ref), len(refs)
        except (NotFound, SnapshotCorrupt) as e:  # just pruned, or corrupt: try the next older
            problems += [str(e)] if isinstance(e, SnapshotCorrupt) else []
    return None, len(refs)


def _records(store: ObjectStore, manifest: Manifest | None, problems: list[str]) -> Committed:
    try:
        named = rec.named(manifest.data) if manifest else None
        if named is None:
            return NO_RECORDS
        identity = Identity.decode(store.get(IDENTITY))
        return read_committed(store, named, rec.genesis(identity.body))
    except (rec.BrokenRecords, NotFound) as e:
        problems.append(f"{e}; steps are shown as they were told live (see: harness prove verify)")
        return NO_RECORDS
    except BadObject as e:
        problems.append(
            f"run.json cannot be read ({e}); steps are shown as they were told live (see: harness "
            "prove verify)"
        )
        return NO_RECORDS


def _phases(store: ObjectStore, problems: list[str]) -> tuple[RunPhase, ...]:
    try:
        return tuple(read_phases(store)) if store.list(PHASES) else ()
    except (NotFound, BadObject) as e:
        problems.append(f"the script's trainings cannot be told apart: {e}")
        return ()


def _norms(store: ObjectStore, committed: Columns) -> tuple[tuple[int, float], ...]:
    """Return (step, gradient norm) of committed steps from their records; for a long run only from
    some objects. Damaged ones are skipped here and reported by `_records`."""
    if not len(committed):
        return ()
    keys = sorted(rec.heads(store.list(SAMPLES)).values())
    epochs = committed["epoch"]  # of steps 1, 2, ...
    some = keys[:: len(keys) // MOST_SAMPLED + 1]
    found: dict[int, float] = {}
    for key, data in get_each(store, some):
        with contextlib.suppress(rec.BrokenRecords):
            for r in rec.decode(data or b"", key):
                counts = 0 < r.step <= len(epochs) and epochs[r.step - 1] == r.epoch
                if counts and "grad_norm" in r.metrics:
                    found[r.step] = r.metrics["grad_norm"]
    return tuple(sorted(found.items()))


def _alerts(store: ObjectStore, facts: list[Stamped], until_s: float) -> tuple[Alert, ...]:
    """Return the alerts that were fired. If there are none, return those that would have been,
    unless the run has too many facts to examine."""
    told = AlertLog(store).read()
    return tuple(told or (fired(facts, until_s) if len(facts) <= MOST_JUDGED else ()))


def _away(facts: list[Stamped]) -> float:
    """Return the total seconds between each end of the run and its next launch."""
    away, ended_s = 0.0, None
    for s in facts:
        if isinstance(s.fact, RunEnded):
            ended_s = s.t
        elif isinstance(s.fact, (RunAsked, LeaseTaken)) and ended_s is not None:
            away, ended_s = away + s.t - ended_s, None
    return away


def _curves(
    told: Columns, committed: Columns, epochs: Sequence[EpochRow]
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the committed steps (and those of a living world after its newest snapshot), and the
    lost ones. Very many are thinned evenly; each generation keeps its first and last."""
    living = [e.epoch for e in epochs if not e.ended]
    more = step_records.without(told, committed)
    lives = np.isin(more["epoch"], living) if len(committed) else np.ones(len(more), bool)
    curve = step_records.joined([committed, more[lives]])
    curve = _thinned(curve[np.lexsort((curve["epoch"], curve["step"]))])
    # in the order of generations, in which they were recorded
    lost = _thinned(more[~lives])
    return tuple(map(_point, curve)), tuple(map(_point, lost))


def _thinned(rows: Columns) -> Columns:
    every = -(-len(rows) // MOST_POINTS)
    if every < 2:
        return rows
    kept = np.arange(len(rows)) % every == 0
    edges = np.flatnonzero(rows["epoch"][1:] != rows["epoch"][:-1])
    kept[edges] = kept[edges + 1] = kept[-1] = True
    found: Columns = rows[kept]
    return found


def _point(row: Any) -> Point:
    return Point(
        int(row["step"]),
        float(row["loss"]),
        int(row["epoch"]),
        float(row["end"]),
        float(row["seconds"]),
    )


def _validation(
    facts: list[Stamped], records: Committed, epochs: Sequence[EpochRow]
) -> tuple[str, tuple[tuple[int, float], ...]]:
    """Return the name and the lineage's (step, value) of the likeliest validation loss metric."""
    told = [s.fact for s in facts if isinstance(s.fact, Validated)]
    asked = np.array([(f.epoch, f.step, 0.0, 0.0, 0.0, 0.0) for f in told], step_records.ROW)
    left = step_records.without(asked, records.rows)
    off = set(zip(left["epoch"].tolist(), left["step"].tolist(), strict=True))
    living = {e.epoch for e in epochs if not e.ended}
    by_name: dict[str, dict[int, float]] = {}
    for f in told:
        if (f.epoch, f.step) not in off or f.epoch in living or not len(records.rows):
            for name, value in f.metrics.items():
                by_name.setdefault(name, {})[f.step] = value
    # the record has it even if the fact was lost with its writer
    for step, metrics in records.metrics.items():
        for name, value in metrics.items():
            by_name.setdefault(name, {}).setdefault(step, value)
    best = sorted(
        (n for n in by_name if "loss" in n), key=lambda n: (n != "val_loss", "val" not in n, n)
    )
    return (best[0], tuple(sorted(by_name[best[0]].items()))) if best else ("", ())


def _marks(facts: list[Stamped]) -> tuple[TimelineMark, ...]:
    marks: list[TimelineMark] = []
    for s in facts:
        match s.fact:
            case WorkerFailed() as f:
                text = (
                    f"rank {f.rank} of generation {f.epoch} ({f.member}) ended with {f.error}: "
                    f"{f.message}"
                )
                marks.append(TimelineMark(s.t, "failed", text, f.log_tail))
            case GuardTripped(step, _, what, value):
                marks.append(TimelineMark(s.t, "guard", f"step {step}: {what} ({value:g})"))
            case StepSkipped(step, _, why):
                marks.append(TimelineMark(s.t, "skipped", f"step {step}: {why}"))
            case SnapshotFailed(step, _, why):
                marks.append(
                    TimelineMark(s.t, "snapshot failed", f"snapshot of step {step}: {why}")
                )
            case SnapshotQuarantined(step, epoch, why):
                marks.append(
                    TimelineMark(
                        s.t, "quarantined", f"snapshot of step {step} (generation {epoch}): {why}"
                    )
                )
            case Warned(step, _, what):
                marks.append(TimelineMark(s.t, "warned", f"step {step}: {what}"))
            case _:
                if (mark := _mark_of_node(s)) is not None:
                    marks.append(mark)
    return tuple(marks)


def _mark_of_node(s: Stamped) -> TimelineMark | None:
    match s.fact:
        case WorkerHung() as f if f.guilty:
            text = f"rank {f.rank} of generation {f.epoch} ({f.member}) hung in {f.place}: {f.what}"
            return TimelineMark(s.t, "hung", text)
        case HealthSeen(member, gpu, what, message, action) if action != "ignore":
            text = f"{member}: GPU {gpu}: {what} {message}: {action}"
            return TimelineMark(s.t, "health", text)
        case GraceSpent(member, _, _, step, committed, verdict):
            told = verdict or f"at step {step}, {committed} is committed"
            return TimelineMark(s.t, "too late", f"{member}: its time is up: {told}")
        case DrainVerdict() as f if not f.committed:
            text = (
                f"{f.member}: rank {f.rank}'s share of step {f.step} was not committed before the "
                f"deadline; safe is step {f.last_good_step}"
            )
            return TimelineMark(s.t, "drain", text)
    return None
