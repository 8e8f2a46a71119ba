from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cclis.data.augment import to_float
from cclis.data.benchmarks import load_benchmark
from cclis.data.images import ImageSet
from cclis.engine import inference as inference_module
from cclis.engine.devices import make_fabric
from cclis.engine.inference import Inference
from cclis.errors import InputError
from cclis.evaluation.heads import (
    HEADS,
    SHRINKAGE,
    Head,
    View,
    fit,
    fit_classifier,
    fit_discriminant,
    fit_linear,
    fit_linear_paper,
    fit_means,
    fit_prototype,
    heads_for,
)
from cclis.nn.conv import ConvEncoder
from cclis.nn.network import ClassifierNetwork, Network, PrototypeNetwork, Representation
from cclis.settings import AugmentationOptions, Config, EvaluationOptions
from tests.conftest import METHODS

AS_THEY_ARE = AugmentationOptions(crop="none", flip=0, jitter=0, grayscale=0)
OPTIONS = EvaluationOptions(mean_passes=3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def infer(network: Network, augmentation: AugmentationOptions = AS_THEY_ARE) -> Inference:
    config = Config(device="cpu", **dataclasses.asdict(augmentation))
    return Inference(network, make_fabric(config), config)


def look(
    inference: Inference,
    visible: ImageSet,
    classes: int,
    options: EvaluationOptions = OPTIONS,
    seed: int = 0,
) -> View:
    return View(inference, visible, classes, options, seed)


@pytest.fixture
def network() -> PrototypeNetwork:
    torch.manual_seed(0)
    return PrototypeNetwork(ConvEncoder(1, 4), 1, 8, embedding=6, classes=5)


@pytest.fixture
def classifier() -> ClassifierNetwork:
    torch.manual_seed(0)
    return ClassifierNetwork(ConvEncoder(1, 4), 1, 8, classes=5)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    """Some of the classes 0, 1 and 2."""
    return load_benchmark("split-digits", tasks=[3], limit=9)[0].train


def one_hot(labels: list[int], pixels: int = 4) -> ImageSet:
    """Images that are black but for the pixel that their class names."""
    index = torch.tensor(labels)
    images = 255 * F.one_hot(index, pixels).to(torch.uint8)
    return ImageSet(images.view(-1, 2, pixels // 2, 1), index)


def pixels_as_features(classes: int = 4) -> Inference:
    return infer(PrototypeNetwork(nn.Flatten(), 1, 4, embedding=4, classes=classes))


# ----------------------------------------------------------------------------------- Inference


def test_inference_leaves_the_network_as_it_was(network, digits):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for training in (True, False):
        network.train(training)
        found = infer(network, AugmentationOptions())(digits.images, generator())
        assert network.training is network.encoder.training is training
        assert not found.features.requires_grad
        assert not found.embeddings.requires_grad
    after = network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_inference_is_the_network_in_eval_mode(network, digits):
    found = infer(network.train())(digits.images)
    network.eval()
    features = network.features(to_float(digits.images))
    assert torch.equal(found.features, features)
    assert torch.equal(found.embeddings, network.project(features))


def test_batches_do_not_matter(network, digits, monkeypatch):
    whole = infer(network)(digits.images)
    monkeypatch.setattr(inference_module, "BATCH", 4)
    parts = infer(network)(digits.images)
    assert torch.allclose(parts.features, whole.features, atol=1e-6)
    assert torch.allclose(parts.embeddings, whole.embeddings, atol=1e-6)


def test_only_augmented_inference_is_random(network, digits):
    inference = infer(network, AugmentationOptions())
    plain = inference(digits.images).embeddings
    assert torch.equal(inference(digits.images).embeddings, plain)
    one, again, other = (inference(digits.images, generator(seed)).embeddings for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
    assert not torch.allclose(one, plain)


# --------------------------------------------------------------------------- means, prototypes


def naive_means(network: PrototypeNetwork, visible: ImageSet, classes: int) -> torch.Tensor:
    network.eval()
    means = []
    for label in range(classes):
        total = torch.zeros(6, dtype=torch.float64)
        for image, wanted in zip(visible.images, visible.labels, strict=True):
            if wanted == label:
                embedding = network.project(network.features(to_float(image[None])))
                total += embedding[0].detach().double()
        means.append(total / total.norm() if total.any() else total)
    return torch.stack(means).float()


def test_means_against_a_loop(network, digits):
    head = fit_means(look(infer(network), digits, 3, OPTIONS))
    assert head.on == "embeddings"
    assert torch.allclose(head.weight, naive_means(network, digits, 3), atol=1e-5)
    assert not head.bias.any()


def test_means_are_taken_over_augmented_passes(network, digits):
    inference = infer(network, AugmentationOptions())

    def mean(passes: int) -> torch.Tensor:
        options = EvaluationOptions(mean_passes=passes)
        return fit_means(look(inference, digits, 3, options)).weight

    assert torch.equal(mean(2), mean(2))
    assert not torch.allclose(mean(1), mean(2))
    rng = look(inference, digits, 3).rng("means")
    passes = [inference(digits.images, rng).embeddings for _ in range(2)]
    first = F.normalize(sum(p[digits.labels == 0].sum(dim=0) for p in passes), dim=0)
    assert torch.allclose(mean(2)[0], first, atol=1e-6)


def test_a_class_without_samples_is_never_chosen_by_its_mean(network, digits):
    inference = infer(network)
    without_one = digits[digits.labels != 1]
    head = fit_means(look(inference, without_one, 5, OPTIONS))
    scores = head.scores(inference(digits.images))
    assert scores.shape == (len(digits), 5)
    assert set(scores.argmax(dim=1).tolist()) <= {0, 2}
    # Even opposite to every mean there is no better choice.
    assert head.scores(Representation(scores, -head.weight[:1])).argmax() in (0, 2)


def test_discriminant_against_scikit_learn(network, digits):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    inference = infer(network, AugmentationOptions())
    view = look(inference, digits, 3, EvaluationOptions(mean_passes=4))
    head = fit_discriminant(view)
    rng = view.rng("means")
    features = torch.cat([inference(digits.images, rng).features for _ in range(4)]).double()
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE, priors=[1 / 3] * 3)
    lda.fit(features.numpy(), digits.labels.repeat(4).numpy())
    scores = head.scores(inference(digits.images)).double()
    theirs = torch.from_numpy(lda.decision_function(inference(digits.images).features.double()))
    # Alike up to what all classes have in common.
    torch.testing.assert_close(
        scores - scores[:, :1], theirs - theirs[:, :1], rtol=1e-3, atol=1e-3, check_dtype=False
    )


def test_discriminant_of_features_that_never_vary_and_of_absent_classes():
    visible, inference = one_hot([0, 1, 3] * 4), pixels_as_features()
    head = fit_discriminant(look(inference, visible, 5, QUICK))
    scores = head.scores(inference(visible.images))
    assert scores.argmax(dim=1).tolist() == visible.labels.tolist()
    assert bool(torch.isneginf(scores[:, [2, 4]]).all())


def test_absent_classes_do_not_change_the_discriminant_of_others(network, digits):
    inference = infer(network)
    alone, among = (fit_discriminant(look(inference, digits, classes)) for classes in (3, 5))
    torch.testing.assert_close(among.weight[:3], alone.weight)
    torch.testing.assert_close(among.bias[:3], alone.bias)


def test_discriminant_without_spread_is_the_nearest_mean():
    # Three images of lengths of their own: what rounding leaves of a covariance must not decide.
    images = torch.randint(0, 256, (3, 2, 2, 1), dtype=torch.uint8, generator=generator(5))
    visible, inference = (
        ImageSet(images.repeat(2, 1, 1, 1), torch.arange(6) % 3),
        pixels_as_features(),
    )
    head = fit("discriminant", look(inference, visible, 3, QUICK))
    others = torch.randint(0, 256, (200, 2, 2, 1), dtype=torch.uint8, generator=generator(6))
    features = inference(others).features
    nearest = torch.cdist(features, inference(images).features).argmin(dim=1)
    assert torch.equal(head.scores(inference(others)).argmax(dim=1), nearest)
    assert len(nearest.unique()) == 3


def test_a_head_of_infinite_scores_is_refused(network, digits):
    # A class without samples scores minus infinity, which is fine.
    assert fit("means", look(infer(network), digits, 4, OPTIONS)).bias[3] == -torch.inf
    diverged = ClassifierNetwork(ConvEncoder(1, 4), 1, 8, 4)
    with torch.no_grad():
        next(diverged.encoder.parameters()).fill_(3e38)
    with pytest.raises(InputError, match="network is no longer finite: a lower learning_rate may"):
        fit("classifier", look(infer(diverged), digits, 4, OPTIONS))
    whole = ClassifierNetwork(ConvEncoder(1, 4), 1, 8, 4)
    with torch.no_grad():
        whole.classifier.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="classifier is not finite: a lower learning_rate may"):
        fit("classifier", look(infer(whole), digits, 4, OPTIONS))


def test_prototype_head_is_the_normalised_sum(network, digits):
    with torch.no_grad():
        network.prototypes.mul_(3)  # as a step of training may leave them
    head = fit_prototype(look(infer(network), digits, 4, OPTIONS))
    means = naive_means(network, digits, 4)
    for label in range(4):
        trained = network.prototypes[label] / network.prototypes[label].norm()
        both = trained + means[label]
        assert torch.allclose(head.weight[label], both / both.norm(), atol=1e-5)
    # The fourth class has no samples: its prototype alone speaks for it.
    assert torch.allclose(head.weight[3], F.normalize(network.prototypes[3], dim=0), atol=1e-6)
    assert (head.on, head.bias.tolist()) == ("embeddings", [0] * 4)
    assert not head.weight.requires_grad


# -------------------------------------------------------------------------------- linear probe

QUICK = EvaluationOptions(probe_epochs=10, probe_learning_rate=0.5, probe_batch_size=8)


def test_the_probe_learns_what_is_separable():
    visible = one_hot([0, 1, 2, 3] * 10)
    inference = pixels_as_features()
    head = fit_linear(look(inference, visible, 4, QUICK))
    assert head.on == "features"
    predicted = head.scores(inference(visible.images)).argmax(dim=1)
    assert torch.equal(predicted, visible.labels)


def test_the_probe_draws_every_class_alike():
    # Both classes look the same, so the probe can learn nothing but how often it meets them.
    visible = ImageSet(
        torch.full((200, 2, 2, 1), 255, dtype=torch.uint8), (torch.arange(200) >= 190).long()
    )
    inference = pixels_as_features()
    options = EvaluationOptions(probe_epochs=10, probe_learning_rate=0.05, probe_batch_size=50)
    head = fit_linear(look(inference, visible, 2, options))
    odds = head.scores(inference(visible.images[:1])).softmax(dim=1)
    assert odds[0].tolist() == pytest.approx([0.5, 0.5], abs=0.1)


def test_the_seed_decides_the_probe():
    visible, inference = one_hot([0, 1, 2, 3] * 4), pixels_as_features()

    def weight(seed: int) -> torch.Tensor:
        return fit_linear(look(inference, visible, 4, QUICK, seed)).weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_the_probe_is_sgd_with_momentum_and_a_decaying_rate_to_the_last_epoch():
    options = EvaluationOptions(
        probe_epochs=100,
        probe_learning_rate=0.5,
        probe_batch_size=8,
        paper_probe_learning_rate=0.05,
    )
    visible, inference = one_hot([0, 1, 2, 3] * 4 + [0] * 5), pixels_as_features()
    view = look(inference, visible, 4, options)
    for name, rate in (("linear", 0.5), ("linear_paper", 0.05)):
        rng = view.rng("linear")
        layer = torch.empty(4, 5).uniform_(-(4**-0.5), 4**-0.5, generator=rng)
        layer.requires_grad_()
        sgd = torch.optim.SGD([layer], lr=rate, momentum=0.9)
        decay = [1.0] * 60 + [0.2] * 15 + [0.04] * 15 + [0.008] * 10
        for epoch in range(100):
            sgd.param_groups[0]["lr"] = rate * decay[epoch]
            share = torch.rand(2, 16, generator=rng, dtype=torch.float64)
            chosen = []
            for of_class, within in share.T.tolist():
                members = (visible.labels == int(4 * of_class)).nonzero()[:, 0]
                chosen.append(members[int(len(members) * within)])
            drawn = torch.stack(chosen)
            features = inference(visible.images[drawn], rng).features
            for half in (slice(0, 8), slice(8, 16)):
                logits = features[half] @ layer[:, :-1].T + layer[:, -1]
                loss = torch.nn.functional.cross_entropy(logits, visible.labels[drawn[half]])
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        head = view.probes[name]
        torch.testing.assert_close(head.weight, layer[:, :-1].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.bias, layer[:, -1].detach(), rtol=1e-4, atol=1e-5)
        assert not head.weight.requires_grad


def test_the_probe_takes_fewer_samples_than_a_batch_and_classes_without_any():
    visible, inference = one_hot([0, 2]), pixels_as_features()
    head = fit_linear(look(inference, visible, 4, QUICK))
    assert head.weight.shape == (4, 4)
    assert head.scores(inference(visible.images)).argmax(dim=1).tolist() == [0, 2]


def test_the_probe_does_not_train_the_network(network, digits):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    fit_linear(look(infer(network.train(), AugmentationOptions()), digits, 3, QUICK))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_probes_of_two_learning_rates_are_what_each_is_alone():
    visible, inference = one_hot([0, 1, 2, 3] * 4), pixels_as_features()
    both = dataclasses.replace(QUICK, paper_probe_learning_rate=0.1)
    other = dataclasses.replace(QUICK, probe_learning_rate=0.1)
    found = look(inference, visible, 4, both)
    for head, alone in ((fit_linear, QUICK), (fit_linear_paper, other)):
        expected = fit_linear(look(inference, visible, 4, alone))
        assert torch.allclose(head(found).weight, expected.weight, atol=1e-6)
    assert not torch.allclose(fit_linear(found).weight, fit_linear_paper(found).weight)
    assert heads_for(("linear", "means"), both) == ("linear_paper", "linear", "means")
    # The method's own head stays last, whatever else is asked for.
    for method in METHODS.values():
        assert heads_for(method.heads, both)[-1] == method.heads[-1]
    assert heads_for(("linear", "means"), QUICK) == ("linear", "means")


# ---------------------------------------------------------------------------------- classifier


def test_the_classifier_head_gives_the_networks_own_logits(classifier, digits):
    inference = infer(classifier)
    head = fit_classifier(look(inference, digits, 3, OPTIONS))
    scores = head.scores(inference(digits.images))
    expected = classifier.eval().logits(to_float(digits.images))[:, :3]
    assert torch.allclose(scores, expected, atol=1e-6)
    with torch.no_grad():
        classifier.classifier.weight.zero_()
    assert head.weight.any()


def test_a_head_needs_its_kind_of_network(network, classifier, digits):
    with pytest.raises(TypeError, match="'prototype' needs a network with prototypes"):
        HEADS["prototype"](look(infer(classifier), digits, 3, OPTIONS))
    with pytest.raises(TypeError, match="'classifier' needs a network with a classifier"):
        HEADS["classifier"](look(infer(network), digits, 3, OPTIONS))


def test_a_head_looks_at_features_or_embeddings():
    seen = Representation(torch.eye(2), 10 * torch.eye(2))
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.0])
    assert Head("features", weight, bias).scores(seen).tolist() == [[1.5, 3], [2.5, 4]]
    assert Head("embeddings", weight, bias).scores(seen).tolist() == [[10.5, 30], [20.5, 40]]
