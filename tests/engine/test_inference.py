from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cclis import load_benchmark
from cclis.engine.inference import Inference
from cclis.engine.trainer import Trainer
from cclis.methods import make_config
from tests.conftest import QUICK


@pytest.fixture(scope="module")
def inference() -> Inference:
    trainer = Trainer(make_config("cclis", {**QUICK, "device": "cpu"}), (8, 8, 1), 10)
    return trainer.inference


def images(index: int) -> torch.Tensor:
    return load_benchmark("split-digits")[index].train.images


def test_what_the_caller_has_switched_on_changes_nothing(inference: Inference) -> None:
    plain = inference(images(0))
    with torch.inference_mode():
        within = inference(images(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = inference(images(0))
    assert not within.features.is_inference()
    assert not within.features.requires_grad
    for other in (within, mixed):
        assert torch.equal(plain.features, other.features)
        assert torch.equal(plain.embeddings, other.embeddings)


def test_threads_share_a_network_in_eval_mode(inference: Inference) -> None:
    inference.network.eval()
    alone = [inference(images(index)).embeddings for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: inference(images(index % 4)).embeddings, range(16)))
    assert all(torch.equal(alone[n % 4], each) for n, each in enumerate(found))


def test_the_network_goes_back_to_the_mode_it_had(inference: Inference) -> None:
    for training in (True, False):
        inference.network.train(training)
        inference(images(0))
        assert inference.network.encoder.training is training
