"""The wheel of the repository's files, built by setuptools without a network."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_WITHIN_S = 120.0


def tracked(*paths: str) -> set[str]:
    """The files below `paths` that belong to the repository, or will with the next commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def build(folder: Path) -> Path:
    """Build it in `folder` (empty), not in the tree, where an older build's files would get in."""
    source, out = folder / "source", folder / "dist"
    out.mkdir()
    beside = ("tests", "examples", "pyproject.toml", "README.md", "LICENSE")
    for name in tracked("harness", "storage", *beside):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=BUILD_WITHIN_S,
    )
    if done.returncode:
        raise RuntimeError(f"setuptools could not build the wheel:\n{done.stderr}")
    [made] = out.glob("*.whl")
    return made
