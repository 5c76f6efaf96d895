"""A Lightning script with several fits: each is a phase of one run."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from harness.bucket.phases import read_phases
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history

SCRIPT = Path(__file__).parent / "scripts" / "lightning_fits.py"
PRELOAD = "lightning.pytorch"


def events(folder):
    """The last of what was told at each place: a kill has undone some of it."""
    found = {}
    for line in (folder / "events").read_text().splitlines():
        fit, what, step = line.split()
        name, _, number = what.partition("_")
        found[fit, name, step] = float(number) if number[:1].isdigit() else 0.0
    return found


def ended(folder):
    """What holds to the bit behind each fit, and what Lightning logs: means, of several ranks."""
    fits = json.loads((folder / "ended").read_text())
    return [fit.pop("metrics") for fit in fits], fits


def test_fits_that_are_killed_in_each_and_between_them_are_the_undisturbed_ones(go):
    go(1, reduce="exact")
    calm, calm_records = events(go.folder), history(go.url)
    calm_metrics, *calm_end = ended(go.folder)
    go.folder.rename(go.folder.with_name("calm"))
    go.url.rename(go.url.with_name("calm-run"))
    go(2, reduce="exact", die_at=("fit 1 step 5", 3), codes=(-9,))
    go(1, reduce="exact", die_at=("after fit 1", 10), codes=(-9,))
    go(3, reduce="exact", die_at=("fit 2 step 4", 12), codes=(-9,))
    go(2, reduce="exact", die_at=("fit 3 step 10", 18), codes=(-9,))
    go(3, reduce="exact")
    metrics, *end = ended(go.folder)
    assert end == calm_end and events(go.folder) == pytest.approx(calm, rel=1e-6)
    assert metrics == [pytest.approx(one, rel=1e-6) for one in calm_metrics]
    same = [(r.step, r.phase, r.loss, r.contents) for r in calm_records]
    assert [(r.step, r.phase, r.loss, r.contents) for r in history(go.url)] == same
    assert [one.ends for one in read_phases(open_store(str(go.url)))] == [10, 18, None]
    assert not [check for check in audit(open_store(str(go.url))).checks if not check.ok]


def test_a_script_that_trains_less_than_before_is_refused(go):
    go(1, die_at=("fit 3 step 10", 18), codes=(-9,))
    assert "trained more often when the run began" in go(1, "--fits", 2, codes=(1,)).output
