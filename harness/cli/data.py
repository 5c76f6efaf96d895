"""`harness data`: prepare a corpus once, look at it, verify it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.cli.common import DONE, FAILED, existing_store
from harness.cli.data_exclude import ExcludeFlags, exclude
from harness.cli.data_index import IndexFlags, index
from harness.cli.data_spikes import SpikesFlags, read_by, samples_of, spikes
from harness.core.config import FlagParser, add_flags, build, flag, positional
from harness.core.world import BadInput
from storage.opening import normalize, open_store
from storage.text import Console, progress_bar

if TYPE_CHECKING:
    from harness.data.card import Card
    from harness.data.reading import Records, Tokens
    from storage.objects import ObjectStore

SHOWN_LETTERS = 2000  # of a sample, or of each field of a record
MIB = 1 << 20


@dataclass(frozen=True)
class DataFlags:
    words: tuple[str, ...] = positional(
        "prepare SOURCES... DEST | index SOURCE DEST | show URL | verify URL | exclude URL | "
        "spikes RUN; `harness data prepare --help`",
        nargs="...",
    )


def _part(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if text and not (found and 1 <= int(found[1]) <= int(found[2])):
        raise ValueError(f"wanted I/N with 1 <= I <= N, such as 1/4, found {text!r:.40}")


@dataclass(frozen=True)
class PrepareFlags:
    words: tuple[str, ...] = positional(
        "SOURCES... DEST: files, folders, globs or URLs of text, JSONL, Parquet, Arrow or tar "
        "(compressed too), or python:pkg.module:function; and the URL of the corpus to make",
        nargs="+",
    )
    records: bool = flag(False, "keep records as they are (images, audio, rows), no tokens")
    tokenizer: str = flag(
        "bytes",
        "bytes, a tokenizer.json, tokenizers:FILE, transformers:NAME, tiktoken:NAME, "
        "sentencepiece:FILE",
    )
    eos: str = flag("", "token, or its id, behind each document; default: the tokenizer's own")
    field: str = flag("", "with the text; default: text, of tar txt", metavar="NAME")
    separator: str = flag(
        "", r"between documents of text files, such as '\n\n'; default: a file is a document"
    )
    errors: str = flag("strict", "bytes that are no UTF-8", choices=["strict", "replace"])
    held_out: float = flag(
        0.0, "share of documents for the split validation, chosen by their hash", at_most=0.9
    )
    seed: int = flag(0, "of that choice")
    dedup: bool = flag(False, "drop documents that are equal to an earlier one")
    near_duplicates: float = flag(
        0.0,
        "and those that are like an earlier one: least Jaccard similarity, such as 0.8; "
        "needs datasketch",
        at_most=1,
        metavar="SHARE",
    )
    licence: str = flag("", "what the card says of the licence")
    jobs: int = flag(0, "processes; 0: one for each processor", at_most=1024)
    part: str = flag("", "do only the I-th of N parts; others do the rest", check=_part)
    parts: int = flag(16, "units of work of a Python function", at_least=1, at_most=100_000)
    unit_mib: int = flag(64, "of sources that are done at once", at_least=1, at_most=16384)
    shard_mib: int = flag(
        64, "largest shard; a process holds one for each split", at_least=1, at_most=2048
    )
    chunk_kib: int = flag(256, "what is read and checked at once", at_least=4, at_most=MIB // 4)


@dataclass(frozen=True)
class ShowFlags:
    urls: tuple[str, ...] = positional(
        "URL of the corpus; with --step of all that the run has read", nargs="+"
    )
    split: str = flag("train", "of --item")
    item: tuple[int, ...] = flag(
        (), "print this window or record; may be repeated", metavar="I", type=int
    )
    length: int = flag(256, "tokens of a window of --item", at_least=1)
    source: str = flag("", "where the files are now that it is an index of", metavar="URL")
    run: str = flag("", "a run that was trained on it, for --step", metavar="URL")
    step: tuple[int, ...] = flag(
        (), "print the samples of this step; may be repeated", metavar="K", type=int
    )


@dataclass(frozen=True)
class DataVerifyFlags:
    url: str = positional("URL of the corpus")
    source: str = flag("", "where the files are now that it is an index of", metavar="URL")


def data(flags: DataFlags) -> int:
    """Prepare a corpus, index files of others, show, verify it, exclude documents of it."""
    parser = FlagParser(prog="harness data", description=(data.__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(
        dest="word", required=True, parser_class=FlagParser, metavar="COMMAND"
    )
    for name, (cls, function) in WORDS.items():
        words = (function.__doc__ or "").split("\n")[0]
        add_flags(commands.add_parser(name, help=words, description=words), cls)
    namespace = parser.parse_args(list(flags.words) or ["--help"])
    cls, function = WORDS[namespace.word]
    return function(build(cls, namespace))


# ---- prepare -------------------------------------------------------------------------------------
def prepare(flags: PrepareFlags) -> int:
    """Make a corpus of tokens or records; goes on where an earlier one was interrupted."""
    from harness.data.card import RECORDS, TOKENS
    from harness.data.documents import DocumentRules
    from harness.data.prepare import PreparePart, PreparePlan
    from harness.data.prepare import prepare as make
    from harness.data.unit_maker import CorpusSettings

    *sources, url = flags.words
    if not sources:
        raise BadInput("harness data prepare SOURCES... DEST: wanted sources and a URL, found one")
    separator = flags.separator.replace("\\n", "\n").replace("\\t", "\t")
    kind = RECORDS if flags.records else TOKENS
    settings = CorpusSettings(
        DocumentRules(kind, flags.field, separator, flags.errors),
        "" if flags.records else flags.tokenizer,
        flags.eos,
        flags.held_out,
        flags.seed,
        flags.dedup,
        flags.chunk_kib << 10,
        flags.shard_mib * MIB,
        flags.unit_mib * MIB,
        flags.parts,
        flags.near_duplicates,
    )
    jobs = flags.jobs or os.cpu_count() or 1
    if jobs > 1:  # each process has one processor
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    number, _, of = (flags.part or "1/1").partition("/")
    console = Console()
    plan = PreparePlan.of(sources, settings)
    with bytes_bar(console) as watch:
        part = PreparePart(int(number), int(of))
        card = make(normalize(url), plan, licence=flags.licence, jobs=jobs, part=part, watch=watch)
    if card is None:
        console.print(
            f"part {flags.part or '1/1'} is done; others are not yet: who ends last writes the "
            "card, and the same command without --part does all that is left"
        )
        return DONE
    print_card(card, normalize(url), console)
    return DONE


@contextmanager
def bytes_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    tasks: dict[str, Any] = {}
    with progress_bar(console) as bar:

        def watch(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)

        yield watch


# ---- show ----------------------------------------------------------------------------------------
def show(flags: ShowFlags) -> int:
    """Print a corpus' card, some of its items, or the samples of any step of a run."""
    from harness.data.card import TOKENS
    from harness.data.opening import card_of
    from harness.data.reading import Records, Tokens

    url, *others = flags.urls
    store, console = open_store(url), Console()
    card = card_of(store)
    if others and not flags.step:
        raise BadInput(f"harness data show {url} {others[0]}: wanted one corpus, or --step")
    if bool(flags.step) != bool(flags.run):
        raise BadInput("harness data show URL --run RUN --step K: wanted both, found one of them")
    if flags.item:
        dataset: Tokens | Records
        if card.kind == TOKENS:
            dataset = Tokens(url, flags.length, split=flags.split, source=flags.source)
        else:
            dataset = Records(url, split=flags.split, source=flags.source)
        for item in flags.item:
            if not 0 <= item < len(dataset):
                raise BadInput(f"--item {item}: wanted 0 to {len(dataset) - 1}")
            _print_item(dataset, item, f"item {item}", console)
    if flags.step:
        data, batching = read_by(existing_store(flags.run), flags.urls, flags.source)
        for step in flags.step:
            for one in samples_of(data, batching, step):
                what = f"step {step}, micro-batch {one.micro}, position {one.position}"
                what += f", item {one.sample}"
                what += f": item {one.item} of {one.source}" if one.source else ""
                _print_item(one.dataset, one.item, what, console)
    if not flags.item and not flags.step:
        print_card(card, normalize(url), console)
        _print_list(store, card, console)
    return DONE


def _print_item(dataset: Tokens | Records, item: int, what: str, console: Console) -> None:
    from harness.data.describing import decoder_of, described
    from harness.data.reading import Tokens

    console.print(f"--- {what}", style="bold", highlight=False, markup=False)
    if isinstance(dataset, Tokens):
        text = decoder_of(dataset.card)(dataset[item][0].tolist())[:SHOWN_LETTERS]
    else:
        text = described(dataset[item], SHOWN_LETTERS)
    console.print(text, highlight=False, markup=False)


def print_card(card: Card, url: str, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"{card.kind} at {url}", title_justify="left")
    unit = card.kind
    for column in ("split", "documents", unit, "bytes", "shards"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split in card.splits:
        numbers = (split.documents, split.items, split.nbytes, split.shards)
        table.add_row(split.name, *(f"{number:,}" for number in numbers))
    console.print(table)
    said = {
        "content": card.content,
        "format": card.layout,
        "at": card.source,
        "fields": ", ".join(f"{one.name} {one.encoding}".rstrip() for one in card.fields),
        "tokens": f"{card.dtype}, below {card.vocabulary}, eos {card.eos}",
        "tokenizer": f"{card.tokenizer} ({card.tokenizer_hash}), {card.dtype}, eos {card.eos}",
        "sources": f"{len(card.sources)}, {sum(s.nbytes for s in card.sources):,} bytes",
        "dropped": f"{card.dropped} documents that were there before"
        + (f" ({card.near})" if card.near else ""),
        "licence": card.licence,
    }
    absent = {
        "tokenizer": not card.tokenizer,
        "tokens": not (card.layout and card.dtype),
        "dropped": card.dropped < 0,
    }
    for name, words in said.items():
        if words and not absent.get(name):
            console.print(f"{name}: {words}", highlight=False)


def _print_list(store: ObjectStore, card: Card, console: Console) -> None:
    from harness.data.excluding import list_of

    newest = list_of(store, card)
    said = ", ".join(f"{newest.count(name):,} {card.kind} of {name}" for name in newest.splits)
    if newest.number:
        why = f" ({newest.reason})" if newest.reason else ""
        console.print(f"exclusion list {newest.number}: {said}{why}", highlight=False, markup=False)


# ---- verify --------------------------------------------------------------------------------------
def verify(flags: DataVerifyFlags) -> int:
    """Read all of a corpus and compare it with its card. Exit status 1 names what is damaged."""
    from harness.data.checking import damaged
    from harness.data.excluding import history
    from harness.data.opening import card_of

    store, console = open_store(flags.url), Console()
    card = card_of(store)
    history(store, card)
    whole, done, found = sum(split.nbytes for split in card.splits), 0, 0
    with bytes_bar(console) as watch:

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            watch("verifying", done, whole)

        for damage in damaged(store, card, tell, flags.source):
            found += 1
            console.print(f"{damage.key}: {damage.what}", style="red", highlight=False)
    shards = sum(split.shards for split in card.splits)
    made = "indexed" if card.layout else "prepared"
    if found:
        console.print(f"{found} of {shards} shards are damaged", highlight=False)
        return FAILED
    console.print(
        f"{shards} shards, {whole:,} bytes: each is what was {made} (content {card.content})",
        highlight=False,
    )
    return DONE


WORDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "prepare": (PrepareFlags, prepare),
    "index": (IndexFlags, index),
    "show": (ShowFlags, show),
    "exclude": (ExcludeFlags, exclude),
    "spikes": (SpikesFlags, spikes),
    "verify": (DataVerifyFlags, verify),
}
