"""What one member knows of the others: who is there, who is dead. Runs in the node agent.

Death is judged by each observer's own monotonic clock (no sign of life for `dead_s`) and by a
refused connection, which is a death at once; never by comparing clocks of two machines. Signs of
life and news come over lines (lines.py); the bucket is read about whom no line tells.

Whatever else lies under `rdzv/` stops nobody: unknown fields are ignored, missing ones have their
defaults where one is sane, and an object that still makes no sense is passed over, and told once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from harness.agent.lines_protocol import Address, Heard
from harness.bucket.epochs import MEMBERS, Member, decode
from storage.errors import NotFound
from storage.objects import ObjectStore

FRESH_S = 10.0  # so long after a change those who wait look often
LIST_S = 1.0  # ... so often
KNOCK_S = 0.3  # and not more often than this because somebody calls
GHOST_S = 60.0  # between two looks at one found dead, which may not be


class Ears(Protocol):
    """What the rendezvous needs of `lines.Lines`."""

    def follow(self, members: Mapping[str, Address]) -> None:
        """Keep a line to each of these."""

    def heard(self, name: str) -> Heard:
        """What is known of a member over its line."""

    def all_up(self) -> bool:
        """Is everybody heard who is followed?"""

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""

    def tell(self, record: bytes) -> None:
        """Our newest record, to all who follow us."""


@dataclass
class Seen:
    """What is known of another member."""

    member: Member
    sign_s: float  # of its last sign of life, by our own clock
    moved: bool = False  # we saw its object change, or heard it
    read_s: float = 0.0  # when we last read its object
    dead: bool = False


@dataclass(frozen=True)
class Beats:
    """How often a member says that it lives, and what silence means: see `Rendezvous`."""

    beat_s: float
    dead_s: float
    calm_s: float


class Membership:
    """One member's view of the others."""

    def __init__(
        self, store: ObjectStore, lines: Ears, beats: Beats, monotonic: Callable[[], float]
    ):
        self._store, self._lines, self._beats, self._monotonic = store, lines, beats, monotonic
        self._odd: set[str] = set()  # objects that make no sense, and were told
        self.seen: dict[str, Seen] = {}
        self._listed_s = -float("inf")
        self._looked_s = monotonic()
        self._epoch = 0  # our own last one
        self.fresh_s = monotonic()  # when something last changed

    def is_fresh(self) -> bool:
        """Has something changed lately?"""
        return self._monotonic() - self.fresh_s < FRESH_S

    def pass_over(self, key: str, why: ValueError) -> None:
        """Say once that an object makes no sense."""
        if key not in self._odd:
            self._odd.add(key)
            print(f"harness: {self._store.url}/{key} is passed over: {why}", flush=True)

    def look(self, me: Member) -> list[Member]:
        """Everybody who ever said something; those found dead have state "dead". Newcomers are
        looked for when somebody calls, often while something changes, and every `calm_s` else."""
        now = self._monotonic()
        often = me.state != "in" and self.is_fresh()
        silent_s = now - self._listed_s
        knocked = silent_s >= KNOCK_S and self._lines.knocked()
        if knocked or silent_s >= (LIST_S if often else self._beats.calm_s):
            self._listed_s = now
            for seen in self.seen.values():
                # one found dead may be who calls
                seen.read_s = -float("inf") if knocked else seen.read_s
            names = [
                m[1]
                for k in self._store.list(MEMBERS)
                if (m := re.fullmatch(r"([^/]+)\.json", k.removeprefix(MEMBERS)))
            ]
        else:
            names = list(self.seen)
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
        found = [self._judge(name, now) for name in names if name != me.member]
        # Who is in another place cannot be reached; a line that never comes up would keep us from
        # being calm.
        here = {n: s.member for n, s in self.seen.items() if s.member.place == me.place}
        follow = {n: m for n, m in here.items() if not self.seen[n].dead and m.state != "gone"}
        self._lines.follow({n: (m.addr, m.probe_port) for n, m in follow.items()})
        return [*(m for m in found if m is not None), me]

    def revive(self, names: Iterable[str]) -> None:
        """They are in a new epoch, so they lived a moment ago, whatever we have seen of them."""
        for seen in (self.seen[name] for name in names if name in self.seen):
            seen.sign_s, seen.read_s, seen.dead = self._monotonic(), -float("inf"), False

    def _judge(self, name: str, now: float) -> Member | None:
        """What we know of one member now; state "dead" if it is; None: it never said anything."""
        seen = self.seen.get(name)
        if seen is not None and seen.member.state == "gone":  # for ever: a name is used once
            return seen.member
        heard = self._lines.heard(name)
        if seen is None or (
            not heard.up and now - seen.read_s >= (GHOST_S if seen.dead else self._beats.beat_s)
        ):
            seen = self._read(name, now, seen)
            if seen is None:
                return None
        if heard.record:
            # not a record of our kind: the bucket will say it
            with contextlib.suppress(ValueError):
                self._update(seen, decode(Member, heard.record), now)
        if heard.up:
            seen.sign_s, seen.dead, seen.moved = now, False, True
        if seen.member.state == "gone":
            return seen.member
        if not seen.dead:
            silent_s = now - seen.sign_s
            refused = heard.refused and (
                heard.seen or not seen.moved or silent_s >= 2 * self._beats.beat_s
            )
            # Whose line to us fell silent sees ours fall silent, and beats in the bucket from then
            # on; who never had one may not, nor who trains without us: it found us dead.
            promise_s = seen.member.beat_s
            hears_us = heard.seen and seen.member.epoch <= self._epoch
            told = hears_us or promise_s <= self._beats.beat_s
            patience_s = self._beats.dead_s + (0.0 if told else promise_s)
            seen.dead = refused or silent_s >= patience_s
            if seen.dead:
                self.fresh_s = now
        return replace(seen.member, state="dead") if seen.dead else seen.member

    def _read(self, name: str, now: float, seen: Seen | None) -> Seen | None:
        key = f"{MEMBERS}{name}.json"
        try:
            member = decode(Member, self._store.get(key))
            if member.member != name:
                raise ValueError(
                    f"wanted what {name} says of itself, found what {member.member} says"
                )
        except NotFound:
            return None
        except ValueError as e:  # what it said before it still counts, but is no sign of life
            self.pass_over(key, e)
            if seen is not None:
                seen.read_s = now
            return seen
        # it may be years old, or be written at this moment: its line will tell, or its next beat
        if seen is None:
            seen = self.seen[name] = Seen(member, now)
            self.fresh_s = now
        seen.read_s = now
        self._update(seen, member, now)
        return seen

    def _update(self, seen: Seen, member: Member, now: float) -> None:
        if member.beat > seen.member.beat:
            if (member.state, member.epoch) != (seen.member.state, seen.member.epoch):
                self.fresh_s = now
            seen.member, seen.sign_s, seen.moved, seen.dead = member, now, True, False
