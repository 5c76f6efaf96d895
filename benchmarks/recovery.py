"""From a loss to the next optimizer step, and to the first step that is further than the training
was: this harness beside plain torchrun with a DCP checkpoint, on the same model, taking turns.

    worker   SIGKILL of one worker of two on a node               node     SIGKILL of a whole node
             (agent and workers) of two
    first    ... of the node that holds rank 0 and the master     join     from a new node's start
             to the first step of two nodes
    pause    of a join: from the last step of one node to the first of two, and how many steps are
             done again
    further  of a loss: from just before the kill until a step is done that no step before the kill
             had reached, work that is done again included; and how many steps that were

    python benchmarks/recovery.py                     # all systems, about a quarter of an hour
    # fewer repetitions, without torchrun's default settings
    python benchmarks/recovery.py --quick
    python benchmarks/recovery.py --systems harness --kinds node first --rounds 5
    # steps of half a second, and snapshots every 60 s
    python benchmarks/recovery.py --kinds node --step-s 0.5 --snapshot-s 60 --calm-s 40
    # a script that needs five seconds before its loop
    python benchmarks/recovery.py --kinds worker node --start-s 5

Systems: `harness`; `harness-fork` (HARNESS_STAY=0: its processes end with their world, and others
are forked); `torchrun-best` (last call 1 s, keep-alive 3 x 1 s,
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1); `torchrun` (its defaults); `bucket` (torchrun with our
rendezvous, --rdzv-backend=bucket); `torchft` (if it is installed: gloo, a replica for each process,
all gradients in one `Manager.allreduce`, a lighthouse that takes a replica for lost after 0.5 s;
its data is shared out by the replicas that there are, and it has no bucket; no kind `worker`). In
every round each system does each kind once, so that what else the machine does falls on all alike.
A time counts from just before the kill to the end of the first optimizer step of any new worker.
`never` means that the survivors ended, or that there was no step within --limit-s. Nothing is
excluded. The table at the end says where the harness's time goes, from its workers' own marks and
its agents' facts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    Samples = list[tuple[torch.Tensor, torch.Tensor]]

ROOT = Path(__file__).resolve().parent.parent
TORCHFT = "torchft"
SYSTEMS = ("harness", "harness-fork", "torchrun-best", "torchrun", "bucket", TORCHFT)
KINDS = ("worker", "node", "first", "join")  # what can be asked for
FURTHER = "{} further"
SHOWN = (*KINDS, "pause", *map(FURTHER.format, KINDS[:3]))
BEFORE_S = 120.0  # for a system to train at all
EVERY = 20  # steps between snapshots, unless --snapshot-s says how many seconds
GLOBAL_BATCH, MICRO_BATCH, LENGTH = 8, 2, 64


# ---- the training, in each system's own words ----------------------------------------------------
def say(what: str, step: int, world: int, epoch: int = 0) -> None:
    """A line in our own log: time, what, step, world, rank, and the number of the world if one
    process passes through several."""
    line = [time.time(), what, step, world, int(os.environ["RANK"]), epoch]
    with open(Path(os.environ["BENCH_LOG"]) / f"{os.getpid()}.log", "a") as f:
        f.write(json.dumps(line) + "\n")


def train(system: str) -> None:
    say("script", 0, 0)
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, SIZES
    from torch.nn import functional as F

    time.sleep(float(os.environ["BENCH_START_S"]))  # the model is built, and compiled
    torch.manual_seed(0)
    data = [torch.randint(256, (LENGTH + 1,)) for _ in range(1024)]
    dataset = [(row[:-1], row[1:]) for row in data]
    model = GPT(SIZES["1m"], LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_s, every_s = (float(os.environ[name]) for name in ("BENCH_STEP_S", "BENCH_SNAPSHOT_S"))
    begun_s = saved_s = time.monotonic()

    def fill() -> None:
        """Wait until this step has taken as long as it should."""
        nonlocal begun_s
        time.sleep(max(0.0, begun_s + step_s - time.monotonic()))
        begun_s = time.monotonic()

    if system == "harness":
        import harness

        often = {"snapshot_every_s": every_s} if every_s else {"snapshot_every_steps": EVERY}
        run = harness.attach(**often)
        say("attached", 0, run.world, run.epoch)
        run.prepare(model, optimizer)
        say("prepared", run.step, run.world, run.epoch)
        for step in run.steps(
            dataset, total=1_000_000, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        ):
            for x, y in step:
                step.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
            fill()
            step.update()
            if step.updated:
                say("step", step.number, run.world, run.epoch)
        return

    if system == TORCHFT:
        train_torchft(model, optimizer, dataset, fill)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    say("attached", 0, world)
    ddp, folder, begun = DistributedDataParallel(model), Path(os.environ["BENCH_CHECKPOINTS"]), [0]
    if rank == 0:
        begun = [max((int(p.parent.name) for p in folder.glob("*/.metadata")), default=0)]
    dist.broadcast_object_list(begun)
    if begun[0]:
        weights, moments = get_state_dict(ddp, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=str(folder / str(begun[0])))
        set_state_dict(
            ddp, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    say("prepared", begun[0], world)
    for step in range(begun[0] + 1, 1_000_000):
        for x, y, last in micro_batches(dataset, step, rank, world):
            with contextlib.nullcontext() if last else ddp.no_sync():
                F.cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()
        fill()
        optimizer.step()
        optimizer.zero_grad()
        say("step", step, world)
        due = [time.monotonic() - saved_s >= every_s if every_s else step % EVERY == 0]
        if every_s:
            dist.broadcast_object_list(due)
        if due[0]:
            saved_s = time.monotonic()
            weights, moments = get_state_dict(ddp, optimizer)
            dcp.save(
                {"model": weights, "optimizer": moments}, checkpoint_id=str(folder / str(step))
            )


def micro_batches(
    dataset: Samples, step: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """A rank's micro-batches of a step, and whether each is its last one."""
    import torch

    for i in range(rank, GLOBAL_BATCH // MICRO_BATCH, world):
        first = step * GLOBAL_BATCH + i * MICRO_BATCH
        rows = [dataset[(first + j) % len(dataset)] for j in range(MICRO_BATCH)]
        x, y = (torch.stack(t) for t in zip(*rows, strict=True))
        yield x, y, i + world >= GLOBAL_BATCH // MICRO_BATCH


def train_torchft(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Samples,
    fill: Callable[[], None],
) -> NoReturn:
    """Train as a replica of torchft's, as its manager's documentation has it."""
    import torch
    from torch.nn import functional as F
    from torch.nn.utils import parameters_to_vector
    from torchft import Manager, Optimizer, ProcessGroupGloo

    parts = {"model": model, "optimizer": optimizer}

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    bound = timedelta(seconds=5)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=bound),
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        timeout=bound,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["BENCH_LIGHTHOUSE"],
        replica_id=f"replica-{os.getpid()}",
        hostname="127.0.0.1",
    )
    managed, before, epoch = Optimizer(manager, optimizer), 0, 0
    say("attached", 0, 1)
    while True:
        managed.zero_grad()  # and it begins to agree on who is there
        manager.wait_quorum()
        world, rank = manager.num_participants(), manager.participating_rank() or 0
        before, epoch = world, epoch + (world != before)
        step = manager.current_step() + 1
        for x, y, _ in micro_batches(dataset, step, rank, world):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = parameters_to_vector(grads)
        manager.allreduce(flat).wait()
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
        fill()
        if manager.should_commit():
            optimizer.step()
            say("step", step, world, epoch)


def lighthouse(bind: str) -> NoReturn:
    """Serve torchft's replicas, which ask it who is there."""
    from torchft.coordination import LighthouseServer

    _kept = LighthouseServer(
        bind, min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=500
    )
    while True:
        time.sleep(3600.0)


# ---- what trains it ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    t: float
    what: str
    step: int
    world: int
    rank: int
    epoch: int  # of a process that passes through several worlds; else 0
    pid: int

    @property
    def life(self) -> tuple[int, int]:
        """What is another one after each loss."""
        return self.pid, self.epoch


@dataclass(frozen=True)
class Pace:
    """Seconds of calm training, of a step, between snapshots, and before the script's loop."""

    calm_s: float
    step_s: float
    snapshot_s: float
    start_s: float


@dataclass
class System:
    name: str
    folder: Path
    nproc: int
    pace: Pace
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    number: int = 0
    port: int = 0
    lighthouse: subprocess.Popen[bytes] | None = None  # torchft's, which no loss takes

    def __post_init__(self) -> None:
        for name in ("log", "checkpoints"):
            (self.folder / name).mkdir(parents=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("harness")

    def start(self) -> None:
        self.number += 1
        if self.name == TORCHFT and self.lighthouse is None:
            words = [sys.executable, str(Path(__file__).resolve())]
            words += ["--lighthouse", f"127.0.0.1:{self.port}"]
            with open(self.folder / "node0.log", "wb") as log:
                self.lighthouse = subprocess.Popen(words, stdout=log, stderr=log)
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "AWS_", "TORCH"))
        }
        env |= {
            "BENCH_LOG": str(self.folder / "log"),
            "BENCH_CHECKPOINTS": str(self.folder / "checkpoints"),
            "BENCH_STEP_S": str(self.pace.step_s),
            "BENCH_SNAPSHOT_S": str(self.pace.snapshot_s),
            "BENCH_START_S": str(self.pace.start_s),
            "PYTHONPATH": str(ROOT),
        }
        env |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HARNESS_NODE_DIR": str(self.folder / f"node{self.number}"),
            "HARNESS_STAY": "0" if self.name == "harness-fork" else "1",
        }
        trains = "harness" if self.is_ours else TORCHFT if self.name == TORCHFT else "torchrun"
        script = [str(Path(__file__).resolve()), "--train", trains]
        if self.is_ours:
            words = [
                "-m",
                "harness.cli",
                "run",
                "--run",
                str(self.folder / "run"),
                "--nproc",
                str(self.nproc),
                "--set",
                "gpu_health=off",
                "--",
            ]
        elif self.name == TORCHFT:
            words = []
            env |= {"RANK": "0", "BENCH_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        else:
            words = [
                "-m",
                "torch.distributed.run",
                "--nnodes=1:2",
                f"--nproc-per-node={self.nproc}",
                "--max-restarts=1000",
                "--rdzv-id=x",
            ]
            if self.name == "bucket":
                words += [
                    "--rdzv-backend=bucket",
                    f"--rdzv-endpoint=file://{self.folder / 'bucket'}",
                ]
            else:
                words += [
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=127.0.0.1:{self.port}",
                    "--local-addr=127.0.0.1",
                ]
            if self.name == "torchrun-best":
                env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
                words += [
                    "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
                ]
        with open(self.folder / f"node{self.number}.log", "wb") as log:
            self.nodes.append(
                subprocess.Popen(
                    [sys.executable, *words, *script],
                    env=env,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )

    def lines(self) -> list[Line]:
        found = []
        for path in (self.folder / "log").glob("*.log"):
            for text in path.read_text().splitlines(keepends=True):
                if text.endswith("\n"):
                    found.append(Line(*json.loads(text), pid=int(path.stem)))
        return sorted(found, key=lambda ln: ln.t)

    def wait(
        self,
        world: int,
        lives: set[tuple[int, int]],
        limit_s: float,
        since: float,
        beyond: int = 0,
    ) -> Line | None:
        """The first step of `world` ranks behind step `beyond` in a life that is not one of
        `lives`; None: there will be none."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for line in self.lines():
                if (
                    line.what == "step"
                    and line.world == world
                    and line.life not in lives
                    and line.t > since
                    and line.step > beyond
                ):
                    return line
            if all(node.poll() is not None for node in self.nodes):
                return None
            time.sleep(0.05)
        return None

    def kill(self, which: int) -> None:
        """A node and everything on it."""
        import psutil

        node = self.nodes.pop(which)
        tree = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for p in tree:
            with contextlib.suppress(psutil.Error):
                p.kill()
        node.wait()

    def close(self) -> None:
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()
        while self.nodes:
            if self.nodes[0].poll() is None:
                self.kill(0)
            else:
                self.nodes.pop(0)


@contextlib.contextmanager
def system(name: str, folder: Path, nproc: int, pace: Pace) -> Iterator[System]:
    made = System(name, folder, nproc, pace)
    try:
        yield made
    finally:
        made.close()


def fail(s: System, why: str) -> None:
    logs = "\n".join(
        f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}"
        for p in sorted(s.folder.glob("node*.log"))
    )
    raise SystemExit(f"{s.name}: {why}\n{logs}")


# ---- samples -------------------------------------------------------------------------------------
@dataclass
class Sample:
    system: str
    kind: str
    seconds: float | None  # None: never
    parts: dict[str, float] = field(default_factory=dict)


def settle(s: System, world: int) -> set[tuple[int, int]]:
    """Wait until `world` ranks train, and a while longer. The lives that there ever were."""
    if s.wait(world, set(), BEFORE_S, 0.0) is None:
        fail(s, f"it never trained with {world} ranks")
    time.sleep(s.pace.calm_s)
    return {ln.life for ln in s.lines()}


def lose(s: System, kind: str, world: int, limit_s: float) -> list[Sample]:
    """The loss, and how long it takes until the training is further than it was."""
    lives = settle(s, s.nproc * len(s.nodes))
    if kind == "worker":
        newest = [ln for ln in s.lines() if ln.what == "step"][-s.nproc :]
        victim = max(newest, key=lambda ln: ln.rank).pid
        t0 = time.time()
        os.kill(victim, 9)
    else:
        t0 = time.time()
        s.kill(0 if kind == "first" else -1)
    line = s.wait(world, lives, limit_s, t0)
    if line is None:
        return [Sample(s.name, FURTHER.format(kind), None), Sample(s.name, kind, None)]
    before = max(ln.step for ln in s.lines() if ln.what == "step" and ln.t < t0)
    further = s.wait(world, lives, limit_s, t0, before)
    again = {"steps done again": before + 1.0 - line.step}
    return [
        Sample(s.name, FURTHER.format(kind), further.t - t0 if further else None, again),
        Sample(s.name, kind, line.t - t0, parts(s, t0, line)),
    ]


def join(s: System, limit_s: float) -> list[Sample]:
    """The join, and the pause that it is to those who train."""
    settle(s, s.nproc)
    t0 = time.time()
    s.start()
    line = s.wait(2 * s.nproc, set(), limit_s, t0)
    if line is None:
        return [Sample(s.name, "pause", None), Sample(s.name, "join", None)]
    last = [ln for ln in s.lines() if ln.what == "step" and ln.world == s.nproc and ln.t < line.t][
        -1
    ]
    again = {"steps done again": last.step + 1.0 - line.step}
    return [
        Sample(s.name, "pause", line.t - last.t, again),
        Sample(s.name, "join", line.t - t0, parts(s, t0, line)),
    ]


def parts(s: System, t0: float, line: Line) -> dict[str, float]:
    """Where the time went until `line`, by marks of the process that wrote it and the agents'
    facts. Seconds each."""
    found, last = {}, t0
    if s.is_ours:
        from harness.bucket.archive import read_facts
        from harness.core.facts import EpochLeft, EpochStarted
        from storage.stores.store_urls import open_store

        time.sleep(2.5)  # facts are written every second
        facts = [f for f in read_facts(open_store(str(s.folder / "run"))) if f.t > t0]
        for name, kind in (
            ("noticed, workers ended", EpochLeft),
            ("next epoch agreed", EpochStarted),
        ):
            times = [f.t for f in facts if isinstance(f.fact, kind)]
            if times:
                end = (
                    max(t for t in times if t < line.t) if any(t < line.t for t in times) else last
                )
                found[name], last = end - last, end
    lives = (line.life, (line.pid, 0))
    mine = [ln for ln in s.lines() if ln.life in lives and ln.t > t0]
    marks = {ln.what: ln.t for ln in reversed(mine)}
    for name, what in (
        ("worker began", "script"),
        ("process group", "attached"),
        ("restored", "prepared"),
        ("first step", "step"),
    ):
        if what in marks:  # one that goes on in its process has a step only
            found[name], last = marks[what] - last, marks[what]
    return found


def play(
    name: str, kinds: list[str], folder: Path, limit_s: float, pace: Pace
) -> list[Sample]:
    """Each kind once."""
    samples = []
    if "worker" in kinds and name != TORCHFT:
        with system(name, folder / "one", 2, pace) as s:
            s.start()
            samples += lose(s, "worker", 2, limit_s)
    if {"node", "first", "join"} & set(kinds):
        with system(name, folder / "two", 1, pace) as s:
            s.start()
            samples += join(s, limit_s)
            if samples[-1].seconds is None:
                return samples
            if "node" in kinds:
                samples += lose(s, "node", 1, limit_s)
            if "first" in kinds and samples[-1].seconds is not None:
                if "node" in kinds:
                    samples += join(s, limit_s)
                samples += lose(s, "first", 1, limit_s)
    return samples


def show(samples: list[Sample]) -> None:
    def median(name: str, kind: str) -> float | None:
        good = [
            x.seconds
            for x in samples
            if (x.system, x.kind) == (name, kind) and x.seconds is not None
        ]
        return statistics.median(good) if good else None

    print(
        f"\n{'':16}{'':10}{'n':>4}{'never':>7}{'median s':>10}{'min':>8}{'p95':>8}{'x harness':>11}"
    )
    for kind in SHOWN:
        for name in SYSTEMS:
            times = [x.seconds for x in samples if (x.system, x.kind) == (name, kind)]
            if not times:
                continue
            good, ours = sorted(t for t in times if t is not None), median("harness", kind)
            words = f"{name:16}{kind:10}{len(times):4d}{len(times) - len(good):7d}"
            if good:
                p95 = good[min(len(good) - 1, round(0.95 * (len(good) - 1)))]
                middle = statistics.median(good)
                words += (
                    f"{middle:10.2f}{good[0]:8.2f}{p95:8.2f}{middle / ours if ours else 0:11.1f}"
                )
            print(words)
    for name in SYSTEMS:
        for kind in SHOWN:
            mine = [x for x in samples if x.system == name and x.kind == kind and x.parts]
            if mine:
                keys = list(dict.fromkeys(k for x in mine for k in x.parts))
                each = {k: statistics.median(x.parts.get(k, 0.0) for x in mine) for k in keys}
                print(
                    f"where it goes, {name} {kind}: "
                    + ", ".join(f"{k} {v:.2f}" for k, v in each.items())
                )


WITHIN_S = 0.2  # of a loss a survivor should be further than it was, and one step


def judge(samples: list[Sample], step_s: float) -> None:
    """Print whether the targets of a loss are met."""
    ours = [x for x in samples if x.system == "harness" and x.kind.endswith("further")]
    for kind in dict.fromkeys(x.kind for x in ours):
        mine = [x for x in ours if x.kind == kind]
        times = [x.seconds for x in mine if x.seconds is not None]
        again = [x.parts.get("steps done again", 0.0) for x in mine]
        fast = len(times) == len(mine) and statistics.median(times) <= WITHIN_S + step_s
        few = len(times) == len(mine) and max(again) <= 1
        print(
            f"target {kind}: within {WITHIN_S} s and one step: {'yes' if fast else 'NO'}; "
            f"at most one step done again: {'yes' if few else 'NO'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", default="", help=argparse.SUPPRESS)
    there = [s for s in SYSTEMS if s != TORCHFT or importlib.util.find_spec(TORCHFT)]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=there)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit-s", type=float, default=90.0, help="longest wait for a step after a loss"
    )
    parser.add_argument("--calm-s", type=float, default=8.0, help="training before each loss")
    parser.add_argument("--step-s", type=float, default=0.0, help="the least time of a step")
    parser.add_argument("--snapshot-s", type=float, default=0.0, help=f"0: every {EVERY} steps")
    parser.add_argument("--start-s", type=float, default=0.0, help="of the script before its loop")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="", help="write all samples here, as JSON")
    flags = parser.parse_args()
    if flags.lighthouse:
        lighthouse(flags.lighthouse)
    if flags.train:
        train(flags.train)
        return
    rounds = 1 if flags.quick else flags.rounds
    systems = [s for s in flags.systems if not (flags.quick and s in ("torchrun", "bucket"))]
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        for i in range(rounds):
            for name in systems:
                if name == "torchrun" and i:  # its times are those of its time-outs: once is enough
                    continue
                pace = Pace(flags.calm_s, flags.step_s, flags.snapshot_s, flags.start_s)
                folder_of = Path(folder) / f"{i}-{name}"
                new = play(name, flags.kinds, folder_of, flags.limit_s, pace)
                samples += new
                words = [
                    f"{x.kind} never" if x.seconds is None else f"{x.kind} {x.seconds:.2f} s"
                    for x in new
                ]
                print(f"round {i + 1} {name}: " + ", ".join(words), flush=True)
                if flags.out:
                    Path(flags.out).write_text(json.dumps([vars(x) for x in samples]))
    show(samples)
    judge(samples, flags.step_s)


if __name__ == "__main__":
    main()
