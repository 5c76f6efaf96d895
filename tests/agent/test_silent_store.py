"""One request of an agent, worker or uploader is never answered, amid a notice: the node is heard,
commits and leaves within its grace. The store is S3 over HTTP."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.world import DRAINED
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support import buckets
from support.outside import environment, said_of, train_begin, until

pytestmark = pytest.mark.proof
GRACE_S = 30.0
# what hangs, as method and a part of its path or query
CELLS = {
    "nothing": ("", ""),
    "list of orders": ("GET", "control"),
    "read of the next epoch": ("GET", "/rdzv/"),
    "list of manifests": ("GET", "manifests"),
    "part of a snapshot": ("PUT", "/parts/"),
    "manifest": ("PUT", "/manifests/"),
    "heartbeat": ("PUT", "/rdzv/"),
    "facts": ("PUT", "/facts/"),
}


class Silence:
    """The application of a store that does not answer the first request that matches, once asked
    to begin, nor its repetition over the same connection."""

    def __init__(self, method: str, part: str):
        self.method, self.part = method, part
        self.begin, self.end, self.hung = threading.Event(), threading.Event(), 0
        self._lock = threading.Lock()

    def around(self, inner: Callable) -> Callable:
        def app(environ: dict, start_response: Callable) -> object:
            with self._lock:
                hang = self._matches(environ) and self.begin.is_set() and not self.hung
                self.hung += hang
            if hang:
                self.end.wait(120)
            return inner(environ, start_response)

        return app

    def _matches(self, environ: dict) -> bool:
        whole = f"{environ['RAW_URI']}?{environ['QUERY_STRING']}"
        return bool(self.method) and environ["REQUEST_METHOD"] == self.method and self.part in whole


@pytest.mark.parametrize("cell", CELLS)
def test_a_notice_is_answered_though_one_request_is_not(tmp_path: Path, cell: str):
    silence, run = Silence(*CELLS[cell]), f"s3://my-bucket/runs/{cell.replace(' ', '-')}"
    with buckets.moto(around=silence.around) as endpoint:
        keys = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "node",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        store = open_store(
            run,
            endpoint_url=endpoint,
            key="node",
            secret="secret",
            client_kwargs={"region_name": "us-east-1"},
        )
        process = train_begin(
            run, total=100_000, nap_s=0.05, folder=tmp_path, env=environment(**keys)
        )
        try:
            until(lambda: Snapshots(store).latest(), "a first snapshot", of=process)
            before = Snapshots(store).latest()
            silence.begin.set()
            # a call of the agent's loop hangs before the notice, the others amid it
            if cell in ("list of orders", "read of the next epoch", "heartbeat", "facts"):
                until(lambda: silence.hung, "the request", 30.0)
            began_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code, text = said_of(process, GRACE_S + 30.0)
            took_s = time.monotonic() - began_s
        finally:
            silence.end.set()
            process.kill()
        assert code == DRAINED, text
        assert took_s < GRACE_S, text
        after = Snapshots(store).latest()
        assert after is not None and before is not None and after.step > before.step, text
        print(cell, f"{took_s:.1f} s, hung {silence.hung}")
        assert silence.hung or cell == "nothing", "this request was not made"
