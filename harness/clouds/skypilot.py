"""SkyPilot as a `Cloud`: every member of a run is a cluster of its own, found by the run's tag.

The controller uses it. `SkyPilotCloud` calls a broker process (`sky_broker.py`) and never SkyPilot
itself, so nothing here imports it, and a hanging call is ended by killing that process. A thread
polls all clusters of the run; `nodes` returns what it saw last. The source of truth is SkyPilot's
API server: what one controller launched, the next one reads there and adopts.

The states of an attempt: requested (a launch request at the API server) -> up (its job runs) ->
over (the job ended, the cluster was preempted, or a caller terminated it) -> being brought down ->
gone. That it is gone is proven by the cloud, not assumed; only then does `nodes` report it.

`verdict` decides what SkyPilot's errors mean for a run: an offer without capacity or quota is
skipped for the next one, a cloud without credentials is not tried again, a task that cannot work
stops the run, and anything else is retried a limited number of times.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.clouds.cloud_machines import RUN_TAG
from harness.clouds.sky_broker import (
    CALL_TIMEOUT_S,
    IDLE_MINUTES,
    JOB_OVER,
    JOB_TIMEOUT_S,
    LOG_LINES,
    OFFERS_TIMEOUT_S,
    REFRESH_TIMEOUT_S,
    TRIES,
    Broker,
    Sky,
    SkyError,
    verdict,
)
from harness.clouds.sky_clusters import attempt_of_cluster, billed, cluster_name, clusters_of, tag
from harness.clouds.sky_task import Task
from harness.core.hardware import peak_flops
from harness.core.world import UNFIT, BadInput, CloudUnavailable, Node, NodeState, Offer
from harness.node import steady_clock

# The record of one attempt at SkyPilot, which `skypilot.py` keeps and updates.


@dataclass
class LaunchRequest:
    """The launch request of a cluster."""

    # while the call is in flight, a look that does not show the request proves nothing
    asking: bool = False
    request: str = ""  # its id at the API server while it is being worked on
    tries: int = 0


@dataclass
class Times:
    """The times of a cluster: wall clock, seconds since 1970. `None`: not yet, or unknown."""

    up_s: float | None = None
    # when its launch was first seen to have ended, which is when its command starts
    at_work_s: float | None = None
    billed_s: float | None = None  # the earliest launch time that SkyPilot has reported
    gone_s: float | None = None


@dataclass
class EndRequest:
    """The request that brings a cluster down."""

    request: str = ""  # its id at the API server while it is being worked on
    again_s: float = 0.0  # after a failure: earliest time of the next request


@dataclass
class Polls:
    """The polls of a cluster: of its cloud, and of its node."""

    refresh_s: float = -math.inf  # when to poll the cloud again
    poll_s: float = -math.inf  # when to poll the node again
    polling_s: float = -math.inf  # when the node was polled
    # the poll of the node in flight: its job's state and exit code
    poll: Future[tuple[str | None, int | None]] | None = None


@dataclass
class SkyAttempt:
    """One cluster, from its launch request until it is proven to be gone."""

    number: int
    name: str
    offer: Offer
    asked_s: float
    exit_code: int | None = None
    reason: str = ""  # why it is to end, or has ended
    refused: bool = False  # there was never a machine
    seen: bool = False  # the API server has listed it
    sick_s: float | None = None  # since when a part of it is missing
    trouble: str = ""  # the last error
    launch: LaunchRequest = field(default_factory=LaunchRequest)
    times: Times = field(default_factory=Times)
    end: EndRequest = field(default_factory=EndRequest)
    polls: Polls = field(default_factory=Polls)

    @property
    def over(self) -> bool:
        return bool(self.reason)

    def node(self) -> Node:
        state = NodeState.PENDING if self.times.up_s is None else NodeState.UP
        if self.times.gone_s is not None:
            state = NodeState.NO_CAPACITY if self.refused else NodeState.GONE
        at_work_s = None if self.times.up_s is None else self.times.at_work_s
        return Node(
            self.number,
            self.offer,
            state,
            self.asked_s,
            self.times.up_s,
            self.times.gone_s,
            self.exit_code,
            self.reason,
            at_work_s,
        )


# SkyPilot's offers for a task: places, shapes and prices, without the clouds that refuse us.

# catalogs change a few times a day, and the enabled clouds only when somebody changes them
OFFERS_FRESH_S = 300.0
H100_FLOPS = 989e12  # `Offer.speed` is relative to it


def has_spot_market(answer: Mapping[str, Any]) -> bool:
    """Return whether an offer really has a spot market. Some catalogs list a spot price where there
    is none: it equals the on-demand price. Such a node can be preempted and saves nothing.
    Kubernetes has one price for both, and spot nodes where their labels say so."""
    return (
        answer["place"].startswith("kubernetes/")
        or not answer["on_demand_usd_per_h"]
        or answer["usd_per_h"] < 0.999 * answer["on_demand_usd_per_h"]
    )


def to_offer(answer: Mapping[str, Any]) -> Offer:
    return Offer(
        usd_per_h=answer["usd_per_h"],
        name=answer["name"],
        spot=answer["spot"],
        accelerator=answer["accelerator"],
        gpus=answer["gpus"],
        on_demand_usd_per_h=answer["on_demand_usd_per_h"],
        speed=(peak_flops(answer["accelerator"]) or H100_FLOPS) / H100_FLOPS
        if answer["gpus"]
        else 1.0,
        place=answer["place"],
    )


APART = (
    "wanted nodes that reach each other, so that they can train together; found that those of {} "
    "would not: {}; or launch with --nodes 1"
)


# what Kubernetes' spot nodes are known by: SkyPilot's SPOT_LABEL_MAP
NO_SPOT = (
    "`--on-demand` takes nodes that are not spot. (Kubernetes' spot nodes have the label "
    "cloud.google.com/gke-spot=true or karpenter.sh/capacity-type=spot)"
)


class SkyOffers:
    """The offers for one task, refreshed when they are older than OFFERS_FRESH_S.

    `path`: the task file, for messages. `config`: its contents. `clouds`: only these, without
    asking which are enabled; `None` means the enabled ones. `on_demand`: on-demand nodes as well.
    `fleet`: several nodes train together, so offers whose nodes do not reach each other are left
    out.
    """

    def __init__(
        self,
        sky: Sky,
        path: Path,
        config: Mapping[str, Any],
        clouds: Sequence[str] | None,
        on_demand: bool,
        fleet: bool,
        now: Callable[[], float],
    ):
        self._fleet = fleet
        self.apart: dict[str, str] = {}  # offers whose nodes do not reach each other, and why
        self._sky, self._path, self.config, self._now = sky, path, config, now
        self._clouds, self._on_demand = clouds, on_demand
        self._answers: dict[str, dict[str, Any]] = {}
        self.no_spot_market: tuple[str, ...] = ()  # see has_spot_market
        self._offers: tuple[Offer, ...] = ()
        self._offers_s = -math.inf
        self._shut: dict[str, str] = {}  # clouds that refuse us, with the reason

    def offers(self, at_work: bool) -> Sequence[Offer]:
        """Return the offers, cheapest first. `at_work`: some attempt is alive. Raises BadInput if
        none is and no cloud is left that could run this task."""
        if self._now() - self._offers_s > OFFERS_FRESH_S:
            self._offers = self._ask()
            self._offers_s = self._now()
        left = [o for o in self._offers if o.name.split("/")[0] not in self._shut]
        if not left and not at_work:
            why = "; ".join(f"{cloud}: {reason}" for cloud, reason in self._shut.items())
            raise BadInput(
                f"no cloud is left that could run {self._path} ({why}); `sky check` tells more"
            )
        return left

    def has(self, name: str) -> bool:
        """Return whether this offer was ever made."""
        return name in self._answers

    def resources(self, name: str) -> dict[str, Any]:
        """Return the `resources` section of a task file that gets this offer."""
        found: dict[str, Any] = self._answers[name]["resources"]
        return found

    def shut(self, cloud: str, why: str) -> None:
        """Leave out the offers of a cloud that refuses us from now on."""
        self._shut[cloud] = why

    def _ask(self) -> tuple[Offer, ...]:
        config = {
            k: v
            for k, v in self.config.items()
            if k in ("name", "resources", "num_nodes", "config")
        }
        try:
            answers = self._sky(
                "offers",
                OFFERS_TIMEOUT_S,
                config=config,
                clouds=self._clouds,
                on_demand=self._on_demand,
            )
        except SkyError as e:
            if self._offers:
                return self._offers  # old offers are better than none
            said = " ".join(e.message.split())
            no_spot = "Spot instances are not supported" in said and not self._on_demand
            more = NO_SPOT if no_spot else "`sky check` tells more"
            raise BadInput(f"{self._path}: SkyPilot has no offer: {said}; {more}") from e
        self._answers |= {a["name"]: a for a in answers}
        self.apart = {a["name"]: a["apart"] for a in answers if a.get("apart")}
        if self._fleet and self.apart:
            answers = [a for a in answers if a["name"] not in self.apart]
            if not answers:
                raise BadInput(f"{self._path}: {APART.format(*next(iter(self.apart.items())))}")
        found = sorted(to_offer(a) for a in answers if not a["spot"] or has_spot_market(a))
        self.no_spot_market = tuple(
            a["name"] for a in answers if a["spot"] and not has_spot_market(a)
        )
        if not found:
            raise BadInput(
                f"{self._path}: SkyPilot finds no machine for its resources on the enabled clouds; "
                "loosen `resources` or enable more clouds (`sky check` tells which ones and how)"
            )
        return tuple(found)


SICK_S = 30.0  # a cluster that is incomplete for this long is given up
STALE_S = 180.0  # age from which the last look at the clusters is too old to be used
LOOK_EVERY_S = 1.0  # interval of polls of the API server
# least interval of polls of a cloud about a cluster, and of a node about its job: clouds limit
# requests, and each request starts some processes on the node
ASK_EVERY_S = 3.0
# multiples of the duration of the last poll before the next one, to spare slow clouds and nodes
REST_CLOUD, REST_NODE = 1.0, 2.0
REST_LIMIT_S = 60.0  # upper limit of that pause
LAUNCH_LIMIT_S = 3600.0  # a launch that has neither worked nor failed by then is given up
DOWN_AGAIN_S = 20.0  # pause after a failed `down`

URL_TAGS = ("aws", "azure")  # clouds whose tags can hold a URL, for `harness guard`
TAG_VALUE = re.compile(r"[\w+=.:/@-]{1,255}", re.ASCII)

ENDED_WITH = re.compile(r"return code list:\D*\[([\d, ]+)\]")


@dataclass
class _LastLook:
    """The last look at the clusters of the run. `failed`: why there was none since."""

    at_s: float = -math.inf
    failed: str = "nothing was seen yet"


class SkyPilotCloud:
    """A `Cloud` whose members are clusters named `<tag>-<attempt>`.

    `sky` calls SkyPilot (a `Broker`, or a fake); `clouds`: plan for these without asking which are
    enabled; `on_demand`: offer on-demand nodes as well; `fleet`: several nodes train together;
    `log_dir`: where the last log lines of failed nodes are kept.
    """

    def __init__(
        self,
        task: Task,
        run_url: str,
        sky: Sky,
        *,
        clouds: Sequence[str] | None = None,
        on_demand: bool = False,
        fleet: bool = False,
        log_dir: Path | None = None,
        ask_every_s: float = ASK_EVERY_S,
        now: Callable[[], float] = steady_clock.now,
    ):
        if task.managed_secrets:
            name = task.managed_secrets[0]
            raise BadInput(
                f"{task.path}: secrets.{name} has no value; give it one with --secret {name}=value"
            )
        self.task, self.run_url, self.sky, self.log_dir = task, run_url, sky, log_dir
        self.broken: BadInput | None = None  # why no launch of this task can work
        self._ask_every_s, self._now = ask_every_s, now
        config: dict[str, Any] = yaml.safe_load(task.path.read_text())
        self._market = SkyOffers(sky, task.path, config, clouds, on_demand, fleet, now)
        self._attempts: dict[int, SkyAttempt] = {}
        self._lock = threading.RLock()
        self._last = _LastLook()
        self._ended = threading.Event()
        self._soon = threading.Event()
        self._watcher: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="sky")

    # -- Cloud --
    def offers(self) -> Sequence[Offer]:
        """Return the offers, cheapest first. Raises BadInput when no cloud is left that could run
        this task and no attempt is alive."""
        return self._market.offers(any(a.times.gone_s is None for a in self._attempts.values()))

    @property
    def no_market(self) -> tuple[str, ...]:
        """Names of the spot offers that are left out because they have no spot market."""
        return self._market.no_spot_market

    @property
    def apart(self) -> dict[str, str]:
        """The offers whose nodes would not reach each other, each with the reason and the remedy.
        For a fleet they are left out."""
        return self._market.apart

    def launch(self, attempt: int, offer: Offer) -> None:
        if self.broken:
            raise self.broken
        with self._lock:
            if attempt in self._attempts:
                return
            new = self._attempts[attempt] = SkyAttempt(
                attempt,
                cluster_name(tag(self.run_url), attempt),
                offer,
                self._now(),
                launch=LaunchRequest(asking=True),
            )
            if not self._market.has(offer.name):
                new.refused, new.reason, new.times.gone_s = True, "no longer offered", self._now()
                return
        self._ask(new)

    def nodes(self) -> Sequence[Node]:
        if self._watcher is None:
            self.watch()
        if self._now() - self._last.at_s > STALE_S:
            raise CloudUnavailable(
                f"the clusters of this run could not be seen for {STALE_S:g} s: {self._last.failed}"
            )
        with self._lock:
            return [a.node() for a in sorted(self._attempts.values(), key=lambda a: a.number)]

    def terminate(self, attempt: int) -> None:
        with self._lock:
            found = self._attempts.get(attempt)
            if found and not found.over:
                found.reason = "terminated"
        self._soon.set()

    # -- beyond the Cloud protocol --
    def watch(self) -> None:
        """Look once, then keep polling in a thread. Raises SkyError or CloudUnavailable if the
        first look fails."""
        self.look()
        self._watcher = threading.Thread(target=self._keep_looking, daemon=True, name="sky-watch")
        self._watcher.start()

    def close(self) -> None:
        """Stop polling; clusters stay as they are."""
        self._ended.set()
        self._soon.set()
        if self._watcher:
            self._watcher.join(REFRESH_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(self.sky, Broker):
            self.sky.close()

    def shutdown(self, timeout_s: float = 900.0) -> None:
        """Bring all clusters of this run down, prove that they are gone, and stop polling. Raises
        CloudUnavailable that names what is left."""
        give_up_s = self._now() + timeout_s
        if self._watcher is None:
            self.watch()
        while True:
            with self._lock:
                left = [a for a in self._attempts.values() if a.times.gone_s is None]
            for attempt in left:
                self.terminate(attempt.number)
            fresh = self._last.at_s > give_up_s - timeout_s
            if (not left and fresh) or self._now() > give_up_s:
                break
            self._ended.wait(0.2)
        self.close()
        if left or not fresh:
            names = " ".join(a.name for a in left) or f"{tag(self.run_url)}-*"
            raise CloudUnavailable(
                f"not proven to be down after {timeout_s:g} s, look at them with `sky status -r` "
                f"and end them: {names}"
            )

    def tail(self, attempt: int, lines: int) -> str:
        return str(
            self.sky("tail", REFRESH_TIMEOUT_S, name=self._attempts[attempt].name, lines=lines)
        )

    def costs(self) -> list[dict[str, Any]]:
        """Return SkyPilot's bill of this run: [{"name", "duration" (s), "total_cost" (USD)}]."""
        return billed(self.sky, self.run_url)

    # -- launching --
    def _member_config(self, attempt: SkyAttempt) -> dict[str, Any]:
        """Return the task of one member: the user's file, pinned to one place, with the variables
        that its agent needs."""
        about = {
            "attempt": attempt.number,
            "asked_s": attempt.asked_s,
            "offer": asdict(attempt.offer),
        }
        ours = {
            "HARNESS_ATTEMPT": str(attempt.number),
            "HARNESS_OFFER": attempt.offer.name,
            "HARNESS_SPEED": f"{attempt.offer.speed:.6g}",
            "HARNESS_NODE": json.dumps(about),
        }
        resources = {
            k: v
            for k, v in self._market.resources(attempt.offer.name).items()
            if k not in ("job_recovery", "autostop")
        }
        if attempt.offer.name.split("/")[0] in URL_TAGS and TAG_VALUE.fullmatch(self.run_url):
            resources["labels"] = {**resources.get("labels", {}), RUN_TAG: self.run_url}
        return {
            **self._market.config,
            "name": attempt.name,
            "resources": resources,
            "envs": {**self.task.envs, **ours},
        }

    def _ask(self, attempt: SkyAttempt) -> None:
        attempt.launch.tries, attempt.launch.asking = attempt.launch.tries + 1, True
        cloud = attempt.offer.name.split("/")[0]
        # these have no automatic stop of idle nodes
        idle = None if cloud in ("slurm", "ssh") else IDLE_MINUTES
        try:
            attempt.launch.request = self.sky(
                "launch",
                CALL_TIMEOUT_S,
                name=attempt.name,
                config=self._member_config(attempt),
                secrets=dict(self.task.secrets),
                idle_minutes=idle,
            )
        except SkyError as e:
            self._failed(attempt, e)
        except CloudUnavailable as e:  # the next look shows whether the request has arrived
            attempt.trouble = str(e)
        finally:
            attempt.launch.asking = False
        self._soon.set()

    def _failed(self, attempt: SkyAttempt, error: SkyError) -> None:
        """Record a failed launch, or retry it. The next looks bring down what is left of it."""
        attempt.launch.request, attempt.trouble = "", str(error)
        kind, where = verdict(error), attempt.offer.name.split("/")[0]
        if attempt.over:
            return
        if kind == "again" and attempt.launch.tries < TRIES:
            self._ask(attempt)
            return
        said = " ".join((error.history[-1][1] if error.history else error.message).split())
        attempt.reason = f"{kind}: {said}"[:500]
        if kind == "setup":
            attempt.exit_code, attempt.times.up_s = 1, attempt.times.billed_s or attempt.asked_s
            return
        # retries are exhausted; machines, if there were any, are billed
        if kind == "again":
            attempt.reason = f"its launch failed {TRIES} times: {said}"[:500]
            attempt.exit_code, attempt.times.up_s = UNFIT, attempt.times.billed_s
            return
        attempt.refused = True
        if kind == "credentials":
            self._market.shut(where, said)
        elif kind == "bad-input":
            self.broken = BadInput(f"{self.task.path}: SkyPilot refuses it: {error.message}")

    # -- polling --
    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except (CloudUnavailable, SkyError) as e:
                self._last.failed = str(e)
            self._soon.wait(LOOK_EVERY_S)
            self._soon.clear()

    def look(self) -> None:
        """Poll the state of every cluster of this run, and do what is due. Raises SkyError,
        CloudUnavailable."""
        with self._lock:
            alive = [a for a in self._attempts.values() if a.times.gone_s is None]
        requests = [r for a in alive for r in (a.launch.request, a.end.request) if r]
        states = self.sky("requests", CALL_TIMEOUT_S, ids=requests)
        # A refresh of a cluster that is being launched would block until the launch ends.
        began_s = self._now()
        due = [
            a
            for a in alive
            if not a.launch.request and not a.end.request and began_s >= a.polls.refresh_s
        ]
        records = {
            r["name"]: r for r in clusters_of(self.sky, self.run_url, refresh=[a.name for a in due])
        }
        for attempt in due:
            attempt.polls.refresh_s = self._again_s(began_s, REST_CLOUD)
        for name in records.keys() - {a.name for a in alive}:
            self._adopt(records[name])
        for attempt in alive:
            self._step(attempt, records.get(attempt.name), states)
        self._last.at_s = self._now()

    def _again_s(self, asked_s: float, rest: float) -> float:
        """Return when to repeat a poll that was sent at `asked_s` and answered now. `rest`:
        the pause as a multiple of the poll's duration."""
        return self._now() + max(
            self._ask_every_s, min(REST_LIMIT_S, rest * (self._now() - asked_s))
        )

    def _adopt(self, record: Mapping[str, Any]) -> None:
        """Adopt a cluster that an earlier controller launched."""
        number = attempt_of_cluster(record["name"], self.run_url)
        if number is None:
            return
        # gone, and back again: its launch completed although it was ended
        if known := self._attempts.get(number):
            if known.name == record["name"]:
                known.times.gone_s, known.end.request = None, ""
            return
        about = json.loads(record["node"] or "null") or {}
        offer = (
            Offer(**about["offer"])
            if "offer" in about
            else Offer(0.0, f"unknown/{record['resources']}", spot=False)
        )
        found = SkyAttempt(
            number,
            record["name"],
            offer,
            about.get("asked_s", float(record["launched_at"])),
            seen=True,
        )
        found.launch.request = self.sky("launching", CALL_TIMEOUT_S, name=found.name) or ""
        if not found.launch.request and record["ever_up"]:
            # the record no longer has the time when it came up; better too early than too late
            found.times.up_s = found.asked_s
            found.times.at_work_s = self._now()
        with self._lock:
            self._attempts.setdefault(found.number, found)

    def _step(
        self, a: SkyAttempt, record: Mapping[str, Any] | None, states: Mapping[str, str]
    ) -> None:
        """Update one attempt from its record and the states of its requests, and act on it."""
        if a.launch.asking:
            return
        if record:
            a.seen = True
            launched_s = max(a.asked_s, float(record["launched_at"]))
            a.times.billed_s = (
                launched_s if a.times.billed_s is None else min(a.times.billed_s, launched_s)
            )
        if a.launch.request:
            if a.over and not a.end.request:
                self._bring_down(a)  # SkyPilot cancels the launch
            self._launching(a, states.get(a.launch.request, "LOST"))
            return
        if record is None:
            self._vanished(a)
            return
        if not a.over:
            self._running(a, record)
        if a.over:
            if a.end.request and states.get(a.end.request) in ("FAILED", "CANCELLED"):
                a.end.request, a.end.again_s = "", self._now() + DOWN_AGAIN_S
            elif a.end.request and states.get(a.end.request, "LOST") in ("SUCCEEDED", "LOST"):
                a.end.request = ""  # the cluster still exists: bring it down again
            if not a.end.request and self._now() >= a.end.again_s:
                self._bring_down(a)

    def _launching(self, a: SkyAttempt, state: str) -> None:
        if state in ("PENDING", "RUNNING", "WAITING"):
            if self._now() - a.asked_s > LAUNCH_LIMIT_S and not a.over:
                a.reason, a.refused = f"no-capacity: no answer within {LAUNCH_LIMIT_S:g} s", True
            return
        try:
            self.sky("outcome", CALL_TIMEOUT_S, id=a.launch.request)
        except SkyError as e:
            self._failed(a, e)
            return
        a.launch.request = ""
        if a.times.up_s is None and not a.over:
            a.times.up_s, a.times.at_work_s = a.times.billed_s or a.asked_s, self._now()

    def _vanished(self, a: SkyAttempt) -> None:
        """Handle an attempt without a cluster: launch it again if its request was lost, else mark
        it as gone."""
        # requested, but there is neither a request nor a cluster: the request was lost
        if not a.seen and not a.over:
            if found := self.sky("launching", CALL_TIMEOUT_S, name=a.name):
                a.launch.request = found
            elif a.launch.tries < TRIES:
                self._ask(a)
            else:
                a.reason, a.refused = (
                    f"no-capacity: {a.trouble or 'the launch left no trace'}",
                    True,
                )
            return
        a.reason = a.reason or "preempted"
        a.times.gone_s = self._now()

    def _running(self, a: SkyAttempt, record: Mapping[str, Any]) -> None:
        """Check whether the cluster is whole and its command still runs; else set the reason."""
        if record["status"] == "STOPPED":
            a.reason, a.trouble = "preempted", "stopped"
            return
        if record["status"] == "INIT":  # a part of it is gone or does not answer
            a.sick_s, a.trouble = self._now() if a.sick_s is None else a.sick_s, record["why"]
            if self._now() - a.sick_s >= SICK_S:
                a.reason = "preempted"
            return
        a.sick_s = None
        if a.times.up_s is None:  # adopted in the middle of its launch
            a.times.up_s, a.times.at_work_s = a.times.billed_s, self._now()
        if a.polls.poll is None and self._now() >= a.polls.poll_s:
            a.polls.poll, a.polls.polling_s = self._pool.submit(self._job, a), self._now()
        elif a.polls.poll and a.polls.poll.done():
            poll, a.polls.poll, a.polls.poll_s = (
                a.polls.poll,
                None,
                self._again_s(a.polls.polling_s, REST_NODE),
            )
            try:
                state, a.exit_code = poll.result()
            except (SkyError, CloudUnavailable) as e:
                # the node is unreachable; a refresh will show whether it is gone
                a.trouble = str(e)
                return
            if state in JOB_OVER:
                a.reason = "exited" if a.exit_code is not None else f"its job ended as {state}"

    def _job(self, a: SkyAttempt) -> tuple[str | None, int | None]:
        """Return the state of the cluster's job, and the exit code of its command if it has ended.
        SkyPilot only reports "failed"; the code is in the log."""
        state = self.sky("job", JOB_TIMEOUT_S, name=a.name)
        code = JOB_OVER.get(state)
        if code != 1:
            return state, code
        with contextlib.suppress(SkyError, CloudUnavailable):
            log = str(self.sky("tail", JOB_TIMEOUT_S, name=a.name, lines=LOG_LINES))
            codes = [
                int(c)
                for found in ENDED_WITH.findall(log)[-1:]
                for c in found.split(",")
                if c.strip()
            ]
            code = max(codes, default=code)
            if self.log_dir:
                self.log_dir.mkdir(parents=True, exist_ok=True)
                (self.log_dir / f"{a.name}.log").write_text(log)
        return state, code

    def _bring_down(self, a: SkyAttempt) -> None:
        try:
            a.end.request = self.sky("down", CALL_TIMEOUT_S, name=a.name)
        except SkyError as e:
            if e.type != "ClusterDoesNotExist":  # if so, the next look shows that it is gone
                a.trouble, a.end.again_s = str(e), self._now() + DOWN_AGAIN_S
