"""Runs and learners that an older package wrote are read, and go on to the same end.

`tests/fixtures/make.py` made them, with the package of commit d376e8e. On the machine that made
them all bits must be the same; elsewhere, numbers must be close.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from cclis import ContinualLearner
from cclis.cli import main
from tests.fixtures.make import METHODS, TARGET, fingerprint, matrices, tensors_in

TOLERANCE = 1e-4
TIMES = ("images_per_second", "seconds")
SAMPLES = 30
"""Test samples of a task."""
DIFFERENCES = ("forgetting", "backward_transfer")
"""Between accuracies, so that they may be further apart."""


@pytest.fixture(params=METHODS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the fixtures of a method."""
    return Path(shutil.copytree(TARGET / request.param, tmp_path / request.param))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def exact(folder: Path) -> bool:
    """Whether this is such a machine as the fixtures were made on."""
    return bool(read(folder / "expected.json")["machine"] == fingerprint())


def assert_same_numbers(found: Any, expected: Any, bits: bool) -> None:
    """All numbers, or elsewhere accuracies at most one test sample apart; there may be more."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if bits or key not in DIFFERENCES:
                assert_same_numbers(found[key], value, bits)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, another in zip(found, expected, strict=True):
            assert_same_numbers(one, another, bits)
    elif expected is None or bits:
        assert found == expected
    else:
        assert abs(found - expected) <= 100 / SAMPLES + 1e-9


def assert_same_tensors(found: list[dict[str, Any]], expected: list[dict[str, Any]], bits: bool):
    """Every tensor that is expected is there, under whatever name; there may be more."""
    if bits:
        shown = [
            Counter((t["dtype"], *t["shape"], t["sha256"]) for t in s) for s in (found, expected)
        ]
        assert not shown[1] - shown[0]
        return
    left = list(found)
    for tensor in expected:
        same = [t for t in left if all(t[key] == tensor[key] for key in ("dtype", "shape"))]
        assert same, f"no tensor of {tensor['dtype']} and shape {tensor['shape']} is left"
        nearest = min(same, key=lambda t: abs(t["sum"] - tensor["sum"]))
        assert math.isclose(nearest["sum"], tensor["sum"], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        left.remove(nearest)


def assert_same_probabilities(found: Any, expected: Any, bits: bool) -> None:
    difference = np.abs(np.asarray(found, dtype=np.float64) - np.asarray(expected))
    assert difference.max() <= (0 if bits else TOLERANCE)


def records(run: Path) -> list[dict[str, Any]]:
    """What was logged, without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    return [{key: value for key, value in r.items() if key not in TIMES} for r in logged]


def test_a_finished_run_is_read_reported_and_evaluated_again(kept: Path) -> None:
    run = kept / "finished"
    before = read(run / "result.json")
    assert main(["train", "--resume", str(run)]) == 0  # which has ended already
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert kept.name in page
    again = kept / "again.json"
    assert main(["evaluate", str(run), "--output", str(again)]) == 0
    assert_same_numbers(matrices(read(again)), matrices(before), exact(kept))
    assert read(run / "result.json") == before


def test_finished_runs_are_compared(tmp_path: Path) -> None:
    runs = [str(TARGET / method / "finished") for method in METHODS]
    assert main(["report", *runs, "--output", str(tmp_path / "comparison")]) == 0
    assert any((tmp_path / "comparison").iterdir())


def test_a_stopped_run_goes_on_to_the_same_end(kept: Path) -> None:
    run, expected, bits = kept / "stopped", read(kept / "expected.json"), exact(kept)
    assert not (run / "result.json").exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_numbers(matrices(read(run / "result.json")), expected["resumed"], bits)
    tensors = tensors_in(run / "checkpoints" / "task-2.safetensors")
    assert_same_tensors(tensors, expected["tensors"], bits)
    # A run that was never stopped logged the same.
    logged, uninterrupted = records(run), records(kept / "finished")
    assert len(logged) == len(uninterrupted)
    for found, other in zip(logged, uninterrupted, strict=True):
        assert found.keys() >= other.keys()
        if bits:
            assert_same_numbers(found, other, bits)


def test_a_learner_predicts_and_learns_on(kept: Path) -> None:
    expected, bits = read(kept / "expected.json"), exact(kept)
    digits = load_file(TARGET / "digits.safetensors")
    test = digits["test.images"]
    learner = ContinualLearner.load(kept / "learner.cclis")
    assert learner.classes == [0, 1, 2, 3]
    assert_same_probabilities(learner.predict_proba(test), expected["probabilities"], bits)
    certain = np.ptp(np.sort(expected["probabilities"], axis=1)[:, -2:], axis=1) > 2 * TOLERANCE
    same = learner.predict(test) == np.asarray(expected["predictions"])
    assert same[certain | bits].all()
    learner.learn(digits["2.images"], digits["2.labels"])
    assert learner.classes == [0, 1, 2, 3, 4, 5]
    found = learner.predict_proba(test)
    assert_same_probabilities(found, expected["probabilities_after_another_task"], bits)
