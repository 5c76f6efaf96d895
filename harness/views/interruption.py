"""What is told of an interruption: who, when, what it cost and what would have been cheaper.

Pure. `postmortem.py` makes these from facts and the ledger; `postmortem_svg.py` and
`postmortem_text.py` show them.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.views.painting import NANO
from harness.views.rows import Billed

# Interruption.kind, in words
KINDS = {
    "notice": "a cloud or a person announced that nodes would be taken",
    "loss": "nodes were gone without a word",
    "health": "a GPU or its driver was found unfit",
    "hang": "a worker gave no sign of life",
    "crash": "a worker failed",
    "quarantine": "a snapshot was bad, so that an older one was used",
    "move": "the controller gave nodes back for others",
    "resize": "nodes joined or left, as the run wanted",
}
TAKINGS = ("notice", "loss", "health")  # of them, those that take nodes
HURTS = (*TAKINGS, "hang", "crash")  # those after which nodes that are gone are replaced

# Moment.what, in words and in the order in which they follow one another when all goes well
MOMENTS = {
    "notice": "notice",
    "cancelled": "notice taken back",
    "trouble": "trouble",
    "decided": "decision",
    "staged": "snapshot staged",
    "committed": "snapshot committed",
    "verdict": "verdict",
    "left": "workers left",
    "gone": "gone",
    "asked": "launch asked",
    "up": "node up",
    "joined": "agent started",
    "formed": "epoch formed",
    "quarantined": "snapshot bad",
    "restored": "restored",
    "first step": "first step",
    "caught up": "caught up",
    "whole": "whole again",
    "warned": "warning",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened at `t` (wall clock, seconds); `node` is an AttemptRow's name, ""
    where it is the run's. `text` is as its writer told it: not yet fit for a page."""

    what: str  # a key of MOMENTS
    t: float
    node: str = ""
    text: str = ""


@dataclass(frozen=True)
class TouchedNode:
    """A node that an interruption is about."""

    name: str  # AttemptRow.name
    member: str
    place: str  # its offer
    gpus: int
    end: str  # facts.AttemptEnded.end; "": it lives
    grace_s: float | None = None  # from notice to deadline; None: no notice, or without an end
    commit_s: float | None = None  # from notice to the commit of a state that new or newer
    in_time: bool | None = None  # None: there was nothing to save


@dataclass(frozen=True)
class Losses(Billed):
    """The part of the ledger that an interruption is to blame for, by the ledger's own buckets.
    What all interruptions of a run lost, and what none did, add up to the ledger exactly."""

    ns: dict[str, int]
    nusd: dict[str, int]
    gpu_ns: int = 0  # the same time, counted once for each GPU of a node
    steps: int = 0  # done, not committed, and done again

    @property
    def gpu_s(self) -> float:
        return self.gpu_ns / NANO


@dataclass(frozen=True)
class SavedWork:
    """What the snapshot made on notice kept from being done again: the steps after the newest
    snapshot that was committed when the notice came."""

    first_step: int
    last_step: int
    seconds: float  # wall clock
    node_s: float
    usd: float

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


@dataclass(frozen=True)
class Alternative:
    """What something else would have cost where this was what happened. Seconds are those of
    nodes (`node_s`) or of the wall clock (`wall_s`); less than nothing: it would have been
    cheaper."""

    name: str
    node_s: float
    usd: float
    wall_s: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Interruption:
    """From the first sign of trouble until training is where it was."""

    number: int  # 1, 2, ... by time
    kind: str  # a key of KINDS
    cause: str  # in words
    nodes: tuple[TouchedNode, ...]
    epochs: tuple[int, ...]  # that it ended; none: training went on
    world: tuple[int, int]  # ranks before, and of the world that trained next (0: none did)
    begun_s: float
    # from the end of the last step to the begin of the next; None: no step before, or after
    stood_s: tuple[float | None, float | None]
    caught_up_s: float | None  # None: not yet, or never
    moments: tuple[Moment, ...]
    losses: Losses
    saved: SavedWork | None = None
    what_if: tuple[Alternative, ...] = ()

    @property
    def gap_s(self) -> float | None:
        """For how long no step was done."""
        down_s, up_s = self.stood_s
        return None if down_s is None or up_s is None else max(0.0, up_s - down_s)

    @property
    def lasted_s(self) -> float | None:
        """Until training was where it was before."""
        return None if self.caught_up_s is None else max(0.0, self.caught_up_s - self.begun_s)

    @property
    def over_s(self) -> float:
        """When the last that is known of it happened."""
        return max([self.begun_s, *(m.t for m in self.moments)])
