"""The loop, one situation at a time; and a controller that dies at every single operation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import DOUBT, LEAVE, STOP_KEY, WITHOUT_SESSION
from harness.controller.policies import cheapest
from harness.controller.recovery import RunOutcome, counted, done_in_words, recover
from harness.controller.run_limits import RunSpec
from harness.core.facts import (
    AttemptDoubted,
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    Decided,
    Fact,
    LeaseTaken,
    RunEnded,
    Stamped,
)
from harness.core.world import (
    REFUSED,
    BadInput,
    CloudUnavailable,
    Decision,
    Fenced,
    Launch,
    Node,
    NodeState,
    Offer,
    Policy,
    Terminate,
    View,
    Wait,
    World,
)
from harness.ledger.attempts import AttemptHistory, how_it_ended
from harness.ledger.bill import bill
from storage.canonical_json import canonical, digest
from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.manifest import Ref, SnapshotTooNew
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from storage.testing.faulty_store import Crash
from support.clock import PlayedClock

T = TypeVar("T")
SPOT, DEAR = Offer(1.0, "spot"), Offer(3.0, "dear", spot=False)


class Cloud:
    """Nodes are up after 3 s and gone 1 s after they are told to. `script` gets every node that
    comes up."""

    def __init__(self, clock: PlayedClock, script: Callable[[Cloud, int], None] | None = None):
        self.clock, self.script, self.all = clock, script, dict[int, Node]()
        self.full: set[str] = set()
        self.immortal = False

    def offers(self) -> Sequence[Offer]:
        return (DEAR, SPOT)

    def nodes(self) -> Sequence[Node]:
        return list(self.all.values())

    def launch(self, attempt: int, offer: Offer) -> None:
        if attempt not in self.all:
            self.all[attempt] = Node(attempt, offer, NodeState.PENDING, asked_s=self.clock.now())
            self.clock.after(3.0, lambda: self.arrive(attempt))

    def arrive(self, attempt: int) -> None:
        node = self.all[attempt]
        if node.offer.name in self.full:
            self.all[attempt] = dataclasses.replace(
                node, state=NodeState.NO_CAPACITY, gone_s=self.clock.now()
            )
        elif node.alive:
            self.all[attempt] = dataclasses.replace(node, state=NodeState.UP, up_s=self.clock.now())
            if self.script:
                self.script(self, attempt)

    def terminate(self, attempt: int) -> None:
        if attempt in self.all and not self.immortal:
            self.clock.after(1.0, lambda: self.end(attempt, None, "terminated"))

    def end(self, attempt: int, code: int | None, reason: str = "exited") -> None:
        if self.all[attempt].alive:
            gone = {
                "state": NodeState.GONE,
                "gone_s": self.clock.now(),
                "exit_code": code,
                "reason": reason,
            }
            self.all[attempt] = dataclasses.replace(self.all[attempt], **gone)  # type: ignore[arg-type]

    @property
    def alive(self) -> list[int]:
        return [n.attempt for n in self.all.values() if n.alive]


class Stage:
    """A run in a bucket, a clock, and a cloud; `lead` is one controller's turn."""

    def __init__(self, script: Callable[[Cloud, int], None] | None = None):
        self.clock, self.store = PlayedClock(), MemoryStore("memory://run", {})
        self.clock.horizon_s = 1_000_000
        self.cloud, self.turns = Cloud(self.clock, script), 0

    def commit(self, step: int, final: bool = False, epoch: int = 1) -> None:
        snapshots = Snapshots(self.store)
        snapshots.write(Ref(epoch, step), 0, 1, {"s": b"%d" % step}, {}, {"final": final}, "t")
        snapshots.commit(Ref(epoch, step), 1)

    def lead(
        self,
        run: RunSpec | None = None,
        policy: Policy = cheapest,
        store: ObjectStore | None = None,
        cloud: object = None,
    ) -> RunOutcome:
        self.turns += 1
        store = store or self.store
        name = f"controller-{self.turns}"
        world = World(self.clock, cloud or self.cloud, store, random.Random(1))  # type: ignore[arg-type]
        return recover(
            run or RunSpec(),
            policy,
            world,
            Journal(store, name, self.clock.now),
            Lease(store, self.clock, name),
        )

    def facts(self, kind: type[T]) -> list[T]:
        return [s.fact for s in read_facts(self.store) if isinstance(s.fact, kind)]


def trains(stage: Callable[[], Stage], seconds: float = 50.0) -> Callable[[Cloud, int], None]:
    """A node that commits step 10 after 20 s and the last one at the end, and exits 0."""

    def script(cloud: Cloud, attempt: int) -> None:
        def finish() -> None:
            if cloud.all[attempt].alive:
                stage().commit(20, final=True)
                cloud.clock.after(1.0, lambda: cloud.end(attempt, 0))

        cloud.clock.after(20.0, lambda: stage().commit(10) if cloud.all[attempt].alive else None)
        cloud.clock.after(seconds, finish)

    return script


@pytest.fixture
def stage() -> Stage:
    made: list[Stage] = []
    made.append(Stage(trains(lambda: made[0])))
    return made[0]


def test_a_run_is_led_to_its_end(stage: Stage) -> None:
    assert stage.lead() == RunOutcome("done", "finished at step 20", 20)
    assert [f.attempt for f in stage.facts(AttemptIntended)] == [1]
    (ended,) = stage.facts(AttemptEnded)
    assert (ended.end, ended.exit_code, ended.billed_s) == ("finished", 0, 51.0)
    assert ended.usd == pytest.approx(51 / 3600)
    assert stage.facts(RunEnded) == [RunEnded("done", "finished at step 20", 20)]


def test_nothing_is_launched_for_a_run_that_is_done(stage: Stage) -> None:
    stage.commit(20, final=True)
    assert stage.lead().outcome == "done"
    assert not stage.cloud.all


def test_a_lost_node_is_replaced(stage: Stage) -> None:
    stage.clock.after(30.0, lambda: stage.cloud.end(1, None, "preempted"))
    assert stage.lead().outcome == "done"
    assert [f.end for f in stage.facts(AttemptEnded)] == ["preempted", "finished"]
    assert stage.facts(AttemptEnded)[0].committed_step == 10


def test_the_intent_is_durable_before_the_launch(stage: Stage) -> None:
    class Watching(Cloud):
        def launch(self, attempt: int, offer: Offer) -> None:
            assert attempt in {f.attempt for f in stage.facts(AttemptIntended)}
            super().launch(attempt, offer)

    watching = Watching(stage.clock, stage.cloud.script)
    assert stage.lead(cloud=watching).outcome == "done"
    assert watching.all


def test_a_full_offer_is_asked_ever_more_rarely(stage: Stage) -> None:
    stage.cloud.full = {"spot", "dear"}
    stage.clock.after(600.0, stage.cloud.full.clear)
    assert stage.lead().outcome == "done"
    asked = [
        f.asked_s for f in stage.facts(AttemptEnded) if f.end == "no-capacity" and f.attempt % 2
    ]
    assert 10 < len(stage.facts(AttemptEnded)) < 60
    assert max(b - a for a, b in itertools.pairwise(asked)) > 20


def test_leftover_nodes_are_sent_away_when_it_is_done(stage: Stage) -> None:
    """The second node never exits by itself."""
    assert stage.lead(RunSpec(1, 2, exit_grace_s=30.0)).outcome == "done"
    assert not stage.cloud.alive


def test_a_node_that_cannot_be_ended_is_named(stage: Stage) -> None:
    stage.cloud.script, stage.cloud.immortal = None, True
    stage.clock.after(
        10.0,
        lambda: stage.store.put(STOP_KEY, b'{"reason": "enough", "by": "user", "failed": false}'),
    )
    outcome = stage.lead(RunSpec(exit_grace_s=10.0, terminate_timeout_s=60.0))
    assert outcome.outcome == "failed"
    assert "enough; but STILL RUNNING AND BILLED" in outcome.reason
    assert "attempts 1 (spot, launched by " in outcome.reason


def test_what_a_cloud_says_after_a_silence_is_looked_at_again_before_it_is_called_running(
    stage: Stage,
) -> None:
    """It was silent for longer than nodes may take to be gone, and what it says first is old."""

    class Late(Cloud):
        def nodes(self) -> Sequence[Node]:
            if 20 < self.clock.now() < 220:
                raise CloudUnavailable("no answer")
            old = [dataclasses.replace(n, state=NodeState.UP, gone_s=None) for n in super().nodes()]
            return old if 220 <= self.clock.now() < 230 else super().nodes()

    late = Late(stage.clock)
    stage.clock.after(10.0, lambda: stage.store.put(STOP_KEY, b"enough"))
    stage.clock.after(15.0, lambda: late.end(1, 35))
    spec = RunSpec(exit_grace_s=10.0, terminate_timeout_s=60.0)
    assert stage.lead(spec, cloud=late).outcome == "stopped"


@pytest.mark.parametrize(("failed", "outcome"), [(False, "stopped"), (True, "failed")])
def test_a_stop_request_is_carried_out(stage: Stage, failed: bool, outcome: str) -> None:
    request = json.dumps({"reason": "loss is NaN", "by": "guard", "failed": failed}).encode()
    stage.clock.after(25.0, lambda: stage.store.put(STOP_KEY, request))
    assert stage.lead(RunSpec(exit_grace_s=5.0)) == RunOutcome(outcome, "loss is NaN", 10)
    assert not stage.cloud.alive
    assert stage.lead() == RunOutcome(outcome, "loss is NaN", 10), (
        "a restarted controller goes on stopping"
    )
    stage.store.delete(STOP_KEY)
    assert stage.lead().outcome == "done"


def test_a_script_that_always_fails_is_not_retried_for_ever(stage: Stage) -> None:
    stage.cloud.script = lambda cloud, attempt: cloud.clock.after(
        5.0, lambda: cloud.end(attempt, 1)
    )
    outcome = stage.lead()
    assert (outcome.outcome, len(stage.cloud.all)) == ("failed", 3)
    assert "the nodes' command failed 3 times in a row after step 0" in outcome.reason


@pytest.mark.parametrize("code", [-9, 137])
def test_killed_agents_are_no_failures_of_the_script(stage: Stage, code: int) -> None:
    """Out of memory, or a job step that somebody killed: the node is replaced, and it is said."""
    killed: list[int] = []

    def script(cloud: Cloud, attempt: int) -> None:
        if len(killed) < 5:
            killed.append(attempt)
            cloud.clock.after(5.0, lambda: cloud.end(attempt, code))

    stage.cloud.script = script
    stage.lead(RunSpec(max_hours=0.5))
    assert len(killed) == 5 < len(stage.cloud.all)
    ends = stage.facts(AttemptEnded)[:5]
    assert {e.end for e in ends} == {"killed"}
    assert {e.reason for e in ends} == {
        "its command was killed by SIGKILL, as the kernel does when memory runs out"
    }


def test_nodes_that_fail_together_are_one_failure(stage: Stage) -> None:
    stage.cloud.script = lambda cloud, attempt: cloud.clock.after(
        5.0, lambda: cloud.end(attempt, 1)
    )
    assert stage.lead(RunSpec(1, 4)).outcome == "failed"
    assert len(stage.cloud.all) == 12


def test_failures_with_progress_between_them_do_not_add_up(stage: Stage) -> None:
    def script(cloud: Cloud, attempt: int) -> None:
        cloud.clock.after(5.0, lambda: stage.commit(attempt, final=attempt == 6))
        cloud.clock.after(6.0, lambda: cloud.end(attempt, 1))

    stage.cloud.script = script
    assert stage.lead().outcome == "done"


def test_attempts_without_progress_have_a_limit(stage: Stage) -> None:
    stage.cloud.script = lambda cloud, attempt: cloud.clock.after(
        5.0, lambda: cloud.end(attempt, None, "preempted")
    )
    outcome = stage.lead(RunSpec(max_attempts_without_progress=7))
    assert (outcome.outcome, len(stage.cloud.all)) == ("failed", 7)
    assert "7 attempts in a row ended without a new snapshot after step 0" in outcome.reason


def test_a_run_that_hangs_has_a_limit(stage: Stage) -> None:
    stage.cloud.script = None
    outcome = stage.lead(RunSpec(max_hours_without_progress=0.5))
    assert outcome.outcome == "failed"
    assert outcome.reason.endswith("for 0.5 h, though nodes are up")


def test_limits_count_anew_after_a_run_was_ended(stage: Stage) -> None:
    good, stage.cloud.script = (
        stage.cloud.script,
        lambda cloud, attempt: cloud.clock.after(5.0, lambda: cloud.end(attempt, 1)),
    )
    assert stage.lead().outcome == "failed"
    stage.cloud.script = good  # the user repaired the script
    stage.store.delete(STOP_KEY)
    assert stage.lead().outcome == "done"


def test_a_policy_cannot_have_more_than_max_nodes(stage: Stage) -> None:
    stage.lead(RunSpec(1, 2, exit_grace_s=5.0), policy=lambda view: Launch(SPOT, "more"))
    assert len(stage.cloud.all) == 2


def test_a_node_instead_of_another_is_beside_it_until_it_is_at_work(stage: Stage) -> None:
    def dear(view: View) -> Decision:
        if not view.alive:
            return Launch(SPOT)
        if view.alive[-1].offer == SPOT and view.alive[-1].up_s is not None:
            return Launch(DEAR, "surer", instead_of=view.alive[-1].attempt)
        return Wait(1.0)

    stage.cloud.script = trains(lambda: stage, seconds=500.0)
    assert stage.lead(policy=dear).outcome == "done"
    spot, instead = stage.facts(AttemptEnded)
    assert (spot.attempt, instead.attempt) == (1, 2) and spot.end == "terminated"
    assert instead.up_s is not None and 60 <= spot.gone_s - instead.up_s < 400
    assert [f.instead_of for f in stage.facts(AttemptIntended)] == [None, 1]


def test_a_node_that_may_not_stay_gets_another_one_beside_it_and_is_released(stage: Stage) -> None:
    def leaves_when_asked(attempt: int) -> None:
        if f"{LEAVE}{attempt:06d}.json" in stage.store.list(LEAVE):
            stage.cloud.end(attempt, 33)
        elif stage.cloud.all[attempt].alive:
            stage.clock.after(1.0, lambda: leaves_when_asked(attempt))

    stage.cloud.script = trains(lambda: stage, seconds=300.0)
    stage.clock.after(20.0, lambda: stage.store.put(f"{DOUBT}000001.json", b"{}"))
    stage.clock.after(21.0, lambda: leaves_when_asked(1))
    assert stage.lead().outcome == "done"
    first, second = stage.facts(AttemptEnded)
    assert (first.attempt, first.end, second.attempt, second.end) == (1, "drained", 2, "finished")
    assert second.up_s is not None and 60.0 <= first.gone_s - second.up_s <= 70.0  # settled first
    assert stage.facts(AttemptDoubted) == [AttemptDoubted(1, True)]
    released = [f for f in stage.facts(Decided) if f.decision == "release"]
    assert released == [Decided("release", "attempt 1: its replacement is there")]


def test_a_node_that_stays_after_all_makes_the_other_one_leave(stage: Stage) -> None:
    stage.cloud.script = trains(lambda: stage, seconds=900.0)
    stage.clock.after(20.0, lambda: stage.store.put(f"{DOUBT}000001.json", b"{}"))
    stage.clock.after(40.0, lambda: stage.store.delete(f"{DOUBT}000001.json"))
    assert stage.lead().outcome == "done"
    ended = {f.attempt: f for f in stage.facts(AttemptEnded)}
    assert [ended[n].end for n in (1, 2)] == ["finished", "terminated"]
    assert f"{LEAVE}000002.json" in stage.store.list(LEAVE)  # asked first; it did not listen
    assert ended[2].up_s is not None and ended[2].billed_s >= 300.0
    assert stage.facts(AttemptDoubted) == [AttemptDoubted(1, True), AttemptDoubted(1, False)]


def test_a_successor_knows_who_may_not_stay(stage: Stage) -> None:
    book = AttemptHistory.of(
        [
            Stamped(float(t), "controller-1", f)
            for t, f in enumerate(
                (
                    AttemptIntended(1, dataclasses.asdict(SPOT)),
                    AttemptUp(1, 1.0),
                    AttemptDoubted(1, True),
                    AttemptDoubted(9, True),
                )
            )
        ],
        random.Random(1),
    )
    assert book.doubted == {1}
    book.add(9.0, AttemptEnded(1, "drained", 0.0, 1.0, 9.0, 33, "exited", 8.0, 0.0))
    assert book.doubted == set()


def test_terminate_is_told_once_in_a_while(stage: Stage) -> None:
    told: list[float] = []

    class Slow(Cloud):
        def terminate(self, attempt: int) -> None:
            told.append(self.clock.now())
            self.clock.after(70.0, lambda: self.end(attempt, None, "terminated"))

    def policy(view: View) -> Launch | Terminate | Wait:
        if not view.attempts:
            return Launch(SPOT)
        return Terminate(1, "away") if view.alive else Wait(1, "idle")

    stage.clock.after(100.0, lambda: stage.commit(1, final=True))
    stage.lead(policy=policy, cloud=Slow(stage.clock))
    assert len(told) == 3  # at 0, 30 and 60 s
    assert [f.end for f in stage.facts(AttemptEnded)] == ["terminated"]


def test_waits_are_recorded_once_per_reason(stage: Stage) -> None:
    stage.lead()
    reasons = [f.reason for f in stage.facts(Decided) if f.decision == "wait"]
    assert reasons == ["all nodes are there"]  # for 50 s


# ---- taking over ---------------------------------------------------------------------------------
def intend(stage: Stage, *facts: Fact) -> None:
    journal = Journal(stage.store, "controller-before", stage.clock.now)
    for fact in facts:
        journal.record(fact)
    journal.flush()


def test_a_living_node_is_adopted(stage: Stage) -> None:
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(7, dataclasses.asdict(SPOT)))
    stage.cloud.launch(7, SPOT)
    assert stage.lead().outcome == "done"
    assert list(stage.cloud.all) == [7]


def test_an_intent_that_was_never_launched_costs_nothing(stage: Stage) -> None:
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(7, dataclasses.asdict(SPOT)))
    assert stage.lead(RunSpec(lost_after_s=10.0)).outcome == "done"
    lost, ended = stage.facts(AttemptEnded)
    assert (lost.attempt, lost.end, lost.billed_s, lost.usd) == (7, "lost", 0.0, 0.0)
    assert ended.attempt == 8
    assert stage.cloud.all[8].asked_s >= 10.0, "it may still come: until then its place is taken"


@pytest.mark.parametrize(
    ("member", "billed_s"),
    [
        # by its agent's 20 beats of 10 s, between a launch of 40 s and an end of 30 s
        ({"state": "gone", "beat": 20}, 40 + 20 * 10 + 30),
        ({"state": "in", "beat": 20}, 40 + 20 * 10 + 30),
        # nobody knows for how long: until now
        ({"state": "gone"}, 500),
        ({"state": "gone", "beat": 10**9}, 500),
    ],
)
def test_a_node_that_came_and_went_unseen_is_billed_by_its_members_beats(
    stage: Stage, member: dict[str, object], billed_s: float
) -> None:
    """Its controller had died, and this cloud does not show it."""
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(7, dataclasses.asdict(SPOT)))
    stage.clock.sleep(500)
    stage.store.put("rdzv/members/m0007-aa.json", json.dumps(member).encode())
    outcome = stage.lead(RunSpec(lost_after_s=10.0, launch_s=40.0, terminate_s=30.0))
    lost = stage.facts(AttemptEnded)[0]
    assert (lost.attempt, lost.end, lost.up_s) == (7, "lost", 0.0)
    assert billed_s <= lost.billed_s < billed_s + 30
    assert (outcome.outcome, outcome.unproven) == ("done", (7,)), "no cloud has proven its end"


def test_a_member_that_is_found_after_its_attempt_was_given_up_is_billed(stage: Stage) -> None:
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(7, dataclasses.asdict(SPOT)))
    gone = json.dumps({"state": "gone", "beat": 1}).encode()
    stage.clock.after(30.0, lambda: stage.store.put("rdzv/members/m0007-aa.json", gone))
    stage.lead(RunSpec(lost_after_s=10.0, launch_s=5.0, terminate_s=5.0))
    given_up, found = [f for f in stage.facts(AttemptEnded) if f.attempt == 7]
    assert (given_up.up_s, given_up.usd) == (None, 0.0)
    assert (found.end, found.up_s) == ("lost", 0.0)
    assert found.billed_s == pytest.approx(5 + 10 + 5, abs=1), "launch, one beat, end"


def test_a_node_that_the_cloud_forgot_is_billed_until_now(stage: Stage) -> None:
    intend(
        stage, LeaseTaken(1, "x"), AttemptIntended(7, dataclasses.asdict(SPOT)), AttemptUp(7, 0.0)
    )
    stage.clock.sleep(100)
    stage.lead(RunSpec(lost_after_s=10.0))
    lost = stage.facts(AttemptEnded)[0]
    assert (lost.end, lost.up_s) == ("lost", 0.0)
    assert 110 <= lost.billed_s < 115


def test_a_node_that_nobody_intended_is_sent_away_and_billed(stage: Stage) -> None:
    stage.cloud.launch(99, DEAR)
    stage.clock.sleep(30)
    assert stage.lead().outcome == "done"
    assert not stage.cloud.alive
    bills = {f.attempt: f for f in stage.facts(AttemptEnded)}
    assert bills[99].billed_s == stage.cloud.all[99].gone_s - 3.0  # type: ignore[operator]


def test_a_lost_node_that_turns_up_is_sent_away_and_billed(stage: Stage) -> None:
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(1, dataclasses.asdict(SPOT)))
    stage.clock.after(22.0, lambda: stage.cloud.launch(1, SPOT))
    stage.clock.after(22.0, lambda: stage.cloud.arrive(1))
    stage.lead(RunSpec(lost_after_s=10.0))
    bills = [f for f in stage.facts(AttemptEnded) if f.attempt == 1]
    assert [f.end for f in bills] == ["lost", "terminated"]
    assert bills[1].billed_s > 0
    assert AttemptHistory.of(read_facts(stage.store), random.Random(0)).ended[1] == bills[1]


def test_a_stray_is_waited_for_before_the_run_ends(stage: Stage) -> None:
    stage.commit(20, final=True)
    stage.cloud.launch(99, SPOT)
    assert stage.lead().outcome == "done"
    assert not stage.cloud.alive
    assert {f.attempt for f in stage.facts(AttemptEnded)} == {99}


def test_time_without_a_controller_is_not_held_against_the_run(stage: Stage) -> None:
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(1, dataclasses.asdict(SPOT)))
    stage.clock.sleep(3 * 24 * 3600 - 1)
    assert stage.lead().outcome == "done"


class Skewed:
    """A controller's clock that is wrong by so much."""

    def __init__(self, clock: PlayedClock, by_s: float):
        self._clock, self._by_s = clock, by_s

    def now(self) -> float:
        return self._clock.now() + self._by_s

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


@pytest.mark.parametrize(
    ("skew_h", "left_h"),
    # 3 of 10 hours were over by the clock of the controller before. One that is far ahead counts
    # an hour at most beyond what nodes prove; one that is behind gives none of it away
    [(0.0, 7.0), (0.5, 6.5), (30.0, 6.0), (-2.0, 7.0), (-30.0, 7.0)],
)
def test_a_wrong_clock_of_a_successor_neither_takes_hours_nor_gives_them(
    stage: Stage, skew_h: float, left_h: float
) -> None:
    h = 3600.0
    stage.clock.sleep(100 * h)
    intend(stage, LeaseTaken(1, "x"))
    stage.clock.sleep(3 * h)
    second = Journal(stage.store, "controller-2", stage.clock.now)
    second.record(AttemptIntended(1, dataclasses.asdict(SPOT)))
    second.flush()
    began_s = stage.clock.now()
    stage.cloud.script = None
    world = World(Skewed(stage.clock, skew_h * h), stage.cloud, stage.store, random.Random(1))
    journal = Journal(stage.store, "controller-3", world.clock.now)
    spec = RunSpec(max_hours=10.0, poll_s=60.0, max_hours_without_progress=1000.0)
    outcome = recover(spec, cheapest, world, journal, Lease(stage.store, world.clock, "third"))
    assert outcome.outcome == "stopped" and "10 h" in outcome.reason
    assert (stage.clock.now() - began_s) / h == pytest.approx(left_h, abs=0.1)
    told = [f.reason for f in stage.facts(Decided) if "clock of this controller" in f.reason]
    assert bool(told) == (abs(skew_h) >= 1), "the difference is named"


def test_hours_that_nodes_prove_count_whatever_a_successors_clock_says(stage: Stage) -> None:
    h = 3600.0
    for skew_h, want_h in ((0.0, 5.0), (20.0, 6.0), (-4.0, 5.0), (-20.0, 5.0)):
        store = MemoryStore("memory://run", {})
        for writer, t in (("m0001-aa", 5 * h), ("m0002-aa", 5 * h + 5), ("m0003-aa", 900 * h)):
            journal = Journal(store, writer, lambda t=t: t)  # type: ignore[misc]
            journal.record(Decided("wait"))
            journal.flush()
        counted_s, words = counted(store, 0.0, (5.0 + skew_h) * h)
        assert counted_s == pytest.approx(want_h * h, abs=10)
        assert bool(words) == bool(skew_h)


def test_an_unreadable_stop_request_stops(stage: Stage) -> None:
    stage.store.put(STOP_KEY, b"please")
    assert stage.lead() == RunOutcome("stopped", "stop requested (control/stop.json is unreadable)", 0)


def test_a_controller_that_hung_is_fenced_when_it_wakes(stage: Stage) -> None:
    class Hanging(Cloud):
        def nodes(self) -> Sequence[Node]:
            # in this call, a second controller leads the run to its end
            if self.clock.now() > 10 and stage.turns == 1:
                assert stage.lead().outcome == "done"
            return super().nodes()

    stage.cloud = Hanging(stage.clock, stage.cloud.script)
    with pytest.raises(Fenced, match=r"controller-2 has taken over .*\(term 2, ours was 1\)"):
        stage.lead()
    assert len(stage.facts(RunEnded)) == 1


def test_a_second_controller_is_refused_while_the_first_lives(stage: Stage) -> None:
    first = Lease(stage.store, stage.clock, "first", ttl_s=5.0)
    first.acquire()

    def beat() -> None:
        first.renew()
        stage.clock.after(1.0, beat)

    beat()
    with pytest.raises(Fenced, match="first is already leading this run"):
        stage.lead()
    assert not stage.cloud.all
    assert not read_facts(stage.store)


def test_a_silent_cloud_is_waited_for_but_not_for_ever(stage: Stage) -> None:
    class Silent(Cloud):
        def nodes(self) -> Sequence[Node]:
            if 10 < self.clock.now() < 310:
                raise CloudUnavailable("no answer")
            return super().nodes()

    assert stage.lead(cloud=Silent(stage.clock, stage.cloud.script)).outcome == "done"
    other = Stage()
    with pytest.raises(CloudUnavailable):
        other.lead(RunSpec(max_outage_s=60.0), cloud=Silent(other.clock))
    assert 70 <= other.clock.now() < 80


def test_a_silent_bucket_is_waited_for(stage: Stage) -> None:
    class Silent(MemoryStore):
        def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
            if 10 < stage.clock.now() < 40:
                raise StoreUnavailable("no answer")
            return super().get(key, start, end)

    objects: dict[str, bytes] = {}
    stage.store = MemoryStore("memory://run", objects)
    assert stage.lead(store=Silent("memory://run", objects)).outcome == "done"


class Refusing(MemoryStore):
    """Answers 403 to this controller from one moment to another."""

    def __init__(self, stage: Stage, from_s: float, until_s: float):
        super().__init__("memory://run", stage.store._objects)
        self.stage, self.from_s, self.until_s = stage, from_s, until_s

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if self.from_s <= self.stage.clock.now() < self.until_s:
            raise StoreError("403: permission denied")
        return super().get(key, start, end)


def test_a_bucket_that_refuses_us_for_a_moment_is_waited_for(stage: Stage) -> None:
    """Credentials that are renewed: 403 for a while, for the controller only."""
    stage.cloud.script = trains(lambda: stage, seconds=100.0)
    assert stage.lead(store=Refusing(stage, 20.0, 80.0)).outcome == "done"
    assert list(stage.cloud.all) == [1]


@pytest.mark.parametrize("until_s", [1000.0, 1e9])
def test_a_bucket_that_goes_on_refusing_ends_the_controller_and_no_node(
    stage: Stage, until_s: float
) -> None:
    stage.cloud.script = trains(lambda: stage, seconds=2000.0)
    with pytest.raises(StoreError, match="permission denied"):
        stage.lead(RunSpec(max_refused_s=60.0), store=Refusing(stage, 20.0, until_s))
    assert 80 <= stage.clock.now() < 90
    assert stage.cloud.alive == [1]
    assert stage.lead().outcome == "done"  # its successor has credentials
    assert list(stage.cloud.all) == [1] and [f.end for f in stage.facts(AttemptEnded)] == [
        "finished"
    ]


def test_a_manifest_of_a_newer_format_ends_the_controller_at_once_and_no_node(stage: Stage) -> None:
    def upgrade() -> None:
        stage.commit(15)
        key = stage.store.list("snapshots/manifests/")[-1]
        body = {k: v for k, v in json.loads(stage.store.get(key)).items() if k != "hash"} | {
            "version": 999
        }
        stage.store.put(key, canonical({**body, "hash": digest(canonical(body))}))

    stage.clock.after(25.0, upgrade)
    with pytest.raises(SnapshotTooNew):
        stage.lead()
    assert stage.clock.now() < 40 and stage.cloud.alive == [1]


# ---- another API server --------------------------------------------------------------------------
class Elsewhere(Cloud):
    """What another API server shows of a run: nothing of `hidden`, which it can neither end."""

    def __init__(self, real: Cloud, hidden: set[int]):
        super().__init__(real.clock, real.script)
        self.all, self.hidden = real.all, hidden

    def nodes(self) -> Sequence[Node]:
        return [n for n in super().nodes() if n.attempt not in self.hidden]

    def terminate(self, attempt: int) -> None:
        if attempt not in self.hidden:
            super().terminate(attempt)


def beats(stage: Stage, attempt: int, until_s: float = 1e9, goodbye: bool = False) -> None:
    """The member of an attempt: rewrites its object, leaves when it is asked to, or when the
    run is over or stopped."""
    name, n = f"m{attempt:04d}-aa", itertools.count()

    def beat() -> None:
        node, now = stage.cloud.all[attempt], stage.clock.now()
        body = {"member": name, "state": "in", "attempt": attempt, "beat": next(n), "beat_s": 2.0}
        asked = stage.store.list(f"{LEAVE}{attempt:06d}.json") or stage.store.list(STOP_KEY)
        if asked or (goodbye and now >= until_s):
            stage.cloud.end(attempt, 33)
            stage.store.put(
                f"rdzv/members/{name}.json", json.dumps({**body, "state": "gone"}).encode()
            )
        elif node.alive and now < until_s:
            stage.store.put(f"rdzv/members/{name}.json", json.dumps(body).encode())
            stage.clock.after(2.0, beat)

    beat()


def test_a_member_that_nobody_intended_is_ended_and_nothing_is_launched_beside_it(
    stage: Stage,
) -> None:
    """A controller that was overtaken launched it, and its fact was lost."""
    elsewhere = Elsewhere(stage.cloud, {7})
    stage.cloud.script = None
    stage.cloud.launch(7, SPOT)
    beats(stage, 7)
    elsewhere.script = trains(lambda: stage)
    outcome = stage.lead(RunSpec(lost_after_s=10.0), cloud=elsewhere)
    assert not stage.cloud.alive and sorted(stage.cloud.all) == [7, 8]
    told = [f.reason for f in stage.facts(Decided) if f.decision == "terminate"]
    assert "attempt 7" in told
    gone_s, asked_s = stage.cloud.all[7].gone_s, stage.cloud.all[8].asked_s
    assert gone_s is not None and asked_s >= gone_s
    assert (outcome.outcome, outcome.unproven) == ("done", (7,))
    assert "attempts 7 (nobody's intent)" in outcome.reason


class Denier(Cloud):
    """Calls every node that is up gone, from `since_s` on, for `for_s`."""

    since_s, for_s = 30.0, 60.0

    def nodes(self) -> Sequence[Node]:
        now = self.clock.now()
        denies = self.since_s <= now < self.since_s + self.for_s
        return [
            dataclasses.replace(n, state=NodeState.GONE, gone_s=now, reason="preempted")
            if denies and n.state is NodeState.UP and n.attempt == 1
            else n
            for n in super().nodes()
        ]


def test_a_node_that_the_cloud_calls_gone_and_that_beats_is_ended_and_billed(stage: Stage) -> None:
    denier = Denier(stage.clock, None)
    denier.all = stage.cloud.all
    stage.clock.after(20.0, lambda: beats(stage, 1))
    stage.clock.after(150.0, lambda: setattr(denier, "script", trains(lambda: stage)))
    stage.clock.after(200.0, lambda: stage.store.put(STOP_KEY, b"enough"))
    outcome = stage.lead(RunSpec(), cloud=denier)
    assert outcome.outcome == "stopped" and not stage.cloud.alive
    first = stage.cloud.all[1]
    assert stage.store.list(f"{LEAVE}000001.json"), "it was asked through the bucket"
    bill = [f for f in stage.facts(AttemptEnded) if f.attempt == 1][-1]
    assert first.gone_s is not None and bill.gone_s == pytest.approx(first.gone_s, abs=30.0)


def leaked(stage: Stage, *attempts: int) -> Elsewhere:
    """Nodes that another controller launched through another API server, and that train."""
    stage.cloud.script = None
    journal = Journal(stage.store, "controller-before", stage.clock.now)
    journal.record(LeaseTaken(1, "x"))
    for attempt in attempts:
        journal.record(AttemptIntended(attempt, dataclasses.asdict(SPOT)))
        stage.cloud.launch(attempt, SPOT)
    stage.clock.sleep(5.0)
    for attempt in attempts:
        journal.record(AttemptUp(attempt, 3.0))
        beats(stage, attempt)
    journal.flush()
    return Elsewhere(stage.cloud, set(attempts))


def test_nodes_that_beat_are_not_lost_because_this_api_server_does_not_show_them(
    stage: Stage,
) -> None:
    elsewhere = leaked(stage, 1, 2, 3)
    stage.clock.after(400.0, lambda: stage.commit(20, final=True))
    # they leave when it is over
    stage.clock.after(402.0, lambda: stage.store.put(f"{LEAVE}000001.json", b"{}"))
    stage.clock.after(402.0, lambda: stage.store.put(f"{LEAVE}000002.json", b"{}"))
    stage.clock.after(402.0, lambda: stage.store.put(f"{LEAVE}000003.json", b"{}"))
    outcome = stage.lead(RunSpec(1, 3, lost_after_s=10.0), cloud=elsewhere)
    assert outcome.outcome == "done"
    assert sorted(stage.cloud.all) == [1, 2, 3], "none was launched beside them"
    ended = stage.facts(AttemptEnded)
    assert [(f.attempt, f.end) for f in ended] == [(1, "lost"), (2, "lost"), (3, "lost")]
    assert all(f.billed_s >= 390 for f in ended)
    # their agents have ended; whether their machines have, is not for us to see
    assert outcome.unproven == (1, 2, 3)
    assert all("look for its machine where it was launched from" in f.reason for f in ended)


def test_a_node_that_is_not_shown_is_asked_to_leave_through_the_bucket(stage: Stage) -> None:
    elsewhere = leaked(stage, 1, 2)

    def policy(view: View) -> Terminate | Wait:
        return (
            Terminate(2, "one too many")
            if len(view.alive) > 1 and view.now_s > 60
            else Wait(1.0, "idle")
        )

    stage.clock.after(300.0, lambda: stage.store.put(STOP_KEY, b'{"reason": "enough"}'))
    assert stage.lead(RunSpec(1, 2), policy=policy, cloud=elsewhere).outcome == "stopped"
    gone_s = {n.attempt: n.gone_s for n in stage.cloud.all.values()}
    assert (
        gone_s[2] is not None and 60 < gone_s[2] < 80 and gone_s[1] is not None and gone_s[1] >= 300
    )
    assert not stage.cloud.alive


def test_a_node_that_is_not_shown_and_falls_silent_is_lost_and_replaced(stage: Stage) -> None:
    intend(
        stage, LeaseTaken(1, "x"), AttemptIntended(1, dataclasses.asdict(SPOT)), AttemptUp(1, 3.0)
    )
    elsewhere = Elsewhere(stage.cloud, {1})
    stage.cloud.script = None
    stage.cloud.launch(1, SPOT)
    beats(stage, 1, until_s=100.0)
    elsewhere.script = trains(lambda: stage)
    assert stage.lead(RunSpec(lost_after_s=10.0), cloud=elsewhere).outcome == "done"
    assert sorted(stage.cloud.all) == [1, 2]
    assert 110 <= stage.cloud.all[2].asked_s < 125


def test_a_node_that_was_given_up_and_beats_after_all_is_asked_to_leave_and_billed(
    stage: Stage,
) -> None:
    """It was being launched elsewhere when its controller was lost; its place is taken when it
    comes up."""
    intend(stage, LeaseTaken(1, "x"), AttemptIntended(1, dataclasses.asdict(SPOT)))
    elsewhere = Elsewhere(stage.cloud, {1})
    stage.cloud.script = None
    stage.clock.after(60.0, lambda: stage.cloud.launch(1, SPOT))
    stage.clock.after(64.0, lambda: beats(stage, 1))
    elsewhere.script = trains(lambda: stage, seconds=300.0)
    outcome = stage.lead(RunSpec(lost_after_s=10.0), cloud=elsewhere)
    assert (outcome.outcome, outcome.committed_step, outcome.unproven) == ("done", 20, (1,))
    assert "not proven to be gone: attempts 1 (spot, launched by x)" in outcome.reason
    assert not stage.cloud.alive and sorted(stage.cloud.all) == [1, 2]
    bills = [f for f in stage.facts(AttemptEnded) if f.attempt == 1]
    assert (
        [f.end for f in bills] == ["lost", "lost"] and bills[0].usd == 0 and bills[1].billed_s > 60
    )


def test_a_script_that_ends_well_before_its_last_step_is_not_started_for_ever(stage: Stage) -> None:
    """`break`, or an own loop without run.finish(): exit code 0, and no final snapshot."""
    stage.commit(10)
    stage.cloud.script = lambda cloud, attempt: cloud.clock.after(
        5.0, lambda: cloud.end(attempt, 0)
    )
    outcome = stage.lead(RunSpec(1, 4))
    assert (outcome.outcome, len(stage.cloud.all)) == ("failed", 12)
    assert (
        "the script ended with exit code 0 before its last step 3 times in a row" in outcome.reason
    )
    assert "after step 10" in outcome.reason and "call run.finish()" in outcome.reason


def test_neither_is_one_that_gets_one_step_further_each_time(stage: Stage) -> None:
    def script(cloud: Cloud, attempt: int) -> None:
        cloud.clock.after(5.0, lambda: stage.commit(attempt))
        cloud.clock.after(6.0, lambda: cloud.end(attempt, 0))

    stage.cloud.script = script
    outcome = stage.lead(RunSpec(max_attempts_without_progress=10**6))
    assert (outcome.outcome, len(stage.cloud.all)) == ("failed", 10)
    assert (
        "exit code 0 before its last step 10 times in a row, the last time after step 10"
        in outcome.reason
    )


class Mortal:
    """Dies at its n-th operation on store or cloud, before or after it took effect."""

    def __init__(self, stage: Stage, dies_at: int, after: bool):
        self.stage, self.dies_at, self.after, self.count, self.url = (
            stage,
            dies_at,
            after,
            0,
            stage.store.url,
        )

    def do(self, operation: Callable[[], T]) -> T:
        self.count += 1
        if self.count == self.dies_at and not self.after:
            raise Crash
        try:
            return operation()
        finally:
            if self.count == self.dies_at:
                raise Crash

    def __getattr__(self, name: str) -> Callable[..., object]:
        owner = (
            self.stage.cloud
            if name in ("nodes", "launch", "terminate", "offers")
            else self.stage.store
        )
        return lambda *args: self.do(lambda: getattr(owner, name)(*args))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_controller_may_die_at_every_single_operation(after: bool, stopped: bool) -> None:
    """Two nodes, one of them preempted, one failed launch; then a clean end, or a stop. Whatever
    the operation at which the first controller dies, a second one brings the run to the same end,
    leaves nothing behind, and the bills add up."""
    dies_at = deaths = 0
    while True:
        dies_at += 1
        made: list[Stage] = []
        stage = Stage(trains(lambda made=made: made[0], seconds=1000.0 if stopped else 50.0))  # type: ignore[misc]
        made.append(stage)
        run = RunSpec(1, 2, poll_s=5.0, exit_grace_s=10.0)
        stage.cloud.full = {"spot"}
        stage.clock.after(8.0, stage.cloud.full.clear)
        stage.clock.after(
            30.0, lambda s=stage: 3 in s.cloud.all and s.cloud.end(3, None, "preempted")
        )  # type: ignore[misc]
        if stopped:
            stage.clock.after(40.0, lambda s=stage: s.store.put(STOP_KEY, b'{"reason": "enough"}'))  # type: ignore[misc]
        mortal = Mortal(stage, dies_at, after)
        died = False
        try:
            outcome = stage.lead(run, store=mortal, cloud=mortal)  # type: ignore[arg-type]
        except Crash:
            died, deaths = True, deaths + 1
            outcome = stage.lead(run)
        where = f"died at operation {dies_at}, after={after}"
        assert outcome.outcome == ("stopped" if stopped else "done"), where
        stage.clock.sleep(100)
        assert not stage.cloud.alive, where
        ended = {f.attempt: f for f in stage.facts(AttemptEnded)}
        for node in stage.cloud.all.values():
            of_node, told = bill(node, 0.0), ended[node.attempt]
            assert (told.billed_s, told.usd) == (of_node.seconds, of_node.usd), where
        assert set(ended) == {f.attempt for f in stage.facts(AttemptIntended)}, where
        if not died:
            break
    assert deaths > 100


# ---- small things --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "reason", "end"),
    [
        (0, "exited", "finished"),
        (33, "exited", "drained"),
        (33, "preempted", "drained"),
        (35, "exited", "terminated"),
        (36, "exited", "failed"),
        (1, "exited", "failed"),
        (-9, "killed", "preempted"),
        (-9, "exited", "killed"),
        (137, "exited", "killed"),
        (None, "preempted", "preempted"),
        (None, "terminated", "terminated"),
        (143, "terminated", "terminated"),
    ],
)
def test_how_it_ended(code: int | None, reason: str, end: str) -> None:
    assert how_it_ended(Node(1, SPOT, NodeState.GONE, 0.0, 1.0, 2.0, code, reason)) == end


def test_exit_36_is_not_the_scripts_fault(stage: Stage) -> None:
    stage.cloud.script = lambda cloud, attempt: cloud.clock.after(
        5.0, lambda: cloud.end(attempt, 36)
    )
    reason = stage.lead(RunSpec(max_attempts_without_progress=6)).reason
    assert (
        "6 attempts in a row ended without a new snapshot after step 0 (the last: " in reason
        and "exited)" in reason
    )


def test_node_numbers_make_sense() -> None:
    with pytest.raises(BadInput, match="found 3 and 2"):
        RunSpec(3, 2)


# ---- facts that cannot be read -------------------------------------------------------------------
def break_facts(stage: Stage, kind: str) -> str:
    """Damage the first segment that tells of `kind`; its key."""
    for key in stage.store.list("facts/controller-"):
        if f'"{kind}"'.encode() in (data := stage.store.get(key)):
            stage.store.put(key, data.replace(b'"attempt":1', b'"attempt":?', 1))
            return key
    raise AssertionError(kind)


def dies_once_up(stage: Stage) -> None:
    """The first controller is killed when its node has been up for a while."""

    def policy(view: View) -> Launch | Wait:
        if any(n.up_s is not None and view.now_s - n.up_s > 5 for n in view.alive):
            raise Crash("controller")
        return Wait(1.0, "") if view.alive else Launch(SPOT, "first")

    with pytest.raises(Crash):
        stage.lead(policy=policy)


@pytest.mark.parametrize("kind", ["AttemptIntended", "AttemptUp"])
def test_a_damaged_fact_stops_no_controller_and_hides_no_node(stage: Stage, kind: str) -> None:
    dies_once_up(stage)
    key = break_facts(stage, kind)
    assert stage.lead() == RunOutcome("done", "finished at step 20", 20)
    assert stage.cloud.alive == []
    # the node that it could not read of went on, and none was launched beside it
    assert list(stage.cloud.all) == [1]
    (ended,) = stage.facts(AttemptEnded)
    # and is billed from its start
    assert (ended.attempt, ended.end, ended.billed_s) == (1, "finished", 51.0)
    (said,) = [d for d in stage.facts(Decided) if d.decision == "skip"]
    assert key in said.reason and "adopted" in said.reason


def test_the_number_of_an_attempt_that_cannot_be_read_is_not_given_again(stage: Stage) -> None:
    dies_once_up(stage)
    break_facts(stage, "AttemptIntended")
    book = AttemptHistory.of(read_facts(stage.store, "controller-"), random.Random(0))
    assert not book.open and book.next_attempt > 1  # even if the cloud does not show it yet
    assert book.hidden(1)


def test_an_offer_that_cannot_be_read_is_still_an_attempt() -> None:
    book = AttemptHistory(random.Random(0))
    book.add(1.0, AttemptIntended(1, {"price": "unknown", "usd_per_h": 2.5}))
    book.add(1.0, AttemptIntended(2, {**dataclasses.asdict(SPOT), "of_a_newer_version": 1}))
    assert book.open[1].offer.usd_per_h == 2.5 and book.open[2].offer == SPOT


# ---- another version -----------------------------------------------------------------------------
def test_nothing_more_is_launched_beside_nodes_that_refuse_the_new_ones() -> None:
    """They speak another protocol: each new node would end at once, and cost money each time."""
    made: list[Stage] = []
    first = trains(lambda: made[0], 400.0)

    def script(cloud: Cloud, attempt: int) -> None:
        if attempt == 1:
            return first(cloud, attempt)
        return cloud.clock.after(2.0, lambda: cloud.end(attempt, REFUSED))

    made.append(Stage(script))
    stage = made[0]
    for step in range(11, 20):  # its progress forgives other failures
        stage.clock.after(40.0 * (step - 10), lambda s=step: stage.commit(s))  # type: ignore[misc]
    assert stage.lead(RunSpec(max_nodes=2)).outcome == "done"
    assert [e.end for e in stage.facts(AttemptEnded)] == ["refused", "finished"]
    assert any("another protocol" in d.reason for d in stage.facts(Decided))


def test_a_run_that_refuses_every_node_is_stopped_with_the_reason() -> None:
    stage = Stage(lambda cloud, attempt: cloud.clock.after(2.0, lambda: cloud.end(attempt, REFUSED)))
    found = stage.lead(RunSpec(max_nodes=2))
    assert found.outcome == "failed" and "they speak another protocol than the run" in found.reason
    assert len(stage.facts(AttemptIntended)) <= 6


def test_the_end_of_a_script_without_a_session_names_no_step(stage: Stage) -> None:
    assert done_in_words(20, "finished") == "finished at step 20"
    assert "nothing is saved in the run" in done_in_words(0, WITHOUT_SESSION)
    assert "the last snapshot is of step 7" in done_in_words(7, WITHOUT_SESSION)
