"""Faults of readers, buckets, controllers and strangers while a run trains: none of them ends it,
takes it back, or leaves a node behind. Real processes on the local cloud. Each case was a fault
once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import buckets
from support.outside import (
    SCRIPT,
    attempt,
    canonical,
    digest,
    environment,
    harness,
    manifests,
    said_of,
    start,
    train,
    train_begin,
    until,
    write_facts,
)

pytestmark = pytest.mark.proof
NODE = """
name: tiny
workdir: {folder}
resources: {{use_spot: true, accelerators: L4:1, job_recovery: {{recover_on_exit_codes: [33]}}}}
envs: {{RUN: null}}
run: |
  exec {python} -m harness.cli run --run "$RUN" --notices none -- script.py 100000 {nap_s}
"""


class Bucket:
    """S3 on loopback whose answers a test may change."""

    def __init__(self) -> None:
        self.damaged: Callable[[str], bool] = lambda key: False  # is a bit of this read flipped?
        self.held: Callable[[str, str], bool] = lambda method, key: False  # does this request wait?
        self.refuses = threading.Event()
        self.waiting, self.let_go, self.landed = (threading.Event() for _ in range(3))
        self.url = ""
        self.prefix = f"runs/{uuid.uuid4().hex[:8]}/"  # the server keeps what earlier tests wrote
        self.run = f"s3://my-bucket/{self.prefix}run"

    def around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            path = urllib.parse.unquote(environ["RAW_URI"].partition("?")[0])
            key = path.removeprefix(f"/my-bucket/{self.prefix}")
            if self.held(environ["REQUEST_METHOD"], key):
                self.waiting.set()
                self.let_go.wait(60.0)
                answer = inner(environ, start_response)
                self.landed.set()
                return answer
            if environ["REQUEST_METHOD"] != "GET" or not self.damaged(key):
                return inner(environ, start_response)
            body = bytearray(b"".join(inner(environ, start_response)))
            if body:
                body[0] ^= 1
            return [bytes(body)]

        return app

    @property
    def account(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": self.url, **keys}

    def ask(self, what: str) -> str:
        signed = "Credential=t/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {signed}"}
        asked = urllib.request.Request(f"{self.url}/my-bucket{what}", headers=headers)
        with urllib.request.urlopen(asked) as answer:
            return str(answer.read().decode())

    def keys(self, prefix: str) -> list[str]:
        query = urllib.parse.urlencode({"list-type": "2", "prefix": self.prefix + prefix})
        found = re.findall(r"<Key>([^<]*)</Key>", self.ask(f"?{query}"))
        return [key.removeprefix(self.prefix) for key in found]

    def get(self, key: str) -> str:
        return self.ask(f"/{self.prefix}{key}")

    def facts(self, prefix: str, kind: str) -> list[dict[str, Any]]:
        lines = [line for key in self.keys(prefix) for line in self.get(key).splitlines()]
        found = [json.loads(line) for line in lines]
        return sorted((f for f in found if f["fact"] == kind), key=lambda f: f["t"])


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    with buckets.moto(made.refuses, around=made.around) as made.url:
        yield made


LONG: dict[str, Any] = {"total": 100_000, "nap_s": 0.05}


@pytest.fixture
def begun(bucket: Bucket, tmp_path: Path) -> dict[str, str]:
    """A run has three snapshots, and its node has died. The environment of whoever goes on with it."""
    env = environment(**bucket.account, HARNESS_LOOK_AGAIN_S="1,2")
    agent = train_begin(bucket.run, folder=tmp_path, env=env, **LONG)
    until(lambda: steps(bucket)[2:], "three snapshots")
    agent.kill()
    agent.communicate()
    return env


def steps(bucket: Bucket) -> list[int]:
    """Of committed snapshots that nobody has marked."""
    names = [key.rpartition("/")[2] for key in bucket.keys("run/snapshots/manifests/")]
    marked = {name.partition(".")[0] for name in names if not name.endswith((".json", ".ended"))}
    return sorted(int(n[:10]) for n in names if n.endswith(".json") and n[:-5] not in marked)


def goes_on(bucket: Bucket, folder: Path, env: dict[str, str]) -> tuple[int | None, list[int], str]:
    """Somebody goes on with the run. How that ended, if it did; where the new session began; and
    what was said."""
    log = folder / "log"
    with open(log, "wb") as file:
        agent = train_begin(bucket.run, folder=folder, env=env, stdout=file, **LONG)

    def resumed() -> list[int]:
        begun = bucket.facts("run/facts/worker-", "SessionStarted")
        return [f["resumed_step"] for f in begun if f["epoch"] > 1]

    try:
        until(lambda: agent.poll() is not None or resumed(), "the session or its end")
        return agent.poll(), resumed(), log.read_text()
    finally:
        agent.kill()
        agent.wait(10)


# ---- readers ------------------------------------------------------------------------------
def test_a_read_that_is_damaged_for_a_moment_marks_nothing(
    bucket: Bucket, begun: dict[str, str], tmp_path: Path
) -> None:
    """Else the newest snapshot is quarantined for ever, and the run goes on from the one before."""
    there, reads_s = steps(bucket), list[float]()

    def damaged(key: str) -> bool:
        if not key.endswith(".bin") or f"{there[-1]:010}-" not in key:
            return False
        reads_s.append(time.monotonic())
        return reads_s[-1] < reads_s[0] + 0.5

    bucket.damaged = damaged
    _, resumed, text = goes_on(bucket, tmp_path, begun)
    assert reads_s and resumed == [there[-1]], text


def test_a_reader_whose_every_read_is_damaged_erases_nothing(
    bucket: Bucket, begun: dict[str, str], tmp_path: Path
) -> None:
    """Else all of them are marked, and the run trains anew from step 1."""
    there = steps(bucket)
    bucket.damaged = lambda key: key.endswith(".bin")
    code, resumed, text = goes_on(bucket, tmp_path, begun | {"HARNESS_LOOK_AGAIN_S": "0,0"})
    assert code == 37 and resumed == [] and steps(bucket) == there, text


def test_a_listing_that_shows_no_snapshot_does_not_mean_step_1(tmp_path: Path) -> None:
    """The facts tell of 30 committed steps: it must not train anew from step 1 and prune the rest."""
    run, log = tmp_path / "run", tmp_path / "log"
    code, text = train(run, folder=tmp_path)
    assert code == 0, text
    (run / "snapshots" / "manifests").rename(tmp_path / "hidden")
    with open(log, "wb") as file:
        agent = train_begin(run, folder=tmp_path, total=40, stdout=file)
    try:
        until(lambda: manifests(run) or agent.poll() is not None or "rewind" in log.read_text(), "its end")
        assert not manifests(run)
    finally:
        agent.terminate()
        agent.wait(60)


# ---- what passes ---------------------------------------------------------------------------
def test_a_spell_of_refusals_does_not_end_an_agent(bucket: Bucket, tmp_path: Path) -> None:
    """403 ExpiredToken for 3 s."""
    env = environment(**bucket.account)
    agent = train_begin(bucket.run, folder=tmp_path, total=100, nap_s=0.1, env=env)
    until(lambda: bucket.keys("run/snapshots/manifests/"), "the first snapshot")
    bucket.refuses.set()
    time.sleep(3.0)
    bucket.refuses.clear()
    code, text = said_of(agent)
    assert code == 0, text


class Led:
    """`harness launch` on the local cloud, in a folder, with one node that trains."""

    def __init__(self, folder: Path):
        self.folder, self.run = folder, folder / "run"
        (folder / "script.py").write_text(SCRIPT)
        (folder / "task.yaml").write_text(NODE.format(folder=folder, python=sys.executable, nap_s=0.2))

    def launch(self, *flags: object) -> subprocess.Popen[str]:
        words = ("launch", self.folder / "task.yaml", "--run", self.run, "--market", "calm", "--brief")
        return start(*words, *flags, cwd=self.folder)

    def nodes(self) -> list[psutil.Process]:
        """Agents and workers that are there."""
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            where = (process.info["environ"] or {}).get("HARNESS_NODE_DIR", "")
            if where.startswith(str(self.folder)) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def steps(self) -> int:
        return sum(f.stat().st_size for f in (self.run / "facts").glob("worker-*/*"))

    def end(self, *launched: subprocess.Popen[str]) -> None:
        harness("down", self.run, "--grace-s", "1", "--timeout-s", "20")
        for process in launched:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        for node in self.nodes():
            with contextlib.suppress(psutil.Error):
                node.kill()


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    made = Led(tmp_path)
    yield made
    made.end()


def test_a_controller_in_trouble_leaves_its_nodes_training(led: Led) -> None:
    """A newer version of the code has committed a snapshot that it cannot read."""
    controller = led.launch()
    try:
        until(lambda: manifests(led.run), "a snapshot")
        body = json.loads(manifests(led.run)[-1].read_text())
        del body["hash"]
        body |= {"version": 999, "ref": "0000900000-e000001"}
        newer = led.run / "snapshots" / "manifests" / "0000900000-e000001.json"
        newer.with_suffix(".new").write_bytes(canonical({**body, "hash": digest(canonical(body))}))
        newer.with_suffix(".new").rename(newer)
        code, text = said_of(controller)
        assert code not in (0, None), text
        time.sleep(1.0)
        assert led.nodes(), text
        before = led.steps()
        until(lambda: led.steps() > before, "more steps", 20)
    finally:
        led.end(controller)


# ---- money and controllers --------------------------------------------------------------
def test_nothing_is_launched_beside_members_that_beat(tmp_path: Path) -> None:
    """Another controller's node: it is open in the facts, it beats, and this cloud does not know it."""
    led = Led(tmp_path)
    write_facts(led.run, "controller-1", *attempt(1))
    member = led.run / "rdzv" / "members" / "m0001-aa.json"
    member.parent.mkdir(parents=True)
    over = threading.Event()

    def beat() -> None:
        n = 0
        while not over.wait(0.2):
            n += 1
            state = {"member": "m0001-aa", "attempt": 1, "state": "in", "beat": n, "beat_s": 1.0}
            state |= {"epoch": 1, "addr": "127.0.0.1", "probe_port": 1, "master_port": 1, "nproc": 1}
            state |= {"speed": 1.0, "end": "", "failure": "", "failure_step": 0, "place": ""}
            member.with_suffix(".new").write_text(json.dumps(state))
            member.with_suffix(".new").replace(member)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    controller = led.launch()

    def told(kind: str) -> list[int]:
        lines = [line for f in (led.run / "facts").glob("controller-*/*") for line in f.read_text().splitlines()]
        return [b.get("attempt", 0) for b in map(json.loads, lines) if b["fact"] == kind]

    try:
        with contextlib.suppress(AssertionError):
            until(lambda: len(told("AttemptIntended")) > 1 or controller.poll() is not None, "a launch", 25)
        assert told("AttemptIntended") == [1]
    finally:
        over.set()
        thread.join()
        led.end(controller)


def test_a_run_that_nobody_leads_ends_when_its_hours_are_over(led: Led) -> None:
    """Its controller is killed, and the nodes look for a leader for two minutes."""
    controller = led.launch("--max-hours", "0.012")  # 43 s
    try:
        until(lambda: manifests(led.run), "a snapshot", 40)
        assert controller.poll() is None
        controller.kill()
        controller.wait(10)
        until(lambda: not led.nodes(), "the nodes to leave by themselves", 260)
    finally:
        led.end(controller)


def test_a_late_stop_order_of_a_dead_controller_does_nothing(bucket: Bucket, tmp_path: Path) -> None:
    """It was on its way when its sender died, and arrives when another one leads."""
    task = tmp_path / "task.yaml"
    (tmp_path / "script.py").write_text(SCRIPT)
    task.write_text(NODE.format(folder=tmp_path, python=sys.executable, nap_s=0.2))
    bucket.held = lambda method, key: (
        method == "PUT" and key.startswith("run/control/stop") and not bucket.let_go.is_set()
    )
    words = ("launch", task, "--run", bucket.run, "--market", "calm", "--brief")
    env = environment(**bucket.account, HOME=str(tmp_path))
    log = tmp_path / "log"
    first = start(*words, "--max-hours", "0.004", env=env)
    second = None
    try:
        assert bucket.waiting.wait(60), "no order was given when 14 s were over"
        first.kill()
        first.communicate()
        with open(log, "wb") as file:
            second = start(*words, env=env, stdout=file)
        until(lambda: bucket.facts("run/facts/controller-", "LeaseTaken")[1:], "the second to lead")
        time.sleep(3.0)  # it forgets what orders it finds
        bucket.let_go.set()
        assert bucket.landed.wait(30)
        with contextlib.suppress(AssertionError):
            until(lambda: second.poll() is not None, "its end", 25)
        assert second.poll() is None and not bucket.facts("run/facts/controller-", "RunEnded"), log.read_text()
    finally:
        bucket.let_go.set()
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)
        harness("down", bucket.run, "--grace-s", "0", "--timeout-s", "20", env=env)


# ---- strangers -----------------------------------------------------------------------
FILES = 256


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, Path, Path]]:
    """An agent that trains, may have 256 files, and whose folder in /tmp another has made. And that
    other's folder, and the run."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "theirs").mkdir()

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
        os.symlink(folder / "theirs", f"/tmp/harness-{os.getpid()}")

    words = ("--set", "addr=127.0.0.1", "--set", "peer_tier=memory")

    def begin() -> subprocess.Popen[str]:
        more: dict[str, Any] = {"total": 100_000, "nap_s": 0.05, "preexec_fn": before}
        with open(folder / "log", "wb") as log:
            return train_begin(folder / "run", *words, folder=folder, stdout=log, **more)

    try:
        process = begin()
    except subprocess.SubprocessError:  # an older process of that number has left a folder
        process = begin()
    try:
        until(lambda: manifests(folder / "run") or process.poll() is not None, "a snapshot")
        assert process.poll() is None, (folder / "log").read_text()
        yield psutil.Process(process.pid), folder / "theirs", folder / "run"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait(10)
        Path(f"/tmp/harness-{process.pid}").unlink(missing_ok=True)


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    found = process.net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


Agent = tuple[psutil.Process, Path, Path]


def test_a_folder_that_another_made_is_not_used(agent: Agent) -> None:
    """Its name could be guessed: /tmp/harness-PID."""
    assert list(agent[1].iterdir()) == []


def test_the_ranks_meet_on_the_nodes_own_address(agent: Agent) -> None:
    workers = agent[0].children(recursive=True)
    found = {ip for process in [agent[0], *workers] for ip, _ in listening(process)}
    assert found and all(ip.startswith("127.") for ip in found), found


def test_a_stranger_is_told_nothing(agent: Agent) -> None:
    for address in listening(agent[0]):
        with socket.create_connection(address, timeout=2.0) as wire, contextlib.suppress(TimeoutError):
            heard = b""
            while len(heard) < 4096 and (more := wire.recv(4096)):
                heard += more
                assert b"member" not in heard and b"m0000-" not in heard, heard


def closed(wires: list[socket.socket]) -> int:
    """How many the other end has closed."""
    count = 0
    for wire in wires:
        try:
            while wire.recv(4096):
                pass
            count += 1
        except BlockingIOError:
            continue
        except OSError:
            count += 1
    return count


def held(family: list[psutil.Process], wires: list[socket.socket]) -> int:
    """How many of these our processes have. Of some that the kernel dropped in the rush (its queue
    was full) their own end does not know, as long as it says nothing."""
    if closed(wires) == len(wires):
        return 0
    theirs = {(c.laddr.port, c.raddr.port) for p in family for c in p.net_connections("tcp") if c.raddr}
    count = 0
    for wire in wires:
        with contextlib.suppress(OSError):  # one that is gone has no other end
            count += (wire.getpeername()[1], wire.getsockname()[1]) in theirs
    return count


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
def test_strangers_are_sent_away(agent: Agent, drips: bool) -> None:
    """300 at each port of the agent and its uploader. They have no more threads than there are
    connections to serve, and the run goes on."""
    family = [agent[0], *(p for p in agent[0].children(recursive=True) if "uploader" in " ".join(p.cmdline()))]
    wires: list[socket.socket] = []
    threads = 0
    try:
        for process in family:
            for address in listening(process):
                for _ in range(300):
                    wire = socket.socket()
                    wire.setblocking(False)
                    wire.connect_ex(address)
                    wires.append(wire)
        deadline_s = time.monotonic() + 90.0
        while (left := held(family, wires)) and time.monotonic() < deadline_s:
            for wire in wires if drips else []:
                with contextlib.suppress(OSError):
                    wire.send(b"P")
            threads = max([threads, *(p.num_threads() for p in family)])
            time.sleep(0.5)
        assert left == 0, f"{left} of {len(wires)} strangers stay"
        assert threads < 160
        before = sum(f.stat().st_size for f in (agent[2] / "facts").glob("worker-*/*"))
        now = lambda: sum(f.stat().st_size for f in (agent[2] / "facts").glob("worker-*/*"))  # noqa: E731
        until(lambda: now() > before, "more steps", 30)
    finally:
        for wire in wires:
            wire.close()


# ---- secrets ---------------------------------------------------------------------------------
def test_a_token_that_an_error_quotes_is_nowhere_in_the_bucket(tmp_path: Path) -> None:
    token = "wq7-4f1c9ab2e86d53f0"
    script = tmp_path / "quotes.py"
    script.write_text("import os\nraise RuntimeError('refused: ' + os.environ['WANDB_API_KEY'])\n")
    run = tmp_path / "run"
    env = environment(WANDB_API_KEY=token)
    code, text = said_of(start("run", "--run", run, "--notices", "none", "--", script, cwd=tmp_path, env=env))
    assert code == 35, text
    told = [str(f.relative_to(run)) for f in run.rglob("*") if f.is_file() and token in f.read_text(errors="replace")]
    assert told == [] and "refused: " in "".join(f.read_text() for f in (run / "facts").rglob("*.jsonl"))
    code, text = harness("runs", "report", run)
    assert token not in text
