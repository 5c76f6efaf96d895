"""The values of a script's own variables: read from its running functions for a snapshot, and
restored when a resumed script has reached the same place. Runs in the worker.

Only what the loop changes counts: numbers, strings, lists and dicts of them, small tensors, and
such attributes of objects whose classes are the script's own. Values that have not changed since
the loop began (a rank, a device, a path) are left alone. Tensors and objects with a state_dict that
have changed, and that nobody registered, are kept on rank 0 (`unsaved_state.py`). What else cannot
be written as plain data is reported by name.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from harness.adapters.unsaved_state import MACHINERY, UnsavedState

MOST_ITEMS = 100_000  # numbers and strings in one variable
MOST_ELEMENTS = 16  # elements of a tensor
NOTHING = object()
WrittenDown = dict[str, dict[str, Any]]  # function -> variable -> value as plain data


class Unwritable(Exception):
    """A value that cannot be written as plain data."""


class ScriptVariables:
    """The variables of each rank. `state_dict` returns their values at the last `look`. `keeps`:
    this is rank 0, whose averages and other objects hold for all; `objects`: their states in the
    loaded snapshot."""

    only_first_knows = True  # the script may have set some `if accelerator.is_main_process`

    def __init__(self, keeps: bool = True) -> None:
        self._keeps, self._unsaved = keeps, UnsavedState()
        self.objects: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []  # their states at the last `look`
        self._frames: list[FrameType] = []
        self._begun: WrittenDown = {}
        self._now: WrittenDown = {}
        self._loaded: WrittenDown = {}

    # ---- looking ---------------------------------------------------------------------------------
    def begin(self, frame: FrameType | None, known: Callable[[], Iterable[Any]] = tuple) -> None:
        """Record the variables when the training loop begins. `known`: see `UnsavedState`."""
        self._begun = written(frames := script_frames(frame))
        self._unsaved.begin(roots_of(frames), known)

    def look(self, frame: FrameType | None) -> None:
        """Note the frames between two steps. Their variables are read when a snapshot is taken."""
        self._frames = script_frames(frame)

    def leave(self) -> None:
        self._frames = []

    def state_alone(self) -> dict[str, Any]:
        """Return the values of this rank, for all ranks."""
        return self.state_dict()

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
            self._kept = self._unsaved.state(roots_of(self._frames)) if self._keeps else []
        return {"functions": self._now, "objects": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state["functions"])
        self._now = self._loaded
        self.objects = list(state.get("objects", ()))

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """Load the states of another world: all ranks use rank 0's."""
        self.load_state_dict(states[0])

    # ---- putting back ----------------------------------------------------------------------------
    def restore(self, frame: FrameType | None) -> list[str]:
        """Restore the variables: the script is where it was. Return the names of objects that have
        no place any more."""
        for name, one in zip(names_of(frames := script_frames(frame)), frames, strict=True):
            put(one, {**self._changed_since(name, one), **self._loaded.get(name, {})})
        missed = self._unsaved.restore(roots_of(frames), self.objects)
        for one in frames:
            _write_back(one)
        self.objects = []
        return missed

    def restored(self, frame: FrameType | None) -> list[Any]:
        """Return the libraries' objects to which `restore` will give their state as a whole."""
        found = self._unsaved.objects(roots_of(script_frames(frame)), self.objects)
        return [one for one in found if not _is_own(one)]

    def _changed_since(self, name: str, frame: FrameType) -> dict[str, Any]:
        """Return variables that the snapshot left out as unchanged, but that differ now."""
        now, begun = variables_of(frame), self._begun.get(name, {})
        return {key: value for key, value in begun.items() if now.get(key, NOTHING) != value}

    def missed(self, frame: FrameType | None) -> list[str]:
        """Return the names of objects of the script's own classes that cannot be kept whole."""
        return sorted(
            {
                f"{key} ({type(value).__name__})"
                for one in script_frames(frame)
                for key, value in dict(one.f_locals).items()
                if _is_own(value) and not _attributes(value, whole=_kept_elsewhere)[1]
            }
        )


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the script's running functions, outermost first."""
    found = []
    while frame is not None:
        if is_script(frame.f_code.co_filename, frame.f_globals):
            found.append(frame)
            if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return found[::-1]


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
# folders of other environments too, from which one with --system-site-packages takes libraries
_INSTALLED = ("/site-packages/", "/dist-packages/")
# libraries even where they are installed from a folder of sources, as diffusers' examples ask for
_NEVER_SCRIPT = MACHINERY | {"torch", "transformers", "diffusers", "peft", "torchvision"}
_HARNESS = __file__.rpartition("/harness/")[0] + "/harness/"


def is_script(filename: str, names: Mapping[str, Any]) -> bool:
    """Return whether code belongs to the script, not to a library. `names`: its globals."""
    name = str(names.get("__name__", ""))
    if name == "__main__":
        return not filename.startswith("<")
    if name.partition(".")[0] in _NEVER_SCRIPT or any(part in filename for part in _INSTALLED):
        return False
    return not filename.startswith((*_LIBRARIES, _HARNESS, "<"))


def roots_of(frames: list[FrameType]) -> dict[str, Any]:
    """Return the variables of each frame, by its name. Before Python 3.13, `_write_back` is needed
    after a change."""
    return {name: one.f_locals for name, one in zip(names_of(frames), frames, strict=True)}


def names_of(frames: list[FrameType]) -> list[str]:
    return [f"{depth} {one.f_code.co_name}" for depth, one in enumerate(frames)]


def variables_of(frame: FrameType, most: int = MOST_ITEMS) -> dict[str, Any]:
    """Return a running function's variables that can be written as plain data. `most`: numbers and
    strings in one of them."""
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
    """Return `variables_of` for each frame, by name."""
    values = (variables_of(one, most) for one in frames)
    return dict(zip(names_of(frames), values, strict=True))


def put(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Assign a function's variables. `values` has the form that `written` returns."""
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
    """Return whether the value is an object of one of the script's own classes."""
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    names = {"__name__": kind.__module__}
    if kind.__module__ != "__main__" and (filename is None or not is_script(filename, names)):
        return False
    from torch import nn
    from torch.utils.data import Dataset

    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Dataset, type))


def _attributes(
    value: Any, most: int = MOST_ITEMS, whole: Callable[[Any], bool] = lambda inner: False
) -> tuple[dict[str, Any], bool]:
    """Return the attributes that can be written, and whether these are all. `whole`: returns
    whether one that cannot be written is kept elsewhere."""
    found, every = {}, True
    for key, inner in vars(value).items():
        try:
            found[key] = _write(inner, most)
        except Unwritable:
            every = every and whole(inner)
    return found, every


def _kept_elsewhere(value: Any) -> bool:
    """Return whether the value is of those that `UnsavedState` keeps."""
    if isinstance(value, dict):
        return all(map(_kept_elsewhere, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_kept_elsewhere, value))
    return isinstance(value, (torch.Tensor, torch.nn.Module)) or hasattr(type(value), "state_dict")


def _write(value: Any, most: int) -> Any:
    """Convert a value to plain data. Raises Unwritable."""
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
    """Convert plain data back. `before`: the current value, for a tensor's device."""
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
    """Write changes in `f_locals` back to a function's variables, in Python before 3.13."""
    if sys.version_info < (3, 13) and frame.f_code.co_name != "<module>":
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


# A record of a script's variables, line by line, while it decides something after an evaluation
# or an epoch. A resumed script that runs the same lines decides the same.

MOST_LINES = 5_000  # traced lines per stretch; later ones are ignored
MOST_CALLS = 200_000  # calls of library functions per stretch: tracing them takes time
MOST_KEPT = 50_000  # lines with changes, over all stretches; the oldest are dropped
MOST_VALUES = 64  # numbers and strings in one variable
MOST_NBYTES = 256 << 20  # of everything as JSON: the size that a snapshot states is not trusted

Changes = dict[str, Any]  # variable -> value as plain data
# Changes before a line runs, by "function line number-of-times". Ranks may run different lines (`if
# accelerator.is_main_process:`).
Kept = dict[str, Changes]


class Decisions:
    """The recorded stretches. A stretch lasts from `open` to `close`, and is kept for the whole
    run, since a resumed script begins at its first line. All ranks use what rank 0 kept. `first`
    returns rank 0's value on all ranks; `keeps`: this is rank 0."""

    def __init__(self, first: Callable[[Any], Any], keeps: bool) -> None:
        self._first, self._keeps = first, keeps
        self._kept: dict[str, Kept] = {}  # by "step number"
        self._new: dict[str, Kept] = {}  # recorded since `settle`
        self._at = (-1, 0)  # the step of the stretch, and the stretch's number in it
        self._opened = False  # a stretch was opened since `settle`
        self._stretch: Kept | None = None
        self._following: Kept = {}
        self._lines: Counter[str] = Counter()
        self._looked = 0  # lines traced, all of `_lines`
        self._calls = 0
        self._last: dict[FrameType, Changes] = {}  # each function's variables
        self._script: dict[CodeType, bool] = {}
        self._begun: dict[str, Changes] = {}

    def begin(self, frame: FrameType | None) -> None:
        """Record the variables when the training loop begins; unchanged ones are left alone."""
        self._begun = written(script_frames(frame), MOST_VALUES)

    def state_dict(self) -> dict[str, Any]:
        packed = zlib.compress(json.dumps(self._kept).encode())
        return {"steps": base64.b85encode(packed).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        packed = base64.b85decode(state["steps"])
        self._kept = json.loads(zlib.decompressobj().decompress(packed, MOST_NBYTES))

    def settle(self) -> None:
        """Share what rank 0 kept when the script trains again. Collective."""
        self.close()
        if not self._opened:
            return
        self._opened, mine, self._new = False, self._new, {}
        self._kept |= self._first(mine)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    # ---- a stretch -------------------------------------------------------------------------------
    def open(self, step: int, frame: FrameType | None, follow: bool) -> None:
        """Open a stretch, in which the script decides. `step`: finished steps; `frame`: the
        script's; `follow`: restore the earlier decisions instead of recording new ones."""
        self.close()
        self._at = (step, self._at[1] + 1 if step == self._at[0] else 0)
        self._opened |= not follow
        frames = script_frames(frame)
        if sys.gettrace() is not None or not (frames and (follow or self._keeps)):
            return
        self._stretch = None if follow else {}
        if follow:
            self._following = self._kept.get("{} {}".format(*self._at), {})
        for name, one in zip(names_of(frames), frames, strict=True):
            self._look(one, self._begun.get(name, {}))
            one.f_trace = self._on_line
        sys.settrace(self._on_call)

    def close(self) -> None:
        """Close the stretch. Harmless if none is open."""
        if sys.gettrace() == self._on_call:
            sys.settrace(None)
            for one in self._last:
                if one.f_trace == self._on_line:
                    del one.f_trace
        self._last, self._following, self._lines = {}, {}, Counter()
        self._looked = self._calls = 0
        if self._stretch is not None:
            self._new["{} {}".format(*self._at)] = self._stretch
            self._stretch = None

    # ---- lines -----------------------------------------------------------------------------------
    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._script:
            inside = code.co_name.startswith("<")  # a one-line scope, like a list comprehension
            self._script[code] = not inside and is_script(code.co_filename, frame.f_globals)
        if self._script[code]:
            return self._on_line
        self._calls += 1
        if self._calls >= MOST_CALLS:
            self.close()
        return None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "return":
            self._last.pop(frame, None)
        if event != "line":
            return self._on_line
        if self._looked >= MOST_LINES:
            self.close()
            return None
        self._look(frame, self._last.get(frame, {}))
        return self._on_line

    def _look(self, frame: FrameType, before: Changes) -> None:
        """Record what has changed since `before`, or restore what had changed at this line."""
        now = variables_of(frame, MOST_VALUES)
        line = f"{frame.f_code.co_name} {frame.f_lineno}"
        self._lines[line] += 1
        self._looked += 1
        key = f"{line} {self._lines[line]}"
        if self._stretch is not None:
            if changes := {k: v for k, v in now.items() if before.get(k, NOTHING) != v}:
                self._stretch[key] = changes
        elif known := self._following.get(key):
            put(frame, {k: v for k, v in known.items() if now.get(k, NOTHING) != v})
            now |= known
        self._last[frame] = now
