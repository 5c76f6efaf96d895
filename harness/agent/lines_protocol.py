"""What goes over the lines between agents, without any input or output (pure): events in, acts out.

`LinesProtocol` holds the state of one member's lines. It is told what happened (connected,
received, closed, a moment has passed) and when, and says what is to be done (connect, send, hang
up). It has no socket, thread or clock: `lines.py` gives it real ones, a simulation its own.

Wire: text lines. A caller says its name, the version of this greeting, and a number that is used
once; the callee says such a number too, and nothing else. The caller then proves by both numbers
that it knows the key in the member object of whom it calls, so that it can read the run's bucket.
The answer is the callee's name and a proof that it knows the key too; then its records (one JSON
line each), empty lines (pulses), and what it passes on of others (gossip.py).

    a 2 <number>      ->
                      <-  2 <number>
    <proof "call">    ->
                      <-  b <proof "answer">, then records

Keys never travel, and what is overheard proves nothing on another connection. The greeting's first
version had no numbers: who speaks it is refused, told of, and seen through the bucket all the same.
Members that are older still have no key: for them proofs are missing, and nothing is passed on. Who
has not introduced itself has little time and few places; the oldest loses its place first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.agent.gossip import Gossip, Grade, Overheard, Relays, subject, without_key
from storage.handshake import NUMBER, Handshake, same, sign

LONGEST_NBYTES = 64 * 1024  # of a line on the wire; more is not ours
FOLLOWERS = 1024  # that have introduced themselves; more are sent away
STRANGERS = 64  # callers that have not; the oldest makes room
STRANGERS_EACH = 16  # ... of one address
INTRODUCE_S = 2.0  # that they have for it
INTRODUCTION_NBYTES = 256
SAID_NBYTES = 4096  # that followers may say besides; they have nothing to say
CALLERS = 256  # names of callers that are remembered until somebody asks
CONNECT_S = 1.0  # for a connection and the first word on it
SILENT_PULSES = 3.0  # so many pulses missed: the line is made anew
GREETING = "2"  # version of the greeting
WAKE_S = 0.05  # the shortest time between two attempts to make a line

Address = tuple[str, int]


class Door(NamedTuple):
    """Where a member's lines are had; `key`: what its callers must know, "" of older versions."""

    host: str
    port: int
    key: str = ""


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
    """Send; a connection that does not take it in time is to be dropped, and `closed` said."""

    conn: int
    data: bytes


@dataclass(frozen=True)
class HangUp:
    """Close it. No `closed` follows."""

    conn: int


@dataclass(frozen=True)
class Heed:
    """Something was heard that may matter to who waits."""


@dataclass(frozen=True)
class Warn:
    """Somebody must know; each of them is said once."""

    words: str


LineAct = Dial | Transmit | HangUp | Heed | Warn


@dataclass
class _Line:
    """Ours to one member that we follow."""

    name: str
    door: Door
    heard: Heard = SILENCE
    conn: int | None = None
    buffer: bytes = b""
    number: str = ""  # that we said; "": none is asked for, or the callee's has been heard
    answer: str = ""  # its first words when it knows the key
    greeted: bool = False
    last_s: float = 0.0  # when we heard something, or began to connect
    retry_s: float = 0.0


@dataclass
class _Caller:
    """Somebody who called us."""

    host: str
    since_s: float
    said: bytes = b""
    name: str = ""  # as it said
    handshake: Handshake | None = None  # it is asked for its proof
    introduced: bool = False
    proven: bool = False  # it speaks this version, and can read the bucket


@dataclass(frozen=True)
class _Wish:
    """Whom we follow; do we pass on what we hear; who of the run is of an older version."""

    members: dict[str, Door] = field(default_factory=dict)
    passing: bool = False
    keyless: frozenset[str] = frozenset()


@dataclass
class _Knocks:
    """Who called, until somebody asks."""

    stranger: bool = False
    names: set[str] = field(default_factory=set)  # of callers that proved to be of the run
    older: set[str] = field(default_factory=set)  # whose greeting was the first version's


def first_proof(key: str, word: str, callee: str, caller: str) -> str:
    """As the greeting's first version had it: recognised, and not believed."""
    return sign(key, word, callee, caller)[:32]


@dataclass
class LinesProtocol:
    """The lines of the member `name`; `key` is in its object ("": no proof is asked of callers).
    Times are seconds of any one monotonic clock. After each event, `take` the acts and carry them
    out in order."""

    name: str
    pulse_s: float
    now: float
    key: str = ""
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
    _conns: int = 0  # so many had a number

    def __post_init__(self) -> None:
        self._pulse_due_s, self._gossip = self.now + self.pulse_s, Gossip(self.name)

    # ---- what the member wants and asks ----------------------------------------------------------
    def tell(self, record: bytes) -> None:
        """Our newest record (JSON without a newline), to all who follow us."""
        self.record = without_key(record)
        self._send_all(self.record + b"\n")

    def follow(
        self,
        members: Mapping[str, Door],
        now: float,
        passing: bool = False,
        keyless: Collection[str] = (),
    ) -> None:
        """Keep a line to each of these, and to nobody else. `passing`: pass on what we hear.
        `keyless`: members of older versions, which prove nothing when they call."""
        before = self._wish
        doors = {name: Door(*door) for name, door in members.items()}
        self._wish = _Wish(doors, passing, frozenset(keyless))
        if passing and not before.passing:
            self._send_all(self._gossip.all(), proven=True)
        if doors != before.members:
            for name in [n for n, ln in self._lines.items() if doors.get(n) != ln.door]:
                self._hang_up(self._lines.pop(name), now, ours=True)
            for name, door in doors.items():
                if name not in self._lines:
                    self._dial(self._lines.setdefault(name, _Line(name, door)), now)
        for conn, caller in list(self._callers.items()):  # who was waited for, and proves nothing
            waits = caller.name and caller.handshake is None and not caller.introduced
            if waits and self._may_be_plain(caller.name):
                self._greet(conn, caller)

    @property
    def wanted(self) -> dict[str, Door]:
        """Whom we follow."""
        return self._wish.members

    def share(self, name: str, record: bytes, now: float) -> None:
        """What a member says of itself in the bucket: pass it on if it is news."""
        self._pass_on(self._gossip.learn(name, record), now)

    def doubt(self, name: str, now: float) -> None:
        """We found it dead."""
        self._pass_on(self._gossip.doubt(name, Grade.DEAD, now), now)

    def heard(self, name: str) -> Heard:
        line, known = self._lines.get(name), self._gossip.records.get(name)
        heard = line.heard if line else SILENCE
        if known is None or known.text == heard.record:
            return heard
        return Heard(heard.up, heard.refused, known.text, heard.seen)

    def overheard(self) -> Overheard:
        """All hearsay; new records and callers are told once."""
        callers, self._knocks.names = frozenset(self._knocks.names), set()
        return self._gossip.overheard(callers)

    def all_up(self) -> bool:
        """Do we hear everybody whom we follow, and has everybody of them a line to us? Who hears
        us over no line must see us beat in the bucket."""
        if not all(self._lines[name].heard.up for name in self.wanted):
            return False
        return self.wanted.keys() <= {c.name for c in self._callers.values() if c.introduced}

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""
        called, self._knocks.stranger = self._knocks.stranger, False
        return called

    # ---- what the hands ask ----------------------------------------------------------------------
    def take(self) -> list[LineAct]:
        """What is to be done since the last time."""
        acts, self._acts = self._acts, []
        return acts

    def has_acts(self) -> bool:
        return bool(self._acts)

    def wait_s(self, now: float) -> float:
        """Until the next `tick` is due."""
        retries = [ln.retry_s for ln in self._lines.values() if ln.conn is None]
        due_s = min([self._pulse_due_s, self._relays.due_s, *retries])
        return min(max(due_s - now, 0.0), self.pulse_s)

    # ---- events ----------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Time has passed: pulses are sent, silent and broken lines are made anew, and who has
        not introduced itself is sent away."""
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
        """Somebody connected to us, from `host`. The connection's number."""
        conn = self._number()
        strangers = {c: caller for c, caller in self._callers.items() if not caller.introduced}
        of_host = [c for c, caller in strangers.items() if caller.host == host]
        if len(of_host) >= STRANGERS_EACH:
            self._send_away(of_host[0])
        elif len(strangers) >= STRANGERS:
            # whoever has most of the places loses its oldest
            greedy = Counter(caller.host for caller in strangers.values()).most_common(1)[0][0]
            self._send_away(next(c for c, caller in strangers.items() if caller.host == greedy))
        self._callers[conn] = _Caller(host, now)
        return conn

    def connected(self, conn: int, now: float) -> None:
        """A connection that we asked for is there."""
        if line := self._by_conn.get(conn):
            words, line.answer = [self.name], line.name
            if line.door.key:
                line.number = self._once(conn)
                words += [GREETING, line.number]
            self._acts.append(Transmit(conn, " ".join(words).encode() + b"\n"))

    def closed(self, conn: int, now: float, refused: bool = False) -> None:
        """A connection has ended, or could not be made. `refused`: its machine says that nobody
        is there."""
        if line := self._by_conn.pop(conn, None):
            line.conn = None
            self._ended(line, now, refused)
        self._callers.pop(conn, None)

    def received(self, conn: int, data: bytes, now: float) -> None:
        """Bytes came."""
        if line := self._by_conn.get(conn):
            self._listen(line, data, now)
        elif caller := self._callers.get(conn):
            self._hear_caller(conn, caller, data)

    # ---- others to us ----------------------------------------------------------------------------
    def _hear_caller(self, conn: int, caller: _Caller, data: bytes) -> None:
        caller.said += data
        if caller.introduced or (caller.name and caller.handshake is None):
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
        if self.key and version == GREETING and NUMBER.fullmatch(number):
            mine = self._once(conn)
            caller.handshake = Handshake(self.key, number, mine)
            self._acts.append(Transmit(conn, f"{GREETING} {mine}\n".encode()))
            return
        if self._may_be_plain(name):
            self._greet(conn, caller)
        elif rest or not said:  # an older greeting, another version, or something else
            if self.key and same(rest, first_proof(self.key, "call", self.name, name)):
                self._refuse_older(name)
            self._send_away(conn)
            return
        self._knock(name)

    def _hear_proof(self, conn: int, caller: _Caller, said: str) -> None:
        name, shaken = caller.name, caller.handshake
        if shaken is None or not same(said, shaken.proof("call", self.name, name)):
            self._send_away(conn)
            return
        caller.proven = True
        if len(self._knocks.names) < CALLERS:
            self._knocks.names.add(name)
        for other, old in list(self._callers.items()):
            if old is not caller and old.proven and old.name == name:  # its line before this
                self._send_away(other)
        self._greet(conn, caller)
        self._knock(name)

    def _knock(self, name: str) -> None:
        if name not in self._lines:
            self._knocks.stranger = True
            self._acts.append(Heed())

    def _refuse_older(self, name: str) -> None:
        """It can read the bucket, and what it says could be a repetition."""
        older = self._knocks.older
        if name not in older and len(older) < CALLERS:
            older.add(name)
            why = f"{name} greets as version 1 of the lines; wanted {GREETING}, whose greetings "
            what = "nobody can repeat. Until this package is updated there, only the bucket tells "
            self._acts.append(Warn(f"{why}{what}of it, which is slower"))

    def _once(self, conn: int) -> str:
        """A number that we never said before, and that nobody without our key could guess: our
        key is of this process, and its connections are counted."""
        return sign(self.key, "number", self.name, conn)[:32]

    def _may_be_plain(self, name: str) -> bool:
        line = self._lines.get(name)
        return not self.key or name in self._wish.keyless or bool(line and not line.door.key)

    def _greet(self, conn: int, caller: _Caller) -> None:
        if sum(c.introduced for c in self._callers.values()) >= FOLLOWERS:
            self._send_away(conn)
            return
        caller.introduced, caller.said = True, b""
        words = [self.name]
        if caller.proven and caller.handshake is not None:
            words.append(caller.handshake.proof("answer", self.name, caller.name))
        record = self.record + b"\n" if self.record else b""
        more = self._gossip.all() if caller.proven and self._wish.passing else b""
        self._acts.append(Transmit(conn, " ".join(words).encode() + b"\n" + record + more))

    def _send_away(self, conn: int) -> None:
        del self._callers[conn]
        self._acts.append(HangUp(conn))

    def _send_all(self, data: bytes, proven: bool = False) -> None:
        """To all followers that have introduced themselves. `proven`: only to those that have
        proven it."""
        if data:
            self._acts += [
                Transmit(conn, data)
                for conn, c in self._callers.items()
                if c.introduced and (c.proven or not proven)
            ]

    def _pass_on(self, line: bytes, now: float, whose: str = "") -> None:
        """Soon, together with other news. `whose`: it came from there, so it need not go back."""
        if line and self._wish.passing:
            self._relays.add(line, now, whose)

    def _relay(self) -> None:
        names = {conn: c.name for conn, c in self._callers.items() if c.proven and c.introduced}
        news = self._relays.take(set(names.values()))
        self._acts += [Transmit(conn, news[name]) for conn, name in names.items() if news[name]]

    # ---- ours to others --------------------------------------------------------------------------
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
        """`silent`: since it was; `ours`: we have no use for it any more."""
        if line.conn is not None:
            del self._by_conn[line.conn]
            self._acts.append(HangUp(line.conn))
            line.conn, line.buffer = None, b""
        if not ours:
            self._ended(line, now, refused, silent)

    def _ended(self, line: _Line, now: float, refused: bool, silent: bool = False) -> None:
        # one that was up is asked at once whether it is still there
        line.retry_s = now + (WAKE_S if line.greeted else self.pulse_s)
        if line.heard.seen and (silent or not line.greeted):
            grade = Grade.REFUSED if refused else Grade.SILENT
            self._pass_on(self._gossip.doubt(line.name, grade, now), now)
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
        if whole and line.number:
            version, _, number = whole.pop(0).decode(errors="replace").partition(" ")
            if version != GREETING or not NUMBER.fullmatch(number):  # the port is another's now
                self._hang_up(line, now, refused=True)
                return
            shaken = Handshake(line.door.key, line.number, number)
            line.answer = f"{line.name} {shaken.proof('answer', line.name, self.name)}"
            line.number = ""
            if line.conn is not None:
                proof = shaken.proof("call", line.name, self.name)
                self._acts.append(Transmit(line.conn, proof.encode() + b"\n"))
        if whole and not line.greeted:
            if not same(whole.pop(0).decode(errors="replace"), line.answer):
                self._hang_up(line, now, refused=True)
                return
            line.greeted = True
            self._gossip.clear(line.name)
        if line.greeted:
            own: list[bytes] = []
            gossip: list[bytes] = []
            for word in filter(None, whole):
                (gossip if word[:1] in (b"@", b"?") else own).append(word)
            newest = own[-1] if own else line.heard.record
            self._learn(line, Heard(True, False, newest, True))
            if own:
                self._pass_on(self._gossip.learn(line.name, newest), now, line.name)
            for word in gossip:
                self._overhear(word, now, line.name)

    def _overhear(self, said: bytes, now: float, whose: str) -> None:
        """One that we follow says something of another."""
        if self._relays.has(said + b"\n", whose):
            return
        other = self._lines.get(subject(said)) if said[:1] == b"?" else None
        name, on = self._gossip.hear(said, now, bool(other and other.heard.up))
        if name:
            self._acts.append(Heed())
        self._pass_on(on, now, whose)
