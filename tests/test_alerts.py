"""Rules: each fires in its situation, once; none in a run where all is well; every fact has one."""

import re
from pathlib import Path

import pytest
from alert_situations import SITUATIONS, start
from histories import whole_run

from harness.bucket.alerts import SEVERITIES, Alert, AlertLog
from harness.bucket.journal import read_facts
from harness.core.facts import KINDS
from harness.views.alert_rules import BUILT_IN, HARMLESS
from harness.views.alerts import AlertWatch, fired
from storage.files import MemoryStore

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
