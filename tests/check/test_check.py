"""`harness check`: what its rules conclude from made-up evidence, and what its eyes see."""

import ast
import copy
import dataclasses
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.check import check as checks
from harness.check.check_case import FAILS, HOLDS, NOTE, UNTRIED, Case, SourceText, falling, root_of
from harness.check.check_rules import rulings
from harness.check.evidence import (
    FileWritten,
    ForwardCall,
    Gradient,
    Leaf,
    ObservedStep,
    Outcome,
    Prepared,
    RankLife,
    ScriptFailure,
    life_of,
    line_of,
    packed,
)
from harness.check.object_digests import Album
from harness.check.run_diff import lost
from harness.check.step_observer import rows_of, sketched, statistics_of
from harness.core.step_records import StepRecord

SCRIPT = """
class Numbers:
    def __len__(self): return 8
    def __getitem__(self, i): return i
def main():
    run = harness.attach()
    model = nn.BatchNorm1d(4)
    average = copy.deepcopy(model)
    noise = torch.Generator()
    best = 1.0
    seen = 0
    run.prepare(model, optimizer)
    for x in data:
        x = x + torch.randn(3, generator=noise)
        if loss < best:
            best = loss
        seen += 1
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "train.py"
    path.write_text(SCRIPT)
    return SourceText.read(str(path))


# ---- made-up evidence ----------------------------------------------------------------------------
def leaf(value, kind="number", **more):
    return Leaf(kind, f"{value}", f"{value}", **more)


def made(number, rows=None, count=12, picture=None, norm=1.0, **more):
    more = {"losses": (1.0 / number,), "backward": "train.py:9", **more}
    return ObservedStep(
        number,
        rows=1000 * number if rows is None else rows,
        count=count,
        gradients=(Gradient(norm, (norm, 0.0)),),
        picture=picture or {},
        t=1e9 + number,
        **more,
    )


def life(steps, resumed=0, **more):
    return RankLife(resumed=resumed, steps=tuple(steps), prepared=Prepared("train.py:12"), **more)


def record(number, loss=None, world=1, shares=(3,)):
    loss = 1.0 / number if loss is None else loss
    return StepRecord(number, 1, world, shares, 12, "", 12.0, loss, 0.1, 0.0, 1.0)


def before(state=lambda step: {}, begin=None, **more):
    steps = [made(n, picture=state(n)) for n in range(1, 6)]
    more = {"pass_steps": 3, **more}
    return life(steps, begin=state(0) if begin is None else begin, epoch=1, **more)


def after(state=lambda step: {}, begin=None):
    steps = [made(n, picture=state(n)) for n in range(4, 10)]
    return life(steps, 3, begin=begin or {}, epoch=2)


def one(first=None, second=None, **more):
    more = {"ended": "finished", "struck": True, "committed": 9, "total": 9, **more}
    lives = tuple(each for each in (first or before(), second or after()) if each is not None)
    return Outcome("one", lives=lives, records=tuple(map(record, range(1, 10))), **more)


def pair(change=lambda rank, step: step, shares=(2, 1), **more):
    """Two workers: rows and samples are shared out; `change` breaks something."""
    ranks = []
    for rank in range(2):
        part = shares[rank] / sum(shares)
        steps = []
        for n in range(1, 4):
            rows = 1000 * n // 3 if rank == 0 else 1000 * n - 1000 * n // 3
            mine = made(n, rows=rows, count=int(12 * part))
            steps.append(change(rank, mine))
        ranks.append(life(steps, rank=rank, world=2, epoch=1))
    rest = life([made(n) for n in range(4, 10)], 3, world=1, epoch=2)
    more = {"ended": "finished", "struck": True, "committed": 9, "left": 33, **more}
    records = tuple(record(n, world=2, shares=shares) for n in range(1, 4))
    return Outcome("two", lives=(*ranks, rest), records=records, total=9, **more)


def judged(source, a=None, b=None, **more):
    return rulings(Case(a or one(), pair() if b is None else b, source, **more))


def failed(found):
    return {r.promise: r for r in found if r.state == FAILS}


# ---- the rules -----------------------------------------------------------------------------------
def test_what_holds_is_told_to_hold(source):
    found = judged(source)
    assert {r.state for r in found if "randomness" not in r.promise} == {HOLDS}
    assert next(r.what for r in found if "randomness" in r.promise).startswith("not seen")
    assert [r.promise for r in found] == [
        "resumes after a kill",
        "saves all state",
        "reads the same data again",
        "resumes after an epoch's end",
        "runs on two workers",
        "the same samples on any world",
        "the same randomness on any world",
        "the same loss and gradients on any world",
        "one rank writes the script's files",
        "heeds a notice",
        "the same training however interrupted",
        "ends as it would have",
        "the loss falls",
    ]
    assert "shares 2/1" in next(r.what for r in found if r.promise == "runs on two workers")


def changing(path, kind="number", values=lambda n: n, **more):
    """State of that name, that nobody restores."""
    make = lambda n: {path: leaf(values(n), kind, **more)}  # noqa: E731
    return one(before(make), after(lambda n: make(n - 3), begin=make(0)))


@pytest.mark.parametrize(
    ("path", "kind", "more", "says", "line"),
    [
        ("main().seen", "number", {}, "seen (line 11): a counter: 0 where it was 3", 11),
        ("main().noise", "generator", {}, "noise (line 9): a generator", "train.py:12"),
        (
            "main().average.weight",
            "tensor",
            {"owner": "main().average", "owner_type": "BatchNorm1d", "keeps": True},
            "average (line 8): BatchNorm1d, 1 tensors",
            "train.py:12",
        ),
        (
            "loader.sampler.epoch",
            "number",
            {"owner": "loader.sampler", "owner_type": "DistributedSampler"},
            "a sampler's epoch: 0 where it was 3",
            "train.py:12",
        ),
        (
            "model.calls",
            "number",
            {"owner": "model", "owner_type": "Net", "saved": True, "keeps": True},
            "its calls is not in its state_dict",
            "train.py:12",
        ),
        ("main().best", "float", {}, "best (line 10): 0 where it was 3", 10),
    ],
)
def test_state_that_nobody_saves_is_named(source, path, kind, more, says, line):
    found = failed(judged(source, changing(path, kind, **more)))
    assert list(found) == ["saves all state"]
    ruling = found["saves all state"]
    assert says in ruling.what
    wanted = line if isinstance(line, str) else f"{source.path}:{line}"
    assert ruling.where.endswith(wanted) and ruling.remedy


def test_what_decides_nothing_is_a_note_and_can_be_ignored(source):
    mean = changing("main().mean", "float")
    states = [r.state for r in judged(source, mean) if r.promise == "saves all state"]
    assert states == [NOTE, HOLDS]
    history = judged(source, changing("losses", "series"))
    assert "a history" in next(r.what for r in history if r.state == NOTE)
    counter = judged(source, changing("main().seen"), ignored=frozenset({"seen"}))
    assert not failed(counter)


@pytest.mark.parametrize(
    ("was", "resumed", "why"),
    [
        (lambda n: 7, lambda n: 8, "it never changed"),
        (lambda n: 1e9 + n, lambda n: 1e9 + 50 + n, "the wall clock"),
        (lambda n: None if n == 0 else 5, lambda n: None, "made when it was first needed"),
        (lambda n: n, lambda n: n if n > 3 else 0, "computed anew in each step"),
    ],
)
def test_what_is_no_state_is_not_missed(was, resumed, why):
    kind = "float" if "clock" in why else "number"
    first = before(lambda n: {"x": leaf(was(n), kind)})
    second = after(lambda n: {"x": leaf(resumed(n), kind)}, begin={"x": leaf(resumed(3), kind)})
    assert lost(first, second) == [], why


def test_a_loop_that_counts_anew_is_found_where_nothing_was_there_at_the_resume(source):
    first = before(lambda n: {"main().i": leaf(n)} if n else {})
    second = after(lambda n: {"main().i": leaf(n - 3)})
    found = failed(judged(source, one(first, second)))["saves all state"]
    assert "a loop that counts anew: 1 where it was 4" in found.what


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("    if i % 10 == 0:\n            print(i, loss)", NOTE),
        ("    log.info('%d', i)", NOTE),
        ("    if i > 3:\n            break", FAILS),
        ("    lr = 1 / i", FAILS),
    ],
)
def test_an_index_that_is_only_printed_is_a_note(body, state, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"def main():\n    for i, x in enumerate(run.loader(data)):\n    {body}\n")
    first = before(lambda n: {"main().i": leaf(n)} if n else {})
    second = after(lambda n: {"main().i": leaf(n - 3)})
    found = judged(SourceText.read(str(path)), one(first, second))
    ruling = next(r for r in found if "counts anew" in r.what)
    assert ruling.state == state and "loader.step.number" in ruling.remedy


@pytest.mark.parametrize(
    ("other", "state"),
    [
        ("def item(i): return data[i]", NOTE),
        ("class Data:\n    def __getitem__(self, i): return self.x[i]", NOTE),
        ("squares = [i * i for i in range(3)]", NOTE),
        ("def last(): return data[i]", FAILS),
        ("def advance():\n    global i\n    i = i + 1", FAILS),
    ],
)
def test_a_variable_of_the_same_name_elsewhere_is_another(other, state, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{other}\nfor i, x in enumerate(run.loader(data)):\n    print(i)\n")
    first = before(lambda n: {"i": leaf(n)} if n else {})
    second = after(lambda n: {"i": leaf(n - 3)})
    found = judged(SourceText.read(str(path)), one(first, second))
    assert next(r for r in found if "counts anew" in r.what).state == state


def test_a_resume_that_fails_or_begins_anew(source):
    gone = one(second=life([], None, epoch=2), failures=(ScriptFailure(0, "KeyError", "k", "x:3"),))
    assert failed(judged(source, gone))["resumes after a kill"].where == "x:3"
    anew = one(second=life([made(1)], 0, epoch=2))
    assert "began anew" in failed(judged(source, anew))["resumes after a kill"].what
    short = dataclasses.replace(one(), struck=False, lives=(before(),))
    assert judged(source, short)[0].state == UNTRIED


def test_steps_that_are_made_again_otherwise(source):
    second = after()
    wrong = dataclasses.replace(second.steps[0], losses=(0.3,))
    changed = dataclasses.replace(second, steps=(wrong, *second.steps[1:]))
    found = failed(judged(source, one(second=changed)))
    assert "step 4 was made again" in found["resumes after a kill"].what


@pytest.mark.parametrize(
    ("rows", "records", "says"),
    [
        (1000, False, "those of step 1, so the data begin anew"),
        (77, True, "of the same samples: something is drawn"),
        (77, False, "other rows after the resume"),
    ],
)
def test_data_that_are_read_otherwise_after_a_resume(source, rows, records, says):
    second = after()
    wrong = dataclasses.replace(second.steps[0], rows=rows)
    a = one(second=dataclasses.replace(second, steps=(wrong, *second.steps[1:])))
    a = a if records else dataclasses.replace(a, records=())
    found = failed(judged(source, a))
    assert list(found) == ["reads the same data again"]
    assert says in found["reads the same data again"].what


def test_a_dataset_that_is_another_each_time_is_shown_where_it_reads(source):
    a = one(before(unlike="Numbers[i] is another sample when it is read again"))
    found = failed(judged(source, a))["reads the same data again"]
    assert found.where == f"{source.path}:4"


# ---- two workers ---------------------------------------------------------------------------------
def killed_twice(state=lambda step: {}, begin=None, change=lambda step: step, **more):
    """One worker that is killed again after step 9; an epoch has six steps. `begin`: its picture
    after that; `change`: breaks the steps that follow."""
    first = before(state, pass_steps=6, **more)
    second = life([made(n, picture=state(n)) for n in range(4, 10)], 3, begin=state(3), epoch=2)
    steps = [change(made(n, picture=state(n))) for n in range(8, 12)]
    third = life(steps, 7, begin=begin or {}, epoch=3)
    return dataclasses.replace(one(first, second, struck_again=True), lives=(first, second, third))


def of_an_epoch(found):
    return [r for r in found if r.promise == "resumes after an epoch's end"]


def test_a_second_kill_is_judged_like_the_first(source):
    (ruling,) = of_an_epoch(judged(source, killed_twice()))
    assert ruling.state == HOLDS
    assert ruling.what == "killed after step 9, it went on from 7; an epoch has 6 steps"
    other = killed_twice(change=lambda s: dataclasses.replace(s, losses=(9.0,)))
    (ruling,) = of_an_epoch(judged(source, other))
    assert ruling.state == FAILS and "step 8 was made again" in ruling.what
    moved = killed_twice(change=lambda s: dataclasses.replace(s, rows=1000 * (s.number - 7)))
    (ruling,) = of_an_epoch(judged(source, moved))
    assert ruling.state == FAILS and "the data begin anew" in ruling.what
    gone = killed_twice()
    gone = dataclasses.replace(gone, lives=gone.lives[:2])
    (ruling,) = of_an_epoch(judged(source, gone))
    assert ruling.state == FAILS and "made no step" in ruling.what


def test_state_that_is_lost_only_after_an_epoch_is_named_once(source):
    def best(step):  # a counter of epochs
        return {"main().best": leaf(int(step >= 6)), "main().x": leaf(f"x{step}", "float")}

    lost_late = best(3) | {"main().best": leaf(0), "main().x": leaf("x7", "float")}
    trained = killed_twice(best, begin=lost_late, change=lambda s: dataclasses.replace(
        s, picture=best(s.number) | {"main().best": leaf(0)}
    ))
    named = [r for r in judged(source, trained) if r.promise == "saves all state"]
    assert [(r.state, r.what) for r in named] == [
        (FAILS, "best (line 10): a counter: 0 where it was 1")
    ]


@pytest.mark.parametrize(
    ("more", "state", "says"),
    [
        ({"steps": 0}, NOTE, "the number of steps in an epoch is not known"),
        ({"steps": 3}, HOLDS, "an epoch has 3 steps, so the kill was there"),
        ({"steps": 80}, NOTE, "it ends after step 9, and an epoch has 80"),
        (
            {"steps": 80, "ended": "stopped", "needs_s": 400.2},
            NOTE,
            "an epoch has 80 steps, which takes some 400 s here; it was stopped after step 9",
        ),
    ],
)
def test_how_far_an_epochs_end_was_is_told(source, more, state, says):
    more = dict(more)
    trained = one(before(pass_steps=more.pop("steps")), **more)
    (ruling,) = of_an_epoch(judged(source, trained))
    assert ruling.state == state and says in ruling.what


def with_draws(rank, s):
    return dataclasses.replace(s, calls=(ForwardCall(s.rows, f"{rank}", True),))


BREAKS = {
    "the same samples on any world": [
        ("both ranks were given the same", lambda r, s: dataclasses.replace(s, rows=5)),
        (
            "24 rows on two workers, 12 on one",
            lambda r, s: dataclasses.replace(s, rows=r, count=12),
        ),
    ],
    "the same randomness on any world": [
        ("what a forward draws", with_draws),
        ("something is drawn between", lambda r, s: dataclasses.replace(s, rows=r + 9)),
    ],
    "the same loss and gradients on any world": [
        (
            "of shares 2/1 are 2 times those of one",
            lambda r, s: dataclasses.replace(s, gradients=(Gradient(2.0, (2.0, 0.0)),)),
        ),
        (
            "weighed wrongly",
            lambda r, s: dataclasses.replace(s, gradients=(Gradient(1.0, (0.9, 0.1)),)),
        ),
    ],
}


@pytest.mark.parametrize(
    ("promise", "says", "change"),
    [(promise, *each) for promise, many in BREAKS.items() for each in many],
)
def test_what_depends_on_the_world_is_named(source, promise, says, change):
    first = before()
    drawing = [dataclasses.replace(s, calls=(ForwardCall(s.rows, "0", True),)) for s in first.steps]
    a = one(dataclasses.replace(first, steps=tuple(drawing))) if change is with_draws else one()
    found = failed(judged(source, a, pair(change)))
    assert list(found) == [promise]
    assert says in found[promise].what and found[promise].where == "train.py:9"


def test_statistics_of_one_rank_are_shown_where_the_layer_is_made(source):
    norms = {"1 (BatchNorm1d)": 3.0}
    first = before()
    steps = tuple(dataclasses.replace(s, norms=norms) for s in first.steps)
    a = one(dataclasses.replace(first, steps=steps))
    b = pair(lambda r, s: dataclasses.replace(s, norms={"1 (BatchNorm1d)": 2.5}))
    found = failed(judged(source, a, b))["the same statistics on any world"]
    assert found.where == f"{source.path}:7" and "1 (BatchNorm1d)" in found.what
    same = pair(lambda r, s: dataclasses.replace(s, norms=norms))
    assert not failed(judged(source, a, same))
    synced = tuple(dataclasses.replace(s, norms={"1 (SyncBatchNorm)": 1.0}) for s in first.steps)
    a = one(dataclasses.replace(first, steps=synced))
    assert (
        "the ranks that are there"
        in failed(judged(source, a))["the same statistics on any world"].what
    )


def test_the_page_shows_the_forgetful_script():
    tree = Path(__file__).parents[2]
    page = (tree / "docs/CHECK.md").read_text()
    assert (tree / "tests/support/forgetful.py").read_text() in page


def test_a_loss_that_is_told_otherwise(source):
    b = pair()
    b = dataclasses.replace(b, records=(record(1, 1.5, 2, (2, 1)), *b.records[1:]))
    found = failed(judged(source, b=b))["the same loss and gradients on any world"]
    assert "the loss of two workers" in found.what


def test_ranks_of_other_data(source):
    b = pair()
    lives = tuple(dataclasses.replace(x, data=f"d{x.rank}") for x in b.lives)
    found = failed(judged(source, b=dataclasses.replace(b, lives=lives)))
    assert "not the same on all ranks" in found["the same samples on any world"].what


def test_files_that_every_rank_writes(source):
    b = pair()
    lives = tuple(
        dataclasses.replace(x, written=(FileWritten("m.pt", "train.py:30"),)) for x in b.lives
    )
    found = failed(judged(source, b=dataclasses.replace(b, lives=lives)))
    ruling = found["one rank writes the script's files"]
    assert ruling.where == "train.py:30" and "m.pt is written by every rank" in ruling.what


def of_files(found):
    return next(r for r in found if r.promise == "one rank writes the script's files")


def test_no_file_is_told_with_how_far_it_was_looked(source):
    assert (of_files(judged(source)).state, of_files(judged(source)).what) == (
        HOLDS,
        "it wrote none in 3 steps of two workers",
    )
    saves = dataclasses.replace(source, tree=ast.parse("if done:\n    model.save_pretrained('out')"))
    assert (of_files(judged(saves)).state, of_files(judged(saves)).what) == (
        NOTE,
        "not seen: it wrote none in 3 steps of two workers, and calls .save_pretrained()",
    )
    later = before(written=(FileWritten("epoch/m.pt", "train.py:30"),))
    ruling = of_files(judged(source, one(first=later)))
    assert (ruling.state, ruling.where) == (NOTE, "train.py:30")
    assert "it wrote no m.pt in 3 steps of two workers; one worker did, later" in ruling.what


def test_files_that_go_with_a_node_are_named(source, tmp_path):
    def kept(found):
        return [r for r in found if r.promise == "keeps the script's files"]

    wrote = (FileWritten("out/m.pt", "train.py:30"), FileWritten("out/o.pt", "train.py:31"))
    (ruling,) = kept(judged(source, one(first=before(written=wrote))))
    assert (ruling.state, ruling.where) == (NOTE, "train.py:30")
    assert ruling.what.startswith("out/m.pt and 1 other file are on the node's disk")
    assert "harness snapshots export" in ruling.remedy
    assert not kept(judged(source))
    path = tmp_path / "keeps.py"
    path.write_text(SCRIPT + "run.files.save('out')\n")
    assert not kept(judged(SourceText.read(str(path)), one(first=before(written=wrote))))


def of_weights(weights, lives):
    said = Prepared("train.py:12", weights=weights)
    return tuple(dataclasses.replace(each, prepared=said) for each in lives)


@pytest.mark.parametrize(("weights", "state"), [("a", FAILS), ("b", UNTRIED), ("", FAILS)])
def test_gradients_of_other_weights_are_not_compared(source, weights, state):
    far = pair(lambda rank, s: dataclasses.replace(s, gradients=(Gradient(3.0, (0.0, 3.0)),)))
    a, b = one(), far
    a = dataclasses.replace(a, lives=of_weights("a", a.lives))
    b = dataclasses.replace(b, lives=of_weights(weights, b.lives))
    found = {r.promise: r for r in judged(source, a, b)}
    ruling = found["the same loss and gradients on any world"]
    assert ruling.state == state
    assert ("each start makes other weights" in ruling.what) == (state == UNTRIED)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ScriptFailure(0, "KeyError", "no", "x:7"), "the script fails by itself, before"),
        (ScriptFailure(0, "BadInput", "no GRPO", "x:7"), "the harness refuses the script, before"),
        (ScriptFailure(0, "KeyError", "no", "x:7", ours=True), "harness check itself fails"),
    ],
)
def test_who_fails_is_not_the_script_where_it_is_us(source, failure, says):
    a = Outcome("one", "failed", lives=(life([]),), failures=(failure,))
    ((ruling),) = rulings(Case(a, None, source))
    assert ruling.what.startswith(says)


def test_a_look_that_raises_anything_is_no_error_of_the_script():
    class Odd:
        def __getattr__(self, name):
            raise KeyError(name)

    odd, kept = Odd(), torch.ones(2)
    assert list(Album(lambda module: False, set).picture({"odd": odd, "kept": kept})) == ["kept"]


def test_caches_and_locks_are_no_files_of_the_script(tmp_path):
    from harness.check import probe_hooks

    script = tmp_path / "train.py"
    script.write_text("def write(note, path):\n    note(path)\n")
    caches = probe_hooks.cache_folders({"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    names, seen = {}, []
    exec(compile(script.read_text(), str(script), "exec"), names)
    writes = probe_hooks.Writes(
        probe_hooks.Ownership(str(script), str(tmp_path), []), "/nowhere", caches
    )
    writes.tell = lambda written: seen.append(Path(written.path).name)
    for path in ("cache/rows.arrow", "data.lock", "model.pt"):
        names["write"](writes.note, str(tmp_path / path))
    assert seen == ["model.pt"]


def test_optimizers_that_step_without_a_session_leave_a_mark(tmp_path):
    code = (
        "import sys; from harness.check import probe_hooks; probe_hooks.arm(sys.argv[1])\n"
        "import torch; p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=0.1)\n"
        "for _ in range(int(sys.argv[2])): p.sum().backward(); o.step()"
    )
    for steps, marked in ((7, False), (8, True)):
        subprocess.run([sys.executable, "-c", code, str(tmp_path), str(steps)], check=True)
        assert (tmp_path / "plain").exists() == marked


def test_two_workers_that_fail_or_never_meet(source):
    b = Outcome("two", "failed", failures=(ScriptFailure(1, "RuntimeError", "no", "x:7"),))
    assert failed(judged(source, b=b))["runs on two workers"].where == "x:7"
    alone = Outcome("two", "finished", lives=(life([made(1)], epoch=2),), committed=9)
    assert [r.state for r in judged(source, b=alone) if r.promise == "runs on two workers"] == [
        UNTRIED
    ]


def test_what_two_workers_on_one_gpu_do_not_stand_is_not_tried(source):
    b = Outcome("two", "failed", failures=(ScriptFailure(1, "OutOfMemoryError", "no", "x:7"),))
    found = [r for r in judged(source, b=b, shared=True) if r.promise == "runs on two workers"]
    assert [r.state for r in found] == [UNTRIED]


def test_a_notice_that_is_not_heeded(source):
    assert "heeds a notice" in failed(judged(source, b=pair(left=0)))


# ---- the end -------------------------------------------------------------------------------------
def test_ends_that_depend_on_interruptions(source):
    found = failed(judged(source, one(committed=12), pair(committed=13)))
    assert "depends on where" in found["ends as it would have"].what
    early = judged(source, one(committed=7), pair(committed=7))
    assert "after step 7 of 9" in next(
        r.what for r in early if r.promise == "ends as it would have"
    )
    stopped = judged(source, one(ended="stopped"), pair(ended="stopped"))
    assert next(r for r in stopped if r.promise == "ends as it would have").state == NOTE


def test_a_run_that_fails_on_its_way(source):
    why = (ScriptFailure(0, "KeyError", "k", "x:3"),)
    late = judged(source, one(ended="failed", failures=why))
    assert failed(late)["ends as it would have"].what == "after step 9 it fails: KeyError: k"
    pairs = judged(source, b=pair(ended="failed", struck=False, failures=why))
    assert "after step 3: KeyError" in failed(pairs)["runs on two workers"].what


def test_a_run_that_never_ends(source):
    b = pair(ended="late", stands=("train.py:40", "train.py:9"))
    found = failed(judged(source, b=b))["ends as it would have"]
    assert found.where == "train.py:40" and "never ended" in found.what
    assert "train.py:40, train.py:9" in found.what


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lr": 0.05}, "the learning rate is 0.1 in one run and 0.05 in the other"),
        ({"digest": "x"}, "other samples"),
        ({"loss": 0.4}, "the loss is 0.1111 in one run and 0.4"),
    ],
)
def test_two_interrupted_runs_that_are_not_the_same_training(source, change, says):
    later = (*map(record, range(4, 9)), dataclasses.replace(record(9), **change))
    b = pair()
    found = failed(judged(source, b=dataclasses.replace(b, records=b.records + later)))
    assert says in found["the same training however interrupted"].what


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([5.2, 5.15, 5.21, 5.14, 5.2, 5.17, 5.16, 5.19, 5.15, 5.18, 5.2, 5.14], False),
        ([2.10, 2.09, 2.09, 2.07, 2.06, 2.07, 2.04, 2.03, 2.04, 2.01, 2.0, 1.99], True),
        ([7.0, 2.8, 2.9, 2.7, 2.8, 2.7], True),
        ([1.0, 2.0, 3.0, 4.0], False),
        ([1.0, float("nan"), 0.5, 0.1], False),
    ],
)
def test_a_loss_falls_if_it_does_so_by_more_than_it_scatters(losses, falls):
    assert falling(losses) is falls


def test_a_loss_that_does_not_fall(source):
    rising = tuple(record(n, n) for n in range(1, 10))
    a = dataclasses.replace(one(), records=rising)
    assert judged(source, a)[-1].state == NOTE
    assert judged(source, a, must_fall=True)[-1].state == FAILS
    nan = dataclasses.replace(one(), records=tuple(record(n, float("nan")) for n in range(1, 10)))
    assert judged(source, nan)[-1].state == FAILS


@pytest.mark.parametrize(
    ("outcome", "state", "says"),
    [
        (Outcome("one", "finished"), FAILS, "it has no session"),
        (Outcome("one", "stopped", left=2, tail="x\nharness run: no\n"), UNTRIED, "run: no"),
        (Outcome("one", "late", stands=("a:1",), lives=(RankLife(),)), UNTRIED, "no step was made"),
        (Outcome("one", "finished", lives=(RankLife(),)), FAILS, "without a step"),
        (
            Outcome("one", "failed", failures=(ScriptFailure(0, "OSError", "no data", "a:5"),)),
            UNTRIED,
            "fails by itself, before its first step: OSError: no data",
        ),
    ],
)
def test_nothing_else_is_said_where_nothing_was_trained(source, outcome, state, says):
    (found,) = rulings(Case(outcome, None, source))
    assert found.state == state and says in found.what


# ---- words ---------------------------------------------------------------------------------------
def test_the_report_in_words_and_as_json(source, capsys):
    from storage.terminal_text import Console

    report = checks.CheckReport(tuple(judged(source, changing("main().seen"))), 61.0, ("beware",))
    report = dataclasses.replace(report, host_nbytes=1_230_000_000, gpu_nbytes=45_600_000_000)
    assert report.verdict == FAILS
    checks.show(report, Console(width=100))
    said = capsys.readouterr().out
    assert "DOES NOT HOLD" in said and "warned: beware" in said
    assert "1 thing does not hold (61 s)" in said
    assert "a worker took up to 1.2 GB of host memory, and 45.6 GB on its GPU" in said
    body = json.loads(checks.to_json(report))
    assert body["status"] == 1 and body["rulings"][0]["state"] == "holds"
    untried = checks.CheckReport(tuple(judged(source, dataclasses.replace(one(), struck=False))), 1)
    assert checks.STATUS[untried.verdict] == 2


def test_lines_of_a_script(source):
    assert root_of("main().ema.shadow['w'][0]") == ("main", "ema")
    assert root_of("seen") == ("", "seen")
    assert source.made("main().average.weight") == 8 and source.made("nowhere") == 0
    assert source.used("main().noise") == 14 and source.makes("BatchNorm1d") == 7
    assert source.decides("main().best") and not source.decides("main().seen")
    assert source.reads("Numbers") == 4 and source.called("prepare") == 12
    assert SourceText.read("/nowhere/at/all.py").made("x") == 0


def test_what_a_killed_process_has_written_is_read():
    body = {**dataclasses.asdict(made(4, picture={})), "calls": [[7, "a", True]]}
    body |= {"gradients": [[1.0, [1.0, 0.0]]], "picture": packed({"x": leaf(3)})}
    lines = [
        line_of("life", {"rank": 1, "world": 2, "epoch": 3}),
        line_of("prepared", Prepared("a:1", "", ("model",), ("drop",))),
        line_of("begin", {"step": 3, "picture": packed({"x": leaf(2)})}),
        line_of("wrote", FileWritten("m.pt", "a:9")),
        line_of("life", {"data": "d"}),
        line_of("step", body),
        line_of("memory", {"host_nbytes": 70, "gpu_nbytes": 0}),
        b'{"what": "step", "num',
    ]
    found = life_of([line.decode() for line in lines])
    assert (found.rank, found.resumed, found.data, found.last) == (1, 3, "d", 4)
    assert found.begin == {"x": leaf(2)} and found.steps[0].picture == {"x": leaf(3)}
    assert found.steps[0].calls == (ForwardCall(7, "a", True),)
    assert (found.host_nbytes, found.gpu_nbytes) == (70, 0)
    assert found.prepared.draws == ("drop",) and found.written[0].path == "m.pt"


# ---- eyes ----------------------------------------------------------------------------------------
class Counter:
    def __init__(self):
        self.count, self.table = 0, {"a": torch.zeros(2)}
        self.generator = torch.Generator()


class Slotted:
    __slots__ = ("number",)


def counting():
    i = 0
    while True:
        i += 1
        yield i


def picture(**roots):
    own = lambda name: name == __name__  # noqa: E731
    return Album(own, lambda: {id(value) for value in roots.values()}).picture(roots)


def test_pictures_take_all_of_the_scripts_own_things():
    def remember():
        return hidden

    hidden = Counter()
    slotted = Slotted()
    slotted.number = 3
    numbers, ids = counting(), itertools.count(4)
    next(numbers)
    found = picture(c=Counter(), f=remember, s=slotted, g=numbers, ids=ids, kept=[1, 2], d={"k": 1})
    assert {"c.count", "c.table['a']", "c.generator", "s.number", "g().i", "ids", "kept"} < set(
        found
    )
    assert found["f.<hidden>.count"].owner == "f.<hidden>" and found["d['k']"].kind == "number"
    assert found["kept"].kind == "series" and found["c.generator"].kind == "generator"
    assert found["c.count"].saved and found["c.count"].owner_type == "Counter"


def test_pictures_take_of_libraries_only_what_carries_state():
    linear = nn.Linear(2, 2)
    sampler = torch.utils.data.DistributedSampler(range(4), 2, 0)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(linear.parameters(), lr=1.0), 2)
    own = Album(lambda name: False, set)
    found = own.picture(
        {
            "m": linear,
            "s": sampler,
            "lr": scheduler,
            "r": random.Random(1),
            "n": np.random.default_rng(1),
        }
    )
    assert {"m.weight", "m.bias", "s.epoch", "lr['last_epoch']", "r", "n"} <= set(found)
    assert not any("in_features" in path or "drop_last" in path for path in found)
    assert found["m.weight"].keeps and found["r"].kind == "generator"


def test_pictures_see_what_changes_and_nothing_else():
    counter, big = Counter(), torch.zeros(1 << 21)
    album = Album(lambda name: name == __name__, set)
    take = lambda: album.picture({"c": counter, "big": big})  # noqa: E731
    one_picture, same = take(), take()
    assert one_picture == same
    counter.count += 1
    counter.table["a"][0] = 1
    big[7] = 1
    torch.rand(1, generator=counter.generator)
    changed = {path for path, leaf in take().items() if one_picture[path] != leaf}
    assert changed == {"c.count", "c.table['a']", "c.generator", "big"}


def test_rows_are_the_same_however_they_are_cut():
    x, y = torch.randn(6, 3), torch.arange(6)
    whole = rows_of(((x,), {"labels": y}))
    parts = rows_of(((x[:4],), {"labels": y[:4]})) + rows_of(((x[4:],), {"labels": y[4:]}))
    assert len(set(whole)) == 6 and whole == parts
    assert rows_of(((x,), {"labels": y + 1})) != whole and rows_of((3,)) == []


def test_sketches_add_up():
    a, b = [torch.randn(70), torch.randn(3, 5)], [torch.randn(70), torch.randn(3, 5)]
    total = sketched([x + y for x, y in zip(a, b, strict=True)])
    parts = [p + q for p, q in zip(sketched(a).sketch, sketched(b).sketch, strict=True)]
    assert np.allclose(total.sketch, parts)
    assert np.isclose(
        total.norm, np.sqrt(sum(float((x + y).square().sum()) for x, y in zip(a, b, strict=True)))
    )


def test_statistics_are_those_of_layers_in_training():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    first = statistics_of(model)
    model(torch.randn(4, 2))
    assert list(first) == ["1 (BatchNorm1d)"] and statistics_of(model) != first
    assert statistics_of(copy.deepcopy(model).eval()) == {} and statistics_of(None) == {}
