"""Jobs for the upload engine, and an uploader's process."""

import json
import os
import subprocess
import sys
import threading
import time

from harness.uploader.handoff import (
    UploaderConnection,
)
from storage import Ref
from storage.snapshots.upload import UploadJob

R1, R2, R3 = Ref(1, 10), Ref(1, 20), Ref(1, 30)
WAIT_S = 120


def job(ref=R1, rank=0, world=1, nbytes=1000, n=4, **more):
    files = {f"{i:04d}.bin": (i * nbytes, (i + 1) * nbytes) for i in range(n)}
    chunks = [
        {
            "offsets": [i * nbytes],
            "sizes": [nbytes],
            "part": f"{i:04d}.bin",
            "start": 0,
            "end": nbytes,
        }
        for i in range(n)
    ]
    tensors = {f"model/w{rank}": {"shape": [n * nbytes], "dtype": "uint8", "chunks": chunks}}
    note = {"t_start": time.time(), "stall_s": 0.01, "why": "interval"}
    return UploadJob(
        ref,
        rank,
        world,
        f"t{rank}",
        files,
        tensors,
        {"step": ref.step} if rank == 0 else {},
        weights="model/",
        note=note,
        **more,
    )


class Told:
    """Outcomes as they come."""

    def __init__(self):
        self.outcomes, self._new = [], threading.Condition()

    def __call__(self, outcome):
        with self._new:
            self.outcomes.append(outcome)
            self._new.notify_all()

    def wait(self, n=1):
        with self._new:
            assert self._new.wait_for(lambda: len(self.outcomes) >= n, WAIT_S)
        return self.outcomes[-1]


VIEW = memoryview(bytearray(os.urandom(8000)))


def start_uploader(folder, run):
    order = {"run": run, "folder": str(folder), "budget_nbytes": 1 << 30, "member": "m1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.uploader.handoff", json.dumps(order)], stdin=subprocess.PIPE
    )
    # a loaded machine takes longer to start it than a trainer would wait
    UploaderConnection(folder, connect_s=WAIT_S).close()
    return process
