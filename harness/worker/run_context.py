"""The run that a session belongs to, as its rank sees it: bucket, generation (`epoch`), facts,
phase and identity. Runs in the worker."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import Any

from harness.bucket.journal import Journal
from harness.bucket.layout import Epoch, Identity, epoch_key, epoch_numbers, read_epoch
from harness.bucket.phases import RunPhase, end_of
from harness.bucket.signed_heads import signed
from harness.core import step_records as rec
from harness.core.facts import Fact, Warned
from harness.core.masking import learn
from harness.core.mesh import parse_choice
from harness.core.world import BadInput, whole_replicas
from harness.uploader.senders import fact_of
from harness.worker.process_group import Peers
from storage.canonical_json import BadObject, canonical
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.snapshots.restore import PAUSES_S
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.upload import UploadJob, UploadOutcome
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store

# seconds between uploads of facts, by kind of store; for others FLUSH_REMOTE_S
FLUSH_S = {"file": 1.0, "memory": 1.0}
FLUSH_REMOTE_S = 10.0


def look_again_s(environ: dict[str, str]) -> tuple[float, ...]:
    """Return the pauses, in seconds, between repeated reads of a bad object: HARNESS_LOOK_AGAIN_S,
    "1,3,8". Raises BadInput."""
    text = environ.get("HARNESS_LOOK_AGAIN_S", "")
    try:
        found = tuple(float(word) for word in text.split(",")) if text else PAUSES_S
    except ValueError:
        found = (-1.0,)
    if not all(0.0 <= each <= 600.0 for each in found):
        raise BadInput(
            f"HARNESS_LOOK_AGAIN_S={text!r}: wanted seconds between 0 and 600, separated by "
            "commas, for example 1,3,8"
        )
    return found


LAST_FACTS_S = 0.5  # for what a process has to write that ends as another rank is lost


class Run:
    """The run. `url`: None without a bucket. `step`: optimizer updates done, in all phases.
    `phase`: the present one."""

    def __init__(self, peers: Peers, url: str | None, environ: dict[str, str]):
        learn(environ)
        url = url or None  # HARNESS_RUN may be set and empty
        self.peers, self.url, self.step = peers, url, 0
        self.phase = RunPhase()
        self._look_again_s = look_again_s(environ)
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
        # the generation was set by hand, so the bucket may not have it
        self._epoch_is_told = "HARNESS_EPOCH" in environ and "HARNESS_STAGE" not in environ
        self.epoch: int = peers.agree(
            lambda: (
                int(environ["HARNESS_EPOCH"]) if "HARNESS_EPOCH" in environ else self._own_epoch()
            )
        )
        self._worlds = tuple(map(int, filter(None, environ.get("HARNESS_WORLDS", "").split(","))))
        meshes = environ.get("HARNESS_MESHES", "")  # meshes that the run may use; "": only its own
        self._meshes = parse_choice(meshes) if meshes else None
        self.token = secrets.token_hex(4)
        writer = f"worker-e{self.epoch:06d}-{self.token}"
        # every rank has its own token; only rank 0 records facts about all ranks
        self._own = Journal(self.store, writer, time.time)
        self.journal = self._own if peers.rank == 0 else None
        self._closing = threading.Event()
        if self.journal and url:
            flush_s = FLUSH_S.get(self.store.url.partition("://")[0], FLUSH_REMOTE_S)
            threading.Thread(
                target=self._flush_facts, args=(flush_s,), name="facts", daemon=True
            ).start()

    def _own_epoch(self) -> int:
        """Create a generation (`epoch`), since no agent does (plain torchrun, or one process)."""
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
            with contextlib.suppress(StoreError):  # unwritten facts are kept and tried again
                self.journal.flush()

    # ---- facts -----------------------------------------------------------------------------------
    def fact(self, fact: Fact) -> None:
        """Record a fact, on rank 0 only."""
        if self.journal is not None:
            self.journal.record(fact)

    def fact_here(self, fact: Fact) -> None:
        """Record a rare fact on any rank, and write it at once. Raises StoreError."""
        self._own.record(fact)
        if self.url:
            self._own.flush()

    def warn(self, what: str, step: int | None = None) -> None:
        """Record a warning and print it, on rank 0."""
        self.fact(Warned(self.step if step is None else step, self.epoch, what))
        self.peers.print(f"harness: {what}")

    def warn_of(self, what: str) -> None:
        """Call `warn`, unless the text is empty."""
        if what:
            self.warn(what)

    def warn_here(self, what: str, step: int | None = None) -> None:
        """Record a warning on rank 0, and print it on this rank."""
        self.fact(Warned(self.step if step is None else step, self.epoch, what))
        print(f"harness: {what}", flush=True)

    def warn_anywhere(self, what: str) -> None:
        """Record and print a rare warning, from any rank and thread."""
        said = f"rank {self.peers.rank}: {what}"
        with contextlib.suppress(StoreError):  # it is kept, and written with the next facts
            self.fact_here(Warned(self.step, self.epoch, said))
        print(f"harness: {said}", flush=True)

    def record_outcome(self, job: UploadJob, outcome: UploadOutcome) -> None:
        """Record the outcome of an upload by this process; the uploader process records its own."""
        self.fact(fact_of(job, outcome))
        if self.journal is not None:
            # so that the commit is on record if this process dies now
            with contextlib.suppress(StoreError):
                self.journal.flush()

    def flush(self) -> None:
        """Write recorded facts to the bucket now."""
        if self.journal is not None and self.url:
            # unwritten facts are kept; at the end of a session, its snapshot is committed anyway
            with contextlib.suppress(StoreError):
                self.journal.flush()

    def close(self) -> None:
        """Stop the regular flushes and flush once more. Facts may still be recorded."""
        self._closing.set()
        self.flush()

    def close_soon(self, within_s: float = LAST_FACTS_S) -> None:
        """Call `close`, and wait for it no longer than this: others wait for this process."""
        last = threading.Thread(target=self.close, name="last-facts", daemon=True)
        last.start()
        last.join(within_s)

    # ---- identity --------------------------------------------------------------------------------
    @property
    def identity(self) -> dict[str, Any] | None:
        """The identity that was recorded when the present phase began; None until it is known."""
        return self.phase.identity

    def next_phase(self) -> None:
        """Begin another phase, behind the steps that are done."""
        self.phase = RunPhase((*self.phase.ended, self.step))

    def identify(self, identity: dict[str, Any]) -> None:
        """Compare this script's identity with the phase's, or store it in a new one. Raises
        BadInput if they differ."""
        phase, identity = self.phase, identity | self.phase.said
        found = phase.identity = self._recorded(identity) if self.url else identity
        where = f"in {phase.label}, " if phase.number > 1 else ""
        for name in ("order", *identity):  # "order", as only one of the two may have it
            if found.get(name) == identity.get(name):
                continue
            hint = f"use a new run URL, or give {name} the value that this run began with"
            raise BadInput(
                f"{self.url} holds another run: {where}its {name} is {found.get(name)!r:.300}, "
                f"this script's is {identity.get(name)!r:.300}; {hint}"
            )
        if self.url:
            phase.ends = self.peers.agree(lambda: end_of(self.store, phase.number))

    def _recorded(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Return the run's identity, on all ranks; a new run gets `identity`. What one host cannot
        read is asked of another. Raises StoreError, and BadInput if two cannot read it."""

        def first() -> tuple[dict[str, Any] | None, str]:
            created = self.store.create(self.phase.key, canonical(identity))
            return (identity, "") if created else self._read_identity()

        found, why = self.peers.agree(first)
        if found is not None:
            return dict(found)
        hosts = self.peers.gather(self.peers.host)
        second = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
        mine: tuple[dict[str, Any] | None, str] = (None, "")
        if self.peers.rank == second:
            with contextlib.suppress(StoreError):  # the others wait for a word
                mine = self._read_identity()
        found, again = self.peers.gather(mine)[second] if second is not None else mine
        if found is not None:
            return dict(found)
        what = f"{self.url}/{self.phase.key}: wanted the identity of this run, found something else"
        hint = "use a new run URL, or put back what it was"
        if again:
            raise BadInput(f"{what} ({again}), from two hosts; {hint}")
        raise StoreUnavailable(f"{what} ({why}), and no other host says so; if it stays, {hint}")

    def _read_identity(self) -> tuple[dict[str, Any] | None, str]:
        """Return the recorded identity and "", or None and why it cannot be read, over new
        connections too."""
        why = ""
        for pause_s in (0.0, *self._look_again_s):
            time.sleep(pause_s)
            store = open_store(self.url or "") if why else self.store
            try:
                return Identity.decode(store.get(self.phase.key)).body, ""
            except (BadObject, NotFound) as e:
                why = str(e)
        return None, why

    def fits_in(self, room: int) -> bool:
        """Return whether some members of this generation can form a world of at most `room` ranks.
        All ranks call it at the same point."""

        def look() -> bool:
            try:
                sizes = read_epoch(self.store, self.epoch).nproc
            except (NotFound, BadObject):
                return False  # the generation is not in the bucket
            if self._meshes is not None:
                replicas = room // self.peers.replica_ranks
                return self._meshes.choose(sizes, replicas, self._worlds)[0] is not None
            return bool(whole_replicas(sizes, self.peers.copy_ranks, room, self._worlds))

        return bool(self.peers.agree(look))

    def genesis(self) -> str:
        """Return the first hash of the chain of step records."""
        return rec.genesis(self.identity or {})

    def surely_there(self) -> str:
        """Return a key that a complete listing must contain; "" if none is known."""
        if self.identity is not None:
            return self.phase.key
        return "" if self._epoch_is_told else epoch_key(self.epoch)


SCRIPT_WORLD = "HARNESS_SCRIPT_WORLD"  # see `harness.loops.own_loop.script_world`
