"""Policies that others have published, as a benchmark for our own.

Each learns capacity by requesting nodes, as every policy here does: an offer that was refused is
requested again in the next tick. Work, changeover and deadline come from `View.known`. Where a job
has many nodes, they are one gang: behind schedule on-demand fills up what spot lacks, and spot
nodes that are too few to train are given back. Nodes stay where they are; when none is left, the
cheapest place that has room is next.

    greedy             spot where there is some, else nothing; on-demand when time is short
    uniform_progress   Can't Be Late (Wu et al., NSDI 2024): greedy while on schedule, which is the
                       same progress in every hour; on-demand when behind it
    skypilot_failover  SkyPilot's managed jobs, strategy FAILOVER: the same place, then anywhere;
                       spot only, and it knows no deadline
    skypilot_eager     ... strategy EAGER_NEXT_REGION: any other place first
    on_demand          on demand only: never preempted, never cheap

Pure: no torch, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from harness.core.world import Decision, Launch, Node, Offer, Policy, Terminate, View, Wait

LOOK_S = 3600.0  # longest wait; every wait ends at the next tick anyway
EQUAL_S = 1e-3  # progress that differs by less counts as the same


@dataclass(frozen=True)
class PeerState:
    """A view in the terms of published policies. Hours and seconds are those of the whole gang;
    `late` is the published test: the remaining work and that many changeovers no longer fit into
    the remaining time, in whole ticks."""

    view: View
    tick_s: float

    @property
    def rented(self) -> list[Node]:
        return [node for node in self.view.alive if node.offer.spot]

    @property
    def bought(self) -> list[Node]:
        return [node for node in self.view.alive if not node.offer.spot]

    @property
    def work_s(self) -> float:
        return self.view.known.work / self.view.max_nodes

    @property
    def left_s(self) -> float:
        """Seconds of work left."""
        left = self.view.known.left(self.view.committed_step)
        return (left or 0.0) / self.view.max_nodes

    def late(self, changeovers: int) -> bool:
        known, tick_s = self.view.known, self.tick_s
        need_s = self.left_s + changeovers * known.changeover_s
        time_s = (known.deadline_s or math.inf) - (self.view.now_s - self.view.started_s)
        if tick_s <= 0 or math.isinf(time_s):
            return need_s >= time_s
        return math.ceil(need_s / tick_s - 1e-9) >= math.floor(time_s / tick_s + 1e-9)

    def behind(self, later_s: float = 0.0) -> bool:
        """Return whether less is done, `later_s` from now, than even progress would have
        brought."""
        elapsed_s = self.view.now_s - self.view.started_s + later_s
        share = elapsed_s / (self.view.known.deadline_s or math.inf)
        return self.work_s - self.left_s < self.work_s * share - EQUAL_S

    # ---- offers ----------------------------------------------------------------------------------
    def spot(self) -> list[Offer]:
        """Return offers that may have room, cheapest first; only in the gang's place, if it has
        one."""
        places = {node.offer.place for node in self.view.alive}
        anywhere = self.view.max_nodes == 1 or not places
        return [
            o
            for o in self.view.offers
            if o.spot and o.name not in self.full and (anywhere or o.place in places)
        ]

    @property
    def full(self) -> set[str]:
        """The names of offers that refused in this tick."""
        return {name for name, s in self.view.blocked.items() if s > self.view.now_s}

    def on_demand(self) -> Offer | None:
        """Return the on-demand offer in the gang's present or last place; else the cheapest."""
        places = {node.offer.place for node in self.view.alive} or {self.last_place()}
        found = [o for o in self.view.offers if not o.spot]
        return min(found, key=lambda o: (o.place not in places, o), default=None)

    def last_place(self) -> str:
        """Return where a node was up last; "" if none ever was."""
        seen = {name: c for name, c in self.view.known.capacity.items() if c.node_s > 0}
        if not seen:
            return ""
        last = max(seen, key=lambda name: seen[name].seen_s)
        return next((o.place for o in self.view.offers if o.name == last), "")


# ---- the gang ------------------------------------------------------------------------------------
def _buy(state: PeerState, why: str) -> Decision:
    """Launch on demand, as many nodes as are missing."""
    offer = state.on_demand()
    if offer is None or len(state.view.alive) >= state.view.max_nodes:
        return Wait(LOOK_S, why)
    return Launch(offer, why)


def _rest(state: PeerState, why: str) -> Decision:
    """Wait with the nodes that spot has; give them back if they are too few to train."""
    if state.view.alive and len(state.view.alive) < state.view.min_nodes:
        first, *more = (node.attempt for node in state.view.alive)
        return Terminate(first, "too few to train", also=tuple(more))
    return Wait(LOOK_S, why)


def _swap(state: PeerState) -> Decision:
    """Replace an on-demand node by a spot node, if there is one."""
    bought = state.bought[-1]
    if len(state.view.alive) > state.view.max_nodes:
        return Terminate(bought.attempt, "spot has taken its place")
    if offers := state.spot():
        return Launch(offers[0], "spot is back", instead_of=bought.attempt)
    return Wait(LOOK_S, "no spot to be had")


# ---- published policies --------------------------------------------------------------------------
def on_demand(view: View, *, tick_s: float = 0.0) -> Decision:
    """Launch all nodes on demand."""
    return _buy(PeerState(view, tick_s), "on demand")


def greedy(view: View, *, tick_s: float = 0.0) -> Decision:
    """Use spot where there is some, else nothing; on demand to the end when the time left does not
    allow another interruption."""
    state = PeerState(view, tick_s)
    missing = len(view.alive) < view.max_nodes
    if (state.bought or missing) and state.late(2):
        return _buy(state, "time is short")
    if missing and (offers := state.spot()):
        return Launch(offers[0], "spot is there")
    return _rest(state, "no spot to be had" if missing else "spot is there")


def uniform_progress(view: View, *, tick_s: float = 0.0) -> Decision:
    """Use spot where there is some; without spot, on demand only when behind even progress, and
    then until two changeovers ahead of it; on demand to the end when time is short."""
    state = PeerState(view, tick_s)
    missing = len(view.alive) < view.max_nodes
    if len(view.alive) > view.max_nodes and state.bought:
        return _swap(state)
    if (state.bought or missing) and state.late(2):
        return _buy(state, "time is short")
    if missing and (offers := state.spot()):
        return Launch(offers[0], "spot is there")
    if state.bought:
        if not state.behind(2 * view.known.changeover_s):
            return _swap(state) if not missing else _rest(state, "on schedule")
        return _buy(state, "behind schedule")
    if missing and state.behind():
        return _buy(state, "behind schedule, and no spot to be had")
    return _rest(state, "on schedule" if missing else "spot is there")


def skypilot_failover(view: View, *, tick_s: float = 0.0) -> Decision:
    """Use spot only: the last place, then anywhere."""
    return _skypilot(PeerState(view, tick_s), elsewhere=False)


def skypilot_eager(view: View, *, tick_s: float = 0.0) -> Decision:
    """Use spot only: any place but the last, then that too."""
    return _skypilot(PeerState(view, tick_s), elsewhere=True)


def _skypilot(state: PeerState, elsewhere: bool) -> Decision:
    view, last = state.view, state.last_place()
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_S, "spot is there")
    offers = state.spot()
    if view.alive or not last:
        offers.sort()
    else:
        offers.sort(key=lambda o: ((o.place == last) is elsewhere, o))
    if offers:
        return Launch(offers[0], "spot is there")
    return _rest(state, "no spot to be had")


PEERS: dict[str, Callable[..., Decision]] = {
    "greedy": greedy,
    "uniform_progress": uniform_progress,
    "skypilot_failover": skypilot_failover,
    "skypilot_eager": skypilot_eager,
    "on_demand": on_demand,
}


def peer(name: str, tick_s: float) -> Policy:
    """Return the published policy of that name, on a market with such ticks."""
    return functools.partial(PEERS[name], tick_s=tick_s)
