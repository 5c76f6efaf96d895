"""A Lightning script that fits three times: one trainer, a second one with another batch, and that
one again for more epochs."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--folder", required=True)
p.add_argument("--fits", type=int, default=3)
a = p.parse_args()
Path(a.folder).mkdir(exist_ok=True)


def die_at(where):
    if "DIE_AT" in os.environ:  # the tests' own
        importlib.import_module("dying").die_at(where)


class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, 1)

    def _loss(self, batch):
        return nn.functional.mse_loss(self.head(self.net(batch[0])), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Events(L.Callback):
    def __init__(self, fit):
        self.fit = fit

    def say(self, trainer, what):
        if trainer.is_global_zero:
            with Path(a.folder, "events").open("a") as file:
                file.write(f"{self.fit} {what} {trainer.global_step}\n")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        die_at(f"fit {self.fit} step {trainer.global_step}")
        if not trainer.fit_loop._should_accumulate():
            self.say(trainer, f"step_{float(trainer.callback_metrics['train_loss'])!r}")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.say(trainer, f"validated_{float(trainer.callback_metrics['val_loss'])!r}")

    def on_train_end(self, trainer, module):
        self.say(trainer, "train_end")


def trainer_for(fit, epochs, accumulate):
    return L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        default_root_dir=f"{a.folder}/{fit}",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Events(fit), ModelCheckpoint(monitor="val_loss")],
    )


L.seed_everything(7)
made = torch.Generator().manual_seed(1)
x = torch.randn(52, 8, generator=made)
y = x.sum(1, keepdim=True)
train = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
val = DataLoader(TensorDataset(x[:16], y[:16]), batch_size=8)
ended = []


def note(trainer, model):
    ended.append(
        {
            "weights": [float(p.detach().double().sum()) for p in model.parameters()],
            "steps": trainer.global_step,
            "best": float(trainer.checkpoint_callback.best_model_score),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
    )


model = Net(16)
first = trainer_for(1, 2, 3)
first.fit(model, train, val)
note(first, model)
die_at("after fit 1")
tuned = Net(24)  # drawn as the first fit has left the generators
half = DataLoader(TensorDataset(x[:26], y[:26]), batch_size=2, shuffle=True)
second = trainer_for(2, 2, 4)
second.fit(tuned, half, val)
note(second, tuned)
if a.fits > 2:
    second.fit_loop.max_epochs = 3
    second.callbacks[0].fit = 3
    second.fit(tuned, half, val)
    note(second, tuned)
if second.is_global_zero:
    Path(a.folder, "ended").write_text(json.dumps(ended))
sys.stdout.flush()
