"""The node agent: one per machine, run by `harness run -- script.py`.

It joins the rendezvous, starts the script's workers with torchrun's environment, watches for
notices, and writes a mark to request something of the workers; they agree at a step boundary,
snapshot and leave. It knows nothing of torch (so it starts at once) or SkyPilot. It starts plain
processes, not torch elastic's PContext, which kills workers that are still saving.

This file is the loop: it passes events to `node_state.py`, which decides what the node does, and
evidence to `verdicts.py`, which judges how a generation (the code's `epoch`) ended; and it carries
out their decisions. It reaches its machine only through `host.py`, so the simulation runs this
file.

Exit codes: see docs/TROUBLE.md.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from harness.agent import flight_recorder, node_state, verdicts
from harness.agent.beside import Preparation
from harness.agent.host import EventInbox, Host, WorkerPool
from harness.agent.node_state import AgentAct, AgentEvent, AgentState, NodePhase, Now
from harness.agent.run_orders import RunOrders, UnreadableEnd
from harness.agent.verdicts import CHANGING, End, Fruitless
from harness.agent.workers import KILL_S, AgentConfig
from harness.bucket.journal import Journal
from harness.bucket.layout import NO_EPOCH, Epoch, Member
from harness.core.facts import (
    MEMORY_RAN_OUT,
    NOT_ELASTIC,
    AgentEnded,
    AgentStarted,
    EpochLeft,
    EpochStarted,
    GraceSpent,
    HelperEnded,
    NoticeAcknowledged,
    Warned,
)
from harness.core.world import (
    DRAINED,
    FENCED,
    FINISHED,
    REFUSED,
    RESIZE,
    STOPPED,
    UNFIT,
    WrongProtocol,
)
from harness.node.forkserver import CLOSE_S
from harness.node.heartbeat import WAITS_FOR_SNAPSHOTS, WorkerPhase
from harness.node.marks import Want, kept_step
from harness.notices.notice import NoticeSource
from harness.rendezvous.reach import LEAVE_S, LOST_AFTER, LostWays
from harness.rendezvous.rendezvous import Rendezvous
from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.restore import PAUSES_S
from storage.stores.objects import ObjectStore

# A node's memory: its time in one generation (the code's `epoch`), its generations so far, and
# when to do what next.

# a longer gap between two rounds means that this node was suspended: that time is not silence
FROZEN_S = 3.0

# a script that has no session so long after its start is said to have none
SESSION_WITHIN_S = 40.0
NO_SESSION = (
    f"{NOT_ELASTIC}. The script has no session: its work is lost with its node, and other nodes "
    "start it from the beginning; call harness.attach(), or use a trainer that docs/TRAINERS.md "
    "names"
)
UNWANTED = f"{NO_SESSION}; if this is wanted: harness launch --unmanaged"


@dataclass
class Due:
    """The times of the next looks, by our own clock. `round_s`: time of the last round."""

    round_s: float
    _next_s: dict[str, float] = field(default_factory=dict)

    def now(self, what: str, now: float, every_s: float) -> bool:
        """Return whether `what` is due; if so, it is due again in `every_s`."""
        if now < self._next_s.get(what, 0.0):
            return False
        self._next_s[what] = now + every_s
        return True

    def at_once(self, what: str) -> None:
        self._next_s[what] = 0.0

    def slept_s(self, now: float) -> float:
        """Return for how long we, or the machine, were suspended since the last round; 0.0: not."""
        gap_s, self.round_s = now - self.round_s, now
        return gap_s if gap_s > FROZEN_S else 0.0


@dataclass
class EpochTimes:
    """Our time in one generation. All times are by our own clock; None: not yet."""

    epoch: Epoch = NO_EPOCH
    entered_s: float = 0.0
    absent: set[str] = field(default_factory=set)  # members of it that are gone or dead
    lost_ways: LostWays = field(default_factory=LostWays)
    unanswered_s: float = -float("inf")  # when the bucket last did not answer in time
    first_end_s: float | None = None  # when the first of our workers ended
    peer_left_s: float | None = None
    waiting_since_s: float | None = None  # since when a member has waited to join
    # the request that a script without a session got by a signal, and when
    told: Want = Want.NOTHING
    told_s: float | None = None


@dataclass
class EpochHistory:
    """The memory of this node's generations."""

    left_s: float  # when we left the last one
    beats: bool = False  # our heartbeat in the bucket has begun
    reason: str = ""  # of our own end, in words
    end: End | None = None  # of the last generation
    tail: tuple[str, ...] = ()  # last lines of the log of the worker that failed
    said: str = ""  # the text of its failure
    fruitless: Fruitless = field(default_factory=Fruitless)
    sessionless_told: bool = False  # it was said that the script has no session
    how_far_s: float | None = None  # when to say how far this node, which must leave, has come
    unled: bool = False  # this node leaves since nobody leads the run
    isolated_told: int = -1  # the last generation at which it was said that nobody reaches us
    prepares: Preparation | None = None  # beside others, as a newcomer
    # changes of our member once our uploads are done, and when they are published anyway
    ready: dict[str, Any] = field(default_factory=dict)
    settle_until_s: float = 0.0


# Notification of a script without a session that the world changes: a signal, on every node.


def tell_script(
    workers: WorkerPool,
    rendezvous: Rendezvous,
    stay: EpochTimes,
    want: Want,
    signal: str,
    now: float,
) -> None:
    """Notify the workers and the peers, once in a generation. `want`: RESIZE or STOP; `signal`: its
    name; "": none is configured, and nothing is sent (a session may be starting)."""
    if not signal or workers.attached() or stay.told_s is not None:
        return
    if rendezvous.me.end != CHANGING:
        rendezvous.mention(end=CHANGING)
    workers.signal(signal)
    stay.told, stay.told_s = want, now


def why_overdue(stay: EpochTimes, bound_s: float, now: float) -> str:
    """Return why the workers must be ended now although none has failed; "" if not."""
    if stay.told_s is None or now - stay.told_s <= bound_s:
        return ""
    return f"its script was told {bound_s:.0f} s ago that the world changes, and has not ended"


FENCE_S = 2.0  # between two looks for a newer generation while all lines to peers are up
PAUSE_S = 0.02  # between two turns
ANSWER_AGAIN_S = 1.0  # between two tries to commit the run's end while the bucket does not answer
HOW_FAR_S = 3.0  # after a notice: a node that is still here says why
LAST_WORDS_S = 10.0  # for all that an agent writes into the bucket once its loop is over
UPLOADER_S = 2.0  # for the uploader to end by itself
KILLED = -signal.SIGKILL  # exit code that counts for workers that we end


class Agent:
    """One node's part in a run. `execute` returns the exit code; it is `begin`, turns, `close`."""

    def __init__(
        self, config: AgentConfig, store: ObjectStore, sources: list[NoticeSource], host: Host
    ):
        c, now, store = config, host.monotonic(), host.prompt(store)
        self.config, self._host = c, host
        self.name = f"m{c.attempt:04d}-{host.token()}"
        self.journal = Journal(store, f"agent-{self.name}", host.wall)
        self._run = RunOrders(
            store, self.name, c.attempt, c.timing.leaderless_s, c.worlds.replica_ranks
        )
        self._workers = host.workers(c, self.name, self.journal.record)
        self._helpers = host.helpers(c)
        self._hearing = EventInbox(sources)
        v = c.leaving
        times_s = (v.grace_s, v.drain_lead_s, v.doubt_ahead_s, c.fitness.unfit_grace_s)
        self._node = AgentState(node_state.Rules(self.name, *times_s), now + node_state.WARM_S)
        self._stay, self._past, self._due = EpochTimes(), EpochHistory(left_s=now), Due(now)

    # ---- life ------------------------------------------------------------------------------------
    def execute(self) -> int:
        self.begin()
        code = FENCED
        try:
            while (ended := self.turn()) is None:
                self._host.sleep(PAUSE_S)
            code = ended
        finally:
            self.close(code)
        return code

    @property
    def unled(self) -> bool:
        """Return whether this node leaves, or left, since nobody leads the run."""
        return self._past.unled

    def begin(self) -> None:
        c, host = self.config, self._host
        self._workers.warm_up()  # first: its imports take longest
        self._open()
        self.journal.record(
            AgentStarted(self.name, c.attempt, host.name, c.nproc, c.hardware.accelerator, host.pid)
        )
        heard = self._hearing
        heard.listening = host.listen(c, heard.sources, heard.inbox.put)
        heard.hardware = host.measure(c, self.name, self.journal.record)

    def _open(self) -> None:
        """Open the uploader, the lines to the other members, and the rendezvous."""
        c, host = self.config, self._host
        self._uploads = host.uploads(c, self.name)
        self._lines = host.lines(c, self.name)
        me = Member(
            *(self.name, "warming", 0, c.addr, self._lines.port, host.free_port(c.addr)),
            nproc=c.nproc, attempt=c.attempt, speed=c.hardware.speed, place=c.place,
        )  # fmt: skip
        self.rendezvous = Rendezvous(
            self._run.store,
            me,
            self._lines,
            beat_s=c.timing.beat_s,
            dead_s=c.timing.dead_s,
            min_members=c.worlds.min_members,
            replica_ranks=c.worlds.replica_ranks,
            meshes=c.worlds.meshes,
            worlds=c.worlds.ranks,
            halves=c.worlds.halves,
            over=self._run.is_over,
            monotonic=host.monotonic,
        )

    def turn(self) -> int | None:
        """Run everything that is due once. Return the exit code if this node is done, else None."""
        try:
            if not self._past.beats:
                self._host.start_beats(self.rendezvous)
                self._past.beats = True
            return self._turn()
        except (StoreError, WrongProtocol) as e:
            self._past.reason = str(e)
            self._host.say(str(e), wrong=True)
            return REFUSED if isinstance(e, WrongProtocol) else FENCED

    def close(self, code: int) -> None:
        self._hearing.stop()
        self._workers.close(self._part_s(CLOSE_S))
        self._uploads.settle(self._settle_s())
        self._host.last_words(self._part_s(LAST_WORDS_S))
        self.rendezvous.leave(end=self._past.end.value if self._past.end else "")
        if code in (DRAINED, FINISHED):  # no other member waits for us now
            self._uploads.settle(self._settle_s(), near=code == DRAINED)
            self._acknowledge()
        self._uploads.close(self._part_s(UPLOADER_S))
        self._lines.close()
        self._host.last_words(self._part_s(LAST_WORDS_S))
        self.journal.record(AgentEnded(self.name, code, self._past.reason))
        with contextlib.suppress(StoreError):  # helpers that end now may report this fact
            self.journal.flush()
        self._helpers.end(wait_s=45.0 if code == FINISHED else self._part_s(3.0))
        with contextlib.suppress(StoreError):
            self.journal.flush()

    def _part_s(self, most_s: float) -> float:
        """Return how long one of our last acts may take: `most_s`, but no more than a third of what
        is left of a signal's grace."""
        return self._node.left_s(self._host.monotonic(), 3 * most_s) / 3

    def _acknowledge(self) -> None:
        """Acknowledge preemption notices where possible: our snapshot is committed and our workers
        have ended, so the cloud need not wait any longer."""
        if not self.config.leaving.acknowledge or self._uploads.busy():
            return
        for notice in self._node.notices.values():
            source = next((s for s in self._hearing.sources if s.name == notice.source), None)
            if notice.acknowledge and source is not None:
                heard = source.acknowledge(notice)
                self.journal.record(NoticeAcknowledged(self.name, notice.id, heard))

    def _turn(self) -> int | None:
        timing = self.config.timing
        self._hear()
        self._feed(node_state.Tick())
        now = self._host.monotonic()
        if slept_s := self._due.slept_s(now):
            self._workers.forgive(slept_s)  # this node was suspended: they did not hang
            self._feed(node_state.Slept(slept_s))
        in_epoch = self._node.life is NodePhase.IN
        if in_epoch:
            self._say_how_far(now)
        code = self._watch_workers(now) if in_epoch else self._watch_itself(now)
        if self._lines.changed.is_set():
            self._due.at_once("tick")
        if code is None and self._due.now("tick", now, timing.tick_s):
            self._lines.changed.clear()
            # training goes on while the bucket does not answer
            try:
                self._run.tell_doubt(self._node, self._node.doubtful(self._host.wall()))
                self._heed_leader(now)
                in_epoch = self._node.life is NodePhase.IN
                code = self._watch_peers(now) if in_epoch else self._seek_epoch(now)
            except StoreUnavailable:
                self._stay.unanswered_s = now
                if self.rendezvous.withdraw():
                    self._host.say("the bucket does not answer: others train without this node")
        if self._due.now("flush", now, timing.flush_s):
            self._workers.mark.write_again()
            for died in [*self._helpers.look(now), *self._uploads.look(now)]:
                self.journal.record(HelperEnded(self.name, *died))
                self._host.say("the {} ended with status {}: {}".format(*died), wrong=True)
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()
        return code

    def _hear(self) -> None:
        while not self._hearing.inbox.empty():
            self._feed(self._hearing.inbox.get_nowait())

    def _watch_itself(self, now: float) -> int | None:
        """Return the exit code if this node, which is in no generation, must end, whatever the
        bucket says."""
        if self._node.grace_over(now):
            self._past.reason = self._node.leaving
            return self._node.gone_code
        if self._node.too_cold(now, self._workers.warm()):
            why = f"what workers import was not there after {node_state.WARM_S:.0f} s: it hangs"
            self._feed(node_state.FoundUnfit(why))
            self._past.reason = f"unfit: {why}"
            self._host.say(self._past.reason, wrong=True)
            return UNFIT
        return None

    def _saving(self) -> bool:
        """Return whether a snapshot is on its way."""
        waits = (WorkerPhase.STAGING, *WAITS_FOR_SNAPSHOTS)
        in_epoch = self._node.life is NodePhase.IN
        signs = self._workers.signs() if in_epoch else []
        return any(s.place in waits for s in signs) or bool(self._uploads.busy())

    # ---- events and acts -------------------------------------------------------------------------
    def _feed(self, event: AgentEvent) -> None:
        """Pass `event` to the state machine, and carry out its acts."""
        self._node, acts = node_state.step(
            self._node, event, Now(self._host.monotonic(), self._host.wall())
        )
        for act in acts:
            self._do(act)

    def _do(self, act: AgentAct) -> None:
        match act:
            case node_state.Record(fact):
                self.journal.record(fact)
            case node_state.WriteLog(text):
                self._host.say(text)
            case node_state.WriteMark(want, why, deadline_s):
                self._workers.mark.write(want, why, deadline_s)
            case node_state.DrainUploads(deadline_s):
                self._uploads.drain(deadline_s)
                away_s = None if deadline_s is None else self._host.monotonic() + HOW_FAR_S
                self._past.how_far_s = away_s
            case node_state.NotifyWorkers():
                if self._node.life is NodePhase.IN:
                    said = self._node.reigning()[1][0], self.config.leaving.notify_signal
                    tell_script(
                        self._workers, self.rendezvous, self._stay, *said, self._due.round_s
                    )
            case node_state.PollNow():
                self._due.at_once("tick")
            case node_state.FlushBeforeKill(who, deadline_s):
                self._say_last_words(who, deadline_s)

    def _say_last_words(self, who: str, deadline_s: float) -> None:
        """Record which work is safe at a deadline. Workers go on after a cloud's, which may be
        late."""
        at, committed = self._how_far()
        late = "and may come too late "
        verdict = node_state.last_words(at, committed, self._saving(), late)
        epoch = self._stay.epoch.epoch
        self.journal.record(GraceSpent(self.name, epoch, deadline_s, at, committed, verdict))
        self._host.say(f"the deadline of {who} is here: {verdict}")
        with contextlib.suppress(StoreUnavailable):
            self.journal.flush()

    def _how_far(self) -> tuple[int, int]:
        """Return the step at which the workers are, and the committed one; -1: unknown."""
        at, committed = max((s.step for s in self._workers.signs()), default=-1), -1
        with contextlib.suppress(StoreUnavailable):
            committed = self._run.committed()
        return at, committed

    def _say_how_far(self, now: float) -> None:
        """Say once, some seconds after a notice, what this node is still here for."""
        if self._past.how_far_s is None or now < self._past.how_far_s:
            return
        self._past.how_far_s = None
        at, committed, saving = *self._how_far(), self._saving()
        verdict = node_state.last_words(at, committed, saving)
        ends_s, deadline_s = self._workers.step_ends_s(), self._node.deadline_s()
        if ends_s is not None and deadline_s is not None and not saving:
            late_s = ends_s - now - (deadline_s - self._host.wall())
            verdict = node_state.too_late(at, committed, late_s) or verdict
        self._host.say(f"{HOW_FAR_S:.0f} s after {self._node.leaving}: {verdict}")

    def _heed_leader(self, now: float) -> None:
        """Drain this node if the run has had no controller or no bucket for too long, or its limits
        are reached without a controller."""
        if self._node.leaving or not self._due.now("lease", now, self.config.timing.lease_s):
            return
        if why := self._run.unled(now):
            self._past.unled = True
            self._feed(node_state.Unled(why, self._run.bucketless))

    def _stop_order(self, now: float) -> str | None:
        """Return why the run must stop, or None. Raises StoreError."""
        if self._due.now("control", now, self.config.timing.control_s):
            self._run.look()
        return self._run.stop()

    def _give_up(self, reason: str) -> int:
        """Request a stop of the run, since more tries would only cost money. Return `STOPPED`."""
        self._past.reason = reason
        self._run.ask_to_stop(reason, self._past.tail)
        return STOPPED

    # ---- between generations ---------------------------------------------------------------------
    def _settle_s(self) -> float:
        most_s = self._node.settle_s(self._host.wall(), self.config.uploads.settle_s)
        return self._node.left_s(self._host.monotonic() + node_state.LAST_WORDS_S, most_s)

    def _tell(self, **changes: Any) -> None:
        # without the bucket, the changes go out with the next heartbeat
        with contextlib.suppress(StoreUnavailable):
            self.rendezvous.say(**changes)

    def _say_ready(self, now: float) -> bool:
        """Report that we are ready, and return whether that is so. A worker may have died and left
        a snapshot to upload: the next generation must not begin before it is committed."""
        if self._node.life is not NodePhase.SETTLING:
            return True
        if now < self._past.settle_until_s and self._uploads.busy():
            return False
        self._tell(**self._past.ready)
        self._feed(node_state.Ready())
        return True

    def _seek_epoch(self, now: float) -> int | None:
        past, wait_s = self._past, self.config.timing.wait_limit_s
        if not self._say_ready(now):
            return None
        if (stop := self._stop_order(now)) is not None:
            past.reason = stop
            return STOPPED
        if not self._node.may_join(self._workers.warm()):
            self.rendezvous.look()  # it and the others prove already that they reach each other
            return None
        if self._node.life is NodePhase.WARMING:
            if not self.rendezvous.admitted() or not self._is_prepared(now):
                return None
            self._tell(state="ready")
            self._feed(node_state.Ready())
        if self._node.leaving:
            past.reason = self._node.leaving
            return self._node.gone_code
        last = self.rendezvous.newest()
        me = self.rendezvous.me
        why = verdicts.why_no_more(me, last, past.fruitless, past.end) or self._too_small(last)
        if why:
            return self._give_up(why)
        epoch = self.rendezvous.try_form(self._run.room())
        if epoch is not None:
            self._enter(epoch)
            return None
        if out_s := self.rendezvous.isolated_s():
            return self._bear_isolation(last.epoch, out_s)
        if self.rendezvous.is_over:
            past.reason = "the run has ended: its final snapshot is committed"
            hint = "for another training, name another run URL"
            self._host.say(f"{past.reason}; {hint}")
            return FINISHED
        if now - past.left_s > wait_s:
            past.reason = f"no place in any generation for {wait_s:.0f} s"
            return FENCED
        return None

    def _is_prepared(self, now: float) -> bool:
        """Return whether our workers wait at the begin of their loop, or need not: they prepare
        beside others that train, if the processes of these go on."""
        if self._past.prepares is None:
            last, found = self.rendezvous.newest(), self.rendezvous.members()
            here = [m for m in found if m.member in last.members and m.place == self.config.place]
            if not any(m.state == "in" and m.stays for m in here):
                return True
            most_s = self.config.fitness.hang.start_s
            self._past.prepares = Preparation(self._workers, self._host.say, now + most_s)
            self._past.prepares.begin(last, self._uploads.folder)
        self.rendezvous.look()  # it and the others prove already that they reach each other
        if not (self._node.leaving or self._past.prepares.is_over(now)):
            return False
        self._past.left_s = now
        return True

    def _too_small(self, last: Epoch) -> str:
        """Return why the run must be stopped, if memory ran out here in the generation `last`, and
        its micro-batch should be halved and cannot be; else ""."""
        me, halves = self.rendezvous.me, self.config.worlds.halves
        if not halves or me.failure not in MEMORY_RAN_OUT or me.epoch != last.epoch:
            return ""
        if self._run.micro_batch(last.halvings) != 1:
            return ""
        return verdicts.SMALLEST.format(step=me.failure_step, said=self._past.said)

    def _bear_isolation(self, epoch: int, out_s: float) -> int | None:
        """Say once in an epoch that the others leave this node out, since it and they do not reach
        each other. Return UNFIT after `LEAVE_S`: another node in the same network may not help."""
        why = self.rendezvous.reach.why(self.config.addr)
        if self._past.isolated_told != epoch:
            self._past.isolated_told = epoch
            self.journal.record(Warned(0, epoch, why))
            self._host.say(why, wrong=True)
        if out_s < LEAVE_S:
            return None
        self._feed(node_state.FoundUnfit(why))
        self._past.reason = f"unfit: {why}"
        return UNFIT

    def _enter(self, epoch: Epoch) -> None:
        self._workers.clear_signs()
        self._hearing.crowd(len(epoch.members))
        self._feed(node_state.Entered())
        self._stay = EpochTimes(epoch, entered_s=self._host.monotonic())
        self._tell(
            state="in",
            epoch=epoch.epoch,
            end="",
            failure="",
            failure_step=0,
            stays=False,
            master_port=self._host.free_port(self.config.addr),
        )
        self._workers.start(epoch, self._uploads.folder, patience=2.0**self._node.hangs)
        if epoch.members[0] == self.name:
            self.journal.record(EpochStarted(epoch.epoch, epoch.members, epoch.world, epoch.reason))
            self._helpers.start()
        else:
            self._helpers.release()

    # ---- in a generation -------------------------------------------------------------------------
    def _watch_workers(self, now: float) -> int | None:
        stay = self._stay
        if self._node.overdue(now):
            return self._abandon(self._node.unfit)
        if self._node.grace_over(now):
            return self._abandon(f"the grace after {self._node.leaving} is over")
        if hung := self._workers.find_hung(now):
            # a mismatch is the script's fault, as an exception of it
            self._feed(node_state.WorkersHung(any(w.guilty and not w.mismatched for w in hung)))
            return self._leave(self._end_workers())
        if not self._node.leaving and (late := why_overdue(stay, self.config.leaving.grace_s, now)):
            return self._abandon(late, RESIZE)
        at_work = self._workers.at_work()
        if at_work == len(self._workers.all):
            return None
        stay.first_end_s = stay.first_end_s or now
        for_s = verdicts.patience_s(self._workers.seen(), stay.told_s is not None)
        if at_work and now - stay.first_end_s < for_s:
            return None
        return self._leave(self._end_workers())

    def _tell_sessionless(self) -> None:
        """Say, once and on the first member only, that the script has no session."""
        epoch = self._stay.epoch
        if not self._past.sessionless_told and self.name == epoch.members[0]:
            self._past.sessionless_told = True
            self.journal.record(Warned(0, epoch.epoch, NO_SESSION))
            self._host.say(NO_SESSION)

    def _watch_peers(self, now: float) -> int | None:
        stay, epoch = self._stay, self._stay.epoch
        if self._workers.stay() is not self.rendezvous.me.stays:
            self.rendezvous.mention(stays=self._workers.stay())
        if self._workers.attached():
            self._uploads.ensure()
        elif (alone := self._workers.unadopted()) or now - stay.entered_s > SESSION_WITHIN_S:
            self._tell_sessionless()
            if alone and self.config.must_adopt:
                self._give_up(UNWANTED)
                self._due.at_once("control")
                return self._abandon(NOT_ELASTIC)
        if (stop := self._stop_order(now)) is not None:
            self._past.reason = stop
            self._feed(node_state.StopOrdered())
        for key in self._run.requests():
            self._feed(node_state.SnapshotAsked(key))
        if self._run.released():
            self._feed(node_state.Released())
        fence_s = FENCE_S if self._lines.all_up() else self.config.timing.tick_s
        if self._due.now("fence", now, fence_s) and self.rendezvous.newest().epoch > epoch.epoch:
            return self._abandon("a newer generation exists without us")
        first = next(n for n in epoch.members if n == self.name or n not in stay.absent)
        look = first == self.name
        found = self.rendezvous.look() if look else self.rendezvous.watch(epoch.members)
        everybody = {m.member: m for m in found}
        stay.absent = {n for n, m in everybody.items() if m.state in ("gone", "dead")}
        peers = [everybody[n] for n in epoch.members if n != self.name and n in everybody]
        said = verdicts.hear_peers(epoch, peers, stay.entered_s, stay.peer_left_s, now)
        stay.peer_left_s = said.since_s
        if said.why:
            return self._abandon(said.why, RESIZE if said.planned else KILLED)
        if lost := self._waited_for_in_vain(peers, now):
            return self._abandon(f"no connection with {', '.join(lost)}, and our workers wait")
        if said.changing and self.config.leaving.notify_signal and not self._workers.attached():
            self._feed(node_state.PeersChange())
        self._invite(now, list(everybody.values()))
        return None

    def _waited_for_in_vain(self, peers: list[Member], now: float) -> list[str]:
        """Return the living peers that we have not reached for long, if all our workers have waited
        for other nodes as long: the packets between us are lost, and the bucket is reached."""
        ways, most_s = self._stay.lost_ways, LOST_AFTER * self.config.timing.dead_s
        known = [p.member for p in peers if p.state == "in" and self._lines.heard(p.member).seen]
        ways.look(known, self._lines.reached() or (), now)
        lost = ways.longer_than(most_s, now)
        ours = list(self._workers.all)
        waits = ours and all(w.pulse.awaited_s(now) > most_s for w in ours)
        return lost if waits else []

    def _invite(self, now: float, everybody: list[Member]) -> None:
        """Request a bigger world if we are the first living member of the generation and a member
        that fits waits to join. Not while the bucket does not answer: our workers would wait for a
        snapshot that cannot be committed."""
        stay, epoch = self._stay, self._stay.epoch
        alive = [m for m in everybody if m.state not in ("gone", "dead")]
        first = next((n for n in epoch.members if any(m.member == n for m in alive)), None)
        waiting = self.rendezvous.waiting(epoch, alive)
        grows = self.rendezvous.would_grow(epoch, waiting, self._run.room())
        blind = now - stay.unanswered_s <= self.config.timing.dead_s
        if first != self.name or not grows or blind:
            stay.waiting_since_s = None
            return
        stay.waiting_since_s = stay.waiting_since_s or now
        if verdicts.make_room(alive, self.config.place, now - stay.waiting_since_s):
            self._feed(node_state.NewcomersWait())

    # ---- the end of a generation -----------------------------------------------------------------
    def _end_workers(self) -> list[int]:
        """End our workers, keep where they stood, and return their exit codes."""
        for seen in self._workers.stacks():
            self.journal.record(seen)
        if stuck := self._workers.end(self._part_s(KILL_S)):
            why = "did not end by SIGKILL: it hangs in the kernel, most likely in a driver"
            self._feed(node_state.FoundUnfit(f"{stuck[0]} {why}"))
            self._host.say(f"left behind on this node: {', '.join(stuck)}, which {why}", wrong=True)
        epoch, dumps = self._stay.epoch.epoch, self._workers.flights()
        flight_recorder.keep(self._run.store, self.journal.record, epoch, dumps)
        return [w.code for w in self._workers.all]

    def _abandon(self, why: str, code: int = KILLED) -> int | None:
        """End our workers and leave the generation. `code`: exit code that counts for each."""
        self._host.say(f"generation {self._stay.epoch.epoch} is over: {why}")
        return self._leave([code] * len(self._end_workers()))

    def _leave(self, codes: list[int]) -> int | None:
        """Leave the generation, whose workers have ended with `codes`. Return the agent's exit
        code, or `AGAIN`."""
        self._past.left_s = self._host.monotonic()
        self._feed(node_state.Left())
        end, evidence = self._judge(codes)
        failure, failure_step = evidence.signature if end in verdicts.BROKEN_OFF else "", 0
        if end in verdicts.BROKEN_OFF:
            failure_step = self._count(evidence, bool(failure))
        hangs = self._node.hangs
        worn_out = hangs >= self.config.fitness.hangs_allowed
        code = verdicts.agent_exit_code(end, bool(self._node.unfit), worn_out)
        self.journal.record(EpochLeft(self._stay.epoch.epoch, self.name, end.value))
        self._past.end = end
        if end is not verdicts.End.UNFINISHED:
            self._past.reason = end.value
        if code == UNFIT and not self._node.unfit:
            code = self._worn_out(hangs, failure_step)
        if code == UNFIT:
            self._past.reason = f"unfit: {self._node.unfit}"
        if code in (FINISHED, verdicts.AGAIN):
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()
        if code is verdicts.AGAIN:
            self._past.ready = {
                "state": "ready",
                "end": end.value,
                "failure": failure,
                "failure_step": failure_step,
            }
            now = self._host.monotonic()
            self._past.settle_until_s = now + self._settle_s()
            self._lines.renew()
            self._say_ready(now)
            self._workers.warm_up()
            self._due.at_once("tick")
        return code

    def _worn_out(self, hangs: int, step: int) -> int:
        """Judge the last of too many hangs, after `step`: this node is unfit, unless another one
        was worn out at the same step; then the run is stopped. Return the exit code."""
        with contextlib.suppress(StoreUnavailable):  # the next node will find out
            if self._run.hung_elsewhere(step):
                return self._give_up(verdicts.HUNG_EVERYWHERE.format(hangs=hangs, step=step))
        self._feed(node_state.FoundUnfit(f"its workers hung {hangs} times"))
        return UNFIT

    def _judge(self, codes: list[int]) -> tuple[verdicts.End, verdicts.Evidence]:
        """Return how the generation ended, and the evidence for it; record failed workers."""
        epoch, seen = self._stay.epoch, tuple(self._workers.seen())
        # this node cannot read data that others can
        if unfit := next((w for w in seen if w.code == UNFIT), None):
            self._feed(node_state.FoundUnfit(unfit.text))
        evidence = verdicts.Evidence(
            tuple(codes),
            seen,
            leaving=bool(self._node.leaving),
            unfit=bool(self._node.unfit),
            attached=self._workers.attached(),
            told=self._stay.told,
            alone=len(epoch.members) == 1,
        )
        end = verdicts.classify(evidence)
        # the node of rank 0 is responsible for the run's end
        if end is verdicts.End.FINISHED and self.name == epoch.members[0]:
            evidence = replace(evidence, run_over=self._answer_for_run(epoch))
            end = verdicts.classify(evidence)
        if end is verdicts.End.UNFINISHED and evidence.apart:
            self._give_up(evidence.apart)
        if end in verdicts.BROKEN_OFF:
            for fact in evidence.facts(self.name, epoch.epoch):
                self.journal.record(fact)
            if said := evidence.culprit or next(iter(evidence.failed), None):
                self._past.tail, self._past.said = said.tail, said.text
        return end, evidence

    def _count(self, evidence: verdicts.Evidence, failed: bool) -> int:
        """Count a broken-off generation, unless the bucket does not answer. Return the last step
        that was done before our failure; 0 if it was not ours."""
        lasted_s = self._host.monotonic() - self._stay.entered_s
        step = max((sign.step for sign in self._workers.signs()), default=0)
        with contextlib.suppress(StoreUnavailable):
            committed, fruitless = self._run.committed(), self._past.fruitless
            kept = kept_step(self._uploads.folder)
            self._past.fruitless = fruitless.broken_off(
                committed, kept, evidence.attached, lasted_s
            )
            step = max(committed, step)
        return step if failed else 0

    def _answer_for_run(self, epoch: Epoch) -> bool:
        """Ensure that the run's end is committed, since all our workers ended with status 0. If the
        script has not finished, stop the run and return False: a listing that shows no end is
        believed when it has shown none for as long as a restore looks. Raises StoreUnavailable,
        after `wait_limit_s`."""
        sure_s = self._host.monotonic() + sum(PAUSES_S)
        give_up_s = self._host.monotonic() + self.config.timing.wait_limit_s
        while True:
            try:
                if not self._workers.attached():
                    self._tell_sessionless()
                    if self.config.must_adopt:
                        self._give_up(UNWANTED)
                        return False
                    self._run.finish_for_script(epoch)
                elif not self._run.surely_over():
                    if self._host.monotonic() < sure_s:
                        raise UnreadableEnd("the run's end is not listed yet")
                    self._give_up(verdicts.WHY_UNFINISHED)
                    return False
                return True
            except StoreUnavailable:  # only the commit of the end is missing
                self._hear()
                now = self._host.monotonic()
                if now > give_up_s or self._node.grace_over(now):
                    raise
                self._host.sleep(ANSWER_AGAIN_S)
