"""Patches that put the driver (accelerate_loop.py) into Accelerate's classes. Runs in the worker.

They have no effect until a script whose training the driver runs makes an `Accelerator`. Other
owners of an Accelerator, such as transformers' Trainer, are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import RandomSampler

from harness.adapters import framework_claim
from harness.adapters.accelerate import sharding
from harness.adapters.accelerate.data import family, zero_engine
from harness.adapters.accelerate.loop import Driver, Swallow
from harness.adapters.accelerate.rounds import whole_batches
from harness.adapters.deepspeed_copies import within_copies
from harness.core.world import BadInput

# parameters that each function must have, without `self`
KNOWN = {
    "Accelerator._prepare_deepspeed": ("args",),
    "Accelerator._prepare_fsdp2": ("args",),
    "Accelerator.no_sync": ("model",),
    "Accelerator.prepare_model": ("model", "device_placement", "evaluation_mode"),
    "Accelerator.prepare_data_loader": (
        "data_loader",
        "device_placement",
        "slice_fn_for_dispatch",
    ),
    "Accelerator.prepare": ("args", "device_placement"),
    "Accelerator.backward": ("loss", "kwargs"),
    "Accelerator.clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "Accelerator.clip_grad_value_": ("parameters", "clip_value"),
    "Accelerator.unscale_gradients": ("optimizer",),
    "AcceleratedOptimizer.step": ("closure",),
    "AcceleratedOptimizer.zero_grad": ("set_to_none",),
    "AcceleratedScheduler.step": ("args", "kwargs"),
    "DataLoaderShard.__iter__": (),
    "DataLoaderAdapter.__len__": (),
}
CONFIG_FILE = "ACCELERATE_CONFIG_FILE"  # what `accelerate config` has written

_driver: list[Driver] = []  # the driver of this process, if it drives the training
_unlike: list[tuple[str, Any, tuple[str, ...], str]] = []
_patched: list[ModuleType] = []  # accelerate.accelerator, accelerate.state
_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # prepared models: no attribute of theirs


def driver() -> Driver | None:
    return _driver[0] if _driver else None


def begin(by_name: bool = False) -> Driver | None:
    """Claim the training when the script makes an Accelerator. Return None if we do not drive it.
    Raises BadInput."""
    if _driver:
        return _driver[0]
    run = framework_claim.claim("accelerate", by_name=by_name, hide=False)
    if run is None:
        return None
    for found in _unlike:
        framework_claim.refuse_unlike(*found)
    if config := os.environ.get(CONFIG_FILE):
        os.environ |= sharding.variables_of(config) | dict(os.environ)
    if run.device.type == "cpu":
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerate sees a single process
    _driver.append(Driver(run))
    from accelerate.state import AcceleratorState, PartialState

    if PartialState._shared_state.get("num_processes", run.world) != run.world:
        AcceleratorState._reset_state(reset_partial_state=True)  # made before the driver was
    vars(run)["conclude"] = functools.partial(_conclude, run.conclude)
    return _driver[0]


def _conclude(conclude: Callable[[], None]) -> None:
    _driver[0].ended()
    _driver[0].share_model()
    conclude()


def patch(module: ModuleType) -> None:
    """Patch `module`, which is accelerate.accelerator, and the modules that it uses. Runs once."""
    if _patched:
        return
    import accelerate
    from accelerate import data_loader, optimizer, scheduler, state

    _patched.extend((module, state))

    version = f"accelerate {accelerate.__version__}"
    accelerator = module.Accelerator
    classes = {
        "Accelerator": accelerator,
        "AcceleratedOptimizer": optimizer.AcceleratedOptimizer,
        "AcceleratedScheduler": scheduler.AcceleratedScheduler,
        "DataLoaderShard": data_loader.DataLoaderShard,
        "DataLoaderAdapter": data_loader.DataLoaderAdapter,
    }
    for name, parameters in KNOWN.items():
        owner, _, attribute = name.partition(".")
        function = getattr(classes[owner], attribute)
        if tuple(inspect.signature(function).parameters) != ("self", *parameters):
            _unlike.append((name, function, ("self", *parameters), version))
    for name, function in _ACCELERATOR.items():
        _around(accelerator, name, function)
    accelerator.num_processes = property(_num_processes)
    _around(optimizer.AcceleratedOptimizer, "step", _optimizer_step)
    _around(optimizer.AcceleratedOptimizer, "zero_grad", _zero_grad)
    _around(scheduler.AcceleratedScheduler, "step", _scheduler_step)
    _around(data_loader.DataLoaderAdapter, "__len__", _loader_len)
    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        _around(kind, "__iter__", _loader_iter)
    _around(data_loader, "skip_first_batches", _skip)
    homes: list[Any] = [module, accelerate]
    for home in homes:
        home.skip_first_batches = data_loader.skip_first_batches
    _around(state.PartialState, "destroy_process_group", _destroy)


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace `original(self, ...)` with `function(original, self, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, patched)


# ---- Accelerator ---------------------------------------------------------------------------------
def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    drives = begin()
    original(self, *args, **kwargs)
    if drives is None:
        return
    sharding.check(self, drives.run)
    if self.state.num_processes != drives.run.world:
        raise BadInput(
            f"wanted Accelerate to see {drives.run.world} ranks, found {self.state.num_processes}; "
            "let no accelerate config or variable (ACCELERATE_*) say how many there are"
        )
    if self.distributed_type.name == "DEEPSPEED" and not drives.prepared.accelerators:
        within_copies(drives.run, drives.ranks)
    drives.prepared.accelerators.append(self)


def _num_processes(self: Any) -> int:
    drives = driver()
    return int(self.state.num_processes) if drives is None else drives.ranks


def _prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Begin the run's next phase if the script, which has trained, prepares another optimizer."""
    drives = driver()
    if drives is not None and any(isinstance(one, torch.optim.Optimizer) for one in args):
        _driver[0] = drives.next_phase(sys._getframe())
    return original(self, *args, **kwargs)


def _prepare_model(
    original: Any,
    self: Any,
    model: Any,
    device_placement: Any = None,
    evaluation_mode: bool = False,
) -> Any:
    if driver() is None:
        return original(self, model, device_placement, evaluation_mode)
    prepared = original(self, model, device_placement, True)
    if not evaluation_mode:
        _watch_forward(prepared)
    return prepared


def _prepare_fsdp2(original: Any, self: Any, *args: Any) -> Any:
    drives = driver()
    if drives is None:
        return original(self, *args)
    with sharding.within(drives.run):
        prepared = original(self, *args)
    for one in prepared:
        if isinstance(one, FSDPModule):
            _watch_forward(one)
    return prepared


def _prepare_deepspeed(original: Any, self: Any, *args: Any) -> Any:
    prepared = original(self, *args)
    if driver() is not None and (engine := zero_engine(self)) is not None:
        _watch_forward(engine)
    return prepared


def _no_sync(original: Any, self: Any, model: Any) -> Any:
    """Leave alone in which backward FSDP2 or DeepSpeed reduces: in that of a copy's last
    micro-batch."""
    drives = driver()
    if drives is None or not (self.is_fsdp2 or zero_engine(self) is not None):
        return original(self, model)
    return contextlib.nullcontext()


def _watch_forward(model: Any) -> None:
    if model in _watched:
        return
    _watched.add(model)
    # FSDP2 gathers and frees parameters in hooks, so a call is repeated or left out with them
    name = "_call_impl" if isinstance(model, FSDPModule) else "forward"
    forward = getattr(model, name)
    bound = isinstance(forward, MethodType) and forward.__self__ is model
    function = forward.__func__ if bound else None
    if getattr(function, "harness_watches", False):  # a copy of a prepared model is watched already
        return

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        real = forward if function is None else MethodType(function, self)
        drives = driver()
        # a copy of the model (a weight average, for example) is not a prepared model
        if drives is None or self not in _watched:
            return real(*args, **kwargs)
        return drives.forward(self, real, args, kwargs)

    functools.update_wrapper(watched, function or forward)
    vars(watched)["harness_watches"] = True
    setattr(model, name, MethodType(watched, model))


def _prepare_data_loader(original: Any, self: Any, data_loader: Any, *args: Any, **kw: Any) -> Any:
    drives = driver()
    if drives is None or getattr(data_loader, "_is_accelerate_prepared", False):
        return original(self, data_loader, *args, **kw)
    _give_generator(data_loader, self.use_seedable_sampler)
    given = data_loader
    if drives.run.world == 1 < drives.ranks and self.even_batches and not self.split_batches:
        given = whole_batches(data_loader)
    ranks, drives.ranks = drives.ranks, drives.run.world  # evaluation is shared over the real ranks
    try:
        prepared = original(self, given, *args, **kw)
    finally:
        drives.ranks = ranks
    prepared.harness_raw = data_loader
    return prepared


def _give_generator(loader: Any, seedable: bool) -> None:
    """Seed the sampler as Accelerate does for several processes: the order must be the same
    anywhere."""
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    if isinstance(sampler, RandomSampler) and sampler.generator is None and not seedable:
        sampler.generator = torch.Generator()
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator.manual_seed(seed)


def _backward(original: Any, self: Any, loss: Any, **kwargs: Any) -> None:
    drives = driver()
    if drives is None:
        original(self, loss, **kwargs)
        return
    drives.backward(loss, lambda scaled: original(self, scaled, **kwargs))
    if drives.prepared.engine is not None and self.sync_gradients:
        drives.engine_steps()


def _clip(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    drives = driver()
    if drives is not None and drives.prepared.engine is not None:  # it has stepped in backward
        return 0.0 if drives.replaying else original(self, *args, **kwargs)
    if drives is None or not drives.training or drives.sync():
        return original(self, *args, **kwargs)
    # the gradients are not complete yet, so there is nothing to clip
    return torch.zeros((), device=self.device)


def _save(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    drives = driver()
    if drives is not None and drives.replaying:
        if original.__name__ == "save_state":
            self.project_configuration.iteration += 1
        return None
    if drives is not None and original.__name__ == "save_state":
        _clear_leftover(self, drives)
    return original(self, *args, **kwargs)


def _tracker(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return something that takes everything during replay: the script may call any method of it
    (Accelerate's own blank tracker has none of a writer's)."""
    drives = driver()
    if drives is not None and drives.replaying:
        return Swallow()
    return original(self, *args, **kwargs)


def _clear_leftover(self: Any, drives: Driver) -> None:
    """Remove a numbered folder that was written by steps that were lost and have been repeated."""
    resumed = drives.feed is not None and drives.feed.resumed
    if not (resumed and self.project_configuration.automatic_checkpoint_naming):
        return
    folder = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
    if self.is_local_main_process and os.path.isdir(folder):
        shutil.rmtree(folder)
    self.wait_for_everyone()


def _load_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    drives = driver()
    if drives is not None and drives.has_snapshot():
        return None  # the run's state is newer than what the script began from
    return original(self, *args, **kwargs)


def _gather(original: Any, self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    drives = driver()
    if drives is None or not drives.replaying:
        return original(self, value, *args, **kwargs)
    from accelerate.utils import recursively_apply

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.reshape(tensor.shape or (1,))] * drives.run.world)

    return recursively_apply(repeated, value)


def _alone(original: Any, self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `value` itself during replay, where all ranks have the same value."""
    drives = driver()
    if drives is None or not drives.replaying:
        return original(self, value, *args, **kwargs)
    return value


def _barrier(original: Any, self: Any) -> None:
    drives = driver()
    if drives is None or not drives.replaying:
        original(self)


def _skip(original: Any, dataloader: Any, num_batches: int = 0) -> Any:
    made = original(dataloader, num_batches)
    if driver() is not None and family(dataloader) is not None:
        made.harness_raw = family(dataloader)
        made.harness_skip = getattr(dataloader, "harness_skip", 0) + num_batches
    return made


def _end_training(original: Any, self: Any) -> None:
    drives = driver()
    if drives is not None:
        drives.ended()
    original(self)
    if drives is not None and drives.loop is not None and "HARNESS_MARK" not in os.environ:
        drives.share_model()
        drives.loop.finished()  # nobody waits for the script to end


def _destroy(original: Any, self: Any, group: Any = None) -> None:
    if driver() is None or group is not None:
        original(self, group)  # our process group lives until the process ends


_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "prepare": _prepare,
    "_prepare_deepspeed": _prepare_deepspeed,
    "_prepare_fsdp2": _prepare_fsdp2,
    "no_sync": _no_sync,
    "prepare_model": _prepare_model,
    "prepare_data_loader": _prepare_data_loader,
    "backward": _backward,
    "clip_grad_norm_": _clip,
    "clip_grad_value_": _clip,
    "unscale_gradients": _clip,
    "save_state": _save,
    "save_model": _save,
    "save": _save,
    "log": _save,
    "load_state": _load_state,
    "get_tracker": _tracker,
    "gather": _gather,
    "reduce": _alone,
    "pad_across_processes": _alone,
    "wait_for_everyone": _barrier,
    "end_training": _end_training,
}


# ---- optimizers, schedulers, loaders -------------------------------------------------------------
def _optimizer_step(original: Any, self: Any, closure: Any = None) -> Any:
    drives = driver()
    if drives is None or not self.gradient_state.sync_gradients:
        return original(self, closure)
    if closure is not None and drives.training:
        raise BadInput(
            "wanted optimizer.step() without a closure: what calls the model again by itself "
            "cannot be shared out over ranks"
        )
    return drives.optimize(self, lambda: original(self, closure))


def _zero_grad(original: Any, self: Any, set_to_none: Any = None) -> None:
    drives = driver()
    if drives is None or not self.gradient_state.sync_gradients:
        original(self, set_to_none)
    else:
        drives.zero(lambda: original(self, set_to_none))


def _scheduler_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    drives = driver()
    if drives is None:
        original(self, *args, **kwargs)
        return
    if drives.replaying:
        return
    # it steps once for each process of the world size that the script was written for
    state = _patched[1].PartialState._shared_state
    world, state["num_processes"] = state["num_processes"], drives.ranks
    try:
        original(self, *args, **kwargs)
    finally:
        state["num_processes"] = world


def _loader_len(original: Any, self: Any) -> int:
    drives = driver()
    if drives is None or not drives.trains(self):
        return int(original(self))
    return drives.rounds(self)


def _loader_iter(original: Any, self: Any) -> Any:
    drives = driver()
    if drives is None:
        return original(self)
    if drives.trains(self):
        return drives.iterate(self)
    return drives.evaluate(self, lambda: original(self))
