"""Figures for a paper, as SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    *("#0b7285", "#e8590c", "#7048e8", "#2b8a3e", "#d6336c"),
    *("#1c7ed6", "#b08900", "#868e96", "#12b886", "#f03e3e"),
)
"""Of lines: those of the figures on a run's own page."""
PANEL, MARGIN = 4.4, 1.5
"""Inches: the side of a map, and what is left beside it for the legend."""
MOST_NAMED = 20
"""Most classes that a legend names."""
MARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "test": ("test samples", {"marker": "o", "s": 9, "alpha": 0.5, "linewidths": 0}),
    "memory": ("in the memory", {"marker": "D", "s": 26, "edgecolors": "black", "linewidths": 0.8}),
    "prototypes": ("prototypes", {"marker": "*", "s": 190, "edgecolors": "black"}),
}
"""What a map shows, from the lowest layer up: what the legend calls it, and how it is drawn."""


@dataclass(frozen=True)
class Line:
    """A line of a figure.

    Attributes:
        name: What the legend calls it.
        x: Where its points are.
        y: Their means.
        deviation: Their standard deviations.
        colour: Number of its colour.
        hollow: Whether its points are hollow and not joined.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float]
    colour: int
    hollow: bool = False


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
            linestyle="none" if line.hollow else "-",
            marker="o",
            markerfacecolor="white" if line.hollow else None,
            capsize=3,
            label=_plain(line.name),
        )
    if all(float(place).is_integer() for line in lines for place in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return figure


@dataclass(frozen=True)
class Map:
    """Embeddings in two dimensions.

    Attributes:
        title: What stands above them.
        classes: The names of the classes.
        points: By a key of `MARKS`, where points lie, and their classes; may be empty.
    """

    title: str
    classes: Sequence[str]
    points: Mapping[str, tuple[Sequence[Sequence[float]], Sequence[int]]]


def map_figure(rows: Sequence[Sequence[Map]]) -> Figure:
    """Maps beside each other, and beside each row a legend of its classes and marks.

    Up to ten classes have colours that are easily told apart; more than `MOST_NAMED` are not named.
    """
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    size = (PANEL * columns + MARGIN, PANEL * len(rows))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    parts = figure.subfigures(len(rows), squeeze=False)[:, 0]
    for part, maps in zip(parts, rows, strict=True):
        classes = max((one.classes for one in maps), key=len)
        colours = _colours(len(classes))
        for axes in (panels := part.subplots(1, columns, squeeze=False)[0]):
            axes.set_axis_off()
        for axes, one in zip(panels, maps, strict=False):
            axes.set_title(_plain(one.title), fontsize="medium")
            for kind, (places, labels) in one.points.items():
                x, y = [x for x, _ in places], [y for _, y in places]
                axes.scatter(x, y, c=[colours[label] for label in labels], **MARKS[kind][1])
            if not one.points:
                axes.text(0.5, 0.5, "no map", ha="center", color="grey", transform=axes.transAxes)
        named = classes if len(classes) <= MOST_NAMED else ()
        marks = [
            panels[0].scatter([], [], color=colour, label=_plain(name))
            for name, colour in zip(named, colours, strict=False)
        ]
        for kind, (name, style) in MARKS.items():
            if any(kind in one.points for one in maps):
                grey = {**style, "alpha": None, "color": "silver"}
                marks.append(panels[0].scatter([], [], label=name, **grey))
        part.legend(handles=marks, loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _colours(count: int) -> list[Any]:
    """Of so many classes."""
    from matplotlib import colormaps

    palette = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [palette(number) for number in range(count)]


def _plain(name: str) -> str:
    """A name in which nothing is taken for a formula."""
    return name.replace("$", r"\$")


def inline(svg: bytes) -> str:
    """A figure of `picture` to stand in a page; what draws it has escaped its labels."""
    text = svg.decode()
    return text[text.index("<svg") :]


def picture(figure: Figure, kind: str) -> bytes:
    """The figure as `svg` or `png`, the same bytes every time."""
    import matplotlib

    out = io.BytesIO()
    unsaid = {"svg": ("Date", "Creator", "Format", "Type"), "png": ("Software",)}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "cclis", "svg.fonttype": "none"}):
        figure.savefig(out, format=kind, dpi=160, metadata=dict.fromkeys(unsaid))
    return out.getvalue()
