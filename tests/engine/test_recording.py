"""What a recording promises, with a graph that replays on the CPU by calling again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cclis.engine import recording
from cclis.engine.recording import WARMUP, Recording


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    """Replays what was called while it was captured, writing to the same places."""

    captured: Callable[[], Any] | None = None
    replays = 0

    def replay(self) -> None:
        self.replays += 1
        assert self.captured is not None
        self.captured()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    def make() -> Graph:
        made.append(Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(recording, "_side_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(recording, "_room_for_what_was_borrowed", lambda: True)

    @contextlib.contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        yield
        graph.captured = doubled.again

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


class Doubled:
    """Twice its input, written to one place, as a graph does."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails_at = -1
        self._x = torch.zeros(2)
        self._out = torch.zeros(2)

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("no room to record")
        self._x, self._out = inputs["x"], inputs["x"] * 2
        return self._out

    def again(self) -> None:
        self._out.copy_(self._x * 2)


doubled = Doubled()


@pytest.fixture(autouse=True)
def fresh() -> None:
    doubled.__init__()  # type: ignore[misc]


def test_calls_are_ordinary_then_recorded_once_then_replayed(graphs: list[Graph]) -> None:
    recorded = Recording(doubled)
    for number in range(8):
        found = recorded({"x": torch.full((2,), float(number))})
        assert found.tolist() == [2.0 * number] * 2
        assert recorded.recorded == (number >= WARMUP)
    assert doubled.calls == WARMUP + 1
    assert [graph.replays for graph in graphs] == [8 - WARMUP]
    recorded.forget()
    assert not recorded.recorded
    recorded({"x": torch.ones(2)})
    assert doubled.calls == WARMUP + 2


def test_without_room_to_record_calls_stay_ordinary_until_forgotten(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [False, True]
    monkeypatch.setattr(recording, "_room_for_what_was_borrowed", lambda: room.pop(0))
    recorded = Recording(doubled)
    for number in range(8):
        found = recorded({"x": torch.full((2,), float(number))})
        assert found.tolist() == [2.0 * number] * 2
    assert (doubled.calls, graphs) == (8, [])
    assert not recorded.recorded
    recorded.forget()
    for _ in range(WARMUP + 2):
        recorded({"x": torch.ones(2)})
    assert [graph.replays for graph in graphs] == [2]


def test_what_borrows_little_does_not_ask_for_room(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_room_for_what_was_borrowed", lambda: False)
    recorded = Recording(doubled, modest=True)
    for _ in range(WARMUP + 1):
        recorded({"x": torch.ones(2)})
    assert recorded.recorded


@pytest.mark.parametrize(("free", "fits"), [(1250, True), (1249, False)])
def test_room_is_measured_by_what_was_borrowed(
    monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def take(count: int, **_: Any) -> None:
        if count > free:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", take)
    assert recording._room_for_what_was_borrowed() is fits


def test_what_fails_while_it_is_recorded_is_tried_again(graphs: list[Graph]) -> None:
    recorded = Recording(doubled)
    doubled.fails_at = WARMUP + 1
    for _ in range(WARMUP):
        recorded({"x": torch.ones(2)})
    with pytest.raises(torch.OutOfMemoryError):
        recorded({"x": torch.ones(2)})
    for number in range(3):
        assert recorded({"x": torch.full((2,), float(number))}).tolist() == [2.0 * number] * 2
    assert [graph.replays for graph in graphs] == [0, 3]
