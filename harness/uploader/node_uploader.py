"""The agent's end of the node's uploader: it starts, drains and stops that process, and finds what
other uploaders of this node still hold.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.node.heartbeat import process_state
from harness.uploader.handoff import (
    AGENT_ANSWER_S,
    NEAR_S,
    UploaderAnswer,
    UploaderConnection,
)
from harness.uploader.liveness import UploaderWatch
from harness.uploader.node_tiers import NEAR, NearbyConfig, tiers_for
from storage.errors import StoreError
from storage.private_folders import is_ours
from storage.snapshots.manifest import Manifest
from storage.snapshots.staging import PREFIX, Stage, default_parent, sweep
from storage.tiers.folder_tier import FolderTier
from storage.tiers.tiers import SegmentTier, share

# The longest that the agent's loop waits for an answer, and once only: it gets it later otherwise.
GLANCE_S = 1.0
# pause before a restart: none after the first end, then so much, and twice as much each time
AGAIN_S, MOST_AGAIN_S = 5.0, 600.0


def seen_here(parent: Path | None = None) -> Callable[[Manifest], dict[str, float]]:
    """Return a function of a manifest that returns what the uploaders of this node and user have of
    the snapshot: tier -> fraction of its bytes, nearest first; {}: nobody answers."""
    lines = []
    for folder in filter(is_ours, (parent or default_parent()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # a dead agent may have left the folder
            lines.append(UploaderConnection(folder, connect_s=0.0))

    def near(manifest: Manifest) -> dict[str, float]:
        chunks: dict[str, set[str]] = {}
        for line in lines:
            with contextlib.suppress(OSError, StoreError):
                held = line.ask("held", answer_s=AGENT_ANSWER_S, ref=manifest.ref.name)["near"]
                for tier in tiers_for(manifest, held):
                    if isinstance(tier, SegmentTier | FolderTier):
                        chunks.setdefault(tier.name, set()).update(tier.list())
        return {name: found for name, ids in chunks.items() if (found := share(manifest, ids))}

    return near


# ---- the agent's side ----------------------------------------------------------------------------
class NodeUploader:
    """The agent's handle of its node's uploader process, and the stage that both own. Every call
    has a timeout, and is harmless if the uploader is dead or hangs."""

    def __init__(
        self,
        run: str,
        member: str,
        parent: Path | None,
        budget_nbytes: int | None,
        log: Path,
        nearby: NearbyConfig,
    ):
        self.run, self.member, self._log, self._nearby = run, member, log, nearby
        sweep(parent)
        self.stage = Stage(parent, budget_nbytes)
        self._watch = UploaderWatch(self.stage.folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[subprocess.Popen[bytes]] = []  # also killed, and perhaps still there
        self._deaths, self._again_s = 0, 0.0  # when the next may start (monotonic)
        self._line: UploaderConnection | None = None
        self._question: UploaderAnswer | None = None  # of `busy`, without an answer so far
        self._deadline_s: float | None = None

    @property
    def folder(self) -> Path:
        """The folder in which snapshots are staged."""
        return self.stage.folder

    def ensure(self) -> None:
        """Start the uploader unless it runs, or has just ended (see `look`)."""
        if self._process is not None or time.monotonic() < self._again_s:
            return
        # Delete what a dead uploader left; workers that map a segment keep its memory.
        for left in self.stage.folder.iterdir():
            if left.name not in ("lock", NEAR):
                left.unlink(missing_ok=True)
        self._watch = UploaderWatch(self.stage.folder)
        order = {
            "run": self.run,
            "folder": str(self.stage.folder),
            "budget_nbytes": self.stage.budget_nbytes,
            "member": self.member,
        }
        order["nearby"] = replace(
            self._nearby, memory_nbytes=self.stage.budget_nbytes // 2
        ).to_dict()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.uploader.handoff", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look(self, now: float) -> list[tuple[str, int, str]]:
        """Kill an uploader that is silent. Return its name, exit status and the reason if it has
        ended or was killed: workers then send for themselves what they had handed over. `now`:
        monotonic seconds."""
        process = self._process
        self._ended = [one for one in self._ended if one.poll() is None]
        if process is None:
            return []
        if (code := process.poll()) is None:
            if not (why := self._watch.hung(now, self._deadline_s is not None)):
                return []
            if state := process_state(process.pid):
                why += f" (process state {state})"
            process.kill()
            code = -signal.SIGKILL
        else:
            why = f"see {self._log.name}"
        self._put_away(process)
        return [("uploader", int(code), why)]

    def _put_away(self, process: subprocess.Popen[bytes]) -> None:
        """Forget a process that is killed; nobody waits for its end, since one that hangs in the
        kernel has none. Without its socket, all its clients know that it is gone."""
        (self.stage.folder / "socket").unlink(missing_ok=True)
        if self._line is not None:
            self._line.close()
        self._process, self._line, self._question = None, None, None
        self._ended.append(process)
        self._deaths += 1
        pause_s = AGAIN_S * (2.0 ** min(self._deaths - 1, 10) - 1.0)
        self._again_s = time.monotonic() + min(MOST_AGAIN_S, pause_s)

    def busy(self) -> int:
        """Return the number of shares of snapshots not written yet; 0 if no uploader is there, and
        1 as long as one that is there has not answered."""
        wait_s = 0.0
        if self._question is None:
            self._question, wait_s = self._begin("busy"), GLANCE_S
        if self._question is None:
            return 0
        try:
            answer = self._question.get(timeout=wait_s)
        except queue.Empty:
            return 1
        self._question = None
        return int(answer["busy"]) if answer else 0

    def drain(self, deadline_s: float | None) -> None:
        """Announce that this node ends at `deadline_s` (wall clock); None: it stays after all. No
        answer is waited for."""
        self._deadline_s = deadline_s
        self._begin("drain", deadline_s=deadline_s)

    def settle(self, wait_s: float, near: bool = False) -> None:
        """Wait, for `wait_s` at most, until nothing is on its way to the bucket. `near`: instead
        until nothing is being copied to nearer tiers, for NEAR_S at most."""
        until_s = time.monotonic() + (min(wait_s, NEAR_S) if near else wait_s)
        while time.monotonic() < until_s:
            said = self._ask("busy")
            if not said or not said["near" if near else "busy"]:
                break
            time.sleep(0.05)

    def close(self, wait_s: float) -> None:
        """End the uploader; kill it if it has not ended within `wait_s`."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                    self._process.wait(wait_s)
        self.stage.close()

    def _ask(self, what: str, **body: Any) -> dict[str, Any] | None:
        """Return the answer to a request; None: there is none within AGENT_ANSWER_S."""
        answers = self._begin(what, **body)
        with contextlib.suppress(queue.Empty):
            return None if answers is None else answers.get(timeout=AGENT_ANSWER_S)
        return None

    def _begin(self, what: str, **body: Any) -> UploaderAnswer | None:
        """Send a request, and return where its answer will be; None: no uploader is there."""
        if self._process is None or self._process.poll() is not None:
            return None
        try:
            if self._line is None or self._line.lost:
                self._line = UploaderConnection(self.stage.folder, connect_s=0.0)
                if self._deadline_s is not None and what != "drain":
                    self._line.begin("drain", deadline_s=self._deadline_s)
            return self._line.begin(what, **body)
        except OSError:
            return None
