"""Rules for what must be the same on one worker and on two: samples, randomness, statistics, loss
and gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.check.check_case import (
    ALIKE,
    FAILS,
    HOLDS,
    NOTE,
    PARALLEL,
    SAME,
    UNTRIED,
    Case,
    Ruling,
    cosine,
    differ,
    distance,
    median,
    root_of,
    usable,
)
from harness.check.evidence import Leaf, ObservedStep, Picture, RankLife
from harness.core.formatting import plural

# State that is not saved: found by comparing a resumed worker with itself before it was killed.
# Pure.

MOST = 12  # things that are reported individually
CLOCK_S = 86_400.0  # a number this near to the wall clock is a time
GLOBAL = ("Python's random", "numpy's random", "torch's random")


@dataclass(frozen=True)
class Forgotten:
    """A leaf that was lost, with its value before the kill and after. `anew`: it is the counter of
    a loop that started over."""

    path: str
    was: Leaf
    found: Leaf
    anew: bool = False

    @property
    def name(self) -> str:
        """Path of the object that has to be saved."""
        return self.was.owner or self.path


def lost(before: RankLife, after: RankLife) -> list[Forgotten]:
    """Return everything that was lost, by path."""
    s = after.resumed
    if s is None or (at := before.at(s)) is None:
        return []
    went_on, again = before.at(s + 1), after.at(s + 1)
    if went_on is None or again is None:
        return []
    found = []
    for path, was in at.picture.items():
        now = after.begin.get(path)
        if now is None or now.digest == was.digest or is_clock(was, at.t):
            continue
        first = before.begin.get(path)
        if first is not None and (first.digest == was.digest or made_once(before, path, first)):
            continue
        if differs(went_on.picture, again.picture, path):
            found.append(Forgotten(path, was, now))
    first_step = before.at(1)
    if first_step is not None and s > 0:
        found += begun_anew(first_step.picture, went_on.picture, again.picture, after.begin)
    return found


def made_once(before: RankLife, path: str, first: Leaf) -> bool:
    """Return whether the leaf was None until it was first needed, and constant ever since, such as
    an opened file or a filled table."""
    later = [leaf.digest for s in before.steps if (leaf := s.picture.get(path)) is not None]
    return first.shown == "None" and len({d for d in later if d != first.digest}) == 1


def begun_anew(
    first: Picture, went_on: Picture, again: Picture, begin: Picture
) -> Iterator[Forgotten]:
    """Yield counters of loops that, after the resume, have their values after the very first
    step."""
    for path, now in again.items():
        was, one = went_on.get(path), first.get(path)
        if now.kind != "number" or path in begin or was is None or one is None:
            continue
        if now.digest != was.digest and now.digest == one.digest and now.shown != was.shown:
            yield Forgotten(path, was, now, anew=True)


def differs(a: Picture, b: Picture, path: str) -> bool:
    return path in a and path in b and a[path].digest != b[path].digest


def is_clock(leaf: Leaf, t: float) -> bool:
    if leaf.kind != "float":
        return False
    try:
        return abs(float(leaf.shown) - t) < CLOCK_S
    except ValueError:
        return False


# ---- words ---------------------------------------------------------------------------------------
def forgotten(case: Case) -> Iterator[Ruling]:
    """Yield one ruling for each object that lost something, in the first kill or in the second."""
    after = case.after
    if after is None or after.resumed is None or not after.steps:
        return
    things = lost_things(case)
    if second := case.second:
        things = {**lost_things(second), **things}
    judged = [ruling_of(case, name, parts) for name, parts in things.items()]
    judged.sort(key=lambda r: r.state != FAILS)
    yield from judged[:MOST]
    if len(judged) > MOST:
        yield Ruling("saves all state", FAILS, f"... and {len(judged) - MOST} more")
    if not any(r.state == FAILS for r in judged):
        seen = len(case.before.begin)
        what = f"of {seen} things that the script can reach, none that matters is lost"
        yield Ruling("saves all state", HOLDS, what)


def lost_things(case: Case) -> dict[str, list[Forgotten]]:
    """Return what was lost in a kill, by the object that has to be saved."""
    things: dict[str, list[Forgotten]] = {}
    for one in lost(case.before, case.after) if case.after is not None else ():
        if not ignored(one, case.ignored):
            things.setdefault(one.name, []).append(one)
    return things


def drawing_line(case: Case) -> str:
    """Return where the script draws from a generator that was lost; "" if there is none."""
    after = case.after
    for one in lost(case.before, after) if after is not None else ():
        if one.was.kind == "generator" and (line := case.source.used(one.path)):
            return case.at(line)
    return ""


def ignored(one: Forgotten, names: frozenset[str]) -> bool:
    """Return whether the names include it: by the whole path, by the object, or by the variable."""
    return bool(names & {one.path, one.name, spoken(one.name), root_of(one.name)[1]})


def ruling_of(case: Case, name: str, parts: list[Forgotten]) -> Ruling:
    kinds = {part.was.kind for part in parts}
    matters = (
        bool(kinds & {"tensor", "generator", "number"})
        or any(part.was.keeps for part in parts)
        or case.source.decides(name)
    )
    part = parts[0]
    if part.anew and case.source.only_shown(name):
        matters = False
    made = case.source.made(name)
    told = spoken(name) + (f" (line {made})" if made else "")
    what = f"{told}: {described(name, parts)}"
    where = case.prepare_line or case.at(made)
    if part.anew or not (part.was.keeps or part.was.kind in ("tensor", "generator")):
        where = case.at(made) or where
    state = FAILS if matters else NOTE
    return Ruling("saves all state", state, what, where, remedy_of(case, name, parts))


def spoken(name: str) -> str:
    """Return the name without the function that it is local to."""
    function, _ = root_of(name)
    return name.removeprefix(f"{function}().") if function else name


def described(name: str, parts: list[Forgotten]) -> str:
    part = parts[0]
    was, found = part.was, part.found
    if part.anew:
        return f"a loop that counts anew: {found.shown} where it was {was.shown}"
    if any(p.was.kind == "generator" for p in parts):
        return f"a generator ({was.shown}) that begins anew"
    if any(p.path.endswith(".epoch") for p in parts) and "Sampler" in was.owner_type:
        return f"a sampler's epoch: {found.shown} where it was {was.shown}"
    tensors = [p for p in parts if p.was.kind == "tensor"]
    if was.saved:
        inner = part.path.removeprefix(f"{name}.")
        return f"its {inner} is not in its state_dict: {found.shown} where it was {was.shown}"
    if tensors:
        kind = f"{was.owner_type}, " if was.owner_type else ""
        return f"{kind}{len(tensors)} tensors that change in steps and are saved by nobody"
    if was.kind == "number":
        return f"a counter: {found.shown} where it was {was.shown}"
    if was.kind == "series":
        return f"a history that begins anew: {found.shown} where it was {was.shown}"
    return f"{found.shown} where it was {was.shown}"


def remedy_of(case: Case, name: str, parts: list[Forgotten]) -> str:
    part, short = parts[0], spoken(name)
    if case.driver:
        hold = "keep it in something that the framework saves, with state_dict and load_state_dict"
        return f"{hold} (docs/trainers/{case.driver}.md); or --ignore {root_of(name)[1]}"
    key = root_of(name)[1]
    if name in GLOBAL:
        return "seed by (seed, step) at each step, as run.steps does, or save its state"
    if part.anew:
        if case.source.called("loader"):
            return f"loader.step.number counts on; or --ignore {key}, if it is only shown"
        return f"count by step.number (run.steps) or from run.step on; or --ignore {key}"
    if part.was.saved:
        return "register a buffer for it, or give its class get_extra_state"
    if part.was.kind == "generator":
        return (
            f"draw from the global generators, or save it: state={{{key!r}: an object whose "
            f"state_dict and load_state_dict get and set {short}'s state}}"
        )
    if any(p.was.keeps for p in parts):
        return f"run.prepare(..., state={{{key!r}: {short}}})"
    if part.was.kind in ("number", "float"):
        return f"compute it from run.step, or keep it in harness.Values({short}=...) of state="
    if part.was.kind in ("series", "text"):
        return f"if it matters, keep it in harness.Values of state=; else --ignore {key}"
    return (
        f"give it state_dict and load_state_dict, and run.prepare(..., state={{{key!r}: {short}}})"
    )


FAR = 1.6  # a ratio of gradient norms that different random numbers cannot explain


def met(case: Case) -> Iterator[Ruling]:
    """Judge whether the script runs on two workers at all."""
    two, promise = case.two, "runs on two workers"
    if two is None:
        yield Ruling(promise, UNTRIED, "not tried")
        return
    ranks = two.together()
    world = max((r.world for r in ranks), default=0)
    if world == 2 and any(r.steps for r in ranks) and (two.struck or not two.failures):
        shares = next((r.shares for r in two.records if r.world == 2), ())
        told = f" with shares {'/'.join(map(str, shares))}" if shares else ""
        yield Ruling(promise, HOLDS, f"steps 1 to {max(r.last for r in ranks)}{told}")
        return
    if two.failures:
        f, state = two.failures[0], UNTRIED if case.shared else FAILS
        where = "on one GPU together" if case.shared else "there"
        step = max((r.last for r in ranks if r.steps), default=0)
        what = f"it fails {where} after step {step}: {f.error}: {f.text}"
        yield Ruling(promise, state, what, f.where)
    elif world == 2 and two.ended == "late":
        what = f"two workers made no step within {two.seconds:.0f} s"
        yield Ruling(promise, FAILS, what, "".join(two.stands[:1]))
    else:
        what = "two workers never trained together: a step has work for one only, most likely"
        remedy = "at least two micro-batches in a global batch"
        yield Ruling(promise, UNTRIED, what, case.prepare_line, remedy)


def pair_up(case: Case) -> list[tuple[ObservedStep, list[ObservedStep]]]:
    """Return the steps of one worker, each with those of both of two; [] if two never trained
    together."""
    ranks = case.two.together() if case.two else []
    if len(ranks) != 2:
        return []
    found = []
    for alone in case.before.steps:
        both = [step for rank in ranks if (step := rank.at(alone.number)) is not None]
        if len(both) == 2:
            found.append((alone, both))
    return found


def shared_out(case: Case) -> Iterator[Ruling]:
    """Judge whether two workers together read what one reads alone."""
    promise, pairs = "the same samples on any world", pair_up(case)
    ranks = case.two.together() if case.two else []
    if len({r.data for r in ranks if r.data}) > 1:
        what = "the data are not the same on all ranks (their fingerprints differ)"
        remedy = "build the dataset from what all ranks share: not from the rank, time or hash()"
        yield Ruling(promise, FAILS, what, case.prepare_line, remedy)
        return
    if not pairs or not any(alone.amount for alone, _ in pairs):
        return
    wrong = next((p for p in pairs if not given_together(*p)), None)
    if wrong is None:
        yield Ruling(promise, HOLDS, f"{plural(len(pairs), 'step')}, row for row")
        return
    alone, both = wrong
    counts = sum(b.amount for b in both)
    where = alone.backward
    if both[0].samples == both[1].samples:
        what = f"step {alone.number}: both ranks were given the same {both[0].amount} rows"
        remedy = "share the data out by run.rank and run.world, or let run.steps do it"
    elif counts != alone.amount:
        what = f"step {alone.number}: {counts} rows on two workers, {alone.amount} on one"
        remedy = "keep the global batch: run.steps, run.loader, or an accumulation that follows"
    elif case.same_samples:
        return  # `drawn_alike` reports it
    else:
        what = f"step {alone.number}: other rows on two workers than on one"
        remedy = "take the samples of a step from (seed, step) alone"
    yield Ruling(promise, FAILS, what, where, remedy)


def given_together(alone: ObservedStep, both: list[ObservedStep]) -> bool:
    """Return whether two ranks were given what one was."""
    return alone.samples == sum(b.samples for b in both) % 2**63


def same_rows(case: Case) -> bool:
    pairs = pair_up(case)
    return bool(pairs) and all(given_together(a, both) for a, both in pairs)


def drawn_alike(case: Case) -> Iterator[Ruling]:
    """Judge whether random numbers are independent of the world."""
    promise, pairs = "the same randomness on any world", pair_up(case)
    if not pairs:
        return
    alone, both = pairs[0]
    if not same_rows(case):
        counted = alone.count == sum(b.count for b in both) and both[0].rows != both[1].rows
        if counted and case.same_samples:
            what = (
                f"step {alone.number}: the same samples, but other numbers on two workers than on "
                "one: something is drawn between the data and the model"
            )
            remedy = (
                "draw from torch's, numpy's or Python's global generator, which are seeded for "
                "each micro-batch; a generator of its own goes its own way on each rank"
            )
            yield Ruling(promise, FAILS, what, drawing_line(case) or alone.backward, remedy)
        return
    layers = ", ".join((case.before.prepared.draws if case.before.prepared else ())[:4])
    alike = drawing(pairs)
    remedy = "seed by (seed, step, micro-batch) before each forward, as run.steps does"
    if not any(alone.calls for alone, _ in pairs):
        yield Ruling(promise, NOTE, "not seen: no forward of what was prepared")
    elif alike is None:
        yield Ruling(promise, HOLDS, "no forward draws")
    elif alike:
        yield Ruling(promise, HOLDS, f"what forwards draw begins alike ({layers or 'no layer'})")
    else:
        what = f"step {alone.number}: what a forward draws for a row is other on two workers"
        what += f": {layers}" if layers else ""
        yield Ruling(promise, FAILS, what, alone.backward, remedy)


def drawing(pairs: list[tuple[ObservedStep, list[ObservedStep]]]) -> bool | None:
    """Return whether forwards of the same rows begin with the same generators; None if they draw
    nothing. Rows that are together on one worker, and apart on two, do not."""
    drew = False
    for alone, both in pairs:
        known = {call.rows: call.before for call in alone.calls if call.drew}
        drew = drew or bool(known)
        for call in (c for b in both for c in b.calls if c.drew):
            if call.rows not in known and alone.reads:
                continue  # the loop need not forward each micro-batch separately
            if known.get(call.rows) != call.before:
                return False
    return True if drew else None


def statistics(case: Case) -> Iterator[Ruling]:
    """Judge whether running statistics (BatchNorm) are independent of the world."""
    promise, pairs = "the same statistics on any world", pair_up(case)
    if pairs and (synced := [n for n in pairs[0][0].norms if "(Sync" in n]):
        what = f"{synced[0]}: its forward averages over the ranks that are there"
        line = case.at(case.source.called("convert_sync_batchnorm")) or case.prepare_line
        yield Ruling(promise, FAILS, what, line, "BatchNorm: run.steps gathers its statistics")
        return
    if pairs and pairs[0][0].norms and not same_rows(case):
        yield Ruling(promise, NOTE, "not seen, since the rows differ")
    for alone, both in pairs[:1] if same_rows(case) else []:
        for name, number in alone.norms.items():
            found = both[0].norms.get(name, number)
            if abs(found - number) > SAME * max(1.0, abs(number)):
                what = (
                    f"{name}: its running statistics are of one rank's micro-batches, so they "
                    "depend on the world"
                )
                remedy = "run.steps gathers them by micro-batch; else GroupNorm or LayerNorm"
                yield Ruling(
                    promise,
                    FAILS,
                    what,
                    case.at(case.source.makes(name.rpartition("(")[2].rstrip(")")))
                    or case.prepare_line,
                    remedy,
                )
                return
        if alone.norms:
            yield Ruling(promise, HOLDS, f"{', '.join(list(alone.norms)[:3])}")


def other_weights(case: Case) -> bool:
    """Return whether the two runs are known to have begun with different weights."""
    ranks = case.two.together() if case.two else []
    lives = [case.before, *ranks[:1]]
    known = {life.prepared.weights for life in lives if life.prepared is not None}
    return len(known - {""}) > 1


def summed(case: Case) -> Iterator[Ruling]:
    """Judge whether the loss and the gradients are those of the global batch, whatever the
    shares."""
    promise, pairs = "the same loss and gradients on any world", pair_up(case)
    pairs = [p for p in pairs if usable(p[0].gradients) and usable(p[1][0].gradients)]
    if not pairs or not same_rows(case):
        return
    if other_weights(case):
        what = "not compared: each start makes other weights, since the script seeds nothing"
        remedy = "seed before the model is made (torch.manual_seed, set_seed, seed_everything)"
        yield Ruling(promise, UNTRIED, what, case.prepare_line, remedy)
        return
    alone, both = pairs[0]
    told = {r.step: r for r in case.two.records} if case.two else {}
    shares = told[alone.number].shares if alone.number in told else ()
    uneven = f" of shares {'/'.join(map(str, shares))}" if shares else ""
    remedy = (
        "the mean of each micro-batch counts by its samples: step.backward(loss) does that, and "
        "weight= says it for tokens; in a loop of its own scale each loss by its part of the "
        "global batch and sum over ranks"
    )
    if drawing(pairs) is False:
        ratio = median([b[0].gradients[0].norm / a.gradients[0].norm for a, b in pairs])
        if 1 / FAR < ratio < FAR:
            yield Ruling(promise, NOTE, "not compared, since what forwards draw differs")
        else:
            what = f"the gradients of two workers{uneven} are about {ratio:.2g} times those of one"
            yield Ruling(promise, FAILS, what, alone.backward, remedy)
        return
    for a, b in zip(alone.gradients, both[0].gradients, strict=False):
        if (apart := distance(a, b)) > ALIKE:
            factor = b.norm / a.norm if a.norm else math.inf
            if cosine(a, b) > PARALLEL:
                how = f"{factor:.3g} times those of one"
            else:
                how = f"{apart:.1e} apart from those of one: the parts are weighed wrongly"
            what = f"step {alone.number}: the gradients of two workers{uneven} are {how}"
            yield Ruling(promise, FAILS, what, alone.backward, remedy)
            return
    mine = {r.step: r.loss for r in case.one.records}
    if alone.number in told and alone.number in mine:
        apart = differ((mine[alone.number],), (told[alone.number].loss,))
        if apart > ALIKE:
            what = f"step {alone.number}: the loss of two workers{uneven} is {apart:.1e} apart"
            yield Ruling(promise, FAILS, what, alone.backward, remedy)
            return
    yield Ruling(promise, HOLDS, f"step {alone.number}, two workers{uneven}")
