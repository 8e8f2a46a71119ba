"""Whole runs on a card: that they resume exactly, and what they say when its memory is full.

Where there is no GPU, what can be seen without one is seen on a pretended card.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from cclis import ContinualLearner
from cclis.data.images import ImageSet
from cclis.engine.inference import Inference
from cclis.engine.step import Step
from cclis.engine.trainer import Trainer
from cclis.errors import InputError
from cclis.experiment.interruption import Interrupted
from cclis.experiment.loop import resume, train
from cclis.methods import keeps_samples, make_config
from cclis.runs.directory import Run
from tests.conftest import METHODS, learn, quick

pytestmark = pytest.mark.usefixtures("card")
GPU = torch.cuda.is_available()
ENCODER, SIDE, WIDTH = ("resnet18", 32, 16) if GPU else ("conv", 16, 4)


STOPPED_AT = 13
"""A step of the second task that is replayed, or of the only one."""


@pytest.mark.parametrize("method", ["cclis", "derpp"] if GPU else list(METHODS))
def test_a_deterministic_run_that_was_stopped_ends_the_same(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick(method) | {"device": "cuda", "deterministic": True, "limit": 30}
    settings |= {"tasks": [2, 2], "batch_size": 16, "width": 4}
    settings |= {"memory": 20} if keeps_samples(method) else {}

    def config(name: str) -> Any:
        return make_config(method, {**settings, "output": str(tmp_path / name)})

    straight = train(config("straight"))
    calls = []
    step = Step.__call__

    def stopping(*given: Any) -> Any:
        calls.append(None)
        if len(calls) == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*given)

    monkeypatch.setattr(Step, "__call__", stopping)
    with pytest.raises(Interrupted):
        train(config("stopped"))
    stopped = Run.open(tmp_path / "stopped")
    assert stopped.checkpoints.names != []
    assert not stopped.ended
    resume(stopped, stopped.config)
    for key in ("class_il", "task_il"):
        assert straight.result.scores(key) == stopped.result.scores(key)
    last = straight.checkpoints.names[-1]
    assert last.startswith("task-")
    (first, _), (second, _) = (run.checkpoints.load(last) for run in (straight, stopped))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", ["derpp"] if GPU else list(METHODS))
def test_a_learner_learns_predicts_and_moves_from_a_card_to_the_host(
    method: str, tmp_path: Path
) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = images[:100].reshape(-1, 8, 8) / 16, labels[:100]
    settings = quick(method) | {"device": "cuda", "precision": "fp32", "epochs": 1, "width": 4}
    settings |= {"memory": 20} if keeps_samples(method) else {}
    learner = ContinualLearner(method, **settings)
    for task in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]):
        now = np.isin(labels, range(10) if METHODS[method].joint else task)
        learner.learn(images[now], labels[now])
        if METHODS[method].joint:
            break
    learner.save(tmp_path / "learner.safetensors")
    expected = learner.predict_proba(images)
    for device, error in (("cuda", 1e-6), ("cpu", 1e-4)):
        loaded = ContinualLearner.load(tmp_path / "learner.safetensors", device=device)
        np.testing.assert_allclose(loaded.predict_proba(images), expected, atol=error)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_passes_see_the_weights_as_they_are(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cclis.engine.inference.BATCH", 32)

    def images(count: int, first: int) -> ImageSet:
        rng = torch.Generator().manual_seed(first)
        pixels = torch.randint(0, 256, (count, SIDE, SIDE, 3), dtype=torch.uint8, generator=rng)
        return ImageSet(pixels, torch.arange(count) % 2 + first).to("cuda")

    settings = {"device": "cuda", "encoder": ENCODER, "width": WIDTH, "epochs": 1, "memory": 20}
    config = make_config("cclis", {**settings, "precision": precision, "deterministic": True})
    trainer = Trainer(config, (SIDE, SIDE, 3), 4)
    test = images(6 * 32 + 10, 0).images

    def both(inference: Inference) -> list[Tensor]:
        rng = torch.Generator(device="cuda").manual_seed(0)
        found = [inference(test), inference(test, rng)]
        return [part for each in found for part in (each.features, each.embeddings)]

    for first in (0, 2):
        learn(trainer, images(128, first), 2)
        recorded, again = both(trainer.inference), both(trainer.inference)
        fresh = Inference(trainer.method.network, trainer.fabric, config)
        fresh._passes = [fresh._pass, fresh._pass]
        for one, same, plain in zip(recorded, again, both(fresh), strict=True):
            assert torch.equal(one, same)
            assert torch.equal(one, plain)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_full_memory_says_which_batch_fits() -> None:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2048, 32, 32, 3), dtype=torch.uint8, generator=rng)
    task = ImageSet(images, torch.arange(2048) % 2)
    settings = {"device": "cuda", "encoder": "resnet18", "epochs": 1, "precision": "fp32"}

    def learn_in(batch: int) -> None:
        config = make_config("cclis", {**settings, "batch_size": batch, "score_passes": 1})
        learn(Trainer(config, (32, 32, 3), 2), task, 2)

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.04)
    try:
        with pytest.raises(InputError, match="batch_size") as said:
            learn_in(2048)
        found = re.search(
            r"batches of 2048 images of 32×32; batch_size (\d+) would", str(said.value)
        )
        assert found is not None, said.value
        learn_in(int(found[1]))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
