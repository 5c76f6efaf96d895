"""How a node that is new reads a corpus from a store that is as slow as a real one; `python
benchmarks/data.py --read` calls it. See there."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from torch.utils.data import DataLoader, Dataset

from harness.core.batch import Batching, plan
from harness.core.sample_order import blocks_for
from harness.data.card import (
    CARD,
    CHUNK_NBYTES,
    TOKENS,
    Card,
    CorpusIndex,
    ShardEntry,
    SourceCard,
    SplitCard,
    hash_of,
    index_key,
    shard_key,
)
from storage.stores.objects import ObjectStore, read_into
from storage.stores.store_urls import open_store

BUCKET, SHARD_NBYTES, VOCABULARY = "bench-data", 64 << 20, 50_000
COPY_AT_ONCE, COPY_NBYTES = 10, 8 << 20  # as `aws s3 cp` has them
STALLS_MS = (20, 100, 500)
WAYS = ("ours", "streaming", "copy")
BLOCK_NBYTES = 256 << 10


# ---- a slow way to the store ---------------------------------------------------------------------
def slow_way(
    to: tuple[str, int], door: socket.socket, latency_s: float, rate: float, sent: Any
) -> None:
    """A process: passes every connection on. What is asked is held back by `latency_s`, what is
    answered has `rate` bytes per second for each connection. `sent`: bytes that were answered."""
    while True:
        wire, _ = door.accept()
        far = socket.create_connection(to)
        for end in (wire, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for args in ((wire, far, latency_s, 0.0, None), (far, wire, 0.0, rate, sent)):
            threading.Thread(target=passed_on, args=args, daemon=True).start()


def passed_on(a: socket.socket, b: socket.socket, latency_s: float, rate: float, sent: Any) -> None:
    free_s = 0.0  # when the line has room again
    with contextlib.suppress(OSError):
        while data := a.recv(BLOCK_NBYTES):
            time.sleep(latency_s)
            if rate:
                now_s = time.monotonic()
                free_s = max(free_s, now_s) + len(data) / rate
                time.sleep(free_s - now_s)
                with sent.get_lock():
                    sent.value += len(data)
            b.sendall(data)
    for end in (a, b):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def throttled(endpoint: str, latency_s: float, rate: float) -> Iterator[tuple[str, Any]]:
    """Address of a slow way to `endpoint`, and the bytes that came by it so far."""
    url, sent = urlsplit(endpoint), multiprocessing.Value("q", 0)
    assert url.hostname and url.port
    door = socket.create_server(("127.0.0.1", 0), backlog=256)
    args = ((url.hostname, url.port), door, latency_s, rate, sent)
    process = multiprocessing.get_context("fork").Process(target=slow_way, args=args, daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}", sent
    finally:
        process.kill()
        process.join()
        door.close()


# ---- the corpora ---------------------------------------------------------------------------------
def write_corpus(store: ObjectStore, nbytes: int) -> None:
    """Random tokens, as `harness data prepare` lays them out."""
    entries: list[ShardEntry] = []
    for number in range(max(1, nbytes // SHARD_NBYTES)):
        data = tokens_of(number).tobytes()
        hashes = b"".join(
            hash_of(memoryview(data)[at : at + CHUNK_NBYTES])
            for at in range(0, len(data), CHUNK_NBYTES)
        )
        entries.append(ShardEntry(hash_of(data), len(data), len(data) // 2, hashes))
        store.put(shard_key(entries[-1].name.hex()), data)
    index = CorpusIndex.of(CHUNK_NBYTES, entries).encode()
    name, items = hash_of(index).hex(), sum(entry.items for entry in entries)
    store.put(index_key(name), index)
    split = SplitCard("train", name, len(entries), 1, items, 2 * items)
    made = Card(
        TOKENS, (split,), (SourceCard("random"),), "uint16", VOCABULARY, vocabulary=VOCABULARY + 1
    )
    store.put(CARD, made.sealed().encode())


def tokens_of(shard: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.random.default_rng(shard).integers(0, VOCABULARY, SHARD_NBYTES // 2, np.uint16)


def write_mds(store: ObjectStore, folder: Path, nbytes: int, length: int) -> None:
    """The same tokens, in windows, as mosaicml-streaming has them."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": "bytes"}, size_limit=SHARD_NBYTES) as out:
        for number in range(max(1, nbytes // SHARD_NBYTES)):
            data = tokens_of(number)
            for at in range(0, len(data) - length, length):
                out.write({"tokens": data[at : at + length + 1].tobytes()})
    for path in sorted(folder.iterdir()):
        store.put(path.name, path.read_bytes())
    shutil.rmtree(folder)


# ---- who reads -----------------------------------------------------------------------------------
def batching_of(a: argparse.Namespace, data: Any) -> Batching:
    batching = Batching(len(data), a.lanes * a.batch, a.batch, 1, a.order == "shuffled")
    if a.order != "blocks":
        return batching
    order = blocks_for("blocks", data.block_items, len(data), batching.global_batch, a.batch)
    return replace(batching, order=order)


def read_ours(url: str, a: argparse.Namespace, folder: Path) -> Iterator[Any]:
    import harness
    from harness.worker.batches.loader import map_style

    cache = None if url.startswith("file:") else str(folder)
    data = harness.data.Tokens(url, a.length, cache=cache, disk_nbytes=int(a.gb * 1e9 * a.cache))
    batching = batching_of(a, data)
    shares, total = plan(a.lanes, a.nodes), len(data) // batching.global_batch
    for micro in map_style(data, batching, shares, 0, 1, total, None, a.workers, False):
        yield micro.data


def read_copy(url: str, a: argparse.Namespace, folder: Path) -> Iterator[Any]:
    far, near = open_store(url), open_store(str(folder), durable=False)

    def copied(place: tuple[str, int, int]) -> None:
        key, start, end = place
        buffer = bytearray(end - start)
        read_into(far, key, start, memoryview(buffer))
        with open(folder / key, "r+b") as out:
            out.seek(start)
            out.write(buffer)

    places = []
    for key in far.list(""):
        size = far.size(key)
        near.put(key, b"")
        places += [(key, at, min(at + COPY_NBYTES, size)) for at in range(0, size, COPY_NBYTES)]
    with ThreadPoolExecutor(COPY_AT_ONCE) as pool:
        list(pool.map(copied, places))
    data = Mapped(sorted(p for p in folder.rglob("*.bin")), a.length)
    yield from DataLoader(data, batch_size=a.batch, num_workers=a.workers)


class Mapped(Dataset[Any]):
    """Windows of token files that lie on the disk, as scripts read them; what `Tokens` gives."""

    def __init__(self, files: list[Path], length: int):
        self.length, self.tokens = length, [np.memmap(path, np.uint16, "r") for path in files]
        self.each = (len(self.tokens[0]) - 1) // length

    def __len__(self) -> int:
        return self.each * len(self.tokens)

    def __getitem__(self, i: int) -> Any:
        at = i % self.each * self.length
        row = self.tokens[i // self.each][at : at + self.length + 1].astype(np.int64)
        return row[:-1], row[1:]


class Windows:
    """A StreamingDataset whose items are what `Tokens` gives."""

    def __new__(cls, *args: Any, **more: Any) -> Any:
        from streaming import StreamingDataset

        class Dataset(StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                row = np.frombuffer(super().__getitem__(at)["tokens"], np.uint16).astype(np.int64)
                return row[:-1], row[1:]

        return Dataset(*args, **more)


def read_streaming(url: str, a: argparse.Namespace, folder: Path) -> Iterator[Any]:
    limit = max(int(a.gb * 1e9 * a.cache), 9 * SHARD_NBYTES // 2)  # its least
    data = Windows(
        remote=url,
        local=str(folder),
        shuffle=False,
        batch_size=a.batch,
        cache_limit=limit,
        predownload=a.predownload or None,
        num_canonical_nodes=1,
    )
    yield from DataLoader(data, batch_size=a.batch, num_workers=a.workers)


READERS = {"ours": read_ours, "streaming": read_streaming, "copy": read_copy}


def child(way: str, url: str, a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A newcomer: its first micro-batch, then as fast as it can, then in step with a training."""
    import torch  # noqa: F401  (what a worker has imported before its world begins)

    if way == "streaming":
        import boto3
        import streaming  # noqa: F401

        boto3.client("s3")
    else:
        import storage.stores.obstore_store  # noqa: F401
    cpu_before_s, began_s = time.process_time(), time.perf_counter()
    batches = READERS[way](url, a, folder)
    next(batches)
    first_s = time.perf_counter() - began_s
    read, begun_s = 0, time.perf_counter()
    while read < a.samples:
        read += len(next(batches)[0])
    fast_s = time.perf_counter() - begun_s
    waits: list[float] = []
    for _ in range(a.steps):
        time.sleep(a.step_ms / 1e3)
        waited_s = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - waited_s)
    batches.close()
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in spent) - cpu_before_s
    return {
        "cpu_ms_per_1000": 1e6 * cpu_s / (a.batch * (1 + a.steps) + read),
        "first_s": first_s,
        "samples_per_s": read / fast_s,
        "stalls": [sum(1e3 * w > ms for w in waits) for ms in STALLS_MS],
        "longest_ms": 1e3 * max(waits, default=0.0),
        "share_nbytes": 2 * a.length * (a.batch * (1 + a.steps) + read),
        "cached_nbytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
    }


def newcomer(
    way: str, url: str, options: dict[str, Any], folder: Path, address: str
) -> dict[str, Any]:
    """What `child` says in a process of its own, which reaches the store at `address`."""
    done = subprocess.run(
        [sys.executable, __file__, way, url, str(folder), json.dumps(options)],
        env={**os.environ, "AWS_ENDPOINT_URL": address, "S3_ENDPOINT_URL": address},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(a: argparse.Namespace) -> None:
    tree = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tree), str(tree / "tests")]
    from support import buckets

    ways = [way for way in WAYS if way in a.ways.split(",")]
    with contextlib.suppress(ImportError):
        import streaming  # noqa: F401
    if "streaming" not in sys.modules and "streaming" in ways:
        print("mosaicml-streaming is not installed here: left out")
        ways.remove("streaming")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-reading-")))
        if a.server == "weed":
            served = root / "weed"
            served.mkdir()
            options = stack.enter_context(buckets.weed(served))
        else:
            options = {
                "key": "k",
                "secret": "s",
                "endpoint_url": stack.enter_context(buckets.moto()),
            }
        env = {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        bucket = "my-bucket" if a.server == "moto" else BUCKET
        os.environ.update(env, AWS_ENDPOINT_URL=options["endpoint_url"])
        urls = {"ours": f"s3://{bucket}/corpus", "streaming": f"s3://{bucket}/mds"}
        urls["copy"] = urls["ours"]
        if a.server == "weed":
            import boto3

            boto3.client("s3", endpoint_url=options["endpoint_url"]).create_bucket(Bucket=bucket)
        write_corpus(open_store(urls["ours"]), int(a.gb * 1e9))
        if "streaming" in ways:
            write_mds(open_store(urls["streaming"]), root / "mds", int(a.gb * 1e9), a.length)
        way_in = stack.enter_context(
            throttled(options["endpoint_url"], a.latency_ms / 1e3, a.mb_per_s * 1e6)
        )
        address, sent = way_in
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for round_ in range(a.rounds):
            for way in ways[round_ % len(ways) :] + ways[: round_ % len(ways)]:
                before, folder = sent.value, root / "node"
                folder.mkdir(mode=0o700)
                row = newcomer(way, urls[way], vars(a), folder, address)
                row["fetched_nbytes"] = sent.value - before
                row["load"] = os.getloadavg()[0]
                if way == "ours":  # another process of the node, as a resize starts one
                    short = vars(a) | {"samples": 0, "steps": 0}
                    again = newcomer(way, urls[way], short, folder, address)
                    row["again_s"] = again["first_s"]
                rows[way].append(row)
                print(f"round {round_}: {way}: {row}", file=sys.stderr, flush=True)
                shutil.rmtree(folder)
        told(a, rows)


def since_begin(a: argparse.Namespace, row: dict[str, Any]) -> float:
    """Samples per second of who reads `--samples` of them, from the world's beginning on."""
    return float(a.samples / (row["first_s"] + a.samples / row["samples_per_s"]))


def told(a: argparse.Namespace, rows: dict[str, list[dict[str, Any]]]) -> None:
    loads = [row["load"] for each in rows.values() for row in each]
    print(
        f"{a.gb:g} GB on {a.server}, {a.latency_ms:g} ms and {a.mb_per_s:g} MB/s for each "
        f"connection; windows of {a.length} tokens, batches of {a.batch}, {a.workers} processes, "
        f"ours {a.order} in {a.lanes} lanes as one of {a.nodes} nodes, "
        f"cache {a.cache:.0%}; medians of {a.rounds} rounds; load {min(loads):.1f} to "
        f"{max(loads):.1f} on {os.cpu_count()} processors"
    )
    ms = "/".join(map(str, STALLS_MS))
    print(
        f"{'':10}{'first s':>9}{'samples/s':>11}{'from begin':>11}{f'waits > {ms} ms':>24}"
        f"{'longest ms':>12}"
        f"{'bytes/share':>13}{'on disk MB':>12}{'CPU ms/1000':>13}"
    )

    def middle(way: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[way])

    for way, each in rows.items():
        stalls = "/".join(
            str(int(statistics.median(c))) for c in zip(*(r["stalls"] for r in each), strict=True)
        )
        ratio = statistics.median(r["fetched_nbytes"] / r["share_nbytes"] for r in each)
        print(
            f"{way:10}{middle(way, 'first_s'):9.2f}{middle(way, 'samples_per_s'):11.0f}"
            f"{statistics.median(since_begin(a, r) for r in each):11.0f}"
            f"{f'{stalls} of {a.steps}':>24}{middle(way, 'longest_ms'):12.0f}{ratio:13.2f}"
            f"{middle(way, 'cached_nbytes') / 1e6:12.0f}{middle(way, 'cpu_ms_per_1000'):13.0f}"
        )
    if rows.get("ours"):
        again_s = statistics.median(row["again_s"] for row in rows["ours"])
        print(f"ours in another process of a node that has its cache: first step {again_s:.2f} s")
    for other in (way for way in rows if way != "ours" and rows.get("ours")):
        pairs = list(zip(rows["ours"], rows[other], strict=True))
        first = statistics.median(b["first_s"] / o["first_s"] for o, b in pairs)
        speed = statistics.median(o["samples_per_s"] / b["samples_per_s"] for o, b in pairs)
        whole = statistics.median(since_begin(a, o) / since_begin(a, b) for o, b in pairs)
        print(
            f"ours against {other}: first step {first:.1f}x sooner, {speed:.2f}x the samples/s "
            f"from there on, {whole:.2f}x from the beginning on"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="One reader, which benchmarks/data.py starts.")
    for name in ("way", "url", "folder", "said"):
        parser.add_argument(name)
    a = parser.parse_args()
    found = child(a.way, a.url, argparse.Namespace(**json.loads(a.said)), Path(a.folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
