"""Figures for a paper: what is joined, what is told apart, what is named."""

from __future__ import annotations

import pytest
import torch

from cclis.report.drawing import Line, Map, line_figure, map_figure, picture
from cclis.report.study import Row, run_map, study_figure
from tests.report.made import accuracy, result

POINTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 10
RESULT = result(class_names=[f"class {number}" for number in range(10)])
ANALYSIS = {
    **{"test.embeddings": POINTS, "test.labels": LABELS},
    **{"memory.embeddings": POINTS[:20] + 0.1, "memory.labels": LABELS[:20]},
    "prototypes": POINTS[:10] - 0.1,
}


def test_only_what_was_measured_is_joined() -> None:
    rows = [
        Row(
            "b",
            9,
            "v",
            {"r": result(heads={"linear": accuracy(y)})},
            {},
            {"class_il": {"accuracy": [y, 1]}},
            "CCLIS",
            x,
        )
        for x, y in ((0, 50.0), (1, 60.0))
    ]
    ours, paper = (bars.lines[0] for bars in study_figure(rows, "x").axes[0].containers)
    assert (ours.get_linestyle(), paper.get_linestyle()) == ("-", "None")
    assert paper.get_markerfacecolor() == "white"
    assert list(paper.get_ydata()) == [50, 60]


def test_a_map_tells_ten_classes_and_three_kinds_apart() -> None:
    figure = map_figure([[run_map("CCLIS", RESULT, ANALYSIS), Map("Co2L", (), {})]])
    drawn, empty = figure.subfigs[0].axes
    test, memory, prototypes = drawn.collections[:3]
    assert [len(kind.get_offsets()) for kind in (test, memory, prototypes)] == [40, 20, 10]
    colours = [tuple(colour[:3]) for colour in prototypes.get_facecolors()]
    assert len(set(colours)) == 10
    for kind in (test, memory):
        found = [tuple(colour[:3]) for colour in kind.get_facecolors()]
        assert found == [colours[number % 10] for number in range(len(found))]
    legend = [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]
    assert legend == [*RESULT.class_names, "test samples", "in the memory", "prototypes"]
    assert [text.get_text() for text in empty.texts] == ["no map"]


def test_a_figure_without_any_map_is_drawn_without_a_warning(recwarn) -> None:
    assert b"no map" in picture(map_figure([[Map("CCLIS", (), {})]]), "svg")
    assert not recwarn.list


@pytest.mark.parametrize("names", [("test.embeddings", "test.labels"), ()])
def test_a_run_that_kept_too_little_has_an_empty_map(names: tuple[str, ...]) -> None:
    few = {name: ANALYSIS[name][:3] for name in names}
    found = run_map("CCLIS", RESULT, few)
    assert found.points == {}
    assert b"no map" in picture(map_figure([[found]]), "svg")


def test_many_classes_are_drawn_unnamed() -> None:
    many = result(class_names=[f"class {number}" for number in range(100)])
    part = map_figure([[run_map("CCLIS", many, ANALYSIS)]]).subfigs[0]
    legend = [text.get_text() for text in part.legends[0].get_texts()]
    assert legend == ["test samples", "in the memory", "prototypes"]


def test_names_are_no_formulas() -> None:
    lines = [Line("$x$", [0], [1], [0], 0)]
    drawn = map_figure([[Map("$x$", ["$y$"], {})]])
    assert b">$x$<" in picture(line_figure(lines, "x", "y"), "svg")
    assert b">$x$<" in picture(drawn, "svg")
    assert b">$y$<" in picture(drawn, "svg")
