"""`harness logs`, and the scripts' own output on pages and beside the screen of `harness launch
--follow-logs`.

The local cloud keeps a file per node, which is read on from where it was read to. SkyPilot gives
the last lines of a cluster's log; those behind the ones that were there before are new.
Both are read in a thread of their own, a bounded amount at a time: a log that is long or a cloud
that hangs holds up nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.cli.common import (
    DONE,
    book_of,
    done_beside,
    existing_store,
    is_local,
    sky_broker,
    state_dir,
)
from harness.clouds.sky_broker import Broker, SkyError
from harness.clouds.sky_clusters import tag, tails
from harness.core.flags import flag, positional
from harness.core.formatting import plural
from harness.core.world import BadInput, CloudUnavailable
from harness.look.pages import run_logs
from storage.stores.store_urls import normalize
from storage.terminal_text import Console, plain

MOST_NBYTES = 64 * 1024  # of one log, read by one look; of more, the newest
MOST_LINES = 100  # of one log, shown by one look; of more, the newest
MOST_LETTERS = 1000  # of a line
LOCAL_EVERY_S, SKY_EVERY_S = 0.5, 15.0  # between two looks
END_WITHIN_S = 10.0  # a look that takes longer is left alone
NewLines = Mapping[int, list[str]]  # by attempt


# ---- harness logs --------------------------------------------------------------------------------
@dataclass(frozen=True)
class LogsFlags:
    url: str = positional("URL of the run")
    attempt: int | None = flag(
        None,
        "of this attempt only (see `harness runs report`); default: all that are there",
        at_least=1,
    )
    lines: int = flag(50, "how many lines of each")


def logs(flags: LogsFlags) -> int:
    """Print the logs of the run's nodes."""
    store, console, url = existing_store(flags.url), Console(), normalize(flags.url)
    if not is_local(url) and not book_of(store).offers:  # SkyPilot may take minutes to say so
        raise BadInput(
            f"{flags.url}: wanted nodes of `harness launch`, found none; the log of `harness run` "
            "is what it prints, and of a managed job `sky jobs logs` shows it"
        )
    found = _local_logs(url, flags.lines) if is_local(url) else _sky_logs(url, flags.lines)
    wanted = {n: text for n, text in found.items() if flags.attempt in (None, n)}
    if not wanted:
        raise BadInput(
            f"{flags.url}: no log of "
            f"{'any attempt' if flags.attempt is None else f'attempt {flags.attempt}'} is there"
        )
    for number, text in sorted(wanted.items()):
        console.print(f"== attempt {number}", style="bold")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return DONE


def page_logs(url: str) -> tuple[dict[int, str], str]:
    """Return the newest lines of the nodes' logs by attempt, for the page of a run, and what is
    missing, in words. SkyPilot is asked for the logs of clusters that exist. Raises OSError."""
    if is_local(url):
        return _local_logs(url, run_logs.MOST_LINES), ""
    if importlib.util.find_spec("sky") is None:
        return _kept_logs(url, run_logs.MOST_LINES), "logs of living nodes: SkyPilot is not here"
    try:
        return _sky_logs(url, run_logs.MOST_LINES), ""
    except (SkyError, CloudUnavailable) as e:
        return _kept_logs(url, run_logs.MOST_LINES), f"logs of living nodes: {e}"


def _local_logs(url: str, lines: int) -> dict[int, str]:
    return {number: _last(path, lines) for number, path in local_paths(url).items()}


def _last(path: Path, lines: int) -> str:
    """Return the last lines of a log, of which no more is read than they may have."""
    most = max(MOST_NBYTES, lines * MOST_LETTERS)
    with open(path, "rb") as log:
        log.seek(max(0, path.stat().st_size - most))
        return "\n".join(log.read(most).decode(errors="replace").splitlines()[-lines:])


def local_paths(url: str) -> dict[int, Path]:
    """Return the logs of the local cloud's nodes, by attempt."""
    return {int(p.parent.name): p for p in (state_dir(url) / "nodes").glob("*/log")}


def _sky_logs(url: str, lines: int) -> dict[int, str]:
    """Return the logs by attempt: from SkyPilot for existing clusters, from kept files for failed
    ones that are gone. Raises SkyError, CloudUnavailable."""
    sky = sky_broker(url)
    try:
        found = tails(sky, url, lines)
    finally:
        sky.close()
    living = {_attempt(n): "\n".join(text.splitlines()[-lines:]) for n, text in found.items()}
    return _kept_logs(url, lines) | living


def _kept_logs(url: str, lines: int) -> dict[int, str]:
    kept = state_dir(url, "sky-logs").glob(f"{tag(url)}-*.log")
    return {_attempt(path.stem): _last(path, lines) for path in kept}


def _attempt(cluster: str) -> int:
    return int(cluster.rpartition("-")[2])


# ---- harness launch --follow-logs ----------------------------------------------------------------
@dataclass
class LocalLines:
    """New lines of the local cloud's logs. What is there at the first look is old."""

    url: str
    _read: dict[int, int] = field(default_factory=dict)  # bytes read, by attempt
    _looked: bool = False

    def __call__(self) -> NewLines:
        found: dict[int, list[str]] = {}
        for number, path in local_paths(self.url).items():
            size = path.stat().st_size
            begin = self._read.setdefault(number, 0 if self._looked else size)
            skipped = max(0, size - begin - MOST_NBYTES)
            with open(path, "rb") as log:
                log.seek(begin + skipped)
                whole, newline, _ = log.read(size - begin - skipped).rpartition(b"\n")
            self._read[number] = begin + skipped + len(whole) + len(newline)
            if newline or skipped:
                lines = whole.decode(errors="replace").splitlines()
                found[number] = [f"... {skipped:,} bytes left out", *lines] if skipped else lines
        self._looked = True
        return found


@dataclass
class SkyLines:
    """New lines of the logs that SkyPilot gives. What is there at the first look is old."""

    sky: Broker
    url: str
    _before: dict[str, list[str]] | None = None  # the last lines of each cluster's log

    def __call__(self) -> NewLines:
        now = {
            name: text.splitlines() for name, text in tails(self.sky, self.url, MOST_LINES).items()
        }
        before, self._before = self._before, now
        if before is None:
            return {}
        return {_attempt(name): behind(before.get(name, []), said) for name, said in now.items()}


def behind(before: list[str], now: list[str]) -> list[str]:
    """Return the lines of `now` behind those that end `before`; all of them if none do."""
    for same in range(min(len(before), len(now)), 0, -1):
        if before[-same:] == now[:same]:
            return now[same:]
    return now


def show(found: NewLines, console: Console) -> None:
    """Print the lines, each behind its node's number."""
    for number, lines in sorted(found.items()):
        left = len(lines) - MOST_LINES
        more = [f"... {plural(left, 'line')} left out: see harness logs"] if left > 0 else []
        for line in [*more, *lines[-MOST_LINES:]]:
            said = f"node {number} | {plain(line)[:MOST_LETTERS]}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def logs_beside(url: str, sky: bool, console: Console) -> Iterator[None]:
    """Print the nodes' new lines while entered. A look that fails is made again later."""
    broker = sky_broker(url) if sky else None
    look: Callable[[], NewLines] = SkyLines(broker, url) if broker else LocalLines(url)

    def once() -> None:
        # a node is being made or removed, or SkyPilot does not answer
        with contextlib.suppress(OSError, SkyError, CloudUnavailable):
            show(look(), console)

    try:
        with done_beside(
            "node-logs",
            once,
            every_s=SKY_EVERY_S if sky else LOCAL_EVERY_S,
            end_within_s=END_WITHIN_S,
            at_once=True,
            at_end=not sky,  # SkyPilot's clusters are gone by then
        ):
            yield
    finally:
        if broker is not None:
            broker.close()
