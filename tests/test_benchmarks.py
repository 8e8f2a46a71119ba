"""That what measures the methods' speed runs. How fast they are, no test says."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "methods.py"


def test_methods_are_measured_relative_to_er(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--methods", "icarl", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    said = [line.split()[0] for line in lines if "× ER" in line]
    assert said == ["er", "icarl"]
    (summary,) = tmp_path.iterdir()
    found = json.loads(summary.read_text())["methods"]
    for method in said:
        numbers, tasks = found[method], found[method]["task_seconds"]
        assert len(tasks) == 5
        assert 0 <= numbers["selection_seconds"] < min(tasks)
        assert numbers["run_seconds"] == pytest.approx(sum(tasks))
        expected = numbers["run_seconds"] / found["er"]["run_seconds"]
        assert numbers["times_er"] == pytest.approx(expected)
        # All that a task costs are its steps over 50 epochs, and the choice of what to keep.
        training = tasks[-1] - numbers["selection_seconds"]
        assert numbers["images_per_second"] == pytest.approx(50 * 10_000 / training)
