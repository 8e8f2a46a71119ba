"""GCR: gradient coreset replay (Tiwari et al., CVPR 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.config import GCRConfig
from cclis.exemplars import matching_pursuit
from cclis.methods.base import Batch, Kept, Visible
from cclis.methods.classifier import weighted_mean
from cclis.methods.der import DarkReplay
from cclis.sampling import quotas


class GCR(DarkReplay[GCRConfig]):
    """Replay as in DER++, of weighted samples whose gradients add up to those of all candidates."""

    replays = 2
    passes = 1

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Logits and weights of nothing."""
        return {**super().blank_extras(count), "weight": self.network.mean.new_zeros(count)}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """As DER++, with the weighted means of what is replayed."""
        matched, labelled = batch.part(1), batch.part(2)
        squared = (self.network.logits(matched.images) - matched.extras["logits"]).square()
        logits = self.network.logits(labelled.images)
        cost = F.cross_entropy(logits, labelled.labels, reduction="none")
        distance = weighted_mean(squared.mean(dim=1), matched.extras["weight"])
        labels = weighted_mean(cost, labelled.extras["weight"])
        return {
            "cross_entropy": self.current(batch),
            "logits": self.config.logit_weight * distance,
            "labels": self.config.label_weight * labels,
        }

    def keep(self, visible: Visible, capacity: int, generator: torch.Generator) -> Kept:
        """Class by class a weighted coreset, of what was kept or of the task's candidates."""
        features = visible.represent(augmented=False).features.float()
        logits = self.network.classifier(features).detach()
        if "logits" in visible.extras:
            # Those of samples that were kept before are of the moment when they were stored.
            past = visible.extras["logits"]
            logits = torch.cat([past, logits[len(past) :]])
        before = torch.ones_like(features[:, 0])
        if "weight" in visible.extras:
            before[: len(visible.extras["weight"])] = visible.extras["weight"]
        shares = quotas(
            visible.labels.bincount(minlength=self.seen).cpu(), capacity, generator=generator
        )
        indices, weights = [], []
        for label in range(self.seen):
            rows = self._candidates(visible.labels, label, generator)
            quota = int(shares[label])
            chosen, weight = self._coreset(features[rows], before[rows], label, quota)
            indices.append(rows[chosen])
            weights.append(weight)
        kept = torch.cat(indices)
        extras = {"logits": logits[kept], "weight": torch.cat(weights)}
        return Kept(kept, torch.ones(len(kept), device=kept.device), extras)

    def _candidates(self, labels: Tensor, label: int, generator: torch.Generator) -> Tensor:
        """Samples of a class: all that were kept, or as many of the task as are to be looked at."""
        rows = (labels == label).nonzero()[:, 0]
        if label < self.old:
            return rows
        count = max(1, self.config.candidates // (self.seen - self.old))
        return rows[torch.randperm(len(rows), generator=generator)[:count]]

    def _coreset(
        self, features: Tensor, before: Tensor, label: int, quota: int
    ) -> tuple[Tensor, Tensor]:
        """At most `quota` rows of one class, and weights under which their gradient points where
        that of all rows does with the weights they had before; 1 on average, as every class counts
        alike.

        Gradients are those of the classifier alone, as the authors do: for a sample the outer
        product of its error and its features.
        """
        inputs = F.pad(features, (0, 1), value=1.0)
        error = self.network.classifier(features).detach()[:, : self.seen].softmax(dim=1)
        error[:, label] -= 1
        gradients = (error[:, :, None] * inputs[:, None, :]).flatten(1)
        chosen, weight = matching_pursuit(
            gradients, before @ gradients, quota, ridge=self.config.weight_ridge
        )
        # Where fewer suffice, others fill the room; each stands for itself alone.
        rest = torch.ones_like(before).index_fill(0, chosen, 0).nonzero()[:, 0]
        more = rest[: quota - len(chosen)]
        weights = torch.cat([weight, before[more]])
        mean = weights.sum() / max(1, len(weights))
        return torch.cat([chosen, more]), weights / mean.clamp_min(torch.finfo(mean.dtype).tiny)
