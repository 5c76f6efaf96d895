"""The part of `harness check` inside the processes of a run: it observes each step and what is left
after it, and holds, stops or snapshots where the check wants it.

Production code has no hook for it: the check puts a `sitecustomize` that calls `arm` on the run's
Python path. A process that never imports `harness.worker.session` is left as it is. Evidence goes
to `evidence/` in the run's folder (`evidence.py`), a line at a time, so that a killed process
leaves all that it has seen. Orders are read once, when a session begins:

    orders.json {"pictures": true, "snapshot_at": 3, "hold_at": 5, "stop_at": 12, ...}
    held-<pid>     written by a process that is being held, until `go` exists
    enough         once it exists, the run is stopped at its next step
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.check.evidence import FileWritten, Prepared, line_of, packed
from harness.node.marks import Want

if TYPE_CHECKING:
    from harness.check.step_observer import StepObserver
    from harness.worker.step_timing import PeakMemory

HOLD_LIMIT_S = 120.0  # so that a check that was killed holds no process forever
NEVER = 1 << 60
PLAIN = "plain"  # file: optimizers step without a session
ENOUGH = "enough"  # file: see above
STEPS_ALONE = 8  # optimizer steps after which a script is believed to have none


@dataclass(frozen=True)
class Orders:
    """The orders for a process of a check. Steps are optimizer updates; `quiet`: no pictures are
    taken after the first of these steps and before the second; `cwd`: the user's working folder;
    `folders`: exclusions below it that are not the script's own; `caches`: libraries'
    folders of what can be fetched again."""

    pictures: bool = False
    quiet: tuple[int, ...] = (0, 0)
    snapshot_at: int = NEVER
    hold_at: int = NEVER
    stop_at: int = NEVER
    cwd: str = ""
    folders: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Orders:
        body = json.loads((folder / "orders.json").read_text())
        lists = {name: tuple(body.get(name, ())) for name in ("quiet", "folders", "caches")}
        return cls(**{**body, **lists})

    def write(self, folder: Path) -> None:
        """Write the orders atomically, since a process may read them at any moment."""
        new = folder / "orders.new"
        new.write_text(json.dumps(asdict(self)))
        new.replace(folder / "orders.json")


class After(importlib.abc.MetaPathFinder):
    """Import hook that calls `then` with a module right after its import."""

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
    """Observe this process from now on, if it becomes a worker. Called once, before anything else
    is imported."""
    hook = functools.partial(attend, folder=Path(path))
    sys.meta_path.insert(0, After("harness.worker.session", hook))
    notice = functools.partial(_notice_steps, folder=Path(path))
    sys.meta_path.insert(0, After("torch.optim.optimizer", notice))


def _notice_steps(module: Any, folder: Path) -> None:
    """Leave a mark when optimizers step in a process that nobody observes: a script without a
    session. `module`: torch.optim.optimizer."""
    left = STEPS_ALONE

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        left = left - 1 if probe() is None else STEPS_ALONE
        if not left:
            (folder / PLAIN).touch()

    module.register_optimizer_step_post_hook(stepped)


class Ownership:
    """The boundary of the script's own code: its file, and files beside it or below `cwd`, without
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
        """Return whether the file belongs to the script."""
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
        """Return FILE:LINE of the innermost frame in the script's own code; "" if there is none."""
        frame = sys._getframe(1)
        while frame is not None:
            if self.file(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


@dataclass
class WorkerProbe:
    """The observer of one session. `out`: descriptor of the file of evidence."""

    folder: Path
    session: Any
    orders: Orders
    own: Ownership
    out: int
    senses: StepObserver
    writes: Writes
    peak: PeakMemory
    begun: bool = False
    done: set[str] = field(default_factory=set)  # orders that were carried out

    def say(self, what: str, thing: Any) -> None:
        os.write(self.out, line_of(what, thing))

    @property
    def step(self) -> int:
        return int(self.session._run.step)

    # ---- hooks into the session ------------------------------------------------------------------
    def prepared(self, model: Any, where: str) -> None:
        from harness.check.step_observer import drawing_layers, weights_of

        training = self.session._work.training
        self.senses.watch(model, training)
        claims = sys.modules.get("harness.adapters.framework_claim")
        driver = claims.claimed() if claims is not None else ""
        names, draws = tuple(training._saved), tuple(drawing_layers(model))
        self.say("prepared", Prepared(where, driver, names, draws, weights_of(model)))

    def began(self) -> None:
        """Record the picture after the session has begun or resumed: what there is now was built or
        loaded."""
        self.begun = True
        self.session._hands.votes_late = False  # a vote takes effect at its own step
        picture = packed(self.senses.picture()) if self.orders.pictures else {}
        self.say("begin", {"step": self.step, "picture": picture})

    def boundary(self, step: int) -> None:
        """Record that the script has completed all that belongs to this step."""
        if not self.begun:
            self.began()
        after, before = self.orders.quiet
        pictures = self.orders.pictures and not after < step < before
        self.say("step", self.senses.step_body(step, pictures))
        host, gpu = self.peak.taken()
        self.say("memory", {"host_nbytes": host, "gpu_nbytes": gpu})

    def passes(self, steps: int) -> None:
        """Record how many steps a pass over the data has."""
        self.say("life", {"pass_steps": steps})

    def wants(self, wants: Any, step: int) -> None:
        """Add the check's votes to those of this step."""
        if self._time_for("snapshot_at", step):
            wants[Want.SNAPSHOT] += 1
        if step >= self.orders.stop_at or (self.folder / ENOUGH).exists():
            wants[Want.STOP] += 1

    def hold(self, step: int) -> None:
        if not self._time_for("hold_at", step):
            return
        (self.folder / f"held-{os.getpid()}").write_text(str(step))
        limit_s = time.monotonic() + HOLD_LIMIT_S
        while not (self.folder / "go").exists() and time.monotonic() < limit_s:
            time.sleep(0.02)

    def _time_for(self, order: str, step: int) -> bool:
        if order in self.done or step < getattr(self.orders, order):
            return False
        self.done.add(order)
        return True


_probes: list[WorkerProbe] = []  # of this process: holds the newest session's probe


def probe() -> WorkerProbe | None:
    return _probes[-1] if _probes else None


def _start(folder: Path, session: Any) -> None:
    from harness.check.step_observer import StepObserver
    from harness.worker.step_timing import PeakMemory

    orders = Orders.read(folder)
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    own = Ownership(str(main), orders.cwd, orders.folders)
    evidence = folder / "evidence"
    evidence.mkdir(exist_ok=True)
    rank, epoch = session.rank, session.epoch
    path = evidence / f"e{epoch:06d}-r{rank:04d}-{os.getpid()}.jsonl"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    writes = Writes(own, str(folder), orders.caches)
    seen = (StepObserver(own), writes, PeakMemory(session.device))
    made = WorkerProbe(folder, session, orders, own, out, *seen)
    made.writes.tell = functools.partial(made.say, "wrote")
    _probes[:] = [made]
    made.say("life", {"rank": rank, "world": session.world, "epoch": epoch})
    made.senses.listen()
    made.writes.listen()


def attend(module: ModuleType, folder: Path) -> None:
    """Wrap a session's methods. `module`: harness.worker.session."""
    session: Any = module.Session
    init, prepare, safe_point = session.__init__, session.prepare, session.safe_point

    @functools.wraps(init)
    def made(self: Any, *args: Any, **more: Any) -> None:
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
    _once_imported("harness.loops.shared_batches", _attend_shared)
    _once_imported("harness.loops.loop_loader", _attend_loader)


def _attend_boundaries() -> None:
    """Wrap the places where a session resumes, ends a step, and votes."""
    from harness.worker import boundary as hands
    from harness.worker import votes

    resume, boundary, cast = hands.Boundary.resume, hands.Boundary.boundary, votes.Votes.cast

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
    def voted(self: Any, wants: Any, step: int, due: Any, quiet: bool = True) -> None:
        if at := probe():
            at.hold(step)
        cast(self, wants, step, due, quiet)
        if at:
            at.wants(wants, step)

    hands.Boundary.resume, hands.Boundary.boundary = resumed, bounded  # type: ignore[method-assign]
    votes.Votes.cast = voted  # type: ignore[method-assign]


def _attend_reading() -> None:
    """Wrap the places where data are opened and read."""
    from harness.worker import step as steps
    from harness.worker.batches import feed as feeds

    feed: Any = feeds
    opened, fingerprint, note_foreign = feed.Feed.open, feed.fingerprint, steps.Sums.note_foreign

    @functools.wraps(opened)
    def looked(self: Any, *args: Any, **more: Any) -> Any:
        found = opened(self, *args, **more)
        if at := probe():
            at.say("life", {"unlike": self.drawn_anew()})
            data = self._dataset
            if feed.is_map_style(data) and not hasattr(data, "sample_order"):
                at.passes(-(-self.batching.samples // self.batching.global_batch))
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


def _once_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module: now, or right after its import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, After(name, then))


def _attend_shared(module: Any) -> None:
    """Wrap the loader that adapters put in the place of a script's own. `module`:
    harness.loops.shared_batches."""
    init = module.SharedLoader.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if at := probe():
            try:
                batches = len(self)
            except TypeError:  # a stream
                return
            at.passes(-(-batches // self.micro_batches))

    module.SharedLoader.__init__ = made


def _attend_loader(module: Any) -> None:
    """Wrap the loader of `run.loader`. `module`: harness.loops.loop_loader."""
    opened = module.MicroLoader._opened

    @functools.wraps(opened)
    def told(self: Any, *args: Any, **more: Any) -> Any:
        if (at := probe()) and self._place is None:
            at.passes(self.steps)
        return opened(self, *args, **more)

    module.MicroLoader._opened = told


# The files that a script opens for writing, and the lines where it does: for `harness check`,
# inside a worker.

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
NOT_FILES = ("/dev/", "/proc/", "/sys/")
CACHES = ("__pycache__", f"{os.sep}.cache{os.sep}", "torchinductor_", f"{os.sep}.triton{os.sep}")
OURS = (f"{os.sep}harness{os.sep}", f"{os.sep}storage{os.sep}")
HERE = os.path.dirname(__file__)  # this check stands between a script and what it calls


# variables that name folders of libraries' caches
CACHE_FOLDERS = (
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"),
    *("TORCH_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)


def cache_folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in which libraries keep what can be fetched again."""
    said = [environ.get(name, "") for name in CACHE_FOLDERS]
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in said if folder)


class Writes:
    """Observer of written files. `tell` receives each `FileWritten`. `folder`: the check's own;
    files there, except in the run's working folder, are not the script's; nor are those in
    `caches`."""

    def __init__(self, own: Ownership, folder: str, caches: tuple[str, ...] = ()):
        self._own, self._folder, self._caches = own, os.path.realpath(folder), caches
        self._work = os.path.join(self._folder, "work") + os.sep
        self._seen: set[str] = set()
        self._busy = False
        self.tell: Callable[[FileWritten], None] = lambda written: None

    def listen(self) -> None:
        import torch

        self._wrap(torch, "save", 1)
        torch.serialization.save = torch.save
        if "safetensors.torch" in sys.modules:
            self._wrap_safetensors(sys.modules["safetensors.torch"])
        else:
            sys.meta_path.insert(0, After("safetensors.torch", self._wrap_safetensors))
        sys.addaudithook(self._audited)

    def _wrap_safetensors(self, module: ModuleType) -> None:
        self._wrap(module, "save_file", 1)
        self._wrap(module, "save_model", 1)

    def _wrap(self, module: Any, name: str, place: int) -> None:
        """Wrap a function whose path is the argument at `place`."""
        save = getattr(module, name)

        @functools.wraps(save)
        def noted(*args: Any, **more: Any) -> Any:
            path = args[place] if len(args) > place else more.get("filename", more.get("f"))
            if isinstance(path, (str, os.PathLike)):
                self.note(os.fspath(path))
            return save(*args, **more)

        setattr(module, name, noted)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if event == "open":
            path, mode, flags = args
            writes = set("wax+") & set(mode) if isinstance(mode, str) else (flags or 0) & WRITING
            if writes and isinstance(path, (str, bytes)):
                self.note(os.fsdecode(path))
        elif event == "os.rename" and isinstance(args[1], (str, bytes)):
            self.note(os.fsdecode(args[1]))

    def note(self, path: str) -> None:
        """Record that the path is opened for writing now."""
        self._busy = True
        try:
            whole = os.path.realpath(path)
            if whole in self._seen or whole.startswith(NOT_FILES):
                return
            if whole.endswith(".lock") or any(word in whole for word in CACHES):
                return
            if whole.startswith(self._caches):
                return
            if whole.startswith(self._folder) and not whole.startswith(self._work):
                return
            if self._by_us() or not (where := self._own.line()):
                return
            self._seen.add(whole)
            self.tell(FileWritten(whole.removeprefix(self._work), where))
        finally:
            self._busy = False

    def _by_us(self) -> bool:
        """Return whether the harness itself has opened it, on the script's behalf."""
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if self._own.file(file) or "site-packages" in file:
                return False
            if any(name in file for name in OURS) and os.path.dirname(file) != HERE:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False
