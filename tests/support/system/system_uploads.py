"""One rank's share of a snapshot on its way to the bucket. Pure.

What `storage.snapshots.upload.Uploader` does with a job, without its threads: the same order of
operations
over the real `Snapshots` and the real fence, a pause between any two, each of which may fail, be
unheard, or be the last.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.world import Fenced
from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, Ref, chunk_id
from storage.snapshots.retention import Keep
from storage.testing.faulty_store import Crash

if TYPE_CHECKING:
    from support.system.system_node import SimNode, SimWorker

SEND_S = (0.2, 4.0)  # for the bytes of one share
COMMIT_TIMEOUT_S = 90.0  # for the other ranks' shares
RETRY_WITHIN_S = 60.0  # as `storage.stores.retries`
KEEP = Keep(last=3)


@dataclass
class Sending:
    """`written`: our share is in the bucket. `outcome`: "committed", "waiting" (in vain) or
    "failed" with `error`; None: nobody has heard yet."""

    node: SimNode
    worker: SimWorker
    ref: Ref
    world: int
    files: Mapping[str, bytes]
    data: dict[str, Any]
    before: Mapping[str, bytes]
    by_worker: bool  # it is sent from the trainer's own process
    rng: random.Random
    written: bool = False
    outcome: str | None = None
    error: Exception | None = None
    _silent_since_s: float | None = None
    _run: Generator[float, None, Manifest | None] = field(init=False)
    _generation: int = 0  # a new one when another process takes over

    def __post_init__(self) -> None:
        self.created_s = self.node.sim.kernel.now_s
        self._begin()

    @property
    def actor(self) -> str:
        return f"uploader-{self.node.number}"

    @property
    def _lives(self) -> bool:
        sends = self.worker.at_work if self.by_worker else not self.node.uploads.hangs
        return self.node.runs() and sends

    def lose_uploader(self) -> None:
        """The process that sent it is gone: the worker sends it again, under the same token."""
        if self.outcome is None and not self.by_worker:
            self.by_worker = True
            self._begin()

    def _begin(self) -> None:
        self._generation += 1
        number = self._generation
        self.store = self.node.access(
            self.actor, lives=lambda: self._lives and number == self._generation
        )
        self.snapshots = self.node.sim.build.snapshots(self.store)
        self._run = self._steps()
        self._later(0.0)

    def _later(self, seconds: float) -> None:
        generation = self._generation
        who = f"{self.actor}/{self.ref}-{self.worker.rank}-{generation}"  # one does not wait for others
        self.node.sim.kernel.after(seconds, lambda: self._step(generation), who)

    def _step(self, generation: int) -> None:
        if generation != self._generation or not self._lives or self.outcome is not None:
            return
        now = self.node.sim.kernel.now_s
        try:
            pause_s = next(self._run)
        except StopIteration as end:
            self._land("committed" if end.value else "waiting", None)
        except Crash:
            return
        except StoreUnavailable as e:
            now = self.node.sim.kernel.now_s
            since_s = self._silent_since_s = self._silent_since_s or now
            if now - since_s > RETRY_WITHIN_S:
                self._land("failed", e)
            else:  # the token is the same, so all of it may be done again
                self._run = self._steps()
                self._later(self.rng.uniform(0.5, 2.0))
        except (StoreError, Fenced) as e:
            self._land("failed", e)
        else:
            self._later(pause_s)

    def _steps(self) -> Generator[float, None, Manifest | None]:
        check: Callable[[Ref], None] = self.node.sim.build.fence(self.store)
        for key, data in self.before.items():
            self.store.create(key, data)
        check(self.ref)
        yield self.rng.uniform(*SEND_S)
        base = self._base()
        token = f"{self.node.member}x{self.worker.rank}"
        mine = self.snapshots.write(
            self.ref, self.worker.rank, self.world, self.files, {}, self.data, token, base
        )
        self._silent_since_s = None
        yield self.rng.uniform(0.0, 0.2)
        check(self.ref)
        manifest = self.snapshots.commit(self.ref, self.world)
        self.written = True
        until_s, pause_s = self.node.sim.kernel.now_s + COMMIT_TIMEOUT_S, 0.25
        while manifest is None and self.node.sim.kernel.now_s < until_s and not self._is_old():
            yield pause_s
            pause_s = min(2 * pause_s, 4.0)
            check(self.ref)
            manifest = self.snapshots.commit(self.ref, self.world)
            doomed = base.ref if base and mine.refers else None
            if manifest is None and pause_s == 4.0 and self.snapshots.hopeless(self.ref, doomed):
                raise StoreError(f"snapshot {self.ref}: it, or its base, was pruned meanwhile")
        if manifest is not None:
            self._fill(manifest)
        return manifest

    def _base(self) -> Manifest | None:
        with contextlib.suppress(StoreError):
            refs = self.snapshots.refs()
            return self.snapshots.load(refs[0]) if refs else None
        return None

    def _is_old(self) -> bool:
        """A later snapshot of the same rank is written."""
        return any(
            job.written and job.ref > self.ref and job.worker.rank == self.worker.rank
            for job in self.node.uploads.jobs
        )

    def _fill(self, manifest: Manifest) -> None:
        """What was staged here is near for the next restore on this node."""
        for part in manifest.parts:
            name = part.key.rpartition("-")[2]
            if part.key.rpartition("/")[2].startswith(f"r{self.worker.rank:05d}-"):
                for i in range(len(part.hashes)):
                    self.node.near[chunk_id(part, i)] = self.files[name]

    def _land(self, outcome: str, error: Exception | None) -> None:
        self.outcome, self.error = outcome, error
        if outcome != "committed":
            why = str(error or "not whole in time: a rank did not write its share")
            self.node.sim.say(self.node.number, f"snapshot {self.ref}: {why}")
        with contextlib.suppress(ValueError):
            self.node.uploads.jobs.remove(self)
        if outcome == "committed":
            self.node.seen = max(self.node.seen or self.ref, self.ref)
            if self.worker.rank == 0:
                self.node.sim.kernel.after(0.1, self._prune, self.actor)

    def _prune(self) -> None:
        if self._lives:
            with contextlib.suppress(StoreError, Crash):  # the next commit prunes
                self.snapshots.prune(KEEP, expired=self.node.sim.leases)
