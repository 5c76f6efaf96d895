"""A second bucket, on another cloud if you like: committed snapshots are copied there, behind the
training, within a budget.

`python -m harness.uploader.replica RUN REPLICA` is started by the agent of an epoch's first member,
as the trackers are; a second copy of it does no harm, since everything there is create-only. The
newest snapshot is copied, then the next newest; a run that commits faster than the way is wide
skips some. What leaves a cloud or a region is priced (`prices.py`), and nothing is copied that
could exceed the cap. A restore that finds damage in the first bucket reads those bytes here; should
the first bucket be lost, `--run REPLICA` goes on here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from harness.bucket.journal import Journal, read_facts
from harness.bucket.layout import IDENTITY, SAMPLES
from harness.core.facts import SnapshotReplicated, Warned
from harness.core.last_words import keep_secrets
from harness.core.prices import cloud_of, transfer_usd
from storage.errors import StoreError
from storage.manifest import PARTS, Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.retention import Keep
from storage.snapshots import Snapshots
from storage.transfer import copy

LOOK_S = 2.0
FINISH_S = 30.0  # after SIGTERM: to copy what was committed last
KEEP = 2  # snapshots in the second bucket
NICE = 10


class Replica:
    """`here`, `there`: places as `prices.transfer_usd` takes them; by default the clouds that
    the URLs name."""

    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        journal: Journal,
        cap_usd: float | None = None,
        here: str = "",
        there: str = "",
    ):
        self.source, self.target, self.journal, self.cap_usd = source, target, journal, cap_usd
        self.here, self.there = here or cloud_of(source.url), there or cloud_of(target.url)
        self.spent_usd = sum(
            s.fact.usd
            for s in read_facts(source, steps=False)
            if isinstance(s.fact, SnapshotReplicated)
        )
        self._told = False
        self._done: Ref | None = None  # the newest that needs nothing more

    def look(self) -> Ref | None:
        """Copy the newest committed snapshot, if it is not there: its ref. Raises StoreError,
        SnapshotCorrupt."""
        snapshots, there = Snapshots(self.source), Snapshots(self.target)
        if snapshots.refs()[:1] == [self._done]:  # one listing, and not a request for each part
            return None
        manifest = snapshots.latest()
        if manifest is None:
            return None
        if manifest.ref in there.refs():
            self._done = manifest.ref
            return None
        present = set(self.target.list(PARTS))
        nbytes = sum(one.nbytes for key, one in manifest.stored.items() if key not in present)
        usd = transfer_usd(self.here, self.there, nbytes)
        if self.cap_usd is not None and self.spent_usd + usd > self.cap_usd:
            if not self._told:
                why = (
                    f"${self.spent_usd:.2f} of ${self.cap_usd:.2f} are spent, and "
                    f"{nbytes / 1e9:.2f} GB would cost ${usd:.2f}"
                )
                why = f"nothing more is copied to {self.target.url}: {why}; raise --replica-cap-usd"
                self.journal.record(Warned(manifest.step, manifest.epoch, why))
                self.journal.flush()
            self._told, self._done = True, manifest.ref
            return None
        t0 = time.monotonic()
        records = set(self.source.list(SAMPLES)) - set(self.target.list(SAMPLES))
        [copied] = copy(
            self.source, self.target, [manifest.ref], extra=[IDENTITY, *sorted(records)]
        )
        if copied.state == "pruned":
            return None
        usd = transfer_usd(self.here, self.there, copied.nbytes)
        self.spent_usd += usd
        self.journal.record(
            SnapshotReplicated(
                manifest.step,
                manifest.epoch,
                self.target.url,
                copied.nbytes,
                time.monotonic() - t0,
                usd,
            )
        )
        self.journal.flush()
        there.prune(Keep(last=KEEP))
        self._done = manifest.ref
        return manifest.ref

    def run(self, stop: threading.Event, say: Callable[[str], None]) -> None:
        """Until `stop`, and then until the last one is there. Errors are said and tried again."""
        while True:
            last = stop.wait(LOOK_S)
            try:
                ref = self.look()
                if ref is not None:
                    say(f"step {ref.step} is in {self.target.url}")
                elif last:
                    return
            except (StoreError, SnapshotCorrupt) as e:
                say(str(e))
                if last:
                    return


def main(argv: Sequence[str] | None = None) -> int:
    keep_secrets(os.environ)
    parser = argparse.ArgumentParser(
        prog="python -m harness.uploader.replica",
        description="Copy a run's snapshots to a second bucket.",
    )
    parser.add_argument("url", help="URL of the run")
    parser.add_argument("replica", help="URL of the second bucket")
    parser.add_argument(
        "--cap-usd", type=float, help="copy nothing that would make the whole cost more than this"
    )
    parser.add_argument(
        "--here",
        default="",
        help="the run's place, such as aws/us-east-1 (default: the cloud that its URL names)",
    )
    flags = parser.parse_args(argv)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    stop = threading.Event()

    def told_to_stop(*_: object) -> None:
        stop.set()
        watchdog = threading.Timer(FINISH_S, lambda: os._exit(1))  # whatever hangs
        watchdog.daemon = True
        watchdog.start()

    signal.signal(signal.SIGTERM, told_to_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the agent
    store = open_store(flags.url)
    journal = Journal(store, f"replica-{secrets.token_hex(4)}", time.time)
    try:
        replica = Replica(store, open_store(flags.replica), journal, flags.cap_usd, flags.here)
    except StoreError as e:
        print(f"replica: {e}", file=sys.stderr, flush=True)
        return 1
    replica.run(stop, lambda text: print(f"replica: {text}", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
