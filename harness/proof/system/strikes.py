"""What befalls a node at once, as the list of faults says (`faults.py`). Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.proof.system.faults import Fault

if TYPE_CHECKING:
    from harness.proof.system.node import SimNode
    from harness.proof.system.whole import WholeSystem


def _pause_node(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for actor in ("agent", "beat", "lines", "uploader", "publisher"):
        whole.kernel.pause(f"{actor}-{node.number}", fault.lasts_s)


def _jump(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.skew_s += whole.random(f"jump {fault.at_s}").choice((-3600.0, -30.0, 30.0, 3600.0))


def _kill_worker(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[fault.other % 2 : 1 + fault.other % 2]:
        if worker.at_work:
            whole.struck("kill-worker", node, worker.epoch.epoch)
        worker.exit(-9)


def _hang_worker(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[:1]:
        worker.stuck = True
        whole.kernel.after(fault.lasts_s, worker.come_to)


def _bad_memory(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for name, data in node.near.items():
        node.near[name] = bytes([data[0] ^ 1]) + data[1:]


def _fail_script(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[:1]:
        worker.to_fail = "simulated: the script raises"


def _power_loss(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.end(node.attempt, None, "preempted")


def _zombie(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.end(node.attempt, None, "preempted", lives_on_s=fault.lasts_s)


def _notice(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.notice(fault.lasts_s)
    whole.kernel.after(fault.lasts_s, lambda: whole.cloud.end(node.attempt, None, "preempted"))


def _false_notice(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.notice(120.0, cancelled_s=fault.lasts_s)


def _arm(actor: str) -> Callable[[WholeSystem, SimNode, Fault], None]:
    return lambda whole, node, fault: whole.trouble.arm(f"{actor}-{node.number}", fault)


def _unlist(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    # once: what neither cloud nor bucket shows for `lost_after_s` is lost, rightly
    whole.cloud.unlisted.setdefault(node.attempt, whole.kernel.now_s + fault.lasts_s)


def _double(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.twice[node.attempt] = whole.kernel.now_s + fault.lasts_s


STRIKES: dict[str, Callable[[WholeSystem, SimNode, Fault], None]] = {
    "pause-node": _pause_node,
    "pause-agent": _arm("agent"),
    "pause-uploader": _arm("uploader"),
    "crash-agent": _arm("agent"),
    "kill-uploader": lambda whole, node, fault: node.uploads.kill(),
    "kill-worker": _kill_worker,
    "bad-memory": _bad_memory,
    "hang-worker": _hang_worker,
    "fail-script": _fail_script,
    "power-loss": _power_loss,
    "sick-gpu": lambda whole, node, fault: node.sick(),
    "jump": _jump,
    "notice": _notice,
    "false-notice": _false_notice,
    "zombie": _zombie,
    "unlisted": _unlist,
    "twice": _double,
}
