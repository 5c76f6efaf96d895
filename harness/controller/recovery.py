"""The loop that keeps a run alive. Runs in the controller; `cli/` gives it the real world,
`sim.py` a simulated one.

Every round it looks at everything anew (nodes, newest snapshot, stop requests), asks a policy for
one decision, and acts on it. What it must remember between rounds it writes down as facts *before*
acting, and its memory (`book.py`) is nothing but a fold of those facts. So taking over from a
controller that died anywhere is no special case: the successor reads the same facts, sees the same
nodes, and goes on. Progress is what is committed in the bucket; no node is ever asked how far it
got.

Pure: knows no torch, SkyPilot, wall clock or process. Lets errors travel, except that a silent
cloud or bucket is waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.bucket.beats import Beat, Beats
from harness.bucket.layout import DOUBT, STOP_KEY, StopOrder, order_key
from harness.bucket.lease import Lease
from harness.bucket.orders import ask_to_leave, ask_to_stop, stop_order
from harness.controller import policies
from harness.controller.allowance import LimitsWriter
from harness.controller.book import UNSHOWN, Book, bill, how_it_ended
from harness.controller.bounds import RunSpec as RunSpec
from harness.controller.bounds import broken
from harness.controller.choosing import MOST_PLACES
from harness.controller.clocks import counted
from harness.controller.learning import KnowsNothing, Learner
from harness.controller.listening import BeatListener, Since
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
from storage.errors import StoreError, StoreUnavailable
from storage.manifest import Manifest, SnapshotTooNew
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

ENDED_UNSHOWN = (
    f"{UNSHOWN}, and its agent has ended: look for its machine where it was launched from"
)
REPEAT_S = 30.0  # a node that does not go is told again after this


@dataclass(frozen=True)
class RunOutcome:
    outcome: str  # "done" | "stopped" | "failed"
    reason: str
    committed_step: int
    # attempts whose agents have ended, and whose machines this cloud cannot prove to be gone
    unproven: tuple[int, ...] = ()


class FactWriter(Protocol):
    """Where facts go; after `flush` they are in the bucket, and stay."""

    def record(self, fact: Fact) -> None: ...
    def flush(self) -> None: ...
    def read(self) -> list[Stamped]: ...


def recover(
    run: RunSpec,
    policy: Policy,
    world: World,
    journal: FactWriter,
    lease: Lease,
    learner: Learner | None = None,
) -> RunOutcome:
    """Lead `run` until it is done, stopped or failed; returns only when no node of it is left.

    Raises Fenced when another controller leads it (nothing is touched then). Raises StoreError or
    CloudUnavailable when bucket or cloud were silent, or refused, for too long: nodes are left as
    they are, and whoever calls this again leads them on.
    """
    policy = within_limits(policies.replacing(policy), run)
    term = lease.acquire()
    loop = Loop(
        run,
        policy,
        world,
        journal,
        lease,
        Book.of(journal.read(), world.rng, run.block_limit_s),
        learner or KnowsNothing(),
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
            # whatever was cut off here is seen, and done again, in the next round
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


def within_limits(policy: Policy, run: RunSpec) -> Policy:
    """The same, which stops at the run's limits."""
    if run.budget_usd is not None:
        policy = policies.within_budget(policy, usd=run.budget_usd)
    if run.max_hours is not None:
        policy = policies.within_hours(policy, hours=run.max_hours)
    return policy


def forget_stop(store: ObjectStore) -> None:
    """Take back a stop request. For a person who launches a stopped run again: a controller never
    does it by itself, so one that dies while stopping, and is restarted by a supervisor, goes on
    stopping."""
    store.delete(STOP_KEY)


@dataclass
class Loop:
    """One controller's turn at the wheel. What it holds besides the book may be forgotten
    without harm."""

    run: RunSpec
    policy: Policy
    world: World
    journal: FactWriter
    lease: Lease
    book: Book
    learner: Learner = field(default_factory=KnowsNothing)
    since: Since = field(default_factory=Since)
    strays: list[Node] = field(default_factory=list)  # alive, but not in the book
    shown: set[int] = field(default_factory=set)  # attempts that the cloud knows
    there: set[int] = field(default_factory=set)  # ... and says to be alive
    # attempts that it does not, and that beat in the bucket
    beating: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)  # nobody's, and not yet seen to be silent
    late: dict[int, Node] = field(default_factory=dict)  # given up as lost, and seen to beat since
    listener: BeatListener = field(init=False)
    limits: LimitsWriter = field(init=False)
    newest: Manifest | None = None
    ending_s: float | None = None
    unanswered_s: float = 0.0  # ... so long of it cloud or bucket were silent
    waiting: Wait | None = None  # what was written down last

    def __post_init__(self) -> None:
        self.listener = BeatListener(Beats(self.world.store, self.world.clock.now))
        self.limits = LimitsWriter(self.world.store, self.run, self.lease.term)

    def note(self, fact: Fact) -> None:
        self.journal.record(fact)
        self.book.add(self.world.clock.now(), fact)

    def round(self) -> RunOutcome | None:
        """Look, decide, act once."""
        self.lease.renew()
        step, final = self.committed()
        self.reconcile(step)
        if final:
            return self.end("done", f"step {step} is the last and is committed", step)
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

    def committed(self) -> tuple[int, bool]:
        """The newest snapshot's step, and whether it is the run's last. Parts are looked at
        only when there is a newer one."""
        snapshots = Snapshots(self.world.store)
        if self.newest is None or snapshots.refs()[:1] != [self.newest.ref]:
            # what was committed does not vanish: the listing is not whole
            self.newest = snapshots.latest() or self.newest
        if self.newest is None:
            return 0, False
        self.book.progress(self.world.clock.now(), self.newest.step)
        return self.newest.step, bool(snapshots.ended(self.newest))

    def reconcile(self, step: int) -> None:
        """Make the book agree with what the cloud shows: adopt, close, and send away what
        nobody asked for."""
        book = self.book
        shown = {node.attempt: node for node in self.world.cloud.nodes()}
        # most of a large fleet is as it was a moment ago, when it was alive
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
        # Launched by a controller while it was being fenced, or given up as lost: nobody counts on
        # them.
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
                self.close(node, how_it_ended(node), step)
        self.reconcile_unshown(step)
        said = set(self.world.store.list(DOUBT))
        for attempt in sorted(book.open) if said or book.doubted else ():
            if (doubted := order_key(DOUBT, attempt) in said) != (attempt in book.doubted):
                self.note(AttemptDoubted(attempt, doubted))
        self.journal.flush()

    def reconcile_unshown(self, step: int) -> None:
        """Attempts that the cloud does not show. Another API server may have launched them: one
        whose member beats in the bucket is alive, is billed, and is asked to leave through the
        bucket when it must go; it is lost only when it beats no more."""
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
            # since when, nobody says: rather too early than too late
            if attempt in self.beating and node.up_s is None:
                self.note(AttemptUp(attempt, node.asked_s))
            elif attempt not in alive and unseen_s >= self.run.lost_after_s:
                self.close_unshown(attempt, node, heard, step)
        for attempt in sorted(lost):  # given up, and here after all: nobody counts on it
            if attempt in self.beating:
                self.strays.append(self.late.setdefault(attempt, book.believed(attempt, now)))
                self.dismiss(attempt)
            elif attempt in self.late and attempt not in alive:
                node = dataclasses.replace(self.late.pop(attempt), reason=ENDED_UNSHOWN)
                # what the cloud has told of its end is its bill, once nothing speaks against it
                if attempt not in book.ended or book.ended[attempt].end == "lost":
                    self.close(node, "lost", step)
            elif attempt in spoke - alive and book.ended_unseen(attempt):
                unseen = dataclasses.replace(book.believed(attempt, now), up_s=None)
                self.close_unshown(attempt, unseen, heard, step)
        # what is shown alive again is a stray by the cloud's own word
        self.late = {n: node for n, node in self.late.items() if n not in self.there}

    def close_unshown(self, attempt: int, node: Node, heard: Sequence[Beat], step: int) -> None:
        """The cloud does not show it, and nothing of it beats. One whose member lies in the bucket
        was there and was billed, for as long as its beats allow; a cloud that tells more of it
        later corrects that."""
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
                *billed,
                step,
            )
        )

    def stop_if_spent(self) -> None:
        """A cloud that does not answer goes on billing, and the policy is not asked meanwhile: the
        budget is kept through the bucket, where the nodes hear it."""
        usd = self.run.budget_usd
        if usd is not None and not stop_order(self.world.store):
            keeps = policies.within_budget(lambda view: Wait(1.0), usd=usd)
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
        """By cloud, of these offers and of open attempts: seconds that a launch takes, and that a
        node is billed after it was asked to leave. "": where there are none."""
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
        """Leave to the nodes what they need to keep the limits without us. Raises StoreError."""
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
        """Nodes that nobody counts on or sees any more, and that may be billed all the same."""
        launch_s, leave_s = map(max, zip(*times.values(), strict=True))
        strays = {node.attempt for node in self.strays}
        return [n for n in self.book.unsure(now, launch_s, leave_s) if n.attempt not in strays]

    def act(self, decision: Decision) -> None:
        """Intent first, durably; then the act, if we still hold the lease."""
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
                self.tell_limits()  # with this node's price: we may not live to see it come up
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
        """Limits that hold whatever the policy says: `max_nodes` in a place besides those that
        are replaced, each by one, and never in more than two places, which a move takes."""
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
        """Ask a node to snapshot and leave; is its time for that not over yet?"""
        now = self.world.clock.now()
        if grace_s > 0 and attempt not in self.since.asked_s:
            self.lease.check()
            if self.ask_to_leave(attempt, reason):
                self.note(Decided("release", f"attempt {attempt}: {reason}"))
            self.since.asked_s[attempt] = now
        return now < self.since.asked_s.get(attempt, now - grace_s) + grace_s

    def ask_to_leave(self, attempt: int, reason: str) -> bool:
        """Through the bucket. False: it was asked before."""
        return ask_to_leave(self.world.store, attempt, reason, self.lease.term)

    def dismiss(self, attempt: int) -> None:
        """Have a node terminated; again from time to time for as long as it is seen."""
        now = self.world.clock.now()
        if now - self.since.told_s.get(attempt, -REPEAT_S) >= REPEAT_S:
            self.lease.check()
            self.world.cloud.terminate(attempt)
            if attempt in self.beating:  # the cloud cannot end what it does not know
                self.ask_to_leave(attempt, "it is to be ended, and the cloud does not show it")
            self.since.told_s[attempt] = now
            self.note(Decided("terminate", f"attempt {attempt}"))

    def ask_to_stop(self, reason: str, failed: bool) -> None:
        """Every stop is a request in the bucket: agents drain on it, and a successor carries it
        out."""
        self.note(Decided("stop", reason))
        self.journal.flush()
        self.lease.check()
        ask_to_stop(self.world.store, StopOrder(reason, "controller", failed, term=self.lease.term))

    def end(self, outcome: str, reason: str, step: int) -> RunOutcome | None:
        """Let nodes leave by themselves, send away who stays, and be sure that nothing is left."""
        now = self.world.clock.now()
        if self.ending_s is None:
            self.ending_s, self.unanswered_s = now, 0.0
        waited_s, left = now - self.ending_s, [*self.book.open.values(), *self.strays]
        # what a cloud says after a silence may be old: that time proves nothing
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
        with contextlib.suppress(StoreUnavailable):  # a successor would only wait a little longer
            self.lease.release()
        return RunOutcome(outcome, reason, step, unproven)
