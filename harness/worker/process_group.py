"""The ranks of this world, the rank that this process has, and the replicas that the ranks form.
Runs in the worker.

A replica is `replica_ranks` ranks that work on the same micro-batches; `Grouping` defines them.
All ranks must call every method that communicates, at the same point.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from harness.core.batch import Grouping, replicas_of
from harness.core.mesh import (
    DP_REPLICATE,
    AskedMesh,
    ModelMesh,
    choice_of,
    copy_ranks,
    meshes_told,
    replica_ranks_told,
)
from harness.core.world import RESIZE, BadInput, HarnessError
from harness.node.forkserver import write_error
from harness.node.heartbeat import ProgressFile, WorkerPhase
from harness.node.next_world import BESIDE
from harness.worker.alone import device_of
from storage.errors import StoreError
from storage.snapshots.restore import this_machine
from storage.tensors import quantised_weights
from storage.tensors.save_ranks import gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Broadcasts of tensors from the first replica to all others.


def same_everywhere(
    model: nn.Module,
    across: dist.ProcessGroup | None = None,
    copies: dist.ProcessGroup | None = None,
    shards: bool = True,
) -> None:
    """Copy the first replica's parameters and buffers to every replica, in place, and the scales of
    quantised weights. Replicas built with different random numbers would otherwise train different
    models.

    `across`: the ranks at the same place of all replicas; DTensors, whose shards lie within a
    replica, are then copied too. None: every rank is a replica, and a DTensor spans all of them.
    `copies`: the ranks at the same place of all copies of the model, where several replicas share
    one copy; DTensors are then broadcast over these. `shards`: False leaves DTensors out.
    """
    if not dist.is_initialized() or dist.get_world_size(across) == 1:
        return
    tensors: Iterable[Any] = [
        *model.parameters(),
        *model.buffers(),
        *quantised_weights.live(model),
    ]
    with torch.no_grad():
        for tensor in tensors:
            sharded = hasattr(tensor, "to_local")
            if (shards or not sharded) and is_copied(tensor, across, copies):
                if sharded:
                    _broadcast(tensor.to_local(), across if copies is None else copies)
                else:
                    _broadcast(tensor.detach(), across)


def is_copied(
    tensor: Any, across: dist.ProcessGroup | None, copies: dist.ProcessGroup | None
) -> bool:
    """Return whether `same_everywhere` copies this tensor of a model from the first replica, or the
    first copy, to others. Arguments are those of `same_everywhere`."""
    if not dist.is_initialized() or dist.get_world_size(across) == 1:
        return False
    if hasattr(tensor, "to_local"):
        of_shards = across if copies is None else copies
        return of_shards is not None and dist.get_world_size(of_shards) > 1
    return 0 not in tensor.stride()


def is_source(
    tensor: Any, across: dist.ProcessGroup | None, copies: dist.ProcessGroup | None
) -> bool:
    """Return whether this rank keeps its values of a tensor in `same_everywhere`, where others may
    receive them. Arguments are those of `same_everywhere`."""
    if not is_copied(tensor, across, copies):
        return True
    sharded = hasattr(tensor, "to_local")
    return dist.get_rank() == _first(copies if sharded and copies is not None else across)


def _broadcast(tensor: torch.Tensor, across: dist.ProcessGroup | None) -> None:
    whole = tensor.contiguous()
    # Sent as bytes, since not every backend supports every dtype.
    dist.broadcast(whole.reshape(-1).view(torch.uint8), src=_first(across), group=across)
    if whole is not tensor:
        tensor.copy_(whole)


def broadcast_all(buffers: Sequence[torch.Tensor], across: dist.ProcessGroup | None = None) -> None:
    """Copy the first replica's `buffers` to every replica, with one broadcast per dtype and device.
    DistributedDataParallel does the same before each forward. `across`: see `same_everywhere`."""
    buffers = [b.to_local() if hasattr(b, "to_local") else b.detach() for b in buffers]
    for kind in dict.fromkeys((b.dtype, b.device) for b in buffers):
        mine = [b for b in buffers if (b.dtype, b.device) == kind]
        flat = torch.cat([b.reshape(-1) for b in mine])
        dist.broadcast(flat.view(torch.uint8), src=_first(across), group=across)
        for b, values in zip(mine, torch.split(flat, [b.numel() for b in mine]), strict=True):
            b.copy_(values.view_as(b))


def _first(across: dist.ProcessGroup | None) -> int:
    """Return the global rank of the first replica of `across` (None: rank 0)."""
    return 0 if across is None else dist.get_global_rank(across, 0)


T = TypeVar("T")
MAX_TIMEOUT_S = 1e7  # four months
MEET_S = 60.0  # for ranks that have all come to connect with each other
CONNECTS_LATE = "nccl"  # a backend that connects the ranks in its first collective only
FIRST_SUM_S = 180.0  # for that; thousands of ranks take tens of seconds
SEE = (
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set, name the interface of --set addr"
)
SEE_NCCL = f"{SEE}; a rank that has not begun it may hang in its GPU's driver (NCCL_DEBUG=INFO)"
CALLERS = 2048  # ranks that may connect at the same time


def _store(environ: dict[str, str]) -> PrefixStore | None:
    """Return the rendezvous store that env:// would make, except that rank 0 listens only on
    MASTER_ADDR: torch's own listens on every interface and trusts every client. None: the variables
    are not set, or the address is not one of this machine's; then torch makes the store."""
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


def backend_of(device: torch.device, store: PrefixStore | None, world: int) -> str:
    """Return the backend for this world: NCCL for tensors on GPUs, gloo for those on the host.
    Ranks that share a GPU, which NCCL refuses, exchange through the host: then gloo is the backend
    of every rank. The ranks find out through `store`; without one they are taken to have a GPU
    each. All ranks must call it at the same point."""
    if device.type != "cuda":
        return "gloo"
    gpu = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if store is None or world == 1 or gpu is None:
        return "cpu:gloo,cuda:nccl"
    # a fixed number of requests for each rank, however many ranks there are
    if store.add(f"gpu/{gpu}", 1) == 2:
        store.set("gpu_shared", str(gpu))
    if store.add("gpus_told", 1) == world:
        store.set("gpus_all_told", "1")
    store.wait(["gpus_all_told"])
    if not store.check(["gpu_shared"]):
        return "cpu:gloo,cuda:nccl"
    return "cpu:gloo,cuda:gloo"


def _meet(store: PrefixStore, rank: int, world: int) -> None:
    """Wait until all ranks have come, as long as the agent lets a start take."""
    if store.add("ranks_come", 1) == world:
        store.set("ranks_all_came", "1")
    store.wait(["ranks_all_came"])


@contextlib.contextmanager
def _in_time(
    store: PrefixStore, rank: int, world: int, wanted: str, within_s: float, see: str
) -> Iterator[None]:
    """Bound what connects all ranks by `within_s`; without a bound torch waits for half an hour. If
    it takes longer, say which ranks have not begun it, or else which have not ended it, and end
    this process for the world to form anew. `wanted`: what it makes, in words; `see`: what to look
    at. All ranks must call it at the same point."""
    # a connection of its own, since the other one is blocked meanwhile
    again: Any = store.clone()  # type: ignore[attr-defined]
    done, begun, ended = threading.Event(), f"{wanted} begun", f"{wanted} ended"
    again.set(f"{begun}/{rank}", "1")

    def without(key: str) -> list[int]:
        return [r for r in range(world) if not again.check([f"{key}/{r}"])]

    def end() -> None:
        if done.wait(within_s):
            return
        try:
            lost = without(begun) or without(ended)
        except dist.DistError:  # its host has ended
            lost = [0]
        said = (
            f"rank {rank}: wanted {wanted} among all {world} ranks within {within_s:.0f} "
            f"s, found none of rank {', '.join(map(str, lost[:16]))}; open all TCP ports between "
            f"the nodes, and see that {see}"
        )
        print(f"harness: {said}", flush=True)
        write_error(dist.DistNetworkError(said))  # for the agent: the loss of a peer
        os._exit(1)

    watch = threading.Thread(target=end, name="meet", daemon=True)
    watch.start()
    try:
        yield
        again.set(f"{ended}/{rank}", "1")
    finally:
        done.set()
        watch.join()  # a thread that holds a store when the interpreter ends aborts the process


def _sockets() -> dict[str, int]:
    """Return the sockets of this process: name (unique while it is open) and file descriptor. {}:
    the system has no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed just now
                if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                    found[name] = int(fd)
    return found


def _first_sum(device: torch.device) -> None:
    """Sum one number over all ranks, on the device, and wait for it."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Peers:
    """The ranks of the world as this rank sees them. `control`: the group of all ranks on the host
    (gloo); None if this rank is alone.

    `replica_ranks`: ranks of each replica; `grouping`: which ranks those are; `replicas`: number of
    replicas; `replica`: the one that contains this rank; `leads_replica`: this rank is its first,
    and reports for it where each replica counts once. `model_mesh`: the requested mesh, or None;
    `copy_ranks`: ranks that together hold one copy of the model (one replica or several); `place`:
    this rank's among them.
    """

    def __init__(
        self,
        environ: dict[str, str],
        replica_ranks: int | None = None,
        asked_mesh: AskedMesh | None = None,
    ):
        """Read the environment and the requested mesh. Raises BadInput."""
        self.life = ProgressFile(environ.get("HARNESS_PROGRESS"))
        self.life.tell(WorkerPhase.START)
        self.rank = int(environ.get("RANK", 0))
        self.local_rank = int(environ.get("LOCAL_RANK", 0))
        self.world = int(environ.get("WORLD_SIZE", 1))
        self.model_mesh = _model_mesh(environ, asked_mesh, self.world)
        self.replica_ranks = _replica_ranks(environ, replica_ranks, self.model_mesh)
        self.copy_ranks = copy_ranks(self.model_mesh, self.replica_ranks)
        if self.model_mesh is not None:
            self.model_mesh.sizes(self.world)  # refuses a bad mesh before the rendezvous
        self.replicas = replicas_of(self.world, self.replica_ranks)
        self.place = self.rank % self.copy_ranks
        mesh = self.model_mesh
        self.grouping = Grouping(self.replica_ranks) if mesh is None else mesh.grouping
        self.replica = self.grouping.replica(self.rank)
        self.leads_replica = self.grouping.leads(self.rank)
        # `parts`: a replica's ranks that have different positions of the same samples (`cp`). Each
        # computes a part of a micro-batch's loss. `tells_losses`: this is the one rank, of those
        # with the same positions, that reports losses.
        tp, self.parts = (1, 1) if mesh is None else (mesh.tp, mesh.cp)
        self.tells_losses = self.grouping.leads(self.rank - self.rank // tp % self.parts * tp)
        self.host = environ.get("HARNESS_HOST") or this_machine()
        self.device = device_of(environ, self.local_rank)
        self.control: dist.ProcessGroup | None = None
        # all ranks, on the device; kept explicitly, so that it works while the world is hidden
        self.everyone: dist.ProcessGroup | None = None
        self._connections: frozenset[str] = frozenset()  # its own; where /proc shows none, unknown
        self.formed_here = False  # the process group is not the script's
        self._sums = 0  # of this rank alone
        # this process prepares for the next world: it has no process group yet, and `rank` and
        # `world` are guesses
        self.beside = environ.get(BESIDE) == "1"

    def meet(
        self, environ: dict[str, str], backend: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Join the process group, if the environment names one. Raises BadInput."""
        if timeout_s is not None and not 0 < timeout_s < MAX_TIMEOUT_S:
            raise BadInput(
                f"attach(timeout_s={timeout_s}): wanted seconds above 0 and below {MAX_TIMEOUT_S:g}"
            )
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        before = _sockets().keys()
        if self.beside:
            return
        if dist.is_initialized():
            if backend is not None or timeout_s is not None:
                raise BadInput(
                    "attach(backend=..., timeout_s=...): the process group stands already; give "
                    "them to torch.distributed.init_process_group, or call attach before it"
                )
        elif "WORLD_SIZE" in environ:
            self.formed_here = True
            store = _store(environ)
            backend = backend or backend_of(self.device, store, self.world)
            if self.rank == 0 and backend == "cpu:gloo,cuda:gloo":
                print("harness: ranks share a GPU, so they exchange through the host (gloo)")
            if store is None:
                dist.init_process_group(backend, timeout=timeout)
            else:
                self._connect(store, backend, timeout)
        if dist.is_initialized() and self.world > 1:
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.everyone = dist.group.WORLD
            self._connections = frozenset(_sockets().keys() - before)

    def need_world(self) -> None:
        """Leave if this process prepares beside a world, since what follows needs the other ranks:
        it then begins anew, with them. Raises SystemExit."""
        if self.beside:
            raise SystemExit(RESIZE)

    def collectives(self) -> int:
        """Return the number of collectives so far, of the groups of all ranks, and of sums that
        would have been some if this rank were not alone."""
        groups: list[Any] = [self.control, dist.group.WORLD if dist.is_initialized() else None]
        backends = [g._get_backend(kind) for g in groups if g for kind in g._device_types]
        return self._sums + sum(int(one._get_sequence_number_for_group()) for one in backends)

    def hang_up(self) -> bool:
        """Shut the connections to the other ranks, so that those that wait for this one, and a
        thread of this process that waits for them, hear of it at once. Any thread may call it.
        Return whether the connections were known."""
        for name, fd in _sockets().items():
            if name in self._connections:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                    one.getpeername()  # raises for one that listens, whose end gloo cannot bear
                    one.shutdown(socket.SHUT_RDWR)
        return bool(self._connections)

    def disband(self) -> None:
        """Forget the process group, for another one to be formed in this process."""
        self.hang_up()
        self.control = self.everyone = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _connect(
        self, store: PrefixStore, backend: str, timeout: datetime.timedelta | None
    ) -> None:
        """Make the process group, and let a backend that connects in its first collective do one,
        in bounded time."""
        rank, world = self.rank, self.world

        def join() -> None:
            dist.init_process_group(
                backend, timeout=timeout, store=store, rank=rank, world_size=world
            )

        if world == 1:
            join()
            return
        _meet(store, rank, world)
        with _in_time(store, rank, world, "connections", MEET_S, SEE):
            join()
        if CONNECTS_LATE in backend:
            with _in_time(store, rank, world, "the first sum on GPUs", FIRST_SUM_S, SEE_NCCL):
                _first_sum(self.device)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the dimensions of `model_mesh`; without one, "replicas" and "ranks"
        (of one replica). All ranks must first read it at the same point. Raises BadInput without a
        process group."""
        self.need_world()
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
        """The same ranks as a mesh of `EXPERT_DIMS`, or None if experts are not distributed. All
        ranks must first read it at the same point. Raises BadInput without a process group."""
        if self.model_mesh is None or self.model_mesh.ep == 1:
            return None
        sizes = self.model_mesh.expert_sizes(self.world)
        return init_device_mesh(
            self.mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    @property
    def model_devices(self) -> DeviceMesh | None:
        """The `mesh`, or None if no model mesh was requested."""
        return None if self.model_mesh is None else self.mesh

    @functools.cached_property
    def across(self) -> dist.ProcessGroup | None:
        """The group of ranks at the same place in all replicas; None: all ranks. All ranks must
        first read it at the same point."""
        if self.replica_ranks == 1:
            return None
        if self.model_mesh is None:
            return self.mesh.get_group("replicas")
        return self.mesh[DP_REPLICATE, "dp_shard"]._flatten("replicas").get_group()

    @functools.cached_property
    def within(self) -> dist.ProcessGroup | None:
        """The group of this replica's ranks, without pipeline stages; None: it has one rank. All
        ranks must first read it at the same point."""
        if self.replica_ranks == 1:
            return None
        if self.model_mesh is None:
            return self.mesh.get_group("ranks")
        return self.mesh["cp", "tp"]._flatten("ranks").get_group()

    @functools.cached_property
    def same_stage(self) -> dist.ProcessGroup | None:
        """The group of ranks that hold the same pipeline stage, or parts of it; None: all ranks.
        All ranks must first read it at the same point."""
        if self.grouping.stages == 1:
            return None
        return self.mesh[DP_REPLICATE, "dp_shard", "cp", "tp"]._flatten("stage").get_group()

    def by_stage(self, said: Sequence[T]) -> list[dict[int, T]]:
        """Group values in rank order (`said`) by pipeline stage: {rank: value} of each stage."""
        found: list[dict[int, T]] = [{} for _ in range(self.grouping.stages)]
        for rank, one in enumerate(said):
            found[self.grouping.stage(rank)][rank] = one
        return found

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The group of ranks at the same place in all copies of the model, like `across`. None
        without a model mesh: then a copy is a replica, or all ranks hold one together."""
        return None if self.model_mesh is None else self.mesh.get_group(DP_REPLICATE)

    def print(self, *values: Any) -> None:
        """Print the values on rank 0 only."""
        if self.rank == 0:
            print(*values, flush=True)

    def agree(self, value: Callable[[], Any]) -> Any:
        """Return rank 0's value on every rank. Raises on every rank if it fails there."""
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
        """Return the values of all ranks, in rank order."""
        return gathered(value, self.control)

    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of the values of each replica's first rank. It is rounded once, so that
        it does not depend on their order."""
        self.need_world()
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1)
        if self.control is None:
            self._sums += 1
            return float(mine)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self.control)
        leads = self.grouping.leads
        return math.fsum(float(v) for rank, v in enumerate(every) if leads(rank))

    def gather_steps(self, step: int) -> set[int]:
        """Return the set of steps that the ranks are at. `step`: this rank's."""
        if self.control is None:
            return {step}
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(steps, torch.tensor([step]), group=self.control)
        return {int(each) for each in steps}

    def barrier(self) -> None:
        """Wait for all ranks, so that none disconnects while another still communicates."""
        if self.control is not None:
            dist.barrier(group=self.control)


def _model_mesh(environ: dict[str, str], asked: AskedMesh | None, world: int) -> ModelMesh | None:
    """Return the mesh that the environment names, or else the one that the script requests
    (`asked`), for `world` ranks; None: neither. Raises BadInput if they contradict."""
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
    """Return the ranks of each replica: of the mesh, or as the environment says, or as the script
    requests (`asked`), or 1. Raises BadInput if they contradict."""
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
