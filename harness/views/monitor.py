"""A run as it goes on: a live view on a terminal, plain lines elsewhere, JSON for programs.
`harness status` and `harness launch`.

`LiveState` is a fold of facts that does not care in which order they come: seats flush at their own
pace, so a worker's fact may be seen before the controller's that caused it. Greater epochs and
later times win, and a rewind is nothing but a greater epoch.
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

from harness.bucket.alerts import SEVERITIES, Alert
from harness.bucket.journal import Follower
from harness.core.facts import Stamped, Unreadable
from harness.views.alerts import AlertWatch
from harness.views.outlook import RunOutlook, interval_words, waiting_json
from harness.views.report import unread_text
from harness.views.telling import (
    about,
    decision_line,
    describe,
    number_rows,
    progress_line,
    split_line,
)
from harness.views.watching import LeaseWatch, LiveState
from harness.views.words import clock, percent, plural
from storage.errors import StoreUnavailable
from storage.objects import ObjectStore
from storage.text import Console as Terminal
from storage.text import plain

EVENTS_SHOWN = 6
ALERTS_SHOWN = 4
ALERT_STYLES = {"critical": "red", "warning": "yellow", "info": "cyan"}
PROGRESS_EVERY_S = 5.0  # of plain output
MOST_SEGMENTS = 6  # that one poll reads; with what else it asks for, ten requests


def render(
    state: LiveState,
    now: float,
    url: str = "",
    controller: bool | None = None,
    silent_s: float = 0.0,
    alerts: Sequence[Alert] = (),
) -> RenderableType:
    """The screen. `alerts`: those that are firing."""
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


def _headline(state: LiveState, now: float, url: str, colour: str) -> Text:
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


def _node_table(state: LiveState, now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for n in state.shown_nodes(now):
        style, words = state.node_state(n, now)
        ranks = state.ranks(n.member) if n.alive and n.member in state.training() else None
        place = (
            ""
            if ranks is None
            else f"epoch {state.epoch} rank {ranks.start}"
            + (f"–{ranks.stop - 1}" if len(ranks) > 1 else "")
        )
        up = about(n.billed_s(now)) if n.billed_s(now) else ""
        cells = (
            (plain(n.name), "bold"),
            (plain(n.offer), ""),
            (words, style),
            (up, "dim"),
            (place, "dim"),
        )
        table.add_row(*(Text(text, style=tone) for text, tone in cells))
    return table


def _newest_events(state: LiveState) -> Iterator[Text]:
    for event in state.events[-EVENTS_SHOWN:]:
        style, words = describe(event.fact, state) or ("", "")
        yield _one_line((clock(event.t)[11:] + "  ", "dim"), (plain(words), style))


# ---- following -----------------------------------------------------------------------------------
@dataclass
class LiveView:
    """A view of a run that `poll` keeps up to date; draws on a terminal, prints lines elsewhere.

    Silence of the bucket is shown and waited for; other store errors travel.
    """

    store: ObjectStore
    console: Console
    now: Callable[[], float] = time.time
    state: LiveState = field(default_factory=LiveState)
    controller: bool | None = None
    watch: AlertWatch = field(default_factory=AlertWatch)
    _alerts: dict[tuple[str, str], Alert] = field(default_factory=dict)  # by rule and subject
    _follower: Follower = field(init=False)
    _lease: LeaseWatch = field(init=False)
    _live: Live | None = None
    _printed_s: float = -math.inf
    _line: str = ""
    _answered_s: float | None = None
    _first: bool = True
    _unread_told: bool = False

    def __post_init__(self) -> None:
        self.watch.run.live = self.state  # which it folds
        self._follower = Follower(self.store, most=MOST_SEGMENTS)
        self._lease = LeaseWatch(self.store)

    def poll(self) -> LiveState:
        """Read what is new and show it."""
        fresh = self.read()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._draw()
        else:
            self._print(fresh)
        self._first = False
        return self.state

    def read(self) -> list[Stamped]:
        """Only read."""
        now = self.now()
        self._answered_s = now if self._answered_s is None else self._answered_s
        fresh: list[Stamped] = []
        with contextlib.suppress(StoreUnavailable):
            fresh = self._follower.poll()
            self.controller = self._lease.look(now)
            self._answered_s = now
        for stamped in fresh:
            if isinstance(stamped.fact, Unreadable):
                self.state.apply(stamped)
        known = [s for s in fresh if not isinstance(s.fact, Unreadable)]
        for alert in [*self.watch.see(known), *self.watch.look(now)]:
            self._alerts[alert.rule, alert.subject] = alert
        return fresh

    def firing(self) -> list[Alert]:
        """What is wrong now, worst last."""
        if self.state.over:
            return []
        found = [self._alerts[key] for key in self.watch.firing(self.now()) if key in self._alerts]
        return sorted(found, key=lambda a: (SEVERITIES.index(a.severity), a.t))

    @property
    def silent_s(self) -> float:
        """For how long the bucket has not answered."""
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

    def _print(self, fresh: Iterable[Stamped]) -> None:
        told = [(s.t, told[1]) for s in fresh if (told := describe(s.fact, self.state))]
        if self._first and len(told) > 2 * EVENTS_SHOWN:  # history; the report tells it
            self._say(f"... {plural(len(told) - EVENTS_SHOWN, 'earlier event')}")
            told = told[-EVENTS_SHOWN:]
        if self.state.unread and not self._unread_told:
            self._say(plain(unread_text(self.state.unread)))
            self._unread_told = True
        for t, text in told:
            self._say(f"{clock(t)[11:]}  {plain(text)}")
        now = self.now()
        line = progress_line(self.state, now)
        if (
            now - self._printed_s >= PROGRESS_EVERY_S
            and line != self._line
            and self.state.last_s > 0
        ):
            self._say(f"{clock(now)[11:]}  {line}")
            self._printed_s, self._line = now, line

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture on the screen."""
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
) -> LiveState:
    """Show a run until `stop()`, or (`until_ended`) until it has ended. Where `stop()` holds from
    the start: one picture.

    Whoever launches a run again passes `until_ended=False`: its last end is still the newest thing
    in the bucket then.
    """
    console = Terminal() if console is None else console
    view = LiveView(store, console, now)
    if stop():
        view.read()
        console.print(view.screen(), highlight=False)
        return view.state
    try:
        while True:
            # before the last look, so that what was written before the stop is seen
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
    """Where a run stands, as plain JSON. Watches the controller's heart beat for up to
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
        _, deadline = n.deadline()
        ranks = state.ranks(n.member) if n.member in training else None
        nodes.append(
            {
                "name": n.name,
                "offer": n.offer,
                "state": state.node_state(n, t)[1],
                "alive": n.alive,
                "up_s": n.billed_s(t),
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
