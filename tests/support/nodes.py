"""Agents as processes, each with a node's folder of its own."""

import os
import subprocess
import sys

import pytest

from harness.bucket.archive import read_facts
from storage.stores.store_urls import open_store
from support.worlds import TRAINER, newest, until


class Nodes:
    """Agents as processes; whatever is left is killed at the end of the test."""

    def __init__(self, run):
        self.run, self.url, self.processes = run, str(run), []
        self.go = run.parent / "go"  # see --go of tests/support/trainer.py

    def start(self, *flags, script=TRAINER, agent=(), env=None):
        n = len(self.processes) + 1
        node_dir = self.run.parent / f"node{n}"
        base = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_"))
        }
        with open(self.run.parent / f"node{n}.log", "wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "harness.cli",
                    "run",
                    "--run",
                    self.url,
                    *agent,
                    "--",
                    str(script),
                    *map(str, flags),
                ],
                env=base
                | {"HARNESS_NODE_DIR": str(node_dir), "HARNESS_ATTEMPT": str(n), **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def facts(self, kind):
        return [s.fact for s in read_facts(open_store(self.url)) if isinstance(s.fact, kind)]

    def until(self, condition, timeout_s=240):
        """Wait until `condition` is true. Fail, with the nodes' logs, after `timeout_s`, and at
        once when every node has ended: then nobody is left to make it true."""

        def met():
            # before the look, which may be slow: a node may make it true and end meanwhile
            ended = [p.poll() for p in self.processes]
            found = condition()
            left = not ended or None in ended
            assert found or left, f"every node has ended, with {ended}:\n{self.logs()}"
            return found

        until(met, self.logs, timeout_s, every_s=0.1)

    def step(self):
        manifest = newest(self.url)
        return manifest.step if manifest else 0

    def logs(self):
        return "\n".join(p.read_text() for p in sorted(self.run.parent.glob("node*.log")))

    def codes(self, timeout_s=240):
        return [p.wait(timeout_s) for p in self.processes]


@pytest.fixture
def nodes(tmp_path):
    nodes = Nodes(tmp_path / "run")
    yield nodes
    for process in nodes.processes:
        process.kill()
        process.wait()


SLOW = ("--total", 120, "--every", 10, "--sleep-s", 0.03)
EPOCHS_OF_ITS_OWN = """
import pathlib, sys, time, torch, harness
run = harness.attach(snapshot_every_steps=1000)
model = torch.nn.Linear(4, 4)
run.prepare(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
for total in (2, 4):
    for step in run.steps(data, total=total, global_batch=8, micro_batch=8):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
    while not pathlib.Path(sys.argv[1], f"go{total}").exists():  # a validation
        time.sleep(0.02)
        run.alive()
"""
