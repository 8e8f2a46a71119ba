"""GCR: gradient coreset replay (Tiwari et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cclis.functional.coreset import weighted_coreset
from cclis.functional.sampling import quotas
from cclis.methods.base import Batch, Exemplars, Visible
from cclis.methods.classifier import weighted_mean
from cclis.methods.der import DarkReplay, DERPPConfig
from cclis.nn.network import ClassifierNetwork
from cclis.settings import Options, setting


@dataclass(frozen=True)
class GCROptions(Options):
    """The method gcr."""

    candidates: int | None = setting(
        None,
        "Samples of a task, at random, that its coreset is chosen from; they are held, and "
        "replayed, beside the memory until the task ends. The more there are, the more a coreset "
        "weighs [default: as many as the memory holds].",
        minimum=1,
    )
    weight_ridge: float = setting(0.5, "L2 penalty on the weights of the coreset.", minimum=0)


@dataclass(frozen=True)
class GCRConfig(GCROptions, DERPPConfig):
    """Settings of `gcr`."""


class GCR(DarkReplay[GCRConfig]):
    """Replay as in DER++, of weighted samples whose gradients add up to those of all candidates.

    Candidates are the coreset so far and a reservoir of the task, both with the logits of the
    moment when they were stored. Of both is replayed: new samples have the share of draws that they
    would have in a reservoir of all tasks, and one of the coreset weighs as many of them as it
    stands for. A sample that the network gets wrong as it passes by weighs nothing before the task
    ends, unless all pass by only once; the authors' code does not take it in. Left out is the
    supervised contrast of replayed samples, which is optional in that code.
    """

    settings = GCRConfig
    replays = 2
    passes = 1

    def __init__(self, config: GCRConfig, network: ClassifierNetwork):
        super().__init__(config, network)
        self.reservoir = config.candidates or config.memory

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """Zero logits and weights."""
        return {**super().blank_extras(count), "weight": self.network.mean.new_zeros(count)}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """As DER++, with the weighted means of what is replayed (Eq. 2)."""
        logits, replayed, others = self.logits_of_parts(batch)
        matched, labelled = batch.part(1), batch.part(2)
        squared = (replayed - matched.extras["logits"]).square()
        cost = F.cross_entropy(others, labelled.labels, reduction="none")
        distance = weighted_mean(squared.mean(dim=1), matched.extras["weight"])
        labels = weighted_mean(cost, labelled.extras["weight"])
        new = batch.part(0).labels
        once = max(self.config.epochs, self.config.first_epochs or 1) == 1
        batch.to_store["weight"] = ((logits.argmax(dim=1) == new) | once).float()
        return {
            "cross_entropy": F.cross_entropy(logits, new),
            "logits": self.config.logit_weight * distance,
            "labels": self.config.label_weight * labels,
        }

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """Class by class a weighted coreset of the candidates."""
        features = visible.represent(augmented=False).features
        features = features.type_as(self.network.classifier.weight)
        stored, before = visible.extras["logits"], visible.extras["weight"]
        counts = visible.labels.bincount(minlength=self.seen).cpu()
        shares = quotas(counts, capacity, generator=generator).tolist()
        indices, weights = [], []
        for label, quota in enumerate(shares):
            rows = (visible.labels == label).nonzero()[:, 0]
            gradients = self._gradients(features[rows], stored[rows], label)
            ridge = self.config.weight_ridge
            chosen, weight = weighted_coreset(gradients, before[rows], quota, ridge=ridge)
            indices.append(rows[chosen])
            weights.append(weight)
        kept = torch.cat(indices)
        extras = {"logits": stored[kept], "weight": torch.cat(weights)}
        return Exemplars(kept, torch.ones(len(kept), device=kept.device), extras)

    @torch.no_grad()
    def _gradients(self, features: Tensor, stored: Tensor, label: int) -> Tensor:
        """Gradients of what replaying each sample of a class costs, by label and logits, (N, P).

        As the authors do, those of the classifier alone: products of errors and features.
        """
        logits: Tensor = self.network.classifier(features)
        of_label = logits.softmax(dim=1)
        of_label[:, label] -= 1
        of_logits = 2 * (logits - stored) / logits.shape[1]
        error = self.config.label_weight * of_label + self.config.logit_weight * of_logits
        return (error[:, :, None] * F.pad(features, (0, 1), value=1.0)[:, None, :]).flatten(1)
