"""The warm process, with real forks of real scripts."""

import json
import os
import signal
import subprocess
import sys

import pytest

import harness.node.forkserver
from harness.node.forkserver import ForkServerClient
from harness.node.heartbeat import process_state
from support.worlds import until


@pytest.fixture(scope="module")
def env():
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def shared(env):
    nursery = ForkServerClient(env)
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(env):
    """One to be broken."""
    nursery = ForkServerClient(env)
    yield nursery
    nursery.close()


@pytest.fixture
def start(request, tmp_path):
    nursery = request.getfixturevalue("nursery" if "nursery" in request.fixturenames else "shared")

    def start(text, rank=0, **more):
        script = tmp_path / f"script{rank}.py"
        script.write_text(text)
        order = {
            "env": {
                "RANK": str(rank),
                "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
                **more,
            },
            "argv": [str(script), "a"],
        }
        return nursery.fork(order)

    return start


def test_a_script_finds_what_a_process_of_its_own_would_have(start):
    """One that was asked for before the warm process is warm; each fork has its own streams,
    environment, random numbers, session."""
    text = (
        "import os, random, sys, numpy, signal, torch\n"
        "print(__name__, sys.argv[1], os.environ['MINE'], os.path.dirname(__file__) == "
        "sys.path[0], sys.stdin.read())\n"
        "print(os.getsid(0) == os.getpid())\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, torch.initial_seed(), "
        "len(os.listdir('/proc/self/fd')) < 8)\n"
        "print(random.random(), numpy.random.random())\n"
        "sys.exit(int(os.environ['MINE']))\n"
    )
    first, second = (start(text, rank, MINE=str(rank + 3)) for rank in range(2))
    said = [out.read().decode().splitlines() for _, out in (first, second)]
    assert [process.wait(60) for process, _ in (first, second)] == [3, 4]
    seed = said[0][2].split()[1]
    assert [s[0].strip() for s in said] == ["__main__ a 3 True", "__main__ a 4 True"]
    assert [s[1:3] for s in said] == [["True", f"True {seed} True"]] * 2
    assert set(said[0][3].split()).isdisjoint(said[1][3].split())


def test_an_exception_is_written_where_torchrun_would_write_it(start, tmp_path):
    process, out = start("raise ValueError('no such thing')")
    assert process.wait(60) == 1
    assert json.loads((tmp_path / "error.json").read_text())["message"]["type"] == "ValueError"
    assert "ValueError: no such thing" in out.read().decode()


def test_a_lost_peer_is_one_line_and_its_traceback_a_file(start, tmp_path):
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    process, out = start(
        f"raise RuntimeError({gloo!r})", HARNESS_MARK=str(tmp_path / "mark.json"), LOCAL_RANK="1"
    )
    assert process.wait(60) == 1
    [line] = out.read().decode().splitlines()
    kept = tmp_path / "lost-peer-1.txt"
    assert line == f"harness: another rank is gone; where this one stood is in {kept}"
    assert "Traceback" in kept.read_text() and gloo in kept.read_text()
    # the agent judges by the whole of it
    assert gloo in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_an_end_by_a_signal_is_told_and_what_was_started_ends_too(start):
    process, out = start(
        "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); "
        "time.sleep(1000)"
    )
    child = int(out.readline())
    os.kill(child, 0)
    assert process.poll() is None
    process.kill(20.0)
    assert process.poll() == -signal.SIGKILL
    until(lambda: process_state(child) in ("", "Z"), within_s=60)
    process.send_signal(signal.SIGTERM)  # too late, and nobody else's


def test_when_the_warm_process_is_killed_all_count_as_killed(nursery, start):
    process, out = start("import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    pid = int(out.readline())
    assert nursery.warm() and not nursery.ended()
    nursery._process.kill()
    assert process.wait(20) == -signal.SIGKILL
    until(lambda: process_state(pid) in ("", "Z"), within_s=60)
    assert nursery.ended()
    late, out = start("print('never')")
    assert late.wait(20) == -signal.SIGKILL and out.read() == b""


def test_a_warm_process_that_stands_still_does_not_hold_up_the_end(nursery, start, monkeypatch):
    monkeypatch.setattr(harness.node.forkserver, "NO_MORE_S", 0.5)  # of five
    process, out = start("import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    out.readline()
    nursery._process.send_signal(signal.SIGSTOP)
    process.kill(20.0)
    assert process.poll() == -signal.SIGKILL and nursery.ended()


def test_workers_die_with_whoever_asked_for_them(env, tmp_path):
    """The agent is killed: nothing of it stays."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(1000)"
    )
    agent = (
        "import os, time; from harness.node.forkserver import ForkServerClient as Nursery\n"
        f"n = Nursery(os.environ); _, out = n.fork({{'env': {{}}, 'argv': ['{script}']}})\n"
        "print(out.readline().decode(), flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", agent], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        warm, worker = map(int, process.stdout.readline().split())
        process.kill()
    until(lambda: all(process_state(pid) in ("", "Z") for pid in (warm, worker)), within_s=60)


def test_where_cuda_was_touched_the_fork_begins_anew(env, tmp_path):
    """A site's own start-up code that initialises CUDA; torch's fork guard stands in for it, as
    there is no GPU."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.argv[:1] == ['-m'] and 'TOUCHED' not in os.environ:\n"
        "    os.environ['TOUCHED'] = '1'\n"
        "    import torch; torch.cuda._is_in_bad_fork = lambda: True\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(os.environ['RANK'], open('/proc/self/cmdline').read()[-2:-1]); "
        "sys.exit(5)"
    )
    nursery = ForkServerClient({**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"})
    process, out = nursery.fork({"env": {"RANK": "7"}, "argv": [str(script)]})
    assert process.wait(120) == 5
    assert out.read() == b"7 -\n"
    nursery.close()


STEPS = """
import sys
from pathlib import Path
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from harness.node.forkserver import notice_steps
mark, attaches = Path(sys.argv[1]), int(sys.argv[2])
notice_steps(mark, False)
seen = []
register_optimizer_step_post_hook(lambda *_: seen.append(1))  # a script's own
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
weight.grad = torch.ones(1)
for step in range(20):
    if step == attaches:
        mark.with_name("attached").touch()
    optimizer.step()
print(len(seen), mark.with_name("unadopted").exists())
"""


@pytest.mark.parametrize(("attaches", "unadopted"), [(-1, True), (0, False), (5, False)])
def test_steps_without_a_session_are_noticed_beside_hooks_of_the_script(
    tmp_path, attaches, unadopted
):
    command = [sys.executable, "-c", STEPS, str(tmp_path / "mark.json"), str(attaches)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["20", str(unadopted)]


TRAINS_ALONE = """
import os
import torch
if os.environ.get("GROUP"):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
weight.grad = torch.ones(1)
for step in range(20):
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"HARNESS_ADAPT": "auto", "WORLD_SIZE": "2"}, True),
        ({"HARNESS_ADAPT": "auto", "WORLD_SIZE": "1"}, False),
        ({"HARNESS_ADAPT": "none", "WORLD_SIZE": "2"}, False),
        ({"HARNESS_ADAPT": "auto", "WORLD_SIZE": "2", "GROUP": "1"}, False),
    ],
)
def test_workers_that_train_each_for_itself_are_refused(start, tmp_path, more, refused):
    process, out = start(TRAINS_ALONE, **more, HARNESS_MARK=str(tmp_path / "mark.json"))
    assert process.wait(60) == int(refused), out.read().decode()
    if refused:
        message = json.loads((tmp_path / "error.json").read_text())["message"]
        assert message["type"] == "BadInput"
        assert "2 workers, found that each trains for itself" in message["text"]
