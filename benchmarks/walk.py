"""Does the world leave a trace in the weights? Trains the reference GPT (with dropout) again and
again:

    calm      one worker, never stopped
    skewed    two workers with shares in proportion 3 : 1
    walk      1 -> 4 -> 3 -> 5 -> 2 workers, every rank SIGKILLed once in each world
    walk (FSDP2)

and prints the hash of the final weights of each, for reduce="exact" and, to show that they can
differ, for "fast".

    python benchmarks/walk.py --steps 300
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

EXAMPLE = Path(__file__).parent.parent / "examples" / "pretrain.py"
WALK = (1, 4, 3, 5, 2)


def start(
    run: Path, world: int, until: int, flags: list[str], speeds: list[float] | None
) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = {k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")}
    base |= {
        "HARNESS_RUN": str(run),
        "HARNESS_UNTIL_STEP": str(until),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    base |= {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HARNESS_SPEEDS": json.dumps(speeds),
    }
    with open(f"{run}.log", "ab") as log:
        return [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), *flags],
                env=base | {"RANK": str(r), "LOCAL_RANK": "0"},
                stdout=log,
                stderr=log,
            )
            for r in range(world)
        ]


def train(
    run: Path,
    world: int,
    until: int,
    flags: list[str],
    speeds: list[float] | None = None,
    kill: random.Random | None = None,
) -> None:
    """To step `until`; with `kill`, everything is SIGKILLed at a random moment first, and
    started again."""
    if kill is not None:
        before = step(run)
        victims = start(run, world, until, flags, speeds)
        deadline_s = time.monotonic() + 300
        while (
            step(run) == before
            and any(p.poll() is None for p in victims)
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.05)
        time.sleep(kill.uniform(0.0, 0.5))
        for p in victims:
            p.send_signal(signal.SIGKILL)
            p.wait()
    ranks = start(run, world, until, flags, speeds)
    if [p.wait(600) for p in ranks] != [0] * world:
        raise SystemExit(Path(f"{run}.log").read_text()[-3000:])


def step(run: Path) -> int:
    manifest = Snapshots(open_store(str(run))).latest()
    return manifest.step if manifest else 0


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--seed", type=int, default=0, help="of the kills")
    p.add_argument("--reduce", nargs="*", default=["exact", "fast"])
    a = p.parse_args()
    flags = [
        "--steps",
        str(a.steps),
        "--layers",
        "2",
        "--dim",
        "64",
        "--heads",
        "2",
        "--seq",
        "64",
        "--dropout",
        "0.1",
        "--eval-every",
        "0",
    ]
    flags += ["--snapshot-every-steps", str(max(1, a.steps // 30))]
    print(f"{a.steps} steps, 12 micro-batches each")
    told = {}
    for reduce in a.reduce:
        with tempfile.TemporaryDirectory() as folder:
            hashes = {}
            for name, parallel in (
                ("calm", "ddp"),
                ("skewed", "ddp"),
                ("walk", "ddp"),
                ("walk (FSDP2)", "fsdp2"),
            ):
                run, began_s = Path(folder) / name.replace(" ", ""), time.monotonic()
                own, rng = (
                    [*flags, "--reduce", reduce, "--parallel", parallel],
                    random.Random(a.seed),
                )
                if name == "calm":
                    train(run, 1, a.steps, own)
                elif name == "skewed":
                    train(run, 2, a.steps, own, speeds=[3.0, 1.0])
                else:
                    for i, world in enumerate(WALK, 1):
                        train(run, world, a.steps * i // len(WALK), own, kill=rng)
                manifest = Snapshots(open_store(str(run))).latest()
                assert manifest is not None and manifest.step == a.steps
                hashes[name] = str(manifest.data["weights"])
                print(
                    f"{reduce:6} {name:13} {hashes[name]}  {time.monotonic() - began_s:5.0f} s",
                    flush=True,
                )
            count = len(set(hashes.values()))
            told[reduce] = count == 1
            print(f"{reduce:6} {'all the same' if count == 1 else f'{count} different results'}")
    # floats must differ, or this proves nothing
    sys.exit(not all(same == reduce.startswith("exact") for reduce, same in told.items()))


if __name__ == "__main__":
    main()
