"""What users, machines and buckets wrote is shown as it is: no markup, nothing that drives a
terminal, nothing that is alive in a page."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import rich.console
import rich.table
import rich.text
from rich.live import Live

from harness.bucket.journal import Journal
from harness.bucket.setup_objects import write_setup
from harness.cli import command as cli
from harness.cli import common, doctor
from harness.core import facts as f
from harness.core.setup_record import GitState, Setup
from harness.core.world import Offer, Stop, View
from harness.look.pages.report_page import page
from harness.look.reports.report import print_report
from harness.look.reports.setup_report import LogbookEntry, write_note
from harness.look.reports.summary import summarize
from harness.planner import launch_plan
from storage.stores.store_urls import open_store
from support.histories import whole_run

EVIL = "[/bold] [red]seen[/] :smile: \x1b[31m\x07\u202e\ud800"
SHOWN = "[/bold] [red]seen[/] :smile:"


def stops(view: View) -> Stop:
    """A policy: harness launch --policy test_text:stops."""
    return Stop(f"because {EVIL}")


def command(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    return int(ended.value.code or 0)


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_a_run_that_was_stopped_for_any_reason_is_launched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, run = tmp_path / "task.yaml", tmp_path / "run"
    task.write_text("name: t\nresources: {use_spot: true}\nrun: exit 1\n")
    open_store(str(run)).put(
        "control/stop.json", json.dumps({"reason": EVIL, "by": "user", "failed": False}).encode()
    )
    assert (
        command(
            "launch",
            str(task),
            "--run",
            str(run),
            "--policy",
            "test_text:stops",
            "--market",
            "calm",
        )
        == common.ENDED_EARLY
    )
    out = " ".join(capsys.readouterr().out.split())
    assert f"This run was stopped earlier ({SHOWN}" in out
    assert f"stopped: because {SHOWN}" in out
    assert is_plain(out)


@pytest.mark.parametrize("order", [b"{}", b"[" * 100_000])
def test_an_order_without_a_reason_stops_no_launch(
    order: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, run = tmp_path / "task.yaml", tmp_path / "run"
    task.write_text("name: t\nresources: {use_spot: true}\nrun: exit 1\n")
    open_store(str(run)).put("control/stop.json", order)
    assert (
        command(
            "launch",
            str(task),
            "--run",
            str(run),
            "--policy",
            "test_text:stops",
            "--market",
            "calm",
        )
        == common.ENDED_EARLY
    )
    assert "This run was stopped earlier (stop requested" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole run, with such text wherever text is free."""
    folder = tmp_path_factory.mktemp("evil") / "run"
    history = whole_run(open_store(str(folder)), evil=EVIL)
    history.controller(
        f.AttemptIntended(
            90, {"usd_per_h": 1.0, "name": f"offer {EVIL}", "accelerator": EVIL}, EVIL
        )
    )
    history.controller(f.AttemptUp(90, history.t))
    history.controller(
        f.AttemptEnded(90, EVIL, history.t, history.t, history.t + 1, None, EVIL, 1.0, 1.0 / 3600)
    )
    history.say("agent-x", f.AgentStarted(f"m0091-{EVIL}", 91, EVIL, 1, EVIL, 1))
    history.say("agent-x", f.NoticeSeen(f"m0091-{EVIL}", EVIL, EVIL, EVIL, history.t))
    history.say("agent-x", f.WorkerFailed(f"m0091-{EVIL}", 1, 0, 1, EVIL, EVIL, EVIL))
    history.say("agent-x", f.Validated(20, 1, {f"val_loss {EVIL}": 1.0}))
    git = GitState("0a" * 20, EVIL, EVIL, EVIL, untracked=(EVIL,))
    said = {"owner": EVIL, "purpose": EVIL}
    setup = Setup(argv=(EVIL,), config={EVIL: EVIL}, git=git, software=said, hardware=said, people=said)
    write_setup(history.store, 1, setup, b"")
    row = {"level": "training", "name": EVIL, "was": EVIL, "now": EVIL}
    history.say("worker-x", f.SetupChanged(2, EVIL, EVIL, (row,)))
    write_note(history.store, LogbookEntry(history.t, EVIL, EVIL, 3), "0a" * 4)
    return str(folder)


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "note"),
        ("runs", "reproduce"),
        ("status", "--once"),
        ("runs", "report"),
        ("prove", "verify"),
        ("runs", "compare"),
        ("snapshots", "list"),
        ("snapshots", "show"),
    ],
    ids=" ".join,
)
def test_every_command_prints_it_plainly(
    words: tuple[str, ...], run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again = (run,) if words == ("runs", "compare") else ()
    at = 1 if words[0] == "status" else 2
    code = command(*words[:at], run, *again, *words[at:])
    assert code in (common.DONE, common.FAILED, common.WRONG_INPUT)
    told = capsys.readouterr()
    assert is_plain(told.out) and is_plain(told.err)
    if words == ("runs", "report"):
        assert "[red]seen[/]" in told.out


def test_other_consoles_get_no_markup_either(run: str) -> None:
    """A report in somebody's own rich console, where markup is on."""
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    print_report(summarize(open_store(run)), console)
    launch_plan.show(
        launch_plan.make([Offer(1.0, f"offer {SHOWN}", accelerator="[/x]", gpus=1)], stops, (1, 1)),
        console,
    )
    doctor.show(
        [doctor.Finding(what, doctor.WARN, SHOWN, SHOWN) for what in ("bucket", "[/x]")], console
    )
    assert out.getvalue().count("[red]seen[/]") >= 8


def test_only_rich_itself_drives_the_terminal() -> None:
    from storage.terminal_text import Console

    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    table = rich.table.Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(rich.text.Text(EVIL))
    with Live(rich.text.Text(EVIL), console=console, auto_refresh=False) as live:
        console.print(EVIL, style="red")
        console.print(table)
        live.update(table, refresh=True)
    text = out.getvalue()
    assert SHOWN in text
    assert not {"\x07", "\u202e", "\ud800"} & set(text)
    assert "\x1b[31m" not in text and "\x1b[2K" in text  # what Live itself needs is there


def test_a_page_holds_numbers_where_numbers_belong(tmp_path: Path) -> None:
    live = "<img src=x onerror=alert(1)>"
    history = whole_run()
    journal = Journal(history.store, "agent-live", lambda: history.t)
    for fact in (
        f.AgentEnded(f"m0008-{live}", live, live),  # type: ignore[arg-type]
        f.SessionStarted(9, 1, 0, 0, 9, live, live, (live,), live, live, live, 0.1),  # type: ignore[arg-type]
        f.EpochStarted(9, (live,), live, live),  # type: ignore[arg-type]
        f.AttemptEnded(8, live, history.t, history.t, history.t, live, live, 1.0, 1.0),  # type: ignore[arg-type]
        f.SessionStarted(10, 1, 0, 0, 9, 8, 4, (1,), live, live, live, 0.1),
        f.EpochStarted(10, (live,), 1, live),
    ):
        journal.record(fact)
    journal.flush()
    text = page(summarize(history.store))
    assert "<img" not in text and "&lt;img" in text
