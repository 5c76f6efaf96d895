"""What is asked of a run in its bucket: whatever lies at the key of an order is one."""

import json

import pytest

from harness.bucket.controller_lease import Lease
from harness.bucket.layout import LEAVE, STOP_KEY, UNSAID, StopOrder, order_key
from harness.bucket.orders import ask_to_leave, ask_to_stop, asked_to_leave, stop_order
from harness.node.marks import MarkFile, MarkReader, Want
from storage.stores.folder_store import MemoryStore
from support.clock import PlayedClock


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", UNSAID),
        (b"  \n", UNSAID),
        (b"{}", UNSAID),
        (b'{"reason": null, "failed": "no"}', UNSAID),
        (b'{"reason": ""}', UNSAID),
        (
            b'{"reason": "[/] over budget [red]", "by": 7, "log_tail": "x", "colour": 1}',
            "[/] over budget [red]",
        ),
        (b"over budget", "unreadable"),
        (b"\xff\xfe\x00", "unreadable"),
        (b"[]", "unreadable"),
        (b"[" * 100_000, "unreadable"),
    ],
)
def test_whatever_lies_there_is_a_stop_order(body, says):
    store = MemoryStore("memory://orders", {})
    assert stop_order(store) is None
    store.put(STOP_KEY, body)
    order = stop_order(store)
    assert says in order.reason and not order.failed and order.log_tail == () and order.by == ""


@pytest.mark.parametrize(
    "words", [b"", b"please leave", b"\xff", b"[]", b'{"want": 99, "why": ""}', b'{"why": "x"}']
)
def test_a_mark_in_somebodys_own_words_means_drain(tmp_path, words):
    path = tmp_path / "mark"
    reader = MarkReader(path)
    assert reader.read().want is Want.NOTHING
    path.write_bytes(words)
    assert reader.read().want is Want.DRAIN
    MarkFile(path).write(Want.STOP, "over budget", None)
    assert (reader.read().want, reader.read().why) == (Want.STOP, "over budget")


def test_the_first_order_stands_and_is_read_as_it_was_written():
    store, order = (
        MemoryStore("memory://orders", {}),
        StopOrder("it fails", "m0001", True, ("Traceback", "ValueError")),
    )
    assert ask_to_stop(store, order) and not ask_to_stop(store, StopOrder("another"))
    assert stop_order(store) == order
    assert json.loads(store.get(STOP_KEY))["reason"] == "it fails"  # as older versions read it


# ---- orders of controllers -----------------------------------------------------------------------
@pytest.fixture
def store():
    return MemoryStore("memory://orders", {})


def lead(store, clock, holder):
    """A controller that leads from now on, if the one before is silent."""
    lease = Lease(store, clock, holder, ttl_s=5.0)
    lease.acquire()
    return lease


def test_a_late_stop_order_of_an_old_term_does_nothing(store):
    """AUDIT 6: its writer was paused between its look at the lease and its write."""
    clock = PlayedClock()
    old, new = lead(store, clock, "old"), lead(store, clock, "new")
    late = StopOrder("the budget is spent", "controller", term=old.term)
    assert ask_to_stop(store, late) and stop_order(store) is None
    now = StopOrder("enough", "controller", term=new.term)
    assert ask_to_stop(store, now) and stop_order(store) == now  # it is in nobody's way
    assert not ask_to_stop(store, late) and stop_order(store) == now


def test_a_stop_order_is_carried_out_by_whoever_leads_next(store):
    clock = PlayedClock()
    first = lead(store, clock, "first")
    order = StopOrder("the budget is spent", "controller", term=first.term)
    ask_to_stop(store, order)
    lead(store, clock, "second")
    lead(store, clock, "third")
    assert stop_order(store) == order


@pytest.mark.parametrize("by", ["user", "m0001", "wandb"])
def test_what_people_and_agents_ask_for_stands_whoever_leads(store, by):
    clock = PlayedClock()
    lead(store, clock, "first")
    order = StopOrder("enough", by)
    ask_to_stop(store, order)
    lead(store, clock, "second")
    assert stop_order(store) == order


def test_a_late_word_to_leave_does_nothing_and_can_be_said_again(store):
    clock = PlayedClock()
    old, new = lead(store, clock, "old"), lead(store, clock, "new")
    assert not asked_to_leave(store, 7)
    assert ask_to_leave(store, 7, "its replacement is there", old.term)
    assert not asked_to_leave(store, 7)
    assert ask_to_leave(store, 7, "it is not needed", new.term) and asked_to_leave(store, 7)
    assert not ask_to_leave(store, 7, "it is not needed", new.term)
    store.put(order_key(LEAVE, 8), b"{}")  # by a person, or an older version
    assert asked_to_leave(store, 8)


@pytest.mark.parametrize("term", [True, -1, 1.0, "2", None, 10**15, [1]])
def test_a_term_that_is_none_is_nobodys(store, term):
    lead(store, PlayedClock(), "first")
    store.put(STOP_KEY, json.dumps({"reason": "enough", "term": term}).encode())
    store.put(order_key(LEAVE, 3), json.dumps({"by": "x", "term": term}).encode())
    assert stop_order(store).term == 0 and asked_to_leave(store, 3)
