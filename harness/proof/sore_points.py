"""The faults of the drill, one function each."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from harness.proof.scene import THAW_S, Scene, ip, send_signal

if TYPE_CHECKING:
    from harness.proof.scene import Drilled

CUT_S = 7.0  # longer than --hang-after-s, so that it is noticed
OUTAGE_S = 3.0
# longer than --dead-s: the tiny run must not be over before anybody is missed
STAND_S = {"agent-stop": 3.0, "node-stop": 3.0}


# ---- faults --------------------------------------------------------------------------------------
def _worker(s: Scene) -> list[psutil.Process]:
    at_phase = [p for p in s.node.workers() if p.pid == s.reached]
    return at_phase or s.node.workers()[:1]


def _thaw(s: Scene, processes: list[psutil.Process]) -> None:
    s.after(THAW_S, lambda: send_signal(processes, signal.SIGCONT))


def worker_kill(s: Scene) -> None:
    send_signal(_worker(s), signal.SIGKILL)


def worker_stop(s: Scene) -> None:
    """Never continued: it must be found."""
    send_signal(_worker(s), signal.SIGSTOP)


def worker_term(s: Scene) -> None:
    send_signal(_worker(s), signal.SIGTERM)


def agent_kill(s: Scene) -> None:
    send_signal(s.node.processes()[:1], signal.SIGKILL)


def agent_stop(s: Scene) -> None:
    stopped = s.node.processes()[:1]
    send_signal(stopped, signal.SIGSTOP)
    _thaw(s, stopped)


def agent_term(s: Scene) -> None:
    send_signal(s.node.processes()[:1], signal.SIGTERM)


def node_kill(s: Scene) -> None:
    """A loss without notice."""
    send_signal(s.node.processes(), signal.SIGKILL)


def node_stop(s: Scene) -> None:
    """A machine that is paused for a while."""
    stopped = s.node.processes()
    send_signal(stopped, signal.SIGSTOP)
    _thaw(s, stopped)


def both_killed(s: Scene) -> None:
    for node in s.nodes:
        send_signal(node.processes(), signal.SIGKILL)


def cut(s: Scene) -> None:
    """The link between the nodes is down for a while; both still reach the bucket."""
    assert s.net is not None
    link = s.net.link(s.node.number)
    ip("link", "set", link, "down")
    s.after(CUT_S, lambda: ip("link", "set", link, "up"))


def outage(s: Scene, nodes: list[Drilled] | None = None) -> None:
    for node in [s.node] if nodes is None else nodes:
        node.order("outage", "")
        s.after(OUTAGE_S, lambda node=node: node.forget("outage"))  # type: ignore[misc]


def outage_everywhere(s: Scene) -> None:
    outage(s, s.nodes)


def slow_store(s: Scene) -> None:
    for node in s.nodes:
        node.order("delay", "0.1")


def clock_forward(s: Scene) -> None:
    s.node.order("clock", "3600")


def clock_back(s: Scene) -> None:
    s.node.order("clock", "-3600")


def _announce(s: Scene, in_s: float) -> None:
    s.node.order(
        "notice", json.dumps({"kind": "kill", "id": "drill", "deadline_s": time.time() + in_s})
    )


def notice(s: Scene) -> None:
    """In time, and then the node goes, if it has not gone before."""
    _announce(s, 10.0)
    victims = s.node
    s.after(10.0, lambda: send_signal(victims.processes(), signal.SIGKILL))


def late_notice(s: Scene) -> None:
    _announce(s, 0.5)
    victims = s.node
    s.after(0.5, lambda: send_signal(victims.processes(), signal.SIGKILL))


def cancelled_notice(s: Scene) -> None:
    _announce(s, 20.0)
    node = s.node
    s.after(0.6, lambda: node.forget("notice"))


def notice_without_loss(s: Scene) -> None:
    _announce(s, 3.0)


def worker_kill_and_outage(s: Scene) -> None:
    worker_kill(s)
    outage_everywhere(s)


def node_kill_and_worker_stop(s: Scene) -> None:
    others = [n for n in s.nodes if n is not s.node]
    send_signal(others[0].workers()[:1], signal.SIGSTOP)
    node_kill(s)


SorePoint = Callable[[Scene], None]
FAULTS: dict[str, SorePoint] = {
    f.__name__.replace("_", "-"): f
    for f in (
        worker_kill,
        worker_stop,
        worker_term,
        agent_kill,
        agent_stop,
        agent_term,
        node_kill,
        node_stop,
        both_killed,
        cut,
        outage,
        outage_everywhere,
        slow_store,
        clock_forward,
        clock_back,
        notice,
        late_notice,
        cancelled_notice,
        notice_without_loss,
        worker_kill_and_outage,
        node_kill_and_worker_stop,
    )
}
