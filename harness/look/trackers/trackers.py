"""The publisher of a run to trackers: W&B, TensorBoard, MLflow, JSON lines, or a user's function.

    python -m harness.look.trackers.trackers URL --trackers wandb,jsonl
                                   the publisher, beside rank 0; the node agent starts and ends it
    python -m harness.look.trackers.trackers URL --collect FOLDER
                                   download the published files, for `wandb sync` and the like

A tracker is a rendering of the bucket, so the publisher reads that (newest manifest -> step
records; facts) and never communicates with a worker. W&B, TensorBoard and MLflow get the stream
(`tracker_stream.py`). JSON lines and functions get committed steps in batches, strictly in order
and each exactly once, even if steps are redone or publishers are killed or run twice:

    trackers/{name}/{first}-{last}-{token}/...   the files of a batch of steps, under names that no
                                                 other publisher uses
    trackers/{name}/{first}.json                 the marker, create-only, written last; it names the
                                                 last step, folder and files

A batch is published if and only if its marker exists, and the next one begins at the marker's last
step + 1. The marker's name has only the batch's *first* step, so of two publishers that cut batches
differently only one can own the steps from there on; the files of the other are never read, and are
deleted. Functions act outside of the bucket, which cannot be undone, so a claim keeps a second
publisher out; after a crash between publishing and marking they get the same batch again.

This module knows records and snapshots, but nothing of torch, agents or clouds.
"""

from __future__ import annotations

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from harness.core import step_records as rec
from harness.core.masking import keep_secrets
from harness.core.world import BadInput
from harness.look.alerts.custom_rules import all_rules
from harness.look.trackers.committed_steps import MAX_BATCH_STEPS, committed
from harness.look.trackers.publisher import (
    StreamPublisher,
    about_of,
    masked_error,
    publisher_of,
    renderer_of,
)
from harness.look.trackers.tracker_registry import KNOWN, Place, RunInfo, build
from harness.look.trackers.tracker_stream import newest_header
from harness.look.trackers.wandb_api import Account
from harness.look.trackers.wandb_run import write_offline
from storage.canonical_json import BadObject, digest
from storage.errors import NotFound, StoreUnavailable
from storage.stores.objects import ObjectStore, checked_key
from storage.stores.store_urls import open_store

if TYPE_CHECKING:
    from harness.look.trackers.tracker_registry import Tracker

log = logging.getLogger("harness.look.trackers.trackers")

POLL_S = 2.0  # interval of polling for a new commit
MIN_BATCH_S = 30.0  # between two batches, so that a run of days does not make a million objects
TRIES = 3  # immediate tries of one batch; the backoff after them is at most MAX_PAUSE_S
MAX_PAUSE_S = 600.0
# how long a publisher that acts outside of the bucket may be silent before another takes over
CLAIM_S = 300.0
FINISH_S = 40.0  # time to publish the rest after a request to stop
HEED_S = 1.0  # longest delay until a signal is handled


# ---- exactly once --------------------------------------------------------------------------------
def published(store: ObjectStore, name: str, first: int = 1) -> Iterator[Published]:
    """Yield the markers of a tracker's published batches from step `first` on (the begin of a
    batch), in order of steps and without gaps. Raise BadInput for a damaged marker."""
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
    """One tracker and its progress."""

    tracker: Tracker
    first: int = 1  # next step to publish
    head: str = ""  # hash of the last record that was published
    not_before: float = 0.0  # monotonic
    failures: int = 0
    complete: bool = False  # the run has finished and all of it is published


@dataclass
class Publisher:
    """The publisher of one run to its trackers. Any number of publishers may follow the same
    run."""

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
        """Publish until the run has finished, or `stop` is set; then publish what is committed a
        last time. Return whether everything is published."""
        while not self.stop.is_set():
            if self.round():
                return True
            self.stop.wait(poll_s)
        return self.round(last=True)

    def round(self, last: bool = False) -> bool:
        """Let each tracker publish what is due; with `last`, everything. Return whether the run
        has finished and everything is published."""
        for state in self._states:
            while (
                not state.complete
                and (last or self.monotonic() >= state.not_before)
                and self._batch(state, last)
            ):
                pass
        return all(state.complete for state in self._states)

    def _batch(self, state: _State, last: bool) -> bool:
        """Publish one batch. Return whether there may be more to publish at once. Never raise: a
        failure of a tracker, a plug-in or the bucket must not stop training, so it is logged and
        retried later."""
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
                masked_error(cause),
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
        """Advance to the first step that no publisher has published."""
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
                # no other publisher uses this name; `put` lets a retry replace the object
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
            # Another publisher owns these steps (or we do, and the first answer was lost).
            winner = next(published(self.store, tracker.name, first), marker)
            if winner.folder != marker.folder:
                for name in files:
                    self.store.delete(into + name)
            marker = winner
        state.first, state.head = marker.last + 1, marker.head
        log.info("%s: steps %d-%d published", tracker.name, first, marker.last)

    # ---- claims: only for what acts outside of the bucket ----------------------------------------
    def _claim(self, state: _State) -> bool:
        """Return whether this publisher may publish these steps. A claim whose holder has been
        silent for CLAIM_S may be replaced."""
        key = claim_key(state.tracker.name, state.first)
        mine = Claim(self.token, self.now()).encode()
        if self.store.create(key, mine):
            return True
        try:
            held = Claim.decode(self.store.get(key))
        except NotFound:
            return False  # just released; the next round sees the published batch
        except BadObject:
            held = Claim("", 0.0)  # a damaged claim has no holder
        if held.by == self.token:
            return True
        if self.now() - held.t < CLAIM_S:
            return False
        self.store.put(key, mine)
        # if two replace it at the same time, the later wins, and usually both see this here
        return self.store.get(key) == mine


def collect(store: ObjectStore, folder: Path, names: Collection[str] | None = None) -> list[Path]:
    """Download the published files in order of steps. Return their paths. `names`: of these
    trackers only; None: of all.

    folder/wandb/offline-run-...   the whole run, for `wandb sync`
    folder/tensorboard/            all event files: `tensorboard --logdir FOLDER/tensorboard`
    folder/jsonl/metrics.jsonl     all steps
    """
    found: list[Path] = []
    folders = {key.split("/")[1] for key in store.list(TRACKERS) if key.count("/") > 1}
    if names is not None:
        folders &= set(names)
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
                    place = checked_key(f"{checked_key(name)}/{checked_key(inside)}")
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
    shown = names is None or "tensorboard" in names
    for key in store.list(f"{TRACKERS}tensorboard/") if shown else ():
        if key.endswith(".spotharness"):
            target = folder / checked_key(key.removeprefix(TRACKERS))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.get(key))
            found.append(target)
    return found


def collect_wandb(store: ObjectStore, folder: Path, environ: Mapping[str, str]) -> list[Path]:
    """Write the stream as one offline run into `folder`. Return its files, or an empty list if
    there is no stream or wandb is not installed."""
    if newest_header(store) is None or importlib.util.find_spec("wandb") is None:
        return []
    import wandb

    info = RunInfo.of(store)
    writer = publisher_of(store, info)
    return write_offline(store, info, wandb, about_of(writer, environ)(), folder)


# ---- the process ---------------------------------------------------------------------------------
def wait_for_run(
    store: ObjectStore, stop: threading.Event, poll_s: float = POLL_S
) -> RunInfo | None:
    """Wait until the run's first worker has written its identity, and return it. Return `None` if
    `stop` is set before."""
    while not stop.is_set():
        with contextlib.suppress(NotFound, StoreUnavailable):
            return RunInfo.of(store)
        stop.wait(poll_s)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.look.trackers.trackers",
        description="Publish a run's committed steps.",
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
        del os.environ[name]  # "" means "not set" in a task, but wandb takes it as a wrong value
    # a wandb process that we did not start would not end with our teardown()
    os.environ.pop("WANDB_SERVICE", None)
    stop = threading.Event()

    def told_to_stop(*_: Any) -> None:
        if not stop.is_set():
            stop.set()
            # The watchdog ends this process after finish_s even if a tracker's network or the
            # bucket hangs; unmarked batches are published later.
            watchdog = threading.Timer(flags.finish_s, lambda: os._exit(1))
            watchdog.daemon = True
            watchdog.start()
            # if Python itself hangs, this one ends the process and dumps the stacks
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
    # One thread per tracker, so that one that hangs (wandb waits for its network for hours) does
    # not block the others.
    places = [t for t in trackers if isinstance(t, (Account, Place))]
    publishers = [
        Publisher(store, info, [tracker], flags.min_batch_s, stop=stop)
        for tracker in trackers
        if not isinstance(tracker, (Account, Place))
    ]
    threads = [threading.Thread(target=p.run, name=p.trackers[0].name) for p in publishers]
    if places:
        # beside a controller, wait for the bill, which comes after the run's end
        beside = bool(environ.get("HARNESS_BESIDE_CONTROLLER"))
        writer = publisher_of(store, info, flags.min_batch_s, rules)
        found = (renderer_of(place, writer, environ) for place in places)
        threads += StreamPublisher(writer, [r for r in found if r], stop, beside).threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        # with a timeout: Python runs signal handlers only when the main thread gets its turn
        while thread.is_alive():
            thread.join(HEED_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
