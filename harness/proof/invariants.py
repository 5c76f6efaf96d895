"""What must always hold, each as a checker that is fed with everything that happens. Used by
`sim.py` after every event.

A checker sees effects, not claims: objects as they land in the bucket, acts as they reach the
cloud, nodes as they are billed. It raises `Violation` at the first event that breaks its rule.
docs/ARCHITECTURE.md names the rules.

Pure: knows the bucket's layout and the nouns; knows nothing of how the simulation produces events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from harness.bucket.layout import EPOCHS, FACTS, LEASES, SAMPLES, epoch_key
from harness.core.fact_lines import parse
from harness.core.facts import (
    AttemptDoubted,
    AttemptEnded,
    AttemptIntended,
    LeaseTaken,
    RunEnded,
)
from harness.core.values import digest
from harness.core.world import Node
from storage.errors import NotFound
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots


class Violation(AssertionError):
    """A rule was broken; the message names rule, event and time."""


@dataclass(frozen=True)
class Written:
    """An object landed in the bucket. `before`: what it replaced."""

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
    # the last that its controller asked of the bucket was refused, or not answered
    blind: bool = False


@dataclass(frozen=True)
class Changed:
    """A node changed, as the cloud itself knows it."""

    t: float
    node: Node


@dataclass(frozen=True)
class Damaged:
    """The world itself spoiled a committed snapshot in the bucket."""

    t: float
    ref: Ref


SimulationEvent: TypeAlias = Written | Acted | Changed | Damaged


class Checker(Protocol):
    def see(self, event: SimulationEvent) -> None: ...
    def at_end(self) -> None: ...


def _facts(event: SimulationEvent) -> Iterable[object]:
    """The durable facts that an event brings."""
    if isinstance(event, Written) and event.key.startswith(FACTS):
        return [parse(json.loads(line)) for line in event.data.decode().splitlines()]
    return []


def _committed(event: SimulationEvent) -> Ref | None:
    if (
        isinstance(event, Written)
        and event.key.startswith("snapshots/manifests/")
        and event.key.endswith(".json")
    ):
        return Ref.parse(event.key.rpartition("/")[2].removesuffix(".json"))
    return None


@dataclass
class WriteOnce:
    """What is created is never changed: terms, facts, epochs, sample records, part lists and
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
class OneHand:
    """At most one controller acts. One that was overtaken between its last look at the lease and
    its act may still do that one act (no bucket can prevent it, and it is harmless because acts are
    idempotent), never a second."""

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
    """Nothing is done to nodes by a controller whose last question to the bucket was refused, or
    not answered: it does not know whether it still leads, or what is asked of the run. Its trouble
    is not theirs."""

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Acted) and event.blind:
            raise Violation(
                f"seeing: term {event.term} did {event.act} of attempt {event.attempt} at "
                f"{event.t:.1f} s without its bucket"
            )

    def at_end(self) -> None: ...


@dataclass
class IntendedFirst:
    """An attempt is in the bucket before the cloud is asked for it."""

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
    """Never more than `max_nodes` nodes alive in one place, besides those that might not stay, and
    never in more than two places. A controller that was overtaken in mid-act may have added one."""

    max_nodes: int
    alive: dict[int, str] = field(default_factory=dict)  # and where
    doubted: set[int] = field(default_factory=set)  # at any time
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
    """When a run has ended, no node of it is alive, and none comes until it is launched again."""

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
class WholeSnapshotChecker:
    """A snapshot has a part of every member of its epoch, and verifies byte for byte, at the
    moment it is committed."""

    store: ObjectStore

    def see(self, event: SimulationEvent) -> None:
        if ref := _committed(event):
            snapshots = Snapshots(self.store)
            try:
                manifest = snapshots.load(ref)
                snapshots.verify(manifest)
            except (SnapshotCorrupt, NotFound) as e:
                raise Violation(f"whole: snapshot {ref}, committed at {event.t:.1f} s: {e}") from e
            ranks = self.ranks(self.store.get(epoch_key(ref.epoch)))
            if manifest.world != ranks:
                raise Violation(
                    f"whole: snapshot {ref} was committed at {event.t:.1f} s by {manifest.world} "
                    f"of {ranks} ranks"
                )

    def ranks(self, epoch: bytes) -> int:
        """Of this epoch: here each member is one."""
        return len(json.loads(epoch)["members"])

    def at_end(self) -> None: ...


@dataclass
class NewestCounts:
    """The newest committed snapshot never goes back, every epoch starts from it, and "done"
    means that it is the last step."""

    store: ObjectStore
    best: Ref | None = None

    def newest(self) -> Ref | None:
        return next(iter(Snapshots(self.store).refs()), None)

    def see(self, event: SimulationEvent) -> None:
        if _committed(event):
            newest, marked = self.newest(), Snapshots(self.store).quarantined()
            if self.best and self.best not in marked and (newest is None or newest < self.best):
                raise Violation(
                    f"newest counts: the newest snapshot was {self.best}, is {newest} at "
                    f"{event.t:.1f} s"
                )
            self.best = newest
        if isinstance(event, Written) and event.key.startswith(EPOCHS):
            epoch, newest = json.loads(event.data), self.newest()
            found = Ref.parse(epoch["resume"]) if epoch["resume"] else None
            if found != newest:
                raise Violation(
                    f"newest counts: epoch {epoch['epoch']} began with {found} at {event.t:.1f} s, "
                    f"newest is {newest}"
                )
        for fact in _facts(event):
            if isinstance(fact, RunEnded) and fact.outcome == "done":
                newest = self.newest()
                if (
                    newest is None
                    or newest.step != fact.committed_step
                    or not Snapshots(self.store).load(newest).data["final"]
                ):
                    raise Violation(
                        f"newest counts: done at step {fact.committed_step}, but the newest "
                        f"snapshot is {newest}"
                    )

    def at_end(self) -> None: ...


@dataclass
class GreatestStep:
    """The greatest committed step never falls: what nobody but the world can spoil is never deleted
    before something as far is there, and no epoch begins more than one snapshot behind it. `store`
    is the bucket as it is, whatever readers see of it."""

    store: ObjectStore
    whole: set[Ref] = field(default_factory=set)  # committed, and not spoiled by the world

    def see(self, event: SimulationEvent) -> None:
        if isinstance(event, Damaged):
            self.whole.discard(event.ref)
            return
        if not isinstance(event, Written) or not event.key.startswith(
            ("snapshots/manifests/", EPOCHS)
        ):
            return
        self.look(event.t)
        if ref := _committed(event):
            self.whole.add(ref)
        if event.key.startswith(EPOCHS):
            epoch = json.loads(event.data)
            found = Ref.parse(epoch["resume"]) if epoch["resume"] else None
            self.begins(event.t, epoch["epoch"], found)

    def look(self, t: float) -> None:
        """Is something as far as ever still there?"""
        there, doomed = Snapshots(self.store).manifests()
        left, before = (
            self.whole & (there - doomed),
            max((ref.step for ref in self.whole), default=0),
        )
        now = max((ref.step for ref in left), default=0)
        if now < before:
            raise Violation(
                f"greatest step: it was {before}, is {now} at {t:.1f} s: snapshots of later "
                "steps were pruned"
            )
        self.whole = left

    def begins(self, t: float, epoch: int, found: Ref | None) -> None:
        """An epoch goes on from this snapshot."""
        passed = sorted(ref for ref in self.whole if found is None or ref > found)
        if len(passed) > 1:
            raise Violation(
                f"greatest step: epoch {epoch} began with {found} at {t:.1f} s, "
                f"though {', '.join(ref.name for ref in passed)} are committed and whole"
            )

    def at_end(self) -> None: ...


@dataclass
class SamplesOnce:
    """Along the line of training that a snapshot ends, each step from 1 on was done once, with
    the samples it must have."""

    store: ObjectStore
    genesis: str
    expected: Callable[[int], str]  # step -> digest of its samples
    good: dict[str, int] = field(default_factory=dict)  # head -> last step

    def see(self, event: SimulationEvent) -> None:
        ref = _committed(event)
        if ref is None or not isinstance(event, Written):
            return
        samples = Manifest.from_json(event.data).data["samples"]
        todo: list[list[dict[str, str | int]]] = []
        key, head = samples["key"], samples["head"]
        while head != self.genesis and head not in self.good:
            try:
                todo.append([json.loads(line) for line in self.store.get(key).splitlines()])
            except NotFound:
                raise Violation(
                    f"samples once: snapshot {ref} needs {key}, which is missing at {event.t:.1f} s"
                ) from None
            head = str(todo[-1][0]["prev"])
            key = next(
                (k for k in self.store.list(SAMPLES) if k.endswith(f"-{head[:16]}.jsonl")),
                f"the records before {key}",
            )
        step = 0 if head == self.genesis else self.good[head]
        for record in (r for part in reversed(todo) for r in part):
            step += 1
            if (
                record["step"] != step
                or record["prev"] != head
                or record["digest"] != self.expected(step)
            ):
                raise Violation(
                    f"samples once: step {step} of snapshot {ref} was recorded as {record}"
                )
            head = record_hash(record)
            if record["h"] != head:
                raise Violation(
                    f"samples once: the record of step {step} of snapshot {ref} was changed"
                )
            self.good[head] = step
        if (samples["head"], ref.step) != (head, step):
            raise Violation(
                f"samples once: snapshot {ref} says {samples}, its records end at step {step}"
            )

    def at_end(self) -> None: ...


def record_hash(record: dict[str, str | int]) -> str:
    """The simulation's simplified step record: all fields but `h`, in order."""
    return digest("|".join(f"{k}={record[k]}" for k in sorted(record) if k != "h").encode())


@dataclass
class LedgerChecker:
    """Bills add up: what the facts say of each attempt is what the cloud charges for it, to the
    second. `estimated`: of these only that they have one, as a controller that speaks to another
    API server does not see how they end."""

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
    """Never more than the budget and one attempt of every node (`slack_usd`) is spent."""

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
