"""The device mesh of a run, in the terms of torch's DeviceMesh: how ranks share one model copy.

Pure. Ranks are numbered with `dp_replicate` outermost, so that a copy of the model has consecutive
ranks. The dimensions with the most communication are innermost and stay inside a node; pipeline
stages communicate least. With the coordinate of a rank on each dimension:

    rank = (((dp_replicate * PP + pp) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

`ep` adds no ranks: experts are distributed over ranks of `dp_shard`, whose coordinate is then

    dp_shard = dp_shard_mod_ep * EP + ep

Only `dp_replicate` changes during a run: copies come and go as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from harness.core.batch import Grouping
from harness.core.world import BadInput, whole_replicas

DP_REPLICATE = "dp_replicate"
EXPERT_DIMS = (DP_REPLICATE, "dp_shard_mod_ep", "ep")  # the mesh dimensions of experts
MOST = 1 << 16  # most ranks of a copy


@dataclass(frozen=True, kw_only=True)
class ModelMesh:
    """The mesh of one model copy. `dp_shard`: ranks that share parameters, gradients and optimizer
    state, each with its own samples (FSDP). Ranks of the other dimensions get the same samples:
    `pp` ranks share the layers, `cp` the positions of a sequence, `tp` matrix products. `ep`: the
    ranks of `dp_shard` that share the experts of a layer."""

    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that get the same samples."""
        return self.pp * self.cp * self.tp

    @property
    def copy_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model; a world is a multiple of it."""
        return self.replica_ranks * self.dp_shard

    @property
    def grouping(self) -> Grouping:
        """The grouping of ranks into replicas."""
        return Grouping(self.replica_ranks, self.pp, self.dp_shard)

    def sizes(self, world: int) -> dict[str, int]:
        """Return the sizes of all dimensions, outermost first. Raises BadInput if `world` ranks
        make no whole number of copies."""
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
        """Return the sizes of `EXPERT_DIMS`, the expert mesh over the same ranks. Raises BadInput;
        see `sizes`."""
        sizes = (self.sizes(world)[DP_REPLICATE], self.dp_shard // self.ep, self.ep)
        return dict(zip(EXPERT_DIMS, sizes, strict=True))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(f"{name}={size}" for name, size in said.items() if size > 1) or "dp_shard=1"


def copy_ranks(mesh: ModelMesh | None, replica_ranks: int) -> int:
    """Return the number of ranks that hold one copy of the model; without a mesh, a replica's."""
    return replica_ranks if mesh is None else mesh.copy_ranks


WORDS = tuple(f.name for f in fields(ModelMesh))


def mesh_of(sizes: Mapping[str, int]) -> ModelMesh:
    """Return the mesh with these sizes by name; missing ones are 1. `dp_replicate` may only be -1,
    for as many copies as there are ranks for, which is always so. Raises BadInput."""
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
    """Parse a mesh as people write it, such as "dp_shard=8,tp=2". Raises BadInput."""
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
    """Return the number in HARNESS_REPLICA_RANKS, or None if it is unset. Raises BadInput."""
    text = environ.get("HARNESS_REPLICA_RANKS", "")
    if text and not (text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise BadInput(f"HARNESS_REPLICA_RANKS={text!r:.80}: wanted a number of ranks, at least 1")
    return int(text) if text else None


# Meshes in order of preference, and the choice of one for the next world.

AUTO = "auto"
MOST_MESHES = 16  # in a list

# the argument of `attach(mesh=...)`: one mesh, the text form, or a list of these
AskedMesh = Mapping[str, int] | str | Sequence[Mapping[str, int] | str]


@dataclass(frozen=True)
class AutoMesh:
    """A range of meshes: copies of `least` to `most` ranks. `inner`: all but `dp_shard`."""

    least: int
    most: int
    inner: ModelMesh = field(default_factory=ModelMesh)

    def meshes(self, ranks: int) -> list[ModelMesh]:
        """Return the meshes whose copies `ranks` ranks can make, the greatest first."""
        each = self.inner.copy_ranks
        found = [
            replace(self.inner, dp_shard=shards)
            for shards in range(-(-self.least // each), min(self.most, ranks) // each + 1)
            if not shards & (shards - 1) or not ranks % (shards * each)
        ]
        return found[::-1]

    def allows(self, mesh: ModelMesh) -> bool:
        return (
            self.least <= mesh.copy_ranks <= self.most and replace(mesh, dp_shard=1) == self.inner
        )

    def __str__(self) -> str:
        more = "" if self.inner == ModelMesh() else f",{self.inner}"
        return f"{AUTO}:{self.least}..{self.most}{more}"


@dataclass(frozen=True)
class MeshChoice:
    """Meshes that a run may have, in order of preference. `wait_s`: how long a world waits for the
    members that a better mesh needs."""

    each: tuple[ModelMesh | AutoMesh, ...]
    wait_s: float = 30.0

    @property
    def wanted(self) -> ModelMesh:
        """The preferred mesh: the first one; for `auto` its smallest, which needs the fewest
        ranks."""
        first = self.each[0]
        return first if isinstance(first, ModelMesh) else first.meshes(first.least)[-1]

    @property
    def fixed(self) -> list[ModelMesh]:
        """One mesh per entry; for `auto` its `inner`, the part that all of its meshes share."""
        return [one if isinstance(one, ModelMesh) else one.inner for one in self.each]

    def place(self, mesh: ModelMesh) -> int | None:
        """Return the mesh's index in the order of preference, or None if it is none of them."""
        for i, one in enumerate(self.each):
            if one == mesh or (isinstance(one, AutoMesh) and one.allows(mesh)):
                return i
        return None

    def makes(self, world: int) -> ModelMesh | None:
        """Return the first mesh that splits all `world` ranks into whole copies, or None."""
        found = (mesh for one in self.each for mesh in _meshes(one, world))
        return next((mesh for mesh in found if world and not world % mesh.copy_ranks), None)

    def of_world(self, world: int) -> ModelMesh:
        """Return the first mesh that splits all `world` ranks into whole copies. Raises BadInput
        if there is none."""
        if (found := self.makes(world)) is not None:
            return found
        if len(self.each) == 1 and isinstance(self.each[0], ModelMesh):
            self.each[0].sizes(world)  # raises with a message that names numbers that work
        raise BadInput(
            f"mesh {self}: {world} rank{'s' * (world != 1)} make no whole number of copies of any "
            "of these; use another number of ranks, or more meshes (harness run --mesh, "
            "HARNESS_MESH)"
        )

    def choose(
        self, sizes: Sequence[int], max_replicas: int | None, worlds: Collection[int] = ()
    ) -> tuple[ModelMesh | None, list[int]]:
        """Return the next world's mesh and the indices in `sizes` of its members (see
        `whole_replicas`), or (None, []) if no world can be made. `max_replicas`: the most replicas
        that a step has work for; None: no limit."""
        for one in self.each:
            best: tuple[int, ModelMesh | None, list[int]] = 0, None, []
            for mesh in _meshes(one, sum(sizes)):
                most = None if max_replicas is None else max_replicas * mesh.replica_ranks
                places = whole_replicas(sizes, mesh.copy_ranks, most, worlds)
                if (used := sum(sizes[i] for i in places)) > best[0]:
                    best = used, mesh, places
            if best[0]:
                return best[1:]
        return None, []

    def __str__(self) -> str:
        """Return the text that `parse_choice` reads."""
        return "|".join(map(str, self.each))


def _meshes(one: ModelMesh | AutoMesh, ranks: int) -> list[ModelMesh]:
    return [one] if isinstance(one, ModelMesh) else one.meshes(ranks)


def parse_choice(text: str) -> MeshChoice:
    """Parse the text form of a choice of meshes. Raises BadInput."""
    words = [word.strip() for word in text.split("|")]
    if len(words) > MOST_MESHES:
        raise BadInput(f"mesh: wanted at most {MOST_MESHES} meshes to choose from: {text!r:.80}")
    return MeshChoice(
        tuple(_auto(word) if word.startswith(AUTO) else parse(word) for word in words)
    )


def _auto(text: str) -> AutoMesh:
    """Parse "auto:8..64" or "auto:8..64,tp=2". Raises BadInput."""
    wanted = "mesh: wanted auto:LEAST..MOST ranks of a copy, such as auto:8..64 or auto:8..64,tp=2"
    head, _, rest = text.partition(",")
    least, dots, most = (part.strip() for part in head.removeprefix(f"{AUTO}:").partition(".."))
    for size in (least, most):
        if not (dots and size.isascii() and size.isdecimal() and len(size) <= 9):
            raise BadInput(f"{wanted}; found {text!r:.80}")
    inner = parse(rest) if rest else ModelMesh()
    if inner.dp_shard > 1:
        raise BadInput(f"{wanted}; found dp_shard={inner.dp_shard} in {text!r}, which it chooses")
    found = AutoMesh(int(least), int(most), inner)
    if not 1 <= found.least <= found.most <= MOST:
        raise BadInput(f"{wanted}, from 1 to {MOST}; found {text!r}")
    if not found.meshes(found.most):
        raise BadInput(f"{wanted}; found {text!r}, in which no copy is of whole groups of {inner}")
    return found


def choice_of(asked: AskedMesh) -> MeshChoice:
    """Return the choice for a script's `attach(mesh=...)`. Raises BadInput."""
    if isinstance(asked, str):
        return parse_choice(asked)
    if isinstance(asked, Mapping):
        return MeshChoice((mesh_of(asked),))
    if not asked or not all(isinstance(one, Mapping | str) for one in asked):
        raise BadInput(
            "mesh: wanted sizes by name, such as {'dp_shard': 8}, text as `harness run --mesh` "
            f"takes it, or a list of these in order of preference; found {asked!r:.80}"
        )
    return MeshChoice(tuple(one for part in asked for one in choice_of(part).each))


def meshes_told(environ: Mapping[str, str]) -> MeshChoice | None:
    """Return the choice in HARNESS_MESH, or None if it is unset. Raises BadInput."""
    text = environ.get("HARNESS_MESH", "")
    return parse_choice(text) if text else None
