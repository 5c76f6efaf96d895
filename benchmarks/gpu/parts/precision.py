"""Low precision, dropout and compiled models: a run that is lost and resumed in another process
ends as the run that nothing happened to, to the bit.

Two processes run beside each other. The first trains each way without an interruption, and once
more until a snapshot of its middle is committed, where that run is lost. The second builds the
model with other weights, resumes the lost runs and trains to the end. Both write what they have
seen as JSON, and the part compares it. Sessions of other parts (`sharded`) are made here as well.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.bench import Bench, environment

TOTAL, MIDDLE, LOST = 8, 4, 7  # steps of a run; of its snapshots; the one in which a run is lost
GLOBAL_BATCH, MICRO_BATCH = 8, 4  # samples
OVERFLOW = 2  # the step whose loss overflows fp16
FIRST_SCALE = 2.0**8
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMMIT_S = 30.0  # the longest wait for the commit of a snapshot


@dataclass(frozen=True)
class Way:
    """A way to train. `sharded`: "fsdp2", "offload", or "": a whole model. `deterministic`: the
    argument of `attach`. `fused`: the optimizer's kernel. `readers`: processes that load data.
    `disturbed`: random numbers of the device are seeded anew in one micro-batch, which must show.
    `backend`: of the process group; None: the product's choice."""

    name: str
    says: str
    dtype: str = "fp32"
    dropout: float = 0.0
    reduce: str = "fast"
    compiled: bool = False
    float8: str = ""
    sharded: str = ""
    deterministic: bool | None = True
    fused: bool = True
    readers: int = 0
    disturbed: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class Again:
    """A resume of the run of the way `of` that was lost, in this way or another."""

    of: str
    way: Way


DROPOUT = Way("dropout", "bf16 autocast with dropout", "bf16", dropout=0.1, readers=2)
COMPILED = Way("compiled", "bf16, torch.compile", "bf16", compiled=True)
AS_IT_COMES = Way(
    "as-it-comes", "bf16, reduce='exact', deterministic not asked for", "bf16", reduce="exact",
    deterministic=None,
)  # fmt: skip
WAYS = (  # by value: what comes last is lost first
    DROPOUT,
    Way("scaler", "fp16 with GradScaler", "fp16"),
    Way("fp32", "fp32"),
    Way("exact", "bf16, reduce='exact'", "bf16", reduce="exact", dropout=0.1),
    Way("exact32", "bf16, reduce='exact32'", "bf16", reduce="exact32"),
    AS_IT_COMES,
    Way("tensorwise", "bf16, float8 (tensorwise)", "bf16", float8="tensorwise"),
    Way("rowwise", "bf16, float8 (rowwise)", "bf16", float8="rowwise"),
    COMPILED,
    Way("compiled-dropout", "bf16 with dropout, torch.compile", "bf16", 0.1, compiled=True),
)
MORE = (
    Again("dropout", replace(DROPOUT, name="disturbed", disturbed=True)),
    Again("compiled", replace(COMPILED, name="not-compiled", compiled=False)),
)
LONG = ("rowwise", "compiled-dropout")  # ways that the miniature leaves out


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample i is a function of i. Returns (length,) int64 twice: tokens, and those that follow."""

    fingerprint = "tokens of make gpu"

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(i)
        # few different tokens, so that there is something to learn
        row = torch.randint(0, 16, (self.length + 1,), generator=drawn)
        return row[:-1], row[1:]


class Missing(Exception):
    """What a way needs and this machine lacks."""


TOO_LATE = "it did not come to this in its time"


# ---- one session ---------------------------------------------------------------------------------
def length_of(tiny: bool) -> int:
    return 32 if tiny else 512


def built(way: Way, run: Any, tiny: bool) -> nn.Module:
    """Return the model, as examples/pretrain.py builds it. Raises Missing."""
    from gpt import GPT, Shape

    import harness

    shape = Shape(layers=2, dim=64, heads=2) if tiny else Shape(layers=4, dim=256, heads=4)
    model = GPT(shape, length_of(tiny), way.dropout)
    if way.float8:
        try:
            harness.float8(model.blocks, way.float8, emulate=tiny)
        except harness.BadInput as e:
            raise Missing(str(e).splitlines()[0][:300]) from e
    if way.compiled:
        if not tiny and (lacks := compiler_lacks()):
            raise Missing(lacks)
        for block in model.blocks:
            block.compile(**({"backend": "aot_eager"} if tiny else {}))
    if way.sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        how: dict[str, Any] = {"offload": way.sharded == "offload"}
        if way.dtype == "bf16":
            how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        harness.fsdp2(model, run, **how)
    elif way.dtype in HALF:
        model.forward = torch.autocast(run.device.type, HALF[way.dtype])(model.forward)
    return model


def compiler_lacks() -> str:
    """Return what torch.compile needs on a GPU and this machine lacks; "": nothing. Triton compiles
    its launchers with a C compiler and Python's headers."""
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "cc", "clang")))):
        return "no C compiler, which triton needs"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h, which triton needs"
    return ""


@dataclass
class Seen:
    """What one step has shown; on the device until `told`."""

    losses: list[Tensor]
    draws: list[Tensor]
    samples: list[Tensor]

    def told(self) -> dict[str, Any]:
        return {
            "losses": [repr(v) for v in torch.stack(self.losses).double().tolist()],
            "draws": torch.cat(self.draws).tolist(),
            "samples": torch.stack(self.samples).tolist(),
        }


# kept, so that staging memory of none is freed and mapped again (`remap` tries that by itself)
_sessions: list[Any] = []


def train(way: Way, tiny: bool, url: str | None, what: str, first_seed: int) -> dict[str, Any]:
    """Train in one way. `what`: "whole", "cut" (the run is lost behind its snapshot) or "resumed".
    `url`: None: without snapshots. Returns what was seen, ready for JSON. Raises Missing."""
    import harness

    run = harness.attach(
        seed=3,
        run=url,
        reduce=way.reduce,
        deterministic=way.deterministic,
        snapshot_every_steps=MIDDLE,
        backend=way.backend if not _sessions else None,  # the first makes the process group
    )
    _sessions.append(run)
    torch.manual_seed(first_seed)
    model, device = built(way, run, tiny), run.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way.fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 4))
    scaler = None
    if way.dtype == "fp16":
        scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE, growth_interval=4)
    run.prepare(model, optimizer, scheduler, scaler)
    data = Tokens(length_of(tiny))
    ramp = torch.arange(1, data.length + 1, device=device)

    def state() -> dict[str, str]:
        held = {"weights": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        return {k: digest(v.state_dict()) for k, v in held.items() if v is not None}

    found: dict[str, Any] = {"at": -1, "states": {}, "scales": {}, "names": []}
    found["pid"] = os.getpid()
    seen: dict[int, Seen] = {}
    sizes = {"total": TOTAL, "global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
    for step in run.steps(data, **sizes, num_workers=way.readers):
        if found["at"] < 0:
            found["at"] = step.number - 1
            found["loaded"] = state()
        if what == "cut" and step.number == LOST:
            found["names"] = committed(run)
            break
        here = seen[step.number] = Seen([], [], [])
        for x, y in step:
            if way.disturbed and step.number == found["at"] + 1:
                (torch.cuda.manual_seed if device.type == "cuda" else torch.manual_seed)(4242)
            drawn = torch.rand(4, device=device)
            loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
            if step.attempt == 0:
                here.draws.append(drawn)
                here.samples.append(((x + 256 * y) * ramp).sum())
                here.losses.append(loss.detach())
            provoked = scaler is not None and step.number == OVERFLOW
            step.backward(loss * 1e9 if provoked else loss)
        step.update(clip_norm=1.0)
        here.draws.append(torch.rand(4, device=device))
        if what == "whole" and MIDDLE <= step.number < LOST:
            found["states"][step.number] = state()
        if scaler is not None:
            found["scales"][step.number] = scaler.get_scale()
    found["end"] = state()
    found["steps"] = {number: one.told() for number, one in seen.items() if one.losses}
    if what == "whole":
        found["expected"] = expected(run, data)
        if device.type == "cuda":
            # those that another pass of the product's own loader gives
            again = next(run._work.feed.batches(1, 1, 0, print))
            found["pinned"] = bool(again.data[0].is_pinned() and again.data[1].is_pinned())
        if way.name == AS_IT_COMES.name:
            found["gradients"] = gradients(model, data, device, 3 if tiny else 20)
    return found


def committed(run: Any) -> list[str]:
    """Wait for the snapshot to be committed, and return the names of its tensors."""
    until_s = time.monotonic() + COMMIT_S
    while (manifest := run.snapshots.latest()) is None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"no snapshot was committed in {COMMIT_S:.0f} s")
        time.sleep(0.02)
    return sorted(manifest.tensors)


def expected(run: Any, data: Tokens) -> dict[int, list[int]]:
    """Return what `Seen.samples` of this rank must be, from the dataset alone."""
    from harness.core.batch import indices_at

    ramp, micros = torch.arange(1, data.length + 1), run.plan.micros(run.rank)
    found: dict[int, list[int]] = {}
    for number in range(1, TOTAL + 1):
        places = (number - 1) * GLOBAL_BATCH + np.arange(GLOBAL_BATCH)
        indices = indices_at(run.batching, places).reshape(-1, MICRO_BATCH).tolist()
        found[number] = [
            int(sum(((x + 256 * y) * ramp).sum() for x, y in map(data.__getitem__, indices[m])))
            for m in micros
        ]
    return found


def gradients(model: nn.Module, data: Tokens, device: torch.device, times: int) -> int:
    """Return how many different gradients one batch has in so many backwards."""
    x, y = (torch.stack(t).to(device) for t in zip(*(data[i] for i in range(32)), strict=True))
    digests = set()
    for _ in range(times):
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        found = torch.autograd.grad(loss, list(model.parameters()))
        digests.add(digest(list(found)))
    return len(digests)


def remap(device: torch.device, nbytes: int) -> tuple[bool, str]:
    """Return whether memory of a snapshot that was pinned, freed and mapped again holds what is
    copied to it, and a note. The driver may still know the freed memory at the same address."""
    from storage.snapshots.staging import Segment
    from storage.tensors import dcp

    def copied(seed: int) -> tuple[int, bool]:
        segment = Segment.anonymous(nbytes)
        held = torch.frombuffer(segment.view, dtype=torch.uint8)
        held.zero_()
        dcp.pin(held, segment)
        torch.manual_seed(seed)
        wanted = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        held.copy_(wanted, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return held.data_ptr(), torch.equal(held.clone(), wanted.cpu())

    places = []
    for seed in range(3):
        at, right = copied(seed)
        gc.collect()
        places.append(at)
        if not right:
            return False, f"mapping {seed + 1} held other bytes"
    again = len(places) - len(set(places))
    return True, f"{again} of {len(places) - 1} at an address that was pinned before"


def digest(value: Any) -> str:
    """Return a hash of tensors and numbers in nested dicts and lists. A sharded tensor counts as
    the whole one, on whatever device."""
    h = hashlib.sha256()
    _spell(h, value)
    return h.hexdigest()


def _spell(h: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
        on_host = whole.detach().cpu().contiguous()
        h.update(f"{on_host.dtype} {tuple(on_host.shape)}".encode())
        h.update(on_host.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            h.update(f"{key}:".encode())
            _spell(h, value[key])
    elif isinstance(value, (list, tuple)):
        h.update(f"{len(value)}[".encode())
        for one in value:
            _spell(h, one)
    else:
        h.update(f"{value!r};".encode())


# ---- the two processes ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Course:
    """What a process is told: the folder of runs and results, and when it ends (monotonic)."""

    folder: Path
    tiny: bool
    ends_s: float

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    @property
    def leads(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    def url(self, name: str) -> str:
        return str(self.folder / "runs" / name)

    def write(self, name: str, found: Mapping[str, Any]) -> None:
        if self.leads:
            new = self.folder / f".{name}.json"
            new.write_text(json.dumps(found))
            new.replace(self.folder / f"{name}.json")

    def read(self, name: str) -> dict[str, Any] | None:
        """Return what was written; None: nothing yet."""
        at = self.folder / f"{name}.json"
        return json.loads(at.read_text()) if at.exists() else None

    def wait(self, name: str) -> dict[str, Any]:
        """Return what another process writes. Raises Missing."""
        while (found := self.read(name)) is None:
            if self.left_s < 0:
                raise Missing(TOO_LATE)
            time.sleep(0.05)
        return found

    def attempt(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write what `do` returns, or why it failed, and return that."""
        t0 = time.monotonic()
        try:
            found = do()
        except Missing as e:
            found = {"missing": str(e)}
        except (Exception, SystemExit) as e:
            traceback.print_exc()
            lines = [line for line in f"{type(e).__name__}: {e}".splitlines() if line.strip()]
            found = {"error": " ".join(lines[:2])[:300]}
        print(f"{name}: {time.monotonic() - t0:.1f} s", flush=True)
        self.write(name, found)
        return found


def first(course: Course, ways: Sequence[Way], resumes: Sequence[Again]) -> None:
    """Train each way whole, and until it is lost. Each of `resumes` gets a copy of its run, made
    before anybody resumes one."""
    for way in ways:
        whole = course.attempt(
            f"{way.name}.whole", functools.partial(train, way, course.tiny, None, "whole", 11)
        )
        if lacks := {k: v for k, v in whole.items() if k in ("missing", "error")}:
            course.write(f"{way.name}.cut", lacks)
            continue

        def lost(way: Way = way) -> dict[str, Any]:
            found = train(way, course.tiny, course.url(way.name), "cut", 11)
            for one in resumes:
                if course.leads and way.name == one.of != one.way.name:
                    shutil.copytree(course.url(way.name), course.url(one.way.name))
            return found

        course.attempt(f"{way.name}.cut", lost)


def second(course: Course, resumes: Sequence[Again]) -> None:
    """Resume what was lost, and train to the end."""
    for one in resumes:

        def resumed(one: Again = one) -> dict[str, Any]:
            cut = course.wait(f"{one.of}.cut")
            if "missing" in cut:
                raise Missing(cut["missing"])
            if "error" in cut:
                raise RuntimeError(f"the run to resume failed: {cut['error']}")
            return train(one.way, course.tiny, course.url(one.way.name), "resumed", 12)

        course.attempt(f"{one.way.name}.resumed", resumed)
        if course.leads:  # its bytes lie in memory
            shutil.rmtree(course.url(one.way.name), ignore_errors=True)


def in_order(ways: Sequence[Way], more: Sequence[Again]) -> list[Again]:
    """Return the resumes of all ways, each with those of `more` of the same run behind it."""
    return [
        one
        for way in ways
        for one in (Again(way.name, way), *(other for other in more if other.of == way.name))
    ]


# ---- the part ------------------------------------------------------------------------------------
def differing(whole: Mapping[str, Any], resumed: Mapping[str, Any]) -> str:
    """Return in what the resumed run differs from the whole one; "": in nothing."""
    at = resumed["at"]
    if at < MIDDLE:
        return f"it began at step {at}, not behind a snapshot"
    then = whole["states"].get(str(at), {})
    if wrong := [k for k in then if then[k] != resumed["loaded"].get(k)]:
        return f"loaded at step {at}: other {', '.join(wrong)}"
    if not then:
        return f"no state of step {at} to compare with"
    for number in range(at + 1, TOTAL + 1):
        mine, theirs = whole["steps"][str(number)], resumed["steps"].get(str(number), {})
        if wrong := [k for k in mine if mine[k] != theirs.get(k)]:
            return f"step {number}: other {', '.join(wrong)}"
    wrong = [k for k, v in whole["end"].items() if resumed["end"].get(k) != v]
    return f"at the end: other {', '.join(wrong)}" if wrong else ""


def lacking(bench: Bench, what: str, *results: Mapping[str, Any] | None) -> bool:
    """Return whether a result is not there; then its row is written."""
    for found in results:
        if found is None or "missing" in found:
            bench.missing(what, TOO_LATE if found is None else found["missing"])
            return True
        if "error" in found:
            bench.checked(what, False, found["error"])
            return True
    return False


def compare(bench: Bench, course: Course, way: Way) -> None:
    """Write the rows of one way."""
    what = f"{way.says}: lost and resumed, to the bit"
    whole, cut = course.read(f"{way.name}.whole"), course.read(f"{way.name}.cut")
    resumed = course.read(f"{way.name}.resumed")
    if lacking(bench, what, whole, cut, resumed):
        return
    assert whole and cut and resumed
    differs, at = differing(whole, resumed), resumed["at"]
    where = "the same process" if resumed["pid"] == cut["pid"] else "another process"
    bench.checked(what, not differs, differs or f"from step {at} to {TOTAL}, in {where}")
    fed(bench, way, whole, resumed)
    if way.dtype == "fp16":
        scales = [whole["scales"][str(k)] for k in range(1, TOTAL + 1)]
        halved = scales[OVERFLOW - 1] == FIRST_SCALE / 2
        bench.checked(
            "fp16: an overflow halved the scale before the snapshot, which is resumed so",
            halved and cut["scales"][str(at)] == scales[at - 1],
            "scales " + " ".join(f"{s:g}" for s in scales),
        )
    if "gradients" in whole:
        bench.checked(
            "reduce='exact' as it comes: one batch has the same gradients each time",
            whole["gradients"] == 1,
            f"{whole['gradients']} different in {3 if bench.tiny else 20} backwards",
        )


def fed(bench: Bench, way: Way, whole: Mapping[str, Any], resumed: Mapping[str, Any]) -> None:
    """Write whether the samples on the device are the dataset's, for the way with readers."""
    if not way.readers:
        return
    steps = {**whole["steps"], **{f"{k} resumed": v for k, v in resumed["steps"].items()}}
    wrong = [k for k, v in steps.items() if v["samples"] != whole["expected"][k.split()[0]]]
    bench.checked(
        "samples on the device are the dataset's on the CPU",
        not wrong and len(whole["steps"]) == TOTAL,
        f"other ones in step {wrong[0]}" if wrong else f"read by {way.readers} processes",
    )
    if "pinned" in whole:
        bench.checked("batches lie in pinned memory", whole["pinned"])
    same = {
        k: v["draws"] == whole["steps"][k]["draws"] for k, v in resumed["steps"].items()
    }
    several = len({str(v["draws"]) for v in whole["steps"].values()}) == TOTAL
    bench.checked(
        "torch.rand on the device draws the same after a resume",
        all(same.values()) and bool(same) and several,
    )


def more(bench: Bench, course: Course) -> None:
    """Write the rows of second resumes."""
    what = "other random numbers in one micro-batch are found (so the rows above can fail)"
    whole, other = course.read("dropout.whole"), course.read("disturbed.resumed")
    if not lacking(bench, what, whole, other):
        assert whole and other
        differs = differing(whole, other)
        bench.checked(what, f"step {other['at'] + 1}: other" in differs, differs or "not found")
        bench.checked(
            "other random numbers in one micro-batch: other weights",
            whole["end"]["weights"] != other["end"]["weights"],
        )
    what = "a compiled run's snapshot goes on without torch.compile"
    whole, other = course.read("compiled.whole"), course.read("not-compiled.resumed")
    if lacking(bench, what, whole, other):
        return
    assert whole and other
    names, plain = (course.read(f"{n}.cut") or {} for n in ("compiled", "fp32"))
    far = max(
        abs(float(a) / float(b) - 1)
        for k, v in other["steps"].items()
        for a, b in zip(v["losses"], whole["steps"][k]["losses"], strict=True)
    )
    loaded = whole["states"].get(str(other["at"]), {}).get("weights") == other["loaded"]["weights"]
    bench.checked(what, loaded and far < 0.01, f"losses at most {far:.1e} apart")
    bench.checked(
        "a compiled run's snapshot has the names of one that is not compiled",
        bool(names.get("names")) and names.get("names") == plain.get("names"),
        f"{len(names.get('names', ()))} tensors",
    )


def processes(
    module: str, roles: Mapping[str, Mapping[str, object]], bench: Bench, spare_s: float
) -> tuple[Course, dict[str, subprocess.Popen[bytes]]]:
    """Start `module` once for each role, with variables of its own. `spare_s`: what the part needs
    behind them."""
    ends_s = time.monotonic() + bench.left_s - spare_s
    course = Course(bench.folder, bench.tiny, ends_s)
    (course.folder / "runs").mkdir(exist_ok=True)
    base = environment(
        OMP_NUM_THREADS=1 if bench.tiny else 2,
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        TORCHINDUCTOR_CACHE_DIR=course.folder / "inductor",
        TRITON_CACHE_DIR=course.folder / "triton",
        TORCHINDUCTOR_COMPILE_THREADS=4,
        GLOO_SOCKET_IFNAME="lo",
        PYTHONFAULTHANDLER=1,
    )
    if bench.tiny:
        base["CUDA_VISIBLE_DEVICES"] = ""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {
        k: v
        for k, v in base.items()
        if k not in ranks and (not k.startswith("HARNESS_") or k == "HARNESS_BENCH_PART")
    }
    started = {}
    for role, own in roles.items():
        command = [sys.executable, "-m", module, role.split()[0], str(course.folder)]
        started[role] = subprocess.Popen(
            [*command, str(int(bench.tiny)), repr(course.ends_s)],
            env=base | {k: str(v) for k, v in own.items()},
        )
    return course, started


def watch(
    course: Course, started: Mapping[str, subprocess.Popen[bytes]]
) -> Iterator[Mapping[str, int | None]]:
    """Yield the states of the processes until all have ended, or their time has; then end them."""
    try:
        while True:
            codes = {role: p.poll() for role, p in started.items()}
            yield codes
            if None not in codes.values() or course.left_s < 0:
                return
            time.sleep(0.1)
    finally:
        for p in started.values():
            if p.poll() is None:
                p.kill()
            p.wait()


def ended_well(bench: Bench, started: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Write a row if a process has died by itself."""
    codes = {role: p.returncode for role, p in started.items() if p.returncode not in (0, -9)}
    if codes:
        bench.checked("the processes end well", False, f"exit statuses {codes}")


def told(argv: Sequence[str]) -> tuple[str, Course]:
    """Return the role and the course of this process, which shows its stacks if it is too late."""
    role, folder, tiny, ends_s = argv
    course = Course(Path(folder), tiny == "1", float(ends_s))
    faulthandler.dump_traceback_later(max(1.0, course.left_s - 1.0), exit=False)
    return role, course


def ways_of(tiny: bool) -> list[Way]:
    return [way for way in WAYS if not tiny or way.name not in LONG]


def run(bench: Bench) -> None:
    roles: dict[str, dict[str, object]] = {"first": {}, "second": {}}
    course, started = processes("benchmarks.gpu.parts.precision", roles, bench, spare_s=3.0)
    left = ways_of(bench.tiny)
    for _ in watch(course, started):
        while left and course.read(f"{left[0].name}.resumed") is not None:
            compare(bench, course, left.pop(0))
    for way in left:
        compare(bench, course, way)
    more(bench, course)
    what = "memory that was pinned, freed and mapped again holds what is copied to it"
    found = course.read("remap")
    if not lacking(bench, what, found):
        assert found
        bench.checked(what, found["ok"], found["note"])
    ended_well(bench, started)


def main() -> None:
    role, course = told(sys.argv[1:])
    ways = ways_of(course.tiny)
    if role == "first":
        first(course, ways, MORE)
    else:
        second(course, in_order(ways, MORE))
        device = torch.device("cpu" if course.tiny else "cuda")
        nbytes = 1 << (20 if course.tiny else 26)

        def mapped() -> dict[str, Any]:
            ok, note = remap(device, nbytes)
            return {"ok": ok, "note": note}

        course.attempt("remap", mapped)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
