"""Conversion between tensors and parts of a snapshot, through the planners of
torch.distributed.checkpoint. In `storage`, torch is imported
here, in the other files of this folder, and in `save_load.py`.

DCP's planners decide which rank writes and reads what, so FSDP2, TP, HSDP and DDP state can be
saved on one world and loaded on another. The layout beneath is ours: raw little-endian tensor bytes
in hashed parts, an index in the manifest, and JSON for the rest. Nothing from a store is ever
unpickled. The only exchange between ranks is `Saver.plan`; loading has none.

    tensors, data = split(state)                       join(tensors, data) -> state
    saver.plan(tensors)      collective, when the structure is new
    staged = saver.stage(tensors)                      a copy in host memory; training may go on
    staged = saver.begin(tensors, later)    ... or go on at once, and staged.wait() before anything
                                            changes `later`
    saver.write(staged, ref, {"state": data}, token)   no collectives: any thread
    load(snapshots, manifest, destinations(manifest, tensors, like))
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from storage.snapshots.manifest import Manifest, Ref
from storage.snapshots.snapshots import Snapshots
from storage.tensor_threads import TensorThread
from storage.tensors.flat_shards import layout_of
from storage.tensors.loading import destinations, like_parameters, load
from storage.tensors.save_ranks import gathered
from storage.tensors.state_tree import dtype_name, join, split

# Fingerprints of tensors: 64 bits, computed on the tensor's device, since copying gigabytes to
# the host would stop the training. They detect differences, not forgery.

CHUNK = 1 << 22  # elements of a GPU tensor that are hashed at a time


def fingerprint(tensor: torch.Tensor) -> str:
    """Return 16 hex digits for the tensor's bytes in row-major order ("empty" for no elements). The
    fingerprint of a GPU tensor differs from that of an equal CPU tensor."""
    if tensor.numel() == 0:
        return "empty"
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cuda:
        return xxhash.xxh3_64_hexdigest(raw.cpu().numpy().data)
    return f"{int(weighted(raw)) & (1 << 64) - 1:016x}"


def weighted(raw: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum of the bytes `raw` (n,), each word times an odd number of its position;
    0-d int64 on the same device."""
    if raw.storage_offset() % 4:
        raw = raw.clone()  # words begin at multiples of four bytes
    words = raw[: len(raw) // 4 * 4].view(torch.int32)
    rest = raw[len(words) * 4 :]
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for numbers, first in ((words, 0), (rest, len(words))):
        for start in range(0, len(numbers), CHUNK):
            piece = numbers[start : start + CHUNK]
            place = torch.arange(
                first + start, first + start + len(piece), dtype=torch.int64, device=raw.device
            )
            place = (place + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
            total += ((place ^ (place >> 29)) | 1).mul_(piece).sum()
    return total


# Copies of a state into host memory, made beside the training.

ALIGN = 64  # bytes; memory with this alignment can be viewed as any dtype
SLICE_NBYTES = 32 << 20  # bytes of one copy from a GPU: a millisecond or two of its copy engine


# ---- saving --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """The layout of this rank's share: `places[i]` is the (start, end) of `items[i]` in the staging
    buffer, and `files` cuts that buffer."""

    structure: tuple[Any, ...]
    items: tuple[WriteItem, ...]
    places: tuple[tuple[int, int], ...]
    files: dict[str, tuple[int, int]]  # name -> (start, end) in the buffer
    index: dict[str, Any]  # like Manifest.tensors, with file names as parts
    pinned: bool

    @property
    def nbytes(self) -> int:
        return max((end for _, end in self.files.values()), default=0)

    def ranges(self, places: Collection[int]) -> dict[str, list[tuple[int, int]]]:
        """Return, by file, the (start, end) ranges of the items that begin at `places` in the
        buffer, including the gaps between neighbours."""
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
        """Zero the bytes between tensors; they are stored too, and must not differ between
        attempts."""
        at = 0
        for start, end in self.places:
            if at < start:
                buffer[at:start] = 0
            at = end


@dataclass
class Filled:
    """The tensors that a buffer already holds and that training leaves alone: position in the
    buffer -> fingerprint. Valid for one layout; kept with the buffer."""

    layout: Layout | None = None
    prints: dict[int, str] = field(default_factory=dict)


@dataclass
class Staged:
    """A copy, in host memory, of what this rank will write; it may still be under way. Its buffer
    is used again after `release`."""

    layout: Layout
    buffer: torch.Tensor | None  # uint8 [at least nbytes]
    saver: Saver = field(repr=False)
    copy: Copying = field(repr=False)
    own: bool = True  # the buffer belongs to the saver

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def wait(self) -> float:
        """Wait until all tensors of `later` are copied, before anything changes one of them (on a
        GPU the current stream waits, not the caller). Returns seconds waited."""
        return self.copy.wait()

    def arrive(self) -> None:
        """Wait until all bytes are in host memory; for the thread that sends them. Raises the error
        of the copy, if any."""
        self.copy.arrive()

    def touched(self) -> list[str]:
        """Return names of tensors of `later` that were changed in place since `begin`, which is
        forbidden before `wait` has returned."""
        return self.copy.touched()

    def still(self) -> dict[int, str]:
        """Return the tensors that training leaves alone: position in the buffer -> fingerprint.
        Complete after `arrive`."""
        return self.copy.prints

    def files(self) -> dict[str, memoryview]:
        """Return file name -> its bytes, without a copy. Raises RuntimeError after `release`."""
        if self.buffer is None:
            raise RuntimeError(
                "this staged snapshot was released (written, or given up): stage again"
            )
        view = self.buffer.numpy().data
        return {name: view[start:end] for name, (start, end) in self.layout.files.items()}

    def release(self) -> None:
        """Give the buffer back; repeating it is harmless. No write of it may be in progress."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None and self.own:
            self.saver._take_back(buffer, self.layout)


@dataclass(frozen=True)
class Move:
    name: str
    source: torch.Tensor
    target: torch.Tensor  # a view of the buffer
    version: int
    place: int = 0  # position in the buffer


class Copying:
    """Copies tensors to host memory: `now` during the call, `later` beside the training. Tensors of
    `still` are fingerprinted where they are, and copied only if `filled` does not have them.

    On a CPU a thread copies, which does not hold the GIL meanwhile. On a GPU a separate stream
    copies, which begins after the work queued before.
    """

    def __init__(
        self,
        now: list[Move],
        later: list[Move],
        beside: TensorThread,
        still: Sequence[Move] = (),
        filled: Filled | None = None,
    ):
        self._promised = [*later, *still]  # the caller must not change these before `wait`
        self._still, self._filled = still, filled or Filled()
        self.prints: dict[int, str] = {}  # fingerprints of `still`, complete when all is done
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
        for move in now:  # on the training's stream: later changes are queued behind the copy
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
        except BaseException as e:  # raised to the waiting caller by `arrive`
            self._error = e
        self._done.set()

    def _copy_if_changed(self, move: Move) -> None:
        with _beside_training(move.source.device, self._events):
            found = fingerprint(move.source)
            if self._filled.prints.get(move.place) != found:
                # partly overwritten until the copy is done
                self._filled.prints.pop(move.place, None)
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
    """Return whether the tensor's bytes in memory are its value in row-major order."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _slices(move: Move) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (target, source) of each slice. A GPU's copy engine does one copy at a time, whatever
    the stream, so copies of the training and NCCL must not wait for a whole tensor."""
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
    """Run the body, for a GPU, on a separate stream that begins after the queued work; wait for it
    at the end."""
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


_pins: dict[int, bool] = {}  # address of each memory that `pin` was asked for -> it is pinned


def pin(buffer: torch.Tensor, owner: object) -> bool:
    """Pin this memory (of whatever origin), so that GPUs copy to it at full speed and beside
    kernels. `owner`: the object that keeps the memory; it is unpinned when that goes, and at the
    process' end. Return whether it is pinned. Where the driver refuses (a container's limits,
    memory that it cannot map), copies are plain ones: slower, and as right. Does nothing without a
    GPU or when repeated."""
    if not torch.cuda.is_available():
        return False
    at = buffer.data_ptr()
    if buffer.is_pinned():
        return True
    if _pins.get(at) is False:  # refused before
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(at, buffer.numel(), 0))  # type: ignore[no-untyped-call]
    if not _pins:
        atexit.register(unpin)
    _pins[at] = code == 0
    # Memory that is unmapped while it is pinned stays with the driver: a GPU would copy to the old
    # pages whatever is mapped at this address next.
    weakref.finalize(owner, _unpin, at).atexit = False
    if code:
        # CUDA holds the error until somebody asks for it: not the training's next kernel
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device="cuda")
        warnings.warn(
            f"{buffer.numel() >> 20} MiB of host memory could not be pinned (CUDA error {code}); "
            "copies of snapshots are slower. Raise `ulimit -l`, if it is low",
            RuntimeWarning,
            stacklevel=2,
        )
    return _pins[at]


def unpin() -> None:
    """Unpin what `pin` has pinned."""
    for at in list(_pins):
        _unpin(at)


def _unpin(at: int) -> None:
    if _pins.pop(at, False):
        torch.cuda.cudart().cudaHostUnregister(at)  # type: ignore[no-untyped-call]


__all__ = [
    "Saver",
    "Staged",
    "destinations",
    "join",
    "like_parameters",
    "load",
    "pin",
    "split",
]

# approximate size of a rank's files, which is what a failed request repeats
FILE_NBYTES = 256 << 20
ALONE_NBYTES = 4 << 20  # a tensor that training leaves alone gets its own file from this size on

if sys.byteorder != "little":  # the index records no byte order, so there can be only one
    raise ImportError("storage.tensors.dcp stores tensors little-endian; this machine is not")


class Saver:
    """Saves this rank's share of a state. `group`: all ranks that save together (gloo), None for
    one process alone; `each`: if so many ranks of it save a whole state, and the next ones another,
    None: all ranks together save one.

    Plain tensors are assumed to be the same on all ranks: each is written once, by the rank with
    the least to write. The caller has to make sure of it (harness/worker/replica_check.py does);
    tensors that differ between ranks need different names.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        group: dist.ProcessGroup | None = None,
        own_memory: bool = True,
        each: int | None = None,
    ):
        """Create a saver. `own_memory`: False if the caller passes `begin` a buffer each time."""
        self.snapshots, self._group, self._own_memory = snapshots, group, own_memory
        ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        self.world = each or ranks
        self._first = rank // self.world * self.world
        self.rank = rank - self._first
        self._beside = TensorThread("stage")
        self._layout: Layout | None = None
        self._free: list[torch.Tensor] = []  # at most two: one being written, one being filled
        self._base: Manifest | None = None  # the last snapshot that this saver committed

    def plan(self, tensors: dict[str, torch.Tensor], still: Collection[str] = ()) -> None:
        """Agree which rank writes what. Collective: all ranks call it together. Quick when no
        rank's structure has changed. `still`: names of tensors that training leaves alone, which
        get files of their own.

        Raises ValueError on all ranks alike if they disagree about a tensor or leave a hole.
        """
        structure = _structure(tensors)
        changed = self._layout is None or self._layout.structure != structure
        if not any(gathered(changed, self._group)):
            return
        planner = _save_planner(tensors)
        try:
            local: Any = planner.create_local_plan()
        except (ValueError, RuntimeError, TypeError) as e:
            # sent to all, otherwise they would wait for us forever
            local = f"rank {self.rank} cannot save its tensors: {e}"
        plans = gathered(local, self._group)
        for plan in plans:
            if isinstance(plan, str):
                raise ValueError(plan)
        plans = plans[self._first : self._first + self.world]
        wanted: dict[str, tuple[Any, ...]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                found = (tuple(item.tensor_data.size), str(item.tensor_data.properties.dtype))
                if wanted.setdefault(item.index.fqn, found) != found:
                    raise ValueError(
                        f"tensor {item.index.fqn!r} is {found} on rank {rank} and "
                        f"{wanted[item.index.fqn]} on a lower one; give tensors that differ "
                        "between ranks different names"
                    )
        # identical on all ranks, as their input is
        mine = planner.create_global_plan(plans)[0][self.rank]
        self._layout = _lay_out(structure, tensors, mine.items, still)
        self._free = [_buffer(self._layout)] if self._own_memory else []

    @property
    def planned(self) -> bool:
        return self._layout is not None

    @property
    def nbytes(self) -> int:
        """Size of this rank's share in bytes. Raises RuntimeError before `plan`."""
        return self._planned().nbytes

    def fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return whether these tensors have the planned structure. If not (on any rank), all ranks
        must `plan` again."""
        return self._layout is not None and self._layout.structure == _structure(tensors)

    def stage(self, tensors: dict[str, torch.Tensor]) -> Staged:
        """Copy what this rank writes to host memory; the caller may change the tensors once it
        returns. No collectives.

        Raises RuntimeError if the structure is not the planned one.
        """
        staged = self.begin(tensors)
        staged.arrive()
        return staged

    def begin(
        self,
        tensors: dict[str, torch.Tensor],
        later: Collection[str] = (),
        buffer: torch.Tensor | None = None,
        still: Collection[str] = (),
        filled: Filled | None = None,
    ) -> Staged:
        """Start a copy like `stage`; tensors named in `later` are copied beside the caller, who
        must `wait` before anything changes them.

        `buffer`: uint8, of at least `nbytes`, for callers with shared memory; by default the
        saver's own. `still`: tensors of `later` that are copied only if `filled` does not already
        have them in the buffer; `filled` is updated.
        """
        layout = self._planned()
        if layout.structure != _structure(tensors):
            raise RuntimeError(
                "the tensors' names, shapes or placements are not the planned ones: call "
                "plan(tensors) on all ranks first"
            )
        own = buffer is None
        if buffer is None:
            buffer = self._free.pop() if self._free else _buffer(layout)
        else:
            layout.clear_gaps(buffer)
        planner = _save_planner(tensors)
        now: list[Move] = []
        then: list[Move] = []
        alone: list[Move] = []
        if filled is not None and filled.layout is not layout:
            filled.layout, filled.prints = layout, {}
        for item, (start, end) in zip(layout.items, layout.places, strict=True):
            source = planner.resolve_data(item).detach()
            target = buffer[start:end].view(source.dtype).view(source.shape)
            move = Move(item.index.fqn, source, target, version_of(source), start)
            if filled is not None and not (move.name in later and move.name in still):
                filled.prints.pop(start, None)
            if move.name not in later:
                now.append(move)
            elif filled is not None and move.name in still:
                alone.append(move)
            else:
                then.append(move)
        return Staged(layout, buffer, self, Copying(now, then, self._beside, alone, filled), own)

    def _planned(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("nothing is planned yet: call plan(tensors) on all ranks first")
        return self._layout

    def write(self, staged: Staged, ref: Ref, data: dict[str, Any], token: str) -> Manifest | None:
        """Store what was staged and try to commit. Returns the manifest, or None while other ranks
        are still writing.

        No collectives, safe in a background thread. `token` is unique to this attempt. After an
        error `staged` still holds its bytes: write it again with the same token, or `release` it.
        """
        staged.arrive()
        base = (
            self._base if self._base is not None and self.snapshots.stay([self._base.ref]) else None
        )
        self.snapshots.write(
            ref, self.rank, self.world, staged.files(), staged.layout.index, data, token, base
        )
        manifest = self.snapshots.commit(ref, self.world)
        self._base = manifest or base
        staged.release()
        return manifest

    def _take_back(self, buffer: torch.Tensor, layout: Layout) -> None:
        if layout is self._layout and len(self._free) < 2:
            self._free.append(buffer)


def _structure(tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    def one(t: torch.Tensor) -> tuple[Any, ...]:
        return (t.shape, t.dtype, t.device, *layout_of(t))

    return tuple((name, *one(t)) for name, t in tensors.items())


def _save_planner(tensors: dict[str, torch.Tensor]) -> Any:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # DCP gives each replicated tensor, in order, to the rank with the least so far; sorting by size
    # makes that even.
    ordered = sorted(
        tensors, key=lambda name: (-tensors[name].numel() * tensors[name].element_size(), name)
    )
    planner.set_up_planner({name: tensors[name] for name in ordered})
    return planner


def _lay_out(
    structure: tuple[Any, ...],
    tensors: dict[str, torch.Tensor],
    items: Iterable[WriteItem],
    still: Collection[str],
) -> Layout:
    # Tensors that training leaves alone come first, in files of their own, whose chunks stay the
    # same from snapshot to snapshot; the large ones each get one, whose chunks are the same on any
    # world. The others follow by first name part, in the state's order, and size, so that a reader
    # of the model alone reads neighbours.
    top = {name.partition("/")[0]: None for name in tensors}
    rank = {name: i for i, name in enumerate(top)}
    by_size = sorted(
        tensors,
        key=lambda name: (
            name not in still,
            rank[name.partition("/")[0]],
            -tensors[name].numel() * tensors[name].element_size(),
        ),
    )
    order = {name: i for i, name in enumerate(by_size)}
    kept: list[WriteItem] = []
    places: list[tuple[int, int]] = []
    index: dict[str, Any] = {}
    files: dict[str, tuple[int, int]] = {}
    at, name, first, kind = 0, "0000.bin", 0, ""
    for item in sorted(items, key=lambda i: order[i.index.fqn]):
        assert item.tensor_data is not None
        dtype, sizes = item.tensor_data.properties.dtype, list(item.tensor_data.chunk.sizes)
        entry = index.setdefault(
            item.index.fqn,
            {"shape": list(item.tensor_data.size), "dtype": dtype_name(dtype), "chunks": []},
        )
        nbytes = math.prod(sizes) * dtype.itemsize
        # an empty tensor, or an empty share of an uneven one: only its shape is recorded
        if nbytes == 0:
            continue
        at = -(-at // ALIGN) * ALIGN
        before, kind = kind, _kind(item.index.fqn in still, nbytes)
        ends = kind != before or kind == "alone" or at + nbytes - first > FILE_NBYTES
        if at > first and ends:
            name, first = f"{len(files):04d}.bin", at
        files[name] = (first, at + nbytes)
        kept.append(item)
        places.append((at, at + nbytes))
        entry["chunks"].append(
            {
                "offsets": list(item.tensor_data.chunk.offsets),
                "sizes": sizes,
                "part": name,
                "start": at - first,
                "end": at - first + nbytes,
            }
        )
        at += nbytes
    pinned = any(t.is_cuda for t in tensors.values())
    return Layout(structure, tuple(kept), tuple(places), files, index, pinned)


def _kind(still: bool, nbytes: int) -> str:
    """Return the kind of a tensor; tensors of one kind share files."""
    return ("alone" if nbytes >= ALONE_NBYTES else "still") if still else "trained"


def _buffer(layout: Layout) -> torch.Tensor:
    # Filled, not just reserved: otherwise the first stall would pay for page faults, and padding
    # must not differ between attempts.
    if layout.pinned:
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: a plain copy
            return torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True).fill_(0)
    return torch.empty(layout.nbytes, dtype=torch.uint8).fill_(0)
