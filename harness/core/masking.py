"""Masking of secrets, recognised by name and by form, in everything that a run keeps.

Most are recognised by name (`--api-key`, `HF_TOKEN`); keys of well-known services are recognised by
their form anywhere. Each process learns the values of its own secrets when it starts (`learn`), so
that an exception or a log line that quotes one is masked as well. A secret that cannot be
recognised is kept: put none into flags.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
# names of flags and of configuration keys
NAME = re.compile(
    r"(^|[-_.]|api|access|secret|auth|private)"
    r"(key|token|secret|passw\w*|passphrase|credentials?|auth|cookie)$|api[-_]?keys$"
    r"|(^|[-_.])(pass|pwd|dsn|webhooks?)$|webhook[-_.]?url$|conn(ection)?[-_.]?str(ing)?$"
    r"|^alerts?$",  # URLs of webhooks, whose paths are secrets
    re.IGNORECASE,
)
# names of environment variables, which are more explicit
VARIABLE = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|INFO|URL|URI|IPS|ALERT"
    r"|PWD|CONN(?!ECT)|CONNECTION(?!S)|DSN|WEBHOOK",
    re.I,
)
_FORMS = re.compile(
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|AGPA|AROA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{18,}"
    r"|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|wandb_v1_[\w-]{20,}"
    r"|hsk_[0-9a-fA-F]{32,}"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]{1,8000}-----END [A-Z ]{0,20}PRIVATE KEY-----"
    r"|(?<![\w-])eyJ[\w-]{10,500}\.eyJ[\w-]{10,2000}\.[\w-]{10,}"
)
# A value in the text of a program or a settings file. For a token or key it must look random; for a
# password any value counts. Repetitions are bounded, as a line may have a million characters.
_ASSIGNED = re.compile(
    r"""(?ix) ( (?: (?P<drawn> api[_-]?key | access[_-]?key | private[_-]?key | token | credential )
          | (?P<any> passw(?:or)?d | passphrase | secret ) )
        [\w.-]{0,40} ["']? \s{0,20} (?:[:=]|=>) \s{0,20} )
        ( (?P<quote>["']) (?P<inside>[^"'\n]{4,1000}) (?P=quote)
          | (?P<bare>[^\s"'(),;\[\]{}]{12,}) )"""
)
_DRAWN = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9+/_=.~-]{12,}")
_PEM = re.compile(r"-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----")
_IN_URL = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/@:'\"]{0,200}:[^\s/@'\"]{1,500}@",
    re.IGNORECASE,
)
# in signed URLs: Azure's sig, presigned URLs of AWS and Google, tokens
_IN_QUERY = re.compile(
    r"([?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|token"
    r"|access_token|api_?key|key|password|secret)=)[^&\s'\"<>]{6,2000}",
    re.IGNORECASE,
)
_SIGNED = re.compile(r"sig|signature|token|key|secret|credential|password|auth", re.IGNORECASE)


# names of variables whose values are masked anywhere
_HOLDS = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|CREDENTIALS?|AUTH|COOKIE|PAT|ALERT)S?(_|$)"
    r"|PASS(?!_?(ES|THROUGH|IVE|ED|AGE|PORT_NAME)(_|$))|PWD|CONN(?!ECT)|CONNECTION(?!S)"
    r"|DSN|WEBHOOK",
    re.IGNORECASE,
)
_FOLDERS = ("PWD", "OLDPWD")  # the shell's, which hold no password
SECRET_NAMES = "HARNESS_SECRETS"  # comma-separated names of the task's own secrets
LEAST_LETTERS = 8  # characters of a value: a shorter one occurs in many words
LEAST_OF_LINE = 16  # characters of one line of a value, such as a PEM key's
# assignments within a value whose right sides are secrets: "AccountKey=...;", "password=...",
# '"private_key": "..."'
_PARTS = re.compile(
    r"""(?ix) (?:key|token|secret|pass\w{0,20}|pwd|sharedaccesssignature|sig) ["']? \s{0,5} [:=]
    \s{0,5} ["']? ([^\s;"',&]{8,8000})"""
)
_learned: list[str] = []  # secrets of this process, the longest first; only grows


def learn(environ: Mapping[str, str]) -> None:
    """Mask from now on the values of variables whose names mark them as secrets, and of those that
    SECRET_NAMES lists. File paths are not secrets."""
    named = set(environ.get(SECRET_NAMES, "").split(","))
    keep_out(
        word
        for name, value in environ.items()
        if name != SECRET_NAMES
        and (name in named or (name not in _FOLDERS and _HOLDS.search(name)))
        for word in ({value, *value.split()} if "ALERT" in name.upper() else {value})
    )


def keep_out(values: Iterable[str]) -> None:
    """Mask these values from now on: verbatim, URL-quoted and in base64; of a value with several
    lines also each long line, and of one with assignments (a connection string, a JSON key) the
    secret ones alone."""
    found = {v.strip() for v in values}
    found = {v for v in found if len(v) >= LEAST_LETTERS and not v.startswith(("/", "~", "./"))}
    known = set(found)
    for value in known:
        parts = (part[1] for part in _PARTS.finditer(value))
        found.update(p for p in parts if not p.startswith(("/", "~", "./", "-----")))
        # a JSON key holds its lines with "\\n" written out
        lines = value.replace("\\n", "\n").splitlines()
        if len(lines) > 1:
            found.update(
                line.strip(" \t\",") for line in lines
                if len(line.strip(" \t\",")) >= LEAST_OF_LINE and not _PEM.search(line)
            )  # fmt: skip
    found |= {form for v in found for form in _base64_forms(v)}
    found |= {urllib.parse.quote(v, safe="") for v in found}
    _learned[:] = sorted(found.union(_learned), key=len, reverse=True)


def _base64_forms(value: str) -> Iterator[str]:
    """Yield how `value` looks within base64, of both alphabets: alone or with text around it, where
    it begins at the first, second or third of three bytes. Letters that depend on the neighbours
    are left out."""
    data = value.encode(errors="surrogatepass")
    for before in range(3):
        bits = 8 * before
        text = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        # the first letters hold bits of what stands before, the last one bits of what follows
        first = -(-bits // 6)
        last = len(text) if (bits + 8 * len(data)) % 6 == 0 else len(text) - 1
        inner = text[first:last]
        if len(inner) >= LEAST_LETTERS:
            yield inner
            yield inner.translate(_URL_SAFE)


_URL_SAFE = str.maketrans("+/", "-_")


def masked_deep(value: Any) -> Any:
    """Return the same JSON with all of its text masked."""
    if isinstance(value, str):
        return masked(value) if len(value) >= LEAST_LETTERS else value
    if isinstance(value, dict):
        return {masked_deep(k): masked_deep(v) for k, v in value.items()}
    return [masked_deep(v) for v in value] if isinstance(value, list | tuple) else value


def is_secret(name: str) -> bool:
    """Return whether this name of a flag or configuration key marks its value as a secret."""
    return bool(NAME.search(name))


def masked(text: str) -> str:
    """Mask the secrets that this process has learned, and everything in secret form: keys, and
    passwords and signatures in URLs."""
    for secret in _learned:
        text = text.replace(secret, MASK)
    text = _FORMS.sub(MASK, text)
    if "://" in text or "sig" in text.lower():
        text = _IN_QUERY.sub(rf"\1{MASK}", _IN_URL.sub(rf"\1{MASK}@", text))
    return text


def masked_line(text: str) -> str:
    """Mask a line of a program or of settings, including values assigned to names of secrets."""

    def cover(found: re.Match[str]) -> str:
        value = found["inside"] or found["bare"]
        looks = found["any"] and (found["inside"] or _DRAWN.fullmatch(value))
        if not looks and not _DRAWN.fullmatch(value):
            return found[0]
        quote = found["quote"] or ""
        return f"{found[1]}{quote}{MASK}{quote}"

    return _ASSIGNED.sub(cover, masked(text))


def url_without_secrets(url: str) -> str:
    """Return a URL without its password, without its user (except for `ssh://`), and without
    signatures and keys in its query."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc
    except ValueError:
        return MASK
    if "@" in host:
        user, _, host = host.rpartition("@")
        if parts.scheme.endswith("ssh") and ":" not in user:
            host = f"{user}@{host}"
    words = parts.query.split("&") if parts.query else []
    query = "&".join(
        f"{name}={MASK}" if _SIGNED.search(name := word.partition("=")[0]) else word
        for word in words
    )
    return masked(urllib.parse.urlunsplit((parts.scheme, host, parts.path, query, "")))


def masked_value(text: str) -> str:
    """Mask the value of a flag or of a configuration key."""
    return url_without_secrets(text) if "://" in text and " " not in text else masked(text)


def masked_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's words without secrets, and the names of flags whose values were masked."""
    told: list[str] = []
    hidden: list[str] = []
    waiting = ""  # the flag whose value is the next word
    for word in words:
        if waiting and not word.startswith("--"):
            told.append(MASK)
            hidden.append(waiting)
            waiting = ""
            continue
        waiting = ""
        name, equals, value = word.partition("=")
        if word.startswith("-") and is_secret(name.lstrip("-")):
            waiting = "" if equals else name
            told.append(f"{name}={MASK}" if equals else name)
            hidden += [name] if equals else []
        elif word.startswith("-") and equals:
            told.append(f"{name}={masked_value(value)}")
        else:
            told.append(masked_value(word))
    return told, hidden


def masked_patch(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (masked line, sign) for the output of `git diff`. `sign`: the line's first character if
    anything in it was masked, else "". Contents of binary files are unchanged."""
    in_hunk = inside_key = False
    for line in lines:
        if line.startswith("diff --git "):
            in_hunk = inside_key = False
        if line.startswith("@@ "):
            in_hunk = True
            at = line.find(" @@", 3) + 3  # a line of the file follows
            yield line[:at] + masked_line(line[at:]), ""
            continue
        sign, text = line[:1], line[1:]
        if not in_hunk or sign not in ("+", "-", " "):
            yield line, ""
            continue
        if pem := _PEM.search(text):
            inside_key = pem[1] == "BEGIN"
            yield line, ""
            continue
        told = MASK if inside_key and text.strip() else masked_line(text)
        yield sign + told, sign if told != text else ""


# Tracebacks and logs of a process, without the secrets that it knows.


def keep_secrets(environ: Mapping[str, str]) -> None:
    """Learn the secrets of `environ`, and mask them from now on in the tracebacks of uncaught
    errors in all threads of this process, and in its logs. Idempotent."""
    learn(environ)
    if logging.getLogRecordFactory() is _MaskedRecord:
        return
    sys.excepthook = _masking(sys.excepthook)
    sys.unraisablehook = _masking(sys.unraisablehook)
    threading.excepthook = _masking(threading.excepthook)
    logging.setLogRecordFactory(_MaskedRecord)


def masked_text(text: str) -> str:
    """Mask a text of many lines: each as a line of a log, and secrets that span several lines."""
    return "".join(masked_line(line) for line in masked(text).splitlines(keepends=True))


def _masking(hook: Callable[..., Any]) -> Callable[..., None]:
    """Return the same hook, with its output to stderr masked."""

    def said(*error: Any) -> None:
        words = io.StringIO()
        # output of other threads in the meantime is captured and written with it
        with _SPEAKS, contextlib.redirect_stderr(words):
            hook(*error)
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(masked_text(words.getvalue()))
                sys.stderr.flush()

    return said


class _MaskedRecord(logging.LogRecord):
    """A log record whose message and traceback are masked."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.exc_info:  # formatters use `exc_text` if it is set
            self.exc_text = masked_text(_FORMATTER.formatException(self.exc_info))
        if self.stack_info:
            self.stack_info = masked_text(self.stack_info)

    def getMessage(self) -> str:
        return masked_text(super().getMessage())


_FORMATTER = logging.Formatter()
_SPEAKS = threading.RLock()  # threads may fail at the same time
