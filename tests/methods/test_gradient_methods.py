"""Methods that look at gradients: GEM, GSS, GCR."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cclis import load_benchmark
from cclis.data.images import ImageSet
from cclis.engine.events import StepDone
from cclis.engine.trainer import Trainer
from cclis.functional.coreset import weighted_coreset
from cclis.functional.gradients import gem_coefficients, gss_slots, inner_products
from cclis.memory import Memory
from cclis.methods import Batch, Visible, make_config
from cclis.nn.network import Representation
from tests.conftest import CONFIGS, METHODS, learn, quick

SHAPE = (8, 8, 1)


def method(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name](**settings)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    return METHODS[name](config, METHODS[name].make_network(config, encoder, 1, 5, classes=6))


def trainer(name: str, **settings: Any) -> Trainer:
    config = make_config(
        name, {**quick(name), "memory": 20, "padding": 1, "batch_size": 16, **settings}
    )
    return Trainer(config, SHAPE, 10)


def batch(sizes: tuple[int, ...], *, filled: bool = True, **extras: Tensor) -> Batch:
    rng = torch.Generator().manual_seed(1)
    rows = sum(sizes)
    images = torch.rand(rows, 1, 4, 4, generator=rng)
    labels = torch.randint(0, 4, (rows,), generator=rng)
    replayed = torch.arange(rows) >= sizes[0]
    padding = replayed & (not filled)
    return Batch(images, labels, torch.ones(rows), replayed, padding, extras, sizes)


# ---------------------------------------------------------------------------------------- GEM


def test_gem_is_bounded_by_each_past_task() -> None:
    gem, some = method("gem"), batch((4, 3, 2))
    logits = gem.network.logits(some.images)
    (loss,) = gem.losses(some).values()
    torch.testing.assert_close(loss, F.cross_entropy(logits[:4], some.labels[:4]))
    first, second = gem.auxiliary_losses(some)
    torch.testing.assert_close(first, F.cross_entropy(logits[4:7], some.labels[4:7]))
    torch.testing.assert_close(second, F.cross_entropy(logits[7:], some.labels[7:]))


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_gem_leans_towards_past_tasks_by_its_memory_strength(strength: float) -> None:
    # Past gradients at right angles to one another; the first is harmed by 3, the second by less
    # than nothing: only where a step is turned at all does γ lean towards both.
    gradients = torch.tensor([[-3.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    strengths = method("gem", memory_strength=strength).gradient_coefficients(
        inner_products(gradients)
    )
    assert strengths.tolist() == pytest.approx([max(3.0, strength), strength])


def test_a_task_learned_by_heart_hardly_restrains_gem_with_a_ridge() -> None:
    # A step against a past gradient of length 1/100, whose product with itself is a tenth of 0.001.
    products = inner_products(torch.tensor([[-1.0], [0.01]]).double())
    for ridge, expected in ((0.0, 1 / 0.01), (1e-3, 0.01 / (1e-4 + 1e-3))):
        gem = method("gem", memory_strength=0.0, gradient_ridge=ridge)
        assert gem.gradient_coefficients(products).tolist() == pytest.approx([expected])


@pytest.mark.parametrize(("expected", "kept"), [(None, 12), (1, 12), (2, 12), (4, 6), (12, 2)])
def test_gem_leaves_room_for_classes_to_come_where_it_is_told_to(
    expected: int | None, kept: int
) -> None:
    gem = method("gem", expected_classes=expected)
    gem.begin_task(2)
    labels = torch.arange(40) % 2
    visible = Visible(labels, lambda augmented: Representation(labels, labels))
    chosen = gem.select_exemplars(visible, 12, torch.Generator().manual_seed(0)).indices
    assert labels[chosen].bincount().tolist() == [kept // 2, kept // 2]


def test_no_step_of_gem_goes_against_a_past_task(monkeypatch) -> None:
    some = trainer("gem", learning_rate=0.1, memory_strength=0.0)
    digits = load_benchmark("split-digits", limit=40)
    seen: list[Tensor] = []
    turn = some._step._apply

    def watched(inputs: dict[str, Tensor]) -> None:
        seen.append(some._step._gradients.clone())
        turn(inputs)

    monkeypatch.setattr(some._step, "_apply", watched)
    update = some._optimizer._sgd.step
    applied: list[Tensor] = []
    monkeypatch.setattr(
        some._optimizer._sgd, "step", lambda: (applied.append(some._optimizer.gradient), update())
    )
    for index in range(4):
        learn(some, digits[index].train, 2)
    assert {len(gradients) - 1 for gradients in seen} == {1, 2, 3}
    harmful = 0
    # Steps of the first task come before; there is nothing to go against.
    for gradients, used in zip(seen, applied[-len(seen) :], strict=True):
        gradient, others = gradients[0], gradients[1:]
        strengths = gem_coefficients(inner_products(gradients), margin=0.0)
        torch.testing.assert_close(used, gradient + strengths.float() @ others)
        cosine = others @ used / (others.norm(dim=1) * used.norm() + 1e-12)
        assert float(cosine.min()) > -1e-4
        if bool((others @ gradient < 0).any()):
            harmful += 1
        else:
            assert torch.equal(gradient, used)
    assert harmful > 3


def test_batch_norm_follows_the_task_last(monkeypatch) -> None:
    # Only gradients are taken of past tasks; the network is used with the statistics of the newest.
    some = trainer("gem", epochs=1)
    digits = load_benchmark("split-digits", limit=40)
    learn(some, digits[0].train, 2)
    norm = next(m for m in some.method.network.modules() if isinstance(m, nn.BatchNorm2d))
    losses, left = some._step._losses, []

    def watched(now: Batch) -> dict[str, Tensor]:
        found = losses(now)
        left.append(norm.running_mean.clone())
        return found

    monkeypatch.setattr(some._step, "_losses", watched)
    events = some.learn(digits[1].train, 2)
    after = [norm.running_mean.clone() for event in events if isinstance(event, StepDone)]
    assert len(left) == len(after) > 2
    assert all(torch.equal(*pair) for pair in zip(left, after, strict=True))


def test_a_step_without_auxiliary_losses_is_one_update(monkeypatch) -> None:
    some = trainer("gem", epochs=1)
    digits = load_benchmark("split-digits", limit=40)
    learn(some, digits[0].train, 2)
    auxiliary, calls, updates = some._step._auxiliary, [0], [0]

    def now_and_then(batch: Batch) -> list[Tensor]:
        calls[0] += 1
        return auxiliary(batch) if calls[0] % 2 else []

    update = some._optimizer._sgd.step
    monkeypatch.setattr(some._step, "_auxiliary", now_and_then)
    monkeypatch.setattr(
        some._optimizer._sgd, "step", lambda: (updates.__setitem__(0, updates[0] + 1), update())
    )
    learn(some, digits[1].train, 2)
    assert calls[0] > 2
    assert updates == calls


def test_gem_sees_all_of_its_memory_task_by_task(monkeypatch) -> None:
    some = trainer("gem", memory=21)
    digits = load_benchmark("split-digits", limit=40)
    sizes = []
    losses = some._step._losses

    def recorded(now: Batch) -> dict[str, Tensor]:
        sizes.append(now.sizes)
        for part in range(1, len(now.sizes)):
            tasks = now.part(part).labels // 2
            assert bool((tasks == part - 1).all())
        return losses(now)

    monkeypatch.setattr(some._step, "_losses", recorded)
    for index in range(3):
        learn(some, digits[index].train, 2)
    assert {len(s) for s in sizes} == {1, 2, 3}
    assert {sum(s[1:]) for s in sizes if len(s) > 1} == {21}


# ---------------------------------------------------------------------------------------- GSS


def test_gss_scores_every_sample_by_its_own_gradient() -> None:
    torch.manual_seed(0)
    config = CONFIGS["gss"]()
    encoder = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    encoder.append(nn.Flatten())
    network = METHODS["gss"].make_network(config, encoder, 1, 12, 6)
    gss, some = METHODS["gss"](config, network), batch((4, 3, 3))
    statistics = encoder[1].running_mean.clone()
    gss.before_step(some)
    assert torch.equal(encoder[1].running_mean, statistics)
    assert network.training

    network.eval()
    weights = [encoder[0].weight, network.classifier.weight]
    rows = []
    for image, label in zip(some.images, some.labels, strict=True):
        loss = F.cross_entropy(network.logits(image[None]), label[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
    for row, score in zip(rows[:4], some.to_store["score"].tolist(), strict=True):
        cosines = [float(F.cosine_similarity(row, other, dim=0)) for other in rows[7:]]
        assert score == pytest.approx(max(cosines) + 1, abs=1e-5)


def test_gss_learns_from_the_task_and_the_first_replay() -> None:
    gss, some = method("gss"), batch((4, 3, 3))
    logits = gss.network.logits(some.images[:7])
    (loss,) = gss.losses(some).values()
    torch.testing.assert_close(loss, F.cross_entropy(logits, some.labels[:7]))


def test_gss_leaves_out_what_stands_in_for_an_empty_memory() -> None:
    gss, some = method("gss"), batch((4, 3, 3), filled=False)
    (loss,) = gss.losses(some).values()
    logits = gss.network.logits(some.images[:4])
    torch.testing.assert_close(loss, F.cross_entropy(logits, some.labels[:4]))


def test_scores_are_within_their_bounds_whatever_cosines_are(monkeypatch) -> None:
    # Rounding may pass a cosine's bounds; of what is not finite nothing is taken in.
    cosines = torch.tensor([[-1.01, -1.02], [1.01, 0.0], [torch.nan, 0.0], [-0.5, 0.5]])
    monkeypatch.setattr("cclis.methods.gss.gradient_cosines", lambda *_: cosines)
    gss, some = method("gss"), batch((4, 3, 3))
    gss.before_step(some)
    assert some.to_store["score"].tolist() == [0, 2, 2, 1.5]


def test_the_memory_of_gss_is_what_its_rule_makes_of_the_stream(monkeypatch) -> None:
    some = trainer("gss", epochs=2)
    take_in, offered = some._replay.take_in, []

    def watched(inputs: Any, count: int, slots: Tensor, kept: dict[str, Tensor]) -> None:
        offered.append((inputs["images"][:count].clone(), kept["score"].clone()))
        take_in(inputs, count, slots, kept)

    monkeypatch.setattr(some._replay, "take_in", watched)
    rng = torch.Generator()
    rng.set_state(some._replay.generators["admit"].get_state())
    digits = load_benchmark("split-digits", limit=40)
    for task in range(2):
        learn(some, digits[task].train, 2)
    held: dict[int, tuple[Tensor, float]] = {}
    for images, scores in offered:
        before = torch.tensor([held[slot][1] for slot in range(len(held))])
        slots = gss_slots(before, scores, 20, generator=rng)
        new = zip(images, scores.tolist(), strict=True)
        held |= {
            slot: sample for slot, sample in zip(slots.tolist(), new, strict=True) if slot >= 0
        }
    kept = some.memory.samples
    assert kept is not None
    assert len(kept) == len(held) == 20
    assert torch.equal(kept.images, torch.stack([held[slot][0] for slot in range(20)]))
    assert some.memory.extras["score"].tolist() == [held[slot][1] for slot in range(20)]


def test_the_first_samples_have_nothing_to_be_compared_with() -> None:
    gss, some = method("gss"), batch((4, 3, 3), filled=False)
    gss.before_step(some)
    assert some.to_store["score"].tolist() == pytest.approx([0.1] * 4)


def test_gss_fills_its_memory_and_then_replaces_by_score() -> None:
    gss, memory, rng = method("gss"), Memory(4), torch.Generator().manual_seed(0)

    def offer(*scores: float) -> list[int]:
        kept = {"score": torch.tensor(scores)}
        # Where a reservoir would put them does not matter.
        found = gss.admit(torch.zeros(len(scores), dtype=torch.int64), kept, memory, rng)
        images = torch.zeros(len(scores), 4, 4, 1, dtype=torch.uint8)
        memory.insert(found, ImageSet(images, torch.arange(len(scores))), kept)
        return found.tolist()

    assert offer(1.7, 1.2) == [0, 1]
    # In the middle of a batch there is no room left.
    assert offer(1.7, 1.1, 1.9, 1.8) == [2, 3, -1, -1]
    assert memory.extras["score"].tolist() == pytest.approx([1.7, 1.2, 1.7, 1.1])
    # Full: a sample that points where a reference does is never taken in, an opposite one often.
    taken = [offer(1.2, 0.01) for _ in range(20)]
    assert {first for first, _ in taken} == {-1}
    assert any(second >= 0 for _, second in taken)


def test_gss_without_a_memory_keeps_nothing() -> None:
    kept, rng = {"score": torch.tensor([0.1, 1.5])}, torch.Generator()
    assert method("gss").admit(torch.tensor([-1, -1]), kept, Memory(0), rng).tolist() == [-1, -1]


# ---------------------------------------------------------------------------------------- GCR


def test_gcr_weighs_what_it_replays() -> None:
    rng = torch.Generator().manual_seed(3)
    logits, weight = torch.rand(6, 6, generator=rng), torch.rand(6, generator=rng)
    gcr = method("gcr", logit_weight=0.7, label_weight=0.4)
    some = batch((4, 3, 3), logits=logits, weight=weight)
    out = gcr.network.logits(some.images)
    found = gcr.losses(some)
    torch.testing.assert_close(found["cross_entropy"], F.cross_entropy(out[:4], some.labels[:4]))
    squared = [weight[i] * F.mse_loss(out[4 + i], logits[i]) for i in range(3)]
    expected = 0.7 * torch.stack(squared).sum() / weight[:3].sum()
    torch.testing.assert_close(found["logits"], expected)
    cost = [weight[i] * F.cross_entropy(out[4 + i], some.labels[4 + i]) for i in range(3, 6)]
    expected = 0.4 * torch.stack(cost).sum() / weight[3:].sum()
    torch.testing.assert_close(found["labels"], expected)


def gcr_of(features: int, classes: int, seen: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS["gcr"](logit_weight=0.7, label_weight=0.4, **settings)
    network = METHODS["gcr"].make_network(config, nn.Flatten(), 1, features, classes)
    gcr = METHODS["gcr"](config, network)
    gcr.begin_task(seen)
    return gcr


def candidates(gcr: Any, labels: Tensor, features: Tensor) -> Visible:
    rng = torch.Generator().manual_seed(4)
    extras = {
        "logits": torch.rand(len(labels), gcr.network.classes, generator=rng),
        "weight": torch.rand(len(labels), generator=rng) + 0.5,
    }

    def represent(*, augmented: bool) -> Representation:
        assert not augmented  # gradients are those of the samples as they are
        return Representation(features, features)

    return Visible(labels, represent, extras)


def test_the_coreset_is_balanced_weighted_and_has_the_logits_of_before() -> None:
    gcr = gcr_of(5, 6, 4)
    labels = torch.tensor([0] * 5 + [1] * 5 + [2] * 30 + [3] * 30)
    features = torch.rand(70, 5, generator=torch.Generator().manual_seed(4))
    visible = candidates(gcr, labels, features)
    kept = gcr.select_exemplars(visible, 12, torch.Generator().manual_seed(5))
    assert labels[kept.indices].bincount().tolist() == [3, 3, 3, 3]
    assert bool((kept.extras["weight"] > 0).all())
    for label in range(4):
        now = kept.extras["weight"][labels[kept.indices] == label]
        before = visible.extras["weight"][labels == label]
        assert float(now.sum()) == pytest.approx(float(before.sum()), rel=1e-4)
    assert torch.equal(kept.extras["logits"], visible.extras["logits"][kept.indices])


def test_the_setting_is_the_ridge_of_the_coreset() -> None:
    features = torch.rand(12, 5, generator=torch.Generator().manual_seed(1))
    for ridge in (0.1, 5.0):
        gcr = gcr_of(5, 3, 1, weight_ridge=ridge)
        visible = candidates(gcr, torch.zeros(12, dtype=torch.int64), features)
        kept = gcr.select_exemplars(visible, 4, torch.Generator())
        gradients = gcr._gradients(features, visible.extras["logits"], 0)
        rows, weight = weighted_coreset(gradients, visible.extras["weight"], 4, ridge=ridge)
        assert torch.equal(kept.indices, rows)
        torch.testing.assert_close(kept.extras["weight"], weight)


@pytest.mark.parametrize(("first_epochs", "epochs"), [(None, 1), (1, 1), (None, 2), (2, 1), (1, 2)])
def test_what_gcr_gets_wrong_as_it_passes_by_weighs_nothing(
    first_epochs: int | None, epochs: int
) -> None:
    gcr = method("gcr", first_epochs=first_epochs, epochs=epochs)
    some = batch((40, 3, 3), logits=torch.zeros(6, 6), weight=torch.ones(6))
    gcr.losses(some)
    right = some.to_store["logits"].argmax(dim=1) == some.labels[:40]
    assert 0 < int(right.sum()) < 40
    often = 2 in (first_epochs, epochs)
    expected = right.float() if often else torch.ones(40)
    assert torch.equal(some.to_store["weight"], expected)


def test_what_weighs_nothing_is_kept_only_where_there_is_too_little_else() -> None:
    gcr = gcr_of(2, 2, 2)
    features = torch.rand(12, 2, generator=torch.Generator().manual_seed(1))
    visible = candidates(gcr, torch.tensor([0] * 6 + [1] * 6), features)
    # Four of class 0 and two of class 1 were got right.
    visible.extras["weight"][[4, 5, 6, 7, 8, 9]] = 0
    kept = gcr.select_exemplars(visible, 8, torch.Generator().manual_seed(5))
    assert sorted(kept.indices.tolist()[:4]) == [0, 1, 2, 3]
    assert {10, 11} < set(kept.indices.tolist()[4:])
    assert bool((kept.extras["weight"] > 0).all())
    # Those that were got wrong are samples of their class all the same.
    right = visible.extras["weight"]
    wholes = [float(right[:6].sum()) + 2, float(right[6:].sum()) + 4]
    assert kept.extras["weight"].view(2, 4).sum(dim=1).tolist() == pytest.approx(wholes)
    visible.extras["weight"][:] = 0
    kept = gcr.select_exemplars(visible, 8, torch.Generator().manual_seed(5))
    assert kept.extras["weight"].tolist() == [1.5] * 8


def test_the_gradients_to_match_are_those_of_what_is_replayed() -> None:
    gcr = gcr_of(5, 4, 2)
    rng = torch.Generator().manual_seed(6)
    features, stored = torch.rand(6, 5, generator=rng), torch.rand(6, 4, generator=rng)
    found = gcr._gradients(features, stored, 1)
    for row in range(6):
        logits = gcr.network.classifier(features[row : row + 1])
        loss = 0.4 * F.cross_entropy(logits, torch.tensor([1]))
        loss = loss + 0.7 * F.mse_loss(logits, stored[row : row + 1])
        weight, bias = torch.autograd.grad(loss, list(gcr.network.classifier.parameters()))
        expected = torch.cat([weight, bias[:, None]], dim=1).flatten()
        torch.testing.assert_close(found[row], expected)


def test_there_are_as_many_candidates_as_the_memory_holds() -> None:
    assert trainer("gcr", memory=30).memory.reservoir == 30
    assert trainer("gcr", memory=30, candidates=7).memory.reservoir == 7
    assert trainer("gcr", memory=0).memory.reservoir == 0


def test_a_reservoir_of_the_task_is_replayed_and_chosen_from(monkeypatch) -> None:
    some = trainer("gcr", candidates=30, memory=20, epochs=2)
    digits = load_benchmark("split-digits", limit=40)
    pools, replayed = [], []
    keep, losses = some.method.select_exemplars, some._step._losses

    def watched(visible: Visible, capacity: int, generator: torch.Generator) -> Any:
        pools.append(visible.labels.clone())
        return keep(visible, capacity, generator)

    def recorded(now: Batch) -> dict[str, Tensor]:
        replayed.append(now.labels[now.sizes[0] :].clone())
        return losses(now)

    monkeypatch.setattr(some.method, "select_exemplars", watched)
    monkeypatch.setattr(some._step, "_losses", recorded)
    for index in range(2):
        replayed.clear()
        learn(some, digits[index].train, 2)
        assert len(some.memory) == 20
    assert [len(pool) for pool in pools] == [30, 20 + 30]
    assert (pools[1] // 2).tolist() == [0] * 20 + [1] * 30
    # As of a reservoir of both tasks: the second's share grows from none to nearly a half.
    assert len(replayed) == 10
    fresh = [20 * step // 10 for step in range(10)]
    expected = [rows / (20 + rows) for rows in fresh]
    shares = [float((labels >= 2).float().mean()) for labels in replayed]
    assert shares[0] == expected[0] == 0
    for part in (slice(0, 5), slice(5, 10)):
        assert sum(shares[part]) / 5 == pytest.approx(sum(expected[part]) / 5, abs=0.06)


def agreement(gradients: Tensor, weights: Tensor, target: Tensor) -> float:
    return float(F.cosine_similarity(weights @ gradients, target, dim=0))


def test_the_coresets_gradient_points_where_that_of_all_does() -> None:
    gcr = gcr_of(64, 4, 2)
    rng = torch.Generator().manual_seed(6)
    features = torch.randn(60, 64, generator=rng).relu()
    gradients = gcr._gradients(features, torch.randn(60, 4, generator=rng), 0)
    before = 3 * torch.rand(60, generator=rng)
    target = before @ gradients
    chosen, weight = weighted_coreset(gradients, before, 6, ridge=0.5)
    reached = agreement(gradients[chosen], weight, target)
    assert reached > agreement(gradients[chosen], torch.ones(6), target)
    random = [torch.randperm(60, generator=torch.Generator().manual_seed(s))[:6] for s in range(50)]
    assert reached > max(agreement(gradients[rows], before[rows], target) for rows in random)
