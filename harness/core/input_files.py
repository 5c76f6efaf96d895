"""Files named on a command line: read within bounds, and checked before any work is done.

A device, a pipe or a file of any size may be named by mistake; it is refused, with its name in the
message. `readable_file`, `output_file` and `output_folder` are checks of flags (`config.flag`).
"""

from __future__ import annotations

import itertools
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import yaml

from harness.core.world import BadInput

MOST_NBYTES = 256 << 20  # recorded markets are the largest files in use
MOST_YAML_NBYTES, MOST_YAML_VALUES, MOST_YAML_DEPTH = 1 << 20, 50_000, 50
MOST_BRACKETS = 300


def read_given(path: str | Path, what: str, most_nbytes: int = MOST_NBYTES) -> bytes:
    """Return the content of a regular file. `what`: a description for errors, such as "a task
    YAML". Raises BadInput."""
    try:
        # without O_NONBLOCK, opening a pipe without a writer would block forever
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
                raise BadInput(f"{path}: wanted {what}, found {kind}; name a file")
            data = file.read(most_nbytes + 1)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise BadInput(f"{path}: wanted {what}, found none: {why}") from e
    if len(data) > most_nbytes:
        raise BadInput(f"{path}: wanted {what} of at most {most_nbytes} bytes, found more")
    return data


def text_given(path: str | Path, what: str, most_nbytes: int = MOST_NBYTES) -> str:
    """Return the content of a regular file as text. Raises BadInput; see `read_given`."""
    try:
        return read_given(path, what, most_nbytes).decode()
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: wanted {what}, found bytes that are no UTF-8 text: {e}") from e


def read_trace(path: str) -> str:
    """Return the text of a market's trace file. Raises BadInput."""
    return text_given(path, "demo, calm, once, seed:<n> or a trace file as the market")


def yaml_given(path: str | Path, what: str) -> list[Any]:
    """Return the documents of a YAML file, within bounds on size and depth that also hold where its
    anchors repeat a part very often. Raises BadInput."""
    text = text_given(path, what, MOST_YAML_NBYTES)
    depth = itertools.accumulate((c in "[{") - (c in "]}") for c in text if c in "[]{}")
    if max(depth, default=0) > MOST_BRACKETS:  # the parser takes time quadratic in them
        raise BadInput(f"{path}: wanted {what}, found more than {MOST_BRACKETS} open brackets")
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
        _count(documents, MOST_YAML_DEPTH, MOST_YAML_VALUES)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadInput(
            f"{path}:{where} wanted {what}, found what is not valid YAML: "
            f"{getattr(e, 'problem', None) or e}"
        ) from e
    except RecursionError:
        raise BadInput(f"{path}: wanted {what}, found values too deep in each other") from None
    except ValueError as e:  # a date such as 2026-13-45, or a bound of `_count`
        raise BadInput(f"{path}: wanted {what}: {e}") from e
    return documents


def _count(value: Any, depth: int, left: int) -> int:
    """Return how many of `left` values remain after this one and all inside it. Raises ValueError
    when a bound is exceeded."""
    if depth < 0 or left <= 0:
        bound = f"depth of {MOST_YAML_DEPTH}" if depth < 0 else f"number of {MOST_YAML_VALUES}"
        raise ValueError(f"its values exceed a {bound}; write it without anchors that repeat them")
    inside = [*value, *value.values()] if isinstance(value, dict) else ()
    for one in value if isinstance(value, list | tuple | set) else inside:
        left = _count(one, depth - 1, left)
    return left - 1


# ---- checks of flags -----------------------------------------------------------------------------
def readable_file(text: str) -> None:
    """Raise ValueError if `text` is not a readable file; "" passes."""
    if text and (why := _why_not(text, os.R_OK)):
        raise ValueError(f"wanted a file that can be read, found {text!r}: {why}")


def output_file(text: str) -> None:
    """Raise ValueError if `text` is not a writable file; "" and "-" pass."""
    if text not in ("", "-") and (why := _why_not(text, os.W_OK)):
        raise ValueError(f"wanted a file that can be written, found {text!r}: {why}")


def output_folder(text: str) -> None:
    """Raise ValueError if `text` is not a writable folder; "" passes."""
    if text and (why := _why_no_folder(Path(text))):
        raise ValueError(f"wanted a folder that can be written, found {text!r}: {why}")


def _why_not(text: str, access: int) -> str:
    path = Path(text)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _why_no_folder(path.parent) if access == os.W_OK else "no such file"
    except (OSError, ValueError) as e:
        return str(getattr(e, "strerror", "") or e)
    if stat.S_ISDIR(mode):
        return "it is a folder"
    if access == os.R_OK and not stat.S_ISREG(mode):
        return "it is a pipe or a device"
    return "" if os.access(path, access) else "this is not permitted"


def _why_no_folder(path: Path) -> str:
    """Return why no file can be written in this folder, or "" if no reason is known. The folder
    need not exist yet."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        if not path.is_dir():
            return f"{path} is no folder"
    except (OSError, ValueError) as e:
        return str(getattr(e, "strerror", "") or e)
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} cannot be written to"
    try:  # /proc and the like permit everything to root, and take nothing
        os.rmdir(tempfile.mkdtemp(prefix=".harness-", dir=path))
    except OSError as e:
        return f"{path}: {e.strerror}"
    return ""
