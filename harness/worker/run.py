"""The run that a session belongs to, as its rank sees it: bucket, epoch, facts, identity. Runs in
the worker."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from harness.bucket.epochs import epoch_numbers, read_epoch
from harness.bucket.heads import signed
from harness.bucket.journal import Journal
from harness.bucket.layout import IDENTITY, Epoch, Identity, epoch_key
from harness.core import records as rec
from harness.core.facts import Fact, Warned
from harness.core.masking import learn
from harness.core.meshes import parse_choice
from harness.core.values import BadObject, canonical
from harness.core.world import BadInput, whole_replicas
from harness.uploader.client import fact_of
from harness.worker.peers import Peers
from storage.errors import NotFound, StoreError
from storage.files import MemoryStore
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.snapshots import Snapshots
from storage.upload import UploadJob, UploadOutcome

# how often facts go to the bucket; elsewhere every FLUSH_REMOTE_S
FLUSH_S = {"file": 1.0, "memory": 1.0}
FLUSH_REMOTE_S = 10.0


class Run:
    """`url`: None without a bucket. `step`: optimizer updates done. `identity`: what the run was
    when it began, once it is known."""

    def __init__(self, peers: Peers, url: str | None, environ: dict[str, str]):
        learn(environ)
        url = url or None  # HARNESS_RUN may be set and empty
        self.peers, self.url, self.step = peers, url, 0
        self.identity: dict[str, Any] | None = None
        self.store: ObjectStore = (
            signed(open_store(url), environ, f"worker, rank {peers.rank}", time.time)
            if url
            else MemoryStore("memory://unnamed", {})
        )
        if url is None:
            peers.print(
                "harness: no run URL (HARNESS_RUN or attach(run=...)); training without snapshots"
            )
        self.snapshots = Snapshots(self.store)
        # by hand: it may lie nowhere
        self._epoch_is_told = "HARNESS_EPOCH" in environ and "HARNESS_STAGE" not in environ
        self.epoch: int = peers.agree(
            lambda: (
                int(environ["HARNESS_EPOCH"]) if "HARNESS_EPOCH" in environ else self._own_epoch()
            )
        )
        self._worlds = tuple(map(int, filter(None, environ.get("HARNESS_WORLDS", "").split(","))))
        meshes = environ.get("HARNESS_MESHES", "")  # that this run may have; "": this one, or none
        self._meshes = parse_choice(meshes) if meshes else None
        self.token = secrets.token_hex(4)
        writer = f"worker-e{self.epoch:06d}-{self.token}"
        # every rank has a token of its own; only rank 0 tells of what all ranks do
        self._own = Journal(self.store, writer, time.time)
        self.journal = self._own if peers.rank == 0 else None
        self._closing = threading.Event()
        if self.journal and url:
            flush_s = FLUSH_S.get(self.store.url.partition("://")[0], FLUSH_REMOTE_S)
            threading.Thread(
                target=self._flush_facts, args=(flush_s,), name="facts", daemon=True
            ).start()

    def _own_epoch(self) -> int:
        """Without an agent (plain torchrun, or one process) the epoch is ours to make."""
        while True:
            number = max(epoch_numbers(self.store), default=0) + 1
            epoch = Epoch(
                *(number, ("torchrun",), (self.peers.world,), (1.0,), "", 0, "start"),
                replica_ranks=self.peers.replica_ranks,
                mesh=str(self.peers.model_mesh or ""),
            )
            if self.store.create(epoch_key(number), epoch.encode()):
                return number

    def _flush_facts(self, every_s: float) -> None:
        assert self.journal
        while not self._closing.wait(every_s):
            with contextlib.suppress(StoreError):  # what was not written is kept and tried again
                self.journal.flush()

    # ---- facts -----------------------------------------------------------------------------------
    def fact(self, fact: Fact) -> None:
        """Rank 0 records it."""
        if self.journal is not None:
            self.journal.record(fact)

    def fact_here(self, fact: Fact) -> None:
        """This rank records it, whichever it is; for what is seldom. Raises StoreError."""
        self._own.record(fact)
        if self.url:
            self._own.flush()

    def warn(self, what: str, step: int | None = None) -> None:
        """A fact, and a line of rank 0's."""
        self.fact(Warned(self.step if step is None else step, self.epoch, what))
        self.peers.print(f"harness: {what}")

    def warn_of(self, what: str) -> None:
        """As `warn`, if there is anything to say."""
        if what:
            self.warn(what)

    def warn_here(self, what: str, step: int | None = None) -> None:
        """A fact, and a line of this rank's, whichever it is."""
        self.fact(Warned(self.step if step is None else step, self.epoch, what))
        print(f"harness: {what}", flush=True)

    def warn_anywhere(self, what: str) -> None:
        """As `warn`, of any rank and thread; for what is seldom."""
        said = f"rank {self.peers.rank}: {what}"
        with contextlib.suppress(StoreError):  # kept, and written with what comes next
            self.fact_here(Warned(self.step, self.epoch, said))
        print(f"harness: {said}", flush=True)

    def record_outcome(self, job: UploadJob, outcome: UploadOutcome) -> None:
        """Of what was sent from this process; the uploader process records the rest."""
        self.fact(fact_of(job, outcome))
        if self.journal is not None:
            # so that who dies now has not committed in silence
            with contextlib.suppress(StoreError):
                self.journal.flush()

    def flush(self) -> None:
        """Facts go to the bucket now."""
        if self.journal is not None and self.url:
            # what is not written is kept; at the end of a session its snapshot is committed
            with contextlib.suppress(StoreError):
                self.journal.flush()

    def close(self) -> None:
        """The last flush; more may follow."""
        self._closing.set()
        self.flush()

    # ---- identity --------------------------------------------------------------------------------
    def identify(self, identity: dict[str, Any], first_version: Callable[[str], str]) -> None:
        """This run is what it was when it began, or it is refused (BadInput). `first_version`: what
        stands under a name, as that made it."""

        def check() -> dict[str, Any]:
            if self.store.create(IDENTITY, canonical(identity)):
                return identity
            try:
                found = Identity.decode(self.store.get(IDENTITY)).body
            except BadObject as e:
                raise BadInput(
                    f"{self.url}/{IDENTITY}: wanted the identity of this run, found something "
                    f"else ({e}); use a new run URL, or put back what it was"
                ) from e
            for name in ("order", *identity):  # an order that only one of them has
                if found.get(name) == identity.get(name):
                    continue
                if name == "contents" and name not in found:
                    continue
                if found.get(name) == first_version(name):
                    continue
                hint = f"use a new run URL, or give {name} the value that this run began with"
                raise BadInput(
                    f"{self.url} holds another run: its {name} is {found.get(name)!r:.300}, "
                    f"this script's is {identity.get(name)!r:.300}; {hint}"
                )
            return found

        self.identity = self.peers.agree(check) if self.url else identity

    def fits_in(self, room: int) -> bool:
        """Can some members of this epoch form a world of at most `room` ranks? All ranks ask at
        the same point."""

        def look() -> bool:
            try:
                sizes = read_epoch(self.store, self.epoch).nproc
            except (NotFound, BadObject):
                return False  # it was not formed in the bucket
            if self._meshes is not None:
                replicas = room // self.peers.replica_ranks
                return self._meshes.choose(sizes, replicas, self._worlds)[0] is not None
            return bool(whole_replicas(sizes, self.peers.copy_ranks, room, self._worlds))

        return bool(self.peers.agree(look))

    def genesis(self) -> str:
        """Where the chain of step records begins."""
        return rec.genesis(self.identity or {})

    def surely_there(self) -> str:
        """A key that the listing must show, if it tells the truth; "" if we know of none."""
        if self.identity is not None:
            return IDENTITY
        return "" if self._epoch_is_told else epoch_key(self.epoch)
