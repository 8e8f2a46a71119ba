"""The network in eval mode, applied to any number of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import Tensor

from cclis.config import AugmentationOptions
from cclis.data.augment import augment, to_float
from cclis.nn.network import Network

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
        training = self.network.training
        self.network.eval()
        features, embeddings = [], []
        for part in torch.split(images, BATCH):
            batch = part.to(self._fabric.device)
            floats = (
                to_float(batch)
                if augmented is None
                else augment(batch, self._augmentation, augmented)
            )
            with self._fabric.autocast():
                feature = self.network.features(floats)
                embeddings.append(self.network.project(feature))
            features.append(feature.float())
        self.network.train(training)
        return Representation(torch.cat(features), torch.cat(embeddings))
