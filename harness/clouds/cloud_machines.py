"""The machines that carry SkyPilot's tags, as the clouds themselves list them, and their end.

SkyPilot forgets a machine when its database is lost, or when a launch breaks at the wrong moment;
the cloud goes on billing it. AWS is asked through boto3, which comes with `skypilot[aws]`, Google
and Azure through their REST interfaces, each with the credentials that SkyPilot uses. The broker
calls this (`sky_broker.py`); nothing here decides what is to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

from harness.clouds import azure_prices, gcp_prices
from harness.clouds.price_api import ask_json

CLUSTER_TAG, USER_TAG = "ray-cluster-name", "skypilot-user"  # SkyPilot's, on each of its machines
RUN_TAG = "spotharness-run"  # ours: the URL of the run, on clouds whose tags can hold it
GCP_URL = "https://compute.googleapis.com/compute/v1"
AZURE_URL = "https://management.azure.com"
AZURE_COMPUTE, AZURE_GROUPS = "2024-07-01", "2021-04-01"  # versions of its interfaces
AT_ONCE = 8  # regions of AWS that are asked at the same time
ALIVE = ("pending", "running", "stopping", "stopped")  # states of AWS that are billed


@dataclass(frozen=True)
class Machine:
    """A machine. `id`: what its cloud calls it, as `end` needs it; `cluster`: its cluster's name on
    the cloud; `user`: the login of who launched it; `since_s`: seconds since 1970; `stopped`: only
    its disks are billed; `run`: the URL of its run, "" if no tag says it."""

    cloud: str
    region: str
    zone: str
    id: str
    shape: str
    spot: bool
    since_s: float
    stopped: bool
    cluster: str
    user: str
    run: str


def _machine(
    cloud: str, region: str, tags: Mapping[str, str], began: datetime, **more: Any
) -> Machine:
    return Machine(
        cloud,
        region,
        since_s=began.timestamp(),
        cluster=tags[CLUSTER_TAG],
        user=tags.get(USER_TAG, "?"),
        run=tags.get(RUN_TAG, ""),
        **more,
    )


# ---- AWS -----------------------------------------------------------------------------------------
def aws(client: Callable[..., Any]) -> list[Machine]:
    """Return AWS's machines in all regions that the account has enabled. `client`: SkyPilot's
    maker of boto3's clients; their errors are passed on."""
    answer = client("ec2", region_name="us-east-1").describe_regions()
    regions = [str(one["RegionName"]) for one in answer["Regions"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(itertools.chain(*pool.map(partial(_aws_region, client), regions)))


def _aws_region(client: Callable[..., Any], region: str) -> list[Machine]:
    pages = client("ec2", region_name=region).get_paginator("describe_instances")
    wanted = [
        {"Name": "tag-key", "Values": [CLUSTER_TAG]},
        {"Name": "instance-state-name", "Values": list(ALIVE)},
    ]
    return [
        _machine(
            "aws",
            region,
            {tag["Key"]: tag["Value"] for tag in one["Tags"]},
            one["LaunchTime"],
            zone=one["Placement"]["AvailabilityZone"],
            id=one["InstanceId"],
            shape=one["InstanceType"],
            spot=one.get("InstanceLifecycle") == "spot",
            stopped=one["State"]["Name"] == "stopped",
        )
        for page in pages.paginate(Filters=wanted)
        for reservation in page["Reservations"]
        for one in reservation["Instances"]
    ]


def end_aws(client: Callable[..., Any], region: str, id: str, cluster: str) -> None:
    """Terminate a machine of AWS; its disks go with it, as SkyPilot made them."""
    client("ec2", region_name=region).terminate_instances(InstanceIds=[id])


# ---- Google --------------------------------------------------------------------------------------
def gcp(headers: Mapping[str, str], project: str, url: str = GCP_URL) -> list[Machine]:
    """Return Google's machines in all zones of a project. Raises CloudUnavailable."""
    path = f"{url}/projects/{project}/aggregated/instances"
    asked = {"filter": f"labels.{CLUSTER_TAG}:*", "maxResults": "500"}
    found: list[Machine] = []
    while True:
        page = ask_json(f"{path}?{urlencode(asked)}", headers)
        for zone in page.get("items", {}).values():
            found += [_gcp_machine(project, one) for one in zone.get("instances", ())]
        if not page.get("nextPageToken"):
            return found
        asked["pageToken"] = page["nextPageToken"]


def _gcp_machine(project: str, one: Mapping[str, Any]) -> Machine:
    zone = str(one["zone"]).rpartition("/")[2]
    shape = str(one["machineType"]).rpartition("/")[2]
    if shape.startswith("n1-"):  # its GPUs are no part of the shape, nor of the shape's price
        for gpu in one.get("guestAccelerators", ()):
            shape += "+" + str(gpu["acceleratorType"]).rpartition("/")[2]
    return _machine(
        "gcp",
        zone.rpartition("-")[0],
        one["labels"],
        datetime.fromisoformat(str(one["creationTimestamp"]).replace("Z", "+00:00")),
        zone=zone,
        id=f"projects/{project}/zones/{zone}/instances/{one['name']}",
        shape=shape,
        spot=one.get("scheduling", {}).get("provisioningModel") == "SPOT",
        stopped=one["status"] in ("TERMINATED", "SUSPENDED"),
    )


def end_gcp(
    headers: Mapping[str, str], region: str, id: str, cluster: str, url: str = GCP_URL
) -> None:
    """Delete a machine of Google, with its disks, as SkyPilot made them."""
    ask_json(f"{url}/{id}", headers, method="DELETE")


# ---- Azure ---------------------------------------------------------------------------------------
def azure(headers: Mapping[str, str], subscription: str, url: str = AZURE_URL) -> list[Machine]:
    """Return Azure's machines in a subscription. Raises CloudUnavailable."""
    path = f"{url}/subscriptions/{subscription}/providers/Microsoft.Compute/virtualMachines"
    following = f"{path}?api-version={AZURE_COMPUTE}"
    found: list[Machine] = []
    while following.startswith(url):  # the login goes nowhere else
        page = ask_json(following, headers)
        found += [_azure_machine(o) for o in page["value"] if CLUSTER_TAG in o.get("tags", {})]
        following = page.get("nextLink", "")
    return found


def _azure_machine(one: Mapping[str, Any]) -> Machine:
    about = one["properties"]
    return _machine(
        "azure",
        one["location"],
        one["tags"],
        datetime.fromisoformat(str(about["timeCreated"])[:19] + "+00:00"),
        zone="",
        id=one["id"],
        shape=about["hardwareProfile"]["vmSize"],
        spot=about.get("priority") == "Spot",
        stopped=False,  # the list does not tell
    )


def end_azure(
    headers: Mapping[str, str], region: str, id: str, cluster: str, url: str = AZURE_URL
) -> None:
    """Delete a machine of Azure: with its resource group if that is its cluster's own, as SkyPilot
    does, since its address would be billed on. In a group of the person's own only the machine is
    deleted."""
    group, _, _ = id.partition("/providers/")
    own = group.rpartition("/")[2].lower() == f"{cluster}-{region}".lower()
    path = f"{group}?api-version={AZURE_GROUPS}" if own else f"{id}?api-version={AZURE_COMPUTE}"
    ask_json(f"{url}{path}", headers, method="DELETE")


# ---- all of them ---------------------------------------------------------------------------------
Login = Callable[[], tuple[Callable[[], list[Machine]], Callable[[str, str, str], None]]]


def logins(client: Callable[..., Any]) -> dict[str, Login]:
    """Return, for each cloud whose list is read, what logs in there. It returns two functions: one
    lists the machines; one ends a machine, given its region, its id and its cluster. `client`:
    SkyPilot's maker of boto3's clients. Raises CloudUnavailable."""

    def google() -> Any:
        headers, project = gcp_prices.login()
        return partial(gcp, headers, project), partial(end_gcp, headers)

    def microsoft() -> Any:
        headers, subscription = azure_prices.login()
        return partial(azure, headers, subscription), partial(end_azure, headers)

    return {
        "aws": lambda: (partial(aws, client), partial(end_aws, client)),
        "gcp": google,
        "azure": microsoft,
    }
