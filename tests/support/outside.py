"""Drives a run from outside: the `harness` command in processes of its own, objects in a folder.

Writes facts and manifests as bytes, as a forger or another program would. Imports nothing of the
code under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]

SCRIPT = """
import os, sys, time, torch, harness
total, nap_s = int(sys.argv[1]), float(sys.argv[2])
class Numbers(torch.utils.data.Dataset):
    fingerprint = "numbers"
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        return torch.full((4,), i / 1000)
run = harness.attach(seed=1, snapshot_every_steps=10)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
for step in run.steps(Numbers(), total=total, global_batch=8, micro_batch=8):
    for x in step:
        step.backward(model(x).pow(2).mean())
    step.update()
    time.sleep(nap_s)
"""


def environment(*paths: Path, **more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_"))}
    where = os.pathsep.join(map(str, [*paths, TREE]))
    return ours | {
        "PYTHONPATH": where,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "STORAGE_FSYNC": "0",
        **more,
    }


def words_of(*words: object) -> list[str]:
    return [sys.executable, "-m", "harness.cli", *map(str, words)]


def start(
    *words: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    within: Sequence[str] = (),
    **more: Any,
):
    """`harness WORDS` in a process of its own; what it says is read by `said`. `within`: a command
    that becomes it, such as `ip netns exec NAME`."""
    return subprocess.Popen(
        [*within, *words_of(*words)],
        env=env or environment(),
        cwd=cwd or "/",
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        text=True,
        errors="surrogateescape",
        **{"stdout": subprocess.PIPE, **more},
    )


def said(process: subprocess.Popen[str], within_s: float = 120.0) -> str:
    """Until it ends. Raises TimeoutExpired, and it is killed."""
    try:
        return process.communicate(timeout=within_s)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def harness(*words: object, within_s: float = 120.0, **more: Any) -> tuple[int, str]:
    """Exit status, and all that it said."""
    process = start(*words, **more)
    text = said(process, within_s)
    return process.returncode, text


def until(
    condition: Callable[[], Any],
    what: str,
    within_s: float = 90.0,
    of: subprocess.Popen[str] | None = None,
) -> Any:
    """What `condition` finds, once it finds something. `of`: who is waited for; what it said is in
    the failure, which comes at once when it has ended."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        late = time.monotonic() > deadline_s
        if late or (of is not None and of.poll() is not None and not condition()):
            heard = "" if of is None else f"; {of.poll()}: {last_words(of)}"
            raise AssertionError(f"waited {within_s} s for {what}{heard}")
        time.sleep(0.05)
    return found


def last_words(process: subprocess.Popen[str]) -> str:
    """End it, with the stacks of its threads, and return the end of all that it said."""
    process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER is set in the tests' worlds
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=10)[0][-6000:]
    process.kill()
    return process.communicate(timeout=10)[0][-6000:]


def seam(folder: Path, code: str) -> Path:
    """A folder for PYTHONPATH: every Python process that has it there begins with `code`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return folder


# ---- a run in a folder ---------------------------------------------------------------------------
def train(run: object, *words: object, total: int = 30, nap_s: float = 0.0, **more: Any) -> tuple[int, str]:
    """One agent, one worker, to its end."""
    return said_of(train_begin(run, *words, total=total, nap_s=nap_s, **more))


def said_of(process: subprocess.Popen[str], within_s: float = 120.0) -> tuple[int, str]:
    text = said(process, within_s)
    return process.returncode, text


def train_begin(
    run: object, *words: object, total: int = 30, nap_s: float = 0.0, folder: Path, **more: Any
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    if not script.exists():
        script.write_text(SCRIPT)
    flags = ("--run", run, "--notices", "none", *words)
    return start("run", *flags, "--", script, total, nap_s, cwd=folder, **more)


def copy_of(run: Path, into: Path) -> Path:
    return Path(shutil.copytree(run, into))


def manifests(run: Path) -> list[Path]:
    return sorted((run / "snapshots" / "manifests").glob("*.json"))


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def resealed(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """A manifest is changed, and its hash made again."""
    body = json.loads(file.read_text())
    del body["hash"]
    edit(body)
    file.write_bytes(canonical({**body, "hash": digest(canonical(body))}))


def write_facts(run: Path, writer: str, *bodies: dict[str, Any]) -> None:
    """Facts of one writer, in a whole chain."""
    folder = run / "facts" / writer
    folder.mkdir(parents=True, exist_ok=True)
    lines, head = [], digest(writer.encode())
    for body in bodies:
        whole = {"t": time.time(), **body, "prev": head}
        head = digest(canonical(whole))
        lines.append(json.dumps({**whole, "h": head}, separators=(",", ":")))
    (folder / "000000.jsonl").write_text("\n".join(lines) + "\n")


def edit_facts(run: Path, seat: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Facts of every writer of a seat are changed, and their chains made again."""
    for folder in (run / "facts").glob(f"{seat}-*"):
        head = digest(folder.name.encode())
        for file in sorted(folder.iterdir()):
            lines = []
            for line in file.read_text().splitlines():
                body = json.loads(line)
                del body["h"]
                edit(body)
                body["prev"] = head
                head = digest(canonical(body))
                lines.append(json.dumps({**body, "h": head}, separators=(",", ":")))
            file.write_text("\n".join(lines) + "\n")


OFFER = {"name": "aws/us-east-1/use1-az1/p5", "usd_per_h": 10.0, "accelerator": "H100", "gpus": 8}


def attempt(number: int, **end: Any) -> list[dict[str, Any]]:
    """Facts of an attempt that is up; and that ended, if `end` says how."""
    now = time.time()
    found: list[dict[str, Any]] = [
        {"fact": "AttemptIntended", "attempt": number, "offer": OFFER, "reason": ""},
        {"fact": "AttemptUp", "attempt": number, "up_s": now},
    ]
    if end:
        usual = {"end": "finished", "asked_s": now, "up_s": now, "gone_s": now + 1, "exit_code": 0}
        usual |= {"reason": "", "billed_s": 1.0, "usd": 0.01, "committed_step": 0}
        found.append({"fact": "AttemptEnded", "attempt": number, **usual, **end})
    return found
