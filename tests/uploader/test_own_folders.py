"""Nothing of another user of this machine is believed, and a folder of objects has no way out."""

import errno
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from harness.uploader import handoff
from harness.uploader.handoff import UploaderConnection, UploadServer, socket_in
from harness.uploader.node_tiers import NearbyConfig
from harness.uploader.node_uploader import seen_here
from storage import FileStore, MemoryStore, NotFound, StoreError
from storage.private_folders import NotOurs, check_caller, is_ours, own_folder, why_not_ours
from storage.snapshots.staging import PREFIX, Stage, sweep
from storage.tiers.folder_tier import OwnedFolder
from support.worlds import until

ANOTHER = 1 + os.geteuid()


@pytest.fixture
def theirs(tmp_path, monkeypatch) -> Path:
    """A folder of another user: we are somebody else from here on."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    return folder


# ---- folders -------------------------------------------------------------------------------------
def test_a_folder_counts_if_it_is_ours_alone(tmp_path) -> None:
    made = own_folder(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700 and own_folder(made) == made
    made.chmod(0o755)
    assert is_ours(made)
    made.chmod(0o777)
    assert "others may write" in why_not_ours(made)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert why_not_ours(tmp_path / "link") == "it is a link"
    (tmp_path / "file").write_text("")
    assert why_not_ours(tmp_path / "file") == "it is no folder" and not is_ours(tmp_path / "no")
    with pytest.raises(NotOurs, match="wanted a folder of this user's own, but it is a link"):
        own_folder(tmp_path / "link")


def test_a_folder_of_another_user_is_not_believed(theirs) -> None:
    assert "belongs to the user" in why_not_ours(theirs)
    with pytest.raises(NotOurs, match="remove it, or name another"):
        own_folder(theirs)


def test_stages_and_tiers_of_others_are_left_alone(tmp_path, monkeypatch) -> None:
    """AUDIT 22: they could tell a root shell what lies where, and have its folders removed."""
    stage = tmp_path / f"{PREFIX}1-abc"
    stage.mkdir()
    (stage / "lock").write_text("")
    OwnedFolder(tmp_path, "run").close()
    (tier,) = tmp_path.glob("tier-*")
    with socket.socket(socket.AF_UNIX) as door:
        with socket_in(stage) as address:
            door.bind(address)
        door.listen()
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
        seen_here(tmp_path)
        assert sweep(tmp_path) == []
        with pytest.raises(ConnectionError, match="no folder of this user's own"):
            UploaderConnection(stage, connect_s=0.0)
        door.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # nobody called
            door.accept()
    with pytest.raises(NotOurs):
        OwnedFolder(tmp_path, "run")
    assert stage.exists() and tier.exists()


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path) -> None:
    stage = tmp_path / f"{PREFIX}1-abc"
    stage.mkdir()
    (tmp_path / "precious").write_text("")
    (stage / "lock").symlink_to(tmp_path / "precious")
    assert sweep(tmp_path) == [] and stage.exists()


# ---- the uploader's socket -----------------------------------------------------------------------
def test_a_socket_knows_who_is_at_its_other_end(monkeypatch) -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    with a, b:
        check_caller(a)
        if os.geteuid() != 0:
            monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
            with pytest.raises(NotOurs, match="at the other end"):
                check_caller(a)


@pytest.fixture
def uploader(tmp_path):
    stage = Stage(tmp_path, 1 << 20)
    made = UploadServer(MemoryStore(objects={}), stage.folder, 1 << 20, "m1", NearbyConfig())
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made, stage.folder
    made.stop()
    thread.join()
    stage.close()


def call(folder: Path) -> socket.socket:
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(30.0)
    with socket_in(folder) as address:
        s.connect(address)
    return s


@pytest.mark.parametrize(
    "said",
    [
        b"\n", b"null\n", b"[]\n", b'"n"\n', b"{}\n", b'{"n": "x"}\n', b"\xff\xfe\n", b"{" * 50_000 + b"\n",
        b'{"n": 1e999}\n', b"GET / HTTP/1.1\r\n\r\n", b"no newline",
    ],
)  # fmt: skip
def test_what_is_no_request_ends_that_connection_alone(uploader, said: bytes) -> None:
    _, folder = uploader
    with call(folder) as s:
        s.sendall(said)
        s.shutdown(socket.SHUT_WR)
        assert s.recv(100) == b""
    line = UploaderConnection(folder)
    assert line.ask("busy")["busy"] == 0
    line.close()


@pytest.mark.parametrize(
    "said",
    [
        {"do": "reserve"}, {"do": "reserve", "rank": 0, "epoch": 1, "nbytes": "x", "unused": []},
        {"do": "send", "job": {}, "path": "/etc/passwd"}, {"do": "send", "job": 5, "path": 5}, {"do": "held"},
        {"do": "held", "ref": "../x"}, {"do": "drain"}, {"do": "nothing"}, {},
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_answered(uploader, said: dict) -> None:
    _, folder = uploader
    with call(folder) as s, s.makefile("rb") as answers:
        s.sendall(json.dumps({"n": 3, **said}).encode() + b"\n")
        assert "error" in json.loads(answers.readline())


def test_its_connections_are_bounded(uploader, monkeypatch) -> None:
    made, folder = uploader
    made._places = threading.BoundedSemaphore(4)
    held = [call(folder) for _ in range(4)]
    for s in held:
        s.sendall(b'{"n": 1, "do": "busy"}\n')
        assert s.recv(100)
    with call(folder) as more:
        assert more.recv(100) == b""
    for s in held:
        s.close()

    def served() -> bool:
        line = UploaderConnection(folder)
        try:
            return line.ask("busy")["busy"] == 0
        except ConnectionError:
            return False
        finally:
            line.close()

    until(served, "a place")


def test_without_descriptors_it_goes_on_serving(uploader, monkeypatch) -> None:
    """One EMFILE was taken for the end."""
    made, folder = uploader
    real, failures = made._socket, iter([errno.EMFILE, errno.ENFILE])

    class Failing:
        def accept(self):
            for number in failures:
                raise OSError(number, "no descriptor")
            return real.accept()

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(handoff, "DEAF_S", 0.01)
    made._socket = Failing()
    call(folder).close()  # wakes it
    line = UploaderConnection(folder)
    assert line.ask("busy")["busy"] == 0 and next(failures, None) is None
    line.close()


# ---- folders of objects --------------------------------------------------------------------------
@pytest.mark.parametrize("link", ["a", "a/b", "a/b/key"])
def test_no_link_leads_out_of_a_folder_of_objects(tmp_path, link: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "store"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "key").write_text("mine")
    (outside / "key").write_text("mine")
    place = root / link
    place.parent.mkdir(parents=True)
    place.symlink_to({"a": outside, "a/b": outside, "a/b/key": outside / "key"}[link])
    store = FileStore(f"file://{root}")
    for call_ in (
        lambda: store.get("a/b/key"),
        lambda: store.size("a/b/key"),
        lambda: store.put("a/b/key", b"x"),
        lambda: store.create("a/b/key", b"x"),
        lambda: store.delete("a/b/key"),
        lambda: store.read_into("a/b/key", 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(StoreError, match="leads out of this folder") as e:
            call_()
        assert not isinstance(e.value, NotFound)
    assert (outside / "key").read_text() == (outside / "b" / "key").read_text() == "mine"
    assert not list(outside.rglob(".*.tmp"))


def test_the_folder_itself_may_be_a_link(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    store = FileStore(f"file://{tmp_path}/run")
    store.put("a/b", b"x")
    assert store.get("a/b") == b"x" and (tmp_path / "disk" / "a" / "b").exists()


def test_a_pipe_in_the_place_of_an_object_is_none(tmp_path) -> None:
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / "key")
    store = FileStore(f"file://{tmp_path}")
    with pytest.raises(NotFound):
        store.get("key")
    with pytest.raises(NotFound):
        store.read_into("key", 0, memoryview(bytearray(4)))


def test_very_long_names(tmp_path) -> None:
    """As long as a file system allows; more is no object, and no reason to call a store broken."""
    store, most, more = FileStore(f"file://{tmp_path}"), "x" * 255, "x" * 256
    store.put(f"a/{most}", b"1")
    assert store.create(f"a/{most}", b"2") is False and store.get(f"a/{most}") == b"1"
    for call_ in (store.get, store.size):
        with pytest.raises(NotFound):
            call_(f"a/{more}")
    for call_ in (store.put, store.create):
        with pytest.raises(StoreError, match="each part of a key has at most 255 bytes"):
            call_(f"a/{more}", b"x")
    assert store.list("") == [f"a/{most}"]
