"""Folders and sockets that belong to this user; nothing of another user's is trusted.

`/tmp` and `/dev/shm` are open to everybody. Whoever first creates a folder there under a name that
we use could feed us data and read what we leave. So a folder counts only if it is no link, belongs
to us, and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from storage.errors import StoreError

PRIVATE = 0o700
OTHERS_WRITE = 0o022


class NotOurs(StoreError):
    """A folder, or the process at the other end of a socket, belongs to another user."""


def why_not_ours(folder: Path) -> str:
    """Return what is wrong with a folder, or "" if nothing is. Raises FileNotFoundError and other
    OSErrors."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link" if stat.S_ISLNK(found.st_mode) else "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to the user with the id {found.st_uid}"
    if found.st_mode & OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def is_ours(folder: Path) -> bool:
    """Return whether the folder exists and is ours."""
    with contextlib.suppress(OSError):
        return not why_not_ours(folder)
    return False


def own_folder(folder: Path) -> Path:
    """Return this folder, creating it for this user alone. Raises NotOurs if it is another's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE)
    if why := why_not_ours(folder):
        raise NotOurs(
            f"{folder}: wanted a folder of this user's own, but {why}; remove it, or name another"
        )
    return folder


def check_caller(wire: socket.socket) -> int:
    """Return the process id at the other end of a Unix socket; 0 where the system does not report
    it (macOS), where the permissions of the socket's folder must suffice. Raises NotOurs if the
    process is another user's; root's are accepted, since root can act as anybody."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid not in (0, os.geteuid()):
        raise NotOurs(f"the user with the id {uid} is at the other end of our socket")
    return int(pid)
