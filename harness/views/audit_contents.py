"""Did a run read what its corpora hold? Step records' hashes of contents against their indexes:
`harness verify --data URL`.

A corpus is fixed by hash from its card down, and a reader hashes each chunk before it gives any of
it away. Each step's record sums up (position, hash of what was read there), where the latter is
made of the hashes of the chunks as they were read. What that must be follows from (seed, step) and
the index alone, so no data are read here (of records, where each lies); that the corpus is still
what its index says, `harness data verify` finds out.

What a corpus leaves out may grow while a run lives (harness/data/excluding.py). A step that read
nothing of that is the same under each list. So each step must be what some list makes of it, and no
step an older list's than a step before it; from the first step that is a list's and no older one's,
the list was in force for sure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

from harness.bucket.layout import IDENTITY
from harness.core import records as rec
from harness.core.batch import Batching, Int64s, digest, indices_at, positions_of, sample_hash
from harness.core.identity import batching_of
from harness.core.world import BadInput, HarnessError
from harness.data.mixture import Mixture, proved_by
from harness.data.reading import Records, Tokens
from harness.views.audit_facts import AuditProgress
from harness.views.audit_records import walk
from harness.views.audit_report import AuditReport, Check
from harness.views.audit_rules import RuleBroken, identity_of
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

NAME = "contents"
Corpora: TypeAlias = Tokens | Records | Mixture


def with_contents(
    report: AuditReport,
    store: ObjectStore,
    urls: str | Sequence[str],
    progress: AuditProgress = lambda what, done, of: None,
) -> AuditReport:
    """The report with one check more. `urls`: the corpus, or all corpora of a mixture. Raises
    BadInput if the run read no corpus, or another; StoreError."""
    identity = identity_of(IDENTITY, store.get(IDENTITY))
    if not rec.records_contents(identity):
        raise BadInput(f"{store.url}: wanted a run that read a corpus, found {identity['data']!r}")
    dataset = proved_by(str(identity["data"]), urls)
    shown: dict[int, int] = {}
    try:
        n = _compare(store, identity, dataset.under_each_list(), shown, progress)
    except (RuleBroken, rec.BrokenRecords, HarnessError) as e:
        check = Check(NAME, False, str(e), 0)
    else:
        detail = f"each step read what {_named(dataset)} at its positions"
        for number, step in sorted(shown.items()):
            detail += f"; exclusion list {number} is in force from step {step} on at the latest"
        check = Check(NAME, True, detail, n)
    first = report.first_violation or (None if check.ok else check.detail)
    return AuditReport(report.ok and check.ok, [*report.checks, check], first, report.notes)


def _compare(
    store: ObjectStore,
    identity: dict[str, object],
    datasets: Sequence[Corpora],
    shown: dict[int, int],
    progress: AuditProgress,
) -> int:
    """How many steps. `datasets`: the corpus under each of its lists. `shown`: by the number of a
    list, the first step that no older one explains. Raises RuleBroken, BrokenRecords,
    CorpusCorrupt."""
    batching, dataset = batching_of(identity), datasets[0]
    if batching.samples != len(dataset):
        raise RuleBroken(
            f"{IDENTITY}: wanted the {len(dataset)} samples of the corpus, found {batching.samples}"
        )
    newest = Snapshots(store).latest()
    named = rec.named(newest.data) if newest is not None else None
    if newest is None or named is None:
        return 0
    n, latest = 0, len(datasets) - 1
    for key, part in walk(store, named, rec.genesis(identity)):
        for record in reversed(part):
            lists = _lists_of(batching, datasets, record)
            if not lists:
                wanted = expected_contents(batching, dataset, record.step)
                raise RuleBroken(
                    f"{key}, step {record.step}: wanted the contents {wanted:016x} that the corpus "
                    f"has at its positions, found {record.contents!r}: something else was read"
                )
            if lists.start > latest:
                raise RuleBroken(
                    f"{key}, step {record.step}: wanted exclusion lists that never go back, found "
                    f"that list {lists.start} was in force, and list {latest} at a later step"
                )
            latest = min(latest, lists.stop - 1)
            shown |= dict.fromkeys(range(1, lists.start + 1), record.step)
            n += 1
        progress(NAME, n, newest.step)
    return n


def _lists_of(batching: Batching, datasets: Sequence[Corpora], record: rec.StepRecord) -> range:
    """The lists under which the step must have read what it says: a row without gaps, since each
    has all of the one before."""

    at = positions_of(batching, record.step)
    samples = indices_at(batching, at).tolist()

    @functools.cache
    def fits(number: int) -> bool:
        return f"{_contents_at(datasets[number], at, samples):016x}" == record.contents

    last = len(datasets) - 1
    if fits(0) and (not last or fits(last)):
        return range(last + 1)
    found = [number for number in range(last + 1) if fits(number)]
    return range(found[0], found[-1] + 1) if found else range(0)


def _named(dataset: Corpora) -> str:
    if not isinstance(dataset, Mixture):
        return f"the corpus {dataset.card.content} holds"
    found = ", ".join(f"{name} {one.card.content}" for name, one in dataset.sources.items())
    return f"the corpora {found} hold"


def expected_contents(batching: Batching, dataset: Corpora, step: int) -> int:
    """What `StepRecord.contents` must be, by the index."""
    at = positions_of(batching, step)
    return _contents_at(dataset, at, indices_at(batching, at).tolist())


def _contents_at(dataset: Corpora, at: Int64s, samples: list[int]) -> int:
    assert dataset.content_ids is not None
    return digest(sample_hash(at, dataset.content_ids(samples, as_read=False)))
