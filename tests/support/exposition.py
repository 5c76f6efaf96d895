"""Reads Prometheus's text format as a scraper does."""

import re
import urllib.error
import urllib.request

LINE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\n"])*",?)*\})? '
    r"(NaN|[+-]Inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
)


def parsed(text: str) -> dict[str, float]:
    """As a scraper reads it: every series has a HELP and a TYPE before it. Raises AssertionError."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("gauge", "counter") and name in helped and name not in kinds
            kinds[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match and match[1] in kinds, line
            assert f"{match[1]}{match[2] or ''}" not in found
            found[f"{match[1]}{match[2] or ''}"] = float(match[3])
    return found


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()
