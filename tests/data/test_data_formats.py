"""Files of others are read where they lie: every item is what was written, each change is caught.

tests/fixtures/formats was written by the formats' own packages (foreign_datasets.py);
tests/adapters/test_formats.py compares with their readers.
"""

import io
import json
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

import harness
from harness.core.world import BadInput
from harness.data.card import CARD, CorpusCorrupt, card_of, index_of
from harness.data.datasets import named_by
from harness.data.formats.format import IndexSettings
from harness.data.prepare.indexing import IndexPlan, make_index
from harness.data.verify import TokenRow, damaged
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import corrupt
from support.buckets import moto
from support.corpora import command, content
from support.foreign_datasets import (
    FIXTURES,
    N,
    documents,
    litdata_rows,
    mds_rows,
    rows,
    write_llmc,
    write_megatron,
    write_nanogpt,
)

SMALL = {"chunk_nbytes": 512}


def indexed(source, dest, jobs=2, **how):
    plan = IndexPlan.of(str(source), IndexSettings(**(SMALL | how)))
    return make_index(str(dest), plan, jobs=jobs)


def tokens_of(url, **more):
    windows = harness.data.Tokens(str(url), 1, **more)
    items = windows.__getitems__(range(len(windows)))
    return [int(items[0][0][0]), *(int(y[0]) for _, y in items)]


def all_records(url):
    return in_any_order(harness.data.Records(str(url)))


def in_any_order(dataset):
    order = list(range(len(dataset)))
    random.Random(5).shuffle(order)
    found = dict(zip(order, dataset.__getitems__(order), strict=True))
    return [found[i] for i in range(len(dataset))]


def same(found, wanted):
    """Values of a record, arrays among them."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert (found[name] == value).all(), name
        else:
            assert found[name] == value and type(found[name]) is type(value), name
    return True


# ---- records -------------------------------------------------------------------------------------
def test_mds_gives_what_was_written(tmp_path):
    card = indexed(FIXTURES / "mds", tmp_path / "made")
    assert (card.kind, card.layout, card.split("train").items) == ("records", "mds", N)
    wanted = mds_rows()
    found = in_any_order(harness.data.Records(str(tmp_path / "made"), harness.data.from_mds))
    for row in wanted:  # pickles stay what they are
        row["object"] = pickle.dumps(row["object"])
        row["scale"], row["small"] = np.float64(row["scale"]), np.uint8(row["small"])
    assert all(same(one, row) for one, row in zip(found, wanted, strict=True))
    raw = harness.data.Records(str(tmp_path / "made"))[3]
    assert raw["text"] == wanted[3]["text"].encode() and raw.encodings["pair"] == "ndarray:int16:2"


def test_litdata_gives_what_was_written(tmp_path):
    card = indexed(FIXTURES / "litdata", tmp_path / "made")
    assert (card.kind, card.layout, card.split("train").items) == ("records", "litdata", N)
    found = in_any_order(harness.data.Records(str(tmp_path / "made"), harness.data.from_litdata))
    for one, row in zip(found, litdata_rows(), strict=True):
        nested = row.pop("nested")
        row |= {"tensor": row["tensor"].numpy(), "nested.grid": nested["grid"].numpy()}
        row |= {"nested.pair.0": nested["pair"][0], "nested.pair.1": nested["pair"][1]}
        assert same(one, row)


def test_tar_gives_what_was_written(tmp_path):
    card = indexed(FIXTURES / "tar", tmp_path / "made")
    assert (card.layout, card.split("train").items) == ("tar", N)
    found = all_records(tmp_path / "made")
    for i, (one, row) in enumerate(zip(found, rows(), strict=True)):
        folder = "long/" * 40 if i % 6 == 5 else "dir/"
        assert one.pop("__key__").decode() == f"{folder}{i:04d}"
        wanted = {"cls": row["id"], "seg.txt": row["text"], "bin": row["blob"]}
        assert one == {k: v if isinstance(v, bytes) else str(v).encode() for k, v in wanted.items()}


def test_any_tar_is_cut_where_its_samples_are(tmp_path):
    """Folders, links and files without an ending among the samples; in every flavour of tar."""
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        source = tmp_path / f"{format}"
        source.mkdir()
        wanted = {}
        with tarfile.open(source / "a.tar", "w", format=format) as tar:
            for i in range(9):
                folder = tarfile.TarInfo(f"d{i}")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
                for ending, size in ((".a", 0), (".b.c", 512), ("", 700 + i)):
                    name = f"d{i}/" + ("n" * (90 * (i % 2))) + f"{i}{ending}"
                    entry, path = tarfile.TarInfo(name), tmp_path / "entry"
                    path.write_bytes(bytes([i]) * size)
                    entry.size = size
                    with path.open("rb") as data:
                        tar.addfile(entry, data)
                    key = wanted.setdefault(name.removesuffix(ending) if ending else name, {})
                    key[ending.lstrip(".") or "data"] = bytes([i]) * size
                link = tarfile.TarInfo(f"d{i}/link")
                link.type, link.linkname = tarfile.SYMTYPE, "a"
                tar.addfile(link)
        indexed(source, tmp_path / f"made{format}")
        found = in_any_order(harness.data.Records(str(tmp_path / f"made{format}")))
        assert {one.pop("__key__").decode(): one for one in found} == wanted and len(found) == 9


# ---- tokens --------------------------------------------------------------------------------------
def flat(ends=True, seeds=(0,)):
    """All documents, their end behind or before each."""
    found = [one.tolist() for seed in seeds for one in documents(seed=seed)]
    return [t for one in found for t in ([*one, 0] if ends else [0, *one])]


@pytest.mark.parametrize("form", ["nanogpt", "llmc", "llmc wide", "megatron", "megatron 16", "litdata"])
def test_tokens_are_those_that_were_written(tmp_path, form):
    source, wanted, how = tmp_path / "source", flat(), {}
    source.mkdir()
    if form == "nanogpt":
        write_nanogpt(source / "train.bin")
        how = {"dtype": "uint16"}
    elif form.startswith("llmc"):
        for seed in (0, 1):
            write_llmc(source / f"{seed}.bin", seed, wide=form == "llmc wide")
        wanted = flat(False, (0, 1))
    elif form.startswith("megatron"):
        write_megatron(source / "a", 0, *((np.uint16, 8) if form == "megatron 16" else ()))
        write_megatron(source / "b", 1, *((np.uint16, 8) if form == "megatron 16" else ()))
        wanted = flat(True, (0, 1))
    else:
        source = FIXTURES / "litdata-tokens"
    card = indexed(source, tmp_path / "made", eos=0, **how)
    assert tokens_of(tmp_path / "made") == wanted
    assert card.vocabulary == max(wanted) + 1 and card.split("train").items == len(wanted)
    assert card.split("train").documents == wanted.count(0)
    documents, here = [], []
    for token in wanted:
        documents, here = ([*documents, here], []) if token == 0 else (documents, [*here, token])
    found = [ids.tolist() for _, ids in TokenRow(str(tmp_path / "made"), "train").documents()]
    assert found == documents + ([here] if here else [])  # the last one need not end
    windows = harness.data.Tokens(str(tmp_path / "made"), 50, boundaries="cu_seqlens")
    for i in range(len(windows)):
        inputs, targets, edges = windows[i]
        assert inputs.tolist() == wanted[i * 50 : i * 50 + 50]
        ends = [k + 1 for k, t in enumerate(inputs) if t == 0]
        assert sorted({0, 50, *ends}) == edges.tolist()
        assert (targets[[e - 1 for e in ends]] == -100).all()
    indexed(source, tmp_path / "endless", **how)
    with pytest.raises(BadInput, match="--eos"):
        harness.data.Tokens(str(tmp_path / "endless"), 50, boundaries="documents")


def test_one_file_of_a_folder_is_a_dataset(tmp_path):
    for seed, name in enumerate(("train", "val")):
        write_nanogpt(tmp_path / f"{name}.bin", seed)
        indexed(tmp_path / f"{name}.bin", tmp_path / name)
        assert tokens_of(tmp_path / name) == flat(seeds=(seed,))
    indexed(f"{tmp_path}/*l.bin", tmp_path / "glob")
    assert tokens_of(tmp_path / "glob") == tokens_of(tmp_path / "val")


# ---- the index -----------------------------------------------------------------------------------
def test_the_index_is_the_same_however_it_was_made(tmp_path):
    """By any number of threads, wherever the files lie, interrupted or not; nothing is written
    where they lie."""
    shutil.copytree(FIXTURES / "mds", tmp_path / "source")
    before = content(tmp_path / "source")
    cards = [indexed(tmp_path / "source", tmp_path / f"{jobs}", jobs) for jobs in (1, 3)]
    shutil.copytree(tmp_path / "source", tmp_path / "moved")
    cards.append(indexed(tmp_path / "moved", tmp_path / "other"))
    assert len({card.content for card in cards}) == 1
    assert len({harness.data.Records(str(tmp_path / url)).fingerprint for url in ("1", "3", "other")}) == 1
    assert content(tmp_path / "source") == before
    assert sum(len(data) for data in content(tmp_path / "1").values()) < 8000
    # a note that is there is not made again: one of another file's shows
    plan = IndexPlan.of(str(tmp_path / "source"), IndexSettings(**SMALL))
    store, made = open_store(str(tmp_path / "half")), []
    whole = threading.Event()

    def interrupted(what, done, of):
        made[:] = store.list("work/")
        if len(made) >= 2 and not whole.is_set():
            raise KeyboardInterrupt

    def until_interrupted():
        while True:
            make_index(store.url, plan, watch=interrupted)
            shutil.rmtree(tmp_path / "half")  # it was too quick

    with pytest.raises(KeyboardInterrupt):
        until_interrupted()
    whole.set()
    assert store.list("work/") and make_index(store.url, plan) == cards[0]
    assert content(tmp_path / "half") == content(tmp_path / "1")
    assert make_index(store.url, plan) == cards[0]  # it is there
    with pytest.raises(BadInput, match="never changed"):
        indexed(FIXTURES / "tar", tmp_path / "1")


def test_a_dataset_that_was_moved_is_read_with_source(tmp_path):
    shutil.copytree(FIXTURES / "tar", tmp_path / "source")
    indexed(tmp_path / "source", tmp_path / "made")
    wanted = all_records(tmp_path / "made")
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(CorpusCorrupt, match="found none"):
        harness.data.Records(str(tmp_path / "made"))[0]
    moved = harness.data.Records(str(tmp_path / "made"), source=str(tmp_path / "moved"))
    again = pickle.loads(pickle.dumps(moved))
    assert in_any_order(moved) == in_any_order(again) == wanted


@pytest.mark.parametrize("name", ["mds", "litdata", "tar", "litdata-tokens"])
def test_contents_follow_from_the_index_without_the_files(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "source")
    card = indexed(tmp_path / "source", tmp_path / "made")
    made = harness.data.Records if card.kind == "records" else (lambda url: harness.data.Tokens(url, 16))
    dataset = made(str(tmp_path / "made"))
    everything = range(len(dataset))
    read = dataset.content_ids(everything)
    shutil.rmtree(tmp_path / "source")
    proof = named_by(dataset.fingerprint, str(tmp_path / "made"))
    said = proof.content_ids(everything, as_read=False)
    assert (read == said).all() and len(set(said.tolist())) == len(said)


def test_a_large_tar_is_indexed_in_little_memory(tmp_path):
    """One of 192 MiB, in no more than some blocks."""
    path = tmp_path / "source" / "a.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for i in range(48):
            entry = tarfile.TarInfo(f"{i:03d}.bin")
            entry.size = 4 << 20
            tar.addfile(entry, io.BytesIO(bytes([i]) * entry.size))
    code = (
        "import resource, sys; from harness.data.formats.format import IndexSettings;"
        "from harness.data.prepare.indexing import IndexPlan, make_index;"
        "plan = IndexPlan.of(sys.argv[1], IndexSettings());"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "make_index(sys.argv[2], plan);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    words = [sys.executable, "-c", code, str(path.parent), str(tmp_path / "made")]
    found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert int(found.stdout) < 96 << 10  # KiB
    assert len(harness.data.Records(str(tmp_path / "made"))) == 48


def test_files_and_index_may_lie_in_buckets(tmp_path, monkeypatch):
    for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with moto() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        source = open_store("s3://my-bucket/formats/data")
        for path in (FIXTURES / "tar").iterdir():
            source.put(path.name, path.read_bytes())
        card = indexed("s3://my-bucket/formats/data", "s3://my-bucket/formats/made")
        assert card.content == indexed(FIXTURES / "tar", tmp_path / "made").content
        assert all_records("s3://my-bucket/formats/made") == all_records(tmp_path / "made")
        write_llmc(tmp_path / "a.bin", seed=5)
        source.put("d/a.bin", (tmp_path / "a.bin").read_bytes())
        one = indexed("s3://my-bucket/formats/data/d/a.bin", "s3://my-bucket/formats/one")
        assert one.split("train").items == len(flat(False, (5,)))
        corrupt(source, "d/a.bin", "truncate", random.Random(1))
        with pytest.raises(CorpusCorrupt, match=r"s3://my-bucket/formats/data/d/a\.bin: wanted"):
            tokens_of("s3://my-bucket/formats/one")


# ---- what goes wrong -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mds", "litdata", "tar", "litdata-tokens", "megatron", "llmc"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_file_that_changed_is_named(tmp_path, name, damage):
    source = tmp_path / "source"
    if (FIXTURES / name).exists():
        shutil.copytree(FIXTURES / name, source)
    else:
        source.mkdir()
        (write_megatron if name == "megatron" else lambda path: write_llmc(f"{path}.bin"))(source / "a")
    card = indexed(source, tmp_path / "made")
    store, made = open_store(str(source)), open_store(str(tmp_path / "made"))
    assert list(damaged(made, card)) == []
    index = index_of(made, card, card.split("train"))
    victim = sorted({place.key for place in index.places})[0]
    kept = store.get(victim)
    for seed in range(20):  # a flip in a header of tokens is of no one's interest
        corrupt(store, victim, damage, random.Random(seed))
        if found := list(damaged(made, card)):
            break
        store.put(victim, kept)
    assert [one.key for one in found] == [f"{store.url}/{victim}"]
    read = tokens_of if card.kind == "tokens" else all_records
    with pytest.raises(CorpusCorrupt, match=f"source/{victim}: wanted"):
        read(tmp_path / "made")


def test_of_equal_files_the_damaged_one_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c"):
        shutil.copy(FIXTURES / "tar" / "000.tar", source / f"{name}.tar")
    card = indexed(source, tmp_path / "made")
    made = open_store(str(tmp_path / "made"))
    corrupt(open_store(str(source)), "b.tar", "flip", random.Random(1))
    assert [one.key for one in damaged(made, card)] == [f"file://{source}/b.tar"]
    found = all_records(tmp_path / "made")  # the same bytes lie elsewhere
    assert found[:5] == found[5:10] == found[10:]


def test_a_damaged_table_of_items_is_named(tmp_path):
    indexed(FIXTURES / "mds", tmp_path / "made")
    store = open_store(str(tmp_path / "made"))
    (table,) = store.list("shards/")
    corrupt(store, table, "flip", random.Random(1))
    assert [one.key for one in damaged(store, card_of(store))] == [table]
    with pytest.raises(CorpusCorrupt, match=f"made/{table}: wanted"):
        all_records(tmp_path / "made")


def test_what_cannot_be_read_where_it_lies_is_refused(tmp_path):
    def refused(match, **how):
        shutil.rmtree(tmp_path / "never", ignore_errors=True)
        with pytest.raises(BadInput, match=match):
            indexed(source, tmp_path / "never", **how)
        assert not (tmp_path / "never" / CARD).exists()

    def changed(**values):
        """The index of the fixture with other values in its first shard, or in its config."""
        body = json.loads((FIXTURES / source.name / "index.json").read_text())
        rows = body["shards"][0] if "shards" in body else body["config"]
        rows |= values
        (source / "index.json").write_text(json.dumps(body))

    source = tmp_path / "empty"
    source.mkdir()
    refused("found none in 0 files")
    (source / "a.tar.gz").write_bytes(b"")
    refused("a compressed tar; .*harness data prepare")
    for name in ("a.tar", "b.parquet"):
        (source / name).write_bytes(b"no tar\n" * 200)
    refused("found tar, parquet")
    refused("wanted a tar file, found none", layout="tar")
    source = tmp_path / "mds"
    shutil.copytree(FIXTURES / "mds", source)
    refused("--eos and --dtype are of tokens", eos=3)
    changed(compression="zstd", zip_data={"basename": "x"})
    refused("compressed shards .zstd.*harness data prepare")
    changed(format="json")
    refused("shards of the format 'json'")
    changed(column_names=["a"])
    refused("1 names of columns, ")
    changed(column_names=["a"], column_encodings=["str"], column_sizes=[None])
    refused("columns differ")
    changed(samples=99)
    refused("wanted 99 items")
    changed(raw_data={"basename": "shard.99.mds"})
    refused("shard.99.mds: wanted a file")
    changed(raw_data={"basename": "../../etc/passwd"})
    with pytest.raises(Exception, match="is no key of an object"):
        indexed(source, tmp_path / "never")
    source = tmp_path / "litdata"
    shutil.copytree(FIXTURES / "litdata", source)
    for setting in ("compression", "encryption", "ipc_compression"):
        changed(**{setting: "zstd"})
        refused(f"{setting} 'zstd'")
    changed(item_loader="ParquetLoader")
    refused("chunks of its ParquetLoader")
    source = tmp_path / "tokens"
    source.mkdir()
    write_llmc(source / "a.bin")
    with (source / "a.bin").open("ab") as out:
        out.write(b"xx")
    refused("as its header says")
    write_llmc(source / "a.bin")
    write_llmc(source / "b.bin", wide=True)
    refused("found uint16, uint32")
    (source / "b.bin").write_bytes(b"abc")
    refused("wanted tokens of 2 bytes")
    (source / "a.bin").unlink()
    (source / "b.bin").write_bytes(np.array([-1], np.int32).tobytes())
    refused("wanted tokens from 0 on", layout="tokens", dtype="int32")
    with pytest.raises(BadInput, match="outside of"):
        indexed(source, source / "index")


def test_a_tar_that_is_damaged_or_cut_is_no_shorter_dataset(tmp_path):
    whole = (FIXTURES / "tar" / "001.tar").read_bytes()
    with tarfile.open(FIXTURES / "tar" / "001.tar") as tar:
        second = tar.getmembers()[4].offset
    for damaged_tar in (whole[:second] + b"x" + whole[second + 1 :], whole[: second + 100]):
        source = tmp_path / f"{len(damaged_tar)}"
        source.mkdir()
        (source / "a.tar").write_bytes(damaged_tar)
        with pytest.raises(BadInput, match="wanted a tar file, found none"):
            indexed(source, tmp_path / "made" / source.name)


def test_megatron_with_another_idx_is_refused(tmp_path):
    write_megatron(tmp_path / "a", 0)
    write_megatron(tmp_path / "b", 1)
    shutil.copy(tmp_path / "b.idx", tmp_path / "a.idx")
    with pytest.raises(BadInput, match=r"a\.bin: wanted \d+ bytes of tokens"):
        indexed(tmp_path, tmp_path.parent / "never")
    (tmp_path / "a.idx").write_bytes(b"something else")
    with pytest.raises(BadInput, match="MMIDIDX"):
        indexed(tmp_path, tmp_path.parent / "never")


def test_the_command_makes_shows_and_verifies(tmp_path):
    shutil.copytree(FIXTURES / "mds", tmp_path / "source")
    made = command("index", tmp_path / "source", tmp_path / "made", "--licence", "CC0")
    assert made.returncode == 0, made.stderr
    for words in ("records at", "format: mds", "pair ndarray:int16:2", "CC0"):
        assert words in made.stdout
    item = next(i for i, row in enumerate(rows()) if row["text"].isprintable())
    shown = command("show", tmp_path / "made", "--item", item)
    assert f"text: {rows()[item]['text']}\n" in shown.stdout
    assert command("verify", tmp_path / "made").returncode == 0
    (tmp_path / "source").rename(tmp_path / "moved")
    verified = command("verify", tmp_path / "made", "--source", tmp_path / "moved")
    assert "each is what was indexed" in verified.stdout and verified.returncode == 0
    corrupt(open_store(str(tmp_path / "moved")), "shard.00002.mds", "flip", random.Random(2))
    verified = command("verify", tmp_path / "made", "--source", tmp_path / "moved")
    assert verified.returncode == 1
    assert "moved/shard.00002.mds: the bytes" in verified.stdout.replace("\n", "").replace(":  ", ": ")
    assert command("index", tmp_path / "moved", tmp_path / "moved/here").returncode != 0
