"""Records: what is written is what is read, also from files of before and of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cclis.engine.records import FORMAT, Epoch
from cclis.errors import InputError
from cclis.evaluation.accuracy import Accuracies
from cclis.methods import make_config
from cclis.runs.records import (
    Evaluation,
    Result,
    Scores,
    changed_settings,
    in_words,
    record_from_json,
    summarise,
)
from cclis.settings import recipe_settings
from tests.report.made import result

EPOCH = Epoch(1, 2, 30, 3.0, {"contrast": 2.0, "distill": 1.0}, 0.1, 1000.0)
HEADS = {"linear": Accuracies([90.0, 80.0], [95.0, 99.0]), "means": Accuracies([1.0], [2.0])}
EVALUATION = Evaluation(1, HEADS, "linear", 9.5, {"kept": [3, 4]})
RESULT = result(
    heads={
        "prototype": Scores([[90.0, None], [70.0, 80.0]], 75.0, 20.0, -20.0),
        "linear": Scores([[80.0, None], [60.0, 70.0]], 65.0, 20.0, -20.0),
    },
    main_head="prototype",
    recipe="seq-cifar10/cclis-200",
    changed={"selection": "random"},
)


def written(record: Epoch | Evaluation | Result) -> dict[str, Any]:
    """A record as a file has it."""
    content: dict[str, Any] = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert content["format"] == FORMAT
    return content


def complaint(read: Callable[[Any, str], Any], content: Any) -> str:
    """What is wrong with a file of this content, or nothing."""
    try:
        read(content, "here.json")
    except InputError as error:
        return str(error)
    return ""


def test_what_is_written_is_read() -> None:
    for record in (EPOCH, EVALUATION, replace(EVALUATION, diagnosis={})):
        assert record_from_json(written(record), "a file") == record
    assert Result.from_json(written(RESULT), "a file") == RESULT
    assert "diagnosis" not in written(replace(EVALUATION, diagnosis={}))


def test_the_main_head_is_the_one_written_wherever_it_stands() -> None:
    assert Result.from_json(written(RESULT), "a file").main_head == "prototype"
    assert RESULT.heads == ["prototype", "linear"]
    assert record_from_json(written(EVALUATION), "a file").main_head == "linear"


def test_records_of_before_name_their_main_head_last() -> None:
    evaluation, ended = written(EVALUATION), written(RESULT)
    for content in (evaluation, ended):
        del content["format"], content["main_head"]
    assert Evaluation.from_json(evaluation, "a file").main_head == "means"
    assert Result.from_json(ended, "a file").main_head == "linear"


def test_an_epoch_of_before_counts_itself_as_a_step() -> None:
    content = written(EPOCH)
    del content["step"]
    assert Epoch.from_json(content, "a file").step == 3


def test_what_a_result_of_before_changed_follows_from_its_config() -> None:
    settings = {**recipe_settings("seq-cifar10/cclis-200"), "selection": "random", "seed": 7}
    content = {**written(RESULT), "config": {**settings, "device": "cuda", "gone": 3}}
    del content["recipe"], content["changed"]
    found = Result.from_json(content, "a file")
    assert (found.recipe, found.changed) == ("seq-cifar10/cclis-200", {"selection": "random"})
    # Written once, it stands, whatever becomes of recipes.
    kept = {**content, "recipe": "seq-cifar10/cclis-200", "changed": {"epochs": 3}}
    assert Result.from_json(kept, "a file").variation == "epochs 3"
    del content["config"]
    assert Result.from_json(content, "a file").changed is None


def test_settings_that_make_another_row() -> None:
    settings = recipe_settings("seq-cifar10/cclis-500")
    settings.pop("method")
    config = make_config("cclis", settings).to_dict()
    assert changed_settings(config) == {}
    other = {**config, "seed": 5, "threads": 3, "distillation": False, "encoder": "resnet34"}
    assert in_words(changed_settings(other)) == "encoder resnet34, distillation false"
    assert changed_settings({**other, "method": "from elsewhere"}) == {}


@pytest.mark.parametrize("record", [EPOCH, EVALUATION, RESULT], ids=["epoch", "eval", "result"])
def test_records_of_a_newer_cclis_are_refused(record: Any) -> None:
    content = {**written(record), "format": FORMAT + 1}
    with pytest.raises(InputError, match=f"here.json is in format {FORMAT + 1}, .* a newer cclis"):
        type(record).from_json(content, "here.json")


@pytest.mark.parametrize("record", [EPOCH, EVALUATION, RESULT], ids=["epoch", "eval", "result"])
@pytest.mark.parametrize("other", [None, 3, "x", [], {}, [3], {"a": 1}], ids=str)
def test_any_damage_gets_a_sentence_with_the_files_name(record: Any, other: Any) -> None:
    read = type(record).from_json
    with pytest.raises(InputError, match=r"here\.json is not the re"):
        read(other, "here.json")
    for key in written(record):
        said = complaint(read, {**written(record), key: other})
        assert said.startswith("here.json is ") or not said


def test_numbers_of_another_shape_are_no_result() -> None:
    for change in (
        {"main_head": "unknown"},
        {"class_il": {}},
        {"task_il": {"linear": written(RESULT)["task_il"]["linear"]}},
        {"class_il": {head: {"matrix": [[1.0], [2.0]]} for head in ("prototype", "linear")}},
    ):
        with pytest.raises(InputError, match=r"here\.json is not the result of a run: "):
            Result.from_json({**written(RESULT), **change}, "here.json")


def test_scores_are_a_lower_triangle_with_its_means() -> None:
    rows = [
        {"linear": Accuracies([90.0], [95.0])},
        {"linear": Accuracies([70.0, 80.0], [93.0, 85.0])},
    ]
    scores = summarise(rows, "class_il")["linear"]
    assert scores == Scores([[90.0, None], [70.0, 80.0]], 75.0, 20.0, -20.0)
    assert summarise(rows, "task_il")["linear"].accuracy == 89.0
    # Where a version did not write a mean, it follows from the matrix.
    assert Scores.from_json({"matrix": scores.matrix, "accuracy": 75.0}) == scores
