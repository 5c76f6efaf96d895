"""The rule for who may train together: members that are proven to reach each other (pure).

Two members reach each other while the lines between them (peer_heartbeats.py) are up both ways, so
that each has proved its key to the other over a connection of its own. Every member says in its
record whom it reaches; of its own pairs, each believes only its own lines.

Up to `FULL_MESH` members, everybody must reach everybody: whoever misses most is left out first; of
equals, the last in the order that the generations keep. So of two halves, the one with more members
trains, then the one that the last generation had. In a bigger world, where a member has lines to
its neighbours only, members must be connected through others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from harness.bucket.layout import Member

REACH_S = 3.0  # for lines to come up; members that are not reached by then are left out
LOST_AFTER = 3.0  # times `dead_s`: who trains is given up when it was not reached for so long
LEAVE_S = 60.0  # who is left out for so long, without a break, leaves as unreachable
NAMED = 4  # members that a message names

Pair = tuple[str, str]


@dataclass
class LostWays:
    """The members of our generation that live, and to which the way was lost amid it. Their workers
    and ours may wait for each other until a collective's timeout, a quarter of an hour."""

    since_s: dict[str, float] = field(default_factory=dict)

    def look(self, living: Iterable[str], reached: Collection[str], now: float) -> None:
        """`living`: those that we once reached; `reached`: those that we reach now."""
        lost = [name for name in living if name not in reached]
        self.since_s = {name: self.since_s.get(name, now) for name in lost}

    def longer_than(self, seconds: float, now: float) -> list[str]:
        return [name for name, since_s in self.since_s.items() if now - since_s > seconds]


@dataclass
class Reach:
    """The view of the member `me` of who reaches whom, as of its last `sort_out`."""

    me: str
    apart_s: dict[str, float] = field(default_factory=dict)  # who is left out, since when
    missed: tuple[Member, ...] = ()  # whom we would have to reach

    def sort_out(
        self, members: Sequence[Member], staying: Collection[str], now: float, *, is_big: bool
    ) -> list[Member]:
        """Return those of `members`, given in order, that may train together. `staying`: the names
        of those that do already, which are not left out."""
        keep = connected if is_big else complete
        kept = keep(members, staying, self._linked(members))
        names = {m.member for m in kept}
        out = [m.member for m in members if m.member not in names]
        self.apart_s = {name: self.apart_s.get(name, now) for name in out}
        mine = next((m.reach for m in members if m.member == self.me), None) or ()
        self.missed = tuple(m for m in kept if m.member not in mine)
        return kept

    def is_proven(self, now: float) -> bool:
        """Return whether all are reached, or have had the time to be."""
        return all(now - since_s >= REACH_S for since_s in self.apart_s.values())

    def left_out_s(self, now: float) -> float:
        """Return for how long we have been left out; 0.0: not, or not surely."""
        out_s = now - self.apart_s.get(self.me, now)
        return out_s if out_s >= REACH_S else 0.0

    def why(self, addr: str) -> str:
        """Return in words why we, at `addr`, are left out, and what to do."""
        missed = ", ".join(f"{m.member} at {m.addr}" for m in self.missed[:NAMED])
        more = f" and {len(self.missed) - NAMED} more" if len(self.missed) > NAMED else ""
        return (
            f"{self.me} at {addr} is unreachable: wanted connections both ways with the nodes that "
            f"train, found none with {missed or 'some of them'}{more}; open all TCP ports between "
            "the nodes (security group or firewall), put them into one network (VPC; Azure: one "
            "VNet, azure.vpc_name in ~/.sky/config.yaml), and give pods and containers addresses "
            "of that network, without NAT between them"
        )

    def _linked(self, members: Iterable[Member]) -> set[Pair]:
        """Return the pairs that reach each other, each both ways round. A member without lines
        (`reach` is None) proves nothing, and needs to prove nothing to its like."""
        said = {m.member: m.reach for m in members}
        mine, found = said.get(self.me), set[Pair]()
        for name, reach in said.items():
            if reach is None:
                found |= {(name, other) for other, theirs in said.items() if theirs is None}
            for other in reach or ():
                if mine is None or name == self.me or other != self.me or name in mine:
                    found |= {(name, other), (other, name)}
        return found


def complete(
    members: Sequence[Member], staying: Collection[str], linked: set[Pair]
) -> list[Member]:
    """Return members that all reach each other."""
    names = [m.member for m in members]
    missing = {
        a: {
            b
            for b in names
            if b != a and (a, b) not in linked and not (a in staying and b in staying)
        }
        for a in names
    }
    while worst := [name for name in names if missing[name] and name not in staying]:
        out = max(reversed(worst), key=lambda name: len(missing[name]))
        names.remove(out)
        for name in names:
            missing[name].discard(out)
    return [m for m in members if m.member in names]


def connected(
    members: Sequence[Member], staying: Collection[str], linked: set[Pair]
) -> list[Member]:
    """Return members that are connected, if only through others: the greatest such group, of equals
    the first; and, where there is one, the group of `staying`."""
    near: dict[str, set[str]] = {m.member: set() for m in members}
    for a, b in linked:
        if a in near and b in near:
            near[a].add(b)
    for name in staying:
        if name in near:
            near[name] |= near.keys() & set(staying)
    groups, left = list[set[str]](), dict.fromkeys(near)
    while left:
        group, edge = set[str](), [next(iter(left))]
        while edge:
            if (name := edge.pop()) in left:
                del left[name]
                group.add(name)
                edge += near[name]
        groups.append(group)
    best = max(groups, key=lambda g: (bool(g & set(staying)), len(g)), default=set[str]())
    return [m for m in members if m.member in best]


def told(me: Member, reached: frozenset[str] | None) -> Member:
    """Return our member, saying whom we reach; None: we have no lines."""
    return replace(me, reach=None if reached is None else tuple(sorted(reached)))
