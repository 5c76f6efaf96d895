"""The state's way into host memory, beside the training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem

from storage.errands import ErrandThread
from storage.fingerprints import fingerprint

if TYPE_CHECKING:
    from storage.dcp import Saver

ALIGN = 64  # bytes; any dtype can be viewed there
SLICE_NBYTES = 32 << 20  # of a copy from a GPU: a millisecond or two of its engine


# ---- saving --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """What this rank writes: `places[i]` is the (start, end) of `items[i]` in the staging
    buffer, `files` cut that buffer."""

    structure: tuple[Any, ...]
    items: tuple[WriteItem, ...]
    places: tuple[tuple[int, int], ...]
    files: dict[str, tuple[int, int]]  # name -> (start, end) in the buffer
    index: dict[str, Any]  # as Manifest.tensors, chunks name the file
    pinned: bool

    @property
    def nbytes(self) -> int:
        return max((end for _, end in self.files.values()), default=0)

    def ranges(self, places: Collection[int]) -> dict[str, list[tuple[int, int]]]:
        """File -> the (start, end) in it that these items lie in, by where each begins in the
        buffer, with the gaps between neighbours."""
        found: dict[str, list[tuple[int, int]]] = {}
        for name, (first, last) in self.files.items():
            runs: list[tuple[int, int]] = []
            open_at: int | None = None
            items = [place for place in self.places if first <= place[0] < last]
            for i, (start, end) in enumerate(items):
                if start not in places:
                    open_at = None
                    continue
                if open_at is None:
                    open_at = start if i else first
                    runs.append((0, 0))
                runs[-1] = (open_at - first, end - first)
            if runs:
                found[name] = runs
        return found

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """What lies between the tensors is stored too, and must not differ between attempts."""
        at = 0
        for start, end in self.places:
            if at < start:
                buffer[at:start] = 0
            at = end


@dataclass
class Filled:
    """What a buffer holds of tensors that training leaves alone: where each begins -> fingerprint.
    Of one layout; kept with the buffer."""

    layout: Layout | None = None
    prints: dict[int, str] = field(default_factory=dict)


@dataclass
class Staged:
    """A copy of what this rank will write, in host memory; perhaps still being made. Its buffer
    is used again after `release`."""

    layout: Layout
    buffer: torch.Tensor | None  # uint8 [at least nbytes]
    saver: Saver = field(repr=False)
    copy: Copying = field(repr=False)
    own: bool = True  # the buffer is the saver's

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def wait(self) -> float:
        """Before anything changes a tensor of `later`: until all are copied (on a GPU: this
        stream waits, not we). Seconds waited."""
        return self.copy.wait()

    def arrive(self) -> None:
        """Until all bytes are in host memory; for the thread that sends them. Raises what went
        wrong in the copy."""
        self.copy.arrive()

    def touched(self) -> list[str]:
        """Tensors of `later` that were changed in place since `begin`, which they must not be
        before `wait` has returned."""
        return self.copy.touched()

    def still(self) -> dict[int, str]:
        """Of tensors that training leaves alone: where each begins in the buffer -> fingerprint.
        Known when all has arrived."""
        return self.copy.prints

    def files(self) -> dict[str, memoryview]:
        """File name -> its bytes, without a copy. Raises RuntimeError after `release`."""
        if self.buffer is None:
            raise RuntimeError(
                "this staged snapshot was released (written, or given up): stage again"
            )
        view = self.buffer.numpy().data
        return {name: view[start:end] for name, (start, end) in self.layout.files.items()}

    def release(self) -> None:
        """Give the buffer back. Harmless when repeated; a write in progress must have ended."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None and self.own:
            self.saver._take_back(buffer, self.layout)


@dataclass(frozen=True)
class Move:
    name: str
    source: torch.Tensor
    target: torch.Tensor  # a view of the buffer
    version: int
    place: int = 0  # where it begins in the buffer


class Copying:
    """Copies tensors to host memory: `now` in the call, `later` beside the training. `still` as
    well, but only what `filled` says is not there: they are looked at where they lie.

    CPU: a thread, which holds no lock of Python while it copies. GPU: a stream of its own, which
    begins after what is queued.
    """

    def __init__(
        self,
        now: list[Move],
        later: list[Move],
        beside: ErrandThread,
        still: Sequence[Move] = (),
        filled: Filled | None = None,
    ):
        self._promised = [*later, *still]  # not to be changed before `wait`
        self._still, self._filled = still, filled or Filled()
        self.prints: dict[int, str] = {}  # of `still`, when all is done
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._events: list[torch.cuda.Event] = []
        on_gpu = [m for m in now + later if m.source.is_cuda]
        with torch.no_grad():
            if on_gpu or any(m.source.is_cuda for m in still):
                self._copy_on_gpu(
                    [m for m in now if m.source.is_cuda], [m for m in later if m.source.is_cuda]
                )
            for move in now:
                if not move.source.is_cuda:
                    _copy_bytes(move)
        self._later = [m for m in later if not m.source.is_cuda]
        if self._later or still:
            beside.run(self._copy_later)
        else:
            self._done.set()

    def _copy_on_gpu(self, now: list[Move], later: list[Move]) -> None:
        for move in now:  # on the training's own stream: what changes them comes behind it
            move.target.copy_(move.source, non_blocking=True)
        self._events = [torch.cuda.current_stream().record_event()]
        if later:
            side = _side_stream(later[0].source.device)
            side.wait_event(self._events[0])
            with torch.cuda.stream(side):
                for move in later:
                    for target, source in _slices(move):
                        target.copy_(source, non_blocking=True)
            self._events.append(side.record_event())

    def _copy_later(self) -> None:
        try:
            with torch.no_grad():
                for move in self._later:
                    _copy_bytes(move)
                for move in self._still:
                    self._copy_if_changed(move)
        except BaseException as e:  # for who waits
            self._error = e
        self._done.set()

    def _copy_if_changed(self, move: Move) -> None:
        with _beside_training(move.source.device, self._events):
            found = fingerprint(move.source)
            if self._filled.prints.get(move.place) != found:
                self._filled.prints.pop(move.place, None)  # half of it, for now
                _copy_bytes(move)
                self._filled.prints[move.place] = found
        self.prints[move.place] = found

    def wait(self) -> float:
        t0 = time.perf_counter()
        self._done.wait()
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)
        return time.perf_counter() - t0

    def arrive(self) -> None:
        self._done.wait()
        for event in self._events:
            event.synchronize()
        if self._error is not None:
            raise self._error

    def touched(self) -> list[str]:
        return sorted({m.name for m in self._promised if version_of(m.source) != m.version})


def _is_plain(source: torch.Tensor) -> bool:
    """Are its bytes, as they lie, what it is?"""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _slices(move: Move) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(target, source) of each part. A GPU's copy engine does one copy after the other, whichever
    stream it is of: what the training and NCCL want copied shall not wait for a whole tensor."""
    target, source = move.target, move.source
    if not (_is_plain(source) and target.is_contiguous()):
        yield target, source
        return
    step = max(1, SLICE_NBYTES // source.element_size())
    target, source = target.reshape(-1), source.reshape(-1)
    for start in range(0, len(source), step):
        yield target[start : start + step], source[start : start + step]


def _copy_bytes(move: Move) -> None:
    if _is_plain(move.source) and not move.source.is_cuda:
        # numpy: one thread, one memcpy. torch would wake its pool, which the training is using.
        np.copyto(
            move.target.reshape(-1).view(torch.uint8).numpy(),
            move.source.reshape(-1).view(torch.uint8).numpy(),
        )
    else:
        move.target.copy_(move.source)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


@contextlib.contextmanager
def _beside_training(device: torch.device, after: list[torch.cuda.Event]) -> Iterator[None]:
    """On a GPU: on a stream of its own, which begins after what was queued, and is done when this
    ends."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device)
    side.wait_event(after[0])
    with torch.cuda.device(device), torch.cuda.stream(side):
        yield
        side.synchronize()


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def pin(buffer: torch.Tensor) -> None:
    """Let GPUs copy to this memory (of whatever origin) at full speed and beside kernels.
    Harmless without a GPU or when repeated."""
    if torch.cuda.is_available() and not buffer.is_pinned():
        code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
        if int(code) != 0:
            raise RuntimeError(
                f"{buffer.numel() >> 20} MiB of host memory could not be pinned (CUDA error "
                f"{int(code)}); raise `ulimit -l`"
            )
