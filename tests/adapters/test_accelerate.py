"""Scripts of Accelerate, unchanged or with one line changed: on any world, killed and resumed, they
train as plain Accelerate does on the world that they were written for."""

import difflib
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from harness.adapters.accelerate.forward_replay import Tape
from harness.adapters.accelerate.rounds import Interleaved, deal
from harness.adapters.accelerate.script_state import Decisions, ScriptVariables, is_script
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from storage.export.safetensors import export
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.worlds import Nursery, environment, history

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_loop.py"
PLAINLY = SCRIPT.with_name("plainly.py")
STEPS = 18


@pytest.fixture(scope="module")
def nursery():
    return Nursery()


def alone(nursery, out, *flags, script=SCRIPT, world=2):
    """Accelerate itself, on so many processes."""
    env = {"HARNESS_ADAPT": "none", "ACCELERATE_USE_CPU": "true"}
    nursery.train(out / "run", world, script, "--out", out, *flags, script=PLAINLY, env=env)
    return out


@pytest.fixture(scope="module")
def plain(nursery, tmp_path_factory):
    return alone(nursery, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def exact():
    """What exact sums gave on the first world that was tried."""
    return {}


def go(nursery, out, world, *flags, script=SCRIPT, reduce="fast", env=None, die_at="", **kwargs):
    """Under the harness. `die_at`: "in step N:after the snapshot of step S"."""
    attach = f'{{"seed": 1, "snapshot_every_steps": 3, "reduce": "{reduce}"}}'
    said = {"HARNESS_ADAPT": "auto", "HARNESS_SCRIPT_WORLD": "2", "HARNESS_ATTACH": attach}
    said["DIE_AT"] = die_at
    if die_at:
        kwargs["codes"] = (-9, 1)
    return nursery.train(
        *(out / "run", world, "--out", out, *flags), script=script, env=said | (env or {}), **kwargs
    )


def events(out):
    return (out / "events").read_text().splitlines()


def apart(one, other):
    """The greatest difference of two runs' weights."""
    a, b = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    return max((a[name] - b[name]).abs().max().item() for name in a)


def check(out, plain):
    assert apart(out, plain) < 1e-6
    assert not [c for c in audit(open_store(str(out / "run"))).checks if not c.ok]
    assert len(history(out / "run")) == STEPS


# two ranks do one micro-batch in each iteration, three have idle ones, one does two at once
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_world_trains_as_plain_accelerate_on_two(nursery, plain, exact, tmp_path, world):
    go(nursery, tmp_path, world, reduce="exact")
    assert events(tmp_path) == events(plain)  # counters, rates, evaluations: all of it
    check(tmp_path, plain)
    # with exact sums, to the bit
    before = exact.setdefault("losses", [r.loss for r in history(tmp_path / "run")])
    assert before == [r.loss for r in history(tmp_path / "run")]


def test_one_rank_reads_what_accelerate_reads_on_one(nursery, tmp_path):
    """From the first batch on, in a loader with a generator of its own (docs/trainers/)."""
    plain, out = tmp_path / "plain", tmp_path / "out"
    for folder in (plain, out):
        folder.mkdir()
    alone(nursery, plain, "--own-order", world=1)
    go(nursery, out, 1, "--own-order", env={"HARNESS_SCRIPT_WORLD": "1"}, die_at="14:12")
    go(nursery, out, 1, "--own-order", env={"HARNESS_SCRIPT_WORLD": "1"})
    assert set(events(out)) == set(events(plain)) and apart(out, plain) < 1e-6


@pytest.mark.parametrize("began", [3, 6])
def test_killed_on_three_ranks_it_goes_on_on_one(nursery, plain, tmp_path, began):
    go(nursery, tmp_path, 3, die_at=f"{began + 2}:{began}")
    before = len(events(tmp_path))
    ended = go(nursery, tmp_path, 1)
    assert f"goes through {began} steps" in ended.output
    # what was done is not done again, and nothing is left out
    first = next(i for i, line in enumerate(events(plain)) if line.startswith(f"step {began} "))
    first += 2 if began == 6 else 1  # the epoch's evaluation belongs to its last step
    assert events(tmp_path)[before:] == events(plain)[first:]
    check(tmp_path, plain)


def test_early_stopping_by_its_own_numbers_holds_after_a_resume(nursery, tmp_path):
    """It goes through more epochs than it has patience, and stops where it would have stopped."""
    flags = ("--samples", 24, "--epochs", 20, "--patience", 2)
    out, plain = tmp_path / "out", tmp_path / "plain"
    for folder in (out, plain):
        folder.mkdir()
    alone(nursery, plain, *flags)
    go(nursery, out, 3, *flags, die_at="19:18")
    assert "goes through 18 steps" in go(nursery, out, 2, *flags).output
    assert set(events(out)) == set(events(plain))
    assert "bad 3" in events(plain)[-2] and len(events(plain)) < 60
    assert apart(out, plain) < 1e-6


@pytest.mark.parametrize("hands", [(), ("--own-hands",)])
def test_what_no_loss_depends_on_does_not_decay(nursery, tmp_path, hands):
    flags = ("--unused", "--epochs", 1, *hands)
    out, plain = tmp_path / "out", tmp_path / "plain"
    for folder in (out, plain):
        folder.mkdir()
    words = [sys.executable, SCRIPT, "--out", plain, *flags]
    env = environment() | {"ACCELERATE_USE_CPU": "true"}
    # alone it shuffles in another order, but begins with the same weights
    subprocess.run(list(map(str, words)), env=env, check=True, capture_output=True, timeout=240)
    go(nursery, out, 2, *flags, env={"HARNESS_SCRIPT_WORLD": "1"})
    found, wanted = (torch.load(folder / "weights.pt") for folder in (out, plain))
    assert torch.equal(found["unused.weight"], wanted["unused.weight"])


def harness_run(out, nproc, *flags, die_at, timeout_s=240):
    words = [
        *(sys.executable, "-m", "harness.cli", "run", "--run", out / "run", "--nproc", nproc),
        *("--script-world", 2, "--attach", "snapshot_every_steps=3", "--", SCRIPT),
        *("--out", out, *flags),
    ]
    env = environment() | {"DIE_AT": die_at}
    return subprocess.run(
        list(map(str, words)), env=env, capture_output=True, text=True, timeout=timeout_s
    )


def test_an_agent_brings_it_back(plain, tmp_path):
    ended = harness_run(tmp_path, 3, die_at="10:9")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert set(events(tmp_path)) == set(events(plain))
    assert "the run ends with it" in ended.stdout
    check(tmp_path, plain)


def test_one_changed_line(nursery, plain, tmp_path):
    lines = SCRIPT.read_text().splitlines()
    changed = [
        line.replace("from accelerate import", "from harness.adapters.accelerate import")
        for line in lines
    ]
    diff = [d for d in difflib.ndiff(lines, changed) if d.startswith("+ ")]
    assert len(diff) == 1
    script = tmp_path / "script.py"
    script.write_text("\n".join(changed))
    go(nursery, tmp_path, 1, script=script, env={"HARNESS_ADAPT": "none"})
    check(tmp_path, plain)


@pytest.mark.parametrize("world", [1, 3])
def test_a_script_that_accumulates_by_itself(nursery, plain, tmp_path, world):
    """Nobody tells how many iterations make a step; the first one shows it."""
    go(nursery, tmp_path, world, "--own-hands")
    assert events(tmp_path) == events(plain)
    check(tmp_path, plain)


def test_averages_of_its_first_step_do_not_depend_on_the_world(nursery, tmp_path):
    """... and rank 2 of three has nothing to do in it."""
    flags = ("--own-hands", "--batch-norm", "--max-train-steps", 1)
    one, three = tmp_path / "1", tmp_path / "3"
    for world, out in ((1, one), (3, three)):
        out.mkdir()
        go(nursery, out, world, *flags)
    assert apart(one, three) < 1e-6
    assert torch.load(one / "weights.pt")["body.1.num_batches_tracked"] == 4


def test_a_wrong_word_about_accumulation_is_refused(nursery, tmp_path):
    env = {"HARNESS_ACCUMULATION": "3"}
    ended = go(nursery, tmp_path, 1, "--own-hands", env=env, codes=(1,))
    assert "in the last of 3 iterations, found it earlier" in ended.output


def test_a_language_model_killed_on_three_ranks(nursery, tmp_path):
    pytest.importorskip("transformers")
    script = SCRIPT.with_name("accelerate_clm.py")
    out, plain = tmp_path / "out", tmp_path / "plain"
    for folder in (out, plain):
        folder.mkdir()
    alone(nursery, plain, script=script)
    go(nursery, out, 3, script=script, die_at="5:3")
    go(nursery, out, 1, script=script)
    # evaluations, rates; the tracker is not told again of what was done
    assert set(events(out)) == set(events(plain))
    assert [line for line in events(out) if line.startswith("2 ")] == ["2 {'lr': 0.005}"]
    assert apart(out, plain) < 1e-6
    # numbered checkpoints of lost steps are in nobody's way
    saved = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert saved == ["checkpoint_1", "checkpoint_2"]


def test_a_stream_and_two_optimizers_killed_on_three_ranks(nursery, tmp_path):
    script = SCRIPT.with_name("accelerate_stream.py")
    out, plain = tmp_path / "out", tmp_path / "plain"
    for folder in (out, plain):
        folder.mkdir()
    alone(nursery, plain, script=script)
    go(nursery, out, 3, script=script, die_at="6:3")
    assert "goes through 3 steps" in go(nursery, out, 1, script=script).output
    assert set(events(out)) == set(events(plain))
    assert apart(out, plain) < 1e-6
    assert not [c for c in audit(open_store(str(out / "run"))).checks if not c.ok]


# ---- parts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples", [40, 41, 46, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_are_those_that_accelerate_deals_out(samples, ranks):
    from accelerate.data_loader import BatchSamplerShard

    def batches():
        return BatchSampler(SequentialSampler(range(samples)), 4, drop_last=False)

    shards = [list(BatchSamplerShard(batches(), ranks, rank)) for rank in range(ranks)]
    ours = Interleaved(batches(), ranks, split=False, even=True)
    assert list(ours) == [batch for turn in zip(*shards, strict=True) for batch in turn]
    assert len(ours) == len(list(ours))


def test_micro_batches_over_rounds():
    assert deal(range(4, 9), 2) == [(4, 5, 6), (7, 8)]
    assert deal(range(2), 3) == [(0,), (1,), ()]
    assert deal(range(0), 2) == [(), ()]


def taped(body, *batches):
    """What `body` makes of the batches: of the first by itself, of the others by the tape."""
    tape, model = Tape("cpu"), nn.Linear(4, 2)

    def call(x):
        return tape.model(model, (x,), {})

    tape.begin(batches[0])
    loss = body(call, batches[0])
    tape.end()
    again = [tape.again(batch, loss) for batch in batches[1:]]
    return [loss, *again], [body(model, batch) for batch in batches]


def pairs(*seeds):
    made = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        made.append({"x": torch.randn(8, 4, generator=g), "y": torch.randint(2, (8,), generator=g)})
    return made


def test_the_body_is_done_again_for_another_batch():
    kept = torch.zeros(())

    def body(model, batch):
        x = batch["x"] * 2
        x[batch["y"] == 0] = 1.0
        out = model(x.view(-1, x.shape[-1]))
        loss = nn.functional.cross_entropy(out, batch["y"])
        kept.add_(loss.detach())  # a sum of the script's own
        assert isinstance(loss.item(), float)
        return loss / 3

    batches = pairs(1, 2, 3)
    found, wanted = taped(body, *batches)
    assert [f.item() for f in found] == [w.item() for w in wanted]
    # once by itself, three times by hand
    assert kept.item() == pytest.approx(3 * (wanted[0] * 2 + wanted[1] + wanted[2]).item())
    found[1].backward()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda m, b: m(b["x"]).sum() / b["y"].sum().item(), "takes a number"),
        (lambda m, b: m(b["x"]).sum() * random.random(), "draws from Python"),
        (lambda m, b: (b["x"] ** 2).sum(), "prepared model"),
        (lambda m, b: m(b["x"]).sum() * len(b["name"]), "more than tensors"),
    ],
)
def test_what_cannot_be_done_again_is_refused(body, why):
    one, two = pairs(1, 2)
    with pytest.raises(BadInput, match=why) as refused:
        taped(body, {**one, "name": "one"}, {**two, "name": "other" if "tensors" in why else "one"})
    assert "--script-world 1" in str(refused.value)


def test_a_script_s_variables_are_put_back():
    class Stopper:
        def __init__(self):
            self.best, self.seen = 9.0, []

    def loop(variables, steps, then):
        best, count, history, rank = 0.5, 0, [], len(steps)
        stopper, total = Stopper(), torch.zeros(())
        variables.begin(sys._getframe())
        for step in steps:
            count, total = count + 1, total + step
            history.append((step, best))
            best = min(best, 1 / (1 + step))
            stopper.best = best
            stopper.seen.append(step)
        then(sys._getframe())
        return best, count, history, rank, stopper.best, stopper.seen, total.item()

    first, second = ScriptVariables(), ScriptVariables()
    held = {}

    def take(frame):
        first.look(frame)
        held.update(first.state_dict())

    wanted = loop(first, range(5), take)
    second.load_state_dicts([held])
    found = loop(second, [7, 7], second.restore)
    assert found[:3] == wanted[:3] and found[4:] == wanted[4:]
    assert found[3] == 2  # the loop does not change it: it is this process'


def test_a_script_decides_again_as_it_did():
    class Stopper:
        def __init__(self):
            self.best, self.bad = 9.0, 0

        def stops(self, value):
            better = value < self.best
            if better:
                self.best = value
            self.bad = 0 if better else self.bad + 1
            return self.bad > 1

    def loop(decisions, values, follow, main=True):
        stopper, seen, at = Stopper(), [], "another process'"
        frame = sys._getframe()
        decisions.begin(frame)
        for done, computed in enumerate(values, 1):
            decisions.settle()
            decisions.open(done, frame, follow)
            value = computed
            if main:
                seen.append(value)
            score = max([value, *seen])
            if stopper.stops(value) or score > 7:
                break
        decisions.close()
        assert sys.gettrace() is None and at
        return done, value, stopper.best, stopper.bad

    first, second = (Decisions(lambda value: value, keeps=keeps) for keeps in (True, False))
    wanted = loop(first, [5.0, 6.0, 4.0, 3.0, 3.5, 2.0], False)
    assert wanted[0] == 6
    first.settle()
    second.load_state_dict(first.state_dict())
    # nothing is computed, and another rank does not come by all lines
    for main in (True, False):
        assert loop(second, [8.0] * 6, True, main) == wanted
    assert loop(second, [8.0] * 6, False)[0] == 1
    # what is traced by somebody else is left alone
    sys.settrace(tracer := lambda *_: None)
    try:
        second.open(1, sys._getframe(), True)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)


# ---- what a script registers nowhere -------------------------------------------------------------
@pytest.mark.parametrize(
    ("filename", "module", "own"),
    [
        ("/opt/base/lib/python3.11/site-packages/accelerate/state.py", "accelerate.state", False),
        ("/usr/lib/python3/dist-packages/ema.py", "ema", False),
        ("/srv/me/diffusers/src/diffusers/training_utils.py", "diffusers.training_utils", False),
        ("/srv/me/train/ema.py", "ema", True),
    ],
)
def test_libraries_of_other_environments_are_not_the_script_s_own(filename, module, own):
    assert is_script(filename, {"__name__": module}) == own


AVERAGES = SCRIPT.with_name("accelerate_averages.py")


def flat(value):
    """The numbers of the averages, in order."""
    if isinstance(value, dict):
        return [one for name in sorted(value) for one in flat(value[name])]
    if isinstance(value, list):
        return [one for each in value for one in flat(each)]
    return torch.as_tensor(value).double().reshape(-1).tolist()


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_averages_that_nobody_registered_go_on_after_a_kill(nursery, tmp_path, worlds):
    """... behind an epoch's end, after which it has asked its tracker for its writer."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    for folder in (out, calm):
        folder.mkdir()
    go(nursery, calm, worlds[0], script=AVERAGES)
    go(nursery, out, worlds[0], script=AVERAGES, die_at="11:9")
    ended = go(nursery, out, worlds[1], script=AVERAGES)
    assert "goes through 9 steps" in ended.output and "ot restored" not in ended.output
    found, wanted = (torch.load(folder / "means.pt") for folder in (out, calm))
    for name in wanted:
        assert flat(found[name]) == pytest.approx(flat(wanted[name]), abs=1e-6), name
    # the main process alone put one into the model; the last snapshot has it from every rank
    snapshots = Snapshots(open_store(str(out / "run")))
    export(snapshots, snapshots.latest(), tmp_path / "model")
    weights = load_file(next((tmp_path / "model").glob("*.safetensors")))
    averaged = {f"module.{name}": tensor for name, tensor in weights.items()}
    assert flat(averaged) == flat({name: found["averaged"][name] for name in averaged})


def test_a_loader_without_an_optimizer_is_left_to_accelerate(nursery, tmp_path):
    env = {"HARNESS_SCRIPT_WORLD": "1"}
    ended = go(nursery, tmp_path, 1, "--statistics", script=AVERAGES, env=env)
    assert "statistics 8 True" in ended.output
    assert len(history(tmp_path / "run")) == 24


TWICE = SCRIPT.with_name("accelerate_twice.py")


def test_two_loops_that_are_killed_in_each_are_the_undisturbed_ones(nursery, tmp_path):
    """What an evaluation decides in the second one holds; its head is drawn as the first one has
    left the generators."""
    out, calm = tmp_path / "out", tmp_path / "calm"
    for folder in (out, calm):
        folder.mkdir()
    go(nursery, calm, 2, script=TWICE, reduce="exact")
    deaths = ((2, "body 0 9:3"), (1, "between:9"), (3, "whole 1 1:12"), (1, "whole 3 7:24"))
    for world, place in deaths:
        go(nursery, out, world, script=TWICE, reduce="exact", die_at=place)
    said = go(nursery, out, 2, script=TWICE, reduce="exact").output
    assert "phase 1 of the run (the script's training 1) is done, and not done again" in said
    assert (out / "end").read_text() == (calm / "end").read_text()
    assert apart(out, calm) == 0
    mine, theirs = history(out / "run"), history(calm / "run")
    assert [(r.phase, r.loss, r.digest) for r in mine] == [
        (r.phase, r.loss, r.digest) for r in theirs
    ]
    assert {r.world for r in mine} == {1, 2, 3} and {r.phase for r in mine} == {1, 2}
    assert not [c for c in audit(open_store(str(out / "run"))).checks if not c.ok]


def test_a_second_training_is_refused_as_one(nursery, tmp_path):
    env = {"HARNESS_SCRIPT_WORLD": "1"}
    ended = go(nursery, tmp_path, 1, "--twice", script=AVERAGES, env=env, codes=(1,))
    assert "where this training ends and another one begins cannot be told" in ended.output
