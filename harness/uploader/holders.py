"""Who holds which chunk of a snapshot or of data, and in which order nodes are asked for it.

What a rank wrote lies where it was staged, with its node, and in the tier that the next member of
that epoch keeps for others (`nearby.py`). So a chunk is asked of these two: first of one that
trains now, since who does not may be dead; chunks are spread over both where both do. Then some
others are asked, which may have fetched it when they restored. Addresses are read from the bucket
when they are needed. Knows nothing of torch.

A chunk of data has a home, which every node computes alike (`Homes`): who has read it from the
bucket leaves it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
from collections.abc import Iterator, Sequence

from harness.bucket.layout import ChunkServerAt, Epoch, chunks_key
from harness.core.values import BadObject
from storage.chunks import chunk_id
from storage.errors import StoreError
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.snapshot_keys import writer_of

# others of a big world, for a chunk that its holders do not give; one that is dead costs a time-out
ASKED = 8
HOMES = 2  # of a chunk of data: its own, and who had it before a newcomer, or will when that leaves

HostPort = tuple[str, int]


class ChunkServers:
    """Where members serve chunks, as the bucket says; each is read once. For many threads."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._known: dict[str, HostPort | None] = {}

    def of(self, member: str) -> HostPort | None:
        """None: it serves none."""
        if member not in self._known:  # nobody waits while another thread reads another's
            at: HostPort | None = None
            with contextlib.suppress(StoreError, BadObject):
                found = ChunkServerAt.decode(self._store.get(chunks_key(member)))
                at = found.addr, found.port
            self._known[member] = at
        return self._known[member]


class Holders:
    """Of one snapshot. `written_by`: the epoch that it is of; `now`: the members that train now;
    `me`: nobody asks itself."""

    def __init__(
        self,
        manifest: Manifest,
        written_by: Epoch,
        now: Sequence[str],
        me: str,
        servers: ChunkServers,
    ):
        self._servers = servers
        members = written_by.members
        member_of = [i for i, nproc in enumerate(written_by.nproc) for _ in range(nproc)]
        pairs = [
            tuple(dict.fromkeys(name for name in pair if name != me))
            for pair in zip(members, [*members[1:], *members[:1]], strict=True)
        ]
        self._now = frozenset(now)
        self._pairs: dict[str, tuple[str, ...]] = {}  # by chunk
        for part in manifest.parts:
            rank = writer_of(part.key)
            if rank is not None and rank < len(member_of):
                for i in range(len(part.hashes)):
                    self._pairs.setdefault(chunk_id(part, i), pairs[member_of[rank]])
        at = now.index(me) if me in now else 0
        around = dict.fromkeys([*now[at + 1 :], *now[:at], *members])
        self._others = [name for name in around if name != me]

    def __call__(self, id: str) -> Iterator[HostPort]:
        """Whom to ask for a chunk, in order."""
        pair = self._pairs.get(id, ())
        spread = pair[::-1] if hash(id) % 2 else pair
        holders = sorted(spread, key=lambda name: name not in self._now)
        others = [name for name in self._others if name not in holders][:ASKED]
        for name in [*holders, *others]:
            if (found := self._servers.of(name)) is not None:
                yield found


class Homes:
    """Of chunks of data, by rendezvous hashing: a world that one node leaves or joins moves the
    chunks of that node only. `members`: who train now; `me`: nobody asks itself."""

    def __init__(self, members: Sequence[str], me: str, servers: ChunkServers):
        self._members, self._me, self._servers = members, me, servers

    def __call__(self, id: str) -> Iterator[HostPort]:
        """Whom to ask for a chunk, in order."""
        for name in self._homes(id):
            if name != self._me and (found := self._servers.of(name)) is not None:
                yield found

    def keeper(self, id: str) -> HostPort | None:
        """Who is left a chunk; None: this node is its home, or that serves none."""
        home = next(iter(self._homes(id)), self._me)
        return None if home == self._me else self._servers.of(home)

    def _homes(self, id: str) -> list[str]:
        def weight(member: str) -> bytes:
            return hashlib.blake2b(f"{member} {id}".encode(), digest_size=8).digest()

        return heapq.nlargest(HOMES, self._members, key=weight)
