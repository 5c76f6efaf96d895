"""Copies of a model that foreign code shards over the ranks of each: what they see as their world, and
the sums over copies."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.node.worker_gpus import GPU_INDEX, GPUS
from harness.worker import alone
from harness.worker.alone import CopyRanks
from harness.worker.gradients.copies import SummedCopies
from support.worlds import fork


def told(rank, local_rank, on_node, ranks):
    said = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": on_node}
    return CopyRanks.of({name: str(value) for name, value in said.items()}, ranks)


@pytest.mark.parametrize(
    ("place", "copy", "rank", "local", "node"),
    [
        ((3, 3, 4, 2), 1, 1, range(2, 4), 0),  # two copies on a node
        ((2, 2, 3, 2), 1, 0, range(2, 3), 0),  # a copy that begins on one node
        ((3, 0, 3, 2), 1, 1, range(0, 1), 1),  # and ends on the next
        ((9, 1, 4, 16), 0, 9, range(0, 4), 2),  # a copy of several nodes
    ],
)
def test_which_ranks_make_a_copy(place, copy, rank, local, node):
    found = told(*place)
    assert (found.number, found.rank, found.local, found.node) == (copy, rank, local, node)
    said = found.environment({"RANK": str(place[0]), "LOCAL_RANK": "0", "MASTER_ADDR": "here"})
    assert said["RANK"] == str(rank) and said["WORLD_SIZE"] == str(place[3])
    assert said["LOCAL_RANK"] == str(place[1] - local.start) and said["MASTER_ADDR"] == "here"
    assert said["LOCAL_WORLD_SIZE"] == str(len(local)) and said["GROUP_RANK"] == str(node)


def test_a_copy_sees_its_own_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LOCAL_WORLD_SIZE": "4", GPUS: "4"}
    told(3, 3, 4, 2).show_gpus(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert (environ[GPUS], environ[GPU_INDEX]) == ("2", "1")
    shared = {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_WORLD_SIZE": "4"}
    told(3, 3, 4, 2).show_gpus(shared)
    assert shared["CUDA_VISIBLE_DEVICES"] == "0"


def test_copies_meet_apart_and_their_gradients_are_summed(tmp_path):
    torch.manual_seed(0)
    inputs, plain = torch.randn(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    wanted = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    wanted.load_state_dict(plain.state_dict())
    for copy in range(2):  # each copy's gradient is the mean over its two ranks
        (wanted(inputs[2 * copy : 2 * copy + 2]).square().sum() / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in wanted.parameters()])

    def work(rank):
        store = dist.FileStore(str(tmp_path / "store"), 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
        across, within = mesh.get_group("replicas"), mesh.get_group("ranks")
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        hidden = alone.HiddenWorld()
        hidden.hide(environ, CopyRanks.of(environ, 2))
        dist.init_process_group("gloo")  # as a script does: its ranks have met
        assert (dist.get_world_size(), dist.get_rank()) == (2, rank % 2)
        for layer in plain:
            fully_shard(layer)
        fully_shard(plain)
        strategy = SummedCopies(plain, across, within)
        strategy.micro(last=True)
        plain(inputs[rank : rank + 1]).square().sum().backward()
        strategy.reduce()
        torch.testing.assert_close(strategy.norm(), norm)
        for ours, theirs in zip(plain.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        with hidden.inside():
            with hidden.outside():
                assert (dist.get_world_size(), dist.get_rank()) == (2, rank % 2)
            assert dist.get_world_size() == 4
            dist.barrier()

    fork(4, work)
    assert os.path.exists(tmp_path / "store")
