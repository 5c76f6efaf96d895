"""Notices of Kubernetes: deletion of our pod, and taints of our node."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.notices.notice import ANSWERLESS, Endpoint, Notice, Polled, log, utc

if TYPE_CHECKING:
    from harness.notices.notice import NoticeParser

# ---- Kubernetes ----------------------------------------------------------------------------------
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
# taint -> (kind, seconds from its timeAdded to the end; None: not known). docs/NOTICES.md says
# which programs add them.
TAINTS: dict[str, tuple[str, float | None]] = {
    "aws-node-termination-handler/spot-itn": ("kill", 120.0),
    "aws-node-termination-handler/asg-lifecycle-termination": ("kill", None),
    "aws-node-termination-handler/scheduled-maintenance": ("maintenance", None),
    "aws-node-termination-handler/rebalance-recommendation": ("soft", None),
    "cloud.google.com/impending-node-termination": ("kill", 25.0),
    "karpenter.sh/disrupted": ("kill", None),
    "karpenter.sh/disruption": ("kill", None),
    "ToBeDeletedByClusterAutoscaler": ("kill", None),
    "DeletionCandidateOfClusterAutoscaler": ("soft", None),
    "node.cloudprovider.kubernetes.io/shutdown": ("kill", None),
}


class KubernetesSource(Polled):
    """Notices from the API server: deletion of our pod, and taints of our node, as far as the
    service account may read them."""

    name = "kubernetes"

    def __init__(
        self,
        endpoint: str,
        pod: str,
        account: Path,
        *,
        pace_s: float = 2.0,  # the API server is shared by the whole cluster
        timeout_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ):
        authority = account / "ca.crt"
        tls = (
            ssl.create_default_context(cafile=str(authority))
            if endpoint.startswith("https") and authority.exists()
            else None
        )
        super().__init__(Endpoint(endpoint, now=now, tls=tls), pace_s, timeout_s)
        self._pod, self._account, self._node = pod, account, ""
        self._forbidden: set[str] = set()
        self._known: dict[str, tuple[Notice, ...]] = {}

    def poll(self) -> Sequence[Notice]:
        try:
            space = (self._account / "namespace").read_text().strip()
            self._learn(f"/api/v1/namespaces/{space}/pods/{self._pod}", self._read_pod)
            if self._node:
                self._learn(f"/api/v1/nodes/{self._node}", node_taints)
        except ANSWERLESS as e:
            self._unheard("", e)
        else:
            self._heard()
        return [notice for notices in self._known.values() for notice in notices]

    def _learn(self, path: str, read: NoticeParser) -> None:
        if path in self._forbidden:
            return
        token = (self._account / "token").read_text().strip()  # the kubelet renews it
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        reply = self._endpoint.request("GET", path, headers, timeout_s=self._timeout_s)
        if reply.status == 403:
            self._forbidden.add(path)
            log.warning(
                "notices: the service account may not read %s; without it only SIGTERM tells", path
            )
            return
        if reply.status != 200:
            raise ValueError(f"{path}: status {reply.status}")
        self._known[path] = self._on_our_clock(read(reply.body), reply.skew_s)

    def _read_pod(self, body: str) -> tuple[Notice, ...]:
        self._node = str(json.loads(body)["spec"].get("nodeName") or "")
        return pod_deletion(body)


def pod_deletion(body: str) -> tuple[Notice, ...]:
    """Return a notice if the pod is being deleted. Its `deletionTimestamp` is the end of the grace
    period."""
    about = json.loads(body)["metadata"]
    at = about.get("deletionTimestamp")
    return (
        (
            Notice(
                "kubernetes",
                "kill",
                f"pod-{about.get('uid', '')}",
                utc(at),
                False,
                "the pod is being deleted",
            ),
        )
        if at
        else ()
    )


def node_taints(body: str) -> tuple[Notice, ...]:
    node = json.loads(body)
    found = []
    for taint in node["spec"].get("taints") or []:
        if taint["key"] in TAINTS:
            kind, lead_s = TAINTS[taint["key"]]
            since = taint.get("timeAdded")
            deadline_s = utc(since) + lead_s if since and lead_s is not None else None
            found.append(
                Notice(
                    "kubernetes",
                    kind,
                    f"taint-{taint['key']}-{since or ''}",
                    deadline_s,
                    True,
                    f"node taint {taint['key']}",
                )
            )
    return tuple(found)
