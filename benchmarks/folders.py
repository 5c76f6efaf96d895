"""What it costs that writes to a folder survive a loss of power (`file://`; STORAGE_FSYNC=0 does
without): the same calls with and without, in turn. No assertions.

    python benchmarks/folders.py
    python benchmarks/folders.py --folder /mnt/scratch --mb 4000

small: put and create of 1 kB, as facts, orders and manifests are; large: put of a state's bytes.
Medians of rounds whose order alternates; the first warms up and is not counted. It is the disk's
time, not the processor's: look at who else writes there before you believe it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

from storage.stores.folder_store import FileStore

SMALL = 30  # calls of each kind in a round


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def one_round(store: FileStore, data: memoryview, round_: int) -> dict[str, float]:
    """Seconds of one call, by kind."""
    found = {
        "put of 1 kB": [timed(lambda: store.put("small/k", data[:1000])) for _ in range(SMALL)],
        "create of 1 kB": [
            timed(lambda i=i: store.create(f"created/{round_}-{i}", data[:1000]))  # type: ignore[misc]
            for i in range(SMALL)
        ],
        f"put of {len(data) / 1e6:.0f} MB": [timed(lambda: store.put("large/k", data))],
    }
    return {what: statistics.median(times) for what, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: /tmp")
    parser.add_argument("--mb", type=int, default=1000, help="of the large object, in MB")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = memoryview(os.urandom(args.mb * 10**6))
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for round_ in range(args.rounds + 1):
            for durable in (True, False) if round_ % 2 else (False, True):
                store = FileStore(f"file://{folder}/{durable}", durable)
                rows[durable].append(one_round(store, data, round_))
                store.delete("large/k")
    print(f"{args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for what in rows[True][0]:
        one, other = (
            statistics.median(times[what] for times in rows[durable][1:])
            for durable in (True, False)
        )
        print(f"{what:<16} durable {one * 1e3:10.2f} ms, not durable {other * 1e3:10.2f} ms")


if __name__ == "__main__":
    main()
