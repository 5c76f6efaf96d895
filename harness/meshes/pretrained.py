"""The loading of pretrained weights from a folder or a bucket (`harness.load_pretrained`). Runs in
the worker.

Each rank reads its part of each tensor, one tensor after the other, so no rank holds the whole
model unless it would anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.core.world import BadInput
from harness.meshes.model_shapes import ModelShape, named_shape, shape_of
from harness.meshes.pipeline import Pipeline
from harness.worker.gradients.parallel import local_part
from harness.worker.gradients.sharding import Materials
from harness.worker.process_group import is_source, same_everywhere
from harness.worker.training_state import state_of
from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound
from storage.export.hf_layouts import TABLES, TensorIndex, as_published, layout_moves, tie, to_ours
from storage.export.safetensors import SafetensorsFiles
from storage.stores.store_urls import normalize, open_store
from storage.tensors.loading import load_parts

if TYPE_CHECKING:
    from harness.worker.session import Session

CONFIG = "config.json"
SHOWN_S = 10.0
_TIED = ("gpt2",)  # kinds with tied embeddings if config.json does not say


def model_shape(name: str, **other: Any) -> ModelShape:
    """Return the shape of a model, by name ("llama-8b"; docs/MODELS.md lists them), or from the
    config.json of a folder or bucket such as "s3://bucket/llama". `other`: fields to replace.
    Raises BadInput, StoreError."""
    if "/" not in name and not Path(name).is_dir():
        return named_shape(name, **other)
    return replace(shape_of(_config(name)), **other)


def load_pretrained(model: nn.Module, url: str, run: Session | None = None) -> nn.Module:
    """Fill the model from the safetensors in a folder or bucket, as `save_pretrained` of
    transformers (or `harness snapshots export`) writes them. Return the model.

    The model may be plain, sharded by `harness.fsdp2`, split by tensor parallelism, stages of a
    `harness.pipeline`, or on the meta device; its tensors have the names of `examples/models.py`,
    or Hugging Face's own. They keep their dtype. Call it before `run.prepare`: if the run has a
    snapshot, that replaces the weights. `run`: the session; with it all ranks call this together,
    those of the first copy of the model read for all, each its part, and the progress is shown.
    Raises BadInput, StoreError.
    """
    config = _config(url)
    off_meta(model)
    tensors, kind = state_of(model), str(config.get("model_type"))
    try:
        files = SafetensorsFiles(open_store(url))
        files.index = as_published(config, files.index)
        names = _names(model, tensors)
        moved = layout_moves(config, names) if kind in TABLES else ()
        wanted = {m.theirs for m in moved} or names
        index = tie(files.index, wanted, bool(config.get("tie_word_embeddings", kind in _TIED)))
        index = to_ours(index, moved) if moved else index
    except ValueError as e:
        raise BadInput(f"{url}: {e}") from e
    _check(url, index, tensors)
    if run is not None:
        peers = run._peers
        tensors = {
            name: t for name, t in tensors.items() if is_source(t, peers.across, peers.copies)
        }
    progress = ReadingProgress(run, sum(local_part(t).nbytes for t in tensors.values()))
    with torch.no_grad():
        for name, tensor in tensors.items():
            _fill(files, index, name, tensor.detach())
            progress.read(local_part(tensor).nbytes)
    if run is not None:
        same_everywhere(model, peers.across, peers.copies)
    return model


class ReadingProgress:
    """Shows how much of its part of the weights rank 0 has read, each `SHOWN_S` seconds. `run`:
    None shows nothing."""

    def __init__(self, run: Session | None, total_nbytes: int):
        self._run, self._total, self._done = run, total_nbytes, 0
        self._began_s = self._shown_s = time.monotonic()

    def read(self, nbytes: int) -> None:
        """Record that so many bytes more were read, and send a heartbeat."""
        self._done += nbytes
        now_s = time.monotonic()
        if self._run is None:
            return
        self._run.alive()
        if now_s - self._shown_s >= SHOWN_S:
            self._shown_s = now_s
            speed = self._done / (now_s - self._began_s)
            self._run.print(
                f"harness: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB of the weights "
                f"are read ({speed / 1e6:.0f} MB/s)"
            )


def off_meta(model: nn.Module, seed: int = 0) -> None:
    """Move tensors from the meta device to the CPU, with the values that their modules give."""
    materials = Materials(model, torch.device("cpu"), seed)
    materials.fill(model)
    materials.split()


def _names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of `tensors` and of the parameters of other pipeline stages."""
    others = model.names if isinstance(model, Pipeline) else ()
    return {*tensors, *others}


def _fill(files: SafetensorsFiles, index: TensorIndex, name: str, tensor: torch.Tensor) -> None:
    saved = getattr(torch, index[name]["dtype"])
    into = tensor if tensor.dtype == saved else torch.empty_like(tensor, dtype=saved)
    load_parts(files.read_into, files.store.url, index, {name: into})
    if into is not tensor:
        tensor.copy_(into)


def _check(url: str, index: TensorIndex, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise BadInput for tensors that the files lack, or have in another shape."""
    if missing := sorted(tensors.keys() - index.keys()):
        raise BadInput(
            f"{url}: wanted {missing[0]} and {len(tensors) - 1} others, found {len(index)} "
            f"tensors without {len(missing)} of them; wanted files of the same model"
        )
    for name, tensor in tensors.items():
        if list(tensor.shape) != list(index[name]["shape"]):
            raise BadInput(
                f"{url}: wanted {name} of the shape {list(tensor.shape)}, found "
                f"{index[name]['shape']}; build the model by harness.model_shape({url!r})"
            )


def _config(url: str) -> dict[str, Any]:
    """Return the content of config.json. Raises BadInput, StoreError."""
    where = normalize(url)
    if where.startswith("file://"):
        folder = Path(where.removeprefix("file://"))
        if links := sorted(path.name for path in folder.glob("*") if path.is_symlink()):
            raise BadInput(
                f"{url}: wanted files, found links ({links[0]}), as in Hugging Face's cache; name "
                "a folder that `hf download MODEL --local-dir FOLDER` wrote"
            )
    try:
        found = parsed(open_store(url).get(CONFIG))
    except NotFound:
        raise BadInput(
            f"{url}: wanted a folder or bucket with a {CONFIG}, as transformers writes it; found "
            "none"
        ) from None
    except BadObject as e:
        raise BadInput(f"{url}/{CONFIG}: {e}") from e
    if not isinstance(found, dict):
        raise BadInput(f"{url}/{CONFIG}: wanted an object, found {type(found).__name__}")
    return found
