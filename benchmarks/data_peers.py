"""Nodes that read a corpus through each other's caches, and the same nodes that each ask the bucket
for all they need, in turns. No assertions.

    python benchmarks/data_peers.py                  # needs SeaweedFS
    python benchmarks/data_peers.py --nodes 4 --order blocks --passes 2

Each node is a process with a cache and a chunk server of its own; all go in step, as a training
makes them. The store is as slow as a real one (`data_reading.py`); peers are as near as nodes of
one place. bucket: bytes that the store sent to all nodes, over those of the corpus. peers: those
that nodes gave each other (what they left with each other besides is as much as came from the
bucket, but for each chunk's home). Medians; the first round is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from data_reading import BUCKET, SHARD_NBYTES, batching_of, throttled, write_corpus

from harness.core.batch import plan
from harness.core.read_traffic import PEER
from storage.stores.store_urls import open_store

SECRET = "benchmark"
WAIT_S = 120.0  # for the other nodes


def node(me: int, a: argparse.Namespace, url: str, folder: Path, meet: Any, said: Any) -> None:
    """One of them: `meet`: all nodes, at each step."""
    import harness
    from harness.uploader.node_tiers import Homes
    from harness.worker.batches.loader import map_style
    from storage.tiers.folder_tier import FolderTier
    from storage.tiers.peer_transport import DATA, ChunkServer, PeerTier

    cache, bound = folder / f"node{me}", int(a.gb * 1e9 * a.cache)
    data = harness.data.Tokens(url, a.length, cache=str(cache), disk_nbytes=bound)
    held = FolderTier("data", cache, bound)
    server = ChunkServer(tuple, "127.0.0.1", SECRET, data=lambda: [held])
    (folder / f"port{me}").write_text(str(server.port))
    meet.wait(WAIT_S)
    names = [str(i) for i in range(a.nodes)]
    ports = {name: int((folder / f"port{name}").read_text()) for name in names}
    if a.together:
        at = argparse.Namespace(of=lambda name: ("127.0.0.1", ports[name]))
        homes = Homes(names, str(me), at)
        tier = PeerTier([], SECRET, holders=homes, keeper=homes.keeper, kind=DATA)
        data.ask_peers(tier, a.nodes, a.order != "shuffled")
    batching = batching_of(a, data)
    shares, total = plan(a.lanes, a.nodes), int(a.passes * len(data) / batching.global_batch)
    began_s, first_s, waits, each = time.perf_counter(), 0.0, [], len(shares.micros(me))
    batches = map_style(data, batching, shares, me, 1, total, None, 0, False)
    for _ in range(total):
        waited_s = time.perf_counter()
        for _ in range(each):
            next(batches)
        first_s = first_s or time.perf_counter() - began_s
        waits.append(time.perf_counter() - waited_s)
        meet.wait(WAIT_S)
        time.sleep(a.step_ms / 1e3)
    spent_s = time.perf_counter() - began_s
    batches.close()
    found = data.traffic[0].nbytes
    said.put(
        (first_s, total * batching.global_batch / spent_s, found[PEER], sum(w > 0.1 for w in waits))
    )
    meet.wait(WAIT_S)
    server.close()


def one_round(a: argparse.Namespace, url: str, sent: Any) -> dict[str, float]:
    before, spawn = sent.value, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        meet, said = spawn.Barrier(a.nodes), spawn.Queue()
        each = [
            spawn.Process(target=node, args=(i, a, url, Path(folder), meet, said))
            for i in range(a.nodes)
        ]
        for process in each:
            process.start()
        told = [said.get(timeout=1800.0) for _ in each]
        for process in each:
            process.join()
    first, rates, peers, stalls = zip(*told, strict=True)
    whole = int(a.gb * 1e9) // SHARD_NBYTES * SHARD_NBYTES  # as it was made
    return {
        "first_s": max(first),
        "samples_per_s": min(rates),
        "bucket": (sent.value - before) / whole,
        "peers": sum(peers) / whole,
        "stalls": max(stalls),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--gb", type=float, default=0.5, help="of corpus, in shards of 64 MiB")
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--order", choices=("plain", "shuffled", "blocks"), default="shuffled")
    p.add_argument("--passes", type=float, default=1.0, help="over the corpus")
    p.add_argument("--cache", type=float, default=1.0, help="of a node, share of the corpus")
    p.add_argument("--lanes", type=int, default=4, help="micro-batches of a step")
    p.add_argument("--batch", type=int, default=32, help="samples of a micro-batch")
    p.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    p.add_argument("--step-ms", type=float, default=20.0)
    p.add_argument("--latency-ms", type=float, default=20.0)
    p.add_argument("--mb-per-s", type=float, default=50.0, help="of a connection")
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    a.gb = max(a.gb, SHARD_NBYTES / 1e9)
    tree = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tree), str(tree / "tests")]
    import boto3

    from support import buckets

    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weed-")))
        options = stack.enter_context(buckets.weed(root))
        os.environ |= {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": options["endpoint_url"],
        }
        boto3.client("s3", "us-east-1", endpoint_url=options["endpoint_url"]).create_bucket(
            Bucket=BUCKET
        )
        url = f"s3://{BUCKET}/corpus"
        write_corpus(open_store(url), int(a.gb * 1e9))
        way = throttled(options["endpoint_url"], a.latency_ms / 1e3, a.mb_per_s * 1e6)
        os.environ["AWS_ENDPOINT_URL"], sent = stack.enter_context(way)
        rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for round_ in range(a.rounds):
            for a.together in (True, False) if round_ % 2 else (False, True):
                rows[a.together].append(one_round(a, url, sent))
                print(
                    f"together: {a.together}: {rows[a.together][-1]}", file=sys.stderr, flush=True
                )
    loads = [row["load"] for each in rows.values() for row in each]
    print(
        f"{a.nodes} nodes, {a.gb:g} GB, {a.order}, {a.passes:g} passes, cache {a.cache:.0%} each, "
        f"{a.latency_ms:g} ms and {a.mb_per_s:g} MB/s for each connection; medians of {a.rounds} "
        f"rounds; load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} processors"
    )
    columns = ("bucket", "peers", "first_s", "samples_per_s", "stalls")
    print(f"{'':10}" + "".join(f"{c:>15}" for c in columns))
    for together, name in ((False, "each"), (True, "together")):
        middle = [statistics.median(row[c] for row in rows[together]) for c in columns]
        print(f"{name:10}" + "".join(f"{value:15.3g}" for value in middle))


if __name__ == "__main__":
    main()
