"""The agent's end of the node's uploader: it starts, drains and stops that process, and finds what
other uploaders of this node still hold.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.uploader.handoff import AGENT_ANSWER_S, NEAR_S, UploaderConnection
from harness.uploader.node_tiers import NEAR, NearbyConfig, tiers_for
from storage.errors import StoreError
from storage.private_folders import is_ours
from storage.snapshots.manifest import Manifest
from storage.snapshots.staging import PREFIX, Stage, default_parent, sweep
from storage.tiers.folder_tier import FolderTier
from storage.tiers.tiers import SegmentTier, share


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
    has a timeout, and is harmless if the uploader is dead."""

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
        self._process: subprocess.Popen[bytes] | None = None
        self._line: UploaderConnection | None = None
        self._deadline_s: float | None = None

    @property
    def folder(self) -> Path:
        """The folder in which snapshots are staged."""
        return self.stage.folder

    def ensure(self) -> None:
        """Start the uploader unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        # Delete what a dead uploader left; workers that map a segment keep its memory.
        for left in self.stage.folder.iterdir():
            if left.name not in ("lock", NEAR):
                left.unlink(missing_ok=True)
        self._line = None
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

    def busy(self) -> int:
        """Return the number of shares of snapshots not written yet; 0 if nobody answers."""
        answer = self._ask("busy")
        return int(answer["busy"]) if answer else 0

    def drain(self, deadline_s: float | None) -> None:
        """Announce that this node ends at `deadline_s` (wall clock); None: it stays after all."""
        self._deadline_s = deadline_s
        self._ask("drain", deadline_s=deadline_s)

    def settle(self, wait_s: float, near: bool = False) -> None:
        """Wait, for `wait_s` at most, until nothing is on its way to the bucket. `near`: instead
        until nothing is being copied to nearer tiers, for NEAR_S at most."""
        until_s = time.monotonic() + (min(wait_s, NEAR_S) if near else wait_s)
        while time.monotonic() < until_s:
            said = self._ask("busy")
            if not said or not said["near" if near else "busy"]:
                break
            time.sleep(0.05)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(AGENT_ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.stage.close()

    def _ask(self, what: str, **body: Any) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is not None:
            return None
        try:
            if self._line is None or self._line.lost:
                self._line = UploaderConnection(self.stage.folder, connect_s=0.0)
                if self._deadline_s is not None and what != "drain":
                    self._line.ask("drain", answer_s=AGENT_ANSWER_S, deadline_s=self._deadline_s)
            return self._line.ask(what, answer_s=AGENT_ANSWER_S, **body)
        except (OSError, StoreError):
            return None
