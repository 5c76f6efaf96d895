"""`harness runs replay`: execute a part of a run again, from one of its snapshots, on any number of
workers, and compare.

Uses: auditing a window's computation, debugging at another world size, and finding the first step
and tensor of a divergence. The run itself is only read; everything happens in a scratch folder.
With reduce="exact" the replayed window must be identical to the bit on any world; with "fast" only
on the same world.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from harness.bucket.journal import read_records
from harness.bucket.layout import SAMPLES, read_epoch
from harness.bucket.phases import phase_at, read_phases
from harness.core import step_records as rec
from harness.core.batch import halved, replicas_of
from harness.core.mesh import parse_choice
from harness.core.world import BadInput, HarnessError
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.snapshots.manifest import PARTS, Manifest
from storage.snapshots.restore import ALLOWED
from storage.snapshots.snapshot_keys import MANIFESTS
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store


@dataclass(frozen=True)
class Replay:
    """The result of a replay. `first_difference`: "" if every compared step is identical."""

    first: int
    last: int
    world: int
    first_difference: str
    weights: str  # "identical", "different: <tensor>", or why they were not compared
    hash: str  # hash of the replayed weights

    @property
    def identical(self) -> bool:
        return not self.first_difference and not self.weights.startswith("different")


def replay(
    store: ObjectStore,
    scratch: Path,
    start: int,
    steps: int,
    world: int,
    argv: Sequence[str],
    timeout_s: float = 3600.0,
) -> Replay:
    """Execute steps start+1 .. start+steps again with `world` workers of the script `argv`, in
    `scratch` (an empty folder). Replicas have the original number of ranks, unless
    HARNESS_REPLICA_RANKS is set.

    Raises BadInput (no such snapshot, no whole replicas), HarnessError (the script failed; the
    message has the end of its log).
    """
    source = Snapshots(store)
    found = {ref.step: ref for ref in sorted(source.refs())}
    if start not in found:
        have = ", ".join(str(s) for s in sorted(found)) or "none"
        raise BadInput(
            f"there is no snapshot of step {start}; found: {have}. Keep more with "
            "attach(keep_every_steps=...)"
        )
    newest = source.latest()
    assert newest is not None
    named = newest.data["samples"]
    phases = read_phases(store)
    phase, genesis = phase_at(phases, start + 1), rec.genesis(phases[0].identity or {})
    identity = phase.identity or {}
    original = {r.step: r for r in read_records(store, named["key"], named["head"], genesis)}
    last = min(start + steps, newest.step if phase.ends is None else phase.ends)
    sizes = [original[step].micro_batch for step in range(start + 1, last + 1)]
    # a window ends where micro-batches became smaller: no try of the script has both
    last -= len(sizes) - next((i for i, n in enumerate(sizes) if n != sizes[0]), len(sizes))
    if last <= start:
        raise BadInput(f"the run has no steps after {start}; choose an earlier --from")
    manifest = source.load(found[start])
    after = original[start + 1]
    extra = environment_of(store, manifest, (after.epoch, after.replica_ranks), identity, world)
    extra["HARNESS_UNTIL_STEP"] = str(last)
    copy = open_store(str(scratch))
    extra["HARNESS_HALVINGS"] = str(halvings_of(identity["micro_batch"], sizes[0]))
    copy_snapshot(store, copy, manifest, store.list(ALLOWED))
    execute(scratch, extra, world, argv, timeout_s)
    again = Snapshots(copy).latest()
    replayed = [r for key in copy.list(SAMPLES) for r in rec.decode(copy.get(key), key)]
    if again is None or [r.step for r in replayed] != list(range(start + 1, last + 1)):
        raise HarnessError(
            f"the replay covered steps {[r.step for r in replayed]}, wanted {start + 1} to {last}"
        )
    difference = next((d for r in replayed for d in _differences(original[r.step], r)), "")
    weights = "not compared: the run keeps no snapshot of that step"
    if last in found:
        weights = _compare_weights(source, source.load(found[last]), Snapshots(copy), again)
    return Replay(start + 1, last, world, difference, weights, str(again.data.get("weights")))


def halvings_of(asked: int, found: int) -> int:
    """Return how often the micro-batch `asked` was halved until it was `found` (0: never). Raises
    BadInput."""
    for times in range(asked.bit_length()):
        if found in (0, halved(asked, times)):
            return times
    raise BadInput(
        f"the steps have micro-batches of {found}, wanted {asked} (run.json) or a part that it is "
        "halved to; run `harness prove verify`"
    )


def _mesh_of(store: ObjectStore, epoch: int) -> str:
    """Return the device mesh of a generation; "" if each rank had the whole model, or it is
    unknown."""
    try:
        return read_epoch(store, epoch).mesh
    except (NotFound, BadObject):
        return ""


def environment_of(
    store: ObjectStore,
    manifest: Manifest | None,
    first: tuple[int, int],
    identity: Mapping[str, Any],
    world: int,
) -> dict[str, str]:
    """Return the variables for `world` workers that go on from a snapshot, or begin (None).
    `first`: the generation that did the steps after it in the run, and its ranks per replica.
    Raises BadInput if so many workers make no whole replicas."""
    epoch, replica_ranks = first
    told = os.environ.get("HARNESS_REPLICA_RANKS", "")
    replica_ranks = int(told) if told.isdecimal() else replica_ranks
    replicas_of(world, replica_ranks)
    mesh = os.environ.get("HARNESS_MESH") or _mesh_of(store, epoch)
    if mesh:
        parse_choice(mesh).of_world(world)
    extra = {
        "HARNESS_EPOCH": str(manifest.epoch + 1 if manifest else 1),
        "HARNESS_REPLICA_RANKS": str(replica_ranks),
        "HARNESS_MESH": mesh,
    }
    state = manifest.data["state"] if manifest else {}
    if (guards := state.get("guards")) is not None:
        extra["HARNESS_GUARDS"] = json.dumps(guards["settings"])
    if rec.is_foreign(identity):  # a foreign trainer made the steps, and has to make them again
        extra["HARNESS_ADAPT"] = str(identity["adapter"])
        extra["HARNESS_ATTACH"] = json.dumps({"reduce": identity["reduce"]})
    return extra


def copy_snapshot(
    store: ObjectStore, copy: ObjectStore, manifest: Manifest | None, orders: Iterable[str]
) -> None:
    """Copy a snapshot, if there is one, and what goes before its steps: the identities of the
    phases so far, and the ends of those that are over. `orders`: keys of rewinds, whose updates are
    left out again. Raises BadInput if such an end is missing."""
    phases, snapshots = read_phases(store), Snapshots(store)
    phase = phase_at(phases, (manifest.step if manifest else 0) + 1)
    keys = [*(one.key for one in phases[: phase.number]), *orders]
    wanted = {manifest.ref: manifest} if manifest else {}
    for step in phase.ended:
        ref = max((one for one in snapshots.refs() if one.step == step), default=None)
        if ref is None:
            raise BadInput(
                f"{store.url}: wanted a snapshot of step {step}, where a phase ended, found none"
            )
        wanted[ref] = snapshots.load(ref)
    for ref, one in wanted.items():
        keys += [*one.objects, *store.list(f"{PARTS}{ref.name}/list-")]
        keys.append(f"{MANIFESTS}{ref.name}.json")
    for key in dict.fromkeys(keys):
        copy.put(key, store.get(key))


def execute(
    scratch: Path, extra: dict[str, str], world: int, argv: Sequence[str], timeout_s: float
) -> None:
    """Run a script's `world` workers, to their end. Raises HarnessError with the end of the log of
    one that failed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    logs = [scratch / f"rank{rank}.log" for rank in range(world)]
    try:
        for rank in range(world):
            env = {
                **{k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")},
                **{
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                },
                **{
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "HARNESS_RUN": str(scratch),
                },
                **extra,
            }
            env.setdefault("OMP_NUM_THREADS", "1")
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            command, order = [sys.executable, *argv], None
            if "HARNESS_ADAPT" in extra:  # the worker process applies adapters
                command = [sys.executable, "-m", "harness.node.forkserver", "-"]
                order = json.dumps({"env": {}, "argv": list(argv)}).encode() + b"\n"
            with open(logs[rank], "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.PIPE if order else None,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            if order and (words := processes[-1].stdin) is not None:
                with words:
                    words.write(order)
        deadline_s = time.monotonic() + timeout_s
        while any(p.poll() is None for p in processes):
            failed = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if failed is not None or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll() != 0:
                what = (
                    "did not end in time"
                    if process.poll() is None
                    else f"ended with {process.returncode}"
                )
                raise HarnessError(
                    f"rank {rank} of the replay {what}: "
                    f"{logs[rank].read_text(errors='replace')[-1500:]}"
                )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _differences(a: rec.StepRecord, b: rec.StepRecord) -> Iterator[str]:
    """Yield the differences between two executions of one step, bit for bit."""
    names = ("digest", "contents", "samples", "weight", "loss", "lr", "skipped")
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in names]
    norms = (one.metrics.get("grad_norm", math.nan) for one in (a, b))
    for name, x, y in [*pairs, ("gradient norm", *norms)]:
        if x != y and not (x != x and y != y):  # a skipped step may have no loss
            yield f"step {a.step}: {name} was {x!r}, is {y!r}"


def _compare_weights(source: Snapshots, a: Manifest, copy: Snapshots, b: Manifest) -> str:
    for name in a.tensors:
        if name not in b.tensors or not np.array_equal(
            _whole(source, a, name), _whole(copy, b, name)
        ):
            return f"different: {name} is the first tensor that differs after step {a.step}"
    return "identical"


def _whole(snapshots: Snapshots, manifest: Manifest, name: str) -> np.ndarray[Any, Any]:
    """Return the bytes of one tensor, uint8 of shape (*tensor's shape, bytes per element),
    assembled from its shards."""
    entry: dict[str, Any] = manifest.tensors[name]
    chunks = entry["chunks"]
    if not chunks:
        return np.zeros((0,), np.uint8)
    width = (chunks[0]["end"] - chunks[0]["start"]) // max(1, math.prod(chunks[0]["sizes"]))
    whole = np.zeros((*entry["shape"], width), np.uint8)
    for c in chunks:
        data = np.frombuffer(snapshots.read(manifest, c["part"], c["start"], c["end"]), np.uint8)
        box = tuple(slice(o, o + n) for o, n in zip(c["offsets"], c["sizes"], strict=True))
        whole[box] = data.reshape(*c["sizes"], width)
    return whole


def print_replay(found: Replay, console: Console) -> int:
    """Print the result; return exit status 0 if everything that was compared is identical."""
    ranks = f"{found.world} worker{'s' if found.world > 1 else ''}"
    if not found.first_difference:
        console.print(
            f"steps {found.first}-{found.last} on {ranks}: identical (samples, loss, gradient "
            "norm, to the bit)",
            highlight=False,
        )
    else:
        console.print(
            f"steps {found.first}-{found.last} on {ranks}: first difference at "
            f"{found.first_difference}",
            highlight=False,
        )
    console.print(
        f"state after step {found.last}: {found.weights}; weights {found.hash}", highlight=False
    )
    return 0 if found.identical else 1
