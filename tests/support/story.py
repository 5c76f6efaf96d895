"""A run that goes through much, written the way the seats write it: for tests of what people and
trackers are told."""

import time
from dataclasses import asdict

from harness.bucket.journal import Journal
from harness.core import facts
from harness.core.world import Offer
from storage.canonical_json import canonical
from storage.snapshots.manifest import Ref
from support.truerun import TrueRun

OFFERS = [
    Offer(
        1.5, "aws/us-east-1/p5", accelerator="H100", on_demand_usd_per_h=4.0, place="aws/us-east-1"
    ),
    Offer(
        1.1,
        "gcp/us-central1/a3",
        accelerator="H100",
        on_demand_usd_per_h=3.5,
        place="gcp/us-central1",
    ),
]


class Story(TrueRun):
    """Facts, records and snapshots of nodes that come and go. Its clock begins with the wall
    clock, and runs ahead of it."""

    def __init__(self, store=None, **changes):
        super().__init__(store, begin=False, **changes)
        self.t = time.time()
        self.store.create("run.json", canonical(self.identity))
        self.up = {}  # attempt -> (asked, up, offer)
        self.told(facts.LeaseTaken(1, "me"), facts.RunAsked("train.yaml", 1, 3, "cheapest"))

    def told(self, *found, writer=None):
        """By the controller, or another seat."""
        journal = self.controller if writer is None else Journal(self.store, writer, lambda: self.t)
        for fact in found:
            journal.record(fact)
        journal.flush()

    def node(self, attempt):
        offer = OFFERS[attempt % len(OFFERS)]
        self.told(facts.AttemptIntended(attempt, asdict(offer)))
        asked, self.t = self.t, self.t + 20
        self.told(facts.AttemptUp(attempt, self.t))
        self.up[attempt] = (asked, self.t, offer)
        self.told(
            facts.AgentStarted(f"m{attempt:04d}-aa", attempt, "host", 1, "H100"),
            writer=f"agent-{attempt}",
        )

    def gone(self, attempt, end="preempted"):
        asked, up, offer = self.up.pop(attempt)
        billed = self.t - up
        usd = billed / 3600 * offer.usd_per_h
        self.told(
            facts.AttemptEnded(attempt, end, asked, up, self.t, None, end, billed, usd, self.step)
        )

    def begin_epoch(self, world):
        self.epoch += 1
        self.t += 10
        members = tuple(f"m{a:04d}-aa" for a in sorted(self.up))
        reason = "start" if self.epoch == 1 else "loss"
        self.told(
            facts.EpochStarted(self.epoch, members, world, reason), writer=f"agent-e{self.epoch}"
        )

    def snapshot(self, unsaved, world, final=False):
        super().snapshot(unsaved, world, final)
        self.told(
            facts.SnapshotCommitted(self.step, self.epoch, 800, 0.2, 1.5, "interval", self.t),
            facts.StepsTimed(
                *(self.epoch, max(1, self.step - 4), self.step),
                dict.fromkeys(facts.PHASES, 0.125),
                *((0.4, 0.5, 0.9), (0, world - 1), (0.9, 1.0, 1.2), (0, world - 1)),
                *(0.5, 0.4, 8, 80),
            ),
            writer=f"worker-e{self.epoch}-s{self.step}",
        )
        self.measure()

    def measure(self):
        """What the nodes' hardware does."""
        for attempt in self.up:
            readings = {"cpu/percent": 10.0 * attempt, "gpu0/percent": 90.0, "gpu0/watts": 500.0}
            more = {"gpu0/memory_percent": 70.0, "gpu0/celsius": 60.0, "net/sent_bytes_per_s": 1e6}
            member = f"m{attempt:04d}-aa"
            said = facts.NodeMeasured(member, 60.0, {**readings, **more})
            self.told(said, writer=f"agent-measures-{attempt}-{self.epoch}-{self.step}")

    def lose(self, steps):
        """Steps that nobody committed, and the world breaks."""
        for step in range(self.step + 1, self.step + steps + 1):
            self.t += 1
            self.told(
                facts.StepDone(step, self.epoch, 0.5, self.t - 1, 1.0, 8),
                writer=f"worker-e{self.epoch}-lost{step}",
            )

    def notice(self, attempt):
        self.told(
            facts.NoticeSeen(f"m{attempt:04d}-aa", "aws", "kill", f"n{attempt}", self.t + 120),
            writer=f"agent-n{attempt}",
        )

    # ---- five interruptions, three resizes, a quarantined snapshot -------------------------------
    def first_half(self):
        """Three interruptions, two resizes."""
        self.node(1), self.node(2)
        self.train(10, world=2)
        self.lose(2)
        self.gone(1)  # without notice
        self.node(3), self.node(4)
        self.train(16, world=3)
        self.notice(3)
        self.gone(3, "drained")
        self.gone(4)
        self.train(20, world=1)
        self.lose(1)

    def spoiled(self):
        """The steps from 21 on are published, and then found to be bad."""
        self.node(5)
        self.train(26, world=2, every=3)

    def second_half(self):
        """Two interruptions more, and the end."""
        self.snapshots.quarantine(Ref(epoch=self.epoch, step=26), "bytes differ")
        self.told(facts.SnapshotQuarantined(26, self.epoch, "bytes differ"), writer="agent-q")
        self.rewind(Ref(epoch=self.epoch, step=24))
        self.loss = lambda step: 7.0 / step
        self.train(30, world=2)
        self.lose(3)
        self.gone(2)
        self.train(36, world=1, metrics={"grad_norm": 0.5, "val_loss": 0.25})

    def finish(self):
        self.train(40, world=1, final=True, new_epoch=False)
        self.told(
            facts.EpochLeft(self.epoch, "m0005-aa", "finished"), writer=f"agent-left{self.epoch}"
        )

    def closed(self, outcome="done", reason=""):
        """The controller's last words, and the bill."""
        for attempt in list(self.up):
            self.gone(attempt, "finished")
        self.told(facts.RunEnded(outcome, reason, self.step))
