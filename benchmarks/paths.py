"""How many files of ours does something walk through? `make paths` runs real processes under
sys.setprofile and prints each walk beside its ceiling:

    step             one optimizer update of one worker, no option on, its threads included
    notice > commit  from a notice until the snapshot is committed: agent, worker and uploader
    bill             from the facts of a run until a report says what it cost

A change that makes a walk longer shows here as a number. `NO` stands behind a walk above its
ceiling, and the exit status is then 1. `--files` lists the files."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = (f"{ROOT}/harness/", f"{ROOT}/storage/")
CEILINGS = {"step": 18, "notice > commit": 66, "bill": 35}
FIRST, LAST, TOTAL = 20, 30, 34  # steps that are traced, and the last one
LIMIT_S = 240.0
# what a thread of this name does is no part of a step: it writes facts to the bucket, now and then
BESIDE = ("facts",)


def ours(names: Iterable[str]) -> set[str]:
    """Return the files of this project, relative to its root."""
    return {str(Path(n).relative_to(ROOT)) for n in names if n.startswith(FOLDERS)}


def environment(folder: Path) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "AWS_"))}
    path = os.pathsep.join([str(folder), str(ROOT), base.get("PYTHONPATH", "")])
    return base | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


# ---- a step --------------------------------------------------------------------------------------
STEP = """
import json, sys, threading
import torch
from torch import nn
import harness

FIRST, LAST, TOTAL, BESIDE = {bounds}
seen, on = set(), False

def look(frame, event, arg):
    if on and event == "call" and threading.current_thread().name not in BESIDE:
        seen.add(frame.f_code.co_filename)

class Numbers(torch.utils.data.Dataset):
    fingerprint = "numbers"
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i)), i % 2

threading.setprofile(look)
run = harness.attach(seed=1, run={url!r})
model = nn.Linear(8, 2)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(Numbers(), total=TOTAL, global_batch=4, micro_batch=2):
    if step.number == FIRST:
        on = True
        sys.setprofile(look)
    if step.number == LAST + 1:
        on = False
        sys.setprofile(None)
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update()
open({out!r}, "w").write(json.dumps(sorted(seen)))
"""


def step_walk(folder: Path) -> set[str]:
    """Return the files that run during steps of one worker, with no option on. No snapshot is due
    meanwhile."""
    out = folder / "step.json"
    bounds = (FIRST, LAST, TOTAL, BESIDE)
    script = STEP.format(bounds=bounds, url=str(folder / "run"), out=str(out))
    node = folder / "node"
    node.mkdir()
    env = environment(folder) | {
        "HARNESS_MARK": str(node / "mark.json"),
        "HARNESS_PROGRESS": str(node / "progress"),
    }
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=LIMIT_S)
    return ours(json.loads(out.read_text()))


# ---- from a notice to a commit -------------------------------------------------------------------
# It is in every process of the node (as its sitecustomize), and begins when the file `go` is there.
RECORD = """
import os, sys, threading, time

FOLDER, OURS = {folder!r}, {ours!r}
seen, state = set(), [0, False]

def look(frame, event, arg):
    if event != "call":
        return
    if not state[1]:
        state[0] += 1
        if state[0] % 50 or not os.path.exists(FOLDER + "/go"):
            return
        state[1] = True
    name = frame.f_code.co_filename
    if name.startswith(OURS) and (os.getpid(), name) not in seen:
        seen.add((os.getpid(), name))
        with open(FOLDER + "/walk", "a") as file:
            file.write(str(time.time()) + " " + name + chr(10))

threading.setprofile(look)
sys.setprofile(look)
"""


def notice_walk(folder: Path) -> set[str]:
    """Return the files that run in agent, worker and uploader from a notice until its snapshot is
    committed."""
    (folder / "sitecustomize.py").write_text(RECORD.format(folder=str(folder), ours=FOLDERS))
    slow = "        __import__('time').sleep(0.1)\n        step.update("
    script = (ROOT / "examples" / "elastic.py").read_text().replace("        step.update(", slow)
    (folder / "train.py").write_text(script)
    run, begun_s = folder / "run", time.monotonic()
    words = ["--set", "gpu_health=off", "--set", "addr=127.0.0.1"]
    words += ["--attach", "snapshot_every_steps=20"]
    command = [sys.executable, "-m", "harness.cli", "run", "--run", str(run), *words, "--"]
    with open(folder / "log", "wb") as log:
        agent = subprocess.Popen(
            [*command, str(folder / "train.py")], env=environment(folder), stdout=log, stderr=log
        )
    manifests = run / "snapshots" / "manifests"
    try:
        while not manifests.exists() or not any(manifests.iterdir()):
            if agent.poll() is not None or time.monotonic() > begun_s + LIMIT_S:
                raise RuntimeError((folder / "log").read_text()[-4000:])
            time.sleep(0.05)
        before = {path.name for path in manifests.iterdir()}
        (folder / "go").touch()
        agent.send_signal(signal.SIGTERM)
        agent.wait(LIMIT_S)
    finally:
        agent.kill()
    made = [path for path in manifests.iterdir() if path.name not in before]
    until_s = max(path.stat().st_mtime for path in made)
    lines = [line.split(" ", 1) for line in (folder / "walk").read_text().splitlines()]
    return ours(name for at_s, name in lines if float(at_s) <= until_s)


# ---- a bill --------------------------------------------------------------------------------------
BILL = """
import io, json, sys
from rich.console import Console
from harness.bucket.journal import Journal
from harness.core import facts
from harness.look.reports.report import print_report
from harness.look.reports.summary import summarize
from storage import MemoryStore

offer = dict(kind="1x", region="r", zone="r-a", cloud="local", spot=True, usd_per_h=1.0,
             on_demand_usd_per_h=3.0)
seen = set()
sys.setprofile(lambda frame, event, arg: seen.add(frame.f_code.co_filename))
store, now = MemoryStore(), iter(range(1000, 2000))
journal = Journal(store, "controller-1", lambda: float(next(now)))
for fact in (
    facts.AttemptIntended(1, offer),
    facts.AttemptUp(1, 1010.0),
    facts.AttemptEnded(1, "finished", 1000.0, 1010.0, 4610.0, 0, "", 3600.0, 1.0),
):
    journal.record(fact)
journal.flush()
out = io.StringIO()
print_report(summarize(store), Console(file=out, width=120))
sys.setprofile(None)
assert "$1" in out.getvalue(), out.getvalue()
open({out!r}, "w").write(json.dumps(sorted(seen)))
"""


def bill_walk(folder: Path) -> set[str]:
    """Return the files that run from a controller's facts until a report says what a run cost."""
    out = folder / "bill.json"
    script = BILL.format(out=str(out))
    subprocess.run(
        [sys.executable, "-c", script], env=environment(folder), check=True, timeout=LIMIT_S
    )
    return ours(json.loads(out.read_text()))


WALKS: dict[str, Callable[[Path], set[str]]] = {
    "step": step_walk,
    "notice > commit": notice_walk,
    "bill": bill_walk,
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--files", action="store_true", help="list the files of each walk")
    p.add_argument("--only", choices=WALKS, help="this walk only")
    a = p.parse_args()
    above = False
    for name, walk in WALKS.items():
        if a.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="harness-paths-") as folder:
                found = walk(Path(folder))
            wrong = len(found) > CEILINGS[name]
            above |= wrong
            said = f"{len(found):4d} files, at most {CEILINGS[name]}"
            print(f"{name:16s} {said}{'   NO' if wrong else ''}", flush=True)
            if a.files:
                print(textwrap.indent("\n".join(sorted(found)), "    "), flush=True)
    sys.exit(above)


if __name__ == "__main__":
    main()
