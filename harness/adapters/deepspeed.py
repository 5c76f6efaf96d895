"""DeepSpeed's ZeRO engine as a strategy: `harness.deepspeed`. Its engine trains, our plan feeds it,
our snapshots keep its state. Runs in the worker.

Knows DeepSpeed only by the engine that it is given; what it keeps of each parameter is in
`zero_parts.py`. docs/trainers/deepspeed.md says what holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.adapters.zero_parts import ZeroPart, parts_of, pieces_of, state_of, take_state
from harness.core.world import BadInput
from storage.pieces import Pieces

if TYPE_CHECKING:
    from harness.worker.session import Session

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")  # of an engine
# what is used of DeepSpeed beside its documented methods, and where
USED = {
    "engine": ("set_gradient_accumulation_boundary", "zero_optimization_stage", *COUNTERS),
    "optimizer": ("optimizer", "loss_scaler", "custom_loss_scaler", "external_loss_scale"),
}
OF_STAGE = {
    1: ("bit16_groups", "single_partition_of_fp32_groups", "scaled_global_norm"),
    2: ("bit16_groups", "single_partition_of_fp32_groups", "scaled_global_norm"),
    3: ("fp16_groups", "fp32_partitioned_groups_flat", "grad_position", "persistent_parameters"),
}


def deepspeed(
    engine: Any,
    run: Session,
    *,
    state: Mapping[str, Any] | None = None,
    per_rank: Collection[str] = (),
    after_update: Collection[str] = (),
) -> Any:
    """Take over a DeepSpeed engine (ZeRO-1, 2 or 3; its optimizer or parameters may be offloaded
    to the CPU); in the place of `run.prepare`, whose `state`, `per_rank` and `after_update` these
    are. The engine is returned.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        harness.deepspeed(engine, run)
        for step in run.steps(dataset, total=1000, global_batch=64, micro_batch=8):
            for x, y in step:
                step.backward(loss_fn(engine(x), y))
            step.update()

    The batch is that of `run.steps`; the config's accumulation is not used. Clipping, loss scale
    and learning rate are the engine's (`gradient_clipping`, `fp16`, `scheduler`). Raises BadInput,
    naming it, for what the engine does otherwise.
    """
    check(engine, run)
    optimizer = ZeroOptimizer(engine)
    # the loss scale of fp16 is DeepSpeed's; a session wants to know that norms may be infinite
    scaler = ZeroScaler(engine) if engine.fp16_enabled() else None
    run.prepare(
        ZeroModel(engine),
        optimizer,  # type: ignore[arg-type] # all that is used of one
        scaler=scaler,
        state=state,
        per_rank=per_rank,
        after_update=after_update,
        strategy=Zero(engine, optimizer, run.world),
    )
    return engine


def check(engine: Any, run: Session) -> None:
    """Raises BadInput unless this is an engine that is trained, and saved, as it is."""
    kinds = {cls.__name__ for cls in type(engine).__mro__}
    if "DeepSpeedEngine" not in kinds:
        raise BadInput(
            f"harness.deepspeed(engine, run): wanted what deepspeed.initialize(...) returns first, "
            f"found {type(engine).__name__}; pip install deepspeed, or use harness.fsdp2(model, "
            "run), which needs nothing else"
        )
    import deepspeed as package

    stage = int(engine.zero_optimization_stage())
    wanted = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
    found = type(engine.optimizer).__name__
    ranks = dist.get_world_size(engine.data_parallel_group)
    for wrong, what, instead in (
        (
            "PipelineEngine" in kinds,
            "an engine without pipeline stages, found a PipelineEngine",
            "use a mesh of ours with pp (docs/MESHES.md)",
        ),
        (
            found not in wanted,
            f"a ZeRO optimizer, found {found} (zero_optimization.stage={stage})",
            'set zero_optimization.stage to 1, 2 or 3; with bf16 and stage 1 also {"data_types": '
            '{"grad_accum_dtype": "bf16"}}, or stage 2',
        ),
        (
            ranks != run.world,
            f"all {run.world} ranks data-parallel, found {ranks} (tensor or sequence parallelism?)",
            "leave mpu and tensor_parallel out",
        ),
        (
            engine.has_moe_layers,
            "a model without DeepSpeed's experts, found some",
            "use a mesh of ours with ep (docs/MESHES.md)",
        ),
        (
            getattr(engine.optimizer, "swap_optimizer", False)
            or getattr(engine.optimizer, "params_in_nvme_and_cpu", False),
            "state in memory, found some on NVMe",
            'use {"device": "cpu"} to offload to',
        ),
        (
            not getattr(engine, "managed_gradient_accumulation", lambda: True)(),
            "an accumulation that the engine keeps, found managed_gradient_accumulation=false",
            "leave it out of the config",
        ),
        (
            getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None,
            "a loss scale of DeepSpeed's own, found torch_autocast with float16",
            "use bfloat16 there, or fp16",
        ),
        (
            bool(getattr(engine, "zenflow", False)),
            "an update at each step, found zenflow",
            "leave it out of the config",
        ),
    ):
        if wrong:
            raise BadInput(f"harness.deepspeed(engine, run): wanted {what}; {instead}")
    for thing, names in (
        (engine, USED["engine"]),
        (engine.optimizer, (*USED["optimizer"], *OF_STAGE[stage])),
    ):
        if missing := [name for name in names if not hasattr(thing, name)]:
            raise BadInput(
                f"harness.deepspeed: {type(thing).__name__} of deepspeed {package.__version__} has "
                f"no {', '.join(missing)}; use deepspeed 0.19, which this was written for"
            )


class Zero:
    """A `Strategy`. The engine averages over ranks during the backward of the last micro-batch;
    what remains (from their mean to the mean of the global batch, our clipping) is one factor,
    which goes into the loss scale that it divides by in its step."""

    equal_rounds, may_repeat = True, False
    sums, replica_ranks = "fast", 1

    def __init__(self, engine: Any, optimizer: ZeroOptimizer, world: int):
        self.name = f"zero{int(engine.zero_optimization_stage())}"
        self._engine, self._optimizer, self._world = engine, optimizer, world
        self._micro_batches = 1

    def start(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    def micro(self, last: bool, filler: bool = False) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        """Losses are scaled so that the engine's average over ranks is one over micro-batches:
        sums of many might not fit fp16."""
        scaled = loss * (self._world / self._micro_batches)
        self._engine.backward(scaled, scale_wrt_gas=False)

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def reduce(self) -> None:
        """It was, during the last backward; offloaded gradients may be on their way."""
        getattr(self._engine.optimizer, "_wait_for_offload_copies", lambda: None)()

    def divide(self, weight: float | torch.Tensor) -> None:
        scale = float(self._engine.optimizer.loss_scale)
        self._optimizer.divisor = scale * float(weight) / self._micro_batches

    def norm(self) -> torch.Tensor:
        zero = self._engine.optimizer
        if hasattr(zero, "scaled_global_norm"):
            found = zero.scaled_global_norm()
        else:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            found = combine_grad_norm_groups(zero._get_norm_groups())
        total = torch.as_tensor(found, dtype=torch.float32, device=self._engine.device)
        return torch.where(total < 0, torch.inf, total) / self._optimizer.divisor

    def clip(self, coefficient: torch.Tensor) -> None:
        if (factor := float(coefficient)) > 0.0:  # else the norm is infinite: the engine skips it
            self._optimizer.divisor /= factor

    def zero(self) -> None:
        """The engine's step does."""

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """The engine looks on all ranks."""


@dataclass(frozen=True)
class _Behind:
    """Not a module, so that these do not become parts of one."""

    engine: Any
    module: nn.Module


class ZeroModel(nn.Module):
    """The engine's module, with a state that holds each parameter under its whole shape, also
    where ZeRO-3 has parted it."""

    def __init__(self, engine: Any):
        super().__init__()
        module = engine.module
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = module._modules
        self.train(module.training)
        self._whole = _Behind(engine, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole.engine(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self._whole.module.state_dict(keep_vars=True)
        return {
            name: pieces_of(t) if hasattr(t, "ds_tensor") else t.detach()
            for name, t in found.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Pieces were filled where they lie. What ZeRO-3 keeps gathered is gathered anew."""
        now = self.state_dict()
        with torch.no_grad():
            for name, value in state_dict.items():
                if isinstance(value, Pieces):
                    now[name].copy_from(value)
                else:
                    now[name].copy_(value)
        zero = self._whole.engine.optimizer
        if persistent := getattr(zero, "persistent_parameters", None):
            zero._partition_all_parameters()
            persistent[0].all_gather(persistent)


class ZeroOptimizer:
    """All of the engine that steps, as an optimizer. `divisor`: of the gradients, in the next
    step."""

    def __init__(self, engine: Any):
        self._engine, self.divisor = engine, 1.0
        self._parts: list[ZeroPart] = parts_of(engine.optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """With the model's parameters in the place of DeepSpeed's flat ones."""
        groups = [dict(group) for group in self._engine.optimizer.param_groups]
        for number, group in enumerate(groups):
            group["params"] = [part.parameter for part in self._parts if part.group == number]
        return groups

    def parts(self) -> list[Pieces]:
        """What this rank's state of each parameter is like (`storage.dcp.like_parameters`)."""
        return [part.of(part.flat) for part in self._parts]

    def step(self) -> None:
        zero = self._engine.optimizer
        zero.custom_loss_scaler, zero.external_loss_scale = True, self.divisor
        try:
            self._engine.step()
        finally:
            zero.custom_loss_scaler = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        engine, zero = self._engine, self._engine.optimizer
        scheduler = engine.lr_scheduler
        return {
            "state": state_of(self._parts, zero.optimizer),
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in zero.param_groups
            ],
            "engine": {name: getattr(engine, name) for name in COUNTERS},
            "scale": {
                name: value
                for name, value in vars(zero.loss_scaler).items()
                if isinstance(value, bool | int | float)
            },
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine, zero = self._engine, self._engine.optimizer
        for group, saved in zip(zero.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        take_state(self._parts, zero.optimizer, state["state"])
        if hasattr(zero, "_hp_optimizer_states_linked"):  # views of what may be new
            zero._hp_optimizer_states_linked = False
            if zero.optimizer.state:
                zero._lazy_init_hp_params_optimizer_state()
        for name, value in state["engine"].items():
            setattr(engine, name, value)
        vars(zero.loss_scaler).update(state["scale"])
        if state["scheduler"]:
            engine.lr_scheduler.load_state_dict(state["scheduler"])


class ZeroScaler:
    """What a session asks of a GradScaler. Scaling, and skipping of a step whose gradients do not
    fit, are the engine's; its scale is in `ZeroOptimizer`'s state."""

    def __init__(self, engine: Any):
        self._engine = engine

    def get_scale(self) -> float:
        return float(self._engine.optimizer.loss_scaler.cur_scale)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def unscale_(self, optimizer: ZeroOptimizer) -> None: ...

    def step(self, optimizer: ZeroOptimizer) -> None:
        optimizer.step()

    def update(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
