"""The state that a rank keeps in its node's host memory when another node is lost. Runs in the
worker.

No rank can train on without the lost one, so every worker ends. Before it does, the first one of a
node to hear of the loss copies the state of its last whole step into the node's stage, and the next
world goes on from there instead of from the last snapshot: one step is lost at most
(`hand_over.py`).

The state is whole from the end of a step, when its record is known, until an optimizer steps again.
Only there is it kept. What the open step may have changed is put back: buffers of the model, and
everything but model and optimizers (schedulers, scalers, the script's own objects) is noted at each
step boundary.

A rank hears of a loss in two ways. A collective fails, and the exception ends the script: then this
is its last act (`node/forkserver.py`). Or it waits for a node that is silent: then the agent, which
knows, writes a byte into a pipe, and a thread keeps the state while the main thread waits.

An object whose state all ranks read together, or whose state differs by rank, may have a method
`state_alone()`, which returns plain values as one rank knows them (`adapters/transformers/state.py`
has one), or None if it does not know them now. Those of one keeper hold for all ranks then, and
`content` leaves them out. If the object says `only_first_knows`, only rank 0 keeps a state.

Where a copy of the model lies on several ranks and there are several copies, each rank keeps its
part: of each place in a copy some rank must survive. Who keeps which tensors is agreed upon at the
first boundary.

Ranks keep nothing where that is not sound yet: on GPUs, whose kernels may run ahead of the host; if
one copy of the model lies on all ranks; or if some object's state cannot be read without the
others.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.core import step_records as rec
from harness.node.marks import KEEP, KEPT, keeping_file
from harness.worker.gradients.parallel import local_part
from harness.worker.process_group import Peers
from harness.worker.run_context import Run
from harness.worker.training_state import SMALL_NBYTES, Training
from storage.canonical_json import canonical, digest
from storage.errors import StoreError
from storage.snapshots.manifest import Ref
from storage.snapshots.staging import Segment, StageFull, free_nbytes
from storage.tensors import dcp, state_tree
from storage.tensors.dcp import version_of
from storage.tensors.tensor_names import plain_name

SHARE = 0.01  # of the training's time that noting may take; if it takes more, some steps have none
SAVED_S = 10.0  # of training, whose unused share may be used later
WHOLE_WITHIN_S = 2.0  # a rank that was asked amid an update waits so long for its end
HEARS_WITHIN_S = 2.0  # ... or for the main thread to come to a collective, which fails
CLOSED = b"c"  # written into the pipe by this process itself


@dataclass(frozen=True)
class StateOrigin:
    """The history of a state. `behind`: names of the snapshots that it comes after, committed or
    on their way ("": the run's begin); `records`: those of the steps since the first of them."""

    behind: tuple[str, ...]
    records: tuple[rec.StepRecord, ...]


class KnowsOrigin(Protocol):
    """The part of `Snapshotter` that tells where the present state comes from."""

    @property
    def saved_step(self) -> int: ...

    def origin(self) -> StateOrigin: ...


@dataclass(frozen=True)
class KeptState:
    """A state in a node's stage, or a part of one. `place`: of its ranks in a copy of the model,
    which `copy_ranks` ranks hold together; `content`: hash of its values, the same on all ranks
    that hold it; `file`: where its bytes lie; `spans`: (start, end) there, by key of the manifest's
    part; `records`: as in `StateOrigin`, encoded; `part_list`: as in a snapshot, of which this is
    the part of rank `place`."""

    run: str
    phase: int
    epoch: int
    step: int
    place: int
    copy_ranks: int
    content: str
    behind: tuple[str, ...]
    records: str
    part_list: str
    file: str
    spans: dict[str, tuple[int, int]]

    @property
    def ref(self) -> Ref:
        return Ref(epoch=self.epoch, step=self.step)

    def steps(self) -> list[rec.StepRecord]:
        """Return the records. Raises BrokenRecords."""
        return rec.decode(self.records.encode(), self.file)

    def write(self, folder: Path) -> None:
        """Make this the state that the node keeps of its place, and remove the one before."""
        before = read(folder).get(self.place)
        path = folder / KEPT.format(self.place)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)
        if before is not None and before.file != self.file:
            Path(before.file).unlink(missing_ok=True)


PLACE_MARK = "@place"


def of_place(name: str, place: int) -> str:
    """Return the name of a tensor that the part of each place holds, in that part."""
    return f"{name}{PLACE_MARK}{place}"


def as_stored(tensors: dict[str, Any], place: int) -> dict[str, Any]:
    """Return an index by the names that a snapshot has, of `of_place` that of one place."""
    split = ((name.partition(PLACE_MARK), value) for name, value in tensors.items())
    return {name: value for (name, mark, of), value in split if not mark or int(of) == place}


def read(folder: Path | None) -> dict[int, KeptState]:
    """Return what this node keeps, by place in a copy of the model."""
    found = {}
    for path in folder.glob(KEPT.format("*")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            body = json.loads(path.read_text())
            spans = {key: (int(start), int(end)) for key, (start, end) in body["spans"].items()}
            kept = KeptState(**{**body, "behind": tuple(body["behind"]), "spans": spans})
            found[kept.place] = kept
    return found


def drop(folder: Path) -> None:
    """Remove what this node keeps."""
    for place, before in read(folder).items():
        (folder / KEPT.format(place)).unlink(missing_ok=True)
        Path(before.file).unlink(missing_ok=True)


@dataclass
class Noted:
    """The values that were noted at a step boundary, beside the tensors that only optimizers
    change. `options`: of the optimizers' groups; `buffers`: copies of those that forwards change;
    `weights`: what shows that a script has put others into the model for a while."""

    step: int
    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    versions: dict[str, int]  # of the tensors that are too large to copy
    options: list[list[dict[str, Any]]]
    weights: list[tuple[int, int]]  # version and address of each parameter
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def changed(self) -> list[str]:
        """Return the names of the tensors that no longer have their values of the boundary."""
        return [name for name, v in self.versions.items() if version_of(self.tensors[name]) != v]


class ModelBuffers:
    """The buffers of a model, by the names of its state, and which of them a step has changed; and
    its parameters."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        named = list(model.named_buffers(remove_duplicate=False))
        self._names = [f"model/{plain_name(name)}" for name, _ in named]
        self._all = [one for _, one in named]
        self._versions = [version_of(one) for one in self._all]
        norms = {
            id(one)
            for module in model.modules()
            # a norm's kernel changes its statistics without a new version number
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for one in module.buffers(recurse=False)
        }
        self._living = [id(one) in norms for one in self._all]
        self._copies: dict[str, torch.Tensor] = {}

    def copies(self) -> dict[str, torch.Tensor]:
        """Return copies of those that some step has changed, by name. The next call writes into
        them."""
        now = [version_of(one) for one in self._all]
        before = zip(self._living, self._versions, now, strict=True)
        self._living = [lives or old != new for lives, old, new in before]
        self._versions = now
        living = {
            name: one.detach()
            for name, one, lives in zip(self._names, self._all, self._living, strict=True)
            if lives
        }
        if self._copies.keys() != living.keys():
            self._copies = {name: one.clone() for name, one in living.items()}
        elif living:
            torch._foreach_copy_(list(self._copies.values()), list(living.values()))
        return self._copies

    def lost(self) -> list[str]:
        """Return the names of those that have changed for the first time since `copies`."""
        state = zip(self._names, self._all, self._versions, self._living, strict=True)
        return [name for name, one, v, lives in state if not lives and version_of(one) != v]


def marks_of(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return version and address of each, or of this rank's part of it."""
    return [(version_of(p), p.data_ptr()) for p in map(local_part, parameters)]


def noted(training: Training, step: int, held: ModelBuffers) -> Noted | None:
    """Return what must be noted at the boundary behind `step`; None: it cannot be known now."""
    if (aside := training.state_aside()) is None:
        return None
    tensors, plain = state_tree.split(aside)
    large = {name: t for name, t in tensors.items() if t.nbytes > SMALL_NBYTES}
    settled = training.between_updates(large) if large else set()  # it looks at the whole model
    tensors = {n: t if n in large else t.detach().clone() for n, t in tensors.items()}
    versions = {name: version_of(t) for name, t in large.items() if name not in settled}
    options = [
        [{k: copied(v) for k, v in group.items() if k != "params"} for group in one.param_groups]
        for one in training.optimizers
    ]
    weights = marks_of(held.parameters)
    return Noted(step, copy.deepcopy(plain), tensors, versions, options, weights, held.copies())


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class Standing(Enum):
    """The standing of the state, as far as it can be kept."""

    CHANGES = "an optimizer may have stepped since the last boundary"
    WHOLE = "as it was at the last boundary"
    COLLECTIVE = "some object's state is read by all ranks together, so it is never kept"
    KEPT = "it was kept"


class KeepRequests:
    """The thread that hears the agent's request, with the hook that hears optimizers step. `obey`:
    is called with the request; `change`: before each optimizer's step."""

    def __init__(self, pipe: Path, obey: Callable[[bytes], None], change: Callable[..., None]):
        """Raises OSError if there is no pipe."""
        self._pipe, self._obey = os.open(pipe, os.O_RDWR), obey
        self._thread = threading.Thread(target=self._listen, name="keeper", daemon=True)
        self._thread.start()
        self._hook = register_optimizer_step_pre_hook(change)

    def _listen(self) -> None:
        request = os.read(self._pipe, 1)
        if request != CLOSED:
            self._obey(request)

    def close(self) -> None:
        self._hook.remove()
        os.write(self._pipe, CLOSED)
        self._thread.join(HEARS_WITHIN_S)
        os.close(self._pipe)


@dataclass
class HeldModel:
    """The model whose state is noted. `saver`: cuts it into parts, one for each place in a copy."""

    model: nn.Module
    buffers: ModelBuffers
    saver: dcp.Saver


class StateKeeper:
    """Keeps this rank's state when another is lost. `folder`: the node's stage; None: there is no
    agent, and nothing is kept. `origin`: tells where the present state comes from. `node`: the
    agent's folder."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        origin: KnowsOrigin,
        folder: Path | None,
        node: Path | None,
    ):
        self._peers, self._run, self._training, self._origin = peers, run, training, origin
        self.folder, self._node = folder, node
        self._at_boundary = threading.Condition(threading.RLock())
        self._noted: Noted | None = None
        self._held: HeldModel | None = None
        self._standing = Standing.CHANGES
        # the saved step when it was last seen whether the node still keeps a state of an earlier
        # world; None: it keeps none
        self._looked_at: int | None = -2 if peers.local_rank == 0 else None
        self._again_s = 0.0  # when the next note may be taken (perf_counter)
        self._requests: KeepRequests | None = None
        self.goes_on = False  # the main thread may go on in the next world
        self._taken_up = threading.Event()  # it has heard of the loss

    # ---- in calm training ------------------------------------------------------------------------
    def listen(self, pipe: Path) -> None:
        """Keep the state once the agent writes into this pipe."""
        with contextlib.suppress(OSError):
            self._requests = KeepRequests(pipe, self._obey, self.change)

    def close(self) -> None:
        """Listen no longer: another world has its own keeper."""
        if self._requests is not None:
            self._requests.close()

    @property
    def is_sound(self) -> bool:
        """True if a state may be kept here, whatever is trained: the same on all ranks."""
        cpu = self._peers.device.type == "cpu"
        return self.folder is not None and bool(self._run.url) and cpu

    @property
    def is_possible(self) -> bool:
        """True if this rank can keep its state."""
        together = self._standing is Standing.COLLECTIVE
        return self.is_sound and self._training.is_readable_alone and not together

    def note(self, surely: bool = False) -> None:
        """Note at the end of a step, whose record is known, that the state is whole. `surely`:
        though the last time has cost much."""
        began_s = time.perf_counter()
        if not self.is_possible or (began_s < self._again_s and not surely):
            return
        if self._looked_at is not None:
            self._forget()
        model = self._training.model
        assert model is not None
        with self._at_boundary:
            first = self._held is None or self._held.model is not model
            if self._held is None or first:
                self._held = HeldModel(model, ModelBuffers(model), self._new_saver())
            before = self._peers.collectives() if first else 0
            self._noted = noted(self._training, self._run.step, self._held.buffers)
            # all ranks note the first time, and not always together later
            together = first and self._peers.collectives() != before
            whole = Standing.WHOLE if self._noted is not None else Standing.CHANGES
            self._standing = Standing.COLLECTIVE if together else whole
            self._at_boundary.notify_all()
        if first and not together and not self._share_out(self._held.saver):
            self._standing = Standing.COLLECTIVE
        if not first:  # the first time sets up what later ones use, and costs far more
            cost_s = time.perf_counter() - began_s
            self._again_s = max(self._again_s, began_s - SAVED_S) + cost_s / SHARE

    def _new_saver(self) -> dcp.Saver:
        ranks = self._peers.copy_ranks
        together = (None, None) if ranks == 1 else (self._peers.control, ranks)
        return dcp.Saver(self._run.snapshots, together[0], own_memory=False, each=together[1])

    def _share_out(self, saver: dcp.Saver) -> bool:
        """Agree, if a copy of the model lies on several ranks, who of these keeps which tensors.
        Return whether that is possible."""
        if self._peers.copy_ranks == 1:
            return True  # all of them
        if not all(self._peers.gather(self._noted is not None)) or self._noted is None:
            return False
        with contextlib.suppress(ValueError):  # on all ranks alike
            saver.plan(self._whole(self._noted)[0])
        return saver.planned

    def change(self, *_: Any) -> None:
        """Note that the state changes: an optimizer steps next, or other objects are trained."""
        if self._standing is Standing.WHOLE:
            with self._at_boundary:
                self._standing = Standing.CHANGES

    def _forget(self) -> None:
        """Remove the state that this node keeps if a snapshot of its step, or a later one, is
        committed."""
        assert self.folder is not None
        if (saved := self._origin.saved_step) == self._looked_at:
            return
        self._looked_at, kept = saved, read(self.folder).values()
        if all(saved >= one.step for one in kept):
            drop(self.folder)
            self._looked_at = None

    # ---- when another rank is lost ---------------------------------------------------------------
    def _obey(self, request: bytes) -> None:
        self._show_that_it_keeps()
        if request == KEEP and self.goes_on:
            self._peers.hang_up()  # the main thread's collective fails, and it does the rest
            if self._taken_up.wait(HEARS_WITHIN_S):
                return
        try:
            self.keep(wait_s=WHOLE_WITHIN_S, ends=True)
        finally:
            os._exit(1)

    def _show_that_it_keeps(self) -> None:
        if self._node is not None:
            with contextlib.suppress(OSError):
                keeping_file(self._node, self._peers.local_rank).touch()

    def keep(self, wait_s: float = 0.0, ends: bool = False) -> bool:
        """Keep the state of the last whole step, if there is one, or comes within `wait_s`. Return
        whether this rank has kept it: one of each node does. `ends`: the process is ended at once,
        so the state must not change any more."""
        kept = False
        self._show_that_it_keeps()
        with self._at_boundary:
            if self._standing is Standing.CHANGES and wait_s and self._noted is not None:
                self._at_boundary.wait_for(lambda: self._standing is Standing.WHOLE, wait_s)
            if not ends:
                self._taken_up.set()
            if self._standing is Standing.WHOLE and self._is_first():
                assert self._noted is not None
                self._standing = Standing.KEPT
                try:
                    kept = self._keep(self._noted)
                except (OSError, StoreError, TypeError, ValueError, RuntimeError) as e:
                    print(f"harness: the state of this node is lost: {e}", flush=True)
            if ends:
                self._run.close_soon()
                os._exit(1)
        return kept

    def has_kept(self) -> bool:
        """Return whether this node keeps a state of this run."""
        return any(one.run == self._run.url for one in read(self.folder).values())

    def _is_first(self) -> bool:
        """Return whether this rank keeps the state of its place. All ranks of a place are the same,
        so the first one of a node does that comes, unless only rank 0 has the state."""
        assert self.folder is not None
        if self._peers.rank > 0 and self._training.only_first_knows:
            return False
        with contextlib.suppress(OSError):
            claim = self.folder / f"keeper-e{self._run.epoch:06d}-{self._peers.place}"
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL, 0o600))
            return True
        return False

    def _keep(self, noted: Noted) -> bool:
        assert self.folder is not None and self._held is not None
        saver, buffers = self._held.saver, self._held.buffers
        lost = noted.changed() + buffers.lost()
        if noted.weights != marks_of(buffers.parameters):
            lost.append("a weight of the model")
        if lost:
            print(
                f"harness: {lost[0]!r} has changed amid a step and was not copied, so this node "
                "keeps no state",
                flush=True,
            )
            return False
        for one, groups in zip(self._training.optimizers, noted.options, strict=True):
            for group, options in zip(one.param_groups, groups, strict=True):
                group.update(options)
        tensors, plain = self._whole(noted)
        if self._peers.copy_ranks == 1:
            saver.plan(tensors)
        if (free := free_nbytes(self.folder)) < 2 * saver.nbytes:
            raise StageFull(
                f"{self.folder}: wanted room for {saver.nbytes >> 20} MiB twice, {free >> 20} MiB "
                "are free"
            )
        path = self.folder / f"kept-{secrets.token_hex(4)}.segment"
        segment = Segment.create(path, saver.nbytes)
        staged = saver.begin(tensors, (), torch.frombuffer(segment.view, dtype=torch.uint8))
        staged.arrive()
        self._describe(noted.step, staged, plain, path).write(self.folder)
        print(f"harness: kept the state of step {noted.step} in this node's memory", flush=True)
        return True

    def _whole(self, noted: Noted) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the whole state as it was noted, as tensors by path and plain data."""
        with torch.no_grad():
            tensors, plain = state_tree.split(self._training.state_trained())
        put_back = {name: t for name, t in noted.buffers.items() if name in tensors}
        tensors = {**tensors, **put_back, **noted.tensors}
        if self._peers.copy_ranks > 1:  # what is not sharded belongs to each part
            tensors = {
                name if hasattr(t, "to_local") else of_place(name, self._peers.place): t
                for name, t in tensors.items()
            }
        return tensors, plain | noted.plain

    def _describe(
        self, step: int, staged: dcp.Staged, plain: dict[str, Any], path: Path
    ) -> KeptState:
        ref = Ref(epoch=0, step=step)  # whichever world has kept it: parts belong together
        layout, place, ranks = staged.layout, self._peers.place, self._peers.copy_ranks
        data = {"state": plain} if place == 0 else {}
        told = self._run.snapshots.list_of(
            ref, place, ranks, staged.files(), layout.index, data, "kept"
        )
        origin, alone = self._origin.origin(), self._training.told_alone
        behind = [record for record in origin.records if record.step <= step]
        same = {name: value for name, value in plain.items() if name not in alone}
        return KeptState(
            run=self._run.url or "",
            phase=self._run.phase.number,
            epoch=self._run.epoch,
            step=step,
            place=place,
            copy_ranks=ranks,
            content=digest(canonical([[part.hashes for part in told.parts], same])),
            behind=origin.behind,
            records=rec.encode(behind).decode(),
            part_list=told.to_json(),
            file=str(path),
            spans={
                part.key: span for part, span in zip(told.parts, layout.files.values(), strict=True)
            },
        )
