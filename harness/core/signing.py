"""Keys that sign what a run writes, and so prove that nobody else wrote it.

Pure. There are two kinds, recognised by their form, and a function may supply either:

    hsk_ and 64 hex digits   HMAC-SHA256 with a shared secret: a verifier can sign as well
    PEM                      Ed25519: nodes sign with the private key, the public one verifies
                             (needs the package `cryptography`)
    package.module:function  returns one of the two as text: the place for a cloud's KMS or secret
                             manager, which is called once per process
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from harness.core.user_functions import imported
from harness.core.world import BadInput

VARIABLE = "HARNESS_SIGNING_KEY"  # never in a bucket, and masked in all output
WANTED = (
    "wanted hsk_ and 64 hex digits (make one: echo hsk_$(openssl rand -hex 32)), an Ed25519 key in "
    "PEM, or package.module:function that gives one of them"
)


class SigningKey(Protocol):
    """A key that signs and verifies. `purpose`: the kind of data signed, so that no signature has
    two meanings."""

    @property
    def kind(self) -> str:
        """A description for people."""

    @property
    def signs(self) -> bool:
        """True if the key can sign, not only verify."""

    def sign(self, purpose: str, data: bytes) -> str:
        """Return the signature of `data` as hex digits."""

    def holds(self, purpose: str, data: bytes, signature: object) -> bool:
        """Return whether `signature` is this key's signature of `data`."""


@dataclass(frozen=True, repr=False)
class _Shared:
    """A shared secret; its signatures are the first 128 bits of HMAC-SHA256."""

    secret: bytes
    kind = "HMAC-SHA256; whoever has this key could have signed"
    signs = True

    def sign(self, purpose: str, data: bytes) -> str:
        return hmac.digest(self.secret, _of(purpose, data), hashlib.sha256).hex()[:32]

    def holds(self, purpose: str, data: bytes, signature: object) -> bool:
        wanted = self.sign(purpose, data)
        return isinstance(signature, str) and hmac.compare_digest(
            wanted.encode(), signature.encode("utf-8", "replace")
        )


@dataclass(frozen=True, repr=False)
class _Pair:
    """An Ed25519 key pair. `private`: None: it can only verify."""

    public: Any
    private: Any = None
    kind = "Ed25519"

    @property
    def signs(self) -> bool:
        return self.private is not None

    def sign(self, purpose: str, data: bytes) -> str:
        return bytes(self.private.sign(_of(purpose, data))).hex()

    def holds(self, purpose: str, data: bytes, signature: object) -> bool:
        from cryptography.exceptions import InvalidSignature

        if not isinstance(signature, str) or not re.fullmatch(r"[0-9a-f]{128}", signature):
            return False
        try:
            self.public.verify(bytes.fromhex(signature), _of(purpose, data))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, repr=False)
class RunKey:
    """A key for one run. `run`: its id, inside every signature, so that what the key has signed for
    another run does not hold here; "": runs that began before there were ids."""

    key: SigningKey
    run: str

    @property
    def kind(self) -> str:
        return self.key.kind

    @property
    def signs(self) -> bool:
        return self.key.signs

    def sign(self, purpose: str, data: bytes) -> str:
        return self.key.sign(self._bound(purpose), data)

    def holds(self, purpose: str, data: bytes, signature: object) -> bool:
        return self.key.holds(self._bound(purpose), data, signature)

    def _bound(self, purpose: str) -> str:
        return f"run {self.run}: {purpose}" if self.run else purpose


def _of(purpose: str, data: bytes) -> bytes:
    return purpose.encode() + b"\0" + data


def key_of(text: str, where: str) -> SigningKey:
    """Return the key that `text` contains or supplies. `where`: the name used in errors, which
    never show the key. Raises BadInput."""
    text = text.strip().replace("\\n", "\n")
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        given = imported(where, text)()
        if not isinstance(given, str) or ":" in given.splitlines()[0]:
            raise BadInput(f"{where}: {text} gives no key as text; {WANTED}")
        text = given.strip()
    if re.fullmatch(r"hsk_[0-9a-f]{64}", text):
        return _Shared(bytes.fromhex(text[4:]))
    if text.startswith("-----BEGIN "):
        return _pair_of(text, where)
    raise BadInput(f"{where}: {WANTED}; found {len(text)} other letters")


def _pair_of(text: str, where: str) -> SigningKey:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise BadInput(
            f"{where}: an Ed25519 key needs the package cryptography ({e}): pip install "
            "cryptography, or use a key of the kind hsk_"
        ) from e
    try:
        if "PRIVATE" not in text.splitlines()[0]:
            public = serialization.load_pem_public_key(text.encode())
            if isinstance(public, ed25519.Ed25519PublicKey):
                return _Pair(public)
        else:
            private = serialization.load_pem_private_key(text.encode(), password=None)
            if isinstance(private, ed25519.Ed25519PrivateKey):
                return _Pair(private.public_key(), private)
    except (ValueError, TypeError) as e:
        raise BadInput(f"{where}: wanted an Ed25519 key in PEM, found none ({e})") from None
    raise BadInput(f"{where}: wanted an Ed25519 key in PEM, found one of another kind")


def key_in(environ: Mapping[str, str]) -> SigningKey | None:
    """Return the key that this process signs with, or None if `environ` has none. Raises BadInput,
    also for a public key."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    key = key_of(text, VARIABLE)
    if not key.signs:
        raise BadInput(f"{VARIABLE}: wanted a private key to sign with, found a public one")
    return key
