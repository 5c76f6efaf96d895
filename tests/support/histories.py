"""A made-up but realistic life of a run, written the way real seats write it: for tests of ledger,
report and monitor.

Two nodes start; a third joins; node 2 gets a notice; node 1 is killed without one and steps are
redone; then everything is taken away for a while; two nodes come back and finish.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field

from harness.bucket.journal import Journal
from harness.core import facts as f
from harness.core import step_records as rec
from harness.core.batch import plan
from harness.core.world import Offer
from storage import canonical_json
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore

T0 = 1_767_225_600.0  # 2026-01-01
TOTAL, EVERY, GLOBAL, MICRO = 120, 10, 64, 4
EAST = Offer(
    1.10, "aws/us-east-1/use1-az1/g6e.xlarge", accelerator="L40S", gpus=1, on_demand_usd_per_h=1.861
)
WEST = Offer(
    1.25, "aws/us-west-2/usw2-az3/g6e.xlarge", accelerator="L40S", gpus=1, on_demand_usd_per_h=1.861
)
IDENTITY = {"version": 1, "seed": 0, "global_batch": GLOBAL, "micro_batch": MICRO}


@dataclass
class History:
    """Moves a clock and writes what every seat would. Seats flush at once, unless they are
    killed before they can."""

    store: ObjectStore = field(default_factory=lambda: MemoryStore("memory://history", {}))
    t: float = T0
    step: int = 0
    epoch: int = 0
    unsaved: list[rec.StepRecord] = field(default_factory=list)
    # the lineage so far, unsaved included
    chains: list[rec.StepRecord] = field(default_factory=list)
    journals: dict[str, Journal] = field(default_factory=dict)
    members: dict[int, str] = field(default_factory=dict)
    up: dict[int, tuple[float, float, Offer]] = field(default_factory=dict)
    spent: float = 0.0
    committed: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def say(self, writer: str, fact: f.Fact, t: float | None = None, flush: bool = True) -> None:
        journal = self.journals.setdefault(writer, Journal(self.store, writer, lambda: self.at))
        self.at = self.t if t is None else t
        journal.record(fact)
        if flush:
            journal.flush()

    def wait(self, seconds: float) -> None:
        self.t += seconds

    def controller(self, fact: f.Fact) -> None:
        self.say("controller-1", fact)

    # -- nodes --
    def ask(self, attempt: int, offer: Offer, capacity: bool = True, boot_s: float = 20.0) -> None:
        self.controller(f.AttemptIntended(attempt, asdict(offer), "cheapest"))
        asked = self.t
        if not capacity:
            self.wait(1.5)
            self.controller(
                f.AttemptEnded(
                    attempt,
                    "no-capacity",
                    asked,
                    None,
                    self.t,
                    None,
                    "no capacity",
                    0.0,
                    0.0,
                    self.committed,
                )
            )
            return
        self.wait(boot_s)
        self.up[attempt] = (asked, self.t, offer)
        self.controller(f.AttemptUp(attempt, self.t))
        self.members[attempt] = f"m{attempt:04d}-{self.rng.randrange(1 << 24):06x}"
        self.wait(3.0)
        self.agent(
            attempt,
            f.AgentStarted(
                self.members[attempt], attempt, f"ip-10-0-0-{attempt}", 1, offer.accelerator, 100
            ),
        )

    def agent(self, attempt: int, fact: f.Fact) -> None:
        self.say(f"agent-{self.members[attempt]}", fact)

    def gone(self, attempt: int, end: str, reason: str, code: int | None) -> None:
        asked, up, offer = self.up.pop(attempt)
        billed = self.t - up
        usd = billed / 3600 * offer.usd_per_h
        self.spent += usd
        self.controller(
            f.AttemptEnded(
                attempt, end, asked, up, self.t, code, reason, billed, usd, self.committed
            )
        )

    # -- training --
    def form(self, attempts: list[int], reason: str) -> None:
        self.epoch += 1
        members = tuple(self.members[a] for a in attempts)
        self.wait(1.0)
        self.agent(attempts[0], f.EpochStarted(self.epoch, members, len(attempts), reason))
        self.world, self.shares = len(attempts), plan(GLOBAL // MICRO, len(attempts)).shares
        del self.chains[self.committed :]
        self.unsaved, resumed, self.step = [], self.committed, self.committed
        self.wait(2.5)
        session = f.SessionStarted(
            self.epoch,
            self.world,
            resumed,
            max(0, self.epoch - 1) if resumed else 0,
            TOTAL,
            GLOBAL,
            MICRO,
            self.shares,
            "fast",
            "ddp",
            "cpu",
            0.4,
        )
        self.worker(session)

    def worker(self, fact: f.Fact, flush: bool = True) -> None:
        self.say(f"worker-e{self.epoch:06d}-ab", fact, flush=flush)

    def train(self, until: int, snapshots: bool = True, flush: bool = True) -> None:
        while self.step < until:
            self.step += 1
            start, dt = self.t, 2.4 / self.world + 0.02 * self.rng.random()
            self.wait(dt)
            loss = 1.2 + 3.0 * math.exp(-self.step / 35) + 0.05 * self.rng.random()
            metrics = {"val_loss": loss + 0.1} if self.step % 20 == 0 else {}
            head = self.chains[-1].h if self.chains else rec.genesis(IDENTITY)
            record = rec.StepRecord(
                self.step,
                self.epoch,
                self.world,
                self.shares,
                GLOBAL,
                f"{self.step:016x}",
                float(GLOBAL),
                loss,
                3e-4,
                self.t,
                dt,
                metrics,
            ).chained(head)
            self.chains.append(record)
            self.unsaved.append(record)
            self.worker(
                f.StepDone(
                    self.step, self.epoch, loss, start, dt, GLOBAL, GLOBAL * 128, 3e-4, 0.9, 0.31
                ),
                flush=flush,
            )
            if metrics:
                self.wait(0.3)  # validation
                self.worker(f.Validated(self.step, self.epoch, metrics), flush=flush)
            if snapshots and self.step % EVERY == 0 and self.step < until:
                self.snapshot("interval")

    def snapshot(self, why: str, final: bool = False) -> None:
        start, stall, commit = self.t, 0.05, 0.8
        self.wait(stall)
        named = {
            "key": rec.key(self.unsaved),
            "head": self.unsaved[-1].h,
            "first": self.unsaved[0].step,
            "last": self.unsaved[-1].step,
        }
        self.store.create(rec.key(self.unsaved), rec.encode(self.unsaved))
        snapshots, ref = Snapshots(self.store), Ref(self.epoch, self.step)
        snapshots.write(
            ref,
            0,
            1,
            {"state": b"x" * 5000},
            {},
            {"final": final, "samples": named, "loss": self.unsaved[-1].loss},
            "t",
        )
        assert snapshots.commit(ref, 1)
        self.unsaved, self.committed = [], self.step
        self.say(
            f"worker-e{self.epoch:06d}-ab",
            f.SnapshotCommitted(self.step, self.epoch, 5000, stall, commit, why, start),
            t=start + commit if why == "interval" else None,
        )
        if why != "interval":
            self.wait(commit)

    def leave(self, attempts: list[int], why: str) -> None:
        self.worker(f.SessionEnded(self.epoch, self.step, why))
        for attempt in attempts:
            self.agent(attempt, f.EpochLeft(self.epoch, self.members[attempt], why))


def whole_run(store: ObjectStore | None = None, evil: str = "") -> History:
    """The story in the module's docstring. `evil` is put wherever users and machines write free
    text."""
    h = History() if store is None else History(store)
    h.store.create("run.json", canonical_json.canonical(IDENTITY))
    h.controller(f.RunAsked(f"sky_tasks/train.yaml{evil}", 1, 3, "cheapest", "seed:7", 5.0))
    h.controller(f.LeaseTaken(1, "laptop:1:aa"))
    h.store.create("lease/000001.json", b'{"holder":"laptop:1:aa","ttl_s":5.0}')
    h.ask(1, EAST)
    h.ask(2, EAST, boot_s=6.0)
    h.form([1, 2], "start")
    h.train(15)
    # asked while the world trains; the clock of this story moves on meanwhile
    h.ask(3, EAST, capacity=False)
    h.train(24)
    h.ask(4, WEST, boot_s=1.0)
    h.train(32)
    h.snapshot("resize")
    h.leave([1, 2], "resize")
    h.form([1, 2, 4], "grow")
    h.train(50)
    # a notice: committed well within the grace
    h.agent(2, f.NoticeSeen(h.members[2], f"aws{evil}", "kill", f"n-1{evil}", h.t + 120.0))
    h.wait(0.5)
    h.train(51)
    h.snapshot("notice")
    h.leave([1, 4], "resize")
    h.agent(2, f.EpochLeft(h.epoch, h.members[2], "drained"))
    h.agent(2, f.AgentEnded(h.members[2], 33, "aws notice"))
    h.wait(1.0)
    h.gone(2, "drained", f"preempted{evil}", 33)
    h.form([1, 4], "shrink")
    h.train(67)
    # node 1 (which has rank 0 and the facts of steps 66 and 67 in its memory) vanishes
    killed = h.t + 0.4
    h.wait(5.0)
    h.agent(4, f.EpochLeft(h.epoch, h.members[4], "peer-lost"))
    h.agent(
        4,
        f.WorkerFailed(
            h.members[4],
            h.epoch,
            1,
            1,
            "RuntimeError",
            f"Connection closed by peer{evil}",
            f"Traceback{evil}",
        ),
    )
    late, h.t = h.t, killed
    h.gone(1, "preempted", "killed", None)
    h.t = late
    h.form([4], "loss")
    h.train(74)
    # everything is taken away
    h.agent(4, f.NoticeSeen(h.members[4], "aws", "kill", "n-2", h.t + 120.0))
    h.train(75)
    h.snapshot("notice")
    h.leave([], "drained")
    h.agent(4, f.EpochLeft(h.epoch, h.members[4], "drained"))
    h.agent(4, f.AgentEnded(h.members[4], 33, "aws notice"))
    h.wait(1.0)
    h.gone(4, "drained", "preempted", 33)
    h.controller(f.Decided("wait", "every offer is full"))
    h.ask(5, EAST, capacity=False)
    h.wait(40.0)
    h.ask(6, WEST, capacity=False)
    h.wait(60.0)
    h.ask(7, EAST, boot_s=15.0)
    h.ask(8, EAST, boot_s=1.0)
    h.form([7, 8], "start")
    h.train(TOTAL)
    h.snapshot("final", final=True)
    h.leave([7, 8], "finished")
    for attempt in (7, 8):
        h.agent(attempt, f.AgentEnded(h.members[attempt], 0, "finished"))
    h.wait(1.5)
    for attempt in (7, 8):
        h.gone(attempt, "finished", "exited", 0)
    h.controller(f.RunEnded("done", f"finished at step {TOTAL}{evil}", TOTAL))
    h.store.put("lease/000001.beat", b"released")
    return h
