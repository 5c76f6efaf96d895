"""Loops around Lightning Fabric: unchanged, and with the elastic one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import environment, history

SCRIPT = Path(__file__).parent / "scripts" / "fabric_plain.py"
PRELOAD = "lightning.fabric"


def events(folder):
    return (folder / "events").read_text().splitlines()


def plain(folder, *flags):
    """The script as everybody runs it."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--folder", str(folder), *map(str, flags)],
        env=environment() | {"HARNESS_ADAPT": "none", "HARNESS_ATTACH": '{"seed": 1}'},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def sound(run):
    assert not [check for check in audit(open_store(str(run))).checks if not check.ok]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Steps of three micro-batches on one rank, by the elastic Fabric, never stopped."""
    return plain(tmp_path_factory.mktemp("alone"), "--elastic", 3, "--epochs", 2)


def test_alone_it_is_fabric_to_the_bit(go, tmp_path):
    plain(tmp_path / "plain", "--epochs", 1)
    go(1, "--epochs", 1)
    assert events(go.folder) == events(tmp_path / "plain")
    assert (go.folder / "ended").read_text() == (tmp_path / "plain" / "ended").read_text()
    sound(go.url)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loop_without_a_change_trains_the_same_on_uneven_worlds(alone, go, world):
    go(world, "--epochs", 2, first_world=3)
    assert events(go.folder) == events(alone)
    assert [r.samples for r in history(go.url)] == [12, 12, 12, 12, 4] * 2
    assert {r.world for r in history(go.url)} == {world}
    sound(go.url)


def test_with_the_elastic_fabric_nothing_is_repeated_after_a_kill(alone, go):
    flags = ("--elastic", 3, "--epochs", 2)
    # the other rank, which is elsewhere in its loop, misses it; no snapshot is left out because the
    # one before it is still being written
    go(2, *flags, "--sleep-s", 0.1, die_at=("1,2", 6), codes=(-9, 1))
    assert "resumed from step 6" in go(1, *flags).output
    assert events(go.folder) == events(alone)
    ended = [float((folder / "ended").read_text()) for folder in (go.folder, alone)]
    assert ended[0] == pytest.approx(ended[1], rel=1e-6)
    sound(go.url)


# ---- a model that is split over two ranks ---------------------------------------------------------
SPLIT = ("--split", "--epochs", 2)


def test_one_copy_of_a_split_model_is_fabric_to_the_bit(of_two, go):
    copies = {"mesh": "dp_shard=2", "first_world": 2}
    go(2, *SPLIT, **copies, die_at=("0,4", 3), codes=(-9,))
    assert "resumed from step 3" in go(2, *SPLIT, **copies).output
    plain = of_two(*SPLIT)
    assert events(go.folder) == events(plain)
    assert (go.folder / "ended").read_text() == (plain / "ended").read_text()
    sound(go.url)


def test_copies_of_a_split_model_come_and_go(go):
    """The last step of an epoch has one micro-batch: the second copy's body counts for nothing."""
    copies = {"mesh": "dp_shard=2", "first_world": 4}
    go(4, *SPLIT, **copies)
    calm = [(go.folder / name).read_text() for name in ("events", "ended")]
    for begins, killed in ((4, "0,3"), (2, "0,6")):
        shutil.rmtree(go.folder)
        shutil.rmtree(go.url)
        go(begins, *SPLIT, **copies, die_at=(killed, 3), codes=(-9,))
        assert "resumed from step 3" in go(6 - begins, *SPLIT, **copies).output
        assert (go.folder / "events").read_text() == calm[0]
        assert float((go.folder / "ended").read_text()) == pytest.approx(float(calm[1]), rel=1e-6)
        assert [r.samples for r in history(go.url)] == [16, 16, 16, 4] * 2
        assert {r.world for r in history(go.url)} == {2, 4}
        sound(go.url)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--by-hand", 2), "Fabric(accumulate=N)"),
        (("--second",), "wanted one optimizer in fabric.setup, found 2"),
    ],
)
def test_what_cannot_be_promised_is_said(go, flags, said):
    output = go(1, "--epochs", 1, *flags, codes=(1,)).output
    assert "BadInput" in output and said in output
