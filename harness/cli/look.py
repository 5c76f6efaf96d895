"""`harness status`, `report`, `logs`: what happens, and what happened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from harness.cli.common import DONE, existing_store, html_path, is_local, sky_broker, state_dir
from harness.core.config import flag, positional
from harness.core.given_files import output_file
from harness.core.world import BadInput
from storage.objects import ObjectStore
from storage.opening import normalize
from storage.text import Console


# ---- looking at a run ----------------------------------------------------------------------------
@dataclass(frozen=True)
class StatusFlags:
    url: str = positional("URL of the run")
    once: bool = flag(False, "print where it stands, and end")
    json: bool = flag(False, "the same as JSON")


def status(flags: StatusFlags) -> int:
    """Show a run as it goes on."""
    from harness.views import monitor

    store, console = existing_store(flags.url), Console()
    if flags.json:
        print(json.dumps(monitor.status(store), indent=2))
        return DONE
    monitor.follow(store, lambda: flags.once, console)
    return DONE


@dataclass(frozen=True)
class ReportFlags:
    url: str = positional("URL of the run")
    html: str = flag(
        "",
        "write the page to this file (default: report.html in the run's folder, if it has one)",
        check=output_file,
    )
    json: bool = flag(False, "print the numbers as JSON instead")


def report(flags: ReportFlags) -> int:
    """What happened in a run: attempts, worlds, goodput, money, losses."""
    store = existing_store(flags.url)
    if flags.json:
        from harness.views.report_json import to_json
        from harness.views.summary import summarize

        print(json.dumps(to_json(summarize(store)), indent=2))
        return DONE
    return show_report(store, Console(), flags.html or html_path(normalize(flags.url)))


def show_report(store: ObjectStore, console: Console, html: str, brief: bool = False) -> int:
    from harness.views.report import print_report, write_html
    from harness.views.summary import summarize

    summary = summarize(store)
    if not brief:
        print_report(summary, console)
    if html:
        write_html(summary, Path(html))
        console.print(f"\nreport  {html}", highlight=False, soft_wrap=True)
    return DONE


@dataclass(frozen=True)
class LogsFlags:
    url: str = positional("URL of the run")
    attempt: int | None = flag(
        None, "of this attempt only (see `harness report`); default: all that are there", at_least=1
    )
    lines: int = flag(50, "how many lines of each")


def logs(flags: LogsFlags) -> int:
    """What the run's nodes have written."""
    existing_store(flags.url)
    console, url = Console(), normalize(flags.url)
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


def _local_logs(url: str, lines: int) -> dict[int, str]:
    paths = (state_dir(url) / "nodes").glob("*/log")
    return {
        int(p.parent.name): "\n".join(p.read_text(errors="replace").splitlines()[-lines:])
        for p in paths
    }


def _sky_logs(url: str, lines: int) -> dict[int, str]:
    """Of clusters that are there, from SkyPilot; of failed ones that are gone, what was kept."""
    from harness.clouds.clusters import tails

    kept = {
        p.stem: p.read_text(errors="replace") for p in state_dir(url, "sky-logs").glob("sh-*.log")
    }
    sky = sky_broker(url)
    try:
        found = {**kept, **tails(sky, url, lines)}
    finally:
        sky.close()
    return {
        int(name.rpartition("-")[2]): "\n".join(text.splitlines()[-lines:])
        for name, text in found.items()
    }
