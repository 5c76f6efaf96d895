"""What must always hold of a whole run, besides what `lab/simulation/invariants.py` checks. Pure.

Each is fed with everything that happens, and sees effects: objects as they land, machines as they
run, and what the workers of an epoch go on from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.bucket.layout import (
    EPOCHS,
    FACTS,
    MEMBERS,
    SAMPLES,
    Epoch,
    Published,
    epoch_key,
    epoch_of,
    member_key,
)
from harness.core import step_records as rec
from harness.core.facts import AttemptIntended
from harness.core.mesh import MeshChoice, parse
from harness.lab.simulation.invariants import Changed, Violation, Written, _facts
from harness.look.trackers.committed_steps import committed
from harness.look.trackers.publisher import publisher_of
from harness.look.trackers.stream_objects import STEP
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import every_row, newest_header
from harness.look.trackers.trackers import published
from storage.errors import NotFound
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from support.system.system_bucket import Deleted

if TYPE_CHECKING:
    from support.system.system_node import SimNode


@dataclass(frozen=True)
class Resumed:
    """The workers of an epoch go on from here; `ref` None: from the beginning."""

    t: float
    epoch: int
    ref: Ref | None
    step: int
    weights: str


@dataclass(frozen=True)
class Stepped:
    """The workers of an epoch have done a step."""

    t: float
    epoch: int
    step: int


@dataclass(frozen=True)
class WorkersLeft:
    """The workers of an epoch leave as they were asked to."""

    t: float
    epoch: int
    step: int


@dataclass(frozen=True)
class Damaged:
    """The simulated world damaged a committed snapshot in the bucket."""

    t: float
    ref: Ref


def _committed(event: Any) -> Ref | None:
    if (
        isinstance(event, Written)
        and event.key.startswith("snapshots/manifests/")
        and event.key.endswith(".json")
    ):
        return Ref.parse(event.key.rpartition("/")[2].removesuffix(".json"))
    return None


@dataclass
class WholeSnapshot:
    """A snapshot has a part of every rank of its epoch, and verifies byte for byte, when it is
    committed."""

    store: ObjectStore

    def see(self, event: Any) -> None:
        if ref := _committed(event):
            snapshots = Snapshots(self.store)
            try:
                manifest = snapshots.load(ref)
                snapshots.verify(manifest)
            except (SnapshotCorrupt, NotFound) as e:
                raise Violation(f"whole: snapshot {ref}, committed at {event.t:.1f} s: {e}") from e
            ranks = Epoch.decode(self.store.get(epoch_key(ref.epoch))).world
            if manifest.world != ranks:
                raise Violation(
                    f"whole: snapshot {ref} was committed at {event.t:.1f} s by {manifest.world} "
                    f"of {ranks} ranks"
                )

    def at_end(self) -> None: ...


@dataclass
class GreatestCommitted:
    """The greatest committed step never falls: an undamaged snapshot is never deleted before one at
    least as far exists, and no epoch goes on from more than one snapshot behind it. `store`: the
    real bucket, not what readers see of it."""

    store: ObjectStore
    whole: set[Ref] = field(default_factory=set)  # committed, and not damaged by the world

    def see(self, event: Any) -> None:
        if isinstance(event, Damaged):
            self.whole.discard(event.ref)
        elif isinstance(event, Resumed):
            self._begins(event)
        elif isinstance(event, Written | Deleted) and event.key.startswith("snapshots/manifests/"):
            self._look(event.t)
            if ref := _committed(event):
                self.whole.add(ref)

    def _look(self, t: float) -> None:
        """Check that something as far as ever still exists."""
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

    def _begins(self, event: Resumed) -> None:
        """Check the snapshot from which an epoch goes on."""
        passed = sorted(ref for ref in self.whole if event.ref is None or ref > event.ref)
        if len(passed) > 1:
            raise Violation(
                f"greatest step: epoch {event.epoch} began with {event.ref} at {event.t:.1f} s, "
                f"though {', '.join(ref.name for ref in passed)} are committed and whole"
            )

    def at_end(self) -> None: ...


@dataclass
class MeshChecker:
    """An epoch has a mesh that was asked for, whole copies of it, and none that its own members
    could have had before."""

    meshes: MeshChoice

    def see(self, event: Any) -> None:
        if not (isinstance(event, Written) and event.key.startswith(EPOCHS)):
            return
        epoch = Epoch.decode(event.data)
        mesh = parse(epoch.mesh) if epoch.mesh else None
        place = self.meshes.place(mesh) if mesh else None
        if mesh is None or place is None or epoch.world % mesh.copy_ranks:
            raise Violation(
                f"mesh: epoch {epoch.epoch} has {epoch.world} ranks of the mesh {epoch.mesh!r}, "
                f"wanted whole copies of one of {self.meshes}"
            )
        for better in self.meshes.each[:place]:
            found, _ = MeshChoice((better,)).choose(epoch.nproc, None)
            if found is not None:
                raise Violation(
                    f"mesh: epoch {epoch.epoch} has the mesh {mesh}, and its members make {found}"
                )

    def at_end(self) -> None: ...


@dataclass
class FencingChecker:
    """Old worlds cannot spoil new ones: epochs are created in order and once, and nothing of an
    older epoch is committed once a newer one goes on from its own snapshot. What is under way may
    land for `grace_s` more. An older one trains on, by design, while the bucket answers none of its
    nodes: `deaf_s(epoch)` is until when; from then on it has `grace_s`."""

    grace_s: float
    deaf_s: Callable[[int], float]
    newest: int = 0
    resumed_s: float = 0.0  # since then the newest epoch exists

    def see(self, event: Any) -> None:
        if isinstance(event, Written) and event.key.startswith(EPOCHS):
            number = epoch_of(event.key)
            if number != self.newest + 1:
                raise Violation(
                    f"fenced: epoch {number} was created at {event.t:.1f} s after {self.newest}"
                )
            self.newest, self.resumed_s = number, event.t
        if event.t <= self.resumed_s + self.grace_s:
            return
        if (ref := _committed(event)) and ref.epoch < self.newest:
            raise Violation(
                f"fenced: snapshot {ref} was committed at {event.t:.1f} s, though epoch "
                f"{self.newest} exists since {self.resumed_s:.1f} s"
            )
        if not isinstance(event, Stepped) or event.epoch >= self.newest:
            return
        if event.t > self.deaf_s(event.epoch) + self.grace_s:
            raise Violation(
                f"fenced: epoch {event.epoch} did step {event.step} at {event.t:.1f} s, though "
                f"epoch {self.newest} exists since {self.resumed_s:.1f} s"
            )

    def at_end(self) -> None: ...


@dataclass
class EveryStepOnce:
    """Along the line of training that a snapshot ends, each step from 1 on was done once, with the
    samples that it must have; and the global batch was the same in each."""

    store: ObjectStore
    expected: Callable[[int], str]
    global_batch: int
    identity: Mapping[str, Any]
    good: dict[str, int] = field(default_factory=dict)  # head -> last step

    def see(self, event: Any) -> None:
        ref = _committed(event)
        if ref is None:
            return
        named = rec.named(Manifest.from_json(event.data).data)
        genesis = rec.genesis(self.identity)
        if named is None:
            if ref.step:
                raise Violation(f"samples once: snapshot {ref} names no records")
            return
        todo: list[list[rec.StepRecord]] = []
        key, head = named.key, named.head
        while head != genesis and head not in self.good:
            todo.append(self._part(ref, key, head, event.t))
            head = todo[-1][0].prev
            key = rec.heads(self.store.list(SAMPLES)).get(head[:16], f"the records before {key}")
        step = 0 if head == genesis else self.good[head]
        for record in (r for part in reversed(todo) for r in part):
            step += 1
            self._look(ref, record, step, head)
            head = record.h
            self.good[head] = step
        if (named.head, ref.step) != (head, step):
            raise Violation(
                f"samples once: snapshot {ref} says {named}, its records end at step {step}"
            )

    def _part(self, ref: Ref, key: str, head: str, t: float) -> list[rec.StepRecord]:
        try:
            part = rec.decode(self.store.get(key), key)
        except (NotFound, rec.BrokenRecords) as e:
            raise Violation(f"samples once: snapshot {ref} needs {key} at {t:.1f} s: {e}") from e
        if not part or part[-1].h != head:
            raise Violation(f"samples once: {key} does not end with {head[:16]}")
        return part

    def _look(self, ref: Ref, record: rec.StepRecord, step: int, prev: str) -> None:
        if record.step != step or record.prev != prev or record.digest != self.expected(step):
            raise Violation(f"samples once: step {step} of snapshot {ref} was recorded as {record}")
        if record.samples != self.global_batch or sum(record.shares) * 2 != self.global_batch:
            raise Violation(
                f"global batch: step {step} had {record.samples} samples in shares "
                f"{record.shares}, wanted {self.global_batch}"
            )

    def at_end(self) -> None: ...


@dataclass
class SameTraining:
    """What the workers go on from is what the run had at that step, to the bit."""

    state_after: Callable[[int], str]

    def see(self, event: Any) -> None:
        if isinstance(event, Resumed):
            step = event.ref.step if event.ref else 0
            if event.step != step or event.weights != self.state_after(step):
                raise Violation(
                    f"same training: epoch {event.epoch} went on from {event.ref} at "
                    f"{event.t:.1f} s at step {event.step} with weights that are not those of step "
                    f"{step}"
                )

    def at_end(self) -> None: ...


@dataclass
class NothingLost:
    """Who leaves as asked leaves nothing behind: its last step is committed. With `gentle` (all
    that goes wrong are notices that leave time enough) no step is done twice."""

    store: ObjectStore
    gentle: bool
    total_steps: int
    steps: int = 0

    def see(self, event: Any) -> None:
        if isinstance(event, Stepped):
            self.steps += 1
        if isinstance(event, WorkersLeft):
            committed = max((ref.step for ref in Snapshots(self.store).refs()), default=0)
            if committed < event.step:
                raise Violation(
                    f"nothing lost: the workers of epoch {event.epoch} left at step {event.step} "
                    f"at {event.t:.1f} s as they were asked to; step {committed} is committed"
                )

    def at_end(self) -> None:
        if self.gentle and self.steps > self.total_steps:
            raise Violation(
                f"nothing lost: {self.steps} steps were done for {self.total_steps}, though every "
                "loss was announced in time"
            )


@dataclass
class EvidenceChecker:
    """No node outlives the evidence of it: for every machine that has power, the intent of its
    attempt lies in the bucket, and while its agent runs so does what it said of itself. After the
    end of the run no machine has power."""

    machines: Mapping[int, SimNode]
    intended: set[int] = field(default_factory=set)

    def see(self, event: Any) -> None:
        self.intended |= {
            fact.attempt for fact in _facts(event) if isinstance(fact, AttemptIntended)
        }
        if isinstance(event, Changed):
            for attempt, machine in self.machines.items():
                if machine.alive and attempt not in self.intended:
                    raise Violation(f"evidence: nothing tells of the node of attempt {attempt}")
        if isinstance(event, Deleted):
            self._deleted(event)

    def _deleted(self, event: Deleted) -> None:
        if event.key.startswith(FACTS):
            raise Violation(f"evidence: {event.key} was deleted at {event.t:.1f} s")
        for machine in self.machines.values():
            if event.key == member_key(machine.member) and machine.runs():
                raise Violation(
                    f"evidence: {event.key} was deleted at {event.t:.1f} s, and its node runs"
                )

    def at_end(self) -> None:
        if left := [m.number for m in self.machines.values() if m.alive]:
            raise Violation(f"evidence: nodes {left} have power after the end of the run")


@dataclass
class Bystanders:
    """Whoever trains is in the newest epoch or on its way out: no two epochs commit steps beside
    each other (see `FencingChecker`), and nobody is told to train in an epoch that does not name
    it."""

    machines: Mapping[int, SimNode]
    fresh_s: float  # who has said so lately that it trains is not lost
    members: dict[int, tuple[str, ...]] = field(default_factory=dict)
    training: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # in which epoch; when said

    def see(self, event: Any) -> None:
        if isinstance(event, Written) and event.key.startswith(EPOCHS):
            epoch = Epoch.decode(event.data)
            self._settled(event, epoch)
            if len(set(epoch.members)) != len(epoch.members):
                raise Violation(f"members: epoch {epoch.epoch} names one twice: {epoch.members}")
            self.members[epoch.epoch] = epoch.members
        if isinstance(event, Written) and event.key.startswith(MEMBERS):
            body = json.loads(event.data)
            self.training[body["member"]] = (body["epoch"], event.t)
            if body["state"] != "in":
                del self.training[body["member"]]
            named = self.members.get(body["epoch"])
            if body["state"] == "in" and (named is None or body["member"] not in named):
                raise Violation(
                    f"members: {body['member']} says at {event.t:.1f} s that it is in epoch "
                    f"{body['epoch']}, which does not name it"
                )

    def _settled(self, event: Written, epoch: Epoch) -> None:
        machines = {m.member: m for m in self.machines.values() if m.runs() and not m.frozen()}
        for name in self.members.get(epoch.epoch - 1, ()):
            at, said_s = self.training.get(name, (0, 0.0))
            lately = at == epoch.epoch - 1 and event.t - said_s < self.fresh_s
            if lately and name in machines and machines[name].pool.at_work():
                raise Violation(
                    f"members: epoch {epoch.epoch} was created at {event.t:.1f} s, while {name} "
                    f"trains in epoch {at} and said so {event.t - said_s:.1f} s before"
                )

    def at_end(self) -> None: ...


@dataclass
class PublishedOnce:
    """What was published are committed steps, each once, in order, without a gap."""

    store: ObjectStore
    expected: Callable[[int], str]
    name: str

    def see(self, event: Any) -> None: ...

    def at_end(self) -> None:
        step = 0
        for marker in published(self.store, self.name):
            for line in self._lines(marker):
                step += 1
                if line != f"{step} {self.expected(step)}":
                    raise Violation(f"published once: wanted step {step}, found {line!r}")
            if marker.last != step:
                raise Violation(f"published once: {marker} ends at step {step}")

    def _lines(self, marker: Published) -> Iterable[str]:
        return self.store.get(marker.folder + "steps.txt").decode().splitlines()


@dataclass
class StreamedOnce:
    """The stream's rows have no gaps, and its steps are committed ones, each once, in order, up to
    the newest batch that was written."""

    store: ObjectStore

    def see(self, event: Any) -> None: ...

    def at_end(self) -> None:
        header = newest_header(self.store)
        if header is None:
            return
        info = RunInfo.of(self.store)
        # what was redone since the newest batch is the next publisher's to rewind: so let it look
        writer = publisher_of(self.store, info, 0.0)
        writer.now = lambda: header.ops_t
        writer.round(last=True)
        rows = list(every_row(self.store))
        if [row.number for row in rows] != list(range(len(rows))):
            raise Violation("streamed once: the rows of the stream have gaps")
        told = [(r.step, r.values["train/loss"], r.t) for r in rows if r.kind == STEP]
        records, _ = committed(self.store, info, 1, 10**6)
        if told != [(r.step, r.loss, r.t) for r in records]:
            steps = [step for step, _, _ in told]
            raise Violation(f"streamed once: wanted {len(records)} steps, found {steps}")
