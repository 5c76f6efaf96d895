"""Recorded markets: each public format says what it says, and what is wrong is found at once."""

import json

import numpy as np
import pytest

from harness.core.world import BadInput
from harness.planner.trace_formats import TraceAsked, as_table, read, read_market
from harness.planner.traces import ZoneTrace, aligned, zone_names


def counts(data, gap=600, **more):
    return json.dumps({"metadata": {"gap_seconds": gap, **more.pop("metadata", {})}, "data": data, **more})


def one(text, name="market/zone-a.csv", **asked):
    (found,) = read(text, name, TraceAsked(**asked))
    return found


# ---- formats -------------------------------------------------------------------------------------
def test_counts():
    trace = one(counts([1, 0, 3], 300, metadata={"start_time": "2022-10-26T01:00:00"}), "d/a.json")
    assert (trace.zone, trace.tick_s, trace.nodes.tolist()) == ("a", 300, [1, 0, 3])
    assert trace.usd_per_h is None and trace.start_s == 1666746000
    assert (trace.hours, trace.availability) == (0.25, 2 / 3)


def test_counts_with_prices_whose_gaps_are_filled_with_the_last_one_known():
    for data, more in (
        ([1, 1, 0, 1], {"prices": [None, 0.5, float("nan"), 0.75]}),
        ([{"available": n, "price": usd} for n, usd in ((1, 0), (1, 0.5), (0, None), (1, 0.75))], {}),
    ):
        trace = one(counts(data, **more))
        assert trace.nodes.tolist() == [1, 1, 0, 1]
        assert trace.usd_per_h.tolist() == [0.5, 0.5, 0.5, 0.75]


def test_a_log_of_nodes_that_come_and_go():
    trace = one("60000,add,a\n60000,add,b\n180000,remove,a\n300000,add,c\n")
    assert trace.nodes.tolist() == [2, 2, 1, 1] and trace.tick_s == 60
    assert one("0,add,a\n60000,add,b\n90000,remove,a\n", tick_s=30).nodes.tolist() == [1, 1, 2]


def test_a_log_as_json_in_which_a_migration_is_no_change():
    lines = [
        [0, "add", {"nodes": ["a", "b"], "duration": 60000}],
        [60000, "migration", {"nodes": ["a"], "duration": 60000}],
        [120000, "remove", {"nodes": ["a"], "duration": 60000}],
        [180000, "no-op", {"nodes": [], "duration": 60000}],
    ]
    assert one("\n".join(map(json.dumps, lines))).nodes.tolist() == [2, 2, 1, 1]


def test_a_log_with_dates_whose_clock_steps_back():
    text = "2021-12-10, 13:07:00, 80\n2021-12-10, 13:09:00, 80\n2021-12-10, 13:08:00, 70\n"
    text += "2021-12-10, 13:11:00, 75\n"
    trace = one(text)
    assert trace.nodes.tolist() == [80, 70, 80, 80] and trace.start_s == 1639141620


def test_two_columns_have_the_unit_that_is_said():
    for unit, text in (("hours", "0.0,1\n0.05,2\n0.1,2\n"), ("ms", "0,1\n180000,2\n360000,2\n")):
        assert one(text, unit=unit).nodes.tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(BadInput, match=r"wanted the unit of the first one.*--unit ms, seconds"):
        one("0,1\n180,2\n")
    # hours that are read as seconds, seconds that are read as hours: both would be another market
    with pytest.raises(BadInput, match=r"less than two ticks.*unit of its times"):
        one("0.0,1\n24.5,2\n", unit="seconds")
    with pytest.raises(BadInput, match="unit of its times"):
        one("0,1\n88194,2\n", unit="hours")


def test_tables_of_zones_and_prices():
    text = "zone, seconds, available, usd_per_h\n"
    text += "".join(f"{z}, {600 * i}, {i % 2 + (z == 'b')}, 0.{5 + i}\n" for i in range(4) for z in "ba")
    a, b = read(text, "t.csv")
    assert (a.zone, b.zone, a.tick_s) == ("a", "b", 600)
    assert a.nodes.tolist() == [0, 1, 0, 1] and b.nodes.tolist() == [1, 2, 1, 2]
    assert a.usd_per_h.tolist() == [0.5, 0.6, 0.7, 0.8]
    assert one(text, zone="b").nodes.tolist() == [1, 2, 1, 2]
    with pytest.raises(BadInput, match="no zone 'c'; there are b, a"):
        one(text, zone="c")


def test_times_of_tables():
    """In any of the usual units, rounded to few digits, and only over what all zones cover."""
    hours = one("hours,available\n0.0,1\n0.083,0\n0.167,1\n0.25,1\n0.333,1\n0.417,1\n")
    assert hours.tick_s == pytest.approx(300, abs=1) and hours.nodes.tolist() == [1, 0, 1, 1, 1, 1]
    moments = one("Timestamp,Available\n2024-01-01T00:00:00Z,1\n2024-01-01T00:05:00Z,2\n")
    assert (moments.tick_s, moments.start_s) == (300, 1704067200)
    with pytest.raises(BadInput, match="wanted --tick"):
        one("tick,available\n0,1\n1,0\n")
    assert one("tick,preempted\n0,1\n1,0\n", tick_s=300).nodes.tolist() == [0, 1]
    a, b = read("zone,seconds,available\n" + "a,0,1\na,60,2\na,120,3\nb,60,4\nb,120,5\nb,180,6\n", "t")
    assert a.nodes.tolist() == [2, 3] and b.nodes.tolist() == [4, 5]


def test_a_table_that_is_written_is_read_as_it_was():
    for start_s, usd in ((0.0, None), (1.7e9, 0.25)):
        zones = [zone(name, [1, 0, 3], 300, start_s, usd) for name in "ab"]
        for one_, other in zip(zones, read(as_table(zones), "t.csv"), strict=True):
            assert (one_.zone, one_.tick_s, one_.start_s) == (other.zone, other.tick_s, other.start_s)
            assert one_.nodes.tolist() == other.nodes.tolist()
            assert usd is None or one_.usd_per_h.tolist() == other.usd_per_h.tolist()


# ---- what is wrong -------------------------------------------------------------------------------
def test_polarity_is_what_is_said():
    assert one(counts([1, 0, 0])).nodes.tolist() == [1, 0, 0]
    assert one(counts([1, 0, 0]), polarity="preempted").nodes.tolist() == [0, 1, 1]
    said = counts([1, 0, 0], metadata={"polarity": "preempted"})
    assert one(said).nodes.tolist() == one(said, polarity="preempted").nodes.tolist() == [0, 1, 1]
    with pytest.raises(BadInput, match="its polarity is 'preempted', and you say 'available'"):
        one(said, polarity="available")
    with pytest.raises(BadInput, match="you say 'available'"):
        one("seconds,preempted\n0,1\n60,0\n", polarity="available")
    with pytest.raises(BadInput, match="counts of nodes: --polarity available"):
        one(counts([16, 3, 0]), polarity="preempted")
    with pytest.raises(BadInput, match="wanted available or preempted"):
        TraceAsked(polarity="inverted")
    with pytest.raises(BadInput, match="no node can be had at any time; is the polarity"):
        read_market({"a.json": counts([1] * 30)}, TraceAsked(polarity="preempted"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "an empty file"),
        ("hello world", "none of them: 'hello world'"),
        ('{"data": [1, 0]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 600}, "data": 3}', "wanted a list as data"),
        (counts([1, None, 0]), "wanted a list of finite numbers"),
        (counts([1, 0.5, 0]), "whole numbers of nodes, found 0.5"),
        (counts([1, -1, 0]), "wanted 0 to"),
        (counts([]), "wanted 1 to"),
        (counts([1, 0], 0.01), "gap_seconds is in seconds, not in minutes"),
        (counts([1, 0], 600_000), "gap_seconds is in seconds, not in minutes or milliseconds"),
        (counts([1, 0], prices=[1.0]), "2 ticks, but 1 prices"),
        (counts([1, 0], prices=[1.0, -1.0]), "wanted prices above 0"),
        (counts([1, 0], prices=[97_310.0, 97_310.0]), "to 10000 USD per hour"),
        ("0,add,a\n60000,add,a\n", "it was there already; is it the log of another zone"),
        ("0,add,a\n60000,remove,b\n", "it was not there"),
        ("60000,add,a\n0,add,b\n", "times that never go back"),
        ("0,add,a\n60,remove,a\n", "less than two ticks of 60 s; is the unit"),
        ("0,add,a\nb,add,c\n", "line 2: wanted a number, found 'b'"),
        ("0.0,1\n1e308,1\n", "line 2: wanted a number, found '1e308'"),
        (counts([1, 1e300]), "wanted a list of finite numbers"),
        ('{"metadata": {"gap_seconds": 1e999}, "data": [1]}', "a tick of inf s"),
        ("[" * 100_000, "cannot be read"),
        ("seconds,available\n0,1\n60," + "1" * 200_000, "cannot be read: field larger than"),
        ("0,add,a\n1,lend,c\n", "line 2: wanted 'ms,add|remove,node'"),
        ('[0, "add", {"nodes": []}]\n[1, "lend", {"nodes": ["a"]}]', "line 2: wanted add, remove"),
        ("2021-12-10, 13:07:00, 8\n2021-12-09, 13:07:00, 8\n", "86400 s before that of a line above"),
        ("2021-12-10, 13:07, 8\nnonsense\n", "line 2: wanted 'date, time, nodes'"),
        ("a,b\n1,2\n", "wanted columns seconds"),
        ("seconds,available\n", "found a header only"),
        ("seconds,available\n0,1\n600,1\n660,1\n", "one tick apart, found gaps of 60 to 600 s"),
        ("seconds,available\n0,1\n60,1,1\n", "line 3: 2 columns, but 3 values"),
    ],
)
def test_what_no_market_can_be_is_refused(text, wanted):
    with pytest.raises(BadInput) as e:
        read_market({"m/x.csv": text}, TraceAsked(unit="seconds"))
    assert wanted in str(e.value) and str(e.value).count("\n") == 0


# ---- several zones -------------------------------------------------------------------------------
def zone(name, nodes, tick_s=300.0, start_s=0.0, usd=None):
    prices = None if usd is None else np.full(len(nodes), usd)
    return ZoneTrace(name, tick_s, np.array(nodes), prices, start_s)


def test_zones_are_aligned_over_the_time_that_all_of_them_cover():
    begin = 1.7e9
    a, b = aligned(
        [
            zone("a", [1, 2, 3, 4, 5, 6], 300, begin, 0.5),
            zone("b", [7, 8, 9], 600, begin + 600),
        ]
    )
    assert a.nodes.tolist() == [3, 5] and b.nodes.tolist() == [7, 8]
    assert a.tick_s == b.tick_s == 600 and a.start_s == b.start_s == begin + 600
    assert a.usd_per_h.tolist() == [0.5, 0.5]


def test_zones_that_cannot_be_of_one_market():
    with pytest.raises(BadInput, match="a name for each zone, found a, a"):
        aligned([zone("a", [1]), zone("a", [1])])
    with pytest.raises(BadInput, match="wanted all or none"):
        aligned([zone("a", [1], start_s=1.7e9), zone("b", [1])])
    with pytest.raises(BadInput, match="no time in common: a from 2023-11-14"):
        aligned([zone("a", [1], start_s=1.7e9), zone("b", [1], start_s=1.8e9)])
    with pytest.raises(BadInput, match="as many, but of another length"):
        aligned([zone("a", [1] * 50, 600), zone("b", [1] * 50, 10)])
    with pytest.raises(BadInput, match="at least one trace"):
        aligned([])
    # one zone of many may have nothing at all
    assert len(aligned([zone("a", [0, 0]), zone("b", [1, 0])])) == 2


def test_zones_are_called_by_what_tells_their_files_apart():
    assert zone_names(["/t/us-east-1a.json", "/t/us-east-1b.json"]) == ["us-east-1a", "us-east-1b"]
    assert zone_names(["t/a_v100/x/0.json", "t/b_v100/x/0.json"]) == ["a_v100", "b_v100"]
    assert zone_names(["a/v100/0.json", "a/k80/0.json", "b/k80/0.json"]) == ["a/v100", "a/k80", "b/k80"]
    assert zone_names(["t/0.json"]) == ["0"]
    same = counts([1, 0], metadata={"zone": "us-east-1a"})
    found = read_market({"v100/0.json": same, "k80/0.json": same})
    assert [z.zone for z in found] == ["v100", "k80"]
    assert read_market({"v100/0.json": same})[0].zone == "us-east-1a"
