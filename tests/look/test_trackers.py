"""Whatever is redone, killed or doubled, a tracker is told every committed step in order and
exactly once."""

import base64
import http.server
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from harness.bucket.layout import published_key as marker_key
from harness.cli import main
from harness.core.world import BadInput
from harness.look.trackers import trackers
from harness.look.trackers.committed_steps import committed
from harness.look.trackers.stream_objects import STEP
from harness.look.trackers.tracker_registry import Function, Jsonl, RunInfo, build, metrics
from harness.look.trackers.tracker_stream import every_row
from harness.look.trackers.trackers import Publisher, collect, published
from storage.canonical_json import digest
from storage.errors import StoreUnavailable
from storage.snapshots.manifest import Ref
from storage.stores.folder_store import FileStore, MemoryStore
from storage.stores.store_urls import open_store
from support.truerun import TrueRun

FAST = {"min_batch_s": 0.0, "tries": 1}


def publisher(run, *given, store=None, **changes):
    return Publisher(
        store or run.store, RunInfo.of(run.store), given or [Jsonl()], **{**FAST, **changes}
    )


def told(store, tmp_path, name="jsonl"):
    """Steps as somebody who collects them sees them."""
    (path,) = collect(store, tmp_path / f"collected-{time.monotonic_ns()}")
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Deaf(MemoryStore):
    """Creating a marker fails: before the write ("lost") or after it ("unheard")."""

    how = ""

    def create(self, key, data):
        if self.how == "unheard" and key.startswith("trackers/"):
            super().create(key, data)
        if self.how and key.startswith("trackers/"):
            raise StoreUnavailable(f"{key}: no answer")
        return super().create(key, data)


# ---- exactly once --------------------------------------------------------------------------------
def test_steps_are_published_once_over_rewinds(tmp_path):
    run = TrueRun().train(7, every=3)
    p = publisher(run)
    assert not p.round()
    run.train(12, every=4)
    p.round()
    # steps 9-12 are redone, by a new epoch and with other losses
    run.snapshots.quarantine(Ref(epoch=2, step=12), "bad")
    run.rewind(Ref(epoch=2, step=8))
    run.loss = lambda step: 9.0
    run.train(10)
    assert not p.round()
    assert not publisher(run).round()  # a restarted publisher
    run.train(20, final=True)
    assert p.round()
    assert told(run.store, tmp_path) == list(range(1, 21))
    assert [(m.first, m.last) for m in published(run.store, "jsonl")] == [
        (1, 7),
        (8, 12),
        (13, 20),
    ]


@pytest.mark.parametrize("how", ["lost", "unheard"])
def test_crash_between_publishing_and_marker(tmp_path, how):
    run = TrueRun(store=Deaf("memory://x/deaf", {})).train(5)
    run.store.how = how
    publisher(run).round()
    run.store.how = ""
    run.train(9, final=True)
    assert publisher(run).round()
    assert told(run.store, tmp_path) == list(range(1, 10))


def test_two_publishers_cut_differently(tmp_path):
    """While one publishes steps 1-5, more is committed and another publishes 1-10: the first to
    mark owns them."""
    run = TrueRun().train(5)
    other = publisher(run)

    class Slow(Jsonl):
        def publish(self, records, info, folder):
            super().publish(records, info, folder)
            if records[0].step == 1:
                assert records[-1].step == 5
                run.train(10)
                other.round()

    slow = publisher(run, Slow())
    slow.round()
    run.train(12, final=True)
    assert slow.round()
    assert other.round()
    assert told(run.store, tmp_path) == list(range(1, 13))
    assert [(m.first, m.last) for m in published(run.store, "jsonl")] == [(1, 10), (11, 12)]
    files = [k for k in run.store.list("trackers/jsonl/") if "/metrics" in k]
    assert len(files) == 2  # the loser took its own away


def test_many_publishers_at_once(tmp_path):
    run = TrueRun().train(2)
    stop = threading.Event()
    threads = [
        threading.Thread(target=publisher(run, stop=stop).run, args=(0.001,)) for _ in range(6)
    ]
    for t in threads:
        t.start()
    for to in range(4, 41, 2):
        run.train(to, final=to == 40)
    for t in threads:
        t.join(30)
    assert told(run.store, tmp_path) == list(range(1, 41))


def test_committed_reads_only_what_it_needs():
    run = TrueRun()
    for to in range(3, 31, 3):
        run.train(to, final=to == 30)
    info = RunInfo.of(run.store)
    assert [r.step for r in committed(run.store, info, 1, limit=4)[0]] == [1, 2, 3, 4]
    assert [r.step for r in committed(run.store, info, 5, limit=5)[0]] == [5, 6, 7, 8, 9]
    records, final = committed(run.store, info, 28)
    assert ([r.step for r in records], final) == ([28, 29, 30], True)
    assert committed(run.store, info, 31) == ([], True)
    run.store.delete(run.store.list("samples/")[0])
    assert [r.step for r in committed(run.store, info, 20)[0]] == list(range(20, 31))


def test_late_publisher_goes_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "__defaults__", (4,))
    monkeypatch.setattr(trackers, "MAX_BATCH_STEPS", 4)
    run = TrueRun().train(19, final=True)
    assert publisher(run, min_batch_s=1e9).round()
    assert told(run.store, tmp_path) == list(range(1, 20))
    assert [m.last for m in published(run.store, "jsonl")] == [4, 8, 12, 16, 19]


def test_batches_are_apart_except_the_last(tmp_path):
    run, clock = TrueRun().train(3), [0.0]
    p = publisher(run, min_batch_s=30.0, monotonic=lambda: clock[0])
    p.round()
    run.train(6)
    clock[0] = 29.0
    p.round()
    assert len(list(published(run.store, "jsonl"))) == 1
    clock[0] = 31.0
    p.round()
    run.train(9)
    p.round()
    assert len(list(published(run.store, "jsonl"))) == 2
    p.round(last=True)  # told to stop
    assert told(run.store, tmp_path) == list(range(1, 10))


# ---- failures ------------------------------------------------------------------------------------
def test_failing_tracker_is_tried_later_and_stops_nobody(tmp_path, caplog):
    run, clock, calls = TrueRun().train(3), [0.0], []

    def broken(records, info):
        calls.append([r.step for r in records])
        if len(calls) < 3:
            raise RuntimeError("api_key=0123456789abcdef0123456789abcdef0123 was refused")

    p = publisher(
        run, Function("broken", broken), Jsonl(), min_batch_s=10.0, monotonic=lambda: clock[0]
    )
    p.round()
    assert told(run.store, tmp_path) == [1, 2, 3]
    assert "0123456789abcdef" not in caplog.text
    assert "steps from 1 on are not published" in caplog.text
    clock[0] = 19.0
    p.round()
    assert len(calls) == 1  # 20 s after the first failure
    clock[0] = 21.0
    p.round()
    clock[0] = 60.0
    p.round()
    assert len(calls) == 2  # 40 s after the second
    clock[0] = 62.0
    run.train(5, final=True)
    assert p.round()
    assert calls == [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert run.store.list("trackers/broken/claims/") == []


def test_two_publishers_do_not_act_outside_at_once():
    run, calls, clock = TrueRun().train(3, final=True), [], [1000.0]
    second = publisher(
        run, Function("f", lambda records, info: calls.append("second")), now=lambda: clock[0]
    )

    def first_call(records, info):
        second.round()  # tries while the first one is at it
        calls.append("first")

    assert publisher(run, Function("f", first_call), now=lambda: clock[0]).round()
    assert calls == ["first"]
    assert second.round()
    assert calls == ["first"]


def test_claim_of_a_dead_publisher_is_taken_over():
    run, calls, clock = TrueRun().train(3, final=True), [], [1000.0]
    run.store.create("trackers/f/claims/0000000001.json", b'{"by":"dead","t":1000.0}')
    p = publisher(
        run, Function("f", lambda records, info: calls.append(len(records))), now=lambda: clock[0]
    )
    assert not p.round()
    clock[0] += trackers.CLAIM_S + 1
    assert p.round()
    assert calls == [3]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "no tracker"),
        ("wanbd", "'wanbd' is not known"),
        ("no.such.module:f", "cannot be imported"),
        ("harness.look.trackers.trackers:POLL_S", "wanted a function"),
        pytest.param(
            "tensorboard",
            "pip install tensorboard",
            marks=pytest.mark.skipif("tensorboard" in sys.modules, reason="installed"),
        ),
    ],
)
def test_bad_spec_is_a_clear_error(spec, words):
    if spec == "tensorboard" and importlib.util.find_spec("tensorboard"):
        pytest.skip("it is installed here")
    with pytest.raises(BadInput, match=words):
        build(spec, {})


def test_spec_names_trackers():
    found = build("jsonl, builtins:print,jsonl", {})
    assert [t.name for t in found] == ["jsonl", "builtins-print"]


def test_metrics_of_a_step():
    run = TrueRun()
    run.begin_epoch(3)
    r = run.record(1, 3, metrics={"grad_norm": 2.0, "val_loss": 1.5}, dt=2.0)
    assert metrics(r) == {
        "train/loss": 1.0,
        "train/lr": 0.1,
        "train/grad_norm": 2.0,
        "world": 3,
        "accumulation": 2,
        "epoch": 1,
        "samples_per_s": 4.0,
        "val_loss": 1.5,
    }


def test_collect_refuses_what_was_changed(tmp_path):
    run = TrueRun().train(3)
    publisher(run).round()
    (key,) = [k for k in run.store.list("trackers/jsonl/") if k.endswith(".jsonl")]
    run.store.put(key, b"{}")
    with pytest.raises(BadInput, match="it was changed"):
        collect(run.store, tmp_path)


# ---- the process ----------------------------------------------------------------------------------
def start(url, *flags, env=None, **popen):
    base = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    command = [sys.executable, "-m", "harness.look.trackers.trackers", url, *flags]
    return subprocess.Popen(
        command,
        env=base | (env or {}),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **popen,
    )


@pytest.mark.proof
def test_two_offline_publishers_as_processes(tmp_path):
    """Without a key the stream is kept, once, for `harness runs sync`."""
    run = TrueRun(store=FileStore((tmp_path / "run").as_uri())).train(30, every=10, final=True)
    both = [start(run.store.url, "--trackers", "wandb,jsonl") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
    assert [row.step for row in every_row(run.store) if row.kind == STEP] == list(range(1, 31))
    assert told(run.store, tmp_path) == list(range(1, 31))


def test_sigterm_publishes_what_is_left(tmp_path):
    run = TrueRun(store=FileStore((tmp_path / "run").as_uri()))
    run.train(3)
    process = start(run.store.url, "--trackers", "jsonl", "--min-batch-s", "3600")
    deadline = time.monotonic() + 60
    while marker_key("jsonl", 1) not in run.store.list("trackers/"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.train(6)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert told(run.store, tmp_path) == [1, 2, 3, 4, 5, 6]


def test_sigterm_is_bounded(tmp_path):
    run = TrueRun(store=FileStore((tmp_path / "run").as_uri())).train(3)
    body = (
        "import pathlib, time\ndef f(records, info):\n    pathlib.Path('at-it').touch()\n    "
        "time.sleep(600)\n"
    )
    (tmp_path / "hangs.py").write_text(body)
    env = {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    process = start(
        run.store.url, "--trackers", "hangs:f,jsonl", "--finish-s", "1", env=env, cwd=tmp_path
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "at-it").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert told(run.store, tmp_path) == [1, 2, 3]  # what hangs holds up no other


class FakeServer(http.server.BaseHTTPRequestHandler):
    """W&B's answer to who we are."""

    def do_POST(self):
        good = base64.b64encode(b"api:good").decode() in self.headers["Authorization"]
        assert self.path == "/graphql"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"viewer": {"id": "me"} if good else None}}).encode())

    def log_message(self, *_):
        pass


def test_key_is_checked_before_anything_starts(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), FakeServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
        (tracker,) = build("wandb", {**env, "WANDB_API_KEY": "good"})
        assert tracker.online
        with pytest.raises(BadInput, match="does not know the WANDB_API_KEY"):
            build("wandb", {**env, "WANDB_API_KEY": "bad"})
        # as `wandb login` writes it
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password good\n")
        (tracker,) = build("wandb", {**env, "HOME": str(tmp_path), "WANDB_MODE": ""})
        assert tracker.online  # a key alone is enough
        (tracker,) = build("wandb", {**env, "HOME": str(tmp_path), "WANDB_MODE": "offline"})
        assert not tracker.online
        server.shutdown()
    key = "0123456789abcdef0123456789abcdef01234567"
    process = start(
        tmp_path.as_uri(),
        "--trackers",
        "wandb",
        env={"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"},
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "W&B cannot be reached at http://127.0.0.1:9" in err
    assert key not in out + err


def test_online_needs_a_key(tmp_path):
    with pytest.raises(BadInput, match="WANDB_MODE is online, but there is no key"):
        build("wandb", {"HOME": str(tmp_path), "WANDB_MODE": "online"})
    with pytest.raises(BadInput, match="wanted one of one, grouped, off, found 'both'"):
        build("wandb", {"HOME": str(tmp_path), "HARNESS_WANDB_NODES": "both"})
    (tracker,) = build("wandb", {"HOME": str(tmp_path), "WANDB_MODE": "", "WANDB_API_KEY": ""})
    assert not tracker.online


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("..", "evil"),
        (".", "evil"),
        ("jsonl", "../../evil"),
        ("jsonl", "/tmp/evil"),
        ("wandb", "../../../evil/x"),
    ],
)
def test_collecting_writes_nothing_outside(tmp_path, name, inside):
    store, data = MemoryStore(objects={}), b"[alias]"
    inside = inside.replace("/tmp/evil", f"{tmp_path}/evil")
    store.put(f"trackers/{name}/x/{inside}", data)
    marker = {
        "first": 1,
        "last": 3,
        "head": "",
        "folder": f"trackers/{name}/x/",
        "files": {inside: digest(data)},
    }
    store.put(marker_key(name, 1), json.dumps(marker).encode())
    (tmp_path / "home" / "collected").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"leads out of|wanted the key of an object"):
        collect(store, tmp_path / "home" / "collected")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_written_down_can_be_chosen(tmp_path, capsys):
    url = (tmp_path / "run").as_uri()
    run = TrueRun(store=open_store(url)).train(6, every=3)
    publisher(run, *build("jsonl", {})).round()
    run.store.put("trackers/tensorboard/x.spotharness", b"events")

    def written(*words):
        folder = tmp_path / f"out{len(words)}"
        with pytest.raises(SystemExit) as end:
            main(["runs", "sync", url, *words, "--out", str(folder)])
        return end.value.code, {p.name for p in folder.iterdir()} if folder.exists() else set()

    assert written("--to", "tensorboard") == (0, {"tensorboard"})
    assert {"tensorboard", "jsonl"} <= written()[1]
    capsys.readouterr()
    assert written("--to", "tensorboard,mlflow", "--patience-s", "1") == (2, set())
    assert "wanted some of wandb, tensorboard, jsonl" in capsys.readouterr().err
