"""A script with Lightning's Trainer, as its documentation has it: it knows nothing of us. Appends
"STEP NORM PID", of all weights, to the file that it is given."""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8))

    def training_step(self, batch, i):
        features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Norms(L.Callback):
    def __init__(self):
        self.told = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, i):
        if trainer.global_step > self.told:
            self.told = trainer.global_step
            norm = torch.stack([p.detach().double().norm() for p in module.parameters()]).norm()
            if trainer.is_global_zero:
                with open(sys.argv[1], "a") as f:
                    f.write(f"{trainer.global_step} {norm.item()} {os.getpid()}\n")


L.seed_everything(5)
x = torch.randn(480, 64, generator=torch.Generator().manual_seed(1))
trainer = L.Trainer(
    max_epochs=1,
    accumulate_grad_batches=2,
    default_root_dir=sys.argv[2],
    precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[Norms()],
)
trainer.fit(Net(), DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=4, shuffle=True))
