"""DeepSpeed under Lightning's Trainer, unchanged: on one copy of the model and on several, killed and
moved, it does what torchrun does on one copy."""

import os

import pytest

pytest.importorskip("lightning")
pytest.importorskip("deepspeed")

from adapters.test_lightning import SCRIPT, ended, events, same, sound
from support.worlds import history

__all__ = ["SCRIPT"]

PRELOAD = "lightning.pytorch,deepspeed"
# of whole steps: at an epoch's end DeepSpeed alone goes on accumulating, while Lightning counts anew
FLAGS = ("--samples", 48, "--accumulate", 2, "--epochs", 3)
COPIES = {"mesh": "dp_shard=2", "first_world": 2}
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module", params=[1, 2, 3])
def zero(request, of_two):
    """The flags of a stage of ZeRO, and the folder of the script that ran with them alone."""
    flags = (*FLAGS, "--zero", request.param)
    return flags, of_two(*flags)


def test_one_copy_is_lightning_to_the_bit(zero, go):
    flags, alone = zero
    go(2, *flags, **COPIES)
    assert events(go.folder) == events(alone)
    assert (go.folder / "ended").read_text() == (alone / "ended").read_text()
    sound(go.url)


def test_one_copy_is_killed_then_two_and_one_goes_on(zero, go):
    flags, alone = zero
    whole, parts = events(alone), []
    for ranks, dies in ((2, (5, 3)), (4, (8, 6)), (2, ("", 0))):
        output = go(ranks, *flags, **COPIES, die_at=dies, codes=(-9,) if dies[0] else (0,)).output
        parts.append(events(go.folder))
        (go.folder / "events").unlink()
    assert "resumed from step 6" in output
    same(parts[0], whole[: len(parts[0])])
    from_step_3 = whole.index("batch_end_0 3") - 1
    same(parts[1], whole[from_step_3 : from_step_3 + len(parts[1])])
    same(parts[2], whole[-len(parts[2]) :])
    assert ended(go.folder) == pytest.approx(ended(alone), rel=1e-4)
    assert {r.world for r in history(go.url)} == {2, 4}
    sound(go.url)


def test_a_first_world_of_two_copies_and_a_short_step(go):
    """Their losses count as those of one engine over all ranks; an epoch's last step is short."""
    flags = ("--accumulate", 2, "--epochs", 2, "--zero", 2)
    go(4, *flags, mesh="dp_shard=4", first_world=4)
    of_one = history(go.url)
    go.url.rename(go.url.with_name("one"))
    go(2, *flags, mesh="dp_shard=2", first_world=4)
    of_two = history(go.url)
    assert [r.samples for r in of_two] == [r.samples for r in of_one] == [32, 20] * 2
    assert [r.loss for r in of_two] == pytest.approx([r.loss for r in of_one], rel=1e-5)


def test_on_ranks_that_are_copies_it_is_refused_by_name(go):
    output = go(1, "--strategy", "deepspeed_stage_2", codes=(1,)).output
    assert "BadInput" in output and "say how many share one" in output
    output = go(2, "--zero", 2, mesh="tp=2", first_world=2, codes=(1,)).output
    assert "wanted --mesh dp_shard=2,tp=1" in output
