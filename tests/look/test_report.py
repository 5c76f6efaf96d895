"""The report says what happened: in the terminal, as JSON, and as one page that needs nothing
else."""

import dataclasses
import io
import json
import re
import sys

import pytest
from rich.console import Console

from harness.bucket.journal import Journal
from harness.bucket.layout import Epoch, epoch_key
from harness.cli.common import html_path
from harness.core import facts as f
from harness.core.formatting import duration, money, nbytes, percent
from harness.core.world import BadInput
from harness.ledger.bill import BUCKETS
from harness.ledger.world_speed import speed_of
from harness.look.pages.html_parts import environment
from harness.look.pages.lane_chart import condensed
from harness.look.pages.line_plots import PlotTrace, fit, nice_ticks
from harness.look.pages.report_page import content
from harness.look.pages.speed_charts import windows
from harness.look.reports.report import print_report, to_json, write_html
from harness.look.reports.report_rows import snapshot_rows
from harness.look.reports.setup_report import LogbookEntry, write_note
from harness.look.reports.summary import snapshot_costs, summarize
from storage.stores.folder_store import MemoryStore
from support.histories import GLOBAL, T0, TOTAL, whole_run
from support.pages import EVIL, Page
from support.rooms import ROOT


@pytest.fixture(scope="module")
def history():
    return whole_run(evil=EVIL)


@pytest.fixture(scope="module")
def summary(history):
    # long after: the end of the run counts, not now
    return summarize(history.store, now=lambda: history.t + 1e6)


def printed(summary, width=150):
    out = io.StringIO()
    print_report(summary, Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def parsed(summary, path):
    write_html(summary, path)
    text = path.read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return text, page


def test_the_summary_is_that_of_the_story(history, summary):
    assert (summary.state, summary.step, summary.total_steps) == ("done", TOTAL, TOTAL)
    assert summary.worlds == (1, 3)
    assert summary.wall_s == pytest.approx(history.t - T0, abs=0.1)
    assert [p.step for p in summary.curve] == list(range(1, TOTAL + 1))
    assert [(p.epoch, p.step) for p in summary.lost] == [(3, s) for s in range(61, 68)]
    assert summary.validation_name == "val_loss"
    assert [step for step, _ in summary.validation] == [20, 40, 60, 80, 100, 120]
    assert summary.losses[0] > 4 > 1.4 > summary.losses[1]
    assert summary.step == TOTAL and summary.session.global_batch == GLOBAL
    assert summary.problems == ()


def test_a_report_writes_nothing(history):
    before = history.store.list("")
    summarize(history.store)
    assert history.store.list("") == before


def test_the_terminal_shows_what_a_person_asks_for(summary):
    text = printed(summary)
    assert "\x1b" not in text
    assert f"{TOTAL} of {TOTAL} committed" in text
    assert f"{summary.losses[0]:.4f} → {summary.losses[1]:.4f}" in text
    assert f"{100 * summary.ledger.goodput:.1f} %" in text
    assert money(summary.ledger.usd) in text
    assert "5 nodes used, 3 taken away; 7 steps lost and redone" in text
    assert "and 3 attempts that found no capacity" in text
    for words in (
        "node 1 lost without notice",
        "notice: node 2 left",
        "6 5 5",
        "61–75",
        "in time",
        "10 interval",
        "us-west-2",
    ):
        assert words in text, words
    for bucket in BUCKETS:
        assert (re.search(rf"^ +{bucket} +█", text, re.M) is not None) == (
            summary.ledger.ns[bucket] > 0
        )


def test_a_narrow_terminal_breaks_nothing(summary):
    assert "Attempts" in printed(summary, width=40)


def test_it_says_what_snapshots_have_cost_the_training_and_by_what(summary):
    def made(why, stall_s, commit_s, slowdown=0.0):
        return f.SnapshotCommitted(5, 1, 8, stall_s, commit_s, why, 0.0, slowdown=slowdown)

    told = [
        made("interval", 0.5, 10.5, 0.1),
        made("interval", 0.5, 10.5, -0.2),
        made("notice", 0.5, 4.5, 0.3),
        made("final", 0.25, 2.25),
    ]
    costs = snapshot_costs(told, summary.ledger.epochs)
    assert (costs.blocked_s, costs.slower_s, costs.waited_s) == (1.75, pytest.approx(1.0), 6.0)
    trained_s = sum(e.last_s - e.first_s for e in summary.ledger.epochs if e.first_s is not None)
    assert costs.trained_s == pytest.approx(trained_s) and trained_s > 0
    assert costs.share == pytest.approx(8.75 / (trained_s + 6.0))
    assert snapshot_costs([]).share == 0.0 and snapshot_costs(told).share == 1.0
    of_run = snapshot_costs(summary.snapshots, summary.ledger.epochs)
    text = dict(snapshot_rows(summary))["cost the training"]
    assert text.startswith(f"{duration(of_run.total_s)}, {percent(of_run.share)} of it: blocked ")
    said = to_json(summary)["snapshots"]["cost"]
    assert said["total_s"] == pytest.approx(of_run.total_s) and said["share"] == of_run.share


def test_the_page_is_whole_and_alone(summary, tmp_path):
    text, page = parsed(summary, tmp_path / "deep" / "report.html")
    alone = text.replace("http://www.w3.org/2000/svg", "")  # a name, and no address
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)", alone)
    seen = " ".join(page.text)
    for heading in (
        "Loss",
        "Nodes over time",
        "Where billed time went",
        "Money",
        "Attempts",
        "Generations",
        "Notices",
        "Snapshots",
        "Trouble",
    ):
        assert heading in page.text
    for a in summary.ledger.attempts:
        assert any(tip.startswith(f"node {a.name} on {a.offer}") for tip in page.tips) == (
            a.up_s is not None
        )
    for e in summary.ledger.epochs:
        assert any(tip.startswith(f"generation {e.epoch} (") for tip in page.tips)
        assert e.ended in seen
    assert (
        sum(tip.startswith("snapshot of step") for tip in page.tips) == len(summary.snapshots) == 14
    )
    assert sum("kill notice from" in tip for tip in page.tips) == 2
    assert page.tags.count("svg") >= 2
    data = json.loads(next(s for s in page.kept["script"] if s.startswith("{")))
    traces = {t["n"]: t for t in data["traces"]}
    assert traces["loss"]["x"] == list(range(1, TOTAL + 1))
    assert traces["val loss"]["x"] == [20, 40, 60, 80, 100, 120]
    assert any("steps 61–67 were lost" in tip for _, _, tip in data["shades"])


def test_the_page_escapes_what_others_wrote(summary, tmp_path):
    text, page = parsed(summary, tmp_path / "r.html")
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert len([s for s in page.kept["script"] if not s.startswith("{")]) == 1  # our own
    assert page.tags.count("script") == len(page.kept["script"])
    assert "<script>alert(1)</script>" in " ".join(page.text)


def test_templates_take_only_what_we_made_as_markup():
    """SVG, the page's own style and script, and a report that a template has made."""
    drawn = {"drawn", "loss", "norm", "timeline", "paid_over_time", "view.picture", "scaling.chart"}
    drawn |= {"step_time.over_steps", "step_time.spreads"}
    found = {
        name
        for path in (ROOT / "harness").rglob("*.html")
        for name in re.findall(r"([\w.]+)\|safe", path.read_text())
    }
    assert found == drawn | {"style", "script", "content"}
    assert environment().autoescape is True


def test_without_jinja2_a_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    environment.cache_clear()
    with pytest.raises(BadInput, match=r"spotharness\[look\]"):
        environment()
    assert html_path("file:///runs/a") == ""  # the report in the terminal needs none
    monkeypatch.undo()
    assert html_path("file:///runs/a") == "/runs/a/report.html" and environment()


def test_what_people_wrote_is_on_the_page_and_beside_the_curve(tmp_path):
    history = whole_run()
    for i, (step, text) in enumerate(((40, f"halved the rate {EVIL}"), (None, "looks fine"))):
        write_note(history.store, LogbookEntry(T0 + 300 + i, text, "ada", step), f"{i:08x}")
    summary = summarize(history.store, now=lambda: history.t)
    text, page = parsed(summary, tmp_path / "r.html")
    assert "<script>alert" not in text and "looks fine" in page.text
    data = json.loads(next(s for s in page.kept["script"] if s.startswith("{")))
    notes = {tip.split()[1]: (begin, end) for begin, end, tip in data["shades"] if "ada: " in tip}
    assert notes["halved"] == (39.5, 40.5) and notes["looks"] == (74.5, 75.5)


def test_step_times_of_steps_that_were_redone_are_cut(history):
    told = [(3, 58, 63), (3, 64, 67), (4, 61, 64)]
    timed = [
        f.Stamped(T0 + e, "w", f.StepsTimed(e, a, b, dict.fromkeys(f.PHASES, 0.1))) for e, a, b in told
    ]
    summary = summarize(history.store, now=lambda: history.t)
    summary = dataclasses.replace(summary, speed=speed_of([*summary.facts, *timed]))
    assert [(w.epoch, w.first, w.last) for w in windows(summary)] == [(3, 58, 60), (4, 61, 64)]
    assert "step-time" in content(summary)


def test_json_is_plain_and_adds_up(summary):
    body = json.loads(json.dumps(to_json(summary), allow_nan=False))
    assert body["state"] == "done"
    assert len(body["attempts"]) == 8
    assert [e["accumulation"] for e in body["epochs"]] == [8, 6, 8, 16, 8]
    assert sum(b["ns"] for b in body["buckets"].values()) == sum(
        sum(a["ns"].values()) for a in body["attempts"]
    )
    assert body["notices"][0]["in_time"] is True


def test_a_run_that_has_only_begun(tmp_path):
    store = MemoryStore("memory://new", {})
    journal = Journal(store, "controller-1", lambda: T0)
    journal.record(f.RunAsked("t.yaml", 1, 1, "cheapest"))
    journal.record(f.LeaseTaken(1, "h"))
    journal.flush()
    summary = summarize(store, now=lambda: T0 + 10)
    assert (summary.state, summary.step) == ("going on", 0)
    assert "going on" in printed(summary)
    parsed(summary, tmp_path / "r.html")
    json.dumps(to_json(summary), allow_nan=False)


def test_an_empty_bucket_can_be_reported_too(tmp_path):
    summary = summarize(MemoryStore("memory://empty", {}), now=lambda: T0)
    printed(summary)
    parsed(summary, tmp_path / "r.html")


def test_time_between_launches_is_not_wall_time():
    store = MemoryStore("memory://again", {})
    ends = (50, f.RunEnded("stopped", "asked to", 0)), (1080, f.RunEnded("done", "", 0))
    for t, fact in ((0, f.LeaseTaken(1, "h")), (1050, f.LeaseTaken(2, "h")), *ends):
        journal = Journal(store, f"controller-{t}", lambda t=t: T0 + t)
        journal.record(fact)
        journal.flush()
    summary = summarize(store)
    assert (summary.wall_s, summary.away_s) == (80.0, 1000.0)


def test_broken_facts_and_records_are_told_and_passed_over(tmp_path):
    history = whole_run()
    key = next(k for k in history.store.list("facts/controller-1/"))
    history.store.put(key, history.store.get(key).replace(b'"min_nodes":1', b'"min_nodes":2'))
    samples = history.store.list("samples/")[3]
    history.store.delete(samples)
    summary = summarize(history.store)
    assert len(summary.problems) == 2
    assert (
        "1 fact could not be read (see: harness prove verify), the first: "
        "facts/controller-1/000000.jsonl, line 1" in summary.problems[0]
    )
    assert "harness prove verify" in printed(summary)
    assert summary.step == TOTAL
    assert len(parsed(summary, tmp_path / "r.html")[0]) > 10_000


def test_a_world_whose_creator_died_unheard_is_known_from_the_rendezvous():
    store = MemoryStore("memory://unheard", {})
    at = {"t": T0}
    worker = Journal(store, "worker-e000001-a", lambda: at["t"])
    world = Epoch(1, ("m0001-aa",), (2,), (1.0,), "10.0.0.1", 1, "start")
    store.create(epoch_key(1), world.encode())
    worker.record(f.SessionStarted(1, 2, 0, 0, 5, 8, 2, (2, 2), "fast", "ddp", "cpu", 0.1))
    worker.flush()
    (epoch,) = summarize(store, now=lambda: T0 + 5).ledger.epochs
    assert (epoch.members, epoch.world, epoch.reason) == (("m0001-aa",), 2, "start")


def test_a_loss_that_is_not_a_number_is_drawn_around(tmp_path):
    store = MemoryStore("memory://nan", {})
    worker = Journal(store, "worker-e000001-a", lambda: T0)
    for step, loss in enumerate((2.0, float("nan"), float("inf"), 1.0), 1):
        worker.record(f.StepDone(step, 1, loss, T0 + step, 1.0, 8, 0))
    worker.flush()
    summary = summarize(store, now=lambda: T0 + 9)
    text, _ = parsed(summary, tmp_path / "r.html")
    assert not re.search(r"[ML ]nan|[ML ]inf", text)
    json.dumps(to_json(summary), allow_nan=False)


def test_long_runs_stay_small():
    steps = range(1, 100_001)
    few = fit(PlotTrace("x", steps, [99.0 if i == 50_000 else float(i % 7) for i in steps]), 1500)
    assert len(few.xs) <= 1500
    assert max(few.ys) == 99.0  # no spike gets lost
    assert list(few.xs) == sorted(few.xs)
    segments = [(i * 10, i * 10 + 10, "useful" if i % 10 else "other") for i in range(50_000)]
    drawn = condensed(segments, 1000)
    assert len(drawn) <= 1000
    assert (drawn[0][0], drawn[-1][1]) == (0, 500_000)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (duration(0.05), "50 ms"), (duration(0.0), "0.0 s"), (duration(99.94), "99.9 s"), (duration(99.96), "1 min 40 s"),
        (duration(3599.7), "1 h 00 min"), (duration(200_000), "2 d 07 h"), (money(0.00123), "$0.0012"), (money(1234.5), "$1,234.50"),
        (money(1e-6), "<$0.0001"), (nbytes(999), "999 B"), (nbytes(5_340_000_000), "5.3 GB"),
        (nice_ticks(0, 10, 5), [0, 2, 4, 6, 8, 10]), (nice_ticks(1.0, 1.0, 5), [1.0]),
    ],
)  # fmt: skip
def test_words(found, wanted):
    assert found == wanted
