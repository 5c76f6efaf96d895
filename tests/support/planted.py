"""Secrets that tests plant, and the forms in which they look for them."""

from __future__ import annotations

PLANTED = {
    "DB_PASSWORD": "correct-horse-battery-9",
    "MY_API_KEY": "k3y-0123456789abcdef",
    "SERVICE_TOKEN": "t0ken.with+strange/letters=",
    "WEBHOOK_SECRET": "hush hush very secret 7",
    "SESSION_COOKIE": "c00kie-value-4711",
    "PLAINLY": "given-as-a-secret-by-name",  # --secret: its name says nothing
}
FORMS = {
    "hf": "hf_" + "a1B2" * 8,
    "url": "pa55word-in-a-url",
    "sas": "SiGnAtUrE%2Bof%2Fazure%3D",
    "presigned": "0123456789abcdef0123456789abcdef",
}


def leaks(text: bytes) -> list[str]:
    every = {**PLANTED, **FORMS}
    return [name for name, value in every.items() if value.encode() in text]
