"""BatchNorm whose running averages are those of one rank that did all micro-batches."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from harness.core.world import BadInput
from harness.worker.gradients.batch_norm import Norms
from harness.worker.gradients.parallel import strategy_for
from harness.worker.process_group import Peers
from support.worlds import history, train


def net(momentum=0.1):
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)]
    return nn.Sequential(nn.Linear(4, 4), norms[0], nn.Linear(4, 3), norms[1])


def buffers(model):
    return {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("times", [1, 2])
def test_averages_are_those_of_one_after_the_other(momentum, times):
    plain, model = net(momentum), net(momentum)
    norms = Norms(model, Peers({}))
    data = torch.randn(3, 5, 8, 4)
    for step in data:
        for x in step:
            for _ in range(times):
                plain(x)
        before = buffers(model)
        for m in (3, 1, 0, 4, 2):  # in any order
            norms.take_up(m, counts=True)
            for _ in range(times):
                given = model(step[m])
        assert all(torch.equal(b, before[name]) for name, b in buffers(model).items())
        norms.take_up(4, counts=True)  # done again
        for _ in range(times):
            assert torch.equal(model(step[4]), given) or m != 4
        norms.settle(5, exact=True)
        for name, b in buffers(plain).items():
            torch.testing.assert_close(buffers(model)[name], b)
    model.eval(), plain.eval()
    torch.testing.assert_close(model(data[0, 0]), plain(data[0, 0]))


def test_forwards_that_are_no_training_leave_the_averages_alone():
    model = net()
    norms = Norms(model, Peers({}))
    norms.take_up(0, counts=True)
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, again):  # not watched, and whole
        other(torch.randn(8, 4))
        assert int(other[1].num_batches_tracked) == 1
    with pytest.raises(ValueError, match="more than 1 value"):
        model(torch.randn(1, 4))
    assert model[1].momentum == 0.1 and int(model[1].num_batches_tracked) == 0
    model.eval()
    model(torch.randn(8, 4))
    model.train()
    norms.take_up(0, counts=True)
    model(torch.randn(8, 4))
    norms.take_up(1, counts=True)
    model[1](torch.randn(8, 4))
    with pytest.raises(BadInput, match="alike for every micro-batch"):
        norms.settle(2, exact=False)


def test_what_compiled_forwards_hide_is_told_where_it_matters(monkeypatch):
    """While torch.compile traces a forward, which takes many seconds to try."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model = net()
    norms = Norms(model, Peers({}))
    norms.take_up(0, counts=True)
    model(torch.randn(8, 4))
    norms.settle(1, exact=False)
    assert int(model[1].num_batches_tracked) == 1  # as torch does it
    norms.take_up(0, counts=True)
    model(torch.randn(8, 4))
    with pytest.raises(BadInput, match=r"does torch\.compile run them"):
        norms.settle(1, exact=True)


def test_norms_that_talk_to_other_ranks_need_equal_rounds():
    assert strategy_for(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))).equal_rounds
    assert not strategy_for(net()).equal_rounds


def test_every_world_ends_with_the_same_averages(tmp_path):
    told = []
    for world in (1, 3):
        flags = ("--norm", "--reduce", "exact", "--total", 6, "--samples", 96)
        flags += ("--global-batch", 20, "--out", tmp_path / "out")
        train(tmp_path / f"run{world}", world, *flags)
        told.append(json.loads((tmp_path / "out").read_text())["weights"])  # buffers as well
        assert len(history(tmp_path / f"run{world}")) == 6
    assert told[0] == told[1]
