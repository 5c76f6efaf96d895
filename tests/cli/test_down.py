"""`harness down`, as SkyPilot's API server of whoever gives the command knows of the nodes."""

import itertools
import json
import re
import threading
import time

import pytest

from harness.bucket.journal import Journal
from harness.cli import command as cli
from harness.cli import stop
from harness.clouds.sky_clusters import tag
from harness.core.facts import AttemptIntended, AttemptUp
from storage.stores.store_urls import open_store
from support.fakesky import EAST, WEST, FakeSky
from support.worlds import until


@pytest.fixture
def sky():
    return FakeSky([EAST, WEST])


@pytest.fixture
def run(tmp_path):
    """A run whose controller is gone: two attempts are open in its facts."""
    store = open_store(str(tmp_path / "run"))
    journal = Journal(store, "controller-1", time.time)
    for n in (1, 2):
        journal.record(AttemptIntended(n, {"usd_per_h": 10.0, "name": "aws/us-east-1/use1-az1/p5"}))
        journal.record(AttemptUp(n, 0.0))
    journal.flush()
    return store


def bring(run, sky, monkeypatch, capsys, *flags):
    """`harness down` of a run, as `sky` is the API server of whoever gives the command: exit
    status and what was said."""
    ticking = lambda method, timeout_s, **a: (sky.tick(8.0), sky(method, timeout_s, **a))[1]  # noqa: E731
    ticking.close = lambda: None
    monkeypatch.setattr(stop, "sky_broker", lambda _: ticking)
    with pytest.raises(SystemExit) as ended:
        cli.main(["down", run.url, *flags])
    return ended.value.code, " ".join(capsys.readouterr().out.split())


def test_down_does_not_call_gone_what_another_api_server_launched(run, monkeypatch, capsys):
    code, said = bring(run, FakeSky([EAST, WEST]), monkeypatch, capsys)
    names = ", ".join(f"{tag(run.url)}-000{n}" for n in (1, 2))
    assert code == 1 and re.search(r"NOT PROVEN TO BE GONE: attempts 1 \(.*\), 2 \(", said)
    assert f"({names})" in said
    assert (
        "SkyPilot's API server knows nothing of them" in said
        and f"`harness down {run.url}` where they were launched from" in said
    )
    assert "Nothing of" not in said


def test_down_is_done_when_this_api_server_has_had_them_all(run, sky, monkeypatch, capsys):
    for n in (1, 2):
        sky.launch(
            f"{tag(run.url)}-000{n}",
            {"resources": {"infra": "x"}, "envs": {"HARNESS_NODE": "{}"}},
            {},
            None,
        )
    sky.tick(30.0)
    sky.down(f"{tag(run.url)}-0001")  # it went some time ago
    sky.tick(30.0)
    code, said = bring(run, sky, monkeypatch, capsys)
    assert (
        code == 0
        and f"SkyPilot brought down {tag(run.url)}-0002." in said
        and "Nothing of this run is left." in said
    )
    assert not sky.real


def test_down_proves_nothing_where_a_fact_cannot_be_read(run, monkeypatch, capsys):
    """Such a fact may be the intent of an attempt that nothing else tells of."""
    facts = next(iter(run.list("facts/")))
    run.put("facts/controller-2/000000.jsonl", b"{no fact}\n")
    run.delete(facts)
    code, said = bring(run, FakeSky([EAST, WEST]), monkeypatch, capsys)
    assert code == 1 and "Nothing of" not in said
    assert "cannot be read (facts/controller-2/000000.jsonl" in said


@pytest.mark.parametrize("listens", [True, False])
def test_down_asks_who_beats_to_stop_and_names_who_goes_on(run, listens, monkeypatch, capsys):
    """A node that another API server launched: its agent hears of the stop in the bucket."""
    over = threading.Event()

    def beat():
        for n in itertools.count():
            gone = over.wait(0.05) or (listens and run.list("control/stop.json"))
            state = {
                "member": "m0002-aa",
                "attempt": 2,
                "state": "gone" if gone else "in",
                "beat": n,
                "beat_s": 0.1,
            }
            run.put("rdzv/members/m0002-aa.json", json.dumps(state).encode())
            if gone:
                return

    member = threading.Thread(target=beat)
    member.start()
    try:
        until(lambda: run.list("rdzv/members/"), "its first beat")
        code, said = bring(
            run, FakeSky([EAST, WEST]), monkeypatch, capsys, "--grace-s", "0.5", "--timeout-s", "1"
        )
    finally:
        over.set()
        member.join()
    running = "STILL RUNNING AND BILLED: m0002-aa beat in the bucket" in said
    assert code == 1 and "control/stop.json" in run.list("control/") and running is not listens
    unproven = r"attempts 1 \(.*\), 2 \(" if listens else r"attempts 1 \("
    assert re.search(f"NOT PROVEN TO BE GONE: {unproven}", said)
