"""Rules: each fires in its situation, once; none in a run where all is well; every fact has one."""

import contextlib
import re
from pathlib import Path

import pytest
from alert_situations import SITUATIONS, start
from histories import whole_run

from harness.bucket.alerts import SEVERITIES, Alert, AlertLog
from harness.bucket.journal import read_facts
from harness.core.facts import KINDS
from harness.views.alert_rules import BUILT_IN, HARMLESS
from harness.views.alerting import AlertTeller
from harness.views.alerts import AlertWatch, fired
from harness.views.operations import Operations
from storage.errors import StoreUnavailable
from storage.explore import ExploredState, SayWord, explore
from storage.files import MemoryStore
from storage.objects import ObjectStore

RUNBOOK = (Path(__file__).parent.parent / "docs" / "RUNBOOK.md").read_text()


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
    rows = re.findall(r"^\| \[([a-z-]+)\]\(#([a-z-]+)\) \| (\w+) \|", RUNBOOK, re.M)
    assert rows == [(r.name, r.name, r.severity) for r in BUILT_IN]
    for entry in re.split(r"^## (?=[a-z])", RUNBOOK.partition("\n## How ")[0], flags=re.M)[1:]:
        words = re.findall(r"^- \*\*(.+?)\*\*", entry, re.M)
        assert words == ["Symptom", "Causes", "What the harness did", "What you do"], entry


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


def tells(name: str, later_s: float = 0.0):
    """Three rounds, `later_s` apart."""

    def actor(store: ObjectStore, say: SayWord) -> None:
        clock, sink = [0.0], Says(say)
        own = AlertTeller(store, sink, lambda: 0.0, lambda: clock[0], token=name)
        for _ in range(3):
            with contextlib.suppress(StoreUnavailable):
                own.round([Alert.of("x", "info", "x", "", 0.0)])
            clock[0] += later_s
        say("done" if own._done else "waits")

    return actor


def sent(state: ExploredState) -> list[object]:
    return [(who, word) for who, word in state.said if isinstance(word, tuple)]


def test_in_every_interleaving_an_alert_is_told_once_and_after_a_death_again_at_most_once():
    counts: set[int] = set()

    def once(state: ExploredState) -> str | None:
        counts.add(len(sent(state)))
        return f"told {sent(state)}" if len(sent(state)) > 1 else None

    # nobody is taken for dead: once, whatever is not answered, whoever stops for ever
    seen = explore({n: tells(n) for n in "ab"}, {}, check=once, unknowns=1)
    assert seen.endings > 0 and counts == {0, 1}

    def each_once(state: ExploredState) -> str | None:
        """One message for each claim; a receipt comes after a message."""
        counts.add(len(sent(state)))
        told = [k for k in state.objects if k == "alerts/told/it/000000.json"]
        if told and not sent(state):
            return "a receipt without a message"
        claims = [k for k in state.objects if k.endswith(".claim")]
        return f"told {sent(state)}" if len(sent(state)) > max(1, len(claims)) else None

    # b takes a for dead, rightly or not
    seen = explore({"a": tells("a"), "b": tells("b", 1000.0)}, {}, check=each_once, unknowns=1)
    assert seen.endings > 0 and counts == {0, 1, 2}  # twice: what no sender can exclude


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
