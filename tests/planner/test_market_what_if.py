"""A finished run's own market, as its facts tell it, under other policies, nodes and intervals."""

import dataclasses
import functools
import io
import json
import re

import numpy as np
import pytest

from harness.cli.simulate import SimulateFlags, simulate
from harness.controller import policies
from harness.core import facts as f
from harness.core.world import BadInput, Node, NodeState
from harness.look.reports.summary import Summary, summarize
from harness.planner import what_if_report as shown
from harness.planner.fast_replay import play
from harness.planner.market_nodes import MarketFleet, ReplayJob
from harness.planner.market_replay import MarketReplay
from harness.planner.own_market import (
    MarketLook,
    OfferHistory,
    WhatIfAsked,
    as_json,
    buys,
    own_market,
    readings,
    what_if,
)
from harness.planner.policy_report import market_page
from harness.planner.synthetic_market import make_up, usual_zones
from harness.planner.traces import ZoneTrace
from storage.stores.store_urls import open_store
from storage.terminal_text import Console
from support.histories import EAST, TOTAL, WEST, History, whole_run

FEW = WhatIfAsked(policies=("cheapest",), nodes=(3,), intervals_s=(10.0,))


@pytest.fixture(scope="module")
def story() -> Summary:
    return summarize(whole_run().store)


@pytest.fixture(scope="module")
def answers(story):
    asked = WhatIfAsked(policies=("on_demand_fallback",), nodes=(1,), intervals_s=(5.0,))
    return what_if(story, asked)


# ---- what was seen -------------------------------------------------------------------------------
def at(zone, seconds: float) -> int:
    return int(zone.nodes[int(seconds / zone.tick_s)])


def test_places_had_what_the_run_had_there_or_more_until_they_refused(story):
    market = own_market(story, most_nodes=6)
    east, west = (zone.zone for zone in market.held)
    assert (east, west) == (EAST.name, WEST.name) and market.tick_s == 1.0
    held, hoped = ({zone.zone: zone for zone in zones} for zones in (market.held, market.hoped))
    times = {row.name: (row.asked_s - story.started_s, row.gone_s - story.started_s) for row in story.ledger.attempts}
    refused_s = times["3"][0]
    assert at(held[east], refused_s - 2) == 2 and at(hoped[east], refused_s - 2) == 6
    assert at(held[east], refused_s + 2) == at(hoped[east], refused_s + 2) == 2
    taken_s = times["2"][1]  # in time, after a notice: the place is one smaller, until the next look
    assert at(hoped[east], taken_s + 2) == 1
    assert at(hoped[east], times["5"][0] - 1) == 0, "taken, and refused when it was asked again"
    assert at(hoped[west], times["6"][0] - 1) == 0 and at(hoped[west], times["6"][0] + 2) == 6
    assert at(held[west], times["6"][0] + 2) == 0, "nobody knows what it had then"
    assert at(hoped[west], 1.0) == 6, "nor before the first look"
    ticks = len(held[east].nodes) // 4
    assert (held[east].nodes[:ticks] == held[east].nodes[ticks : 2 * ticks]).all(), "repeated"
    assert [(h.count("given"), h.count("refused"), h.count("taken")) for h in market.offers] == [(4, 2, 2), (1, 1, 1)]


def test_work_and_what_disturbed_it_are_the_ledgers(story):
    work, ns = own_market(story, 3).work, story.ledger.ns
    assert work.node_s == pytest.approx((ns["useful"] + ns["straggle"] + ns["other"]) / 1e9)
    assert work.unnoticed == pytest.approx(1 / 3), "two of three were seen to come"
    assert work.interval_s == pytest.approx(story.postmortem.measured.interval_s)
    assert set(work.paces) == {1, 2, 3} and 10 < work.changeover_s < 40 and 2 < work.pause_s < 10
    slow = dataclasses.replace(work, paces={1: 1.0, 4: 2.0})
    assert slow.of_nodes(4, 1) == pytest.approx(2 * work.node_s), "measured"
    assert slow.of_nodes(16, 4) == pytest.approx(work.node_s), "as the nearest that was measured"


def test_prices_are_those_that_it_was_told():
    h = History()
    h.controller(f.RunAsked("t.yaml", 1, 2, "cheapest"))
    h.controller(f.LeaseTaken(1, "me"))
    h.ask(1, EAST)
    h.form([1], "start")
    h.train(TOTAL // 2)
    h.snapshot("resize")
    h.leave([1], "resize")
    h.wait(30.0)
    h.controller(f.PricesSeen({EAST.name: 1.7, "elsewhere": 9.0}))
    h.wait(30.0)
    h.ask(2, dataclasses.replace(EAST, usd_per_h=2.2))
    h.form([1, 2], "grow")
    h.train(TOTAL)
    h.snapshot("final", final=True)
    h.leave([1, 2], "finished")
    for attempt in (1, 2):
        h.gone(attempt, "finished", "exited", 0)
    h.controller(f.RunEnded("done", "", TOTAL))
    market = own_market(summarize(h.store), 2)
    [zone] = market.held
    assert zone.usd_per_h is not None
    assert list(dict.fromkeys(zone.usd_per_h.tolist())) == [1.1, 1.7, 2.2]
    assert zone.on_demand(9.0) == EAST.on_demand_usd_per_h
    assert not any("prices are those of its launches" in one for one in market.unknown)


def test_a_run_without_spot_nodes_has_no_market_to_tell_of():
    h = History()
    h.controller(f.RunAsked("t.yaml", 1, 1, "cheapest"))
    h.ask(1, EAST, capacity=False)
    with pytest.raises(BadInput, match=r"wanted a run that trained on spot nodes .* found 1 node"):
        what_if(summarize(h.store))


class WatchedReplay(MarketReplay):
    """Keeps what the run was told of its nodes."""

    def __init__(self, zones, job, policy):
        super().__init__(zones, 0, job, policy)
        self.told: dict[int, Node] = {}

    def nodes(self):
        found = super().nodes()
        self.told |= {node.attempt: node for node in found}
        return found

    def histories(self, until_s: float) -> list[OfferHistory]:
        found = []
        for name in sorted({n.offer.name for n in self.told.values() if n.offer.spot}):
            nodes = [n for n in self.told.values() if n.offer.name == name]
            given = [n for n in nodes if n.state is not NodeState.NO_CAPACITY]
            looks = [MarketLook(n.asked_s, "given" if n in given else "refused") for n in nodes]
            looks += [MarketLook(n.gone_s, "taken") for n in given if n.reason == "preempted"]
            stays = tuple((n.asked_s, until_s if n.gone_s is None else n.gone_s) for n in given)
            prices = tuple((n.asked_s, n.offer.usd_per_h) for n in nodes)
            in_order = tuple(sorted(looks, key=lambda look: look.s))
            found.append(OfferHistory(nodes[0].offer, in_order, stays, prices))
        return found


def test_the_truth_lies_between_the_readings():
    """A run by one policy tells what another would have cost: between the two readings, and exactly
    where it had asked for as much."""
    job = ReplayJob(12.0, 17.0, nodes=(1, 4), one_place=True)
    steps = job.total_steps
    other = functools.partial(policies.uniform_progress, deadline_h=17.0, work_h=12.0, total_steps=steps)
    between, same = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        zones = make_up(usual_zones(3, rng, nodes=4, usd_per_h=1.0), 40.0, rng, tick_s=600.0)
        ran = WatchedReplay(zones, job, policies.cheapest)
        result = ran.play()
        ticks = max(1, round(result.finish_h * 6 + 0.5))
        both = readings(ran.histories(result.finish_h * 3600), ticks, 600.0, most_nodes=4)
        held, hoped = (play(zones, 0, job, other).usd for zones in both)
        truth = play(zones, 0, job, other).usd
        between.append(0.97 * min(held, hoped) <= truth <= 1.03 * max(held, hoped))
        same += [play(zones, 0, job, policies.cheapest).usd / result.usd for zones in both]
    assert sum(between) >= 7
    assert same == pytest.approx([1.0] * len(same), rel=0.06)


# ---- the mechanics that it asks for --------------------------------------------------------------
def fleet_of(**changes) -> MarketFleet:
    job = ReplayJob(10.0, 20.0, nodes=(1, 2), changeover_s=0.0, spot_usd_per_h=1.0, **changes)
    fleet = MarketFleet([ZoneTrace("a", 600.0, np.full(200, 2))], 0, job)
    for attempt in (1, 2):
        fleet.launch(attempt, fleet.offers()[0])
    return fleet


def after(fleet: MarketFleet, ticks: int) -> float:
    """Node-hours that are done; `steps` is asked in every tick, as replays do."""
    for _ in range(ticks):
        fleet.work()
        fleet.steps()
    return fleet.bill.work / 3600


def test_a_loss_without_notice_takes_all_since_the_newest_snapshot():
    fleet = fleet_of(snapshot_s=3600.0, unnoticed=1.0)
    assert after(fleet, 9) == pytest.approx(3.0)  # a snapshot after an hour, and half an hour more
    fleet.take(1)
    assert fleet.bill.work / 3600 == pytest.approx(2.0)
    fleet = fleet_of(snapshot_s=3600.0, unnoticed=0.5)
    after(fleet, 9)
    fleet.take(1)  # this one without, the next one with a notice
    assert after(fleet, 1) == pytest.approx(2.0 + 1 / 6)
    fleet.take(2)
    assert fleet.bill.work / 3600 == pytest.approx(2.0 + 1 / 6)


def test_the_others_stand_still_when_one_is_taken():
    still, going = fleet_of(pause_s=300.0), fleet_of()
    for fleet in (still, going):
        after(fleet, 3)
        fleet.take(1)
    assert after(going, 1) - after(still, 1) == pytest.approx(300 / 3600)
    assert after(going, 1) - after(still, 1) == pytest.approx(300 / 3600), "once"


# ---- answers -------------------------------------------------------------------------------------
def test_the_own_policy_replayed_is_near_to_what_happened(answers):
    own = answers.rows[0]
    assert own.own and own.name == "cheapest"
    assert own.held.usd == pytest.approx(answers.actual.usd, rel=0.1)
    assert own.held.finish_h == pytest.approx(answers.actual.hours, rel=0.1)
    assert own.held.losses == answers.actual.taken == 3 and not own.held.on_demand_h
    assert [(row.group, row.name) for row in answers.rows[1:]] == [
        ("policy", "on_demand_fallback"), ("nodes", "at most 1"), ("interval", "every 5.0 s"),
    ]  # fmt: skip
    assert answers.rows[1].held.on_demand_h > 0
    assert answers.rows[2].held.missed, "one node cannot keep the pace of three"


def test_it_says_what_cannot_be_known(answers):
    said = "\n".join((*shown.notes(answers), *answers.unknown))
    for words in ("capacity is known only where the run asked", "2 refused", "repeats them",
                  "never bought on demand", "offers that it never tried", "(measured: 1, 2, 3)"):  # fmt: skip
        assert words in said
    assert re.search(r"its own policy costs [\d.]+ % (more|less) and takes [\d.]+ % (less|more) time", said)


def test_for_people_and_for_programs(answers):
    out = io.StringIO()
    shown.print_what_if(answers, Console(file=out, width=100))
    text = out.getvalue()
    for words in ("the run itself: cheapest, 1 to 3 nodes", "cheapest (its own, replayed)",
                  "if more could be had", "other snapshot intervals", "late: "):  # fmt: skip
        assert words in text
    itself, own, *others = json.loads(json.dumps(list(as_json(answers)), allow_nan=False))
    assert itself["policy"] == "cheapest" and itself["group"] == "itself" and itself["unknown"]
    assert own["own"] and own["held"]["usd"] > 0 and len(others) == len(answers.rows) - 1


def test_the_command_prints_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    whole_run(open_store(str(tmp_path / "run")))
    flags = SimulateFlags(
        what_if=str(tmp_path / "run"), policy=("patient,greedy",), nodes="3", interval=("10s",), json=True,
        plot=str(tmp_path / "plot.html"),
    )  # fmt: skip
    assert simulate(flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["group"] for line in lines] == ["itself", "policy", "policy", "policy", "interval"]
    assert [line.get("name") for line in lines] == [None, "cheapest", "patient", "greedy", "every 10.0 s"]
    assert "patient" in (tmp_path / "plot.html").read_text(encoding="utf-8")
    for wrong, said in (
        ({"plot": str(tmp_path / "plot.html" / "x.html")}, "wanted a file that can be written"),
        ({"trace": ("x.json",)}, "leave --trace out"),
        ({"deadline": ("1.5x",)}, "wanted one --deadline as a time"),
        ({"interval": ("0s",)}, "wanted a time above 0"),
    ):
        with pytest.raises(BadInput, match=said):
            simulate(dataclasses.replace(flags, **wrong))


def test_pictures(answers):
    pytest.importorskip("matplotlib")
    story = shown.what_if_story(answers)
    assert [chart.title for chart in story.charts] == ["other policies", "other numbers of nodes", "other snapshot intervals"]
    page = market_page(story)
    assert "What nobody can know" in page and "repeats them from the beginning" in page
    assert " of 2 late" in page and "on_demand_fallback on the same market" in page
    one = story.timelines[0]
    assert one.run.bill[-1][1] == pytest.approx(answers.actual.usd)
    assert len([node for lane in one.lanes for node in lane.taken]) == 3


def test_its_own_deadline_counts_or_none(story):
    assert what_if(story, FEW).deadline_h == pytest.approx(1.1 * story.wall_s / 3600)
    told = dataclasses.replace(story.asked, deadline_s=story.started_s + 1800.0)
    assert what_if(dataclasses.replace(story, asked=told), FEW).deadline_h == 0.5


@pytest.mark.parametrize("name", ["deadline?work_h=3", "avoid(deadline, aws)", "by_deadline(cheapest, hours=3)", "on_demand"])
def test_who_plans_with_on_demand_is_offered_it(name):
    assert buys(name) and not buys("best_value")


def test_a_policy_that_nobody_knows_is_said(story):
    with pytest.raises(BadInput, match="there is no policy 'best'"):
        what_if(story, WhatIfAsked(policies=("best",)))
    strange = dataclasses.replace(story, asked=dataclasses.replace(story.asked, policy="gone.away:policy"))
    found = what_if(strange, FEW)
    assert not any(row.own for row in found.rows)
    assert any(one.startswith("what its own policy would do") for one in found.unknown)
