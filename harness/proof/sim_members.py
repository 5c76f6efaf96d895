"""The simulated members: what agents and workers do, in few words, with the real snapshots and
restores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.bucket import layout
from harness.bucket.orders import asked_to_leave, stop_order
from harness.controller.recovery import RunOutcome
from harness.core.values import digest
from harness.core.world import DRAINED, FINISHED, STOPPED, UNFIT, Offer, meeting_place
from harness.proof.invariants import Damaged, record_hash
from storage.errors import NotFound, StoreRefused, StoreUnavailable
from storage.faults import corrupt
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.restore import Looks, Rewind
from storage.retention import Keep
from storage.snapshots import Snapshots

if TYPE_CHECKING:
    from harness.proof.sim import Simulation

GENESIS = digest(b"simulated run")


@dataclass(frozen=True)
class SimulatedTraining:
    """The simulated training. `step_s` is what one node of speed 1 needs for a step."""

    total_steps: int = 300
    snapshot_every: int = 20
    step_s: float = 6.0
    boot_s: float = 20.0
    micro_batches: int = 8


# ---- members -------------------------------------------------------------------------------------
@dataclass
class SimulatedMember:
    attempt: int
    offer: Offer
    ready: bool = False  # booted, and not told to leave
    dead: bool = False
    seen: Ref | None = None  # the newest snapshot that its agent saw committed
    bad_reader: bool = False
    zombie_until_s: float = 0.0  # dead for the cloud and for its peers; still writes until then


@dataclass
class Team:
    """One epoch's members at work."""

    epoch: int
    members: list[SimulatedMember]
    start_s: float
    step_s: float
    first: int  # the step resumed from
    head: str
    recorded: int
    # step records since the last committed step
    lines: dict[int, str] = field(default_factory=dict)
    resumed: str = ""
    draining: str = ""
    over: bool = False  # its members have left it, or know that it is broken
    broken_s: float = math.inf  # a member is gone: no step completes any more
    committed: set[int] = field(default_factory=set)

    def step_at(self, t: float) -> int:
        return self.first + max(0, math.floor((min(t, self.broken_s) - self.start_s) / self.step_s))

    def time_of(self, step: int) -> float:
        return self.start_s + (step - self.first) * self.step_s


class Members:
    """All node agents and workers. They share nothing but the bucket; their events are atomic,
    their uploads are not."""

    def __init__(self, sim: Simulation):
        self.sim, self.clock, self.rng, self.job = sim, sim.clock, sim.rng, sim.job
        self.all: dict[int, SimulatedMember] = {}
        self.team: Team | None = None
        self.forming = False
        self.epochs = self.steps_done = 0

    @property
    def snapshots(self) -> Snapshots:
        return self.sim.build.snapshots(self.sim.member_store())

    def retry(self, do: Callable[[], None]) -> None:
        """A member whose store does not answer tries again."""
        try:
            do()
        except StoreUnavailable:
            self.clock.after(self.rng.uniform(0.5, 2), lambda: self.retry(do))
        except StoreRefused as e:  # its agent believes that, and ends
            self.sim.course.outcome = self.sim.course.outcome or RunOutcome("failed", str(e), 0)

    # -- the life of a node
    def boot(self, attempt: int, offer: Offer) -> None:
        bad = (
            not self.sim.cloud.calm
            and self.sim.mishaps.reads.random() < self.sim.weather.bad_readers
        )
        member = self.all[attempt] = SimulatedMember(attempt, offer, bad_reader=bad)
        self.clock.after(
            self.rng.uniform(0.5, 1.5) * self.job.boot_s,
            lambda: self.retry(lambda: self.ready(member)),
        )
        if not self.sim.cloud.calm and self.rng.random() < self.sim.weather.flaky:
            self.clock.after(
                self.rng.uniform(1, 600), lambda: self.sim.cloud.end(attempt, 1, "exited")
            )

    def beat(self, member: SimulatedMember, count: int = 0) -> None:
        """What it says of itself in the bucket, as real ones do; only where somebody may need
        it."""
        if not member.dead:
            self.say(member, "in", count)
            self.clock.after(10.0, lambda: self.beat(member, count + 1))

    def say(self, member: SimulatedMember, state: str, count: int) -> None:
        body = {"attempt": member.attempt, "state": state, "beat": count, "beat_s": 10.0}
        self.sim.store.put(
            layout.member_key(f"m{member.attempt:04d}-sim"), json.dumps(body).encode()
        )

    def ready(self, member: SimulatedMember) -> None:
        if member.dead:
            return
        if self.sim.weather.elsewhere:
            self.beat(member)
        if self.stop_asked():
            self.leave(member, STOPPED)
            return
        member.ready = True
        self.clock.after(5.0, lambda: self.retry(lambda: self.look(member)))
        if self.team and not self.team.over:
            if member.offer.place == self.team.members[0].offer.place:
                self.drain(self.team, "resize")
        else:
            self.form_soon()

    def look(self, member: SimulatedMember) -> None:
        """What an agent does all the time: is the run over, or to be stopped?"""
        if member.dead:
            return
        if member.ready and asked_to_leave(self.sim.member_store(), member.attempt):
            self.notice(member.attempt)
        if self.team is None or self.team.over or member not in self.team.members:
            newest = self.snapshots.latest()
            if (newest and newest.data["final"]) or self.stop_asked():
                self.leave(member, FINISHED if newest and newest.data["final"] else STOPPED)
                return
            if self.team is None or self.team.over:
                self.form_soon()
        elif self.stop_asked():
            self.drain(self.team, "stop")
        self.clock.after(5.0, lambda: self.retry(lambda: self.look(member)))

    def stop_asked(self) -> bool:
        return stop_order(self.sim.member_store()) is not None

    def leave(self, member: SimulatedMember, code: int) -> None:
        member.ready = False
        self.clock.after(
            self.rng.uniform(0.2, 3), lambda: self.sim.cloud.end(member.attempt, code, "exited")
        )

    def notice(self, attempt: int) -> None:
        member = self.all.get(attempt)
        if member is None or member.dead:
            return
        member.ready = False
        if self.team and not self.team.over and member in self.team.members:
            self.drain(self.team, "drain")
        else:
            self.leave(member, DRAINED)

    def lost(self, attempt: int, zombie: bool) -> None:
        member = self.all.get(attempt)
        if member is None or member.dead:
            return
        member.dead, member.ready = True, False
        if self.sim.weather.elsewhere and self.sim.cloud.all[attempt].reason == "exited":
            self.say(member, "gone", -1)
        if zombie:
            member.zombie_until_s = self.clock.now() + self.rng.uniform(30, 300)
        team = self.team
        if team is None or member not in team.members or team.over:
            return
        if zombie and len(team.members) == 1:  # it trains on, for itself
            self.team = None
            self.clock.after(self.rng.uniform(30, 300), lambda: setattr(team, "over", True))
        else:
            team.broken_s = min(team.broken_s, self.clock.now())
            self.clock.after(self.rng.uniform(2, 10), lambda: self.dissolve(team))

    def dissolve(self, team: Team) -> None:
        if not team.over:
            team.over = True
            self.form_soon()

    # -- epochs
    def form_soon(self) -> None:
        if not self.forming:
            self.forming = True
            self.clock.after(self.rng.uniform(1, 4), lambda: self.retry(self.form))

    def form(self) -> None:
        members = [m for m in self.all.values() if m.ready]
        if members:
            were = self.team.members if self.team else []
            where = meeting_place([(m.offer.place, 1, m in were) for m in members])
            members = [m for m in members if m.offer.place == where]
        if len(members) < self.sim.run.min_nodes or (self.team and not self.team.over):
            self.forming = False
            return
        store = self.sim.member_store()
        epoch = 1 + max(map(layout.epoch_of, store.list(layout.EPOCHS)), default=0)
        restored = restore(self.sim, members, epoch)
        newest = restored.manifest
        for member, code in restored.leave:
            self.leave(member, code)
        if restored.leave:
            self.forming = False
            return
        if newest and newest.data["final"]:
            self.forming = False
            for member in members:
                self.leave(member, FINISHED)
            return
        body: dict[str, object] = {
            "epoch": epoch,
            "members": [m.attempt for m in members],
            "resume": newest.ref.name if newest else None,
        }
        if not store.create(layout.epoch_key(epoch), json.dumps(body).encode()):
            raise StoreUnavailable(
                "another member was first, or a write of ours took effect unheard: look again"
            )
        self.forming, self.epochs = False, self.epochs + 1
        speed = sum(m.offer.speed for m in members)
        first, head = (newest.step, newest.data["samples"]["head"]) if newest else (0, GENESIS)
        restored_s = self.clock.now() + self.rng.uniform(2, 10) + restored.waited_s
        self.team = team = Team(
            epoch, members, restored_s, self.job.step_s / speed, first, head, first
        )
        team.resumed = newest.ref.name if newest else ""
        for member in members:
            member.seen = max(
                filter(None, (member.seen, newest.ref if newest else None)), default=None
            )
        self.milestone(team, self.next_stop(first))

    def next_stop(self, step: int) -> int:
        every = self.job.snapshot_every
        step = min((step // every + 1) * every, self.job.total_steps)
        bug = self.sim.weather.fails_at_step
        return (
            step if bug is None or self.team is None else min(step, max(bug, self.team.first + 1))
        )

    def milestone(self, team: Team, step: int) -> None:
        self.clock.after(
            max(0.0, team.time_of(step) - self.clock.now()), lambda: self.reach(team, step)
        )

    def reach(self, team: Team, step: int) -> None:
        """A step at which a snapshot is due."""
        if team.over or team.draining or team.broken_s <= team.time_of(step):
            return
        bug = self.sim.weather.fails_at_step
        if bug is not None and step >= bug:
            for member in team.members:
                self.sim.cloud.end(member.attempt, 1, "exited")
            return
        self.snapshot(team, step)
        if step < self.job.total_steps:
            self.milestone(team, self.next_stop(step))

    def drain(self, team: Team, why: str) -> None:
        """Stop at the next step boundary, with a snapshot."""
        if team.draining or team.over or team.broken_s < math.inf:
            return
        team.draining = why
        step = max(team.step_at(self.clock.now()) + 1, team.recorded)
        if step > self.job.total_steps:
            return  # its last snapshot is on its way
        wait_s = max(0.0, team.time_of(step) - self.clock.now())
        self.clock.after(wait_s, lambda: self.drained_at(team, step))

    def drained_at(self, team: Team, step: int) -> None:
        if team.over or team.broken_s < math.inf:
            return
        if step == team.first or step in team.committed:
            self.committed(team, step)
        else:
            self.snapshot(team, step)

    # -- snapshots
    def snapshot(self, team: Team, step: int) -> None:
        """Its records are those since the last one that is committed, as a session's are."""
        for k in range(team.recorded + 1, step + 1):
            consumed = self.consumed(k, len(team.members))
            record: dict[str, str | int] = {
                "step": k,
                "epoch": team.epoch,
                "digest": consumed,
                "prev": team.head,
            }
            team.head = record_hash(record)
            team.lines[k] = json.dumps({**record, "h": team.head})
            self.steps_done += 1
        team.recorded = max(team.recorded, step)
        first = min(team.lines, default=step)
        key = f"{layout.SAMPLES}{first:010d}-{step:010d}-{team.head[:16]}.jsonl"
        records = "\n".join(team.lines[k] for k in sorted(team.lines)).encode()
        data: dict[str, object] = {
            "samples": {"key": key, "head": team.head, "first": first, "last": step}
        }
        data |= {"final": step == self.job.total_steps, "resumed": team.resumed}
        for rank, member in enumerate(team.members):
            upload = Upload(
                team,
                member,
                rank,
                step,
                f"state after {team.head} of rank {rank}",
                data if rank == 0 else {},
                (key, records),
            )
            self.clock.after(
                self.rng.uniform(0.2, 4),
                lambda u=upload: self.retry(lambda: self.upload(u)),  # type: ignore[misc]
            )

    def consumed(self, step: int, world: int) -> str:
        """Sum of what the ranks loaded; the same for any world, or something is wrong."""
        shares = (range(rank, self.job.micro_batches, world) for rank in range(world))
        return f"{sum(_sample_hash(step, i) for share in shares for i in share) % 2**64:x}"

    def upload(self, up: Upload) -> None:
        if up.member.dead and self.clock.now() > up.member.zombie_until_s:
            return
        if up.member.dead and not up.late:  # a zombie is slow
            up.late = True
            self.clock.after(self.rng.uniform(5, 100), lambda: self.retry(lambda: self.upload(up)))
            return
        if up.rank == 0:
            self.sim.member_store().create(*up.records)
        ref, world = Ref(up.team.epoch, up.step), len(up.team.members)
        token, files = f"m{up.member.attempt}", {"state.bin": up.state.encode()}
        self.snapshots.write(ref, up.rank, world, files, {}, up.data, token)
        self.commit(up, ref, world, self.clock.now() + 120.0)

    def commit(self, up: Upload, ref: Ref, world: int, until_s: float) -> None:
        if manifest := self.snapshots.commit(ref, world):
            self.committed(up.team, up.step)
            self.snapshots.prune(Keep(last=3))
            if not self.sim.cloud.calm and self.rng.random() < self.sim.weather.rot:
                how = self.rng.choice(("flip", "truncate", "delete"))
                self.clock.after(self.rng.uniform(1, 100), lambda: self.rot(manifest, how))
        elif self.sim.mishaps.denials and self.clock.now() < until_s and not up.member.dead:
            # other ranks are still at it, or their lists denied
            self.clock.after(2.0, lambda: self.retry(lambda: self.commit(up, ref, world, until_s)))

    def rot(self, manifest: Manifest, how: str) -> None:
        try:
            corrupt(self.sim.store, manifest.parts[0].key, how, self.rng)  # type: ignore[arg-type]
        except NotFound:
            return  # pruned already
        self.sim.emit(Damaged(self.clock.now(), manifest.ref))

    def committed(self, team: Team, step: int) -> None:
        """What the team does when a snapshot of it is durable."""
        if team.over or (step in team.committed and not team.draining):
            return
        team.committed.add(step)
        for done in [k for k in team.lines if k <= step]:
            del team.lines[done]
        for member in team.members:
            member.seen = max(member.seen or Ref(0, 0), Ref(team.epoch, step))
        if step == self.job.total_steps:
            team.over = True
            for member in team.members:
                self.leave(member, FINISHED)
        elif team.draining and step >= team.recorded:
            team.over = True
            for member in team.members:
                if team.draining == "stop":
                    self.leave(member, STOPPED)
                elif not member.ready:
                    self.leave(member, DRAINED)
            self.form_soon()


@dataclass
class Upload:
    team: Team
    member: SimulatedMember
    rank: int
    step: int
    state: str
    data: dict[str, object]
    records: tuple[str, bytes]  # key and content
    late: bool = False


def _sample_hash(step: int, micro: int) -> int:
    return ((step * 1_000_003 + micro) * 0x9E3779B97F4A7C15 + 0x1234567) & (2**64 - 1)


def expected_samples(job: SimulatedTraining, step: int) -> str:
    """What a step must have consumed: a pure function of the step."""
    return f"{sum(_sample_hash(step, i) for i in range(job.micro_batches)) % 2**64:x}"


# ---- reading -------------------------------------------------------------------------------------
class Eyes:
    """The bucket as it is read, by `member` if one is named: what restores it may get flipped
    bytes, a bad reader always does, and there are spells in which the store denies all snapshots.
    Time passes for who looks again, and for nobody else."""

    def __init__(self, sim: Simulation, inner: ObjectStore, member: SimulatedMember | None = None):
        self.sim, self.inner, self.url = sim, inner, inner.url
        self.member, self.waited_s = member, 0.0
        self.put, self.create, self.delete = inner.put, inner.create, inner.delete

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds

    def denied(self, key: str, listing: bool = False) -> bool:
        t = self.sim.clock.now() + self.waited_s
        spells = (lists for start, end, lists in self.sim.mishaps.denials if start <= t < end)
        return key.startswith("snapshots/") and any(not (listing and lists) for lists in spells)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if self.denied(key):
            raise NotFound(f"{self.url}/{key} (for a while)")
        found = self.inner.get(key, start, end)
        if self.member is None or not key.endswith("state.bin") or not found:
            return found
        damaged = self.member.bad_reader or (
            not self.sim.cloud.calm and self.sim.mishaps.reads.random() < self.sim.weather.flips
        )
        return bytes([found[0] ^ 1]) + found[1:] if damaged else found

    def list(self, prefix: str) -> list[str]:
        return [] if self.denied(prefix, listing=True) else self.inner.list(prefix)

    def size(self, key: str) -> int:
        if self.denied(key):
            raise NotFound(f"{self.url}/{key} (for a while)")
        return self.inner.size(key)


@dataclass(frozen=True)
class Restored:
    """What a world resumes from, and how long its looks took; or who leaves instead, with which
    exit code."""

    manifest: Manifest | None
    waited_s: float = 0.0
    leave: Sequence[tuple[SimulatedMember, int]] = ()


def restore(sim: Simulation, members: Sequence[SimulatedMember], epoch: int) -> Restored:
    """As a session does: the first member chooses, all read, and what they find is judged."""
    store, build = sim.store if sim.cloud.calm else sim.mishaps.faulty, sim.build
    hosts = {f"node-{m.attempt}": Eyes(sim, store, m) for m in members}
    each = {
        host: build.restore(
            build.snapshots(eyes),
            host,
            Looks(lambda eyes=eyes: eyes, eyes.sleep),  # type: ignore[misc]
            epoch=epoch,
            seen=max((m.seen for m in members if m.seen), default=None),
        )
        for host, eyes in hosts.items()
    }
    chooser = next(iter(each.values()))
    try:
        while ref := chooser.choose():
            found = {
                host: one.read(ref, lambda snapshots, look: _whole(snapshots, ref))
                for host, one in each.items()
            }
            bad = {host: why for host, (_, why) in found.items() if why}
            if not bad:
                chooser.done(ref)
                return Restored(
                    next(iter(found.values()))[0], max(eyes.waited_s for eyes in hosts.values())
                )
            if unfit := chooser.blame(ref, bad, refuted=len(bad) < len(found)):
                return Restored(
                    None, leave=[(m, UNFIT) for m in members if f"node-{m.attempt}" in unfit]
                )
    except Rewind as e:
        sim.course.refused = str(e)
        sim.member_store().create(
            layout.STOP_KEY,
            json.dumps({"reason": sim.course.refused, "by": "a member", "failed": True}).encode(),
        )
        return Restored(None, leave=[(m, STOPPED) for m in members])
    return Restored(None, max(eyes.waited_s for eyes in hosts.values()))


def _whole(snapshots: Snapshots, ref: Ref) -> Manifest:
    manifest = snapshots.load(ref)
    snapshots.verify(manifest)
    return manifest
