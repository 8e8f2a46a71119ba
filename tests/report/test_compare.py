from __future__ import annotations

import csv
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from cclis.cli import main
from cclis.errors import InputError
from cclis.report.compare import COLUMNS, accuracy_table, comparison, curves, paired_table
from cclis.report.drawing import picture
from cclis.report.entries import entries, read_runs
from cclis.report.formats import comma_separated, latex, markdown
from cclis.runs.records import Result
from tests.report.pages import Page

HOSTILE = "<script>alert(1)</script>"


def result(method: str, seed: int, last: float, **settings: Any) -> Result:
    """As a version wrote it that knew neither main heads nor recipes."""
    matrix = [[90.0, None], [last, last + 10]]
    numbers = {"matrix": matrix, "accuracy": last + 5, "forgetting": 90 - last}
    heads = {"linear": numbers, "prototype": numbers}
    record = {
        "benchmark": "seq-cifar10",
        "memory": 200,
        "method": method,
        "seed": seed,
        "class_il": heads,
        "task_il": heads,
        "seconds": {"train": 10.0 + seed},
        "peak_memory_bytes": 2**30,
        "config": settings,
    }
    return Result.from_json(record, "result.json")


RESULTS = [
    *[result("cclis", seed, last) for seed, last in enumerate([70.0, 72.0, 71.0])],
    *[result("er", seed, last) for seed, last in enumerate([50.0, 51.0, 55.0])],
    result("cclis", 0, 40.0, selection="random"),
]


def test_runs_are_grouped_by_all_but_the_seed_and_counted_once() -> None:
    found = entries([*RESULTS, RESULTS[0]])
    assert [(e.method, e.changed, len(e.runs)) for e in found] == [
        *[("cclis", "", 3), ("cclis", "selection random", 1), ("er", "", 3)],
    ]
    assert found[0].curve == [(90.0, 0.0), (76.0, 1.0)]
    assert found[1].name == "cclis (selection random)"


def test_rows_have_means_spreads_and_the_papers_numbers() -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in accuracy_table(entries(RESULTS))]
    assert len(rows) == 6 + 2 * 3
    ours, paper, gap = rows[:3]
    assert (ours["head"], ours["Class-IL"]) == ("linear", "76.00 ± 1.00")
    assert ours["seconds"] == "11.0 ± 1.0"
    assert (paper["head"], paper["Class-IL"]) == ("the paper", "74.95 ± 0.61")
    assert (paper["forgetting"], paper["Task-IL"]) == ("22.59 ± 0.18", "96.20 ± 0.26")
    assert (gap["head"], gap["Class-IL"]) == ("linear − the paper", "+1.05")
    for column, of_paper in (("forgetting", 22.59), ("Task-IL", 96.2)):
        mean = float(ours[column].split(" ± ")[0])
        assert gap[column] == f"{mean - of_paper:+.2f}"
    ours, paper, gap = rows[4:7]
    assert ours["Class-IL"] == "45.00"
    assert paper["Class-IL"].startswith("73.95")  # Table 3's row without importance sampling
    assert (paper["forgetting"], gap["forgetting"]) == ("", "")  # which it does not print
    assert gap["Class-IL"] == "-28.95"
    assert (rows[9]["method"], rows[9]["Class-IL"].split(" ")[0]) == ("er", "49.16")


def test_pairs_are_tested_over_the_seeds_they_share() -> None:
    rows = paired_table(entries(RESULTS))
    assert len(rows) == 1  # a single run has nothing to be paired over
    _, _, first, second, seeds, difference, p = rows[0]
    assert (first, second, seeds) == ("cclis", "er", "3")
    assert difference == "+19.00 ± 2.65"
    assert float(p) == pytest.approx(ttest_rel([75, 77, 76], [55, 56, 60]).pvalue, rel=0.01)
    same = [result(m, s, x) for m, x in (("cclis", 70.0), ("er", 60.0)) for s in (0, 1)]
    assert paired_table(entries(same))[0][-1] == "–"


def test_tables_survive_their_formats() -> None:
    rows = [["a|b", "1 ± 2", "50 % of_it & {more}"]]
    header = ("x", "y", "z")
    assert markdown(header, rows).splitlines()[2] == r"| a\|b | 1 ± 2 | 50 % of_it & {more} |"
    assert markdown(["<script>"], []).splitlines()[0] == "| &lt;script> |"
    assert list(csv.reader(comma_separated(header, rows).splitlines()))[1] == rows[0]
    assert r"50 \% of\_it \& \{more\} \\" in latex(header, rows)
    assert r"1 $\pm$ 2" in latex(header, rows)
    assert r"\textbackslash{}x\textasciicircum{}2 $\lambda$" in latex(["\\x^2 λ"], [])


def page_of(results: list[Result]) -> Page:
    return Page(comparison(results)["comparison.html"].decode())


def test_the_page_shows_names_as_text_and_needs_nothing_from_elsewhere() -> None:
    hostile = replace(RESULTS[0], benchmark=HOSTILE, method=HOSTILE)
    page = page_of([*RESULTS, hostile])
    assert page.tags.count("script") == len(page.scripts) == 3
    assert HOSTILE in page.words
    svg = picture(curves(entries([hostile])), "svg")
    assert HOSTILE not in svg.decode()
    assert HOSTILE in Page(svg.decode()).words  # in the legend
    assert "76.00 ± 1.00" in page.words
    assert page.addresses == ["data:,"]


def test_the_page_draws_means_over_seeds() -> None:
    figures = page_of(RESULTS).figures
    assert list(figures) == ["matrix-0"]
    matrices = {f["choice"]["method-0"]: f["data"][0]["z"] for f in figures["matrix-0"]}
    found = [r.class_il["prototype"].matrix for r in RESULTS if _is_plain(r)]
    assert len(found) == 3
    (axes,) = curves(entries(RESULTS)).axes
    line, _, (bars,) = axes.containers[0]
    for t in range(len(found[0])):
        so_far = [statistics.mean(matrix[t][: t + 1]) for matrix in found]
        mean, deviation = statistics.mean(so_far), statistics.stdev(so_far)
        assert line.get_ydata()[t] == pytest.approx(mean)
        (_, low), (_, high) = bars.get_segments()[t]
        assert (low, high) == pytest.approx((mean - deviation, mean + deviation))
        for k in range(t + 1):
            mean = statistics.mean(matrix[t][k] for matrix in found)
            assert matrices["cclis"][t][k] == pytest.approx(mean)


def _is_plain(result: Result) -> bool:
    return result.method == "cclis" and not result.changed


def test_figures_for_a_paper_are_the_same_every_time() -> None:
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        first, second = (picture(curves(entries(RESULTS)), kind) for _ in range(2))
        assert first == second
        assert first.startswith(start)
    files = comparison(RESULTS)
    svg = files["seq-cifar10-memory-200.svg"].decode()
    assert "cclis (selection random)" in svg
    # The page shows the figure that can be saved.
    assert svg[svg.index("<svg") :] in files["comparison.html"].decode()


def test_other_data_of_the_same_name_is_another_entry() -> None:
    other = replace(RESULTS[0], class_names=["a", "b"], task_sizes=[1, 1])
    again = replace(RESULTS[0], device="another")
    found = entries([RESULTS[0], other, again, RESULTS[0]])
    assert [(e.benchmark, len(e.runs)) for e in found] == [
        *[("seq-cifar10", 2), ("seq-cifar10 (2)", 1)],
    ]


def test_the_papers_number_stands_beside_its_own_head_and_settings_alone() -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in accuracy_table(entries(RESULTS))]
    compared = [row["head"] for row in rows if row["head"].endswith("− the paper")]
    assert compared == ["linear − the paper"] * 3
    unknown = replace(RESULTS[0], changed=None)
    assert len(accuracy_table(entries([unknown]))) == len(unknown.class_il)
    assert entries([replace(RESULTS[0], method="mine")])[0].name == "mine"


def test_programs_can_read_the_numbers() -> None:
    found = comparison(RESULTS)["comparison.csv"].decode()
    rows = list(csv.DictReader(found.splitlines()))
    assert len(rows) == 6
    linear = rows[0]
    assert (linear["method"], linear["head"], linear["runs"]) == ("cclis", "linear", "3")
    assert float(linear["class_il_accuracy"]) == pytest.approx(76)
    assert float(linear["class_il_accuracy_deviation"]) == pytest.approx(1)
    assert float(linear["class_il_accuracy_paper"]) == 74.95
    assert rows[1]["class_il_accuracy_paper"] == ""  # by another head than the paper's
    assert rows[2]["class_il_accuracy_deviation"] == ""  # of a single run
    assert float(linear["train_seconds"]) == pytest.approx(11)
    assert float(linear["peak_memory_bytes"]) > 0


def test_pictures_have_names_of_their_own() -> None:
    names = ("a b", "a-b", "../../etc/passwd", "x" * 300, "…")
    streams = [replace(RESULTS[0], benchmark=name) for name in names]
    pictures = [name for name in comparison(streams) if name.endswith(".svg")]
    assert len(pictures) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9-]{1,90}\.svg", name) for name in pictures)


def test_runs_that_have_not_ended_are_named_and_left_out(tmp_path: Path, capsys) -> None:
    study = tmp_path / "study" / "runs"
    for number in range(3):
        (study / str(number)).mkdir(parents=True)
        (study / f"{number}.log").write_text("a log")
    for number in range(2):
        (study / str(number) / "result.json").write_text(json.dumps(RESULTS[number].to_json()))
    paths = [str(path) for path in sorted(study.iterdir())]
    assert main(["report", *paths, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert f"{study / '2'} holds no finished run" in said
    assert len(said.splitlines()) == 1
    assert len(read_runs([tmp_path / "study"])) == 2
    assert main(["report", str(study / "2"), str(study / "2.log")]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"peak_memory_bytes": None},
        {"class_il": {"linear": {"matrix": [[1, 2], [3]], "accuracy": 1, "forgetting": 1}}},
        {"class_il": {"other": {"matrix": [[1.0]], "accuracy": 1, "forgetting": 1}}},
        {"seconds": 3},
    ],
)
def test_results_of_another_making_get_a_sentence(tmp_path: Path, capsys, change) -> None:
    for number, found in enumerate([RESULTS[0].to_json(), {**RESULTS[1].to_json(), **change}]):
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_runs_are_found_in_folders_and_files(tmp_path: Path, capsys) -> None:
    for number, found in enumerate(RESULTS):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found.to_json()))
    (tmp_path / "one.json").write_text(json.dumps(RESULTS[0].to_json()))
    assert len(read_runs([tmp_path / "runs"])) == 7
    assert len(read_runs([tmp_path / "runs" / "0", tmp_path / "one.json"])) == 2
    assert main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"seq-cifar10-memory-200.{kind}" for kind in ("svg", "png")}
    tables = {
        f"{name}.{kind}" for name in ("comparison", "paired") for kind in ("md", "csv", "tex")
    }
    assert names == {"comparison.html"} | tables | pictures
    # Again: what this wrote is written anew, anything else is left alone.
    (tmp_path / "out" / "comparison.md").write_text("")
    assert main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "comparison.md").read_text()
    assert main(["report", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "runs"), str(tmp_path / "rnus")]) == 2
    assert f"there is no {tmp_path / 'rnus'}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"benchmark": 1}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str, capsys) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError):
        read_runs([tmp_path / "a.json"])
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "holds no finished run" in capsys.readouterr().err
