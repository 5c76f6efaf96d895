"""`storage.save` and `storage.load`: one process, then real gloo worlds."""

import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import storage  # noqa: E402
from storage import Keep, MemoryStore, Ref, Snapshots  # noqa: E402
from storage.testing.faulty_store import Crash, FaultyStore, corrupt  # noqa: E402
from support.worlds import train  # noqa: E402

AT_ONCE = (0.0, 0.0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("memory://t", {})


def steps(store: Any) -> list[int]:
    return [ref.step for ref in Snapshots(store).refs()]


def damage(store: MemoryStore, step: int) -> None:
    key = next(k for k in store.list(f"snapshots/parts/{step:010d}-") if k.endswith(".bin"))
    corrupt(store, key, "flip", random.Random(step))


def weights(seed: int = 0, n: int = 64) -> Any:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# ---- what comes back -----------------------------------------------------------------------------
def test_two_lines(tmp_path: Path) -> None:
    state = {"w": weights(), "step": 7}
    assert storage.save(tmp_path / "mine", state, step=7) == Ref(0, 7)
    back = storage.load(str(tmp_path / "mine"))
    assert back["step"] == 7 and torch.equal(back["w"], state["w"])
    assert storage.load(f"file://{tmp_path}/mine", step=7)["step"] == 7


@pytest.mark.parametrize(
    "state",
    [
        {},
        3.5,
        {"a": [1, (2, None), {3: "x", "$": True}], "b": b"\x00\xff", "n": float("inf")},
        {"seen": Counter({"x": 2}), "dtype": torch.bfloat16, "c": 1j, "i": np.int64(4)},
    ],
    ids=["empty", "number", "containers", "kinds"],
)
def test_plain_values_keep_their_types(store: MemoryStore, state: Any) -> None:
    storage.save(store, state, step=0)
    back = storage.load(store)
    assert back == state and type(back) is type(state)


def test_tensors_of_all_kinds_to_the_bit(store: MemoryStore) -> None:
    shared = weights(1)
    state = {
        "half": weights(2).bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "list": [shared, {"again": shared}],
        "array": np.arange(20_000.0),
    }
    storage.save(store, state, step=1)
    back = storage.load(store)
    for name in ("half", "nan", "scalar", "none", "strided"):
        assert back[name].dtype == state[name].dtype and back[name].shape == state[name].shape
        assert torch.equal(torch.nan_to_num(back[name]), torch.nan_to_num(state[name]))
    assert torch.equal(back["list"][1]["again"], shared)
    assert isinstance(back["array"], np.ndarray) and (back["array"] == state["array"]).all()


def trained(seed: int = 0, lr: float = 0.1) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_modules_and_optimizers_are_loaded_in_place(store: MemoryStore) -> None:
    model, optimizer = trained()
    storage.save(store, {"model": model, "optimizer": optimizer, "step": 2}, step=2)
    fresh = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    pointers = [p.data_ptr() for p in fresh.parameters()]
    into = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters(), lr=9.0), "step": 0}
    assert storage.load(store, into=into) is into
    assert into["step"] == 2 and into["optimizer"].param_groups[0]["lr"] == 0.1
    assert [p.data_ptr() for p in fresh.parameters()] == pointers
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    for mine, theirs in zip(
        into["optimizer"].state.values(), optimizer.state.values(), strict=True
    ):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    alone = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert torch.equal(storage.load(store)["model"]["0.weight"], model[0].weight)
    storage.save(store, model, step=3)
    assert storage.load(store, into=alone) is alone
    assert torch.equal(alone[0].weight, model[0].weight)


def test_in_place_goes_into_nested_containers_and_adds_what_is_lacking(store: MemoryStore) -> None:
    storage.save(store, {"a": [weights(1), 5], "t": (weights(2),), "new": weights(3)}, step=1)
    mine, other = torch.zeros(64), torch.zeros(64)
    into = {"a": [mine, 0], "t": (other,)}
    storage.load(store, into=into)
    assert torch.equal(mine, weights(1)) and torch.equal(other, weights(2))
    assert into["a"][0] is not None and into["a"][1] == 5
    assert torch.equal(into["new"], weights(3))


def test_a_part_of_it_reads_no_more(store: MemoryStore) -> None:
    model, optimizer = trained()
    storage.save(store, {"model": model, "optimizer": optimizer, "step": 2}, step=2)
    back = storage.load(store, only=["model"])
    assert list(back) == ["model"] and torch.equal(back["model"]["0.weight"], model[0].weight)
    into = {"model": nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))}
    storage.load(store, into=into, only=["model"])
    assert list(into) == ["model"] and torch.equal(into["model"][0].weight, model[0].weight)
    with pytest.raises(storage.StateMismatch, match="'ema' and the like, found model, optimizer"):
        storage.load(store, only=["model", "ema"])
    storage.save(store, 5, step=3)
    with pytest.raises(storage.StateMismatch, match="no dict of names"):
        storage.load(store, only=["model"])


def test_the_loop_of_the_page_resumes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "SNAPSHOTS.md").read_text()
    (code,) = re.findall(r"```python\n(import storage\n.*?)```", page, re.S)
    done = []

    def run(total: int) -> Any:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {"model": model, "optimizer": optimizer, "total": total, "url": str(tmp_path)}
        exec(code, names | {"train_a_step": lambda *given: done.append(given)})
        return model

    first = run(200)
    assert len(done) == 200
    assert torch.equal(run(300).weight, first.weight)
    assert len(done) == 300
    assert steps(storage.open_store(str(tmp_path))) == [300, 200, 100]


# ---- which snapshot ------------------------------------------------------------------------------
def test_the_newest_whole_one_is_loaded_and_a_damaged_one_is_marked(store: MemoryStore) -> None:
    for step in (1, 2, 3):
        storage.save(store, {"w": weights(step)}, step=step)
    damage(store, 3)
    assert torch.equal(storage.load(store, look_again_s=AT_ONCE)["w"], weights(2))
    assert steps(store) == [2, 1]
    assert Ref(0, 3) in Snapshots(store).quarantined()
    # its successor may go on from there, and is the newest
    assert storage.save(store, {"w": weights(30)}, step=3) == Ref(1, 3)
    assert torch.equal(storage.load(store)["w"], weights(30))


def test_a_read_that_was_wrong_once_marks_nothing(store: MemoryStore) -> None:
    storage.save(store, {"w": weights(1)}, step=1)
    storage.save(store, {"w": weights(2)}, step=2)
    for call in range(1, 12):
        faulty = FaultyStore(store, random.Random(1), fail_call=call, mode="torn")
        assert torch.equal(storage.load(faulty, look_again_s=AT_ONCE)["w"], weights(2))
    assert steps(store) == [2, 1]


def test_more_than_one_damaged_snapshot_takes_a_word(store: MemoryStore) -> None:
    for step in (1, 2, 3, 4):
        storage.save(store, {"w": weights(step)}, step=step)
    damage(store, 4)
    storage.load(store, look_again_s=AT_ONCE)
    damage(store, 3)
    with pytest.raises(storage.SnapshotCorrupt, match=r"neither .* load an older one") as told:
        storage.load(store, look_again_s=AT_ONCE)
    assert "storage.load(url, step=N)" in str(told.value)
    assert steps(store)[0] == 4  # who finds two bad ones may be bad itself
    assert torch.equal(storage.load(store, step=2)["w"], weights(2))

    for step in (3, 4):  # two machines say so
        Snapshots(store).quarantine(Ref(0, step), "it is damaged")
        for host in ("a", "b"):
            Snapshots(store).doubt(Ref(0, step), host, "it is damaged")
    with pytest.raises(storage.Rewind, match="allow_rewind=True"):
        storage.load(store, look_again_s=AT_ONCE)
    back = storage.load(store, look_again_s=AT_ONCE, allow_rewind=True)
    assert torch.equal(back["w"], weights(2))
    storage.save(store, back, step=3)
    assert torch.equal(storage.load(store)["w"], weights(2))


def test_a_given_step(store: MemoryStore) -> None:
    for step in (1, 2, 3):
        storage.save(store, {"w": weights(step)}, step=step)
    assert torch.equal(storage.load(store, step=2)["w"], weights(2))
    with pytest.raises(storage.NoSnapshot, match="no snapshot of step 9; it has 1, 2, 3"):
        storage.load(store, step=9)
    damage(store, 2)
    with pytest.raises(storage.SnapshotCorrupt):
        storage.load(store, step=2, look_again_s=AT_ONCE)
    assert steps(store) == [3, 2, 1]  # one look of one host marks nothing


def test_nothing_there(store: MemoryStore) -> None:
    with pytest.raises(storage.NoSnapshot, match="save one first"):
        storage.load(store)


def test_retention(store: MemoryStore) -> None:
    for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
        keep = Keep(last=2, best="loss:min")
        storage.save(store, {"w": weights(step)}, step=step, keep=keep, metrics={"loss": loss})
    assert steps(store) == [4, 3, 1]
    storage.save(store, {"w": weights(5)}, step=5, keep=1)
    assert steps(store) == [5]
    assert {key.split("/")[2][:10] for key in store.list("snapshots/parts/")} == {f"{5:010d}"}


def test_going_back_takes_a_word_and_loses_nothing(store: MemoryStore) -> None:
    for step in range(1, 7):
        storage.save(store, {"w": weights(step)}, step=step)
    with pytest.raises(storage.StepBehind, match="has committed step 6; step 2 would go behind"):
        storage.save(store, {"w": weights(0)}, step=2)
    back = storage.load(store, step=1)
    assert storage.save(store, back, step=2, rewind=True) == Ref(1, 2)
    assert torch.equal(storage.load(store)["w"], weights(1))
    assert storage.save(store, back, step=3, keep=1) == Ref(1, 3)  # and it needs no word again
    assert max(steps(store)) == 6  # work that the new line has still to do again stays
    assert torch.equal(storage.load(store)["w"], weights(1))


def test_the_same_step_again_replaces_it(store: MemoryStore) -> None:
    storage.save(store, {"w": weights(1)}, step=1)
    storage.save(store, {"w": weights(2)}, step=1)
    assert torch.equal(storage.load(store)["w"], weights(2))


def test_what_did_not_change_is_not_sent_again(store: MemoryStore) -> None:
    frozen = weights(1, n=8 << 20)  # 32 MiB
    storage.save(store, {"model": {"frozen": frozen, "adapter": weights(2)}}, step=1)
    before = sum(store.size(k) for k in store.list("snapshots/parts/"))
    storage.save(store, {"model": {"frozen": frozen, "adapter": weights(3)}}, step=2)
    after = sum(store.size(k) for k in store.list("snapshots/parts/"))
    assert after - before < before / 4
    assert torch.equal(storage.load(store)["model"]["frozen"], frozen)


def test_a_save_leaves_no_thread_behind(store: MemoryStore) -> None:
    for step in range(5):
        storage.save(store, {"w": weights(step)}, step=step)
    give_up_s = time.monotonic() + 120
    while left := [t for t in threading.enumerate() if t.name == "stage"]:
        assert time.monotonic() < give_up_s, f"{len(left)} are left"
        gc.collect()  # other tests' as well
        time.sleep(0.01)


# ---- crashes, and others -------------------------------------------------------------------------
def test_wherever_a_save_dies_the_newest_is_whole(store: MemoryStore) -> None:
    """At every store call, before and after it took effect; and the next save goes through."""
    storage.save(store, {"w": weights(1)}, step=1)
    start = dict(store._objects)
    modes = ("crash-before", "crash-after")
    died = 0
    for mode in modes:
        for call in range(1, 40):
            store._objects.clear()
            store._objects.update(start)
            faulty = FaultyStore(store, random.Random(1), fail_call=call, mode=mode)
            try:
                storage.save(faulty, {"w": weights(2)}, step=2, keep=1)
            except Crash:
                died += 1
            else:
                assert steps(store) == [2]
                continue
            found = storage.load(store)["w"]
            assert torch.equal(found, weights(1)) or torch.equal(found, weights(2))
            storage.save(store, {"w": weights(3)}, step=2, keep=1)
            assert torch.equal(storage.load(store)["w"], weights(3))
    assert died > 12


def test_two_writers_of_one_url_are_told(store: MemoryStore) -> None:
    class Beside(FaultyStore):
        """Another writer is quicker, at the same step."""

        def put(self, key: str, data: bytes | memoryview) -> None:
            if not self.inner.list("snapshots/"):
                storage.save(self.inner, {"w": weights(9)}, step=1)
            super().put(key, data)

    with pytest.raises(storage.StoreError, match="somebody else saves snapshot"):
        storage.save(Beside(store, random.Random(1)), {"w": weights(1)}, step=1)
    assert torch.equal(storage.load(store)["w"], weights(9))


def test_the_snapshots_of_a_run_are_read_and_not_added_to(store: MemoryStore) -> None:
    from storage.tensors.dcp import Saver
    from storage.tensors.state_tree import split

    tensors, plain = split({"model": {"w": weights(4)}, "optimizer": [{"lr": 0.1}]})
    saver = Saver(Snapshots(store))
    saver.plan(tensors)
    saver.write(saver.stage(tensors), Ref(3, 5), {"state": plain, "samples": {}}, "t")
    assert torch.equal(storage.load(store)["model"]["w"], weights(4))
    with pytest.raises(storage.StoreError, match="but by a run"):
        storage.save(store, {"w": weights(1)}, step=6)


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"f": object()}}, r"state\['a/f'\] is a builtins.object"),
        ({"s": {1, 2}}, "nothing is pickled"),
        ({"t": torch.ones(3).to_sparse()}, "sparse"),
        ({(1, 2): 3}, "keys are strings or ints"),
        ({"m": nn.Linear(2, 2, device="meta")}, "a meta tensor"),
    ],
    ids=["object", "set", "sparse", "key", "meta"],
)
def test_what_cannot_be_stored_is_named(store: MemoryStore, state: Any, says: str) -> None:
    with pytest.raises(storage.UnsupportedValue, match=says):
        storage.save(store, state, step=1)
    assert store.list("") == []


@pytest.mark.parametrize(
    ("into", "says"),
    [
        ({"w": torch.zeros(65)}, "was saved as"),
        ({"w": torch.zeros(64).half()}, "was saved as"),
        ({"w": torch.zeros(64), "ema": 1}, "nothing was saved as 'ema'; there is d, n, w"),
        ({"n": torch.zeros(3)}, "has no tensor 'n'"),
        ({"d": {"deep": 2}, "w": torch.zeros(64)}, "nothing was saved as 'd/deep'"),
    ],
    ids=["shape", "dtype", "key", "kind", "deep"],
)
def test_what_does_not_fit_is_named_and_left_as_it_was(
    store: MemoryStore, into: Any, says: str
) -> None:
    storage.save(store, {"w": weights(1), "n": 3, "d": {}}, step=1)
    before = {k: v.clone() for k, v in into.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(storage.StateMismatch, match=says):
        storage.load(store, into=into)
    assert all(torch.equal(into[k], v) for k, v in before.items())
    assert steps(store) == [1]


def test_steps_are_numbers(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        storage.save(store, {}, step=-1)


def test_the_shelf_reads_what_was_saved(tmp_path: Path) -> None:
    model, _ = trained()
    storage.save(tmp_path / "x", {"model": model}, step=12)
    for command in ("list", "verify"):
        ended = subprocess.run(
            [sys.executable, "-m", "storage", command, f"{tmp_path}/x"],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr
        assert "12" in ended.stdout


def test_import_storage_needs_no_torch() -> None:
    code = (
        "import sys, storage; assert 'torch' not in sys.modules; assert storage.__all__;"
        "storage.save; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


# ---- worlds --------------------------------------------------------------------------------------
def begin(world: int, folder: str) -> int:
    """The own rank."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rdzv{world}", rank=rank, world_size=world
    )
    return rank


def sharded(world: int, seed: int, steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def moments(optimizer: Any) -> dict[str, Any]:
    return whole(
        {f"{i}": one["exp_avg"] for i, one in enumerate(optimizer.state_dict()["state"].values())}
    )


def two_save(folder: str) -> None:
    rank = begin(2, folder)
    model, optimizer = sharded(2, seed=0, steps=2)
    state = {"model": model, "optimizer": optimizer, "step": 2, "rank": rank}
    assert storage.save(f"{folder}/run", state, step=2, keep=2) == Ref(0, 2)
    expected = whole(model.state_dict()), moments(optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
        # alone: the others do not know
        storage.save(f"{folder}/alone", {"w": weights(8)}, step=1, alone=True)
        assert torch.equal(storage.load(f"{folder}/alone", alone=True)["w"], weights(8))
    dist.barrier()

    # a failure of one rank is told to all, and nothing is stored
    bad: Any = {"x": object()} if rank == 1 else {"x": 1}
    with pytest.raises(storage.UnsupportedValue, match="which a snapshot cannot hold"):
        storage.save(f"{folder}/bad", bad, step=1)
    with pytest.raises(storage.NoSnapshot):
        storage.load(f"{folder}/bad")
    with pytest.raises(storage.StepBehind):
        storage.save(f"{folder}/run", state, step=1)
    into: Any = {"model": torch.zeros(2)} if rank == 1 else {"model": model}
    with pytest.raises(storage.StateMismatch):
        storage.load(f"{folder}/run", into=into)
    with pytest.raises(ValueError, match="different names") as differ:
        storage.save(f"{folder}/bad", {"w": torch.zeros(3 + rank)}, step=1)
    assert isinstance(differ.value, storage.StateMismatch)

    # a newer one is damaged where only one rank reads it
    with torch.no_grad():
        model[0].weight.zero_()
    storage.save(f"{folder}/run", {"model": model, "optimizer": optimizer, "step": 3}, step=3)
    if rank == 0:
        store = storage.open_store(f"{folder}/run")
        key = next(k for k in store.list(f"snapshots/parts/{3:010d}-") if "/r00001-" in k)
        corrupt(store, key, "truncate", random.Random(1))
    dist.barrier()
    storage.load(f"{folder}/run", into={"model": model}, look_again_s=AT_ONCE)
    found = whole(model.state_dict())
    assert all(torch.equal(v, expected[0][k]) for k, v in found.items())
    dist.destroy_process_group()


def load_them(folder: str) -> None:
    begin(3, folder)
    model, optimizer = sharded(3, seed=5, steps=0)
    into = {"model": model, "optimizer": optimizer, "step": 0}
    storage.load(f"{folder}/run", into=into)
    assert into["step"] == 2 and into["rank"] == 0
    assert all(isinstance(one["exp_avg"], DTensor) for one in optimizer.state.values())
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    for found, wanted in zip(
        (whole(model.state_dict()), moments(optimizer)), expected, strict=True
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()  # and it can go on
    dist.destroy_process_group()


def test_saved_by_two_and_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    train(tmp_path, 2, "two_save", tmp_path, script=__file__)
    train(tmp_path, 3, "load_them", tmp_path, script=__file__)
    expected, averages = torch.load(tmp_path / "expected.pt", weights_only=True)
    back = storage.load(tmp_path / "run")
    assert all(torch.equal(back["model"][k], v) for k, v in expected.items())
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    storage.load(tmp_path / "run", into={"model": model, "optimizer": optimizer})
    assert torch.equal(moments(optimizer)["0"], averages["0"])


if __name__ == "__main__":  # a rank
    {"two_save": two_save, "load_them": load_them}[sys.argv[1]](sys.argv[2])
