"""Prove from the bucket alone that a run is what it claims to be. `harness verify`.

Believes nothing: every fact, step record, snapshot and epoch is read and hashed again, every step's
samples are computed anew from (seed, step) and compared with what the ranks summed up, and every
bill is added up again. Objects are compared to the byte with the one spelling that writers use, so
a single changed bit is found wherever it lies.

Pure but for the store it is given: no torch, no clock, no environment. Not looked at, because they
are ephemeral and prove
nothing: `lease/`, `control/`, `rdzv/members/`; and `trackers/`, which is a rendering. What cannot
be seen: facts that a writer lost because it died before flushing them, and snapshots that were
pruned or quarantined.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.bucket.archive import Cursor, raw_key, segments, volumes
from harness.bucket.epochs import EPOCHS, Epoch, epoch_key
from harness.bucket.volumes import LOST, reader_after, segment_key
from harness.core import records as rec
from harness.core.batch import MAX_SAMPLES, Batching, expected_digest
from harness.core.facts import (
    AttemptEnded,
    AttemptIntended,
    EpochStarted,
    LeaseTaken,
    RunEnded,
    SessionStarted,
    Stamped,
    Unreadable,
    amount,
    canonical,
    digest,
    loaded,
)
from harness.core.world import BadInput
from harness.views.ledger import Ledger
from harness.views.painting import ns
from storage.errors import NotFound
from storage.manifest import Manifest, PartList, Ref, SnapshotCorrupt, SnapshotTooNew
from storage.objects import ObjectStore
from storage.snapshots import PARTS, Snapshots

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]  # what, done, of how many

IDENTITY = {
    "version": int,
    "seed": int,
    "samples": int,
    "global_batch": int,
    "micro_batch": int,
    "shuffle": bool,
}
SECONDS, USD = 1e-6, 1e-9  # what float sums of a bill may differ by


@dataclass(frozen=True)
class Check:
    """One rule. `detail`: the violation in one sentence, or what was proved. `n`: how many
    things were looked at."""

    name: str
    ok: bool
    detail: str
    n: int


@dataclass(frozen=True)
class AuditReport:
    ok: bool
    checks: list[Check]
    first_violation: str | None
    notes: list[str] = field(default_factory=list)  # odd, but as it may be


class Violation(Exception):
    """A rule is broken: what was wanted, what was found, which object."""


def audit(store: ObjectStore, progress: Progress | None = None) -> AuditReport:
    """Check the whole run. Only reads. Raises StoreError if the bucket does not answer."""
    return _Audit(store, progress or (lambda what, done, of: None)).report()


@dataclass
class _Audit:
    """The checks in their order; later ones use what earlier ones have found."""

    store: ObjectStore
    progress: Progress
    notes: list[str] = field(default_factory=list)
    identity: dict[str, Any] | None = None
    facts: list[Stamped] = field(default_factory=list)  # of all writers, by time
    facts_whole: bool = False
    # of the run's line, newest first, without metrics
    records: list[rec.StepRecord] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)  # retained and readable, newest first
    # step of a retained manifest -> hash of the chain's record there
    heads: dict[int, str] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)  # records object -> hash of its last record
    worlds: dict[int, Epoch] = field(default_factory=dict)

    def report(self) -> AuditReport:
        self.snapshots = Snapshots(self.store)
        refs = self.snapshots.refs()
        checks = [
            self._check("identity", self._identity),
            self._check("facts", self._facts),
            self._check("manifests", lambda: self._manifests(refs)),
            self._check("epochs", self._epochs),
            self._check("records", self._records),
            self._check("other records", self._other_records),
            self._check("lineage", self._lineage),
            self._check("snapshots", self._whole),
            self._check("ledger", self._ledger),
            self._check("run end", self._end),
        ]
        bad = next((c for c in checks if not c.ok), None)
        return AuditReport(bad is None, checks, bad.detail if bad else None, self.notes)

    @staticmethod
    def _check(name: str, rule: Callable[[], tuple[int, str]]) -> Check:
        try:
            n, detail = rule()
        except (Violation, rec.BrokenRecords, SnapshotCorrupt, SnapshotTooNew, BadInput) as e:
            return Check(name, False, str(e), 0)
        return Check(name, True, detail, n)

    # ---- what the run is -------------------------------------------------------------------------
    def _identity(self) -> tuple[int, str]:
        try:
            data = self.store.get("run.json")
        except NotFound:
            if self.store.list("samples/"):
                raise Violation(
                    "run.json: wanted the identity that the step records begin with, found no such "
                    "object"
                ) from None
            if not self.snapshots.refs() and not self.store.list("facts/"):
                raise Violation(
                    f"{self.store.url}: wanted a run, found neither run.json nor facts nor "
                    "snapshots"
                ) from None
            return 0, "no run.json: a training loop of its own, or no worker has started yet"
        found = _json("run.json", data)
        if not isinstance(found, dict) or canonical(found) != data:
            raise Violation(
                "run.json: wanted canonical JSON as it was created, found another spelling; it was "
                "changed"
            )
        for name, kind in IDENTITY.items():
            if type(found.get(name)) is not kind:
                raise Violation(
                    f"run.json: wanted {name} of type {kind.__name__}, found {found.get(name)!r}; "
                    "it was changed"
                )
        self.identity = found
        of = f"{found['samples']} samples" if found["samples"] else "an iterable dataset"
        return 1, f"seed {found['seed']}, global batch {found['global_batch']} of {of}"

    # ---- facts -----------------------------------------------------------------------------------
    def _facts(self) -> tuple[int, str]:
        listed = self.store.list("facts/")
        by_writer = segments(self.store)
        ours = {key for keys in by_writer.values() for key in keys.values()}
        self._foreign("facts/", set(listed) - ours)
        unread: list[Unreadable] = []
        cursors = self._archived(unread)
        done, total = 0, len(ours)
        for writer, keys in by_writer.items():
            cursor = cursors.get(writer, Cursor())
            reader = reader_after(writer, cursor.head)
            number = cursor.next
            for found, key in keys.items():
                done += 1
                if found < cursor.next:
                    continue  # archived, and not deleted yet
                if found != number:
                    raise Violation(
                        f"facts of {writer}: wanted segments numbered without a gap, found {key} "
                        f"where {segment_key(writer, number)} should be"
                    )
                number += 1
                for where, line in _lines(key, self.store.get(key)):
                    self._take(reader.read(where, line), unread)
                self.progress("facts", done, total)
            cursors[writer] = cursor
        self.facts.sort(key=lambda s: s.t)
        if unread:
            more = f" ({len(unread) - 1} more cannot be read)" if len(unread) > 1 else ""
            raise Violation(f"{unread[0]}{more}")
        self.facts_whole = True
        writers = len(cursors)
        return len(self.facts), f"chains of {writers} writer{'s' * (writers != 1)}, each whole"

    def _take(self, told: list[Stamped], unread: list[Unreadable]) -> None:
        for stamped in told:
            if isinstance(stamped.fact, Unreadable):
                unread.append(stamped.fact)
            else:
                self.facts.append(stamped)

    def _archived(self, unread: list[Unreadable]) -> dict[str, Cursor]:
        """Facts of the archive's volumes: how far they go, by writer."""
        cursors: dict[str, Cursor] = {}
        prev = ""
        for number, (raw, volume) in enumerate(volumes(self.store)):
            key = raw_key(number)
            if isinstance(volume, Unreadable):
                raise Violation(str(volume))
            if (volume.number, volume.prev) != (number, prev):
                raise Violation(
                    f"{key}: wanted volume {number} after {prev or 'none'}, found volume "
                    f"{volume.number} after {volume.prev or 'none'}"
                )
            prev = digest(raw)
            for run in volume.runs:
                cursor = cursors.setdefault(run.writer, Cursor())
                if (run.first, run.head) != (cursor.next, cursor.head):
                    raise Violation(
                        f"{key}: wanted facts of {run.writer} from segment {cursor.next} on, found "
                        f"them from {run.first} on"
                    )
                cursor.next = run.end
            for writer, segment, data in volume.segments():
                where = segment_key(writer, segment)
                for _ in _lines(f"{key}: {where}", data):
                    pass
            for run, _, reader, _, stamped in volume.lines():
                cursors[run.writer].head = reader.head or LOST
                self._take([stamped], unread)
        return cursors

    def _of(self, kind: type[Any]) -> Iterator[Any]:
        return (s.fact for s in self.facts if isinstance(s.fact, kind))

    # ---- worlds ----------------------------------------------------------------------------------
    def _epochs(self) -> tuple[int, str]:
        listed = self.store.list(EPOCHS)
        keys = [key for key in listed if key[len(EPOCHS) :].removesuffix(".json").isdecimal()]
        if foreign := sorted(set(listed) - set(keys)):
            self.notes.append(f"not ours, and read by nobody: {', '.join(foreign)}")
        unsealed = 0
        for number, key in enumerate(keys, 1):
            if key != epoch_key(number):
                raise Violation(
                    f"epochs: wanted {epoch_key(number)}, found {key}; epochs are numbered 1, 2, "
                    "... without a gap"
                )
            data = self.store.get(key)
            body = _json(key, data)
            if not isinstance(body, dict) or json.dumps(body).encode() != data:
                raise Violation(
                    f"{key}: wanted the epoch as it was created, found another spelling; it was "
                    "changed"
                )
            seal = body.pop("h", None)
            if seal is not None and seal != digest(canonical(body)):
                raise Violation(
                    f"{key}: wanted hash {seal}, found {digest(canonical(body))}; it was changed"
                )
            unsealed += seal is None
            # is it needed?
            names = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(Epoch)}
            if not {name for name in names if names[name]} <= set(body) or body["epoch"] != number:
                raise Violation(f"{key}: wanted epoch {number} with {sorted(names)}, found {body}")
            values: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in body.items() if k in names
            }
            epoch = Epoch(**values)
            sizes = {
                len(epoch.members),
                len(set(epoch.members)),
                len(epoch.nproc),
                len(epoch.speeds),
            }
            if len(sizes) != 1 or not (_all(epoch.members, str) and _all(epoch.nproc, int)):
                raise Violation(
                    f"{key}: wanted ranks and speed of each of its different members, found {body}"
                )
            self.worlds[number] = epoch
        for started in self._of(EpochStarted) if self.facts_whole else ():
            found = self.worlds.get(started.epoch)
            if found is None:
                raise Violation(
                    f"epoch {started.epoch}: a fact says that it began, but "
                    f"{epoch_key(started.epoch)} is missing"
                )
            if (found.members, found.world, found.reason) != (
                started.members,
                started.world,
                started.reason,
            ):
                raise Violation(
                    f"{epoch_key(started.epoch)}: wanted what its maker recorded "
                    f"({', '.join(started.members)}; {started.world} ranks; "
                    f"{started.reason}), found {', '.join(found.members)}; {found.world} ranks; "
                    f"{found.reason}"
                )
        if unsealed:
            self.notes.append(
                f"{unsealed} epoch objects carry no hash: only numbers, members, ranks and reasons "
                "could be compared"
            )
        return len(keys), "numbered without a gap, as their makers recorded them"

    # ---- snapshots -------------------------------------------------------------------------------
    def _manifests(self, refs: list[Ref]) -> tuple[int, str]:
        bad: Exception | None = None
        for ref in refs:
            key = f"snapshots/manifests/{ref.name}.json"
            try:
                manifest = self.snapshots.load(ref)
                if manifest.to_json().encode() != self.store.get(key):
                    raise Violation(
                        f"{key}: wanted canonical JSON as it was committed, found another "
                        "spelling; it was changed"
                    )
                _names_records(manifest)
            except NotFound:
                continue  # pruned since it was listed
            except (SnapshotCorrupt, Violation, rec.BrokenRecords) as e:
                bad = bad or Violation(f"{key}: {e}" if isinstance(e, SnapshotCorrupt) else str(e))
                continue
            self.manifests.append(manifest)
        if bad is not None:
            raise bad
        if quarantined := sorted(self.snapshots.quarantined()):
            self.notes.append(
                f"quarantined and not looked at: {', '.join(ref.name for ref in quarantined)}"
            )
        return len(self.manifests), "each whole" if self.manifests else "none committed yet"

    def _whole(self) -> tuple[int, str]:
        nbytes = 0
        for manifest in self.manifests:
            what = f"snapshot {manifest.ref.name}"
            try:
                self.snapshots.verify(
                    manifest,
                    lambda done, of, what=what: self.progress(what, done, of),  # type: ignore[misc]
                )
                self._lists(manifest)
            except (SnapshotCorrupt, Violation, NotFound):
                if manifest.ref not in self.snapshots.refs():
                    self.notes.append(f"{what} was pruned while it was being read")
                    continue
                raise
            nbytes += manifest.nbytes
        return len(self.manifests), f"every part hashed, {nbytes / 1e6:.1f} MB"

    def _lists(self, manifest: Manifest) -> None:
        """The part lists that a manifest was merged from; an interrupted prune may have taken
        some away."""
        prefix = f"{PARTS}{manifest.ref.name}/list-"
        lists = []
        for key in self.store.list(prefix):
            data = self.store.get(key)
            try:
                one = PartList.from_json(data)
            except SnapshotCorrupt as e:
                raise Violation(f"{key}: {e}") from e
            if one.to_json().encode() != data or key != f"{prefix}r{one.rank:05d}.json":
                raise Violation(
                    f"{key}: wanted the part list of that rank as it was created, found another; "
                    "it was changed"
                )
            lists.append(one)
        if len(lists) == manifest.world and Manifest.merge(lists).hash != manifest.hash:
            raise Violation(
                f"snapshot {manifest.ref.name}: wanted the manifest that its {len(lists)} part "
                "lists make, found another"
            )

    # ---- samples ---------------------------------------------------------------------------------
    def _records(self) -> tuple[int, str]:
        newest = self.manifests[0] if self.manifests else None
        named = rec.named(newest.data) if newest else None
        if newest is None or not named:
            if newest is not None and newest.step and self.identity is not None:
                raise Violation(
                    f"snapshot {newest.ref.name}: wanted the records of steps 1-{newest.step}, its "
                    "manifest names none"
                )
            return (
                0,
                "no step is committed yet"
                if newest is None or not newest.step
                else "a loop of its own: no step records",
            )
        if self.identity is None:
            raise Violation(
                "step records: wanted a readable run.json to begin with, found none; see the check "
                "of the identity"
            )
        batching = batching_of(self.identity)
        wanted_at = {m.step for m in self.manifests}
        epoch, n = newest.epoch, 0
        for key, part in walk(self.store, named, rec.genesis(self.identity)):
            self.ends[key] = part[-1].h
            for r in reversed(part):
                self._record(key, r, batching, epoch)
                epoch = r.epoch
                # what the ledger needs; metrics are the bulk
                self.records.append(dataclasses.replace(r, metrics={}))
                if r.step in wanted_at:
                    self.heads[r.step] = r.h
                n += 1
                self.progress("records", n, newest.step)
        if n != newest.step:
            raise Violation(
                f"snapshot {newest.ref.name}: wanted the records of steps 1-{newest.step}, found "
                f"{n} of them"
            )
        proof = rec.what_digests_prove(self.identity)
        what = "sample" if proof == "samples" else "position"
        only = {
            "samples": "",
            "contents": " (an iterable dataset: proves positions and counts; contents are recorded "
            "as hashes, which only a second run can"
            " be compared with)",
            "positions": " (an iterable dataset: digests prove positions and counts, not contents)",
        }[proof]
        return n, f"steps 1-{n}: every {what} exactly once, {batching.global_batch} per step{only}"

    def _record(self, key: str, r: rec.StepRecord, batching: Batching, later_epoch: int) -> None:
        where = f"{key}, step {r.step}"
        if r.samples != batching.global_batch:
            raise Violation(
                f"{where}: wanted a global batch of {batching.global_batch} samples, found "
                f"{r.samples}"
            )
        if sum(r.shares) != batching.micro_batches or min(r.shares) < 0 or len(r.shares) != r.world:
            raise Violation(
                f"{where}: wanted {batching.micro_batches} micro-batches over {r.world} ranks, "
                f"found shares {list(r.shares)}"
            )
        if r.digest != (wanted := f"{expected_digest(batching, r.step):016x}"):
            raise Violation(
                f"{where}: wanted the samples of (seed {batching.seed}, step {r.step}), digest "
                f"{wanted}; found {r.digest}"
            )
        if bool(r.contents) != (rec.what_digests_prove(self.identity or {}) == "contents"):
            found = repr(r.contents) if r.contents else "none"
            raise Violation(
                f"{where}: wanted a hash of contents exactly where run.json says that contents are "
                f"recorded, found {found}"
            )
        if not r.weight > 0 or not math.isfinite(r.weight):
            raise Violation(f"{where}: wanted a positive weight, found {r.weight}")
        if not math.isfinite(r.loss):
            raise Violation(f"{where}: wanted a finite loss, found {r.loss}")
        if r.epoch > later_epoch:
            raise Violation(
                f"{where}: wanted epochs that never go back, found epoch {r.epoch} before epoch "
                f"{later_epoch}"
            )
        if self.worlds and (r.epoch not in self.worlds or self.worlds[r.epoch].world != r.world):
            found = (
                f"{self.worlds[r.epoch].world} ranks" if r.epoch in self.worlds else "no such epoch"
            )
            raise Violation(
                f"{where}: wanted the {r.world} ranks of epoch {r.epoch}; {epoch_key(r.epoch)} "
                f"says {found}"
            )

    def _other_records(self) -> tuple[int, str]:
        """Records that the newest snapshot does not lead to (redone steps, zombies) are not the
        run's, but must be whole too."""
        there = self.store.list("samples/")
        others = [key for key in rec.heads(there).values() if key not in self.ends]
        self._foreign("samples/", set(there) - set(rec.heads(there).values()))
        for key in others:
            self.ends[key] = read_part(self.store, key)[-1].h
        if others:
            self.notes.append(
                f"{len(others)} records objects are not on the run's line: steps that were redone, "
                "or not committed yet"
            )
        return len(others), "redone or uncommitted, each whole" if others else "none"

    def _foreign(self, where: str, keys: Collection[str]) -> None:
        if keys:
            self.notes.append(
                f"{len(keys)} objects under {where} are none of ours and not looked at, such as "
                f"{min(keys)}"
            )

    def _lineage(self) -> tuple[int, str]:
        off = []
        newest = self.manifests[0] if self.manifests else None
        for m in self.manifests:
            assert newest is not None
            parent = m.data.get("parent") or ""
            if parent and not _came_before(parent, m.ref):
                raise Violation(
                    f"snapshot {m.ref.name}: wanted a parent that came before it, found {parent}"
                )
            if self.worlds and (
                m.epoch not in self.worlds or self.worlds[m.epoch].world != m.world
            ):
                raise Violation(
                    f"snapshot {m.ref.name}: wanted the ranks of {epoch_key(m.epoch)}, its "
                    f"manifest is of {m.world} ranks"
                )
            named = rec.named(m.data)
            if not named:
                if m.step and newest.data.get("samples"):
                    raise Violation(
                        f"snapshot {m.ref.name}: wanted the records of steps 1-{m.step}, its "
                        "manifest names none"
                    )
                continue
            if self.ends.get(named.key) != named.head:
                raise Violation(
                    f"snapshot {m.ref.name}: wanted {named.key} to end with record "
                    f"{named.head[:16]}, found no such end"
                )
            if self.heads.get(m.step) == named.head:
                continue
            # one epoch has one history; only a zombie of an older one may have another
            if m.epoch >= newest.epoch:
                raise Violation(
                    f"snapshot {m.ref.name}: wanted the record of step {m.step} that snapshot "
                    f"{newest.ref.name} grew from, "
                    f"found another history ({named.head[:16]})"
                )
            off.append(m.ref.name)
        if off:
            self.notes.append(
                f"superseded branches (a newer epoch did not grow from them): {', '.join(off)}"
            )
        on = len(self.manifests) - len(off)
        return len(self.manifests), f"{on} on one line" + (
            f", {len(off)} superseded" if off else ""
        )

    # ---- money -----------------------------------------------------------------------------------
    def _ledger(self) -> tuple[int, str]:
        self._need_facts()
        intended: dict[int, tuple[float, AttemptIntended]] = {}
        ended: dict[int, AttemptEnded] = {}
        run_ended_t = max((s.t for s in self.facts if isinstance(s.fact, RunEnded)), default=None)
        for stamped in self.facts:
            if isinstance(stamped.fact, AttemptIntended):
                intended.setdefault(stamped.fact.attempt, (stamped.t, stamped.fact))
            elif isinstance(stamped.fact, AttemptEnded):
                ended[stamped.fact.attempt] = stamped.fact  # a later one replaces an earlier one
        for number, e in ended.items():
            if number not in intended:
                raise Violation(
                    f"attempt {number}: wanted an intent before its end, found AttemptEnded alone"
                )
            seconds = 0.0 if e.up_s is None else max(0.0, e.gone_s - e.up_s)
            usd = seconds / 3600 * amount(intended[number][1].offer.get("usd_per_h"))
            if abs(e.billed_s - seconds) > SECONDS or abs(e.usd - usd) > USD + 1e-9 * usd:
                raise Violation(
                    f"attempt {number}: wanted a bill of {seconds} s and {usd} USD (from up to "
                    "gone at its price), "
                    f"found {e.billed_s} s and {e.usd} USD"
                )
        for number, (t, _) in intended.items():
            if run_ended_t is not None and t <= run_ended_t and number not in ended:
                raise Violation(
                    f"attempt {number}: wanted its end before the run's, found RunEnded but no "
                    "AttemptEnded"
                )
        self._buckets(ended)
        return (
            len(intended),
            f"every billed second in exactly one bucket, {sum(e.usd for e in ended.values()):.4f} "
            "USD",
        )

    def _buckets(self, ended: dict[int, AttemptEnded]) -> None:
        """The ledger's rows are made of buckets; the facts' bills are not. To the nanosecond
        and the nano-dollar they agree."""
        now_s = max((s.t for s in self.facts), default=0.0)
        for row in Ledger.of(self.facts, self.records[::-1], now_s).attempts:
            e = ended.get(row.attempt)
            if e is None or row.name != str(row.attempt):
                continue  # not billed to the end yet, or launched by no controller
            wanted_ns = 0 if e.up_s is None else max(0, ns(e.gone_s) - ns(e.up_s))
            painted_ns = sum(b - a for a, b, _ in row.segments)
            if not row.billed_ns == painted_ns == wanted_ns or row.billed_nusd != ns(e.usd):
                raise Violation(
                    f"attempt {row.attempt}: wanted buckets that add up to {wanted_ns} ns and "
                    f"{ns(e.usd)} nano-USD, "
                    f"found {row.billed_ns} ns ({painted_ns} painted) and {row.billed_nusd} "
                    "nano-USD"
                )

    def _need_facts(self) -> None:
        if not self.facts_whole:
            raise Violation("not checked, because it follows from the facts and they are not whole")

    # ---- the end ---------------------------------------------------------------------------------
    def _end(self) -> tuple[int, str]:
        self._need_facts()
        newest = self.manifests[0] if self.manifests else None
        total = (self.identity or {}).get("total_steps")
        ended = self.snapshots.ended(newest) if newest is not None else ""
        early = ended.startswith("ended early")
        if (
            newest is not None
            and ended
            and not early
            and total is not None
            and newest.step != total
        ):
            raise Violation(
                f"snapshot {newest.ref.name}: wanted the final one at step {total}, found it at "
                f"step {newest.step}"
            )
        last: RunEnded | None = None
        for stamped in self.facts:
            if isinstance(stamped.fact, RunEnded):
                last = stamped.fact
            elif isinstance(stamped.fact, LeaseTaken):
                last = None  # launched again: the newest snapshot may be of the new launch
        if last is None:
            return 0, "the run has not ended"
        if last.outcome != "done":
            return 1, f"{last.outcome}: {last.reason}"
        if newest is None or not ended or newest.step != last.committed_step:
            found = f"snapshot {newest.ref.name}, final: {bool(ended)}" if newest else "no snapshot"
            raise Violation(
                f"RunEnded(done): wanted a final snapshot of step {last.committed_step}, found "
                f"{found}"
            )
        # each loop of a session tells its own total
        for session in [s for s in self._of(SessionStarted) if s.epoch == newest.epoch][-1:]:
            if not early and session.total_steps not in (0, newest.step):
                raise Violation(
                    f"RunEnded(done): wanted {session.total_steps} steps as epoch {session.epoch} "
                    f"set out, found {newest.step}"
                )
        return 1, f"done, final snapshot of step {newest.step}" + (f" ({ended})" if early else "")


def batching_of(identity: dict[str, Any]) -> Batching:
    """What decides the samples of every step. An iterable dataset (0 samples) is one endless
    stream in its own order."""
    return Batching(
        samples=identity["samples"] or MAX_SAMPLES,
        global_batch=identity["global_batch"],
        micro_batch=identity["micro_batch"],
        seed=identity["seed"],
        shuffle=identity["shuffle"] and identity["samples"] > 0,
    )


def read_part(store: ObjectStore, key: str) -> list[rec.StepRecord]:
    """One records object, whole to the byte. Raises BrokenRecords."""
    try:
        data = store.get(key)
    except NotFound:
        raise rec.BrokenRecords(
            f"{key}: missing, but a manifest or later records follow from it"
        ) from None
    part = rec.decode(data, key)
    if (
        not part
        or not all(spelled(line) for line in data.split(b"\n")[:-1])
        or not data.endswith(b"\n")
    ):
        raise rec.BrokenRecords(
            f"{key}: wanted records as they were written, found another spelling; it was changed"
        )
    if rec.key(part) != key:
        raise rec.BrokenRecords(
            f"{key}: wanted records that fit this name, found those of {rec.key(part)}"
        )
    return part


def walk(
    store: ObjectStore, named: rec.Named, genesis: str
) -> Iterator[tuple[str, list[rec.StepRecord]]]:
    """The records objects that lead from `named` (a manifest's `data["samples"]`) back to step 1,
    newest first, one at a time. Raises BrokenRecords at the first that does not fit. The records of
    an object are in ascending order of steps."""
    by_head = rec.heads(store.list("samples/"))
    key, want, step = named.key, named.head, named.last
    while True:
        part = read_part(store, key)
        if part[-1].h != want or part[-1].step != step:
            raise rec.BrokenRecords(
                f"{key}: wanted step {step} with hash {want[:16]} at its end, found step "
                f"{part[-1].step} with {part[-1].h[:16]}"
            )
        yield key, part
        want, step = part[0].prev, part[0].step - 1
        if want == genesis or step < 1:
            break
        if want[:16] not in by_head:
            raise rec.BrokenRecords(
                f"records up to step {step} are missing: step {step + 1} follows one with hash "
                f"{want[:16]}, found none"
            )
        key = by_head[want[:16]]
    if (want, step) != (genesis, 0):
        raise rec.BrokenRecords(
            f"{key}: wanted step 1 to follow the run's identity ({genesis[:16]}), found step "
            f"{step + 1} after {want[:16]}; "
            "run.json was changed, or the records are of another run"
        )


def _names_records(manifest: Manifest) -> None:
    named = rec.named(manifest.data)
    if named and named.last != manifest.step:
        raise Violation(
            f"snapshot {manifest.ref.name}: wanted the name of records up to step {manifest.step}, "
            f"found {named}"
        )


def _came_before(parent: object, ref: Ref) -> bool:
    try:
        found = Ref.parse(str(parent))
    except ValueError:
        return False
    return found < ref and found.step <= ref.step


def _all(values: tuple[Any, ...], kind: type) -> bool:
    return all(type(v) is kind for v in values)


def _json(key: str, data: bytes) -> Any:
    try:
        return loaded(data)
    except ValueError as e:
        raise Violation(
            f"{key}: wanted JSON, found {len(data)} bytes that are not ({e}); it was changed"
        ) from e


def spelled(line: bytes) -> bool:
    """Is it the one spelling in which facts and records are written?"""
    try:
        return json.dumps(loaded(line), separators=(",", ":")).encode() == line
    except (ValueError, RecursionError):
        return False


def _lines(key: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Lines of a fact segment, each in exactly the spelling that facts.Chain writes."""
    *lines, rest = data.split(b"\n")
    if rest or not lines:
        raise Violation(
            f"{key}: wanted whole lines, found {len(rest)} bytes after the last; it was cut or "
            "changed"
        )
    for number, line in enumerate(lines, 1):
        _json(f"{key}, line {number}", line)
        if not spelled(line):
            raise Violation(
                f"{key}, line {number}: wanted the fact as it was written, found another spelling; "
                "it was changed"
            )
        yield f"{key}, line {number}", line.decode()


def print_audit(report: AuditReport, console: Console) -> None:
    """Render a report for people: each rule, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in report.checks:
        mark = Text("ok", "green") if check.ok else Text("VIOLATED", "bold red")
        table.add_row(mark, check.name, str(check.n) if check.ok else "", Text(check.detail))
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}", "dim"))
    console.print(
        Text("Everything holds.", "bold green")
        if report.ok
        else Text(f"First violation: {report.first_violation}", "bold red")
    )
