"""The audit behind `harness prove verify`: it proves from the bucket alone that a run is what it
claims.

It trusts nothing: it reads and hashes every fact, step record, snapshot and generation (the code's
`epoch`) again, computes every step's samples from (seed, step) and compares them with the sums that
the ranks recorded, and adds up every bill and hashes all weights again. Information that is stored
in several places must agree. Objects are compared byte by byte with the one spelling that writers
use, so a single changed bit is found anywhere.

Pure but for the store it is given: no torch, no clock, no environment. It skips objects that are
ephemeral and prove nothing (`lease/`, `control/`, `rdzv/members/`), everything under `trackers/`
but the stream, and `logbook/`, which belongs to people. It cannot see facts that a writer lost
because it died before flushing them, nor snapshots that were pruned or quarantined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from harness.bucket.archive import Recorded, RecordsPart, committed_of
from harness.bucket.layout import (
    ARCHIVE,
    EPOCHS,
    FACTS,
    IDENTITY,
    LEASES,
    PHASES,
    SAMPLES,
    SEGMENT,
    SETUP,
    Epoch,
    epoch_key,
    epoch_of,
    phase_of,
)
from harness.bucket.phases import RunPhase, phase_at, read_phases
from harness.core import step_records as rec
from harness.core.facts import (
    EpochStarted,
    LeaseTaken,
    RunEnded,
    SessionStarted,
    SnapshotCommitted,
    Stamped,
)
from harness.core.sample_order import batching_of
from harness.core.step_records import NONE, Columns
from harness.core.world import BadInput
from harness.look.audit import audit_facts
from harness.look.audit.audit_facts import AuditProgress
from harness.look.audit.audit_records import (
    Proof,
    chain,
    compare_archive,
    heads_at,
    prove,
    read_part,
)
from harness.look.audit.audit_rules import (
    RuleBroken,
    check_bills,
    check_buckets,
    check_launched,
    check_setups,
    check_stream,
    identity_of,
    json_of,
)
from harness.look.audit.audit_snapshots import (
    RecordEnds,
    check_begun,
    check_commits,
    check_lineage,
    check_losses,
    check_weights,
    on_line,
)
from harness.look.audit.proof_cache import Prover
from harness.look.trackers.stream_objects import STREAM
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound
from storage.snapshots.manifest import (
    PARTS,
    Manifest,
    PartList,
    Ref,
    SnapshotCorrupt,
    SnapshotTooNew,
)
from storage.snapshots.snapshot_keys import list_key, manifest_key
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore, get_each

if TYPE_CHECKING:
    from rich.console import Console

# The result of an audit, and its rendering for people.

UNSIGNED = (
    "without --key this proves nothing against who may write to the bucket and makes all hashes "
    "anew (docs/PROOF.md)"
)


@dataclass(frozen=True)
class Check:
    """The result of one rule. `detail`: the violation in one sentence, or what was proved. `n`: the
    number of things checked."""

    name: str
    ok: bool
    detail: str
    n: int


@dataclass(frozen=True)
class AuditReport:
    ok: bool
    checks: list[Check]
    first_violation: str | None
    notes: list[str] = field(default_factory=list)  # unusual, but allowed


MOST_NAMED = 20  # skipped updates in a note


def print_audit(report: AuditReport, console: Console) -> None:
    """Render a report for people: each rule, then the verdict."""
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


def audit(
    store: ObjectStore, progress: AuditProgress | None = None, prover: Prover | None = None
) -> AuditReport:
    """Check the whole run and return the report. Only reads. `prover` sets the number of processes
    and remembers results of an earlier audit. Raises StoreError if the bucket does not answer."""
    with (prover or Prover()).open() as opened:
        return _Audit(store, progress or (lambda what, done, of: None), opened).report()


@dataclass
class _Audit:
    """The checks in their order; later ones use what earlier ones have found."""

    store: ObjectStore
    progress: AuditProgress
    prover: Prover
    notes: list[str] = field(default_factory=list)
    phases: list[RunPhase] = field(default_factory=list)
    facts: list[Stamped] = field(default_factory=list)  # of all writers, by time, without steps
    steps: Columns = field(default_factory=lambda: NONE)  # from facts, not from records
    facts_whole: bool = False
    proofs: dict[str, Proof] = field(default_factory=dict)  # of objects of records, by key
    records: list[RecordsPart] = field(default_factory=list)  # on the run's line, newest first
    manifests: list[Manifest] = field(default_factory=list)  # retained and readable, newest first
    line: RecordEnds = field(default_factory=RecordEnds)
    off: list[Ref] = field(default_factory=list)  # superseded
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
            self._check("commits", self._commits),
            self._check("losses", self._losses),
            self._check("snapshots", self._whole),
            *([self._check("trackers", self._stream)] if self.store.list(STREAM) else []),
            self._check("ledger", self._ledger),
            self._check("run end", self._end),
        ]
        if setups := self.store.list(SETUP):  # a loop without the session writes none
            checks.append(self._check("setup", lambda: check_setups(self.store, setups)))
        bad = next((c for c in checks if not c.ok), None)
        return AuditReport(bad is None, checks, bad.detail if bad else None, self.notes)

    @staticmethod
    def _check(name: str, rule: Callable[[], tuple[int, str]]) -> Check:
        try:
            n, detail = rule()
        except (RuleBroken, rec.BrokenRecords, SnapshotCorrupt, SnapshotTooNew, BadInput) as e:
            return Check(name, False, str(e), 0)
        return Check(name, True, detail, n)

    # ---- identity --------------------------------------------------------------------------------
    def _identity(self) -> tuple[int, str]:
        try:
            data = self.store.get(IDENTITY)
        except NotFound:
            if self.store.list(SAMPLES):
                raise RuleBroken(
                    "run.json: wanted the identity that the step records begin with, found no such "
                    "object"
                ) from None
            if not self.snapshots.refs() and not self._any_facts():
                raise RuleBroken(
                    f"{self.store.url}: wanted a run, found neither run.json nor facts nor "
                    "snapshots"
                ) from None
            return 0, "no run.json: a training loop of its own, or no worker has started yet"
        found = identity_of(IDENTITY, data)
        for key in filter(phase_of, self.store.list(PHASES)):
            identity_of(key, self.store.get(key))
        try:
            self.phases = read_phases(self.store)
        except (BadObject, NotFound) as e:
            raise RuleBroken(str(e)) from e
        self._foreign(PHASES, set(self.store.list(PHASES)) - {one.key for one in self.phases})
        of = f"{found['samples']} samples" if found["samples"] else "an iterable dataset"
        said = f"seed {found['seed']}, global batch {found['global_batch']} of {of}"
        return len(self.phases), "; ".join([said, *map(_begins, self.phases[1:])])

    @property
    def identity(self) -> dict[str, Any] | None:
        """Return that of the run's first phase; None: it cannot be read."""
        return self.phases[0].identity if self.phases else None

    def _any_facts(self) -> bool:
        return bool(self.store.list(FACTS) or self.store.list(ARCHIVE))

    # ---- facts -----------------------------------------------------------------------------------
    def _facts(self) -> tuple[int, str]:
        self._foreign(FACTS, {k for k in self.store.list(FACTS) if not SEGMENT.fullmatch(k)})
        found = audit_facts.read(self.store, self.prover, self.progress)
        self.facts, self.steps = found.facts, found.steps
        if found.unread:
            more = f" ({len(found.unread) - 1} more cannot be read)"
            raise RuleBroken(f"{found.unread[0]}{more if len(found.unread) > 1 else ''}")
        self.facts_whole = True
        chains = f"chains of {found.writers} writer{'s' * (found.writers != 1)}, each whole"
        return found.lines, chains

    def _of(self, kind: type[Any]) -> Iterator[Any]:
        return (s.fact for s in self.facts if isinstance(s.fact, kind))

    # ---- worlds ----------------------------------------------------------------------------------
    def _epochs(self) -> tuple[int, str]:
        listed = self.store.list(EPOCHS)
        keys = [key for key in listed if epoch_of(key)]
        if foreign := sorted(set(listed) - set(keys)):
            self.notes.append(f"not ours, and read by nobody: {', '.join(foreign)}")
        for number, (key, data) in enumerate(get_each(self.store, keys), 1):
            if key != epoch_key(number):
                raise RuleBroken(
                    f"generations: wanted {epoch_key(number)}, found {key}; they are numbered "
                    "1, 2, ... without a gap"
                )
            if data is None:
                raise RuleBroken(f"{key}: listed, and not there; generations are never deleted")
            body = json_of(key, data)
            if not isinstance(body, dict) or json.dumps(body).encode() != data:
                raise RuleBroken(
                    f"{key}: wanted the generation as it was created, found another spelling; "
                    "it was changed"
                )
            seal = body.pop("h", None)
            if seal != digest(canonical(body)):
                raise RuleBroken(
                    f"{key}: wanted hash {seal}, found {digest(canonical(body))}; it was changed"
                )
            try:
                epoch = Epoch.decode(data)
            except BadObject as e:
                raise RuleBroken(
                    f"{key}: wanted generation {number}, found another object ({e})"
                ) from e
            if epoch.epoch != number or len(set(epoch.members)) != len(epoch.members):
                raise RuleBroken(
                    f"{key}: wanted generation {number} of different members, found generation "
                    f"{epoch.epoch} of {', '.join(epoch.members)}"
                )
            self.worlds[number] = epoch
        for started in self._of(EpochStarted) if self.facts_whole else ():
            found = self.worlds.get(started.epoch)
            if found is None:
                raise RuleBroken(
                    f"generation {started.epoch}: a fact says that it began, but "
                    f"{epoch_key(started.epoch)} is missing"
                )
            if (found.members, found.world, found.reason) != (
                started.members,
                started.world,
                started.reason,
            ):
                raise RuleBroken(
                    f"{epoch_key(started.epoch)}: wanted what its maker recorded "
                    f"({', '.join(started.members)}; {started.world} ranks; {started.reason}), "
                    f"found {', '.join(found.members)}; {found.world} ranks; {found.reason}"
                )
        return len(keys), "numbered without a gap, as their makers recorded them"

    # ---- snapshots -------------------------------------------------------------------------------
    def _manifests(self, refs: list[Ref]) -> tuple[int, str]:
        bad: Exception | None = None
        for ref in refs:
            key = manifest_key(ref)
            try:
                manifest = self.snapshots.load(ref)
                if manifest.to_json().encode() != self.store.get(key):
                    raise RuleBroken(
                        f"{key}: wanted canonical JSON as it was committed, found another "
                        "spelling; it was changed"
                    )
                _names_records(manifest)
                _names_phase(manifest, self.phases)
            except NotFound:
                continue  # pruned since it was listed
            except (SnapshotCorrupt, RuleBroken, rec.BrokenRecords) as e:
                bad = bad or RuleBroken(f"{key}: {e}" if isinstance(e, SnapshotCorrupt) else str(e))
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
        nbytes, sums = 0, 0
        for manifest in self.manifests:
            what = f"snapshot {manifest.ref.name}"
            try:
                self.snapshots.verify(
                    manifest,
                    lambda done, of, what=what: self.progress(what, done, of),  # type: ignore[misc]
                )
                self._lists(manifest)
                sums += check_weights(self.snapshots, manifest)
            except (SnapshotCorrupt, RuleBroken, NotFound):
                if manifest.ref not in self.snapshots.refs():
                    self.notes.append(f"{what} was pruned while it was being read")
                    continue
                raise
            nbytes += manifest.nbytes
        return len(self.manifests), (
            f"every part hashed, {nbytes / 1e6:.1f} MB; hashes of weights made again: {sums}"
        )

    def _lists(self, manifest: Manifest) -> None:
        """Compare the manifest with the part lists that it was merged from. An interrupted prune
        may have deleted some of them."""
        lists = []
        for key in self.store.list(f"{PARTS}{manifest.ref.name}/list-"):
            data = self.store.get(key)
            try:
                one = PartList.from_json(data)
            except SnapshotCorrupt as e:
                raise RuleBroken(f"{key}: {e}") from e
            if one.to_json().encode() != data or key != list_key(manifest.ref, one.rank):
                raise RuleBroken(
                    f"{key}: wanted the part list of that rank as it was created, found another; "
                    "it was changed"
                )
            lists.append(one)
        if len(lists) == manifest.world and Manifest.merge(lists).hash != manifest.hash:
            raise RuleBroken(
                f"snapshot {manifest.ref.name}: wanted the manifest that its {len(lists)} part "
                "lists make, found another"
            )

    # ---- samples ---------------------------------------------------------------------------------
    def _records(self) -> tuple[int, str]:
        newest = self.manifests[0] if self.manifests else None
        named = rec.named(newest.data) if newest else None
        if newest is None or not named:
            if newest is not None and newest.step and self.identity is not None:
                raise RuleBroken(
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
            raise RuleBroken(
                "step records: wanted a readable run.json to begin with, found none; see the check "
                "of the identity"
            )
        wanted_at = sorted({m.step for m in self.manifests})
        identities = [one.identity for one in self.phases]
        firsts = {one.begins + 1 for one in self.phases[1:]}
        self._prove_records(canonical(identities).decode())
        n, genesis = 0, rec.genesis(self.identity)
        self.line.genesis = genesis
        for key, part in chain(self.proofs, named, genesis, self.worlds, newest.epoch, firsts):
            self.line.ends[key], self.line.begins[key] = part.head, part.prev
            self.records.append(part)
            self.line.heads |= heads_at(self.store, key, part, wanted_at)
            n += len(part.rows)
        self._note_skipped()
        if n != newest.step:
            raise RuleBroken(
                f"snapshot {newest.ref.name}: wanted the records of steps 1-{newest.step}, found "
                f"{n} of them"
            )
        proof = rec.what_digests_prove(self.identity)
        what = "sample" if proof == "samples" else "position"
        corpus = " (contents are recorded: --data URL compares them with the corpus)"
        only = {
            "samples": corpus if rec.records_contents(self.identity) else "",
            "contents": " (an iterable dataset: proves positions and counts; contents are recorded "
            "as hashes, which only a second run can"
            " be compared with)",
        }[proof]
        once = f"every {what} exactly once"
        batches = sorted({batching_of(one or {}).global_batch for one in identities})
        return n, f"{self._steps_to(n)}: {once}, {' or '.join(map(str, batches))} per step{only}"

    def _steps_to(self, last: int) -> str:
        """Name the steps up to `last`, and how many of each phase there are."""
        if len(self.phases) == 1:
            return f"steps 1-{last}"
        ends = [last if one.ends is None else min(last, one.ends) for one in self.phases]
        steps = [
            f"{end - one.begins} of phase {one.number}"
            for one, end in zip(self.phases, ends, strict=True)
            if end > one.begins
        ]
        return f"steps 1-{last} ({', '.join(steps)}), in each phase"

    def _note_skipped(self) -> None:
        """Name the steps of the run's line whose update was skipped: the weights have nothing of
        their samples."""
        found = sorted(s for key in self.line.ends for s in self.proofs[key].skipped)
        if not found:
            return
        named = "; ".join(f"step {step}: {why}" for step, why in found[:MOST_NAMED])
        more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        self.notes.append(f"updates that guards have skipped: {len(found)} ({named}{more})")

    def _prove_records(self, context: str) -> None:
        """Prove every object of records on its own."""
        keys = sorted(rec.heads(self.store.list(SAMPLES)).values())
        found = self.prover.each(self.store, keys, prove, context)
        for done, (key, proof) in enumerate(found, 1):
            if proof is not None:
                self.proofs[key] = Proof.decode(proof)
            self.progress("records", done, len(keys))

    def _other_records(self) -> tuple[int, str]:
        """Check the records that the newest snapshot does not lead to (redone steps, zombies). They
        are not part of the run, but must be whole too."""
        there = self.store.list(SAMPLES)
        if not self.proofs:
            self._prove_records("")
        ours = rec.heads(there).values()
        others = [key for key in ours if key not in self.line.ends]
        self._foreign(SAMPLES, set(there).difference(ours))
        for key in others:
            proof = self.proofs.get(key)
            if proof is None or proof.part is None:
                # it is new since the proofs, or broken: then this raises the reason
                self.line.ends[key] = read_part(self.store, key)[-1].h
            else:
                self.line.ends[key] = proof.part.head
                self.line.begins[key] = proof.part.prev
        archive = Recorded(self.store)
        archive.read_archive()
        compare_archive(archive, self.proofs)
        if others:
            self.notes.append(
                f"{len(others)} records objects are not on the run's line: steps that were redone, "
                "carried once more by a later snapshot, or not committed yet"
            )
        return len(others), "redone or uncommitted, each whole" if others else "none"

    def _foreign(self, where: str, keys: Collection[str]) -> None:
        if keys:
            self.notes.append(
                f"{len(keys)} objects under {where} are none of ours and not looked at, such as "
                f"{min(keys)}"
            )

    def _lineage(self) -> tuple[int, str]:
        self.off = check_lineage(self.manifests, self.worlds, self.line)
        if self.off:
            names = ", ".join(ref.name for ref in self.off)
            self.notes.append(
                f"superseded branches (a newer generation did not grow from them): {names}"
            )
        on = len(self.manifests) - len(self.off)
        more = f", {len(self.off)} superseded" if self.off else ""
        return len(self.manifests), f"{on} on one line{more}"

    # ---- places that must agree ------------------------------------------------------------------
    def _commits(self) -> tuple[int, str]:
        self._need_facts()
        found = check_commits(self.snapshots, self._of(SnapshotCommitted), self.manifests)
        loose = [self.proofs[key].part for key in self.line.ends if key in self.proofs]
        known = {part.key for part in self.records}
        check_begun(self.snapshots, (part for part in loose if part and part.key not in known))
        return found

    def _stream(self) -> tuple[int, str]:
        return check_stream(self.store, self.prover, self.records, on_line(self.records))

    def _losses(self) -> tuple[int, str]:
        self._need_facts()
        return check_losses(self.steps, on_line(self.records), self.manifests, self.off)

    # ---- money -----------------------------------------------------------------------------------
    def _ledger(self) -> tuple[int, str]:
        self._need_facts()
        intents, ended = check_bills(self.facts)
        check_launched(self.facts, self.worlds, bool(self.store.list(LEASES)))
        # free memory: these are not needed again
        self.proofs, self.worlds = {}, {}
        records, steps = committed_of(self.records[::-1]), self.steps
        self.records, self.steps = [], NONE
        check_buckets(self.facts, records, steps, ended)
        usd = sum(e.usd for e in ended.values())
        return intents, f"every billed second in exactly one bucket, {usd:.4f} USD"

    def _need_facts(self) -> None:
        if not self.facts_whole:
            raise RuleBroken(
                "not checked, because it follows from the facts and they are not whole"
            )

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
            raise RuleBroken(
                f"snapshot {newest.ref.name}: wanted the final one at step {total}, found it at "
                f"step {newest.step}"
            )
        last: RunEnded | None = None
        for stamped in self.facts:
            if isinstance(stamped.fact, RunEnded):
                last = stamped.fact
            elif isinstance(stamped.fact, LeaseTaken):
                last = None  # launched again: the newest snapshot may belong to the new launch
        if last is None:
            if newest is not None and ended:
                return 0, f"no controller led it to its end: {ended} with step {newest.step}"
            return 0, "the run has not ended"
        if last.outcome != "done":
            return 1, f"{last.outcome}: {last.reason}"
        if newest is None or not ended or newest.step != last.committed_step:
            found = f"snapshot {newest.ref.name}, final: {bool(ended)}" if newest else "no snapshot"
            raise RuleBroken(
                f"RunEnded(done): wanted a final snapshot of step {last.committed_step}, found "
                f"{found}"
            )
        # each training loop of a session records its own total
        for session in [s for s in self._of(SessionStarted) if s.epoch == newest.epoch][-1:]:
            if not early and session.total_steps not in (0, newest.step):
                raise RuleBroken(
                    f"RunEnded(done): wanted {session.total_steps} steps as generation "
                    f"{session.epoch} set out, found {newest.step}"
                )
        return 1, f"done, final snapshot of step {newest.step}" + (f" ({ended})" if early else "")


def _begins(phase: RunPhase) -> str:
    batch = (phase.identity or {}).get("global_batch")
    return f"phase {phase.number} from step {phase.begins + 1} on, global batch {batch}"


def _names_phase(manifest: Manifest, phases: list[RunPhase]) -> None:
    said = manifest.data.get("phase", 1)
    if phases and said != (wanted := phase_at(phases, manifest.step).number):
        raise RuleBroken(
            f"snapshot {manifest.ref.name}: wanted one of phase {wanted}, which made step "
            f"{manifest.step}, found phase {said}"
        )


def _names_records(manifest: Manifest) -> None:
    named = rec.named(manifest.data)
    if named and named.last != manifest.step:
        raise RuleBroken(
            f"snapshot {manifest.ref.name}: wanted the name of records up to step {manifest.step}, "
            f"found {named}"
        )
