"""The process that speaks SkyPilot. `skypilot.py` starts it and asks it: one JSON object per line
in, one per line out.

A process of its own because `import sky` costs seconds and hundreds of MB, because its calls cannot
be given up (a process can be ended), and because the optimizer is asked here about clouds that the
API server has enabled, by a patch that must not leak. It knows nothing of runs, attempts or
policies. It decides nothing: what an error means is for `skypilot.py` to say.

    {"id": 1, "method": "clusters", "arguments": {...}}  ->  {"id": 1, "result": ...}
                                                         or  {"id": 1, "error": {"type", "message",
                                                         "history": [{"type", "message"}]}}

Calls run in threads, so that a slow one holds up no other. It ends when its input ends, which is
when its parent does.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from harness.clouds import azure_prices, gcp_prices
from harness.clouds.aws_prices import price_changes
from harness.core.last_words import keep_secrets

ACTIVE = ("PENDING", "RUNNING", "WAITING")  # states of an API server's request that has not ended
# in a cluster's task: who launched it, as what; how a later controller knows its clusters
NODE_ENV = "HARNESS_NODE"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def sky(module: str = "") -> Any:
    return importlib.import_module(f"sky.{module}" if module else "sky")


def _bare(config: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer needs of a task; a copy, since SkyPilot changes what it is given."""
    kept = {k: v for k, v in config.items() if k in ("name", "resources", "num_nodes", "config")}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]


def plain(text: object) -> str:
    """SkyPilot colours its messages."""
    return COLOURS.sub("", str(text)).strip()


class Calls:
    """Every method is one call; arguments and results are JSON."""

    def __init__(self) -> None:
        # the optimizer's context (Dag) and our patch are global
        self._optimizing = threading.Lock()

    # -- offers --
    def enabled(self) -> list[str]:
        """Names of the clouds that the API server may use."""
        sdk = sky("client.sdk")
        return sorted(str(name).lower() for name in sdk.get(sdk.enabled_clouds()))

    def offers(
        self, config: dict[str, Any], clouds: Sequence[str] | None = None, on_demand: bool = False
    ) -> list[dict[str, Any]]:
        """Every place where SkyPilot could put one member of this task, cheapest first.

        clouds: None means those that the API server has enabled. on_demand: also what each costs
        when it is not spot.
        """
        names = self.enabled() if clouds is None else list(clouds)
        if not names:  # nobody has asked this server yet; its own `launch` would ask now as well
            self.check()
            names = self.enabled()
        with self._optimizing:
            return self._offers(config, names, bare=clouds is not None, on_demand=on_demand)

    def best(self, config: dict[str, Any], clouds: Sequence[str]) -> dict[str, Any] | None:
        """What SkyPilot's optimizer itself would take."""
        self.offers(config, clouds)
        with self._optimizing, sky("dag").Dag() as dag:
            sky("task").Task.from_yaml_config(_bare(config))
            chosen = sky("optimizer").Optimizer.optimize(dag, quiet=True).tasks[0]
        return self._offer(chosen.best_resources, chosen.num_nodes)

    def _offers(
        self, config: dict[str, Any], names: Sequence[str], bare: bool, on_demand: bool
    ) -> list[dict[str, Any]]:
        registry = sky("utils.registry").CLOUD_REGISTRY
        enabled = [registry.from_str(name) for name in names]
        check = sky("check")
        # this process asks for nothing else
        check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: list(enabled)
        if bare:  # a plan without accounts: AWS's zones keep their catalog names
            sky("catalog.aws_catalog")._get_az_mappings = lambda *_: None
        task = sky("task").Task.from_yaml_config(_bare(config))
        optimizer = sky("optimizer")
        found, _, _, hints = optimizer._fill_in_launchable_resources(task, None, quiet=True)
        launchable = {r for choices in found.values() for r in choices}
        if on_demand:
            also = [r.copy(use_spot=False, zone=None) for r in launchable if r.use_spot]
            launchable |= {r for r in also if not any(r == o for o in launchable)}
        answers = {a["name"]: a for r in launchable if (a := self._offer(r, task.num_nodes))}
        if not answers and hints:
            words = {plain(h) for per in hints.values() for h in per}
            raise LookupError("; ".join(sorted(words)))
        return sorted(answers.values(), key=lambda a: (a["usd_per_h"], a["name"]))

    @staticmethod
    def _offer(resources: Any, num_nodes: int) -> dict[str, Any] | None:
        cloud = str(resources.cloud).lower()
        try:
            usd = float(resources.get_cost(3600)) * num_nodes
        except (ValueError, AssertionError):
            # no price in the catalog: it cannot be ranked, or put under a budget
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
        }

    # -- clusters --
    def launch(
        self,
        name: str,
        config: dict[str, Any],
        secrets: dict[str, str],
        idle_minutes: int | None = None,
    ) -> str:
        """Ask for a cluster; returns the request's id as soon as the API server has it."""
        # The server remembers the file as it is given here, so a cluster's envs can be read later;
        # overrides it would not show.
        task = sky("task").Task.from_yaml_config(config, secrets_overrides=list(secrets.items()))
        more = (
            {} if idle_minutes is None else {"idle_minutes_to_autostop": idle_minutes, "down": True}
        )
        return str(sky("client.sdk").launch(task, cluster_name=name, **more))

    def requests(self, ids: Sequence[str]) -> dict[str, str]:
        """State of each request: PENDING, RUNNING, WAITING, SUCCEEDED, FAILED, CANCELLED; one
        that is unknown is left out."""
        if not ids:
            return {}
        found = sky("client.sdk").api_status(request_ids=list(ids), fields=["request_id", "status"])
        return {r.request_id: str(r.status) for r in found}

    def outcome(self, id: str) -> None:
        """Wait for a request, and raise what it raised."""
        sdk = sky("client.sdk")
        sdk.get(id)

    def launching(self, name: str) -> str | None:
        """The id of a launch of this cluster that goes on at the API server."""
        for request in sky("client.sdk").api_status(cluster_name=name, limit=50):
            if (
                request.cluster_name == name
                and request.name.endswith("launch")
                and request.status in ACTIVE
            ):
                return str(request.request_id)
        return None

    def clusters(self, prefix: str, refresh: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What the API server knows of the clusters whose names begin so; of those in `refresh` the
        cloud itself is asked.

        A status that was not refreshed may be stale: a cluster that was taken away stays UP there.
        One that the cloud does not know any more is left out.
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
        node: Any = None
        if record.last_creation_yaml:
            made_from = yaml.safe_load(record.last_creation_yaml)
            node = (
                (made_from.get("envs") or {}).get(NODE_ENV) if isinstance(made_from, dict) else None
            )
        return {
            "name": record.name,
            "status": record.status.value,
            "launched_at": record.launched_at,
            "ever_up": bool(record.cluster_ever_up),
            "unhealthy": record.init_kind == "unhealthy",
            "why": plain(record.init_status_reason or ""),
            "node": node,
            "resources": record.resources_str or "",
        }

    def job(self, name: str) -> str | None:
        """State of the newest job of a cluster (None: it has none yet)."""
        sdk = sky("client.sdk")
        states = list(sdk.get(sdk.job_status(name)).values())
        return states[-1].value if states and states[-1] is not None else None

    def tail(self, name: str, lines: int) -> str:
        """The last lines that the newest job of a cluster has written."""
        out = io.StringIO()
        sky("client.sdk").tail_logs(name, None, follow=False, tail=lines, output_stream=out)
        return plain(out.getvalue())

    def down(self, name: str) -> str:
        return str(sky("client.sdk").down(name))

    def cancel(self, id: str) -> None:
        sdk = sky("client.sdk")
        sdk.get(sdk.api_cancel(id))

    def costs(self, prefix: str, days: int = 30) -> list[dict[str, Any]]:
        """SkyPilot's own bill of clusters whose names begin so: running time in seconds, USD."""
        rows = self._billed(days)
        return [row for row in rows if str(row["name"] or "").startswith(prefix)]

    def spans(self, names: Sequence[str], days: int) -> list[dict[str, Any]]:
        """The same of clusters of these names, of all that ever had them; with `usage_intervals`:
        from when to when each was billed (None: it still is), seconds since 1970."""
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
        """What AWS says of these shapes' spot prices in a region (`aws_prices.py`), through the
        credentials that SkyPilot uses."""
        client = sky("adaptors.aws").client("ec2", region_name=region)
        return price_changes(client, instances, since_s, now_s)

    def azure_evictions(
        self, instances: Sequence[str], regions: Sequence[str], url: str
    ) -> list[dict[str, str]]:
        """How often Azure evicts nodes of these shapes (`azure_prices.py`)."""
        return azure_prices.eviction_bands(instances, regions, azure_prices.login(), url)

    def gcp_spot_prices(
        self, machines: Sequence[dict[str, Any]], url: str
    ) -> list[tuple[float, float] | None]:
        """What Google asks for each machine on spot (`gcp_prices.py`): since when, USD per hour.
        `machines`: `region`, `shape`, `accelerator`, `gpus`; SkyPilot's catalog knows the rest."""
        made = []
        for machine in machines:
            vcpus, gib = sky("catalog").get_vcpus_mem_from_instance_type(
                machine["shape"], clouds="gcp"
            )
            made.append(gcp_prices.GcpMachine(**machine, vcpus=vcpus or 0.0, memory_gib=gib or 0.0))
        return gcp_prices.spot_usd(made, gcp_prices.login(), url)

    # -- the server --
    def server(self) -> dict[str, Any]:
        """Where the API server is and how it does; a local one is started."""
        sdk, info = sky("client.sdk"), None
        info = sdk.api_info()
        return {
            "endpoint": str(sky("server.common").get_server_url()),
            "status": str(info.status.value),
            "version": str(info.version),
        }

    def version(self) -> str:
        return str(sky().__version__)

    def check(self, clouds: Sequence[str] | None = None) -> str:
        """`sky check`: asks every cloud for its credentials, and remembers which ones work."""
        sdk, out = sky("client.sdk"), io.StringIO()
        sdk.stream_and_get(
            sdk.check(tuple(clouds) if clouds else None, verbose=False), output_stream=out
        )
        return plain(out.getvalue())


def told(error: BaseException) -> dict[str, Any]:
    """An exception as JSON. A failed fail-over says what each place answered; a request that
    failed, what was asked (`url`)."""
    history = [*getattr(error, "failover_history", ()), *getattr(error, "reasons", ())]
    return {
        "type": type(error).__name__,
        "message": plain(error),
        "url": str(getattr(getattr(error, "request", None), "url", None) or ""),
        "history": [{"type": type(e).__name__, "message": plain(e)} for e in history],
    }


def serve(calls: Calls, lines: Iterable[str], answer: io.TextIOBase) -> None:
    """Answer calls until the input ends."""
    writing = threading.Lock()

    def one(request: dict[str, Any]) -> None:
        body: dict[str, Any]
        try:
            body = {"result": getattr(calls, request["method"])(**request["arguments"])}
        except BaseException as e:
            # SkyPilot raises SystemExit too; whatever it was, the parent must know
            body = {"error": told(e)}
        with writing:
            answer.write(json.dumps({"id": request["id"], **body}) + "\n")
            answer.flush()

    for line in lines:
        threading.Thread(target=one, args=(json.loads(line),), daemon=True).start()


def main() -> None:
    keep_secrets(os.environ)
    # what SkyPilot prints goes to the log, not between our answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Calls(), sys.stdin, answers)
    os._exit(0)  # threads may hang in a call


if __name__ == "__main__":
    main()
