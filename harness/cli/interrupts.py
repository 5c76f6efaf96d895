"""Ctrl-C and signals while a run is led: what they ask for, and what is done."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.ask import ask_stop
from harness.cli.common import INTERRUPTED
from harness.core.world import HarnessError
from storage.objects import ObjectStore
from storage.text import Console

if TYPE_CHECKING:
    from harness.clouds.local import LocalCloud
    from harness.clouds.skypilot import SkyPilotCloud

# a terminal that closes and a service manager that stops us send several signals: within this they
# are one
SAME_S = 3.0


class Told(KeyboardInterrupt):
    """A signal asks the controller to end; like Ctrl-C where nobody can be asked."""


@contextlib.contextmanager
def heed_signals(log: Path) -> Iterator[None]:
    """SIGTERM and SIGHUP raise Told meanwhile. What a closed terminal would have shown goes to
    `log`."""
    # a terminal that has gone does not say any more that it was one
    terminal = sys.stdout.isatty() or sys.stderr.isatty()
    heard_s = -SAME_S

    def told(number: int, _: object) -> None:
        nonlocal heard_s
        if number == signal.SIGHUP and terminal:
            _write_to(log)
        before_s, heard_s = heard_s, time.monotonic()
        if heard_s - before_s >= SAME_S:
            raise Told(signal.Signals(number).name)

    # One that is ignored stays so (`nohup harness launch`).
    heeded = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, told) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_to(log: Path) -> None:
    """The terminal has gone: from here on we write to a file. To write to where it was is an
    error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out, null = (
        os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
        os.open(os.devnull, os.O_RDONLY),
    )
    for standard, target in ((0, null), (1, out), (2, out)):
        os.dup2(target, standard)
    os.close(out)
    os.close(null)


def answer(asked: KeyboardInterrupt, draining: bool, what: str, console: Console) -> str:
    """What an interruption shall do: "drain", "leave", "kill" or "carry on". The second one,
    while nodes drain, kills."""
    told = isinstance(asked, Told)
    if draining:
        return "kill"
    if what != "ask":
        return what
    if told or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "drain"
    console.print("\nInterrupted.", style="bold")
    console.print(
        "d = drain: snapshot, then stop   l = leave it running   k = kill now   c = carry on"
    )
    try:
        return {"l": "leave", "k": "kill", "c": "carry on"}.get(
            console.input("> ").strip().lower()[:1], "drain"
        )
    except (Told, EOFError):
        return "drain"
    except KeyboardInterrupt:
        return "kill"


def act_on(
    what: str,
    by: str,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud,
    console: Console,
    url: str,
) -> int | None:
    """Do what was answered to what happened (`by`). None: go on leading (until the drain is
    over)."""
    if what == "carry on":
        return None
    if what == "leave":
        console.print(
            f"Left running. Lead it again with the same command; watch: harness status {url}; end "
            f"it: harness stop {url}"
        )
        return INTERRUPTED
    if what == "drain":
        console.print(
            f"{by[0].upper()}{by[1:]}. Draining: a snapshot is made, then everything is ended. The "
            "same again kills at once."
        )
        ask_stop(store, f"the controller was {by}")
        return None
    console.print("Ending all nodes ...")
    with contextlib.suppress(HarnessError):
        for node in cloud.nodes():
            cloud.terminate(node.attempt)
    cloud.shutdown()
    console.print("Killed. What was committed is safe; the same command resumes from it.")
    return INTERRUPTED


def by(asked: KeyboardInterrupt) -> str:
    """Who interrupted, in words."""
    return f"told to end by {asked}" if isinstance(asked, Told) else "interrupted with Ctrl-C"
