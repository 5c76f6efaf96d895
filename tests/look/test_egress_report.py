"""The report tells what is paid besides nodes."""

import dataclasses
import json

import pytest
from rich.console import Console

from harness.core.facts import (
    Stamped,
    StepsTimed,
)
from harness.ledger.bill import data_read, estimate
from harness.look.reports import report, report_rows, summary
from storage.stores.folder_store import MemoryStore
from support.moving_worlds import GB, facts


def test_a_folder_costs_nothing():
    assert estimate("file:///tmp/x", facts("slurm/east"), kept=1, seconds=1e6) is None
    assert summary.summarize(MemoryStore("memory://x", {})).store is None


def test_the_report_tells_it_apart_from_the_bill():
    store = estimate("s3://b/x", facts("aws/us-east-1", "nebius/eu-north1"), kept=1, seconds=3600.0)
    s = dataclasses.replace(summary.summarize(MemoryStore("memory://x", {})), store=store)
    rows = {name: (usd, note) for name, usd, note in report_rows.money_rows(s)}
    assert rows["data between places"][0] == pytest.approx(1.8)
    assert (
        "estimate" in rows["the bucket's storage meanwhile"][1]
        and "aws/us-east-1 to nebius/eu-north1" in rows["data between places"][1]
    )
    assert json.loads(json.dumps(report.to_json(s)))["store"]["moved_usd"] == pytest.approx(1.8)
    report.print_report(s, Console(file=open("/dev/null", "w")))  # noqa: SIM115


def test_what_reading_data_costs_is_told():
    """10 GB of a corpus come from the run's cloud and 5 GB from another one to the second world;
    what came from the node's cache costs nothing."""
    led = facts("aws/us-east-1", "nebius/eu-north1")
    read = {"s3": 10 * GB, "cache": 90 * GB}
    told = [
        StepsTimed(1, 1, 5, {}, read_nbytes=read, read_requests=1_000_000),
        StepsTimed(2, 6, 9, {}, read_nbytes=read, read_requests=1_000_000),
        StepsTimed(2, 10, 12, {}, read_nbytes={"gs": 5 * GB}, read_requests=500_000),
    ]
    led += [Stamped(100.0, "w", fact) for fact in told]
    found = estimate("s3://b/x", led, kept=1, seconds=0.0)
    assert [(m.source, m.target, m.nbytes) for m in found.moved] == [
        ("aws/us-east-1", "nebius/eu-north1", 30 * GB),  # of snapshots 20
        ("gcp", "nebius/eu-north1", 5 * GB),
    ]
    data = data_read(led)
    assert data.nbytes == {"s3": 20 * GB, "cache": 180 * GB, "gs": 5 * GB}
    assert data.requests_usd == pytest.approx(1.0)
    assert data_read(facts("aws/us-east-1")) is None
    s = dataclasses.replace(summary.summarize(MemoryStore("memory://x", {})), data=data)
    (row,) = (row for row in report_rows.money_rows(s) if row[0] == "reading data")
    assert row[1] == pytest.approx(1.0) and "2,500,000 requests" in row[2]
    assert json.loads(json.dumps(report.to_json(s)))["data"]["nbytes"]["cache"] == 180 * GB
