from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cclis.methods import Batch, Visible
from cclis.methods.finetune import Finetune, FinetuneConfig
from cclis.methods.joint import Joint, JointConfig


def test_cross_entropy_over_the_seen_classes_and_nothing_kept() -> None:
    torch.manual_seed(0)
    config = FinetuneConfig()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    method = Finetune(config, Finetune.make_network(config, encoder, 1, 5, classes=6))
    method.begin_task(2)
    method.begin_task(1)
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([2, 0, 2, 1])
    losses = method.losses(Batch.of_task(images, labels))
    logits = method.network.classifier(encoder(images))[:, :3]
    torch.testing.assert_close(losses["cross_entropy"], F.cross_entropy(logits, labels))
    kept = method.select_exemplars(Visible(labels, pytest.fail), 0, torch.Generator())
    assert len(kept.indices) == len(kept.proposal) == 0
    (group,) = method.parameter_groups()
    assert group.learning_rate == config.learning_rate


def test_joint_training_is_the_cross_entropy_of_all_classes() -> None:
    torch.manual_seed(0)
    config, encoder = JointConfig(), nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    method = Joint(config, Joint.make_network(config, encoder, 1, 5, classes=6))
    method.begin_task(6)
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([2, 0, 5, 1])
    losses = method.losses(Batch.of_task(images, labels))
    logits = method.network.classifier(encoder(images))
    torch.testing.assert_close(losses["cross_entropy"], F.cross_entropy(logits, labels))
