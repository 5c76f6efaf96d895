"""Exclusion lists: what a corpus leaves out from one step on, everything else's order kept, and
proved."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import harness
from harness.cli.command import main
from harness.core.world import BadInput
from harness.data.card import CorpusCorrupt, card_of, hash_of
from harness.data.exclusions import (
    exclude,
    exclusion_key,
    history,
    instead,
    list_of,
    marked,
    merged_ranges,
)
from storage.canonical_json import canonical
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import corrupt
from support.corpora import command, content, files, leave_out, prepared, spans, texts

EOS = 256


@pytest.fixture
def corpus(tmp_path):
    prepared(tmp_path / "made", files(tmp_path / "text"))
    return str(tmp_path / "made")


# ---- ranges --------------------------------------------------------------------------------------
def test_ranges_are_sets_of_numbers():
    rng = random.Random(1)
    for _ in range(300):
        ranges = [sorted(rng.choices(range(60), k=2)) for _ in range(rng.randrange(6))]
        wanted = {i for low, high in ranges for i in range(low, high)}
        found = merged_ranges(ranges)
        assert {i for low, high in found.tolist() for i in range(low, high)} == wanted
        assert (found[1:, 0] > found[:-1, 1]).all()  # apart, ascending
        low, high = sorted(rng.choices(range(60), k=2))
        assert marked(found, low, high).tolist() == [i in wanted for i in range(low, high)]
        if len(wanted) < 60:
            said = instead(np.arange(60), found, 60).tolist()
            for i, item in enumerate(said):
                behind = [(i + k) % 60 for k in range(60)]
                assert item == next(j for j in behind if j not in wanted)


# ---- tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize("boundaries", ["", "documents", "cu_seqlens"])
@pytest.mark.parametrize("length", [2, 16, 300])
def test_what_is_left_out_is_no_input_and_no_target_and_nothing_else_moves(corpus, length, boundaries):
    before = harness.data.Tokens(corpus, length, boundaries=boundaries)
    gone = [spans(corpus)[i] for i in (3, 4, 11)]
    leave_out(corpus, *gone)
    after = harness.data.Tokens(corpus, length, boundaries=boundaries)
    assert (before.excluded, after.excluded) == (0, 1) and len(after) == len(before)
    assert after.fingerprint == before.fingerprint
    out = {t for start, end in gone for t in range(start, end)}
    void = set()
    for i in range(len(before)):
        old, new = before[i], after[i]
        inputs = range(i * length, (i + 1) * length)
        wanted = old[1].tolist()
        for k, t in enumerate(inputs):
            if t in out or t + 1 in out:
                wanted[k] = -100
        if set(wanted) == {-100} != set(old[1].tolist()):
            void.add(i)
            continue
        assert new[0].tolist() == [EOS if t in out else x for t, x in zip(inputs, old[0].tolist(), strict=True)]
        assert new[1].tolist() == wanted
        assert [x.tolist() for x in new[2:]] == [x.tolist() for x in old[2:]]
    assert void or length == 300
    for i in void:  # of nothing a mean would be NaN: the next one comes, that has something
        other = next(j % len(after) for j in range(i + 1, i + len(after)) if j % len(after) not in void)
        assert [x.tolist() for x in after[i]] == [x.tolist() for x in after[other]]


def test_contents_say_what_is_left_out(corpus):
    whole = harness.data.Tokens(corpus, 16)
    gone = spans(corpus)
    lists = [whole]
    for number, i in ((1, 5), (2, 20)):
        assert leave_out(corpus, gone[i]).number == number
        lists.append(harness.data.Tokens(corpus, 16))
    everything = range(len(whole))
    said = [one.content_ids(everything, as_read=False) for one in lists]
    assert all((one.content_ids(everything) == ids).all() for one, ids in zip(lists, said, strict=True))
    for older, newer, i in ((0, 1, 5), (1, 2, 20)):
        start, end = gone[i]
        touched = [i for i in everything if i * 16 < end and (i + 1) * 16 + 1 > start]
        assert np.flatnonzero(said[older] != said[newer]).tolist() == touched
    back = harness.data.Tokens(corpus, 16)
    back.exclude(1)
    assert (back.content_ids(everything) == said[1]).all()
    with pytest.raises(BadInput, match="wanted the exclusion list 7"):
        back.exclude(7)


# ---- records -------------------------------------------------------------------------------------
def test_another_record_comes_instead(tmp_path):
    text = files(tmp_path / "text", 19)  # and one of them twice
    prepared(tmp_path / "made", text, kind="records")
    url = str(tmp_path / "made")
    before = harness.data.Records(url)
    names = [before[i]["__key__"] for i in range(20)]
    leave_out(url, (4, 7), (18, 20))
    after = harness.data.Records(url)
    found = [record["__key__"] for record in after.__getitems__(range(20))]
    wanted = list(names)
    wanted[4:7], wanted[18:] = [names[7]] * 3, [names[0]] * 2
    assert found == wanted and after[-1]["__key__"] == names[0]
    said = after.content_ids(range(20), as_read=False)
    assert (said == after.content_ids(range(20))).all()
    changed = np.flatnonzero(said != before.content_ids(range(20), as_read=False)).tolist()
    assert changed == [4, 5, 6, 18, 19]
    with pytest.raises(BadInput, match="wanted something left"):
        leave_out(url, (0, 20))
    assert harness.data.Records(url).excluded == 1


# ---- lists ---------------------------------------------------------------------------------------
def test_each_list_has_all_of_the_one_before_and_none_is_changed(corpus):
    card, store = card_of(open_store(corpus)), open_store(corpus)
    gone = spans(corpus)
    before = content(Path(corpus))
    with ThreadPoolExecutor(8) as threads:  # many at the same time: no number twice, nothing lost
        list(threads.map(lambda i: leave_out(corpus, gone[i]), range(8)))
    made = history(store, card)
    assert [one.number for one in made] == list(range(9))
    assert made[-1].ranges("train").tolist() == [list(one) for one in gone[:8]]
    assert leave_out(corpus, gone[3]).number == 8  # is there already
    now = content(Path(corpus))
    assert {name: now[name] for name in before} == before
    assert set(now) - set(before) == {exclusion_key(n) for n in range(1, 9)}


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty"])
def test_a_list_that_was_changed_is_refused(corpus, damage):
    leave_out(corpus, spans(corpus)[0])
    corrupt(open_store(corpus), exclusion_key(1), damage, random.Random(2))
    with pytest.raises(CorpusCorrupt, match=r"exclusion list|wanted list 1"):
        harness.data.Tokens(corpus, 16)
    assert command("verify", corpus).returncode != 0


def test_a_list_that_forgets_is_found(corpus):
    store, gone = open_store(corpus), spans(corpus)
    card = card_of(store)
    leave_out(corpus, gone[0])
    leave_out(corpus, gone[1])
    store.delete(exclusion_key(1))
    with pytest.raises(CorpusCorrupt, match=r"found no excluded/00000001\.json"):
        history(store, card)
    assert exclude(store, card, {}).number == 2  # nothing new
    other = list_of(store, card, 0).with_more({"train": np.array([gone[5]])}, "")
    store.put(exclusion_key(1), canonical(asdict(other)))
    with pytest.raises(CorpusCorrupt, match="wanted a list that follows list 1"):
        history(store, card)


def test_no_loss_is_a_mean_of_nothing(corpus):
    leave_out(corpus, spans(corpus)[7])
    windows = harness.data.Tokens(corpus, 4, boundaries="cu_seqlens")
    for i in range(len(windows)):
        assert (torch.from_numpy(windows[i][1]) != -100).any()


# ---- the command ---------------------------------------------------------------------------------
def test_documents_are_named_by_what_they_say_or_where_they_lie(corpus, tmp_path, capsys):
    def say(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            main(["data", *map(str, words)])
        assert ended.value.code == code
        heard = capsys.readouterr()
        return " ".join((heard.out + heard.err).split())

    made, found = texts(40), spans(corpus)
    assert len(found) == 41
    asked = say("exclude", corpus, "--containing", "no 17")
    assert "nothing is excluded yet" in asked and "no 17" in asked
    assert not (Path(corpus) / "excluded").exists()
    say("exclude", corpus, "--containing", "no 17", "--reason", "asked to be forgotten", "--yes")
    store = open_store(corpus)
    card = card_of(store)
    assert list_of(store, card).ranges("train").tolist() == [list(found[17])]
    assert "asked to be forgotten" in say("show", corpus)

    say("exclude", corpus, "--token", found[3][0] + 5, "--token", found[3][1], "--yes")
    assert list_of(store, card).ranges("train").tolist() == [list(found[3]), list(found[17])]
    (tmp_path / "hashes").write_text(f"{hash_of(made[9].encode()).hex()}{'0' * 32}  0009.txt\n")
    say("exclude", corpus, "--hashes", tmp_path / "hashes", "--yes")
    window = found[30][0] // 500
    say("exclude", corpus, "--item", window, "--length", 500, "--yes")
    wanted = {3, 9, 17} | {
        i for i, (a, b) in enumerate(found) if a < (window + 1) * 500 and b >= window * 500
    }
    newest = list_of(store, card)
    assert newest.number == 4
    assert newest.ranges("train").tolist() == [list(found[i]) for i in sorted(wanted)]
    again = say("exclude", corpus, "--token", found[3][0], "--yes")
    assert "list 4 has them already" in again
    assert "each is what was prepared" in say("verify", corpus)
    for words, said in (
        ((), "found none by that"),
        (("--containing", "nothing like it"), "found none by that"),
        (("--token", 10**9), "wanted 0 to"),
        (("--item", 1), "wanted both"),
        (("--record", 1), "found one of tokens"),
        (("--hashes", corpus), "Is a directory"),
    ):
        assert said in say("exclude", corpus, *words, code=2)
