"""The decisions of one replay as lines that a person can follow: when, with what left, what was
decided and why. `harness market simulate --trace FILE --why WINDOW`.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.world import Decision, Launch, Policy, Stop, Terminate, View
from harness.planner.fast_replay import play
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import ReplayResult
from harness.planner.traces import ZoneTrace


@dataclass(frozen=True)
class DecisionLine:
    """Decisions of one kind while the nodes stayed as they were, but for those that were asked
    for: a run asks again and again where there is no room. `work_h`, `time_h`: hours of work on all
    nodes and hours until the deadline that were left at the first of them; `usd`: spent by then;
    `nodes`: that were there, and `rooms`: what spot had room for, which the policy does not know,
    by offer; `did`: what was decided, `times` times; `until_h`: when the last one was."""

    at_h: float
    work_h: float
    time_h: float
    usd: float
    nodes: tuple[tuple[str, int], ...]
    rooms: tuple[tuple[str, int], ...]
    did: str
    reason: str
    times: int = 1
    until_h: float = 0.0


def explained(
    zones: Sequence[ZoneTrace], first: int, job: ReplayJob, policy: Policy
) -> tuple[ReplayResult, list[DecisionLine]]:
    """Replay from tick `first`, and return the result with all that was decided."""
    lines: list[DecisionLine] = []
    same: dict[tuple[str, str], int] = {}  # decision -> its line, while the nodes stay the same
    there: Counter[str] = Counter()

    def recorded(view: View) -> Decision:
        nonlocal there
        decision, at_h = policy(view), view.now_s / 3600
        nodes = Counter(node.offer.name for node in view.alive)
        if nodes != there and not (lines and lines[-1].did.startswith("ask")):
            same.clear()
        there = nodes
        key = did, reason = _did(view, decision), decision.reason
        if key in same:
            line = lines[same[key]]
            lines[same[key]] = dataclasses.replace(line, times=line.times + 1, until_h=at_h)
            return decision
        same[key] = len(lines)
        left = view.known.left(view.committed_step) or 0.0
        tick = first + round(view.now_s / zones[0].tick_s)
        lines.append(
            DecisionLine(
                at_h,
                left / job.nodes[1] / 3600,
                job.deadline_h - at_h,
                view.spent_usd,
                tuple(nodes.items()),
                tuple((z.zone, int(z.nodes[tick]) if tick < len(z.nodes) else 0) for z in zones),
                did,
                reason,
                until_h=at_h,
            )
        )
        return decision

    return play(zones, first, job, recorded), lines


def _did(view: View, decision: Decision) -> str:
    """Return what is done, in the words of a timeline."""
    if isinstance(decision, Launch):
        instead = " in another's stead" if decision.instead_of is not None else ""
        return f"ask {decision.offer.name}{instead}"
    if isinstance(decision, Terminate):
        going = {decision.attempt, *decision.also}
        names = Counter(node.offer.name for node in view.alive if node.attempt in going)
        return "let go " + ", ".join(f"{n} x {name}" for name, n in names.items())
    return "stop" if isinstance(decision, Stop) else "wait"
