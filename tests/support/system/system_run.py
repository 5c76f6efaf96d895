"""A whole run, simulated: the real controller, agents, rendezvous, sessions' machines, snapshots,
restores and publishers, under one virtual clock, network and store.

    result = play(seed=413)          # raises invariants.Violation, with what reproduces it

Everything follows from the seed: the setting, and the list of what goes wrong (`faults.py`). What
is played is hands only: processes, sockets, tensors, clouds. From `Setting.calm_s` on nothing goes
wrong any more and there is capacity: then the run must end. Pure: no threads, sockets, wall clock
or global randomness.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.agent.agent import Agent
from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import SNAPSHOT, Epoch
from harness.controller import policies
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core import batch
from harness.core.mesh import parse_choice
from harness.core.world import REFUSED, CloudUnavailable, Fenced, Offer, Policy, World
from harness.lab.simulation import invariants
from harness.lab.simulation.invariants import Violation
from harness.look.trackers.publisher import publisher_of
from harness.look.trackers.tracker_stream import StreamWriter
from harness.look.trackers.trackers import Publisher
from harness.rendezvous.peer_heartbeats import HeartbeatProtocol
from harness.uploader.senders import fence
from harness.worker import boundary
from storage.errors import NotFound, StoreError
from storage.snapshots.reader_leases import Watch
from storage.snapshots.restore import Restore
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import SortedStore
from storage.stores.objects import ObjectStore
from storage.testing.faulty_store import Crash, corrupt
from support.clock import speaking
from support.system import system_checks
from support.system.fault_plan import (
    AT_ONCE,
    CONTROLLER,
    DEAF,
    EVERYBODY,
    STRIKES,
    ActiveFaults,
    Fault,
    FaultLog,
    InjectedFault,
    Setting,
    faults_of,
)
from support.system.liveness import Liveness
from support.system.system_bucket import Access, Bucket, Served
from support.system.system_cloud import ControllerSeat, PlayedCloud
from support.system.system_network import SimulatedNet
from support.system.system_node import SimNode
from support.system.system_trackers import NAME, SimSidecars
from support.system.system_uploads import Sending
from support.system.system_workers import Ensemble, expected, identity, state_after
from support.system.virtual_time import Kernel

LEASE_TTL_S = 15.0
SETTLE_S = 400.0  # after the end: whatever was on its way lands, and what lives on ends
GENTLE_S = 50.0  # a notice that leaves so long need not cost a step
RESTART_S = (1.0, 25.0)  # until somebody starts a dead controller again


@dataclass(frozen=True)
class SystemBuild:
    """What a simulated run is built of. Tests put a broken part in, to see that it is found."""

    agent: Callable[..., Agent] = Agent
    lease: type[Lease] = Lease
    journal: type[Journal] = Journal
    recover: Callable[..., RunOutcome] = recover
    policy: Policy = policies.cheapest
    snapshots: type[Snapshots] = Snapshots
    restore: type[Restore] = Restore
    publisher: Callable[..., Publisher] = Publisher
    stream: Callable[..., StreamWriter] = publisher_of
    sending: Callable[..., Sending] = Sending
    turn: Callable[
        [boundary.SessionState, boundary.SessionEvent, boundary.BoundaryInputs], boundary.Transition
    ] = boundary.next_turn
    winner: Callable[[Sequence[int]], Any] = boundary.winner
    plan: Callable[[int, int], batch.Plan] = batch.plan
    ensemble: Callable[[Any, Epoch], Ensemble] = Ensemble
    fence: Callable[[ObjectStore], Any] = fence
    lines: Callable[[str, float, float, str], HeartbeatProtocol] = HeartbeatProtocol
    store: Callable[[], ObjectStore] = SortedStore


@dataclass(frozen=True)
class Played:
    """What came of one world. `said`: (time, who, words), in order."""

    seed: int
    outcome: str
    reason: str
    committed_step: int
    elapsed_s: float  # virtual
    epochs: int
    nodes: int
    controllers: int
    steps_done: int
    events: int
    faults: tuple[Fault, ...] = field(repr=False, default=())
    said: tuple[tuple[float, str, str], ...] = field(repr=False, default=())


class Failed(Violation):
    """A rule was broken; with what was said until then."""

    def __init__(self, what: str, said: Sequence[tuple[float, str, str]]):
        super().__init__(what)
        self.said = tuple(said)


def play(
    seed: int,
    build: SystemBuild | None = None,
    setting: Setting | None = None,
    faults: Sequence[Fault] | None = None,
) -> Played:
    """One run in one world. Raises Failed. `faults`: instead of the seed's own list."""
    setting = setting or Setting.of(seed)
    faults = faults_of(seed, setting) if faults is None else faults
    whole = WholeSystem(seed, setting, faults, build or SystemBuild())
    try:
        with speaking(setting.protocol):
            return whole.play()
    except Exception as e:  # an agent would end with a traceback
        crash = "" if isinstance(e, Violation) else f"crash: {type(e).__name__}: "
        raise Failed(f"{crash}{e}\n  reproduce it: make simsystem SEED={seed}", whole.said) from e
    finally:
        whole.kernel.close()


class WholeSystem:
    """Builds the world, keeps somebody at the wheel, and lets the checkers see everything."""

    def __init__(self, seed: int, setting: Setting, faults: Sequence[Fault], build: SystemBuild):
        self.seed, self.setting, self.build, self.faults = seed, setting, build, tuple(faults)
        self.meshes = parse_choice(setting.meshes) if setting.meshes else None
        self.kernel = Kernel(setting.protocol)
        self.said: list[tuple[float, str, str]] = []
        self.trouble = ActiveFaults(self.kernel, setting.interleaved, setting.calm_s)
        self.trouble.overtake = self._overtake
        self.bucket = Bucket(build.store(), self.kernel, self.emit)
        self.blows = FaultLog(misread=self.trouble.misread)
        self.net = SimulatedNet(self.kernel, self.trouble)
        self.leases = Watch(now=self.kernel.now)
        self.cloud = PlayedCloud(self, self.random("cloud"))
        self.machines: dict[int, SimNode] = {}  # by attempt
        self.guests: list[SimNode] = []  # nodes of another version, that nobody launched
        self.teams: dict[int, Ensemble] = {}  # by epoch
        self.outcome: RunOutcome | None = None
        self.controllers = self.steps_done = self._depth = 0
        self._dies_s = math.inf
        self.spoiled = 0
        self.run = RunSpec(
            setting.min_nodes,
            setting.max_nodes,
            poll_s=4.0,
            lost_after_s=60.0,
            exit_grace_s=90.0,
            terminate_timeout_s=400.0,
            max_hours_without_progress=4.0,
        )
        self.alive = Liveness(self)
        self.checkers = self._checkers()
        work_s = setting.total_steps * setting.step_s
        self.kernel.horizon_s = setting.calm_s + 6 * work_s + 4000.0
        for fault in self.faults:
            self.kernel.after(fault.at_s, lambda f=fault: self._befall(f))  # type: ignore[misc]

    def _checkers(self) -> list[Any]:
        store, micro = self.bucket.inner, self.setting.micro_batches

        def digest(step: int) -> str:
            return expected(micro, step)

        return [
            invariants.WriteOnce(),
            invariants.SingleController(),
            invariants.Seeing(),
            invariants.IntendedFirst(),
            invariants.NodeLimit(self.run.max_nodes),
            invariants.NothingLeft(),
            invariants.LedgerChecker(estimated=self.cloud.unlisted),
            system_checks.WholeSnapshot(store),
            *([system_checks.MeshChecker(self.meshes)] if self.meshes else []),
            system_checks.GreatestCommitted(store),
            system_checks.FencingChecker(grace_s=100.0, deaf_s=self._deaf_s),
            system_checks.EveryStepOnce(
                store, digest, 2 * micro, identity(micro, self.setting.total_steps)
            ),
            system_checks.SameTraining(lambda step: state_after(micro, step)),
            invariants.DoneIsDone(store, self.setting.total_steps),
            system_checks.EvidenceChecker(self.machines),
            system_checks.Bystanders(self.machines, fresh_s=3.0),
            system_checks.NothingLost(store, self._gentle(), self.setting.total_steps),
            system_checks.PublishedOnce(store, digest, NAME),
            system_checks.StreamedOnce(store),
            self.alive,
        ]

    def _deaf_s(self, epoch: int) -> float:
        """Until when the bucket answered none of this epoch's nodes."""
        nodes = {w.node.number: w.node for w in self.teams[epoch].workers.values()}
        return min(max(self.trouble.over_s(kind, n) for kind in DEAF) for n in nodes.values())

    def _gentle(self) -> bool:
        return all(f.kind == "notice" and f.lasts_s >= GENTLE_S for f in self.faults)

    # ---- for the parts ---------------------------------------------------------------------------
    def random(self, name: str) -> random.Random:
        """Of its own, so that one actor's fate does not shift another's."""
        return random.Random(f"{self.seed} {name}")

    def say(self, who: int | str, text: str) -> None:
        self.said.append((self.kernel.now_s, f"node {who}" if isinstance(who, int) else who, text))

    def emit(self, event: Any) -> None:
        try:
            with speaking(2):  # whoever wrote it
                for checker in self.checkers:
                    checker.see(event)
        except Violation as e:
            self.kernel.broken = self.kernel.broken or e
            raise

    def violated(self, what: str) -> None:
        self.kernel.broken = self.kernel.broken or Violation(f"{what} at {self.kernel.now_s:.1f} s")
        raise self.kernel.broken

    def access(
        self,
        actor: str,
        node: SimNode | None,
        reads: bool = False,
        lives: Callable[[], bool] = lambda: True,
    ) -> Access:
        rng = node.rng if node else self.random(actor)
        served = Served(self.bucket, self.trouble, rng, node, reads, lives)
        return Access(served, self.trouble, actor, rng, node.version if node else "now")

    def sidecars(self, node: SimNode) -> SimSidecars:
        return SimSidecars(node)

    def team(self, epoch: Epoch) -> Ensemble:
        if named := [g.member for g in self.guests if g.member in epoch.members]:
            self.violated(f"versions: epoch {epoch.epoch} names {named}, of another version,")
        if epoch.epoch not in self.teams:
            self.teams[epoch.epoch] = self.build.ensemble(self, epoch)
        return self.teams[epoch.epoch]

    def boot(self, attempt: int, offer: Offer) -> None:
        number = len(self.machines)
        setting = self.setting
        node = SimNode(
            self, number, attempt, offer, self.random(f"node {attempt}"),
            skew_s=setting.skews_s[number % len(setting.skews_s)],
            version=setting.versions[number % len(setting.versions)],
        )  # fmt: skip
        node.walled = self.trouble.reigns("walled")
        self.machines[attempt] = node
        self.say(number, f"is up (attempt {attempt} on {offer.name})")
        self.kernel.after(1.0, node.boot, node.actor)

    def struck(self, kind: str, node: SimNode, epoch: int, step: int) -> None:
        """A fault has ended a worker of this epoch, which had done this step."""
        committed = max((ref.step for ref in Snapshots(self.bucket.inner).refs()), default=0)
        step = max(step, committed)
        self.blows.all.append(InjectedFault(self.kernel.now_s, kind, node.attempt, epoch, step))

    def _visit(self) -> None:
        """A node of another version comes."""
        number = 1000 + len(self.guests)
        offer = self.setting.offers[0]
        guest = SimNode(self, number, 0, offer, self.random(f"guest {number}"))
        for actor in ("agent", "beat", "lines", "uploader", "publisher"):
            self.kernel.speaks[f"{actor}-{number}"] = 3 - self.setting.protocol
        self.guests.append(guest)
        self.kernel.after(0.0, guest.boot, guest.actor)

    # ---- what goes wrong -------------------------------------------------------------------------
    def _befall(self, fault: Fault) -> None:
        up = [node for node in self.machines.values() if node.runs() and hasattr(node, "agent")]
        kind, lasts_s = fault.kind, fault.lasts_s
        trouble = self.trouble
        if (
            kind.endswith("-to-all")
            or kind in ("denied", "unseen", "cloud-silent", "full-cloud", "imports-hang", "walled")
            or (kind.startswith("controller-"))
        ):
            trouble.begin(fault, None)
        elif kind.endswith(("-controller", "-controller-late")):
            trouble.arm(CONTROLLER, fault)
        elif kind == "rot":
            trouble.note(EVERYBODY, fault)
            self._rot()
        elif kind == "other-version":
            self._visit()
        elif kind == "snapshot-asked":
            self.bucket.put(f"{SNAPSHOT}{fault.at_s}.json", b"{}")
        elif not up:
            return
        else:
            node = up[fault.who % len(up)]
            other = up[fault.other % len(up)]
            strike = STRIKES.get(kind)
            if strike is not None:
                trouble.note(node.number, fault)
                strike(self, node, fault)
            else:
                for each in AT_ONCE.get(kind, (kind,)):
                    whom = other.number if kind == "one-way" else None
                    trouble.begin(replace(fault, kind=each), node.number, whom)
            self.say(node.number, f"** {kind}" + (f" for {lasts_s:.1f} s" if lasts_s else ""))
            return
        self.say("world", f"** {kind}" + (f" for {lasts_s:.1f} s" if lasts_s else ""))

    def _rot(self) -> None:
        """Damage the newest committed snapshot, if there is an older one and none was damaged."""
        refs = Snapshots(self.bucket.inner).refs()
        if len(refs) < 2 or self.spoiled:
            return
        parts = Snapshots(self.bucket.inner).load(refs[0]).parts
        key = next(p.key for p in parts if p.key.endswith("state.bin"))
        try:
            corrupt(self.bucket.inner, key, "flip", self.random("rot"))
        except (NotFound, ValueError):
            return
        self.spoiled += 1
        self.emit(system_checks.Damaged(self.kernel.now_s, refs[0]))

    # ---- the run ---------------------------------------------------------------------------------
    def play(self) -> Played:
        rng = self.random("restarts")
        while self.outcome is None:
            self.lead()
            if self.outcome is None:
                self.kernel.sleep(rng.uniform(*RESTART_S))
        ended_s = self.kernel.now_s
        self.kernel.horizon_s = math.inf
        self.kernel.sleep(SETTLE_S)
        for checker in self.checkers:
            checker.at_end()
        self._check_life(self.outcome)
        self._check_versions()
        return Played(
            self.seed, self.outcome.outcome, self.outcome.reason, self.outcome.committed_step,
            ended_s, len(self.teams), len(self.machines), self.controllers, self.steps_done,
            self.kernel.happened, self.faults, tuple(self.said),
        )  # fmt: skip

    def _check_life(self, outcome: RunOutcome) -> None:
        """If it can end well it does; else it says why not, and that is the world's fault."""
        if outcome.outcome != "done" and not self.blows.explain(outcome.reason):
            raise Violation(
                f"life: {outcome.outcome} ({outcome.reason}) at {self.kernel.now_s:.0f} s, "
                f"although it could have ended well; what befell workers and agents: {self.blows}"
            )

    def _check_versions(self) -> None:
        """Who speaks another protocol is told so, and costs nobody of the run its place."""
        for guest in self.guests:
            if guest.code != REFUSED:
                raise Violation(f"versions: node {guest.number} ended with {guest.code}, wanted 38")
        for node in self.machines.values():
            if node.code == REFUSED:
                raise Violation(f"versions: node {node.number} of the run was refused")

    def lead(self, dies_s: float = math.inf) -> None:
        """One controller, from its start to its end, of whatever kind."""
        self.controllers += 1
        name = f"controller-{self.controllers}"
        before, self._dies_s = self._dies_s, dies_s
        store = self.access(CONTROLLER, None)
        seat = ControllerSeat(self, store, self.random(name))
        lease = seat.lease = self.build.lease(store, self.kernel, name, ttl_s=LEASE_TTL_S)
        world = World(self.kernel, seat, store, self.random(f"{name} policy"))
        journal = self.build.journal(store, name, self.kernel.now)
        self.say(name, "starts")
        try:
            outcome = self.build.recover(self.run, self.build.policy, world, journal, lease)
        except (Crash, Fenced, CloudUnavailable, StoreError) as e:
            self.say(name, f"ends: {type(e).__name__} {e}")
            return  # dead, or not needed, or in trouble of its own
        finally:
            self._dies_s = before
        self.say(name, f"ends: {outcome.outcome}, {outcome.reason}")
        self.outcome = self.outcome or outcome

    def check_controller(self) -> None:
        """Is who acts now still alive? Raises Crash."""
        if self.kernel.now_s > self._dies_s:
            raise Crash

    def _overtake(self, lasts_s: float) -> None:
        """A controller stands still; for long enough that another one may lead meanwhile."""
        back_s = self.kernel.now_s + lasts_s
        if not self._depth and lasts_s > 1.5 * LEASE_TTL_S:
            self._depth = 1
            try:
                self.lead(dies_s=back_s)
            finally:
                self._depth = 0
        self.kernel.sleep(max(0.0, back_s - self.kernel.now_s))
