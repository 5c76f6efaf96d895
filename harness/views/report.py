"""What happened in a run, for people: tables in the terminal, one self-contained HTML page, and JSON. `harness report` is this.

Everything is read from the bucket and nothing is written to it; facts, step records and manifests are all that is needed, so a
report of a run that is going on, or whose machines are all dead, is made in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.bucket.journal import read_facts, read_records
from harness.core import prices as egress
from harness.core import records as rec
from harness.core.facts import (
    Count,
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
    built,
    loaded,
)
from harness.views.ledger import BUCKETS, NANO, AttemptRow, EpochRow, Ledger
from storage.manifest import Manifest, SnapshotCorrupt
from storage.objects import NotFound, ObjectStore
from storage.snapshots import Snapshots
from storage.text import plain

COLOURS = {  # of the terminal; the page has its own, for light and dark
    "useful": "green", "redone": "red", "snapshot": "blue", "start": "magenta", "reform": "yellow", "drain": "cyan",
    "idle": "bright_black", "other": "white",
}  # fmt: skip
MEANING = {
    "useful": "steps of the committed lineage",
    "redone": "work lost with its world, done again",
    "snapshot": "standing still to copy the state",
    "start": "booting, importing, first restore",
    "reform": "between worlds: rendezvous, restart, restore",
    "drain": "after the last step, until the node was gone",
    "idle": "up while others trained",
    "other": "between steps: validation, logging",
}


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
    state: str  # "done" | "stopped" | "failed" | "going on" | "finished" (final snapshot, but no controller said so)
    reason: str
    step: int  # committed
    total_steps: int
    started_s: float
    ended_s: float  # of what is known so far
    away_s: float  # between an end of the run and the next launch
    ledger: Ledger
    curve: tuple[Point, ...]  # committed steps, and those after the newest snapshot of a run that goes on
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


# ---- reading ----------------------------------------------------------------------------------------------------
def summarize(store: ObjectStore, now: Callable[[], float] = time.time) -> Summary:
    """Read the whole run. What is broken is told in `problems` and passed over. Raises StoreError."""
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
        store=egress.estimate(store.url, facts, kept, until_s - min((s.t for s in facts), default=until_s)),
    )


def _lost_epochs(store: ObjectStore, facts: list[Stamped]) -> list[Stamped]:
    """Worlds whose creator died before it had told of them: their objects in the rendezvous say who was in."""
    told = {s.fact.epoch for s in facts if isinstance(s.fact, EpochStarted)}
    begun = {s.fact.epoch: s.t for s in facts if isinstance(s.fact, SessionStarted)}
    found: list[Stamped] = []
    for key in store.list("rdzv/epochs/"):
        name = key.rsplit("/", 1)[-1].removesuffix(".json")
        if not name.isdigit() or int(name) in told or int(name) not in begun:
            continue
        with contextlib.suppress(ValueError, TypeError, AttributeError, NotFound):  # `harness verify` names what is damaged
            body = built(_Epoch, loaded(store.get(key)))
            fact = EpochStarted(int(name), body.members, sum(body.nproc), body.reason)
            found.append(Stamped(begun[int(name)], "rendezvous", fact))
    return found


@dataclass(frozen=True)
class _Epoch:
    """What of an epoch's object in the rendezvous is told in a report."""

    members: tuple[str, ...]
    nproc: tuple[Count, ...]
    reason: str = ""


def _newest(store: ObjectStore, problems: list[str]) -> tuple[Manifest | None, int]:
    """The newest readable manifest. Unlike `Snapshots.latest` this marks nothing: a report leaves no trace."""
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    for ref in refs:
        try:
            return snapshots.load(ref), len(refs)
        except (NotFound, SnapshotCorrupt) as e:  # pruned a moment ago, or bad: the next older one
            problems += [str(e)] if isinstance(e, SnapshotCorrupt) else []
    return None, len(refs)


def _records(store: ObjectStore, manifest: Manifest | None, problems: list[str]) -> list[rec.StepRecord]:
    try:
        named = rec.named(manifest.data) if manifest else None
        if named is None:
            return []
        return read_records(store, named.key, named.head, rec.genesis(loaded(store.get("run.json"))))
    except (rec.BrokenRecords, NotFound) as e:
        problems.append(f"{e}; steps are shown as they were told live (see: harness verify)")
        return []
    except (ValueError, TypeError, RecursionError) as e:
        problems.append(f"run.json cannot be read ({e}); steps are shown as they were told live (see: harness verify)")
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


def _curves(facts: list[Stamped], records: list[rec.StepRecord], epochs: Sequence[EpochRow]) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
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
    return tuple(sorted(curve, key=lambda p: (p.step, p.epoch))), tuple(sorted(lost, key=lambda p: (p.epoch, p.step)))


def _validation(
    facts: list[Stamped], records: list[rec.StepRecord], epochs: Sequence[EpochRow]
) -> tuple[str, tuple[tuple[int, float], ...]]:
    """The metric that looks most like a validation loss, by step; of the lineage only."""
    committed = {(r.epoch, r.step) for r in records}
    living = {e.epoch for e in epochs if not e.ended}
    by_name: dict[str, dict[int, float]] = {}
    for s in facts:
        f = s.fact
        if isinstance(f, Validated) and ((f.epoch, f.step) in committed or f.epoch in living or not records):
            for name, value in f.metrics.items():
                by_name.setdefault(name, {})[f.step] = value
    for r in records:  # the record knows, also when the fact was lost with its writer
        for name, value in r.metrics.items():
            if name != "grad_norm":
                by_name.setdefault(name, {}).setdefault(r.step, value)
    best = sorted((n for n in by_name if "loss" in n), key=lambda n: (n != "val_loss", "val" not in n, n))
    return (best[0], tuple(sorted(by_name[best[0]].items()))) if best else ("", ())


def _marks(facts: list[Stamped]) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for s in facts:
        match s.fact:
            case WorkerFailed() as f:
                text = f"rank {f.rank} of epoch {f.epoch} ({f.member}) ended with {f.error}: {f.message}"
                marks.append(Mark(s.t, "failed", text, f.log_tail))
            case GuardTripped(step, _, what, value):
                marks.append(Mark(s.t, "guard", f"step {step}: {what} ({value:g})"))
            case SnapshotFailed(step, _, why):
                marks.append(Mark(s.t, "snapshot failed", f"snapshot of step {step}: {why}"))
            case SnapshotQuarantined(step, epoch, why):
                marks.append(Mark(s.t, "quarantined", f"snapshot of step {step} (epoch {epoch}): {why}"))
    return tuple(marks)


# ---- words ------------------------------------------------------------------------------------------------------
def duration(seconds: float | None) -> str:
    """`0.4 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    if seconds is None:
        return "–"
    if seconds < 99.95:
        return f"{seconds:.1f} s" if seconds >= 0.095 or seconds == 0 else f"{1000 * seconds:.0f} ms"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def money(usd: float) -> str:
    if 0 < usd < 0.00005:
        return "<$0.0001"
    return f"${usd:,.2f}" if abs(usd) >= 10 or usd == 0 else f"${usd:.3f}" if abs(usd) >= 0.1 else f"${usd:.4f}"


def nbytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.5 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.995 else f"{100 * share:.0f} %"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4f}"


def clock(t: float) -> str:
    try:
        return datetime.fromtimestamp(t, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "????-??-?? ??:??:??"  # no such date; callers cut it at fixed places


def unread_text(unread: Sequence[Unreadable]) -> str:
    return f"{plural(len(unread), 'fact')} could not be read (see: harness verify), the first: {unread[0]}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def spread(shares: Sequence[int]) -> str:
    """Micro-batches per rank: `6 5 5`, or `4 x 8` for many equal ones."""
    if len(set(shares)) == 1 and len(shares) > 4:
        return f"{len(shares)} × {shares[0]}"
    text = " ".join(map(str, shares[:8]))
    return text + (" …" if len(shares) > 8 else "")


def headline(s: Summary) -> list[tuple[str, str]]:
    """What a person wants to know first."""
    ledger, low_high = s.ledger, s.worlds
    up = [a for a in ledger.attempts if a.up_s is not None]
    taken = sum(a.end in ("preempted", "lost") or any(n.member in a.members and n.kind == "kill" for n in ledger.notices) for a in up)
    rows = [
        ("state", s.state + (f": {s.reason}" if s.reason else "")),
        ("steps", f"{s.step:,} of {s.total_steps:,} committed" if s.total_steps else f"{s.step:,} committed"),
    ]
    if s.losses:
        rows.append(("loss", f"{number(s.losses[0])} → {number(s.losses[1])}"))
    if s.validations:
        rows.append((s.validation_name.replace("_", " "), f"{number(s.validations[0])} → {number(s.validations[1])}"))
    away = f" (and {duration(s.away_s)} between launches)" if s.away_s >= 1 else ""
    world = f"{low_high[0]}" if low_high[0] == low_high[1] else f"{low_high[0]} to {low_high[1]}"
    rows += [
        ("wall time", duration(s.wall_s) + away),
        ("world", f"{world} ranks in {plural(len([e for e in ledger.epochs if e.steps]), 'epoch')}"),
        ("nodes", f"{plural(len(up), 'node')} used, {taken} taken away; {plural(ledger.steps_lost, 'step')} lost and redone"),
        ("goodput", f"{percent(ledger.goodput)} of {duration(ledger.billed_s)} billed went into steps that count"),
        ("cost", cost_text(s)),
    ]
    return rows


def cost_text(s: Summary) -> str:
    cost = s.ledger.cost
    if not cost.on_demand_usd:
        return money(cost.spot_usd)
    sure = "" if cost.known else " (some on-demand prices are unknown)"
    return f"{money(cost.spot_usd)}; {percent(cost.saved)} less than the same node-hours on demand ({money(cost.on_demand_usd)}){sure}"


# ---- terminal ---------------------------------------------------------------------------------------------------
def print_report(summary: Summary, console: Console) -> None:
    """The report as tables. Without a terminal: the same without colours."""
    console.print(render(summary), highlight=False)


def render(s: Summary) -> Group:
    parts: list[Any] = [Text(""), Text(plain(s.url), style="bold"), _headline_table(s)]
    parts += [Text(f"! {plain(p)}", style="yellow") for p in s.problems]
    sections = (
        ("Attempts", _attempts_table), ("Epochs", _epochs_table), ("Where billed time went", _buckets_table), ("Money", _money_table),
        ("Snapshots", _snapshots_table), ("Notices", _notices_table), ("Trouble", _marks_table),
    )  # fmt: skip
    for title, make in sections:
        table = make(s)
        if table is not None:
            parts += [Text(f"\n{title}", style="bold"), Padding(table, (0, 0, 0, 1))]
    return Group(*parts)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(plain(value)))
    return table


def _headline_table(s: Summary) -> Padding:
    colour = {"done": "green", "finished": "green", "failed": "red", "stopped": "yellow"}.get(s.state, "cyan")
    table = Table.grid(padding=(0, 2))
    for name, value in headline(s):
        table.add_row(Text(name, style="dim"), Text(plain(value), style=f"bold {colour}" if name == "state" else ""))
    return Padding(table, (0, 0, 0, 1))


def attempt_end(a: AttemptRow) -> str:
    if not a.end:
        return "still there" if a.up_s is not None else "not up yet"
    return a.end + (f" ({a.reason})" if a.reason and a.reason != a.end else "")


def _attempts_table(s: Summary) -> Any:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    if not used and not refused:
        return None
    table = _table("#", "offer", "up", "why it ended", "billed", "useful", "$", right=("#", "up", "billed", "useful", "$"))
    for a in used:
        up = "–" if a.up_s is None else f"+{duration(a.up_s - s.started_s)}"
        useful = percent(a.ns["useful"] / a.billed_ns) if a.billed_ns else "–"
        style = "red" if a.end in ("failed", "preempted", "lost", "unfit") else ""
        table.add_row(
            Text(plain(a.name)), Text(plain(a.offer or a.accelerator)), up, Text(plain(attempt_end(a)), style=style),
            duration(a.billed_s), useful, money(a.usd),
        )  # fmt: skip
    return Group(table, Text(refusals(refused), style="dim")) if refused else table


def refusals(n: int) -> str:
    return f"and {plural(n, 'attempt')} that found no capacity (nothing billed)"


def _epochs_table(s: Summary) -> Any:
    if not s.ledger.epochs:
        return None
    right = ("#", "world", "accum", "lost", "took")
    table = _table("#", "world", "nodes", "accum", "shares", "steps", "why it ended", "lost", "took", right=right)
    for e in s.ledger.epochs:
        table.add_row(
            str(e.epoch), str(e.world), Text(plain(" ".join(e.attempts))), str(e.accumulation or "–"), spread(e.shares), steps_text(e),
            Text(plain(e.ended) or "goes on"), Text(str(e.steps_lost), style="red" if e.steps_lost else "dim"), duration(e.lost_s),
        )  # fmt: skip
    note = "shares: micro-batches of each rank, accum: of the busiest; lost: steps to redo; took: time until the next world trained"
    return Group(table, Text(note, style="dim"))


def steps_text(e: EpochRow) -> str:
    return "none" if e.first_step is None else f"{e.first_step}–{e.last_step}"


def _buckets_table(s: Summary) -> Any:
    ledger = s.ledger
    if not ledger.billed_ns:
        return None
    table = _table("", "", "share", "time", "$", "", right=("share", "time", "$"))
    for bucket in BUCKETS:
        share = ledger.ns[bucket] / ledger.billed_ns
        if ledger.ns[bucket]:
            bar = Text("█" * max(1, round(20 * share)), style=COLOURS[bucket], no_wrap=True)
            table.add_row(
                bucket, bar, percent(share), duration(ledger.ns[bucket] / NANO), money(ledger.nusd[bucket] / NANO),
                Text(MEANING[bucket], style="dim", no_wrap=True, overflow="ellipsis"),
            )  # fmt: skip
    table.add_row("billed", "", "100 %", duration(ledger.billed_s), money(ledger.usd), "", style="bold")
    table.show_header = False
    return table


def money_rows(s: Summary) -> list[tuple[str, float, str]]:
    cost = s.ledger.cost
    rows = [("paid", cost.spot_usd, f"{money(1000 * cost.spot_usd / s.step)} per 1,000 steps" if s.step else "")]
    if cost.on_demand_usd:
        rows += [
            ("the same node-hours on demand", cost.on_demand_usd, f"saved {percent(cost.saved)}"),
            ("an on-demand run that nothing disturbs", cost.undisturbed_usd, f"saved {percent(cost.saved_undisturbed)}"),
        ]
    if s.store and s.store.stored_nbytes:
        note = f"estimate: {nbytes(s.store.stored_nbytes)} of snapshots; {money(s.store.month_usd)} for each month that they are kept"
        rows.append(("the bucket's storage meanwhile", s.store.storage_usd, note))
    if s.store and s.store.moved:
        ways = "; ".join(f"{nbytes(m.nbytes)} {m.source} to {m.target}" for m in s.store.moved)
        rows.append(("data between places", s.store.moved_usd, f"estimate: {ways}"))
    return rows


def _money_table(s: Summary) -> Any:
    if not s.ledger.billed_ns:
        return None
    table = _table("", "$", "", right=("$",))
    for name, usd, note in money_rows(s):
        table.add_row(name, money(usd), Text(note, style="dim"))
    table.show_header = False
    return table


def snapshot_rows(s: Summary) -> list[tuple[str, str]]:
    if not s.snapshots:
        return []
    whys: dict[str, int] = {}
    for one in s.snapshots:
        whys[one.why] = whys.get(one.why, 0) + 1
    return [
        ("committed", f"{len(s.snapshots)} ({', '.join(f'{n} {why}' for why, n in whys.items())}); {s.kept} in the bucket now"),
        ("bytes", f"{nbytes(median(x.nbytes for x in s.snapshots))} each, {nbytes(sum(x.nbytes for x in s.snapshots))} written"),
        ("training stood still", f"{duration(median(x.stall_s for x in s.snapshots))} (median), {_most(x.stall_s for x in s.snapshots)}"),
        ("time to commit", f"{duration(median(x.commit_s for x in s.snapshots))} (median), {_most(x.commit_s for x in s.snapshots)}"),
    ]


def _most(values: Any) -> str:
    return f"at most {duration(max(values))}"


def _snapshots_table(s: Summary) -> Any:
    rows = snapshot_rows(s)
    return _grid(rows) if rows else None


def verdict(in_time: bool | None, cancelled: bool) -> str:
    return "cancelled" if cancelled else {True: "in time", False: "TOO LATE", None: "nothing to save"}[in_time]


def _notices_table(s: Summary) -> Any:
    if not s.ledger.notices:
        return None
    table = _table("at", "node", "notice", "from", "grace", "committed after", "step", "", right=("at", "grace", "committed after", "step"))
    for n in s.ledger.notices:
        table.add_row(
            f"+{duration(n.seen_s - s.started_s)}", Text(plain(n.attempt or n.member)), Text(plain(n.kind)), Text(plain(n.source)),
            duration(n.grace_s), duration(n.commit_s), str(n.step or "–"),
            Text(verdict(n.in_time, n.cancelled), style={True: "green", False: "bold red", None: "dim"}[n.in_time]),
        )  # fmt: skip
    return table


def _marks_table(s: Summary) -> Any:
    if not s.marks:
        return None
    table = _table("at", "", "", right=("at",))
    for m in s.marks[-20:]:
        table.add_row(f"+{duration(m.t - s.started_s)}", m.what, Text(plain(m.text[:400])))
    table.show_header = False
    return table


# ---- JSON -------------------------------------------------------------------------------------------------------
def to_json(s: Summary) -> dict[str, Any]:
    """The numbers as plain JSON (no NaN). Seconds and dollars, with the exact nanoseconds and nano-dollars of the ledger."""
    ledger = s.ledger

    def attempt(a: AttemptRow) -> dict[str, Any]:
        body = {f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.name != "segments"}
        return {**body, "billed_s": a.billed_s, "usd": a.usd}

    body = {
        "url": s.url,
        "state": s.state,
        "reason": s.reason,
        "step": s.step,
        "total_steps": s.total_steps,
        "loss": s.losses,
        "validation": {"name": s.validation_name, "points": s.validation} if s.validation else None,
        "started_s": s.started_s,
        "ended_s": s.ended_s,
        "wall_s": s.wall_s,
        "away_s": s.away_s,
        "worlds": s.worlds,
        "goodput": ledger.goodput,
        "steps_lost": ledger.steps_lost,
        "billed_s": ledger.billed_s,
        "buckets": {b: {"s": ledger.ns[b] / NANO, "ns": ledger.ns[b], "nusd": ledger.nusd[b]} for b in BUCKETS},
        "cost": {**dataclasses.asdict(ledger.cost), "saved_usd": ledger.cost.saved_usd, "saved": ledger.cost.saved},
        "attempts": [attempt(a) for a in ledger.attempts],
        "epochs": [{**dataclasses.asdict(e), "accumulation": e.accumulation} for e in ledger.epochs],
        "notices": [{**dataclasses.asdict(n), "grace_s": n.grace_s, "in_time": n.in_time} for n in ledger.notices],
        "snapshots": {"kept": s.kept, "committed": [dataclasses.asdict(x) for x in s.snapshots]},
        "trouble": [dataclasses.asdict(m) for m in s.marks],
        "problems": s.problems,
        "store": {**dataclasses.asdict(s.store), "moved_usd": s.store.moved_usd} if s.store else None,
    }
    cleaned: dict[str, Any] = _finite(body)
    return cleaned


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a loss may be either."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_html(summary: Summary, path: str | Path) -> None:
    """One page that needs nothing else: no network, no fonts, no libraries."""
    from harness.views.page import page

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(summary), encoding="utf-8")
