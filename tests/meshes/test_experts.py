"""Mixtures of experts: rows travel to the ranks that have their expert and back, routers are
balanced by what a whole step was given, and training is that of one rank that has all experts.
Longer runs: test_expert_worlds.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.core.world import BadInput
from harness.look.audit.audit import audit
from harness.meshes.expert_parallel import _check
from harness.worker.gradients.router_loads import Loads
from harness.worker.process_group import Peers
from storage.stores.store_urls import open_store
from support.worlds import same_training, train

SUPPORT = Path(__file__).parents[1] / "support"
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, Shape  # noqa: E402
from moe import Experts, Mixture, MoE, Router, with_experts  # noqa: E402


@pytest.fixture(scope="module")
def ranks():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = SUPPORT / "expert_ranks.py"
    ended = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_layer_over_ranks_computes_what_the_whole_one_does(ranks):
    """Outputs, and gradients of inputs, experts and router."""
    for rank in ranks:
        assert rank["far"] < 1e-5 and rank["far, computed again"] < 1e-5
        assert rank["far, bf16"] < 2e-2


def test_an_expert_sees_rows_by_rank_and_then_as_they_come(ranks):
    sent = [row for rank in ranks for row in rank["order"]["sent"]]
    for number, rank in enumerate(ranks):
        own = (2 * number, 2 * number + 1)
        [(rows, counts)] = rank["order"]["given"]
        assert rows == [row for expert in own for row in sent if row[1] == expert]
        assert counts == [sum(row[1] == expert for row in sent) for expert in own]
        sums = [[float(sum(map(sum, (r for r in sent if r[1] == expert))))] for expert in own]
        assert rank["order"]["scale"] == sums  # its gradient: of all ranks' rows


def test_rows_come_back_in_their_order_and_so_do_their_gradients(ranks):
    for rank in ranks:
        scales = [row[1] + 1 for row in rank["order"]["sent"]]
        assert rank["order"]["grad"] == [[scale] * 3 for scale in scales]
        back = [
            [scale * x for x in row] for scale, row in zip(scales, rank["order"]["sent"], strict=True)
        ]
        assert rank["order"]["back"] == back


def dense(moe, x):
    """Each token through each of its experts, one by one."""
    which, gates, _ = moe.router(x)
    out, e = torch.zeros_like(x), moe.experts
    for token, (some, weights) in enumerate(zip(which, gates, strict=True)):
        for expert, weight in zip(some.tolist(), weights, strict=True):
            hidden = torch.nn.functional.silu(e.gate[expert] @ x[token]) * (e.up[expert] @ x[token])
            out[token] += weight * (e.out[expert] @ hidden)
    return out


@pytest.mark.parametrize("gates", ["sigmoid", "softmax"])
def test_the_reference_layer_is_the_sum_of_its_experts(gates):
    torch.manual_seed(0)
    moe = MoE(8, Mixture(experts=6, top_k=3, hidden=16, gates=gates))
    moe.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(moe(x).flatten(0, 1), dense(moe, x.flatten(0, 1)))
    _, weights, _ = moe.router(x.flatten(0, 1))
    ones = torch.ones(10)
    assert torch.allclose(weights.sum(1), ones) == (gates == "sigmoid")


def test_balancing_evens_out_what_experts_are_given():
    torch.manual_seed(0)
    router = Router(8, Mixture(experts=8, top_k=2, speed=0.01))
    x = torch.randn(256, 8) + 1.0  # some experts suit all tokens

    def spread():
        router.expert_load.zero_()
        router(x)
        return int(router.expert_load.max() - router.expert_load.min())

    before = spread()
    for _ in range(100):
        spread()
        router.rebalance(router.expert_load)
    assert spread() < before / 4


def test_a_gpt_with_experts_starts_as_one_without_and_learns():
    torch.manual_seed(0)
    model = with_experts(GPT(Shape(2, 16, 2), 12), Mixture(experts=4, top_k=2, hidden=16))
    tokens = torch.randint(256, (4, 12))
    model(tokens).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert {type(block.mlp) for block in model.blocks} == {MoE}


class Counted(torch.nn.Module):
    """Two routers, one of which computes again in the backward."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (Router(4, Mixture(experts=n, top_k=1, speed=1.0)) for n in (3, 2))

    def forward(self, x):
        gates = self.one(x)[1]
        return torch.utils.checkpoint.checkpoint(self.two, x, use_reentrant=False)[1] * gates


def test_loads_are_those_of_micro_batches_that_count():
    """Not those of fillers, of evaluations, of what a backward computes again, nor of a first
    attempt."""
    torch.manual_seed(0)
    model = Counted()
    loads = Loads(model, Peers({}))
    given = []
    for router in (model.one, model.two):
        router.rebalance = lambda load, of=router: given.append(load.tolist())
    x = torch.randn(10, 4)

    def micro(number, counts=True):
        loads.take_up(number, counts)
        loss = model(x).sum()
        loads.note()
        loss.backward()

    model(x)  # of nothing
    micro(0)
    micro(0)  # once more
    micro(1)
    micro(1, counts=False)
    with torch.no_grad():
        model(x)
    loads.settle()
    expected = [2 * torch.bincount(r(x)[0].flatten(), minlength=n) for r, n in
                ((model.one, 3), (model.two, 2))]  # fmt: skip
    assert given == [load.tolist() for load in expected]
    micro(0)
    loads.settle()
    assert given[2:] == [(load // 2).tolist() for load in expected]


def test_a_rank_of_several_in_a_replica_cannot_count():
    peers = Peers({"WORLD_SIZE": "2"}, replica_ranks=2)
    with pytest.raises(BadInput, match="Router counts the tokens of its rank: wanted ranks with"):
        Loads(Counted(), peers)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Experts(4, Mixture(experts=3, top_k=1)), "a multiple of ep=2; found {'gate': (3, 256, 4)"),
        (torch.nn.Linear(4, 2), "first dimension is the experts'"),
        (torch.nn.LayerNorm(3), "a multiple of ep=2"),
        (torch.nn.Identity(), "found none"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4)), "found modules in it"),
    ],
)
def test_modules_of_other_kinds_are_refused(module, says):
    if isinstance(module, torch.nn.Linear):
        module.register_parameter("scale", torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(BadInput, match=r"blocks\.0") as refused:
        _check(module, "blocks.0", 2)
    assert says in str(refused.value)


def test_two_ranks_that_share_experts_train_as_one(tmp_path):
    script = SUPPORT / "mixture.py"
    train(tmp_path / "one", 1, "--total", 6, "--out", tmp_path / "one.json", script=script)
    env = {"HARNESS_MESH": "dp_shard=2,ep=2"}
    flags = ("--total", 6, "--out", tmp_path / "two.json")
    train(tmp_path / "two", 2, *flags, env=env, script=script)
    same_training(tmp_path / "two", tmp_path / "one")
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert two["bias"] == one["bias"] and any(map(any, one["bias"]))
    assert two["held"] == 0.5 and two["sum"] == pytest.approx(one["sum"], rel=1e-5)
    assert audit(open_store(str(tmp_path / "two"))).ok
