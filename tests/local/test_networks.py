"""Two nodes whose networks really do not meet: agents in network namespaces, a router between them
(AUDIT 2).

Nothing of the engine is replaced but `LEAVE_S`. Linux, root and iproute2 only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.core.world import DRAINED, UNFIT
from harness.local.local_run import can_isolate, ip
from support.outside import SCRIPT, environment, said_of, seam, train_begin, until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not can_isolate(), reason="network namespaces need Linux, root and iproute2"),
]
# two micro-batches in a step, so that there is work for both
TIMED = SCRIPT.replace("micro_batch=8", "micro_batch=4") + """    if step.updated:
        open(os.environ["STEPS"], "a").write(f"{step.number} {time.monotonic()}\\n")
"""
LOST_S = 5.0  # what a node that cannot be reached may cost one that trains
STANDS_S = 1.0  # a longer step than this (0.1 s is usual) is training that was lost
A, B = "10.213.1.2", "10.213.2.2"  # what the two send from
HIDDEN = "10.213.9.2"  # an address of a node's own that the router knows no way to


@dataclass(frozen=True)
class Wall:
    """What is between the nodes. `router`: commands of `ip` there; `hidden`: the node that is known
    by its `HIDDEN` address, as behind a NAT; `cut`: nodes without a route."""

    router: tuple[str, ...] = ()
    hidden: str = ""
    cut: str = ""

    def address(self, node: str) -> str:
        """Return the address by which a node is known."""
        return HIDDEN if node == self.hidden else {"a": A, "b": B}[node]


def rules(action: str) -> tuple[str, ...]:
    return tuple(f"rule add iif to-{node} {action}" for node in "ab")


WALLS = {
    "open": Wall(),
    "no route": Wall(cut="ab"),
    "dropped": Wall(rules("blackhole")),  # a security group: no answer at all
    "prohibited": Wall(rules("prohibit")),  # a firewall that says so, by ICMP
    # both addresses are the router's own, and nobody listens there: every SYN is answered by a RST
    "refused": Wall((f"addr add {A}/32 dev lo", f"addr add {B}/32 dev lo")),
    "a newcomer behind NAT": Wall(hidden="b"),  # it reaches us, we do not reach it
    "the first one behind NAT": Wall(hidden="a"),
}


class Network:
    """Two namespaces `a` and `b`, and a router between them, named by this process. Deleting them
    deletes their links."""

    def __init__(self) -> None:
        self._spaces = {node: f"hw{os.getpid()}{node}" for node in "abr"}

    def build(self, wall: Wall) -> None:
        for space in self._spaces.values():
            ip("netns", "add", space)
        for node, address in (("a", A), ("b", B)):
            gate = address[:-1] + "1"
            link = "link add eth0 type veth peer name to-{0} netns {1}"
            self._ip(node, link.format(node, self._spaces["r"]))
            for words in f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up":
                self._ip(node, words)
            self._ip("r", f"addr add {gate}/24 dev to-{node}")
            self._ip("r", f"link set to-{node} up")
            if node not in wall.cut:
                self._ip(node, f"route add default via {gate} src {address}")
        self._ip("r", "link set lo up")
        ip("netns", "exec", self._spaces["r"], "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.wall_off(wall)
        if wall.hidden:
            self._ip(wall.hidden, f"addr add {HIDDEN}/32 dev lo")

    def wall_off(self, wall: Wall) -> None:
        for words in wall.router:
            self._ip("r", words)

    def _ip(self, node: str, words: str) -> None:
        ip("-n", self._spaces[node], *words.split())

    def inside(self, node: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._spaces[node])

    def remove(self) -> None:
        """Kill who is left in the namespaces, and delete these."""
        for space in self._spaces.values():
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.remove()


Begin = Callable[[str, Wall], "subprocess.Popen[str]"]


@pytest.fixture
def begin(network: Network, tmp_path: Path) -> Begin:
    """Return what starts an agent on node `a` or `b`."""
    soon = seam(
        tmp_path / "seam",
        """
        import sys
        if "harness.cli" in sys.orig_argv:
            from harness.agent import agent
            agent.LEAVE_S = 5.0
        """,
    )
    (tmp_path / "script.py").write_text(TIMED)

    def start(node: str, wall: Wall) -> subprocess.Popen[str]:
        flags = ("--set", f"addr={wall.address(node)}", "--alert", f"command:tee -a {tmp_path / 'alerts'}")
        return train_begin(
            *(tmp_path / "run", *flags),
            total=10_000,
            nap_s=0.1,
            folder=tmp_path,
            env=environment(soon, GLOO_SOCKET_IFNAME="eth0", STEPS=str(tmp_path / f"steps-{node}")),
            within=network.inside(node),
        )

    return start


def steps_of(folder: Path, node: str) -> list[tuple[int, float]]:
    """Return the steps that a node made, each with the time of its end."""
    path = folder / f"steps-{node}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), float(at_s)) for number, at_s in map(str.split, lines)]


def told_of(path: Path) -> list[dict[str, str]]:
    """Return the alerts that the receiver was told, once they are whole."""
    text, found = path.read_text() if path.exists() else "", []
    with contextlib.suppress(ValueError):
        while text := text.strip():
            alert, end = json.JSONDecoder().raw_decode(text)
            found.append(alert)
            text = text[end:]
    return found


@pytest.mark.parametrize("name", [name for name in WALLS if name != "open"])
def test_a_node_that_cannot_be_reached_costs_the_other_little_and_leaves(
    network: Network, begin: Begin, tmp_path: Path, name: str
):
    wall = WALLS[name]
    network.build(wall)
    healthy = begin("a", wall)
    until(lambda: len(steps_of(tmp_path, "a")) > 20, "training", of=healthy)
    came_s = time.monotonic()
    code, said = said_of(begin("b", wall), 90.0)
    left_s = time.monotonic()
    assert code == UNFIT, said
    assert f"at {wall.address('b')} is unreachable" in said, said
    assert f"at {wall.address('a')}; open all TCP ports" in said, said
    alerts = until(
        lambda: [a for a in told_of(tmp_path / "alerts") if "unreachable" in a["text"]],
        "an alert that names the node",
        within_s=30.0,
        of=healthy,
    )
    assert all(f"at {wall.address('b')} is unreachable" in a["text"] for a in alerts), alerts
    until(lambda: steps_of(tmp_path, "a")[-1][1] > left_s + 1.0, "training goes on", of=healthy)
    healthy.terminate()
    code, said = said_of(healthy, 60.0)
    assert code == DRAINED, said

    steps = steps_of(tmp_path, "a")
    assert [number for number, _ in steps] == list(range(1, len(steps) + 1))  # none done again
    times = [at_s for _, at_s in steps if at_s > came_s - 1.0]
    lost_s = sum(b - a for a, b in itertools.pairwise(times) if b - a > STANDS_S)
    print(f"{lost_s:.1f} s lost of {left_s - came_s:.1f} s, {len(times)} steps")
    assert lost_s <= LOST_S
    assert len(list((tmp_path / "run" / "rdzv").glob("epoch*"))) <= 1
    assert not steps_of(tmp_path, "b")


def test_the_same_nodes_train_together_where_nothing_is_in_the_way(
    network: Network, begin: Begin, tmp_path: Path
):
    """So what the others show is the wall's doing, not the namespaces'."""
    network.build(WALLS["open"])
    both = [begin(node, WALLS["open"]) for node in "ab"]

    def common() -> set[int]:
        a, b = ({number for number, _ in steps_of(tmp_path, node)} for node in "ab")
        return a & b

    until(lambda: len(common()) > 5, "common steps", of=both[1])
    for process in both:
        process.terminate()
    assert [said_of(process, 60.0)[0] for process in both] == [DRAINED, DRAINED]


def test_packets_that_are_lost_amid_a_run_stop_nobody_for_long(
    network: Network, begin: Begin, tmp_path: Path
):
    """Both reach the bucket, so neither is dead, and what one sends has no answer at all: their
    workers waited for each other for a quarter of an hour."""
    network.build(WALLS["open"])
    both = {node: begin(node, WALLS["open"]) for node in "ab"}
    until(lambda: min(len(steps_of(tmp_path, n)) for n in "ab") > 5, "steps of both", of=both["b"])
    network.wall_off(WALLS["dropped"])
    lost_s = time.monotonic()

    def alone() -> list[str]:
        return [n for n in "ab" if steps_of(tmp_path, n)[-1][1] > lost_s + STANDS_S]

    until(alone, "one that trains on alone", within_s=60.0)
    print(f"trains on after {time.monotonic() - lost_s:.1f} s")
    stays = alone()[0]
    code, left = said_of(both["b" if stays == "a" else "a"], 60.0)
    assert code == UNFIT and "is unreachable" in left, left
    until(lambda: steps_of(tmp_path, stays)[-1][1] > time.monotonic() - 1.0, "more steps")
    both[stays].terminate()
    code, said = said_of(both[stays], 60.0)
    assert code == DRAINED, said
    assert "and our workers wait" in said + left, said + left  # one sees it first
