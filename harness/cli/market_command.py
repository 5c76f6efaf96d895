"""`harness market`: the history of offers that runs have seen, kept on this computer and in a
bucket that a team shares."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.table import Table

from harness.cli.common import (
    DONE,
    FAILED,
    cache_dir,
    done_beside,
    existing_store,
    names_of,
    task_resources,
)
from harness.clouds.live_prices import MarketUrls, ask_clouds
from harness.clouds.sky_broker import OFFERS_TIMEOUT_S, Broker, SkyError
from harness.clouds.skypilot import has_spot_market, to_offer
from harness.core.flags import flag, positional
from harness.core.formatting import percent
from harness.core.input_files import read_given
from harness.core.world import BadInput, CloudUnavailable
from harness.planner.market_history import (
    HistoryShelf,
    MarketHistory,
    OfferSeen,
    OfferSummary,
    RunMemory,
    history_name,
)
from harness.planner.synthetic_market import ROUGH, drawn, make_up
from harness.planner.trace_formats import as_table
from storage.canonical_json import digest
from storage.errors import StoreError, StoreUnavailable, WrongInput
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console, cell

if TYPE_CHECKING:

    from harness.clouds.live_prices import LiveOffer
    from harness.controller.forecast.price_process import PricePath
    from harness.core.estimates import CapacitySeen

SHARED = "HARNESS_MARKET"  # URL of the history that a team shares
ADVISOR = "HARNESS_SPOT_ADVISOR"  # URL of a copy of AWS's Spot Instance Advisor
SHARED_WITHIN_S = 5.0  # longest wait of a launch for the shared history
REMEMBER_EVERY_S = 600.0
MOST_DRAWN, DRAWN_TICK_S = 50, 600.0  # most offers of an invented market, and its tick
END_WITHIN_S = 20.0  # for the last write, when a launch ends


@dataclass(frozen=True, kw_only=True)
class HistoryFlags:
    """The flags of all commands that read or extend the history."""

    shared: str = flag("", f"URL of a history that a team shares; default: {SHARED}")

    def histories(self) -> Histories:
        return Histories(self.shared or os.environ.get(SHARED, ""))


@dataclass(frozen=True, kw_only=True)
class OffersFlags(HistoryFlags):
    """The flags of all commands about some of the offers."""

    offer: str = flag("", "only offers whose names contain this")

    def read(self) -> tuple[MarketHistory, list[str]]:
        """Return what is known of these offers, and warnings about what could not be read."""
        history, warnings = self.histories().read(time.time())
        return history.only(self.offer) if self.offer else history, warnings


class Histories:
    """The history of this computer, and the shared one if there is one.

    The shared one gets a few seconds to answer; otherwise its last copy is used. `folder`: where
    this computer's history is; by default below ~/.cache/spotharness.
    """

    def __init__(self, shared: str = "", folder: Path | None = None):
        self.folder = folder or cache_dir("", "market").parent
        self.shared = normalize(shared) if shared else ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Histories:
        return cls(environ.get(SHARED, ""))

    def own(self) -> HistoryShelf:
        return HistoryShelf(open_store(normalize(str(self.folder / "own")), retry_within_s=1.0))

    def team(self) -> HistoryShelf:
        return HistoryShelf(open_store(self.shared, retry_within_s=SHARED_WITHIN_S))

    def read(self, now_s: float) -> tuple[MarketHistory, list[str]]:
        """Return the merged history, and warnings about what could not be read. Raises only
        WrongInput, for an invalid URL."""
        found, warnings = MarketHistory(), list[str]()
        try:
            found = self.own().read(now_s)
        except StoreError as e:
            warnings.append(f"{self.folder}: cannot be read ({e})")
        if not self.shared:
            return found, warnings
        try:
            team = _within(SHARED_WITHIN_S, lambda: self._ask_team(now_s))
        except WrongInput:
            raise
        except StoreError as e:
            try:
                text = self._copy().read_text(encoding="utf-8", errors="replace")
                team, words = MarketHistory.read(text), "what it said the last time is taken"
            except OSError:
                team, words = MarketHistory(), "it is left out"
            warnings.append(f"{self.shared}: does not answer ({e}); {words}")
        return found.merged(team).current(now_s), warnings

    def _copy(self) -> Path:
        """Return the path of the last copy of the shared history."""
        return self.folder / "shared" / f"{digest(self.shared.encode())}.jsonl"

    def _ask_team(self, now_s: float) -> MarketHistory:
        """Read the shared history and keep a copy of it. Raises StoreError."""
        team, copy = self.team().read(now_s), self._copy()
        with contextlib.suppress(OSError):  # the answer is usable even if the disk is full
            copy.parent.mkdir(parents=True, exist_ok=True)
            temporary = copy.with_suffix(f".{os.getpid()}")
            temporary.write_text(team.text(), encoding="utf-8")
            temporary.replace(copy)
        return team

    def write(self, records: list[OfferSeen], now_s: float) -> list[str]:
        """Write records to both histories. Return warnings about what could not be written; a store
        that fails raises nothing."""
        warnings = list[str]()
        shelves: list[tuple[str, Callable[[], HistoryShelf]]] = [(str(self.folder), self.own)]
        if self.shared:
            shelves.append((self.shared, self.team))
        for name, shelf in shelves:
            try:
                shelf().write(records, now_s)
            except StoreError as e:
                warnings.append(f"{name}: cannot be written ({e})")
        return warnings


def _within(seconds: float, ask: Callable[[], MarketHistory]) -> MarketHistory:
    """Return the answer of `ask` if it comes in time. A later one is still kept as a copy, for the
    next time. Raises StoreError."""
    said: list[MarketHistory | StoreError] = []

    def one() -> None:
        try:
            said.append(ask())
        except StoreError as e:
            said.append(e)

    thread = threading.Thread(target=one, name="market history", daemon=True)
    thread.start()
    thread.join(seconds)
    if not said:
        raise StoreUnavailable(f"no answer within {seconds:g} s")
    if isinstance(said[0], StoreError):
        raise said[0]
    return said[0]


def _warn(console: Console, warnings: list[str]) -> None:
    for words in warnings:
        console.print(words, style="yellow", highlight=False, soft_wrap=True)


# ---- beside a launch -----------------------------------------------------------------------------
@contextlib.contextmanager
def remembering(url: str, store: ObjectStore, histories: Histories) -> Iterator[None]:
    """Save what a run has seen of offers while it is led, and once more at its end. A failure to
    do so does not fail the launch."""
    memory = RunMemory(url, store)

    def keep() -> None:
        with contextlib.suppress(StoreError):
            histories.write(memory.records(), time.time())

    with done_beside("remembering", keep, every_s=REMEMBER_EVERY_S, end_within_s=END_WITHIN_S):
        yield


def known_before(
    url: str, histories: Histories, now_s: float, console: Console
) -> tuple[dict[str, CapacitySeen], dict[str, PricePath]]:
    """Return what other runs have seen of the capacity of offers, and of their prices, for the
    forecasts of this run. `url`: normalised. Print what could not be read."""
    history, warnings = histories.read(now_s)
    _warn(console, warnings)
    others = history.without(history_name(url))
    return others.prior(now_s), others.prices()


# ---- learn ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LearnFlags(HistoryFlags):
    names: tuple[str, ...] = positional("URLs of runs, or exported files", nargs="+")


def learn(flags: LearnFlags) -> int:
    """Add what runs, by URL, or exported files know of offers."""
    histories, console, now_s = flags.histories(), Console(), time.time()
    failed = False
    for name in flags.names:
        records = _records(name)
        if not records:
            console.print(f"{name}: no offer was tried there; nothing to learn")
            continue
        warnings = histories.write(records, now_s)
        _warn(console, warnings)
        failed |= bool(warnings)
        offers = len({record.offer for record in records})
        console.print(
            f"{name}: learned of {offers} offer{'s' if offers > 1 else ''}",
            highlight=False,
            soft_wrap=True,
        )
    return FAILED if failed else DONE


def _records(name: str) -> list[OfferSeen]:
    """Return the records of a run, or of an exported file. Raises BadInput."""
    if "://" not in name and Path(name).is_file():
        data = read_given(name, "a history as `harness market export FILE.jsonl` writes it")
        found = MarketHistory.read(data.decode("utf-8", "replace"))
        if not found.records:
            raise BadInput(
                f"{name}: wanted a history as `harness market export FILE.jsonl` writes it, found "
                f"{found.unread} lines that are no records"
            )
        return list(found.records.values())
    return RunMemory(normalize(name), existing_store(name)).records()


# ---- export --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportFlags(OffersFlags):
    file: str = positional("FILE.jsonl or FILE.csv; -: the terminal")


def export(flags: ExportFlags) -> int:
    """Write all that is known of offers to a file."""
    if not flags.file.endswith((".jsonl", ".csv", "-")):
        raise BadInput(f"wanted FILE.jsonl, FILE.csv, or -; found {flags.file!r}")
    name, (history, warnings) = flags.file, flags.read()
    text = _as_csv(history.summaries(time.time())) if name.endswith(".csv") else history.text()
    if name == "-":
        print(text, end="")
        return DONE
    _warn(Console(), warnings)
    _write(name, text)
    return DONE


@dataclass(frozen=True)
class DrawFlags(OffersFlags):
    file: str = positional("FILE.csv")
    hours: float = flag(720.0, "how long the market is", above=0, at_most=20_000)
    nodes: int = flag(1, "so many nodes of each offer at most", at_least=1, at_most=1000)
    seed: int = flag(0, "another seed, another market")


def draw(flags: DrawFlags) -> int:
    """Make up a market that fits to what is known, for `harness market simulate --trace`."""

    if not flags.file.endswith(".csv"):
        raise BadInput(f"wanted FILE.csv, found {flags.file!r}")
    history, _ = flags.read()
    now_s, rng = time.time(), np.random.default_rng(flags.seed)
    known = [one for one in history.summaries(now_s) if one.seen_h > 0][:MOST_DRAWN]
    spot = [one for one in known if not one.offer.endswith("/on-demand")]
    if not spot:
        raise BadInput(
            "nothing is known of the capacity of any such offer; see `harness market show`"
        )
    prior, zones = history.prior(now_s), []
    for one in spot:
        zone = drawn(one.offer, prior[one.offer], rng, nodes=flags.nodes, now_s=now_s)
        usd = one.usd_per_h[2] or None
        zones.append(dataclasses.replace(zone, usd_per_h=usd, price_swing=0.05 if usd else 0.0))
    made = make_up(zones, flags.hours, rng, tick_s=DRAWN_TICK_S, weather=ROUGH)
    _write(flags.file, as_table(made))
    return DONE


def _write(name: str, text: str) -> None:
    """Write a file and print its name. Raises BadInput."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise BadInput(f"{name}: cannot be written: {e.strerror}") from e
    Console().print(f"written  {name}", highlight=False, soft_wrap=True)


def _as_csv(summaries: list[OfferSummary]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    prices = ("usd_per_h_low", "usd_per_h_high", "usd_per_h_last")
    names = [f.name for f in dataclasses.fields(OfferSummary) if f.name != "usd_per_h"]
    rows.writerow([*names, *prices])
    for one in summaries:
        said = (getattr(one, name) for name in names)
        shown = (cell(value) if isinstance(value, str) else value for value in said)
        rows.writerow([*shown, *one.usd_per_h])
    return out.getvalue()


# ---- prices --------------------------------------------------------------------------------------
def _sky(histories: Histories) -> Broker:
    return Broker(os.environ, histories.folder / "sky-logs" / "broker.log")


@dataclass(frozen=True)
class PricesFlags:
    task: str = positional("the SkyPilot task YAML")
    clouds: str = flag("", "only these clouds, such as aws,gcp, without asking for accounts")
    most: int = flag(200, "so many offers, the cheapest first", at_least=1)


def prices(flags: PricesFlags) -> int:
    """Print the prices of a task's offers in one line, for nodes of plain SkyPilot.

    These are nodes of `sky launch` and `sky jobs launch`; give them
    --env HARNESS_PRICES="$(harness market prices TASK)".
    """
    config = task_resources(flags.task)
    # an offer is for all nodes of a task, but a node looks up the price of one node
    config.pop("num_nodes", None)
    clouds = names_of(flags.clouds) or None
    sky = _sky(Histories())
    try:
        offers = sky("offers", OFFERS_TIMEOUT_S, config=config, clouds=clouds, on_demand=True)
    except (SkyError, CloudUnavailable) as e:
        raise BadInput(f"{flags.task}: SkyPilot has no offer: {e}") from e
    finally:
        sky.close()
    print(
        ";".join(
            f"{o['name']}={o['usd_per_h']:g}/{o['on_demand_usd_per_h']:g}"
            for o in offers[: flags.most]
        )
    )
    return DONE


# ---- live ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LiveFlags(OffersFlags):
    task: str = positional("the SkyPilot task YAML")
    clouds: str = flag("", "only these clouds, such as aws,gcp, instead of those enabled")
    json: bool = flag(False, "print JSON in place of the table")


def live(flags: LiveFlags) -> int:
    """Ask clouds for the prices of a task's offers now, and remember them."""
    task, histories = flags.task, flags.histories()
    config, clouds = task_resources(task), names_of(flags.clouds) or None
    sky = _sky(histories)
    now_s, console = time.time(), Console()
    try:
        answers = sky("offers", OFFERS_TIMEOUT_S, config=config, clouds=clouds)
        offers = [to_offer(a) for a in answers if flags.offer in a["name"] and has_spot_market(a)]
        nodes, advisor = int(config.get("num_nodes") or 1), os.environ.get(ADVISOR, "")
        urls = MarketUrls(advisor=advisor) if advisor else MarketUrls()
        found, notes = ask_clouds(sky, offers, nodes, now_s, urls)
    except (SkyError, CloudUnavailable) as e:
        raise BadInput(f"{task}: SkyPilot has no offer: {e}") from e
    finally:
        sky.close()
    notes += histories.write(_told(found, now_s), now_s)
    if flags.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
        return DONE
    _warn(console, notes)
    console.print(_live_table(found))
    return DONE


def _told(found: list[LiveOffer], now_s: float) -> list[OfferSeen]:
    """Return live offers as records of this day. They have prices, but no capacity: no run has
    tried it."""
    day = time.strftime("%Y-%m-%d", time.gmtime(now_s))
    return [
        OfferSeen(
            run=f"live-{day}",
            offer=one.offer.name,
            until_s=now_s,
            usd_per_h=one.changes,
            place=one.offer.place,
            accelerator=one.offer.accelerator,
            gpus=one.offer.gpus,
            on_demand_usd_per_h=one.offer.on_demand_usd_per_h,
        )
        for one in found
        if one.changes
    ]


def _live_table(found: list[LiveOffer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("offer", overflow="fold", min_width=16)
    for head in ("USD/h now", "in a week", "catalog", "on demand", "interrupted"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        week = [usd for _, usd in one.changes]
        table.add_row(
            one.offer.name,
            f"{one.offer.usd_per_h:.3f}" if week else "–",
            f"{min(week):.3f}–{max(week):.3f}" if week else "–",
            f"{one.catalog_usd_per_h:.3f}",
            f"{one.offer.on_demand_usd_per_h:.3f}",
            one.interrupted or "–",
        )
    return table


# ---- show ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HistoryShowFlags(OffersFlags):
    json: bool = flag(False, "print JSON in place of the table")


def show(flags: HistoryShowFlags) -> int:
    """Show what runs have learned about offers: capacity, losses, prices."""
    now_s, console = time.time(), Console()
    history, warnings = flags.read()
    summaries = history.summaries(now_s)
    if flags.json:
        print(json.dumps([dataclasses.asdict(one) for one in summaries], indent=2))
        return DONE
    _warn(console, warnings)
    if not summaries:
        console.print(
            "Nothing is known of any offer yet. Launches on clouds add what they see; of runs that "
            "were led elsewhere: harness market learn URL"
        )
        return DONE
    console.print(_table(summaries, now_s))
    console.print(EXPLAINED, highlight=False)
    if history.unread:
        console.print(f"{history.unread} lines could not be read, and are left out")
    return DONE


EXPLAINED = (
    "hours: of which it is known whether there was a machine; open: their share with one; lasts, "
    "away: hours with one, and with none, on average (>: no end was seen); lost: nodes taken in a "
    "day of one node; silent: of those, without notice; ago: when somebody looked last"
)


def _table(summaries: list[OfferSummary], now_s: float) -> Table:

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("offer", overflow="fold", min_width=16)
    for head in ("hours", "open", "lasts", "away", "lost", "silent", "USD/h", "ago"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in summaries:
        low, high, _ = one.usd_per_h
        table.add_row(
            one.offer,
            f"{one.seen_h:,.0f}" if one.seen_h >= 10 else f"{one.seen_h:.1f}",
            percent(one.open_h / one.seen_h) if one.seen_h else "–",
            _mean_h(one.open_h, one.closings),
            _mean_h(one.seen_h - one.open_h, one.openings),
            f"{one.losses / one.node_h * 24:.1f}" if one.node_h else "–",
            percent(one.unnoticed / one.losses) if one.losses else "–",
            "–" if not high else f"{low:.2f}" if low == high else f"{low:.2f}–{high:.2f}",
            _ago(now_s - one.until_s),
        )
    return table


def _ago(seconds: float) -> str:
    minutes = max(0.0, seconds) / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 72 * 60 else f"{minutes / 1440:.0f} d"


def _mean_h(hours: float, ends: int) -> str:
    """Return the mean length of periods of `hours` in all, of which `ends` were seen to end."""
    if not hours:
        return "–"
    return f"{hours / ends:.1f}" if ends else f">{hours:.1f}"
