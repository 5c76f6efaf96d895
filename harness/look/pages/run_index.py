"""The runs of a folder, followed in the background for a browser: rows of a table, curves, reports.

Two threads read the buckets: one polls the live state, one makes digests (the content of `harness
runs report`); a third reads nodes' logs. Requests only read the results of these, so the load on a
bucket does not depend on what browsers request: a few objects per run and poll, one digest at a
time, and nothing at all while there are no requests. Nothing is written.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bucket.controller_lease import sign_of_life
from harness.bucket.layout import ARCHIVE, FACTS, IDENTITY
from harness.core.facts import NodeFound, StepDone
from harness.core.setup_record import leaves_of
from harness.core.world import HarnessError
from harness.ledger.run_state import RunState
from harness.look.pages.line_plots import thinned_indices
from harness.look.pages.report_page import content, run_name, spend_at
from harness.look.pages.run_logs import ReadLogs, RunLogs
from harness.look.reports.live_view import LiveView, about
from harness.look.reports.summary import Summary, summarize
from storage.errors import StoreError
from storage.stores.objects import ObjectStore, folders, why_not_a_key
from storage.terminal_text import Console

MOST_RUNS = 500
LOOK_S, REST_S = 2.0, 300.0  # polling interval of a run that goes on; of one that is over
DIGEST_S, DUTY = 10.0, 10.0  # least pause between two digests; as a multiple of a digest's time
FIND_S = 30.0  # interval of listing the runs
IDLE_S = 60.0  # after this time without a request, reading pauses
WANTED_S = 30.0  # after this time without a request for it, a report is no longer made
CURVE_POINTS = 800
TAGS = ("owner", "project", "experiment")
MOST_CONFIG, CONFIG_LETTERS = 60, 60  # values of a configuration, and letters of each
NOTE_LETTERS = 300
TAIL = 4000  # most live steps kept after the newest digest
METRICS = ("loss", "validation", "gradient norm", "step seconds", "tokens per second", "dollars")
log = logging.getLogger("harness")
Opener = Callable[[str], ObjectStore]


# ---- one run -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunDigest:
    """The part of a summary that is kept: its numbers and curves, and the report if somebody reads
    it. `steps`, `hours` and `usd` have the same length, one value per point of the curve."""

    facts: int  # number of facts that were known when it was made
    made_s: float
    row: dict[str, Any]
    steps: np.ndarray
    hours: np.ndarray
    usd: np.ndarray
    values: dict[str, tuple[np.ndarray, np.ndarray]]  # metric -> (steps, values)
    tokens_per_step: float
    started_s: float
    report: str = ""

    @classmethod
    def of(cls, s: Summary, facts: int, made_s: float, with_report: bool) -> RunDigest:
        steps = np.array([p.step for p in s.curve], float)
        moments = np.array([p.t for p in s.curve], float)
        seconds = np.array([p.seconds for p in s.curve], float)
        usd = spend_at(s.ledger.attempts, moments, s.ended_s)
        losses = np.array([p.loss for p in s.curve], float)
        values = {
            "loss": (steps, losses),
            "step seconds": (steps, seconds),
            "dollars": (steps, usd),
        }
        if s.tokens_per_step and len(steps):
            speed = s.tokens_per_step / np.maximum(seconds, 1e-9)
            values["tokens per second"] = (steps, speed)
        for name, pairs in (("validation", s.validation), ("gradient norm", s.norms)):
            if pairs:
                xs, ys = np.array(pairs, float).T
                values[name] = (xs, ys)
        return cls(
            facts=facts,
            made_s=made_s,
            row=_digest_row(s),
            steps=steps,
            hours=(moments - s.started_s) / 3600,
            usd=usd,
            values=values,
            tokens_per_step=s.tokens_per_step,
            started_s=s.started_s,
            report=content(s) if with_report else "",
        )


def _digest_row(s: Summary) -> dict[str, Any]:
    return {
        "state": s.state,
        "reason": s.reason,
        "committed": s.step,
        "total": s.total_steps,
        "loss": s.losses[1] if s.losses else None,
        "validation": s.validations[1] if s.validations else None,
        "goodput": s.ledger.goodput if s.ledger.billed_ns else None,
        "spent_usd": s.ledger.usd,
        "on_demand_usd": s.ledger.cost.on_demand_usd,
        "usd_per_million_tokens": s.usd_per_1m_tokens,
        "tokens_per_s": s.speed.tokens_per_s,
        "mfu": s.speed.mfu,
        "steps_lost": s.ledger.steps_lost,
        "alerts_fired": len(s.alerts),
        "started_s": s.started_s,
        "ended_s": s.ended_s,
        "simulated": s.simulated,
        "config": _config(s),
        "people": [s.setups.people[key] for key in TAGS if s.setups.people.get(key)],
        "purpose": s.logbook.purpose,
        "notes": len(s.logbook.entries) + s.logbook.more,
        "note": s.logbook.entries[-1].text[:NOTE_LETTERS] if s.logbook.entries else "",
        **_places(s),
    }


def _config(s: Summary) -> dict[str, str]:
    """Return the values of the run's configuration by dotted name, the first of very many."""
    found = leaves_of(s.setups.first.config) if s.setups.first else ()
    some = itertools.islice(sorted(found), MOST_CONFIG)
    return {name: value[:CONFIG_LETTERS] for name, value in some if name}


def _places(s: Summary) -> dict[str, list[str]]:
    """Return the regions and the instance types of the nodes that were up, the newest first."""
    told = {x.fact.member: x.fact for x in s.facts if isinstance(x.fact, NodeFound)}
    regions, instances = list[str](), list[str]()
    for a in reversed([a for a in s.ledger.attempts if a.up_s is not None]):
        node = next((told[m] for m in a.members if m in told), None)
        words = a.offer.split("/")  # cloud/region/zone/shape
        if node is not None:
            regions.append(" ".join(filter(None, (node.cloud, node.region))))
            instances.append(node.instance_type or node.accelerators)
        elif a.offer:
            regions.append(" ".join(words[:2]))
            instances.append("/".join(words[3:]))
    return {
        "regions": [name for name in dict.fromkeys(regions) if name],
        "instances": [name for name in dict.fromkeys(instances) if name],
    }


@dataclass
class FollowedRun:
    """One run, as far as it is known. Its `row` is replaced as a whole, never mutated."""

    name: str
    url: str
    open: Opener
    now: Callable[[], float]
    row: dict[str, Any] = field(default_factory=dict)
    digest: RunDigest | None = None
    over: bool = False
    problem: str = ""
    tail: deque[StepDone] = field(default_factory=lambda: deque(maxlen=TAIL))
    wanted_s: float = -math.inf  # time of the last request for its report
    known: int = 0  # number of facts read
    due_s: float = 0.0  # time of the next poll
    digest_after_s: float = 0.0  # earliest time of the next digest
    _view: LiveView | None = None
    _sign: tuple[Any, int] | None = None  # of a run that is over: differs if it goes on again

    def look(self) -> None:
        """Read new facts. A bucket that cannot be read is a problem of this run only."""
        now = self.now()
        self.due_s = now + LOOK_S
        try:
            if self.over and not self._goes_on(now):
                return
            view = self._view = self._view or LiveView(
                self.open(self.url), Console(quiet=True), self.now
            )
            fresh = view.read()
            self.known += len(fresh)
            self.tail.extend(x.fact for x in fresh if isinstance(x.fact, StepDone))
            self.problem = "the bucket does not answer" if view.silent_s > 10 else ""
            self.row = _live_row(view, now)
            self.over = view.state.over
            if self.over:
                self._rest(view.store, now)
        except (StoreError, HarnessError) as e:
            self.problem, self.due_s = str(e)[:300], now + FIND_S

    def _rest(self, store: ObjectStore, now: float) -> None:
        """Drop everything but the row until the run goes on again."""
        self._sign = _sign(store)
        self._view, self.due_s = None, now + REST_S
        self.known += 1  # forces a digest of the final state

    def _goes_on(self, now: float) -> bool:
        if _sign(self.open(self.url)) == self._sign:
            self.due_s = now + REST_S
            return False
        return True

    def digest_due(self, now: float) -> bool:
        has = self.digest
        if has and not has.report and now - self.wanted_s < WANTED_S:
            return True  # somebody waits for the report
        fresh = has is not None and has.facts == self.known
        return bool(self.row) and not fresh and now >= self.digest_after_s

    def make_digest(self) -> None:
        """Read the whole run and replace its digest."""
        began_s, known = self.now(), self.known
        try:
            summary = summarize(self.open(self.url), self.now)
            is_read = began_s - self.wanted_s < WANTED_S
            self.digest = RunDigest.of(summary, known, self.now(), is_read)
        except (StoreError, HarnessError) as e:
            self.problem = str(e)[:300]
        spent_s = self.now() - began_s
        self.digest_after_s = self.now() + max(DIGEST_S, DUTY * spent_s)

    def told(self) -> dict[str, Any]:
        """Return the run's row of the table."""
        digest = self.digest
        found = {"id": self.name, "url": self.url, "over": self.over, "problem": self.problem}
        if digest:
            found |= digest.row
        # known values of the live view are newer
        found |= {k: v for k, v in self.row.items() if v is not None or k not in found}
        if digest and self.over:
            found |= {k: digest.row[k] for k in ("spent_usd", "on_demand_usd", "state")}
        return found

    def curve(self, metric: str) -> dict[str, Any]:
        """Return one metric with all x axes, thinned out, including steps after the digest."""
        digest = self.digest
        if digest is None:
            return {"id": self.name, "step": [], "y": []}
        xs, ys = digest.values.get(metric, (np.empty(0), np.empty(0)))
        xs, ys = self._with_tail(metric, xs, ys, digest)
        good = np.isfinite(ys)
        xs, ys = xs[good], ys[good]
        kept = thinned_indices(ys.tolist(), CURVE_POINTS)
        xs, ys = xs[kept], ys[kept]
        return {
            "id": self.name,
            "step": xs.tolist(),
            "tokens": (xs * digest.tokens_per_step).tolist() if digest.tokens_per_step else [],
            "hours": np.round(self._along(xs, digest.steps, digest.hours), 5).tolist(),
            "dollars": np.round(self._along(xs, digest.steps, digest.usd), 5).tolist(),
            "y": [float(f"{y:.6g}") for y in ys],
        }

    def _with_tail(
        self, metric: str, xs: np.ndarray, ys: np.ndarray, digest: RunDigest
    ) -> tuple[np.ndarray, np.ndarray]:
        of: dict[str, Callable[[StepDone], float | None]] = {
            "loss": lambda s: s.loss,
            "gradient norm": lambda s: s.grad_norm,
            "step seconds": lambda s: s.seconds,
            "tokens per second": lambda s: s.tokens / s.seconds if s.seconds > 0 else None,
        }
        last = digest.steps[-1] if len(digest.steps) else 0.0
        newer = sorted((s for s in list(self.tail) if s.step > last), key=lambda s: s.step)
        if metric not in of or not newer:
            return xs, ys
        more = [(s.step, v) for s in newer if (v := of[metric](s)) is not None]
        if not more:
            return xs, ys
        steps, values = np.array(more, float).T
        return np.concatenate([xs, steps]), np.concatenate([ys, values])

    @staticmethod
    def _along(xs: np.ndarray, steps: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Interpolate `of` at the steps `xs`; extrapolate linearly beyond the newest step."""
        if len(steps) < 2:
            return np.zeros(len(xs))
        found: np.ndarray = np.interp(xs, steps, of)
        far = xs > steps[-1]
        i = max(0, len(steps) - 50)
        slope = (of[-1] - of[i]) / max(1.0, steps[-1] - steps[i])
        found[far] = of[-1] + slope * (xs[far] - steps[-1])
        return found


def _sign(store: ObjectStore) -> tuple[Any, int]:
    return sign_of_life(store), len(store.list(FACTS))


def _live_row(view: LiveView, now: float) -> dict[str, Any]:
    state = view.state
    rates = state.rates() if state.training() else {}
    paid, on_demand = state.spent(now)
    left = (state.total - state.step) / rates["steps_per_s"] if rates and state.total else None
    firing = view.firing()
    return {
        "state": state.run_state,
        "reason": state.ended[1].reason if state.over and state.ended else None,
        "step": state.step,
        "total": state.total or None,
        "loss": state.last_step.loss if state.last_step else None,
        "tokens_per_s": rates.get("tokens_per_s") if not state.over else None,
        "mfu": rates.get("mfu"),
        "world": state.world,
        "nodes": len(state.training()),
        "usd_per_h": None if state.over else state.usd_per_h(),
        "simulated": state.simulated,
        "spent_usd": paid,
        "on_demand_usd": on_demand,
        "firing": [{"severity": a.severity, "title": a.title, "text": a.text} for a in firing],
        "decision": _decision(state),
        "left": about(left) if left is not None else None,
        "updated_s": state.last_s if state.last_s > 0 else None,
        "started_s": state.started_s if state.last_s > 0 else None,
    }


def _decision(state: RunState) -> dict[str, Any] | None:
    if state.decided is None or state.over:
        return None
    t, fact = state.decided
    return {"t": t, "what": fact.decision, "reason": fact.reason}


# ---- all of them ---------------------------------------------------------------------------------
class RunsFolder:
    """The runs directly below a URL, or the one run that it names."""

    def __init__(
        self,
        url: str,
        open_run: Opener,
        now: Callable[[], float] = time.time,
        read_logs: ReadLogs = lambda url: ({}, ""),
    ):
        self.url, self._open, self._now = url, open_run, now
        self.logs = RunLogs(read_logs, now)
        self.runs: dict[str, FollowedRun] = {}
        self.left_out = 0
        self.problem = ""
        self._found_s = -math.inf
        self._no_runs: dict[str, float] = {}  # folders that are no runs -> time to check again
        self._asked_s = -math.inf
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(do, pause), name=name, daemon=True)
            for do, pause, name in (
                (self.look, LOOK_S / 2, "looks"), (self.digest, 0.2, "digests"),
                (self.logs.look, 0.2, "logs"),
            )
        ]  # fmt: skip

    # -- for browsers --
    @property
    def found(self) -> bool:
        """True once the runs have been listed."""
        return self._found_s > -math.inf

    def asked(self) -> None:
        """Record a request, which keeps the background threads reading."""
        self._asked_s = self._now()
        self._wake.set()

    def rows(self) -> list[dict[str, Any]]:
        return [run.told() for run in self.runs.values()]

    # -- in the background --
    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, within_s: float = 10.0) -> None:
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(within_s)

    def _loop(self, do: Callable[[], None], pause_s: float) -> None:
        while not self._stop.is_set():
            if self._now() - self._asked_s < IDLE_S:
                do()
                self._stop.wait(pause_s)
            else:
                self._wake.wait(IDLE_S)
                self._wake.clear()

    def look(self) -> None:
        """Poll every run that is due; list the runs if that is due."""
        now = self._now()
        if now - self._found_s >= FIND_S:
            self._found_s = now
            self._find(now)
        for run in list(self.runs.values()):
            if run.due_s <= self._now() and not self._stop.is_set():
                self._safely(run, run.look)

    def digest(self) -> None:
        """Make the most urgent digest that is due, if any."""
        now = self._now()
        due = [run for run in self.runs.values() if run.digest_due(now)]
        if due and not self._stop.is_set():
            run = max(due, key=_urgency)
            self._safely(run, run.make_digest)

    def _safely(self, run: FollowedRun, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as e:  # our bug, triggered by one run's data; the others are still shown
            log.exception("%s", run.url)
            run.problem = f"it cannot be shown ({type(e).__name__}: {e}); this is a fault of ours"
            run.due_s = run.digest_after_s = self._now() + REST_S

    def _find(self, now: float) -> None:
        try:
            store = self._open(self.url)
            if is_run(store):
                self._keep({run_name(self.url): self.url})
                return
            names = [name for name in folders(store) if not why_not_a_key(name)]
            self.left_out = max(0, len(names) - MOST_RUNS)
            self._keep({n: f"{self.url}/{n}" for n in names[-MOST_RUNS:] if self._is_run(n, now)})
            self.problem = ""
        except StoreError as e:
            self.problem = str(e)[:300]

    def _is_run(self, name: str, now: float) -> bool:
        if name in self.runs:
            return True
        if self._no_runs.get(name, 0.0) > now:
            return False
        if is_run(self._open(f"{self.url}/{name}")):
            self._no_runs.pop(name, None)
            return True
        self._no_runs[name] = now + FIND_S
        return False

    def _keep(self, urls: dict[str, str]) -> None:
        old = self.runs
        self.runs = {
            name: old.get(name) or FollowedRun(name, url, self._open, self._now)
            for name, url in urls.items()
        }


def _urgency(run: FollowedRun) -> tuple[float, float]:
    """Return a sort key that is greatest for the most recently requested report, then for runs
    without a digest, then for the oldest digest."""
    return run.wanted_s, -(run.digest.made_s if run.digest else 0.0)


def is_run(store: ObjectStore) -> bool:
    return any(store.list(prefix) for prefix in (IDENTITY, ARCHIVE, FACTS))
