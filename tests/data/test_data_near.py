"""Near duplicates: the first of a cluster is kept, whoever made which unit."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

import harness
from harness.core.world import BadInput
from harness.data.prepare.dedupe import near_duplicates, near_duplicates_of
from harness.data.prepare.prepare import PreparePart, PreparePlan, prepare
from support.corpora import command, content, prepared, settings
from support.worlds import environment


def changed(words, rng, share):
    """With some words replaced."""
    return [rng.choice(["one", "two", "three"]) if rng.random() < share else w for w in words]


@pytest.fixture(scope="module")
def rows():
    """200 documents unlike each other; then copies of every fifth with 1 % of other words, and one
    with a third of them."""
    rng = random.Random(4)
    vocabulary = [f"word{i}" for i in range(3000)]
    originals = [rng.choices(vocabulary, k=300) for _ in range(200)]
    copies = [changed(one, rng, 0.01) for one in originals[::5]]
    unlike = [changed(one, rng, 0.33) for one in originals[1:40:5]]
    return [" ".join(words) for words in (*originals, *copies, *unlike)]


@pytest.fixture
def lines(rows, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


# ---- clusters ------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [1, 3])
def test_clusters_are_connected_and_their_first_is_kept(rounds):
    rng = random.Random(rounds)
    for _ in range(100):
        n, bands = rng.randrange(1, 30), 3
        keys = [[rng.randrange(25) + 100 * band for band in range(bands)] for _ in range(n)]
        of = {i: {i} for i in range(n)}
        for i in range(n):  # who agrees in a band is of one cluster
            for j in range(i):
                if any(a == b for a, b in zip(keys[i], keys[j], strict=True)):
                    both = of[i] | of[j]
                    of |= dict.fromkeys(both, both)
        wanted = [i for i in range(n) if i != min(of[i])]
        cut = rng.randrange(n + 1)
        units = [np.array(part, "<u8").tobytes() for part in (keys[:cut], keys[cut:])]
        found = near_duplicates_of(lambda: iter(units), bands, rounds)  # noqa: B023
        starts = {0: 0, 1: cut}
        assert sorted(starts[u] + i for u, some in found.items() for i in some.tolist()) == wanted
        if rounds == 1:
            again = near_duplicates(lambda: iter(units), bands, 24 * n, 64)  # noqa: B023
            assert {u: one.tolist() for u, one in again.items()} == {u: one.tolist() for u, one in found.items()}


# ---- with the package ----------------------------------------------------------------------------
def test_near_duplicates_are_dropped_and_others_stay(lines, rows, tmp_path):
    pytest.importorskip("datasketch")
    card = prepared(tmp_path / "made", lines, near=0.7)
    assert card.dropped == 40 and card.split("train").documents == 208
    assert "Jaccard 0.7" in card.near and "datasketch" in card.near
    n = card.split("train").items - 1
    found = bytes(t if t < 256 else 10 for t in harness.data.Tokens(str(tmp_path / "made"), n)[0][0].tolist())
    assert found.decode().split("\n") == rows[:200] + rows[240:]
    exact = prepared(tmp_path / "exact", lines, dedup=True)
    assert exact.dropped < 5 and exact.near == ""
    assert "Jaccard 0.7" in command("show", tmp_path / "made").stdout


def test_any_number_of_processes_and_parts_drops_the_same(lines, tmp_path):
    pytest.importorskip("datasketch")
    one = prepared(tmp_path / "one", lines, near=0.7, held_out=0.1)
    assert prepared(tmp_path / "two", lines, near=0.7, held_out=0.1, jobs=2) == one
    plan = PreparePlan.of([str(lines)], settings(near=0.7, held_out=0.1))
    assert len(plan.units) > 20
    card = None
    for number in (3, 1, 2, 3, 1, 2, 3):
        card = prepare(str(tmp_path / "three"), plan, part=PreparePart(number, 3)) or card
    assert card == one
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "three")
    assert prepared(tmp_path / "other", lines, near=0.8, held_out=0.1).plan != one.plan


def test_ids_have_neighbours_too_and_records_none(lines, tmp_path):
    pytest.importorskip("datasketch")
    card = prepared(tmp_path / "ids", "python:test_data_near:ids", near=0.7, parts=3)
    assert card.dropped == 10
    with pytest.raises(BadInput, match="which have no words"):
        PreparePlan.of([str(lines)], settings("records", near=0.7))


def ids(part, parts):
    rng = np.random.default_rng(part)
    one = rng.integers(0, 200, (10, 400))
    yield from one
    if part == 0:
        one[:, 7] = 3
        yield from one


# ---- without it ----------------------------------------------------------------------------------
def test_who_has_not_the_package_is_told(lines, tmp_path):
    code = (
        "import sys\nsys.modules['datasketch'] = None\nfrom harness.cli.command import main\n"
        f"sys.exit(main(['data', 'prepare', {str(lines)!r}, {str(tmp_path / 'x')!r}, "
        "'--near-duplicates', '0.8']))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert found.returncode == 2 and "pip install datasketch" in found.stderr, found.stderr


def test_a_plan_without_it_is_what_it_was(lines):
    """Work and cards of before are known again."""
    plan = PreparePlan.of([str(lines)], settings())
    assert plan.near is None and not plan.drops
