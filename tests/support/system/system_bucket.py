"""The bucket of a simulated world: as it is, and as each actor has it. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from harness.bucket.layout import MEMBERS
from harness.core.world import Clock
from harness.lab.simulation.invariants import SimulationEvent
from harness.lab.simulation.sim_world import WatchedStore
from storage.errors import NotFound, StoreRefused, StoreUnavailable
from storage.stores.bounded_store import Prompt
from storage.stores.objects import Keys, ObjectStore, all_of
from storage.stores.retries import Patience
from storage.testing.faulty_store import Crash
from support.system.virtual_time import SimCall

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


class Served:
    """What the bucket answers one process, and when. `node`: where it is; None: a controller.
    `reads`: it restores, so its reads may be damaged. `lives`: does the process?"""

    def __init__(
        self,
        bucket: ObjectStore,
        trouble: ActiveFaults,
        rng: random.Random,
        node: SimNode | None = None,
        reads: bool = False,
        lives: Callable[[], bool] = lambda: True,
    ):
        self._bucket, self._trouble, self._rng = bucket, trouble, rng
        self._node, self._reads, self._lives, self.url = node, reads, lives, bucket.url
        self._patience = trouble.patience()
        self.waited_s = 0.0  # by who looks again, besides the clock

    def live(self) -> None:
        """Raises Crash: who asks is gone."""
        if not self._lives():
            raise Crash

    # -- ObjectStore
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        found = self._do("read", key, lambda: self._bucket.get(key, start, end))
        if self._reads and found and self._trouble.damages_read(self._node, key):
            return bytes([found[0] ^ 1]) + found[1:]
        if end is None and self._trouble.halves_read(self._node):
            return all_of(f"{self.url}/{key} (simulated)", found[: len(found) // 2], len(found))
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._do("write", key, lambda: self._bucket.put(key, data), again=True)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._do("write", key, lambda: self._bucket.create(key, data))

    def list(self, prefix: str) -> Keys:
        try:
            return self._do("list", prefix, lambda: self._bucket.list(prefix))
        except NotFound:  # what is there is not listed for a while
            return []

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._bucket.delete(key), again=True)

    def size(self, key: str) -> int:
        return self._do("read", key, lambda: self._bucket.size(key))

    def _do(self, kind: str, key: str, do: Callable[[], T], again: bool = False) -> T:
        """`again`: it may arrive twice."""
        trouble, where = self._trouble, f"{self.url}/{key}"
        trouble.stall("stalled", self._node, where, self._rng)
        self.live()
        with self._patience.judge(kind):
            fate = trouble.answer(self._node, kind, key, self._rng, self.waited_s)
            if fate == "refused":
                raise StoreRefused(f"{where}: 403 Forbidden (simulated)")
            if fate == "missing":
                raise NotFound(f"{where} (simulated: for a while)")
            if fate == "silent":
                raise StoreUnavailable(f"{where}: no answer (simulated; not done)")
            found = do()
            if again:
                trouble.repeat(self._node, do, self._rng)
            if fate == "unheard":
                raise StoreUnavailable(f"{where}: no answer (simulated; it was done)")
        trouble.stall("unanswered", self._node, where, self._rng)
        self.live()
        return found


class Access:
    """The bucket as one actor has it: what befalls the actor at an operation, and what `Served`
    answers it, or does so in time."""

    def __init__(
        self, served: Served, trouble: ActiveFaults, actor: str, rng: random.Random, version: str
    ):
        self._served, self._store, self.url = served, cast("ObjectStore", served), served.url
        self._trouble, self._actor, self._rng, self._version = trouble, actor, rng, version
        self.blind = False  # the last answer was none, or no

    def prompt(self, kernel: Kernel) -> Prompt:
        """From now on its calls answer soon, as an agent's do."""
        found = Prompt(
            cast("ObjectStore", self._served),
            begin=lambda do: SimCall(kernel, do),  # type: ignore[arg-type, return-value]
            monotonic=kernel.now,
        )
        self._store = found
        return found

    def live(self) -> None:
        self._served.live()

    @property
    def waited_s(self) -> float:
        return self._served.waited_s

    def sleep(self, seconds: float) -> None:
        """Time passes for who looks again, and for nobody else."""
        self._served.waited_s += seconds

    # -- ObjectStore
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._do(key, lambda: self._store.get(key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.startswith(MEMBERS):
            data = self.spoken(bytes(data))
        self._do(key, lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._do(key, lambda: self._store.create(key, data))

    def list(self, prefix: str) -> Keys:
        return self._do(prefix, lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        self._do(key, lambda: self._store.delete(key))

    def size(self, key: str) -> int:
        return self._do(key, lambda: self._store.size(key))

    def spoken(self, record: bytes) -> bytes:
        """What a member says, in the words of its version."""
        if self._version == "now":
            return record
        body = json.loads(record)
        body["wish"] = {"of": "a newer version"}
        return json.dumps(body).encode()

    def _do(self, key: str, do: Callable[[], T]) -> T:
        self._served.live()
        self.blind = True
        # a member's own record is written under a lock that its heartbeat waits for
        if not key.startswith(MEMBERS):
            self._trouble.befall(self._actor, self._rng)
            self._served.live()
        late = self._trouble.dies_late(self._actor)
        try:
            found = do()
        except NotFound:
            self.blind = False
            raise
        self._served.live()
        if late:
            raise Crash
        self.blind = False
        return found


def patience_of(kernel: Kernel) -> Patience:
    """As `open_store` has it with refusals; shorter, as the worlds are."""
    return Patience(300.0, answered=True, monotonic=kernel.now)
