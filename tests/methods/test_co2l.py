from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from cclis import load_benchmark
from cclis.engine.trainer import Trainer
from cclis.functional.losses import ird, supcon
from cclis.methods import Batch, Visible, make_config
from cclis.methods.co2l import Co2L, Co2LConfig
from tests.conftest import learn, quick


def make(distill_weight: float = 0.7) -> Co2L:
    torch.manual_seed(0)
    config = Co2LConfig(embedding=8, distill_weight=distill_weight)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 12))
    return Co2L(config, Co2L.make_network(config, encoder, 1, 12, classes=6))


def batch(labels: torch.Tensor) -> Batch:
    """Samples of classes from the second on are the task's, all others replayed."""
    images, none = torch.rand(len(labels), 1, 4, 4), torch.zeros(len(labels), dtype=torch.bool)
    return Batch(images, labels, torch.full((len(labels),), 0.3), labels < 2, none)


def test_anchors_are_the_tasks_samples_and_all_are_distilled() -> None:
    method = make()
    method.begin_task(2)
    labels = torch.tensor([0, 1, 2, 3, 2, 3, 0, 2])
    some = batch(labels)
    assert method.losses(some).keys() == {"contrast"}
    method.begin_task(2)
    with torch.no_grad():
        method.network.projection[2].weight.add_(0.1)
    found = method.losses(some)
    z = method.network.embed(some.images)
    contrast = supcon(z, labels, temperature=0.5, anchors=labels >= 2)
    torch.testing.assert_close(found["contrast"], 0.5 / 0.07 * contrast)
    assert method.teacher is not None
    target = method.teacher.embed(some.images)
    expected = 0.7 * ird(z, target, student_temperature=0.2, teacher_temperature=0.01)
    torch.testing.assert_close(found["distill"], expected)
    assert found["distill"].item() > 0


def test_without_weight_the_contrast_stands_alone() -> None:
    method = make(distill_weight=0.0)
    for _ in range(2):
        method.begin_task(2)
    # The sample of class 1 is replayed, those of class 0 come again in the task.
    labels = torch.tensor([0, 1, 2, 3, 2, 3, 0, 2])
    some = dataclasses.replace(batch(labels), replayed=labels == 1)
    (found,) = method.losses(some).values()
    z = method.network.embed(some.images).double()
    costs = []
    for i in range(8):
        others = [k for k in range(8) if k != i]
        alike = [k for k in others if labels[k] == labels[i]]
        if labels[i] != 1 and alike:
            bottom = torch.stack([z[i] @ z[k] / 0.5 for k in others]).logsumexp(dim=0)
            costs.append(torch.stack([bottom - z[i] @ z[k] / 0.5 for k in alike]).mean())
    expected = 0.5 / 0.07 * torch.stack(costs).mean()
    torch.testing.assert_close(found, expected.float())
    assert method.teacher is None


def test_every_image_is_seen_twice_and_otherwise_each_time(monkeypatch) -> None:
    trainer = Trainer(make_config("co2l", {**quick("co2l"), "memory": 20}), (8, 8, 1), 4)
    digits = load_benchmark("split-digits", limit=40)
    seen: list[Batch] = []
    losses = trainer._step._losses

    def recorded(batch: Batch) -> dict[str, torch.Tensor]:
        seen.append(batch)
        return losses(batch)

    monkeypatch.setattr(trainer._step, "_losses", recorded)
    for index in range(2):
        learn(trainer, digits[index].train, 2)
    for batch in seen:
        half = len(batch.labels) // 2
        assert torch.equal(batch.labels[:half], batch.labels[half:])
        assert not torch.equal(batch.images[:half], batch.images[half:])
    assert trainer.memory.samples is not None
    assert trainer.memory.samples.labels.bincount().tolist() == [5] * 4


@pytest.mark.parametrize("capacity", [7, 8])
def test_the_memory_is_random_and_balanced(capacity: int) -> None:
    labels, chosen = torch.arange(40) % 4, set()
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        kept = make().select_exemplars(Visible(labels, pytest.fail), capacity, rng)
        chosen.add(tuple(kept.indices.tolist()))
    assert len(chosen) == 5
    for indices in chosen:
        counts = labels[list(indices)].bincount(minlength=4)
        assert int(counts.max() - counts.min()) <= 1
