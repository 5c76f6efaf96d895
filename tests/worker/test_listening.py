"""Where workers listen: on the address that they are told, and not on every interface."""

import json
import subprocess
import sys

from support.worlds import environment, free_port

PROGRAM = """
import json, os, socket, sys, psutil
import torch.distributed as dist
from harness.worker.process_group import Peers
import torch
peers = Peers(dict(os.environ))
peers.meet(dict(os.environ), timeout_s=60.0)
sum_ = torch.ones(1)
dist.all_reduce(sum_)
found = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print(json.dumps([sum_.item(), [a.ip for a in found], [a.port for a in found]]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def world(addr: str) -> list[list]:
    port, processes = free_port(), []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": addr, "MASTER_PORT": port}
        env = environment() | {k: str(v) for k, v in own.items()}
        processes.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True)
        )
    said = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    return [*said, [port]]


def test_the_ranks_meet_on_their_own_address_only():
    first, second, (port,) = world("127.0.0.1")
    assert first[0] == second[0] == 2.0 and port in first[2]
    assert set(first[1]) == set(second[1]) == {"127.0.0.1"}


APART = """
import os, sys, time
from harness.worker import process_group
import torch.distributed as dist
process_group.MEET_S = 2.0
if os.environ["RANK"] == "1":  # its connections come to nothing
    dist.init_process_group = lambda *a, **k: time.sleep(60)
process_group.Peers(dict(os.environ)).meet(dict(os.environ))
"""


def test_ranks_that_do_not_connect_are_named_in_time():
    """AUDIT 2: they waited for `start_s`, half an hour."""
    port, processes = free_port(), []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = environment() | {k: str(v) for k, v in own.items()}
        processes.append(
            subprocess.Popen([sys.executable, "-c", APART], env=env, stdout=subprocess.PIPE, text=True)
        )
    said = [p.communicate(timeout=50)[0] for p in processes]
    assert [p.returncode for p in processes] == [1, 1], said
    assert "found none of rank 0, 1" in said[0] and "GLOO_SOCKET_IFNAME" in said[0]


LATE = """
import os, sys, time, torch
from harness.worker import process_group
process_group.CONNECTS_LATE, process_group.FIRST_SUM_S = "gloo", float(sys.argv[1])
if os.environ["RANK"] == "1" and sys.argv[2] == "hangs":
    in_time = process_group._in_time
    def late(store, rank, world, wanted, *more):  # its GPU does not answer
        if wanted != "connections":
            time.sleep(60)
        return in_time(store, rank, world, wanted, *more)
    process_group._in_time = late
peers = process_group.Peers(dict(os.environ))
peers.meet(dict(os.environ))
print("met", int(peers.sum(1.0)), flush=True)
peers.barrier()
torch.distributed.destroy_process_group()  # as a session does: torch may crash at exit without it
"""


def late(within_s: float, how: str) -> tuple[list[int], list[str]]:
    port, processes = free_port(), []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = environment() | {k: str(v) for k, v in own.items()}
        words = [sys.executable, "-c", LATE, str(within_s), how]
        processes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    first = processes[0].communicate(timeout=50)[0]
    if how == "hangs":
        processes[1].kill()
    said = [first, processes[1].communicate(timeout=50)[0]]
    return [p.returncode for p in processes], said


def test_a_backend_that_connects_in_its_first_collective_does_one_in_bounded_time():
    """NCCL's had no bound: the other ranks waited for half an hour, and named nobody."""
    codes, said = late(60.0, "works")
    assert codes == [0, 0] and all("met 2" in one for one in said), said
    codes, said = late(2.0, "hangs")
    assert codes[0] == 1 and "the first sum on GPUs" in said[0], said
    assert "found none of rank 1; " in said[0], said
