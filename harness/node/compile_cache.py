"""The folder in which torch keeps what `torch.compile` made (`TORCHINDUCTOR_CACHE_DIR`), on the
node's own disk: it outlives workers, generations and runs.

Torch executes what lies there: machine code, Python files, and pickles that it loads itself (also
those of `torch.compiler.load_cache_artifacts`). So nothing of it comes from a bucket, and the
folder is one that no other user can write to, unlike torch's own below `/tmp`. Each kind of machine
and version of torch has its own, since a home may be shared by several machines and torch's keys
leave out the processor. Knows no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from storage.errors import StoreError
from storage.private_folders import own_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
FULL = "full"  # a file that says: begin another folder
MOST_NBYTES = 16 << 30  # of one folder; from here on another is begun
UNUSED_S = 14 * 86400.0  # a folder that no agent has begun with for so long is removed


def compile_cache(environ: Mapping[str, str], accelerator: str) -> dict[str, str]:
    """Return the variable that names the folder for this machine's workers, and tidy up beside it
    in a thread; {} if the user has set it, or this user has no folder of their own here.
    `accelerator`: the GPU's name."""
    if environ.get(VARIABLE):
        return {}
    # a home that is missing, full or another's costs compilation, and nothing else
    with contextlib.suppress(OSError, RuntimeError, StoreError):
        root = own_folder(Path.home() / ".cache" / "spotharness" / "compiled")
        folder = own_folder(_current(root, machine_kind(accelerator)))
        os.utime(folder)
        threading.Thread(target=tidy, args=(folder,), name="compile-cache", daemon=True).start()
        return {VARIABLE: str(folder)}
    return {}


def machine_kind(accelerator: str) -> str:
    """Return a name for all machines that may run what this one compiles."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    kind = "\n".join([version, accelerator, platform.machine(), *_processor()])
    return f"torch-{version}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"


def _processor() -> list[str]:
    """Return the model and the instructions of the first processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        first = file.read(1 << 16).split("\n\n")[0].splitlines()
        told = ("model name", "flags", "Features")
        return sorted(line for line in first if line.startswith(told))
    return [platform.processor()]


def _current(root: Path, kind: str) -> Path:
    number = 1
    while (root / f"{kind}-{number}" / FULL).exists():
        number += 1
    return root / f"{kind}-{number}"


def tidy(folder: Path, most_nbytes: int = MOST_NBYTES, unused_s: float = UNUSED_S) -> None:
    """Mark this folder as full if it is, and remove others that nobody has used for `unused_s`:
    one in use is never touched, whichever agents share it."""
    with contextlib.suppress(OSError):
        if sum(_sizes(folder)) > most_nbytes:
            (folder / FULL).touch()
        for other in folder.parent.iterdir():
            if other != folder and time.time() - other.lstat().st_mtime > unused_s:
                shutil.rmtree(other, ignore_errors=True)


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the sizes of the files below, in bytes."""
    for found, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # torch replaces its files
                yield os.lstat(os.path.join(found, name)).st_size
