"""`--prometheus [HOST:]PORT`: an HTTP endpoint for scrapes, on loopback by default."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from harness.agent.agent import Agent
from harness.agent.node_state import NodePhase
from harness.bucket.journal import Follower
from harness.core import facts as f
from harness.core.world import BadInput, HarnessError
from harness.ledger.run_state import RunState
from harness.look.alerts.alert_evaluator import AlertWatch
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.metric_rows import Operations
from harness.look.trackers.tracker_registry import RunInfo
from storage.errors import NotFound, StoreError
from storage.http_server import (
    BoundedHandler,
    BoundedHTTPServer,
    HTTPBounds,
    is_our_name,
    our_names,
)
from storage.stores.objects import ObjectStore

# Prometheus' text format for metrics, version 0.0.4.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER = "gauge", "counter"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Exposed:
    """One metric. `samples`: the labels and value of each of its series."""

    name: str
    help: str
    samples: tuple[tuple[Labels, float], ...]
    kind: str = GAUGE

    @classmethod
    def of(cls, name: str, help: str, value: float | None, kind: str = GAUGE) -> Exposed:
        """Make a metric without labels. `value` None: it is unknown, and has no series."""
        return cls(name, help, () if value is None else (((), value),), kind)

    @classmethod
    def one_of(cls, name: str, help: str, label: str, known: Iterable[str], now: str) -> Exposed:
        """Make a state metric: 1 for the current state `now`, 0 for the other `known` ones."""
        states = dict.fromkeys([*known, now])
        return cls(name, help, tuple((((label, s),), float(s == now)) for s in states))


def exposition(metrics: Iterable[Exposed], labels: Labels = ()) -> str:
    """Return the metrics as text. `labels`: added to all series."""
    lines: list[str] = []
    for metric in metrics:
        words = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {metric.name} {words}", f"# TYPE {metric.name} {metric.kind}"]
        for own, value in metric.samples:
            lines.append(f"{metric.name}{_labels((*labels, *own))} {_number(value)}")
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{n}="{quoted(v)}"' for n, v in labels) + "}" if labels else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


# One agent's metrics for Prometheus. Another thread reads them, and changes nothing.


def agent_gauges(agent: Agent) -> str:
    """Return the text that a scrape gets."""
    node, epoch, workers = agent._node, agent._stay.epoch, agent._workers
    trains = node.life is NodePhase.IN
    steps = [sign.step for sign in workers.signs()] if trains else []
    of = Exposed.of
    metrics = [
        Exposed.one_of(
            "harness_agent_state", "Where this node is in its life.", "state",
            [life.value for life in NodePhase], node.life.value,
        ),
        of("harness_agent_epoch", "The newest world that it was in.", epoch.epoch),
        of("harness_agent_world_ranks", "Ranks of that world.", epoch.world if trains else 0),
        of("harness_agent_workers", "Its workers.", len(workers.all) if trains else 0),
        of("harness_agent_step", "The step that its workers are at.", max(steps, default=None)),
        of("harness_agent_notices", "Notices that are in force.", len(node.notices)),
        of("harness_agent_leaving", "It is to leave, or leaves.", float(bool(node.leaving))),
        of("harness_agent_hangs_total", "Hangs of its own workers.", node.hangs, COUNTER),
    ]  # fmt: skip
    return exposition(metrics, (("member", agent.name), ("attempt", str(agent.config.attempt))))


BOUNDS = HTTPBounds(connections=8, request_s=10.0)  # enough for a few scrapers


def check_address(asked: str) -> None:
    """Check that the address is available, before anything is launched. Raises BadInput."""
    with exposing(asked, str):
        pass


@contextmanager
def exposing(asked: str, text: Callable[[], str]) -> Iterator[str]:
    """Answer scrapes with `text()` while entered, and yield the URL. `asked`: `9100`,
    `0.0.0.0:9100` or `[::1]:9100` (`common.prometheus_address`); "" means no endpoint. Raises
    BadInput if the address is not available."""
    if not asked:
        yield ""
        return
    name, _, port = asked.rpartition(":")
    host = name.removeprefix("[").removesuffix("]") or "127.0.0.1"

    names = our_names(host)

    class Scrape(BoundedHandler):
        def do_GET(self) -> None:
            if not is_our_name(self.headers.get("Host", ""), names):  # DNS rebinding by a web page
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask by address or by our own name")
                return
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "wanted /metrics")
                return
            body = text().encode(errors="replace")  # names in a bucket may be invalid Unicode
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        server = BoundedHTTPServer(host, int(port), Scrape, BOUNDS)
    except OSError as e:
        raise BadInput(f"--prometheus {asked}: {e.strerror}; name another address or port") from e
    server.serve_in_thread("prometheus")
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()


# A run's numbers for Prometheus, exposed by its controller.

LOOK_S = 2.0  # least time between two looks into the bucket, however often a scrape comes
LEDGER_S = 30.0  # between two ledgers, which cost more in a long run
STATES = (
    "waiting for capacity",
    "waiting for a node",
    "starting",
    "forming a world",
    "training",
    "re-forming",
    "done",
    "finished",
    "stopped",
    "failed",
)
# values of the ledger: (key there, name, help, kind)
OF_LEDGER = (
    ("cost/usd_total", "harness_usd_total", "Dollars billed so far.", COUNTER),
    ("cost/usd_per_h", "harness_usd_per_hour", "Dollars an hour of the nodes that are up.", ""),
    ("cost/saved_usd", "harness_saved_usd", "Dollars saved against on-demand nodes.", ""),
    ("goodput/fraction", "harness_goodput_ratio", "Billed time that went into kept steps.", ""),
    ("spot/notices", "harness_notices_total", "Notices so far.", COUNTER),
    ("spot/losses", "harness_losses_total", "Nodes lost so far.", COUNTER),
    ("spot/steps_lost", "harness_steps_lost_total", "Steps that were done again.", COUNTER),
    ("spot/recoveries", "harness_recoveries_total", "Times that training went on.", COUNTER),
    (
        "ckpt/stall_total_s",
        "harness_snapshot_stall_seconds_total",
        "Seconds that training stood still for snapshots.",
        COUNTER,
    ),
)


@dataclass
class RunGauges:
    """The gauges of one run. `text` is the answer to a scrape; any thread may call it."""

    store: ObjectStore
    now: Callable[[], float] = time.time
    watch: AlertWatch = field(default_factory=AlertWatch)

    def __post_init__(self) -> None:
        self._follower, self._lock = Follower(self.store), threading.Lock()
        self._operations: Operations | None = None
        self._ledger: dict[str, float] = {}
        self._looked_s = self._counted_s = 0.0
        self._answered = False

    def text(self) -> str:
        """Return the exposition as of the last moment that the bucket answered."""
        with self._lock:
            now = self.now()
            if now - self._looked_s >= LOOK_S:
                self._look(now)
            live = self.watch.run.live
            return exposition([*self._of_run(live, now), *self._of_ledger(), self._alerts(now)])

    def _look(self, now: float) -> None:
        answered = True
        try:
            new = self._follower.poll()
            self.watch.see(s for s in new if not isinstance(s.fact, f.Unreadable))
            self.watch.look(now)
            if now - self._counted_s >= LEDGER_S:
                self._count(now)
                self._counted_s = now
        except (StoreError, HarnessError):
            answered = False  # `harness_bucket_up` shows it
        self._looked_s, self._answered = now, answered

    def _count(self, now: float) -> None:
        if self._operations is None:
            try:
                info = RunInfo.of(self.store)
            except NotFound:
                return  # no worker has trained yet
            self._operations = Operations(self.store, Lineage(self.store, info))
        self._operations.poll()
        self._ledger = self._operations.values(now)

    def _of_run(self, live: RunState, now: float) -> list[Exposed]:
        committed, taken_s = live.committed
        last = live.last_step
        age_s = None if taken_s is None or live.over else max(0.0, now - taken_s)
        loss, step_s = (last.loss, last.seconds) if last else (None, None)
        of = Exposed.of
        return [
            of("harness_bucket_up", "The bucket answered the last look.", float(self._answered)),
            Exposed.one_of(
                "harness_run_state", "The run's state.", "state", STATES, live.run_state
            ),
            of("harness_step", "The newest step that was done.", live.step),
            of("harness_committed_step", "The newest step that a snapshot holds.", committed),
            of("harness_total_steps", "Steps of the whole run.", live.total or None),
            of("harness_epoch", "The newest world's number.", live.epoch),
            of("harness_world_ranks", "Ranks that train now.", live.world),
            of("harness_world_members", "Nodes that train now.", len(live.training())),
            of("harness_nodes_up", "Nodes that are up.", self.watch.run.nodes_up),
            of("harness_snapshot_age_seconds", "Age of the newest snapshot.", age_s),
            of("harness_loss", "Loss of the newest step.", loss),
            of("harness_step_seconds", "Duration of the newest step.", step_s),
            self._nodes(live, now),
        ]

    def _nodes(self, live: RunState, now: float) -> Exposed:
        """Return one series per node, without a notice's seconds left (too many series)."""
        samples = []
        for node in live.shown_nodes(now):
            state = live.node_state(node, now)[1].partition(",")[0]
            labels = (("node", node.name), ("place", node.place), ("state", state))
            samples.append((labels, 1.0))
        return Exposed("harness_node_state", "What each node does.", tuple(samples))

    def _of_ledger(self) -> list[Exposed]:
        return [
            Exposed.of(name, help, self._ledger.get(key), kind or "gauge")
            for key, name, help, kind in OF_LEDGER
        ]

    def _alerts(self, now: float) -> Exposed:
        samples = tuple(
            ((("rule", rule), ("severity", severity), ("subject", subject)), 1.0)
            for (rule, subject), severity in self.watch.firing(now).items()
        )
        return Exposed("harness_alerts_firing", "What is wrong now (docs/RUNBOOK.md).", samples)
