"""The GPU of a worker, and hiding of the world from a script that is to run as if it were alone, or
as if the ranks of its copy of the model were all. Runs in the worker.

torch.distributed has one default process group, and frameworks use it. Ours is removed while the
script runs, and put back while our own code runs (`inside`). Groups that are passed explicitly
always work. A script that is alone may create a default group of its own meanwhile; the ranks of a
copy get one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness.core.world import UNFIT, BadInput, HarnessError
from harness.node.forkserver import write_error
from harness.node.worker_gpus import GPU_INDEX, GPUS, ONE_GPU, OWN_GPU

# variables from which frameworks learn that there are other ranks
NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def show_one_gpu(environ: MutableMapping[str, str]) -> None:
    """Make only this process' own GPU visible, since a trainer that sees several GPUs uses them
    all. `harness run` has done it before the script began if it could tell that it is needed.
    Raises BadInput if several are in sight afterwards: all ranks would train on the first."""
    if environ.get(ONE_GPU):
        return
    gpu = environ.get(OWN_GPU, "")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if not gpu:  # not started by an agent
            listed = [d for d in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
            listed = listed or [str(i) for i in range(torch.cuda.device_count())]
            gpu = listed[int(environ.get("LOCAL_RANK", 0)) % len(listed)] if listed else ""
        if gpu:
            environ["CUDA_VISIBLE_DEVICES"] = gpu
    count = gpus_in_use()
    if count > 1:
        raise BadInput(
            "wanted to show this script one GPU only, found that it has used CUDA before it made "
            "its trainer; start it with --adapt transformers, lightning or fabric, make the "
            "trainer (or its arguments) first, or set CUDA_VISIBLE_DEVICES to one GPU for each "
            "worker"
        )
    if count:
        environ[ONE_GPU] = "1"


def gpus_in_use() -> int:
    """Return the number of GPUs that CUDA itself gives this process, now and from now on. NVML,
    which `torch.cuda.device_count` may ask, does not know what CUDA has already decided."""
    count: Any = getattr(torch._C, "_cuda_getDeviceCount", None)
    return 0 if count is None else int(count())


def device_of(environ: Mapping[str, str], local_rank: int) -> torch.device:
    """Return this rank's device: its GPU if CUDA works, else the CPU. A rank without the GPU that
    its node has would train on the CPU at a GPU's price, so it leaves as unfit, for another node to
    take its place. Raises BadInput if another node would not help, SystemExit(UNFIT) if it may."""
    promised = int(environ.get(GPUS) or 0)
    if promised and torch.version.cuda is None and torch.version.hip is None:
        raise BadInput(
            f"wanted a GPU for this rank, the node has {promised}, found torch "
            f"{torch.__version__}, which was built without CUDA; install a torch with CUDA, or set "
            "CUDA_VISIBLE_DEVICES='' to train on the CPU"
        )
    one = bool(environ.get(ONE_GPU))
    index = int(environ.get(GPU_INDEX, 0 if one else local_rank))
    try:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if seen and promised:
            torch.cuda.set_device(index % seen)  # only using it shows that it works
    except RuntimeError as e:
        _leave_unfit(f"CUDA does not work: {str(e).splitlines()[0][:300]}")
    if seen < (1 if one and promised else promised):
        _leave_unfit(f"the node has {promised} GPUs, but CUDA shows {seen} of them to this rank")
    # more workers than GPUs share them, round about: see `backend_of` in process_group.py
    return torch.device("cuda", index % seen) if seen else torch.device("cpu")


def _leave_unfit(why: str) -> NoReturn:
    """End this worker so that its node is replaced."""
    what = f"this node is unfit to train: {why}"
    print(f"harness: {what}", flush=True)
    write_error(HarnessError(what))
    raise SystemExit(UNFIT)


@dataclass(frozen=True)
class CopyRanks:
    """The ranks of one copy of the model, which its script takes for all. `number`: which copy;
    `rank`: this one's, of `ranks`; `local`: those on this node, as the node numbers them;
    `local_rank`: this one's number there; `node`: how many nodes of the copy come before it."""

    number: int
    rank: int
    ranks: int
    local: range
    local_rank: int
    node: int

    @classmethod
    def of(cls, environ: Mapping[str, str], ranks: int) -> CopyRanks:
        """Return the copy of `ranks` ranks that this one belongs to. `environ`: the variables of
        the whole world."""
        rank, local_rank = (int(environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        on_node = int(environ.get("LOCAL_WORLD_SIZE", 1))
        number, within = divmod(rank, ranks)
        before = local_rank - within  # on this node, of other copies; negative: on other nodes
        local = range(max(0, before), min(on_node, before + ranks))
        return cls(number, within, ranks, local, local_rank, -(min(0, before) // on_node))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that tell a script of these ranks, from those of the whole world."""
        said = {name: environ[name] for name in NAMES if name in environ}
        return said | {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank - self.local.start),
            "LOCAL_WORLD_SIZE": str(len(self.local)),
            "GROUP_RANK": str(self.node),
        }

    def show_gpus(self, environ: MutableMapping[str, str]) -> None:
        """Make only the GPUs of the copy's ranks on this node visible, so that LOCAL_RANK names
        one. Does nothing where workers share GPUs, or CUDA has been used."""
        listed = [d for d in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
        listed = listed or [str(i) for i in range(torch.cuda.device_count())]
        own = int(environ.get("LOCAL_WORLD_SIZE", 1))
        if torch.cuda.is_initialized() or len(listed) != own:  # type: ignore[no-untyped-call]
            return
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(listed[i] for i in self.local)
        environ[GPUS] = str(len(self.local))
        environ[GPU_INDEX] = str(self.local_rank - self.local.start)

    def meet(self) -> None:
        """Make the default process group of these ranks, with our backend. Ours stands."""
        ours = c10d._get_default_group()
        backend, store = c10d.get_backend(ours), c10d._get_default_store()
        c10d._update_default_pg(None)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"copy {self.number}", store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.ranks,
        )


class HiddenWorld:
    """Our default process group, while it is hidden from the script."""

    def __init__(self) -> None:
        self._ours: Any = None
        self._theirs: Any = None
        self._depth = 0
        self.hidden = False

    def hide(self, environ: MutableMapping[str, str], copy: CopyRanks | None = None) -> None:
        """Hide the world in the environment and in torch.distributed, all but the ranks of `copy`.
        Later calls do nothing. Collective, with a `copy`."""
        if self.hidden:
            return
        self.hidden = True
        shown = {} if copy is None else copy.environment(environ)
        for name in NAMES:
            environ.pop(name, None)
        environ.update(shown)
        if dist.is_initialized():
            self._ours = c10d._get_default_group()
            if copy is None:
                c10d._update_default_pg(None)
            else:
                copy.meet()
                dist.init_process_group = c10d.init_process_group = _met_already
        dist.destroy_process_group = self._destroy
        c10d.destroy_process_group = self._destroy

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Put the default group back while our own code runs. A context manager or decorator."""
        if not self.hidden or self._depth:
            yield
            return
        theirs = self._theirs = c10d.GroupMember.WORLD
        c10d._update_default_pg(self._ours)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            c10d._update_default_pg(theirs)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Put the script's group back within `inside`, for a library that asks for its ranks in
        groups which it made of those. A context manager or decorator."""
        if not self._depth:
            yield
            return
        c10d._update_default_pg(self._theirs)
        try:
            yield
        finally:
            c10d._update_default_pg(self._ours)

    def _destroy(self, group: Any = None) -> None:
        """Replace torch's `destroy_process_group` for the script. torch's own, which a script may
        call at its end, would destroy all groups including ours."""
        if group is None or group is c10d.GroupMember.WORLD:
            if self._depth:
                return  # our groups end with the process
            c10d._update_default_pg(None)
            return
        _destroy_process_group(group)


def _met_already(*args: Any, **kwargs: Any) -> None:
    """Replace torch's `init_process_group` for the script of a copy, whose ranks have met."""


_destroy_process_group = dist.destroy_process_group  # torch's own
world = HiddenWorld()  # of this process


def is_hidden() -> bool:
    return world.hidden
