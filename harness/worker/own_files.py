"""Checkpoints that a script writes by itself, as files in a folder: `run.files`. Runs in the
worker.

    run = harness.attach()
    begin = run.files.restore("out")                 # the newest ones, on every node; 0: none
    for step in range(begin + 1, total + 1):
        ...                                          # the script's own loop
        if run.files.leaving() or step % 100 == 0:
            save_my_checkpoint("out")                # one rank, or each its own files
            run.files.save("out", step)
        if run.files.leaving():
            run.files.leave()                        # the exit code tells the agent

What lies in a folder becomes a snapshot of the run: copied to host memory, hashed and sent in the
background, committed or absent, pruned with the others. A folder is one for all nodes: what several
ranks or nodes write into it is put together, and each node gets all of it back.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core.world import BadInput
from harness.node.marks import Want
from harness.worker import machine
from harness.worker.hands import Hands
from harness.worker.run import Run
from harness.worker.setup_check import SetupCheck
from harness.worker.step import Work
from storage import dcp
from storage.manifest import Manifest, SnapshotCorrupt
from storage.snapshots import Snapshots

MOST_FILES = 100_000  # in a folder
NAME = "files"  # under which it is part of the state
LEFT = {Want.RESIZE: "resize", Want.DRAIN: "drain", Want.STOP: "stop"}


class FolderState:
    """What a folder holds, as a state. `writes`: this rank restores it, for all that share it."""

    def __init__(self, folder: Path, writes: bool):
        self.folder, self.writes = folder, writes
        self.mine: list[str] = []  # paths in it that this rank saves
        self._aside = False  # what lay there before was put aside

    def state_dict(self) -> dict[str, Any]:
        tensors = {}
        for number, name in enumerate(self.mine):
            path = self.folder / name
            if path.stat().st_size:
                mapped = np.memmap(path, np.uint8, "c")  # copied by whoever writes to it: nobody
                tensors[str(number)] = torch.from_numpy(mapped)
        return {"names": list(self.mine), "bytes": tensors}

    def load(self, manifest: Manifest, snapshots: Snapshots) -> None:
        """Put all files of a snapshot there. What lay there before is put aside. Raises BadInput,
        StoreError."""
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
        read = dcp.destinations(manifest, {}, wanted=lambda name: name == tensor)
        dcp.load(snapshots, manifest, read)
        with open(path, "wb") as file:
            read[tensor].numpy().tofile(file)

    def _replace(self, new: Path) -> None:
        if self.folder.exists():
            aside = self.folder.with_name(f"{self.folder.name}.aside")
            if self._aside:
                shutil.rmtree(self.folder)  # what an earlier look put there
            else:
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.folder, aside)
        self._aside = True
        os.replace(new, self.folder)


def _names_in(manifest: Manifest) -> dict[str, str]:
    """Of each file its path in the folder, and the name of the tensor that it is. Raises BadInput,
    SnapshotCorrupt."""
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
    """See the module. Made by a session. Every method is called by all ranks, at the same point.
    `due`: when `leaving` was asked last, a snapshot was wanted: by the interval, or by somebody who
    asked for one."""

    def __init__(self, work: Work, hands: Hands, run: Run, setup: SetupCheck):
        self._work, self._hands, self._run, self._setup = work, hands, run, setup
        self._peers = work.peers
        self._state: FolderState | None = None
        self._want = Want.NOTHING
        self.due = False

    def restore(self, folder: str | os.PathLike[str]) -> int:
        """Put the files of the newest valid snapshot into `folder`, on every node, and say of which
        step they are; 0: there is none, and the folder is left as it is. What else lay there is
        moved to a folder beside it, NAME.aside. Raises BadInput, StoreError."""
        self._open(Path(folder))
        return self._run.step

    def save(self, folder: str | os.PathLike[str], step: int) -> None:
        """The files in `folder`, on all nodes together, are the snapshot of `step` (optimizer steps
        done). They are copied now, and sent while the script goes on. The same file of two nodes
        must be the same. Raises BadInput; StoreError when it leaves."""
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
        """Must the script save and leave, on all ranks? "resize", "drain" or "stop"; "": it need
        not. Costs an exchange of a few bytes."""
        wants = torch.zeros(len(Want), dtype=torch.int64)
        self._work.votes.cast(wants, self._work.snapshotter.due)
        if self._peers.control is not None:
            dist.all_reduce(wants, group=self._peers.control)
        want = machine.winner(wants.tolist())
        self.due = want is Want.SNAPSHOT
        if self.due:
            self._work.votes.answered()
        self._want = Want.NOTHING if self.due else want
        self._peers.life.tell(step=self._run.step)
        return LEFT.get(self._want, "")

    def leave(self) -> None:
        """Wait until the last snapshot is committed, and end this process as whoever asked for it
        wants: behind `leaving`, and `save`. Raises SystemExit, StoreError; BadInput if nobody
        asked."""
        if self._want is Want.NOTHING:
            raise BadInput("run.files.leave(): wanted run.files.leaving() to say so before")
        self._hands.turn(machine.Gone(self._want))

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
        """Paths in the folder that this rank saves: of those that are nobody's before it. Raises
        BadInput."""
        place = (self._peers.host, str(folder))
        said = self._peers.gather((place, *_listed(folder)))
        owners: dict[str, tuple[int, int]] = {}  # path -> who saves it, and its size
        seen: set[tuple[str, str]] = set()
        for rank, (where, files, wrong) in enumerate(said):
            if wrong:
                raise BadInput(f"run.files.save({where[1]!r}), on {where[0]}: {wrong}")
            if where in seen:
                continue  # another rank of that node has told of it
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
    """Of each file in it, its path and size; and what is wrong with them."""
    if not folder.is_dir():
        return {}, ""  # this node may have none
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
