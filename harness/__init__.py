"""spotharness: train on spot GPUs. `harness.attach()` is the door for training scripts;
`harness --help` for people; docs/API.md lists every public name.

Each name is imported when it is first asked for: a worker needs no controller, and controllers and
agents need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import data
    from harness.adapters.deepspeed import deepspeed
    from harness.agent.notices import Notice, NoticeSource
    from harness.bucket.journal import Journal
    from harness.bucket.lease import Lease
    from harness.controller import policies
    from harness.controller.recovery import RunOutcome, RunSpec, recover
    from harness.core.models import ModelShape
    from harness.core.records import StepRecord
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
    from harness.views.plugins import RunInfo
    from harness.watch.watched import Watched, watched
    from harness.worker.context import attention, own_randomness, split_context
    from harness.worker.cross_entropy import chunked_cross_entropy
    from harness.worker.experts import expert_parallel
    from harness.worker.float8 import float8
    from harness.worker.fsdp import fsdp2
    from harness.worker.pipeline import pipeline
    from harness.worker.pretrained import load_pretrained, model_shape
    from harness.worker.session import Session, Step, attach
    from harness.worker.stochastic_rounding import StochasticRounding
    from harness.worker.tensor_parallel import tensor_parallel
    from harness.worker.zero import zero1

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "Clock",
    "Cloud",
    "CloudUnavailable",
    "Decision",
    "Fenced",
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
_HOMES = {  # of what does not live in harness.core.world
    "Journal": "harness.bucket.journal",
    "Lease": "harness.bucket.lease",
    "ModelShape": "harness.core.models",
    "Notice": "harness.agent.notices",
    "NoticeSource": "harness.agent.notices",
    "RunOutcome": "harness.controller.recovery",
    "RunInfo": "harness.views.plugins",
    "RunSpec": "harness.controller.recovery",
    "Session": "harness.worker.session",
    "Step": "harness.worker.session",
    "StepRecord": "harness.core.records",
    "StochasticRounding": "harness.worker.stochastic_rounding",
    "Watched": "harness.watch.watched",
    "attach": "harness.worker.session",
    "attention": "harness.worker.context",
    "chunked_cross_entropy": "harness.worker.cross_entropy",
    "deepspeed": "harness.adapters.deepspeed",
    "expert_parallel": "harness.worker.experts",
    "float8": "harness.worker.float8",
    "fsdp2": "harness.worker.fsdp",
    "load_pretrained": "harness.worker.pretrained",
    "model_shape": "harness.worker.pretrained",
    "own_randomness": "harness.worker.context",
    "pipeline": "harness.worker.pipeline",
    "recover": "harness.controller.recovery",
    "split_context": "harness.worker.context",
    "tensor_parallel": "harness.worker.tensor_parallel",
    "watched": "harness.watch.watched",
    "zero1": "harness.worker.zero",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    import importlib  # `import harness` takes as long as it must

    modules = {"data": "harness.data", "policies": "harness.controller.policies"}
    if name in modules:
        return importlib.import_module(modules[name])
    return getattr(importlib.import_module(_HOMES.get(name, "harness.core.world")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
