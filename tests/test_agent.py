"""The agent with real workers: exit codes, notices, losses, crash loops, scripts without a
session."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import buckets
import pytest
from worlds import TRAINER, history, newest, until

from harness.bucket.journal import read_facts
from harness.bucket.orders import stop_order
from harness.clouds.azure_events import AzureScheduledEvents
from harness.clouds.metadata import MetadataServer, environment_of
from harness.core.facts import (
    AgentStarted,
    EpochLeft,
    EpochStarted,
    NoticeAcknowledged,
    NoticeCancelled,
    NoticeSeen,
    SessionStarted,
    SnapshotCommitted,
    WorkerFailed,
)
from harness.views.audit import audit
from storage.opening import open_store
from storage.snapshots import Snapshots
from storage.tiers import chunks_of


class Nodes:
    """Agents as processes; whatever is left is killed at the end of the test."""

    def __init__(self, run):
        self.run, self.url, self.processes = run, str(run), []
        self.go = run.parent / "go"  # see --go of tests/trainer.py

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
        until(condition, self.logs, timeout_s, every_s=0.1)

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
# Steps of a run that lasts until all is seen: a newcomer is let in once its workers have imported
# what they need, which takes a busy machine many seconds.
LONG = 300


def test_join_notice_and_loss(nodes):
    """One node, a second joins, one is told to go, a third joins and vanishes; the run goes on."""
    flags = (*SLOW, "--total", LONG, "--go", nodes.go)
    first = nodes.start(*flags)
    nodes.until(lambda: nodes.step() >= 10)
    second = nodes.start(*flags)
    nodes.until(
        lambda: any(e.world == 2 for e in nodes.facts(SessionStarted)) and nodes.step() >= 30
    )
    second.send_signal(signal.SIGTERM)
    assert second.wait(200) == 33
    nodes.until(lambda: any(e.epoch == 3 for e in nodes.facts(EpochStarted)))
    third = nodes.start(*flags)
    nodes.until(
        lambda: (
            any(e.world == 2 and e.epoch > 3 for e in nodes.facts(SessionStarted))
            and nodes.step() >= 70
        )
    )
    os.killpg(third.pid, signal.SIGKILL)
    nodes.until(lambda: any(e.epoch == 5 for e in nodes.facts(EpochStarted)))
    nodes.go.touch()
    assert first.wait(200) == 0, nodes.logs()
    reasons = [e.reason for e in nodes.facts(EpochStarted)]
    assert reasons == ["start", "grow", "shrink", "grow", "loss"]
    assert nodes.facts(NoticeSeen)[0].source == "signal"
    records = history(nodes.run)
    assert [r.step for r in records] == list(range(1, LONG + 1))
    assert {r.world for r in records} == {1, 2}


def test_a_member_that_goes_before_its_workers_begin_is_not_waited_for(nodes):
    """Told to go between the sealing of an epoch that names it and its own look at it."""
    from harness.agent.lines import Lines
    from harness.agent.rendezvous import Rendezvous
    from harness.bucket.layout import Member

    first = nodes.start(*SLOW, "--total", LONG, "--go", nodes.go)
    nodes.until(lambda: nodes.step() >= 10)
    lines = Lines("m0002", "127.0.0.1")
    me = Member("m0002", "ready", 0, "127.0.0.1", lines.port, 29500, nproc=1, attempt=2)
    second = Rendezvous(open_store(str(nodes.run)), me, lines)
    second.start()
    # who looks is heard
    nodes.until(lambda: second.look() and any(e.world == 2 for e in nodes.facts(EpochStarted)))
    second.leave(end="")
    nodes.until(lambda: len(nodes.facts(EpochStarted)) == 3)
    # for this reason, and not after the half minute that a planned end may take
    assert "epoch 2 is over: m0002 went before its workers began" in nodes.logs()
    nodes.go.touch()
    lines.close()
    assert first.wait(200) == 0, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["resize", "resize", "finished"]
    assert [e.reason for e in nodes.facts(EpochStarted)] == ["start", "grow", "shrink"]
    assert [r.step for r in history(nodes.run)] == list(range(1, LONG + 1))


def test_a_spell_of_refusals_does_not_end_a_run(nodes, monkeypatch):
    """The bucket says 403 to everybody for a while, as with an expired token: training goes on,
    and what was made is committed later."""
    refuses = threading.Event()
    with buckets.moto(refuses) as url:
        account = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        for name, value in account.items():
            monkeypatch.setenv(name, value)
        nodes.url = "s3://my-bucket/run"
        flags = ("--total", 100, "--every", 10, "--sleep-s", 0.05, "--go", nodes.go)
        agent = nodes.start(*flags, env=account)
        nodes.until(lambda: nodes.step() >= 10)
        refuses.set()
        time.sleep(2.5)  # the agent asks for something every 2 s at most
        refuses.clear()
        assert agent.poll() is None, nodes.logs()
        nodes.go.touch()
        assert agent.wait(200) == 0, nodes.logs()
        assert [r.step for r in history(nodes.url)] == list(range(1, 101))
        assert [e.why for e in nodes.facts(EpochLeft)] == ["finished"]


def test_a_script_that_keeps_failing_is_stopped_with_its_words(nodes):
    nodes.start("--fail-at", 12, "--every", 10, "--patient")
    assert nodes.codes() == [35]
    stop = json.loads(open_store(str(nodes.run)).get("control/stop.json"))
    assert (
        stop["failed"] is True
        and "crash loop" in stop["reason"]
        and "planned failure at step 12" in stop["reason"]
    )
    failures = nodes.facts(WorkerFailed)
    assert len(failures) == 3 and all(
        "ValueError" in f.error and "planned failure" in f.log_tail for f in failures
    )
    assert nodes.step() == 10


@pytest.mark.parametrize(
    ("text", "times", "says"),
    [("", 3, "crash loop"), (" of {uuid.uuid4()}", 20, "20 epochs in a row")],
)
def test_words_of_a_lost_peer_prove_nothing_where_nobody_is_lost(
    nodes, tmp_path, text, times, says
):
    """One node, one rank: nobody else can have failed. Nor is a failure whose words are new
    each time tried for ever."""
    script = tmp_path / "reads.py"
    script.write_text(
        f"import uuid\nraise RuntimeError(f'Read error{text}: NCCL timed out after 30 s, "
        "Connection closed by peer')\n"
    )
    nodes.start(script=script)
    assert nodes.codes() == [35], nodes.logs()
    assert [(f.rank, f.error) for f in nodes.facts(WorkerFailed)] == [(0, "RuntimeError")] * times
    stop = json.loads(open_store(str(nodes.run)).get("control/stop.json"))
    assert stop["failed"] is True and says in stop["reason"] and "Read error" in stop["reason"]


def test_of_two_ranks_only_the_one_that_failed_first_is_to_blame(nodes, tmp_path):
    """Its words are those of a lost peer; the other's as well, and they are true."""
    script = tmp_path / "two.py"
    script.write_text(
        "import os, torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\nx = "
        "torch.ones(1)\ndist.all_reduce(x)\n"
        "if os.environ['RANK'] == '1':\n    raise RuntimeError('Read error: the tape is "
        "torn')\ndist.all_reduce(x)\n"
    )
    nodes.start(script=script, agent=("--nproc", "2"))
    assert nodes.codes() == [35], nodes.logs()
    failed = nodes.facts(WorkerFailed)
    assert {(f.rank, f.error) for f in failed} == {(0, "PeerLost"), (1, "RuntimeError")} and len(
        failed
    ) == 6
    assert (
        "the tape is torn"
        in json.loads(open_store(str(nodes.run)).get("control/stop.json"))["reason"]
    )


def test_bad_input_is_not_tried_again(nodes):
    nodes.start("--global-batch", 46)
    assert nodes.codes() == [35]
    assert len(nodes.facts(WorkerFailed)) == 1
    assert "multiple" in json.loads(open_store(str(nodes.run)).get("control/stop.json"))["reason"]


def test_a_world_that_is_too_big_is_made_smaller(nodes):
    """What a step has work for is known from run.json, which the first epoch writes."""
    for _ in range(3):
        nodes.start(
            *("--total", 60, "--every", 10, "--sleep-s", 0.02),
            *("--global-batch", 16, "--micro-batch", 8),
            agent=("--min-nodes", "3"),
        )
    assert nodes.codes() == [0, 0, 0] and not nodes.facts(WorkerFailed)
    first, second = nodes.facts(EpochStarted)[:2]
    assert (len(first.members), len(second.members)) == (3, 2)


def children(agent, module):
    import psutil

    found = []
    for child in psutil.Process(agent.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            found += [child] if module in " ".join(child.cmdline()) else []
    return found


def workers(agent):
    import psutil

    return [
        p
        for p in psutil.Process(agent.pid).children(recursive=True)
        if p.name().startswith("rank-")
    ]


def test_a_killed_worker_comes_back_from_memory(nodes):
    # from step 51 on a step takes 0.3 s: the next snapshot is far away
    agent = nodes.start("--total", 100, "--every", 40, "--sleep-s", 0.01, "--go", nodes.go)
    nodes.until(lambda: nodes.step() >= 40 and nodes.facts(SessionStarted))
    workers(agent)[0].kill()
    nodes.go.touch()
    assert nodes.codes() == [0], nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["killed", "finished"]
    first, second = nodes.facts(SessionStarted)
    assert (first.tier, second.tier, second.resumed_step) == ("bucket", "memory", 40)
    assert [r.step for r in history(nodes.run)] == list(range(1, 101))


def test_a_killed_uploader_costs_nothing(nodes):
    agent = nodes.start("--total", 80, "--every", 20, "--sleep-s", 0.05, "--patient")
    nodes.until(lambda: nodes.step() >= 20)
    first = children(agent, "harness.uploader.server")
    first[0].kill()
    nodes.until(lambda: children(agent, "harness.uploader.server") not in ([], first))
    assert nodes.codes() == [0], nodes.logs()
    assert {f.step for f in nodes.facts(SnapshotCommitted)} == {20, 40, 60, 80}
    assert [r.step for r in history(nodes.run)] == list(range(1, 81))


def test_the_workers_die_with_their_agent(nodes):
    import psutil

    agent = nodes.start(*SLOW)
    nodes.until(lambda: nodes.step() >= 10)
    workers = psutil.Process(agent.pid).children(recursive=True)
    assert workers
    agent.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_stop_drains_everybody_and_a_request_makes_a_snapshot(nodes):
    nodes.start("--total", 2000, "--every", 5000, "--sleep-s", 0.02)
    nodes.until(
        lambda: (
            any(True for _ in nodes.facts(EpochStarted))
            and open_store(str(nodes.run)).list("facts/worker")
        )
    )

    def command(*words):
        return subprocess.run(
            [sys.executable, "-m", "harness.cli", *words, str(nodes.run)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert command("snapshot").returncode == 0
    nodes.until(lambda: nodes.step() > 0)
    before = nodes.step()
    ended = command("stop")
    assert ended.returncode == 0, ended.stderr
    assert nodes.codes() == [35]
    assert nodes.step() > before and f"Stopped at step {nodes.step()}" in ended.stdout


def test_an_empty_stop_order_is_one(nodes):
    """`touch` is enough: the agent drains."""
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    open_store(str(nodes.run)).create("control/stop.json", b"")
    assert agent.wait(200) == 35, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["stopped"] and nodes.facts(
        SnapshotCommitted
    )[-1].why == "stop"


@pytest.mark.parametrize("how", ["signal", "file"])
def test_an_unchanged_script_hears_of_notices(nodes, tmp_path, how):
    """The shallowest integration: no line of ours in the script."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "def save(*_):\n    (here / 'saved').write_text('yes'); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n(here / 'up').touch()\n"
        "while True:\n    time.sleep(0.05)\n    if 'file' in sys.argv and "
        "os.path.exists(os.environ['HARNESS_MARK']): save()\n"
    )
    agent = nodes.start(
        how, script=script, agent=("--notify-signal", "USR1") if how == "signal" else ()
    )
    nodes.until((tmp_path / "up").exists)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(200) == 33, nodes.logs()
    assert (tmp_path / "saved").read_text() == "yes"


def test_every_node_of_an_unchanged_script_hears_of_every_change(nodes, tmp_path):
    """Of a node that comes, of one that goes; and who does not end is ended."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "here, me = pathlib.Path(__file__).parent, os.environ['GROUP_RANK']\n"
        "world = os.environ['WORLD_SIZE']\n"
        "def save(*_):\n"
        "    (here / f'saved-{world}-{me}').touch()\n"
        "    if world == '2' and me == '0': return\n"  # deaf, from here on
        "    sys.exit(int(me))\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "(here / f'up-{world}-{me}').touch()\n"
        "while not (here / 'done').exists(): time.sleep(0.05)\n"
    )
    agent = ("--notify-signal", "USR1", "--grace-s", "3")
    nodes.start(script=script, agent=agent)
    nodes.until((tmp_path / "up-1-0").exists)
    second = nodes.start(script=script, agent=agent)
    nodes.until((tmp_path / "up-2-0").exists)
    nodes.until((tmp_path / "up-2-1").exists)
    assert (tmp_path / "saved-1-0").exists()
    (tmp_path / "up-1-0").unlink()
    second.send_signal(signal.SIGTERM)
    nodes.until((tmp_path / "up-1-0").exists)  # the other has made a world of its own
    assert (tmp_path / "saved-2-0").exists() and (tmp_path / "saved-2-1").exists()
    (tmp_path / "done").touch()
    assert nodes.codes() == [0, 33], nodes.logs()
    why = [f.why for f in nodes.facts(EpochLeft)]
    assert sorted(why) == ["drained", "finished", "resize", "resize"], why
    assert "was told 3 s ago" in nodes.logs()


def test_an_unchanged_script_that_ends_well_finishes_the_run(nodes, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello from', __import__('os').environ['RANK'])\n")
    nodes.start(script=script, agent=("--nproc", "2"))
    assert nodes.codes() == [0]
    assert "[0] hello from 0" in nodes.logs() and newest(nodes.run).data["final"] is True
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation


def test_a_snapshot_of_its_own_at_step_0_is_not_in_the_way(nodes, tmp_path):
    """Made by an unchanged script through storage, under the very name that an empty one would
    have."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os\nfrom storage import Ref, Snapshots, open_store\n"
        "s = Snapshots(open_store(os.environ['HARNESS_RUN']))\nref = "
        "Ref(int(os.environ['HARNESS_EPOCH']), 0)\n"
        "s.write(ref, 0, 1, {'own': b'weights'}, {}, {'mine': 1}, 'own')\ns.commit(ref, 1)\n"
    )
    nodes.start(script=script)
    assert nodes.codes() == [0]
    manifest, snapshots = newest(nodes.run), Snapshots(open_store(nodes.url))
    assert manifest.data["mine"] == 1 and snapshots.ended(manifest) == "the script exited 0"


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


def test_a_run_ends_with_its_script_and_nobody_starts_after_that(nodes, tmp_path):
    """`run.steps` once per epoch: the first loop's last step is safe, and is not the end. A
    node that waits then leaves with 0."""
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS_OF_ITS_OWN)
    snapshots = Snapshots(open_store(nodes.url))
    agent = nodes.start(tmp_path, script=script)
    nodes.until(lambda: nodes.step() == 2)
    assert not snapshots.ended(newest(nodes.run))
    (tmp_path / "go2").touch()
    nodes.until(lambda: nodes.step() == 4)
    assert not snapshots.ended(newest(nodes.run))
    # it is let in by nobody
    waiting = nodes.start(tmp_path, script=script, agent=("--min-nodes", "2"))
    nodes.until(lambda: len(nodes.facts(AgentStarted)) == 2)
    (tmp_path / "go4").touch()
    assert agent.wait(200) == 0, nodes.logs()
    assert snapshots.ended(newest(nodes.run)) == "step 4 of 4 is the last"
    assert waiting.wait(200) == 0, nodes.logs()
    assert nodes.start(tmp_path, script=script).wait(200) == 0, nodes.logs()
    assert [e.epoch for e in nodes.facts(EpochStarted)] == [1]
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation


def test_a_script_that_leaves_without_a_word_is_not_started_for_ever(nodes, tmp_path):
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS_OF_ITS_OWN + "import os\nos._exit(0)\n")
    for total in (2, 4):
        (tmp_path / f"go{total}").touch()
    nodes.start(tmp_path, script=script)
    assert nodes.codes() == [35]
    assert [e.why for e in nodes.facts(EpochLeft)] == ["unfinished"]
    order = stop_order(open_store(nodes.url))
    assert order.failed and "run.finish()" in order.reason and nodes.step() == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--run", "x"], "no script"),
        (["run", "--", "train.py"], "no run URL"),
        (["run", "--run", "x", "--", "nothere.py"], "no such file"),
        (["run", "--run", "x", "--nproc", "many", "--", TRAINER], "wanted a number or auto"),
        (["run", "--run", "x", "--worlds", "1,two", "--", TRAINER], "numbers of ranks, such as"),
        (
            ["run", "--run", "x", "--nproc", "4", "--worlds", "1,2", "--", TRAINER],
            "all would wait for ever",
        ),
        (["run", "--run", "/proc/nothing/here", "--", TRAINER], "check the path"),
        (["status", "nowhere"], "there is no run here"),
    ],
)
def test_bad_commands_say_what_to_do(tmp_path, words, says):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")}
    command = [sys.executable, "-m", "harness.cli", *words]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environ
    )
    assert ended.returncode in (1, 2)
    assert says in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not Path(tmp_path / "x" / "rdzv").exists()


def test_a_machine_that_azure_takes(nodes):
    """A pause, an end known long before and taken back, the end: each has its own answer, and
    Azure is told when we have gone."""
    vm = AzureScheduledEvents("vm-1")
    with contextlib.closing(MetadataServer(vm)) as server:
        agent = nodes.start(
            "--total",
            100_000,
            "--every",
            50_000,
            "--sleep-s",
            0.02,
            env=environment_of("azure", server.endpoint),
        )
        nodes.until(lambda: nodes.facts(SessionStarted))
        store = open_store(str(nodes.run))
        pause = vm.notice("soft", time.time() + 900)
        nodes.until(lambda: nodes.facts(SnapshotCommitted))
        assert not store.list("control/doubt")  # it stays where it is
        vm.cancel(pause)
        move = vm.notice("maintenance", time.time() + 3600)
        nodes.until(lambda: any(f.id == move for f in nodes.facts(NoticeSeen)))
        assert not store.list("control/doubt")
        vm.change(move, NotBefore=formatdate(time.time() + 600, usegmt=True))
        nodes.until(lambda: store.list("control/doubt"))
        assert store.list("control/doubt") == ["control/doubt-000001.json"]
        vm.cancel(move)
        nodes.until(lambda: not store.list("control/doubt"))
        assert agent.poll() is None
        before = nodes.step()
        kill = vm.notice("kill", time.time() + 30)
        assert agent.wait(200) == 33, nodes.logs()
        # another node is looked for at the notice, not at the end
        assert store.list("control/doubt")
    assert vm.acknowledged == [kill]
    facts = list(read_facts(store))
    (told_s,) = [s.t for s in facts if isinstance(s.fact, NoticeAcknowledged) and s.fact.heard]
    committed = [s for s in facts if isinstance(s.fact, SnapshotCommitted)]
    assert committed[-1].fact.why == "notice" and committed[-1].fact.step == nodes.step() > before
    assert committed[-1].t <= told_s
    assert {f.id for f in nodes.facts(NoticeCancelled)} == {pause, move}


def test_a_signal_to_every_process_of_a_node_is_for_the_agent(nodes):
    """What systemd does at shutdown, and Slurm at the end of a job."""
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    for process in [*children(agent, "harness."), *workers(agent), agent]:
        process.send_signal(signal.SIGTERM)
    assert agent.wait(200) == 33, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["drained"]
    assert nodes.facts(SnapshotCommitted)[-1].why == "notice"


def test_a_controller_may_release_a_node(nodes):
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    open_store(str(nodes.run)).create("control/leave-000001.json", b"{}")
    assert agent.wait(200) == 33, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["drained"]


def test_a_lost_nodes_share_is_still_near(nodes):
    """Two nodes save shares of a snapshot and keep each other's; when one is lost the other
    reads nothing from the bucket."""
    peers = ("--peer-tier", "memory", "--peer-encrypt")
    flags, stages = (
        ("--total", 200, "--every", 1000, "--sleep-s", 0.03, "--go", nodes.go),
        [nodes.run.parent / f"stage{i}" for i in range(2)],
    )
    for stage in stages:
        nodes.start(
            *flags, agent=("--min-nodes", "2", *peers, "--stage-dir", str(stage))
        )
    nodes.until(lambda: nodes.facts(SessionStarted))
    nodes.processes[0].send_signal(signal.SIGUSR1)
    nodes.until(lambda: newest(nodes.run))
    chunks = chunks_of([newest(nodes.run)])
    nodes.until(
        lambda: chunks <= {path.name for stage in stages for path in stage.glob("*/near/chunks/*")}
    )
    os.killpg(nodes.processes[1].pid, signal.SIGKILL)
    nodes.start(
        *flags, agent=(*peers, "--stage-dir", str(nodes.run.parent / "stage2"))
    )
    nodes.until(lambda: [s for s in nodes.facts(SessionStarted) if s.resumed_step and s.world == 2])
    nodes.go.touch()
    codes = nodes.codes()
    assert (codes[0], codes[2]) == (0, 0), nodes.logs()
    resumed = [s for s in nodes.facts(SessionStarted) if s.resumed_step]
    assert resumed and resumed[-1].world == 2 and resumed[-1].tier == "memory", resumed


def test_a_node_that_comes_back_reads_its_disk(nodes, tmp_path):
    flags = ("--total", 200, "--every", 1000, "--sleep-s", 0.03, "--go", nodes.go)
    disk = ("--disk-tier-gib", "0.1", "--disk-tier-dir", str(tmp_path / "nvme"))
    nodes.start(*flags, agent=disk)
    nodes.until(lambda: nodes.facts(SessionStarted))
    nodes.processes[0].send_signal(signal.SIGUSR1)
    nodes.until(lambda: newest(nodes.run))
    chunks = chunks_of([newest(nodes.run)])
    nodes.until(lambda: chunks <= {path.name for path in (tmp_path / "nvme").glob("*/chunks/*")})
    os.killpg(nodes.processes[0].pid, signal.SIGKILL)
    nodes.processes[0].wait(200)
    nodes.go.touch()
    nodes.start(*flags, agent=disk)
    assert nodes.codes()[1] == 0, nodes.logs()
    assert [s.tier for s in nodes.facts(SessionStarted)][1:] == ["disk"]


@pytest.mark.parametrize(
    "flags", [("--peer-tier", "disk"), ("--peer-tier", "yes"), ("--peer-tier", "off", "--peer-encrypt"), ("--disk-tier-gib", "-1")]
)
def test_tiers_that_make_no_sense_are_refused(nodes, flags):
    agent = nodes.start(*SLOW, agent=flags)
    assert agent.wait(200) not in (0, 33)
    assert "peer-tier" in nodes.logs() or "GiB" in nodes.logs()
