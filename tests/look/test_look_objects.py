"""Whatever lies at a key that a view, a tracker or a watcher writes: a value, or the one named
error. (What else a run writes: tests/bucket/test_layout.py.)"""

import dataclasses
import json
from typing import Any

import pytest

from harness.look.alerts.alert_log import Alert, AlertReceipt
from harness.look.reports.setup_report import LogbookEntry
from harness.look.trackers.stream_objects import (
    BatchHeader,
    StreamRow,
    WandbNodesWatermark,
    WandbWatermark,
    decode_batch,
    encode_batch,
    mlflow_run_of,
)
from harness.look.watch.side_jobs import SideClaim, SideOutcome
from storage.canonical_json import BadObject, canonical
from support.decoders import Decoder, bears_any_bytes, bears_any_change, reads_what_is_real

ALERT = dataclasses.asdict(Alert("a1", "rank 1 hangs", "silent", 1.7e9, "critical"))
HEADER = BatchHeader(
    3, 9, 2, last_step=4, head="ab", best={"val_loss": (0.5, 4)}, snapshots=("0000000004-e000001",),
    newest="0000000004-e000001", alerts=("a1",), new_alerts=(ALERT,),
    exported=("e1",), new_exports=({"id": "e1", "step": 4, "epoch": 1, "files": ["a"]},),
    heard={"0a": 1.7e9}, heard_floor_s=1.6e9,
)  # fmt: skip
ROWS = [
    StreamRow(9, "step", 1.7e9, {"time/wall_s": 5.0, "train/loss": float("nan")}, step=4),
    StreamRow(10, "ops", 1.7e9, {"time/wall_s": 6.0, "world/size": 2}, again=True),
]
BATCH = encode_batch(HEADER, ROWS)
TOLD = WandbWatermark(3, 11, 1, -1, 2).encode("p", "r1")
NOTE = canonical(dataclasses.asdict(LogbookEntry(1.7e9, "why", "me", 3)))
DONE = SideOutcome("done", {"eval/loss": 2.5}, 2, 3.5, "me")
BAD = (BadObject,)
DECODERS = [
    Decoder("alert", Alert.decode, BAD, (json.dumps(ALERT).encode(),)),
    Decoder("alert receipt", AlertReceipt.decode, (), (AlertReceipt("sent", 1.7e9).encode(),)),
    Decoder("batch of the stream", lambda d: decode_batch(d, 3), BAD, (BATCH,)),
    Decoder("how far W&B is", WandbWatermark.decode, BAD, (TOLD,)),
    Decoder(
        "how far W&B is with nodes", WandbNodesWatermark.decode, BAD,
        (WandbNodesWatermark(3, {"1": 7}, {"1": 0}).encode(),),
    ),
    Decoder("generation at MLflow", mlflow_run_of, BAD, (b'{"run_id":"0a1b"}',)),
    Decoder("note", LogbookEntry.decode, BAD, (NOTE,)),
    Decoder("outcome of a side job", SideOutcome.of, (), (DONE.encode(),)),
    Decoder("claim of a side job", SideClaim.of, (), (SideClaim("me", 60.0).encode(),)),
]  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_what_is_real_is_read(decoder: Decoder) -> None:
    reads_what_is_real(decoder)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_bytes_are_a_value_or_the_one_error(decoder: Decoder) -> None:
    bears_any_bytes(decoder)


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_any_change_is_a_value_or_the_one_error(decoder: Decoder) -> None:
    bears_any_change(decoder, use)


def use(found: Any) -> None:
    match found:
        case Alert() | AlertReceipt():
            found.encode()
        case WandbWatermark():
            found.encode("p", "r")
        case WandbNodesWatermark() | SideOutcome():
            found.encode()
        case SideClaim():
            assert 0 < found.lease_s <= 3600
        case (BatchHeader() as header, list() as rows):
            assert [row.number for row in rows] == list(range(header.first_row, header.end_row))
            assert all(int(row.values["time/wall_s"]) < 2**60 for row in rows)
            assert all(len(alert.title) >= 0 for alert in header.told_alerts())
            assert all(export.step >= 0 for export in header.told_exports())
            encode_batch(header, rows)


def test_a_batch_of_the_stream_comes_back() -> None:
    header, rows = decode_batch(BATCH, 3)
    assert (header, rows[1]) == (HEADER, ROWS[1]) and repr(rows[0]) == repr(ROWS[0])
    first, *lines = BATCH.splitlines()
    for bad, words in (
        (first + b"\n" + lines[0] + b"\n", "wanted 2 rows, found 1"),
        (BATCH.replace(b"time/wall_s", b"time/wall_h"), "wanted time/wall_s"),
        (BATCH.replace(b"0000000004-e000001", b"4"), "names of snapshots"),
        (BATCH.replace(b"[0.5, 4]", b"[0.5]"), "wanted a value and a step"),
        (BATCH.replace(b'"rank 1 hangs"', b"7"), "title: wanted str"),
    ):
        with pytest.raises(BadObject, match=words):
            decode_batch(bad, 3)
    with pytest.raises(BadObject, match="wanted batch 4, found batch 3"):
        decode_batch(BATCH, 4)
