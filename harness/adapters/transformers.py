"""Trainers of transformers and TRL that are elastic because the script says so.

    from harness.adapters.transformers import ElasticTrainer as Trainer

    class MyTrainer(ElasticMixin, SFTTrainer): ...      # any subclass of transformers.Trainer

They do the same as the hook of `harness run` does with unchanged scripts (docs/trainers/), also
under `--adapt none`, plain torchrun and a single process. Import this before training arguments are
made.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import transformers
import transformers.trainer
import transformers.training_args

from harness.adapters import claims, hf_trainer


class ElasticMixin:
    """To be named before a Trainer class among the bases."""

    def elastic_state(self) -> dict[str, Any]:
        """What snapshots shall hold besides what the Trainer and its callbacks have: objects with
        `state_dict` and `load_state_dict` by name, the same on all ranks. To be overridden."""
        return {}


class ElasticTrainer(ElasticMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer on any number of ranks."""


def elastic(**options: Any) -> None:
    """Options of `harness.attach` for these trainers, such as snapshot_every_s=60; to be called
    before training arguments are made. Raises BadInput."""
    merged = {**claims.attach_options(os.environ.get(claims.ATTACH, "")), **options}
    text = json.dumps(merged)
    claims.attach_options(text)
    os.environ[claims.ATTACH] = text


hf_trainer.patch(sys.modules["transformers.trainer"])
hf_trainer.patch_arguments(sys.modules["transformers.training_args"])
hf_trainer.ThisScript.asked = True

__all__ = ["ElasticMixin", "ElasticTrainer", "elastic"]
