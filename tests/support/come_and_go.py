"""Nodes of a run that are lost, join and are drained while a script trains."""

import os
import signal

from harness.core.facts import EpochStarted


def come_and_go(nodes, script, flags, agent, worlds):
    """One rank for each node. `worlds`: with all nodes, one lost, one that came, one drained. The
    script goes slowly until all is seen."""
    flags = [*flags, "--go", nodes.go]

    def world():
        epochs = nodes.facts(EpochStarted)
        return epochs[-1].world if epochs else 0

    def at(wanted):
        nodes.until(lambda: world() == wanted and nodes.step() > before)

    before = 0
    for _ in range(worlds[0]):
        nodes.start(*flags, script=script, agent=agent)
    at(worlds[0])
    lost, drained = (
        nodes.processes[int(member.split("-")[0].removeprefix("m")) - 1]
        for member in nodes.facts(EpochStarted)[-1].members[:2]
    )
    os.killpg(lost.pid, signal.SIGKILL)
    nodes.until(lambda: world() == worlds[1])
    before = nodes.step()
    nodes.start(*flags, script=script, agent=agent)
    at(worlds[2])
    drained.send_signal(signal.SIGTERM)
    nodes.until(lambda: world() == worlds[3])
    nodes.go.touch()
    codes = nodes.codes()
    assert sorted(codes) == [-9, *[0] * (worlds[0] - 1), 33], nodes.logs()
    assert {e.world for e in nodes.facts(EpochStarted)} <= {*worlds}
