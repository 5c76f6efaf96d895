"""A trace of some steps by torch's profiler, and of a GPU's memory, in the run's bucket: `harness
run --profile 20:23`, or HARNESS_PROFILE. Runs in the worker.

Every rank makes its own. While these steps run they are slower; the files are written and sent
beside the steps after them. Whatever goes wrong is told, and training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.bucket.layout import profile_key
from harness.core.facts import ProfileTaken
from harness.core.steps_asked import StepsAsked
from harness.worker.run import Run
from storage.errands import start_thread
from storage.errors import StoreError

MOST_NBYTES = 256 << 20  # of a file; a greater one stays away from the bucket
MOST_ENTRIES = 100_000  # of the memory's history
WAIT_S = 60.0  # for files to be sent when the training is done
TRACE, MEMORY = "trace.json.gz", "memory.pickle"


class Profile:
    """Of the steps `asked`; None: of none."""

    def __init__(self, run: Run, device: torch.device, asked: str):
        self._run, self._on_gpu = run, device.type == "cuda"
        self._asked: StepsAsked | None = None
        self._first = self._last = 0  # that were really seen
        self._profiler: Any = None
        self._sending: threading.Thread | None = None
        if asked and run.url:
            with self._guarded("HARNESS_PROFILE"):
                self._asked = StepsAsked.parse(asked)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Any:
        """Whatever the profiler raises, it is no reason to end a training."""
        try:
            yield
        except Exception as e:
            self._asked = self._profiler = None
            self._run.warn_here(f"{what}: no profile is taken: {type(e).__name__}: {e}")

    # ---- around steps ----------------------------------------------------------------------------
    def before(self, step: int) -> None:
        if self._asked is None or not self._asked.first <= step <= self._asked.last:
            return
        if self._profiler is None:
            with self._guarded(f"profile of step {step}"):
                self._begin(step)

    def after(self, step: int) -> None:
        if self._profiler is not None:
            self._last = step
            if self._asked is None or step >= self._asked.last:
                self.stop()

    def _begin(self, step: int) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            _memory_history("_record_memory_history")(max_entries=MOST_ENTRIES)
        profiler = torch.profiler.profile(activities=kinds)
        profiler.start()
        self._profiler, self._first, self._last = profiler, step, step - 1

    def stop(self) -> None:
        """No step of those asked follows. What was seen is written and sent from here on."""
        profiler, self._profiler, self._asked = self._profiler, None, None
        if profiler is None:
            return
        with self._guarded("profile"):
            self._run.peers.life.tell()
            profiler.stop()
            self._run.peers.life.tell()
            folder = tempfile.TemporaryDirectory(prefix="harness-profile-")
            if self._on_gpu:
                _memory_history("_dump_snapshot")(str(Path(folder.name) / MEMORY))
                _memory_history("_record_memory_history")(enabled=None)
            if self._last >= self._first:
                send = functools.partial(self._send, profiler, folder)
                self._sending = start_thread("profile", send)

    def wait(self) -> None:
        """The training is done: what is on its way may arrive."""
        if self._sending is not None:
            self._sending.join(WAIT_S)

    # ---- beside ----------------------------------------------------------------------------------
    def _send(self, profiler: Any, folder: tempfile.TemporaryDirectory[str]) -> None:
        with self._guarded("profile"), folder as name:
            profiler.export_chrome_trace(str(Path(name) / TRACE))
            keys: list[str] = []
            nbytes = 0
            for path in sorted(Path(name).iterdir()):
                size = path.stat().st_size
                if size > MOST_NBYTES:
                    self._run.warn_here(
                        f"profile: {path.name} has {size >> 20} MiB, wanted at most "
                        f"{MOST_NBYTES >> 20}; it is not kept: profile fewer steps"
                    )
                    continue
                rank, epoch = self._run.peers.rank, self._run.epoch
                key = profile_key(epoch, rank, self._first, self._last, path.name)
                self._run.store.put(key, path.read_bytes())
                keys, nbytes = [*keys, key], nbytes + size
            if keys:
                self._told(ProfileTaken(epoch, rank, self._first, self._last, tuple(keys), nbytes))

    def _told(self, fact: ProfileTaken) -> None:
        with contextlib.suppress(StoreError):  # the files are there all the same
            self._run.fact_here(fact)
        print(f"harness: profile of steps {fact.first} to {fact.last}: {fact.keys[0]}", flush=True)


def _memory_history(name: str) -> Callable[..., Any]:
    """A function of torch's that is not promised to stay. Raises RuntimeError where it has not."""
    found = getattr(torch.cuda.memory, name, None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.cuda.memory.{name}")
    return found  # type: ignore[no-any-return]
