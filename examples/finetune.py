"""Fine-tune a language model: TRL's SFTTrainer, after its documentation, with LoRA or all weights,
on one GPU or sharded over several by FSDP2. Nothing in it knows of the harness, which runs it as it
is (docs/trainers/transformers.md):

    harness run --run s3://bucket/runs/lora -- examples/finetune.py \\
        --model Qwen/Qwen3-0.6B --data trl-lib/Capybara --output-dir out
    harness run --run s3://bucket/runs/8b --mesh dp_shard=8 -- examples/finetune.py \\
        --fsdp --rank 0 --model Qwen/Qwen3-8B --data trl-lib/Capybara

`--data`: a data set of the Hugging Face hub, or files of JSON lines, each with "text", "messages"
or "prompt" and "completion".
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("--model", required=True, help="a name on the hub, or a folder")
p.add_argument("--data", required=True, help="a name on the hub, or files of JSON lines")
p.add_argument("--output-dir", default="out", help="where the weights go in the end")
p.add_argument("--epochs", type=float, default=1.0)
p.add_argument("--steps", type=int, default=-1, help="instead of epochs")
p.add_argument("--batch", type=int, default=4, help="samples in a micro-batch")
p.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step on each GPU")
p.add_argument("--length", type=int, default=1024, help="tokens of a sample at most")
p.add_argument("--rank", type=int, default=16, help="of the adapters; 0: train all weights")
p.add_argument("--fsdp", action="store_true", help="shard the model over the GPUs")
p.add_argument("--lr", type=float, default=2e-4)
p.add_argument("--eval-every", type=int, default=50, help="steps; 0: no evaluation")
p.add_argument("--seed", type=int, default=0)
p.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
a = p.parse_args()

on_gpu = torch.cuda.is_available()
args = SFTConfig(
    output_dir=a.output_dir,
    num_train_epochs=a.epochs,
    max_steps=a.steps,
    per_device_train_batch_size=a.batch,
    gradient_accumulation_steps=a.accumulation,
    learning_rate=a.lr,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    max_length=a.length,
    logging_steps=10,
    eval_strategy="steps" if a.eval_every else "no",
    eval_steps=a.eval_every or None,
    save_strategy="no",  # the run's snapshots do that
    bf16=on_gpu,
    use_cpu=not on_gpu,
    report_to=a.report_to,
    seed=a.seed,
    fsdp=a.fsdp,
    # one rank of a copy reads the weights; activations are computed again in the backward
    fsdp_config={"cpu_ram_efficient_loading": True, "activation_checkpointing": on_gpu},
    gradient_checkpointing=False if a.fsdp else on_gpu,
)
if Path(a.data).suffix or any(c in a.data for c in "*?"):
    data = load_dataset("json", data_files=a.data, split="train")
else:
    data = load_dataset(a.data, split="train")
held_out = None
if a.eval_every:
    parts = data.train_test_split(test_size=min(200, len(data) // 10), seed=a.seed)
    data, held_out = parts["train"], parts["test"]

adapters = None
if a.rank:
    adapters = LoraConfig(r=a.rank, lora_alpha=2 * a.rank, task_type="CAUSAL_LM")

trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(
        a.model, dtype=torch.bfloat16 if on_gpu else torch.float32
    ),
    processing_class=AutoTokenizer.from_pretrained(a.model),
    args=args,
    train_dataset=data,
    eval_dataset=held_out,
    peft_config=adapters,
)
trainer.train()
trainer.save_model()
