"""What a run looks like at this moment, from the facts as they come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.layout import RELEASED
from harness.bucket.lease import TTL_S, sign_of_life
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.values import amount
from harness.views.ledger_parts import offer_of
from harness.views.rows import BAD_ENDS
from harness.views.side_jobs import told_by_watchers
from harness.views.telling import describe
from storage.objects import ObjectStore

EVENTS_KEPT = 200
GONE_SHOWN_S = 20.0  # how long a node that is gone stays on the screen
RATE_STEPS = 20  # the speed shown is that of so many steps
STEPS_KEPT = 64


@dataclass
class NodeView:
    """One attempt, or a member that no controller launched, as far as is known."""

    name: str
    offer: str = ""
    usd_per_h: float = 0.0
    on_demand_usd_per_h: float = 0.0
    asked_s: float | None = None
    up_s: float | None = None
    ended: f.AttemptEnded | None = None
    ended_at: float = -math.inf  # when that was told; the last word counts
    members: dict[str, tuple[float, f.AgentStarted]] = field(default_factory=dict)
    agent_ended: dict[str, tuple[float, f.AgentEnded]] = field(default_factory=dict)
    # what its agents found out of it, and SkyPilot's bills, by member
    found: dict[str, f.NodeFound] = field(default_factory=dict)
    bills: dict[str, tuple[float, f.NodeBilled]] = field(default_factory=dict)
    notices: dict[tuple[str, str], f.NoticeSeen] = field(default_factory=dict)  # (member, id)
    cancelled: set[tuple[str, str]] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.ended is None and not (
            self.asked_s is None and self.members and set(self.members) <= set(self.agent_ended)
        )

    @property
    def member(self) -> str:
        """The newest agent on it."""
        return max(self.members, key=lambda m: (self.members[m][0], m), default="")

    def deadline(self) -> tuple[bool, float | None]:
        """Is there a notice that counts, and until when."""
        open_ = [
            n for key, n in self.notices.items() if key not in self.cancelled and n.notice != "soft"
        ]
        return bool(open_), min(
            (n.deadline_s for n in open_ if n.deadline_s is not None), default=None
        )

    def billed_s(self, now: float) -> float:
        if self.ended is not None:
            return self.ended.billed_s
        gone_s = now
        if not self.name.isdigit():  # no controller bills it
            gone_s = min([now, *(t for t, _ in self.agent_ended.values())])
            for told_s, bill in self.bills.values():
                gone_s = told_s if bill.gone_s is None else bill.gone_s
        return 0.0 if self.up_s is None else max(0.0, gone_s - self.up_s)

    def learn(self) -> None:
        """Of a node that no controller launched: what its agent, or SkyPilot, says of it."""
        bill = next((bill for _, bill in self.bills.values()), None)
        found = next(iter(self.found.values()), None)
        if self.name.isdigit() or not (found or bill):
            return
        offer = offer_of(found or f.NodeFound(self.name), bill.usd_per_h if bill else None)
        self.offer = str(offer["name"])
        self.usd_per_h = amount(offer["usd_per_h"])
        self.on_demand_usd_per_h = amount(offer["on_demand_usd_per_h"])
        launched_s = bill.launched_s if bill else found.launched_s if found else None
        began_s = [t for t, _ in self.members.values()]
        self.up_s = min([*began_s, *([] if launched_s is None else [launched_s])], default=None)


@dataclass
class LiveState:
    """Everything the view shows, folded from facts by `apply` in any order."""

    nodes: dict[str, NodeView] = field(default_factory=dict)
    attempt_of: dict[str, str] = field(default_factory=dict)  # member -> node
    epochs: dict[int, f.EpochStarted] = field(default_factory=dict)
    left: dict[int, dict[str, str]] = field(default_factory=dict)  # epoch -> member -> why
    sessions: dict[int, f.SessionStarted] = field(default_factory=dict)
    # (epoch, step): the newest few
    steps: dict[tuple[int, int], f.StepDone] = field(default_factory=dict)
    validated: tuple[tuple[int, int], dict[str, float]] | None = None
    snapshot: tuple[tuple[int, int], f.SnapshotCommitted] | None = None
    asked: tuple[float, f.RunAsked] | None = None
    lease: tuple[float, f.LeaseTaken] | None = None
    ended: tuple[float, f.RunEnded] | None = None
    span_s: tuple[float, float] = (math.inf, -math.inf)  # of what was told
    session_ends: dict[int, str] = field(default_factory=dict)  # epoch -> why
    decided: tuple[float, f.Decided] | None = None
    timed: tuple[tuple[int, int], f.StepsTimed] | None = None  # the newest steps
    # what is worth a line, by time; put into words when shown
    events: list[Stamped] = field(default_factory=list)
    unread: list[f.Unreadable] = field(default_factory=list)

    # -- folding --
    def apply(self, stamped: Stamped) -> None:
        t, fact = stamped.t, stamped.fact
        if isinstance(fact, f.Unreadable):
            self.unread.append(fact)
            return
        # bills and side jobs are told long after the end
        if not isinstance(fact, f.NodeBilled) and not told_by_watchers(stamped):
            self.span_s = min(self.started_s, t), max(self.last_s, t)
        match fact:
            case f.RunAsked():
                self.asked = _later(self.asked, (t, fact))
            case f.LeaseTaken():
                self.lease = _later(self.lease, (t, fact))
            case f.RunEnded():
                self.ended = _later(self.ended, (t, fact))
            case f.Decided():
                self.decided = _later(self.decided, (t, fact))
            case f.StepsTimed():
                key = (fact.epoch, fact.last)
                if self.timed is None or key >= self.timed[0]:
                    self.timed = key, fact
            case f.EpochStarted():
                self.epochs[fact.epoch] = fact
            case f.EpochLeft(epoch, member, why):
                self.left.setdefault(epoch, {})[member] = why
            case f.SessionStarted():
                self.sessions[fact.epoch] = fact
            case f.SessionEnded(epoch, _, why):
                self.session_ends[epoch] = why
            case f.StepDone():
                self.steps[fact.epoch, fact.step] = fact
                if len(self.steps) > 2 * STEPS_KEPT:
                    self.steps = {key: self.steps[key] for key in sorted(self.steps)[-STEPS_KEPT:]}
            case f.Validated():
                key = (fact.epoch, fact.step)
                if self.validated is None or key >= self.validated[0]:
                    self.validated = key, fact.metrics
            case f.SnapshotCommitted():
                key = (fact.epoch, fact.step)
                if self.snapshot is None or key >= self.snapshot[0]:
                    self.snapshot = key, fact
            case _:
                self._of_node(t, fact)
        if describe(fact, self):
            late = bool(self.events) and t < self.events[-1].t
            self.events.append(stamped)
            if late:
                self.events.sort(key=lambda e: e.t)
            del self.events[:-EVENTS_KEPT]

    def _of_node(self, t: float, fact: f.Fact) -> None:
        match fact:
            case f.AttemptIntended(attempt, offer):
                node = self.node(str(attempt))
                node.asked_s, node.offer = t, str(offer.get("name", ""))
                node.usd_per_h = amount(offer.get("usd_per_h"))
                node.on_demand_usd_per_h = amount(offer.get("on_demand_usd_per_h"))
            case f.AttemptUp(attempt, up_s):
                self.node(str(attempt)).up_s = up_s
            case f.AttemptEnded():
                node = self.node(str(fact.attempt))
                if t >= node.ended_at:
                    node.ended, node.ended_at = fact, t
            case f.AgentStarted(member, attempt):
                name = str(attempt) if attempt else member
                self._adopt(member, name)
                self.node(name).members[member] = (t, fact)
                self.node(name).learn()
            case f.NodeFound(member):
                node = self.of_member(member)
                node.found[member] = fact
                node.learn()
            case f.NodeBilled(member):
                node = self.of_member(member)
                node.bills[member] = (t, fact)
                node.learn()
            case f.AgentEnded(member):
                self.of_member(member).agent_ended[member] = (t, fact)
            case f.NoticeSeen(member):
                self.of_member(member).notices[member, fact.id] = fact
            case f.NoticeCancelled(member, id):
                self.of_member(member).cancelled.add((member, id))

    def node(self, name: str) -> NodeView:
        return self.nodes.setdefault(name, NodeView(name))

    def of_member(self, member: str) -> NodeView:
        """Its node; until its agent's first fact is seen, one that is named by the member."""
        return self.node(self.attempt_of.get(member, member))

    def _adopt(self, member: str, name: str) -> None:
        """Now we know where it runs: move what came before."""
        self.attempt_of[member] = name
        early = self.nodes.pop(member, None) if member != name else None
        if early:
            node = self.node(name)
            node.notices |= early.notices
            node.cancelled |= early.cancelled
            node.agent_ended |= early.agent_ended
            node.found |= early.found
            node.bills |= early.bills

    # -- reading --
    @property
    def started_s(self) -> float:
        return self.span_s[0]

    @property
    def last_s(self) -> float:
        return self.span_s[1]

    @property
    def epoch(self) -> int:
        """The newest world."""
        found = (self.epochs, self.sessions, (e for e, _ in self.steps))
        return max(max(numbers, default=0) for numbers in found)

    @property
    def session(self) -> f.SessionStarted | None:
        return self.sessions[max(self.sessions)] if self.sessions else None

    @property
    def last_step(self) -> f.StepDone | None:
        """The newest step of the newest world that made one: after a rewind it is lower than
        one that was seen before."""
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def step(self) -> int:
        """Where training stands."""
        last, session, snapshot = self.last_step, self.session, self.snapshot
        found = [((last.epoch, 1), last.step)] if last else []
        found += [((session.epoch, 0), session.resumed_step)] if session else []
        # of a script without live metrics
        found += [((snapshot[0][0], 1), snapshot[1].step)] if snapshot and not last else []
        return max(found, default=((0, 0), 0))[1]

    @property
    def committed(self) -> tuple[int, float | None]:
        """The newest snapshot's step and when it was taken; the latter is unknown if its writer
        died before it could tell."""
        told = (self.snapshot[0], self.snapshot[1].t_start) if self.snapshot else ((0, 0), None)
        session = self.session
        if session and (session.resumed_epoch, session.resumed_step) > told[0]:
            return session.resumed_step, None
        return told[0][1], told[1]

    @property
    def refused(self) -> int:
        """How often there was no capacity since a node last came up."""
        up = max((n.up_s for n in self.nodes.values() if n.up_s is not None), default=-math.inf)
        return sum(
            n.ended is not None and n.ended.end == "no-capacity" and n.ended.gone_s > up
            for n in self.nodes.values()
        )

    @property
    def total(self) -> int:
        return max((s.total_steps for s in self.sessions.values()), default=0)

    @property
    def world(self) -> int:
        """Ranks that train now."""
        return len(self.training()) and (
            self.epochs[self.epoch].world if self.epoch in self.epochs else 0
        )

    @property
    def accumulation(self) -> int:
        session = self.sessions.get(self.epoch)
        return max(session.shares, default=0) if session else 0

    def training(self) -> list[str]:
        """Members that are in the newest world and have not left it."""
        started = self.epochs.get(self.epoch)
        if started is None or self.over:
            return []
        left = self.left.get(started.epoch, {})
        return [m for m in started.members if m not in left and self.of_member(m).alive]

    def ranks(self, member: str) -> range | None:
        started = self.epochs.get(self.epoch)
        if started is None or member not in started.members:
            return None
        at = 0
        for m in started.members:
            seen = self.of_member(m).members.get(m)
            n = seen[1].nproc if seen else max(1, started.world // len(started.members))
            if m == member:
                return range(at, at + n)
            at += n
        return None

    @property
    def over(self) -> bool:
        """The run has ended, and nobody has begun to lead it again since. One that nobody leads
        ends with its last session."""
        if self.ended is None:
            return self.lease is None and self.session_ends.get(self.epoch) == "finished"
        return all(x is None or x[0] < self.ended[0] for x in (self.asked, self.lease))

    @property
    def run_state(self) -> str:
        if self.over:
            return self.ended[1].outcome if self.ended else "finished"
        if self.training():
            return "training" if self.epoch in self.sessions else "forming a world"
        alive = [n for n in self.nodes.values() if n.alive]
        if any(n.up_s is not None or n.members for n in alive):
            return "re-forming" if self.epoch else "starting"
        return "waiting for a node" if alive else "waiting for capacity"

    def rates(self) -> dict[str, float]:
        """Speed of the newest world: steps, samples and tokens per second, and MFU if it is
        known."""
        mine = [s for (epoch, _), s in sorted(self.steps.items()) if epoch == self.epoch][
            -RATE_STEPS:
        ]
        if not mine:
            return {}
        # From begin to begin: durations of steps leave out what lies between them.
        span = mine[-1].t_start - mine[0].t_start
        counted = mine[:-1]
        if span <= 0 or not counted:
            span, counted = mine[-1].seconds, mine[-1:]
        if span <= 0:
            return {}
        found = {
            "steps_per_s": len(counted) / span,
            "samples_per_s": sum(s.samples for s in counted) / span,
        }
        if tokens := sum(s.tokens for s in counted):
            found["tokens_per_s"] = tokens / span
        mfu = [s.mfu for s in counted if s.mfu is not None]
        if mfu:
            found["mfu"] = sum(mfu) / len(mfu)
        return found

    def spent(self, now: float) -> tuple[float, float]:
        """Dollars so far, and what the same node-hours cost on demand (0: unknown)."""
        paid = on_demand = 0.0
        for n in self.nodes.values():
            hours = n.billed_s(now) / 3600
            paid += n.ended.usd if n.ended and n.ended.usd else hours * n.usd_per_h
            on_demand += hours * (n.on_demand_usd_per_h or n.usd_per_h)
        return paid, on_demand

    def usd_per_h(self) -> float:
        """Of the nodes that are paid for now."""
        return sum(n.usd_per_h for n in self.nodes.values() if n.alive and (n.up_s or n.members))

    @property
    def tokens_per_step(self) -> int:
        """0: not known."""
        last = self.last_step
        return (last.tokens if last else 0) or (self.timed[1].tokens if self.timed else 0)

    def usd_per_million_tokens(self, now: float) -> float | None:
        """Of the steps that count so far."""
        tokens, paid = self.step * self.tokens_per_step, self.spent(now)[0]
        return paid / tokens * 1e6 if tokens and paid else None

    def step_split(self) -> dict[str, float]:
        """Seconds of one step by phase, of the newest steps of the newest world; empty: not
        known."""
        if self.timed is None or self.timed[1].epoch != self.epoch:
            return {}
        found = {p: self.timed[1].seconds.get(p, 0.0) for p in f.PHASES}
        return {p: s for p, s in found.items() if math.isfinite(s) and s > 0}

    def shown_nodes(self, now: float) -> list[NodeView]:
        def recent(n: NodeView) -> bool:
            return (
                n.ended is not None
                and n.ended.up_s is not None
                and now - n.ended.gone_s < GONE_SHOWN_S
            )

        return sorted(
            (n for n in self.nodes.values() if n.alive or recent(n)),
            key=lambda n: (not n.name.isdigit(), len(n.name), n.name),
        )

    def node_state(self, n: NodeView, now: float) -> tuple[str, str]:
        """Style and words."""
        if n.ended is not None:
            return "red" if n.ended.end in BAD_ENDS else "dim", n.ended.end
        member = n.member
        if member and member in n.agent_ended:
            return "dim", "leaving"
        noticed, deadline = n.deadline()
        if noticed:
            left = "" if deadline is None else f", {max(0.0, deadline - now):.0f} s left"
            return "bold yellow", f"notice{left}"
        if member and member in self.training():
            return "green", "training" if self.epoch in self.sessions else "joining"
        if member:
            if not self.epoch:
                return "cyan", "waiting for the first world"
            # the others train, and have room for it at the next change
            return "cyan", "warm spare" if self.epoch in self.sessions else "ready"
        return ("cyan", "booting") if n.up_s is not None else ("dim", "asked for")


def _later(old: tuple[float, Any] | None, new: tuple[float, Any]) -> tuple[float, Any]:
    return new if old is None or new[0] >= old[0] else old


# ---- is the controller alive? --------------------------------------------------------------------
@dataclass
class LeaseWatch:
    """Tells by the holder's heart beat, on our own clock, whether a controller lives: True,
    False, or None (not known yet)."""

    store: ObjectStore
    _term: int = 0  # the newest that was found
    _seen: tuple[int, bytes] = (0, b"")
    _since_s: float = 0.0
    _moved: bool = False

    def look(self, now: float) -> bool | None:
        sign = sign_of_life(self.store, self._term)
        self._term, beat = sign
        if not self._term or beat == RELEASED:
            return False
        if sign != self._seen:
            self._moved = bool(self._seen[0])  # what we see first may be old
            self._seen, self._since_s = sign, now
        if now - self._since_s < TTL_S * 1.5:
            return True if self._moved else None
        return False
