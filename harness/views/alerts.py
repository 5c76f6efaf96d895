"""Which alerts a run's facts fire: every fact that hurts, told once. `fired` for a whole run,
`AlertWatch` as facts come.

The same facts fire the same alerts, whoever asks. Facts come late and clocks differ a little, so
evaluators that run at once (the controller, rank 0's node) may differ too; that each alert is fired
and told once is the log's business (`bucket/alerts.py`, `alerting.py`).

Pure: no store, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from harness.bucket.alerts import Alert
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.views.alert_rules import BUILT_IN, AlertRule, Symptom
from harness.views.alert_state import RunSoFar, Sight

LOOK_S = 10.0  # of the past: between two looks at what holds
MOST_LOOKS = 2000  # ... and so many at most, however long it is
MOST_SUBJECTS = 8  # of one rule within its cool-down: a thousand nodes that go are one story
SHIPPED = {rule.name for rule in BUILT_IN}
STILL_S = 600.0  # an alert of a single fact counts as firing for so long


def fired(
    facts: Iterable[Stamped], now_s: float, rules: Sequence[AlertRule] = BUILT_IN
) -> list[Alert]:
    """All alerts of these facts up to `now_s` (wall clock, s), oldest first."""
    watch = AlertWatch(rules)
    found = watch.see(s for s in facts if s.t <= now_s)
    return sorted([*found, *watch.look(now_s)], key=lambda a: a.t)


class AlertWatch:
    """An evaluator: `see` is given facts as they come, `look` is called from time to time."""

    def __init__(self, rules: Sequence[AlertRule] = BUILT_IN):
        self.rules, self.run = rules, RunSoFar()
        self.cool_down_s = {rule.name: rule.cool_down_s for rule in rules}
        self._by_kind: dict[type[f.Fact], list[AlertRule]] = {}
        for rule in rules:
            for kind in rule.kinds if rule.says else ():
                self._by_kind.setdefault(kind, []).append(rule)
        self._looked_s: float | None = None
        self._told: dict[tuple[str, str], float] = {}  # (rule, subject) -> t of its last alert
        self._seen: dict[tuple[str, str], deque[float]] = {}  # of rules that count
        # what holds now: (rule, subject) -> since when, and whether it was told
        self._holds: dict[tuple[str, str], tuple[float, bool]] = {}
        self._severity: dict[str, str] = {rule.name: rule.severity for rule in rules}

    def see(self, facts: Iterable[Stamped]) -> list[Alert]:
        """New alerts of these facts."""
        found: list[Alert] = []
        ordered = sorted(facts, key=lambda s: s.t)
        span_s = ordered[-1].t - ordered[0].t if ordered else 0.0
        pause_s = max(LOOK_S, span_s / MOST_LOOKS)
        for stamped in ordered:
            # what held until this fact, which may have ended it
            if self._looked_s is None:
                self._looked_s = stamped.t
            elif stamped.t - self._looked_s >= pause_s:
                found += self.look(stamped.t)
            self.run.apply(stamped)
            for rule in self._by_kind.get(type(stamped.fact), ()):
                said = (rule.says(stamped, self.run) if rule.says else None) or ()
                for symptom in (said,) if isinstance(said, Symptom) else said:
                    if self._enough(rule, symptom, stamped.t):
                        found += self._fire(rule, symptom, stamped.t)
        return found

    def look(self, now_s: float, sight: Sight | None = None) -> list[Alert]:
        """New alerts of what holds at `now_s` (wall clock, s)."""
        self.run.sight = sight or Sight()
        self._looked_s = now_s
        found: list[Alert] = []
        for rule in self.rules:
            if rule.holds is None:
                continue
            here: set[tuple[str, str]] = set()
            for symptom in rule.holds(self.run, now_s):
                key = (rule.name, symptom.subject)
                here.add(key)
                first_s, told = self._holds.get(key, (now_s, False))
                since_s = first_s if symptom.since_s is None else symptom.since_s
                due = now_s - since_s >= rule.for_s
                if due and not told:
                    found += self._fire(rule, symptom, since_s + rule.for_s)
                self._holds[key] = since_s, told or due
            for key in [k for k in self._holds if k[0] == rule.name and k not in here]:
                del self._holds[key]
        return found

    def firing(self, now_s: float) -> dict[tuple[str, str], str]:
        """What is wrong now: (rule, subject) -> severity."""
        held = {key for key, (_, told) in self._holds.items() if told}
        recent = {key for key, t in self._told.items() if 0 <= now_s - t < STILL_S}
        return {key: self._severity[key[0]] for key in sorted(held | recent)}

    def _enough(self, rule: AlertRule, symptom: Symptom, t: float) -> bool:
        if rule.count <= 1:
            return True
        times = self._seen.setdefault((rule.name, symptom.subject), deque(maxlen=rule.count))
        times.append(t)
        return len(times) == rule.count and t - times[0] <= rule.within_s

    def _fire(self, rule: AlertRule, symptom: Symptom, t: float) -> list[Alert]:
        key = (rule.name, symptom.subject)
        last_s = self._told.get(key)
        if last_s is not None and abs(t - last_s) < rule.cool_down_s:
            return []
        others = [s for (name, _), s in self._told.items() if name == rule.name]
        if sum(abs(t - s) < rule.cool_down_s for s in others) >= MOST_SUBJECTS:
            return []
        self._told[key] = t
        where = f"docs/RUNBOOK.md#{rule.name}" if rule.name in SHIPPED else ""
        said = (symptom.title, symptom.text, t, symptom.subject, where)
        return [Alert.of(rule.name, rule.severity, *said)]
