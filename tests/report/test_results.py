from __future__ import annotations

import json
from pathlib import Path

import pytest

from cclis.errors import InputError
from cclis.report.results import main, read_results, results_table, with_table

ROOT = Path(__file__).resolve().parents[2]


def result(seed: int, accuracy: float) -> dict[str, object]:
    numbers = {"accuracy": accuracy, "forgetting": 1.0, "matrix": []}
    heads = {"linear": numbers, "prototype": numbers}
    row = {"benchmark": "seq-cifar10", "method": "cclis", "memory": 200, "seed": seed}
    return {**row, "class_il": heads, "task_il": heads}


def test_seeds_are_averaged_below_the_papers_row() -> None:
    lines = results_table([result(0, 70.0), result(1, 74.0)]).splitlines()
    assert lines[2] == (
        "| seq-cifar10 | 200 | cclis | *the paper* | *74.95 ± 0.61* | *22.59 ± 0.18* "
        "| *96.20 ± 0.26* | *2.08 ± 0.27* | |"
    )
    assert "| linear | 72.00 ± 2.83 | 1.00 ± 0.00 |" in lines[3]
    assert lines[3].endswith("| 2 |")
    assert len(lines) == 5


def test_one_run_has_no_spread() -> None:
    assert "| linear | 70.00 | 1.00 |" in results_table([result(0, 70.0)])


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_tables_in_the_docs_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    table = results_table(read_results(ROOT / "results"))
    assert with_table(text, table) == text, "run `make results`"


def test_pages_are_written(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result(0, 70.0)))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    main(str(tmp_path), str(page))
    text = page.read_text()
    assert text.startswith("before\n<!-- results -->\n| benchmark |")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    with pytest.raises(InputError, match="no place for the table"):
        with_table("nothing", "table")
