"""The check that a run read what its corpora hold: hashes of contents in step records against the
corpora's indexes. `harness prove verify --data URL`.

A corpus is fixed by hash from its card down, and a reader hashes each chunk before it returns any
of it. Each step's record sums up (position, hash of the content read there); the latter is made of
the hashes of the chunks as they were read. The expected sum follows from (seed, step) and the index
alone, so no data are read here (of records, only where each lies). `harness data verify` checks
that the corpus still matches its index.

The list of excluded items may grow while a run lives (harness/data/exclusions.py). A step that read
none of the items in question is the same under each list. So some list of each corpus must explain
each step, and no step may need an older list than a step before it. From the first step that only a
list and newer ones explain, that list was certainly in force.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from harness.bucket.layout import IDENTITY
from harness.core import step_records as rec
from harness.core.batch import Batching, digest, indices_at, positions_of, sample_hash
from harness.core.sample_order import batching_of
from harness.core.world import BadInput, HarnessError
from harness.data.datasets import Records, Tokens
from harness.data.mixture import Mixture, proved_by
from harness.look.audit.audit import AuditReport, Check
from harness.look.audit.audit_facts import AuditProgress
from harness.look.audit.audit_records import walk
from harness.look.audit.audit_rules import RuleBroken, identity_of
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

NAME = "contents"
Corpora: TypeAlias = Tokens | Records | Mixture
# by name of the source ("" for a single corpus): the source as it is under each of its lists
EachList: TypeAlias = Mapping[str, Sequence[Tokens | Records]]
MOST = 1 << 16  # combinations of the sources' lists that are tried for one step


def with_contents(
    report: AuditReport,
    store: ObjectStore,
    urls: str | Sequence[str],
    progress: AuditProgress = lambda what, done, of: None,
) -> AuditReport:
    """Return the report with one more check. `urls`: the corpus, or all corpora of a mixture.

    Raises BadInput if the run read no corpus, or another; StoreError.
    """
    identity = identity_of(IDENTITY, store.get(IDENTITY))
    if not rec.records_contents(identity):
        raise BadInput(f"{store.url}: wanted a run that read a corpus, found {identity['data']!r}")
    dataset = proved_by(str(identity["data"]), urls)
    shown: dict[tuple[str, int], int] = {}
    try:
        n = _compare(store, identity, dataset, shown, progress)
    except (RuleBroken, rec.BrokenRecords, HarnessError) as e:
        check = Check(NAME, False, str(e), 0)
    else:
        detail = f"each step read what {_named(dataset)} at its positions"
        for (name, number), step in sorted(shown.items()):
            what = f"exclusion list {number}{f' of {name}' if name else ''}"
            detail += f"; {what} is in force from step {step} on at the latest"
        check = Check(NAME, True, detail, n)
    first = report.first_violation or (None if check.ok else check.detail)
    return AuditReport(report.ok and check.ok, [*report.checks, check], first, report.notes)


def _compare(
    store: ObjectStore,
    identity: dict[str, object],
    dataset: Corpora,
    shown: dict[tuple[str, int], int],
    progress: AuditProgress,
) -> int:
    """Return the number of steps. Fill `shown`: (source, number of one of its lists) -> the first
    step that no older list explains. Raises RuleBroken, BrokenRecords, CorpusCorrupt."""
    batching = batching_of(identity)
    if batching.samples != len(dataset):
        raise RuleBroken(
            f"{IDENTITY}: wanted the {len(dataset)} samples of the corpus, found {batching.samples}"
        )
    newest = Snapshots(store).latest()
    named = rec.named(newest.data) if newest is not None else None
    if newest is None or named is None:
        return 0
    sources = dataset.sources if isinstance(dataset, Mixture) else {"": dataset}
    each = {name: one.under_each_list() for name, one in sources.items()}
    n, latest = 0, {name: len(lists) - 1 for name, lists in each.items()}
    for key, part in walk(store, named, rec.genesis(identity)):
        for record in reversed(part):
            sums = _sums(batching, dataset, each, record.step)
            found = _lists_of(each, sums, record)
            if found is None:
                wanted = sum(sum_under(0) for sum_under in sums.values()) % 2**64
                raise RuleBroken(
                    f"{key}, step {record.step}: wanted the contents {wanted:016x} that the corpus "
                    f"has at its positions, found {record.contents!r}: something else was read"
                )
            for name, lists in found.items():
                if lists.start > latest[name]:
                    of = f" of {name}" if name else ""
                    raise RuleBroken(
                        f"{key}, step {record.step}: wanted exclusion lists that never go back, "
                        f"found that list {lists.start}{of} was in force, and list {latest[name]} "
                        "at a later step"
                    )
                latest[name] = min(latest[name], lists.stop - 1)
                shown |= {(name, number): record.step for number in range(1, lists.start + 1)}
            n += 1
        progress(NAME, n, newest.step)
    return n


def _sums(
    batching: Batching, dataset: Corpora, each: EachList, step: int
) -> dict[str, Callable[[int], int]]:
    """Return, for each source that a step reads, a function from the number of a list to the sum
    that the source adds to the step's contents under that list."""
    at = positions_of(batching, step)
    reads = _by_source(dataset, indices_at(batching, at).tolist())

    def sum_under(name: str, number: int) -> int:
        places, items = reads[name]
        under = each[name][number]
        return digest(sample_hash(at[places], under.content_ids(items, as_read=False)))

    return {name: functools.cache(functools.partial(sum_under, name)) for name in reads}


def _lists_of(
    each: EachList, sums: Mapping[str, Callable[[int], int]], record: rec.StepRecord
) -> dict[str, range] | None:
    """Return, for each source that the step read, the lists that explain the recorded contents: a
    range without gaps, since each list includes the one before. None: no lists explain them. Raises
    RuleBroken if there are too many combinations."""
    ways: list[list[tuple[int, range]]] = []  # for each source: the sums that its lists make
    for name, sum_under in sums.items():
        last = len(each[name]) - 1
        if sum_under(0) == sum_under(last):
            ways.append([(sum_under(0), range(last + 1))])
            continue
        by_sum: dict[int, list[int]] = {}
        for number in range(last + 1):
            by_sum.setdefault(sum_under(number), []).append(number)
        ways.append([(total, range(of[0], of[-1] + 1)) for total, of in by_sum.items()])
    if math.prod(map(len, ways)) > MOST:
        raise RuleBroken(
            f"step {record.step}: wanted to know which exclusion lists of {len(ways)} sources were "
            f"in force, found more than {MOST} ways to put it together"
        )
    for way in itertools.product(*ways):
        if f"{sum(total for total, _ in way) % 2**64:016x}" == record.contents:
            return dict(zip(sums, (lists for _, lists in way), strict=True))
    return None


def _by_source(dataset: Corpora, samples: list[int]) -> dict[str, tuple[list[int], list[int]]]:
    """Return by source name: the indices into `samples`, and the source's items they are."""
    if not isinstance(dataset, Mixture):
        return {"": (list(range(len(samples))), samples)}
    return {
        name: tuple(map(list, zip(*places, strict=True)))  # type: ignore[misc]
        for name, places in dataset.by_source(samples).items()
    }


def _named(dataset: Corpora) -> str:
    if not isinstance(dataset, Mixture):
        return f"the corpus {dataset.card.content} holds"
    found = ", ".join(f"{name} {one.card.content}" for name, one in dataset.sources.items())
    return f"the corpora {found} hold"
