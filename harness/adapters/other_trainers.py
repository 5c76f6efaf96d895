"""Trainers whose loop no adapter drives: they are refused when a script begins to use one, and the
message says how its work survives all the same. Runs in the worker.

Without this a script would train, and lose all of it with its node. A script that has called
`harness.attach()` keeps its work itself, and `--adapt none` leaves all scripts alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from harness.core.world import BadInput
from harness.worker import session as sessions


@dataclass(frozen=True)
class OtherTrainer:
    """`begins`: the function of its module that a training calls first; `instead`: what to do."""

    name: str
    begins: str
    instead: str


BY_ITSELF = "It can resume by itself, from a folder that all nodes see: start it with --adapt none"
OTHERS = {
    "ultralytics.engine.trainer": OtherTrainer(
        *("Ultralytics", "BaseTrainer.train"),
        "Keep its folder in snapshots: harness.attach(), run.files.restore(folder), and "
        "run.files.save(folder, epoch) in its callback on_model_save, with --nproc 1 --worlds 1",
    ),
    "composer.trainer.trainer": OtherTrainer(
        *("Composer", "Trainer.__init__"),
        f"{BY_ITSELF}, set NODE_RANK to GROUP_RANK, and give its Trainer save_folder, run_name and "
        "autoresume=True",
    ),
    "timm.utils.distributed": OtherTrainer(
        *("timm's train.py", "init_distributed_device"),
        f"{BY_ITSELF} and --resume OUTPUT/EXPERIMENT/last.pth.tar where that file exists; or write "
        "the loop with run.loader",
    ),
}


def patch(module: ModuleType) -> None:
    """Let the trainer of `module` refuse to train unless the script has a session."""
    other = OTHERS[module.__name__]
    owner: Any = module
    *inner, name = other.begins.split(".")
    for one in inner:
        owner = getattr(owner, one)
    setattr(owner, name, _refusing(getattr(owner, name), other))


def _refusing(original: Callable[..., Any], other: OtherTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def begins(*args: Any, **kwargs: Any) -> Any:
        if not sessions.is_attached():
            raise BadInput(
                f"{other.name} trains in a loop of its own, which no adapter drives: its work "
                f"would be lost with its node. {other.instead} (docs/trainers/loops.md)"
            )
        return original(*args, **kwargs)

    return begins
