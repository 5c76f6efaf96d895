"""`harness data prepare`: any sources, any number of processes and parts: the same corpus to the
byte."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

import harness
from harness.core.world import BadInput
from harness.data.prepare.documents import DocumentRules, _delimited, pieces
from harness.data.prepare.prepare import PreparePart, PreparePlan, duplicates, prepare
from harness.data.prepare.shard_writer import CorpusSettings
from harness.data.prepare.tokenizers import tokenizer_of
from harness.data.prepare.units import Extent, SourceFile
from storage.stores.store_urls import open_store
from support.buckets import moto
from support.corpora import command, content, documents_of, files, prepared, settings, texts
from support.worlds import environment


def texts_of(url, split="train"):
    """The documents of a corpus of bytes, read by windows of one token."""
    windows = harness.data.Tokens(str(url), 1, split=split)
    items = windows.__getitems__(range(len(windows)))
    return documents_of([int(items[0][0][0]), *(int(y[0]) for _, y in items)], 256)


# ---- the same by anybody -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Small files, a large one, and lines of JSON; some documents come again."""
    root = tmp_path_factory.mktemp("sources")
    files(root / "a", 60)
    (root / "b.txt").write_text("\n".join(texts(300, seed=1)))
    rows = (json.dumps({"text": text, "n": i}) for i, text in enumerate(texts(200, seed=2)))
    (root / "c.jsonl").write_text("\n".join(rows) + "\n" + json.dumps({"text": texts(60)[7]}))
    return [root / "a", root / "b.txt", root / "c.jsonl"]


@pytest.mark.parametrize("more", [{}, {"dedup": True, "held_out": 0.1, "seed": 3}])
def test_any_number_of_processes_and_parts_makes_the_same(sources, tmp_path, more):
    one = prepared(tmp_path / "one", *sources, **more)
    assert prepared(tmp_path / "two", *sources, jobs=2, **more) == one
    plan = PreparePlan.of(list(map(str, sources)), settings(**more))
    for part in (PreparePart(3, 3), PreparePart(1, 3), PreparePart(2, 3), PreparePart(3, 3)):  # with --dedup all come twice
        card = prepare(str(tmp_path / "three"), plan, part=part)
    for number in (1, 2, 3) if card is None else ():
        card = prepare(str(tmp_path / "three"), plan, part=PreparePart(number, 3)) or card
    assert card == one
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "three")
    assert open_store(str(tmp_path / "one")).list("work/") == []
    assert prepared(tmp_path / "one", *sources, **more) == one  # again: it is there
    if more:
        # two `texts` have one twice, and one is in two sources; the pieces of b.txt are themselves
        assert one.dropped == 3
        found = texts_of(tmp_path / "one") + texts_of(tmp_path / "one", "validation")
        assert len(found) == len(set(found)) == one.split("train").documents + one.split(
            "validation"
        ).documents
    else:
        assert one.dropped == -1


def test_other_settings_or_sources_are_not_mixed(sources, tmp_path):
    plan = PreparePlan.of([str(sources[0])], settings())
    assert prepare(str(tmp_path / "made"), plan, part=PreparePart(1, 2)) is None
    other = PreparePlan.of([str(sources[0])], settings(seed=1))
    with pytest.raises(BadInput, match="the work of one from other sources or settings"):
        prepare(str(tmp_path / "made"), other)


def test_duplicates_are_found_in_any_number_of_rounds():
    rng = random.Random(3)
    some = [rng.randbytes(16) for _ in range(50)]
    units = [[rng.choice(some) for _ in range(rng.randrange(40))] for _ in range(9)]
    seen, wanted = set(), {}
    for unit, hashes in enumerate(units):
        for i, one in enumerate(hashes):
            if one in seen:
                wanted.setdefault(unit, set()).add(i)
            seen.add(one)
    data = [b"".join(hashes) for hashes in units]
    for most in (1 << 30, 1000, 64):
        found = duplicates(lambda: iter(data), sum(map(len, data)), most)
        assert {unit: set(numbers.tolist()) for unit, numbers in found.items()} == wanted
        assert all(len(numbers) == len(set(numbers.tolist())) for numbers in found.values())


def test_a_bucket_is_a_place_like_any_other(sources, tmp_path, monkeypatch):
    """Sources and corpus lie in a bucket that refuses everybody for a while in between."""
    refuses = threading.Event()
    with moto(refuses) as url:
        account = {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
        account |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in account.items():
            monkeypatch.setenv(name, value)
        bucket = open_store("s3://my-bucket/text")
        for path in (sources[0] / "0001.txt", sources[1]):
            bucket.put(f"deep/{path.name}", path.read_bytes())
        both = "s3://my-bucket/text", "s3://my-bucket/made"
        made = command("prepare", *both, "--unit-mib", 1, "--chunk-kib", 4)
        assert made.returncode == 0, made.stderr
        windows = harness.data.Tokens("s3://my-bucket/made", 64)
        first = [x.tolist() for x, _ in windows.__getitems__(range(10))]
        assert bytes(first[0][:20]).decode() == (sources[0] / "0001.txt").read_text()[:20]
        refuses.set()
        threading.Timer(1.5, refuses.clear).start()
        whole = [x.tolist() for x, _ in windows.__getitems__(range(len(windows)))]
        assert whole[:10] == first and any(256 in window for window in whole)
    local = tmp_path / "deep"
    local.mkdir()
    for path in (sources[0] / "0001.txt", sources[1]):
        (local / path.name).write_bytes(path.read_bytes())
    more = {"unit_nbytes": 1 << 20, "chunk_nbytes": 4096, "shard_nbytes": 64 << 20}
    assert prepared(tmp_path / "local", local, **more).content == windows.card.content


# ---- sources -------------------------------------------------------------------------------------
@pytest.mark.parametrize("between", [b"\n", b"\n\n", b"<|end|>"])
def test_pieces_of_a_file_have_all_documents_once(tmp_path, between):
    rng = random.Random(2)
    path = tmp_path / "a.txt"
    wanted = [bytes(rng.choices(b"ab<|", k=rng.randrange(30))) for _ in range(200)]
    path.write_bytes(between.join(wanted))
    file = SourceFile(str(path), path.stat().st_size)
    whole = list(_delimited(Extent(file, 0, file.nbytes), between))
    if DocumentRules("tokens", separator=between.decode()).may_cut:
        assert whole == wanted
        for size in (1, 3, 17, 100, 5000):
            cuts = [*range(0, file.nbytes, size), file.nbytes]
            extents = (Extent(file, a, b, False) for a, b in itertools.pairwise(cuts))
            assert [one for extent in extents for one in _delimited(extent, between)] == whole
    else:
        assert between == b"\n\n"  # whose end is like its beginning: such files are not cut


def test_long_texts_are_cut_where_words_end():
    text = "".join(random.Random(1).choices("ab \n", k=5000)) + "c" * 300 + " d"
    for most in (1, 10, 100, 10_000):
        found = list(pieces(text, most))
        assert "".join(found) == text and max(map(len, found)) <= most
    assert list(pieces("one two\nthree", 10)) == ["one two\n", "three"]
    assert list(pieces("one two three", 8)) == ["one two", " three"]


def test_separators_and_fields(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\nlines\n\n\n\nthree")
    prepared(tmp_path / "1", tmp_path / "a.txt", separator="\n\n")
    assert texts_of(tmp_path / "1") == ["one", "two\nlines", "three"]
    prepared(tmp_path / "2", tmp_path / "a.txt")
    assert texts_of(tmp_path / "2") == ["one\n\ntwo\nlines\n\n\n\nthree"]
    (tmp_path / "b.jsonl").write_text('{"body": "x\\u00e9"}\n\n{"body": "y", "text": 3}\n')
    prepared(tmp_path / "3", tmp_path / "b.jsonl", field="body")
    assert texts_of(tmp_path / "3") == ["xé", "y"]
    for field, words in (("", "found body"), ("text", "found body")):
        with pytest.raises(BadInput, match=words):
            prepared(tmp_path / "4", tmp_path / "b.jsonl", field=field)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files(tmp_path, ending):
    module = {".gz": gzip, ".bz2": bz2, ".xz": lzma}.get(ending) or pytest.importorskip("zstandard")
    lines = "\n".join(json.dumps({"text": text}) for text in texts(100)).encode()
    (tmp_path / f"a.jsonl{ending}").write_bytes(module.compress(lines))
    prepared(tmp_path / "made", tmp_path / f"a.jsonl{ending}")
    assert texts_of(tmp_path / "made") == texts(100)
    (tmp_path / f"b.txt{ending}").write_bytes(module.compress(b"some"))
    prepared(tmp_path / "records", tmp_path / f"b.txt{ending}", kind="records")
    (record,) = (harness.data.Records(str(tmp_path / "records"))[i] for i in range(1))
    assert record == {"__key__": f"b.txt{ending}".encode(), "txt": b"some"}


def test_tar_files_of_webdataset(tmp_path):
    path, rng = tmp_path / "a.tar", random.Random(5)
    wanted = []
    with tarfile.open(path, "w") as tar:
        for i in range(20):
            record = {"__key__": f"d/{i:03d}".encode(), "txt": f"text {i}".encode(), "seg.png": rng.randbytes(2000)}
            wanted.append(record)
            for ending in ("txt", "seg.png"):
                info = tarfile.TarInfo(f"d/{i:03d}.{ending}")
                info.size = len(record[ending])
                tar.addfile(info, io.BytesIO(record[ending]))
    prepared(tmp_path / "records", path, kind="records")
    records = harness.data.Records(str(tmp_path / "records"))
    assert [records[i] for i in range(len(records))] == wanted
    prepared(tmp_path / "tokens", path)
    assert texts_of(tmp_path / "tokens") == [f"text {i}" for i in range(20)]


def numbers(part, parts, n=40, kind="text"):
    """A source: python:test_data_prepare:numbers?n=9"""
    for i in range(part, int(n), parts):
        if kind == "ids":
            yield np.arange(i % 200 + 1)
        else:
            yield {"a": str(i).encode(), "b": b"x" * i} if kind == "records" else f"number {i}"


def test_functions_are_sources(tmp_path):
    here = "python:test_data_prepare:numbers"
    one = prepared(tmp_path / "1", f"{here}?n=50", parts=4)
    assert sorted(texts_of(tmp_path / "1")) == sorted(f"number {i}" for i in range(50))
    assert prepared(tmp_path / "2", f"{here}?n=50", parts=4, jobs=2) == one
    prepared(tmp_path / "3", f"{here}?kind=ids", parts=3)
    assert len(texts_of(tmp_path / "3")) == 40
    prepared(tmp_path / "4", f"{here}?kind=records", parts=3, kind="records")
    assert len(harness.data.Records(str(tmp_path / "4"))) == 40
    with pytest.raises(BadInput, match="cannot be imported"):
        prepared(tmp_path / "5", "python:test_data_prepare:nothing")
    with pytest.raises(BadInput, match="wanted records"):
        prepared(tmp_path / "6", here, kind="records")


def test_parquet_and_arrow(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": texts(300), "image": [{"bytes": b"x" * i} for i in range(301)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    for made, file in ((arrow.ipc.new_stream, "s.arrow"), (arrow.ipc.new_file, "f.arrow")):
        with made(tmp_path / file, table.schema) as out:
            out.write_table(table, max_chunksize=50)
    for file in ("a.parquet", "s.arrow", "f.arrow"):
        prepared(tmp_path / "tokens" / file, tmp_path / file)
        assert texts_of(tmp_path / "tokens" / file) == texts(300)
        prepared(tmp_path / "records" / file, tmp_path / file, kind="records")
        records = harness.data.Records(str(tmp_path / "records" / file))
        assert len(records) == 301 and records[9]["image.bytes"] == b"x" * 9
        assert json.loads(records[9]["text"]) == texts(300)[9]
    plan = PreparePlan.of([str(tmp_path / "a.parquet")], settings())
    assert len(plan.units) > 2  # by row groups
    for name, data in (("b.parquet", b"PAR1 no"), ("c.arrow", b"no" * 99), ("d.parquet.gz", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInput, match=f"{name}: wanted a"):
            prepared(tmp_path / f"made-{name}", tmp_path / name)
    nothing = arrow.table({"text": ["a", None]})
    parquet.write_table(nothing, tmp_path / "null.parquet")
    with pytest.raises(BadInput, match="found one that is null"):
        prepared(tmp_path / "null", tmp_path / "null.parquet")
    with pytest.raises(BadInput, match="found image, text"):
        prepared(tmp_path / "none", tmp_path / "a.parquet", field="body")


def test_datasets_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": texts(50)}).save_to_disk(str(tmp_path / "saved"))
    prepared(tmp_path / "made", tmp_path / "saved")
    assert texts_of(tmp_path / "made") == texts(50)


def test_what_cannot_be_prepared_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 3)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.jsonl").write_text("not json\n")
    whole = gzip.compress(b"one two three" * 999)
    damaged = {"a.txt.gz": whole[:-30], "b.txt.gz": b"no", "c.txt.xz": b"no", "d.tar": b"no" * 900, "e.tar.gz": whole}
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInput, match=f"{name}: wanted a whole file of its kind"):
            prepared(tmp_path / f"made-{name}", tmp_path / name)
    for name, words in (("latin", "no|wanted UTF-8"), ("empty", "found none in 1"), ("nothing", "found nothing")):
        with pytest.raises(BadInput, match=words):
            prepared(tmp_path / name, tmp_path / f"{name}.txt")
    with pytest.raises(BadInput, match="JSON object in each line"):
        prepared(tmp_path / "j", tmp_path / "no.jsonl")
    prepared(tmp_path / "replaced", tmp_path / "latin.txt", errors="replace")
    assert texts_of(tmp_path / "replaced") == ["\ufffd" * 3]
    with pytest.raises(BadInput, match="wanted ids of tokens from 0 on"):
        prepared(tmp_path / "f", "python:test_data_prepare:negative")
    with pytest.raises(BadInput, match="256, which stands behind each"):
        prepared(tmp_path / "g", "python:test_data_prepare:negative?low=256")


def negative(part, parts, low=-1):
    yield np.array([int(low)])


# ---- tokenizers ----------------------------------------------------------------------------------
@pytest.fixture
def bpe(tmp_path):
    """A tokenizer.json that is trained here."""
    package = pytest.importorskip("tokenizers")
    made = package.ByteLevelBPETokenizer()
    made.train_from_iterator(texts(200), vocab_size=400, special_tokens=["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file(bpe, tmp_path):
    tokenizer = tokenizer_of(str(bpe))
    assert tokenizer.eos == 0 and tokenizer.dtype == "uint16"
    # what a text says is text, never the end of a document
    (tmp_path / "a.txt").write_text("the end <|endoftext|> of it")
    card = prepared(tmp_path / "made", tmp_path / "a.txt", tokenizer=str(bpe))
    x, y = harness.data.Tokens(str(tmp_path / "made"), card.split("train").items - 1)[0]
    assert tokenizer.decode(x.tolist()) == "the end <|endoftext|> of it" and y[-1] == 0
    assert 0 not in x
    shown = command("show", tmp_path / "made", "--item", 0, "--length", 8)
    assert "the end" in shown.stdout
    for eos, words in (("nothing", "--eos nothing"), ("99999", "--eos 99999")):
        with pytest.raises(BadInput, match=words):
            tokenizer_of(str(bpe), eos)
    assert tokenizer_of(f"tokenizers:{bpe}", "5").eos == 5


def test_the_tokenizer_of_a_model(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path / "model")
    made, plain = tokenizer_of(f"transformers:{tmp_path / 'model'}"), tokenizer_of(str(bpe))
    some = texts(5)
    for a, b in zip(made.encode(some), plain.encode(some), strict=True):
        assert a.tolist() == b.tolist()
    assert made.eos == plain.eos


def test_sentencepiece(tmp_path):
    package = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(texts(300)))
    package.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=60, minloglevel=2
    )
    tokenizer = tokenizer_of(str(tmp_path / "m.model"))
    assert tokenizer.decode(tokenizer.encode(["the end of it"])[0].tolist()) == "the end of it"
    files(tmp_path / "files")
    card = prepared(tmp_path / "made", tmp_path / "files", tokenizer=str(tmp_path / "m.model"))
    assert card.eos == tokenizer.eos == 2 and card.split("train").documents == 41


def test_tiktoken(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    folder = tmp_path / "tiktoken_ext"
    folder.mkdir()
    (folder / "tiny.py").write_text(
        "def tiny():\n"
        "    ranks = {bytes([i]): i for i in range(256)} | {b'th': 256, b'the': 257}\n"
        "    return {'name': 'tiny', 'pat_str': r'\\S+|\\s+', 'mergeable_ranks': ranks,\n"
        "            'special_tokens': {'<|endoftext|>': 258}}\n"
        "ENCODING_CONSTRUCTORS = {'tiny': tiny}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = tokenizer_of("tiktoken:tiny")
    found = tokenizer.encode(["the <|endoftext|>"])[0].tolist()
    assert found[0] == 257 and 258 not in found and tokenizer.eos == 258
    assert tokenizer.decode(found) == "the <|endoftext|>"
    with pytest.raises(BadInput, match="no such encoding"):
        tokenizer_of("tiktoken:nothing")


def test_tokenizers_that_are_not_there_are_named():
    for spec, words in (
        ("nothing", "wanted bytes, a tokenizer.json"),
        ("tokenizers:", "wanted bytes"),
        ("bytes:x", "wanted bytes"),
    ):
        with pytest.raises(BadInput, match=words):
            tokenizer_of(spec)
    with pytest.raises(BadInput, match="documents of bytes end with 256"):
        tokenizer_of("bytes", "7")
    code = (
        "import sys\n"
        "for name in ('tokenizers', 'tiktoken', 'sentencepiece', 'transformers'): sys.modules[name] = None\n"
        "from harness.data.prepare.tokenizers import tokenizer_of\n"
        "for spec in ('a.json', 'tiktoken:x', 'a.model', 'transformers:x'):\n"
        "    try: tokenizer_of(spec)\n"
        "    except Exception as e: print(type(e).__name__, str(e).rpartition('`')[0].rpartition('`')[2])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment()
    ).stdout.splitlines()
    packages = ("tokenizers", "tiktoken", "sentencepiece", "transformers")
    assert said == [f"BadInput pip install {name}" for name in packages]


# ---- the command ---------------------------------------------------------------------------------
def test_the_command(sources, tmp_path):
    made = command("prepare", sources[0], tmp_path / "made", "--jobs", 1, "--licence", "CC0", "--dedup")
    assert made.returncode == 0 and "CC0" in made.stdout and "1 documents" in made.stdout
    assert command("show", tmp_path / "made").stdout == made.stdout
    shown = command("show", tmp_path / "made", "--item", 0, "--item", 1, "--length", 40)
    assert "--- item 1" in shown.stdout and texts(60)[0][:20] in shown.stdout
    assert "each is what was prepared" in command("verify", tmp_path / "made").stdout
    shard = next((tmp_path / "made" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    wrong = command("verify", tmp_path / "made")
    assert wrong.returncode == 1 and shard.name in wrong.stdout
    for words, said in (
        (("prepare", tmp_path / "x"), "wanted sources and a URL"),
        (("prepare", sources[0], tmp_path / "x", "--part", "3/2"), "wanted I/N"),
        (("show", tmp_path / "nothing"), "found no card.json"),
        (("show", tmp_path / "made", "--item", 10**9), "wanted 0 to"),
        (("show", tmp_path / "made", "--step", 1), "wanted both"),
    ):
        found = command(*words)
        assert found.returncode == 2 and said in " ".join(found.stderr.split()), found.stderr


def test_settings_have_defaults_that_fit():
    usual = CorpusSettings(DocumentRules("tokens"))
    assert usual.shard_nbytes % usual.chunk_nbytes == 0 and usual.tokenizer == "bytes"
