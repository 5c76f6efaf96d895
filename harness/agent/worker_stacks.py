"""Stacks of a node's silent workers, the collective that each of them waits in, and the finding
that ranks wait in different ones. Runs in the node agent; workers write their stacks on request.

A collective that only some ranks call hangs for ever: they wait for the others, and these for them
in another one. Whoever computes, validates, compiles or waits for data stands in no collective.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import harness
from harness.core.facts import StackSeen
from harness.core.masking import masked_line
from harness.node.heartbeat import DUMP_SIGNAL, Sign, WorkerPhase, cpu_s, handles, process_state

if TYPE_CHECKING:
    from harness.agent.workers import Worker

OURS = "the harness's"
ANSWER_S = 1.0  # for a worker to write its stacks
GROWTH = 1.5  # silent workers are asked again when the silence has grown by this factor
IDLE = 0.1  # whoever uses less of a CPU transfers nothing
FRAMES_KEPT = 12
MOST_NBYTES = 1 << 20  # of a worker's answer

# functions of torch.distributed that return when other ranks have called them too
COLLECTIVES = re.compile(
    r"all_(gather|reduce|to_all)(_coalesced|_into_tensor|_single)?|barrier|broadcast|gather"
    r"|monitored_barrier|recv|reduce(_scatter(_single|_tensor)?)?|scatter|send|wait_tensor"
    r"|_store_based_barrier"
)
_DISTRIBUTED = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_WRAPPERS = re.compile(r"/torch/(distributed/c10d_logger|utils/_contextlib|_ops)\.py$")
_TORCH = re.compile(r"/(site|dist)-packages/torch/|/torch/distributed/")
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')
_HEAD = re.compile(r"^(Current thread|Thread) 0x")
_HOME = f"{Path(harness.__path__[0]).parent}{os.sep}"
_STDLIB = f"{Path(os.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file.rpartition("-packages/")[2].removeprefix(_HOME)
        return f"{file}:{self.line} {self.function}"

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def of_harness(self) -> bool:
        return self.file.startswith((f"{_HOME}harness{os.sep}", f"{_HOME}storage{os.sep}"))

    @property
    def of_script(self) -> bool:
        """True if it is neither torch's, ours nor Python's own."""
        packages = "-packages/" in self.file
        own = self.file.startswith("<") or (self.file.startswith(_STDLIB) and not packages)
        return not (own or self.of_harness or _TORCH.search(self.file))


@dataclass(frozen=True)
class MainStack:
    """The calls of a rank's main thread, the innermost first."""

    frames: tuple[Frame, ...] = ()

    @cached_property
    def collective(self) -> str:
        """The collective that it waits in, and the line that called it; "": it waits in none, as
        far as can be seen."""
        inner = [frame for frame in self.frames if not _WRAPPERS.search(frame.file)]
        if not inner:
            return ""
        call = ""
        if _DISTRIBUTED.search(inner[0].file):
            if not COLLECTIVES.fullmatch(inner[0].function):
                return ""  # such as pickling for all_gather_object, which is work of its own
            while inner and _DISTRIBUTED.search(inner[0].file):
                call = inner.pop(0).function
        elif ".wait(" in linecache.getline(inner[0].file, inner[0].line):
            call = "wait"  # for a collective that was begun before: Python's own waits are Python
        return self._told(call, inner) if call else ""

    def _told(self, call: str, outer: Sequence[Frame]) -> str:
        script = next((i for i, frame in enumerate(outer) if frame.of_script), None)
        if script is None:
            return f"{call} ({outer[0].place})" if outer else call
        if script and outer[0].of_harness:
            call = f"{OURS} {outer[script - 1].function}"
        return f"{call} ({outer[script].place})"


def parse(dump: str) -> MainStack:
    """Return where the main thread stands by what faulthandler wrote of all threads: it writes the
    oldest one last, and leaves threads out if there are very many."""
    frames: list[Frame] = []
    for line in dump.splitlines():
        if _HEAD.match(line) or line == "...":
            frames = []
        elif found := _FRAME.match(line):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(Frame(found["file"], number, found["function"]))
    # how a worker is forked is of no interest
    ends = [i for i, frame in enumerate(frames) if frame.file.startswith("<frozen runpy")]
    return MainStack(tuple(frames[: ends[0]] if ends and ends[0] else frames))


@dataclass(frozen=True)
class Mismatch:
    """The finding that ranks wait in different collectives. `odd`: the ranks that are not where
    most are."""

    what: str
    odd: frozenset[int]


def mismatch(stacks: Mapping[int, MainStack]) -> Mismatch | None:
    """Judge where all ranks of a world stand. None: some rank waits in no collective, or all may
    wait in the same one."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank].collective, []).append(rank)
    if len(groups) < 2 or "" in groups:
        return None
    usual = max(groups, key=lambda call: (len(groups[call]), call.startswith(OURS)))
    told = []
    # first the script's own, which it is about
    for call in sorted(groups, key=lambda call: (call.startswith(OURS), call == usual)):
        others = sorted(set(stacks) - set(groups[call]))
        told.append(f"{_ranks(groups[call])} in {call}, which {_ranks(others)} did not enter")
    return Mismatch(
        f"ranks wait in different collectives: {'; '.join(told)}",
        frozenset(rank for call in groups if call != usual for rank in groups[call]),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class StackAnswers:
    """The workers' answers to one question, by rank."""

    at_s: float = 0.0
    stacks: Mapping[int, MainStack] = field(default_factory=dict)
    cpu_s: Mapping[int, float] = field(default_factory=dict)

    def still(self, before: StackAnswers) -> bool:
        """Return whether every rank stands where it stood before, and did nothing meanwhile."""
        idle_s = IDLE * (self.at_s - before.at_s)
        return self.stacks == before.stacks and all(
            used_s - before.cpu_s[rank] < idle_s for rank, used_s in self.cpu_s.items()
        )


class StackQuestions:
    """The questions to a node's workers where they stand. They are asked, with growing pauses, once
    all are silent for longer than usual steps take (`sure_s`), and nobody waits for an answer."""

    def __init__(self) -> None:
        self._signs: tuple[Sign | None, ...] = ()
        self._asked_s: float | None = None  # None: no answer is awaited
        self._next_s = 0.0  # the silence at which to ask
        self.answers = StackAnswers()

    def turn(self, workers: Sequence[Worker], now: float) -> bool:
        """Ask, or read the answers, if it is time. Return whether all stand as they stood when they
        were asked before: then what they wait for does not come."""
        signs = tuple(w.pulse.sign for w in workers)
        if signs != self._signs:
            self._signs, self._asked_s, self.answers = signs, None, StackAnswers()
            self._next_s = max((w.pulse.sure_s for w in workers), default=0.0)
        if not all(
            s is not None and s.place in (WorkerPhase.COMPUTE, WorkerPhase.REDUCE) for s in signs
        ):
            return False
        silent_s = min((now - w.pulse.since_s for w in workers), default=0.0)
        if self._asked_s is None:
            if silent_s > self._next_s:
                self.ask(workers)
                self._asked_s = now
            return False
        if now - self._asked_s < ANSWER_S:
            return False
        before, self._asked_s, self._next_s = self.answers, None, silent_s * GROWTH
        self.read(workers, now)
        return self.answers.still(before)

    @staticmethod
    def ask(workers: Sequence[Worker]) -> None:
        """Make workers write their stacks, without waiting for it. A stopped one writes nothing."""
        for worker in workers:
            with contextlib.suppress(OSError):
                os.truncate(worker.stacks, 0)
            pid = worker.process.pid
            if process_state(pid) != "T" and handles(pid, DUMP_SIGNAL):
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(DUMP_SIGNAL)

    def read(self, workers: Sequence[Worker], now: float) -> None:
        """Read what the workers answered."""
        self._signs = tuple(w.pulse.sign for w in workers)
        self.answers = StackAnswers(
            now,
            {w.rank: parse(text_of(w)) for w in workers},
            {w.rank: cpu_s(w.process.pid) for w in workers},
        )

    def seen(self, member: str, epoch: int, workers: Sequence[Worker]) -> list[StackSeen]:
        """Return a fact for each worker that answered and gave no sign since."""
        found = []
        for worker in workers:
            stand = self.answers.stacks.get(worker.rank)
            if stand and stand.frames and self._signs == tuple(w.pulse.sign for w in workers):
                step = worker.pulse.sign.step if worker.pulse.sign else 0
                calls = [f for f in stand.frames if not _WRAPPERS.search(f.file)][:FRAMES_KEPT]
                frames = tuple(masked_line(str(frame))[:200] for frame in calls)
                who = (member, epoch, worker.rank, step)
                found.append(StackSeen(*who, stand.collective, frames))
        return found


def text_of(worker: Worker) -> str:
    """Return what the worker wrote when it was last asked; "" if nothing."""
    try:
        with open(worker.stacks, errors="replace") as file:
            return file.read(MOST_NBYTES)
    except OSError:
        return ""
