"""Processes beside the first member of an epoch: trackers, replica, keeper, alerts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from harness.agent.config import AgentConfig

MODULES = {
    "trackers": "harness.views.trackers",
    "replica": "harness.uploader.replica",
    "keeper": "harness.uploader.keeper",
    "alerts": "harness.views.alerting",
}
WRONG_INPUT = 2  # a helper that ends so would end so again
AGAIN_S, MOST_AGAIN_S = 5.0, 600.0  # before one that died is started again; twice as long each time
TAIL_NBYTES = 4096


@dataclass
class _Helper:
    """One that shall run. `deaths`: how often it died; `again_s`: when it is started again
    (monotonic); None: it runs, or need not."""

    process: subprocess.Popen[bytes]
    deaths: int = 0
    again_s: float | None = None
    ended: bool = False  # that it did was told


class Helpers:
    """Those that this node runs. They outlive epochs; one that has ended is started again."""

    def __init__(self, config: AgentConfig):
        self._config = config
        self._helpers: dict[str, _Helper] = {}
        self._released: list[subprocess.Popen[bytes]] = []  # told to end

    def start(self) -> None:
        """Those that are wanted and do not run."""
        for name in self._commands():
            found = self._helpers.get(name)
            if found is None:
                self._helpers[name] = _Helper(self._spawn(name))
            elif found.process.poll() is not None and found.again_s is None:
                found.process, found.ended = self._spawn(name), False

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        c = self._config
        env = {**os.environ}
        if c.beside.alert_rules:
            env["HARNESS_ALERT_RULES"] = c.beside.alert_rules
        if name == "alerts":  # not among the words, which anybody on this machine can read
            env["HARNESS_ALERTS"] = c.beside.alerts
        with open(c.node_dir / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULES[name], *self._commands()[name]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look(self, now: float) -> list[tuple[str, int, str]]:
        """Those that died since the last look: name, exit status, and why as far as that is known.
        They are started again later. `now`: monotonic seconds."""
        found: list[tuple[str, int, str]] = []
        for name, helper in self._helpers.items():
            code = helper.process.poll()
            if code is None:
                continue
            if not helper.ended:
                helper.ended = True
                if code == 0:
                    continue
                helper.deaths += 1
                if code != WRONG_INPUT:
                    pause_s = min(MOST_AGAIN_S, AGAIN_S * 2.0 ** min(helper.deaths - 1, 10))
                    helper.again_s = now + pause_s
                found.append((name, code, self._why(name, code)))
            elif helper.again_s is not None and now >= helper.again_s:
                helper.process, helper.ended, helper.again_s = self._spawn(name), False, None
        return found

    def _why(self, name: str, code: int) -> str:
        """The signal, or the kind of exception that its log ends with: the rest of a log may hold
        secrets."""
        if code < 0:
            known = {s.value for s in signal.Signals}
            return signal.Signals(-code).name if -code in known else f"signal {-code}"
        try:
            with open(self._config.node_dir / f"{name}.log", "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - TAIL_NBYTES))
                tail = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        last = tail.rpartition("\n")[2]
        error = re.match(r"(?:\w+\.)*(\w*(?:Error|Exception|Unavailable))\b", last)
        return error[1] if error else "wrong input" if code == WRONG_INPUT else ""

    def _commands(self) -> dict[str, list[str]]:
        """The words after the module, of each that is wanted."""
        c, beside = self._config, self._config.beside
        commands = {"keeper": [c.run]}
        if beside.trackers:
            commands["trackers"] = [c.run, "--trackers", beside.trackers]
        if beside.alerts or beside.trackers:  # trackers tell what it fires
            commands["alerts"] = [c.run]
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
        """Another node's copy the snapshots, keep the bucket and tell alerts now."""
        self._released = [p for p in self._released if p.poll() is None]
        for name in ("replica", "keeper", "alerts"):
            if helper := self._helpers.pop(name, None):
                helper.process.terminate()
                self._released.append(helper.process)

    def end(self, wait_s: float) -> None:
        """All of them; who is not done within `wait_s` is killed."""
        until_s = time.monotonic() + wait_s
        processes = [*(h.process for h in self._helpers.values()), *self._released]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
