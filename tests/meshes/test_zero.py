"""ZeRO-1 on real ranks: the optimizer's state is shared out, and the weights are as without."""

import json
from pathlib import Path

import pytest

from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.come_and_go import come_and_go
from support.worlds import history, newest, same_training, train

pytestmark = pytest.mark.mesh
ZEROED = Path(__file__).parents[1] / "support" / "zeroed.py"


def zeroed(folder, world, *flags, **how):
    """What each rank says at the end."""
    out = folder / "out.json"
    train(folder / "run", world, "--out", out, *flags, script=ZEROED, **how)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


def numbers(folder):
    return [(r.loss, r.metrics["grad_norm"]) for r in history(folder / "run")]


@pytest.mark.parametrize(
    "flags", [(), ("--scaler",), ("--optimizer", "SGD")], ids=["AdamW", "scaler", "SGD"]
)
def test_weights_are_those_of_the_whole_optimizer_to_the_bit(tmp_path, flags):
    whole, zero = tmp_path / "whole", tmp_path / "zero"
    said, wanted = zeroed(zero, 3, *flags), zeroed(whole, 3, "--whole", *flags)
    assert {s["weights"] for s in said} == {s["weights"] for s in wanted}
    assert numbers(zero) == numbers(whole)
    assert audit(open_store(str(zero / "run"))).ok


def test_fused_kernels_work_on_rows(tmp_path):
    """Those of CPUs treat the last elements of a tensor otherwise than the rest."""
    zeroed(tmp_path / "zero", 3, "--fused")
    zeroed(tmp_path / "whole", 3, "--fused", "--whole")
    same_training(tmp_path / "zero" / "run", tmp_path / "whole" / "run")


def test_exact_sums_give_one_model_on_any_world_and_each_rank_holds_its_share(tmp_path):
    found, held = set(), {}
    for world in (1, 2, 3):
        said = zeroed(tmp_path / f"{world}", world, "--reduce", "exact")
        found |= {(s["weights"], *numbers(tmp_path / f"{world}")) for s in said}
        held[world] = [s["state"] for s in said]
    whole = zeroed(tmp_path / "whole", 2, "--reduce", "exact", "--whole")
    found |= {(s["weights"], *numbers(tmp_path / "whole")) for s in whole}
    assert len(found) == 1
    one = held[1][0]
    assert [s["state"] for s in whole] == [one, one]
    for world in (2, 3):  # a row of the largest, and the counters of steps, above its share
        assert max(held[world]) < one / world + 1500 < one, held
        assert one <= sum(held[world]) < one + 64 * world, held


def test_fifty_steps_go_as_in_one_process(tmp_path):
    zeroed(tmp_path / "whole", 1, "--whole", "--total", 50)
    zeroed(tmp_path / "zero", 3, "--total", 50)
    same_training(tmp_path / "zero" / "run", tmp_path / "whole" / "run")


@pytest.mark.timeout(900)  # four epochs, and a machine may be busy
def test_nodes_come_and_go(tmp_path, nodes):
    """With exact sums to the bit as in one process."""
    flags = ["--total", 50, "--reduce", "exact"]
    calm, out = zeroed(tmp_path / "calm", 1, "--whole", *flags), tmp_path / "live.json"
    come_and_go(nodes, ZEROED, [*flags, "--out", out], ["--nproc", "1"], (3, 2, 3, 2))
    assert json.loads(Path(f"{out}.0").read_text())["weights"] == calm[0]["weights"]
    same_training(nodes.run, tmp_path / "calm" / "run")
    assert audit(open_store(nodes.url)).ok


def stored(run):
    return sum(part.nbytes for part in newest(run).stored.values())


def test_snapshots_go_from_world_to_world_with_it_and_without(tmp_path):
    """With exact sums every way ends with the same weights."""
    wanted = zeroed(tmp_path / "whole", 1, "--reduce", "exact", "--whole")[0]["weights"]
    sizes, flags = [], ("--reduce", "exact", "--total")
    for total, world, how in ((3, 2, []), (5, 3, ["--whole"]), (7, 3, []), (9, 1, []), (12, 2, [])):
        said = zeroed(tmp_path / "zero", world, *flags, total, *how)
        sizes.append(stored(tmp_path / "zero" / "run"))
    assert {s["weights"] for s in said} == {wanted}
    assert max(sizes) < 1.2 * min(sizes)  # each row once; small tensors are padded
    assert numbers(tmp_path / "zero") == numbers(tmp_path / "whole")
    assert audit(open_store(str(tmp_path / "zero" / "run"))).ok


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["--bad", "sharded"], {}, "wanted parameters that every rank has whole"),
        ([], {"HARNESS_MESH": "dp_shard=2"}, "wanted parameters that every rank has whole"),
        (["--optimizer", "Adafactor"], {}, "wanted an optimizer that treats each element by itself"),
        (["--fused", "--reduce", "exact"], {}, "exact sums with zero1 need an optimizer"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, flags, env, says):
    ended = train(tmp_path, 2, *flags, env=env, script=ZEROED, codes=(1, -9))
    assert says in ended.output, ended.output
