"""What a script keeps in its own variables: read from its running functions when a snapshot is
taken, and put back when a resumed script has come to the same place. Runs in the worker.

Only what the loop changes counts: numbers, words, lists and dicts of them, small tensors, and such
attributes of objects whose classes are the script's own. What was the same when the loop began (a
rank, a device, a path) is left alone, and so is what cannot be written down, which is named.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import sysconfig
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

MOST_ITEMS = 100_000  # numbers and words in one variable
MOST_ELEMENTS = 16  # of a tensor
NOTHING = object()
WrittenDown = dict[str, dict[str, Any]]  # function -> variable -> written down


class Unwritable(Exception):
    """It cannot be written down."""


class ScriptVariables:
    """Each rank's own. `state_dict` speaks of the moment of the last `look`."""

    def __init__(self) -> None:
        self._frames: list[FrameType] = []
        self._begun: WrittenDown = {}
        self._now: WrittenDown = {}
        self._loaded: WrittenDown = {}

    # ---- looking ---------------------------------------------------------------------------------
    def begin(self, frame: FrameType | None) -> None:
        """The training loop begins."""
        self._begun = written(script_frames(frame))

    def look(self, frame: FrameType | None) -> None:
        """Between two steps. What is found is read when a snapshot asks for it."""
        self._frames = script_frames(frame)

    def leave(self) -> None:
        self._frames = []

    def state_dict(self) -> dict[str, Any]:
        if self._frames:
            self._now = {
                name: {
                    key: value
                    for key, value in found.items()
                    if self._begun.get(name, {}).get(key, NOTHING) != value
                }
                for name, found in written(self._frames).items()
            }
        return {"functions": self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state["functions"])
        self._now = self._loaded

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """Of another world: all ranks go on with what rank 0 had."""
        self.load_state_dict(states[0])

    # ---- putting back ----------------------------------------------------------------------------
    def restore(self, frame: FrameType | None) -> None:
        """The script is where it was."""
        for name, one in zip(names_of(frames := script_frames(frame)), frames, strict=True):
            put(one, {**self._changed_since(name, one), **self._loaded.get(name, {})})

    def _changed_since(self, name: str, frame: FrameType) -> dict[str, Any]:
        """What was the same when the loop began as when the snapshot was taken, and is not now."""
        now, begun = variables_of(frame), self._begun.get(name, {})
        return {key: value for key, value in begun.items() if now.get(key, NOTHING) != value}

    def missed(self, frame: FrameType | None) -> list[str]:
        """Names of objects whose classes are the script's own, parts of which cannot be kept."""
        return sorted(
            {
                f"{key} ({type(value).__name__})"
                for one in script_frames(frame)
                for key, value in dict(one.f_locals).items()
                if _is_own(value) and not _attributes(value)[1]
            }
        )


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """The script's functions that are running, outermost first."""
    found = []
    while frame is not None:
        if is_script(frame.f_code.co_filename, frame.f_globals):
            found.append(frame)
            if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return found[::-1]


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_HARNESS = __file__.rpartition("/harness/")[0] + "/harness/"


def is_script(filename: str, names: Mapping[str, Any]) -> bool:
    """Is it code of the script, not of a library? `names`: its globals."""
    if names.get("__name__") == "__main__":
        return not filename.startswith("<")
    return not filename.startswith((*_LIBRARIES, _HARNESS, "<"))


def names_of(frames: list[FrameType]) -> list[str]:
    return [f"{depth} {one.f_code.co_name}" for depth, one in enumerate(frames)]


def variables_of(frame: FrameType, most: int = MOST_ITEMS) -> dict[str, Any]:
    """What can be written down of a running function's variables. `most`: numbers and words in one
    of them."""
    values: dict[str, Any] = {}
    for key, value in dict(frame.f_locals).items():
        if key.startswith("__"):
            continue
        if _is_own(value):
            for attribute, inner in _attributes(value, most)[0].items():
                values[f"{key}.{attribute}"] = inner
            continue
        with contextlib.suppress(Unwritable):
            values[key] = _write(value, most)
    return values


def written(frames: list[FrameType], most: int = MOST_ITEMS) -> WrittenDown:
    """`variables_of` each of them."""
    values = (variables_of(one, most) for one in frames)
    return dict(zip(names_of(frames), values, strict=True))


def put(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Give a function's variables these values. `values`: as `written` has them."""
    variables = frame.f_locals
    for key, value in values.items():
        inner, _, attribute = key.partition(".")
        if attribute:
            if inner in variables and hasattr(variables[inner], attribute):
                before = getattr(variables[inner], attribute)
                setattr(variables[inner], attribute, _read(value, before))
        else:
            variables[key] = _read(value, variables.get(key))
    _write_back(frame)


def _is_own(value: Any) -> bool:
    """An object of a class that the script has written for itself."""
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if kind.__module__ != "__main__" and (filename is None or not is_script(filename, {})):
        return False
    from torch import nn
    from torch.utils.data import Dataset

    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Dataset, type))


def _attributes(value: Any, most: int = MOST_ITEMS) -> tuple[dict[str, Any], bool]:
    """Those that can be written down; and: these are all."""
    found, whole = {}, True
    for key, inner in vars(value).items():
        try:
            found[key] = _write(inner, most)
        except Unwritable:
            whole = False
    return found, whole


def _write(value: Any, most: int) -> Any:
    """As plain data. Raises Unwritable."""
    return _spell(value, [most])


def _spell(value: Any, room: list[int]) -> Any:
    room[0] -= 1
    if room[0] < 0:
        raise Unwritable
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (list, tuple, set, dict) and len(value) > room[0]:
        raise Unwritable
    if type(value) in (list, tuple, set):
        inner = sorted(value, key=repr) if type(value) is set else value
        return {type(value).__name__: [_spell(one, room) for one in inner]}
    if type(value) is dict:
        return {"dict": [[_spell(k, room), _spell(v, room)] for k, v in value.items()]}
    if type(value) is torch.Tensor and value.numel() <= MOST_ELEMENTS and not value.is_complex():
        plain = value.detach().cpu()
        return {"tensor": [str(plain.dtype), _spell(plain.tolist(), room)]}
    raise Unwritable


def _read(written: Any, before: Any) -> Any:
    """`before`: what is there now, for a tensor's device."""
    if not isinstance(written, dict):
        return written
    (kind, inner), *_ = written.items()
    if kind == "float":
        return float.fromhex(inner)
    if kind == "dict":
        return {_read(k, None): _read(v, None) for k, v in inner}
    if kind == "tensor":
        dtype = getattr(torch, inner[0].removeprefix("torch."))
        device = before.device if isinstance(before, torch.Tensor) else None
        return torch.tensor(_read(inner[1], None), dtype=dtype, device=device)
    return {"list": list, "tuple": tuple, "set": set}[kind](_read(one, None) for one in inner)


def _write_back(frame: FrameType) -> None:
    """A function's variables, as changed in `f_locals`, in Pythons before 3.13."""
    if sys.version_info < (3, 13) and frame.f_code.co_name != "<module>":
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
