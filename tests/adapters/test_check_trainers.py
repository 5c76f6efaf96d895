"""`harness check` of scripts whose steps a framework makes, unchanged; and of a loop by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.worlds import environment

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1"}


def checked(folder, script, *flags, options=()):
    """What was found, by promise: (state, what, the script's line)."""
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    words = ["check", "--json", "--within-s", "1200", *options, "--", str(script), *flags]
    ended = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words],
        cwd=folder,
        env=environment() | ENV | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1300,
    )
    assert ended.stdout.startswith("{"), ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["status"] == ended.returncode
    found = {}
    lines = Path(script).read_text().splitlines()
    for r in report["rulings"]:
        line = int(r["where"].rpartition(":")[2]) if r["where"] else 0
        text = lines[line - 1].strip() if line else ""
        found.setdefault(r["promise"], []).append((r["state"], r["what"], text))
    return found


def states(found):
    return {promise: {state for state, *_ in many} for promise, many in found.items()}


LIGHTNING = ("scripts/lightning_plain.py", "--dropout", "0.1")
ACCELERATE = ("scripts/accelerate_loop.py", "--out", ".")


@pytest.mark.parametrize("words", [LIGHTNING, ACCELERATE], ids=lambda words: words[0])
def test_what_is_adapted_unchanged_holds(words, tmp_path):
    found = checked(tmp_path, HERE / words[0], *words[1:])
    told = states(found)
    # each writes its records into a folder of the node's, some only at its end
    assert told.pop("keeps the script's files") == {"note"}
    assert told.pop("one rank writes the script's files") <= {"holds", "note"}
    assert set().union(*told.values()) == {"holds"}, found
    assert "shares" in found["runs on two workers"][0][1]


FAULTS = '''
import copy
class Average(TrainerCallback):
    def __init__(self):
        self.coin = torch.Generator().manual_seed(4)
    def on_step_end(self, args, state, control, model=None, **more):
        torch.rand(3, generator=self.coin)
        torch.save(model.state_dict(), "newest.pt")
callbacks = [Events(), Average()]
seen = {"rows": 0}
'''


def test_what_a_trainer_script_loses_is_named(tmp_path):
    text = (HERE / "scripts/hf_trainer.py").read_text()
    text = text.replace("callbacks = [Events()]", FAULTS)
    text = text.replace("        ids = torch.randint", "        seen['rows'] += 1\n        ids = torch.randint")
    script = tmp_path / "train.py"
    script.write_text(text)
    found = checked(tmp_path, script, "--epochs", "2", "--accumulation", "2")
    lost = {what.partition(" ")[0]: state for state, what, _ in found.pop("saves all state")}
    assert lost == {"seen['rows']": "fails", "callbacks[1]": "fails"}
    ((state, what, line),) = found.pop("one rank writes the script's files")
    assert state == "fails" and "newest.pt" in what and line.startswith("torch.save(")
    assert set().union(*states(found).values()) <= {"holds", "note"}, found


BY_HAND = '''
import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

run = harness.attach(seed=0)
torch.manual_seed(0)
x = torch.randn(48, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
run.prepare(model, optimizer)
sampler = DistributedSampler(data, run.world, run.rank, shuffle=True)
loader = DataLoader(data, batch_size=12 // run.world, sampler=sampler)
run.resume()
done = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        if dist.is_initialized():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        run.safe_point(run.step + 1)
run.finish()
'''


def test_a_loop_by_hand_that_begins_anew_and_has_batch_norm(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    found = checked(tmp_path, script)
    assert ("fails", "done = 0") in [(s, line) for s, _, line in found["saves all state"]]
    assert "so the data begin anew" in found["reads the same data again"][0][1]
    ((state, what, line),) = found["the same loss and gradients on any world"]
    assert (state, line) == ("fails", "loss.backward()") and "apart from those of one" in what
    ((state, what, line),) = found["the same statistics on any world"]
    assert state == "fails" and "BatchNorm1d" in what and line.startswith("model = nn.Sequential")
    assert states(found)["the same samples on any world"] == {"holds"}
    assert states(found)["resumes after a kill"] == {"holds"}


def test_copies_of_a_model_that_its_trainer_shards(tmp_path):
    """One copy of two workers is killed in and after the first epoch, one of two gets a notice."""
    flags = ("--fsdp", "--epochs", "9", "--samples", "184")
    found = checked(
        tmp_path, HERE / "scripts/hf_trainer.py", *flags, options=("--mesh", "dp_shard=2")
    )
    told = states(found)
    assert set().union(*told.values()) <= {"holds", "note"}, found
    for promise in (
        "resumes after a kill",
        "resumes after an epoch's end",
        "saves all state",
        "the same samples on any world",
        "the same loss and gradients on any world",
        "heeds a notice",
        "the same training however interrupted",
    ):
        assert told[promise] == {"holds"}, found
