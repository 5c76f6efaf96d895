"""Strangers at our ports: floods, silence, drips and garbage, at a bounded rate.

    python -m support.port_floods HOST:PORT... [--rate 50] [--hold 100] [--seconds 60]

For tests, drills and benchmarks (`benchmarks/floods.py`): a process of its own, so that what it
costs is its own processor time and not that of who is attacked. It knows no secret. Against each
port, in one thread each:

    flood     connects and goes, again and again
    silence   holds many connections, and says nothing
    drip      holds many connections, and says one byte of a request a second
    garbage   says what is no protocol of ours: long lines, zeros, other people's protocols
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CONNECT_S = 1.0  # the longest wait for a connection, and for room to say something
DRIP_S = 1.0  # between two bytes
GARBAGE_NBYTES = 128 << 10  # of one piece
REQUEST = b"GET /chunk/00000000000000000000000000000000-1 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + (
    b"a" * 512
)
PIECES = (
    b"\x00" * 4096,
    b"GET " * 4096,
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
    b"POST /launch HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500,  # TLS
    b'{"do": "reserve"}\n' * 100,
    b"m0001-aaaaaa " + b"f" * 32 + b"\n",
)
ATTACKS = ("flood", "silence", "drip", "garbage")

PortAt = tuple[str, int]  # host, port


@dataclass
class PortFlood:
    """Everything at once against `ports`, until `stop`. `rate`: of new connections a second in
    each flood; `hold`: connections that each of silence and drip holds, at most. `done` counts what
    was done, by kind."""

    ports: Sequence[PortAt]
    rate: float = 50.0
    hold: int = 100
    seed: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> PortFlood:
        for port in self.ports:
            for kind in ATTACKS:
                attack: Callable[[PortAt], None] = getattr(self, f"_{kind}")
                self._threads.append(threading.Thread(target=attack, args=(port,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5 * CONNECT_S)

    # ---- the attacks -----------------------------------------------------------------------------
    def _flood(self, port: PortAt) -> None:
        while not self._stop.wait(1 / self.rate):
            if s := self._open(port, "flood"):
                s.close()

    def _silence(self, port: PortAt) -> None:
        held: list[socket.socket] = []
        while not self._stop.wait(1 / self.rate):
            if len(held) >= self.hold:
                held.pop(0).close()
            if s := self._open(port, "silence"):
                held.append(s)
        for s in held:
            s.close()

    def _drip(self, port: PortAt) -> None:
        held: dict[socket.socket, int] = {}
        while not self._stop.wait(DRIP_S):
            for _ in range(min(self.hold - len(held), int(self.rate * DRIP_S))):
                if s := self._open(port, "drip"):
                    held[s] = 0
            for s, at in list(held.items()):
                try:
                    s.send(REQUEST[at % len(REQUEST) :][:1])
                    held[s] = at + 1
                except OSError:  # sent away, as it should be
                    self.done["drip: sent away"] += 1
                    s.close()
                    del held[s]
        for s in held:
            s.close()

    def _garbage(self, port: PortAt) -> None:
        rng = random.Random(f"{self.seed} {port}")
        while not self._stop.wait(4 / self.rate):
            if s := self._open(port, "garbage"):
                with contextlib.suppress(OSError), s:
                    piece = rng.choice(PIECES)
                    s.sendall(piece if rng.random() < 0.9 else rng.randbytes(GARBAGE_NBYTES))

    def _open(self, port: PortAt, kind: str) -> socket.socket | None:
        try:
            s = socket.create_connection(port, CONNECT_S)
        except OSError:  # refused, or nobody answers in time
            self.done[f"{kind}: not let in"] += 1
            return None
        self.done[kind] += 1
        return s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ports", nargs="+", help="HOST:PORT")
    parser.add_argument("--rate", type=float, default=50.0, help="new connections a second")
    parser.add_argument("--hold", type=int, default=100, help="connections held open")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    ports = [(host, int(port)) for host, _, port in (p.rpartition(":") for p in flags.ports)]
    strangers = PortFlood(ports, flags.rate, flags.hold, flags.seed)
    with strangers, contextlib.suppress(KeyboardInterrupt):
        time.sleep(flags.seconds)
    print(json.dumps(strangers.done), flush=True)
    return 0


if __name__ == "__main__":
    # a shell has it ignored in what it starts beside itself
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
