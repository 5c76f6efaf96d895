"""The table of `make gpu` as Markdown."""

from __future__ import annotations

from typing import Any


def markdown(found: dict[str, Any]) -> str:
    """`found`: what gpu.json holds."""
    about = found["machine"]
    lines = ["# `make gpu`", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    if found["miniature"]:
        lines += ["**In miniature, on a CPU: shows that all parts run, and nothing else.**", ""]
    lines += ["| part | | s | clocks before / after | |", "|---|---|---|---|---|"]
    for part in found["parts"]:
        seen = " / ".join(filter(None, part["clocks"]))
        lines.append(
            f"| {part['name']}: {part['says']} | {part['state']} | {part['took_s']:.0f} | {seen} | "
            f"{_cell(part['why'])} |"
        )
    lines += ["", "| part | what | | beside | ratio | note |", "|---|---|---|---|---|---|"]
    order = [part["name"] for part in found["parts"]]
    for row in sorted(found["rows"], key=lambda r: order.index(r["part"])):
        lines.append(
            f"| {row['part']} | {_cell(row['what'])} | {_value(row)} | {_peer(row)} | "
            f"{'' if row['ratio'] is None else format(row['ratio'], '.3g')} | "
            f"{_cell(row['note'])} |"
        )
    return "\n".join(lines) + "\n"


def _value(row: dict[str, Any]) -> str:
    if row["missing"]:
        return f"not here: {_cell(row['missing'])}"
    if row["ok"] is not None:
        return "holds" if row["ok"] else "**does not hold**"
    return f"{row['value']:.4g} {row['unit']}"


def _peer(row: dict[str, Any]) -> str:
    return "" if row["peer_value"] is None else f"{row['peer']}: {row['peer_value']:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
