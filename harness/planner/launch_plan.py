"""The dry run of a launch: ranked offers, the world that they make, the first choice and its
reason.

`harness launch --dry-run` prints it. Knows offers and policies; knows no cloud.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.controller.combinators import without_nodes
from harness.core import batch
from harness.core.formatting import clock
from harness.core.mesh import ModelMesh, copy_ranks
from harness.core.world import BadInput, Launch, Offer, Policy, Stop, View, Wait, usd_per_work
from storage.terminal_text import plain

SHOWN = 15


@dataclass(frozen=True)
class Measured:
    """The measured speed of the run: seconds per step with all of its workers."""

    step_s: float
    work_per_s: float  # the sum of the workers' speeds


@dataclass(frozen=True)
class LaunchPlan:
    offers: tuple[Offer, ...]  # in the order in which the policy would take them
    no_market: tuple[str, ...]  # offers that were left out: their spot price is the on-demand price
    nodes: tuple[int, int]
    choice: Offer | None
    why: str
    micro_batches: int | None
    measured: Measured | None
    budget_usd: float | None
    replica_ranks: int = 1  # workers that compute one micro-batch together
    mesh: ModelMesh | None = None  # how workers share one copy of the model
    apart: Mapping[str, str] = field(default_factory=dict)  # left out of a fleet: why

    def usd_per_step(self, offer: Offer) -> float | None:
        """Return USD for a step on any number of nodes of this offer (twice the nodes take half
        the time); None if nothing was measured yet."""
        if self.measured is None:
            return None
        work_per_step = self.measured.step_s * self.measured.work_per_s
        return usd_per_work(offer) / 3600 * work_per_step

    def shares(self, nodes: int) -> tuple[int, ...] | None:
        """Return the gradient accumulation: micro-batches per step of each replica, in a world of
        so many nodes of the first choice. Workers that make no whole replica wait. None if unknown
        or impossible."""
        if self.choice is None or self.micro_batches is None:
            return None
        ranks = nodes * self.choice.workers
        whole = ranks - ranks % copy_ranks(self.mesh, self.replica_ranks)
        try:
            grouping = batch.Grouping(self.replica_ranks)
            return batch.plan(self.micro_batches, whole, grouping=grouping).shares
        except BadInput:
            return None

    def to_json(self) -> dict[str, Any]:
        return {
            "offers": [
                {
                    **vars(o),
                    "usd_per_work": usd_per_work(o),
                    "usd_per_step": self.usd_per_step(o),
                    "rank": i,
                }
                for i, o in enumerate(self.offers, 1)
            ],
            "no_spot_market": list(self.no_market),
            "apart": dict(self.apart),
            "nodes": list(self.nodes),
            "choice": self.choice.name if self.choice else None,
            "why": self.why,
            "replica_ranks": self.replica_ranks,
            "mesh": str(self.mesh or ""),
            "accumulation": {n: self.shares(n) for n in sorted(set(self.nodes))},
        }


def make(
    offers: Sequence[Offer],
    policy: Policy,
    nodes: tuple[int, int],
    *,
    no_market: Sequence[str] = (),
    micro_batches: int | None = None,
    measured: Measured | None = None,
    budget_usd: float | None = None,
    replica_ranks: int = 1,
    mesh: ModelMesh | None = None,
    apart: Mapping[str, str] | None = None,
    view: View | None = None,
) -> LaunchPlan:
    """Rank the offers by asking the policy repeatedly, as if every offer that it takes were then
    full. `view`: what the policy knows besides the offers; its present nodes are ignored."""
    known = View(0.0, 0.0, *nodes, (), ()) if view is None else view
    order: list[Offer] = []
    left = sorted(offers)
    first: tuple[Offer | None, str] | None = None
    while left:
        decision = policy(without_nodes(known, left))
        if first is None:
            first = (
                (decision.offer, decision.reason)
                if isinstance(decision, Launch)
                else (None, _words(decision))
            )
        if not isinstance(decision, Launch):
            break
        order.append(decision.offer)
        left = [o for o in left if o.name != decision.offer.name]
    choice, why = first or (None, "there is no offer")
    return LaunchPlan(
        tuple(order + left),
        tuple(no_market),
        nodes,
        choice,
        why,
        micro_batches,
        measured,
        budget_usd,
        replica_ranks,
        mesh,
        apart or {},
    )


def _words(decision: object) -> str:
    if isinstance(decision, Wait) and decision.expected_s is not None:
        until = f"{decision.reason}, probably until {clock(decision.expected_s)} UTC"
        saves = f" (saves about {decision.saving_usd:.2f} USD)" if decision.saving_usd else ""
        return until + saves
    return decision.reason if isinstance(decision, (Wait, Stop)) else str(decision)


def micro_batches(identity: Mapping[str, Any] | None, envs: Mapping[str, str]) -> int | None:
    """Return the micro-batches of a step: from the run's identity, else from the task's own
    GLOBAL_BATCH and MICRO_BATCH; None if neither has them."""
    if identity and identity.get("global_batch") and identity.get("micro_batch"):
        return int(identity["global_batch"]) // int(identity["micro_batch"])
    words = envs.get("GLOBAL_BATCH", ""), envs.get("MICRO_BATCH", "")
    return int(words[0]) // int(words[1]) if all(w.isdigit() and int(w) for w in words) else None


def measured_speed(steps: Sequence[tuple[float, int]], speed: float) -> Measured | None:
    """Return the speed by (seconds, ranks) of the newest steps; `speed`: of one worker there."""
    if not steps:
        return None
    ranks = steps[-1][1]
    return Measured(statistics.median(s for s, r in steps if r == ranks), ranks * speed)


def _spread(plan: LaunchPlan, nodes: int) -> str:
    """Return the gradient accumulation in a world of so many nodes, in words."""
    if plan.micro_batches is None:
        return "known when the script has said its batches"
    shares, each = plan.shares(nodes), plan.replica_ranks
    together = f", replicas of {each} workers" if each > 1 else ""
    if shares is None:
        few = f"too few workers for a replica of {each}, or "
        return f"{few if each > 1 else ''}too many workers for this batch"
    least, most = min(shares), max(shares)
    return f"{least}{together}" if least == most else f"{least}..{most}{together}"


def show(plan: LaunchPlan, console: Console) -> None:
    table = Table(title=f"{len(plan.offers)} offers", title_justify="left")
    for name in ("", "offer", "GPUs", "USD/h", "spared", "USD/step"):
        table.add_column(
            name, justify="left" if name in ("offer", "GPUs") else "right", overflow="fold"
        )
    least = min((usd_per_work(o) for o in plan.offers), default=1.0) or 1.0
    for rank, o in enumerate(plan.offers[:SHOWN], 1):
        spared = (
            f"{1 - o.usd_per_h / o.on_demand_usd_per_h:.0%}"
            if o.spot and o.on_demand_usd_per_h
            else ""
        )
        usd = plan.usd_per_step(o)
        step = f"{usd:.2g}" if usd is not None else f"x {usd_per_work(o) / least:.2f}"
        what, gpus = (
            Text(plain(o.name)),
            Text(plain(f"{o.accelerator}:{o.gpus}" if o.gpus else "-")),
        )
        table.add_row(str(rank), what, gpus, f"{o.usd_per_h:.4g}", spared, step)
    console.print(table)
    if len(plan.offers) > SHOWN:
        console.print(f"... and {len(plan.offers) - SHOWN} more")
    if plan.no_market:
        some = ", ".join(plan.no_market[:4])
        console.print(
            f"{len(plan.no_market)} left out, their spot price is the on-demand price: {some}",
            soft_wrap=True,
            markup=False,
        )
    for why in dict.fromkeys(plan.apart.values()):
        names = [name for name, reason in plan.apart.items() if reason == why]
        console.print(
            f"{len(names)} left out, whose nodes do not reach each other: {', '.join(names[:4])} "
            f"({why})",
            soft_wrap=True,
            markup=False,
        )
    if plan.measured is None:
        console.print(
            "USD/step is relative (by peak FLOP/s) until the run has made steps that can be timed."
        )
    if plan.choice is None:
        console.print(f"Nothing would be launched: {plan.why}", markup=False)
        return
    low, high = plan.nodes
    for nodes in sorted({low, high}):
        ranks, usd = nodes * plan.choice.workers, nodes * plan.choice.usd_per_h
        spread = _spread(plan, nodes)
        hours = (
            f", {plan.budget_usd / usd:.1f} h for {plan.budget_usd:g} USD"
            if plan.budget_usd and usd
            else ""
        )
        console.print(
            f"world   {nodes} nodes, {ranks} workers: {usd:.4g} USD/h{hours}; "
            f"accumulation {spread}",
            highlight=False,
        )
    console.print(
        f"first   {plan.choice.name}: {plan.why}", markup=False, highlight=False, soft_wrap=True
    )
