"""The network in eval mode, applied to any number of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cclis.config import AugmentationOptions
from cclis.data.augment import augment, to_float
from cclis.nn.network import Network, evaluating

BATCH = 512


@dataclass(frozen=True)
class Representation:
    """What the network makes of images.

    Attributes:
        features: Of the encoder, (N, F).
        embeddings: On the unit sphere, (N, D).
    """

    features: Tensor
    embeddings: Tensor


class Inference:
    """Represents uint8 images (N, H, W, C), batch by batch, without gradients."""

    def __init__(self, network: Network, fabric: Fabric, augmentation: AugmentationOptions):
        self.network, self._fabric, self._augmentation = network, fabric, augmentation

    @property
    def device(self) -> torch.device:
        """Where results lie."""
        return self._fabric.device

    @torch.no_grad()
    def __call__(self, images: Tensor, augmented: torch.Generator | None = None) -> Representation:
        """Represent images as they are, or augmented with draws from a generator."""
        features, embeddings = [], []
        with evaluating(self.network), self._fabric.autocast():
            for part in torch.split(images, BATCH):
                found = self.network.features(self._floats(part, augmented))
                embeddings.append(self.network.project(found))
                features.append(found.float())
        return Representation(torch.cat(features), torch.cat(embeddings))

    def _floats(self, images: Tensor, augmented: torch.Generator | None) -> Tensor:
        images = images.to(self._fabric.device)
        if augmented is None:
            return to_float(images)
        return augment(images, self._augmentation, augmented)
