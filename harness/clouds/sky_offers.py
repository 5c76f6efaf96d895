"""What SkyPilot offers for a task: places, shapes and prices, and which clouds do not let us in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.clouds.sky_client import OFFERS_TIMEOUT_S, Sky, SkyError
from harness.core.hardware import peak_flops
from harness.core.world import BadInput, Offer

# catalogs change a few times a day; which clouds are enabled, when somebody works on it
OFFERS_FRESH_S = 300.0
H100_FLOPS = 989e12  # `Offer.speed` is relative to it


def has_spot_market(answer: Mapping[str, Any]) -> bool:
    """Some catalogs list a spot price where there is no spot market: it equals the on-demand price.
    Such a node can be taken away and saves nothing."""
    return (
        not answer["on_demand_usd_per_h"]
        or answer["usd_per_h"] < 0.999 * answer["on_demand_usd_per_h"]
    )


def to_offer(answer: Mapping[str, Any]) -> Offer:
    return Offer(
        usd_per_h=answer["usd_per_h"],
        name=answer["name"],
        spot=answer["spot"],
        accelerator=answer["accelerator"],
        gpus=answer["gpus"],
        on_demand_usd_per_h=answer["on_demand_usd_per_h"],
        speed=(peak_flops(answer["accelerator"]) or H100_FLOPS) / H100_FLOPS
        if answer["gpus"]
        else 1.0,
        place=answer["place"],
    )


class SkyOffers:
    """The offers for one task, asked for again when they are old.

    `path`: the task file, for messages. `config`: what it says. `clouds`: only these, without
    asking which are enabled. `on_demand`: also nodes that are not spot.
    """

    def __init__(
        self,
        sky: Sky,
        path: Path,
        config: Mapping[str, Any],
        clouds: Sequence[str] | None,
        on_demand: bool,
        now: Callable[[], float],
    ):
        self._sky, self._path, self.config, self._now = sky, path, config, now
        self._clouds, self._on_demand = clouds, on_demand
        self._answers: dict[str, dict[str, Any]] = {}
        self.no_spot_market: tuple[str, ...] = ()  # see has_spot_market
        self._offers: tuple[Offer, ...] = ()
        self._offers_s = -math.inf
        self._shut: dict[str, str] = {}  # clouds that do not let us in: why

    def offers(self, at_work: bool) -> Sequence[Offer]:
        """Cheapest first. Raises BadInput when no cloud is left that could run this task, and
        nothing is at work (`at_work`)."""
        if self._now() - self._offers_s > OFFERS_FRESH_S:
            self._offers = self._ask()
            self._offers_s = self._now()
        left = [o for o in self._offers if o.name.split("/")[0] not in self._shut]
        if not left and not at_work:
            why = "; ".join(f"{cloud}: {reason}" for cloud, reason in self._shut.items())
            raise BadInput(
                f"no cloud is left that could run {self._path} ({why}); `sky check` tells more"
            )
        return left

    def has(self, name: str) -> bool:
        """Was this offer ever made?"""
        return name in self._answers

    def resources(self, name: str) -> dict[str, Any]:
        """What a task file says under `resources` to get this offer."""
        found: dict[str, Any] = self._answers[name]["resources"]
        return found

    def shut(self, cloud: str, why: str) -> None:
        """This cloud does not let us in: its offers are none any more."""
        self._shut[cloud] = why

    def _ask(self) -> tuple[Offer, ...]:
        config = {
            k: v
            for k, v in self.config.items()
            if k in ("name", "resources", "num_nodes", "config")
        }
        try:
            answers = self._sky(
                "offers",
                OFFERS_TIMEOUT_S,
                config=config,
                clouds=self._clouds,
                on_demand=self._on_demand,
            )
        except SkyError as e:
            if self._offers:
                return self._offers  # what was offered before is better than nothing
            raise BadInput(
                f"{self._path}: SkyPilot has no offer: {e.message}; `sky check` tells more"
            ) from e
        self._answers |= {a["name"]: a for a in answers}
        found = sorted(to_offer(a) for a in answers if not a["spot"] or has_spot_market(a))
        self.no_spot_market = tuple(
            a["name"] for a in answers if a["spot"] and not has_spot_market(a)
        )
        if not found:
            raise BadInput(
                f"{self._path}: SkyPilot finds no machine for its resources on the enabled clouds; "
                "loosen `resources` or enable more clouds (`sky check` tells which ones and how)"
            )
        return tuple(found)
