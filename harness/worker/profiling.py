"""Traces of some steps and of a GPU's memory, by torch's profiler, in the run's bucket: `harness
run --profile 20:23`, or HARNESS_PROFILE. Runs in the worker.

Every rank makes its own. The profiled steps are slower; the files are written and uploaded during
the steps after them. Errors are reported, and training goes on.
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
from harness.core.flags import StepsAsked
from harness.worker.run_context import Run
from storage.errors import StoreError
from storage.tensor_threads import start_thread

MOST_NBYTES = 256 << 20  # bytes of a file; a larger one is not uploaded
MOST_ENTRIES = 100_000  # entries of the memory's history
WAIT_S = 60.0  # for uploads when the training is done
TRACE, MEMORY = "trace.json.gz", "memory.pickle"


class Profile:
    """The profiler of the steps that `asked` names ("20:23"); "": none."""

    def __init__(self, run: Run, device: torch.device, asked: str):
        self._run, self._on_gpu = run, device.type == "cuda"
        self._asked: StepsAsked | None = None
        self._first = self._last = 0  # steps that were actually profiled
        self._profiler: Any = None
        self._sending: threading.Thread | None = None
        if asked and run.url:
            with self._guarded("HARNESS_PROFILE"):
                self._asked = StepsAsked.parse(asked)

    @property
    def is_asked(self) -> bool:
        """True if steps to come are to be profiled, or are being profiled."""
        return self._asked is not None or self._profiler is not None

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Any:
        """Turn any error into a warning, since no error of the profiler may end a training."""
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
        """Stop profiling, and begin to write and upload the profile in a thread."""
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
        """Wait at most `WAIT_S` for the upload, once the training is done."""
        if self._sending is not None:
            self._sending.join(WAIT_S)

    # ---- in a thread -----------------------------------------------------------------------------
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
        with contextlib.suppress(StoreError):  # the files are uploaded all the same
            self._run.fact_here(fact)
        print(f"harness: profile of steps {fact.first} to {fact.last}: {fact.keys[0]}", flush=True)


def _memory_history(name: str) -> Callable[..., Any]:
    """Return a private function of torch.cuda.memory. Raises RuntimeError if this torch has none of
    that name."""
    found = getattr(torch.cuda.memory, name, None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.cuda.memory.{name}")
    return found  # type: ignore[no-any-return]
