"""The publisher's threads: one makes the stream, one for each tracker tells it; and the same once,
for `harness sync`.

Whatever a tracker, its network or the bucket does, training must not stop for it: the answer to any
failure is to say so and to try again later.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.bucket.setups import people_of
from harness.core.setups import EXPERIMENT
from harness.core.world import BadInput
from harness.views.alert_rules import BUILT_IN, AlertRule
from harness.views.committed import Lineage
from harness.views.describe import config_of, left_by_node, notes_of, tags_of
from harness.views.operations import Operations
from harness.views.plugins import Account, Place, RunInfo
from harness.views.stream import StreamWriter
from storage.objects import ObjectStore

log = logging.getLogger("harness.views.trackers")

OLDEST_WANDB = (0, 31)
TELL_S = 5.0  # between two looks of a tracker, if nothing wakes it
MIN_BATCH_S = 30.0  # between two batches, so that a run of days makes no million objects
MAX_PAUSE_S = 600.0  # after failures
SETTLE_S = 10.0  # after a run's last step nodes have last words, and W&B's run shall end once
HELD_S = 150.0  # `sync` waits for another publisher's claim: wandb_run.CLAIM_S and more
FEWEST_PAUSES = 20.0  # a row of operations may cost this part of the time at most: 1/20


class Renderer(Protocol):
    """Tells one tracker what is new in the stream."""

    @property
    def name(self) -> str: ...

    def round(self, last: bool = False) -> bool:
        """`last`: and see it arrive. Is the tracker told of the run's end?"""

    def close(self) -> None:
        """Never raises."""


@dataclass
class Telling:
    """One run's stream, and those who are told of it."""

    writer: StreamWriter
    renderers: Sequence[Renderer]
    stop: threading.Event = field(default_factory=threading.Event)
    linger: bool = False  # go on after the run's end until `stop` is set: its bill comes later

    def __post_init__(self) -> None:
        self._news = {r.name: threading.Event() for r in self.renderers}
        self._written = threading.Event()  # and nothing more will be

    def threads(self) -> list[threading.Thread]:
        """Not started."""
        makes = threading.Thread(target=self.write, name="stream")
        tells = [threading.Thread(target=self.tell, args=(r,), name=r.name) for r in self.renderers]
        return [makes, *tells]

    def write(self, poll_s: float = 2.0) -> None:
        """Until the run has ended and nothing more is said of it, or `stop` is set; then once
        more."""
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
        # a long run's ledger takes its time
        cost_s = self.writer.operations.cost_s
        self.writer.ops_every_s = max(self.writer.ops_every_s, FEWEST_PAUSES * cost_s)
        ended = self.writer.round()
        if self.writer.header and self.writer.header.number > number:
            for news in self._news.values():
                news.set()
        return ended

    def tell(self, renderer: Renderer) -> None:
        """Until the tracker is told of the run's end, or everything that there will be."""
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
        # a tracker's client raises what it likes, and the next round may succeed
        except Exception as e:
            log.warning("%s: %s; it is tried again", name, brief(e))
            for renderer in self.renderers:
                if renderer.name == name:
                    renderer.close()
            return failures + 1, False


def finish(renderer: Renderer) -> None:
    """Close it, and let another publisher go on at once."""
    renderer.close()
    release = getattr(renderer, "release", None)
    if release is not None:
        release()


def _pause_s(failures: int, normal_s: float) -> float:
    return min(MAX_PAUSE_S, normal_s * 2.0 ** min(failures, 10))


def brief(error: BaseException | None) -> str:
    """What went wrong, without anything that looks like a key."""
    text = re.sub(
        r"(?i)\b[0-9a-f]{32,}\b|(key|token|secret|password)(\S*[=:]\s*)\S+",
        r"\1\2***",
        f"{type(error).__name__}: {error}",
    )
    return text if len(text) <= 300 else text[:300] + "..."


# ---- composing -----------------------------------------------------------------------------------
def writer_of(
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
    """None: nobody is told now; the stream is kept for `harness sync`."""
    store, info = writer.store, writer.info
    about = about_of(writer, environ)
    if isinstance(place, Account):
        if not place.online:
            return None
        import wandb

        from harness.views.wandb_run import WandbRun

        version = tuple(int(n) for n in re.findall(r"\d+", wandb.__version__)[:2])
        if version < OLDEST_WANDB:
            log.error(
                "wandb: wanted version %d.%d or newer, found %s; what it would be told is kept for "
                "`harness sync`",
                *OLDEST_WANDB,
                wandb.__version__,
            )
            return None

        return WandbRun(store, info, place, wandb, about, environ)
    if place.name == "tensorboard":
        from harness.views.tensorboard import TensorBoard

        return TensorBoard(store)
    if not place.where:
        return None
    from harness.views.mlflow_run import MlflowRun

    experiment = environ.get("MLFLOW_EXPERIMENT_NAME") or "spotharness"
    return MlflowRun(store, info, place.where, experiment, about)


def about_of(writer: StreamWriter, environ: Mapping[str, str]) -> Callable[[], Mapping[str, Any]]:
    """What a tracker is told of the run when it is opened. What W&B's own variables say (group,
    job type, name, notes, tags) stands."""

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
    """Tell these trackers everything that is committed. Returns the names of those that are not
    told all. Raises StoreError, BadInput."""
    info = RunInfo.of(store)
    writer = writer_of(store, info, min_batch_s=0.0)
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
        if renderer is None:  # its package is too old, as was said
            left.append(place.name)
            continue
        if not _told(renderer, patience_s):
            left.append(place.name)
        finish(renderer)
    return left


def _has_where(place: Place) -> bool:
    return bool(place.where) or place.name == "tensorboard"


def _told(renderer: Renderer, patience_s: float) -> bool:
    """Tell it all, within bounds. `last` closes W&B's client, so success is its answer."""
    began_s = time.monotonic()
    while True:
        try:
            if renderer.round(last=True) or renderer.name != "wandb":
                return True
            held = getattr(renderer, "held_elsewhere", False)
            why = "another publisher tells it" if held else "it has not arrived"
            if held:  # long enough for a dead one's claim to become old
                patience_s = min(patience_s, HELD_S)
        except Exception as e:  # as in `Telling`: said, and tried again while there is patience
            why = brief(e)
            renderer.close()
        if time.monotonic() - began_s > patience_s:
            log.error("%s: not all is told (%s)", renderer.name, why)
            return False
        log.warning("%s: %s; it is tried again", renderer.name, why)
        time.sleep(min(5.0, patience_s / 10))
