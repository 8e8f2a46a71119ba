"""Inference: the network in eval mode, applied to any number of images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cclis.data.augment import UNIFORMS, augment, draw_uniforms, to_float
from cclis.engine.devices import numerics
from cclis.engine.prefetch import prefetch
from cclis.engine.recording import Recording, Tensors
from cclis.functional.precision import at_least_float32
from cclis.nn.compiling import compiled_for_all, compiles
from cclis.nn.network import Network, Representation, evaluating
from cclis.settings import Config

BATCH = 512
"""The paper's batch size, so that the teacher's compiled encoder is used here as well."""


class Inference:
    """Compute features and embeddings of uint8 images (N, H, W, C), without gradients.

    On a GPU the pass is compiled and recorded for a single batch size; the last batch is padded.
    The network's weights may change, but not their addresses.
    """

    def __init__(self, network: Network, fabric: Fabric, config: Config):
        self.network, self._fabric, self._config = network, fabric, config
        self._compiled = compiles(config, fabric.device)
        self._augment = compiled_for_all(augment) if self._compiled else augment
        self._to_float = compiled_for_all(to_float) if self._compiled else to_float
        self._represent = compiled_for_all(_represent) if self._compiled else _represent
        recorded = self._compiled and fabric.device.type == "cuda"
        # Passes with and without augmentation are recorded separately.
        self._passes = [Recording(self._pass) if recorded else self._pass for _ in range(2)]

    @property
    def device(self) -> torch.device:
        """Device of the results."""
        return self._fabric.device

    def numerics(self) -> AbstractContextManager[None]:
        """Torch's switches as the settings want them, for what else is computed here."""
        return numerics(self._config, self.device)

    def forget(self) -> None:
        """Delete the recordings to free their memory; they are made again when needed."""
        with self.numerics():
            for recording in self._passes:
                if isinstance(recording, Recording):
                    recording.forget()

    def __call__(self, images: Tensor, augmented: torch.Generator | None = None) -> Representation:
        """Compute the representation of images.

        Args:
            images: uint8, (N, H, W, C).
            augmented: Random generator for augmentation; None leaves images as they are.
        """
        batches = []
        with self._default_modes(), evaluating(self.network):
            for batch in prefetch(torch.split(images, BATCH), self.device):
                uniforms = None if augmented is None else draw_uniforms(len(batch), augmented)
                batches.append(self._one_batch(batch, uniforms))
            features, embeddings = zip(*batches, strict=True)
            return Representation(torch.cat(features), torch.cat(embeddings))

    @contextmanager
    def _default_modes(self) -> Iterator[None]:
        """Undo the caller's inference mode and autocast, which a recording would keep."""
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
        # One batch at a time, so that a thread that trains on this GPU is not kept waiting.
        with self.numerics():
            features, embeddings = self._passes[uniforms is None](inputs)
            # Copied, because the next batch overwrites them.
            return features[:count].clone(), embeddings[:count].clone()

    def _pass(self, inputs: Tensors) -> tuple[Tensor, Tensor]:
        with self._fabric.autocast():
            if "uniforms" in inputs:
                floats = self._augment(inputs["images"], self._config, inputs["uniforms"])
            else:
                floats = self._to_float(inputs["images"])
            return self._represent(self.network, floats)


def _represent(network: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features and embeddings; the network is an argument, so that copies share one compilation."""
    features = network.features(images)
    return at_least_float32(features), network.project(features)
