"""What a run pays besides nodes: from facts and list prices, and nothing where nothing is paid."""

import dataclasses
import json
from importlib import resources

import pytest
from rich.console import Console

from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    EpochStarted,
    NodeFound,
    SessionStarted,
    SnapshotCommitted,
    Stamped,
    StepsTimed,
)
from harness.core.prices import data_read, estimate, prices, transfer_usd
from harness.views import report, report_json, summary
from storage.files import MemoryStore

GB = 10**9


def facts(*places):
    """A world of two nodes in each place in turn; every one makes a snapshot of 10 GB, and the
    next resumes from it."""
    found, attempt = [], 0
    for epoch, place in enumerate(places, 1):
        members = []
        for _ in range(2):
            attempt += 1
            members.append(f"m{attempt}")
            found.append(AttemptIntended(attempt, {"place": place, "name": f"{place}/x"}, ""))
            found.append(AgentStarted(f"m{attempt}", attempt, "h", 1, "", 1))
        found.append(EpochStarted(epoch, tuple(members), 2, "start"))
        step = 10 * (epoch - 1)
        found.append(
            SessionStarted(epoch, 2, step, epoch - 1, 100, 8, 2, (2, 2), "fast", "ddp", "cpu", 1.0)
        )
        found.append(SnapshotCommitted(step + 10, epoch, 10 * GB, 0.0, 1.0, "interval", 0.0))
    return [Stamped(float(i), "w", f) for i, f in enumerate(found)]


def test_every_price_has_its_source_and_a_number():
    rows = resources.files("harness.core").joinpath("egress.csv").read_text().splitlines()
    assert "2026-11" in rows[0]
    assert all(
        row.count(",") >= 3 and row.split(",", 3)[3].strip()
        for row in rows
        if not row.startswith("#")
    )
    assert prices()["aws", "internet"] == 0.09 and prices()["cloudflare", "internet"] == 0.0


@pytest.mark.parametrize(
    ("source", "target", "usd"),
    [
        ("aws/us-east-1", "aws/us-east-1", 0.0),
        ("aws/us-east-1", "aws/eu-south-2", 0.2),
        ("aws/us-east-1", "nebius/eu-north1", 0.9),
        ("nebius/eu-north1", "aws/us-east-1", 0.0),
        ("cloudflare", "aws/us-east-1", 0.0),
        ("aws", "aws/us-east-1", 0.0),  # region unknown: the same
        ("nobody/x", "aws/y", 0.0),
    ],
)
def test_ten_gigabytes_from_here_to_there(source, target, usd):
    assert transfer_usd(source, target, 10 * GB) == pytest.approx(usd)


def test_a_run_that_stays_pays_for_storage_only():
    found = estimate("s3://b/x", facts("aws/us-east-1", "aws/us-east-1"), kept=3, seconds=86400.0)
    assert (found.stored_nbytes, found.moved) == (30 * GB, ())
    assert found.month_usd == pytest.approx(30 * 0.023) and found.storage_usd == pytest.approx(
        0.023
    )


def test_nodes_that_no_controller_launched_say_themselves_where_they_are():
    led, alone = facts("aws/us-east-1", "nebius/eu-north1"), []
    for s in led:
        if isinstance(s.fact, AttemptIntended):
            cloud, _, region = s.fact.offer["place"].partition("/")
            fact = NodeFound(f"m{s.fact.attempt}", cloud, region)
        else:
            at = isinstance(s.fact, AgentStarted)
            fact = dataclasses.replace(s.fact, attempt=0) if at else s.fact
        alone.append(dataclasses.replace(s, fact=fact))
    known = estimate("s3://b/x", alone, kept=1, seconds=60.0)
    assert known == estimate("s3://b/x", led, kept=1, seconds=60.0)
    assert known.moved


def test_a_move_is_paid_by_where_data_comes_from():
    """The bucket is where the run began: both nodes of the second world read 10 GB from it, and
    write 10 GB to it for nothing."""
    found = estimate("s3://b/x", facts("aws/us-east-1", "nebius/eu-north1"), kept=1, seconds=0.0)
    (way,) = found.moved
    assert (way.source, way.target, way.nbytes) == ("aws/us-east-1", "nebius/eu-north1", 20 * GB)
    assert found.moved_usd == pytest.approx(1.8)
    # a bucket of another cloud: nodes pay to write
    back = estimate("gs://b/x", facts("aws/us-east-1"), kept=1, seconds=0.0)
    assert [(m.source, m.target) for m in back.moved] == [
        ("aws/us-east-1", "gcp")
    ] and back.moved_usd == pytest.approx(0.9)


def test_a_folder_costs_nothing():
    assert estimate("file:///tmp/x", facts("slurm/east"), kept=1, seconds=1e6) is None
    assert summary.summarize(MemoryStore("memory://x", {})).store is None


def test_the_report_tells_it_apart_from_the_bill():
    store = estimate("s3://b/x", facts("aws/us-east-1", "nebius/eu-north1"), kept=1, seconds=3600.0)
    s = dataclasses.replace(summary.summarize(MemoryStore("memory://x", {})), store=store)
    rows = {name: (usd, note) for name, usd, note in report.money_rows(s)}
    assert rows["data between places"][0] == pytest.approx(1.8)
    assert (
        "estimate" in rows["the bucket's storage meanwhile"][1]
        and "aws/us-east-1 to nebius/eu-north1" in rows["data between places"][1]
    )
    assert json.loads(json.dumps(report_json.to_json(s)))["store"]["moved_usd"] == pytest.approx(1.8)
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
    (row,) = (row for row in report.money_rows(s) if row[0] == "reading data")
    assert row[1] == pytest.approx(1.0) and "2,500,000 requests" in row[2]
    assert json.loads(json.dumps(report_json.to_json(s)))["data"]["nbytes"]["cache"] == 180 * GB
