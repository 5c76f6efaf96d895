"""A script with transformers' Trainer and a model of its own, whose data has samples that make the
loss NaN, or far too great. It knows nothing of us."""

import importlib
import math
import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

NAN, POISONED, SAMPLES = 7, 77, 92


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        y = x.sum()
        if i == NAN:
            x = x * math.nan
        return {"x": x, "labels": y + 1e4 * (i == POISONED)}


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x)[:, 0] - labels).square().mean()}


class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if "DIE_AT" in os.environ:  # the tests' own
            importlib.import_module("dying").die_at(str(state.global_step), "events.died")

    def on_log(self, args, state, control, logs, **more):
        if state.is_world_process_zero and "learning_rate" in logs:
            with open("events.logs", "a") as f:
                f.write(f"{state.global_step} {logs}\n")


args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=5,
    num_train_epochs=6,
    learning_rate=3e-2,
    weight_decay=0.1,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
)
torch.manual_seed(3)
trainer = Trainer(model=Line(), args=args, train_dataset=Rows(), callbacks=[Told()])
trainer.train()
if trainer.is_world_process_zero():
    weights = [p.detach().double().sum().item() for p in trainer.model.parameters()]
    with open("events.end", "w") as f:
        f.write(f"{trainer.state.global_step}\n{weights!r}\n")
