"""What it costs to encrypt what nodes tell each other (the setting peer_encrypt): chunks of 4 MiB
left with a peer and read from it, over loopback, plain and sealed in turn. No assertions, no
network.

    python benchmarks/peers.py
    python benchmarks/peers.py --mb 4000

Both ends are in this process, so its processor seconds are those of two nodes: hashing at either
end, HTTP, copies, and the encryption. Medians of rounds whose order alternates; the first warms up
and is not counted. Look at the load before you believe it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

from storage.snapshots.manifest import Part, chunk_id
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import ChunkServer, PeerTier

Row = tuple[float, float, float, float]  # seconds and processor seconds of put, and of get


def one_round(folder: Path, chunks: dict[str, memoryview], sealed: bool) -> Row:
    held = FolderTier("memory", folder, 2 * sum(map(len, chunks.values())))
    with contextlib.closing(
        ChunkServer(lambda: [held], "127.0.0.1", "secret", keep=held, sealed=sealed)
    ) as server:
        peer = PeerTier([(server.addr, server.port)], "secret", 60.0, sealed)
        times = [(time.perf_counter(), time.process_time())]
        peer.put(dict(chunks))
        times.append((time.perf_counter(), time.process_time()))
        for id, data in chunks.items():
            if len(peer.get(id) or b"") != len(data):
                raise SystemExit("a chunk did not arrive")
        times.append((time.perf_counter(), time.process_time()))
    for id in held.list():
        held.drop(id)
    (a, a_cpu), (b, b_cpu), (c, c_cpu) = times
    return b - a, b_cpu - a_cpu, c - b, c_cpu - b_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="in all, in MB")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = memoryview(os.urandom(args.mb * 10**6))
    part = Part.of("snapshots/parts/x", data)
    size = part.chunk_nbytes
    chunks = {chunk_id(part, i): data[i * size : (i + 1) * size] for i in range(len(part.hashes))}
    rows: dict[bool, list[Row]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for i in range(args.rounds + 1):
            for sealed in (True, False) if i % 2 else (False, True):
                rows[sealed].append(one_round(Path(folder), chunks, sealed))
    print(f"{args.mb} MB, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for sealed, name in ((False, "plain"), (True, "sealed")):
        columns = zip(*rows[sealed][1:], strict=True)
        found = [statistics.median(column) / args.mb * 1e3 for column in columns]
        print(
            f"{name:<8} put {found[0]:6.3f} s/GB, {found[1]:6.3f} s of processor; "
            f"get {found[2]:6.3f} s/GB, {found[3]:6.3f} s of processor"
        )


if __name__ == "__main__":
    main()
