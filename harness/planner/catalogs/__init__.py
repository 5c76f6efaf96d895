"""Catalogs of clouds' offers, for plans without network or account: the one that SkyPilot keeps on
this computer, a folder, or the small one that ships.

SkyPilot reads them, as it does for a launch: a catalog is laid out in a home folder of its own,
where SkyPilot takes it for a hand-written one and never downloads anything.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from harness.clouds.sky_broker import OFFERS_TIMEOUT_S, Sky, SkyError
from harness.clouds.skypilot import has_spot_market, to_offer
from harness.core.world import BadInput, CloudUnavailable, Offer

SHIPPED = "catalog_"  # prefix of the files that ship
SHIPPED_OF = "2026-11"  # when their rows were copied
LISTS = "vms.csv"  # name of each cloud's file in a catalog


@dataclass(frozen=True)
class PriceCatalog:
    """A catalog of prices. `files`: the list of machines of each cloud; `common`: the list of
    accelerators; `of_s`: when the oldest file was written, seconds since 1970, or infinity for the
    catalog that ships."""

    what: str
    files: Mapping[str, Path]
    common: Path | None
    of_s: float = math.inf

    @property
    def ships(self) -> bool:
        return math.isinf(self.of_s)

    def only(self, clouds: Collection[str]) -> PriceCatalog:
        """Return the catalog of these clouds only. Raises BadInput for a cloud that it lacks."""
        if missing := sorted({c.lower() for c in clouds} - self.files.keys()):
            raise BadInput(
                f"--clouds: {self.what} has nothing of {', '.join(missing)}; it has "
                f"{', '.join(sorted(self.files))}. `sky gpus list` on a computer with a network "
                "has SkyPilot fetch the others"
            )
        return PriceCatalog(
            self.what, {c.lower(): self.files[c.lower()] for c in clouds}, self.common, self.of_s
        )

    def lay_out(self, home: Path, version: str) -> None:
        """Copy the files to where a SkyPilot with this home and catalog version reads them."""
        folder = home / ".sky" / "catalogs" / version
        common = self.common or _shipped().common
        assert common is not None
        for name, path in {**self.files, "common": common}.items():
            there = folder / name / ("accelerators.csv" if name == "common" else LISTS)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, there)


def catalog(asked: str, home: Path) -> PriceCatalog:
    """Return a catalog. `asked`: "" means SkyPilot's own below `home` if there is one, else the one
    that ships; "shipped" means the latter; or a folder with CLOUD/vms.csv. Raises BadInput."""
    if asked == "shipped":
        return _shipped()
    if asked:
        if found := _of_folder(Path(asked), f"the catalog in {asked}"):
            return found
        raise BadInput(
            f"--catalog {asked}: wanted a folder that holds CLOUD/{LISTS}, such as "
            f"~/.sky/catalogs/v8, or the word shipped; found none of it"
        )
    folders = sorted((home / ".sky/catalogs").glob("v[0-9]*"), key=_version, reverse=True)
    of_folders = (_of_folder(f, f"SkyPilot's catalog on this computer ({f})") for f in folders)
    return next(filter(None, of_folders), None) or _shipped()


def offers_of(
    sky: Sky, path: Path, config: Mapping[str, Any], found: PriceCatalog
) -> tuple[Offer, ...]:
    """Return a task's offers in this catalog, spot and on demand, cheapest first. `sky` calls a
    SkyPilot in whose home the catalog is laid out. Raises BadInput, CloudUnavailable."""
    try:
        answers = _answers(sky, config, sorted(found.files))
    except SkyError as e:
        raise BadInput(_none_in(path, found, e.message)) from e
    except CloudUnavailable as e:
        raise CloudUnavailable(
            f"{path}: {e}. {found.what} was to be enough; --catalog shipped is read without any "
            "network"
        ) from e
    offers = sorted(to_offer(a) for a in answers if not a["spot"] or has_spot_market(a))
    if not offers:
        raise BadInput(_none_in(path, found, "it lists no such machine"))
    return tuple(offers)


def _answers(sky: Sky, config: Mapping[str, Any], clouds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the offers of all clouds in one call. If one of them fails here (its own package is
    missing), call each cloud alone and skip those that fail. Raises SkyError if all do."""

    def ask(some: Sequence[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = sky(
            "offers", OFFERS_TIMEOUT_S, config=config, clouds=list(some), on_demand=True
        )
        return found

    try:
        return ask(clouds)
    except SkyError:
        answers = list[dict[str, Any]]()
        for cloud in clouds if len(clouds) > 1 else ():
            with contextlib.suppress(SkyError):
                answers += ask([cloud])
        if not answers:
            raise
        return answers


def _none_in(path: Path, found: PriceCatalog, why: str) -> str:
    return (
        f"{path}: {found.what} ({', '.join(sorted(found.files))}) has no machine for its "
        f"resources: {why}. Loosen `resources`, name another --catalog, or have SkyPilot fetch its "
        "own where there is a network: sky gpus list"
    )


def _of_folder(folder: Path, what: str) -> PriceCatalog | None:
    files = {p.parent.name.lower(): p for p in sorted(folder.glob(f"*/{LISTS}"))}
    if not files:
        return None
    common = folder / "common" / "accelerators.csv"
    oldest = min(p.stat().st_mtime for p in files.values())
    return PriceCatalog(what, files, common if common.exists() else None, oldest)


def _shipped() -> PriceCatalog:
    folder = Path(str(resources.files("harness.planner.catalogs")))
    files = {p.stem.removeprefix(SHIPPED): p for p in sorted(folder.glob(f"{SHIPPED}*.csv"))}
    common = files.pop("common")
    return PriceCatalog(f"the small catalog that ships (of {SHIPPED_OF})", files, common)


def _version(folder: Path) -> int:
    digits = folder.name.removeprefix("v")
    return int(digits) if digits.isdecimal() else 0
