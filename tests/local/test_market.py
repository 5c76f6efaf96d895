"""Markets: what happens when, the same for the same words, once each, and never so that a run
could not end."""

import json
from dataclasses import asdict
from itertools import pairwise

import pytest

from harness.core.facts import Chain, SessionStarted, StepDone
from harness.core.world import BadInput
from harness.local import spot_schedule
from harness.local.spot_schedule import (
    Capacity,
    Entry,
    Kill,
    Market,
    MarketState,
    Outage,
    Preempt,
    RunProgress,
    from_trace,
    parse,
)
from storage.stores.folder_store import MemoryStore


def play(m: Market, seconds: float, progress=lambda t: 0.0, tick_s: float = 0.5):
    """(when, event) of everything that happens, and the capacity at every tick."""
    state, log, capacity, t = m.start(), [], [], 0.0
    while t < seconds:
        events, state = m.due(t, progress(t), state)
        log += [(t, e) for e in events]
        capacity.append((t, state.available(t)))
        t += tick_s
    return log, capacity


def test_demo_script():
    log, capacity = play(parse("demo", max_nodes=3), 130, progress=lambda t: t / 100)
    assert [e for _, e in log] == [
        Capacity(3),
        Preempt(8.0, 0),
        Kill(-1),
        Capacity(3),
        Outage(6.0),
        Capacity(3),
    ]
    assert [t for t, _ in log] == [15, 35, 50, 56, 70, 76]
    at = dict(capacity)
    assert [at[t] for t in (0, 14.5, 15, 35, 50, 55.5, 56, 70, 75.5, 76, 129.5)] == [
        2,
        2,
        3,
        2,
        1,
        1,
        3,
        0,
        0,
        3,
        3,
    ]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (2, 2), (3, 3), (2, 5), (1, 8)])
def test_demo_lets_every_range_reach_its_end(low, high):
    """A run that steps only while it has its least number of nodes still sees the whole demo,
    and full capacity after it."""
    m, state, done, t, events = parse("demo", min_nodes=low, max_nodes=high), None, 0.0, 0.0, []
    state = m.start()
    while done < 1.0:
        assert t < 300, f"stuck at {done}: {state}"
        fired, state = m.due(t, done, state)
        events += fired
        done += 0.01 if state.available(t) >= low else 0.0
        t += 0.5
    assert {type(e) for e in events} == {Capacity, Preempt, Kill, Outage}
    assert state.available(t) == high


def test_events_by_progress_keep_a_distance_and_fire_once_though_progress_rewinds():
    m = parse("demo", max_nodes=3)
    log, _ = play(m, 60, progress=lambda t: 1.0 if int(t) % 2 else 0.2)
    assert len(log) == len(m.entries)
    acts = [t for t, e in log if not isinstance(e, Capacity)]
    assert min(b - a for a, b in pairwise(acts)) >= spot_schedule.DEMO_GAP_S


def test_calm():
    log, capacity = play(parse("calm", max_nodes=4), 100)
    assert not log
    assert {n for _, n in capacity} == {4}


@pytest.mark.parametrize("high", [1, 2, 4])
def test_once_is_calm_but_for_one_preemption(high):
    log, capacity = play(parse("once", max_nodes=high), 100, progress=lambda t: t / 100)
    assert log == [(10.0, Preempt(8.0)), (22.0, Capacity(high))]
    assert {n for t, n in capacity if 10 < t < 22} == {high - 1}
    assert {n for t, n in capacity if t < 10 or t > 22} == {high}


def test_random_is_reproducible_and_capacity_always_returns():
    assert parse("seed:7", max_nodes=3) == parse("seed:7", max_nodes=3)
    assert parse("seed:7", max_nodes=3) != parse("seed:8", max_nodes=3)
    for seed in range(20):
        m = parse(f"seed:{seed}", max_nodes=3)
        log, capacity = play(m, 400)
        assert {type(e) for _, e in log} >= {Capacity, Kill, Preempt}
        low_since = None
        for t, n in capacity:
            low_since = None if n == 3 else t if low_since is None else low_since
            assert low_since is None or t - low_since < 60, (
                f"seed {seed}: below full for a minute at {t}"
            )
        assert play(m, 2200, tick_s=5)[1][-1][1] == 3


def test_state_survives_being_written_down():
    m = parse("demo", max_nodes=3)
    _, state = m.due(100.0, 0.9, m.start())
    assert MarketState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_outage_does_not_forget_what_happens_meanwhile():
    m = Market("x", 3, 3, (Entry(Outage(10), at_s=1), Entry(Capacity(2), at_s=5)))
    _, capacity = play(m, 20)
    at = dict(capacity)
    assert (at[0.5], at[1], at[10.5], at[11]) == (3, 0, 0, 2)


BAMBOO = "".join(f"0,add,node{n}\n" for n in (1, 2, 3, 4))
BAMBOO += "600000,remove,node1\n600000,remove,node2\n1200000,add,node5\n1200000,add,node6\n"
PARCAE = "\n".join(
    json.dumps([t, what, {"nodes": nodes, "duration": 60000}])
    for t, what, nodes in [
        (0, "add", ["a", "b", "c", "d"]),
        (60000, "no-op", []),
        (90000, "migration", []),
        (600000, "remove", ["a", "b"]),
        (1200000, "add", ["e", "f"]),
    ]
)
FORMATS = {
    "bamboo": BAMBOO,
    "parcae": PARCAE,
    "counts in ms": "0,4\n600000,2\n1200000,4\n",
    "counts in s": "0,4\n600,4\n600,2\n1200,2\n1200,4\n",
    "counts in hours": "0.000,4\n0.16666666666,4\n0.16666666666,2\n0.33333333333,4\n",
    "dated": "2021-12-10, 13:00:00, 80\n2021-12-10, 13:10:00, 40\n2021-12-10, 13:20:00, 80\n",
    "with heading": "time,count\n0,4\n600,2\n1200,4\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_traces_of_every_format(name):
    m = from_trace(FORMATS[name], spec=name, max_nodes=4, faster=60)
    assert m.capacity == 4
    assert [(pytest.approx(e.at_s, abs=1e-3), e.event) for e in m.entries] == [
        (10, Capacity(2)),
        (20, Capacity(4)),
    ]


def test_trace_scales(tmp_path):
    path = tmp_path / "a trace@home.csv"
    path.write_text(BAMBOO)
    assert [e.at_s for e in parse(f"{path}@600", max_nodes=2).entries] == [1, 2]
    # half of the peak
    assert [e.event for e in parse(f"{path}@600", max_nodes=2).entries] == [
        Capacity(1),
        Capacity(2),
    ]
    path = path.rename(tmp_path / "t.csv")
    assert parse(str(path), max_nodes=2).entries[-1].at_s == pytest.approx(spot_schedule.TRACE_FITS_S)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("seed:x", "seed:7"),
        ("/no/such/file", "/no/such/file: wanted demo, calm, once, seed:<n> or a trace file"),
        ("demmo", "wanted demo, calm, once, seed"),
        ("trace.csv@fast", "PATH@SPEED"),
        ("trace.csv@0", "above 0"),
    ],
)
def test_bad_specs_are_told(spec, says):
    with pytest.raises(BadInput, match="market") as e:
        parse(spec, max_nodes=3)
    assert says in str(e.value)


@pytest.mark.parametrize(
    "text",
    ["", "a,b,c,d\n1,2,3,4\n", "0,jump,node1\n", "[1, 2]\n", "0,0\n5,0\n", "hello\n", "0,add\n"],
)
def test_bad_traces_are_told(text):
    with pytest.raises(BadInput, match="trace"):
        from_trace(text, spec="x", max_nodes=3)


def segment(store, writer, seq, facts):
    chain = Chain(writer)
    lines = [chain.line(t, fact) for t, fact in facts]
    store.create(f"facts/{writer}/{seq:06d}.jsonl", "\n".join(lines).encode())


def session(total):
    return SessionStarted(1, 1, 0, 0, total, 8, 4, (2,), "fast", "ddp", "cpu", 0.0)


def step(number):
    return StepDone(number, 1, 1.0, 0.0, 0.1, 8, 0)


def test_progress_reads_each_segment_once_and_follows_rewinds():
    class Counting(MemoryStore):
        gets = 0

        def get(self, key, start=None, end=None):
            Counting.gets += 1
            return super().get(key, start, end)

    store = Counting("memory://", {})
    progress = RunProgress(store)
    assert progress.poll() == 0.0
    segment(store, "worker-a", 0, [(1.0, session(100)), (2.0, step(1)), (3.0, step(30))])
    assert progress.poll() == 0.3
    assert progress.poll() == 0.3
    assert Counting.gets == 1
    segment(store, "worker-b", 0, [(4.0, session(100)), (5.0, step(21))])
    assert progress.poll() == 0.21  # redone after a loss
    store.create("snapshots/manifests/0000000025-e000002.json", b"{}")
    assert progress.poll() == 0.25
    store.create("facts/worker-c/000000.jsonl", b"not a fact\n[]\n")
    store.create("snapshots/manifests/.DS_Store", b"somebody else's")
    assert progress.poll() == 0.25


def test_offers_are_plain():
    assert all(
        o.spot and o.usd_per_h < o.on_demand_usd_per_h and o.name.startswith("local/")
        for o in spot_schedule.OFFERS
    )
    assert len({o.name for o in spot_schedule.OFFERS}) == len(spot_schedule.OFFERS)
    assert json.dumps([asdict(o) for o in spot_schedule.OFFERS])
