"""The node agent: one per machine. `harness run -- script.py` is this.

Joins the rendezvous, starts the script's workers with torchrun's environment, watches for notices,
and leaves a mark when something is wanted of the workers; they agree at a step boundary, snapshot
and leave. It knows nothing of torch (so it starts at once) nor of SkyPilot. It starts plain
processes, not torch elastic's PContext, which kills those that are still saving.

This file is one turn of the loop: it feeds what happens to `machine.py`, which decides what a node
does about it, and to `ends.py`, which judges how an epoch ended; and it carries out what they say.
All that it needs of its machine comes in through `host.py`, so the simulation runs this very file.

Exit codes: see docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import replace
from typing import Any

from harness.agent import ends, flight, machine
from harness.agent.config import AgentConfig
from harness.agent.host import Hearing, Host
from harness.agent.machine import AgentAct, AgentEvent, AgentState, Life, Now
from harness.agent.memory import Due, EpochMemory, Stay
from harness.agent.notices import NoticeSource
from harness.agent.rendezvous import Rendezvous
from harness.agent.run_state import RunState
from harness.agent.telling import tell_script, why_overdue
from harness.bucket.journal import Journal
from harness.bucket.layout import Epoch, Member
from harness.core.facts import (
    AgentEnded,
    AgentStarted,
    EpochLeft,
    EpochStarted,
    GraceSpent,
    HelperEnded,
    NoticeAcknowledged,
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
from harness.node.progress import WorkerPhase
from storage.errors import StoreError, StoreUnavailable
from storage.objects import ObjectStore

FENCE_S = 2.0  # between two looks for a newer epoch while all our peers are heard
PAUSE_S = 0.02  # between two turns
ANSWER_AGAIN_S = 1.0  # between two tries to commit the run's end while the bucket is silent
KILLED = -signal.SIGKILL  # what the end of workers that we end counts as


class Agent:
    """One node's part in a run. `execute` returns the exit code; it is `begin`, turns, `close`."""

    def __init__(
        self, config: AgentConfig, store: ObjectStore, sources: list[NoticeSource], host: Host
    ):
        c, now = config, host.monotonic()
        self.config, self._host = c, host
        self.name = f"m{c.attempt:04d}-{host.token()}"
        self.journal = Journal(store, f"agent-{self.name}", host.wall)
        self._run = RunState(
            store, self.name, c.attempt, c.timing.leaderless_s, c.worlds.replica_ranks
        )
        self._workers = host.workers(c, self.name, self.journal.record)
        self._helpers = host.helpers(c)
        self._hearing = Hearing(sources)
        v = c.leaving
        times_s = (v.grace_s, v.drain_lead_s, v.doubt_ahead_s, c.fitness.unfit_grace_s)
        self._node = AgentState(machine.Rules(self.name, *times_s), now + machine.WARM_S)
        self._stay, self._past, self._due = Stay(), EpochMemory(left_s=now), Due(now)

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

    def begin(self) -> None:
        c, host = self.config, self._host
        self._workers.warm_up()  # first of all: its imports take longest
        self._open()
        self.journal.record(
            AgentStarted(self.name, c.attempt, host.name, c.nproc, c.accelerator, host.pid)
        )
        heard = self._hearing
        heard.listening = host.listen(c, heard.sources, heard.inbox.put)
        heard.hardware = host.measure(c, self.name, self.journal.record)

    def _open(self) -> None:
        """Our uploader, our lines to the others, our seat in the rendezvous."""
        c, host = self.config, self._host
        self._uploads = host.uploads(c, self.name)
        self._lines = host.lines(c, self.name)
        me = Member(
            *(self.name, "warming", 0, c.addr, self._lines.port, host.free_port(c.addr)),
            nproc=c.nproc, attempt=c.attempt, speed=c.speed, place=c.place,
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
            over=self._run.is_over,
            monotonic=host.monotonic,
        )

    def turn(self) -> int | None:
        """Look once at everything that is due. The exit code, once this node is done."""
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
        self._workers.close()
        self._uploads.settle(self._settle_s())
        self.rendezvous.leave(end=self._past.end.value if self._past.end else "")
        if code in (DRAINED, FINISHED):  # nobody waits for us any more
            self._uploads.settle(self._settle_s(), near=code == DRAINED)
            self._acknowledge()
        self._uploads.close()
        self._lines.close()
        self.journal.record(AgentEnded(self.name, code, self._past.reason))
        with contextlib.suppress(StoreError):  # helpers that end now may tell of it
            self.journal.flush()
        self._helpers.end(wait_s=45.0 if code == FINISHED else 3.0)
        with contextlib.suppress(StoreError):  # our last words
            self.journal.flush()

    def _acknowledge(self) -> None:
        """The snapshot is committed and our workers have gone: who waits for us need not wait
        any longer."""
        if not self.config.leaving.acknowledge or self._uploads.busy():
            return
        for notice in self._node.notices.values():
            source = next((s for s in self._hearing.sources if s.name == notice.source), None)
            if notice.acknowledge and source is not None:
                heard = source.acknowledge(notice)
                self.journal.record(NoticeAcknowledged(self.name, notice.id, heard))

    def _turn(self) -> int | None:
        timing = self.config.timing
        while not self._hearing.inbox.empty():
            self._feed(self._hearing.inbox.get_nowait())
        self._feed(machine.Tick())
        now, code = self._host.monotonic(), None
        if slept_s := self._due.slept_s(now):
            self._workers.forgive(slept_s)  # their silence is not theirs
        if self._node.life is Life.IN:
            code = self._watch_workers(now)
        if self._lines.changed.is_set():
            self._due.at_once("tick")
        if code is None and self._due.now("tick", now, timing.tick_s):
            self._lines.changed.clear()
            # training goes on while the bucket is silent
            with contextlib.suppress(StoreUnavailable):
                self._run.tell_doubt(self._node, self._node.doubtful(self._host.wall()))
                self._heed_leader(now)
                in_epoch = self._node.life is Life.IN
                code = self._watch_peers(now) if in_epoch else self._seek_epoch(now)
        if self._due.now("flush", now, timing.flush_s):
            for died in self._helpers.look(now):
                self.journal.record(HelperEnded(self.name, *died))
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()
        return code

    # ---- events and acts -------------------------------------------------------------------------
    def _feed(self, event: AgentEvent) -> None:
        """Let the machine decide about `event`, and do what it says."""
        self._node, acts = machine.step(
            self._node, event, Now(self._host.monotonic(), self._host.wall())
        )
        for act in acts:
            self._do(act)

    def _do(self, act: AgentAct) -> None:
        match act:
            case machine.Record(fact):
                self.journal.record(fact)
            case machine.Say(text):
                self._host.say(text)
            case machine.WriteMark(want, why, deadline_s):
                self._workers.mark(want, why, deadline_s)
            case machine.DrainUploads(deadline_s):
                self._uploads.drain(deadline_s)
            case machine.NotifyWorkers():
                if self._node.life is Life.IN:
                    said = self._node.reigning()[1][0], self.config.leaving.notify_signal
                    tell_script(
                        self._workers, self.rendezvous, self._stay, *said, self._due.round_s
                    )
            case machine.LookNow():
                self._due.at_once("tick")
            case machine.SayLastWords(who, deadline_s):
                self._say_last_words(who, deadline_s)

    def _say_last_words(self, who: str, deadline_s: float) -> None:
        """Write what is safe and what is not. The workers are not killed: the cloud may be late."""
        signs = self._workers.signs()
        at, committed = max((s.step for s in signs), default=-1), -1
        with contextlib.suppress(StoreUnavailable):
            committed = self._run.committed()
        saving = self._uploads.busy() or any(
            s.place in (WorkerPhase.STAGING, WorkerPhase.SAVING) for s in signs
        )
        verdict = machine.last_words(at, committed, bool(saving))
        epoch = self._stay.epoch.epoch
        self.journal.record(GraceSpent(self.name, epoch, deadline_s, at, committed, verdict))
        self._host.say(f"the deadline of {who} is here: {verdict}")
        with contextlib.suppress(StoreUnavailable):
            self.journal.flush()

    def _heed_leader(self, now: float) -> None:
        """Does anybody lead the run? If nobody has for too long, or nobody keeps its limits, this
        node drains. Raises StoreUnavailable; then it looks again later."""
        if self._node.leaving or not self._due.now("lease", now, self.config.timing.lease_s):
            return
        if why := self._run.unled(now):
            self._feed(machine.Unled(why))

    def _stop_order(self, now: float) -> str | None:
        """Why the run shall stop, if it shall. Raises StoreError."""
        if self._due.now("control", now, self.config.timing.control_s):
            self._run.look()
        return self._run.stop()

    def _give_up(self, reason: str) -> int:
        """More tries would only burn money."""
        self._past.reason = reason
        self._run.ask_to_stop(reason, self._past.tail)
        return STOPPED

    # ---- between epochs --------------------------------------------------------------------------
    def _settle_s(self) -> float:
        return self._node.settle_s(self._host.wall(), self.config.uploads.settle_s)

    def _tell(self, **changes: Any) -> None:
        # what we say of ourselves goes out with the next heartbeat then
        with contextlib.suppress(StoreUnavailable):
            self.rendezvous.say(**changes)

    def _say_ready(self, now: float) -> bool:
        """A worker may have died and left a snapshot to send: no newer epoch may begin before
        it is committed."""
        if self._node.life is not Life.SETTLING:
            return True
        if now < self._past.settle_until_s and self._uploads.busy():
            return False
        self._tell(**self._past.ready)
        self._feed(machine.Ready())
        return True

    def _seek_epoch(self, now: float) -> int | None:
        past, wait_s = self._past, self.config.timing.wait_limit_s
        if not self._say_ready(now):
            return None
        if (stop := self._stop_order(now)) is not None:
            past.reason = stop
            return STOPPED
        if not self._node.may_join(now, self._workers.warm()):
            return None
        if self._node.life is Life.WARMING:
            if not self.rendezvous.admitted():
                return None
            self._tell(state="ready")
            self._feed(machine.Ready())
        if self._node.leaving:
            past.reason = self._node.leaving
            return self._node.gone_code
        last = self.rendezvous.newest()
        if why := ends.why_no_more(self.rendezvous.me, last, past.fruitless, past.end):
            return self._give_up(why)
        epoch = self.rendezvous.try_form(self._run.room())
        if epoch is not None:
            self._enter(epoch)
            return None
        if self.rendezvous.is_over:
            past.reason = "the run has ended: its final snapshot is committed"
            hint = "for another training, name another run URL"
            self._host.say(f"{past.reason}; {hint}")
            return FINISHED
        if now - past.left_s > wait_s:
            past.reason = f"no place in any epoch for {wait_s:.0f} s"
            return FENCED
        return None

    def _enter(self, epoch: Epoch) -> None:
        self._workers.clear_signs()
        self._hearing.crowd(len(epoch.members))
        self._feed(machine.Entered())
        self._stay = Stay(epoch, entered_s=self._host.monotonic())
        self._tell(
            state="in",
            epoch=epoch.epoch,
            end="",
            failure="",
            failure_step=0,
            master_port=self._host.free_port(self.config.addr),
        )
        self._workers.start(epoch, self._uploads.folder, patience=2.0**self._node.hangs)
        if epoch.members[0] == self.name:
            self.journal.record(EpochStarted(epoch.epoch, epoch.members, epoch.world, epoch.reason))
            self._helpers.start()
        else:
            self._helpers.release()

    # ---- in an epoch -----------------------------------------------------------------------------
    def _watch_workers(self, now: float) -> int | None:
        stay, timing = self._stay, self.config.timing
        if self._node.overdue(now):
            return self._abandon(self._node.unfit)
        if hung := self._workers.find_hung(now):
            self._feed(machine.WorkersHung(any(w.guilty for w in hung)))
            return self._leave(self._end_workers())
        if not self._node.leaving and (late := why_overdue(stay, self.config.leaving.grace_s, now)):
            return self._abandon(late, RESIZE)
        at_work = self._workers.at_work()
        if at_work == len(self._workers.all):
            return None
        stay.first_end_s = stay.first_end_s or now
        waited_s, alone = now - stay.first_end_s, len(stay.epoch.members) == 1
        silence_s, told = timing.dead_s + timing.beat_s, stay.told_s is not None
        given = ends.patience(self._workers.seen(), alone, silence_s, told)
        if given.to_blame and self.rendezvous.me.end != ends.FAILING:
            self.rendezvous.mention(end=ends.FAILING)
        if at_work and waited_s < given.others_s:
            return None
        if waited_s < given.evidence_s and not self._lost_member():
            return None
        return self._leave(self._end_workers())

    def _watch_peers(self, now: float) -> int | None:
        stay, epoch = self._stay, self._stay.epoch
        if self._workers.attached():
            self._uploads.ensure()
        if (stop := self._stop_order(now)) is not None:
            self._past.reason = stop
            self._feed(machine.StopOrdered())
        for key in self._run.requests():
            self._feed(machine.SnapshotAsked(key))
        if self._run.released():
            self._feed(machine.Released())
        fence_s = FENCE_S if self._lines.all_up() else self.config.timing.tick_s
        if self._due.now("fence", now, fence_s) and self.rendezvous.newest().epoch > epoch.epoch:
            return self._abandon("a newer epoch exists without us")
        first = next(n for n in epoch.members if n == self.name or n not in stay.absent)
        look = first == self.name
        found = self.rendezvous.look() if look else self.rendezvous.watch(epoch.members)
        everybody = {m.member: m for m in found}
        stay.absent = {n for n, m in everybody.items() if m.state in ("gone", "dead")}
        peers = [everybody[n] for n in epoch.members if n != self.name and n in everybody]
        said = ends.hear_peers(epoch.epoch, peers, stay.peer_left_s, now)
        stay.peer_left_s = said.since_s
        if said.why:
            return self._abandon(said.why, RESIZE if said.planned else KILLED)
        if said.changing and self.config.leaving.notify_signal and not self._workers.attached():
            self._feed(machine.PeersChange())
        self._invite(now, list(everybody.values()))
        return None

    def _invite(self, now: float, everybody: list[Member]) -> None:
        """The first living member of the epoch asks for a bigger world when somebody fitting
        waits to get in."""
        stay, epoch = self._stay, self._stay.epoch
        alive = [m for m in everybody if m.state not in ("gone", "dead")]
        first = next((n for n in epoch.members if any(m.member == n for m in alive)), None)
        waiting = self.rendezvous.waiting(epoch, alive)
        grows = self.rendezvous.would_grow(epoch, waiting, self._run.room())
        if first != self.name or not grows:
            stay.waiting_since_s = None
            return
        stay.waiting_since_s = stay.waiting_since_s or now
        if ends.make_room(alive, self.config.place, now - stay.waiting_since_s):
            self._feed(machine.NewcomersWait())

    def _lost_member(self) -> str:
        """Of our epoch, as far as can be told; "": none."""
        epoch = self._stay.epoch

        def fell(name: str) -> bool:
            return not self._lines.heard(name).up  # it fell, or never stood

        with contextlib.suppress(StoreUnavailable):
            members = self.rendezvous.watch(epoch.members)
            return ends.lost_member(members, self.name, epoch.epoch, fell)
        return ""

    # ---- its end ---------------------------------------------------------------------------------
    def _end_workers(self) -> list[int]:
        """Their exit codes."""
        if stuck := self._workers.end():
            why = "cannot be killed: it hangs in the kernel, most likely in a driver"
            self._feed(machine.FoundUnfit(f"rank {stuck[0]} {why}"))
        epoch, dumps = self._stay.epoch.epoch, self._workers.flights()
        flight.keep(self._run.store, self.journal.record, epoch, dumps)
        return [w.code for w in self._workers.all]

    def _abandon(self, why: str, code: int = KILLED) -> int | None:
        """End our workers; `code`: what their end shall count as."""
        self._host.say(f"epoch {self._stay.epoch.epoch} is over: {why}")
        return self._leave([code] * len(self._end_workers()))

    def _leave(self, codes: list[int]) -> int | None:
        """Our workers of this epoch have ended with `codes`: what now?"""
        self._past.left_s = self._host.monotonic()
        self._feed(machine.Left())
        end, evidence = self._judge(codes)
        failure, failure_step = evidence.signature if end in ends.BROKEN_OFF else "", 0
        if end in ends.BROKEN_OFF:
            # without the bucket, the failure counts as one at the start
            with contextlib.suppress(StoreUnavailable):
                failure_step = self._count(evidence, bool(failure))
        hangs = self._node.hangs
        worn_out = hangs >= self.config.fitness.hangs_allowed
        code = ends.exit_code(end, bool(self._node.unfit), worn_out)
        if code == UNFIT and not self._node.unfit:
            self._feed(machine.FoundUnfit(f"its workers hung {hangs} times"))
        self.journal.record(EpochLeft(self._stay.epoch.epoch, self.name, end.value))
        self._past.end = end
        if end is not ends.End.UNFINISHED:
            self._past.reason = f"unfit: {self._node.unfit}" if code == UNFIT else end.value
        if code in (FINISHED, ends.AGAIN):
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()
        if code is ends.AGAIN:
            self._past.ready = {
                "state": "ready",
                "end": end.value,
                "failure": failure,
                "failure_step": failure_step,
            }
            now = self._host.monotonic()
            self._past.settle_until_s = now + self._settle_s()
            self._say_ready(now)
            self._workers.warm_up()
            self._due.at_once("tick")
        return code

    def _judge(self, codes: list[int]) -> tuple[ends.End, ends.Evidence]:
        """How the epoch ended, by all the evidence that it takes."""
        epoch, seen = self._stay.epoch, tuple(self._workers.seen())
        # it cannot read what others can
        if unfit := next((w for w in seen if w.code == UNFIT), None):
            self._feed(machine.FoundUnfit(unfit.text))
        evidence = ends.Evidence(
            tuple(codes),
            seen,
            leaving=bool(self._node.leaving),
            unfit=bool(self._node.unfit),
            attached=self._workers.attached(),
            told=self._stay.told,
        )
        end = ends.classify(evidence)
        # the node of rank 0 answers for the run
        if end is ends.End.FINISHED and self.name == epoch.members[0]:
            evidence = replace(evidence, run_over=self._answer_for_run(epoch))
        elif end in ends.BROKEN_OFF and evidence.asks_for_witness:
            evidence = replace(evidence, lost=self._lost_member())
        end = ends.classify(evidence)
        if end in ends.BROKEN_OFF:
            for fact in evidence.facts(self.name, epoch.epoch):
                self.journal.record(fact)
            if culprit := evidence.culprit:
                self._past.tail = culprit.tail
        return end, evidence

    def _count(self, evidence: ends.Evidence, failed: bool) -> int:
        """An epoch of ours was broken off. The step at which our failure counts. Raises
        StoreUnavailable."""
        committed, lasted_s = self._run.committed(), self._host.monotonic() - self._stay.entered_s
        fruitless = self._past.fruitless
        self._past.fruitless = fruitless.broken_off(committed, evidence.attached, lasted_s)
        return committed if failed else 0

    def _answer_for_run(self, epoch: Epoch) -> bool:
        """All our workers ended with status 0: see to it that the run's end is committed. If the
        script has not come so far, the run is stopped. Raises StoreUnavailable, after a long
        time."""
        give_up_s = self._host.monotonic() + self.config.timing.wait_limit_s
        while True:
            try:
                if not self._workers.attached():
                    self._run.finish_for_script(epoch)
                elif not self._run.is_over():
                    self._give_up(ends.WHY_UNFINISHED)
                    return False
                return True
            except StoreUnavailable:  # all is done but to say so
                if self._host.monotonic() > give_up_s:
                    raise
                self._host.sleep(ANSWER_AGAIN_S)
