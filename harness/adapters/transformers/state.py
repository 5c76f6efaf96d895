"""The state of transformers' Trainer that is not in its own checkpoints. Runs in the worker.

These omit the loss since the last log, the losses of the whole training, counters and averages of
callbacks, and the best weights if the disk is gone. All state here is the same on every rank: plain
values are rank 0's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.adapters.deepspeed import pieces_of
from harness.adapters.transformers.ranks_together import AllRanks, Meters
from harness.adapters.whole_copies import reshard

TEXT_NBYTES = 64 << 10  # size of JSON in a tensor, doubled as often as needed
# fields of TrainerState; the others hold what this process was asked for
KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
PLAIN = (bool, int, float)


@dataclass
class EpochPlace:
    """The place where the next step begins. `batches`: finished micro-batches of the epoch; `over`:
    no step follows."""

    epoch: int = 0
    batches: int = 0
    over: bool = False


@dataclass
class TimeSpent:
    """Seconds of training in earlier processes, and the start time of this one."""

    before_s: float = 0.0
    began_s: float = dataclasses.field(default_factory=time.time)

    def seconds(self) -> float:
        return self.before_s + time.time() - self.began_s


def reading_ranks(trainer: Any) -> int:
    """Return how many ranks of a copy read parts of a micro-batch; the others read the same."""
    split = getattr(trainer.accelerator, "parallelism_config", None)
    ranks = trainer.accelerator.num_processes if split is None else split.data_parallel_size
    return int(ranks)


class TrainerMemory:
    """The plain state of a transformers.Trainer. `loading`: no collective calls are allowed."""

    def __init__(self, trainer: Any, place: EpochPlace, company: AllRanks):
        self.place, self.loading = place, False
        self.spent = TimeSpent()
        self._trainer, self._company = trainer, company
        self._parts = reading_ranks(trainer)
        self._meters = Meters.of(trainer)
        self._losses: dict[str, Any] = {}
        self._callbacks: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        if self.loading:  # only the contents of a snapshot count then
            return {}
        sums = self._company.gather(_own_sums(self._trainer))[: self._company.copy_ranks]
        text = self._company.first(lambda: self._told(sums))
        size = max(TEXT_NBYTES, 1 << math.ceil(math.log2(len(text.encode()))))
        # padded, so that the layout rarely changes between snapshots
        padded = bytearray(text.encode().ljust(size))
        return {"text": torch.frombuffer(padded, dtype=torch.uint8)}

    def state_alone(self) -> dict[str, Any]:
        """Return the state as this rank knows it: the same as on the others, but for times and
        callbacks of the script."""
        return {"text": self._told([_own_sums(self._trainer)])}

    @property
    def only_first_knows(self) -> bool:
        """True if callbacks of the script count something, perhaps on one rank only."""
        own = [c for c in self._trainer.callback_handler.callbacks if not is_theirs(c)]
        return any(told for callback in own for told in counters(callback).values())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        text = state["text"]
        told = json.loads(text if isinstance(text, str) else bytes(text.cpu().numpy()))
        for name, value in told["state"].items():
            setattr(self._trainer.state, name, value)
        for name, value in told["place"].items():
            setattr(self.place, name, value)
        self.place.batches //= self._parts
        self.spent.before_s = told["seconds"]
        self._losses, self._callbacks = told["losses"], told["callbacks"]
        if self._meters is not None and told["meters"] is not None:
            self._meters.restore(told["meters"])

    def _told(self, sums: list[Any]) -> str:
        trainer = self._trainer
        told = {
            "state": {name: getattr(trainer.state, name) for name in KEPT},
            # in parts of micro-batches, as the copies that go on may read more or fewer at once
            "place": dataclasses.asdict(self.place) | {"batches": self.place.batches * self._parts},
            "seconds": self.spent.seconds(),
            "losses": _losses(trainer) | {"own": sums},
            "callbacks": [
                [type(callback).__name__, counters(callback)]
                for callback in trainer.callback_handler.callbacks
            ],
            "meters": self._meters.state() if self._meters is not None else None,
        }
        return json.dumps(told, default=_plain)

    def give_losses(self) -> None:
        """Apply the loaded losses to a trainer that has just reset its own."""
        if not self._losses:
            return
        trainer, losses = self._trainer, self._losses
        since_log, flos = _sums_at(losses["own"], self._company)
        trainer._tr_loss.fill_(since_log)
        trainer._total_loss_scalar = losses["logged"]
        trainer._globalstep_last_logged = losses["last_logged"]
        trainer._initial_global_step = losses["first_step"]
        trainer._initial_num_input_tokens_seen = losses["first_tokens"]
        trainer.current_flos = flos

    def give_callbacks(self) -> None:
        """Apply the loaded state to callbacks that have begun."""
        waiting = list(self._callbacks)
        for callback in self._trainer.callback_handler.callbacks:
            kind = type(callback).__name__
            found = next((one for one in waiting if one[0] == kind), None)
            if found is not None:
                waiting.remove(found)
                give(callback, found[1])


def _losses(trainer: Any) -> dict[str, Any]:
    if not hasattr(trainer, "_tr_loss"):
        return {}
    return {
        "logged": float(trainer._total_loss_scalar),
        "last_logged": trainer._globalstep_last_logged,
        # before 5.20 a Trainer divides by all steps, which is the same as from step 0 on
        "first_step": getattr(trainer, "_initial_global_step", 0),
        "first_tokens": trainer._initial_num_input_tokens_seen,
    }


def _own_sums(trainer: Any) -> tuple[float, float]:
    """Return the loss and the operations since the last log, which the Trainer adds up over the
    ranks of a copy only when it logs."""
    if not hasattr(trainer, "_tr_loss"):
        return 0.0, 0.0
    return float(trainer._tr_loss), float(trainer.current_flos)


def _sums_at(every: list[list[float]], company: AllRanks) -> tuple[float, float]:
    """Return this rank's share of the `_own_sums` of a copy that may have had other ranks."""
    if len(every) == company.copy_ranks:
        loss, flos = every[company.place]
        return loss, flos
    losses, flos_of = zip(*every, strict=True)
    return math.fsum(losses) / len(losses), math.fsum(flos_of) / company.copy_ranks


def is_theirs(callback: Any) -> bool:
    """Return whether a callback is transformers' own: it holds process state (bars, trackers)."""
    return type(callback).__module__.partition(".")[0] == "transformers"


def counters(callback: Any) -> dict[str, Any]:
    """Return a callback's state: the attributes that it names itself (ExportableState), its own
    state_dict, or else numbers, and lists and dicts of numbers and strings."""
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        return {"state_dict": _only_plain(callback.state_dict())}
    if any(kind.__name__ == "ExportableState" for kind in type(callback).__mro__):
        return {"attributes": _only_plain(callback.state().get("attributes", {}))}
    if is_theirs(callback):
        return {}
    return {"attributes": {n: v for n, v in vars(callback).items() if is_counter(v)}}


def give(callback: Any, told: dict[str, Any]) -> None:
    """Restore a callback from the result of `counters`."""
    if "state_dict" in told and hasattr(callback, "load_state_dict"):
        callback.load_state_dict(told["state_dict"])
    for name, value in told.get("attributes", {}).items():
        setattr(callback, name, value)


def is_counter(value: Any) -> bool:
    if type(value) in (list, dict):
        return _is_plain(value)
    return type(value) in PLAIN


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    return value is None or type(value) in (*PLAIN, str)


def _only_plain(state: Any) -> dict[str, Any]:
    return {name: value for name, value in dict(state).items() if _is_plain(value)}


def _plain(value: Any) -> Any:
    """Convert numbers of numpy and torch for JSON."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} in the trainer's state; wanted numbers and words")


# ---- tensors -------------------------------------------------------------------------------------
class CallbackTensors:
    """Averages and copies of weights that callbacks hold in their attributes: modules, tensors, and
    lists and dicts of tensors."""

    def __init__(self, trainer: Any):
        self._trainer, self.loading = trainer, False
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self.loading:
            return {}
        return {
            f"{number}.{type(callback).__name__}.{name}": _tensors_of(value)
            for number, callback, name, value in self._holders()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = dict(state)

    def give(self) -> None:
        """Apply the loaded tensors to callbacks that have begun."""
        callbacks = self._trainer.callback_handler.callbacks
        for key, found in self._loaded.items():
            number, kind, name = key.split(".", 2)
            callback = callbacks[int(number)] if int(number) < len(callbacks) else None
            if type(callback).__name__ != kind:
                continue
            now = getattr(callback, name, None)
            if isinstance(now, nn.Module):
                now.load_state_dict(found)
            else:
                setattr(callback, name, _like(now, found))

    def _holders(self) -> Iterator[tuple[int, Any, str, Any]]:
        trainer = self._trainer
        shared = {
            id(trainer.model),
            id(trainer.model_wrapped),
            id(getattr(trainer, "ref_model", 0)),
        }
        for number, callback in enumerate(trainer.callback_handler.callbacks):
            if is_theirs(callback):
                continue
            for name, value in vars(callback).items():
                if id(value) not in shared and _holds_tensors(value):
                    yield number, callback, name, value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (nn.Module, torch.Tensor)):
        return True
    if type(value) is list and value:
        return all(isinstance(one, torch.Tensor) for one in value)
    if type(value) is dict and value:
        return all(type(k) is str and isinstance(v, torch.Tensor) for k, v in value.items())
    return False


def _tensors_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, nn.Module) else value


def _like(now: Any, found: Any) -> Any:
    """Move what was found to the devices of the callback's own tensors."""
    if isinstance(found, torch.Tensor):
        return found.to(now.device) if isinstance(now, torch.Tensor) else found
    if isinstance(found, list):
        old = now if isinstance(now, list) and len(now) == len(found) else [None] * len(found)
        return [_like(a, b) for a, b in zip(old, found, strict=True)]
    if isinstance(found, dict):
        known = now if isinstance(now, dict) else {}
        return {name: _like(known.get(name), one) for name, one in found.items()}
    return found


class BestWeights:
    """The weights of the best checkpoint so far: the disk on which the Trainer keeps it may be gone
    when the training ends. `step`: the checkpoint's step, 0 if there is none. Needs host memory for
    one more copy of the trained tensors."""

    def __init__(self, model: nn.Module):
        self._model, self.step = model, 0
        self._copy = {name: _on_host(t) for name, t in self._trained()}

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        reshard(self._model)
        trained = ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)
        yield from ((n, pieces_of(p) if hasattr(p, "ds_tensor") else p) for n, p in trained)
        kept = self._model.state_dict(keep_vars=True)
        yield from ((n, b) for n, b in self._model.named_buffers() if n in kept)

    def take(self, step: int) -> None:
        """Copy the model's weights, which are the best now."""
        self.step = step
        for name, tensor in self._trained():
            self._copy[name].copy_(tensor.detach())

    def put(self) -> None:
        """Restore the model to the best weights."""
        reshard(self._model)
        self._model.load_state_dict(self._copy, strict=False)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weights": self._copy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for name, tensor in state["weights"].items():
            if tensor is not self._copy[name]:
                self._copy[name].copy_(tensor)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


class TrainerKept:
    """Everything that snapshots hold of a Trainer besides model, optimizer, scheduler and data."""

    def __init__(self, trainer: Any, company: AllRanks):
        self.place = EpochPlace()
        self.memory = TrainerMemory(trainer, self.place, company)
        self.tensors = CallbackTensors(trainer)
        self.best: BestWeights | None = None
        self._trainer = trainer

    def named(self, model: nn.Module) -> dict[str, Any]:
        """Return the state by the names under which it is stored. `model`: that is trained."""
        trainer = self._trainer
        state: dict[str, Any] = {"trainer": self.memory, "callbacks": self.tensors}
        if trainer.args.load_best_model_at_end:
            self.best = state["best"] = BestWeights(model)
        if getattr(trainer.args, "sync_ref_model", False):  # a TRL option: an average of the model
            state["ref_model"] = trainer.ref_model
        return state

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the time in which a snapshot is read."""
        self.memory.loading = self.tensors.loading = True
        try:
            yield
        finally:
            self.memory.loading = self.tensors.loading = False
