"""Training over files of others where they lie: exact through stops and resizes, and proved."""

import io
import shutil
import tarfile

import pytest

from harness.core.world import BadInput
from harness.data.formats.format import IndexSettings
from harness.data.prepare.indexing import IndexPlan, make_index
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from storage.stores.store_urls import open_store
from support.corpora import texts
from support.corpus_runs import SCRIPT, said
from support.foreign_datasets import write_nanogpt
from support.worlds import history, train

pytestmark = pytest.mark.proof


def tar_of_texts(path):
    with tarfile.open(path, "w") as tar:
        for i, text in enumerate(texts(60)):
            entry = tarfile.TarInfo(f"{i:03d}.txt")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("name", "flags", "eos"),
    [("a.tar", ["--records"], -1), ("a.bin", ["--boundaries", "documents"], 0)],
)
def test_stopped_resumed_and_resized_reads_the_same(tmp_path, name, flags, eos):
    source, url = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    if name == "a.tar":
        tar_of_texts(source / name)
    else:
        write_nanogpt(source / name, n=30, below=257)
    plan = IndexPlan.of(str(source), IndexSettings(eos=eos, chunk_nbytes=1024))
    make_index(str(url), plan)
    train(tmp_path / "whole", 1, url, *flags, script=SCRIPT)
    train(tmp_path / "parts", 2, url, *flags, "--total", 4, script=SCRIPT)
    train(tmp_path / "parts", 1, url, *flags, script=SCRIPT)
    assert said(tmp_path / "whole") == said(tmp_path / "parts")
    assert all(record.contents for record in history(tmp_path / "parts"))
    shutil.move(source, tmp_path / "gone")  # what was read follows from the index alone
    store = open_store(str(tmp_path / "parts"))
    report = with_contents(audit(store), store, str(url))
    assert report.ok and [c.n for c in report.checks if c.name == "contents"] == [9]
    # an index of other files, at its place
    shutil.rmtree(url)
    (tmp_path / "gone").rename(source)
    (source / name).write_bytes((source / name).read_bytes().replace(b"the", b"teh"))
    if name == "a.bin":
        write_nanogpt(source / name, seed=1, n=30, below=257)
    make_index(str(url), IndexPlan.of(str(source), plan.settings))
    with pytest.raises(BadInput, match="found another"):
        with_contents(audit(store), store, str(url))
