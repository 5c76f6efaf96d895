"""The batches of all ranks that share one copy of the model, when Lightning deals the samples out
among them. Runs in the worker.

Each of those ranks has a DataLoader of its own part of the samples. All of them walk over the
batches of all parts, so that they know what each micro-batch of the copy holds.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from harness.adapters.accelerate.rounds import batched, like_loader
from harness.adapters.framework_claim import told_mesh
from harness.core.mesh import ModelMesh
from harness.core.world import BadInput
from harness.loops.own_loop import script_world
from harness.worker.session import Session


class WholeOrder:
    """The order of all samples that a DistributedSampler deals out, filled up as it does."""

    def __init__(self, dealt: Any):
        self.epoch = dealt.epoch
        self._dealt = (dealt,)  # in a tuple, since its place among the ranks is no state
        inner = getattr(dealt.dataset, "_sampler", None)
        if inner is not None:  # Lightning's wrapper of a sampler of the script's own
            self.sampler = inner

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        whole = copy.copy(self._dealt[0])
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, whole.total_size
        whole.set_epoch(self.epoch)
        return iter(whole)


class BatchesOfAll:
    """A batch sampler of the batches of all `parts`, those of one micro-batch after each other.
    `theirs`: that of one part."""

    def __init__(self, theirs: Any, parts: int):
        self.sampler = WholeOrder(theirs.sampler)
        self._theirs, self._parts = (theirs,), parts  # see WholeOrder
        self.batch_size, self.drop_last = theirs.batch_size, theirs.drop_last

    def __len__(self) -> int:
        return len(self._theirs[0]) * self._parts

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        batches = [self._of_part(order[part :: self._parts]) for part in range(self._parts)]
        yield from itertools.chain.from_iterable(zip(*batches, strict=True))

    def _of_part(self, order: list[int]) -> Iterator[list[int]]:
        part = copy.copy(self._theirs[0])
        part.sampler = order
        return iter(part)


def first_copies(run: Session) -> int:
    """Return the copies of the model in the world whose batch is kept. Raises BadInput."""
    world, ranks = script_world(run), run.replica_ranks
    if world % ranks:
        raise BadInput(
            f"the batch is that of {world} ranks, found copies of the model of {ranks} ranks: "
            f"wanted whole copies; begin the run with --script-world {ranks} or a multiple"
        )
    return world // ranks


def refuse_other_size(before: int, now: int) -> None:
    """Raise BadInput if a snapshot counts batches of copies of another size. `before`, `now`: the
    ranks that each read a part of a micro-batch."""
    if before != now:
        raise BadInput(
            f"the snapshot counts the batches of copies of the model that {before} ranks feed, "
            f"here are {now}: wanted --mesh dp_shard={before}"
        )


def of_all_parts(loader: Any, parts: int) -> Any:
    """Return a DataLoader of the batches of all parts, of which `loader` has one. Raises
    BadInput."""
    if parts == 1:
        return loader
    if not batched(loader) or not isinstance(loader.batch_sampler.sampler, DistributedSampler):
        raise BadInput(
            "wanted a map-style dataset that Lightning deals out among the ranks of a copy of the "
            f"model, found {type(loader.dataset).__name__} with a "
            f"{type(loader.sampler).__name__}; leave out use_distributed_sampler=False, and use a "
            "map-style dataset"
        )
    return like_loader(loader, BatchesOfAll(loader.batch_sampler, parts))


def fit_to_copy(strategy: Any, run: Session) -> None:
    """Set the sizes of a strategy that splits a model to those of a copy of it. Raises
    BadInput."""
    asked = getattr(strategy, "_tensor_parallel_size", 1)  # DeepSpeedStrategy has none
    mesh = told_mesh() or ModelMesh(**{"dp_shard" if asked == 1 else "tp": run.replica_ranks})
    if mesh.copy_ranks != mesh.dp_shard * mesh.tp or asked not in ("auto", mesh.tp):
        tensor = mesh.tp if asked == "auto" else int(asked)
        raise BadInput(
            f"the mesh {mesh} with {type(strategy).__name__} and tensor_parallel_size={asked!r}: "
            f"wanted --mesh dp_shard={run.replica_ranks // tensor},tp={tensor}"
        )
    strategy._data_parallel_size, strategy._tensor_parallel_size = mesh.dp_shard, mesh.tp


class OneOfCopy:
    """A mixin over the ModelParallelStrategy of the Trainer or of Fabric, or the Trainer's
    DeepSpeedStrategy. The world has the ranks of one copy of the model. Files see all ranks, and
    only the first copy writes."""

    harness_run: Session
    _data_parallel_size: int

    @property
    def harness_parts(self) -> int:
        """The ranks of a copy that each read a part of a micro-batch."""
        return self._data_parallel_size

    @property
    def root_device(self) -> torch.device:
        return self.harness_run.device

    @property
    def global_rank(self) -> int:
        return self.harness_run.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, of which one prepares the data."""
        return self.harness_run.local_rank

    @property
    def node_rank(self) -> int:
        return 0 if self.global_rank == 0 else 1

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.harness_run._peers.replica == 0:
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        else:
            self.harness_run._peers.agree(lambda: None)  # the first copy tells the file's name


def elastic_like(theirs: Any, mixin: type, run: Session) -> Any:
    """Return the script's strategy, with the functions of `mixin`, for a copy of the model. Both
    have the same attributes, whichever of them the script keeps. Raises BadInput."""
    kind: Any = type(theirs)
    theirs.harness_run = run
    fit_to_copy(theirs, run)
    elastic = kind.__new__(type(kind.__name__, (mixin, kind), {}))
    elastic.__dict__ = theirs.__dict__
    return elastic


def with_cluster(plugins: Any, environments: Any, of_copy: bool = True) -> list[Any]:
    """Return the script's plugins with the cluster that Lightning shall see: the ranks of a copy of
    the model (`of_copy`), or one process. `environments`: the module with Lightning's clusters."""
    several = plugins if isinstance(plugins, list | tuple) else [plugins] * (plugins is not None)
    others = [one for one in several if not isinstance(one, environments.ClusterEnvironment)]
    kind = environments.TorchElasticEnvironment if of_copy else environments.LightningEnvironment
    return [*others, kind()]


def batch_size(loader: Any) -> int:
    """Return the number of samples in a full micro-batch."""
    sizes = (getattr(part, "batch_size", None) for part in (loader, loader.batch_sampler))
    return next((int(size) for size in sizes if size), 1)
