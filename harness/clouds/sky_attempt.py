"""One attempt at SkyPilot: a cluster, from asking for it until it is surely gone."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from harness.core.world import Node, NodeState, Offer


@dataclass
class LaunchRequest:
    """What asks SkyPilot for a cluster."""

    # a call is on its way that asks for it: nothing that is seen meanwhile says that it was not
    # asked for
    asking: bool = False
    request: str = ""  # at the API server, as long as it goes on
    tries: int = 0


@dataclass
class Times:
    """Of a cluster: wall clock, seconds. None: not yet, or unknown."""

    up_s: float | None = None
    # when it was seen first that its launch has ended, which is when its command begins
    at_work_s: float | None = None
    billed_s: float | None = None  # the earliest that SkyPilot says it was launched
    gone_s: float | None = None


@dataclass
class EndRequest:
    """What brings a cluster down."""

    request: str = ""  # at the API server, as long as it goes on
    again_s: float = 0.0  # no sooner: the last one failed


@dataclass
class Polls:
    """When a cloud and a node are asked about a cluster."""

    refresh_s: float = -math.inf  # when the cloud is to be asked again
    poll_s: float = -math.inf  # and the node
    polling_s: float = -math.inf  # when the node was asked
    # the question to the node how its job is
    poll: Future[tuple[str | None, int | None]] | None = None


@dataclass
class Attempt:
    """One cluster, from asking for it until it is surely gone."""

    number: int
    name: str
    offer: Offer
    asked_s: float
    exit_code: int | None = None
    reason: str = ""  # why it is to go, or went
    refused: bool = False  # there was never a machine
    seen: bool = False  # the API server has shown it
    sick_s: float | None = None  # since when it is not whole
    trouble: str = ""  # the last thing that went wrong
    launch: LaunchRequest = field(default_factory=LaunchRequest)
    times: Times = field(default_factory=Times)
    end: EndRequest = field(default_factory=EndRequest)
    polls: Polls = field(default_factory=Polls)

    @property
    def over(self) -> bool:
        return bool(self.reason)

    def node(self) -> Node:
        state = NodeState.PENDING if self.times.up_s is None else NodeState.UP
        if self.times.gone_s is not None:
            state = NodeState.NO_CAPACITY if self.refused else NodeState.GONE
        at_work_s = None if self.times.up_s is None else self.times.at_work_s
        return Node(
            self.number,
            self.offer,
            state,
            self.asked_s,
            self.times.up_s,
            self.times.gone_s,
            self.exit_code,
            self.reason,
            at_work_s,
        )
