"""The publisher's threads: one writes the stream, and one per tracker publishes it. `harness runs
sync` does the same once.

A failure of a tracker, its network or the bucket must never stop training: it is logged and the
operation is retried later.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.bucket.setup_objects import people_of
from harness.core.setup_record import EXPERIMENT
from harness.core.world import BadInput
from harness.look.alerts.alert_rules import BUILT_IN, AlertRule
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.metric_rows import Operations
from harness.look.trackers.mlflow_run import MlflowRun
from harness.look.trackers.run_metadata import config_of, left_by_node, notes_of, tags_of
from harness.look.trackers.tensorboard import TensorBoard
from harness.look.trackers.tracker_registry import Place, RunInfo
from harness.look.trackers.tracker_stream import StreamWriter
from harness.look.trackers.wandb_api import Account
from harness.look.trackers.wandb_run import WandbRun
from storage.stores.objects import ObjectStore

log = logging.getLogger("harness.look.trackers.trackers")

OLDEST_WANDB = (0, 31)
TELL_S = 5.0  # polling interval of a tracker's thread
MIN_BATCH_S = 30.0  # between two batches, so that a run of days does not make a million objects
MAX_PAUSE_S = 600.0  # longest backoff after failures
SETTLE_S = 10.0  # wait after a run's last step for last facts, since W&B's run should end once
HELD_S = 150.0  # how long `sync` waits for another publisher's claim; more than wandb_run.CLAIM_S
FEWEST_PAUSES = 20.0  # rows of operations may cost at most 1/20 of the time


class Renderer(Protocol):
    """A renderer publishes the new part of the stream to one tracker."""

    @property
    def name(self) -> str: ...

    def round(self, last: bool = False) -> bool:
        """Publish what is new; with `last`, also wait until it has arrived. Return whether the
        tracker has the run's end."""

    def close(self) -> None:
        """Close the tracker. Never raise."""


@dataclass
class StreamPublisher:
    """One run's stream and the renderers that publish it."""

    writer: StreamWriter
    renderers: Sequence[Renderer]
    stop: threading.Event = field(default_factory=threading.Event)
    linger: bool = False  # go on after the run's end until `stop`; the bill comes later

    def __post_init__(self) -> None:
        self._news = {r.name: threading.Event() for r in self.renderers}
        self._written = threading.Event()  # the stream is complete

    def threads(self) -> list[threading.Thread]:
        """Return the threads, not started."""
        makes = threading.Thread(target=self.write, name="stream")
        tells = [threading.Thread(target=self.tell, args=(r,), name=r.name) for r in self.renderers]
        return [makes, *tells]

    def write(self, poll_s: float = 2.0) -> None:
        """Write the stream until the run has ended and no facts follow, or `stop` is set; then
        write it a last time."""
        failures, ended, number, said_s = 0, False, -1, time.monotonic()
        settle_s = min(SETTLE_S, 5 * self.writer.min_batch_s)
        while not self.stop.is_set():
            failures, ended = self._try("stream", self._write, failures)
            header = self.writer.header
            if header and header.number != number:
                number, said_s = header.number, time.monotonic()
            if ended and not self.linger and time.monotonic() - said_s > settle_s:
                break
            self.stop.wait(_pause_s(failures, poll_s))
        self._try("stream", lambda: self.writer.round(last=True), failures)
        self._written.set()
        for news in self._news.values():
            news.set()

    def _write(self) -> bool:
        number = self.writer.header.number if self.writer.header else -1
        # computing a long run's ledger is slow
        cost_s = self.writer.operations.cost_s
        self.writer.ops_every_s = max(self.writer.ops_every_s, FEWEST_PAUSES * cost_s)
        ended = self.writer.round()
        if self.writer.header and self.writer.header.number > number:
            for news in self._news.values():
                news.set()
        return ended

    def tell(self, renderer: Renderer) -> None:
        """Publish to the tracker until the stream is complete, then a last time, and close it."""
        news, failures = self._news[renderer.name], 0
        while not self._written.is_set():
            failures, _ = self._try(renderer.name, renderer.round, failures)
            news.wait(_pause_s(failures, TELL_S))
            news.clear()
        self._try(renderer.name, lambda: renderer.round(last=True), failures)
        finish(renderer)

    def _try(self, name: str, act: Callable[[], bool], failures: int) -> tuple[int, bool]:
        try:
            return 0, act()
        # a tracker's client may raise anything, and the next round may succeed
        except Exception as e:
            log.warning("%s: %s; it is tried again", name, masked_error(e))
            for renderer in self.renderers:
                if renderer.name == name:
                    renderer.close()
            return failures + 1, False


def finish(renderer: Renderer) -> None:
    """Close the renderer and release its claim, so that another publisher can continue at once."""
    renderer.close()
    release = getattr(renderer, "release", None)
    if release is not None:
        release()


def _pause_s(failures: int, normal_s: float) -> float:
    return min(MAX_PAUSE_S, normal_s * 2.0 ** min(failures, 10))


def masked_error(error: BaseException | None) -> str:
    """Return the error as short text, with everything that looks like a key masked."""
    text = re.sub(
        r"(?i)\b[0-9a-f]{32,}\b|(key|token|secret|password)(\S*[=:]\s*)\S+",
        r"\1\2***",
        f"{type(error).__name__}: {error}",
    )
    return text if len(text) <= 300 else text[:300] + "..."


# ---- composing -----------------------------------------------------------------------------------
def publisher_of(
    store: ObjectStore,
    info: RunInfo,
    min_batch_s: float = MIN_BATCH_S,
    rules: Sequence[AlertRule] = BUILT_IN,
) -> StreamWriter:
    operations = Operations(store, Lineage(store, info), rules)
    return StreamWriter(store, info, operations, min_batch_s, min_batch_s)


def renderer_of(
    place: Account | Place,
    writer: StreamWriter,
    environ: Mapping[str, str],
) -> Renderer | None:
    """Return the renderer of a tracker. `None` means that nothing is published now and that the
    stream is kept for `harness runs sync`."""
    store, info = writer.store, writer.info
    about = about_of(writer, environ)
    if isinstance(place, Account):
        if not place.online:
            return None
        import wandb


        version = tuple(int(n) for n in re.findall(r"\d+", wandb.__version__)[:2])
        if version < OLDEST_WANDB:
            log.error(
                "wandb: wanted version %d.%d or newer, found %s; what it would be told is kept for "
                "`harness runs sync`",
                *OLDEST_WANDB,
                wandb.__version__,
            )
            return None

        return WandbRun(store, info, place, wandb, about, environ)
    if place.name == "tensorboard":

        return TensorBoard(store)
    if not place.where:
        return None

    experiment = environ.get("MLFLOW_EXPERIMENT_NAME") or "spotharness"
    return MlflowRun(store, info, place.where, experiment, about)


def about_of(writer: StreamWriter, environ: Mapping[str, str]) -> Callable[[], Mapping[str, Any]]:
    """Return a function that makes the description of the run for a tracker that is opened. Values
    of W&B's own variables (group, job type, name, notes, tags) have priority."""

    def about() -> dict[str, Any]:
        writer.operations.poll()
        facts = writer.operations.facts
        tags = [t for t in (environ.get("WANDB_TAGS") or "").split(",") if t]
        machine = left_by_node(writer.store)
        said: dict[str, Any] = {
            "config": config_of(writer.info, facts, machine),
            "tags": tags or tags_of(facts),
        }
        if (notes := notes_of(writer.store)) and not environ.get("WANDB_NOTES"):
            said["notes"] = notes
        experiment = people_of(writer.store).get(EXPERIMENT)
        if experiment and not environ.get("WANDB_RUN_GROUP"):
            said["group"] = experiment
        if not environ.get("WANDB_NAME"):
            said["name"] = writer.info.name
        if not environ.get("WANDB_JOB_TYPE"):
            said["job_type"] = "train"
        return said

    return about


def sync(
    store: ObjectStore,
    places: Sequence[Account | Place],
    environ: Mapping[str, str],
    patience_s: float,
) -> list[str]:
    """Publish everything that is committed to these trackers. Return the names of those that did
    not get all of it. Raise StoreError if the bucket fails, BadInput for an unusable tracker."""
    info = RunInfo.of(store)
    writer = publisher_of(store, info, min_batch_s=0.0)
    for place in places:
        if not (place.online if isinstance(place, Account) else _has_where(place)):
            raise BadInput(
                f"{place.name}: wanted a tracker to tell, found none; set WANDB_API_KEY (wandb) or "
                "MLFLOW_TRACKING_URI (mlflow), or name --out FOLDER"
            )
    writer.round(last=True)
    left: list[str] = []
    for place in places:
        renderer = renderer_of(place, writer, environ)
        if renderer is None:  # its package is too old, which was logged
            left.append(place.name)
            continue
        if not _told(renderer, patience_s):
            left.append(place.name)
        finish(renderer)
    return left


def _has_where(place: Place) -> bool:
    return bool(place.where) or place.name == "tensorboard"


def _told(renderer: Renderer, patience_s: float) -> bool:
    """Publish everything within `patience_s`. Return whether it arrived. With `last`, `round`
    closes W&B's client, so its return value is the only evidence."""
    began_s = time.monotonic()
    while True:
        try:
            if renderer.round(last=True) or renderer.name != "wandb":
                return True
            held = getattr(renderer, "held_elsewhere", False)
            why = "another publisher tells it" if held else "it has not arrived"
            if held:  # long enough for a dead publisher's claim to expire
                patience_s = min(patience_s, HELD_S)
        except (
            Exception
        ) as e:  # as in `StreamPublisher`: logged and retried until the patience is over
            why = masked_error(e)
            renderer.close()
        if time.monotonic() - began_s > patience_s:
            log.error("%s: not all is told (%s)", renderer.name, why)
            return False
        log.warning("%s: %s; it is tried again", renderer.name, why)
        time.sleep(min(5.0, patience_s / 10))
