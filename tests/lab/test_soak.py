"""A short soak, and whether it would find a leak."""

import random
import signal

import pytest

from support import soak
from support.soak import Lives, SeatGrowth, SeatUse

pytestmark = pytest.mark.proof
MIB = 1 << 20


def life(rss=lambda t: 50 * MIB, files=lambda t: 9, threads=lambda t: 7, n=200):
    return [SeatUse(float(t), int(rss(t)), int(files(t)), int(threads(t))) for t in range(n)]


@pytest.mark.parametrize(
    "leak",
    [
        {"rss": lambda t: (50 + t / 4) * MIB},
        {"files": lambda t: 9 + t // 10},
        {"threads": lambda t: 7 + t // 10},
    ],
    ids=["memory", "files", "threads"],
)
def test_a_process_that_grows_is_found(leak):
    assert SeatGrowth.of("agent", life(**leak)).too_much


def test_what_a_process_needs_at_its_start_is_no_growth():
    warm = life(rss=lambda t: min(t, 40) * 2 * MIB, files=lambda t: min(t, 12))
    assert not SeatGrowth.of("agent", warm).too_much
    lives = Lives({("agent", 1, 0.0): warm, ("worker", 2, 0.0): life(n=30), ("node", 3, 0.0): []})
    (told,) = lives.growth()  # the others did not live long enough to tell
    assert (told.seat, told.life_s) == ("agent", 199)


def test_a_short_soak(tmp_path):
    said = []
    soak.soak(tmp_path / "soak", 5, 1, seed=3, tell=said.append)
    assert any("verified with the run's key, and the weights are those of a calm run" in text for text in said), said


GRAY = ("half an object", "store hangs", "store drips", "writes delivered twice", "nodes' disk full")


def test_a_short_soak_in_which_nobody_dies(tmp_path):
    soak.soak(tmp_path / "soak", 6, 1, seed=4, tell=print, only=GRAY)


def test_a_controller_that_ends_by_itself_is_a_failure(tmp_path):
    s = soak.SoakedRun(tmp_path / "soak", random.Random(0))
    try:
        s.controller.send_signal(signal.SIGTERM)  # as no fault does
        with pytest.raises(AssertionError, match="the controller ended by itself"):
            soak._faults(s, 1, soak.SOAK_FAULTS, soak.Counter(), Lives(), lambda text: None)
    finally:
        s.close()
