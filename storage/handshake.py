"""Proofs that both ends of one connection know a secret, which never travels. Pure.

Each end says a number that is used once; every proof is an HMAC of both numbers and of what it is
for. So what somebody has overheard opens nothing on another connection, nor says anything else on
this one. Used by the chunk servers (`storage/peers.py`) and by the lines between agents.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

NUMBER = re.compile(r"[0-9a-f]{32}")


def sign(secret: str, *words: object) -> str:
    """HMAC-SHA256 of these words, in hex. They must not be able to run into each other."""
    text = " ".join(map(str, words)).encode(errors="replace")
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def same(found: str, wanted: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(found.encode(errors="replace"), wanted.encode())


@dataclass
class Handshake:
    """What both ends of one connection have said: the caller's number, and the callee's."""

    secret: str
    theirs: str
    ours: str

    def proof(self, *words: object) -> str:
        """That whoever says it knows the secret, and means these words on this connection."""
        return sign(self.secret, *words, self.theirs, self.ours)
