"""The contract that every object store must pass: memory, files, and buckets of real servers on loopback (tests/buckets.py)."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import buckets
import fsspec
import pytest

from storage import FileStore, FsspecStore, MemoryStore, NotFound, ObjectStore, Retrying, StoreError, StoreUnavailable, fast, open_store
from storage.objects import BACKENDS, abort_stale_uploads, normalize, read_into


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    pytest.importorskip("moto.server")
    with buckets.moto() as url:
        yield url


@pytest.fixture(scope="session")
def s3_url(moto_url: str) -> dict:
    return {"key": "test", "secret": "test", "endpoint_url": moto_url}


@pytest.fixture(scope="session")
def gcs_url(moto_url: str) -> dict:
    return {"token": "anon", "endpoint_url": moto_url}


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    with buckets.weed(tmp_path_factory.mktemp("weed")) as options:
        fsspec.filesystem("s3", skip_instance_cache=True, **options).mkdir("my-bucket")
        yield options


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    with buckets.fake_gcs(tmp_path_factory.mktemp("gcs")) as options:
        yield options


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    with buckets.azurite(tmp_path_factory.mktemp("azurite")) as options:
        yield options


SERVERS = {  # scheme, who speaks to it, the fixture that has its options
    "s3-fsspec-moto": ("s3", "fsspec", "s3_url"),
    "s3-obstore-moto": ("s3", "obstore", "s3_url"),
    "s3-obstore-weed": ("s3", "obstore", "weed"),
    "gs-obstore-moto": ("gs", "obstore", "gcs_url"),
    "gs-fsspec-fake": ("gs", "fsspec", "fake_gcs"),
    "az-obstore-azurite": ("az", "obstore", "azurite"),
}


@pytest.fixture(params=["memory", "file", *SERVERS])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], ObjectStore]:
    """Opens a store whose URL ends with what is given."""
    if request.param == "memory":
        return lambda tail: open_store(f"memory://{tmp_path}{tail}")
    if request.param == "file":
        return lambda tail: open_store(f"file://{tmp_path}/runs/x{tail}")
    scheme, backend, fixture = SERVERS[request.param]
    options = request.getfixturevalue(fixture)
    return lambda tail: open_store(f"{scheme}://my-bucket{tmp_path}{tail}", backend=backend, **options)


@pytest.fixture
def store(opener: Callable[[str], ObjectStore]) -> ObjectStore:
    return opener("")


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


def test_two_stores_of_one_url_share_objects(opener: Callable[[str], ObjectStore]) -> None:
    opener("").put("k", b"v")
    assert opener("/").get("k") == b"v"
    assert opener("-other").list("") == []


def test_large_objects_go_in_parts_and_come_back_to_where_they_are_wanted(store: ObjectStore) -> None:
    nbytes = 2 * fast.PART_NBYTES + 12_345
    data = memoryview(random.Random(1).randbytes(nbytes))
    store.put("big", data)
    assert store.size("big") == nbytes
    start, want = 3_000_001, 2 * fast.READ_NBYTES + 77
    buffer = bytearray(b"-" * (want + 10))
    assert read_into(store, "big", start, memoryview(buffer)[5 : 5 + want]) == want
    assert buffer[5 : 5 + want] == data[start : start + want]
    assert buffer[:5] == buffer[-5:] == b"-----"


def test_read_into_says_where_the_object_ends(store: ObjectStore) -> None:
    store.put("r", b"0123456789")
    buffer = bytearray(b"-" * 8)
    assert read_into(store, "r", 7, memoryview(buffer)) == 3
    assert buffer == b"789-----"
    assert read_into(store, "r", 10, memoryview(buffer)) == 0
    assert read_into(store, "r", 20, memoryview(buffer)) == 0
    assert read_into(store, "r", 2, memoryview(buffer)[:0]) == 0
    long = bytearray(3 * fast.READ_NBYTES)
    assert read_into(store, "r", 1, memoryview(long)) == 9
    assert long.startswith(b"123456789")
    with pytest.raises(NotFound):
        read_into(store, "missing", 0, memoryview(buffer))


def test_unusual_keys(opener: Callable[[str], ObjectStore]) -> None:
    store = opener("/a b/ünder")
    keys = ["a b", "per%20cent", "plus+", "tilde~", "ümlaut"]
    for key in keys:
        store.put(key, key.encode())
    assert store.list("") == keys
    assert [store.get(key).decode() for key in keys] == keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_bucket_is_an_error_at_once(s3_url: dict, backend: str) -> None:
    store = open_store("s3://not-there/x", backend=backend, **s3_url)
    for call in (lambda: store.put("k", b"v"), lambda: store.create("k", b"v"), lambda: store.get("k")):
        with pytest.raises(StoreError, match="does not exist") as e:
            call()
        assert not isinstance(e.value, StoreUnavailable | NotFound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_object_in_a_bucket_called_bucket_is_not_found(s3_url: dict, backend: str) -> None:
    with pytest.raises(NotFound):
        open_store("s3://my-bucket/x", backend=backend, **s3_url).size("k")


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_credentials_are_an_error_at_once_and_not_repeated_in_it(weed: dict, backend: str) -> None:
    store = open_store("s3://my-bucket/x", backend=backend, **{**weed, "secret": "other-secret"})
    for call in (lambda: store.put("k", b"v"), lambda: store.create("k", b"v"), lambda: store.get("k")):
        with pytest.raises(StoreError, match="permission denied") as e:
            call()
        assert not isinstance(e.value, StoreUnavailable)
        assert "other-secret" not in str(e.value)


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
