"""`harness serve`: all runs of a folder in a browser"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.cli.common import DONE
from harness.core.config import flag, positional
from harness.core.world import BadInput
from storage.objects import ObjectStore
from storage.opening import normalize, open_store
from storage.text import Console

RETRY_WITHIN_S = 3.0  # a bucket that is silent shall not hold up the others


@dataclass(frozen=True)
class ServeFlags:
    url: str = positional("URL of a folder of runs, or of one run")
    port: int = flag(8321, "where to listen; 0: any port that is free", at_most=65535)
    host: str = flag("127.0.0.1", "address to listen on; others than loopback need --anyone")
    anyone: bool = flag(False, "whoever reaches this machine may read all runs")


def serve(flags: ServeFlags) -> int:
    """Show all runs of a folder in a browser."""
    from harness.views import serve as server
    from harness.views.serve_runs import RunsFolder

    host = server.checked_host(flags.host, flags.anyone)
    console, url = Console(), normalize(flags.url)
    opened(url)  # a URL that no store can have is told before anybody listens
    if url.startswith("file://") and not Path(url.removeprefix("file://")).exists():
        raise BadInput(f"{flags.url}: wanted a folder of runs, or a run, found nothing there")

    def told(at: str) -> None:
        console.print(f"runs of {url}: {at}  (Ctrl-C ends it)", soft_wrap=True)

    try:
        server.serve(RunsFolder(url, opened), host, flags.port, told)
    except KeyboardInterrupt:
        console.print("")
    return DONE


def opened(url: str) -> ObjectStore:
    return open_store(url, retry_within_s=RETRY_WITHIN_S)
