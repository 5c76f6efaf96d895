"""What an audit has found, and how people see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNSIGNED = (
    "without --key this proves nothing against who may write to the bucket and makes all hashes "
    "anew (docs/PROOF.md)"
)


@dataclass(frozen=True)
class Check:
    """One rule. `detail`: the violation in one sentence, or what was proved. `n`: how many
    things were looked at."""

    name: str
    ok: bool
    detail: str
    n: int


@dataclass(frozen=True)
class AuditReport:
    ok: bool
    checks: list[Check]
    first_violation: str | None
    notes: list[str] = field(default_factory=list)  # odd, but as it may be


def print_audit(report: AuditReport, console: Console) -> None:
    """Render a report for people: each rule, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in report.checks:
        mark = Text("ok", "green") if check.ok else Text("VIOLATED", "bold red")
        table.add_row(mark, check.name, str(check.n) if check.ok else "", Text(check.detail))
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}", "dim"))
    console.print(
        Text("Everything holds.", "bold green")
        if report.ok
        else Text(f"First violation: {report.first_violation}", "bold red")
    )
