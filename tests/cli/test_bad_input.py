"""Bad input, what lies in a bucket, forgers and other users: the `harness` command, in processes,
refuses it, shows it as it is, or goes on without it. Each case was a fault once."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from harness.clouds.sky_clusters import tag
from storage.snapshots.staging import PREFIX
from support.outside import (
    TREE,
    attempt,
    copy_of,
    edit_facts,
    environment,
    harness,
    manifests,
    resealed,
    said_of,
    seam,
    start,
    train,
    until,
    write_facts,
)

pytestmark = pytest.mark.proof


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
from harness.core.world import Stop, Wait
begun_s = time.monotonic()
def stops(view):
    return Stop("as planned")
def waits(view):
    return Stop("as planned") if time.monotonic() > begun_s + float(os.environ["WAITS_S"]) else Wait(0.5)
def blocks(view):  # a cloud that is slow to answer looks the same
    open(os.environ["BLOCKS"], "w").close()
    while not os.path.exists(os.environ["BLOCKS"] + ".over") and time.monotonic() < begun_s + 120:
        time.sleep(0.1)
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


# ---- nodes that are there ---------------------------------------------------------------------
STRANGE_SKY = {
    "__init__.py": "__version__ = '0'\n",
    "client/__init__.py": "",
    "client/sdk.py": "get = lambda found: found\nstatus = api_status = cost_report = lambda *_, **__: []\n",
    "utils/__init__.py": "",
    "utils/common.py": "class StatusRefreshMode:\n    FORCE = None\n",
}


def test_nodes_of_another_api_server_are_not_called_gone(tmp_path: Path) -> None:
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


# ---- money ------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", ["nan", "inf", "-5"])
def test_a_budget_that_is_no_amount_is_refused(task: Path, tmp_path: Path, budget: str) -> None:
    words = (*launch(task, tmp_path / "run", "stops"), f"--budget-usd={budget}")
    code, text = harness(*words, env=environment(tmp_path), within_s=60)
    assert code == 2 and "Traceback" not in text, text
    assert not (tmp_path / "run" / "facts").exists()


# ---- controllers ------------------------------------------------------------------------------
def test_a_clock_that_jumps_trips_no_limit(task: Path, tmp_path: Path) -> None:
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


def test_a_controller_that_a_cloud_holds_up_is_not_overtaken(task: Path, tmp_path: Path) -> None:
    """For as long as the other one tries, where the lease is of 5 s."""
    run, begun = tmp_path / "run", tmp_path / "begun"
    env = environment(tmp_path, BLOCKS=str(begun), WAITS_S="0")
    first = start(*launch(task, run, "blocks"), env=env)
    try:
        until(begun.exists, "the first controller to lead")
        code, text = harness(*launch(task, run, "stops"), env=env)
        assert code == 1 and "as planned" not in text, text
    finally:
        begun.with_name("begun.over").touch()
        code, text = said_of(first)
    assert code == 3 and "as planned" in text, text


# ---- forgers ---------------------------------------------------------------------------------
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
def test_verify_finds(run: Path, tamper: Any) -> None:
    tamper(run)
    code, text = harness("prove", "verify", run)
    assert code == 1, text


# ---- injection -------------------------------------------------------------------------------
def test_what_a_fact_says_is_not_alive_in_a_page(run: Path, tmp_path: Path) -> None:
    write_facts(run, "controller-1", *attempt(1, exit_code="<img src=x onerror=alert(1)>"))
    page = tmp_path / "report.html"
    harness("runs", "report", run, "--html", page)
    assert page.exists() and "<img src=x" not in page.read_text()


def test_nothing_that_a_bucket_says_drives_a_terminal(run: Path) -> None:
    """A fact whose name is an escape sequence, and that was changed: `verify` names it."""
    write_facts(run, "controller-1", {"fact": "\x1b]0;owned\x07\x1b[2J", "a": 1})
    file = run / "facts" / "controller-1" / "000000.jsonl"
    file.write_text(file.read_text().replace('"a":1', '"a":2'))
    code, text = harness("prove", "verify", run)
    assert code == 1 and "owned" in text and "\x1b" not in text and "\x07" not in text


def test_markup_in_an_offer_is_shown_as_it_is(run: Path) -> None:
    facts = attempt(1, end="preempted")
    facts[0]["offer"] = {**facts[0]["offer"], "name": "a[/bold]b", "accelerator": "[/red]"}
    write_facts(run, "controller-1", *facts)
    code, text = harness("runs", "report", run)
    assert code == 0 and "MarkupError" not in text, text


# ---- other users -----------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of other users")
def test_a_socket_of_another_user_is_not_asked(run: Path) -> None:
    """`snapshots list` asks uploaders of this machine what they hold, and makes folders where they
    say."""
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    folder = parent / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:6]}"
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


def deep(manifest: Path) -> None:
    manifest.write_text("[" * 100_000)


def infinite(manifest: Path) -> None:
    resealed(manifest, lambda body: body["parts"][0].update(nbytes=float("inf")))


@pytest.mark.parametrize("damage", [deep, infinite], ids=lambda one: one.__name__)
def test_a_manifest_that_is_none_is_no_traceback(run: Path, damage: Any) -> None:
    damage(manifests(run)[-1])
    for words in (("snapshots", "list", run), ("verify", run)):
        _, told = harness(*words)
        assert "Traceback" not in told and "RecursionError" not in told, told[-2000:]


def test_runs_do_not_share_the_names_of_their_clusters() -> None:
    """The first 32 bits of the hashes of these two URLs are the same."""
    assert tag("s3://b/runs/62227") != tag("s3://b/runs/74413")


# ---- what is written on trust ----------------------------------------------------------------
def test_what_is_trusted_and_what_is_plain_is_written() -> None:
    text = (TREE / "docs" / "design" / "SECURITY.md").read_text()
    for word in ("TCPStore", "gloo", "NCCL", "Network rules", "policy: node", "Encryption", "pickled"):
        assert re.search(word, text, re.IGNORECASE), word
