"""What a simulated agent has of its lines: the real `LinesProtocol`, at a virtual time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.agent.gossip import Overheard
from harness.agent.lines_protocol import Door, Heard, LinesProtocol
from harness.agent.membership import Ears


class SimulatedEars(Ears):
    """As `lines.Lines` has them. Whoever inherits it has a clock and hands."""

    protocol: LinesProtocol

    def now(self) -> float:
        raise NotImplementedError

    def act(self) -> None:
        """Carry out what the protocol says."""
        raise NotImplementedError

    def tell(self, record: bytes) -> None:
        self.protocol.tell(record)
        self.act()

    def follow(
        self, members: Mapping[str, Door], passing: bool = False, keyless: Collection[str] = ()
    ) -> None:
        self.protocol.follow(members, self.now(), passing, keyless)
        self.act()

    def share(self, name: str, record: bytes) -> None:
        self.protocol.share(name, record, self.now())
        self.act()

    def doubt(self, name: str) -> None:
        self.protocol.doubt(name, self.now())
        self.act()

    def overheard(self) -> Overheard:
        return self.protocol.overheard()

    def heard(self, name: str) -> Heard:
        return self.protocol.heard(name)

    def all_up(self) -> bool:
        return self.protocol.all_up()

    def knocked(self) -> bool:
        return self.protocol.knocked()
