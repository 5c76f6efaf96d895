"""Invariants, each as a checker that receives everything that happens. `simulation.py` uses them
after every event.

A checker sees effects, not claims: objects as they land in the bucket, acts as they reach the
cloud, nodes as they are billed. It raises `Violation` at the first event that breaks its rule.
docs/design/ARCHITECTURE.md names the rules.

Pure: knows the bucket's layout and the nouns; knows nothing of how the simulation produces events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from harness.bucket.layout import EPOCHS, FACTS, LEASES, SAMPLES
from harness.core.facts import (
    AttemptDoubted,
    AttemptEnded,
    AttemptIntended,
    LeaseTaken,
    RunEnded,
    parse,
)
from harness.core.world import Node
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore


class Violation(AssertionError):
    """Raised when a rule is broken; the message names rule, event and time."""


@dataclass(frozen=True)
class Written:
    """An object landed in the bucket. `before`: the content that it replaced; None if it is new."""

    t: float
    key: str
    data: bytes
    before: bytes | None


@dataclass(frozen=True)
class Acted:
    """A controller's act took effect at the cloud."""

    t: float
    term: int
    act: str  # "launch" | "terminate"
    attempt: int
    # the bucket refused or did not answer its controller's last request
    blind: bool = False


@dataclass(frozen=True)
class Changed:
    """A node changed, as the cloud itself knows it."""

    t: float
    node: Node


SimulationEvent: TypeAlias = Written | Acted | Changed


class Checker(Protocol):
    def see(self, event: SimulationEvent) -> None: ...
    def at_end(self) -> None: ...


def _facts(event: SimulationEvent) -> Iterable[object]:
    """Return the durable facts that an event brings."""
    if isinstance(event, Written) and event.key.startswith(FACTS):
        return [parse(json.loads(line)) for line in event.data.decode().splitlines()]
    return []


@dataclass
class WriteOnce:
    """Created objects never change: terms, facts, generations, sample records, part lists and
    manifests."""

    def see(self, event: SimulationEvent) -> None:
        if not isinstance(event, Written) or event.before is None or event.before == event.data:
            return
        parts_list = event.key.startswith("snapshots/parts/") and "/list-" in event.key
        term = event.key.startswith(LEASES) and event.key.endswith(".json")
        if (
            term
            or parts_list
            or event.key.startswith((FACTS, EPOCHS, SAMPLES, "snapshots/manifests/"))
        ):
            raise Violation(f"write once: {event.key} was replaced at {event.t:.1f} s")

    def at_end(self) -> None: ...


@dataclass
class SingleController:
    """Only one controller acts at a time. One that was overtaken between its last look at the lease
    and its act may still do that one act (no bucket can prevent it, and it is harmless because acts
    are idempotent), but never a second."""

    leading: int = 0
    late: dict[int, int] = field(default_factory=dict)

    def see(self, event: SimulationEvent) -> None:
        if not isinstance(event, Acted):
            return
        self.leading = max(self.leading, event.term)
        if event.term < self.leading:
            self.late[event.term] = self.late.get(event.term, 0) + 1
            if self.late[event.term] > 1:
                raise Violation(
                    f"one hand: term {event.term} did {event.act} of attempt {event.attempt} at "
                    f"{event.t:.1f} s, after term {self.leading}"
                )

    def at_end(self) -> None: ...


@dataclass
class Seeing:
    """A controller does nothing to nodes if its last request to the bucket was refused, or not
    answered: it does not know whether it still holds the lease, or what was ordered. Its trouble
    must not become the nodes'."""

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Acted) and event.blind:
            raise Violation(
                f"seeing: term {event.term} did {event.act} of attempt {event.attempt} at "
                f"{event.t:.1f} s without its bucket"
            )

    def at_end(self) -> None: ...


@dataclass
class IntendedFirst:
    """An attempt is recorded in the bucket before its node is requested from the cloud."""

    intended: set[int] = field(default_factory=set)

    def see(self, event: SimulationEvent) -> None:
        self.intended |= {
            fact.attempt for fact in _facts(event) if isinstance(fact, AttemptIntended)
        }
        if (
            isinstance(event, Acted)
            and event.act == "launch"
            and event.attempt not in self.intended
        ):
            raise Violation(
                f"intended first: attempt {event.attempt} was launched at {event.t:.1f} s without "
                "a durable intent"
            )

    def at_end(self) -> None: ...


@dataclass
class NodeLimit:
    """The limit of nodes: at most `max_nodes` alive in one place, besides those in doubt, and at
    most two places. A controller that was overtaken in the middle of an act may have added one."""

    max_nodes: int
    alive: dict[int, str] = field(default_factory=dict)  # attempt -> place
    doubted: set[int] = field(default_factory=set)  # ever
    late: int = 0
    leading: int = 0

    def see(self, event: SimulationEvent) -> None:
        self.doubted |= {fact.attempt for fact in _facts(event) if isinstance(fact, AttemptDoubted)}
        if isinstance(event, Acted):
            self.leading = max(self.leading, event.term)
            self.late += event.act == "launch" and event.term < self.leading
        if isinstance(event, Changed):
            self.alive.pop(event.node.attempt, None)
            if event.node.alive:
                self.alive[event.node.attempt] = event.node.offer.place
            places = Counter(self.alive.values())
            limit = self.max_nodes + len(self.doubted & self.alive.keys()) + self.late
            if any(count > limit for count in places.values()) or len(places) > 2 + self.late:
                raise Violation(
                    f"node limit: attempts {sorted(self.alive)} are alive at {event.t:.1f} s, "
                    f"limit {self.max_nodes}"
                )

    def at_end(self) -> None: ...


@dataclass
class NothingLeft:
    """After a run has ended, no node of it is alive, until it is launched again."""

    alive: set[int] = field(default_factory=set)
    ended: bool = False

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Changed):
            (self.alive.add if event.node.alive else self.alive.discard)(event.node.attempt)
        for fact in _facts(event):
            self.ended = isinstance(fact, RunEnded) or (
                self.ended and not isinstance(fact, LeaseTaken)
            )
        if self.ended and self.alive:
            raise Violation(
                f"nothing left: attempts {sorted(self.alive)} are alive at {event.t:.1f} s "
                "although the run has ended"
            )

    def at_end(self) -> None:
        if self.alive:
            raise Violation(f"nothing left: attempts {sorted(self.alive)} outlived the run")


@dataclass
class DoneIsDone:
    """A run is done when its last step is committed as such, and not before."""

    store: ObjectStore
    total_steps: int

    def see(self, event: SimulationEvent) -> None:
        for fact in _facts(event):
            if isinstance(fact, RunEnded) and fact.outcome == "done":
                snapshots = Snapshots(self.store)
                newest = next(iter(snapshots.refs()), None)
                ended = bool(newest and snapshots.ended(snapshots.load(newest)))
                if newest is None or not ended or newest.step != self.total_steps:
                    raise Violation(
                        f"done: the run is said to be done at step {fact.committed_step}; the "
                        f"newest snapshot is {newest}, the last step {self.total_steps}"
                    )
        if isinstance(event, Written) and event.key.endswith(".ended"):
            ref = Ref.parse(event.key.rpartition("/")[2].removesuffix(".ended"))
            if ref.step != self.total_steps:
                raise Violation(f"done: snapshot {ref} was marked as the last at {event.t:.1f} s")

    def at_end(self) -> None: ...


@dataclass
class LedgerChecker:
    """Bills add up: what the facts record of each attempt is what the cloud charges for it, to the
    second. `estimated`: attempts that only need a bill, as a controller that uses another API
    server does not see their ends."""

    estimated: Collection[int] = ()
    nodes: dict[int, Node] = field(default_factory=dict)
    ended: dict[int, AttemptEnded] = field(default_factory=dict)

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Changed):
            self.nodes[event.node.attempt] = event.node
        for fact in _facts(event):
            if isinstance(fact, AttemptEnded):
                self.ended[fact.attempt] = fact

    @property
    def usd(self) -> float:
        return sum(_charge(node)[1] for node in self.nodes.values())

    def at_end(self) -> None:
        for attempt, node in self.nodes.items():
            seconds, usd = _charge(node)
            fact = self.ended.get(attempt)
            if fact is not None and attempt in self.estimated:
                continue
            if fact is None or abs(fact.billed_s - seconds) > 1e-6 or abs(fact.usd - usd) > 1e-9:
                raise Violation(
                    f"ledger: attempt {attempt} is charged {seconds} s and {usd} USD; the facts "
                    f"say {fact}"
                )
        for attempt in self.ended.keys() - self.nodes.keys():
            if self.ended[attempt].billed_s:
                raise Violation(
                    f"ledger: attempt {attempt} never existed; the facts say {self.ended[attempt]}"
                )


def _charge(node: Node) -> tuple[float, float]:
    if node.up_s is None or node.gone_s is None:
        return 0.0, 0.0
    return node.gone_s - node.up_s, (node.gone_s - node.up_s) / 3600 * node.offer.usd_per_h


@dataclass
class Budget:
    """Spending never exceeds the budget and one attempt of every node (`slack_usd`)."""

    budget_usd: float
    slack_usd: float
    ledger: LedgerChecker

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Changed) and self.ledger.usd > self.budget_usd + self.slack_usd:
            raise Violation(
                f"budget: {self.ledger.usd:.4f} USD spent at {event.t:.1f} s of {self.budget_usd} "
                f"(+ {self.slack_usd:.4f})"
            )

    def at_end(self) -> None: ...
