"""What runs beside the first member of an epoch: the real publishers, and a tracker for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.look.trackers.tracker_registry import RunInfo, StepRecords
from harness.look.trackers.tracker_stream import StreamWriter
from harness.look.trackers.trackers import Publisher
from storage.errors import StoreError
from storage.testing.faulty_store import Crash
from support.system.virtual_time import SimCall

if TYPE_CHECKING:
    from support.system.system_node import SimNode

ROUND_S, BATCH_S = 5.0, 20.0
NAME = "sim"


@dataclass
class LinesTracker:
    """A tracker that writes one line a step: its number and its digest."""

    name: str = NAME
    outside: bool = False

    def publish(self, records: StepRecords, info: RunInfo, folder: Path) -> None:
        lines = (f"{r.step} {r.digest}" for r in records)
        (folder / "steps.txt").write_text("\n".join(lines))


class _NoStop:
    """The publisher is never told to stop: it is asked for one round after the other."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False


class SimSidecars:
    """As `helpers.Helpers`: they outlive epochs, and end with their agent."""

    def __init__(self, node: SimNode):
        self._node = node
        self._publisher: Publisher | None = None
        self._writer: StreamWriter | None = None
        self._actor = f"publisher-{node.number}"
        self._ended = self._busy = False

    def start(self) -> None:
        if self._node.sim.setting.publishes and self._publisher is None:
            self._node.sim.kernel.after(ROUND_S, self._round, self._actor)

    def release(self) -> None: ...

    def look(self, now: float) -> list[tuple[str, int, str]]:
        return []

    def end(self, wait_s: float) -> None:
        if self._publisher is not None:
            last = SimCall[None](self._node.sim.kernel, lambda: self._publish(last=True))
            if last.wait(wait_s):  # else it is killed
                last.answer()
        self._ended = True

    def _round(self) -> None:
        if not self._ended and self._node.runs():
            self._publish(last=False)
            self._node.sim.kernel.after(ROUND_S, self._round, self._actor)

    def _publish(self, last: bool) -> None:
        if (
            self._busy
        ):  # the agent ends while a round waits for the bucket; both are one thread here
            return
        self._busy = True
        try:
            if self._publisher is None:
                self._publisher, self._writer = self._new()
            self._publisher.round(last)
            if self._writer is not None:
                self._writer.round(last)
        except (StoreError, Crash):
            pass  # the next round, or the next publisher
        finally:
            self._busy = False

    def _new(self) -> tuple[Publisher, StreamWriter]:
        sim, store = self._node.sim, self._node.access(self._actor)
        stop: Any = _NoStop()
        info = RunInfo.of(store)
        writer = sim.build.stream(store, info, BATCH_S)
        writer.now = self._node.host.wall
        publisher = sim.build.publisher(
            store,
            info,
            [LinesTracker()],
            BATCH_S,
            1,
            self._node.host.wall,
            self._node.host.monotonic,
            stop,
            f"{self._node.rng.randrange(1 << 32):08x}",
        )
        return publisher, writer
