"""`harness prove drill`: every fault in every phase, with real processes, until the run has
finished unaided with the very same weights.

A cell of the matrix is one tiny exact training (`exercise.py`) on two nodes. Its processes are held
at the phase (`process_faults.py`), the fault happens, and they are released. After that the drill
does nothing, except that it launches a node by the same command when none is left. A cell passes if
the run ends; `harness prove verify` proves it; the weights' hash is the calm run's; no process is
left; and the fault's alerts reached a webhook, each once. As root on Linux every node has its own
network namespace, and a cut takes its link down; elsewhere those cells are skipped. Full
disks are mounted, as root. Knows processes, signals, links and disks; reads the bucket only to
judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.world import DRAINED, BadInput
from harness.local.local_run import (
    ANYBODY,
    EVERY,
    PHASES,
    REACH_S,
    STEPS,
    THAW_S,
    Bridge,
    LocalRun,
    NotReached,
    can_isolate,
    can_mount,
    fill,
    ip,
    kept_folder,
    send_signal,
    train,
    wait_until,
)
from harness.look.alerts.alert_evaluator import Alerting
from harness.look.alerts.alert_sinks import sink_of
from harness.look.audit.audit import audit
from storage.errors import StoreError
from storage.http_server import BoundedHandler, BoundedHTTPServer
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

if TYPE_CHECKING:
    from harness.local.local_run import Drilled

# The faults, one function each.

CUT_S = 7.0  # longer than hang_after_s, so that it is noticed
HANG_S = 8.0  # longer than the store's bound on one call, and than dead_s
OUTAGE_S = 3.0
# longer than dead_s: the tiny run must not end before the loss is noticed
STAND_S = {"agent-stop": 3.0, "node-stop": 3.0}


# ---- faults --------------------------------------------------------------------------------------
def _worker(s: LocalRun) -> list[psutil.Process]:
    at_phase = [p for p in s.node.workers() if p.pid == s.reached]
    return at_phase or s.node.workers()[:1]


def _thaw(s: LocalRun, processes: list[psutil.Process]) -> None:
    s.after(THAW_S, lambda: send_signal(processes, signal.SIGCONT))


def worker_kill(s: LocalRun) -> None:
    send_signal(_worker(s), signal.SIGKILL)


def worker_stop(s: LocalRun) -> None:
    """Stop a worker for good; the hang must be detected."""
    send_signal(_worker(s), signal.SIGSTOP)


def worker_term(s: LocalRun) -> None:
    send_signal(_worker(s), signal.SIGTERM)


def agent_kill(s: LocalRun) -> None:
    send_signal(s.node.processes()[:1], signal.SIGKILL)


def agent_stop(s: LocalRun) -> None:
    stopped = s.node.processes()[:1]
    send_signal(stopped, signal.SIGSTOP)
    _thaw(s, stopped)


def agent_term(s: LocalRun) -> None:
    send_signal(s.node.processes()[:1], signal.SIGTERM)


def node_kill(s: LocalRun) -> None:
    """Kill a whole node, a loss without notice."""
    send_signal(s.node.processes(), signal.SIGKILL)


def node_stop(s: LocalRun) -> None:
    """Pause a whole node for a while."""
    stopped = s.node.processes()
    send_signal(stopped, signal.SIGSTOP)
    _thaw(s, stopped)


def both_killed(s: LocalRun) -> None:
    for node in s.nodes:
        send_signal(node.processes(), signal.SIGKILL)


def cut(s: LocalRun) -> None:
    """Take the link between the nodes down for a while; both still reach the bucket."""
    assert s.net is not None
    link = s.net.link(s.node.number)
    ip("link", "set", link, "down")
    s.after(CUT_S, lambda: ip("link", "set", link, "up"))


def outage(s: LocalRun, nodes: list[Drilled] | None = None) -> None:
    for node in [s.node] if nodes is None else nodes:
        node.order("outage", "")
        s.after(OUTAGE_S, lambda node=node: node.forget("outage"))  # type: ignore[misc]


def outage_everywhere(s: LocalRun) -> None:
    outage(s, s.nodes)


def _of_store(s: LocalRun, name: str, text: str, seconds: float) -> None:
    for node in s.nodes:
        node.order(name, text)
        s.after(seconds, lambda node=node: node.forget(name))  # type: ignore[misc]


def hang(s: LocalRun) -> None:
    """Leave every call to the store without an answer for a while."""
    _of_store(s, "hang", "", HANG_S)


def drip(s: LocalRun) -> None:
    _of_store(s, "drip", "", HANG_S)


def half_an_object(s: LocalRun) -> None:
    """Let every read of an object find its first half for a while."""
    _of_store(s, "damage.json", json.dumps({"how": "half", "prefix": "", "reads": -1}), OUTAGE_S)


def delivered_twice(s: LocalRun) -> None:
    """Let every write arrive twice to the end."""
    for node in s.nodes:
        node.order("twice", "")


def unreachable(s: LocalRun) -> None:
    """Let one node and the others have no way to each other to the end; the node is told so."""
    for address in _others(s):
        ip("-n", _space(s), "route", "add", "unreachable", address)


def one_way(s: LocalRun) -> None:
    """Lose silently what one node sends to the others to the end; what they send arrives."""
    for address in _others(s):
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        ip("-n", _space(s), "neigh", "replace", address, *nobody)


def wall(s: LocalRun) -> None:
    """Lose silently, to the end, what one node and the others send to each other."""
    assert s.net is not None
    ip("link", "set", s.net.link(s.node.number), "nomaster")


def enospc(s: LocalRun) -> None:
    """Fill the disk of one node's scratch folder to the end, and tell its agent to leave, for which
    it writes a mark there."""
    fill(s.node.folder)
    agent_term(s)


def _space(s: LocalRun) -> str:
    assert s.net is not None
    return s.net.space(s.node.number)


def _others(s: LocalRun) -> list[str]:
    assert s.net is not None
    return [s.net.address(n.number) for n in s.nodes if n is not s.node]


def slow_store(s: LocalRun) -> None:
    for node in s.nodes:
        node.order("delay", "0.1")


def clock_forward(s: LocalRun) -> None:
    s.node.order("clock", "3600")


def clock_back(s: LocalRun) -> None:
    s.node.order("clock", "-3600")


def _announce(s: LocalRun, in_s: float) -> None:
    s.node.order(
        "notice", json.dumps({"kind": "kill", "id": "drill", "deadline_s": time.time() + in_s})
    )


def notice(s: LocalRun) -> None:
    """Give a notice in time, then kill the node if it has not left before."""
    _announce(s, 10.0)
    victims = s.node
    s.after(10.0, lambda: send_signal(victims.processes(), signal.SIGKILL))


def late_notice(s: LocalRun) -> None:
    _announce(s, 0.5)
    victims = s.node
    s.after(0.5, lambda: send_signal(victims.processes(), signal.SIGKILL))


def cancelled_notice(s: LocalRun) -> None:
    _announce(s, 20.0)
    node = s.node
    s.after(0.6, lambda: node.forget("notice"))


def notice_without_loss(s: LocalRun) -> None:
    _announce(s, 3.0)


def worker_kill_and_outage(s: LocalRun) -> None:
    worker_kill(s)
    outage_everywhere(s)


def node_kill_and_worker_stop(s: LocalRun) -> None:
    others = [n for n in s.nodes if n is not s.node]
    send_signal(others[0].workers()[:1], signal.SIGSTOP)
    node_kill(s)


NEED_LINKS = ("cut", "unreachable", "one-way", "wall")
NEED_DISK = ("enospc",)
DISK_NBYTES = 16 << 20
SorePoint = Callable[[LocalRun], None]
FAULTS: dict[str, SorePoint] = {
    f.__name__.replace("_", "-"): f
    for f in (
        worker_kill,
        worker_stop,
        worker_term,
        agent_kill,
        agent_stop,
        agent_term,
        node_kill,
        node_stop,
        both_killed,
        cut,
        outage,
        outage_everywhere,
        slow_store,
        hang,
        drip,
        half_an_object,
        delivered_twice,
        unreachable,
        one_way,
        wall,
        enospc,
        clock_forward,
        clock_back,
        notice,
        late_notice,
        cancelled_notice,
        notice_without_loss,
        worker_kill_and_outage,
        node_kill_and_worker_stop,
    )
}


# A receiver of alerts on loopback: real HTTP, with a record of what it received. For tests and
# drills.

MOST_BODY_NBYTES = 1 << 20
AlertBody = dict[str, Any]


@dataclass
class AlertReceiver:
    """A context manager that receives alerts. `url`: its address once entered, with a part that
    looks like a secret. `answers`: statuses of the next requests; 200 after them."""

    url: str = ""
    got: list[AlertBody] = field(default_factory=list)  # bodies that got a status 2xx
    asked: list[dict[str, str]] = field(default_factory=list)  # headers of all requests
    answers: list[int] = field(default_factory=list)

    def rules(self) -> Counter[str]:
        """Return how often each rule's alert was accepted."""
        return Counter(str(body["rule"]) for body in self.got)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Record a request, and return the status to answer with."""
        with self._lock:
            status = self.answers.pop(0) if self.answers else 200
            self.asked.append({**headers, "path": path})
            if status < 300:
                self.got.append(json.loads(body))
        return status

    def __enter__(self) -> AlertReceiver:
        receiver, self._lock = self, threading.Lock()

        class ReceiverHandler(BoundedHandler):
            def do_POST(self) -> None:
                body = self.body(MOST_BODY_NBYTES)
                if body is None:
                    self.send_error(413)
                    return
                status = receiver.take(self.path, dict(self.headers.items()), body)
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = BoundedHTTPServer("127.0.0.1", 0, ReceiverHandler)
        port = self._server.server_port
        self.url = f"http://127.0.0.1:{port}/hook/T0KEN-of-mine?key=S3CRET"
        self._server.serve_in_thread("receiver")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


# The alerts that a drill's fault must fire: each reaches a webhook on loopback once.

LOOK_S = 0.5
JOIN_S = 30.0
MIDDLE = ("step", "staging", "upload", "commit")  # phases in which a world trains
# by fault: the alert that it fires in any phase, and in MIDDLE; A|B means either
ANYWHERE = {
    "agent-term": "notice-seen",
    "enospc": "notice-seen",
    "notice": "notice-seen",
    "cancelled-notice": "notice-seen",
    "notice-without-loss": "notice-seen",
}
TRAINING = {
    "worker-kill": "worker-failed",
    "worker-stop": "worker-hung",
    "agent-kill": "node-lost",
    "agent-stop": "node-lost",
    "node-kill": "node-lost",
    "node-stop": "node-lost",
    "both-killed": "node-lost",
    "cut": "worker-hung|node-lost",  # whichever is noticed first
    "worker-kill-and-outage": "worker-failed",
    "node-kill-and-worker-stop": "node-lost",
}


def expected(fault: str, phase: str) -> list[set[str]]:
    """Return sets of rules; of each set at least one must have fired."""
    found = [ANYWHERE.get(fault, ""), TRAINING.get(fault, "") if phase in MIDDLE else ""]
    return [set(names.split("|")) for names in found if names]


@dataclass
class Listened:
    """The alerts of one cell, while it runs."""

    receiver: AlertReceiver
    alerting: Alerting
    thread: threading.Thread

    def end(self) -> None:
        """Stop, after one more evaluation."""
        self.alerting.stop.set()
        self.thread.join(JOIN_S)

    def judge(self, fault: str, phase: str) -> None:
        """Check the alerts. Raises AssertionError."""
        self.end()
        times = Counter(str(body["key"]) for body in self.receiver.got)
        twice = [b["rule"] for b in self.receiver.got if times[str(b["key"])] > 1]
        if twice:
            raise AssertionError(f"alerts came more than once: {', '.join(twice)}")
        fired = [alert.id for alert in self.alerting.log.read()]
        if Counter(fired) != Counter(str(body["id"]) for body in self.receiver.got):
            raise AssertionError(f"fired: {len(fired)} alerts, received: {len(times)}")
        rules = set(self.receiver.rules())
        for names in expected(fault, phase):
            if not names & rules:
                wanted = " or ".join(sorted(names))
                raise AssertionError(f"wanted the alert {wanted}, found {sorted(rules)}")


@contextmanager
def listening(run: Path) -> Iterator[Listened]:
    """Evaluate a run's alerts while it runs, and send them to a webhook."""
    with AlertReceiver() as receiver:
        alerting = Alerting(open_store(str(run)), [sink_of(receiver.url)], leads=True)
        thread = threading.Thread(target=alerting.run, args=(LOOK_S,), daemon=True)
        thread.start()
        listened = Listened(receiver, alerting, thread)
        try:
            yield listened
        finally:
            listened.end()


FINISH_S = 180.0  # time for the run to end after the fault
END_S = 60.0  # time for the last processes to be gone
RELAUNCHES = 5


# ---- cells ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    fault: str
    phase: str
    outcome: str  # "passed" | "FAILED" | "skipped"
    why: str = ""
    seconds: float = 0.0
    epochs: int = 0
    launches: int = 0
    exit_codes: tuple[int, ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class Ground:
    """The state that all cells share: the hash of an undisturbed run, and a run that was drained
    half-way."""

    folder: Path
    weights: str
    isolated: bool
    keep: bool = False

    @property
    def half(self) -> Path:
        return self.folder / "half"


EXERCISE = "harness.lab.exercise"  # the training of a drill


def armed(folder: Path) -> str:
    """Return the `sitecustomize.py` that makes a node's processes follow the orders in its
    folder."""
    return f"from harness.lab.drills import process_faults\n\nprocess_faults.arm({str(folder)!r})\n"


def prepare(folder: Path, isolated: bool, keep: bool = False) -> Ground:
    """Train undisturbed, once to the end and once to the middle."""
    train(
        EXERCISE, folder / "half", STEPS, EVERY, "--drain-at", str(STEPS // 2 + 3), wanted=DRAINED
    )
    return Ground(folder, train(EXERCISE, folder / "calm", STEPS, EVERY), isolated, keep)


def drill(ground: Ground, fault: str, phase: str, seed: int) -> Result:
    """Play one cell, and return its result. Never raises: an error is the result."""
    t0 = time.monotonic()
    if fault in NEED_LINKS and not ground.isolated:
        return Result(fault, phase, "skipped", "needs root and network namespaces")
    disk_nbytes = DISK_NBYTES if fault in NEED_DISK else 0
    if disk_nbytes and not can_mount():
        return Result(fault, phase, "skipped", "needs root, to mount a small disk")
    folder = ground.folder / f"{fault}-{phase}-{seed}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        net = (
            stack.enter_context(Bridge(f"hd{os.getpid() % 100000}{_unique()}"))
            if ground.isolated
            else None
        )
        rng = random.Random(f"{fault} {phase} {seed}")
        scene = LocalRun(folder, net, rng, EXERCISE, armed, disk_nbytes=disk_nbytes)
        stack.callback(scene.close)
        try:
            outcome, why = "passed", ""
            listened = stack.enter_context(listening(scene.run))
            play(ground, scene, fault, phase)
            judge(ground, scene)
            listened.judge(fault, phase)
        except (
            AssertionError,
            NotReached,
            StoreError,
            OSError,
            subprocess.SubprocessError,
            RuntimeError,
            ValueError,
        ) as e:
            outcome, why = "FAILED", f"{type(e).__name__}: {e}"
        codes = tuple(
            n.process.poll() if n.process.poll() is not None else -999 for n in scene.nodes
        )
        epochs = (
            len(list((scene.run / "rdzv" / "epochs").glob("*.json"))) if scene.run.exists() else 0
        )
    result = Result(
        fault,
        phase,
        outcome,
        "; ".join([why, *scene.notes]).strip("; "),
        time.monotonic() - t0,
        epochs,
        len(scene.nodes),
        tuple(int(c or 0) for c in codes),
        str(folder) if outcome == "FAILED" or ground.keep else "",
    )
    if outcome == "passed" and not ground.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return result


_count = iter(range(1 << 30))


def _unique() -> str:
    return f"{next(_count):x}"[-3:]


def play(ground: Ground, s: LocalRun, fault: str, phase: str) -> None:
    """Start, wait for the phase, cause the fault, and wait for the run to end."""
    if phase == "resume":
        shutil.copytree(ground.half, s.run)
    hold = {"phase": phase, "after_step": {"step": EVERY + 2, "staging": EVERY}.get(phase, 0)}
    chosen = s.rng.randrange(2)
    for i in range(2):
        s.launch(hold if phase in ANYBODY or i == chosen else None)
    wait_until(
        lambda: any((n.folder / "reached").exists() for n in s.nodes),
        REACH_S,
        s,
        NotReached(f"nobody came to the phase {phase!r}"),
    )
    s.victim = next(i for i, n in enumerate(s.nodes) if (n.folder / "reached").exists())
    s.reached = int((s.node.folder / "reached").read_text() or 0)
    time.sleep(s.rng.uniform(0.0, 0.2))
    FAULTS[fault](s)
    time.sleep(STAND_S.get(fault, 0.3))  # the fault takes effect while they are held
    for node in s.nodes:
        node.forget("hold.json")
    relaunched = 0
    deadline_s = time.monotonic() + FINISH_S
    while any(n.process.poll() is None for n in s.nodes) or not s.final():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not finished {FINISH_S:.0f} s after the fault")
        if all(n.process.poll() is not None for n in s.nodes) and not s.final():
            if relaunched == RELAUNCHES:
                raise AssertionError(f"launched again {RELAUNCHES} times, and still not finished")
            relaunched += 1
            s.launch()
        time.sleep(0.1)


def judge(ground: Ground, s: LocalRun) -> None:
    """Check the finished run. Raises AssertionError."""
    store = open_store(str(s.run))
    manifest = Snapshots(store).latest()
    if manifest is None or not Snapshots(store).ended(manifest):
        raise AssertionError("there is no final snapshot")
    if manifest.data["weights"] != ground.weights:
        raise AssertionError(
            f"the weights are {manifest.data['weights']}, the calm run's {ground.weights}"
        )
    found = audit(store)
    if not found.ok:
        raise AssertionError(
            "verify: " + "; ".join(f"{c.name}: {c.detail}" for c in found.checks if not c.ok)
        )
    left = [p.pid for n in s.nodes for p in n.processes()]
    deadline_s = time.monotonic() + END_S
    while left and time.monotonic() < deadline_s:
        time.sleep(0.2)
        left = [p.pid for n in s.nodes for p in n.processes()]
    if left:
        raise AssertionError(f"still running: {left}")


# ---- the command ---------------------------------------------------------------------------------
def cells(only: Iterable[str]) -> list[tuple[str, str]]:
    """Return the cells that match any of `fault:phase` (either side may be empty or *). Raises
    BadInput for unknown names."""
    chosen = []
    for word in only or ("*:*",):
        fault, _, phase = word.partition(":")
        fault, phase = fault or "*", phase or "*"
        if fault not in ("*", *FAULTS) or phase not in ("*", *PHASES):
            raise BadInput(
                f"--only {word}: wanted FAULT:PHASE, of {', '.join(FAULTS)} and "
                f"{', '.join(PHASES)}; * for all"
            )
        chosen += [
            (f, p) for f in FAULTS for p in PHASES if fault in ("*", f) and phase in ("*", p)
        ]
    return list(dict.fromkeys(chosen))


def matrix(ground: Ground, chosen: list[tuple[str, str]], seed: int, jobs: int) -> Iterator[Result]:
    """Yield results in the order of the cells."""
    # the pool's threads outlive their cells: nodes die with the thread that started them
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda cell: drill(ground, cell[0], cell[1], seed), chosen)


def command(
    only: tuple[str, ...],
    seed: int,
    jobs: int,
    as_json: bool,
    keep: str,
    console: Console,
) -> int:
    """Run `harness prove drill`. Return its exit status: 0 if every cell passed or was skipped."""
    chosen = cells(only)
    results: list[Result] = []
    isolated = can_isolate()
    with kept_folder(keep, "harness-drill-") as folder:
        ground = prepare(folder, isolated, bool(keep))
        for r in matrix(ground, chosen, seed, jobs):
            results.append(r)
            if not as_json:
                colour = {"passed": "green", "skipped": "yellow"}.get(r.outcome, "red")
                text = (
                    f" {r.fault}:{r.phase}  {r.seconds:.1f} s, {r.epochs} generations, "
                    f"{r.launches} nodes" + (f"  {r.why}" if r.why else "")
                )
                console.print(Text.assemble((f"{r.outcome:8}", colour), text))
                if r.outcome == "FAILED":
                    console.print(_last_words(Path(r.folder)), markup=False, highlight=False)
    if as_json:
        print(json.dumps([asdict(r) for r in results], indent=2))
    else:
        console.print(table(results))
        for r in results:
            if r.outcome == "FAILED":
                console.print(
                    f"again: harness prove drill --seed {seed} --only {r.fault}:{r.phase} "
                    "--keep FOLDER",
                    highlight=False,
                )
    return 1 if any(r.outcome == "FAILED" for r in results) else 0


def _last_words(folder: Path) -> str:
    return "\n".join(
        f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
        for p in sorted(folder.glob("node*.log"))
    )


def table(results: list[Result]) -> Table:
    """Return the table: faults down, phases across; seconds of those that passed."""
    phases = [p for p in PHASES if any(r.phase == p for r in results)]
    made = Table("fault", *phases)
    for fault in FAULTS:
        of = {r.phase: r for r in results if r.fault == fault}
        if of:
            made.add_row(fault, *(_mark(of[p]) if p in of else "" for p in phases))
    return made


def _mark(r: Result) -> Text:
    return {
        "passed": Text(f"{r.seconds:.0f} s", "green"),
        "skipped": Text("skipped", "yellow"),
    }.get(r.outcome, Text("FAILED", "red"))
