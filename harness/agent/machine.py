"""What a node does about what it hears: its life, and all that is wanted of its workers.

Pure: `step(node, event, now)` returns the new node and what is to be done (acts), in this order.
`agent.py` feeds it events and does the acts. How an epoch's end is judged stands in `ends.py`.

    life        event            next        what the bucket sees
    WARMING     Ready            READY       warming, then ready
    READY       Entered          IN          in
    IN          Left             SETTLING    in, until this node's uploads are done
    SETTLING    Ready            READY       ready

    event               what it asks of the workers         and this node
    SnapshotAsked       SNAPSHOT
    Signalled           RESIZE, until the grace is over     leaves
    Noticed: soft       SNAPSHOT
             kill       RESIZE, until its deadline          leaves
             maintenance   as kill, `drain_lead_s` before   leaves then
    Cancelled           what else is wanted, if anything    stays, if nothing else bids it go
    GpuJudged: SNAPSHOT    SNAPSHOT
               DRAIN    RESIZE, for `unfit_grace_s`         leaves, unfit
               KILL     nothing: none of it may be saved    leaves at once, unfit
    Released, Unled     RESIZE                              leaves
    NewcomersWait       RESIZE                              stays
    StopOrdered         STOP                                (its workers' end says it all)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from harness.agent.health import Action, HealthVerdict
from harness.agent.notices import Notice
from harness.core.facts import Fact, HealthSeen, NodeFound, NoticeCancelled, NoticeSeen
from harness.core.world import DRAINED, UNFIT
from harness.node.marks import Want

LAST_WORDS_S = 2.0  # before a deadline: what the end will be is written while it still can be
# a newcomer's workers may take so long to import what they need before others make room for it
WARM_S = 60.0


class Life(Enum):
    WARMING = "warming"  # its warm process imports what workers need
    READY = "ready"  # it wants a place in an epoch
    IN = "in"  # its workers run
    SETTLING = "settling"  # they have ended; what they left is being uploaded


@dataclass(frozen=True)
class Now:
    own_s: float  # by this node's own clock, which never jumps
    wall_s: float  # as deadlines are


@dataclass(frozen=True)
class Rules:
    """What a node goes by, all its life. `member`: its name."""

    member: str
    grace_s: float = 30.0
    drain_lead_s: float = 120.0
    doubt_ahead_s: float = 900.0
    unfit_grace_s: float = 60.0


# ---- events --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SnapshotAsked:
    by: str  # a signal's, or the key of a request


@dataclass(frozen=True)
class Signalled:
    name: str  # "SIGTERM"


@dataclass(frozen=True)
class Noticed:
    """It is new, or says something else than before."""

    notice: Notice


@dataclass(frozen=True)
class Cancelled:
    notice: Notice


@dataclass(frozen=True)
class GpuJudged:
    verdict: HealthVerdict


@dataclass(frozen=True)
class Released:
    """The controller asks this node to leave."""


@dataclass(frozen=True)
class Unled:
    why: str  # nobody leads the run any more


@dataclass(frozen=True)
class StopOrdered:
    """The run shall stop."""


@dataclass(frozen=True)
class NewcomersWait:
    """And we are the one that makes room for them."""


@dataclass(frozen=True)
class PeersChange:
    """Another node of our epoch leaves it, or makes room, and our script has no session."""


@dataclass(frozen=True)
class PlaceFound:
    """Where this machine stands and what it costs, as far as is known now."""

    found: NodeFound  # of no member yet


@dataclass(frozen=True)
class WorkersHung:
    guilty: bool  # one of them at least; else all waited for others


@dataclass(frozen=True)
class FoundUnfit:
    why: str  # told by a worker, or seen at its end


@dataclass(frozen=True)
class Ready:
    """Warm, or settled."""


@dataclass(frozen=True)
class Entered:
    """An epoch that names us begins."""


@dataclass(frozen=True)
class Left:
    """Our workers of the epoch have ended."""


@dataclass(frozen=True)
class Tick:
    """Time goes by."""


AgentEvent: TypeAlias = (
    SnapshotAsked
    | Signalled
    | Noticed
    | Cancelled
    | GpuJudged
    | Released
    | Unled
    | StopOrdered
    | NewcomersWait
    | PeersChange
    | PlaceFound
    | WorkersHung
    | FoundUnfit
    | Ready
    | Entered
    | Left
    | Tick
)


# ---- acts ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Record:
    fact: Fact


@dataclass(frozen=True)
class Say:
    text: str  # to who reads this node's log


@dataclass(frozen=True)
class WriteMark:
    """Tell the workers what reigns. NOTHING: there is no mark any more."""

    want: Want
    why: str
    deadline_s: float | None


@dataclass(frozen=True)
class DrainUploads:
    deadline_s: float | None  # this node has until then; None: it stays after all


@dataclass(frozen=True)
class NotifyWorkers:
    """Those of a script without a session get a signal, if one is agreed upon."""


@dataclass(frozen=True)
class LookNow:
    """Who launched us hears of it at once: our workers may be gone within a tick."""


@dataclass(frozen=True)
class SayLastWords:
    """A deadline is here, and the workers have not met it."""

    who: str
    deadline_s: float


AgentAct: TypeAlias = (
    Record | Say | WriteMark | DrainUploads | NotifyWorkers | LookNow | SayLastWords
)
Wanted: TypeAlias = tuple[Want, float | None]  # until when; wall clock


# ---- state ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AgentState:
    rules: Rules
    warm_by_s: float  # own clock: it says that it is ready then, warm or not
    life: Life = Life.WARMING
    leaving: str = ""  # why we go, once we know that we must
    wanted: Mapping[str, Wanted] = field(default_factory=dict)  # by whom; of this epoch's workers
    notices: Mapping[str, Notice] = field(default_factory=dict)  # in force, by id
    unfit: str = ""  # why no run should come back to this node
    # when workers on it are ended, if they have not left by then; own clock
    unfit_by_s: float | None = None
    hangs: int = 0  # of our own workers, not of those that waited for others
    spent: frozenset[str] = frozenset()  # whose last words are written

    def reigning(self) -> tuple[str, Wanted]:
        """Of all that is wanted, what the mark says, and who wants it: the greatest; of equal
        ones, the first."""
        who = max(self.wanted, key=lambda w: self.wanted[w][0], default="")
        return who, self.wanted.get(who, (Want.NOTHING, None))

    def deadline_s(self) -> float | None:
        """The first of all that are known."""
        known = [deadline for _, deadline in self.wanted.values() if deadline is not None]
        return min(known, default=None)

    def settle_s(self, wall_s: float, usual_s: float) -> float:
        """How long we can wait for uploads now: as long as the node lives, when that is known."""
        deadline_s = self.deadline_s()
        return usual_s if deadline_s is None else max(0.0, deadline_s - wall_s)

    def doubtful(self, wall_s: float) -> bool:
        """Is it time to look for another node, though this one is still there? At a kill notice
        it is: clouds take minutes to launch."""
        by_s = wall_s + self.rules.doubt_ahead_s
        return any(
            not n.pause
            if n.kind == "soft"
            else n.kind == "kill" or (n.kind == "maintenance" and (n.deadline_s or 0.0) <= by_s)
            for n in self.notices.values()
        )

    def overdue(self, own_s: float) -> bool:
        """Must its workers be ended now, whatever they do?"""
        return self.unfit_by_s is not None and own_s >= self.unfit_by_s

    def may_join(self, own_s: float, warm: bool) -> bool:
        """It need not be waited for any longer. Who leaves says so, warm or not."""
        return (
            self.life is not Life.WARMING or bool(self.leaving) or own_s >= self.warm_by_s or warm
        )

    @property
    def gone_code(self) -> int:
        """Of an agent that leaves as it was asked to."""
        return UNFIT if self.unfit else DRAINED


AgentTurn: TypeAlias = tuple[AgentState, tuple[AgentAct, ...]]


# ---- transitions ---------------------------------------------------------------------------------
def step(node: AgentState, event: AgentEvent, now: Now) -> AgentTurn:
    """What `event` makes of the node, and what is to be done."""
    match event:
        case SnapshotAsked(by):
            return _want(node, by, Want.SNAPSHOT)
        case StopOrdered():
            return _notified(_want(node, "stop", Want.STOP))
        case NewcomersWait():
            return _notified(_want(node, "grow", Want.RESIZE))
        case PeersChange():
            return _notified(_want(node, "peers", Want.RESIZE))
        case Released():
            return _must_leave(node, "released", "leave", None)
        case Signalled() | Noticed() | Cancelled() | GpuJudged() | Unled():
            return _heed(node, event, now)
        case PlaceFound(found):
            return node, (Record(replace(found, member=node.rules.member)),)
        case WorkersHung(guilty):
            return replace(node, hangs=node.hangs + guilty), ()
        case FoundUnfit(why):
            return replace(node, unfit=node.unfit or why), ()
        case Ready():
            return replace(node, life=Life.READY), ()
        case Entered():
            return replace(node, life=Life.IN, wanted={}), ()
        case Left():
            return replace(node, life=Life.SETTLING), ()
        case Tick():
            return _tick(node, now)


def _heed(
    node: AgentState, event: Signalled | Noticed | Cancelled | GpuJudged | Unled, now: Now
) -> AgentTurn:
    """News that is recorded."""
    member = node.rules.member
    match event:
        case Signalled(name):
            deadline_s = now.wall_s + node.rules.grace_s
            seen = NoticeSeen(member, "signal", "kill", name, deadline_s)
            return _after([Record(seen)], _must_leave(node, name, f"signal:{name}", deadline_s))
        case Unled(why):
            seen = NoticeSeen(member, "lease", "kill", why, None)
            said = Say(f"{why}; this node drains")
            return _after([Record(seen), said], _must_leave(node, why, "leaderless", None))
        case Noticed(notice):
            return _notice(node, notice, now)
        case Cancelled(notice):
            return _cancel(node, notice)
        case GpuJudged(verdict):
            return _judged(node, verdict, now)


def _notice(node: AgentState, notice: Notice, now: Now) -> AgentTurn:
    n = notice
    node = replace(node, notices={**node.notices, n.id: n})
    seen = NoticeSeen(node.rules.member, n.source, n.kind, n.id, n.deadline_s)
    if n.kind == "soft":
        then = _want(node, f"notice:{n.id}", Want.SNAPSHOT)
    elif n.kind == "kill" or n.deadline_s is None:
        then = _must_leave(node, f"{n.source} notice", f"notice:{n.id}", n.deadline_s)
    else:
        then = _heed_known_ends(node, now)
    return _after([LookNow(), Record(seen)], then)


def _cancel(node: AgentState, notice: Notice) -> AgentTurn:
    """If the workers have not agreed on it yet they never will; else we join the next epoch
    again."""
    who = f"notice:{notice.id}"
    before = node.reigning()[1]
    node = replace(
        node,
        notices={name: n for name, n in node.notices.items() if name != notice.id},
        wanted={w: wanted for w, wanted in node.wanted.items() if w != who},
    )
    stays = not node.unfit and not any(
        want is Want.RESIZE and w != "grow" for w, (want, _) in node.wanted.items()
    )
    node = replace(node, leaving="" if stays else node.leaving)
    acts: list[AgentAct] = [
        Record(NoticeCancelled(node.rules.member, notice.id)),
        DrainUploads(node.deadline_s()),
    ]
    # a mark that is written again is a request that is made again
    if node.reigning()[1] != before:
        acts.append(_mark(node))
    return node, tuple(acts)


def _judged(node: AgentState, verdict: HealthVerdict, now: Now) -> AgentTurn:
    """A GPU reported something. Its node is left if it is sick; at once, without a snapshot, when
    its memory cannot be trusted."""
    found, action = verdict.finding, verdict.action
    name = action.name.lower()
    why = f"GPU {found.gpu}: {found.what} ({found.message})"
    acts: list[AgentAct] = [
        Record(HealthSeen(node.rules.member, found.gpu, found.what, found.message, name))
    ]
    if action is not Action.IGNORE:
        acts.append(Say(f"{why}: {verdict.reason}"))
    if action is Action.SNAPSHOT:
        return _after(acts, _want(node, f"health:{found.what}", Want.SNAPSHOT))
    if action is Action.DRAIN:
        return _after(acts, _declare_unfit(node, why, node.rules.unfit_grace_s, now))
    if action is Action.KILL:
        return _after(acts, _declare_unfit(node, why, 0.0, now))
    return node, tuple(acts)


def _declare_unfit(node: AgentState, why: str, grace_s: float, now: Now) -> AgentTurn:
    """Leave, and tell who launched us not to come back here. Workers have `grace_s` to reach a
    step boundary."""
    by_s = now.own_s + grace_s
    node = replace(
        node,
        unfit=node.unfit or why,
        unfit_by_s=by_s if node.unfit_by_s is None else min(by_s, node.unfit_by_s),
    )
    reason = f"unfit: {node.unfit}"
    if grace_s > 0:
        return _must_leave(node, reason, "health:unfit", now.wall_s + grace_s)
    return replace(node, leaving=reason), ()  # no mark: nothing of it may be saved


def _tick(node: AgentState, now: Now) -> AgentTurn:
    """Deadlines come near."""
    node, acts = _heed_known_ends(node, now)
    if node.life is not Life.IN:
        return node, acts
    late = {
        who: deadline_s
        for who, (want, deadline_s) in node.wanted.items()
        if want is not Want.SNAPSHOT
        and deadline_s is not None
        and who not in node.spent
        and now.wall_s >= deadline_s - LAST_WORDS_S
    }
    if not late:
        return node, acts
    words = [SayLastWords(who, deadline_s) for who, deadline_s in late.items()]
    return replace(node, spent=node.spent | late.keys()), (*acts, *words)


def _heed_known_ends(node: AgentState, now: Now) -> AgentTurn:
    """An end that was told long before: work on until it is near."""
    acts: list[AgentAct] = []
    for n in node.notices.values():
        near = (
            n.kind == "maintenance"
            and n.deadline_s is not None
            and now.wall_s >= n.deadline_s - node.rules.drain_lead_s
        )
        if near and node.wanted.get(f"notice:{n.id}") != (Want.RESIZE, n.deadline_s):
            node, more = _must_leave(node, f"{n.source} notice", f"notice:{n.id}", n.deadline_s)
            acts += more
    return node, tuple(acts)


def last_words(at_step: int, committed: int, saving: bool) -> str:
    """Near a deadline: what is safe, and what is not. `committed` -1: nobody can say."""
    verdict = "the workers have not reached a step boundary"
    if saving:
        verdict = f"a snapshot is on its way and may come too late (workers at step {at_step})"
    safe = f"step {committed} is committed" if committed >= 0 else "the bucket is silent"
    return f"{verdict}; {safe}"


def _must_leave(node: AgentState, reason: str, who: str, deadline_s: float | None) -> AgentTurn:
    acts: list[AgentAct] = []
    if deadline_s is not None:
        others = [d for w, (_, d) in node.wanted.items() if d is not None and w != who]
        acts.append(DrainUploads(min([deadline_s, *others])))
    node, more = _want(replace(node, leaving=node.leaving or reason), who, Want.RESIZE, deadline_s)
    return node, (*acts, *more, NotifyWorkers())


def _want(node: AgentState, who: str, want: Want, deadline_s: float | None = None) -> AgentTurn:
    """`who` wants this from now on. A snapshot that is asked for again is another one."""
    if node.wanted.get(who) == (want, deadline_s) and want is not Want.SNAPSHOT:
        return node, ()
    node = replace(node, wanted={**node.wanted, who: (want, deadline_s)})
    return node, (_mark(node),)


def _notified(turn: AgentTurn) -> AgentTurn:
    """What is new is told to workers without a session as well."""
    node, acts = turn
    return node, (*acts, NotifyWorkers()) if acts else ()


def _mark(node: AgentState) -> WriteMark:
    who, (want, deadline_s) = node.reigning()
    return WriteMark(want, who, deadline_s)


def _after(acts: list[AgentAct], then: AgentTurn) -> AgentTurn:
    return then[0], (*acts, *then[1])
