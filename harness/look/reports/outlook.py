"""The outlook of a run: its expected end beside its deadline, its waits, and its snapshot interval
with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core import facts as f
from harness.core.formatting import clock, duration, money, plural
from harness.core.loss_rates import ASSUMED_S, cost_s

if TYPE_CHECKING:
    from harness.ledger.run_state import RunState
    from harness.look.reports.summary import Summary

DONE = ("done", "finished")


@dataclass(frozen=True)
class RunOutlook:
    """Wall-clock seconds; None: not known. `done_s`: the end of the last step, if training goes on
    at its latest speed."""

    deadline_s: float | None = None
    done_s: float | None = None

    @classmethod
    def of(cls, state: RunState, now: float) -> RunOutlook:
        deadline_s = state.asked[1].deadline_s if state.asked else None
        if state.over:
            return cls(deadline_s)
        steps_per_s = state.rates().get("steps_per_s", 0.0)
        if not state.total or not steps_per_s:
            return cls(deadline_s)
        return cls(deadline_s, now + max(0, state.total - state.step) / steps_per_s)

    @property
    def spare_s(self) -> float | None:
        """Seconds between the end and the deadline; below 0: the run is late."""
        known = self.deadline_s is not None and self.done_s is not None
        return self.deadline_s - self.done_s if known else None  # type: ignore[operator]

    def words(self, now: float) -> str:
        """Return the deadline in words; "" if there is none."""
        if self.deadline_s is None:
            return ""
        left_s, spare_s = self.deadline_s - now, self.spare_s
        when = f"in {whole_seconds(left_s)}" if left_s >= 0 else f"{whole_seconds(-left_s)} ago"
        if spare_s is None:
            return when
        if spare_s < 0:
            return f"{when}: at this speed {whole_seconds(-spare_s)} too late"
        return f"{when}: {whole_seconds(spare_s)} to spare"

    def to_json(self) -> dict[str, Any] | None:
        if self.deadline_s is None:
            return None
        return {"deadline_s": self.deadline_s, "done_s": self.done_s, "spare_s": self.spare_s}


def whole_seconds(seconds: float) -> str:
    """Format a duration in whole seconds."""
    return duration(float(max(0, round(seconds)))).replace(".0 s", " s")


# ---- waiting -------------------------------------------------------------------------------------
def is_chosen(fact: f.Decided) -> bool:
    """Return whether the run waits by choice, and not because something is missing."""
    return fact.decision == "wait" and fact.expected_s is not None


def wait_words(fact: f.Decided, now: float) -> str:
    """Return the expectation of a wait by choice in words; "" for all other decisions."""
    if fact.decision != "wait" or fact.expected_s is None:
        return ""
    left_s = fact.expected_s - now
    when = f"for about {whole_seconds(left_s)} more" if left_s >= 1 else "longer than was expected"
    saves = f", to save about {money(fact.saving_usd)}" if fact.saving_usd else ""
    return f"{when}{saves}"


def waiting_json(fact: f.Decided | None) -> dict[str, Any] | None:
    """Return the run's wait by choice; None: there is none."""
    if fact is None or not is_chosen(fact):
        return None
    said = {"expected_s": fact.expected_s, "saving_usd": fact.saving_usd}
    return {"reason": fact.reason, **said}


@dataclass(frozen=True)
class ChosenWaits:
    """Waits by choice of a whole run: their number and total seconds. `saving_usd`: the sum of the
    savings that were expected when each began."""

    count: int = 0
    seconds: float = 0.0
    saving_usd: float = 0.0

    @classmethod
    def of(cls, facts: Iterable[f.Stamped], until_s: float) -> ChosenWaits:
        """Count the waits in `facts`, which are ordered by time, up to `until_s`."""
        found, begun_s, reason = cls(), 0.0, None
        for stamped in facts:
            fact = stamped.fact
            if not isinstance(fact, (f.Decided, f.AttemptIntended, f.RunEnded)):
                continue
            waits = isinstance(fact, f.Decided) and is_chosen(fact)
            if reason is not None and not (waits and fact.reason == reason):
                found = cls(found.count, found.seconds + stamped.t - begun_s, found.saving_usd)
                reason = None
            if isinstance(fact, f.Decided) and waits and reason is None:
                begun_s, reason = stamped.t, fact.reason
                usd = found.saving_usd + (fact.saving_usd or 0.0)
                found = cls(found.count + 1, found.seconds, usd)
        if reason is not None:
            found = cls(found.count, found.seconds + max(0.0, until_s - begun_s), found.saving_usd)
        return found


# ---- a report's rows -----------------------------------------------------------------------------
def outlook_rows(s: Summary) -> list[tuple[str, str]]:
    """Return rows for a report's head."""
    rows = []
    if s.asked and s.asked.deadline_s is not None:
        rows.append(("deadline", _deadline(s, s.asked.deadline_s)))
    waits = ChosenWaits.of(s.facts, s.ended_s)
    if waits.count:
        saves = f", to save about {money(waits.saving_usd)}" if waits.saving_usd else ""
        rows.append(
            (
                "waited",
                f"{duration(waits.seconds)} in {plural(waits.count, 'wait')} by choice{saves}",
            )
        )
    return rows


def _deadline(s: Summary, deadline_s: float) -> str:
    spare_s = deadline_s - done_at(s)
    at = f"{clock(deadline_s)} UTC"
    if s.state in DONE:
        how = "met, with" if spare_s >= 0 else "MISSED by"
        return f"{at}: {how} {whole_seconds(abs(spare_s))}" + (" to spare" if spare_s >= 0 else "")
    if spare_s < 0:
        return (
            f"{at}: missed"
            if s.state != "going on"
            else f"{at}: over {whole_seconds(-spare_s)} ago"
        )
    if s.state == "going on" and s.step and s.total_steps and s.wall_s:
        left_s = (s.total_steps - s.step) * s.wall_s / s.step
        how = "to spare" if left_s <= spare_s else "too late"
        return f"{at}: as it went so far {whole_seconds(abs(spare_s - left_s))} {how}"
    return f"{at}: {whole_seconds(spare_s)} left"


def done_at(s: Summary) -> float:
    """Return when the newest step of a finished run was committed; else its end as far as known."""
    last = [c.t_start + c.commit_s for c in s.snapshots if s.state in DONE and c.step == s.step]
    return min([*last[-1:], s.ended_s])


def interval_words(one: f.SnapshotCommitted) -> str:
    """Return the snapshot interval and its reason in words; "" if not recorded."""
    if one.interval_s <= 0:
        return ""
    if one.between_losses_s <= 0:
        return f"every {duration(one.interval_s)}, as the script says"
    costs = cost_s(one.stall_s, one.slowdown, one.commit_s)
    assumed = " (assumed)" if abs(one.between_losses_s / ASSUMED_S - 1) < 0.01 else ""
    return (
        f"every {duration(one.interval_s)}: one costs {duration(costs)} of training and is "
        f"there after {duration(one.commit_s)}; work is lost every "
        f"{duration(one.between_losses_s)}{assumed}"
    )
