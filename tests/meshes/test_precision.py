"""Low precision: what belongs to it is in the snapshot, so that a run that was killed goes on as if
it had not been; and rounding by chance is the same on any world."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import harness  # noqa: E402
from harness.meshes.stochastic_rounding import chance, round_into, round_stochastically  # noqa: E402
from support.worlds import history, train  # noqa: E402

PRECISE = Path(__file__).parents[1] / "support" / "precise.py"
CPU = torch.device("cpu")


def precise(folder, name, world, *flags, **how):
    """Train; what it says at its end."""
    out = folder / f"{name}.json"
    train(folder / name, world, *flags, "--out", out, script=PRECISE, **how)
    return json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ["--fused"]),
        (2, ["--fused", "--sharded"]),
        (2, ["--fp16"]),
        pytest.param(2, ["--fp16", "--sharded"], marks=pytest.mark.proof),
        pytest.param(2, ["--chance"], marks=pytest.mark.proof),
        pytest.param(2, ["--chance", "--sharded"], marks=pytest.mark.proof),
    ],
)
def test_a_killed_run_is_the_undisturbed_one_to_the_bit(tmp_path, world, flags):
    whole = precise(tmp_path, "whole", world, *flags)
    precise(tmp_path, "cut", world, *flags, "--die", 5, codes=(-9, 1))
    cut = precise(tmp_path, "cut", world, *flags)
    assert cut == whole
    told = [
        [(r.loss, r.metrics["grad_norm"]) for r in history(tmp_path / name)]
        for name in ("cut", "whole")
    ]
    assert repr(told[0]) == repr(told[1])  # where a loss does not fit fp16 a norm is no number
    if "--fp16" in flags:
        # begun with 2**8; halved in steps 2 and 8, doubled behind 5: the last was three steps on
        assert whole["scale"]["scale"] == 2.0**7 and whole["scale"]["_growth_tracker"] == 2


def test_rounding_by_chance_is_the_same_on_any_world(tmp_path):
    found = {
        world: precise(tmp_path, str(world), world, "--chance", "--reduce", "exact", "--total", 4)
        for world in (1, 2, 3)
    }
    assert found[1] == found[2] == found[3]


def test_its_bits_are_even_and_a_shard_has_those_of_its_place():
    shape = (600, 500)
    words = [chance(shape, (0, 0), shape, 1, update, 0, CPU).double() for update in (1, 2)]
    for each in words:
        assert each.mean() / 65536 == pytest.approx(0.5, abs=3e-3)
        assert each.var() / 65536**2 == pytest.approx(1 / 12, rel=1e-2)
    pairs = torch.stack([words[0].flatten()[:-1], words[0].flatten()[1:], words[1].flatten()[1:]])
    apart = torch.corrcoef(pairs) - torch.eye(3)
    assert apart.abs().max() < 0.01
    box = chance(shape, (300, 100), (50, 70), 1, 1, 0, CPU)
    assert torch.equal(box.double(), words[0][300:350, 100:170])


def test_a_small_update_is_right_in_the_mean_and_none_is_added_to_what_fits():
    ones = torch.ones(400, 500)
    p = torch.empty(400, 500, dtype=torch.bfloat16)
    for value in (1.003, -1.003):
        round_into(p, ones * value, seed=1, update=1)
        assert sorted(p.unique().float().abs().tolist()) == [1.0, 1.0078125]
        assert p.double().mean() == pytest.approx(value, abs=2e-5)
    odd = torch.tensor([1.5, 0.0, float("inf"), -float("inf"), float("nan"), 2.0**-130])
    most = torch.full((6,), 0xFFFF, dtype=torch.int32)
    assert round_stochastically(odd, most)[:4].tolist() == odd[:4].tolist() and round_stochastically(odd, most)[4].isnan()


def test_what_nearest_rounding_loses_is_kept():
    """A thousand updates of a thousandth of the last place."""
    kept, lost = (nn.Linear(40, 50, bias=False).to(torch.bfloat16) for _ in range(2))
    for model in (kept, lost):
        nn.init.constant_(model.weight, 1.0)
    by_chance = harness.StochasticRounding(torch.optim.SGD(kept.parameters(), lr=1e-5), seed=1)
    nearest = torch.optim.SGD(lost.parameters(), lr=1e-5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(by_chance, factor=1.0)  # takes it for one
    for _ in range(1000):
        for model, optimizer in ((kept, by_chance), (lost, nearest)):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        scheduler.step()
    assert float(lost.weight.detach().double().mean()) == 1.0
    assert float(kept.weight.detach().double().mean()) == pytest.approx(0.99, abs=1e-3)


def test_only_bf16_is_rounded_and_others_are_left_as_they_are():
    with pytest.raises(harness.BadInput, match="wanted bfloat16 parameters, found float32"):
        harness.StochasticRounding(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    mixed = nn.ModuleList([nn.Linear(8, 8).to(torch.bfloat16), nn.LayerNorm(8)])
    twin = nn.LayerNorm(8)
    inner = torch.optim.Adam(mixed.parameters(), lr=0.01)
    optimizer, other = harness.StochasticRounding(inner), torch.optim.Adam(twin.parameters(), 0.01)
    for model, one in ((mixed, optimizer), (twin, other)):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        one.step()
    assert torch.equal(mixed[1].weight, twin.weight)
    assert {v["exp_avg"].dtype for v in optimizer.state.values()} == {torch.float32}
    assert optimizer.param_groups is inner.param_groups


def test_float8_names_what_it_wants():
    try:
        import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(harness.BadInput, match="pip install torchao"):
            harness.float8(nn.Linear(16, 16))
