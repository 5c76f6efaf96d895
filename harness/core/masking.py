"""Secrets, by their names and by their looks: what is left out of everything that a run keeps.

A name says most (`--api-key`, `HF_TOKEN`); keys of well-known services are known by their form
wherever they stand. Each process learns the values of its own secrets when it starts (`learn`), so
that an exception or a line of a log that quotes one is masked as well. What cannot be known for a
secret is kept: put none into flags.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
# of flags and of keys of a configuration
NAME = re.compile(
    r"(^|[-_.]|api|access|secret|auth|private)"
    r"(key|token|secret|passw\w*|passphrase|credentials?|auth|cookie)$|api[-_]?keys$"
    r"|^alerts?$",  # URLs of webhooks, whose paths are secrets
    re.IGNORECASE,
)
# of variables, which say more in their names
VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|INFO|URL|URI|IPS|ALERT", re.I)
_FORMS = re.compile(
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|AGPA|AROA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{18,}"
    r"|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|wandb_v1_[\w-]{20,}"
    r"|hsk_[0-9a-fA-F]{32,}"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]{1,8000}-----END [A-Z ]{0,20}PRIVATE KEY-----"
    r"|(?<![\w-])eyJ[\w-]{10,500}\.eyJ[\w-]{10,2000}\.[\w-]{10,}"
)
# A value in the text of a program or of a settings file. Of a token or a key, what looks drawn
# at random; of a password, any. Repetitions have bounds, as a line may have a million letters.
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
# of a URL that is signed: Azure's sig, AWS's and Google's presigned ones, tokens
_IN_QUERY = re.compile(
    r"([?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|token"
    r"|access_token|api_?key|key|password|secret)=)[^&\s'\"<>]{6,2000}",
    re.IGNORECASE,
)
_SIGNED = re.compile(r"sig|signature|token|key|secret|credential|password|auth", re.IGNORECASE)


# of variables whose values are masked wherever they stand
_HOLDS = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSW\w*|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE|PAT|ALERT)S?(_|$)",
    re.IGNORECASE,
)
SECRET_NAMES = "HARNESS_SECRETS"  # names of the task's own secrets, with commas between
LEAST_LETTERS = 8  # of a value: a shorter one stands in many words
_learned: list[str] = []  # of this process, the longest first; grows only


def learn(environ: Mapping[str, str]) -> None:
    """From now on this process masks the values of variables whose names say that they are
    secrets, and of those that SECRET_NAMES names. Paths of files are none."""
    named = set(environ.get(SECRET_NAMES, "").split(","))
    keep_out(
        word
        for name, value in environ.items()
        if name != SECRET_NAMES and (name in named or _HOLDS.search(name))
        for word in ({value, *value.split()} if "ALERT" in name.upper() else {value})
    )


def keep_out(values: Iterable[str]) -> None:
    """From now on this process masks these values, as they are and as a URL has them."""
    found = {v.strip() for v in values}
    found = {v for v in found if len(v) >= LEAST_LETTERS and not v.startswith(("/", "~", "./"))}
    found |= {urllib.parse.quote(v, safe="") for v in found}
    _learned[:] = sorted(found.union(_learned), key=len, reverse=True)


def masked_deep(value: Any) -> Any:
    """The same JSON, with all of its text masked."""
    if isinstance(value, str):
        return masked(value) if len(value) >= LEAST_LETTERS else value
    if isinstance(value, dict):
        return {masked_deep(k): masked_deep(v) for k, v in value.items()}
    return [masked_deep(v) for v in value] if isinstance(value, list | tuple) else value


def is_secret(name: str) -> bool:
    """Does this name of a flag, or of a key of a configuration, say that its value is one?"""
    return bool(NAME.search(name))


def masked(text: str) -> str:
    """Without what is known for a secret by its form, wherever it stands: keys, passwords and
    signatures in URLs; and without what this process has learned."""
    for secret in _learned:
        text = text.replace(secret, MASK)
    text = _FORMS.sub(MASK, text)
    if "://" in text or "sig" in text.lower():
        text = _IN_QUERY.sub(rf"\1{MASK}", _IN_URL.sub(rf"\1{MASK}@", text))
    return text


def masked_line(text: str) -> str:
    """A line of a program or of settings: also without what is assigned to a name that says so."""

    def cover(found: re.Match[str]) -> str:
        value = found["inside"] or found["bare"]
        looks = found["any"] and (found["inside"] or _DRAWN.fullmatch(value))
        if not looks and not _DRAWN.fullmatch(value):
            return found[0]
        quote = found["quote"] or ""
        return f"{found[1]}{quote}{MASK}{quote}"

    return _ASSIGNED.sub(cover, masked(text))


def url_without_secrets(url: str) -> str:
    """A URL as others may see it: no password, no user but that of `ssh://`, and of its query
    nothing that signs it."""
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
    """A value of a flag or of a configuration."""
    return url_without_secrets(text) if "://" in text and " " not in text else masked(text)


def masked_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's words without secrets, and the names of flags whose values were left out."""
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
    """(line, sign of the line if anything in it was masked, else "") of the output of `git diff`.
    Contents of binary files are as they are."""
    in_hunk = inside_key = False
    for line in lines:
        if line.startswith("diff --git "):
            in_hunk = inside_key = False
        if line.startswith("@@ "):
            in_hunk = True
            at = line.find(" @@", 3) + 3  # behind it stands a line of the file
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
