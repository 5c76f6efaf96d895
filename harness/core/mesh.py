"""The mesh of a run, in the words of torch's DeviceMesh: how the ranks of one copy share it.

Pure. Ranks are numbered with `dp_replicate` outermost, so that a copy of the model has consecutive
ranks. What talks most is innermost and stays inside a node; stages of a pipeline talk least. With
the places on each dimension:

    rank = (((dp_replicate * PP + pp) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

`ep` makes no ranks of its own: experts are shared out over ranks of `dp_shard`, which is then

    dp_shard = dp_shard_mod_ep * EP + ep

Only `dp_replicate` changes while a run goes on: copies come and go, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from harness.core.batch import Grouping
from harness.core.world import BadInput

DP_REPLICATE = "dp_replicate"
EXPERT_DIMS = (DP_REPLICATE, "dp_shard_mod_ep", "ep")  # over which experts lie
MOST = 1 << 16  # ranks of a copy


@dataclass(frozen=True, kw_only=True)
class ModelMesh:
    """`dp_shard`: ranks that share parameters, gradients and optimizer state, and are given samples
    of their own (FSDP). The others are given the same samples: `pp` ranks share the layers, `cp`
    the positions of a sequence, `tp` matrix products. `ep`: of `dp_shard`, those that share the
    experts of a layer."""

    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def replica_ranks(self) -> int:
        """Ranks that are given the same samples."""
        return self.pp * self.cp * self.tp

    @property
    def copy_ranks(self) -> int:
        """Ranks that hold one copy of the model together: a world is a multiple of it."""
        return self.replica_ranks * self.dp_shard

    @property
    def grouping(self) -> Grouping:
        """Which ranks make a replica."""
        return Grouping(self.replica_ranks, self.pp, self.dp_shard)

    def sizes(self, world: int) -> dict[str, int]:
        """Of all dimensions, in the order of ranks. Raises BadInput if no whole number of copies
        makes that world."""
        copies, left = divmod(world, self.copy_ranks)
        if left or not copies:
            most = world - left
            near = f"{most} or {most + self.copy_ranks}" if most else str(self.copy_ranks)
            raise BadInput(
                f"mesh {self}: {world} rank{'s' * (world != 1)} make no whole number of copies of "
                f"{self.copy_ranks} ranks; use {near} ranks, or another mesh (harness run --mesh, "
                "HARNESS_MESH)"
            )
        inner = {"pp": self.pp, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        return {DP_REPLICATE: copies, **inner}

    def expert_sizes(self, world: int) -> dict[str, int]:
        """Of `EXPERT_DIMS`: the same ranks, cut as experts are. Raises BadInput as `sizes`."""
        sizes = (self.sizes(world)[DP_REPLICATE], self.dp_shard // self.ep, self.ep)
        return dict(zip(EXPERT_DIMS, sizes, strict=True))

    def __str__(self) -> str:
        """As `parse` reads it."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(f"{name}={size}" for name, size in said.items() if size > 1) or "dp_shard=1"


def copy_ranks(mesh: ModelMesh | None, replica_ranks: int) -> int:
    """Ranks that hold one copy of the model together; without a mesh a replica does."""
    return replica_ranks if mesh is None else mesh.copy_ranks


WORDS = tuple(f.name for f in fields(ModelMesh))


def mesh_of(sizes: Mapping[str, int]) -> ModelMesh:
    """From sizes by name; those that are not named are 1. `dp_replicate` may be -1: as many as
    there are ranks for, which it always is. Raises BadInput."""
    wanted = f"wanted sizes of {', '.join(WORDS)}, such as dp_shard=8,tp=2"
    for name, size in sizes.items():
        if name == DP_REPLICATE and size == -1:
            continue
        if name == DP_REPLICATE:
            raise BadInput(
                f"mesh: {wanted}; found {name}={size}, but copies come and go with the nodes: "
                "leave it out, or say -1; `--worlds` limits the numbers of ranks that train"
            )
        if name not in WORDS:
            raise BadInput(f"mesh: {wanted}; found {name!r}")
        if type(size) is not int or not 1 <= size <= MOST:
            raise BadInput(f"mesh: {wanted}; found {name}={size!r}: it is from 1 to {MOST}")
    if sizes.get("pp", 1) != 1 and sizes.get("cp", 1) != 1:
        raise BadInput("mesh: found pp beside cp, which was never tried; leave one of them out")
    found = ModelMesh(**{name: size for name, size in sizes.items() if name in WORDS})
    if found.dp_shard % found.ep:
        raise BadInput(f"mesh {found}: wanted ep to divide dp_shard, over whose ranks experts lie")
    if found.ep > 1 and found.replica_ranks > 1:
        raise BadInput(
            f"mesh {found}: ep is there beside dp_shard only; leave it out, or the other dimensions"
        )
    if found.copy_ranks > MOST:
        raise BadInput(f"mesh {found}: wanted at most {MOST} ranks of a copy")
    return found


def parse(text: str) -> ModelMesh:
    """As people write it, "dp_shard=8,tp=2". Raises BadInput."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, is_set, size = (part.strip() for part in word.partition("="))
        digits = size.removeprefix("-")
        if not is_set or not (digits.isascii() and digits.isdecimal()) or len(size) > 9:
            raise BadInput(f"mesh: wanted NAME=SIZE,..., such as dp_shard=8,tp=2; found {text!r}")
        if name in sizes:
            raise BadInput(f"mesh: wanted each name once, found {name!r} twice in {text!r}")
        sizes[name] = int(size)
    return mesh_of(sizes)


def replica_ranks_told(environ: Mapping[str, str]) -> int | None:
    """As HARNESS_REPLICA_RANKS says; None without it. Raises BadInput."""
    text = environ.get("HARNESS_REPLICA_RANKS", "")
    if text and not (text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise BadInput(f"HARNESS_REPLICA_RANKS={text!r:.80}: wanted a number of ranks, at least 1")
    return int(text) if text else None
