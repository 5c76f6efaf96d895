"""A script of a foreign trainer in a folder of its own: plainly, or under agents that are killed and
given notices. The scripts tell what they log in files."""

import ast
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.world import DRAINED
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import environment, until

ENV = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1"}
EXACT = ("--attach", "reduce=exact")
SHARDED = Path(__file__).parents[1] / "adapters/scripts/sharded_on_cpu.py"
EVERY_3 = ("--attach", "snapshot_every_steps=3")


class Script:
    """A script in a folder of its own. `script_world`: the ranks that it is written for."""

    def __init__(self, folder, script, *flags, script_world=1):
        self.folder, self.words = folder, [str(script), *map(str, flags)]
        self.script_world = str(script_world)
        folder.mkdir(exist_ok=True)

    def plain(self):
        self._ended(subprocess.run([sys.executable, *self.words], **self._how("plain")), 0)
        return self

    def sharded_plain(self, ranks):
        """The script by torchrun alone, with Accelerate's FSDP2 on CPUs."""
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "127.0.0.1:0", str(SHARDED)]
        command = [sys.executable, *words, *self.words]
        self._ended(subprocess.run(command, **self._how("plain", OMP_NUM_THREADS="1")), 0)
        return self

    def agent(self, ranks, *options, **env):
        """A node's agent, running."""
        words = ["-m", "harness.cli", "run", "--run", self.run, "--nproc", str(ranks), *options]
        command = [sys.executable, *words, "--", *self.words]
        return subprocess.Popen(command, **self._how("agent", **env))

    def under(self, ranks, *options, die_at="", **env):
        """An agent with so many ranks, to its end. `die_at`: one of them in step N, after the
        snapshot of step S, as "N:S"."""
        agent = self.agent(ranks, "--script-world", self.script_world, *options, DIE_AT=die_at, **env)
        agent.wait(240)
        self._ended(agent, 0)
        return self

    def noticed(self, ranks, *options, at):
        """An agent that gets a notice in step `at`, and leaves."""
        agent = self.agent(ranks, "--script-world", self.script_world, *options, DIE_AT="", NOTICE_AT=str(at))
        until(
            lambda: agent.poll() is not None or any(step >= at - 1 for step, _ in self.logs()),
            f"step {at}",
        )
        agent.send_signal(signal.SIGTERM)
        agent.wait(240)
        self._ended(agent, DRAINED)
        return self

    def _how(self, name, **more):
        output = open(self.folder / f"{name}.out", "a")  # noqa: SIM115 - of a process
        env = environment() | ENV | more
        return {"cwd": self.folder, "stdout": output, "stderr": output, "env": env}

    def _ended(self, process, code):
        assert process.returncode == code, self.output()

    @property
    def run(self):
        return str(self.folder / "run")

    def output(self):
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    def logs(self):
        """[(step, what the Trainer logged)]"""
        path = self.folder / "events.logs"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(ValueError, SyntaxError):  # a line that is being written
            return [(int(n), ast.literal_eval(x)) for n, _, x in (s.partition(" ") for s in lines)]
        return []

    def logged(self):
        """{step: what was logged there}; steps that a kill undid were logged twice."""
        found = {}
        for step, logs in self.logs():
            found.setdefault((step, *sorted(logs)), []).append(logs)
        return {key: logs[-1] for key, logs in found.items()}

    def events(self):
        return (self.folder / "events").read_text().splitlines()

    def end(self):
        return (self.folder / "events.end").read_text().splitlines()


def close(logged, others, rel=1e-4):
    assert logged.keys() == others.keys()
    for key, logs in logged.items():
        assert logs == pytest.approx(others[key], rel=rel, abs=1e-4), key


def proven(script):
    assert not [c for c in audit(open_store(script.run)).checks if not c.ok]
