"""Numbers for Prometheus: the text format, a run's and an agent's, over real HTTP."""

import math
import urllib.error
import urllib.request

import pytest

from harness.core import facts as f
from harness.core.world import BadInput
from harness.look.trackers.prometheus import COUNTER, Exposed, RunGauges, exposing, exposition
from storage.errors import StoreUnavailable
from support.exposition import parsed, scrape
from support.histories import whole_run


def test_the_text_format():
    evil = 'a"b\\c\nd'
    text = exposition(
        [
            Exposed("x", f"help {evil}", (((("name", evil),), 1.5),)),
            Exposed.of("y", "a counter", 3.0, COUNTER),
            Exposed.of("z", "not known", None),
            Exposed.of("n", "no number", math.nan),
            Exposed.of("i", "endless", math.inf),
        ],
        (("run", "r"),),
    )
    assert parsed(text) == {
        'x{run="r",name="a\\"b\\\\c\\nd"}': 1.5, 'y{run="r"}': 3.0,
        'n{run="r"}': pytest.approx(math.nan, nan_ok=True), 'i{run="r"}': math.inf,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("127.0.0.1:{port}", True), ("localhost:{port}", True), ("[::1]:{port}", True),
        ("evil.example:{port}", False), ("localhost.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_only_who_names_this_machine_is_answered(host: str, answered: bool):
    """A page in a browser may make its own name point here."""
    with exposing("0", lambda: "x 1\n") as url:
        port = url.rpartition(":")[2].partition("/")[0]
        asked = urllib.request.Request(url, headers={"Host": host.format(port=port)})
        if answered:
            assert urllib.request.urlopen(asked, timeout=20).read() == b"x 1\n"
        else:
            with pytest.raises(urllib.error.HTTPError, match="421"):
                urllib.request.urlopen(asked, timeout=20)


def test_a_run_s_numbers_are_those_of_its_ledger():
    h = whole_run()
    h.controller(f.GuardTripped(120, h.epoch, "non-finite", math.nan))
    gauges = RunGauges(h.store, lambda: h.t + 5)
    with exposing("0", gauges.text) as url:
        assert url.startswith("http://127.0.0.1:")
        found = parsed(scrape(url))
        assert scrape(url) == gauges.text()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(url.replace("metrics", "else"))
        port = url.split(":")[2].split("/")[0]
        with pytest.raises(BadInput, match="--prometheus"), exposing(port, str):
            pass
    assert found['harness_run_state{state="done"}'] == 1
    assert found['harness_run_state{state="training"}'] == 0
    assert (found["harness_step"], found["harness_committed_step"]) == (120, 120)
    assert found["harness_usd_total"] == pytest.approx(h.spent)
    assert (found["harness_notices_total"], found["harness_losses_total"]) == (2, 1)
    assert 0.3 < found["harness_goodput_ratio"] < 1
    firing = 'harness_alerts_firing{rule="guard-tripped",severity="critical",subject=""}'
    assert found[firing] == 1
    assert found["harness_bucket_up"] == 1


def test_while_the_bucket_is_silent_the_last_numbers_stand():
    h, now = whole_run(), [0.0]
    gauges = RunGauges(h.store, lambda: h.t + now[0])
    before = parsed(gauges.text())
    h.store.list = lambda prefix: (_ for _ in ()).throw(StoreUnavailable("silent"))
    now[0] = 60.0
    after = parsed(gauges.text())
    assert after["harness_bucket_up"] == 0
    assert after["harness_usd_total"] == before["harness_usd_total"]
