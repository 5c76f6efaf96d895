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
from pathlib import Path

import pytest

from harness.bucket.orders import stop_order
from harness.core.facts import (
    EpochLeft,
    EpochStarted,
    NoticeSeen,
    SessionStarted,
    SnapshotCommitted,
    WorkerFailed,
)
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from storage.tiers.tiers import chunks_of
from support import buckets
from support.nodes import EPOCHS_OF_ITS_OWN, SLOW
from support.worlds import TRAINER, history, newest

# Steps of a run that lasts until all is seen: a newcomer is let in once its workers have imported
# what they need, which takes a busy machine many seconds.
LONG = 300


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_member_that_goes_before_its_workers_begin_is_not_waited_for(nodes):
    """Told to go between the sealing of an epoch that names it and its own look at it."""
    from harness.bucket.layout import Member
    from harness.rendezvous.peer_connections import PeerConnections
    from harness.rendezvous.rendezvous import Rendezvous

    first = nodes.start(*SLOW, "--total", LONG, "--go", nodes.go)
    nodes.until(lambda: nodes.step() >= 10)
    lines = PeerConnections("m0002", "127.0.0.1")
    me = Member("m0002", "ready", 0, "127.0.0.1", lines.port, 29500, nproc=1, attempt=2)
    second = Rendezvous(open_store(str(nodes.run)), me, lines)
    second.start()
    # who looks is heard
    nodes.until(lambda: second.look() and any(e.world == 2 for e in nodes.facts(EpochStarted)))
    second.leave(end="")
    nodes.until(lambda: len(nodes.facts(EpochStarted)) == 3)
    # for this reason, and not after the half minute that a planned end may take
    assert "generation 2 is over: m0002 went before its workers began" in nodes.logs()
    nodes.go.touch()
    lines.close()
    assert first.wait(200) == 0, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["resize", "resize", "finished"]
    assert [e.reason for e in nodes.facts(EpochStarted)] == ["start", "grow", "shrink"]
    assert [r.step for r in history(nodes.run)] == list(range(1, LONG + 1))


def account_of(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables of an account of the store at `url`, which this process has too."""
    account = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    return account


@contextlib.contextmanager
def refusing(nodes, monkeypatch: pytest.MonkeyPatch, run: str, **env: str):
    """Yield an agent of the run of that name that has trained for ten steps at least when its bucket
    begins to say 403 to everybody, and the event that makes it do so. The tests' S3 keeps what
    earlier tests of this process put into it."""
    refuses = threading.Event()
    with buckets.moto(refuses) as url:
        account = account_of(url, monkeypatch)
        nodes.url = f"s3://my-bucket/{run}"
        flags = ("--total", 100, "--every", 10, "--sleep-s", 0.05, "--go", nodes.go)
        agent = nodes.start(*flags, env={**account, **env})
        nodes.until(lambda: nodes.step() >= 10)
        refuses.set()
        yield agent, refuses


@pytest.mark.proof
def test_a_spell_of_refusals_does_not_end_a_run(nodes, monkeypatch):
    """The bucket says 403 to everybody for a while, as with an expired token: training goes on,
    and what was made is committed later."""
    with refusing(nodes, monkeypatch, "run") as (agent, refuses):
        time.sleep(2.5)  # the agent asks for something every 2 s at most
        refuses.clear()
        assert agent.poll() is None, nodes.logs()
        nodes.go.touch()
        assert agent.wait(200) == 0, nodes.logs()
        assert [r.step for r in history(nodes.url)] == list(range(1, 101))
        assert [e.why for e in nodes.facts(EpochLeft)] == ["finished"]


@pytest.mark.proof
def test_credentials_that_are_gone_for_good_end_a_node(nodes, monkeypatch):
    """403 to everything, a listing included, for longer than STORAGE_PATIENCE_S: a node without a
    controller does not train on for nothing."""
    with refusing(nodes, monkeypatch, "gone", STORAGE_PATIENCE_S="3") as (agent, _):
        assert agent.wait(40) == 36, nodes.logs()
        assert "permission denied" in nodes.logs()


@pytest.mark.proof
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


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "times", "says"),
    [("", 3, "crash loop"), (" of {uuid.uuid4()}", 20, "20 generations in a row")],
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_bad_input_is_not_tried_again(nodes):
    nodes.start("--global-batch", 46)
    assert nodes.codes() == [35]
    assert len(nodes.facts(WorkerFailed)) == 1
    assert "multiple" in json.loads(open_store(str(nodes.run)).get("control/stop.json"))["reason"]


@pytest.mark.proof
def test_a_wrong_call_of_ours_is_not_tried_again(nodes, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import harness\nrun = harness.attach()\nfor step in run.steps([1, 2], total=2): pass\n"
    )
    nodes.start(script=script)
    assert nodes.codes() == [35], nodes.logs()
    assert len(nodes.facts(WorkerFailed)) == 1
    reason = json.loads(open_store(str(nodes.run)).get("control/stop.json"))["reason"]
    assert "wrong.py:3: Session.steps() missing" in reason and "'global_batch'" in reason


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_killed_uploader_costs_nothing(nodes):
    agent = nodes.start("--total", 80, "--every", 20, "--sleep-s", 0.05, "--patient")
    nodes.until(lambda: nodes.step() >= 20)
    first = children(agent, "harness.uploader.handoff")
    first[0].kill()
    nodes.until(lambda: children(agent, "harness.uploader.handoff") not in ([], first))
    assert nodes.codes() == [0], nodes.logs()
    assert {f.step for f in nodes.facts(SnapshotCommitted)} == {20, 40, 60, 80}
    assert [r.step for r in history(nodes.run)] == list(range(1, 81))


@pytest.mark.proof
def test_the_workers_die_with_their_agent(nodes):
    import psutil

    agent = nodes.start(*SLOW)
    nodes.until(lambda: nodes.step() >= 10)
    workers = psutil.Process(agent.pid).children(recursive=True)
    assert workers
    agent.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


@pytest.mark.proof
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

    assert command("snapshots", "take").returncode == 0
    nodes.until(lambda: nodes.step() > 0)
    before = nodes.step()
    ended = command("stop")
    assert ended.returncode == 0, ended.stderr
    assert nodes.codes() == [35]
    assert nodes.step() > before and f"Stopped at step {nodes.step()}" in ended.stdout


@pytest.mark.proof
def test_an_empty_stop_order_is_one(nodes):
    """`touch` is enough: the agent drains."""
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    open_store(str(nodes.run)).create("control/stop.json", b"")
    assert agent.wait(200) == 35, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["stopped"] and nodes.facts(
        SnapshotCommitted
    )[-1].why == "stop"


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_signal_to_every_process_of_a_node_is_for_the_agent(nodes):
    """What systemd does at shutdown, and Slurm at the end of a job."""
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    for process in [*children(agent, "harness."), *workers(agent), agent]:
        process.send_signal(signal.SIGTERM)
    assert agent.wait(200) == 33, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["drained"]
    assert nodes.facts(SnapshotCommitted)[-1].why == "notice"


@pytest.mark.proof
def test_a_controller_may_release_a_node(nodes):
    agent = nodes.start("--total", 100_000, "--every", 20, "--sleep-s", 0.02)
    nodes.until(lambda: nodes.step() >= 20)
    open_store(str(nodes.run)).create("control/leave-000001.json", b"{}")
    assert agent.wait(200) == 33, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["drained"]


@pytest.mark.proof
def test_a_lost_nodes_share_is_still_near(nodes):
    """Two nodes save shares of a snapshot and keep each other's; when one is lost, and the other's
    worker with it, the new one reads nothing from the bucket."""
    peers = ("--set", "peer_tier=memory", "--set", "peer_encrypt=true")
    flags, stages = (
        ("--total", 200, "--every", 1000, "--sleep-s", 0.03, "--go", nodes.go),
        [nodes.run.parent / f"stage{i}" for i in range(2)],
    )
    for stage in stages:
        nodes.start(
            *flags, agent=("--min-nodes", "2", *peers, "--set", f"stage_dir={stage}")
        )
    nodes.until(lambda: nodes.facts(SessionStarted))
    nodes.processes[0].send_signal(signal.SIGUSR1)
    nodes.until(lambda: newest(nodes.run))
    chunks = chunks_of([newest(nodes.run)])
    nodes.until(
        lambda: chunks <= {path.name for stage in stages for path in stage.glob("*/near/chunks/*")}
    )
    for worker in workers(nodes.processes[0]):  # else it keeps its state, and nothing is read
        worker.kill()
    os.killpg(nodes.processes[1].pid, signal.SIGKILL)
    nodes.start(
        *flags, agent=(*peers, "--set", f"stage_dir={nodes.run.parent / 'stage2'}")
    )
    nodes.until(lambda: [s for s in nodes.facts(SessionStarted) if s.resumed_step and s.world == 2])
    nodes.go.touch()
    codes = nodes.codes()
    assert (codes[0], codes[2]) == (0, 0), nodes.logs()
    resumed = [s for s in nodes.facts(SessionStarted) if s.resumed_step]
    assert resumed and resumed[-1].world == 2 and resumed[-1].tier == "memory", resumed


@pytest.mark.proof
def test_a_node_that_comes_back_reads_its_disk(nodes, tmp_path):
    flags = ("--total", 200, "--every", 1000, "--sleep-s", 0.03, "--go", nodes.go)
    disk = ("--set", "disk_tier_gib=0.1", "--set", f"disk_tier_dir={tmp_path / 'nvme'}")
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
    "flags", [("--set", "peer_tier=disk"), ("--set", "peer_tier=yes"), ("--set", "peer_tier=off", "--set", "peer_encrypt=true"), ("--set", "disk_tier_gib=-1")]
)
def test_tiers_that_make_no_sense_are_refused(nodes, flags):
    agent = nodes.start(*SLOW, agent=flags)
    assert agent.wait(200) not in (0, 33)
    assert "_tier" in nodes.logs()


def test_nobody_waits_for_nodes_that_have_all_ended(nodes):
    """A run that trains to its end while a test waits for something else of it fails the test at
    once, with the nodes' logs."""
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(33)"])
    assert ended.wait(60) == 33
    nodes.until(lambda: True)  # no node is needed for what is true
    nodes.processes.append(ended)
    nodes.until(lambda: True)
    with pytest.raises(AssertionError, match=r"every node has ended, with \[33\]"):
        nodes.until(lambda: False, timeout_s=5)
