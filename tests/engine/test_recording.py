"""What a recording promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cclis.engine import recording
from cclis.engine.recording import WARMUP, Recording

on_a_card = pytest.mark.usefixtures("card")


class Doubled:
    """Twice its input; counts how often it was called, which a replay is not."""

    calls = 0
    fails_at = -1

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("no room to record")
        return inputs["x"] * 2


def fed(recorded: Recording[Tensor], numbers: range) -> None:
    """Feed a recording of `Doubled` these numbers."""
    for number in numbers:
        found = recorded({"x": torch.full((2,), float(number), device="cuda")})
        assert found.tolist() == [2.0 * number] * 2


@on_a_card
def test_calls_are_ordinary_then_recorded_once_then_replayed() -> None:
    doubled = Doubled()
    recorded = Recording(doubled)
    for number in range(8):
        fed(recorded, range(number, number + 1))
        assert recorded.recorded == (number >= WARMUP)
    assert doubled.calls == WARMUP + 1
    recorded.forget()
    assert not recorded.recorded
    fed(recorded, range(1))
    assert doubled.calls == WARMUP + 2


@on_a_card
def test_without_room_to_record_calls_stay_ordinary_until_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = [False, True]
    monkeypatch.setattr(recording, "_enough_memory", lambda: room.pop(0))
    doubled = Doubled()
    recorded = Recording(doubled)
    fed(recorded, range(8))
    assert doubled.calls == 8
    assert not recorded.recorded
    recorded.forget()
    fed(recorded, range(8))
    assert doubled.calls == 8 + WARMUP + 1


@on_a_card
def test_what_borrows_little_does_not_ask_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_enough_memory", lambda: False)
    recorded = Recording(Doubled(), skip_memory_check=True)
    fed(recorded, range(WARMUP + 1))
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
    assert recording._enough_memory() is fits


@on_a_card
def test_what_fails_while_it_is_recorded_is_tried_again() -> None:
    doubled = Doubled()
    doubled.fails_at = WARMUP + 1
    recorded = Recording(doubled)
    fed(recorded, range(WARMUP))
    with pytest.raises(torch.OutOfMemoryError):
        fed(recorded, range(1))
    fed(recorded, range(3))
    assert recorded.recorded
    assert doubled.calls == WARMUP + 2
