"""A run that an old version wrote (tests/data/run-b30688c): it is read, reported, verified and
resumed to its end by this one."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from campaign import Campaign

from harness.bucket.beats import Beats
from harness.bucket.epochs import epoch_numbers, newest_epoch, read_epoch
from harness.bucket.journal import read_facts, read_records
from harness.bucket.layout import IDENTITY, Identity, Member, Term, member_key, member_of, term_key
from harness.bucket.lease import sign_of_life
from harness.bucket.orders import stop_order
from harness.core import records as rec
from harness.core.facts import (
    AgentEnded,
    AttemptEnded,
    EpochStarted,
    Fact,
    LeaseTaken,
    RunEnded,
    SnapshotCommitted,
    StepDone,
    Unreadable,
)
from harness.views.audit import audit
from harness.views.compare import compare
from harness.views.report_json import to_json
from harness.views.summary import summarize
from storage.files import FileStore
from storage.opening import open_store
from storage.probe import known
from storage.snapshots import Snapshots

DATA = Path(__file__).parent / "data" / "run-b30688c"
TOTAL, STOPPED_AT = 60, 18
# of a calm run of b30688c to step 60 on the machine that wrote this one
CALM = {
    "weights": "f706f36eed930356",
    "environment": {"device": "x86_64 AMD EPYC AVX512", "threads": "1", "torch": "2.13.0+cpu"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(DATA / "run.tar.gz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> FileStore:
    return FileStore(f"file://{folder}/run")


def kinds(store: FileStore, kind: type[Fact]) -> list[Fact]:
    return [s.fact for s in read_facts(store) if isinstance(s.fact, kind)]


def test_every_object_of_it_is_decoded(store: FileStore) -> None:
    identity = Identity.decode(store.get(IDENTITY))
    assert (identity.version, identity.samples, identity.micro_batches) == (1, 600, 3)
    assert epoch_numbers(store) == [1, 2, 3]
    epochs = [read_epoch(store, number) for number in (1, 2, 3)]
    assert [(e.world, e.reason, e.protocol) for e in epochs] == [
        (2, "start", 1), (1, "loss", 1), (2, "grow", 1),
    ]  # fmt: skip
    assert newest_epoch(store) == epochs[-1]
    names = [member_of(key) for key in store.list("rdzv/members/")]
    members = [Member.decode(store.get(member_key(name))) for name in names]
    assert [m.attempt for m in members] == [1, 2, 3] and {m.protocol for m in members} == {1}
    assert [m.state for m in members] == ["gone", "in", "gone"]  # the second was killed
    assert [b.gone for b in Beats(store, lambda: 0.0).look()] == [True, False, True]
    assert sign_of_life(store) == (1, b"released")
    assert Term.decode(store.get(term_key(1))).holder.startswith("node:")
    order = stop_order(store)
    assert order and (order.reason, order.by, order.failed) == ("asked to stop", "user", False)
    found = known(store)
    assert found and not found.missing
    snapshots = Snapshots(store)
    assert [ref.step for ref in snapshots.refs()] == [18, 16, 14]
    for ref in snapshots.refs():
        snapshots.verify(snapshots.load(ref))
    # what this version writes of the same is the same to the byte
    for epoch in epochs:
        assert epoch.encode() == store.get(f"rdzv/epochs/{epoch.epoch:06d}.json")
    for m in members:
        assert m.encode() == store.get(member_key(m.member))


def test_all_its_facts_and_records_are_read(store: FileStore) -> None:
    facts = read_facts(store)
    assert not [s for s in facts if isinstance(s.fact, Unreadable) or type(s.fact) is Fact]
    assert [e.end for e in kinds(store, AttemptEnded)] == ["failed", "terminated", "terminated"]
    assert [e.reason for e in kinds(store, EpochStarted)] == ["start", "loss", "grow"]
    assert {s.step for s in kinds(store, SnapshotCommitted)} >= {8, 14, 16, 18}
    assert len(kinds(store, AgentEnded)) == 2 and len(kinds(store, RunEnded)) == 1
    assert {s.step for s in kinds(store, StepDone)} <= set(range(1, STOPPED_AT + 1))
    newest = Snapshots(store).latest()
    named = rec.named(newest.data) if newest else None
    assert named
    genesis = rec.genesis(Identity.decode(store.get(IDENTITY)).body)
    records = read_records(store, named.key, named.head, genesis)
    assert [r.step for r in records] == list(range(1, STOPPED_AT + 1))


def test_it_is_reported_and_verified(store: FileStore, folder: Path) -> None:
    summary = summarize(store)
    assert summary.problems == () and len(summary.ledger.epochs) == 3
    body = json.loads(json.dumps(to_json(summary)))
    assert "stopped" in json.dumps(body) and len(body["attempts"]) == 3
    found = audit(store)
    assert found.ok, found.first_violation
    for words in (["status", "--json"], ["report", "--json"], ["verify"], ["snapshots", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", *words, str(folder / "run")],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_led_and_resumed_to_its_end(store: FileStore, folder: Path) -> None:
    """By a controller, an agent and a worker of this version; with the same samples and weights
    as if nothing had happened."""
    shutil.copytree(folder / "run", folder / "before")
    campaign = Campaign(folder, nodes="1:1", flags=f"--total={TOTAL}")
    campaign.task.write_text(
        campaign.task.read_text().replace(str(Path(__file__).parent / "trainer.py"), str(DATA / "train.py"))
    )
    campaign.launch()
    assert campaign.wait() == 0, campaign.log.read_text()
    newest = Snapshots(store).latest()
    assert newest and newest.step == TOTAL and Snapshots(store).ended(newest)
    found = audit(store)
    assert found.ok, found.first_violation
    assert [t.term for t in kinds(store, LeaseTaken)] == [1, 2]
    assert [e.epoch for e in kinds(store, EpochStarted)] == [1, 2, 3, 4]
    assert [e.outcome for e in kinds(store, RunEnded)] == ["stopped", "done"]
    # it went on from what was committed: the old steps are the same, and none was done again
    pair = compare(open_store(str(folder / "before")), store)
    assert pair.identical_until == STOPPED_AT
    assert pair.first_other_samples is None
    if newest.data["environment"] == CALM["environment"]:
        assert newest.data["weights"] == CALM["weights"]
