"""Large objects to and from a local S3 server: our store, and what people use instead, interleaved
in one run. No assertions.

    # 512 MiB, 5 rounds, on SeaweedFS, which it starts
    python benchmarks/stores.py
    # AWS_ACCESS_KEY_ID ... as usual
    python benchmarks/stores.py --mib 1024 --rounds 3 --endpoint http://127.0.0.1:9000

Every measurement is a process of its own, which has its buffer and a connection before the clock
starts: put sends a memoryview, get fills memory that is there already. Rounds take the ways in an
order that rotates; the first warms up and is not counted. MB/s (10^6) is mostly the server's, which
shares this machine; CPU seconds per GiB (user and system, of the client alone) and extra memory
(peak of the resident set above that before, MiB) are the client's.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BUCKET, THREADS, PART = "bench-bucket", 8, 16 << 20
Call = Callable[[str, memoryview], None]


def ours(backend: str) -> Callable[[dict[str, str]], tuple[Call, Call]]:
    def make(options: dict[str, str]) -> tuple[Call, Call]:
        from storage.stores.objects import read_into
        from storage.stores.store_urls import open_store

        store = open_store(f"s3://{BUCKET}/x", backend=backend, **options)
        store.list("")
        return store.put, lambda key, buffer: expect(read_into(store, key, 0, buffer), buffer)

    return make


def s3fs(options: dict[str, str]) -> tuple[Call, Call]:
    import s3fs as package

    fs = package.S3FileSystem(**options)
    fs.ls(BUCKET)

    def get(key: str, buffer: memoryview) -> None:
        found = fs.cat_file(f"{BUCKET}/x/{key}")
        buffer[:] = found
        expect(len(found), buffer)

    return lambda key, data: fs.pipe_file(f"{BUCKET}/x/{key}", bytes(data)), get


def boto3(options: dict[str, str]) -> tuple[Call, Call]:
    import boto3 as package
    from boto3.s3.transfer import TransferConfig

    client = package.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
    client.head_bucket(Bucket=BUCKET)
    config = TransferConfig(
        multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=THREADS
    )

    class View(io.RawIOBase):
        """The buffer as a file, so that parts are written where they belong."""

        def __init__(self, view: memoryview):
            self.view, self.at = view, 0

        def readable(self) -> bool:
            return True

        def writable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def tell(self) -> int:
            return self.at

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset + (0, self.at, len(self.view))[whence]
            return self.at

        def readinto(self, into: Any) -> int:
            n = min(len(into), len(self.view) - self.at)
            into[:n] = self.view[self.at : self.at + n]
            self.at += n
            return n

        def write(self, data: Any) -> int:
            self.view[self.at : self.at + len(data)] = data
            self.at += len(data)
            return len(data)

    return (
        lambda key, data: client.upload_fileobj(View(data), BUCKET, f"x/{key}", Config=config),
        lambda key, buffer: client.download_fileobj(
            BUCKET, f"x/{key}", View(buffer), Config=config
        ),
    )


def obstore(options: dict[str, str]) -> tuple[Call, Call]:
    import obstore as package
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        prefix="x",
        region="us-east-1",
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        client_options={"allow_http": True, "timeout": "300s"},
    )
    package.list(store).collect()

    def get(key: str, buffer: memoryview) -> None:
        def piece(start: int) -> int:
            end = min(start + PART, len(buffer))
            buffer[start:end] = memoryview(package.get_range(store, key, start=start, end=end))
            return end - start

        with ThreadPoolExecutor(THREADS) as pool:
            expect(sum(pool.map(piece, range(0, len(buffer), PART))), buffer)

    return (
        lambda key, data: (
            package.put(store, key, data, chunk_size=PART, max_concurrency=THREADS) and None
        ),
        get,
    )


WAYS = {
    "ours": ours("obstore"),
    "ours, by fsspec": ours("fsspec"),
    "s3fs": s3fs,
    "boto3": boto3,
    "obstore": obstore,
}


def expect(found: int, buffer: memoryview) -> None:
    if found != len(buffer):
        raise SystemExit(f"got {found} of {len(buffer)} bytes")


def child(way: str, options: dict[str, str], mib: int) -> None:
    """One put and one get; prints seconds, CPU seconds and extra MiB of each."""
    put, get = WAYS[way](options)
    data = memoryview(bytearray(os.urandom(1 << 20) * mib))
    buffer = memoryview(bytearray(b"\1") * (mib << 20))
    key = way.replace(" ", "-").replace(",", "")
    print(
        json.dumps(
            {"put": measured(lambda: put(key, data)), "get": measured(lambda: get(key, buffer))}
        )
    )
    if buffer != data:
        raise SystemExit("what came back differs")


def measured(do: Callable[[], None]) -> tuple[float, float, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mib, before = memory_mib("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    t0 = time.perf_counter()
    do()
    seconds, after = time.perf_counter() - t0, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu_s, memory_mib("VmHWM") - before_mib


def memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ways", default=",".join(w.replace(", ", " ") for w in WAYS), help="comma-separated"
    )
    parser.add_argument(
        "--endpoint", default="", help="of a server that is there; its bucket must be, too"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        child(flags.child[0], json.loads(flags.child[1]), flags.mib)
        return
    ways = [w for w in WAYS if w.replace(", ", " ") in flags.ways.split(",")]
    if flags.endpoint:
        options = {
            "key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
            "endpoint_url": flags.endpoint,
        }
        run(ways, options, flags.mib, flags.rounds)
        return
    tree = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tree), str(tree / "tests")]
    import fsspec

    from support import buckets

    with tempfile.TemporaryDirectory() as folder, buckets.weed(Path(folder)) as options:
        fsspec.filesystem("s3", **options).mkdir(BUCKET)
        run(ways, options, flags.mib, flags.rounds)


def run(ways: list[str], options: dict[str, str], mib: int, rounds: int) -> None:
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for round_ in range(rounds + 1):
        for way in ways[round_ % len(ways) :] + ways[: round_ % len(ways)]:
            command = [
                sys.executable,
                __file__,
                "--mib",
                str(mib),
                "--child",
                way,
                json.dumps(options),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise SystemExit(f"{way}: {done.stderr[-2000:]}")
            for what, numbers in json.loads(done.stdout).items():
                if round_:
                    found.setdefault((what, way), []).append(tuple(numbers))
        print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
    print(
        f"{mib} MiB, {rounds} rounds: median (lowest-highest); x: median of the per-round ratios "
        "to ours"
    )
    print(f"{'':<20}{'MB/s':>22}{'x':>7}{'CPU s/GiB':>24}{'x':>7}{'extra MiB':>12}")
    for what in ("put", "get"):
        for way in ways:
            here = found[what, way]
            speed = [mib * 1.048576 / seconds for seconds, _, _ in here]
            cpu = [cpu_s * 1024 / mib for _, cpu_s, _ in here]
            base = found.get((what, "ours"), here)
            faster = statistics.median(b[0] / h[0] for b, h in zip(base, here, strict=True))
            costlier = statistics.median(h[1] / b[1] for b, h in zip(base, here, strict=True))
            extra = statistics.median(mib_ for _, _, mib_ in here)
            print(
                f"{what} {way:<16}{spread(speed, 0):>22}{faster:>7.2f}{spread(cpu, 2):>24}"
                f"{costlier:>7.2f}{extra:>12.0f}"
            )


def spread(values: list[float], digits: int) -> str:
    return (
        f"{statistics.median(values):.{digits}f} "
        f"({min(values):.{digits}f}-{max(values):.{digits}f})"
    )


if __name__ == "__main__":
    main()
