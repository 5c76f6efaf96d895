"""Tensors to parts and back: one process, then real gloo worlds of 2 and 3."""

import os
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import storage.tensors.dcp as dcp  # noqa: E402
from storage import (  # noqa: E402
    Keep,
    Manifest,
    MemoryStore,
    Ref,
    SnapshotCorrupt,
    Snapshots,
    StoreUnavailable,
    open_store,
)
from storage.snapshots.staging import Segment  # noqa: E402
from storage.tensors.dcp import Saver  # noqa: E402
from storage.tensors.loading import destinations, load  # noqa: E402
from storage.tensors.state_tree import join, split  # noqa: E402
from storage.testing.faulty_store import FaultyStore, corrupt  # noqa: E402
from support import worlds  # noqa: E402

pytestmark = pytest.mark.proof
Tensors = dict[str, torch.Tensor]


def bits(t: torch.Tensor) -> bytes:
    """Equality to the bit, also of NaN, -0.0 and fp8."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def snapshots() -> Snapshots:
    return Snapshots(MemoryStore(objects={}), chunk_nbytes=1000)


def save(snaps: Snapshots, tensors: Tensors, data: Any = None, ref: Ref = Ref(1, 1)) -> Manifest:
    saver = Saver(snaps)
    saver.plan(tensors)
    manifest = saver.write(saver.stage(tensors), ref, {"state": data}, "t")
    assert manifest is not None
    return manifest


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0
) -> None:
    for i in range(steps):
        torch.manual_seed(seed + i)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- split and join ------------------------------------------------------------------------------
def test_split_and_join_keep_every_type() -> None:
    state = {
        "numbers": [0, -1, 2**80, 1.5, float("inf"), -0.0, 1e-323, True, None, "text ü", 1 + 2j],
        "tuple": (1, (2, [3]), ()),
        "bytes": b"\x00\xff",
        "int keys": {0: "a", 1: {"x": 1}, "0": "b"},
        "our own tag": {"$": "tensor", "name": "not one"},
        "counter": Counter({30: 1, 60: 2}),
        "python rng": random.Random(3).getstate(),
        "numpy rng": np.random.RandomState(3).get_state(legacy=False),
        "numpy scalar": np.float64(1.1),
        "numpy array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "numpy 0-d": np.array(3),
        "dtype": torch.bfloat16,
        "empty": {},
    }
    tensors, data = split(state)
    found = join(tensors, _through_manifest(data))
    assert tensors == {}
    assert (
        found["numpy rng"].pop("state")["key"].tolist()
        == state["numpy rng"].pop("state")["key"].tolist()
    )
    assert found["numpy array"].tolist() == state["numpy array"].tolist()
    assert found["numpy array"].dtype == np.uint16
    assert isinstance(found["numpy 0-d"], np.ndarray)
    assert found["numpy 0-d"] == 3
    assert isinstance(found["counter"], Counter)
    assert type(found["numpy scalar"]) is np.float64
    assert type(found["numbers"][7]) is bool
    for one in (found, state):
        del one["numpy array"], one["numpy 0-d"]
    assert found == state
    assert np.isnan(join({}, _through_manifest(split(float("nan"))[1])))


def _through_manifest(data: Any) -> Any:
    snaps = snapshots()
    snaps.write(Ref(1, 1), 0, 1, {}, {}, {"state": data}, "t")
    manifest = snaps.commit(Ref(1, 1), 1)
    assert manifest is not None
    return manifest.data["state"]


def test_split_names_tensors_by_path_and_does_not_copy() -> None:
    t = torch.zeros(3, requires_grad=True)
    tensors, data = split({"a/b": {"~": t}, "l": [{0: torch.ones(1)}], "big": np.zeros(100_000)})
    assert sorted(tensors) == ["a~1b/~0", "big", "l/0/0"]
    assert tensors["a~1b/~0"].data_ptr() == t.data_ptr()
    again = join(tensors, data)
    assert again["l"][0][0].item() == 1.0
    assert again["big"].shape == (100_000,)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": {1, 2}}}, "a/b"),
        ({"a": [lambda: 0]}, "a/0"),
        (OrderedDict(x=torch.nn.Linear(1, 1)), "x"),
        ({"k": {(1, 2): 3}}, "k"),
        ({"t": torch.eye(2).to_sparse()}, "t"),
        ({"t": torch.empty(2, device="meta")}, "t"),
        ({"o": np.array([object()])}, "o"),
        ({"d": {1: torch.ones(1), "1": torch.ones(1)}}, "d/1"),
    ],
)
def test_what_cannot_be_saved_is_named(state: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        split(state)


def test_join_without_a_tensor_says_which() -> None:
    _, data = split({"w": torch.ones(1)})
    with pytest.raises(ValueError, match="'w'"):
        join({}, data)


# ---- one process ---------------------------------------------------------------------------------
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
]


def zoo() -> Tensors:
    torch.manual_seed(0)
    shared = torch.randn(17, 3)
    odd = {
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(20, 6)[::3, 1::2],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "odd values": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "tied": shared,
        "tied too": shared,
        "a view of it": shared[2:5],
        "big": torch.randn(1500, 3),
    }
    return odd | {str(dtype): (torch.rand(9, 5) * 100).to(dtype) for dtype in DTYPES}


def test_every_kind_of_tensor_comes_back_to_the_bit() -> None:
    snaps, tensors = snapshots(), zoo()
    manifest = save(snaps, tensors)
    snaps.verify(manifest)
    found = destinations(manifest, {})
    load(snaps, manifest, found)
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert same(t, found[name]), name


def test_load_fills_in_place_whatever_the_strides() -> None:
    snaps, tensors = snapshots(), {k: t for k, t in zoo().items() if k != "expanded"}
    manifest = save(snaps, tensors)
    into = {k: torch.empty_like(t) for k, t in tensors.items()}  # keeps strides
    addresses = {k: t.data_ptr() for k, t in into.items()}
    into["parameter"].requires_grad_()
    load(snaps, manifest, into, threads=3)
    assert {k: t.data_ptr() for k, t in into.items()} == addresses
    assert all(same(t, into[k]) for k, t in tensors.items())
    assert into["transposed"].stride() == tensors["transposed"].stride()


def test_a_large_state_in_many_files_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "FILE_NBYTES", 5000)
    monkeypatch.setattr("storage.tensors.loading.READ_NBYTES", 2300)
    snaps, tensors = snapshots(), zoo()
    manifest = save(snaps, tensors)
    assert len(manifest.parts) >= 3
    found = destinations(manifest, {})
    load(snaps, manifest, found)
    assert all(same(t, found[name]) for name, t in tensors.items())


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__(objects={})
        self.fetched = 0

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        found = super().get(key, start, end)
        self.fetched += len(found)
        return found


def test_only_the_bytes_that_are_wanted_are_fetched() -> None:
    store = Counting()
    snaps = Snapshots(store, chunk_nbytes=1000)
    tensors = {"a": torch.randn(100_000), "b": torch.randn(10), "c": torch.randn(100_000)}
    manifest = save(snaps, tensors)
    store.fetched = 0
    want = {"b": torch.empty(10)}
    load(snaps, manifest, want)
    assert same(want["b"], tensors["b"])
    assert store.fetched <= 2000


def test_stage_is_a_copy_and_buffers_are_used_again() -> None:
    snaps = snapshots()
    saver = Saver(snaps)
    tensors = {"w": torch.zeros(1000)}
    saver.plan(tensors)
    first = saver.stage(tensors)
    tensors["w"].fill_(1)
    second = saver.stage(tensors)  # while the first is still being written
    tensors["w"].fill_(2)
    assert first.buffer is not None
    assert second.buffer is not None
    buffers = {first.buffer.data_ptr(), second.buffer.data_ptr()}
    assert len(buffers) == 2
    for i, staged in enumerate([first, second]):
        manifest = saver.write(staged, Ref(1, i + 1), {}, "t")
        assert manifest is not None
        found = destinations(manifest, {})
        load(snaps, manifest, found)
        assert found["w"].unique().tolist() == [i]
    again = [saver.stage(tensors), saver.stage(tensors)]
    assert {s.buffer.data_ptr() for s in again if s.buffer is not None} == buffers
    with pytest.raises(RuntimeError, match="stage again"):
        saver.write(first, Ref(1, 3), {}, "t")


def test_stage_wants_a_plan_of_the_same_structure() -> None:
    saver = Saver(snapshots())
    with pytest.raises(RuntimeError, match="plan"):
        saver.stage({"w": torch.zeros(3)})
    saver.plan({"w": torch.zeros(3)})
    for other in (
        {"w": torch.zeros(4)},
        {"v": torch.zeros(3)},
        {"w": torch.zeros(3, dtype=torch.int32)},
    ):
        with pytest.raises(RuntimeError, match="plan"):
            saver.stage(other)


def test_a_write_that_was_not_answered_can_be_repeated() -> None:
    tensors = {"w": torch.randn(1000)}
    for call in range(1, 7):
        inner = MemoryStore(objects={})
        saver = Saver(Snapshots(FaultyStore(inner, random.Random(0), fail_call=call, mode="after")))
        saver.plan(tensors)
        staged = saver.stage(tensors)
        with pytest.raises(StoreUnavailable):
            saver.write(staged, Ref(1, 1), {}, "t")
        manifest = saver.write(staged, Ref(1, 1), {}, "t")
        assert manifest is not None
        found = destinations(manifest, {})
        load(Snapshots(inner), manifest, found)
        assert same(found["w"], tensors["w"])


def test_adapters_beside_frozen_weights_are_all_that_is_sent_again() -> None:
    """As with LoRA: the second snapshot stores what changed, not the model."""
    store = MemoryStore(objects={})
    saver = Saver(Snapshots(store, chunk_nbytes=4096))
    layers = {
        f"model/{i}/{kind}": torch.randn(shape)
        for i in range(8)
        for kind, shape in (("w", (200, 200)), ("a", (4, 200)))
    }
    moments = {f"optimizer/{i}/{m}": torch.randn(4, 200) for i in range(8) for m in ("m", "v")}
    tensors = layers | moments
    saver.plan(tensors)
    sizes = []
    for step in (1, 2, 3):
        for name, t in tensors.items():
            if not name.endswith("/w"):
                t.add_(1)
        manifest = saver.write(saver.stage(tensors), Ref(1, step), {}, "t")
        assert manifest is not None
        sizes.append(manifest.own_nbytes)
        found = destinations(manifest, {})
        load(saver.snapshots, manifest, found)
        assert all(same(t, found[name]) for name, t in tensors.items())
        saver.snapshots.prune(Keep(1))
    trained = sum(t.numel() * 4 for name, t in tensors.items() if not name.endswith("/w"))
    assert sizes[0] > 8 * 200 * 200 * 4 and max(sizes[1:]) <= trained + 2 * 4096


def test_load_says_what_does_not_fit_before_it_changes_anything() -> None:
    snaps = snapshots()
    manifest = save(snaps, {"a": torch.ones(2, 3), "b": torch.ones(2)})
    a = torch.zeros(2, 3)
    for bad, message in [
        ({"a": a, "c": torch.zeros(1)}, "no tensor 'c'"),
        (
            {"a": a, "b": torch.zeros(3)},
            r"'b' was saved as torch.float32 \(2,\), this program wants torch.float32 \(3,\)",
        ),
        ({"a": a, "b": torch.zeros(2, dtype=torch.bfloat16)}, "bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(snaps, manifest, bad)
    assert a.sum() == 0


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "empty"])
def test_damage_is_found_by_load(how: Any) -> None:
    snaps = snapshots()
    manifest = save(snaps, {"a": torch.randn(5000), "b": torch.randn(5000)})
    corrupt(snaps.store, manifest.parts[0].key, how, random.Random(1))
    with pytest.raises(SnapshotCorrupt, match="use an older snapshot"):
        load(snaps, manifest, destinations(manifest, {}))


def test_adamw_goes_on_exactly_where_it_was() -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    snaps = snapshots()
    model, optimizer, scheduler = build(0)
    train(model, optimizer)
    scheduler.step()
    tensors, data = split(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict()],
            "scheduler": scheduler.state_dict(),
        }
    )
    manifest = save(snaps, tensors, data)

    other, other_optimizer, other_scheduler = build(1)
    have, _ = split({"model": other.state_dict(), "optimizers": [other_optimizer.state_dict()]})
    parameters = list(other.parameters())
    tensors = destinations(
        manifest,
        have,
        lambda name, shape: parameters[int(name.split("/")[3])] if "/state/" in name else None,
    )
    load(snaps, manifest, tensors)
    state = join(tensors, manifest.data["state"])
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizers"][0])
    other_scheduler.load_state_dict(state["scheduler"])
    for m, o, s in ((model, optimizer, scheduler), (other, other_optimizer, other_scheduler)):
        train(m, o, steps=3, seed=10)
        s.step()
    assert all(same(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


def test_nothing_is_pickled() -> None:
    store = MemoryStore(objects={})
    tensors, data = split({"w": torch.randn(3, 3), "rng": random.getstate(), "o": np.arange(3)})
    save(Snapshots(store), tensors, data)
    assert len(store._objects) == 3  # the part, its list, the manifest
    for key, stored in store._objects.items():
        if key.endswith(".json"):
            stored.decode("ascii")
        else:
            assert len(stored) == 3 * 3 * 4  # nothing but the numbers
    source = Path(dcp.__file__).read_text()
    assert "torch.load" not in source
    assert "torch.save" not in source
    assert "import pickle" not in source


# ---- real worlds ---------------------------------------------------------------------------------
SHAPES = (5, 7, 1, 3)  # of layers: divisible neither by 2 nor by 3, and smaller than both


def sharded(mesh: Any, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(SHAPES)]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("seen", torch.arange(4, dtype=torch.int64))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def full(tensors: Tensors) -> Tensors:
    return {
        k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()
    }


def replicated() -> Tensors:
    torch.manual_seed(5)
    return {f"layer{i}": torch.randn(100 + 7 * i, 50) for i in range(12)} | {
        "step": torch.tensor(3.0)
    }


def start(world: int, folder: str) -> Snapshots:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rdzv{world}",
        rank=int(os.environ["RANK"]),
        world_size=world,
    )
    return Snapshots(open_store(f"{folder}/run"), chunk_nbytes=4096)


def finish(snaps: Snapshots, ref: Ref) -> Manifest:
    dist.barrier()
    manifest = snaps.commit(ref, dist.get_world_size())
    assert manifest is not None
    return manifest


def rank_saves(folder: str) -> None:
    snaps = start(2, folder)
    rank = dist.get_rank()
    exchanges = 0
    gather = dist.all_gather_object

    def counting(out: list[Any], mine: Any, group: Any = None) -> None:
        nonlocal exchanges
        exchanges += not isinstance(mine, bool)
        gather(out, mine, group=group)

    dist.all_gather_object = counting
    model, optimizer = sharded(init_device_mesh("cpu", (2,)), seed=0)
    saver = Saver(snaps, dist.group.WORLD)
    for step in (1, 2):
        train(model, optimizer, steps=1, seed=step)
        tensors, data = split({"model": model.state_dict(), "optimizers": [optimizer.state_dict()]})
        saver.plan(tensors)
        staged = saver.stage(tensors)
        if step == 2:
            expected = full(tensors)
        train(model, optimizer, steps=1, seed=100)  # must not show in what was staged
        saver.write(staged, Ref(1, step), {"state": data, f"rank{rank}": rank}, f"t{rank}")
        manifest = finish(snaps, Ref(1, step))
        assert manifest.data["rank0"] == 0
        assert manifest.data["rank1"] == 1
    assert exchanges == 1
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")

    tensors = replicated()
    saver.plan(tensors)
    assert exchanges == 2
    saver.write(saver.stage(tensors), Ref(2, 3), {}, f"t{rank}")
    finish(snaps, Ref(2, 3))

    with pytest.raises(ValueError, match="different names"):
        saver.plan({"w": torch.zeros(3 + rank)})
    mesh = init_device_mesh("cpu", (2,))
    wide = {"by columns": distribute_tensor(torch.arange(60.0).reshape(6, 10), mesh, [Shard(1)])}
    wide["whole"] = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    saver.plan(wide)
    saver.write(saver.stage(wide), Ref(3, 4), {}, f"t{rank}")
    finish(snaps, Ref(3, 4))
    dist.destroy_process_group()


def rank_loads(folder: str) -> None:
    snaps = start(3, folder)
    mesh = init_device_mesh("cpu", (3,))
    model, optimizer = sharded(mesh, seed=9)
    manifest = snaps.load(Ref(1, 2))
    found = restore(snaps, manifest, model, optimizer)
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    tensors, _ = split({"model": model.state_dict(), "optimizers": [optimizer.state_dict()]})
    assert isinstance(tensors["optimizers/0/state/0/exp_avg"], DTensor)
    for both in (full(tensors), full(found)):
        assert both.keys() == expected.keys()
        for name, t in both.items():
            assert same(t, expected[name]), name
    train(model, optimizer, steps=1)  # and it can go on

    manifest = snaps.load(Ref(3, 4))
    rows = {
        "by columns": distribute_tensor(torch.zeros(6, 10), mesh, [Shard(0)]),
        "whole": torch.zeros(6),
    }
    load(snaps, manifest, rows)
    assert same(rows["by columns"].full_tensor(), torch.arange(60.0).reshape(6, 10))
    assert same(rows["whole"], torch.arange(6.0))
    dist.destroy_process_group()


def restore(
    snaps: Snapshots, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Tensors:
    have, _ = split({"model": model.state_dict()})
    parameters = list(model.parameters())

    def like(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        kind, *_, index, _ = name.split("/")
        return parameters[int(index)] if kind == "optimizers" else None

    tensors = destinations(manifest, have, like)
    load(snaps, manifest, tensors)
    optimizer.load_state_dict(join(tensors, manifest.data["state"])["optimizers"][0])
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two ranks saved: FSDP2 (step 2), replicated (step 3), DTensors by columns
    (step 4)."""
    where = tmp_path_factory.mktemp("world")
    worlds.train(where, 2, "rank_saves", where, script=__file__)
    return where


def test_saved_by_two_loaded_by_one(folder: Path) -> None:
    snaps = Snapshots(open_store(f"{folder}/run"))
    manifest = snaps.load(Ref(1, 2))
    snaps.verify(manifest)
    assert manifest.world == 2
    assert len(manifest.tensors["model/0.weight"]["chunks"]) == 2  # really sharded
    torch.manual_seed(9)
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(SHAPES)))
    model.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters())
    found = restore(snaps, manifest, model, optimizer)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(same(t, expected[name]) for name, t in found.items())
    assert same(model[0].weight, expected["model/0.weight"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_saved_by_two_loaded_by_three(folder: Path) -> None:
    worlds.train(folder, 3, "rank_loads", folder, script=__file__)


def test_replicated_tensors_are_written_once_and_evenly(folder: Path) -> None:
    snaps = Snapshots(open_store(f"{folder}/run"))
    manifest = snaps.load(Ref(2, 3))
    tensors = replicated()
    assert all(len(e["chunks"]) == 1 for e in manifest.tensors.values())
    by_rank = {
        rank: sum(p.nbytes for p in manifest.parts if f"/r{rank:05d}-" in p.key) for rank in (0, 1)
    }
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert total <= sum(by_rank.values()) < total * 1.01  # padding
    assert max(by_rank.values()) < 0.55 * total
    found = destinations(manifest, {})
    load(snaps, manifest, found)
    assert all(same(t, found[name]) for name, t in tensors.items())


# ---- any world onto any other --------------------------------------------------------------------
def test_what_w_ranks_save_any_other_number_loads_bit_equal(tmp_path: Path) -> None:
    """W x W' over {1, 2, 3, 4}, DDP and FSDP2, copied beside and sent by the engine; and all of
    them hash the weights alike."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).parents[1] / "support" / "reshard.py"
    ended = subprocess.run(
        [sys.executable, script, tmp_path], env=env, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [(kind, int(world)) for kind, world, _ in lines] == [
        (kind, world) for kind in ("ddp", "fsdp2") for world in range(1, 5)
    ]
    assert len({weights for _, _, weights in lines}) == 1


if __name__ == "__main__":  # a rank
    {"rank_saves": rank_saves, "rank_loads": rank_loads}[sys.argv[1]](sys.argv[2])


def test_memory_that_cannot_be_pinned_is_copied_to_plainly(monkeypatch):
    """And what was pinned is unpinned at the end."""
    asked, ended = [], []

    class Runtime:
        code = 0

        def cudaHostRegister(self, at, nbytes, flags):
            asked.append(at)
            return self.code

        def cudaHostUnregister(self, at):
            ended.append(at)
            return 0

    monkeypatch.setattr(dcp, "_pins", {})
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in asked and Runtime.code == 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    good, bad, short = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(3))
    owner = Segment.anonymous(1)
    assert dcp.pin(short, owner)
    del owner  # before its memory is unmapped, and taken for something else
    assert ended == [short.data_ptr()] and not dcp._pins
    asked.clear(), ended.clear()
    owner = Segment.anonymous(1)
    assert dcp.pin(good, owner) and dcp.pin(good, owner)
    monkeypatch.setattr(Runtime, "code", 712)
    with pytest.warns(RuntimeWarning, match="could not be pinned .CUDA error 712."):
        assert not dcp.pin(bad, owner)
    assert not dcp.pin(bad, owner) and asked == [good.data_ptr(), bad.data_ptr()]
    dcp.unpin()
    assert ended == [good.data_ptr()]


def test_a_device_fingerprint_is_of_the_bytes_wherever_they_begin():
    raw = torch.randint(256, (4099,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = int(dcp.weighted(raw.clone()))
    for before in range(1, 8):
        moved = torch.cat([torch.zeros(before, dtype=torch.uint8), raw])[before:]
        assert moved.storage_offset() == before and int(dcp.weighted(moved)) == wanted
