"""The state machine of a node: its life, and the requests to its workers.

Pure: `step(node, event, now)` returns the new node and the acts to carry out, in this order.
`agent.py` passes events to it and does the acts. `workers.py` judges the end of a generation (the
code's `epoch`).

    life        event            next        state in the bucket
    WARMING     Ready            READY       warming, then ready
    READY       Entered          IN          in
    IN          Left             SETTLING    in, until this node's uploads are done
    SETTLING    Ready            READY       ready

    event               requests of the workers             and this node
    SnapshotAsked       SNAPSHOT
    Signalled           RESIZE, until the grace period ends leaves; a second one hurries
    Noticed: soft       SNAPSHOT
             kill       RESIZE, until its deadline          leaves
             maintenance   as kill, `drain_lead_s` before   leaves then
    Cancelled           what else is wanted, if anything    stays, unless it must leave anyway
    GpuJudged: SNAPSHOT    SNAPSHOT
               DRAIN    RESIZE, for `unfit_grace_s`         leaves, unfit
               KILL     nothing: none of it may be saved    leaves at once, unfit
    Released, Unled     RESIZE                              leaves
    NewcomersWait       GROW                                stays
    StopOrdered         STOP                                (decided at its workers' end)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from harness.agent.gpu_health import Action, HealthVerdict
from harness.core.facts import Fact, HealthSeen, NodeFound, NoticeCancelled, NoticeSeen
from harness.core.world import DRAINED, UNFIT
from harness.node.marks import Want
from harness.notices.notice import Cancelled, Notice, Noticed

LAST_WORDS_S = 3.0  # before a deadline: the safe work is recorded while that is still possible
# a newcomer that has not imported what its workers need by then hangs, and is unfit; even a slow
# network disk takes less
WARM_S = 300.0
SAME_SIGNAL_S = 2.0  # batch systems send one end to each process, so an agent may hear it twice
HURRY_S = 5.0  # grace after a second signal


class NodePhase(Enum):
    WARMING = "warming"  # its warm process imports what workers need
    READY = "ready"  # it wants a place in a generation
    IN = "in"  # its workers run
    SETTLING = "settling"  # its workers have ended; their snapshots are being uploaded


@dataclass(frozen=True)
class Now:
    own_s: float  # monotonic clock of this node
    wall_s: float  # wall clock, in which deadlines are given


@dataclass(frozen=True)
class Rules:
    """The constants of a node. `member`: its name."""

    member: str
    grace_s: float = 30.0
    drain_lead_s: float = 120.0
    doubt_ahead_s: float = 900.0
    unfit_grace_s: float = 60.0


# ---- events --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SnapshotAsked:
    by: str  # name of a signal, or key of a request


@dataclass(frozen=True)
class Signalled:
    name: str  # "SIGTERM"


@dataclass(frozen=True)
class Slept:
    """This node was suspended, so what it waited for was as well."""

    seconds: float


@dataclass(frozen=True)
class GpuJudged:
    verdict: HealthVerdict


@dataclass(frozen=True)
class Released:
    """The controller asks this node to leave."""


@dataclass(frozen=True)
class Unled:
    why: str  # the run has no controller, or no bucket, in words
    bucketless: bool = False


@dataclass(frozen=True)
class StopOrdered:
    """The run must stop."""


@dataclass(frozen=True)
class NewcomersWait:
    """Newcomers wait, and this node is the one that makes room for them."""


@dataclass(frozen=True)
class PeersChange:
    """Another node of our generation leaves it, or makes room, and our script has no session."""


@dataclass(frozen=True)
class PlaceFound:
    """The location and price of this machine are known, possibly in part."""

    found: NodeFound  # its member is not set yet


@dataclass(frozen=True)
class WorkersHung:
    guilty: bool  # at least one hung on its own; otherwise all waited for others


@dataclass(frozen=True)
class FoundUnfit:
    why: str  # reported by a worker, or seen at its end


@dataclass(frozen=True)
class Ready:
    """This node is warm, or has settled its uploads."""


@dataclass(frozen=True)
class Entered:
    """A generation that names us begins."""


@dataclass(frozen=True)
class Left:
    """Our workers of the generation have ended."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


AgentEvent: TypeAlias = (
    SnapshotAsked
    | Signalled
    | Slept
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
class WriteLog:
    text: str  # for this node's log


@dataclass(frozen=True)
class WriteMark:
    """Write the strongest request to the workers. NOTHING: remove the mark."""

    want: Want
    why: str
    deadline_s: float | None


@dataclass(frozen=True)
class DrainUploads:
    deadline_s: float | None  # wall clock, end of this node; None: it stays after all


@dataclass(frozen=True)
class NotifyWorkers:
    """Send a signal to workers of a script without a session, if one is configured."""


@dataclass(frozen=True)
class PollNow:
    """Make the next look at the bucket at once, so that the controller learns of a notice: our
    workers may have ended within a tick."""


@dataclass(frozen=True)
class FlushBeforeKill:
    """Record which work is safe: a deadline is reached and the workers are still in."""

    who: str
    deadline_s: float


AgentAct: TypeAlias = (
    Record | WriteLog | WriteMark | DrainUploads | NotifyWorkers | PollNow | FlushBeforeKill
)
Wanted: TypeAlias = tuple[Want, float | None]  # with its deadline (wall clock); None: no deadline


# ---- state ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AgentState:
    rules: Rules
    warm_by_s: float  # own clock: a node that is not warm then is unfit
    life: NodePhase = NodePhase.WARMING
    leaving: str = ""  # why this node must leave; "": it stays
    wanted: Mapping[str, Wanted] = field(default_factory=dict)  # by requester; of current workers
    notices: Mapping[str, Notice] = field(default_factory=dict)  # in force, by id
    unfit: str = ""  # why no run should come back to this node; "": it is fit
    # own clock: its workers are ended then, if they have not left; None: no limit
    unfit_by_s: float | None = None
    # own clock: a signal's grace ends then, and with it this node; None: there was no signal
    grace_by_s: float | None = None
    hangs: int = 0  # of our own workers, not of those that waited for others
    spent: frozenset[str] = frozenset()  # requesters whose last words are written

    def reigning(self) -> tuple[str, Wanted]:
        """Return (requester, request) for the mark: the strongest request; the first of equals."""
        who = max(self.wanted, key=lambda w: self.wanted[w][0], default="")
        return who, self.wanted.get(who, (Want.NOTHING, None))

    def deadline_s(self) -> float | None:
        """Return the earliest known deadline (wall clock); None if there is none."""
        known = [deadline for _, deadline in self.wanted.values() if deadline is not None]
        return min(known, default=None)

    def settle_s(self, wall_s: float, usual_s: float) -> float:
        """Return the seconds that we can wait for uploads: until the node's end if that is known,
        else `usual_s`."""
        deadline_s = self.deadline_s()
        return usual_s if deadline_s is None else max(0.0, deadline_s - wall_s)

    def doubtful(self, wall_s: float) -> bool:
        """Return whether a replacement for this node should be launched already. At a kill notice
        it should, since clouds take minutes to launch."""
        by_s = wall_s + self.rules.doubt_ahead_s
        return any(
            not n.pause
            if n.kind == "soft"
            else n.kind == "kill" or (n.kind == "maintenance" and (n.deadline_s or 0.0) <= by_s)
            for n in self.notices.values()
        )

    def overdue(self, own_s: float) -> bool:
        """Return whether its workers must be ended now, whatever they do."""
        return self.unfit_by_s is not None and own_s >= self.unfit_by_s

    def grace_over(self, own_s: float) -> bool:
        """Return whether the grace of a signal is used up, except for the last words."""
        return self.grace_by_s is not None and own_s >= self.grace_by_s - LAST_WORDS_S

    def left_s(self, own_s: float, most_s: float) -> float:
        """Return the seconds that are left of a signal's grace, `most_s` at most."""
        left_s = most_s if self.grace_by_s is None else self.grace_by_s - own_s
        return max(0.0, min(most_s, left_s))

    def may_join(self, warm: bool) -> bool:
        """Return whether warming up is over. A node that leaves reports so at once, warm or not."""
        return self.life is not NodePhase.WARMING or bool(self.leaving) or warm

    def too_cold(self, own_s: float, warm: bool) -> bool:
        """Return whether warming up has taken so long that it hangs."""
        return not self.may_join(warm) and own_s >= self.warm_by_s

    @property
    def gone_code(self) -> int:
        """The exit code of an agent that leaves on request."""
        return UNFIT if self.unfit else DRAINED


AgentTurn: TypeAlias = tuple[AgentState, tuple[AgentAct, ...]]


# ---- transitions ---------------------------------------------------------------------------------
def step(node: AgentState, event: AgentEvent, now: Now) -> AgentTurn:
    """Return the node after `event`, and the acts to carry out."""
    match event:
        case SnapshotAsked(by):
            return _want(node, by, Want.SNAPSHOT)
        case StopOrdered():
            return _notified(_want(node, "stop", Want.STOP))
        case NewcomersWait():
            return _notified(_want(node, "grow", Want.GROW))
        case PeersChange():
            return _notified(_want(node, "peers", Want.RESIZE))
        case Released():
            return _must_leave(node, "released", "leave", None)
        case Signalled() | Noticed() | Cancelled() | GpuJudged() | Unled():
            return _heed(node, event, now)
        case Slept(seconds):
            return replace(node, warm_by_s=node.warm_by_s + seconds), ()
        case PlaceFound(found):
            return node, (Record(replace(found, member=node.rules.member)),)
        case WorkersHung(guilty):
            return replace(node, hangs=node.hangs + guilty), ()
        case FoundUnfit(why):
            return replace(node, unfit=node.unfit or why), ()
        case Ready():
            return replace(node, life=NodePhase.READY), ()
        case Entered():
            return replace(node, life=NodePhase.IN, wanted={}), ()
        case Left():
            return replace(node, life=NodePhase.SETTLING), ()
        case Tick():
            return _tick(node, now)


def _heed(
    node: AgentState, event: Signalled | Noticed | Cancelled | GpuJudged | Unled, now: Now
) -> AgentTurn:
    """Handle the events that are recorded as facts."""
    member = node.rules.member
    match event:
        case Signalled(name):
            grace_s = node.rules.grace_s
            if node.grace_by_s is not None:  # a second one hurries
                if now.own_s - (node.grace_by_s - grace_s) < SAME_SIGNAL_S:
                    return node, ()
                grace_s = min(HURRY_S, node.grace_by_s - now.own_s)
            node = replace(node, grace_by_s=now.own_s + grace_s)
            by_s = now.wall_s + grace_s
            seen = NoticeSeen(member, "signal", "kill", name, by_s)
            return _after([Record(seen)], _must_leave(node, name, f"signal:{name}", by_s))
        case Unled(why, bucketless):
            deadline_s = None
            if bucketless:  # its last snapshot may never be committed, which is no reason to stay
                node = replace(node, grace_by_s=now.own_s + node.rules.grace_s)
                deadline_s = now.wall_s + node.rules.grace_s
            seen = NoticeSeen(member, "lease", "kill", why, deadline_s)
            said = WriteLog(f"{why}; this node drains")
            return _after([Record(seen), said], _must_leave(node, why, "leaderless", deadline_s))
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
    return _after([PollNow(), Record(seen)], then)


def _cancel(node: AgentState, notice: Notice) -> AgentTurn:
    """Withdraw a cancelled notice. If the workers have not agreed on it yet, they never will;
    otherwise we join the next generation again."""
    who = f"notice:{notice.id}"
    before = _mark(node)
    node = replace(
        node,
        notices={name: n for name, n in node.notices.items() if name != notice.id},
        wanted={w: wanted for w, wanted in node.wanted.items() if w != who},
    )
    stays = not node.unfit and not any(
        want is Want.RESIZE for want, _ in node.wanted.values()
    )
    node = replace(node, leaving="" if stays else node.leaving)
    acts: list[AgentAct] = [
        Record(NoticeCancelled(node.rules.member, notice.id)),
        DrainUploads(node.deadline_s()),
    ]
    # writing the same mark again would repeat the request
    if (mark := _mark(node)) != replace(before, why=mark.why):
        acts.append(mark)
    return node, tuple(acts)


def _judged(node: AgentState, verdict: HealthVerdict, now: Now) -> AgentTurn:
    """Handle a GPU's health. Its node is left if the GPU is sick; at once, without a snapshot, if
    its memory cannot be trusted."""
    found, action = verdict.finding, verdict.action
    name = action.name.lower()
    why = f"GPU {found.gpu}: {found.what} ({found.message})"
    acts: list[AgentAct] = [
        Record(HealthSeen(node.rules.member, found.gpu, found.what, found.message, name))
    ]
    if action is not Action.IGNORE:
        acts.append(WriteLog(f"{why}: {verdict.reason}"))
    if action is Action.SNAPSHOT:
        return _after(acts, _want(node, f"health:{found.what}", Want.SNAPSHOT))
    if action is Action.DRAIN:
        return _after(acts, _declare_unfit(node, why, node.rules.unfit_grace_s, now))
    if action is Action.KILL:
        return _after(acts, _declare_unfit(node, why, 0.0, now))
    return node, tuple(acts)


def _declare_unfit(node: AgentState, why: str, grace_s: float, now: Now) -> AgentTurn:
    """Declare the node unfit, so that the controller does not return here, and leave. Workers have
    `grace_s` to reach a step boundary."""
    by_s = now.own_s + grace_s
    node = replace(
        node,
        unfit=node.unfit or why,
        unfit_by_s=by_s if node.unfit_by_s is None else min(by_s, node.unfit_by_s),
    )
    reason = f"unfit: {node.unfit}"
    if grace_s > 0:
        return _must_leave(node, reason, "health:unfit", now.wall_s + grace_s)
    return replace(node, leaving=reason), ()  # no mark, so that no snapshot is made


def _tick(node: AgentState, now: Now) -> AgentTurn:
    """Handle deadlines that are near or reached."""
    node, acts = _heed_known_ends(node, now)
    if node.life is not NodePhase.IN:
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
    words = [FlushBeforeKill(who, deadline_s) for who, deadline_s in late.items()]
    return replace(node, spent=node.spent | late.keys()), (*acts, *words)


def _heed_known_ends(node: AgentState, now: Now) -> AgentTurn:
    """Leave for maintenance whose time is near; until then the node works on."""
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


def last_words(at_step: int, committed: int, saving: bool, late: str = "") -> str:
    """Return in words which work is safe. `committed` -1: it is unknown. `late`: what is feared for
    a snapshot near a deadline."""
    verdict = "the workers have not reached a step boundary"
    if saving:
        verdict = f"a snapshot is on its way {late}(workers at step {at_step})"
    safe = f"step {committed} is committed" if committed >= 0 else "the bucket is silent"
    return f"{verdict}; {safe}"


def too_late(at_step: int, committed: int, late_s: float) -> str:
    """Return in words what is lost if the step under way ends `late_s` after the deadline; "": it
    ends before. `at_step`: steps done; `committed` -1: it is unknown."""
    if late_s <= 0:
        return ""
    lost = "the bucket is silent"
    if committed >= 0:
        since = max(0, at_step - committed)
        more = f" and {since} more step{'s' * (since != 1)}" if since else ""
        lost = f"what is committed is step {committed}, so it{more} will be lost"
    return (
        f"step {at_step + 1} will end {late_s:.0f} s after the deadline; unless the workers "
        f"drop it between two micro-batches, {lost}"
    )


def _must_leave(node: AgentState, reason: str, who: str, deadline_s: float | None) -> AgentTurn:
    acts: list[AgentAct] = []
    if deadline_s is not None:
        others = [d for w, (_, d) in node.wanted.items() if d is not None and w != who]
        acts.append(DrainUploads(min([deadline_s, *others])))
    node, more = _want(replace(node, leaving=node.leaving or reason), who, Want.RESIZE, deadline_s)
    return node, (*acts, *more, NotifyWorkers())


def _want(node: AgentState, who: str, want: Want, deadline_s: float | None = None) -> AgentTurn:
    """Add the request of `who`. A repeated request for a snapshot asks for another one."""
    if node.wanted.get(who) == (want, deadline_s) and want is not Want.SNAPSHOT:
        return node, ()
    node = replace(node, wanted={**node.wanted, who: (want, deadline_s)})
    return node, (_mark(node),)


def _notified(turn: AgentTurn) -> AgentTurn:
    """Add a notification of workers without a session if there are acts."""
    node, acts = turn
    return node, (*acts, NotifyWorkers()) if acts else ()


def _mark(node: AgentState) -> WriteMark:
    """Return the strongest request, with the earliest deadline of all requests."""
    who, (want, _) = node.reigning()
    return WriteMark(want, who, node.deadline_s())


def _after(acts: list[AgentAct], then: AgentTurn) -> AgentTurn:
    return then[0], (*acts, *then[1])
