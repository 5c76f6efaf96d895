"""Faults of input and of services are told where they come in, within bounds, by name."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from harness.cli.command import main
from harness.notices.notice import Endpoint
from storage.errors import StoreError
from storage.stores.obstore_store import FastStore
from storage.stores.retries import Retrying
from storage.stores.store_urls import open_store

ACCOUNT = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


def test_a_fault_of_our_own_is_not_an_outage_of_the_store() -> None:
    """It would be asked again for a minute, and hide what is wrong."""
    store = FastStore("s3://bucket/run", environ={**ACCOUNT, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    with pytest.raises(TypeError):
        store.get("key", 0, "ten")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Retrying(store, 60.0).get("key", 0, "ten")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["NOPE", "SIG", "9", "sigusr1"])
def test_a_signal_that_there_is_not_is_refused_at_start(name: str, capsys, tmp_path) -> None:
    words = ["run", "--run", str(tmp_path / "run"), "--notify-signal", name, "--", "no-such-script.py"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "the name of a signal, such as USR1" in said and name in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["USR1", "SIGTERM"])
def test_signals_that_there_are_pass(name: str, capsys, tmp_path) -> None:
    words = ["run", "--run", str(tmp_path / "run"), "--notify-signal", name, "--", "no-such-script.py"]
    with pytest.raises(SystemExit):
        main(words)
    assert "no-such-script.py" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["sftp://host/run", "ftp://host/run", "zip://run", "http://127.0.0.1:9/run", "https://h/run"])
def test_stores_without_create_only_writes_are_refused_by_name(url: str) -> None:
    """At once, and before anybody is asked."""
    scheme = url.partition("://")[0]
    with pytest.raises(StoreError, match=rf"fsspec's {scheme}:// has no create-only writes|wanted create-only|fsspec cannot open"):
        open_store(url, retry_within_s=0.0)


@pytest.fixture
def trickling() -> Iterator[str]:
    """A service that answers at once, and then says one byte at a time, for ever."""
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def answer() -> None:
        wire, _ = server.accept()
        with wire:
            wire.recv(4096)
            wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\nConnection: close\r\n\r\n")
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    wire.sendall(b" ")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    stop.set()
    thread.join()
    server.close()


def test_an_answer_that_trickles_is_broken_off(trickling: str) -> None:
    """Every byte comes in time, and the whole of it would take most of a day."""
    began_s = time.monotonic()
    with pytest.raises(OSError, match="no whole answer within"):
        Endpoint(trickling).request("GET", "/latest", {}, timeout_s=0.5)
    assert time.monotonic() - began_s < 60

