"""A hostile day as tables: what is done, and whether it was handled.

Each table is a list of `Case`, each case a function that says what went wrong, or nothing. The
tests run them one by one (test_hostile_*.py), `make audit` prints them as the table of figures.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60  # of one case: it hangs


@dataclass(frozen=True)
class Case:
    """`run`: what went wrong, "" if it was handled."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Told:
    """What a command did: its exit status, or the name of an exception that it let go."""

    code: int | str
    out: str
    err: str
    started: tuple[str, ...]  # processes and sockets

    @property
    def text(self) -> str:
        return self.out + self.err


class Hangs(BaseException):
    """A case took longer than LIMIT_S."""


# ---- what is started -----------------------------------------------------------------------------
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "socket.bind", "socket.connect")  # fmt: skip
_started: list[str] | None = None


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _started is not None and event in STARTS:
        _started.append(f"{event} {arguments!r:.200}")


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Audit events of this process; a hook stays for good, so there is one."""
    global _started
    if not getattr(sys, "_hostile_hook", False):
        sys.addaudithook(_hear)
        sys._hostile_hook = True  # type: ignore[attr-defined]
    _started = []
    try:
        yield _started
    finally:
        _started = None


def _late(number: int, frame: object) -> None:
    raise Hangs


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(
    main: Callable[[list[str]], int | None],
    words: Sequence[str],
    folder: Path,
    environ: Mapping[str, str] | None = None,
) -> Told:
    """Run a command in this process, in `folder`, where its home is as well."""
    out, err, here, saved = io.StringIO(), io.StringIO(), os.getcwd(), dict(os.environ)
    code: int | str
    with _heard() as started:
        os.chdir(folder)
        os.environ.update({"HOME": str(folder / "home"), **(environ or {})})
        try:
            with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(list(words)) or 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1 if e.code else 0
        except Hangs:
            code = "hangs"
        except Exception as e:
            code = f"{type(e).__name__}: {e}"[:200]
            err.write(traceback.format_exc())
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(saved)
    return Told(code, out.getvalue(), err.getvalue(), tuple(started))


def tree(folder: Path) -> set[str]:
    ours = (p for p in folder.rglob("*") if not {"__pycache__", ".sky"} & set(p.parts))
    return {str(p) for p in ours}


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def wrong(told: Told, new: Sequence[str] = (), statuses: Sequence[int] = (2,)) -> str:
    """What is wrong with a refusal: everything but the status, a line that says why, and that
    nothing was begun."""
    faults = []
    if told.code not in statuses:
        faults.append(f"wanted exit status {'/'.join(map(str, statuses))}, found {told.code}")
    if "Traceback (most recent" in told.text:
        faults.append("a traceback")
    if not is_plain(told.text):
        faults.append("control characters on the terminal")
    if told.code == 2 and len(told.err.strip()) < 20:
        faults.append("no reason")
    if len(told.text) > 8000 and told.code == 2:
        faults.append(f"{len(told.text)} letters of reason")
    if told.started and told.code == 2:
        faults.append(f"started {told.started[0]}")
    if new:
        faults.append(f"left {', '.join(sorted(new)[:3])}")
    return "; ".join(faults) + (f" | {told.text.strip()[-400:]}" if faults else "")


def scratch(prefix: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix=f"hostile-{prefix}-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
