"""DER and DER++: dark experience replay (Buzzega et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cclis.methods.base import Batch, ConfigT
from cclis.methods.classifier import ClassifierMethod, weighted_cross_entropy
from cclis.settings import ClassifierConfig, Options, StreamReplayOptions, setting


@dataclass(frozen=True)
class DEROptions(Options):
    """The methods der, derpp and gcr."""

    logit_weight: float = setting(
        0.3, "α: weight of the distance from stored logits.", minimum=0, stability=True
    )


@dataclass(frozen=True)
class DERConfig(DEROptions, StreamReplayOptions, ClassifierConfig):
    """Settings of `der`."""

    learning_rate: float = 0.03


@dataclass(frozen=True)
class DERPPOptions(Options):
    """The methods derpp and gcr."""

    label_weight: float = setting(
        0.5, "β: weight of the cross-entropy of replayed labels.", minimum=0, stability=True
    )


@dataclass(frozen=True)
class DERPPConfig(DERPPOptions, DERConfig):
    """Settings of `derpp`."""

    logit_weight: float = 0.1


class DarkReplay(ClassifierMethod[ConfigT]):
    """Samples are kept with the network's logits of that moment."""

    streams = True
    per_class = ("logits",)

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Zero logits."""
        return {"logits": self.network.mean.new_zeros(count, self.network.classes)}

    def logits_of_parts(self, batch: Batch) -> tuple[Tensor, ...]:
        """Logits of the task's samples, to be kept with them, and of every replay."""
        apart = self.network.logits_per_part(batch.images, batch.sizes)
        batch.to_store["logits"] = apart[0].detach()
        return apart


def logit_distance(logits: Tensor, past: Batch) -> Tensor:
    """Squared distance of replayed samples' logits from those that were kept.

    A mean over classes too, where Eq. 5 has their sum: the weights α that are published go with it.
    """
    squared = (logits - past.extras["logits"]).square()
    return (past.weight[:, None] * squared).mean()


class DER(DarkReplay[DERConfig]):
    """Logits are matched (Eq. 5)."""

    settings = DERConfig
    replays = 1

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy of the task, and α times the distance of replayed logits."""
        logits, replayed = self.logits_of_parts(batch)
        return {
            "cross_entropy": F.cross_entropy(logits, batch.part(0).labels),
            "logits": self.config.logit_weight * logit_distance(replayed, batch.part(1)),
        }


class DERPP(DarkReplay[DERPPConfig]):
    """Logits are matched, and of other replayed samples the labels (Eq. 6)."""

    settings = DERPPConfig
    replays = 2

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """As DER, and β times the cross-entropy of a second replay."""
        logits, replayed, others = self.logits_of_parts(batch)
        labelled = batch.part(2)
        labels = weighted_cross_entropy(others, labelled.labels, labelled.weight)
        return {
            "cross_entropy": F.cross_entropy(logits, batch.part(0).labels),
            "logits": self.config.logit_weight * logit_distance(replayed, batch.part(1)),
            "labels": self.config.label_weight * labels,
        }
