"""Users' own alert rules (`--alert-rules`): a few lines of YAML, or a function by dotted path.

    rules:
      - name: snapshots-fail          # fires on a fact that comes `count` times within `within_s`
        fact: SnapshotFailed
        count: 3
        within_s: 600
        severity: critical
        title: snapshots fail
        text: "step $step: $why"      # fields of the fact
      - name: hot
        fact: StepDone
        where: {epoch: 1}             # fields with these values; strings are patterns: "*timeout*"
        above: {loss: 10.0}           # or below
        cool_down_s: 3600
      - name: quiet                   # fires if no such fact comes for `for_s` while training
        absent: Validated
        for_s: 7200
      - rule: notice-seen             # change severity, cool_down_s, for_s of a built-in rule, or
        enabled: false                # switch it off

A function `pkg.module:function?option=value` is called with each fact (`Stamped`) and with the
state of the run (`AlertState`); the text that it returns becomes an alert. No part of a YAML rule
is evaluated as code, and mistakes in a rule are reported before the run starts. What a fact holds
as a table, such as the metrics of `NodeMeasured`, only a function can read.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from harness.core import facts as f
from harness.core import user_functions
from harness.core.facts import KINDS, Stamped
from harness.core.input_files import yaml_given
from harness.core.world import BadInput
from harness.look.alerts.alert_log import SEVERITIES, WARNING
from harness.look.alerts.alert_rules import BUILT_IN, AlertRule, AlertState, Symptom

NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
NUMBERS = ("count", "within_s", "for_s", "cool_down_s")
MOST_RULES = 200


def all_rules(asked: str) -> tuple[AlertRule, ...]:
    """Return the built-in rules and the user's (files and dotted paths, separated by commas).

    Raises BadInput.
    """
    rules = {rule.name: rule for rule in BUILT_IN}
    for word in filter(None, (w.strip() for w in asked.split(","))):
        path, _, query = word.partition("?")
        if ":" in path:
            own = _function(path, query)
            rules[own.name] = own
        else:
            for body in _read(Path(path)):
                _apply(rules, body, path)
    if len(rules) > MOST_RULES:
        raise BadInput(f"--alert-rules: wanted at most {MOST_RULES} rules, found {len(rules)}")
    return tuple(rules.values())


def _read(path: Path) -> Sequence[Any]:
    found = next(iter(yaml_given(path, "rules of alerts (--alert-rules)")), None)
    rules = found.get("rules") if isinstance(found, dict) else None
    if not isinstance(rules, list):
        raise BadInput(f"--alert-rules {path}: wanted `rules:` and a list, found something else")
    return rules


def _function(path: str, query: str) -> AlertRule:
    function = user_functions.imported("rule of alerts", path)
    if not callable(function):
        raise BadInput(f"rule of alerts {path!r}: wanted a function, found {function!r:.60}")
    asked: Callable[..., Any] = user_functions.with_options(
        "rule of alerts", path, function, query, 2
    )
    name = re.sub(r"[^a-z0-9]+", "-", path.rpartition(":")[2].lower()).strip("-")[:40] or "own"

    def says(stamped: Stamped, run: AlertState) -> Symptom | None:
        try:
            text = asked(stamped, run)
        except Exception as e:  # a user's function may raise anything; the other rules go on
            text = f"the rule itself failed: {type(e).__name__}: {e}"
        return Symptom(name, str(text)) if text else None

    return AlertRule(name, WARNING, tuple(KINDS.values()), says)


def _apply(rules: dict[str, AlertRule], body: Any, path: str) -> None:
    where = f"--alert-rules {path}"
    if not isinstance(body, dict):
        raise BadInput(f"{where}: wanted a rule with fields, found {body!r:.60}")
    if "rule" in body:
        _change(rules, body, where)
        return
    rule = _made(body, f"{where}: rule {body.get('name')!r:.60}")
    if rule.name in rules:
        raise BadInput(f"{where}: there is a rule {rule.name!r} already; give yours another name")
    rules[rule.name] = rule


def _change(rules: dict[str, AlertRule], body: dict[str, Any], where: str) -> None:
    name = body["rule"]
    if not isinstance(name, str) or name not in rules:
        raise BadInput(f"{where}: there is no rule {name!r:.60}; known: {', '.join(rules)}")
    _only(body, ("rule", "enabled", "severity", "cool_down_s", "for_s"), f"{where}: rule {name}")
    if body.get("enabled") is False:
        del rules[name]
        return
    changes: dict[str, Any] = {n: _number(body, n, where) for n in NUMBERS if n in body}
    if "severity" in body:
        changes["severity"] = _severity(body, where)
    rules[name] = dataclasses.replace(rules[name], **changes)


def _made(body: dict[str, Any], where: str) -> AlertRule:
    known = ("name", "fact", "absent", "where", "above", "below", "severity", "title", "text")
    _only(body, (*known, *NUMBERS), where)
    name = body.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(f"{where}: wanted a name of small letters, digits and -, at most 40")
    kind = KINDS.get(str(body.get("absent", body.get("fact"))))
    if kind is None or ("absent" in body) == ("fact" in body):
        raise BadInput(f"{where}: wanted one of `fact:` and `absent:`, of {', '.join(KINDS)}")
    numbers: dict[str, Any] = {n: _number(body, n, where) for n in NUMBERS if n in body}
    if "count" in numbers:
        numbers["count"] = int(numbers["count"])
    severity = _severity(body, where) if "severity" in body else WARNING
    title = str(body.get("title", name))
    if "absent" in body:
        if not numbers.get("for_s"):
            raise BadInput(f"{where}: wanted `for_s:`, for how long it may be absent")
        absent_s = numbers.pop("for_s")
        return AlertRule(name, severity, (kind,), holds=_absent(kind, absent_s, title), **numbers)
    if numbers.get("count", 1) > 1 and not numbers.get("within_s"):
        raise BadInput(f"{where}: wanted `within_s:` beside `count:`")
    says = _says(_tests(body, kind, where), title, str(body.get("text", "")))
    return AlertRule(name, severity, (kind,), says, **numbers)


def _says(
    tests: Sequence[Callable[[f.Fact], bool]], title: str, text: str
) -> Callable[[Stamped, AlertState], Symptom | None]:
    def says(stamped: Stamped, run: AlertState) -> Symptom | None:
        if not all(test(stamped.fact) for test in tests):
            return None
        values = dataclasses.asdict(stamped.fact)
        words = text or ", ".join(f"{k}={v}" for k, v in values.items())
        return Symptom(
            Template(title).safe_substitute(values), Template(words).safe_substitute(values)
        )

    return says


def _absent(
    kind: type[f.Fact], absent_s: float, title: str
) -> Callable[[AlertState, float], Iterator[Symptom]]:
    def holds(run: AlertState, now_s: float) -> Iterator[Symptom]:
        if run.trains and run.session_s is not None:
            since_s = max(run.session_s, run.last_s.get(kind.kind, run.session_s)) + absent_s
            if now_s >= since_s:
                yield Symptom(title, f"no {kind.kind} for {absent_s:g} s", since_s=since_s)

    return holds


def _tests(body: dict[str, Any], kind: type[f.Fact], where: str) -> list[Callable[[f.Fact], bool]]:
    """Return the tests that `where`, `above` and `below` ask for. Raises BadInput."""
    fields = {field.name for field in dataclasses.fields(kind)}
    tests: list[Callable[[f.Fact], bool]] = []
    for how in ("where", "above", "below"):
        wanted = body.get(how, {})
        if not isinstance(wanted, dict) or not fields >= set(wanted):
            raise BadInput(f"{where}: `{how}:` wanted fields of {kind.kind}: {sorted(fields)}")
        for name, value in wanted.items():
            if how != "where" and type(value) not in (int, float):
                raise BadInput(f"{where}: `{how}: {name}`: wanted a number, found {value!r:.40}")
            tests.append(_test(how, name, value))
    return tests


def _test(how: str, name: str, wanted: Any) -> Callable[[f.Fact], bool]:
    def test(fact: f.Fact) -> bool:
        found = getattr(fact, name)
        if how == "where":
            if isinstance(wanted, str):
                return fnmatch.fnmatchcase(str(found), wanted)
            return bool(found == wanted)
        if type(found) not in (int, float):
            return False
        return bool(found > wanted if how == "above" else found < wanted)

    return test


# ---- values --------------------------------------------------------------------------------------
def _only(body: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := [str(k) for k in body if k not in known]:
        raise BadInput(f"{where}: `{unknown[0]}:` is not known; known: {', '.join(known)}")


def _number(body: Mapping[str, Any], name: str, where: str) -> float:
    value = body[name]
    if type(value) not in (int, float) or not 0 <= value <= 1e9:
        raise BadInput(f"{where}: `{name}:` wanted a number from 0 on, found {value!r:.40}")
    return float(value)


def _severity(body: Mapping[str, Any], where: str) -> str:
    if body["severity"] not in SEVERITIES:
        found = f"{body['severity']!r:.40}"
        raise BadInput(f"{where}: `severity:` wanted one of {', '.join(SEVERITIES)}, found {found}")
    return str(body["severity"])
