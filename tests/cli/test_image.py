"""`harness image`: the Dockerfile has what a task's setup installs, and the setup sees that."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from harness.cli.command import main
from harness.clouds.own_wheel import WHEEL_ENV, WHEELS

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "harness" / "cli" / "templates" / "train.yaml"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(TEMPLATE.read_text())
    return tmp_path


def steps(place):
    """The Dockerfile as (instruction, argument)."""
    text = (place / "image" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def image(*words):
    """The exit status of `harness image`."""
    with pytest.raises(SystemExit) as ended:
        main(["image", *words])
    return ended.value.code


def refused(*words):
    assert image(*words) == 2


def test_an_image_has_torch_the_wheel_and_the_scripts_packages(place, capsys):
    (place / "requirements.txt").write_text("einops==0.8.0\n")
    assert image("train.yaml", "--tag", "r.example/x:1") == 0
    (wheel,) = (place / "image").glob("*.whl")
    [kept] = (place / "home" / WHEELS).glob("*/*.whl")
    assert wheel.read_bytes() == kept.read_bytes()
    assert (place / "image" / "requirements.txt").read_text() == "einops==0.8.0\n"
    found = steps(place)
    assert found[0][0] == "FROM" and [a for i, a in found if i == "COPY"] == [
        "requirements.txt /tmp/",
        f"{wheel.name} /tmp/",
    ]
    pips = [a for i, a in found if i == "RUN" and " pip install" in a]
    assert len(pips) == 3 and all("torch==2.13.0" in a for a in pips)  # torch stays as it is
    said = capsys.readouterr().out
    assert "docker push r.example/x:1" in said and "docker:r.example/x:1" in said
    assert image("train.yaml") == 0  # again, into its own folder


def test_a_nodes_setup_installs_nothing_in_such_an_image(place):
    assert image("train.yaml") == 0
    mark = next(a for i, a in steps(place) if a.startswith("echo "))
    venv = place / "venv"
    venv.mkdir()
    subprocess.run(["bash", "-c", mark.replace("/opt/spotharness", str(venv))], check=True)
    [wheel] = (place / "home" / WHEELS).iterdir()
    task = yaml.safe_load(TEMPLATE.read_text())
    programs = place / "bin"
    programs.mkdir()
    (programs / "python3").write_text(f"#!/bin/sh\necho \"$@\" >> {shlex.quote(str(place))}/ran\n")
    (programs / "python3").chmod(0o755)
    envs = {"VENV": str(venv), "TORCH": "torch==2.13.0", "HOME": str(place / "home")}
    envs["PATH"] = f"{programs}:/usr/bin:/bin"
    command = ["bash", "-c", task["setup"]]
    subprocess.run(command, env=envs | {WHEEL_ENV: wheel.name}, check=True)
    assert not (place / "ran").exists()
    newer = subprocess.run(command, env=envs | {WHEEL_ENV: "another"}, capture_output=True)
    assert newer.returncode != 0 and (place / "ran").read_text() == f"-m venv {venv}\n"


def test_without_a_word_of_torch_nodes_get_the_one_here(place):
    (place / "own.yaml").write_text("run: harness run --run $RUN -- train.py\n")
    assert image("own.yaml", "--base", "nvcr.io/x:1", "--extra", "worker,data") == 0
    found = steps(place)
    assert found[0] == ("FROM", "nvcr.io/x:1")
    import torch

    wanted = f"torch=={torch.__version__.partition('+')[0]}"
    assert sum(wanted in a for _, a in found) == 3 and any("[worker,data]" in a for _, a in found)


def test_what_cannot_become_an_image_is_refused_and_nothing_is_written(place, capsys):
    (place / "image").mkdir()
    (place / "image" / "mine.txt").write_text("")
    refused("train.yaml")
    assert "wanted an empty folder" in capsys.readouterr().err
    assert [p.name for p in (place / "image").iterdir()] == ["mine.txt"]
    refused("train.yaml", "--out", "other", "--requirements", "none.txt")
    assert "none.txt: no such file" in capsys.readouterr().err
    refused("train.yaml", "--out", "other", "--extra", "w; rm")
    (place / "evil.yaml").write_text("envs: {TORCH: 'torch; curl x'}\nrun: x\n")
    (place / "list.yaml").write_text("- a\n")
    refused("list.yaml", "--out", "other")
    refused("evil.yaml", "--out", "other")
    said = capsys.readouterr().err
    assert "wanted one SkyPilot task" in said and "envs.TORCH" in said
    assert not (place / "other").exists()
