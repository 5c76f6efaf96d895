"""Machines that SkyPilot has forgotten: found in the clouds' own lists, priced, and ended on request;
nobody else's is touched. EC2 is moto, asked by SkyPilot's own clients; Google and Azure answer as
they document.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import urllib.parse

import pytest

from harness.cli import account_commands
from harness.cli.common import DONE, FAILED
from harness.clouds import cloud_machines
from harness.clouds.sky_broker import SkyError
from harness.core.world import BadInput, CloudUnavailable
from support import buckets
from support.account import LIVE, OVER, Account
from support.price_pages import serving
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


# ---- Google and Azure ----------------------------------------------------------------------------
class FakeGoogle:
    """Two pages of the machines of a project, as `instances.aggregatedList` documents them."""

    def __init__(self):
        self.asked, self.deleted = [], []

    def answer(self, method, path, headers, body):
        if headers["Authorization"] != "Bearer good":
            return 401, b'{"error": {"message": "Request had invalid credentials."}}'
        url = urllib.parse.urlsplit(path)
        if method == "DELETE":
            self.deleted.append(url.path)
            return 200, b'{"kind": "compute#operation"}'
        assert url.path == "/projects/p/aggregated/instances"
        ask = dict(urllib.parse.parse_qsl(url.query))
        self.asked.append(ask)
        if "pageToken" not in ask:
            empty = {"warning": {"code": "NO_RESULTS_ON_PAGE"}}
            return 200, json.dumps({"items": {"zones/x": empty}, "nextPageToken": "2"}).encode()
        place = "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a"
        one = {
            "name": "gpt-0001-head",
            "zone": place,
            "machineType": f"{place}/machineTypes/a2-highgpu-1g",
            "guestAccelerators": [{"acceleratorType": f"{place}/acceleratorTypes/nvidia-tesla-a100"}],
            "labels": {"ray-cluster-name": "gpt-0001", "skypilot-user": "ada"},
            "creationTimestamp": "2026-11-27T01:00:00.123-08:00",
            "scheduling": {"provisioningModel": "SPOT"},
            "status": "RUNNING",
        }
        old = {**one, "name": "old", "status": "TERMINATED", "scheduling": {}}
        old |= {
            "machineType": f"{place}/machineTypes/n1-standard-8",
            "guestAccelerators": [{"acceleratorType": f"{place}/acceleratorTypes/nvidia-tesla-t4"}],
        }
        return 200, json.dumps({"items": {"zones/us-central1-a": {"instances": [one, old]}}}).encode()


def test_googles_machines_are_listed_and_deleted():
    headers, fake = {"Authorization": "Bearer good"}, FakeGoogle()
    with serving(fake) as url:
        one, old = cloud_machines.gcp(headers, "p", url)
        cloud_machines.end_gcp(headers, one.region, one.id, one.cluster, url)
        with pytest.raises(CloudUnavailable, match="Request had invalid credentials"):
            cloud_machines.gcp({"Authorization": "Bearer old"}, "p", url)
    assert [ask["filter"] for ask in fake.asked] == ["labels.ray-cluster-name:*"] * 2
    assert (one.region, one.zone, one.shape, one.spot) == (
        "us-central1",
        "us-central1-a",
        "a2-highgpu-1g",
        True,
    )
    assert (one.cluster, one.user, one.since_s, one.stopped) == ("gpt-0001", "ada", 1795770000.123, False)
    # its GPU is no part of that shape's price
    assert (old.shape, old.stopped, old.spot) == ("n1-standard-8+nvidia-tesla-t4", True, False)
    assert fake.deleted == ["/projects/p/zones/us-central1-a/instances/gpt-0001-head"]


class FakeAzure:
    """The machines of a subscription, as `virtualMachines/listAll` documents them."""

    def __init__(self):
        self.deleted, self.elsewhere = [], ""

    def answer(self, method, path, headers, body):
        assert headers["Authorization"] == "Bearer good"
        url = urllib.parse.urlsplit(path)
        if method == "DELETE":
            self.deleted.append(url.path)
            return 202, b""
        assert url.path == "/subscriptions/s/providers/Microsoft.Compute/virtualMachines"
        assert "api-version=2024-07-01" in url.query
        told = {
            "tags": {"ray-cluster-name": "gpt-0001", "skypilot-user": "ada"},
            "location": "eastus",
            "properties": {
                "hardwareProfile": {"vmSize": "Standard_NC24ads_A100_v4"},
                "priority": "Spot",
                "timeCreated": "2026-11-27T09:00:00.1234567+00:00",
            },
        }
        groups = ["GPT-0001-EASTUS", "my-group"]
        vm = "/subscriptions/s/resourceGroups/{}/providers/Microsoft.Compute/virtualMachines/v"
        value = [{**told, "id": vm.format(group)} for group in groups]
        value.append({**told, "tags": {"owner": "eve"}, "id": vm.format("eves")})
        return 200, json.dumps({"value": value, "nextLink": self.elsewhere}).encode()


def test_azures_machines_are_listed_and_deleted_with_a_group_of_their_own():
    headers, fake = {"Authorization": "Bearer good"}, FakeAzure()
    fake.elsewhere = "http://evil.example/next"  # the login is not taken there
    with serving(fake) as url:
        found = cloud_machines.azure(headers, "s", url)
        for one in found:
            cloud_machines.end_azure(headers, one.region, one.id, one.cluster, url)
    assert len(found) == 2 and found[0].since_s == 1795770000.0
    assert (found[0].shape, found[0].spot) == ("Standard_NC24ads_A100_v4", True)
    group = "/subscriptions/s/resourceGroups/"
    assert fake.deleted == [
        f"{group}GPT-0001-EASTUS",
        f"{group}my-group/providers/Microsoft.Compute/virtualMachines/v",
    ]
