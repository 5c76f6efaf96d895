"""A training of long steps in each trainer, as its documentation writes them. What the script counts
in every micro-batch shows whether a step that was dropped half way left a trace."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

p = argparse.ArgumentParser()
p.add_argument("trainer", choices=["transformers", "lightning", "fabric", "accelerate"])
p.add_argument("--folder", default=".")
p.add_argument("--steps", type=int, default=5)
p.add_argument("--accumulate", type=int, default=8)
p.add_argument("--sleep-s", type=float, default=0.1, help="in each micro-batch")
p.add_argument("--notice-at", type=int, default=0, help="in which micro-batch of this process")
p.add_argument("--grace-s", type=float, default=0.0)
a = p.parse_args()
Path(a.folder).mkdir(exist_ok=True)


def notice():
    """Write the mark that an agent writes when a cloud says that it takes the node."""
    from harness.node.marks import MarkFile, Want

    mark = MarkFile(Path(os.environ["HARNESS_MARK"]))
    mark.write(Want.RESIZE, "notice:x", time.time() + a.grace_s)


class Net(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
        )

    def forward(self, x, labels=None):
        self.calls += 1
        time.sleep(a.sleep_s)
        if self.calls == a.notice_at:
            notice()
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        return {"loss": loss}


class Rows(Dataset):
    def __len__(self):
        return 4 * a.accumulate * a.steps

    def __getitem__(self, i):
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(i))}


def with_transformers():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counts(TrainerCallback):
        begun = parts = 0

        def __init__(self):
            self.begun = self.parts = 0

        def on_step_begin(self, args, state, control, **more):
            self.begun += 1

        def on_substep_end(self, args, state, control, **more):
            self.parts += 1

    counts = Counts()
    args = TrainingArguments(
        output_dir=a.folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=a.accumulate,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=2,
        save_strategy="no",
        remove_unused_columns=False,
        include_num_input_tokens_seen="all",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(Net(), args, train_dataset=Rows(), callbacks=[counts])
    trainer.train()
    losses = [said["loss"] for said in trainer.state.log_history if "loss" in said]
    return counts.begun, counts.parts, trainer.state.num_input_tokens_seen, losses


def with_lightning():
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Counts(L.Callback):
        begun = 0

        def on_train_batch_start(self, *args):
            self.begun += 1

        def state_dict(self):
            return {"begun": self.begun}

        def load_state_dict(self, state):
            self.begun = state["begun"]

    counts = Counts()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=a.accumulate,
        logger=False,
        default_root_dir=a.folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counts],
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=4, shuffle=True))
    return counts.begun, float(trainer.callback_metrics["loss_epoch"])


def with_fabric():
    from harness.adapters.lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, accumulate=a.accumulate)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4, shuffle=True))
    for _ in fabric.epochs(1):
        for batch in loader:
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=a.accumulate, cpu=True)
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        DataLoader(Rows(), batch_size=4, shuffle=True),
    )
    begun, total = 0, 0
    for batch in loader:
        begun += 1
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            total += accelerator.gather(loss.detach()).mean()  # an exchange in each iteration
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return begun, float(total)


torch.manual_seed(3)
told = globals()[f"with_{a.trainer}"]()
Path(a.folder, "told").write_text(json.dumps(told))
