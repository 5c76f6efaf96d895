"""`harness prove verify`, `compare`, `replay`, `drill`, `doctor`, `fake-metadata`: proofs of a run
and checks of a setup."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.common import (
    DONE,
    FAILED,
    PREFLIGHT_S,
    cache_dir,
    existing_store,
    key_text,
    sky_broker,
)
from harness.clouds import sky_task
from harness.core.flags import flag, positional
from harness.core.input_files import output_folder
from harness.core.signing import VARIABLE, key_of
from harness.core.world import BadInput
from harness.lab.bisect import bisect as find_first_bad
from harness.lab.bisect import print_bisection
from harness.lab.replay import print_replay
from harness.lab.replay import replay as execute
from storage.canonical_json import BadObject
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.core.signing import SigningKey
    from harness.look.audit.audit import AuditReport


@dataclass(frozen=True)
class VerifyFlags:
    url: str = positional("URL of the run")
    anew: bool = flag(
        False, "also take apart what an earlier `harness prove verify` has proved here"
    )
    key: str = flag(
        "",
        "a file with the key that the run was signed with, or the public one of it: find also what "
        "somebody with write access to the bucket did (docs/PROOF.md); default: "
        "HARNESS_SIGNING_KEY",
        metavar="FILE",
    )
    state: str = flag(
        "",
        "with --key: a file of this computer that remembers the newest signed head seen, so that a "
        "bucket rolled back as a whole is found",
        metavar="FILE",
    )
    data: tuple[str, ...] = flag(
        (),
        "the corpus that the run read (docs/DATA.md): compare what each step read with its index; "
        "of a mixture, all of them: may be repeated, in any order",
        metavar="URL",
    )


def verify(flags: VerifyFlags) -> int:
    """Prove from the bucket alone that the run is what it should be.

    Exit status 1 names the first violation. Without --key this protects against accidents, not
    against those who may write to the bucket. It resumes an interrupted one: what was proved is
    remembered on this computer and trusted for objects whose bytes are unchanged."""
    from harness.look.audit.audit import UNSIGNED, audit, print_audit
    from harness.look.audit.proof_cache import Prover

    key = _key_of(flags)
    memory = cache_dir(normalize(flags.url), "verified") / "proofs"
    if flags.anew:
        memory.unlink(missing_ok=True)
    store = existing_store(flags.url)
    found = audit(store, prover=Prover(os.cpu_count() or 1, memory))
    if flags.data:
        from harness.look.audit.audit_samples import with_contents

        found = with_contents(found, store, flags.data)
    if key is None:
        found.notes.append(UNSIGNED)
    else:
        found = _with_signatures(found, store, key, flags.state)
    print_audit(found, Console())
    return DONE if found.ok else FAILED


def _key_of(flags: VerifyFlags) -> SigningKey | None:
    """Return the key to verify signatures with; `None` without one. Raises BadInput."""
    text = key_text(flags.key) if flags.key else os.environ.get(VARIABLE, "")
    if flags.state and not text:
        raise BadInput("--state: what it remembers is signed; give --key as well")
    return key_of(text, flags.key or VARIABLE) if text else None


def _with_signatures(
    found: AuditReport, store: ObjectStore, key: SigningKey, state: str
) -> AuditReport:
    """Return the report extended by checks of signatures. The state file, if there is one, is read
    and updated with the newest signed head. Raises BadInput."""
    from harness.local.provider import write_atomic
    from harness.look.audit.audit_signatures import remembered, remembering, with_signatures

    path = Path(state).expanduser() if state else None
    try:
        text = path.read_text() if path is not None and path.exists() else ""
        seen = remembered(text, store.url)
        found, newest = with_signatures(found, store, key, seen)
        if path is not None and newest is not None:
            write_atomic(path, remembering(text, store.url, newest))
    except (OSError, BadObject, UnicodeDecodeError) as e:
        raise BadInput(
            f"--state {state}: wanted a file of an earlier `harness prove verify` ({e})"
        ) from e
    return found


@dataclass(frozen=True)
class CompareFlags:
    a: str = positional("URL of a run")
    b: str = positional("URL of another one")
    rtol: float = flag(1e-3, "largest relative difference of a step's loss that counts as the same")


def compare(flags: CompareFlags) -> int:
    """Compare two runs: are they the same training? Exit status 1 if not."""
    from harness.look.reports.compare import compare as compare_stores
    from harness.look.reports.compare import print_comparison

    found = compare_stores(existing_store(flags.a), existing_store(flags.b))
    return print_comparison(found, Console(), flags.rtol)


@dataclass(frozen=True)
class AgainFlags:
    url: str = positional("URL of the run")
    script: tuple[str, ...] = positional(
        "-- script.py and its arguments, as the run was trained", nargs="*"
    )
    nodes: int = flag(1, "how many workers", at_least=1)
    timeout_s: float = flag(3600.0, "the longest that it may take", above=0)

    def check_script(self, command: str) -> None:
        """Raise BadInput without a script. `command`: the words before `--`."""
        if not self.script:
            raise BadInput(
                f"no script: write `{command} -- train.py --its-flags`, as the run was trained"
            )


@dataclass(frozen=True)
class ReplayFlags(AgainFlags):
    start: int = flag(
        0, "the snapshot to begin from, by its step (see `harness runs report`)", metavar="STEP"
    )
    steps: int = flag(10, "how many steps", at_least=1)
    into: str = flag(
        "",
        "an empty folder for the copy; default: a temporary one that is removed",
        check=output_folder,
    )


def replay(flags: ReplayFlags) -> int:
    """Repeat a part of a run from one of its snapshots, and compare it bit by bit.

    The number of workers may differ from the run's."""

    flags.check_script("harness runs replay URL --start STEP")
    store = existing_store(flags.url)
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as temporary:
        scratch = Path(flags.into or temporary)
        if scratch.exists() and any(scratch.iterdir()):
            raise BadInput(f"--into {scratch}: wanted an empty folder")
        scratch.mkdir(parents=True, exist_ok=True)
        return print_replay(
            execute(
                store, scratch, flags.start, flags.steps, flags.nodes, flags.script, flags.timeout_s
            ),
            Console(),
        )


@dataclass(frozen=True)
class BisectFlags(AgainFlags):
    step: int = flag(
        0, "the step in question; default: the newest that a guard has named", metavar="K"
    )
    data: tuple[str, ...] = flag(
        (), "the corpus that it reads: print the documents of what is bad", metavar="URL"
    )


def bisect(flags: BisectFlags) -> int:
    """Repeat the steps before a failure; name the first bad one, its micro-batch and samples.

    One worker is enough for what many have trained. Exit status 1 if no step is bad."""
    flags.check_script("harness runs bisect URL")
    store, console = existing_store(flags.url), Console()
    with tempfile.TemporaryDirectory(prefix="harness-bisect-") as scratch:
        found = find_first_bad(
            store, Path(scratch), flags.step, flags.nodes, flags.script, flags.timeout_s
        )
    code = print_bisection(found, console, flags.url)
    if flags.data and found.micros:
        from harness.cli.corpus_command import print_step

        print_step(store, flags.data, found.line.step, console, only=found.micros)
    return code


# ---- a cloud ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class FakeMetadataFlags:
    cloud: str = flag(
        "aws", "whose metadata service: aws, gcp or azure", choices=["aws", "gcp", "azure"]
    )
    port: int = flag(1338, "where to listen, on loopback; 0: a free port", at_most=65535)
    name: str = flag("fake-0", "name of the machine")
    clock_ahead_s: float = flag(0.0, "how far the cloud's clock is ahead of ours", at_least=None)


def fake_metadata(flags: FakeMetadataFlags) -> int:
    """Serve a fake cloud metadata service on loopback; send notices, cancellations and faults."""
    from harness.local.metadata_reply import CONTROL_PATH
    from harness.local.metadata_server import MetadataServer, environment_of, metadata_service

    try:
        server = MetadataServer(
            metadata_service(flags.cloud, flags.name),
            flags.port,
            control=True,
            clock_ahead_s=flags.clock_ahead_s,
        )
    except OSError as e:
        raise BadInput(
            f"--port {flags.port}: {e.strerror}; name another port, or 0 for a free one"
        ) from e
    for name, value in environment_of(flags.cloud, server.endpoint).items():
        print(f"export {name}={value}")
    print(
        """# curl -d '{"do": "notice", "kind": "kill", "in_s": 120}' """
        f"{server.endpoint.rstrip('/')}{CONTROL_PATH}"
    )
    print("# or one such line here; ends with Ctrl-C", flush=True)
    try:
        for line in sys.stdin:
            try:
                print(
                    json.dumps(server.order(json.loads(line))) if line.strip() else "", flush=True
                )
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        threading.Event().wait()  # go on serving after standard input was closed
    finally:
        server.close()
    return DONE


# ---- drill ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DrillFlags:
    only: tuple[str, ...] = flag(
        (),
        "FAULT:PHASE, either may be *; repeat for more (default: the whole matrix)",
        metavar="FAULT:PHASE",
    )
    seed: int = flag(0, "which node, which moment")
    jobs: int = flag(1, "cells at the same time; about one per core", at_least=1)
    json: bool = flag(False, "print the results as JSON")
    keep: str = flag("", "keep runs and logs in this empty folder", check=output_folder)


def drill(flags: DrillFlags) -> int:
    """Test every fault in every phase, on real processes of this machine.

    A cell passes if it ends with the weights of an undisturbed run."""
    from harness.lab.drills import drill as drills

    return drills.command(flags.only, flags.seed, flags.jobs, flags.json, flags.keep, Console())


# ---- doctor --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DoctorFlags:
    task: str = positional(
        "the SkyPilot task YAML that is to be launched; may be left out", nargs="?"
    )
    run: str = flag("", "URL of the run: its bucket is tried out")
    env: tuple[str, ...] = flag(
        (), "NAME=value for the task; repeat for more", metavar="NAME=value"
    )
    secret: tuple[str, ...] = flag((), "NAME or NAME=value; repeat for more", metavar="NAME=value")
    json: bool = flag(False, "print the findings as JSON")


def doctor(flags: DoctorFlags) -> int:
    """Check that everything is in place for a launch, at no cost, and print what to do.

    Exit status 1 if a launch cannot work."""
    from harness.cli import doctor as doctors

    url = normalize(flags.run) if flags.run else ""
    task = None
    if flags.task:
        envs = {**sky_task.pairs(flags.env, os.environ), "RUN": url or "none"}
        task = sky_task.load(flags.task, envs, sky_task.pairs(flags.secret, os.environ, "--secret"))
    sky = sky_broker(url or "doctor")

    def opened(at: str) -> ObjectStore:
        return open_store(at, retry_within_s=PREFLIGHT_S)

    try:
        found = doctors.examine(
            task, url, sky, opened, os.environ, Path.home(), secrets.token_hex(4)
        )
    finally:
        sky.close()
    if flags.json:
        print(doctors.to_json(found))
    else:
        doctors.show(found, Console())
    return FAILED if any(f.state == doctors.FAIL for f in found) else DONE
