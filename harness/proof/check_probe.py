"""What `harness check` does inside the processes of a run: see what each step did and what is left
after it, and hold, stop or snapshot where the check wants it.

Production code has no hook for it: the check puts a `sitecustomize` that calls `arm` on the run's
Python path. A process that never imports `harness.worker.session` is left as it is. What is seen
goes to `evidence/` in the run's folder (`check_evidence.py`), a line at a time, so that a killed
process leaves all that it has seen. Orders are read once, when a session begins:

    orders.json {"pictures": true, "snapshot_at": 3, "hold_at": 5, "stop_at": 12, ...}
    held-<pid>     written by a process that stands still, until `go` is there
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.proof.check_evidence import Prepared, line_of, packed

if TYPE_CHECKING:
    from harness.proof.check_senses import Senses
    from harness.proof.check_writes import Writes
    from harness.worker.peak_memory import PeakMemory

HOLD_LIMIT_S = 120.0  # a check that was killed must not hold anybody for ever
NEVER = 1 << 60


@dataclass(frozen=True)
class Orders:
    """What a process of a check is to do. Steps are optimizer updates; `cwd`: where the user is,
    `folders`: not the script's own, though below it; `gloo`: exchange between ranks through the
    host, since they share a GPU."""

    pictures: bool = False
    snapshot_at: int = NEVER
    hold_at: int = NEVER
    stop_at: int = NEVER
    cwd: str = ""
    folders: tuple[str, ...] = ()
    gloo: bool = False

    @classmethod
    def read(cls, folder: Path) -> Orders:
        body = json.loads((folder / "orders.json").read_text())
        return cls(**{**body, "folders": tuple(body.get("folders", ()))})

    def write(self, folder: Path) -> None:
        """Atomically: a process may read at any moment."""
        new = folder / "orders.new"
        new.write_text(json.dumps(asdict(self)))
        new.replace(folder / "orders.json")


class After(importlib.abc.MetaPathFinder):
    """Calls `then` with a module right after its import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # once
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def arm(path: str) -> None:
    """From now on this process is seen, if it becomes a worker. Called once, before anything else
    is imported."""
    hook = functools.partial(attend, folder=Path(path))
    sys.meta_path.insert(0, After("harness.worker.session", hook))


class Ownership:
    """Which code is the script's own: its file, and what lies beside it or below `cwd`, without
    libraries and `others`."""

    def __init__(self, script: str, cwd: str, others: Sequence[str]):
        self.script = os.path.realpath(script) if script else ""
        beside = {os.path.dirname(self.script), os.path.realpath(cwd) if cwd else ""} - {""}
        self._folders = tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in beside)
        own = Path(__file__).resolve().parent.parent  # harness
        standard = os.path.dirname(os.path.realpath(os.__file__))
        told = [str(own), str(own.with_name("storage")), standard, *others]
        self._others = tuple(f"{os.path.realpath(f).rstrip(os.sep)}{os.sep}" for f in told)
        self._files: dict[str, bool] = {}

    def file(self, name: str) -> bool:
        """Is it the script's own?"""
        if name not in self._files:
            real = os.path.realpath(name)
            self._files[name] = real == self.script or (
                real.startswith(self._folders)
                and not real.startswith(self._others)
                and not ("site-packages" in real or "dist-packages" in real)
                and os.path.isfile(real)
            )
        return self._files[name]

    def module(self, name: str) -> bool:
        if name == "__main__":
            return True
        file = getattr(sys.modules.get(name), "__file__", None)
        return bool(file) and self.file(str(file))

    def line(self) -> str:
        """FILE:LINE of the script's own code that has led here; "": none has."""
        frame = sys._getframe(1)
        while frame is not None:
            if self.file(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


@dataclass
class WorkerProbe:
    """What is seen of one session. `out`: descriptor of the file of evidence."""

    folder: Path
    session: Any
    orders: Orders
    own: Ownership
    out: int
    senses: Senses
    writes: Writes
    peak: PeakMemory
    begun: bool = False
    done: set[str] = field(default_factory=set)  # orders that are carried out

    def say(self, what: str, thing: Any) -> None:
        os.write(self.out, line_of(what, thing))

    @property
    def step(self) -> int:
        return int(self.session._run.step)

    # ---- where the session comes along -----------------------------------------------------------
    def prepared(self, model: Any, where: str) -> None:
        from harness.proof.check_senses import drawing_layers

        training = self.session._work.training
        self.senses.watch(model, training)
        claims = sys.modules.get("harness.adapters.claims")
        driver = claims.claimed() if claims is not None else ""
        names, draws = tuple(training._saved), tuple(drawing_layers(model))
        self.say("prepared", Prepared(where, driver, names, draws))

    def began(self) -> None:
        """The session has resumed, or begun: what there is now was made anew or loaded."""
        self.begun = True
        self.session._hands.votes_late = False  # what is voted at a step happens at that step
        picture = packed(self.senses.picture()) if self.orders.pictures else {}
        self.say("begin", {"step": self.step, "picture": picture})

    def boundary(self, step: int) -> None:
        """The script has done all that belongs to this step."""
        if not self.begun:
            self.began()
        self.say("step", self.senses.step_body(step, self.orders.pictures))
        host, gpu = self.peak.taken()
        self.say("memory", {"host_nbytes": host, "gpu_nbytes": gpu})

    def wants(self, wants: Any) -> None:
        """Votes are cast for the step that was done."""
        from harness.node.marks import Want

        if self._time_for("snapshot_at"):
            wants[Want.SNAPSHOT] += 1
        if self.step >= self.orders.stop_at:
            wants[Want.STOP] += 1

    def hold(self) -> None:
        if not self._time_for("hold_at"):
            return
        (self.folder / f"held-{os.getpid()}").write_text(str(self.step))
        limit_s = time.monotonic() + HOLD_LIMIT_S
        while not (self.folder / "go").exists() and time.monotonic() < limit_s:
            time.sleep(0.02)

    def _time_for(self, order: str) -> bool:
        if order in self.done or self.step < getattr(self.orders, order):
            return False
        self.done.add(order)
        return True


_probes: list[WorkerProbe] = []  # of this process: the session's that was made last


def probe() -> WorkerProbe | None:
    return _probes[-1] if _probes else None


def _start(folder: Path, session: Any) -> None:
    from harness.proof.check_senses import Senses
    from harness.proof.check_writes import Writes
    from harness.worker.peak_memory import PeakMemory

    orders = Orders.read(folder)
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    own = Ownership(str(main), orders.cwd, orders.folders)
    evidence = folder / "evidence"
    evidence.mkdir(exist_ok=True)
    rank, epoch = session.rank, session.epoch
    path = evidence / f"e{epoch:06d}-r{rank:04d}-{os.getpid()}.jsonl"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    seen = (Senses(own), Writes(own, str(folder)), PeakMemory(session.device))
    made = WorkerProbe(folder, session, orders, own, out, *seen)
    made.writes.tell = functools.partial(made.say, "wrote")
    _probes[:] = [made]
    made.say("life", {"rank": rank, "world": session.world, "epoch": epoch})
    made.senses.listen()
    made.writes.listen()


def attend(module: ModuleType, folder: Path) -> None:
    """Wrap what a session comes along. `module`: harness.worker.session."""
    session: Any = module.Session
    init, prepare, safe_point = session.__init__, session.prepare, session.safe_point

    @functools.wraps(init)
    def made(self: Any, *args: Any, **more: Any) -> None:
        _through_the_host(folder)
        init(self, *args, **more)
        if threading.current_thread() is threading.main_thread():
            _start(folder, self)

    @functools.wraps(prepare)
    def prepared(self: Any, model: Any, *args: Any, **more: Any) -> Any:
        given = prepare(self, model, *args, **more)
        if at := probe():
            at.prepared(model, at.own.line())
        return given

    @functools.wraps(safe_point)
    def pointed(self: Any, step: int, *args: Any, **more: Any) -> Any:
        if at := probe():
            self._run.step = step
            at.boundary(step)
        return safe_point(self, step, *args, **more)

    session.__init__, session.prepare, session.safe_point = made, prepared, pointed
    _attend_boundaries()
    _attend_reading()


def _attend_boundaries() -> None:
    """Where a session resumes, ends a step, and votes."""
    from harness.worker import hands, votes

    resume, boundary, cast = hands.Hands.resume, hands.Hands.boundary, votes.Votes.cast

    @functools.wraps(resume)
    def resumed(self: Any) -> None:
        resume(self)
        if at := probe():
            at.began()

    @functools.wraps(boundary)
    def bounded(self: Any) -> None:
        if at := probe():
            at.boundary(at.step)
        boundary(self)

    @functools.wraps(cast)
    def voted(self: Any, wants: Any, due: Any) -> None:
        if at := probe():
            at.hold()
        cast(self, wants, due)
        if at:
            at.wants(wants)

    hands.Hands.resume, hands.Hands.boundary = resumed, bounded  # type: ignore[method-assign]
    votes.Votes.cast = voted  # type: ignore[method-assign]


def _attend_reading() -> None:
    """Where data are looked at and read."""
    from harness.worker import feed as feeds
    from harness.worker import step as steps

    feed: Any = feeds
    opened, fingerprint, note_foreign = feed.Feed.open, feed.fingerprint, steps.Sums.note_foreign

    @functools.wraps(opened)
    def looked(self: Any, *args: Any, **more: Any) -> Any:
        found = opened(self, *args, **more)
        if at := probe():
            at.say("life", {"unlike": self.drawn_anew()})
        return found

    @functools.wraps(fingerprint)
    def printed(dataset: Any, *args: Any, **more: Any) -> str:
        found: str = fingerprint(dataset, *args, **more)
        if (at := probe()) and not (args or more):
            at.say("life", {"data": found})
        return found

    @functools.wraps(note_foreign)
    def noted(self: Any, positions: Any, said: Any) -> None:
        note_foreign(self, positions, said)
        if at := probe():
            at.senses.note_read(positions, said)

    feed.Feed.open, feed.fingerprint = looked, printed
    steps.Sums.note_foreign = noted  # type: ignore[method-assign]


def _through_the_host(folder: Path) -> None:
    """Ranks that share one GPU cannot use NCCL."""
    from harness.worker import peers

    if not Orders.read(folder).gloo:
        return
    meet = peers.Peers.meet

    def met(self: Any, environ: Any, backend: Any = None, timeout_s: Any = None) -> None:
        meet(self, environ, "cpu:gloo,cuda:gloo", timeout_s)

    peers.Peers.meet = met  # type: ignore[method-assign]
