"""What happened in a run, from its facts and records: what the report, the page and JSON render."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.bucket.epochs import epoch_numbers, read_epoch
from harness.bucket.journal import read_facts, read_records
from harness.bucket.layout import IDENTITY, Identity
from harness.core import prices as egress
from harness.core import records as rec
from harness.core.facts import (
    EpochStarted,
    GuardTripped,
    LeaseTaken,
    RunAsked,
    RunEnded,
    SessionStarted,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotQuarantined,
    Stamped,
    StepDone,
    Unreadable,
    Validated,
    WorkerFailed,
)
from harness.core.values import BadObject
from harness.views.ledger import Ledger
from harness.views.report import unread_text
from harness.views.rows import EpochRow
from storage.errors import NotFound
from storage.manifest import Manifest, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots


@dataclass(frozen=True)
class Point:
    """One executed step, as the loss curve draws it."""

    step: int
    loss: float
    epoch: int
    t: float
    seconds: float


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment."""

    t: float
    what: str  # "failed" | "guard" | "snapshot failed" | "quarantined"
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
    marks: tuple[Mark, ...]
    session: SessionStarted | None
    asked: RunAsked | None
    problems: tuple[str, ...] = ()
    store: egress.Estimate | None = None

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
    found = read_facts(store)
    facts = [s for s in found if not isinstance(s.fact, Unreadable)]
    unread = [s.fact for s in found if isinstance(s.fact, Unreadable)]
    if unread:
        problems.append(f"{unread_text(unread)}; the numbers below may be wrong")
    facts += _lost_epochs(store, facts)
    manifest, kept = _newest(store, problems)
    records = _records(store, manifest, problems)
    ended = [s.fact for s in facts if isinstance(s.fact, (RunEnded, LeaseTaken))]
    last = ended[-1] if ended and isinstance(ended[-1], RunEnded) else None
    final = bool(manifest and Snapshots(store).ended(manifest))
    over = last is not None or (final and not ended)
    until_s = max((s.t for s in facts), default=now()) if over else now()
    ledger = Ledger.of(facts, records, until_s)
    if over:  # what nodes did after the controller's last word belongs to it
        until_s = max([until_s, *(a.gone_s for a in ledger.attempts if a.gone_s)])
    sessions = [s.fact for s in facts if isinstance(s.fact, SessionStarted)]
    curve, lost = _curves(facts, records, ledger.epochs)
    name, validation = _validation(facts, records, ledger.epochs)
    return Summary(
        url=store.url,
        state=last.outcome if last else "finished" if final else "going on",
        reason=last.reason if last else "",
        step=manifest.step if manifest else 0,
        total_steps=max((s.total_steps for s in sessions), key=lambda n: n, default=0),
        started_s=min((s.t for s in facts), default=until_s),
        ended_s=until_s,
        away_s=_away(facts),
        ledger=ledger,
        curve=curve,
        lost=lost,
        validation_name=name,
        validation=validation,
        snapshots=tuple(s.fact for s in facts if isinstance(s.fact, SnapshotCommitted)),
        kept=kept,
        marks=_marks(facts),
        session=sessions[-1] if sessions else None,
        asked=next((s.fact for s in reversed(facts) if isinstance(s.fact, RunAsked)), None),
        problems=tuple(problems),
        store=egress.estimate(
            store.url, facts, kept, until_s - min((s.t for s in facts), default=until_s)
        ),
    )


def _lost_epochs(store: ObjectStore, facts: list[Stamped]) -> list[Stamped]:
    """Worlds whose creator died before it had told of them: their objects in the rendezvous say
    who was in."""
    told = {s.fact.epoch for s in facts if isinstance(s.fact, EpochStarted)}
    begun = {s.fact.epoch: s.t for s in facts if isinstance(s.fact, SessionStarted)}
    found: list[Stamped] = []
    for number in epoch_numbers(store):
        if number in told or number not in begun:
            continue
        # `harness verify` names what is damaged
        with contextlib.suppress(BadObject, NotFound):
            epoch = read_epoch(store, number)
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


def _records(
    store: ObjectStore, manifest: Manifest | None, problems: list[str]
) -> list[rec.StepRecord]:
    try:
        named = rec.named(manifest.data) if manifest else None
        if named is None:
            return []
        identity = Identity.decode(store.get(IDENTITY))
        return read_records(store, named.key, named.head, rec.genesis(identity.body))
    except (rec.BrokenRecords, NotFound) as e:
        problems.append(f"{e}; steps are shown as they were told live (see: harness verify)")
        return []
    except BadObject as e:
        problems.append(
            f"run.json cannot be read ({e}); steps are shown as they were told live (see: harness "
            "verify)"
        )
        return []


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
    facts: list[Stamped], records: list[rec.StepRecord], epochs: Sequence[EpochRow]
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Committed steps (and those of a living world after its newest snapshot), and lost ones."""
    committed = {(r.epoch, r.step) for r in records}
    living = {e.epoch for e in epochs if not e.ended}
    curve = [Point(r.step, r.loss, r.epoch, r.t, r.dt) for r in records]
    lost: list[Point] = []
    for s in facts:
        f = s.fact
        if isinstance(f, StepDone) and (f.epoch, f.step) not in committed:
            point = Point(f.step, f.loss, f.epoch, f.t_start + f.seconds, f.seconds)
            (curve if f.epoch in living or not records else lost).append(point)
    return tuple(sorted(curve, key=lambda p: (p.step, p.epoch))), tuple(
        sorted(lost, key=lambda p: (p.epoch, p.step))
    )


def _validation(
    facts: list[Stamped], records: list[rec.StepRecord], epochs: Sequence[EpochRow]
) -> tuple[str, tuple[tuple[int, float], ...]]:
    """The metric that looks most like a validation loss, by step; of the lineage only."""
    committed = {(r.epoch, r.step) for r in records}
    living = {e.epoch for e in epochs if not e.ended}
    by_name: dict[str, dict[int, float]] = {}
    for s in facts:
        f = s.fact
        if isinstance(f, Validated) and (
            (f.epoch, f.step) in committed or f.epoch in living or not records
        ):
            for name, value in f.metrics.items():
                by_name.setdefault(name, {})[f.step] = value
    for r in records:  # the record knows, also when the fact was lost with its writer
        for name, value in r.metrics.items():
            if name != "grad_norm":
                by_name.setdefault(name, {}).setdefault(r.step, value)
    best = sorted(
        (n for n in by_name if "loss" in n), key=lambda n: (n != "val_loss", "val" not in n, n)
    )
    return (best[0], tuple(sorted(by_name[best[0]].items()))) if best else ("", ())


def _marks(facts: list[Stamped]) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for s in facts:
        match s.fact:
            case WorkerFailed() as f:
                text = (
                    f"rank {f.rank} of epoch {f.epoch} ({f.member}) ended with {f.error}: "
                    f"{f.message}"
                )
                marks.append(Mark(s.t, "failed", text, f.log_tail))
            case GuardTripped(step, _, what, value):
                marks.append(Mark(s.t, "guard", f"step {step}: {what} ({value:g})"))
            case SnapshotFailed(step, _, why):
                marks.append(Mark(s.t, "snapshot failed", f"snapshot of step {step}: {why}"))
            case SnapshotQuarantined(step, epoch, why):
                marks.append(
                    Mark(s.t, "quarantined", f"snapshot of step {step} (epoch {epoch}): {why}")
                )
    return tuple(marks)
