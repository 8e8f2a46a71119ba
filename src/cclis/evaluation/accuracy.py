"""Class-IL and Task-IL accuracy on every task so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.engine.inference import Inference
from cclis.evaluation.heads import View, fit
from cclis.nn.network import Representation
from cclis.progress import QUIET, Progress
from cclis.settings import Options


@dataclass(frozen=True)
class Accuracies:
    """Accuracy on each task so far, in per cent.

    Attributes:
        class_il: Among all seen classes.
        task_il: Among the classes of the sample's task.
    """

    class_il: list[float]
    task_il: list[float]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Evaluation of a network on all tasks so far.

    Attributes:
        accuracies: Accuracies by head.
        predicted: Predicted classes of the test samples by head, int64 (N,).
        test: The test samples of all tasks, (N,).
        represented: Their representation, (N, ...).
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
        scores: For each task, scores of all seen classes for its test samples, (N_k, C).
        labels: For each task, classes of its test samples, int64 (N_k,).
        task_sizes: Number of classes of each task.
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
    """Fit heads to the visible samples and test them on all tasks so far.

    All generators are seeded by `seed` and the number of classes: evaluating the same network again
    gives the same numbers.

    Args:
        inference: The frozen network.
        heads: Names of the heads.
        visible: Samples to fit the heads to.
        tests: Test samples of each task.
        task_sizes: Number of classes of each task.
        options: Settings of the heads.
        seed: Seed of the generators.
        progress: Where to show progress.
    """
    view = View(inference, visible, sum(task_sizes), options, seed)
    with progress.bar(f"task {len(tests)}  evaluating", 1 + len(heads)) as bar:
        sizes = [len(test) for test in tests]
        test = ImageSet.concatenate(*tests).to(inference.device)
        represented = inference(test.images)
        bar.advance()
        by_head, predicted = {}, {}
        for name in heads:
            head = fit(name, view)
            with inference.numerics():
                scores = head.scores(represented)
            by_task = torch.split(scores, sizes), torch.split(test.labels, sizes)
            by_head[name], predicted[name] = accuracies(*by_task, task_sizes), scores.argmax(dim=1)
            bar.advance(note=f"{name} {sum(by_head[name].class_il) / len(tests):.1f} %")
    return Evaluation(by_head, predicted, test, represented)


def _percent(correct: Tensor) -> float:
    return 100 * int(correct.sum()) / max(1, correct.numel())
