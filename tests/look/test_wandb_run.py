"""W&B's own client against the loopback server: whatever is killed, doubled or redone, one run has
every committed step once, with the record's values, and the state that the run has."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.bucket.archive import read_facts
from harness.bucket.setup_objects import with_diff, write_setup
from harness.cli.publish import publisher_beside
from harness.clouds.sky_task import Task
from harness.core import facts
from harness.core.masking import masked_words
from harness.core.setup_record import GitState, Setup
from harness.look.reports.setup_report import LogbookEntry, write_note
from harness.look.trackers import wandb_run
from harness.look.trackers.committed_steps import committed
from harness.look.trackers.mlflow_run import MlflowRun
from harness.look.trackers.publisher import publisher_of, renderer_of, sync
from harness.look.trackers.tracker_registry import RunInfo, build
from harness.look.trackers.tracker_stream import every_row, newest_header
from harness.look.trackers.trackers import collect
from harness.look.trackers.wandb_api import Account
from harness.node import provenance
from storage.snapshots.manifest import Ref
from storage.stores.folder_store import FileStore, MemoryStore
from support.story import Story
from support.wandb_server import WandbServer
from support.wandb_sides import ledger_of, lines, states_of

wandb = pytest.importorskip("wandb", minversion="0.31")
# a client that dies leaves threads behind that say so
pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")]


@pytest.fixture
def server(monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(wandb_run, "CONFIRM_S", 2.0)
    with WandbServer() as server:
        yield server
        assert server.misunderstood == []
    wandb.teardown()


class Side:
    """One publisher, round by round."""

    def __init__(self, story, server, **changes):
        self.info = RunInfo.of(story.store)
        account = Account(True, server.key, server.url)
        self.writer = publisher_of(story.store, self.info, 0.0)
        self.writer.now = lambda: story.t
        self.wandb = renderer_of(account, self.writer, dict(os.environ))
        for name, value in changes.items():
            setattr(self.wandb, name, value)

    def round(self, last=False):
        self.writer.round(last)
        return self.wandb.round(last)

    def until_told(self, tries=5):
        """As the publisher's thread does it: a failure is told, and tried again. Ends the client,
        which else sends every 15 s only."""
        for _ in range(tries):
            try:
                self.writer.round()
                if self.wandb.round(last=True):
                    return
            except Exception:
                if tries == 1:
                    raise
                self.wandb.close()
        raise AssertionError("not told")

    def die(self):
        """As SIGKILL: W&B's own process dies, the claim stays."""
        for child in psutil.Process().children(recursive=True):
            if "wandb-core" in " ".join(child.cmdline()):
                child.kill()
                child.wait(60)
        with contextlib.suppress(Exception):
            wandb.teardown()


def check(story, server, run_id=None):
    """Each committed step once, in order, with the record's values; nothing overwritten."""
    (run,) = [r for n, r in server.runs.items() if run_id in (None, n)]
    records, _ = committed(story.store, RunInfo.of(story.store), 1, 10**6)
    found = [
        (row["train/step"], row["train/loss"], row["train/grad_norm"], row["_timestamp"])
        for row in run.history
        if "train/step" in row
    ]
    assert found == [(r.step, r.loss, r.metrics["grad_norm"], r.t) for r in records]
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    told = [{k: v for k, v in row.items() if not k.startswith("_")} for row in run.history]
    assert told == [row.values for row in every_row(story.store)]
    assert run.problems == []
    return run


def agrees(story, run):
    """The operations rows say what the ledger says."""
    ops = [row for row in run.history if "cost/usd_total" in row]
    for row in ops:  # every billed second is in one bucket, at every moment
        spent = [v for name, v in row.items() if re.fullmatch(r"goodput/\w+_s", name)]
        assert sum(spent) - row["goodput/billed_s"] == pytest.approx(row["goodput/billed_s"])
        usd = [v for name, v in row.items() if re.fullmatch(r"goodput/\w+_usd", name)]
        assert sum(usd) == pytest.approx(row["cost/usd_total"])
    last = ops[-1]
    ledger = ledger_of(story, last["time/unix"])
    assert last["cost/usd_total"] == ledger.usd
    assert last["goodput/fraction"] == ledger.goodput
    assert last["cost/saved_usd"] == pytest.approx(ledger.cost.saved_usd)
    assert {b: last[f"goodput/{b}_s"] for b in ledger.ns} == {
        b: spent / 1e9 for b, spent in ledger.ns.items()
    }
    times = [row["time/wall_s"] for row in ops]
    assert len(times) == len(set(times))
    return last


def publisher(url, server, *flags):
    """The real one, as the agent starts it."""
    env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key}
    env["PYTHONFAULTHANDLER"] = "1"  # see `ended`
    command = [sys.executable, "-m", "harness.look.trackers.trackers", url, "--trackers", "wandb"]
    return subprocess.Popen(
        [*command, "--min-batch-s", "0.5", *flags],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, within_s=240.0):
    """Its exit status, and what it said; where it hangs if it does."""
    try:
        _, said = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        _, said = process.communicate(timeout=60)
        pytest.fail(f"a publisher did not end within {within_s:g} s:\n{said}")
    return process.returncode, said


def wait_for(what, why, within_s=240.0):
    until_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until_s, why
        time.sleep(0.1)


def steps_at(server):
    return [
        r["train/step"] for run in server.runs.values() for r in run.history if "train/step" in r
    ]


def test_interruptions_resizes_quarantine_and_a_killed_publisher(server, tmp_path, monkeypatch):
    """With real processes: the key alone means online; state is right at every moment. MLflow,
    TensorBoard and W&B offline have the same in the end."""
    story = Story(FileStore((tmp_path / "run").as_uri()))
    story.first_half()
    url, stream = story.store.url, lambda: newest_header(story.store)
    with states_of(server) as states:
        one = publisher(url, server)
        wait_for(lambda: stream() and stream().last_step == 20 and server.runs, "steps 1-20")
        one.terminate()  # its node leaves
        code, said = ended(one)
        assert code == 0, said
        (run_id,) = server.runs
        check(story, server)
        story.spoiled()
        two = publisher(url, server)
        wait_for(lambda: steps_at(server)[-1:] == [26], "steps 21-26")
        two.kill()
        two.communicate()
        story.second_half()
        (claim,) = [k for k in story.store.list("trackers/wandb/") if k.endswith(".claim")]
        story.store.put(claim, b'{"by": "dead", "t": 0}')  # minutes later
        both = [publisher(url, server) for _ in range(2)]
        wait_for(lambda: stream().last_step == 36 and server.runs[run_id].rewinds, "redone steps")
        assert (states, server.runs[run_id].ends) == (["running"], [])
        story.finish()
        for process in both:
            code, said = ended(process)
            assert code == 0, said
        run = check(story, server)
        wait_for(lambda: states == ["running", "finished"], "its end")
        assert run.ends == [0] and run.rewinds and list(server.runs) == [run_id]
        # the bill comes later, from the controller
        story.closed()
        account = Account(True, server.key, server.url)
        for _ in range(3):
            assert sync(story.store, [account], dict(os.environ), 60.0) == []
    run = check(story, server)
    last = agrees(story, run)
    assert (run.ends, states[2:]) == ([0, 0], ["running", "finished"])  # no third end
    assert last["spot/interruptions"] == 5
    assert last["spot/resizes"] >= 3
    assert last["spot/notices"] == 1
    assert (last["ckpt/quarantined"], last["ckpt/step"]) == (1, 40)
    assert last["cost/usd_by_cloud/aws"] + last["cost/usd_by_cloud/gcp"] == pytest.approx(
        last["cost/usd_total"]
    )
    same_offline(story, run, tmp_path)
    same_elsewhere(story, run, tmp_path, monkeypatch)


def same_offline(story, run, tmp_path):
    """`--collect` writes one offline run; W&B's own `wandb sync` uploads it, to another server;
    `harness runs sync` finds nothing left to tell there, and doubles nothing."""
    command = [sys.executable, "-m", "harness.look.trackers.trackers", story.store.url]
    out = subprocess.run(
        [*command, "--collect", str(tmp_path / "out")], capture_output=True, text=True, timeout=240
    )
    assert out.returncode == 0, out.stderr
    (folder,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    with WandbServer() as other:
        env = {**os.environ, "WANDB_BASE_URL": other.url, "WANDB_API_KEY": other.key}
        words = [sys.executable, "-m", "wandb", "sync", "--project", "spotharness", str(folder)]
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        for _ in range(2):
            uploaded = check(story, other)
            assert (lines(uploaded), uploaded.name) == (lines(run), run.name)
            assert other.state(run.name) == "finished"
            assert uploaded.summary["best/val_loss"] == run.summary["best/val_loss"]
            account = Account(True, other.key, other.url)
            assert sync(story.store, [account], dict(os.environ), 60.0) == []
        assert other.misunderstood == []


def same_elsewhere(story, run, tmp_path, monkeypatch):
    """MLflow and TensorBoard, read back, say what W&B says."""
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert (
        sync(story.store, build("mlflow,tensorboard", {"MLFLOW_TRACKING_URI": uri}), {}, 60) == []
    )
    client = MlflowRun(story.store, RunInfo.of(story.store), uri).client
    (there,) = client.search_runs(["1"])
    assert there.info.status == "FINISHED"
    collect(story.store, tmp_path / "boards")
    boards = {}
    for which in ("train", "ops"):
        folder = str(tmp_path / "boards" / "tensorboard" / which)
        boards[which] = EventAccumulator(folder, size_guidance={"scalars": 0})
        boards[which].Reload()
    for name in (
        "train/loss",
        "val/loss",
        "cost/usd_total",
        "event/node_lost",
        "node/1/gpu0/watts",
    ):
        rows = [row for row in run.history if name in row]
        wanted = [(row["_timestamp"], row[name]) for row in rows]
        assert len(wanted) >= 3, name
        points = client.get_metric_history(there.info.run_id, name)
        found = sorted((p.timestamp / 1000, p.value) for p in points)
        assert found == [(pytest.approx(t, abs=1e-3), v) for t, v in sorted(wanted)], name
        which = "train" if name.startswith(("train", "val")) else "ops"
        told = sorted((e.wall_time, e.value) for e in boards[which].Scalars(name))
        assert told == [(pytest.approx(t), pytest.approx(v)) for t, v in sorted(wanted)], name


def test_wandb_that_does_not_rewind_gets_a_new_run(server):
    server.can_rewind = False
    story = Story()
    story.first_half(), story.spoiled()
    side = Side(story, server)
    side.until_told()
    (old,) = server.runs
    story.second_half(), story.finish(), story.closed()
    side.until_told()
    assert side.round(last=True)
    side.wandb.close()
    (new,) = set(server.runs) - {old}
    check(story, server, new)
    assert (server.state(old), server.state(new)) == ("killed", "finished")
    assert "superseded" in server.runs[old].about["tags"]


def test_a_dead_client_begins_anew(server):
    """wandb's own process is killed between two batches, and with rows on their way."""
    story = Story()
    story.node(1)
    story.train(5)
    side = Side(story, server)
    side.until_told()
    side.die()
    story.train(9, new_epoch=False)
    side.until_told()
    story.train(12, new_epoch=False)
    side.writer.round()
    side.wandb.round()  # logged; nothing has arrived
    side.die()
    story.train(15, final=True, new_epoch=False)
    side.until_told()
    assert side.round(last=True)
    run = check(story, server)
    assert (run.ends, server.state(run.name)) == ([0], "finished")


def test_half_a_sync_and_a_refusing_server(server):
    story = Story()
    story.first_half()
    account = Account(True, server.key, server.url)
    server.fail("file_stream", 403, times=1000)  # final: the client gives up, and says nothing
    assert sync(story.store, [account], dict(os.environ), 0.0) == ["wandb"]
    server._faults.clear()
    assert steps_at(server) == []
    assert sync(story.store, [account], dict(os.environ), 60.0) == []
    run = check(story, server)
    assert (server.state(run.name), run.ends) == ("running", [])
    story.closed("stopped", "by a person")
    assert sync(story.store, [account], dict(os.environ), 60.0) == []
    assert (server.state(run.name), run.ends) == ("killed", [255])
    check(story, server)
    # launched again: the same run goes on
    story.told(facts.LeaseTaken(2, "me"))
    story.node(9)
    story.train(25, final=True)
    assert sync(story.store, [account], dict(os.environ), 60.0) == []
    run = check(story, server)
    assert (server.state(run.name), run.ends) == ("finished", [255, 0])


def test_an_old_answer_erases_nothing(server):
    """W&B may answer with less than it has: nothing is sent, as it would overwrite rows."""
    story = Story()
    story.node(1)
    story.train(8)
    side = Side(story, server)
    side.until_told()
    side.wandb.close()
    (run_id,) = server.runs
    server.stale[run_id] = 3
    with pytest.raises(Exception, match="wanted at least"):
        side.wandb.round()
    del server.stale[run_id]
    story.train(12, final=True, new_epoch=False)
    assert side.round(last=True)
    check(story, server)


def test_a_deleted_run_is_made_again(server):
    story = Story()
    story.node(1)
    story.train(5)
    side = Side(story, server)
    side.until_told()
    side.wandb.close()
    (old,) = server.runs
    del server.runs[old]
    server.deleted.add(old)
    story.train(9, final=True, new_epoch=False)
    assert side.round(last=True)
    (new,) = server.runs
    assert new != old
    check(story, server)


def test_what_w_and_b_knows_besides_numbers(server):
    """Configuration, tags, axes, summary, snapshots as artifacts, lineage, alerts."""
    story = Story(MemoryStore("s3://user:secret@bucket/runs/mine?token=x", {}))
    story.node(1)
    environ = {"NCCL_X": "1", "NCCL_KEY": "hidden", "HOME": "/"}
    script = "examples/train.py --lr 3e-4 --layers=12 --fast --hf-token abc --max-tokens 9 --data s3://u:p@b/d?x"
    setup = Setup(
        argv=tuple(masked_words(shlex.split(script))[0]),
        config={"optimizer": {"lr": 3e-4}, "seed": 8, "note": "flat"},
        git=GitState("ab" * 20, "main"),
        packages=provenance.packages(),
        software=provenance.software(environ),
        environment=provenance.variables(environ),
        people={"owner": "me", "purpose": "to see"},
    )
    diff = b"+lr = 3e-4\n"
    write_setup(story.store, 1, with_diff(setup, diff), diff)
    story.train(4, metrics={"grad_norm": 0.5, "val_loss": 0.9})
    side = Side(story, server)
    side.until_told()
    story.train(8, new_epoch=False, metrics={"grad_norm": 0.5, "val_loss": 0.3})
    story.told(facts.GuardTripped(8, 1, "loss spike", 12.0), writer="worker-guard")
    side.until_told()
    story.train(10, new_epoch=False, metrics={"grad_norm": 0.5, "val_loss": 0.7})
    side.until_told()
    story.train(12, new_epoch=False, final=True)
    write_note(story.store, LogbookEntry(story.t, "lr was too high", "me", 8), "0" * 8)
    story.told(facts.SnapshotExported(8, 1, ("model.safetensors",), 1, 800, "bf16"), writer="me")
    assert side.round(last=True)
    side.wandb.close()
    run, export = server.runs.values()
    config = run.values()
    assert (config["global_batch"], config["seed"], config["hardware"]) == (8, 7, ["H100"])
    assert (config["environment"]["NCCL_X"], "NCCL_KEY" in config["environment"]) == ("1", 0)
    assert config["environment"]["python"] and config["packages"]["numpy"]
    flags = {"lr": 3e-4, "layers": 12, "fast": True, "max-tokens": 9, "data": "s3://b/d"}
    assert (config["script"], config["flags"]) == ("train.py", flags)
    assert config["launch"]["policy"] == "cheapest"
    assert config["git"]["commit"] == "ab" * 20
    assert (config["optimizer"], config["note"], config["owner"]) == ({"lr": 3e-4}, "flat", "me")
    assert (config["seed"], config["config"]) == (7, {"seed": 8})
    assert run.about["notes"].splitlines()[0] == "purpose: to see"
    assert (run.about["jobType"], run.about["displayName"]) == ("train", "mine?token=x")
    assert run.about["tags"] == ["spot", "gcp"]
    assert (run.summary["best/val_loss"], run.summary["best/val_loss_step"]) == (0.3, 5)
    axes = {m.get("2"): m for m in run.config["_wandb"]["value"]["m"] if "2" in m}
    assert {"train/*", "val/*", "cost/*", "goodput/*"} <= set(axes)
    assert axes["train/*"]["5"] != axes["cost/*"]["5"]
    aliases = server.aliases(f"snapshot-{side.info.id}")
    assert aliases["latest"] == aliases["step-12"]
    assert aliases["best"] == aliases["step-5"]
    manifests = b"".join(a.manifest for a in server.artifacts)
    assert b"s3://bucket/runs/mine/snapshots/manifests/" in manifests
    assert b"secret" not in manifests and b"token" not in manifests
    assert [a.kind for a in server.artifacts if a.id in run.used] == ["dataset"]
    # what was validated, and what came of a snapshot
    found = {a.id: a for a in server.artifacts}
    told = [a.metadata for a in server.artifacts if a.kind == "evaluation"]
    assert [(e["step"], e["validated_step"], e["val/loss"]) for e in told] == [
        *((4, 4, 0.9), (5, 5, 0.3), (8, 8, 0.3), (10, 10, 0.7))
    ]
    assert told[1]["snapshot"] == f"snapshot-{side.info.id}:step-5"
    (used,), (made,) = [found[i] for i in export.used], [found[i] for i in export.logged]
    assert (used.kind, used.metadata["step"], used.by) == ("model", 8, run.name)
    assert (made.collection, made.metadata["dtype"]) == (f"export-{side.info.id}", "bf16")
    assert (export.about["jobType"], server.state(export.name)) == ("export", "finished")
    assert run.files["diff.patch"] == diff
    assert run.about["notes"].startswith("purpose: to see\n")
    assert run.about["notes"].endswith("me, step 8: lr was too high")
    assert [a["title"] for a in run.alerts] == ["the loss spikes"]


def test_w_and_bs_stop_button_stops_the_run(server):
    story = Story()
    story.node(1)
    story.train(5)
    side = Side(story, server)
    side.until_told()
    (run,) = server.runs.values()
    run.stopped = True
    story.train(9, new_epoch=False)
    side.writer.round()
    side.wandb.round()
    wait_for(lambda: "control/stop.json" in story.store.list("control/"), "stop order", 40.0)
    assert json.loads(story.store.get("control/stop.json"))["by"] == "wandb"
    side.wandb.close()
    # launched again: W&B says it for ever, and nobody listens
    story.store.delete("control/stop.json")
    side.wandb._asked_to_stop()
    assert "control/stop.json" not in story.store.list("control/")
    side.wandb.close()


def test_nodes_may_have_runs_of_their_own(server, monkeypatch):
    """Whatever is rewound or killed, what a node's hardware did is there once."""
    monkeypatch.setenv("HARNESS_WANDB_NODES", "grouped")
    story = Story()
    story.first_half()
    side = Side(story, server)
    side.until_told()
    story.spoiled()
    side.until_told()
    main = side.wandb.run_id
    side.wandb.close(), side.wandb.release()
    story.second_half(), story.finish(), story.closed()
    side = Side(story, server)
    side.until_told()
    side.until_told()
    known = [s for s in read_facts(story.store) if isinstance(s.fact, facts.NodeMeasured)]
    assert set(server.runs) == {main, *(f"{main}-node-{n}" for n in range(1, 6))}
    for node in range(1, 6):
        run = server.runs[f"{main}-node-{node}"]
        mine = [s for s in known if s.fact.member == f"m{node:04d}-aa"]
        told = [(row["_timestamp"], row["gpu0/watts"], row["cpu/percent"]) for row in run.history]
        assert told == [(s.t, 500.0, 10.0 * node) for s in mine] != []
        assert [row["_step"] for row in run.history] == list(range(len(mine)))
        assert (run.about["groupName"], run.about["jobType"]) == (main, "node")
        assert (server.state(run.name), run.problems) == (
            "failed" if node in (1, 2, 4) else "finished",
            [],
        )
    run = server.runs[main]
    assert run.about["groupName"] == main
    assert not [name for row in run.history for name in row if name.startswith("node/")]
    assert len(run.history) == len(list(every_row(story.store)))


def test_a_second_publisher_waits_for_the_claim(server):
    story = Story()
    story.node(1)
    story.train(5)
    one, two = Side(story, server), Side(story, server)
    one.until_told()
    assert not two.round(last=True)
    two.wandb.release()  # not its own
    assert not two.round(last=True)
    one.wandb.release()
    story.train(9, final=True, new_epoch=False)
    assert two.round(last=True)
    check(story, server)


def test_quarantine_alone_takes_nothing_back(server):
    """Nobody has redone the steps yet: the mark may be taken back, so W&B keeps them."""
    story = Story()
    story.node(1)
    story.train(9, every=3)
    side = Side(story, server)
    side.until_told()
    story.snapshots.quarantine(Ref(epoch=1, step=9), "bad")
    side.until_told()
    assert steps_at(server) == list(range(1, 10))
    side.wandb.close()


def test_the_publisher_beside_a_controller_tells_how_the_run_ended(server, tmp_path):
    """No node is up any more when the controller gives the run up."""
    story = Story(FileStore((tmp_path / "run").as_uri()))
    envs = {"TRACKERS": "", "WANDB_BASE_URL": server.url}
    task = Task(Path("-"), "x", "true", envs=envs, secrets={"WANDB_API_KEY": server.key})
    with publisher_beside(story.store.url, task, tmp_path / "log"):
        story.first_half()
        wait_for(lambda: server.runs, "a run")
        story.closed("failed", "over budget")
    (run,) = server.runs.values()
    assert (run.ends, server.state(run.name)) == ([1], "failed")
    check(story, server)
    # launched again, to the end; the bill comes after the last step, and W&B's run ends with it
    story.told(facts.LeaseTaken(2, "me"))
    with publisher_beside(story.store.url, task, tmp_path / "log"):
        story.node(9)
        story.train(25, final=True)
        wait_for(lambda: newest_header(story.store).end == "done", "the last step")
        assert run.ends == [1]
        story.t += 30
        story.closed()
    assert (run.ends, server.state(run.name)) == ([1, 0], "finished")
    assert agrees(story, check(story, server))["ckpt/step"] == 25
    nobody = Task(Path("-"), "x", "true", envs={**envs, "TRACKERS": "jsonl"}, secrets=task.secrets)
    with publisher_beside(story.store.url, nobody, tmp_path / "none"):
        assert not (tmp_path / "none").exists()
