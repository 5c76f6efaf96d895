"""`harness market`: what runs have seen of offers, kept here and in a bucket that a team shares."""

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

from harness.cli.common import DONE, FAILED, cache_dir, existing_store, names_of, task_resources
from harness.core.config import flag, positional
from harness.core.given_files import read_given
from harness.core.world import BadInput
from storage.errors import StoreError, StoreUnavailable, WrongInput
from storage.json_text import digest
from storage.objects import ObjectStore
from storage.opening import normalize, open_store
from storage.text import Console, cell

if TYPE_CHECKING:
    from rich.table import Table

    from harness.clouds.live_market import LiveOffer
    from harness.core.known import CapacitySeen
    from harness.market.history import MarketHistory, OfferSeen, OfferSummary
    from harness.market.history_shelf import HistoryShelf
    from harness.market.wandering import PricePath

SHARED = "HARNESS_MARKET"  # URL of the history that a team shares
ADVISOR = "HARNESS_SPOT_ADVISOR"  # URL of a copy of AWS's Spot Instance Advisor
SHARED_WITHIN_S = 5.0  # no launch waits longer for it
REMEMBER_EVERY_S = 600.0
MOST_DRAWN, DRAWN_TICK_S = 50, 600.0  # offers of a market that is made up, and its tick
END_WITHIN_S = 20.0  # for the last writing, when a launch ends


@dataclass(frozen=True)
class MarketFlags:
    what: str = positional(
        "show: what is known of offers; learn: add runs, by URL, or exported files; export: write "
        "all of it to a file; draw: make up a market that fits to it, for `harness simulate "
        "--trace`; live: what clouds say of a task's offers now",
        choices=["show", "learn", "export", "draw", "live"],
    )
    names: tuple[str, ...] = positional(
        "learn: URLs of runs, or files; export: the file, .jsonl or .csv (-: the terminal); draw: "
        "the file, .csv; live: the SkyPilot task YAML",
        nargs="*",
    )
    shared: str = flag("", f"URL of a history that a team shares; default: {SHARED}")
    offer: str = flag("", "show, export and draw only offers whose names contain this")
    hours: float = flag(720.0, "draw: how long the market is", above=0, at_most=20_000)
    nodes: int = flag(1, "draw: so many nodes of each offer at most", at_least=1, at_most=1000)
    seed: int = flag(0, "draw: another seed, another market")
    clouds: str = flag("", "live: only these clouds, such as aws,gcp, instead of those enabled")
    json: bool = flag(False, "show and live: print JSON in place of the table")


def market(flags: MarketFlags) -> int:
    """What runs have learned about offers: capacity, losses, prices. Kept across runs."""
    histories = Histories(flags.shared or os.environ.get(SHARED, ""))
    if flags.what == "show" and flags.names:
        raise BadInput(f"show takes no names, found {' '.join(flags.names)}; use --offer")
    if flags.what == "learn":
        return _learn(flags, histories)
    if flags.what == "live":
        return _live(flags, histories)
    history, warnings = histories.read(time.time())
    if flags.offer:
        history = history.only(flags.offer)
    if flags.what == "export":
        return _export(flags, history, warnings)
    if flags.what == "draw":
        return _draw(flags, history)
    return _show(flags, history, warnings)


class Histories:
    """That of this computer, and the shared one if there is any.

    The shared one is asked for a few seconds only; when it does not answer, what it said the last
    time is taken. `folder`: of this computer's own; by default below ~/.cache/spotharness.
    """

    def __init__(self, shared: str = "", folder: Path | None = None):
        self.folder = folder or cache_dir("", "market").parent
        self.shared = normalize(shared) if shared else ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Histories:
        return cls(environ.get(SHARED, ""))

    def own(self) -> HistoryShelf:
        from harness.market.history_shelf import HistoryShelf

        return HistoryShelf(open_store(normalize(str(self.folder / "own")), retry_within_s=1.0))

    def team(self) -> HistoryShelf:
        from harness.market.history_shelf import HistoryShelf

        return HistoryShelf(open_store(self.shared, retry_within_s=SHARED_WITHIN_S))

    def read(self, now_s: float) -> tuple[MarketHistory, list[str]]:
        """All that is known, and what could not be read. Raises WrongInput alone, for a URL that no
        store can have."""
        from harness.market.history import MarketHistory

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
        """Of what the team's store said the last time."""
        return self.folder / "shared" / f"{digest(self.shared.encode())}.jsonl"

    def _ask_team(self, now_s: float) -> MarketHistory:
        """Raises StoreError."""
        team, copy = self.team().read(now_s), self._copy()
        with contextlib.suppress(OSError):  # a full disk is no reason to know nothing
            copy.parent.mkdir(parents=True, exist_ok=True)
            temporary = copy.with_suffix(f".{os.getpid()}")
            temporary.write_text(team.text(), encoding="utf-8")
            temporary.replace(copy)
        return team

    def write(self, records: list[OfferSeen], now_s: float) -> list[str]:
        """Here and at the team's; what could not be written. Never fails."""
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
    """An answer that comes later is still kept as a copy, for the next time. Raises StoreError."""
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
    """While a run is led, and once more in the end, keep what it has seen. Whatever fails of that
    is no reason for a launch to fail."""
    from harness.controller.remembered import RunMemory

    over, memory = threading.Event(), RunMemory(url, store)

    def keep() -> None:
        with contextlib.suppress(StoreError):
            histories.write(memory.records(), time.time())

    def from_time_to_time() -> None:
        while not over.wait(REMEMBER_EVERY_S):
            keep()
        keep()

    thread = threading.Thread(target=from_time_to_time, name="remembering", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_WITHIN_S)


def known_before(
    url: str, histories: Histories, now_s: float, console: Console
) -> tuple[dict[str, CapacitySeen], dict[str, PricePath]]:
    """What other runs have seen of the capacity of offers, and of their prices, for the forecasts
    of this one. `url`: normalised. What could not be read is said."""
    from harness.controller.remembered import run_name

    history, warnings = histories.read(now_s)
    _warn(console, warnings)
    others = history.without(run_name(url))
    return others.prior(now_s), others.prices()


# ---- learn ---------------------------------------------------------------------------------------
def _learn(flags: MarketFlags, histories: Histories) -> int:
    if not flags.names:
        raise BadInput("learn: wanted URLs of runs or exported files, found none")
    console, now_s = Console(), time.time()
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
    """Of a run, or of a file that was exported. Raises BadInput."""
    from harness.controller.remembered import RunMemory
    from harness.market.history import MarketHistory

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
def _export(flags: MarketFlags, history: MarketHistory, warnings: list[str]) -> int:
    if len(flags.names) != 1 or not flags.names[0].endswith((".jsonl", ".csv", "-")):
        raise BadInput("export: wanted one file, FILE.jsonl or FILE.csv, or -")
    (name,) = flags.names
    text = _as_csv(history.summaries(time.time())) if name.endswith(".csv") else history.text()
    if name == "-":
        print(text, end="")
        return DONE
    _warn(Console(), warnings)
    _write(name, text)
    return DONE


def _draw(flags: MarketFlags, history: MarketHistory) -> int:
    import numpy as np

    from harness.market.made_up import ROUGH, drawn, make_up
    from harness.market.trace_formats import as_table

    if len(flags.names) != 1 or not flags.names[0].endswith(".csv"):
        raise BadInput("draw: wanted one file, FILE.csv")
    now_s, rng = time.time(), np.random.default_rng(flags.seed)
    known = [one for one in history.summaries(now_s) if one.seen_h > 0][:MOST_DRAWN]
    spot = [one for one in known if not one.offer.endswith("/on-demand")]
    if not spot:
        raise BadInput(
            "draw: nothing is known of the capacity of any such offer; see `harness market show`"
        )
    prior, zones = history.prior(now_s), []
    for one in spot:
        zone = drawn(one.offer, prior[one.offer], rng, nodes=flags.nodes, now_s=now_s)
        usd = one.usd_per_h[2] or None
        zones.append(dataclasses.replace(zone, usd_per_h=usd, price_swing=0.05 if usd else 0.0))
    made = make_up(zones, flags.hours, rng, tick_s=DRAWN_TICK_S, weather=ROUGH)
    _write(flags.names[0], as_table(made))
    return DONE


def _write(name: str, text: str) -> None:
    """Raises BadInput."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise BadInput(f"{name}: cannot be written: {e.strerror}") from e
    Console().print(f"written  {name}", highlight=False, soft_wrap=True)


def _as_csv(summaries: list[OfferSummary]) -> str:
    from harness.market.history import OfferSummary

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


# ---- live ----------------------------------------------------------------------------------------
def _live(flags: MarketFlags, histories: Histories) -> int:
    from harness.clouds.live_market import MarketUrls, ask_clouds
    from harness.clouds.sky_client import OFFERS_TIMEOUT_S, Broker, SkyError
    from harness.clouds.sky_offers import has_spot_market, to_offer
    from harness.core.world import CloudUnavailable

    if len(flags.names) != 1:
        raise BadInput("live: wanted one SkyPilot task YAML")
    (task,) = flags.names
    config, clouds = task_resources(task), names_of(flags.clouds) or None
    sky = Broker(os.environ, histories.folder / "sky-logs" / "broker.log")
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
    """As records of the day: prices, and nothing of capacity, which nobody has tried."""
    from harness.market.history import OfferSeen

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
    from rich import box
    from rich.table import Table

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
def _show(flags: MarketFlags, history: MarketHistory, warnings: list[str]) -> int:
    now_s, console = time.time(), Console()
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
    from rich import box
    from rich.table import Table

    from harness.views.words import percent

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
    """Of spells of which so many were seen to end."""
    if not hours:
        return "–"
    return f"{hours / ends:.1f}" if ends else f">{hours:.1f}"
