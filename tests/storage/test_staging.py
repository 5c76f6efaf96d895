"""Host memory of staged snapshots, the copy beside the training, and the hash that any world
can add up."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage import MemoryStore, Ref, Snapshots
from storage.snapshots.staging import PREFIX, Segment, Segments, Stage, StageFull, sweep
from storage.snapshots.tensor_hash import combined, weights_sum
from storage.tensor_threads import TensorThread


def test_a_segment_is_shared_by_its_name(tmp_path):
    ours = Segment.create(tmp_path / "a", 10_000).touch()
    theirs = Segment.open(tmp_path / "a")
    ours.view[5000] = 7
    assert theirs.view[5000] == 7 and theirs.nbytes == 10_000
    ours.touch()
    assert theirs.view[5000] == 7
    with pytest.raises(TypeError):
        Segment.open(tmp_path / "a", writable=False).view[0] = 1


def test_the_budget_holds_and_the_error_says_what_to_do(tmp_path):
    segments = Segments(tmp_path, 3 << 20)
    first = segments.create(2 << 20)
    with pytest.raises(
        StageFull, match=r"budget is 3 MiB, 2 MiB are taken, 2 MiB more are wanted.*--set stage_gib"
    ):
        segments.create(2 << 20)
    segments.drop(first.path)
    segments.create(3 << 20)
    assert len(list(tmp_path.iterdir())) == 1


def test_no_room_on_the_ram_disk_is_said(tmp_path):
    with pytest.raises(StageFull, match="--set stage_dir"):
        Segment.create(tmp_path / "huge", 1 << 60)
    assert not (tmp_path / "huge").exists()


def test_what_a_killed_owner_left_is_swept_and_nothing_else(tmp_path):
    code = (
        "import sys, pathlib, storage.snapshots.staging as s; mine = s.Stage(pathlib.Path(sys.argv[1])); "
        "print(mine.folder, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(other.stdout.readline().strip())
    mine = Stage(tmp_path, 100)
    (tmp_path / f"{PREFIX}1-strange").mkdir()  # without a lock: not one of ours
    assert folder.exists() and sweep(tmp_path) == []
    other.kill()
    other.wait()
    assert sweep(tmp_path) == [folder] and not folder.exists() and mine.folder.exists()
    assert oct(mine.folder.stat().st_mode & 0o777) == "0o700"
    mine.close()
    assert sweep(tmp_path) == []
    other.stdin.close()
    other.stdout.close()


# ---- hash of weights -----------------------------------------------------------------------------
def index(name, array, boxes):
    """Index and files of an array that is cut into boxes."""
    files, chunks = {}, []
    for i, box in enumerate(boxes):
        piece = np.ascontiguousarray(array[box])
        files[f"{name}{i}"] = memoryview(piece.tobytes())
        offsets = [s.start or 0 for s in box]
        chunks.append(
            {
                "offsets": offsets,
                "sizes": list(piece.shape),
                "part": f"{name}{i}",
                "start": 0,
                "end": piece.nbytes,
            }
        )
    return {name: {"shape": list(array.shape), "dtype": str(array.dtype), "chunks": chunks}}, files


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "complex128"])
def test_the_hash_does_not_depend_on_who_holds_what(dtype):
    array = np.random.default_rng(0).integers(0, 250, (700, 5, 31)).astype(dtype)
    whole = [(slice(0, 700), slice(0, 5), slice(0, 31))]
    rows = [
        (slice(0, 1), slice(0, 5), slice(0, 31)),
        (slice(1, 613), slice(0, 5), slice(0, 31)),
        (slice(613, 700), slice(0, 5), slice(0, 31)),
    ]
    columns = [
        (slice(0, 700), slice(0, 2), slice(0, 31)),
        (slice(0, 700), slice(2, 5), slice(0, 31)),
    ]
    last = [(slice(0, 700), slice(0, 5), slice(0, 30)), (slice(0, 700), slice(0, 5), slice(30, 31))]
    found = {
        weights_sum(*index("m/w", array, boxes), "m/") for boxes in (whole, rows, columns, last)
    }
    assert len(found) == 1
    shares = [f"{weights_sum(*index('m/w', array, [box]), 'm/'):x}" for box in rows]
    assert combined(shares) == combined([f"{found.pop():x}"])


def test_the_hash_sees_any_change():
    array = np.random.default_rng(0).normal(size=(300, 70)).astype(np.float32)
    boxes = [(slice(0, 300), slice(0, 70))]
    known = {weights_sum(*index("w", array, boxes), "")}
    for i in (0, 1, 16383, 16384, 20999):
        for bit in (0, 17, 31):
            changed = array.copy()
            changed.view(np.uint32).reshape(-1)[i] ^= 1 << bit
            known.add(weights_sum(*index("w", changed, boxes), ""))
    swapped = array.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    known.add(weights_sum(*index("w", swapped, boxes), ""))
    known.add(weights_sum(*index("v", array, boxes), ""))
    known.add(weights_sum(*index("w", array.reshape(70, 300), [(slice(0, 70), slice(0, 300))]), ""))
    assert len(known) == 1 + 15 + 3
    assert weights_sum(*index("other", array, boxes), "w") == 0


# ---- copying beside the training -----------------------------------------------------------------
def test_begin_copies_the_rest_later_and_finds_what_was_touched():
    torch = pytest.importorskip("torch")
    from storage.tensors.dcp import Saver
    from storage.tensors.loading import load

    tensors = {
        "p": torch.randn(1000, 100),
        "p2": torch.randn(50, 3).t(),
        "buffer": torch.randn(7),
        "half": torch.randn(9).bfloat16(),
    }
    before = {name: t.clone() for name, t in tensors.items()}
    saver = Saver(Snapshots(MemoryStore(objects={})), own_memory=False)
    saver.plan(tensors)
    assert saver.planned and saver.fits(tensors) and not saver.fits({"p": tensors["p"]})
    buffer = torch.full((saver.nbytes + 100,), 255, dtype=torch.uint8)
    staged = saver.begin(tensors, {"p", "p2"}, buffer)
    tensors["buffer"].add_(1)  # is copied already
    staged.wait()
    assert staged.touched() == []
    tensors["p"].zero_()
    assert staged.touched() == ["p"]
    manifest = saver.write(staged, Ref(1, 1), {}, "t")
    loaded = {name: torch.empty_like(t) for name, t in before.items()}
    load(saver.snapshots, manifest, loaded)
    assert all(torch.equal(loaded[name], before[name]) for name in before)
    parts = [saver.snapshots.store.get(p.key) for p in manifest.parts]
    again = saver.begin(before, (), torch.zeros(saver.nbytes, dtype=torch.uint8))
    again.arrive()
    # what lies between the tensors does not depend on the buffer
    assert [bytes(v) for v in again.files().values()] == parts


def test_an_error_of_the_copy_is_raised_to_who_sends():
    torch = pytest.importorskip("torch")
    from storage.tensors import dcp

    target = torch.zeros(4, dtype=torch.uint8)
    copy = dcp.Copying(
        [], [dcp.Move("x", torch.zeros(8), target.view(torch.float32), 0)], TensorThread("t")
    )
    copy.wait()
    with pytest.raises((ValueError, RuntimeError)):
        copy.arrive()


def test_a_large_tensor_leaves_a_gpu_in_slices(monkeypatch):
    torch = pytest.importorskip("torch")
    from storage.tensors import dcp

    monkeypatch.setattr(dcp, "SLICE_NBYTES", 64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.arange(300.0, device=device).reshape(20, 15)
    for source, parts in (
        (there, 19),
        (there.bfloat16(), 10),
        (there.t(), 1),  # its bytes are in another order
        (there[3, 4], 1),
        (there[:0], 0),
        (torch.complex(there, there).conj(), 1),
    ):
        target = torch.zeros(source.shape, dtype=source.dtype)
        slices = list(dcp._slices(dcp.Move("x", source, target, 0)))
        for to, part in slices:
            to.copy_(part, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        assert len(slices) == parts and torch.equal(target, source.cpu().resolve_conj())
