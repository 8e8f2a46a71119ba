"""That what measures the methods' speed runs. How fast they are, no test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "methods.py"


def test_methods_are_measured_relative_to_er(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--quick", "--methods", "icarl", "--out", tmp_path]
    # Its threads would wait for those of other tests, for minutes.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    said = [line.split()[0] for line in done.stdout.splitlines() if "× ER" in line]
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
