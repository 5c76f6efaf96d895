"""The training state: the objects given to `prepare`, as one state that is saved and loaded. Runs
in the worker."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from harness.core.mesh import ModelMesh
from harness.core.world import BadInput
from harness.worker import alone
from harness.worker.batches.loader import Stream
from harness.worker.frozen_weights import Frozen
from harness.worker.gradients.batch_norm import Norms, has_sync_norm
from harness.worker.gradients.exact_sums import exact_strategy_for
from harness.worker.gradients.parallel import (
    Replicated,
    Sharded,
    Single,
    Strategy,
    check_fits,
    strategy_for,
)
from harness.worker.gradients.router_loads import Loads
from harness.worker.gradients.sharding import (
    check_real,
    holds_experts,
    is_sharded,
    model_to_device,
)
from harness.worker.optimizer_state import SeveralOptimizers, as_stepped
from harness.worker.process_group import Peers, broadcast_all, same_everywhere
from harness.worker.staged_model import StagedModel, StagedState
from storage.snapshots.manifest import Manifest
from storage.snapshots.snapshots import Snapshots
from storage.tensors import loading, quantised_weights, state_tree
from storage.tensors.dcp import version_of
from storage.tensors.tensor_names import plain_name

if TYPE_CHECKING:
    from harness.worker.step import Sums, Work

# Copies of a model's buffers from before a step that may be repeated.


class Buffers:
    """Copies of a model's buffers from before a step, in case the step must be repeated.

    The first step copies all buffers. Later steps copy only those that some earlier step changed,
    since no change of the others has been seen.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._living: set[str] | None = None  # names that some step changed; None: not known yet
        # names of those that every rank takes from rank 0 after each step; None: not determined
        self.shared: list[str] | None = None
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """Copy the buffers at the beginning of a step, or before the first step."""
        now = dict(self._model.named_buffers())
        self._versions = {name: (b, version_of(b)) for name, b in now.items()}
        self._copies = {
            name: b.detach().clone()
            for name, b in now.items()
            if self._living is None or name in self._living
        }

    def changed(self) -> list[str]:
        """Return the names of the buffers that changed or were replaced since `note`."""
        now = dict(self._model.named_buffers())
        norms = {
            id(b)
            for m in self._model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)
            for b in m.buffers(recurse=False)
        }
        return [  # a norm's kernel changes its statistics without a new version number
            name
            for name, (b, version) in self._versions.items()
            if now.get(name) is not b or version_of(b) != version or id(b) in norms
        ]

    def ever_changed(self) -> list[str]:
        """Return the names of the buffers that changed since `note`, or in a step before."""
        return sorted((self._living or set()) | set(self.changed()))

    def learn(self) -> None:
        """Record, after a step that is not repeated, which buffers it changed; drop the copies."""
        self._living = set(self.ever_changed())
        self._copies = {}

    def without_copy(self) -> list[str]:
        """Return the names of the buffers that changed in place since `note` and have no copy."""
        return [
            name
            for name, (b, version) in self._versions.items()
            if name not in self._copies and version_of(b) != version
        ]

    def restore(self) -> str:
        """Put the buffers back for a step that is repeated or dropped. Return a warning that names
        a buffer of which there is no copy, or ""."""
        lost = self.without_copy()
        with torch.no_grad():
            for name in self.changed():
                b = self._versions[name][0]
                if name in self._copies:
                    b.copy_(self._copies[name])
                owner, _, key = name.rpartition(".")
                # the script may have put another tensor in its place
                self._model.get_submodule(owner)._buffers[key] = b
        if lost:
            return (
                f"the buffer {lost[0]!r} (one of {len(lost)}) changed for the first time in a step "
                "that had to be done again, so it was changed twice; change it where step.attempt "
                "is 0"
            )
        return ""


RANK_MARK = "@r"  # separates a name and a rank
# names that snapshots use for objects other than those in `state`
GUARDS = "guards"
TAKEN = ("model", "optimizer", "scheduler", "scaler", "reduce", "dataset", "place", GUARDS)


class KeptFiles(Protocol):
    """The files of a script that writes its own checkpoints (`loops/loop_files.py`)."""

    def state_dict(self) -> Any: ...

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None: ...


@dataclass(frozen=True)
class Judged:
    """The judgement of a step before its update, the same on all ranks. `skip`: why the optimizers
    must not step; "": they may. `hold`: then the scheduler does not step either. `most_norm`: clip
    the gradient to this norm; None: do not."""

    skip: str = ""
    hold: bool = False
    most_norm: float | None = None


PASSED = Judged()


@dataclass(frozen=True)
class StepHooks:
    """The functions that are called at the points of a step. `prepare` fixes them; a model that
    needs nothing has none, so that its steps pay nothing."""

    # before the forward of a micro-batch: its number, whether it counts (it is no filler), whether
    # it adds to its earlier forwards (a later pipeline stage)
    before_micro: tuple[Callable[[int, bool, bool], None], ...] = ()
    before_backward: tuple[Callable[[], None], ...] = ()
    # behind the last micro-batch: their number in the step, whether some ranks may have had none
    before_update: tuple[Callable[[int, bool], None], ...] = ()
    after_update: tuple[Callable[[], None], ...] = ()
    # instead of `before_update`, if the update is skipped
    forget: tuple[Callable[[], None], ...] = ()
    # between the sums of a step and its update, with (loss sum, weight, norm, own loss sum); None:
    # there are no guards
    judge: Callable[[Work, Sums, torch.Tensor], Judged] | None = None


class Guard(Protocol):
    """The guards of a run (`guards/step_guard.py`), whose state is a part of snapshots."""

    def hooked(self, hooks: StepHooks, training: Training) -> StepHooks:
        """Return the hooks with those of the guards. Raises BadInput for what they cannot guard."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Training:
    """The training state; empty until `prepare`. `after_update`: names in `state` whose tensors
    change only between an update and the end of the loop's body."""

    strategy: Strategy
    norms: Norms
    loads: Loads

    def __init__(self, peers: Peers, reduce: str):
        self._peers, self.reduce = peers, reduce
        self.hooks = StepHooks()
        # losses are computed on this rank, and it contributes them for its replica
        self.tells_losses = peers.tells_losses
        self.model: nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduler: Any = None
        self.scaler: Any = None
        self.buffers: Buffers | None = None
        self.frozen = Frozen(nn.Module(), [])
        self.after_update: set[str] = set()
        # the state that the next snapshot takes instead of the present one: a step was dropped
        self.put_back: NotedState | None = None
        # the whole model's state, if this rank has only some stages
        self.whole: StagedState | None = None
        self.phases = False  # steps yield their micro-batches more than once
        self.guard: Guard | None = None  # of `attach`, or of `steps`
        self._saved: dict[str, Any] = {}  # name -> object with state_dict
        # names of objects whose state is different on each rank
        self._per_rank: frozenset[str] = frozenset()

    # ---- prepare ---------------------------------------------------------------------------------
    @alone.world.inside()
    def prepare(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: Any,
        scaler: Any,
        state: Mapping[str, Any],
        per_rank: Collection[str],
        after_update: Collection[str],
        strategy: Strategy | None,
    ) -> None:
        """Take over the objects to train; see `Session.prepare`. Raises BadInput."""
        if self.files is not None:
            raise BadInput(
                "run.prepare(...) behind run.files: wanted one of them for all the state"
            )
        check_names(state, per_rank=per_rank, after_update=after_update)
        self.release()
        self._per_rank = frozenset(per_rank)
        check_real(model)
        model_to_device(model, self._peers.device)
        same_everywhere(model, self._peers.across, self._peers.copies)
        self.model, self.optimizers = model, optimizers
        self._check_optimizers()
        self.scheduler, self.scaler = scheduler, scaler
        if isinstance(model, StagedModel):
            self.whole = model.whole(optimizers, lambda: self._peers.mesh.get_group("pp"))
        self._saved = {"model": model, "optimizer": self.whole or SeveralOptimizers(optimizers)}
        self.strategy = self._choose(strategy)
        if self.reduce != "fast":
            self._saved["reduce"] = self.strategy
        for name, thing in {"scheduler": scheduler, "scaler": scaler}.items():
            if thing is not None:
                check_saves(f"prepare({name}=...)", thing)
                self._saved[name] = thing
        for name, thing in state.items():
            check_saves(f"prepare(state={{{name!r}: ...}})", thing)
            self._saved[name] = thing
        self.after_update = {
            *after_update,
            *(name for name, thing in state.items() if isinstance(thing, AveragedModel)),
        }
        self.norms, self.loads = Norms(model, self._peers), Loads(model, self._peers)
        self.watch(self.guard)
        if isinstance(model, StagedModel):
            leads = self._peers.grouping.leads_stage(self._peers.rank)
            self.tells_losses = model.has_last and leads
        self.buffers, self.frozen = Buffers(model), Frozen(model, optimizers)
        self.buffers.note()
        self._check_norms()

    def forgets(self) -> bool:
        """True if forwards have changed buffers that are in no snapshot."""
        if self.model is None or self.buffers is None:
            return False
        saved = self.model.state_dict().keys()
        return any(name not in saved for name in self.buffers.ever_changed())

    def release(self) -> None:
        """Let go of what was prepared before: the same model may be trained again."""
        if self.model is None:
            return
        self.norms.release()
        if isinstance(self.strategy, Replicated):
            self.strategy.release()
        self.put_back = self.whole = None

    def watch(self, guard: Guard | None) -> None:
        """Let these guards judge each step from now on; None: nobody does. Raises BadInput for what
        they cannot guard."""
        self.guard = guard
        self._saved.pop(GUARDS, None)
        self.hooks = self._hooks()
        if guard is not None:
            self._saved[GUARDS] = guard
            self.hooks = guard.hooked(self.hooks, self)

    def _hooks(self) -> StepHooks:
        """Return what this model needs in a step, and this world."""
        norms = [self.norms] if self.norms.watches else []
        loads = [self.loads] if self.loads.watches else []
        exact = self.reduce != "fast"
        average = [partial(one.settle, exact=exact) for one in norms]
        # with exact sums, buffers that differ are refused instead
        shares = self._peers.control is not None and not exact
        return StepHooks(
            before_micro=(*(one.take_up for one in norms), *(one.take_up for one in loads)),
            before_backward=tuple(one.note for one in loads),
            before_update=(*average, *(one.settle for one in loads)),
            after_update=(self.share_buffers,) if shares else (),
            forget=(*(one.forget for one in norms), *(one.forget for one in loads)),
        )

    def _choose(self, asked: Strategy | None) -> Strategy:
        assert self.model is not None
        mesh = self._peers.model_mesh
        if asked is None and mesh is not None and mesh.ep > 1:
            self._check_experts(mesh)
        chosen: Strategy
        if asked is not None:
            chosen = asked
        elif self.reduce == "fast":
            chosen = strategy_for(self.model, self._summing(), self._peers.model_devices)
        else:
            chosen = exact_strategy_for(
                self.model,
                self.reduce,
                self.optimizers,
                self._summing(),
                self._peers.model_devices,
                self.whole.trained if self.whole else (),
            )
        if asked is None:
            self._check_mesh()
        check_fits(chosen, self.reduce, self._peers.replica_ranks)
        return chosen

    def _check_mesh(self) -> None:
        """Check that the model is split as the mesh requires. Raises BadInput."""
        mesh, model = self._peers.model_mesh, self.model
        assert model is not None
        if mesh is None:
            return
        if mesh.pp > 1 and not isinstance(model, StagedModel):
            raise BadInput(
                f"mesh {mesh}: wanted stages made by harness.pipeline(model, run, loss), found a "
                "whole model on each rank; cut it, or leave pp out"
            )
        if mesh.pp > 1 and has_sync_norm(model):
            raise BadInput(
                f"mesh {mesh}: the model has SyncBatchNorm, whose forward waits for all ranks, and "
                "other stages have none of it; use BatchNorm, GroupNorm or LayerNorm"
            )
        if mesh.copy_ranks > mesh.pp and not is_sharded(model):
            raise BadInput(
                f"mesh {mesh}: wanted a model sharded by harness.fsdp2(model, run), found a whole "
                "one on each rank; shard it, or leave the mesh out"
            )

    def _summing(self) -> dist.ProcessGroup | None:
        """Return the ranks that sum gradients of the same parameters; None: all."""
        return self._peers.across if isinstance(self.model, StagedModel) else self._named()

    def _check_experts(self, mesh: ModelMesh) -> None:
        assert self.model is not None
        if not any(holds_experts(module) for module in self.model.modules()):
            raise BadInput(
                f"mesh {mesh}: wanted a model whose experts lie over ep, found none; call "
                "harness.expert_parallel(model, run, experts) before harness.fsdp2, or leave ep out"
            )
        if self.reduce != "fast":
            raise BadInput(
                f"reduce={self.reduce!r} with the mesh {mesh}: an expert's gradient is one sum "
                "over the rows of several replicas' micro-batches, so it depends on the world; "
                "use reduce='fast', or a mesh without ep"
            )

    def _named(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks if the default group is hidden (`alone.py`), else None,
        which stands for the default group."""
        return self._peers.everyone if alone.is_hidden() else None

    def _check_optimizers(self) -> None:
        assert self.model is not None
        held = {
            id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]
        }
        ours = {id(p) for p in self.model.parameters()}
        if not ours & held.keys():
            raise BadInput(
                "the optimizer holds none of the model's parameters; make it from "
                "model.parameters() after fsdp2(model, run), before run.prepare(model, optimizer)"
            )
        for optimizer in self.optimizers:
            kind, sharded = type(optimizer), any(hasattr(p, "to_local") for p in held.values())
            if sharded and kind.__module__.partition(".")[0] == "bitsandbytes":
                raise BadInput(
                    f"bitsandbytes' {kind.__name__} cannot step weights that are sharded; use "
                    "torch's AdamW (optim='adamw_torch_fused'), or torchao's AdamW8bit"
                )
        if foreign := [tuple(p.shape) for i, p in held.items() if i not in ours]:
            raise BadInput(
                "wanted an optimizer of the model's parameters only, found "
                f"{len(foreign)} that are not the model's (the first has shape {foreign[0]}): "
                "nobody would sum their gradients over ranks; put the modules that they are of "
                "into one nn.Module, and prepare that"
            )

    def _check_norms(self) -> None:
        """Check batch norms. SyncBatchNorm's results depend on the world, so it raises BadInput
        with exact sums, and a warning is printed otherwise. BatchNorm raises BadInput if ranks
        share positions."""
        assert self.model is not None
        if self._peers.parts > 1 and self.norms.watches:
            raise BadInput(
                f"mesh {self._peers.model_mesh}: the model has BatchNorm, whose averages are over "
                "all positions, and a rank of cp has some of them; use LayerNorm or RMSNorm"
            )
        if has_sync_norm(self.model):
            what = "the model has SyncBatchNorm, whose forward averages over the ranks that are "
            if self.reduce != "fast":
                raise BadInput(
                    f"reduce={self.reduce!r} promises the same result on any number of ranks, but "
                    f"{what}there; use BatchNorm, whose averages are gathered by micro-batch, "
                    "GroupNorm or LayerNorm, or reduce='fast'"
                )
            self._peers.print(f"harness: {what}there, so results will depend on the world")

    def reads(self, stream: Stream) -> None:
        """Make the place in the stream a part of the state."""
        self._saved["dataset"] = stream

    def keep_files(self, name: str, files: KeptFiles) -> None:
        """Make the files in a folder the whole state. Raises BadInput after `prepare`."""
        if self.model is not None:
            raise BadInput(
                "run.files is for a script that keeps its whole state by itself; with "
                "run.prepare(...) give what else there is as state={'name': object}"
            )
        if self.guard is not None:
            raise BadInput(
                "guards do not see the gradients of a loop with run.files; leave out guards= and "
                "--guards"
            )
        self._saved, self._per_rank = {name: files}, frozenset({name})

    @property
    def files(self) -> KeptFiles | None:
        """The files of a script that writes its own checkpoints; None otherwise."""
        return next(iter(self._saved.values()), None) if self.model is None else None

    def keep_place(self, place: Any) -> Any:
        """Make the place of the next step in the data a part of the state, for data that the
        harness does not read itself. Return the place that is kept: the first one given."""
        return self._saved.setdefault("place", place)

    @property
    def parallel(self) -> str:
        """The name of the model's parallelism; "files" if the script has its own."""
        return self.strategy.name if self.model is not None else "files"

    # ---- buffers ---------------------------------------------------------------------------------
    def share_buffers(self, look: bool = False) -> None:
        """Copy the buffers that forwards change from the first replica to all. `look`: find out
        again which buffers these are, as there may be more than before."""
        if self._peers.control is None or self.model is None or self.buffers is None:
            return
        if self.reduce != "fast":  # with exact sums, buffers that differ are refused instead
            return
        shared = self.buffers.shared
        if look or shared is None:
            every = self._peers.gather(self.buffers.ever_changed())
            shared = sorted({*(shared or ()), *(name for names in every for name in names)})
            self.buffers.shared = shared
        if shared:
            now = dict(self.model.named_buffers())
            with torch.no_grad():  # other pipeline stages have other buffers
                broadcast_all([now[name] for name in shared if name in now], self._peers.across)

    # ---- state -----------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Return the whole state, by the names under which it is stored."""
        return {self._stored(name): state_of(thing) for name, thing in self._saved.items()}

    @property
    def is_readable_alone(self) -> bool:
        """True if every rank can read its part of the state without the others, and a rank of
        another copy of the model has that part too. Where ranks have whole copies, it is all."""
        if self._peers.copy_ranks > 1:
            copies = self._peers.world > self._peers.copy_ranks and self._peers.grouping.stages == 1
            told = any(hasattr(one, ALONE) for one in self._saved.values()) or self._per_rank
            fits = isinstance(self.strategy, Sharded) and copies and not told
        else:
            fits = isinstance(self.strategy, Replicated | Single) and all(
                hasattr(self._saved[name], ALONE) for name in self._per_rank
            )
        whole = all(
            isinstance(one, torch.optim.Optimizer) and not hasattr(one, "as_stepped")  # ZeRO-1
            for one in self.optimizers
        )
        return self.model is not None and fits and whole

    @property
    def told_alone(self) -> set[str]:
        """Return the stored names of the objects whose plain state may differ by rank, where one
        rank reads it without the others (`state_aside`)."""
        return {self._kept_as(name) for name, one in self._saved.items() if hasattr(one, ALONE)}

    @property
    def only_first_knows(self) -> bool:
        """True if some of the state may be right on rank 0 only."""
        return any(getattr(one, "only_first_knows", False) for one in self._saved.values())

    def _kept_as(self, name: str) -> str:
        return _of_rank(name, 0) if name in self._per_rank else name

    def state_trained(self) -> dict[str, Any]:
        """Return the part of `state` that only optimizers and the model's forwards change."""
        return {name: state_of(thing) for name, thing in self._saved.items() if name in TRAINED}

    def state_aside(self) -> dict[str, Any] | None:
        """Return the rest of `state`, as this rank reads it without the others: an object's
        `state_alone()` if it has one, whose values hold for all ranks then; None: one of these
        has returned None, as it cannot tell now."""
        aside = {name: one for name, one in self._saved.items() if name not in TRAINED}
        state = {
            self._kept_as(name): one.state_alone() if hasattr(one, ALONE) else state_of(one)
            for name, one in aside.items()
        }
        return None if any(value is None for value in state.values()) else state

    def split(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the state that a snapshot takes, as tensors by path and plain data."""
        if self.put_back is not None:
            return self.put_back.tensors, self.put_back.plain
        return state_tree.split(self.state())

    def _stored(self, name: str) -> str:
        return _of_rank(name, self._peers.rank) if name in self._per_rank else name

    def plain_of_rank(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's plain state for the manifest: all of rank 0's, and of the other ranks
        the part that differs by rank. All ranks call it at the same point."""
        if self._peers.grouping.stages > 1:  # rank 0 has only the first stage's
            every = self._peers.gather(common(plain) if self._peers.replica == 0 else None)
            if self._peers.rank == 0:
                return {
                    "state": plain | state_tree.merged([said for said in every if said is not None])
                }
        if self._peers.rank == 0:
            return {"state": plain}
        if not self._per_rank:
            return {}
        own = {self._stored(name): plain[self._stored(name)] for name in self._per_rank}
        return {f"state{RANK_MARK}{self._peers.rank}": own}

    def between_updates(self, tensors: dict[str, torch.Tensor]) -> set[str]:
        """Return the names of the tensors that nothing changes between two updates."""
        if self.model is None:
            return set()
        later = {self._stored(name) for name in self.after_update}
        return between_updates(self.model, tensors, later)

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None:
        """Load the state of a snapshot. Raises BadInput, StoreError."""
        if self.files is not None:
            self.files.load(manifest, snapshots)
            return
        assert self.model is not None
        have, _ = state_tree.split(self.state())
        for top, thing in self._saved.items():
            # the snapshot's may have other sizes
            for name in quantised_weights.stored(thing) if isinstance(thing, nn.Module) else ():
                del have[f"{self._stored(top)}/{name}"]
        own = self._own_of(manifest)
        mine = {key for keys in own.values() for key in keys}

        def wanted(path: str) -> bool:
            top = path.partition("/")[0]
            return top in mine if RANK_MARK in top else of_stage is None or of_stage(path)

        of_stage = self.whole.wanted(common(have)) if self.whole else None
        stepped = [as_stepped(o) for o in self.optimizers]
        like = loading.like_parameters(
            {"optimizer": self.whole.placeholders() if self.whole else stepped}
        )
        tensors = loading.destinations(manifest, named_as(manifest, common(have)), like, wanted)
        loading.load(snapshots, manifest, tensors)
        plain = {
            key: state_tree.pruned(one, wanted)
            for key, one in _stored_plain(manifest).items()
            if RANK_MARK not in key or key in mine
        }
        state = state_tree.join(tensors, plain)
        for name, thing in self._saved.items():
            keys = own.get(name, [name])
            if name == GUARDS and name not in state:
                continue  # they are new in this run
            if missing := [key for key in keys if key not in state]:
                found = ", ".join(state)
                raise BadInput(
                    f"snapshot {manifest.ref.name} has no state of {missing[0]!r}, only of "
                    f"{found}; it was saved by another script"
                )
            if name in own and manifest.world != self._peers.world:
                thing.load_state_dicts([state[key] for key in keys])
            else:
                give_state(thing, state[keys[0]])

    def _own_of(self, manifest: Manifest) -> dict[str, list[str]]:
        """Return, for each object with a state per rank, the names of the stored states that this
        rank needs. Raises BadInput if the world's size differs and an object cannot handle that."""
        if manifest.world == self._peers.world:
            return {name: [_of_rank(name, self._peers.rank)] for name in self._per_rank}
        for name in sorted(self._per_rank):
            if not hasattr(self._saved[name], "load_state_dicts"):
                raise BadInput(
                    f"snapshot {manifest.ref.name} holds a state of {name!r} for each of "
                    f"{manifest.world} ranks, here are {self._peers.world}; go on with "
                    f"{manifest.world} ranks, or give {type(self._saved[name]).__name__} a method "
                    "load_state_dicts(states) that takes those of all ranks, in order"
                )
        return {
            name: [_of_rank(name, rank) for rank in range(manifest.world)]
            for name in self._per_rank
        }


TRAINED = ("model", "optimizer")
ALONE = "state_alone"  # the method of objects that ranks read together, or whose state differs
SMALL_NBYTES = 1 << 20  # tensors up to this size are copied when the state is noted


class NotedState:
    """The state that a snapshot at a step boundary would hold, noted in case the next step is
    dropped. Small tensors are copied. Larger ones are only referred to, and `changed` tells which
    of these no longer have their values. Nothing in a step changes what `Training.between_updates`
    names; buffers have copies of their own (`Buffers`)."""

    def __init__(self, training: Training):
        assert training.model is not None
        tensors, plain = state_tree.split(training.state())
        self.plain: dict[str, Any] = copy.deepcopy(plain)
        aside = {f"model/{plain_name(name)}" for name, _ in training.model.named_buffers()}
        aside |= training.between_updates(tensors)
        self.tensors = {
            name: t if name in aside or t.nbytes > SMALL_NBYTES else t.detach().clone()
            for name, t in tensors.items()
        }
        others = tensors.keys() - aside
        self._versions = {name: version_of(self.tensors[name]) for name in others}

    def changed(self) -> list[str]:
        """Return the names of the tensors whose values at the boundary are lost."""
        return sorted(n for n, v in self._versions.items() if version_of(self.tensors[n]) != v)


def check_names(state: Mapping[str, Any], **options: Collection[str]) -> None:
    """Check the names given to `prepare`. Raises BadInput."""
    if not isinstance(state, Mapping):
        raise BadInput(
            "prepare(state=...): wanted a dict of names and objects, such as {'ema': ema}, found "
            f"{type(state).__name__}"
        )
    for name in state:
        if not isinstance(name, str) or not name or "/" in name or RANK_MARK in name:
            raise BadInput(
                f"prepare(state=...): wanted names without '/' and {RANK_MARK!r}, found {name!r}"
            )
        if name in TAKEN:
            raise BadInput(
                f"prepare(state=...): the name {name!r} is taken; {', '.join(TAKEN)} are stored "
                "under theirs: use another"
            )
    for option, names in options.items():
        if unknown := sorted(set(names) - set(state)):
            raise BadInput(
                f"prepare({option}={unknown!r}): wanted names of what is in state, found only "
                f"{', '.join(state) or 'none'}"
            )


def check_saves(what: str, thing: Any) -> None:
    """Raise BadInput unless the object's state can be saved, and loaded again. `what`: its name in
    the message."""
    kind = type(thing).__name__
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise BadInput(f"{what}: {kind} has no state_dict/load_state_dict, so it cannot be resumed")
    state = thing.state_dict()
    try:
        state_tree.split(state)
    except TypeError as e:
        raise BadInput(f"{what}: the state of this {kind} cannot be saved: {e}") from e


def state_of(thing: Any) -> Any:
    """Return an object's state_dict. A module's has the names that it would have without wrappers,
    so that a compiled or checkpointed module can load the state of a plain one."""
    state = thing.state_dict()
    if not isinstance(thing, nn.Module):
        return state
    named = {plain_name(name): value for name, value in state.items()}
    return named | quantised_weights.stored(thing)


def give_state(thing: Any, state: Any) -> None:
    """Load a state that `state_of` returned, or one with any wrappers in its names."""
    if isinstance(thing, nn.Module):
        own = {plain_name(name): name for name in thing.state_dict()}
        state = quantised_weights.load(thing, state)
        plain = ((plain_name(name), name, value) for name, value in state.items())
        state = {own.get(short, name): value for short, name, value in plain}
    thing.load_state_dict(state)


def named_as(manifest: Manifest, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors under a snapshot's names, which in old snapshots include wrappers."""
    stored = {
        "/".join(plain_name(part) for part in name.split("/")): name for name in manifest.tensors
    }
    return {stored.get(name, name): value for name, value in tensors.items()}


def common(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `state` (tensors by path, or plain state by name) that all ranks hold."""
    return {path: value for path, value in state.items() if RANK_MARK not in path.partition("/")[0]}


def between_updates(
    model: nn.Module, tensors: dict[str, torch.Tensor], after_update: Collection[str] = ()
) -> set[str]:
    """Return the names of tensors that nothing changes from the end of a step to the next
    optimizer's step: parameters, the optimizers' own state, and everything in `after_update`."""
    names = (plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False))
    later = {f"model/{name}" for name in names}
    tops = set(after_update)
    return {
        name
        for name in tensors
        if name in later
        or (name.startswith("optimizer/") and name.split("/")[2] == "state")
        or name.partition("/")[0] in tops
    }


def _of_rank(name: str, rank: int) -> str:
    return f"{name}{RANK_MARK}{rank}"


def _stored_plain(manifest: Manifest) -> dict[str, Any]:
    """Return the plain state in a manifest: the common part, and the parts of single ranks."""
    stored = dict(manifest.data["state"])
    for rank in range(1, manifest.world):
        stored |= manifest.data.get(f"state{RANK_MARK}{rank}", {})
    return stored


MOST_CONFIG = 1 << 16  # characters of a config that a snapshot keeps


def model_config(model: nn.Module | None) -> dict[str, Any]:
    """Return the config that a snapshot keeps, so that an export needs nothing else. It comes from
    `model.config.to_dict()`, which transformers' models and those of examples/models.py have; {}
    for other models, and for configs longer than `MOST_CONFIG`."""
    model = model.any_stage() if isinstance(model, StagedModel) else model
    inner = getattr(model, "_orig_mod", model)
    to_dict = getattr(getattr(inner, "config", None), "to_dict", None)
    if not callable(to_dict) or hasattr(inner, "peft_config"):  # it would describe the base only
        return {}
    told = to_dict()
    if not isinstance(told, dict) or not isinstance(told.get("model_type"), str):
        return {}
    text = json.dumps(told, default=str)
    return json.loads(text) if len(text) <= MOST_CONFIG else {}
