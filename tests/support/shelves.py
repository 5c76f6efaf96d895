"""Small snapshots in memory."""

import torch

from storage import MemoryStore, Snapshots
from storage.tensors import dcp, state_tree


def save(store, ref, model_state, data=None, chunk_nbytes=256):
    tensors, plain = state_tree.split({"model": model_state, "optimizer": {"m": torch.ones(3)}})
    saver = dcp.Saver(Snapshots(store, chunk_nbytes))
    saver.plan(tensors)
    return saver.write(saver.stage(tensors), ref, {"state": plain, **(data or {})}, f"t{ref.step}")


def memory():
    return MemoryStore(objects={})
