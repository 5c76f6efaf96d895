"""Notice sources of users, named by dotted path: `harness run --notices pkg.mod:function`.

The function is called once, when the agent starts. It returns a source (or several), or it is a
poll itself: a function that returns the Notices in force, and is called repeatedly. The agent
survives any later error of it: an exception, or a value that is no Notice, counts as a poll without
an answer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from harness.core import user_functions
from harness.core.world import BadInput
from harness.notices.notice import KINDS, Notice, NoticeSource

log = logging.getLogger(__name__)

MIN_PACE_S = 0.05
PACE_S = 1.0  # between two calls of a function that is a poll
START_WITHIN_S = 30.0  # limit of the function's first call
WANTED = (
    "a source (name, pace_s, errors, poll, acknowledge, close), a list of sources, or the Notices "
    "that are in force (harness.Notice)"
)


def sources_of(
    spec: str, taken: Collection[str] = (), within_s: float = START_WITHIN_S
) -> list[NoticeSource]:
    """Return the sources of `pkg.mod:function?option=value`. `taken`: names that they may not have.

    Raises BadInput if it cannot be imported, does not return within `within_s`, or returns
    something else.
    """
    path, _, query = spec.partition("?")
    function = user_functions.imported("--notices", path)
    if not callable(function):
        raise BadInput(
            f"--notices {path!r}: wanted a function, found {type(function).__name__}; it is "
            f"called without arguments, and returns {WANTED}"
        )
    function = user_functions.with_options("--notices", path, function, query, arguments=0)
    made = _first_call(path, function, within_s)
    found: list[NoticeSource]
    if _is_source(made):
        found = [made]
    elif _are(made, _is_source) and made:
        found = list(made)
    elif made is None or _are(made, lambda one: isinstance(one, Notice)):
        for notice in made or ():
            _check(path, notice)
        found = [_Poll(path, function)]
    else:
        raise BadInput(f"--notices {path!r} returned {_brief(made)}; wanted {WANTED}")
    for source in found:
        _check_source(path, source, taken)
    return [OwnSource(source) for source in found]


class OwnSource:
    """A source that keeps the contract of `NoticeSource` whatever the user's source does."""

    def __init__(self, inner: NoticeSource):
        self.inner, self.name = inner, inner.name
        self._failed = 0
        self._known: tuple[Notice, ...] = ()

    @property
    def pace_s(self) -> float:
        return max(MIN_PACE_S, self.inner.pace_s)

    @pace_s.setter
    def pace_s(self, seconds: float) -> None:
        self.inner.pace_s = seconds

    @property
    def errors(self) -> int:
        return self.inner.errors + self._failed

    @errors.setter
    def errors(self, count: int) -> None:
        self._failed = count - self.inner.errors

    def poll(self) -> Sequence[Notice]:
        try:
            self._known = tuple(
                # the agent finds the source to acknowledge a notice by this name
                dataclasses.replace(
                    _check(self.name, notice), source=self.name, detail=str(notice.detail)
                )
                for notice in self.inner.poll()
            )
        except Exception as e:  # user code may raise anything; known notices stay in force
            self._failed += 1
            log.warning("notices: %s: %s: %s", self.name, type(e).__name__, e)
        return list(self._known)

    def acknowledge(self, notice: Notice) -> bool:
        try:
            return bool(self.inner.acknowledge(notice))
        except Exception as e:  # as above
            log.warning("notices: %s: acknowledge: %s: %s", self.name, type(e).__name__, e)
            return False

    def close(self) -> None:
        try:
            self.inner.close()
        except Exception as e:  # as above
            log.warning("notices: %s: close: %s: %s", self.name, type(e).__name__, e)


class _Poll:
    """A source made of a poll function."""

    def __init__(self, name: str, function: Callable[[], Iterable[Notice] | None]):
        self.name, self.pace_s, self.errors = name, PACE_S, 0
        self._function = function

    def poll(self) -> Sequence[Notice]:
        return list(self._function() or ())

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        pass


def _first_call(path: str, function: Callable[[], Any], within_s: float) -> Any:
    """Return the result of the first call. It runs in a thread, since the function may hang. Raises
    BadInput if it fails or does not return in time."""
    answers: list[tuple[Any, Exception | None]] = []

    def call() -> None:
        try:
            answers.append((function(), None))
        except Exception as e:  # raised below
            answers.append((None, e))

    thread = threading.Thread(target=call, name=f"notices-{path}-start", daemon=True)
    thread.start()
    thread.join(timeout=within_s)
    if not answers:
        raise BadInput(
            f"--notices {path!r}: its first call has not returned within {within_s:g} s; let it "
            "return a source whose poll waits"
        )
    made, failed = answers[0]
    if failed is not None:
        raise BadInput(
            f"--notices {path!r}: its first call failed: {type(failed).__name__}: {failed}"
        ) from failed
    return made


def _is_source(found: Any) -> bool:
    """Return whether `found` has a source's methods; `_check_source` checks its attributes."""
    return not isinstance(found, type) and all(
        callable(getattr(found, name, None)) for name in ("poll", "acknowledge", "close")
    )


def _are(found: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(found, list | tuple | set | frozenset) and all(kind(one) for one in found)


def _check_source(path: str, source: NoticeSource, taken: Collection[str]) -> None:
    name, pace_s = getattr(source, "name", None), getattr(source, "pace_s", None)
    errors = getattr(source, "errors", None)
    problem = ""
    if not isinstance(name, str) or not name:
        problem = f"its name is {name!r}; wanted a word"
    elif name in taken:
        problem = f"its name is {name!r}, which is that of a source of ours; wanted another"
    elif not isinstance(pace_s, int | float) or not 0 < pace_s < math.inf:
        problem = f"its pace_s is {pace_s!r}; wanted seconds between two polls, above 0"
    elif not isinstance(errors, int):
        problem = f"its errors is {errors!r}; wanted a count of polls that were not answered, 0"
    if problem:
        raise BadInput(f"--notices {path!r}: {type(source).__name__}: {problem}")


def _check(name: str, notice: object) -> Notice:
    """Return `notice` if it is one that the agent understands. Raises BadInput otherwise."""
    problem = ""
    if not isinstance(notice, Notice):
        problem = f"wanted a harness.Notice, found {_brief(notice)}"
    elif notice.kind not in KINDS:
        problem = f"its kind is {notice.kind!r}; wanted one of {', '.join(KINDS)}"
    elif not isinstance(notice.id, str) or not notice.id:
        problem = f"its id is {notice.id!r}; wanted a text, the same at every poll"
    elif notice.deadline_s is not None and not (
        isinstance(notice.deadline_s, int | float) and math.isfinite(notice.deadline_s)
    ):
        problem = f"its deadline_s is {notice.deadline_s!r}; wanted UTC seconds, or None: now"
    elif notice.scope not in ("self", "others"):
        problem = f"its scope is {notice.scope!r}; wanted self or others"
    if problem:
        raise BadInput(f"--notices {name!r}: a notice is wrong: {problem}")
    assert isinstance(notice, Notice)
    return notice


def _brief(found: object) -> str:
    text = repr(found)
    return f"{type(found).__name__} {text if len(text) <= 60 else f'{text[:57]}...'}"
