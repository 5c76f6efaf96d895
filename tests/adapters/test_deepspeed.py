"""DeepSpeed's engines under the harness, on CPUs (gloo): their ranks come and go, and are killed."""

import os
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, newest, same_training

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_zero.py"
PRELOAD = "deepspeed"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
KINDS = {
    "zero1": ("--stage", 1),
    "zero2": ("--stage", 2),
    "zero3": ("--stage", 3),
    "zero1-offload": ("--stage", 1, "--offload"),
    "zero2-offload": ("--stage", 2, "--offload"),
    "zero3-offload": ("--stage", 3, "--offload"),
}


@pytest.fixture
def zero(warm, tmp_path):
    """Train `run` to `total` on `world` ranks; `die_at`: the step in which all are killed."""

    def train(world, *flags, run="run", die_at="", codes=(0,)):
        env = {"DIE_AT": die_at, "DS_ACCELERATOR": "cpu", "HARNESS_ON_CHANGE": "accept"}
        return warm.train(tmp_path / run, world, *flags, script=SCRIPT, env=env, codes=codes)

    return train


@pytest.fixture(scope="module")
def plain(warm, tmp_path_factory):
    """Without DeepSpeed, on one rank, never stopped."""
    run = tmp_path_factory.mktemp("plain") / "run"
    warm.train(run, 1, "--plain", script=SCRIPT)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_come_and_go(zero, plain, tmp_path, kind):
    """Two ranks, killed; one; two again: the losses of one rank without DeepSpeed. The state of
    other stages is the same."""
    flags, run = KINDS[kind], tmp_path / "run"
    zero(2, *flags, die_at="4:3", codes=(-9, 1))
    assert newest(run).step == 3
    zero(1, *flags, "--total", 7)
    zero(2, *flags)
    same_training(run, plain)
    assert {r.world for r in history(run)} == {1, 2}
    assert audit(open_store(str(run))).ok


def test_any_stage_goes_on_from_any_other(zero, plain, tmp_path):
    for world, kind, total in (
        (2, "zero3", 3),
        (3, "zero1", 5),
        (1, "zero2-offload", 7),
        (3, "zero3-offload", 9),
        (2, "zero2", 10),
    ):
        zero(world, *KINDS[kind], "--total", total)
    same_training(tmp_path / "run", plain)


def test_a_snapshot_holds_each_parameter_whole_and_once(zero, tmp_path):
    zero(2, "--stage", 3, "--total", 3)
    zero(2, "--stage", 1, "--total", 3, run="other")
    state, other = (newest(tmp_path / run) for run in ("run", "other"))
    assert {n: e["shape"] for n, e in state.tensors.items()} == {
        n: e["shape"] for n, e in other.tensors.items()
    }
    assert state.tensors["model/0.weight"]["shape"] == [33, 16]
    assert state.tensors["optimizer/0/state/0/exp_avg"]["shape"] == [33, 16]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_low_precision_is_kept_to_the_bit(zero, tmp_path, stage):
    """bf16 and fp16, on the same world: killed and resumed, as if never."""
    for flags in (["--dtype", "bf16"], ["--dtype", "fp16", "--overflow"]):
        whole, cut = (f"{flags[1]}-{name}" for name in ("whole", "cut"))
        more = ("--stage", stage, *flags, "--clip", 0.5)
        first = zero(2, *more, run=whole).output
        zero(2, *more, run=cut, die_at="8:6", codes=(-9, 1))
        second = zero(2, *more, run=cut).output
        mine, theirs = history(tmp_path / cut), history(tmp_path / whole)
        assert [(r.loss, r.metrics["grad_norm"], r.lr) for r in mine] == [
            (r.loss, r.metrics["grad_norm"], r.lr) for r in theirs
        ]
        said = [[x for x in text.splitlines() if x.startswith("scale")] for text in (first, second)]
        assert said[0] == said[1]
        if "--overflow" in flags:
            assert said[0] and int(said[0][0].split()[-1]) >= 2, said


def test_who_is_asked_to_leave_does_so_behind_the_step_with_a_snapshot(zero, plain, tmp_path):
    zero(2, "--stage", 3, "--leave", 5, codes=(33,))
    assert newest(tmp_path / "run").step == 6  # the votes of step 5 had been cast
    zero(1, "--stage", 3)
    same_training(tmp_path / "run", plain)


def test_weights_of_tokens_and_a_clipping_of_deepspeeds_own(zero, plain, tmp_path):
    zero(1, "--plain", "--tokens", run="tokens")
    zero(3, "--stage", 2, "--tokens")
    same_training(tmp_path / "run", tmp_path / "tokens")
    own = '{"gradient_clipping": 0.5}'
    zero(2, "--stage", 3, "--clip", 1e9, "--config", own, run="own")
    same_training(tmp_path / "own", plain)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--stage", 0), "wanted a ZeRO optimizer"),
        (("--config", '{"managed_gradient_accumulation": false}'), "that the engine keeps"),
    ],
)
def test_what_cannot_be_is_refused(zero, flags, says):
    assert says in zero(1, *flags, codes=(1,)).output


def test_what_is_no_engine_is_refused():
    import harness

    with pytest.raises(harness.BadInput, match="pip install deepspeed"):
        harness.deepspeed(object(), None)
