"""The wheel that nodes get is the package that runs here, at an address of its content."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from harness.clouds.own_wheel import WHEEL_ENV, WHEELS, keep_wheel
from support.wheels import build, tracked

# What SkyPilot makes of the task's mounts.
MOUNTS = "import sys, yaml; from sky.task import Task; print(Task.from_yaml_config(yaml.safe_load(open(sys.argv[1]))).file_mounts)"


def test_the_address_is_the_same_for_the_same_content(tmp_path, monkeypatch):
    address = keep_wheel(tmp_path / "a")
    assert keep_wheel(tmp_path / "a") == keep_wheel(tmp_path / "b") == address
    [a], [b] = ((tmp_path / home / WHEELS / address).iterdir() for home in "ab")
    assert a.read_bytes() == b.read_bytes()
    monkeypatch.setattr("harness.clouds.own_wheel.ABOUT", "Wheel-Version: 1.0\n")
    assert keep_wheel(tmp_path / "a") != address


def environment_with(wheel: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Install the wheel into a new environment, which takes our packages' dependencies from the one
    of the tests; return its folder of programs, and the variables of a person who uses it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    # apart from the folder that the tests run in, whose egg-info pip would take for it
    install = ["-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([folder / "bin" / "python", *install], check=True, timeout=120)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    home = folder / "home"
    home.mkdir()
    return str(folder / "bin"), {"HOME": str(home), "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


@pytest.mark.proof
def test_an_installed_wheel_ships_itself_again_and_again(tmp_path):
    (tmp_path / "build").mkdir()
    wheel, addresses = build(tmp_path / "build"), []
    for name in ("laptop", "node"):
        programs, env = environment_with(wheel, tmp_path / name)
        about = {"env": env, "cwd": tmp_path, "check": True, "timeout": 120}
        subprocess.run([f"{programs}/harness", "init", name + "-task"], **about)
        said = yaml.safe_load((tmp_path / f"{name}-task" / "train.yaml").read_text())
        addresses.append(said["envs"][WHEEL_ENV])
        [wheel] = (Path(env["HOME"]) / WHEELS / addresses[-1]).iterdir()
    assert len(set(addresses)) == 1
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}
        assert z.testzip() is None
    assert names == {n for n in tracked("harness", "storage") if not n.endswith("README.md")}

    pytest.importorskip("sky")
    task = tmp_path / "node-task" / "train.yaml"
    task.write_text(task.read_text().replace("  RUN:", "  RUN: s3://b/x"))
    done = subprocess.run(
        [f"{programs}/python", "-W", "ignore", "-c", MOUNTS, task],
        **about,
        capture_output=True,
        text=True,
    )
    place = f"~/{WHEELS}/{addresses[-1]}"
    assert done.stdout.strip() == str({place: place}), done.stderr
