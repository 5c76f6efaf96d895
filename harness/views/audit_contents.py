"""Did a run read what its corpus holds? Step records' hashes of contents against the corpus' index:
`harness verify --data URL`.

A corpus is fixed by hash from its card down, and a reader hashes each chunk before it gives any of
it away. Each step's record sums up (position, hash of what was read there), where the latter is
made of the hashes of the chunks as they were read. What that must be follows from (seed, step) and
the index alone, so no data are read here (of records, where each lies); that the corpus is still
what its index says, `harness data verify` finds out.
"""

from __future__ import annotations

from harness.bucket.layout import IDENTITY
from harness.core import records as rec
from harness.core.batch import Batching, digest, indices_at, positions_of, sample_hash
from harness.core.world import BadInput, HarnessError
from harness.data.reading import Records, Tokens, named_by
from harness.views.audit_facts import AuditProgress
from harness.views.audit_records import batching_of, walk
from harness.views.audit_report import AuditReport, Check
from harness.views.audit_rules import RuleBroken, identity_of
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

NAME = "contents"


def with_contents(
    report: AuditReport,
    store: ObjectStore,
    url: str,
    progress: AuditProgress = lambda what, done, of: None,
) -> AuditReport:
    """The report with one check more. Raises BadInput if the run read no corpus, or another;
    StoreError."""
    identity = identity_of(IDENTITY, store.get(IDENTITY))
    if not rec.records_contents(identity):
        raise BadInput(f"{store.url}: wanted a run that read a corpus, found {identity['data']!r}")
    dataset = named_by(str(identity["data"]), url)
    try:
        n = _compare(store, identity, dataset, progress)
    except (RuleBroken, rec.BrokenRecords, HarnessError) as e:
        check = Check(NAME, False, str(e), 0)
    else:
        detail = f"each step read what the corpus {dataset.card.content} holds at its positions"
        check = Check(NAME, True, detail, n)
    first = report.first_violation or (None if check.ok else check.detail)
    return AuditReport(report.ok and check.ok, [*report.checks, check], first, report.notes)


def _compare(
    store: ObjectStore,
    identity: dict[str, object],
    dataset: Tokens | Records,
    progress: AuditProgress,
) -> int:
    """How many steps. Raises RuleBroken, BrokenRecords, CorpusCorrupt."""
    batching = batching_of(identity)
    if batching.samples != len(dataset):
        raise RuleBroken(
            f"{IDENTITY}: wanted the {len(dataset)} samples of the corpus, found {batching.samples}"
        )
    newest = Snapshots(store).latest()
    named = rec.named(newest.data) if newest is not None else None
    if newest is None or named is None:
        return 0
    n = 0
    for key, part in walk(store, named, rec.genesis(identity)):
        for record in part:
            wanted = f"{expected_contents(batching, dataset, record.step):016x}"
            if record.contents != wanted:
                raise RuleBroken(
                    f"{key}, step {record.step}: wanted the contents {wanted} that the corpus has "
                    f"at its positions, found {record.contents!r}: something else was read"
                )
            n += 1
        progress(NAME, n, newest.step)
    return n


def expected_contents(batching: Batching, dataset: Tokens | Records, step: int) -> int:
    """What `StepRecord.contents` must be, by the index."""
    at = positions_of(batching, step)
    samples = indices_at(batching, at).tolist()
    return digest(sample_hash(at, dataset.content_ids(samples, as_read=False)))
