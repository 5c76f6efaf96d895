"""A loop of ours around a DeepSpeed engine. `--plain`: without DeepSpeed, to compare with."""

import argparse
import json
import os
import signal

import torch
from dying import die_at
from torch import nn

import harness
from support.number_rows import Numbers

p = argparse.ArgumentParser()
p.add_argument("--stage", type=int, default=1)
p.add_argument("--total", type=int, default=10)
p.add_argument("--dtype", default="fp32")
p.add_argument("--offload", action="store_true")
p.add_argument("--tokens", action="store_true", help="weights that are known only behind a forward")
p.add_argument("--clip", type=float, default=0.5)
p.add_argument("--plain", action="store_true")
p.add_argument("--overflow", action="store_true", help="some losses do not fit fp16")
p.add_argument("--config", default="{}")
p.add_argument("--leave", type=int, default=0, help="the node is asked to leave in this step")
a = p.parse_args()
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

run = harness.attach(seed=1, snapshot_every_steps=3)
torch.manual_seed(run.rank)  # DeepSpeed gives all ranks the first one's weights
with torch.random.fork_rng():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 2))
groups = [
    {"params": [model[0].weight, model[3].weight], "weight_decay": 0.1},
    {"params": [model[0].bias, *model[2].parameters(), model[3].bias], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
dtype = TYPES[a.dtype]
if a.plain:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    run.prepare(model, optimizer, scheduler)
    engine = model
else:
    import deepspeed

    zero = {"stage": a.stage, "stage3_param_persistence_threshold": 40}
    if a.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if a.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if a.dtype == "fp16":  # DeepSpeed wants a CPU that is fast at it; torch can on any
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if a.dtype != "fp32":
        scale = {"initial_scale_power": 4, "loss_scale_window": 3} if a.dtype == "fp16" else {}
        config[a.dtype] = {"enabled": True, **scale}
        config["data_types"] = {"grad_accum_dtype": a.dtype}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 4),
        config=config | json.loads(a.config),
    )
    harness.deepspeed(engine, run)
for step in run.steps(Numbers(), total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        found = nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
        if a.overflow and step.number in (2, 7):
            found = found * 1e8
        step.backward(found, weight=float(y.sum()) + 1.0 if a.tokens else None)
    step.update(clip_norm=a.clip)
    die_at(str(step.number))
    if step.number == a.leave:
        os.kill(os.getpid(), signal.SIGTERM)
if not a.plain and a.dtype == "fp16":
    print("scale", engine.optimizer.loss_scaler.cur_scale, engine.skipped_steps, flush=True)
