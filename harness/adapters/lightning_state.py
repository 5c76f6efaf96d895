"""What a Lightning trainer knows besides weights and optimizers, as one state: what its own
checkpoints hold, and what they forget. Runs in the worker."""

from __future__ import annotations

import os
from typing import Any

import torch
import xxhash

from harness.adapters.lightning_data import TrainLoader
from harness.worker.session import Session
from storage import dcp

LIVE = "harness:live:"  # before the name of a tensor that is the model's own
# of a checkpoint: what is stored elsewhere, or comes with the script
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
SMALL = 64  # elements of tensors that are taken from rank 0: scores, counters
# of ModelCheckpoint: what keeps it from saving a step twice
REMEMBERED = ("_last_global_step_saved", "_defer_save_until_validation")


class LightningState:
    """`loader`: the data's, once there is one; `place`: where that was in the snapshot that was
    loaded; `resumed`: there was one."""

    def __init__(self, trainer: Any, run: Session):
        self._trainer, self._run = trainer, run
        self.loader: TrainLoader | None = None
        self.place: Any = None
        self.resumed = False
        self._loaded: dict[str, Any] = {}
        # whose folder is the logger's, which may be another one at each start
        self._in_loggers_folder = {
            callback.state_key
            for callback in trainer.checkpoint_callbacks
            if getattr(callback, "dirpath", "") is None
        }

    def go_on_logging(self) -> None:
        """Before loggers open anything: the folder, or the run, of this run's first attempt."""
        for logger, version in zip(self._loggers(), self._logged_as(), strict=False):
            if logger._version is None:
                logger._version = version
        named = any(type(one).__name__ == "WandbLogger" for one in self._trainer.loggers)
        if named and self._run.run_url:
            name = f"harness-{xxhash.xxh3_64_hexdigest(self._run.run_url.encode())}"
            os.environ.setdefault("WANDB_RUN_ID", name)

    def _loggers(self) -> list[Any]:
        """Those that number their folders, and write several files into one."""
        return [one for one in self._trainer.loggers if type(one).__name__ == "TensorBoardLogger"]

    def _logged_as(self) -> list[Any]:
        """Versions of loggers, in the newest snapshot."""

        def look() -> list[Any]:
            newest = self._run.snapshots.latest() if self._run.run_url else None
            if newest is None:
                return []
            return list(newest.data["state"].get("lightning", {}).get("versions", []))

        return list(self._run._peers.agree(look))

    def state_dict(self) -> dict[str, Any]:
        """All ranks ask at the same point: what is small, or no tensor, is rank 0's."""
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        live = trainer.lightning_module.state_dict()
        names = {_where(tensor): name for name, tensor in live.items() if tensor.numel()}
        # callbacks may have put others there: averages of the weights
        weights = {
            name: tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name not in live or _where(tensor) != _where(live[name])
        }
        said = {name: value for name, value in checkpoint.items() if name not in LEFT_OUT}
        whole = {
            "checkpoint": _marked(said, names),
            "weights": weights,
            "data": self._place(),
            "more": self._more(),
            "versions": [logger.version for logger in self._loggers()],
        }
        tensors, plain = dcp.split(whole)
        small = {name: t.detach().cpu() for name, t in tensors.items() if t.numel() <= SMALL}
        plain, small = self._run._peers.agree(lambda: (plain, small))
        joined: dict[str, Any] = dcp.join({**tensors, **small}, plain)
        return joined

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
        """Kept until `take_up`: weights and optimizers come first."""
        self._loaded, self.resumed = state, True

    def take_up(self) -> int:
        """What was loaded goes where it belongs. Returns the batches of its epoch that are done
        already; 0 without a snapshot."""
        if not self.resumed:
            return 0
        trainer, state = self._trainer, self._loaded
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
        connector._loaded_checkpoint = {}  # also of a file that the script names
        self.place, self._loaded = state["data"], {}
        self._recall(state["more"])
        return self._turn_loops()

    def _keep_folders(self, callbacks: dict[str, Any]) -> None:
        """ModelCheckpoint forgets its best score where its folder is another one, and that is
        named after the logger's version."""
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
        """Lightning's own restart is for checkpoints from within a step; ours are from between
        two. Returns the batches of this epoch that are done."""
        fit_loop = self._trainer.fit_loop
        epoch, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
        within = epoch.current.ready > epoch.current.completed
        for loop in loops_of(fit_loop):
            loop._restarting = within
            loop._loaded_from_state_dict = loop._resuming_from_checkpoint = within
        if not within:
            return 0
        # else sums of the epoch so far would be taken for those of an earlier one
        self._trainer._logger_connector._first_loop_iter = False
        return int(batches.current.ready)


def loops_of(loop: Any) -> list[Any]:
    """A loop of Lightning, and those within it."""
    inside = [each for each in vars(loop).values() if hasattr(each, "_restarting")]
    return [loop, *(deeper for each in inside for deeper in loops_of(each))]


def go_on(fit_loop: Any) -> None:
    """The counters are as they were: from here on nothing is a restart. Else the epoch's
    schedulers would be left out, and the last validation repeated."""
    for loop in loops_of(fit_loop):
        loop._restarting = loop._loaded_from_state_dict = False


def _where(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _marked(value: Any, names: dict[Any, str]) -> Any:
    """With a word in the place of each tensor that is the model's own."""
    if isinstance(value, torch.Tensor):
        name = names.get(_where(value)) if value.numel() else None
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
