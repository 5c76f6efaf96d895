"""A side job's command as a process: start, output, time limit, and end with all its children.

Used by the watcher. Knows nothing about runs and buckets.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.core.world import BadInput
from harness.node.heartbeat import die_with_parent

END_S = 10.0  # between SIGTERM and SIGKILL
TAIL_LETTERS = 2000  # of its output, kept for a failure's reason
MOST_METRICS, METRICS_NBYTES = 1000, 1 << 20


class SideCommand:
    """A running command. It dies with this process, and its output is passed on as it comes."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]):
        self._process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal reaches all its children, and Ctrl-C none of them
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self.pid = self._process.pid
        self._tail = b""
        self._reader = threading.Thread(target=self._hear, name="command", daemon=True)
        self._reader.start()

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` and return the exit status, negative for the signal that killed it;
        None: it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL after END_S, to the command and its children. Children left by
        a command that has ended are killed as well."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self.wait(END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(1.0)  # it runs on if a child left the group and holds our pipe

    def last_words(self) -> str:
        """Return the end of its output."""
        return self._tail.decode(errors="replace")[-TAIL_LETTERS:].strip()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _hear(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        while data := os.read(pipe.fileno(), 1 << 16):
            self._tail = (self._tail + data)[-4 * TAIL_LETTERS :]
            with contextlib.suppress(OSError, ValueError):  # nobody reads our output any more
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()


def argument_vector(script: Sequence[str]) -> list[str]:
    """Return the argument vector for `script.py ...`, `-m module ...` or any other command. Raises
    BadInput if there is no such file or program."""
    if not script:
        raise BadInput("no command: write `harness snapshots watch URL -- eval.py --its-flags`")
    first = script[0]
    if first == "-m" and len(script) > 1:
        return [sys.executable, *script]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise BadInput(f"{first}: no such file (working directory: {Path.cwd()})")
        return [sys.executable, *script]
    if shutil.which(first) is None:
        raise BadInput(
            f"{first}: wanted a script.py, -m module or a program; found no such program"
        )
    return list(script)


def metrics_in(path: Path) -> dict[str, float]:
    """Return the metrics that a command has written, as one JSON object of names and numbers per
    line; the last value of a name counts. Raises BadInput."""
    found: dict[str, float] = {}
    data = path.read_bytes() if path.exists() else b""
    if len(data) > METRICS_NBYTES:
        raise BadInput(f"wanted at most {METRICS_NBYTES} bytes of numbers, found {len(data)}")
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if not isinstance(body, dict) or not all(map(_is_number, body.values())):
            raise BadInput(
                f"line {number} of the numbers: wanted a JSON object of names and numbers, such as "
                f'{{"loss": 2.1}}, found {line.decode(errors="replace")[:100]!r}'
            )
        found |= {str(name): float(value) for name, value in body.items()}
    if len(found) > MOST_METRICS or any(not 1 <= len(name) <= 200 for name in found):
        raise BadInput(
            f"wanted at most {MOST_METRICS} numbers with names of 1 to 200 letters, found "
            f"{len(found)}"
        )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
