"""The state of a run: the one fold of its facts, as they arrive. The ledger shares its bills out;
live view, alerts, trackers and post-mortems ask it.

Facts may come in any order: writers flush at their own pace, so a worker's fact may be read before
the controller's fact that caused it. Pure: no store, no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.core import facts as f
from harness.core.decoding import amount
from harness.core.facts import Stamped
from harness.ledger.bill import BAD_ENDS, NANO, Bill, bill, ns, price

WRITER = "watch-"  # prefix of the names of watchers' chains of facts


def told_by_watchers(stamped: Stamped) -> bool:
    """Return whether a watcher wrote the fact, which may be long after the run's end."""
    return stamped.writer.startswith(WRITER)


EVENTS_KEPT = 200
GONE_SHOWN_S = 20.0  # how long a node that is gone stays on the screen
RATE_STEPS = 20  # number of newest steps from which the speed is computed
STEPS_KEPT = 64


_EVENTS = (
    *(f.AgentEnded, f.AgentStarted, f.AttemptDoubted, f.AttemptUp, f.DrainVerdict, f.EpochLeft),
    f.EpochStarted,
    *(f.GraceSpent, f.GuardTripped, f.HealthSeen, f.NodeBilled, f.NodeFound, f.NoticeAcknowledged),
    *(f.NoticeCancelled, f.NoticeSeen, f.RunAsked, f.RunEnded, f.SessionStarted, f.SetupChanged),
    *(f.SnapshotCommitted, f.SnapshotFailed, f.SnapshotQuarantined, f.Warned, f.WorkerFailed),
    *(f.StepSkipped, f.WorkerHung),
)


def noteworthy(fact: f.Fact) -> bool:
    """Return whether a fact is an event that a view may show. Refusals and waits are none."""
    match fact:
        case f.AttemptEnded():
            return fact.end != "no-capacity"
        case f.Decided():
            return fact.decision != "wait"
    return isinstance(fact, _EVENTS)


@dataclass
class MemberState:
    """One agent, and what was recorded about it. Pairs are (time of the fact, fact)."""

    name: str
    started: tuple[float, f.AgentStarted] | None = None
    ended: tuple[float, f.AgentEnded] | None = None
    found: tuple[float, f.NodeFound] | None = None
    billed: tuple[float, f.NodeBilled] | None = None  # by SkyPilot
    seen_s: float = -math.inf  # its last sign of life, its end included

    @property
    def attempt(self) -> int:
        """The attempt of its node; 0: no controller launched it. The only trace of an agent that
        died before its first flush is its name: "m<attempt>-<random>"."""
        if self.started:
            return self.started[1].attempt
        by_name = re.match(r"m0*(\d{1,9})-", self.name)
        return int(by_name[1]) if by_name else 0


@dataclass
class Attempt:
    """One attempt, or the machine of a member that no controller launched: it is billed from its
    launch, at the price that its agent or SkyPilot found."""

    name: str
    attempt: int
    told: bool = False  # a controller has recorded it
    asked_s: float | None = None
    up_s: float | None = None
    gone_s: float | None = None
    offer: dict[str, object] = field(default_factory=dict)
    ended: f.AttemptEnded | None = None
    # when the newest facts about its begin and its end were recorded; the last ones count
    up_at: float = -math.inf
    ended_at: float = -math.inf
    members: dict[str, MemberState] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return str(self.offer.get("name", ""))

    @property
    def usd_per_h(self) -> float:
        return amount(self.offer.get("usd_per_h"))

    @property
    def on_demand_usd_per_h(self) -> float:
        return amount(self.offer.get("on_demand_usd_per_h"))

    @property
    def alive(self) -> bool:
        gone = self.members and all(m.ended for m in self.members.values())
        return self.ended is None and (self.told or not gone)

    @property
    def member(self) -> str:
        """The newest agent on this node, or "" if there is none."""
        began = {m.name: m.started[0] for m in self.members.values() if m.started}
        return max(began, key=lambda name: (began[name], name), default="")

    @property
    def agent_s(self) -> float | None:
        """The time at which its first agent began."""
        return min((m.started[0] for m in self.members.values() if m.started), default=None)

    @property
    def agent_gone_s(self) -> float | None:
        """The time at which its last agent had ended; None: one may be there."""
        gone = [m.ended[0] for m in self.members.values() if m.ended]
        return max(gone) if len(gone) == len(self.members) > 0 else None

    @property
    def setup_s(self) -> float | None:
        """The time at which the task's `setup` began, if known."""
        found = (m.found[1].setup_s for m in self.members.values() if m.found)
        return min((s for s in found if s is not None), default=None)

    def bill(self, until_s: float) -> Bill:
        return bill(self, until_s, self.ended)

    def describe(self) -> None:
        """Set price, begin and end of a machine of others from the facts about its agent."""
        one = next(iter(self.members.values()), None)
        if self.told or one is None:
            return
        billed, found = one.billed, one.found[1] if one.found else None
        if found or billed:
            price = billed[1].usd_per_h if billed else None
            self.offer = offer_of(found or f.NodeFound(one.name), price)
        launched_s = billed[1].launched_s if billed else found.launched_s if found else None
        if one.started:
            known = [one.started[0], *([] if launched_s is None else [launched_s])]
            self.asked_s = self.up_s = min(known)
        self.gone_s = one.ended[0] if one.ended else None
        if billed:
            self.gone_s = billed[0] if billed[1].gone_s is None else billed[1].gone_s


def offer_of(found: f.NodeFound, usd_per_h: float | None) -> dict[str, object]:
    """Return the findings of a node's agent in the shape of an offer. `usd_per_h` is used if the
    agent knows no price."""
    parts = (found.cloud, found.region, found.zone, found.instance_type or found.accelerators)
    name = "/".join(part for part in parts if part)
    return {
        "name": f"{name}/on-demand" if name and found.spot is False else name,
        "accelerator": found.accelerators.partition(":")[0],
        "place": "/".join(part for part in (found.cloud, found.region) if part),
        "spot": found.spot is not False,
        "usd_per_h": usd_per_h if found.usd_per_h is None else found.usd_per_h,
        "on_demand_usd_per_h": found.on_demand_usd_per_h,
    }


@dataclass
class TrainingWorld:
    """One generation (the code's `epoch`). The same session is recorded again at each loop of its
    script: its first one counts, `session` is the newest."""

    number: int
    started_s: float
    begun: f.EpochStarted | None = None
    members: list[str] = field(default_factory=list)
    world: int = 0
    shares: tuple[int, ...] = ()
    resumed_step: int = 0
    session_s: float | None = None  # workers were ready to train
    session: f.SessionStarted | None = None
    session_ended: f.SessionEnded | None = None
    left: list[tuple[float, f.EpochLeft]] = field(default_factory=list)
    failures: list[f.WorkerFailed] = field(default_factory=list)
    snapshots: list[f.SnapshotCommitted] = field(default_factory=list)
    # from a step on, for how many ns of a step the typical (median) rank waited for the slowest
    waits: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, t: float, fact: f.SessionStarted) -> None:
        self.session = fact
        if self.session_s is None or t < self.session_s:
            self.session_s, self.world, self.shares = t, fact.world, tuple(fact.shares)
            self.resumed_step = fact.resumed_step

    def has(self, members: Iterable[str]) -> None:
        self.members += [m for m in members if m not in self.members]


@dataclass
class RunState:
    """Everything that is known of a run, folded from facts by `add` in any order; greater
    generations and later times win. Of steps it keeps the newest. Pairs are (time, fact)."""

    nodes: dict[str, Attempt] = field(default_factory=dict)
    members: dict[str, MemberState] = field(default_factory=dict)
    attempt_of: dict[str, str] = field(default_factory=dict)  # member -> node
    worlds: dict[int, TrainingWorld] = field(default_factory=dict)
    # (epoch, step): the newest few
    steps: dict[tuple[int, int], f.StepDone] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)  # generation -> its last step
    validated: tuple[tuple[int, int], dict[str, float]] | None = None
    snapshot: tuple[tuple[int, int], f.SnapshotCommitted] | None = None
    snapshots: list[tuple[float, f.SnapshotCommitted]] = field(default_factory=list)
    notices: list[tuple[float, f.NoticeSeen]] = field(default_factory=list)
    cancelled: set[tuple[str, str]] = field(default_factory=set)  # (member, id)
    came_up_s: float = -math.inf  # when a controller last saw a node come up
    asked: tuple[float, f.RunAsked] | None = None
    lease: tuple[float, f.LeaseTaken] | None = None
    ended: tuple[float, f.RunEnded] | None = None
    span_s: tuple[float, float] = (math.inf, -math.inf)  # times of the first and the last fact
    decided: tuple[float, f.Decided] | None = None
    timed: tuple[tuple[int, int], f.StepsTimed] | None = None  # the newest steps
    # facts that are worth a line, by time; described when they are shown
    events: list[Stamped] = field(default_factory=list)
    unread: list[f.Unreadable] = field(default_factory=list)

    @classmethod
    def of(cls, facts: Iterable[Stamped]) -> RunState:
        state = cls()
        for stamped in facts:
            state.add(stamped)
        return state

    # -- folding --
    def add(self, stamped: Stamped) -> None:
        t, fact = stamped.t, stamped.fact
        if isinstance(fact, f.Unreadable):
            self.unread.append(fact)
            return
        # bills and side jobs are recorded long after the end
        if not isinstance(fact, f.NodeBilled) and not told_by_watchers(stamped):
            self.span_s = min(self.started_s, t), max(self.last_s, t)
        match fact:
            case f.StepDone():
                self.steps[fact.epoch, fact.step] = fact
                self.reached[fact.epoch] = max(self.reached.get(fact.epoch, 0), fact.step)
                if len(self.steps) > 2 * STEPS_KEPT:
                    self.steps = {key: self.steps[key] for key in sorted(self.steps)[-STEPS_KEPT:]}
            case f.RunAsked():
                self.asked = _later(self.asked, (t, fact))
            case f.LeaseTaken():
                self.lease = _later(self.lease, (t, fact))
            case f.RunEnded():
                self.ended = _later(self.ended, (t, fact))
            case f.Decided():
                self.decided = _later(self.decided, (t, fact))
            case f.Validated():
                key = (fact.epoch, fact.step)
                if self.validated is None or key >= self.validated[0]:
                    self.validated = key, fact.metrics
            case f.AttemptIntended() | f.AttemptUp() | f.AttemptEnded():
                self._of_attempt(t, fact)
            case _:
                self._of_world(t, fact)
                self._of_member(t, fact)
        if noteworthy(fact):
            late = bool(self.events) and t < self.events[-1].t
            self.events.append(stamped)
            if late:
                self.events.sort(key=lambda e: e.t)
            del self.events[:-EVENTS_KEPT]

    def _of_attempt(self, t: float, fact: f.AttemptIntended | f.AttemptUp | f.AttemptEnded) -> None:
        node = self.node(str(fact.attempt))
        if not node.told:
            # whatever an agent said of its machine, the controller knows better
            node.told, node.asked_s, node.up_s, node.gone_s, node.offer = True, t, None, None, {}
        match fact:
            case f.AttemptIntended(_, offer):
                node.asked_s, node.offer = t, offer
            case f.AttemptUp(_, up_s):
                self.came_up_s = max(self.came_up_s, up_s)
                if t >= node.up_at:
                    node.up_s, node.up_at = up_s, t
            case f.AttemptEnded() if t >= node.ended_at:
                if not node.offer:  # its intent was lost
                    node.asked_s = fact.asked_s
                node.ended, node.gone_s, node.ended_at = fact, fact.gone_s, t
                if t >= node.up_at:
                    node.up_s, node.up_at = fact.up_s, t

    def _of_world(self, t: float, fact: f.Fact) -> None:
        match fact:
            case f.EpochStarted():
                world = self.world_of(fact.epoch, t)
                world.begun, world.world = fact, world.world or fact.world
                world.has(fact.members)
            case f.EpochLeft():
                world = self.world_of(fact.epoch, t)
                world.left.append((t, fact))
                world.has([fact.member])
            case f.WorkerFailed():
                self.world_of(fact.epoch, t).failures.append(fact)
            case f.SessionStarted():
                self.world_of(fact.epoch, t).begin(t, fact)
            case f.SessionEnded():
                self.world_of(fact.epoch, t).session_ended = fact
            case f.StepsTimed():
                key = (fact.epoch, fact.last)
                if self.timed is None or key >= self.timed[0]:
                    self.timed = key, fact
                if len(fact.own_s) == 3:
                    waited = ns(max(0.0, amount(fact.own_s[2]) - amount(fact.own_s[1])))
                    self.world_of(fact.epoch, t).waits.append((fact.first, waited))
            case f.SnapshotCommitted():
                key = (fact.epoch, fact.step)
                if self.snapshot is None or key >= self.snapshot[0]:
                    self.snapshot = key, fact
                self.snapshots.append((t, fact))
                self.world_of(fact.epoch, fact.t_start).snapshots.append(fact)

    def _of_member(self, t: float, fact: f.Fact) -> None:
        name = getattr(fact, "member", None)
        if not isinstance(name, str):
            return
        one = self.members.get(name) or self.members.setdefault(name, MemberState(name))
        match fact:
            case f.AgentStarted(_, attempt):
                one.started = _later(one.started, (t, fact))
                self.attempt_of[name] = str(attempt) if attempt else name
                self.node(self.attempt_of[name]).members[name] = one
            case f.NodeFound():
                one.found = _later(one.found, (t, fact))
            case f.NodeBilled():
                one.billed = _later(one.billed, (t, fact))
            case f.AgentEnded():
                one.ended = _later(one.ended, (t, fact))
            case f.NoticeSeen():
                self.notices.append((t, fact))
            case f.NoticeCancelled(_, id):
                self.cancelled.add((name, id))
            case f.EpochLeft() | f.WorkerFailed():
                pass
            case _:
                return
        if not isinstance(fact, f.NodeBilled):
            one.seen_s = max(one.seen_s, t)
        if name in self.attempt_of:
            self.nodes[self.attempt_of[name]].describe()

    def node(self, name: str) -> Attempt:
        if name not in self.nodes:
            self.nodes[name] = Attempt(name, int(name) if name.isdigit() else 0)
        return self.nodes[name]

    def world_of(self, number: int, t: float) -> TrainingWorld:
        found = self.worlds.setdefault(number, TrainingWorld(number, t))
        found.started_s = min(found.started_s, t)
        return found

    # -- reading --
    @property
    def started_s(self) -> float:
        return self.span_s[0]

    @property
    def last_s(self) -> float:
        return self.span_s[1]

    @property
    def epoch(self) -> int:
        """The newest generation."""
        known = (n for n, world in self.worlds.items() if world.begun or world.session)
        return max(max(known, default=0), max(self.steps, default=(0, 0))[0])

    @property
    def simulated(self) -> bool:
        """True if the run's cloud is the local one, whose notices and prices are made up."""
        return self.asked is not None and bool(self.asked[1].market)

    def lost_before(self, epoch: int) -> int:
        """Return how many steps that were done before this generation it has to do again, as far
        as they were recorded live."""
        earlier = [world for n, world in self.worlds.items() if n < epoch and world.session]
        before = max(earlier, key=lambda world: world.number, default=None)
        world = self.worlds.get(epoch)
        if before is None or world is None or world.session is None:
            return 0
        reached = max(self.reached.get(before.number, 0), before.resumed_step)
        return max(0, reached - world.resumed_step)

    @property
    def session(self) -> f.SessionStarted | None:
        found = (w.session for _, w in sorted(self.worlds.items(), reverse=True))
        return next((session for session in found if session), None)

    @property
    def last_step(self) -> f.StepDone | None:
        """The newest step of the newest world that did one. After a rewind it is lower than
        earlier ones."""
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def step(self) -> int:
        """The step that training has reached."""
        last, session, snapshot = self.last_step, self.session, self.snapshot
        found = [((last.epoch, 1), last.step)] if last else []
        found += [((session.epoch, 0), session.resumed_step)] if session else []
        # a script without live metrics has only snapshots
        found += [((snapshot[0][0], 1), snapshot[1].step)] if snapshot and not last else []
        return max(found, default=((0, 0), 0))[1]

    @property
    def committed(self) -> tuple[int, float | None]:
        """The newest snapshot's step and the time at which it was taken; the latter is `None` if
        its writer died before it could record it."""
        told = (self.snapshot[0], self.snapshot[1].t_start) if self.snapshot else ((0, 0), None)
        session = self.session
        if session and (session.resumed_epoch, session.resumed_step) > told[0]:
            return session.resumed_step, None
        return told[0][1], told[1]

    @property
    def refused(self) -> int:
        """Number of attempts without capacity since a node last came up."""
        ends = (n.ended for n in self.nodes.values() if n.ended)
        return sum(e.end == "no-capacity" and e.gone_s > self.came_up_s for e in ends)

    @property
    def total(self) -> int:
        found = (w.session.total_steps for w in self.worlds.values() if w.session)
        return max(found, default=0)

    @property
    def newest(self) -> TrainingWorld:
        """The newest generation's world; an empty one if no fact tells of it."""
        return self.worlds.get(self.epoch) or TrainingWorld(self.epoch, math.inf)

    @property
    def begun(self) -> bool:
        """True if the newest world is ready to train, or trains."""
        return self.newest.session is not None

    @property
    def world(self) -> int:
        """Number of ranks that train now."""
        begun = self.newest.begun
        return begun.world if begun and self.training() else 0

    @property
    def accumulation(self) -> int:
        session = self.newest.session
        return max(session.shares, default=0) if session else 0

    def training(self) -> list[str]:
        """Return the members that are in the newest world and have not left it."""
        if self.newest.begun is None or self.over:
            return []
        left = {fact.member for _, fact in self.newest.left}
        return [m for m in self.newest.begun.members if m not in left and self._is_alive(m)]

    def _is_alive(self, member: str) -> bool:
        node = self.nodes.get(self.attempt_of.get(member, ""))
        return node is None or node.alive

    def ranks(self, member: str) -> range | None:
        begun = self.newest.begun
        if begun is None or member not in begun.members:
            return None
        at = 0
        for name in begun.members:
            one = self.members.get(name)
            even = max(1, begun.world // len(begun.members))
            n = one.started[1].nproc if one and one.started else even
            if name == member:
                return range(at, at + n)
            at += n
        return None

    @property
    def end(self) -> f.RunEnded | None:
        """The end of the run; None if it has not ended, or a controller has led it since."""
        led = self.ended and self.lease and self.lease[0] >= self.ended[0]
        return None if led or not self.ended else self.ended[1]

    @property
    def over(self) -> bool:
        """True if the run has ended, and no controller has started since. A run without a
        controller ends with its last session."""
        if self.ended is None:
            last = self.newest.session_ended
            return self.lease is None and last is not None and last.why == "finished"
        return all(x is None or x[0] < self.ended[0] for x in (self.asked, self.lease))

    @property
    def run_state(self) -> str:
        if self.over:
            return self.ended[1].outcome if self.ended else "finished"
        if self.training():
            return "training" if self.begun else "forming a world"
        alive = [n for n in self.nodes.values() if n.alive]
        if any(n.up_s is not None or n.members for n in alive):
            return "re-forming" if self.epoch else "starting"
        return "waiting for a node" if alive else "waiting for capacity"

    def rates(self) -> dict[str, float]:
        """Return the speed of the newest world: steps, samples and tokens per second, and MFU if
        it is known."""
        mine = [s for (epoch, _), s in sorted(self.steps.items()) if epoch == self.epoch][
            -RATE_STEPS:
        ]
        if not mine:
            return {}
        # From begin to begin, since durations of steps exclude the time between them.
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
        """Return the dollars spent so far, and the cost of the same node-hours on demand (0:
        unknown)."""
        paid = on_demand = 0
        for n in self.nodes.values():
            billed = n.bill(now)
            paid += billed.nusd
            on_demand += price(
                billed.end_ns - billed.begin_ns, n.on_demand_usd_per_h or n.usd_per_h
            )
        return paid / NANO, on_demand / NANO

    def usd_per_h(self) -> float:
        """Return the total price in dollars per hour of the nodes that are paid for now."""
        return sum(n.usd_per_h for n in self.nodes.values() if n.alive and (n.up_s or n.members))

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step; 0: not known."""
        last = self.last_step
        return (last.tokens if last else 0) or (self.timed[1].tokens if self.timed else 0)

    def usd_per_million_tokens(self, now: float) -> float | None:
        """Return dollars per million tokens of the steps that count; `None`: not known."""
        tokens, paid = self.step * self.tokens_per_step, self.spent(now)[0]
        return paid / tokens * 1e6 if tokens and paid else None

    def step_split(self) -> dict[str, float]:
        """Return the seconds of one step by phase, for the newest steps of the newest world; empty:
        not known."""
        if self.timed is None or self.timed[1].epoch != self.epoch:
            return {}
        found = {p: self.timed[1].seconds.get(p, 0.0) for p in f.PHASES}
        return {p: s for p, s in found.items() if math.isfinite(s) and s > 0}

    def shown_nodes(self, now: float) -> list[Attempt]:
        def recent(n: Attempt) -> bool:
            return (
                n.ended is not None
                and n.ended.up_s is not None
                and now - n.ended.gone_s < GONE_SHOWN_S
            )

        return sorted(
            (n for n in self.nodes.values() if n.alive or recent(n)),
            key=lambda n: (not n.name.isdigit(), len(n.name), n.name),
        )

    def deadline(self, n: Attempt) -> tuple[bool, float | None]:
        """Return whether a notice to the node is in effect (neither soft nor cancelled), and its
        deadline."""
        # an agent that sees a notice again may know more
        newest = {(x.member, x.id): x for _, x in self.notices if x.member in n.members}
        open_ = [x for key, x in newest.items() if key not in self.cancelled and x.notice != "soft"]
        return bool(open_), min(
            (x.deadline_s for x in open_ if x.deadline_s is not None), default=None
        )

    def node_state(self, n: Attempt, now: float) -> tuple[str, str]:
        """Return a style and a description of the node's state."""
        if n.ended is not None:
            return "red" if n.ended.end in BAD_ENDS else "dim", n.ended.end
        member = n.member
        if member and n.members[member].ended:
            return "dim", "leaving"
        noticed, deadline = self.deadline(n)
        if noticed:
            left = "" if deadline is None else f", {max(0.0, deadline - now):.0f} s left"
            return "bold yellow", f"notice{left}"
        if member and member in self.training():
            return "green", "training" if self.begun else "joining"
        if member:
            if not self.epoch:
                return "cyan", "waiting for the first world"
            # the others train, and include it at the next change of the world
            return "cyan", "warm spare" if self.begun else "ready"
        return ("cyan", "booting") if n.up_s is not None else ("dim", "asked for")


def _later(old: tuple[float, Any] | None, new: tuple[float, Any]) -> tuple[float, Any]:
    return new if old is None or new[0] >= old[0] else old
