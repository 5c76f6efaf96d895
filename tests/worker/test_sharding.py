"""What FSDP2 shards is summed right on real ranks, or refused by name; what comes from the meta
device does not depend on the world."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed(what):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).parents[1] / "support" / "sharding.py"
    ended = subprocess.run(
        [sys.executable, script, what], env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def ways():
    return printed("ways")[0]


@pytest.mark.parametrize("exact", ["", "exact "])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("ignored", "head.weight: wanted every parameter that trains to be sharded"),
        (
            "partly",
            "blocks.1.weight, blocks.1.bias, head.weight and 1 more: wanted every parameter that "
            "trains to be sharded",
        ),
        (
            "hsdp",
            "blocks.0.weight: wanted a mesh of one dimension, found copies=2 x shards=1 (HSDP",
        ),
        (
            "tensor_parallel",
            "wanted parameters sharded by fully_shard, found DTensors without it (tensor "
            "parallelism?",
        ),
        (
            "by_hand",
            "head.weight: wanted it sharded by fully_shard, found a DTensor of another origin",
        ),
        ("backwards", "wanted a mesh over ranks 0 to 1 in this order, found one over ranks [1, 0]"),
        ("alone", "wanted a mesh over ranks 0 to 1 in this order, found one over ranks [0]"),
        (
            "mixed",
            "blocks.0.weight: wanted a mesh over ranks 0 to 1 in this order, found one over ranks "
            "[0]",
        ),
        ("wrapped", "the model is a DistributedDataParallel, which exchanges gradients itself"),
    ],
)
def test_what_cannot_be_summed_is_refused_by_name(ways, way, says, exact):
    assert ways[0][exact + way].startswith("BadInput: ") and says in ways[0][exact + way]
    assert ways[1][exact + way].startswith("BadInput: ")


@pytest.mark.parametrize("exact", ["", "exact "])
@pytest.mark.parametrize("way", ["ours", "root_only", "no_root", "columns", "frozen", "unsharded"])
def test_what_is_taken_is_summed_right(ways, way, exact):
    for rank in ways:
        if (way, exact) == ("columns", "exact "):
            assert "know fsdp2 with rows sharded" in rank[exact + way]
        else:
            assert rank[exact + way] == ("sums (whole)" if way == "unsharded" else "sums (sharded)")


def test_a_model_from_the_meta_device_begins_with_the_same_weights_on_any_world():
    worlds = printed("meta")
    assert [len(ranks) for ranks in worlds] == [1, 2, 3]
    assert len({rank["from meta"] for ranks in worlds for rank in ranks}) == 1
    for ranks in worlds:
        for rank in ranks:
            assert rank["mute"].startswith(
                "BadInput: inner (Module) has parameters or buffers on the meta device and no "
                "reset_param"
            )
            assert rank["drawn"] == []
            # is noticed, at least
            assert ({"blocks.0.weight", "blocks.1.weight"} <= set(rank["by shard"])) == (
                len(ranks) > 1
            )
