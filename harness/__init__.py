"""spotharness: train on spot GPUs. `harness.attach()` is the door for training scripts;
`harness --help` for people; docs/API.md lists every public name.

Each name is imported when it is first asked for: a worker needs no controller, and controllers and
agents need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import data
    from harness.agent.notices import Notice, NoticeSource
    from harness.bucket.journal import Journal
    from harness.bucket.lease import Lease
    from harness.controller import policies
    from harness.controller.recovery import RunOutcome, RunSpec, recover
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
    from harness.worker.fsdp import fsdp2
    from harness.worker.session import Session, Step, attach

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
    "Stop",
    "Terminate",
    "View",
    "Wait",
    "Watched",
    "World",
    "attach",
    "data",
    "fsdp2",
    "policies",
    "recover",
    "watched",
]
_HOMES = {  # of what does not live in harness.core.world
    "Journal": "harness.bucket.journal",
    "Lease": "harness.bucket.lease",
    "Notice": "harness.agent.notices",
    "NoticeSource": "harness.agent.notices",
    "RunOutcome": "harness.controller.recovery",
    "RunInfo": "harness.views.plugins",
    "RunSpec": "harness.controller.recovery",
    "Session": "harness.worker.session",
    "Step": "harness.worker.session",
    "StepRecord": "harness.core.records",
    "Watched": "harness.watch.watched",
    "attach": "harness.worker.session",
    "fsdp2": "harness.worker.fsdp",
    "recover": "harness.controller.recovery",
    "watched": "harness.watch.watched",
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
