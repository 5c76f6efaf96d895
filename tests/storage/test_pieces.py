"""Tensors of which a rank holds boxes: stored whole, and loaded as other boxes."""

import math

import pytest

torch = pytest.importorskip("torch")

from storage import Manifest, MemoryStore, Ref, SnapshotCorrupt, Snapshots  # noqa: E402
from storage.tensors.dcp import Saver  # noqa: E402
from storage.tensors.flat_shards import Pieces, flat_boxes, held_numel  # noqa: E402
from storage.tensors.loading import destinations, load  # noqa: E402


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (4, 1, 3, 2), (3, 0)])
def test_a_flat_range_is_few_contiguous_boxes(shape):
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            found = []
            boxes = list(flat_boxes(shape, start, stop))
            for offsets, sizes in boxes:
                at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                found += whole[at].flatten().tolist()
            assert found == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def saved(tensors: dict[str, torch.Tensor]) -> tuple[Snapshots, Manifest]:
    """What one process stores."""
    snapshots = Snapshots(MemoryStore(objects={}), chunk_nbytes=1000)
    saver = Saver(snapshots)
    saver.plan(tensors)
    manifest = saver.write(saver.stage(tensors), Ref(1, 1), {}, "t")
    assert manifest is not None
    return snapshots, manifest


def test_it_is_loaded_whole_and_as_other_pieces():
    values = torch.randn(6, 5, 4)
    flat = values.flatten()
    boxes = {}
    for start, stop in ((0, 33), (33, 34), (34, 120)):
        boxes |= Pieces.of_flat(values.shape, start, flat[start:stop].clone()).boxes
    snapshots, manifest = saved({"a": Pieces(values.shape, boxes, values.dtype, values.device)})
    assert manifest.tensors["a"]["shape"] == [6, 5, 4]
    whole = torch.empty_like(values)
    load(snapshots, manifest, {"a": whole})
    assert torch.equal(whole, values)
    part = torch.empty(50)
    load(snapshots, manifest, {"a": Pieces.of_flat(values.shape, 21, part)})
    assert torch.equal(part, flat[21:71])
    # what is laid out like a parameter's pieces is made as such pieces
    like = Pieces.of_flat(values.shape, 100, torch.empty(20, dtype=torch.bfloat16))
    made = destinations(manifest, {}, lambda name, shape: like)
    load(snapshots, manifest, made)
    found = torch.cat([box.flatten() for box in made["a"].boxes.values()])
    assert torch.equal(found, flat[100:]) and held_numel(made["a"]) == 20


def test_pieces_are_copied_to_a_host_and_back():
    pieces = Pieces.of_flat((4, 3), 2, torch.arange(7.0))
    kept = pieces.detach().to("cpu", copy=True)
    pieces.boxes[0, 2].fill_(9.0)
    assert kept.boxes[0, 2].item() == 0.0
    pieces.copy_(kept)
    assert pieces.boxes[0, 2].item() == 0.0 and held_numel(kept) == 7


def test_a_hole_is_refused_and_there_is_no_arithmetic():
    gap = Pieces.of_flat((4, 3), 1, torch.ones(11))
    with pytest.raises(SnapshotCorrupt, match="has 12 elements, its chunks hold 11"):
        saved({"a": gap})
    with pytest.raises(NotImplementedError, match="no arithmetic"):
        gap + 1
