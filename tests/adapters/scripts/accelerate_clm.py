"""A language model trained as transformers' run_clm_no_trainer.py does it, with a tiny model."""

import argparse
import importlib
import math
import os
import random

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

p = argparse.ArgumentParser()
p.add_argument("--out", default=".")
p.add_argument("--num_train_epochs", type=int, default=2)
p.add_argument("--max_train_steps", type=int, default=None)
p.add_argument("--gradient_accumulation_steps", type=int, default=2)
p.add_argument("--per_device_train_batch_size", type=int, default=4)
p.add_argument("--num_warmup_steps", type=int, default=2)
p.add_argument("--checkpointing_steps", type=int, default=3)
p.add_argument("--dropout", type=float, default=0.0)
args = p.parse_args()
LENGTH, WORDS = 12, 50


class Lines(GeneralTracker):
    """A tracker that writes what it is told."""

    name, requires_logging_directory = "lines", False

    @property
    def tracker(self):
        return None

    @on_main_process
    def store_init_configuration(self, values):
        self.write("config", sorted(values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.write(step, {k: round(v, 4) for k, v in values.items()})

    def write(self, *words):
        with open(os.path.join(args.out, "events"), "a") as f:
            f.write(" ".join(map(str, words)) + "\n")


def sentences(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        length = rng.randrange(4, LENGTH + 1)
        words = [(7 * i + rng.randrange(3)) % WORDS for i in range(length)]
        rest = LENGTH - length
        yield {
            "input_ids": torch.tensor(words + [0] * rest),
            "attention_mask": torch.tensor([1] * length + [0] * rest),
            "labels": torch.tensor(words + [-100] * rest),
        }


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=[Lines()],
        project_config=ProjectConfiguration(
            project_dir=args.out, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(3)
    with accelerator.main_process_first():
        train, test = list(sentences(70, 1)), list(sentences(18, 2))
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, attention_dropout=args.dropout,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    per_device = args.per_device_train_batch_size
    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=per_device)
    eval_dataloader = DataLoader(test, collate_fn=collate, batch_size=per_device)
    no_decay = ["bias", "norm.weight"]
    groups = [
        {
            "params": [
                p
                for n, p in model.named_parameters()
                if decays is not any(d in n for d in no_decay)
            ],
            "weight_decay": 0.1 if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    overrode = False
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * per_epoch
        overrode = True
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps
        if overrode
        else args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if overrode:
        args.max_train_steps = args.num_train_epochs * per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / per_epoch)
    accelerator.init_trackers("clm_no_trainer", vars(args))
    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        for _, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                accelerator.log({"lr": lr_scheduler.get_last_lr()[0]}, step=completed_steps)
                if completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state()
                if os.environ.get("DIE_AT"):
                    importlib.import_module("dying").die_at(str(completed_steps))
            if completed_steps >= args.max_train_steps:
                break
        model.eval()
        losses = []
        for _, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        eval_loss = torch.mean(torch.cat(losses)[: len(test)])
        accelerator.log({"perplexity": math.exp(eval_loss), "epoch": epoch}, step=completed_steps)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        torch.save(unwrapped.state_dict(), os.path.join(args.out, "weights.pt"))
    accelerator.end_training()


main()
