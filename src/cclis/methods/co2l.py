"""Co2L: contrastive continual learning (Cha, Lee & Shin, ICCV 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cclis.functional.losses import ird, supcon
from cclis.methods.base import Batch, Exemplars, Visible, random_choice
from cclis.methods.teacher import TeacherMethod
from cclis.nn.network import ProjectionNetwork
from cclis.settings import Config, EmbeddingOptions, EvaluationOptions, MixOptions, Options, setting

BASE_TEMPERATURE = 0.07
"""The authors scale the contrast by τ over this; their learning rates and λ rely on it."""


@dataclass(frozen=True)
class Co2LOptions(Options):
    """The method co2l."""

    temperature: float = setting(0.5, "τ of the contrastive loss.", above=0, stability=True)
    distill_weight: float = setting(
        1.0, "λ: weight of the distillation.", minimum=0, first_task=False, stability=True
    )
    teacher_temperature: float = setting(
        0.01, "κ* of the distillation.", above=0, first_task=False, stability=True
    )
    student_temperature: float = setting(
        0.2, "κ of the distillation.", above=0, first_task=False, stability=True
    )


@dataclass(frozen=True)
class Co2LConfig(Co2LOptions, EmbeddingOptions, MixOptions, EvaluationOptions, Config):
    """Settings of `co2l`."""


class Co2L(TeacherMethod[Co2LConfig, ProjectionNetwork]):
    """Asymmetric supervised contrast of two views, and instance-wise relation distillation."""

    settings = Co2LConfig
    heads = ("discriminant", "means", "linear")
    fan_out = True
    views = 2

    def __init__(self, config: Co2LConfig, network: ProjectionNetwork):
        super().__init__(config, network)
        self.distils = config.distill_weight > 0

    @staticmethod
    def make_network(
        config: Co2LConfig, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> ProjectionNetwork:
        """Encoder and projection."""
        return ProjectionNetwork(encoder, channels, features, config.embedding, classes)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Only samples of the task are anchors (Section 4.1); λ times the distillation (4.2).

        The contrast is a mean over the anchors, where the authors divide by all rows.
        """
        embeddings = self.network.embed(batch.images)
        anchors = ~batch.replayed
        temperature = self.config.temperature
        contrast = supcon(embeddings, batch.labels, temperature=temperature, anchors=anchors)
        terms = {"contrast": temperature / BASE_TEMPERATURE * contrast}
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher.embed(batch.images)
            terms["distill"] = self.config.distill_weight * ird(
                embeddings,
                target,
                student_temperature=self.config.student_temperature,
                teacher_temperature=self.config.teacher_temperature,
            )
        return terms

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """Samples at random, as many of every class."""
        return random_choice(visible.labels, capacity, generator)
