"""The contract that every object store must pass: memory, files, and S3 (moto, on loopback)."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from storage import FileStore, FsspecStore, MemoryStore, NotFound, ObjectStore, Retrying, StoreError, StoreUnavailable, open_store
from storage.objects import normalize


@pytest.fixture(scope="session")
def s3_url() -> Iterator[dict]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    # The word "bucket" in a bucket's name must not be mistaken for an error about it.
    fsspec.filesystem("s3", skip_instance_cache=True, **options).mkdir("my-bucket")
    yield options
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return open_store(f"memory://{tmp_path}")
    if request.param == "file":
        return open_store(f"file://{tmp_path}/runs/x")
    return open_store(f"s3://my-bucket{tmp_path}", **request.getfixturevalue("s3_url"))


def test_it_is_an_object_store(store: ObjectStore) -> None:
    assert isinstance(store, ObjectStore)
    assert not store.url.endswith("/")


def test_put_get_replace_delete(store: ObjectStore) -> None:
    store.put("a/b", b"one")
    store.put("a/b", memoryview(b"twoo"))
    assert store.get("a/b") == b"twoo"
    assert store.size("a/b") == 4
    store.delete("a/b")
    store.delete("a/b")
    with pytest.raises(NotFound):
        store.get("a/b")


def test_empty_and_binary_objects(store: ObjectStore) -> None:
    every = bytes(range(256)) * 40
    store.put("empty", b"")
    store.put("every", memoryview(every))
    assert (store.get("empty"), store.size("empty")) == (b"", 0)
    assert store.get("every") == every


@pytest.mark.parametrize(("start", "end"), [(0, 3), (3, 7), (7, 10), (0, 10), (4, None), (None, 4), (9, 10)])
def test_ranges(store: ObjectStore, start: int | None, end: int | None) -> None:
    store.put("r", b"0123456789")
    assert store.get("r", start, end) == b"0123456789"[start:end]


def test_a_range_beyond_the_end_is_short(store: ObjectStore) -> None:
    """A truncated object must look truncated, at once, and not like a store that is down."""
    store.put("r", b"0123456789")
    assert store.get("r", 8, 16) == b"89"
    assert store.get("r", 10, 16) == b""
    assert store.get("r", 16, 32) == b""


def test_not_found(store: ObjectStore) -> None:
    store.put("a/b", b"")
    for missing in ("a/c", "nowhere/at/all"):
        with pytest.raises(NotFound):
            store.get(missing)
        with pytest.raises(NotFound):
            store.get(missing, 0, 4)
        with pytest.raises(NotFound):
            store.size(missing)


def test_list_is_by_prefix_and_sorted(store: ObjectStore) -> None:
    keys = ["a/1", "a/2/x", "a/20", "ab", "b/a/1", "c"]
    for key in reversed(keys):
        store.put(key, b"x")
    assert store.list("") == keys
    assert store.list("a") == ["a/1", "a/2/x", "a/20", "ab"]
    assert store.list("a/") == ["a/1", "a/2/x", "a/20"]
    assert store.list("a/2") == ["a/2/x", "a/20"]
    assert store.list("a/2/") == ["a/2/x"]
    assert store.list("c/") == []
    assert store.list("none/") == []
    store.delete("a/2/x")
    assert store.list("a/2") == ["a/20"]


def test_list_sees_what_was_just_written(store: ObjectStore) -> None:
    for i in range(5):
        assert len(store.list("n/")) == i
        assert store.create(f"n/{i}", b"")


def test_create_only_once(store: ObjectStore) -> None:
    assert store.create("c", b"first") is True
    assert store.create("c", b"second") is False
    assert store.create("c", b"first") is False
    assert store.get("c") == b"first"
    store.delete("c")
    assert store.create("c", b"third") is True


def test_create_race_has_exactly_one_winner(store: ObjectStore) -> None:
    writers = 8
    barrier = threading.Barrier(writers)

    def race(key: str, me: int) -> bool:
        barrier.wait()
        return store.create(key, b"%d" % me * 1000)

    with ThreadPoolExecutor(writers) as pool:
        for round_ in range(4):
            key = f"race/{round_}"
            won = list(pool.map(race, [key] * writers, range(writers)))
            assert won.count(True) == 1
            assert store.get(key) == b"%d" % won.index(True) * 1000


def test_readers_never_see_a_mixture(store: ObjectStore) -> None:
    values = [bytes([i]) * 50_000 for i in range(4)]
    store.put("m", values[0])
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(store.put, "m", v) for v in values * 3]
        reads = [pool.submit(store.get, "m") for _ in range(10)]
        assert all(r.result() in values for r in reads)
        for w in writes:
            w.result()


def test_two_stores_of_one_url_share_objects(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    options = request.getfixturevalue("s3_url") if store.url.startswith("s3:") else {}
    store.put("k", b"v")
    assert open_store(store.url + "/", **options).get("k") == b"v"
    assert open_store(store.url + "-other", **options).list("") == []


def test_a_missing_bucket_is_an_error_at_once(s3_url: dict) -> None:
    store = FsspecStore("s3://not-there/x", **s3_url)
    with pytest.raises(StoreError, match="does not exist") as e:
        store.put("k", b"v")
    assert not isinstance(e.value, StoreUnavailable | NotFound)


def test_a_missing_object_in_a_bucket_called_bucket_is_not_found(s3_url: dict) -> None:
    with pytest.raises(NotFound):
        FsspecStore("s3://my-bucket/x", **s3_url).size("k")


def test_normalize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalize("runs/x") == f"file://{tmp_path}/runs/x"
    assert normalize("s3://b/runs/x/") == "s3://b/runs/x"


def test_a_path_with_spaces_and_umlauts(tmp_path: Path) -> None:
    open_store(str(tmp_path / "my rün")).put("k", b"v")
    assert (tmp_path / "my rün" / "k").read_bytes() == b"v"


def test_files_are_where_people_look_and_nothing_else_is_left(tmp_path: Path) -> None:
    store = FileStore(f"file://{tmp_path}", durable=True)
    store.create("a/b", b"1")
    store.create("a/b", b"2")
    store.put("a/c", b"3")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["b", "c"]
    (tmp_path / "a" / ".b.123.tmp").write_bytes(b"a writer died here")
    assert store.list("") == ["a/b", "a/c"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_permission_denied_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied; choose a run URL"):
        FileStore(f"file://{tmp_path}").put("k", b"v")


class Deaf(MemoryStore):
    """Does not answer the first `times` calls of each operation, after doing what was asked."""

    def __init__(self, times: int, does: bool = True):
        super().__init__(objects={})
        self.times, self.does = times, does

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if self.times > 0:
            self.times -= 1
            if self.does:
                super().create(key, data)
            raise StoreUnavailable("deaf")
        return super().create(key, data)


def test_a_create_of_unknown_outcome_is_settled_by_reading_back() -> None:
    assert Retrying(Deaf(2)).create("k", b"mine") is True
    lost = Deaf(1, does=False)
    lost._objects["k"] = b"theirs"
    assert Retrying(lost).create("k", b"mine") is False


def test_retries_end() -> None:
    with pytest.raises(StoreUnavailable):
        Retrying(Deaf(10**6), within_s=0.05).create("k", b"x")
