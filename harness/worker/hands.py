"""The hands of a session's life: they perform what `machine.py` decides. Runs in the worker."""

from __future__ import annotations

import atexit
import sys
import time

import torch
import torch.distributed as dist

from harness.core.facts import SessionEnded, SessionStarted
from harness.core.world import BadInput
from harness.node.marks import Want
from harness.node.progress import WorkerPhase
from harness.worker import hidden, machine
from harness.worker.hold import Hold
from harness.worker.machine import Do
from harness.worker.resume import Resume, UnfitHosts
from harness.worker.step import Work
from harness.worker.steplog import ENOUGH, VOTES
from harness.worker.timing import HARNESS, SNAPSHOT


class Hands:
    """`total`: the last step that `steps` was asked for; `until`: that a replay stops at;
    `votes_late`: see `Session`."""

    def __init__(
        self,
        work: Work,
        hold: Hold,
        resume: Resume,
        state: machine.SessionState,
        until: int,
        late: bool,
    ):
        self._work, self._hold, self._resume = work, hold, resume
        self._peers, self._run = work.peers, work.run
        self._state = state
        self.total, self.until, self.votes_late = 0, until, late
        self.enough = ""  # why the script ends the run here, as all ranks have agreed
        # `Pending.ints` that have arrived but were not acted upon yet (`votes_late`)
        self._counted: torch.Tensor | None = None

    @hidden.world.inside()
    def turn(self, event: machine.SessionEvent) -> None:
        """Do what the event leads to. Raises BadInput, SystemExit, and what the acts do."""
        turn = machine.turn(self._state, event, self._seen())
        for act in turn.first:
            self._do(act)
        self._state = turn.state
        for act in turn.after:
            self._do(act)

    def _seen(self) -> machine.Seen:
        log, snapshotter = self._work.log, self._work.snapshotter
        return machine.Seen(
            step=self._run.step,
            total=self.total,
            until=self.until,
            saved_step=snapshotter.saved_step,
            flight_step=snapshotter.flight_step,
            pending=log.pending is not None,
            unsaved=bool(log.unsaved),
            enough=self.enough,
            leads=self._peers.rank == 0,
        )

    def _do(self, act: machine.SessionAct) -> None:
        match act:
            case machine.Snapshot(why, final):
                ended = machine.end_words(self._seen()) if final else ""
                own_loop = self._work.feed.batching is None
                self._work.timer.enter(SNAPSHOT)
                self._work.snapshotter.take(why, ended, own_loop)
            case machine.Leave(why, code):
                self._leave(why)
                if code is not None:
                    sys.stdout.flush()
                    sys.exit(code)
            case machine.Refuse(what):
                raise BadInput(what)
            case Do.RESUME:
                self.resume()
            case Do.GO_ON:
                self._go_on()
            case Do.ANSWER:
                self._work.votes.answered()
            case Do.LAND:
                self._work.snapshotter.land(must=True)
            case Do.MARK_END:
                self._peers.agree(self._mark_end)
            case Do.MARK_END_ALONE:
                self._mark_end()
                self._tell_end("finished")
            case Do.TELL_END:
                self._work.log.conclude()
                self._tell_end("finished")
            case Do.COMPARE_STEPS:
                self._compare_steps()
            case Do.PART:
                self._peers.life.tell(WorkerPhase.LEAVING)
                self._work.log.conclude()
                self._run.flush()
                self._peers.barrier()
                self._hang_up_at_exit()

    def boundary(self) -> None:
        """Between two steps: agree on what to do and do it, all ranks at the same boundary.

        With `votes_late` (on a GPU) the votes of step k are counted after step k + 1, so that no
        step waits for another rank's host.
        """
        pending = self._work.log.pending
        self._work.timer.enter(HARNESS)
        self._peers.life.tell(WorkerPhase.REDUCE)
        if not self.votes_late and pending is not None:
            self._work.log.settle()
            self.count(pending.ints[VOTES], int(pending.ints[ENOUGH]))
        elif self._counted is not None:
            self.count(self._counted[VOTES], int(self._counted[ENOUGH]))
        self._counted = pending.ints if pending is not None else None
        self._work.timer.enter(SNAPSHOT)
        training = self._work.training
        self._hold.prepare(training.state, training.frozen.left_alone)

    def count(self, votes: torch.Tensor, enough: int = 0) -> None:
        """Act on what the ranks want, once all votes are in. `enough`: so many ranks want the run
        to end."""
        if enough:
            self.hear_enough()
        want = machine.winner(votes.tolist())
        if want is not Want.NOTHING:
            self._work.log.settle()
            if want is not Want.SNAPSHOT:  # no step follows
                self._work.timer.rest()
            self.turn(self._work.votes.asked(want))

    def hear_enough(self) -> None:
        """All ranks ask here, at the same point, whether the script on any wants the run to end."""
        if not self.enough:
            said = self._peers.gather(self._work.votes.enough)
            self.enough = next((why for why in said if why), "")

    def resume(self) -> None:
        """Load the newest snapshot, if there is one, and tell that the session has started."""
        t0 = time.time()
        self.turn(machine.Begun())
        self._peers.life.tell(WorkerPhase.RESTORE)
        try:
            manifest = self._resume.restore()
        except UnfitHosts as e:
            self.turn(machine.HostsUnfit(e.mine))
            raise
        self._work.snapshotter.resumed(manifest)
        if manifest is not None:
            self._run.step = manifest.step
            self._peers.print(
                f"harness: resumed from step {manifest.step} (epoch {manifest.epoch})"
            )
        self._resume.check(manifest)
        self._work.rhythm.begin()
        self._tell_start(manifest.epoch if manifest else 0, time.time() - t0)

    def _go_on(self) -> None:
        """`steps` once more: what the last loop left open is done, and the state is what it is."""
        if self._work.log.pending is not None:
            self.boundary()
        parent = self._work.snapshotter.parent
        self._tell_start(parent.epoch if parent else 0, 0.0)

    def _tell_start(self, resumed_epoch: int, restore_s: float) -> None:
        feed, on_gpu = self._work.feed, self._peers.device.type == "cuda"
        batching = feed.batching
        self._run.fact(
            SessionStarted(
                epoch=self._run.epoch,
                world=self._peers.world,
                resumed_step=self._work.snapshotter.resumed_step,
                resumed_epoch=resumed_epoch,
                total_steps=self.total,
                global_batch=batching.global_batch if batching else 0,
                micro_batch=batching.micro_batch if batching else 0,
                shares=feed.plan.shares if batching else (),
                reduce=self._work.training.reduce,
                parallel=self._work.training.parallel,
                device=torch.cuda.get_device_name(self._peers.device) if on_gpu else "cpu",
                restore_s=restore_s,
                tier=self._resume.tier,
                read_nbytes=self._resume.read_nbytes,
            )
        )

    def _compare_steps(self) -> None:
        """The script has ended here; has it on the other ranks, at the same step?"""
        self._peers.life.tell(WorkerPhase.LEAVING)
        where = machine.where(self._seen())
        if self._peers.control is not None and not dist.is_initialized():
            raise BadInput(
                f"the script ended at {where} without its process group: call "
                "run.finish() before destroying that"
            )
        if what := machine.apart(self._peers.gather_steps(self._run.step)):
            raise BadInput(what)
        self._peers.print(f"harness: the script ended at {where}; the run ends with it")

    def _mark_end(self) -> None:
        """Rank 0: the newest snapshot is the run's last one. Its manifest says so if that was
        known when it was committed."""
        newest, snapshots = self._work.snapshotter.parent, self._run.snapshots
        if not self._run.url or newest is None:
            return
        if not snapshots.ended(snapshots.load(newest)):
            snapshots.end(newest, machine.end_words(self._seen()))

    # ---- leaving ---------------------------------------------------------------------------------
    def _tell_end(self, why: str) -> None:
        self._run.fact(SessionEnded(self._run.epoch, self._run.step, why))

    def _leave(self, why: str) -> None:
        self._peers.life.tell(WorkerPhase.LEAVING)
        self._work.log.conclude()
        self._tell_end(why)
        self._run.close()
        self._peers.barrier()
        self._hang_up_at_exit()

    def _hang_up_at_exit(self) -> None:
        atexit.unregister(self._hang_up)  # once is enough
        atexit.register(self._hang_up)

    def _hang_up(self) -> None:
        self._run.close()  # what the script logged after its last step
        with hidden.world.inside():
            if dist.is_initialized():
                dist.destroy_process_group()
