"""Forks worlds of trainers from one process that has already imported torch: what importing costs is paid once, not per rank.

Reads jobs, one JSON line each: {"script", "world", "flags", "env", "log", "kill_after_s", "timeout_s"}.
Answers each with one JSON line: the exit codes. See `worlds.Nursery`.
"""

import importlib
import json
import os
import runpy
import signal
import sys

import harness.session  # noqa: F401

for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):  # what a trainer would import later
    importlib.import_module(name)


def child(job, rank):
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.environ.clear()
    os.environ.update(job["env"] | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(job["world"])})
    sys.argv = [job["script"], *job["flags"]]
    sys.path.insert(0, os.path.dirname(job["script"]))
    runpy.run_path(job["script"], run_name="__main__")


def bring_up(job):
    """The exit codes of one world."""
    pids = []
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            child(job, rank)
            sys.exit(0)
        pids.append(pid)

    def kill(*_):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # those that have ended are zombies still: nobody else can have got their ids

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] if job["kill_after_s"] is None else job["kill_after_s"])
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(bring_up(json.loads(line))), flush=True)
