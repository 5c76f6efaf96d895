"""Task files: what SkyPilot takes we take, what it refuses we refuse, and the message names
file, field and remedy."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.clouds.sky_task import Task, check_local, load, pairs
from harness.core.world import DRAINED, UNFIT, BadInput

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "sky_tasks" / "train.yaml"
SKY = importlib.util.find_spec("sky") is not None
BOTH = pytest.mark.parametrize(
    "sky",
    [
        pytest.param(True, marks=pytest.mark.skipif(not SKY, reason="SkyPilot is not installed")),
        False,
    ],
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SkyPilot's own imports


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "task.yaml"
        path.write_text(text)
        return path

    return write


@BOTH
def test_reads_what_skypilot_reads(write, sky):
    path = write(
        "name: x\nnum_nodes: 1\nworkdir: ${PLACE}/w\nsetup: echo hi\nrun: |\n  echo $A\n"
        "envs: {A: 1, B: , PLACE: /tmp}\nsecrets: {KEY: hidden, LATER: }\n"
        "resources: {use_spot: true, any_of: [{accelerators: 'L4:1'}, {infra: aws/us-east-1}], "
        "job_recovery: {recover_on_exit_codes: 33}}\n"
    )
    task = load(path, {"B": "two", "C": "3"}, use_skypilot=sky)
    assert (task.name, task.run, task.setup, task.num_nodes) == ("x", "echo $A\n", "echo hi", 1)
    assert task.envs == {"A": "1", "B": "two", "C": "3", "PLACE": "/tmp"}
    assert task.workdir == Path("/tmp/w")
    assert task.secrets["KEY"] == "hidden"
    assert task.managed_secrets == ("LATER",)
    assert (task.use_spot, task.recover_on_exit_codes) == (True, (33,))
    assert "hidden" not in repr(task) + str(task) + f"{task.secrets}"
    assert "KEY" in repr(task)
    assert load(path, {"B": ""}, {"LATER": "v"}, use_skypilot=sky).managed_secrets == ()


@BOTH
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: x\nresorces: {}", ["resources"]),
        ("run: x\nresources: {acelerators: L4}", ["resources", "accelerators"]),
        ("run: x\nresources: {any_of: [{use_spt: true}]}", ["resources.any_of.0", "use_spot"]),
        ("run: x\nresources: {use_spot: 3}", ["resources.use_spot", "bool"]),
        (
            "run: x\nresources: {job_recovery: {recover_on_exit_code: 33}}",
            ["resources.job_recovery", "recover_on_exit_codes"],
        ),
        (
            "run: x\nresources: {job_recovery: {recover_on_exit_codes: [333]}}",
            ["resources.job_recovery", "255"],
        ),
        ("run: x\nnum_nodes: two", ["num_nodes", "two", "int"]),
        ("run: x\nnum_nodes: 0", ["num_nodes", "1 or more"]),
        ("run: 3", ["run", "str"]),
        ("name: x", ["`run` section"]),
        ("run: ' '", ["`run` section"]),
        ("run: x\nenvs: {A: }", ["envs.A", "--env A=value"]),
        ("run: x\nenvs: {'a b': 1}", ["envs", "a b"]),
        ("run: [", ["not valid YAML", "line 1"]),
        ("- run", ["a list"]),
        ("", ["found 0"]),
        ("run: x\n---\nrun: y", ["found 2", "pipeline"]),
    ],
)
def test_refuses_what_skypilot_refuses(write, sky, text, says):
    path = write(text)
    with pytest.raises(BadInput) as e:
        load(path, use_skypilot=sky)
    for word in [str(path), *says]:
        assert word in str(e.value)
    assert "\x1b" not in str(e.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="directory"):
        load(tmp_path)


def test_pairs_of_a_command_line():
    assert pairs(["A=1", "B=x=y", "C=", "D"], {"D": "from outside"}) == {
        "A": "1",
        "B": "x=y",
        "C": "",
        "D": "from outside",
    }
    for bad in ("1A=2", "=x", "a b=1"):
        with pytest.raises(BadInput, match="not a variable name"):
            pairs([bad], {})
    with pytest.raises(BadInput, match="--secret KEY=value"):
        pairs(["KEY"], {}, "--secret")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nodes": 2}, "num_nodes is 2"),
        ({"git": {"url": "https://x/y.git"}}, "git repository"),
        ({"file_mounts": {"/data": "s3://b"}}, "file_mounts"),
        (
            {"file_mounts": {"/data": {"source": "s3://b", "mode": "MOUNT_CACHED"}}},
            "would have to write '/data' here",
        ),
        ({"volumes": {"/mnt/data": "my-volume"}}, "volumes: the local cloud has none, and '/mnt/d"),
        ({"managed_secrets": ("KEY",)}, "--secret KEY=value"),
        ({"workdir": Path("/no/such/dir")}, "not a directory"),
    ],
)
def test_what_the_local_cloud_cannot_do(changes, says):
    with pytest.raises(BadInput, match=says):
        check_local(Task(Path("t.yaml"), "t", "true", **changes))
    check_local(Task(Path("t.yaml"), "t", "true"))


@BOTH
def test_volumes_of_a_file_are_refused_by_the_local_cloud(sky, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("run: x\nvolumes:\n  /mnt/data: my-volume\n")
    with pytest.raises(BadInput, match="volumes: the local cloud has none"):
        check_local(load(path, use_skypilot=sky))


# ---- the task that we ship -----------------------------------------------------------------------
@BOTH
def test_train_yaml_is_a_skypilot_task(sky):
    with pytest.raises(BadInput, match="--env RUN=value"):
        load(TRAIN, use_skypilot=sky)
    task = load(TRAIN, {"RUN": "s3://b/runs/x"}, use_skypilot=sky)
    assert task.use_spot
    assert task.recover_on_exit_codes == (DRAINED, UNFIT)
    assert task.num_nodes == 1
    assert not task.managed_secrets  # WANDB_API_KEY is optional
    for name in task.envs:
        assert f"${name}" in task.run or name.startswith("WANDB"), f"{name} is not used"


@pytest.mark.skipif(not SKY, reason="SkyPilot is not installed")
def test_train_yaml_makes_a_skypilot_task_object(monkeypatch, tmp_path):
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.chdir(ROOT)
    schemas = pytest.importorskip("sky.utils.schemas")
    common = pytest.importorskip("sky.utils.common_utils")
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(TRAIN.read_text())
    config["envs"] = {k: None if v is None else str(v) for k, v in config["envs"].items()}
    common.validate_schema(config, schemas.get_task_schema())
    common.validate_schema(config["resources"], schemas.get_resources_schema())


def test_train_yaml_scripts_are_sound_and_setup_is_done_once(tmp_path):
    task = load(TRAIN, {"RUN": "s3://b/runs/x"}, use_skypilot=False)
    for script in (task.run, task.setup):
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=10)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    # A python3 whose venv has a python that only notes what pip is asked for.
    (tools / "python3").write_text(
        '#!/bin/bash\nmkdir -p "$3/bin"\n'
        'printf \'#!/bin/bash\\necho "$@" >> pip.log\\ntouch .venv/bin/harness; chmod +x '
        '.venv/bin/harness\\n\' > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"\n'
    )
    (tools / "python3").chmod(0o755)
    env = {**os.environ, **task.envs, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(["bash", "-c", task.setup], cwd=tmp_path, env=env, check=True, timeout=20)
    asked = (tmp_path / "pip.log").read_text().splitlines()
    assert len(asked) == 2
    assert "torch==" in asked[0]
    assert "-e .[worker]" in asked[1]
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    subprocess.run(["bash", "-c", task.setup], cwd=tmp_path, env=env, check=True, timeout=20)
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 4


def test_train_yaml_run_section_starts_the_agent(tmp_path):
    task = load(TRAIN, {"RUN": "s3://b/runs/x", "STEPS": "7"}, use_skypilot=False)
    (tmp_path / "harness").write_text('#!/bin/bash\necho "${WANDB_API_KEY-unset}" "$@"\n')
    (tmp_path / "harness").chmod(0o755)
    env = {**task.envs, **task.secrets, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    out = subprocess.run(
        ["bash", "-c", task.run],
        cwd=tmp_path,
        env=env,
        check=True,
        timeout=10,
        capture_output=True,
        text=True,
    )
    assert out.stdout.startswith(
        "unset run --run s3://b/runs/x --trackers wandb -- examples/pretrain.py --steps 7"
    )


@pytest.mark.parametrize("name", ["train.yaml", "train_gang.yaml"])
def test_a_wandb_key_alone_means_online(tmp_path, name):
    task = load(
        TRAIN.with_name(name), {"RUN": "s3://b/runs/x"}, {"WANDB_API_KEY": "k"}, use_skypilot=False
    )
    (tmp_path / "harness").write_text(
        '#!/bin/bash\necho "${WANDB_API_KEY-unset} ${WANDB_MODE-unset}"\n'
    )
    (tmp_path / "harness").chmod(0o755)
    env = {**task.envs, **task.secrets, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    out = subprocess.run(
        ["bash", "-c", task.run],
        cwd=tmp_path,
        env=env,
        check=True,
        timeout=10,
        capture_output=True,
        text=True,
    )
    assert out.stdout.split() == ["k", "unset"]


@pytest.mark.parametrize("name", ["sky_tasks/train.yaml", "harness/cli/templates/train.yaml"])
def test_the_mounts_that_a_task_offers_in_comments_are_valid(tmp_path, name):
    text = (ROOT / name).read_text()
    text = re.sub(r"(?m)^# (file_mounts:|  ~/)", r"\1", text)
    text = re.sub(r"(?m)^  # (~/)", r"  \1", text)
    (tmp_path / "t.yaml").write_text(text)
    mounts = load(tmp_path / "t.yaml", {"RUN": "s3://b/r"}).file_mounts
    for path in ("~/data", "~/.cache/pip"):
        assert mounts[path]["source"].startswith("s3://") and mounts[path]["mode"] == "MOUNT_CACHED"
