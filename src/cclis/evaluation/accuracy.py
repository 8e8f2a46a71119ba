"""Accuracy on every task seen so far, with and without knowing the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.engine.inference import Inference
from cclis.evaluation.heads import View, fit, heads_for
from cclis.nn.network import Representation
from cclis.progress import QUIET, Progress
from cclis.settings import Options


@dataclass(frozen=True)
class Accuracies:
    """Per cent right on each task seen so far.

    Attributes:
        class_il: Among all classes seen.
        task_il: Among the classes of the sample's task.
    """

    class_il: list[float]
    task_il: list[float]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How a network did on all tasks seen so far.

    Attributes:
        accuracies: By head.
        predicted: By head, the class that each test sample was taken for, int64 (N,).
        test: The test samples of all tasks, (N,).
        represented: What the network makes of them, (N, ...).
    """

    accuracies: dict[str, Accuracies]
    predicted: dict[str, Tensor]
    test: ImageSet
    represented: Representation


def accuracies(
    scores: Sequence[Tensor], labels: Sequence[Tensor], task_sizes: Sequence[int]
) -> Accuracies:
    """Class-IL and Task-IL accuracy.

    Args:
        scores: For each task, the scores of all seen classes for its test samples, (N_k, C).
        labels: For each task, the classes of its test samples, (N_k,).
        task_sizes: How many classes each task brought.
    """
    class_il, task_il = [], []
    first = 0
    for score, label, size in zip(scores, labels, task_sizes, strict=True):
        within = score[:, first : first + size].argmax(dim=1) + first
        class_il.append(_percent(score.argmax(dim=1) == label))
        task_il.append(_percent(within == label))
        first += size
    return Accuracies(class_il, task_il)


def evaluate(
    inference: Inference,
    heads: Sequence[str],
    visible: ImageSet,
    tests: Sequence[ImageSet],
    task_sizes: Sequence[int],
    options: Options,
    seed: int,
    progress: Progress = QUIET,
) -> Evaluation:
    """Fit every head to what is visible and test it on all tasks so far.

    Generators are seeded by `seed` and the number of classes alone, so that evaluating the
    same network again gives the same numbers.
    """
    heads = heads_for(tuple(heads), options)
    view = View(inference, visible, sum(task_sizes), options, seed)
    with progress.bar(f"task {len(tests)}  evaluating", 1 + len(heads)) as bar:
        sizes = [len(test) for test in tests]
        test = ImageSet.concatenate(*tests).to(inference.device)
        represented = inference(test.images)
        bar.advance()
        found, predicted = {}, {}
        for name in heads:
            scores = fit(name, view).scores(represented)
            by_task = torch.split(scores, sizes), torch.split(test.labels, sizes)
            found[name], predicted[name] = accuracies(*by_task, task_sizes), scores.argmax(dim=1)
            bar.advance(note=f"{name} {sum(found[name].class_il) / len(tests):.1f} %")
    return Evaluation(found, predicted, test, represented)


def _percent(right: Tensor) -> float:
    return 100 * int(right.sum()) / max(1, right.numel())
