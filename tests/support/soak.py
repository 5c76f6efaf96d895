"""`make soak`: whole runs with kills, pauses and faults of the store, until there were so many.

Each run is led by `harness launch` as a user would start it, on two nodes. Faults hit one seat
after the other: worker, agent, uploader, whole node, controller, provider, the bucket. Then the run
is stopped. It has passed if `harness prove verify --key` finds nothing, the weights are to the bit those
of a calm run of as many steps, no process is left, and no seat has grown: memory, open files and
threads of every process that lived long enough to tell.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.bucket.layout import STOP_KEY, StopOrder
from harness.bucket.orders import ask_to_stop
from harness.core.formatting import plural
from harness.core.signing import VARIABLE, key_of
from harness.local.local_run import (
    AGENT,
    Bridge,
    can_isolate,
    can_mount,
    fill,
    ip,
    kept_folder,
    mount,
    plain_environment,
    send_signal,
    train,
    unmount,
)
from harness.look.audit.audit import audit
from harness.look.audit.audit_signatures import with_signatures
from harness.rendezvous.rendezvous import READS
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

FAILED = 1  # how `harness launch` ends that has launched nothing
LEFT = 4  # ... that cannot lead on, and leaves the nodes training
GET_ON_S = 240.0  # for a run to commit something new after a fault
END_S = 120.0  # for a run to stop, and for its last processes to be gone
TELL_LIFE_S = 60.0  # shorter lives tell nothing about growth
SAMPLE_S = 1.0
DISK_NBYTES = 64 << 20
MARK = "SOAKED_RUN"  # in the environment of every process of a run; not HARNESS_*, which nodes lose

TASK = """\
name: soak
workdir: {folder}
resources: {{use_spot: true, job_recovery: {{recover_on_exit_codes: [33, 37]}}}}
envs: {{RUN: null}}
run: |
  agent() {{ exec "$@" {python} -m harness.cli run --run "$RUN" {agent} $where -- \\
    -m harness.lab.exercise --total 1000000 --every 5; }}
  {places}
  agent env
"""
PLACES = 6  # network namespaces: more than there are nodes, since some of them are ending
# The agent that is in a place holds its lock. The provider's metadata service is not reached there.
PLACE = """\
exec 9>{lock}; if flock -n 9; then export GLOO_SOCKET_IFNAME=eth0 AWS_EC2_METADATA_DISABLED=true
    where="--set addr={address}"; agent {inside}; fi
"""
# how a node and the others lose each other, and find each other again: words of `ip`, with "{}" for
# an address of another node
NOBODY = "lladdr 02:00:00:00:00:01 nud permanent"
APART = {
    "unreachable": ("route add unreachable {}", "route del unreachable {}"),
    "one-way": ("neigh replace {} dev eth0 " + NOBODY, "neigh del {} dev eth0"),
}


# ---- what a process may grow by ------------------------------------------------------------------
@dataclass(frozen=True)
class SeatUse:
    """What a process held at one moment."""

    at_s: float
    rss_nbytes: int
    open_files: int
    threads: int


@dataclass
class Lives:
    """What the processes of each seat held, over their lives."""

    of: dict[tuple[str, int, float], list[SeatUse]] = field(default_factory=dict)

    def sample(self, seat: str, p: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error), p.oneshot():
            life = self.of.setdefault((seat, p.pid, p.create_time()), [])
            now_s = time.monotonic()
            if not life or now_s - life[-1].at_s >= SAMPLE_S:
                life.append(SeatUse(now_s, p.memory_info().rss, p.num_fds(), p.num_threads()))

    def growth(self) -> list[SeatGrowth]:
        """The longest life of each seat, and any that has grown."""
        by_seat: dict[str, list[SeatGrowth]] = {}
        for (seat, _, _), life in self.of.items():
            # of some nothing is known: they were gone before they could be looked at
            if life and life[-1].at_s - life[0].at_s >= TELL_LIFE_S:
                by_seat.setdefault(seat, []).append(SeatGrowth.of(seat, life))
        return [
            one
            for seat in sorted(by_seat)
            for one in (
                [g for g in by_seat[seat] if g.too_much]
                or [max(by_seat[seat], key=lambda g: g.life_s)]
            )
        ]


@dataclass(frozen=True)
class SeatGrowth:
    """A process in the second quarter of its life, when it had everything, and in the last."""

    seat: str
    life_s: float
    before: SeatUse
    after: SeatUse

    @classmethod
    def of(cls, seat: str, life: Sequence[SeatUse]) -> SeatGrowth:
        start_s, life_s = life[0].at_s, life[-1].at_s - life[0].at_s

        def usual(low: float, high: float) -> SeatUse:
            part = [u for u in life if low <= (u.at_s - start_s) / life_s <= high] or [life[-1]]
            return SeatUse(
                part[-1].at_s,
                int(median(u.rss_nbytes for u in part)),
                int(median(u.open_files for u in part)),
                int(median(u.threads for u in part)),
            )

        return cls(seat, life_s, usual(0.25, 0.5), usual(0.75, 1.0))

    @property
    def too_much(self) -> bool:
        """A leak of one thing per fault would be far beyond this. An agent's pool of readers grows
        with the number of members that there ever were, up to `READS` threads."""
        a, b = self.before, self.after
        return (
            b.rss_nbytes > max(1.15 * a.rss_nbytes, a.rss_nbytes + (24 << 20))
            or b.open_files > a.open_files + 8
            or b.threads > a.threads + READS
        )


def grown(found: Sequence[SeatGrowth]) -> Table:
    """As a table: second quarter of a life -> last quarter."""
    made = Table("seat", "longest life", "memory, MiB", "open files", "threads", box=None)
    made.title = (
        "" if found else f"no process lived for {TELL_LIFE_S:.0f} s: nothing is said of growth"
    )
    for g in found:
        a, b = g.before, g.after
        made.add_row(
            g.seat,
            f"{g.life_s:.0f} s",
            f"{a.rss_nbytes >> 20} -> {b.rss_nbytes >> 20}",
            f"{a.open_files} -> {b.open_files}",
            f"{a.threads} -> {b.threads}",
            style="red" if g.too_much else "",
        )
    return made


# ---- a run ---------------------------------------------------------------------------------------
class SoakedRun:
    """One run, its controller, and everything that it has started."""

    def __init__(self, folder: Path, rng: random.Random):
        folder.mkdir(parents=True)
        self.folder, self.rng, self.run = folder, rng, folder / "run"
        self.orders = folder / "orders"
        self.orders.mkdir()
        (self.orders / "sitecustomize.py").write_text(
            f"from harness.lab.drills import process_faults as sabotage\n\nsabotage.arm({str(self.orders)!r})\n"
        )
        self.net = Bridge(f"hs{os.getpid() % 100000}") if can_isolate() else None
        self.task = folder / "task.yaml"
        self.task.write_text(
            TASK.format(
                folder=folder,
                python=sys.executable,
                agent=" ".join(AGENT),
                places="\n  ".join(self._places()).replace("\n    ", "\n      "),
            )
        )
        self.disk = self._small_disk()
        self.launches, self.spared = 0, 0  # spared: an agent that nobody kills, to grow old
        self.key = f"hsk_{rng.randbytes(32).hex()}"
        self.controller = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        self.launches += 1
        above = str(Path(__file__).parent.parent.parent)
        env = plain_environment()
        path = os.pathsep.join([str(self.orders), above, env.get("PYTHONPATH", "")])
        command = ["launch", str(self.task), "--run", str(self.run), "--nodes", "2:2", "--brief"]
        with open(self.folder / f"launch{self.launches}.log", "wb") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", *command, "--market", "calm"],
                env=env | {"PYTHONPATH": path, MARK: str(self.folder), VARIABLE: self.key},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.controller

    def _places(self) -> Iterator[str]:
        """Make the nodes' networks, and yield the shell's words for each."""
        if self.net is not None:
            self.net.__enter__()
            for n in range(1, PLACES + 1):
                inside, address = self.net.add()
                yield PLACE.format(
                    lock=self.folder / f"place{n}", address=address, inside=" ".join(inside)
                )

    def _small_disk(self) -> Path | None:
        """Give the nodes a disk of their own, which can be filled up; only root can."""
        folder = self.run / "local-cloud" / "nodes"
        folder.mkdir(parents=True)
        if not can_mount():
            return None
        mount(folder, DISK_NBYTES)
        return folder

    def began_in_silence(self, ended: int) -> bool:
        """Did the controller end because the store was silent when it began?"""
        said = (self.folder / f"launch{self.launches}.log").read_text(errors="replace").rstrip()
        silent = said.endswith("(drill)") or re.search(r"no answer within [\d.]+ s$", said)
        return ended == FAILED and said.count("\n") == 0 and bool(silent)

    def seats(self) -> dict[str, list[psutil.Process]]:
        """Every living process of the run, by seat; agents oldest first."""
        found: dict[str, list[psutil.Process]] = {}
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mark = p.environ().get(MARK) == str(self.folder)
                if mark and p.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(_seat(p), []).append(p)
        for processes in found.values():
            processes.sort(key=lambda p: (p.create_time(), p.pid))
        return found

    def step(self) -> int:
        """The newest committed one; 0: none."""
        return max((r.step for r in Snapshots(open_store(str(self.run))).refs()), default=0)

    def close(self) -> None:
        """Kill what is left."""
        for _ in range(20):
            left = [p for processes in self.seats().values() for p in processes]
            if not left:
                break
            send_signal(left, signal.SIGKILL)
            time.sleep(0.1)
        self.controller.wait(20)
        if self.disk is not None:
            unmount(self.disk)
        if self.net is not None:
            self.net.__exit__()


def _seat(p: psutil.Process) -> str:
    line = p.cmdline()
    if p.name().startswith("rank-"):
        return "worker"
    for word, seat in (
        ("harness.local.provider", "provider"),
        ("harness.node.forkserver", "nursery"),
        ("harness.uploader", "uploader"),
    ):
        if any(word in part for part in line):
            return seat
    if "harness.cli" in line:
        return "controller" if "launch" in line else "agent"
    return "other"


# ---- faults --------------------------------------------------------------------------------------
def _hit(s: SoakedRun, seat: str, pause: bool, whole_node: bool = False) -> bool:
    """Kill, or pause for a while, one process of a seat, with all below it if `whole_node`. False:
    there is none that may be hit."""
    victims = [p for p in s.seats().get(seat, ()) if pause or p.pid != s.spared]
    if not victims:
        return False
    victim = s.rng.choice(victims)
    hit = [victim]
    if whole_node:
        with contextlib.suppress(psutil.Error):
            hit += victim.children(recursive=True)
    if not pause:
        send_signal(hit, signal.SIGKILL)
        return True
    send_signal(hit, signal.SIGSTOP)
    try:
        time.sleep(s.rng.uniform(0.2, 4.0))  # past dead_s now and then
    finally:
        send_signal(hit, signal.SIGCONT)
    return True


def _order(s: SoakedRun, name: str, text: str, most_s: float) -> bool:
    """The bucket misbehaves for every process of the run, for a while."""
    path = s.orders / name
    path.write_text(text)
    try:
        time.sleep(s.rng.uniform(0.3, most_s))
    finally:
        path.unlink()
    return True


def _full(s: SoakedRun) -> bool:
    """The nodes' disk is full for a while: their scratch folders, and their logs."""
    if s.disk is None:
        return False
    filler = s.disk / "filler"
    try:
        fill(s.disk)
        time.sleep(s.rng.uniform(0.3, 4.0))
    finally:
        filler.unlink()
    return True


def _apart(s: SoakedRun, how: str) -> bool:
    """The ways between one node and all others are gone for a while; all reach the bucket."""
    agents = s.seats().get("agent", ())
    if s.net is None or not agents:
        return False
    place = re.search(r"addr=[\d.]*\.(\d+)", " ".join(s.rng.choice(agents).cmdline()))
    assert place is not None
    number, link = int(place[1]), s.net.link(int(place[1]))
    others = [s.net.address(n) for n in range(1, PLACES + 1) if n != number]

    def order(which: int) -> None:
        if how == "wall":
            ip("link", "set", link, *(("nomaster",), ("master", f"{s.net.name}b"))[which])
        for address in others if how in APART else ():
            ip("-n", s.net.space(number), *APART[how][which].format(address).split())

    order(0)
    try:
        time.sleep(s.rng.uniform(1.0, 10.0))  # past hang_after_s now and then
    finally:
        order(1)
    return True


FLIP = '{"how": "flip", "prefix": "snapshots/parts/", "reads": -1}'
GONE = '{"how": "gone", "prefix": "snapshots/", "reads": -1}'
HALF = '{"how": "half", "prefix": "", "reads": -1}'
# fault -> how often, and what is done
Kinds = dict[str, tuple[int, Callable[[SoakedRun], bool]]]
SOAK_FAULTS: Kinds = {
    "worker killed": (30, lambda s: _hit(s, "worker", pause=False)),
    "worker paused": (8, lambda s: _hit(s, "worker", pause=True)),
    "uploader killed": (6, lambda s: _hit(s, "uploader", pause=False)),
    "uploader paused": (3, lambda s: _hit(s, "uploader", pause=True)),
    "agent killed": (6, lambda s: _hit(s, "agent", pause=False)),
    "agent paused": (6, lambda s: _hit(s, "agent", pause=True)),
    "node killed": (5, lambda s: _hit(s, "agent", pause=False, whole_node=True)),
    "node paused": (4, lambda s: _hit(s, "agent", pause=True, whole_node=True)),
    "controller killed": (1, lambda s: _hit(s, "controller", pause=False)),
    "controller paused": (4, lambda s: _hit(s, "controller", pause=True)),
    "provider paused": (2, lambda s: _hit(s, "provider", pause=True)),
    "store silent": (5, lambda s: _order(s, "outage", "", 3.0)),
    "store slow": (3, lambda s: _order(s, "delay", "0.1", 3.0)),
    "reads damaged": (3, lambda s: _order(s, "damage.json", FLIP, 1.5)),
    "objects not found": (3, lambda s: _order(s, "damage.json", GONE, 1.0)),
    "half an object": (4, lambda s: _order(s, "damage.json", HALF, 1.5)),
    "store hangs": (4, lambda s: _order(s, "hang", "", 8.0)),
    "store drips": (4, lambda s: _order(s, "drip", "", 8.0)),
    "writes delivered twice": (4, lambda s: _order(s, "twice", "", 4.0)),
    "nodes' disk full": (4, _full),
    "node unreachable": (3, lambda s: _apart(s, "unreachable")),
    "packets lost one way": (3, lambda s: _apart(s, "one-way")),
    "packets lost": (3, lambda s: _apart(s, "wall")),
}


# ---- the soak ------------------------------------------------------------------------------------
def soak(
    folder: Path,
    faults: int,
    runs: int,
    seed: int,
    tell: Callable[[str], None],
    only: Sequence[str] = (),
) -> Table:
    """`faults` over `runs` runs, one after the other, of the kinds `only` if it names any. Returns
    what every seat held. Raises AssertionError for the first thing that did not hold."""
    kinds = {name: SOAK_FAULTS[name] for name in only} or SOAK_FAULTS
    lives, done, t0 = Lives(), Counter[str](), time.monotonic()
    for i in range(runs):
        s = SoakedRun(folder / f"soak{i}", random.Random(f"{seed} {i}"))
        share = faults // runs + (i < faults % runs)
        try:
            _faults(s, share, kinds, done, lives, functools.partial(_told, tell, f"run {i + 1}/{runs}"))
            _ends(s)
        finally:
            s.close()
        tell(_judged(s))
    minutes = (time.monotonic() - t0) / 60
    counted = ", ".join(f"{name} {n}" for name, n in done.most_common())
    tell(f"{sum(done.values())} faults in {minutes:.1f} minutes: {counted}")
    found = lives.growth()
    if grew := [g.seat for g in found if g.too_much]:
        tell(f"grew: {', '.join(grew)}")
        raise AssertionError(f"a process grew: {[g for g in found if g.too_much]}")
    return grown(found)


def _told(tell: Callable[[str], None], which: str, text: str) -> None:
    tell(f"{which}: {text}")


def _faults(
    s: SoakedRun,
    share: int,
    kinds: Kinds,
    done: Counter[str],
    lives: Lives,
    tell: Callable[[str], None],
) -> None:
    names, weights = [*kinds], [often for often, _ in kinds.values()]
    stood, stood_s, n, t0 = -1, time.monotonic(), 0, time.monotonic()
    while n < share:
        if (ended := s.controller.poll()) is not None:
            # as a supervisor does, whom a controller that cannot lead on asks to try again
            if ended not in (-signal.SIGKILL, LEFT) and not s.began_in_silence(ended):
                raise AssertionError(
                    f"after {n} faults the controller ended by itself, {ended}:\n{_last(s)}"
                )
            s.launch()
        if (s.run / STOP_KEY).exists():
            raise AssertionError(f"after {n} faults the run stopped itself:\n{_last(s)}")
        seats = s.seats()
        for seat, processes in seats.items():
            for p in processes:
                lives.sample(seat, p)
        agents = seats.get("agent", [])
        if agents and s.spared not in [p.pid for p in agents]:
            s.spared = agents[0].pid
        step = s.step()
        # each fault shall find a run that has got on; that it does not is a failure in itself
        if step <= stood or len(agents) < 2:
            if time.monotonic() - stood_s > GET_ON_S:
                raise AssertionError(
                    f"after {n} faults nothing was committed for {GET_ON_S:.0f} s after step "
                    f"{stood}:\n{_last(s)}"
                )
            time.sleep(0.1)
            continue
        time.sleep(s.rng.uniform(0.0, 0.5))
        kind = s.rng.choices(names, weights)[0]
        if not kinds[kind][1](s):
            continue
        n, stood, stood_s = n + 1, step, time.monotonic()
        done[kind] += 1
        tell(f"{n}/{share} {kind} after step {step}, {n / (time.monotonic() - t0) * 60:.1f}/min")


def _ends(s: SoakedRun) -> None:
    """It is stopped, and ends."""
    if s.controller.poll() is not None:
        s.launch()
    ask_to_stop(open_store(str(s.run)), StopOrder("soaked", "soak"))
    try:
        s.controller.wait(END_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the controller did not end in {END_S:.0f} s:\n{_last(s)}") from None
    until_s = time.monotonic() + END_S
    while left := [f"{seat} {p.pid}" for seat, ps in s.seats().items() for p in ps]:
        if time.monotonic() > until_s:
            raise AssertionError(f"still running: {', '.join(left)}")
        time.sleep(0.2)


def _judged(s: SoakedRun) -> str:
    """Is all well with what it has left? In words."""
    store = open_store(str(s.run))
    newest = Snapshots(store).latest()
    if newest is None:
        raise AssertionError(f"{s.run}: nothing was committed")
    calm = train("harness.lab.exercise", s.folder / "calm", newest.step, max(1, newest.step))
    if calm != newest.data["weights"]:
        raise AssertionError(
            f"the weights at step {newest.step} are {newest.data['weights']}, a calm run's {calm}"
        )
    found, _ = with_signatures(audit(store), store, key_of(s.key, "the soak's key"), None)
    if not found.ok:
        raise AssertionError(f"verify --key: {found.first_violation}")
    return (
        f"step {newest.step}, epoch {newest.epoch}, {plural(s.launches, 'controller')}; verified "
        "with the run's key, and the weights are those of a calm run"
    )


def _last(s: SoakedRun) -> str:
    """The end of what was said."""
    logs = [s.folder / f"launch{s.launches}.log", *s.run.glob("local-cloud/nodes/*/log")]
    return "\n".join(
        f"--- {p}\n{p.read_text(errors='replace')[-1500:]}" for p in logs if p.exists()
    )


def command(faults: int, runs: int, seed: int, keep: str, console: Console) -> int:
    """`python -m support soak`. 0: everything held."""

    def tell(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with kept_folder(keep, "harness-soak-") as folder:
        try:
            console.print(soak(folder, faults, runs, seed, tell))
        except AssertionError as e:
            console.print(Text.assemble(("FAILED", "red"), f" {e}"))
            tell(f"again: make soak FAULTS={faults} RUNS={runs} SEED={seed} --keep FOLDER")
            return 1
    return 0
