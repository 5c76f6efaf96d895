"""Any configuration as plain, bounded JSON: `attach(config=...)`.

Pure. Takes mappings (OmegaConf's too), dataclasses, argparse's namespaces, pydantic's and attrs'
models, and whatever has `to_dict()`. What has no plain value, and what a bound leaves out, is
named instead.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from harness.core.masking import MASK, is_secret, masked_value
from harness.core.world import BadInput
from storage.json_text import MOST_INT

MOST_VALUES = 2000
MOST_LETTERS = 2000  # of a text
MOST_NAME = 200  # letters of a key
MOST_TEXT = 200_000  # letters of all texts
MOST_DEEP = 16
MOST_NAMED = 50  # of what was left out

NOTHING = object()  # there is no plain value


@dataclass
class _Plain:
    """One configuration while it is walked through. `budget`, `letters`: how many values and
    letters of text may still be kept."""

    budget: int = MOST_VALUES
    letters: int = MOST_TEXT
    left_out: list[str] = field(default_factory=list)

    def omit(self, name: str, why: str) -> Any:
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append(f"{name} ({why})")
        return NOTHING

    def of(self, value: Any, name: str, deep: int) -> Any:
        if self.budget <= 0 or self.letters <= 0:
            return self.omit(name, f"more than {MOST_VALUES} values, or {MOST_TEXT} letters")
        self.budget -= 1
        if deep > MOST_DEEP:
            return self.omit(name, f"nested deeper than {MOST_DEEP}")
        # a user's object may raise anything (OmegaConf: for a value that is missing), and a run
        # does not end for that
        try:
            if (fields := _fields(value)) is not None:
                return self._mapping(fields, name, deep)
            if isinstance(value, (list, tuple, set, frozenset)):
                return self._row(value, name, deep)
            found = _scalar(value)
        except Exception as e:
            return self.omit(name, f"it cannot be read: {type(e).__name__}")
        if found is NOTHING:
            return self.omit(name, type(value).__name__)
        if isinstance(found, str):
            most = min(MOST_LETTERS, self.letters)
            self.letters -= min(most, len(found))
            if len(found) > most:
                self.omit(name, f"cut off after {most} letters")
            return found[:most]
        return found

    def _mapping(self, fields: Mapping[str, Callable[[], Any]], name: str, deep: int) -> Any:
        found: dict[str, Any] = {}
        for key, read in fields.items():
            place = f"{name}.{key}" if name else key
            if is_secret(key):
                self.omit(place, "it is called like a secret")
                found[key] = MASK
                continue
            try:
                value = read()
            except Exception as e:  # as in `of`
                self.omit(place, f"it cannot be read: {type(e).__name__}")
                continue
            if (plain := self.of(value, place, deep + 1)) is not NOTHING:
                found[key] = plain
        return found

    def _row(self, values: Collection[Any], name: str, deep: int) -> Any:
        ordered = sorted(values, key=str) if isinstance(values, (set, frozenset)) else values
        found = []
        for i, value in enumerate(ordered):
            if self.budget <= 0:
                self.omit(f"{name}[{i}:]", f"more than {MOST_VALUES} values")
                break
            plain = self.of(value, f"{name}[{i}]", deep + 1)
            found.append(None if plain is NOTHING else plain)
        return found


def plain_config(config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A configuration as JSON, and what could not be kept of it: "data.collate (function)". Raises
    BadInput for what is none."""
    if config is None:
        return {}, ()
    walk = _Plain()
    found = walk.of(config, "", 0)
    if not isinstance(found, dict):
        raise BadInput(
            f"attach(config=...): wanted a dict, a dataclass, an argparse.Namespace, a pydantic "
            f"model or a mapping such as OmegaConf's, found {type(config).__name__}; give "
            "{name: value} of what the result depends on"
        )
    return found, tuple(walk.left_out)


def _fields(value: Any) -> dict[str, Callable[[], Any]] | None:
    """Names and readers of what a configuration consists of; None: it is a single value."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return {_name(key): _item(value, key) for key in value}
    if dataclasses.is_dataclass(value):
        return {f.name: _attribute(value, f.name) for f in dataclasses.fields(value)}
    for declared in ("model_fields", "__fields__"):  # of pydantic 2, of pydantic 1
        if isinstance(names := getattr(type(value), declared, None), dict):
            return {name: _attribute(value, name) for name in names}
    if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
        return {a.name: _attribute(value, a.name) for a in attributes}
    if callable(to_dict := getattr(value, "to_dict", None)):
        found = to_dict()
        return _fields(found) if isinstance(found, Mapping) else None
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return {_name(name): _attribute(value, name) for name in vars(value)}
    return None


def _name(key: Any) -> str:
    return str(key.value if isinstance(key, enum.Enum) else key)[:MOST_NAME]


def _item(value: Mapping[Any, Any], key: Any) -> Callable[[], Any]:
    return lambda: value[key]


def _attribute(value: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(value, name)


def _scalar(value: Any) -> Any:
    """NOTHING: it has no plain value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return int(value) if -MOST_INT <= value <= MOST_INT else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return masked_value(str(value[: 2 * MOST_LETTERS]))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return str(value)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        named = f"{value.__module__}.{value.__qualname__}"
        return NOTHING if "<" in named else named
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        found = item()  # of numpy's and torch's scalars
        return _scalar(found) if isinstance(found, (bool, int, float, str)) else NOTHING
    return NOTHING
