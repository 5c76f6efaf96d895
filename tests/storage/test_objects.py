"""The contract that every object store must pass: memory, files, and buckets of real servers on
loopback (tests/support/buckets.py)."""

import errno
import http.server
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import botocore.session
import fsspec
import fsspec.implementations.memory
import pytest

from storage import (
    FileStore,
    FsspecStore,
    MemoryStore,
    NotFound,
    ObjectStore,
    Retrying,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from storage.stores import fsspec_store, obstore_store, probe, retries
from storage.stores.objects import abort_stale_uploads, folders, put_paced
from storage.stores.obstore_store import FastStore
from storage.stores.store_urls import BACKENDS, normalize, open_store
from storage.testing import store_contract
from storage.testing.faulty_store import FaultyStore
from storage.testing.store_contract import StoreContract
from support import buckets
from support.bad_store import NODE, Call, Gateway, Misbehaviour
from support.half_store import HalfAtFirst


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
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], ObjectStore]:
    """Opens a store whose URL ends with what is given."""
    if request.param == "memory":
        return lambda tail: open_store(f"memory://{tmp_path}{tail}")
    if request.param == "file":
        return lambda tail: open_store(f"file://{tmp_path}/runs/x{tail}")
    scheme, backend, fixture = SERVERS[request.param]
    options = request.getfixturevalue(fixture)
    return lambda tail: open_store(
        f"{scheme}://my-bucket{tmp_path}{tail}", backend=backend, **options
    )


@pytest.fixture
def store(ours: Callable[[str], ObjectStore]) -> ObjectStore:
    return ours("")


class TestStores(StoreContract):
    """Every store of ours, on every server that we have."""

    @pytest.fixture
    def opener(
        self, ours: Callable[[str], ObjectStore], request: pytest.FixtureRequest
    ) -> Callable[[str], ObjectStore]:
        # moto has no lock; SeaweedFS is who answers races here
        self.settles_races = "moto" not in request.node.name
        return ours


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def opener(self) -> Callable[[str], ObjectStore]:
        objects: dict[str, dict[str, bytes]] = {}

        def opened(tail: str) -> ObjectStore:
            url = f"memory://f{tail}".rstrip("/")
            inner = MemoryStore(url, objects.setdefault(url, {}))
            return FaultyStore(inner, random.Random(1))

        return opened


def test_the_contract_spans_parts_and_ranges() -> None:
    """What is large in the contract is large for our own stores."""
    assert store_contract.LARGE_NBYTES > 2 * obstore_store.PART_NBYTES
    assert store_contract.READ_NBYTES > 2 * obstore_store.READ_NBYTES


class Overwrites(MemoryStore):
    """Ignores the condition of a create-only write, as some S3-compatible servers do."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.put(key, data)
        return True


class Unsorted(MemoryStore):
    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[::-1]


class IgnoresRanges(MemoryStore):
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return super().get(key)


class KeyErrors(MemoryStore):
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._objects[key][start:end]


class Keeps(MemoryStore):
    """Holds what it was given instead of a copy."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._objects[key] = data  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (Overwrites, "test_create_only_once"),
        (Unsorted, "test_list_is_by_prefix_and_sorted"),
        (IgnoresRanges, "test_a_range_beyond_the_end_is_short"),
        (KeyErrors, "test_put_get_replace_delete"),
        (Keeps, "test_what_is_written_is_a_copy"),
    ],
)
def test_the_contract_finds_a_broken_store(broken: type[MemoryStore], found_by: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        getattr(StoreContract(), found_by)(broken("memory://b", {}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_bucket_is_an_error_at_once(s3_url: dict, backend: str) -> None:
    store = open_store("s3://not-there/x", backend=backend, **s3_url)
    for call in (
        lambda: store.put("k", b"v"),
        lambda: store.create("k", b"v"),
        lambda: store.get("k"),
    ):
        with pytest.raises(StoreError, match="does not exist") as e:
            call()
        assert not isinstance(e.value, StoreUnavailable | NotFound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_object_in_a_bucket_called_bucket_is_not_found(
    s3_url: dict, backend: str
) -> None:
    with pytest.raises(NotFound):
        open_store("s3://my-bucket/x", backend=backend, **s3_url).size("k")


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_credentials_are_an_error_at_once_and_not_repeated_in_it(
    weed: dict, backend: str
) -> None:
    store = open_store("s3://my-bucket/x", backend=backend, **{**weed, "secret": "other-secret"})
    for call in (
        lambda: store.put("k", b"v"),
        lambda: store.create("k", b"v"),
        lambda: store.get("k"),
    ):
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


def test_a_folder_is_no_object_and_has_no_size(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"x")
    assert store.size("a/b") == 1
    with pytest.raises(NotFound):
        store.size("a")


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


class Vanishing(Deaf):
    """The first `create` is done and not answered; then somebody deletes what it made."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        created = super().create(key, data)
        if not created and not self.gone:
            self.gone = True
            self.delete(key)
        return created

    gone = False


def test_a_create_of_unknown_outcome_that_is_deleted_before_it_is_read_back_is_done_again() -> None:
    store = Vanishing(1)
    assert Retrying(store).create("k", b"mine") is True
    assert (store.gone, store.get("k")) == (True, b"mine")


class FullFiles(fsspec.AbstractFileSystem):
    """A file system on which a write fails as it does where the disk or the quota is full."""

    protocol = "full"
    error: OSError = OSError()
    closed: ClassVar[list[str]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        raise self.error

    def _open(self, path: str, mode: str = "rb", **kwargs: object) -> object:
        closed, error = self.closed, self.error

        class File:
            def write(self, data: bytes) -> None:
                raise error

            def discard(self) -> None:
                closed.append("discarded")

            def close(self) -> None:
                closed.append("finished")

        return File()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left"),
        OSError(errno.EDQUOT, "quota"),
        OSError("QuotaExceeded: 1 TB"),
    ],
)
def test_a_full_store_is_an_error_at_once(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("full", FullFiles, clobber=True)
    FullFiles.error = error
    FullFiles.closed.clear()
    monkeypatch.setattr(fsspec_store, "BLOCK_NBYTES", 10)
    store = FsspecStore("full://x/y")
    for call in (
        lambda: store.put("k", b"v"),
        lambda: store.create("k", b"v"),
        lambda: store.put("k", b"v" * 11),
    ):
        with pytest.raises(StoreError, match="is full; free some space") as e:
            call()
        assert not isinstance(e.value, StoreUnavailable)
    assert FullFiles.closed == ["discarded"]  # a half-written object is never finished


# ---- what a server may answer to obstore ---------------------------------------------------------
@pytest.fixture
def answers() -> Iterator[tuple[list[tuple[int, str]], FastStore]]:
    """A server that gives the answers in the list, one after the other, and the last one for
    ever; and a store that talks to it."""
    script: list[tuple[int, str]] = []

    class Scripted(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, code = script.pop(0) if len(script) > 1 else script[0]
            body = (
                f"<Error><Code>{code}</Code><Message>so it is</Message></Error>".encode()
                if code
                else b""
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = answer

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    yield script, FastStore("s3://b/x", {}, key="key", secret="hush", endpoint_url=url)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "error", "match"),
    [
        (503, "SlowDown", StoreUnavailable, "503"),
        (500, "InternalError", StoreUnavailable, "500"),
        (409, "ConditionalRequestConflict", StoreUnavailable, "Conflict"),
        (507, "InsufficientStorage", StoreRefused, "is full; free some space"),
        (403, "AccessDenied", StoreRefused, "permission denied"),
        (404, "NoSuchBucket", StoreRefused, "bucket does not exist"),
        (301, "PermanentRedirect", StoreRefused, "another region"),
    ],
)
def test_what_a_server_says_becomes_the_right_error(
    answers, status: int, code: str, error: type, match: str
) -> None:  # type: ignore[no-untyped-def]
    script, store = answers
    script.append((status, code))
    with pytest.raises(StoreError, match=match) as e:
        store.create("k", b"v")
    assert type(e.value) is error
    assert "hush" not in str(e.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refusal_is_an_outage_where_the_store_has_answered(backend: str) -> None:
    """An expired token, a policy on its way: nobody may take that for the end. Who was never
    let in is told so at once."""
    refuses = threading.Event()
    with buckets.moto(refuses) as url:

        def store(patience_s: float, **more: object) -> ObjectStore:
            environ = {"STORAGE_PATIENCE_S": str(patience_s)}
            known = {
                "backend": backend,
                "key": "a",
                "secret": "b",
                "endpoint_url": url,
                "environ": environ,
                "retry_within_s": 0.05,
            }
            return open_store("s3://my-bucket/refusals", **known, **more)

        patient, hasty, newcomer, told = (
            store(900.0),
            store(0.0),
            store(900.0),
            store(900.0, answered=True),
        )
        for one in (patient, hasty):
            one.put("k", b"v")
        refuses.set()
        with pytest.raises(StoreUnavailable, match="has answered before"):
            patient.put("k", b"w")
        with pytest.raises(StoreUnavailable):
            told.put("k", b"w")
        with pytest.raises(StoreError, match="although it had answered") as late:
            hasty.put("k", b"w")
        with pytest.raises(StoreError, match="permission denied") as never:
            newcomer.put("k", b"w")
        assert not isinstance(late.value, StoreUnavailable) and not isinstance(
            never.value, StoreUnavailable
        )
        refuses.clear()
        patient.put("k", b"w")
        assert newcomer.get("k") == b"w"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_request_is_denied_alike(backend: str) -> None:
    """A listing too: an agent's round begins with one, and who takes its 403 for an outage
    waits for ever."""
    refuses = threading.Event()
    with buckets.moto(refuses) as url:
        known = {"backend": backend, "key": "a", "secret": "b", "endpoint_url": url}
        store = open_store("s3://my-bucket/denied", **known, retry_within_s=0.05)
        refuses.set()
        requests: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("k"),
            "range": lambda: store.get("k", 0, 1),
            "put": lambda: store.put("k", b"v"),
            "create": lambda: store.create("k", b"v"),
            "list": lambda: store.list("k/"),
            "folders": lambda: folders(store),
            "size": lambda: store.size("k"),
            "delete": lambda: store.delete("k"),
        }
        for name, request in requests.items():
            with pytest.raises(StoreRefused, match="permission denied"):
                print(name, request())


def test_patience_ends_and_begins_anew() -> None:
    now = [0.0]
    patience = retries.Patience(900.0, monotonic=lambda: now[0])

    def call(kind: str, t: float, refuses: bool = True) -> type | None:
        now[0] = t
        try:
            with patience.judge(kind):
                if refuses:
                    raise StoreRefused("denied")
        except StoreError as e:
            return type(e)
        return None

    assert call("write", 0) is StoreRefused  # it has never answered
    assert call("write", 1, refuses=False) is call("read", 1, refuses=False) is None
    assert call("delete", 2) is StoreRefused  # that is asked by a permission of its own
    assert {call("write", t) for t in range(2, 900, 60)} == {StoreUnavailable}
    assert call("write", 902) is StoreRefused
    assert call("write", 903, refuses=False) is None
    assert call("write", 904) is StoreUnavailable
    assert call("write", 4000) is StoreUnavailable  # nothing was asked meanwhile: another spell
    assert call("read", 4001) is StoreUnavailable


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    """A network file system whose server restarts: who took that for an empty run would begin
    it anew."""
    (tmp_path / "run").symlink_to(tmp_path / "run")  # any error but "no such folder"
    with pytest.raises(StoreError):
        open_store(f"file://{tmp_path}/run").list("snapshots/")


def test_a_create_is_never_repeated_unseen(answers) -> None:  # type: ignore[no-untyped-def]
    """If obstore repeated a write that was done and not answered, it would lose against itself."""
    script, store = answers
    script += [(503, "SlowDown"), (412, "PreconditionFailed")]
    with pytest.raises(StoreUnavailable):
        store.create("k", b"v")
    assert store.create("k", b"v") is False


def test_backends_are_chosen_by_what_they_can(
    s3_url: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(url: str, **options: object) -> type:
        store = open_store(url, **options)  # type: ignore[arg-type]
        while hasattr(store, "inner"):  # repeated, and bounded in time
            store = store.inner
        return type(store)

    assert kind("s3://b/x", **s3_url) is FastStore
    assert kind("s3://b/x", **s3_url, backend="fsspec") is FsspecStore
    assert kind("s3://b/x", **s3_url, environ={"STORAGE_BACKEND": "fsspec"}) is FsspecStore
    assert kind("s3://b/x", **s3_url, use_ssl=False) is FsspecStore  # an option of s3fs alone
    with pytest.raises(StoreError, match="obstore cannot be used: it has no such option: use_ssl"):
        open_store("s3://b/x", **s3_url, backend="obstore", use_ssl=False)
    with pytest.raises(StoreError, match="wanted one of obstore, fsspec"):
        open_store("s3://b/x", **s3_url, backend="rclone")
    with pytest.raises(StoreError, match="nosuch"):
        open_store("nosuch://b/x")
    assert (
        kind(
            "az://b/x",
            connection_string="AccountName=a;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/a",
        )
        is FastStore
    )
    assert kind("gs://b/x", token="anon", endpoint_url="http://127.0.0.1:1") is FastStore


def test_credentials_and_endpoints_by_the_clouds_own_conventions(
    moto_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of ~/.aws, which obstore itself does not read."""
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = eu-north-1\nendpoint_url = {moto_url}\n"
    )
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://my-bucket/conventions", backend="obstore")
    store.put("k", b"v")
    assert store.get("k") == b"v"
    (tmp_path / "credentials").write_text("")
    with pytest.raises(StoreError, match="no credentials found") as e:
        open_store("s3://my-bucket/conventions", backend="obstore").get("k")
    assert not isinstance(e.value, StoreUnavailable)


# ---- unfinished uploads --------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_unfinished_uploads_are_found_and_aborted(weed: dict, tmp_path: Path, backend: str) -> None:
    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=weed["endpoint_url"],
        aws_access_key_id=weed["key"],
        aws_secret_access_key=weed["secret"],
    )
    ours, other = f"{tmp_path}/run"[1:], f"{tmp_path}/other"[1:]
    for key in (f"{ours}/a", f"{ours}/b/c", f"{other}/a"):
        began = client.create_multipart_upload(Bucket="my-bucket", Key=key)
        client.upload_part(
            Bucket="my-bucket", Key=key, UploadId=began["UploadId"], PartNumber=1, Body=b"x"
        )
    store = open_store(f"s3://my-bucket/{ours}", backend=backend, **weed)
    assert abort_stale_uploads(store, older_than_s=3600.0) == []
    assert abort_stale_uploads(store, older_than_s=-60.0) == ["a", "b/c"]  # in a minute's time
    assert abort_stale_uploads(store, older_than_s=-60.0) == []
    left = client.list_multipart_uploads(Bucket="my-bucket", Prefix=f"{tmp_path}"[1:]).get(
        "Uploads", []
    )
    assert [one["Key"] for one in left] == [f"{other}/a"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_given_up_bit_by_bit_leaves_no_upload(
    weed: dict, tmp_path: Path, backend: str
) -> None:
    store = open_store(f"s3://my-bucket/{tmp_path}/run", backend=backend, **weed)
    left = iter([True] * 3)

    def gate(nbytes: int) -> bool:
        if not next(left, False):
            raise StoreError("it takes too long")
        return True

    with pytest.raises(StoreError, match="it takes too long"):
        put_paced(store, "a", bytes(40 << 20), gate)
    assert abort_stale_uploads(store, older_than_s=-60.0) == []


def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"1")
    dead = tmp_path / "a" / ".b.123.tmp"
    dead.write_bytes(b"a writer died here")
    assert abort_stale_uploads(store, older_than_s=3600.0) == []
    os.utime(dead, (1.0, 1.0))
    assert abort_stale_uploads(store, older_than_s=3600.0) == ["a/.b.123.tmp"]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["b"]


def test_a_store_is_not_refused_for_an_answer_that_was_damaged_once() -> None:
    all_hold = probe.Probe(True, True, True, True, True)
    assert probe.require(Retrying(HalfAtFirst("probed"))) == all_hold


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_an_object_is_no_answer_and_is_read_again(backend: str) -> None:
    """Half of facts were fewer facts, half of a lease's term was somebody else's, and a commit
    failed at its fence, amid a notice, for half of one small object."""
    gateway, half = Gateway(), Misbehaviour("half", Call("GET", "a"))
    with buckets.moto(around=gateway.around) as url:
        options = {"key": NODE, "secret": "s", "endpoint_url": url}
        store = open_store("s3://my-bucket", backend=backend, **options)
        store.put("a", b"1\n2\n")
        gateway.of["my-bucket"] = half
        half.begin.set()
        assert store.get("a") == b"1\n2\n" and half.met == 3
        half.met = 0
        assert store.get("a", 1) == b"\n2\n" and half.met == 3
        half.met = 0
        hurried = open_store("s3://my-bucket", retry_within_s=0.0, backend=backend, **options)
        with pytest.raises(StoreUnavailable, match="my-bucket/a: wanted 3 bytes, found 1"):
            hurried.get("a", 1)


def test_a_part_of_a_file_is_no_answer() -> None:
    folder = Path("/sys/devices/system/cpu")  # the kernel says 4096 bytes of each, and gives few
    if not (folder / "online").is_file():
        pytest.skip("there is no sysfs here")
    with pytest.raises(StoreUnavailable, match="online: wanted 4096 bytes, found"):
        FileStore(f"file://{folder}").get("online")


# ---- what a store really does --------------------------------------------------------------------
def test_probe(store: ObjectStore) -> None:
    assert probe.require(store) == probe.Probe(True, True, True, True, True)
    assert store.list("") == []
    assert probe.known(store) is None
    probe.record(store, probe.probe(store))
    assert probe.known(store) == probe.Probe(True, True, True, True, True)


class Overwrites(MemoryStore):
    """Ignores If-None-Match, as some S3-compatible servers do."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.put(key, data)
        return True


class Forgets(MemoryStore):
    """Lists only what it listed before."""

    def list(self, prefix: str) -> list[str]:
        return []


class WholeOnly(MemoryStore):
    """Ignores ranges."""

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return super().get(key)


@pytest.mark.parametrize(
    ("kind", "missing", "says"),
    [
        (Overwrites, ["create_only"], "If-None-Match is ignored"),
        (Forgets, ["list_after_write"], "lists do not show"),
        (WholeOnly, ["ranges"], "other bytes than those asked for"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused(
    kind: type[MemoryStore], missing: list[str], says: str
) -> None:
    store = kind(objects={})
    assert probe.probe(store).missing == missing
    with pytest.raises(StoreError, match=says):
        probe.require(store)
    assert store._objects == {}


# ---- keys that are none of ours, faults that are -------------------------------------------------
def foreign_keys(options: dict, folder: str) -> None:
    """What any other program may put there, in one page with what is ours."""
    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    for key in ("a//b", "a/../c", "a/./d", "/e", "a/f/"):
        client.put_object(Bucket="my-bucket", Key=f"{folder}/{key}", Body=b"theirs")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_with_empty_parts_or_dots_is_left_out(
    backend: str, s3_url: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = f"{tmp_path}".lstrip("/")
    store = open_store(f"s3://my-bucket/{folder}", backend=backend, retry_within_s=0.5, **s3_url)
    for key in ("a/0", "a/1", "a/z", "b/1"):
        store.put(key, b"ours")
    foreign_keys(s3_url, folder)
    assert store.list("") == ["a/0", "a/1", "a/z", "b/1"]
    assert store.list("a/") == ["a/0", "a/1", "a/z"]
    assert store.list("b") == ["b/1"]
    # told once
    assert [r.getMessage() for r in caplog.records if "none of ours" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert store.get("a/z") == b"ours"


def test_where_such_a_key_cannot_be_left_out_it_is_named_at_once(
    s3_url: dict, gcs_url: dict, tmp_path: Path
) -> None:
    folder = f"{tmp_path}".lstrip("/")
    store = open_store(f"gs://my-bucket/{folder}", **gcs_url)
    store.put("a/1", b"ours")
    foreign_keys(s3_url, folder)
    with pytest.raises(StoreError, match=r"a//b|a/\.\./c.*delete that object") as told:
        store.list("a/")
    assert not isinstance(told.value, StoreUnavailable)


def test_a_long_listing_is_read_page_by_page() -> None:
    pages = {"": (["r/a/1", "r/a/2/"], "more"), "more": (["r/a//3", "r/a/4"], "")}

    def page(**asked: str) -> dict:
        assert (asked["Bucket"], asked["Prefix"]) == ("b", "r/a/")
        keys, token = pages[asked.get("ContinuationToken", "")]
        return {
            "Contents": [{"Key": k} for k in keys],
            "IsTruncated": bool(token),
            "NextContinuationToken": token,
        }

    assert list(fsspec_store.list_s3_keys(page, "b", "r/", "a/")) == ["a/1", "a//3", "a/4"]


@pytest.mark.parametrize(("processors", "wanted"), [(2, [8, 4, 2, 2, 2]), (16, [8, 8, 8, 8, 8])])
def test_calls_that_write_share_what_may_be_on_its_way(monkeypatch, processors, wanted) -> None:
    monkeypatch.setattr(obstore_store.os, "cpu_count", lambda: processors)
    store = FastStore("s3://b/x", {}, key="k", secret="s", endpoint_url="http://127.0.0.1:1")
    large, at_once = bytes(obstore_store.PART_NBYTES + 1), []

    def put(_, key, data, **more):
        at_once.append(more["max_concurrency"])
        if len(at_once) < 5:  # while this one is on its way
            store.put("k", large)

    monkeypatch.setattr(obstore_store.obstore, "put", put)
    store.put("k", large)
    assert at_once == wanted
    store.put("k", large)
    assert at_once[5:] == [8]


def test_a_fault_of_ours_is_not_an_outage(s3_url: dict, tmp_path: Path) -> None:
    """It travels at once, and is not repeated for a minute."""
    tries: list[str] = []

    class Counted(FsspecStore):
        def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
            tries.append(key)
            return super().get(key, start, end)

    store = Retrying(Counted(f"s3://my-bucket{tmp_path}", **s3_url), within_s=0.5)
    store.put("k", b"0123")
    with pytest.raises(TypeError):
        store.get("k", [1])  # type: ignore[arg-type]
    assert tries == ["k"]


def test_a_store_without_create_only_writes_is_named() -> None:
    class Plain(fsspec.implementations.memory.MemoryFileSystem):
        protocol = "plain"

        def pipe_file(self, path: str, value: bytes) -> None:  # as sftp's
            super().pipe_file(path, value)

    fsspec.register_implementation("plain", Plain, clobber=True)
    with pytest.raises(StoreError, match="wanted create-only writes"):
        open_store("plain://x", retry_within_s=0.5).create("k", b"1")


def test_a_scheme_that_does_not_exist_is_not_said_to_be_obstores():
    with pytest.raises(ValueError, match=r"s4://bucket/x: .*s4.*wanted a folder") as refused:
        open_store("s4://bucket/x")
    assert "obstore" not in str(refused.value)


def test_a_secret_in_a_folder_is_for_its_owner_only(tmp_path):
    store = open_store(f"file://{tmp_path}/run")
    assert store.create("rdzv/secret.json", b"{}") and store.create("rdzv/epoch.json", b"{}")
    modes = [(tmp_path / "run/rdzv" / name).stat().st_mode & 0o777 for name in ("secret.json", "epoch.json")]
    assert modes[0] == 0o600 and modes[1] & 0o400
    store.put("rdzv/secret.json", b"[]")
    assert (tmp_path / "run/rdzv/secret.json").stat().st_mode & 0o777 == 0o600


def test_a_write_without_an_answer_is_ours_though_half_of_it_is_read_back() -> None:
    class Unheard(HalfAtFirst):
        def create(self, key: str, data: bytes | memoryview) -> bool:
            if super().create(key, data):
                raise StoreUnavailable("done, and not heard")
            return False

    assert Retrying(Unheard("unheard")).create("a", b"ours")
