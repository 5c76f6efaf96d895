"""A run of a month: what it costs to look at it, to take it over, to join it, to prove it.

    python benchmarks/longrun.py                    # 30 days, 1.3 million steps, 64 nodes
    python benchmarks/longrun.py --days 1 --fast    # a quick look
    python benchmarks/longrun.py --run FOLDER       # keep the run there, or measure it again

Makes such a run in a folder: members, worlds, losses (a node every 43 minutes), steps, snapshots
and their records, in virtual time. Facts are written by `journal.Journal`, archived every two
minutes of virtual time by the keeper's own code, as while a run trains; live facts lie in memory
until the run is made, then in the folder. Records are spelled by hand (the same bytes as
`StepRecord.to_line`; checked on some), because a million dataclasses take minutes.

Then measures, each in a process of its own, on a store that answers each request (each page of a
listing) after 30 ms: seconds, requests, peak resident memory (of verify: with the largest of its
helper processes). Prints each figure with its target. Says the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.bucket.archive import Compactor, RecordCompactor
from harness.bucket.journal import Journal
from harness.bucket.layout import MEMBERS, Epoch, Member, epoch_key
from harness.core import facts as f
from harness.core import step_records as rec
from harness.core.batch import Batching, Uint64s, expected_digests, plan
from harness.core.world import Offer
from harness.uploader.archiver import REST_S, SELDOM
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import FileStore, MemoryStore
from storage.stores.objects import ObjectStore

TREE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TREE), str(TREE / "tests")]  # where `support` is

T0, DAY_S = 1_767_225_600.0, 86400.0
STEP_S, SNAPSHOT_STEPS, FLUSH_S = 1.81, 150, 10.0
LOSS_S = 30 * DAY_S / 1000  # between two losses
GROW_S, REFORM_S = 300.0, 12.0
GLOBAL, MICRO = 128, 2
OFFER = Offer(
    1.1, "aws/us-east-1/use1-az1/g6e.xlarge", accelerator="L40S", gpus=1, on_demand_usd_per_h=1.861
)
LATENCY_S, AT_ONCE, PAGE = 0.030, 32, 1000
MOST_MB = 500


# ---- a store with latency ------------------------------------------------------------------------
class Slow:
    """A store that answers each request after a while, and counts them."""

    def __init__(self, inner: ObjectStore, latency_s: float = LATENCY_S):
        self.inner, self.url, self.latency_s = inner, inner.url, latency_s
        self.reads_at_once = AT_ONCE
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _wait(self, kind: str, pages: int = 1) -> None:
        with self._lock:
            self.requests[kind] += pages
        time.sleep(self.latency_s * pages)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        self._wait("get")
        return self.inner.get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._wait("put")
        self.inner.put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self._wait("put")
        return self.inner.create(key, data)

    def list(self, prefix: str) -> list[str]:
        found = self.inner.list(prefix)
        self._wait("list", 1 + len(found) // PAGE)
        return found

    def delete(self, key: str) -> None:
        self._wait("delete")
        self.inner.delete(key)

    def size(self, key: str) -> int:
        self._wait("get")
        return self.inner.size(key)

    @property
    def total(self) -> int:
        return sum(self.requests.values())


# ---- making the run ------------------------------------------------------------------------------
class Split:
    """Live facts in memory, all else in the folder: a quarter of a million files less."""

    def __init__(self, folder: ObjectStore):
        self.folder, self.live, self.url = folder, MemoryStore("memory://live", {}), folder.url
        self.requests: Counter[tuple[str, str]] = Counter()  # by what is asked for, and how

    def of(self, key: str, kind: str, pages: int = 1) -> ObjectStore:
        self.requests[key.partition("/")[0], kind] += pages
        return self.live if key.startswith("facts/") else self.folder

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.of(key, "get").get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.of(key, "put").put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self.of(key, "create").create(key, data)

    def list(self, prefix: str) -> list[str]:
        found = self.of(prefix, "list").list(prefix)
        self.of(prefix, "list", len(found) // PAGE)
        return found

    def delete(self, key: str) -> None:
        self.of(key, "delete").delete(key)

    def size(self, key: str) -> int:
        return self.of(key, "get").size(key)


@dataclass
class Maker:
    """Writes what the seats of such a run would."""

    store: Split
    days: float
    nodes: int
    t: float = T0
    step: int = 0
    epoch: int = 0
    attempt: int = 0
    head: str = ""
    committed: tuple[int, str] = (0, "")
    unsaved: list[str] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    members: dict[int, str] = field(default_factory=dict)  # of attempts that live
    up_s: dict[int, float] = field(default_factory=dict)
    journals: dict[str, Journal] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    digests: dict[int, str] = field(default_factory=dict)
    archived_s: float = T0
    looks: int = 0

    def __post_init__(self) -> None:
        self.total = int(self.days * DAY_S / STEP_S)
        self.identity = {
            "version": 1,
            "seed": 0,
            "samples": 10_000_000,
            "global_batch": GLOBAL,
            "micro_batch": MICRO,
            "shuffle": True,
            "total_steps": self.total,
        }
        self.batching = Batching(10_000_000, GLOBAL, MICRO, 0)
        self.facts, self.records = Compactor(self.store), RecordCompactor(self.store)

    def say(self, writer: str, fact: f.Fact, flush: bool = True) -> None:
        journal = self.journals.get(writer)
        if journal is None:
            journal = self.journals[writer] = Journal(self.store, writer, lambda: self.t)
        journal.record(fact)
        if flush:
            journal.flush()

    def controller(self, fact: f.Fact) -> None:
        self.say("controller-a1b2c3d4e5f6", fact)

    def make(self) -> None:
        self.store.create("run.json", canonical(self.identity))
        self.head = rec.genesis(self.identity)
        self.committed = (0, self.head)
        self.controller(f.RunAsked("train.yaml", 1, self.nodes, "cheapest"))
        self.store.create("lease/000001.json", b'{"holder":"vm:1:aa","ttl_s":5.0}')
        self.store.put("lease/000001.beat", b"released")
        self.controller(f.LeaseTaken(1, "vm:1:aa"))
        for _ in range(self.nodes):
            self.launch()
        why, end_s = "start", T0 + self.days * DAY_S
        while self.t < end_s:
            # two worlds for each loss: without the lost node, and with the one in its place
            self.train(why, min(self.t + LOSS_S - GROW_S, end_s), self.t + LOSS_S > end_s)
            if self.t >= end_s:
                break
            self.lose()
            self.train("loss", self.t + GROW_S, False)
            self.launch()
            why = "grow"
        self.finish()

    # -- nodes --
    def launch(self) -> None:
        self.attempt += 1
        name = f"m{self.attempt:04d}-{self.rng.randrange(1 << 24):06x}"
        self.controller(f.AttemptIntended(self.attempt, asdict(OFFER), "cheapest"))
        self.controller(f.AttemptUp(self.attempt, self.t))
        self.members[self.attempt], self.up_s[self.attempt] = name, self.t
        self.say(f"agent-{name}", f.AgentStarted(name, self.attempt, "ip", 1, "L40S", 100))
        me = Member(name, "in", self.epoch, "127.0.0.1", 9, 29500, 1, self.attempt, beat_s=10.0)
        self.store.put(f"{MEMBERS}{name}.json", json.dumps(asdict(me)).encode())

    def lose(self) -> None:
        attempt = self.rng.choice(sorted(self.members))
        name, up_s = self.members.pop(attempt), self.up_s.pop(attempt)
        if attempt % 2:
            self.say(f"agent-{name}", f.NoticeSeen(name, "aws", "kill", "n", self.t + 120.0))
        self.store.delete(f"{MEMBERS}{name}.json")  # as the keeper does
        billed = self.t - up_s
        usd = billed / 3600 * OFFER.usd_per_h
        words = (attempt, "preempted", up_s, up_s, self.t, None, "preempted", billed, usd)
        self.controller(f.AttemptEnded(*words, self.committed[0]))
        self.journals.pop(f"agent-{name}", None)
        self.step, self.head = self.committed
        self.unsaved = []
        for member in self.members.values():
            self.say(f"agent-{member}", f.EpochLeft(self.epoch, member, "peer-lost"))

    # -- training --
    def train(self, why: str, until_s: float, last: bool) -> None:
        self.epoch += 1
        names = tuple(self.members[a] for a in sorted(self.members))
        world, shares = len(names), plan(GLOBAL // MICRO, len(names)).shares
        self.store.create(
            epoch_key(self.epoch),
            Epoch(
                self.epoch, names, (1,) * world, (1.0,) * world, "127.0.0.1", 29500, why
            ).encode(),
        )
        self.say(f"agent-{names[0]}", f.EpochStarted(self.epoch, names, world, why))
        self.t += REFORM_S
        writer = f"worker-e{self.epoch:06d}-{self.rng.randrange(1 << 32):08x}"
        begun = (self.epoch, world, self.step, max(0, self.epoch - 1) if self.step else 0)
        plan_words = (self.total, GLOBAL, MICRO, shares, "fast", "ddp", "cuda", 4.0)
        self.say(writer, f.SessionStarted(*begun, *plan_words))
        flushed_s, spelled = self.t, json.dumps(list(shares), separators=(",", ":"))
        while self.t < until_s and self.step < self.total:
            self.step += 1
            start, dt = self.t, STEP_S - 0.02 + 0.02 * self.rng.random()
            self.t += dt
            loss = 2.0 + 6.0 / (1 + self.step / 5000) + 0.05 * self.rng.random()
            norm = 0.9 + 0.1 * self.rng.random()
            self.record(world, spelled, loss, norm, dt)
            told = (self.step, self.epoch, loss, start, dt, GLOBAL, GLOBAL * 2048, 3e-4, norm, 0.41)
            self.say(writer, f.StepDone(*told), flush=self.t - flushed_s >= FLUSH_S)
            flushed_s = self.t if self.t - flushed_s >= FLUSH_S else flushed_s
            if self.step % SNAPSHOT_STEPS == 0:
                self.snapshot(writer, "interval")
            if self.t - self.archived_s >= REST_S:
                self.archived_s, self.looks = self.t, self.looks + 1
                self.facts.compact()
                if self.looks % SELDOM == 0:
                    self.records.compact()
        self.journals[writer].flush()
        if why == "loss" or last:
            self.snapshot(writer, "resize")
            self.say(writer, f.SessionEnded(self.epoch, self.step, "resize"))
            for member in names:
                self.say(f"agent-{member}", f.EpochLeft(self.epoch, member, "resize"))
        del self.journals[writer]

    def record(self, world: int, shares: str, loss: float, norm: float, dt: float) -> None:
        if self.step not in self.digests:
            sums: Uint64s = expected_digests(self.batching, self.step, 500)
            self.digests = {self.step + i: f"{int(one):016x}" for i, one in enumerate(sums)}
        body = {
            "step": self.step,
            "epoch": self.epoch,
            "world": world,
            "shares": json.loads(shares),
            "samples": GLOBAL,
            "digest": self.digests[self.step],
            "weight": float(GLOBAL),
            "loss": loss,
            "lr": 3e-4,
            "t": self.t,
            "dt": dt,
            "metrics": {"grad_norm": norm},
            "prev": self.head,
        }
        self.head = digest(canonical(body))
        self.unsaved.append(json.dumps({**body, "h": self.head}, separators=(",", ":")))

    def snapshot(self, writer: str, why: str) -> None:
        if not self.unsaved:
            return
        first, last = json.loads(self.unsaved[0])["step"], self.step
        key = f"samples/{first:010d}-{last:010d}-{self.head[:16]}.jsonl"
        self.store.create(key, ("\n".join(self.unsaved) + "\n").encode())
        self.named = {"key": key, "head": self.head, "first": first, "last": last}
        self.unsaved, self.committed = [], (self.step, self.head)
        told = (self.step, self.epoch, 14_000_000_000, 0.2, 21.0, why, self.t - 21.0)
        self.say(writer, f.SnapshotCommitted(*told), flush=False)

    def finish(self) -> None:
        """The run goes on: its newest snapshot, and what is live."""
        snapshots, ref = Snapshots(self.store), Ref(self.epoch, self.step)
        data = {"final": False, "samples": self.named, "loss": 2.0}
        snapshots.write(ref, 0, len(self.members), {"state": b"x" * 5000}, {}, data, "t")
        for rank in range(1, len(self.members)):
            snapshots.write(ref, rank, len(self.members), {f"r{rank}": b"x"}, {}, data, "t")
        assert snapshots.commit(ref, len(self.members))
        self.store.create("longrun.json", json.dumps({"now_s": self.t + 1.0}).encode())
        for key in self.store.live.list(""):
            self.store.folder.create(key, self.store.live.get(key))


def now_s(store: Slow) -> float:
    """The moment that the run was made for."""
    return float(json.loads(store.inner.get("longrun.json"))["now_s"])


# ---- measuring -----------------------------------------------------------------------------------
def status(store: Slow) -> dict[str, Any]:
    from harness.look.reports.live_view import status

    found = status(store, watch_s=0.0, now=lambda: now_s(store))
    return {k: found[k] for k in ("step", "loss", "attempts")}


def live(store: Slow) -> dict[str, Any]:
    """The first look, and the most requests of any of the next polls while the run goes on."""
    from rich.console import Console

    from harness.look.reports.live_view import LiveView

    view = LiveView(store, Console(quiet=True))
    view.read()
    first, most = store.total, 0
    journals = [Journal(store.inner, f"agent-m9{i:03d}-live", time.time) for i in range(64)]
    for poll in range(20):
        for i, journal in enumerate(journals):
            if poll == 3 or i == poll:  # a world that changes: everybody has something to say
                journal.record(f.EpochLeft(10**6, f"m9{i:03d}-live", "resize"))
                journal.flush()
        before = store.total
        view.read()
        most = max(most, store.total - before)
    for key in [k for j in journals for k in store.inner.list(f"facts/{j.writer}/")]:
        store.inner.delete(key)
    return {"first": first, "most": most}


def report(store: Slow) -> dict[str, Any]:
    from rich.console import Console

    from harness.look.reports.report import print_report, write_html
    from harness.look.reports.summary import summarize

    summary = summarize(store, lambda: now_s(store))
    with open(os.devnull, "w") as nowhere:
        print_report(summary, Console(file=nowhere))
    with tempfile.TemporaryDirectory() as folder:
        write_html(summary, Path(folder) / "report.html")
    return {"goodput": summary.ledger.goodput, "problems": list(summary.problems)}


def takeover(store: Slow) -> dict[str, Any]:
    """From the call until the first round has looked at everything, after a clean end of the
    controller before it (else the lease's time is waited for)."""
    from harness.bucket.controller_lease import Lease
    from harness.cli.common import RealClock
    from harness.ledger.attempts import AttemptHistory

    clock = RealClock()
    lease, journal = Lease(store, clock, "me"), Journal(store, "controller-new", clock.now)
    lease.acquire()
    book = AttemptHistory.of(journal.read(), random.Random(0))
    newest = Snapshots(store).latest()
    lease.release()
    for key in store.inner.list("lease/000002"):
        store.inner.delete(key)
    return {"open": len(book.open), "step": newest.step if newest else 0}


class Ears:
    """Lines on which everybody is heard."""

    key = ""

    def follow(self, *words: object) -> None: ...
    def tell(self, record: bytes) -> None: ...

    def heard(self, name: str) -> Any:
        from harness.rendezvous.peer_heartbeats import PeerStatus

        return PeerStatus(up=True, seen=True)

    def all_up(self) -> bool:
        return True

    def reached(self) -> None: ...

    def knocked(self) -> bool:
        return False

    def share(self, name: str, record: bytes) -> None: ...
    def doubt(self, name: str) -> None: ...

    def overheard(self) -> Any:
        from harness.rendezvous.gossip import GossipReport

        return GossipReport()


def newcomer(store: Slow) -> dict[str, Any]:
    """Until it is known to the others, and knows the newest epoch and its neighbours; in a big
    world it hears of all others over its lines to these."""
    from harness.rendezvous.rendezvous import Rendezvous

    me = Member("m9999-new", "ready", 0, "127.0.0.1", 9, 29500, 1, 9999)
    rendezvous = Rendezvous(store, me, Ears())
    rendezvous.say()
    epoch, members = rendezvous.newest().epoch, len(rendezvous.look())
    store.inner.delete(f"{MEMBERS}m9999-new.json")
    return {"epoch": epoch, "members": members}


def verify(store: Slow) -> dict[str, Any]:
    """By as many processes as there are cores; then again, with what the first has remembered."""
    from harness.look.audit.audit import audit
    from harness.look.audit.proof_cache import Prover

    with tempfile.TemporaryDirectory() as folder:
        prover = Prover(os.cpu_count() or 1, Path(folder) / "proofs")
        found = audit(store, prover=prover)
        one_mb = peak_mb()  # a person's second audit is another process
        began = time.monotonic()
        audit(store, prover=(again := Prover(os.cpu_count() or 1, Path(folder) / "proofs")))
        again_s = time.monotonic() - began
        mb = (Path(folder) / "proofs").stat().st_size / 1e6
    return {
        "ok": found.ok,
        "violation": found.first_violation,
        "again_s": round(again_s, 1),
        "remembered": again.remembered,
        "mb": one_mb,
        "file_mb": round(mb, 1),
    }


MEASURES: dict[str, Callable[[Slow], dict[str, Any]]] = {
    "status": status,
    "live": live,
    "report": report,
    "takeover": takeover,
    "newcomer": newcomer,
    "verify": verify,
}
SECONDS = {"status": 2.0, "report": 10.0, "takeover": 3.0, "newcomer": 1.0, "verify": 120.0}
MOST_POLL = 10


def peak_mb() -> float:
    """Of this process, or of the largest that it began and that has ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in whose) / 1000


def measure(name: str, run: str) -> dict[str, Any]:
    store = Slow(FileStore(run))
    began = time.monotonic()
    found = MEASURES[name](store)
    seconds = time.monotonic() - began - found.get("again_s", 0.0)
    cpu_s = round(time.process_time(), 2)  # with imports; of a loaded machine the truer number
    return {"cpu_s": cpu_s, "s": seconds, "requests": store.total, "mb": peak_mb(), **found}


def measured(name: str, run: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--measure", name, "--run", run]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(what: str, value: str, target: str, ok: bool) -> None:
    print(f"{what:<34}{value:>22}   {target:<16}{'yes' if ok else 'NO'}", flush=True)


def costs(maker: Maker) -> None:
    """Requests per node and day, as they were made: by writers of facts, records and epochs, and
    by the keeper's archiving; and by the rendezvous while nothing happens. Not counted: snapshots,
    `control/`, the controller's lease, the keeper's look at members."""
    node_days = maker.days * maker.nodes
    print("per node-day: requests, USD (S3; deletions are free)")
    of_folders = {
        (what, kind): n / node_days
        for (what, kind), n in maker.store.requests.items()
        if what in ("facts", "samples", "archive") or (kind == "create" and what == "rdzv")
    }
    calm = {("rendezvous", kind): n for kind, n in rendezvous(maker.nodes).items()}
    for (what, kind), n in [*sorted(of_folders.items()), *calm.items()]:
        usd = {"get": 0.4e-6, "delete": 0.0}.get(kind, 5e-6) * n
        print(f"  {what:<12}{kind:<8}{n:9.1f} {usd:10.6f}")


def rendezvous(nodes: int, calm_s: float = 120.0) -> dict[str, float]:
    """Requests per node and day of members that train and hear each other: the real rendezvous
    under a virtual clock (tests/support/rendezvous_crowd.py)."""
    from support.rendezvous_crowd import Crowd

    crowd = Crowd(seed=nodes, min_members=nodes)
    names = [f"m{i:04d}-{i:06x}" for i in range(1, nodes + 1)]
    for name in names:
        crowd.join(name)
    assert crowd.scheduler.run(lambda: crowd.trains(names), 60.0), "no epoch was formed"
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 10.0)
    before, begun_s = crowd.requests(), crowd.scheduler.now
    crowd.scheduler.run(lambda: False, begun_s + calm_s)
    per = DAY_S / calm_s / nodes
    return {kind: (n - before[kind]) * per for kind, n in sorted(crowd.requests().items())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--fast", action="store_true", help="do not verify")
    parser.add_argument("--run", default="")
    parser.add_argument("--measure", default="", choices=["", *MEASURES])
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(measure(words.measure, words.run)))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(words.run or folder).resolve())
        url = f"file://{run}"
        if not FileStore(url).list("run.json"):
            began = time.monotonic()
            maker = Maker(Split(FileStore(url)), words.days, words.nodes)
            maker.make()
            segments = maker.store.requests["facts", "create"]
            print(
                f"made in {time.monotonic() - began:.0f} s: {words.days:g} days, {maker.step:,} "
                f"steps, {words.nodes} nodes, {maker.attempt - words.nodes} losses, "
                f"{maker.epoch} epochs, {segments:,} segments of facts"
            )
            costs(maker)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; 30 ms per request\n")
        for name in MEASURES:
            if name == "verify" and words.fast:
                continue
            found = measured(name, url)
            if name == "live":
                line(
                    "live view, most of a poll",
                    f"{found['most']} requests",
                    "10",
                    found["most"] <= MOST_POLL,
                )
                line("live view, first look", f"{found['first']} requests", "-", True)
            else:
                line(
                    f"{name}, seconds",
                    f"{found['s']:.2f}",
                    f"{SECONDS[name]:g}",
                    found["s"] <= SECONDS[name],
                )
                line(f"{name}, requests", f"{found['requests']}", "-", True)
            line(f"{name}, peak MB", f"{found['mb']:.0f}", f"{MOST_MB}", found["mb"] <= MOST_MB)
            extra = {
                k: v for k, v in found.items() if k not in ("s", "requests", "mb", "most", "first")
            }
            print(f"    {extra}", flush=True)


if __name__ == "__main__":
    main()
