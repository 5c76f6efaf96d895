"""The data of an interruption: nodes, times, costs, and cheaper alternatives.

Pure. `postmortem.py` builds them from facts and the ledger; `look/pages/lane_chart.py` and
`postmortem_text.py` show them.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ledger.bill import NANO, Billed

# Interruption.kind, in words
KINDS = {
    "notice": "a cloud or a person announced that nodes would be taken",
    "loss": "nodes were gone without a word",
    "health": "a GPU or its driver was found unfit",
    "hang": "a worker gave no sign of life",
    "crash": "a worker failed",
    "quarantine": "a snapshot was bad, so that an older one was used",
    "rewind": "the loss spiked, and guards went back to an older snapshot",
    "move": "the controller gave nodes back for others",
    "resize": "nodes joined or left, as the run wanted",
}
TAKINGS = ("notice", "loss", "health")  # kinds that take nodes
HURTS = (*TAKINGS, "hang", "crash")  # kinds whose lost nodes are replaced

# Moment.what in words, in their usual order
MOMENTS = {
    "notice": "notice",
    "cancelled": "notice taken back",
    "trouble": "trouble",
    "stack": "stack",
    "decided": "decision",
    "staged": "snapshot staged",
    "committed": "snapshot committed",
    "verdict": "verdict",
    "left": "workers left",
    "gone": "gone",
    "asked": "launch asked",
    "up": "node up",
    "joined": "agent started",
    "formed": "generation formed",
    "quarantined": "snapshot bad",
    "restored": "restored",
    "first step": "first step",
    "caught up": "caught up",
    "whole": "whole again",
    "warned": "warning",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened at `t` (wall clock, s). `node` is an AttemptRow's name, "" for the
    whole run. `text` is the writer's own text, not yet escaped for a page."""

    what: str  # a key of MOMENTS
    t: float
    node: str = ""
    text: str = ""


@dataclass(frozen=True)
class TouchedNode:
    """A node that an interruption affected."""

    name: str  # AttemptRow.name
    member: str
    place: str  # its offer
    gpus: int
    end: str  # facts.AttemptEnded.end; "" while it lives, and if it went on training
    grace_s: float | None = None  # notice to deadline (s); None: no notice or no deadline
    commit_s: float | None = None  # from notice to the commit of a state of that time or newer
    in_time: bool | None = None  # None: nothing had to be saved


@dataclass(frozen=True)
class Losses(Billed):
    """The part of the ledger that an interruption caused, by the ledger's own buckets. The losses
    of all interruptions of a run, and the rest, add up to the ledger exactly."""

    ns: dict[str, int]
    nusd: dict[str, int]
    gpu_ns: int = 0  # the same time, counted once for each GPU of a node
    steps: int = 0  # done, not committed, and done again

    @property
    def gpu_s(self) -> float:
        return self.gpu_ns / NANO


@dataclass(frozen=True)
class SavedWork:
    """The steps that the snapshot on notice saved from being redone: those after the newest
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
    """The cost of an alternative compared with what happened. Seconds are those of nodes (`node_s`)
    or of the wall clock (`wall_s`); negative: it would have been cheaper."""

    name: str
    node_s: float
    usd: float
    wall_s: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Interruption:
    """An interruption, from its first sign until training is where it was before."""

    number: int  # 1, 2, ... by time
    kind: str  # a key of KINDS
    cause: str  # in words
    nodes: tuple[TouchedNode, ...]
    epochs: tuple[int, ...]  # generations that it ended; (): training went on
    world: tuple[int, int]  # ranks before, and of the next world that trained (0: none)
    begun_s: float
    # end of the last step, begin of the next; None: no step before, or after
    stood_s: tuple[float | None, float | None]
    caught_up_s: float | None  # None: not yet, or never
    moments: tuple[Moment, ...]
    losses: Losses
    saved: SavedWork | None = None
    what_if: tuple[Alternative, ...] = ()

    @property
    def wanted(self) -> bool:
        """True if nodes joined or left as the run wanted: that interrupts nothing."""
        return self.kind == "resize"

    @property
    def gap_s(self) -> float | None:
        """Seconds without a step, or None."""
        down_s, up_s = self.stood_s
        return None if down_s is None or up_s is None else max(0.0, up_s - down_s)

    @property
    def lasted_s(self) -> float | None:
        """Seconds until training was where it was before, or None."""
        return None if self.caught_up_s is None else max(0.0, self.caught_up_s - self.begun_s)

    @property
    def over_s(self) -> float:
        """Time of the last known moment."""
        return max([self.begun_s, *(m.t for m in self.moments)])
