"""Scripts with TRL's SFTTrainer and DPOTrainer, as its documentation has them: they know nothing of
us."""

import argparse
import copy
import importlib
import os
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("--kind", choices=("sft", "dpo"), default="sft")
p.add_argument("--lora", action="store_true")
p.add_argument("--rank", type=int, default=4)
p.add_argument("--dora", action="store_true")
p.add_argument("--bits", type=int, help="of the base, by bitsandbytes: 4 or 8")
p.add_argument("--optim", default="adamw_torch")
p.add_argument("--fsdp", action="store_true")
p.add_argument("--epochs", type=float, default=2.0)
p.add_argument("--sleep-s", type=float, default=0.0, help="after each step")
p.add_argument("--events", default="events")
a = p.parse_args()

words = {f"w{i}": i + 4 for i in range(60)} | {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
    pad_token="<pad>",
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
)
tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()


def text(seed, n):
    g = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=g))


class Events(TrainerCallback):
    """What was logged, and how often."""

    def on_step_begin(self, args, state, control, **more):
        if "LOSE" in os.environ:
            dying = importlib.import_module("dying")
            dying.lose_one(str(state.global_step + 1), a.events + ".lost")

    def on_step_end(self, args, state, control, **more):
        time.sleep(a.sleep_s)
        if os.environ.get("DIE_AT"):  # the tests' own
            importlib.import_module("dying").die_at(str(state.global_step), a.events + ".died")

    def on_evaluate(self, args, state, control, metrics, **more):
        if state.is_world_process_zero:
            with open(a.events, "a") as f:
                f.write(f"evaluate {state.global_step}\n")

    def on_log(self, args, state, control, logs, **more):
        kept = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        if state.is_world_process_zero:
            with open(a.events + ".logs", "a") as f:
                f.write(f"{state.global_step} {kept}\n")


same = {
    "output_dir": os.path.join(os.path.dirname(a.events), "out"),
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 5,
    "num_train_epochs": a.epochs,
    "learning_rate": 3e-3,
    "logging_steps": 2,
    # bitsandbytes packs 4-bit weights anew when it evaluates on CPUs, and loses bits
    "eval_strategy": "no" if a.bits else "steps",
    "eval_steps": 3,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 24,
    "seed": 7,
    "fsdp": a.fsdp,
    "optim": a.optim,
}
torch.manual_seed(3)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64 if a.bits else 32,  # a block of bitsandbytes
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)
if a.bits:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = BitsAndBytesConfig(
            load_in_8bit=a.bits == 8,
            load_in_4bit=a.bits == 4,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_storage=torch.float32 if a.fsdp else torch.uint8,
        )
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
more = {"processing_class": tokenizer, "callbacks": [Events()]}
if a.lora:
    from peft import LoraConfig

    more["peft_config"] = LoraConfig(
        r=a.rank, lora_alpha=8, use_dora=a.dora, task_type="CAUSAL_LM"
    )
if a.kind == "sft":
    rows = [{"text": text(i, 6 + i % 9)} for i in range(46)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**same),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:7]),
        **more,
    )
else:
    rows = [
        {"prompt": text(i, 4), "chosen": text(i + 100, 3 + i % 5), "rejected": text(i + 200, 5)}
        for i in range(46)
    ]
    trainer = DPOTrainer(
        model=model,
        ref_model=None if a.lora else copy.deepcopy(model),
        args=DPOConfig(**same),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:7]),
        **more,
    )
output = trainer.train()
sums = [p.detach().double().sum() for p in trainer.model.parameters()]
total = sum(float(s.full_tensor() if hasattr(s, "full_tensor") else s) for s in sums)
if trainer.is_world_process_zero():
    with open(a.events + ".end", "w") as f:
        f.write(f"{output.training_loss!r} {trainer.state.global_step} {total!r}\n")
