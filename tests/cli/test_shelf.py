"""`harness snapshots` and `python -m storage`: list, verify, show, prune, export, copy."""

import contextlib
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.cli import command as cli
from harness.core.facts import (
    SessionStarted,
    SnapshotCommitted,
    SnapshotExported,
    SnapshotReplicated,
    Warned,
)
from storage import Keep, Ref, SnapshotCorrupt, Snapshots, StoreError, open_store
from storage.export.safetensors import export
from storage.snapshots.transfer import copy, would_prune
from storage.snapshots_command import Notes, age, main, size
from storage.testing.faulty_store import FaultyStore, corrupt
from support.shelves import memory, save

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
AT_ONCE = ("--look-again-s", "0", "0")


class Tied(nn.Module):
    """As language models do it: the embedding is the head. And parameters that only look alike."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.wte.weight
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.zeros_(self.a.weight), nn.init.zeros_(self.b.weight)
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3))


def boxes(store, ref, name, tensor, cuts, chunk_nbytes=64):
    """A snapshot whose tensor is saved in boxes, as ranks of a mesh save it; `cuts` = rows and
    columns of boxes."""
    files, chunks = {}, []
    for i, rows in enumerate(torch.arange(tensor.shape[0]).chunk(cuts[0])):
        for j, columns in enumerate(torch.arange(tensor.shape[1]).chunk(cuts[1])):
            part = tensor[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].contiguous()
            file = f"{i}{j}.bin"
            files[file] = part.view(torch.uint8).numpy().tobytes()
            place = {"offsets": [int(rows[0]), int(columns[0])], "sizes": list(part.shape)}
            chunks.append({**place, "part": file, "start": 0, "end": len(files[file])})
    entry = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "chunks": chunks,
    }
    snapshots = Snapshots(store, chunk_nbytes)
    snapshots.write(ref, 0, 1, files, {f"model/{name}": entry}, {}, "t")
    return snapshots.commit(ref, 1)


# ---- export --------------------------------------------------------------------------------------
def test_export_is_what_safetensors_reads(tmp_path):
    store, torch_rng = memory(), torch.Generator().manual_seed(0)
    state = {
        f"layer.{str(d).removeprefix('torch.')}": (torch.randn(33, 7, generator=torch_rng) * 50).to(
            d
        )
        for d in DTYPES
    }
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "_orig_mod.compiled": torch.ones(3),
    }
    manifest = save(store, Ref(1, 5), state)
    made = export(Snapshots(store), manifest, tmp_path / "out")
    assert made.files == ("model.safetensors",)
    assert made.tied == {}
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


@pytest.mark.parametrize("cuts", [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_export_puts_boxes_together(tmp_path, cuts):
    store, tensor = memory(), torch.randn(11, 9)
    manifest = boxes(store, Ref(1, 5), "w", tensor, cuts)
    export(Snapshots(store), manifest, tmp_path / "out")
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["w"], tensor
    )


@pytest.mark.parametrize(
    ("asked", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_export_rounds_as_torch_does(tmp_path, asked, dtype):
    # Seeded: torch rounds a double twice on its way to fp16, and one in some thousands differs.
    rng = torch.Generator().manual_seed(1)
    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32)
    ties = (np.arange(0x3F80, 0x3F80 + 500, dtype=np.uint32) << 16) | 0x8000
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 1e-45, 65519.0, 65520.0]
    )
    state = {
        "w": torch.cat(
            [torch.from_numpy(np.concatenate([bits, ties]).view(np.float32).copy()), special]
        ),
        "half": torch.randn(50, generator=rng).half(),
        "brain": torch.randn(50, generator=rng).bfloat16(),
        "double": torch.randn(50, generator=rng, dtype=torch.float64),
        "ids": torch.arange(5),
    }
    store = memory()
    export(Snapshots(store), save(store, Ref(1, 5), state), tmp_path / "out", dtype=asked)
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["ids"], state.pop("ids"))
    for name, tensor in state.items():
        assert found[name].dtype == dtype
        assert torch.equal(
            torch.nan_to_num(found[name].float(), 1.5),
            torch.nan_to_num(tensor.to(dtype).float(), 1.5),
        ), name
        assert torch.equal(found[name].isnan(), tensor.isnan())


def test_tied_weights_are_stored_once_and_what_only_looks_alike_is_not_tied(tmp_path):
    model, store = Tied(), memory()
    manifest = save(store, Ref(1, 5), model.state_dict())
    made = export(Snapshots(store), manifest, tmp_path / "out")
    assert made.tied == {"lm_head.weight": "wte.weight"}  # the one that Hugging Face looks for
    other = Tied()
    missing, unexpected = safetensors.torch.load_model(
        other, tmp_path / "out" / "model.safetensors"
    )
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(other.wte.weight, model.wte.weight)
    assert other.lm_head.weight is other.wte.weight
    made = export(Snapshots(store), manifest, tmp_path / "both", keep_tied=True)
    assert made.tied == {}
    assert (
        safetensors.torch.load_file(tmp_path / "both" / "model.safetensors").keys()
        == model.state_dict().keys()
    )


def test_big_exports_are_sharded_with_the_index_that_hugging_face_reads(tmp_path):
    state = {f"h.{i}.w": torch.randn(10, 10) for i in range(5)} | {"big": torch.randn(40, 10)}
    store = memory()
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "x"}')
    made = export(
        Snapshots(store),
        save(store, Ref(1, 5), state),
        tmp_path / "out",
        shard_nbytes=900,
        config=config,
    )
    assert made.files == tuple(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes == 9 * 400
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "pt") as f:
            assert torch.equal(f.get_tensor(name), state[name])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*made.files, "model.safetensors.index.json", "config.json"]
    )


def test_export_never_writes_what_does_not_hash_right(tmp_path):
    store = memory()
    manifest = save(store, Ref(1, 5), {"w": torch.randn(100, 10)})
    corrupt(store, manifest.parts[0].key, "flip", random.Random(3))
    with pytest.raises(SnapshotCorrupt, match="hash differs"):
        export(Snapshots(store), manifest, tmp_path / "out", keep_tied=True, prefix="")
    assert list((tmp_path / "out").iterdir()) == []


def test_export_says_what_is_wrong_with_its_input(tmp_path):
    store = memory()
    manifest = save(store, Ref(1, 5), {"w": torch.randn(2, 2)})
    with pytest.raises(
        ValueError, match=r"no tensors under 'net/'; it has some under model/, optimizer/"
    ):
        export(Snapshots(store), manifest, tmp_path / "out", prefix="net/")
    with pytest.raises(ValueError, match="wanted one of bf16, fp16, fp32"):
        export(Snapshots(store), manifest, tmp_path / "out", dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(ValueError, match="wanted a new or an empty folder"):
        export(Snapshots(store), manifest, tmp_path / "full")


# ---- copy ----------------------------------------------------------------------------------------
def filled(steps=(10, 20, 30), nbytes=1000):
    store = memory()
    for step in steps:
        save(
            store,
            Ref(1, step),
            {"w": torch.randn(nbytes // 4)},
            {"loss": 1.0 / step, "final": step == max(steps)},
        )
    return store


def test_copy_brings_whole_snapshots_and_repeats_nothing():
    source, target = filled(), memory()
    source.put("run.json", b"{}")
    refs = Snapshots(source).refs()
    found = copy(source, target, refs, extra=["run.json"])
    assert [one.state for one in found] == ["copied"] * 3
    assert Snapshots(target).refs() == refs
    for ref in refs:
        Snapshots(target).verify(Snapshots(target).load(ref))
        assert Snapshots(target).load(ref) == Snapshots(source).load(ref)
    assert target.get("run.json") == b"{}"
    counting = FaultyStore(target, random.Random(0))
    assert [one.state for one in copy(source, counting, refs)] == ["there"] * 3
    assert not [key for _, what, key, _ in counting.log if what == "put"]


@pytest.mark.parametrize("mode", ["before", "after", "full"])
def test_a_copy_that_is_broken_off_anywhere_goes_on_and_never_commits_half(mode):
    source = filled((10, 20))
    refs = Snapshots(source).refs()
    calls = FaultyStore(memory(), random.Random(0))
    copy(source, calls, refs)
    for call in range(1, calls.calls + 1):
        inner = memory()
        with contextlib.suppress(StoreError):
            copy(source, FaultyStore(inner, random.Random(0), fail_call=call, mode=mode), refs)
        for ref in Snapshots(inner).refs():
            Snapshots(inner).verify(Snapshots(inner).load(ref))
        copy(source, inner, refs)
        assert Snapshots(inner).refs() == refs


def test_a_copy_of_the_newest_brings_what_it_refers_to():
    """Chunks that did not change lie in objects of an older snapshot."""
    source, target = memory(), memory()
    snapshots, frozen = Snapshots(source, 64), random.Random(0).randbytes(1024)
    chunks = [{"offsets": [0], "sizes": [1024], "part": "a", "start": 0, "end": 1024}]
    index = {"model/w": {"shape": [1024], "dtype": "uint8", "chunks": chunks}}
    for step in (10, 20):
        base = snapshots.latest()
        snapshots.write(
            Ref(1, step),
            0,
            1,
            {"a": frozen[:900] + bytes([step]) * 124},
            index,
            {},
            f"t{step}",
            base,
        )
        snapshots.commit(Ref(1, step), 1)
    newest = snapshots.load(Ref(1, 20))
    assert newest.refers
    copy(source, target, [Ref(1, 20)])
    Snapshots(target).verify(Snapshots(target).load(Ref(1, 20)))
    assert Snapshots(target).refs() == [Ref(1, 20)]
    _, deleted = would_prune(source, Keep(1))
    before = set(source.list(""))
    snapshots.prune(Keep(1))
    assert before - set(source.list("")) == set(deleted)
    snapshots.verify(newest)


def test_what_a_broken_off_copy_left_is_hashed_before_it_is_believed():
    source, target = filled((10,)), memory()
    (ref,) = Snapshots(source).refs()
    key = Snapshots(source).load(ref).parts[0].key
    target.put(key, bytes(source.size(key)))  # of the right size, and wrong
    copy(source, target, [ref])
    assert target.get(key) == source.get(key)


def test_copy_refuses_damage_and_strangers():
    source, target = filled((10,)), memory()
    (ref,) = Snapshots(source).refs()
    manifest = Snapshots(source).load(ref)
    save(target, ref, {"w": torch.randn(7)})
    with pytest.raises(StoreError, match="is there and differs: another run's"):
        copy(source, target, [ref])
    target = memory()
    target.put("run.json", b"other")
    source.put("run.json", b"mine")
    with pytest.raises(StoreError, match="another run's"):
        copy(source, target, [ref], extra=["run.json"])
    corrupt(source, manifest.parts[0].key, "flip", random.Random(1))
    with pytest.raises(SnapshotCorrupt, match="hash differs"):
        copy(source, memory(), [ref])
    source.delete(manifest.parts[0].key)
    assert [one.state for one in copy(source, memory(), [ref])] == ["pruned"]


# ---- prune ---------------------------------------------------------------------------------------
def test_a_dry_run_says_exactly_what_a_prune_does():
    store = filled((10, 20, 30, 40))
    store.put("snapshots/parts/0000000015-e000001/r00000-t-0000.bin", b"an orphan")
    before = set(store.list(""))
    gone, deleted = would_prune(store, Keep(2))
    assert set(store.list("")) == before
    assert Snapshots(store).prune(Keep(2)) == gone
    assert before - set(store.list("")) == set(deleted)
    assert {ref.step for ref in gone} == {10, 15, 20}


# ---- the command ---------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path):
    url = str(tmp_path / "run")
    store = open_store(url)
    for step in (10, 20, 30):
        save(
            store,
            Ref(1, step),
            {"w": torch.randn(100, 3)},
            {"loss": 1.0 / step, "final": step == 30, "metrics": {"accuracy": 0.5}},
        )
    return url


def test_list(run, capsys):
    store = open_store(run)
    journal = Journal(store, "worker-x", lambda: 1000.0)
    journal.record(SnapshotCommitted(20, 1, 1200, 0.1, 2.5, "interval", 990.0))
    journal.record(SnapshotReplicated(20, 1, "gs://second/x", 1200, 0.1, 0.0))
    journal.record(
        SessionStarted(2, 1, 20, 1, 30, 8, 1, (8,), "exact", "ddp", "cpu", 0.1, "memory")
    )
    journal.flush()
    corrupt(store, Snapshots(store).load(Ref(1, 10)).parts[0].key, "truncate", random.Random(0))
    Snapshots(store).quarantine(Ref(1, 30), "it would not load")
    with pytest.raises(SystemExit) as e:
        cli.main(["snapshots", "list", run, "--json"])
    assert e.value.code == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [30, 20, 10]
    assert [rows[step]["state"] for step in (30, 20, 10)] == ["quarantined", "whole", "damaged"]
    assert rows[30]["reason"] == "it would not load"
    assert rows[30]["final"] is True
    assert (
        rows[20]["commit_s"],
        rows[20]["why"],
        rows[20]["restored"],
        rows[20]["committed_at"],
    ) == (2.5, "interval", "memory", 1000.0)
    assert (rows[20]["tiers"], rows[10]["tiers"], rows[30]["tiers"]) == (
        {"bucket": 1.0, "gs://second/x": 1.0},
        {},
        {},
    )
    assert rows[20]["metrics"] == {"loss": 0.05, "accuracy": 0.5}
    # looking marks nothing
    assert store.list("snapshots/quarantine/") == ["snapshots/quarantine/0000000030-e000001.json"]
    assert main(["list", run]) == 0
    shown = capsys.readouterr().out
    # all that the storage engine alone can see
    assert " bucket " in shown and "memory" not in shown
    near = Notes(near=lambda manifest: {"memory": 1.0, "disk": 0.5})
    assert [
        main(["list", run], tell=lambda store: near),
        "50%" in " ".join(capsys.readouterr().out.split()),
    ] == [0, True]
    assert (
        "3 snapshots" in shown
        and "the newest is of step 20" in shown
        and "it would not load" in shown
    )


def test_verify(run, capsys):
    assert main(["verify", run]) == 0
    assert capsys.readouterr().out.count("whole") == 3
    store = open_store(run)
    corrupt(store, Snapshots(store).load(Ref(1, 20)).parts[0].key, "flip", random.Random(0))
    assert main(["verify", run, "--json", *AT_ONCE]) == 1
    assert [one["whole"] for one in json.loads(capsys.readouterr().out)] == [True, False, True]
    assert main(["verify", run, "--step", "30"]) == 0
    assert main(["verify", run, "--quarantine", *AT_ONCE]) == 1
    assert Snapshots(store).quarantined() == {Ref(1, 20)}
    assert (
        main(["verify", run, *AT_ONCE]) == 0
        and "quarantined, and found damaged here too" in capsys.readouterr().out
    )


def test_verify_takes_back_the_marks_of_what_it_reads_whole_and_says_so(run, capsys):
    store = open_store(run)
    for step in (10, 30):
        Snapshots(store).quarantine(Ref(1, step), "a bad reader said so")
    with pytest.raises(SystemExit) as e:
        cli.main(["snapshots", "verify", run])
    assert e.value.code == 0 and capsys.readouterr().out.count("its mark was taken back") == 2
    assert Snapshots(store).quarantined() == set()
    told = [s.fact.what for s in read_facts(store) if isinstance(s.fact, Warned)]
    assert len(told) == 2 and "0000000030-e000001: whole; it was quarantined" in told[0]


def test_two_damaged_ones_may_be_this_machines_fault(run, capsys):
    store = open_store(run)
    for step in (20, 30):
        corrupt(store, Snapshots(store).load(Ref(1, step)).parts[0].key, "flip", random.Random(0))
    assert main(["verify", run, "--quarantine", *AT_ONCE]) == 1
    assert (
        "it may be this machine" in capsys.readouterr().err
        and Snapshots(store).quarantined() == set()
    )


def test_show(run, capsys):
    assert main(["show", run]) == 0
    shown = capsys.readouterr().out
    assert "step 30" in shown and "model/w" in shown and "100x3" in shown and "loss" in shown
    assert main(["show", run, "--step", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ref"] == "0000000010-e000001"
    assert main(["show", run, "--step", "11"]) == 1
    assert "no snapshot of step 11" in capsys.readouterr().err


def test_prune(run, capsys):
    store = open_store(run)
    assert main(["prune", run, "--keep-last", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would delete") == 2
    assert len(Snapshots(store).refs()) == 3
    assert main(["prune", run, "--keep-last", "1"]) == 0
    assert Snapshots(store).refs() == [Ref(1, 30)]
    assert main(["prune", run, "--keep-last", "0"]) == 2


def test_export_and_copy_by_command(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["snapshots", "copy", run, str(tmp_path / "other")])
    assert e.value.code == 0
    assert capsys.readouterr().out.count("copied") == 3
    command = [
        sys.executable,
        "-m",
        "storage",
        "export",
        str(tmp_path / "other"),
        str(tmp_path / "out"),
        "--step",
        "20",
        "--dtype",
        "bf16",
    ]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert "1 tensors" in told.stdout
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert found.dtype == torch.bfloat16
    assert found.shape == (100, 3)
    assert main(["export", run, str(tmp_path / "out")]) == 2
    with pytest.raises(SystemExit) as e:  # as `harness` does it, it is in the record
        cli.main(["snapshots", "export", run, str(tmp_path / "again"), "--step", "20"])
    assert e.value.code == 0
    (said,) = (s.fact for s in read_facts(open_store(run)) if isinstance(s.fact, SnapshotExported))
    assert (said.step, said.files, said.tensors) == (20, ("model.safetensors",), 1)
    assert main(["list", str(tmp_path / "nothing")]) == 0
    assert main(["copy", str(tmp_path / "nothing"), run]) == 1


def test_numbers_for_the_eye():
    assert [size(n) for n in (0, 999, 1000, 123_456, 5_400_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "123 kB",
        "5.4 MB",
    ]
    assert [size(n) for n in (2.5e9, 3e12)] == ["2.5 GB", "3 TB"]
    assert [age(s) for s in (3, 119, 120, 7199, 7200, 86400 * 3)] == [
        "3 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "3 d",
    ]
