"""A script with transformers' Trainer, as its documentation has it: it knows nothing of us. Appends
"STEP LOSS PID" to the file that it is given."""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, i):
        ids = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs, **more):
        if state.is_world_process_zero and "loss" in logs:
            with open(sys.argv[1], "a") as f:
                f.write(f"{state.global_step} {logs['loss']} {os.getpid()}\n")


torch.manual_seed(3)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads)),
    args=TrainingArguments(
        output_dir=sys.argv[2],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-3,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    ),
    train_dataset=Rows(),
    callbacks=[Losses()],
)
trainer.train()
