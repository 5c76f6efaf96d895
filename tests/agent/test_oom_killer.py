"""The kernel's OOM killer: its counters as control groups of both versions show them, and a worker
that it really kills where this machine lets a test make such a group."""

import contextlib
import os
from pathlib import Path

import pytest

from harness.agent.oom_killer import OomKiller
from harness.core.facts import OOM_KILLED, EpochLeft, WorkerFailed
from support import hungry_trainer
from support.worlds import history

PODS = "kubepods/pod7"


def a_machine(root: Path, group: str, files: dict[str, str]) -> OomKiller:
    """A machine whose /proc/self/cgroup says `group`, with these files."""
    about = {"proc/self/cgroup": group, "proc/meminfo": "MemTotal: 2000000 kB\nMemFree: 1 kB\n"}
    for name, text in {**about, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return OomKiller(root)


V1 = "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom {0}\noom_kill {0}\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {0}\n"


@pytest.mark.parametrize(
    ("group", "counter", "text", "limits", "says"),
    [
        (
            f"0::/{PODS}\n",
            f"sys/fs/cgroup/{PODS}/memory.events",
            EVENTS,
            {f"{PODS}/memory.max": "max", "kubepods/memory.max": "1500000000"},
            "the limit of its control group is 1.5 GB, memory.max",
        ),
        (  # the path is the host's, the container sees its own group only
            f"0::/{PODS}\n",
            "sys/fs/cgroup/memory.events",
            EVENTS,
            {"memory.max": "300000000"},
            "the limit of its control group is 300 MB, memory.max",
        ),
        (
            V1,
            "sys/fs/cgroup/memory/job/memory.oom_control",
            CONTROL,
            {"memory/job/memory.limit_in_bytes": "300000000"},
            "the limit of its control group is 300 MB, memory.limit_in_bytes",
        ),
        (
            V1,
            "sys/fs/cgroup/memory/memory.oom_control",
            CONTROL,
            {"memory/memory.limit_in_bytes": "9223372036854771712"},
            "its control group has no limit, the machine has 2.0 GB",
        ),
        (
            "0::/\n",
            "proc/vmstat",
            "pgfault 7\noom_kill {0}\n",
            {},
            "its control group has no limit, the machine has 2.0 GB",
        ),
    ],
)
def test_a_kill_since_the_workers_began_is_told_with_the_limit(
    tmp_path, group, counter, text, limits, says
):
    files = {f"sys/fs/cgroup/{name}": limit for name, limit in limits.items()}
    killer = a_machine(tmp_path, group, {**files, counter: text.format(3)})
    assert killer.said() == ""  # nobody has begun to count
    killer.begin()
    assert killer.said() == ""  # three of before
    (tmp_path / counter).write_text(text.format(4))
    assert killer.said() == f"killed by the kernel's OOM killer: memory ran out ({says})"
    killer.begin()
    assert killer.said() == ""


@pytest.mark.parametrize("files", [{}, {"proc/vmstat": "oom_kill many\n"}, {"proc/vmstat": ""}])
def test_where_no_counter_can_be_read_nothing_is_claimed(tmp_path, files):
    for killer in (OomKiller(tmp_path / "none"), a_machine(tmp_path, "nonsense\n", files)):
        killer.begin()
        assert killer.said() == ""


@pytest.fixture
def limited():
    """A control group of 1.2 GB for memory, of version 1 or 2; it is removed at the end."""
    name, found = f"harness-test-{os.getpid()}", None
    for place, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / place / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text("1200000000")
                found = group
                break
            group.rmdir()
    if found is None:
        pytest.skip("this machine lets nobody make a control group with a limit of memory")
    yield found
    with contextlib.suppress(OSError):  # of a process that is still ending
        found.rmdir()


@pytest.mark.proof
def test_a_worker_that_the_kernel_kills_is_told_from_one_that_somebody_killed(nodes, limited):
    agent = nodes.start(
        *("--most", 2, "--at", 3, "--how", "kernel"),
        script=hungry_trainer.__file__,
        agent=("--set", "peer_tier=off", "--set", "oom=halve"),
    )
    (limited / "cgroup.procs").write_text(str(agent.pid))  # before it starts anything
    assert nodes.codes() == [0], nodes.logs()
    (failed,) = nodes.facts(WorkerFailed)
    assert (failed.rank, failed.exit_code, failed.error) == (0, -9, OOM_KILLED), nodes.logs()
    assert "memory ran out (the limit of its control group is 1.2 GB, memory." in failed.message
    assert [e.why for e in nodes.facts(EpochLeft)] == ["killed", "finished"]
    assert [r.micro_batch for r in history(nodes.run)] == [2] * hungry_trainer.TOTAL
