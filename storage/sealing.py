"""Encryption of what two peers tell each other, under a key that both make and neither sends.

AES-256-GCM of the package `cryptography`, which is wanted only by who asks for it.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util

TAG_NBYTES = 16  # what a sealed text is longer by


class WrongSeal(ConnectionError):
    """It was sealed by somebody else, for something else, or changed on its way."""


def can_seal() -> bool:
    """Is the package there?"""
    return importlib.util.find_spec("cryptography") is not None


class Sealer:
    """Of one connection. `numbers`: that both sides have made for it alone, so that its key, which
    follows from them and the secret, never serves twice."""

    def __init__(self, secret: str, *numbers: str):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        text = " ".join(("seal", *numbers)).encode()
        self._cipher = AESGCM(hmac.new(secret.encode(), text, hashlib.sha256).digest())

    def seal(self, who: str, count: int, data: bytes | memoryview) -> bytes:
        """`who` says it ("ask" or "serve") in request `count`: never the same twice."""
        return self._cipher.encrypt(_nonce(who, count), data, None)

    def open(self, who: str, count: int, data: bytes) -> bytes:
        """What was sealed with the same words. Raises WrongSeal."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_nonce(who, count), data, None)
        except InvalidTag:
            raise WrongSeal(f"{len(data)} bytes have no seal of this connection's") from None


def _nonce(who: str, count: int) -> bytes:
    return who.encode()[:1] + count.to_bytes(11, "big")
