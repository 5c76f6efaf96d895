"""Who trains together: a rendezvous in the bucket. Runs in the node agent.

Members heartbeat by rewriting one small object each; an epoch is one create-only object that names members, ranks and
master. No node hosts anything whose loss ends the run, and joining needs no more than the run URL. Knows nothing of
torch or clouds.

An epoch n+1 may be created when every member of epoch n has left it, said goodbye, or is dead. Only one object of that
name can ever be created, so two epochs at once cannot begin; whoever lost the race finds itself in the winner's epoch or
waits for the next one. Death is judged by each observer's own monotonic clock (a beat that no longer changes) and by a
direct question (a refused connection is a death at once), never by comparing clocks of two machines.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.facts import canonical, digest
from harness.world import meeting_place
from storage.objects import NotFound, ObjectStore, StoreError

MEMBERS, EPOCHS = "rdzv/members/", "rdzv/epochs/"
PROBE_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Member:
    """What a member says of itself. `epoch` is the last one it took part in (0: none yet)."""

    member: str
    state: str  # "ready": wants a new epoch | "in": its workers run | "gone": goodbye
    epoch: int
    addr: str
    probe_port: int  # answers with the member's name
    master_port: int  # free at the moment; used if this member gets rank 0
    nproc: int
    attempt: int
    speed: float = 1.0
    beat: int = 0
    end: str = ""  # how its last epoch ended for it: facts.EpochLeft.why
    failure: str = ""  # signature of the script's failure that ended its last epoch
    failure_step: int = 0  # newest committed step when it failed
    place: str = ""  # who is in one place reach each other; an epoch is in one place


@dataclass(frozen=True)
class Epoch:
    """One world. Ranks are dense: the i-th member has ranks [sum(nproc[:i]), sum(nproc[:i+1]))."""

    epoch: int
    members: tuple[str, ...]
    nproc: tuple[int, ...]
    speeds: tuple[float, ...]  # per member
    addr: str  # of rank 0's node
    port: int
    reason: str  # "start" | "grow" | "shrink" | "loss" | "restart"
    streak: int = 0  # how often in a row the script has failed like this without any new commit
    failure: str = ""
    failure_step: int = 0

    @property
    def world(self) -> int:
        return sum(self.nproc)

    def ranks(self, member: str) -> range:
        i = self.members.index(member)
        start = sum(self.nproc[:i])
        return range(start, start + self.nproc[i])


NO_EPOCH = Epoch(0, (), (), (), "", 0, "none")


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{epoch:06d}.json"


def encode_epoch(epoch: Epoch) -> bytes:
    """As it lies in the bucket; `h` is its hash, so that an audit sees a changed byte."""
    body = json.loads(json.dumps(asdict(epoch)))
    return json.dumps({**body, "h": digest(canonical(body))}).encode()


def read_epoch(store: ObjectStore, epoch: int) -> Epoch:
    body: dict[str, Any] = json.loads(store.get(epoch_key(epoch)))
    body.pop("h", None)
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
    return Epoch(**values)


def newest_epoch(store: ObjectStore) -> Epoch:
    keys = store.list(EPOCHS)
    return read_epoch(store, int(keys[-1].removeprefix(EPOCHS).removesuffix(".json"))) if keys else NO_EPOCH


def free_port(addr: str) -> int:
    with socket.socket() as s:
        s.bind((addr, 0))
        return int(s.getsockname()[1])


class ProbeServer:
    """Answers every connection with the member's name, so that peers can tell a living agent from a dead one at once."""

    def __init__(self, name: str, addr: str):
        self._name = name.encode()
        self._socket = socket.create_server((addr, 0), backlog=64)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="probe", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(OSError), connection:
                connection.settimeout(PROBE_TIMEOUT_S)
                connection.sendall(self._name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._socket.close()


def probe(member: Member) -> bool | None:
    """True: it answered. False: its machine says that nobody is there. None: no answer (cut off, frozen, slow)."""
    try:
        with socket.create_connection((member.addr, member.probe_port), PROBE_TIMEOUT_S) as s:
            s.settimeout(PROBE_TIMEOUT_S)
            found = s.recv(256)
    except ConnectionError:
        return False
    except OSError:
        return None
    return found == member.member.encode()


class Rendezvous:
    """One member's view. `beat_s`: how often it says that it lives; `dead_s`: silence that means death."""

    def __init__(
        self,
        store: ObjectStore,
        me: Member,
        *,
        beat_s: float = 1.0,
        dead_s: float = 5.0,
        join_window_s: float = 1.0,
        min_members: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.store, self.me = store, me
        self._beat_s, self._dead_s, self._join_window_s, self._min_members = beat_s, dead_s, join_window_s, min_members
        self._monotonic = monotonic
        self._seen: dict[str, tuple[int, float]] = {}  # member -> (beat, when it changed, by our own clock)
        self._dead: dict[str, int] = {}  # member -> beat at which it was found dead
        self._settled_since: float | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.say()
        self._thread.start()

    def say(self, **changes: Any) -> None:
        """Change what we say of ourselves, at once."""
        with self._lock:
            self.me = replace(self.me, beat=self.me.beat + 1, **changes)
            self.store.put(f"{MEMBERS}{self.me.member}.json", json.dumps(asdict(self.me)).encode())

    def leave(self, end: str) -> None:
        """Goodbye: nobody needs to wait for us any more. `end`: how our last epoch ended."""
        self._stop.set()
        with contextlib.suppress(StoreError):  # we are leaving anyway; the others will notice
            self.say(state="gone", end=end)

    def _heartbeat(self) -> None:
        while not self._stop.wait(self._beat_s):
            with contextlib.suppress(StoreError):  # a missed beat is what silence means; the next one may get through
                self.say()

    def members(self) -> list[Member]:
        """Everybody who is not gone or dead, by our own observation."""
        return [m for m in self.look() if m.state not in ("gone", "dead")]

    def look(self) -> list[Member]:
        """Everybody who ever said something; those found dead have state "dead"."""
        found = []
        for key in self.store.list(MEMBERS):
            try:
                member = Member(**json.loads(self.store.get(key)))
            except NotFound:
                continue
            if member.state != "gone" and member.member != self.me.member and not self._lives(member):
                member = replace(member, state="dead")
            found.append(member)
        return found

    def _lives(self, member: Member) -> bool:
        now = self._monotonic()
        if self._dead.get(member.member) == member.beat:
            return False
        known = self._seen.get(member.member)
        if known is None or known[0] != member.beat:
            first_sight = known is None
            self._seen[member.member] = (member.beat, now)
            if not first_sight:
                return True
            answer = probe(member)  # an object that we never saw change may be years old
            if answer is True:
                return True
        elif now - known[1] < 2 * self._beat_s:
            return True
        else:
            answer = probe(member)
            if answer is not False and now - known[1] < self._dead_s:
                return True
        self._dead[member.member] = member.beat
        return False

    def ask(self, member: Member) -> bool:
        """Is it there right now? For when there is reason to doubt; a refused connection is believed at once."""
        if probe(member) is False:
            self._dead[member.member] = member.beat
            return False
        return True

    def waiting(self, current: Epoch, alive: list[Member]) -> list[Member]:
        """Those who want in and are not in `current`."""
        here = {m.place for m in alive if m.member in current.members}
        return [m for m in alive if m.state == "ready" and m.member not in current.members and m.place in here]

    def try_form(self, max_world: int | None, doubtful: bool = False) -> Epoch | None:
        """The newest epoch if we are in it and have not taken part yet; else create the next one when its time has come.

        `doubtful`: the last epoch broke, so ask its silent members directly instead of waiting for their silence.
        """
        last = newest_epoch(self.store)
        if self.me.member in last.members and last.epoch > self.me.epoch:
            return last
        alive = self.members()
        by_name = {m.member: m for m in alive}
        unsettled = [by_name[n] for n in last.members if n in by_name and not self._has_left(by_name[n], last.epoch)]
        if doubtful:
            unsettled = [m for m in unsettled if self.ask(m)]
        if unsettled:
            self._settled_since = None
            return None
        ready = [m for m in alive if m.state == "ready"]
        where = meeting_place([(m.place, m.nproc, m.member in last.members) for m in sorted(ready, key=lambda m: self._order(m, last))])
        ready = [m for m in ready if m.place == where]
        if self.me.place != where or len(ready) < self._min_members:
            self._settled_since = None
            return None
        now = self._monotonic()
        if self._settled_since is None:
            self._settled_since = now
        fresh_start = last.epoch == 0 or not any(m.member in last.members for m in ready)
        # Whoever comes first in the order creates the epoch; the others step in should it fail to.
        order = sorted(ready, key=lambda m: self._order(m, last))
        turn = next(i for i, m in enumerate(order) if m.member == self.me.member)
        if now - self._settled_since < (self._join_window_s if fresh_start else 0.0) + 2.0 * turn:
            return None
        proposal = self._propose(last, order, max_world)
        if self.me.member not in proposal.members:
            return None
        self._settled_since = None
        if self.store.create(epoch_key(proposal.epoch), encode_epoch(proposal)):
            return proposal
        return None  # another was quicker; the next look shows its epoch

    def _has_left(self, m: Member, epoch: int) -> bool:
        return m.state == "ready" and m.epoch >= epoch

    @staticmethod
    def _order(m: Member, last: Epoch) -> tuple[int, int, str]:
        # Survivors keep their order, so that ranks (and what they hold in memory) move as little as possible.
        known = last.members.index(m.member) if m.member in last.members else len(last.members)
        return (known, m.attempt, m.member)

    def _propose(self, last: Epoch, ready: list[Member], max_world: int | None) -> Epoch:
        chosen: list[Member] = []
        for m in ready:  # what does not fit (more ranks than micro-batches) stays as a spare
            if max_world is None or sum(c.nproc for c in chosen) + m.nproc <= max_world:
                chosen.append(m)
        failed = [m for m in ready if m.failure]
        if last.epoch == 0 or not any(m.member in last.members for m in chosen):
            reason = "start"
        elif failed:
            reason = "restart"
        elif len(chosen) > len(last.members):
            reason = "grow"
        elif set(last.members) == {m.member for m in chosen}:
            reason = "restart"
        elif any(m.end in ("peer-lost", "killed") for m in chosen):
            reason = "loss"
        else:
            reason = "shrink"
        streak, failure, step = 0, "", 0
        if failed:
            failure, step = failed[0].failure, failed[0].failure_step
            same = last.failure == failure and last.failure_step == step
            streak = last.streak + 1 if same else 1
        first = chosen[0] if chosen else self.me
        return Epoch(
            epoch=last.epoch + 1,
            members=tuple(m.member for m in chosen),
            nproc=tuple(m.nproc for m in chosen),
            speeds=tuple(m.speed for m in chosen),
            addr=first.addr,
            port=first.master_port,
            reason=reason,
            streak=streak,
            failure=failure,
            failure_step=step,
        )
