"""`cclis study`: each study at its smallest, what is repeated, what fails, the paper's grids."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from cclis.cli import main
from cclis.progress import QUIET, Progress
from cclis.report.study import Row, study_table
from cclis.runs.checkpoints import Checkpoints
from cclis.runs.directory import Run
from cclis.study.run import SCALES, STUDIES, Planned, plan, rows_of
from cclis.study.running import run_all
from tests.conftest import METHODS
from tests.report.made import accuracy, result

FLAGS = ("--scale", "smoke", "--device", "cpu", "--jobs", "2")


def study(name: str, folder: Path, *flags: str) -> int:
    return main(["study", name, "--output", str(folder), *FLAGS, *flags])


def planned(name: str, scale: str = "paper", **asked: Any) -> list[Planned]:
    found = STUDIES[name]
    given = {"benchmarks": found.benchmarks, "seeds": (0,), "folder": Path("f"), **asked}
    return plan(found, scale=SCALES[scale], **given)


@cache
def class_il(name: str) -> dict[tuple[str, int, str], float | None]:
    """The paper's numbers by benchmark, memory and variant."""
    runs = planned(name)
    rows = rows_of(name, runs, {run.name: "not run" for run in runs})
    score = ("class_il", "forgetting" if name == "table2" else "accuracy")
    published = {(row.benchmark, row.memory, row.variant): row.published(*score) for row in rows}
    return {key: found[0] if found else None for key, found in published.items()}


def test_every_study_yields_a_complete_page_and_repeats_nothing(tmp_path: Path, capsys) -> None:
    # One memory is enough, but for a figure along it; other tests look at the grids.
    memories = {name: found.memories[: 2 if found.axis else 1] for name, found in STUDIES.items()}

    def narrowed(name: str) -> int:
        return study(name, tmp_path, "--memory", *map(str, memories[name]))

    for name in STUDIES:
        assert narrowed(name) == 0, capsys.readouterr().err
    ended = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    for name, found in STUDIES.items():
        capsys.readouterr()
        assert narrowed(name) == 0
        rows = len(memories[name]) * len(found.rows)
        assert f"{rows} runs, {rows} of them finished" in capsys.readouterr().err
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert found.place in page
        assert "failed" not in page
        links = re.findall(r'(?:href|src)="([^"#]+)"', page)
        links.remove("data:,")  # no icon, which a browser would ask for
        assert len(set(links)) == rows
        assert all((tmp_path / unquote(link)).is_file() for link in links)
        drawn = found.maps or found.axis is not None
        assert ("<svg" in page) == drawn
        with (tmp_path / f"{name}.csv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert len(table) == rows
        for row in table:
            assert (row["runs"], row["failed"]) == ("1", "0")
            for scenario, key in found.scores:
                assert -100 <= float(row[f"{scenario}_{key}"]) <= 100
                assert row[f"{scenario}_{key}_deviation"] == ""  # of a single run
        text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        assert all(f"| {variant.name} |" in text for variant in found.rows)
        assert (tmp_path / f"{name}.tex").read_text().count(r"\\") == rows + 1
        pictures = {path.suffix for path in tmp_path.glob(f"{name}.[ps][nv]g")}
        assert pictures == ({".svg", ".png"} if drawn else set())
    assert ended == {path: path.stat().st_mtime_ns for path in ended}

    # Runs that differ only after the first task learned it once.
    runs = planned("buffers", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    runs = [run for run in runs if run.config.memory in memories["buffers"]]
    own = [run for run in runs if Run.open(run.path).config.start_from is None]
    assert len(own) == 1
    assert study("tsne", tmp_path, "--scale", "short", "--benchmark", "split-digits") == 2
    error = capsys.readouterr().err
    assert "was begun with" in error
    assert "width 4, not 64" in error


def test_a_failed_run_is_shown_and_the_others_go_on(tmp_path: Path, capsys) -> None:
    co2l, cclis = planned("tsne", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    co2l.path.mkdir(parents=True)
    (co2l.path / "config.yaml").write_text("no settings")
    assert study("tsne", tmp_path) == 1
    error = capsys.readouterr().err
    assert f"failed: {co2l.name}: {co2l.path / 'config.yaml'} must hold settings" in error
    assert "Traceback" not in error
    page = (tmp_path / "tsne.html").read_text(encoding="utf-8")
    assert "1 run failed" in page
    assert "must hold settings" in page
    assert cclis.finished
    with (tmp_path / "tsne.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["class_il_accuracy"] == "", row["runs"], row["failed"]) for row in rows] == [
        *[(True, "0", "1"), (False, "1", "0")],
    ]
    # Once it is out of the way, it is run.
    (co2l.path / "config.yaml").unlink()
    assert study("tsne", tmp_path) == 0
    # A result that is none is written again, from the checkpoints.
    (co2l.path / "result.json").write_text("{}")
    assert study("tsne", tmp_path) == 0
    assert co2l.finished


def test_why_a_run_failed_is_said_by_itself_in_one_line(tmp_path: Path) -> None:
    co2l, _ = planned("tsne", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    co2l.path.mkdir(parents=True)
    (co2l.path / "config.yaml").write_text("method: [\nseed: 0")
    co2l.log.symlink_to("/dev/null")  # others may write there as well
    failed = run_all([co2l], [co2l], 1, QUIET)
    assert re.fullmatch(r"cannot read [^\n^]+ but got '<stream end>'[^\n^]+", failed[co2l.name])


def test_a_run_that_another_process_ends_has_not_failed(tmp_path: Path) -> None:
    co2l, _ = planned("tsne", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    said = []

    class Meanwhile(Progress):
        def say(self, text: str) -> None:
            said.append(text)
            if text.startswith("failed"):
                aside.rename(co2l.path / "result.json")

    co2l.path.parent.mkdir()
    assert run_all([co2l], [co2l], 1, QUIET) == {}
    aside = (co2l.path / "result.json").rename(tmp_path / "aside")
    with Run.open(co2l.path).alone():
        assert run_all([co2l], [co2l], 1, Meanwhile(quiet=True)) == {}
    assert f"another process is working on {co2l.path} " in said[-1]


def test_a_map_that_cannot_be_drawn_does_not_break_the_page(tmp_path: Path) -> None:
    assert study("tsne", tmp_path) == 0
    assert "no map" not in (tmp_path / "tsne.html").read_text(encoding="utf-8")
    co2l, cclis = planned("tsne", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    (co2l.path / "analysis.safetensors").unlink()
    (cclis.path / "analysis.safetensors").write_text("nothing")
    assert study("tsne", tmp_path) == 0
    assert (tmp_path / "tsne.html").read_text(encoding="utf-8").count("no map") == 2


def test_first_tasks_of_runs_that_failed_are_not_taken_over(tmp_path: Path) -> None:
    runs = planned("ablation-is-prd", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    assert study("ablation-is-prd", tmp_path, "--jobs", "1") == 0
    for run in runs[1:]:
        for path in sorted(run.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    (runs[0].path / "config.yaml").write_text("no settings")
    (runs[0].path / "result.json").unlink()
    assert study("ablation-is-prd", tmp_path, "--jobs", "1") == 1
    starts = [Run.open(run.path).config.start_from for run in runs[1:]]
    assert starts == [None, str(runs[1].path), str(runs[1].path)]
    assert all(run.finished for run in runs[1:])


def test_an_interrupted_run_goes_on(tmp_path: Path, capsys) -> None:
    assert study("tsne", tmp_path) == 0
    _, run = planned("tsne", "smoke", benchmarks=["split-digits"], folder=tmp_path)
    before = run.result
    for path in [run.path / "result.json", *(run.path / "checkpoints").glob("task-[34]*")]:
        path.unlink()
    capsys.readouterr()
    assert study("tsne", tmp_path, "--dry_run") == 0
    assert re.search(rf"interrupted +{run.name}\n", capsys.readouterr().err)
    assert not run.finished
    assert study("tsne", tmp_path) == 0
    assert "resumed after task 3" in run.log.read_text()
    assert run.result.class_il == before.class_il


def test_a_signal_stops_the_runs_which_are_saved(tmp_path: Path) -> None:
    code = "from cclis.cli import entry; entry()"
    flags = ["--scale", "short", "--benchmark", "split-digits", "--seeds", "0", "--device", "cpu"]
    command = [sys.executable, "-c", code, "study", "tsne", *flags, "--output", str(tmp_path)]
    command += ["--jobs", "2"]
    # A group of its own, as in a terminal, which sends SIGHUP to all of it as it closes.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    runs = planned("tsne", "short", benchmarks=["split-digits"], folder=tmp_path)
    while process.poll() is None and not all((r.path / "metrics.jsonl").exists() for r in runs):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGHUP)
    _, error = process.communicate()
    assert process.returncode == 75, error
    assert "the same command resumes it" in error
    for run in runs:
        assert not run.finished
        assert Checkpoints(run.path / "checkpoints").names
        with Run.open(run.path).alone():  # nobody works on it any more
            pass


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required"),
        (["tabel1"], "unknown study 'tabel1'. Did you mean 'table1'?"),
        (["tsne", "--scale", "smoky"], "Expected one of 'paper', 'short', 'smoke'"),
        (["tsne", "--benchmark", "npz"], "npz needs --data: your arrays"),
        (["tsne", "--benchmark", "npz", "--data", "none.npz"], "none.npz does not exist"),
        (
            ["tsne", "--benchmark", "npz", "split-digits", "--data", "file"],
            "--data is that of npz: it needs a study of its own",
        ),
        (["methods", *FLAGS, "--method", "err"], "Did you mean 'er'?"),
        (["lambda", *FLAGS, "--method", "er"], "unknown method of lambda 'er'. Known: cclis."),
        (["methods", *FLAGS, "--method", "er", "er"], "name each method once, not er er"),
        (["methods", *FLAGS, "--memory", "5", "5"], "name each memory once, not 5 5"),
        (["methods", *FLAGS, "--memory", "-5"], "memory must be 0 or more, not -5"),
        (["methods", *FLAGS, "--tasks", "many"], "--tasks: Expected"),
        (["methods", *FLAGS, "--tasks", "12"], "10 classes cannot be split into 12 tasks"),
        (["tsne", "--benchmark", "npz", "--data", "file"], "file is not a .npz file"),
        (["tsne", "--benchmark", "seq-cifar11"], "Did you mean 'seq-cifar10'?"),
        (["tsne", "--benchmark", "split-digits", "split-digits"], "name each benchmark once"),
        (["tsne"], "the data of seq-cifar10 is not in"),
        (["tsne", "--scale", "smoke", "--device", "tpu"], "device must be one of auto, cpu, cuda"),
        (["tsne", *FLAGS, "--seeds", "one"], "--seeds"),
        (["tsne", *FLAGS, "--seeds", "-1"], "seeds must be 0 or more, not -1"),
        (["tsne", *FLAGS, "--seeds", "1", "1"], "name each seed once, not 1 1"),
        (["tsne", *FLAGS, "--jobs", "0"], "jobs must be at least 1, not 0"),
        (["tsne", *FLAGS, "--jobs", "two"], "--jobs: Expected"),
        (["tsne", *FLAGS, "--output", "file"], "file is a file"),
        (["tsne", *FLAGS, "--output", "file/below"], "cannot make"),
        (["tsne", *FLAGS, "--output", "."], "holds file, which no study has written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_a_sentence(arguments, part, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CCLIS_DATA", str(tmp_path / "datasets"))
    (tmp_path / "file").write_text("")
    assert main(["study", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("cclis: error: ")
    assert part in error
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_what_would_be_run_is_said_without_the_data(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CCLIS_DATA", str(tmp_path / "datasets"))
    flags = ["--dry_run", "--output", str(tmp_path / "study")]
    assert main(["study", "lambda", *flags]) == 0
    said = capsys.readouterr().err
    assert "new          seq-cifar10-cclis-200-distill_weight-0.1-seed0" in said
    assert list(tmp_path.iterdir()) == []


def test_the_grids_are_those_of_the_paper() -> None:
    eight = ["er", "icarl", "gem", "gss", "der", "co2l", "gcr", "cclis"]
    for name in ("table1", "table2"):
        runs = planned(name)
        assert len(runs) == 8 * 2 * 3 - 2  # the paper has no GEM on Tiny-ImageNet
        assert [run.config.method for run in runs[:8]] == eight
        assert {run.config.memory for run in runs} == {200, 500}

    switches = ("selection", "importance_sampling", "distillation")

    def settings(name: str, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(getattr(run.config, n) for n in names) for run in planned(name)]

    assert settings("ablation-is-prd", "memory", *switches) == [
        (200, "random", True, False),
        (200, "proposal", True, False),
        (200, "random", True, True),
        (200, "proposal", True, True),
    ]
    assert settings("ablation-rbs", "memory", *switches) == [
        (memory, "proposal", weights, False) for memory in (200, 500) for weights in (False, True)
    ]
    assert sorted({run.config.memory for run in planned("buffers")}) == [
        *[50, 100, 200, 300, 400, 500],
    ]
    assert settings("backbones", "memory", "encoder", "selection", "distillation") == [
        (memory, f"resnet{depth}", *both)
        for memory in (100, 300)
        for depth in (18, 34, 50)
        for both in (("random", False), ("proposal", True))
    ]
    assert settings("lambda", "memory", "distill_weight") == [
        (200, weight) for weight in (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)
    ]
    assert settings("losses", "benchmark", "memory", "method") == [
        (benchmark, memory, method)
        for benchmark in ("seq-cifar10", "seq-cifar100")
        for memory in (200, 500)
        for method in ("co2l", "cclis")
    ]
    assert [run.config.method for run in planned("tsne")] == ["co2l", "cclis"]


def test_any_methods_are_compared_with_any_memory(tmp_path: Path) -> None:
    flags = ("--method", "joint", "derpp", "er", "--memory", "20", "40")
    assert study("methods", tmp_path, *flags) == 0
    with (tmp_path / "methods.csv").open(encoding="utf-8") as file:
        rows = [(row["memory"], row["variant"]) for row in csv.DictReader(file)]
    # In the order they were named; what keeps nothing stands there once.
    assert rows == [("0", "joint"), ("20", "DER++"), ("20", "ER"), ("40", "DER++"), ("40", "ER")]
    assert {variant.method for variant in STUDIES["methods"].rows} == set(METHODS)


def test_methods_are_compared_on_own_data(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 12)
    images = rng.integers(0, 256, (72, 8, 8, 1), dtype=np.uint8)
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez("mine.npz", **arrays)
    own = ("--method", "er", "finetune", "--benchmark", "npz", "--memory", "20", "--tasks", "3")
    folder = tmp_path / "study"
    assert study("methods", folder, *own, "--data", "mine.npz") == 0
    names = {path.parent.name for path in folder.glob("runs/*/result.json")}
    assert names == {"npz-mine-er-20-tasks-3-seed0", "npz-mine-finetune-0-tasks-3-seed0"}
    assert all(len(Run.open(folder / "runs" / name).result.task_sizes) == 3 for name in names)
    # Of these the paper has no numbers.
    header = (folder / "methods.md").read_text(encoding="utf-8").splitlines()[0]
    assert header == "| benchmark | memory | variant | head | Class-IL | Task-IL | runs |"
    assert "paper's number" not in (folder / "methods.html").read_text(encoding="utf-8")
    # Other data of the same name are not what has been learned.
    (tmp_path / "other").mkdir()
    np.savez("other/mine.npz", **arrays)
    capsys.readouterr()
    assert study("methods", folder, *own, "--data", "other/mine.npz") == 2
    error = capsys.readouterr().err
    assert "choose another --output" in error
    assert "was begun with data " in error
    assert study("methods", folder, *own, "--data", str(tmp_path / "mine.npz")) == 0
    assert "2 of them finished" in capsys.readouterr().err


def test_photos_of_any_size_are_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, label, number in product(("train", "test"), "abcd", range(3)):
        pixels = rng.integers(0, 256, (9 + number, 8, 3), dtype=np.uint8)
        path = tmp_path / "photos" / split / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    flags = ("--method", "er", "--benchmark", "image-folder", "--data", str(tmp_path / "photos"))
    folder = tmp_path / "study"
    assert study("methods", folder, *flags, "--memory", "8", "--image_size", "8") == 0
    assert [path.parent.name for path in folder.glob("runs/*/result.json")] == [
        "image-folder-photos-er-8-image_size-8-seed0"
    ]


def test_runs_in_common_have_one_name_and_the_recipe_is_untouched() -> None:
    cifar = ["seq-cifar10"]
    names = {name: [run.name for run in planned(name, benchmarks=cifar)] for name in STUDIES}
    assert "seq-cifar10-cclis-200-seed0" in names["table1"]
    assert "seq-cifar10-cclis-200-seed0" in names["lambda"]  # λ = 0.6
    assert "seq-cifar10-cclis-200-distill_weight-0.3-seed0" in names["lambda"]
    assert set(names["ablation-is-prd"]) < set(names["buffers"])
    assert names["table1"] == names["table2"]
    assert all(len(set(found)) == len(found) for found in names.values())
    epochs = {}
    for scale in SCALES:
        er, *_, cclis = planned("table1", scale, benchmarks=cifar)
        epochs[scale] = (
            er.config.epochs,
            cclis.config.first_epochs,
            cclis.config.epochs,
        )
    assert epochs == {"paper": (50, 500, 100), "short": (10, 50, 20), "smoke": (1, 1, 1)}


def test_the_papers_numbers_stand_beside_the_rows() -> None:
    for name in set(STUDIES) - {"lambda", "methods"}:
        assert None not in class_il(name).values(), name
    cifar = "seq-cifar10"
    neither, sampled = "w/o IS and PRD", "w/ IS only"
    assert class_il("table1")["seq-tinyimagenet", 500, "GCR"] == 19.66
    assert class_il("table2")[cifar, 200, "CCLIS"] == 22.59
    assert class_il("ablation-is-prd")[cifar, 200, sampled] == 58.37
    # For the same settings, Tables 4 and 9 print other numbers than Tables 3 and 7.
    assert class_il("ablation-rbs")[cifar, 200, "IS"] == 57.24
    assert class_il("ablation-rbs")[cifar, 500, "RBS only"] == 67.50
    assert class_il("buffers")[cifar, 500, neither] == 68.11
    assert class_il("losses")[cifar, 500, "symmetric prototype NCE (CCLIS)"] == 68.23
    asymmetric = class_il("losses")["seq-cifar100", 200, "asymmetric supervised contrast (Co2L)"]
    assert asymmetric == 25.99
    assert class_il("backbones")[cifar, 300, "ResNet-50, CCLIS"] == 75.92
    assert class_il("backbones")[cifar, 100, f"ResNet-34, {neither}"] == 46.43
    assert list(class_il("lambda").values()) == [58.37, None, None, 74.95, None, None]


def test_the_head_of_the_papers_protocol_is_the_one_compared() -> None:
    def head(*heads: str) -> str:
        run = result(heads=dict.fromkeys(heads, accuracy(50.0)))
        return Row("b", 1, "v", {"run": run}, {}, {}).head

    assert head("linear", "linear_paper", "means", "prototype") == "linear_paper"
    assert head("linear", "means", "prototype") == "linear"
    assert head("linear", "means", "classifier") == head("classifier") == "classifier"
    assert Row("b", 1, "v", {}, {"run": "why"}, {}).head == "–"


def test_the_papers_numbers_stand_beside_ours_where_it_has_any() -> None:
    run = result(heads={"linear": accuracy(70.0)})
    printed = {"class_il": {"accuracy": [65.5, 1.0]}}
    rows = [Row("b", 1, "v", {"r": run}, {}, printed), Row("b", 1, "w", {}, {"r": "why"}, {})]
    header, first, second = study_table(rows, STUDIES["methods"].scores)
    assert header[4:] == ["Class-IL", "paper", "Task-IL", "runs"]
    assert first[4:] == ["70.00", "65.50 ± 1.00 (+4.50)", "70.00", "1"]
    assert second[4:] == ["–", "–", "–", "0 of 1"]
