"""The requests that a rank knows of, and its votes for them: at each step boundary, and amid a long
step whose end would come after the deadline of a notice. Runs in the worker.

Between two steps the votes are summed with the step's numbers (`Work.done`). Amid a step: the
training state is whole until the optimizers step: micro-batches only add to gradients, which no
snapshot holds. So the ranks vote between micro-batches, and a step that would end too late is
dropped: what its micro-batches have changed is put back, the state as it was before the step
becomes the snapshot, and the step is done again, from its first micro-batch, by whoever resumes.
The model's buffers are copied at the begin of a step and put back. Everything else is noted at the
boundary before (`NotedState`): the process leaves, so only the snapshot need be as it was then.
Generators are seeded for every micro-batch, so no state of theirs is part of a snapshot; the
statistics of BatchNorm are added only behind the last micro-batch. What cannot be noted (a large
tensor of `prepare(state=...)` that the loop's body changes in place for each micro-batch) cannot be
put back: then the step is not dropped, and the rank says why.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.node.heartbeat import WorkerPhase
from harness.node.marks import ATTACHED, SIGNALS, WAITING, MarkReader, Want
from harness.worker.boundary import VoteResult
from harness.worker.step_timing import COMMUNICATION, marks_of
from harness.worker.training_state import NotedState

if TYPE_CHECKING:
    from harness.worker.step import Work

# The requests that this rank knows of, from the node's mark and from signals.


class Votes:
    """The votes of this rank. `mark`: the mark's file; None without an agent. `leads`: this is
    rank 0."""

    def __init__(self, mark: Path | None, leads: bool):
        self._mark, self._leads = mark, leads
        self._reader = MarkReader(mark)
        self._signalled = Want.NOTHING
        self.enough = ""  # why the script on this rank wants the run to end; "": it does not

    def listen(self) -> None:
        """Handle signals, and show the agent that this rank reads its mark."""
        in_main = threading.current_thread() is threading.main_thread()
        if self._mark is not None:
            self._mark.with_name(ATTACHED).touch()
            if in_main:
                # systemd and Slurm send it to every process of a node; it is for the agent, which
                # passes it on by the mark.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                for want, number in SIGNALS.items():
                    signal.signal(number, lambda *_, want=want: self._signal(want))
                    signal.siginterrupt(number, False)
        elif in_main:
            signal.signal(signal.SIGTERM, lambda *_: self._signal(Want.DRAIN))
            signal.signal(signal.SIGUSR1, lambda *_: self._signal(Want.SNAPSHOT))

    def _signal(self, want: Want) -> None:
        self._signalled = max(self._signalled, want)

    def cast(
        self,
        wants: torch.Tensor,
        step: int,
        due: Mapping[Want, Callable[[int], bool]],
        quiet: bool = True,
    ) -> None:
        """Add this rank's requests for the boundary behind `step`: wants[w] > 0 on any rank means
        that w is wanted. `due`: rank 0 calls these to find out what is due. `quiet`: no
        snapshot is in flight; else `WAITING` requests would make training wait until that one is
        committed, for as long as one node's bucket does not answer, so they wait instead."""
        for want in (self._reader.read().want, self._signalled):
            if quiet or want not in WAITING:
                wants[want] += 1
        if self._leads:
            for want, is_due in due.items():
                wants[want] += is_due(step)

    def urgent(self, seconds: float) -> Want:
        """Return this node's request to leave, if its deadline comes within `seconds`; else
        NOTHING. Only the mark has a deadline: a signal and a mark by hand have none."""
        mark = self._reader.read()
        late = mark.deadline_s is not None and time.time() + seconds > mark.deadline_s
        return mark.want if late and mark.want > Want.SNAPSHOT else Want.NOTHING

    @property
    def know_deadlines(self) -> bool:
        """True if an agent tells this rank when its node ends."""
        return self._mark is not None

    def asked(self, want: Want) -> VoteResult:
        """Return the event that the ranks want this, with the reason as far as this rank knows."""
        return VoteResult(want, self._reader.read(), self._signalled)

    def answered(self) -> None:
        """Record that a requested snapshot is being made."""
        self._reader.answered()
        self._signalled = Want.NOTHING


# Votes amid a step.

VOTE_EVERY_S = 2.5  # the least time between two votes; a step of less than two of these has none
SPARE_S = 2.0  # between the commit of a snapshot and the deadline


class HalfSteps:
    """The votes amid long steps, and the dropping of a step. `leave`: acts on the ranks' summed
    votes for each `Want`, between two steps.

    The ranks vote at equal shares of a step, so that ranks of different speeds, each with a share
    of micro-batches to match, come there at the same time.
    """

    def __init__(self, work: Work, leave: Callable[[torch.Tensor], None]):
        self._work, self._leave = work, leave
        self._at: Collection[int] = ()  # the micro-batches of this rank that a vote comes before
        self._rounds, self._began_s = 0, 0.0
        self._before: NotedState | None = None
        # On a GPU the host runs ahead; it waits at each vote for what it had queued at the last.
        self._marks = marks_of(work.peers.device)
        self._queued: Any = None

    @property
    def _most_votes(self) -> int:
        return int(self._work.log.usual_step_s / VOTE_EVERY_S)

    def note(self, long: bool = False) -> None:
        """Note the state at a step boundary, if the steps are long, on all ranks. `long`: they are,
        whatever they take."""
        wanted = long or self._most_votes > 1
        self._before = NotedState(self._work.training) if wanted else None

    def begin(self, rounds: int, shares: Sequence[int]) -> bool:
        """Begin `rounds` micro-batches of a step on this rank, on all ranks. `shares`: those of all
        replicas; (): they may not be dropped. Return whether there will be votes, so that the
        buffers must be noted."""
        may_drop = shares and self._before is not None
        votes = min(*shares, rounds, self._most_votes) if may_drop else 0
        self._at = {vote * rounds // votes for vote in range(1, votes)}
        self._rounds, self._began_s = rounds, time.monotonic()
        return bool(self._at)

    def look(self, done: int) -> None:
        """Vote, if it is time to, before the micro-batch that follows `done` ones of this step, and
        leave if the ranks agree (SystemExit)."""
        if done in self._at:
            self._vote(self._rest_s(done), f"before micro-batch {done + 1} of {self._rounds}")

    def part(self, rest_s: float) -> None:
        """Vote between two micro-batches of a step of the script's own loop, on all ranks, and
        leave if they agree (SystemExit). `rest_s`: the time that the rest of the step takes."""
        if self._before is not None:
            self._vote(rest_s, "between two micro-batches")

    def _vote(self, rest_s: float, where: str) -> None:
        w = self._work
        w.timer.enter(COMMUNICATION)
        w.peers.life.tell(WorkerPhase.REDUCE)
        self._wait_for_device()
        wants = torch.zeros(len(Want), dtype=torch.int64)
        wants[w.votes.urgent(rest_s + w.rhythm.commit_s + SPARE_S)] = 1
        wants[Want.NOTHING] = 0
        if w.peers.control is not None:
            dist.all_reduce(wants, group=w.peers.control)
        if wants.any():
            self._drop(wants, where)
        w.peers.life.tell(WorkerPhase.COMPUTE)

    def _wait_for_device(self) -> None:
        if self._queued is not None:
            self._marks.wait(self._queued)
            self._marks.give_back([self._queued])
        self._queued = self._marks.take()

    def _rest_s(self, done: int) -> float:
        """Return the seconds that the rest of the step takes, by what the steps before took or by
        what this one took so far, whichever is more."""
        left = (self._rounds - done) / self._rounds
        here_s = (time.monotonic() - self._began_s) / done * (self._rounds - done)
        return max(self._work.log.usual_step_s * left, here_s)

    def _drop(self, wants: torch.Tensor, where: str) -> None:
        """Put the state back and leave, unless a rank cannot; then this step is done to its end."""
        w, number = self._work, self._work.run.step + 1
        assert self._before is not None and w.training.buffers is not None
        changed = self._before.changed() + w.training.buffers.without_copy()
        if cannot := next((one for one in w.peers.gather(changed[:1]) if one), None):
            self._at, self._before = (), None
            w.run.warn(
                f"step {number} will end too late for the notice, and cannot be dropped half way: "
                f"{cannot[0]!r} has changed since its begin; change it behind the update only",
                number,
            )
            return
        w.peers.print(
            f"harness: step {number} would end too late for the notice, so it is dropped {where}; "
            "it is done again after a resume"
        )
        w.training.buffers.restore()
        w.training.put_back = self._before
        self._leave(wants)
        raise AssertionError(f"step {number} was dropped, and the ranks did not leave")
