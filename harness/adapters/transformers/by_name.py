"""Trainers of transformers and TRL that a script makes elastic by name.

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

from harness.adapters import framework_claim
from harness.adapters.transformers import patch


class ElasticMixin:
    """A mixin that is named before a Trainer class among the bases."""

    def elastic_state(self) -> dict[str, Any]:
        """Return further state for snapshots, beyond the Trainer's: objects with `state_dict` and
        `load_state_dict` by name, the same on all ranks. Override this method."""
        return {}


class ElasticTrainer(ElasticMixin, transformers.Trainer):  # type: ignore[misc]
    """A transformers.Trainer on any number of ranks."""


def elastic(**options: Any) -> None:
    """Set options of `harness.attach` for these trainers, such as snapshot_every_s=60. Call this
    before training arguments are made. Raises BadInput."""
    merged = {
        **framework_claim.attach_options(os.environ.get(framework_claim.ATTACH, "")),
        **options,
    }
    text = json.dumps(merged)
    framework_claim.attach_options(text)
    os.environ[framework_claim.ATTACH] = text


patch.patch(sys.modules["transformers.trainer"])
patch.patch_arguments(sys.modules["transformers.training_args"])
patch.ThisScript.asked = True

__all__ = ["ElasticMixin", "ElasticTrainer", "elastic"]
