"""Hugging Face's own Llama and Qwen3, split over ranks by a named plan."""

from pathlib import Path

import pytest

from support.worlds import same_training

PRELOAD = "transformers"
SCRIPT = Path(__file__).parents[1] / "support" / "split_models.py"


@pytest.mark.parametrize(("kind", "flags"), [("llama", ()), ("qwen3", ("--loss-parallel",))])
def test_they_train_as_whole_ones(warm, tmp_path, kind, flags):
    warm.train(tmp_path / "whole", 1, kind, "--whole", script=SCRIPT)
    mesh = {"HARNESS_MESH": "tp=2"}
    warm.train(tmp_path / "split", 2, kind, *flags, script=SCRIPT, env=mesh)
    same_training(tmp_path / "split", tmp_path / "whole")
