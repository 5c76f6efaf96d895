"""SkyPilot behind the `Cloud` seam: every member of a run is a cluster of its own, found again by
the run's tag.

`SkyPilotCloud` asks a broker process (`broker.py`) and never SkyPilot itself, so nothing here
imports it, and a call that hangs is given up by ending a process. A thread looks at all clusters of
the run all the time; `nodes` tells what it saw last. The truth is SkyPilot's API server: what a
controller has launched can be read there by the next one, which adopts it.

An attempt's way: asked for (a launch request at the API server) -> up (its job runs) -> over (the
job ended, the cluster was taken away, or somebody wants it gone) -> brought down -> gone, which is
proven by the cloud and not assumed. Only then `nodes` calls it gone.

What SkyPilot's errors mean for a run is decided in `verdict`: an offer without capacity or quota is
left for the next one, a cloud without credentials is not asked again, a task that cannot work stops
the run, and anything else is tried again, boundedly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.clouds.sky_client import Sky

import contextlib
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.clouds.sky_client import (
    CALL_TIMEOUT_S,
    IDLE_MINUTES,
    JOB_OVER,
    JOB_TIMEOUT_S,
    LOG_LINES,
    OFFERS_TIMEOUT_S,
    REFRESH_TIMEOUT_S,
    TRIES,
    Broker,
    SkyError,
    verdict,
)
from harness.clouds.tasks import Task
from harness.core.hardware import peak_flops
from harness.core.world import UNFIT, BadInput, CloudUnavailable, Node, NodeState, Offer

# catalogs change a few times a day; which clouds are enabled, when somebody works on it
OFFERS_FRESH_S = 300.0
SICK_S = 30.0  # a cluster that is not whole for that long is given up
STALE_S = 180.0  # the oldest look at the clusters that is still taken for the present
LOOK_EVERY_S = 1.0  # at what the API server knows
# a cloud about a cluster, and a node about its job: clouds limit requests, and each of ours costs a
# node some processes
ASK_EVERY_S = 3.0
# and no sooner than after so many times what the last answer took: who is slow has other things to
# do
REST_CLOUD, REST_NODE = 1.0, 2.0
REST_LIMIT_S = 60.0  # but after so long in any case
LAUNCH_LIMIT_S = 3600.0  # a launch that has neither worked nor failed by then is given up
DOWN_AGAIN_S = 20.0  # after a failed `down`
H100_FLOPS = 989e12  # `Offer.speed` is relative to it

ENDED_WITH = re.compile(r"return code list:\D*\[([\d, ]+)\]")


# ---- offers --------------------------------------------------------------------------------------
def has_spot_market(answer: Mapping[str, Any]) -> bool:
    """Some catalogs list a spot price where there is no spot market: it equals the on-demand price.
    Such a node can be taken away and saves nothing."""
    return (
        not answer["on_demand_usd_per_h"]
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


def tag(run_url: str) -> str:
    """The beginning of the names of all clusters of a run: the same for every controller that
    leads it."""
    return f"sh-{hashlib.sha256(run_url.encode()).hexdigest()[:8]}"


def cluster(run_url: str, attempt: int) -> str:
    """The name of an attempt's cluster."""
    return f"{tag(run_url)}-{attempt:04d}"


def known_once(sky: Sky, run_url: str) -> set[int]:
    """Attempts whose clusters this API server has had: those that it does not show any more are
    gone. Raises SkyError."""
    names = (
        str(row["name"]).rpartition("-")
        for row in sky("costs", REFRESH_TIMEOUT_S, prefix=f"{tag(run_url)}-")
    )
    return {int(number) for _, _, number in names if number.isdecimal()}


def bring_down(sky: Sky, run_url: str, timeout_s: float) -> list[str]:
    """End every cluster of a run; returns their names. Raises CloudUnavailable that names those
    not proven to be down in time."""
    prefix, give_up_s = f"{tag(run_url)}-", time.monotonic() + timeout_s
    ended: dict[str, str] = {}  # name -> the request that brings it down
    while True:
        left = [r["name"] for r in sky("clusters", REFRESH_TIMEOUT_S, prefix=prefix)]
        if not left:
            return sorted(ended)
        if time.monotonic() > give_up_s:
            raise CloudUnavailable(
                f"not proven to be down after {timeout_s:g} s, end them by hand (`sky down`): "
                f"{' '.join(left)}"
            )
        states = sky("requests", CALL_TIMEOUT_S, ids=[r for r in ended.values() if r])
        for name in left:
            if states.get(ended.get(name, ""), "LOST") not in ("PENDING", "RUNNING", "WAITING"):
                try:
                    ended[name] = sky("down", CALL_TIMEOUT_S, name=name)
                except SkyError as e:
                    ended[name] = ""
                    if e.type != "ClusterDoesNotExist":
                        raise CloudUnavailable(
                            f"SkyPilot does not bring {name} down ({e}); try `sky down {name}`"
                        ) from e
        time.sleep(1.0)


def tails(sky: Sky, run_url: str, lines: int) -> dict[str, str]:
    """The last lines of every cluster of a run that is there, by its name."""
    found = {}
    for record in sky("clusters", REFRESH_TIMEOUT_S, prefix=f"{tag(run_url)}-"):
        try:
            found[record["name"]] = str(
                sky("tail", REFRESH_TIMEOUT_S, name=record["name"], lines=lines)
            )
        except (SkyError, CloudUnavailable) as e:
            found[record["name"]] = f"(no log: {e})"
    return found


# ---- the cloud -----------------------------------------------------------------------------------
@dataclass
class Attempt:
    """One cluster, from asking for it until it is surely gone."""

    number: int
    name: str
    offer: Offer
    asked_s: float
    # a call is on its way that asks for it: nothing that is seen meanwhile says that it was not
    # asked for
    asking: bool = False
    request: str = ""  # launch at the API server that goes on
    tries: int = 0
    up_s: float | None = None
    # when it was seen first that its launch has ended, which is when its command begins
    at_work_s: float | None = None
    billed_s: float | None = None  # the earliest that SkyPilot says it was launched
    gone_s: float | None = None
    exit_code: int | None = None
    reason: str = ""  # why it is to go, or went
    refused: bool = False  # there was never a machine
    seen: bool = False  # the API server has shown it
    down: str = ""  # request that brings it down
    down_again_s: float = 0.0
    sick_s: float | None = None  # since when it is not whole
    refresh_s: float = -math.inf  # when the cloud is to be asked again
    poll_s: float = -math.inf  # and the node
    polling_s: float = -math.inf  # when the node was asked
    # the question to the node how its job is
    poll: Future[tuple[str | None, int | None]] | None = None
    trouble: str = ""  # the last thing that went wrong

    @property
    def over(self) -> bool:
        return bool(self.reason)

    def node(self) -> Node:
        state = NodeState.PENDING if self.up_s is None else NodeState.UP
        if self.gone_s is not None:
            state = NodeState.NO_CAPACITY if self.refused else NodeState.GONE
        at_work_s = None if self.up_s is None else self.at_work_s
        return Node(
            self.number,
            self.offer,
            state,
            self.asked_s,
            self.up_s,
            self.gone_s,
            self.exit_code,
            self.reason,
            at_work_s,
        )


class SkyPilotCloud:
    """Members are clusters named `<tag>-<attempt>`.

    `sky` answers questions to SkyPilot (a `Broker`, or a fake); `clouds`: plan for these without
    asking which are enabled;
    `on_demand`: offer nodes that are not spot as well; `log_dir`: where the last words of failed
    nodes are kept.
    """

    def __init__(
        self,
        task: Task,
        run_url: str,
        sky: Sky,
        *,
        clouds: Sequence[str] | None = None,
        on_demand: bool = False,
        log_dir: Path | None = None,
        ask_every_s: float = ASK_EVERY_S,
        now: Callable[[], float] = time.time,
    ):
        if task.managed_secrets:
            name = task.managed_secrets[0]
            raise BadInput(
                f"{task.path}: secrets.{name} has no value; give it one with --secret {name}=value"
            )
        self.task, self.tag, self.sky, self.log_dir = task, tag(run_url), sky, log_dir
        self._run_url = run_url
        self.broken: BadInput | None = None  # why no launch of this task can work
        self._clouds, self._on_demand, self._ask_every_s, self._now = (
            clouds,
            on_demand,
            ask_every_s,
            now,
        )
        self._config: dict[str, Any] = yaml.safe_load(task.path.read_text())
        self._attempts: dict[int, Attempt] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self.no_market: tuple[str, ...] = ()  # offers that are none: see has_spot_market
        self._offers: tuple[Offer, ...] = ()
        self._offers_s = -math.inf
        self._shut: dict[str, str] = {}  # clouds that do not let us in: why
        self._lock = threading.RLock()
        self._looked_s = -math.inf
        self._blind = "nothing was seen yet"
        self._ended = threading.Event()
        self._soon = threading.Event()
        self._watcher: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="sky")

    # -- Cloud --
    def offers(self) -> Sequence[Offer]:
        """Cheapest first. Raises BadInput when no cloud is left that could run this task."""
        if self._now() - self._offers_s > OFFERS_FRESH_S:
            self._offers = self._ask_offers()
            self._offers_s = self._now()
        left = [o for o in self._offers if o.name.split("/")[0] not in self._shut]
        if not left and not any(a.gone_s is None for a in self._attempts.values()):
            why = "; ".join(f"{cloud}: {reason}" for cloud, reason in self._shut.items())
            raise BadInput(
                f"no cloud is left that could run {self.task.path} ({why}); `sky check` tells more"
            )
        return left

    def launch(self, attempt: int, offer: Offer) -> None:
        if self.broken:
            raise self.broken
        with self._lock:
            if attempt in self._attempts:
                return
            new = self._attempts[attempt] = Attempt(
                attempt, cluster(self._run_url, attempt), offer, self._now(), asking=True
            )
            if offer.name not in self._answers:
                new.refused, new.reason, new.gone_s = True, "no longer offered", self._now()
                return
        self._ask(new)

    def nodes(self) -> Sequence[Node]:
        if self._watcher is None:
            self.watch()
        if self._now() - self._looked_s > STALE_S:
            raise CloudUnavailable(
                f"the clusters of this run could not be seen for {STALE_S:g} s: {self._blind}"
            )
        with self._lock:
            return [a.node() for a in sorted(self._attempts.values(), key=lambda a: a.number)]

    def terminate(self, attempt: int) -> None:
        with self._lock:
            found = self._attempts.get(attempt)
            if found and not found.over:
                found.reason = "terminated"
        self._soon.set()

    # -- more than a Cloud --
    def watch(self) -> None:
        """Look once, then go on looking in a thread. Raises SkyError or CloudUnavailable if the
        first look fails."""
        self.look()
        self._watcher = threading.Thread(target=self._keep_looking, daemon=True, name="sky-watch")
        self._watcher.start()

    def close(self) -> None:
        """Stop looking; clusters stay as they are."""
        self._ended.set()
        self._soon.set()
        if self._watcher:
            self._watcher.join(REFRESH_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(self.sky, Broker):
            self.sky.close()

    def shutdown(self, timeout_s: float = 900.0) -> None:
        """Bring all clusters of this run down, prove it, and stop looking. Raises
        CloudUnavailable that names what is left."""
        give_up_s = self._now() + timeout_s
        if self._watcher is None:
            self.watch()
        while True:
            with self._lock:
                left = [a for a in self._attempts.values() if a.gone_s is None]
            for attempt in left:
                self.terminate(attempt.number)
            fresh = self._looked_s > give_up_s - timeout_s
            if (not left and fresh) or self._now() > give_up_s:
                break
            self._ended.wait(0.2)
        self.close()
        if left or not fresh:
            names = " ".join(a.name for a in left) or f"{self.tag}-*"
            raise CloudUnavailable(
                f"not proven to be down after {timeout_s:g} s, look at them with `sky status -r` "
                f"and end them: {names}"
            )

    def tail(self, attempt: int, lines: int) -> str:
        return str(
            self.sky("tail", REFRESH_TIMEOUT_S, name=self._attempts[attempt].name, lines=lines)
        )

    def costs(self) -> list[dict[str, Any]]:
        """SkyPilot's own bill of this run: [{"name", "duration" (s), "total_cost" (USD)}]."""
        found: list[dict[str, Any]] = self.sky("costs", REFRESH_TIMEOUT_S, prefix=f"{self.tag}-")
        return found

    # -- asking --
    def _ask_offers(self) -> tuple[Offer, ...]:
        config = {
            k: v
            for k, v in self._config.items()
            if k in ("name", "resources", "num_nodes", "config")
        }
        try:
            answers = self.sky(
                "offers",
                OFFERS_TIMEOUT_S,
                config=config,
                clouds=self._clouds,
                on_demand=self._on_demand,
            )
        except SkyError as e:
            if self._offers:
                return self._offers  # what was offered before is better than nothing
            raise BadInput(
                f"{self.task.path}: SkyPilot has no offer: {e.message}; `sky check` tells more"
            ) from e
        self._answers |= {a["name"]: a for a in answers}
        found = sorted(to_offer(a) for a in answers if not a["spot"] or has_spot_market(a))
        self.no_market = tuple(a["name"] for a in answers if a["spot"] and not has_spot_market(a))
        if not found:
            raise BadInput(
                f"{self.task.path}: SkyPilot finds no machine for its resources on the enabled "
                "clouds; loosen `resources` or enable more "
                f"clouds (`sky check` tells which ones and how)"
            )
        return tuple(found)

    def _member_config(self, attempt: Attempt) -> dict[str, Any]:
        """The task of one member: the user's file, pinned to one place, with what its agent
        must know."""
        about = {
            "attempt": attempt.number,
            "asked_s": attempt.asked_s,
            "offer": asdict(attempt.offer),
        }
        ours = {
            "HARNESS_ATTEMPT": str(attempt.number),
            "HARNESS_OFFER": attempt.offer.name,
            "HARNESS_NODE": json.dumps(about),
        }
        resources = {
            k: v
            for k, v in self._answers[attempt.offer.name]["resources"].items()
            if k not in ("job_recovery", "autostop")
        }
        return {
            **self._config,
            "name": attempt.name,
            "resources": resources,
            "envs": {**self.task.envs, **ours},
        }

    def _ask(self, attempt: Attempt) -> None:
        attempt.tries, attempt.asking = attempt.tries + 1, True
        cloud = attempt.offer.name.split("/")[0]
        # those cannot end a node by themselves
        idle = None if cloud in ("slurm", "ssh") else IDLE_MINUTES
        try:
            attempt.request = self.sky(
                "launch",
                CALL_TIMEOUT_S,
                name=attempt.name,
                config=self._member_config(attempt),
                secrets=dict(self.task.secrets),
                idle_minutes=idle,
            )
        except SkyError as e:
            self._failed(attempt, e)
        except CloudUnavailable as e:  # it may have been asked for or not: the next look shows
            attempt.trouble = str(e)
        finally:
            attempt.asking = False
        self._soon.set()

    def _failed(self, attempt: Attempt, error: SkyError) -> None:
        """A launch came to nothing; what may be left of it is brought down by the next looks."""
        attempt.request, attempt.trouble = "", str(error)
        kind, where = verdict(error), attempt.offer.name.split("/")[0]
        if attempt.over:
            return
        if kind == "again" and attempt.tries < TRIES:
            self._ask(attempt)
            return
        said = " ".join((error.history[-1][1] if error.history else error.message).split())
        attempt.reason = f"{kind}: {said}"[:500]
        if kind == "setup":
            attempt.exit_code, attempt.up_s = 1, attempt.billed_s or attempt.asked_s
            return
        # machines, if there were any, are billed; and this must not go on all night
        if kind == "again":
            attempt.reason = f"its launch failed {TRIES} times: {said}"[:500]
            attempt.exit_code, attempt.up_s = UNFIT, attempt.billed_s
            return
        attempt.refused = True
        if kind == "credentials":
            self._shut[where] = said
        elif kind == "bad-input":
            self.broken = BadInput(f"{self.task.path}: SkyPilot refuses it: {error.message}")

    # -- looking --
    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except (CloudUnavailable, SkyError) as e:
                self._blind = str(e)
            self._soon.wait(LOOK_EVERY_S)
            self._soon.clear()

    def look(self) -> None:
        """See how every cluster of this run is, and do what is due."""
        with self._lock:
            alive = [a for a in self._attempts.values() if a.gone_s is None]
        requests = [r for a in alive for r in (a.request, a.down) if r]
        states = self.sky("requests", CALL_TIMEOUT_S, ids=requests)
        # To ask the cloud about a cluster that is being launched would wait for the launch.
        began_s = self._now()
        due = [a for a in alive if not a.request and not a.down and began_s >= a.refresh_s]
        records = {
            r["name"]: r
            for r in self.sky(
                "clusters", REFRESH_TIMEOUT_S, prefix=f"{self.tag}-", refresh=[a.name for a in due]
            )
        }
        for attempt in due:
            attempt.refresh_s = self._again_s(began_s, REST_CLOUD)
        for name in records.keys() - {a.name for a in alive}:
            self._adopt(records[name])
        for attempt in alive:
            self._step(attempt, records.get(attempt.name), states)
        self._looked_s = self._now()

    def _again_s(self, asked_s: float, rest: float) -> float:
        """When to ask again what was asked then and answered now."""
        return self._now() + max(
            self._ask_every_s, min(REST_LIMIT_S, rest * (self._now() - asked_s))
        )

    def _adopt(self, record: Mapping[str, Any]) -> None:
        """A cluster that an earlier controller launched."""
        number = record["name"].removeprefix(f"{self.tag}-")
        if not number.isdigit():
            return
        # it was gone and is there again: a launch that was ended too late to come to nothing
        if known := self._attempts.get(int(number)):
            known.gone_s, known.down = None, ""
            return
        about = json.loads(record["node"] or "null") or {}
        offer = (
            Offer(**about["offer"])
            if "offer" in about
            else Offer(0.0, f"unknown/{record['resources']}", spot=False)
        )
        found = Attempt(
            int(number),
            record["name"],
            offer,
            about.get("asked_s", float(record["launched_at"])),
            seen=True,
        )
        found.request = self.sky("launching", CALL_TIMEOUT_S, name=found.name) or ""
        if not found.request and record["ever_up"]:
            # when it was there first, the record does not say any more: rather too early than too
            # late
            found.up_s = found.asked_s
            found.at_work_s = self._now()
        with self._lock:
            self._attempts.setdefault(found.number, found)

    def _step(
        self, a: Attempt, record: Mapping[str, Any] | None, states: Mapping[str, str]
    ) -> None:
        """Bring one attempt up to date with what was seen."""
        if a.asking:
            return
        if record:
            a.seen = True
            launched_s = max(a.asked_s, float(record["launched_at"]))
            a.billed_s = launched_s if a.billed_s is None else min(a.billed_s, launched_s)
        if a.request:
            if a.over and not a.down:
                self._bring_down(a)  # SkyPilot ends a launch that goes on
            self._launching(a, states.get(a.request, "LOST"))
            return
        if record is None:
            self._vanished(a)
            return
        if not a.over:
            self._running(a, record)
        if a.over:
            if a.down and states.get(a.down) in ("FAILED", "CANCELLED"):
                a.down, a.down_again_s = "", self._now() + DOWN_AGAIN_S
            elif a.down and states.get(a.down, "LOST") in ("SUCCEEDED", "LOST"):
                a.down = ""  # and yet it is there
            if not a.down and self._now() >= a.down_again_s:
                self._bring_down(a)

    def _launching(self, a: Attempt, state: str) -> None:
        if state in ("PENDING", "RUNNING", "WAITING"):
            if self._now() - a.asked_s > LAUNCH_LIMIT_S and not a.over:
                a.reason, a.refused = f"no-capacity: no answer within {LAUNCH_LIMIT_S:g} s", True
            return
        try:
            self.sky("outcome", CALL_TIMEOUT_S, id=a.request)
        except SkyError as e:
            self._failed(a, e)
            return
        a.request = ""
        if a.up_s is None and not a.over:
            a.up_s, a.at_work_s = a.billed_s or a.asked_s, self._now()

    def _vanished(self, a: Attempt) -> None:
        """The cloud does not know it (any more)."""
        # asked for, and neither request nor cluster is there: the question was lost
        if not a.seen and not a.over:
            if found := self.sky("launching", CALL_TIMEOUT_S, name=a.name):
                a.request = found
            elif a.tries < TRIES:
                self._ask(a)
            else:
                a.reason, a.refused = (
                    f"no-capacity: {a.trouble or 'the launch left no trace'}",
                    True,
                )
            return
        a.reason = a.reason or "preempted"
        a.gone_s = self._now()

    def _running(self, a: Attempt, record: Mapping[str, Any]) -> None:
        """Is its command still at work?"""
        if record["status"] == "STOPPED":
            a.reason, a.trouble = "preempted", "stopped"
            return
        if record["status"] == "INIT":  # some of it is gone, or does not answer
            a.sick_s, a.trouble = self._now() if a.sick_s is None else a.sick_s, record["why"]
            if self._now() - a.sick_s >= SICK_S:
                a.reason = "preempted"
            return
        a.sick_s = None
        if a.up_s is None:  # adopted in the middle of its launch
            a.up_s, a.at_work_s = a.billed_s, self._now()
        if a.poll is None and self._now() >= a.poll_s:
            a.poll, a.polling_s = self._pool.submit(self._job, a), self._now()
        elif a.poll and a.poll.done():
            poll, a.poll, a.poll_s = a.poll, None, self._again_s(a.polling_s, REST_NODE)
            try:
                state, a.exit_code = poll.result()
            except (SkyError, CloudUnavailable) as e:
                # not reachable: whether it is gone is for a refresh to say
                a.trouble = str(e)
                return
            if state in JOB_OVER:
                a.reason = "exited" if a.exit_code is not None else f"its job ended as {state}"

    def _job(self, a: Attempt) -> tuple[str | None, int | None]:
        """State of its job, and the exit code of its command if it has ended. SkyPilot only tells
        "failed"; which code it was stands in the log."""
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

    def _bring_down(self, a: Attempt) -> None:
        try:
            a.down = self.sky("down", CALL_TIMEOUT_S, name=a.name)
        except SkyError as e:
            if e.type != "ClusterDoesNotExist":  # then the next look shows that it is gone
                a.trouble, a.down_again_s = str(e), self._now() + DOWN_AGAIN_S
