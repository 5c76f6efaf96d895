"""Snapshots of checkpoints that a script itself writes as files in a folder: `run.files`. Runs in
the worker.

    run = harness.attach()
    begin = run.files.restore("out")                 # the newest ones, on every node; 0: none
    for step in range(begin + 1, total + 1):
        ...                                          # the script's own loop
        if run.files.leaving() or step % 100 == 0:
            save_my_checkpoint("out")                # on one rank, or each rank its own files
            run.files.save("out", step)
        if run.files.leaving():
            run.files.leave()                        # the exit code tells the agent

The files in a folder become a snapshot of the run: copied to host memory, hashed and sent in the
background, committed as a whole or not at all, and pruned like others. All nodes share one logical
folder: files that several ranks or nodes write are merged, and each node gets all of them back.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core.world import BadInput
from harness.node.marks import Want
from harness.worker import boundary
from storage.snapshots.manifest import Manifest, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.tensors import loading

if TYPE_CHECKING:
    from harness.worker.session import Session

MOST_FILES = 100_000  # in a folder
NAME = "files"  # the key of the files in the state
LEFT = {Want.GROW: "resize", Want.RESIZE: "resize", Want.DRAIN: "drain", Want.STOP: "stop"}


class FolderState:
    """The files of a folder as a state. `writes`: this rank restores them, for all ranks that share
    the folder."""

    def __init__(self, folder: Path, writes: bool):
        self.folder, self.writes = folder, writes
        self.mine: list[str] = []  # paths in the folder that this rank saves
        self._aside = False  # the folder's earlier contents were moved aside

    def state_dict(self) -> dict[str, Any]:
        tensors = {}
        for number, name in enumerate(self.mine):
            path = self.folder / name
            if path.stat().st_size:
                mapped = np.memmap(path, np.uint8, "c")  # copy on write, though nobody writes
                tensors[str(number)] = torch.from_numpy(mapped)
        return {"names": list(self.mine), "bytes": tensors}

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None:
        """Write all files of a snapshot to the folder, whose earlier contents are moved aside.
        Raises BadInput, StoreError."""
        if not self.writes:
            return
        found = _names_in(manifest)
        new = self.folder.with_name(f"{self.folder.name}.new-{secrets.token_hex(4)}")
        try:
            new.mkdir(parents=True)
            for name, tensor in found.items():
                path = new / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write(path, tensor, manifest, snapshots)
            self._replace(new)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _write(self, path: Path, tensor: str, manifest: Manifest, snapshots: Snapshots) -> None:
        if tensor not in manifest.tensors:
            path.touch()
            return
        read = loading.destinations(manifest, {}, wanted=lambda name: name == tensor)
        loading.load(snapshots, manifest, read)
        with open(path, "wb") as file:
            read[tensor].numpy().tofile(file)

    def _replace(self, new: Path) -> None:
        if self.folder.exists():
            aside = self.folder.with_name(f"{self.folder.name}.aside")
            if self._aside:
                shutil.rmtree(self.folder)  # written by an earlier call of `load`
            else:
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.folder, aside)
        self._aside = True
        os.replace(new, self.folder)


def _names_in(manifest: Manifest) -> dict[str, str]:
    """Return, for each file of a snapshot, its path in the folder and the name of its tensor.
    Raises BadInput, SnapshotCorrupt."""
    found: dict[str, str] = {}
    for rank in range(manifest.world):
        key = f"{NAME}@r{rank}"
        plain = manifest.data.get("state" if rank == 0 else f"state@r{rank}", {}).get(key)
        if plain is None:
            raise BadInput(
                f"snapshot {manifest.ref.name} holds no files of run.files.save(...); it was saved "
                "by another script"
            )
        for number, name in enumerate(plain["names"]):
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or "\\" in name or set(parts) & {"..", "."}:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref.name}: wanted files below a folder, found {name!r}"
                )
            found[name] = f"{key}/bytes/{number}"
    return found


class OwnFiles:
    """The interface `run.files`; see the module. All ranks call each method at the same point.
    `due`: at the last call of `leaving` a snapshot was due, by the interval or on request."""

    def __init__(self, run: Session):
        self._work, self._hands, self._run = run._work, run._hands, run._run
        self._setup, self._peers = run._setup, run._peers
        self._state: FolderState | None = None
        self._want = Want.NOTHING
        self.due = False

    def restore(self, folder: str | os.PathLike[str]) -> int:
        """Write the files of the newest valid snapshot to `folder`, on every node, and return their
        step; 0: there is none, and the folder is unchanged. Earlier contents are moved to a folder
        beside it, NAME.aside. Raises BadInput, StoreError."""
        self._open(Path(folder))
        return self._run.step

    def save(self, folder: str | os.PathLike[str], step: int) -> None:
        """Save the files in `folder`, of all nodes together, as the snapshot of `step` (optimizer
        steps done). They are copied now, and sent while the script continues. A file that several
        nodes have must be equal on them. Raises BadInput; StoreError if it is about to leave."""
        if self._state is None:
            self._open(Path(folder))
        assert self._state is not None
        snapshotter = self._work.snapshotter
        if step <= max(snapshotter.saved_step, self._run.step if snapshotter.parent else -1):
            raise BadInput(
                f"run.files.save(step={step}): wanted a greater step than that of the last one, "
                f"{self._run.step}"
            )
        self._state.folder = Path(folder).absolute()
        self._state.mine = self._shared_out(self._state.folder)
        self._run.step = step
        snapshotter.take(LEFT.get(self._want, "own"), own_loop=True)
        snapshotter.finish_staging()

    def leaving(self) -> str:
        """Return why the script must save and leave, on all ranks: "resize", "drain" or "stop"; "":
        it need not. Costs an exchange of a few bytes."""
        wants = torch.zeros(len(Want), dtype=torch.int64)
        self._work.vote(wants, self._work.run.step)
        if self._peers.control is not None:
            dist.all_reduce(wants, group=self._peers.control)
        want = boundary.winner(wants.tolist())
        self.due = want is Want.SNAPSHOT
        if self.due:
            self._work.votes.answered()
        self._want = Want.NOTHING if self.due else want
        self._peers.life.tell(step=self._run.step)
        return LEFT.get(self._want, "")

    def leave(self) -> None:
        """Wait until the last snapshot is committed, then end this process with the exit code for
        what `leaving` returned. Call it after `leaving` and `save`. Raises SystemExit, StoreError;
        BadInput if `leaving` did not return a reason."""
        if self._want is Want.NOTHING:
            raise BadInput("run.files.leave(): wanted run.files.leaving() to say so before")
        self._hands.turn(boundary.ScriptLeft(self._want))

    # ---- within ----------------------------------------------------------------------------------
    def _open(self, folder: Path) -> None:
        if self._state is not None:
            raise BadInput("run.files.restore(...): wanted once, before the first run.files.save")
        folder = folder.absolute()
        places = self._peers.gather((self._peers.host, str(folder)))
        first = places.index((self._peers.host, str(folder)))
        self._state = FolderState(folder, writes=first == self._peers.rank)
        self._work.training.keep_files(NAME, self._state)
        self._setup.settle()
        self._hands.resume()

    def _shared_out(self, folder: Path) -> list[str]:
        """Return the paths in the folder that this rank saves: those that no lower rank saves.
        Raises BadInput if files of the same path differ in size, or if there are no files."""
        place = (self._peers.host, str(folder))
        said = self._peers.gather((place, *_listed(folder)))
        owners: dict[str, tuple[int, int]] = {}  # path -> who saves it, and its size
        seen: set[tuple[str, str]] = set()
        for rank, (where, files, wrong) in enumerate(said):
            if wrong:
                raise BadInput(f"run.files.save({where[1]!r}), on {where[0]}: {wrong}")
            if where in seen:
                continue  # another rank has listed the same folder
            seen.add(where)
            for name, nbytes in files.items():
                _, before = owners.setdefault(name, (rank, nbytes))
                if before != nbytes:
                    raise BadInput(
                        f"run.files.save(...): wanted {name} to be the same on all nodes, found "
                        f"{before} and {nbytes} bytes; give files of each rank names of their own"
                    )
        if not owners:
            raise BadInput(f"run.files.save({str(folder)!r}): wanted files in it, found none")
        return sorted(name for name, (rank, _) in owners.items() if rank == self._peers.rank)


def _listed(folder: Path) -> tuple[dict[str, int], str]:
    """Return the path and size of each file in the folder, and what is wrong with them or ""."""
    if not folder.is_dir():
        return {}, ""  # a node may have no folder
    found: dict[str, int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_file():
                return {}, f"wanted files, found {path.name}, which is none"
            found[path.relative_to(folder).as_posix()] = path.stat().st_size
            if len(found) > MOST_FILES:
                return {}, f"wanted {MOST_FILES} files at most, found more"
    return found, ""
