"""A node's own tiers, held by its uploader: a folder in host memory, one on a disk, and what peers
keep for each other.

What a node has sent and seen committed is copied to its disk and left with its neighbour (the next
member of the epoch), so that the share of a node that is lost is still near. Workers are told where
to look, and read by themselves (`tiers_for`). Nothing here is
needed: every error is a miss, and the bucket has it all. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.bucket.epochs import newest_epoch
from harness.bucket.layout import SECRET, ChunkServerAt, chunks_key, secret_of
from harness.core.values import BadObject
from harness.core.world import BadInput
from storage.errors import StoreError
from storage.folder_tiers import FolderTier, OwnedFolder
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.own_folders import NotOurs
from storage.peers import ChunkServer, PeerTier
from storage.sealing import can_seal
from storage.tiers import SegmentTier, Tier, blocks, chunks_of

NEAR = "near"  # the folder in the stage
KEEP_NEAR = 2  # snapshots in a node's tiers: the newest, and the one before should it turn out bad
PEERS_ASKED = 8  # of a big world; one that is dead may cost a time-out
PEER_TIERS = ("off", "memory", "disk")


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
        self._kept: dict[Ref, Manifest] = {}
        self._neighbour: tuple[int, PeerTier] = (0, PeerTier([], ""))  # by epoch
        self._server: ChunkServer | None = None
        if config.share or config.peer == "memory":
            self._folders.append(FolderTier("memory", stage / NEAR, config.memory_nbytes))
        if config.disk_nbytes:
            self._open_disk(Path(config.disk_root))
        if config.peer == "disk" and not self._owned:
            self.config = config = replace(config, peer="off")
        if config.peer != "off":
            store.create(SECRET, json.dumps(secrets.token_hex(32)).encode())
            # who can read the bucket may read its chunks from peers as well
            self._secret = _secret(store.get(SECRET))
            if self._secret:
                keep = next(f for f in self._folders if f.name == config.peer)
                self._server = ChunkServer(
                    lambda: [*staged(), *self._folders],
                    config.addr,
                    self._secret,
                    keep,
                    sealed=config.encrypt,
                )
                at = ChunkServerAt(config.addr, self._server.port)
                store.create(chunks_key(member), at.encode())
            else:
                print(
                    f"harness: {store.url}/{SECRET} is not what we make; nodes keep nothing for "
                    "each other (delete it)",
                    flush=True,
                )

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
        disks: list[Tier] = [f for f in self._folders if f.name == "disk"]
        peers: list[Tier] = [self._neighbour_in(manifest.epoch)] if self._server is not None else []
        if not disks and not peers:
            return
        for key, content in parts.items():
            for chunks in blocks(manifest.part(key), content):
                for tier in [*disks, *peers]:
                    tier.put(chunks)
        self._kept[manifest.ref] = manifest
        for old in sorted(self._kept)[:-KEEP_NEAR]:
            del self._kept[old]
        for folder in self._folders:
            folder.keep(chunks_of(self._kept.values()))

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
                if name != self.member and (at := self._where(name)) is not None
            ]
            self._neighbour = epoch, PeerTier(found, self._secret, sealed=self.config.encrypt)
        return self._neighbour[1]

    def _members(self) -> list[str]:
        try:
            return list(newest_epoch(self.store).members)
        except (StoreError, BadObject):
            return []

    def _where(self, member: str) -> tuple[str, int] | None:
        with contextlib.suppress(StoreError, BadObject):
            found = ChunkServerAt.decode(self.store.get(chunks_key(member)))
            return found.addr, found.port
        return None

    def told(self) -> dict[str, Any]:
        """What a worker of ours needs to know, as plain data: for `tiers_for`."""
        found: dict[str, Any] = {
            "folders": [[f.name, str(f.root), f.budget_nbytes] for f in self._folders]
        }
        if self._server is not None:
            members = self._members()
            i = members.index(self.member) if self.member in members else 0
            around = [m for m in (members[i + 1 :] + members[:i]) if m != self.member][:PEERS_ASKED]
            found |= {
                "peers": [at for m in around if (at := self._where(m)) is not None],
                "secret": self._secret,
                "sealed": self.config.encrypt,
            }
        return found

    def shared_no_more(self) -> None:
        """All workers of this node have restored: what was only fetched for them may go."""
        if self.config.share and self.config.peer != "memory":
            for folder in self._folders[:1]:
                for id in folder.list():
                    folder.drop(id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for owned in self._owned:
            owned.close()


def _secret(data: bytes) -> str:
    """As we make it; "" for anything else."""
    with contextlib.suppress(BadObject):
        return secret_of(data)
    return ""


def tiers_for(manifest: Manifest, held: Mapping[str, Any]) -> list[Tier]:
    """The tiers of this node, nearest first; `held` is what its uploader says of the snapshot
    ({}: there is none)."""
    places = {
        key: (str(path), int(start), int(end))
        for key, (path, start, end) in held.get("parts", {}).items()
    }
    tiers: list[Tier] = [SegmentTier(manifest, places)]
    tiers += [
        FolderTier(name, Path(folder), nbytes) for name, folder, nbytes in held.get("folders", [])
    ]
    if held.get("peers"):
        peers = [(str(addr), int(port)) for addr, port in held["peers"]]
        tiers.append(PeerTier(peers, held["secret"], sealed=held["sealed"]))
    return tiers
