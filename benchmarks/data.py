"""How fast a corpus is prepared, beside the speed of its tokenizer alone. No assertions, no network.

    python benchmarks/data.py                        # 64 MB of text, bytes as tokens
    python benchmarks/data.py --tokenizer bpe        # trained here; needs the package tokenizers
    python benchmarks/data.py --mb 1000 --jobs 2 --rounds 5

Text: this computer's Python standard library, repeated with other numbers in each line up to `--mb`,
as files of 1 MB. alone: `--jobs` processes that do nothing but tokenize the same texts, which they
hold in memory, in batches as `prepare` makes them. prepared: `harness data prepare` from those files
to a folder, begin to end but for the start of its processes, which is told apart: a large corpus
takes it once. Rounds take turns; the first warms up and is not counted. Medians; the ratio is the
median of those within a round. Look at the load before you believe it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness.data.documents import Reading, pieces
from harness.data.prepare import PreparePlan, prepare
from harness.data.tokenizing import tokenizer_of
from harness.data.unit_maker import BATCH_LETTERS, CorpusSettings

FILE_NBYTES = 1_000_000


def standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            yield path.read_text(errors="replace")


def write_text(folder: Path, nbytes: int) -> list[Path]:
    """Files of 1 MB."""
    source = "".join(standard_library()).splitlines(keepends=True)
    made: list[Path] = []
    held, size, line = [], 0, 0
    while len(made) * FILE_NBYTES < nbytes:
        text = f"{line // len(source)} {source[line % len(source)]}"
        held.append(text)
        size, line = size + len(text), line + 1
        if size >= FILE_NBYTES:
            made.append(folder / f"{len(made):05d}.txt")
            made[-1].write_text("".join(held))
            held, size = [], 0
    return made


def train_bpe(files: list[Path], to: Path) -> str:
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train([str(path) for path in files[:4]], 16_000, special_tokens=["<|endoftext|>"])
    made.save(str(to))
    return str(to)


def alone(spec: str, files: list[Path], begin: object, ended: object) -> None:
    """One process: tokenize, and nothing else."""
    tokenizer = tokenizer_of(spec)
    texts = [piece for path in files for piece in pieces(path.read_text(), BATCH_LETTERS)]
    begin.wait()  # type: ignore[attr-defined]
    for text in texts:
        tokenizer.encode([text])
    ended.wait()  # type: ignore[attr-defined]


def time_alone(spec: str, files: list[Path], jobs: int) -> float:
    context = multiprocessing.get_context("spawn")
    begin, ended = context.Barrier(jobs + 1), context.Barrier(jobs + 1)
    shares = [files[i::jobs] for i in range(jobs)]
    processes = [context.Process(target=alone, args=(spec, s, begin, ended)) for s in shares]
    for process in processes:
        process.start()
    begin.wait()
    start = time.perf_counter()
    ended.wait()
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return seconds


def time_prepare(spec: str, folder: Path, jobs: int, unit_mib: int) -> tuple[float, float]:
    """Seconds of work, and seconds before the first document was read."""
    settings = CorpusSettings(
        Reading("tokens"), spec, unit_nbytes=unit_mib << 20, shard_nbytes=unit_mib << 20
    )
    with tempfile.TemporaryDirectory(prefix="corpus-", dir=folder.parent) as made:
        first = 0.0
        start = time.perf_counter()

        def watch(what: str, done: int, of: int) -> None:
            nonlocal first
            first = first or (time.perf_counter() if done else 0.0)

        prepare(made, PreparePlan.of([str(folder)], settings), jobs=jobs, watch=watch)
        return time.perf_counter() - start, first - start


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    p.add_argument("--mb", type=int, default=64)
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--unit-mib", type=int, default=4)
    p.add_argument("--tokenizer", default="bytes")
    a = p.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="bench-data-") as root:
        folder = Path(root) / "text"
        folder.mkdir()
        files = write_text(folder, a.mb * 1_000_000)
        nbytes = sum(path.stat().st_size for path in files)
        spec = a.tokenizer
        if spec == "bpe":
            spec = train_bpe(files, Path(root) / "tokenizer.json")
        rows = []
        for _ in range(a.rounds + 1):
            whole, begun = time_prepare(spec, folder, a.jobs, a.unit_mib)
            rows.append((time_alone(spec, files, a.jobs), whole, begun))
        counted = rows[1:]
        only, whole, begun = (statistics.median(column) for column in zip(*counted, strict=True))
        ratio = statistics.median(row[0] / (row[1] - row[2]) for row in counted)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {a.jobs} jobs")
        print(f"{a.tokenizer}: {nbytes / 1e6:.0f} MB of text, medians of {a.rounds} rounds")
        print(f"  alone     {only:7.2f} s  {nbytes / only / 1e6:8.1f} MB/s")
        print(f"  prepared  {whole:7.2f} s  {nbytes / whole / 1e6:8.1f} MB/s, all of it")
        print(f"  first document read after {begun:.2f} s")
        print(f"  prepared, without that start, at {ratio:.0%} of the tokenizer's own speed")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"  largest process {peak:.0f} MiB")


if __name__ == "__main__":
    main()
