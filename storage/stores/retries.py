"""Retries of store requests: how often, how long, and when a refusal counts as final."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import (
    RetryCallState,
    retry,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from storage.errors import NotFound, StoreRefused, StoreUnavailable
from storage.stores.objects import (
    abort_stale_uploads,
    folders,
    put_paced,
    read_into,
    reads_at_once,
)

if TYPE_CHECKING:
    from storage.errors import StoreError
    from storage.stores.objects import Gate, Keys, ObjectStore

RETRY_WITHIN_S = 60.0  # seconds that a store may be silent before callers get an error
# seconds that a store that has answered may refuse before that is final; the variable
# STORAGE_PATIENCE_S changes it
PATIENCE_S = 900.0
# two refusals further apart, without requests between them, belong to two spells
SPELL_GAP_S = 120.0
T = TypeVar("T")


class Patience:
    """The meaning of a store's refusal: an outage, if the store has answered before and has refused
    for less than `patience_s` seconds.

    Each kind of operation is judged separately, since each may have its own permission: a user who
    may read but never write gets the refusal at once. Knows no store; `monotonic` in seconds.
    """

    KINDS = ("read", "list", "write", "delete")

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        answered: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.patience_s, self._monotonic = patience_s, monotonic
        self._answered = set(self.KINDS if answered else ())
        # kind -> times of the first and last refusal in a row
        self._spells: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def judge(self, kind: str) -> Iterator[None]:
        """Run one call; a StoreRefused that may not be final becomes StoreUnavailable."""
        try:
            yield
        except StoreUnavailable:
            raise
        except StoreRefused as e:
            raise self._judged(kind, e) from e
        except NotFound:
            self._hear(kind)
            raise
        self._hear(kind)

    def _hear(self, kind: str) -> None:
        self._answered.add(kind)
        self._spells.pop(kind, None)

    def _judged(self, kind: str, e: StoreRefused) -> StoreError:
        if kind not in self._answered:
            return e
        now = self._monotonic()
        first_s, last_s = self._spells.get(kind, (now, now))
        if now - last_s > SPELL_GAP_S:
            first_s = now
        self._spells[kind] = first_s, now
        if now - first_s < self.patience_s:
            return StoreUnavailable(
                f"{e} (it has answered before, so this counts as an outage for {self.patience_s:g} "
                "s)"
            )
        return StoreRefused(
            f"{e} (it has said so for {now - first_s:.0f} s, although it had answered before)"
        )


class Retrying:
    """A store that retries calls that were not answered, and with `patience` those that were
    refused. A `create` whose outcome is unknown is settled by reading back."""

    def __init__(
        self, inner: ObjectStore, within_s: float = RETRY_WITHIN_S, patience: Patience | None = None
    ):
        self.inner, self.url = inner, inner.url
        self._patience, self._within_s = patience or Patience(), within_s
        self._retry = retry(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.5),
            stop=stop_after_delay(within_s),
            reraise=True,
        )

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call("read", self.inner.get, key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call("write", self.inner.put, key, data)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        waited_s = 0.0  # time at the gate, for which the store is not to blame

        def timed(nbytes: int) -> bool:
            nonlocal waited_s
            began_s = time.monotonic()
            paced = gate(nbytes)
            waited_s += time.monotonic() - began_s
            return paced

        def once() -> None:
            with self._patience.judge("write"):
                put_paced(self.inner, key, data, timed)

        def silent(state: RetryCallState) -> bool:
            return (state.seconds_since_start or 0.0) - waited_s >= self._within_s

        self._retry(once).retry_with(stop=silent)()

    def create(self, key: str, data: bytes | memoryview) -> bool:
        unknown = False

        def once() -> bool:
            nonlocal unknown
            try:
                created = self.inner.create(key, data)
            except StoreUnavailable:
                unknown = True
                raise
            if created or not unknown:
                return created
            # An earlier try of ours may have succeeded without an answer: then the object holds
            # exactly our bytes.
            try:
                return self.inner.get(key) == data
            except NotFound:
                # deleted meanwhile, whoever created it: the key is free, so try again
                raise StoreUnavailable(
                    f"{self.url}/{key}: created and deleted by others at the same time"
                ) from None

        return self._call("write", once)

    def list(self, prefix: str) -> list[str]:
        return self._call("list", self.inner.list, prefix)

    def delete(self, key: str) -> None:
        self._call("delete", self.inner.delete, key)

    def size(self, key: str) -> int:
        return self._call("read", self.inner.size, key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._call("read", read_into, self.inner, key, start, buffer)

    def _call(self, kind: str, do: Callable[..., T], *words: Any) -> T:
        def once() -> T:
            with self._patience.judge(kind):
                return do(*words)

        return self._retry(once)()

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        return self._retry(abort_stale_uploads)(self.inner, older_than_s)

    def folders(self) -> Keys:
        return self._call("list", folders, self.inner)

    @property
    def reads_at_once(self) -> int:
        return reads_at_once(self.inner)
