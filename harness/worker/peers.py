"""The ranks of this world, which of them this process is, and the replicas that they make. Runs in
the worker.

A replica is `replica_ranks` ranks that work on the same micro-batches: `Grouping` says which. Every
method that talks to the others must be called by all of them, at the same point.
"""

from __future__ import annotations

import datetime
import functools
import math
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from harness.core.batch import Grouping, replicas_of
from harness.core.mesh import (
    DP_REPLICATE,
    ModelMesh,
    copy_ranks,
    replica_ranks_told,
)
from harness.core.meshes import AskedMesh, choice_of, meshes_told
from harness.core.world import BadInput, HarnessError
from harness.node.progress import ProgressFile, WorkerPhase
from harness.worker.hidden import ONE_GPU
from storage.errors import StoreError
from storage.ranks import gathered
from storage.restore import this_machine

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
MAX_TIMEOUT_S = 1e7  # four months
CALLERS = 2048  # ranks that call at once


def _store(environ: dict[str, str]) -> PrefixStore | None:
    """Where the ranks meet, as env:// would make it, but rank 0 listens on the address that all are
    told and no other: torch's own listens on every interface, and believes whoever calls. None: the
    environment does not say, or that address is not one of this machine; then torch makes it."""
    said = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()
    if not said or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    addr, port, door = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), None
    if int(environ["RANK"]) == 0:
        try:
            family = socket.AF_INET6 if ":" in addr else socket.AF_INET
            door = socket.create_server((addr, port), family=family, backlog=CALLERS)
        except OSError:
            return None
    store = TCPStore(
        addr,
        port,
        int(environ["WORLD_SIZE"]),
        is_master=door is not None,
        timeout=dist.default_pg_timeout,
        wait_for_workers=False,
        master_listen_fd=door.detach() if door is not None else None,
    )
    return PrefixStore("default_pg", store)  # as torch does for env://


class Peers:
    """`control`: the group of all ranks on the host (gloo); None: this one is alone.

    `replica_ranks`: of each replica, `grouping`: which they are; `replicas`: how many there are;
    `replica`: which of them this rank is in; `leads_replica`: it is the first rank of it, and
    speaks for it where each replica counts once. `model_mesh`: as it was asked for; `copy_ranks`:
    ranks that hold one copy of the model together, one replica or several.
    """

    def __init__(
        self,
        environ: dict[str, str],
        replica_ranks: int | None = None,
        asked_mesh: AskedMesh | None = None,
    ):
        """Raises BadInput."""
        self.life = ProgressFile(environ.get("HARNESS_PROGRESS"))
        self.life.tell(WorkerPhase.START)
        self.rank = int(environ.get("RANK", 0))
        self.local_rank = int(environ.get("LOCAL_RANK", 0))
        self.world = int(environ.get("WORLD_SIZE", 1))
        self.model_mesh = _model_mesh(environ, asked_mesh, self.world)
        self.replica_ranks = _replica_ranks(environ, replica_ranks, self.model_mesh)
        self.copy_ranks = copy_ranks(self.model_mesh, self.replica_ranks)
        if self.model_mesh is not None:
            self.model_mesh.sizes(self.world)  # refused before anybody meets
        self.replicas = replicas_of(self.world, self.replica_ranks)
        mesh = self.model_mesh
        self.grouping = Grouping(self.replica_ranks) if mesh is None else mesh.grouping
        self.replica = self.grouping.replica(self.rank)
        self.leads_replica = self.grouping.leads(self.rank)
        self.host = environ.get("HARNESS_HOST") or this_machine()
        self.device = (
            torch.device("cuda", 0 if environ.get(ONE_GPU) else self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self.control: dist.ProcessGroup | None = None
        # of all ranks, on the device; named, so that it works while the world is hidden
        self.everyone: dist.ProcessGroup | None = None

    def meet(
        self, environ: dict[str, str], backend: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Join the process group, if the environment names one. Raises BadInput."""
        if timeout_s is not None and not 0 < timeout_s < MAX_TIMEOUT_S:
            raise BadInput(
                f"attach(timeout_s={timeout_s}): wanted seconds above 0 and below {MAX_TIMEOUT_S:g}"
            )
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        if dist.is_initialized():
            if backend is not None or timeout_s is not None:
                raise BadInput(
                    "attach(backend=..., timeout_s=...): the process group stands already; give "
                    "them to torch.distributed.init_process_group, or call attach before it"
                )
        elif "WORLD_SIZE" in environ:
            usual = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            if (store := _store(environ)) is None:
                dist.init_process_group(backend or usual, timeout=timeout)
            else:
                dist.init_process_group(
                    backend or usual,
                    timeout=timeout,
                    store=store,
                    rank=int(environ["RANK"]),
                    world_size=int(environ["WORLD_SIZE"]),
                )
        if dist.is_initialized() and self.world > 1:
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.everyone = dist.group.WORLD

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """Of the dimensions of `model_mesh`; without one "replicas" and "ranks" (of one replica).
        All ranks ask for it at the same point. Raises BadInput without a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise BadInput(
                "run.mesh: wanted a process group, found a single process without one; start it "
                "with `harness run` or torchrun"
            )
        sizes = {"replicas": self.replicas, "ranks": self.replica_ranks}
        if self.model_mesh is not None:
            sizes = self.model_mesh.sizes(self.world)
        shape, names = tuple(sizes.values()), tuple(sizes)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """The same ranks, cut into `EXPERT_DIMS`; None: experts are not shared out. All ranks ask
        for it at the same point. Raises BadInput without a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.model_mesh is None or self.model_mesh.ep == 1:
            return None
        sizes = self.model_mesh.expert_sizes(self.world)
        return init_device_mesh(
            self.mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    @property
    def parts(self) -> int:
        """Ranks of a replica that have different positions of the same samples (`cp`): each has a
        part of a micro-batch's loss."""
        return 1 if self.model_mesh is None else self.model_mesh.cp

    @property
    def tells_losses(self) -> bool:
        """Of the ranks with the same positions one does."""
        tp = 1 if self.model_mesh is None else self.model_mesh.tp
        return self.grouping.leads(self.rank - self.rank // tp % self.parts * tp)

    @property
    def model_devices(self) -> DeviceMesh | None:
        """`mesh`, if one was asked for."""
        return None if self.model_mesh is None else self.mesh

    @functools.cached_property
    def across(self) -> dist.ProcessGroup | None:
        """The ranks at the same place of all replicas; None: all ranks. All ranks ask for it at
        the same point."""
        if self.replica_ranks == 1:
            return None
        if self.model_mesh is None:
            return self.mesh.get_group("replicas")
        return self.mesh[DP_REPLICATE, "dp_shard"]._flatten("replicas").get_group()

    @functools.cached_property
    def same_stage(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same stage of a pipeline, or parts of it; None: all ranks. All
        ranks ask for it at the same point."""
        if self.grouping.stages == 1:
            return None
        return self.mesh[DP_REPLICATE, "dp_shard", "cp", "tp"]._flatten("stage").get_group()

    def by_stage(self, said: Sequence[T]) -> list[dict[int, T]]:
        """What the ranks said, in order: by stage of a pipeline, and by rank."""
        found: list[dict[int, T]] = [{} for _ in range(self.grouping.stages)]
        for rank, one in enumerate(said):
            found[self.grouping.stage(rank)][rank] = one
        return found

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks at the same place of all copies of the model, as `across`; None: a copy is a
        replica, or all ranks hold one together."""
        return None if self.model_mesh is None else self.mesh.get_group(DP_REPLICATE)

    def print(self, *values: Any) -> None:
        """On rank 0."""
        if self.rank == 0:
            print(*values, flush=True)

    def agree(self, value: Callable[[], Any]) -> Any:
        """Rank 0's value, on every rank; its error as well."""
        if self.control is None:
            return value()
        box: list[Any] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                box = [(value(), None)]
            except (HarnessError, StoreError) as e:
                error, box = e, [(None, f"{type(e).__name__}: {e}")]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if error is not None:
            raise error
        result, message = box[0]
        if message is not None:
            raise HarnessError(f"rank 0 found: {message}")
        return result

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in their order."""
        return gathered(value, self.control)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all replicas, of what the first rank of each says; rounded once, so that
        it does not depend on their order."""
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1)
        if self.control is None:
            return float(mine)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self.control)
        leads = self.grouping.leads
        return math.fsum(float(v) for rank, v in enumerate(every) if leads(rank))

    def gather_steps(self, step: int) -> set[int]:
        """The steps at which the ranks are."""
        if self.control is None:
            return {step}
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(steps, torch.tensor([step]), group=self.control)
        return {int(each) for each in steps}

    def barrier(self) -> None:
        """Nobody hangs up while another still talks."""
        if self.control is not None:
            dist.barrier(group=self.control)


def _model_mesh(environ: dict[str, str], asked: AskedMesh | None, world: int) -> ModelMesh | None:
    """What the environment says, or else what the script asks for, in a world of so many ranks.
    Raises BadInput."""
    choice, wanted = meshes_told(environ), choice_of(asked) if asked else None
    if choice is None:
        return None if wanted is None else wanted.of_world(world)
    told = choice.of_world(world)
    if wanted is not None and wanted.place(told) is None:
        raise BadInput(
            f"attach(mesh=...) wants {wanted}: this world was formed of copies that are {told}; "
            f"start its nodes with `harness run --mesh {wanted}` (or HARNESS_MESH={wanted})"
        )
    return told


def _replica_ranks(
    environ: dict[str, str], asked: int | None, model_mesh: ModelMesh | None = None
) -> int:
    """Ranks of each replica: what the environment says, or else what the script asks for; 1.
    Raises BadInput."""
    told = replica_ranks_told(environ)
    if model_mesh is not None:
        for said, how in ((told, "HARNESS_REPLICA_RANKS="), (asked, "attach(replica_ranks=...) ")):
            if said not in (None, model_mesh.replica_ranks):
                raise BadInput(
                    f"{how}{said}: the mesh {model_mesh} has replicas of "
                    f"{model_mesh.replica_ranks} ranks; leave one of the two out"
                )
        return model_mesh.replica_ranks
    if asked is not None and told is not None and asked != told:
        raise BadInput(
            f"attach(replica_ranks={asked}): this world was formed of replicas of {told} ranks; "
            f"start its nodes with `harness run --replica-ranks {asked}` (or "
            f"HARNESS_REPLICA_RANKS={asked})"
        )
    found = asked if told is None else told
    return 1 if found is None else found
