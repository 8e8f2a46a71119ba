"""What a trainer yields, and that it may be stopped and resumed at every event."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cclis import load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.events import EpochEnded, Event, StepDone, TaskLearned, TaskTrained
from cclis.engine.trainer import Description, Trainer
from cclis.files import pack_tensors, unpack_tensors
from cclis.methods import make_config
from tests.conftest import learn, quick

State = tuple[dict[str, Tensor], Description]
STEPS = 3
"""Steps of an epoch of `task` with `trainer`'s batches."""


def trainer(method: str, **settings: Any) -> Trainer:
    small = {"memory": 8, "batch_size": 8, "width": 4, "padding": 1, "epochs": 2}
    return Trainer(make_config(method, {**quick(method), **small, **settings}), (8, 8, 1), 4)


def task(index: int) -> ImageSet:
    return load_benchmark("split-digits", limit=12)[index].train


def as_in_a_file(some: Trainer) -> State:
    return unpack_tensors(pack_tensors(*some.state()), "state")


def told(events: Iterable[Event]) -> list[object]:
    """What was said of epochs and of the task, but for the seconds."""
    found = list[object]()
    for event in events:
        match event:
            case EpochEnded(record):
                found.append(dataclasses.replace(record, images_per_second=0.0))
            case TaskLearned(visible, _, diagnosis):
                found.append([visible.images.tolist(), visible.labels.tolist(), diagnosis])
    return found


def same(one: Trainer, other: Trainer) -> bool:
    (a, described), (b, also) = one.state(), other.state()
    return a.keys() == b.keys() and described == also and all(torch.equal(a[k], b[k]) for k in a)


def test_events_come_in_order() -> None:
    events = list(trainer("er").learn(task(0), 2))
    kinds = [type(event) for event in events]
    epoch = [StepDone] * (STEPS - 1) + [EpochEnded, StepDone]
    assert kinds == [*epoch, *epoch, TaskTrained, TaskLearned]
    epochs = [event.epochs for event in events if isinstance(event, StepDone)]
    assert epochs == pytest.approx([step / STEPS for step in range(1, 2 * STEPS + 1)])
    records = [event.record for event in events if isinstance(event, EpochEnded)]
    assert [(r.task, r.epoch, r.step) for r in records] == [(0, 0, STEPS), (0, 1, 2 * STEPS)]


@pytest.mark.parametrize("method", ["cclis", "er", "gcr"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_state_taken_at_any_event_resumes_to_the_same_bits(method: str, index: int) -> None:
    straight, states, events = trainer(method), list[State](), list[Event]()
    if index:
        learn(straight, task(0), 2)
    for event in straight.learn(task(index), 2):
        states.append(as_in_a_file(straight))
        events.append(event)
    # The last state is between two tasks: nothing is left to be learned.
    for number, state in enumerate(states[:-1]):
        resumed = Trainer.from_state(*state)
        assert told(resumed.learn(task(index), 2)) == told(events[number + 1 :])
        assert same(straight, resumed)
    assert same(straight, Trainer.from_state(*states[-1]))


@pytest.mark.parametrize("method", ["cclis", "er", "gcr"])
@pytest.mark.parametrize("last", [StepDone, EpochEnded, TaskTrained])
def test_a_trainer_stopped_in_a_task_learns_nothing_until_it_is_restored(
    method: str, last: type[Event]
) -> None:
    # With room for two classes: the second task makes more of it, which is undone.
    straight, stopped = trainer(method), trainer(method)
    for some in (straight, stopped):
        learn(some, task(0), 2)
    between = as_in_a_file(stopped)
    events = stopped.learn(task(1), 2)
    while not isinstance(next(events), last):
        pass
    within = as_in_a_file(stopped)
    events.close()
    with pytest.raises(RuntimeError, match="stopped in the middle of a task: restore a state"):
        stopped.learn(task(1), 2)
    learn(straight, task(1), 2)
    for state in (between, within):
        stopped.restore(*state)
        learn(stopped, task(1), 2)
        assert same(straight, stopped)
