"""Where a pipeline cuts a model, and which schedule takes how many micro-batches; and a model of
two stages beside the whole one."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.core.batch import Grouping
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from harness.meshes.pipeline import Pipeline
from harness.meshes.pipeline_cut import STAGES_OF_A_RANK, cut_model, even, stages_of, turns
from storage.stores.store_urls import open_store
from storage.tensors import state_tree
from support.worlds import history, same_training, train

PIPED = Path(__file__).parents[1] / "support" / "piped.py"


def greatest(sizes, firsts):
    return max(sum(sizes[i:j]) for i, j in zip(firsts, [*firsts[1:], len(sizes)], strict=True))


@pytest.mark.parametrize(
    "sizes",
    [[5, 1, 1, 1, 5], [1, 1, 1, 1, 1, 1, 1], [9, 0, 1, 0, 1, 1], [1, 2, 3, 4, 5, 0], [100, 1, 1]],
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_are_as_even_as_can_be(sizes, stages):
    firsts = even(sizes, stages)
    assert len(firsts) == stages and firsts[0] == 0 and firsts == sorted(set(firsts))
    assert all(sizes[i] for i in firsts[1:])  # nothing without parameters begins a stage
    rest = [i for i in range(1, len(sizes)) if sizes[i]]
    possible = [[0, *some] for some in itertools.combinations(rest, stages - 1)]
    assert greatest(sizes, firsts) == min(greatest(sizes, other) for other in possible)


def test_more_stages_than_modules_are_refused():
    with pytest.raises(BadInput, match="wanted a model of as many modules"):
        even([1, 0, 2], 3)


@pytest.mark.parametrize("schedule", STAGES_OF_A_RANK)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_number_of_micro_batches_is_taken(schedule, ranks):
    of_ranks = [stages_of(schedule, ranks, rank) for rank in range(ranks)]
    everyone = sorted(stage for some in of_ranks for stage in some)
    assert everyone == list(range(ranks * STAGES_OF_A_RANK[schedule]))
    for micro_batches in range(1, 30):
        found = turns(schedule, micro_batches, ranks)
        assert sum(count for _, count in found) == micro_batches and len(found) <= 2
        for name, count in found:  # what torch's schedules ask for
            if name == "1f1b":
                assert count >= ranks
            if name in ("interleaved", "zero-bubble"):
                assert count % max(1, count // ranks) == 0


def test_which_stage_a_rank_has():
    grouping = Grouping(ranks=4, stages=2, abreast=2)  # pp=2, dp_shard=2, tp=2
    assert [grouping.stage(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert [rank for rank in range(16) if grouping.leads(rank)] == [0, 2, 8, 10]
    assert [rank for rank in range(8) if grouping.leads_stage(rank)] == [0, 2, 4, 6]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.inner(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.table = nn.Linear(4, 4), nn.Identity()
        self.layers = nn.ModuleDict({"body": nn.ModuleList(Block() for _ in range(4))})
        self.register_buffer("scale", torch.ones(1))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        body = self.layers["body"] if len(self.layers) else []
        for block in body:
            x = block(self.table(x * self.scale))
        return x if self.head is None else self.head(x)


def names_of(module):
    return {name for name, _ in module.named_parameters()}


def test_stages_keep_the_names_of_the_whole_model():
    whole = Model()
    everyone = names_of(whole)
    parts = [cut_model(Model(), [i], 3, everywhere=["table"])[0][0] for i in range(3)]
    assert [names_of(p) for p in parts] == [
        {n for n in everyone if n.startswith(tops)}
        for tops in (
            ("embed", "layers.body.0"),
            ("layers.body.1", "layers.body.2"),
            ("layers.body.3", "head"),
        )
    ]
    assert all("scale" in dict(part.named_buffers()) for part in parts)
    assert all(part.table is not None for part in parts)
    parts, units = cut_model(whole, [0, 2], 3, cuts=["layers.body.1", "head"], everywhere=["table"])
    assert [names_of(p) for p in parts] == [
        {n for n in everyone if n.startswith(("embed", "layers.body.0"))},
        {"head.weight", "head.bias"},
    ]
    assert list(units) == [0, 1, 5] and names_of(whole) == everyone  # which is left as it was


def test_a_pipelines_state_is_the_models():
    """Of two stages on one rank, loaded from a whole model's and given back."""
    whole, other = Model(), Model()
    (first, last), units = cut_model(other, [0, 2], 3, cuts=["layers.body.1", "head"])
    pipe = Pipeline([first, last], [0, 2], 3, "interleaved", nn.functional.mse_loss, [])
    pipe.draw_alike(units)
    pipe.load_state_dict(whole.state_dict())  # what is of other stages is passed over
    state = whole.state_dict()
    assert {n for n, _ in pipe.named_parameters()} | {"scale"} == set(pipe.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
    assert pipe.get_submodule("head") is last.head and pipe.get_submodule("embed") is first.embed
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        pipe.load_state_dict({n: v for n, v in state.items() if n != "head.bias"})
    ema = torch.optim.swa_utils.AveragedModel(pipe)
    ema.load_state_dict({f"module.{n}": v for n, v in state.items()} | {"n_averaged": torch.ones(())})
    assert torch.equal(ema.state_dict()["module.head.bias"], state["head.bias"])
    with pytest.raises(BadInput, match=r"wanted step\.pipeline"):
        pipe(torch.zeros(1, 4))


def test_what_is_drawn_depends_on_the_place_in_the_model_only():
    """Of a dropout, whatever was drawn before, and in whichever stage it is."""
    whole, part = Model(), Model()
    part.load_state_dict(whole.state_dict())
    (of_whole,), units = cut_model(whole, [0], 1)
    alone = Pipeline([of_whole], [0], 1, "1f1b", nn.functional.mse_loss, [])
    alone.draw_alike(units)
    (second,), units = cut_model(part, [1], 2, cuts=["layers.body.2"])
    staged = Pipeline([second], [1], 2, "1f1b", nn.functional.mse_loss, [])
    staged.draw_alike(units)
    seen = []
    whole.layers["body"][2].register_forward_hook(lambda m, args, out: seen.append((args, out)))
    alone.drawn = staged.drawn = 7
    alone(torch.ones(8, 4))
    ((given, out),) = seen
    torch.rand(3)
    block = staged.get_submodule("layers.body.2")
    assert torch.equal(block(*given), out)
    staged.drawn = 8
    assert not torch.equal(block(*given), out)
    staged.drawn = None  # an evaluation draws as it likes
    assert not torch.equal(block(*given), block(*given))


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        (["layers"], "wanted names of modules to cut before, found 'layers'"),
        (["head", "embed"], "wanted 2 names in the model's order"),
        (["head"], "wanted 2 names in the model's order"),
        (["table", "layers.body.0"], "the stage that begins with 'table' has no parameters"),
    ],
)
def test_cuts_that_cannot_be_are_refused(cuts, says):
    with pytest.raises(BadInput, match="pipeline") as refused:
        cut_model(Model(), [0], 3, cuts=cuts)
    assert says in str(refused.value)


def test_parameters_of_several_stages_are_refused():
    tied = Model()
    tied.head.weight = tied.embed.weight
    with pytest.raises(BadInput, match=r"head\.weight is embed\.weight: tied weights of stages 0"):
        cut_model(tied, [0], 2)
    cut_model(tied, [0], 1)
    loose = Model()
    loose.shift = nn.Parameter(torch.zeros(4))
    with pytest.raises(BadInput, match="found shift"):
        cut_model(loose, [0], 2)
    with pytest.raises(BadInput, match="a module that every stage keeps"):
        cut_model(Model(), [0], 2, everywhere=["embed"])


def test_parts_of_a_state_make_a_whole_one():
    """As rank 0 writes it, and as a stage takes its part of it."""
    one, two = torch.zeros(2), torch.ones(3)
    mine = {"model": {"a": one}, "optimizer": [{"state": {0: {"m": one, "n": 1}}, "lr": 2.0}]}
    theirs = {"model": {"b": two}, "optimizer": [{"state": {11: {"m": two, "n": 1}}, "lr": 2.0}]}
    (tensors, plain), (more, other) = state_tree.split(mine), state_tree.split(theirs)
    whole = state_tree.merged([plain, other])
    found = state_tree.join(tensors | more, whole)
    assert torch.equal(found["model"]["a"], one) and torch.equal(found["model"]["b"], two)
    assert found["optimizer"][0]["lr"] == 2.0 and list(found["optimizer"][0]["state"]) == [0, 11]
    kept = state_tree.join(tensors, state_tree.pruned(whole, tensors.__contains__))
    assert kept["model"]["b"] is None and kept["optimizer"][0]["state"][11]["m"] is None
    assert torch.equal(kept["optimizer"][0]["state"][0]["m"], one)


def test_two_stages_train_as_one_rank_does(tmp_path):
    train(tmp_path / "whole", 1, "--total", 4, script=PIPED)
    train(tmp_path / "two", 2, "--total", 4, script=PIPED, env={"HARNESS_MESH": "pp=2"})
    same_training(tmp_path / "two", tmp_path / "whole")
    assert [r.shares for r in history(tmp_path / "two")] == [(6,)] * 4
    assert audit(open_store(str(tmp_path / "two"))).ok
