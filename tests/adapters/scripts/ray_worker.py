"""A worker function for Ray Train, and a stand-in for the part of Ray that it meets: the documented
methods of ray.train's context, `report`, and a TorchTrainer's worker - a process group that stands,
its variables, and a thread that is not the main one."""

import argparse
import os
import sys
import threading
import time
import types

p = argparse.ArgumentParser()
p.add_argument("url")
p.add_argument("--fail-at", type=int, default=0)
a = p.parse_args()


class Context:
    def get_world_rank(self):
        return int(os.environ["RANK"])

    def get_world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def get_local_rank(self):
        return 0

    def get_local_world_size(self):
        return 1


ray, ray_train = types.ModuleType("ray"), types.ModuleType("ray.train")
ray_train.get_context = Context
ray_train.report = lambda metrics, checkpoint=None: print("reported", metrics, flush=True)
ray.train = ray_train
sys.modules |= {"ray": ray, "ray.train": ray_train}

# ---- the worker function, as a person writes it --------------------------------------------------
import torch
import torch.distributed as dist
from torch import nn

from harness.adapters.ray import report, train_loop


def train(run, config):
    torch.manual_seed(3)
    model = nn.Linear(8, 2)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=config["lr"]))
    data = [(torch.full((8,), i / 64), i % 2) for i in range(64)]
    for step in run.steps(data, total=12, global_batch=12, micro_batch=2):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        if step.number == a.fail_at and run.rank == 0:
            while getattr(run.snapshots.latest(), "step", 0) < 4:  # it is on its way
                time.sleep(0.05)
            raise RuntimeError("a node of Ray's is gone")
        step.update()
        report(run, loss=step.loss)


# ---- what a TorchTrainer does --------------------------------------------------------------------
ended = []


def per_worker():
    train_loop(train, a.url, snapshot_every_steps=4, reduce="exact")({"lr": 0.01})
    ended.append(True)


dist.init_process_group("gloo")
thread = threading.Thread(target=per_worker)
thread.start()
thread.join()
sys.stdout.flush()
os._exit(0 if ended else 1)
