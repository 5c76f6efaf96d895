"""A score of how odd a sample is within its corpus. It is simple and needs no model.

A segment has five numbers: the share of its bytes that zlib leaves, the share of characters that
are neither letters nor spaces, the share of its most frequent token, the mean rarity of its tokens
in the corpus (bits), and its size in bytes (as a logarithm). Each is compared with its median over
segments from all over the split, in median absolute deviations; the score is the greatest of these
distances. Segments have one length, so an odd document in a part of a window is noticed.
"""

from __future__ import annotations

import functools
import io
import math
import wave
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.batch import Int64s
from harness.core.facts import Fact, GuardTripped, StepDone
from harness.core.world import BadInput
from harness.data.card import Card
from harness.data.datasets import Records, Tokens
from harness.data.prepare.tokenizers import tokenizer_of

# Descriptions of a corpus' items for people: text, or the format of an image, sound or bytes.

STARTS = {  # kind by the first bytes
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
    """Return a line for each field: its kind and size, or the first `most_letters` characters of
    its text."""
    return "\n".join(f"{name}: {_field(value, most_letters)}" for name, value in record.items())


def _field(value: bytes, most_letters: int) -> str:
    kind = next((kind for start, kind in STARTS.items() if value.startswith(start)), "")
    if kind == "RIFF":
        kind = {b"WAVE": "WAV", b"WEBP": "WEBP"}.get(value[8:12], kind)
    try:
        text = value[: 4 * most_letters + 4].decode() if not kind else ""
    except UnicodeDecodeError as e:  # the bytes were cut within a character
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
    except (ImportError, OSError, ValueError, SyntaxError):  # SyntaxError: from a damaged PNG
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
    """Return a function from ids to text, or to their numbers if the corpus' tokenizer is not
    installed here."""
    return _decoder(card.tokenizer, str(card.eos), card.tokenizer_hash)


SEGMENT_TOKENS = 256
SEGMENT_NBYTES = 64 << 10  # from a record's beginning
REFERENCE = 256  # items from all over the split that others are compared with
# shares of a median; a number that is almost the same everywhere must not make an item odd
LEAST_SHARE, LEAST = 0.05, 0.01
NAMES = (
    "zlib leaves {:.0%} of its bytes",
    "{:.0%} of it are neither letters nor spaces",
    "{:.0%} of it are one token",
    "{:.1f} bits of rarity in a token",
    "2^{:.1f} bytes",
)


@dataclass(frozen=True)
class Oddness:
    """The oddness of a segment. `score`: distance from the median, in median absolute deviations;
    `why`: an explanation for people; `start`, `end`: the range of the split's tokens, or of its
    records."""

    score: float
    why: str
    start: int
    end: int


@dataclass(frozen=True)
class _Segment:
    start: int
    end: int
    ids: NDArray[Any]
    text: str


class Oddities:
    """Scorer with the usual numbers of a split. The dataset should leave nothing out. Raises
    CorpusCorrupt, StoreError."""

    def __init__(self, dataset: Tokens | Records):
        self._segments = (
            _of_tokens(dataset) if isinstance(dataset, Tokens) else _of_records(dataset)
        )
        count = min(REFERENCE, len(dataset))
        items = sorted({len(dataset) * k // count for k in range(count)})
        known: list[_Segment] = []
        for start in range(0, len(items), 16):
            dataset.read_ahead(items[start : start + 16])
            known += (s for i in items[start : start + 16] for s in self._segments(i))
        most = max((int(s.ids.max(initial=0)) for s in known), default=0)
        self._counts: Int64s = np.zeros(most + 2, np.int64)
        for segment in known:
            self._counts[:-1] += np.bincount(segment.ids, minlength=most + 1)
        rows = np.array([self._measured(segment) for segment in known])
        self._usual = np.median(rows, axis=0)
        far = 1.4826 * np.median(np.abs(rows - self._usual), axis=0)
        self._spread = np.maximum(far, LEAST_SHARE * np.abs(self._usual) + LEAST)

    def of(self, item: int) -> Oddness:
        """Return the oddness of an item's oddest segment."""
        return max(map(self._judged, self._segments(item)), key=lambda found: found.score)

    def _judged(self, segment: _Segment) -> Oddness:
        row = self._measured(segment)
        far = np.abs(row - self._usual) / self._spread
        worst = int(far.argmax())
        usual = NAMES[worst].format(self._usual[worst])
        why = f"{NAMES[worst].format(row[worst])}; usual: {usual}"
        return Oddness(float(far[worst]), why, segment.start, segment.end)

    def _measured(self, segment: _Segment) -> NDArray[np.float64]:
        """Return the five numbers of the module's docstring, (5,)."""
        raw, text = segment.text.encode(errors="surrogatepass"), segment.text
        strange = sum(not (letter.isalpha() or letter.isspace()) for letter in text)
        counts = np.bincount(segment.ids)
        known = self._counts[np.minimum(segment.ids, len(self._counts) - 1)]
        rare = np.log2((self._counts.sum() + len(self._counts)) / (known + 1))
        row = (
            len(zlib.compress(raw)) / max(1, len(raw)),
            strange / max(1, len(text)),
            counts.max(initial=0) / max(1, len(segment.ids)),
            rare.mean() if len(rare) else 0.0,
            math.log2(1 + len(raw)),
        )
        return np.array(row)


def _of_tokens(tokens: Tokens) -> Callable[[int], Iterator[_Segment]]:
    """Return a function that yields a window's segments. A shorter rest belongs to the last
    segment."""
    decode = decoder_of(tokens.card)

    def segments(item: int) -> Iterator[_Segment]:
        ids = tokens[item][0]
        cuts: Sequence[int] = [*range(0, len(ids) - SEGMENT_TOKENS + 1, SEGMENT_TOKENS)] or [0]
        for cut, end in zip(cuts, [*cuts[1:], len(ids)], strict=True):
            here, start = ids[cut:end], item * tokens.length
            yield _Segment(start + cut, start + end, here, decode(here.tolist()))

    return segments


def _of_records(records: Records) -> Callable[[int], Iterator[_Segment]]:
    def segments(item: int) -> Iterator[_Segment]:
        raw = b"".join(records[item].values())[:SEGMENT_NBYTES]
        ids = np.frombuffer(raw, np.uint8).astype(np.int64)
        yield _Segment(item, item + 1, ids, raw.decode("latin-1"))

    return segments


# The detection of steps whose loss or gradient norm stands out from the previous steps, by a
# robust z-score. Pure.

NEAR, WINDOW, FEWEST = 15, 50, 8  # previous steps that a value is compared with; the fewest
SCORE = 6.0  # least score of a spike
LEAST_SPREAD = 0.01  # as a share of the median: tiny differences make no spikes
ROWS = 10_000  # steps that are processed together
Float64s: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Spike:
    """A value that stands out. `what`: "loss" or "gradient norm"; `usual`: the median just before
    it; `score`: infinite if `value` is not finite."""

    step: int
    what: str
    value: float
    usual: float
    score: float


def spikes(facts: Iterable[Fact], least: float = SCORE) -> list[Spike]:
    """Return the spikes of a run's facts (ordered by time), the worst first, one per step. If a
    step was redone, the last time counts; a step that a guard ended has no other fact."""
    steps: dict[int, StepDone] = {}
    ended: dict[int, float] = {}
    for fact in facts:
        if isinstance(fact, StepDone):
            steps[fact.step] = fact
            ended.pop(fact.step, None)
        elif isinstance(fact, GuardTripped) and fact.step not in steps:
            ended[fact.step] = fact.value
    rows = [steps[step] for step in sorted(steps)]
    found = [Spike(step, "loss", value, math.nan, math.inf) for step, value in ended.items()]
    for what, values in (
        ("loss", [s.loss for s in rows]),
        ("gradient norm", [math.nan if s.grad_norm is None else s.grad_norm for s in rows]),
    ):
        usual, scores = _scored(np.array(values, np.float64))
        for i in np.flatnonzero(scores >= least).tolist():
            found.append(Spike(rows[i].step, what, values[i], float(usual[i]), float(scores[i])))
    worst: dict[int, Spike] = {}
    for spike in sorted(found, key=lambda s: (-s.score, s.step)):
        worst.setdefault(spike.step, spike)
    return list(worst.values())


def _scored(values: Float64s) -> tuple[Float64s, Float64s]:
    """Return the median just before each value and its score, both of shape (n,). The score is 0
    where too few values came before."""
    usual, _ = _before(values, NEAR)
    left = values - usual
    middle, spread = _before(left, WINDOW)
    spread = np.maximum(1.4826 * spread, LEAST_SPREAD * np.abs(usual))
    scores = (left - middle) / np.maximum(spread, np.finfo(np.float64).tiny)
    scores = np.where(left > 0, scores, 0.0)  # slower falling is not a spike
    return usual, np.nan_to_num(scores, nan=0.0, posinf=math.inf, neginf=0.0)


def _before(values: Float64s, window: int) -> tuple[Float64s, Float64s]:
    """Return for each value the median of the finite ones among the `window` before it, and their
    median distance from it, both of shape (n,); NaN where fewer than `FEWEST` are finite."""
    middle, spread = np.full((2, len(values)), math.nan)
    known = np.where(np.isfinite(values), values, math.nan)
    known = np.concatenate([np.full(window, math.nan), known])
    for start in range(0, len(values), ROWS):
        end = min(start + ROWS, len(values))
        seen = np.lib.stride_tricks.sliding_window_view(known[start : end + window - 1], window)
        enough = np.flatnonzero(np.isfinite(seen).sum(axis=1) >= FEWEST)
        if len(enough):
            here = middle[start + enough] = np.nanmedian(seen[enough], axis=1)
            spread[start + enough] = np.nanmedian(np.abs(seen[enough] - here[:, None]), axis=1)
    return middle, spread
