"""Post-mortems as people see them: the picture, the page, the terminal, the command; and the facts
that belong to them in the live view and the report."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.ledger.run_state import RunState
from harness.look.pages.lane_chart import LANE_WIDTH, MOST_LANES, MOST_MOMENTS, Axis, picture
from harness.look.postmortems.interruption import MOMENTS
from harness.look.postmortems.postmortem_text import (
    as_json,
    details,
    interruptions_view,
    overview,
    postmortem_page,
)
from harness.look.reports.live_view import describe
from harness.look.reports.summary import summarize
from storage.stores.store_urls import open_store
from storage.terminal_text import plain
from support.histories import T0, whole_run
from support.interruptions import Made, check, lost_node
from support.pages import EVIL, Page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def summary():
    return summarize(whole_run(evil=EVIL).store)


def printed(renderable, width=120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable, highlight=False)
    return out.getvalue()


def drawn(one, attempts) -> ElementTree.Element:
    return ElementTree.fromstring(picture(one, attempts))


# ---- the picture ---------------------------------------------------------------------------------
def test_the_picture_shows_every_moment_and_stands_alone(summary):
    for one in summary.postmortem.interruptions:
        text = picture(one, summary.ledger.attempts)
        root = ElementTree.fromstring(text)  # it is whole XML by itself
        titles = [e.text or "" for e in root.iter(f"{SVG}title")]
        for m in one.moments:
            assert any(MOMENTS[m.what] in t and plain(m.text) in t for t in titles), m
        numbers = [e.text for e in root.iter(f"{SVG}text") if "pm-number" in e.get("class", "")]
        assert sorted(map(int, numbers)) == list(range(1, len(one.moments) + 1))
        assert "<script" not in text and "\x1b" not in text and "http://" not in text[40:]
        assert "prefers-color-scheme:dark" in text


def test_the_picture_has_a_lane_for_each_node_with_what_its_time_went_into():
    found, ledger = lost_node().told()
    root = drawn(found.interruptions[0], ledger.attempts)
    words = ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]
    assert [w for w in words if w in ("world", "node 1", "node 2", "node 3")] == [
        "world", "node 2", "node 1", "node 3",
    ]  # fmt: skip
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    assert any(t.startswith("node 2: redone for") for t in titles)
    assert any(t.startswith("node 3: start for") for t in titles)
    assert "no step was done for 7.0 s" in titles
    for rect in root.iter(f"{SVG}rect"):
        assert 0 <= float(rect.get("x", 0)) <= LANE_WIDTH
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= LANE_WIDTH + 0.5


def test_moments_that_are_close_to_one_another_stay_apart_on_the_axis():
    found, _ = lost_node().told()
    one = found.interruptions[0]
    axis = Axis(one, one.moments)
    times = sorted({m.t for m in one.moments})
    places = [axis.x(t) for t in times]
    assert places == sorted(places)
    apart = [b - a for a, b in itertools.pairwise(places)]
    assert min(apart) > 5
    assert places[-1] <= LANE_WIDTH


def test_very_many_nodes_and_moments_are_counted_instead():
    made = Made().ask(*range(1, 41)).form(*range(1, 41)).train(6)
    made.gone(*range(21, 41))
    made.broke(*range(1, 21))
    for attempt in range(1, 60):
        made.say(f.Warned(6, 1, f"warning {attempt}"))
    found, ledger = made.form(*range(1, 21), reason="loss").train(8).finish().told()
    (one,) = found.interruptions
    root = drawn(one, ledger.attempts)
    words = ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]
    assert sum(w.startswith("node ") and len(w) < 9 for w in words) == MOST_LANES - 1
    assert f"and {40 - MOST_LANES + 1} more nodes" in words
    assert f"and {len(one.moments) - MOST_MOMENTS} more moments" in words


# ---- page, terminal, JSON ------------------------------------------------------------------------
def test_the_page_is_whole_and_nothing_in_it_is_markup(summary, tmp_path):
    text = postmortem_page(
        summary.url, summary.postmortem, summary.ledger.attempts, summary.started_s
    )
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open and "script" not in page.tags
    told = " ".join(page.text)
    assert "alert(1)" in told and "Post-mortem of history 3 interruptions, 1 resize, $0.02" in told
    assert "of node time" in told and "GPU time" not in told and "generation formed" in told
    assert "11 steps (41–51) that were in no snapshot" in told
    assert page.tags.count("svg") == 4
    calm, ledger = Made().ask(1).form(1).train(3).finish().told()
    assert interruptions_view(calm, ledger.attempts, T0)["shown"] == []
    assert "never disturbed" in postmortem_page("x", calm, ledger.attempts, T0)


def test_the_terminal_tells_the_same(summary):
    pm, attempts = summary.postmortem, summary.ledger.attempts
    table = printed(overview(pm, summary.started_s))
    for one in pm.interruptions:
        assert one.kind in table
        text = printed(details(one, attempts))
        what = "Resize" if one.kind == "resize" else "Interruption"
        assert f"{what} {one.number}:" in text and "█" in text
        assert "one more node standing by" in text
    assert "the notice saved" in printed(details(pm.interruptions[1], attempts))
    assert "\x1b" not in table and "3 interruptions, 1 resize; stood" in table
    assert "at simulated prices" in printed(overview(pm, summary.started_s, simulated=True))
    joined = printed(details(pm.interruptions[0], attempts))  # its node is drained much later
    assert "g6e.xlarge" in joined and "drained" not in joined
    calm, _ = Made().ask(1).form(1).train(3).finish().told()
    assert "never disturbed" in printed(overview(calm, T0))


def test_json_has_the_exact_numbers(summary):
    body = json.loads(json.dumps(as_json(summary.postmortem), allow_nan=False))
    one = body["interruptions"][2]
    assert one["kind"] == "loss" and one["losses"]["steps"] == 7
    assert one["losses"]["ns"]["redone"] == summary.ledger.ns["redone"]
    total = sum(i["losses"]["ns"]["reform"] for i in body["interruptions"])
    assert total + body["rest"]["ns"]["reform"] == summary.ledger.ns["reform"]


# ---- the command ---------------------------------------------------------------------------------
def harness(*words) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "runs", "postmortem", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command(tmp_path):
    whole_run(open_store(str(tmp_path / "run")))
    done = harness(tmp_path / "run", "3", "--out", tmp_path / "page" / "one.html")
    assert done.returncode == 0, done.stderr
    assert "Interruption 3: node 1 gone without notice" in done.stdout
    assert (tmp_path / "page" / "one.html").read_text().count("<svg") == 1
    wrong = harness(tmp_path / "run", "9")
    assert wrong.returncode == 2
    assert "interruption 9: this run has had 4" in wrong.stderr


# ---- in the live view and the report -------------------------------------------------------------
def test_facts_that_only_experts_asked_for_are_told_where_people_look():
    state = RunState()
    told = f.DrainVerdict("m0001-aa", 20, 1, 0, True, 20, True, 90.0, 4.0)
    late = f.DrainVerdict("m0001-aa", 20, 1, 3, False, 10, False, 2.0, 4.0)
    quiet = f.DrainVerdict("m0001-aa", 20, 1, 3, True, 20, True, 90.0, 4.0)
    assert describe(told, state) == (
        "blue",
        "node m0001-aa: step 20 was committed before the deadline (4.0 s needed, 90.0 s left when "
        "it was staged)",
    )
    style, text = describe(late, state)
    assert style == "red" and "rank 3's share of step 20 is not committed" in text
    assert "safe is step 10" in text
    assert describe(quiet, state) is None  # rank 0's says it for all
    assert describe(f.Warned(7, 1, "the stream forgot a sample"), state) == (
        "yellow",
        "step 7: the stream forgot a sample",
    )


def test_the_report_lists_them_as_trouble():
    from harness.bucket.journal import Journal
    from storage.stores.folder_store import MemoryStore

    store = MemoryStore("memory://trouble", {})
    journal = Journal(store, "w", lambda: T0)
    for fact in (
        f.Warned(7, 1, "the stream forgot a sample"),
        f.GraceSpent("m0001-aa", 1, T0, 20, 10, "step 10 is safe"),
        f.HealthSeen("m0001-aa", "GPU-0", "xid 79", "off the bus", "drain"),
        f.HealthSeen("m0001-aa", "GPU-0", "xid 13", "", "ignore"),
        f.WorkerHung("m0001-aa", 1, 2, 20, "reducing", 30.0, True, "no sign"),
        f.DrainVerdict("m0001-aa", 20, 1, 3, False, 10, False, 2.0, 4.0),
    ):
        journal.record(fact)
    journal.flush()
    marks = summarize(store).marks
    assert [m.what for m in marks] == ["warned", "too late", "health", "hung", "drain"]
    assert marks[1].text == "m0001-aa: its time is up: step 10 is safe"


def test_facts_without_a_run_make_no_interruption():
    from harness.ledger.ledger import Ledger
    from harness.look.postmortems.postmortem import postmortem

    facts = [Stamped(T0, "w", f.NoticeSeen("m0001-aa", "aws", "kill", "n1", T0 + 9.0))]
    ledger = Ledger.of(facts, [], T0 + 60.0)
    found = postmortem(facts, ledger)
    check(found, ledger)
    (one,) = found.interruptions
    assert one.cause.endswith("came while it was not training")
    ElementTree.fromstring(picture(one, ledger.attempts))
