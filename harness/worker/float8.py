"""float8 matrix products as a function applied to a model: `harness.float8`. Runs in the worker.

Knows torchao's entrances, imported when it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.core.world import BadInput

DIVISOR = 16  # of both dimensions of a weight, for the GPUs' float8 products
# compute capability of NVIDIA's GPUs from which on there are float8 products with this scaling
LEAST = {"tensorwise": (8, 9)}
LEAST_OTHERS = (9, 0)


def float8(
    model: nn.Module,
    recipe: Any = "tensorwise",
    *,
    only: Callable[[nn.Module, str], bool] | None = None,
    emulate: bool = False,
) -> nn.Module:
    """Let the model's linear layers multiply in float8. Their weights stay what they were (bf16,
    fp32), under the same names, and scales are made of each input anew: a snapshot holds nothing
    more, and goes on with or without it. Call it before `harness.fsdp2`, on any device (meta too).

    `recipe`: torchao's name for one ("tensorwise": fastest; "rowwise": closest to bf16;
    "rowwise_with_gw_hp"), or a config of torchao's: a Float8LinearConfig, or what its `quantize_`
    takes (MXFP8: an MXLinearConfig). `only(module, name)`: which layers; default: all whose weights
    have dimensions that 16 divides. Leave the output layer out where its logits are small.
    `emulate`: try a recipe's arithmetic where there is none in hardware, slowly. Raises BadInput.
    """
    try:
        from torchao import float8 as ao
    except ImportError as e:
        raise BadInput(
            f"harness.float8 wants torchao ({e}); pip install torchao, or leave float8 out"
        ) from e
    config: Any = recipe
    if isinstance(recipe, str):
        try:
            config = ao.Float8LinearConfig.from_recipe_name(recipe)
        except (AssertionError, ValueError) as e:
            raise BadInput(
                f"harness.float8(recipe={recipe!r}): wanted a name that this torchao knows, or one "
                f"of its configs; it says: {e}"
            ) from e
    if not emulate:
        check_hardware(recipe if isinstance(recipe, str) else type(recipe).__name__)
    chosen = only or fits
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not any(chosen(m, name) for name, m in linear.items()):
        raise BadInput(
            f"harness.float8: wanted linear layers whose dimensions {DIVISOR} divides, found none"
            f"{' that only= names' if only else ''}; leave it out"
        )
    if isinstance(config, ao.Float8LinearConfig):
        if emulate:
            config = dataclasses.replace(config, emulate=True)
        ao.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    else:
        from torchao.quantization import quantize_

        quantize_(model, config, filter_fn=lambda m, name: name in linear and chosen(m, name))
    for name, was in linear.items():
        _keep_beginning(model.get_submodule(name), was)
    return model


def _keep_beginning(now: nn.Module, was: Any) -> None:
    """What is on the meta device gets its values later, and as the class that it was of has it."""
    if type(now) is type(was) or type(was) is nn.Linear:
        return
    for key, value in vars(was).items():
        vars(now).setdefault(key, value)
    vars(now)["reset_parameters"] = functools.partial(type(was).reset_parameters, now)


def fits(module: nn.Module, name: str) -> bool:
    """Both dimensions of its weight are multiples of 16."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and all(n % DIVISOR == 0 for n in weight.shape)


def check_hardware(recipe: str) -> None:
    """Raises BadInput unless this process' GPU multiplies in float8, with the recipe's scaling."""
    wanted = LEAST.get(recipe, LEAST_OTHERS)
    if not torch.cuda.is_available():
        found = "no GPU"
    elif torch.version.hip:
        return  # torchao refuses by itself what a GPU of AMD's lacks
    else:
        capability = torch.cuda.get_device_capability()
        if capability >= wanted:
            return
        name = torch.cuda.get_device_name()
        found = f"{name} of {capability[0]}.{capability[1]}"
    raise BadInput(
        f"harness.float8(recipe={recipe!r}): wanted a GPU of compute capability {wanted[0]}."
        f"{wanted[1]} or newer (an H100, for any recipe), found {found}; leave float8 out here, or "
        "try its arithmetic with emulate=True, slowly"
    )
