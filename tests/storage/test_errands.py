"""Threads that handle tensors end before the interpreter does, which they would abort."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """
import functools, mmap, sys, threading, time
import torch
from storage.tensor_threads import TensorThread as ErrandThread, start_thread
"""
FREES = """
def look(buffer):
    buffer.view(torch.int64)

def main():
    threads = [ErrandThread("t") for _ in range(40)]
    for thread in threads:
        memory = mmap.mmap(-1, 8 << 20)
        memory[:] = b"1" * len(memory)
        buffer = torch.frombuffer(memoryview(memory), dtype=torch.uint8)
        thread.run(functools.partial(look, buffer))
        del memory, buffer
    time.sleep(0.2)

main()
"""
COMPUTES = """
def compute():
    a = torch.ones(100)
    for _ in range(3000):
        a = a + a
    sys.stdout.write("all of it\\n")

threads = [ErrandThread("t") for _ in range(4)]
for thread in threads:
    thread.run(compute)
"""
SILENT = """
thread = ErrandThread("t")
thread.run(functools.partial(time.sleep, 600))
"""
READS = """
from harness.worker.batches.loader import read_ahead

def batches():
    while True:
        yield [torch.arange(64).reshape(8, 8) + i for i in range(200)]

readers = [read_ahead(batches(), 2) for _ in range(4)]
for reader in readers:
    next(reader)
if closed:
    for reader in readers:
        reader.close()
"""


def ended(script, timeout_s=120):
    return subprocess.run(
        [sys.executable, "-c", HEAD + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (FREES, ""),
        (COMPUTES, "all of it\n" * 4),
        (SILENT, ""),
        ("closed = False\n" + READS, ""),
        ("closed = True\n" + READS, ""),
    ],
    ids=["frees", "computes", "silent", "reads", "closed"],
)
def test_a_script_ends_as_it_would_without_our_threads(script, said):
    found = ended(script)
    assert (found.returncode, found.stdout, found.stderr) == (0, said, "")


def test_its_own_exit_code_is_kept():
    found = ended("closed = False\n" + READS + "raise SystemExit(7)")
    assert (found.returncode, found.stderr) == (7, "")


def test_a_worker_that_tears_nothing_down_waits_for_no_thread():
    script = """
from harness.node.forkserver import leave
threading.Thread(target=time.sleep, args=(0.1,)).start()  # an ordinary one is waited for
start_thread("t", functools.partial(time.sleep, 600), functools.partial(print, "asked"))
leave(3)
"""
    found = ended(script)
    assert (found.returncode, found.stdout, found.stderr) == (3, "", "")


@pytest.mark.proof
def test_ended_threads_are_forgotten():
    script = """
import weakref
from storage import tensor_threads as errands

class Work:
    def __call__(self):
        pass

for _ in range(5):
    start_thread("t", Work(), Work().__call__).join()
held = ErrandThread("t")
print(len(errands._started))
done = threading.Event()
tensor = torch.zeros(8)
freed = weakref.ref(tensor)
held.run(functools.partial(tensor.add_, 1))
held.run(done.set)
del tensor
print(done.wait(60), freed())
"""
    found = ended(script)
    assert (found.returncode, found.stdout, found.stderr) == (0, "1\nTrue None\n", "")
