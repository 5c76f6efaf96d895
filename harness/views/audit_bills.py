"""Bills in an audit: each by itself, and all of them against the ledger.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.bucket.layout import Epoch, attempt_of, epoch_key
from harness.core.columns import Columns, Committed
from harness.core.facts import AttemptEnded, AttemptIntended, RunEnded, Stamped
from harness.core.values import amount
from harness.views.audit_rules import RuleBroken
from harness.views.ledger import Ledger
from harness.views.painting import ns
from harness.views.rows import AttemptRow

SECONDS, USD = 1e-6, 1e-9  # what float sums of a bill may differ by


def check_bills(facts: Sequence[Stamped]) -> tuple[int, dict[int, AttemptEnded]]:
    """Each attempt's bill by itself: how many were asked for, and how each ended. Raises
    RuleBroken."""
    intended: dict[int, tuple[float, AttemptIntended]] = {}
    ended: dict[int, AttemptEnded] = {}
    run_ended_t = max((s.t for s in facts if isinstance(s.fact, RunEnded)), default=None)
    for stamped in facts:
        if isinstance(stamped.fact, AttemptIntended):
            intended.setdefault(stamped.fact.attempt, (stamped.t, stamped.fact))
        elif isinstance(stamped.fact, AttemptEnded):
            ended[stamped.fact.attempt] = stamped.fact  # a later one replaces an earlier one
    for number, e in ended.items():
        if number not in intended:
            raise RuleBroken(
                f"attempt {number}: wanted an intent before its end, found AttemptEnded alone"
            )
        seconds = 0.0 if e.up_s is None else max(0.0, e.gone_s - e.up_s)
        usd = seconds / 3600 * amount(intended[number][1].offer.get("usd_per_h"))
        if abs(e.billed_s - seconds) > SECONDS or abs(e.usd - usd) > USD + 1e-9 * usd:
            raise RuleBroken(
                f"attempt {number}: wanted a bill of {seconds} s and {usd} USD (from up to gone at "
                f"its price), found {e.billed_s} s and {e.usd} USD"
            )
    for number, (t, _) in intended.items():
        if run_ended_t is not None and t <= run_ended_t and number not in ended:
            raise RuleBroken(
                f"attempt {number}: wanted its end before the run's, found RunEnded but no "
                "AttemptEnded"
            )
    return len(intended), ended


def check_launched(
    facts: Iterable[Stamped], worlds: Mapping[int, Epoch], somebody_led: bool
) -> None:
    """A controller writes down that it wants a node before it asks for it, so each member that has
    an attempt's number was wanted, if anybody ever held the run's lease. Raises RuleBroken."""
    if not somebody_led:  # whoever started the agents numbered them
        return
    wanted = {s.fact.attempt for s in facts if isinstance(s.fact, AttemptIntended)}
    for number, epoch in worlds.items():
        for member in epoch.members:
            if (attempt := attempt_of(member)) and attempt not in wanted:
                raise RuleBroken(
                    f"{epoch_key(number)}: wanted a fact that attempt {attempt} was asked for, "
                    f"since {member} takes part; found none: facts of a controller were lost"
                )


def check_buckets(
    facts: Sequence[Stamped], records: Committed, steps: Columns, ended: dict[int, AttemptEnded]
) -> None:
    """The ledger's rows are made of buckets; the facts' bills are not. To the nanosecond and the
    nano-dollar they agree. Raises RuleBroken."""
    now_s = max((s.t for s in facts), default=0.0)
    now_s = max(now_s, float(steps["end"].max(initial=0.0)))
    for row in Ledger.of(facts, records, now_s, steps).attempts:
        e = ended.get(row.attempt)
        if row.name != str(row.attempt):
            check_stranger(row)
        if e is None or row.name != str(row.attempt):
            continue  # not billed to the end yet, or launched by no controller
        wanted_ns = 0 if e.up_s is None else max(0, ns(e.gone_s) - ns(e.up_s))
        painted_ns = sum(b - a for a, b, _ in row.segments)
        if not row.billed_ns == painted_ns == wanted_ns or row.billed_nusd != ns(e.usd):
            raise RuleBroken(
                f"attempt {row.attempt}: wanted buckets that add up to {wanted_ns} ns and "
                f"{ns(e.usd)} nano-USD, found {row.billed_ns} ns ({painted_ns} painted) and "
                f"{row.billed_nusd} nano-USD"
            )


def check_stranger(row: AttemptRow) -> None:
    """A node that no controller launched: no fact says its bill, so it must be its time at its
    price. Raises RuleBroken."""
    painted_ns = sum(b - a for a, b, _ in row.segments)
    wanted_nusd = round(painted_ns * row.usd_per_h / 3600)
    if row.billed_ns != painted_ns or row.billed_nusd != wanted_nusd:
        raise RuleBroken(
            f"node {row.name}: wanted buckets that add up to {painted_ns} ns and {wanted_nusd} "
            f"nano-USD (at ${row.usd_per_h:g} an hour), found {row.billed_ns} ns and "
            f"{row.billed_nusd} nano-USD"
        )
