"""What goes over the lines between agents, without any input or output (pure): events in, acts out.

`LinesProtocol` holds the state of one member's lines. It is told what happened (connected,
received, closed, a moment has passed) and when, and says what is to be done (connect, send, hang
up). It has no socket, thread or clock: `lines.py` gives it real ones, a simulation its own.

Wire: text lines. To followers: name, then records (one JSON line each) and empty lines (pulses).
From followers: their name, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST_NBYTES = 64 * 1024  # of a line on the wire; more is not ours
FOLLOWERS = 1024  # more than that are sent away
CONNECT_S = 1.0  # for a connection and the first word on it
SILENT_PULSES = 3.0  # so many pulses missed: the line is made anew
WAKE_S = 0.05  # the shortest time between two attempts to make a line

Address = tuple[str, int]


@dataclass(frozen=True)
class Heard:
    """What is known of one member over its line. `refused`: its machine says that nobody of
    that name is there."""

    up: bool = False
    refused: bool = False
    record: bytes = b""  # the newest it sent
    seen: bool = False  # it was up at least once


SILENCE = Heard()


# ---- acts: what the hands are to do --------------------------------------------------------------
@dataclass(frozen=True)
class Dial:
    """Connect to `address`; answer with `connected` or `closed`."""

    conn: int
    address: Address


@dataclass(frozen=True)
class Transmit:
    """Small; on a connection that does not take it whole at once: drop it, and say `closed`."""

    conn: int
    data: bytes


@dataclass(frozen=True)
class HangUp:
    """Close it. No `closed` follows."""

    conn: int


@dataclass(frozen=True)
class Heed:
    """Something was heard that may matter to who waits."""


LineAct = Dial | Transmit | HangUp | Heed


@dataclass
class _Line:
    """Ours to one member that we follow."""

    name: str
    address: Address
    heard: Heard = SILENCE
    conn: int | None = None
    buffer: bytes = b""
    greeted: bool = False
    last_s: float = 0.0  # when we heard something, or began to connect
    retry_s: float = 0.0


@dataclass
class LinesProtocol:
    """The lines of the member `name`. Times are seconds of any one monotonic clock. After each
    event, `take` the acts and carry them out in order."""

    name: str
    pulse_s: float
    now: float
    record: bytes = b""  # our newest
    wanted: dict[str, Address] = field(default_factory=dict)  # whom we follow
    stranger_called: bool = False
    _lines: dict[str, _Line] = field(default_factory=dict)
    _by_conn: dict[int, _Line] = field(default_factory=dict)
    _followers: set[int] = field(default_factory=set)
    _acts: list[LineAct] = field(default_factory=list)
    _pulse_due_s: float = 0.0
    _conns: int = 0  # so many had a number

    def __post_init__(self) -> None:
        self._pulse_due_s = self.now + self.pulse_s

    # ---- what the member wants and asks ----------------------------------------------------------
    def tell(self, record: bytes) -> None:
        """Our newest record (JSON without a newline), to all who follow us."""
        self.record = record
        self._send_all(record + b"\n")

    def follow(self, members: Mapping[str, Address], now: float) -> None:
        """Keep a line to each of these, and to nobody else."""
        if self.wanted == members:
            return
        self.wanted = dict(members)
        for name in [n for n, ln in self._lines.items() if members.get(n) != ln.address]:
            self._hang_up(self._lines.pop(name), now)
        for name, address in self.wanted.items():
            if name not in self._lines:
                self._dial(self._lines.setdefault(name, _Line(name, address)), now)

    def heard(self, name: str) -> Heard:
        line = self._lines.get(name)
        return line.heard if line else SILENCE

    def all_up(self) -> bool:
        """Do we hear everybody whom we follow?"""
        return all(self._lines[name].heard.up for name in self.wanted)

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""
        called, self.stranger_called = self.stranger_called, False
        return called

    # ---- what the hands ask ----------------------------------------------------------------------
    def take(self) -> list[LineAct]:
        """What is to be done since the last time."""
        acts, self._acts = self._acts, []
        return acts

    def wait_s(self, now: float) -> float:
        """Until the next `tick` is due."""
        retries = [ln.retry_s for ln in self._lines.values() if ln.conn is None]
        due_s = min([self._pulse_due_s, *retries])
        return min(max(due_s - now, 0.0), self.pulse_s)

    # ---- events ----------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Time has passed: pulses are sent, silent and broken lines are made anew."""
        for line in list(self._lines.values()):
            if line.conn is None:
                if now >= line.retry_s:
                    self._dial(line, now)
            elif now - line.last_s > (SILENT_PULSES * self.pulse_s if line.greeted else CONNECT_S):
                self._hang_up(line, now)
        if now >= self._pulse_due_s:
            self._pulse_due_s = now + self.pulse_s
            self._send_all(b"\n")

    def accepted(self, now: float) -> int:
        """Somebody connected to us. The connection's number."""
        conn = self._number()
        if len(self._followers) >= FOLLOWERS:
            self._acts.append(HangUp(conn))
            return conn
        self._followers.add(conn)
        greeting = self.name.encode() + b"\n" + (self.record + b"\n" if self.record else b"")
        self._acts.append(Transmit(conn, greeting))
        return conn

    def connected(self, conn: int, now: float) -> None:
        """A connection that we asked for is there."""
        if conn in self._by_conn:
            self._acts.append(Transmit(conn, self.name.encode() + b"\n"))

    def closed(self, conn: int, now: float, refused: bool = False) -> None:
        """A connection has ended, or could not be made. `refused`: its machine says that nobody
        is there."""
        if line := self._by_conn.pop(conn, None):
            line.conn = None
            self._ended(line, now, refused)
        self._followers.discard(conn)

    def received(self, conn: int, data: bytes, now: float) -> None:
        """Bytes came."""
        if line := self._by_conn.get(conn):
            self._listen(line, data, now)
        elif conn in self._followers and data.strip().decode(errors="replace") not in self._lines:
            self.stranger_called = True
            self._acts.append(Heed())

    # ---- ours to others --------------------------------------------------------------------------
    def _number(self) -> int:
        self._conns += 1
        return self._conns

    def _send_all(self, data: bytes) -> None:
        self._acts += [Transmit(conn, data) for conn in sorted(self._followers)]

    def _dial(self, line: _Line, now: float) -> None:
        line.conn, line.buffer, line.greeted, line.last_s = self._number(), b"", False, now
        self._by_conn[line.conn] = line
        self._acts.append(Dial(line.conn, line.address))

    def _hang_up(self, line: _Line, now: float, refused: bool = False) -> None:
        if line.conn is not None:
            del self._by_conn[line.conn]
            self._acts.append(HangUp(line.conn))
            line.conn = None
        self._ended(line, now, refused)

    def _ended(self, line: _Line, now: float, refused: bool) -> None:
        # one that was up is asked at once whether it is still there
        line.retry_s = now + (WAKE_S if line.greeted else self.pulse_s)
        line.greeted = False
        self._learn(line, Heard(False, refused, line.heard.record, line.heard.seen))

    def _learn(self, line: _Line, heard: Heard) -> None:
        if heard != line.heard:
            line.heard = heard
            self._acts.append(Heed())

    def _listen(self, line: _Line, said: bytes, now: float) -> None:
        line.last_s = now
        *whole, line.buffer = (line.buffer + said).split(b"\n")
        if len(line.buffer) > LONGEST_NBYTES:
            self._hang_up(line, now)
            return
        if whole and not line.greeted:
            if whole.pop(0) != line.name.encode():  # the port is another's now
                self._hang_up(line, now, refused=True)
                return
            line.greeted = True
        if line.greeted:
            records = [w for w in whole if w]
            newest = records[-1] if records else line.heard.record
            self._learn(line, Heard(True, False, newest, True))
