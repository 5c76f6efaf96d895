"""`harness guard` and machines that SkyPilot has forgotten: found in the cloud's own list, priced, and
ended on request; nobody else's is touched. EC2 is moto, asked by SkyPilot's own clients.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from harness.cli import account_commands
from harness.cli.common import DONE, FAILED
from harness.clouds import cloud_machines
from harness.clouds.sky_broker import SkyError
from harness.core.world import BadInput
from support import buckets
from support.account import LIVE, OVER, Account
from support.rooms import ROOT
from support.sky_catalog import CATALOG, SECONDS

MINE, THEIRS = "0123abcd", "ffff0000"  # hashes of SkyPilot's users
# the calls of the broker; only its questions to an API server are answered here
BROKER = """
import sys
from harness.clouds import sky_broker

class Calls(sky_broker.Calls):
    def enabled(self):
        return ["aws", "gcp", "lambda"]

    @staticmethod
    def _known(silent):
        return {"known-0001-0123abcd"}

sky_broker.serve(Calls(), sys.stdin, sys.stdout)
"""


class Beside(Account):
    """An account without a cluster at SkyPilot, whose machines are asked of a true broker."""

    def __init__(self, process: subprocess.Popen[str]):
        super().__init__()
        self.process = process

    def _ask(self, method: str, **arguments: object) -> object:
        request = {"id": 1, "method": method, "arguments": arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        # SkyPilot prints to the same stream
        line = next(line for line in self.process.stdout if line.startswith('{"id"'))
        answer = json.loads(line)
        if "error" in answer:
            raise SkyError(answer["error"]["type"], answer["error"]["message"])
        return answer["result"]

    def machines(self):
        return self._ask("machines")

    def end_machines(self, clusters):
        return self._ask("end_machines", clusters=clusters)


def two_regions(inner):
    """EC2 for an account that has enabled two regions; moto has them all, and takes its time."""
    item = "<item><regionName>{0}</regionName><regionEndpoint>ec2.{0}</regionEndpoint></item>"
    regions = "".join(item.format(one) for one in ("us-east-1", "us-west-2"))
    told = f"<DescribeRegionsResponse><regionInfo>{regions}</regionInfo></DescribeRegionsResponse>"

    def app(environ, start_response):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if b"Action=DescribeRegions" in body:
            start_response("200 OK", [("Content-Type", "text/xml")])
            return [told.encode()]
        return inner({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    return app


@pytest.fixture(scope="module")
def ec2():
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("moto.server")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    with buckets.moto(around=two_regions) as url:
        yield url, lambda region: boto3.client("ec2", region, endpoint_url=url, **keys)


@pytest.fixture
def sky(ec2, tmp_path):
    if importlib.util.find_spec("sky") is None:
        pytest.skip("SkyPilot is not installed")
    shutil.copytree(CATALOG, tmp_path / ".sky" / "catalogs" / "v8")
    (tmp_path / ".sky" / "user_hash").write_text(MINE)
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env |= {"AWS_ENDPOINT_URL": ec2[0], "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    env["AWS_DEFAULT_REGION"] = "us-east-1"
    env["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "none.json")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(tmp_path / "broker.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", BROKER],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    yield Beside(process)
    process.stdin.close()
    process.kill()
    process.wait(timeout=SECONDS)


def plant(client, count, zone, spot, **tags):
    """Start machines that carry these tags."""
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    told = [{"Key": key, "Value": value} for key, value in tags.items()]
    started = client.run_instances(
        ImageId="ami-12345678",
        MinCount=count,
        MaxCount=count,
        InstanceType="p5.48xlarge",
        Placement={"AvailabilityZone": zone},
        TagSpecifications=[{"ResourceType": "instance", "Tags": told}],
        **market,
    )
    return [one["InstanceId"] for one in started["Instances"]]


def states(client, ids):
    found = client.describe_instances(InstanceIds=ids)["Reservations"]
    return {one["State"]["Name"] for r in found for one in r["Instances"]}


@pytest.fixture
def planted(ec2):
    """Machines of every kind, by what they are: (client of their region, ids)."""
    east, west = ec2[1]("us-east-1"), ec2[1]("us-west-2")

    def of(cluster, **more):
        return {"ray-cluster-name": cluster, "skypilot-user": "ada", **more}

    ours = of(f"gpt-0001-{MINE}", **{cloud_machines.RUN_TAG: OVER})
    made = {
        "over": (east, plant(east, 1, "us-east-1a", True, **ours)),
        "gang": (west, plant(west, 2, "us-west-2a", False, **of(f"gang-{MINE}"))),
        "known": (east, plant(east, 1, "us-east-1a", True, **of(f"known-0001-{MINE}"))),
        "theirs": (east, plant(east, 1, "us-east-1a", True, **of(f"other-{THEIRS}"))),
        "by hand": (east, plant(east, 1, "us-east-1a", False, Name="by hand")),
    }
    yield made
    for client, ids in made.values():
        client.terminate_instances(InstanceIds=ids)


@pytest.mark.proof
def test_a_forgotten_machine_is_found_priced_and_ended(sky, planted, monkeypatch, capsys):
    monkeypatch.setattr(account_commands, "sky_broker", lambda url: sky)
    monkeypatch.setattr(account_commands, "_has_ended", {OVER: True, LIVE: False}.get)

    def guard(**flags):
        return account_commands.guard(account_commands.GuardFlags(**flags))

    def alive():
        return {what for what, at in planted.items() if "running" in states(*at)}

    assert guard() == FAILED
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines() if " " in line}
    # the price of that zone in SkyPilot's catalog, whose name there this account's maps to
    assert rows[f"gpt-0001-{MINE}"][1:5] == ["ada", "0.0", "17.63", "?"]
    assert rows[f"gang-{MINE}"][3] == "110.08"  # two, on demand
    (over,) = planted["over"][1]
    where = f"(1x p5.48xlarge[spot] aws/us-east-1a: {over}): its run is over; run {OVER}"
    assert f"FORGOTTEN: gpt-0001-{MINE} {where}" in said
    assert f"UNKNOWN: gang-{MINE} (2x p5.48xlarge aws/us-west-2a: i-" in said
    assert f"SOMEONE ELSE'S: other-{THEIRS}" in said
    assert "known-0001" not in said and "by hand" not in said
    assert "Not asked: lambda: its own list is not read" in said
    assert "Not asked: gcp: " in said and "none.json" in said

    with pytest.raises(BadInput, match="found by hand"):
        guard(end="by hand")
    assert guard(end_idle=True) == DONE
    assert f"Ended: gpt-0001-{MINE}." in capsys.readouterr().out
    assert alive() == {"gang", "known", "theirs", "by hand"}
    assert states(*planted["over"]) == {"terminated"}
    assert guard(end=f"gang-{MINE}") == DONE
    assert alive() == {"known", "theirs", "by hand"}
    assert guard() == DONE  # what is left is not ours
    assert guard(end=f"other-{THEIRS}") == DONE  # by name
    assert alive() == {"known", "by hand"}


def test_what_skypilot_knows_is_not_ended_even_by_its_name(sky, planted):
    assert sky.end_machines([f"known-0001-{MINE}", "by hand"]) == []
    assert states(*planted["known"]) == states(*planted["by hand"]) == {"running"}
