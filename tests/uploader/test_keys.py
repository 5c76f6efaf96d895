"""No key leads out of its folder, whoever wrote it: what a bucket names is read and written
under the roots that a person named."""


import pytest

from harness.bucket.journal import Journal
from harness.uploader.bucket_replica import Replica
from storage import (
    FileStore,
    Manifest,
    MemoryStore,
    NotFound,
    Part,
    PartList,
    Ref,
    SnapshotCorrupt,
    Snapshots,
    StoreError,
    snapshots_command,
)
from storage.snapshots.transfer import copy
from storage.stores.objects import checked_key

REF = Ref(1, 20)
PARTS = f"snapshots/parts/{REF.name}/"
LEAVING = [
    "../evil",
    f"{PARTS}../../../../evil",
    "/tmp/evil",
    f"{PARTS}a/../../../../../evil",
    "snapshots/parts/../../../evil",
]
NO_KEYS = [
    *LEAVING,
    "",
    ".",
    "..",
    "a//b",
    "a/",
    "/a",
    "a/./b",
    "a\\..\\b",
    "a\nb",
    "a\x00b",
    "x" * 2000,
]


def bucket(key: str) -> MemoryStore:
    """One committed snapshot, sealed as all are, whose part is said to lie at `key`."""
    store, body = MemoryStore(objects={}), b"* * * * * a line that somebody's cron would run"
    lists = [PartList(REF, 0, 1, "t", (Part.of(key, body),), {}, {"samples": None})]
    store.put(f"snapshots/manifests/{REF.name}.json", Manifest.merge(lists).to_json().encode())
    store.put(key, body)
    return store


def below(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("key", [*LEAVING, "notes.txt", "run.json", "snapshots/manifests/x"])
def test_a_manifest_that_names_what_is_no_part_is_corrupt(key):
    with pytest.raises(SnapshotCorrupt, match="wanted the key of an object under snapshots/parts/"):
        Snapshots(bucket(key)).load(REF)


@pytest.mark.parametrize("key", LEAVING)
def test_a_copy_to_a_folder_writes_nothing_outside_of_it(tmp_path, key):
    target = tmp_path / "a" / "b" / "copy"
    key = key.replace("/tmp/evil", f"{tmp_path}/evil")
    with pytest.raises(StoreError):
        copy(bucket(key), FileStore(f"file://{target}"), [REF])
    assert below(tmp_path) == set()


def test_the_command_copies_nothing_outside(tmp_path, capsys):
    source = FileStore(f"file://{tmp_path}/source")
    source.put(
        f"snapshots/manifests/{REF.name}.json",
        bucket("../evil").get(f"snapshots/manifests/{REF.name}.json"),
    )
    (tmp_path / "evil").write_bytes(bucket("../evil").get("../evil"))
    (tmp_path / "deep").mkdir()
    assert snapshots_command.main(["copy", f"{tmp_path}/source", f"{tmp_path}/deep/copy"]) == 1
    assert "'../evil'" in capsys.readouterr().err
    assert below(tmp_path / "deep") == set()


def test_a_replica_in_a_folder_writes_nothing_outside_of_it(tmp_path):
    good = Snapshots(source := MemoryStore(objects={}))
    good.write(REF, 0, 1, {"a.bin": b"x" * 100}, {}, {}, "t")
    good.commit(REF, 1)
    source.put("run.json", b"{}")
    for key in ("samples/../../../evil", "samples/a//b", "samples/0000000001-0000000020-abc.jsonl"):
        source.put(key, b"[]")  # what a bucket lists may be anything
    journal = Journal(source, "replica-x", lambda: 0.0)
    target = tmp_path / "a" / "copy"
    assert Replica(source, FileStore(f"file://{target}"), journal).look() == REF
    assert below(tmp_path) == {f"a/copy/{name}" for name in below(target)}
    assert "samples/0000000001-0000000020-abc.jsonl" in below(target)
    assert Replica(bucket("../../evil"), FileStore(f"file://{target}2"), journal).look() is None
    assert "evil" not in " ".join(below(tmp_path))


@pytest.mark.parametrize("key", NO_KEYS)
def test_a_folder_refuses_such_keys_itself(tmp_path, key):
    (tmp_path / "evil").write_text("mine")
    store = FileStore(f"file://{tmp_path}/store")
    calls = [
        store.get,
        store.size,
        store.delete,
        lambda k: store.put(k, b"x"),
        lambda k: store.create(k, b"x"),
        lambda k: store.read_into(k, 0, memoryview(bytearray(4))),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="is no key") as e:
            call(key)
        assert not isinstance(e.value, NotFound)
    assert below(tmp_path) == {"evil"} and (tmp_path / "evil").read_text() == "mine"
    with pytest.raises(ValueError, match="wanted the key"):
        checked_key(key)


def test_ordinary_keys_are_left_alone(tmp_path):
    store = FileStore(f"file://{tmp_path}/my store")
    for key in ("run.json", "a/b.c/..d/e..f", "snapshots/manifests/.x/y", "ü/ö 1"):
        store.put(key, b"x")
        assert store.get(checked_key(key)) == b"x"
    assert store.list("") == sorted(
        ["run.json", "a/b.c/..d/e..f", "snapshots/manifests/.x/y", "ü/ö 1"]
    )
    assert store.list("a/") == ["a/b.c/..d/e..f"] and store.list("ru") == ["run.json"]
