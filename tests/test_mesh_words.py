"""How a mesh is written, and which are refused."""

import pytest

from harness.core.mesh import ModelMesh, mesh_of, parse
from harness.core.world import BadInput


def test_a_mesh_is_read_as_it_is_written():
    assert parse("dp_shard=8, tp=2") == ModelMesh(8, 2) == mesh_of({"tp": 2, "dp_shard": 8})
    assert str(ModelMesh(8, 2)) == "dp_shard=8,tp=2" and str(ModelMesh()) == "dp_shard=1"
    for mesh in (ModelMesh(), ModelMesh(4), ModelMesh(1, 2)):
        assert parse(str(mesh)) == mesh
    assert ModelMesh(8, 2).sizes(48) == {"dp_replicate": 3, "dp_shard": 8, "tp": 2}
    assert mesh_of({"dp_replicate": -1, "dp_shard": 2}) == ModelMesh(2)


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
        ("pp=2", "found pp (pipelines), which is not there yet"),
        ("fsdp=2", "found 'fsdp'"),
    ],
)
def test_other_words_are_refused(text, says):
    with pytest.raises(BadInput, match="mesh") as refused:
        parse(text)
    assert says in str(refused.value)
