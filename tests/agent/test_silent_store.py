"""One kind of request of an agent, worker or uploader is answered badly, before or amid a notice of
30 s: the node commits and leaves within its grace. The store is S3 over HTTP.

`make gray` plays the whole matrix: each kind of request, answered never, at 20 B/s, by half, twice.
`make gray CELLS='start hang'` plays those cells whose names begin so.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.core.world import DRAINED
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store
from support import buckets
from support.bad_store import NODE, RUN, TIMES, WRITES, Call, Gateway, Misbehaviour
from support.outside import environment, said_of, train_begin, until

pytestmark = pytest.mark.proof
GRACE_S, SHORT_S = 30.0, 12.0
START_S = 240.0  # some nodes start at once
AT_ONCE = int(os.environ.get("GRAY_JOBS") or 4)
# the calls of a node's life, by the moment at which they are answered badly
START, BEFORE, AMID = "start", "before", "amid"  # from its first call; a notice follows; it came
MOMENTS = {
    AMID: "GET rdzv/epochs, GET snapshots/manifests, GET snapshots/parts/list, LIST rdzv/epochs, "
    "LIST snapshots/manifests, LIST snapshots/parts, LIST snapshots/quarantine, PUT facts, "
    "PUT rdzv/members, PUT samples, PUT snapshots/manifests, PUT snapshots/parts, "
    "PUT snapshots/parts/list",
    BEFORE: "DELETE snapshots/manifests, DELETE snapshots/parts, DELETE snapshots/parts/list, "
    "GET rdzv/epochs, GET snapshots/manifests, GET snapshots/parts/list, HEAD snapshots/parts, "
    "LIST control, LIST rdzv/epochs, LIST rdzv/members, LIST snapshots/manifests, "
    "LIST snapshots/measured, LIST snapshots/parts, LIST snapshots/quarantine, "
    "LIST snapshots/reading, PUT facts, PUT rdzv/members, PUT samples, PUT snapshots/manifests, "
    "PUT snapshots/parts, PUT snapshots/parts/list",
    START: "DELETE control/probe, DELETE snapshots/reading, GET control/probe, GET control/phases, "
    "GET control/limits.json, GET setup, HEAD control/probe, PUT control/probe, PUT setup, "
    "PUT setup/diff, PUT rdzv/members, "
    "GET rdzv/chunks, GET rdzv/members, GET rdzv/secret.json, GET run.json, GET snapshots/parts, "
    "GET rdzv/epochs, GET snapshots/manifests, LIST snapshots/manifests, LIST rdzv/epochs, "
    "LIST lease, LIST rdzv/members, LIST setup, LIST snapshots/doubts, "
    "PUT control/store.json, PUT rdzv/chunks, PUT rdzv/epochs, PUT rdzv/secret.json, "
    "PUT run.json, PUT snapshots/reading",
}


@dataclass(frozen=True)
class Cell:
    moment: str
    how: str
    call: Call | None

    def __str__(self) -> str:
        return f"{self.moment} {self.how} {self.call or 'nothing'}"


def cell(moment: str, how: str, call: str) -> Cell:
    return Cell(moment, how, Call(*call.split(" ")))


ALL = [
    cell(moment, how, call)
    for moment, calls in MOMENTS.items()
    for call in calls.split(", ")
    for how in TIMES
    if how != "twice" or call.startswith(WRITES)
]
RISKIEST = [
    cell(BEFORE, "hang", "LIST control"),
    cell(BEFORE, "hang", "GET rdzv/epochs"),
    cell(AMID, "hang", "LIST snapshots/manifests"),
    cell(AMID, "hang", "PUT snapshots/parts"),
    cell(AMID, "hang", "PUT snapshots/manifests"),
    cell(BEFORE, "hang", "PUT rdzv/members"),
    cell(BEFORE, "hang", "PUT facts"),
    cell(START, "half", "GET run.json"),
    cell(START, "half", "GET snapshots/parts"),
    cell(START, "hang", "PUT rdzv/members"),
    cell(AMID, "half", "GET snapshots/parts/list"),
    cell(BEFORE, "half", "PUT snapshots/manifests"),
    cell(BEFORE, "twice", "PUT rdzv/members"),
    cell(AMID, "twice", "PUT snapshots/manifests"),
    cell(AMID, "drip", "LIST snapshots/parts"),
    cell(AMID, "drip", "PUT snapshots/parts"),
]


class Place:
    """A store with a run that was drained, of which each cell gets a copy."""

    def __init__(self, endpoint: str, gateway: Gateway, folder: Path):
        self.endpoint, self.gateway, self.folder = endpoint, gateway, folder
        self.first = self.store("my-bucket")
        process = self.begin("my-bucket")
        until(lambda: Snapshots(self.first).latest(), "a first snapshot", of=process)
        process.send_signal(signal.SIGTERM)
        code, text = said_of(process, 2 * GRACE_S)
        assert code == DRAINED, text

    def store(self, bucket: str) -> ObjectStore:
        return open_store(
            f"s3://{bucket}/{RUN}",
            endpoint_url=self.endpoint,
            key="tester",
            secret="secret",
            client_kwargs={"region_name": "us-east-1"},
        )

    def begin(self, bucket: str, *flags: object) -> Any:
        folder = self.folder / bucket
        folder.mkdir()
        keys = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": NODE,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "TMPDIR": str(folder),
        }
        run = f"s3://{bucket}/{RUN}"
        return train_begin(run, *flags, total=100_000, nap_s=0.2, folder=folder, env=environment(**keys))

    def copied(self, bucket: str) -> ObjectStore:
        buckets.make_s3_bucket(self.endpoint, bucket)
        into = self.store(bucket)
        for key in self.first.list(""):
            into.put(key, self.first.get(key))
        return into


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    gateway = Gateway()
    with buckets.moto(around=gateway.around) as endpoint:
        yield Place(endpoint, gateway, tmp_path_factory.mktemp("nodes"))


@dataclass
class Lived:
    """What a cell's node did."""

    cell: Cell
    code: int
    took_s: float  # from the notice to its exit
    committed: int  # steps since the notice
    met: int  # requests answered badly
    text: str
    why: str = ""

    @property
    def row(self) -> str:
        return (
            f"{self.cell!s:45} {self.took_s:5.1f} s  exit {self.code}  +{self.committed} steps  "
            f"met {self.met}  {self.why.partition(chr(10))[0]}"
        )


def live(place: Place, cell: Cell, bucket: str, every: bool = False) -> Lived:
    """Play a cell. Never raises an AssertionError: `why` is what did not hold."""
    bad = place.gateway.of[bucket] = Misbehaviour(cell.how, cell.call, every)
    found = Lived(cell, 0, 0.0, 0, 0, "")
    store = place.copied(bucket)
    snapshots = Snapshots(store)

    def step() -> int:
        return max((ref.step for ref in snapshots.refs()), default=0)

    resumed_at = step()
    if cell.moment == START:
        bad.begin.set()
    process = place.begin(bucket)
    try:
        until(lambda: step() > resumed_at + 10, "new snapshots", START_S, of=process)
        if cell.moment != AMID:
            bad.begin.set()
            until(lambda: bad.met, "the request", of=process)
        began_at, began_s = step(), time.monotonic()
        bad.begin.set()
        process.send_signal(signal.SIGTERM)
        found.code, found.text = said_of(process, GRACE_S + 30.0)
        found.took_s, found.committed = time.monotonic() - began_s, step() - began_at
        if found.code != DRAINED or found.took_s > GRACE_S or found.committed <= 0:
            found.why = "not committed and left within the grace"
        elif not bad.met and cell.call:
            found.why = "this request was not made"
    except AssertionError as e:
        found.why = str(e)
    finally:
        bad.end.set()
        process.kill()
        found.met = bad.met
    return found


def played(place: Place, cells: list[Cell], name: str) -> list[Lived]:
    """Play the cells, some at a time, and print a row for each."""
    pool, lived = ThreadPoolExecutor(AT_ONCE), []
    try:
        for one in pool.map(lambda i: live(place, cells[i], f"{name}{i}"), range(len(cells))):
            lived.append(one)
            print(one.row, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return lived


@pytest.mark.timeout(7200 if os.environ.get("HARNESS_HEAVY") else 300)
def test_a_notice_is_answered_though_a_request_is_answered_badly(place: Place):
    cells = ALL if os.environ.get("HARNESS_HEAVY") else RISKIEST
    cells = [one for one in cells if str(one).startswith(os.environ.get("GRAY_CELLS", ""))]
    assert cells, f"no cell's name begins with {os.environ['GRAY_CELLS']!r}, such as {ALL[0]}"
    failed = [one for one in played(place, cells, "cell") if one.why]
    assert not failed, "\n\n".join(f"{one.row}\n{one.why}\n{one.text}" for one in failed)


@pytest.mark.parametrize("call", ["", "PUT snapshots/parts", "PUT snapshots/manifests"])
def test_a_node_without_a_way_to_the_bucket_says_so_and_leaves_in_time(place: Place, call: str):
    bucket = f"shut{len(call)}"
    bad = Misbehaviour("hang", Call(*call.split(" ")) if call else None, every=True)
    place.gateway.of[bucket] = bad
    snapshots = Snapshots(place.copied(bucket))
    first, process = snapshots.latest(), place.begin(bucket, "--grace-s", SHORT_S)
    assert first is not None
    try:
        until(lambda: snapshots.refs()[0] > first.ref, "a new snapshot", START_S, of=process)
        bad.begin.set()
        process.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        late = threading.Timer(5.0, process.kill)
        late.start()
        told = next((line for line in process.stdout if "s after SIGTERM" in line), "")
        late.cancel()
        code, text = said_of(process, SHORT_S + 30.0)
        took_s = time.monotonic() - told_s
        print(f"{call or 'any call'}: left after {took_s:.1f} s\n{text}")
    finally:
        bad.end.set()
        process.kill()
    assert "a snapshot is on its way (workers at step" in told
    assert told.rstrip().endswith("is committed" if call else "the bucket is silent")
    assert code == DRAINED and took_s <= SHORT_S, text
    assert "the deadline of signal:SIGTERM is here: a snapshot is on its way and may" in text


def test_every_call_of_a_node_is_in_the_matrix(place: Place):
    """A kind of request that is new in the code belongs into MOMENTS."""
    assert not live(place, Cell(AMID, "hang", Call("no", "call")), "calm").code - DRAINED
    made = {call for _, bucket, call in place.gateway.seen if bucket == "calm"}
    assert made <= {c.call for c in ALL}
