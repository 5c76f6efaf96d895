"""Faults that an audit found in b30688c, each as a test that fails there: bad input, what lies in a
bucket, forgers, other users, money.

They drive the `harness` command, and a few seams that were there already. So the same file runs
against that version (docs/RELIABILITY.md, "Faults of b30688c"):
    cd OLD && PYTHONPATH=OLD python -m pytest -c NEW/pyproject.toml NEW/tests/test_faults_of_b30688c.py
The numbers are those of the audit.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from old_tree import (
    TREE,
    attempt,
    copy_of,
    edit_facts,
    either,
    environment,
    harness,
    manifests,
    resealed,
    said_of,
    seam,
    start,
    train,
    train_begin,
    until,
    write_facts,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps, three snapshots."""
    folder = tmp_path_factory.mktemp("trained")
    code, text = train(folder / "run", folder=folder)
    assert code == 0, text
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return copy_of(trained, tmp_path / "run")


POLICIES = """
import os, time
try:
    from harness.world import Stop, Wait  # where it was
except ImportError:
    from harness.core.world import Stop, Wait
begun_s = time.monotonic()
def stops(view):
    return Stop("as planned")
def waits(view):
    return Stop("as planned") if time.monotonic() > begun_s + float(os.environ["WAITS_S"]) else Wait(0.5)
def blocks(view):  # a cloud that is slow to answer looks the same
    open(os.environ["BLOCKS"], "w").close()
    time.sleep(12.0)
    return Stop("as planned")
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "planned.py").write_text(POLICIES)
    file = tmp_path / "task.yaml"
    file.write_text("name: t\nresources: {use_spot: true}\nrun: exit 1\n")
    return file


def launch(task: Path, run: Path, policy: str) -> tuple[object, ...]:
    return ("launch", task, "--run", run, "--policy", f"planned:{policy}", "--market", "calm", "--brief")


# ---- 1: work -------------------------------------------------------------------------------------
def test_1_a_listing_that_shows_no_snapshot_does_not_mean_step_1(run: Path, tmp_path: Path) -> None:
    """The facts tell of 30 committed steps. b30688c trains anew from step 1 and prunes the rest."""
    shutil.move(run / "snapshots" / "manifests", tmp_path / "hidden")
    log = tmp_path / "log"
    with open(log, "wb") as file:
        agent = train_begin(run, folder=tmp_path, total=40, stdout=file)
    try:
        until(lambda: manifests(run) or agent.poll() is not None or "rewind" in log.read_text(), "its end")
        assert not manifests(run)
    finally:
        agent.terminate()
        agent.wait(60)


# ---- 4: nodes that are there ---------------------------------------------------------------------
STRANGE_SKY = {
    "__init__.py": "__version__ = '0'\n",
    "client/__init__.py": "",
    "client/sdk.py": "get = lambda found: found\nstatus = api_status = cost_report = lambda *_, **__: []\n",
    "utils/__init__.py": "",
    "utils/common.py": "class StatusRefreshMode:\n    FORCE = None\n",
}


def test_4_nodes_of_another_api_server_are_not_called_gone(tmp_path: Path) -> None:
    """Two attempts are open in the facts, and this API server has never heard of them."""
    run = tmp_path / "run"
    write_facts(run, "controller-1", *attempt(1), *attempt(2))
    for name, text in STRANGE_SKY.items():
        (tmp_path / "sky" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sky" / name).write_text(text)
    env = environment(tmp_path, HOME=str(tmp_path))
    code, text = harness("down", run, "--grace-s", "0", "--timeout-s", "5", env=env)
    assert code == 1 and "Nothing of it is left" not in text, text
    assert "attempts 1" in " ".join(text.split()), text


# ---- 5: money ------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", ["nan", "inf", "-5"])
def test_5_a_budget_that_is_no_amount_is_refused(task: Path, tmp_path: Path, budget: str) -> None:
    words = (*launch(task, tmp_path / "run", "stops"), f"--budget-usd={budget}")
    code, text = harness(*words, env=environment(tmp_path), within_s=60)
    assert code == 2 and "Traceback" not in text, text
    assert not (tmp_path / "run" / "facts").exists()


class SlowCloud:
    """A launch takes 7 to 10 minutes, a drain 60 to 170 s, an end 90 to 300 s, and all of it is
    billed."""

    def __init__(self, clock: Any, store: Any, rng: random.Random):
        self.world = either("harness.core.world", "harness.world")
        self.clock, self.store, self.rng = clock, store, rng
        self.all: dict[int, Any] = {}
        self.began_s: dict[int, float] = {}
        self.ending: set[int] = set()

    def offers(self) -> tuple[Any, ...]:
        return (self.world.Offer(55.0, "aws/us-east-1/p5", accelerator="H100", gpus=8),)

    def nodes(self) -> list[Any]:
        return list(self.all.values())

    def launch(self, number: int, offer: Any) -> None:
        now = self.clock.now()
        self.all[number] = self.world.Node(number, offer, self.world.NodeState.PENDING, now)
        self.began_s[number] = now + self.rng.uniform(20, 90)
        self.clock.after(self.rng.uniform(420, 600), lambda: self.arrive(number))

    def arrive(self, number: int) -> None:
        if self.all[number].alive and number not in self.ending:
            up = {"state": self.world.NodeState.UP, "up_s": self.began_s[number]}
            self.all[number] = replace(self.all[number], **up)
            self.heed(number)

    def heed(self, number: int) -> None:
        if self.store.list("control/stop"):
            self.clock.after(self.rng.uniform(60, 170), lambda: self.end(number, 35))
        else:
            self.clock.after(5.0, lambda: self.heed(number))

    def terminate(self, number: int) -> None:
        if number in self.all:
            self.end(number, None)

    def end(self, number: int, code: int | None) -> None:
        if number not in self.ending:
            self.ending.add(number)
            self.clock.after(self.rng.uniform(90, 300), lambda: self.gone(number, code))

    def gone(self, number: int, code: int | None) -> None:
        now = self.clock.now()
        end = {"state": self.world.NodeState.GONE, "up_s": min(self.began_s[number], now)}
        end |= {"gone_s": now, "exit_code": code, "reason": "exited"}
        self.all[number] = replace(self.all[number], **end)


@pytest.mark.parametrize(("nodes", "budget_usd"), [(8, 300.0), (16, 600.0)])
def test_5_launches_and_drains_that_take_minutes_are_within_the_budget(
    nodes: int, budget_usd: float
) -> None:
    recovery = either("harness.controller.recovery", "harness.recovery")
    world = either("harness.core.world", "harness.world")
    clock = either("harness.proof.sim_world", "harness.sim").VirtualClock()
    store = either("storage.files", "storage.objects").MemoryStore("memory://run", {})
    journal = either("harness.bucket.journal", "harness.journal").Journal(store, "controller-1", clock.now)
    lease = either("harness.bucket.lease", "harness.lease").Lease(store, clock, "me")
    policy = either("harness.controller.policies", "harness.policies").cheapest
    clock.horizon_s = 1_000_000
    cloud = SlowCloud(clock, store, rng := random.Random(0))
    spec = recovery.RunSpec(8, nodes, budget_usd=budget_usd)
    spec = replace(spec, poll_s=1.0, lost_after_s=90.0, block_limit_s=600.0)
    spec = replace(spec, exit_grace_s=180.0, terminate_timeout_s=900.0)
    outcome = recovery.recover(spec, policy, world.World(clock, cloud, store, rng), journal, lease)
    spent_h = sum(n.gone_s - n.up_s for n in cloud.all.values() if n.gone_s and n.up_s) / 3600
    assert outcome.outcome == "stopped" and "budget" in outcome.reason
    assert spent_h * 55.0 <= 1.02 * budget_usd, f"{spent_h * 55 / budget_usd - 1:.0%} over"


# ---- 6: controllers ------------------------------------------------------------------------------
def test_6_a_clock_that_jumps_trips_no_limit(task: Path, tmp_path: Path) -> None:
    """It was 25 h slow, and is put right while the run goes on."""
    paths = seam(
        tmp_path / "clock",
        """
        import sys, time
        if "launch" in sys.orig_argv:
            real, began_s = time.time, time.monotonic()
            time.time = lambda: real() - (90_000 if time.monotonic() < began_s + 3.0 else 0)
        """,
    )
    words = (*launch(task, tmp_path / "run", "waits"), "--max-hours", "24")
    code, text = harness(*words, env=environment(paths, tmp_path, WAITS_S="6"))
    assert code == 3 and "as planned" in text, text


def test_6_a_controller_that_a_cloud_holds_up_is_not_overtaken(task: Path, tmp_path: Path) -> None:
    """For 12 s, where the lease is of 5 s."""
    run, begun = tmp_path / "run", tmp_path / "begun"
    env = environment(tmp_path, BLOCKS=str(begun), WAITS_S="0")
    first = start(*launch(task, run, "blocks"), env=env)
    try:
        until(begun.exists, "the first controller to lead")
        code, text = harness(*launch(task, run, "stops"), env=env)
        assert code == 1 and "as planned" not in text, text
    finally:
        code, text = said_of(first)
    assert code == 3 and "as planned" in text, text


# ---- 11: faults of ours --------------------------------------------------------------------------
def test_11_a_fault_of_our_own_is_not_asked_again_as_if_the_store_were_away(tmp_path: Path) -> None:
    remote = either("storage.remote", "storage.objects")
    retrying = either("storage.retries", "storage.objects").Retrying
    tries: list[str] = []

    class Counted(remote.FsspecStore):  # type: ignore[misc, name-defined]
        def get(self, key: str, start: Any = None, end: Any = None) -> bytes:
            tries.append(key)
            return super().get(key, start, end)  # type: ignore[no-any-return]

    store = retrying(Counted(f"memory://{tmp_path}"), within_s=1.0)
    store.put("k", b"0123")
    with pytest.raises(TypeError):
        store.get("k", [1])
    assert tries == ["k"]


# ---- 19: forgers ---------------------------------------------------------------------------------
def rolled_back(run: Path) -> None:
    """The newest snapshot, its records, and nothing else."""
    name = manifests(run)[-1].stem
    shutil.rmtree(run / "snapshots" / "parts" / name)
    for file in (*(run / "snapshots" / "manifests").glob(f"{name}*"), *(run / "samples").glob("*-0000000030-*")):
        file.unlink()


def doomed(run: Path) -> None:
    newest = manifests(run)[-1]
    newest.with_suffix(".doomed").write_bytes(b"")


def losses_made_anew(run: Path) -> None:
    edit_facts(run, "worker", lambda fact: "loss" in fact and fact.update(loss=0.5))


def commits_made_anew(run: Path) -> None:
    edit_facts(run, "uploader", lambda fact: "weights" in fact and fact.update(weights="0" * 16))


@pytest.mark.parametrize(
    "tamper",
    [rolled_back, doomed, losses_made_anew, commits_made_anew],
    ids=lambda one: one.__name__,
)
def test_19_verify_finds(run: Path, tamper: Any) -> None:
    tamper(run)
    code, text = harness("verify", run)
    assert code == 1, text


def test_19_bytes_that_were_made_to_have_the_same_xxh3_are_found(run: Path, tmp_path: Path) -> None:
    """A forger needs seconds for that."""
    (part,) = (run / "snapshots" / "parts" / manifests(run)[-1].stem).glob("*.bin")
    true = part.read_bytes()
    part.write_bytes(bytes(len(true)))
    paths = seam(
        tmp_path / "seam",
        f"""
        import xxhash
        real = xxhash.xxh3_128_hexdigest
        xxhash.xxh3_128_hexdigest = lambda data: real({true!r} if bytes(data) == bytes({len(true)}) else data)
        """,
    )
    code, text = harness("snapshots", "verify", run, env=environment(paths))
    assert code == 1, text


# ---- 20: injection -------------------------------------------------------------------------------
def test_20_what_a_fact_says_is_not_alive_in_a_page(run: Path, tmp_path: Path) -> None:
    write_facts(run, "controller-1", *attempt(1, exit_code="<img src=x onerror=alert(1)>"))
    page = tmp_path / "report.html"
    harness("report", run, "--html", page)
    assert page.exists() and "<img src=x" not in page.read_text()


def test_20_nothing_that_a_bucket_says_drives_a_terminal(run: Path) -> None:
    """A fact whose name is an escape sequence, and that was changed: `verify` names it."""
    write_facts(run, "controller-1", {"fact": "\x1b]0;owned\x07\x1b[2J", "a": 1})
    file = run / "facts" / "controller-1" / "000000.jsonl"
    file.write_text(file.read_text().replace('"a":1', '"a":2'))
    code, text = harness("verify", run)
    assert code == 1 and "owned" in text and "\x1b" not in text and "\x07" not in text


def test_20_markup_in_an_offer_is_shown_as_it_is(run: Path) -> None:
    facts = attempt(1, end="preempted")
    facts[0]["offer"] = {**facts[0]["offer"], "name": "a[/bold]b", "accelerator": "[/red]"}
    write_facts(run, "controller-1", *facts)
    code, text = harness("report", run)
    assert code == 0 and "MarkupError" not in text, text


# ---- 22: other users -----------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of other users")
def test_22_a_socket_of_another_user_is_not_asked(run: Path) -> None:
    """`snapshots list` asks uploaders of this machine what they hold, and makes folders where they
    say."""
    staging = either("storage.staging")
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    folder = parent / f"{staging.PREFIX}{os.getpid()}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(mode=0o755)
    asked = threading.Event()
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(str(folder / "socket"))
        door.listen()
        for path in (folder, folder / "socket"):
            os.chown(path, 65534, 65534)

        def answer() -> None:
            with contextlib.suppress(OSError):
                caller, _ = door.accept()
                asked.set()
                caller.close()

        threading.Thread(target=answer, daemon=True).start()
        harness("snapshots", "list", run)
        assert not asked.is_set()
    finally:
        door.close()
        shutil.rmtree(folder)


# ---- 23: early and by name -----------------------------------------------------------------------
def test_23_a_signal_that_there_is_not_is_refused_at_start(tmp_path: Path) -> None:
    words = ("run", "--run", tmp_path / "run", "--notify-signal", "NOPE", "--", "no-such-script.py")
    code, text = harness(*words)
    assert code == 2 and "NOPE" in text and "signal" in text, text


def deep(manifest: Path) -> None:
    manifest.write_text("[" * 100_000)


def infinite(manifest: Path) -> None:
    resealed(manifest, lambda body: body["parts"][0].update(nbytes=float("inf")))


@pytest.mark.parametrize("damage", [deep, infinite], ids=lambda one: one.__name__)
def test_23_a_manifest_that_is_none_is_no_traceback(run: Path, damage: Any) -> None:
    damage(manifests(run)[-1])
    for words in (("snapshots", "list", run), ("verify", run)):
        _, told = harness(*words)
        assert "Traceback" not in told and "RecursionError" not in told, told[-2000:]


def test_23_a_store_that_cannot_create_is_refused_by_name() -> None:
    code, text = harness("status", "--once", "zip://run", within_s=60)
    assert code == 2 and "Traceback" not in text and "use s3://" in text, text


@pytest.fixture
def trickling() -> Iterator[str]:
    """Answers at once, and then says one byte at a time for a minute."""
    server, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def answer() -> None:
        wire, _ = server.accept()
        with wire, contextlib.suppress(OSError):
            wire.recv(4096)
            wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\n")
            for _ in range(10):
                if stop.wait(0.4):
                    return
                wire.sendall(b" ")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    stop.set()
    thread.join()
    server.close()


def test_23_an_answer_that_trickles_is_broken_off(trickling: str) -> None:
    """Each byte comes in time; the whole of it does not."""
    endpoint = either("harness.agent.polling", "harness.sources").Endpoint
    with pytest.raises(OSError):
        endpoint(trickling).request("GET", "/latest", {}, timeout_s=0.8)


def test_23_runs_do_not_share_the_names_of_their_clusters() -> None:
    """The first 32 bits of the hashes of these two URLs are the same."""
    tag = either("harness.clouds.clusters", "harness.skypilot").tag
    assert tag("s3://b/runs/62227") != tag("s3://b/runs/74413")


# ---- 24: what is written on trust ----------------------------------------------------------------
def test_24_what_is_trusted_and_what_is_plain_is_written() -> None:
    text = (TREE / "docs" / "SECURITY.md").read_text()
    for word in ("TCPStore", "gloo", "NCCL", "Network rules", "policy: node", "Encryption", "pickled"):
        assert re.search(word, text, re.IGNORECASE), word
