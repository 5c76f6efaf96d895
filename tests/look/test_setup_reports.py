"""What a run was set up with: told by reports, found by verify, and enough to make it again."""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.bucket import setup_objects as shelf
from harness.bucket.setup_objects import list_setups, read_setup, write_launch, write_setup
from harness.cli.launch import LaunchFlags
from harness.cli.run_record import about_launch, keep_launch, with_image
from harness.clouds import sky_task
from harness.core import facts as f
from harness.core.setup_record import (
    HARDWARE,
    LAUNCH,
    GitState,
    Setup,
)
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from harness.look.reports.rerun import find, recipe, requirements_file
from harness.look.reports.setup_report import (
    LONGEST_NOTE,
    LogbookEntry,
    read_logbook,
    read_notes,
    summarize_setups,
    write_note,
)
from storage.canonical_json import digest
from storage.stores.folder_store import MemoryStore
from support.setups import BEGAN
from support.truerun import TrueRun


def test_reports_tell_what_changed():
    store = MemoryStore("memory://", {})
    write_setup(store, 1, BEGAN, b"")
    rows = ({"level": HARDWARE, "name": "device", "was": "a", "now": "b"}, {"name": "odd"})
    told = [f.Stamped(5.0, "w", f.SetupChanged(3, "ab", "warned", rows, more=1))]
    found = summarize_setups(store, told)
    assert (found.shifts[0].level, found.shifts[0].epoch) == (HARDWARE, 3)
    body = json.loads(json.dumps(found.to_json()))
    assert body["git"]["commit"] == "0a" * 20
    assert body["changes"][0]["changes"][0]["now"] == "b"


def test_verify_finds_a_changed_record():
    run = TrueRun().train(4)
    assert "setup" not in [check.name for check in audit(run.store).checks]
    at = write_setup(run.store, 1, shelf.with_diff(BEGAN, b"patch"), b"patch")
    assert [(c.ok, c.n) for c in audit(run.store).checks if c.name == "setup"] == [(True, 2)]
    patch = f"setup/diff-{digest(b'patch')}.patch"
    for key in (at.key, patch):
        kept = run.store.get(key)
        run.store.put(key, kept[:-1] + b"?")
        assert key in audit(run.store).first_violation
        run.store.put(key, kept)
    run.store.delete(patch)
    assert "names a patch" in audit(run.store).first_violation


def test_notes_are_kept_and_shown_as_they_are():
    store = MemoryStore("memory://", {})
    write_setup(store, 1, BEGAN, b"")
    write_note(store, LogbookEntry(2000.0, "later", "b"), "00000002")
    write_note(store, LogbookEntry(1000.0, "[red]why\x1b[2J[/]\nnext", "a", 7), "00000001")
    store.put("logbook/00000000003000-0000000f.json", b"{}")
    book = read_logbook(store)
    assert (book.purpose, book.more) == ("to see [bold]it[/]", 1)
    text = "\n".join(book.lines())
    assert "a, step 7: [red]why [2J[/]\n    next" in text
    assert text.index("[red]why") < text.index("later")
    assert json.loads(json.dumps(book.to_json()))["entries"][1]["text"] == "later"
    with pytest.raises(BadInput, match="empty"):
        write_note(store, LogbookEntry(1.0, "  "), "00000003")
    with pytest.raises(BadInput, match=str(LONGEST_NOTE)):
        write_note(store, LogbookEntry(1.0, "x" * 5000), "00000003")
    assert len(read_notes(store)[0]) == 2


def test_a_lock_has_what_an_index_has():
    store = MemoryStore("memory://", {})
    packages = {**BEGAN.packages, "g": "3 @ git+https://x/g.git@abc", "--evil": "1", "z": "1\n--bad"}
    write_setup(store, 1, dataclasses.replace(BEGAN, packages=packages), b"")
    assert requirements_file(find(store, None)).splitlines()[1:] == [
        "--extra-index-url https://download.pytorch.org/whl/cpu",
        "# --evil==1: installed from a folder of its machine",
        "g @ git+https://x/g.git@abc",
        "rich==13.0",
        "# spotharness==0.1.0: installed from a folder of its machine",
        "torch==2.13.0+cpu",
        "# z==1 --bad: installed from a folder of its machine",
    ]


def test_nothing_of_a_bucket_is_a_command():
    store = MemoryStore("memory://", {})
    evil = "x; touch /tmp/pwned $(id) `id` 'a'\n\x1b[2J rm"
    setup = dataclasses.replace(
        BEGAN,
        argv=(evil, "--key", "***", "--a-token=***"),
        git=GitState("0a" * 20, evil, evil, evil, untracked=(evil,)),
        environment={"OK": evil, "not ok": "x"},
        software={"python": evil, "image": evil},
    )
    write_setup(store, 1, setup, b"")
    write_launch(store, Setup(seat=LAUNCH, argv=("launch", "t.yaml", "--env", "K=***", evil)), b"")
    for text in (recipe(find(store, None), "file:///x"), recipe(find(store, None), "y", by_run=True)):
        words = subprocess.run(
            ["bash", "-nv"], input=text, capture_output=True, text=True, check=True
        )
        assert not words.stdout
        assert all(line.isprintable() for line in text.splitlines())
        shown = subprocess.run(
            [shutil.which("bash"), "-c", "harness() { :; }; git() { :; }; cd() { :; }; python3() { :; };" + text],
            capture_output=True, text=True, env={"KEY": "1", "A_TOKEN": "1", "PATH": "/none"},
        )  # fmt: skip
        assert "not found" not in shown.stderr
    assert not Path("/tmp/pwned").exists()


def test_each_step_as_the_run_was_set_up_then():
    run = TrueRun().train(4).train(8)
    write_setup(run.store, 1, BEGAN, b"")
    other = dataclasses.replace(BEGAN, argv=("train.py", "--lr", "0.2", "data", "--fast"))
    write_setup(run.store, 2, other, b"")
    began, early, late = (find(run.store, step) for step in (None, 3, 6))
    assert [found.at.number for found in (began, early, late)] == [1, 1, 2]
    assert (late.step, late.epoch, late.setup) == (6, 2, other)
    assert began.others == ("from generation 2 on: --lr was 0.1, now it is 0.2",)
    text = recipe(late, "file:///x", here=True)
    assert "--lr 0.2 data --fast" in text and "# It was set up otherwise from generation 1 on" in text
    with pytest.raises(BadInput, match="committed step 9"):
        find(run.store, 9)


def test_a_run_without_a_record_says_so():
    with pytest.raises(BadInput, match="has not begun"):
        find(MemoryStore("memory://", {}), None)


TASK = """\
name: t
resources: {image_id: docker:me/x:1}
envs: {RUN: "", STEPS: "3"}
secrets: {WANDB_API_KEY: inthefile123}
run: |
  exec harness run --run "$RUN" -- train.py --steps $STEPS  # [bold]
"""


def test_a_launch_is_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USER", "me")
    for name in ("HARNESS_OWNER", "HARNESS_PURPOSE", "HARNESS_ON_CHANGE"):
        monkeypatch.delenv(name, raising=False)
    Path("t.yaml").write_text(TASK)
    flags = LaunchFlags(
        "t.yaml", run="s3://b/x", nodes="1:2", purpose="to see", on_change="refuse",
        env=("STEPS=5", "MY_TOKEN=abc", "URL=s3://u:p@b/x"), secret=("HF_TOKEN=given123",),
    )  # fmt: skip
    envs = about_launch(flags, os.environ)
    assert envs == {
        "HARNESS_OWNER": "me", "HARNESS_PURPOSE": "to see", "HARNESS_ON_CHANGE": "refuse",
    }  # fmt: skip
    secrets = sky_task.pairs(flags.secret, os.environ, "--secret")
    task = with_image(sky_task.load("t.yaml", envs, secrets, use_skypilot=False))
    assert task.envs["HARNESS_IMAGE"] == "docker:me/x:1"
    store = MemoryStore("memory://", {})
    keep_launch(store, flags, task)
    keep_launch(store, flags, task)  # the same command, to resume: nothing new
    (at,) = list_setups(store, LAUNCH)
    kept = store.get(at.key).decode()
    assert not any(word in kept for word in ("inthefile", "given123", "abc", "u:p"))
    setup = read_setup(store, at)
    assert setup.people == {"owner": "me", "purpose": "to see"}
    assert setup.argv[:2] == ("launch", "t.yaml")
    assert setup.task == TASK.replace("inthefile123", "***")
    assert "HF_TOKEN (a secret)" in setup.left_out
    write_setup(store, 1, BEGAN, b"")
    found = find(store, None)
    text = recipe(found, "s3://b/again")
    assert "export WANDB_API_KEY" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("harness launch")]
    words = shlex.split(line)
    assert words[:3] == ["harness", "launch", "task.yaml"]
    assert words[-2:] == ["--run", "$RUN"]
    assert line.count("--run") == 1 and "--env MY_TOKEN --env" in line
    parsed = [words[i + 1] for i, word in enumerate(words) if word == "--secret"]
    assert parsed == ["HF_TOKEN"]
    assert "harness run" in recipe(found, "x", by_run=True)
