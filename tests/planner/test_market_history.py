"""The history of the market: what runs saw is kept once, whatever is merged with what, and is there
for the next launch even when a team's bucket is not."""

import json
import random
import shutil
import threading
import time
from dataclasses import asdict, replace

import pytest

from harness.bucket.journal import Journal
from harness.cli import market_command as cli
from harness.cli.command import main
from harness.cli.market_command import SHARED, Histories, remembering
from harness.core.estimates import CapacitySeen, Spell
from harness.core.facts import (
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    EpochLeft,
    NoticeSeen,
    PricesSeen,
)
from harness.core.world import Offer
from harness.planner import market_history
from harness.planner.market_history import (
    FRESH_S,
    KEEP_S,
    HistoryShelf,
    MarketHistory,
    OfferSeen,
    RunMemory,
    history_name,
)
from harness.planner.trace_formats import read_market
from storage.canonical_json import BadObject
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from storage.terminal_text import Console

NOW = 1_800_000_000.0
EAST = Offer(1.1, "aws/us-east-1/use1-az1/p3", accelerator="V100", gpus=1, place="aws/us-east-1")
WEST = Offer(1.3, "aws/us-west-2/usw2-az2/p3", accelerator="V100", gpus=1, place="aws/us-west-2")


def bucket_of_its_own():
    return MemoryStore("memory://history", {})


def seen(run="run-1", offer="a", until_s=NOW, **more):
    more = {"open": True, "since_s": until_s - 600.0, **more}
    return OfferSeen(run, offer, until_s, **more)


def made_up(rng, count=12):
    """Records of few runs and offers, some of them twice, and as new as each other."""
    return MarketHistory.of(
        seen(
            f"run-{rng.randint(1, 5)}",
            rng.choice("abc"),
            NOW - 3600.0 * rng.randint(0, 3),
            losses=rng.randint(0, 2),
            spells=tuple(Spell(rng.random() < 0.5, 60.0 * rng.randint(1, 9), True) for _ in range(2)),
        )
        for _ in range(rng.randint(0, count))
    )


# ---- merging -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("runs", "records"), [(32, 4000), (2, 4000), (32, 5), (2, 4)])
def test_histories_merge_in_any_order_and_any_number_of_times(monkeypatch, runs, records):
    monkeypatch.setattr(market_history, "RUNS_OF_OFFER", runs)
    monkeypatch.setattr(market_history, "MOST_RECORDS", records)
    for seed in range(100):
        rng = random.Random(seed)
        a, b, c = (made_up(rng) for _ in range(3))
        whole = a.merged(b).merged(c)
        assert whole == a.merged(b.merged(c)) == c.merged(a).merged(b)
        assert whole.merged(whole).records == whole.merged(a).records == whole.records
        assert len(whole.records) <= records
        assert all(len(of) <= runs for of in whole.by_offer().values())
        assert MarketHistory.read(whole.text()) == whole


def test_of_a_run_that_told_twice_the_later_word_counts():
    early, late = seen(until_s=NOW - 60, losses=1), seen(until_s=NOW, losses=3)
    for one, other in ((early, late), (late, early)):
        found = MarketHistory.of([one]).merged(MarketHistory.of([other]))
        assert list(found.records.values()) == [late]


def test_what_is_old_is_forgotten_and_a_clock_that_is_wrong_not_believed():
    records = [seen("old", until_s=NOW - KEEP_S - 1), seen("new"), seen("ahead", until_s=NOW + 2e6)]
    assert [run for run, _ in MarketHistory.of(records).current(NOW).records] == ["new"]


def test_lines_that_say_nothing_are_passed_over():
    good = seen().line()
    bad = [
        "{",
        "[]",
        "17",
        good.replace('"run":"run-1"', '"run":""'),
        good.replace('"losses":0', '"losses":-1'),
        good.replace('"losses":0', '"losses":0.5'),
        good.replace('"open":true', '"open":"yes"'),
        good.replace('"spells":[]', '"spells":[{"open":true,"seconds":-1,"ended":true}]'),
        good.replace('"usd_per_h":[]', '"usd_per_h":[[1.0]]'),
        good.replace("{", '{"protocol":99,', 1),
        good.replace('"until_s":', '"until_s":1e300,"x":'),
    ]
    found = MarketHistory.read("\n".join([*bad, good, ""]))
    assert (len(found.records), found.unread) == (1, len(bad))
    newer = MarketHistory.read(good.replace("{", '{"colour":"red",', 1))
    assert newer.records == found.records
    with pytest.raises(BadObject):
        seen(losses=1, unnoticed=2)


# ---- what a launch begins with -------------------------------------------------------------------
def test_what_is_known_before_a_run_begins():
    closed = Spell(False, 1800.0, True)
    old = seen(
        "old", until_s=NOW - 5 * 86400, since_s=NOW - 5 * 86400 - 7200, spells=(closed,), node_s=7200.0,
        losses=1, unnoticed=1, usd_per_h=((NOW - 6 * 86400, 1.0),),
    )  # fmt: skip
    new = seen(
        "new", until_s=NOW - 60, since_s=NOW - 660, open=False, node_s=3600.0, losses=2,
        usd_per_h=((NOW - 90, 1.2),),
    )  # fmt: skip
    known = MarketHistory.of([new, old])
    assert known.prior(NOW)["a"] == CapacitySeen(
        open=False,
        since_s=NOW - 660,
        seen_s=NOW - 60,
        # nobody saw the end of the old one's last spell
        spells=(closed, Spell(True, 7200.0, False)),
        node_s=10800.0,
        losses=3,
        unnoticed=1,
        strikes=3,
    )
    assert known.prices() == {"a": ((NOW - 6 * 86400, 1.0), (NOW - 90, 1.2))}
    # an hour later nobody knows how it is
    later = known.prior(NOW + FRESH_S)["a"]
    assert later.open is None and later.spells[-1] == Spell(False, 600.0, False)
    assert known.without("new").prior(NOW)["a"].losses == 1


def test_a_run_adds_its_own_to_what_was_known():
    prior = CapacitySeen(False, 50.0, 60.0, (Spell(True, 9.0, True),), 100.0, 2, 1)
    own = CapacitySeen(True, 70.0, 80.0, (Spell(False, 5.0, True),), 10.0, 1, 0)
    assert own.after(prior) == CapacitySeen(
        True, 70.0, 80.0, (Spell(True, 9.0, True), Spell(False, 5.0, True)), 110.0, 3, 1
    )
    assert CapacitySeen().after(prior) == prior


# ---- shelves -------------------------------------------------------------------------------------
def test_a_run_keeps_one_object_and_old_ones_are_taken_away():
    store = bucket_of_its_own()
    shelf = HistoryShelf(store)
    shelf.write([seen("run-0", until_s=NOW - KEEP_S - 86400)], NOW - KEEP_S)
    shelf.write([seen("run-1", until_s=NOW - 2 * 86400, losses=1), seen("run-2")], NOW)
    shelf.write([seen("run-1", until_s=NOW, losses=2), seen("run-1", "b")], NOW)
    assert store.list("seen/") == [f"seen/2027-01-15/run-{n}.jsonl" for n in (1, 2)]
    found = shelf.read(NOW)
    assert sorted(found.records) == [("run-1", "a"), ("run-1", "b"), ("run-2", "a")]
    assert found.records["run-1", "a"].losses == 2
    store.put("seen/2027-01-15/run-3.jsonl", b"\xff\xfe not ours")
    store.put("seen/yesterday/run-4.jsonl", b"x")
    store.put("notes.txt", b"x")
    assert shelf.read(NOW).records == found.records and shelf.read(NOW).unread == 1


def test_an_object_is_bounded_to_the_newest_records():
    spells = tuple(Spell(i % 2 == 0, 1.0 + i, True) for i in range(500))
    records = [seen("run-1", f"offer-{i:04}", NOW - i, spells=spells) for i in range(700)]
    store = bucket_of_its_own()
    HistoryShelf(store).write(records, NOW)
    (key,) = store.list("seen/")
    assert store.size(key) <= 2 << 20
    found = HistoryShelf(store).read(NOW)
    assert found.unread == 0 and 300 < len(found.records) < 700
    assert ("run-1", "offer-0000") in found.records
    assert found.records["run-1", "offer-0000"].spells == spells[-64:]


# ---- runs ----------------------------------------------------------------------------------------
class Told:
    """Facts of a controller, at the times that are said."""

    def __init__(self, store, begin_s):
        self.begin_s, self.t = begin_s, begin_s
        self.journal = Journal(store, "controller-1", lambda: self.t)

    def say(self, t, fact):
        self.t = self.begin_s + t
        self.journal.record(fact)
        self.journal.flush()

    def ended(self, t, attempt, end, asked_s, up_s):
        up_s = None if up_s is None else self.begin_s + up_s
        asked_s, gone_s = self.begin_s + asked_s, self.begin_s + t
        self.say(t, AttemptEnded(attempt, end, asked_s, up_s, gone_s, None, "", 0.0, 0.0))


def a_run(store, begin_s=NOW):
    told = Told(store, begin_s)
    told.say(0, AttemptIntended(1, asdict(EAST)))
    told.ended(5, 1, "no-capacity", 0, None)
    told.say(600, AttemptIntended(2, asdict(replace(EAST, usd_per_h=1.2))))
    told.say(700, AttemptUp(2, begin_s + 690))
    told.ended(4290, 2, "preempted", 600, 690)
    told.say(4300, AttemptIntended(3, asdict(WEST)))
    told.say(4400, AttemptUp(3, begin_s + 4400))
    told.say(5000, AttemptIntended(4, asdict(WEST)))
    return told


def test_a_run_as_records():
    store = bucket_of_its_own()
    told = a_run(store)
    memory = RunMemory("file:///run", store)
    east, west = memory.records()
    assert east == OfferSeen(
        history_name("file:///run"),
        EAST.name,
        until_s=NOW + 4290,
        open=False,
        since_s=NOW + 4290,
        spells=(Spell(False, 685.0, True), Spell(True, 3600.0, True)),
        node_s=3600.0,
        losses=1,
        unnoticed=1,
        usd_per_h=((NOW, 1.1), (NOW + 600, 1.2)),
        place="aws/us-east-1",
        accelerator="V100",
        gpus=1,
    )
    # its node is up: the offer is open until the last that is known of the run
    assert (west.open, west.since_s, west.until_s, west.node_s) == (True, NOW + 4400, NOW + 5000, 600)
    assert "run" not in history_name("file:///run")
    # later only what is new is read: a node that was told in time, and a price
    told.t = NOW + 5500
    node = Journal(store, "m3-abc", lambda: told.t)
    node.record(NoticeSeen("m3-abc", "aws", "kill", "n-1", NOW + 5620))
    node.record(EpochLeft(1, "m3-abc", "drained"))
    node.flush()
    told.say(5550, PricesSeen({WEST.name: 1.4, EAST.name: 1.2, "gcp/dear": 9.0}))
    told.ended(5600, 3, "preempted", 4300, 4400)
    east, west = memory.records()
    assert (west.losses, west.unnoticed, west.open, west.node_s) == (1, 0, False, 1200)
    assert west.usd_per_h == ((NOW + 4300, 1.3), (NOW + 5550, 1.4))
    assert east.usd_per_h == ((NOW, 1.1), (NOW + 600, 1.2))
    assert memory.records() == [east, west] == RunMemory("file:///run", store).records()


class Silent(MemoryStore):
    def list(self, prefix):
        raise StoreUnavailable("it does not answer")

    def put(self, key, data):
        raise StoreUnavailable("it does not answer")


class AtHome(Histories):
    """With a team's store that is given."""

    def __init__(self, folder, store):
        super().__init__("s3://team/market", folder)
        self.store = store

    def team(self):
        return HistoryShelf(self.store)


def test_a_team_that_does_not_answer_is_remembered(tmp_path):
    bucket = bucket_of_its_own()
    HistoryShelf(bucket).write([seen("theirs")], NOW)
    ours = AtHome(tmp_path, bucket)
    assert ours.write([seen("ours")], NOW) == []
    assert len(bucket.list("seen/")) == 2
    assert [run for run, _ in ours.read(NOW)[0].records] == ["ours", "theirs"]
    silent = AtHome(tmp_path, Silent("memory://silent", {}))
    history, (warning,) = silent.read(NOW)
    assert [run for run, _ in history.records] == ["ours", "theirs"]
    assert warning.startswith("s3://team/market: does not answer") and "the last time" in warning
    (warning,) = silent.write([seen("more")], NOW)
    assert "cannot be written" in warning
    assert ("more", "a") in silent.read(NOW)[0].records
    nobody = AtHome(tmp_path / "new", Silent("memory://silent", {}))
    assert nobody.read(NOW)[0].records == {} and "left out" in nobody.read(NOW)[1][0]


class Slow(MemoryStore):
    """It answers when it is let."""

    def __init__(self):
        super().__init__("memory://slow", {})
        self.let = threading.Event()

    def list(self, prefix):
        assert self.let.wait(30)
        return super().list(prefix)


def test_a_team_that_is_slow_holds_nobody_up_and_is_known_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "SHARED_WITHIN_S", 0.05)
    bucket = Slow()
    bucket.put("seen/2027-01-15/theirs.jsonl", (seen("theirs").line() + "\n").encode())
    ours = AtHome(tmp_path, bucket)
    history, (warning,) = ours.read(NOW)
    assert history.records == {} and "no answer within 0.05 s" in warning
    bucket.let.set()
    for thread in threading.enumerate():
        if thread.name == "market history":
            thread.join(30)
    assert ("theirs", "a") in AtHome(tmp_path, Silent("memory://silent", {})).read(NOW)[0].records


def test_a_launch_keeps_what_it_has_seen_in_the_end(tmp_path):
    store, histories = bucket_of_its_own(), Histories("", tmp_path)
    with remembering("file:///run", store, histories):
        a_run(store)
    found = histories.own().read(NOW + 5000)
    assert {offer for _, offer in found.records} == {EAST.name, WEST.name}
    with remembering("file:///run", Silent("memory://silent", {}), histories):
        pass  # and one whose bucket is silent ends all the same


# ---- the command ---------------------------------------------------------------------------------
@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SHARED, raising=False)
    return tmp_path


def harness(*argv):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as e:
        main(["market", *map(str, argv)])
    return e.value.code


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_the_command_from_learning_to_showing(home, capsys):
    a_run(open_store(str(home / "run")), time.time() - 6000.0)
    team, file = home / "team", home / "all.jsonl"
    assert harness("show") == 0
    assert "Nothing is known of any offer yet" in words(capsys)
    assert harness("learn", home / "run", "--shared", team) == 0
    assert "learned of 2 offers" in words(capsys)
    assert harness("show", "--offer", "us-east", "--json") == 0
    (east,) = json.loads(capsys.readouterr().out)
    assert east["offer"] == EAST.name and east["seen_h"] == pytest.approx(4285 / 3600)
    assert (east["closings"], east["openings"], east["losses"]) == (1, 1, 1)
    assert east["usd_per_h"] == [1.1, 1.2, 1.2]
    assert harness("show") == 0
    assert "84.0 %" in words(capsys)
    assert harness("export", file) == 0
    assert harness("export", home / "all.csv") == 0
    assert (home / "all.csv").read_text().count("\n") == 3
    assert harness("draw", home / "made.csv", "--hours", "50", "--nodes", "2") == 0
    drawn = (home / "made.csv").read_text()
    zones = read_market({"made.csv": drawn})
    assert [zone.zone for zone in zones] == [EAST.name, WEST.name]
    assert len(zones[0].nodes) == 300 and zones[0].usd_per_h is not None
    # somebody else who has the file, and somebody who has the team's bucket
    for more in (), ("--shared", team):
        shutil.rmtree(home / "home")
        assert more or harness("learn", file) == 0
        capsys.readouterr()
        assert harness("show", "--json", *more) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("learn",), "arguments are required: names"),
        (("learn", "nothing"), "there is no run here"),
        (("learn", "x.jsonl"), "found 1 lines that are no records"),
        (("export",), "arguments are required: file"),
        (("export", "x.parquet"), "wanted FILE.jsonl, FILE.csv, or -"),
        (("export", "no/x.csv"), "cannot be written"),
        (("show", "aws"), "unrecognized arguments: aws"),
        (("draw", "x.txt"), "wanted FILE.csv"),
        (("draw", "x.csv"), "nothing is known of the capacity of any such offer"),
    ],
)
def test_what_the_command_cannot_do(home, capsys, monkeypatch, argv, wanted):
    monkeypatch.chdir(home)
    (home / "x.jsonl").write_text("hello\n")
    assert harness(*argv) == 2
    assert wanted in capsys.readouterr().err


def test_a_launch_is_told_what_others_saw_and_not_what_it_saw_itself(tmp_path, capsys):
    ours = AtHome(tmp_path, Silent("memory://silent", {}))
    own = history_name("file:///run")
    ours.write([seen(own, "a", losses=5), seen("other", "a", losses=1), seen(own, "b")], NOW)
    known, prices = cli.known_before("file:///run", ours, NOW, Console())
    assert {name: one.losses for name, one in known.items()} == {"a": 1}
    assert {*prices} <= {"a"}
    assert "s3://team/market: does not answer" in words(capsys)
