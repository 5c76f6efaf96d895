"""Pictures of policies on markets: what they say, where they are written, and what they refuse."""

import dataclasses
import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from harness.core.world import BadInput
from harness.planner import market_charts, policy_report
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import ReplayResult
from harness.planner.optimum import NOWHERE, ON_DEMAND, Optimum
from harness.planner.policy_report import market_page, market_png
from harness.planner.policy_table import MarketRow, MarketTable, MarketWindow
from harness.planner.traces import ZoneTrace

WORK_H, TICK_H = 4.0, 0.5
NASTY = 'east<script>"'


def result(usd: float, spans: tuple, finish_h: float = 5.0, deadline_h: float = 5.0) -> ReplayResult:
    missed = finish_h > deadline_h
    return ReplayResult(usd, finish_h, missed, len(spans), 0, 0, 1.0, 4.0, 0.9, "done", "", spans)


def zones(*names: str) -> tuple[ZoneTrace, ...]:
    nodes = np.array([1, 1, 0, 0, 1, 1, 1, 1, 1, 0] * 2)
    return tuple(ZoneTrace(name, 1800.0, nodes, np.linspace(0.8, 1.2, len(nodes))) for name in names)


def row(policy: str, deadline_h: float, *usd: float, market: str = "one zone", finish_h=5.0):
    spans = ((NASTY, 0.0, 1.0, True), (NASTY + "/on-demand", 1.0, 2.5, False), (NASTY, 2.5, 5.0, False))
    best = Optimum(4.0, (0, 0, NOWHERE, ON_DEMAND, 0, 0, 0, 0, 0), 4.5)
    windows = tuple(
        MarketWindow(i, result(each, spans, finish_h, deadline_h), best, 12.0)
        for i, each in enumerate(usd)
    )
    return MarketRow(market, policy, ReplayJob(WORK_H, deadline_h), windows)


def table(*rows: MarketRow) -> MarketTable:
    names = dict.fromkeys(one.market for one in rows)
    return MarketTable(rows, {name: zones(NASTY, "west") for name in names})


def two_deadlines() -> MarketTable:
    return table(
        row("deadline", 5.0, 5.0, 4.4, 4.1), row("deadline", 6.0, 4.4, 4.2, 4.0),
        row("greedy", 5.0, 8.0, 7.0, 6.0, finish_h=5.5), row("greedy", 6.0, 6.0, 5.0, 4.0),
    )  # fmt: skip


def words_of(made) -> list[str]:
    from matplotlib.text import Text

    return [one.get_text() for one in made.findobj(Text)]


def texts(page: str) -> str:
    body = page.partition("<main>")[2].partition("</main>")[0]
    return " ".join(re.sub(r"<[^>]*>", "\n", body).split())


# ---- what it says --------------------------------------------------------------------------------
def test_a_chart_has_a_point_for_each_deadline_and_the_means_of_the_table():
    story = policy_report.story_of(two_deadlines())
    [chart] = story.charts
    assert chart.deadlines == [5.0, 6.0] and chart.work_h == WORK_H
    assert chart.optimum == ((5.0, 4.0), (6.0, 4.0)) and chart.on_demand == ((5.0, 12.0), (6.0, 12.0))
    deadline, greedy = chart.curves
    assert [p.usd for p in deadline.points] == pytest.approx([4.5, 4.2])
    assert [p.missed for p in greedy.points] == [3, 0]
    assert greedy.points[0].low == pytest.approx(6.2) and greedy.points[0].high == pytest.approx(7.8)
    assert market_charts.over_optimum(chart, deadline) == pytest.approx((0.125 + 0.05) / 2)
    shown = texts(market_page(story))
    assert "deadline +8.8 %" in shown and "3 missed" in shown and "6 h = 1.5 × work" in shown


def test_several_markets_have_a_mean_of_their_own():
    far = [row("deadline", 5.0, 9.0, market="far"), row("deadline", 6.0, 8.0, market="far")]
    story = policy_report.story_of(table(*two_deadlines().rows, *far))
    together, *each = story.charts
    assert [chart.title for chart in each] == ["one zone", "far"]
    [curve] = together.curves  # greedy was not tried on both
    assert [p.usd for p in curve.points] == pytest.approx([(4.5 + 9) / 2, (4.2 + 8) / 2])
    assert "all markets (2)" in texts(market_page(story))


def test_a_single_deadline_has_bars_the_cheapest_first():
    shown = table(row("greedy", 5.0, 8.0, 7.0), row("deadline", 5.0, 4.5, 4.1))
    words = words_of(market_charts.cost_figure(policy_report.story_of(shown).charts[0]))
    assert words.index("deadline") < words.index("greedy")
    assert "$7.500  +87.5 %" in words


def test_a_run_stands_beside_the_optimum_hour_by_hour():
    shown = two_deadlines()
    typical = shown.rows[0].windows[1]
    one = policy_report.timeline(shown.markets["one zone"], shown.rows[0], typical)
    east, west, dear = one.lanes
    assert (east.name, west.name, dear.name) == (NASTY, "west", "on demand")
    assert east.run == ((0.0, 1.0), (1.0, 0.0), (2.5, 1.0), (5.0, 0.0))
    assert east.optimum == ((0.0, 1.0), (1.0, 0.0), (2.0, 1.0), (4.5, 0.0))
    assert [(n.begin_h, n.end_h) for n in east.taken] == [(0.0, 1.0)]
    assert dear.run == ((1.0, 1.0), (2.5, 0.0)) and dear.optimum == ((1.5, 1.0), (2.0, 0.0))
    assert east.room[:2] == ((0.0, 1.0), (0.5, 0.0)), "the window begins at its own tick"
    assert not west.run and dear.room == ()
    hours, bill = zip(*one.run.bill, strict=True)
    assert hours[-1] == 5.0 and bill[-1] == pytest.approx(4.4) and list(bill) == sorted(bill)
    assert one.optimum and one.optimum.bill[-1] == pytest.approx((4.5, 4.0))
    # 1.5 h on demand at $3 are dearer than the rest
    at = dict(one.run.bill)
    assert at[2.5] - at[1.0] > at[5.0] - at[2.5] > 0


def test_many_nodes_and_a_run_that_was_never_done_are_drawn():
    spans = tuple((NASTY, 0.1 * i, 4.0 + 0.1 * i, i % 2 == 0) for i in range(6))
    only_a_bill = Optimum(30.0, (), math.nan)
    lost = MarketWindow(0, result(40.0, spans, math.inf), only_a_bill, 90.0)
    shown = table(MarketRow("fleet", "cheapest", ReplayJob(8.0, 5.0, nodes=(1, 16)), (lost,)))
    story = policy_report.story_of(shown)
    assert story.charts[0].optimum == ((5.0, 30.0),) and story.timelines[0].optimum is None
    assert max(n for _, n in story.timelines[0].lanes[0].run) == 6
    words = texts(market_page(story))
    assert "cheapest: $40.00, never done" in words and "1 missed" in words and "inf" not in words
    assert market_png(story).startswith(b"\x89PNG")


def test_nobody_elses_words_become_markup_and_the_page_needs_nothing_else():
    page = market_page(policy_report.story_of(two_deadlines()))
    assert "<script>\"" not in page and "east&lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=|@import|url\(", page.replace('href="#', "").replace("url(#", ""))
    for picture in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(picture)


def test_on_demand_far_above_is_named_and_not_drawn():
    chart = policy_report.story_of(two_deadlines()).charts[0]
    far = dataclasses.replace(chart, on_demand=((5.0, 90.0), (6.0, 90.0)))
    for one, drawn in ((chart, True), (far, False)):
        words = words_of(market_charts.cost_figure(one))
        assert ("on demand" in words) == drawn
        assert ("on demand $90.00 (above)" in words) != drawn
    bought = table(row("on_demand", 5.0, 12.0), *two_deadlines().rows)
    assert [c.name for c in policy_report.story_of(bought).charts[0].curves] == ["deadline", "greedy"]


def test_the_best_fixed_numbers_of_nodes_are_one_line():
    best = table(row("fixed_8", 5.0, 9.0), row("fixed_6", 6.0, 8.0), *two_deadlines().rows)
    first = policy_report.story_of(best).charts[0].curves[0]
    assert first.name == "best_fixed" and [p.usd for p in first.points] == [9.0, 8.0]
    asked = table(row("fixed_8", 5.0, 9.0), row("fixed_6", 5.0, 8.0))
    assert [c.name for c in policy_report.story_of(asked).charts[0].curves] == ["fixed_8", "fixed_6"]


# ---- lines ---------------------------------------------------------------------------------------
def test_spells_are_joined_and_few_enough_to_be_seen():
    levels = ((0.0, 1.0), (1.0, 1.0), (2.0, 0.0), (3.0, 2.0))
    assert market_charts.thinned_levels(levels, 5.0) == ((0.0, 1.0), (2.0, 0.0), (3.0, 2.0))
    assert market_charts.thinned_levels(levels, 2.5) == ((0.0, 1.0), (2.0, 0.0))
    flicker = tuple((i / 100, float(i % 2)) for i in range(20_000))
    assert 0 < len(market_charts.thinned_levels(flicker, 200.0)) <= market_charts.MOST_STEPS


def test_every_tone_is_a_colour_of_the_page():
    assert {*market_charts.TONES, "card"} <= set(market_charts.light_colours())
    story = policy_report.story_of(two_deadlines())
    for draw, shown in ((market_charts.cost_figure, story.charts), (market_charts.timeline_figure, story.timelines)):
        for one in shown:  # the same story, the same bytes
            assert market_charts.svg(draw(one)) == market_charts.svg(draw(one))


# ---- files ---------------------------------------------------------------------------------------
def test_one_name_gives_a_page_and_a_png(tmp_path):
    from matplotlib.image import imread

    found = policy_report.draw(two_deadlines(), str(tmp_path / "new" / "plot"))
    assert [one.name for one in found] == ["plot.html", "plot.png"]
    assert found[0].read_text(encoding="utf-8").startswith("<!doctype html>")
    image = imread(io.BytesIO(found[1].read_bytes()), "png")
    assert image.shape[1] == market_charts.WIDTH_IN * market_charts.DPI
    assert len(np.unique(image[::10, ::10].reshape(-1, image.shape[2]), axis=0)) > 5
    only = policy_report.draw(two_deadlines(), str(tmp_path / "only.html"), policy="greedy")
    assert [one.name for one in only] == ["only.html"] and "greedy, to be done in 5 h" in texts(only[0].read_text())


def test_what_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "x.html").mkdir()
    with pytest.raises(BadInput, match="it is a folder"):
        policy_report.plot_paths(str(tmp_path / "x.html"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"is no folder|Not a directory"):
        policy_report.plot_paths(str(tmp_path / "file" / "x.html"))
    with pytest.raises(BadInput, match="no policy 'best' was tried; found deadline, greedy"):
        policy_report.story_of(two_deadlines(), "best")
    with pytest.raises(BadInput, match="nothing"):
        policy_report.story_of(MarketTable((), {}))
    assert policy_report.plot_paths(str(tmp_path / "plot.html")) == (tmp_path / "plot.html",)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"spotharness\[plots\]"):
        policy_report.plot_paths(str(tmp_path / "plot.html"))


def test_a_png_has_a_bound(monkeypatch):
    from matplotlib.image import imread

    tall = [market_charts.figure(f"{i}", 3.0, lambda made: None) for i in range(5)]
    monkeypatch.setattr(market_charts, "MOST_PIXELS", 3_000_000)
    image = imread(io.BytesIO(market_charts.png(tall)), "png")
    assert image.shape[0] == 2 * 3 * market_charts.DPI
