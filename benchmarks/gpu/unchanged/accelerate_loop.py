"""A loop with Accelerate, as its documentation has it: it knows nothing of us. Appends
"STEP LOSS PID" to the file that it is given."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if torch.cuda.is_available() else "no",
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
model.append(nn.Linear(512, 8))
x = torch.randn(480, 64, generator=torch.Generator().manual_seed(1))
train = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
loss_of, done, losses = nn.CrossEntropyLoss(), 0, []
for features, labels in train:
    with accelerator.accumulate(model):
        loss = loss_of(model(features), labels)
        losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        done += 1
        if accelerator.is_main_process:
            with open(sys.argv[1], "a") as f:
                f.write(f"{done} {sum(losses) / len(losses)} {os.getpid()}\n")
        losses = []
accelerator.end_training()
