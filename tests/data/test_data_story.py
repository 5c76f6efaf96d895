"""A poisoned document in a corpus: from the spike of the loss to its name, in one command; then it is
left out, and the run goes on."""

from pathlib import Path

import pytest

import harness
from harness.core.batch import Batching, indices_at, positions_of
from harness.data.verify import TokenRow
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from storage.stores.store_urls import open_store
from support.corpora import command, poison, poisoned
from support.worlds import history, train

pytestmark = pytest.mark.proof
SCRIPT = str(Path(__file__).parents[1] / "support" / "corpus_trainer.py")
LENGTH = 256


@pytest.mark.parametrize("kind", ["repeated", "noise", "script"])
def test_from_a_spike_to_its_document_which_is_left_out_then(tmp_path, kind):
    url, run = poisoned(tmp_path, kind, n=6000), tmp_path / "run"
    row = TokenRow(url, "train")
    [(start, end)] = [
        (at, at + len(ids))
        for at, ids in row.documents()
        if bytes(ids.tolist()).decode() == poison(kind)
    ]
    batching = Batching(len(harness.data.Tokens(url, LENGTH)), 12, 3, 7)

    def reads_it(step):
        items = indices_at(batching, positions_of(batching, step)).tolist()
        return any(i * LENGTH < end - 100 and (i + 1) * LENGTH > start + 100 for i in items)

    first = next(step for step in range(150, 500) if reads_it(step))
    train(run, 2, url, "--length", LENGTH, "--total", first + 2, script=SCRIPT)
    found = command("spikes", run, "--data", url)
    assert found.returncode == 0, found.stderr
    spikes = [int(part.partition(":")[0]) for part in f"\n{found.stdout}".split("\nstep ")[1:]]
    assert first in spikes and reads_it(spikes[0]), found.stdout
    # of each spike that it made, the document is the first that is named
    for part in f"\n{found.stdout}".split("\nstep ")[1:]:
        if reads_it(int(part.partition(":")[0])):
            named = int(part.partition("--token ")[2].split()[0])
            assert start <= named < end, found.stdout

    left = command("exclude", url, "--token", named, "--reason", "a spike", "--yes")
    assert "exclusion list 1" in left.stdout
    later = next(step for step in range(first + 3, 1000) if reads_it(step))
    train(run, 1, url, "--length", LENGTH, "--total", later + 1, script=SCRIPT)
    losses = {record.step: record.loss for record in history(run)}
    assert len(losses) == later + 1 and losses[later] < (losses[first] + losses[first - 1]) / 2
    store = open_store(str(run))
    report = with_contents(audit(store), store, url)
    said = report.checks[-1].detail
    assert report.ok and f"exclusion list 1 is in force from step {later} on" in said
    again = command("spikes", run, "--data", url, "--step", later, "--samples", 1)
    assert "left out by now" in again.stdout and "--token" not in again.stdout
