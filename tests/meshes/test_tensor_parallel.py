"""Tensor parallelism on real ranks: by named plans, and exact sums beside it."""

import json
from pathlib import Path

import pytest

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, same_training, train

pytestmark = pytest.mark.mesh
MESHED = Path(__file__).parents[1] / "support" / "meshed.py"
LLAMA = Path(__file__).parents[1] / "support" / "llama_like.py"


def meshed(folder, world, *flags, mesh=""):
    """What rank 0 says at the end."""
    out, env = folder / "out.json", {"HARNESS_MESH": mesh} if mesh else {}
    train(folder / "run", world, "--out", out, *flags, env=env, script=MESHED)
    return json.loads(out.read_text())


def test_exact_sums_are_the_same_for_any_number_of_replicas(tmp_path):
    """Of tensor parallel ranks, whoever shards what else."""
    found = set()
    worlds = (("tp=2", 2), ("tp=2", 4), ("tp=2", 6), ("dp_shard=2,tp=2", 4), ("dp_shard=2,tp=2", 8))
    for mesh, world in worlds:
        folder = tmp_path / f"{mesh}-{world}"
        said = meshed(folder, world, "--reduce", "exact", mesh=mesh)
        numbers = [(r.loss, r.metrics["grad_norm"]) for r in history(folder / "run")]
        found.add((said["weights"], *numbers))
    assert len(found) == 1
    whole = meshed(tmp_path / "whole", 1, "--whole", "--reduce", "exact")
    same_training(tmp_path / "tp=2-6" / "run", tmp_path / "whole" / "run")
    assert said["sum"] == pytest.approx(whole["sum"], rel=1e-4)


def llama(folder, world, *flags, mesh=""):
    """What each rank says at the end."""
    out, env = folder / "out.json", {"HARNESS_MESH": mesh} if mesh else {}
    train(folder / "run", world, "--out", out, *flags, env=env, script=LLAMA)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[(), ("--tied",)], ids=["", "tied"])
def whole(request, tmp_path_factory):
    """One rank holds the whole model; its flags."""
    folder = tmp_path_factory.mktemp("whole")
    llama(folder, 1, "--whole", *request.param)
    return folder / "run", request.param


@pytest.mark.parametrize(
    ("mesh", "world", "flags", "held"),
    [
        ("tp=2", 4, ("--reduce", "exact"), 1 / 2),
        ("dp_shard=2,tp=2", 4, ("--loss-parallel",), 1 / 4),
        ("cp=2,tp=2", 4, (), 1 / 4),
    ],
)
def test_a_model_that_is_split_by_a_plan_trains_as_a_whole_one(
    whole, tmp_path, mesh, world, flags, held
):
    said = llama(tmp_path, world, *flags, *whole[1], mesh=mesh)
    same_training(tmp_path / "run", whole[0])
    assert said[0]["held"] == pytest.approx(held, rel=0.25)  # norms lie on both ranks of tp
    assert audit(open_store(str(tmp_path / "run"))).ok


def test_what_is_split_draws_for_itself_whatever_the_number_of_replicas(tmp_path):
    flags = ("--reduce", "exact", "--dropout", 0.1)
    two, four = (llama(tmp_path / str(world), world, *flags, mesh="tp=2") for world in (2, 4))
    assert len({said["weights"] for said in (*two, *four)}) == 1
    for sample, (before, *own, after) in two[0]["drawn"].items():
        other = two[1]["drawn"][sample]
        assert (other[0], other[-1]) == (before, after) and not {*other[1:-1]} & {*own}
        replica = four[:2] if sample in four[0]["drawn"] else four[2:]
        assert [said["drawn"][sample] for said in replica] == [[before, *own, after], other]
    assert len(two[0]["drawn"]) == 8 * 6


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("heads", "layers.0.self_attn.k_proj: wanted out_features that tp=4 divides, found 6"),
        ("unknown", "adapter (Linear) has parameters that the plan does not name"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path, bad, says):
    env = {"HARNESS_MESH": "tp=4"}
    ended = train(tmp_path, 4, "--bad", bad, env=env, script=LLAMA, codes=(1, -9))
    assert says in ended.output, ended.output
