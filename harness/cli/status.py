"""`harness status`, and the commands of `harness runs` that show runs."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from harness.bucket.setup_objects import people_of
from harness.cli.common import (
    DONE,
    FAILED,
    cache_dir,
    existing_store,
    html_path,
    with_key,
)
from harness.cli.node_logs import page_logs
from harness.clouds.sky_broker import Broker, SkyError
from harness.clouds.sky_clusters import settle
from harness.core.flags import flag, positional
from harness.core.input_files import output_file
from harness.core.world import BadInput, CloudUnavailable
from harness.look.pages import web_server as server
from harness.look.pages.run_index import RunsFolder
from harness.look.postmortems.postmortem_text import as_json, details, overview, postmortem_page
from harness.look.reports import costs as costs_shown
from harness.look.reports import live_view
from harness.look.reports.costs import find_runs, read_costs
from harness.look.reports.report import print_report, to_json, write_html
from harness.look.reports.summary import summarize
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console

KEYS = "owner, project, experiment, run, month"


def _keys(text: str) -> None:
    """Check a comma-separated list of KEYS. Raises ValueError that says what is wanted."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names) or not set(names) <= set(KEYS.split(", ")):
        raise ValueError(f"wanted some of {KEYS}, comma-separated, each once; found {text!r}")


def _month(text: str) -> None:
    """Check a month such as 2026-11, or "". Raises ValueError that says what is wanted."""
    if text and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text):
        raise ValueError(f"wanted a month such as 2026-11, found {text!r}")


# ---- costs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CostsFlags:
    url: str = positional("URL of a folder of runs, at any depth below it; or of one run")
    by: str = flag("run", f"group by some of {KEYS}, comma-separated", check=_keys)
    month: str = flag("", "of this month only (UTC), such as 2026-11", check=_month)
    csv: str = flag(
        "", "write CSV to this file; -: to the terminal, in place of the table", check=output_file
    )
    html: str = flag("", "write a page to this file", check=output_file)
    json: bool = flag(False, "print JSON in place of the table")
    ask_sky: bool = flag(
        False,
        "ask SkyPilot on this computer how long nodes that it launched without us have lived, and "
        "write that into their runs",
    )


def costs(flags: CostsFlags) -> int:
    """Show what runs cost, grouped by owner, project, experiment, run or month."""
    url, console = normalize(flags.url), Console()
    names = [name.strip() for name in flags.by.split(",")]
    if flags.ask_sky:
        ask_sky(url)
    found = read_costs(url, open_store, people_of, time.time)
    if not found.runs and not found.unread:
        raise BadInput(f"{flags.url}: there is no run here, nor in a folder below it")
    if flags.month:
        found = found.within(flags.month)
    if flags.csv == "-":
        print(costs_shown.to_csv(found, names), end="")
    elif flags.csv:
        Path(flags.csv).write_text(costs_shown.to_csv(found, names), encoding="utf-8")
    if flags.html:
        Path(flags.html).write_text(costs_shown.to_html(found, names), encoding="utf-8")
    if flags.json:
        print(json.dumps(costs_shown.to_json(found, names), indent=2))
    elif flags.csv != "-":
        costs_shown.print_costs(found, names, console)
    for path in (flags.csv, flags.html):
        if path not in ("", "-") and not flags.json and flags.csv != "-":
            console.print(f"written  {path}", highlight=False, soft_wrap=True)
    return DONE if found.runs else FAILED


def ask_sky(url: str) -> None:
    """Record SkyPilot's bills of the nodes that no controller launched in their runs. Raises
    BadInput if SkyPilot does not answer."""
    sky = _sky(url)
    try:
        settle(sky, (with_key(store) for _, store in find_runs(url, open_store)), time.time)
    except (SkyError, CloudUnavailable) as e:
        raise BadInput(
            f"--ask-sky: SkyPilot does not answer on this computer ({e}); ask where the runs were "
            "launched, or leave --ask-sky out"
        ) from e
    finally:
        sky.close()


def _sky(url: str) -> Broker:
    """Return the caller of SkyPilot. Its log goes below ~/.cache, not into the folder of runs."""
    return Broker(os.environ, cache_dir(url, "sky-logs") / "broker.log")


# `harness status`, `report`: views of a run while it goes on and afterwards.


# ---- looking at a run ----------------------------------------------------------------------------
@dataclass(frozen=True)
class StatusFlags:
    url: str = positional("URL of the run, or of a folder of runs, to list them")
    once: bool = flag(False, "print where it stands, and end")
    json: bool = flag(False, "the same as JSON")


def status(flags: StatusFlags) -> int:
    """Show the progress of a run, live; of a folder, the runs in it."""
    console = Console()
    try:
        store = existing_store(flags.url)
    except BadInput:
        if not list_runs(normalize(flags.url), console, flags.json):
            raise
        return DONE
    if flags.json:
        print(json.dumps(live_view.status(store), indent=2))
        return DONE
    live_view.follow(store, lambda: flags.once, console)
    return DONE


def list_runs(url: str, console: Console, as_json: bool) -> int:
    """Print a line for each run below `url`, and return how many there are."""
    count = 0
    for path, store in find_runs(url, opened):
        count += 1
        view = live_view.LiveView(store, Console(quiet=True))
        view.read()
        state, name = view.state, "/".join(path)
        paid, _ = state.spent(time.time())
        last_s = state.last_s if state.last_s > 0 else None  # none without facts
        row = {"run": name, "state": state.run_state, "step": state.step}
        row |= {"total_steps": state.total, "spent_usd": paid, "updated_s": last_s}
        if as_json:
            print(json.dumps(row))
            continue
        steps = f"step {state.step}" + (f" of {state.total}" if state.total else "")
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_s)) if last_s else ""
        words = f"{name:30}  {state.run_state:12}  {steps:20}  ${paid:.2f}  {last}"
        console.print(words, highlight=False, soft_wrap=True)
    return count


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
    """Report what happened in a run: attempts, worlds, goodput, money, losses."""
    store = existing_store(flags.url)
    if flags.json:

        print(json.dumps(to_json(summarize(store)), indent=2))
        return DONE
    return show_report(store, Console(), flags.html or html_path(normalize(flags.url)))


def show_report(store: ObjectStore, console: Console, html: str, brief: bool = False) -> int:
    summary = summarize(store)
    if not brief:
        print_report(summary, console)
    if html:
        write_html(summary, Path(html))
        console.print(f"\nreport  {html}", highlight=False, soft_wrap=True)
    return DONE


# `harness runs postmortem`: report each interruption, what it cost and what it saved.


@dataclass(frozen=True)
class PostmortemFlags:
    url: str = positional("URL of the run")
    number: str = positional(
        "of the interruption to tell in full; may be left out: all, as a table", nargs="?"
    )
    all: bool = flag(False, "tell every interruption in full")
    out: str = flag("", "write a page with a picture of each to this file", check=output_file)
    json: bool = flag(False, "print the numbers as JSON instead")


def postmortem(flags: PostmortemFlags) -> int:
    """Show what happened at each interruption, moment by moment, what it cost and what it saved."""
    number = _number(flags.number)
    summary, console = summarize(existing_store(flags.url)), Console()
    pm, attempts = summary.postmortem, summary.ledger.attempts
    chosen = pm.interruptions
    if number is not None:
        chosen = tuple(one for one in pm.interruptions if one.number == number)
        if not chosen:
            raise BadInput(
                f"interruption {number}: this run has had {len(pm.interruptions) or 'none'}; "
                "leave the number out to see which"
            )
    if flags.json:
        print(json.dumps(as_json(pm if number is None else pm.only(number)), indent=2))
        return DONE
    if number is None:
        console.print(overview(pm, summary.started_s, summary.simulated), highlight=False)
    for one in chosen if flags.all or number is not None else ():
        console.print(details(one, attempts), highlight=False)
    if flags.out:
        shown = pm if number is None else pm.only(number)
        path = Path(flags.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = postmortem_page(
            summary.url, shown, attempts, summary.started_s, summary.simulated
        )
        path.write_text(text, encoding="utf-8")
        console.print(f"\npost-mortem  {flags.out}", highlight=False, soft_wrap=True)
    return DONE


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise BadInput(f"{text!r}: wanted the number of an interruption (1, 2, ...)")
    return int(text)


# `harness runs serve`: show all runs of a folder in a browser.

RETRY_WITHIN_S = 3.0  # short, so that a silent bucket does not delay the others


@dataclass(frozen=True)
class ServeFlags:
    url: str = positional("URL of a folder of runs, or of one run")
    port: int = flag(8321, "where to listen; 0: any port that is free", at_most=65535)
    host: str = flag("127.0.0.1", "address to listen on; others than loopback need --anyone")
    anyone: bool = flag(False, "whoever reaches this machine may read all runs and logs")


def serve(flags: ServeFlags) -> int:
    """Show all runs of a folder in a browser."""
    host = server.checked_host(flags.host, flags.anyone)
    console, url = Console(), normalize(flags.url)
    opened(url)  # an invalid URL is reported before the server starts
    if url.startswith("file://") and not Path(url.removeprefix("file://")).exists():
        raise BadInput(f"{flags.url}: wanted a folder of runs, or a run, found nothing there")

    def told(at: str) -> None:
        console.print(f"runs of {url}: {at}  (Ctrl-C ends it)", soft_wrap=True)

    try:
        server.serve(RunsFolder(url, opened, read_logs=page_logs), host, flags.port, told)
    except KeyboardInterrupt:
        console.print("")
    return DONE


def opened(url: str) -> ObjectStore:
    return open_store(url, retry_within_s=RETRY_WITHIN_S)
