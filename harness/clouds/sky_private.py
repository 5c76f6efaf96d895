"""Everything that we use of SkyPilot 0.14 beside its public SDK has a function here. A new version
of SkyPilot is checked by it: `tests/clouds/test_sky_private.py` has a contract for each.

Nothing here decides anything. SkyPilot is imported by the functions, in the process that calls
them: the broker, SkyPilot's own server, or a command that reads a task file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def _sky(module: str) -> Any:
    return importlib.import_module(f"sky.{module}")


# ---- the optimizer -------------------------------------------------------------------------------
def launchable(task: Any) -> tuple[set[Any], set[str]]:
    """Return all resources at which a task of SkyPilot can be launched, on the enabled clouds, and
    SkyPilot's hints for what it cannot."""
    found, _, _, hints = _sky("optimizer")._fill_in_launchable_resources(task, None, quiet=True)
    resources = {one for choices in found.values() for one in choices}
    return resources, {str(hint) for per in hints.values() for hint in per}


def enable_clouds(names: Sequence[str]) -> None:
    """Make the optimizer of this process take these clouds for the enabled ones."""
    registry = _sky("utils.registry").CLOUD_REGISTRY
    enabled = [registry.from_str(name) for name in names]
    _sky("check").get_cached_enabled_clouds_or_refresh = lambda *_, **__: list(enabled)


def keep_catalog_zones() -> None:
    """Make AWS's zones keep their names of the catalog in this process: an account's own names are
    asked of AWS, which needs an account."""
    _sky("catalog.aws_catalog")._get_az_mappings = lambda *_: None


def catalog_version() -> str:
    """Return the version of the catalogs' format, the name of their folder: "v8"."""
    return str(_sky("skylet.constants").CATALOG_SCHEMA_VERSION)


# ---- clusters -----------------------------------------------------------------------------------
def user_hash() -> str:
    """Return the hash of this user that ends the names of their clusters on clouds."""
    return str(_sky("utils.common_utils").get_user_hash())


# ---- task files ----------------------------------------------------------------------------------
def task_schemas() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the JSON schemas of a task file and of its `resources`."""
    schemas = _sky("utils.schemas")
    return schemas.get_task_schema(), schemas.get_resources_schema()


def validate(value: Any, schema: Mapping[str, Any]) -> None:
    """Check a section of a task file. Raises ValueError with SkyPilot's words."""
    _sky("utils.common_utils").validate_schema(value, schema)


def schema_errors(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return the errors of jsonschema, each with its `absolute_path`."""
    return list(_sky("utils.validator").get_schema_validator()(schema).iter_errors(value))


# ---- managed jobs --------------------------------------------------------------------------------
# methods of SkyPilot's strategies that ours calls or overrides
STRATEGY_METHODS = ("_launch", "_await_launch_request", "_cleanup_cluster", "set_strategy_config")


def strategy_base() -> Any:
    """Return the base class of recovery strategies, with STRATEGY_METHODS."""
    return _sky("jobs.recovery_strategy").StrategyExecutor


def strategy_logger() -> Any:
    return _sky("jobs.recovery_strategy").logger


def handle_of(cluster_name: str) -> Any:
    """Return the handle of a cluster, whose `launched_resources` say where it runs; None if there
    is no such cluster."""
    return _sky("global_user_state").get_handle_from_cluster_name(cluster_name)


def register_strategy(name: str, strategy: Any, field: str, schema: Mapping[str, Any]) -> None:
    """Register a recovery strategy and a field of its own in `job_recovery`. Idempotent."""
    _sky("utils.schemas").register_job_recovery_property(field, schema)
    registry = _sky("utils.registry").JOBS_RECOVERY_STRATEGY_REGISTRY
    if name.lower() not in registry:
        registry.type_register(name=name)(strategy)


def plugin_base() -> Any:
    """Return the base class of plugins of the API server."""
    return _sky("server.plugins").BasePlugin


def probe_network_at(url: str) -> None:
    """Make job controllers check for a network at this URL instead of at public addresses."""
    _sky("backends.backend_utils").__dict__["_TEST_IP_LIST"] = [url]
