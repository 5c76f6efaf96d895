"""What is trained: the things that `prepare` was given, as one state that is saved and loaded. Runs
in the worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from harness.core.mesh import ModelMesh
from harness.core.world import BadInput
from harness.worker import hidden
from harness.worker.broadcast import same_everywhere, share
from harness.worker.buffers import Buffers
from harness.worker.exact import exact_strategy_for
from harness.worker.frozen import Frozen
from harness.worker.loader import Stream
from harness.worker.loads import Loads
from harness.worker.low_bit import load_together, taken_apart
from harness.worker.norms import Norms, has_sync_norm
from harness.worker.parallel import Strategy, check_fits, strategy_for
from harness.worker.peers import Peers
from harness.worker.pipeline import Pipeline
from harness.worker.pipeline_state import Whole, merged, pruned, whole_of
from harness.worker.sharding import check_real, holds_experts, is_sharded, to_device
from harness.worker.zero import as_stepped
from storage import dcp
from storage.manifest import Manifest
from storage.names import plain_name
from storage.snapshots import Snapshots

RANK_MARK = "@r"  # between a name and a rank
# names under which snapshots hold what is not in `state`
TAKEN = ("model", "optimizer", "scheduler", "scaler", "reduce", "dataset", "place")


class KeptFiles(Protocol):
    """Files in a folder (`own_files.py`)."""

    def state_dict(self) -> Any: ...

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None: ...


@dataclass
class _Many:
    """Several optimizers as one thing with a state."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def state_dict(self) -> list[dict[str, Any]]:
        return [taken_apart(o.state_dict()) for o in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_together(optimizer, state)


@dataclass(frozen=True)
class ForwardStatistics:
    """What forwards leave behind besides gradients."""

    norms: Norms
    loads: Loads

    def take_up(self, micro: int, counts: bool, more: bool = False) -> None:
        """The next forwards are of this micro-batch; see `Norms.take_up`."""
        self.norms.take_up(micro, counts, more)
        self.loads.take_up(micro, counts)


class Training:
    """Empty until `prepare`. `after_update`: names of what is promised to change only between an
    update and the end of the loop's body."""

    strategy: Strategy
    statistics: ForwardStatistics

    def __init__(self, peers: Peers, reduce: str):
        self._peers, self.reduce = peers, reduce
        self.model: nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduler: Any = None
        self.scaler: Any = None
        self.buffers: Buffers | None = None
        self.frozen = Frozen(nn.Module(), [])
        self.after_update: set[str] = set()
        self.whole: Whole | None = None  # of which the model is some stages
        self.phases = False  # steps give their micro-batches more than once
        self._saved: dict[str, Any] = {}  # name -> object with state_dict
        # names of those whose state is each rank's own
        self._per_rank: frozenset[str] = frozenset()

    # ---- what `prepare` is given -----------------------------------------------------------------
    @hidden.world.inside()
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
        """See `Session.prepare`. Raises BadInput."""
        if self.files is not None:
            raise BadInput(
                "run.prepare(...) behind run.files: wanted one of them for all the state"
            )
        check_names(state, per_rank=per_rank, after_update=after_update)
        self._per_rank = frozenset(per_rank)
        check_real(model)
        to_device(model, self._peers.device)
        same_everywhere(model, self._peers.across, self._peers.copies)
        self.model, self.optimizers = model, optimizers
        self._check_optimizers()
        self.scheduler, self.scaler = scheduler, scaler
        self.whole = whole_of(model, optimizers, lambda: self._peers.mesh.get_group("pp"))
        self._saved = {"model": model, "optimizer": self.whole or _Many(optimizers)}
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
        self.statistics = ForwardStatistics(Norms(model, self._peers), Loads(model, self._peers))
        self.buffers, self.frozen = Buffers(model), Frozen(model, optimizers)
        self.buffers.note()
        self._check_norms()

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
        """Is the model split as the mesh says? Raises BadInput."""
        mesh, model = self._peers.model_mesh, self.model
        assert model is not None
        if mesh is None:
            return
        if mesh.pp > 1 and not isinstance(model, Pipeline):
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

    @property
    def tells_losses(self) -> bool:
        """Losses are made on this rank, and it adds them for its replica."""
        if isinstance(self.model, Pipeline):
            return self.model.has_last and self._peers.grouping.leads_stage(self._peers.rank)
        return self._peers.tells_losses

    def _summing(self) -> dist.ProcessGroup | None:
        """The ranks that sum gradients of the same parameters; None: all."""
        return self._peers.across if isinstance(self.model, Pipeline) else self._named()

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
        """The ranks that sum, by name where the default group is hidden (`hidden.py`)."""
        return self._peers.everyone if hidden.is_hidden() else None

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
        if foreign := [tuple(p.shape) for i, p in held.items() if i not in ours]:
            raise BadInput(
                "wanted an optimizer of the model's parameters only, found "
                f"{len(foreign)} that are not the model's (the first has shape {foreign[0]}): "
                "nobody would sum their gradients over ranks; put the modules that they are of "
                "into one nn.Module, and prepare that"
            )

    def _check_norms(self) -> None:
        """What SyncBatchNorm computes depends on the world: refused with exact sums, told with
        others. Where positions are shared BatchNorm is refused."""
        assert self.model is not None
        if self._peers.parts > 1 and self.statistics.norms.watches:
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
        """Where the stream is, is part of the state."""
        self._saved["dataset"] = stream

    def keep_files(self, name: str, files: KeptFiles) -> None:
        """Files in a folder are all the state that there is. Raises BadInput."""
        if self.model is not None:
            raise BadInput(
                "run.files is for a script that keeps its whole state by itself; with "
                "run.prepare(...) give what else there is as state={'name': object}"
            )
        self._saved, self._per_rank = {name: files}, frozenset({name})

    @property
    def files(self) -> KeptFiles | None:
        """Of a script that keeps checkpoints by itself."""
        return next(iter(self._saved.values()), None) if self.model is None else None

    def keep_place(self, place: Any) -> Any:
        """Where in the data the next step begins is part of the state, if somebody else reads it.
        The one that is kept: the first."""
        return self._saved.setdefault("place", place)

    def settle_norms(self, micro_batches: int, some_idle: bool = False) -> None:
        """The running averages of BatchNorm: see `Norms.settle`. Raises BadInput."""
        self.statistics.norms.settle(micro_batches, self.reduce != "fast", some_idle)

    @property
    def parallel(self) -> str:
        """What the model's parallelism is called; "files": it is the script's own."""
        return self.strategy.name if self.model is not None else "files"

    # ---- buffers ---------------------------------------------------------------------------------
    def share_buffers(self, look: bool = False) -> None:
        """What forwards have changed in the model beside its parameters is the first replica's
        from here on. `look`: it may be more than before."""
        if self._peers.control is None or self.model is None or self.buffers is None:
            return
        if self.reduce != "fast":  # exact sums promise more: what differs is refused
            return
        shared = self.buffers.shared
        if look or shared is None:
            every = self._peers.gather(self.buffers.changed())
            shared = sorted({*(shared or ()), *(name for names in every for name in names)})
            self.buffers.shared = shared
        if shared:
            now = dict(self.model.named_buffers())
            with torch.no_grad():  # other stages have others
                share([now[name] for name in shared if name in now], self._peers.across)

    # ---- state -----------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """All of it, by the names under which it is stored."""
        return {self._stored(name): state_of(thing) for name, thing in self._saved.items()}

    def _stored(self, name: str) -> str:
        return _of_rank(name, self._peers.rank) if name in self._per_rank else name

    def plain_of_rank(self, plain: dict[str, Any]) -> dict[str, Any]:
        """What a manifest says of this rank: rank 0's stands for all, of others what is their
        own. All ranks ask at the same point."""
        if self._peers.grouping.stages > 1:  # rank 0 has the first stage's only
            every = self._peers.gather(common(plain) if self._peers.replica == 0 else None)
            if self._peers.rank == 0:
                return {"state": plain | merged([said for said in every if said is not None])}
        if self._peers.rank == 0:
            return {"state": plain}
        if not self._per_rank:
            return {}
        own = {self._stored(name): plain[self._stored(name)] for name in self._per_rank}
        return {f"state{RANK_MARK}{self._peers.rank}": own}

    def between_updates(self, tensors: dict[str, torch.Tensor]) -> set[str]:
        """Names of the tensors that nothing changes between two updates."""
        if self.model is None:
            return set()
        later = {self._stored(name) for name in self.after_update}
        return between_updates(self.model, tensors, later)

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None:
        """Take over the state of a snapshot. Raises BadInput, StoreError."""
        if self.files is not None:
            self.files.load(manifest, snapshots)
            return
        assert self.model is not None
        have, _ = dcp.split(self.state())
        own = self._own_of(manifest)
        mine = {key for keys in own.values() for key in keys}

        def wanted(path: str) -> bool:
            top = path.partition("/")[0]
            return top in mine if RANK_MARK in top else of_stage is None or of_stage(path)

        of_stage = self.whole.wanted(common(have)) if self.whole else None
        stepped = [as_stepped(o) for o in self.optimizers]
        like = dcp.like_parameters(
            {"optimizer": self.whole.placeholders() if self.whole else stepped}
        )
        tensors = dcp.destinations(manifest, named_as(manifest, common(have)), like, wanted)
        dcp.load(snapshots, manifest, tensors)
        plain = {
            key: pruned(one, wanted)
            for key, one in _stored_plain(manifest).items()
            if RANK_MARK not in key or key in mine
        }
        state = dcp.join(tensors, plain)
        for name, thing in self._saved.items():
            keys = own.get(name, [name])
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
        """Of what is each rank's own: the stored states that this rank needs. Raises BadInput
        if there is no way to share them out."""
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


def check_names(state: Mapping[str, Any], **options: Collection[str]) -> None:
    """What `prepare` was given by name. Raises BadInput."""
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
    """Raises BadInput unless its state can be saved, and loaded again."""
    kind = type(thing).__name__
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise BadInput(f"{what}: {kind} has no state_dict/load_state_dict, so it cannot be resumed")
    state = thing.state_dict()
    try:
        dcp.split(state)
    except TypeError as e:
        raise BadInput(f"{what}: the state of this {kind} cannot be saved: {e}") from e


def state_of(thing: Any) -> Any:
    """Its state_dict; a module's under the names that it would have without wrappers, so that one
    that is compiled or checkpointed goes on from one that is not."""
    state = thing.state_dict()
    if not isinstance(thing, nn.Module):
        return state
    return {plain_name(name): value for name, value in state.items()}


def give_state(thing: Any, state: Any) -> None:
    """The inverse of `state_of`, with any wrappers in the names of `state`."""
    if isinstance(thing, nn.Module):
        own = {plain_name(name): name for name in thing.state_dict()}
        plain = ((plain_name(name), name, value) for name, value in state.items())
        state = {own.get(short, name): value for short, name, value in plain}
    thing.load_state_dict(state)


def named_as(manifest: Manifest, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same, by the names that a snapshot has for them: old ones name wrappers as well."""
    stored = {
        "/".join(plain_name(part) for part in name.split("/")): name for name in manifest.tensors
    }
    return {stored.get(name, name): value for name, value in tensors.items()}


def common(state: dict[str, Any]) -> dict[str, Any]:
    """Of tensors by path, or plain state by name: what all ranks hold."""
    return {path: value for path, value in state.items() if RANK_MARK not in path.partition("/")[0]}


def between_updates(
    model: nn.Module, tensors: dict[str, torch.Tensor], after_update: Collection[str] = ()
) -> set[str]:
    """Names of tensors that nothing changes from the end of a step to the next optimizer's step:
    parameters, the optimizers' own state, and what is promised to change only behind it."""
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
    """The plain state in a manifest: what all ranks held, and what each had for itself."""
    stored = dict(manifest.data["state"])
    for rank in range(1, manifest.world):
        stored |= manifest.data.get(f"state{RANK_MARK}{rank}", {})
    return stored
