"""Tiny models of known shapes, exported as others keep theirs."""

import sys
from pathlib import Path

import safetensors.torch
import torch

from harness.meshes.model_shapes import named_shape
from storage import Ref, Snapshots
from storage.export.safetensors import export
from support.shelves import memory, save

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import models


def random(model):
    """Fresh biases are all zero, and gains one."""
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    return model.eval()


def tiny(name, **other):
    return random(models.Transformer(named_shape(name, layers=2, **other), 32))


def exported(model, out, **how):
    store = memory()
    manifest = save(store, Ref(1, 5), model.state_dict(), {"config": model.config.to_dict()})
    return export(Snapshots(store), manifest, out, **how)


def files(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found
