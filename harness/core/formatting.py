"""The text form of numbers and times, for everything that people read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone


# ---- words ---------------------------------------------------------------------------------------
def duration(seconds: float | None) -> str:
    """Return a duration as text: `0.4 s`, `12.3 s`, `4 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    if seconds is None:
        return "–"
    if seconds < 99.95:
        return (
            f"{seconds:.1f} s" if seconds >= 0.095 or seconds == 0 else f"{1000 * seconds:.0f} ms"
        )
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def money(usd: float) -> str:
    if 0 < usd < 0.00005:
        return "<$0.0001"
    return (
        f"${usd:,.2f}"
        if abs(usd) >= 10 or usd == 0
        else f"${usd:.3f}"
        if abs(usd) >= 0.1
        else f"${usd:.4f}"
    )


def batch_text(global_batch: int, micro_batch: int, first_ranks: int = 0) -> str:
    """Return a global batch and what it is made of: `global batch 64 = 8 per device × 4
    accumulation × 2 ranks (script world)`. `first_ranks`: as in facts.SessionStarted."""
    micros = global_batch // micro_batch if micro_batch else 0
    if not micros or micros * micro_batch != global_batch:
        return f"global batch {global_batch}"
    if not first_ranks or micros % first_ranks:
        return f"global batch {global_batch} = {micros} × {micro_batch}"
    ranks = plural(first_ranks, "rank")
    each = f"{micro_batch} per device × {micros // first_ranks} accumulation"
    return f"global batch {global_batch} = {each} × {ranks} (script world)"


def nbytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.5 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.995 else f"{100 * share:.0f} %"


def number_text(value: float | None) -> str:
    return (
        "–"
        if value is None
        else f"{value:.4g}"
        if abs(value) < 1e-3 or abs(value) >= 1e4
        else f"{value:.4f}"
    )


def clock(t: float) -> str:
    try:
        return datetime.fromtimestamp(t, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "????-??-?? ??:??:??"  # no such date; the form is kept because callers slice it


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def shares_text(shares: Sequence[int]) -> str:
    """Return the micro-batches per rank as text: `6 5 5`, or `4 × 8` for many equal ones."""
    if len(set(shares)) == 1 and len(shares) > 4:
        return f"{len(shares)} × {shares[0]}"
    text = " ".join(map(str, shares[:8]))
    return text + (" …" if len(shares) > 8 else "")
