"""A corpus is read by random access, checked by hash, in any process; what is damaged is named and
not trained on."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import harness
from harness.core.world import BadInput
from harness.data.card import (
    CARD,
    Card,
    CorpusCorrupt,
    CorpusIndex,
    ShardEntry,
    card_of,
    hash_of,
    index_of,
)
from harness.data.chunk_reader import Chunks
from harness.data.corpus import from_store
from harness.data.datasets import framed, named_by, unframed
from harness.data.prepare.prepare import PreparePlan, prepare
from harness.data.verify import damaged
from storage.errors import NotFound, StoreUnavailable
from storage.stores.retries import Retrying
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import FaultyStore, corrupt
from support.corpora import content, documents_of, files, prepared, settings, texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    prepared(root / "made", files(root / "text"), held_out=0.2)
    return str(root / "made")


def all_tokens(url, split="train"):
    """Of a split, by the shards as they lie, in the order of the index."""
    store = open_store(url)
    card = card_of(store)
    index = index_of(store, card, card.split(split))
    shards = (store.get(f"shards/{index.name(i)}.bin") for i in range(len(index.shards)))
    return np.frombuffer(b"".join(shards), "<u2").astype(np.int64)


def test_every_window_is_what_lies_there(corpus):
    tokens = all_tokens(corpus)
    for length in (1, 7, 64, 1000):
        windows = harness.data.Tokens(corpus, length)
        assert len(windows) == (len(tokens) - 1) // length > 3
        for i in (*range(4), len(windows) - 1, -1):
            x, y = windows[i]
            at = i % len(windows) * length
            assert x.dtype == y.dtype == np.int64
            assert x.tolist() == tokens[at : at + length].tolist()
            assert y.tolist() == tokens[at + 1 : at + length + 1].tolist()
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_every_document_is_in_one_split_once(corpus):
    found = [documents_of(all_tokens(corpus, split), 256) for split in ("train", "validation")]
    assert all(found) and sorted(found[0] + found[1]) == sorted(texts(40))
    card = harness.data.Tokens(corpus, 8).card
    assert [card.split(name).documents for name in ("train", "validation")] == list(map(len, found))
    # the document that comes twice is in the same split both times
    assert sum(texts(40)[-1] in one for one in found) == 1


def test_boundaries_tell_attention_where_documents_end(corpus):
    plain = harness.data.Tokens(corpus, 300)
    by_id = harness.data.Tokens(corpus, 300, boundaries="documents")
    by_edge = harness.data.Tokens(corpus, 300, boundaries="cu_seqlens")
    for i in range(len(plain)):
        x, y = plain[i]
        ids, edges = by_id[i][2], by_edge[i][2]
        ends = np.flatnonzero(x == 256)
        assert edges[0] == 0 and edges[-1] == 300 and (np.diff(edges) > 0).all()
        assert set(edges[1:-1]) | {300} == {e + 1 for e in ends} | {300}
        assert ids.tolist() == np.repeat(np.arange(len(edges) - 1), np.diff(edges)).tolist()
        for targets in (by_id[i][1], by_edge[i][1]):
            assert (targets[ends] == -100).all()
            assert (np.delete(targets, ends) == np.delete(y, ends)).all()
    batch = harness.data.packed([by_edge[0], by_edge[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 600)
    assert batch["cu_seqlens"][-1] == 600 and 300 in batch["cu_seqlens"]
    assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())


def test_a_loader_with_processes_gives_the_same(corpus):
    windows = harness.data.Tokens(corpus, 64)
    windows[0]  # opened here; each process opens for itself
    for workers, context in ((0, None), (2, "fork"), (1, "spawn")):
        loader = DataLoader(windows, 8, num_workers=workers, multiprocessing_context=context)
        x = torch.cat([batch[0] for batch in loader]).flatten()
        assert x.tolist() == all_tokens(corpus)[: len(x)].tolist()
    again = pickle.loads(pickle.dumps(windows))
    assert again.fingerprint == windows.fingerprint and (again[3][0] == windows[3][0]).all()
    assert len(pickle.dumps(windows)) < 20_000


def test_a_batch_is_fetched_at_once_and_no_chunk_twice(corpus):
    asked = []

    def counting(store, size):
        fetch = from_store(store, size)
        return lambda shard, chunk: asked.append((shard, chunk)) or fetch(shard, chunk)

    windows = harness.data.Tokens(corpus, 32, fetch=counting)
    items = windows.__getitems__(range(len(windows)))
    assert len(asked) == len(set(asked)) and len(items) == len(windows)
    assert len(asked) <= len(index_of(open_store(corpus), windows.card, windows.card.split("train")).hashes)
    few = harness.data.Tokens(corpus, 32, fetch=counting, cache_nbytes=2048)  # two chunks
    assert [x.tolist() for x, _ in few.__getitems__(range(len(few)))] == [x.tolist() for x, _ in items]
    assert len(few._reader.chunks._held) == 2


def test_a_fingerprint_is_of_content_not_of_place(corpus, tmp_path):
    prepared(tmp_path / "again", files(tmp_path / "text"), held_out=0.2)
    a, b = (harness.data.Tokens(str(url), 64) for url in (corpus, tmp_path / "again"))
    assert a.fingerprint == b.fingerprint != harness.data.Tokens(corpus, 32).fingerprint
    prepared(tmp_path / "other", files(tmp_path / "texts", seed=1), held_out=0.2)
    other = harness.data.Tokens(str(tmp_path / "other"), 64)
    assert other.fingerprint != a.fingerprint
    assert named_by(a.fingerprint, corpus)[5][0].tolist() == a[5][0].tolist()
    with pytest.raises(BadInput, match="found another"):
        named_by(a.fingerprint, str(tmp_path / "other"))
    for strange in ("sampled:1", "corpus:1:train:tokens:9:plain", f"{a.fingerprint}0", ""):
        with pytest.raises(BadInput, match="wanted what a run read"):
            named_by(strange, corpus)


def test_contents_are_of_what_was_read(own, tmp_path):
    windows = harness.data.Tokens(own, 64)
    everything = range(len(windows))
    said = windows.content_ids(everything, as_read=False)
    assert (windows.content_ids(everything) == said).all() and len(set(said.tolist())) == len(said)
    assert [int(windows.content_ids([i])[0]) for i in everything] == said.tolist()
    # another corpus that differs in one document has other hashes where its chunks differ
    one = tmp_path / "text" / "0000.txt"
    one.write_text(one.read_text().replace("a", "e"))
    prepared(tmp_path / "other", tmp_path / "text")
    other = harness.data.Tokens(str(tmp_path / "other"), 64)
    changed = said != other.content_ids(everything, as_read=False)
    assert 0 < changed.sum() < len(said)


# ---- records -------------------------------------------------------------------------------------
def test_records_keep_any_bytes(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = random.Random(4)
    images = {f"{i:03d}.png": rng.randbytes(rng.choice([0, 1, 100, 5000])) for i in range(60)}
    for name, data in images.items():
        (folder / name).write_bytes(data)
    card = prepared(tmp_path / "made", folder, kind="records")
    assert card.split("train").items == 60 and card.split("train").shards > 3
    records = harness.data.Records(str(tmp_path / "made"))
    order = list(range(60))
    rng.shuffle(order)
    found = dict(zip(order, records.__getitems__(order), strict=True))
    assert [found[i] for i in range(60)] == [
        {"__key__": name.encode(), "png": data} for name, data in sorted(images.items())
    ]
    sizes = harness.data.Records(str(tmp_path / "made"), decode=size_of)
    assert [sizes[i] for i in range(60)] == [len(data) for _, data in sorted(images.items())]
    assert sizes.fingerprint != records.fingerprint
    said = records.content_ids(range(60), as_read=False)
    assert (said == records.content_ids(range(60))).all() and len(set(said.tolist())) == 60
    with pytest.raises(BadInput, match="use Records"):
        harness.data.Tokens(str(tmp_path / "made"))


def size_of(record):
    return len(record["png"])


def test_a_record_is_framed_without_pickle():
    record = {"": b"", "a\n": b"\n\n", "ü": b"x" * 70}
    assert unframed(framed(record)) == record and unframed(framed({})) == {}
    for wrong in (b"", b"{}\n", b"[[1]]\n", framed(record)[:-1], framed(record) + b"x"):
        with pytest.raises(CorpusCorrupt):
            unframed(wrong)


# ---- damage --------------------------------------------------------------------------------------
@pytest.fixture
def own(tmp_path):
    """A corpus that a test may damage."""
    prepared(tmp_path / "made", files(tmp_path / "text"))
    return str(tmp_path / "made")


def read_all(url):
    windows = harness.data.Tokens(url, 64)
    return windows.__getitems__(range(len(windows)))


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty", "delete"])
def test_a_damaged_shard_is_named_and_nothing_of_it_is_given(own, damage):
    store = open_store(own)
    keys = store.list("shards/")
    victim = keys[1]
    corrupt(store, victim, damage, random.Random(3))
    found = list(damaged(store, card_of(store)))
    assert [one.key for one in found] == [victim]
    with pytest.raises(CorpusCorrupt, match=r"shards/\w{32}.bin: wanted"):
        read_all(own)


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty", "delete"])
@pytest.mark.parametrize("what", ["index/", CARD])
def test_a_damaged_index_or_card_is_refused(own, what, damage):
    store = open_store(own)
    key = CARD if what == CARD else f"index/{card_of(store).split('train').index}.idx"
    kept = store.get(key)
    for seed in range(8):
        corrupt(store, key, damage, random.Random(seed))
        if key == CARD and card_is_the_same(store, kept):
            continue  # a flip in the name of a source, say
        with pytest.raises((CorpusCorrupt, BadInput), match=r"wanted|was changed"):
            read_all(own)
        store.put(key, kept)
    assert read_all(own)


def card_is_the_same(store, kept):
    try:
        return Card.decode(store.get(CARD), "").content == Card.decode(kept, "").content
    except (CorpusCorrupt, NotFound):
        return False


def test_a_wrong_answer_on_the_way_is_asked_for_again(own):
    turns = {}

    def wrong_once(store, size):
        fetch = from_store(store, size)

        def get(shard, chunk):
            turns[shard, chunk] = turns.get((shard, chunk), 0) + 1
            data = fetch(shard, chunk)
            return data[:-1] if turns[shard, chunk] == 1 else data

        return get

    windows = harness.data.Tokens(own, 64, fetch=wrong_once)
    assert [x.tolist() for x, _ in windows.__getitems__(range(len(windows)))] == [
        x.tolist() for x, _ in read_all(own)
    ]
    assert set(turns.values()) == {2}


def test_a_store_that_falters_is_waited_for_and_one_that_stays_silent_is_named(own):
    wanted = [x.tolist() for x, _ in read_all(own)]

    def faltering(store, size):
        faulty = FaultyStore(store.inner, random.Random(5), unavailable=0.2, throttled=0.02)
        return from_store(Retrying(faulty, within_s=60.0), size)

    windows = harness.data.Tokens(own, 64, fetch=faltering)
    assert [windows[i][0].tolist() for i in range(len(windows))] == wanted

    def silent(store, size):
        faulty = FaultyStore(store.inner, random.Random(5), unavailable=1.0)
        return from_store(Retrying(faulty, within_s=0.1), size)

    with pytest.raises(StoreUnavailable):
        harness.data.Tokens(own, 64, fetch=silent)[0]


def test_who_gives_chunks_need_not_be_trusted():
    data = random.Random(1).randbytes(5000)
    hashes = b"".join(hash_of(data[at : at + 1024]) for at in range(0, 5000, 1024))
    index = CorpusIndex.of(1024, [ShardEntry(hash_of(data), 5000, 2500, hashes)])
    right = Chunks(index, lambda shard, chunk: data[chunk * 1024 : (chunk + 1) * 1024], "here")
    for start, end in ((0, 0), (0, 5000), (1000, 1030), (4999, 5000), (1024, 2048)):
        assert right.read(start, end) == data[start:end]
    assert right.read_nbytes == 5000
    liar = Chunks(index, lambda shard, chunk: data[:1024], "here")
    assert liar.read(0, 1024) == data[:1024]
    with pytest.raises(CorpusCorrupt, match="here/shards/"):
        liar.read(0, 1025)


# ---- what is refused -----------------------------------------------------------------------------
def test_what_cannot_be_read_is_refused(corpus, tmp_path):
    with pytest.raises(BadInput, match=r"found no card\.json"):
        harness.data.Tokens(str(tmp_path))
    with pytest.raises(BadInput, match="found train, validation"):
        harness.data.Tokens(corpus, split="test")
    with pytest.raises(BadInput, match="lower length="):
        harness.data.Tokens(corpus, 10**6)
    with pytest.raises(BadInput, match="wanted one of"):
        harness.data.Tokens(corpus, boundaries="yes")
    with pytest.raises(BadInput, match="use Tokens"):
        harness.data.Records(corpus)
    newer = open_store(str(tmp_path / "newer"))
    card = open_store(corpus).get(CARD).replace(b'"format": 1', b'"format": 99')
    newer.put(CARD, card)
    with pytest.raises(CorpusCorrupt, match="update the package"):
        harness.data.Tokens(newer.url)


def test_a_corpus_is_never_changed(corpus, tmp_path):
    before = content(Path(corpus))
    plan = PreparePlan.of([str(files(tmp_path / "text", seed=2))], settings())
    with pytest.raises(BadInput, match="a corpus is never changed"):
        prepare(corpus, plan)
    assert content(Path(corpus)) == before
