"""How a run was set up: kept within bounds and without secrets, compared, told."""

import argparse
import dataclasses
import enum
import json
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.bucket import setup_objects as shelf
from harness.bucket.setup_objects import SetupAt, list_setups, read_setup, write_launch, write_setup
from harness.core.masking import masked_line, masked_patch, masked_words, url_without_secrets
from harness.core.setup_record import (
    HARDWARE,
    LAUNCH,
    MOST_VALUES,
    SOFTWARE,
    TRAINING,
    GitState,
    Setup,
    changes,
    flags_of,
    plain_config,
)
from harness.core.world import BadInput
from harness.node import provenance
from harness.worker.process_group import Peers
from harness.worker.run_context import Run
from harness.worker.setup_check import SetupCheck
from storage.canonical_json import BadObject
from storage.stores.folder_store import MemoryStore
from support.setups import BEGAN, told


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
    assert provenance.git_state(tmp_path) == (GitState(), b"")
    git(tmp_path, "init", "--initial-branch=main")
    git(tmp_path, "remote", "add", "origin", "https://me:pw@example.org/x.git")
    (tmp_path / "a.py").write_text('password = "swordfish"\nlr = 1\n')
    (tmp_path / "b.bin").write_bytes(bytes(range(256)))
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean, patch = provenance.git_state(tmp_path)
    assert (clean.branch, clean.remote, clean.pushed) == ("main", "https://example.org/x.git", False)
    assert (clean.diff, clean.kept, patch) == ("", "", b"")
    (tmp_path / "a.py").write_text('password = "swordfish"\nlr = 2\n')
    (tmp_path / "b.bin").write_bytes(bytes(range(255, -1, -1)))
    state, patch = provenance.git_state(tmp_path)
    # the secret stands beside the change: without lines around it the patch applies all the same
    assert (state.kept, state.masked, state.context) == ("whole", 0, 0)
    assert b"swordfish" not in patch
    git(tmp_path, "checkout", ".")
    (tmp_path.parent / "p").write_bytes(patch)
    git(tmp_path, "apply", "--unidiff-zero", "../p")
    assert (tmp_path / "a.py").read_text().endswith("lr = 2\n")
    assert (tmp_path / "b.bin").read_bytes()[0] == 255
    assert provenance.git_state(tmp_path)[0].diff == state.diff
    only, nothing = provenance.git_state(tmp_path, keep_diff=False)
    assert (only.diff, only.kept, nothing) == (state.diff, "hash", b"")
    (tmp_path / "a.py").write_text('password = os.environ["P"]\nlr = 2\n')
    assert provenance.git_state(tmp_path)[0].masked_before == 1
    (tmp_path / "a.py").write_text(("x" * 4000 + "\n") * 300)
    cut, patch = provenance.git_state(tmp_path)
    assert cut.kept == "cut" and (1 << 19) < len(patch) <= provenance.DIFF_NBYTES


def test_a_script_that_git_does_not_know_is_kept(tmp_path):
    script = tmp_path / "jobs" / "train.py"
    script.parent.mkdir()
    script.write_text('lr = 1\npassword = "swordfish"\nlast = 2')
    alone, patch = provenance.git_state(tmp_path, script=script)
    assert (alone.commit, alone.kept, alone.masked) == ("", "whole", 1)
    git(tmp_path, "init", "--initial-branch=main")
    (tmp_path / "a.txt").write_text("1\n")
    (tmp_path / ".gitignore").write_text("jobs\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "a.txt").write_text("2\n")
    state, both = provenance.git_state(script.parent, script=script)
    assert (state.folder, state.kept, both.endswith(patch)) == ("jobs/", "whole", True)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", ".", "clone")
    (clone / "p").write_bytes(both)
    git(clone, "apply", "p")
    assert (clone / "a.txt").read_text() == "2\n"
    assert (clone / "jobs" / "train.py").read_text() == script.read_text().replace("swordfish", "***")
    git(tmp_path, "add", "-f", "jobs")
    assert b"train.py" in provenance.git_state(tmp_path, script=script)[1]  # as git tells it


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
    assert provenance.packages([str(tmp_path), str(tmp_path / "none")]) == {
        "flash-attn": "2.1",
        "from-git": "3 @ git+https://example.org/g.git@abc",
        "mine": "1.0 @ file:",
    }


def test_variables_that_steer_libraries_and_nothing_else():
    told = provenance.variables(
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
    assert (shelf.newest_setup(store), shelf.people_of(store)) == (None, {})
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
    assert shelf.readable(store, [first]) is None


def test_a_setup_that_is_too_large_loses_its_largest_parts():
    data = shelf.encoded(dataclasses.replace(BEGAN, task="x" * (2 << 20)))
    found = shelf.decode_setup(data)
    assert (found.task, found.left_out) == ("", ("the task file (too large)",))
    assert found.config == BEGAN.config


# ---- the logbook ---------------------------------------------------------------------------------


# ---- once more -----------------------------------------------------------------------------------


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


