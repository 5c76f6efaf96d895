"""DeepSpeed's ZeRO engine as a strategy: `harness.deepspeed`. Its engine trains, our plan feeds it,
our snapshots keep its state. Runs in the worker.

The module knows DeepSpeed only through the engine that it is given; `ZeroPart` is what
a rank holds of each parameter. docs/trainers/deepspeed.md states what is guaranteed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.core.world import BadInput
from harness.worker.alone import world
from storage.tensors.flat_shards import Pieces

if TYPE_CHECKING:
    from harness.worker.session import Session

# The parts of each parameter, and of its optimizer state, that a rank holds under DeepSpeed's
# ZeRO.

MASTER = "master"  # the optimizer's copy of a parameter whose model copy has less precision


@dataclass(frozen=True)
class ZeroPart:
    """A part of `parameter`, in the optimizer's group `group`: elements [first, first + count), in
    row-major order, lie at offset `at` of `flat`, and of the optimizer's state for `flat`."""

    parameter: Any
    group: int
    flat: torch.Tensor
    at: int
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        found: torch.Size = getattr(self.parameter, "ds_shape", self.parameter.shape)
        return found

    def of(self, flat: torch.Tensor) -> Pieces:
        """Return this part of `flat`, which has the shape of `self.flat`."""
        part = flat.detach()[self.at : self.at + self.count]
        return Pieces.of_flat(self.shape, self.first, part)

    def own(self) -> torch.Tensor:
        """Return these elements of the model's own parameter. (count,)"""
        p = self.parameter
        if hasattr(p, "ds_tensor"):
            flat, first = p.ds_tensor.detach(), 0
        else:
            flat, first = p.detach().reshape(-1), self.first
        found: torch.Tensor = flat[first : first + self.count]
        return found


def parts_of(zero: Any) -> list[ZeroPart]:
    """Return the parts of all trained parameters, in the order of the optimizer's groups. `zero`:
    DeepSpeed's optimizer."""
    if hasattr(zero, "fp16_groups"):
        return _of_stage_3(zero)
    found = []
    for number, group in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        for p in group:
            link = p._hp_mapping  # None: all of it is on other ranks
            at, first, count = 0, 0, 0
            if link is not None:
                place, whole = link.hp_fragment_address, link.lp_fragment_address
                at, first, count = place.start, whole.start, place.numel
            found.append(ZeroPart(p, number, flat, at, first, count))
    return found


def _of_stage_3(zero: Any) -> list[ZeroPart]:
    found = []
    for number, group in enumerate(zero.fp16_groups):
        for p in group:
            _, at, _ = zero.grad_position[zero.get_param_id(p)]
            flat, of = zero.fp32_partitioned_groups_flat[number], zero.sub_group_to_group_id
            first, count = _of_rank(p)
            found.append(ZeroPart(p, int(of[number]), flat, int(at), first, count))
    return found


def _of_rank(p: Any) -> tuple[int, int]:
    """Return this rank's first element and count for a ZeRO-3 parameter; the rest is padding."""
    size, rank = int(p.ds_tensor.ds_numel), p.ds_process_group.rank()
    first = min(rank * size, int(p.ds_numel))
    return first, min(size, int(p.ds_numel) - first)


def pieces_of(p: Any) -> Pieces:
    """Return this rank's part of a parameter that ZeRO-3 has cut, as the model holds it."""
    first, count = _of_rank(p)
    return Pieces.of_flat(p.ds_shape, first, p.ds_tensor.detach()[:count])


def state_of(parts: list[ZeroPart], optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the state as torch's optimizers do, but in pieces: parameter number, name -> value."""
    found: dict[int, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        kept = optimizer.state.get(part.flat, {})
        own = found[number] = {
            key: part.of(value) if _is_flat(value, part.flat) else value
            for key, value in kept.items()
        }
        if part.parameter.dtype != part.flat.dtype:
            own[MASTER] = part.of(part.flat)
    return found


def take_state(parts: list[ZeroPart], optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Load the result of `state_of`. Afterwards the optimizer's copy of the parameters equals the
    model's."""
    with torch.no_grad():
        for number, part in enumerate(parts):
            own = dict(state.get(number, {}))
            if MASTER in own:
                part.of(part.flat).copy_from(own.pop(MASTER))
            else:
                part.flat[part.at : part.at + part.count].copy_(part.own())
            if not own:
                continue
            kept = optimizer.state[part.flat]
            for key, value in own.items():
                if isinstance(value, Pieces):
                    if key not in kept:
                        kept[key] = torch.zeros_like(part.flat, dtype=value.dtype)
                    part.of(kept[key]).copy_from(value)
                else:
                    kept[key] = value


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


# attributes of an engine
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# attributes of DeepSpeed that are used besides its documented methods, and where
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
    """Take over a DeepSpeed engine (ZeRO-1, 2 or 3; its optimizer or parameters may be offloaded to
    the CPU) and return it. Call this instead of `run.prepare`; `state`, `per_rank` and
    `after_update` are the same as there.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        harness.deepspeed(engine, run)
        for step in run.steps(dataset, total=1000, global_batch=64, micro_batch=8):
            for x, y in step:
                step.backward(loss_fn(engine(x), y))
            step.update()

    The batch is that of `run.steps`; the config's accumulation is not used. Clipping, loss scale
    and learning rate are the engine's (`gradient_clipping`, `fp16`, `scheduler`). Raises BadInput,
    naming the feature, if the engine uses one that is not supported.
    """
    check(engine, run.world, "harness.deepspeed(engine, run)")
    optimizer = ZeroOptimizer(engine)
    # DeepSpeed owns the loss scale of fp16; the session must know that norms may be infinite
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


def check(engine: Any, ranks: int, who: str) -> None:
    """Raise BadInput, beginning with `who`, unless `engine` spans `ranks` and can be kept."""
    kinds = {cls.__name__ for cls in type(engine).__mro__}
    if "DeepSpeedEngine" not in kinds:
        raise BadInput(
            f"{who}: wanted what deepspeed.initialize(...) returns first, "
            f"found {type(engine).__name__}; pip install deepspeed, or use harness.fsdp2(model, "
            "run), which needs nothing else"
        )
    import deepspeed as package

    stage = int(engine.zero_optimization_stage())
    wanted = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
    found = type(engine.optimizer).__name__
    spanned = engine.data_parallel_group.size()
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
            spanned != ranks,
            f"all {ranks} ranks data-parallel, found {spanned} (tensor or sequence parallelism?)",
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
            raise BadInput(f"{who}: wanted {what}; {instead}")
    for thing, names in (
        (engine, USED["engine"]),
        (engine.optimizer, (*USED["optimizer"], *OF_STAGE[stage])),
    ):
        if missing := [name for name in names if not hasattr(thing, name)]:
            raise BadInput(
                f"{who}: {type(thing).__name__} of deepspeed {package.__version__} has "
                f"no {', '.join(missing)}; use deepspeed 0.19, which this was written for"
            )


class Zero:
    """The `Strategy` of a ZeRO engine. The engine averages over ranks during the backward of the
    last micro-batch. The rest (from that mean to the mean of the global batch, and our clipping) is
    one factor, which is applied through the loss scale that the engine divides by in its step."""

    equal_rounds, may_repeat = True, False
    sums, replica_ranks = "fast", 1

    def __init__(self, engine: Any, optimizer: ZeroOptimizer, ranks: int):
        self.name = f"zero{int(engine.zero_optimization_stage())}"
        self._engine, self._optimizer, self._ranks = engine, optimizer, ranks
        self._micro_batches = 1

    def start(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    def micro(self, last: bool, filler: bool = False) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        """Scale the loss so that the engine's average over ranks becomes one over micro-batches.
        Sums of many losses might not fit fp16."""
        scaled = loss * (self._ranks / self._micro_batches)
        self._engine.backward(scaled, scale_wrt_gas=False)

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def reduce(self) -> None:
        """Wait for offloaded gradients. The reduction itself happened during the last backward."""
        getattr(self._engine.optimizer, "_wait_for_offload_copies", lambda: None)()

    def divide(self, weight: float | torch.Tensor) -> None:
        scale = float(self._engine.optimizer.loss_scale)
        self._optimizer.divisor = scale * float(weight) / self._micro_batches

    @world.outside()
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
        # otherwise the norm is infinite, and the engine skips the step
        if (factor := float(coefficient)) > 0.0:
            self._optimizer.divisor /= factor

    def zero(self) -> None:
        """Leave this to the engine's step, which zeroes the gradients."""

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """Leave this to the engine, which checks on all ranks."""


@dataclass(frozen=True)
class _Behind:
    """A holder that is not a module, so that its members do not become submodules."""

    engine: Any
    module: nn.Module


class ZeroModel(nn.Module):
    """The engine's module. Its state holds each parameter under its whole shape, even where ZeRO-3
    has partitioned it."""

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

    @world.outside()
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load values: pieces are filled in place, what ZeRO-3 keeps gathered is gathered again."""
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
    """Everything in the engine that steps, as one optimizer. `divisor`: divides the gradients in
    the next step."""

    def __init__(self, engine: Any):
        self._engine, self.divisor = engine, 1.0
        self._parts: list[ZeroPart] = parts_of(engine.optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with the model's parameters instead of DeepSpeed's flat ones."""
        groups = [dict(group) for group in self._engine.optimizer.param_groups]
        for number, group in enumerate(groups):
            group["params"] = [part.parameter for part in self._parts if part.group == number]
        return groups

    def parts(self) -> list[Pieces]:
        """Return the layout of this rank's state per parameter
        (`storage.tensors.loading.like_parameters`)."""
        return [part.of(part.flat) for part in self._parts]

    def take_weights(self) -> None:
        """Let the optimizer's copy of the parameters equal the model's."""
        take_state(self._parts, self._engine.optimizer.optimizer, {})

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

    @world.outside()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine, zero = self._engine, self._engine.optimizer
        for group, saved in zip(zero.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        take_state(self._parts, zero.optimizer, state["state"])
        # views of tensors that may have been replaced
        if hasattr(zero, "_hp_optimizer_states_linked"):
            zero._hp_optimizer_states_linked = False
            if zero.optimizer.state:
                zero._lazy_init_hp_params_optimizer_state()
        for name, value in state["engine"].items():
            setattr(engine, name, value)
        vars(zero.loss_scaler).update(state["scale"])
        if state["scheduler"]:
            engine.lr_scheduler.load_state_dict(state["scheduler"])


class ZeroScaler:
    """The part of GradScaler's interface that a session uses. The engine scales losses and skips
    steps whose gradients overflow; its scale is in the state of `ZeroOptimizer`."""

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
