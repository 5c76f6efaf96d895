"""What is asked of a run in its bucket: whatever lies at the key of an order is one."""

import json

import pytest

from harness.bucket.layout import UNSAID
from harness.bucket.orders import STOP_KEY, StopOrder, ask_to_stop, stop_order
from harness.node.marks import MarkReader, Want, write
from storage.files import MemoryStore


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
    write(path, Want.STOP, "over budget")
    assert (reader.read().want, reader.read().why) == (Want.STOP, "over budget")


def test_the_first_order_stands_and_is_read_as_it_was_written():
    store, order = (
        MemoryStore("memory://orders", {}),
        StopOrder("it fails", "m0001", True, ("Traceback", "ValueError")),
    )
    assert ask_to_stop(store, order) and not ask_to_stop(store, StopOrder("another"))
    assert stop_order(store) == order
    assert json.loads(store.get(STOP_KEY))["reason"] == "it fails"  # as older versions read it
