from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cclis.data.benchmarks import load_benchmark
from cclis.engine.devices import make_fabric
from cclis.engine.inference import Inference
from cclis.evaluation.accuracy import Accuracies, accuracies, evaluate
from cclis.nn.conv import ConvEncoder
from cclis.nn.network import PrototypeNetwork
from cclis.settings import Config, EvaluationOptions


@st.composite
def results(draw, values: st.SearchStrategy[float]):
    """Scores and labels of one to four tasks with one to four classes each."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    classes = sum(sizes)
    scores, labels = [], []
    for index, size in enumerate(sizes):
        count = draw(st.integers(1, 6))
        row = st.lists(values, min_size=classes, max_size=classes)
        scores.append(torch.tensor(draw(st.lists(row, min_size=count, max_size=count))))
        of_task = st.integers(sum(sizes[:index]), sum(sizes[:index]) + size - 1)
        labels.append(torch.tensor(draw(st.lists(of_task, min_size=count, max_size=count))))
    return scores, labels, sizes


def naive(scores, labels, sizes) -> Accuracies:
    class_il, task_il, first = [], [], 0
    for score, label, size in zip(scores, labels, sizes, strict=True):
        right_class = right_task = 0
        for row, wanted in zip(score.tolist(), label.tolist(), strict=True):
            every = range(len(row))
            own = range(first, first + size)
            right_class += max(every, key=lambda c: row[c]) == wanted
            right_task += max(own, key=lambda c: row[c]) == wanted
        class_il.append(100 * right_class / len(label))
        task_il.append(100 * right_task / len(label))
        first += size
    return Accuracies(class_il, task_il)


@given(results(st.floats(-5, 5, width=32)))
def test_accuracies_against_a_loop(case):
    found, expected = accuracies(*case), naive(*case)
    assert found.class_il == pytest.approx(expected.class_il)
    assert found.task_il == pytest.approx(expected.task_il)


@given(results(st.integers(0, 2).map(float)))  # few values, so that ties are common
def test_knowing_the_task_never_hurts(case):
    found = accuracies(*case)
    assert all(t >= c for t, c in zip(found.task_il, found.class_il, strict=True))


def test_tasks_of_unequal_size():
    scores = [
        torch.tensor([[3.0, 1, 2, 9], [0, 1, 2, 3]]),
        torch.tensor([[9.0, 2, 1, 0], [0, 0, 5, 0], [0, 9, 5, 6]]),
    ]
    labels = [torch.tensor([0, 0]), torch.tensor([1, 2, 3])]
    found = accuracies(scores, labels, [1, 3])
    assert found.class_il == [0, pytest.approx(100 / 3)]
    assert found.task_il == [100, pytest.approx(200 / 3)]


def test_a_class_that_cannot_be_chosen_is_not():
    scores = [torch.tensor([[float("-inf"), -7.0]])]
    assert accuracies(scores, [torch.tensor([1])], [2]) == Accuracies([100], [100])


@pytest.fixture(scope="module")
def inference() -> Inference:
    torch.manual_seed(0)
    network = PrototypeNetwork(ConvEncoder(1, 4), 1, 8, embedding=6, classes=4)
    config = Config(device="cpu")
    return Inference(network, make_fabric(config), config)


def test_evaluate_gives_the_same_whatever_else_is_evaluated(inference):
    benchmark = load_benchmark("split-digits", limit=30)
    options = EvaluationOptions(probe_epochs=3, probe_learning_rate=0.1, probe_batch_size=8)
    tests = [benchmark[0].test, benchmark[1].test]

    def run(*heads: str, seed: int = 0) -> dict[str, Accuracies]:
        return evaluate(
            inference, heads, benchmark[1].train, tests, [2, 2], options, seed
        ).accuracies

    every = run("linear", "means", "prototype")
    assert list(every) == ["linear", "means", "prototype"]
    torch.rand(3)  # the global generator plays no part
    assert run("means", "linear") == {name: every[name] for name in ("means", "linear")}
    assert run("linear", seed=1) != run("linear")
    for found in every.values():
        assert len(found.class_il) == len(found.task_il) == 2
    # Only the second task's classes are visible, so their means are all that can be chosen.
    assert every["means"].class_il[0] == 0
