"""Fakes and contracts for authors of policies, clouds and notice sources.

For stores see `storage.testing`. Contracts are test classes: inherit one, give it a fixture, and
pytest runs the tests that our own parts pass. docs/design/EXTENDING.md shows each. They need pytest
(`pip install spotharness[testing]`); the fakes do not. Nothing is imported before it is used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from harness.lab.simulation.invariants import Violation
    from harness.lab.simulation.sim_nodes import SimulatedTraining
    from harness.lab.simulation.sim_world import FaultRates, SimCloud, VirtualClock
    from harness.lab.simulation.simulation import SimResult, simulate, simulate_many
    from harness.local.aws_metadata import AwsImds
    from harness.local.azure_metadata import AzureScheduledEvents
    from harness.local.gcp_metadata import GcpMetadata
    from harness.local.local_cloud import LocalCloud
    from harness.local.metadata_server import MetadataServer
    from harness.notices.custom_source import sources_of
    from harness.testing.cloud_contract import CloudBench, CloudContract
    from harness.testing.notice_contract import Ear, NoticeBench, NoticeSourceContract
    from harness.testing.policy_contract import PolicyContract
    from harness.testing.situations import pending, situation, situations, up

__all__ = [
    "AwsImds",
    "AzureScheduledEvents",
    "CloudBench",
    "CloudContract",
    "Ear",
    "FaultRates",
    "GcpMetadata",
    "LocalCloud",
    "MetadataServer",
    "NoticeBench",
    "NoticeSourceContract",
    "PolicyContract",
    "SimCloud",
    "SimResult",
    "SimulatedTraining",
    "Violation",
    "VirtualClock",
    "pending",
    "simulate",
    "simulate_many",
    "situation",
    "situations",
    "sources_of",
    "up",
]
_HOMES = {
    "AwsImds": "harness.local.aws_metadata",
    "AzureScheduledEvents": "harness.local.azure_metadata",
    "CloudBench": "harness.testing.cloud_contract",
    "CloudContract": "harness.testing.cloud_contract",
    "Ear": "harness.testing.notice_contract",
    "GcpMetadata": "harness.local.gcp_metadata",
    "SimulatedTraining": "harness.lab.simulation.sim_nodes",
    "LocalCloud": "harness.local.local_cloud",
    "MetadataServer": "harness.local.metadata_server",
    "NoticeBench": "harness.testing.notice_contract",
    "NoticeSourceContract": "harness.testing.notice_contract",
    "PolicyContract": "harness.testing.policy_contract",
    "SimCloud": "harness.lab.simulation.sim_world",
    "SimResult": "harness.lab.simulation.simulation",
    "Violation": "harness.lab.simulation.invariants",
    "VirtualClock": "harness.lab.simulation.sim_world",
    "FaultRates": "harness.lab.simulation.sim_world",
    "simulate": "harness.lab.simulation.simulation",
    "simulate_many": "harness.lab.simulation.simulation",
    "sources_of": "harness.notices.custom_source",
}
_CONTRACTS = (
    "cloud_contract",
    "notice_contract",
    "policy_contract",
)  # modules of this package that need pytest


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness.testing' has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "harness.testing.situations")
    if home.startswith("harness.testing."):
        _rewrite(home)
    return getattr(importlib.import_module(home), name)


def _rewrite(home: str) -> None:
    """Let failures of a contract show the compared values. Raises ImportError without pytest."""
    if home.rpartition(".")[2] not in _CONTRACTS or home in sys.modules:
        return
    try:
        import pytest
    except ImportError as e:
        raise ImportError(
            f"the contracts of harness.testing need pytest ({e}): pip install spotharness[testing]",
            name="pytest",
        ) from e
    pytest.register_assert_rewrite(home)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Bounded waits in tests for a condition, on any clock.

T = TypeVar("T")

WITHIN_S = 60.0  # generous, because test machines are busy


def until(
    condition: Callable[[], T],
    what: str,
    within_s: float = WITHIN_S,
    sleep: Callable[[float], object] = time.sleep,
    every_s: float = 0.02,
) -> T:
    """Return the first true result of `condition`. Raises AssertionError after `within_s` seconds
    of the clock that `sleep` advances."""
    waited_s = 0.0
    while not (found := condition()):
        assert waited_s < within_s, f"waited {within_s:g} s for {what}"
        sleep(every_s)
        waited_s += every_s
    return found
