"""The rendezvous in the bucket, which decides which members train together. Runs in the node agent.

A generation (the code's `epoch`) is one create-only object that names members, ranks and master; a
member is one small object that its owner rewrites. No node hosts anything whose loss ends the run,
and joining needs only the run URL. Knows nothing of torch or clouds.

Generation n+1 may be created when every member of generation n has left it, said goodbye, or is
dead. Only one object of that name can ever be created, so two generations cannot begin at once; a
member that lost the race is in the winner's generation or waits for the next one. Each observer
judges deaths for itself (membership.py).

Signs of life and news come over open connections (peer_connections.py), so that the bucket is used
little while all is well: members whose lines are up rewrite their object only every `calm_s`, and
all others every `beat_s`. Its cost, the model that checks it, and its guarantees:
docs/design/RENDEZVOUS.md.

Other objects under `rdzv/` do no harm: unknown fields are ignored, missing ones have their defaults
where one is sane, and an object that still makes no sense is skipped, and reported once. The number
of a generation that such an object occupies is never used.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from harness.bucket.layout import Epoch, Member, epoch_key, member_key, newest_epoch, read_epoch
from harness.core import decoding
from harness.core.decoding import NewerProtocol
from harness.core.facts import MEMORY_RAN_OUT
from harness.core.mesh import MOST_MESHES, MeshChoice, ModelMesh, parse
from harness.core.world import BadInput, WrongProtocol, meeting_place, whole_replicas
from harness.rendezvous.membership import LIST_S, HeartbeatTimeouts, Membership, PeerHeartbeats
from harness.rendezvous.reach import Reach, told
from storage.canonical_json import BadObject
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.stores.objects import ObjectStore

# between two heartbeats in the bucket, and two lists for newcomers, while lines carry both
CALM_S = 10.0
MENTION_S = 0.05  # to wait for a heartbeat that is being written
NEWEST_S = 2.0  # between two looks for the next generation in a big world, where lines report it
SUSPECT_S = 3.0  # without a change for so long, members that have not left are checked
RETELL_S = 1.0  # between two changes of whom we reach that a big world is told
READS = 8  # objects that are read concurrently
COLD_S = 30.0  # a first generation waits so long for members that still import
TURN_S = 2.0  # how long each member waits for the one before it to create the generation
AWAY_S = 10.0  # a member that is ready goes away once it could not look for so long


NOBODY: frozenset[str] = frozenset()


def free_port(addr: str) -> int:
    with socket.socket() as s:
        s.bind((addr, 0))
        return int(s.getsockname()[1])


@dataclass
class _Moments:
    """The times of our last actions, by our own clock."""

    said_s: float = -float("inf")  # wrote our member object
    asked_s: float = -float("inf")  # checked whether the run is over
    newest_s: float = -float("inf")  # looked for the next generation
    answered_s: float = -float("inf")  # was told which generation is the newest
    reach_s: float = -float("inf")  # told whom we reach
    settled_s: float | None = None  # when all had left the last generation; None: not all have
    cold_s: float | None = None  # since when members that warm up are waited for; None: none is


class Rendezvous:
    """One member's part in the rendezvous. `beat_s`: heartbeat interval; `dead_s`: timeout after
    which a silent member is dead; `calm_s`: interval instead of `beat_s` while we train and all
    lines are up. `replica_ranks`: a world consists of whole replicas of so many ranks; `meshes`: or
    of whole copies of the model with such a device mesh; `worlds`: the only allowed numbers of
    ranks; (): any. Members that are left over wait. `halves`: a generation in which memory ran out
    is followed by one with half the micro-batch. `over`: returns whether the run is finished; then
    no generation is begun any more."""

    def __init__(
        self,
        store: ObjectStore,
        me: Member,
        lines: PeerHeartbeats,
        *,
        beat_s: float = 1.0,
        dead_s: float = 5.0,
        calm_s: float = CALM_S,
        join_window_s: float = 1.0,
        min_members: int = 1,
        replica_ranks: int = 1,
        meshes: MeshChoice | None = None,
        worlds: tuple[int, ...] = (),
        halves: bool = False,
        over: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.store, self.me, self.lines = store, replace(me, key=me.key or lines.key), lines
        self._beats = HeartbeatTimeouts(beat_s, dead_s, max(calm_s, beat_s))
        self.others = Membership(store, lines, self._beats, monotonic)
        self._join_window_s, self.min_members = join_window_s, min_members
        self._replica_ranks, self._meshes, self._worlds = replica_ranks, meshes, worlds
        self._monotonic, self._over, self._halves = monotonic, over, halves
        self.reach = Reach(me.member)
        self._last = _Moments()
        self.is_over = False  # the run was finished when the next generation could have begun
        self._newest: Epoch | None = None  # as of the last look
        self._number = 0  # the greatest number in use: by `_newest`, or by an invalid object
        self._lock = threading.Lock()
        self._stop = threading.Event()

    # ---- our own member --------------------------------------------------------------------------
    def start(self) -> None:
        """Write our member object, and send heartbeats from a thread of our own from now on.
        Without it: call `say` once and `beat_if_due` often."""
        self.others.many = ThreadPoolExecutor(READS, "members").map
        with contextlib.suppress(StoreUnavailable):  # the next heartbeat writes it
            self.say()
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    def say(self, **changes: Any) -> None:
        """Change our member, and publish it at once. Raises StoreError; followers have received the
        change even then."""
        with self._lock:
            calm = changes.get("state", self.me.state) == "in" and self.lines.all_up()
            self.me = replace(
                told(self.me, self.lines.reached()),
                beat=self.me.beat + 1,
                beat_s=self._beats.calm_s if calm else self._beats.beat_s,
                **changes,
            )
            record = self.me.encode()
            self.lines.tell(record)
            self._last.said_s = self.others.fresh_s = self._monotonic()
            self.store.put(member_key(self.me.member), record)

    def mention(self, **changes: Any) -> None:
        """Change our member, and send it over lines only; the bucket gets it with the next
        heartbeat. Does not wait for the bucket: while a heartbeat is being written, it may do
        nothing."""
        if self._lock.acquire(timeout=MENTION_S):
            try:
                me = told(self.me, self.lines.reached())
                self.me = replace(me, beat=me.beat + 1, **changes)
                self.lines.tell(self.me.encode())
            finally:
                self._lock.release()

    def leave(self, end: str) -> None:
        """Say goodbye: no member needs to wait for us. `end`: how our last generation ended."""
        self._stop.set()
        with contextlib.suppress(StoreError):  # the others will notice that we have left
            self.say(state="gone", end=end)

    def withdraw(self) -> bool:
        """Go away if we are ready, and the bucket has not told us the newest generation for
        `AWAY_S`: the others would wait for us in one that we do not know of. Return whether we
        went; only those with lines to us hear of it. The next answer makes us ready again."""
        silent_s = self._monotonic() - self._last.answered_s
        if self.me.state != "ready" or silent_s <= AWAY_S:
            return False
        self._last.settled_s = None
        self.mention(state="away", withdrawals=self.me.withdrawals + 1)
        return self.me.state == "away"

    def _heartbeat(self) -> None:
        while not self._stop.wait(self._beats.beat_s / 2):
            # a lost heartbeat is retried with the next one
            with contextlib.suppress(StoreError):
                self.beat_if_due()

    def beat_if_due(self) -> bool:
        """Rewrite our object if it is due, and return whether it was: every `beat_s`, at once when
        a line has just been lost, and every `calm_s` while calm."""
        calm = self.me.state == "in" and self.lines.all_up()
        doubt = not calm and self.me.beat_s > self._beats.beat_s
        # the interval that we announced last holds until we announce another
        promised_s = self.me.beat_s or self._beats.beat_s
        due = doubt or self._monotonic() - self._last.said_s >= promised_s
        if due:
            self.say()
        return due

    # ---- what we see -----------------------------------------------------------------------------
    def newest(self) -> Epoch:
        """Return the newest generation. Numbers have no gaps, so one missing object proves it: no
        list is needed after the first look. Raises WrongProtocol, StoreError."""
        self._last.newest_s = self._monotonic()
        if self._newest is None:
            try:
                self._newest = newest_epoch(self.store)
            except NewerProtocol as e:
                raise self._outdated(e) from e
        self._number = max(self._number, self._newest.epoch)
        while True:
            try:
                found = read_epoch(self.store, self._number + 1)
                self._check_older(found)
                self._newest, self.others.fresh_s = found, self._monotonic()
                self.others.revive(found.members)
            except NotFound:
                self._last.answered_s = self._monotonic()
                return self._newest
            except NewerProtocol as e:
                raise self._outdated(e) from e
            except ValueError as e:  # its number is in use all the same
                self.others.pass_over(epoch_key(self._number + 1), e)
            self._number += 1

    def _newest_soon(self) -> Epoch:
        """Return the newest generation. In a big world the bucket is read when a member reports a
        newer one, and else every `NEWEST_S`."""
        asked_s = self._monotonic() - self._last.newest_s
        if self._newest is None or not self.others.is_big or asked_s >= NEWEST_S:
            return self.newest()
        told = any(s.member.epoch > self._number for s in self.others.seen.values())
        return self.newest() if told else self._newest

    def _outdated(self, why: NewerProtocol) -> WrongProtocol:
        return WrongProtocol(
            f"{self.store.url} is trained by a newer version of this code, {why}: install the "
            "version that its other nodes have"
        )

    def _check_older(self, found: Epoch) -> None:
        """Raise BadObject for a generation of an older protocol than this run's: nodes of an older
        version may not know that ours differs."""
        ours = decoding.PROTOCOL
        if found.protocol < ours and self._newest and self._newest.protocol == ours:
            raise BadObject(
                f"it is of protocol {found.protocol}, this run's generations are of {ours}"
            )

    def admitted(self) -> bool:
        """Return whether we may report that we are ready. We may not while nodes with an older
        protocol may train here: they would take us for one of theirs. Raises WrongProtocol once
        one of them is seen alive."""
        return self._admits(self._newest_soon())

    def _admits(self, last: Epoch) -> bool:
        """Return `admitted` for the newest generation, `last`."""
        if not last.epoch or last.protocol == decoding.PROTOCOL:
            return True
        alive = {m.member for m in self.members()} - {self.me.member}
        here = [name for name in last.members if name in alive]
        if any(self.others.seen[name].moved for name in here):
            raise WrongProtocol(
                f"{self.store.url} is trained by {', '.join(here)} in generation {last.epoch}, "
                f"which is of protocol {last.protocol}; this node speaks {decoding.PROTOCOL}: "
                "install the version that they have, or stop the run (harness stop) and launch it "
                "anew with this version"
            )
        return not here

    def members(self) -> list[Member]:
        """Return all members that are not gone or dead, by our own observation."""
        return [m for m in self.look() if m.state not in ("gone", "dead")]

    def look(self) -> list[Member]:
        """Return all members ever seen; those found dead have state "dead". The bucket is listed
        for newcomers when a stranger calls, often while things change, else every `calm_s`."""
        self._tell_reach()
        return self.others.look(self.me)

    def watch(self, names: Iterable[str]) -> list[Member]:
        """Return these members as `look` does, without listing the bucket. Objects of members
        whose line is up are not read."""
        self._tell_reach()
        return self.others.watch(names, self.me)

    def _tell_reach(self) -> None:
        """Tell our followers whom we reach, if that has changed; in a big world, where it changes
        often and everybody hears of it, not at once."""
        now = self._monotonic()
        changed = told(self.me, self.lines.reached()).reach != self.me.reach
        if changed and (not self.others.is_big or now - self._last.reach_s >= RETELL_S):
            self._last.reach_s = now
            self.mention()

    def isolated_s(self) -> float:
        """Return for how long members that live have left us out; 0.0: not, or not surely."""
        seen = self.others.seen
        lives = any(seen[m.member].moved for m in self.reach.missed if m.member in seen)
        return self.reach.left_out_s(self._monotonic()) if lives else 0.0

    # ---- generations -----------------------------------------------------------------------------
    def waiting(self, current: Epoch, alive: list[Member]) -> list[Member]:
        """Return the members that want to join, are not in `current`, and are reached by all."""
        here = [m for m in alive if m.member in current.members and m.state not in ("gone", "dead")]
        places = {m.place for m in here}
        found = [
            m
            for m in alive
            if m.state == "ready"
            and m.member not in current.members
            and m.place in places
            and m.protocol == decoding.PROTOCOL
        ]
        staying = {m.member for m in here}
        kept = self._sort_out([*here, *sorted(found, key=lambda m: self._order(m, {}))], staying)
        return [m for m in kept if m.member not in staying]

    def _sort_out(self, members: list[Member], staying: Collection[str]) -> list[Member]:
        """Return those of `members` that may train together: `Reach.sort_out`."""
        big = self.others.is_big
        return self.reach.sort_out(members, staying, self._monotonic(), is_big=big)

    def would_grow(self, current: Epoch, waiting: list[Member], max_world: int | None) -> bool:
        """Return whether the world would have more ranks, or a better mesh, if `waiting` joined.
        Members that make no whole replica wait."""
        sizes = [*current.nproc, *(m.nproc for m in waiting)]
        mesh, found = self._choose(sizes, max_world)
        better = bool(found) and self._place(str(mesh or "")) < self._place(current.mesh)
        return better or sum(sizes[i] for i in found) > current.world

    def _choose(
        self, sizes: list[int], max_world: int | None
    ) -> tuple[ModelMesh | None, list[int]]:
        """Return the next world's mesh, and the indices of the members in it. With meshes,
        `max_world` is in replicas."""
        if self._meshes is not None:
            return self._meshes.choose(sizes, max_world, self._worlds)
        return None, whole_replicas(sizes, self._replica_ranks, max_world, self._worlds)

    def _place(self, mesh: str) -> int:
        """Return the rank of a mesh in the order of preference; the last for one not wanted."""
        found = None
        if self._meshes is not None and mesh:
            with contextlib.suppress(BadInput):  # a mesh that only another version knows
                found = self._meshes.place(parse(mesh))
        return MOST_MESHES if found is None else found

    def try_form(self, max_world: int | None) -> Epoch | None:
        """Return the newest generation if we are in it and have not taken part yet; else create
        and return the next one if its time has come, or return None."""
        last = self._newest_soon()
        if not self._admits(last):
            return None
        if self.me.state == "away":
            self.say(state="ready")
        self.others.vital = frozenset(last.members) if self.me.member in last.members else NOBODY
        if self._names_us(last):
            return last
        alive = [m for m in self.members() if m.protocol == decoding.PROTOCOL]
        by_name = {m.member: m for m in alive}
        unknown = self.others.unknown(n for n in last.members if n != self.me.member)
        unsettled = [
            by_name[n]
            for n in last.members
            if n in by_name and not self._has_left(by_name[n], last)
        ]
        before = {name: i for i, name in enumerate(last.members)}
        reached = self._reached(alive, before, {m.member for m in unsettled})
        fresh_start = not any(n in by_name for n in last.members)
        if unsettled and self._monotonic() - self.others.fresh_s > SUSPECT_S:
            self.others.suspect(n for n in last.members if n in by_name)
        cold = fresh_start and any(m.state == "warming" for m in alive)
        if unknown or unsettled or self._waits_for_cold(cold):
            self._last.settled_s = None
            return None
        where = meeting_place([(m.place, m.nproc, m.member in before) for m in reached])
        ready = [m for m in reached if m.place == where]
        sizes = [m.nproc for m in ready]
        # members that do not fit (beyond the micro-batches, or no whole replica) stay as spares
        mesh, places = self._choose(sizes, max_world)
        chosen = [ready[i] for i in places]
        turns = [m.member for m in ready]
        if self.me.member not in turns or len(ready) < self.min_members or not chosen:
            self._last.settled_s = None
            if fresh_start and self._time_to_ask():
                self.is_over = self._over()
            return None
        now = self._monotonic()
        if self._last.settled_s is None:
            self._last.settled_s = now
        # The first member in the order creates the generation; the others step in if it fails to.
        turn = turns.index(self.me.member)
        wait_s = self._join_window_s if fresh_start else 0.0
        if self._meshes is not None and self._may_be_better(str(mesh), last):
            wait_s = max(wait_s, self._meshes.wait_s)
        if now - self._last.settled_s < wait_s + TURN_S * turn or not self.reach.is_proven(now):
            return None
        if unproven := self.others.hearsay(last.members):
            self.others.suspect(unproven)
            return None
        if self.others.look_again(last.members):
            return None
        proposal = self._propose(last, ready, chosen, mesh)
        if self.me.member not in proposal.members:
            return None
        self._last.settled_s = None
        if self._over():
            self.is_over = True
            return None
        if self.store.create(epoch_key(proposal.epoch), proposal.encode()):
            return proposal
        return None  # another was quicker; the next look shows its generation

    def _reached(
        self, alive: list[Member], before: Mapping[str, int], staying: Collection[str]
    ) -> list[Member]:
        """Return the members that are ready, in order, without those in our place that cannot train
        with us or with the others there. `staying`: members of the last generation that have not
        left it."""
        found = [m for m in alive if m.state == "ready" or m.member in staying]
        found.sort(key=lambda m: self._order(m, before))
        here = [m for m in found if m.place == self.me.place]
        kept = self._sort_out(here, staying)
        return [m for m in found if m.state == "ready" and (m in kept or m not in here)]

    def _waits_for_cold(self, cold: bool) -> bool:
        """Return whether a first generation still waits for members that warm up, if there are
        such: their imports may hang."""
        if not cold:
            self._last.cold_s = None
            return False
        now = self._monotonic()
        self._last.cold_s = now if self._last.cold_s is None else self._last.cold_s
        return now - self._last.cold_s < COLD_S

    def _time_to_ask(self) -> bool:
        """Return whether to check now if the run is over, while we cannot begin and no member
        trains: often after a change, seldom otherwise."""
        now = self._monotonic()
        if due := now - self._last.asked_s >= (
            LIST_S if self.others.is_fresh() else self._beats.calm_s
        ):
            self._last.asked_s = now
        return due

    def _names_us(self, last: Epoch) -> bool:
        """Return whether we shall enter `last`."""
        is_new = self.me.member in last.members and last.epoch > self.me.epoch
        return is_new and not last.is_left_by(self.me)

    def _has_left(self, m: Member, last: Epoch) -> bool:
        return last.is_left_by(m)

    @staticmethod
    def _order(m: Member, before: Mapping[str, int]) -> tuple[int, int, str]:
        # Survivors keep their order, so that ranks (and their state in memory) move as little as
        # possible.
        return (before.get(m.member, len(before)), m.attempt, m.member)

    def _may_be_better(self, mesh: str, last: Epoch) -> bool:
        """Return whether members for a better mesh may come soon: the last world had a better one,
        or the run begins."""
        mine = self._place(mesh)
        return mine > 0 and (not last.epoch or self._place(last.mesh) < mine)

    def _propose(
        self, last: Epoch, ready: list[Member], chosen: list[Member], mesh: ModelMesh | None
    ) -> Epoch:
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
        # a member that failed in an earlier generation, and found no place since, has counted
        short = any(m.failure in MEMORY_RAN_OUT and m.epoch == last.epoch for m in failed)
        halvings = last.halvings + short if self._halves else 0
        streak, failure, step = 0, "", 0
        if failed:
            failure, step = failed[0].failure, failed[0].failure_step
            same = last.failure == failure and last.failure_step == step
            # the next try is another one with a smaller micro-batch
            streak = last.streak + 1 if same and halvings == last.halvings else 1
        first = chosen[0]
        return Epoch(
            epoch=self._number + 1,
            members=tuple(m.member for m in chosen),
            nproc=tuple(m.nproc for m in chosen),
            speeds=tuple(m.speed for m in chosen),
            addr=first.addr,
            port=first.master_port,
            reason=reason,
            streak=streak,
            failure=failure,
            failure_step=step,
            replica_ranks=self._replica_ranks if mesh is None else mesh.replica_ranks,
            mesh=str(mesh or ""),
            withdrawals=tuple(m.withdrawals for m in chosen),
            halvings=halvings,
        )
