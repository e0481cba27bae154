"""Turns a figure into SVG that is small and may stand many times in one HTML page."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

COLORS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
"""Ten colours that people with colour vision deficiencies can tell apart, of M. Petroff 2021 (arXiv:2107.02270)."""

STYLE: Any = {
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "svg.fonttype": "none",  # letters stay letters: smaller, sharp, and found by a search in the page
    "svg.hashsalt": "fedbc",  # equal figures give equal bytes
    "text.parse_math": False,  # names of algorithms and variants are text, also with $ in them
}
DPI = 150.0
"""Resolution of the parts of a figure that are pictures: maps of colours and their scales."""


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw figures in the style of a page inside of this context."""
    with mpl.rc_context(STYLE):
        yield


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element without width and height, which takes the width of its container.

    Args:
        figure: The figure, drawn inside of :func:`drawing`.
        name: Prefix of the element's ids, which no other figure of the page has.
    """
    for mesh in figure.findobj(QuadMesh):  # a scale of 256 colours would be 256 shapes
        mesh.set_rasterized(True)
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with drawing():
        FigureCanvasSVG(figure)
        figure.savefig(file, format="svg", dpi=DPI, metadata=nothing)
    return compact(file.getvalue(), name)


def compact(text: str, name: str) -> str:
    """Leave out of an SVG what a page does not need, and make its ids unlike those of other figures.

    Args:
        text: An SVG file of matplotlib.
        name: Prefix of the ids.
    """
    text = text[text.index("<svg") :]
    for needless in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->", r"\n\s*", r"<defs/>"):
        text = re.sub(needless, " " if "\\s" in needless else "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    text = re.sub(r' ?font-family: [^;"]*;?', "", text)  # the page's own font
    text = re.sub(r' transform="rotate\(-0[^"]*"', "", text)
    text = re.sub(r' (d|x|y|points|transform)="[^"]*"', _rounded, text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r">\s+<", "><", text)


def _rounded(attribute: re.Match[str]) -> str:
    """Return an attribute whose coordinates, in points, have one decimal place."""
    if "scale" in attribute[0] or "matrix" in attribute[0]:
        return attribute[0]
    short = re.sub(r"(\.\d)\d+", r"\1", attribute[0]).replace(".0 ", " ")
    return re.sub(r" +", " ", short.replace(" L ", " ")) if attribute[1] == "d" else short
