"""Hostile objects in a bucket, and hostile answers of metadata services, as tables.

Garbage in the place of every kind of object, before every command that reads a run; strange objects
that lie about before a controller takes over, and beside a live agent; what a service on a node's
link may say to each cloud's source of notices.
"""

from __future__ import annotations

import functools
import http.server
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from harness.agent.run_orders import RunOrders
from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease
from harness.bucket.layout import Member
from harness.bucket.member_heartbeats import HeartbeatReader
from harness.bucket.orders import stop_order
from harness.cli import command as cli
from harness.lab.simulation.sim_world import VirtualClock
from harness.ledger.attempts import AttemptHistory
from harness.notices.aws import AwsSource
from harness.notices.azure import AzureSource
from harness.notices.gcp import PREEMPTED, GcpSource
from harness.notices.notice import NoticeSource, step
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.rendezvous import Rendezvous
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from support.histories import whole_run
from support.hostile import Case, command, scratch, wrong

DEEP = b"[" * 100_000
Damage = Callable[[bytes], bytes]
GARBAGE: dict[str, Damage] = {
    "empty": lambda data: b"",
    "null": lambda data: b"null",
    "a list": lambda data: b"[]",
    "an empty object": lambda data: b"{}",
    "a number": lambda data: b"5",
    "text": lambda data: b"hello, world\n",
    "other bytes": lambda data: bytes(range(256)) * 8,
    "cut in half": lambda data: data[: len(data) // 2],
    "too deep": lambda data: DEEP,
    "a huge number": lambda data: b'{"version":' + b"9" * 5000 + b"}",
    "not finite": lambda data: b'{"t":NaN,"version":Infinity,"step":-Infinity}',
    "another version": lambda data: b'{"version":999,"protocol":999}',
    "other types": lambda data: b'{"version":[],"fact":{},"t":"<b>","member":5,"reason":[1],"h":1}',
    "escapes": lambda data: b'{"reason":"\\u001b]0;x\\u0007[/red]<script>","fact":"\\ud800"}',
}
KINDS = (
    "run.json", "facts/controller-", "facts/agent-", "samples/", "snapshots/manifests/", "lease/",
    "rdzv/epochs/", "rdzv/members/", "control/", "setup/", "logbook/", "alerts/",
)  # fmt: skip
COMMANDS = (
    ("status", "run", "--once"), ("runs", "report", "run"), ("prove", "verify", "run"), ("logs", "run"),
    ("runs", "costs", "run"), ("runs", "postmortem", "run"), ("snapshots", "list", "run"),
)  # fmt: skip


@functools.cache
def whole() -> Path:
    made = scratch("whole")
    store = open_store(str(made / "run"))
    whole_run(store)
    member = Member("m0001-abcdef", "ready", 1, "127.0.0.1", 1, 29500, nproc=1)
    store.put("rdzv/members/m0001-abcdef.json", member.encode())
    store.put("lease/000001.json", b'{"holder":"a","ttl_s":5.0}')
    store.put("control/stop.json", b'{"reason":"enough","by":"user"}')
    (made / "run" / "local-cloud").mkdir()  # so that nobody asks SkyPilot
    (made / "run" / "local-cloud" / "config.json").write_text("{}")
    return made


def garbage(class_of: str, words: tuple[str, ...]) -> Case:
    """One object of every kind is damaged so."""

    def run() -> str:
        made = scratch("garbage")
        shutil.copytree(whole(), made, dirs_exist_ok=True)
        (made / "home").mkdir()
        store = open_store(str(made / "run"))
        for kind in KINDS:
            if keys := store.list(kind):
                key = keys[len(keys) // 2]
                store.put(key, GARBAGE[class_of](store.get(key)))
        told = command(cli.main, words, made)
        shutil.rmtree(made)
        return wrong(told, statuses=(0, 1, 2))

    return Case(f"{class_of}: {' '.join(words[:-1])}", run)


def all_garbage() -> list[Case]:
    return [garbage(one, words) for one in GARBAGE for words in COMMANDS]


def some_garbage() -> list[Case]:
    """Each class before one command, in turn."""
    return [garbage(one, COMMANDS[n % len(COMMANDS)]) for n, one in enumerate(GARBAGE)]


# ---- before a takeover, and beside a live agent --------------------------------------------------
STRANGE = {
    "lease/notes.json": b"{}",
    "lease/x.json~": DEEP,
    "lease/000009.beat": b"",
    "facts/controller-x/000000.jsonl": DEEP,
    "facts/controller-y/000000.jsonl~": b"\xff\xfe",
    "control/stop.json": b"",
    "control/leave-xyz.json": b"[]",
    "control/doubt-abc": DEEP,
    "rdzv/epochs/x.json~": b"{}",
    "rdzv/epochs/000007.json": b"",
    "rdzv/members/m0003-ffffff.json": b"",
    "rdzv/members/..json": DEEP,
    "rdzv/members/m0004-eeeeee.json": b'{"name":"m0004-eeeeee","nproc":1e300,"state":5}',
    "snapshots/manifests/readme.txt": b"hello",
    "run.json": b'{"version":1,"global_batch":"<b>","micro_batch":0}',
}


def takeover(key: str) -> Case:
    def run() -> str:
        store, clock = MemoryStore("memory://takeover", {}), VirtualClock()
        Lease(store, clock, "a").acquire()
        store.put(key, STRANGE[key])
        term = Lease(store, clock, "b").acquire()
        book = AttemptHistory.of(read_facts(store, "controller-", steps=False), random.Random(0))
        HeartbeatReader(store, clock.now).look()
        order = stop_order(store)
        if order is not None and not order.reason:
            return "an order without a reason"
        return "" if term == 2 and not book.open else f"term {term}, open {book.open}"

    return Case(f"takeover: {key}", run)


def live_agent(key: str) -> Case:
    """A member goes on as far as it can see, and forms its world with the strange object there."""

    def run() -> str:
        store, now = MemoryStore("memory://agent", {}), [0.0]
        with closing(PeerConnections("m0001-aaaaaa", "127.0.0.1", pulse_s=0.2)) as lines:
            me = Member("m0001-aaaaaa", "ready", 0, "127.0.0.1", lines.port, 29500, nproc=1, attempt=1)
            rendezvous = Rendezvous(
                store, me, lines, beat_s=1.0, dead_s=5.0, join_window_s=1.0, monotonic=lambda: now[0]
            )
            state = RunOrders(store, me.member, 1, 3600.0)
            rendezvous.say()
            store.put(key, STRANGE[key])
            epoch = None
            for _ in range(40):
                now[0] += 1.0
                state.look()
                state.stop(), state.requests(), state.unled(now[0]), state.room()
                state.is_over(), state.released()
                rendezvous.say()
                rendezvous.look()
                epoch = epoch or rendezvous.try_form(None)
            return "" if epoch is not None else "it formed no world in 40 s"

    return Case(f"live agent: {key}", run)


def strange() -> list[Case]:
    return [*map(takeover, STRANGE), *map(live_agent, STRANGE)]


# ---- metadata services ---------------------------------------------------------------------------
ANSWERS: dict[str, tuple[int, bytes]] = {
    "nothing": (200, b""),
    "text": (200, b"hello"),
    "a page": (200, b"<html><script>alert(1)</script></html>"),
    "null": (200, b"null"),
    "a list": (200, b"[]"),
    "too deep": (200, DEEP),
    "other bytes": (200, bytes(range(256))),
    "escapes": (200, b"\x1b]0;owned\x07"),
    "huge": (200, b"x" * (3 << 20)),
    "other types": (200, b'{"action":5,"time":[],"Events":{"EventId":{}},"DocumentIncarnation":"x"}'),
    "not finite": (200, b'{"action":"terminate","time":NaN,"Events":[{"NotBefore":1e999}]}'),
    "a strange status": (299, b"{}"),
}
SOURCES: dict[str, Callable[[str], NoticeSource]] = {
    "aws": lambda at: AwsSource(at, maintenance_every_s=0, pace_s=0.02),
    "gcp": lambda at: GcpSource(at, PREEMPTED, hang_s=0.05, pace_s=0.02),
    "azure": lambda at: AzureSource(at, first_timeout_s=2.0, pace_s=0.02),
}


def answer(cloud: str, name: str) -> Case:
    """Two polls: no notice is made of it, and the source can be asked again."""
    status, body = ANSWERS[name]

    class Hostile(http.server.BaseHTTPRequestHandler):
        def _say(self) -> None:
            self.send_response(status)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = _say

        def log_message(self, *_: object) -> None:
            pass

    def run() -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        heard: list[object] = []
        source = SOURCES[cloud](f"http://127.0.0.1:{server.server_port}")
        try:
            known = step(source, {}, heard.append, heard.append)
            step(source, known, heard.append, heard.append)
        except Exception as e:
            return f"the source ends: {type(e).__name__}: {e}"[:200]
        finally:
            source.close()
            server.shutdown()
            server.server_close()
            thread.join()
        return f"it took this for a notice: {heard[0]!r:.100}" if heard else ""

    return Case(f"{cloud} answers {name}", run)


def answers() -> list[Case]:
    return [answer(cloud, name) for cloud in SOURCES for name in ANSWERS]
