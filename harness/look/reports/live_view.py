"""A view of a run in progress: live on a terminal, plain lines elsewhere, JSON for programs.
`harness status` and `harness launch` use it.

`RunState` is a fold of facts that does not depend on their order: writers flush at their own pace,
so a worker's fact may be read before the controller's fact that caused it. Greater generations
and later times win, and a rewind is just a greater generation.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.bucket.controller_lease import LeaseWatch
from harness.bucket.journal import Follower
from harness.core import facts as f
from harness.core.facts import Stamped, Unreadable
from harness.core.formatting import (
    batch_text,
    clock,
    duration,
    money,
    nbytes,
    number_text,
    percent,
    plural,
)
from harness.core.setup_record import HARDWARE
from harness.ledger.run_state import RunState, noteworthy
from harness.look.alerts.alert_evaluator import AlertWatch
from harness.look.alerts.alert_log import SEVERITIES, Alert
from harness.look.reports.outlook import (
    RunOutlook,
    interval_words,
    wait_words,
    waiting_json,
    whole_seconds,
)
from harness.look.reports.summary import unread_text
from storage.errors import StoreUnavailable
from storage.stores.objects import ObjectStore
from storage.terminal_text import Console as Terminal
from storage.terminal_text import plain

# The events and the numbers of a live run as text.


CLOUDS = ("aws", "gcp", "azure")
NOTICES = {"kill": "preemption notice", "soft": "early warning of preemption"}


# ---- events --------------------------------------------------------------------------------------
def describe(fact: f.Fact, state: RunState) -> tuple[str, str] | None:
    """Return the style and the text of one event, or `None` if it is not worth a line."""
    return _of_nodes(fact, state) or _of_training(fact, state)


def _of_nodes(fact: f.Fact, state: RunState) -> tuple[str, str] | None:
    match fact:
        case f.RunAsked(task, low, high, policy):
            where = ", simulated cloud" if state.simulated else ""
            return "bold", f"launch {task}: {low} to {high} nodes, policy {policy}{where}"
        # requests and refusals are no events: in an outage there would be nothing else
        case f.AttemptUp(attempt):
            node = state.nodes.get(str(attempt))
            place = f" on {node.place}" if node and node.place else ""
            return "cyan", f"node {attempt} is up{place}{_refused_before(state, attempt)}"
        case f.AgentStarted(member):
            return "", f"{_who(state, member)}: its agent has started, and imports torch"
        case f.AttemptEnded() if fact.end != "no-capacity":
            style = {"finished": "green", "drained": "", "terminated": ""}.get(fact.end, "red")
            return style, f"node {fact.attempt}: {fact.end}" + (
                f" ({fact.reason})" if fact.reason and fact.reason != fact.end else ""
            )
        case f.NodeFound(member) if not state.attempt_of.get(member, member).isdigit():
            price = "" if fact.usd_per_h is None else f", {money(fact.usd_per_h)} an hour"
            words = (fact.cloud, fact.region, fact.instance_type or fact.accelerators)
            place = " ".join(word for word in words if word)
            return "cyan", f"{_who(state, member)} stands in {place or 'no known place'}{price}"
        case f.NodeBilled(member, launched_s, gone_s):
            lived = "is still there" if gone_s is None else f"lived {duration(gone_s - launched_s)}"
            return "", f"{_who(state, member)}: by SkyPilot's bill it {lived}"
        case f.NoticeSeen(member, source, kind, _, deadline):
            until = "" if deadline is None else f", gone at {clock(deadline)[11:]}"
            cloud = "simulated " if state.simulated and source in CLOUDS else ""
            what = NOTICES.get(kind, f"{kind} notice")
            return "yellow", f"{_who(state, member)}: {what} from {cloud}{source}{until}"
        case f.NoticeAcknowledged(member, _, heard):
            told = "was told" if heard else "could not be told"
            return "", f"{_who(state, member)}: the cloud {told} that it has gone"
        case f.AttemptDoubted(attempt, doubted):
            return (
                "",
                f"node {attempt}: "
                + ("to be preempted, a replacement is wanted" if doubted else "stays after all"),
            )
        case f.NoticeCancelled(member):
            return "", f"{_who(state, member)}: notice cancelled"
        case f.HealthSeen(member, gpu, what, message, action) if action != "ignore":
            return "red" if action in (
                "drain",
                "kill",
            ) else "yellow", f"{_who(state, member)}: GPU {gpu}: {what} {message}: {action}"
        case f.Decided(decision, reason) if decision != "wait":
            return "dim", f"{decision}: {reason}"
        case f.RunEnded(outcome, reason):
            return "bold green" if outcome == "done" else "bold red", f"run {outcome}: {reason}"
    return None


def _of_training(fact: f.Fact, state: RunState) -> tuple[str, str] | None:
    match fact:
        case f.EpochStarted(epoch, members, world, reason):
            names = " ".join(state.attempt_of.get(m, m) for m in members)
            return (
                "bold",
                f"generation {epoch} ({reason}): {plural(world, 'rank')} on "
                f"{plural(len(members), 'node')} ({names})",
            )
        case f.SessionStarted():
            lost = state.lost_before(fact.epoch)
            if not fact.resumed_step and not lost:
                batch = batch_text(fact.global_batch, fact.micro_batch, fact.first_ranks)
                begun = f"generation {fact.epoch}: training from step 0"
                if fact.first_ranks:  # nobody has said it: it comes first, and is loud
                    return "bold green", f"{batch}; {begun}"
                return "green", f"{begun}, {batch}" if fact.global_batch else begun
            verb = f"resumed from step {fact.resumed_step} in {duration(fact.restore_s)}"
            style = "red" if lost else "green"
            return style, f"generation {fact.epoch}: {verb}, {plural(lost, 'step')} lost"
        case f.SetupChanged(epoch, _, action, changes) if any(
            row.get("level") != HARDWARE for row in changes
        ):
            names = ", ".join(row.get("name", "") for row in changes[:4])
            more = ", ..." if len(changes) > 4 else ""
            return (
                "red" if action == "refused" else "yellow",
                f"generation {epoch}: set up otherwise than at first, {action}: {names}{more}",
            )
        case f.EpochLeft(epoch, member, why) if why not in ("resize", "finished"):
            return "red" if why in (
                "failed",
                "killed",
                "hung",
                "unfit",
                "peer-lost",
            ) else "", f"{_who(state, member)} left generation {epoch}: {why}"
        case f.WorkerFailed(error="PeerLost"):
            return "red", f"rank {fact.rank} on {_who(state, fact.member)} lost its peer"
        case f.WorkerFailed():
            return (
                "red",
                f"rank {fact.rank} on {_who(state, fact.member)} ended with {fact.error}: "
                f"{fact.message[:160]}",
            )
        case f.WorkerHung():
            return "red", f"rank {fact.rank} on {_who(state, fact.member)} hangs: {fact.what}"
        case f.GraceSpent(member, _, _, _, _, verdict):
            return "red", f"{_who(state, member)}: its time is up: {verdict}"
        case f.DrainVerdict() if fact.rank == 0 or not fact.committed:
            return _of_drain(fact, state)
        case f.Warned(step, _, what):
            return "yellow", what if what.startswith(f.NOT_ELASTIC) else f"step {step}: {what}"
        case f.SnapshotCommitted():
            return (
                "blue",
                f"snapshot of step {fact.step} committed ({fact.why}, {nbytes(fact.nbytes)}, "
                f"{duration(fact.commit_s)})",
            )
        case f.SnapshotFailed(step, _, why):
            return "red", f"snapshot of step {step} failed: {why}"
        case f.SnapshotQuarantined(step, _, why):
            return "red", f"snapshot of step {step} is bad: {why}"
        case f.GuardTripped(step, _, what, value):
            return "red", f"step {step}: {what} ({value:g})"
        case f.StepSkipped(step, _, why):
            return "yellow", f"step {step} skipped: {why}"
    return None


def _of_drain(fact: f.DrainVerdict, state: RunState) -> tuple[str, str]:
    """Return the style and the text for rank 0's shard, or for a shard that was too late."""
    forecast = (
        f"{duration(fact.need_s)} needed, {duration(max(0.0, fact.left_s))} left when it was staged"
    )
    if fact.committed:
        return "blue", (
            f"{_who(state, fact.member)}: step {fact.step} was committed before the deadline "
            f"({forecast})"
        )
    return "red", (
        f"{_who(state, fact.member)}: rank {fact.rank}'s share of step {fact.step} is not "
        f"committed; safe is step {fact.last_good_step} ({forecast})"
    )


def _who(state: RunState, member: str) -> str:
    return f"node {state.attempt_of.get(member, member)}"


def _refused_before(state: RunState, attempt: int) -> str:
    """Return which attempts just before this one found no capacity, so that the numbers of nodes
    can be followed; "" if none."""
    first = attempt
    while (n := state.nodes.get(str(first - 1))) and n.ended and n.ended.end == "no-capacity":
        first -= 1
    numbers = str(first) if first == attempt - 1 else f"{first}-{attempt - 1}"
    return f"; {numbers}: no capacity" if first < attempt else ""


# ---- numbers -------------------------------------------------------------------------------------
about = whole_seconds  # live numbers are rounded to whole units
STAMP = "12:34:56  "  # the width of the time before a line
COLUMNS = 80  # of a line of numbers in plain output
EVENT_COLUMNS = 400  # of an event, whose reason is worth more than the width: a pipe has none
# numbers that a line of plain output shows first
FIRST = ("no capacity", "loss", "left", "deadline", "tokens/s", "samples/s", "spent", "world")


def progress_line(state: RunState, now: float, columns: int = COLUMNS - len(STAMP)) -> str:
    """Return the state and the numbers of the header that fit into one line of plain text, the
    most important ones first, without what stands in brackets."""
    line = waits_for(state) or state.run_state
    line += f"  step {state.step:,}" + (f"/{state.total:,}" if state.total else "")
    rows = number_rows(state, now)
    rows.sort(key=lambda row: FIRST.index(row[0]) if row[0] in FIRST else len(FIRST))
    for name, value in rows:
        part = f"  {name} {value.partition(' (')[0]}"
        line += part if len(line) + len(part) <= columns else ""
    return fitted(line, columns)


def fitted(text: str, columns: int) -> str:
    """Return `text` as plain text of at most so many columns, with an ellipsis if it is cut."""
    shown = plain(text)
    return shown if len(shown) <= columns else shown[: columns - 1].rstrip() + "…"


def waits_for(state: RunState) -> str:
    """Return what a run waits for that does not train; "" if it trains, or is over."""
    if state.over or (state.training() and state.begun):
        return ""
    if state.training():
        return f"generation {state.epoch}: waiting for the script"
    if state.total and state.committed[0] >= state.total:
        return "finishing"
    alive = [n for n in state.nodes.values() if n.alive]
    here = [n for n in alive if n.member]
    if here and not state.epoch:
        return f"waiting for imports on node {here[0].name}"
    if here:
        return "waiting for a new generation"
    if up := [n for n in alive if n.up_s is not None]:
        return f"waiting for the agent of node {up[0].name}"
    return f"waiting for node {alive[0].name}" if alive else "waiting for capacity"


def number_rows(state: RunState, now: float) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if state.last_step:
        found.append(("loss", number_text(state.last_step.loss)))
    if state.validated:
        names = sorted(
            (n for n in state.validated[1] if "loss" in n), key=lambda n: (n != "val_loss", n)
        )
        found += [
            (name.replace("_", " "), number_text(state.validated[1][name])) for name in names[:1]
        ]
    rates = state.rates() if state.training() else {}
    if "tokens_per_s" in rates:
        found.append(("tokens/s", f"{rates['tokens_per_s']:,.0f}"))
    elif "samples_per_s" in rates:
        found.append(("samples/s", f"{rates['samples_per_s']:,.1f}"))
    if "mfu" in rates:
        found.append(("MFU", percent(rates["mfu"])))
    if state.world:
        found.append(
            ("world", f"{state.world}" + (f" × {state.accumulation}" if state.accumulation else ""))
        )
    committed, taken_s = state.committed
    if committed:
        age = "" if state.over or taken_s is None else f" ({about(now - taken_s)} ago)"
        every_s = state.snapshot[1].interval_s if state.snapshot and age else 0.0
        # it was the interval when the snapshot was taken; long after that it has changed
        if every_s >= 1 and taken_s is not None and now - taken_s < 2 * every_s:
            age = age[:-1] + f", every {about(every_s)})"
        found.append(("snapshot", f"step {committed:,}{age}"))
    if state.refused and not state.training():
        found.append(("no capacity", plural(state.refused, "time")))
    paid, on_demand = state.spent(now)
    if paid:
        found.append(
            (
                "spent",
                money(paid)
                + (" simulated" if state.simulated else "")
                + (f" ({percent(1 - paid / on_demand)} saved)" if on_demand > paid else ""),
            )
        )
    if (usd := state.usd_per_million_tokens(now)) is not None:
        found.append(("per M tokens", money(usd)))
    if rates and state.total > state.step:
        found.append(("left", about((state.total - state.step) / rates["steps_per_s"])))
    if not state.over and (words := RunOutlook.of(state, now).words(now)):
        found.append(("deadline", words))
    return found


def split_line(state: RunState) -> str:
    """Return the phases of a step in one line, or "" if they are not known."""
    split = state.step_split()
    whole = sum(split.values())
    if not whole:
        return ""
    told = state.timed[1] if state.timed else None
    most = sorted(split.items(), key=lambda item: -item[1])
    parts = [f"{100 * s / whole:.0f} % {p}" for p, s in most if s / whole >= 0.04]
    line = f"step {duration(whole)}: {', '.join(parts)}"
    if told and len(told.own_s) == 3 and len(told.own_ranks) == 2 and told.own_s[1] > 0:
        behind = told.own_s[2] / told.own_s[1] - 1
        if told.own_ranks[0] != told.own_ranks[1] and behind >= 0.05:
            line += f"; slowest rank {told.own_ranks[1]} (+{100 * behind:.0f} %)"
    return line


def decision_line(state: RunState, now: float) -> str:
    """Return the controller's last decision and its reason; "" if none, or the run is over."""
    if state.decided is None or state.over:
        return ""
    t, fact = state.decided
    reason = f": {fact.reason}" if fact.reason else ""
    expected = f", {words}" if (words := wait_words(fact, now)) else ""
    return f"{fact.decision}{reason}{expected} ({about(now - t)} ago)"


EVENTS_SHOWN = 6
ALERTS_SHOWN = 4
ALERT_STYLES = {"critical": "red", "warning": "yellow", "info": "cyan"}
PROGRESS_EVERY_S = 5.0  # between progress lines of plain output
# writers flush at their own pace: lines wait for so long, and are told by the time of their events
HOLD_S = 2.5
MOST_SEGMENTS = 6  # read by one poll; with its other requests, ten requests in all


def render(
    state: RunState,
    now: float,
    url: str = "",
    controller: bool | None = None,
    silent_s: float = 0.0,
    alerts: Sequence[Alert] = (),
) -> RenderableType:
    """Return the screen. `alerts`: those that are firing."""
    colour = {
        "training": "green",
        "done": "green",
        "finished": "green",
        "failed": "red",
        "stopped": "yellow",
    }.get(state.run_state, "cyan")
    parts: list[RenderableType] = [_headline(state, now, url, colour)]
    if state.total:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_row(
            ProgressBar(total=state.total, completed=min(state.step, state.total)),
            percent(state.step / state.total),
        )
        parts.append(bar)
    numbers = Text()
    for name, value in number_rows(state, now):
        numbers.append(f"{name} ", style="dim")
        numbers.append(f"{value}   ")
    parts += [numbers] if numbers.plain else []
    for name, line in (("", split_line(state)), ("decided ", decision_line(state, now))):
        if line:
            parts.append(_one_line((name, "dim"), (plain(line), "dim" if not name else "")))
    for alert in alerts[-ALERTS_SHOWN:]:
        style = ALERT_STYLES.get(alert.severity, "yellow")
        words = plain(f"{alert.title}: {alert.text}")
        parts.append(_one_line((f"{alert.severity} ", f"bold {style}"), (words, style)))
    if state.over and state.ended:
        parts.append(Text(plain(state.ended[1].reason), style=colour))
    elif controller is False and state.lease and not state.over:
        parts.append(
            Text(
                "no controller leads this run: lost nodes are not replaced; `harness launch` again "
                "to lead it",
                style="yellow",
            )
        )
    if state.unread:
        parts.append(Text(plain(unread_text(state.unread)), style="yellow"))
    if silent_s > 0:
        parts.append(Text(f"the bucket has not answered for {about(silent_s)}", style="yellow"))
    if state.shown_nodes(now):
        parts += [Text(""), _node_table(state, now)]
    if state.events:
        parts += [Text(""), *_newest_events(state)]
    return Group(*parts)


def _one_line(*words: tuple[str, str]) -> Text:
    return Text.assemble(*words, overflow="ellipsis", no_wrap=True)


def _headline(state: RunState, now: float, url: str, colour: str) -> Text:
    head = Text(overflow="ellipsis", no_wrap=True)
    head.append(state.run_state, style=f"bold {colour}")
    head.append(f"  step {state.step:,}", style="bold")
    head.append(f" of {state.total:,}" if state.total else "")
    head.append(
        f"  {about((state.last_s if state.over else now) - state.started_s)}"
        if state.last_s > 0
        else ""
    )
    head.append(f"  {plain(url)}", style="dim")
    return head


def _node_table(state: RunState, now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for n in state.shown_nodes(now):
        style, words = state.node_state(n, now)
        ranks = state.ranks(n.member) if n.alive and n.member in state.training() else None
        place = (
            ""
            if ranks is None
            else f"generation {state.epoch} rank {ranks.start}"
            + (f"–{ranks.stop - 1}" if len(ranks) > 1 else "")
        )
        up = about(n.bill(now).seconds) if n.bill(now).seconds else ""
        cells = (
            (plain(n.name), "bold"),
            (plain(n.place), ""),
            (words, style),
            (up, "dim"),
            (place, "dim"),
        )
        table.add_row(*(Text(text, style=tone) for text, tone in cells))
    return table


def _newest_events(state: RunState) -> Iterator[Text]:
    shown = [(e.t, said) for e in state.events if (said := describe(e.fact, state))]
    for t, (style, words) in shown[-EVENTS_SHOWN:]:
        yield _one_line((clock(t)[11:] + "  ", "dim"), (plain(words), style))


# ---- following -----------------------------------------------------------------------------------
@dataclass
class LiveView:
    """A view of a run that `poll` keeps up to date: drawn on a terminal, printed as lines
    elsewhere.

    While the bucket is silent, the view shows that and waits; other store errors are raised.
    """

    store: ObjectStore
    console: Console
    now: Callable[[], float] = time.time
    state: RunState = field(default_factory=RunState)
    controller: bool | None = None
    watch: AlertWatch = field(default_factory=AlertWatch)
    _alerts: dict[tuple[str, str], Alert] = field(default_factory=dict)  # by rule and subject
    _follower: Follower = field(init=False)
    _lease: LeaseWatch = field(init=False)
    _live: Live | None = None
    _held: list[Stamped] = field(default_factory=list)  # events whose time to be printed comes
    _printed: tuple[float, str] = (-math.inf, "")  # the last progress line, and when
    _answered_s: float | None = None
    _first: bool = True
    _unread_told: bool = False

    def __post_init__(self) -> None:
        self.watch.run.live = self.state  # the alert watch folds the facts into it
        self._follower = Follower(self.store, most=MOST_SEGMENTS)
        self._lease = LeaseWatch(self.store)

    def poll(self) -> RunState:
        """Read new facts and show them."""
        fresh = self.read()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._draw()
        else:
            self._print(fresh)
        self._first = False
        return self.state

    def read(self) -> list[Stamped]:
        """Read new facts without showing them, and return them."""
        now = self.now()
        self._answered_s = now if self._answered_s is None else self._answered_s
        fresh: list[Stamped] = []
        with contextlib.suppress(StoreUnavailable):
            fresh = self._follower.poll()
            self.controller = self._lease.look(now)
            self._answered_s = now
        for stamped in fresh:
            if isinstance(stamped.fact, Unreadable):
                self.state.add(stamped)
        known = [s for s in fresh if not isinstance(s.fact, Unreadable)]
        for alert in [*self.watch.see(known), *self.watch.look(now)]:
            self._alerts[alert.rule, alert.subject] = alert
        return fresh

    def firing(self) -> list[Alert]:
        """Return the alerts that are firing, the worst last."""
        if self.state.over:
            return []
        found = [self._alerts[key] for key in self.watch.firing(self.now()) if key in self._alerts]
        return sorted(found, key=lambda a: (SEVERITIES.index(a.severity), a.t))

    @property
    def silent_s(self) -> float:
        """Seconds since the bucket answered last."""
        return 0.0 if self._answered_s is None else self.now() - self._answered_s

    def screen(self) -> RenderableType:
        now = self.now()
        silent_s = self.silent_s if self.silent_s >= 3 else 0.0
        alerts = self.firing()
        return render(self.state, now, self.store.url, self.controller, silent_s, alerts)

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=4, auto_refresh=False)
            self._live.start()
        self._live.update(self.screen(), refresh=True)

    def _print(self, fresh: Iterable[Stamped], everything: bool = False) -> None:
        now = self.now()
        events = [s for s in fresh if noteworthy(s.fact)]
        self._held = sorted([*self._held, *events], key=lambda s: s.t)
        due_s = math.inf if self._first or self.state.over or everything else now - HOLD_S
        due = [s for s in self._held if s.t <= due_s]
        del self._held[: len(due)]
        told = [(s.t, told[1]) for s in due if (told := describe(s.fact, self.state))]
        if self._first and len(told) > 2 * EVENTS_SHOWN:  # history, which the report shows
            self._say(f"... {plural(len(told) - EVENTS_SHOWN, 'earlier event')}")
            told = told[-EVENTS_SHOWN:]
        if self.state.unread and not self._unread_told:
            self._say(plain(unread_text(self.state.unread)))
            self._unread_told = True
        for t, text in told:
            self._say(f"{clock(t)[11:]}  {fitted(text, EVENT_COLUMNS)}")
        line = progress_line(self.state, now)
        if (
            not self._held  # what happened before is told first
            and now - self._printed[0] >= PROGRESS_EVERY_S
            and line != self._printed[1]
            and self.state.last_s > 0
        ):
            self._say(f"{clock(now)[11:]}  {line}")
            self._printed = now, line

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture on the screen, or print the lines that were held."""
        if self._held:
            self._print((), everything=True)
        if self._live is not None:
            self._live.update(self.screen(), refresh=True)
            self._live.stop()
            self._live = None


def follow(
    store: ObjectStore,
    stop: Callable[[], bool],
    console: Console | None = None,
    *,
    until_ended: bool = True,
    poll_s: float = 1.0,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> RunState:
    """Show a run until `stop()`, or (`until_ended`) until it has ended. If `stop()` is true at the
    start, show one picture.

    To launch a run again, pass `until_ended=False`: its last end is still the newest fact in the
    bucket then.
    """
    console = Terminal() if console is None else console
    view = LiveView(store, console, now)
    if stop():
        view.read()
        console.print(view.screen(), highlight=False)
        return view.state
    try:
        while True:
            # before the last look, to see everything that was written before the stop
            ending = stop()
            state = view.poll()
            if ending or (until_ended and state.over):
                return state
            due_s = now() + poll_s
            while not stop() and (left_s := due_s - now()) > 0:
                sleep(min(0.1, left_s))
    finally:
        view.close()


def status(
    store: ObjectStore,
    *,
    watch_s: float = 3.0,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Return the status of a run as plain JSON. Watches the controller's heartbeat for up to
    `watch_s`; null: not known in that time."""
    view = LiveView(store, Console(quiet=True), now)
    view.read()
    state, begun = view.state, now()
    while view.controller is None and not state.over and now() - begun < watch_s:
        sleep(0.2)
        view.read()
    t = now()
    paid, on_demand = state.spent(t)
    last, (committed, taken_s) = state.last_step, state.committed
    training, told = state.training(), state.snapshot[1] if state.snapshot else None
    nodes = []
    for n in state.shown_nodes(t):
        _, deadline = state.deadline(n)
        ranks = state.ranks(n.member) if n.member in training else None
        nodes.append(
            {
                "name": n.name,
                "offer": n.place,
                "state": state.node_state(n, t)[1],
                "alive": n.alive,
                "up_s": n.bill(t).seconds,
                "member": n.member,
                "ranks": list(ranks) if ranks is not None else [],
                "notice_deadline_s": deadline,
            }
        )
    body = {
        "url": store.url,
        "state": state.run_state,
        "over": state.over,
        "reason": state.ended[1].reason if state.over and state.ended else "",
        "step": state.step,
        "total_steps": state.total,
        "loss": last.loss if last else None,
        "validation": state.validated[1] if state.validated else None,
        "epoch": state.epoch,
        "world": state.world,
        "accumulation": state.accumulation,
        "rates": state.rates() if training else {},
        "nodes": nodes,
        "attempts": len(state.nodes),
        "spent_usd": paid,
        "on_demand_usd": on_demand,
        "snapshot": {
            "step": committed,
            "age_s": None if taken_s is None else t - taken_s,
            "every_s": told.interval_s or None if told else None,
            "between_losses_s": told.between_losses_s or None if told else None,
            "why": interval_words(told) if told else "",
        }
        if committed
        else None,
        "deadline": RunOutlook.of(state, t).to_json(),
        "waiting": waiting_json(state.decided[1] if state.decided and not state.over else None),
        "controller_alive": False if state.over else view.controller,
        "updated_s": state.last_s if state.last_s > 0 else None,
        "unread_facts": [str(u) for u in state.unread],
    }
    return dict(json.loads(json.dumps(body), parse_constant=lambda _: None))  # JSON has no NaN
