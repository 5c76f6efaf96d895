"""Parts of the house, each broken in one way: for both simulations, which must find them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import MEMBERS
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.facts import AttemptEnded, Fact, RunEnded, Stamped
from harness.core.world import CloudUnavailable, View, Wait, World
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, PartList, Ref
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import SortedStore


class DeafLease(Lease):
    """Does not look whether it was overtaken."""

    def check(self) -> None: ...


class HastyLease(DeafLease):
    """Overtakes a living holder as well."""

    def _is_over(self, term: int) -> bool:
        return True


class LazyJournal(Journal):
    """Says that facts are durable when they are not yet."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1
        if self.flushes % 4 == 0:
            super().flush()


class ForgetfulJournal(Journal):
    """A successor that does not read what its predecessor did."""

    def read(self) -> list[Stamped]:
        return []


class GenerousJournal(Journal):
    """Bills whole minutes."""

    def record(self, fact: Fact) -> None:
        if isinstance(fact, AttemptEnded):
            fact = dataclasses.replace(fact, billed_s=60 * math.ceil(fact.billed_s / 60))
        super().record(fact)


class OverwritingStore(SortedStore):
    """Has no create-only write."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.put(key, data)
        return True


class EarlyCommit(Snapshots):
    """Does not wait for all ranks."""

    def commit(self, ref: Ref, world: int) -> Manifest | None:
        if not (keys := self.store.list(f"snapshots/parts/{ref.name}/list-r00000")):
            return None
        lists = [
            dataclasses.replace(PartList.from_json(self.store.get(key)), world=len(keys))
            for key in keys
        ]
        manifest = Manifest.merge(lists)
        self.store.create(f"snapshots/manifests/{ref.name}.json", manifest.to_json().encode())
        return manifest


def impatient(run: RunSpec, *others: Any) -> RunOutcome:
    """Does not wait until the nodes are gone."""
    return recover(dataclasses.replace(run, exit_grace_s=0.0, terminate_timeout_s=0.0), *others)


def greedy(run: RunSpec, *others: Any) -> RunOutcome:
    return recover(dataclasses.replace(run, max_nodes=run.max_nodes + 1), *others)


def boastful(run: RunSpec, policy: Any, world: Any, journal: Journal, lease: Lease) -> RunOutcome:
    """Says done without a look at the bucket."""
    lease.acquire()
    journal.record(RunEnded("done", "all is well", 300))
    journal.flush()
    return RunOutcome("done", "all is well", 300)


def panicky(run: RunSpec, policy: Any, world: World, *others: Any) -> RunOutcome:
    """Ends all nodes when it has trouble of its own."""
    try:
        return recover(run, policy, world, *others)
    except (StoreError, CloudUnavailable):
        for node in world.cloud.nodes():
            world.cloud.terminate(node.attempt)
        raise


def deaf(run: RunSpec, policy: Any, world: World, *others: Any) -> RunOutcome:
    """Believes the cloud alone: what it does not show is lost, though it beats."""

    class Unheard:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.store, name)

        def list(self, prefix: str) -> list[str]:
            return [] if prefix.startswith(MEMBERS) else world.store.list(prefix)

    return recover(run, policy, dataclasses.replace(world, store=Unheard()), *others)


def sleepy(view: View) -> Wait:
    return Wait(60.0, "later")
