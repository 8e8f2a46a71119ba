from __future__ import annotations

import json
from pathlib import Path

import pytest

from cclis.errors import InputError
from cclis.files import read_json
from cclis.report.formats import spread
from cclis.runs.records import Result
from tools.speed_tables import methods_table, parts_table, sharing_table
from tools.tables import (
    beside_table,
    course_table,
    main,
    mammoth_table,
    read_notes,
    read_runs,
    results_table,
    summary_table,
    tables,
    variation,
    variations_table,
    with_tables,
)

ROOT = Path(__file__).resolve().parents[2]


def result(seed: int, accuracy: float) -> dict[str, object]:
    numbers = {"accuracy": accuracy, "forgetting": 1.0, "matrix": []}
    heads = {"linear": numbers, "prototype": numbers}
    row = {"benchmark": "seq-cifar10", "method": "cclis", "memory": 200, "seed": seed}
    return {**row, "main_head": "prototype", "class_il": heads, "task_il": heads, "changed": {}}


def write(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_no_seed_counts_twice_in_a_row() -> None:
    which = ("benchmark", "memory", "method", "seed")
    runs = [(*(run[key] for key in which), variation(run)) for run in read_runs(ROOT / "results")]
    assert len(runs) == len(set(runs)) > 0


def test_runs_of_their_own_folder_are_timed_and_count_in_no_row(tmp_path: Path) -> None:
    seconds = {"total": 30.0, "train": 20.0, "compile": 10.0}
    timed = {**result(7, 50.0), "seconds": seconds, "device": "a card"}
    write(tmp_path / "runs" / "seq-cifar10" / "one.json", result(0, 70.0))
    write(tmp_path / "speed" / "alone" / "two.json", timed)
    (tmp_path / "notes.yaml").write_text("speed/alone/two.json: {alone: true, note: so}")
    found = tables(tmp_path)
    assert found["alone"].splitlines()[2:] == [
        "| seq-cifar10 | 200 | cclis | 7 | 30.0 s | 20.0 s | 10.0 s | a card | so |"
    ]
    assert "70.00" in found["results"]
    assert "50.00" not in found["results"] + found["summary"]


def test_seeds_are_averaged_below_the_papers_row() -> None:
    lines = results_table([result(0, 70.0), result(1, 74.0)]).splitlines()
    assert lines[2] == (
        "| seq-cifar10 | 200 | cclis | *the paper* | *74.95 ± 0.61* | *22.59 ± 0.18* "
        "| *96.20 ± 0.26* | *2.08 ± 0.27* |  |"
    )
    assert "| linear | 72.00 ± 2.83 | 1.00 ± 0.00 |" in lines[3]
    assert lines[3].endswith("| 2 |")
    assert len(lines) == 5


def test_the_summary_has_a_row_a_method_and_a_column_a_head() -> None:
    other = {**result(0, 50.0), "method": "er"}
    other["class_il"] = {"classifier": other["class_il"]["linear"]}
    lines = summary_table([result(0, 70.0), result(1, 74.0), other]).splitlines()
    assert lines[0].endswith("| *the paper* | linear | prototype | classifier | runs |")
    assert lines[2].endswith("| *74.95 ± 0.61* | 72.00 ± 2.83 | 72.00 ± 2.83 | – | 2 |")
    assert lines[3].endswith("| *49.16 ± 2.08* | – | – | 50.00 | 1 |")
    # A head that not all runs were judged by says how many were.
    fewer = {**result(1, 74.0), "class_il": {"linear": {"accuracy": 74.0}}}
    lines = summary_table([result(0, 70.0), fewer]).splitlines()
    assert lines[2].endswith("| 72.00 ± 2.83 | 70.00 (1) | 2 |")


def test_other_papers_rows_stand_below_the_papers() -> None:
    def places(method: str, memory: int) -> list[str]:
        some = {**result(0, 60.0), "method": method, "memory": memory}
        rows = results_table([some]).splitlines()[2:]
        return [row.split(" | ")[3] for row in rows]

    ours = ["linear", "prototype"]
    assert places("der", 200) == ["*the paper*", "*Buzzega et al., 2020*", *ours]
    # The paper has no row of DER++, the other none of GCR.
    assert places("derpp", 500) == ["*Buzzega et al., 2020*", *ours]
    assert places("gcr", 200) == ["*the paper*", *ours]


def test_what_each_method_costs() -> None:
    er = {"run_seconds": 617.2, "times_er": 1.0, "task_seconds": [100.0, 100.0]}
    gem = {"run_seconds": 1234.4, "times_er": 2.0, "task_seconds": [100.0, 300.4]}
    speed = {"images_per_second": 1664.4}
    table = methods_table([{"device": "a card", "methods": {"er": er | speed, "gem": gem | speed}}])
    assert table.splitlines()[2:] == [
        "| er | 617 s | 1.00 | 100 s | 1.00 | 1,664 | a card |",
        "| gem | 1,234 s | 2.00 | 300 s | 3.00 | 1,664 | a card |",
    ]


def test_what_one_pass_saves() -> None:
    machine = {"device": "a card", "parts": 3, "batch": 32}
    machine |= {"several_seconds": 0.0044, "one_pass_seconds": 0.0025, "ratio": 1.76}
    lines = parts_table([machine]).splitlines()
    assert lines[2] == "| 3 of 32 images | 4.40 ms | 2.50 ms | 1.76 | a card |"


def test_what_several_runs_make_of_one_card() -> None:
    rows = [{"runs": 1, "images_per_second": 4000.0}, {"runs": 2, "images_per_second": 6000.0}]
    machine = {"device": "a card", "method": "er", "mps": True, "rows": rows}
    lines = sharing_table([machine, {**machine, "mps": False}]).splitlines()
    assert lines[3] == "| er | side by side | 2 | 6,000 | 1.50 | a card |"
    assert lines[5] == "| er | in turns | 2 | 6,000 | 1.50 | a card |"


def test_a_run_of_another_rule_stands_beside_ours() -> None:
    ours = [result(0, 70.0), result(1, 74.0), {**varied(), "seed": 1}]
    lines = beside_table(ours, [result(1, 72.5)]).splitlines()
    assert lines[2:] == ["| seq-cifar10 | 200 | cclis | 1 | 74.00 | 72.50 | 74.00 | 72.50 |"]


def test_the_course_of_runs_by_other_rules_stands_below_ours() -> None:
    def run(seed: int, *matrix: list[float | None]) -> dict[str, object]:
        heads = {"linear": {"accuracy": 60.0, "forgetting": 40.0, "matrix": matrix}}
        known = {"linear": {"accuracy": 95.0, "forgetting": 3.0, "matrix": matrix}}
        return {**result(seed, 0.0), "class_il": heads, "task_il": known, "task_sizes": [2, 2, 2]}

    ours = run(0, [90.0, None, None], [50.0, 70.0, None], [40.0, 60.0, 80.0])
    whole = {**run(2, [90.0, None, None], [30.0, 70.0, None], [0.0, 0.0, 0.0]), "rule": "another"}
    unfinished = {**run(3, [80.0]), "rule": "another"}
    elsewhere = {**run(4, [1.0]), "memory": 500}
    lines = course_table([ours, elsewhere, varied()], [whole, unfinished]).splitlines()
    assert lines[0].endswith(
        "| Class-IL after 1 task | after 2 | Class-IL | forgetting | Task-IL | forgetting |"
    )
    assert lines[2].startswith("| *the paper* |  | – | – | *74.95 ± 0.61* | *22.59 ± 0.18* |")
    assert lines[3:] == [
        "| ours | 0 | 90.00 | 60.00 | 60.00 | 40.00 | 95.00 | 3.00 |",
        "| another | 2 | 90.00 | 50.00 | 60.00 | 40.00 | 95.00 | 3.00 |",
        "| another | 3 | 80.00 | – | – | – | – | – |",
    ]
    assert course_table([], []) == ""


def test_ours_beside_mammoths() -> None:
    seeds = {"class_il": [90.0, 92.0], "task_il": [99.0, 99.0]}
    sides = {"ours": {"er": seeds}, "mammoth": {"er": seeds, "gss changed": seeds}}
    lines = mammoth_table([], [{"benchmark": "digits", "memory": 100, **sides}]).splitlines()
    both = "91.00 ± 1.41 | 91.00 ± 1.41 | 99.00 ± 0.00 | 99.00 ± 0.00"
    assert lines[2] == f"| digits | er | {both} | 2 and 2 |"
    assert lines[3] == "| digits | gss changed | – | 91.00 ± 1.41 | – | 99.00 ± 0.00 | 2 |"


def test_where_mammoths_code_ran_alone_the_results_stand_beside_it() -> None:
    theirs = {"cclis": {"class_il": [90.0, 92.0], "task_il": [99.0, 99.0]}}
    machine = {"benchmark": "seq-cifar10", "memory": 200, "ours": {}, "mammoth": theirs}
    runs = [result(0, 70.0), result(1, 71.0), result(2, 72.0), varied()]
    line = mammoth_table(runs, [machine]).splitlines()[2]
    ours = "71.00 ± 1.00"
    assert line == (
        f"| seq-cifar10 | cclis | {ours} | 91.00 ± 1.41 | {ours} | 99.00 ± 0.00 | 3 and 2 |"
    )
    other = mammoth_table(runs, [{**machine, "memory": 500}]).splitlines()[2]
    assert other.endswith("| – | 91.00 ± 1.41 | – | 99.00 ± 0.00 | 2 |")


def test_a_mean_that_rounds_to_zero_has_no_sign() -> None:
    assert spread([-0.004]) == "0.00"
    assert spread([-0.03, 0.02], digits=1) == "0.0 ± 0.0"
    assert spread([-0.004], sign=True) == "+0.00"


def test_one_run_has_no_spread() -> None:
    assert "| linear | 70.00 | 1.00 |" in results_table([result(0, 70.0)])


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/reliability.md"])
def test_the_tables_in_the_docs_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_tables(text, tables(ROOT / "results")) == text, "run `make results`"


def test_every_note_belongs_to_a_file_and_every_run_is_a_result() -> None:
    folder = ROOT / "results"
    assert [path for path in read_notes(folder) if not (folder / path).is_file()] == []
    runs = [Result.from_json(read_json(path), path) for path in folder.glob("runs/*/*.json")]
    assert len(runs) > 100
    assert all(run.recipe and run.changed is not None for run in runs)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    kinds = [
        path.name for parent in ("experiments", "speed") for path in (folder / parent).iterdir()
    ]
    assert [kind for kind in kinds if f"| `{kind}` |" not in readme] == []


def test_pages_are_written(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "seq-cifar10" / "one.json", result(0, 70.0))
    write(tmp_path / "runs" / "seq-cifar10" / "two.json", varied())
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    main(str(tmp_path), str(page))
    text = page.read_text()
    assert text.startswith("before\n<!-- results -->\n| benchmark |")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    with pytest.raises(InputError, match="no place for a table"):
        with_tables("nothing", {"results": "table"})


def varied() -> dict[str, object]:
    return {**result(0, 57.5), "changed": {"selection": "random", "distillation": False}}


def test_runs_with_other_settings_than_their_recipe_have_a_table_of_their_own() -> None:
    other = {**varied(), "method": "der", "changed": {"precision": "tf32"}}
    runs = [result(0, 70.0), other, varied()]
    assert "57.50" not in results_table(runs)
    lines = variations_table(runs).splitlines()
    start = "| seq-cifar10 | 200 | cclis | selection random, distillation false |"
    assert lines[2] == f"{start} *the paper* | *56.43 ± 1.54* | – | – | – |  |"
    assert lines[3].startswith(f"{start} linear | 57.50 |")
    assert lines[5].startswith("| seq-cifar10 | 200 | der | precision tf32 | linear | 57.50 |")
    assert len(lines) == 7
