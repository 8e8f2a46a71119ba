from __future__ import annotations

import pytest
import torch

from cclis import load_benchmark
from cclis.engine.trainer import Trainer
from cclis.evaluation.accuracy import evaluate
from cclis.evaluation.analysis import analyse, confusion, evenly_spaced
from cclis.methods import make_config
from tests.conftest import learn, quick


def test_confusions_against_a_loop() -> None:
    labels, predicted = torch.randint(5, (2, 200), generator=torch.Generator().manual_seed(0))
    found = confusion(labels, predicted, 5)
    for i in range(5):
        for j in range(5):
            wanted = sum((a, b) == (i, j) for a, b in zip(labels, predicted, strict=True))
            assert int(found[i, j]) == wanted


@pytest.mark.parametrize("count", [1, 3, 10, 31, 1000])
def test_all_classes_alike(count: int) -> None:
    labels = torch.tensor([0] * 5 + [2] * 50 + [3] * 40)
    chosen = evenly_spaced(labels, count)
    assert len(chosen) <= max(count, 1)
    assert len(set(chosen.tolist())) == len(chosen)
    share = max(1, count // 3)
    counts = labels[chosen].bincount(minlength=4).tolist()
    wanted = [min(share, n) for n in (5, 0, 50, 40)]
    kept = sum(n > 0 for n in counts)
    assert kept == min(3, count)
    assert all(n in (0, w) for n, w in zip(counts, wanted, strict=True))


@pytest.mark.parametrize("method", ["cclis", "er", "joint"])
def test_what_is_kept_of_the_last_evaluation(method: str) -> None:
    memory = 0 if method == "joint" else 20
    config = make_config(method, {**quick(method), "memory": memory})
    digits = load_benchmark("split-digits")
    trainer = Trainer(config, digits.image_shape, digits.classes)
    task = digits[0]
    learned = learn(trainer, task.train, 2)
    found = evaluate(
        trainer.inference, trainer.method.heads, learned.visible, [task.test], [2], config, 0
    )
    kept = analyse(found, trainer.memory, trainer.inference, 2, 30)
    for head, accuracies in found.accuracies.items():
        table = kept[f"confusion.{head}"]
        assert int(table.sum()) == len(task.test)
        right = 100 * int(table.diagonal().sum()) / len(task.test)
        assert right == pytest.approx(accuracies.class_il[0])
    assert len(kept["test.labels"]) == 30
    images = set(map(bytes, task.test.images.numpy()))
    assert all(bytes(image) in images for image in kept["test.images"].numpy())
    lengths = kept["test.embeddings"].float().norm(dim=1)
    assert torch.allclose(lengths, torch.ones(30), atol=1e-2)
    assert ("prototypes" in kept) == (method == "cclis")
    assert ("memory.images" in kept) == bool(memory)
    if memory:
        assert len(kept["memory.embeddings"]) == len(kept["memory.labels"]) == len(trainer.memory)
    none = analyse(found, trainer.memory, trainer.inference, 2, 0)
    assert not [name for name in none if name.startswith("test.") or "embeddings" in name]
