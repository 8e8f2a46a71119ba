"""Figures for a paper, as SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0b7285", "#e8590c", "#7048e8", "#2b8a3e", "#d6336c", "#1c7ed6", "#b08900", "#868e96")


@dataclass(frozen=True)
class Line:
    """A line of a figure.

    Attributes:
        name: What the legend calls it.
        x: Where its points are.
        y: Their means.
        deviation: Their standard deviations.
        colour: Number of its colour.
        dashed: Whether it is dashed and its points hollow.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float]
    colour: int
    dashed: bool = False


def line_figure(lines: Sequence[Line], x: str, y: str) -> Figure:
    """Lines with error bars above an axis called `x`, beside one called `y`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for line in lines:
        axes.errorbar(
            line.x,
            line.y,
            line.deviation,
            color=COLOURS[line.colour % len(COLOURS)],
            linestyle="--" if line.dashed else "-",
            marker="o",
            markerfacecolor="white" if line.dashed else None,
            capsize=3,
            label=line.name.replace("$", r"\$"),
        )
    if all(float(place).is_integer() for line in lines for place in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return figure


def picture(figure: Figure, kind: str) -> bytes:
    """The figure as `svg` or `png`, the same bytes every time."""
    import matplotlib

    out = io.BytesIO()
    unsaid = {"svg": ("Date", "Creator", "Format", "Type"), "png": ("Software",)}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "cclis", "svg.fonttype": "none"}):
        figure.savefig(out, format=kind, dpi=160, metadata=dict.fromkeys(unsaid))
    return out.getvalue()
