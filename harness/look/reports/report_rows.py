"""Rows and words that the report in a terminal and the page share: ends of attempts, verdicts."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from harness.core.facts import NodeBilled, NodeFound
from harness.core.formatting import (
    duration,
    money,
    nbytes,
    percent,
    plural,
)
from harness.ledger.bill import AttemptRow, EpochRow
from harness.look.reports.outlook import interval_words
from harness.look.reports.summary import SnapshotCosts, snapshot_costs

if TYPE_CHECKING:
    from harness.look.reports.summary import Summary


def steps_text(e: EpochRow) -> str:
    return "none" if e.first_step is None else f"{e.first_step}–{e.last_step}"


COLOURS = {  # for the terminal; the page has its own, for light and dark
    "useful": "green",
    "straggle": "bright_green",
    "redone": "red",
    "snapshot": "blue",
    "provision": "bright_magenta",
    "setup": "bright_blue",
    "start": "magenta",
    "reform": "yellow",
    "drain": "cyan",
    "drained": "bright_cyan",
    "idle": "bright_black",
    "other": "white",
}
MEANING = {
    "useful": "steps of the committed lineage",
    "redone": "work lost with its world, done again",
    "straggle": "in those steps: waiting for the slowest rank",
    "snapshot": "standing still to copy the state",
    "provision": "booting, SkyPilot's runtime, copying files",
    "setup": "the task's setup: installing packages",
    "start": "from the agent's start to the first step: imports, restore",
    "reform": "between generations: rendezvous, restart, restore",
    "drain": "after the last step, until its agent had ended",
    "drained": "its agent had ended; paid until the node was gone",
    "idle": "up while others trained",
    "other": "between steps: validation, logging",
}


def grace_text(grace_s: float | None, commit_s: float | None) -> str:
    """Return what is known of a notice's times: `, 25.0 s of grace, committed after 3.1 s`."""
    grace = "" if grace_s is None else f", {duration(grace_s)} of grace"
    return grace + ("" if commit_s is None else f", committed after {duration(commit_s)}")


def attempt_end(a: AttemptRow) -> str:
    if not a.end and a.gone_s is not None:
        return "not heard of any more"
    if not a.end:
        return "still there" if a.up_s is not None else "not up yet"
    return a.end + (f" ({a.reason})" if a.reason and a.reason != a.end else "")


def refusals(n: int) -> str:
    return f"and {plural(n, 'attempt')} that found no capacity (nothing billed)"


def money_rows(s: Summary) -> list[tuple[str, float, str]]:
    cost = s.ledger.cost
    rates = ["the prices are simulated"] if s.simulated else []
    rates += [f"{money(1000 * cost.spot_usd / s.step)} per 1,000 steps"] if s.step else []
    rates += [] if (usd := s.usd_per_1m_tokens) is None else [f"{money(usd)} per million tokens"]
    unpriced = sum(a.billed_s for a in s.ledger.attempts if not a.usd_per_h and not a.billed_nusd)
    rates += [f"nobody knows the price of {duration(unpriced)} of nodes"] if unpriced else []
    clusters = {t.fact.member for t in s.facts if isinstance(t.fact, NodeFound) and t.fact.cluster}
    billed = {t.fact.member for t in s.facts if isinstance(t.fact, NodeBilled)}
    if any(a.name in clusters - billed for a in s.ledger.attempts):
        rates.append(
            "without what machines cost after their agents' end (harness runs costs --ask-sky)"
        )
    rows = [("paid", cost.spot_usd, ", ".join(rates))]
    if cost.on_demand_usd:
        rows += [
            ("the same node-hours on demand", cost.on_demand_usd, f"saved {percent(cost.saved)}"),
            (
                "an on-demand run that nothing disturbs",
                cost.undisturbed_usd,
                f"saved {percent(cost.saved_undisturbed)}",
            ),
        ]
    if s.store and s.store.stored_nbytes:
        note = (
            f"estimate: {nbytes(s.store.stored_nbytes)} of snapshots; "
            f"{money(s.store.month_usd)} for each month that they are kept"
        )
        rows.append(("the bucket's storage meanwhile", s.store.storage_usd, note))
    if s.store and s.store.moved:
        ways = "; ".join(f"{nbytes(m.nbytes)} {m.source} to {m.target}" for m in s.store.moved)
        rows.append(("data between places", s.store.moved_usd, f"estimate: {ways}"))
    if s.data:
        read = ", ".join(f"{nbytes(n)} from {where}" for where, n in sorted(s.data.nbytes.items()))
        note = f"estimate: {s.data.requests:,} requests; {read}"
        rows.append(("reading data", s.data.requests_usd, note))
    return rows


def snapshot_rows(s: Summary) -> list[tuple[str, str]]:
    if not s.snapshots:
        return []
    whys: dict[str, int] = {}
    for one in s.snapshots:
        whys[one.why] = whys.get(one.why, 0) + 1
    return [
        (
            "committed",
            f"{len(s.snapshots)} ({', '.join(f'{n} {why}' for why, n in whys.items())}); {s.kept} "
            "in the bucket now",
        ),
        (
            "bytes",
            f"{nbytes(median(x.nbytes for x in s.snapshots))} each, "
            f"{nbytes(sum(x.nbytes for x in s.snapshots))} written",
        ),
        (
            "training stood still",
            f"{duration(median(x.stall_s for x in s.snapshots))} (median), "
            f"{_most(x.stall_s for x in s.snapshots)}",
        ),
        (
            "time to commit",
            f"{duration(median(x.commit_s for x in s.snapshots))} (median), "
            f"{_most(x.commit_s for x in s.snapshots)}",
        ),
        ("cost the training", _costs_text(snapshot_costs(s.snapshots, s.ledger.epochs))),
        *([("due", words)] if (words := interval_words(s.snapshots[-1])) else []),
    ]


def _costs_text(costs: SnapshotCosts) -> str:
    causes = (
        ("blocked", costs.blocked_s),
        ("slower steps beside the sending", costs.slower_s),
        ("waiting for commits", costs.waited_s),
    )
    return (
        f"{duration(costs.total_s)}, {percent(costs.share)} of it: "
        f"{', '.join(f'{what} {duration(seconds)}' for what, seconds in causes)}"
    )


def _most(values: Any) -> str:
    return f"at most {duration(max(values))}"


def verdict(in_time: bool | None, cancelled: bool) -> str:
    return (
        "cancelled"
        if cancelled
        else {True: "in time", False: "TOO LATE", None: "nothing to save"}[in_time]
    )
