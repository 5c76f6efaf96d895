"""Every cloud's source against its fake and against what clouds really send: appear, change,
vanish; slow, wrong, silent, restarted."""

import json
from contextlib import closing

import pytest

from harness.core.world import BadInput
from harness.notices import aws, kubernetes
from harness.notices.aws import AwsSource, interruption, maintenance, rebalance
from harness.notices.azure import azure_events
from harness.notices.kubernetes import ACCOUNT, node_taints, pod_deletion
from harness.notices.notice import Notice, utc
from harness.notices.sources import (
    LimitSource,
    detect,
    moment,
    parse_duration,
    places,
    sigterm_s,
)
from support.notice_services import (
    POD,
    SOON_S,
    ApiServer,
)

# ---- every source with its fake, beyond the contract (test_contracts.py) -------------------------


# ---- AWS -----------------------------------------------------------------------------------------
def test_what_ec2_sends():
    action = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    (notice,) = interruption(action)
    assert (notice.kind, notice.deadline_s) == ("kill", utc("2017-09-18T08:22:00Z"))
    assert (
        interruption(action)[0].id
        == notice.id
        != interruption(action.replace("terminate", "stop"))[0].id
    )
    assert [n.deadline_s for n in rebalance('{"noticeTime":"2020-10-27T08:22:00Z"}')] == [None]
    event = {
        "NotBefore": "21 Jan 2019 09:00:43 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "NotAfter": "21 Jan 2019 09:17:23 GMT",
        "State": "active",
    }
    (notice,) = maintenance(
        json.dumps(
            [
                event,
                event | {"EventId": "b", "State": "completed"},
                event | {"EventId": "c", "State": "canceled"},
            ]
        )
    )
    assert (notice.id, notice.deadline_s) == (event["EventId"], utc("2019-01-21T09:00:43Z"))


# ---- GCP -----------------------------------------------------------------------------------------


# ---- Azure ---------------------------------------------------------------------------------------
DOCUMENT = {  # after the shape in Azure's documentation
    "DocumentIncarnation": 2,
    "Events": [
        {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": ["vmss_vm1"],
            "EventStatus": "Scheduled",
            "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        },
    ],
}


def test_what_azure_sends():
    event = DOCUMENT["Events"][0]
    (notice,) = azure_events(DOCUMENT, "VMSS_vm1")
    assert (notice.kind, notice.id, notice.deadline_s) == (
        "kill",
        event["EventId"],
        utc("2022-04-11T22:26:58Z"),
    )
    assert (notice.scope, notice.acknowledge, notice.cancellable) == ("self", True, True)
    assert azure_events(DOCUMENT, "vmss_vm2") == ()  # the document names machines of the whole set
    assert len(azure_events(DOCUMENT, "")) == 1  # whose name it is we do not know: ours, to be safe
    assert not azure_events(DOCUMENT, "")[0].acknowledge

    def read(name, speaks_for_all=False, **changes):
        (found,) = azure_events({"Events": [event | changes]}, name, speaks_for_all)
        return found

    two = ["vmss_vm1", "vmss_vm2"]
    assert [read(n, Resources=two).acknowledge for n in two] == [False, False]
    assert [read(n, True, Resources=two).acknowledge for n in two] == [True, False]
    assert read(two[0], Resources=two).scope == "others"
    kinds = {
        t: read("vmss_vm1", EventType=t).kind
        for t in ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze", "News")
    }
    assert list(kinds.values()) == ["kill", "kill", "maintenance", "maintenance", "soft", "soft"]
    freeze = read("vmss_vm1", EventType="Freeze")
    assert (freeze.pause, freeze.acknowledge, freeze.deadline_s) == (True, False, None)
    assert read("vmss_vm1", NotBefore="", EventStatus="Started").deadline_s is None


# ---- Kubernetes ----------------------------------------------------------------------------------


def test_what_the_service_account_may_not_read_is_asked_once(tmp_path):
    with closing(ApiServer(tmp_path)) as api:
        api.refused = {"/api/v1/nodes/gpu-1"}
        for _ in range(4):
            assert api.source.poll() == []
        assert api.asked.count("/api/v1/nodes/gpu-1") == 1
        assert api.asked.count("/api/v1/namespaces/team-a/pods/trainer-0") == 4
        (tmp_path / ACCOUNT / "token").unlink()
        assert api.source.poll() == []
        assert api.source.errors == 1


def test_taints_and_deletions_from_documents():
    assert pod_deletion(json.dumps(POD)) == ()
    kinds = {
        k: node_taints(json.dumps({"spec": {"taints": [{"key": k}]}}))[0].kind
        for k in kubernetes.TAINTS
    }
    assert kinds["karpenter.sh/disrupted"] == kinds["ToBeDeletedByClusterAutoscaler"] == "kill"
    assert kinds["aws-node-termination-handler/rebalance-recommendation"] == "soft"
    assert node_taints('{"spec": {"taints": null}}') == ()


# ---- Mithril, limits -----------------------------------------------------------------------------


def test_ends_that_are_known_from_the_start(tmp_path):
    (slurm,) = detect({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1900000000"}, tmp_path)
    assert slurm.poll() == [
        Notice("slurm", "maintenance", "slurm-1900000000", SOON_S, False, "the time is up then")
    ]
    (limit,) = detect({"HARNESS_CAPACITY_END": "2030-03-17T17:46:40Z"}, tmp_path)
    assert [n.deadline_s for n in limit.poll()] == [SOON_S]
    assert LimitSource("limit", moment("1900000000")).poll() == limit.poll()
    assert [parse_duration(t) for t in ("90", "90s", "30m", "1.5h", "7d")] == [90, 90, 1800, 5400, 604800]
    for bad in ("soon", "", "3 weeks", "-1"):
        with pytest.raises(BadInput, match="wanted"):
            parse_duration(bad)
    with pytest.raises(BadInput, match="wanted"):
        moment("tomorrow")


# ---- where we are --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "env", "found", "grace_s"),
    [
        ({"sys/class/dmi/id/sys_vendor": "Amazon EC2"}, {}, ["aws"], 30),
        ({"sys/class/dmi/id/product_name": "Google Compute Engine"}, {}, ["gcp"], 25),
        (
            {"sys/class/dmi/id/product_name": "Google Compute Engine"},
            {"HARNESS_NODE_DIR": "x"},
            ["file"],
            30,
        ),
        (
            {"sys/class/dmi/id/chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            {},
            ["azure"],
            30,
        ),
        (
            {"sys/class/dmi/id/sys_vendor": "Google", "sys/class/dmi/id/product_name": "Pixelbook"},
            {},
            [],
            30,
        ),
        ({"sys/class/dmi/id/sys_vendor": "Nebius"}, {}, ["nebius"], 60),
        ({"opt/mithril/README": ""}, {}, ["mithril"], 30),
        ({}, {"RUNPOD_POD_ID": "abc"}, ["runpod"], 5),
        ({}, {"SLURM_JOB_ID": "7"}, ["slurm"], 30),
        (
            {"sys/class/dmi/id/product_name": "Google Compute Engine", f"{ACCOUNT}/token": "t"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "trainer-0"},
            ["kubernetes", "gcp"],
            25,
        ),
        ({}, {}, [], 30),
    ],
)
def test_a_machine_says_where_it_is(tmp_path, files, env, found, grace_s):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert places(env, tmp_path) == found
    assert sigterm_s(env, tmp_path) == grace_s
    assert {s.name for s in detect(env, tmp_path)} <= set(found)


def test_what_is_asked_for_by_name_is_not_doubted(tmp_path):
    assert [s.name for s in detect({}, tmp_path, "aws, gcp")] == ["aws", "gcp", "gcp"]
    assert (
        detect(
            {"RUNPOD_POD_ID": "x", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"},
            tmp_path,
            "none",
        )
        == []
    )
    with pytest.raises(BadInput, match="tencent is not known; wanted a list of file"):
        detect({}, tmp_path, "aws,tencent")
    with pytest.raises(BadInput, match="wanted http"):
        AwsSource("169.254.169.254")
    for base, host in ((aws.AWS_V6, "fd00:ec2::254"), (aws.AWS_V4, "169.254.169.254")):
        assert AwsSource(base)._endpoint._host == host


# ---- the command ---------------------------------------------------------------------------------


