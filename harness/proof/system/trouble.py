"""What is wrong at this moment, for whom. Pure.

The list of faults (`faults.py`) says what goes wrong when; this says whom it befalls, and how.
Spells last; strikes wait for the actor's next operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.proof.system.access import patience_of
from harness.proof.system.faults import Fault
from storage.faults import Crash

if TYPE_CHECKING:
    from harness.proof.system.kernel import Kernel
    from harness.proof.system.node import SimNode
    from storage.retries import Patience

CONTROLLER = "controller"
HURRY_S = 0.3  # how much quicker others may be at an operation


class Trouble:
    """`interleaved`: chance that others are quicker at an operation."""

    def __init__(self, kernel: Kernel, interleaved: float, calm_s: float):
        self._kernel, self._interleaved, self._calm_s = kernel, interleaved, calm_s
        self._spells: dict[str, list[tuple[float, int | None, int | None]]] = {}
        self._strikes: dict[str, list[Fault]] = {}
        self.misread: dict[int, float] = {}  # by attempt: when it last was given damaged bytes
        self.overtake: Callable[[float], None] = lambda lasts_s: None

    def patience(self) -> Patience:
        return patience_of(self._kernel)

    @property
    def calm(self) -> bool:
        return self._kernel.now_s >= self._calm_s

    # ---- spells ----------------------------------------------------------------------------------
    def begin(self, fault: Fault, who: int | None, other: int | None = None) -> None:
        """A spell. `who`: the node's number; None: of everybody."""
        until_s = self._kernel.now_s + fault.lasts_s
        self._spells.setdefault(fault.kind, []).append((until_s, who, other))

    def reigns(
        self, kind: str, node: SimNode | None = None, other: int | None = None, later_s: float = 0.0
    ) -> bool:
        """Does a spell of this kind hold for this node now (or for everybody)?"""
        spells = self._spells.get(kind)
        if not spells:
            return False
        now = self._kernel.now_s + later_s
        number = node.number if node is not None else None
        return any(
            now < until_s and who in (None, number) and (other is None or whom == other)
            for until_s, who, whom in spells
        )

    # ---- strikes ---------------------------------------------------------------------------------
    def arm(self, actor: str, fault: Fault) -> None:
        """It befalls this actor at its next operation."""
        self._strikes.setdefault(actor, []).append(fault)

    def befall(self, actor: str, rng: random.Random) -> None:
        """An operation of this actor begins. Raises Crash."""
        if self.calm and not self._strikes:
            return
        if self._interleaved and not self.calm and rng.random() < self._interleaved:
            self._kernel.sleep(rng.uniform(0.0, HURRY_S))
        strikes = self._strikes.get(actor)
        if not strikes or strikes[0].kind.endswith("late"):
            return
        fault = strikes.pop(0)
        if fault.kind == "pause-controller":
            self.overtake(fault.lasts_s)
        elif fault.lasts_s:
            self._kernel.sleep(fault.lasts_s)
        else:
            raise Crash

    def dies_late(self, actor: str) -> bool:
        """Does it die when this operation is done?"""
        strikes = self._strikes.get(actor)
        if strikes and strikes[0].kind.endswith("late"):
            strikes.pop(0)
            return True
        return False

    # ---- what the bucket answers -----------------------------------------------------------------
    def answer(
        self,
        actor: str,
        node: SimNode | None,
        kind: str,
        key: str,
        rng: random.Random,
        later_s: float,
    ) -> str:
        """ "": as it should be."""
        if not self._spells or (self.calm and not later_s):
            return ""
        ours = "controller-" if node is None else ""
        if self.reigns("refused-to-all") or self.reigns(f"{ours}expired", node):
            return "refused"
        if self.reigns("silent-to-all") or self.reigns(f"{ours}silent", node):
            return "silent"
        if (
            key.startswith("snapshots/")
            and kind == "read"
            and self.reigns("denied", None, None, later_s)
        ):
            return "missing"
        if node is not None and self.reigns("throttled", node) and rng.random() < 0.67:
            return "silent"
        if node is not None and self.reigns("unheard", node):
            return "unheard"
        return ""

    def damages_read(self, node: SimNode | None, key: str) -> bool:
        damaged = key.endswith("state.bin") and self.reigns("damaged-reads", node)
        if damaged and node is not None:
            self.misread[node.attempt] = self._kernel.now_s
        return damaged
