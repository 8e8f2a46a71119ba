"""The result of a run as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cclis.runs.records import SCENARIOS, RunScores

MEANINGS = {"class_il": "all classes compete", "task_il": "the task is known"}


def result_tables(result: RunScores) -> RenderableType:
    """The accuracy matrices of the main head, then the averages of all."""
    head = result.main_head
    matrices = [
        _matrix_table(
            f"{name} ({MEANINGS[scenario]}), head {head}", result.scores(scenario)[head].matrix
        )
        for scenario, name in SCENARIOS.items()
    ]
    return Group(*matrices, _averages_table(result))


def _matrix_table(title: str, matrix: Sequence[Sequence[float | None]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("accuracy in %")
    for task in range(len(matrix)):
        table.add_column(f"task {task + 1}", justify="right")
    for task, row in enumerate(matrix):
        cells = [_cell(value) for value in row]
        table.add_row(f"after task {task + 1}", *cells)
    return table


def _cell(value: float | None) -> Text:
    if value is None:
        return Text("")
    style = "green" if value >= 80 else "yellow" if value >= 50 else "red"
    return Text(f"{value:.1f}", style=style)


def _averages_table(result: RunScores) -> Table:
    table = Table(title="After the last task", title_justify="left", title_style="bold")
    table.add_column("head")
    for name in ("Class-IL", "forgets", "transfer", "Task-IL", "forgets", "transfer"):
        table.add_column(name, justify="right")
    for head in result.class_il:
        numbers = [
            f"{result.number(scenario, head, key):z.1f}"
            for scenario in SCENARIOS
            for key in ("accuracy", "forgetting", "backward_transfer")
        ]
        table.add_row(head, *numbers)
    return table
