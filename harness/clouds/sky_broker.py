"""The broker, the process that calls SkyPilot, and its client, which starts it and sends requests,
one JSON object per line; answers come back the same way.

It is a process of its own because `import sky` costs seconds and hundreds of MB, because SkyPilot's
calls cannot be cancelled (a process can be killed), and because it patches the optimizer to use the
clouds that the API server has enabled; that patch must not leak. It knows nothing of runs, attempts
or policies, and decides nothing: `verdict` says what an error means.

    {"id": 1, "method": "clusters", "arguments": {...}}  ->  {"id": 1, "result": ...}
                                                         or  {"id": 1, "error": {"type", "message",
                                                         "history": [{"type", "message"}]}}

Calls run in threads, so that a slow one does not block others. The process ends when its input
ends, which is when its parent ends.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

import yaml

from harness.clouds import azure_prices, cloud_machines, gcp_prices, sky_private
from harness.clouds.price_api import price_changes
from harness.core.masking import keep_secrets
from harness.core.world import CloudUnavailable, HarnessError

ACTIVE = ("PENDING", "RUNNING", "WAITING")  # states of an API server's request that has not ended
# variable of a cluster's task with its attempt and offer; later controllers adopt clusters by it
NODE_ENV = "HARNESS_NODE"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def sky(module: str = "") -> Any:
    return importlib.import_module(f"sky.{module}" if module else "sky")


def _bare(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a task that the optimizer needs. It is a copy, because SkyPilot modifies
    its input."""
    kept = {k: v for k, v in config.items() if k in ("name", "resources", "num_nodes", "config")}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]


def without_colours(text: object) -> str:
    """Return the text without SkyPilot's colour codes."""
    return COLOURS.sub("", str(text)).strip()


# why two clusters at an offer do not reach each other, and what to do
CONFIG = "in ~/.sky/config.yaml, or under `config:` in the task file"
OWN_VNET = (
    "SkyPilot makes a VNet for each Azure cluster; name one that has a subnet in the region: "
    f"`azure: {{vpc_name: NAME}}` {CONFIG}"
)
OWN_GROUP = (
    "SkyPilot makes a security group for each AWS cluster that opens `ports`; leave `ports` out, "
    "or name one group whose members may reach each other: `aws: {security_group_name: NAME}` "
    f"{CONFIG}"
)
NO_LINKS = (
    "SkyPilot connects no two nodes on {}, where a node lies behind NAT or without an address of "
    "its own; name other clouds in `resources`"
)


class Calls:
    """The calls that the broker answers: each public method is one. Arguments and results are
    JSON."""

    def __init__(self) -> None:
        # the optimizer's context (Dag) and our patch are global
        self._optimizing = threading.Lock()

    # -- offers --
    def enabled(self) -> list[str]:
        """Return the names of the clouds that the API server may use. A server that has not checked
        its clouds yet does it now, as a `launch` would."""
        sdk = sky("client.sdk")
        found = sdk.get(sdk.enabled_clouds())
        if not found:
            self.check()
            found = sdk.get(sdk.enabled_clouds())
        return sorted(str(name).lower() for name in found)

    def offers(
        self, config: dict[str, Any], clouds: Sequence[str] | None = None, on_demand: bool = False
    ) -> list[dict[str, Any]]:
        """Return all places where SkyPilot could put one member of this task, cheapest first.

        `clouds`: `None` means those that the API server has enabled. `on_demand`: include the
        on-demand offer of each place. Raises LookupError with SkyPilot's hints if there is none.
        """
        names = self.enabled() if clouds is None else list(clouds)
        with self._optimizing:
            return self._offers(config, names, bare=clouds is not None, on_demand=on_demand)

    def best(self, config: dict[str, Any], clouds: Sequence[str]) -> dict[str, Any] | None:
        """Return the offer that SkyPilot's optimizer would choose; `None` if it has no price."""
        self.offers(config, clouds)
        with self._optimizing, sky("dag").Dag() as dag:
            sky("task").Task.from_yaml_config(_bare(config))
            chosen = sky("optimizer").Optimizer.optimize(dag, quiet=True).tasks[0]
        return self._offer(chosen.best_resources, chosen.num_nodes)

    def _offers(
        self, config: dict[str, Any], names: Sequence[str], bare: bool, on_demand: bool
    ) -> list[dict[str, Any]]:
        sky_private.enable_clouds(names)  # this process uses the optimizer for nothing else
        if bare:  # planning without accounts
            sky_private.keep_catalog_zones()
        task = sky("task").Task.from_yaml_config(_bare(config))
        launchable, hints = sky_private.launchable(task)
        if on_demand:  # asked anew: a cloud without spot capacity is among the answers
            plain = [r.copy(use_spot=False) for r in task.resources]
            task.set_resources(type(task.resources)(plain))
            more, hints = sky_private.launchable(task)
            launchable |= more
        answers = {a["name"]: a for r in launchable if (a := self._offer(r, task.num_nodes))}
        if not answers and hints:
            raise LookupError("; ".join(sorted({without_colours(hint) for hint in hints})))
        return sorted(answers.values(), key=lambda a: (a["usd_per_h"], a["name"]))

    @staticmethod
    def _offer(resources: Any, num_nodes: int) -> dict[str, Any] | None:
        cloud = str(resources.cloud).lower()
        try:
            usd = float(resources.get_cost(3600)) * num_nodes
        except (ValueError, AssertionError):
            # without a price in the catalog it can be neither ranked nor budgeted
            return None
        try:
            on_demand_usd = float(resources.copy(use_spot=False).get_cost(3600)) * num_nodes
        except (ValueError, AssertionError):
            on_demand_usd = 0.0
        accelerator, count = next(iter((resources.accelerators or {"cpu": 0}).items()))
        place = "/".join(p for p in (cloud, resources.region) if p)
        where = "/".join(p for p in (place, resources.zone, resources.instance_type) if p)
        return {
            "name": where if resources.use_spot else f"{where}/on-demand",
            "place": place,
            "usd_per_h": usd,
            "on_demand_usd_per_h": on_demand_usd,
            "spot": bool(resources.use_spot),
            "accelerator": str(accelerator),
            "gpus": int(count * num_nodes),
            "resources": resources.to_yaml_config(),
            "apart": Calls._apart(cloud, resources),
        }

    @staticmethod
    def _apart(cloud: str, resources: Any) -> str:
        """Return why two clusters at this offer would not reach each other, and the remedy; "" if
        they do as far as SkyPilot's configuration tells (firewalls of the person's own and
        Kubernetes' NetworkPolicies are not known here)."""

        def named(key: str) -> Any:
            return sky("skypilot_config").get_effective_region_config(
                cloud=cloud,
                region=resources.region,
                keys=(key,),
                default_value=None,
                override_configs=resources.cluster_config_overrides,
            )

        if cloud == "azure" and not named("vpc_name"):
            return OWN_VNET
        if cloud == "aws" and resources.ports and not named("security_group_name"):
            return OWN_GROUP
        linked = sky("clouds").CloudImplementationFeatures.MULTI_NODE
        try:
            resources.cloud.check_features_are_supported(resources, {linked}, resources.region)
        except sky("exceptions").NotSupportedError:
            return NO_LINKS.format(resources.cloud)
        return ""

    # -- clusters --
    def launch(
        self,
        name: str,
        config: dict[str, Any],
        secrets: dict[str, str],
        idle_minutes: int | None = None,
    ) -> str:
        """Request a cluster and return the request's id as soon as the API server has it.
        `idle_minutes`: end the cluster after this long without a job; `None` means never."""
        # The server stores the task as given here, so a cluster's envs can be read later. Overrides
        # are not shown.
        task = sky("task").Task.from_yaml_config(config, secrets_overrides=list(secrets.items()))
        more = (
            {} if idle_minutes is None else {"idle_minutes_to_autostop": idle_minutes, "down": True}
        )
        return str(sky("client.sdk").launch(task, cluster_name=name, **more))

    def requests(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the state of each request: PENDING, RUNNING, WAITING, SUCCEEDED, FAILED or
        CANCELLED. Unknown requests are left out."""
        if not ids:
            return {}
        found = sky("client.sdk").api_status(request_ids=list(ids), fields=["request_id", "status"])
        return {r.request_id: str(r.status) for r in found}

    def outcome(self, id: str) -> None:
        """Wait for a request to end, and raise what it raised."""
        sdk = sky("client.sdk")
        sdk.get(id)

    def launching(self, name: str) -> str | None:
        """Return the id of a launch of this cluster that the API server is still working on, or
        `None`."""
        for request in sky("client.sdk").api_status(cluster_name=name, limit=50):
            if (
                request.cluster_name == name
                and request.name.endswith("launch")
                and request.status in ACTIVE
            ):
                return str(request.request_id)
        return None

    def clusters(self, prefix: str, refresh: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the API server's records of the clusters whose names begin with `prefix`. For
        those in `refresh` the cloud itself is asked.

        A status that was not refreshed may be stale: a preempted cluster stays UP there. A
        refreshed cluster that the cloud no longer knows is left out.
        """
        sdk, modes = sky("client.sdk"), sky("utils.common").StatusRefreshMode
        records = {r.name: r for r in sdk.get(sdk.status()) if r.name.startswith(prefix)}
        asked = [name for name in refresh if name in records]
        if asked:
            fresh = {r.name: r for r in sdk.get(sdk.status(asked, refresh=modes.FORCE))}
            records = {
                n: fresh.get(n, r) for n, r in records.items() if n not in asked or n in fresh
            }
        return [self._cluster(r) for r in records.values()]

    @staticmethod
    def _cluster(record: Any) -> dict[str, Any]:
        envs: dict[str, Any] = {}
        if record.last_creation_yaml:
            made_from = yaml.safe_load(record.last_creation_yaml)
            envs = (made_from.get("envs") or {}) if isinstance(made_from, dict) else {}
        return {
            "name": record.name,
            "status": record.status.value,
            "launched_at": record.launched_at,
            "ever_up": bool(record.cluster_ever_up),
            "unhealthy": record.init_kind == "unhealthy",
            "why": without_colours(record.init_status_reason or ""),
            "node": envs.get(NODE_ENV),
            "run": envs.get("RUN"),
            "resources": record.resources_str or "",
            "user": record.user_name,
            "autostop": record.autostop if record.to_down else -1,
            "managed": bool(record.is_managed),
        }

    def job(self, name: str) -> str | None:
        """Return the state of the newest job of a cluster; `None` if it has none yet."""
        sdk = sky("client.sdk")
        states = list(sdk.get(sdk.job_status(name)).values())
        return states[-1].value if states and states[-1] is not None else None

    def tail(self, name: str, lines: int) -> str:
        """Return the last lines that the newest job of a cluster has written."""
        out = io.StringIO()
        sky("client.sdk").tail_logs(name, None, follow=False, tail=lines, output_stream=out)
        return without_colours(out.getvalue())

    def down(self, name: str) -> str:
        return str(sky("client.sdk").down(name))

    def cancel(self, id: str) -> None:
        sdk = sky("client.sdk")
        sdk.get(sdk.api_cancel(id))

    def costs(self, prefix: str, days: int = 30) -> list[dict[str, Any]]:
        """Return SkyPilot's own bill of the clusters whose names begin with `prefix`: running time
        in seconds, cost in USD."""
        rows = self._billed(days)
        return [row for row in rows if str(row["name"] or "").startswith(prefix)]

    def spans(self, names: Sequence[str], days: int) -> list[dict[str, Any]]:
        """Return the bills of all clusters that ever had these names. `usage_intervals`: when each
        was billed, as (begin, end) in seconds since 1970; an end of `None` means it still is."""
        return [row for row in self._billed(days) if row["name"] in names]

    @staticmethod
    def _billed(days: int) -> list[dict[str, Any]]:
        sdk = sky("client.sdk")
        rows = [
            r if isinstance(r, dict) else r.model_dump()
            for r in sdk.get(sdk.cost_report(days=days))
        ]
        wanted = ("name", "duration", "total_cost", "launched_at", "num_nodes", "usage_intervals")
        return [{k: row.get(k) for k in wanted} for row in rows]

    # -- the market --
    def spot_prices(
        self, region: str, instances: Sequence[str], since_s: float, now_s: float
    ) -> list[dict[str, Any]]:
        """Return AWS's spot price changes of these shapes in a region (`price_api.py`), read with
        the credentials that SkyPilot uses."""
        client = sky("adaptors.aws").client("ec2", region_name=region)
        return price_changes(client, instances, since_s, now_s)

    def azure_evictions(
        self, instances: Sequence[str], regions: Sequence[str], url: str
    ) -> list[dict[str, str]]:
        """Return how often Azure evicts nodes of these shapes (`azure_prices.py`)."""
        return azure_prices.eviction_bands(instances, regions, azure_prices.login()[0], url)

    def gcp_spot_prices(
        self, machines: Sequence[dict[str, Any]], url: str
    ) -> list[tuple[float, float] | None]:
        """Return Google's spot price of each machine (`gcp_prices.py`) as (start in seconds since
        1970, USD per hour), or `None`. `machines`: dicts with `region`, `shape`, `accelerator` and
        `gpus`; cores and memory come from SkyPilot's catalog."""
        made = []
        for machine in machines:
            vcpus, gib = sky("catalog").get_vcpus_mem_from_instance_type(
                machine["shape"], clouds="gcp"
            )
            made.append(gcp_prices.GcpMachine(**machine, vcpus=vcpus or 0.0, memory_gib=gib or 0.0))
        return gcp_prices.spot_usd(made, gcp_prices.login()[0], url)

    # -- machines, as the clouds list them --
    def machines(self) -> dict[str, Any]:
        """Return the machines with SkyPilot's tags of which SkyPilot knows nothing: `found`,
        `Machine` as dicts with `usd_per_h` (None: no price) and `ours` (this user's SkyPilot
        launched it); `silent`: who was not asked, and why."""
        silent: dict[str, str] = {}
        known = self._known({})
        listed = self._listed(silent)
        known |= self._known(silent)  # what was launched meanwhile
        mine = f"-{sky_private.user_hash()}"
        return {
            "silent": silent,
            "found": [
                {**asdict(one), "usd_per_h": self._usd(one), "ours": one.cluster.endswith(mine)}
                for one in listed
                if one.cluster not in known
            ],
        }

    def end_machines(self, clusters: Sequence[str]) -> list[str]:
        """Ask the clouds to end the machines of these clusters, by their names in `machines`;
        what SkyPilot knows is left alone. Return the clusters of which there was a machine."""
        found = [one for one in self.machines()["found"] if one["cluster"] in clusters]
        logins = cloud_machines.logins(sky("adaptors.aws").client)
        for cloud in {one["cloud"] for one in found}:
            _, end = logins[cloud]()
            for one in found:
                if one["cloud"] == cloud:
                    end(one["region"], one["id"], one["cluster"])
        return sorted({one["cluster"] for one in found})

    @staticmethod
    def _known(silent: dict[str, str]) -> set[str]:
        """Return the names, on their clouds, of everybody's clusters, with those of managed jobs,
        pools and services, which their own controllers keep."""
        sdk, jobs, serve = sky("client.sdk"), sky("jobs.client.sdk"), sky("serve.client.sdk")
        names = {r.cluster_name_on_cloud for r in sdk.get(sdk.status(all_users=True))}
        no_controller = contextlib.suppress(sky("exceptions").ClusterNotUpError)
        fields = ["job_id", "status", "cluster_name_on_cloud"]
        with no_controller:
            queue = jobs.queue_v2(False, skip_finished=True, all_users=True, fields=fields)
            names |= {job.cluster_name_on_cloud for job in sdk.get(queue)[0]}
        for what, status in (("pools", jobs.pool_status), ("services", serve.status)):
            try:
                with no_controller:
                    workers = [one for row in sdk.get(status(None)) for one in row["replica_info"]]
                    names |= {getattr(w["handle"], "cluster_name_on_cloud", None) for w in workers}
            except RuntimeError as e:
                silent[what] = without_colours(e)
        return {name for name in names if name}

    def _listed(self, silent: dict[str, str]) -> list[cloud_machines.Machine]:
        """Return what the enabled clouds list."""
        found: list[cloud_machines.Machine] = []
        logins = cloud_machines.logins(sky("adaptors.aws").client)
        for cloud in self.enabled():
            if cloud not in logins:
                silent[cloud] = "its own list is not read"
                continue
            try:
                found += logins[cloud]()[0]()
            except Exception as e:  # three clouds' libraries, each with errors of its own
                silent[cloud] = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        return found

    @staticmethod
    def _usd(machine: cloud_machines.Machine) -> float | None:
        """Return the price per hour in SkyPilot's catalog, `None` if it is not there."""
        zone = machine.zone if machine.spot else ""  # on demand, a region's zones cost the same
        infra = "/".join(p for p in (machine.cloud, machine.region, zone) if p)
        try:
            told = {"instance_type": machine.shape, "use_spot": machine.spot}
            return float(sky().Resources(infra=infra, **told).get_cost(3600))
        except (ValueError, AssertionError):
            return None

    # -- the server --
    def server(self) -> dict[str, Any]:
        """Return the address, status and version of the API server; start a local one if there is
        none."""
        sdk = sky("client.sdk")
        sdk.enabled_clouds()  # any request starts a local server; `api_info` does not
        info = sdk.api_info()
        return {
            "endpoint": str(sky("server.common").get_server_url()),
            "status": str(info.status.value),
            "version": str(info.version),
        }

    def version(self) -> str:
        return str(sky().__version__)

    def check(self, clouds: Sequence[str] | None = None) -> str:
        """Run `sky check`: check the credentials of every cloud and record which ones work. Return
        what it printed."""
        sdk, out = sky("client.sdk"), io.StringIO()
        sdk.stream_and_get(
            sdk.check(tuple(clouds) if clouds else None, verbose=False), output_stream=out
        )
        return without_colours(out.getvalue())


def told(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON. `history`: what each place answered in a failed failover;
    `url`: the address of a failed HTTP request, else ""."""
    history = [*getattr(error, "failover_history", ()), *getattr(error, "reasons", ())]
    return {
        "type": type(error).__name__,
        "message": without_colours(error),
        "url": str(getattr(getattr(error, "request", None), "url", None) or ""),
        "history": [{"type": type(e).__name__, "message": without_colours(e)} for e in history],
    }


def serve(calls: Calls, lines: Iterable[str], answer: io.TextIOBase) -> None:
    """Answer the calls in `lines` until the input ends."""
    writing = threading.Lock()

    def one(request: dict[str, Any]) -> None:
        body: dict[str, Any]
        try:
            body = {"result": getattr(calls, request["method"])(**request["arguments"])}
        except BaseException as e:
            # everything, as SkyPilot raises SystemExit too and the parent must get an answer
            body = {"error": told(e)}
        with writing:
            answer.write(json.dumps({"id": request["id"], **body}) + "\n")
            answer.flush()

    for line in lines:
        threading.Thread(target=one, args=(json.loads(line),), daemon=True).start()


def main() -> None:
    keep_secrets(os.environ)
    # redirect what SkyPilot prints to the log, so that it does not mix with our answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Calls(), sys.stdin, answers)
    os._exit(0)  # threads may hang in a call


if __name__ == "__main__":
    main()


# The client of the broker process, which calls SkyPilot.

CALL_TIMEOUT_S = 60.0  # a call that the API server answers itself
REFRESH_TIMEOUT_S = 120.0  # a call that the API server passes on to clouds
OFFERS_TIMEOUT_S = 180.0  # the first call may download catalogs
JOB_TIMEOUT_S = 45.0  # a call that goes to the node itself, which may be dead
HANGING = 16  # with more unanswered calls than this, the broker process is replaced
# of a launch that failed for unrelated reasons (a worker of the API server died, a connection
# broke)
TRIES = 3
# clouds that support it end a node this long after its job is over, without a controller
IDLE_MINUTES = 10
LOG_LINES = 200  # log lines that are kept of a failed node
JOB_OVER = {
    "SUCCEEDED": 0,
    "FAILED": 1,
    "FAILED_SETUP": 1,
    "FAILED_DRIVER": None,
    "CANCELLED": None,
}
QUOTA = re.compile(
    r"quota|VcpuLimitExceeded|MaxSpotInstanceCountExceeded|LimitExceeded|limit exceeded", re.I
)
CREDENTIALS = re.compile(
    r"NoCredentials|credential|UnauthorizedOperation|AuthFailure|AccessDenied|InvalidClientTokenId|ExpiredToken|PermissionDenied"
    r"|not authorized|authentication|403 Forbidden|401 Unauthorized|NoCloudAccess|is not enabled",
    re.I,
)
NO_CAPACITY_TYPES = {"ResourcesUnavailableError", "KubeAPIUnreachableError"}
BAD_INPUT_TYPES = {
    "ValueError",
    "InvalidClusterNameError",
    "NotSupportedError",
    "InvalidSkyPilotConfigError",
    "StorageSpecError",
    "StorageNameError",
    "StorageSourceError",
    "StorageModeError",
    "StorageBucketCreateError",
    "StorageBucketGetError",
    "UserRequestRejectedByPolicy",
    "PermissionDeniedError",
    "ResourcesMismatchError",
    "KubernetesValidationError",
    "ProvisionPrechecksError",
    "ProvisionUnsupportedError",
    "VolumeNotFoundError",
    "APIVersionMismatchError",
    "GitError",
    "FileNotFoundError",
    "ClusterOwnerIdentityMismatchError",
}
# in the addresses from which SkyPilot downloads catalogs, without its API server
CATALOG = "/skypilot-catalog/"
SERVER_TYPES = {
    "ApiServerConnectionError",
    "ServerTemporarilyUnavailableError",
    "ConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
}


class SkyError(HarnessError):
    """An error that SkyPilot raised. `history`: the error of each place, as (type, message)."""

    def __init__(self, type: str, message: str, history: Sequence[tuple[str, str]] = ()):
        super().__init__(f"{type}: {message}")
        self.type, self.message, self.history = type, message, tuple(history)


def verdict(error: SkyError) -> str:
    """Return what a failed launch means: "no-capacity", "quota", "credentials", "bad-input",
    "setup", or "again" (retry)."""
    words = [(error.type, error.message), *error.history]
    if error.type in NO_CAPACITY_TYPES:
        said = [f"{t}: {m}" for t, m in error.history] or [error.message]
        if all(QUOTA.search(s) for s in said):
            return "quota"
        if all(CREDENTIALS.search(s) for s in said):
            return "credentials"
        return "no-capacity"
    if error.type in ("NoCloudAccessError", "InvalidCloudCredentials", "CloudUserIdentityError"):
        return "credentials"
    if error.type == "CloudError":  # a cloud's own error, wrapped
        for kind, pattern in (("quota", QUOTA), ("credentials", CREDENTIALS)):
            if any(pattern.search(f"{t}: {m}") for t, m in words):
                return kind
        return "again"
    if error.type in BAD_INPUT_TYPES:
        return "bad-input"
    if error.type in ("ClusterSetUpError", "CommandError"):
        return "setup"
    return "again"


class Sky(Protocol):
    """A caller of SkyPilot: calls a method of `Calls` with its arguments. Raises SkyError;
    CloudUnavailable if no answer came within `timeout_s`."""

    def __call__(self, method: str, timeout_s: float, **arguments: Any) -> Any: ...


class Broker:
    """A `Sky` that runs SkyPilot in a process of its own. A process that hangs or dies is replaced;
    its requests go on at the API server."""

    def __init__(self, env: Mapping[str, str], log: str | Path):
        self._env, self._log = (
            {**env, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONUNBUFFERED": "1"},
            Path(log),
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[Any]] = {}
        self._hanging: set[int] = set()  # calls that timed out and are still unanswered
        self._number = 0

    def __call__(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            process = (
                self._process if self._process and self._process.poll() is None else self._start()
            )
            self._number += 1
            number, self._waiting[self._number] = self._number, future
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_read` then fails the call
                process.stdin.write(
                    json.dumps({"id": number, "method": method, "arguments": arguments}) + "\n"
                )
                process.stdin.flush()
        try:
            answer = future.result(timeout_s)
        except TimeoutError:
            with self._lock:
                self._waiting.pop(number, None)
                self._hanging.add(number)
                hopeless = len(self._hanging) > HANGING or method in ("server", "requests")
            if hopeless:
                self._end(process)  # its other calls fail with it, and callers retry them
            raise CloudUnavailable(
                f"SkyPilot did not answer `{method}` within {timeout_s:g} s; see {self._log}"
            ) from None
        if error := answer.get("error"):
            raised = SkyError(
                error["type"],
                error["message"],
                [(h["type"], h["message"]) for h in error["history"]],
            )
            if CATALOG in error.get("url", ""):
                host = urllib.parse.urlsplit(error["url"]).hostname
                hint = (
                    f"is there a way from here to {host}, or a proxy to name (HTTPS_PROXY)? "
                    f"`harness plan` needs no network. See {self._log}"
                )
                raise CloudUnavailable(
                    f"SkyPilot's catalog of prices cannot be downloaded ({raised.type}): {hint}"
                ) from raised
            if raised.type in SERVER_TYPES:
                raise CloudUnavailable(
                    f"SkyPilot's API server does not answer ({raised.message}); try `sky api "
                    "status`"
                ) from raised
            raise raised
        return answer["result"]

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process:
            self._end(process)

    def _start(self) -> subprocess.Popen[str]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.clouds.sky_broker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._env, "PYTHONPATH": _with_us(self._env.get("PYTHONPATH", ""))},
                text=True,
                start_new_session=True,  # so that Ctrl-C at the controller does not reach it
            )
        threading.Thread(
            target=self._read, args=(self._process, self._process.stdout), daemon=True
        ).start()
        return self._process

    def _read(self, process: subprocess.Popen[str], lines: IO[str]) -> None:
        for line in lines:
            body = json.loads(line)
            self._hanging.discard(body["id"])
            if future := self._waiting.pop(body["id"], None):
                future.set_result(body)
        process.wait()
        with self._lock:
            if self._process not in (process, None):
                return  # the waiting calls belong to a successor
            lost, self._waiting = self._waiting, {}
            self._hanging.clear()
        for future in lost.values():
            future.set_exception(
                CloudUnavailable(
                    f"the process that speaks SkyPilot ended ({process.returncode}); see "
                    f"{self._log}"
                )
            )

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()


def _with_us(path: str) -> str:
    """Return PYTHONPATH with this package's folder in front, wherever the controller runs."""
    root = str(Path(__file__).resolve().parent.parent)
    return f"{root}:{path}" if path else root
