"""The node's warm process, from the agent's side: torch is imported once for each node, and workers
are forked from it in milliseconds.

`python -m harness.worker.process` has no CUDA context and no threads; each request over its socket
is one worker. A fork costs what copying page tables costs, so a second loss right after the first
is as cheap as the first, and no spare imports anything beside the training. The worker's end is
told over the same socket; until we have heard it, its id cannot be anybody else's. When the warm
process is killed, so are its workers, and all count as killed; the next one imports again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from harness.node.processes import MESSAGE_NBYTES
from harness.node.progress import state_of

NO_MORE_S = 5.0  # for the warm process to tell that a worker which has ended has ended


class Forked:
    """One worker; what `subprocess.Popen` would be, had we started it."""

    def __init__(self, nursery: Nursery):
        self.pid = 0  # until the warm process has forked it
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        with self._nursery.changed:
            if not self._nursery.changed.wait_for(lambda: self.returncode is not None, timeout_s):
                raise subprocess.TimeoutExpired("harness.worker.process", timeout_s)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._nursery.changed:
            if self.pid and self.returncode is None:
                os.kill(self.pid, number)

    def kill(self, within_s: float) -> None:
        """SIGKILL it and what it has started; wait for its end, but not for ever: one that
        hangs in a driver cannot be killed."""
        until_s = time.monotonic() + within_s
        while self.returncode is None:
            with self._nursery.changed:
                if self.pid and self.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(min(NO_MORE_S, within_s))
                return
            # it is the warm process that hangs, or is stopped
            if not self.pid or state_of(self.pid) in ("Z", ""):
                self._nursery.close()
            elif time.monotonic() > until_s:
                return


class Nursery:
    """`fork` workers from one warm process. `env` is what it, and so they, start with."""

    def __init__(self, env: Mapping[str, str]):
        self.changed = threading.Condition()
        self._children: dict[int, Forked] = {}
        self._count = 0
        self._warm = threading.Event()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(env),
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def warm(self) -> bool:
        """It has imported what scripts need, or has ended and never will."""
        return self._warm.is_set()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, order: Mapping[str, Any]) -> tuple[Forked, BinaryIO]:
        """A worker that runs `order` (see `harness.worker.process.run`), now or as soon as we
        are warm; and what it writes."""
        out, theirs = os.pipe()
        worker = Forked(self)
        with self.changed:
            self._count += 1
            self._children[self._count] = worker
            number = self._count
        try:
            socket.send_fds(
                self._socket, [json.dumps({"fork": number, "order": order}).encode()], [theirs]
            )
        except OSError:  # it has ended: `_listen` may be past its end already
            self._lose(number)
        finally:
            os.close(theirs)
        return worker, open(out, "rb")

    def close(self) -> None:
        """End it, and with it its workers."""
        self._process.kill()
        self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(MESSAGE_NBYTES) or b"{}")
            except ConnectionError:
                message = {}
            if not message:
                break
            with self.changed:
                if "warm" in message:
                    self._warm.set()
                elif "pid" in message:
                    self._children[message["fork"]].pid = message["pid"]
                else:
                    self._children.pop(message["fork"]).returncode = message["code"]
                    with contextlib.suppress(OSError):
                        self._socket.send(json.dumps({"reap": message["fork"]}).encode())
                self.changed.notify_all()
        # a socket that is closed by a living process would be of no use either
        self._process.kill()
        self._process.wait()
        for number in list(self._children):
            self._lose(number)
        self._warm.set()
        self._socket.close()

    def _lose(self, number: int) -> None:
        with self.changed:
            worker = self._children.pop(number, None)
            if worker is None:
                return
            if worker.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # it dies with the warm process; what it has started does not
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.returncode = -signal.SIGKILL
            self.changed.notify_all()
