"""A node's own tiers, held by its uploader: a folder in host memory, one on a disk, and what peers
keep for each other.

What a node has sent and seen committed is copied to its disk and left with its neighbour (the next
member of the epoch), so that the share of a node that is lost is still near. Workers are told where
to look, and read by themselves (`tiers_for`). The node's cache of data is open to the same peers
(`data_peers`). Nothing here is needed: every error is a miss, and the bucket has it all. Knows
nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.bucket.epochs import newest_epoch, read_epoch
from harness.bucket.layout import NO_EPOCH, SECRET, ChunkServerAt, chunks_key, secret_of
from harness.core.values import BadObject
from harness.core.world import BadInput
from harness.uploader.holders import ChunkServers, Holders, Homes
from storage.errors import StoreError
from storage.folder_tiers import FolderTier, OwnedFolder
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.own_folders import NotOurs, own_folder
from storage.peers import DATA, ChunkServer, PeerTier
from storage.sealing import can_seal
from storage.tiers import SegmentTier, Tier, blocks, chunks_of

NEAR = "near"  # the folder in the stage
KEEP_NEAR = 2  # snapshots in a node's tiers: the newest, and the one before should it turn out bad
PEER_TIERS = ("off", "memory", "disk")
LANES = 4  # blocks on their way to a neighbour at once
ASKED_S = 5.0  # the longest wait for the bucket to say what peers need to know of each other
AGAIN_S = 10.0  # after it did not


@dataclass(frozen=True)
class NearbyConfig:
    """Sizes are in bytes. Plain data: the agent hands it to its uploader."""

    addr: str = "127.0.0.1"
    share: bool = False  # several workers on this node: what one fetches the others find in memory
    memory_nbytes: int = 0  # of `share` and of what peers leave here
    disk_nbytes: int = 0  # 0: no disk tier
    disk_root: str = ""
    peer: str = "off"  # where what a peer leaves here lies
    encrypt: bool = False  # what peers tell each other

    def checked(self) -> NearbyConfig:
        """Raises BadInput."""
        if self.peer not in PEER_TIERS:
            raise BadInput(f"--peer-tier is one of {', '.join(PEER_TIERS)}; found {self.peer!r}")
        if self.disk_nbytes < 0:
            raise BadInput("--disk-tier-gib is in GiB and at least 0 (0: no disk tier)")
        if self.peer == "disk" and not self.disk_nbytes:
            raise BadInput(
                "--peer-tier disk: wanted a disk tier to keep it in; give --disk-tier-gib as well"
            )
        if self.encrypt and self.peer == "off":
            raise BadInput(
                "--peer-encrypt: there is nothing to encrypt; give --peer-tier as well, or leave "
                "it out"
            )
        if self.encrypt and not can_seal():
            raise BadInput(
                "--peer-encrypt wants the package cryptography, found none; pip install "
                "cryptography"
            )
        return self

    @property
    def keeps(self) -> bool:
        """Are committed snapshots copied anywhere?"""
        return bool(self.disk_nbytes) or self.peer != "off"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Nearby:
    """`staged()`: tiers that hold what this node has staged and seen committed."""

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
        self._data: dict[str, FolderTier] = {}  # caches of data, by folder
        self._kept: dict[Ref, Manifest] = {}
        self._neighbour: tuple[int, PeerTier] = (0, PeerTier([], ""))  # by epoch
        self._servers = ChunkServers(store)
        self._turn = 0  # copying that began in an older one stops
        self._secret = ""  # until the bucket has answered
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
        """Open to peers as soon as the bucket answers: no worker of ours waits for that."""
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
        # who can read the bucket may read its chunks from peers as well
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
        """A folder on this node's disk, unless it is another user's: it is not needed."""
        try:
            self._owned.append(OwnedFolder(root, self.store.url))
        except NotOurs as e:
            print(f"harness: no disk tier: {e}", flush=True)
            return
        self._folders.append(FolderTier("disk", self._owned[0].path, self.config.disk_nbytes))

    def fill(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        """A snapshot is committed, and these parts (key -> content) of it are ours: to the
        disk, and to the neighbour."""
        self._asked.wait(ASKED_S)
        disks: list[Tier] = [f for f in self._folders if f.name == "disk"]
        peers: list[Tier] = [self._neighbour_in(manifest.epoch)] if self._server is not None else []
        if not disks and not peers:
            return

        turn = self._turn

        def put(chunks: dict[str, bytes | memoryview]) -> None:
            for tier in [*disks, *peers] if turn == self._turn else []:
                tier.put(chunks)

        with ThreadPoolExecutor(LANES, "near") as lanes:
            for key, content in parts.items():
                list(lanes.map(put, blocks(manifest.part(key), content)))
        self._kept[manifest.ref] = manifest
        for old in sorted(self._kept)[:-KEEP_NEAR]:
            del self._kept[old]
        for folder in self._folders:
            folder.keep(chunks_of(self._kept.values()))

    def hurry(self) -> None:
        """What is copied now need not be whole."""
        self._turn += 1

    def _neighbour_in(self, epoch: int) -> PeerTier:
        if self._neighbour[0] != epoch:
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
            self._neighbour = epoch, PeerTier(found, self._secret, sealed=self.config.encrypt)
        return self._neighbour[1]

    def _members(self) -> list[str]:
        try:
            return list(newest_epoch(self.store).members)
        except (StoreError, BadObject):
            return []

    def told(self) -> dict[str, Any]:
        """What a worker of ours needs to know, as plain data: for `tiers_for`."""
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
        """A cache of data on this node, of `nbytes`, is open to peers from now on. As `told`.
        Raises NotOurs, OSError."""
        if self.config.peer != "off" and folder not in self._data:
            self._data[folder] = FolderTier("data", own_folder(Path(folder)), nbytes, over=True)
        return self.told()

    def shared_no_more(self) -> None:
        """All workers of this node have restored: what was only fetched for them may go."""
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
    """As we make it; "" for anything else."""
    with contextlib.suppress(BadObject):
        return secret_of(data)
    return ""


def tiers_for(
    manifest: Manifest, held: Mapping[str, Any], store: ObjectStore | None = None
) -> list[Tier]:
    """The tiers of this node, nearest first; `held` is what its uploader says of the snapshot
    ({}: there is none). `store`: the run's, which says where peers are; None: without them."""
    places = {
        key: (str(path), int(start), int(end))
        for key, (path, start, end) in held.get("parts", {}).items()
    }
    tiers: list[Tier] = [SegmentTier(manifest, places)]
    tiers += [
        FolderTier(name, Path(folder), nbytes) for name, folder, nbytes in held.get("folders", [])
    ]
    if store is not None and held.get("secret"):
        try:
            written_by = read_epoch(store, manifest.epoch)
        except (StoreError, BadObject):
            written_by = NO_EPOCH
        servers = ChunkServers(store)
        holders = Holders(manifest, written_by, held["members"], held["member"], servers)
        tiers.append(PeerTier([], held["secret"], sealed=held["sealed"], holders=holders))
    return tiers


def data_peers(told: Mapping[str, Any], store: ObjectStore) -> PeerTier | None:
    """The other nodes' caches of data; `told`: as `Nearby.open_data` says. None: nobody serves
    any, or there are no others. `store`: the run's."""
    if not told.get("secret") or len(told["members"]) < 2:
        return None
    homes = Homes(told["members"], told["member"], ChunkServers(store))
    sealed = told["sealed"]
    return PeerTier(
        [], told["secret"], sealed=sealed, holders=homes, keeper=homes.keeper, kind=DATA
    )
