"""The node agent: one per machine. `harness run -- script.py` is this.

Joins the rendezvous, starts the script's workers with torchrun's environment, watches for notices,
and leaves a mark when something is wanted of the workers; they agree at a step boundary, snapshot
and leave. It knows nothing of torch (its start costs a fraction of a second and no GPU memory) and
nothing of SkyPilot. It starts plain processes rather than torch elastic's PContext, which answers
the first worker that leaves by killing those that are still saving.

Exit codes: see docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

from harness.agent import health
from harness.agent.config import AgentConfig
from harness.agent.helpers import Helpers
from harness.agent.leaderless import Leaderless
from harness.agent.lines import Lines
from harness.agent.notices import Notice, Source, watch
from harness.agent.rendezvous import Rendezvous, free_port
from harness.agent.workers import Worker, Workers
from harness.bucket.epochs import NO_EPOCH, Epoch, Member
from harness.bucket.journal import Journal
from harness.bucket.lease import sign_of_life
from harness.bucket.orders import CONTROL, SNAPSHOT, STOP_KEY, StopOrder, ask_to_stop, stop_order
from harness.core.facts import (
    AgentEnded,
    AgentStarted,
    EpochLeft,
    EpochStarted,
    GraceSpent,
    HealthSeen,
    NoticeAcknowledged,
    NoticeCancelled,
    NoticeSeen,
    WorkerFailed,
)
from harness.core.world import DOUBT, DRAINED, FENCED, FINISHED, LEAVE, RESIZE, STOPPED, UNFIT
from harness.node import marks, progress
from harness.node.marks import Want
from harness.uploader.client import NodeUploader
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.manifest import Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

NO_LIMIT = 1 << 30
# the same failure of the script at the same committed step: stop, it will not get better
SAME_FAILURE_LIMIT = 3
# epochs that ended by some failure, of whomever, one after the other without a new snapshot: stop
# as well
FRUITLESS_LIMIT = 20
# ... of a script without a session, whose progress we cannot see: that ended within so long
FRUITLESS_S = 600.0
# signals from outside (out of memory, an operator), hangs and a silent bucket may be bad luck for
# longer
SAME_KILL_LIMIT = 10
LAST_WORDS_S = 2.0  # before a deadline: what the end will be is written while it still can be
# a newcomer's workers may take so long to import what they need before others make room for it
WARM_S = 60.0
FENCE_S = 2.0  # between two looks for a newer epoch while all our peers are heard
LINGER_S = 0.2  # for workers to end by themselves once it is known which one failed
PEER_LEFT_S = 1.0  # for ours to notice that a peer's have failed
BATCH_S = 5.0  # for others that are warming up already to join together with who is ready
FROZEN_S = 3.0  # our own loop stood still for so long: nobody else's silence is judged by that time

# What a worker's error is like when the connection to another rank breaks. A hint that makes us
# look at the others, and no proof.
LOST_TYPES = (
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
)
LOST_WORDS = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh",
    "Socket Timeout",
    "NCCL",
    "ncclRemoteError",
    "Timed out waiting",
    "timed out after",
    "recvValue failed",
    "failed to recv",
    "Read error",
    "Write error",
    "Socket closed",
    "EADDRINUSE",
    "Application timeout",
)
# said of ourselves at once when a worker of ours has failed by itself, for those whose workers feel
# it
FAILING = "failing"
ORDERLY = (FINISHED, DRAINED, RESIZE, STOPPED)


class Agent:
    """One node's part in a run. `execute` returns the exit code."""

    def __init__(self, config: AgentConfig, store: ObjectStore, sources: list[Source]):
        self.config, self.store, self.sources = config, store, sources
        self.name = f"m{config.attempt:04d}-{secrets.token_hex(3)}"
        self.journal = Journal(store, f"agent-{self.name}", time.time)
        self.snapshots = Snapshots(store)
        self.mark_path = config.node_dir / "mark.json"
        self._workers = Workers(config, self.name, self.mark_path, self.journal.record)
        self._epoch: Epoch = NO_EPOCH  # the one whose workers run, else NO_EPOCH
        self._absent: set[str] = set()  # members of our epoch that are gone or dead
        self._wants: dict[str, tuple[Want, float | None]] = {}  # who wants what, until when
        self._leaving: str = ""  # why we go, once we know that we must
        self._notices: dict[str, Notice] = {}  # in force, by id
        self._doubt_told = False  # that this node may not stay stands in the bucket
        self._control: set[str] = set()  # what lies under control/, as we saw it last
        # what was asked of the run before we looked first is not for us
        self._control_seen: set[str] | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._first_end_s: float | None = None
        self._peer_left_s: float | None = None
        self._entered_s = 0.0  # when our epoch began
        # epochs in a row without a new snapshot; the newest one's step
        self._fruitless, self._fruitful_step = 0, -1
        self._waiting_since_s: float | None = None
        self._ready_since_s = time.monotonic()
        self._next_tick_s = 0.0
        self._next_flush_s = 0.0
        self._due_s: dict[str, float] = {}  # when to look at what next
        self._room: int | None = None  # ranks that a step has work for, once that is known
        self._warm_by_s = time.monotonic() + WARM_S
        # what we shall say of ourselves once our uploads are done
        self._ready: dict[str, Any] | None = None
        self._settle_until_s = 0.0
        self._helpers = Helpers(config)
        self._reason = ""  # in words, of our own end
        self._end = ""  # how our last epoch ended: facts.EpochLeft.why
        self._last_tail: tuple[str, ...] = ()
        self._hangs = 0  # of our own workers, not of those that waited for others
        self._unfit = ""  # why no run should come back to this node
        # when workers on it are ended, if they have not left by then
        self._unfit_by_s: float | None = None
        self._grace_spent: set[str] = set()  # the notices whose last words are written
        self._leaderless = Leaderless(config.timing.leaderless_s)
        self._last_loop_s = time.monotonic()

    # ---- life ------------------------------------------------------------------------------------
    def execute(self) -> int:
        c = self.config
        c.node_dir.mkdir(parents=True, exist_ok=True)
        self._workers.warm_up()  # first of all: its imports take longest
        nearby = replace(c.uploads.nearby, addr=c.addr, share=c.nproc > 1)
        self._uploads = NodeUploader(
            c.run,
            self.name,
            c.uploads.stage_dir,
            c.uploads.stage_nbytes,
            c.node_dir / "uploader.log",
            nearby,
        )
        self._lines = Lines(self.name, c.addr, c.timing.beat_s / 2)
        me = Member(
            *(self.name, "warming", 0, c.addr, self._lines.port, free_port(c.addr)),
            nproc=c.nproc, attempt=c.attempt, speed=c.speed, place=c.place,
        )  # fmt: skip
        self.rendezvous = Rendezvous(
            self.store,
            me,
            self._lines,
            beat_s=c.timing.beat_s,
            dead_s=c.timing.dead_s,
            min_members=c.min_members,
            over=self._is_over,
        )
        self.journal.record(
            AgentStarted(
                self.name, c.attempt, socket.gethostname(), c.nproc, c.accelerator, os.getpid()
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: self._inbox.put(("signal", signal.Signals(n).name)))
        signal.signal(signal.SIGUSR1, lambda *_: self._inbox.put(("snapshot", "SIGUSR1")))
        watcher = watch(
            self.sources,
            on_notice=lambda notice: self._inbox.put(("notice", notice)),
            on_cancel=lambda notice: self._inbox.put(("cancel", notice)),
        )
        monitor = health.start(
            c.fitness.gpu_health, lambda verdict: self._inbox.put(("health", verdict))
        )
        code = FENCED
        try:
            self.rendezvous.start()
            code = self._loop()
        except StoreError as e:
            self._reason = str(e)
            print(f"harness run: {e}", file=sys.stderr, flush=True)
        finally:
            watcher.stop()
            monitor.stop()
            self._workers.close()
            self._uploads.settle(self._settle_s())
            if code in (DRAINED, FINISHED):
                self._acknowledge()
            self._uploads.close()
            self.rendezvous.leave(end=self._end)
            self._lines.close()
            self.journal.record(AgentEnded(self.name, code, self._reason))
            self._helpers.end(wait_s=45.0 if code == FINISHED else 3.0)
            with contextlib.suppress(StoreError):  # our last words; their loss changes nothing
                self.journal.flush()
        return code

    def _loop(self) -> int:
        while True:
            code = self._hear()
            now = time.monotonic()
            self._notice_own_sleep(now)
            if code is None and self._epoch is not NO_EPOCH:
                code = self._watch_workers(now)
            if code is None and (now >= self._next_tick_s or self._lines.changed.is_set()):
                self._lines.changed.clear()
                self._next_tick_s = now + self.config.timing.tick_s
                self._heed_known_ends()
                # training goes on while the bucket is silent
                with contextlib.suppress(StoreUnavailable):
                    self._tell_doubt(self._doubtful())
                    self._heed_leader(now)
                    code = (
                        self._seek_epoch(now) if self._epoch is NO_EPOCH else self._watch_peers(now)
                    )
            if now >= self._next_flush_s:
                self._next_flush_s = now + self.config.timing.flush_s
                with contextlib.suppress(StoreUnavailable):
                    self.journal.flush()
            if code is not None:
                return code
            time.sleep(0.02)

    def _notice_own_sleep(self, now: float) -> None:
        """Stopped and continued, or a machine that was paused: then our workers' silence is not
        theirs."""
        gap_s, self._last_loop_s = now - self._last_loop_s, now
        if gap_s > FROZEN_S:
            self._workers.forgive(gap_s)

    # ---- what others tell us ---------------------------------------------------------------------
    def _hear(self) -> int | None:
        while True:
            try:
                what, value = self._inbox.get_nowait()
            except queue.Empty:
                return None
            if what == "snapshot":
                self._want("snapshot", Want.SNAPSHOT)
            elif what == "signal":
                deadline = time.time() + self.config.leaving.grace_s
                self.journal.record(NoticeSeen(self.name, "signal", "kill", value, deadline))
                self._must_leave(f"{value}", f"signal:{value}", deadline)
            elif what == "notice":
                self._heed(value)
            elif what == "health":
                self._act_on_health(value)
            elif what == "cancel":
                self._forget(value)

    def _heed(self, notice: Notice) -> None:
        """A notice is new, or says something else than before."""
        self._notices[notice.id] = notice
        # who launched us hears of it now: our workers may be gone within a tick
        self._next_tick_s = 0.0
        self.journal.record(
            NoticeSeen(self.name, notice.source, notice.kind, notice.id, notice.deadline_s)
        )
        if notice.kind == "soft":
            self._want(f"notice:{notice.id}", Want.SNAPSHOT)
        elif notice.kind == "kill" or notice.deadline_s is None:
            self._must_leave(f"{notice.source} notice", f"notice:{notice.id}", notice.deadline_s)
        else:
            self._heed_known_ends()

    def _heed_known_ends(self) -> None:
        """An end that was told long before: work on until it is near."""
        for n in self._notices.values():
            near = (
                n.kind == "maintenance"
                and n.deadline_s is not None
                and time.time() >= n.deadline_s - self.config.leaving.drain_lead_s
            )
            if near and self._wants.get(f"notice:{n.id}") != (Want.RESIZE, n.deadline_s):
                self._must_leave(f"{n.source} notice", f"notice:{n.id}", n.deadline_s)

    def _forget(self, notice: Notice) -> None:
        """A notice was taken back. If the workers have not agreed on it yet they never will;
        else we join the next epoch again."""
        self.journal.record(NoticeCancelled(self.name, notice.id))
        self._notices.pop(notice.id, None)
        _, before = self._reigning()
        self._wants.pop(f"notice:{notice.id}", None)
        deadlines = [deadline_s for _, deadline_s in self._wants.values() if deadline_s is not None]
        self._uploads.drain(min(deadlines, default=None))
        if not self._unfit and not any(
            want is Want.RESIZE and who != "grow" for who, (want, _) in self._wants.items()
        ):
            self._leaving = ""
        # a mark that is written again is a request that is made again
        if self._reigning()[1] != before:
            self._write_mark()

    def _doubtful(self) -> bool:
        """Is it time to look for another node, though this one is still there? At a kill notice
        it is: clouds take minutes to launch."""
        by_s = time.time() + self.config.leaving.doubt_ahead_s
        return any(
            not n.pause
            if n.kind == "soft"
            else n.kind == "kill" or (n.kind == "maintenance" and (n.deadline_s or 0.0) <= by_s)
            for n in self._notices.values()
        )

    def _tell_doubt(self, doubtful: bool) -> None:
        """Who launched us by number sees it in the bucket. Raises StoreUnavailable; then it is
        told later."""
        if doubtful == self._doubt_told or not self.config.attempt:
            return
        key = f"{DOUBT}{self.config.attempt:06d}.json"
        if doubtful:
            said = [f"{n.kind} notice from {n.source}" for n in self._notices.values()]
            self.store.create(
                key, json.dumps({"by": self.name, "reason": ", ".join(said)}).encode()
            )
        else:
            self.store.delete(key)
        self._doubt_told = doubtful

    def _acknowledge(self) -> None:
        """The snapshot is committed and our workers have gone: who waits for us need not wait
        any longer."""
        if not self.config.leaving.acknowledge or self._uploads.busy():
            return
        for notice in self._notices.values():
            source = next((s for s in self.sources if s.name == notice.source), None)
            if notice.acknowledge and source is not None:
                self.journal.record(
                    NoticeAcknowledged(self.name, notice.id, source.acknowledge(notice))
                )

    def _must_leave(self, reason: str, who: str, deadline_s: float | None) -> None:
        self._leaving = self._leaving or reason
        if deadline_s is not None:
            self._uploads.drain(
                min(
                    [
                        deadline_s,
                        *(d for w, (_, d) in self._wants.items() if d is not None and w != who),
                    ]
                )
            )
        self._want(who, Want.RESIZE, deadline_s)
        if (
            self._epoch is not NO_EPOCH
            and self.config.leaving.notify_signal
            and not self._workers.attached()
        ):
            self._workers.signal(self.config.leaving.notify_signal)

    def _act_on_health(self, verdict: health.Verdict) -> None:
        """A GPU reported something. Its node is left if it is sick; at once, without a
        snapshot, when its memory cannot be trusted."""
        found, action = verdict.finding, verdict.action
        self.journal.record(
            HealthSeen(self.name, found.gpu, found.what, found.message, action.name.lower())
        )
        why = f"GPU {found.gpu}: {found.what} ({found.message})"
        if action is not health.Action.IGNORE:
            print(f"harness run: {why}: {verdict.reason}", flush=True)
        if action is health.Action.SNAPSHOT:
            self._want(f"health:{found.what}", Want.SNAPSHOT)
        elif action in (health.Action.DRAIN, health.Action.KILL):
            grace_s = 0.0 if action is health.Action.KILL else self.config.fitness.unfit_grace_s
            self._declare_unfit(why, grace_s)

    def _declare_unfit(self, why: str, grace_s: float) -> None:
        """Leave, and tell who launched us not to come back here. Workers have `grace_s` to
        reach a step boundary."""
        self._unfit = self._unfit or why
        by_s = time.monotonic() + grace_s
        self._unfit_by_s = by_s if self._unfit_by_s is None else min(by_s, self._unfit_by_s)
        if grace_s > 0:
            self._must_leave(f"unfit: {self._unfit}", "health:unfit", time.time() + grace_s)
        else:  # no mark: nothing of it may be saved
            self._leaving = f"unfit: {self._unfit}"

    def _gone_code(self) -> int:
        return UNFIT if self._unfit else DRAINED

    def _heed_leader(self, now: float) -> None:
        """Does anybody lead the run? If nobody has for too long, this node drains. Raises
        StoreUnavailable; then it looks again later."""
        if (
            not self._leaderless.bound_s
            or self._leaving
            or not self._due("lease", now, self.config.timing.lease_s)
        ):
            return
        if why := self._leaderless.see(now, *sign_of_life(self.store, self._leaderless.term)):
            self.journal.record(NoticeSeen(self.name, "lease", "kill", why, None))
            print(f"harness run: {why}; this node drains", flush=True)
            self._must_leave(why, "leaderless", None)

    def _want(self, who: str, want: Want, deadline_s: float | None = None) -> None:
        if self._wants.get(who) != (want, deadline_s) or want is Want.SNAPSHOT:
            self._wants[who] = (want, deadline_s)
            self._write_mark()

    def _reigning(self) -> tuple[str, tuple[Want, float | None]]:
        """Of all that is wanted, what the mark says."""
        who = max(self._wants, key=lambda w: self._wants[w][0], default="")
        return who, self._wants.get(who, (Want.NOTHING, None))

    def _write_mark(self) -> None:
        """The mark is a file: any person or program may leave one, and no signal handler is
        needed."""
        if not self._wants:
            self.mark_path.unlink(missing_ok=True)
            return
        who, (want, deadline_s) = self._reigning()
        marks.write(self.mark_path, want, who, deadline_s)

    # ---- between epochs --------------------------------------------------------------------------
    def _settle_s(self) -> float:
        """How long we can wait for uploads now: as long as the node lives, when that is known."""
        deadlines = [deadline for _, deadline in self._wants.values() if deadline is not None]
        return max(0.0, min(deadlines) - time.time()) if deadlines else self.config.uploads.settle_s

    def _say_ready(self, now: float) -> bool:
        """A worker may have died and left a snapshot to send: no newer epoch may begin before
        it is committed."""
        if self._ready is None:
            return True
        if now < self._settle_until_s and self._uploads.busy():
            return False
        self._tell(**self._ready)
        self._ready = None
        return True

    def _seek_epoch(self, now: float) -> int | None:
        if not self._say_ready(now):
            return None
        if (stop := self._stop_order(now)) is not None:
            self._reason = stop
            return STOPPED
        if self.rendezvous.me.state == "warming":
            if not (self._leaving or now >= self._warm_by_s or self._workers.warm()):
                return None
            self._tell(state="ready")
        if self._leaving:
            self._reason = self._leaving
            return self._gone_code()
        last = self.rendezvous.newest()
        me = self.rendezvous.me
        again = me.failure and (me.failure, me.failure_step) == (last.failure, last.failure_step)
        not_its_fault = me.failure.startswith(("SIG", "Hung")) or "StoreUnavailable" in me.failure
        limit = SAME_KILL_LIMIT if not_its_fault else SAME_FAILURE_LIMIT
        if me.failure.startswith("BadInput"):
            return self._give_up(me.failure.removeprefix("BadInput: "))
        if again and last.streak + 1 >= limit:
            return self._give_up(
                f"crash loop: the script failed {last.streak + 1} times in a row at the same point "
                f"(after step {me.failure_step}): "
                f"{me.failure}. Mend the script, then launch again: the run resumes at step "
                f"{me.failure_step}."
            )
        if self._fruitless >= FRUITLESS_LIMIT:
            return self._give_up(
                f"{self._fruitless} epochs in a row ended without a new snapshot after step "
                f"{max(0, self._fruitful_step)} "
                f"(the last: {self._end}{', ' + me.failure if me.failure else ''}); see the "
                "workers' logs, then launch again."
            )
        epoch = self.rendezvous.try_form(self._max_world())
        if epoch is not None:
            self._enter(epoch)
            return None
        if self.rendezvous.is_over:
            self._reason = "the run has ended: its final snapshot is committed"
            print(
                f"harness run: {self._reason}; for another training, name another run URL",
                flush=True,
            )
            return FINISHED
        if now - self._ready_since_s > self.config.timing.wait_limit_s:
            self._reason = f"no place in any epoch for {self.config.timing.wait_limit_s:.0f} s"
            return FENCED
        return None

    def _give_up(self, reason: str) -> int:
        """More tries would only burn money."""
        self._reason = reason
        ask_to_stop(
            self.store, StopOrder(self._reason, self.name, failed=True, log_tail=self._last_tail)
        )
        return STOPPED

    def _max_world(self) -> int | None:
        if self._room is None:
            try:
                identity = json.loads(self.store.get("run.json"))  # never changes
                micro_batch = int(identity.get("micro_batch") or 0)
                self._room = (
                    int(identity["global_batch"]) // micro_batch if micro_batch else NO_LIMIT
                )
            except (NotFound, ValueError, KeyError, TypeError, AttributeError):
                # not there yet, or not ours: workers say what is wrong
                return None
        return None if self._room == NO_LIMIT else self._room

    def _enter(self, epoch: Epoch) -> None:
        self._workers.clear_signs()
        self._wants.clear()
        self._entered_s = time.monotonic()
        self._epoch, self._first_end_s, self._peer_left_s, self._waiting_since_s = (
            epoch,
            None,
            None,
            None,
        )
        self._tell(
            state="in",
            epoch=epoch.epoch,
            end="",
            failure="",
            failure_step=0,
            master_port=free_port(self.config.addr),
        )
        self._workers.start(epoch, self._uploads.stage.folder, patience=2.0**self._hangs)
        if epoch.members[0] == self.name:
            self.journal.record(EpochStarted(epoch.epoch, epoch.members, epoch.world, epoch.reason))
            self._helpers.start()
        else:
            self._helpers.release_replica()

    def _tell(self, **changes: Any) -> None:
        # what we say of ourselves goes out with the next heartbeat then
        with contextlib.suppress(StoreUnavailable):
            self.rendezvous.say(**changes)

    # ---- in an epoch -----------------------------------------------------------------------------
    def _watch_workers(self, now: float) -> int | None:
        self._say_last_words()
        if self._unfit_by_s is not None and now >= self._unfit_by_s:
            return self._abandon(self._unfit)
        if hung := self._workers.find_hung(now):
            self._hangs += any(w.guilty for w in hung)
            return self._leave(self._end_workers())
        codes = [w.process.poll() for w in self._workers.all]
        ended = [c for c in codes if c is not None]
        if not ended:
            return None
        self._first_end_s = self._first_end_s or now
        # After a failure the others only need time to write their own error, and none once we know
        # whose fault it is; after a planned end they may still be saving.
        linger_s, evidence_s = 60.0, 0.0
        if any(c not in ORDERLY for c in ended):
            guilty = any(self._guilty(w) for w in self._workers.all)
            if guilty and self.rendezvous.me.end != FAILING:
                self.rendezvous.mention(end=FAILING)
            linger_s = LINGER_S if guilty else 3.0
            # Only the others can prove that it was one of them; by then who is dead is known to be.
            evidence_s = (
                0.0
                if guilty or len(self._epoch.members) == 1
                else self.config.timing.dead_s + self.config.timing.beat_s
            )
        if len(ended) < len(codes) and now - self._first_end_s < linger_s:
            return None
        if now - self._first_end_s < evidence_s and not self._lost_member(self._epoch):
            return None
        return self._leave(self._end_workers())

    def _say_last_words(self) -> None:
        """Near a deadline that the workers have not met: write what is safe and what is not.
        They are not killed: the cloud may be late."""
        now_s = time.time()
        for who, (want, deadline_s) in self._wants.items():
            if (
                want is Want.SNAPSHOT
                or deadline_s is None
                or who in self._grace_spent
                or now_s < deadline_s - LAST_WORDS_S
            ):
                continue
            self._grace_spent.add(who)
            signs = self._workers.signs()
            step = max((s.step for s in signs), default=-1)
            committed = -1
            with contextlib.suppress(StoreUnavailable):
                committed = max((r.step for r in self.snapshots.refs()), default=0)
            saving = self._uploads.busy() or any(
                s.place in (progress.Place.STAGING, progress.Place.SAVING) for s in signs
            )
            verdict = "the workers have not reached a step boundary"
            if saving:
                verdict = f"a snapshot is on its way and may come too late (workers at step {step})"
            verdict += (
                f"; step {committed} is committed" if committed >= 0 else "; the bucket is silent"
            )
            self.journal.record(
                GraceSpent(self.name, self._epoch.epoch, deadline_s, step, committed, verdict)
            )
            print(f"harness run: the deadline of {who} is here: {verdict}", flush=True)
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()

    def _end_workers(self) -> list[int]:
        """Their exit codes."""
        if stuck := self._workers.end():
            self._unfit = self._unfit or (
                f"rank {stuck[0]} cannot be killed: it hangs in the kernel, most likely in a driver"
            )
        return [w.code for w in self._workers.all]

    def _leave(self, codes: list[int]) -> int | None:
        """Our workers of this epoch have ended with `codes`: what now?"""
        epoch, self._epoch, self._ready_since_s = self._epoch, NO_EPOCH, time.monotonic()
        failure, step = "", 0
        code: int | None
        # it cannot read what others can
        if unfit := next((w for w in self._workers.all if w.code == UNFIT), None):
            self._unfit = self._unfit or unfit.failure()[1]
        # killed by us, or by their GPU
        if self._unfit and any(c not in (FINISHED, RESIZE, DRAINED, STOPPED) for c in codes):
            why, code = "unfit", UNFIT
        elif self._leaving and not self._workers.attached():
            # it heard the notice in its own way; whether it is done only it knows
            why, code = "drained", self._gone_code()
        elif all(c == FINISHED for c in codes):
            why, code = self._well_ended(epoch)
        elif any(c == STOPPED for c in codes):
            why, code = "stopped", STOPPED
        elif any(c == DRAINED for c in codes):
            why, code = "drained", self._gone_code()
        elif any(c == FENCED for c in codes):
            why, code = "fenced", FENCED
        elif all(c in (FINISHED, RESIZE) for c in codes):
            why, code = ("drained", self._gone_code()) if self._leaving else ("resize", None)
        else:
            why, failure = self._diagnose(epoch)
            code = None
            # then the failure counts as one at the start
            with contextlib.suppress(StoreUnavailable):
                committed = max((r.step for r in self.snapshots.refs()), default=0)
                step = committed if failure else 0
                self._count_fruitless(committed)
        if code is None and self._hangs >= self.config.fitness.hangs_allowed:
            self._unfit = f"its workers hung {self._hangs} times"
            code = UNFIT
        self.journal.record(EpochLeft(epoch.epoch, self.name, why))
        self._end = why
        if why != "unfinished":
            self._reason = f"unfit: {self._unfit}" if code == UNFIT else why
        if code == FINISHED or code is None:
            with contextlib.suppress(StoreUnavailable):
                self.journal.flush()
        if code is None:
            self._ready = {"state": "ready", "end": why, "failure": failure, "failure_step": step}
            self._settle_until_s = time.monotonic() + self._settle_s()
            self._say_ready(time.monotonic())
            self._workers.warm_up()
            self._next_tick_s = 0.0
        return code

    def _count_fruitless(self, committed: int) -> None:
        """An epoch of ours was broken off. Without a controller nobody else counts what commits
        nothing."""
        unseen = not self._workers.attached() and time.monotonic() - self._entered_s >= FRUITLESS_S
        self._fruitless = 1 if unseen or committed > self._fruitful_step else self._fruitless + 1
        self._fruitful_step = max(self._fruitful_step, committed)

    @staticmethod
    def _suspect(worker: Worker) -> bool:
        """Has it failed as workers do whose peer was lost? Its words prove nothing: see
        `_lost_member`."""
        if worker.hung or worker.process.poll() in (None, *ORDERLY):
            return False
        kind, text = worker.failure()
        return kind in LOST_TYPES or any(sign in text for sign in LOST_WORDS)

    def _guilty(self, worker: Worker) -> bool:
        """Has it ended by a fault of its own, for all that can be seen of it alone?"""
        return worker.process.poll() not in (None, *ORDERLY) and not self._suspect(worker)

    def _lost_member(self, epoch: Epoch) -> str:
        """Another member of this epoch that is dead, gone, or has failed, or whose line fell;
        "": all are fine, as far as can be told."""
        with contextlib.suppress(StoreUnavailable):
            for m in self.rendezvous.watch(epoch.members):
                if m.member == self.name or m.end == "finished":
                    continue
                left = m.epoch > epoch.epoch or (
                    m.epoch == epoch.epoch and (m.state == "ready" or m.end == FAILING)
                )
                heard = self._lines.heard(m.member)
                if left or m.state in ("gone", "dead") or (heard.seen and not heard.up):
                    return m.member
        return ""

    def _diagnose(self, epoch: Epoch) -> tuple[str, str]:
        """Who failed and who is only a victim: ("failed" | "killed" | "peer-lost", signature of our
        own failure).

        A victim is one whose error looks like it *and* beside whom somebody else was lost: another
        worker of this node, or a member.
        """
        failed = [
            w
            for w in self._workers.all
            if w.code not in (FINISHED, RESIZE) and (w.hung or not w.ended_by_us)
        ]
        suspects = [w for w in failed if self._suspect(w)]
        victims = {w.rank for w in [*suspects, *(w for w in failed if w.hung and not w.guilty)]}
        if suspects and len(suspects) == len(failed) and not self._lost_member(epoch):
            # nobody else was lost before it, so it was the first
            victims.discard(min(suspects, key=lambda w: w.failed_s).rank)
        verdict, signature = "peer-lost", ""
        for worker in failed:
            code, victim = worker.code, worker.rank in victims
            kind, text = worker.failure()
            kind, text = ("PeerLost", text[:200]) if victim else (kind, text[:2000])
            tail = "\n".join(worker.tail)
            self.journal.record(
                WorkerFailed(self.name, epoch.epoch, worker.rank, code, kind, text, tail)
            )
            if victim:
                continue
            if not signature:
                verdict = "hung" if worker.hung else "killed" if code < 0 else "failed"
                signature = kind if code < 0 else f"{kind}: {text[:300]}"
                self._last_tail = tuple(worker.tail)
        return verdict, signature

    def _is_over(self) -> bool:
        """Has the run ended? Raises StoreUnavailable."""
        refs = self.snapshots.refs()
        try:
            return bool(refs) and bool(self.snapshots.ended(self.snapshots.load(refs[0])))
        except (NotFound, SnapshotCorrupt):
            # pruned just now, or damaged: workers will find what is good, and what it says
            return False

    def _well_ended(self, epoch: Epoch) -> tuple[str, int]:
        """All our workers ended with status 0: how the epoch ended, and our exit code. The node
        of rank 0 answers for the run."""
        if self.name != epoch.members[0]:
            return "finished", FINISHED
        give_up_s = time.monotonic() + self.config.timing.wait_limit_s
        while True:
            try:
                if not self._workers.attached():
                    self._finish_for_script(epoch)
                elif not self._is_over():
                    reason = (
                        "the script exited 0 before the run's last step was committed as such: let "
                        "it end by itself (no os._exit), or call "
                        "run.finish() after its last step"
                    )
                    return "unfinished", self._give_up(reason)
                return "finished", FINISHED
            except StoreUnavailable:  # all is done but to say so
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(1.0)

    def _finish_for_script(self, epoch: Epoch) -> None:
        """A script without a session has ended well: commit that, since progress is what is
        committed. Snapshots that it made in its own way are not touched: the run ends with the
        newest of them, or else with an empty one of all ranks."""
        why = "the script exited 0"
        if refs := self.snapshots.refs():
            self.snapshots.end(refs[0], why)
            return
        ref = Ref(epoch=epoch.epoch, step=0)
        data = {"final": True, "ended": why, "samples": None, "parent": ""}
        for rank in range(epoch.world):
            self.snapshots.write(
                ref, rank, epoch.world, {}, {}, data if rank == 0 else {}, token=self.name
            )
        self.snapshots.commit(ref, epoch.world)

    def _watch_peers(self, now: float) -> int | None:
        epoch = self._epoch
        if self._workers.attached():
            self._uploads.ensure()
        if (stop := self._stop_order(now)) is not None:
            self._reason = stop
            self._want("stop", Want.STOP)
        self._heed_requests()
        fence_s = FENCE_S if self._lines.all_up() else self.config.timing.tick_s
        if self._due("fence", now, fence_s) and self.rendezvous.newest().epoch > epoch.epoch:
            return self._abandon("a newer epoch exists without us")
        first = (
            next(n for n in epoch.members if n == self.name or n not in self._absent) == self.name
        )
        everybody = {
            m.member: m
            for m in (self.rendezvous.look() if first else self.rendezvous.watch(epoch.members))
        }
        self._absent = {n for n, m in everybody.items() if m.state in ("gone", "dead")}
        peers = [everybody[n] for n in epoch.members if n != self.name and n in everybody]
        if dead := [p.member for p in peers if p.state == "dead"]:
            return self._abandon(f"lost {', '.join(dead)}")
        # told to go between its seal and its start
        if absent := [p.member for p in peers if p.state == "gone" and p.epoch < epoch.epoch]:
            return self._abandon(f"{', '.join(absent)} went before its workers began", RESIZE)
        left = [
            p
            for p in peers
            if p.epoch > epoch.epoch or (p.state in ("ready", "gone") and p.end != "finished")
        ]
        if left:
            self._peer_left_s = self._peer_left_s or now
            planned = all(p.end in ("resize", "drained", "stopped", "") for p in left)
            if now - self._peer_left_s > (30.0 if planned else PEER_LEFT_S):
                return self._abandon(
                    f"{left[0].member} has left this epoch and our workers did not notice"
                )
        self._invite(now, epoch, list(everybody.values()))
        return None

    def _abandon(self, why: str, code: int = -signal.SIGKILL) -> int | None:
        """End our workers; `code`: what their end shall count as."""
        print(f"harness run: epoch {self._epoch.epoch} is over: {why}", flush=True)
        self._end_workers()
        return self._leave([code] * len(self._workers.all))

    def _invite(self, now: float, epoch: Epoch, everybody: list[Member]) -> None:
        """The first living member of the epoch asks for a bigger world when somebody fitting
        waits to get in."""
        alive = [m for m in everybody if m.state not in ("gone", "dead")]
        first = next((n for n in epoch.members if any(m.member == n for m in alive)), None)
        room = self._max_world()
        room = room - epoch.world if room is not None else NO_LIMIT
        waiting = [m for m in self.rendezvous.waiting(epoch, alive) if m.nproc <= room]
        if first != self.name or not waiting:
            self._waiting_since_s = None
            return
        self._waiting_since_s = self._waiting_since_s or now
        warming = any(m.state == "warming" and m.place == self.config.place for m in alive)
        if not warming or now - self._waiting_since_s >= BATCH_S:
            self._want("grow", Want.RESIZE)

    def _due(self, what: str, now: float, every_s: float) -> bool:
        """Is it time for this look at the bucket? Then the next one is in `every_s`."""
        if now < self._due_s.get(what, 0.0):
            return False
        self._due_s[what] = now + every_s
        return True

    def _stop_order(self, now: float) -> str | None:
        """Why the run shall stop, if it shall. One list tells of everything that is asked of it."""
        if self._due("control", now, self.config.timing.control_s):
            self._control = set(self.store.list(CONTROL))
        order = stop_order(self.store) if STOP_KEY in self._control else None
        return order.reason if order else None

    def _heed_requests(self) -> None:
        """What people ask of the run, and controllers of this node."""
        keys = self._control
        for key in sorted(keys - self._control_seen if self._control_seen is not None else set()):
            if key.startswith(SNAPSHOT):
                self._want(key, Want.SNAPSHOT)
        self._control_seen = keys
        if self.config.attempt and f"{LEAVE}{self.config.attempt:06d}.json" in keys:
            self._must_leave("released", "leave", None)
