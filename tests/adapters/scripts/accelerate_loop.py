"""A training script as Accelerate's documentation writes it; nothing in it knows of the harness."""

import argparse
import importlib
import math
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--out", default=".", help="where events and weights go")
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--accumulation", type=int, default=2)
p.add_argument("--samples", type=int, default=88)
p.add_argument("--max-train-steps", type=int, default=None)
p.add_argument("--sleep-s", type=float, default=0.0)
p.add_argument("--patience", type=int, default=5, help="epochs without a better evaluation")
p.add_argument("--save-each-epoch", action="store_true")
p.add_argument("--unused", action="store_true", help="a part of the model has no gradient")
p.add_argument("--batch-norm", action="store_true")
p.add_argument("--own-order", action="store_true", help="the training loader has a generator")
p.add_argument("--own-hands", action="store_true", help="accumulates without accumulate()")
p.add_argument("--fsdp", type=int, default=0, help="of this version")
p.add_argument("--zero", type=int, default=None, help="DeepSpeed's ZeRO of this stage")
a = p.parse_args()


class Counts:
    """What the script counts for itself."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Patience:
    """Early stopping, as scripts write it for themselves."""

    def __init__(self):
        self.best, self.bad = math.inf, 0

    def update(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad > a.patience


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = [nn.BatchNorm1d(32)] if a.batch_norm else []
        self.body = nn.Sequential(nn.Linear(16, 32), *norm, nn.ReLU(), nn.Linear(32, 2))
        if a.unused:
            self.unused = nn.Linear(3, 3)  # so it must not decay

    def forward(self, x):
        return self.body(x)


def data(samples, seed):
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def ds_config():
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    optimization = {
        "stage": a.zero,
        "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    said = dict.fromkeys(sizes, "auto")
    return {**said, "gradient_clipping": 1.0, "zero_optimization": optimization}


def write(*words):
    with open(os.path.join(a.out, "events"), "a") as f:
        f.write(" ".join(map(str, words)) + "\n")


def main():
    steps = 1 if a.own_hands else a.accumulation
    plugin = zero = None
    if a.fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=a.fsdp, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
    if a.zero is not None:
        zero = DeepSpeedPlugin(hf_ds_config=ds_config())
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, fsdp_plugin=plugin, deepspeed_plugin=zero
    )
    set_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(3) if a.own_order else None
    train = DataLoader(data(a.samples, 1), batch_size=4, shuffle=True, generator=order)
    test = DataLoader(data(30, 2), batch_size=4)
    per_epoch = math.ceil(len(train) / a.accumulation)
    total = a.max_train_steps or a.epochs * per_epoch
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer,
        1.0,
        0.1,
        total if a.max_train_steps is None else total * accelerator.num_processes,
    )
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )
    counts, patience = Counts(), Patience()
    accelerator.register_for_checkpointing(counts)
    loss_of = nn.CrossEntropyLoss()
    completed, best = 0, 0.0
    per_epoch = math.ceil(len(train) / a.accumulation)
    if a.max_train_steps is None:
        total = a.epochs * per_epoch
    for epoch in range(math.ceil(total / per_epoch)):
        model.train()
        total_loss = 0
        for step, (x, y) in enumerate(train):
            if "LOSE" in os.environ:
                lost = os.path.join(a.out, "lost")
                importlib.import_module("dying").lose_one(str(completed + 1), lost)
            if a.own_hands:
                loss = loss_of(model(x), y)
                total_loss += loss.detach().float()
                accelerator.backward(loss / a.accumulation)
                stepped = (step + 1) % a.accumulation == 0 or step == len(train) - 1
                if stepped:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                with accelerator.accumulate(model):
                    loss = loss_of(model(x), y)
                    total_loss += loss.detach().float()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                stepped = accelerator.sync_gradients
            counts.seen += 1
            if stepped:
                completed += 1
                if accelerator.is_main_process:
                    write("step", completed, f"{scheduler.get_last_lr()[0]:.6f}", counts.seen)
                if os.environ.get("DIE_AT") and accelerator.is_main_process:
                    died = os.path.join(a.out, "died")
                    importlib.import_module("dying").die_at(str(completed), died)
                time.sleep(a.sleep_s)
            if completed >= total:
                break
        model.eval()
        right, losses = 0, []
        for x, y in test:
            with torch.no_grad():
                logits = model(x)
            logits, y = accelerator.gather_for_metrics((logits, y))
            losses.append(loss_of(logits, y) * len(y))
            right += (logits.argmax(1) == y).sum().item()
        value = (torch.stack(losses).sum() / 30).item()
        best = max(best, right / 30)
        stop = patience.update(value)
        if accelerator.is_main_process:
            said = f"loss {value:.4f} right {right} best {best:.4f} bad {patience.bad}"
            write("epoch", epoch, said, "iterations", step + 1, len(train), completed)
        if a.save_each_epoch:
            accelerator.save_state(os.path.join(a.out, f"epoch{epoch}"))
        if stop:
            break
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(weights, os.path.join(a.out, "weights.pt"))
        write("end", accelerator.num_processes)
    accelerator.end_training()


main()
