"""Rules of `harness check`: they conclude from what its workers saw what holds, what does not, and
which line to change. Pure: evidence in, rulings out.

Each rule judges one promise. It says nothing where another has found the cause already: gradients
of different samples are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePath

from harness.check.check_case import (
    FAILS,
    HOLDS,
    NOTE,
    SAME,
    UNTRIED,
    Case,
    Ruling,
    differ,
    distance,
    falling,
    median,
)
from harness.check.evidence import ObservedStep, RankLife, ScriptFailure
from harness.check.output_folders import GOES, REMEDY
from harness.check.run_diff import (
    drawing_line,
    drawn_alike,
    forgotten,
    met,
    same_rows,
    shared_out,
    statistics,
    summed,
)
from harness.core.formatting import plural
from harness.core.world import DRAINED

LEADS = {  # how a script of each framework tests whether it may write
    "transformers": "if trainer.is_world_process_zero(): ... (in callbacks: state.)",
    "accelerate": "if accelerator.is_main_process: ...",
    "lightning": "if trainer.is_global_zero: ...",
    "fabric": "if fabric.is_global_zero: ...",
}
APART = 0.02  # relative difference of losses after some steps with other rounding of sums
WRONG_INPUT = 2  # exit status of a command


def rulings(case: Case) -> list[Ruling]:
    """Return all rulings, in the order of a run's life."""
    if cannot := impossible(case):
        return [cannot]
    rules: tuple[Callable[[Case], Iterator[Ruling]], ...] = (
        *(resumes, forgotten, read_again, after_an_epoch),
        *(met, shared_out, drawn_alike, statistics, summed),
        *(files, left_behind, noticed, agree, ends, falls),
    )
    return [ruling for rule in rules for ruling in rule(case)]


# ---- one worker ----------------------------------------------------------------------------------
def impossible(case: Case) -> Ruling | None:
    """Return the ruling that explains why nothing else can be judged; None if there were steps."""
    one, life = case.one, case.before
    if life.steps:
        return None
    if one.failures:
        f = one.failures[0]
        who = failing(f)
        what = f"{who}, before its first step: {f.error}: {f.text}"
        return Ruling("trains", UNTRIED, what, f.where)
    if one.ended == "late":
        what = f"no step was made within {one.seconds:.0f} s"
        return Ruling(
            "trains", UNTRIED, what, line_of(one.stands), "give it arguments that make it small"
        )
    if not one.lives and one.left == WRONG_INPUT:
        said = one.tail.strip().rpartition("\n")[2]
        return Ruling("trains", UNTRIED, f"it was refused: {said}")
    if not one.lives:
        what = "nothing of it is saved or resumed: it has no session, and nothing has adapted it"
        remedy = "harness.attach, or a framework that harness run adapts (docs/trainers)"
        return Ruling("trains", FAILS, what, case.at(1 if case.source.path else 0), remedy)
    what = "it ended without a step that we saw"
    remedy = "run.steps, or run.safe_point after each step of a loop of its own"
    return Ruling("trains", FAILS, what, case.prepare_line, remedy)


def failing(f: ScriptFailure) -> str:
    """Return who has failed: not the script, where an adapter refuses it or the check looks."""
    if f.ours:
        return "harness check itself fails while it looks (please report it)"
    refused = f.error == "BadInput"
    return "the harness refuses the script" if refused else "the script fails by itself"


def line_of(stands: tuple[str, ...]) -> str:
    return stands[0] if stands else ""


def resumes(case: Case) -> Iterator[Ruling]:
    """Judge whether the run continues after a kill, and computes the same."""
    one, after = case.one, case.after
    promise = "resumes after a kill"
    if not one.struck:
        steps = max(case.before.last, 0)
        if one.failures:
            f = one.failures[0]
            what = f"{failing(f)} after step {steps}: {f.error}: {f.text}"
            yield Ruling(promise, UNTRIED, what, f.where)
        else:
            what = f"it ended after step {steps}, before it could be killed"
            yield Ruling(promise, UNTRIED, what, "", "give it arguments for at least 8 steps")
        return
    if after is None or after.resumed is None or not after.steps:
        if one.failures:
            f = one.failures[0]
            what = f"the resumed script fails: {f.error}: {f.text}"
            yield Ruling(promise, FAILS, what, f.where)
        else:
            where = after.resumed if after else None
            what = "the resumed script made no step" + (f" after {where}" if where else "")
            yield Ruling(promise, FAILS, what, line_of(one.stands) or case.prepare_line)
        return
    if after.resumed == 0:
        what = "it began anew: no snapshot was committed before the kill"
        remedy = "prepare what is trained, and call run.safe_point after each step"
        yield Ruling(promise, FAILS, what, case.prepare_line, remedy)
        return
    if unlike := first_unlike(case.before, after):
        yield Ruling(promise, FAILS, unlike, case.prepare_line)
        return
    what = f"killed after step {case.before.last}, it went on from step {after.resumed}"
    if any(
        known.amount and known.samples == step.samples for known, step in twice(case.before, after)
    ):
        what += " and came to the same losses and gradients"
    yield Ruling(promise, HOLDS, what)


def first_unlike(before: RankLife, after: RankLife) -> str:
    """Return where a step that was made twice, from the same samples, differs; "" if nowhere."""
    for step in after.steps:
        known = before.at(step.number)
        if known is None or known.samples != step.samples:
            continue
        if (apart := differ(known.losses, step.losses)) > SAME:
            return (
                f"step {step.number} was made again, of the same samples, with another loss "
                f"({apart:.1e} apart)"
            )
        for a, b in zip(known.gradients, step.gradients, strict=False):
            if (apart := distance(a, b)) > SAME:
                return (
                    f"step {step.number} was made again, of the same samples, with other "
                    f"gradients ({apart:.1e} apart)"
                )
    return ""


def read_again(case: Case) -> Iterator[Ruling]:
    """Judge whether the resumed run reads what it would have read."""
    promise, before, after = "reads the same data again", case.before, case.after
    if before.unlike:
        remedy = "draw from torch's, numpy's or Python's global generator: they are seeded here"
        yield Ruling(
            promise,
            FAILS,
            before.unlike,
            case.at(case.source.reads(before.unlike.partition("[")[0])),
            remedy,
        )
        return
    if after is None or not (pairs := twice(before, after)):
        return
    if not any(known.amount for known, _ in pairs):
        yield Ruling(promise, NOTE, "not seen: no forward of what was prepared was given a tensor")
        return
    wrong = [(known, step) for known, step in pairs if known.samples != step.samples]
    if not wrong:
        what = f"{plural(len(pairs), 'step')} read twice, row for row"
        yield Ruling(promise, HOLDS, what)
        return
    step = wrong[0][1]
    where = step.backward or case.prepare_line
    what = f"step {step.number} was given other rows after the resume than before"
    older = next((s for s in before.steps if s.samples == step.samples), None)
    remedy = "go on from run.step: the data's place must follow from it, or be saved in state="
    if older is not None and older.number != step.number:
        what += f": those of step {older.number}, so the data begin anew"
    elif case.same_samples:
        what += ", of the same samples: something is drawn between the data and the model"
        remedy = "draw from the global generators, which are seeded for each micro-batch"
        where = drawing_line(case) or where
    yield Ruling(promise, FAILS, what, where, remedy)


def after_an_epoch(case: Case) -> Iterator[Ruling]:
    """Judge the second kill, or say how far from an epoch's end the first one was."""
    promise, one, after = "resumes after an epoch's end", case.one, case.after
    if after is None or not after.steps or not after.resumed:
        return
    steps = case.before.pass_steps
    if second := case.second:
        faults = [r for rule in (resumes, read_again) for r in rule(second) if r.state == FAILS]
        yield from (replace(r, promise=promise) for r in faults)
        if not faults and second.after is not None:
            what = f"killed after step {second.before.last}, it went on from {second.after.resumed}"
            yield Ruling(promise, HOLDS, f"{what}; an epoch has {plural(steps, 'step')}")
    elif steps and after.resumed >= steps:
        yield Ruling(promise, HOLDS, f"an epoch has {plural(steps, 'step')}, so the kill was there")
    elif not steps:
        what = "not seen: the number of steps in an epoch is not known here"
        yield Ruling(promise, NOTE, what)
    elif one.ended == "finished":
        what = f"not seen: it ends after step {one.committed}, and an epoch has {steps}"
        yield Ruling(promise, NOTE, what, "", "arguments for two epochs of few samples")
    else:
        what = (
            f"not seen: an epoch has {plural(steps, 'step')}, which takes some {one.needs_s:.0f} s "
            f"here; it was stopped after step {after.last}"
        )
        yield Ruling(promise, NOTE, what, "", "fewer samples, or more time: --within-s")


def twice(before: RankLife, after: RankLife) -> list[tuple[ObservedStep, ObservedStep]]:
    """Return the pairs of steps that were made, lost in the kill, and made again."""
    pairs = [(before.at(step.number), step) for step in after.steps]
    return [(known, step) for known, step in pairs if known is not None]


# ---- files, notices, the end ---------------------------------------------------------------------
# calls by which scripts write files at their end
WRITERS = ("save", "save_model", "save_pretrained", "save_checkpoint", "savefig", "to_csv", "dump")


def files(case: Case) -> Iterator[Ruling]:
    """Judge whether files that the script writes are written by one rank."""
    promise = "one rank writes the script's files"
    ranks = case.two.together() if case.two else []
    if len(ranks) < 2:
        return
    by_path: dict[str, dict[int, str]] = {}
    for rank in ranks:
        for written in rank.written:
            by_path.setdefault(written.path, {})[rank.rank] = written.where
    shared = {path: who for path, who in by_path.items() if len(who) > 1}
    for where in sorted({next(iter(who.values())) for who in shared.values()}):
        paths = [path for path, who in shared.items() if next(iter(who.values())) == where]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        what = f"{PurePath(paths[0]).name}{more} is written by every rank at once"
        remedy = LEADS.get(case.driver, "if run.rank == 0: ...") + (
            "; what training needs to go on is in its snapshots"
        )
        yield Ruling(promise, FAILS, what, where, remedy)
    if shared:
        return
    seen = f"in {plural(max(rank.last for rank in ranks), 'step')} of two workers"
    known = {where for who in by_path.values() for where in who.values()}
    alone = [w for life in case.one.lives for w in life.written]
    later = next((w for w in alone if w.where not in known), None)
    if by_path:
        yield Ruling(promise, HOLDS, f"{plural(len(by_path), 'file')} {seen}")
    if later is not None:
        name = PurePath(later.path).name
        what = f"not seen: it wrote no {name} {seen}; one worker did, later"
        yield Ruling(promise, NOTE, what, later.where, "arguments with which it writes sooner")
    elif not by_path and (named := next(filter(case.source.mentions, WRITERS), "")):
        what = f"not seen: it wrote none {seen}, and calls .{named}()"
        yield Ruling(promise, NOTE, what, "", "arguments with which it writes sooner")
    elif not by_path:
        yield Ruling(promise, HOLDS, f"it wrote none {seen}")


def left_behind(case: Case) -> Iterator[Ruling]:
    """Say which files are on a node, and go with it. `run.files` keeps those that it is given."""
    runs = [case.one, *([case.two] if case.two else [])]
    written = {w.path: w.where for run in runs for life in run.lives for w in life.written}
    if not written or case.source.mentions("files"):
        return
    path, where = next(iter(written.items()))
    more = f" and {plural(len(written) - 1, 'other file')}" if len(written) > 1 else ""
    verb = "are" if more else "is"
    yield Ruling("keeps the script's files", NOTE, f"{path}{more} {verb} {GOES}", where, REMEDY)


def noticed(case: Case) -> Iterator[Ruling]:
    """Judge whether a notice is acted upon at the next step boundary, and the others continue."""
    two, promise = case.two, "heeds a notice"
    if two is None or not two.struck or two.ended == "late":
        return
    asked = max((r.last for r in two.together()), default=0)
    later = two.later()
    resumed = later[0].resumed if later else None
    if two.left == DRAINED and resumed is not None and resumed >= asked:
        what = f"one of two nodes left after step {resumed}, the other went on from there alone"
        yield Ruling(promise, HOLDS, what)
    elif two.failures:
        f = two.failures[0]
        yield Ruling(promise, FAILS, f"it fails after one: {f.error}: {f.text}", f.where)
    elif two.left != DRAINED:
        what = f"the node that was told to leave after step {asked} did not drain"
        yield Ruling(promise, FAILS, what)
    else:
        what = f"told at step {asked}, the rest went on from step {resumed}"
        yield Ruling(promise, FAILS, what)


def ends(case: Case) -> Iterator[Ruling]:
    """Judge whether the run ends, and after the same step whatever happened to it."""
    promise = "ends as it would have"
    runs = [run for run in (case.one, case.two) if run is not None]
    for run in runs:
        newest = run.lives[-1] if run.lives else RankLife()
        if run.ended == "failed" and run.struck and run.failures and newest.steps:
            f = run.failures[0]
            what = f"after step {newest.last} it fails: {f.error}: {f.text}"
            yield Ruling(promise, FAILS, what, f.where)
            return
        if run.ended != "late":
            continue
        last = max((life.last for life in run.lives), default=0)
        who = "one worker" if run.name == "one" else "two workers"
        made = bool(run.total) and last >= run.total
        if made:
            what = f"{who}: its last step ({run.total}) was made, and the script never ended"
        else:
            what = f"{who}: nothing came after step {last} within {run.seconds:.0f} s"
        if len(run.stands) > 1:
            what += f"; its ranks stand at {', '.join(PurePath(s).name for s in run.stands)}"
        remedy = "if it is only slow: --within-s, or arguments that make it small"
        state = FAILS if made or run.stands else UNTRIED
        yield Ruling(promise, state, what, line_of(run.stands), remedy)
        return
    over = [run for run in runs if run.ended == "finished"]
    steps = {run.committed for run in over}
    if len(steps) > 1:
        what = (
            f"killed, it ended after step {case.one.committed}; noticed, after step "
            f"{case.two.committed if case.two else 0}: how many steps it makes depends on where "
            "it was interrupted"
        )
        where = case.at(case.source.called("safe_point")) or case.prepare_line
        yield Ruling(promise, FAILS, what, where, "let the loop end at a step: run.step < total")
    elif over and len(over) == len(runs):
        early = over[0].total > over[0].committed
        told = f" of {over[0].total}, by its own choice" if early else ""
        yield Ruling(promise, HOLDS, f"after step {over[0].committed}{told}")
    elif stopped := [run for run in runs if run.ended == "stopped"]:
        last = max(run.committed for run in stopped)
        what = f"not tried: it goes on after step {last}, where it was stopped"
        yield Ruling(promise, NOTE, what, "", "arguments with which it ends sooner, or --steps")


def agree(case: Case) -> Iterator[Ruling]:
    """Judge whether the killed run and the run with a notice are the same training."""
    promise = "the same training however interrupted"
    if case.two is None or not (case.one.struck and case.two.struck and same_rows(case)):
        return
    asked = min(case.after.resumed or 0 if case.after else 0, case.two.together()[0].last)
    other = {record.step: record for record in case.two.records}
    pairs = [(a, other[a.step]) for a in case.one.records if a.step in other]
    for a, b in pairs:
        how = ""
        if differ((a.lr,), (b.lr,)) > SAME:
            how = f"the learning rate is {a.lr:.4g} in one run and {b.lr:.4g} in the other"
        elif (a.digest, a.contents) != (b.digest, b.contents):
            how = "the two runs consumed other samples"
        elif differ((a.loss,), (b.loss,)) > APART:
            how = f"the loss is {a.loss:.4g} in one run and {b.loss:.4g} in the other"
        if how and a.step <= asked:
            return  # they differed before anything was interrupted, which other rules report
        if how:
            what = f"step {a.step}: {how}; something that it follows from is not saved"
            yield Ruling(promise, FAILS, what, case.prepare_line, "run.prepare(..., state=)")
            return
    if pairs:
        yield Ruling(promise, HOLDS, f"{plural(len(pairs), 'step')}: samples, loss, learning rate")


def falls(case: Case) -> Iterator[Ruling]:
    """Judge whether the loss falls."""
    losses = [r.loss for r in case.one.records]
    if not losses:
        done = {s.number: s for life in case.one.lives for s in life.steps if s.losses}
        losses = [sum(s.losses) / len(s.losses) for _, s in sorted(done.items())]
    if len(losses) < 4:
        return
    third = max(1, len(losses) // 3)
    first, last = median(losses[:third]), median(losses[-third:])
    what = f"{first:.4g} at first, {last:.4g} after {len(losses)} steps"
    if falling(losses):
        yield Ruling("the loss falls", HOLDS, what)
    else:
        state = FAILS if case.must_fall or not math.isfinite(last) else NOTE
        remedy = "look at the learning rate, the labels and the data before many nodes are paid for"
        yield Ruling("the loss falls", state, f"not that it showed: {what}", "", remedy)
