"""`harness data index`: foreign files become a corpus in place; each is read once.

    find      SOURCE -> its format, and the files in their order
    files     each -> hashes of its chunks and the places of its items, in a note
    card      all notes -> a table of the items' places, the index, the card

Files are read by threads, since reading and hashing release Python's lock. An interrupted command
continues with the files that have no note yet. Nothing is ever written at SOURCE.
"""

from __future__ import annotations

import fnmatch
import glob
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass

from harness.core.world import BadInput
from harness.data.card import (
    FORMAT,
    RECORDS,
    TOKENS,
    Card,
    CorpusIndex,
    ShardEntry,
    ShardPlace,
    SourceCard,
    SplitCard,
    hash_of,
    index_key,
)
from harness.data.formats import FORMATS, PLACE
from harness.data.formats.format import ForeignFiles, ForeignFormat, IndexSettings, SourceFolder
from harness.data.formats.streamed_file import FilePass, decoded, encoded
from harness.data.prepare.prepare import POLL_S, WatchBytes, finished, made_already
from harness.data.prepare.shard_writer import (
    SHARD_NBYTES,
    TRAIN,
    ShardWriter,
    note_key,
    work_folder,
)
from harness.data.prepare.units import above_pattern
from storage.canonical_json import canonical, digest
from storage.stores.objects import ObjectStore, get_each
from storage.stores.store_urls import normalize, open_store

FILES = (".bin", ".idx", ".tar", ".parquet")  # endings of a SOURCE that is a file, not a folder


@dataclass(frozen=True)
class IndexPlan:
    """The plan of an index. `url`: the folder of the files; `is_whole`: the whole folder was named,
    not some of its files; `digest`: of the files' names and sizes and of all settings."""

    url: str
    is_whole: bool
    format: ForeignFormat
    found: ForeignFiles
    settings: IndexSettings
    digest: str

    @property
    def work(self) -> str:
        return work_folder(self.digest)

    @property
    def chunk_nbytes(self) -> int:
        return self.settings.chunk_nbytes or self.format.chunk_nbytes

    @staticmethod
    def of(source: str, settings: IndexSettings) -> IndexPlan:
        """Return the plan for a source. Raises BadInput, StoreError."""
        folder = _folder(source)
        url = folder.store.url
        format, found = _found(folder, settings)
        said = {
            "settings": asdict(settings),
            "format": format.name,
            "files": [[file.key, file.nbytes, file.items] for file in found.files],
            "fields": [asdict(one) for one in found.fields],
            "dtype": found.dtype,
        }
        is_whole = normalize(source) == url
        return IndexPlan(url, is_whole, format, found, settings, digest(canonical(said)))


def _folder(source: str) -> SourceFolder:
    """Return the source's folder with the keys that a folder, a glob or a file names. Raises
    StoreError."""
    url = normalize(source)
    root, _, name = url.rpartition("/")
    if glob.has_magic(url):
        root = above_pattern(url)
        store = open_store(root)
        keys = fnmatch.filter(store.list(""), url[len(root) + 1 :])
    elif name.endswith(FILES):
        store, stem = open_store(root), name.rpartition(".")[0]
        beside = {name, f"{stem}.bin", f"{stem}.idx"} if name.endswith(FILES[:2]) else {name}
        keys = [key for key in store.list(stem) if key in beside]
    else:
        store = open_store(url)
        keys = store.list("")
    return SourceFolder(store, tuple(keys))


def _found(folder: SourceFolder, asked: IndexSettings) -> tuple[ForeignFormat, ForeignFiles]:
    """Return the dataset's format and files. Raises BadInput."""
    there: list[tuple[ForeignFormat, ForeignFiles]] = []
    for format in [FORMATS[asked.layout]] if asked.layout else FORMATS.values():
        if (found := format.find(folder, asked)) is not None:
            there.append((format, found))
            if format.is_sure:
                break
    if len(there) != 1 or not there[0][1].files:
        names = ", ".join(format.name for format, _ in there) or "none"
        raise BadInput(
            f"{folder.store.url}: wanted the files of one dataset in one of the formats "
            f"{', '.join(FORMATS)}, found {names} in {len(folder.keys)} files; name a folder, a "
            "file or a glob of one, or --format"
        )
    if there[0][1].kind == RECORDS and (asked.eos >= 0 or asked.dtype):
        raise BadInput(f"{folder.store.url}: --eos and --dtype are of tokens, found records")
    return there[0]


# ---- the index -----------------------------------------------------------------------------------
def make_index(
    url: str,
    plan: IndexPlan,
    *,
    licence: str = "",
    jobs: int = 1,
    watch: WatchBytes = lambda what, done, of: None,
) -> Card:
    """Return the card of the corpus at `url`; an interrupted one is continued. Raises BadInput,
    StoreError."""
    store = open_store(url)
    if plan.is_whole and f"{store.url}/".startswith(f"{plan.url}/"):
        raise BadInput(
            f"{store.url}: wanted a place for the index outside of {plan.url}, where nothing is "
            "written, found one in it; name another DEST"
        )
    if (made := made_already(store, plan.digest)) is not None:
        return made
    _scan_all(store, plan, jobs, watch)
    return _finish(store, plan, licence)


def _scan_all(store: ObjectStore, plan: IndexPlan, jobs: int, watch: WatchBytes) -> None:
    """Write a note for each file that has none."""
    source, files = open_store(plan.url), plan.found.files
    lock, stopped = threading.Lock(), threading.Event()
    whole = sum(file.nbytes for file in files)
    there = set(store.list(plan.work))
    left = [i for i in range(len(files)) if note_key(plan.work, i) not in there]
    done = whole - sum(files[i].nbytes for i in left)

    def tell(nbytes: int) -> None:
        nonlocal done
        if stopped.is_set():  # also in the middle of a file
            raise CancelledError
        with lock:
            done += nbytes

    def scan(i: int) -> None:
        file = files[i]
        passing = FilePass(source, file.key, file.nbytes, plan.chunk_nbytes, tell)
        plan.format.scan(passing, file, plan.found, plan.settings)
        store.create(note_key(plan.work, i), encoded(passing.shards))

    with ThreadPoolExecutor(jobs, "index") as pool:
        futures = {pool.submit(scan, i) for i in left}
        try:
            while futures:
                ended, futures = wait(futures, POLL_S)
                for future in ended:
                    future.result()
                watch("indexing", done, whole)
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finish(store: ObjectStore, plan: IndexPlan, licence: str) -> Card:
    """Write the table, the index and the card, from all notes."""
    files, found = plan.found.files, plan.found
    table = ShardWriter(store, TOKENS, plan.chunk_nbytes, SHARD_NBYTES)
    entries: list[ShardEntry] = []
    places: list[ShardPlace] = []
    at, documents, largest = 0, 0, -1  # at: bytes of the row so far
    notes = get_each(store, [note_key(plan.work, i) for i in range(len(files))])
    for file, (key, data) in zip(files, notes, strict=True):
        for shard in decoded(data or b"", f"{store.url}/{key}"):
            if len(shard.places):
                table.add((shard.places + (at - shard.start)).astype(PLACE).tobytes(), 0)
            entries.append(shard.entry)
            places.append(ShardPlace(file.key, shard.start, file.nbytes))
            at += shard.entry.nbytes
            documents += shard.documents
            largest = max(largest, shard.largest)
    table.close()
    entries += table.entries
    index = CorpusIndex.of(plan.chunk_nbytes, entries, places).encode()
    name, items = hash_of(index).hex(), sum(entry.items for entry in entries)
    store.create(index_key(name), index)
    is_tokens = found.kind == TOKENS
    split = SplitCard(
        TRAIN,
        name,
        len(entries),
        documents if is_tokens else items,
        items,
        sum(entry.nbytes for entry in entries),
    )
    card = Card(
        kind=found.kind,
        splits=(split,),
        sources=(SourceCard(plan.url, sum(file.nbytes for file in files)),),
        dtype=found.dtype,
        eos=plan.settings.eos,
        vocabulary=largest + 1,
        chunk_nbytes=plan.chunk_nbytes,
        licence=licence,
        plan=plan.digest,
        format=FORMAT,
        layout=plan.format.name,
        fields=found.fields,
        source=plan.url,
    ).sealed()
    return finished(store, card, plan.work)
