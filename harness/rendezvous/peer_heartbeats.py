"""The protocol of the lines between agents, without input or output (pure): events in, acts out.

`HeartbeatProtocol` holds the state of one member's lines. Its methods take events (connected,
received, closed, a tick) with their times, and it returns acts (connect, send, hang up). It has no
socket, thread or clock: `peer_connections.py` gives it real ones, a simulation its own.

Wire: text lines. A caller sends its name, the version of this greeting, and a number that is used
once; the callee sends only such a number. The caller then proves by both numbers that it knows the
key in the callee's member object, so that it can read the run's bucket. The answer is the callee's
name and a proof that it knows the key too; then its records (one JSON line each), empty lines
(pulses), and what it passes on of others (gossip.py).

    a 2 <number>      ->
                      <-  2 <number>
    <proof "call">    ->
                      <-  b <proof "answer">, then records

Keys never travel, and a recorded proof is worthless on another connection. Callers that have not
introduced themselves have little time and few places; the oldest loses its place first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.rendezvous.gossip import Gossip, GossipReport, Grade, Relays, subject, without_key
from storage.tiers.peer_transport import NUMBER, Handshake, proofs_equal, sign

LONGEST_NBYTES = 64 * 1024  # of a line on the wire; a longer one is not of our protocol
FOLLOWERS = 1024  # callers that have introduced themselves; more are disconnected
STRANGERS = 64  # callers that have not; the oldest is disconnected for a new one
STRANGERS_EACH = 16  # ... of one address
INTRODUCE_S = 2.0  # time for an introduction
INTRODUCTION_NBYTES = 256
SAID_NBYTES = 4096  # limit of further input from followers, which should send none
CALLERS = 256  # names of callers that are kept until they are read
CONNECT_S = 1.0  # for a connection and the first line on it
SILENT_PULSES = 3.0  # after so many missed pulses the line is reconnected
GREETING = "2"  # version of the greeting
WAKE_S = 0.05  # the shortest time between two attempts to connect a line

Address = tuple[str, int]


class Door(NamedTuple):
    """The address for lines to a member. `key`: secret of its callers."""

    host: str
    port: int
    key: str


@dataclass(frozen=True)
class PeerStatus:
    """The state of our line to one member. `refused`: its machine answers that no such member is
    there."""

    up: bool = False
    refused: bool = False
    record: bytes = b""  # the newest that was received
    seen: bool = False  # the line was up at least once


SILENCE = PeerStatus()


# ---- acts, to be carried out by the owner of the sockets -----------------------------------------
@dataclass(frozen=True)
class Dial:
    """Connect to `address`, then call `connected` or `closed`."""

    conn: int
    address: Address


@dataclass(frozen=True)
class Transmit:
    """Send data. If the connection does not take it in time, drop it and call `closed`."""

    conn: int
    data: bytes


@dataclass(frozen=True)
class HangUp:
    """Close a connection, without a call of `closed`."""

    conn: int


@dataclass(frozen=True)
class Heed:
    """Wake up waiting code: something was received that may matter."""


LineAct = Dial | Transmit | HangUp | Heed


@dataclass
class _Line:
    """Our line to one member that we follow."""

    name: str
    door: Door
    heard: PeerStatus = SILENCE
    conn: int | None = None
    buffer: bytes = b""
    number: str = ""  # our number; "": none is needed, or the callee's has been received
    answer: str = ""  # its expected first line, which proves that it knows the key
    greeted: bool = False
    renewed: bool = False  # the last one that was up was closed by `renew`
    last_s: float = 0.0  # when we last received something, or began to connect
    retry_s: float = 0.0


@dataclass
class _Caller:
    """A connection from a caller."""

    host: str
    since_s: float
    said: bytes = b""  # buffer of received bytes
    name: str = ""  # that it claims
    handshake: Handshake | None = None  # its proof is awaited
    introduced: bool = False  # it has proved that it can read the bucket


@dataclass(frozen=True)
class _Wish:
    """The members that we follow, and whether we pass news on."""

    members: dict[str, Door] = field(default_factory=dict)
    passing: bool = False


@dataclass
class _Knocks:
    """Calls that were received since they were last read."""

    stranger: bool = False
    names: set[str] = field(default_factory=set)  # callers that proved to belong to the run


@dataclass
class HeartbeatProtocol:
    """The lines of the member `name`; `key` is in its object. Times are seconds of one monotonic
    clock. After each event, `take` the acts and carry them out in order.
    """

    name: str
    pulse_s: float
    now: float
    key: str
    record: bytes = b""  # our newest
    _wish: _Wish = field(default_factory=_Wish)
    _knocks: _Knocks = field(default_factory=_Knocks)
    _gossip: Gossip = field(default_factory=lambda: Gossip(""))
    _lines: dict[str, _Line] = field(default_factory=dict)
    _by_conn: dict[int, _Line] = field(default_factory=dict)
    _callers: dict[int, _Caller] = field(default_factory=dict)  # oldest first
    _acts: list[LineAct] = field(default_factory=list)
    _relays: Relays = field(default_factory=Relays)
    _pulse_due_s: float = 0.0
    _conns: int = 0  # connections that were numbered

    def __post_init__(self) -> None:
        self._pulse_due_s, self._gossip = self.now + self.pulse_s, Gossip(self.name)

    # ---- calls of the member ---------------------------------------------------------------------
    def tell(self, record: bytes) -> None:
        """Send our newest record (JSON without a newline) to all followers."""
        self.record = without_key(record)
        self._send_all(self.record + b"\n")

    def follow(self, members: Mapping[str, Door], now: float, passing: bool = False) -> None:
        """Keep a line to each of these members, and to no others. `passing`: pass news on."""
        before = self._wish
        doors = {name: Door(*door) for name, door in members.items()}
        self._wish = _Wish(doors, passing)
        if passing and not before.passing:
            self._send_all(self._gossip.all())
        if doors != before.members:
            for name in [n for n, ln in self._lines.items() if doors.get(n) != ln.door]:
                self._hang_up(self._lines.pop(name), now, ours=True)
            for name, door in doors.items():
                if name not in self._lines:
                    self._dial(self._lines.setdefault(name, _Line(name, door)), now)

    def renew(self, now: float) -> None:
        """Replace each line that is up by a new one: an open connection does not prove that new
        ones can be made, and training makes some. Until it is up, a refusal is no death: the
        member was there a moment ago."""
        for line in self._lines.values():
            if line.heard.up:
                self._hang_up(line, now, ours=True)
                self._learn(line, replace(line.heard, up=False))
                line.renewed, line.greeted = True, False
                self._dial(line, now)

    @property
    def wanted(self) -> dict[str, Door]:
        """The members that we follow."""
        return self._wish.members

    def share(self, name: str, record: bytes, now: float) -> None:
        """Pass a member's record from the bucket on if it is news."""
        self._pass_on(self._gossip.learn(name, record), now)

    def doubt(self, name: str, now: float) -> None:
        """Report to followers that we found a member dead."""
        self._pass_on(self._gossip.doubt(name, Grade.DEAD, now), now)

    def heard(self, name: str) -> PeerStatus:
        line, known = self._lines.get(name), self._gossip.records.get(name)
        heard = line.heard if line else SILENCE
        if known is None or known.text == heard.record:
            return heard
        return PeerStatus(heard.up, heard.refused, known.text, heard.seen)

    def overheard(self) -> GossipReport:
        """Return all hearsay; new records and callers are returned once."""
        callers, self._knocks.names = frozenset(self._knocks.names), set()
        return self._gossip.overheard(callers)

    def all_up(self) -> bool:
        """Return whether the lines to and from all followed members are up. A member without a line
        to us must see our heartbeats in the bucket."""
        return self.wanted.keys() <= self.reached()

    def reached(self) -> frozenset[str]:
        """Return the followed members whose lines are up both ways."""
        callers = {c.name for c in self._callers.values() if c.introduced}
        return frozenset(n for n in self.wanted if n in callers and self._lines[n].heard.up)

    def knocked(self) -> bool:
        """Return whether a stranger has called since the last call of this method."""
        called, self._knocks.stranger = self._knocks.stranger, False
        return called

    # ---- calls of the owner of the sockets -------------------------------------------------------
    def take(self) -> list[LineAct]:
        """Return the acts since the last call."""
        acts, self._acts = self._acts, []
        return acts

    def has_acts(self) -> bool:
        return bool(self._acts)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next `tick` is due."""
        retries = [ln.retry_s for ln in self._lines.values() if ln.conn is None]
        due_s = min([self._pulse_due_s, self._relays.due_s, *retries])
        return min(max(due_s - now, 0.0), self.pulse_s)

    # ---- events ----------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Send pulses, reconnect silent and broken lines, and disconnect callers that have not
        introduced themselves in time."""
        for line in list(self._lines.values()):
            if line.conn is None:
                if now >= line.retry_s:
                    self._dial(line, now)
            elif now - line.last_s > (SILENT_PULSES * self.pulse_s if line.greeted else CONNECT_S):
                self._hang_up(line, now, silent=line.greeted)
        for conn, caller in list(self._callers.items()):
            if not caller.introduced and now - caller.since_s > INTRODUCE_S:
                self._send_away(conn)
        if now >= self._relays.due_s:
            self._relay()
        if now >= self._pulse_due_s:
            self._pulse_due_s = now + self.pulse_s
            self._send_all(b"\n")

    def accepted(self, now: float, host: str = "") -> int:
        """Handle a new connection from `host`, and return its number."""
        conn = self._number()
        strangers = {c: caller for c, caller in self._callers.items() if not caller.introduced}
        of_host = [c for c, caller in strangers.items() if caller.host == host]
        if len(of_host) >= STRANGERS_EACH:
            self._send_away(of_host[0])
        elif len(strangers) >= STRANGERS:
            # the address with the most places loses its oldest
            greedy = Counter(caller.host for caller in strangers.values()).most_common(1)[0][0]
            self._send_away(next(c for c, caller in strangers.items() if caller.host == greedy))
        self._callers[conn] = _Caller(host, now)
        return conn

    def connected(self, conn: int, now: float) -> None:
        """Handle a connection that we requested, and send the greeting."""
        if line := self._by_conn.get(conn):
            line.number = self._once(conn)
            self._acts.append(Transmit(conn, f"{self.name} {GREETING} {line.number}\n".encode()))

    def closed(self, conn: int, now: float, refused: bool = False) -> None:
        """Handle a connection that has ended, or could not be made. `refused`: its machine answers
        that no process listens there."""
        if line := self._by_conn.pop(conn, None):
            line.conn = None
            self._ended(line, now, refused)
        self._callers.pop(conn, None)

    def received(self, conn: int, data: bytes, now: float) -> None:
        """Handle received bytes."""
        if line := self._by_conn.get(conn):
            self._listen(line, data, now)
        elif caller := self._callers.get(conn):
            self._hear_caller(conn, caller, data)

    # ---- lines of others to us -------------------------------------------------------------------
    def _hear_caller(self, conn: int, caller: _Caller, data: bytes) -> None:
        caller.said += data
        if caller.introduced:
            if len(caller.said) > SAID_NBYTES:
                self._send_away(conn)
            return
        word, newline, more = caller.said.partition(b"\n")
        if not newline and len(word) <= INTRODUCTION_NBYTES:
            return
        caller.said = more
        said = word.decode(errors="replace") if newline else ""
        if caller.handshake is not None:
            self._hear_proof(conn, caller, said)
        else:
            self._hear_name(conn, caller, said)

    def _hear_name(self, conn: int, caller: _Caller, said: str) -> None:
        name, _, rest = said.partition(" ")
        version, _, number = rest.partition(" ")
        caller.name = name or "?"
        if version != GREETING or not NUMBER.fullmatch(number):
            self._send_away(conn)
            return
        mine = self._once(conn)
        caller.handshake = Handshake(self.key, number, mine)
        self._acts.append(Transmit(conn, f"{GREETING} {mine}\n".encode()))

    def _hear_proof(self, conn: int, caller: _Caller, said: str) -> None:
        name, shaken = caller.name, caller.handshake
        if shaken is None or not proofs_equal(said, shaken.proof("call", self.name, name)):
            self._send_away(conn)
            return
        if len(self._knocks.names) < CALLERS:
            self._knocks.names.add(name)
        for other, old in list(self._callers.items()):
            if old is not caller and old.introduced and old.name == name:  # its previous line
                self._send_away(other)
        self._greet(conn, caller, shaken)
        self._knocks.stranger |= name not in self._lines
        self._acts.append(Heed())

    def _once(self, conn: int) -> str:
        """Return a number that we never sent before, and that cannot be guessed without our key:
        the key is unique to this process, and its connections are counted."""
        return sign(self.key, "number", self.name, conn)[:32]

    def _greet(self, conn: int, caller: _Caller, shaken: Handshake) -> None:
        if sum(c.introduced for c in self._callers.values()) >= FOLLOWERS:
            self._send_away(conn)
            return
        caller.introduced, caller.said = True, b""
        proof = shaken.proof("answer", self.name, caller.name)
        record = self.record + b"\n" if self.record else b""
        more = self._gossip.all() if self._wish.passing else b""
        self._acts.append(Transmit(conn, f"{self.name} {proof}\n".encode() + record + more))

    def _send_away(self, conn: int) -> None:
        del self._callers[conn]
        self._acts.append(HangUp(conn))

    def _send_all(self, data: bytes) -> None:
        """Send `data` to all followers that have introduced themselves."""
        if data:
            self._acts += [
                Transmit(conn, data) for conn, c in self._callers.items() if c.introduced
            ]

    def _pass_on(self, line: bytes, now: float, whose: str = "") -> None:
        """Pass a line on soon, together with other news, except back to its source `whose`."""
        if line and self._wish.passing:
            self._relays.add(line, now, whose)

    def _relay(self) -> None:
        names = {conn: c.name for conn, c in self._callers.items() if c.introduced}
        news = self._relays.take(set(names.values()))
        self._acts += [Transmit(conn, news[name]) for conn, name in names.items() if news[name]]

    # ---- our lines to others ---------------------------------------------------------------------
    def _number(self) -> int:
        self._conns += 1
        return self._conns

    def _dial(self, line: _Line, now: float) -> None:
        line.conn, line.buffer, line.greeted, line.last_s = self._number(), b"", False, now
        line.number = ""
        self._by_conn[line.conn] = line
        self._acts.append(Dial(line.conn, (line.door.host, line.door.port)))

    def _hang_up(
        self,
        line: _Line,
        now: float,
        refused: bool = False,
        silent: bool = False,
        ours: bool = False,
    ) -> None:
        """Close a line. `silent`: because it was; `ours`: because we do not need it any more."""
        if line.conn is not None:
            del self._by_conn[line.conn]
            self._acts.append(HangUp(line.conn))
            line.conn, line.buffer = None, b""
        if not ours:
            self._ended(line, now, refused, silent)

    def _ended(self, line: _Line, now: float, refused: bool, silent: bool = False) -> None:
        # a member whose line was up is called again at once
        line.retry_s = now + (WAKE_S if line.greeted else self.pulse_s)
        if line.heard.seen and (silent or not line.greeted):
            grade = Grade.REFUSED if refused else Grade.SILENT
            self._pass_on(self._gossip.doubt(line.name, grade, now), now)
        line.greeted, refused = False, refused and not line.renewed
        self._learn(line, PeerStatus(False, refused, line.heard.record, line.heard.seen))

    def _learn(self, line: _Line, heard: PeerStatus) -> None:
        if heard != line.heard:
            line.heard = heard
            self._acts.append(Heed())

    def _listen(self, line: _Line, said: bytes, now: float) -> None:
        line.last_s = now
        *whole, line.buffer = (line.buffer + said).split(b"\n")
        if len(line.buffer) > LONGEST_NBYTES:
            self._hang_up(line, now)
            return
        if whole and line.number:
            version, _, number = whole.pop(0).decode(errors="replace").partition(" ")
            if version != GREETING or not NUMBER.fullmatch(number):  # another process has the port
                self._hang_up(line, now, refused=True)
                return
            shaken = Handshake(line.door.key, line.number, number)
            line.answer = f"{line.name} {shaken.proof('answer', line.name, self.name)}"
            line.number = ""
            if line.conn is not None:
                proof = shaken.proof("call", line.name, self.name)
                self._acts.append(Transmit(line.conn, proof.encode() + b"\n"))
        if whole and not line.greeted:
            if not proofs_equal(whole.pop(0).decode(errors="replace"), line.answer):
                self._hang_up(line, now, refused=True)
                return
            line.greeted, line.renewed = True, False
            self._gossip.clear(line.name)
        if line.greeted:
            own: list[bytes] = []
            gossip: list[bytes] = []
            for word in filter(None, whole):
                (gossip if word[:1] in (b"@", b"?") else own).append(word)
            newest = own[-1] if own else line.heard.record
            self._learn(line, PeerStatus(True, False, newest, True))
            if own:
                self._pass_on(self._gossip.learn(line.name, newest), now, line.name)
            for word in gossip:
                self._overhear(word, now, line.name)

    def _overhear(self, said: bytes, now: float, whose: str) -> None:
        """Handle a line about another member from `whose`, which we follow."""
        if self._relays.has(said + b"\n", whose):
            return
        other = self._lines.get(subject(said)) if said[:1] == b"?" else None
        name, on = self._gossip.hear(said, now, bool(other and other.heard.up))
        if name:
            self._acts.append(Heed())
        self._pass_on(on, now, whose)
