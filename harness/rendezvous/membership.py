"""One member's view of the others: which are there, and which are dead. Runs in the node agent.

Death is judged by each observer's own monotonic clock (no sign of life for `dead_s`) and by a
refused connection, which means death at once; never by comparing clocks of two machines. Signs of
life and news come over lines (peer_connections.py); for members without a line the bucket is read.

Up to `FULL_MESH` members, each follows all others. In a bigger world each follows its neighbours on
a ring of all living members, at distances 1, 3, 9, ... both ways, and learns about all others
through them (gossip.py). A member that is not followed counts as alive until a doubt about it is
received; then the receiver follows the doubted member too, and judges it by its own evidence, by
the same rules. Only for members that matter to no generation (the code's `epoch`) another member's
word is enough.

Other objects under `rdzv/` do no harm: unknown fields are ignored, missing ones have their defaults
where one is sane, and an object that still makes no sense is skipped, and reported once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from harness.bucket.layout import MEMBERS, Member, member_key, member_of
from harness.rendezvous.gossip import GossipReport, Grade
from harness.rendezvous.peer_heartbeats import Door, PeerStatus
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

FRESH_S = 10.0  # after a change, waiting members look often for this long
LIST_S = 1.0  # time between their looks then
KNOCK_S = 0.3  # shortest time between two looks because of a caller
GHOST_S = 60.0  # between two looks at a member found dead, which may be alive
FULL_MESH = 16  # members; in a bigger world no member has lines to all others
BIG_LIST_S = 3.0  # LIST_S of a big world, where news of newcomers comes over lines
LEARN_S = 1.0  # a big world waits so long for hearsay of a stranger before reading its object
READS_AT_ONCE = 16  # objects in one look at a big world

# carries out calls, one after the other or concurrently
Many = Callable[[Callable[[str], Any], Iterable[str]], Iterable[Any]]


def neighbours(me: str, names: Collection[str]) -> set[str]:
    """Return the members that `me` follows if `names` live. Following is mutual."""
    ring = sorted({me, *names})
    if len(ring) <= FULL_MESH:
        return set(ring) - {me}
    at, found, distance = ring.index(me), set[str](), 1
    while distance <= len(ring) // 2:
        found |= {ring[(at + d) % len(ring)] for d in (distance, -distance)}
        distance *= 3
    return found - {me}


@functools.lru_cache(maxsize=2048)  # the same record arrives from several members
def _decoded(record: bytes) -> Member:
    """Decode a member's record. Raises ValueError."""
    return Member.decode(record)


class PeerHeartbeats(Protocol):
    """The part of `peer_connections.PeerConnections` that the rendezvous needs."""

    key: str = ""  # secret that our callers must know

    def follow(self, members: Mapping[str, Door], passing: bool = False) -> None:
        """Keep a line to each of these members. `passing`: pass on received news."""

    def heard(self, name: str) -> PeerStatus:
        """Return what is known of a member over its line, or by hearsay."""

    def all_up(self) -> bool:
        """Return whether the lines to and from all followed members are up."""

    def reached(self) -> frozenset[str] | None:
        """Return the followed members whose lines are up both ways; None: there are no lines."""
        return None

    def renew(self) -> None:
        """Replace lines that are up by new ones, to prove that members can still be reached."""

    def knocked(self) -> bool:
        """Return whether a stranger has called since the last call of this method."""

    def tell(self, record: bytes) -> None:
        """Send our newest record to all followers."""

    def share(self, name: str, record: bytes) -> None:
        """Pass a member's record that was read from the bucket on to our followers."""

    def doubt(self, name: str) -> None:
        """Report to our followers that we found a member dead."""

    def overheard(self) -> GossipReport:
        """Return all hearsay; new records and callers are returned once."""
        return GossipReport()


@dataclass
class MemberView:
    """Knowledge about another member."""

    member: Member
    sign_s: float  # time of its last sign of life, by our own clock
    moved: bool = False  # we saw its object change, or had a line to it
    read_s: float = 0.0  # when we last read its object
    dead: bool = False
    record: bytes = b""  # the last that was received
    key: str | None = None  # of its lines; None: its object in the bucket has not been read


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Heartbeat intervals and the timeout of a member, in seconds: see `Rendezvous`."""

    beat_s: float
    dead_s: float
    calm_s: float


@dataclass
class _Circle:
    """The members that we follow, and why, in a big world."""

    big: bool = False
    place: str = ""
    near: set[str] = field(default_factory=set)  # neighbours on the ring
    suspects: dict[str, int] = field(default_factory=dict)  # `Grade` of the doubt; 0: our own
    hearsay: set[str] = field(default_factory=set)  # dead by another member's word alone
    strangers: dict[str, float] = field(default_factory=dict)  # listed but unknown, since when
    callers: set[str] = field(default_factory=set)  # their objects must be read
    absent: set[str] = field(default_factory=set)  # names without a readable object


class Membership:
    """One member's view of the others. `many`: maps a call over several objects."""

    def __init__(
        self,
        store: ObjectStore,
        lines: PeerHeartbeats,
        beats: HeartbeatTimeouts,
        monotonic: Callable[[], float],
    ):
        self._store, self._lines, self._beats, self._monotonic = store, lines, beats, monotonic
        self.many: Many = map
        self._odd: set[str] = set()  # invalid objects that were reported
        self.seen: dict[str, MemberView] = {}
        self.vital: frozenset[str] = frozenset()  # their death is never taken on hearsay
        self._circle = _Circle()
        self._listed_s = -float("inf")
        self._looked_s = monotonic()
        self._epoch = 0  # our own last generation
        self.fresh_s = monotonic()  # when something last changed

    def is_fresh(self) -> bool:
        """Return whether something has changed within `FRESH_S`."""
        return self._monotonic() - self.fresh_s < FRESH_S

    @property
    def is_big(self) -> bool:
        """True if there are too many members for lines to all of them."""
        return self._circle.big

    def pass_over(self, key: str, why: ValueError) -> None:
        """Report once that an object makes no sense."""
        if key not in self._odd:
            self._odd.add(key)
            print(f"harness: {self._store.url}/{key} is passed over: {why}", flush=True)

    # ---- looking ---------------------------------------------------------------------------------
    def look(self, me: Member) -> list[Member]:
        """Return all members ever seen; those found dead have state "dead". The bucket is listed
        for newcomers when a stranger calls, often while things change, else every `calm_s`."""
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
                # the caller may be a member that was found dead
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
        """Return these members as `look` does, without listing the bucket. Objects of members
        whose line is up are not read."""
        now = self._monotonic()
        # this process was suspended: that time does not count as the others' silence
        if (gap_s := now - self._looked_s) > self._beats.dead_s / 2:
            for seen in self.seen.values():
                seen.sign_s += gap_s
        self._looked_s, self._epoch = now, me.epoch
        names = [name for name in names if name != me.member]
        self._overhear(me, now)
        if self.is_big:
            due = self._due_in_big(me, now)[:READS_AT_ONCE]
        else:
            # whoever calls is followed too: it must prove to each of us that it is reached
            callers = self._circle.callers
            names = list(dict.fromkeys([*names, *self._circle.strangers, *callers, *self.seen]))
            due = [name for name in names if name in callers or self._is_due(name, now)]
        self._read(due, now)
        found = [self._judge(name, now) for name in names]
        self._follow(me)
        return [*(m for m in found if m is not None), me]

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that we have neither read nor received; their objects are read next."""
        new = [n for n in names if n not in self.seen and n not in self._circle.absent]
        for name in new:
            self._circle.strangers.setdefault(name, -float("inf"))
        return new

    def suspect(self, names: Iterable[str]) -> None:
        """Judge these members by our own evidence from now on."""
        circle, now = self._circle, self._monotonic()
        for name in names:
            seen = self.seen.get(name)
            if seen and circle.big and name not in circle.suspects and name not in circle.near:
                circle.suspects[name] = 0
                circle.hearsay.discard(name)
                seen.sign_s, seen.dead = now, False

    def hearsay(self, names: Iterable[str]) -> list[str]:
        """Return the members that are dead by another member's word alone."""
        return [n for n in names if n in self._circle.hearsay]

    def look_again(self, names: Iterable[str]) -> bool:
        """Read members that were found dead again, except those that lived a moment ago. Return
        whether one of them is alive."""
        now, found = self._monotonic(), []
        for name in names:
            seen = self.seen.get(name)
            if seen and seen.dead and now - seen.sign_s > self._beats.beat_s and now > seen.read_s:
                found.append(name)
        self._read(found, now)
        return any(not self.seen[name].dead for name in found)

    def revive(self, names: Iterable[str]) -> None:
        """Mark members of a new generation as alive: they lived a moment ago, whatever we saw."""
        for name in names:
            if seen := self.seen.get(name):
                seen.sign_s, seen.read_s, seen.dead = self._monotonic(), -float("inf"), False
                self._circle.hearsay.discard(name)

    # ---- following -------------------------------------------------------------------------------
    def _grows(self) -> bool:
        living = sum(not s.dead and s.member.state != "gone" for s in self.seen.values())
        return living + len(self._circle.strangers) + 1 > FULL_MESH

    def _follow(self, me: Member) -> None:
        # Members in another place cannot be reached; a line that never comes up would keep our
        # heartbeats frequent.
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
            # keys never travel over lines: for members known by hearsay, the bucket has the key
            if (key := self.seen[name].key) is None:
                circle.callers.add(name)
            else:
                doors[name] = Door(living[name].addr, living[name].probe_port, key)
        self._lines.follow(doors, circle.big)

    def _overhear(self, me: Member, now: float) -> None:
        """Merge hearsay of other members into our view."""
        overheard, circle = self._lines.overheard(), self._circle
        for name, record in overheard.records.items():
            if name != me.member:
                # records that cannot be decoded are left to the bucket
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
                if self._is_trusted(name):  # it counted as alive until now
                    seen.sign_s = now
                circle.suspects[name] = max(grade, circle.suspects.get(name, 0))

    # ---- reading ---------------------------------------------------------------------------------
    def _is_due(self, name: str, now: float) -> bool:
        """Return whether a member's object must be read, since its line is not up."""
        seen = self.seen.get(name)
        if seen is None:
            return True
        if seen.member.state == "gone" or self._lines.heard(name).up:  # gone members never return
            return False
        return now - seen.read_s >= (GHOST_S if seen.dead else self._beats.beat_s)

    def _due_in_big(self, me: Member, now: float) -> list[str]:
        """Return the names whose objects must be read, the most important first. Each member reads
        strangers that are its own neighbours at once, and learns about others by hearsay; no
        suspect is found dead before a last look."""
        circle, due = self._circle, list(self._circle.callers)
        for name, grade in circle.suspects.items():
            seen, heard = self.seen[name], self._lines.heard(name)
            # its last state, while its line may still come up or be refused; and a last look
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
        seen = self.seen.get(name)
        try:
            member = Member.decode(data)
            if member.member != name:
                raise ValueError(
                    f"wanted what {name} says of itself, found what {member.member} says"
                )
        except ValueError as e:  # its previous state still counts, but this is no sign of life
            if seen is not None:
                seen.read_s = now
            self.pass_over(member_key(name), e)
            return
        # the object may be years old, or just written: its line or its next heartbeat will show
        if seen is None:
            seen = self._meet(member, now)
        seen.key = member.key
        grade, sign_s = self._circle.suspects.get(name), seen.sign_s
        first = grade is not None and seen.read_s < sign_s + self._beats.beat_s
        seen.read_s = now
        self._update(seen, member, now)
        if first and not seen.dead:  # heartbeats are not passed on: this one may be old
            self._circle.suspects[name], seen.sign_s = grade or 0, sign_s
        self._lines.share(name, data)

    def _hear(self, member: Member, now: float) -> None:
        seen = self.seen.get(member.member)
        if seen is None:
            self._meet(member, now)
        else:
            self._update(seen, member, now)

    def _meet(self, member: Member, now: float) -> MemberView:
        self._circle.strangers.pop(member.member, None)
        self._circle.absent.discard(member.member)
        self.fresh_s = now
        return self.seen.setdefault(member.member, MemberView(member, now))

    def _update(self, seen: MemberView, member: Member, now: float) -> None:
        if member.beat > seen.member.beat and member.member == seen.member.member:
            if (member.state, member.epoch) != (seen.member.state, seen.member.epoch):
                self.fresh_s = now
            seen.member, seen.sign_s, seen.moved, seen.dead = member, now, True, False
            self._circle.suspects.pop(member.member, None)
            self._circle.hearsay.discard(member.member)

    # ---- judging ---------------------------------------------------------------------------------
    def _judge(self, name: str, now: float) -> Member | None:
        """Return one member as known now, with state "dead" if it is; None if never seen."""
        seen = self.seen.get(name)
        if seen is None:
            return None
        if seen.member.state == "gone":  # it never returns: a name is used once
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
        """Return whether a member counts as alive without own evidence: its followers would report
        a doubt, and none did."""
        circle = self._circle
        here = self.seen[name].member.place == circle.place
        return circle.big and here and name not in circle.near and name not in circle.suspects

    def _is_dead(self, name: str, seen: MemberView, heard: PeerStatus, now: float) -> bool:
        grade = self._circle.suspects.get(name)
        silent_s = now - seen.sign_s
        # a network may refuse us whoever lives: only one that we had a line to is dead at once, and
        # others, where a refusal proves nothing, once they have broken their promise too
        known = heard.seen or (grade is not None and grade >= Grade.REFUSED)
        proves = self._circle.big and bool(self._lines.reached())
        promise_s = 0.0 if proves else seen.member.beat_s
        wait_s = self._beats.beat_s + max(self._beats.beat_s, promise_s)
        if heard.refused and (known or silent_s >= wait_s):
            return True
        patience_s = self._patience_s(seen, heard, grade)
        looked = grade is None or seen.read_s >= seen.sign_s + patience_s
        return silent_s >= patience_s and looked

    def _patience_s(self, seen: MemberView, heard: PeerStatus, grade: int | None) -> float:
        """Return the timeout of a member. One whose line to us (or to those that reported a doubt)
        broke sends heartbeats to the bucket every `beat_s` from then on. One that never had a line
        to us may keep the longer interval that it announced, and so may one that trains without us,
        since it found us dead."""
        promise_s = seen.member.beat_s
        hears_us = (heard.seen or bool(grade)) and seen.member.epoch <= self._epoch
        told = hears_us or promise_s <= self._beats.beat_s
        return self._beats.dead_s + (0.0 if told else promise_s)
