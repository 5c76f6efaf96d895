"""The part of a drill inside the processes of one node: hold them at a phase, block or slow their
store, shift their clock.

Production code has no hook for it: the drill puts a `sitecustomize` that calls `arm` on the node's
Python path. Everything follows files in one folder, so it can begin and end at any moment from
outside:

    hold.json {"phase": ..., "after_step": n}   stand still at that phase until the file is gone;
                                                the first process to do so writes `reached`
    outage                                      the store does not answer
    hang                                        calls to the store have no answer
    drip                                        its answers come at 20 B/s
    twice                                       each object is written again, 1 s after its answer
    delay                                       seconds added to each call to the store
    clock                                       seconds by which the wall clock is off
    damage.json {"how": ..., "prefix": ..., "reads": n}   reads of keys with that prefix are
                                                damaged, n times in each process
                                                (-1: always): "flip" a bit, "half" of it comes,
                                                "gone" (404), "hidden" (404, and not listed either)
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness.bucket.layout import EPOCHS
from harness.node import heartbeat
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.stores import store_urls
from storage.stores.bounded_store import CallWaits
from storage.stores.objects import ObjectStore, all_of
from storage.stores.retries import Retrying

T = TypeVar("T")

HOLD_LIMIT_S = 30.0  # so that a drill that was killed holds no process forever
RETRY_WITHIN_S = 1.0  # short, so that an outage has effects and is not bridged by retries
DRIP_NBYTES_PER_S = 20
HEAD_NBYTES = 200  # of an answer over HTTP, before the object
TWICE_S = 1.0
# phases by the key that is written
KEYS = {
    "upload": "snapshots/parts/",
    "commit": "snapshots/manifests/",
    "rendezvous": EPOCHS,
}
# phases by heartbeat.WorkerPhase
PLACES = {"start": "START", "resume": "RESTORE", "step": "COMPUTE", "staging": "STAGING"}


class Folder:
    """The folder of orders."""

    def __init__(self, path: Path):
        self.path, self.damaged = path, 0

    def _order(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text()
        except OSError:
            return None

    def hold(self, phase: str, step: int = 1 << 62) -> None:
        text = self._order("hold.json")
        if not text:
            return
        order = json.loads(text)
        if order["phase"] != phase or step < order["after_step"]:
            return
        with contextlib.suppress(FileExistsError), open(self.path / "reached", "x") as f:
            f.write(str(os.getpid()))
        limit_s = time.monotonic() + HOLD_LIMIT_S
        while (self.path / "hold.json").exists() and time.monotonic() < limit_s:
            time.sleep(0.01)

    def number(self, name: str) -> float:
        text = self._order(name)
        return float(text) if text else 0.0

    def damage(self, key: str) -> str:
        """Return how this read is damaged; "" if it is not."""
        text = self._order("damage.json")
        order = json.loads(text) if text else {}
        if not order or not key.startswith(order["prefix"]) or 0 <= order["reads"] <= self.damaged:
            return ""
        self.damaged += 1
        return str(order["how"])

    def orders(self, name: str) -> bool:
        return (self.path / name).exists()

    def stand(self, name: str, most_s: float = HOLD_LIMIT_S) -> None:
        """Wait while that is ordered."""
        until_s = time.monotonic() + min(most_s, HOLD_LIMIT_S)
        while self.orders(name) and time.monotonic() < until_s:
            time.sleep(0.02)


class SabotagedStore:
    """An ObjectStore that does not answer, or answers slowly, while the folder orders it. Its calls
    have the bounds of a bucket's, which the store of a drill, a folder, does not need."""

    def __init__(self, inner: ObjectStore, folder: Folder):
        self.inner, self.url, self._folder = inner, inner.url, folder
        self._bounds = CallWaits(inner.url)

    def _call(self, what: str, key: str, do: Callable[[], T]) -> T:
        if delay_s := self._folder.number("delay"):
            time.sleep(delay_s)
        if self._folder.orders("outage"):
            raise StoreUnavailable(f"{what} {self.url}/{key}: no answer (drill)")
        if self._folder.orders("hang") or self._folder.orders("drip"):
            return self._bounds.call(key, 0, lambda: self._late(what, key, do))
        return do()

    def _late(self, what: str, key: str, do: Callable[[], T]) -> T:
        if self._folder.orders("hang"):
            self._folder.stand("hang")
            raise StoreUnavailable(f"{what} {self.url}/{key}: the line broke (drill)")
        found = do()
        nbytes = HEAD_NBYTES + (len(found) if isinstance(found, bytes) else 0)
        self._folder.stand("drip", nbytes / DRIP_NBYTES_PER_S)
        return found

    def _write(
        self, what: str, key: str, data: bytes | memoryview, do: Callable[[bytes | memoryview], T]
    ) -> T:
        for phase, prefix in KEYS.items():
            if key.startswith(prefix):
                self._folder.hold(phase)
        if self._folder.orders("twice"):
            # the same bytes: the memory of `data` has others by then
            again = threading.Timer(TWICE_S, self._again, (do, bytes(data)))
            again.daemon = True
            again.start()
        return self._call(what, key, lambda: do(data))

    def _again(self, do: Callable[[bytes], object], data: bytes) -> None:
        with contextlib.suppress(StoreError):
            do(data)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        def read() -> bytes:
            how = self._folder.damage(key)
            found = self.inner.get(key, start, end)
            if how in ("gone", "hidden"):
                raise NotFound(f"{self.url}/{key} (drill)")
            if how == "half":
                some = found[: len(found) // 2]
                return all_of(f"{self.url}/{key} (drill)", some, len(found) if end is None else 0)
            return bytes([found[0] ^ 1]) + found[1:] if how and found else found

        return self._call("get", key, read)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write("put", key, data, lambda some: self.inner.put(key, some))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._write("create", key, data, lambda some: self.inner.create(key, some))

    def list(self, prefix: str) -> list[str]:
        return self._call(
            "list",
            prefix,
            lambda: [] if self._folder.damage(prefix) == "hidden" else self.inner.list(prefix),
        )

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def size(self, key: str) -> int:
        return self._call("size", key, lambda: self.inner.size(key))


def arm(path: str) -> None:
    """Make this process follow the orders in the folder from now on. Called once, before anything
    else is imported."""
    folder = Folder(Path(path))
    open_store, tell, now = store_urls.open_store, heartbeat.ProgressFile.tell, time.time
    shift: list[float] = [0.0, 0.0]  # seconds, and the time until which they are cached

    def sabotaged(
        url: str, *, retry_within_s: float = RETRY_WITHIN_S, **options: Any
    ) -> ObjectStore:
        return Retrying(
            SabotagedStore(open_store(url, **options), folder), min(retry_within_s, RETRY_WITHIN_S)
        )

    def held(
        self: heartbeat.ProgressFile,
        place: heartbeat.WorkerPhase | None = None,
        step: int | None = None,
    ) -> None:
        tell(self, place, step)
        for phase, name in PLACES.items():
            if place is not None and place.name == name:
                folder.hold(phase, self._step)

    def shifted() -> float:
        if time.monotonic() >= shift[1]:
            shift[:] = [folder.number("clock"), time.monotonic() + 0.1]
        return now() + shift[0]

    store_urls.open_store = sabotaged
    heartbeat.ProgressFile.tell = held  # type: ignore[method-assign]
    time.time = shifted
