"""The world, hidden from a script that shall believe that it is alone. Runs in the worker.

torch.distributed knows one default process group, and frameworks ask for it. Ours stands aside
while the script runs, and comes back while our own code does (`inside`). Groups that are named
explicitly work all the time. A script may make a default group of its own meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness.core.world import BadInput

# by which frameworks find out that they are not alone
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
ONE_GPU = "HARNESS_ONE_GPU"  # this process sees its own GPU only, as number 0


def show_one_gpu(environ: MutableMapping[str, str]) -> None:
    """From here on this process sees its own GPU only: a trainer that sees several takes them all.
    Before CUDA is used. Raises BadInput afterwards."""
    local_rank = int(environ.get("LOCAL_RANK", 0))
    if not torch.cuda.is_available() or environ.get(ONE_GPU):
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if torch.cuda.device_count() > 1:
            raise BadInput(
                "wanted to show this script one GPU only, found that it has used CUDA before it "
                "made its trainer; make the trainer (or its arguments) first, or set "
                "CUDA_VISIBLE_DEVICES to one GPU for each worker"
            )
        return
    seen = environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank % len(devices)]
    environ[ONE_GPU] = "1"


class HiddenWorld:
    """The default process group, while the script does not see it."""

    def __init__(self) -> None:
        self._ours: Any = None
        self._depth = 0
        self.hidden = False

    def hide(self, environ: MutableMapping[str, str]) -> None:
        """From the environment, and from torch.distributed. Once."""
        if self.hidden:
            return
        self.hidden = True
        for name in NAMES:
            environ.pop(name, None)
        if dist.is_initialized():
            self._ours = c10d._get_default_group()
            c10d._update_default_pg(None)
        dist.destroy_process_group = self._destroy
        c10d.destroy_process_group = self._destroy

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Our own code runs: the world is there. For a block, or as a decorator."""
        if not self.hidden or self._depth:
            yield
            return
        theirs = c10d.GroupMember.WORLD
        c10d._update_default_pg(self._ours)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            c10d._update_default_pg(theirs)

    def _destroy(self, group: Any = None) -> None:
        """What a script that ends calls. torch would destroy all groups, ours with them."""
        if group is None or group is c10d.GroupMember.WORLD:
            if self._depth:
                return  # ours end with the process
            c10d._update_default_pg(None)
            return
        _destroy_process_group(group)


_destroy_process_group = dist.destroy_process_group  # torch's own
world = HiddenWorld()  # of this process


def is_hidden() -> bool:
    return world.hidden
