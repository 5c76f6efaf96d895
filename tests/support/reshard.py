"""Saves a model and its optimizer on W ranks and loads them on W', for all W and W' up to 4. Forks
its ranks: torch is imported once.

`python -m support.reshard FOLDER` ends with an assertion, or prints the hash of the weights of each
snapshot.
"""

import functools
import importlib
import queue
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.lab.replay import _whole
from harness.worker.training_state import between_updates
from storage import Ref, Snapshots, open_store
from storage.snapshots.upload import Uploader, UploadJob
from storage.tensors.dcp import Saver
from storage.tensors.loading import load
from storage.tensors.state_tree import join, split
from support import worlds

WORLDS, KINDS = range(1, 5), ("ddp", "fsdp2")


def build(kind, seed):
    """A model whose rows divide by no world, with an optimizer that has its state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 5), nn.Embedding(1, 3))
    grads = [torch.randn_like(p) for p in model.parameters()]
    if kind == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    # makes its state and leaves the weights as the seed made them
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
    optimizer.step()
    return model, optimizer


def stepped(model, inputs):
    """An optimizer that has its state: made by a step that leaves the weights as they are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(inputs).square().sum().backward()
    optimizer.step()
    return optimizer


def state_of(model, optimizer):
    return split({"model": model.state_dict(), "optimizer": [optimizer.state_dict()]})


def bytes_of(t):
    whole = (t.full_tensor() if isinstance(t, DTensor) else t).detach().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def save(url, model, optimizer):
    """As the snapshot whose step is 1 and whose epoch is the number of ranks."""
    group, world = dist.group.WORLD, dist.get_world_size()
    tensors, plain = state_of(model, optimizer)
    save_tensors(url, Ref(1, world), model, tensors, plain, group if world > 1 else None)


def save_tensors(url, ref, model, tensors, plain, group):
    """By the engine: copied beside, handed over, sent. `group`: all ranks; None: this one alone."""
    store = open_store(url)
    saver = Saver(Snapshots(store), group, own_memory=False)
    saver.plan(tensors)
    buffer = torch.zeros(saver.nbytes, dtype=torch.uint8)
    staged = saver.begin(tensors, between_updates(model, tensors), buffer)
    staged.wait()
    with torch.no_grad():
        for t in tensors.values():
            t.zero_()  # the snapshot is of before
    layout = staged.layout
    job = UploadJob(
        ref,
        saver.rank,
        saver.world,
        f"t{saver.rank}",
        layout.files,
        layout.index,
        {"state": plain},
        weights="model/",
    )
    told = queue.SimpleQueue()
    Uploader(store, commit_timeout_s=60).submit(job, buffer.numpy().data, told.put)
    outcome = told.get(timeout=90)
    assert outcome.state == "committed", outcome
    if group is not None:
        dist.barrier(group)


def check(url, saved_on, model, optimizer):
    """Load what so many ranks saved, and compare all of it with what is stored."""
    tensors, _ = state_of(model, optimizer)
    snapshots = Snapshots(open_store(url))
    manifest = snapshots.load(Ref(1, saved_on))
    load(snapshots, manifest, tensors)
    join(tensors, manifest.data["state"])
    for name, t in tensors.items():
        wanted = _whole(snapshots, manifest, name).tobytes()
        assert bytes_of(t) == wanted, (url, saved_on, name)


def fork(world, rendezvous, work):
    """`work` in a world of so many ranks, which meet at this file; every one must end well."""

    def ranked(rank):
        store = dist.FileStore(rendezvous, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        work()
        dist.barrier()

    worlds.fork(world, ranked, rendezvous)


def import_all():
    """What every rank would import later."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"):
        importlib.import_module(name)


def save_all(folder):
    for kind in KINDS:
        save(f"{folder}/{kind}", *build(kind, seed=0))


def check_all(folder):
    for kind in KINDS:
        for saved_on in WORLDS:
            check(f"{folder}/{kind}", saved_on, *build(kind, seed=1))


if __name__ == "__main__":
    import_all()
    for what in (save_all, check_all):
        for world in WORLDS:
            meet = f"{sys.argv[1]}/{what.__name__}-{world}"
            fork(world, meet, functools.partial(what, sys.argv[1]))
    for kind in KINDS:
        snapshots = Snapshots(open_store(f"{sys.argv[1]}/{kind}"))
        for world in WORLDS:
            print(kind, world, snapshots.load(Ref(1, world)).data["weights"])
