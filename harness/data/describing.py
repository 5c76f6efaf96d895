"""Items of a corpus in words for people: a text, or what kind of image, sound or bytes a field is.

Needs no package; with Pillow images have their sizes.
"""

from __future__ import annotations

import functools
import io
import wave
from collections.abc import Callable, Mapping, Sequence

from harness.core.world import BadInput
from harness.data.card import Card
from harness.data.tokenizing import tokenizer_of

STARTS = {  # by the first bytes
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"RIFF": "RIFF",
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\x93NUMPY": "NumPy array",
    b"PK\x03\x04": "zip",
}
PICTURES = {"PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"}


def described(record: Mapping[str, bytes], most_letters: int) -> str:
    """A line for each field, or the beginning of its text."""
    return "\n".join(f"{name}: {_field(value, most_letters)}" for name, value in record.items())


def _field(value: bytes, most_letters: int) -> str:
    kind = next((kind for start, kind in STARTS.items() if value.startswith(start)), "")
    if kind == "RIFF":
        kind = {b"WAVE": "WAV", b"WEBP": "WEBP"}.get(value[8:12], kind)
    try:
        text = value[: 4 * most_letters + 4].decode() if not kind else ""
    except UnicodeDecodeError as e:  # cut within a letter
        text = value[: e.start].decode() if e.reason == "unexpected end of data" else ""
    is_text = all(letter.isprintable() or letter in "\n\r\t" for letter in text)
    if not kind and is_text and (text or not value):
        return text[:most_letters]
    more = _sound(value) if kind == "WAV" else _picture(value) if kind in PICTURES else ""
    return ", ".join(one for one in (kind, more, f"{len(value):,} bytes") if one)


def _picture(value: bytes) -> str:
    try:
        from PIL import Image

        with Image.open(io.BytesIO(value)) as image:
            return f"{image.width} x {image.height} {image.mode}"
    except (ImportError, OSError, ValueError, SyntaxError):  # the last of a damaged PNG
        return ""


def _sound(value: bytes) -> str:
    try:
        with wave.open(io.BytesIO(value)) as sound:
            rate, channels = sound.getframerate(), sound.getnchannels()
            return f"{rate} Hz, {channels} channels, {sound.getnframes() / max(1, rate):.2f} s"
    except (wave.Error, EOFError):
        return ""


@functools.cache
def _decoder(spec: str, eos: str, hash: str) -> Callable[[Sequence[int]], str]:
    try:
        found = tokenizer_of(spec, eos)
    except BadInput:
        return str
    return found.decode if found.hash == hash else str


def decoder_of(card: Card) -> Callable[[Sequence[int]], str]:
    """The text of ids; their numbers where the corpus' tokenizer is not on this computer."""
    return _decoder(card.tokenizer, str(card.eos), card.tokenizer_hash)
