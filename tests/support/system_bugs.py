"""Planted bugs: real parts of the house, each broken in one way, and the rule that finds it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from harness.agent import node_state as node_machine
from harness.agent import verdicts
from harness.agent.agent import Agent
from harness.agent.node_state import AgentState
from harness.agent.run_orders import RunOrders
from harness.bucket.layout import MEMBERS, epoch_key
from harness.controller import recovery
from harness.controller.recovery import Loop, RunOutcome
from harness.controller.run_limits import RunSpec
from harness.core import batch
from harness.core import step_records as rec
from harness.core.world import Launch
from harness.ledger.attempts import how_it_ended
from harness.look.trackers.publisher import publisher_of
from harness.look.trackers.tracker_stream import StreamWriter
from harness.look.trackers.trackers import Publisher
from harness.node.marks import Mark, Want
from harness.notices.notice import Noticed
from harness.rendezvous.membership import Membership
from harness.rendezvous.peer_heartbeats import HeartbeatProtocol
from harness.rendezvous.reach import Reach
from harness.rendezvous.rendezvous import Rendezvous
from harness.uploader.liveness import UploaderWatch
from harness.worker import boundary
from harness.worker.snapshot_timer import Interval
from storage.errors import NotFound
from storage.snapshots.manifest import Manifest, Part, Ref, SnapshotCorrupt
from storage.snapshots.restore import Restore
from storage.snapshots.snapshot_keys import manifest_key
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import SortedStore
from storage.stores.retries import Patience
from support.broken_parts import (
    DeafLease,
    EarlyCommit,
    ForgetfulJournal,
    GenerousJournal,
    HastyLease,
    LazyJournal,
    OverwritingStore,
    boastful,
    deaf,
    greedy,
    impatient,
    panicky,
    sleepy,
)
from support.system import fault_plan, system_bucket, system_workers
from support.system.fault_plan import Fault, Setting, faults_of
from support.system.system_node import SimHost, SimMark, SimNode, SimPool
from support.system.system_run import Played, SystemBuild, play
from support.system.system_workers import Ensemble

Patched = tuple[object, str, object]


@dataclass(frozen=True)
class Bug:
    """`finds`: the rules that may find it, as a pattern. `kinds`, `many`: what goes wrong in the
    worlds in which it is looked for; none: the seeds' own lists. `faults`: these instead.
    `setting`: of these worlds."""

    finds: str
    build: SystemBuild = field(default_factory=SystemBuild)
    patches: tuple[Patched, ...] = ()
    kinds: tuple[str, ...] = ()
    many: int = 12
    setting: Setting | None = None
    lasts_s: float | None = None  # of every fault
    faults: tuple[Fault, ...] = ()

    def world(self, seed: int) -> tuple[Setting, tuple[Fault, ...]]:
        setting = self.setting or (STORMY if self.kinds else Setting.of(seed))
        faults = self.faults or faults_of(seed, setting, self.kinds, self.many if self.kinds else 0)
        if self.lasts_s is not None:
            faults = tuple(replace(f, lasts_s=self.lasts_s) for f in faults)
        return setting, faults

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, name, broken in self.patches:
                stack.enter_context(patch.object(where, name, broken))
            yield

    def played(self, seed: int) -> Played:
        setting, faults = self.world(seed)
        with self.planted():
            return play(seed, self.build, setting, faults)

    def control(self, seed: int) -> Played:
        """The same world with sound parts."""
        setting, faults = self.world(seed)
        return play(seed, None, setting, faults)


STORMY = Setting(
    calm_s=250.0, max_nodes=3, total_steps=30, step_s=16.0, interval=Interval(every_steps=4)
)
PAIR = replace(STORMY, max_nodes=2, min_nodes=2, total_steps=20)
LONELY = replace(STORMY, max_nodes=1)
LOOSE = replace(PAIR, min_nodes=1)
CALM = replace(STORMY, calm_s=0.0, total_steps=12)
ODD = replace(CALM, micro_batches=8, max_nodes=3, min_nodes=3)
# An old epoch commits late, and further than two snapshots of the epoch after it.
EAGER = replace(PAIR, total_steps=60, interval=Interval(every_steps=9))
LATE = (
    Fault(100.0, "snapshot-asked"),
    Fault(100.0, "pause-uploader", 0, 1, 60.0),
    Fault(118.0, "kill-worker", 1, 0),
    *(Fault(at_s, "snapshot-asked") for at_s in (135.0, 150.0, 166.0)),
    Fault(185.0, "kill-worker", 1, 0),
)
LOSSES = ("power-loss", "crash-agent")
OVERTAKEN = ("pause-controller", "crash-controller", "crash-controller-late", *LOSSES)


# ---- controller ----------------------------------------------------------------------------------
def soon_panicky(run: RunSpec, *others: Any) -> RunOutcome:
    return panicky(replace(run, max_outage_s=10.0, max_refused_s=10.0), *others)


def soon_deaf(run: RunSpec, *others: Any) -> RunOutcome:
    return deaf(replace(run, lost_after_s=20.0), *others)


def launch_first(self: Loop, decision: Any) -> None:
    """The act, and then its intent."""
    if isinstance(decision, Launch) and self.room(decision.offer):
        self.world.cloud.launch(self.book.next_attempt, decision.offer)
    sound_act(self, decision)


sound_act = Loop.act


def forget_facts(self: Loop, outcome: str, reason: str, step: int) -> RunOutcome | None:
    """Tidies up: facts of a run that ends are not needed any more."""
    for key in self.world.store.list("facts/"):
        self.world.store.delete(key)
    return sound_end(self, outcome, reason, step)


sound_end = Loop.end


# ---- the bucket ----------------------------------------------------------------------------------
class LeakyStore(SortedStore):
    """Acknowledges step records, and loses some."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return key.startswith("samples/00000000") or super().create(key, data)


class BlindCreate(SortedStore):
    """Of two who create the same object, both are told that theirs is there."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        super().create(key, data)
        return True


def believing(kernel: Any) -> Patience:
    """Whoever says no once is believed."""
    return Patience(0.0, answered=True, monotonic=kernel.now)


# ---- snapshots -----------------------------------------------------------------------------------
class PartsLast(Snapshots):
    """Writes part lists and leaves the parts for later."""

    def write(self, ref: Ref, rank: int, *others: Any, **more: Any) -> Any:
        written = super().write(ref, rank, *others, **more)
        if rank == 0:
            self.store.delete(written.parts[0].key)
        return written


def no_fence(store: Any) -> Any:
    """Whatever is sent is committed, also when a newer epoch exists."""
    return lambda ref: None


class PrunesTheNewest(Snapshots):
    """Keeps what is oldest."""

    def prune(self, keep: Any, *rest: Any, **more: Any) -> list[Ref]:
        for ref in self.refs()[:1]:
            self.store.delete(manifest_key(ref))
        return []


class PrunesWhatIsAhead(Snapshots):
    """Whatever is older than the newest by its epoch may go, however much further it is by its
    step."""

    def prune(self, keep: Any, *rest: Any, **more: Any) -> list[Ref]:
        newest = self.latest()
        for ref in self.manifests()[0]:
            if newest and ref < newest.ref and ref.step > newest.step:
                self.store.delete(manifest_key(ref))
        return super().prune(keep, *rest, **more)


class PrunesBases(Snapshots):
    """Deletes the objects of old snapshots, whoever refers to them."""

    def prune(self, keep: Any, *rest: Any, **more: Any) -> list[Ref]:
        for ref in self.refs()[1:]:
            for key in self.store.list(f"snapshots/parts/{ref.name}/"):
                if "/list-" not in key:
                    self.store.delete(key)
        return []


class Trusting(Snapshots):
    """Does not hash what it reads."""

    def read_into(self, *args: Any) -> memoryview:
        with patch.object(Part, "hashes", property(lambda self: _Any())):
            return super().read_into(*args)

    def verify(self, manifest: Manifest, progress: Any = None) -> None:
        self.check(manifest)

    def read(self, manifest: Manifest, part_key: str, start: int, end: int) -> bytes:
        return self.store.get(part_key, start, end)


class _Any:
    def __getitem__(self, i: int) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


# ---- restore -------------------------------------------------------------------------------------
class OneLook(Restore):
    """One look by one reader is proof, and there is no guard against rewinding."""

    def read(self, ref: Ref, do: Any) -> Any:
        try:
            return do(self.snapshots, 0), ""
        except (SnapshotCorrupt, NotFound) as e:
            return None, str(e)

    def blame(self, ref: Ref, bad: Any, refuted: bool = False) -> dict[str, str]:
        self.snapshots.quarantine(ref, next(iter(bad.values())))
        return {}

    def _guard(self, *found: Any) -> None: ...


class Oldest(Restore):
    """Goes on from the oldest."""

    def newest_of(self, refs: Any) -> Ref | None:
        return min(refs, default=None)

    def _guard(self, *found: Any) -> None: ...


class NewestByStep(Restore):
    """Lets what an old epoch committed late be the newest."""

    def newest_of(self, refs: Any) -> Ref | None:
        return max(refs, key=lambda ref: ref.step, default=None)


class EmptyIsFresh(Restore):
    """A listing without snapshots means that there never were any."""

    def _committed(self) -> tuple[set[Ref], set[Ref], int]:
        committed, doomed = self.snapshots.manifests()
        return committed - doomed, doomed, 0

    def _guard(self, *found: Any) -> None: ...


class Fresh(Restore):
    """Begins anew whenever the newest snapshot is not found at once."""

    def choose(self, progress: Any = None) -> Ref | None:
        ref = super().choose(progress)
        try:
            return ref and self.snapshots.load(ref).ref
        except NotFound:
            return None


# ---- agent ---------------------------------------------------------------------------------------
class Unfenced(Agent):
    """Does not look whether a newer epoch exists, nor at its peers."""

    def _watch_peers(self, now: float) -> int | None:
        return None


class TidyAgent(Agent):
    """Deletes the objects of members that are not in its epoch."""

    def _watch_peers(self, now: float) -> int | None:
        mine = {f"{MEMBERS}{name}.json" for name in self._stay.epoch.members}
        for key in set(self._run.store.list(MEMBERS)) - mine:
            self._run.store.delete(key)
        return super()._watch_peers(now)


class Stubborn(Agent):
    """Says that it is in an epoch that it only saw."""

    def _seek_epoch(self, now: float) -> int | None:
        last = self.rendezvous.newest()
        if last.epoch and self.name not in last.members:
            self._tell(state="in", epoch=last.epoch)
        return super()._seek_epoch(now)


def unsettled(self: Rendezvous, m: Any, epoch: int) -> bool:
    """Nobody need have left the last epoch."""
    return True


def skipping(self: Rendezvous, *told: Any) -> Any:
    """Epochs' numbers have gaps."""
    return replace(sound_propose(self, *told), epoch=self._number + 2)


def doubling(self: Rendezvous, *told: Any) -> Any:
    """Names its first member twice."""
    made = sound_propose(self, *told)
    return replace(
        made,
        members=(*made.members, made.members[0]),
        nproc=(*made.nproc, made.nproc[0]),
        speeds=(*made.speeds, made.speeds[0]),
    )


sound_propose = Rendezvous._propose


def stealing(self: Rendezvous, max_world: Any) -> Any:
    """Writes its epoch over another's."""
    found = sound_form(self, max_world)
    if found is None and self.me.state == "ready":
        mine = replace(
            self.newest(), members=(self.me.member,), nproc=(self.me.nproc,), speeds=(1.0,)
        )
        if mine.epoch:
            self.store.put(epoch_key(mine.epoch), mine.encode())
    return found


sound_form = Rendezvous.try_form


def hears_nobody_die(self: Membership, name: str, now: float) -> Any:
    member = sound_judge(self, name, now)
    if member is not None and member.state == "dead":
        self.seen[name].dead = False
        return self.seen[name].member
    return member


sound_judge = Membership._judge


def never_hung(self: SimPool, now: float) -> list[Any]:
    return []


def never_full(self: RunOrders) -> int | None:
    return None


def heedless(node: Any, event: Any, now: Any) -> Any:
    """Notices are recorded, and nothing follows."""
    return (node, ()) if isinstance(event, Noticed) else sound_step(node, event, now)


sound_step = node_machine.step


def hopeful(*_: Any) -> str:
    """Tries again for ever."""
    return ""


# ---- sessions ------------------------------------------------------------------------------------
def leaves_at_once(state: Any, event: Any, seen: Any) -> boundary.Transition:
    """Whoever is asked to leave does, without a snapshot."""
    turn = boundary.next_turn(state, event, seen)
    left = any(isinstance(act, boundary.Leave) and act.code for act in turn.after)
    return replace(turn, first=()) if left else turn


def leaves_unlanded(state: Any, event: Any, seen: Any) -> boundary.Transition:
    """... without waiting for it to be committed."""
    turn = boundary.next_turn(state, event, seen)
    left = any(isinstance(act, boundary.Leave) and act.code for act in turn.after)
    kept = tuple(act for act in turn.first if act is not boundary.BoundaryAction.LAND)
    return replace(turn, first=kept) if left else turn


def unsaved_end(state: Any, event: Any, seen: Any) -> boundary.Transition:
    """The last steps are not saved."""
    turn = boundary.next_turn(state, event, seen)
    return replace(turn, first=()) if isinstance(event, boundary.Reached) else turn


def early_end(state: Any, event: Any, seen: Any) -> boundary.Transition:
    """Each snapshot that somebody asked for is marked as the run's last."""
    turn = boundary.next_turn(state, event, seen)
    asked = isinstance(event, boundary.VoteResult) and turn.first
    return (
        replace(
            turn,
            first=(*turn.first, boundary.BoundaryAction.LAND, boundary.BoundaryAction.MARK_END),
        )
        if asked
        else turn
    )


def alone(state: Any, event: Any, seen: Any) -> boundary.Transition:
    """Only rank 0 takes snapshots."""
    turn = boundary.next_turn(state, event, seen)
    return turn if seen.leads else replace(turn, first=())


def least(votes: Sequence[int]) -> Want:
    """The least want wins."""
    return min((w for w in Want if votes[w] > 0 and w), default=Want.NOTHING)


def even_shares(micro_batches: int, ranks: int, *_: Any) -> batch.Plan:
    """What does not divide is left out."""
    return batch.Plan((micro_batches // ranks,) * ranks)


class Overlapping(batch.Plan):
    """The second rank begins one too early."""

    def micros(self, rank: int) -> range:
        found = super().micros(rank)
        return range(found.start - 1, found.stop - 1) if rank else found


def overlapping(micro_batches: int, ranks: int, *_: Any) -> batch.Plan:
    return Overlapping(batch.plan(micro_batches, ranks).shares)


class ForgetsRecords(Ensemble):
    """Step records of a snapshot that failed are not carried by the next."""

    def _land(self, must: bool) -> Iterator[float]:
        yield from super()._land(must)
        self.unsaved = []


class ColdStart(Ensemble):
    """Resumes the step, and not the weights."""

    def _restore(self, eyes: Any) -> Any:
        manifest, weights = super()._restore(eyes)
        return manifest, weights if manifest is None else "initial weights"


class Repeats(Ensemble):
    """Does the step that it resumed from once more."""

    def _resume(self) -> Iterator[float]:
        yield from super()._resume()
        self.step = max(0, self.step - 1)


def unchained(self: rec.StepRecord, prev: str) -> rec.StepRecord:
    """Records follow from nothing."""
    return sound_chained(self, "")


sound_chained = rec.StepRecord.chained


def deaf_worker(self: SimNode) -> Mark:
    """Workers do not read their mark."""
    return Mark(Want.NOTHING, "")


# ---- who neither dies nor answers ----------------------------------------------------------------
def patient(self: SimHost, store: Any) -> Any:
    """The agent's loop waits for each answer."""
    return store


def everybody(self: Reach, members: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
    """Whoever is ready trains, reached or not."""
    return list(members)


def fragile(self: SimMark, want: Want, *said: Any) -> None:
    """A mark that cannot be written is an error of the agent."""
    if self._node.sim.trouble.reigns("scratch-full", self._node):
        raise OSError(errno.ENOSPC, "No space left on device")
    sound_mark(self, want, *said)


sound_mark = SimMark.write


def blames_the_script(node: Any) -> str:
    """A command that was killed has failed."""
    end = sound_end_of(node)
    return "failed" if end == "killed" else end


sound_end_of = how_it_ended


# ---- publishers ----------------------------------------------------------------------------------
class SkipsOne(Publisher):
    """Loses the first step of a batch."""

    def _publish(self, state: Any, records: Any) -> None:
        for tracker in self.trackers:
            sound = tracker.publish
            with patch.object(
                tracker, "publish", lambda r, info, folder, sound=sound: sound(r[1:], info, folder)
            ):
                super()._publish(state, records)


class SkipsRow(StreamWriter):
    """Loses the first committed step of a batch."""

    def _steps(self, before: Any) -> Any:
        records, final, keep = super()._steps(before)
        return records[1:] if len(records) > 1 else records, final, keep


def skipping_rows(store: Any, info: Any, min_batch_s: float) -> StreamWriter:
    return SkipsRow(store, info, publisher_of(store, info).operations, min_batch_s, min_batch_s)


TRACKED = replace(STORMY, publishes=True, calm_s=60.0, total_steps=40)
PAUSED = ("pause-controller", "power-loss", "notice")
NOTICES = ("notice",)
B = SystemBuild

BUGS: dict[str, Bug] = {
    # controller
    "deaf lease": Bug("one hand", B(lease=DeafLease), kinds=PAUSED, many=40),
    "hasty lease": Bug("one hand", B(lease=HastyLease), kinds=PAUSED, many=40),
    "lazy journal": Bug("intended first|evidence", B(journal=LazyJournal), setting=CALM),
    "forgetful journal": Bug(
        "ledger|life|node limit|nothing left|evidence",
        B(journal=ForgetfulJournal),
        kinds=OVERTAKEN,
        many=30,
    ),
    "generous journal": Bug("ledger", B(journal=GenerousJournal), setting=CALM),
    "launches before it says so": Bug(
        "intended first|evidence", patches=((Loop, "act", launch_first),), setting=CALM
    ),
    "impatient": Bug("nothing left|life|ledger", B(recover=impatient), setting=CALM),
    "greedy": Bug("node limit", B(recover=greedy), setting=CALM),
    "boastful controller": Bug("done", B(recover=boastful), setting=CALM),
    "panicky": Bug("seeing", B(recover=soon_panicky), kinds=("controller-silent",), lasts_s=30.0),
    "deaf to beats": Bug(
        "node limit|evidence", B(recover=soon_deaf), kinds=("unlisted",), lasts_s=45.0
    ),
    "sleepy policy": Bug("life", B(policy=sleepy), setting=CALM),
    "tidy controller": Bug("evidence", patches=((Loop, "end", forget_facts),), setting=CALM),
    # the bucket
    "overwriting store": Bug("write once", B(store=OverwritingStore), kinds=OVERTAKEN, many=30),
    "leaky store": Bug("samples once", B(store=LeakyStore), setting=CALM),
    "everybody was first": Bug(
        "one hand|members|write once|life|ledger|node limit",
        B(store=BlindCreate),
        kinds=OVERTAKEN,
        many=30,
    ),
    "believes the first no": Bug(
        "life",
        patches=((fault_plan, "patience_of", believing),),
        kinds=("refused-to-all",),
        many=60,
        lasts_s=20.0,
        setting=replace(LONELY, calm_s=1500.0, total_steps=60),
    ),
    # snapshots and restores
    "early commit": Bug("whole", B(snapshots=EarlyCommit), setting=replace(PAIR, calm_s=0.0)),
    "parts last": Bug("whole", B(snapshots=PartsLast), setting=CALM),
    "no fence": Bug(
        "fenced",
        B(fence=no_fence),
        kinds=("pause-uploader", "cut"),
        many=6,
        lasts_s=200.0,
        setting=replace(PAIR, min_nodes=1, total_steps=40),
    ),
    "prunes the newest": Bug("greatest step", B(snapshots=PrunesTheNewest), setting=CALM),
    "prunes what others need": Bug(
        "whole|same training|greatest step|life", B(snapshots=PrunesBases), setting=CALM
    ),
    "trusts what it reads": Bug(
        "same training", B(snapshots=Trusting), kinds=("damaged-reads", "power-loss"), many=20
    ),
    "one look": Bug("greatest step", B(restore=OneLook), kinds=("damaged-reads", *LOSSES), many=20),
    "resumes from the oldest": Bug("greatest step", B(restore=Oldest), kinds=LOSSES),
    "404 is a fresh start": Bug(
        "greatest step", B(restore=Fresh), kinds=("denied", "power-loss"), many=20
    ),
    "an empty listing is a fresh start": Bug(
        "greatest step", B(restore=EmptyIsFresh), kinds=("unseen", "power-loss"), many=20
    ),
    "the newest by its step": Bug(
        "life|greatest step", B(restore=NewestByStep, fence=no_fence), setting=EAGER, faults=LATE
    ),
    "prunes what is ahead": Bug(
        "greatest step", B(snapshots=PrunesWhatIsAhead, fence=no_fence), setting=EAGER, faults=LATE
    ),
    # agents
    "never looks up": Bug(
        "fenced|members|life|nothing lost", B(agent=Unfenced), kinds=("cut", "pause-node"), setting=LOOSE
    ),
    "tidy agent": Bug("evidence", B(agent=TidyAgent), kinds=LOSSES),
    "trains where it is not named": Bug(
        "members", B(agent=Stubborn), kinds=("power-loss", "crash-agent")
    ),
    "does not wait for others to leave": Bug(
        "members|fenced", patches=((Rendezvous, "_has_left", unsettled),), kinds=LOSSES
    ),
    "epochs with gaps": Bug("fenced", patches=((Rendezvous, "_propose", skipping),), setting=CALM),
    "names one twice": Bug("members", patches=((Rendezvous, "_propose", doubling),), setting=CALM),
    "steals an epoch": Bug(
        "write once", patches=((Rendezvous, "try_form", stealing),), kinds=LOSSES
    ),
    "nobody ever dies": Bug(
        "life|silence", patches=((Membership, "_judge", hears_nobody_die),),
        kinds=("power-loss",), many=1, setting=PAIR,
    ),
    "never finds a hang": Bug(
        "life",
        patches=((SimPool, "find_hung", never_hung),),
        kinds=("hang-worker",),
        setting=LONELY,
        lasts_s=100_000.0,
        many=2,
    ),
    "too many ranks": Bug(
        "life|silence",
        patches=((RunOrders, "room", never_full),),
        # its worlds end at the horizon: publishers would take minutes to tell of all its epochs
        setting=replace(CALM, micro_batches=2, max_nodes=3, min_nodes=3, publishes=False),
    ),
    "heedless of notices": Bug(
        "nothing lost",
        patches=((node_machine, "step", heedless),),
        kinds=NOTICES,
        many=2,
        setting=LONELY,
        lasts_s=55.0,
    ),
    "tries for ever": Bug(
        "life",
        patches=(
            (verdicts, "why_no_more", hopeful),
            (
                Ensemble,
                "_train",
                lambda self, *_: (_ for _ in ()).throw(
                    system_workers._Lost({0: ("ValueError", "bad")})
                ),
            ),
        ),
        setting=CALM,
    ),
    # sessions
    "leaves without a snapshot": Bug(
        "nothing lost", B(turn=leaves_at_once), kinds=NOTICES, lasts_s=55.0
    ),
    "leaves before it has landed": Bug(
        "nothing lost", B(turn=leaves_unlanded), kinds=NOTICES, lasts_s=55.0
    ),
    "does not save the end": Bug(
        "done|life", B(turn=unsaved_end), setting=replace(CALM, interval=Interval(every_steps=5))
    ),
    "says that it is done": Bug("done", B(turn=early_end), kinds=NOTICES, lasts_s=55.0),
    "rank 0 saves alone": Bug("same acts", B(turn=alone), setting=replace(CALM, min_nodes=2)),
    "the least want wins": Bug(
        "nothing lost|life",
        B(winner=least),
        kinds=("notice",),
        many=2,
        setting=replace(LONELY, interval=Interval(every_steps=1)),
        lasts_s=55.0,
    ),
    "even shares": Bug("samples once|global batch", B(plan=even_shares), setting=ODD),
    "shares that overlap": Bug("samples once", B(plan=overlapping), setting=ODD),
    "forgets records": Bug("samples once", B(ensemble=ForgetsRecords), kinds=("silent",), many=20),
    "cold start": Bug("same training", B(ensemble=ColdStart), kinds=LOSSES),
    "repeats a step": Bug("samples once|same training", B(ensemble=Repeats), kinds=LOSSES),
    "records without a chain": Bug(
        "samples once", patches=((rec.StepRecord, "chained", unchained),), setting=CALM
    ),
    "deaf workers": Bug(
        "nothing lost",
        patches=((SimNode, "read_mark", deaf_worker),),
        kinds=NOTICES,
        many=2,
        setting=LONELY,
        lasts_s=55.0,
    ),
    # silence
    "its loop waits for the bucket": Bug(
        "silence",
        patches=((SimHost, "prompt", patient), (SimHost, "last_words", lambda *_: None)),
        setting=LONELY,
        faults=(Fault(70.0, "stalled", 0, 0, 50.0), Fault(75.0, "notice", 0, 0, 60.0)),
    ),
    "trains with whom it cannot reach": Bug(
        "silence|life",
        patches=((Reach, "sort_out", everybody),),
        setting=LOOSE,
        faults=(Fault(60.0, "walled", 0, 0, 60.0), Fault(61.0, "power-loss")),
    ),
    "takes an open line for a proof of new ones": Bug(
        "silence|life",
        patches=((HeartbeatProtocol, "renew", lambda *_: None),),
        setting=LOOSE,
        faults=(Fault(60.0, "wall", 1, 0, 200.0), Fault(70.0, "kill-worker", 0, 0)),
    ),
    "a signal's grace never ends": Bug(
        "silence",
        patches=((AgentState, "grace_over", lambda *_: False), (SimPool, "find_hung", never_hung)),
        setting=LONELY,
        faults=(Fault(60.0, "hang-worker", 0, 0, 9000.0), Fault(65.0, "sigterm")),
    ),
    "joins without a warm process": Bug(
        "silence|life",
        patches=((AgentState, "may_join", lambda *_: True), (SimPool, "_unforked", lambda *_: "")),
        setting=LOOSE,
        faults=(Fault(60.0, "imports-hang", 0, 0, 180.0), Fault(61.0, "power-loss")),
    ),
    "believes its uploader": Bug(
        "silence",
        patches=((UploaderWatch, "hung", lambda *_: ""),),
        setting=LONELY,
        faults=(Fault(50.0, "hang-uploader"),),
    ),
    "a full disk ends its agent": Bug(
        "crash",
        patches=((SimMark, "write", fragile),),
        setting=LONELY,
        faults=(Fault(50.0, "scratch-full", 0, 0, 60.0), Fault(60.0, "notice", 0, 0, 55.0)),
    ),
    "who was killed has failed": Bug(
        "life",
        patches=((recovery, "how_it_ended", blames_the_script),),
        kinds=("crash-agent",),
        setting=replace(STORMY, max_nodes=2, interval=Interval(every_steps=20)),
    ),
    "a part is taken for the whole": Bug(
        "crash|members",
        patches=((system_bucket, "all_of", lambda where, data, nbytes: data),),
        kinds=("half-reads", "controller-half-reads", *LOSSES),
        setting=STORMY,
    ),
    # publishers
    "a publisher that skips": Bug("published once", B(publisher=SkipsOne), setting=TRACKED),
    "a publisher that skips a row": Bug("streamed once", B(stream=skipping_rows), setting=TRACKED),
}
