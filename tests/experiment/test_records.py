"""A run is as long as somebody takes its records: left early, it resumes to the same bits."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from cclis.engine.records import Epoch
from cclis.experiment.loop import resuming, train, training
from cclis.methods import make_config
from cclis.runs import Run
from cclis.runs.records import Record
from cclis.settings import Config
from tests.conftest import quick

TIMES = ("images_per_second", "seconds")


def config_of(folder: Path, method: str, **settings: Any) -> Config:
    small = {**quick(method), "tasks": [2, 2], "limit": 12, "width": 4, "batch_size": 12}
    small |= {"memory": 0} if method == "joint" else {"memory": 8}
    return make_config(method, {**small, **settings, "output": str(folder)})


def without_times(records: list[Record]) -> list[dict[str, Any]]:
    lines = [record.to_json() for record in records]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def assert_same_end(run: Run, other: Run) -> None:
    assert run.result.class_il == other.result.class_il
    assert without_times(run.records) == without_times(other.records)
    last = run.checkpoints.names[-1]
    first, second = run.checkpoints.load(last)[0], other.checkpoints.load(last)[0]
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert run.checkpoints.names == other.checkpoints.names
    pages = [(each.path / "report.html").stat().st_size for each in (run, other)]
    assert min(pages) > 1000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose records were all taken."""
    return train(config_of(tmp_path_factory.mktemp("whole") / "run", "er"))


def test_records_come_as_they_are_written_down(tmp_path: Path) -> None:
    with training(config_of(tmp_path / "run", "er")) as (run, records):
        taken: list[Record] = []
        for record in records:
            taken.append(record)
            lines = (run.path / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == record.to_json()
            assert len(lines) == len(taken)
            assert not run.ended
    assert run.ended
    assert taken == run.records
    assert [isinstance(record, Epoch) for record in taken] == [True, True, False] * 2


@pytest.mark.parametrize("taken", range(7))
def test_a_run_left_after_any_record_resumes_to_the_same_bits(
    taken: int, whole: Run, tmp_path: Path
) -> None:
    with training(config_of(tmp_path / "run", "er")) as (run, records):
        assert len(list(islice(records, taken))) == min(taken, 6)
    assert not run.ended
    with run.alone():  # nobody works on it any more
        pass
    with resuming(run, run.config) as (_, records):
        left = list(records)
    assert_same_end(run, whole)
    # Nothing of what was evaluated is repeated.
    assert sum(not isinstance(record, Epoch) for record in left) == 2 - taken // 3


@pytest.mark.parametrize("method", ["cclis", "gcr", "joint"])
def test_a_run_left_again_and_again_comes_to_the_same_end(method: str, tmp_path: Path) -> None:
    whole = train(config_of(tmp_path / "whole", method))
    config, times = config_of(tmp_path / "run", method, checkpoint_minutes=0.0), 0
    with training(config) as (run, records):
        next(records)
    while not run.ended:
        with resuming(run, config) as (_, records):
            taken = list(islice(records, 2))
        times += 1
        assert taken or run.ended
    assert times >= 2
    assert_same_end(run, whole)


def test_a_consumer_that_fails_leaves_a_run_to_resume(whole: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "er")
    with pytest.raises(ZeroDivisionError), training(config) as (run, records):
        1 / next(records).task
    with resuming(run, config) as (_, records):
        assert len(list(records)) == 6
    assert_same_end(run, whole)
