"""Which files a script opens to write, and at which line: for `harness check`, inside a worker.

Python tells of every file that is opened (`sys.addaudithook`); what torch and safetensors open
themselves is seen where they are called.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.proof.check_evidence import FileWritten

if TYPE_CHECKING:
    from harness.proof.check_probe import Ownership

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NOT_FILES = ("/dev/", "/proc/", "/sys/")
CACHES = ("__pycache__", f"{os.sep}.cache{os.sep}", "torchinductor_", f"{os.sep}.triton{os.sep}")
OURS = (f"{os.sep}harness{os.sep}", f"{os.sep}storage{os.sep}")


class Writes:
    """`tell`: takes each `FileWritten`. `folder`: the check's own; what is there, except the run's
    working folder, is not the script's."""

    def __init__(self, own: Ownership, folder: str):
        self._own, self._folder = own, os.path.realpath(folder)
        self._work = os.path.join(self._folder, "work") + os.sep
        self._seen: set[str] = set()
        self._busy = False
        self.tell: Callable[[FileWritten], None] = lambda written: None

    def listen(self) -> None:
        import torch

        self._wrap(torch, "save", 1)
        torch.serialization.save = torch.save
        if "safetensors.torch" in sys.modules:
            self._wrap_safetensors(sys.modules["safetensors.torch"])
        else:
            from harness.proof.check_probe import After

            sys.meta_path.insert(0, After("safetensors.torch", self._wrap_safetensors))
        sys.addaudithook(self._audited)

    def _wrap_safetensors(self, module: ModuleType) -> None:
        self._wrap(module, "save_file", 1)
        self._wrap(module, "save_model", 1)

    def _wrap(self, module: Any, name: str, place: int) -> None:
        """The path is the argument at `place`."""
        save = getattr(module, name)

        @functools.wraps(save)
        def noted(*args: Any, **more: Any) -> Any:
            path = args[place] if len(args) > place else more.get("filename", more.get("f"))
            if isinstance(path, (str, os.PathLike)):
                self.note(os.fspath(path))
            return save(*args, **more)

        setattr(module, name, noted)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if event == "open":
            path, mode, flags = args
            writes = set("wax+") & set(mode) if isinstance(mode, str) else (flags or 0) & WRITING
            if writes and isinstance(path, (str, bytes)):
                self.note(os.fsdecode(path))
        elif event == "os.rename" and isinstance(args[1], (str, bytes)):
            self.note(os.fsdecode(args[1]))

    def note(self, path: str) -> None:
        """It is opened to write now."""
        self._busy = True
        try:
            whole = os.path.realpath(path)
            if whole in self._seen or whole.startswith(NOT_FILES):
                return
            if any(word in whole for word in CACHES):
                return
            if whole.startswith(self._folder) and not whole.startswith(self._work):
                return
            if self._by_us() or not (where := self._own.line()):
                return
            self._seen.add(whole)
            self.tell(FileWritten(whole.removeprefix(self._work), where))
        finally:
            self._busy = False

    def _by_us(self) -> bool:
        """Has the harness itself opened it, asked by the script?"""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if self._own.file(file) or "site-packages" in file:
                return False
            if any(name in file for name in OURS) and "check_" not in os.path.basename(file):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False
