"""Methods that replay beside a stream: ER, DER, DER++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclis import load_benchmark
from cclis.engine.events import EpochEnded
from cclis.engine.trainer import Trainer
from cclis.methods import Batch, Exemplars, Visible, keeps_samples, make_config
from cclis.methods.base import random_choice
from tests.conftest import CONFIGS, METHODS, learn, quick, state_after

SHAPE = (8, 8, 1)


def method(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name](**settings)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))
    return METHODS[name](config, METHODS[name].make_network(config, encoder, 1, 5, classes=6))


def batch(replays: int) -> Batch:
    rows = 4 + 3 * replays
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(rows, 1, 4, 4, generator=rng)
    labels = torch.randint(0, 6, (rows,), generator=rng)
    replayed = torch.arange(rows) >= 4
    extras = {"logits": torch.rand(3 * replays, 6, generator=rng)}
    sizes = (4, *[3] * replays)
    return Batch(
        images, labels, torch.ones(rows), replayed, torch.zeros_like(replayed), extras, sizes
    )


def test_er_is_the_cross_entropy_of_both_batches() -> None:
    er, some = method("er"), batch(1)
    logits = er.network.logits(some.images)
    found = er.losses(some)
    torch.testing.assert_close(found["cross_entropy"], F.cross_entropy(logits, some.labels))


@pytest.mark.parametrize("name", ["der", "derpp"])
def test_dark_replay_against_the_formula(name: str) -> None:
    der = method(name, logit_weight=0.7)
    some = batch(der.replays)
    logits = der.network.logits
    expected = {
        "cross_entropy": F.cross_entropy(logits(some.images[:4]), some.labels[:4]),
        "logits": 0.7 * F.mse_loss(logits(some.images[4:7]), some.extras["logits"][:3]),
    }
    if name == "derpp":
        expected["labels"] = 0.5 * F.cross_entropy(logits(some.images[7:]), some.labels[7:])
    found = der.losses(some)
    assert found.keys() == expected.keys()
    for term, value in expected.items():
        torch.testing.assert_close(found[term], value)
    torch.testing.assert_close(some.to_store["logits"], logits(some.images[:4]))
    assert not some.to_store["logits"].requires_grad


def trainer(name: str, **settings: Any) -> Trainer:
    memory = 20 if keeps_samples(name) else 0
    config = make_config(
        name, {**quick(name), "memory": memory, "padding": 1, "batch_size": 16, **settings}
    )
    return Trainer(config, SHAPE, 10)


def test_logits_are_those_of_the_moment_of_storing(monkeypatch) -> None:
    some = trainer("der", memory=500, crop="none", epochs=1)
    digits = load_benchmark("split-digits", limit=40)[0].train
    given: list[tuple[Tensor, Tensor]] = []
    losses = some._step._losses

    def recorded(now: Batch) -> dict[str, Tensor]:
        found = losses(now)
        given.append((now.part(0).images.clone(), now.to_store["logits"].clone()))
        return found

    monkeypatch.setattr(some._step, "_losses", recorded)
    learn(some, digits, 2)
    samples, kept = some.memory.samples, some.memory.extras["logits"]
    assert samples is not None
    assert len(samples) == len(given) * 16
    for number, (images, logits) in enumerate(given):
        rows = slice(16 * number, 16 * number + 16)
        pixels = samples.images[rows].permute(0, 3, 1, 2).float() / 255
        torch.testing.assert_close(pixels, images)
        assert torch.equal(kept[rows], logits)
    # They differ from what the network says now: it has learned since.
    some.method.network.eval()
    now = some.method.network.logits(samples.images.permute(0, 3, 1, 2).float() / 255)
    assert not torch.allclose(kept, now, atol=0.1)


@pytest.mark.parametrize("name", ["der", "derpp", "gcr"])
def test_logits_stay_with_their_samples_while_others_take_their_places(
    name: str, monkeypatch
) -> None:
    some = trainer(name, memory=20, crop="none", epochs=3)
    digits = load_benchmark("split-digits", limit=40)
    given: list[tuple[int, Tensor, Tensor]] = []
    losses = some._step._losses

    def recorded(now: Batch) -> dict[str, Tensor]:
        found = losses(now)
        given.append((task, now.part(0).images.clone(), now.to_store["logits"].clone()))
        return found

    monkeypatch.setattr(some._step, "_losses", recorded)
    for task in range(2):
        learn(some, digits[task].train, 2)
    tasks = torch.cat([torch.full((len(images),), of) for of, images, _ in given])
    images = torch.cat([images for _, images, _ in given])
    logits = torch.cat([logits for *_, logits in given])
    samples = some.memory.samples
    assert samples is not None
    pixels = samples.images.permute(0, 3, 1, 2).float() / 255
    # A sample passes by once an epoch: the logits tell when it was stored.
    same = (logits[None] == some.memory.extras["logits"][:, None]).all(dim=2)
    assert same.any(dim=1).all()
    stored = same.int().argmax(dim=1)
    torch.testing.assert_close(images[stored], pixels)
    assert torch.equal(tasks[stored], samples.labels // 2)
    assert tasks[stored].unique().tolist() == [0, 1]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "cclis"])
@pytest.mark.parametrize(("index", "steps"), [(0, 1), (0, 5), (1, 3), (1, 7)])
def test_a_state_from_the_middle_of_a_task_resumes_exactly(
    name: str, index: int, steps: int
) -> None:
    straight, stopped = (trainer(name, batch_size=8) for _ in range(2))
    digits = load_benchmark("split-digits", limit=16)
    for some in (straight, stopped):
        for task in range(index):
            learn(some, digits[task].train, 2)
    resumed = Trainer.from_state(*state_after(steps, stopped, digits[index].train))
    logs = []
    for some in (straight, resumed):
        events = some.learn(digits[index].train, 2)
        records = [event.record for event in events if isinstance(event, EpochEnded)]
        logs.append([(record.epoch, record.loss, record.losses) for record in records])
    first, second = straight.state()[0], resumed.state()[0]
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert logs[0][-len(logs[1]) :] == logs[1]


class Refilled(METHODS["er"]):  # type: ignore[misc]
    """Replays beside the task what was chosen at the end of the last."""

    streams = False

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        return random_choice(visible.labels, capacity, generator)


def test_a_memory_that_is_refilled_may_be_replayed_beside_the_task(monkeypatch) -> None:
    settings = {**quick("er"), "memory": 20, "padding": 1, "epochs": 1}
    settings |= {"batch_size": 16, "replay_batch_size": 8}
    some = Trainer(make_config(Refilled, settings), SHAPE, 10)
    seen: list[Batch] = []
    losses = some._step._losses
    monkeypatch.setattr(some._step, "_losses", lambda now: (seen.append(now), losses(now))[1])
    digits = load_benchmark("split-digits", limit=40)
    learn(some, digits[0].train, 2)
    assert all(bool(now.part(1).padding.all()) for now in seen)
    seen.clear()
    learn(some, digits[1].train, 2)
    assert all(now.sizes == (16, 8) for now in seen)
    assert torch.cat([now.part(0).labels for now in seen]).unique().tolist() == [2, 3]
    assert torch.cat([now.part(1).labels for now in seen]).unique().tolist() == [0, 1]
    assert not any(now.padding.any() for now in seen)
    assert all(bool((now.part(1).proposal > 0).all()) for now in seen)


def test_the_reservoir_holds_samples_of_all_tasks_alike() -> None:
    some = trainer("er", memory=60, epochs=1)
    digits = load_benchmark("split-digits", limit=100)
    for index in range(4):
        learn(some, digits[index].train, 2)
    assert some.memory.samples is not None
    assert len(some.memory) == 60
    # 13 batches of 16 a task: the last is filled up from the start.
    assert some.memory.seen == 4 * 13 * 16
    tasks = (some.memory.samples.labels // 2).bincount(minlength=4)
    assert int(tasks.min()) >= 5  # 15 expected; fewer than 5 has a chance below one in a thousand


def test_a_memory_of_nothing_learns_all_the_same() -> None:
    some = trainer("derpp", memory=0)
    learn(some, load_benchmark("split-digits", limit=20)[0].train, 2)
    assert len(some.memory) == 0
