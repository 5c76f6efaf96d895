"""Fakes and contracts for authors of policies, clouds and notices; stores: `storage.testing`.

Contracts are test classes: inherit one, give it a fixture, and pytest runs what our own parts pass.
docs/EXTENDING.md shows each. They need pytest (`pip install spotharness[testing]`); the fakes do
not, and nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.agent.own_source import sources_of
    from harness.clouds.aws_imds import AwsImds
    from harness.clouds.azure_events import AzureScheduledEvents
    from harness.clouds.gcp_metadata import GcpMetadata
    from harness.clouds.local import LocalCloud
    from harness.clouds.metadata import MetadataServer
    from harness.proof.invariants import Violation
    from harness.proof.sim import SimResult, simulate, simulate_many
    from harness.proof.sim_members import SimulatedTraining
    from harness.proof.sim_world import SimCloud, VirtualClock, Weather
    from harness.proof.wandb_server import LoopbackRun, WandbServer
    from harness.testing.clouds import CloudBench, CloudContract
    from harness.testing.notices import Ear, NoticeBench, NoticeSourceContract
    from harness.testing.policies import PolicyContract
    from harness.testing.situations import pending, situation, situations, up

__all__ = [
    "AwsImds",
    "AzureScheduledEvents",
    "CloudBench",
    "CloudContract",
    "Ear",
    "GcpMetadata",
    "LocalCloud",
    "LoopbackRun",
    "MetadataServer",
    "NoticeBench",
    "NoticeSourceContract",
    "PolicyContract",
    "SimCloud",
    "SimResult",
    "SimulatedTraining",
    "Violation",
    "VirtualClock",
    "WandbServer",
    "Weather",
    "pending",
    "simulate",
    "simulate_many",
    "situation",
    "situations",
    "sources_of",
    "up",
]
_HOMES = {
    "AwsImds": "harness.clouds.aws_imds",
    "AzureScheduledEvents": "harness.clouds.azure_events",
    "CloudBench": "harness.testing.clouds",
    "CloudContract": "harness.testing.clouds",
    "Ear": "harness.testing.notices",
    "GcpMetadata": "harness.clouds.gcp_metadata",
    "SimulatedTraining": "harness.proof.sim_members",
    "LocalCloud": "harness.clouds.local",
    "LoopbackRun": "harness.proof.wandb_server",
    "MetadataServer": "harness.clouds.metadata",
    "NoticeBench": "harness.testing.notices",
    "NoticeSourceContract": "harness.testing.notices",
    "PolicyContract": "harness.testing.policies",
    "SimCloud": "harness.proof.sim_world",
    "SimResult": "harness.proof.sim",
    "Violation": "harness.proof.invariants",
    "VirtualClock": "harness.proof.sim_world",
    "WandbServer": "harness.proof.wandb_server",
    "Weather": "harness.proof.sim_world",
    "simulate": "harness.proof.sim",
    "simulate_many": "harness.proof.sim",
    "sources_of": "harness.agent.own_source",
}
_CONTRACTS = ("clouds", "notices", "policies")  # modules of this package that need pytest


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness.testing' has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "harness.testing.situations")
    if home.startswith("harness.testing."):
        _rewrite(home)
    return getattr(importlib.import_module(home), name)


def _rewrite(home: str) -> None:
    """Let failures of a contract show what was compared. Raises ImportError without pytest."""
    import sys

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
