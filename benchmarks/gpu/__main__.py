"""Runs the parts, each in a process of its own with a time limit of its own, and writes one table
as it goes: gpu.md, gpu.json and gpu.log in $OUT. Being cut off loses only what had not run.

    make gpu                             # all parts, 540 s at most
    make gpu PART=exact,staging LIMIT_S=120
    make gpu WHEELS=folder               # take what this Python lacks from a folder of wheels
    make gpu ARGS=--tiny                 # in miniature, on the CPU although there is a GPU

Checks come first, some at a time, since they share the GPU without harm; figures follow, one at a
time. Exits 1 if a check does not hold or a part fails. Installs nothing from a network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"blake3": "blake3", "fsspec": "fsspec", "numpy": "numpy", "psutil": "psutil"} | {
    "yaml": "pyyaml",
    "rich": "rich",
    "tenacity": "tenacity",
    "xxhash": "xxhash",
}  # module -> package


@dataclass(frozen=True)
class Part:
    name: str
    says: str
    limit_s: float
    check: bool = True  # may share the GPU with other parts
    module: str = ""  # with its function `run`; default: the one of its name


# by value: what comes last is lost first
PARTS = (
    Part("exact", "exact sums on the device are the CPU's integers", 100),
    Part("staging", "snapshots beside the training are byte for byte the state at rest", 60),
    Part("ranks", "ranks on the GPU: kills, other numbers of ranks, the same weights", 130),
    Part("precision", "fp16 with a scaler, bf16, fp8, compiled or not: resumed to the bit", 90),
    Part("sharded", "FSDP2, with and without offload: resumed to the bit", 75),
    Part("trainers", "unchanged scripts of other trainers: killed, resumed, as alone", 150),
    Part("health", "NVML's readings and reports", 20),
    Part("pause", "what a snapshot costs the training", 110, check=False),
    Part("pretrain", "tokens/s and MFU of the reference trainer beside plain PyTorch", 150, False),
    Part("overheads", "exact sums, step timing, votes", 90, check=False),
    Part("start", "to the first step, and from a loss to the next step", 110, check=False),
    Part("pause-large", "what a large one costs", 70, False, "benchmarks.gpu.parts.pause"),
)
SECOND_S = 1.0
TINY_SLOWER = 4  # times that the parts may take in miniature, on a computer that others use too
MOST_LOG = 200_000  # characters of a part's log that are kept


@dataclass
class Outcome:
    """What became of a part. `state`: done, failed, cut, not reached."""

    name: str
    says: str
    state: str = "not reached"
    took_s: float = 0.0
    why: str = ""
    clocks: list[str] = field(default_factory=list)  # before and after


class Run:
    def __init__(self, out: Path, tiny: bool, limit_s: float, parts: list[Part]):
        self.out, self.tiny, self.parts = out, tiny, parts
        self.ends_s = time.monotonic() + limit_s
        self.outcomes = {p.name: Outcome(p.name, p.says) for p in parts}
        self.rows, self.log = out / "rows.jsonl", out / "gpu.log"
        self.machine = machine(tiny)
        self._lock = threading.Lock()
        for stale in (self.rows, self.log):
            stale.unlink(missing_ok=True)

    def go(self) -> bool:
        """Run all parts; return whether all that had to hold does."""
        self.write()
        together = 4 if not self.tiny else 2
        with ThreadPoolExecutor(together) as pool:
            list(pool.map(self.one, [p for p in self.parts if p.check]))
        for part in self.parts:
            if not part.check:
                self.one(part)
        self.write()
        return all(o.state == "done" for o in self.outcomes.values()) and all(
            row.ok is not False for row in bench.read(self.rows)
        )

    def one(self, part: Part) -> None:
        outcome = self.outcomes[part.name]
        limit_s = part.limit_s * (TINY_SLOWER if self.tiny else 1)
        limit_s = min(limit_s, self.ends_s - time.monotonic())
        if limit_s < SECOND_S * 5:
            return
        folder = Path(tempfile.mkdtemp(prefix=f"gpu-{part.name}-", dir=shm()))
        outcome.clocks.append(clocks())
        t0 = time.monotonic()
        module = part.module or f"benchmarks.gpu.parts.{part.name}"
        tiny = ["tiny"] if self.tiny else []
        how = [part.name, module, str(self.rows), str(folder), str(t0), str(limit_s), *tiny]
        log = folder / "log"
        with open(log, "wb") as f:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.part", *how],
                cwd=ROOT,
                env=bench.environment(PYTHONUNBUFFERED=1, HARNESS_BENCH_PART=part.name),
                stdout=f,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit_s + 2 * SECOND_S)
                outcome.state = "done" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                outcome.state, outcome.why = "cut", f"after its {limit_s:.0f} s"
            finally:
                end(part.name, process)
        outcome.took_s = time.monotonic() - t0
        outcome.clocks.append(clocks())
        text = log.read_text(errors="replace")
        if outcome.state == "failed":
            lines = [line for line in text.splitlines() if line.strip()]
            outcome.why = lines[-1][:300] if lines else f"exit status {code}"
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            with open(self.log, "a") as whole:
                whole.write(f"===== {part.name}: {outcome.state} {outcome.why}\n")
                whole.write(text[-MOST_LOG:] + "\n")
            self.write()

    def write(self) -> None:
        """Write the table as it stands."""
        rows = bench.read(self.rows)
        found = {
            "machine": self.machine,
            "miniature": self.tiny,
            "parts": [asdict(o) for o in self.outcomes.values()],
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        for name, text in (
            ("gpu.json", json.dumps(found, indent=1) + "\n"),
            ("gpu.md", table.markdown(found)),
        ):
            (self.out / f".{name}").write_text(text)
            (self.out / f".{name}").replace(self.out / name)


def end(part: str, process: subprocess.Popen[bytes]) -> None:
    """Kill whatever a part has left, also what went into sessions of its own: it carries the part's
    name in its environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.pid == os.getpid() or other.environ().get("HARNESS_BENCH_PART") != part:
                continue
            other.kill()
    process.wait()


def shm() -> str | None:
    """Return the folder in memory, or None where there is none with a gigabyte to spare."""
    at = Path("/dev/shm")
    return str(at) if at.is_dir() and shutil.disk_usage(at).free > 1 << 30 else None


def clocks() -> str:
    """Return the first GPU's clocks, temperature and power; "" without one."""
    try:
        found = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=10 * SECOND_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = [w.strip() for w in found.stdout.split("\n")[0].split(",")]
    return "{} MHz, {} MHz, {} C, {} W".format(*words) if len(words) == 4 else ""


def machine(tiny: bool) -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": "CPU (in miniature: no figure counts)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
    }
    if not tiny:
        shown = torch.cuda.get_device_properties(0)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            about["driver"] = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=10 * SECOND_S,
            ).stdout.split("\n")[0]
        about |= {
            "device": f"{torch.cuda.device_count()} x {shown.name}",
            "gpu_memory_gb": round(shown.total_memory / 1e9),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return about


def installed(wheels: str) -> None:
    """Take what this Python lacks from a folder of wheels. Exits if something is missing then."""
    missing = [p for m, p in PACKAGES.items() if importlib.util.find_spec(m) is None]
    if wheels:
        site = tempfile.mkdtemp(prefix="gpu-site-")
        found = sorted(map(str, Path(wheels).glob("*.whl")))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--target", site, *found], check=True)
        sys.path.insert(0, site)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [site, os.environ.get("PYTHONPATH")])
        )
        importlib.invalidate_caches()
        missing = [p for m, p in PACKAGES.items() if importlib.util.find_spec(m) is None]
    if importlib.util.find_spec("torch") is None:
        missing.insert(0, "torch")
    if missing:
        sys.exit(
            f"make gpu: wanted the packages {', '.join(missing)} in {sys.executable}, found none; "
            "put their wheels into a folder and say WHEELS=folder, or install them"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", default="", help="names of parts, with commas; default: all")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all parts")
    parser.add_argument("--out", default=os.environ.get("OUT") or "runs/gpu", help="a folder")
    parser.add_argument("--wheels", default="", help="a folder of wheels of missing packages")
    parser.add_argument("--tiny", action="store_true", help="in miniature, on the CPU")
    flags = parser.parse_args()
    wanted = [w for w in flags.part.split(",") if w]
    if unknown := sorted(set(wanted) - {p.name for p in PARTS}):
        parser.error(f"--part: wanted of {', '.join(p.name for p in PARTS)}, found {unknown}")
    installed(flags.wheels)
    global bench, psutil, table
    import psutil
    import torch

    from benchmarks.gpu import bench, table

    tiny = flags.tiny or not torch.cuda.is_available()
    out = Path(flags.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, tiny, flags.limit_s, [p for p in PARTS if not wanted or p.name in wanted])
    good = run.go()
    print((out / "gpu.md").read_text())
    sys.exit(not good)


if __name__ == "__main__":
    main()
