"""Chunks for forked processes: the process that they were forked from reads the store for them.

A DataLoader forks its processes by default, and the threads of a bucket's client do not survive in
them: they would wait forever. So each requests chunks from the process that opened the corpus, over
a socket that only its own user's processes may use.

    request: number of a chunk, int64    reply: 0, its length as int64, and the chunk
                                             or 1, a length, and {"kind", "message"} of an error
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from harness.core.world import HarnessError
from harness.data.card import CorpusCorrupt
from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.private_folders import NotOurs, check_caller

ERRORS: dict[str, type[HarnessError | StoreError]] = {
    one.__name__: one for one in (CorpusCorrupt, NotFound, StoreRefused, StoreUnavailable)
}
_NUMBER, _HEAD = struct.Struct("<q"), struct.Struct("<Bq")
CALLERS = 256
PAUSE_S = 0.05
MORE_S = 60.0  # seconds that a reply may take beyond the store's limit


class Parent:
    """The server for the processes that are forked from this one. `chunk`: number -> bytes;
    `within_s`: the longest that may take. Its resources are created before the fork, and its
    threads are daemons."""

    def __init__(self, chunk: Callable[[int], bytes], within_s: float):
        self.pid, self._chunk, self._within_s = os.getpid(), chunk, within_s
        self._wires = threading.local()  # one per requesting thread
        # abstract socket name: a killed process leaves nothing behind
        self._name = f"\0spotharness-data-{self.pid}-{secrets.token_hex(8)}"
        self._door, self._closed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), False
        self._door.bind(self._name)
        self._door.listen(CALLERS)
        threading.Thread(target=self._serve, name="forked", daemon=True).start()

    def close(self) -> None:
        """Stop serving. A forked process does nothing here, since the socket is its parent's as
        well."""
        if os.getpid() == self.pid and not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            self._door.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                wire, _ = self._door.accept()
            except OSError:  # closed, out of descriptors, or the caller has gone
                time.sleep(PAUSE_S)
                continue
            threading.Thread(target=self._answer, args=(wire,), name="forked", daemon=True).start()

    def _answer(self, wire: socket.socket) -> None:
        with wire, contextlib.suppress(OSError, NotOurs):
            check_caller(wire)
            while asked := _received(wire, _NUMBER.size):
                try:
                    status, data = 0, self._chunk(*_NUMBER.unpack(asked))
                except (HarnessError, StoreError) as e:
                    said = {"kind": type(e).__name__, "message": str(e)}
                    status, data = 1, json.dumps(said).encode()
                wire.sendall(_HEAD.pack(status, len(data)))
                wire.sendall(data)

    def ask(self, number: int) -> bytes:
        """Return a chunk, requested from a forked process. Raises what reading it raised in the
        parent, and StoreUnavailable if the parent does not answer."""
        try:
            wire = self._wire()
            wire.sendall(_NUMBER.pack(number))
            status, nbytes = _HEAD.unpack(_received(wire, _HEAD.size) or b"")
            data = _received(wire, nbytes)
        except (OSError, struct.error) as e:
            raise StoreUnavailable(
                f"the process {self.pid}, which reads the store for those that it forked, does "
                f"not answer ({type(e).__name__}: {e})"
            ) from e
        if status == 0:
            return data
        said = json.loads(data)
        raise ERRORS.get(said["kind"], StoreError)(said["message"])

    def _wire(self) -> socket.socket:
        """Return this thread's connection, made at first use in each process."""
        kept: tuple[int, socket.socket] | None = getattr(self._wires, "kept", None)
        if kept is None or kept[0] != os.getpid():
            wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            wire.settimeout(self._within_s + MORE_S)
            wire.connect(self._name)
            kept = self._wires.kept = os.getpid(), wire
        return kept[1]


def can_serve(url: str) -> bool:
    """Return whether forked processes must and can be served. A local folder they read
    themselves."""
    return not url.startswith(("file://", "memory://")) and sys.platform == "linux"


def forks() -> bool:
    """Return whether a DataLoader starts processes by fork, unless configured otherwise."""
    usual = multiprocessing.get_all_start_methods()[0]
    return (multiprocessing.get_start_method(allow_none=True) or usual) == "fork"


def _received(wire: socket.socket, nbytes: int) -> bytes:
    """Return exactly `nbytes` bytes; b"" if the other end has gone."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while len(view):
        if not (found := wire.recv_into(view)):
            return b""
        view = view[found:]
    return bytes(data)
