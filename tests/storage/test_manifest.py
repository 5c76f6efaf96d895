"""Manifests: the same bytes whoever makes them, and no change goes unseen."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Manifest, Part, PartList, Ref, SnapshotCorrupt, SnapshotTooNew, StoreError
from storage.canonical_json import canonical, digest

REF = Ref(epoch=2, step=40)


def part_list(
    rank: int = 0,
    world: int = 1,
    data: dict | None = None,
    tensors: dict | None = None,
    content: bytes = b"x" * 2500,
) -> PartList:
    key = f"snapshots/parts/{REF.name}/r{rank:05d}-t-0000.bin"
    return PartList(
        REF, rank, world, "t", (Part.of(key, content, 1000),), tensors or {}, data or {}
    )


def box(part: PartList, shape: list[int], offsets: list[int], sizes: list[int]) -> dict:
    n = math.prod(sizes) * 4
    chunk = {"offsets": offsets, "sizes": sizes, "part": part.parts[0].key, "start": 0, "end": n}
    return {"w": {"shape": shape, "dtype": "float32", "chunks": [chunk]}}


def test_refs_are_ordered_by_epoch_then_step() -> None:
    refs = [Ref(1, 500), Ref(2, 10), Ref(1, 2), Ref(10, 1)]
    assert max(refs) == Ref(10, 1)
    assert sorted(refs) == [Ref(1, 2), Ref(1, 500), Ref(2, 10), Ref(10, 1)]


@given(st.integers(0, 10**12), st.integers(0, 10**9))
def test_ref_names_round_trip(step: int, epoch: int) -> None:
    assert Ref.parse(Ref(epoch, step).name) == Ref(epoch, step)


def test_ref_name_is_what_the_docs_say() -> None:
    assert REF.name == str(REF) == "0000000040-e000002"
    for bad in (
        "",
        "40-e2",
        "0000000040-e000002.json",
        "x0000000040-e000002",
        "0000000040-e00000２",
    ):
        with pytest.raises(ValueError, match="named like"):
            Ref.parse(bad)


def test_part_hashes_every_chunk() -> None:
    part = Part.of("snapshots/parts/k", bytes(2500), 1000)
    assert (part.nbytes, len(part.hashes)) == (2500, 3)
    assert part.hashes[0] == part.hashes[1] != part.hashes[2]
    assert all(len(h) == len("b3.") + 32 for h in part.hashes)
    assert Part.of("k", b"").hashes == ()
    assert Part.from_json(part.to_json()) == part
    with pytest.raises(SnapshotCorrupt):
        Part.from_json(part.to_json().replace("2500", "3500"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4))
def test_round_trip(data: dict) -> None:
    one = part_list(data=data)
    assert PartList.from_json(one.to_json()) == one
    manifest = Manifest.merge([one])
    again = Manifest.from_json(manifest.to_json().encode())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert canonical(again.data) == canonical(data)


def test_floats_keep_every_bit() -> None:
    values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
    found = Manifest.from_json(Manifest.merge([part_list(data={"v": values})]).to_json()).data["v"]
    assert [math.copysign(1, v) for v in found[:2]] == [1.0, -1.0]
    assert found[:6] == values[:6]
    assert math.isnan(found[6])


def test_properties() -> None:
    manifest = Manifest.merge([part_list(0, 2), part_list(1, 2)])
    assert (manifest.step, manifest.epoch, manifest.nbytes, manifest.world) == (40, 2, 5000, 2)
    assert manifest.part(manifest.parts[1].key) is manifest.parts[1]
    with pytest.raises(SnapshotCorrupt, match="names no part"):
        manifest.part("nope")


def test_the_hash_is_of_all_the_rest() -> None:
    body = json.loads(Manifest.merge([part_list()]).to_json())
    found = body.pop("hash")
    assert found == digest(canonical(body)) == Manifest.merge([part_list()]).hash


def test_merge_does_not_depend_on_who_or_in_what_order() -> None:
    lists = [part_list(r, 3, data={"who": r, f"only{r}": r}) for r in range(3)]
    made = {Manifest.merge(random.Random(seed).sample(lists, 3)).to_json() for seed in range(10)}
    assert len(made) == 1
    assert Manifest.from_json(made.pop()).data == {"who": 0, "only0": 0, "only1": 1, "only2": 2}


def test_merge_joins_the_chunks_of_a_tensor() -> None:
    lists = [part_list(r, 2) for r in range(2)]
    lists = [
        part_list(r, 2, tensors=box(one, [5, 3], [3 * (1 - r), 0], [3 - (1 - r), 3]))
        for r, one in enumerate(lists)
    ]
    manifest = Manifest.merge(lists)
    assert [c["offsets"] for c in manifest.tensors["w"]["chunks"]] == [[0, 0], [3, 0]]
    assert [c["part"] for c in manifest.tensors["w"]["chunks"]] == [
        manifest.parts[1].key,
        manifest.parts[0].key,
    ]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([part_list(0, 2)], "one part list of each of 2 ranks"),
        ([part_list(0, 2), part_list(0, 2)], "rank 0 of 2, .* rank 0 of 2"),
        ([part_list(0, 2), part_list(1, 3)], "rank 1 of 3"),
        ([part_list(tensors=box(part_list(), [5], [0], [4]))], "5 elements, its chunks hold 4"),
        ([part_list(tensors=box(part_list(), [900], [0], [900]))], "outside of part"),
        (
            [
                part_list(0, 2, tensors=box(part_list(0, 2), [4], [0], [2])),
                part_list(1, 2, tensors=box(part_list(1, 2), [5], [2], [2])),
            ],
            "different names",
        ),
    ],
)
def test_lists_that_contradict_each_other_are_refused(lists: list[PartList], message: str) -> None:
    with pytest.raises(SnapshotCorrupt, match=message):
        Manifest.merge(lists)


@pytest.mark.parametrize("kind", [Manifest, PartList])
def test_every_change_is_seen(kind: type) -> None:
    one = part_list(data={"loss": 1e-7, "name": "ü"}, tensors=box(part_list(), [4], [0], [4]))
    original = Manifest.merge([one]) if kind is Manifest else one
    text = original.to_json().encode()
    rng = random.Random(0)
    seen = 0
    for _ in range(400):
        damaged = bytearray(text)
        damaged[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        try:
            # 1e-7 or 1E-7: another spelling of the same
            assert kind.from_json(bytes(damaged)) == original
        except SnapshotCorrupt:
            seen += 1
    assert seen > 390
    for end in range(0, len(text), 7):
        with pytest.raises(SnapshotCorrupt):
            kind.from_json(text[:end])


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "3", '"x"', '{"hash":"x"}', b"\xff\xfe", '{"hash":{}}']
)
def test_anything_else_is_corrupt(text: str | bytes) -> None:
    for kind in (Manifest, PartList):
        with pytest.raises(SnapshotCorrupt, match="use an older snapshot"):
            kind.from_json(text)


def test_a_newer_format_is_not_corruption() -> None:
    body = json.loads(Manifest.merge([part_list()]).to_json())
    del body["hash"]
    body |= {"version": 99, "parts": "something else entirely"}
    with pytest.raises(SnapshotTooNew, match="update the package") as e:
        Manifest.from_json(canonical({**body, "hash": digest(canonical(body))}))
    assert not isinstance(e.value, SnapshotCorrupt)
    assert issubclass(SnapshotCorrupt, StoreError)
