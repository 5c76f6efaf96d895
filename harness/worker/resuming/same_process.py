"""Going on in the next world in the same process, when another rank is lost or others join. Runs in
the worker.

A process that ends costs more than the step: what the script does before its loop (imports, data,
the model, its compilation) comes again. So a worker that can stays: it hangs up, keeps its state
(`kept_state.py`), waits for the agent's order (`node/next_world.py`), and the session begins anew
in this process with the objects that were prepared. From there on everything is as in a new
process: it meets the others, resumes from the newest state, and the loop yields the next step. The
weights that this process holds are overwritten, so what the script has done to them since does no
harm.

A newcomer's process does the same before its first world: it runs the script up to its loop while
the others train (`Peers.beside`), and waits for the order there. So a join costs them no more than
that of a process that stays.

A process ends, and is begun anew, where that would not be sound: outside the script's first loop
over `run.steps` or `run.loader`, or if the script exchanges something with other ranks before it,
since a newcomer begins there and would find nobody to exchange it with, or asks for its replica's
number, by which it has shared something out; where ranks keep no state; if the script has process
groups of its own, which die with the world; if data is a stream, whose place only a new reader
finds; if the model has buffers that change and are in no snapshot; in a later phase of the run; if
what there is to resume from lies in another epoch of a `run.loader` than the script does; or if
there is nothing yet to resume from, since the model no longer has the values that it began with.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from torch.distributed import distributed_c10d as c10d

from harness.core.world import RESIZE
from harness.node.forkserver import PEER_GONE, write_error
from harness.node.heartbeat import name_process
from harness.node.marks import STAYS
from harness.node.next_world import LOST, PARTED, wait
from harness.worker import alone
from harness.worker.process_group import Peers
from harness.worker.resuming.kept_state import StateKeeper
from harness.worker.run_context import Run
from harness.worker.snapshotter import Snapshotter, StagingBuffers
from harness.worker.training_state import Training

REST_S = 2.0  # for the rest of the loop's body, behind an update that was lost
OURS = 2  # process groups that a session makes in a world of replicas
SWITCH = "HARNESS_STAY"  # "0": processes end with their world


class WorldOver(Exception):
    """The error for a loop whose world has ended, and whose process goes on. `why`: what would have
    ended the process."""

    def __init__(self, why: RuntimeError | SystemExit):
        super().__init__(str(why))
        self.why = why


@contextlib.contextmanager
def going_on(begin: Callable[[RuntimeError | SystemExit], None]) -> Iterator[None]:
    """Call `begin` if the world ends in this block, to begin in the next one. `begin` is given what
    would have ended the process."""
    try:
        yield
    except WorldOver as over:
        begin(over.why)


class SameProcess:
    """Decides whether this process goes on in the next world, and waits for it. `resumes`: the end
    of the last world, until this one has resumed; None: this is the process' first world."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        snapshotter: Snapshotter,
        hold: StagingBuffers,
        keeper: StateKeeper,
        environ: Mapping[str, str],
    ):
        self._peers, self._run, self._training = peers, run, training
        self._snapshotter, self._hold, self._keeper = snapshotter, hold, keeper
        self._environ = dict(environ)
        mark = environ.get("HARNESS_MARK") if environ.get(SWITCH, "1") != "0" else None
        self._node = Path(mark).parent if mark else None
        self.resumes: RuntimeError | SystemExit | None = None
        self.holds_garbage = False  # of the last world
        # collectives when the script's own code outside its loops was last entered; None: this is
        # no such code. And whether that code has made some, which a newcomer would make alone, or
        # has asked for its share of something, which the next world shares out otherwise
        self._entered_at: int | None = peers.collectives()
        self._needs_others = False
        self._in_first_loop = True
        # the others wait, and the state is kept: what the script does behind the loss may not last
        self._ends = threading.Timer(REST_S, os._exit, (LOST,))
        self._ends.daemon = True

    def check(self, step: int) -> None:
        """Check, once this world has resumed, that it has: a model that was trained before is no
        begin. Raises the error that would have ended this process."""
        before, self.resumes = self.resumes, None
        if before is not None and not step:
            raise before
        self.holds_garbage = before is not None

    def collect(self) -> None:
        """Free the memory of the last world, after the first step of this one: until then the
        script holds a step of that."""
        self.holds_garbage = False
        gc.collect()

    def allow(self, streams: bool = False) -> None:
        """Let the process go on from now on, if that is sound. `streams`: data is a stream."""
        self._keeper.goes_on = self._can_wait and not streams
        self._show(self._may)

    def forbid(self) -> None:
        """End with this world again: a loop is over."""
        self._keeper.goes_on = False
        self._show(False)

    @property
    def _can_wait(self) -> bool:
        return (
            self._node is not None
            and self._run.phase.number == 1
            and threading.current_thread() is threading.main_thread()
        )

    def _show(self, stays: bool) -> None:
        """Show the agent whether this process would go on, so that newcomers prepare beside it."""
        if self._node is not None:
            with contextlib.suppress(OSError):  # the disk is full: newcomers begin with their world
                mark = self._node / STAYS
                mark.touch() if stays else mark.unlink(missing_ok=True)

    def enter(self) -> None:
        """Enter the session's code, or a loop, from the script's own code outside its loops."""
        if self._entered_at not in (None, self._peers.collectives()):
            self.needs_others()
        self._entered_at = None

    def leave(self) -> None:
        """Return to the script's own code."""
        self._entered_at = self._peers.collectives()

    def needs_others(self) -> None:
        """Note, outside the loops, that the script's objects depend on which ranks there are."""
        if self._entered_at is not None:
            self._needs_others = True
            self._show(False)

    def begin(self, first: bool) -> None:
        """Begin to train; in a process that prepares beside a world, raise WorldOver instead, for
        it to wait for the next one. Raises SystemExit if that one's process must begin anew.
        `first`: this is the script's first loop."""
        self._in_first_loop = first
        if self._peers.beside:
            why = SystemExit(RESIZE)
            raise WorldOver(why) if self._can_wait and not c10d._world.pg_map else why

    @property
    def _may(self) -> bool:
        return (
            self._keeper.goes_on
            and self._keeper.is_possible
            and self._peers.copy_ranks == 1
            and self._peers.formed_here
            and not self._needs_others
            and self._in_first_loop
            and not alone.is_hidden()
            and len(c10d._world.pg_map) <= OURS
            and not self._training.forgets()
        )

    @property
    def keeps(self) -> bool:
        """True if the state can be kept in memory for the next world, on all ranks."""
        return self._keeper.is_possible and self._peers.copy_ranks == 1

    def keep(self) -> bool:
        """Keep the state at a step boundary, and return whether this rank has."""
        self._keeper.note(surely=True)
        return self._keeper.keep()

    def survives(self, error: RuntimeError) -> bool:
        """Hang up and keep the state, if the error says that another rank is lost. Return whether
        the process goes on: if that is sound, and there is a state to go on from."""
        if not (PEER_GONE.search(str(error)) and self._may and self._peers.hang_up()):
            return False
        self._snapshotter.abandon()
        self._keeper.keep()
        if not (self._snapshotter.saved_step > 0 or self._keeper.has_kept()):
            return False
        write_error(error)  # for the agent, as if it had ended the process
        self._ends.start()
        return True

    def end(self, why: RuntimeError | SystemExit) -> NoReturn:
        """Raise what has ended the world at a step boundary, as WorldOver if the process goes on
        behind it."""
        if isinstance(why, SystemExit):
            goes_on = why.code == RESIZE and self._may
        else:
            goes_on = self.survives(why)
        raise WorldOver(why) if goes_on else why

    def wait(self, why: RuntimeError | SystemExit) -> dict[str, str]:
        """Let go of the world, and wait for the next one. Return the environment that it begins
        with. Raises `why`, which would have ended this process, if no order comes."""
        assert self._node is not None
        self._ends.cancel()
        self._keeper.close()
        self._peers.disband()
        self._hold.close()
        self._training.release()
        self._run.close_soon(within_s=0.0)
        status = PARTED if isinstance(why, SystemExit) else LOST
        if (order := wait(self._node, status)) is None:
            raise why
        name_process(f"rank-{order['RANK']}")
        return {**self._environ, **order}
