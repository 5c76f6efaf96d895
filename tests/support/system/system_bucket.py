"""The bucket of a simulated world: as it is, and as each actor has it. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from harness.bucket.layout import MEMBERS
from harness.core.world import Clock
from harness.lab.simulation.invariants import SimulationEvent
from harness.lab.simulation.sim_world import WatchedStore
from storage.errors import NotFound, StoreRefused, StoreUnavailable
from storage.stores.objects import Keys, ObjectStore
from storage.stores.retries import Patience
from storage.testing.faulty_store import Crash

if TYPE_CHECKING:
    from support.system.fault_plan import ActiveFaults
    from support.system.system_node import SimNode
    from support.system.virtual_time import Kernel

T = TypeVar("T")


@dataclass(frozen=True)
class Deleted:
    """An object was removed from the bucket."""

    t: float
    key: str


class Bucket(WatchedStore):
    """As it is. Tells of every object that lands, or goes."""

    def __init__(
        self, inner: ObjectStore, clock: Clock, emit: Callable[[SimulationEvent | Deleted], None]
    ):
        super().__init__(inner, clock, emit)
        self._tell = emit

    def delete(self, key: str) -> None:
        if self._found(key) is not None:
            super().delete(key)
            self._tell(Deleted(self._clock.now(), key))


class Access:
    """As one actor has it: what befalls the actor at an operation, and what the store answers it.
    `node`: where the actor is; None: a controller. `reads`: it restores, so its reads may be
    damaged."""

    def __init__(
        self,
        bucket: ObjectStore,
        trouble: ActiveFaults,
        actor: str,
        rng: random.Random,
        node: SimNode | None = None,
        reads: bool = False,
    ):
        self._bucket, self._trouble, self._actor, self._rng = bucket, trouble, actor, rng
        self._node, self._reads, self.url = node, reads, bucket.url
        self._patience = trouble.patience()
        self.blind = False  # the last answer was none, or no
        self.waited_s = 0.0  # by who looks again, besides the clock

    def sleep(self, seconds: float) -> None:
        """Time passes for who looks again, and for nobody else."""
        self.waited_s += seconds

    # -- ObjectStore
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        found = self._do("read", key, lambda: self._bucket.get(key, start, end))
        if self._reads and found and self._trouble.damages_read(self._node, key):
            return bytes([found[0] ^ 1]) + found[1:]
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.startswith(MEMBERS):
            data = self.spoken(bytes(data))
        self._do("write", key, lambda: self._bucket.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._do("write", key, lambda: self._bucket.create(key, data))

    def list(self, prefix: str) -> Keys:
        try:
            return self._do("list", prefix, lambda: self._bucket.list(prefix))
        except NotFound:  # what is there is not listed for a while
            return []

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._bucket.delete(key))

    def size(self, key: str) -> int:
        return self._do("read", key, lambda: self._bucket.size(key))

    def spoken(self, record: bytes) -> bytes:
        """What a member says, in the words of its version."""
        version = self._node.version if self._node else "now"
        if version == "now":
            return record
        body = json.loads(record)
        body["wish"] = {"of": "a newer version"}
        return json.dumps(body).encode()

    def _do(self, kind: str, key: str, do: Callable[[], T]) -> T:
        self._live()
        self.blind = True
        # a member's own record is written under a lock that its heartbeat waits for
        if not key.startswith(MEMBERS):
            self._trouble.befall(self._actor, self._rng)
            self._live()
        late = self._trouble.dies_late(self._actor)
        with self._patience.judge(kind):
            fate = self._trouble.answer(
                self._actor, self._node, kind, key, self._rng, self.waited_s
            )
            if fate == "refused":
                raise StoreRefused(f"{self.url}/{key}: 403 Forbidden (simulated)")
            if fate == "missing":
                raise NotFound(f"{self.url}/{key} (simulated: for a while)")
            if fate == "silent":
                raise StoreUnavailable(f"{self.url}/{key}: no answer (simulated; not done)")
            try:
                found = do()
            except NotFound:
                self.blind = False
                raise
            if late:
                raise Crash
            if fate == "unheard":
                raise StoreUnavailable(f"{self.url}/{key}: no answer (simulated; it was done)")
        self.blind = False
        return found

    def _live(self) -> None:
        if self._node is not None and not self._node.alive:
            raise Crash


def patience_of(kernel: Kernel) -> Patience:
    """As `open_store` has it with refusals; shorter, as the worlds are."""
    return Patience(300.0, answered=True, monotonic=kernel.now)
