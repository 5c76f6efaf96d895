"""Processes beside the first member of an epoch: trackers, replica and keeper of the bucket."""

from __future__ import annotations

import subprocess
import sys
import time

from harness.agent.config import AgentConfig

MODULES = {
    "trackers": "harness.views.trackers",
    "replica": "harness.uploader.replica",
    "keeper": "harness.uploader.keeper",
}


class Helpers:
    """Those that this node runs. They outlive epochs; one that has ended is started again."""

    def __init__(self, config: AgentConfig):
        self._config = config
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Those that are wanted and do not run."""
        for name, words in self._commands().items():
            if name in self._processes and self._processes[name].poll() is None:
                continue
            with open(self._config.node_dir / f"{name}.log", "ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", MODULES[name], *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def _commands(self) -> dict[str, list[str]]:
        """The words after the module, of each that is wanted."""
        c, beside = self._config, self._config.beside
        commands = {"keeper": [c.run]}
        if beside.trackers:
            commands["trackers"] = [c.run, "--trackers", beside.trackers]
        if beside.replica:
            cap = beside.replica_cap_usd
            commands["replica"] = [
                c.run,
                beside.replica,
                *([] if cap is None else ["--cap-usd", str(cap)]),
                *(["--here", c.place] if c.place else []),
            ]
        return commands

    def release(self) -> None:
        """Another node's copy the snapshots and keep the bucket now."""
        for name in ("replica", "keeper"):
            if name in self._processes:
                self._processes[name].terminate()

    def end(self, wait_s: float) -> None:
        """All of them; who is not done within `wait_s` is killed."""
        until_s = time.monotonic() + wait_s
        for helper in self._processes.values():
            helper.terminate()
        for helper in self._processes.values():
            try:
                helper.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()
