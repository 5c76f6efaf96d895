"""A call that is never answered ends for its caller in time, and a loop is never kept waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import NotFound, StoreUnavailable
from storage.stores.bounded_store import Bounded, CallWaits, Prompt, once_unread, reader_of
from storage.stores.folder_store import MemoryStore
from storage.stores.retries import Retrying
from support.worlds import until

MOST_S = 5.0  # no step of these tests may take longer


class Hanging:
    """A store whose next calls of some kinds hang, each until it is let go."""

    def __init__(self, inner: MemoryStore):
        self.inner, self.url = inner, inner.url
        self.hangs: dict[str, int] = {}
        self.go = threading.Event()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        do = getattr(self.inner, name)

        def call(*words: Any) -> Any:
            self.calls.append(name)
            if self.hangs.get(name, 0) > 0:
                self.hangs[name] -= 1
                assert self.go.wait(60)
            return do(*words)

        return call


@pytest.fixture
def hanging():
    store = Hanging(MemoryStore(f"memory://bounded-{time.monotonic_ns()}"))
    yield store
    store.go.set()


CALLS = {
    "get": lambda store: store.get("a"),
    "put": lambda store: store.put("a", b"2"),
    "create": lambda store: store.create("b", b"1"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("c"),
    "size": lambda store: store.size("a"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_hangs_is_made_again(hanging: Hanging, name: str):
    hanging.inner.put("a", b"1")
    calm = CALLS[name](hanging.inner)
    hanging.inner.delete("b")
    bounds = CallWaits(hanging.url, first_wait_s=0.2)
    # an object of unknown size may be large: waits for it begin at what 8 MiB take
    store = Retrying(Bounded(hanging, bounds), within_s=MOST_S)
    hanging.hangs[name] = 1
    began_s = time.monotonic()
    assert CALLS[name](store) == calm
    assert time.monotonic() - began_s < MOST_S
    assert hanging.calls.count(name) == 2


def test_a_create_whose_answer_was_lost_is_ours(hanging: Hanging):
    """It happens behind the caller's back while it is made again."""
    store = Retrying(Bounded(hanging, CallWaits(hanging.url, first_wait_s=0.2)), within_s=MOST_S)
    hanging.inner.create("b", b"ours")  # what the hung call will have done
    hanging.hangs["create"] = 1
    assert store.create("b", b"ours")
    hanging.hangs["create"] = 1
    assert not store.create("b", b"another's")


def test_waits_grow_and_shrink(hanging: Hanging):
    bounds = CallWaits(hanging.url, first_wait_s=0.05)
    store = Bounded(hanging, bounds)
    hanging.inner.put("a", b"1")
    small = bounds.wait_s(0)
    hanging.hangs["size"] = 2
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="no answer within"):
            store.size("a")
    assert bounds.wait_s(0) == 4 * small
    assert bounds.wait_s(64 << 20) > bounds.wait_s(0) + 8
    assert [store.size("a") for _ in range(3)] == [1, 1, 1]
    assert bounds.wait_s(0) == small


def test_only_so_many_calls_hang(hanging: Hanging, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.stores.bounded_store.MOST_GIVEN_UP", 3)
    bounds = CallWaits(hanging.url, first_wait_s=0.01)
    store = Bounded(hanging, bounds)
    hanging.hangs["size"] = 99
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="no answer within"):
            store.size("a")
    with pytest.raises(StoreUnavailable, match="3 earlier calls"):
        store.size("a")
    hanging.hangs["size"] = 0
    hanging.go.set()
    time.sleep(0.2)
    with pytest.raises(NotFound):
        store.size("a")


def test_a_read_that_was_given_up_writes_into_nobodys_buffer(hanging: Hanging):
    hanging.inner.put("a", b"old bytes")
    store = Bounded(hanging, CallWaits(hanging.url, first_wait_s=0.05))
    buffer = bytearray(9)
    hanging.hangs["get"] = hanging.hangs["read_into"] = 1
    with pytest.raises(StoreUnavailable):
        store.read_into("a", 0, memoryview(buffer))
    buffer[:] = b"mine now!"
    hanging.go.set()
    time.sleep(0.2)
    assert buffer == b"mine now!"
    assert store.read_into("a", 0, memoryview(buffer)) == 9 and buffer == b"old bytes"


def test_time_at_the_gate_is_not_the_stores(hanging: Hanging):
    store = Bounded(hanging, CallWaits(hanging.url, first_wait_s=0.3))

    def gate(nbytes: int) -> bool:
        time.sleep(1.5)
        return True

    store.put_paced("a", b"1", gate)
    assert hanging.inner.get("a") == b"1"
    hanging.hangs["put"] = hanging.hangs["put_paced"] = 1
    with pytest.raises(StoreUnavailable, match="no answer within"):
        store.put_paced("a", b"2", lambda nbytes: True)


# ---- a loop that must not wait -------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_a_loop_is_not_kept_waiting(hanging: Hanging, name: str):
    hanging.inner.put("a", b"1")
    calm = CALLS[name](hanging.inner)
    hanging.inner.delete("b")
    store = Prompt(hanging, prompt_s=0.3, late_s=0.05)
    hanging.hangs[name] = 1
    began_s = time.monotonic()
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="no answer yet"):
            CALLS[name](store)
    assert time.monotonic() - began_s < MOST_S
    assert hanging.calls.count(name) == 1  # the same call is waited for, not made again
    hanging.go.set()
    time.sleep(0.1)
    assert CALLS[name](store) == calm  # its answer
    assert hanging.calls.count(name) == 1
    CALLS[name](store)
    assert hanging.calls.count(name) == 2


def test_other_calls_go_on_while_one_hangs(hanging: Hanging):
    store = Prompt(hanging, prompt_s=0.3)
    hanging.hangs["list"] = 1
    with pytest.raises(StoreUnavailable):
        store.list("control/")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_an_old_write_never_comes_after_a_new_one(hanging: Hanging):
    store = Prompt(hanging, prompt_s=0.1)
    hanging.hangs["put"] = 1
    with pytest.raises(StoreUnavailable, match="no answer yet"):
        store.put("beat", b"old")
    with pytest.raises(StoreUnavailable, match="an earlier write is under way"):
        store.put("beat", b"new")
    hanging.go.set()
    time.sleep(0.2)
    store.put("beat", b"new")
    assert hanging.inner.get("beat") == b"new"


def test_an_answer_that_nobody_asked_for_again_is_not_kept(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("storage.stores.bounded_store.FRESH_S", 0.2)
    hanging.inner.put("a", b"1")
    store = Prompt(hanging, prompt_s=0.1)
    hanging.hangs["get"] = 1
    with pytest.raises(StoreUnavailable):
        store.get("a")
    hanging.go.set()
    time.sleep(0.5)
    hanging.inner.put("a", b"2")
    assert store.get("a") == b"2"


def test_last_words_may_wait(hanging: Hanging):
    store = Prompt(hanging, prompt_s=0.05)
    hanging.hangs["put"] = 1
    threading.Timer(0.5, hanging.go.set).start()
    store.allow(MOST_S)
    store.put("last", b"words")
    assert hanging.inner.get("last") == b"words"


@pytest.mark.parametrize("name", ["put", "create", "put_paced"])
def test_memory_is_read_until_a_write_that_was_given_up_has_ended(hanging: Hanging, name: str):
    """Else its next owner's bytes would be sent under the old key."""
    bounded = Bounded(hanging, CallWaits(hanging.url, 0.2))
    segment, freed = memoryview(bytearray(b"0123456789")), list[str]()
    hanging.hangs = {"put": 1, "create": 1}
    more = [lambda nbytes: True] if name == "put_paced" else []
    with pytest.raises(StoreUnavailable, match="no answer"):
        getattr(bounded, name)("a", segment[2:6], *more)
    assert reader_of(segment) is reader_of(segment[5:8]) is not None
    assert reader_of(segment[:2]) is reader_of(segment[6:]) is reader_of(segment[3:3]) is None
    once_unread(segment[:2], lambda: freed.append("beside"))
    once_unread(segment, lambda: freed.append("whole"))
    assert freed == ["beside"]
    hanging.go.set()
    until(lambda: freed == ["beside", "whole"], within_s=MOST_S)
    assert reader_of(segment) is None
