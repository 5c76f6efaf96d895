"""Costs of many runs by owner, project, experiment, run and month, for `harness runs costs`.

They are sums of the runs' ledgers, so nothing is counted twice or left out: time is in whole
nanoseconds and money in whole nano-dollars, a run's months add up to the run, and groups to the
total. Months are UTC. Steps and tokens are the committed ones; if a run spans several months, each
month has its share by its useful time.

It knows summaries and a store's folders.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.bucket.layout import ARCHIVE, FACTS
from harness.core.formatting import money, percent, plural
from harness.ledger.bill import BUCKETS, NANO, AttemptRow, Billed, apportion, ns, price
from harness.look.pages.html_parts import asset, render
from harness.look.reports.report_rows import MEANING
from harness.look.reports.summary import Summary, summarize
from storage.canonical_json import BadObject
from storage.errors import StoreError
from storage.stores.objects import ObjectStore, folders, why_not_a_key
from storage.terminal_text import cell, plain

KEYS = ("owner", "project", "experiment", "run", "month")
AT_WORK = ("useful", "snapshot", "other")  # productive buckets; the others are waste
NOBODY = "(none)"  # stands for a field that a run does not set
MOST_DEEP, MOST_FOLDERS = 6, 20_000  # folders below the requested one
OpenStore = Callable[[str], ObjectStore]


# ---- sums ----------------------------------------------------------------------------------------
def _none() -> dict[str, int]:
    return dict.fromkeys(BUCKETS, 0)


@dataclass(frozen=True)
class Spending(Billed):
    """Money spent and work done for it. All are whole numbers, so that they add up exactly."""

    ns: dict[str, int] = field(default_factory=_none)  # by bucket
    nusd: dict[str, int] = field(default_factory=_none)  # by bucket
    on_demand_nusd: int = 0  # the same node-hours at on-demand prices, as far as these are known
    unpriced_ns: int = 0  # time of nodes whose price is unknown
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
        """Node-hours."""
        return self.billed_ns / NANO / 3600

    @property
    def wasted_usd(self) -> float:
        return sum(usd for b, usd in self.nusd.items() if b not in AT_WORK) / NANO

    @property
    def wasted(self) -> float:
        """Share of the money paid that was wasted."""
        return self.wasted_usd / self.usd if self.billed_nusd else 0.0

    @property
    def saved_usd(self) -> float:
        """Dollars saved against the same node-hours on demand."""
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
    """The costs of one run. `people`: its owner, project and experiment, where known; `whence`:
    their source, "run" or "path"."""

    name: str  # its path below the requested folder
    url: str
    people: Mapping[str, str]
    whence: str
    state: str
    simulated: bool  # its prices are
    months: Mapping[str, Spending]  # by "2026-11"; in order
    problems: tuple[str, ...] = ()

    @property
    def total(self) -> Spending:
        return sum(self.months.values(), Spending())

    def key(self, name: str, month: str) -> str:
        """Return the run's value for `name`, one of KEYS."""
        if name == "run":
            return self.name
        return month if name == "month" else self.people.get(name) or NOBODY


@dataclass(frozen=True)
class CostRow:
    """One group. `keys`: in the requested order."""

    keys: tuple[str, ...]
    spending: Spending
    runs: int


@dataclass(frozen=True)
class Costs:
    """The costs of all runs below `url`. `unread`: what could not be read, and why."""

    url: str
    runs: tuple[RunCosts, ...]
    unread: tuple[str, ...] = ()

    def within(self, month: str) -> Costs:
        """Return the costs of one month only, such as "2026-11"."""
        runs = [
            replace(r, months={month: r.months[month]}, problems=())
            for r in self.runs
            if month in r.months
        ]
        return Costs(self.url, tuple(runs), self.unread)

    @property
    def total(self) -> Spending:
        return sum((run.total for run in self.runs), Spending())

    def by(self, *names: str) -> list[CostRow]:
        """Return groups by some of KEYS, the dearest first; months in their order."""
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


# ---- one run -------------------------------------------------------------------------------------
def run_costs(
    s: Summary, name: str, people: Mapping[str, str], parts: Sequence[str] = ()
) -> RunCosts:
    """Return the costs of one run. `people`: the run's own fields; `parts`: the folders above it,
    which stand in for the fields if the run sets none."""
    said = {key: people[key] for key in KEYS if people.get(key)}
    guessed = _from_path(parts) if not said else {}
    return RunCosts(
        name=name,
        url=s.url,
        people=said or guessed,
        whence="run" if said else "path" if guessed else "",
        state=s.state,
        simulated=s.simulated,
        months=dict(sorted(_months(s).items())),
        problems=s.problems,
    )


def _from_path(parts: Sequence[str]) -> dict[str, str]:
    """Return fields from the folders between the requested one and the run: project,
    project/experiment, or owner/project/experiment."""
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
    """Return a node's spending by month; each bucket's months add up to the bill exactly."""
    spent: dict[str, dict[str, int]] = defaultdict(_none)  # bucket -> month -> nanoseconds
    for begin, end, bucket in row.segments:
        for month, nanoseconds in _cut(begin, end):
            spent[month][bucket] += nanoseconds
    whole = {month: sum(by.values()) for month, by in spent.items()}
    priced = bool(row.usd_per_h or sum(row.nusd.values()))
    usd_per_h = (row.on_demand_usd_per_h or row.usd_per_h) if priced else 0.0
    on_demand = _shared(price(row.billed_ns, usd_per_h), whole)
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
    """Share out exactly `amount` in proportion to the weights; if all weights are 0, put all of it
    into the month `else_in`."""
    if sum(weights.values()):
        return apportion(amount, weights)
    return {else_in: amount} if amount and else_in else {}


def _cut(begin: int, end: int) -> Iterator[tuple[str, int]]:
    """Cut [begin, end) (ns) at the ends of months; yield each month and its nanoseconds."""
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


# ---- many runs -----------------------------------------------------------------------------------
def find_runs(url: str, open_store: OpenStore) -> Iterator[tuple[tuple[str, ...], ObjectStore]]:
    """Yield all runs at or below `url`, by name, each with its path below it. Searches folders that
    are no runs, but not those inside a run. Raises StoreError if `url` itself cannot be read."""
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
    """Return the costs of every run at or below `url`, and the names of unreadable runs. `people`
    reads a run's own fields. Raises StoreError if `url` itself cannot be read."""
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
    """Return the names of runs with nodes whose price is unknown."""
    return [run.name for run in runs if run.total.unpriced_ns]


# Costs of many runs for people and programs: a table in the terminal, CSV, JSON, and one
# self-contained HTML page.

HEAD = ("runs", "paid", "hours", "saved", "overhead", "per 1k", "per 1M")
SAVED = "against the same node-hours on demand"
WASTED = "of what was paid: all but steps that count, snapshots and what lies between steps"


def _cells(row: CostRow) -> list[str]:
    s = row.spending
    return [
        f"{row.runs:,}",
        money(s.usd),
        f"{s.hours:,.2f}",
        percent(s.saved),
        percent(s.wasted),
        _or_none(s.usd_per_1k_steps),
        _or_none(s.usd_per_1m_tokens),
    ]


def _or_none(usd: float | None) -> str:
    return "–" if usd is None else money(usd)


def _total(costs: Costs, names: Sequence[str]) -> CostRow:
    return CostRow(("all", *("" for _ in names[1:])), costs.total, len(costs.runs))


def notes(costs: Costs) -> list[str]:
    """Return explanations that a reader needs besides the numbers."""
    total = costs.total
    saved = money(total.saved_usd) if total.saved_usd >= 0 else f"-{money(-total.saved_usd)}"
    found = [
        f"hours: of nodes; per 1k steps, per 1M tokens; saved: {saved} {SAVED}; overhead: "
        f"{money(total.wasted_usd)} {WASTED}"
    ]
    if made_up := [run.name for run in costs.runs if run.simulated]:
        found.append(
            f"simulated, of the local cloud: the prices of {plural(len(made_up), 'run')}, "
            f"{', '.join(made_up[:5])}{' ...' if len(made_up) > 5 else ''}"
        )
    if guessed := [run.name for run in costs.runs if run.whence == "path"]:
        found.append(
            f"{plural(len(guessed), 'run')} said nothing of owner, project and experiment "
            "(HARNESS_OWNER, HARNESS_PROJECT, HARNESS_EXPERIMENT): the folders stand for them"
        )
    if names := unpriced(costs.runs):
        hours = total.unpriced_ns / NANO / 3600
        found.append(
            f"nobody knows the price of {hours:,.2f} node-hours of {', '.join(names[:5])}"
            f"{' ...' if len(names) > 5 else ''}: they count $0 (docs/COSTS.md tells what to set)"
        )
    return found


# ---- terminal ------------------------------------------------------------------------------------
def print_costs(costs: Costs, names: Sequence[str], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name == "month", min_width=7)
    for name in HEAD:
        table.add_column(name, justify="right", no_wrap=True)
    for row in costs.by(*names):
        table.add_row(*(Text(plain(key)) for key in row.keys), *_cells(row))
    total = _total(costs, names)
    table.add_section()
    table.add_row(*total.keys, *_cells(total), style="bold")
    console.print(Text(plain(costs.url), style="bold"), table, highlight=False)
    for note in notes(costs):
        console.print(Text(plain(note), style="dim"))
    for problem in costs.unread:
        console.print(Text(f"! {plain(problem)}", style="yellow"))


# ---- CSV and JSON --------------------------------------------------------------------------------
def numbers_of(s: Spending) -> dict[str, Any]:
    """Return the numbers for programs: dollars and hours, and the exact integers behind them."""
    return {
        "usd": s.usd,
        "node_hours": s.hours,
        "on_demand_usd": s.on_demand_nusd / NANO,
        "saved_usd": s.saved_usd,
        "overhead_usd": s.wasted_usd,
        "steps": s.steps,
        "tokens": s.tokens,
        "usd_per_1k_steps": s.usd_per_1k_steps,
        "usd_per_1m_tokens": s.usd_per_1m_tokens,
        "unpriced_node_hours": s.unpriced_ns / NANO / 3600,
        "nusd": s.billed_nusd,
        "ns": s.billed_ns,
        **{f"{bucket}_nusd": s.nusd[bucket] for bucket in BUCKETS},
        **{f"{bucket}_ns": s.ns[bucket] for bucket in BUCKETS},
    }


def to_csv(costs: Costs, names: Sequence[str]) -> str:
    """Return CSV, one line per group. Names that a spreadsheet would take for a formula get an
    apostrophe in front."""
    out = io.StringIO()
    head = [*names, "runs", *numbers_of(Spending())]
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(head)
    for row in costs.by(*names):
        said = numbers_of(row.spending).values()
        lines.writerow(
            [*map(cell, row.keys), row.runs, *("" if value is None else value for value in said)]
        )
    return out.getvalue()


def to_json(costs: Costs, names: Sequence[str]) -> dict[str, Any]:
    return {
        "url": costs.url,
        "by": list(names),
        "rows": [
            {**dict(zip(names, row.keys, strict=True)), "runs": row.runs} | numbers_of(row.spending)
            for row in costs.by(*names)
        ],
        "total": {"runs": len(costs.runs), **numbers_of(costs.total)},
        "runs": [
            {"run": r.name, "url": r.url, "state": r.state, "simulated": r.simulated}
            | {**r.people, "said_by": r.whence}
            for r in costs.runs
        ],
        "unread": list(costs.unread),
    }


# ---- HTML ----------------------------------------------------------------------------------------
def to_html(costs: Costs, names: Sequence[str]) -> str:
    """Return the whole page; it fetches nothing and runs no script."""
    ways = [tuple(names), *(way for way in (("month",), ("owner",), ("project",)) if way != names)]
    return render(
        "look/pages/costs.html",
        title="What runs cost",
        style=asset("page.css"),
        costs=costs,
        total=costs.total,
        saved=SAVED,
        overhead=WASTED,
        shares=_shares(costs.total),
        buckets=_buckets(costs.total),
        ways=[(way, (*way, *HEAD), _rows(costs, way)) for way in dict.fromkeys(ways)],
        notes=notes(costs),
    )


def _rows(costs: Costs, names: Sequence[str]) -> list[tuple[str, ...]]:
    return [(*row.keys, *_cells(row)) for row in (*costs.by(*names), _total(costs, names))]


def _shares(s: Spending) -> list[tuple[str, float, str]]:
    """Return shares by money, or by time if nothing has a price."""
    weights = s.nusd if s.billed_nusd else s.ns
    whole = sum(weights.values())
    shares = [(b, weights[b] / whole) for b in BUCKETS if weights[b]]
    return [(f"b-{b}", share, f"{b}: {percent(share)}") for b, share in shares]


def _buckets(s: Spending) -> list[tuple[str, str, float, float, float]]:
    """Return (bucket, meaning, node-hours, dollars, share) of each that was paid for."""
    paid = s.billed_nusd
    return [
        (b, MEANING[b], s.ns[b] / NANO / 3600, s.nusd[b] / NANO, s.nusd[b] / paid if paid else 0.0)
        for b in BUCKETS
        if s.ns[b]
    ]

