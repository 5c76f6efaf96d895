"""What happens in a run, told in words as it goes on: its events, and its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core import facts as f
from harness.core.setups import HARDWARE
from harness.views.outlook import RunOutlook, wait_words, whole
from harness.views.words import clock, duration, money, nbytes, number, percent, plural
from storage.text import plain

if TYPE_CHECKING:
    from harness.views.watching import LiveState


# ---- events --------------------------------------------------------------------------------------
def describe(fact: f.Fact, state: LiveState) -> tuple[str, str] | None:
    """One event in words: style and text. None: not worth a line."""
    return _of_nodes(fact, state) or _of_training(fact, state)


def _of_nodes(fact: f.Fact, state: LiveState) -> tuple[str, str] | None:
    match fact:
        case f.RunAsked(task, low, high, policy):
            return "bold", f"launch {task} on {low} to {high} nodes, policy {policy}"
        # asking and being refused is no event: in an outage there would be nothing else
        case f.AttemptUp(attempt):
            node = state.nodes.get(str(attempt))
            return "cyan", f"node {attempt} is up" + (
                f" on {node.offer}" if node and node.offer else ""
            )
        case f.AttemptEnded() if fact.end != "no-capacity":
            style = {"finished": "green", "drained": "", "terminated": ""}.get(fact.end, "red")
            return style, f"node {fact.attempt}: {fact.end}" + (
                f" ({fact.reason})" if fact.reason and fact.reason != fact.end else ""
            )
        case f.NodeFound(member) if not state.attempt_of.get(member, member).isdigit():
            price = "" if fact.usd_per_h is None else f", {money(fact.usd_per_h)} an hour"
            words = (fact.cloud, fact.region, fact.instance_type or fact.accelerators)
            place = " ".join(word for word in words if word)
            return "cyan", f"{_who(state, member)} stands in {place or 'no known place'}{price}"
        case f.NodeBilled(member, launched_s, gone_s):
            lived = "is still there" if gone_s is None else f"lived {duration(gone_s - launched_s)}"
            return "", f"{_who(state, member)}: by SkyPilot's bill it {lived}"
        case f.NoticeSeen(member, source, kind, _, deadline):
            until = "" if deadline is None else f", deadline {clock(deadline)[11:]}"
            return "yellow", f"{_who(state, member)}: {kind} notice from {source}{until}"
        case f.NoticeAcknowledged(member, _, heard):
            told = "was told" if heard else "could not be told"
            return "", f"{_who(state, member)}: the cloud {told} that it has gone"
        case f.AttemptDoubted(attempt, doubted):
            return (
                "",
                f"node {attempt}: "
                + ("may not stay; another one is looked for" if doubted else "stays after all"),
            )
        case f.NoticeCancelled(member):
            return "", f"{_who(state, member)}: notice cancelled"
        case f.HealthSeen(member, gpu, what, message, action) if action != "ignore":
            return "red" if action in (
                "drain",
                "kill",
            ) else "yellow", f"{_who(state, member)}: GPU {gpu}: {what} {message}: {action}"
        case f.Decided(decision, reason) if decision != "wait":
            return "dim", f"{decision}: {reason}"
        case f.RunEnded(outcome, reason):
            return "bold green" if outcome == "done" else "bold red", f"run {outcome}: {reason}"
    return None


def _of_training(fact: f.Fact, state: LiveState) -> tuple[str, str] | None:
    match fact:
        case f.EpochStarted(epoch, members, world, reason):
            names = " ".join(state.attempt_of.get(m, m) for m in members)
            return (
                "bold",
                f"epoch {epoch} ({reason}): {plural(world, 'rank')} on "
                f"{plural(len(members), 'node')} ({names})",
            )
        case f.SessionStarted():
            accumulation = f", accumulation {max(fact.shares)}" if fact.shares else ""
            verb = (
                f"resumed from step {fact.resumed_step} in {duration(fact.restore_s)}"
                if fact.resumed_step
                else "training from step 0"
            )
            return "green", f"epoch {fact.epoch}: {verb}{accumulation}"
        case f.SetupChanged(epoch, _, action, changes) if any(
            row.get("level") != HARDWARE for row in changes
        ):
            names = ", ".join(row.get("name", "") for row in changes[:4])
            more = ", ..." if len(changes) > 4 else ""
            return (
                "red" if action == "refused" else "yellow",
                f"epoch {epoch}: set up otherwise than the run began, {action}: {names}{more}",
            )
        case f.EpochLeft(epoch, member, why) if why not in ("resize", "finished"):
            return "red" if why in (
                "failed",
                "killed",
                "hung",
                "unfit",
                "peer-lost",
            ) else "", f"{_who(state, member)} left epoch {epoch}: {why}"
        case f.WorkerFailed():
            return (
                "red",
                f"rank {fact.rank} on {_who(state, fact.member)} ended with {fact.error}: "
                f"{fact.message[:160]}",
            )
        case f.WorkerHung():
            return "red", f"rank {fact.rank} on {_who(state, fact.member)} hangs: {fact.what}"
        case f.GraceSpent(member, _, _, _, _, verdict):
            return "red", f"{_who(state, member)}: its time is up: {verdict}"
        case f.DrainVerdict() if fact.rank == 0 or not fact.committed:
            return _of_drain(fact, state)
        case f.Warned(step, _, what):
            return "yellow", f"step {step}: {what}"
        case f.SnapshotCommitted():
            return (
                "blue",
                f"snapshot of step {fact.step} committed ({fact.why}, {nbytes(fact.nbytes)}, "
                f"{duration(fact.commit_s)})",
            )
        case f.SnapshotFailed(step, _, why):
            return "red", f"snapshot of step {step} failed: {why}"
        case f.SnapshotQuarantined(step, _, why):
            return "red", f"snapshot of step {step} is bad: {why}"
        case f.GuardTripped(step, _, what, value):
            return "red", f"step {step}: {what} ({value:g})"
    return None


def _of_drain(fact: f.DrainVerdict, state: LiveState) -> tuple[str, str]:
    """Of rank 0's share, and of every share that did not make it."""
    forecast = (
        f"{duration(fact.need_s)} needed, {duration(max(0.0, fact.left_s))} left when it was staged"
    )
    if fact.committed:
        return "blue", (
            f"{_who(state, fact.member)}: step {fact.step} was committed before the deadline "
            f"({forecast})"
        )
    return "red", (
        f"{_who(state, fact.member)}: rank {fact.rank}'s share of step {fact.step} is not "
        f"committed; safe is step {fact.last_good_step} ({forecast})"
    )


def _who(state: LiveState, member: str) -> str:
    return f"node {state.attempt_of.get(member, member)}"


# ---- numbers -------------------------------------------------------------------------------------
about = whole  # live numbers are read so


def progress_line(state: LiveState, now: float) -> str:
    """Everything of the header in one line of plain text."""
    parts = [state.run_state, f"step {state.step:,}" + (f"/{state.total:,}" if state.total else "")]
    parts += [f"{name} {value}" for name, value in number_rows(state, now)]
    return plain("  ".join(parts))


def number_rows(state: LiveState, now: float) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if state.last_step:
        found.append(("loss", number(state.last_step.loss)))
    if state.validated:
        names = sorted(
            (n for n in state.validated[1] if "loss" in n), key=lambda n: (n != "val_loss", n)
        )
        found += [(name.replace("_", " "), number(state.validated[1][name])) for name in names[:1]]
    rates = state.rates() if state.training() else {}
    if "tokens_per_s" in rates:
        found.append(("tokens/s", f"{rates['tokens_per_s']:,.0f}"))
    elif "samples_per_s" in rates:
        found.append(("samples/s", f"{rates['samples_per_s']:,.1f}"))
    if "mfu" in rates:
        found.append(("MFU", percent(rates["mfu"])))
    if state.world:
        found.append(
            ("world", f"{state.world}" + (f" × {state.accumulation}" if state.accumulation else ""))
        )
    committed, taken_s = state.committed
    if committed:
        age = "" if state.over or taken_s is None else f" ({about(now - taken_s)} ago)"
        every_s = state.snapshot[1].interval_s if state.snapshot and age else 0.0
        # the interval when it was taken: once that has long passed, it is another one by now
        if every_s >= 1 and taken_s is not None and now - taken_s < 2 * every_s:
            age = age[:-1] + f", every {about(every_s)})"
        found.append(("snapshot", f"step {committed:,}{age}"))
    if state.refused and not state.training():
        found.append(("refused", f"{state.refused} times"))
    paid, on_demand = state.spent(now)
    if paid:
        found.append(
            (
                "spent",
                money(paid)
                + (f" ({percent(1 - paid / on_demand)} saved)" if on_demand > paid else ""),
            )
        )
    if (usd := state.usd_per_million_tokens(now)) is not None:
        found.append(("per M tokens", money(usd)))
    if rates and state.total > state.step:
        found.append(("left", about((state.total - state.step) / rates["steps_per_s"])))
    if not state.over and (words := RunOutlook.of(state, now).words(now)):
        found.append(("deadline", words))
    return found


def split_line(state: LiveState) -> str:
    """Where a step's time goes, in one line; "" if nobody told."""
    split = state.step_split()
    whole = sum(split.values())
    if not whole:
        return ""
    told = state.timed[1] if state.timed else None
    most = sorted(split.items(), key=lambda item: -item[1])
    parts = [f"{100 * s / whole:.0f} % {p}" for p, s in most if s / whole >= 0.04]
    line = f"step {duration(whole)}: {', '.join(parts)}"
    if told and len(told.own_s) == 3 and len(told.own_ranks) == 2 and told.own_s[1] > 0:
        behind = told.own_s[2] / told.own_s[1] - 1
        if told.own_ranks[0] != told.own_ranks[1] and behind >= 0.05:
            line += f"; slowest rank {told.own_ranks[1]} (+{100 * behind:.0f} %)"
    return line


def decision_line(state: LiveState, now: float) -> str:
    """What the controller has decided, and why; "" if nothing, or it is over."""
    if state.decided is None or state.over:
        return ""
    t, fact = state.decided
    reason = f": {fact.reason}" if fact.reason else ""
    expected = f", {words}" if (words := wait_words(fact, now)) else ""
    return f"{fact.decision}{reason}{expected} ({about(now - t)} ago)"
