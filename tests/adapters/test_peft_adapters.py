"""Adapters of PEFT: sent alone, and exported as PEFT itself would have saved them."""

import json

import pytest
import torch

from storage.snapshots.snapshots import Snapshots
from storage.snapshots_command import main
from storage.stores.store_urls import open_store
from support.worlds import train

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SCRIPT = """
import sys, torch, harness, peft
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=2)
model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(
    r=4, target_modules={"q_proj", "v_proj"}, modules_to_save=["lm_head"], use_dora=True,
    init_lora_weights=False))
model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"], bias="none"))
run = harness.attach(snapshot_every_steps=2)
trained = [p for p in model.parameters() if p.requires_grad]
run.prepare(model, torch.optim.AdamW(trained, 0.01))
data = torch.utils.data.TensorDataset(torch.randint(0, 64, (64, 8)))
for step in run.steps(data, total=4, global_batch=4, micro_batch=2):
    for (x,) in step:
        step.backward(model(input_ids=x, labels=x).loss)
    step.update()
model.save_pretrained(sys.argv[1], save_embedding_layers=False)
model.eval()
x, size = data[:2][0], dict(vocab_size=64, hidden_size=32, intermediate_size=64,
                            num_hidden_layers=2, num_attention_heads=2)
kept = {"x": x, "logits": model(input_ids=x).logits, "config": size}
torch.save(kept, sys.argv[1] + "/kept.pt")
"""


def saved(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    for key, value in config.items():
        config[key] = sorted(value) if isinstance(value, list) else value
    return safetensors.load_file(folder / "adapter_model.safetensors"), config


def test_adapters_are_sent_alone_and_exported_as_peft_saves_them(tmp_path, capsys):
    script, own, url = tmp_path / "script.py", tmp_path / "own", tmp_path / "run"
    script.write_text(SCRIPT)
    train(url, 1, own, script=script)
    for name, ours, theirs in (("default", "a", own), ("second", "b", own / "second")):
        assert main(["export", str(url), str(tmp_path / ours), "--adapter", name]) == 0
        (found, config), (wanted, as_saved) = saved(tmp_path / ours), saved(theirs)
        assert found.keys() == wanted.keys() and len(found) >= 4
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert config == as_saved
    assert main(["export", str(url), str(tmp_path / "c"), "--adapter", "third"]) == 2
    assert "names no adapter 'third', it names 'default', 'second'" in capsys.readouterr().err
    snapshots = Snapshots(open_store(str(url)))
    first, last = (snapshots.load(ref) for ref in reversed(snapshots.refs()))
    own_bytes = sum(t.numel() * 4 for t in saved(tmp_path / "a")[0].values())
    assert last.own_nbytes < first.own_nbytes - 40_000 and last.own_nbytes < 3 * own_bytes + 4096
    torch.manual_seed(0)
    kept = torch.load(own / "kept.pt", weights_only=True)
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept["config"])), tmp_path / "a"
    )
    assert torch.equal(model(input_ids=kept["x"]).logits, kept["logits"])
