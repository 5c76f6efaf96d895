"""Every interleaving of the real commit protocol, in small worlds; and the same with the
protocol broken on purpose."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

from storage import (
    Keep,
    Manifest,
    MemoryStore,
    NotFound,
    ObjectStore,
    Ref,
    SnapshotCorrupt,
    Snapshots,
    StoreUnavailable,
)
from storage.snapshots.manifest import PARTS, PartList
from storage.snapshots.retention import Pruner
from storage.snapshots.snapshot_keys import DOOM, list_key, manifest_key
from support.interleavings import Actor, Explored, ExploredState, SayWord, TraceViolation, explore

OLD, ZOMBIE, NEW, NEWER = Ref(1, 1), Ref(1, 9), Ref(2, 2), Ref(2, 3)
Make = Callable[[ObjectStore], Snapshots]


def content(ref: Ref, rank: int) -> bytes:
    return f"{ref} rank {rank}".encode()


def honest_bytes(ref: Ref, rank: int, found: bytes) -> bool:
    return found in (content(ref, rank), FROZEN + own(ref, rank))


def before(
    make: Make = Snapshots, refs: tuple[Ref, ...] = (OLD,), world: int = 1
) -> dict[str, bytes]:
    objects: dict[str, bytes] = {}
    for ref in refs:
        for rank in range(world):
            writer(make, ref, rank, world, "t0")(
                MemoryStore("memory://", objects), lambda word: None
            )
    return objects


def writer(
    make: Make, ref: Ref, rank: int, world: int, token: str, tries: int = 1, commits: int = 1
) -> Actor:
    def act(store: ObjectStore, say: SayWord) -> None:
        snapshots = make(store)
        for left in reversed(range(tries)):
            try:
                snapshots.write(ref, rank, world, {"x": content(ref, rank)}, {}, {}, token)
                for _ in range(commits):
                    if snapshots.commit(ref, world):
                        say(("committed", ref))
                        return
                return
            except StoreUnavailable:
                if not left:
                    raise

    return act


def committer(make: Make, ref: Ref, world: int) -> Actor:
    def act(store: ObjectStore, say: SayWord) -> None:
        if make(store).commit(ref, world):
            say(("committed", ref))

    return act


def pruner(make: Make, last: int = 1) -> Actor:
    def act(store: ObjectStore, say: SayWord) -> None:
        make(store).prune(Keep(last=last))

    return act


def reader(make: Make) -> Actor:
    """Reads the newest one whole, the next one down if that is gone by then; says what it ended
    with."""

    def act(store: ObjectStore, say: SayWord) -> None:
        snapshots = make(store)
        for _ in range(2):
            newest = snapshots.latest()
            if newest is None:
                say(("read", None))
                return
            try:
                found = tuple(snapshots.read(newest, p.key, 0, p.nbytes) for p in newest.parts)
            except SnapshotCorrupt:
                continue
            say(("read", newest.ref, found))
            return

    return act


def check(
    make: Make, at_start: Ref | None, damaged: Ref | None = None
) -> Callable[[ExploredState], str | None]:
    """What must hold in every state. `damaged`: by the world itself, so it need not be whole at
    the end."""

    @functools.cache
    def newest(objects: frozenset[tuple[str, bytes]]) -> tuple[Ref | None, str]:
        snapshots = make(MemoryStore("memory://", dict(objects)))
        manifest = snapshots.latest()
        if manifest is None:
            return None, ""
        honest = Snapshots(snapshots.store)
        try:
            honest.verify(manifest)
        except SnapshotCorrupt as e:
            return manifest.ref, str(e)
        for part in manifest.parts:
            if not honest_bytes(
                manifest.ref,
                int(part.key.split("/r")[1][:5]),
                honest.read(manifest, part.key, 0, part.nbytes),
            ):
                return manifest.ref, f"{part.key} has other bytes than its writer had"
        return manifest.ref, ""

    def look(view: ExploredState) -> str | None:
        ref, bad = newest(frozenset(view.objects.items()))
        if bad:
            return f"the newest valid snapshot is not whole: {bad}"
        committed = [word[1] for _, word in view.said if word[0] == "committed"] + (
            [at_start] if at_start else []
        )
        if committed and (ref is None or ref < max(committed)):
            return f"the newest valid snapshot is {ref}; {max(committed)} was reported committed"
        if view.settled:
            left = make(MemoryStore("memory://", dict(view.objects)))
            for one in (ref for ref in left.refs() if ref != damaged):
                try:
                    left.verify(left.load(one))
                except SnapshotCorrupt as e:
                    return f"all is over, and a manifest without its parts stays: {e}"
        for name, word in view.said:
            if word[0] == "raised":
                return f"{name} raised {word[1]}"
            if word[0] == "read" and word[1] is None and at_start:
                return f"{name} found nothing"
            if word[0] == "read" and word[1] is not None:
                ref, found = word[1], word[2]
                if not all(honest_bytes(ref, rank, one) for rank, one in enumerate(found)):
                    return f"{name} got other bytes of {ref} than were written: {found}"
        return None

    return look


# ---- the worlds ----------------------------------------------------------------------------------
def two_ranks(make: Make) -> Explored:
    """Two ranks of a world, unknown outcomes and requests that land late."""
    actors = {f"rank{r}": writer(make, NEW, r, 2, "t", tries=2) for r in range(2)}
    return explore(actors, before(make), check(make, OLD), unknowns=1)


def two_ranks_and_a_reader(make: Make) -> Explored:
    actors = {f"rank{r}": writer(make, NEW, r, 2, "t") for r in range(2)}
    return explore({**actors, "reader": reader(make)}, before(make), check(make, OLD))


def two_incarnations(make: Make) -> Explored:
    """The same rank twice (one hung and was replaced), with a reader."""
    actors = {name: writer(make, NEW, 0, 1, name, tries=1) for name in ("first", "second")}
    return explore({**actors, "reader": reader(make)}, before(make), check(make, OLD))


def a_zombie(make: Make) -> Explored:
    """A writer of an older epoch, far ahead by its own count, beside a new world, its pruner
    and unknown outcomes."""
    actors = {
        "zombie": writer(make, ZOMBIE, 0, 1, "z"),
        "new": writer(make, NEW, 0, 1, "t"),
        "pruner": pruner(make),
    }
    return explore(actors, before(make), check(make, OLD))


def a_late_commit(make: Make) -> Explored:
    """All lists of NEW are there; a committer and a pruner meet while NEWER is committed, and
    somebody reads."""
    objects = before(make, (OLD, NEWER))
    writer(make, NEW, 0, 1, "t")(MemoryStore("memory://", objects), lambda word: None)
    del objects[manifest_key(NEW)]
    actors = {"committer": committer(make, NEW, 1), "pruner": pruner(make), "reader": reader(make)}
    return explore(actors, objects, check(make, NEWER), unknowns=1)


def a_reader_and_a_pruner(make: Make) -> Explored:
    actors = {"new": writer(make, NEWER, 0, 1, "t"), "pruner": pruner(make), "reader": reader(make)}
    return explore(actors, before(make, (OLD, NEW)), check(make, NEW))


def two_pruners(make: Make) -> Explored:
    """The newest is damaged: both must leave the one below it alone."""
    objects = before(make, (OLD, NEW, NEWER))
    del objects[next(k for k in objects if k.startswith(f"{PARTS}{NEWER.name}/r"))]
    return explore(
        {"one": pruner(make), "two": pruner(make), "reader": reader(make)},
        objects,
        check(make, NEW, NEWER),
    )


def everybody(make: Make) -> Explored:
    """Two ranks, a zombie, a pruner and a reader at once."""
    actors = {f"rank{r}": writer(make, NEW, r, 2, "t") for r in range(2)}
    others = {
        "zombie": writer(make, ZOMBIE, 0, 1, "z"),
        "pruner": pruner(make),
        "reader": reader(make),
    }
    return explore({**actors, **others}, before(make), check(make, OLD), max_states=3_000_000)


# ---- worlds in which snapshots refer to older ones -----------------------------------------------
MID, MID2 = Ref(1, 2), Ref(1, 3)  # between OLD and NEW
FROZEN = b"frozen weights! "  # two chunks, the same in all snapshots


def own(ref: Ref, rank: int) -> bytes:
    """A chunk that no other snapshot has."""
    return f"{ref.epoch}/{ref.step}/{rank}".encode().ljust(8)


def thrifty(kind: type[Snapshots]) -> Make:
    return lambda store: kind(store, chunk_nbytes=8)


def sender(
    make: Make, ref: Ref, base: Ref | None, rank: int = 0, world: int = 1, token: str = "t"
) -> Actor:
    """Sends only what `base` does not have."""

    def act(store: ObjectStore, say: SayWord) -> None:
        snapshots = make(store)
        try:
            known = snapshots.load(base) if base else None
        except NotFound:
            return
        snapshots.write(ref, rank, world, {"x": FROZEN + own(ref, rank)}, {}, {}, token, known)
        if snapshots.commit(ref, world):
            say(("committed", ref))

    return act


def pruners_of(make: Make, n: int) -> dict[str, Actor]:
    return {f"pruner{i}": pruner(make) for i in range(n)}


def with_bases(
    make: Make, chain: list[tuple[Ref, Ref | None]], gone: tuple[Ref, ...] = ()
) -> dict[str, bytes]:
    """A bucket in which these were committed, each with its base, and `gone` were pruned."""
    objects: dict[str, bytes] = {}
    store = MemoryStore("memory://", objects)
    for ref, base in chain:
        sender(make, ref, base)(store, lambda word: None)
    if gone:
        Snapshots(store).prune(lambda refs: set(refs) - set(gone))
    return objects


def its_base_is_pruned(kind: type[Snapshots]) -> Explored:
    """NEW refers to OLD, which two pruners want to delete, for MID is newer and they keep one;
    unknown outcomes; a reader."""
    make = thrifty(kind)
    actors = {"new": sender(make, NEW, OLD), "pruner": pruner(make), "reader": reader(make)}
    return explore(
        actors,
        with_bases(make, [(OLD, None), (MID, None)]),
        check(make, MID),
        unknowns=1,
        max_states=3_000_000,
    )


def a_chain(kind: type[Snapshots], pruners: int = 1) -> Explored:
    """OLD is pruned, its object lives on by MID alone; NEW refers to that by way of MID while
    MID is pruned."""
    make = thrifty(kind)
    objects = with_bases(make, [(OLD, None), (MID, OLD), (MID2, None)], gone=(OLD,))
    actors = {"new": sender(make, NEW, MID), **pruners_of(make, pruners)}
    return explore(
        actors, objects, check(make, MID2), unknowns=int(pruners == 1), max_states=3_000_000
    )


def two_ranks_with_a_base(kind: type[Snapshots]) -> Explored:
    """Rank 0 refers to OLD, rank 1 to nothing; each commits; OLD is pruned."""
    make = thrifty(kind)
    actors = {
        "rank0": sender(make, NEW, OLD, 0, 2),
        "rank1": sender(make, NEW, None, 1, 2),
        "pruner": pruner(make),
    }
    return explore(
        actors, with_bases(make, [(OLD, None), (MID, None)]), check(make, MID), max_states=3_000_000
    )


def a_late_request_to_commit(kind: type[Snapshots], pruners: int = 1) -> Explored:
    """All lists of NEW are there, which refers to OLD; the create of its manifest may land
    whenever it likes, beside pruners."""
    make = thrifty(kind)
    objects = with_bases(make, [(OLD, None), (MID, None)])
    sender(make, NEW, OLD)(MemoryStore("memory://", objects), lambda word: None)
    del objects[manifest_key(NEW)]
    actors = {"committer": committer(make, NEW, 1), **pruners_of(make, pruners)}
    return explore(actors, objects, check(make, MID), unknowns=1, max_states=3_000_000)


def a_damaged_base(kind: type[Snapshots]) -> Explored:
    """MID, to whose objects NEW refers, turns out damaged while NEW is written and pruned, and
    what NEW needs of it is whole."""
    make = thrifty(kind)
    objects = with_bases(make, [(OLD, None), (MID, None)])
    known = make(MemoryStore("memory://", dict(objects))).load(MID)
    objects[manifest_key(MID)] = b"not a manifest"

    def new(store: ObjectStore, say: SayWord) -> None:
        snapshots = make(store)
        snapshots.write(NEW, 0, 1, {"x": FROZEN + own(NEW, 0)}, {}, {}, "t", known)
        if snapshots.commit(NEW, 1):
            say(("committed", NEW))

    actors: dict[str, Actor] = {
        "new": new,
        "newer": sender(make, NEWER, None),
        "pruner": pruner(make),
    }
    return explore(actors, objects, check(make, OLD, MID), max_states=3_000_000)


def a_slow_reader(kind: type[Snapshots], pruners: int = 1) -> Explored:
    """It says that it reads OLD, and must be able to do so to the end if it was told that it
    may."""
    make = thrifty(kind)

    def slow(store: ObjectStore, say: SayWord) -> None:
        snapshots = make(store)
        try:
            manifest = snapshots.load(OLD)
        except NotFound:
            return
        if snapshots.begin_reading(OLD, "me"):
            for i, part in enumerate(manifest.parts):
                # raises if it is gone
                say(("piece", OLD, i, snapshots.read(manifest, part.key, 0, part.nbytes)))
            snapshots.end_reading(OLD, "me")

    actors = {"slow": slow, **pruners_of(make, pruners)}
    return explore(
        actors,
        with_bases(make, [(OLD, None), (MID, OLD), (MID2, None)]),
        check(make, MID2),
        max_states=3_000_000,
    )


# ---- worlds of many ranks, whose lists are merged a group at a time -------------------------------
class OneByOne(Snapshots):
    """Groups of one rank: the smallest world with groups has two."""

    group_ranks = 1


class InPairs(Snapshots):
    group_ranks = 2


def grouped_ranks(kind: type[Snapshots]) -> Explored:
    """Two groups; each rank writes, merges its group, and commits if it can; rank 1 leaves the
    manifest to rank 0, which may come too early; a third comes later and does all."""
    actors = {f"rank{r}": grouped_writer(kind, NEW, r, 2) for r in range(2)}
    return explore(
        {**actors, "late": committer(kind, NEW, 2)}, before(kind), check(kind, OLD), unknowns=1
    )


def grouped_writer(kind: type[Snapshots], ref: Ref, rank: int, world: int) -> Actor:
    def act(store: ObjectStore, say: SayWord) -> None:
        snapshots = kind(store)
        with contextlib.suppress(StoreUnavailable):
            snapshots.write(ref, rank, world, {"x": content(ref, rank)}, {}, {}, "t")
            if snapshots.commit(ref, world, rank):
                say(("committed", ref))

    return act


def uncommitted(kind: type[Snapshots], world: int, refs: tuple[Ref, ...]) -> dict[str, bytes]:
    """All lists of NEW are there; nothing is merged."""
    objects = before(kind, refs)
    for rank in range(world):
        kind(MemoryStore("memory://", objects)).write(
            NEW, rank, world, {"x": content(NEW, rank)}, {}, {}, "t"
        )
    return objects


def grouped_late_commit(kind: type[Snapshots]) -> Explored:
    """A committer that does all and a pruner meet while NEWER is committed, and somebody reads."""
    objects = uncommitted(kind, 2, (OLD, NEWER))
    actors = {"committer": committer(kind, NEW, 2), "pruner": pruner(kind), "reader": reader(kind)}
    return explore(actors, objects, check(kind, NEWER), max_states=3_000_000)


def grouped_mergers(kind: type[Snapshots]) -> Explored:
    """The first ranks of two groups, one that does all, and a pruner at once."""
    world = 2 * kind.group_ranks

    def polite(rank: int) -> Actor:
        def act(store: ObjectStore, say: SayWord) -> None:
            if kind(store).commit(NEW, world, rank):
                say(("committed", NEW))

        return act

    actors = {f"rank{r}": polite(r) for r in (0, kind.group_ranks)}
    others = {"all": committer(kind, NEW, world), "pruner": pruner(kind)}
    return explore(
        {**actors, **others}, uncommitted(kind, world, (OLD,)), check(kind, OLD),
        max_states=3_000_000,
    )  # fmt: skip


@pytest.mark.parametrize("world", [grouped_ranks, grouped_late_commit, grouped_mergers])
@pytest.mark.parametrize("kind", [OneByOne, InPairs])
def test_lists_that_are_merged_in_groups(
    kind: type[Snapshots], world: Callable[[type[Snapshots]], Explored]
) -> None:
    if kind is OneByOne or world is grouped_mergers:
        found = world(kind)
        assert found.endings > 0 and found.states > 300, found


def test_what_a_big_world_asks_of_the_bucket() -> None:
    """1,024 ranks: nobody reads what all wrote but those who merge, each a part."""
    store = MemoryStore("memory://", {})
    counts: collections.Counter[str] = collections.Counter()

    class Counted(MemoryStore):
        def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
            counts["get"] += 1
            return super().get(key, start, end)

        def list(self, prefix: str) -> list[str]:
            counts["list"] += 1
            return super().list(prefix)

    world = 1024
    for rank in range(world):
        Snapshots(store).write(NEW, rank, world, {"x": content(NEW, rank)}, {}, {}, "t")
    snapshots = Snapshots(Counted("memory://", store._objects))
    assert not any(snapshots.commit(NEW, world, r) for r in range(1, world))
    manifest = snapshots.commit(NEW, world, 0)
    assert manifest is not None and len(manifest.parts) == world
    assert counts["get"] <= 2 * world + 20 and counts["list"] <= 50, counts
    assert all(snapshots.commit(NEW, world, r) == manifest for r in (1, 7, 100, 1023))


REFERRING = [
    its_base_is_pruned,
    a_chain,
    two_ranks_with_a_base,
    a_late_request_to_commit,
    a_damaged_base,
    a_slow_reader,
]


@pytest.mark.parametrize("world", REFERRING, ids=lambda w: w.__name__)
def test_what_others_refer_to_or_read_stays(world: Callable[[type[Snapshots]], Explored]) -> None:
    found = world(Snapshots)
    assert found.endings > 0 and found.states > 300, found


WORLDS = [
    two_ranks,
    two_ranks_and_a_reader,
    two_incarnations,
    a_zombie,
    a_late_commit,
    a_reader_and_a_pruner,
    two_pruners,
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.__name__)
def test_what_must_hold_holds_in_every_reachable_state(world: Callable[[Make], Explored]) -> None:
    found = world(Snapshots)
    assert found.endings > 0 and found.states > 300, found


# ---- the same, broken ----------------------------------------------------------------------------
class ListBeforeParts(Snapshots):
    """The part list is written before the parts that it names."""

    def write(
        self, ref: Ref, rank: int, world: int, files: Any, tensors: Any, data: Any, token: str
    ) -> PartList:
        later = _Later(self.store)
        mine = Snapshots(later).write(ref, rank, world, files, tensors, data, token)  # type: ignore[arg-type]
        for key, content in later.parts.items():
            self.store.put(key, content)
        return mine


class _Later:
    """Holds back what is put."""

    def __init__(self, inner: ObjectStore):
        self.inner, self.parts = inner, dict[str, bytes]()

    def put(self, key: str, data: bytes) -> None:
        self.parts[key] = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SeesTheDoomed(Snapshots):
    """A mark at a doomed snapshot is not looked at. (That alone is no error: it is there for
    those that others refer to.)"""

    def refs(self) -> list[Ref]:
        return sorted(self.manifests()[0] - self.quarantined(), reverse=True)


class CommitWithoutSecondLook(SeesTheDoomed):
    """The manifest is written, and nobody looks whether a prune took the parts meanwhile."""

    def commit(self, ref: Ref, world: int) -> Manifest | None:
        lists = [list_key(ref, rank) for rank in range(world)]
        try:
            manifest = Manifest.merge([PartList.from_json(self.store.get(key)) for key in lists])
            return (
                manifest
                if self.store.create(manifest_key(ref), manifest.to_json().encode())
                else self.load(ref)
            )
        except NotFound:
            return None


class CommitOfOneRank(Snapshots):
    """The manifest is written when the own list is there, whatever the other ranks have."""

    def commit(self, ref: Ref, world: int) -> Manifest | None:
        found = [
            PartList.from_json(self.store.get(key))
            for key in self.store.list(f"{PARTS}{ref.name}/list-")
        ]
        if not found:
            return None
        alone = [
            PartList(x.ref, i, len(found), x.token, x.parts, x.tensors, x.data)
            for i, x in enumerate(found)
        ]
        manifest = Manifest.merge(alone)
        self.store.create(manifest_key(ref), manifest.to_json().encode())
        return super().commit(ref, world)


class _ManifestPrunedLast(Pruner):
    def _take_back(self, ref: Ref, keys: Any) -> None: ...


class ManifestPrunedLast(SeesTheDoomed):
    """Parts go first: a snapshot is seen that has none."""

    pruner = _ManifestPrunedLast


class _ManifestPrunedFirst(Pruner):
    def _take_back(self, ref: Ref, keys: Any) -> None:
        self._store.delete(manifest_key(ref))

    def _delete(self, ref: Ref, keys: Any) -> bool:
        for key in sorted(keys, key=lambda k: "/list-" in k):
            self._store.delete(key)
        return True


class ManifestPrunedFirst(SeesTheDoomed):
    """Part lists outlive the manifest: a late commit finds them and makes it again."""

    pruner = _ManifestPrunedFirst


class NewestByStep(Snapshots):
    """The snapshot with the greatest step is the newest, whichever epoch wrote it."""

    def refs(self) -> list[Ref]:
        return sorted(super().refs(), key=lambda ref: (ref.step, ref.epoch), reverse=True)


class PrunerTrustsNames(Snapshots):
    """The pruner takes the newest manifest for whole."""

    def prune(self, keep: Any, on_bad: Any = None) -> list[Ref]:
        refs, pruner = self.refs(), Pruner(self, {}, {})
        for ref in refs[1:]:
            keys = self.store.list(f"{PARTS}{ref.name}/")
            pruner._take_back(ref, keys)
            pruner._delete(ref, keys)
        return refs[1:]


class LooksOnce(Snapshots):
    """`latest` goes on with its first listing when what it saw was pruned."""

    def latest(self, on_bad: Any = None) -> Manifest | None:
        for ref in self.refs():
            try:
                manifest = self.load(ref)
                self.check(manifest)
                return manifest
            except NotFound:
                continue
            except SnapshotCorrupt as e:
                self.quarantine(ref, str(e))
        return None


class _PruneForgetsWhoRefers(Pruner):
    def _needed(self, gone: Any, newest: Any) -> Any:
        return super()._needed(gone, newest)[0], frozenset()


class PruneForgetsWhoRefers(Snapshots):
    """Parts of a pruned snapshot are deleted although another snapshot lies in them."""

    pruner = _PruneForgetsWhoRefers


class _PruneLooksAtManifestsOnly(Pruner):
    def _needed(self, gone: Any, newest: Any) -> Any:
        objects, _ = super()._needed(gone, newest)
        return objects, frozenset(
            key
            for ref in self._snapshots.manifests()[0].difference(gone)
            for key in self._snapshots.load(ref).refers
        )


class PruneLooksAtManifestsOnly(Snapshots):
    """Who is about to refer, with part lists and no manifest yet, is not seen."""

    pruner = _PruneLooksAtManifestsOnly


class CommitTrustsItsBase(Snapshots):
    """Nobody looks whether the base is still there."""

    def stay(self, bases: Any) -> bool:
        return True


class CommitLooksEarly(Snapshots):
    """The base is looked at before the part list is written, and then no more."""

    def write(
        self,
        ref: Ref,
        rank: int,
        world: int,
        files: Any,
        tensors: Any,
        data: Any,
        token: str,
        base: Any = None,
    ) -> PartList:
        self.looked = base is None or super().stay([base.ref])
        return super().write(ref, rank, world, files, tensors, data, token, base)

    def stay(self, bases: Any) -> bool:
        return self.looked


class _PruneDoomsNobody(Pruner):
    def _take_back(self, ref: Ref, keys: Any) -> None:
        """... and the manifest, at which a commit would see it as well, goes last."""


class PruneDoomsNobody(Snapshots):
    """The look who refers comes without a mark before it: a commit between the look and the
    deletes is not told."""

    pruner = _PruneDoomsNobody

    def prune(self, keep: Any, on_bad: Any = None, expired: Any = None) -> list[Ref]:
        real, self.store = self.store, _NoMarks(self.store)  # type: ignore[assignment]
        try:
            return super().prune(keep, on_bad)
        finally:
            self.store = real


class _NoMarks:
    def __init__(self, inner: ObjectStore):
        self.inner = inner

    def create(self, key: str, data: bytes) -> bool:
        return True if key.endswith(DOOM) else self.inner.create(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PruneAsksNoReader(Snapshots):
    """Who reads is not looked at."""

    def being_read(self, expired: Any = None) -> set[Ref]:
        return set()


class ReaderDoesNotLookAgain(Snapshots):
    """It says that it reads, and takes that for an answer."""

    def begin_reading(self, ref: Ref, token: str) -> bool:
        self.still_reading(ref, token, 0)
        return True


BROKEN_REFERENCES: list[tuple[type[Snapshots], Callable[[type[Snapshots]], Explored]]] = [
    (PruneForgetsWhoRefers, its_base_is_pruned),
    (PruneLooksAtManifestsOnly, its_base_is_pruned),
    (CommitTrustsItsBase, its_base_is_pruned),
    (CommitTrustsItsBase, a_chain),
    (CommitLooksEarly, its_base_is_pruned),
    (PruneDoomsNobody, its_base_is_pruned),
    (PruneLooksAtManifestsOnly, a_late_request_to_commit),
    (CommitTrustsItsBase, a_damaged_base),
    (PruneAsksNoReader, a_slow_reader),
    (ReaderDoesNotLookAgain, a_slow_reader),
]


@pytest.mark.parametrize(
    ("broken", "world"),
    BROKEN_REFERENCES,
    ids=[f"{b.__name__}-{w.__name__}" for b, w in BROKEN_REFERENCES],
)
def test_broken_references_are_found(
    broken: type[Snapshots], world: Callable[[type[Snapshots]], Explored]
) -> None:
    with pytest.raises(TraceViolation) as found:
        world(broken)
    print(found.value)
    assert len(found.value.trace) > 1


BROKEN: list[tuple[type[Snapshots], Callable[[Make], Explored]]] = [
    (ListBeforeParts, two_ranks),
    (CommitWithoutSecondLook, a_late_commit),
    (CommitOfOneRank, two_ranks_and_a_reader),
    (ManifestPrunedLast, a_reader_and_a_pruner),
    (ManifestPrunedFirst, a_late_commit),
    (NewestByStep, a_zombie),
    (PrunerTrustsNames, two_pruners),
    (LooksOnce, a_reader_and_a_pruner),
]


@pytest.mark.parametrize(("broken", "world"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_what_is_broken_on_purpose_is_found(
    broken: type[Snapshots], world: Callable[[Make], Explored]
) -> None:
    with pytest.raises(TraceViolation) as found:
        world(broken)
    print(found.value)
    assert len(found.value.trace) > 1
    assert not found.value.why.split(" raised ")[1:], (
        "the mutant is broken in a way that nobody meant"
    )


if __name__ == "__main__":  # millions of states, half an hour
    for larger in (
        everybody,
        *(
            functools.partial(w, pruners=2)
            for w in (a_chain, a_late_request_to_commit, a_slow_reader)
        ),
    ):
        print(larger, larger(Snapshots), flush=True)  # type: ignore[operator]


class Careless(SeesTheDoomed):
    """Broken: who commits a world of groups does not look whether its lists are still there."""

    group_ranks = 1

    def _stays(self, manifest: Manifest, keys: list[str]) -> Manifest | None:
        return manifest


def test_the_check_finds_a_careless_merge_of_groups() -> None:
    with pytest.raises(TraceViolation):
        grouped_late_commit(Careless)
