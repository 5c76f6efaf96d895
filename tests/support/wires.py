"""Every wire that strangers reach, and random bytes for it."""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.world import BadInput
from harness.local.aws_metadata import AwsImds
from harness.local.azure_metadata import AzureScheduledEvents
from harness.local.gcp_metadata import GcpMetadata
from harness.local.metadata_reply import Answer
from harness.local.provider import _route
from harness.rendezvous.gossip import MOST_NAMES, Gossip
from harness.rendezvous.peer_heartbeats import (
    INTRODUCTION_NBYTES,
    LONGEST_NBYTES,
    SAID_NBYTES,
    Dial,
    Door,
    HeartbeatProtocol,
    Transmit,
)

KEY = "0123456789abcdef" * 2
FIRST, ANSWER = b"1" * 32, b"2" * 32  # proofs of something else
ONCE = b"0" * 32
PROVES = b"<the right proof>"
RECORD = json.dumps({"member": "c", "beat": 3, "state": "in", "key": KEY}).encode()
SAID = st.one_of(
    st.binary(max_size=600),
    st.sampled_from(
        [
            b"a\n", b"a " + FIRST + b"\n", b"a 2 " + ONCE + b"\n", b"a 2 " + ONCE[1:] + b"\n", b"\n", b" \n",
            b"c 2 " + ONCE + b"\n", b"2 " + ONCE + b"\n", b"a 3 " + ONCE + b"\n", PROVES, PROVES, ONCE * 2 + b"\n",
            b"c " + ANSWER + b"\n", b"c\n", b"c " + FIRST + b"\n", RECORD + b"\n", b"@c 9 " + RECORD + b"\n",
            b"@c x {}\n", b"?c 3 3\n", b"?b 9 3\n", b"@" * 300, b"x" * 70_000, b"[" * 5000 + b"\n",
            b"@c 9 " + b"[" * 60_000 + b"\n", b"?c " + b"9" * 5000 + b" 1\n", "\u2028\u0000é\n".encode(), b"\xff\xfe\n",
        ]
    ),
)  # fmt: skip
PLAIN: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)


def lines(pieces: list[tuple[int, bytes]]) -> None:
    """Three callers, and one member that we follow, say anything in any order."""
    p = HeartbeatProtocol("b", 0.5, 0.0, KEY)
    p.follow({"c": Door("h", 1, KEY)}, 0.0, passing=True)
    p.tell(b'{"member": "b", "beat": 1, "key": "' + KEY.encode() + b'"}')
    (dial,) = [a for a in p.take() if isinstance(a, Dial)]
    p.connected(dial.conn, 0.0)
    conns = [dial.conn, *(p.accepted(0.0, "h") for _ in range(3))]
    proven, asked = {dial.conn}, dict[int, bytes]()  # what a caller must say
    for who, data in pieces:
        conn = conns[who % len(conns)]
        if data == PROVES:
            data = asked.get(conn, b"?") + b"\n"
            caller = p._callers.get(conn)
            if conn in asked and caller and not caller.said:
                proven.add(conn)
        p.received(conn, data, 0.1)
        for act in p.take():
            if isinstance(act, Transmit):
                assert KEY.encode() not in act.data
                if act.conn not in proven:  # a stranger is told a number, once
                    assert re.fullmatch(rb"2 [0-9a-f]{32}\n", act.data) and act.conn not in asked
                    shaken = p._callers[act.conn].handshake
                    assert shaken is not None
                    asked[act.conn] = shaken.proof("call", "b", p._callers[act.conn].name).encode()
    for caller in p._callers.values():
        assert len(caller.said) <= max(SAID_NBYTES, INTRODUCTION_NBYTES)
    assert all(len(line.buffer) <= LONGEST_NBYTES for line in p._lines.values())
    p.tick(10.0)


def gossip(said: list[bytes]) -> None:
    g = Gossip("me")
    for i, line in enumerate(said):
        name, on = g.hear(line, float(i), False)
        assert name != "me" and on.count(b"\n") <= 1
        g.learn(name or "x", line)
    assert len(g.records) <= MOST_NAMES and len(g.doubts) <= MOST_NAMES


def provider(asked: tuple[str, str, Any]) -> None:
    """What a caller with the token may say wrong is answered, and nothing else happens."""

    class Provider:
        def __getattr__(self, name: str) -> Any:
            if name == "config":
                return type("Config", (), {"offers": ()})
            return lambda *_: {}

    with contextlib.suppress(BadInput, KeyError, TypeError, ValueError):
        _route(Provider(), *asked)  # type: ignore[arg-type]


def metadata(asked: tuple[str, str, dict[str, str], bytes]) -> None:
    for service in (AwsImds("i-1"), GcpMetadata("i-1"), AzureScheduledEvents("i-1")):
        assert isinstance(service.answer(*asked), Answer)
        service.release()


PATHS = st.sampled_from(
    [
        "/", "//", "/launch", "/event", "/inject", "/terminate", "/latest/meta-data/spot/instance-action",
        "/latest/api/token", "/computeMetadata/v1/instance/?recursive=true", "/metadata/scheduledevents?api-version=x",
        "/latest/meta-data/../..", "?", "/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=0",
    ]
) | st.text(max_size=40)  # fmt: skip
WORDS = st.text(st.characters(codec="ascii"), max_size=20)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-aws-ec2-metadata-token", "x-aws-ec2-metadata-token-ttl-seconds", "metadata-flavor", "metadata"]
    ),
    WORDS | st.sampled_from(["true", "Google", "60", "-1", "9" * 400]),
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE"])
WIRES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "lines": (st.lists(st.tuples(st.integers(0, 3), SAID), max_size=8), lines),
    "gossip": (st.lists(SAID, max_size=8), gossip),
    "provider": (
        st.tuples(METHODS, PATHS, st.dictionaries(
            st.sampled_from(["attempt", "event", "offer", "command", "cwd", "env", "grace_s", "victim", "x"])
            , VALUES | st.sampled_from(["preempt", "kill", "1"]))),
        provider,
    ),
    "metadata": (st.tuples(METHODS, PATHS, HEADERS, st.binary(max_size=100)), metadata),
}  # fmt: skip


def fuzz(name: str, examples: int) -> None:
    said, check = WIRES[name]
    few = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    few(given(said)(check))()
