"""Cached proofs of single objects, made by several processes. `harness prove verify` makes
millions.

A proof is bytes that depend only on an object's key, its content, a context and the rules of this
code (`RULES`). So it can be made anywhere, and only once: an interrupted verification continues
where it was.
A cached proof counts only for an object with exactly the same content, so every object is read and
hashed each time; only the parsing of its lines is saved.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import BinaryIO

from storage.canonical_json import digest
from storage.stores.objects import ObjectStore, get_each

Prove = Callable[[str, bytes, str], bytes]  # key, content, context; a function of a module
AHEAD = 4  # objects in flight per process
FEW = 64  # up to this many objects, no processes are started
# Increase it when a rule or the form of a proof changes, so that older proofs are not used.
RULES = 3


class Prover:
    """A maker of proofs. `processes`: worker processes; with 0 or 1, this process does the work.
    `memory`: the cache file of earlier proofs; `None` means no cache."""

    def __init__(self, processes: int = 0, memory: Path | None = None):
        self._processes, self._memory = processes, memory
        self._known: dict[bytes, tuple[int, int]] = {}  # name -> (offset, length) in the file
        self._read: BinaryIO | None = None
        self._written: BinaryIO | None = None
        self.remembered = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Prover]:
        """Keep the cache file open while the context lasts."""
        if self._memory is None:
            yield self
            return
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        # two handles, because an appending one loses its position when it also reads
        with open(self._memory, "ab") as self._written, open(self._memory, "rb") as self._read:
            self._written.truncate(self._load(self._read))
            try:
                yield self
            finally:
                self._written.flush()
                self._written = self._read = None

    def each(
        self, store: ObjectStore, keys: Iterable[str], prove: Prove, context: str
    ) -> Generator[tuple[str, bytes | None], None, None]:
        """Yield (key, proof) in the order of `keys`; the proof is `None` if there is no such
        object. Raise StoreError if the bucket fails."""
        wanted = list(keys)
        with contextlib.ExitStack() as stack:
            pool = None
            if self._processes > 1 and len(wanted) > FEW:
                # spawned, not forked, because this process has threads that read
                context_of = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(self._processes, context_of)
                stack.callback(pool.shutdown, cancel_futures=True)
            found = stack.enter_context(contextlib.closing(get_each(store, wanted)))
            coming: deque[tuple[str, bytes, Future[bytes] | bytes | None]] = deque()
            for key, data in found:
                coming.append((key, *self._begin(pool, prove, key, data, context)))
                if len(coming) > AHEAD * max(1, self._processes):
                    yield self._end(*coming.popleft())
            while coming:
                yield self._end(*coming.popleft())

    def _begin(
        self,
        pool: ProcessPoolExecutor | None,
        prove: Prove,
        key: str,
        data: bytes | None,
        context: str,
    ) -> tuple[bytes, Future[bytes] | bytes | None]:
        if data is None:
            return b"", None
        about = (str(RULES), prove.__module__, prove.__name__, key, context, digest(data))
        name = digest("\0".join(about).encode()).encode()
        if (known := self._recall(name)) is not None:
            self.remembered += 1
            return b"", known
        if pool is None:
            return name, prove(key, data, context)
        return name, pool.submit(prove, key, data, context)

    def _end(
        self, key: str, name: bytes, found: Future[bytes] | bytes | None
    ) -> tuple[str, bytes | None]:
        proof = found.result() if isinstance(found, Future) else found
        if name and proof is not None:
            self._keep(name, proof)
        return key, proof

    # ---- the file: name, length, hash, proof, one after the other --------------------------------
    def _load(self, file: BinaryIO) -> int:
        """Index the proofs of the file. Return the offset at which the last whole one ends."""
        at = 0
        while len(head := file.read(80)) == 80:
            try:
                length = int(head[32:48], 16)
            except ValueError:  # for example zeros after a power failure
                break
            body = file.read(length)
            if len(body) < length or digest(body).encode() != head[48:]:
                break
            self._known[head[:32]] = at + 80, length
            at += 80 + length
        return at

    def _recall(self, name: bytes) -> bytes | None:
        if self._read is None or name not in self._known:
            return None
        at, length = self._known[name]
        self._read.seek(at)
        return self._read.read(length)

    def _keep(self, name: bytes, proof: bytes) -> None:
        if self._written is not None:
            head = name + b"%016x" % len(proof) + digest(proof).encode()
            self._written.write(head + proof)
