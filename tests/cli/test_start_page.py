"""docs/START.md, as a newcomer follows it: its commands in its order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.worlds import environment

PAGE = Path(__file__).parents[2] / "docs" / "START.md"


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_survive_a_preemption(tmp_path):
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    script = "".join(block for block in blocks if block.startswith("harness "))
    assert script.count("harness ") == 4, script
    said = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert said.returncode == 0, said.stdout[-4000:] + said.stderr[-4000:]
    assert "run done: finished at step 2560" in said.stdout
    assert re.search(r"kill +aws .* in time", said.stdout), said.stdout  # among the notices
    notices = re.findall(r"^[\d:]+  node \d+: preemption notice from simulated aws", said.stdout, re.M)
    assert len(notices) == 1, said.stdout
    assert "generation 2: resumed from step" in said.stdout, said.stdout
    assert (tmp_path / "first" / "runs" / "first" / "report.html").stat().st_size > 10_000
