"""spotharness: train on spot GPUs. `harness.attach()` is the door for training scripts;
`harness --help` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.worker.session import Session, Step, attach, fsdp2

__version__ = "0.1.0"
__all__ = ["Session", "Step", "attach", "fsdp2"]


def __getattr__(name: str) -> Any:
    """The session needs torch; controllers and agents do without, so it is imported when first
    asked for."""
    if name in __all__:
        from harness.worker import session

        return getattr(session, name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
