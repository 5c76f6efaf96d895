"""How a run was set up: kept within bounds and without secrets, compared, told."""

import argparse
import dataclasses
import enum
import json
import os
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from truerun import TrueRun

from harness.bucket import setups as shelf
from harness.bucket.journal import read_facts
from harness.bucket.notes import LONGEST_NOTE, LogbookEntry, read_notes, write_note
from harness.bucket.setups import SetupAt, list_setups, read_setup, write_launch, write_setup
from harness.cli.launch import LaunchFlags
from harness.cli.record import about_launch, keep_launch, with_image
from harness.clouds import tasks
from harness.core import facts as f
from harness.core.masking import masked_line, masked_patch, masked_words, url_without_secrets
from harness.core.plain import MOST_VALUES, plain_config
from harness.core.setups import (
    HARDWARE,
    LAUNCH,
    SOFTWARE,
    TRAINING,
    GitState,
    Setup,
    changes,
    flags_of,
)
from harness.core.values import BadObject, digest
from harness.core.world import BadInput
from harness.node import surroundings
from harness.views.audit import audit
from harness.views.logbook import read_logbook
from harness.views.rerun import find, lock, recipe
from harness.views.setups import summarize_setups
from harness.worker.peers import Peers
from harness.worker.run import Run
from harness.worker.setup_check import SetupCheck
from storage.files import MemoryStore

BEGAN = Setup(
    argv=("jobs/train.py", "--lr", "0.1", "data", "--fast"),
    script="ab" * 32,
    config={"model": {"width": 8, "layers": [1, 2]}},
    git=GitState("0a" * 20, "main", "https://example.org/x.git"),
    packages={"torch": "2.13.0+cpu", "rich": "13.0", "spotharness": "0.1.0 @ file:"},
    software={"python": "3.11.7", "torch": "2.13.0+cpu", "image": "nvcr.io/x:1"},
    hardware={"device": "H100", "driver": "550.1"},
    environment={"NCCL_ALGO": "Ring"},
    people={"owner": "me", "purpose": "to see [bold]it[/]"},
)


# ---- configurations ------------------------------------------------------------------------------
class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Inner:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class Lazy(Mapping):
    """As OmegaConf: one value is missing, and says so when it is read."""

    def __iter__(self):
        return iter(["there", "missing"])

    def __len__(self):
        return 2

    def __getitem__(self, key):
        if key == "missing":
            raise ValueError("???")
        return 5


def test_a_configuration_becomes_plain_json():
    given = {
        "optim": Inner(),
        "flags": argparse.Namespace(steps=3, name="x"),
        "lazy": Lazy(),
        "space": types.SimpleNamespace(a=None),
        "dtype": torch.bfloat16,
        "scalar": np.float32(0.5),
        "loss": torch.nn.functional.relu,
        "colour": Colour.RED,
        "path": Path("/data/x"),
        "nan": float("nan"),
        "big": 1 << 60,
        "set": {"b", "a"},
        "bad": [1, object()],
        "local": lambda: 0,
        "wandb_api_key": "k",
        "url": "s3://me:pw@bucket/x",
        7: "seven",
    }
    found, left_out = plain_config(given)
    assert json.loads(json.dumps(found)) == found
    assert found["optim"] == {"lr": 0.1, "betas": [0.9, 0.95]}
    assert (found["flags"], found["lazy"], found["space"]) == (
        {"steps": 3, "name": "x"}, {"there": 5}, {"a": None},
    )  # fmt: skip
    assert (found["dtype"], found["scalar"], found["colour"]) == ("torch.bfloat16", 0.5, "RED")
    assert (found["loss"], found["path"], found["7"]) == (
        "torch.nn.functional.relu", "/data/x", "seven",
    )  # fmt: skip
    assert (found["nan"], found["big"], found["set"]) == ("nan", str(1 << 60), ["a", "b"])
    assert (found["wandb_api_key"], found["url"]) == ("***", "s3://bucket/x")
    assert left_out == (
        "lazy.missing (it cannot be read: ValueError)",
        "bad[1] (object)",
        "local (function)",
        "wandb_api_key (it is called like a secret)",
    )


def test_models_of_pydantic_and_attrs_by_what_they_declare():
    class Model:
        model_fields = dict(lr=..., inner=...)  # noqa: C408, RUF012
        lr, inner = 1.0, Inner()

    class Attrs:
        __attrs_attrs__ = (types.SimpleNamespace(name="x"),)
        x = 2

    class Other:
        def to_dict(self):
            return {"y": 3}

    assert plain_config(Model())[0] == {"lr": 1.0, "inner": {"lr": 0.1, "betas": [0.9, 0.95]}}
    assert plain_config({"a": Attrs(), "b": Other()})[0] == {"a": {"x": 2}, "b": {"y": 3}}


def test_a_configuration_is_bounded():
    endless: dict = {}
    endless["again"] = endless
    wide = {str(i): [[] for _ in range(100)] for i in range(1000)}
    for given in (endless, wide, {"text": ["x" * 5000] * 1000}):
        found, left_out = plain_config(given)
        assert left_out
        assert len(json.dumps(found)) < 300_000
    assert str(MOST_VALUES) in plain_config(wide)[1][0]


@pytest.mark.parametrize("given", [5, "lr=1", [1], Inner])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(BadInput, match="wanted a dict"):
        plain_config(given)


# ---- secrets -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('api_key = "abcdef1234567890"', 'api_key = "***"'),
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345", "HF_TOKEN=***"),
        ('{"password": "hunter-two"}', '{"password": "***"}'),
        ("x = AKIAABCDEFGHIJKLMNOP", "x = ***"),
        ('u = "https://me:pw@host/x"', 'u = "https://***@host/x"'),
        ("token = tokenizer.encode(text)", None),
        ('eos_token = "<|endoftext|>"', None),
        ("cache_key = make(a, b)", None),
        ("max_tokens = 4096", None),
    ],
)
def test_lines_of_programs_without_secrets(line, told):
    assert masked_line(line) == (told or line)


def test_words_and_urls_without_secrets():
    words, hidden = masked_words(
        ["x.py", "--lr", "0.1", "--api-key", "k", "--hf-token=t", "--data", "s3://u:p@b/x?sig=1&v=2"]
    )
    assert words == [
        "x.py", "--lr", "0.1", "--api-key", "***", "--hf-token=***", "--data", "s3://b/x?sig=***&v=2",
    ]  # fmt: skip
    assert hidden == ["--api-key", "--hf-token"]
    assert url_without_secrets("ssh://git@host/x.git") == "ssh://git@host/x.git"


def test_a_patch_tells_which_lines_were_masked():
    patch = [
        "diff --git a/x b/x", "--- a/x", "+++ b/x", '@@ -1 +1 @@ token = "abcdef123456789"',
        ' password = "swordfish"', '-secret = "swordfish"', "--- a comment of SQL", "+lr = 1",
        "+-----BEGIN RSA PRIVATE KEY-----", "+MIIEabc", "+-----END RSA PRIVATE KEY-----", "+after",
    ]  # fmt: skip
    told = list(masked_patch(patch))
    assert [sign for _, sign in told if sign] == [" ", "-", "+"]
    assert not any("swordfish" in line or "MIIE" in line or "abcdef1" in line for line, _ in told)


# ---- the work tree -------------------------------------------------------------------------------
def git(folder: Path, *words: str) -> None:
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", *me, *words], cwd=folder, check=True, capture_output=True)


def test_a_work_tree_is_told_without_secrets(tmp_path):
    assert surroundings.git_state(tmp_path) == (GitState(), b"")
    git(tmp_path, "init", "--initial-branch=main")
    git(tmp_path, "remote", "add", "origin", "https://me:pw@example.org/x.git")
    (tmp_path / "a.py").write_text('password = "swordfish"\nlr = 1\n')
    (tmp_path / "b.bin").write_bytes(bytes(range(256)))
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean, patch = surroundings.git_state(tmp_path)
    assert (clean.branch, clean.remote, clean.pushed) == ("main", "https://example.org/x.git", False)
    assert (clean.diff, clean.kept, patch) == ("", "", b"")
    (tmp_path / "a.py").write_text('password = "swordfish"\nlr = 2\n')
    (tmp_path / "b.bin").write_bytes(bytes(range(255, -1, -1)))
    state, patch = surroundings.git_state(tmp_path)
    # the secret stands beside the change: without lines around it the patch applies all the same
    assert (state.kept, state.masked, state.context) == ("whole", 0, 0)
    assert b"swordfish" not in patch
    git(tmp_path, "checkout", ".")
    (tmp_path.parent / "p").write_bytes(patch)
    git(tmp_path, "apply", "--unidiff-zero", "../p")
    assert (tmp_path / "a.py").read_text().endswith("lr = 2\n")
    assert (tmp_path / "b.bin").read_bytes()[0] == 255
    assert surroundings.git_state(tmp_path)[0].diff == state.diff
    only, nothing = surroundings.git_state(tmp_path, keep_diff=False)
    assert (only.diff, only.kept, nothing) == (state.diff, "hash", b"")
    (tmp_path / "a.py").write_text('password = os.environ["P"]\nlr = 2\n')
    assert surroundings.git_state(tmp_path)[0].masked_before == 1
    (tmp_path / "a.py").write_text(("x" * 4000 + "\n") * 300)
    cut, patch = surroundings.git_state(tmp_path)
    assert cut.kept == "cut" and (1 << 19) < len(patch) <= surroundings.DIFF_NBYTES


def test_a_script_that_git_does_not_know_is_kept(tmp_path):
    script = tmp_path / "jobs" / "train.py"
    script.parent.mkdir()
    script.write_text('lr = 1\npassword = "swordfish"\nlast = 2')
    alone, patch = surroundings.git_state(tmp_path, script=script)
    assert (alone.commit, alone.kept, alone.masked) == ("", "whole", 1)
    git(tmp_path, "init", "--initial-branch=main")
    (tmp_path / "a.txt").write_text("1\n")
    (tmp_path / ".gitignore").write_text("jobs\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "a.txt").write_text("2\n")
    state, both = surroundings.git_state(script.parent, script=script)
    assert (state.folder, state.kept, both.endswith(patch)) == ("jobs/", "whole", True)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", ".", "clone")
    (clone / "p").write_bytes(both)
    git(clone, "apply", "p")
    assert (clone / "a.txt").read_text() == "2\n"
    assert (clone / "jobs" / "train.py").read_text() == script.read_text().replace("swordfish", "***")
    git(tmp_path, "add", "-f", "jobs")
    assert b"train.py" in surroundings.git_state(tmp_path, script=script)[1]  # as git tells it


def test_packages_are_what_is_installed(tmp_path):
    def install(name, version, said=None):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        if said:
            (info / "direct_url.json").write_text(json.dumps(said))

    install("Flash_Attn", "2.1")
    install("mine", "1.0", {"url": "file:///srv/x", "dir_info": {}})
    vcs = {"vcs": "git", "commit_id": "abc"}
    install("from_git", "3", {"url": "https://u:pw@example.org/g.git", "vcs_info": vcs})
    assert surroundings.packages([str(tmp_path), str(tmp_path / "none")]) == {
        "flash-attn": "2.1",
        "from-git": "3 @ git+https://example.org/g.git@abc",
        "mine": "1.0 @ file:",
    }


def test_variables_that_steer_libraries_and_nothing_else():
    told = surroundings.variables(
        {
            "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "x",
            "HARNESS_EPOCH": "3", "NCCL_SOCKET_IFNAME": "lo", "HOME": "/", "SKYPILOT_NODE_RANK": "0",
        }
    )  # fmt: skip
    assert told == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}


# ---- comparing -----------------------------------------------------------------------------------
def test_changes_by_weight():
    assert changes(BEGAN, BEGAN) == ()
    now = dataclasses.replace(
        BEGAN,
        argv=("/elsewhere/train.py", "data", "--fast", "--lr=0.2", "--new"),
        config={"model": {"width": 9, "layers": [1, 2]}, "more": 1},
        git=GitState("0b" * 20, "main", diff="cd" * 32),
        packages={"torch": "2.14.0", "rich": "14.0"},
        software={"python": "3.12.0"},
        hardware={"device": "A100"},
        environment={},
    )
    told = [(c.level, c.name, c.was, c.now) for c in changes(BEGAN, now)]
    assert told == [
        (TRAINING, "--lr", "0.1", "0.2"),
        (TRAINING, "--new", "not given", "given"),
        (TRAINING, "config model.width", "8", "9"),
        (TRAINING, "config more", "not given", "1"),
        (TRAINING, "git commit", "0a" * 20, "0b" * 20),
        (TRAINING, "uncommitted changes", "none", "cd" * 8),
        (SOFTWARE, "spotharness", "0.1.0 @ file:", "not given"),
        (SOFTWARE, "torch", "2.13.0+cpu", "2.14.0"),
        (SOFTWARE, "python", "3.11.7", "3.12.0"),
        (SOFTWARE, "NCCL_ALGO", "Ring", "not given"),
        (HARDWARE, "device", "H100", "A100"),
    ]


def test_what_only_one_knows_is_no_change():
    unknowing = Setup(argv=BEGAN.argv)
    assert [c.name for c in changes(BEGAN, unknowing)] == ["NCCL_ALGO"]
    assert changes(Setup(), BEGAN)[0].name == "NCCL_ALGO"


def test_flags_by_name():
    assert flags_of(["-m", "pkg.train", "--x", "-1", "a", "--y=2", "--y", "3", "b"]) == {
        "--x": "-1", "arguments": "a b", "--y": "2 3",
    }  # fmt: skip


# ---- in the bucket -------------------------------------------------------------------------------
def test_setups_lie_by_who_and_digest():
    store = MemoryStore("memory://", {})
    assert (shelf.first_setup(store), shelf.people_of(store)) == (None, {})
    first = write_setup(store, 1, shelf.with_diff(BEGAN, b"patch"), b"patch")
    later = write_setup(store, 12, dataclasses.replace(BEGAN, argv=("y.py",)), b"")
    store.create("setup/session-x.json", b"somebody else's")
    assert list_setups(store) == [first, later]
    assert shelf.read_diff(store, read_setup(store, first)) == b"patch"
    assert shelf.newest_setup(store).argv == ("y.py",)
    assert shelf.people_of(store)["owner"] == "me"
    asked = Setup(seat=LAUNCH, argv=("launch", "x.yaml"))
    assert write_launch(store, asked, b"") == write_launch(store, asked, b"")
    assert write_launch(store, Setup(seat=LAUNCH), b"").number == 2
    assert [at.number for at in list_setups(store, LAUNCH)] == [1, 2]
    store.put(first.key, store.get(later.key))
    with pytest.raises(BadObject, match="changed"):
        read_setup(store, first)
    assert shelf.first_setup(store) is None


def test_a_setup_that_is_too_large_loses_its_largest_parts():
    data = shelf.encoded(dataclasses.replace(BEGAN, task="x" * (2 << 20)))
    found = shelf.decode_setup(data)
    assert (found.task, found.left_out) == ("", ("the task file (too large)",))
    assert found.config == BEGAN.config


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


# ---- the logbook ---------------------------------------------------------------------------------
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


# ---- once more -----------------------------------------------------------------------------------
def test_a_lock_has_what_an_index_has():
    store = MemoryStore("memory://", {})
    packages = {**BEGAN.packages, "g": "3 @ git+https://x/g.git@abc", "--evil": "1", "z": "1\n--bad"}
    write_setup(store, 1, dataclasses.replace(BEGAN, packages=packages), b"")
    assert lock(find(store, None)).splitlines()[1:] == [
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
    assert began.others == ("from epoch 2 on: --lr was 0.1, now it is 0.2",)
    text = recipe(late, "file:///x", here=True)
    assert "--lr 0.2 data --fast" in text and "# It was set up otherwise from epoch 1 on" in text
    with pytest.raises(BadInput, match="committed step 9"):
        find(run.store, 9)


def test_a_run_without_a_record_says_so():
    with pytest.raises(BadInput, match="older version"):
        find(MemoryStore("memory://", {}), None)


def test_places_are_ordered_by_number():
    assert SetupAt("session", 9, "b") < SetupAt("session", 10, "a")


# ---- sessions ------------------------------------------------------------------------------------
def session(url: str, epoch: int, argv: str, on_change: str | None = None, **environ: str):
    """A session's check, in this process; and the facts that it told."""
    environ = {"HARNESS_EPOCH": str(epoch), **environ}
    peers = Peers(environ)
    run = Run(peers, url, environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv.split())
        patch.setattr(sys.modules["__main__"], "__spec__", None)
        check = SetupCheck(peers, run, {"lr": 1.0}, on_change, environ)
        check._thread.join()
    return check, run


def told(run: Run) -> list[f.Fact]:
    run.flush()
    return [s.fact for s in read_facts(run.store)]


def test_a_change_is_told_once_and_weighed(tmp_path, capfd):
    url = f"file://{tmp_path}"
    check, run = session(url, 1, "x.py --lr 1")
    check.announce()
    assert [at.number for at in list_setups(run.store)] == [1]  # before run.json
    check.settle()
    check, run = session(url, 2, "x.py --lr 1")
    check.settle()
    assert [at.number for at in list_setups(run.store)] == [1]
    assert not told(run)
    check, run = session(url, 3, "x.py --lr 2", NCCL_ALGO="Ring")
    check.settle()
    (changed,) = told(run)
    assert (changed.action, [row["name"] for row in changed.changes]) == (
        "warned", ["--lr", "NCCL_ALGO"],
    )  # fmt: skip
    loud, quiet = capfd.readouterr().out.splitlines()
    assert "WARNING" in loud and "--lr was 1, now it is 2" in loud and "NCCL" not in loud
    assert "NCCL_ALGO was not given, now it is Ring" in quiet
    check, run = session(url, 4, "x.py --lr 2", NCCL_ALGO="Ring")  # known by now
    check.settle()
    check, run = session(url, 5, "x.py --lr 1", HARNESS_OWNER="another")  # as it began
    check.settle()
    assert told(run) == [changed]
    assert [at.number for at in list_setups(run.store)] == [1, 3, 5]
    assert shelf.people_of(run.store)["owner"] == "another"


def test_a_change_is_refused_until_it_is_accepted(tmp_path):
    url = f"file://{tmp_path}"
    session(url, 1, "x.py --lr 1")[0].settle()
    check, run = session(url, 2, "x.py --lr 2", HARNESS_ON_CHANGE="refuse")
    with pytest.raises(BadInput, match=r"--lr was 1, now it is 2.*--on-change accept"):
        check.settle()
    assert [at.number for at in list_setups(run.store)] == [1]
    assert [fact.action for fact in told(run)] == ["refused"]
    check, run = session(url, 3, "x.py --lr 2", on_change="accept", HARNESS_ON_CHANGE="refuse")
    check.settle()
    run.flush()
    check, run = session(url, 4, "x.py --lr 2", HARNESS_ON_CHANGE="refuse")
    check.settle()  # accepted once
    assert [fact.action for fact in told(run)] == ["refused", "accepted"]
    with pytest.raises(BadInput, match="--fast"):
        session(url, 5, "x.py --lr 2 --fast", on_change="refuse")[0].settle()


def test_another_machine_is_never_refused(tmp_path):
    url = f"file://{tmp_path}"
    check, run = session(url, 1, "x.py")
    first, _ = check._found
    write_setup(run.store, 1, dataclasses.replace(first, hardware={"device": "H100"}), b"")
    check, run = session(url, 2, "x.py", on_change="refuse")
    check.settle()
    assert [(fact.kind, fact.action) for fact in told(run)] == [("SetupChanged", "warned")]


def test_a_record_that_cannot_be_read_is_not_compared(tmp_path):
    url = f"file://{tmp_path}"
    check, run = session(url, 1, "x.py --lr 1")
    check.settle()
    run.store.put(list_setups(run.store)[0].key, b"{}")
    check, run = session(url, 2, "x.py --lr 2", on_change="refuse")
    check.settle()
    assert "cannot be read" in told(run)[0].what


def test_what_to_do_about_a_change_is_one_of_three(tmp_path):
    for given in ({"on_change": "no"}, {"HARNESS_ON_CHANGE": "no"}):
        with pytest.raises(BadInput, match="wanted refuse, warn or accept"):
            session(f"file://{tmp_path}", 1, "x.py", **given)


# ---- launches ------------------------------------------------------------------------------------
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
    secrets = tasks.pairs(flags.secret, os.environ, "--secret")
    task = with_image(tasks.load("t.yaml", envs, secrets, use_skypilot=False))
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
