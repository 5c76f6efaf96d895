"""What must be the same on one worker and on two: samples, randomness, statistics, loss and
gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.proof.check_case import (
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
    usable,
)
from harness.proof.check_evidence import StepSeen
from harness.proof.check_state import drawing_line
from harness.views.words import plural

FAR = 1.6  # gradients so much longer or shorter are not those of other random numbers


def met(case: Case) -> Iterator[Ruling]:
    """It runs on two workers at all."""
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


def pair_up(case: Case) -> list[tuple[StepSeen, list[StepSeen]]]:
    """Steps of one worker, and of both of two. None: they never trained together."""
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
    """Both read together what one reads alone."""
    promise, pairs = "the same samples on any world", pair_up(case)
    ranks = case.two.together() if case.two else []
    if len({r.data for r in ranks if r.data}) > 1:
        what = "the data are not the same on all ranks (their fingerprints differ)"
        remedy = "build the dataset from what all ranks share: not from the rank, time or hash()"
        yield Ruling(promise, FAILS, what, case.prepare_line, remedy)
        return
    if not pairs or not any(alone.amount for alone, _ in pairs):
        return
    wrong = next((p for p in pairs if not together(*p)), None)
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
        return  # `drawn_alike` tells
    else:
        what = f"step {alone.number}: other rows on two workers than on one"
        remedy = "take the samples of a step from (seed, step) alone"
    yield Ruling(promise, FAILS, what, where, remedy)


def together(alone: StepSeen, both: list[StepSeen]) -> bool:
    """Have two ranks been given what one was?"""
    return alone.samples == sum(b.samples for b in both) % 2**63


def same_rows(case: Case) -> bool:
    pairs = pair_up(case)
    return bool(pairs) and all(together(a, both) for a, both in pairs)


def drawn_alike(case: Case) -> Iterator[Ruling]:
    """What is drawn does not depend on the world."""
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


def drawing(pairs: list[tuple[StepSeen, list[StepSeen]]]) -> bool | None:
    """Do forwards of the same rows begin with the same generators? None: they draw nothing. Rows
    that are given together on one worker, and apart on two, do not."""
    drew = False
    for alone, both in pairs:
        known = {call.rows: call.before for call in alone.calls if call.drew}
        drew = drew or bool(known)
        for call in (c for b in both for c in b.calls if c.drew):
            if call.rows not in known and alone.reads:
                continue  # the loop need not forward each micro-batch by itself
            if known.get(call.rows) != call.before:
                return False
    return True if drew else None


def statistics(case: Case) -> Iterator[Ruling]:
    """Running statistics (BatchNorm) do not depend on the world."""
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


def summed(case: Case) -> Iterator[Ruling]:
    """The loss and the gradients are those of the global batch, whatever the shares."""
    promise, pairs = "the same loss and gradients on any world", pair_up(case)
    pairs = [p for p in pairs if usable(p[0].gradients) and usable(p[1][0].gradients)]
    if not pairs or not same_rows(case):
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
