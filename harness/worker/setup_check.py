"""The setup of this world, kept in the bucket and compared with the one that the run began with.
Runs in the worker.

Rank 0 collects it in a thread, during the script's own start; before the first step it writes the
setup, if that has changed. A change is reported, or refused, depending on `--on-change`
(docs/REPRODUCE.md).
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.bucket.layout import IDENTITY
from harness.bucket.setup_objects import (
    SetupAt,
    encoded,
    list_setups,
    read_setup,
    with_diff,
    write_setup,
)
from harness.core.facts import SetupChanged
from harness.core.masking import masked_words
from harness.core.setup_record import (
    HARDWARE,
    MOST_CHANGES,
    TRAINING,
    Difference,
    GitState,
    Setup,
    changes,
    plain_config,
)
from harness.core.world import BadInput
from harness.node import provenance
from harness.worker.process_group import Peers
from harness.worker.run_context import Run
from storage.canonical_json import BadObject, digest
from storage.errors import NotFound

# The environment that results depend on besides the run: library version, accelerator, CPU.


def environment(device: torch.device) -> dict[str, str]:
    """Return what the bits of a forward and backward depend on besides the program: the version of
    torch, the name of the device or CPU, and the number of CPU threads ("any" on a GPU)."""
    if device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), "any"
    else:
        name, threads = (
            f"{platform.machine()} {_cpu()} {torch.backends.cpu.get_cpu_capability()}",
            str(torch.get_num_threads()),
        )
    return {"torch": str(torch.__version__), "device": name, "threads": threads}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(
                (line.partition(":")[2].strip() for line in f if line.startswith("model name")), ""
            )
    except OSError:  # not Linux
        return platform.processor()


def differences(wanted: dict[str, str], found: dict[str, str]) -> str:
    return "; ".join(
        f"{name} was {wanted[name]!r}, here it is {found.get(name)!r}"
        for name in wanted
        if wanted[name] != found.get(name)
    )


REFUSE, WARN, ACCEPT = "refuse", "warn", "accept"
ON_CHANGE = "HARNESS_ON_CHANGE"
MOST_ARGUMENTS, MOST_LETTERS = 500, 2000
MOST_TOLD = 12  # changes in one line of output
MOST_READ = 3  # setups that are tried until one can be read


class SetupCheck:
    """The check of this world's setup. `config`: that of `attach`; `on_change`: REFUSE, WARN or
    ACCEPT; None: the environment's, else WARN."""

    def __init__(
        self, peers: Peers, run: Run, config: Any, on_change: str | None, environ: dict[str, str]
    ):
        """Begin to collect the setup, on rank 0. Raises BadInput for an unknown `on_change`."""
        self._peers, self._run = peers, run
        self._on_change = _known(on_change, environ)
        self._config, self._left_out = plain_config(config)  # now, since it may change later
        self._environ = environ
        self._done = run.url is None
        self._found: tuple[Setup, bytes] | None = None
        self._why_not = ""
        self._thread: threading.Thread | None = None
        if peers.rank == 0 and not self._done:
            self._thread = threading.Thread(target=self._look, name="setup", daemon=True)
            self._thread.start()

    def announce(self) -> None:
        """Write a new run's setup before its run.json, since publishers of the run start when that
        exists. Rank 0 only; the others return at once. Raises StoreError."""
        if self._done or self._peers.rank != 0:
            return
        if not list_setups(self._run.store) and not _exists(self._run):
            self._write()

    def settle(self) -> None:
        """Compare the setup with the first one, and store it if it has changed; once. All ranks
        call it at the same point. Raises BadInput if a change is refused, StoreError."""
        if not self._done:
            self._done = True
            self._peers.agree(self._compare)

    # ---- collecting ------------------------------------------------------------------------------
    def _look(self) -> None:
        try:
            self._found = found(self._environ, self._peers.device, self._config, self._left_out)
        # an unknown machine may raise anything here, and a run must not fail for its record
        except Exception as e:
            self._why_not = f"{type(e).__name__}: {e}"

    def _mine(self) -> tuple[Setup, bytes] | None:
        if self._thread is not None:
            self._thread.join()  # bounded by the timeout of each git command
        if self._why_not:
            if self._on_change == REFUSE:
                raise BadInput(
                    f"--on-change refuse: how this run is set up could not be found out "
                    f"({self._why_not}); go on with --on-change warn"
                )
            self._run.warn(f"how this run is set up could not be found out: {self._why_not}")
            self._why_not = ""
        return self._found

    # ---- keeping and comparing -------------------------------------------------------------------
    def _write(self) -> None:
        if (mine := self._mine()) is not None:
            write_setup(self._run.store, self._run.epoch, *mine)

    def _compare(self) -> None:
        mine, known = self._mine(), list_setups(self._run.store)
        if mine is None:
            return
        name = digest(encoded(mine[0]))
        if known and known[-1].digest == name:
            return
        began = self._first_readable(known)
        if began is not None:
            at, first = began
            newest = self._read(known[-1]) if known[-1] != at else None
            told = changes(first, mine[0])
            before = changes(first, newest) if newest is not None else ()
            new = tuple(change for change in told if change not in before)
            if new:
                self._heed(name, told, new)
        write_setup(self._run.store, self._run.epoch, *mine)

    def _first_readable(self, known: list[SetupAt]) -> tuple[SetupAt, Setup] | None:
        for at in known[:MOST_READ]:
            if (setup := self._read(at)) is not None:
                return at, setup
        return None

    def _read(self, at: SetupAt) -> Setup | None:
        try:
            return read_setup(self._run.store, at)
        except (BadObject, NotFound) as e:
            self._run.warn(f"how this run was set up cannot be read: {e}; it is not compared")
            return None

    def _heed(self, name: str, told: tuple[Difference, ...], new: tuple[Difference, ...]) -> None:
        """Record changes, and refuse or print them. `told`: all differences from the run's first
        setup; `new`: those that the previous setup did not have."""
        heavy = [change for change in new if change.level != HARDWARE]
        action = {REFUSE: "refused", ACCEPT: "accepted"}.get(self._on_change, "warned")
        if action == "refused" and not heavy:
            action = "warned"  # hardware may differ between spot machines
        rows = tuple(dataclasses.asdict(change) for change in told[:MOST_CHANGES])
        more = max(0, len(told) - MOST_CHANGES)
        self._run.fact(SetupChanged(self._run.epoch, name, action, rows, more))
        if action == "refused":
            self._run.flush()
            raise BadInput(
                f"{self._run.url} was begun otherwise, and --on-change is refuse: {words(heavy)}. "
                "Put back what it began with (`harness runs reproduce URL` says how), name another "
                "run URL, or take the change on with --on-change accept (HARNESS_ON_CHANGE=accept)"
            )
        training = [change for change in heavy if change.level == TRAINING]
        software = [change for change in heavy if change.level != TRAINING]
        if training and action == "warned":
            self._peers.print(
                f"harness: WARNING: this run was begun otherwise: {words(training)}. If it is the "
                "same training all the same, --on-change accept says so"
            )
        if software and action == "warned":
            what = words(software)
            self._peers.print(f"harness: other software than the run began with: {what}")


def words(told: list[Difference]) -> str:
    more = len(told) - MOST_TOLD
    return "; ".join(map(str, told[:MOST_TOLD])) + (f"; and {more} more" if more > 0 else "")


def _known(asked: str | None, environ: Mapping[str, str]) -> str:
    """Return the action on a change: `asked`, or the environment's, or WARN. Raises BadInput."""
    said = asked if asked is not None else environ.get(ON_CHANGE) or WARN
    if said not in (REFUSE, WARN, ACCEPT):
        name = ON_CHANGE if asked is None else "attach(on_change=...)"
        raise BadInput(f"{name}={said!r}: wanted refuse, warn or accept")
    return said


def _exists(run: Run) -> bool:
    try:
        return run.store.size(IDENTITY) >= 0
    except NotFound:
        return False


def found(
    environ: Mapping[str, str],
    device: torch.device,
    config: dict[str, Any],
    left_out: tuple[str, ...],
) -> tuple[Setup, bytes]:
    """Return the setup of this process, and the diff of its uncommitted changes that is kept."""
    words, hidden = masked_words(_argv()[:MOST_ARGUMENTS])
    keep_diff = environ.get("HARNESS_DIFF", "keep") != "hash"
    script = None if words[:1] == ["-m"] else Path(_script())
    git, diff = provenance.git_state(Path.cwd(), keep_diff, script)
    argv = [word[:MOST_LETTERS] for word in words]
    if git.commit and argv and os.path.isabs(argv[0]):
        argv[0] = _inside(argv[0], git)
    about = environment(device)
    on_gpu = device.type == "cuda"
    software = {**provenance.software(environ), "torch": about["torch"], **_cuda(on_gpu)}
    setup = Setup(
        argv=tuple(argv),
        script=provenance.file_hash(_script()),
        config=config,
        git=git,
        packages=provenance.packages(),
        software=software,
        hardware={**provenance.hardware(), "device": about["device"]},
        environment=provenance.variables(environ),
        people=provenance.people(environ),
        left_out=(*left_out, *(f"{name} (it is called like a secret)" for name in hidden)),
    )
    return with_diff(setup, diff), diff


def _argv() -> list[str]:
    """Return the command line as `harness run --` takes it. With `python -m module`, sys.argv
    begins with the module's path, which is replaced by "-m" and its name."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return list(sys.argv)


def _script() -> str:
    return getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]


def _inside(script: str, git: GitState) -> str:
    """Return a script's path relative to the working directory, if it lies in this work tree; else
    unchanged."""
    top = Path.cwd()
    for _ in Path(git.folder).parts:
        top = top.parent
    here = os.path.relpath(script)
    return here if Path(script).is_relative_to(top) else script


def _cuda(on_gpu: bool) -> dict[str, str]:
    """Return the versions of CUDA, cuDNN and NCCL that torch was built with, or loads."""
    if not on_gpu:
        return {}
    nccl: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ""  # type: ignore[no-untyped-call]
    cudnn: Any = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "cuda": str(torch.version.cuda or torch.version.hip or ""),
        "cudnn": str(cudnn or ""),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
    }
