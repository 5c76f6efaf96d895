"""A Lightning script as its documentation writes them: it knows nothing of the harness."""

import argparse
import copy
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torchmetrics
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--package", default="lightning.pytorch")
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--max-steps", type=int, default=-1)
p.add_argument("--samples", type=int, default=52)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--accumulate", type=int, default=3)
p.add_argument("--val-every", type=float, default=0.5)
p.add_argument("--patience", type=int, default=100)
p.add_argument("--spike", type=int, default=-1, help="a step with a far greater loss")
p.add_argument("--skip", type=int, default=0, help="every how many batches returns None")
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--sleep-s", type=float, default=0.0)
p.add_argument("--shuffle", action="store_true")
p.add_argument("--strategy", default="auto")
p.add_argument("--rate", type=float, default=1e-2)
p.add_argument("--split", action="store_true", help="a model on two ranks, by FSDP2")
p.add_argument("--zero", type=int, default=0, help="a model on two ranks, by DeepSpeed's ZeRO")
p.add_argument("--zero-options", default="{}", help="as JSON")
p.add_argument("--odd", default="", help="something that cannot be made elastic")
p.add_argument("--folder", default=os.environ.get("EVENTS", "."))
a = p.parse_args()
L = importlib.import_module(a.package)
strategies = importlib.import_module(f"{a.package}.strategies")
Path(a.folder).mkdir(exist_ok=True)
of_two = a.split or a.zero > 0  # one model on two ranks


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 32})
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(a.dropout), nn.Linear(32, 1)
        )
        self.unused = nn.Linear(3, 3)  # has no gradient, so it must not decay
        self.mean_of_losses = torchmetrics.MeanMetric()

    def configure_model(self):
        if a.split:
            mesh = self.device_mesh["data_parallel"]
            parts = (self.net[0], self.net, self.unused)
            for part in parts[:2] if a.odd == "outside" else parts:
                fully_shard(part, mesh=mesh)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if "LOSE" in os.environ:
            lost = str(Path(a.folder, "lost"))
            importlib.import_module("dying").lose_one(str(self.trainer.global_step + 1), lost)
        time.sleep(a.sleep_s)
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.trainer.global_step == a.spike:
            loss = loss * 1e5
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.mean_of_losses(loss)
        self.log("mean", self.mean_of_losses, on_step=False, on_epoch=True)
        return None if a.skip and batch_idx % a.skip == 1 else loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=of_two)

    def configure_optimizers(self):
        if a.odd == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        optimizer = torch.optim.AdamW(self.parameters(), lr=a.rate)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ZeroOnCpu(strategies.DeepSpeedStrategy):
    """Lightning's own, which wants GPUs."""

    def setup_environment(self):
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._init_deepspeed_distributed()
        deepspeed = importlib.import_module("deepspeed")
        made = deepspeed.initialize
        deepspeed.initialize = lambda args=None, **how: made(**how)  # args name a GPU


class Greedy(Net):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class Two(Net):
    """Optimizes by itself: two optimizers, one after the other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gain = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        body, gain = self.optimizers()
        for optimizer in (body, gain):
            loss = nn.functional.mse_loss(self.net(x) * self.gain, y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("mean", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        body = torch.optim.AdamW(self.net.parameters(), lr=a.rate)
        gain = torch.optim.SGD([self.gain], lr=1e-3)
        return [body, gain], [torch.optim.lr_scheduler.StepLR(body, 5, 0.9)]


class Events(L.Callback):
    """What happened, a line for each: on the process that may write."""

    def __init__(self):
        self.fits = 0

    def on_fit_start(self, trainer, module):
        self.fits += 1
        self.trainer = trainer  # as progress bars have it
        if not of_two:  # FSDP2 and DeepSpeed refuse it
            copy.deepcopy(trainer.callbacks)  # as tools that look at a trainer do

    def say(self, trainer, what):
        if trainer.is_global_zero:
            with Path(a.folder, "events").open("a") as file:
                file.write(f"{what} {trainer.global_step}\n")

    def on_train_epoch_start(self, trainer, module):
        self.say(trainer, "epoch_start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if "DIE_AT" in os.environ:  # the tests' own
            done = trainer.global_step // len(trainer.optimizers)  # it counts each optimizer's
            importlib.import_module("dying").die_at(str(done))
        assert len(batch[0]) == len(batch[1])
        assert a.odd == "manual" or a.skip or outputs["loss"].ndim == 0
        self.say(trainer, f"batch_end_{batch_idx}")
        if not trainer.fit_loop._should_accumulate():
            loss = float(trainer.callback_metrics["train_loss"])
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.say(trainer, f"step_{loss:.5f}_{rate:.7f}")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.say(trainer, f"validated_{float(trainer.callback_metrics['val_loss']):.5f}")

    def on_train_epoch_end(self, trainer, module):
        said = [float(trainer.callback_metrics[name]) for name in ("train_loss_epoch", "mean")]
        self.say(trainer, f"epoch_end_{said[0]:.5f}_{said[1]:.5f}")

    def on_train_end(self, trainer, module):
        self.say(trainer, "train_end")

    def on_exception(self, trainer, module, exception):
        self.say(trainer, f"exception_{type(exception).__name__}")


def total(tensor):
    if a.zero == 3:
        with importlib.import_module("deepspeed").zero.GatheredParameters(tensor):
            return tensor.double().sum()
    return (tensor.full_tensor() if a.split else tensor).double().sum()


def strategy():
    if a.zero:
        return ZeroOnCpu(stage=a.zero, **json.loads(a.zero_options))
    return strategies.ModelParallelStrategy(2, 1) if a.split else a.strategy


L.seed_everything(7)
made = torch.Generator().manual_seed(1)
x = torch.randn(a.samples, 8, generator=made)
y = x.sum(1, keepdim=True) + 0.1 * torch.randn(a.samples, 1, generator=made)
train = DataLoader(TensorDataset(x, y), batch_size=a.batch, shuffle=a.shuffle)
val = DataLoader(TensorDataset(x[:16], y[:16]), batch_size=8)
callbacks = importlib.import_module(f"{a.package}.callbacks")
loggers = importlib.import_module(f"{a.package}.loggers")
model = {"iterator": Greedy, "manual": Two}.get(a.odd, Net)()
if a.odd == "loaders":
    train = [train, train]
trainer = L.Trainer(
    accelerator="cpu",
    devices=2 if of_two else "auto",
    strategy=strategy(),
    max_epochs=a.epochs,
    max_steps=a.max_steps,
    accumulate_grad_batches=1 if a.odd in ("scheduler", "manual") else a.accumulate,
    gradient_clip_val=None if a.odd == "manual" else 1.0,
    val_check_interval=a.val_every,
    log_every_n_steps=1,
    default_root_dir=a.folder,
    logger=[loggers.CSVLogger(a.folder), loggers.TensorBoardLogger(a.folder, "board")],
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        Events(),
        callbacks.EarlyStopping("val_loss", patience=a.patience),
        callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
        *([callbacks.GradientAccumulationScheduler({0: 2})] if a.odd == "scheduler" else []),
    ],
)
begun = threading.enumerate()
trainer.fit(model, train, val)
ended = {
    "weights": [float(total(p).detach()) for p in model.parameters()],
    "steps": trainer.global_step,
    "best": float(trainer.checkpoint_callback.best_model_score),
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
}
if trainer.is_global_zero:
    Path(a.folder, "ended").write_text(json.dumps(ended))
    assert Path(trainer.checkpoint_callback.best_model_path).exists()
    left = [f"{one.name} {one.daemon}" for one in threading.enumerate() if one not in begun]
    Path(a.folder, "threads").write_text("\n".join(left))
sys.stdout.flush()
