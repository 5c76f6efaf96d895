"""`harness launch --dry-run`: what would be launched, without launching it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.cli.common import DONE, model_mesh, replica_ranks
from harness.core.world import BadInput
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
    from harness.core.world import Policy


def show_plan(
    flags: LaunchFlags,
    task: Task,
    policy: Policy,
    url: str,
    nodes: tuple[int, int],
    open_cloud: Callable[[], LocalCloud | SkyPilotCloud],
    console: Console,
) -> int:
    """What would be launched. Touches neither bucket nor cloud, beyond reading."""
    from harness.controller import plan as plans

    identity, timed = timed_of(open_store(url), url)
    cloud = open_cloud()
    try:
        found = plans.make(
            cloud.offers(),
            policy,
            nodes,
            no_market=getattr(cloud, "no_market", ()),
            micro_batches=plans.micro_batches(identity, task.envs),
            measured=timed,
            budget_usd=flags.budget_usd,
            replica_ranks=replica_ranks(task.envs),
            mesh=model_mesh(task.envs),
        )
    finally:
        cloud.close()
    if flags.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        plans.show(found, console)
    return DONE


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
