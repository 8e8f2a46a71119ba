"""What a batch says of its samples: which are replayed, and which stand in for an empty memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cclis.data.images import ImageSet
from cclis.engine.trainer import Trainer
from cclis.methods import Batch, make_config
from tests.conftest import CONFIGS, METHODS, learn, quick

SIZES = (4, 3, 2)


def batch() -> Batch:
    """A batch of the task's samples and of two replays, each sample unlike all others."""
    rows, numbers = sum(SIZES), torch.arange(sum(SIZES))
    replayed = numbers >= SIZES[0]
    padding = torch.tensor([False] * 4 + [True, False, True, False, True])
    extras = {"logits": torch.arange(10.0).view(5, 2), "score": 100 + torch.arange(5.0)}
    images = numbers.float().view(rows, 1, 1, 1)
    return Batch(images, numbers, numbers / 10, replayed, padding, extras, SIZES)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_part_has_its_own_rows_of_everything(number: int) -> None:
    whole = batch()
    part = whole.part(number)
    rows = [range(4), range(4, 7), range(7, 9)][number]
    for name in ("images", "labels", "proposal", "replayed", "padding", "weight"):
        expected = [getattr(whole, name)[row].tolist() for row in rows]
        assert getattr(part, name).tolist() == expected, name
    if number:
        for name, values in whole.extras.items():
            assert part.extras[name].tolist() == [values[row - 4].tolist() for row in rows]
    else:
        assert part.extras == {}


def test_padding_weighs_nothing_and_all_else_one() -> None:
    some = batch()
    assert some.weight.tolist() == [float(not padding) for padding in some.padding.tolist()]
    assert some.weight.dtype == some.proposal.dtype


def test_a_batch_of_the_task_has_neither_replayed_samples_nor_padding() -> None:
    some = Batch.of_task(torch.zeros(3, 1, 2, 2), torch.arange(3))
    assert not some.replayed.any()
    assert not some.padding.any()
    assert some.proposal.tolist() == some.weight.tolist() == [1, 1, 1]
    assert some.extras == some.to_store == {}


# ------------------------------------------------------------------ as the engine composes them


def colours(classes: list[int], first: int) -> ImageSet:
    """Plain images, whose shade tells which sample they are: none comes twice."""
    labels = torch.tensor(classes)
    shades = (first + torch.arange(len(labels))).to(torch.uint8)
    return ImageSet(shades.view(-1, 1, 1, 1).expand(-1, 8, 8, 1).contiguous(), labels)


def batches(method: str, *tasks: tuple[list[int], int], **settings: Any) -> list[list[Batch]]:
    """The batches of tasks, given as their samples' classes and how many of these are new."""
    small = {"memory": 6, "padding": 1, "batch_size": 8, "width": 4, "epochs": 1, "crop": "none"}
    config = make_config(method, {**quick(method), **small, **settings})
    trainer, found = Trainer(config, (8, 8, 1), 6), list[list[Batch]]()
    losses = trainer._step._losses

    def noting(now: Batch) -> dict[str, Tensor]:
        found[-1].append(now)
        return losses(now)

    trainer._step._losses = noting
    for number, (classes, new) in enumerate(tasks):
        found.append([])
        learn(trainer, colours(classes, 100 * number), new, again=True)
    return found


def shades(some: Batch) -> list[int]:
    return (some.images[:, 0, 0, 0] * 255).round().int().tolist()


AGAIN = ([0, 1] * 6, 2), ([0, 2, 3] * 4, 2)
"""Two tasks; class 0 comes again in the second."""


@pytest.mark.parametrize("method", ["cclis", "co2l", "icarl"])
def test_of_a_class_that_comes_again_samples_of_the_memory_are_replayed(method: str) -> None:
    first, second = batches(method, *AGAIN)
    assert not any(now.replayed.any() for now in first)
    # What the second task brings is bright, what was kept of the first is dark.
    for now in second:
        assert now.replayed.tolist() == [shade < 100 for shade in shades(now)]
        assert bool((now.proposal[~now.replayed] == 1).all())
    labels = torch.cat([now.labels for now in second])
    replayed = torch.cat([now.replayed for now in second])
    assert (labels[replayed] == 0).any()
    assert (labels[~replayed] == 0).any()
    assert not any(now.padding.any() for now in [*first, *second])


@pytest.mark.parametrize("method", ["cclis", "co2l"])
def test_every_view_has_its_samples_masks(method: str) -> None:
    views = METHODS[method].views
    for now in batches(method, *AGAIN)[1]:
        rows = len(now.labels) // views
        for view in range(1, views):
            part = slice(view * rows, (view + 1) * rows)
            for name in ("labels", "proposal", "replayed", "padding"):
                assert torch.equal(getattr(now, name)[part], getattr(now, name)[:rows]), name
    assert METHODS["co2l"].views == 2


@pytest.mark.parametrize("method", ["er", "der", "derpp", "gss", "gcr"])
def test_copies_of_the_tasks_samples_stand_in_until_something_is_stored(method: str) -> None:
    (found,) = batches(method, ([0, 1] * 12, 2), replay_batch_size=3)
    replays = METHODS[method].replays
    for step, now in enumerate(found):
        assert now.sizes == (8, *[3] * replays)
        assert now.replayed.tolist() == [False] * 8 + [True] * 3 * replays
        assert now.padding.tolist() == [False] * 8 + [step == 0] * 3 * replays
    assert len(found) == 3
    for number in range(1, 1 + replays):
        part = found[0].part(number)
        of_task = range(3 * (number - 1), 3 * number)
        assert shades(part) == [shades(found[0])[row % 8] for row in of_task]
        assert all(not values.any() for values in part.extras.values())


# -------------------------------------------------------------------- what losses make of them


def cost(logits: Tensor, label: int) -> float:
    """Cross-entropy of one sample."""
    return math.log(sum(math.exp(value) for value in logits.tolist())) - float(logits[label])


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def naive_losses(name: str, some: Batch, logits: Tensor, alpha: float, beta: float) -> list[float]:
    """The terms of a loss, sample by sample; whatever is padding is left out."""
    task, first = some.sizes[:2]
    costs = [cost(row, label) for row, label in zip(logits, some.labels.tolist(), strict=True)]
    counts = [row for row in range(len(costs)) if not some.padding[row]]
    if name in ("er", "gss"):
        return [mean([costs[row] for row in counts if row < task + first])]
    distances = [
        sum((float(a) - float(b)) ** 2 for a, b in zip(logits[row], stored, strict=True)) / 6
        for row, stored in zip(range(task, task + first), some.extras["logits"], strict=False)
        if row in counts
    ]
    terms = [mean(costs[:task]), alpha * mean(distances)]
    if name == "derpp":
        terms.append(beta * mean([costs[row] for row in counts if row >= task + first]))
    return terms


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((name, padded) for name in ("er", "gss", "der", "derpp") for padded in ("none", "all")),
        # Distances from logits are a mean over all samples, of which all or none are padding.
        *((name, "some") for name in ("er", "gss")),
    ],
)
def test_padding_counts_nothing(name: str, padded: str) -> None:
    torch.manual_seed(0)
    config, encoder = CONFIGS[name](), nn.Sequential(nn.Flatten(), nn.Linear(4, 5))
    method = METHODS[name](config, METHODS[name].make_network(config, encoder, 1, 5, 6))
    sizes = (4, *[3] * method.replays)
    replayed = torch.arange(sum(sizes)) >= 4
    of_all = {"none": False, "some": torch.arange(sum(sizes)) % 2 == 0, "all": True}
    padding = replayed & of_all[padded]
    images, labels = torch.rand(len(replayed), 1, 2, 2), torch.arange(len(replayed)) % 6
    extras = {"logits": torch.rand(len(replayed) - 4, 6)}
    ones = torch.ones(len(replayed))
    some = Batch(images, labels, ones, replayed, padding, extras, sizes)
    found = {name: term.detach() for name, term in method.losses(some).items()}
    alpha, beta = (getattr(config, key, 0.0) for key in ("logit_weight", "label_weight"))
    expected = naive_losses(name, some, method.network.logits(images).detach(), alpha, beta)
    assert [float(term) for term in found.values()] == pytest.approx(expected, rel=1e-5)
    # Whatever stands in: neither its image nor its label nor what is stored with it matters.
    junk = torch.where(padding[:, None, None, None], torch.rand_like(images), images)
    others = torch.where(padding, (labels + 1) % 6, labels)
    again = method.losses(Batch(junk, others, ones, replayed, padding, extras, sizes))
    assert all(torch.equal(again[name], term) for name, term in found.items())
