"""Which meshes hold a model: counted as the real modules have it, and decisions that make sense."""

import json
import sys
from pathlib import Path

import pytest

from harness.cli.command import main
from harness.core.hardware import gpu_memory, link_speed, peak_flops
from harness.core.mesh import ModelMesh
from harness.core.world import BadInput
from harness.meshes.model_shapes import named_shape
from harness.planner.mesh_memory import (
    USABLE,
    PlannedGpus,
    best_plans,
    block_parameters,
    by_word,
    crossing,
    fits_memory,
    memory,
    meshes,
    plan_to_take,
    stage_parameters,
    token_nbytes,
)

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import models  # noqa: E402

ONE = ModelMesh()


def h100(nodes=1, per_node=8):
    flops, link = peak_flops("H100"), link_speed("H100")
    return PlannedGpus("H100", gpu_memory("H100"), flops, per_node, nodes, link, 50e9)


def count(module):
    return sum(p.numel() for p in module.parameters())


# ---- counted -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama-8b", "llama-70b", "qwen3-8b", "gpt2-xl", "mixtral-8x7b"])
def test_states_are_those_of_the_real_modules(name):
    shape = named_shape(name)
    with torch.device("meta"):
        model = models.Transformer(shape, 1024)
    assert stage_parameters(shape, ONE) == count(model)
    assert block_parameters(shape, ONE) == count(model.blocks[0])
    held = memory(shape, ONE, 1, 1, False, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    assert held.parameters == sum(p.nbytes for p in model.parameters())
    assert held.gradients == held.parameters and held.optimizer == 2 * held.parameters
    assert held.gathered == held.parameters / 2  # as autocast rounds it
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_leaves_its_share_of_matrices(tp):
    """Of a model of which each rank has so many heads and hidden units less."""
    shape = named_shape("llama-8b", layers=2)
    mine = named_shape(
        "llama-8b",
        layers=2,
        heads=shape.heads // tp,
        kv_heads=shape.kv_heads // tp,
        hidden=shape.hidden // tp,
    )
    with torch.device("meta"):
        block = models.Transformer(mine, 64).blocks[0]
    assert block_parameters(shape, ModelMesh(tp=tp)) == count(block)


def test_a_pipelines_stages_hold_all_of_it_between_them():
    shape = named_shape("llama-70b")
    most = stage_parameters(shape, ModelMesh(pp=8))
    assert most * 8 > shape.parameters > (most - shape.embedding_parameters) * 8
    assert stage_parameters(shape, ModelMesh(pp=8)) == (
        10 * shape.block_parameters + shape.head_parameters
    )


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "gpt2-tiny", "moe-tiny"])
def test_activations_are_what_autograd_keeps(name):
    """Of one block in bf16, each storage counted once, without parameters."""
    shape = named_shape(name)
    block = models.Block(shape).bfloat16()
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    x = torch.randn(2, 512, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    rotary = models.Rotary(shape, 512)
    angles = (None, None) if name == "gpt2-tiny" else (rotary.cos, rotary.sin)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        made = block(x, *angles)
    assert made.shape == x.shape
    per_token = sum(kept.values()) / (2 * 512)
    # more is kept in fp32 here (norms, turns) than where kernels are fused, as on a GPU
    assert 0.95 * token_nbytes(shape) < per_token < 2.0 * token_nbytes(shape), per_token


# ---- shared out ----------------------------------------------------------------------------------
def test_what_is_shared_out_is_less():
    shape = named_shape("llama-8b")

    def of(mesh, micro_batches=1, checkpointing=False):
        return memory(shape, mesh, 1, micro_batches, checkpointing, 8192)

    alone, eight = of(ONE), of(ModelMesh(dp_shard=8))
    assert eight.parameters == alone.parameters / 8 and eight.optimizer == alone.optimizer / 8
    assert eight.activations == alone.activations  # samples of its own
    assert of(ModelMesh(cp=8)).activations == of(ModelMesh(tp=8)).activations
    assert of(ModelMesh(cp=8)).activations == alone.activations / 8
    assert of(ONE, checkpointing=True).activations < alone.activations / 10
    # gradients of the whole wait for the last micro-batch
    assert of(ModelMesh(dp_shard=8), 4).gradients == eight.gradients + alone.gradients
    assert of(ModelMesh(pp=4), 8).activations == alone.activations  # 1/4 of it, 4 times
    experts = named_shape("mixtral-8x7b")
    sharded, spread = (
        memory(experts, ModelMesh(dp_shard=8, ep=ep), 1, 1, False, 4096) for ep in (1, 8)
    )
    assert sharded.parameters == spread.parameters and spread.gathered < sharded.gathered / 3


def test_dimensions_that_cross_nodes():
    mesh = ModelMesh(dp_shard=8, tp=4, pp=2)
    assert crossing(mesh, 2, 8) == {"dp_shard", "pp", "dp_replicate"}
    assert crossing(ModelMesh(dp_shard=8), 1, 8) == frozenset()
    assert crossing(ModelMesh(dp_shard=8), 4, 8) == {"dp_replicate"}
    assert crossing(ModelMesh(dp_shard=6), 1, 8) == {"dp_shard"}


def test_traffic():
    shape = named_shape("llama-8b")

    def sent(mesh, copies=1, micro_batches=4):
        return by_word(shape, mesh, copies, 1, micro_batches, False, 8192)

    assert sum(sent(ONE).values()) == 0
    n = shape.parameters
    assert sent(ModelMesh(dp_shard=8))["dp_shard"] == 7 / 8 * n * (4 * 2 * 2 + 4)
    assert sent(ONE, copies=2)["dp_replicate"] == n * 4  # all-reduce: as much as there is
    assert sent(ModelMesh(dp_shard=8), copies=2)["dp_replicate"] == n / 2
    # 2 gathers and 2 scatters of the residual stream, forward and backward, in 32 layers
    assert sent(ModelMesh(tp=2))["tp"] == 4 * 32 * 2 * 4 / 2 * 8192 * 4096 * 2
    assert sent(ModelMesh(pp=4))["pp"] == 2 * 4 * 8192 * 4096 * 2
    assert sent(ModelMesh(cp=2))["cp"] == 4 * 32 * 3 * 2 * 4096 * 8 * 128 * 2
    experts = by_word(
        named_shape("mixtral-8x7b"), ModelMesh(dp_shard=8, ep=8), 1, 1, 1, False, 4096
    )
    assert experts["ep"] == 32 * 2 * 2 * 7 / 8 * 4096 * 4096 * 2 * 2


# ---- chosen --------------------------------------------------------------------------------------
def test_all_meshes_fill_the_gpus():
    for name, sequence in (("llama-8b", 65536), ("mixtral-8x7b", 4096)):
        shape, gpus = named_shape(name), h100(2)
        found = list(meshes(shape, gpus, sequence))
        assert len(set(found)) == len(found) > 20
        for mesh, copies in found:
            assert mesh.copy_ranks * copies == 16 and mesh.dp_shard % mesh.ep == 0
            assert mesh.tp <= 8 and not (shape.experts and mesh.tp > 1)
    assert not any(m.cp > 1 for m, _ in meshes(named_shape("llama-8b"), h100(), 2048))


def test_a_small_model_needs_no_mesh():
    plans = best_plans(named_shape("gpt2"), h100(), 64, 1024)
    best = plan_to_take(plans)
    assert best.mesh == ONE and best.copies == 8 and not best.checkpointing
    assert best.bubble == best.traffic.across == 0


def test_a_large_model_needs_more():
    shape = named_shape("llama-70b")
    one = best_plans(shape, h100(), 512, 8192)
    assert one and not any(fits_memory(plan, h100()) for plan in one)
    sizes = [plan.nbytes.total for plan in one]
    assert sizes == sorted(sizes) and sizes[0] > 16 * shape.parameters / 8
    gpus = h100(16)
    plans = [plan for plan in best_plans(shape, gpus, 512, 8192) if fits_memory(plan, gpus)]
    assert plans and all(plan.nbytes.total <= USABLE * 80e9 for plan in plans)
    assert [p.step_s for p in plans] == sorted(p.step_s for p in plans)
    best = plan_to_take(plans)
    assert best.step_s <= 1.05 * plans[0].step_s
    assert best.dimensions <= plans[0].dimensions
    for plan in plans:
        samples = plan.copies * plan.mesh.dp_shard * plan.micro_batch * plan.micro_batches
        assert samples == 512
        assert (plan.bubble > 0) is (plan.mesh.pp > 1) and 0 <= plan.bubble < 1
        # never faster than the peak allows
        assert plan.step_s > 512 * 8192 * shape.flops_per_token(8192) / 128 / gpus.flops


def test_a_slower_network_keeps_the_talk_inside():
    shape, slow = named_shape("llama-8b"), h100(4)
    slow = PlannedGpus(*(*vars(slow).values(),)[:-1], 1e9)
    best = plan_to_take([p for p in best_plans(shape, slow, 512, 8192) if fits_memory(p, slow)])
    fast = plan_to_take([p for p in best_plans(shape, h100(4), 512, 8192) if fits_memory(p, h100(4))])
    assert best.traffic.across <= fast.traffic.across and best.step_s >= fast.step_s


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(BadInput, match="a global batch that replicas of 8 GPUs share out"):
        best_plans(named_shape("gpt2"), h100(), 0, 1024)
    with pytest.raises(BadInput, match="samples of at most 1024 tokens"):
        best_plans(named_shape("gpt2"), h100(), 8, 2048)
    with pytest.raises(BadInput, match="at most 65536 GPUs, found 80000"):
        best_plans(named_shape("gpt2"), h100(10_000), 8, 1024)
    assert best_plans(named_shape("gpt2"), h100(), 10**18, 1024)  # at once


# ---- the command ---------------------------------------------------------------------------------
def planned(capsys, *words):
    with pytest.raises(SystemExit) as done:
        main(["plan", *words])
    out, err = capsys.readouterr()
    return done.value.code, out, err


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = planned(capsys, "--model", "llama-70b", "--nodes", "16")
    assert code == 0 and "70.6 B parameters" in out and "take    --mesh " in out
    code, out, _ = planned(capsys, "--model", "llama-70b", "--nodes", "1")
    assert code == 1 and "none    fits" in out and "take more nodes" in out
    (tmp_path / "config.json").write_text(json.dumps(named_shape("gpt2").to_dict()))
    words = ("--sequence", "1024", "--gpus", "A100-80GB:2", "--nodes", "1:2", "--json")
    code, out, _ = planned(capsys, "--model", str(tmp_path), *words)
    told = json.loads(out)
    assert code == 0 and told["parameters"] == 124_439_808 and set(told["nodes"]) == {"1", "2"}
    best = told["nodes"]["2"]["taken"]
    assert best["fits"] and not best["refused"] and best["nbytes"]["total"] < 72e9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "wanted either a task file, or --model NAME"),
        (("task.yaml", "--model", "gpt2"), "wanted either a task file, or --model NAME"),
        (("--model", "llama-9b"), "wanted a model of llama-tiny"),
        (("--model", "gpt2", "--gpus", "H1:8"), "of a GPU that harness knows, such as H100:8"),
        (("--model", "gpt2", "--gpus", "H100:0"), "of a GPU that harness knows, such as H100:8"),
        (("--model", "no/such/folder"), "wanted a folder with a config.json"),
    ],
)
def test_the_command_refuses(capsys, words, says):
    code, _, err = planned(capsys, *words)
    assert code == 2 and says in err
