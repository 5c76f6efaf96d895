"""`file://` after a loss of power: a disk that forgets whatever nobody synced, and that may keep a
name without the bytes behind it. Real files; a sync is recorded instead of waited for."""

import contextlib
import errno
import os
import random
from pathlib import Path

import pytest

from storage import Ref, Snapshots, StoreError
from storage.stores import folder_store
from storage.stores.folder_store import FileStore
from storage.stores.retries import Retrying
from storage.stores.store_urls import open_store


class Disk:
    """`os` as the store sees it, and what is on the disk for good: the bytes of a file once it is
    synced, the names in a folder as they were when that was."""

    def __init__(self, base: Path):
        self.base = base
        self.contents: dict[int, bytes] = {}  # by inode
        self.names: dict[Path, dict[str, int]] = {base.parent: {base.name: base.stat().st_ino}}
        self.early: list[str] = []  # names given to files whose bytes are not on the disk
        self.refuses: tuple[Path, int] | None = None
        self.kept: list[int] = []  # open, so that no inode is used twice

    def __getattr__(self, name: str):
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.refuses and self.refuses[0] == path:
            raise OSError(self.refuses[1], os.strerror(self.refuses[1]))
        if path in self.base.parents:  # others work there
            return
        if path.is_dir():
            self.names[path] = {one.name: one.stat().st_ino for one in path.iterdir()}
        else:
            self.contents[os.fstat(fd).st_ino] = path.read_bytes()
            self.kept.append(os.dup(fd))

    def replace(self, source: Path, target: Path) -> None:
        self._named(source)
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._named(source)
        os.link(source, target)

    def _named(self, source: Path) -> None:
        if self.contents.get(source.stat().st_ino) != source.read_bytes():
            self.early.append(source.name)

    def after(self) -> dict[str, bytes | None]:
        """What the machine finds when its power is back; None: a file without its bytes."""
        found: dict[str, bytes | None] = {}
        folders = [self.base]
        while folders:
            folder = folders.pop()
            for name, inode in self.names.get(folder, {}).items():
                path = folder / name
                if path.is_dir():
                    folders.append(path)
                elif not name.endswith(".tmp"):
                    found[path.relative_to(self.base).as_posix()] = self.contents.get(inode)
        return found


@pytest.fixture
def disk(tmp_path, monkeypatch):
    found = Disk(tmp_path)
    monkeypatch.setattr(folder_store, "os", found)
    yield found
    for fd in found.kept:
        os.close(fd)
    assert found.early == []


def on(disk: Disk) -> FileStore:
    return FileStore(f"file://{disk.base}/runs/x", durable=True)


def test_whatever_was_answered_is_there_after_a_loss_of_power(disk) -> None:
    rng, expected = random.Random(5), dict[str, bytes]()
    stores = [on(disk), on(disk)]  # of two processes: one finds folders that the other made
    for i in range(150):
        store, data = rng.choice(stores), b"%d" % i
        key = f"{rng.choice(['a', 'a/d', 'b/e', 'b/f/g'])}/k{rng.randrange(4)}"
        match rng.choice(["put", "create", "delete"]):
            case "put":
                store.put(key, data)
                expected[key] = data
            case "create":
                assert store.create(key, data) == (key not in expected)
                expected.setdefault(key, data)
            case "delete":
                store.delete(key)
                expected.pop(key, None)
        assert disk.after() == {f"runs/x/{key}": data for key, data in expected.items()}
        assert store.list("") == sorted(expected)


def test_who_hears_that_another_was_first_may_build_on_it(disk) -> None:
    """The other one has linked the name, and died or sleeps before it synced the folder."""
    mine, its = on(disk), on(disk)
    mine.put("a/other", b"")
    with contextlib.suppress(OSError):
        disk.refuses = disk.base / "runs/x/a", errno.ENXIO
        with pytest.raises(StoreError):
            its.create("a/k", b"1")
    assert (disk.base / "runs/x/a/k").exists() and "runs/x/a/k" not in disk.after()
    disk.refuses = None
    assert not mine.create("a/k", b"2")
    assert disk.after()["runs/x/a/k"] == b"1"


def test_a_folder_that_another_made_is_synced_before_it_is_used(disk) -> None:
    (disk.base / "runs" / "x" / "a").mkdir(parents=True)  # and not synced by who made it
    on(disk).put("a/k", b"1")
    assert disk.after() == {"runs/x/a/k": b"1"}


def test_a_committed_snapshot_is_whole_after_a_loss_of_power(disk) -> None:
    snapshots, body = Snapshots(on(disk), 1 << 10), random.Random(1).randbytes(5000)
    for step in (1, 2):
        snapshots.write(Ref(1, step), 0, 1, {"a.bin": body[step:]}, {}, {}, "t")
        assert snapshots.commit(Ref(1, step), 1)
    store = on(disk)
    assert disk.after() == {f"runs/x/{key}": store.get(key) for key in store.list("")}


def test_a_sync_that_fails_is_told_and_one_that_cannot_be_is_not(disk) -> None:
    store = on(disk)
    store.put("a/k", b"1")
    folder = disk.base / "runs/x/a"
    for code in (errno.EIO, errno.ENOSPC):
        disk.refuses = folder, code
        with pytest.raises(StoreError):
            store.put("a/k", b"2")
        with pytest.raises(StoreError):
            store.delete("a/k")
        store.put("b/k", b"2")
    for code in folder_store.NO_FOLDER_SYNC:  # a file system that has no such thing
        disk.refuses = folder, code
        store.put("a/k", b"3")
    if os.geteuid():  # the folder that the run's lies in belongs to somebody else
        (disk.base / "theirs" / "mine").mkdir(parents=True)
        (disk.base / "theirs").chmod(0o111)
        FileStore(f"file://{disk.base}/theirs/mine", durable=True).put("a/k", b"1")
        (disk.base / "theirs").chmod(0o700)


def test_runs_are_durable_unless_somebody_says_otherwise(tmp_path) -> None:
    def durable(environ: dict[str, str], **options: bool) -> bool:
        found = open_store(str(tmp_path), environ=environ, **options)
        assert isinstance(found, Retrying) and isinstance(found.inner, FileStore)
        return found.inner._durable

    assert durable({}) and durable({"STORAGE_FSYNC": "1"})
    assert not durable({"STORAGE_FSYNC": "0"}) and not durable({}, durable=False)
    assert durable({"STORAGE_FSYNC": "0"}, durable=True)
