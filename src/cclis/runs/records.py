"""The records of a run: a line of metrics.jsonl for every evaluation, and result.json."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cclis.engine.records import FORMAT, Epoch, reading
from cclis.errors import InputError
from cclis.evaluation.accuracy import Accuracies
from cclis.functional.metrics import average_accuracy, average_forgetting, backward_transfer
from cclis.methods import recorded_config
from cclis.settings import names_of, recipe_for, recipe_settings

SCENARIOS = {"class_il": "Class-IL", "task_il": "Task-IL"}
"""Accuracy among all classes seen, and among those of the sample's task: key and name."""
Matrix = list[list[float | None]]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation after a task.

    Attributes:
        task: The task just learned, counted from 0.
        accuracies: By head.
        main_head: The head that `predict` uses.
        seconds: How long the task took to learn.
        diagnosis: What the method measured of the samples it selected; may be empty.
    """

    task: int
    accuracies: dict[str, Accuracies]
    main_head: str
    seconds: float
    diagnosis: dict[str, Any] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """The main head's Class-IL accuracy, the mean over the tasks so far."""
        return statistics.fmean(self.accuracies[self.main_head].class_il)

    def to_json(self) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        record = {
            "format": FORMAT,
            "task": self.task,
            "evaluation": {head: dataclasses.asdict(a) for head, a in self.accuracies.items()},
            "main_head": self.main_head,
            "seconds": self.seconds,
        }
        return record | ({"diagnosis": self.diagnosis} if self.diagnosis else {})

    @classmethod
    def from_json(cls, record: Any, source: str | Path) -> Evaluation:
        """Read a line of metrics.jsonl; errors name the source."""
        with reading(record, source, "the record of an evaluation"):
            return cls(
                task=int(record["task"]),
                accuracies={
                    str(head): Accuracies(*(_numbers(accuracies[key]) for key in SCENARIOS))
                    for head, accuracies in record["evaluation"].items()
                },
                main_head=_main_head(record, record["evaluation"]),
                seconds=float(record["seconds"]),
                diagnosis=dict(record.get("diagnosis", {})),
            )


Record = Epoch | Evaluation


def record_from_json(record: Any, source: str | Path) -> Record:
    """Read a line of metrics.jsonl, whichever it is."""
    kind = Evaluation if isinstance(record, Mapping) and "evaluation" in record else Epoch
    return kind.from_json(record, source)


@dataclass(frozen=True)
class Scores:
    """An accuracy matrix and what sums it up.

    Attributes:
        matrix: In row t, column k: accuracy on task k after task t; None where k > t.
        accuracy: Mean of the last row.
        forgetting: Mean over the old tasks of the best accuracy before the last task less that
            after it.
        backward_transfer: Mean over the old tasks of the last accuracy less the first.
    """

    matrix: Matrix
    accuracy: float
    forgetting: float
    backward_transfer: float

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Scores:
        """From the accuracies on the tasks so far, after each task."""
        matrix = [[*row, *[None] * (len(rows) - len(row))] for row in rows]
        return cls(
            matrix,
            average_accuracy(matrix),
            average_forgetting(matrix),
            backward_transfer(matrix),
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Scores:
        """As a result has them; old ones may lack a mean."""
        rows = [[float(v) for v in row[: t + 1]] for t, row in enumerate(record["matrix"])]
        scores = cls.of(rows)
        means = ("accuracy", "forgetting", "backward_transfer")
        return cls(scores.matrix, *(float(record.get(k, getattr(scores, k))) for k in means))


@dataclass(frozen=True)
class RunScores:
    """The scores of a run, as an evaluation of its checkpoints gives them.

    Attributes:
        benchmark: The benchmark.
        method: The method.
        memory: How many samples could be kept.
        seed: The seed of everything random.
        main_head: The head that `predict` uses.
        class_il: Scores by head, all classes competing.
        task_il: The same among the classes of a sample's task.
    """

    benchmark: str
    method: str
    memory: int
    seed: int
    main_head: str
    class_il: dict[str, Scores]
    task_il: dict[str, Scores]

    def scores(self, scenario: str) -> dict[str, Scores]:
        """By head; the scenario is a key of `SCENARIOS`."""
        scores: dict[str, Scores] = getattr(self, scenario)
        return scores

    def number(self, scenario: str, head: str, key: str) -> float:
        """A mean, such as the `accuracy`, of a head."""
        number: float = getattr(self.scores(scenario)[head], key)
        return number

    @property
    def heads(self) -> list[str]:
        """The main head, then the others."""
        others = [head for head in self.class_il if head != self.main_head]
        return [self.main_head, *reversed(others)]

    def to_json(self) -> dict[str, Any]:
        """What `cclis evaluate` writes."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Seconds:
    """Seconds spent on a run, over all processes that worked on it.

    Attributes:
        train: On learning.
        total: In all.
        compile: On compiling, within the others.
        evaluation: On evaluations; 0 in old files, which do not say.
    """

    train: float
    total: float = 0.0
    compile: float = 0.0
    evaluation: float = 0.0

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Seconds:
        """As a result has them."""
        kinds = [field.name for field in dataclasses.fields(cls) if field.name in record]
        return cls(**{kind: float(record[kind]) for kind in kinds})


@dataclass(frozen=True)
class Result(RunScores):
    """The result of a run: result.json.

    Attributes:
        recipe: The recipe it took its settings from, such as seq-cifar10/er-200, if any.
        changed: Settings other than in the recipe for its benchmark, method and memory; None where
            an old file does not tell.
        task_sizes: How many classes each task has.
        class_names: The classes in order of arrival.
        seconds: How long it took.
        images_per_second: Through the training steps.
        peak_memory_bytes: Of the GPU, or of the process where there is none.
        device: In words.
        versions: Of what can change a number.
        date: When it ended, UTC.
        config: Every setting but those that say where files lie.
    """

    recipe: str | None
    changed: dict[str, Any] | None
    task_sizes: list[int]
    class_names: list[str]
    seconds: Seconds
    images_per_second: float
    peak_memory_bytes: int
    device: str
    versions: dict[str, str]
    date: str
    config: dict[str, Any]

    @property
    def variation(self) -> str:
        """What the run has other than its recipe, as `name value` parts; "" for nothing."""
        return in_words(self.changed or {})

    def with_head(self, head: str) -> Result:
        """The same with one head alone."""
        class_il, task_il = {head: self.class_il[head]}, {head: self.task_il[head]}
        return dataclasses.replace(self, main_head=head, class_il=class_il, task_il=task_il)

    @classmethod
    def from_json(cls, record: Any, source: str | Path) -> Result:
        """Read result.json; errors name the source."""
        with reading(record, source, "the result of a run"):
            class_il, task_il = (
                {str(head): Scores.from_json(scores) for head, scores in record[scenario].items()}
                for scenario in SCENARIOS
            )
            if class_il.keys() != task_il.keys():
                raise ValueError("class_il and task_il do not have the same heads")
            recipe, changed = _origin(record)
            return cls(
                benchmark=str(record["benchmark"]),
                method=str(record["method"]),
                memory=int(record["memory"]),
                seed=int(record["seed"]),
                main_head=_main_head(record, class_il),
                class_il=class_il,
                task_il=task_il,
                recipe=recipe,
                changed=changed,
                task_sizes=[int(size) for size in record.get("task_sizes", ())],
                class_names=[str(name) for name in record.get("class_names", ())],
                seconds=Seconds.from_json(record["seconds"]),
                images_per_second=float(record.get("images_per_second", 0)),
                peak_memory_bytes=int(record["peak_memory_bytes"]),
                device=str(record.get("device", "")),
                versions=dict(record.get("versions", {})),
                date=str(record.get("date", "")),
                config=dict(record.get("config", {})),
            )


def summarise(rows: Sequence[Mapping[str, Accuracies]], scenario: str) -> dict[str, Scores]:
    """Scores by head, from the accuracies of each head after every task."""
    return {head: Scores.of([getattr(row[head], scenario) for row in rows]) for head in rows[0]}


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that are other than in the recipe for its row, and make it another row.

    The row is the benchmark, method and memory. A setting that is not given counts as unchanged.
    """
    row = [settings[key] for key in ("benchmark", "method", "memory")]
    recipe = recipe_settings(recipe_for(*row))
    try:
        usual = recorded_config({**recipe, "method": settings["method"]})
    except InputError:
        return {}  # a method that is not ours and that nobody has named
    learning = names_of(type(usual), kind="learning")
    return {k: v for k, v in settings.items() if k in learning and getattr(usual, k) != v}


def in_words(changed: Mapping[str, Any]) -> str:
    """Changed settings as a text: `selection random, distillation false`."""
    return ", ".join(f"{name} {json.dumps(v).strip(chr(34))}" for name, v in changed.items())


def _origin(record: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The recipe and the changed settings; of a result that does not have them, from its config."""
    if "changed" in record:
        changed = record["changed"]
        return record.get("recipe"), None if changed is None else dict(changed)
    if "config" not in record:
        return None, None
    row = {key: record[key] for key in ("benchmark", "method", "memory")}
    return recipe_for(**row), changed_settings({**record["config"], **row})


def _main_head(record: Mapping[str, Any], heads: Mapping[str, Any]) -> str:
    """The main head; records that do not say which name it last."""
    head = record.get("main_head", list(heads)[-1])
    if head not in heads:
        raise ValueError(f"it has no numbers of its main head {head}")
    return str(head)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]
