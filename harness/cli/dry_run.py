"""`harness launch --dry-run`: what would be launched, without launching it.

The policy is asked as the first round of a launch asks it, with all that a launch would know then.
Nothing is started, and nothing is written to the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.cli.common import DONE, RealClock, replica_ranks, wanted_mesh
from harness.core.world import BadInput, Wait
from storage.errors import NotFound
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.text import Console

if TYPE_CHECKING:
    from harness.cli.launch import LaunchFlags
    from harness.clouds.local import LocalCloud
    from harness.clouds.skypilot import SkyPilotCloud
    from harness.clouds.tasks import Task
    from harness.controller.plan import Measured
    from harness.controller.recovery import RunSpec
    from harness.core.known import CapacitySeen
    from harness.core.world import Policy, View
    from harness.market.wandering import PricePath


def show_plan(
    flags: LaunchFlags,
    task: Task,
    policy: Policy,
    url: str,
    run: RunSpec,
    open_cloud: Callable[[], LocalCloud | SkyPilotCloud],
    console: Console,
) -> int:
    """What would be launched. Touches neither bucket nor cloud, beyond reading. Raises BadInput,
    StoreError."""
    from harness.controller import plan as plans
    from harness.controller.recovery import within_limits

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
    """What the first round of a launch would see now: what this run has learned, and what others
    have. Raises BadInput, StoreError."""
    from harness.bucket.journal import Journal
    from harness.bucket.lease import Lease
    from harness.cli.deadline import wanted
    from harness.cli.market import Histories, known_before
    from harness.controller.book import Book
    from harness.controller.learning import RunLearner
    from harness.controller.recovery import Loop
    from harness.core.world import World

    clock, rng = RealClock(), random.Random()
    journal = Journal(store, "dry-run", clock.now)  # writes what is flushed, and nothing is
    book = Book.of(journal.read(), rng, run.block_limit_s)
    goals = wanted(flags, (run.min_nodes, run.max_nodes), book, clock.now())
    before: tuple[dict[str, CapacitySeen], dict[str, PricePath]] = {}, {}
    if flags.cloud == "sky":  # the market of a local cloud is made up
        histories, told = Histories.of(os.environ), Console(stderr=True)
        before = known_before(url, histories, clock.now(), told)
    learner = RunLearner(store, replace(goals, look_s=run.poll_s), None, *before)
    world = World(clock, cloud, store, rng)
    lease = Lease(store, clock, "dry-run")  # never acquired
    loop = Loop(run, lambda _: Wait(run.poll_s), world, journal, lease, book, learner)
    step, _ = loop.committed()
    return loop.view(step)


def timed_of(store: ObjectStore, url: str) -> tuple[dict[str, Any] | None, Measured | None]:
    """A run's identity, and how fast its newest steps were; None: it has none yet. Raises
    BadInput."""
    from harness.bucket.journal import read_facts
    from harness.bucket.layout import IDENTITY, Identity
    from harness.controller import plan as plans
    from harness.core.facts import AttemptIntended
    from harness.core.values import BadObject, amount

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
    return identity, plans.measured(_newest_steps(store), speed)


def _newest_steps(store: ObjectStore) -> list[tuple[float, int]]:
    """(seconds, ranks) of the newest steps; none if their records are damaged (`harness verify`
    says so)."""
    from harness.bucket.layout import SAMPLES
    from harness.core import records as rec

    keys = sorted(rec.heads(store.list(SAMPLES)).values())
    with contextlib.suppress(rec.BrokenRecords):
        return [
            (r.dt, r.world)
            for r in (rec.decode(store.get(keys[-1]), keys[-1]) if keys else ())
            if r.dt > 0
        ]
    return []
