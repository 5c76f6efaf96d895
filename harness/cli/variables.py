"""Variables that `harness run` and its workers read, checked before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from harness.core.config import Bounds
from harness.core.steps_asked import StepsAsked
from harness.core.values import BadObject, parsed
from harness.core.world import BadInput

MOST_ATTEMPTS = 10**6
TRACKERS = ("wandb", "tensorboard", "mlflow", "jsonl")
CHOICES = {"HARNESS_ON_CHANGE": ("refuse", "warn", "accept"), "HARNESS_DIFF": ("keep", "hash")}


def number_in(
    env: Mapping[str, str], name: str, usual: int, at_least: int = 0, at_most: int = MOST_ATTEMPTS
) -> int:
    """A whole number; `usual` where the variable is not set. Raises BadInput."""
    if not (text := env.get(name, "")):
        return usual
    try:
        return int(Bounds(at_least=at_least, at_most=at_most).of(text, int))
    except ValueError as e:
        raise BadInput(f"{name}: {e}") from None


def cluster_info(env: Mapping[str, str]) -> dict[str, Any]:
    """What SkyPilot says of this node's cluster; {}: nothing. Raises BadInput."""
    text = env.get("SKYPILOT_CLUSTER_INFO") or "{}"
    try:
        found = parsed(text)
    except BadObject as e:
        raise BadInput(f"SKYPILOT_CLUSTER_INFO={text[:80]!r}: wanted a JSON object: {e}") from None
    if not isinstance(found, dict):
        raise BadInput(f"SKYPILOT_CLUSTER_INFO={text[:80]!r}: wanted a JSON object")
    return found


def check_address(text: str) -> None:
    """A name or an address of this node, or none. Raises ValueError that says what is wanted."""
    if text and not re.fullmatch(r"[A-Za-z0-9_.:%-]{1,253}", text, re.ASCII):
        raise ValueError(f"wanted a host name or an IP address; found {text[:80]!r}")


def check_modules(text: str) -> None:
    """Names of modules with commas between, auto or none. Raises ValueError."""
    for word in text.split(",") if text else ():
        if not all(part.isidentifier() for part in word.strip().split(".")):
            raise ValueError(f"wanted modules such as torch,transformers; found {word[:80]!r}")


def check_trackers(text: str) -> None:
    """Names and dotted paths with commas between, or nothing. Raises BadInput."""
    from harness.views.plugins import KNOWN

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if ":" not in name and name not in TRACKERS:
            raise BadInput(f"tracker {name[:80]!r} is not known; wanted {KNOWN}")


def check_for_workers(env: Mapping[str, str]) -> None:
    """What a worker would refuse, it would refuse again and again. Raises BadInput."""
    checks: dict[str, Callable[[str], object]] = {
        "HARNESS_PROFILE": StepsAsked.parse,
        "HARNESS_SCRIPT_WORLD": lambda text: Bounds(at_least=1).of(text, int),
        "HARNESS_ATTACH": _options,
        "HARNESS_LOOK_AGAIN_S": _pauses,
        "HARNESS_USD_PER_H": lambda text: Bounds().of(text, float),
        "HARNESS_ON_DEMAND_USD_PER_H": lambda text: Bounds().of(text, float),
        "HARNESS_PRELOAD": check_modules,
        "HARNESS_DATA_CACHE_GIB": _gib,
    }
    for name, check in checks.items():
        if text := env.get(name, ""):
            try:
                check(text)
            except (ValueError, BadObject) as e:
                raise BadInput(f"{name}={text[:80]!r}: {e}") from None
    for name, known in CHOICES.items():
        if (text := env.get(name, "")) and text not in known:
            raise BadInput(f"{name}={text[:80]!r}: wanted one of {', '.join(known)}")


def _options(text: str) -> None:
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError("wanted a JSON object of options of harness.attach()")


def _pauses(text: str) -> None:
    for word in text.split(","):
        found = float(word)
        if not (math.isfinite(found) and 0.0 <= found <= 600.0):
            raise ValueError("wanted seconds between 0 and 600, for example 1,3,8")


def _gib(text: str) -> object:
    from harness.data.node_cache import gib_nbytes

    return gib_nbytes(text)
