"""What is read of others' formats where they lie, beside what their own readers give."""

import io
import json
import os
import random

import numpy as np
import pytest
import torch

import harness
from harness.core.world import BadInput
from harness.data.card import CorpusCorrupt, card_of
from harness.data.datasets import named_by
from harness.data.formats.format import IndexSettings
from harness.data.prepare.indexing import IndexPlan, make_index
from harness.data.verify import damaged
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import corrupt
from support.foreign_datasets import (
    documents,
    rows,
    write_litdata,
    write_litdata_tokens,
    write_mds,
    write_parquet,
    write_tar,
)


def indexed(source, dest, **how):
    plan = IndexPlan.of(str(source), IndexSettings(**({"chunk_nbytes": 4096} | how)))
    make_index(str(dest), plan, jobs=3)
    return str(dest)


def same(found, wanted):
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.numpy()
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if hasattr(wanted, "tobytes") and hasattr(wanted, "mode"):  # an image
        return found.mode == wanted.mode and found.tobytes() == wanted.tobytes()
    if isinstance(wanted, list) and wanted and hasattr(wanted[0], "mode"):
        return all(map(same, found, wanted)) and len(found) == len(wanted)
    return type(found) is type(wanted) and found == wanted


def agrees(found, wanted):
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


# ---- MDS -----------------------------------------------------------------------------------------
def test_mds_beside_its_own_reader(tmp_path):
    streaming = pytest.importorskip("streaming")
    write_mds(tmp_path / "mds", 300, seed=3, size_limit=20_000, hashes=["sha1"])
    theirs = streaming.LocalDataset(str(tmp_path / "mds"))
    ours = harness.data.Records(indexed(tmp_path / "mds", tmp_path / "made"), harness.data.from_mds)
    assert len(ours) == len(theirs) == 300
    for i in random.Random(1).sample(range(300), 300):
        found = ours[i]
        assert isinstance(found.pop("object"), bytes)  # it is never unpickled
        agrees(found, {k: v for k, v in theirs[i].items() if k != "object"})


def test_every_encoding_of_mds_beside_its_own_decoder(tmp_path):
    streaming = pytest.importorskip("streaming")
    from decimal import Decimal

    from PIL import Image
    from streaming.base.format.mds.encodings import get_mds_encodings

    noise = np.random.default_rng(1).integers(0, 255, (5, 7, 3), np.uint8)
    image = Image.fromarray(noise)
    out = io.BytesIO()
    image.save(out, "JPEG")
    jpeg = Image.open(io.BytesIO(out.getvalue()))
    values = {
        **{"bytes": b"\x00x", "str": "ü", "int": -7, "str_int": 10**30, "str_float": 0.1},
        **{"str_decimal": Decimal("1.10"), "json": {"a": [1, None]}, "pil": image, "jpeg": jpeg},
        **{"png": image, "list[pil]": [image, image], "list[jpeg]": [jpeg], "list[png]": [image]},
        **{"jpeg_array": [out.getvalue()] * 2, "jpegarray": [out.getvalue()], "pkl": {1}},
        **{kind: np.dtype(kind).type(3) for kind in ("uint8", "int8", "float16", "float64")},
        **{kind: np.dtype(kind).type(3) for kind in ("uint16", "int16", "uint32", "int32")},
        **{kind: np.dtype(kind).type(3) for kind in ("uint64", "int64", "float32")},
        **{"ndarray": noise, "ndarray:uint8": noise, "ndarray:uint8:5,7,3": noise},
    }
    assert get_mds_encodings() <= set(values)
    columns = {f"c{i}": name for i, name in enumerate(values)}
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns=columns) as writer:
        writer.write({c: values[name] for c, name in columns.items()})
    (theirs,) = streaming.LocalDataset(str(tmp_path / "mds"))
    made = indexed(tmp_path / "mds", tmp_path / "made")
    ours = harness.data.Records(made, harness.data.from_mds)[0]
    pickled = next(c for c, name in columns.items() if name == "pkl")
    assert isinstance(ours.pop(pickled), bytes) and theirs.pop(pickled) == {1}
    agrees(ours, theirs)


def test_compressed_mds_is_refused(tmp_path):
    pytest.importorskip("streaming")
    write_mds(tmp_path / "mds", compression="zstd")
    with pytest.raises(BadInput, match=r"compressed shards .zstd"):
        indexed(tmp_path / "mds", tmp_path / "made")


# ---- LitData -------------------------------------------------------------------------------------
def test_litdata_beside_its_own_reader(tmp_path):
    litdata = pytest.importorskip("litdata")
    write_litdata(tmp_path / "lit")
    theirs = litdata.StreamingDataset(str(tmp_path / "lit"))
    made = indexed(tmp_path / "lit", tmp_path / "made")
    ours = harness.data.Records(made, harness.data.from_litdata)
    assert len(ours) == len(theirs)
    for i in random.Random(1).sample(range(len(ours)), len(ours)):
        wanted = theirs[i] | {"blob": bytes(theirs[i]["blob"])}
        nested = wanted.pop("nested")
        pair = {f"nested.pair.{k}": value for k, value in enumerate(nested["pair"])}
        agrees(ours[i], wanted | {"nested.grid": nested["grid"]} | pair)


def test_what_optimize_writes_by_processes_is_read(tmp_path):
    """Chunks of several writers, of tuples."""
    litdata = pytest.importorskip("litdata")
    litdata.optimize(
        fn=a_pair, inputs=list(range(40)), output_dir=str(tmp_path / "lit"), num_workers=2,
        chunk_bytes="2KB",
    )
    theirs = litdata.StreamingDataset(str(tmp_path / "lit"))
    ours = harness.data.Records(indexed(tmp_path / "lit", tmp_path / "made"), harness.data.from_litdata)
    assert len(ours) == len(theirs) == 40
    for i in range(40):
        agrees(ours[i], dict(zip("01", theirs[i], strict=True)))


def a_pair(i):
    return i, np.arange(i + 1)


@pytest.mark.parametrize("more", [{"compression": "zstd"}, {"compression": "zstd", "compression_level": "batch"}])
def test_compressed_litdata_is_refused(tmp_path, more):
    pytest.importorskip("litdata")
    write_litdata(tmp_path / "lit", **more)
    with pytest.raises(BadInput, match="compression"):
        indexed(tmp_path / "lit", tmp_path / "made")


def test_litdata_rows_that_lie_in_arrow_are_refused(tmp_path):
    """It writes rows of texts so."""
    pytest.importorskip("litdata")
    items = [{"text": f"{i}", "title": "x"} for i in range(9)]
    write_litdata(tmp_path / "lit", items)
    with pytest.raises(BadInput, match="rows in Arrow"):
        indexed(tmp_path / "lit", tmp_path / "made")


def test_litdata_tokens_beside_their_own_loader(tmp_path):
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.item_loader import TokensLoader

    write_litdata_tokens(tmp_path / "lit")
    theirs = litdata.StreamingDataset(str(tmp_path / "lit"), item_loader=TokensLoader(block_size=8))
    made = indexed(tmp_path / "lit", tmp_path / "made", eos=0)
    flat = [t for one in documents() for t in (*one.tolist(), 0)]
    ours = harness.data.Tokens(made, 8)
    assert [t for x, _ in (ours[i] for i in range(len(ours))) for t in x.tolist()] == flat[: 8 * len(ours)]
    at = 0  # theirs begin anew with each chunk, and leave out the rest of it
    for i in range(len(theirs)):
        block = theirs[i].tolist()
        at = next(k for k in range(at, len(flat)) if flat[k : k + 8] == block) + 8


# ---- WebDataset ----------------------------------------------------------------------------------
def test_tar_beside_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    write_tar(tmp_path / "tar", 60, 17, seed=4)
    urls = sorted(map(str, (tmp_path / "tar").iterdir()))
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False))
    ours = harness.data.Records(indexed(tmp_path / "tar", tmp_path / "made"))
    assert len(ours) == len(theirs) == 60
    for i, wanted in enumerate(theirs):
        found = {"__key__": wanted["__key__"].encode()}
        found |= {name: data for name, data in wanted.items() if not name.startswith("__")}
        assert ours[i] == found


# ---- Parquet -------------------------------------------------------------------------------------
@pytest.fixture
def table(tmp_path):
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "source", 60, per_file=25, group=7, seed=2)
    return indexed(tmp_path / "source", tmp_path / "made")


def test_parquet_gives_the_rows_that_were_written(table):
    ours = harness.data.Records(table)
    order = random.Random(1).sample(range(60), 60)
    found = dict(zip(order, ours.__getitems__(order), strict=True))
    for i, row in enumerate(rows(60, seed=2)):
        wanted = {"id": json.dumps(row["id"]).encode(), "text": row["text"], "blob": row["blob"]}
        wanted["text"] = json.dumps(row["text"], ensure_ascii=False).encode()
        wanted |= {"image.bytes": row["blob"], "image.path": b"null"}
        assert found[i] == wanted
    with pytest.raises(IndexError):
        ours[60]


def test_rows_of_one_group_have_contents_of_their_own(table):
    ours = harness.data.Records(table, cache_nbytes=1)
    said = ours.content_ids(range(60), as_read=False)
    assert len(set(said.tolist())) == 60
    ours.__getitems__(range(60))
    before = ours._reader.chunks.read_nbytes
    footers = 9 * 3000  # one for each group, as next to nothing is kept
    assert before < ours._reader.split.nbytes + footers
    assert (ours.content_ids(range(60)) == said).all()
    assert ours._reader.chunks.read_nbytes == before  # what was hashed need not be read again
    assert (named_by(ours.fingerprint, table).content_ids([7, -1], False) == said[[7, -1]]).all()


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "delete"])
def test_a_parquet_file_that_changed_is_named(table, tmp_path, damage):
    corrupt(open_store(str(tmp_path / "source")), "1.parquet", damage, random.Random(7))
    found = {one.key for one in damaged(open_store(table), card_of(open_store(table)))}
    assert found == {f"file://{tmp_path}/source/1.parquet"}
    if damage != "extend":
        with pytest.raises(CorpusCorrupt, match=r"1\.parquet: wanted"):
            harness.data.Records(table).__getitems__(range(60))


def test_what_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.parquet").write_bytes(os.urandom(400))
    with pytest.raises(BadInput, match="wanted a Parquet file"):
        indexed(tmp_path / "source", tmp_path / "made")


def test_datasets_write_what_is_read(tmp_path):
    """Hugging Face's, with their structures; several row groups."""
    datasets = pytest.importorskip("datasets")
    made = [{"text": f"t{i}", "meta": {"n": i, "tags": ["a", "b"][: i % 3]}} for i in range(50)]
    (tmp_path / "source").mkdir()
    datasets.Dataset.from_list(made).to_parquet(tmp_path / "source" / "x.parquet", batch_size=9)
    ours = harness.data.Records(indexed(tmp_path / "source", tmp_path / "made"))
    assert [json.loads(ours[i]["meta.tags"]) for i in range(50)] == [m["meta"]["tags"] for m in made]
    assert [json.loads(ours[i]["text"]) for i in range(50)] == [m["text"] for m in made]
