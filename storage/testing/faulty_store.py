"""A store that fails on purpose, and ways to damage stored objects; for users' tests and our own.

    store = FaultyStore(open_store("memory://t"), random.Random(7), unavailable=0.05, unknown=0.05)
    # only the 12th call, exactly once
    store = FaultyStore(inner, random.Random(7), fail_call=12, mode="after")
    corrupt(store, key, "flip", random.Random(7))

Everything follows from the seed and the order of calls. Errors: those of `storage.stores.objects`,
and
whatever `crash` returns.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.stores.objects import ObjectStore, read_into

T = TypeVar("T")

Mode = Literal[
    "before", "after", "full", "torn", "stale", "throttled", "crash-before", "crash-after"
]
"""What happens to one call: no answer and no effect; effect and no answer; disk full; half of what
was asked is read; what was there before the last change is read or listed; the store asks to
slow down, and does so for the next few calls; the caller dies before it; the caller dies after
it took effect."""

Damage = Literal["flip", "truncate", "extend", "empty", "delete", "swap"]


class Crash(BaseException):
    """The process died here. Not an Exception, so that nothing but the test catches it."""


@dataclass(frozen=True)
class _Chances:
    """Probabilities of what may happen to a call, each from 0 to 1; see `FaultyStore`."""

    unavailable: float
    unknown: float
    full: float
    torn: float
    stale: float
    throttled: float


class _Replaced:
    """The contents of each key before its last change, for stale reads."""

    def __init__(self, inner: ObjectStore, kept: bool):
        self._inner, self._kept = inner, kept
        self._contents: dict[str, bytes | None] = {}  # None: nothing was there
        self._last: str | None = None  # the key of the last change

    def change(self, key: str, do: Callable[[], T]) -> T:
        """Run `do`, which changes `key`, and keep the content from before."""
        if not self._kept:
            return do()
        try:
            before: bytes | None = self._inner.get(key)
        except NotFound:
            before = None
        result = do()
        if result is not False:  # a create-only write that lost changes nothing
            self._contents[key], self._last = before, key
        return result

    def get(self, key: str) -> bytes:
        if key not in self._contents:
            return self._inner.get(key)
        found = self._contents[key]
        if found is None:
            raise NotFound(f"{self._inner.url}/{key} (injected: what was there before)")
        return found

    def list(self, prefix: str) -> list[str]:
        here = self._inner.list(prefix)
        if self._last is None or not self._last.startswith(prefix):
            return here
        others = [k for k in here if k != self._last]
        return others if self._contents[self._last] is None else sorted([*others, self._last])


class FaultyStore:
    """A wrapper that injects faults into any ObjectStore. Calls are numbered from 1; `log` has
    (number, operation, key, what happened).

    unavailable   chance that a call is not answered and has no effect
    unknown       chance that a call takes effect and is not answered
    full          chance that a write finds the disk full
    torn          chance that a read returns only the first half (no store should; hashes must catch
                  it)
    stale         chance that a read or list shows the state before the last change through this
                  wrapper (no store should)
    throttled     chance that a burst of `burst` calls begins in which the store answers 503
                  SlowDown and does nothing
    delay_s       up to this many seconds before each call, waited with `sleep`
    fail_call     this one call fails in `mode`, whatever the chances are
    """

    def __init__(
        self,
        inner: ObjectStore,
        rng: random.Random,
        *,
        unavailable: float = 0.0,
        unknown: float = 0.0,
        full: float = 0.0,
        torn: float = 0.0,
        stale: float = 0.0,
        throttled: float = 0.0,
        burst: int = 3,
        delay_s: float = 0.0,
        sleep: Callable[[float], None] | None = None,
        fail_call: int | None = None,
        mode: Mode = "before",
        crash: Callable[[], BaseException] = Crash,
    ):
        if mode not in get_args(Mode):
            raise ValueError(f"mode is one of {', '.join(get_args(Mode))}; found {mode!r}")
        if delay_s and sleep is None:
            raise ValueError("delay_s needs a sleep function (time.sleep, or a simulated clock's)")
        self.inner, self.url = inner, inner.url
        self.calls = 0
        self.log: list[tuple[int, str, str, str]] = []
        self._rng, self._lock = rng, threading.Lock()
        self._chances = _Chances(unavailable, unknown, full, torn, stale, throttled)
        self._burst, self._slow_until = burst, 0  # in calls
        self._replaced = _Replaced(inner, kept=stale > 0 or mode == "stale")
        self._delay_s, self._sleep = delay_s, sleep
        self._fail_call, self._mode, self._crash = fail_call, mode, crash

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call(
            "get",
            key,
            lambda: self.inner.get(key, start, end),
            tear=_first_half,
            old=lambda: self._replaced.get(key)[start:end],
        )

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call(
            "put",
            key,
            lambda: self._replaced.change(key, lambda: self.inner.put(key, data)),
            writes=True,
        )

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._call(
            "create",
            key,
            lambda: self._replaced.change(key, lambda: self.inner.create(key, data)),
            writes=True,
        )

    def list(self, prefix: str) -> list[str]:
        return self._call(
            "list",
            prefix,
            lambda: self.inner.list(prefix),
            old=lambda: self._replaced.list(prefix),
        )

    def delete(self, key: str) -> None:
        self._call(
            "delete", key, lambda: self._replaced.change(key, lambda: self.inner.delete(key))
        )

    def size(self, key: str) -> int:
        return self._call(
            "size", key, lambda: self.inner.size(key), old=lambda: len(self._replaced.get(key))
        )

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        def old() -> int:
            found = self._replaced.get(key)[start : start + buffer.nbytes]
            buffer[: len(found)] = found
            return len(found)

        return self._call(
            "read_into",
            key,
            lambda: read_into(self.inner, key, start, buffer),
            tear=lambda n: n // 2,
            old=old,
        )

    def _call(
        self,
        what: str,
        key: str,
        do: Callable[[], T],
        writes: bool = False,
        tear: Callable[[T], T] | None = None,
        old: Callable[[], T] | None = None,
    ) -> T:
        with self._lock:  # the fate of call n depends only on the seed and n, also under threads
            self.calls += 1
            number, fate = self.calls, self._fate(writes, tear is not None, old is not None)
            delay_s = self._rng.uniform(0, self._delay_s) if self._delay_s else 0.0
            self.log.append((number, what, key, fate or "ok"))
        if self._sleep is not None and delay_s:
            self._sleep(delay_s)
        where = f"call {number}, {what} {self.url}/{key}"
        match fate:
            case "before":
                raise StoreUnavailable(f"{where}: no answer (injected; nothing was done)")
            case "throttled":
                raise StoreUnavailable(f"{where}: 503 SlowDown (injected; nothing was done)")
            case "stale" if old is not None:
                return old()
            case "full":
                raise StoreError(
                    f"{where}: No space left on device (injected): free some space or choose "
                    "another run URL"
                )
            case "crash-before":
                raise self._crash()
        result = do()
        match fate:
            case "after":
                raise StoreUnavailable(f"{where}: no answer (injected; it was done)")
            case "crash-after":
                raise self._crash()
            case "torn" if tear is not None:
                return tear(result)
        return result

    def _fate(self, writes: bool, reads: bool, recalls: bool) -> Mode | None:
        chances = self._chances
        # Always four draws, so that one chance does not shift the effect of another; two more where
        # they are used.
        before, after, full, torn = (self._rng.random() for _ in range(4))
        stale, throttled = (
            (self._rng.random(), self._rng.random())
            if chances.stale or chances.throttled
            else (1.0, 1.0)
        )
        if self.calls == self._fail_call:
            return self._mode
        if self.calls <= self._slow_until:
            return "throttled"
        if throttled < chances.throttled:
            self._slow_until = self.calls + self._burst - 1
            return "throttled"
        if recalls and stale < chances.stale:
            return "stale"
        if before < chances.unavailable:
            return "before"
        if after < chances.unknown:
            return "after"
        if writes and full < chances.full:
            return "full"
        if reads and torn < chances.torn:
            return "torn"
        return None


def corrupt(
    store: ObjectStore, key: str, how: Damage, rng: random.Random, other: str | None = None
) -> None:
    """Damage an object in place. Raises NotFound if it does not exist, ValueError if this damage is
    impossible.

    flip: one bit; truncate: lose at least one byte of the end; extend: garbage at the end;
    empty: no bytes left; delete: gone; swap: trade contents with `other`.
    """
    data = bytearray(store.get(key))
    if not data and how in ("flip", "truncate", "empty"):
        raise ValueError(f"{key} has no bytes to {how}")
    match how:
        case "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            store.put(key, bytes(data))
        case "truncate":
            store.put(key, bytes(data[: rng.randrange(len(data))]))
        case "extend":
            store.put(key, bytes(data) + rng.randbytes(rng.randint(1, 64)))
        case "empty":
            store.put(key, b"")
        case "delete":
            store.delete(key)
        case "swap":
            if other is None:
                raise ValueError("swap needs the key of the other object")
            theirs = store.get(other)
            store.put(other, bytes(data))
            store.put(key, theirs)
        case _:
            raise ValueError(f"damage is one of {', '.join(get_args(Damage))}; found {how!r}")


def _first_half(found: bytes) -> bytes:
    return found[: len(found) // 2]
