"""The replay memory: the kept samples themselves, never indices into data that is gone."""

from __future__ import annotations

import torch
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.errors import InputError


class Memory:
    """At most `capacity` samples with their labels and proposals.

    Attributes:
        samples: What is kept, or None while nothing is.
        proposal: g_k of every kept sample, normalised over what was visible of its class when it
            was drawn, float32 (N,).
    """

    def __init__(self, capacity: int):
        if capacity < 0:
            raise InputError(f"memory must be 0 or more, not {capacity}")
        self.capacity = capacity
        self.samples: ImageSet | None = None
        self.proposal = torch.empty(0)

    def __len__(self) -> int:
        return 0 if self.samples is None else len(self.samples)

    def visible(self, task: ImageSet) -> ImageSet:
        """Everything there is to see while learning a task: the memory, then the task."""
        return task if self.samples is None else ImageSet.concatenate(self.samples, task)

    def replace(self, samples: ImageSet, proposal: Tensor) -> None:
        """Keep these samples and no others."""
        if len(samples) > self.capacity:
            raise InputError(f"{len(samples)} samples do not fit a memory of {self.capacity}")
        if proposal.shape != samples.labels.shape:
            raise InputError(f"{len(samples)} samples need as many proposals, not {len(proposal)}")
        if len(samples) == 0:
            self.samples, self.proposal = None, proposal
            return
        # Indexing may have given a view: a copy lets the data it came from go.
        images = samples.images.clone().to(samples.labels.device)
        self.samples = ImageSet(images, samples.labels.clone())
        self.proposal = proposal.float().clone()

    def state(self) -> dict[str, Tensor]:
        """What is kept, as tensors by name."""
        if self.samples is None:
            return {}
        return {
            "images": self.samples.images,
            "labels": self.samples.labels,
            "proposal": self.proposal,
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        if state:
            self.replace(ImageSet(state["images"], state["labels"]), state["proposal"])
        else:
            self.samples, self.proposal = None, torch.empty(0)
