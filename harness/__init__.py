"""spotharness: train on spot GPUs. Training scripts start with `harness.attach()`, people with
`harness --help`; docs/API.md lists every public name.

Each name is imported on first access: a worker needs no controller, and controllers and node agents
need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import data
    from harness.adapters.deepspeed import deepspeed
    from harness.bucket.controller_lease import Lease
    from harness.bucket.journal import Journal
    from harness.controller import policies
    from harness.controller.recovery import RunOutcome, recover
    from harness.controller.run_limits import RunSpec
    from harness.core.step_records import StepRecord
    from harness.core.world import (
        BadInput,
        Clock,
        Cloud,
        CloudUnavailable,
        Decision,
        Fenced,
        HarnessError,
        Launch,
        NoCapacity,
        Node,
        NodeState,
        Offer,
        Policy,
        Stop,
        Terminate,
        View,
        Wait,
        World,
    )
    from harness.guards.guard_rules import Guards
    from harness.look.trackers.tracker_registry import RunInfo
    from harness.look.watch.watched import Watched, watched
    from harness.meshes.context_parallel import attention, own_randomness, split_context
    from harness.meshes.cross_entropy import chunked_cross_entropy
    from harness.meshes.expert_parallel import expert_parallel
    from harness.meshes.fsdp import fsdp2
    from harness.meshes.low_precision import float8
    from harness.meshes.model_shapes import ModelShape
    from harness.meshes.pipeline import pipeline
    from harness.meshes.pretrained import load_pretrained, model_shape
    from harness.meshes.stochastic_rounding import StochasticRounding
    from harness.meshes.tensor_parallel import tensor_parallel
    from harness.meshes.zero1 import zero1
    from harness.notices.notice import Notice, NoticeSource
    from harness.worker.session import Session, attach
    from harness.worker.step import Step
    from harness.worker.values import Values

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "Clock",
    "Cloud",
    "CloudUnavailable",
    "Decision",
    "Fenced",
    "Guards",
    "HarnessError",
    "Journal",
    "Launch",
    "Lease",
    "ModelShape",
    "NoCapacity",
    "Node",
    "NodeState",
    "Notice",
    "NoticeSource",
    "Offer",
    "Policy",
    "RunInfo",
    "RunOutcome",
    "RunSpec",
    "Session",
    "Step",
    "StepRecord",
    "StochasticRounding",
    "Stop",
    "Terminate",
    "Values",
    "View",
    "Wait",
    "Watched",
    "World",
    "attach",
    "attention",
    "chunked_cross_entropy",
    "data",
    "deepspeed",
    "expert_parallel",
    "float8",
    "fsdp2",
    "load_pretrained",
    "model_shape",
    "own_randomness",
    "pipeline",
    "policies",
    "recover",
    "split_context",
    "tensor_parallel",
    "watched",
    "zero1",
]
_HOMES = {  # modules of the names that do not live in harness.core.world
    "Guards": "harness.guards.guard_rules",
    "Journal": "harness.bucket.journal",
    "Lease": "harness.bucket.controller_lease",
    "ModelShape": "harness.meshes.model_shapes",
    "Notice": "harness.notices.notice",
    "NoticeSource": "harness.notices.notice",
    "RunOutcome": "harness.controller.recovery",
    "RunInfo": "harness.look.trackers.tracker_registry",
    "RunSpec": "harness.controller.recovery",
    "Session": "harness.worker.session",
    "Step": "harness.worker.session",
    "Values": "harness.worker.values",
    "StepRecord": "harness.core.step_records",
    "StochasticRounding": "harness.meshes.stochastic_rounding",
    "Watched": "harness.look.watch.watched",
    "attach": "harness.worker.session",
    "attention": "harness.meshes.context_parallel",
    "chunked_cross_entropy": "harness.meshes.cross_entropy",
    "deepspeed": "harness.adapters.deepspeed",
    "expert_parallel": "harness.meshes.expert_parallel",
    "float8": "harness.meshes.low_precision",
    "fsdp2": "harness.meshes.fsdp",
    "load_pretrained": "harness.meshes.pretrained",
    "model_shape": "harness.meshes.pretrained",
    "own_randomness": "harness.meshes.context_parallel",
    "pipeline": "harness.meshes.pipeline",
    "recover": "harness.controller.recovery",
    "split_context": "harness.meshes.context_parallel",
    "tensor_parallel": "harness.meshes.tensor_parallel",
    "watched": "harness.look.watch.watched",
    "zero1": "harness.meshes.zero1",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from harness.core.extensions import load  # imported here to keep `import harness` fast

    modules = {"data": "harness.data", "policies": "harness.controller.policies"}
    where = modules.get(name) or f"{_HOMES.get(name, 'harness.core.world')}:{name}"
    return load(where, f"harness.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
