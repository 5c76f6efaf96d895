"""A script with transformers' Trainer, as its documentation has it: it knows nothing of us."""

import argparse
import importlib
import json
import os
import time

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("--accumulation", type=int, default=5)
p.add_argument("--epochs", type=float, default=4.0)
p.add_argument("--max-steps", type=int, default=-1)
p.add_argument("--samples", type=int, default=92)
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--sleep-s", type=float, default=0.0, help="after each step")
p.add_argument("--output-dir", default="out")
p.add_argument("--metrics", action="store_true")
p.add_argument("--best", action="store_true")
p.add_argument("--patience", type=int, default=0)
p.add_argument("--events", default="events")
p.add_argument("--stream", action="store_true")
p.add_argument("--workers", type=int, default=0)
p.add_argument("--logging-steps", type=int, default=1)
p.add_argument("--fsdp", action="store_true")
p.add_argument("--deepspeed", help="a DeepSpeed config file")
p.add_argument("--weights", help="a folder to load the model from, with --split")
p.add_argument("--split", type=json.loads, help="a DistributedConfig, as JSON")
a = p.parse_args()


class Rows(torch.utils.data.Dataset):
    """Of different lengths, so micro-batches have different numbers of labels."""

    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        g = torch.Generator().manual_seed(self.first + i)
        ids = torch.randint(0, 64, (12,), generator=g)
        labels = ids.clone()
        labels[4 + (self.first + i) % 8 :] = -100
        return {"input_ids": ids, "labels": labels}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = Rows(0, a.samples)
        return (rows[i] for i in range(len(rows)))


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


class Events(TrainerCallback):
    """What was done, and how often."""

    def __init__(self):
        self.seen = 0

    def tell(self, what, state):
        if state.is_world_process_zero:
            with open(a.events, "a") as f:
                f.write(f"{what} {state.global_step}\n")

    def on_epoch_begin(self, args, state, control, **more):
        self.tell("epoch_begin", state)

    def on_epoch_end(self, args, state, control, **more):
        self.tell("epoch_end", state)

    def on_step_begin(self, args, state, control, **more):
        if "LOSE" in os.environ:
            dying = importlib.import_module("dying")
            dying.lose_one(str(state.global_step + 1), a.events + ".lost")

    def on_step_end(self, args, state, control, **more):
        self.seen += 1
        assert self.seen == state.global_step
        time.sleep(a.sleep_s)
        if "DIE_AT" in os.environ:  # the tests' own
            dying = importlib.import_module("dying")
            dying.die_at(str(state.global_step), a.events + ".died")
            dying.wait_for_notice(str(state.global_step))

    def on_evaluate(self, args, state, control, metrics, **more):
        self.tell("evaluate", state)

    def on_save(self, args, state, control, **more):
        self.tell("save", state)

    def on_log(self, args, state, control, logs, **more):
        kept = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        if state.is_world_process_zero:
            with open(a.events + ".logs", "a") as f:
                f.write(f"{state.global_step} {kept}\n")


args = TrainingArguments(
    output_dir=a.output_dir,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=a.accumulation,
    num_train_epochs=a.epochs,
    max_steps=a.max_steps,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=3,
    logging_steps=a.logging_steps,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="steps",
    save_steps=5,
    save_total_limit=2,
    load_best_model_at_end=a.best,
    metric_for_best_model="loss" if a.best or a.patience else None,
    dataloader_num_workers=a.workers,
    include_num_input_tokens_seen="all",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=7,
    fsdp=a.fsdp,
    deepspeed=a.deepspeed,
    save_only_model=bool(a.split),
)
torch.manual_seed(3)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=a.dropout,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    )
)
if a.split:
    from transformers.distributed import DistributedConfig

    how = DistributedConfig(**a.split)
    model = LlamaForCausalLM.from_pretrained(a.weights, distributed_config=how)
else:
    model.unused = torch.nn.Linear(3, 3)  # has no gradient, so it must not decay
callbacks = [Events()]
if a.patience:
    callbacks.append(EarlyStoppingCallback(early_stopping_patience=a.patience))
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Stream() if a.stream else Rows(0, a.samples),
    eval_dataset=Rows(10_000, 18),
    compute_metrics=accuracy if a.metrics else None,
    callbacks=callbacks,
)
output = trainer.train()
trainer.save_model()
sums = [p.detach().double().sum() for p in trainer.model.parameters()]
total = sum(float(s.full_tensor() if hasattr(s, "full_tensor") else s) for s in sums)
if trainer.is_world_process_zero():
    with open(a.events + ".end", "w") as f:
        f.write(f"{output.training_loss!r} {trainer.state.global_step} {total!r}\n")
        f.write(f"{trainer.state.best_global_step} {trainer.state.best_model_checkpoint}\n")
        f.write(f"{os.environ.get('WORLD_SIZE')}\n")
