"""Part lists of many ranks, one group at a time, so that the commit of a big world is a small
merge.

The first rank of a group puts the part lists of its group into one object, line by line as they
are, as soon as all are there; rank 0 reads these few objects and writes the manifest. A part list
is written once and never changed, so it does not matter who makes a group's object, or how often.
What decides stays the manifest, and the part lists stay what a commit stands on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from storage.errors import NotFound
from storage.manifest import PartList, Ref
from storage.objects import ObjectStore, get_each

GROUP_RANKS = 100  # of part lists in one object; up to as many ranks need no groups


def groups(world: int, size: int) -> Iterator[range]:
    """The ranks of each group."""
    return (range(first, min(first + size, world)) for first in range(0, world, size))


def read_all(store: ObjectStore, keys: Sequence[str]) -> list[bytes]:
    """Several objects, as many at once as the store gains by. Raises NotFound."""
    found = []
    with contextlib.closing(get_each(store, keys)) as coming:
        for key, data in coming:
            if data is None:
                raise NotFound(f"{store.url}/{key}")
            found.append(data)
    return found


def gather(
    store: ObjectStore, ref: Ref, list_keys: Sequence[str], size: int, rank: int | None
) -> list[PartList] | None:
    """All part lists of a snapshot, if they are there; `list_keys`: by rank. Makes the objects of
    groups that `rank` begins; None: of all groups. None also if that is all that `rank` has to do.
    """
    wanted = list(groups(len(list_keys), size))
    if rank is not None and rank % size:
        return None
    folder = list_keys[0].rpartition("/")[0]
    keys = [f"{folder}/group-r{ranks[0]:05d}.json" for ranks in wanted]
    there = set(store.list(f"{folder}/group-"))
    for ranks, key in zip(wanted, keys, strict=True):
        if key not in there and rank in (None, ranks[0]):
            mine = [list_keys[r] for r in ranks]
            if set(store.list(_beginning(mine[0], mine[-1]))).issuperset(mine):
                store.create(key, b"\n".join(read_all(store, mine)))
                there.add(key)
    if rank or not there.issuperset(keys):
        return None
    return [
        PartList.from_json(line) for data in read_all(store, keys) for line in data.split(b"\n")
    ]


def _beginning(first: str, last: str) -> str:
    """What both keys begin with, and so all between them."""
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), None)
    return first[:same]
