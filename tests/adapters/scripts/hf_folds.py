"""A cross-validation with transformers' Trainer: a training for each fold, and at the end one more
of the last model with the same Trainer."""

import argparse
import importlib
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--folds", type=int, default=3)
p.add_argument("--samples", type=int, default=48)
p.add_argument("--epochs", type=float, default=1.0)
p.add_argument("--other-data-in", type=int, default=0)
p.add_argument("--seeded", action="store_true", help="each fold's model")
a = p.parse_args()


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(self.rows[i]))
        return {"input_ids": ids, "labels": ids.clone()}


def at(where):
    """What the tests do at this place."""
    if "DIE_AT" in os.environ:
        dying = importlib.import_module("dying")
        dying.die_at(where, f"died {where}")
        if os.environ.get("NOTICE_AT") == where:
            open(f"noticed {where}", "a").close()
        dying.wait_for_notice(where)


class Events(TrainerCallback):
    def __init__(self, fold):
        self.fold = fold

    def on_step_end(self, args, state, control, **more):
        at(f"fold {self.fold} step {state.global_step}")

    def on_log(self, args, state, control, logs, **more):
        kept = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        if state.is_world_process_zero:
            with open("events.logs", "a") as f:
                f.write(f"{self.fold * 1000 + state.global_step} {kept}\n")


config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=1,
    eos_token_id=2,
)
torch.manual_seed(3)
scores, rows = [], torch.randperm(a.samples).tolist()
for fold in range(1, a.folds + 1):
    held = rows[fold - 1 :: a.folds]
    rest = [row for row in rows if row not in held]
    if fold == a.other_data_in:
        rest = rest[:-4]
    if a.seeded:
        torch.manual_seed(fold)
    model = LlamaForCausalLM(config)  # else drawn as the fold before has left the generators
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"out-{fold}",
            per_device_train_batch_size=2 if fold == 2 else 4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=3,
            num_train_epochs=a.epochs,
            learning_rate=3e-3,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=Rows(rest),
        eval_dataset=Rows(held),
        callbacks=[events := Events(fold)],
    )
    output = trainer.train()
    at(f"after fold {fold}")
    score = trainer.evaluate()["eval_loss"]
    scores.append((output.global_step, output.training_loss, score, trainer.state.best_metric))
events.fold += 1
again = trainer.train()
scores.append((again.global_step, again.training_loss, trainer.evaluate()["eval_loss"], None))
if trainer.is_world_process_zero():
    total = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    with open("events.end", "w") as f:
        f.writelines(f"{score!r}\n" for score in [*scores, total])
