"""Runs `harness launch` on the local cloud as a user does, with a small script, and kills
things."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from harness.bucket.archive import read_facts
from storage.stores.store_urls import open_store
from support.worlds import TRAINER, newest, until

TASK = """\
name: tiny
workdir: {workdir}
resources: {{use_spot: true, accelerators: L4:1, job_recovery: {{recover_on_exit_codes: [33]}}}}
envs: {{RUN: null, FLAGS: ""}}
run: |
  exec harness run --run "$RUN" {run_flags} -- {trainer} $FLAGS
"""


class Campaign:
    """One run, launched as often as it takes."""

    def __init__(
        self,
        folder: Path,
        market="calm",
        nodes="1:2",
        flags="",
        extra=(),
        trainer=TRAINER,
        run_flags="",
    ):
        self.folder, self.run = folder, folder / "run"
        self.task = folder / "task.yaml"
        self.task.write_text(TASK.format(workdir=folder, trainer=trainer, run_flags=run_flags))
        self.command = [
            *(
                sys.executable,
                "-m",
                "harness.cli",
                "launch",
                str(self.task),
                "--run",
                str(self.run),
                "--nodes",
                nodes,
            ),
            *("--market", market, "--env", f"FLAGS={flags}", *extra),
        ]
        self.launches = 0
        self.process = None

    def launch(self):
        self.launches += 1
        environ = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_"))
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                # a shell's background job would hand on "ignored"
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return self.process

    @property
    def log(self) -> Path:
        return self.folder / f"launch{self.launches}.log"

    def wait(self, timeout_s=240) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return self.log.read_text()

    def logs(self) -> str:
        nodes = "\n".join(
            f"--- {p}\n{p.read_text()[-3000:]}"
            for p in sorted(self.folder.glob("run/local-cloud/nodes/*/log"))
        )
        return self.output()[-6000:] + nodes

    def step(self) -> int:
        manifest = newest(self.run)
        return manifest.step if manifest else 0

    def facts(self, *kinds):
        return [s.fact for s in read_facts(open_store(str(self.run))) if isinstance(s.fact, kinds)]

    def until(self, condition, timeout_s=120):
        def true():
            assert self.process.poll() is None, self.logs()
            return condition()

        until(true, self.logs, timeout_s, every_s=0.05)

    # ---- killing ---------------------------------------------------------------------------------
    def processes(self, what: str) -> list[psutil.Process]:
        """ "controller", "provider", "agent" or "worker" of this run, by command line and
        environment."""
        found = []
        for p in psutil.process_iter(["cmdline", "environ"]):
            try:
                line, environ = " ".join(p.info["cmdline"] or []), p.info["environ"] or {}
            except psutil.Error:
                continue
            ours = environ.get("HARNESS_NODE_DIR", "").startswith(str(self.folder))
            kinds = {
                "controller": "launch" in line and str(self.run) in line,
                "provider": "harness.local.provider" in line and str(self.folder) in line,
                "agent": ours
                and ("harness run" in line or "harness.cli run" in line)
                and "bash" not in line,
                "worker": ours and "harness.node.forkserver" in line,
            }
            if kinds[what]:
                found.append(p)
        return found

    def kill(self, what: str, rng: random.Random) -> int:
        """SIGKILL one process of a kind ("all": every process there is). Returns how many."""
        kinds = ["controller", "provider", "agent", "worker"] if what == "all" else [what]
        victims = [p for kind in kinds for p in self.processes(kind)]
        if what != "all" and victims:
            victims = [rng.choice(sorted(victims, key=lambda p: p.pid))]
        for p in victims:
            try:
                p.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        return len(victims)

    def left_over(self) -> list[str]:
        """What is still running of this run."""
        kinds = ["controller", "provider", "agent", "worker"]
        return [f"{kind} {p.pid}" for kind in kinds for p in self.processes(kind)]

    def nothing_left(self, within_s: float = 60.0) -> bool:
        """Is all of it gone, or about to go? A process that has said that it ends takes a
        moment."""
        deadline_s = time.monotonic() + within_s
        while self.left_over() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return not self.left_over()

    def close(self) -> None:
        for _ in range(20):
            if not self.kill("all", random.Random(0)):
                return
            time.sleep(0.1)
