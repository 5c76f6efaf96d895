"""Small corpora for the tests, and scripts that train on them."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from harness.data.card import card_of
from harness.data.exclusions import exclude
from harness.data.prepare.documents import DocumentRules
from harness.data.prepare.prepare import PreparePlan, prepare
from harness.data.prepare.shard_writer import CorpusSettings
from harness.data.verify import TokenRow
from storage.stores.store_urls import open_store
from support.worlds import environment

WORDS = ["the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on"]


def texts(n, seed=0, words=120):
    """Documents, some very short, one of them twice."""
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=rng.randint(1, words))) + f" no {i}" for i in range(n)]
    return [*made, made[n // 2]]


def files(folder: Path, n=40, seed=0, words=120):
    """One for each document."""
    folder.mkdir(parents=True)
    for i, text in enumerate(texts(n, seed, words)):
        (folder / f"{i:04d}.txt").write_text(text)
    return folder


def settings(kind="tokens", **more):
    how = {name: more.pop(name) for name in ("field", "separator", "errors") if name in more}
    small = {"chunk_nbytes": 1024, "shard_nbytes": 8192, "unit_nbytes": 4096}
    return CorpusSettings(DocumentRules(kind, **how), **(small | more))


def prepared(url, *sources, kind="tokens", jobs=1, **more):
    plan = PreparePlan.of([str(one) for one in sources], settings(kind, **more))
    card = prepare(str(url), plan, jobs=jobs)
    assert card is not None
    return card


def small_corpus(root: Path) -> str:
    """Tokens of small documents, in many small chunks; its URL."""
    prepared(root / "made", files(root / "text", 120))
    return str(root / "made")


def shards_nbytes(url):
    store = open_store(url)
    return sum(store.size(key) for key in store.list("shards/"))


def documents_of(tokens, eos):
    """Texts of a row of tokens of bytes, as `prepare` put them there."""
    out, held = [], bytearray()
    for token in tokens:
        if token == eos:
            out.append(held.decode())
            held.clear()
        else:
            held.append(token)
    assert not held
    return out


def poison(kind):
    """A document of 4096 letters and more, like no other in `texts`."""
    rng = random.Random(3)
    if kind == "repeated":
        return "#" * 4096
    if kind == "noise":
        return "".join(rng.choices([chr(c) for c in range(33, 127)], k=4096))
    return " ".join("".join(rng.choices("абвгдежзиклмн", k=rng.randint(2, 9))) for _ in range(500))


def poisoned(folder: Path, *kinds, n=2000):
    """A corpus of so many texts, and documents of other kinds in between."""
    rows = texts(n, seed=8)
    for i, kind in enumerate(kinds, 1):
        rows.insert(n * 3 // 4 + 100 * i, poison(kind))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    prepared(folder / "made", folder / "text.jsonl", unit_nbytes=1 << 20, shard_nbytes=1 << 16)
    return str(folder / "made")


def leave_out(url, *ranges):
    """Of the split train, by a list more."""
    store = open_store(str(url))
    return exclude(store, card_of(store), {"train": np.array(ranges)}, "a test")


def spans(url):
    """(start, end) of each document of the split train."""
    return [(start, start + len(ids)) for start, ids in TokenRow(str(url), "train").documents()]


def content(folder: Path):
    """All objects of a corpus, without what is left of the work."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_relative_to(folder / "work")
    }


def command(*words, of=("data",), **more):
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *of, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )
