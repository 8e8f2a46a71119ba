"""DER and DER++: dark experience replay (Buzzega et al., NeurIPS 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cclis.config import DERConfig, DERPPConfig
from cclis.methods.base import Batch, ConfigT
from cclis.methods.classifier import ClassifierMethod, weighted_cross_entropy


class DarkReplay(ClassifierMethod[ConfigT]):
    """Samples are kept with the network's logits of that moment."""

    per_class = ("logits",)

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Logits of nothing."""
        return {"logits": self.network.mean.new_zeros(count, self.network.classes)}

    def current(self, batch: Batch) -> Tensor:
        """Cross-entropy of the task's samples; their logits are kept."""
        now = batch.part(0)
        logits = self.network.logits(now.images)
        batch.keep["logits"] = logits.detach()
        return F.cross_entropy(logits, now.labels)

    def logit_distance(self, past: Batch) -> Tensor:
        """Mean squared distance of logits from those that were kept."""
        squared = (self.network.logits(past.images) - past.extras["logits"]).square()
        return (past.proposal[:, None] * squared).mean()


class DER(DarkReplay[DERConfig]):
    """Logits are matched (Eq. 5)."""

    streams = True
    replays = 1

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the task, and α times the distance of replayed logits."""
        return {
            "cross_entropy": self.current(batch),
            "logits": self.config.logit_weight * self.logit_distance(batch.part(1)),
        }


class DERPP(DarkReplay[DERPPConfig]):
    """Logits are matched, and of other replayed samples the labels (Eq. 6)."""

    streams = True
    replays = 2

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """As DER, and β times the cross-entropy of a second replay."""
        labelled = batch.part(2)
        logits = self.network.logits(labelled.images)
        labels = weighted_cross_entropy(logits, labelled.labels, labelled.proposal)
        return {
            "cross_entropy": self.current(batch),
            "logits": self.config.logit_weight * self.logit_distance(batch.part(1)),
            "labels": self.config.label_weight * labels,
        }
