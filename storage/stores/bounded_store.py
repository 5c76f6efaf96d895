"""Bounds on how long a caller waits for a store that does not answer.

A request that is never answered is worse than one that fails: nobody tries again. So each call runs
in a thread of its own, and its caller waits for a bounded time. A call that was given up goes on,
since nobody can stop it: the outcome of a write is then unknown, as StoreUnavailable means.

`Bounded` gives up a call by its size (`CallWaits`), so that `Retrying` makes it again over another
connection. `Prompt` is for a loop that must not wait at all: it answers within a second, and a call
that was given up is asked for its answer by the next call that is the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from storage.errors import StoreUnavailable
from storage.stores.objects import (
    Gate,
    Keys,
    ObjectStore,
    abort_stale_uploads,
    folders,
    put_paced,
    read_into,
    reads_at_once,
)

T = TypeVar("T")

FIRST_WAIT_S = 3.0  # for the answer to a small request; more with each that was not answered
FLOOR_NBYTES_PER_S = 8 << 20  # a transfer that is expected at first to be at least this fast
MOST_WAIT_S = 300.0
SLOWEST = 64.0  # most by which waits grow, when nothing was answered in time
UNSIZED_NBYTES = 8 << 20  # what a read without an end is expected to have at most, at first
MOST_GIVEN_UP = 64  # threads in calls that nobody waits for any more

PROMPT_S = 1.0  # wait of a loop for one answer
LATE_S = 0.1  # the same while an earlier answer is late
FRESH_S = 5.0  # an answer that came later than its caller waited is good for so long
MOST_UNDER_WAY = 32


_WATCH = threading.Lock()
# memory that calls which were given up may still read: first address, the one behind it, the call
_still_read: list[tuple[int, int, Call[Any]]] = []


def _forget() -> None:
    """Begin anew in a forked process: the calls' threads are not there, nor who held the lock."""
    global _WATCH
    _WATCH = threading.Lock()
    _still_read.clear()


os.register_at_fork(after_in_child=_forget)


def _addresses(memory: memoryview) -> tuple[int, int]:
    first = int(np.frombuffer(memory, np.uint8).ctypes.data)
    return first, first + memory.nbytes


def reader_of(memory: memoryview) -> Call[Any] | None:
    """Return a write that was given up and may still read `memory`, which must keep its bytes until
    then: what is sent late would else be other bytes under the same key. None: there is none."""
    with _WATCH:
        _still_read[:] = [one for one in _still_read if not one[2].wait(0)]
        if not _still_read or not memory.nbytes:
            return None
        first, behind = _addresses(memory)
        return next((call for a, b, call in _still_read if a < behind and first < b), None)


def once_unread(memory: memoryview, then: Callable[[], None]) -> None:
    """Call `then` once no write that was given up reads `memory`: mostly at once."""
    call = reader_of(memory)
    if call is None:
        then()
    else:
        call.when_ended(lambda: once_unread(memory, then))


class Call(Generic[T]):
    """One call under way in a daemon thread."""

    def __init__(self, do: Callable[[], T]):
        self._do, self._ended = do, threading.Event()
        self._found: T | None = None
        self._error: BaseException | None = None
        self.ended_s = 0.0  # by time.monotonic
        self._watchers: list[Callable[[], None]] = []
        threading.Thread(target=self._execute, name="store", daemon=True).start()

    def _execute(self) -> None:
        try:
            self._found = self._do()
        except BaseException as e:
            self._error = e
        self.ended_s = time.monotonic()
        with _WATCH:
            self._ended.set()
            watchers, self._watchers = self._watchers, []
        for then in watchers:
            then()

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when it has ended: at once, or from its own thread."""
        with _WATCH:
            if not self._ended.is_set():
                self._watchers.append(then)
                return
        then()

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended within `seconds`."""
        return self._ended.wait(seconds)

    def answer(self) -> T:
        """Return what the call returned, or raise what it raised. It must have ended."""
        if self._error is not None:
            raise self._error
        return self._found  # type: ignore[return-value]


class CallWaits:
    """Decide how long a call of a store may take: FIRST_WAIT_S and what its bytes take at the
    floor rate.

    Waits double with each call that has not answered in time, as the store, the line or an object
    of unknown size may just be slow, and shrink again with answers.
    """

    def __init__(self, url: str, first_wait_s: float = FIRST_WAIT_S):
        self._url, self._first_s = url, first_wait_s
        self._slow = 1.0  # the factor of all waits
        self._given_up: list[Call[Any]] = []
        self._lock = threading.Lock()

    def wait_s(self, nbytes: int) -> float:
        """Return how long a call that moves so many bytes may take now."""
        return min(MOST_WAIT_S, self._slow * (self._first_s + nbytes / FLOOR_NBYTES_PER_S))

    def call(
        self, key: str, nbytes: int, do: Callable[[], T], reads: bytes | memoryview = b""
    ) -> T:
        """Return what `do` returns, or raise what it raises. Raises StoreUnavailable if it has not
        ended in time, and at once while MOST_GIVEN_UP calls hang."""
        call, wait_s = self.begin(key, do), self.wait_s(nbytes)
        if not call.wait(wait_s):
            raise self.give_up(call, key, wait_s, reads)
        self._slow = max(1.0, self._slow / 2)
        return call.answer()

    def begin(self, key: str, do: Callable[[], T]) -> Call[T]:
        """Begin a call. Raises StoreUnavailable while MOST_GIVEN_UP calls hang."""
        with self._lock:
            self._given_up = [call for call in self._given_up if not call.wait(0)]
            hang = len(self._given_up)
        if hang >= MOST_GIVEN_UP:
            raise StoreUnavailable(f"{self._url}/{key}: {hang} earlier calls have no answer yet")
        return Call(do)

    def give_up(
        self, call: Call[Any], key: str, wait_s: float, reads: bytes | memoryview = b""
    ) -> StoreUnavailable:
        """Return the error of a call that nobody waits for any more. `reads`: what it sends."""
        with self._lock:
            self._given_up.append(call)
        if isinstance(reads, memoryview) and reads.nbytes:
            with _WATCH:
                _still_read.append((*_addresses(reads), call))
        self._slow = min(SLOWEST, self._slow * 2)
        return StoreUnavailable(f"{self._url}/{key}: no answer within {wait_s:.1f} s")


class Bounded:
    """A store whose calls end within `CallWaits`. `reads_bounded`: the store itself bounds the
    pieces of a large read, which goes through unchanged."""

    def __init__(
        self, inner: ObjectStore, bounds: CallWaits | None = None, *, reads_bounded: bool = False
    ):
        self.inner, self.url, self._reads_bounded = inner, inner.url, reads_bounded
        self._bounds = bounds or CallWaits(inner.url)

    def _call(self, key: str, nbytes: int, do: Callable[..., T], *words: Any) -> T:
        return self._bounds.call(key, nbytes, lambda: do(*words))

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        nbytes = UNSIZED_NBYTES if end is None else end - (start or 0)
        return self._call(key, nbytes, self.inner.get, key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        nbytes = memoryview(data).nbytes
        self._bounds.call(key, nbytes, lambda: self.inner.put(key, data), data)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """Write like `put`. The bound counts from the last piece; time at the gate is not the
        store's. A call that was given up sends no further piece."""
        moved_s = time.monotonic()  # when the last piece passed the gate; inf: it is at the gate
        given_up = False

        def passed(nbytes: int) -> bool:
            nonlocal moved_s
            if given_up:
                raise StoreUnavailable(f"{self.url}/{key}: this upload was given up")
            moved_s = float("inf")
            try:
                return gate(nbytes)
            finally:
                moved_s = time.monotonic()

        call = self._bounds.begin(key, lambda: put_paced(self.inner, key, data, passed))
        # pieces are sent while the next ones wait at the gate, so any of them may be late
        wait_s = self._bounds.wait_s(memoryview(data).nbytes)
        while not call.wait(min(1.0, wait_s)):
            if time.monotonic() - moved_s > wait_s:
                given_up = True
                raise self._bounds.give_up(call, key, wait_s, data)
        call.answer()

    def create(self, key: str, data: bytes | memoryview) -> bool:
        nbytes = memoryview(data).nbytes
        return self._bounds.call(key, nbytes, lambda: self.inner.create(key, data), data)

    def list(self, prefix: str) -> list[str]:
        return self._call(prefix, UNSIZED_NBYTES, self.inner.list, prefix)

    def delete(self, key: str) -> None:
        self._call(key, 0, self.inner.delete, key)

    def size(self, key: str) -> int:
        return self._call(key, 0, self.inner.size, key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Read as `ReadsInto` says, into memory of our own: a call that was given up must not write
        into a buffer that its caller has got back."""
        if self._reads_bounded:
            return read_into(self.inner, key, start, buffer)
        own = bytearray(buffer.nbytes)
        count = self._call(key, len(own), read_into, self.inner, key, start, memoryview(own))
        buffer.cast("B")[:count] = memoryview(own)[:count]
        return count

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        return abort_stale_uploads(self.inner, older_than_s)

    def folders(self) -> Keys:
        return self._call("", UNSIZED_NBYTES, folders, self.inner)

    @property
    def reads_at_once(self) -> int:
        return reads_at_once(self.inner)


class Prompt:
    """A store for a loop that must not wait: each call answers within PROMPT_S, or LATE_S while an
    earlier one is late, or raises StoreUnavailable.

    A call that was given up goes on. The same call, made again, waits for that one, and gets its
    answer if it came less than FRESH_S ago; so a slow store is read too, only later. While a write
    is under way its key takes no other, so that an old one cannot come after a new one. `inner`
    ends its calls itself (`Retrying`, `Bounded`). `begin` makes a call, `monotonic` its clock.
    """

    def __init__(
        self,
        inner: ObjectStore,
        prompt_s: float = PROMPT_S,
        late_s: float = LATE_S,
        begin: Callable[[Callable[[], Any]], Call[Any]] = Call,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.inner, self.url = inner, inner.url
        self._prompt_s, self._late_s = prompt_s, late_s
        self._begin, self._monotonic = begin, monotonic
        self._calls: dict[tuple[Any, ...], Call[Any]] = {}
        self._until_s = 0.0  # see `allow`
        self._lock = threading.Lock()

    def allow(self, seconds: float) -> None:
        """Let all calls from now on wait until `seconds` from now: the loop is over, and its last
        words are worth a wait."""
        self._until_s = self._monotonic() + seconds

    def _wait_s(self, mine: Call[Any]) -> float:
        with self._lock:
            late = any(one is not mine and not one.wait(0) for one in self._calls.values())
        allowed_s = self._until_s - self._monotonic()
        return max(allowed_s, self._late_s if late else self._prompt_s)

    def _call(self, what: tuple[Any, ...], do: Callable[..., T], *words: Any) -> T:
        call = self._under_way(what, lambda: do(*words))
        if not call.wait(self._wait_s(call)):
            raise StoreUnavailable(f"{self.url}/{what[1]}: no answer yet")
        with self._lock:
            if self._calls.get(what) is call:
                del self._calls[what]
        return call.answer()

    def _under_way(self, what: tuple[Any, ...], do: Callable[[], T]) -> Call[T]:
        now, (kind, key, *_) = self._monotonic(), what
        with self._lock:
            for name, one in list(self._calls.items()):
                if one.wait(0) and now - one.ended_s > FRESH_S:
                    del self._calls[name]  # nobody has asked again
            if (same := self._calls.get(what)) is not None:
                return same
            if kind == "write":
                others = [n for n in self._calls if n[:2] == ("write", key)]
                if any(not self._calls[n].wait(0) for n in others):
                    raise StoreUnavailable(f"{self.url}/{key}: an earlier write is under way")
                for name in others:
                    del self._calls[name]
            if len(self._calls) >= MOST_UNDER_WAY:
                raise StoreUnavailable(f"{self.url}/{key}: {len(self._calls)} calls under way")
            call = self._calls[what] = self._begin(do)
            return call

    def ask(self, name: str, do: Callable[[], T]) -> T:
        """Return what `do` returns, which asks this store and may be late like a call of it."""
        return self._call((name, ""), do)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call(("read", key, start, end), self.inner.get, key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        whole = bytes(data)
        self._call(("write", key, "put", whole), self.inner.put, key, whole)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        whole = bytes(data)
        return self._call(("write", key, "create", whole), self.inner.create, key, whole)

    def list(self, prefix: str) -> list[str]:
        return self._call(("list", prefix), self.inner.list, prefix)

    def delete(self, key: str) -> None:
        self._call(("write", key, "delete"), self.inner.delete, key)

    def size(self, key: str) -> int:
        return self._call(("size", key), self.inner.size, key)

    def folders(self) -> Keys:
        return self._call(("folders", ""), folders, self.inner)

    @property
    def reads_at_once(self) -> int:
        return reads_at_once(self.inner)
