"""Datasets and loaders of others as the iterables of `run.steps`: stopped, resumed and resized they
give what a run gets that was left alone (docs/trainers/data.md)."""

from pathlib import Path

import pytest

from support.worlds import history, train

SCRIPT = str(Path(__file__).parent / "scripts" / "others_loop.py")
N = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("numbers")
    streaming = pytest.importorskip("streaming")
    pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    with streaming.MDSWriter(out=str(root / "mosaic"), columns={"i": "int"}, size_limit=300) as out:
        for i in range(N):
            out.write({"i": i})
    writer = BinaryWriter(str(root / "lit"), chunk_size=5)
    for i in range(N):
        writer[i] = {"i": i}
    writer.done()
    writer.merge()
    return root


def said(run):
    return [(r.step, r.digest, r.contents, r.loss) for r in history(run)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("mosaic", 2), ("lit", 2), ("mosaic loader", 1), ("lit loader", 1)),
        *(("stateful", 2), ("stateful processes", 2)),
    ],
)
def test_others_are_gone_on_with_exactly(folders, tmp_path, kind, ranks):
    words = (kind, folders / kind.split()[0])
    train(tmp_path / "whole", 1, *words, script=SCRIPT)
    train(tmp_path / "parts", ranks, *words, "--total", 4, script=SCRIPT)
    train(tmp_path / "parts", 1, *words, script=SCRIPT)
    assert said(tmp_path / "whole") == said(tmp_path / "parts") and len(said(tmp_path / "parts")) == 9


@pytest.mark.parametrize(
    ("kind", "ranks"), [("mosaic bare", 1), ("lit bare", 1), ("lit loader", 2), ("mosaic loader", 2)]
)
def test_who_would_see_a_part_only_is_told(folders, tmp_path, kind, ranks):
    ended = train(
        tmp_path / "run", ranks, kind, folders / kind.split()[0], script=SCRIPT, codes=(1,)
    )
    assert "give run.steps harness.data.ByIndex(dataset)" in ended.output
