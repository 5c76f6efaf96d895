"""Rules: each fires in its situation, once; none in a run where all is well; every fact has one."""

import contextlib
import re
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.core import facts as f
from harness.core.facts import KINDS
from harness.look.alerts import alert_evaluator
from harness.look.alerts.alert_evaluator import AlertSender, AlertWatch, fired
from harness.look.alerts.alert_log import SEVERITIES, Alert, AlertLog
from harness.look.alerts.alert_rules import BUILT_IN
from harness.look.trackers.metric_rows import Operations
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from support.alert_situations import SITUATIONS, start
from support.histories import whole_run
from support.interleavings import ExploredState, SayWord, explore

RUNBOOK = (Path(__file__).parents[2] / "docs" / "RUNBOOK.md").read_text()


@pytest.mark.parametrize("rule", SITUATIONS)
def test_each_rule_fires_once_in_its_situation(rule):
    made = SITUATIONS[rule]()
    watch = AlertWatch()
    found = [*watch.see(made.facts), *watch.look(made.t, made.sight)]
    assert [a.rule for a in found].count(rule) == 1, found
    assert {a.rule for a in found} <= {rule, "worker-hung"}, found
    # as they come, one by one: the same
    slowly = AlertWatch()
    again = [a for s in made.facts for a in slowly.see([s])]
    assert [a.id for a in [*again, *slowly.look(made.t, made.sight)]] == [a.id for a in found]


def test_nothing_fires_while_all_is_well():
    made = start()
    for step in range(10, 400, 10):
        made.trains(step - 9, step, loss=2.0 - step / 400).commit(step)
    assert fired(made.facts, made.t) == []


def test_a_story_fires_what_hurt_in_it():
    facts = read_facts(whole_run().store)
    found = fired(facts, facts[-1].t)
    assert [a.rule for a in found] == ["notice-seen", "node-lost", "notice-seen"]


def test_rules_and_runbook_match_one_to_one():
    names = [rule.name for rule in BUILT_IN]
    assert sorted(SITUATIONS) == sorted(set(names)) == sorted(names)
    assert re.findall(r"^## ([a-z-]+)$", RUNBOOK, re.M) == names
    entries = re.split(r"^## (?=[a-z])", RUNBOOK, flags=re.M)[1:]
    severities = [re.search(r"^\*\*(\w+)\*\*: ", entry, re.M) for entry in entries]
    assert [found and found[1] for found in severities] == [rule.severity for rule in BUILT_IN]
    for entry in entries:
        words = re.findall(r"^- \*\*(.+?)\*\*", entry, re.M)
        assert words == ["Causes", "Harness", "You"], entry


# facts that need no rule, and why
HARMLESS = {
    f.AttemptIntended: "a node is asked for",
    f.AttemptUp: "a node is there",
    f.SnapshotExported: "a person did it",
    f.AttemptDoubted: "follows from a notice, which has a rule",
    f.AgentStarted: "a node is there",
    f.NoticeCancelled: "good news",
    f.NoticeAcknowledged: "the cloud was told; a notice has a rule",
    f.NodeFound: "where a node is and what it costs",
    f.NodeBilled: "what was paid, told later",
    f.PricesSeen: "a measurement; a budget has rules",
    f.SessionStarted: "training begins",
    f.SessionEnded: "rank 0 left on purpose; why has a rule where it hurts",
    f.StepsTimed: "a measurement; slower steps have a rule",
    f.ProfileTaken: "somebody asked for it",
    f.StackSeen: "where silent workers stood; a hang has a rule",
    f.Validated: "a measurement",
}


def test_every_kind_of_fact_has_a_rule_or_is_harmless():
    covered = {kind.kind for rule in BUILT_IN for kind in rule.kinds}
    harmless = {kind.kind for kind in HARMLESS}
    assert covered & harmless == set()
    assert covered | harmless == set(KINDS)
    assert all(rule.severity in SEVERITIES for rule in BUILT_IN)


def test_the_log_fires_an_alert_once_whoever_writes_it():
    store = MemoryStore("memory://log", {})
    one, other = AlertLog(store), AlertLog(store)
    first = Alert.of("node-lost", "warning", "a node is lost", "m1", 1000.0)
    assert one.fire(first, 300.0)
    assert not other.fire(first, 300.0)
    # seen a little later by another clock: the same; after its cool-down: another
    assert not other.fire(Alert.of("node-lost", "warning", "lost", "m1", 1290.0), 300.0)
    assert other.fire(Alert.of("node-lost", "warning", "lost", "m1", 1300.0), 300.0)
    assert other.fire(Alert.of("node-lost", "warning", "lost", "m2", 1300.0, "m2"), 300.0)
    store.put("alerts/fired/000003.json", b"{not json")
    assert one.fire(Alert.of("crash-loop", "critical", "loop", "", 1400.0), 300.0)
    assert [a.t for a in AlertLog(store).read()] == [1000.0, 1300.0, 1300.0, 1400.0]
    assert sorted(store.list("alerts/")) == [f"alerts/fired/{n:06d}.json" for n in range(5)]


# ---- every interleaving of who fires and who tells -----------------------------------------------
def evaluator(name: str, t: float):
    def actor(store: ObjectStore, say: SayWord) -> None:
        log = AlertLog(store, _listed=True)
        say("fired" if log.fire(Alert.of("x", "info", name, "", t), 60.0) else "known")

    return actor


def test_in_every_interleaving_an_alert_is_fired_once():
    def check(state: ExploredState) -> str | None:
        fired = [k for k in state.objects if k.startswith("alerts/fired/")]
        return f"fired {fired}" if len(fired) > 1 else None

    actors = {"a": evaluator("a", 1000.0), "b": evaluator("b", 1007.0), "c": evaluator("c", 990.0)}
    seen = explore(actors, {}, check=check, unknowns=1)
    assert seen.endings > 0


class Says:
    """A receiver that takes everything."""

    name = about = "it"

    def __init__(self, say: SayWord):
        self.say, self.count = say, 0

    def tell(self, alert: Alert, run: str, key: str) -> None:
        self.count += 1
        self.say(("sent", self.count))


def tells(later_s: float = 0.0):
    """Three rounds, `later_s` apart."""

    def actor(store: ObjectStore, say: SayWord) -> None:
        clock = [0.0]
        own = AlertSender(store, Says(say), lambda: 0.0, lambda: clock[0])
        for _ in range(3):
            with contextlib.suppress(StoreUnavailable):
                own.round([Alert.of("x", "info", "x", "", 0.0)])
            clock[0] += later_s
        say("waits" if own._open else "done")

    return actor


def test_in_every_interleaving_an_alert_is_told_and_twice_only_after_a_death(monkeypatch):
    # the explorer knows one thread for each actor
    monkeypatch.setattr(alert_evaluator, "tell_in_time", lambda sink, *said: sink.tell(*said))
    counts: set[int] = set()

    def check(state: ExploredState) -> str | None:
        sent = [word for _, word in state.said if isinstance(word, tuple)]
        counts.add(len(sent))
        if "done" in [word for _, word in state.said] and not sent:
            return "done without a message"
        return f"told {sent}" if len(sent) > most else None

    # nobody is taken for dead: once, whatever is not answered, whoever stops for ever
    most = 1
    seen = explore({n: tells() for n in "ab"}, {}, check=check, unknowns=1)
    assert seen.endings > 0 and counts == {0, 1}
    # b takes a for dead, rightly or not
    most = 2
    seen = explore({"a": tells(), "b": tells(1000.0)}, {}, check=check, unknowns=1)
    assert seen.endings > 0 and counts == {0, 1, 2}


def test_trackers_are_told_each_of_very_many_once():
    store = MemoryStore("memory://log", {})
    made = [Alert.of("x", "info", str(n), "", 1000.0 * n) for n in range(1300)]
    for n, alert in enumerate(made):
        store.put(f"alerts/fired/{n:06d}.json", alert.encode())
    operations = Operations(store, None)
    told: list[str] = []
    while new := operations.alerts(told[-1000:]):  # as many as a batch's header keeps
        told += [a.id for a in new]
        assert len(told) <= len(made)
    assert told == [a.id for a in made]
