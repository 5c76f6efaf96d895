"""How a mesh is written, and which are refused."""

import numpy as np
import pytest

from harness.core.mesh import ModelMesh, mesh_of, parse
from harness.core.world import BadInput

EIGHT_BY_TWO = ModelMesh(dp_shard=8, tp=2)


def test_a_mesh_is_read_as_it_is_written():
    assert parse("dp_shard=8, tp=2") == EIGHT_BY_TWO == mesh_of({"tp": 2, "dp_shard": 8})
    assert str(EIGHT_BY_TWO) == "dp_shard=8,tp=2" and str(ModelMesh()) == "dp_shard=1"
    for mesh in (ModelMesh(), ModelMesh(dp_shard=4), ModelMesh(tp=2)):
        assert parse(str(mesh)) == mesh
    assert EIGHT_BY_TWO.sizes(48) == {"dp_replicate": 3, "pp": 1, "dp_shard": 8, "cp": 1, "tp": 2}
    experts = parse("dp_shard=8,ep=4")
    assert str(experts) == "dp_shard=8,ep=4" and experts.copy_ranks == 8
    assert experts.expert_sizes(16) == {"dp_replicate": 2, "dp_shard_mod_ep": 2, "ep": 4}
    assert mesh_of({"dp_replicate": -1, "dp_shard": 2}) == ModelMesh(dp_shard=2)


@pytest.mark.parametrize(
    "mesh",
    [
        ModelMesh(dp_shard=2, tp=3),
        ModelMesh(pp=2, dp_shard=3),
        ModelMesh(pp=2, dp_shard=2, cp=3, tp=2),
        ModelMesh(pp=4),
    ],
)
def test_replicas_are_the_ranks_that_differ_in_nothing_but_dp(mesh):
    """As numbered by a mesh of all dimensions."""
    sizes = mesh.sizes(2 * mesh.copy_ranks)
    ranks = np.arange(2 * mesh.copy_ranks).reshape(tuple(sizes.values()))
    replicas = np.moveaxis(ranks, 2, 1).reshape(2 * mesh.dp_shard, -1)  # dp_replicate, dp_shard, ...
    found = mesh.grouping
    for number, members in enumerate(replicas.tolist()):
        assert [found.replica(rank) for rank in members] == [number] * mesh.replica_ranks
        assert [found.leads(rank) for rank in members] == [True] + [False] * (len(members) - 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "wanted NAME=SIZE"),
        ("dp_shard", "wanted NAME=SIZE"),
        ("dp_shard=two", "wanted NAME=SIZE"),
        ("dp_shard=0", "it is from 1 to 65536"),
        ("dp_shard=65536,tp=2", "at most 65536 ranks"),
        ("tp=2,tp=2", "each name once"),
        ("dp_replicate=2", "copies come and go with the nodes"),
        ("dp_shard=6,ep=4", "wanted ep to divide dp_shard"),
        ("ep=2", "wanted ep to divide dp_shard"),
        ("dp_shard=2,tp=2,ep=2", "ep is there beside dp_shard only"),
        ("pp=2,cp=2", "pp beside cp"),
        ("fsdp=2", "found 'fsdp'"),
    ],
)
def test_other_words_are_refused(text, says):
    with pytest.raises(BadInput, match="mesh") as refused:
        parse(text)
    assert says in str(refused.value)
