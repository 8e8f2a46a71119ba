"""iCaRL: incremental classifier and representation learning (Rebuffi et al., CVPR 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.exemplars import herding
from cclis.functional.losses import icarl_loss
from cclis.functional.sampling import quotas
from cclis.methods.base import Batch, Exemplars, Visible
from cclis.methods.classifier import ClassifierMethod
from cclis.methods.teacher import TeacherMethod
from cclis.nn.network import ClassifierNetwork
from cclis.settings import ClassifierConfig, MeansOptions, MixOptions


@dataclass(frozen=True)
class ICaRLConfig(MixOptions, MeansOptions, ClassifierConfig):
    """Settings of `icarl`."""

    weight_decay: float = 1e-5


class ICaRL(TeacherMethod[ICaRLConfig, ClassifierNetwork], ClassifierMethod[ICaRLConfig]):
    """Sigmoid outputs are trained and distilled; exemplars' means classify (Algorithm 1)."""

    settings = ICaRLConfig
    heads = ("means",)
    fit_heads_on_memory = True
    passes = 1

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Binary cross-entropy to labels, and to old classes' previous outputs (Algorithm 3)."""
        old = None
        if self.teacher is not None:
            with torch.no_grad():
                old = self.teacher.logits(batch.images).sigmoid()
                # A known class that comes again is learned from its labels.
                again = ~batch.replayed & (batch.labels < self.old_classes)
                labels = F.one_hot(batch.labels, old.shape[1]).type_as(old)
                old = torch.where(again[:, None], labels, old)
        logits = self.network.logits(batch.images)
        loss = icarl_loss(
            logits,
            batch.labels,
            old_classes=self.old_classes,
            seen_classes=self.seen_classes,
            old_probabilities=old,
        )
        return {"cross_entropy": loss}

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """As many of every class: herding for new ones, the first of old ones (Algorithms 4, 5)."""
        labels = visible.labels
        shares = [capacity // self.seen] * self.seen
        if capacity < self.seen:  # some have one
            counts = labels.bincount(minlength=self.seen).cpu()
            shares = quotas(counts, capacity, generator=generator).tolist()
        features = visible.represent(augmented=False).embeddings
        chosen = []
        for label, quota in enumerate(shares):
            of_class = (labels == label).nonzero()[:, 0]
            if label >= self.old:
                of_class = of_class[herding(features[of_class], quota)]
            # The memory holds exemplars in the order in which they were chosen.
            chosen.append(of_class[:quota])
        indices = torch.cat(chosen)
        return Exemplars(indices, torch.ones(len(indices), device=labels.device))
