"""The machines of SkyPilot as Google and Azure list them, and their end: both answer as they document.
(AWS: tests/cli/test_guard_machines.py.)
"""

from __future__ import annotations

import json
import urllib.parse

import pytest

from harness.clouds import cloud_machines
from harness.core.world import CloudUnavailable
from support.price_pages import serving


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
