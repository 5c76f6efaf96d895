"""Files that are no documents, or stand for more than memory holds, are wrong input."""

import gzip
import json
import resource
import subprocess
import sys
import tarfile

import pytest

from harness.core.world import BadInput
from harness.data.formats.format import IndexSettings
from harness.data.prepare.documents import DocumentRules, documents
from harness.data.prepare.indexing import IndexPlan
from harness.data.prepare.units import Extent, SourceFile


def found(path, **how):
    file = SourceFile(str(path), path.stat().st_size)
    return list(documents(Extent(file, 0, -1), DocumentRules("tokens", **how)))


def test_half_a_pair_of_surrogates_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\\\ud800b"}\n'.replace("\\\\", "\\"))
    with pytest.raises(BadInput, match="half of a pair"):
        found(path)
    assert found(path, errors="replace") == ["a?b"]


def test_json_that_is_too_deep_is_no_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 200_000 + "\n")
    with pytest.raises(BadInput, match="wanted a JSON object in each line"):
        found(path)


BOMB = """
import resource, sys
sys.path[:0] = {path!r}
from test_bounded_documents import found
from pathlib import Path
from harness.core.world import BadInput
import harness.data.prepare.documents as read
read.MOST_DOCUMENT_NBYTES = 32 << 20
now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found(Path(sys.argv[1]))
except BadInput as e:
    print(e)
print("grew", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - now) >> 10)
"""


@pytest.mark.parametrize("kind", ["jsonl", "txt", "tar"])
def test_a_small_file_that_stands_for_much_is_refused_with_bounded_memory(tmp_path, kind):
    """512 MiB without an end of a line, packed; a file of 60 GiB in a tar that has none of it."""
    if kind == "tar":
        path = tmp_path / "a.tar"
        sparse = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(60 << 30)}
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("x.txt")
            info.pax_headers = {"GNU.sparse.name": "x.txt", **sparse}
            tar.addfile(info)
    else:
        path = tmp_path / f"a.{kind}.gz"
        with gzip.open(path, "wb", compresslevel=1) as f:
            for _ in range(64):
                f.write(b" " * (8 << 20))
    said = subprocess.run(
        [sys.executable, "-c", BOMB.format(path=sys.path), str(path)],
        capture_output=True, text=True, timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip
    assert "32 MiB" in said.stdout, said.stdout + said.stderr
    assert int(said.stdout.split()[-1]) < 200


GOOD = {
    "version": 2, "shards": [{
        "format": "mds", "version": 2, "compression": None, "zip_data": None, "samples": 1,
        "column_names": ["a"], "column_encodings": ["str"], "column_sizes": [None],
        "raw_data": {"basename": "shard.mds", "bytes": 20, "hashes": {}},
    }],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", "x"), ("samples", -1), ("samples", 1e400), ("samples", 10**30), ("samples", None),
        ("column_names", [["a"]]), ("column_names", 5), ("column_names", ["a", "b"]),
        ("column_encodings", [None]), ("column_sizes", ["many"]), ("column_sizes", [-4]),
        ("column_sizes", [1e400]), ("column_sizes", None), ("raw_data", []), ("raw_data", {}),
    ],
)  # fmt: skip
def test_a_changed_mds_index_is_wrong_input(tmp_path, name, value):
    (tmp_path / "shard.mds").write_bytes(b"\0" * 64)
    body = json.loads(json.dumps(GOOD))
    body["shards"][0][name] = value
    (tmp_path / "index.json").write_text(json.dumps(body))
    with pytest.raises(BadInput):
        IndexPlan.of(str(tmp_path), IndexSettings("", -1, "", 0))


