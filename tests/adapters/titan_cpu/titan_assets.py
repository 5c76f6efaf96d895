"""A tokenizer and some documents for torchtitan's debug model, in the working folder."""

import json
import os
import random
import tempfile
from pathlib import Path

WORDS = [f"w{i}" for i in range(1000)]
FLAGS = [
    *("--module", "titan_tiny", "--config", "debugmodel"),
    *("--hf_assets_path", "assets/tokenizer", "--dataloader.dataset_path", "assets/documents"),
    *("--training.seq_len", "32", "--training.local_batch_size", "1"),
    *("--training.global_batch_size", "4", "--debug.seed", "7", "--training.disable_cuda_graphs"),
    *("--parallelism.spmd_backend", "partial_dtensor"),
    *("--training.mixed_precision_param", "float32"),
]


def make(folder=Path()):
    """Whole or not at all, and the same by whoever makes it."""
    if (folder / "assets").exists():
        return
    new = Path(tempfile.mkdtemp(dir=folder))
    (new / "tokenizer").mkdir()
    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(new / "tokenizer/tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (new / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    rng = random.Random(0)
    for name, count in {"documents": 200, "few": 24}.items():
        (new / name).mkdir()
        with open(new / name / "train.jsonl", "w") as f:
            for _ in range(count):
                at = rng.randrange(1000)
                words = [WORDS[(at + j * j) % 1000] for j in range(rng.randrange(10, 80))]
                f.write(json.dumps({"text": " ".join(words)}) + "\n")
    try:
        os.rename(new, folder / "assets")
    except OSError:
        assert (folder / "assets").exists()  # another was first
