from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cclis import load_benchmark
from cclis.engine.trainer import Trainer
from cclis.functional.exemplars import herding
from cclis.methods import Batch, Visible, make_config
from cclis.methods.icarl import ICaRL, ICaRLConfig
from cclis.nn.network import Representation
from tests.conftest import learn, quick


def make() -> ICaRL:
    torch.manual_seed(0)
    config = ICaRLConfig()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    return ICaRL(config, ICaRL.make_network(config, encoder, 1, 5, classes=6))


def test_new_classes_follow_labels_and_old_ones_the_network_of_before() -> None:
    method = make()
    method.begin_task(2)
    method.begin_task(2)
    before = method.network.state_dict()["classifier.weight"].clone()
    with torch.no_grad():
        method.network.classifier.weight.add_(0.3)
    labels = torch.tensor([0, 2, 3, 1])
    images, padding = torch.rand(4, 1, 4, 4), torch.zeros(4, dtype=torch.bool)
    some = Batch(images, labels, torch.ones(4), labels < 2, padding)
    found = method.losses(some)["cross_entropy"]
    features = method.network.encoder(some.images)
    old = (features @ before.T + method.network.classifier.bias).sigmoid()
    target = F.one_hot(some.labels, 6).float()
    target[:, :2] = old[:, :2].detach()
    logits = method.network.logits(some.images)
    cost = F.binary_cross_entropy_with_logits(logits[:, :4], target[:, :4], reduction="none")
    torch.testing.assert_close(found, cost.mean())


def test_a_known_class_that_comes_again_is_learned_from_its_labels() -> None:
    method = make()
    method.begin_task(2)
    method.begin_task(2)
    # Of the task: a known class and a new one; of the memory: the known class.
    labels, replayed = torch.tensor([1, 2, 1]), torch.tensor([False, False, True])
    images, padding = torch.rand(3, 1, 4, 4), torch.zeros(3, dtype=torch.bool)
    some = Batch(images, labels, torch.ones(3), replayed, padding)
    logits = method.network.logits(some.images)
    target = F.one_hot(labels, 6).float()
    target[1:, :2] = logits[1:, :2].sigmoid().detach()
    cost = F.binary_cross_entropy_with_logits(logits[:, :4], target[:, :4], reduction="none")
    torch.testing.assert_close(method.losses(some)["cross_entropy"], cost.mean())


def test_old_exemplars_are_cut_from_the_end_and_new_ones_herded() -> None:
    method = make()
    method.begin_task(2)
    method.begin_task(2)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, *[2] * 9, *[3] * 9])
    features = torch.rand(24, 5, generator=torch.Generator().manual_seed(2))

    def represent(*, augmented: bool = True) -> Representation:
        assert not augmented
        return Representation(features, features)

    kept = method.select_exemplars(
        Visible(labels, represent), 9, torch.Generator()
    ).indices.tolist()
    assert kept[:4] == [0, 1, 3, 4]
    assert kept[4:6] == [6 + i for i in herding(features[6:15], 2).tolist()]
    assert kept[6:] == [15 + i for i in herding(features[15:], 2).tolist()]


@pytest.mark.parametrize("room", [3, 1, 0])
def test_with_less_room_than_classes_some_have_one_exemplar(room: int) -> None:
    method = make()
    method.begin_task(2)
    method.begin_task(2)
    labels = torch.arange(4).repeat_interleave(3)
    features = torch.rand(12, 5, generator=torch.Generator().manual_seed(2))
    visible = Visible(labels, lambda augmented: Representation(features, features))
    kept = method.select_exemplars(visible, room, torch.Generator().manual_seed(0)).indices
    assert len(kept) == len(labels[kept].unique()) == room


def test_heads_are_fitted_to_the_exemplars_alone() -> None:
    trainer = Trainer(
        make_config("icarl", {**quick("icarl"), "memory": 20, "padding": 1}), (8, 8, 1), 4
    )
    digits = load_benchmark("split-digits", limit=40)
    for index in range(2):
        learned = learn(trainer, digits[index].train, 2)
        assert trainer.memory.samples is not None
        assert torch.equal(learned.visible.images, trainer.memory.samples.images)
        assert len(learned.visible) == 20
