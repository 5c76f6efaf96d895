"""Scripts with transformers' Trainer and TRL's, unchanged, by real agents: against plain
transformers, and against themselves on other worlds, killed, drained and resumed."""

import json
import math
from pathlib import Path

import pytest

from support.trainer_script import ENV, EVERY_3, EXACT, Script, close, proven
from support.worlds import history, newest, train

pytest.importorskip("transformers")

from harness.bucket.archive import read_facts
from harness.core.facts import StepSkipped
from harness.core.world import BadInput
from storage.stores.store_urls import open_store

HERE = Path(__file__).parent
SPOILED = HERE / "scripts/hf_spoiled.py"
TRAINER, TRL = HERE / "scripts/hf_trainer.py", HERE / "scripts/trl_trainer.py"


FLAGS = ("--epochs", 3, "--best", "--logging-steps", 2, "--workers", 1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Script(tmp_path_factory.mktemp("plain"), TRAINER, *FLAGS).plain()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank, exact sums, never stopped."""
    return Script(tmp_path_factory.mktemp("alone"), TRAINER, *FLAGS).under(1, *EXACT)


def test_one_rank_does_what_plain_transformers_does(plain, alone, tmp_path):
    fast = Script(tmp_path / "fast", TRAINER, *FLAGS).under(1)
    assert fast.logs() == plain.logs() and fast.end() == plain.end()  # to the bit
    assert fast.events() == plain.events() == alone.events()
    close(alone.logged(), plain.logged())


def test_three_uneven_ranks_and_a_kill_give_the_same_to_the_bit(alone, tmp_path):
    """5 micro-batches on 3 ranks, and 3 at an epoch's end: one rank has none."""
    script = Script(tmp_path / "rough", TRAINER, *FLAGS)
    script.under(3, *EXACT, *EVERY_3, die_at="8:6")
    assert script.logged() == alone.logged() and script.end() == alone.end()
    assert script.events() == alone.events()
    assert "resumed from step 6" in script.output()
    proven(script)


def test_a_notice_and_another_world_repeat_nothing(plain, tmp_path):
    """Not even what was logged; and the best checkpoint is there though the disk was lost."""
    script = Script(tmp_path / "moved", TRAINER, *FLAGS)
    script.noticed(2, at=7)
    assert newest(script.run).step in (7, 8) and len(script.logs()) < len(plain.logs())
    for path in script.folder.glob("out/checkpoint-*/*"):
        path.unlink()
    for path in script.folder.glob("out/checkpoint-*"):
        path.rmdir()
    script.under(3, *EVERY_3)
    assert script.events() == plain.events()
    assert [step for step, _ in script.logs()] == [step for step, _ in plain.logs()]
    close(script.logged(), plain.logged())
    assert script.end()[1] == plain.end()[1] == "5 out/checkpoint-5"
    assert (script.folder / "out/checkpoint-5/model.safetensors").exists()
    records = history(script.run)
    assert [r.samples for r in records[:5]] == [20, 20, 20, 20, 12]
    assert {r.world for r in records} == {2, 3}
    proven(script)


def test_an_early_stop_holds_after_a_resume(tmp_path):
    """... and metrics that need more than losses are of the whole evaluation set."""
    flags = ("--epochs", 6, "--best", "--patience", 1, "--metrics")
    calm = Script(tmp_path / "calm", TRAINER, *flags).plain()
    script = Script(tmp_path / "rough", TRAINER, *flags)
    script.under(2, *EVERY_3, die_at="7:6")
    assert script.events() == calm.events() and script.events()[-1] == "epoch_end 10"
    assert any("eval_accuracy" in logs for _, logs in script.logs())
    assert script.output().count("evaluates the whole") == 2  # processes, and rank 0 of each
    close(script.logged(), calm.logged())
    proven(script)


def test_a_stream_goes_on_where_it_was(tmp_path):
    flags = ("--max-steps", 11, "--stream", "--dropout", 0.1)
    calm = Script(tmp_path / "calm", TRAINER, *flags).under(1, *EXACT)
    script = Script(tmp_path / "rough", TRAINER, *flags)
    script.under(2, *EXACT, *EVERY_3, die_at="7:6")
    assert script.logged() == calm.logged() and script.end() == calm.end()
    assert "too few for a step, are not used" in script.output()
    proven(script)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_logs_what_one_process_would(kind, tmp_path):
    pytest.importorskip("trl")
    calm = Script(tmp_path / "calm", TRL, "--kind", kind).plain()
    script = Script(tmp_path / "rough", TRL, "--kind", kind)
    script.under(2, *EVERY_3, die_at="4:3")
    close(script.logged(), calm.logged())
    assert script.events() == calm.events()
    proven(script)


BY_NAME = """
import os, sys
sys.path.append(os.path.dirname(SCRIPT))
import dying
sys.argv = ["script.py", "--epochs", "2", "--events", "events"]
from harness.adapters.transformers import ElasticMixin, ElasticTrainer, elastic
import transformers

class Counted:
    number = 0
    def state_dict(self): return {"number": self.number}
    def load_state_dict(self, state): self.number = state["number"]

class Mine(ElasticMixin, transformers.Trainer):
    counted = Counted()
    def elastic_state(self): return {"counted": self.counted}
    def training_step(self, *args, **kwargs):
        self.counted.number = self.state.global_step + 1
        dying.die_at(str(self.state.global_step))
        return super().training_step(*args, **kwargs)

assert issubclass(ElasticTrainer, transformers.Trainer)
elastic(snapshot_every_steps=2, reduce="exact")
transformers.Trainer = Mine
exec(compile(open(SCRIPT).read(), SCRIPT, "exec"))
print("counted", Mine.counted.number, "of", trainer.state.global_step)
"""


def test_by_name_without_an_agent(tmp_path, monkeypatch):
    """Under plain torchrun: state of the script's own comes back too."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"SCRIPT = {str(TRAINER)!r}\n{BY_NAME}")
    run, env = tmp_path / "run", {**ENV, "HARNESS_SCRIPT_WORLD": "1"}
    train(run, 2, script=script, env={**env, "DIE_AT": "7:6", "DIE_EVERY": "2"}, codes=(-9, 1))
    ended = train(run, 1, script=script, env=env)
    assert newest(run).step == 10 and "resumed from step 6" in ended.output
    assert "counted 10 of 10" in ended.output
    assert [r.step for r in history(run)] == list(range(1, 11))


REFUSED = """
import torch, transformers
from harness.core.world import BadInput

class Net(torch.nn.Linear):
    def forward(self, x, labels): return {"loss": super().forward(x).sum()}

rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8

for options, asked in (
    ({"auto_find_batch_size": True}, None),
    ({"optim": "adalomo"}, None),
    ({"train_sampling_strategy": "batch_rebalance"}, None),
    ({}, "/elsewhere/checkpoint-5"),
    ({"max_steps": 1}, None),
    ({"max_steps": 1}, None),
):
    args = transformers.TrainingArguments("out", use_cpu=True, report_to=[], **options)
    try:
        transformers.Trainer(Net(2, 1), args, train_dataset=rows).train(asked)
        print("trained")
    except BadInput as e:
        print("refused:", e)
"""


def test_what_cannot_be_kept_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    env = {**ENV, "HARNESS_ADAPT": "auto", "HARNESS_ATTACH": json.dumps({"seed": 1})}
    ended = train(tmp_path / "run", 1, script=script, env=env)
    said = [x for x in ended.output.splitlines() if x.startswith(("refused", "trained"))]
    named = [
        "auto_find_batch_size=True would change",
        "steps inside backward",
        "batch_rebalance",
        "is not this run's",
        "trained",
        "trained",  # again, as another phase (test_phases.py)
    ]
    assert len(said) == len(named)
    assert all(name in line for name, line in zip(named, said, strict=True)), said


OWN_LOADER = """
import sys, torch, transformers

class Net(torch.nn.Linear):
    def forward(self, x, labels): return {"loss": super().forward(x).sum() * labels.sum()}

rows = [{"x": torch.ones(2), "labels": torch.tensor([1.0 if i < 24 else torch.nan])}
        for i in range(32)]

class InOrder(transformers.Trainer):
    def get_train_dataloader(self):
        return [rows] if sys.argv[1:] else torch.utils.data.DataLoader(rows, 8)

args = transformers.TrainingArguments("out", use_cpu=True, report_to=[], max_steps=4)
assert args.logging_nan_inf_filter  # it is the default, and hides such a loss from logs only
InOrder(Net(2, 1), args).train()
"""


def test_a_loader_of_ones_own_and_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(OWN_LOADER)
    attach = json.dumps({"seed": 1, "snapshot_every_steps": 1})
    env = {**ENV, "HARNESS_ADAPT": "auto", "HARNESS_ATTACH": attach}
    ended = train(tmp_path / "run", 1, script=script, env=env, codes=(1,))
    committed = newest(tmp_path / "run")
    assert "NonFiniteLoss: step 4" in ended.output and (not committed or committed.step <= 3)
    ended = train(tmp_path / "list", 1, "list", script=script, env=env, codes=(1,))
    assert "get_train_dataloader: wanted a torch DataLoader" in ended.output


def test_another_trainer_is_refused_by_version():
    from harness.adapters.transformers import patch

    class Other:
        def train(self, resume): ...

    setattr(Other, patch.PATCHED, True)
    with pytest.raises(
        BadInput, match=r"Trainer.train of transformers .* takes .self, resume.*--adapt none"
    ):
        patch.check_version(Other)


# ---- guards: what is bad is skipped, on any world and through a kill; the scheduler goes on or waits
SPOILED_STEPS, SPOILED_EPOCHS = 30, 6


def guarded(folder, ranks, *options, settings="", **kwargs):
    script = Script(folder, SPOILED)
    (folder / "guards.yaml").write_text(f"warm_up: 3\nmost_bad: 20\n{settings}")
    return script.under(ranks, "--guards", "guards.yaml", *EXACT, *options, **kwargs)


def skipped(script):
    told = [s.fact for s in read_facts(open_store(script.run))]
    return {fact.step: fact for fact in told if isinstance(fact, StepSkipped)}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    return guarded(tmp_path_factory.mktemp("spoiled"), 1)


def test_bad_steps_are_skipped_and_the_rest_is_learnt(spoiled):
    found = skipped(spoiled)
    nan = [one for one in found.values() if one.why == "the loss is nan"]
    far = [one for one in found.values() if "above 20 times its mean" in one.why]
    assert len(nan) == SPOILED_EPOCHS and len(far) == SPOILED_EPOCHS and len(found) == len(nan) + len(far)
    assert all(len(one.micro_batches) == 1 and "positions" in one.samples for one in nan)
    step, weights = spoiled.end()
    assert int(step) == SPOILED_STEPS and "nan" not in weights
    assert min(r.loss for r in history(spoiled.run) if not r.skipped) < 1.0
    assert [r.step for r in history(spoiled.run) if r.skipped] == sorted(found)
    proven(spoiled)


def test_two_ranks_and_a_kill_give_the_same_to_the_bit(spoiled, tmp_path):
    script = guarded(tmp_path, 2, *EVERY_3, die_at="8:6")
    assert "resumed from step 6" in script.output()
    assert script.end() == spoiled.end() and skipped(script).keys() == skipped(spoiled).keys()
    proven(script)


def test_the_trainers_scheduler_goes_on_or_waits(spoiled, tmp_path):
    rates = dict(spoiled.logs())
    assert rates[SPOILED_STEPS]["learning_rate"] == pytest.approx(3e-2 / SPOILED_STEPS)
    waits = guarded(tmp_path, 1, settings="skip: hold\n")
    held = sum(step < SPOILED_STEPS for step in skipped(waits))
    assert dict(waits.logs())[SPOILED_STEPS]["learning_rate"] == pytest.approx((1 + held) * 3e-2 / SPOILED_STEPS)
    assert held >= 2 * SPOILED_EPOCHS - 1 and math.isfinite(dict(waits.logs())[SPOILED_STEPS]["loss"])


def test_a_spike_sends_the_trainer_back_on_any_world(tmp_path):
    told = "spike: rewind\nskip_above: 0\nclip_sigmas: 0\nrewind_steps: 2\nmost_rewinds: 20\n"
    scripts = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        scripts.append(guarded(folder, ranks, *EVERY_3, settings=told))
    one, two = scripts
    back = [s for s in skipped(one).values() if "the run went back to step" in s.why]
    assert len(back) >= 4 and "nan" not in one.end()[1]
    assert two.end() == one.end() and skipped(two).keys() == skipped(one).keys()
    proven(one)
    proven(two)
