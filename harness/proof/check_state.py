"""State that nobody saves: found by comparing a resumed worker with itself before it was killed.
Pure.

The worker was seen at step s, of which a snapshot was taken, and went on to step s + 1. Then it was
killed, resumed at s, and made step s + 1 again. What was there at once after the resume with
another value than at s, and differs still after step s + 1, was lost: it was neither saved nor
computed anew. What never changed before is no state, nor is what was made once, when it was first
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.proof.check_case import FAILS, HOLDS, NOTE, Case, Ruling
from harness.proof.check_evidence import Leaf, Picture, RankLife
from harness.proof.check_script import root_of

MOST = 12  # things that are told one by one
CLOCK_S = 86_400.0  # a number so near to the wall clock is a time
GLOBAL = ("Python's random", "numpy's random", "torch's random")


@dataclass(frozen=True)
class Forgotten:
    """A leaf that was lost, with its value before the kill and after. `anew`: it is a counter of a
    loop that began anew."""

    path: str
    was: Leaf
    found: Leaf
    anew: bool = False

    @property
    def name(self) -> str:
        """Of the object that is to be saved."""
        return self.was.owner or self.path


def lost(before: RankLife, after: RankLife) -> list[Forgotten]:
    """All of it, by path."""
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
    """Was it None until it was first needed, and the same ever since: a file that is opened, a
    table that is filled?"""
    later = [leaf.digest for s in before.steps if (leaf := s.picture.get(path)) is not None]
    return first.shown == "None" and len({d for d in later if d != first.digest}) == 1


def begun_anew(
    first: Picture, went_on: Picture, again: Picture, begin: Picture
) -> Iterator[Forgotten]:
    """Counters of loops: after the resume they are what they were after the very first step."""
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
    """One ruling for each object of which something was lost."""
    after = case.after
    if after is None or after.resumed is None or not after.steps:
        return
    things: dict[str, list[Forgotten]] = {}
    for one in lost(case.before, after):
        if not ignored(one, case.ignored):
            things.setdefault(one.name, []).append(one)
    judged = [ruling_of(case, name, parts) for name, parts in things.items()]
    judged.sort(key=lambda r: r.state != FAILS)
    yield from judged[:MOST]
    if len(judged) > MOST:
        yield Ruling("saves all state", FAILS, f"... and {len(judged) - MOST} more")
    if not any(r.state == FAILS for r in judged):
        seen = len(case.before.begin)
        what = f"of {seen} things that the script can reach, none that matters is lost"
        yield Ruling("saves all state", HOLDS, what)


def drawing_line(case: Case) -> str:
    """Where the script draws from a generator that was lost; "": there is none."""
    after = case.after
    for one in lost(case.before, after) if after is not None else ():
        if one.was.kind == "generator" and (line := case.source.used(one.path)):
            return case.at(line)
    return ""


def ignored(one: Forgotten, names: frozenset[str]) -> bool:
    """By the whole path, by the object, or by the variable alone."""
    return bool(names & {one.path, one.name, spoken(one.name), root_of(one.name)[1]})


def ruling_of(case: Case, name: str, parts: list[Forgotten]) -> Ruling:
    kinds = {part.was.kind for part in parts}
    matters = (
        bool(kinds & {"tensor", "generator", "number"})
        or any(part.was.keeps for part in parts)
        or case.source.decides(name)
    )
    part = parts[0]
    made = case.source.made(name)
    told = spoken(name) + (f" (line {made})" if made else "")
    what = f"{told}: {described(name, parts)}"
    where = case.prepare_line or case.at(made)
    if part.anew or not (part.was.keeps or part.was.kind in ("tensor", "generator")):
        where = case.at(made) or where
    state = FAILS if matters else NOTE
    return Ruling("saves all state", state, what, where, remedy_of(case, name, parts))


def spoken(name: str) -> str:
    """As people call it: without the function that it is local to."""
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
        return "begin at run.step after run.resume()"
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
        return "compute it from run.step, or keep it in an object of state="
    if part.was.kind in ("series", "text"):
        return f"if it matters, keep it in an object of state=; else --ignore {key}"
    return (
        f"give it state_dict and load_state_dict, and run.prepare(..., state={{{key!r}: {short}}})"
    )
