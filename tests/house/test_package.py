"""The wheel has all that the package needs and works alone; `harness init` makes a run of it.

The wheel is unpacked to a folder that stands first on the path.
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import harness
from harness.cli.start import NO_WHEEL, TEMPLATES, InitFlags, init
from harness.clouds.sky_task import load
from harness.core.world import DRAINED, UNFIT, BadInput
from support.wheels import ROOT, build, tracked

pytestmark = pytest.mark.proof
# Imports every module as a base install does. Only the absence of torch, and of pytest (which the
# contracts need), may stop one.
IMPORT_ALL = """
import importlib, sys
FRAMEWORKS = ("accelerate", "lightning", "torchtitan", "transformers", "ray")
missing = ("torch", "sky", "obstore", "botocore", "wandb", "pynvml", "pytest")
sys.modules.update(dict.fromkeys(missing))
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        # whoever imports an adapter has its framework
        adapted = name.startswith("harness.adapters.") and e.name.partition(".")[0] in FRAMEWORKS
        if not adapted and not e.name.startswith(("torch", "pytest")):
            raise
    else:
        print(name)
        if module.__file__:
            assert module.__file__.startswith(sys.path[1]), module.__file__
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The environment of a computer that has the wheel, its `harness` on the PATH, and no tree."""
    site, programs = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("bin")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
        points = next(z.read(n).decode() for n in z.namelist() if n.endswith("entry_points.txt"))
    module, function = re.search(r"^harness = ([\w.]+):(\w+)$", points, re.M).groups()
    command = programs / "harness"
    command.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    command.chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(site), "HOME": str(programs), "OMP_NUM_THREADS": "1"}


def shell(command: str, env: dict[str, str], cwd: Path, timeout_s: float = 60.0) -> str:
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_is_the_two_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}
        about = z.read(next(n for n in z.namelist() if n.endswith("METADATA"))).decode()
        assert any(n.endswith("licenses/LICENSE") for n in z.namelist())
    assert names == {n for n in tracked("harness", "storage") if not n.endswith("README.md")}
    assert {"harness/py.typed", "storage/py.typed"} <= names
    assert "License-Expression: MIT" in about and f"Version: {harness.__version__}" in about


def test_the_wheel_works_alone(installed, tmp_path):
    files = {
        n.removesuffix(".py")
        for n in tracked("harness", "storage")
        if n.endswith(".py") and "__main__" not in n
    }
    modules = sorted(
        n.removesuffix("/__init__").replace("/", ".") for n in files if "templates" not in n
    )
    imported = shell(
        f"{sys.executable} -c '{IMPORT_ALL}' {' '.join(modules)}", installed, tmp_path
    ).split()
    doors = {"harness.cli.command", "harness.testing", "harness.testing.situations", "storage"}
    light = [name for name in modules if not name.startswith("harness.adapters.")]
    assert doors <= set(imported) and len(set(imported) & set(light)) > len(light) * 0.8
    assert "init" in shell("harness --help", installed, tmp_path)
    assert "doctor" in shell("harness prove doctor --help", installed, tmp_path)
    assert "3 worlds, every rule held" in shell("harness market simulate --seeds 3", installed, tmp_path)
    assert "snapshots" in shell(f"{sys.executable} -m storage --help", installed, tmp_path)


def test_a_run_begins_with_the_wheel_alone(installed, tmp_path):
    """What `harness init` says comes next is done, with fewer steps; the run is whole."""
    pytest.importorskip("torch")
    said = shell("harness init first", installed, tmp_path)
    folder = tmp_path / "first"
    assert {p.name for p in folder.iterdir()} == set(TEMPLATES)
    go, look = re.findall(r"^  (harness (?:launch .* --cloud local|runs report) .*)$", said, re.M)
    assert "--cloud sky" in said and "cd first" in said
    script = folder / "train.py"
    script.write_text(script.read_text().replace("total=2560", "total=12"))
    shell(f"{go} --market calm --brief", installed, folder, timeout_s=120.0)
    assert "12 of 12 committed" in shell(look, installed, folder)
    assert "Everything holds" in shell("harness prove verify runs/first", installed, folder)


# ---- harness init ------------------------------------------------------------------------------
def test_init_writes_over_nothing(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(
        BadInput, match=r"found .*train\.py; nothing was written: name another folder"
    ):
        init(InitFlags(str(tmp_path)))
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"] and (
        tmp_path / "train.py"
    ).read_text() == "mine"
    with pytest.raises(BadInput, match="name a folder that you may write to"):
        init(InitFlags(str(tmp_path / "train.py" / "x")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SkyPilot's own imports
def test_the_task_is_one_that_skypilot_takes():
    path = ROOT / "harness" / "cli" / "templates" / "train.yaml"
    assert path.read_text().count(NO_WHEEL) == 1
    task = load(path, {"RUN": "s3://b/x"})
    assert (
        task.recover_on_exit_codes == (DRAINED, UNFIT)
        and task.use_spot
        and str(task.workdir) == "."
    )
    for text in (task.setup, task.run):
        subprocess.run(["bash", "-n", "-c", text], check=True, timeout=60)
    ours = yaml.safe_load((ROOT / "sky_tasks" / "train.yaml").read_text())["setup"]
    assert task.envs["TORCH"] in ours, "the template and sky_tasks/train.yaml differ in torch"


def test_the_script_is_the_example():
    """All but its docstring and its length, in which a preemption surely happens; and the lines
    that it marks are those that were added to plain.py."""
    script = (ROOT / "harness" / "cli" / "templates" / "train.py").read_text()
    script = script.replace("2560", "128").replace("% 128 ==", "% 32 ==")
    example, plain = ((ROOT / "examples" / name).read_text() for name in ("elastic.py", "plain.py"))
    code, wanted = (text.split('"""\n', 2)[-1].splitlines() for text in (script, example))
    assert [line.removesuffix("  # +++") for line in code] == wanted
    marked = [line.removesuffix("  # +++") for line in code if line.endswith("  # +++")]
    assert marked == [line for line in wanted if line not in plain.splitlines()]
