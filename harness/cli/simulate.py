"""`harness market simulate`: simulate runs in hostile worlds made from seeds and on recorded
markets."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from harness.cli.common import DONE, existing_store, node_range
from harness.core.flags import Bounds, flag
from harness.core.input_files import text_given
from harness.core.world import BadInput
from harness.notices.sources import parse_duration
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.planner.decision_log import DecisionLine
    from harness.planner.market_nodes import ReplayJob
    from harness.planner.policy_table import MarketRow, MarketTable
    from harness.planner.traces import ZoneTrace

Markets = Mapping[str, Sequence["ZoneTrace"]]
LEGEND = (
    "/opt, worst: the bill as a multiple of the optimum's, mean and greatest; /od: of on-demand's; "
    "hours: until the work was done; missed: deadlines, of windows; moves: to another zone"
)
MOST_TIMES = 1000.0  # longest deadline as a multiple of --work
ON_DEMAND_USD = 3.06  # an hour of an AWS p3.2xlarge
TRACE_SUFFIXES = (".json", ".csv", ".txt")  # of the traces in a folder


@dataclass(frozen=True)
class SimulateFlags:
    seeds: int = flag(200, "how many seeded worlds", at_least=1)
    seed: int | None = flag(None, "one world only, with the log of its facts")
    first: int = flag(0, "the first seed")
    policy: tuple[str, ...] = flag(
        (),
        "a name, or package.module:function (default: cheapest). With --trace repeat it, or give "
        "several (default: deadline, uniform_progress, greedy, on_demand)",
        metavar="NAME",
    )
    jobs: int = flag(0, "with --trace: processes at the same time; 0: one per core")
    trace: tuple[str, ...] = flag(
        (),
        "recorded markets: files, or folders of them; all of them are zones of one market",
        nargs="+",
        action="extend",
        metavar="FILE",
    )
    each: bool = flag(False, "with --trace: every file is a market of its own")
    work: str = flag("48h", "with --trace: time that the work takes on the most nodes, undisturbed")
    deadline: tuple[str, ...] = flag(
        (),
        "with --trace: time until it must be done, from the beginning: 52h, or 1.25x of --work; "
        "repeat it, or separate by commas (default: 1.08x,1.25x,1.5x)",
        metavar="TIME",
    )
    usd_per_hour_late: float | None = flag(
        None,
        "with --trace: what each hour after the deadline costs; it is in the bills and in the "
        "optimum's",
        above=0,
    )
    starts: int = flag(20, "with --trace: beginnings, spread evenly over each market", at_least=1)
    nodes: str = flag("1:1", "with --trace: how many nodes, LOW:HIGH or N", check=node_range)
    changeover: str = flag(
        "10m", "with --trace: time from asking for a node until it trains", metavar="TIME"
    )
    lost: str = flag("0s", "with --trace: work that goes with a node that is taken", metavar="TIME")
    move_usd: tuple[str, ...] = flag(
        (),
        "with --trace: what a begin in another zone costs besides (default: 0); of one pair as "
        "FROM:TO=USD, with * for anything; repeat it, the last that fits counts",
        metavar="USD",
    )
    one_region: bool = flag(
        False, "with --trace: nodes of different zones train together, and moves cost nothing"
    )
    spot_usd_per_h: float = flag(
        0.9731, "with --trace: of a node on spot, where a trace has no prices", above=0
    )
    on_demand_usd_per_h: tuple[str, ...] = flag(
        (),
        "with --trace: of a node on demand (default: 3.06); of one zone as ZONE=USD, with * for "
        "anything; repeat it, the last that fits counts",
        metavar="USD",
    )
    polarity: str = flag(
        "",
        "with --trace: what 1 means in a trace of 0 and 1, available or preempted (default: as it "
        "says itself, else available)",
        choices=["", "available", "preempted"],
        metavar="available|preempted",
    )
    zone: str = flag("", "with --trace: name of the only zone, or which one of a table is meant")
    tick: float = flag(0.0, "with --trace: seconds, of logs of events (default: 60)")
    unit: str = flag(
        "",
        "with --trace: of times in two columns without a header",
        choices=["", "ms", "seconds", "minutes", "hours"],
        metavar="ms|seconds|minutes|hours",
    )
    why: str = flag(
        "",
        "with --trace, one --policy and one --deadline: the decisions of one window, and why: its "
        "number, from 1 to --starts, or `worst`",
        metavar="WINDOW",
    )
    what_if: str = flag(
        "",
        "a finished run: what it would have cost on its own market, under other policies "
        "(--policy), numbers of nodes (--nodes) and snapshot intervals (--interval)",
        metavar="URL",
    )
    interval: tuple[str, ...] = flag(
        (), "with --what-if: time between two snapshots; repeat it for more", metavar="TIME"
    )
    json: bool = flag(
        False,
        "with --trace: a line of JSON for each market, deadline and policy; with --what-if "
        "for each choice",
    )
    plot: str = flag(
        "", "with --trace or --what-if: also draw it: x.html, x.png, or both for another name"
    )


def simulate(flags: SimulateFlags) -> int:
    """Simulate runs on a virtual clock, in hostile worlds or on recorded markets.

    The real recovery loop runs in hostile worlds while invariants are checked; or on recorded
    markets (--trace), where policies are compared by cost and by the deadlines that they keep; or
    on the market of a finished run (--what-if)."""
    if flags.what_if:
        return _what_if(flags)
    if flags.trace:
        return _on_markets(flags)
    from harness.lab.simulation import simulation

    policy = flags.policy[-1] if flags.policy else "cheapest"
    return simulation.command(flags.seeds, flags.seed, flags.first, policy)


# ---- a run's own market --------------------------------------------------------------------------
def _what_if(flags: SimulateFlags) -> int:
    from harness.look.reports.summary import summarize
    from harness.planner.own_market import WhatIfAsked
    from harness.planner.what_if_report import command

    if flags.trace:
        raise BadInput("--what-if has a market of its own: leave --trace out")
    deadlines = _listed(flags.deadline)
    if len(deadlines) > 1 or any(one.endswith("x") for one in deadlines):
        raise BadInput("--what-if: wanted one --deadline as a time, such as 52h")
    asked = WhatIfAsked(
        _listed(flags.policy),
        (node_range(flags.nodes)[1],) if flags.nodes != SimulateFlags.nodes else (),
        tuple(_hours("--interval", one, "s") * 3600 for one in _listed(flags.interval)),
        _hours("--deadline", deadlines[0]) if deadlines else 0.0,
    )
    command(summarize(existing_store(flags.what_if)), asked, flags.json, flags.plot, Console())
    return DONE


# ---- recorded markets ----------------------------------------------------------------------------
def _on_markets(flags: SimulateFlags) -> int:
    from harness.planner import policy_table

    if flags.plot:
        from harness.planner.policy_report import plot_paths

        plot_paths(flags.plot)
    jobs = _jobs(flags)
    markets = _priced(flags, _markets(flags))
    moves = _moves(flags, markets)
    jobs = [dataclasses.replace(job, moves=moves) for job in jobs]
    names = _listed(flags.policy) or policy_table.usual_policies(jobs[0])
    if flags.why:
        return _why(flags, markets, jobs, names)
    table = policy_table.run_table(markets, jobs, names, flags.starts, flags.jobs)
    console = Console()
    if flags.json:
        for row in table.rows:
            print(json.dumps(_line(row, table)))
    else:
        _show(table, flags, console)
    if flags.plot:
        from harness.planner.policy_report import draw

        for path in draw(table, flags.plot):
            if not flags.json:
                console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    return DONE


def _why(
    flags: SimulateFlags, markets: Markets, jobs: Sequence[ReplayJob], names: Sequence[str]
) -> int:
    """Show all decisions of one policy in one window. Raises BadInput."""
    from harness.planner import decision_log, policy_table

    if not (len(markets) == len(jobs) == len(names) == 1):
        raise BadInput(
            f"--why: wanted one market, one --policy and one --deadline; found {len(markets)}, "
            f"{len(names)} and {len(jobs)}"
        )
    [(market, zones)], [job], [name] = markets.items(), jobs, names
    begins = policy_table.beginnings(zones, job.deadline_h, flags.starts)
    number, worst = flags.why, flags.why == "worst"
    if not worst and not (number.isdecimal() and 1 <= int(number) <= len(begins)):
        raise BadInput(f"--why: wanted `worst`, or 1 to {len(begins)}; found {number!r}")
    if worst:
        [row] = policy_table.run_table(markets, jobs, names, flags.starts, flags.jobs).rows
        first = max(row.windows, key=lambda w: w.over_optimum).first
    else:
        first = begins[int(number) - 1]
    policy = policy_table.policy_named(name, zones[0].tick_s)
    result, lines = decision_log.explained(zones, first, job, policy)
    best = policy_table.optimum_of(zones, first, job)
    of = f", {result.usd / best.usd:.3f}x of the optimum's {best.usd:.2f}" if best else ""
    title = (
        f"{market}, window {begins.index(first) + 1} of {len(begins)}: {name}, {result.usd:.2f} "
        f"USD{of}, done after {result.finish_h:.2f} of {job.deadline_h:g} h"
    )
    Console().print(_decisions(title, lines))
    return DONE


def _decisions(title: str, lines: Sequence[DecisionLine]) -> Table:
    """Return the timeline of a window."""
    shown = _bare_table(title)
    for column in ("hours", "work left", "time left", "USD", "nodes", "spot has", "decision, why"):
        shown.add_column(column, no_wrap=column in ("hours", "USD"))
    for line in lines:
        times = f" x{line.times}" if line.did.startswith("ask") and line.times > 1 else ""
        shown.add_row(
            f"{line.at_h:.2f}" + (f"-{line.until_h:.2f}" if line.until_h > line.at_h else ""),
            f"{line.work_h:.2f}",
            f"{line.time_h:.2f}",
            f"{line.usd:.2f}",
            " ".join(f"{n} x {offer}" for offer, n in line.nodes) or "-",
            " ".join(f"{zone}: {n}" for zone, n in line.rooms),
            f"{line.did}{times}: {line.reason}",
        )
    return shown


def _listed(values: Sequence[str]) -> tuple[str, ...]:
    """Return the values of a flag that was repeated, or separated by commas outside of
    parentheses, each once."""
    found = list[str]()
    for value in values:
        depth, word = 0, ""
        for letter in value + ",":
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth <= 0:
                found.append(word.strip())
                word = ""
            else:
                word += letter
    return tuple(dict.fromkeys(word for word in found if word))


def _jobs(flags: SimulateFlags) -> list[ReplayJob]:
    """Return one job for each deadline, the earliest first. Raises BadInput."""
    from harness.planner.market_nodes import ReplayJob

    work_h = _hours("--work", flags.work)
    deadlines = _listed(flags.deadline) or ("1.08x", "1.25x", "1.5x")
    hours = sorted({_deadline_h(one, work_h) for one in deadlines})
    return [
        ReplayJob(
            work_h,
            deadline_h,
            node_range(flags.nodes),
            changeover_s=_hours("--changeover", flags.changeover, "s") * 3600,
            lost_s=_hours("--lost", flags.lost, "s") * 3600,
            move_usd=_usd("--move-usd", flags.move_usd, 0.0)[0],
            spot_usd_per_h=flags.spot_usd_per_h,
            on_demand_usd_per_h=_usd(ON_DEMAND, flags.on_demand_usd_per_h, ON_DEMAND_USD)[0],
            one_place=flags.one_region,
            usd_per_hour_late=flags.usd_per_hour_late,
        )
        for deadline_h in hours
    ]


def _deadline_h(text: str, work_h: float) -> float:
    if text.endswith("x"):
        try:
            return Bounds(above=0, at_most=MOST_TIMES).of(text[:-1], float) * work_h
        except ValueError:
            raise BadInput(f"--deadline {text}: wanted 52h, or 1.25x of --work") from None
    return _hours("--deadline", text)


def _hours(name: str, text: str, unit: str = "h") -> float:
    """Parse a duration into hours. `unit`: that of a plain number; `name`: the flag, for messages.
    Raises BadInput."""
    given = text.strip() + ("" if text.strip()[-1:].isalpha() else unit)
    try:
        found: float = parse_duration(given) / 3600
    except BadInput as e:
        raise BadInput(f"{name}: {e}") from None
    if found <= 0 and name in ("--work", "--deadline", "--interval"):
        raise BadInput(f"{name} {text}: wanted a time above 0")
    return found


def _markets(flags: SimulateFlags) -> Markets:
    """Read the recorded markets and return them by name. Raises BadInput."""
    from harness.planner.trace_formats import TraceAsked, read_market
    from harness.planner.traces import zone_names

    asked = TraceAsked(flags.polarity, flags.zone, flags.tick, flags.unit)
    paths = [str(path) for one in flags.trace for path in _files(Path(one))]
    texts = {path: _text(path) for path in paths}
    if flags.each:
        names = zone_names(list(texts))
        return {
            name: read_market({path: text}, asked)
            for name, (path, text) in zip(names, texts.items(), strict=True)
        }
    zones = read_market(texts, asked)
    return {zones[0].zone if len(zones) == 1 else f"{len(zones)} zones": zones}


# ---- prices of zones and moves -------------------------------------------------------------------
ON_DEMAND = "--on-demand-usd-per-h"


def _usd(name: str, given: Sequence[str], usually: float) -> tuple[float, dict[str, float]]:
    """Return the price that is given without a name (else `usually`), and the others by the
    pattern before their `=`. Raises BadInput."""
    bounds = Bounds(above=0, at_most=1e6) if name == ON_DEMAND else Bounds(at_most=1e6)
    found: dict[str, float] = {}
    for one in _listed(given):
        pattern, _, usd = one.rpartition("=")
        try:
            price = bounds.of(usd, float)
        except ValueError as e:
            raise BadInput(f"{name} {one}: {e}") from None
        if pattern:
            found[pattern] = price
        else:
            usually = price
    return usually, found


def _priced(flags: SimulateFlags, markets: Markets) -> Markets:
    """Return the markets with the prices on demand that are given for some zones. Raises
    BadInput."""
    names = [zone.zone for zones in markets.values() for zone in zones]
    usd = _matched(ON_DEMAND, _usd(ON_DEMAND, flags.on_demand_usd_per_h, 0.0)[1], names)
    return {
        market: [dataclasses.replace(z, on_demand_usd_per_h=usd.get(z.zone)) for z in zones]
        for market, zones in markets.items()
    }


def _moves(flags: SimulateFlags, markets: Markets) -> tuple[tuple[str, str, float], ...]:
    """Return (from, to, USD) of the moves whose price is given separately. Raises BadInput."""
    found: dict[tuple[str, str], float] = {}
    given = _usd("--move-usd", flags.move_usd, 0.0)[1]
    pairs = {
        f"{a.zone}:{b.zone}": (a.zone, b.zone)
        for zones in markets.values()
        for a, b in itertools.permutations(zones, 2)
    }
    for name, usd in _matched("--move-usd", given, list(pairs)).items():
        found[pairs[name]] = usd
    return tuple((a, b, usd) for (a, b), usd in found.items())


def _matched(flag_name: str, given: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the price of each name that a pattern fits; the last one counts. Raises BadInput for
    a pattern that fits none."""
    found: dict[str, float] = {}
    for pattern, usd in given.items():
        fit = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not fit:
            some = ", ".join(names[:8]) or "none, as there is one zone"
            raise BadInput(f"{flag_name} {pattern}={usd:g}: nothing is so named; found {some}")
        found |= dict.fromkeys(fit, usd)
    return found


def _files(path: Path) -> list[Path]:
    """Return the file, or the files of a folder that look like traces. Raises BadInput."""
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix in TRACE_SUFFIXES)
    if not found:
        raise BadInput(f"--trace {path}: wanted a folder with {', '.join(TRACE_SUFFIXES)} in it")
    return found


def _text(path: str) -> str:
    return text_given(path, "a recorded market (--trace)")


# ---- what is shown -------------------------------------------------------------------------------
def _finite(number: float | None, digits: int = 4) -> float | None:
    return round(number, digits) if number is not None and math.isfinite(number) else None


def _line(row: MarketRow, table: MarketTable) -> dict[str, Any]:
    """Return a row for JSON. Numbers are means over the windows; null if there is none."""
    over, job = row.over_optimum, row.job
    return {
        "traces": row.market,
        "zones": [zone.zone for zone in table.markets[row.market]],
        "policy": row.policy,
        "work_h": job.work_h,
        "deadline_h": _finite(job.deadline_h),
        "usd": _finite(row.usd),
        "optimum_usd": _finite(row.optimum_usd),
        "on_demand_usd": _finite(row.on_demand_usd),
        "finish_h": _finite(row.finish_h),
        "missed": row.missed,
        "windows": len(row.windows),
        "over_optimum": _finite(over and over[0]),
        "worst_over_optimum": _finite(over and over[1]),
        "on_demand_h": _finite(row.mean("on_demand_h")),
        "spot_h": _finite(row.mean("spot_h")),
        "launches": _finite(row.mean("launches")),
        "moves": _finite(row.mean("moves")),
        "losses": _finite(row.mean("losses")),
        "goodput": _finite(row.mean("goodput")),
        "nodes": list(job.nodes),
        "changeover_s": job.changeover_s,
        "lost_s": job.lost_s,
        "move_usd": job.move_usd,
        "spot_usd_per_h": _spot_price(table.markets[row.market], job),
        "moves_usd": job.moves,
        "usd_per_hour_late": job.usd_per_hour_late,
        "late_usd": _finite(row.mean("late_usd")),
        "on_demand_usd_per_h": job.on_demand_usd_per_h,
        "zones_on_demand_usd_per_h": {
            zone.zone: zone.on_demand(job.on_demand_usd_per_h)
            for zone in table.markets[row.market]
        },
    }


def _spot_price(zones: Sequence[ZoneTrace], job: ReplayJob) -> float | None:
    """Return the spot price of a node in USD per hour; `None` if the trace has prices per tick."""
    return None if any(z.usd_per_h is not None for z in zones) else job.spot_usd_per_h


def _show(table: MarketTable, flags: SimulateFlags, console: Console) -> None:
    for name, zones in table.markets.items():
        console.print(_head(name, zones), highlight=False, soft_wrap=True)
    console.print(_terms(table, flags), highlight=False, soft_wrap=True)
    by_deadline = itertools.groupby(
        sorted(table.rows, key=lambda row: row.job.deadline_h), key=lambda row: row.job
    )
    for job, rows in by_deadline:
        _show_deadline(list(rows), job, console)
    console.print(LEGEND, highlight=False, style="dim")


def _head(name: str, zones: Sequence[ZoneTrace]) -> str:
    one = zones[0]
    each = ", ".join(
        f"{z.zone} {z.availability:.0%}"
        + (f" (to {z.nodes.max()} nodes)" if z.nodes.max() > 1 else "")
        for z in zones
    )
    return f"{name}: {one.hours:.0f} h in ticks of {one.tick_s:g} s; open {each}"


def _terms(table: MarketTable, flags: SimulateFlags) -> str:
    job = table.rows[0].job
    dear = {usd for zones in table.markets.values() for usd in job.on_demand(zones)}
    moves = {job.move_usd, *(usd for _, _, usd in job.moves)}
    priced = any(z.usd_per_h is not None for zones in table.markets.values() for z in zones)
    spot = "as the trace says" if priced else f"{job.spot_usd_per_h:g}"
    low, high = job.nodes
    more = [
        f"{job.work_h:g} h of work on {high} node{'s' if high > 1 else ''}",
        f"USD per hour: spot {spot}, on demand {_range(dear)}",
        f"changeover {job.changeover_s:g} s",
        *([f"at least {low} nodes"] if low > 1 else []),
        *([f"{job.lost_s:g} s lost with each node taken"] if job.lost_s else []),
        *([f"{job.usd_per_hour_late:g} USD for each hour late"] if job.usd_per_hour_late else []),
        *([f"{_range(moves)} USD for each move"] if any(moves) else []),
        f"1 means {flags.polarity or 'available, unless the trace says otherwise'}",
    ]
    return "; ".join(more)


def _range(usd: Collection[float]) -> str:
    low, high = min(usd), max(usd)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _bare_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _show_deadline(rows: Sequence[MarketRow], job: ReplayJob, console: Console) -> None:
    times = job.deadline_h / job.work_h
    shown = _bare_table(
        f"deadline {job.deadline_h:g} h ({times:.3g}x the work), means of the windows"
    )
    many = len({row.market for row in rows}) > 1
    for name in (*(["market"] if many else []), "policy"):
        shown.add_column(name, no_wrap=True)
    for name in ("USD", "/opt", "worst", "/od", "hours", "missed", "moves"):
        shown.add_column(name, justify="right", no_wrap=True)
    rows = [*rows, *(_over_all(rows) if many else [])]
    for row in rows:
        over = row.over_optimum
        shown.add_row(
            *([row.market] if many else []),
            row.policy,
            f"{row.usd:.2f}",
            f"{over[0]:.3f}" if over else "-",
            f"{over[1]:.2f}" if over else "-",
            f"{row.usd / row.on_demand_usd:.3f}",
            f"{row.finish_h:.1f}" if math.isfinite(row.finish_h) else "never",
            f"{row.missed}/{len(row.windows)}",
            f"{row.mean('moves'):.1f}",
        )
    console.print(shown)


def _over_all(rows: Sequence[MarketRow]) -> list[MarketRow]:
    """Return one row for each policy, over all markets."""
    found: dict[str, list[MarketRow]] = {}
    for row in rows:
        found.setdefault(row.policy, []).append(row)
    return [
        dataclasses.replace(
            some[0], market="all", windows=tuple(w for row in some for w in row.windows)
        )
        for some in found.values()
    ]
