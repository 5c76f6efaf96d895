"""Secrets of a node do not leave it: ten are planted in a real run on the local cloud, whose script
quotes them wherever it can, and nothing that is kept or shown has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.planted import FORMS, PLANTED, leaks

pytestmark = pytest.mark.proof
SCRIPT = """
import os, sys
said = [os.environ[name] for name in {names!r}] + [
    "{hf}", "https://me:{url}@host/x", "https://a.blob.core.windows.net/c?sv=1&sig={sas}",
    "https://b.s3.amazonaws.com/k?X-Amz-Signature={presigned}&X-Amz-Expires=9",
]
for one in said:
    print("out", one, flush=True)
    print("err", one, file=sys.stderr, flush=True)
raise RuntimeError("refused: " + " ".join(said))
"""
TASK = """
name: secrets
resources: {{use_spot: true}}
secrets: {{WEBHOOK_SECRET: {secret!r}}}
run: exec {python} -m harness.cli run --run $RUN -- {script}
"""


def test_none_leaves_a_real_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(names=tuple(PLANTED), **FORMS))
    task = tmp_path / "task.yaml"
    task.write_text(
        TASK.format(python=sys.executable, script=script, secret=PLANTED["WEBHOOK_SECRET"])
    )
    env = {**os.environ, **{k: v for k, v in PLANTED.items() if k not in ("PLAINLY", "WEBHOOK_SECRET")}}
    env |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    words = ["launch", str(task), "--run", str(tmp_path / "run"), "--market", "calm"]
    words += ["--secret", f"PLAINLY={PLANTED['PLAINLY']}", "--html", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words],
        cwd=tmp_path, env=env, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr.decode()[-2000:]
    assert "refused:" in done.stdout.decode()
    found = {"stdout": leaks(done.stdout), "stderr": leaks(done.stderr)}
    for path in (*(tmp_path / "run").rglob("*"), tmp_path / "page.html", *(tmp_path / "home").rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(tmp_path))] = leaks(path.read_bytes())
    assert {name: some for name, some in found.items() if some} == {}
    assert any("facts/" in name for name in found) and any("/log" in name for name in found)
