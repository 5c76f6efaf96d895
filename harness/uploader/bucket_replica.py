"""Copying of committed snapshots to a second bucket, possibly on another cloud, in the background
and within a budget.

`python -m harness.uploader.bucket_replica RUN REPLICA` is started by the agent of the first member
of a generation (the code's `epoch`), like the trackers; a second copy of it is harmless, since
every object there is created only once. It always copies the newest snapshot, so a run that commits
faster than the network copies skips some. Traffic out of a cloud or a region is priced
(`ledger/bill.py`), and nothing is copied that could exceed the cap. A restore that finds damage in
the first bucket reads those bytes here; if the first bucket is lost, `--run REPLICA` resumes here.
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

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.bucket.layout import IDENTITY, PHASES, SAMPLES
from harness.bucket.phases import read_phases
from harness.core.facts import SnapshotReplicated, Warned
from harness.core.masking import keep_secrets
from harness.ledger.bill import cloud_of_bucket, transfer_usd
from storage.errors import StoreError
from storage.snapshots.manifest import PARTS, Ref, SnapshotCorrupt
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.transfer import copy
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store

LOOK_S = 2.0
FINISH_S = 30.0  # time after SIGTERM to copy the last committed snapshot
KEEP = 2  # snapshots in the second bucket
NICE = 10


class Replica:
    """The copier of one run. `here`, `there`: the places of both buckets, as for
    `prices.transfer_usd`; "": the clouds that the URLs name. `cap_usd`: None: no limit."""

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
        self.here, self.there = (
            here or cloud_of_bucket(source.url),
            there or cloud_of_bucket(target.url),
        )
        self.spent_usd = sum(
            s.fact.usd
            for s in read_facts(source, steps=False)
            if isinstance(s.fact, SnapshotReplicated)
        )
        self._told = False
        self._done: Ref | None = None  # the newest snapshot, if it needs no more work

    def look(self) -> Ref | None:
        """Copy the newest committed snapshot if the target lacks it. Return its ref, or None if
        nothing was copied. Raises StoreError, SnapshotCorrupt."""
        snapshots, there = Snapshots(self.source), Snapshots(self.target)
        if snapshots.refs()[:1] == [self._done]:  # costs one listing, not a request for each part
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
                why = f"nothing more is copied to {self.target.url}: {why}; raise replica_cap_usd"
                self.journal.record(Warned(manifest.step, manifest.epoch, why))
                self.journal.flush()
            self._told, self._done = True, manifest.ref
            return None
        t0 = time.monotonic()
        records = set(self.source.list(SAMPLES)) - set(self.target.list(SAMPLES))
        phases = self.source.list(PHASES)
        ended = read_phases(self.source)[-1].ended if phases else ()
        ends = [ref for ref in snapshots.refs() if ref.step in ended and ref not in there.refs()]
        extra = [IDENTITY, *phases, *sorted(records)]
        *_, copied = copy(self.source, self.target, [*ends, manifest.ref], extra=extra)
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
        there.prune(Keep(last=KEEP, ends=ended))
        self._done = manifest.ref
        return manifest.ref

    def run(self, stop: threading.Event, say: Callable[[str], None]) -> None:
        """Copy until `stop` is set, and then until the last snapshot is copied. Errors are reported
        with `say` and retried; after `stop` an error ends the loop."""
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
        prog="python -m harness.uploader.bucket_replica",
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
        watchdog = threading.Timer(FINISH_S, lambda: os._exit(1))  # even if a request hangs
        watchdog.daemon = True
        watchdog.start()

    signal.signal(signal.SIGTERM, told_to_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles it
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
