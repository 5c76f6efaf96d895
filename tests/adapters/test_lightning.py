"""Lightning's Trainer, unchanged: on any world, killed and resumed, as if it had been alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import environment, history, newest

SCRIPT = Path(__file__).parent / "scripts" / "lightning_plain.py"
PRELOAD = "lightning.pytorch"


def plain(folder, *flags):
    """The script as everybody runs it."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--folder", str(folder), *map(str, flags)],
        env=environment() | {"HARNESS_ADAPT": "none"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return plain(tmp_path_factory.mktemp("plain"))


def events(folder):
    return (folder / "events").read_text().splitlines()


def numbers(lines):
    """Every event as its words and its numbers."""
    return [
        (re.sub(r"[\d.]+", "#", line), [float(n) for n in re.findall(r"\d+\.?\d*", line)])
        for line in lines
    ]


def same(one, other, rel=1e-4):
    """The same events in the same order, with the same numbers but for rounding."""
    assert [what for what, _ in numbers(one)] == [what for what, _ in numbers(other)]
    for (_, mine), (what, theirs) in zip(numbers(one), numbers(other), strict=True):
        assert mine == pytest.approx(theirs, rel=rel, abs=2e-5), what


def ended(folder):
    said = json.loads((folder / "ended").read_text())
    return [*said["weights"], said["steps"], said["best"], said["metrics"]["train_loss_epoch"]]


def sound(run):
    assert not [check for check in audit(open_store(str(run))).checks if not check.ok]
    assert newest(run).data["final"]


def test_alone_it_is_lightning_to_the_bit(alone, go):
    go(1)
    assert events(go.folder) == events(alone)
    assert (go.folder / "ended").read_text() == (alone / "ended").read_text()
    sound(go.url)


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_worlds_train_the_same(alone, go, world):
    go(world)
    same(events(go.folder), events(alone))
    assert ended(go.folder) == pytest.approx(ended(alone), rel=1e-5)
    assert {r.world for r in history(go.url)} == {world}
    sound(go.url)


@pytest.mark.parametrize(("die_at", "resumed"), [(5, 3), (7, 6), (12, 9)])
def test_it_goes_on_where_it_was_killed_in_another_world(alone, go, die_at, resumed):
    go(3, die_at=(die_at, resumed), codes=(-9,))
    before = events(go.folder)
    (go.folder / "events").unlink()
    said = go(2)
    assert f"resumed from step {resumed}" in said.output
    assert "not resumable" not in said.output  # Lightning warns where it cannot go on amid an epoch
    after = events(go.folder)
    # what was done after the snapshot is done again, and nothing else
    done = len(events(alone)) - len(after)
    same(after, events(alone)[done:])
    same(before, events(alone)[: len(before)])
    assert ended(go.folder) == pytest.approx(ended(alone), rel=1e-4)
    assert [path.name for path in (go.folder / "board").iterdir()] == ["version_0"]
    sound(go.url)


def test_at_an_epochs_end_nothing_is_repeated(tmp_path, go):
    flags = ("--max-steps", 13, "--accumulate", 5, "--epochs", 5)
    expected = events(plain(tmp_path / "plain", *flags))  # 3 steps an epoch, snapshots at 3, 6, ...
    go(2, *flags, die_at=(7, 6), codes=(-9,))
    (go.folder / "events").unlink()
    assert "resumed from step 6" in go(1, *flags).output
    assert events(go.folder)[0] == "epoch_start 6"
    same(events(go.folder), expected[-len(events(go.folder)) :])
    assert not any("exception" in line for line in events(go.folder))


def test_exact_sums_and_dropout_are_the_same_on_any_world(go, tmp_path_factory):
    flags = ("--dropout", 0.3, "--shuffle", "--epochs", 2)
    go(3, *flags, reduce="exact")
    first = history(go.url)
    weights = newest(go.url).data["weights"]
    os.rename(go.url, go.url.with_name("first"))
    go(1, *flags, reduce="exact")
    assert [r.loss for r in history(go.url)] == [r.loss for r in first]
    assert [r.contents for r in history(go.url)] == [r.contents for r in first]
    assert newest(go.url).data["weights"] == weights


def test_a_step_that_is_done_again_is_logged_once(tmp_path, go):
    flags = ("--spike", 4, "--epochs", 2)
    expected = plain(tmp_path / "plain", *flags)
    said = go(2, *flags, reduce="exact")
    assert "is done again" in said.output
    same(events(go.folder), events(expected))
    assert ended(go.folder) == pytest.approx(ended(expected), rel=1e-5)
    sound(go.url)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 3)])
def test_a_batch_that_training_step_skips_is_no_error(tmp_path, go, world, accumulate):
    """A whole step without a loss: the optimizer does not step, as without the harness."""
    flags = ("--skip", 3, "--accumulate", accumulate, "--epochs", 2)
    expected = plain(tmp_path / "plain", *flags)
    go(world, *flags)
    assert ended(go.folder)[:-3] == pytest.approx(ended(expected)[:-3], rel=1e-5)
    skipped = [r.step for r in history(go.url) if r.weight == 0]
    assert bool(skipped) == (accumulate == 1)
    sound(go.url)


def test_what_is_not_heeded_on_slurm_is_said(go, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    output = go(1, "--epochs", 1).output
    assert "Slurm requeue are not heeded" in output
    assert "Events keeps fits (int), which a resumed run begins anew" in output


@pytest.mark.parametrize("world", [1, 2])
def test_threads_that_outlive_fit_are_ours_by_name_and_stop_no_script(alone, go, world):
    """Snapshots, facts and signs of life go on until the script ends; nothing else is left."""
    go(world, "--epochs", 1)
    left = set((go.folder / "threads").read_text().splitlines())
    others = set((alone / "threads").read_text().splitlines())  # TensorBoard's
    ours = re.compile(r"(facts|stage|snapshot|own-work|upload-(lane|\d+-e\d+)) True")
    assert "snapshot True" in left and all(map(ours.fullmatch, left - others)), left


def test_the_other_copy_of_lightning_and_early_stopping(tmp_path, go):
    flags = ("--package", "pytorch_lightning", "--patience", 1, "--epochs", 30, "--val-every", 1.0)
    expected = plain(tmp_path / "plain", *flags, "--rate", 0.3)
    go(2, *flags, "--rate", 0.3)
    same(events(go.folder), events(expected), rel=1e-3)
    assert ended(go.folder)[-3] < 150
    sound(go.url)


def test_the_first_world_decides_the_batch(go):
    go(2, "--strategy", "ddp", "--accumulate", 2, first_world=2, die_at=(5, 3), codes=(-9,))
    assert [r.samples for r in history(go.url)] == [16, 16, 16]
    go(1, "--strategy", "ddp", "--accumulate", 2, first_world="")
    assert [r.samples for r in history(go.url)][:8] == [16, 16, 16, 4] * 2
    assert {r.world for r in history(go.url)} == {1, 2}


def test_several_optimizers_by_hand_go_on_where_they_were(tmp_path, go):
    flags = ("--odd", "manual", "--epochs", 2, "--samples", 24)
    expected = plain(tmp_path / "plain", *flags)
    go(1, *flags, die_at=(8, 6), codes=(-9,))
    (go.folder / "events").unlink()
    assert "resumed from step 6" in go(1, *flags).output
    same(events(go.folder), events(expected)[-len(events(go.folder)) :])
    assert ended(go.folder) == pytest.approx(ended(expected), rel=1e-6)
    assert [r.samples for r in history(go.url)] == [4] * 12
    sound(go.url)


# ---- a model that is split over two ranks ---------------------------------------------------------
SPLIT = ("--split", "--accumulate", 2, "--epochs", 2)  # a validation before step 3 ends
COPIES = {"mesh": "dp_shard=2", "first_world": 2}


@pytest.fixture(scope="module")
def split(of_two):
    return of_two(*SPLIT)


def test_one_copy_of_a_split_model_is_lightning_to_the_bit(split, go):
    go(2, *SPLIT, **COPIES)
    assert events(go.folder) == events(split)
    assert (go.folder / "ended").read_text() == (split / "ended").read_text()
    sound(go.url)


def test_two_copies_are_killed_and_one_goes_on(split, go):
    go(4, *SPLIT, **COPIES, die_at=(5, 3), codes=(-9,))
    before = events(go.folder)
    (go.folder / "events").unlink()
    assert "resumed from step 3" in go(2, *SPLIT, **COPIES).output
    after = events(go.folder)
    same(before, events(split)[: len(before)])
    same(after, events(split)[-len(after) :])
    assert ended(go.folder) == pytest.approx(ended(split), rel=1e-4)
    assert [r.samples for r in history(go.url)] == [16, 16, 16, 4] * 2
    assert {r.world for r in history(go.url)} == {2, 4}
    sound(go.url)


@pytest.mark.parametrize(
    ("flags", "mesh", "said"),
    [
        (("--split",), "", "say how many share one: `harness run --mesh dp_shard=8`"),
        ((), "dp_shard=2", "2 ranks shall share a copy of the model"),
        (("--split",), "tp=2", "wanted --mesh dp_shard=2,tp=1"),
        (("--split", "--odd", "outside"), "dp_shard=2", "parameter unused.weight is outside"),
    ],
)
def test_what_does_not_fit_to_copies_is_said(go, flags, mesh, said):
    output = go(2, *flags, mesh=mesh, first_world=2, codes=(1,)).output
    assert "BadInput" in output and said in output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--strategy", "fsdp"), "FSDP of version 1 keeps its shards in flat buffers"),
        (("--odd", "scheduler"), "GradientAccumulationScheduler"),
        (("--odd", "loaders"), "wanted one train dataloader, found 2"),
        (("--odd", "iterator"), "training_step(dataloader_iter)"),
        (("--odd", "lbfgs"), "LBFGS"),
        (("--odd", "manual"), "Two optimizes by itself"),
    ],
)
def test_what_cannot_be_promised_is_said_before_the_first_step(go, flags, said):
    output = go(1, *flags, first_world=2, codes=(1,)).output
    assert said in output and "BadInput" in output
    assert not (go.folder / "events").exists() or events(go.folder) == ["exception_BadInput 0"]
