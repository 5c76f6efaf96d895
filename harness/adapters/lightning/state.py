"""The state of a Lightning trainer besides weights and optimizers: what its own checkpoints hold,
and what they omit. Runs in the worker."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import xxhash

from harness.adapters.lightning.data import TrainLoader
from harness.adapters.lightning.parts import refuse_other_size
from harness.worker.gradients.parallel import local_part
from harness.worker.session import Session
from storage.errors import NotFound
from storage.snapshots.manifest import SnapshotCorrupt
from storage.tensors import state_tree

LIVE = "harness:live:"  # prefix of the name of a tensor that is the model's own
# keys of a checkpoint that are stored elsewhere, or come with the script
LEFT_OUT = (
    "state_dict",
    "optimizer_states",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
)
LIGHTNING = ("lightning", "pytorch_lightning")  # the packages
SMALL = 64  # most elements of tensors that are taken from rank 0: scores, counters
# attributes of ModelCheckpoint that keep it from saving a step twice
REMEMBERED = ("_last_global_step_saved", "_defer_save_until_validation")


class LightningState:
    """The trainer's state. `loader`: the train dataloader, once there is one; `place`: its position
    in the loaded snapshot; `resumed`: there was a snapshot; `sanity_steps`: as the script set them;
    `being_made`: a snapshot is being made."""

    only_first_knows = True  # callbacks and loggers may do things on rank 0 only

    def __init__(self, trainer: Any, run: Session):
        self._trainer, self._run = trainer, run
        self.loader: TrainLoader | None = None
        self.place: Any = None
        self.resumed = self.being_made = False
        self._loaded: dict[str, Any] = {}
        self.sanity_steps = trainer.num_sanity_val_steps
        # their folder is the logger's, which may change at each start
        self._in_loggers_folder = {
            callback.state_key
            for callback in trainer.checkpoint_callbacks
            if getattr(callback, "dirpath", "") is None
        }

    def go_on_logging(self) -> None:
        """Continue the loggers' folder, or run, of this run's first attempt. Call it before they
        open files."""
        for logger, version in zip(self._loggers(), self._logged_as(), strict=False):
            if logger._version is None:
                logger._version = version
        named = any(type(one).__name__ == "WandbLogger" for one in self._trainer.loggers)
        if named and self._run.run_url:
            name = f"harness-{xxhash.xxh3_64_hexdigest(self._run.run_url.encode())}"
            os.environ.setdefault("WANDB_RUN_ID", name)

    def _loggers(self) -> list[Any]:
        """Return the loggers that number their folders and write several files into one."""
        return [one for one in self._trainer.loggers if type(one).__name__ == "TensorBoardLogger"]

    def _logged_as(self) -> list[Any]:
        """Return the versions of the loggers in the newest snapshot of this phase."""

        def look() -> list[Any]:
            phase, snapshots = self._run._run.phase.number, self._run.snapshots
            for ref in snapshots.refs() if self._run.run_url else ():
                with contextlib.suppress(NotFound, SnapshotCorrupt):
                    data = snapshots.load(ref).data
                    if data.get("phase", 1) == phase:
                        return list(data["state"].get("lightning", {}).get("versions", []))
            return []

        return list(self._run._peers.agree(look))

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective: small tensors and plain values are rank 0's."""
        tensors, plain = state_tree.split(self._whole())
        small = {name: t.detach().cpu() for name, t in tensors.items() if t.numel() <= SMALL}
        plain, small = self._run._peers.agree(lambda: (plain, small))
        joined: dict[str, Any] = state_tree.join({**tensors, **small}, plain)
        return joined

    def state_alone(self) -> dict[str, Any] | None:
        """Return the state as this rank knows it; None: a hook of the script acts when a checkpoint
        is made, and must not at each step."""
        makers = [self._trainer.lightning_module, *self._trainer.callbacks]
        hooks = [getattr(type(one), "on_save_checkpoint", None) for one in makers]
        theirs = all(hook.__module__.startswith(LIGHTNING) for hook in hooks if hook is not None)
        return self._whole() if theirs else None

    def _whole(self) -> dict[str, Any]:
        trainer = self._trainer
        self.being_made = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.being_made = False
        live = trainer.lightning_module.state_dict()
        names = {_where(t): name for name, t in live.items() if local_part(t).numel()}
        # callbacks may have replaced some tensors, by averages of the weights for example
        weights = {
            name: tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name not in live or _where(tensor) != _where(live[name])
        }
        said = {name: value for name, value in checkpoint.items() if name not in LEFT_OUT}
        return {
            "checkpoint": _marked(said, names),
            "weights": weights,
            "data": self._place(),
            "more": self._more(),
            "parts": int(trainer.strategy.harness_parts),
            "versions": [logger.version for logger in self._loggers()],
        }

    def _place(self) -> Any:
        shared = None if self.loader is None else self.loader.shared
        return None if shared is None else shared.state_dict()

    def _more(self) -> dict[str, Any]:
        trainer, logs = self._trainer, self._trainer._logger_connector
        metrics = (logs._callback_metrics, logs._logged_metrics, logs._progress_bar_metrics)
        return {
            "metrics": [{name: float(value) for name, value in each.items()} for each in metrics],
            "should_stop": bool(trainer.should_stop),
            "validated": bool(trainer.fit_loop.epoch_loop.val_loop._has_run),
            "saved": {
                callback.state_key: {
                    name: getattr(callback, name) for name in REMEMBERED if hasattr(callback, name)
                }
                for callback in trainer.checkpoint_callbacks
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `take_up`: weights and optimizers are loaded first."""
        self._loaded, self.resumed = state, True

    def take_up(self) -> int:
        """Apply the state that was loaded. Return the number of finished batches of its epoch, 0
        without a snapshot."""
        if not self.resumed:
            return 0
        trainer, state = self._trainer, self._loaded
        refuse_other_size(state["parts"], trainer.strategy.harness_parts)
        connector, module = trainer._checkpoint_connector, trainer.lightning_module
        live = module.state_dict()
        checkpoint = _unmarked(state["checkpoint"], live)
        checkpoint["state_dict"] = {**live, **state["weights"]}
        self._keep_folders(checkpoint["callbacks"])
        connector._loaded_checkpoint = checkpoint
        module.on_load_checkpoint(checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}  # drops also a file that the script names
        self.place, self._loaded = state["data"], {}
        self._recall(state["more"])
        return self._turn_loops()

    def _keep_folders(self, callbacks: dict[str, Any]) -> None:
        """Keep the folders: ModelCheckpoint drops its best score if its folder has changed, and the
        folder is named after the logger's version."""
        for callback in self._trainer.checkpoint_callbacks:
            said = callbacks.get(callback.state_key)
            if said and callback.state_key in self._in_loggers_folder and said.get("dirpath"):
                callback.dirpath = said["dirpath"]

    def _recall(self, more: dict[str, Any]) -> None:
        trainer, logs = self._trainer, self._trainer._logger_connector
        callback, logged, shown = more["metrics"]
        logs._callback_metrics = {name: torch.tensor(value) for name, value in callback.items()}
        logs._logged_metrics = {name: torch.tensor(value) for name, value in logged.items()}
        logs._progress_bar_metrics = dict(shown)
        trainer.should_stop = more["should_stop"]
        trainer.fit_loop.epoch_loop.val_loop._has_run = more["validated"]
        for each in trainer.checkpoint_callbacks:
            for name, value in more["saved"].get(each.state_key, {}).items():
                setattr(each, name, value)

    def _turn_loops(self) -> int:
        """Set the loops' restart flags, which are meant for checkpoints from within a step; ours
        are from between two. Return the finished batches of this epoch."""
        fit_loop = self._trainer.fit_loop
        epoch, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
        within = epoch.current.ready > epoch.current.completed
        for loop in loops_of(fit_loop):
            loop._restarting = within
            loop._loaded_from_state_dict = loop._resuming_from_checkpoint = within
        if not within:
            return 0
        # otherwise sums of this epoch would be taken for those of an earlier one
        self._trainer._logger_connector._first_loop_iter = False
        return int(batches.current.ready)


def loops_of(loop: Any) -> list[Any]:
    """Return a loop of Lightning and all loops within it."""
    inside = [each for each in vars(loop).values() if hasattr(each, "_restarting")]
    return [loop, *(deeper for each in inside for deeper in loops_of(each))]


def go_on(fit_loop: Any) -> None:
    """Clear the restart flags once the counters are restored. Otherwise the epoch's schedulers
    would be skipped, and the last validation repeated."""
    for loop in loops_of(fit_loop):
        loop._restarting = loop._loaded_from_state_dict = False


def _where(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    tensor = local_part(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _marked(value: Any, names: dict[Any, str]) -> Any:
    """Replace each tensor that is the model's own by a string with its name."""
    if isinstance(value, torch.Tensor):
        name = names.get(_where(value)) if local_part(value).numel() else None
        return value if name is None else f"{LIVE}{name}"
    if isinstance(value, dict):
        return {key: _marked(each, names) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_marked(each, names) for each in value)
    return value


def _unmarked(value: Any, live: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, str) and value.startswith(LIVE):
        return live[value.removeprefix(LIVE)]
    if isinstance(value, dict):
        return {key: _unmarked(each, live) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unmarked(each, live) for each in value)
    return value
