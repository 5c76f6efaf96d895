"""`harness launch --dry-run`: print what would be launched, without launching it.

The policy is called as in the first round of a launch, with all that a launch would know then.
Nothing is started, and nothing is written to the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import IDENTITY, SAMPLES, Identity
from harness.cli.common import DONE, RealClock, replica_ranks, wanted_mesh
from harness.controller.learning import RunEstimator, RunGoals
from harness.controller.recovery import Loop, within_limits
from harness.core import step_records as rec
from harness.core.decoding import amount
from harness.core.facts import AttemptIntended
from harness.core.formatting import clock as when
from harness.core.formatting import duration
from harness.core.world import BadInput, Wait, World
from harness.ledger.attempts import AttemptHistory
from harness.notices.notice import utc
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.cli.launch import LaunchFlags
    from harness.clouds.sky_task import Task
    from harness.clouds.skypilot import SkyPilotCloud
    from harness.controller.forecast.price_process import PricePath
    from harness.controller.run_limits import RunSpec
    from harness.core.estimates import CapacitySeen
    from harness.core.world import Policy, View
    from harness.local.local_cloud import LocalCloud
    from harness.planner.launch_plan import Measured

# `--deadline` and `--work` of `harness launch`: their parsers, and the run's goals from them.

# seconds from the request for a node until it trains, while no changeover was measured
CHANGEOVER_S = {"local": 15.0, "sky": 300.0}


class WithDeadline(Protocol):
    """The flags that `wanted` reads."""

    @property
    def deadline(self) -> str: ...
    @property
    def work(self) -> str: ...
    @property
    def usd_per_hour_late(self) -> float | None: ...
    @property
    def cloud(self) -> str: ...


def deadline_text(text: str) -> None:
    """Check a deadline, or "". Raises ValueError that says what is wanted."""
    if text and _hours(text) is None:
        try:
            utc(text)
        except ValueError:
            raise ValueError(
                f"wanted a time from the launch on, such as 36h, or a date, such as 2026-11-25 or "
                f"2026-11-25T18:00Z; found {text!r}"
            ) from None


def work_text(text: str) -> None:
    """Check a duration of work, or "". Raises ValueError that says what is wanted."""
    if text and not _hours(text):
        raise ValueError(f"wanted a duration above 0, such as 48h or 90m; found {text!r}")


def deadline_at(text: str, started_s: float) -> float | None:
    """Return a deadline as wall clock, seconds since 1970; `None` if there is none. `started_s`:
    when the run was launched."""
    if not text:
        return None
    hours = _hours(text)
    return utc(text) if hours is None else started_s + hours * 3600


def wanted(
    flags: WithDeadline, nodes: tuple[int, int], book: AttemptHistory, now_s: float
) -> RunGoals:
    """Return the run's goals for the learner. A deadline in hours counts from the run's launch,
    also for a controller that takes over. Raises BadInput if a new run cannot keep it."""
    is_new = book.started_s is None
    deadline_s = deadline_at(flags.deadline, now_s if book.started_s is None else book.started_s)
    work_h = _hours(flags.work) or 0.0
    if deadline_s is not None and is_new:
        left_s = deadline_s - now_s
        if left_s <= 0:
            raise BadInput(
                f"--deadline {flags.deadline}: wanted a time to come, found {when(deadline_s)} "
                "UTC, which is over"
            )
        if not book.step and work_h * 3600 > left_s:
            raise BadInput(
                f"--deadline {flags.deadline} is in {duration(left_s)}, and --work {flags.work} "
                f"takes longer on {nodes[1]} nodes, even undisturbed: allow more time, or more "
                "--nodes"
            )
    return RunGoals(
        deadline_s,
        work_h * 3600,
        nodes[1],
        CHANGEOVER_S[flags.cloud],
        usd_per_hour_late=flags.usd_per_hour_late,
    )


def _hours(text: str) -> float | None:
    """Parse `90m`, `36h` or `7d` into hours; `None` for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    return float(found[1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[found[2]] if found else None


def show_plan(
    flags: LaunchFlags,
    task: Task,
    policy: Policy,
    url: str,
    run: RunSpec,
    open_cloud: Callable[[], LocalCloud | SkyPilotCloud],
    console: Console,
) -> int:
    """Print what would be launched. Bucket and cloud are only read. Return the exit status. Raises
    BadInput, StoreError."""
    from harness.planner import launch_plan as plans

    store = open_store(url)
    identity, timed = timed_of(store, url)
    cloud = open_cloud()
    try:
        view = view_now(flags, run, url, store, cloud)
        found = plans.make(
            view.offers,
            within_limits(policy, run),
            (run.min_nodes, run.max_nodes),
            view=view,
            no_market=getattr(cloud, "no_market", ()),
            micro_batches=plans.micro_batches(identity, task.envs),
            measured=timed,
            budget_usd=run.budget_usd,
            replica_ranks=replica_ranks(task.envs),
            mesh=wanted_mesh(task.envs),
            apart=getattr(cloud, "apart", {}) if run.max_nodes > 1 else {},
        )
    finally:
        cloud.close()
    if flags.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        plans.show(found, console)
    return DONE


def view_now(
    flags: LaunchFlags,
    run: RunSpec,
    url: str,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud,
) -> View:
    """Return what the first round of a launch would see now: what this run and other runs have
    learned. Raises BadInput, StoreError."""
    from harness.cli.market_command import Histories, known_before

    clock, rng = RealClock(), random.Random()
    journal = Journal(store, "dry-run", clock.now)  # never flushed, so it writes nothing
    book = AttemptHistory.of(journal.read(), rng, run.block_limit_s)
    goals = wanted(flags, (run.min_nodes, run.max_nodes), book, clock.now())
    before: tuple[dict[str, CapacitySeen], dict[str, PricePath]] = {}, {}
    if flags.cloud == "sky":  # the market of a local cloud is invented
        histories, told = Histories.of(os.environ), Console(stderr=True)
        before = known_before(url, histories, clock.now(), told)
    learner = RunEstimator(store, replace(goals, look_s=run.poll_s), None, *before)
    world = World(clock, cloud, store, rng)
    lease = Lease(store, clock, "dry-run")  # never acquired
    loop = Loop(run, lambda _: Wait(run.poll_s), world, journal, lease, book, learner)
    step, _ = loop.committed()
    return loop.view(step)


def timed_of(store: ObjectStore, url: str) -> tuple[dict[str, Any] | None, Measured | None]:
    """Return a run's identity, and how fast its newest steps were; `None` for what it does not have
    yet. Raises BadInput."""
    from harness.planner import launch_plan as plans

    try:
        identity = Identity.decode(store.get(IDENTITY)).body
    except NotFound:
        return None, None
    except BadObject as e:
        raise BadInput(
            f"{url}/run.json: wanted the run's identity as JSON, found something else ({e})"
        ) from e
    facts = read_facts(store, "controller-", steps=False)
    offers = [s.fact.offer for s in facts if isinstance(s.fact, AttemptIntended)]
    speed = amount(offers[-1].get("speed", 1.0)) if offers else 1.0
    return identity, plans.measured_speed(_newest_steps(store), speed)


def _newest_steps(store: ObjectStore) -> list[tuple[float, int]]:
    """Return (seconds, ranks) of the newest steps; none if their records are damaged (`harness
    prove verify` reports that)."""
    keys = sorted(rec.heads(store.list(SAMPLES)).values())
    with contextlib.suppress(rec.BrokenRecords):
        return [
            (r.dt, r.world)
            for r in (rec.decode(store.get(keys[-1]), keys[-1]) if keys else ())
            if r.dt > 0
        ]
    return []
