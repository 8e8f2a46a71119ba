"""A step against a plain loop; on a GPU, the recorded step against the one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cclis import load_benchmark
from cclis.config import make_config
from cclis.data.augment import augment, draw_chances
from cclis.data.images import ImageSet
from cclis.engine.trainer import Trainer
from tests.conftest import QUICK

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_step_is_what_plain_torch_does() -> None:
    settings = {
        **QUICK,
        "device": "cpu",
        "epochs": 1,
        "batch_size": 24,
        "momentum": 0.8,
        "weight_decay": 0.01,
    }
    config = make_config("cclis", {**settings, "learning_rate": 0.3, "temperature": 0.2})
    task = load_benchmark("split-digits", limit=12)[0].train
    trainer = Trainer(config, task.shape, 2)
    twin = Trainer(config, task.shape, 2)
    network = twin.method.network
    network.normalise_to(task.images)
    trainer.learn(task, 2)

    order = torch.randperm(24, generator=twin._order)
    images = augment(task.images[order], config, draw_chances(24, twin._augment))
    network.train()
    features = network.encoder((images - network.mean) / network.std)
    z = F.normalize(network.projection(features), dim=1)
    s = F.normalize(network.prototypes, dim=1) @ z.T / 0.2
    y = task.labels[order]
    loss = torch.stack([s[c].exp().sum().log() - s[c, j] for j, c in enumerate(y)]).mean()
    names = [name for name, _ in network.named_parameters()]
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    learned = dict(trainer.method.network.named_parameters())
    for name, parameter, gradient in zip(names, network.parameters(), gradients, strict=True):
        # The one step there is starts the warm-up, prototypes from another share of their rate.
        rate = 0.01 * 0.1 if name == "prototypes" else 0.3 * 0.01
        expected = parameter - rate * (gradient + 0.01 * parameter)
        torch.testing.assert_close(learned[name], expected, atol=2e-6, rtol=1e-4)


def colours(count: int, first: int) -> ImageSet:
    chance = torch.Generator().manual_seed(first)
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=chance)
    return ImageSet(images, torch.arange(count) % 2 + first)


def after_tasks(tasks: int = 2, **settings: Any) -> tuple[dict[str, Tensor], list[float]]:
    config = make_config(
        "cclis",
        {
            "device": "cuda",
            "precision": "fp32",
            "encoder": "resnet18",
            "width": 16,
            "epochs": 4,
            "batch_size": 64,
            "memory": 20,
            "learning_rate": 0.05,
            **settings,
        },
    )
    trainer = Trainer(config, (32, 32, 3), 8)
    losses: list[float] = []
    for first in range(0, 2 * tasks, 2):
        trainer.learn(colours(256, first), 2, lambda record: losses.append(record["loss"]))
    return trainer.state()[0], losses


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference among weights, momentum and batch statistics."""
    names = [n for n in a if n.startswith(("network", "momentum")) and a[n].is_floating_point()]
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp_min(1e-6)) for n in names)


@needs_gpu
def test_the_recorded_step_learns_what_the_plain_one_does(monkeypatch: Any) -> None:
    # 16 steps a task, 13 of them replayed.
    fast, fast_losses = after_tasks(compile=True)
    monkeypatch.setattr("cclis.engine.step.WARMUP", 10**9)
    unrecorded, unrecorded_losses = after_tasks(compile=True)
    plain, plain_losses = after_tasks(compile=False)
    assert fast_losses == pytest.approx(unrecorded_losses, rel=2e-3)
    assert fast_losses == pytest.approx(plain_losses, rel=2e-3)
    # The same kernels, recorded or not; other kernels round otherwise, and training amplifies it.
    assert difference(fast, unrecorded) < 0.05
    counted = [name for name in plain if "num_batches_tracked" in name]
    assert counted
    assert all(torch.equal(fast[name], plain[name]) for name in counted)
    # What these bounds can tell apart: a learning rate that stays what it was when recorded.
    _, other = after_tasks(compile=False, warmup_epochs=0)
    assert other != pytest.approx(plain_losses, rel=2e-3)


@needs_gpu
def test_a_run_compiles_the_step_at_most_twice() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    after_tasks(4, compile=True)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # The step without and with a teacher, and the augmented pass that scores.
    assert compiled <= 3


@needs_gpu
def test_bf16_learns_what_fp32_does() -> None:
    _, exact = after_tasks()
    _, mixed = after_tasks(precision="bf16")
    assert mixed == pytest.approx(exact, rel=0.05)


@needs_gpu
def test_digits_are_learned_as_well_on_a_gpu(tmp_path: Any) -> None:
    from cclis.config import read_yaml, recipe_path
    from cclis.experiment import train

    settings = read_yaml(recipe_path("split-digits/cclis-100"))
    settings |= {"output": str(tmp_path / "run"), "device": "cuda"}
    result = train(make_config(settings.pop("method"), settings)).result
    assert max(head["accuracy"] for head in result["class_il"].values()) >= 88
