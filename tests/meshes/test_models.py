"""Shapes of language models: what their makers publish is what is counted here, and what the real
modules have."""

import sys
from pathlib import Path

import pytest

from harness.core.world import BadInput
from harness.meshes.model_shapes import named_shape, shape_of

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt  # noqa: E402
import models  # noqa: E402

PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
}
TINY = ("llama-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny", "moe-tiny")


def on_meta(shape):
    with torch.device("meta"):
        return models.Transformer(shape, min(shape.length, 4096))


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", [*PUBLISHED, *TINY])
def test_parameters_are_counted_as_they_are(name):
    shape = named_shape(name)
    model = on_meta(shape)
    assert count(model) == shape.parameters == PUBLISHED.get(name, shape.parameters)
    block = model.blocks[0]
    assert count(block) == shape.block_parameters
    matrices = [p.numel() for p in block.attention.parameters() if p.dim() == 2]
    assert sum(matrices) == shape.attention_parameters
    assert count(model.embed) + (
        count(model.positions) if model.positions else 0
    ) == shape.embedding_parameters


def test_a_mixture_computes_with_some_of_its_experts():
    shape = named_shape("mixtral-8x7b")
    active = shape.flops_per_token(0) / 6
    assert 12.5e9 < active < 13e9  # "13B active", as its makers say


def test_config_json_there_and_back():
    for name in (*PUBLISHED, *TINY):
        assert shape_of(named_shape(name).to_dict()) == named_shape(name)
    stretched = named_shape(
        "llama-tiny",
        rope=(
            ("factor", 8.0),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 8192),
            ("rope_type", "llama3"),
        ),
    )
    assert shape_of(stretched.to_dict()) == stretched
    # since transformers 5
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None}
    assert shape_of(named_shape("llama-8b").to_dict() | new) == named_shape("llama-8b")
    small = gpt.GPT(gpt.Shape(2, 64, 4), 32)
    assert shape_of(small.config.to_dict()) == small.config
    assert small.config.parameters == small.parameter_count()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, "wanted a model_type of llama, qwen2, qwen3, gpt2, mixtral"),
        ({"model_type": "llama"}, "wanted the sizes that transformers writes"),
        ({"attention_bias": True}, "attention_bias is True, and only False is built here"),
        ({"sliding_window": 4096}, "found a sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary positions of default"),
        ({"num_attention_heads": 30}, "heads a multiple of kv_heads"),
        ({"num_hidden_layers": 0}, "wanted sizes from 1 to"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "wanted experts for mixtral"),
    ],
)
def test_what_is_not_built_is_refused(config, says):
    whole = {} if config.get("model_type") else named_shape("llama-8b").to_dict()
    with pytest.raises(BadInput, match=says):
        shape_of(whole | config)


def test_an_unknown_name_is_refused():
    with pytest.raises(BadInput, match="wanted a model of llama-tiny"):
        named_shape("llama-9b")


def test_a_model_on_the_meta_device_gets_its_values():
    """By each module's `reset_parameters()`, from the seed and its name."""
    from harness.meshes.pretrained import off_meta

    def built(seed):
        model = on_meta(named_shape("moe-tiny", layers=2))
        off_meta(model, seed)
        return model

    one, again, other = built(1), built(1), built(2)
    x = torch.randint(256, (2, 16))
    assert torch.equal(one(x), again(x)) and not torch.equal(one(x), other(x))
    for name, p in one.named_parameters():
        assert p.isfinite().all(), name
        if p.dim() > 1:
            assert 0.005 < p.std() < 0.03, name  # 0.02, or less into the residual stream
    here = models.Transformer(named_shape("llama-tiny"), 64)
    there = on_meta(named_shape("llama-tiny"))
    there.rotary.to_empty(device="cpu").reset_parameters()
    assert torch.equal(there.rotary.cos[:64], here.rotary.cos)
