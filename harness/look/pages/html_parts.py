"""Pages from templates: Jinja2 fills the `*.html` files of this project with plain values.

Whatever a template shows is escaped, without control characters. What a template marks `|safe` is
an SVG, a style or a script that our own code has drawn or shipped. In a template, a line break
beside a tag says nothing: a space that people should see stands on the same line, and so does the
whole of a tag.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from harness.core.formatting import (
    clock,
    duration,
    money,
    number_text,
    percent,
    plural,
    shares_text,
)
from harness.core.world import BadInput
from storage.terminal_text import plain

if TYPE_CHECKING:
    from jinja2 import Environment

TO_TEXT = (clock, duration, money, number_text, percent, plural, shares_text)
FILTERS = {f.__name__: f for f in TO_TEXT}
BESIDE_A_TAG = re.compile(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])")


def asset(name: str) -> str:
    """Return the text of a package file that is embedded in the page, which is self-contained."""
    return resources.files("harness.look.pages").joinpath(name).read_text(encoding="utf-8")


def render(name: str, /, **values: Any) -> str:
    """Return a template (its path below `harness/`) filled with values. Raises BadInput without
    Jinja2."""
    return environment().get_template(name).render(values)


@functools.cache
def environment() -> Environment:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise BadInput(
            "a page needs the package jinja2, which is not installed: "
            '`pip install "spotharness[look]"`'
        ) from None
    made = jinja2.Environment(
        autoescape=True,
        extensions=["jinja2.ext.do"],
        finalize=lambda value: value if hasattr(value, "__html__") else plain(value, keep="\n"),
        loader=jinja2.FunctionLoader(_source),
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {**FILTERS, "anchor": anchor}
    return made


def _source(name: str) -> tuple[str, str, None]:
    """Return a template, and its name for tracebacks. Line breaks beside tags become comments, so
    that line numbers stay."""
    text = resources.files("harness").joinpath(name).read_text(encoding="utf-8")
    return BESIDE_A_TAG.sub(lambda found: f"{{#{found[0]}#}}", text), name, None


def anchor(title: str) -> str:
    """Return the id by which a link finds a section."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
