"""How fast a corpus is prepared, beside the speed of its tokenizer alone. No assertions, no
network.

    python benchmarks/data.py                        # BPE, trained here; needs tokenizers
    python benchmarks/data.py --mb 1000 --rounds 5 --tokenizer path/to/tokenizer.json
    python benchmarks/data.py --read                 # how it is read; needs SeaweedFS or moto

Text: this computer's Python standard library, repeated with other numbers in each line up to
`--mb`, as files of 1 MB. alone: `--jobs` processes that do nothing but tokenize the same texts,
which they hold in memory, in batches as `prepare` makes them. prepared: `harness data prepare` from
those files to a folder, from the plan to the card. Seconds by the wall, and of processors, of all
processes together: where others use the machine as well, only the latter mean anything. What it
takes to start the processes and load the tokenizer in each is measured by itself and taken off
both: a large corpus takes it once. Rounds take turns; the first warms up and is not counted.
Medians; the ratio is the median of those within a round.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import data_reading

from harness.data.prepare.documents import DocumentRules, pieces
from harness.data.prepare.prepare import PreparePlan, prepare
from harness.data.prepare.shard_writer import BATCH_LETTERS, CorpusSettings
from harness.data.prepare.tokenizers import tokenizer_of

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
    made.train([str(path) for path in files[:2]], 8_000, special_tokens=["<|endoftext|>"])
    made.save(str(to))
    return str(to)


def alone(spec: str, files: list[Path]) -> None:
    """One process: tokenize, and nothing else."""
    tokenizer = tokenizer_of(spec)
    texts = [piece for path in files for piece in pieces(path.read_text(), BATCH_LETTERS)]
    for text in texts:
        tokenizer.encode([text])


@dataclass(frozen=True)
class Took:
    wall_s: float
    cpu_s: float

    def __sub__(self, other: Took) -> Took:
        return Took(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def clocked(do: Callable[[], object]) -> Took:
    """All processes that it starts and waits for, and this one."""
    wall_s, cpu_s = time.perf_counter(), cpu()
    do()
    return Took(time.perf_counter() - wall_s, cpu() - cpu_s)


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def tokenize(spec: str, files: list[Path], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=alone, args=(spec, files[i::jobs])) for i in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def make(spec: str, folder: Path, jobs: int, unit_mib: int) -> None:
    settings = CorpusSettings(
        DocumentRules("tokens"), spec, unit_nbytes=unit_mib << 20, shard_nbytes=unit_mib << 20
    )
    with tempfile.TemporaryDirectory(prefix="corpus-", dir=folder.parent) as made:
        prepare(made, PreparePlan.of([str(folder)], settings), jobs=jobs)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("--mb", type=int, default=64, help="of text")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--unit-mib", type=int, default=4)
    p.add_argument("--tokenizer", default="bpe")
    reading = p.add_argument_group("reading")
    reading.add_argument("--read", action="store_true", help="time reading, not preparing")
    reading.add_argument("--gb", type=float, default=2.0, help="of corpus")
    reading.add_argument("--server", choices=("weed", "moto"), default="weed")
    reading.add_argument("--ways", default="ours,streaming,copy")
    reading.add_argument("--latency-ms", type=float, default=20.0)
    reading.add_argument("--mb-per-s", type=float, default=50.0, help="of a connection")
    reading.add_argument("--cache", type=float, default=0.1, help="share of the corpus")
    reading.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    reading.add_argument("--batch", type=int, default=32, help="samples of a micro-batch")
    reading.add_argument("--workers", type=int, default=2, help="processes of the loader")
    orders = ("plain", "shuffled", "blocks")
    reading.add_argument("--order", choices=orders, default="plain", help="in which ours reads")
    reading.add_argument("--lanes", type=int, default=1, help="micro-batches of a step")
    reading.add_argument("--nodes", type=int, default=1, help="that share them; one is measured")
    reading.add_argument("--samples", type=int, default=100_000)
    reading.add_argument("--steps", type=int, default=200)
    reading.add_argument("--step-ms", type=float, default=20.0)
    reading.add_argument("--predownload", type=int, default=0, help="samples; 0: its default")
    a = p.parse_args()
    if a.read:
        data_reading.measure(a)
        return
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
            begun = clocked(lambda: tokenize(spec, [], a.jobs))
            only = clocked(lambda: tokenize(spec, files, a.jobs)) - begun
            rows.append((only, clocked(lambda: make(spec, folder, a.jobs, a.unit_mib)) - begun))
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {a.jobs} jobs")
        print(f"{a.tokenizer}: {nbytes / 1e6:.0f} MB of text, medians of {a.rounds} rounds")
        for name, column in zip(("alone", "prepared"), zip(*rows[1:], strict=True), strict=True):
            wall_s = statistics.median(one.wall_s for one in column)
            cpu_s = statistics.median(one.cpu_s for one in column)
            print(f"  {name:8}  {wall_s:7.2f} s by the wall  {cpu_s:7.2f} s of processors")
        for what in ("wall_s", "cpu_s"):
            ratio = statistics.median(
                getattr(only, what) / getattr(whole, what) for only, whole in rows[1:]
            )
            print(f"  prepared at {ratio:.0%} of the tokenizer's own speed ({what})")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"  largest process {peak:.0f} MiB")


if __name__ == "__main__":
    main()
