"""Runs whose facts are archived."""

from harness.core import facts as f


def names(facts):
    bad = [s.fact for s in facts if isinstance(s.fact, f.Unreadable)]
    assert not bad, bad
    return sorted((s.writer, s.t, s.fact.kind, s.fact.step) for s in facts)
