"""What one member knows of the others: who is there, who is dead. Runs in the node agent.

Death is judged by each observer's own monotonic clock (no sign of life for `dead_s`) and by a
refused connection, which is a death at once; never by comparing clocks of two machines. Signs of
life and news come over lines (lines.py); the bucket is read about whom no line tells.

Up to `FULL_MESH` members, everybody follows everybody. In a bigger world each follows its
neighbours on a ring of all who live, at distances 1, 3, 9, ... both ways, and hears of all others
through them (gossip.py). Who is not followed counts as alive until somebody says otherwise; then
whoever hears that follows the doubted member too, and judges it by its own evidence, by the same
rules. Only of members that matter to no epoch another's word is enough.

Whatever else lies under `rdzv/` stops nobody: unknown fields are ignored, missing ones have their
defaults where one is sane, and an object that still makes no sense is passed over, and told once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from harness.agent.gossip import Grade, Overheard
from harness.agent.lines_protocol import Door, Heard
from harness.bucket.layout import MEMBERS, Member, member_key, member_of
from storage.errors import NotFound
from storage.objects import ObjectStore

FRESH_S = 10.0  # so long after a change those who wait look often
LIST_S = 1.0  # ... so often
KNOCK_S = 0.3  # and not more often than this because somebody calls
GHOST_S = 60.0  # between two looks at one found dead, which may not be
FULL_MESH = 16  # members; in a bigger world nobody has a line to everybody
BIG_LIST_S = 3.0  # LIST_S of a big world, where news of newcomers comes over lines
LEARN_S = 1.0  # so long a big world waits for hearsay of a stranger before it reads its object
READS_AT_ONCE = 16  # objects in one look at a big world

# carries out calls, one after the other or at once
Many = Callable[[Callable[[str], Any], Iterable[str]], Iterable[Any]]


def neighbours(me: str, names: Collection[str]) -> set[str]:
    """Whom `me` follows if these live. If it follows somebody, that one follows it."""
    ring = sorted({me, *names})
    if len(ring) <= FULL_MESH:
        return set(ring) - {me}
    at, found, distance = ring.index(me), set[str](), 1
    while distance <= len(ring) // 2:
        found |= {ring[(at + d) % len(ring)] for d in (distance, -distance)}
        distance *= 3
    return found - {me}


@functools.lru_cache(maxsize=2048)  # the same word comes from several sides
def _decoded(record: bytes) -> Member:
    """Raises ValueError."""
    return Member.decode(record)


class Ears(Protocol):
    """What the rendezvous needs of `lines.Lines`."""

    key: str = ""  # what callers of ours must know

    def follow(
        self, members: Mapping[str, Door], passing: bool = False, keyless: Collection[str] = ()
    ) -> None:
        """Keep a line to each of these. `passing`: pass on what is heard."""

    def heard(self, name: str) -> Heard:
        """What is known of a member over its line, or by hearsay."""

    def all_up(self) -> bool:
        """Is everybody heard who is followed, and has a line to us?"""

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""

    def tell(self, record: bytes) -> None:
        """Our newest record, to all who follow us."""

    def share(self, name: str, record: bytes) -> None:
        """What a member says of itself in the bucket, for those who follow us."""

    def doubt(self, name: str) -> None:
        """We found it dead."""

    def overheard(self) -> Overheard:
        """All hearsay; new records and callers are told once."""
        return Overheard()


@dataclass
class Sighting:
    """What is known of another member."""

    member: Member
    sign_s: float  # of its last sign of life, by our own clock
    moved: bool = False  # we saw its object change, or heard it
    read_s: float = 0.0  # when we last read its object
    dead: bool = False
    record: bytes = b""  # that was heard last
    key: str | None = None  # of its lines; None: its object in the bucket has not been read


@dataclass(frozen=True)
class BeatTimes:
    """How often a member says that it lives, and what silence means: see `Rendezvous`."""

    beat_s: float
    dead_s: float
    calm_s: float


@dataclass
class _Circle:
    """Whom we follow, and why, in a big world."""

    big: bool = False
    place: str = ""
    near: set[str] = field(default_factory=set)  # neighbours on the ring
    suspects: dict[str, int] = field(default_factory=dict)  # by whose word: a `Grade`; 0: ours
    hearsay: set[str] = field(default_factory=set)  # dead by another's word alone
    strangers: dict[str, float] = field(default_factory=dict)  # listed, not known; since when
    callers: set[str] = field(default_factory=set)  # whose objects are to be read
    absent: set[str] = field(default_factory=set)  # names whose objects say nothing


class Membership:
    """One member's view of the others. `many` reads several objects."""

    def __init__(
        self, store: ObjectStore, lines: Ears, beats: BeatTimes, monotonic: Callable[[], float]
    ):
        self._store, self._lines, self._beats, self._monotonic = store, lines, beats, monotonic
        self.many: Many = map
        self._odd: set[str] = set()  # objects that make no sense, and were told
        self.seen: dict[str, Sighting] = {}
        self.vital: frozenset[str] = frozenset()  # of whose death nobody's word is enough
        self._circle = _Circle()
        self._listed_s = -float("inf")
        self._looked_s = monotonic()
        self._epoch = 0  # our own last one
        self.fresh_s = monotonic()  # when something last changed

    def is_fresh(self) -> bool:
        """Has something changed lately?"""
        return self._monotonic() - self.fresh_s < FRESH_S

    @property
    def is_big(self) -> bool:
        """Are there too many for a line to everybody?"""
        return self._circle.big

    def pass_over(self, key: str, why: ValueError) -> None:
        """Say once that an object makes no sense."""
        if key not in self._odd:
            self._odd.add(key)
            print(f"harness: {self._store.url}/{key} is passed over: {why}", flush=True)

    # ---- looking ---------------------------------------------------------------------------------
    def look(self, me: Member) -> list[Member]:
        """Everybody who ever said something; those found dead have state "dead". Newcomers are
        looked for when somebody calls, often while something changes, and every `calm_s` else."""
        now = self._monotonic()
        often = me.state != "in" and self.is_fresh()
        silent_s = now - self._listed_s
        often_s, knock_s = (BIG_LIST_S, BIG_LIST_S) if self.is_big else (LIST_S, KNOCK_S)
        knocked = silent_s >= knock_s and self._lines.knocked()
        if not knocked and silent_s < (often_s if often else self._beats.calm_s):
            return self.watch(list(self.seen), me)
        self._listed_s = now
        if not self.is_big:
            for seen in self.seen.values():
                # one found dead may be who calls
                seen.read_s = -float("inf") if knocked else seen.read_s
        names = [name for key in self._store.list(MEMBERS) if (name := member_of(key))]
        for name in names:
            if name not in self.seen and name != me.member:
                self._circle.strangers.setdefault(name, now)
        self._circle.big = self._grows()
        if self.is_big:
            names = list({**dict.fromkeys(names), **dict.fromkeys(self.seen)})
        return self.watch(names, me)

    def watch(self, names: Iterable[str], me: Member) -> list[Member]:
        """As `look`, for these members: without a list, and nobody is asked for who is heard
        over a line."""
        now = self._monotonic()
        # we stood still: nobody's silence is judged by that time
        if (gap_s := now - self._looked_s) > self._beats.dead_s / 2:
            for seen in self.seen.values():
                seen.sign_s += gap_s
        self._looked_s, self._epoch = now, me.epoch
        names = [name for name in names if name != me.member]
        self._overhear(me, now)
        if self.is_big:
            due = self._due_in_big(me, now)[:READS_AT_ONCE]
        else:
            names = list(dict.fromkeys([*names, *self._circle.strangers]))
            due = [name for name in names if self._is_due(name, now)]
        self._read(due, now)
        found = [self._judge(name, now) for name in names]
        self._follow(me)
        return [*(m for m in found if m is not None), me]

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those whose objects we have not read yet, nor heard of; they are read next."""
        new = [n for n in names if n not in self.seen and n not in self._circle.absent]
        for name in new:
            self._circle.strangers.setdefault(name, -float("inf"))
        return new

    def suspect(self, names: Iterable[str]) -> None:
        """Judge these by our own evidence from now on."""
        circle, now = self._circle, self._monotonic()
        for name in names:
            seen = self.seen.get(name)
            if seen and circle.big and name not in circle.suspects and name not in circle.near:
                circle.suspects[name] = 0
                circle.hearsay.discard(name)
                seen.sign_s, seen.dead = now, False

    def hearsay(self, names: Iterable[str]) -> list[str]:
        """Those that are dead by another's word alone."""
        return [n for n in names if n in self._circle.hearsay]

    def look_again(self, names: Iterable[str]) -> bool:
        """Read once more who was found dead, but for those that lived a moment ago. Does one
        live again?"""
        now, found = self._monotonic(), []
        for name in names:
            seen = self.seen.get(name)
            if seen and seen.dead and now - seen.sign_s > self._beats.beat_s and now > seen.read_s:
                found.append(name)
        self._read(found, now)
        return any(not self.seen[name].dead for name in found)

    def revive(self, names: Iterable[str]) -> None:
        """They are in a new epoch, so they lived a moment ago, whatever we have seen of them."""
        for name in names:
            if seen := self.seen.get(name):
                seen.sign_s, seen.read_s, seen.dead = self._monotonic(), -float("inf"), False
                self._circle.hearsay.discard(name)

    # ---- whom we follow --------------------------------------------------------------------------
    def _grows(self) -> bool:
        living = sum(not s.dead and s.member.state != "gone" for s in self.seen.values())
        return living + len(self._circle.strangers) + 1 > FULL_MESH

    def _follow(self, me: Member) -> None:
        # Who is in another place cannot be reached; a line that never comes up would keep us from
        # being calm.
        living = {
            name: seen.member
            for name, seen in self.seen.items()
            if seen.member.place == me.place and not seen.dead and seen.member.state != "gone"
        }
        circle = self._circle
        circle.big, circle.place = self._grows(), me.place
        circle.near = neighbours(me.member, living) if circle.big else set(living)
        for name in [n for n in circle.suspects if n not in living]:
            del circle.suspects[name]
        doors = {}
        for name in (*circle.near, *circle.suspects):
            # keys never travel over lines: of whom we only heard, the bucket says it first
            if (key := self.seen[name].key) is None:
                circle.callers.add(name)
            else:
                doors[name] = Door(living[name].addr, living[name].probe_port, key)
        self._lines.follow(doors, circle.big, [n for n in living if self.seen[n].key == ""])

    def _overhear(self, me: Member, now: float) -> None:
        """Take over what others say of others."""
        overheard, circle = self._lines.overheard(), self._circle
        for name, record in overheard.records.items():
            if name != me.member:
                # not a record of our kind: the bucket will say it
                with contextlib.suppress(ValueError):
                    self._hear(_decoded(record), now)
        circle.callers |= {
            n for n in overheard.callers if n not in self.seen or self.seen[n].dead
        } - {me.member}
        for name, grade in overheard.doubts.items():
            seen = self.seen.get(name)
            if seen is None or seen.dead or not circle.big or self._lines.heard(name).up:
                continue
            matters = name in self.vital or seen.member.state == "ready"
            if grade is Grade.DEAD and not matters and self._is_trusted(name):
                seen.dead, self.fresh_s = True, now
                circle.hearsay.add(name)
            else:
                if self._is_trusted(name):  # until now
                    seen.sign_s = now
                circle.suspects[name] = max(grade, circle.suspects.get(name, 0))

    # ---- reading ---------------------------------------------------------------------------------
    def _is_due(self, name: str, now: float) -> bool:
        """Is its object to be read, since nobody is heard?"""
        seen = self.seen.get(name)
        if seen is None:
            return True
        if seen.member.state == "gone" or self._lines.heard(name).up:  # gone: for ever
            return False
        return now - seen.read_s >= (GHOST_S if seen.dead else self._beats.beat_s)

    def _due_in_big(self, me: Member, now: float) -> list[str]:
        """Whose objects are to be read, the most important first. Of strangers, everybody reads
        its own neighbours at once, and all others hear of them; of suspects nobody is found dead
        before a last look."""
        circle, due = self._circle, list(self._circle.callers)
        for name, grade in circle.suspects.items():
            seen, heard = self.seen[name], self._lines.heard(name)
            # what it said last, while its line may yet come up or be refused; and a last look
            first_s = seen.sign_s + self._beats.beat_s
            last_s = seen.sign_s + self._patience_s(seen, heard, grade)
            if not heard.up and any(seen.read_s < at_s <= now for at_s in (first_s, last_s)):
                due.append(name)
        if circle.strangers:
            living = {n for n, s in self.seen.items() if not s.dead and s.member.state != "gone"}
            mine = neighbours(me.member, living | circle.strangers.keys())
            newest = sorted(circle.strangers, reverse=True)
            due += [n for n in newest if n in mine]
            due += [n for n in newest if n not in mine and now - circle.strangers[n] >= LEARN_S]
        elsewhere = (n for n, s in self.seen.items() if s.member.place != me.place and not s.dead)
        due += [n for n in (*sorted(circle.near), *elsewhere) if self._is_due(n, now)]
        return list(dict.fromkeys(due))

    def _read(self, names: list[str], now: float) -> None:
        def get(name: str) -> bytes | None:
            try:
                return self._store.get(member_key(name))
            except NotFound:
                return None

        for name, data in zip(names, self.many(get, names), strict=True):
            self._circle.strangers.pop(name, None)
            self._circle.callers.discard(name)
            if data is not None:
                self._take(name, data, now)
            if name not in self.seen:
                self._circle.absent.add(name)

    def _take(self, name: str, data: bytes, now: float) -> None:
        """What lies in a member's object."""
        seen = self.seen.get(name)
        try:
            member = Member.decode(data)
            if member.member != name:
                raise ValueError(
                    f"wanted what {name} says of itself, found what {member.member} says"
                )
        except ValueError as e:  # what it said before it still counts, but is no sign of life
            self.pass_over(member_key(name), e)
            if seen is not None:
                seen.read_s = now
            return
        # it may be years old, or be written at this moment: its line will tell, or its next beat
        if seen is None:
            seen = self._meet(member, now)
        seen.key = member.key
        grade, sign_s = self._circle.suspects.get(name), seen.sign_s
        first = grade is not None and seen.read_s < sign_s + self._beats.beat_s
        seen.read_s = now
        self._update(seen, member, now)
        if first and not seen.dead:  # its beats are not passed on: this one may be an old one
            self._circle.suspects[name], seen.sign_s = grade or 0, sign_s
        self._lines.share(name, data)

    def _hear(self, member: Member, now: float) -> None:
        seen = self.seen.get(member.member)
        if seen is None:
            self._meet(member, now)
        else:
            self._update(seen, member, now)

    def _meet(self, member: Member, now: float) -> Sighting:
        self._circle.strangers.pop(member.member, None)
        self._circle.absent.discard(member.member)
        self.fresh_s = now
        return self.seen.setdefault(member.member, Sighting(member, now))

    def _update(self, seen: Sighting, member: Member, now: float) -> None:
        if member.beat > seen.member.beat and member.member == seen.member.member:
            if (member.state, member.epoch) != (seen.member.state, seen.member.epoch):
                self.fresh_s = now
            seen.member, seen.sign_s, seen.moved, seen.dead = member, now, True, False
            self._circle.suspects.pop(member.member, None)
            self._circle.hearsay.discard(member.member)

    # ---- judging ---------------------------------------------------------------------------------
    def _judge(self, name: str, now: float) -> Member | None:
        """What we know of one member now; state "dead" if it is; None: it never said anything."""
        seen = self.seen.get(name)
        if seen is None:
            return None
        if seen.member.state == "gone":  # for ever: a name is used once
            return seen.member
        if self._is_trusted(name):
            if not seen.dead:
                seen.sign_s = now
            return replace(seen.member, state="dead") if seen.dead else seen.member
        heard = self._lines.heard(name)
        if heard.record and heard.record != seen.record:
            seen.record = heard.record
            with contextlib.suppress(ValueError):
                self._update(seen, _decoded(heard.record), now)
        if heard.up:
            seen.sign_s, seen.dead, seen.moved = now, False, True
            self._circle.suspects.pop(name, None)
        if seen.member.state == "gone":
            return seen.member
        if not seen.dead and not heard.up and self._is_dead(name, seen, heard, now):
            seen.dead, self.fresh_s = True, now
            self._lines.doubt(name)
        return replace(seen.member, state="dead") if seen.dead else seen.member

    def _is_trusted(self, name: str) -> bool:
        """Nobody says anything against it, and those who follow it would."""
        circle = self._circle
        here = self.seen[name].member.place == circle.place
        return circle.big and here and name not in circle.near and name not in circle.suspects

    def _is_dead(self, name: str, seen: Sighting, heard: Heard, now: float) -> bool:
        grade = self._circle.suspects.get(name)
        silent_s = now - seen.sign_s
        known = heard.seen or not seen.moved or (grade is not None and grade >= Grade.REFUSED)
        if heard.refused and (known or silent_s >= 2 * self._beats.beat_s):
            return True
        patience_s = self._patience_s(seen, heard, grade)
        looked = grade is None or seen.read_s >= seen.sign_s + patience_s
        return silent_s >= patience_s and looked

    def _patience_s(self, seen: Sighting, heard: Heard, grade: int | None) -> float:
        """Whoever we hear no more loses our line to it, and beats in the bucket from then on; so
        does whoever those hear no more who told us. Whom we never heard may be calm without us,
        and so may who trains without us: it found us dead."""
        promise_s = seen.member.beat_s
        hears_us = (heard.seen or bool(grade)) and seen.member.epoch <= self._epoch
        told = hears_us or promise_s <= self._beats.beat_s
        return self._beats.dead_s + (0.0 if told else promise_s)
