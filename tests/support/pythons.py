"""The package under every Python that pyproject.toml names and this computer has (`make pythons`).

    PYTHONPATH=tests python -m support.pythons DIR [VERSION ...]     such as: /tmp/pythons 3.10

In DIR each gets a venv with the wheel as users install it, without extras; then the tests run that
need no torch and no server. Ends with 1 if one fails, or if none of the Pythons is here.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.wheels import ROOT, build

PROJECT = (ROOT / "pyproject.toml").read_text()
NAMED = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
LIGHT = (  # of tests/*/test_NAME.py
    "audit", "batch", "compare", "epochs", "faults", "lease", "ledger", "local", "manifest",
    "market", "metadata", "notices", "policies", "recovery", "rendezvous", "report", "retention",
    "staging", "tasks", "upload",
)  # fmt: skip
INSTALL_WITHIN_S, TEST_WITHIN_S = 600.0, 900.0


def interpreter(version: str) -> str | None:
    """Python `version` of this computer: among pyenv's, or on the PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def light_files(names: Sequence[str]) -> list[str]:
    """Return the test files of these names, as paths within the tree."""
    found = {name: list(ROOT.glob(f"tests/*/test_{name}.py")) for name in names}
    missing = [name for name, files in found.items() if len(files) != 1]
    if missing:
        raise FileNotFoundError(f"wanted one tests/*/test_NAME.py for each of {missing}")
    return [str(files[0].relative_to(ROOT)) for files in found.values()]


def check(python: str, venv: Path, wheel: Path) -> None:
    """Raises CalledProcessError if the package cannot be installed, or a test fails."""
    programs = venv / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "venv", "--clear", venv], check=True, timeout=INSTALL_WITHIN_S)
    wanted = [wheel, "pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6"]
    subprocess.run([*pip, *wanted], check=True, timeout=INSTALL_WITHIN_S)
    # Neither `python -m pytest` nor the project's pythonpath: they would put the tree before what
    # is installed.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [programs / "pytest", "-p", "no:cacheprovider", "-o", "pythonpath=tests", *light_files(LIGHT)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=TEST_WITHIN_S)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    said = {}
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(Path(tempfile.mkdtemp(dir=folder, prefix="wheel-")))
    for version in sys.argv[2:] or NAMED:
        python = interpreter(version)
        if python is None:
            said[version] = "not here"
            continue
        print(f"Python {version}: {python}", flush=True)
        try:
            check(python, folder / version, wheel)
            said[version] = "ok"
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
            said[version] = f"FAILED: {e}"
    print(*(f"Python {version:5} {what}" for version, what in said.items()), sep="\n")
    results = set(said.values()) - {"not here"}
    raise SystemExit(0 if results == {"ok"} else 1)


if __name__ == "__main__":
    main()
