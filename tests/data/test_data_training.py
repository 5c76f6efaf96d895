"""Training over a corpus: the same samples and losses on any world, and `harness prove verify` proves what
was read."""

import json
import random
import shutil

import numpy as np
import pytest

from harness.core.batch import Batching, digest, indices_at, positions_of, sample_hash
from harness.core.sample_order import batching_of
from harness.core.world import BadInput
from harness.data.datasets import named_by
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from harness.look.reports.compare import compare
from storage.canonical_json import canonical
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import corrupt
from support.corpora import command, files, prepared
from support.corpus_runs import SCRIPT, said
from support.worlds import history, newest, train

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    text = files(root / "text", 60)
    prepared(root / "tokens", text)
    prepared(root / "records", text, kind="records")
    return root


@pytest.fixture(scope="module")
def calm(corpora):
    train(corpora / "calm", 1, corpora / "tokens", script=SCRIPT)
    return corpora / "calm"


@pytest.fixture(scope="module")
def mixed(corpora):
    """Two corpora: the second is so small that it is used up before the run ends."""
    prepared(corpora / "code", files(corpora / "few", 12, seed=3))
    return corpora / "tokens", corpora / "code"


def proved(run, *urls):
    store = open_store(str(run))
    return with_contents(audit(store), store, [str(url) for url in urls])


@pytest.mark.parametrize("flags", [(), ("--workers", 2)])
def test_two_ranks_train_as_one(corpora, calm, tmp_path, flags):
    train(tmp_path / "two", 2, corpora / "tokens", *flags, script=SCRIPT)
    assert said(tmp_path / "two") == said(calm) and len(said(calm)) == 9
    found = compare(open_store(str(calm)), open_store(str(tmp_path / "two")))
    assert found.same(0.0) and found.same_weights
    assert proved(tmp_path / "two", corpora / "tokens").ok


@pytest.mark.parametrize("shape", [["--boundaries", "documents"], ["--boundaries", "cu_seqlens"], ["--records"]])
def test_stopped_resumed_and_resized_reads_the_same(corpora, tmp_path, shape):
    url = corpora / ("records" if shape == ["--records"] else "tokens")
    train(tmp_path / "whole", 1, url, *shape, script=SCRIPT)
    train(tmp_path / "parts", 2, url, *shape, "--total", 4, script=SCRIPT)
    train(tmp_path / "parts", 1, url, *shape, script=SCRIPT)
    assert said(tmp_path / "whole") == said(tmp_path / "parts")
    report = proved(tmp_path / "parts", url)
    assert report.ok and [c.n for c in report.checks if c.name == "contents"] == [9]


def test_each_step_says_what_the_index_says(corpora, calm):
    identity = json.loads((calm / "run.json").read_bytes())
    dataset = named_by(identity["data"], str(corpora / "tokens"))
    batching = Batching(len(dataset), 12, 3, 7)
    for record in history(calm):
        at = positions_of(batching, record.step)
        held = dataset.content_ids(indices_at(batching, at).tolist(), as_read=False)
        assert record.contents == f"{digest(sample_hash(at, held)):016x}"


def test_verify_finds_who_read_something_else(corpora, calm, tmp_path):
    """A run over a corpus whose samples are others, that claims to have read ours."""
    other = prepared(tmp_path / "other", files(tmp_path / "text", 60, seed=5))
    train(tmp_path / "run", 1, tmp_path / "other", script=SCRIPT)
    with pytest.raises(BadInput, match="found another"):
        proved(tmp_path / "run", corpora / "tokens")
    # the card of the one that was read, in the place of ours: its index does not fit
    shutil.copytree(corpora / "tokens", tmp_path / "posing")
    shutil.copy(tmp_path / "other" / "card.json", tmp_path / "posing")
    report = proved(tmp_path / "run", tmp_path / "posing")
    assert not report.ok and "wanted an index, found none" in report.first_violation
    # records that were made anew with other contents: the chain holds, the corpus does not
    forged = forge(tmp_path / "run", tmp_path / "forged")
    report = proved(forged, tmp_path / "other")
    assert [(c.name, c.ok) for c in report.checks if c.name in ("records", "contents")] == [
        ("records", True),
        ("contents", False),
    ]
    assert "step 9: wanted the contents" in report.checks[-1].detail
    assert other.content in (forged / "run.json").read_text()


def forge(run, copy):
    """The run with step 9's contents changed, and all hashes and names made to fit."""
    from harness.core import step_records as rec

    shutil.copytree(run, copy)
    key = sorted((copy / "samples").iterdir())[-1]
    found = rec.decode(key.read_bytes(), "")
    found[-1] = rec.dataclasses.replace(found[-1], contents=f"{1:016x}").chained(found[-1].prev)
    key.unlink()
    (copy / rec.key(found)).write_bytes(rec.encode(found))
    for path in (copy / "snapshots" / "manifests").iterdir():
        body = json.loads(path.read_bytes())
        if body["data"].get("samples", {}).get("last") == found[-1].step:
            body["data"]["samples"] |= {"key": rec.key(found), "head": found[-1].h}
            path.write_bytes(canonical(resealed(body)))
    return copy


def resealed(body):
    from storage.canonical_json import digest

    rest = {name: value for name, value in body.items() if name != "hash"}
    return {**rest, "hash": digest(canonical(rest))}


def test_a_damaged_shard_ends_the_run_with_its_name(corpora, tmp_path):
    shutil.copytree(corpora / "tokens", tmp_path / "damaged")
    store = open_store(str(tmp_path / "damaged"))
    for key in store.list("shards/"):
        corrupt(store, key, "flip", random.Random(1))
    ended = train(tmp_path / "run", 1, tmp_path / "damaged", script=SCRIPT, codes=(1,))
    assert "nothing of it is trained on" in ended.output
    assert newest(tmp_path / "run") is None


def test_the_samples_of_any_step_are_shown(corpora, calm):
    shown = command("show", corpora / "tokens", "--run", calm, "--step", 5)
    assert shown.returncode == 0, shown.stderr
    dataset = named_by(json.loads((calm / "run.json").read_bytes())["data"], str(corpora / "tokens"))
    at = range(48, 60)
    for position, item in zip(at, indices_at(Batching(len(dataset), 12, 3, 7), at).tolist(), strict=True):
        assert f"position {position}, item {item}\n" in shown.stdout
        text = bytes(t for t in dataset[item][0].tolist() if t < 256).decode()
        assert text in shown.stdout


# ---- the order: blocks and mixtures --------------------------------------------------------------
@pytest.mark.parametrize("shuffle", [(), ("--shuffle", "blocks")])
def test_a_mixture_is_the_same_on_any_nodes_and_after_kills(corpora, mixed, tmp_path, shuffle):
    """Packed windows of two corpora, by weights that change until one is used up."""
    words = (*mixed, "--boundaries", "cu_seqlens", "--total", 24, *shuffle)
    train(tmp_path / "calm", 1, *words, script=SCRIPT)
    for world, die_in, workers in ((1, 5, 0), (2, 11, 2), (3, 17, 0)):
        more = ("--die-in", die_in, "--workers", workers)
        train(tmp_path / "harsh", world, *words, *more, script=SCRIPT, codes=(-9,))
    train(tmp_path / "harsh", 2, *words, script=SCRIPT)
    assert {r.world for r in history(tmp_path / "harsh")} == {1, 2, 3}
    assert said(tmp_path / "calm") == said(tmp_path / "harsh") and len(said(tmp_path / "calm")) == 24
    found = compare(open_store(str(tmp_path / "calm")), open_store(str(tmp_path / "harsh")))
    assert found.same(0.0) and found.same_weights
    report = proved(tmp_path / "harsh", *reversed(mixed))
    assert report.ok and [c.n for c in report.checks if c.name == "contents"] == [24]
    with pytest.raises(BadInput, match="source 'code'"):
        proved(tmp_path / "harsh", mixed[0])
    words_of_verify = ["prove", "verify", tmp_path / "harsh", "--data", mixed[0], "--data", mixed[1]]
    verified = command(*words_of_verify, of=())
    assert verified.returncode == 0 and "each step read what the corpora tokens" in verified.stdout

    identity = json.loads((tmp_path / "harsh" / "run.json").read_bytes())
    batching, code = batching_of(identity), named_by(json.loads(identity["data"][8:])[1][1], str(mixed[1]))
    of_code = batching.samples - len(code)
    read = indices_at(batching, np.arange(24 * 12))
    times = np.bincount(read[read >= of_code] - of_code, minlength=len(code))
    assert times.max() == 1 and times.sum() >= len(code) - (8 if shuffle else 0)  # of 4 lanes
    shown = command("show", *mixed, "--run", tmp_path / "harsh", "--step", 2)
    assert shown.returncode == 0, shown.stderr
    for position, item in zip(range(12, 24), read[12:24].tolist(), strict=True):
        name, within = ("code", item - of_code) if item >= of_code else ("tokens", item)
        assert f"position {position}, item {item}: item {within} of {name}\n" in shown.stdout
    # another order, or none, is another run
    other = train(tmp_path / "harsh", 1, mixed[0], *words[2:], script=SCRIPT, codes=(1,))
    assert "holds another run: its order is" in other.output


def test_blocks_are_the_same_on_any_nodes_and_after_kills(corpora, tmp_path):
    words = (corpora / "tokens", "--shuffle", "blocks", "--total", 40)
    train(tmp_path / "calm", 1, *words, script=SCRIPT)
    for world, die_in, workers in ((3, 8, 0), (1, 19, 2), (2, 31, 2)):
        more = ("--die-in", die_in, "--workers", workers)
        train(tmp_path / "harsh", world, *words, *more, script=SCRIPT, codes=(-9,))
    train(tmp_path / "harsh", 3, *words, "--workers", 2, script=SCRIPT)
    assert said(tmp_path / "calm") == said(tmp_path / "harsh")
    found = compare(open_store(str(tmp_path / "calm")), open_store(str(tmp_path / "harsh")))
    assert found.same(0.0) and found.same_weights
    assert proved(tmp_path / "harsh", corpora / "tokens").ok
    plain = train(tmp_path / "harsh", 1, words[0], "--total", 40, script=SCRIPT, codes=(1,))
    assert "holds another run: its order is" in plain.output
