"""Meshes in order of preference, and which of them the next world has.

Pure. People write them with bars between, `auto` for any that makes good use of the ranks:

    dp_shard=8,tp=2|dp_shard=8|auto:2..4

The first of which a copy can be made is taken, whatever is left over. `auto:8..64` are copies of 8
to 64 ranks that share them by `dp_shard`: of the powers of two and of what divides the ranks at
hand, those that leave the fewest ranks over, and of these the greatest, since a rank of a greater
copy holds less. Who wants copies to stay small (within a node, say) names that size before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.core.mesh import MOST, ModelMesh, mesh_of, parse
from harness.core.world import BadInput, whole_replicas

AUTO = "auto"
MOST_MESHES = 16  # in a list

# as `attach(mesh=...)` takes them: one mesh, what people write, or a list of these
AskedMesh = Mapping[str, int] | str | Sequence[Mapping[str, int] | str]


@dataclass(frozen=True)
class AutoMesh:
    """Copies of `least` to `most` ranks. `inner`: all that is not `dp_shard`."""

    least: int
    most: int
    inner: ModelMesh = field(default_factory=ModelMesh)

    def meshes(self, ranks: int) -> list[ModelMesh]:
        """Those that `ranks` may be shared out by, the greatest first."""
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
    """Meshes that a run may have, in order of preference. `wait_s`: how long a world waits for who
    is missing for a better one."""

    each: tuple[ModelMesh | AutoMesh, ...]
    wait_s: float = 30.0

    @property
    def wanted(self) -> ModelMesh:
        """The first; of `auto` the smallest, which the fewest ranks make."""
        first = self.each[0]
        return first if isinstance(first, ModelMesh) else first.meshes(first.least)[-1]

    @property
    def fixed(self) -> list[ModelMesh]:
        """One of each kind, for what all of a kind have in common."""
        return [one if isinstance(one, ModelMesh) else one.inner for one in self.each]

    def place(self, mesh: ModelMesh) -> int | None:
        """In the order of preference, 0 first; None: it is none of them."""
        for i, one in enumerate(self.each):
            if one == mesh or (isinstance(one, AutoMesh) and one.allows(mesh)):
                return i
        return None

    def makes(self, world: int) -> ModelMesh | None:
        """The first that makes whole copies of all these ranks; None: none does."""
        found = (mesh for one in self.each for mesh in _meshes(one, world))
        return next((mesh for mesh in found if world and not world % mesh.copy_ranks), None)

    def of_world(self, world: int) -> ModelMesh:
        """As `makes`. Raises BadInput if none does."""
        if (found := self.makes(world)) is not None:
            return found
        if len(self.each) == 1 and isinstance(self.each[0], ModelMesh):
            self.each[0].sizes(world)  # says what would do
        raise BadInput(
            f"mesh {self}: {world} rank{'s' * (world != 1)} make no whole number of copies of any "
            "of these; use another number of ranks, or more meshes (harness run --mesh, "
            "HARNESS_MESH)"
        )

    def choose(
        self, sizes: Sequence[int], max_replicas: int | None, worlds: Collection[int] = ()
    ) -> tuple[ModelMesh | None, list[int]]:
        """Of the next world: its mesh, and the places in `sizes` of who is in it (see
        `whole_replicas`); None and nobody: no world can be made. `max_replicas`: for which a step
        has work."""
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
        """As `parse_choice` reads it."""
        return "|".join(map(str, self.each))


def _meshes(one: ModelMesh | AutoMesh, ranks: int) -> list[ModelMesh]:
    return [one] if isinstance(one, ModelMesh) else one.meshes(ranks)


def parse_choice(text: str) -> MeshChoice:
    """As people write it. Raises BadInput."""
    words = [word.strip() for word in text.split("|")]
    if len(words) > MOST_MESHES:
        raise BadInput(f"mesh: wanted at most {MOST_MESHES} meshes to choose from: {text!r:.80}")
    return MeshChoice(
        tuple(_auto(word) if word.startswith(AUTO) else parse(word) for word in words)
    )


def _auto(text: str) -> AutoMesh:
    """ "auto:8..64", "auto:8..64,tp=2". Raises BadInput."""
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
    """From what a script asks for. Raises BadInput."""
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
    """As HARNESS_MESH says; None without it. Raises BadInput."""
    text = environ.get("HARNESS_MESH", "")
    return parse_choice(text) if text else None
