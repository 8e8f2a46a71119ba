"""The network in eval mode, applied to any number of images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cclis.data.augment import UNIFORMS, augment, draw_uniforms, to_float
from cclis.engine.prefetch import prefetch
from cclis.engine.recording import Recording, Tensors
from cclis.functional.precision import at_least_float32
from cclis.nn.compiling import compiled, compiled_for_all, compiles
from cclis.nn.network import Network, Representation, evaluating
from cclis.settings import Config

BATCH = 512
"""The paper's batch size: an encoder compiled for its teacher serves here as well."""


class Inference:
    """Represents uint8 images (N, H, W, C), batch by batch, without gradients.

    On a GPU the pass is compiled and recorded, for one batch size alone: the last batch is filled
    up. The network's weights may change, but not their place.
    """

    def __init__(self, network: Network, fabric: Fabric, config: Config):
        self.network, self._fabric, self._config = network, fabric, config
        self._compiled = compiles(config, fabric.device)
        self._augment = compiled_for_all(augment) if self._compiled else augment
        self._to_float = compiled_for_all(to_float) if self._compiled else to_float
        self._represent = compiled(self._represented, self._compiled)
        recorded = self._compiled and fabric.device.type == "cuda"
        self._turn = Lock()
        # What is augmented and what is not are recorded apart.
        self._passes = [Recording(self._pass) if recorded else self._pass for _ in range(2)]

    @property
    def device(self) -> torch.device:
        """Where results lie."""
        return self._fabric.device

    def forget(self) -> None:
        """Give back the memory that recordings hold; they are made anew when needed."""
        for recording in self._passes:
            if isinstance(recording, Recording):
                recording.forget()

    def __call__(self, images: Tensor, augmented: torch.Generator | None = None) -> Representation:
        """Represent images as they are, or augmented with draws from a generator.

        Several threads may call; they take turns.
        """
        features, embeddings = [], []
        with self._turn, self._own_modes(), evaluating(self.network):
            for part in prefetch(torch.split(images, BATCH), self.device):
                uniforms = None if augmented is None else draw_uniforms(len(part), augmented)
                found = self._one_batch(part, uniforms)
                features.append(found[0])
                embeddings.append(found[1])
            return Representation(torch.cat(features), torch.cat(embeddings))

    @contextmanager
    def _own_modes(self) -> Iterator[None]:
        """Whatever the caller has switched on: a recording would keep it."""
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(self.device.type, enabled=False),
        ):
            yield

    def _one_batch(self, images: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        count = len(images)
        if self._compiled and count < BATCH:
            images = torch.cat([images, images.new_zeros(BATCH - count, *images.shape[1:])])
            if uniforms is not None:
                uniforms = torch.cat([uniforms, uniforms.new_zeros(UNIFORMS, BATCH - count)], dim=1)
        inputs = (
            {"images": images} if uniforms is None else {"images": images, "uniforms": uniforms}
        )
        features, embeddings = self._passes[uniforms is None](inputs)
        # Copies: the next batch is written to the same place.
        return features[:count].clone(), embeddings[:count].clone()

    def _pass(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        with self._fabric.autocast():
            if "uniforms" in inputs:
                floats = self._augment(inputs["images"], self._config, inputs["uniforms"])
            else:
                floats = self._to_float(inputs["images"])
            return self._represent(floats)

    def _represented(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network.features(images)
        return at_least_float32(features), self.network.project(features)
