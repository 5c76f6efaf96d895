"""Snapshots from any mesh to any other, bit-equal, both ways: 13 meshes of up to 8 ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.reshard_meshes import MESHES

pytestmark = pytest.mark.mesh


@pytest.mark.timeout(1200)
def test_what_one_mesh_saves_any_other_loads_bit_equal(tmp_path):
    """One copy is stored, whoever holds how many; and all of them hash the weights alike."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).parents[1] / "support" / "reshard_meshes.py"
    ended = subprocess.run(
        [sys.executable, script, tmp_path], env=env, capture_output=True, text=True, timeout=1150
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    lines = [line.split() for line in said if not line.startswith("harness: ")]  # of no session
    assert [(words, int(copies)) for words, copies, *_ in lines] == [
        (words or "whole", copies) for words, copies in MESHES
    ]
    assert len(MESHES) >= 8 and len({weights for _, _, weights, _ in lines}) == 1
    assert len({nbytes for *_, nbytes in lines}) == 1
