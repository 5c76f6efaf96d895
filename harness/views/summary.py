"""What happened in a run, from its facts and records: what the report, the page and JSON render."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bucket.alerts import Alert, AlertLog
from harness.bucket.archive import read_past
from harness.bucket.epochs import epoch_numbers
from harness.bucket.layout import IDENTITY, SAMPLES, Epoch, Identity, epoch_key
from harness.bucket.recorded import read_committed
from harness.core import columns
from harness.core import prices as egress
from harness.core import records as rec
from harness.core.columns import NONE, Columns, Committed
from harness.core.facts import (
    DrainVerdict,
    EpochStarted,
    GraceSpent,
    GuardTripped,
    HealthSeen,
    LeaseTaken,
    NodeBilled,
    RunAsked,
    RunEnded,
    SessionStarted,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotQuarantined,
    Stamped,
    Unreadable,
    Validated,
    Warned,
    WorkerFailed,
    WorkerHung,
)
from harness.core.values import BadObject
from harness.views.alerts import fired
from harness.views.ledger import Ledger
from harness.views.logbook import Logbook, read_logbook
from harness.views.postmortem import Postmortem, postmortem
from harness.views.report import unread_text
from harness.views.rows import EpochRow
from harness.views.setups import SetupSummary, summarize_setups
from harness.views.side_jobs import SideJobRows, side_jobs, told_by_watchers
from harness.views.speed import SpeedSummary, speed_of
from storage.errors import NotFound
from storage.manifest import Manifest, SnapshotCorrupt
from storage.objects import ObjectStore, get_each
from storage.snapshots import Snapshots

MOST_POINTS = 20_000  # of a curve
MOST_JUDGED = 30_000  # facts that are gone through for alerts that nobody fired
MOST_SAMPLED = 40  # objects of step records that are read for gradients' norms
NO_RECORDS = Committed(NONE, {}, {})


@dataclass(frozen=True)
class Point:
    """One executed step, as the loss curve draws it."""

    step: int
    loss: float
    epoch: int
    t: float
    seconds: float


@dataclass(frozen=True)
class TimelineMark:
    """Something that happened at one moment."""

    t: float
    # "failed" | "guard" | "snapshot failed" | "quarantined" | "hung" | "health" | "drain" |
    # "too late" | "warned"
    what: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Summary:
    """Everything that the renderings below need."""

    url: str
    # "done" | "stopped" | "failed" | "going on" | "finished" (final snapshot, but no controller
    # said so)
    state: str
    reason: str
    step: int  # committed
    total_steps: int
    started_s: float
    ended_s: float  # of what is known so far
    away_s: float  # between an end of the run and the next launch
    ledger: Ledger
    # committed steps, and those after the newest snapshot of a run that goes on
    curve: tuple[Point, ...]
    lost: tuple[Point, ...]  # executed, and done again
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
    data: egress.DataRead | None = None  # that steps read; None: nobody counted
    speed: SpeedSummary = field(default_factory=SpeedSummary)
    facts: tuple[Stamped, ...] = ()  # by time, without the steps
    norms: tuple[tuple[int, float], ...] = ()  # of gradients, by step; of a long run a sample
    tokens_per_step: float = 0.0  # 0: not known
    alerts: tuple[Alert, ...] = ()  # that were fired, oldest first
    setups: SetupSummary = field(default_factory=SetupSummary)
    logbook: Logbook = field(default_factory=Logbook)
    side_jobs: tuple[SideJobRows, ...] = ()  # by watch

    @property
    def tokens(self) -> float:
        """Of the committed steps; 0: not known."""
        return self.step * self.tokens_per_step

    @property
    def usd_per_1m_tokens(self) -> float | None:
        """None: not known."""
        return 1e6 * self.ledger.usd / self.tokens if self.tokens else None

    @property
    def wall_s(self) -> float:
        return max(0.0, self.ended_s - self.started_s - self.away_s)

    @property
    def losses(self) -> tuple[float, float] | None:
        """Before and after."""
        return (self.curve[0].loss, self.curve[-1].loss) if self.curve else None

    @property
    def validations(self) -> tuple[float, float] | None:
        return (self.validation[0][1], self.validation[-1][1]) if self.validation else None

    @property
    def worlds(self) -> tuple[int, int]:
        """Fewest and most ranks that made a step."""
        found = [e.world for e in self.ledger.epochs if e.steps]
        return (min(found), max(found)) if found else (0, 0)

    @property
    def samples(self) -> int:
        return self.step * self.session.global_batch if self.session else 0


# ---- reading -------------------------------------------------------------------------------------
def summarize(store: ObjectStore, now: Callable[[], float] = time.time) -> Summary:
    """Read the whole run. What is broken is told in `problems` and passed over. Raises
    StoreError."""
    problems: list[str] = []
    past = read_past(store)
    steps = columns.newest_told(past.steps)
    facts = [s for s in past.facts if not isinstance(s.fact, Unreadable)]
    unread = [s.fact for s in past.facts if isinstance(s.fact, Unreadable)]
    if unread:
        problems.append(f"{unread_text(unread)}; the numbers below may be wrong")
    facts += _lost_epochs(store, facts)
    tokens = [s.tokens for s in past.newest if s.tokens]
    del past
    manifest, kept = _newest(store, problems)
    records = _records(store, manifest, problems)
    ended = [s.fact for s in facts if isinstance(s.fact, (RunEnded, LeaseTaken))]
    last = ended[-1] if ended and isinstance(ended[-1], RunEnded) else None
    final = bool(manifest and Snapshots(store).ended(manifest))
    over = last is not None or (final and not ended)
    # bills and side jobs are told long after its end
    told_s = [s.t for s in facts if not isinstance(s.fact, NodeBilled) and not told_by_watchers(s)]
    told_s += [*([float(steps["end"].max())] if len(steps) else [])]
    until_s = max(told_s, default=now()) if over else now()
    ledger = Ledger.of(facts, records, until_s, steps)
    if over:  # what nodes did after the controller's last word belongs to it
        until_s = max([until_s, *(a.gone_s for a in ledger.attempts if a.gone_s)])
    started_s = min((s.t for s in facts), default=until_s)
    sessions = [s.fact for s in facts if isinstance(s.fact, SessionStarted)]
    curve, lost = _curves(steps, records.rows, ledger.epochs)
    name, validation = _validation(facts, records, ledger.epochs)
    setups = summarize_setups(store, facts)
    committed = tuple(s.fact for s in facts if isinstance(s.fact, SnapshotCommitted))
    return Summary(
        url=store.url,
        state=last.outcome if last else "finished" if final else "going on",
        reason=last.reason if last else "",
        step=manifest.step if manifest else 0,
        total_steps=max((s.total_steps for s in sessions), default=0),
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
        session=sessions[-1] if sessions else None,
        asked=next((s.fact for s in reversed(facts) if isinstance(s.fact, RunAsked)), None),
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
    )


def _lost_epochs(store: ObjectStore, facts: list[Stamped]) -> list[Stamped]:
    """Worlds whose creator died before it had told of them: their objects in the rendezvous say
    who was in."""
    told = {s.fact.epoch for s in facts if isinstance(s.fact, EpochStarted)}
    begun = {s.fact.epoch: s.t for s in facts if isinstance(s.fact, SessionStarted)}
    lost = [n for n in epoch_numbers(store) if n in begun and n not in told]
    found: list[Stamped] = []
    objects = get_each(store, map(epoch_key, lost))
    for number, (_, data) in zip(lost, objects, strict=True):
        # `harness verify` names what is damaged
        with contextlib.suppress(BadObject):
            epoch = Epoch.decode(data or b"")
            if epoch.epoch == number:
                fact = EpochStarted(number, epoch.members, epoch.world, epoch.reason)
                found.append(Stamped(begun[number], "rendezvous", fact))
    return found


def _newest(store: ObjectStore, problems: list[str]) -> tuple[Manifest | None, int]:
    """The newest readable manifest. Unlike `Snapshots.latest` this marks nothing: a report
    leaves no trace."""
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    for ref in refs:
        try:
            return snapshots.load(ref), len(refs)
        except (NotFound, SnapshotCorrupt) as e:  # pruned a moment ago, or bad: the next older one
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
        problems.append(f"{e}; steps are shown as they were told live (see: harness verify)")
        return NO_RECORDS
    except BadObject as e:
        problems.append(
            f"run.json cannot be read ({e}); steps are shown as they were told live (see: harness "
            "verify)"
        )
        return NO_RECORDS


def _norms(store: ObjectStore, committed: Columns) -> tuple[tuple[int, float], ...]:
    """Of gradients, as committed steps' records tell them: of a long run from some objects only.
    What is damaged is left out here; `_records` tells of it."""
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
    """What was fired; of a run that nobody watched for alerts what would have been, unless it is
    too long to be gone through once more."""
    told = AlertLog(store).read()
    return tuple(told or (fired(facts, until_s) if len(facts) <= MOST_JUDGED else ()))


def _away(facts: list[Stamped]) -> float:
    """Seconds between an end of the run and the next time it was launched."""
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
    """Committed steps (and those of a living world after its newest snapshot), and lost ones. Of
    very many every so many-th, and each epoch's first and last."""
    living = [e.epoch for e in epochs if not e.ended]
    more = columns.without(told, committed)
    lives = np.isin(more["epoch"], living) if len(committed) else np.ones(len(more), bool)
    curve = columns.joined([committed, more[lives]])
    curve = _thinned(curve[np.lexsort((curve["epoch"], curve["step"]))])
    # in the order of epochs, as they were told
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
    """The metric that looks most like a validation loss, by step; of the lineage only."""
    told = [s.fact for s in facts if isinstance(s.fact, Validated)]
    asked = np.array([(f.epoch, f.step, 0.0, 0.0, 0.0, 0.0) for f in told], columns.ROW)
    left = columns.without(asked, records.rows)
    off = set(zip(left["epoch"].tolist(), left["step"].tolist(), strict=True))
    living = {e.epoch for e in epochs if not e.ended}
    by_name: dict[str, dict[int, float]] = {}
    for f in told:
        if (f.epoch, f.step) not in off or f.epoch in living or not len(records.rows):
            for name, value in f.metrics.items():
                by_name.setdefault(name, {})[f.step] = value
    # the record knows, also when the fact was lost with its writer
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
                    f"rank {f.rank} of epoch {f.epoch} ({f.member}) ended with {f.error}: "
                    f"{f.message}"
                )
                marks.append(TimelineMark(s.t, "failed", text, f.log_tail))
            case GuardTripped(step, _, what, value):
                marks.append(TimelineMark(s.t, "guard", f"step {step}: {what} ({value:g})"))
            case SnapshotFailed(step, _, why):
                marks.append(
                    TimelineMark(s.t, "snapshot failed", f"snapshot of step {step}: {why}")
                )
            case SnapshotQuarantined(step, epoch, why):
                marks.append(
                    TimelineMark(
                        s.t, "quarantined", f"snapshot of step {step} (epoch {epoch}): {why}"
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
            text = f"rank {f.rank} of epoch {f.epoch} ({f.member}) hung in {f.place}: {f.what}"
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
