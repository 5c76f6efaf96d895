"""torchtitan's own debug model with experts, with two of its layers."""

from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel


def debugmodel():
    config = deepseek_v3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return config
