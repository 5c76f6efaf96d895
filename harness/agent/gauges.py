"""One agent's numbers for Prometheus: read from another thread, and only read."""

from __future__ import annotations

from harness.agent.agent import Agent
from harness.agent.machine import Life
from harness.core.exposition import COUNTER, Exposed, exposition


def agent_gauges(agent: Agent) -> str:
    """What a scrape gets."""
    node, epoch, workers = agent._node, agent._stay.epoch, agent._workers
    trains = node.life is Life.IN
    steps = [sign.step for sign in workers.signs()] if trains else []
    of = Exposed.of
    metrics = [
        Exposed.one_of(
            "harness_agent_state", "Where this node is in its life.", "state",
            [life.value for life in Life], node.life.value,
        ),
        of("harness_agent_epoch", "The newest world that it was in.", epoch.epoch),
        of("harness_agent_world_ranks", "Ranks of that world.", epoch.world if trains else 0),
        of("harness_agent_workers", "Its workers.", len(workers.all) if trains else 0),
        of("harness_agent_step", "The step that its workers are at.", max(steps, default=None)),
        of("harness_agent_notices", "Notices that are in force.", len(node.notices)),
        of("harness_agent_leaving", "It is to leave, or leaves.", float(bool(node.leaving))),
        of("harness_agent_hangs_total", "Hangs of its own workers.", node.hangs, COUNTER),
    ]  # fmt: skip
    return exposition(metrics, (("member", agent.name), ("attempt", str(agent.config.attempt))))
