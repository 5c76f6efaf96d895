"""float8 products and optimizer states of few bits (torchao), on CPUs: killed and resumed, on this
world and on others."""

from pathlib import Path

import pytest

pytest.importorskip("torchao")

import torch
from torch import nn

import harness
from support.worlds import history, newest

SCRIPT = Path(__file__).parent / "scripts" / "torchao_loop.py"
PRELOAD = "torchao.float8,torchao.optim"


@pytest.fixture
def ao(warm, tmp_path):
    def train(world, *flags, run="run", die_at="", codes=(0,)):
        # torchao compiles its optimizers' step: minutes, and nothing of it is looked at here
        env = {"DIE_AT": die_at, "TORCHDYNAMO_DISABLE": 1}
        return warm.train(tmp_path / run, world, *flags, script=SCRIPT, env=env, codes=codes).output

    return train


def said(output, word="weights"):
    return next(line for line in output.splitlines() if line.startswith(word))


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ["--recipe", "tensorwise"]),
        (2, ["--recipe", "rowwise", "--sharded"]),
        (1, ["--bits", "8bit", "--bf16"]),
        (2, ["--bits", "8bit", "--sharded"]),
        (2, ["--bits", "4bit", "--sharded"]),
        (2, ["--bits", "Fp8", "--sharded", "--recipe", "tensorwise"]),
    ],
)
def test_a_killed_run_is_the_undisturbed_one_to_the_bit(ao, tmp_path, world, flags):
    whole = ao(world, *flags, run="whole")
    ao(world, *flags, run="cut", die_at="5:3", codes=(-9, 1))
    cut = ao(world, *flags, run="cut")
    assert said(cut) == said(whole) and said(cut, "kinds") == said(whole, "kinds")
    if "--bits" in flags:
        assert "OptimState" in said(cut, "kinds")
    assert [r.loss for r in history(tmp_path / "cut")] == [
        r.loss for r in history(tmp_path / "whole")
    ]


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_states_of_few_bits_go_to_other_worlds_by_whole_blocks(ao, tmp_path, bits):
    flags = ("--bits", bits)
    ao(1, *flags, run="whole")
    ao(2, *flags, "--sharded", "--total", 3)
    index = newest(tmp_path / "run").tensors
    assert index["optimizer/0/state/0/exp_avg/scale"]["shape"][0] in (64, 128)  # 16384 elements
    four = ao(4, *flags, "--sharded", "--total", 6)
    assert "OptimState" in said(four, "kinds")
    ao(1, *flags)
    assert [r.loss for r in history(tmp_path / "run")] == pytest.approx(
        [r.loss for r in history(tmp_path / "whole")], rel=1e-2
    )


def test_blocks_that_a_shard_would_cut_are_refused(ao):
    ao(2, "--bits", "8bit", "--sharded", "--total", 3)
    assert "wanted shards of whole blocks" in ao(
        3, "--bits", "8bit", "--sharded", "--total", 6, codes=(1, -9)
    )


def test_float8_changes_no_name_and_says_what_it_lacks():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 5))
    names = {name: t.dtype for name, t in model.state_dict().items()}
    with pytest.raises(harness.BadInput, match="found no GPU"):
        harness.float8(model)
    with pytest.raises(harness.BadInput, match="'rowwise_with_gw_hp'"):
        harness.float8(model, "no such recipe", emulate=True)
    with pytest.raises(harness.BadInput, match="found none"):
        harness.float8(nn.Linear(3, 5), emulate=True)
    harness.float8(model, "rowwise", emulate=True)
    assert {name: t.dtype for name, t in model.state_dict().items()} == names
    assert [type(m).__name__ for m in model] == ["Float8Linear", "ReLU", "Linear"]
    assert torch.isfinite(model(torch.randn(16, 32))).all()


class Halves(nn.Linear):
    """Begins in a way of its own."""

    def __init__(self, size, value):
        self.value = value
        super().__init__(size, size)

    def reset_parameters(self):
        nn.init.constant_(self.weight, self.value)
        nn.init.zeros_(self.bias)


def test_float8_layers_begin_as_they_would_have():
    with torch.device("meta"):
        model = nn.Sequential(Halves(32, 0.5), nn.ReLU(), nn.Linear(32, 64))
    harness.float8(model, "rowwise", emulate=True)
    assert [type(m).__name__ for m in model] == ["Float8Linear", "ReLU", "Float8Linear"]
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert torch.equal(model[0].weight, torch.full((32, 32), 0.5)) and not model[0].bias.any()
