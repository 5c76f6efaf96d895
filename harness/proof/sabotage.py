"""What a drill does inside the processes of one node: hold them at a phase, silence or slow their
store, shift their clock.

Production code has no hook for it: the drill puts a `sitecustomize` that calls `arm` on the node's
Python path. Everything follows files in one folder, so it can begin and end at any moment from
outside:

    hold.json {"phase": ..., "after_step": n}   stand still at that phase until the file is gone;
                                                the first to get there writes `reached`
    outage                                      the store does not answer
    delay                                       seconds that each call to the store takes longer
    clock                                       seconds by which the wall clock is off
    damage.json {"how": ..., "prefix": ..., "reads": n}   what is read of keys with that prefix is
                                                damaged, n times in each process
                                                (-1: always): "flip" a bit, "gone" (404), "hidden"
                                                (404, and not listed either)
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness.bucket.layout import EPOCHS
from storage import opening
from storage.errors import NotFound, StoreUnavailable
from storage.objects import ObjectStore
from storage.retries import Retrying

T = TypeVar("T")

HOLD_LIMIT_S = 30.0  # a drill that was killed must not hold anybody for ever
RETRY_WITHIN_S = 1.0  # an outage shall be felt, not only bridged
# phases by what is written
KEYS = {
    "upload": "snapshots/parts/",
    "commit": "snapshots/manifests/",
    "rendezvous": EPOCHS,
}
# phases by progress.WorkerPhase
PLACES = {"start": "START", "resume": "RESTORE", "step": "COMPUTE", "staging": "STAGING"}


class Folder:
    """Reads the orders."""

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
        """How this read is damaged; "": it is not."""
        text = self._order("damage.json")
        order = json.loads(text) if text else {}
        if not order or not key.startswith(order["prefix"]) or 0 <= order["reads"] <= self.damaged:
            return ""
        self.damaged += 1
        return str(order["how"])

    def silent(self) -> bool:
        return (self.path / "outage").exists()


class SabotagedStore:
    """An ObjectStore that does not answer, or slowly, while the folder says so."""

    def __init__(self, inner: ObjectStore, folder: Folder):
        self.inner, self.url, self._folder = inner, inner.url, folder

    def _call(self, what: str, key: str, do: Callable[[], T]) -> T:
        if delay_s := self._folder.number("delay"):
            time.sleep(delay_s)
        if self._folder.silent():
            raise StoreUnavailable(f"{what} {self.url}/{key}: no answer (drill)")
        return do()

    def _write(self, what: str, key: str, do: Callable[[], T]) -> T:
        for phase, prefix in KEYS.items():
            if key.startswith(prefix):
                self._folder.hold(phase)
        return self._call(what, key, do)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        def read() -> bytes:
            how = self._folder.damage(key)
            found = self.inner.get(key, start, end)
            if how in ("gone", "hidden"):
                raise NotFound(f"{self.url}/{key} (drill)")
            return bytes([found[0] ^ 1]) + found[1:] if how and found else found

        return self._call("get", key, read)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._write("create", key, lambda: self.inner.create(key, data))

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
    """From now on this process follows the orders in the folder. Called once, before anything
    else is imported."""
    from harness.node import progress

    folder = Folder(Path(path))
    open_store, tell, now = opening.open_store, progress.ProgressFile.tell, time.time
    shift: list[float] = [0.0, 0.0]  # seconds, and until when that is believed

    def sabotaged(
        url: str, *, retry_within_s: float = RETRY_WITHIN_S, **options: Any
    ) -> ObjectStore:
        return Retrying(
            SabotagedStore(open_store(url, **options), folder), min(retry_within_s, RETRY_WITHIN_S)
        )

    def held(
        self: progress.ProgressFile,
        place: progress.WorkerPhase | None = None,
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

    opening.open_store = sabotaged
    progress.ProgressFile.tell = held  # type: ignore[method-assign]
    time.time = shifted
