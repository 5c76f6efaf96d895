"""What it costs to look at a long run: counts of requests on a small one, made as
benchmarks/longrun.py makes a month. (Seconds and memory are measured there.)"""

import importlib.util
import sys
from pathlib import Path

import pytest

from harness.bucket.archive import segments
from storage.stores.folder_store import MemoryStore

pytestmark = pytest.mark.proof
PATH = Path(__file__).parents[2] / "benchmarks" / "longrun.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("longrun", PATH)
    module = sys.modules["longrun"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(bench):
    maker = bench.Maker(bench.Split(MemoryStore("memory://long", {})), days=0.25, nodes=8)
    maker.make()
    return maker


@pytest.fixture
def slow(bench, made):
    return bench.Slow(made.store.folder, latency_s=0.0)


def test_the_run_is_long(made):
    assert made.store.requests["facts", "create"] > 2000 and made.epoch > 10
    assert sum(map(len, segments(made.store.folder).values())) < 200


def test_status_asks_for_what_is_new(bench, slow, made):
    live = sum(map(len, segments(made.store.folder).values()))
    assert bench.status(slow)["step"] == made.step
    assert slow.total <= live + 50


def test_a_live_view_asks_for_ten_objects_a_poll(bench, slow):
    assert bench.live(slow)["most"] <= 10


def test_a_report_asks_for_little(bench, slow, made):
    live = sum(map(len, segments(made.store.folder).values()))
    found = bench.report(slow)
    assert not found["problems"] and 0.7 < found["goodput"] < 1.0
    assert slow.total <= live + 150


def test_a_new_controller_reads_no_other_facts(bench, slow, made):
    assert bench.takeover(slow)["open"] == 8
    assert slow.total <= 100


def test_a_newcomer_meets_the_living_only(bench, slow):
    assert bench.newcomer(slow)["members"] == 9
    assert slow.total <= 20
