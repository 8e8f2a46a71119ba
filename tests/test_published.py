"""What a learner publishes: after anything that happens, a task has been learned or it has not."""

from __future__ import annotations

import copy
import dis
import pickle
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cclis
from cclis import ContinualLearner, InputError, load_benchmark
from cclis.engine.snapshot import Snapshot
from cclis.evaluation.heads import HEADS
from tests.conftest import METHODS, quick

PACKAGE = str(Path(cclis.__file__).parent)
DIGITS = list(load_benchmark("split-digits", limit=8))
TEST = torch.cat([task.test.images for task in DIGITS])


def small(method: str = "er", **settings: Any) -> ContinualLearner:
    """A learner that takes a few milliseconds a task."""
    usual = {**quick(method), "epochs": 1, "width": 2, "padding": 1, "batch_size": 8}
    memory = None if METHODS[method].settings.memory == 0 else 6
    return ContinualLearner(method, memory, **{**usual, **settings})


def learn(learner: ContinualLearner, *tasks: int) -> ContinualLearner:
    for task in tasks:
        learner.learn(DIGITS[task].train.images, DIGITS[task].train.labels)
    return learner


def answers(learner: ContinualLearner) -> Any:
    """What a learner predicts; None before its first task."""
    return learner.predict_proba(TEST) if learner.classes else None


def bits(learner: ContinualLearner) -> dict[str, Tensor]:
    """All that it knows."""
    published = learner._published
    assert published is not None
    return {**published.snapshot.tensors, "head": published.head.weight}


def assert_same_bits(learner: ContinualLearner, other: ContinualLearner) -> None:
    first, second = bits(learner), bits(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert np.array_equal(answers(learner), answers(other))


@cache
def ends_of_with(code: CodeType) -> set[int]:
    """Where `with` blocks call `__exit__(None, None, None)`: no signal can arrive there."""
    steps = list(dis.get_instructions(code))
    none = [step.opname == "LOAD_CONST" and step.argval is None for step in steps]
    return {step.offset for n, step in enumerate(steps) if all(none[n : n + 3])}


def lines_until(work: Callable[[], Any], at: int = -1) -> int:
    """Do work, but interrupt it at its so-many-th line in the package; returns the lines begun."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and frame.f_lasti not in ends_of_with(frame.f_code):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert lines == at
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(("done", "every"), [(0, 30), (1, 10)])
def test_an_interrupt_at_any_line_leaves_the_learner_before_or_after_the_task(
    done: int, every: int
) -> None:
    images, labels = DIGITS[done].train.images[::2], DIGITS[done].train.labels[::2]
    learner, straight = (learn(small(), *range(done)) for _ in range(2))
    before = answers(learner)
    after = answers(straight.learn(images, labels))
    outcomes = set[str]()
    for _ in range(2):  # the first time fills caches, which takes lines of its own
        twin = copy.deepcopy(learner)
        answers(twin)  # as the learner will have done
        lines = lines_until(partial(twin.learn, images, labels))
    assert_same_bits(twin, straight)
    twin = copy.deepcopy(learner)
    # What an interruption leaves to be closed takes lines too: the end is looked for, line by line.
    for at in [*range(1, lines, every), *range(lines - 4, lines + 16)]:
        assert lines_until(partial(learner.learn, images, labels), at) <= at
        outcome = "after" if len(learner.classes) == 2 * done + 2 else "before"
        outcomes.add(outcome)
        assert np.array_equal(answers(learner), {"before": before, "after": after}[outcome])
        if outcome == "after":
            assert_same_bits(learner, straight)
            learner = copy.deepcopy(twin)
            answers(learner)
    assert outcomes == {"before", "after"}
    # All these interruptions have left no trace.
    assert_same_bits(learner.learn(images, labels), straight)
    assert_same_bits(learn(learner, done + 1), learn(straight, done + 1))


STREAMS = [method for method in METHODS if method != "joint"]


@pytest.mark.parametrize("method", STREAMS)
def test_a_task_that_fails_leaves_all_as_it_was(method: str, monkeypatch) -> None:
    learner, straight = (learn(small(method), 0) for _ in range(2))
    before = {name: value.clone() for name, value in bits(learner).items()}

    def fail(_: object) -> None:
        raise ValueError("no such luck")

    main_head = METHODS[method].heads[-1]
    for _ in range(2):  # the second time with a trainer made anew
        with monkeypatch.context() as patch:
            patch.setitem(HEADS, main_head, fail)
            with pytest.raises(ValueError, match="no such luck"):
                learn(learner, 1)
        assert learner.classes == [0, 1]
        after = bits(learner)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert_same_bits(learn(learner, 1), learn(straight, 1))


def dropout() -> nn.Module:
    layers = nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 4)
    return nn.Sequential(nn.Flatten(), *layers).requires_grad_()


@pytest.mark.parametrize("own", [False, True], ids=["ours", "dropout"])
@pytest.mark.parametrize("method", STREAMS)
def test_a_copy_between_tasks_changes_nothing(method: str, own: bool) -> None:
    torch.manual_seed(0)
    encoder = {"encoder": dropout()} if own else {}
    straight, copied, pickled = (small(method, **encoder) for _ in range(3))
    for task in range(3):
        learn(straight, task)
        copied = copy.deepcopy(learn(copied, task))
        pickled = pickle.loads(pickle.dumps(learn(pickled, task)))
        assert_same_bits(copied, straight)
        assert_same_bits(pickled, straight)


CALLS: list[Callable[[], None]] = []
"""What happens, each once, while an encoder trains."""


class Calling(nn.Flatten):
    """Passes images on; the first time that it trains something happens."""

    def forward(self, x: Any) -> Any:
        if self.training and CALLS:
            CALLS.pop()()
        return super().forward(x)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_predictions_from_another_thread_are_those_of_the_last_finished_task() -> None:
    torch.manual_seed(0)
    learner = learn(small(encoder=nn.Sequential(Calling(), nn.Linear(64, 8))), 0)
    before, during = answers(learner), list[Any]()
    CALLS[:] = [lambda: in_a_thread(lambda: during.append(answers(learner)))] * 2
    learn(learner, 1)
    assert len(during) == 2
    assert all(np.array_equal(each, before) for each in during)
    assert answers(learner).shape == (len(TEST), 4)


def test_one_of_two_threads_that_teach_at_once_is_refused() -> None:
    encoder = nn.Sequential(Calling(), nn.Linear(64, 8))
    learner, straight = (learn(small(encoder=encoder), 0) for _ in range(2))
    CALLS[:] = [lambda: in_a_thread(lambda: learn(learner, 2) and None)]
    with pytest.raises(InputError, match=r"another thread called learn\(\) meanwhile"):
        learn(learner, 1)
    assert learner.classes == [0, 1, 4, 5]
    assert_same_bits(learn(learner, 1), learn(straight, 2, 1))


def test_there_is_one_copy_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Snapshot] = []
    make = Snapshot.of

    def counted(trainer: Any) -> Snapshot:
        copies.append(make(trainer))
        return copies[-1]

    monkeypatch.setattr(Snapshot, "of", counted)
    learner = learn(small(), 0, 1)
    assert len(copies) == 2
    learner.predict(TEST)
    assert len(copies) == 2
    trainer, published = learner._trainer, copies[-1]
    assert trainer is not None
    # The network is held once, whether it predicts or is trained on; a trainer has its own.
    network = {f"network.{k}": v for k, v in published.network.state_dict().items()}
    own = trainer.state()[0]
    assert network.keys() < published.tensors.keys()
    for name, value in published.tensors.items():
        assert name not in network or value.data_ptr() == network[name].data_ptr()
        assert value.data_ptr() != own[name].data_ptr()
