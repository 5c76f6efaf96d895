"""The loop that keeps a run alive. It runs in the controller; `cli/` gives it the real world,
`lab/simulation/simulation.py` a simulated one.

Every round it reads the whole state again (nodes, newest snapshot, stop requests), asks a policy
for one decision, and acts on it. State that must survive between rounds is recorded as facts
*before* acting, and its memory (`ledger/attempts.py`) is only a fold of those facts. Taking over
from a controller that died at any point is therefore no special case: the successor reads the same
facts, sees the same nodes, and goes on. Progress is what is committed in the bucket; nodes are
never asked for it.

Pure: knows no torch, SkyPilot, wall clock or process. Errors propagate, except that it waits out an
outage of cloud or bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.bucket.archive import segments
from harness.bucket.controller_lease import Lease
from harness.bucket.layout import DOUBT, WITHOUT_SESSION, StopOrder, order_key
from harness.bucket.member_heartbeats import HeartbeatReader, MemberHeartbeat
from harness.bucket.orders import ask_to_leave, ask_to_stop, stop_order
from harness.controller import combinators
from harness.controller.learning import Estimator, NoEstimates
from harness.controller.run_limits import LimitsWriter, RunSpec, broken
from harness.core.decoding import number
from harness.core.facts import (
    AttemptDoubted,
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    Decided,
    Fact,
    LeaseTaken,
    RunEnded,
    Stamped,
)
from harness.core.world import (
    MOST_PLACES,
    CloudUnavailable,
    Decision,
    Launch,
    Node,
    Offer,
    Policy,
    Stop,
    Terminate,
    View,
    Wait,
    World,
    cloud_of,
)
from harness.ledger.attempts import UNSHOWN, AttemptHistory, how_it_ended, killed_by
from harness.ledger.bill import bill
from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, SnapshotTooNew
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

# The time between two controllers that counts towards a run's hours, despite wrong clocks.

CLOCKS_AGREE_S = 3600.0
LITTLE_S = 1800.0  # a shorter gap is a restart by a supervisor and is not checked
MOST_WRITERS = 64  # newest facts of at most this many of the run's nodes are read


def counted(store: ObjectStore, last_s: float, now_s: float) -> tuple[float, str]:
    """Return the seconds that count since the last controller's fact, and a warning or "".

    `last_s`: time of that fact, by that controller's clock; `now_s`: by ours. Raises StoreError."""
    claimed_s = now_s - last_s
    if abs(claimed_s) < LITTLE_S:
        return claimed_s, ""
    proven_s = max(0.0, _told_s(store, last_s) - last_s)
    if abs(claimed_s - proven_s) <= CLOCKS_AGREE_S:
        return claimed_s, ""
    ahead = claimed_s > proven_s
    counts_s = proven_s + CLOCKS_AGREE_S if ahead else proven_s
    how = "ahead of" if ahead else "behind"
    what = "that goes on from there" if ahead else "that has passed"
    off_h, claimed_h = abs(claimed_s - proven_s) / 3600, claimed_s / 3600
    return counts_s, (
        f"the clock of this controller is {off_h:.1f} h {how} the newest facts of the run: of the "
        f"{claimed_h:.1f} h since its last controller, {counts_s / 3600:.1f} h count to its hours, "
        f"as time {what}; set the clock right if it is wrong"
    )


def _told_s(store: ObjectStore, last_s: float) -> float:
    """Return when the run's nodes wrote their last facts: the median of those after `last_s`, so
    that one wrong clock proves nothing; `last_s` if there are none."""
    newest = [
        keys[max(keys)]
        for writer, keys in segments(store).items()
        if keys and not writer.startswith("controller-")
    ]
    told = [t for key in newest[-MOST_WRITERS:] if (t := _time_of(store, key)) > last_s]
    return statistics.median_low(told) if told else last_s


def _time_of(store: ObjectStore, key: str) -> float:
    """Return the time of the last fact in a segment; -inf if it cannot be read."""
    try:
        body = parsed(store.get(key).rstrip().rpartition(b"\n")[2])
        return number(body.get("t"), 0.0) if isinstance(body, dict) else -math.inf
    except (NotFound, BadObject):
        return -math.inf


# The recovery loop's short memory: heartbeats in the bucket, and when states of attempts began.

LISTEN_S = 5.0  # between two reads of heartbeats, while the cloud does not show every node
SEEK_S = 60.0  # between two searches for members of unknown attempts


@dataclass
class FirstSeen:
    """Times at which a state of an attempt began, by attempt."""

    unseen_s: dict[int, float] = field(default_factory=dict)  # intended, not shown by the cloud
    told_s: dict[int, float] = field(default_factory=dict)  # terminated last
    asked_s: dict[int, float] = field(default_factory=dict)  # asked to leave first


@dataclass
class HeartbeatPoller:
    """Heartbeats in the bucket, as of the last look."""

    beats: HeartbeatReader
    heard: list[MemberHeartbeat] = field(default_factory=list)
    heard_s: float = -math.inf
    members: set[int] = field(default_factory=set)  # attempts that ever had one
    sought_s: float = -math.inf

    def strangers(self, now: float, *known: Container[int]) -> set[int]:
        """Return attempts that have a member in the bucket and are in none of `known`."""
        if now - self.sought_s >= SEEK_S:
            self.members, self.sought_s = self.beats.attempts(), now
        return {n for n in self.members if not any(n in attempts for attempts in known)}

    @property
    def unsilent(self) -> set[int]:
        """Attempts whose members were not yet seen to be silent or gone."""
        return {beat.attempt for beat in self.heard if not beat.silent()}

    def listen(self, attempts: Collection[int], now: float) -> list[MemberHeartbeat]:
        """Return the heartbeats of `attempts`; the last answer again within `LISTEN_S`."""
        if attempts and now - self.heard_s >= LISTEN_S:
            self.heard, self.heard_s = self.beats.look(attempts), now
        return self.heard


ENDED_UNSHOWN = (
    f"{UNSHOWN}, and its agent has ended: look for its machine where it was launched from"
)
REPEAT_S = 30.0  # a termination is repeated after this if the node is still seen


@dataclass(frozen=True)
class RunOutcome:
    outcome: str  # "done" | "stopped" | "failed"
    reason: str
    committed_step: int
    # attempts whose agents have ended, but whose machines this cloud cannot prove to be gone
    unproven: tuple[int, ...] = ()


class FactWriter(Protocol):
    """A writer of facts; after `flush` they are durable in the bucket."""

    def record(self, fact: Fact) -> None: ...
    def flush(self) -> None: ...
    def read(self) -> list[Stamped]: ...


def recover(
    run: RunSpec,
    policy: Policy,
    world: World,
    journal: FactWriter,
    lease: Lease,
    learner: Estimator | None = None,
) -> RunOutcome:
    """Control `run` until it is done, stopped or failed; return only when no node of it is left.

    Raises Fenced when another controller holds the lease (nothing is touched then). Raises
    StoreError or CloudUnavailable when bucket or cloud did not answer, or refused, for too long:
    nodes are left as they are, and the next call takes them over.
    """
    policy = within_limits(combinators.replacing(policy), run)
    term = lease.acquire()
    loop = Loop(
        run,
        policy,
        world,
        journal,
        lease,
        AttemptHistory.of(journal.read(), world.rng, run.block_limit_s),
        learner or NoEstimates(),
    )
    counted_s, clocks = (
        counted(world.store, loop.book.last_s, world.clock.now())
        if loop.book.started_s is not None
        else (None, "")
    )
    loop.note(LeaseTaken(term, lease.holder, counted_s))
    if clocks:
        loop.note(Decided("skip", clocks))
    if unread := loop.book.unread:
        lost = (
            f"{len(unread)} facts of earlier controllers cannot be read ({unread[0]}); nodes "
            "that only they told of are adopted as seen"
        )
        loop.note(Decided("skip", lost))
    answered_s = world.clock.now()
    while True:
        began_s = world.clock.now()
        try:
            outcome = loop.round()
            answered_s = world.clock.now()
        except SnapshotTooNew:
            raise
        except (CloudUnavailable, StoreError) as e:
            # work that was cut off here is detected, and done again, in the next round
            silent = isinstance(e, (CloudUnavailable, StoreUnavailable))
            if world.clock.now() - answered_s > (run.max_outage_s if silent else run.max_refused_s):
                raise
            with contextlib.suppress(StoreError):
                loop.stop_if_spent()
            world.clock.sleep(run.poll_s)
            loop.unanswered_s += world.clock.now() - began_s
            continue
        if outcome:
            return outcome


def done_in_words(step: int, ended: str) -> str:
    """Return the end of a run that is done. `ended`: see `Snapshots.ended`. A script without a
    session has saved nothing, so that no step can be called its last."""
    if ended != WITHOUT_SESSION:
        return f"finished at step {step}"
    saved = f"the last snapshot is of step {step}" if step else "nothing is saved in the run"
    return f"{ended} and had no session: its steps were not counted, {saved}"


def within_limits(policy: Policy, run: RunSpec) -> Policy:
    """Return `policy` wrapped to stop at the run's limits of USD and hours."""
    if run.budget_usd is not None:
        policy = combinators.within_budget(policy, usd=run.budget_usd)
    if run.max_hours is not None:
        policy = combinators.within_hours(policy, hours=run.max_hours)
    return policy


@dataclass
class Loop:
    """The recovery loop of one controller. All of its state but the book may be forgotten without
    harm."""

    run: RunSpec
    policy: Policy
    world: World
    journal: FactWriter
    lease: Lease
    book: AttemptHistory
    learner: Estimator = field(default_factory=NoEstimates)
    since: FirstSeen = field(default_factory=FirstSeen)
    strays: list[Node] = field(default_factory=list)  # alive, but not in the book
    shown: set[int] = field(default_factory=set)  # attempts that the cloud knows
    there: set[int] = field(default_factory=set)  # ... and reports to be alive
    # attempts that the cloud does not know, and that send heartbeats to the bucket
    beating: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)  # not in the book, and not yet seen silent
    late: dict[int, Node] = field(default_factory=dict)  # given up as lost, with heartbeats since
    listener: HeartbeatPoller = field(init=False)
    limits: LimitsWriter = field(init=False)
    newest: Manifest | None = None
    ending_s: float | None = None
    unanswered_s: float = 0.0  # ... part of that time without an answer from cloud or bucket
    waiting: Wait | None = None  # the wait that was recorded last

    def __post_init__(self) -> None:
        self.listener = HeartbeatPoller(HeartbeatReader(self.world.store, self.world.clock.now))
        self.limits = LimitsWriter(self.world.store, self.run, self.lease.term)

    def note(self, fact: Fact) -> None:
        self.journal.record(fact)
        self.book.add(self.world.clock.now(), fact)

    def round(self) -> RunOutcome | None:
        """Look, decide, act once."""
        self.lease.renew()
        step, ended = self.committed()
        self.reconcile(step)
        if ended:
            return self.end("done", done_in_words(step, ended), step)
        if stop := stop_order(self.world.store):
            return self.end("failed" if stop.failed else "stopped", stop.reason, step)
        self.ending_s = None
        self.tell_limits()
        view = self.view(step)
        if why := broken(self.run, self.book, view):
            self.ask_to_stop(why, failed=True)
        else:
            self.act(self.policy(view))
        return None

    def committed(self) -> tuple[int, str]:
        """Return (step of the newest snapshot, why it is the run's last; "" if it is not). Parts
        are read only when there is a newer one."""
        snapshots = Snapshots(self.world.store)
        if self.newest is None or snapshots.refs()[:1] != [self.newest.ref]:
            # committed snapshots do not vanish: the listing is incomplete
            self.newest = snapshots.latest() or self.newest
        if self.newest is None:
            return 0, ""
        self.book.progress(self.world.clock.now(), self.newest.step)
        return self.newest.step, snapshots.ended(self.newest)

    def reconcile(self, step: int) -> None:
        """Make the book agree with the nodes that the cloud shows: adopt nodes, close attempts,
        and terminate nodes that nothing accounts for."""
        book = self.book
        shown = {node.attempt: node for node in self.world.cloud.nodes()}
        # most nodes of a large fleet are unchanged since the last round, when they were alive
        fresh = [n for n in shown.values() if book.open.get(n.attempt) is not n]
        self.shown = set(shown)
        self.there = self.shown - {n.attempt for n in fresh if not n.alive}
        for node in [n for n in fresh if n.alive and book.hidden(n.attempt)]:
            self.note(
                AttemptIntended(
                    node.attempt,
                    dataclasses.asdict(node.offer),
                    "adopted: the fact of its launch cannot be read",
                )
            )
        # Strays were launched by a controller while it was fenced, or given up as lost: the run
        # does not count on them.
        self.strays = [n for n in fresh if n.alive and n.attempt not in book.open]
        for node in self.strays:
            self.dismiss(node.attempt)
        for attempt in self.since.unseen_s.keys() & self.shown:
            del self.since.unseen_s[attempt]
        for node in fresh:
            if node.attempt in book.open and node.alive:
                if node.up_s is not None and book.open[node.attempt].up_s is None:
                    self.note(AttemptUp(node.attempt, node.up_s))
                book.open[node.attempt] = node
            elif not node.alive and not book.knows_end(node):
                end = how_it_ended(node)
                if end == "killed":
                    node = dataclasses.replace(node, reason=killed_by(node.exit_code))
                self.close(node, end, step)
        self.reconcile_unshown(step)
        said = set(self.world.store.list(DOUBT))
        for attempt in sorted(book.open) if said or book.doubted else ():
            if (doubted := order_key(DOUBT, attempt) in said) != (attempt in book.doubted):
                self.note(AttemptDoubted(attempt, doubted))
        self.journal.flush()

    def reconcile_unshown(self, step: int) -> None:
        """Reconcile attempts that the cloud does not show. Another API server may have launched
        them: one whose member sends heartbeats to the bucket is alive and billed, and is asked to
        leave through the bucket; it is lost only when its heartbeats end."""
        now, book = self.world.clock.now(), self.book
        unshown = {n: node for n, node in book.open.items() if n not in self.shown}
        lost = book.given_up(now) | self.late.keys()
        strangers = self.listener.strangers(now, book.open, book.ended) - self.there
        lost = (lost | strangers) - self.there - book.open.keys()
        heard = self.listener.listen({*unshown, *lost}, now)
        self.unknown = strangers & self.listener.unsilent
        spoke = {beat.attempt for beat in heard}
        alive = {beat.attempt for beat in heard if not beat.silent(self.run.lost_after_s)}
        moved = {beat.attempt for beat in heard if beat.moved}
        self.beating = alive & moved & {*unshown, *lost}
        for attempt, node in unshown.items():
            unseen_s = now - self.since.unseen_s.setdefault(attempt, now)
            # the time at which it came up is unknown, so the earliest possible one is used
            if attempt in self.beating and node.up_s is None:
                self.note(AttemptUp(attempt, node.asked_s))
            elif attempt not in alive and unseen_s >= self.run.lost_after_s:
                self.close_unshown(attempt, node, heard, step)
        for attempt in sorted(lost):  # given up: if it is alive after all, it must leave
            if attempt in self.beating:
                self.strays.append(self.late.setdefault(attempt, book.believed(attempt, now)))
                self.dismiss(attempt)
            elif attempt in self.late and attempt not in alive:
                node = dataclasses.replace(self.late.pop(attempt), reason=ENDED_UNSHOWN)
                # an end that the cloud has reported stays the basis of its bill
                if attempt not in book.ended or book.ended[attempt].end == "lost":
                    self.close(node, "lost", step)
            elif attempt in spoke - alive and book.ended_unseen(attempt):
                unseen = dataclasses.replace(book.believed(attempt, now), up_s=None)
                self.close_unshown(attempt, unseen, heard, step)
        # attempts that the cloud shows alive again are strays already
        self.late = {n: node for n, node in self.late.items() if n not in self.there}

    def close_unshown(
        self, attempt: int, node: Node, heard: Sequence[MemberHeartbeat], step: int
    ) -> None:
        """Close an attempt that the cloud does not show and that sends no heartbeats. If it has a
        member in the bucket, it was up and billed for as long as its heartbeats allow; a later
        report of the cloud corrects that."""
        now, run = self.world.clock.now(), self.run
        beats = [beat for beat in heard if beat.attempt == attempt]
        if not beats:
            known = "the cloud knows nothing of it any more"
            reason = "never launched" if node.up_s is None else known
            self.close(dataclasses.replace(node, reason=reason), "lost", step)
            return
        if node.up_s is None:
            name, seen = node.offer.name, self.book.durations
            around_s = seen.launch_s(name, run.launch_s) + seen.end_s(name, run.terminate_s)
            until_s = node.asked_s + around_s + max(beat.lived_s for beat in beats)
            node = dataclasses.replace(node, up_s=node.asked_s, gone_s=min(now, until_s))
        self.close(dataclasses.replace(node, reason=ENDED_UNSHOWN), "lost", step)

    def close(self, node: Node, end: str, step: int) -> None:
        gone_s = self.world.clock.now() if node.gone_s is None else node.gone_s
        billed = bill(node, gone_s)
        self.note(
            AttemptEnded(
                node.attempt,
                end,
                node.asked_s,
                node.up_s,
                gone_s,
                node.exit_code,
                node.reason,
                billed.seconds,
                billed.usd,
                step,
            )
        )

    def stop_if_spent(self) -> None:
        """Ask for a stop through the bucket if the budget is spent. A cloud that does not answer
        goes on billing, and the policy is not called during the outage."""
        usd = self.run.budget_usd
        if usd is not None and not stop_order(self.world.store):
            keeps = combinators.within_budget(lambda view: Wait(1.0), usd=usd)
            if isinstance(found := keeps(self.view(self.book.step, ())), Stop):
                self.ask_to_stop(found.reason, failed=False)

    def view(self, step: int, offers: Sequence[Offer] | None = None) -> View:
        now, book = self.world.clock.now(), self.book
        offers = tuple(sorted(self.world.cloud.offers() if offers is None else offers))
        times = self.times(offers)
        return View(
            now_s=now,
            started_s=now if book.started_s is None else book.started_s,
            min_nodes=self.run.min_nodes,
            max_nodes=self.run.max_nodes,
            alive=tuple(book.open.values()),
            offers=offers,
            blocked=dict(book.full.until_s),
            committed_step=step,
            last_progress_s=book.progress_s,
            spent_usd=book.spent_usd(now, self.strays),
            unsure=(*self.strays, *self.unsure(now, times)),
            attempts=len(book.open) + len(book.ended),
            losses=book.losses,
            doubted=tuple(sorted(book.doubted)),
            standing_in=book.standing_in,
            launch_s=max(launch_s for launch_s, _ in times.values()),
            leave_s=max(leave_s for _, leave_s in times.values()),
            times=times,
            known=self.learner.known(now, book, offers),
        )

    def times(self, offers: Sequence[Offer]) -> dict[str, tuple[float, float]]:
        """Return for each cloud of these offers and of open attempts: (seconds that a launch takes,
        seconds that a node is billed after a request to leave). The key is "" if there are none."""
        seen, run = self.book.durations, self.run
        names = {o.name for o in offers} | {n.offer.name for n in self.book.open.values()}
        return {
            cloud: (
                seen.launch_s(cloud, run.launch_s),
                seen.leave_s(cloud, run.exit_grace_s, run.terminate_s) + 2 * run.poll_s,
            )
            for cloud in sorted({cloud_of(name) for name in names} or {""})
        }

    def tell_limits(self) -> None:
        """Write the limits that the nodes need to keep without a controller. Raises StoreError."""
        if self.limits.done:
            return
        now, book = self.world.clock.now(), self.book
        times = self.times([n.offer for n in self.strays])
        self.limits.tell(
            now,
            now if book.started_s is None else book.started_s,
            lambda: book.spent_usd(now, self.strays),
            [*book.open.values(), *self.strays, *self.unsure(now, times)],
            times,
        )

    def unsure(self, now: float, times: Mapping[str, tuple[float, float]]) -> list[Node]:
        """Return nodes that were given up and are not seen, and that may still be billed."""
        launch_s, leave_s = map(max, zip(*times.values(), strict=True))
        strays = {node.attempt for node in self.strays}
        return [n for n in self.book.unsure(now, launch_s, leave_s) if n.attempt not in strays]

    def act(self, decision: Decision) -> None:
        """Carry out a decision: record the intent durably, then act if we still hold the lease."""
        match decision:
            case Launch() if self.book.streaks.refused and self.book.open:
                why = "a new node was refused: the others speak another protocol; waiting for them"
                self.wait(Wait(self.run.poll_s, why))
            case Launch() if self.late or self.unknown:
                why = "members that nobody counts on may beat in the bucket; waiting for their end"
                self.wait(Wait(self.run.poll_s, why))
            case Launch(offer, reason, instead_of) if self.room(offer, instead_of):
                attempt = self.book.next_attempt
                self.note(AttemptIntended(attempt, {**vars(offer)}, reason, instead_of))
                self.journal.flush()
                self.tell_limits()  # with this node's price: we may die before it comes up
                self.lease.check()
                self.world.cloud.launch(attempt, offer)
                self.waiting = None
            case Launch():
                self.wait(Wait(self.run.poll_s, "the policy asked for more than max_nodes"))
            case Terminate(attempt, reason, grace_s, also):
                for each in (attempt, *also):
                    if not self.still_leaving(each, reason, grace_s):
                        self.dismiss(each)
                self.wait(Wait(self.run.poll_s, reason))
            case Wait():
                self.wait(decision)
            case Stop(reason):
                self.ask_to_stop(reason, failed=False)

    def room(self, offer: Offer, instead_of: int | None = None) -> bool:
        """Return whether one more node is allowed, whatever the policy says: at most `max_nodes` in
        a place besides nodes being replaced, each by one, and at most two places (for a move)."""
        replaced = set(self.book.standing_in.values())
        if instead_of in replaced:
            return False
        replaced |= {instead_of} if instead_of is not None else set()
        others = [node for node in self.book.open.values() if node.attempt not in replaced]
        places = [node.offer.place for node in others]
        limit = self.run.max_nodes + len(self.book.doubted)
        return places.count(offer.place) < limit and len({*places, offer.place}) <= MOST_PLACES

    def wait(self, wait: Wait) -> None:
        if wait.is_news(self.waiting):
            self.note(Decided("wait", wait.reason, wait.expected_s, wait.saving_usd))
            self.journal.flush()
            self.waiting = wait
        self.world.clock.sleep(min(max(wait.seconds, 0.1), self.run.poll_s))

    def still_leaving(self, attempt: int, reason: str, grace_s: float) -> bool:
        """Ask a node to snapshot and leave. Return whether its grace period is still running."""
        now = self.world.clock.now()
        if grace_s > 0 and attempt not in self.since.asked_s:
            self.lease.check()
            if self.ask_to_leave(attempt, reason):
                self.note(Decided("release", f"attempt {attempt}: {reason}"))
            self.since.asked_s[attempt] = now
        return now < self.since.asked_s.get(attempt, now - grace_s) + grace_s

    def ask_to_leave(self, attempt: int, reason: str) -> bool:
        """Ask a node to leave through the bucket. Return False if it was asked before."""
        return ask_to_leave(self.world.store, attempt, reason, self.lease.term)

    def dismiss(self, attempt: int) -> None:
        """Terminate a node, and repeat that every `REPEAT_S` for as long as it is seen."""
        now = self.world.clock.now()
        if now - self.since.told_s.get(attempt, -REPEAT_S) >= REPEAT_S:
            self.lease.check()
            self.world.cloud.terminate(attempt)
            if attempt in self.beating:  # the cloud cannot end a node that it does not know
                self.ask_to_leave(attempt, "it is to be ended, and the cloud does not show it")
            self.since.told_s[attempt] = now
            self.note(Decided("terminate", f"attempt {attempt}"))

    def ask_to_stop(self, reason: str, failed: bool) -> None:
        """Request a stop through the bucket: agents drain on it, and a successor completes it."""
        self.note(Decided("stop", reason))
        self.journal.flush()
        self.lease.check()
        ask_to_stop(self.world.store, StopOrder(reason, "controller", failed, term=self.lease.term))

    def end(self, outcome: str, reason: str, step: int) -> RunOutcome | None:
        """Let nodes drain, terminate those that stay, and verify that none is left. Return None
        until the run has ended."""
        now = self.world.clock.now()
        if self.ending_s is None:
            self.ending_s, self.unanswered_s = now, 0.0
        waited_s, left = now - self.ending_s, [*self.book.open.values(), *self.strays]
        # after an outage the cloud's answers may be stale: that time does not count
        limit_s = self.run.exit_grace_s + self.run.terminate_timeout_s + self.unanswered_s
        # cloud, facts and heartbeats must agree that nothing is left
        uncertain = left or self.book.given_up(now) & self.listener.unsilent
        if uncertain and waited_s < limit_s:
            for node in left:
                if node.up_s is None or waited_s >= self.run.exit_grace_s:
                    self.dismiss(node.attempt)
            self.wait(Wait(self.run.poll_s, f"{outcome}: nodes are leaving"))
            return None
        if left:
            names = self.book.named(node.attempt for node in left)
            outcome, reason = (
                "failed",
                f"{reason}; but STILL RUNNING AND BILLED, end them by hand: attempts {names}",
            )
        if unproven := self.book.unproven:
            reason = f"{reason}; not proven to be gone: attempts {self.book.named(unproven)}"
        self.lease.check()
        self.note(RunEnded(outcome, reason, step))
        self.journal.flush()
        with contextlib.suppress(StoreUnavailable):  # then a successor only waits a little longer
            self.lease.release()
        return RunOutcome(outcome, reason, step, unproven)
