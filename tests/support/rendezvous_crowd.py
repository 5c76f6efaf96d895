"""Many members under one virtual clock: the real rendezvous and the real lines, a bucket and a
network in memory. One thread, no sockets; the same seed is the same history.

A member's round of its loop runs at one moment; its requests take time one after the other, and
what it writes is seen by others when its request has ended. Its heartbeat and its reads of many
objects go beside, as in the agent.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.agent import verdicts
from harness.bucket.layout import EPOCHS, NO_EPOCH, Epoch, Member
from harness.rendezvous.peer_heartbeats import (
    Dial,
    HangUp,
    HeartbeatProtocol,
    Heed,
    LineAct,
    Transmit,
)
from harness.rendezvous.rendezvous import READS, Rendezvous
from storage.errors import NotFound
from support.system.system_network import SimulatedHeartbeats

REQUEST_S = 0.030  # one request of the bucket
ONE_WAY_S = 0.001  # over the network
TICK_S, PAUSE_S = 0.3, 0.02  # of the agent's loop: at least, and at most so often
BEAT_S, DEAD_S = 1.0, 5.0
END_WORKERS_S = 0.1


class Scheduler:
    """What happens next, in order of time."""

    def __init__(self, seed: int):
        self.now, self.rng = 0.0, random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), do))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until it is so (looked at once per virtual 10 ms); False: not by `limit_s`."""
        looked_s = -1.0
        while self._heap and self._heap[0][0] <= limit_s:
            if self.now - looked_s >= 0.01:
                looked_s = self.now
                if until():
                    return True
            self.now, _, do = heapq.heappop(self._heap)
            do()
        self.now = max(self.now, limit_s)
        return until()


class CrowdBucket:
    """One bucket for all. Writes are seen when their time has come."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._coming: list[tuple[float, int, str, bytes | None]] = []
        self._numbers = itertools.count()
        self._created: set[str] = set()

    def at(self, now: float) -> dict[str, bytes]:
        while self._coming and self._coming[0][0] <= now:
            _, _, key, data = heapq.heappop(self._coming)
            if data is None:
                self.objects.pop(key, None)
            else:
                self.objects[key] = data
        return self.objects

    def write(self, when_s: float, key: str, data: bytes | None) -> None:
        heapq.heappush(self._coming, (when_s, next(self._numbers), key, data))

    def create(self, when_s: float, key: str, data: bytes) -> bool:
        if key in self.objects or key in self._created:
            return False
        self._created.add(key)
        self.write(when_s, key, data)
        return True


class CrowdStore:
    """The bucket as one member sees it. Each request takes `REQUEST_S` of `busy_s`."""

    url = "memory://crowd"

    def __init__(self, bucket: CrowdBucket, scheduler: Scheduler):
        self._bucket, self._scheduler = bucket, scheduler
        self.busy_s, self.counts, self.reachable = 0.0, Counter[str](), True

    def now(self) -> float:
        return self._scheduler.now + self.busy_s

    def many(self, call: Callable[[str], Any], names: Iterable[str]) -> Iterable[Any]:
        """As a pool of threads."""
        begun_s, found = self.busy_s, []
        for name in names:
            self.busy_s = begun_s
            found.append(call(name))
        self.busy_s = begun_s + -(-len(found) // READS) * REQUEST_S
        return found

    def _request(self, kind: str) -> dict[str, bytes]:
        self.counts[kind] += 1
        self.busy_s += REQUEST_S
        return self._bucket.at(self.now() - REQUEST_S / 2)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        objects = self._request("get")
        if key not in objects:
            raise NotFound(f"{self.url}/{key}")
        return objects[key][start:end]

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._request("put")
        self._bucket.write(self.now(), key, bytes(data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self._request("put")
        return self._bucket.create(self.now(), key, bytes(data))

    def list(self, prefix: str) -> list[str]:
        return sorted(k for k in self._request("list") if k.startswith(prefix))

    def delete(self, key: str) -> None:
        self._request("delete")
        self._bucket.write(self.now(), key, None)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        data = self.get(key, start, start + buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)


@dataclass
class CrowdLife:
    """What there is of a member."""

    alive: bool = True  # its process
    host_up: bool = True
    ready: bool = False


@dataclass
class CrowdDue:
    """When a member does what; in an epoch, since when others wait or have left."""

    round_s: float = 0.0
    lines_s: float = float("inf")
    waiting_s: float | None = None
    entered_s: float = 0.0  # entered our last epoch
    left_s: float | None = None


@dataclass
class CrowdMember(SimulatedHeartbeats):
    """One simulated node: its lines, its rendezvous, and the agent's loop around them."""

    crowd: Crowd
    name: str
    port: int
    protocol: HeartbeatProtocol = field(init=False)
    rendezvous: Rendezvous = field(init=False)
    store: CrowdStore = field(init=False)
    key: str = ""
    life: CrowdLife = field(default_factory=CrowdLife)
    due: CrowdDue = field(default_factory=CrowdDue)
    epoch: Epoch = NO_EPOCH
    history: list[tuple[float, str]] = field(default_factory=list)
    buried: set[str] = field(default_factory=set)  # whom it ever found dead
    peers: dict[int, tuple[CrowdMember, int]] = field(default_factory=dict)  # by connection
    sent: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        clock = self.crowd.scheduler
        self.key = f"{clock.rng.getrandbits(64):016x}"
        self.protocol = HeartbeatProtocol(self.name, BEAT_S / 2, clock.now, self.key)
        self.store = CrowdStore(self.crowd.bucket, clock)
        attempt = int(self.name[1:5])
        me = Member(self.name, "warming", 0, "crowd", self.port, 29500, nproc=8, attempt=attempt)
        self.rendezvous = Rendezvous(
            self.store,
            me,
            self,
            beat_s=BEAT_S,
            dead_s=DEAD_S,
            min_members=self.crowd.min_members,
            monotonic=self.store.now,
        )
        self.rendezvous.others.many = self.store.many

    # ---- what the rendezvous needs of lines ------------------------------------------------------
    def now(self) -> float:
        return self.crowd.scheduler.now

    def doubt(self, name: str) -> None:
        self.buried.add(name)
        super().doubt(name)

    # ---- the hands of its lines ------------------------------------------------------------------
    def act(self) -> None:
        for act in self.protocol.take():
            self._do(act)
        clock = self.crowd.scheduler
        due_s = clock.now + max(self.protocol.wait_s(clock.now), 0.001)
        if due_s < self.due.lines_s - 1e-9:
            self.due.lines_s = due_s
            clock.after(due_s - clock.now, self.tick_lines)

    def _do(self, act: LineAct) -> None:
        match act:
            case Dial(conn, (_, port)):
                self.sent["dials"] += 1
                self.crowd.dial(self, conn, port)
            case Transmit(conn, data):
                self.sent["bytes"] += len(data)
                self.sent["sends"] += 1
                self.crowd.send(self, conn, data)
            case HangUp(conn):
                self.crowd.hang_up(self, conn)
            case Heed():
                self.wake()

    def tick_lines(self) -> None:
        clock = self.crowd.scheduler
        if self.life.alive and clock.now >= self.due.lines_s - 1e-9:
            self.due.lines_s = float("inf")
            self.protocol.tick(clock.now)
            self.act()

    # ---- the agent -------------------------------------------------------------------------------
    def start(self, ready_after_s: float) -> None:
        clock = self.crowd.scheduler
        self._at_once(self.rendezvous.say)
        self.act()
        clock.after(BEAT_S / 2, self._beat)
        clock.after(ready_after_s, self._become_ready)
        self.due.round_s = clock.now
        clock.after(0.0, self._round)

    def wake(self) -> None:
        """Something was heard: look at the next round of the loop."""
        clock = self.crowd.scheduler
        at_s = max(clock.now + PAUSE_S, clock.now + self.store.busy_s)
        if at_s < self.due.round_s - 1e-9:
            self.due.round_s = at_s
            clock.after(at_s - clock.now, self._round)

    def _at_once(self, do: Callable[[], Any]) -> None:
        """Beside the loop, in a thread of its own."""
        busy_s, self.store.busy_s = self.store.busy_s, 0.0
        do()
        self.store.busy_s = busy_s

    def _beat(self) -> None:
        if self.life.alive:
            self._at_once(self.rendezvous.beat_if_due)
            self.crowd.scheduler.after(BEAT_S / 2, self._beat)

    def _become_ready(self) -> None:
        if self.life.alive:
            self.life.ready = True
            self._at_once(lambda: self.rendezvous.say(state="ready"))
            self.wake()

    def _round(self) -> None:
        clock = self.crowd.scheduler
        if not self.life.alive or clock.now < self.due.round_s - 1e-9:
            return
        self.store.busy_s = 0.0
        self.due.round_s = clock.now + 3600.0
        if self.rendezvous.me.state == "in":
            self._watch_peers()
        elif self.life.ready:
            epoch = self.rendezvous.try_form(None)
            if epoch is not None:
                self._enter(epoch)
        else:
            self.rendezvous.look()
        self.crowd.rounds += 1
        busy_s, self.store.busy_s = self.store.busy_s, 0.0
        self.due.round_s = clock.now + busy_s + (TICK_S if busy_s < TICK_S else PAUSE_S)
        clock.after(self.due.round_s - clock.now, self._round)

    def _enter(self, epoch: Epoch) -> None:
        self.rendezvous.say(state="in", epoch=epoch.epoch, end="")
        self.epoch = epoch
        self.due.waiting_s = self.due.left_s = None
        self.due.entered_s = self.store.now()
        self.history.append((self.store.now(), f"in {epoch.epoch} of {len(epoch.members)}"))

    def _watch_peers(self) -> None:
        epoch, now = self.epoch, self.store.now()
        dead = {n for n in epoch.members if n in self.rendezvous.others.seen
                and self.rendezvous.others.seen[n].dead}  # fmt: skip
        first = next(n for n in epoch.members if n == self.name or n not in dead)
        look = first == self.name
        found = self.rendezvous.look() if look else self.rendezvous.watch(epoch.members)
        everybody = {m.member: m for m in found}
        peers = [everybody[n] for n in epoch.members if n != self.name and n in everybody]
        said = verdicts.hear_peers(epoch, peers, self.due.entered_s, self.due.left_s, now)
        self.due.left_s = said.since_s
        # workers agree with their peers at once to leave
        has_left = any(p.state in ("ready", "gone") and p.epoch >= epoch.epoch for p in peers)
        if said.why or has_left:
            self._leave("peer-lost" if said.why else "resize")
        elif look:
            alive = [m for m in everybody.values() if m.state not in ("gone", "dead")]
            waiting = self.rendezvous.waiting(epoch, alive)
            self.due.waiting_s = (self.due.waiting_s or now) if waiting else None
            if self.due.waiting_s and verdicts.make_room(alive, "", now - self.due.waiting_s):
                self._leave("resize")

    def _leave(self, end: str) -> None:
        self.store.busy_s += END_WORKERS_S
        self.rendezvous.say(state="ready", end=end)
        self.history.append((self.store.now(), f"left {self.epoch.epoch}: {end}"))


class Crowd:
    """All members, and the network between them."""

    def __init__(self, seed: int = 0, min_members: int = 1):
        self.scheduler, self.bucket, self.min_members = Scheduler(seed), CrowdBucket(), min_members
        self.members: dict[str, CrowdMember] = {}
        self._ports: dict[int, CrowdMember] = {}
        self.cut: set[tuple[str, str]] = set()  # from whom to whom nothing comes through
        self.rounds = 0

    def join(self, name: str, ready_after_s: float = 0.0) -> CrowdMember:
        member = CrowdMember(self, name, 10_000 + len(self.members))
        self.members[name] = self._ports[member.port] = member
        member.start(ready_after_s)
        return member

    def kill(self, name: str, host: bool = False) -> None:
        """End its process; with `host`, its whole machine: then nobody answers for it."""
        member = self.members[name]
        member.life = CrowdLife(alive=False, host_up=not host)
        peers, member.peers = member.peers, {}
        for other, conn in peers.values():
            if host:
                continue
            self._deliver(member, other, functools.partial(self.ended, other, conn))

    def living(self) -> list[CrowdMember]:
        return [m for m in self.members.values() if m.life.alive]

    def requests(self) -> Counter[str]:
        total = Counter[str]()
        for member in self.members.values():
            total += member.store.counts
        return total

    # ---- the network -----------------------------------------------------------------------------
    def _open(self, a: CrowdMember, b: CrowdMember) -> bool:
        """Does a's word come to b, and b's answer to a?"""
        return (a.name, b.name) not in self.cut and (b.name, a.name) not in self.cut

    def _deliver(self, a: CrowdMember, b: CrowdMember, do: Callable[[], None]) -> None:
        if self._open(a, b):
            self.scheduler.after(ONE_WAY_S, do)

    def dial(self, a: CrowdMember, conn: int, port: int) -> None:
        b = self._ports.get(port)
        if b is None or not b.life.host_up or not self._open(a, b):
            return  # no answer
        self.scheduler.after(ONE_WAY_S, lambda: self._accept(a, conn, b))

    def _accept(self, a: CrowdMember, conn: int, b: CrowdMember) -> None:
        if not b.life.alive:
            if b.life.host_up:
                self.scheduler.after(ONE_WAY_S, lambda: self.ended(a, conn, refused=True))
            return
        if not a.life.alive:
            return
        theirs = b.protocol.accepted(self.scheduler.now, a.name)
        b.peers[theirs], a.peers[conn] = (a, conn), (b, theirs)
        b.act()
        self.scheduler.after(ONE_WAY_S, lambda: self._connected(a, conn))

    def _connected(self, a: CrowdMember, conn: int) -> None:
        if a.life.alive and conn in a.peers:
            a.protocol.connected(conn, self.scheduler.now)
            a.act()

    def send(self, a: CrowdMember, conn: int, data: bytes) -> None:
        if conn in a.peers:
            b, theirs = a.peers[conn]
            self._deliver(a, b, lambda: self._receive(b, theirs, data))

    def _receive(self, b: CrowdMember, conn: int, data: bytes) -> None:
        if b.life.alive and conn in b.peers:
            b.protocol.received(conn, data, self.scheduler.now)
            b.act()

    def hang_up(self, a: CrowdMember, conn: int) -> None:
        if conn in a.peers:
            b, theirs = a.peers.pop(conn)
            self._deliver(a, b, lambda: self.ended(b, theirs))

    def ended(self, b: CrowdMember, conn: int, refused: bool = False) -> None:
        b.peers.pop(conn, None)
        if b.life.alive:
            b.protocol.closed(conn, self.scheduler.now, refused)
            b.act()

    # ---- what is asked of a whole crowd ----------------------------------------------------------
    def trains(self, names: Collection[str]) -> bool:
        """Are exactly these in one epoch?"""
        wanted = set(names)
        return all(
            self.members[n].rendezvous.me.state == "in"
            and set(self.members[n].epoch.members) == wanted
            for n in wanted
        )

    def epochs(self) -> list[Epoch]:
        objects = self.bucket.at(self.scheduler.now)
        return [Epoch.decode(objects[key]) for key in sorted(objects) if key.startswith(EPOCHS)]
