"""Pictures that are drawn once and written twice: as SVG into a page, and as PNG.

A drawing is a list of plain shapes. Their colours are named as in `page.css`, so a page shows them
light or dark; a PNG is light. PNG needs Pillow, which is imported when one is written.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.core.world import BadInput
from harness.views.page_html import asset
from harness.views.plots import esc

if TYPE_CHECKING:
    from PIL import ImageDraw

PIXELS = 2  # of a PNG, for one unit of a drawing
MOST_PIXELS = 60_000_000  # of a PNG: 180 MB while it is drawn
MARGIN = 24.0  # around drawings in a PNG, in units
LETTER = 0.56  # mean width of a letter, in font sizes
FONT = 11.5  # size of text, as page.css has it
ASCII = str.maketrans({"–": "-", "−": "-", "×": "x", "…": "...", "≥": ">=", "“": '"', "”": '"'})


@dataclass(frozen=True)
class DrawnBox:
    """A filled rectangle. `tone`: a colour of page.css; `tip`: words at the pointer."""

    x: float
    y: float
    width: float
    height: float
    tone: str
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class DrawnLine:
    """A line through points. `dash`: lengths of dashes and of the gaps between them; 0: solid."""

    points: tuple[tuple[float, float], ...]
    tone: str
    width: float = 1.0
    dash: float = 0.0
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class DrawnArea:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    tone: str
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class DrawnDot:
    """A circle. `hollow`: only its edge."""

    x: float
    y: float
    radius: float
    tone: str
    tip: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class DrawnText:
    """`y` is the base line; `anchor`: "start", "middle" or "end" lies at `x`."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    tone: str = "dim"
    strong: bool = False
    size: float = FONT


DrawnShape: TypeAlias = DrawnBox | DrawnLine | DrawnArea | DrawnDot | DrawnText


@dataclass
class Drawing:
    """Shapes, the hindmost first, on a canvas of some width and height. `title`: for who cannot
    see it."""

    title: str
    width: float
    height: float = 0.0
    shapes: list[DrawnShape] = field(default_factory=list)

    def add(self, *shapes: DrawnShape) -> None:
        self.shapes += shapes


def text_width(text: str, size: float = FONT) -> float:
    """About, in units."""
    return LETTER * size * len(text)


def cut(text: str, width: float, size: float = FONT) -> str:
    """As much of a text as fits."""
    most = max(1, int(width / (LETTER * size)))
    return text if len(text) <= most else text[: most - 1] + "…"


# ---- SVG -----------------------------------------------------------------------------------------
def svg(drawing: Drawing) -> str:
    """The drawing as a part of a page that has `page.css`."""
    return (
        f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" '
        f'aria-label="{esc(drawing.title)}">{"".join(map(_svg, drawing.shapes))}</svg>'
    )


def _svg(shape: DrawnShape) -> str:
    match shape:
        case DrawnBox(x, y, width, height):
            what = f'rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        case DrawnLine(points):
            what = f'polyline points="{_points(points)}"'
        case DrawnArea(points):
            what = f'polygon points="{_points(points)}"'
        case DrawnDot(x, y, radius):
            what = f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
        case DrawnText():
            return _svg_text(shape)
    tip = f"<title>{esc(shape.tip)}</title>" if shape.tip else ""
    return f'<{what} style="{_style(shape)}">{tip}</{what.partition(" ")[0]}>'


def _style(shape: DrawnBox | DrawnLine | DrawnArea | DrawnDot) -> str:
    colour = f"var(--{shape.tone})"
    if isinstance(shape, DrawnLine):
        dash = f";stroke-dasharray:{shape.dash:g}" if shape.dash else ""
        style = f"fill:none;stroke:{colour};stroke-width:{shape.width:g}{dash}"
    elif isinstance(shape, DrawnDot) and shape.hollow:
        style = f"fill:var(--card);stroke:{colour};stroke-width:2"
    else:
        style = f"fill:{colour}"
    opacity = getattr(shape, "opacity", 1.0)
    return style if opacity == 1 else f"{style};opacity:{opacity:g}"


def _svg_text(one: DrawnText) -> str:
    bold = ";font-weight:600" if one.strong else ""
    return (
        f'<text x="{one.x:.1f}" y="{one.y:.1f}" text-anchor="{one.anchor}" '
        f'style="fill:var(--{one.tone});font-size:{one.size:g}px{bold}">{esc(one.text)}</text>'
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


# ---- PNG -----------------------------------------------------------------------------------------
def check_png() -> None:
    """Raises BadInput where no PNG can be written: to be asked before long work."""
    try:
        from PIL import features
    except ImportError as e:
        raise BadInput(
            "a PNG needs the package pillow, which is not installed: `pip install pillow`, or "
            "name a file that ends with .html"
        ) from e
    if not features.check("freetype2"):
        raise BadInput(
            "a PNG needs a pillow with FreeType, and this one was built without: `pip install "
            "--force-reinstall pillow`, or name a file that ends with .html"
        )


def png(drawings: Sequence[Drawing]) -> bytes:
    """One below the other, in the page's light colours. What no longer fits into MOST_PIXELS is
    left out. Raises BadInput without Pillow."""
    check_png()
    from PIL import Image, ImageDraw

    width = max(one.width for one in drawings) + 2 * MARGIN
    shown, height = list[Drawing](), MARGIN
    for one in drawings:
        if shown and width * (height + one.height + MARGIN) * PIXELS**2 > MOST_PIXELS:
            break
        shown.append(one)
        height += one.height + MARGIN
    size = (round(width * PIXELS), round(height * PIXELS))
    image = Image.new("RGB", size, light_colours()["card"])
    pen, top = _Pen(ImageDraw.Draw(image, "RGBA")), MARGIN
    for one in shown:
        pen.left, pen.top = MARGIN, top
        for shape in one.shapes:
            pen.draw(shape)
        top += one.height + MARGIN
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return written.getvalue()


@functools.cache
def light_colours() -> dict[str, str]:
    """page.css's colours by name, in light."""
    root = asset("page.css").partition("}")[0]
    return dict(re.findall(r"--([\w-]+):light-dark\((#\w+),", root))


@functools.cache
def _font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * PIXELS)


class _Pen:
    """Draws shapes at a place of an image."""

    def __init__(self, draw: ImageDraw.ImageDraw):
        self.to, self.left, self.top = draw, 0.0, 0.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (self.left + x) * PIXELS, (self.top + y) * PIXELS

    def colour(self, tone: str, opacity: float = 1.0) -> tuple[int, int, int, int]:
        code = light_colours()[tone].removeprefix("#")
        code = "".join(c * 2 for c in code) if len(code) == 3 else code
        red, green, blue = (int(code[i : i + 2], 16) for i in (0, 2, 4))
        return red, green, blue, round(255 * opacity)

    def draw(self, shape: DrawnShape) -> None:
        match shape:
            case DrawnBox(x, y, width, height, tone):
                edge = 1 / PIXELS  # Pillow fills the last pixel as well
                corner = self.at(x + max(edge, width) - edge, y + max(edge, height) - edge)
                self.to.rectangle((*self.at(x, y), *corner), self.colour(tone, shape.opacity))
            case DrawnArea(points, tone):
                places = [self.at(*point) for point in points]
                self.to.polygon(places, self.colour(tone, shape.opacity))
            case DrawnDot(x, y, radius, tone):
                fill = self.colour("card" if shape.hollow else tone)
                (a, b), (c, d) = self.at(x - radius, y - radius), self.at(x + radius, y + radius)
                self.to.ellipse((a, b, c, d), fill, self.colour(tone), 2 * PIXELS)
            case DrawnLine():
                self.line(shape)
            case DrawnText():
                self.write(shape)

    def line(self, one: DrawnLine) -> None:
        colour, width = self.colour(one.tone, one.opacity), max(1, round(one.width * PIXELS))
        for part in dashes(one.points, one.dash):
            places = [self.at(*point) for point in part]
            self.to.line(places, colour, width, joint="curve" if len(part) > 2 else None)

    def write(self, one: DrawnText) -> None:
        plain = unicodedata.normalize("NFKD", one.text.translate(ASCII))
        text = plain.encode("ascii", "ignore").decode()  # Pillow's own font has no others
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[one.anchor]
        bold = 0.4 if one.strong else 0
        place, colour = self.at(one.x, one.y), self.colour(one.tone)
        self.to.text(place, text, colour, _font(one.size), anchor, stroke_width=bold)


def dashes(points: Sequence[tuple[float, float]], length: float) -> list[list[tuple[float, float]]]:
    """A line cut into dashes and gaps of one length, along its way; 0: left whole."""
    if not length:
        return [list(points)]
    found, part, drawn, left = list[list[tuple[float, float]]](), [points[0]], True, length
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        whole = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        done = 0.0
        while whole - done > left:
            done += left
            at = (x0 + (x1 - x0) * done / whole, y0 + (y1 - y0) * done / whole)
            if drawn:
                found.append([*part, at])
            part, drawn, left = [at], not drawn, length
        left -= whole - done
        part.append((x1, y1))
    if drawn and len(part) > 1:
        found.append(part)
    return found
