"""A plugin of SkyPilot's API server: the recovery strategy ELASTIC, for users of plain `sky jobs
launch`.

SkyPilot's own strategies keep requesting as many nodes as before. ELASTIC takes what is available:
after a loss it tries all nodes everywhere but in the region that has just failed, then in that
region, then one node fewer, down to `min_nodes`; it tries the full number again at the next
recovery. The rest of this package lets the training go on with any number of nodes.

    ~/.sky/plugins.yaml                              resources of the task
    plugins:                                         job_recovery:
      - class: harness.clouds.sky_plugin.ElasticPlugin        strategy: ELASTIC
                                                       min_nodes: 1
                                                       recover_on_exit_codes: [33, 37]

The package must be importable where the API server and its job controllers run. It knows SkyPilot
0.14 and nothing of runs; the order of tries (`ladder`) is a separate function that needs no
SkyPilot.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from harness.clouds import sky_private

NAME = "ELASTIC"
ROUND_PAUSE_S = 30.0  # pause after a round of tries that all failed
# tries of one rung that fails for another reason than no capacity: a worker of the API server may
# die for unrelated reasons
SPURIOUS_TRIES = 2


def ladder(full: int, least: int, failed_here: bool) -> Iterator[tuple[int, str]]:
    """Yield (nodes, where) in the order in which they are tried. `where` is "elsewhere" (all but
    the region that failed), "there" (only that region), or "anywhere" (if no region is known to
    have failed)."""
    for nodes in range(full, max(1, least) - 1, -1):
        yield from (
            [(nodes, "elsewhere"), (nodes, "there")] if failed_here else [(nodes, "anywhere")]
        )


def base_class() -> Any:
    """Return the strategy class, derived from SkyPilot's base of strategies. SkyPilot is imported
    here, only in its own server."""
    errors: Any = importlib.import_module("sky.exceptions")
    base, logger = sky_private.strategy_base(), sky_private.strategy_logger()

    class Elastic(base):  # type: ignore[misc, valid-type]
        """A strategy that relaunches with as many nodes as there are, away from the region that
        failed."""

        min_nodes = 1
        pause_s = ROUND_PAUSE_S
        suitable = staticmethod(suitable)
        full_house = False  # whether the last launch failed for lack of capacity

        def set_strategy_config(self, config: dict[str, Any]) -> None:
            self.min_nodes = int(config.pop("min_nodes", 1))
            self.full = self.dag.tasks[0].num_nodes
            self.last: Any = None  # resources of the last launch that worked
            super().set_strategy_config(config)

        async def on_resume(self, cluster_name: str) -> None:
            """Read where the cluster runs: a restarted controller finds it launched."""
            await self._remember()

        async def _launch(self, *args: Any, **kwargs: Any) -> float | None:
            submitted_s: float | None = await super()._launch(*args, **kwargs)
            if submitted_s is not None:
                await self._remember()
            return submitted_s

        async def _remember(self) -> None:
            handle = await asyncio.to_thread(sky_private.handle_of, self.cluster_name)
            self.last = handle.launched_resources if handle is not None else None

        async def _await_launch_request(self, *args: Any, **kwargs: Any) -> Any:
            """Note a lack of capacity, the reason that SkyPilot's own code discards."""
            try:
                return await super()._await_launch_request(*args, **kwargs)
            except errors.ResourcesUnavailableError:
                self.full_house = True
                raise

        async def recover(self) -> float:
            failed = self.last
            await asyncio.to_thread(self._cleanup_cluster)
            task = self.dag.tasks[0]
            wanted = task.resources
            while True:
                for nodes, where in ladder(self.full, self.min_nodes, failed is not None):
                    task.num_nodes = nodes
                    places = (
                        wanted
                        if where == "anywhere"
                        else await asyncio.to_thread(self.suitable, task, failed, where)
                    )
                    for _ in range(SPURIOUS_TRIES if places else 0):
                        logger.info(f"{NAME}: {nodes} of {self.full} nodes, {where}")
                        task.set_resources(places)
                        submitted_s = await self._try()
                        task.set_resources(wanted)
                        if submitted_s is not None:
                            return submitted_s
                        if self.full_house:
                            break
                await asyncio.sleep(self.pause_s)

        async def _try(self) -> float | None:
            """Launch once. Return the submission time, or `None` if it failed. An error that is not
            about capacity is a reason to retry, not to lose the job."""
            self.full_house = False
            try:
                found: float | None = await self._launch(
                    max_retry=1, raise_on_failure=False, recovery=True
                )
                return found
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except Exception as e:
                # SkyPilot's pools, sockets and subprocesses fail in many ways
                logger.info(f"{NAME}: {type(e).__name__}: {e}")
                await asyncio.to_thread(self._cleanup_cluster)
                return None

    return Elastic


def suitable(task: Any, failed: Any, where: str) -> set[Any]:
    """Return all resources that suit the task: in the region that failed ("there"), or in all
    other regions. (`Task.blocked_resources`, which SkyPilot's own strategies set, is not sent to
    the API server in 0.14, so places are named one by one.)"""
    found, _ = sky_private.launchable(task)
    return {
        r
        for r in found
        if (r.cloud.is_same_cloud(failed.cloud) and r.region == failed.region) == (where == "there")
    }


def register() -> None:
    """Register the strategy and its field `min_nodes` with SkyPilot. Idempotent."""
    known = {"type": "integer", "minimum": 1}
    sky_private.register_strategy(NAME, base_class(), "min_nodes", known)


def _plugin() -> Any:
    base = sky_private.plugin_base()

    class ElasticPlugin(base):  # type: ignore[misc, valid-type]
        """The plugin that plugins.yaml names. Its one parameter, `network_probe`, is a URL that job
        controllers use to check for a network. The default is SkyPilot's public ones, which are
        out of reach of a closed network; a job would then never be recovered."""

        def __init__(self, network_probe: str = ""):
            self.network_probe = network_probe

        def install(self, extension_context: Any) -> None:
            register()
            if self.network_probe:
                sky_private.probe_network_at(self.network_probe)

    return ElasticPlugin


def __getattr__(name: str) -> Mapping[str, Any]:
    """Create `ElasticPlugin` when SkyPilot's server asks for it, so that importing this module
    needs no SkyPilot."""
    if name == "ElasticPlugin":
        found = globals()[name] = _plugin()
        return found  # type: ignore[no-any-return]
    raise AttributeError(name)
