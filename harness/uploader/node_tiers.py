"""A node's own tiers, managed by its uploader: a folder in host memory, one on a disk, and what
peers keep for each other.

A node's part of a committed snapshot is copied to its disk and to its neighbour (the next member of
the generation, the code's `epoch`), so that the share of a lost node is still near. Workers get the
places from the uploader and read them themselves (`tiers_for`). The node's cache of data is open to
the same peers (`data_peers`). All of this is optional: every error is a miss, and the bucket has
everything. Knows nothing about torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.bucket.layout import (
    NO_EPOCH,
    SECRET,
    ChunkServerAt,
    Epoch,
    chunks_key,
    newest_epoch,
    read_epoch,
    secret_of,
)
from harness.core.world import BadInput
from harness.uploader.ahead_state import AheadState
from storage.canonical_json import BadObject
from storage.errors import StoreError
from storage.private_folders import NotOurs, own_folder
from storage.snapshots.manifest import Manifest, PartList, Ref, chunk_id
from storage.snapshots.snapshot_keys import writer_of
from storage.stores.objects import ObjectStore
from storage.tiers.folder_tier import FolderTier, OwnedFolder
from storage.tiers.peer_transport import DATA, ChunkServer, PeerTier, can_seal
from storage.tiers.tiers import SegmentTier, Tier, blocks_of_part, chunks_of

# The nodes that hold a chunk of a snapshot or of data, and the order in which to request it from
# them. Runs in workers and uploaders; knows nothing about torch.

# Other members to try for a chunk that its holders lack; each dead one costs a timeout.
ASKED = 8
# Homes of a chunk of data: the first, and the one before a newcomer came or after the first leaves.
HOMES = 2

HostPort = tuple[str, int]


class ChunkServers:
    """The addresses at which members serve chunks, each read from the bucket once. Thread-safe."""

    def __init__(self, store: ObjectStore):
        self._store = store
        self._known: dict[str, HostPort | None] = {}

    def of(self, member: str) -> HostPort | None:
        """Return the address of a member; None: it serves no chunks."""
        if member not in self._known:  # without a lock, so that no thread waits for another's read
            at: HostPort | None = None
            with contextlib.suppress(StoreError, BadObject):
                found = ChunkServerAt.decode(self._store.get(chunks_key(member)))
                at = found.addr, found.port
            self._known[member] = at
        return self._known[member]


class ChunkOwners:
    """The holders of one snapshot's chunks. `written_by`: the generation that wrote it; `now`: the
    members that train now; `me`: this member, which is left out."""

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
        self._pairs: dict[str, tuple[str, ...]] = {}  # chunk -> its two holders
        for part in manifest.parts:
            rank = writer_of(part.key)
            if rank is not None and rank < len(member_of):
                for i in range(len(part.hashes)):
                    self._pairs.setdefault(chunk_id(part, i), pairs[member_of[rank]])
        at = now.index(me) if me in now else 0
        around = dict.fromkeys([*now[at + 1 :], *now[:at], *members])
        self._others = [name for name in around if name != me]

    def __call__(self, id: str) -> Iterator[HostPort]:
        """Yield the addresses to request a chunk from, in order."""
        pair = self._pairs.get(id, ())
        spread = pair[::-1] if hash(id) % 2 else pair
        holders = sorted(spread, key=lambda name: name not in self._now)
        others = [name for name in self._others if name not in holders][:ASKED]
        for name in [*holders, *others]:
            if (found := self._servers.of(name)) is not None:
                yield found


class Homes:
    """The homes of chunks of data, by rendezvous hashing: when a node joins or leaves, only that
    node's chunks move. `members`: those that train now; `me`: this member, which is left out."""

    def __init__(self, members: Sequence[str], me: str, servers: ChunkServers):
        self._members, self._me, self._servers = members, me, servers

    def __call__(self, id: str) -> Iterator[HostPort]:
        """Yield the addresses to request a chunk from, in order."""
        for name in self._homes(id):
            if name != self._me and (found := self._servers.of(name)) is not None:
                yield found

    def keeper(self, id: str) -> HostPort | None:
        """Return the address of the chunk's first home, where a chunk read from the bucket is left;
        None: this node is the home, or the home serves no chunks."""
        home = next(iter(self._homes(id)), self._me)
        return None if home == self._me else self._servers.of(home)

    def _homes(self, id: str) -> list[str]:
        def weight(member: str) -> bytes:
            return hashlib.blake2b(f"{member} {id}".encode(), digest_size=8).digest()

        return heapq.nlargest(HOMES, self._members, key=weight)


NEAR = "near"  # the folder in the stage
KEEP_NEAR = 2  # snapshots in a node's tiers: the newest, and one more in case that is corrupt
PEER_TIERS = ("off", "memory", "disk")
LANES = 4  # blocks sent to a neighbour at once
ASKED_S = 5.0  # the longest wait until peers are set up, which needs the bucket
AGAIN_S = 10.0  # the pause before that is retried


@dataclass(frozen=True)
class NearbyConfig:
    """The configuration of a node's tiers, as plain data that the agent passes to its uploader.
    Sizes are in bytes."""

    addr: str = "127.0.0.1"
    share: bool = False  # workers of this node share in memory what one of them fetches
    memory_nbytes: int = 0  # limit of the memory folder, for `share` and for what peers leave here
    disk_nbytes: int = 0  # limit of the disk tier; 0: there is no disk tier
    disk_root: str = ""
    peer: str = "off"  # the tier for what peers leave here; "off": peers keep nothing
    encrypt: bool = False  # encrypt the traffic between peers

    def checked(self) -> NearbyConfig:
        """Return the configuration itself. Raises BadInput for a bad one."""
        if self.peer not in PEER_TIERS:
            raise BadInput(f"peer_tier is one of {', '.join(PEER_TIERS)}; found {self.peer!r}")
        if self.disk_nbytes < 0:
            raise BadInput("disk_tier_gib is in GiB and at least 0 (0: no disk tier)")
        if self.peer == "disk" and not self.disk_nbytes:
            raise BadInput(
                "peer_tier=disk: wanted a disk tier to keep it in; --set disk_tier_gib as well"
            )
        if self.encrypt and self.peer == "off":
            raise BadInput(
                "peer_encrypt: there is nothing to encrypt; --set peer_tier as well, or leave "
                "it out"
            )
        if self.encrypt and not can_seal():
            raise BadInput(
                "peer_encrypt wants the package cryptography, found none; pip install cryptography"
            )
        return self

    @property
    def keeps(self) -> bool:
        """True if committed snapshots are copied to a nearer tier."""
        return bool(self.disk_nbytes) or self.peer != "off"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Neighbour:
    """The next member of a generation (the code's `epoch`). `alone`: there is none."""

    epoch: int = 0
    alone: bool = False
    tier: PeerTier = field(default_factory=lambda: PeerTier([], ""))


class NodeTiers:
    """A node's tiers. `member`: this node's name. `staged()`: returns tiers with the snapshots that
    this node has staged and that are committed."""

    def __init__(
        self,
        store: ObjectStore,
        member: str,
        stage: Path,
        config: NearbyConfig,
        staged: Callable[[], Sequence[Tier]],
    ):
        self.store, self.member, self.config = store, member, config
        self._folders: list[FolderTier] = []
        self._owned: list[OwnedFolder] = []
        self._data: dict[str, FolderTier] = {}  # folder -> its cache of data
        self._kept: dict[Ref, Manifest] = {}
        self._neighbour = Neighbour()
        self.ahead: AheadState | None = None  # what all nodes keep together
        self._servers = ChunkServers(store)
        self._turn = 0  # a copy that began at a smaller number stops
        self._secret = ""  # "": not yet read from the bucket
        self._server: ChunkServer | None = None
        self._asked, self._closed = threading.Event(), threading.Event()
        if config.share or config.peer == "memory":
            self._folders.append(FolderTier("memory", stage / NEAR, config.memory_nbytes))
        if config.disk_nbytes:
            self._open_disk(Path(config.disk_root))
        if config.peer == "disk" and not self._owned:
            self.config = config = replace(config, peer="off")
        if config.peer == "off":
            self._asked.set()
        else:
            threading.Thread(target=self._serve, args=(staged,), daemon=True).start()

    def _serve(self, staged: Callable[[], Sequence[Tier]]) -> None:
        """Open the tiers to peers as soon as the bucket answers. Runs in a thread, so that no
        worker waits for it long."""
        while not self._closed.is_set():
            try:
                self._open_to_peers(staged)
                return
            except StoreError as e:
                print(f"harness: nodes keep nothing for each other so far: {e}", flush=True)
            finally:
                self._asked.set()
            self._closed.wait(AGAIN_S)

    def _open_to_peers(self, staged: Callable[[], Sequence[Tier]]) -> None:
        store, config = self.store, self.config
        store.create(SECRET, json.dumps(secrets.token_hex(32)).encode())
        # whoever can read the bucket may read its chunks from peers as well
        if not (secret := _secret(store.get(SECRET))):
            print(
                f"harness: {store.url}/{SECRET} is not what we make; nodes keep nothing for "
                "each other (delete it)",
                flush=True,
            )
            return
        keep = next(f for f in self._folders if f.name == config.peer)
        serves = [*self._folders]
        server = ChunkServer(
            lambda: [*staged(), *serves],
            config.addr,
            secret,
            keep,
            sealed=config.encrypt,
            data=lambda: list(self._data.values()),
        )
        try:
            store.create(chunks_key(self.member), ChunkServerAt(config.addr, server.port).encode())
        except StoreError:
            server.close()
            raise
        self._secret, self._server = secret, server

    def _open_disk(self, root: Path) -> None:
        """Open a folder on this node's disk as a tier; without one if it is another user's."""
        try:
            self._owned.append(OwnedFolder(root, self.store.url))
        except NotOurs as e:
            print(f"harness: no disk tier: {e}", flush=True)
            return
        self._folders.append(FolderTier("disk", self._owned[0].path, self.config.disk_nbytes))

    def fill(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        """Copy this node's parts (key -> content) of a committed snapshot to the disk and to the
        neighbour."""
        self._asked.wait(ASKED_S)
        disks: list[Tier] = [f for f in self._folders if f.name == "disk"]
        peers: list[Tier] = (
            [self._neighbour_in(manifest.epoch).tier] if self._server is not None else []
        )
        if not disks and not peers:
            return

        turn = self._turn

        def put(chunks: dict[str, bytes | memoryview]) -> None:
            for tier in [*disks, *peers] if turn == self._turn else []:
                tier.put(chunks)

        with ThreadPoolExecutor(LANES, "near") as lanes:
            for key, content in parts.items():
                list(lanes.map(put, blocks_of_part(manifest.part(key), content)))
        self._kept[manifest.ref] = manifest
        for old in sorted(self._kept)[:-KEEP_NEAR]:
            del self._kept[old]
        self._tidy()

    def _tidy(self) -> None:
        """Drop the chunks that no snapshot needs any more."""
        ahead = self.ahead.shares if self.ahead is not None else []
        for folder in self._folders:
            folder.keep(chunks_of([*self._kept.values(), *ahead]))

    def keep(self, share: PartList, contents: Sequence[memoryview]) -> None:
        """Copy the parts of a share, which no bucket has, to the next node. Raises StoreError if
        that does not take all of it; returns at once if there is no other node."""
        self._asked.wait(ASKED_S)
        neighbour = self._neighbour_in(share.ref.epoch)
        if neighbour.alone:
            return

        def missing(chunks: dict[str, bytes | memoryview]) -> int:
            return len(chunks) - neighbour.tier.put(chunks)

        with ThreadPoolExecutor(LANES, "near") as lanes:
            for part, content in zip(share.parts, contents, strict=True):
                if any(lanes.map(missing, blocks_of_part(part, content))):
                    raise StoreError("the next node did not take a copy")

    def set_ahead(self, state: str) -> None:
        """Drop what the nodes have kept before, since all of them now keep this state, encoded; "":
        they keep none. Raises ValueError, TypeError, KeyError."""
        self.ahead = AheadState.decode(state) if state else None
        self._tidy()

    def outdate(self, ref: Ref) -> None:
        """Let go of the state that the nodes keep, if this snapshot, committed now, is as new."""
        if self.ahead is not None and self.ahead.step <= ref.step:
            self.set_ahead("")

    def hurry(self) -> None:
        """Stop the copying under way; the copies need not be complete."""
        self._turn += 1

    def _neighbour_in(self, epoch: int) -> Neighbour:
        if self._neighbour.epoch != epoch:
            members = self._members()
            after = (
                members[members.index(self.member) + 1 :] + members
                if self.member in members
                else []
            )
            found = [
                at
                for name in after[:1]
                if name != self.member and (at := self._servers.of(name)) is not None
            ]
            tier = PeerTier(found, self._secret, sealed=self.config.encrypt)
            self._neighbour = Neighbour(epoch, members == [self.member], tier)
        return self._neighbour

    def _members(self) -> list[str]:
        try:
            return list(newest_epoch(self.store).members)
        except (StoreError, BadObject):
            return []

    def told(self) -> dict[str, Any]:
        """Return what a worker of this node needs for `tiers_for`, as plain data."""
        found: dict[str, Any] = {
            "folders": [[f.name, str(f.root), f.budget_nbytes] for f in self._folders]
        }
        self._asked.wait(ASKED_S)
        if self._server is not None:
            found |= {
                "member": self.member,
                "members": self._members(),
                "secret": self._secret,
                "sealed": self.config.encrypt,
            }
        return found

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        """Open a cache of data on this node, of at most `nbytes`, to peers. Return the same as
        `told`. Raises NotOurs, OSError."""
        if self.config.peer != "off" and folder not in self._data:
            self._data[folder] = FolderTier("data", own_folder(Path(folder)), nbytes, over=True)
        return self.told()

    def shared_no_more(self) -> None:
        """Drop what was fetched for this node's workers only, once all of them have restored."""
        if self.config.share and self.config.peer != "memory":
            for folder in self._folders[:1]:
                for id in folder.list():
                    folder.drop(id)

    def close(self) -> None:
        self._closed.set()
        if self._server is not None:
            self._server.close()
        for owned in self._owned:
            owned.close()


def _secret(data: bytes) -> str:
    """Return the secret in `data`; "" if it is not one that this code makes."""
    with contextlib.suppress(BadObject):
        return secret_of(data)
    return ""


def tiers_for(
    manifest: Manifest, held: Mapping[str, Any], store: ObjectStore | None = None
) -> list[Tier]:
    """Return the tiers of this node, nearest first. `held`: the uploader's answer about the
    snapshot; {}: no uploader. `store`: the run's, with the peers' addresses; None: no peers."""
    places = {
        key: (str(path), int(start), int(end))
        for key, (path, start, end) in held.get("parts", {}).items()
    }
    tiers: list[Tier] = [SegmentTier(manifest.parts, places)]
    tiers += [
        FolderTier(name, Path(folder), nbytes) for name, folder, nbytes in held.get("folders", [])
    ]
    if store is not None and held.get("secret"):
        try:
            written_by = read_epoch(store, manifest.epoch)
        except (StoreError, BadObject):
            written_by = NO_EPOCH
        servers = ChunkServers(store)
        holders = ChunkOwners(manifest, written_by, held["members"], held["member"], servers)
        tiers.append(PeerTier([], held["secret"], sealed=held["sealed"], holders=holders))
    return tiers


def data_peers(told: Mapping[str, Any], store: ObjectStore) -> PeerTier | None:
    """Return a tier over the other nodes' caches of data; None: none are served, or there are no
    other nodes. `told`: the result of `NodeTiers.open_data`; `store`: the run's."""
    if not told.get("secret") or len(told["members"]) < 2:
        return None
    homes = Homes(told["members"], told["member"], ChunkServers(store))
    sealed = told["sealed"]
    return PeerTier(
        [], told["secret"], sealed=sealed, holders=homes, keeper=homes.keeper, kind=DATA
    )
