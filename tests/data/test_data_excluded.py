"""Exclusion lists that come while a run lives: it goes on, the same on all ranks, and each step is
proved by the list that was in force."""

import json
import shutil
from pathlib import Path

import pytest

import harness
from harness.core.batch import Batching, indices_at, positions_of
from harness.data.exclusions import marked, merged_ranges
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from storage.stores.store_urls import open_store
from support.corpora import files, leave_out, prepared, spans
from support.worlds import history as records_of
from support.worlds import train

pytestmark = pytest.mark.proof
SCRIPT = str(Path(__file__).parents[1] / "support" / "corpus_trainer.py")


def proved(run, url):
    store = open_store(str(run))
    report = with_contents(audit(store), store, str(url))
    return next(c for c in report.checks if c.name == "contents")


def first_use(url, ranges, step):
    """The first step from `step` on that reads something of these tokens, by the numbers of
    corpus_trainer.py."""
    windows = harness.data.Tokens(str(url), 32)
    batching = Batching(len(windows), 12, 3, 7)
    while True:
        items = indices_at(batching, positions_of(batching, step)).tolist()
        if any(marked(merged_ranges(ranges), i * 32, i * 32 + 33).any() for i in items):
            return step
        step += 1


def losses(run):
    return {r.step: r.loss for r in records_of(run)}


@pytest.mark.parametrize("shape", [[], ["--records"]])
def test_a_run_goes_on_with_a_longer_list_and_each_step_is_proved(tmp_path, shape):
    """Four steps without a list, by two ranks; then a list, and another, by one and by two."""
    text = files(tmp_path / "text", 60)
    url, run = tmp_path / "made", tmp_path / "run"
    prepared(url, text, kind="records" if shape else "tokens")
    train(tmp_path / "calm", 1, url, *shape, script=SCRIPT)
    train(run, 2, url, *shape, "--total", 4, script=SCRIPT)
    gone = [(10 + 10 * i, 15 + 10 * i) for i in range(5)] if shape else spans(url)[5:25]
    leave_out(url, *gone)
    train(run, 1, url, *shape, "--total", 6, script=SCRIPT)
    more = [(0, 5)] if shape else spans(url)[40:50]
    leave_out(url, *more)
    train(run, 2, url, *shape, script=SCRIPT)
    identity = json.loads((run / "run.json").read_bytes())
    assert identity == json.loads((tmp_path / "calm" / "run.json").read_bytes())
    found = proved(run, url)
    assert found.ok and found.n == 9, found.detail
    if not shape:
        for number, ranges, step in ((1, gone, 5), (2, more, 7)):
            said = f"exclusion list {number} is in force from step {first_use(url, ranges, step)} on"
            assert said in found.detail
    # the same positions and items, whatever is left out of them; and until then the same losses
    was, now = ({r.step: r for r in records_of(one)} for one in (tmp_path / "calm", run))
    assert {k: r.digest for k, r in was.items()} == {k: r.digest for k, r in now.items()}
    assert [was[k].loss == now[k].loss for k in (1, 2, 3, 4)] == [True] * 4
    assert was[9].loss != now[9].loss
    # the corpus as it was: nothing that is left out now was left out then, so this is refused
    shutil.copytree(url, tmp_path / "before")
    shutil.rmtree(tmp_path / "before" / "excluded")
    assert not proved(run, tmp_path / "before").ok
    assert proved(tmp_path / "calm", url).ok  # no list was in force, all along


def test_lists_that_go_back_are_found(tmp_path):
    text, url, run = files(tmp_path / "text", 60), tmp_path / "made", tmp_path / "run"
    prepared(url, text)
    leave_out(url, *spans(url)[:30])
    train(run, 1, url, "--total", 4, script=SCRIPT)
    (url / "excluded").rename(tmp_path / "kept")
    train(run, 1, url, script=SCRIPT)
    (tmp_path / "kept").rename(url / "excluded")
    found = proved(run, url)
    assert not found.ok and "wanted exclusion lists that never go back" in found.detail


def test_all_ranks_leave_the_same_out(tmp_path):
    """One has opened the corpus before the list was there."""
    text, url = files(tmp_path / "text", 60), tmp_path / "made"
    prepared(url, text)
    leave_out(url, *spans(url)[:20])
    train(tmp_path / "one", 1, url, script=SCRIPT)
    train(tmp_path / "two", 2, url, "--early", script=SCRIPT)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert proved(tmp_path / "two", url).ok


def test_lists_of_several_sources_of_a_mixture_are_told_apart(tmp_path):
    """Each source gets a list at another time; a step is proved by both."""
    web, code, run = tmp_path / "web", tmp_path / "code", tmp_path / "run"
    prepared(web, files(tmp_path / "many", 60))
    prepared(code, files(tmp_path / "few", 12, seed=3))
    both = [str(web), str(code)]
    train(run, 1, *both, "--total", 3, script=SCRIPT)
    leave_out(web, *spans(web)[:40])
    train(run, 2, *both, "--total", 5, script=SCRIPT)
    leave_out(code, *spans(code)[:9])
    train(run, 1, *both, "--total", 9, script=SCRIPT)

    def said():
        store = open_store(str(run))
        report = with_contents(audit(store), store, both)
        return next(c for c in report.checks if c.name == "contents")

    assert said().ok, said().detail
    assert "exclusion list 1 of web is in force from step 4 on" in said().detail
    assert "exclusion list 1 of code is in force from step" in said().detail
    # a list that came before what was read under none is found
    shutil.rmtree(web / "excluded")
    assert not said().ok
