"""`harness data`: prepare a corpus once, show it, verify it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.table import Table

from harness.bucket.archive import read_facts
from harness.bucket.layout import IDENTITY, Identity
from harness.cli.common import DONE, FAILED, existing_store
from harness.core.batch import indices_at, positions_of
from harness.core.flags import flag, positional
from harness.core.input_files import read_given
from harness.core.sample_order import batching_of
from harness.core.world import BadInput
from harness.data.card import RECORDS, TOKENS, card_of, hash_of
from harness.data.datasets import Records, Tokens
from harness.data.exclusions import exclude as add
from harness.data.exclusions import history, list_of, marked, merged_ranges
from harness.data.formats.format import IndexSettings
from harness.data.mixture import Mixture, proved_by
from harness.data.outliers import Oddities, Spike, decoder_of, described
from harness.data.outliers import spikes as found_in
from harness.data.prepare.documents import DocumentRules
from harness.data.prepare.indexing import IndexPlan, make_index
from harness.data.prepare.prepare import PreparePart, PreparePlan
from harness.data.prepare.prepare import prepare as make
from harness.data.prepare.shard_writer import CorpusSettings
from harness.data.verify import TokenRow, damaged, each_record, tokenizer_here
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console, progress_bar

if TYPE_CHECKING:
    from harness.core.batch import Batching
    from harness.data.card import Card, Int64Array
    from harness.data.outliers import Oddness

# `harness data exclude`: exclude documents from future training, by a list beside the corpus.

SHOWN = 20  # most documents that are printed
SHOWN_MATCH_LETTERS = 200  # most characters of each


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
    """The tokens or records [start, end) of the split. `text`: an excerpt."""

    start: int
    end: int
    text: str


def exclude(flags: ExcludeFlags) -> int:
    """Exclude documents or records from now on; the rest of the corpus stays as it is."""
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
        console.print(one.text[:SHOWN_MATCH_LETTERS], highlight=False, markup=False)
    if len(found) > SHOWN:
        console.print(f"... and {len(found) - SHOWN} more", highlight=False)
    ranges = merged_ranges([(one.start, one.end) for one in found])
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
    """Read the hashes of a file and return the first 16 bytes of each. Raises BadInput."""
    found = set()
    for line in read_given(path, "hashes, one in each line").decode(errors="replace").splitlines():
        if line.strip():
            word = line.split()[0]
            if not re.fullmatch(r"[0-9a-fA-F]{32,64}", word):
                raise BadInput(f"{path}: wanted hashes of 32 hex digits or more, found {word:.40}")
            found.add(bytes.fromhex(word[:32]))
    return frozenset(found)


def _tokens(flags: ExcludeFlags) -> Iterator[FoundDocument]:
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
        ids = row.read(start, min(end, start + SHOWN_MATCH_LETTERS)).tolist()
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
    if flags.token or flags.item:
        raise BadInput("wanted a corpus of tokens, found one of records; name a --record")
    records = Records(flags.url, split=flags.split)
    records.exclude(0)
    for i in sorted(set(flags.record)):
        if not 0 <= i < len(records):
            raise BadInput(f"--record {i}: wanted 0 to {len(records) - 1}")
        yield FoundDocument(i, i + 1, described(records[i], SHOWN_MATCH_LETTERS))
    if not flags.containing and not flags.hashes:
        return
    hashes = _hashes(flags.hashes) if flags.hashes else frozenset()
    wanted = flags.containing.encode()
    for i, record in each_record(records):
        has = any(wanted in value for value in record.values()) if wanted else False
        if has or any(hash_of(value) in hashes for value in record.values()):
            yield FoundDocument(i, i + 1, described(record, SHOWN_MATCH_LETTERS))


def _around(text: str, what: str) -> str:
    """Return an excerpt of the text around `what`; its beginning if `what` is ""."""
    at = max(0, text.find(what) - SHOWN_MATCH_LETTERS // 2) if what else 0
    return text[at : at + SHOWN_MATCH_LETTERS]


# `harness data index`: index existing files, so that they can be read in place.

LAYOUTS = ("mds", "litdata", "megatron", "tar", "parquet", "tokens")
DTYPES = ("uint16", "uint32", "uint8", "int16", "int32", "int64")


@dataclass(frozen=True)
class IndexFlags:
    source: str = positional(
        "a folder, a glob or a file, on this computer or in a bucket: MDS, LitData, Megatron's "
        ".bin and .idx, WebDataset's tar, Parquet, nanoGPT's .bin; nothing is written there"
    )
    url: str = positional("DEST: URL of the index to make, a corpus without data of its own")
    format: str = flag("", "of the files; default: it is found out", choices=["", *LAYOUTS])
    eos: int = flag(
        -1, "id of the token that ends each document, for boundaries", metavar="ID", at_least=-1
    )
    dtype: str = flag("", "of tokens without a header; default: uint16", choices=["", *DTYPES])
    licence: str = flag("", "what the card says of the licence")
    jobs: int = flag(0, "files read at once; 0: two for each processor", at_most=1024)
    chunk_kib: int = flag(
        0, "what is read and checked at once; 0: 256, of Parquet 4096", at_most=1 << 18
    )


def index(flags: IndexFlags) -> int:
    """Make an index of existing files, to read them in place; resume an interrupted one."""
    settings = IndexSettings(flags.format, flags.eos, flags.dtype, flags.chunk_kib << 10)
    plan, console = IndexPlan.of(flags.source, settings), Console()
    jobs = flags.jobs or 2 * (os.cpu_count() or 1)
    with bytes_bar(console) as watch:
        card = make_index(normalize(flags.url), plan, licence=flags.licence, jobs=jobs, watch=watch)
    print_card(card, normalize(flags.url), console)
    return DONE


# `harness data spikes`: find steps whose loss spikes, and print their samples, oddest first.

SHOWN_SPIKE_LETTERS = 300  # most characters of a sample that are printed


@dataclass(frozen=True)
class SpikesFlags:
    run: str = positional("URL of the run")
    data: tuple[str, ...] = flag(
        (), "URL of the corpus that it reads; of a mixture repeated", metavar="URL"
    )
    step: tuple[int, ...] = flag(
        (), "look at this step, whether it spikes or not; may be repeated", metavar="K", type=int
    )
    score: float = flag(
        6.0, "robust z-score from which on a loss or a gradient norm stands out", at_least=1
    )
    steps: int = flag(3, "how many steps to look into, the worst first", at_least=1)
    samples: int = flag(3, "how many samples of each to print, the oddest first", at_least=1)


def spikes(flags: SpikesFlags) -> int:
    """Find the steps whose loss or gradient spikes, and print their oddest samples."""
    if not flags.data:
        raise BadInput("harness data spikes RUN --data URL: wanted the URL of the run's corpus")
    run, console = existing_store(flags.run), Console()
    dataset, batching = read_by(run, flags.data)
    for one in dataset.sources.values() if isinstance(dataset, Mixture) else [dataset]:
        one.exclude(0)  # nothing is left out
    everything = found_in([s.fact for s in read_facts(run)], flags.score)
    by_step = {spike.step: spike for spike in everything}
    steps = list(flags.step) or [spike.step for spike in everything[: flags.steps]]
    if not steps:
        console.print(f"no step stands out by {flags.score:g} usual distances", highlight=False)
        return DONE
    if not flags.step and len(everything) > len(steps):
        others = ", ".join(str(spike.step) for spike in everything[len(steps) :][:20])
        console.print(f"also: steps {others} (--steps, --step)", highlight=False)
    odd = functools.cache(Oddities)  # one for each corpus
    for step in steps:
        spike: Spike | None = by_step.get(step)
        said = "does not stand out"
        if spike is not None:
            said = (
                f"{spike.what} {spike.value:.4g}, usual {spike.usual:.4g}, score {spike.score:.1f}"
            )
        console.print(f"step {step}: {said}", style="bold", highlight=False)
        _print_samples(dataset, batching, odd, step, flags, console)
    return DONE


@dataclass(frozen=True)
class StepSample:
    """A sample of a step. `sample`: its index in all data; `item`: its index in `dataset`;
    `source`: the name of `dataset` in a mixture, else ""."""

    position: int
    micro: int
    sample: int
    source: str
    dataset: Tokens | Records
    item: int


def read_by(
    run: ObjectStore, urls: Sequence[str], source: str = ""
) -> tuple[Tokens | Records | Mixture, Batching]:
    """Return the data that the run reads, and the order. `source`: see `CorpusReader`. Raises
    BadInput."""
    found = Identity.decode(run.get(IDENTITY))
    dataset = proved_by(found.data, urls, source=source)
    return dataset, batching_of(vars(found) | found.body)  # missing fields have defaults


def samples_of(
    dataset: Tokens | Records | Mixture, batching: Batching, step: int
) -> list[StepSample]:
    """Return the samples of a step, ordered by position. Raises BadInput."""
    if step < 1:
        raise BadInput(f"--step {step}: steps are numbered from 1 on")
    at = positions_of(batching, step)
    samples = indices_at(batching, at).tolist()
    dataset.read_ahead(samples)
    out = []
    for position, sample in zip(at.tolist(), samples, strict=True):
        micro = (position % batching.global_batch) // batching.micro_batch
        one, name, item = dataset, "", sample
        if isinstance(dataset, Mixture):
            name, item = dataset.source_of(sample)
            one = dataset.sources[name]
        out.append(StepSample(position, micro, sample, name, cast("Tokens | Records", one), item))
    return out


def _print_samples(
    dataset: Tokens | Records | Mixture,
    batching: Batching,
    odd: Callable[[Tokens | Records], Oddities],
    step: int,
    flags: SpikesFlags,
    console: Console,
) -> None:
    rows = [(odd(one.dataset).of(one.item), one) for one in samples_of(dataset, batching, step)]
    rows.sort(key=lambda row: (-row[0].score, row[1].position))
    for found, one in rows[: flags.samples]:
        where = f"position {one.position}, micro-batch {one.micro}, item {one.item}"
        console.print(f"  {where}: odd by {found.score:.1f}: {found.why}", highlight=False)
        console.print(f"  {_how_to_exclude(one.dataset, found)}", highlight=False, soft_wrap=True)
        console.print(_shown(one.dataset, found, one.item), highlight=False, markup=False)


@functools.cache
def _gone(dataset: Tokens | Records) -> Int64Array:
    """Return the ranges that the corpus' newest exclusion list leaves out, as an (n, 2) array."""
    return list_of(open_store(dataset.url), dataset.card).ranges(dataset.split)


def _how_to_exclude(dataset: Tokens | Records, found: Oddness) -> str:
    split, gone = dataset.split, _gone(dataset)
    of_tokens = isinstance(dataset, Tokens)
    place = (found.start + found.end) // 2
    what = f"tokens {found.start} to {found.end - 1}" if of_tokens else f"record {found.start}"
    if marked(gone, place, place + 1).any():
        return f"{what}: left out by now"
    name = "--token" if of_tokens else "--record"
    more = "" if split == "train" else f" --split {split}"
    return f"{what}: harness data exclude {dataset.url} {name} {place}{more}"


def _shown(dataset: Tokens | Records, found: Oddness, item: int) -> str:
    if not isinstance(dataset, Tokens):
        return described(dataset[item], SHOWN_SPIKE_LETTERS)
    first = item * dataset.length
    ids = dataset[item][0][found.start - first : found.end - first]
    return decoder_of(dataset.card)(ids.tolist())[:SHOWN_SPIKE_LETTERS]


SHOWN_LETTERS = 2000  # most characters shown of a sample, or of each field of a record
MIB = 1 << 20


def _part(text: str) -> None:
    """Check a part such as 1/4, or "". Raises ValueError that says what is wanted."""
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


# ---- prepare -------------------------------------------------------------------------------------
def prepare(flags: PrepareFlags) -> int:
    """Make a corpus of tokens or records; resume an interrupted one."""
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
    if jobs > 1:  # our processes already use all processors
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
        for step in flags.step:
            print_step(existing_store(flags.run), flags.urls, step, console, flags.source)
    if not flags.item and not flags.step:
        print_card(card, normalize(url), console)
        _print_list(store, card, console)
    return DONE


def print_step(
    run: ObjectStore,
    urls: Sequence[str],
    step: int,
    console: Console,
    source: str = "",
    only: Sequence[int] = (),
) -> None:
    """Print the samples of a step of a run. `urls`: its data; `only`: these micro-batches. Raises
    BadInput."""
    data, batching = read_by(run, urls, source)
    for one in samples_of(data, batching, step):
        if only and one.micro not in only:
            continue
        what = f"step {step}, micro-batch {one.micro}, position {one.position}, item {one.sample}"
        what += f": item {one.item} of {one.source}" if one.source else ""
        _print_item(one.dataset, one.item, what, console)


def _print_item(dataset: Tokens | Records, item: int, what: str, console: Console) -> None:
    console.print(f"--- {what}", style="bold", highlight=False, markup=False)
    if isinstance(dataset, Tokens):
        text = decoder_of(dataset.card)(dataset[item][0].tolist())[:SHOWN_LETTERS]
    else:
        text = described(dataset[item], SHOWN_LETTERS)
    console.print(text, highlight=False, markup=False)


def print_card(card: Card, url: str, console: Console) -> None:
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
    newest = list_of(store, card)
    said = ", ".join(f"{newest.count(name):,} {card.kind} of {name}" for name in newest.splits)
    if newest.number:
        why = f" ({newest.reason})" if newest.reason else ""
        console.print(f"exclusion list {newest.number}: {said}{why}", highlight=False, markup=False)


# ---- verify --------------------------------------------------------------------------------------
def verify(flags: DataVerifyFlags) -> int:
    """Read all of a corpus and compare it with its card. Exit status 1 names what is damaged."""
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
