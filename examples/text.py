"""Real text as bytes: any files, globs or URLs become one memory-mapped file of tokens, prepared
once per machine.

Several processes may start at once: a token file appears by an atomic rename, whole or not at all,
and is never changed. Knows nothing of models or of harness.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

CHUNK_BYTES = 16 << 20
END = b"\0"  # after every file
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library() -> list[str]:
    """The running interpreter's own .py files, sorted: tens of MB of real text that every
    machine already has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (p for p in root.rglob("*.py") if not NOT_TEXT & set(p.relative_to(root).parts))
    # Two files are written by each build of the interpreter; all others are equal wherever the
    # version is.
    return sorted(
        str(p) for p in found if not p.name.startswith(("_sysconfigdata", "sitecustomize"))
    )


def expand(sources: Sequence[str]) -> list[str]:
    """Paths, directories, globs (`**` too) and fsspec URLs -> paths and URLs of single files,
    in the order given, globs sorted."""
    out: list[str] = []
    for source in sources:
        before = len(out)
        if source.startswith(("http://", "https://")):
            out.append(source)  # "?" is not a wildcard there
        elif "://" in source:
            fs, path = fsspec.core.url_to_fs(source)
            found = sorted(fs.glob(path)) if glob.has_magic(path) else fs.find(path)
            out += [fs.unstrip_protocol(p) for p in found]
        elif Path(source).is_dir():
            out += sorted(str(p) for p in Path(source).rglob("*") if p.is_file())
        else:
            out += sorted(p for p in glob.glob(source, recursive=True) if Path(p).is_file())
        if len(out) == before:
            raise FileNotFoundError(
                f"--data {source}: wanted a file, directory, glob or URL, found nothing there; "
                "check the spelling"
            )
    return out


def prepare(sources: Sequence[str], cache: Path, wait_s: float = 600.0) -> Path:
    """The token file of `sources` (default: the standard library), made now if no process has made
    it yet.

    Its name is `{what the sources look like}-{hash of their content}.bin`. Another process that is
    making it is waited for at most `wait_s` seconds; after that we make it ourselves, which is only
    a waste, as both write the same.
    """
    files = expand(sources) if sources else standard_library()
    key = hashlib.blake2b(
        json.dumps([_looks(f) for f in files]).encode(), digest_size=8
    ).hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f"{key}.lock", wait_s):
        made = sorted(cache.glob(f"{key}-*.bin"))
        return made[0] if made else _make(files, cache, key)


def _looks(file: str) -> list[Any]:
    """What changes when a file does, without reading it: size and time of change, or a server's
    ETag."""
    if "://" not in file:
        stat = os.stat(file)
        return [os.path.abspath(file), stat.st_size, stat.st_mtime_ns]
    fs, path = fsspec.core.url_to_fs(file)
    info = fs.info(path)
    return [
        file,
        info.get("size"),
        *(
            str(info.get(k))
            for k in ("ETag", "etag", "mtime", "LastModified", "updated", "created")
        ),
    ]


def _make(files: Sequence[str], cache: Path, key: str) -> Path:
    content = hashlib.blake2b(digest_size=16)
    handle, temporary = tempfile.mkstemp(dir=cache, prefix=f"{key}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            for file in files:
                with fsspec.open(file, "rb") as source:
                    while chunk := source.read(CHUNK_BYTES):
                        content.update(chunk)
                        out.write(chunk)
                content.update(END)
                out.write(END)
            out.flush()
            # before the rename, or a power cut could leave a whole name with half a content
            os.fsync(out.fileno())
        path = cache / f"{key}-{content.hexdigest()}.bin"
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return path


@contextlib.contextmanager
def _lock(path: Path, wait_s: float) -> Iterator[None]:
    """Hold `path` exclusively, or go on without it after `wait_s`. The kernel lets go of a dead
    process's lock."""
    deadline_s = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # taken, or a file system without locks
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.05)
        yield  # closing the file lets go


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Window i of a token file: input (T,) and target (T,), int64; the target is the input one byte
    later.

    Windows [first, last) of those that the file holds, not overlapping.
    """

    def __init__(self, path: Path, length: int, first: int, last: int):
        self.path, self.length, self.first, self.last = path, length, first, last
        self._tokens: np.memmap[Any, np.dtype[np.uint8]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a DataLoader's process opens the file itself and gets no copy of it
        return {**self.__dict__, "_tokens": None}

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=np.uint8, mode="r")
        start = (self.first + i) * self.length
        tokens = torch.from_numpy(self._tokens[start : start + self.length + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]

    @property
    def fingerprint(self) -> str:
        """The same on every machine whose text is the same; a run refuses to go on with other
        text."""
        return f"{self.path.stem.partition('-')[2]}:{self.length}:{self.first}:{self.last}"


def split(path: Path, length: int, held_out: float = 0.05) -> tuple[Windows, Windows]:
    """Windows to train on, and the last part of the text, held out for validation."""
    windows = (path.stat().st_size - 1) // length
    kept = windows - max(1, int(windows * held_out))
    if kept < 1:
        raise ValueError(
            f"the text must hold at least 2 windows of {length} bytes, found {path.stat().st_size} "
            "bytes; add data or lower --seq"
        )
    return Windows(path, length, 0, kept), Windows(path, length, kept, windows)
