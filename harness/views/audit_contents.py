"""Did a run read what its corpus holds? Step records' hashes of contents against the corpus' index:
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

import copy
from collections.abc import Sequence

from harness.bucket.layout import IDENTITY
from harness.core import records as rec
from harness.core.batch import Batching, digest, indices_at, positions_of, sample_hash
from harness.core.world import BadInput, HarnessError
from harness.data.excluding import history
from harness.data.reading import Records, Tokens, named_by
from harness.views.audit_facts import AuditProgress
from harness.views.audit_records import batching_of, walk
from harness.views.audit_report import AuditReport, Check
from harness.views.audit_rules import RuleBroken, identity_of
from storage.objects import ObjectStore
from storage.opening import open_store
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
    shown: dict[int, int] = {}
    try:
        n = _compare(store, identity, under_each_list(dataset, url), shown, progress)
    except (RuleBroken, rec.BrokenRecords, HarnessError) as e:
        check = Check(NAME, False, str(e), 0)
    else:
        detail = f"each step read what the corpus {dataset.card.content} holds at its positions"
        for number, step in sorted(shown.items()):
            detail += f"; exclusion list {number} is in force from step {step} on at the latest"
        check = Check(NAME, True, detail, n)
    first = report.first_violation or (None if check.ok else check.detail)
    return AuditReport(report.ok and check.ok, [*report.checks, check], first, report.notes)


def _compare(
    store: ObjectStore,
    identity: dict[str, object],
    datasets: Sequence[Tokens | Records],
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


def under_each_list(dataset: Tokens | Records, url: str) -> list[Tokens | Records]:
    """The dataset as it is under each exclusion list of its corpus, the empty one first. Raises
    CorpusCorrupt, BadInput, StoreError."""
    out = []
    for one in history(open_store(url), dataset.card):
        out.append(copy.copy(dataset))
        out[-1].exclude(one.number)
    return out


def _lists_of(
    batching: Batching, datasets: Sequence[Tokens | Records], record: rec.StepRecord
) -> range:
    """The lists under which the step must have read what it says: a row without gaps, since each
    has all of the one before."""

    def fits(number: int) -> bool:
        found = expected_contents(batching, datasets[number], record.step)
        return f"{found:016x}" == record.contents

    last = len(datasets) - 1
    if fits(0) and (not last or fits(last)):
        return range(last + 1)
    found = [number for number in range(last + 1) if fits(number)]
    return range(found[0], found[-1] + 1) if found else range(0)


def expected_contents(batching: Batching, dataset: Tokens | Records, step: int) -> int:
    """What `StepRecord.contents` must be, by the index."""
    at = positions_of(batching, step)
    samples = indices_at(batching, at).tolist()
    return digest(sample_hash(at, dataset.content_ids(samples, as_read=False)))
