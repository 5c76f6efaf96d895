"""Costs of many runs: exact whatever is asked, robust to what lies among them."""

import csv
import io
import json
from dataclasses import asdict
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.bucket.journal import Journal
from harness.bucket.setup_objects import write_setup
from harness.cli.command import main
from harness.clouds.sky_clusters import settle
from harness.core import facts as f
from harness.core.setup_record import Setup
from harness.ledger.bill import BUCKETS, NANO
from harness.look.reports import costs
from harness.look.reports.costs import Costs, Spending, find_runs, read_costs, run_costs
from harness.look.reports.summary import summarize
from storage.stores.folder_store import FileStore, MemoryStore
from support.histories import EAST, T0, whole_run
from support.pages import EVIL, Page

DAY_S = 86400.0
# the story of histories.py begins with the year 2026: 100 s before that is another month and year
NEW_YEAR_S = T0


def self_launched(store, at_s, *, hours=2.0, member="m0000-aa", usd_per_h=3.0, **more):
    """A run of one node that no controller launched; it trains for half of its time."""
    seconds = hours * 3600
    found = f.NodeFound(
        *(member, "aws", "us-east-2", "us-east-2a", "p5.48xlarge", "H100:8", True),
        **{"usd_per_h": usd_per_h, "on_demand_usd_per_h": 12.0, "launched_s": at_s, **more},
    )
    for t, fact in (
        (at_s + seconds / 4, f.AgentStarted(member, 0, "h", 8, "", 1)),
        (at_s + seconds / 4, found),
        (at_s + seconds / 4, f.EpochStarted(1, (member,), 8, "start")),
        (at_s + seconds * 3 / 4, f.StepDone(1, 1, 1.0, at_s + seconds / 4, seconds / 2, 8, 1000)),
        (at_s + seconds, f.AgentEnded(member, 0, "finished")),
    ):
        journal = Journal(store, f"w-{t}-{fact.kind}", lambda t=t: t)
        journal.record(fact)
        journal.flush()
    return store


def costs_of(*stores, people=()):
    said = [*people, *({} for _ in stores)]
    runs = [
        run_costs(summarize(store, lambda: T0 + 1e6), f"run-{i}", said[i])
        for i, store in enumerate(stores)
    ]
    return Costs("memory://all", tuple(runs))


# ---- sums ----------------------------------------------------------------------------------------
@given(st.floats(-400, 0), st.floats(0.001, 3000), st.floats(0.01, 90))
@settings(max_examples=25, deadline=None)
def test_months_add_up_to_the_run_to_the_nano_dollar(at_s, hours, usd_per_h):
    store = MemoryStore("memory://x", {})
    self_launched(store, NEW_YEAR_S + at_s, hours=hours, usd_per_h=usd_per_h)
    s = summarize(store, lambda: NEW_YEAR_S + 1e8)
    found = run_costs(s, "x", {})
    for bucket in BUCKETS:
        assert sum(m.ns[bucket] for m in found.months.values()) == s.ledger.ns[bucket]
        assert sum(m.nusd[bucket] for m in found.months.values()) == s.ledger.nusd[bucket]
    (row,) = s.ledger.attempts
    on_demand = round(row.billed_ns * row.on_demand_usd_per_h / 3600)
    assert found.total.on_demand_nusd == on_demand
    # and each month has the seconds that lie in it
    for month, spent in found.months.items():
        begin = datetime.strptime(month, "%Y-%m").replace(tzinfo=timezone.utc)
        after = begin.replace(year=begin.year + begin.month // 12, month=begin.month % 12 + 1)
        low = max(row.segments[0][0], int(begin.timestamp()) * NANO)
        high = min(row.segments[-1][1], int(after.timestamp()) * NANO)
        assert spent.billed_ns == high - low


def test_a_run_over_the_end_of_a_year():
    h = whole_run()
    s = summarize(h.store, lambda: h.t)
    found = run_costs(s, "x", {})
    assert list(found.months) == ["2026-01"]
    assert found.total.billed_nusd == s.ledger.billed_nusd
    assert found.total.steps == s.step == 120
    assert found.total.usd_per_1k_steps == pytest.approx(s.ledger.usd / 0.12)
    on_demand = found.total.on_demand_nusd / NANO
    assert on_demand == pytest.approx(s.ledger.cost.on_demand_usd)
    assert found.total.saved == pytest.approx(s.ledger.cost.saved)
    at_work = sum(s.ledger.nusd[b] for b in ("useful", "snapshot", "other")) / NANO
    assert found.total.wasted_usd == pytest.approx(s.ledger.usd - at_work)
    store = self_launched(MemoryStore("memory://y", {}), NEW_YEAR_S - 3600, hours=2.0)
    months = run_costs(summarize(store, lambda: NEW_YEAR_S + DAY_S), "y", {}).months
    assert {m: spent.usd for m, spent in months.items()} == {"2025-12": 3.0, "2026-01": 3.0}


def test_groups_add_up_to_the_total():
    people = [{"owner": "ada", "project": "a"}, {"owner": "ada", "project": "b"}, {}]
    stores = [
        self_launched(MemoryStore(f"memory://{i}", {}), NEW_YEAR_S - 1800 * i, hours=i + 1)
        for i in range(3)
    ]
    found = costs_of(*stores, people=people)
    for names in (("run",), ("owner",), ("project", "month"), ("month",), ("experiment", "owner")):
        rows = found.by(*names)
        total = sum((row.spending for row in rows), Spending())
        assert total == found.total
        assert len({row.keys for row in rows}) == len(rows)
    assert [(r.keys, r.spending.usd, r.runs) for r in found.by("owner")] == [
        (("(none)",), 9.0, 1),
        (("ada",), 9.0, 2),
    ]
    december = found.within("2025-12")
    assert december.total.billed_ns == (1800 + 3600) * NANO
    assert [r.name for r in december.runs] == ["run-1", "run-2"]


# ---- what lies in a folder -----------------------------------------------------------------------
def put(path, data=b"{}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    """Of runs: some are damaged, some are none."""
    self_launched(FileStore(f"file://{tmp_path / 'ada/lm/sweep/one'}"), NEW_YEAR_S)
    self_launched(FileStore(f"file://{tmp_path / 'lm/two'}"), NEW_YEAR_S - DAY_S)
    self_launched(FileStore(f"file://{tmp_path / '=three'}"), NEW_YEAR_S, usd_per_h=None)
    put(tmp_path / "damaged/facts/agent-x/000000.jsonl", b"\xff\x00 no fact\n")
    put(tmp_path / "damaged/run.json", b"[]")
    put(tmp_path / "not a run/notes.txt")
    put(tmp_path / ".hidden/facts/a/000000.jsonl")
    (tmp_path / "empty").mkdir()
    return tmp_path


def read(folder):
    store = lambda url: FileStore(url)  # noqa: E731
    return read_costs(f"file://{folder}", store, lambda _: {}, lambda: NEW_YEAR_S + DAY_S)


def test_runs_are_found_at_any_depth_and_damage_is_named(folder):
    found = read(folder)
    names = sorted(run.name for run in found.runs)
    assert names == ["=three", "ada/lm/sweep/one", "damaged", "lm/two"]
    by_name = {run.name: run for run in found.runs}
    one, two = by_name["ada/lm/sweep/one"], by_name["lm/two"]
    assert one.people == {"owner": "ada", "project": "lm", "experiment": "sweep"}
    assert (two.people, two.whence) == ({"project": "lm"}, "path")
    assert by_name["=three"].people == {}
    assert by_name["=three"].total.unpriced_ns == 2 * 3600 * NANO
    assert any("damaged" in text for text in found.unread)
    assert found.total.usd == 12.0
    (path, _), *more = find_runs(f"file://{folder}/lm/two", FileStore)
    assert (path, more) == ((), [])


def test_the_command_prints_a_table_csv_json_and_a_page(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page, sheet = tmp_path / "costs.html", tmp_path / "costs.csv"
    with pytest.raises(SystemExit) as e:
        main(
            [
                "runs",
                "costs",
                str(folder),
                "--by",
                "project,month",
                "--html",
                str(page),
                "--csv",
                str(sheet),
            ]
        )
    assert e.value.code == 0
    said = capsys.readouterr().out
    assert "$6.000" in said and "2025-12" in said and "$12.00" in said
    assert "nobody knows the price of 2.00 node-hours of =three" in " ".join(said.split())
    rows = list(csv.DictReader(io.StringIO(sheet.read_text())))
    assert sum(int(row["nusd"]) for row in rows) == 12 * NANO
    assert {row["project"] for row in rows} == {"lm", "(none)"}
    assert "default-src 'none'" in page.read_text()
    with pytest.raises(SystemExit):
        main(["runs", "costs", str(folder), "--json", "--month", "2025-12"])
    body = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in body["rows"]] == ["lm/two"]
    assert body["total"]["usd"] == 6.0
    assert body["total"]["usd_per_1m_tokens"] is None  # nothing of it is committed
    for wrong in (["--by", "colour"], ["--month", "11"], ["--by", "run,run"]):
        with pytest.raises(SystemExit) as e:
            main(["runs", "costs", str(folder), *wrong])
        assert e.value.code == 2
    with pytest.raises(SystemExit) as e:
        main(["runs", "costs", str(folder / "empty")])
    assert e.value.code == 2
    assert "there is no run here" in capsys.readouterr().err


def test_nothing_is_saved_with_a_node_whose_price_nobody_knows():
    store = self_launched(MemoryStore("memory://x", {}), NEW_YEAR_S, usd_per_h=None)
    found = costs_of(store).total
    assert (found.usd, found.saved_usd, found.hours) == (0.0, 0.0, 2.0)
    assert summarize(store, lambda: NEW_YEAR_S + DAY_S).ledger.cost.saved_usd == 0.0


def test_a_run_says_itself_whom_it_is_for(folder, capsys):
    run = FileStore(f"file://{folder}/ada/lm/sweep/one")
    write_setup(run, 1, Setup(people={"owner": "bob", "project": "rl", "purpose": "why not"}), b"")
    with pytest.raises(SystemExit):
        main(["runs", "costs", str(folder), "--json", "--by", "owner,project,experiment"])
    body = json.loads(capsys.readouterr().out)
    keys = {(row["owner"], row["project"], row["experiment"]): row["usd"] for row in body["rows"]}
    assert keys[("bob", "rl", "(none)")] == 6.0
    assert {row["run"]: row["said_by"] for row in body["runs"]}["ada/lm/sweep/one"] == "run"


def test_names_are_neither_markup_nor_formulas():
    people = {"owner": EVIL, "project": "=1+1", "experiment": "@x"}
    found = costs_of(self_launched(MemoryStore("memory://x", {}), NEW_YEAR_S), people=[people])
    page = Page()
    page.feed(costs.to_html(found, ["owner", "project"]))
    page.close()
    assert "script" not in page.tags and not page.open
    assert "alert(1)" in " ".join(page.text)
    line = costs.to_csv(found, ["project", "experiment"]).splitlines()[1]
    assert line.startswith("'=1+1,'@x,1,")
    console = Console(file=io.StringIO(), width=200)
    costs.print_costs(found, ["owner"], console)
    assert "\x1b[31m" not in console.file.getvalue()


# ---- SkyPilot's own bill -------------------------------------------------------------------------
class Reports:
    """SkyPilot's cost report."""

    def __init__(self, *rows):
        self.rows = rows

    def __call__(self, method, timeout_s, names, days):
        assert method == "spans"
        return [row for row in self.rows if row["name"] in names]


def report(name, *intervals, usd=10.0, nodes=2):
    seconds = sum((end or begin + 1) - begin for begin, end in intervals)
    return {
        "name": name,
        "duration": seconds,
        "total_cost": usd,
        "launched_at": intervals[-1][0],
        "num_nodes": nodes,
        "usage_intervals": intervals,
    }


def test_skypilots_bill_is_written_into_the_run_once():
    store = self_launched(MemoryStore("memory://x", {}), NEW_YEAR_S, cluster="c", usd_per_h=None)
    begin = int(NEW_YEAR_S) - 4
    sky = Reports(
        report("c", (begin - 90_000, begin - 80_000)),  # the name was used before
        report("c", (begin, begin + 10_000), usd=20.0),
        report("other", (begin, begin + 10_000)),
    )
    (bill,) = settle(sky, [store], lambda: NEW_YEAR_S + DAY_S)
    assert (bill.launched_s, bill.gone_s) == (begin, begin + 10_000)
    assert bill.usd_per_h == pytest.approx(3.6)
    assert settle(sky, [store], lambda: NEW_YEAR_S + 2 * DAY_S) == []
    s = summarize(store, lambda: NEW_YEAR_S + DAY_S)
    assert s.ledger.billed_s == 10_000
    assert s.ledger.usd == pytest.approx(10.0)
    assert s.ledger.ns["drained"] == (10_000 - 4 - 7200) * NANO


def test_a_cluster_that_is_still_there_goes_on_to_cost():
    store = self_launched(MemoryStore("memory://x", {}), NEW_YEAR_S, cluster="c")
    sky = Reports(report("c", (int(NEW_YEAR_S), None)))
    assert len(settle(sky, [store], lambda: NEW_YEAR_S + DAY_S)) == 1
    assert len(settle(sky, [store], lambda: NEW_YEAR_S + 2 * DAY_S)) == 1
    s = summarize(store, lambda: NEW_YEAR_S + 3 * DAY_S)
    assert s.ledger.billed_s == 2 * DAY_S  # as far as that was seen


def test_a_run_that_a_controller_led_needs_no_bill():
    store = MemoryStore("memory://x", {})
    journal = Journal(store, "controller-1", lambda: T0)
    journal.record(f.AttemptIntended(1, asdict(EAST)))
    journal.record(f.AgentStarted("m0001-a", 1, "h", 1, "", 1))
    journal.record(f.NodeFound("m0001-a", cluster="c"))
    journal.flush()
    assert settle(Reports(report("c", (int(T0), None))), [store], lambda: T0) == []
