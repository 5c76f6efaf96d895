"""What a run pays besides nodes: from facts and list prices, and nothing where nothing is paid."""

import dataclasses
from importlib import resources

import pytest

from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    EpochStarted,
    NodeFound,
    NodeMeasured,
    Stamped,
)
from harness.ledger.bill import estimate, prices, transfer_usd
from support.moving_worlds import GB, facts


def test_every_price_has_its_source_and_a_number():
    rows = resources.files("harness.ledger").joinpath("egress.csv").read_text().splitlines()
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




def test_traffic_between_zones_of_a_region_is_billed():
    """By AWS at both ends, by GCP at the sender; by Azure not. Not within a zone."""

    def usd(*zones):
        told = [
            f
            for i, zone in enumerate(zones, 1)
            for f in (
                AttemptIntended(i, {"name": f"{zone}/some-machine", "place": zone.rpartition("/")[0]}),
                AgentStarted(f"m{i}", i),
            )
        ]
        told.append(EpochStarted(1, tuple(f"m{i + 1}" for i in range(len(zones))), len(zones), "start"))
        told += [NodeMeasured(f"m{i + 1}", 100.0, {"net/sent_bytes_per_s": GB / 10}) for i in range(len(zones))]
        stamped = [Stamped(float(t), "w", fact) for t, fact in enumerate(told)]
        return estimate("s3://b/x", iter(stamped), kept=1, seconds=0.0).moved_usd

    assert usd("aws/us-east-1/a", "aws/us-east-1/a") == 0.0
    assert usd("aws/us-east-1/a", "aws/us-east-1/b") == pytest.approx(20 * 0.02)
    assert usd("aws/us-east-1/a", "aws/us-east-1/a", "aws/us-east-1/b") == pytest.approx(20 * 0.02)
    assert usd("gcp/us-central1/a", "gcp/us-central1/b") == pytest.approx(20 * 0.01)
    assert usd("azure/eastus/1", "azure/eastus/2") == 0.0
