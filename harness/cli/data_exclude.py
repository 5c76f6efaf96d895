"""`harness data exclude`: documents nobody may train on any more, by a list beside the corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.cli.common import DONE
from harness.core.config import flag, positional
from harness.core.given_files import read_given
from harness.core.world import BadInput
from storage.opening import normalize, open_store
from storage.text import Console

SHOWN = 20  # documents that are printed
SHOWN_LETTERS = 200  # of each


@dataclass(frozen=True)
class ExcludeFlags:
    url: str = positional("URL of the corpus")
    split: str = flag("train", "of what is named")
    containing: str = flag("", "every document or record that has this text", metavar="TEXT")
    token: tuple[int, ...] = flag(
        (), "the document in which this token of the split lies", metavar="N", type=int
    )
    item: tuple[int, ...] = flag(
        (), "every document of this window, of --length tokens", metavar="I", type=int
    )
    length: int = flag(0, "tokens of a window of --item")
    record: tuple[int, ...] = flag((), "this record", metavar="I", type=int)
    hashes: str = flag(
        "", "a file of hashes, as b3sum prints them, of texts or of fields", metavar="FILE"
    )
    reason: str = flag("", "what the list says of why")
    yes: bool = flag(False, "do it; without it only what was found is printed")


@dataclass(frozen=True)
class FoundDocument:
    """Tokens, or records, [start, end) of the split; `text`: the beginning of it."""

    start: int
    end: int
    text: str


def exclude(flags: ExcludeFlags) -> int:
    """Leave documents or records out from now on; nothing else of the corpus moves."""
    from harness.data.card import TOKENS
    from harness.data.excluding import exclude as add
    from harness.data.excluding import joined, list_of
    from harness.data.opening import card_of

    store, console = open_store(flags.url), Console()
    card = card_of(store)
    unit = "token" if card.kind == TOKENS else "record"
    found = list(_tokens(flags) if card.kind == TOKENS else _records(flags))
    if not found:
        raise BadInput(
            f"{normalize(flags.url)}: wanted documents to exclude, found none by that; name them "
            "by --containing, --token, --item and --length, --record or --hashes"
        )
    for one in found[:SHOWN]:
        last = "" if one.end == one.start + 1 else f" to {one.end - 1}"
        console.print(f"--- {unit} {one.start}{last}", style="bold", highlight=False)
        console.print(one.text[:SHOWN_LETTERS], highlight=False, markup=False)
    if len(found) > SHOWN:
        console.print(f"... and {len(found) - SHOWN} more", highlight=False)
    ranges = joined([(one.start, one.end) for one in found])
    count, before = int(np.diff(ranges).sum()), list_of(store, card)
    if not flags.yes:
        console.print(
            f"{count} {unit}s of the split {flags.split!r}; nothing is excluded yet: the same "
            "command with --yes does it",
            highlight=False,
        )
        return DONE
    made = add(store, card, {flags.split: ranges}, flags.reason)
    if made.number == before.number:
        console.print(f"list {made.number} has them already", highlight=False)
        return DONE
    console.print(
        f"exclusion list {made.number}: {count} {unit}s more; who opens the corpus from now on "
        "leaves them out. Their bytes still lie there: prepare the corpus anew to remove them",
        highlight=False,
    )
    return DONE


def _hashes(path: str) -> frozenset[bytes]:
    """16 bytes of each. Raises BadInput."""
    found = set()
    for line in read_given(path, "hashes, one in each line").decode(errors="replace").splitlines():
        if line.strip():
            word = line.split()[0]
            if not re.fullmatch(r"[0-9a-fA-F]{32,64}", word):
                raise BadInput(f"{path}: wanted hashes of 32 hex digits or more, found {word:.40}")
            found.add(bytes.fromhex(word[:32]))
    return frozenset(found)


def _tokens(flags: ExcludeFlags) -> Iterator[FoundDocument]:
    from harness.data.card import hash_of
    from harness.data.describing import decoder_of
    from harness.data.scanning import TokenRow, tokenizer_here

    if flags.record:
        raise BadInput("--record: wanted a corpus of records, found one of tokens; name a --token")
    if bool(flags.item) != bool(flags.length):
        raise BadInput("--item I --length T: wanted both, found one of them")
    row = TokenRow(flags.url, flags.split)
    spans = {row.around(token) for token in flags.token}
    for item in flags.item:
        at, end = item * flags.length, min((item + 1) * flags.length, len(row))
        while 0 <= at < end:
            spans.add(span := row.around(at))
            at = span[1] + 1
    for start, end in sorted(spans):
        ids = row.read(start, min(end, start + SHOWN_LETTERS)).tolist()
        yield FoundDocument(start, end, decoder_of(row.card)(ids))
    if not flags.containing and not flags.hashes:
        return
    decode = tokenizer_here(row.card, "--containing and --hashes").decode
    hashes = _hashes(flags.hashes) if flags.hashes else frozenset()
    for start, ids in row.documents():
        text = decode(ids.tolist())
        if (flags.containing and flags.containing in text) or hash_of(text.encode()) in hashes:
            yield FoundDocument(start, start + len(ids), _around(text, flags.containing))


def _records(flags: ExcludeFlags) -> Iterator[FoundDocument]:
    from harness.data.card import hash_of
    from harness.data.describing import described
    from harness.data.reading import Records
    from harness.data.scanning import each_record

    if flags.token or flags.item:
        raise BadInput("wanted a corpus of tokens, found one of records; name a --record")
    records = Records(flags.url, split=flags.split)
    records.exclude(0)
    for i in sorted(set(flags.record)):
        if not 0 <= i < len(records):
            raise BadInput(f"--record {i}: wanted 0 to {len(records) - 1}")
        yield FoundDocument(i, i + 1, described(records[i], SHOWN_LETTERS))
    if not flags.containing and not flags.hashes:
        return
    hashes = _hashes(flags.hashes) if flags.hashes else frozenset()
    wanted = flags.containing.encode()
    for i, record in each_record(records):
        has = any(wanted in value for value in record.values()) if wanted else False
        if has or any(hash_of(value) in hashes for value in record.values()):
            yield FoundDocument(i, i + 1, described(record, SHOWN_LETTERS))


def _around(text: str, what: str) -> str:
    """The part of it that has `what`."""
    at = max(0, text.find(what) - SHOWN_LETTERS // 2) if what else 0
    return text[at : at + SHOWN_LETTERS]
