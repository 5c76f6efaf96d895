"""When a run will be done, beside its deadline; what it waits for; and how often it snapshots, and
why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.core import facts as f
from harness.core.losses import ASSUMED_S, cost_s
from harness.views.words import clock, duration, money, plural

if TYPE_CHECKING:
    from harness.views.summary import Summary
    from harness.views.watching import LiveState

DONE = ("done", "finished")


@dataclass(frozen=True)
class RunOutlook:
    """Wall-clock seconds; None: not known. `done_s`: when the last step is done, if training goes
    on as it did last."""

    deadline_s: float | None = None
    done_s: float | None = None

    @classmethod
    def of(cls, state: LiveState, now: float) -> RunOutlook:
        deadline_s = state.asked[1].deadline_s if state.asked else None
        if state.over:
            return cls(deadline_s)
        steps_per_s = state.rates().get("steps_per_s", 0.0)
        if not state.total or not steps_per_s:
            return cls(deadline_s)
        return cls(deadline_s, now + max(0, state.total - state.step) / steps_per_s)

    @property
    def spare_s(self) -> float | None:
        """Between the end and the deadline; below 0: it is late."""
        known = self.deadline_s is not None and self.done_s is not None
        return self.deadline_s - self.done_s if known else None  # type: ignore[operator]

    def words(self, now: float) -> str:
        """Of the deadline; "" if there is none."""
        if self.deadline_s is None:
            return ""
        left_s, spare_s = self.deadline_s - now, self.spare_s
        when = f"in {whole(left_s)}" if left_s >= 0 else f"{whole(-left_s)} ago"
        if spare_s is None:
            return when
        if spare_s < 0:
            return f"{when}: at this speed {whole(-spare_s)} too late"
        return f"{when}: {whole(spare_s)} to spare"

    def to_json(self) -> dict[str, Any] | None:
        if self.deadline_s is None:
            return None
        return {"deadline_s": self.deadline_s, "done_s": self.done_s, "spare_s": self.spare_s}


def whole(seconds: float) -> str:
    """A duration in whole seconds."""
    return duration(float(max(0, round(seconds)))).replace(".0 s", " s")


# ---- waiting -------------------------------------------------------------------------------------
def is_chosen(fact: f.Decided) -> bool:
    """Does the run wait because it is better to, and not for want of anything?"""
    return fact.decision == "wait" and fact.expected_s is not None


def wait_words(fact: f.Decided, now: float) -> str:
    """What is expected of a wait that was chosen; "" for all else."""
    if fact.decision != "wait" or fact.expected_s is None:
        return ""
    left_s = fact.expected_s - now
    when = f"for about {whole(left_s)} more" if left_s >= 1 else "longer than was expected"
    saves = f", to save about {money(fact.saving_usd)}" if fact.saving_usd else ""
    return f"{when}{saves}"


def waiting_json(fact: f.Decided | None) -> dict[str, Any] | None:
    """What a run waits for by choice; None: it does not."""
    if fact is None or not is_chosen(fact):
        return None
    said = {"expected_s": fact.expected_s, "saving_usd": fact.saving_usd}
    return {"reason": fact.reason, **said}


@dataclass(frozen=True)
class ChosenWaits:
    """Of a whole run: how many, and for how long in all. `saving_usd`: what each was expected to
    save when it began."""

    count: int = 0
    seconds: float = 0.0
    saving_usd: float = 0.0

    @classmethod
    def of(cls, facts: Iterable[f.Stamped], until_s: float) -> ChosenWaits:
        """`facts` by time."""
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
    """Of a report's head."""
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
        return f"{at}: {how} {whole(abs(spare_s))}" + (" to spare" if spare_s >= 0 else "")
    if spare_s < 0:
        return f"{at}: missed" if s.state != "going on" else f"{at}: over {whole(-spare_s)} ago"
    if s.state == "going on" and s.step and s.total_steps and s.wall_s:
        left_s = (s.total_steps - s.step) * s.wall_s / s.step
        how = "to spare" if left_s <= spare_s else "too late"
        return f"{at}: as it went so far {whole(abs(spare_s - left_s))} {how}"
    return f"{at}: {whole(spare_s)} left"


def done_at(s: Summary) -> float:
    """When the newest step of a run that is over was committed; else its end as far as known."""
    last = [c.t_start + c.commit_s for c in s.snapshots if s.state in DONE and c.step == s.step]
    return min([*last[-1:], s.ended_s])


def interval_words(one: f.SnapshotCommitted) -> str:
    """How often snapshots are due, and why; "" if nobody has said."""
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
