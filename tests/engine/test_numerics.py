"""Torch's process-wide switches: set around a step or a pass on a GPU, and put back afterwards."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cclis import ContinualLearner
from cclis.data.images import ImageSet
from cclis.engine.devices import make_fabric, numerics
from cclis.engine.trainer import Trainer
from cclis.evaluation.accuracy import evaluate
from cclis.evaluation.heads import Head
from cclis.methods import make_config
from cclis.nn.network import Representation
from cclis.settings import RunOptions
from tests.conftest import learn, quick

on_a_card = pytest.mark.usefixtures("card")

Switches = tuple[object, ...]
EXACT = {"precision": "fp32", "deterministic": True}
COARSE = {"precision": "tf32", "deterministic": False}
WANTED = {True: (False, True, False, "highest", True), False: (True, False, True, "high", False)}
"""The switches of `EXACT` and of `COARSE`."""


def switches() -> Switches:
    """cuDNN's, the precision of matrix products, and whether kernels are deterministic."""
    cudnn = torch.backends.cudnn
    return (
        *(cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def task(first: int) -> ImageSet:
    images = torch.randint(0, 256, (16, 8, 8, 1), dtype=torch.uint8)
    return ImageSet(images, torch.arange(16) % 2 + first)


def watched(method: str, seen: list[Switches], **settings: Any) -> Trainer:
    """A trainer that notes the switches wherever its encoder or its teacher's is used."""
    options = {**quick(method), "memory": 4, "padding": 1, "batch_size": 8, **settings}
    config = make_config(method, {**options, "device": "cuda", "compile": False})
    trainer = Trainer(config, (8, 8, 1), 4)
    encoder = trainer.method.network.encoder
    encoder.register_forward_pre_hook(lambda *_: seen.append(switches()))
    return trainer


def test_on_a_cpu_nothing_is_switched() -> None:
    before = switches()
    options = RunOptions(device="cpu", deterministic=True, precision="fp32")
    with numerics(options, make_fabric(options).device):
        assert switches() == before
    assert switches() == before


@on_a_card
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("settings", [EXACT, COARSE], ids=["exact", "coarse"])
def test_on_a_gpu_switches_are_put_back(settings: dict[str, Any], failing: bool) -> None:
    before, options = switches(), RunOptions(device="cuda", **settings)
    device = make_fabric(options).device
    assert switches() == before
    with suppress(ZeroDivisionError), numerics(options, device):
        assert switches() == WANTED[options.deterministic]
        if failing:
            raise ZeroDivisionError
    assert switches() == before


@on_a_card
@pytest.mark.parametrize("method", ["cclis", "gss"])
def test_trainers_with_other_precision_do_not_disturb_each_other(method: str) -> None:
    before = switches()
    of_exact, of_coarse = list[Switches](), list[Switches]()
    exact = watched(method, of_exact, **EXACT)
    assert switches() == before
    coarse = watched(method, of_coarse, **COARSE)
    assert switches() == before
    for first in (0, 2):
        # Turn by turn, as threads may.
        for _ in zip(exact.learn(task(first), 2), coarse.learn(task(first), 2), strict=True):
            assert switches() == before
    for trainer in (exact, coarse):
        trainer.inference(task(0).images)
    assert switches() == before
    assert set(of_exact) == {WANTED[True]}
    assert set(of_coarse) == {WANTED[False]}
    assert len(of_exact) == len(of_coarse) > 8


PRODUCTS = (Tensor.matmul, Tensor.__matmul__, nn.functional.linear)


class Watch(TorchFunctionMode):
    """Notes the switches where they matter: products of 32 bits on a GPU, and sums of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Switches] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Whatever the precision, rows may be summed in any order.
        exact = func in PRODUCTS and args[0].dtype != torch.float32
        if func in (*PRODUCTS, Tensor.index_add) and not exact and args[0].device.type == "cuda":
            self.seen.append(switches())
        return func(*args, **(kwargs or {}))


@on_a_card
def test_exemplars_and_heads_are_computed_under_the_learners_own_switches() -> None:
    before, trainer, test = switches(), watched("cclis", [], **EXACT), task(0)
    with Watch() as watch:
        learned = learn(trainer, task(0), 2)
        # The steps' products of embeddings and prototypes, and the scores that select by them.
        assert set(watch.seen) == {WANTED[True]}
        for head in trainer.method.heads:
            watch.seen.clear()
            evaluate(trainer.inference, [head], learned.visible, [test], [2], trainer.config, 0)
            assert set(watch.seen) == {WANTED[True]}
            assert len(watch.seen) > 4
    assert switches() == before


@on_a_card
def test_learners_with_other_precision_predict_under_their_own_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen, scores = switches(), list[Switches](), Head.scores
    settings = {**quick("er"), "memory": 4, "padding": 1, "device": "cuda"}
    exact, coarse = (ContinualLearner("er", **settings, **each) for each in (EXACT, COARSE))
    for learner in (exact, coarse):
        learner.learn(task(0).images, task(0).labels)

    def noting(head: Head, represented: Representation) -> Tensor:
        seen.append(switches())
        return scores(head, represented)

    monkeypatch.setattr(Head, "scores", noting)
    for learner in (exact, coarse, exact):
        learner.predict(task(0).images)
        assert switches() == before
    assert seen == [WANTED[True], WANTED[False], WANTED[True]]
