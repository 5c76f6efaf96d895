"""torchtitan's own debug model, with two of its six layers."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel


def debugmodel():
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return config
