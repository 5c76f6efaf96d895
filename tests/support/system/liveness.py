"""What must go on in a simulated run, however long others neither die nor answer. Pure.

    a notice is heard within 2 s of its coming
    a snapshot is committed within 30 s, or somebody is told
    a healthy member trains within 60 s of any other's trouble
    who is told to end by a signal has ended when its grace is over

Clocks begin anew with every new trouble, and count only while nothing is wrong with those of whom
something is wanted (`ActiveFaults.until_s`): what is wrong with others is no excuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from harness.agent.node_state import NodePhase
from harness.agent.workers import FORKED_WITHIN_S
from harness.lab.simulation.invariants import Violation
from storage.snapshots.restore import PAUSES_S
from support.system.fault_plan import EVERYBODY
from support.system.system_checks import Resumed, Stepped

if TYPE_CHECKING:
    from support.system.system_node import SimNode
    from support.system.system_run import WholeSystem
    from support.system.system_uploads import Sending

LOOK_S = 2.0
HEARD_S, COMMITTED_S = 2.0, 30.0
TRAINS_S = 60.0 + sum(PAUSES_S)  # a world that finds no snapshot looks again
CLOSE_S = 60.0  # for the last words of an agent, after its grace
IMPORT_S = 15.0  # a node that has just come has nothing to train with yet


class Liveness:
    def __init__(self, sim: WholeSystem):
        self._sim, self._kernel = sim, sim.kernel
        self._trained_s = 0.0  # when anybody last did a step
        self._told: list[tuple[SimNode, float]] = []  # who was told something, and when
        self._able_s: float | None = None  # since when there are healthy members enough
        self._kernel.after(LOOK_S, self._look)

    def see(self, event: Any) -> None:
        if isinstance(event, Stepped | Resumed):
            self._trained_s = event.t

    def at_end(self) -> None: ...

    # ---- what agents are told --------------------------------------------------------------------
    def told(self, node: SimNode) -> None:
        self._told.append((node, since_s := self._kernel.now_s))
        self._kernel.after(HEARD_S, lambda: self._heard(node, since_s))

    def _heard(self, node: SimNode, since_s: float) -> None:
        later = sum(one is node and at_s > since_s for one, at_s in self._told)
        if node.tell is None or not node.runs() or node.agent._hearing.inbox.qsize() <= later:
            return
        again_s = self._kernel.paused_s(node.actor) + HEARD_S - self._kernel.now_s
        if again_s > 0:  # its process stands still
            self._kernel.after(again_s, lambda: self._heard(node, since_s))
            return
        self._silence(f"node {node.number} has not heard what it was told at {since_s:.1f} s")

    def told_to_end(self, node: SimNode, grace_s: float) -> None:
        self._kernel.after(grace_s + CLOSE_S, lambda: self._ended(node))

    def _ended(self, node: SimNode) -> None:
        if not node.runs():
            return
        again_s = self._kernel.paused_s(node.actor) + CLOSE_S - self._kernel.now_s
        if again_s > 0:
            self._kernel.after(again_s, lambda: self._ended(node))
            return
        self._silence(f"node {node.number} has not ended, long after a signal's grace")

    # ---- what goes on ----------------------------------------------------------------------------
    def _look(self) -> None:
        if self._sim.outcome is not None:
            return
        self._see_training()
        self._see_commits()
        self._kernel.after(LOOK_S, self._look)

    def _see_training(self) -> None:
        """Are there healthy members enough that nobody trains, for too long?"""
        sim, now = self._sim, self._kernel.now_s
        able = sum(self._healthy(node) for node in sim.machines.values())
        if able < sim.setting.min_nodes or sim.meshes or self._over():
            self._able_s = None
            return
        self._able_s = now if self._able_s is None else self._able_s
        since_s = max(self._able_s, self._trained_s, sim.trouble.last_s, *self._forking())
        if now - since_s > TRAINS_S + sim.setting.step_s:
            self._silence(f"{able} healthy nodes, and nobody trains since {since_s:.1f} s")

    def _forking(self) -> list[float]:
        """Until when workers that are not there yet are waited for, rightly."""
        workers = (w for n in self._sim.machines.values() if n.runs() for w in n.workers())
        return [w.ordered_s + FORKED_WITHIN_S for w in workers if w.at_work and not w.forked]

    def _see_commits(self) -> None:
        now = self._kernel.now_s
        for team in self._sim.teams.values():
            jobs = list(team.flight.jobs.values()) if team.flight and not team.over else []
            if not jobs or not all(self._sends(job) for job in jobs):
                continue
            begun_s = max(job.created_s for job in jobs)
            since_s = max(begun_s, self._sim.trouble.last_s, *self._ills(j.node for j in jobs))
            late = [job for job in jobs if job.outcome is None]
            told = any(job.outcome not in (None, "committed") for job in jobs)
            if late and not told and now - since_s > COMMITTED_S:
                self._silence(
                    f"snapshot {late[0].ref}, begun at {begun_s:.1f} s, is not committed, nothing "
                    f"was said, and nothing is wrong since {since_s:.1f} s"
                )

    def _sends(self, job: Sending) -> bool:
        return job.node.runs() and (not job.by_worker or job.worker.at_work)

    def _ills(self, nodes: Iterable[SimNode]) -> list[float]:
        """Until when something was wrong with each of these."""
        wrong = self._sim.trouble.until_s
        return [wrong.get(EVERYBODY, 0.0), *(wrong.get(node.number, 0.0) for node in nodes)]

    def _healthy(self, node: SimNode) -> bool:
        now = self._kernel.now_s
        return (
            node.runs()
            and node.tell is not None
            and now - node.up_s > IMPORT_S
            and max(self._ills([node])) <= now
            and not self._kernel.paused(node.actor)
            and not node.pool.hangs
            and not node.agent._node.leaving
            and node.agent._node.life is not NodePhase.WARMING
        )

    def _over(self) -> bool:
        """Is all done that there is to do?"""
        return any(t.step >= self._sim.setting.total_steps for t in self._sim.teams.values())

    def _silence(self, what: str) -> None:
        self._kernel.broken = self._kernel.broken or Violation(
            f"silence: {what} at {self._kernel.now_s:.1f} s"
        )
