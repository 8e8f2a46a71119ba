from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cclis.functional.losses import prd, sample_nce
from cclis.methods import Batch, Visible
from cclis.methods.cclis import CCLIS, CCLISConfig
from cclis.nn.network import PrototypeNetwork, Representation


def make(**settings: Any) -> CCLIS:
    torch.manual_seed(0)
    config = CCLISConfig(embedding=8, **settings)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12))
    return CCLIS(config, CCLIS.make_network(config, encoder, 1, 12, classes=6))


def batch(labels: list[int], proposal: list[float] | None = None) -> Batch:
    images = torch.rand(len(labels), 1, 4, 4, generator=torch.Generator().manual_seed(1))
    g = torch.tensor(proposal) if proposal else torch.ones(len(labels))
    # Samples of the first two classes are replayed.
    old, none = torch.tensor(labels) < 2, torch.zeros(len(labels), dtype=torch.bool)
    return Batch(images, torch.tensor(labels), g, old, none)


def represented(embeddings: Tensor) -> Representation:
    return Representation(embeddings, embeddings)


def second_task(**settings: Any) -> CCLIS:
    method = make(**settings)
    method.begin_task(2)
    method.begin_task(2)
    return method


def test_the_first_task_has_contrast_alone() -> None:
    method = make()
    method.begin_task(2)
    some = batch([0, 1, 1, 0])
    losses = method.losses(some)
    similarity = method.network.similarity(some.images)
    assert losses.keys() == {"contrast"}
    expected = sample_nce(similarity, some.labels, temperature=0.5)
    torch.testing.assert_close(losses["contrast"], expected)


def test_later_tasks_add_distillation_over_the_old_classes() -> None:
    method = second_task(distill_weight=0.7)
    some = batch([0, 1, 2, 3, 2], [0.1, 0.2, 1, 1, 1])
    assert method.teacher is not None
    with torch.no_grad():
        next(method.network.projection.parameters()).mul_(1.5)
        losses = method.losses(some)
        now = method.network.similarity(some.images)[:4]
        before = method.teacher.similarity(some.images)[:2]
    contrast = sample_nce(now, some.labels, temperature=0.5, proposal=some.proposal, old_classes=2)
    distill = prd(now[:2], before, student_temperature=0.2, teacher_temperature=0.1)
    torch.testing.assert_close(losses["contrast"], contrast)
    torch.testing.assert_close(losses["distill"], 0.7 * distill)


def test_the_teacher_is_frozen_in_eval_mode() -> None:
    method = second_task()
    teacher = method.teacher
    assert teacher is not None
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    method.network.train()
    sum(method.losses(batch([0, 1, 2, 3])).values(), torch.zeros(())).backward()
    assert not teacher.training
    assert all(p.grad is None for p in teacher.parameters())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert any(p.grad is not None for p in method.network.parameters())


def test_the_teacher_is_renewed_in_place() -> None:
    method = second_task()
    teacher = method.teacher
    with torch.no_grad():
        method.network.prototypes.mul_(-1)
    method.begin_task(2)
    assert method.teacher is teacher
    assert teacher is not None
    torch.testing.assert_close(teacher.prototypes.data, method.network.prototypes.data)
    method.network.widen(9, torch.Generator())
    method.begin_task(1)
    assert method.teacher is not None
    assert method.teacher.classes == 9


def test_distillation_can_be_switched_off() -> None:
    method = second_task(distillation=False)
    assert method.losses(batch([0, 2, 3])).keys() == {"contrast"}


def test_importance_sampling_can_be_switched_off() -> None:
    g = [0.01, 0.5, 1, 1, 1]
    weighted = second_task().losses(batch([0, 1, 1, 2, 3], g))["contrast"]
    plain = second_task(importance_sampling=False).losses(batch([0, 1, 1, 2, 3], g))["contrast"]
    even = second_task(importance_sampling=False).losses(batch([0, 1, 1, 2, 3]))["contrast"]
    assert not torch.isclose(weighted, plain)
    assert torch.equal(plain, even)
    random = second_task(selection="random").losses(batch([0, 1, 1, 2, 3], g))["contrast"]
    assert torch.equal(random, plain)


def test_samples_of_a_class_that_comes_again_are_not_weighted() -> None:
    method = second_task()
    # Of the task: the first of class 0 and the second of class 1.
    replayed = torch.tensor([False, True, True, False, False])
    some = dataclasses.replace(batch([0, 0, 1, 1, 2], [1, 0.1, 0.2, 1, 1]), replayed=replayed)
    similarity = method.network.similarity(some.images)[:4]
    given = {"temperature": 0.5, "proposal": some.proposal, "old_classes": 2}
    expected = sample_nce(similarity, some.labels, replayed=replayed, **given)
    found = method.losses(some)["contrast"]
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, sample_nce(similarity, some.labels, **given))


def test_prototypes_are_renormalised_before_every_step() -> None:
    method = make()
    with torch.no_grad():
        method.network.prototypes.mul_(3)
    method.before_step(batch([0]))
    torch.testing.assert_close(method.network.prototypes.norm(dim=1), torch.ones(6))


def test_prototypes_have_their_own_learning_rate() -> None:
    method = make(learning_rate=0.7, prototype_learning_rate=0.03)
    others, prototypes = method.parameter_groups()
    assert prototypes.parameters == [method.network.prototypes]
    assert (others.learning_rate, prototypes.learning_rate) == (0.7, 0.03)
    everything = {id(p) for p in method.network.parameters()}
    assert {id(p) for g in (others, prototypes) for p in g.parameters} == everything


def kept(method: CCLIS, passes: list[Tensor], labels: Tensor, capacity: int) -> Any:
    calls = iter(passes)

    def represent(*, augmented: bool = True) -> Representation:
        assert augmented
        return represented(next(calls))

    rng = torch.Generator().manual_seed(0)
    found = method.select_exemplars(Visible(labels, represent), capacity, rng)
    assert next(calls, None) is None
    assert found.diagnosis["kept"] == labels[found.indices].bincount(minlength=4).tolist()
    return found


def test_scores_are_averaged_over_passes_and_normalised_over_the_visible() -> None:
    method = second_task(score_passes=3, temperature=0.3)
    labels = torch.arange(40) % 4
    passes = [nn.functional.normalize(torch.randn(40, 8), dim=1) for _ in range(3)]
    assert method.passes == 3
    found = kept(method, passes, labels, 40)
    prototypes = method.network.prototypes[:4].detach().clone()
    with torch.no_grad():
        method.network.prototypes.mul_(1.5)  # off the sphere, as the last step leaves them
    again = kept(method, passes, labels, 40)
    torch.testing.assert_close(again.proposal, found.proposal)
    score = torch.zeros(40, dtype=torch.float64)
    for z in passes:
        p = (prototypes @ z.T / 0.3).double().softmax(dim=1)
        for j in range(40):
            score[j] += sum(p[i, j] for i in range(4) if i != labels[j]) / 3
    for j, g in zip(found.indices.tolist(), found.proposal.tolist(), strict=True):
        assert g == pytest.approx(float(score[j] / score[labels == labels[j]].sum()), rel=1e-4)


def test_random_selection_scores_nothing_and_is_uniform() -> None:
    method = second_task(selection="random")
    labels = torch.tensor([0] * 10 + [1] * 30 + [2] * 5 + [3] * 5)
    found = kept(method, [nn.functional.normalize(torch.randn(50, 8), dim=1)], labels, 8)
    assert method.passes == 1
    assert labels[found.indices].bincount().tolist() == [2, 2, 2, 2]
    visible = labels.bincount()[labels[found.indices]]
    torch.testing.assert_close(found.proposal, 1 / visible.float())


def test_the_network_has_prototypes() -> None:
    assert isinstance(make().network, PrototypeNetwork)
