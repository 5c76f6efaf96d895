"""Small corpora for the tests, and scripts that train on them."""

import random
import subprocess
import sys
from pathlib import Path

from worlds import environment

from harness.data.documents import DocumentRules
from harness.data.prepare import PreparePlan, prepare
from harness.data.unit_maker import CorpusSettings

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
