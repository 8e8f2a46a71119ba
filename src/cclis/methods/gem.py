"""GEM: gradient episodic memory (Lopez-Paz & Ranzato, NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.gradients import gem_coefficients
from cclis.methods.base import Batch, Exemplars, Visible, random_choice
from cclis.methods.classifier import ClassifierMethod
from cclis.settings import ClassifierConfig, Options, setting


@dataclass(frozen=True)
class GEMOptions(Options):
    """The method gem."""

    memory_strength: float = setting(
        0.5, "γ: how far a step leans towards every past task.", minimum=0, stability=True
    )
    gradient_ridge: float = setting(
        0.0,
        "Added to the product of a past task's gradient with itself; 0.001 in the authors' code.",
        minimum=0,
    )
    expected_classes: int | None = setting(
        None,
        "Classes that the memory has room for from the start [default: the classes seen so far].",
        minimum=1,
    )


@dataclass(frozen=True)
class GEMConfig(GEMOptions, ClassifierConfig):
    """Settings of `gem`."""

    learning_rate: float = 0.03


class GEM(ClassifierMethod[GEMConfig]):
    """No step may raise the loss on what is kept of any past task."""

    settings = GEMConfig
    by_task = True

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the task's samples."""
        now = batch.part(0)
        return {"cross_entropy": F.cross_entropy(self.network.logits(now.images), now.labels)}

    def auxiliary_losses(self, batch: Batch) -> list[Tensor]:
        """Cross-entropy of the samples of each past task."""
        past = [batch.part(task) for task in range(1, len(batch.sizes))]
        return [F.cross_entropy(self.network.logits(p.images), p.labels) for p in past]

    def gradient_coefficients(self, products: Tensor) -> Tensor:
        """To the nearest gradient that agrees with those of all past tasks (Eq. 8)."""
        strength, ridge = self.config.memory_strength, self.config.gradient_ridge
        return gem_coefficients(products, margin=strength, ridge=ridge)

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """Samples at random, as many of every class; the paper keeps the last ones of each task."""
        classes = max(self.seen, self.config.expected_classes or 0)
        capacity = capacity * self.seen // classes
        return random_choice(visible.labels, capacity, generator)
