"""A secret in every text field of every kind of fact is in nothing that is kept, shown or exported."""

from __future__ import annotations

import dataclasses
import io
import json
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import pytest
from rich.console import Console

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.core import masking
from harness.core.facts import KINDS, Chain, Fact, Unreadable
from harness.core.masking import masked_deep
from harness.look.reports.live_view import LiveView, describe, render, status
from harness.look.reports.report import print_report, to_json, write_html
from harness.look.reports.summary import summarize
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.metric_rows import Operations
from harness.look.trackers.prometheus import RunGauges
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import StreamWriter, every_row
from support.histories import whole_run

LEARNED = 'c4nary-"\\é/+=<&'  # what JSON, HTML and URLs spell in other ways
FORM = "hf_" + "c4nAry" * 6
SAYS = (
    f"x {LEARNED} y", LEARNED, f"https://me:{LEARNED}@h/p?token={LEARNED}", FORM, f"[{FORM}] {LEARNED}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_learned", [])
    masking.learn({"SERVICE_TOKEN": LEARNED})


def leaks(text: str | bytes) -> bool:
    """"c4nary" stands in all of them, however they are spelled."""
    return "c4nary" in (text if isinstance(text, str) else text.decode("latin-1")).lower()


def filled(hint: Any, says: str) -> Any:
    """A value of this type whose every text has the secret."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return filled(inside[0], says)
    if origin in (typing.Union, types.UnionType):
        return filled(next(i for i in inside if i is not type(None)), says)
    if origin is tuple:
        return (filled(inside[0], says), filled(inside[0], says))
    if origin is list:
        return [filled(inside[0], says)]
    if origin is dict:
        return {filled(inside[0], says): filled(inside[1], says)}
    if dataclasses.is_dataclass(hint):
        return of_kind(hint, says)
    return {
        str: says, bool: True, int: 7, float: 5.0,
        Any: {"a": [says, {says: says}], "b": None},
    }[hint]  # fmt: skip


def of_kind(kind: Any, says: str) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{f.name: filled(hints[f.name], says) for f in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_kind_of_fact_has_a_field_that_is_not_masked(kind: str) -> None:
    for says in SAYS:
        fact: Fact = of_kind(KINDS[kind], says)
        line = Chain("w").line(1.7e9, fact)
        assert not leaks(line) and not leaks(str(masked_deep(dataclasses.asdict(fact))))
        has_text = leaks(str(dataclasses.asdict(fact)))
        assert ("***" in line) == has_text, "what was text is still told, masked"


def test_no_secret_of_a_fact_is_shown_or_exported(tmp_path: Path) -> None:
    h = whole_run(evil=SAYS[0])
    for i, says in enumerate(SAYS):
        for n, kind in enumerate(sorted(KINDS)):
            if kind not in ("RunEnded", "Fact"):
                journal = Journal(h.store, f"m{i:04d}-{n:06x}", lambda: h.t)
                journal.record(of_kind(KINDS[kind], says))
                journal.flush()
    for key in h.store.list(""):
        assert not leaks(key) and not leaks(h.store.get(key)), key
    assert not any(isinstance(s.fact, Unreadable) for s in read_facts(h.store))

    now = lambda: h.t + 60.0  # noqa: E731
    words = io.StringIO()
    terminal = Console(file=words, width=220, force_terminal=True)
    summary = summarize(h.store, now=now)
    print_report(summary, terminal)
    write_html(summary, tmp_path / "report.html")
    view = LiveView(h.store, terminal, now)
    view.read()
    terminal.print(render(view.state, now(), h.store.url))
    for stamped in read_facts(h.store):
        terminal.print(str(describe(stamped.fact, view.state)), str(stamped.fact))
    info = RunInfo.of(h.store)
    operations = Operations(h.store, Lineage(h.store, info))
    writer = StreamWriter(h.store, info, operations, now=now)
    assert writer.round(last=True), "what W&B and every other tracker is told"
    said = {
        "report": (tmp_path / "report.html").read_text(),
        "report's numbers": json.dumps(to_json(summary), default=str),
        "terminal": words.getvalue(),
        "status": json.dumps(status(h.store, watch_s=0.0, now=now), default=str),
        "prometheus": RunGauges(h.store, now).text(),
        "trackers": "\n".join(str(row) for row in every_row(h.store)),
    }
    for key in h.store.list("trackers/"):
        assert not leaks(h.store.get(key)), key
    for name, text in said.items():
        assert text and not leaks(text), name
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not leaks(path.read_bytes()), path
