"""Situations in which alerts fire, as facts made by hand: one for every rule that ships."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.world import Offer
from harness.look.alerts.alert_rules import EvaluatorInputs

T0 = 1_767_225_600.0
OFFER = Offer(2.0, "aws/us-east-1/a/g6e.xlarge", accelerator="L40S", gpus=1, on_demand_usd_per_h=4)
MINUTE, HOUR = 60.0, 3600.0


@dataclass
class Made:
    """Facts as they are told, and a clock."""

    t: float = T0
    facts: list[Stamped] = field(default_factory=list)
    sight: EvaluatorInputs = field(default_factory=EvaluatorInputs)  # at the end
    epoch: int = 0

    def say(self, *facts: f.Fact) -> "Made":
        for fact in facts:
            self.t += 0.01
            self.facts.append(Stamped(self.t, "w", fact))
        return self

    def wait(self, seconds: float) -> "Made":
        self.t += seconds
        return self

    def asked(self, **limits: float) -> "Made":
        asked = f.RunAsked("train.yaml", 1, 2, "cheapest", **limits)
        return self.say(asked, f.LeaseTaken(1, "laptop:1:aa"))

    def node(self, attempt: int) -> "Made":
        self.say(f.AttemptIntended(attempt, asdict(OFFER)), f.AttemptUp(attempt, self.t))
        return self.say(f.AgentStarted(f"m{attempt}", attempt, "h"))

    def world(self, *attempts: int, reason: str = "start", total: int = 100_000) -> "Made":
        self.epoch += 1
        members = tuple(f"m{a}" for a in attempts)
        session = f.SessionStarted(self.epoch, len(attempts), 0, 0, total, 64, 4)
        return self.say(f.EpochStarted(self.epoch, members, len(attempts), reason), session)

    def commit(self, step: int) -> "Made":
        return self.say(f.SnapshotCommitted(step, self.epoch, 1, 0.1, 1.0, "interval", self.t))

    def trains(self, first: int, last: int, seconds: float = 1.0, loss: float = 2.0) -> "Made":
        for step in range(first, last + 1):
            self.t += seconds
            wobble = 0.01 * (step % 7)
            self.facts.append(
                Stamped(
                    self.t,
                    "w",
                    f.StepDone(step, self.epoch, loss + wobble, self.t - seconds, seconds),
                )
            )
        return self


def start(**limits: float) -> Made:
    return Made().asked(**limits).node(1).node(2).wait(5).world(1, 2)


def notice() -> Made:
    return start().say(*(f.NoticeSeen("m1", s, "kill", "n", T0 + 99) for s in ("aws", "signal")))


def grace() -> Made:
    spent = f.GraceSpent("m1", 1, T0, 12, 10, "2 steps are lost")
    return start().say(spent, f.GraceSpent("m2", 1, T0, 10, 10))


def drain() -> Made:
    lost = f.DrainVerdict("m1", 12, 1, 0, False, 10, True, 5.0, 3.0)
    return start().say(lost, f.DrainVerdict("m1", 12, 1, 1, False, 10, True, 5.0, 3.0))


def lost() -> Made:
    """Told by both: the other node at once, the controller later."""
    made = start().say(f.EpochLeft(1, "m2", "peer-lost")).world(2, reason="loss").wait(40)
    ended = f.AttemptEnded(1, "preempted", T0, T0, made.t, None, "killed", 60.0, 0.03)
    return made.say(ended)


def refused_agent() -> Made:
    return start().say(f.AgentEnded("m1", 37, "unfit: xid 79"), f.AgentEnded("m2", 33, "notice"))


def failed() -> Made:
    broken = f.WorkerFailed("m1", 1, 0, 1, "ValueError", "bad sample")
    aftermath = f.WorkerFailed("m2", 1, 1, 1, "RuntimeError", "Connection closed by peer")
    left = f.EpochLeft(1, "m1", "failed"), f.EpochLeft(1, "m2", "peer-lost")
    return start().say(broken, aftermath, *left)


def out_of_memory() -> Made:
    killed = f.WorkerFailed("m1", 1, 0, -9, f.OOM_KILLED, "killed by the kernel's OOM killer")
    aftermath = f.WorkerFailed("m2", 1, 1, 1, "PeerLost", "Connection closed by peer")
    left = f.EpochLeft(1, "m1", "killed"), f.EpochLeft(1, "m2", "peer-lost")
    return start().say(killed, aftermath, *left)


def hung() -> Made:
    who = [f.WorkerHung("m1", 1, r, 7, "reducing", 400.0, r == 1, "no step") for r in (0, 1)]
    return start().say(*who, f.EpochLeft(1, "m1", "hung"))


def loop() -> Made:
    made = start()
    for _ in range(4):
        made.say(*(f.EpochLeft(made.epoch, m, "hung") for m in ("m1", "m2"))).wait(30).world(1, 2)
    return made


def gpu() -> Made:
    sick = f.HealthSeen("m1", "GPU-1", "xid 79", "it has fallen off the bus", "kill")
    return start().say(sick, f.HealthSeen("m2", "GPU-2", "xid 31", "application", "ignore"))


def guard() -> Made:
    return start().say(f.GuardTripped(9, 1, "non-finite", float("nan")))


def skipped() -> Made:
    where = "micro-batch 3 of rank 1 (samples 5, 8)"
    said = f.StepSkipped(9, 1, "the loss is nan", float("nan"), float("nan"), (3,), (1,), where)
    return start().say(said, f.StepSkipped(10, 1, "the loss is nan", float("nan"), float("nan")))


def spike() -> Made:
    return start().trains(1, 100).trains(101, 103, loss=9.0).trains(104, 110)


def snapshot_failed() -> Made:
    return start().say(*(f.SnapshotFailed(10, 1, "AccessDenied") for _ in range(3)))


def quarantined() -> Made:
    return start().say(f.SnapshotQuarantined(10, 1, "part 3 is damaged"))


def warned() -> Made:
    return start().say(*(f.Warned(n, 1, f"torch 2.{n} was 2.13") for n in (11, 12)))


def setup() -> Made:
    changed = {"level": "code", "name": "git.commit", "was": "a1", "now": "b2"}
    other = {"level": "hardware", "name": "gpu", "was": "H100", "now": "L40S"}
    facts = f.SetupChanged(2, "ab", "warned", (changed,)), f.SetupChanged(3, "ac", "warned", (other,))
    return start().say(*facts)


def publisher() -> Made:
    return start().say(f.HelperEnded("m1", "trackers", -9), f.HelperEnded("m1", "trackers", -9))


def helper() -> Made:
    return start().say(f.HelperEnded("m1", "replica", 1, "AccessDenied"))


def ended() -> Made:
    return start().say(f.RunEnded("failed", "the script failed 3 times in a row", 40))


def store() -> Made:
    made = start().wait(200)
    made.sight = EvaluatorInputs(bucket_silent_s=95.0)
    return made


def capacity() -> Made:
    made = Made().asked()
    for attempt in range(1, 16):
        refused = f.AttemptEnded(attempt, "no-capacity", made.t, None, made.t, None, "", 0.0, 0.0)
        made.say(f.AttemptIntended(attempt, asdict(OFFER))).wait(60).say(refused)
    return made


def leaderless() -> Made:
    made = start().trains(1, 5).wait(100)
    made.sight = EvaluatorInputs(leader_silent_s=made.t - 90)
    return made


def deadline() -> Made:
    """1000 steps, 100 an hour, eight hours."""
    made = Made().asked(max_hours=8.0).node(1).node(2).world(1, 2, total=1000)
    for step in range(20, 340, 20):
        made.trains(step - 19, step, 36.0).commit(step)
    return made


def budget() -> Made:
    """Two nodes at 2 USD an hour, 10 hours of work, 30 USD."""
    made = Made().asked(budget_usd=30.0).node(1).node(2).world(1, 2, total=1000)
    for step in range(20, 240, 20):
        made.trains(step - 19, step, 36.0).commit(step)
    return made


def late() -> Made:
    made = start()
    for step in range(10, 60, 10):
        made.trains(step - 9, step, 6.0).commit(step)
    return made.trains(51, 120, 6.0)


def replica() -> Made:
    made = start().trains(1, 10, 25.0).commit(10)
    made.say(f.SnapshotReplicated(10, 1, "gs://second", 1, 1.0, 0.01))
    for step in range(20, 80, 10):
        made.trains(step - 9, step, 25.0).commit(step)
    return made


def idle() -> Made:
    made = start()
    for n in range(12):
        busy = {"gpu0/percent": 97.0, "gpu1/percent": 3.0, "cpu/percent": 2.0}
        made.trains(n * 60 + 1, n * 60 + 60).commit(n * 60 + 60)
        made.say(f.NodeMeasured("m1", 60.0, busy))
    return made


def slower() -> Made:
    return start().trains(1, 60).trains(61, 220, 1.6)


SITUATIONS: dict[str, Callable[[], Made]] = {
    "notice-seen": notice,
    "grace-spent": grace,
    "drain-lost": drain,
    "node-lost": lost,
    "agent-ended": refused_agent,
    "worker-failed": failed,
    "out-of-memory": out_of_memory,
    "worker-hung": hung,
    "crash-loop": loop,
    "gpu-health": gpu,
    "guard-tripped": guard,
    "step-skipped": skipped,
    "loss-spike": spike,
    "snapshot-failed": snapshot_failed,
    "snapshot-quarantined": quarantined,
    "promise-weakened": warned,
    "setup-changed": setup,
    "publisher-dead": publisher,
    "helper-dead": helper,
    "run-ended-badly": ended,
    "store-trouble": store,
    "no-capacity": capacity,
    "controller-gone": leaderless,
    "deadline-at-risk": deadline,
    "budget-at-risk": budget,
    "snapshot-late": late,
    "replica-behind": replica,
    "idle-gpu": idle,
    "throughput-regression": slower,
}
