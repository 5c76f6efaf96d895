"""Publish a run to trackers: W&B, TensorBoard, MLflow, JSON lines, or anybody's function.

    python -m harness.views.trackers URL --trackers wandb,jsonl
                                   the publisher, beside rank 0; the agent starts and ends it
    python -m harness.views.trackers URL --collect FOLDER
                                   download what was published, for `wandb sync` and the like

A tracker is a rendering of what is in the bucket, so the publisher reads that (newest manifest ->
step records; facts) and never talks to a worker. W&B, TensorBoard and MLflow are told the stream
(`stream.py`). JSON lines and functions get committed steps in batches, strictly in order and each
exactly once, whatever is redone, killed or doubled:

    trackers/{name}/{first}-{last}-{token}/...   the files of a batch of steps, under names that no
                                                 other publisher uses
    trackers/{name}/{first}.json                 the marker, create-only, last; it names last step,
                                                 folder and files

A batch is published if and only if its marker exists, and the next one begins at the marker's last
step + 1. The marker's name is the batch's *first* step alone: of two publishers that cut batches
differently only one can own the steps from there on; what the other wrote is deleted, and nobody
reads it. Functions act outside of the bucket, which cannot be undone; there a claim keeps a second
publisher out, and after a crash between publishing and marking they get the same batch again.

Knows records and snapshots; knows nothing of torch, agents or clouds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.views.plugins import Tracker

import argparse
import contextlib
import faulthandler
import importlib.util
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tenacity import (
    RetryError,
    Retrying,
    before_sleep_log,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential_jitter,
)

from harness.bucket.layout import TRACKERS, Claim, Published, claim_key, published_key
from harness.core import records as rec
from harness.core.last_words import keep_secrets
from harness.core.values import BadObject, digest
from harness.core.world import BadInput
from harness.views.alert_own import all_rules
from harness.views.committed import MAX_BATCH_STEPS, committed
from harness.views.plugins import KNOWN, Account, Place, RunInfo, build
from harness.views.publishing import (
    Telling,
    about_of,
    brief,
    renderer_of,
    writer_of,
)
from harness.views.stream import newest_header
from harness.views.wandb_offline import write_offline
from storage.errors import NotFound, StoreUnavailable
from storage.objects import ObjectStore, checked_key
from storage.opening import open_store

log = logging.getLogger("harness.views.trackers")

POLL_S = 2.0  # how often the publisher looks for a new commit
MIN_BATCH_S = 30.0  # between two batches, so that a run of days makes no million objects
TRIES = 3  # at once, for one batch; then the next one comes after MAX_PAUSE_S at most
MAX_PAUSE_S = 600.0
# how long a publisher that acts outside of the bucket may be silent before another takes over
CLAIM_S = 300.0
FINISH_S = 40.0  # to publish what is left when told to stop
HEED_S = 1.0  # within which a signal is heeded


# ---- exactly once --------------------------------------------------------------------------------
def published(store: ObjectStore, name: str, first: int = 1) -> Iterator[Published]:
    """The markers of what a tracker has published from `first` on (where a batch begins), in
    order of steps and without gaps."""
    while True:
        key = published_key(name, first)
        try:
            marker = Published.decode(store.get(key), first)
        except NotFound:
            return
        except BadObject as e:
            raise BadInput(
                f"{key}: wanted a marker of what was published, found another object ({e}); it was "
                "changed"
            ) from e
        yield marker
        first = marker.last + 1


@dataclass
class _State:
    """One tracker and how far it is."""

    tracker: Tracker
    first: int = 1  # next step to publish
    head: str = ""  # hash of the last record that was published
    not_before: float = 0.0  # monotonic
    failures: int = 0
    complete: bool = False  # the run has finished and all of it is published


@dataclass
class Publisher:
    """Follows one run and publishes to its trackers. Any number of publishers may follow the
    same run."""

    store: ObjectStore
    info: RunInfo
    trackers: Sequence[Tracker]
    min_batch_s: float = MIN_BATCH_S
    tries: int = TRIES
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self._states = [_State(tracker) for tracker in self.trackers]

    def run(self, poll_s: float = POLL_S) -> bool:
        """Publish until the run has finished, or `stop` is set; then once more what is
        committed. Has all been published?"""
        while not self.stop.is_set():
            if self.round():
                return True
            self.stop.wait(poll_s)
        return self.round(last=True)

    def round(self, last: bool = False) -> bool:
        """Let each tracker publish what is due. `last`: everything is due. Is everything of a
        finished run published?"""
        for state in self._states:
            while (
                not state.complete
                and (last or self.monotonic() >= state.not_before)
                and self._batch(state, last)
            ):
                pass
        return all(state.complete for state in self._states)

    def _batch(self, state: _State, last: bool) -> bool:
        """Publish one batch. True: there may be more to do at once. Never raises: whatever a
        tracker, a plug-in or the bucket does, training must not stop for it, so the answer to any
        failure is to tell it and to try again later."""
        name = state.tracker.name
        try:
            return self._try_batch(state, last)
        except Exception as e:
            cause = e.last_attempt.exception() if isinstance(e, RetryError) else e
            state.failures += 1
            pause_s = min(MAX_PAUSE_S, self.min_batch_s * 2.0 ** min(state.failures, 16))
            state.not_before = self.monotonic() + pause_s
            log.warning(
                "%s: steps from %d on are not published (%s); next try in %.0f s",
                name,
                state.first,
                brief(cause),
                pause_s,
            )
            return False

    def _try_batch(self, state: _State, last: bool) -> bool:
        self._catch_up(state)
        records, final = committed(self.store, self.info, state.first)
        if not records:
            state.complete = final
            return False
        more = records[-1].step - state.first + 1 >= MAX_BATCH_STEPS
        if state.tracker.outside and not self._claim(state):
            state.not_before = self.monotonic() + self.min_batch_s
            return False
        retrying = Retrying(
            stop=stop_when_event_set(self.stop) | stop_after_attempt(self.tries),
            wait=wait_exponential_jitter(initial=1.0, max=10.0),
            sleep=sleep_using_event(self.stop),
            before_sleep=before_sleep_log(log, logging.DEBUG),
        )
        try:
            retrying(self._publish, state, records)
        finally:
            if state.tracker.outside:
                self.store.delete(claim_key(state.tracker.name, records[0].step))
        state.failures = 0
        state.complete = final and not more
        if not (final or more or last):
            state.not_before = self.monotonic() + self.min_batch_s
        return more

    def _catch_up(self, state: _State) -> None:
        """Go to the first step that nobody has published."""
        for marker in published(self.store, state.tracker.name, state.first):
            state.first, state.head = marker.last + 1, marker.head

    def _publish(self, state: _State, records: list[rec.StepRecord]) -> None:
        tracker, first, last = state.tracker, records[0].step, records[-1].step
        assert first == state.first, "the chain of records has no gaps"
        if state.head and records[0].prev != state.head:
            log.warning(
                "%s: steps before %d were redone after they were published; what was published "
                "stays",
                tracker.name,
                first,
            )
        into = f"{TRACKERS}{tracker.name}/{first:010d}-{last:010d}-{self.token}/"
        with tempfile.TemporaryDirectory(prefix="harness-tracker-") as temporary:
            folder = Path(temporary)
            tracker.publish(records, self.info, folder)
            files: dict[str, str] = {}
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                data, name = path.read_bytes(), path.relative_to(folder).as_posix()
                # ours alone; put, so that a second try may replace the first
                self.store.put(into + name, data)
                files[name] = digest(data)
        marker = Published(
            first=first,
            last=last,
            head=records[-1].h,
            run_id=self.info.id,
            folder=into if files else "",
            files=files,
            t=self.now(),
        )
        if not self.store.create(published_key(tracker.name, first), marker.encode()):
            # Another publisher owns these steps now (or we do, and did not hear of it).
            winner = next(published(self.store, tracker.name, first), marker)
            if winner.folder != marker.folder:
                for name in files:
                    self.store.delete(into + name)
            marker = winner
        state.first, state.head = marker.last + 1, marker.head
        log.info("%s: steps %d-%d published", tracker.name, first, marker.last)

    # ---- claims: only for what acts outside of the bucket ----------------------------------------
    def _claim(self, state: _State) -> bool:
        """May we publish these steps? A claim whose holder has been silent for CLAIM_S may be
        replaced."""
        key = claim_key(state.tracker.name, state.first)
        mine = Claim(self.token, self.now()).encode()
        if self.store.create(key, mine):
            return True
        try:
            held = Claim.decode(self.store.get(key))
        except NotFound:
            return False  # just released; the next round sees what was published
        except BadObject:
            held = Claim("", 0.0)  # nobody's
        if held.by == self.token:
            return True
        if self.now() - held.t < CLAIM_S:
            return False
        self.store.put(key, mine)
        # of two that replace it at once the later stays, and mostly sees so
        return self.store.get(key) == mine


def collect(store: ObjectStore, folder: Path) -> list[Path]:
    """Download what was published, in order of steps. Returns the files' paths.

    folder/wandb/offline-run-...   the whole run, for `wandb sync`; of runs of older versions one
                                   folder per batch
    folder/tensorboard/            all event files: `tensorboard --logdir FOLDER/tensorboard`
    folder/jsonl/metrics.jsonl     all steps
    """
    found: list[Path] = []
    folders = {key.split("/")[1] for key in store.list(TRACKERS) if key.count("/") > 1}
    for name in sorted(folders):
        for marker in published(store, name):
            for inside, wanted in marker.files.items():
                data = store.get(marker.folder + inside)
                if digest(data) != wanted:
                    raise BadInput(
                        f"{marker.folder}{inside}: wanted what was published, found other "
                        "bytes; it was changed"
                    )
                try:
                    place = checked_key(
                        f"{checked_key(name)}/{_place(name, checked_key(inside), marker)}"
                    )
                except ValueError as e:
                    raise BadInput(
                        f"tracker {name!r}: a marker or its key leads out of {folder}: {e}; it was "
                        "changed"
                    ) from e
                target = folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                if name == "jsonl" and marker.first > 1:
                    with open(target, "ab") as f:
                        f.write(data)
                else:
                    target.write_bytes(data)
                if target not in found:
                    found.append(target)
    for key in store.list(f"{TRACKERS}tensorboard/"):
        if key.endswith(".spotharness"):
            target = folder / checked_key(key.removeprefix(TRACKERS))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.get(key))
            found.append(target)
    return found


def collect_wandb(store: ObjectStore, folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """The stream as one offline run in `folder`, if there is one, and wandb is installed."""
    if newest_header(store) is None or importlib.util.find_spec("wandb") is None:
        return []
    import wandb

    info = RunInfo.of(store)
    writer = writer_of(store, info)
    return write_offline(store, info, wandb, about_of(writer, environ)(), folder)


def _place(name: str, inside: str, marker: Published) -> str:
    """Batches that started in the same second have run directories of the same name; the steps
    tell them apart."""
    if name != "wandb":
        return inside
    path = PurePosixPath(inside)
    return f"{path.parts[0]}-{marker.first:010d}/{'/'.join(path.parts[1:])}"


# ---- the process ---------------------------------------------------------------------------------
def wait_for_run(
    store: ObjectStore, stop: threading.Event, poll_s: float = POLL_S
) -> RunInfo | None:
    """The run's identity, as soon as its first worker has written it; None if told to stop
    before."""
    while not stop.is_set():
        with contextlib.suppress(NotFound, StoreUnavailable):
            return RunInfo.of(store)
        stop.wait(poll_s)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.views.trackers", description="Publish a run's committed steps."
    )
    parser.add_argument("url", help="URL of the run")
    parser.add_argument(
        "--trackers",
        default="wandb",
        help=f"{KNOWN}, comma-separated",
    )
    parser.add_argument(
        "--min-batch-s",
        type=float,
        default=MIN_BATCH_S,
        help="least seconds between two batches (default: %(default)s)",
    )
    left = "seconds to publish what is left after SIGTERM (default: %(default)s)"
    parser.add_argument("--finish-s", type=float, default=FINISH_S, help=left)
    parser.add_argument(
        "--collect", metavar="FOLDER", help="download what was published into FOLDER, and end"
    )
    return parser


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    flags = _parser().parse_args(argv)
    keep_secrets(environ)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s trackers: %(message)s", stream=sys.stderr
    )
    try:
        store = open_store(flags.url)
        if flags.collect:
            folder = Path(flags.collect)
            made = collect_wandb(store, folder / "wandb", environ)
            for path in [*collect(store, folder), *made]:
                print(path)
            return 0
        trackers = build(flags.trackers, environ)
        rules = all_rules(environ.get("HARNESS_ALERT_RULES", ""))
    except BadInput as e:
        print(f"harness: {e}", file=sys.stderr)
        return 2
    for name in [n for n, value in os.environ.items() if n.startswith("WANDB_") and not value]:
        del os.environ[name]  # a task's "not set"; to wandb it is a value, and a wrong one
    # a wandb process that we do not own would not end with our teardown()
    os.environ.pop("WANDB_SERVICE", None)
    stop = threading.Event()

    def told_to_stop(*_: Any) -> None:
        if not stop.is_set():
            stop.set()
            # Whatever hangs (a tracker's network, the bucket), we are gone after finish_s; what was
            # not marked is published later.
            watchdog = threading.Timer(flags.finish_s, lambda: os._exit(1))
            watchdog.daemon = True
            watchdog.start()
            # and should Python itself hang, which says where
            faulthandler.dump_traceback_later(flags.finish_s + 5.0, exit=True)

    signal.signal(signal.SIGTERM, told_to_stop)
    signal.signal(signal.SIGINT, told_to_stop)
    try:
        info = wait_for_run(store, stop)
    except BadInput as e:
        print(f"harness: {e}", file=sys.stderr)
        return 2
    if info is None:
        return 0
    # One thread each, so that a tracker that hangs (wandb waits for its network for hours) holds up
    # no other.
    places = [t for t in trackers if isinstance(t, (Account, Place))]
    publishers = [
        Publisher(store, info, [tracker], flags.min_batch_s, stop=stop)
        for tracker in trackers
        if not isinstance(tracker, (Account, Place))
    ]
    threads = [threading.Thread(target=p.run, name=p.trackers[0].name) for p in publishers]
    if places:
        # beside a controller: the bill comes after the run's end
        beside = bool(environ.get("HARNESS_BESIDE_CONTROLLER"))
        writer = writer_of(store, info, flags.min_batch_s, rules)
        found = (renderer_of(place, writer, environ) for place in places)
        threads += Telling(writer, [r for r in found if r], stop, beside).threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        # not without end: a signal that another thread was given waits for this one's next turn
        while thread.is_alive():
            thread.join(HEED_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
