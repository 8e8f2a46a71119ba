"""CCLIS: contrastive continual learning with importance sampling (Li et al., AAAI 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from cclis.functional.diagnostics import diagnose
from cclis.functional.losses import prd, sample_nce
from cclis.functional.sampling import log_scores, normalise, select
from cclis.methods.base import Batch, Exemplars, ParameterGroup, Visible
from cclis.methods.teacher import TeacherMethod
from cclis.nn.network import PrototypeNetwork
from cclis.settings import Config, EmbeddingOptions, EvaluationOptions, MixOptions, Options, setting

Selection = Literal["proposal", "random"]
NEVER = -1e4
"""A cosine so low that its softmax is exactly zero; infinity times zero would not be."""


@dataclass(frozen=True)
class CCLISOptions(Options):
    """The method cclis."""

    temperature: float = setting(
        0.5, "τ of the contrastive loss and of the proposal.", above=0, stability=True
    )
    distill_weight: float = setting(
        0.6, "λ: weight of the distillation.", minimum=0, first_task=False, stability=True
    )
    teacher_temperature: float = setting(
        0.1, "κ_past of the distillation.", above=0, first_task=False, stability=True
    )
    student_temperature: float = setting(
        0.2, "κ_cur of the distillation.", above=0, first_task=False, stability=True
    )
    prototype_learning_rate: float = setting(
        0.01, "Learning rate of the prototypes.", above=0, stability=True
    )
    score_passes: int = setting(
        5,
        "Augmented passes over which a sample's score is averaged.",
        minimum=1,
        first_task=False,
    )
    importance_sampling: bool = setting(
        True,
        "Weigh samples that the proposal selected by it (Eq. 10); false weighs all alike.",
        first_task=False,
    )
    selection: Selection = setting(
        "proposal",
        "Odds of being kept: the proposal (Eq. 12), or equal, and then none is weighted.",
        first_task=False,
    )
    distillation: bool = setting(
        True,
        "Distil the previous model's prototype-instance relations (Eq. 14).",
        first_task=False,
    )


@dataclass(frozen=True)
class CCLISConfig(CCLISOptions, EmbeddingOptions, MixOptions, EvaluationOptions, Config):
    """Settings of `cclis`."""


class CCLIS(TeacherMethod[CCLISConfig, PrototypeNetwork]):
    """Importance-sampled replay with prototype-instance relation distillation."""

    settings = CCLISConfig
    heads = ("linear", "discriminant", "means", "prototype")
    fan_out = True

    def __init__(self, config: CCLISConfig, network: PrototypeNetwork):
        super().__init__(config, network)
        self._scored = config.score_passes if config.selection == "proposal" else 0
        self.passes = max(1, self._scored)
        self.distils = config.distillation
        self._weighted = config.importance_sampling and config.selection == "proposal"

    @staticmethod
    def make_network(
        config: CCLISConfig, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> PrototypeNetwork:
        """Encoder, projection and prototypes."""
        return PrototypeNetwork(encoder, channels, features, config.embedding, classes)

    def before_step(self, batch: Batch) -> None:
        """Prototypes stay on the unit sphere."""
        self.network.normalise_prototypes()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Sample-NCE (Eqs. 9-10) and λ times PRD over the old classes (Eq. 14)."""
        similarity = self.network.similarity(batch.images)
        terms = {
            "contrast": sample_nce(
                similarity,
                batch.labels,
                temperature=self.config.temperature,
                proposal=batch.proposal if self._weighted else None,
                replayed=batch.replayed,
                old_classes=self.old_classes,
            )
        }
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher.similarity(batch.images)
            terms["distill"] = self.config.distill_weight * prd(
                self._old_only(similarity),
                self._old_only(target),
                student_temperature=self.config.student_temperature,
                teacher_temperature=self.config.teacher_temperature,
            )
        return terms

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """Score every visible sample (Eq. 12) and draw class by class with these odds."""
        labels = visible.labels
        passes = [visible.represent().embeddings for _ in range(self.passes)]
        scores = torch.zeros(len(labels), device=labels.device)
        if self._scored:
            scores = torch.stack([self._score(z, labels) for z in passes]).logsumexp(dim=0)
        proposal = normalise(scores, labels)
        indices = select(proposal, labels, capacity, generator=generator)
        # What the proposal was made from: exponentials of the logits, added up over the passes.
        logits = (self._prototypes @ z.T / self.config.temperature for z in passes)
        diagnosis = diagnose(reduce(torch.logaddexp, logits), labels, indices, proposal)
        return Exemplars(indices, proposal[indices], diagnosis=diagnosis)

    def _old_only(self, similarity: Tensor) -> Tensor:
        """Similarities (C, B) in which other classes than the old ones have no share."""
        classes = torch.arange(len(similarity), device=similarity.device)[:, None]
        return similarity.masked_fill(classes >= self.old_classes, NEVER)

    @property
    def _prototypes(self) -> Tensor:
        return nn.functional.normalize(self.network.prototypes[: self.seen].detach(), dim=1)

    def _score(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return log_scores(embeddings, self._prototypes, labels, temperature=self.config.temperature)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Prototypes learn at their own rate, and warm up from a tenth of it."""
        prototypes = self.network.prototypes
        others = [p for p in self.network.parameters() if p is not prototypes]
        return [
            ParameterGroup(others, self.config.learning_rate),
            ParameterGroup([prototypes], self.config.prototype_learning_rate, warmup_from=0.1),
        ]
