"""Interruptions made of facts, and the check that an account of them adds up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.step_records import Committed, StepRecord
from harness.core.world import Offer
from harness.ledger.ledger import Ledger
from harness.look.postmortems.interruption import MOMENTS
from harness.look.postmortems.postmortem import Postmortem, postmortem
from support.histories import T0

DOLLAR_A_SECOND = 3600.0  # per hour: dollars are node-seconds


@dataclass
class Made:
    """Facts and records of a run, on a clock that is moved by hand. One node is one rank; a step
    takes a second."""

    t: float = T0
    facts: list[Stamped] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    up: dict[int, tuple[float, float]] = field(default_factory=dict)  # asked, up
    epoch: int = 0
    world: tuple[int, ...] = ()
    step: int = 0
    committed: int = 0

    def say(self, fact: f.Fact, t: float | None = None) -> None:
        self.facts.append(Stamped(self.t if t is None else t, "w", fact))

    def member(self, attempt: int) -> str:
        return f"m{attempt:04d}-aa"

    def ask(self, *attempts: int, boot_s: float = 10.0, gpus: int = 1) -> Made:
        offer = asdict(Offer(DOLLAR_A_SECOND, "aws/east/box", True, "H100", gpus))
        asked = self.t
        for attempt in attempts:
            self.say(f.AttemptIntended(attempt, offer, "cheapest"))
        self.t += boot_s
        for attempt in attempts:
            self.up[attempt] = (asked, self.t)
            self.say(f.AttemptUp(attempt, self.t))
            self.say(f.AgentStarted(self.member(attempt), attempt), self.t + 1.0)
        return self

    def refuse(self, attempt: int) -> None:
        self.say(f.AttemptIntended(attempt, asdict(Offer(1.0, "aws/east/box"))))
        ended = f.AttemptEnded(attempt, "no-capacity", self.t, None, self.t, None, "", 0.0, 0.0)
        self.say(ended)

    def form(self, *attempts: int, reason: str = "start", resumed: int | None = None) -> Made:
        """Two seconds."""
        self.t += 1.0
        self.epoch += 1
        self.world = attempts
        resumed = self.committed if resumed is None else resumed
        self.records = [r for r in self.records if r.step <= resumed]
        self.step = self.committed = resumed
        members = tuple(map(self.member, attempts))
        self.say(f.EpochStarted(self.epoch, members, len(attempts), reason))
        self.t += 1.0
        session = f.SessionStarted(
            self.epoch, len(attempts), resumed, self.epoch - 1, 99, 8, 1, restore_s=0.5
        )
        self.say(session)
        return self

    def train(self, steps: int, every: int = 0) -> Made:
        """`every`: so many steps to a snapshot, which is committed two seconds later."""
        for _ in range(steps):
            self.step += 1
            self.say(f.StepDone(self.step, self.epoch, 1.0, self.t, 1.0), self.t + 1.0)
            self.t += 1.0
            if every and self.step % every == 0:
                self.snapshot("interval", stall_s=0.0)
        return self

    def snapshot(self, why: str, stall_s: float = 0.5, commit_s: float = 2.0) -> Made:
        """Training stands still for `stall_s`."""
        snapshot = f.SnapshotCommitted(
            self.step, self.epoch, 1000, stall_s, commit_s, why, self.t, slowdown=0.1
        )
        self.say(snapshot, self.t + commit_s)
        self.t += stall_s
        world = len(self.world)
        told = {
            s.fact.step: s.fact
            for s in self.facts
            if isinstance(s.fact, f.StepDone) and s.fact.epoch == self.epoch
        }
        for step in range(self.committed + 1, self.step + 1):
            end = told[step].t_start + 1.0
            self.records.append(
                StepRecord(step, self.epoch, world, (8,), 8, "", 8.0, 1.0, 0.1, end, 1.0)
            )
        self.committed = self.step
        return self

    def notice(self, attempt: int, grace_s: float = 120.0) -> Made:
        seen = f.NoticeSeen(self.member(attempt), "aws", "kill", f"n{attempt}", self.t + grace_s)
        self.say(seen)
        return self

    def drain(self, why: str = "notice", leaving: tuple[int, ...] = ()) -> Made:
        """A snapshot, two and a half seconds, and all leave."""
        self.snapshot(why)
        self.t += 2.0
        self.say(f.SessionEnded(self.epoch, self.step, "resize"))
        for attempt in self.world:
            left = "drained" if attempt in leaving else "resize"
            self.say(f.EpochLeft(self.epoch, self.member(attempt), left))
        return self

    def broke(self, *told: int, why: str = "peer-lost") -> Made:
        for attempt in told:
            self.say(f.EpochLeft(self.epoch, self.member(attempt), why))
        return self

    def gone(self, *attempts: int, end: str = "preempted") -> Made:
        for attempt in attempts:
            asked, up = self.up[attempt]
            billed = self.t - up
            self.say(
                f.AttemptEnded(attempt, end, asked, up, self.t, None, end, billed, billed)
            )
        return self

    def finish(self) -> Made:
        self.snapshot("final", stall_s=0.0)
        self.say(f.SessionEnded(self.epoch, self.step, "finished"))
        self.broke(*self.world, why="finished")
        return self.gone(*self.world, end="finished")

    def told(self) -> tuple[Postmortem, Ledger]:
        records = Committed.of(self.records)
        ledger = Ledger.of(self.facts, records, self.t)
        found = postmortem(self.facts, ledger, records=records)
        check(found, ledger)
        return found, ledger


def check(found: Postmortem, ledger: Ledger) -> None:
    """What holds for every post-mortem: nothing is blamed twice, or lost."""
    for bucket in ledger.ns:
        blamed = [one.losses for one in found.interruptions]
        assert ledger.ns[bucket] == found.rest.ns[bucket] + sum(b.ns[bucket] for b in blamed)
        assert ledger.nusd[bucket] == found.rest.nusd[bucket] + sum(b.nusd[bucket] for b in blamed)
    steps = [one.losses.steps for one in found.interruptions]
    assert ledger.steps_lost == found.rest.steps + sum(steps)
    assert [one.number for one in found.interruptions] == list(range(1, len(steps) + 1))
    for one in found.interruptions:
        assert one.losses.ns["useful"] == one.losses.ns["straggle"] == 0
        assert all(value >= 0 for value in one.losses.ns.values())
        order = [(m.t, list(MOMENTS).index(m.what)) for m in one.moments]
        assert order == sorted(order)
        assert one.begun_s <= one.over_s


def lost_node() -> Made:
    """Node 2 is gone 3 s after step 15; the newest snapshot is of step 10. Node 1 goes on alone 5 s
    after the loss; node 3 comes in the place of node 2."""
    made = Made().ask(1, 2).form(1, 2).train(15, every=5)  # steps begin at 12 s
    made.records = [r for r in made.records if r.step <= 10]
    made.facts = [
        s for s in made.facts
        if not (isinstance(s.fact, f.SnapshotCommitted) and s.fact.step == 15)
    ]  # fmt: skip
    made.committed = 10
    made.t += 3.0  # 30 s
    made.gone(2)
    made.t += 2.0
    made.broke(1).form(1, reason="loss")  # trains from 34 s
    made.train(3)  # steps 11 to 13
    made.ask(3, boot_s=0.0)  # 37 s
    made.train(5)  # 18, at 42 s; 15 is done again at 39 s
    made.drain("resize").form(1, 3, reason="grow")  # drained at 44.5 s, trains from 46.5 s
    return made.train(4).finish()
