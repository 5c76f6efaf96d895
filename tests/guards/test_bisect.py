"""`harness runs bisect`: what went wrong in a run of many ranks is found again on one."""

import io
import json
import subprocess
import sys

import pytest

from harness.core.facts import GuardTripped, StepDone
from harness.core.world import RESIZE, BadInput
from harness.guards.guard_rules import Guards, StepRules
from harness.lab.bisect import (
    StepLine,
    bisect,
    first_bad,
    print_bisection,
    stand_out,
    step_in_question,
)
from storage.stores.store_urls import open_store
from storage.terminal_text import Console
from support.guarded_runs import SCRIPT, SETTINGS, comes, guarded, owner
from support.worlds import environment, train

NAN, INF, POISONED, SPIKE = 7, 20, 100, 33


def bisected(tmp_path, run, *flags, step=0, world=1):
    """Bisect the run; return what was found, and what is printed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    store = open_store(str(run))
    found = bisect(store, scratch, step, world, [SCRIPT, *map(str, flags)])
    console = Console(file=io.StringIO(), width=400)
    assert print_bisection(found, console, str(run)) == (not (found.why or found.micros))
    return found, console.file.getvalue()


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("bad", "sample"),
    [
        pytest.param("--nan", NAN, marks=pytest.mark.proof),
        ("--inf", INF),
        pytest.param("--poisoned", POISONED, marks=pytest.mark.proof),
    ],
)
def test_names_the_step_micro_batch_rank_and_samples(tmp_path, bad, sample, parallel):
    """A run without guards: it stops at what is not finite, and trains on through the rest."""
    run = tmp_path / "run"
    first = next(step for step in comes(sample) if step > 5)
    flags = ["--parallel", parallel, "--every", 5, "--total", max(first, 12), bad, sample]
    train(run, 3, *flags, script=SCRIPT, codes=(0, 1))
    step = first if bad == "--poisoned" else 0
    found, said = bisected(tmp_path, run, *flags, step=step)
    micro = comes(sample)[found.line.step]
    assert found.micros == (micro,) and found.ranks[micro] == owner(micro, 3)
    if bad == "--poisoned":  # rules need some steps to know what is usual
        assert not found.why and f"of step {first} these stand out:" in said
    else:
        assert found.line.step == min(comes(sample))
        assert f"step {found.line.step} is the first bad one: the " in said
    assert f"micro-batch {micro} (rank {owner(micro, 3)}'s in the run)" in said
    assert str(sample) in found.line.samples[micro].split("samples ")[1].split(", ")


@pytest.mark.proof
def test_a_step_that_is_bad_as_a_whole_blames_no_sample(tmp_path):
    run, guards = tmp_path / "run", tmp_path / "guards.yaml"
    told = {"spike": "rewind", "skip_above": 0.0, "clip_sigmas": 0.0}
    guards.write_text(json.dumps({**SETTINGS, **told}))
    flags = ["--guards", guards, "--every", 5, "--spike", SPIKE]
    train(run, 2, *flags, script=SCRIPT, codes=(RESIZE,))
    guarded(run, 2, *flags)  # to the end, with what was left out
    found, said = bisected(tmp_path, run, *flags)
    assert (found.line.step, found.micros) == (SPIKE, ())
    assert f"step {SPIKE} is the first bad one: the loss is " in said
    assert "its micro-batches (6) are alike" in said


@pytest.mark.proof
def test_a_spike_that_was_left_out_before_is_not_found_again(tmp_path):
    run, guards = tmp_path / "run", tmp_path / "guards.yaml"
    told = {"spike": "rewind", "skip_above": 0.0, "clip_sigmas": 0.0}
    guards.write_text(json.dumps({**SETTINGS, **told}))
    flags = ["--guards", guards, "--every", 5, "--spike", f"{SPIKE},{SPIKE + 10}"]
    for _ in range(2):
        train(run, 1, *flags, script=SCRIPT, codes=(RESIZE,))
    found, said = bisected(tmp_path, run, *flags)
    assert found.first <= SPIKE and found.line.step == SPIKE + 10
    assert f"step {SPIKE + 10} is the first bad one: the loss is " in said


@pytest.mark.proof
def test_what_only_the_run_saw_is_its_machines_fault(tmp_path):
    run = tmp_path / "run"
    train(run, 2, "--nan", NAN, "--every", 5, script=SCRIPT, codes=(0, 1))
    found, said = bisected(tmp_path, run, step=min(comes(NAN)))  # the data is not to blame
    assert not found.why and not found.micros and "are as usual when they are run again" in said


def test_the_command(tmp_path):
    run = tmp_path / "run"
    train(run, 2, "--nan", NAN, "--every", 5, script=SCRIPT, codes=(0, 1))
    command = [sys.executable, "-m", "harness.cli", "runs", "bisect", str(run)]
    for more, code, says in [
        ((), 2, "no script: write `harness runs bisect URL -- train.py"),
        (("--", SCRIPT, "--nan", str(NAN)), 0, "is the first bad one: the loss is nan"),
    ]:
        ended = subprocess.run(
            [*command, *more], env=environment(), capture_output=True, text=True
        )
        assert ended.returncode == code, ended
        assert says in " ".join((ended.stdout + ended.stderr).split())


def test_a_run_that_nothing_was_found_in(tmp_path):
    run = tmp_path / "run"
    guarded(run, 1, "--total", 4)
    with pytest.raises(BadInput, match="no guard has named a step"):
        bisected(tmp_path, run)


# ---- what is bad, and who ------------------------------------------------------------------------
def line(step, loss, norm, losses=(1.0, 1.0), norms=(1.0, 1.0)):
    return StepLine(step, loss, norm, losses, norms, ("", ""))


def test_the_first_bad_step_is_named_not_the_worst():
    rules = StepRules(Guards(warm_up=10))
    for step in range(1, 31):
        rules.judge(step, 1.0 + step % 3 / 100, 1.0 + step % 2 / 100)
    fine, bad, worse = line(31, 1.0, 1.0), line(32, 9.0, 1.0), line(33, float("nan"), 1.0)
    assert first_bad(rules, [fine, bad, worse]) == (bad, "the loss is 9, 1.01 is usual")
    assert first_bad(rules, [fine]) == (fine, "")


@pytest.mark.parametrize(
    ("losses", "norms", "found"),
    [
        ((1.0, 1.1, 0.9), (1.0, 2.0, 1.0), ()),
        ((1.0, 9.0, 0.9), (1.0, 2.0, 1.0), (1,)),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 50.0), (2,)),
        ((float("nan"), 9.0, 1.0), (1.0, 1.0, 1.0), (0,)),
        ((1.0, 1.0, 1.0), (1.0, float("inf"), 1.0), (1,)),
        ((5.0,), (9.0,), ()),
    ],
)
def test_what_stands_out(losses, norms, found):
    assert stand_out(line(1, 1.0, 1.0, losses, norms)) == found


def test_the_step_in_question_is_the_newest_that_was_named():
    done = StepDone(9, 1, 1.0, 0.0, 1.0)
    facts = [GuardTripped(3, 1, "x", 1.0), GuardTripped(7, 2, "y", 1.0), done]
    assert step_in_question(facts) == 7
    with pytest.raises(BadInput):
        step_in_question([done])
