"""A cloud that may lie: it lists nodes that are gone, does not list nodes that live, lists them
twice, does not answer, or has no machine. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from harness.core.world import CloudUnavailable, Node, NodeState, Offer
from harness.lab.simulation.invariants import Acted, Changed
from support.system.fault_plan import CONTROLLER

if TYPE_CHECKING:
    from harness.bucket.controller_lease import Lease
    from support.system.system_bucket import Access
    from support.system.system_run import WholeSystem

T = TypeVar("T")
LAUNCH_S, END_S = (4.0, 25.0), (1.0, 6.0)


class PlayedCloud:
    """`all`: what it knows of every attempt."""

    def __init__(self, sim: WholeSystem, rng: random.Random):
        self._sim, self._rng = sim, rng
        self.all: dict[int, Node] = {}
        self.unlisted: dict[int, float] = {}  # attempt -> until when
        self.twice: dict[int, float] = {}

    # -- what controllers may call
    def offers(self) -> Sequence[Offer]:
        return self._sim.setting.offers

    def launch(self, attempt: int, offer: Offer) -> None:
        if attempt not in self.all:
            now = self._sim.kernel.now_s
            self._set(Node(attempt, offer, NodeState.PENDING, asked_s=now))
            self._sim.kernel.after(self._rng.uniform(*LAUNCH_S), lambda: self._arrive(attempt))

    def nodes(self) -> Sequence[Node]:
        now = self._sim.kernel.now_s
        shown = [n for n in self.all.values() if self.unlisted.get(n.attempt, 0.0) <= now]
        return [*shown, *(n for n in shown if self.twice.get(n.attempt, 0.0) > now)]

    def terminate(self, attempt: int) -> None:
        if attempt in self.all:
            self._sim.kernel.after(
                self._rng.uniform(*END_S), lambda: self.end(attempt, None, "terminated")
            )

    # -- what happens
    def _set(self, node: Node) -> None:
        self.all[node.attempt] = node
        self._sim.emit(Changed(self._sim.kernel.now_s, node))

    def _arrive(self, attempt: int) -> None:
        node, now = self.all[attempt], self._sim.kernel.now_s
        if not node.alive:
            return
        if self._sim.trouble.reigns("full-cloud"):
            self._set(dataclasses.replace(node, state=NodeState.NO_CAPACITY, gone_s=now))
            return
        self._set(dataclasses.replace(node, state=NodeState.UP, up_s=now))
        self._sim.boot(attempt, node.offer)

    def exited(self, attempt: int, code: int) -> None:
        self.end(attempt, code, "exited")

    def end(
        self, attempt: int, exit_code: int | None, reason: str, lives_on_s: float = 0.0
    ) -> None:
        node, machine = self.all[attempt], self._sim.machines.get(attempt)
        if machine is not None:
            self._sim.kernel.after(lives_on_s, machine.power_off)
        if node.alive:
            now = self._sim.kernel.now_s
            self._set(
                dataclasses.replace(
                    node, state=NodeState.GONE, gone_s=now, exit_code=exit_code, reason=reason
                )
            )


class ControllerSeat:
    """One controller's eyes and hands: its bucket and its cloud."""

    def __init__(self, sim: WholeSystem, store: Access, rng: random.Random):
        self._sim, self.store, self._rng = sim, store, rng
        self.lease: Lease | None = None

    def offers(self) -> Sequence[Offer]:
        return self._sim.cloud.offers()

    def nodes(self) -> Sequence[Node]:
        return self._ask("nodes", self._sim.cloud.nodes)

    def launch(self, attempt: int, offer: Offer) -> None:
        self._act("launch", attempt, lambda: self._sim.cloud.launch(attempt, offer))

    def terminate(self, attempt: int) -> None:
        self._act("terminate", attempt, lambda: self._sim.cloud.terminate(attempt))

    def _act(self, what: str, attempt: int, operation: Callable[[], None]) -> None:
        def effect() -> None:
            term = self.lease.term if self.lease else 0
            blind = self.store.blind
            self._sim.emit(Acted(self._sim.kernel.now_s, term, what, attempt, blind))
            operation()

        self._ask(what, effect)

    def _ask(self, what: str, operation: Callable[[], T]) -> T:
        trouble = self._sim.trouble
        trouble.befall(CONTROLLER, self._rng)
        self._sim.check_controller()
        if not trouble.reigns("cloud-silent"):
            return operation()
        if self._rng.random() < 0.5:
            raise CloudUnavailable(f"{what}: no answer (nothing was done)")
        operation()
        raise CloudUnavailable(f"{what}: no answer (it was done)")
