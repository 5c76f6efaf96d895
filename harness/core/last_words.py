"""Tracebacks and logs of a process without the secrets that it knows.

An exception quotes what it was given: a URL with its password, a header with its token. Whatever of
it goes to stderr ends in a log that people keep and pass on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from harness.core.masking import learn, masked, masked_line


def keep_secrets(environ: Mapping[str, str]) -> None:
    """Learn the secrets of `environ`, and from now on mask them in what this process says of errors
    that nobody caught, in all of its threads, and in what it logs. Once is enough; twice is no
    fault."""
    learn(environ)
    if logging.getLogRecordFactory() is _MaskedRecord:
        return
    sys.excepthook = _masking(sys.excepthook)
    sys.unraisablehook = _masking(sys.unraisablehook)
    threading.excepthook = _masking(threading.excepthook)
    logging.setLogRecordFactory(_MaskedRecord)


def masked_text(text: str) -> str:
    """Many lines, each as a line of a log, and what stands over several of them."""
    return "".join(masked_line(line) for line in masked(text).splitlines(keepends=True))


def _masking(hook: Callable[..., Any]) -> Callable[..., None]:
    """The same hook; what it writes to stderr is masked."""

    def said(*error: Any) -> None:
        words = io.StringIO()
        # what others write meanwhile comes out with it
        with _SPEAKS, contextlib.redirect_stderr(words):
            hook(*error)
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody hears it any more
                sys.stderr.write(masked_text(words.getvalue()))
                sys.stderr.flush()

    return said


class _MaskedRecord(logging.LogRecord):
    """One line of a log, and the traceback under it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.exc_info:  # formatters take the text that is there
            self.exc_text = masked_text(_FORMATTER.formatException(self.exc_info))
        if self.stack_info:
            self.stack_info = masked_text(self.stack_info)

    def getMessage(self) -> str:
        return masked_text(super().getMessage())


_FORMATTER = logging.Formatter()
_SPEAKS = threading.RLock()  # threads may fail together
