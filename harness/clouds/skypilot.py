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

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.clouds.clusters import attempt_of, billed, cluster_name, listed, tag
from harness.clouds.sky_attempt import Attempt, LaunchRequest
from harness.clouds.sky_client import (
    CALL_TIMEOUT_S,
    IDLE_MINUTES,
    JOB_OVER,
    JOB_TIMEOUT_S,
    LOG_LINES,
    REFRESH_TIMEOUT_S,
    TRIES,
    Broker,
    Sky,
    SkyError,
    verdict,
)
from harness.clouds.sky_offers import SkyOffers
from harness.clouds.tasks import Task
from harness.core import steady
from harness.core.world import UNFIT, BadInput, CloudUnavailable, Node, Offer

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

ENDED_WITH = re.compile(r"return code list:\D*\[([\d, ]+)\]")


@dataclass
class _LastLook:
    """At the clusters of the run. `failed`: why none was seen since."""

    at_s: float = -math.inf
    failed: str = "nothing was seen yet"


class SkyPilotCloud:
    """Members are clusters named `<tag>-<attempt>`.

    `sky` answers questions to SkyPilot (a `Broker`, or a fake); `clouds`: plan for these without
    asking which are enabled; `on_demand`: offer nodes that are not spot as well; `log_dir`: where
    the last words of failed nodes are kept.
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
        now: Callable[[], float] = steady.now,
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
        self._market = SkyOffers(sky, task.path, config, clouds, on_demand, now)
        self._attempts: dict[int, Attempt] = {}
        self._lock = threading.RLock()
        self._last = _LastLook()
        self._ended = threading.Event()
        self._soon = threading.Event()
        self._watcher: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="sky")

    # -- Cloud --
    def offers(self) -> Sequence[Offer]:
        """Cheapest first. Raises BadInput when no cloud is left that could run this task."""
        return self._market.offers(any(a.times.gone_s is None for a in self._attempts.values()))

    @property
    def no_market(self) -> tuple[str, ...]:
        """Offers without a spot market, which are left out."""
        return self._market.no_spot_market

    def launch(self, attempt: int, offer: Offer) -> None:
        if self.broken:
            raise self.broken
        with self._lock:
            if attempt in self._attempts:
                return
            new = self._attempts[attempt] = Attempt(
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
        """SkyPilot's own bill of this run: [{"name", "duration" (s), "total_cost" (USD)}]."""
        return billed(self.sky, self.run_url)

    # -- asking --
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
            for k, v in self._market.resources(attempt.offer.name).items()
            if k not in ("job_recovery", "autostop")
        }
        return {
            **self._market.config,
            "name": attempt.name,
            "resources": resources,
            "envs": {**self.task.envs, **ours},
        }

    def _ask(self, attempt: Attempt) -> None:
        attempt.launch.tries, attempt.launch.asking = attempt.launch.tries + 1, True
        cloud = attempt.offer.name.split("/")[0]
        # those cannot end a node by themselves
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
        except CloudUnavailable as e:  # it may have been asked for or not: the next look shows
            attempt.trouble = str(e)
        finally:
            attempt.launch.asking = False
        self._soon.set()

    def _failed(self, attempt: Attempt, error: SkyError) -> None:
        """A launch came to nothing; what may be left of it is brought down by the next looks."""
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
        # machines, if there were any, are billed; and this must not go on all night
        if kind == "again":
            attempt.reason = f"its launch failed {TRIES} times: {said}"[:500]
            attempt.exit_code, attempt.times.up_s = UNFIT, attempt.times.billed_s
            return
        attempt.refused = True
        if kind == "credentials":
            self._market.shut(where, said)
        elif kind == "bad-input":
            self.broken = BadInput(f"{self.task.path}: SkyPilot refuses it: {error.message}")

    # -- looking --
    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except (CloudUnavailable, SkyError) as e:
                self._last.failed = str(e)
            self._soon.wait(LOOK_EVERY_S)
            self._soon.clear()

    def look(self) -> None:
        """See how every cluster of this run is, and do what is due."""
        with self._lock:
            alive = [a for a in self._attempts.values() if a.times.gone_s is None]
        requests = [r for a in alive for r in (a.launch.request, a.end.request) if r]
        states = self.sky("requests", CALL_TIMEOUT_S, ids=requests)
        # To ask the cloud about a cluster that is being launched would wait for the launch.
        began_s = self._now()
        due = [
            a
            for a in alive
            if not a.launch.request and not a.end.request and began_s >= a.polls.refresh_s
        ]
        records = {
            r["name"]: r for r in listed(self.sky, self.run_url, refresh=[a.name for a in due])
        }
        for attempt in due:
            attempt.polls.refresh_s = self._again_s(began_s, REST_CLOUD)
        for name in records.keys() - {a.name for a in alive}:
            self._adopt(records[name])
        for attempt in alive:
            self._step(attempt, records.get(attempt.name), states)
        self._last.at_s = self._now()

    def _again_s(self, asked_s: float, rest: float) -> float:
        """When to ask again what was asked then and answered now."""
        return self._now() + max(
            self._ask_every_s, min(REST_LIMIT_S, rest * (self._now() - asked_s))
        )

    def _adopt(self, record: Mapping[str, Any]) -> None:
        """A cluster that an earlier controller launched."""
        number = attempt_of(record["name"], self.run_url)
        if number is None:
            return
        # it was gone and is there again: a launch that was ended too late to come to nothing
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
        found = Attempt(
            number,
            record["name"],
            offer,
            about.get("asked_s", float(record["launched_at"])),
            seen=True,
        )
        found.launch.request = self.sky("launching", CALL_TIMEOUT_S, name=found.name) or ""
        if not found.launch.request and record["ever_up"]:
            # when it was there first, the record does not say any more: rather too early than too
            # late
            found.times.up_s = found.asked_s
            found.times.at_work_s = self._now()
        with self._lock:
            self._attempts.setdefault(found.number, found)

    def _step(
        self, a: Attempt, record: Mapping[str, Any] | None, states: Mapping[str, str]
    ) -> None:
        """Bring one attempt up to date with what was seen."""
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
                self._bring_down(a)  # SkyPilot ends a launch that goes on
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
                a.end.request = ""  # and yet it is there
            if not a.end.request and self._now() >= a.end.again_s:
                self._bring_down(a)

    def _launching(self, a: Attempt, state: str) -> None:
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

    def _vanished(self, a: Attempt) -> None:
        """The cloud does not know it (any more)."""
        # asked for, and neither request nor cluster is there: the question was lost
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
            a.end.request = self.sky("down", CALL_TIMEOUT_S, name=a.name)
        except SkyError as e:
            if e.type != "ClusterDoesNotExist":  # then the next look shows that it is gone
                a.trouble, a.end.again_s = str(e), self._now() + DOWN_AGAIN_S
