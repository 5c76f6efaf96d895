"""`harness data prepare`: sources become a corpus, by any number of processes and machines.

    plan      sources -> numbered units of work; the same wherever it is made
    hashes    with --dedup or --near-duplicates: of all documents; finds those that come twice
    units     each -> its shards, named by their content, then a note that it is done
    card      the process that finds all notes makes the indexes and the card from them

Each object is created once and never changed. A killed process leaves at most some shards without
a note, which the next one makes again, byte for byte, under the same names. Nothing records who
made what, so the same sources and settings give the same corpus however the work was divided.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.core.world import BadInput, HarnessError
from harness.data.card import (
    CARD,
    RECORDS,
    WORK,
    Card,
    CorpusIndex,
    Int64Array,
    ShardEntry,
    SourceCard,
    SplitCard,
    card_of,
    hash_of,
    index_key,
)
from harness.data.prepare.dedupe import NearRule, near_duplicates
from harness.data.prepare.shard_writer import (
    TRAIN,
    CorpusSettings,
    UnitMaker,
    UnitNote,
    hashes_key,
    note_key,
    work_folder,
)
from harness.data.prepare.tokenizers import Tokenizer, tokenizer_of
from harness.data.prepare.units import SourceFile, WorkUnit, source_files, units_of
from harness.node.heartbeat import die_with_parent
from storage.canonical_json import canonical, digest
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, get_each, size_each
from storage.stores.store_urls import open_store

POLL_S = 0.2  # interval of progress updates
DEDUP_NBYTES = 1 << 30  # memory for hashes and for sorting them
WatchBytes = Callable[[str, int, int], None]  # (activity, bytes done, bytes in all)


@dataclass(frozen=True)
class PreparePlan:
    """The plan of a corpus. `digest`: of the sources' names and sizes and of all settings;
    preparations with the same digest share their work."""

    settings: CorpusSettings
    files: tuple[SourceFile, ...]
    units: tuple[WorkUnit, ...]
    tokenizer: Tokenizer | None
    digest: str
    near: NearRule | None = None

    @property
    def work(self) -> str:
        return work_folder(self.digest)

    @property
    def drops(self) -> bool:
        """True if documents that repeat an earlier one are dropped."""
        return self.settings.dedup or self.near is not None

    @staticmethod
    def of(sources: Sequence[str], settings: CorpusSettings) -> PreparePlan:
        """Return the plan for these sources. Raises BadInput, StoreError."""
        reading, tokenizer = settings.reading, None
        if reading.kind != RECORDS:
            tokenizer = tokenizer_of(settings.tokenizer, settings.eos)
        files = tuple(source_files(sources))
        units = units_of(files, settings.unit_nbytes, reading.may_cut, settings.parts)
        plain = asdict(settings)
        if not plain.pop("near"):
            near = None
        elif reading.kind == RECORDS:
            raise BadInput("--near-duplicates: wanted texts, found --records, which have no words")
        else:
            near = NearRule.of(settings.near)
            plain["near"] = near.words
        said = {
            "settings": plain,
            "files": [[file.name, file.nbytes] for file in files],
            "tokenizer": tokenizer.hash if tokenizer else "",
        }
        whole = digest(canonical(said))
        return PreparePlan(settings, files, tuple(units), tokenizer, whole, near)


@dataclass(frozen=True)
class PreparePart:
    """The share of units that this machine does: every `of`-th from `number` on (1, 2, ...)."""

    number: int = 1
    of: int = 1

    def among(self, units: Iterable[WorkUnit]) -> list[WorkUnit]:
        return [unit for unit in units if unit.number % self.of == self.number - 1]


def prepare(
    url: str,
    plan: PreparePlan,
    *,
    licence: str = "",
    jobs: int = 1,
    part: PreparePart = PreparePart(),
    watch: WatchBytes = lambda what, done, of: None,
) -> Card | None:
    """Return the card of the corpus; None if other parts are not done yet, and the last one will
    write it. An interrupted preparation is continued. Raises BadInput, HarnessError, StoreError."""
    store = open_store(url)
    if (made := made_already(store, plan.digest)) is not None:
        return made
    dropped: dict[int, Int64Array] = {}
    if plan.drops:
        _do(store, url, plan, part, jobs, _hash_unit, hashes_key, watch, {})
        hashed = _keys_if_done(store, plan, hashes_key)
        if hashed is None:
            return made_already(store, plan.digest)
        nbytes = sum(size or 0 for _, size in size_each(store, hashed))
        found = lambda: (data or b"" for _, data in get_each(store, hashed))  # noqa: E731
        if plan.near is None:
            dropped = duplicates(found, nbytes)
        else:
            dropped = near_duplicates(found, plan.near.bands, nbytes, DEDUP_NBYTES)
    _do(store, url, plan, part, jobs, _make_unit, note_key, watch, dropped)
    noted = _keys_if_done(store, plan, note_key)
    if noted is None:  # the last part may be about to finish, or may just have done so
        return made_already(store, plan.digest)
    notes = [
        UnitNote.decode(data or b"", f"{store.url}/{key}") for key, data in get_each(store, noted)
    ]
    count = sum(map(len, dropped.values())) if plan.drops else -1
    return _finish(store, plan, notes, licence, count)


def made_already(store: ObjectStore, plan: str) -> Card | None:
    """Return the card that is there already; None if there is none. `plan`: the digest of the
    wanted corpus. Raises BadInput if another corpus is there."""
    try:
        store.size(CARD)
    except NotFound:
        others = {key.split("/")[1] for key in store.list(WORK)} - {plan}
        if others:
            raise BadInput(
                f"{store.url}: wanted a new corpus or the same one that was interrupted, found the "
                "work of one from other sources or settings; name another DEST, or delete that one"
            ) from None
        return None
    card = card_of(store)
    if card.plan != plan:
        raise BadInput(
            f"{store.url}: wanted a place for a new corpus, found one of other sources or "
            "settings, and a corpus is never changed; name another DEST"
        )
    return card


def finished(store: ObjectStore, card: Card, work: str) -> Card:
    """Create the card, which makes the corpus exist, and delete the notes below `work`. Return the
    card in the store: another process may have been first. Raises StoreError."""
    store.create(CARD, card.encode())
    for key in store.list(work):
        store.delete(key)
    return card_of(store)


# ---- units, by processes -------------------------------------------------------------------------
Job = Callable[[UnitMaker, WorkUnit, frozenset[int]], None]


def _hash_unit(maker: UnitMaker, unit: WorkUnit, dropped: frozenset[int]) -> None:
    maker.hash(unit)


def _make_unit(maker: UnitMaker, unit: WorkUnit, dropped: frozenset[int]) -> None:
    maker.make(unit, dropped)


def _do(
    store: ObjectStore,
    url: str,
    plan: PreparePlan,
    part: PreparePart,
    jobs: int,
    job: Job,
    key: Callable[[str, int], str],
    watch: WatchBytes,
    dropped: dict[int, Int64Array],
) -> None:
    """Run the job on the units of this part that are not done yet."""
    there = set(store.list(plan.work))
    units = part.among(plan.units)
    left = [unit for unit in units if key(plan.work, unit.number) not in there]
    whole = sum(_nbytes(unit) for unit in units)
    before = whole - sum(_nbytes(unit) for unit in left)
    what = "hashing documents" if job is _hash_unit else "preparing"
    given = [(unit, frozenset(dropped.get(unit.number, _NONE).tolist())) for unit in left]
    if jobs < 2 or len(left) < 2:
        done = before

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            watch(what, done, whole)

        maker = UnitMaker(store, plan.settings, plan.work, tell)
        for unit, without in given:
            job(maker, unit, without)
        return
    with _processes(min(jobs, len(left)), url, plan) as (pool, counter):
        futures = {pool.submit(_in_process, job, *one) for one in given}
        while futures:
            ended, futures = wait(futures, POLL_S)
            for future in ended:
                future.result()
            watch(what, before + counter.value, whole)


_NONE = np.zeros(0, np.int64)
_mine: UnitMaker | None = None  # one in each process of the pool


@contextmanager
def _processes(jobs: int, url: str, plan: PreparePlan) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    given = (url, plan.settings, plan.work, counter, os.getpid())
    with ProcessPoolExecutor(jobs, context, _begin_process, given) as pool:
        try:
            yield pool, counter
        except BrokenProcessPool as e:
            raise HarnessError(
                "a process that prepared data was killed, by the kernel perhaps, for memory; start "
                "the same command again with fewer --jobs: it goes on where it was"
            ) from e
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin_process(
    url: str, settings: CorpusSettings, work: str, counter: Any, parent: int
) -> None:
    global _mine
    die_with_parent(parent)

    def tell(nbytes: int) -> None:
        with counter.get_lock():
            counter.value += nbytes

    _mine = UnitMaker(open_store(url), settings, work, tell)


def _in_process(job: Job, unit: WorkUnit, dropped: frozenset[int]) -> None:
    assert _mine is not None
    job(_mine, unit, dropped)


def _nbytes(unit: WorkUnit) -> int:
    return sum(extent.nbytes for extent in unit.extents)


# ---- what all units have become ------------------------------------------------------------------
def _keys_if_done(
    store: ObjectStore, plan: PreparePlan, key: Callable[[str, int], str]
) -> list[str] | None:
    """Return the keys of all units, in their order; None if some do not exist yet."""
    keys = [key(plan.work, unit.number) for unit in plan.units]
    return keys if {*keys} <= {*store.list(plan.work)} else None


def duplicates(
    hashes: Callable[[], Iterable[bytes]], nbytes: int, most_nbytes: int = DEDUP_NBYTES
) -> dict[int, Int64Array]:
    """Return the documents that equal an earlier one: numbers within their units, by unit.
    `hashes`: 16 bytes for each document, unit by unit, `nbytes` in all; it is read several times
    where sorting all at once would take more than `most_nbytes`."""
    rounds = max(1, -(-4 * nbytes // most_nbytes))
    out: dict[int, list[Int64Array]] = {}
    for bucket in range(rounds):
        rows, units, numbers = [], [], []
        for unit, data in enumerate(hashes()):
            found = np.frombuffer(data, "<u8").reshape(-1, 2)
            here = np.flatnonzero(found[:, 0] % np.uint64(rounds) == bucket)
            rows.append(found[here])
            units.append(np.full(len(here), unit))
            numbers.append(here)
        row, unit_of, number = (np.concatenate(each) for each in (rows, units, numbers))
        order = np.lexsort((np.arange(len(row)), row[:, 1], row[:, 0]))
        again = order[1:][(row[order][1:] == row[order][:-1]).all(axis=1)]
        for unit in np.unique(unit_of[again]).tolist():
            out.setdefault(unit, []).append(np.sort(number[again][unit_of[again] == unit]))
    return {unit: np.concatenate(each) for unit, each in out.items()}


def _finish(
    store: ObjectStore, plan: PreparePlan, notes: list[UnitNote], licence: str, dropped: int
) -> Card:
    """Write the indexes and the card, and return the card. Raises BadInput."""
    s, tokenizer = plan.settings, plan.tokenizer
    splits = tuple(_split(store, s.chunk_nbytes, name, notes) for name in sorted(notes[0].splits))
    if not next(split.items for split in splits if split.name == TRAIN):
        raise BadInput(
            f"{store.url}: wanted documents, found none in {len(plan.files)} sources; look at "
            "--field and --separator, and at the sources"
        )
    card = Card(
        kind=s.reading.kind,
        splits=splits,
        sources=tuple(SourceCard(file.name, file.nbytes) for file in plan.files),
        dtype=tokenizer.dtype if tokenizer else "",
        eos=tokenizer.eos if tokenizer else -1,
        tokenizer=tokenizer.name if tokenizer else "",
        tokenizer_hash=tokenizer.hash if tokenizer else "",
        vocabulary=tokenizer.vocabulary if tokenizer else 0,
        chunk_nbytes=s.chunk_nbytes,
        seed=s.seed,
        held_out=s.held_out,
        dropped=dropped,
        near=plan.near.words if plan.near else "",
        licence=licence,
        plan=plan.digest,
    ).sealed()
    return finished(store, card, plan.work)


def _split(
    store: ObjectStore, chunk_nbytes: int, name: str, notes: Sequence[UnitNote]
) -> SplitCard:
    entries: list[ShardEntry] = [entry for note in notes for entry in note.splits[name][1]]
    data = CorpusIndex.of(chunk_nbytes, entries).encode()
    hash = hash_of(data).hex()
    store.create(index_key(hash), data)
    documents = sum(note.splits[name][0] for note in notes)
    items, nbytes = sum(e.items for e in entries), sum(e.nbytes for e in entries)
    return SplitCard(name, hash, len(entries), documents, items, nbytes)
