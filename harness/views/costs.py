"""What many runs cost: by owner, project, experiment, run and month. `harness costs` is this.

Made of the runs' ledgers, so nothing is counted twice or left out: time is in whole nanoseconds and
money in whole nano-dollars, a run's months add up to the run, and groups to the total. Months are
those of UTC. Steps and tokens are those that are committed; of a run that went over the end of a
month, each month has its share by its useful time.

Knows summaries and a store's folders; shown by `costs_shown.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from harness.bucket.layout import ARCHIVE, FACTS
from harness.core.values import BadObject
from harness.views.painting import BUCKETS, NANO, apportion, ns
from harness.views.rows import AttemptRow, Billed
from harness.views.summary import Summary, summarize
from storage.errors import StoreError
from storage.objects import ObjectStore, folders, why_not_a_key

KEYS = ("owner", "project", "experiment", "run", "month")
AT_WORK = ("useful", "snapshot", "other")  # buckets of what a run is there for; the rest is waste
NOBODY = "(none)"  # a run that does not say
MOST_DEEP, MOST_FOLDERS = 6, 20_000  # folders below the one that is asked about
OpenStore = Callable[[str], ObjectStore]


# ---- sums ----------------------------------------------------------------------------------------
def _none() -> dict[str, int]:
    return dict.fromkeys(BUCKETS, 0)


@dataclass(frozen=True)
class Spending(Billed):
    """What was paid for, and what came of it. All whole numbers, so that they add up."""

    ns: dict[str, int] = field(default_factory=_none)  # by bucket
    nusd: dict[str, int] = field(default_factory=_none)  # by bucket
    on_demand_nusd: int = 0  # the same node-hours at on-demand prices, as far as they are known
    unpriced_ns: int = 0  # of nodes whose price nobody knows
    steps: int = 0
    tokens: int = 0

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            {b: self.ns[b] + other.ns[b] for b in BUCKETS},
            {b: self.nusd[b] + other.nusd[b] for b in BUCKETS},
            self.on_demand_nusd + other.on_demand_nusd,
            self.unpriced_ns + other.unpriced_ns,
            self.steps + other.steps,
            self.tokens + other.tokens,
        )

    @property
    def hours(self) -> float:
        """Of nodes."""
        return self.billed_ns / NANO / 3600

    @property
    def wasted_usd(self) -> float:
        return sum(usd for b, usd in self.nusd.items() if b not in AT_WORK) / NANO

    @property
    def wasted(self) -> float:
        """Share of what was paid."""
        return self.wasted_usd / self.usd if self.billed_nusd else 0.0

    @property
    def saved_usd(self) -> float:
        """Against the same node-hours on demand."""
        return (self.on_demand_nusd - self.billed_nusd) / NANO

    @property
    def saved(self) -> float:
        on_demand = self.on_demand_nusd
        return (on_demand - self.billed_nusd) / on_demand if on_demand else 0.0

    @property
    def usd_per_1k_steps(self) -> float | None:
        return 1000 * self.usd / self.steps if self.steps else None

    @property
    def usd_per_1m_tokens(self) -> float | None:
        return 1e6 * self.usd / self.tokens if self.tokens else None


@dataclass(frozen=True)
class RunCosts:
    """One run. `people`: owner, project, experiment, as far as it says; `whence`: who says so,
    "run" or "path"."""

    name: str  # its path below the folder that was asked about
    url: str
    people: Mapping[str, str]
    whence: str
    state: str
    months: Mapping[str, Spending]  # by "2026-11"; in order
    problems: tuple[str, ...] = ()

    @property
    def total(self) -> Spending:
        return sum(self.months.values(), Spending())

    def key(self, name: str, month: str) -> str:
        """`name`: one of KEYS."""
        if name == "run":
            return self.name
        return month if name == "month" else self.people.get(name) or NOBODY


@dataclass(frozen=True)
class CostRow:
    """One group. `keys`: in the order that was asked for."""

    keys: tuple[str, ...]
    spending: Spending
    runs: int


@dataclass(frozen=True)
class Costs:
    """Of all runs below `url`. `unread`: what could not be read, and why."""

    url: str
    runs: tuple[RunCosts, ...]
    unread: tuple[str, ...] = ()

    def within(self, month: str) -> Costs:
        """Of one month only, such as "2026-11"."""
        runs = [
            RunCosts(r.name, r.url, r.people, r.whence, r.state, {month: r.months[month]})
            for r in self.runs
            if month in r.months
        ]
        return Costs(self.url, tuple(runs), self.unread)

    @property
    def total(self) -> Spending:
        return sum((run.total for run in self.runs), Spending())

    def by(self, *names: str) -> list[CostRow]:
        """Grouped by some of KEYS, the dearest first; months in their order."""
        groups: dict[tuple[str, ...], Spending] = defaultdict(Spending)
        runs: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for run in self.runs:
            for month, spending in run.months.items():
                keys = tuple(run.key(name, month) for name in names)
                groups[keys] += spending
                runs[keys].add(run.url)
        rows = [CostRow(keys, spent, len(runs[keys])) for keys, spent in groups.items()]
        if "month" in names:
            return sorted(rows, key=lambda row: row.keys)
        return sorted(rows, key=lambda row: (-row.spending.billed_nusd, row.keys))


# ---- of one run ----------------------------------------------------------------------------------
def run_costs(
    s: Summary, name: str, people: Mapping[str, str], parts: Sequence[str] = ()
) -> RunCosts:
    """`people`: what the run says of itself; `parts`: the folders that it lies in, which say it
    where the run does not."""
    said = {key: people[key] for key in KEYS if people.get(key)}
    guessed = _from_path(parts) if not said else {}
    return RunCosts(
        name=name,
        url=s.url,
        people=said or guessed,
        whence="run" if said else "path" if guessed else "",
        state=s.state,
        months=dict(sorted(_months(s).items())),
        problems=s.problems,
    )


def _from_path(parts: Sequence[str]) -> dict[str, str]:
    """The folders between the one that was asked about and the run: project, project/experiment,
    or owner/project/experiment."""
    names = ("owner", "project", "experiment")[-min(len(parts), 3) :] if len(parts) != 1 else ()
    return dict(zip(names or ("project",), parts[-3:], strict=False)) if parts else {}


def _months(s: Summary) -> dict[str, Spending]:
    found: dict[str, Spending] = defaultdict(Spending)
    for row in s.ledger.attempts:
        for month, spending in _of_node(row).items():
            found[month] += spending
    useful = {month: spending.ns["useful"] for month, spending in sorted(found.items())}
    if not sum(useful.values()):
        useful = dict.fromkeys([*useful][-1:], 1)
    steps, tokens = apportion(s.step, useful), apportion(round(s.tokens), useful)
    for month in useful:
        found[month] += Spending(steps=steps[month], tokens=tokens[month])
    return found


def _of_node(row: AttemptRow) -> dict[str, Spending]:
    """By month, exactly: its months add up to its bill, bucket by bucket."""
    spent: dict[str, dict[str, int]] = defaultdict(_none)  # bucket -> month -> nanoseconds
    for begin, end, bucket in row.segments:
        for month, nanoseconds in _cut(begin, end):
            spent[month][bucket] += nanoseconds
    whole = {month: sum(by.values()) for month, by in spent.items()}
    priced = bool(row.usd_per_h or sum(row.nusd.values()))
    price = (row.on_demand_usd_per_h or row.usd_per_h) if priced else 0.0
    on_demand = _shared(round(row.billed_ns * price / 3600), whole)
    nusd: dict[str, dict[str, int]] = defaultdict(_none)
    for bucket, amount in row.nusd.items():
        of_bucket = {month: by[bucket] for month, by in spent.items()}
        for month, part in _shared(amount, of_bucket, _month(ns(row.asked_s))).items():
            nusd[month][bucket] = part
    return {
        month: Spending(
            dict(spent[month]),
            dict(nusd[month]),
            on_demand.get(month, 0),
            0 if priced else whole.get(month, 0),
        )
        for month in sorted({*spent, *nusd})
    }


def _shared(amount: int, weights: dict[str, int], else_in: str = "") -> dict[str, int]:
    """Exactly `amount`, in proportion; all of it in the month `else_in` where nothing has
    weight."""
    if sum(weights.values()):
        return apportion(amount, weights)
    return {else_in: amount} if amount and else_in else {}


def _cut(begin: int, end: int) -> Iterator[tuple[str, int]]:
    """[begin, end) at the ends of months: each with how much of it."""
    while begin < end:
        after = min(end, _next_month(begin))
        yield _month(begin), after - begin
        begin = after


def _month(at: int) -> str:
    return datetime.fromtimestamp(at // NANO, timezone.utc).strftime("%Y-%m")


def _next_month(at: int) -> int:
    now = datetime.fromtimestamp(at // NANO, timezone.utc)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return int(datetime(year, month, 1, tzinfo=timezone.utc).timestamp()) * NANO


# ---- of many runs --------------------------------------------------------------------------------
def find_runs(url: str, open_store: OpenStore) -> Iterator[tuple[tuple[str, ...], ObjectStore]]:
    """All runs at or below `url`, by name, each with its path below it. What is no run is gone
    through; what a run consists of is not. Raises StoreError if `url` itself cannot be read."""
    left: list[tuple[str, ...]] = [()]
    for count in itertools.count():
        if not left or count >= MOST_FOLDERS:
            return
        path = left.pop()
        store = open_store("/".join((url, *path)))
        names = [name for name in folders(store) if not why_not_a_key(name)]
        if {FACTS.rstrip("/"), ARCHIVE.rstrip("/")} & set(names):
            yield path, store
        elif len(path) < MOST_DEEP:
            left += [(*path, name) for name in reversed(names) if not name.startswith(".")]


def read_costs(
    url: str,
    open_store: OpenStore,
    people: Callable[[ObjectStore], Mapping[str, str]],
    now: Callable[[], float],
) -> Costs:
    """Of every run at or below `url`; those that cannot be read are named. `people`: what a run
    says of itself. Raises StoreError if `url` itself cannot be read."""
    runs, unread = list[RunCosts](), list[str]()
    for path, store in find_runs(url, open_store):
        name = "/".join(path) or url.rpartition("/")[2]
        try:
            runs.append(run_costs(summarize(store, now), name, people(store), path[:-1]))
        except (StoreError, BadObject) as e:
            unread.append(f"{name}: {e}")
    unread += [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    return Costs(url, tuple(runs), tuple(unread))


def unpriced(runs: Iterable[RunCosts]) -> list[str]:
    """Names of runs with nodes whose price nobody knows."""
    return [run.name for run in runs if run.total.unpriced_ns]
