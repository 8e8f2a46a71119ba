"""What a method is: what it does at the start of a task, its losses, and what it keeps."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from cclis.functional.sampling import normalise, select
from cclis.memory import Memory
from cclis.nn.network import Network, Representation
from cclis.settings import Config

ConfigT = TypeVar("ConfigT", bound=Config)
NetworkT = TypeVar("NetworkT", bound=Network)


@dataclass(frozen=True)
class Batch:
    """What a loss is computed on.

    Attributes:
        images: Augmented, within [0, 1], (B, C, H, W).
        labels: Classes in order of arrival, int64 (B,).
        proposal: g_k of the replayed samples, 1 for those of the task, (B,).
        replayed: Whether a sample comes from the memory, bool (B,).
        padding: Whether a sample stands in while the memory is empty, bool (B,); it must not count.
        extras: What was stored with the replayed samples, by name, (R, ...).
        sizes: How many samples are of the task, and of each replay after it.
        to_store: A method may put here, by name, what to store with the samples of the task.
    """

    images: Tensor
    labels: Tensor
    proposal: Tensor
    replayed: Tensor
    padding: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    to_store: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_task(cls, images: Tensor, labels: Tensor) -> Batch:
        """A batch without replay."""
        none = torch.zeros_like(labels, dtype=torch.bool)
        return cls(images, labels, torch.ones(len(labels), device=labels.device), none, none)

    @property
    def weight(self) -> Tensor:
        """1 for samples that count and 0 for padding, (B,)."""
        return (~self.padding).type_as(self.proposal)

    def part(self, number: int) -> Batch:
        """The samples of the task (0), or of one replay (1, ...)."""
        first = sum(self.sizes[:number])
        rows = slice(first, first + self.sizes[number])
        of_replays = slice(first - self.sizes[0], first - self.sizes[0] + self.sizes[number])
        extras = {name: value[of_replays] for name, value in self.extras.items()} if number else {}
        masks = self.replayed[rows], self.padding[rows]
        return Batch(self.images[rows], self.labels[rows], self.proposal[rows], *masks, extras)


@dataclass(frozen=True)
class Visible:
    """The samples to choose from at the end of a task: the memory as it was, then the task.

    Attributes:
        labels: Classes of the samples, (N,).
        represent: Gives the network's representation of them, newly augmented at every call, or
            as they are with `augmented=False`.
        extras: What was kept with those of the memory, by name, (M, ...).
    """

    labels: Tensor
    represent: Callable[..., Representation]
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Exemplars:
    """What a method wants to keep of the visible samples.

    Attributes:
        indices: Which ones, int64 (M,).
        proposal: Their g_k, (M,).
        extras: What to keep with them, by name, (M, ...).
        diagnosis: How good a choice it is, in numbers to be recorded, by name.
    """

    indices: Tensor
    proposal: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)


def random_choice(labels: Tensor, capacity: int, generator: torch.Generator) -> Exemplars:
    """As many samples of every class, all with the same odds."""
    proposal = normalise(torch.zeros(len(labels), device=labels.device), labels)
    indices = select(proposal, labels, capacity, generator=generator)
    return Exemplars(indices, proposal[indices])


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate.

    Attributes:
        parameters: The parameters.
        learning_rate: Their learning rate after the warm-up.
        warmup_from: Share of it that the warm-up starts from.
    """

    parameters: list[nn.Parameter]
    learning_rate: float
    warmup_from: float = 0.01


class SeenClasses:
    """The classes of a stream so far, for Python and, as tensors, for compiled losses.

    Attributes:
        task_sizes: How many classes each task brought, the current one last.
        old_classes: How many classes past tasks brought, int64 ().
        seen_classes: The same with the current task's.
    """

    def __init__(self, device: torch.device):
        self.task_sizes: tuple[int, ...] = ()
        self.old_classes = torch.zeros((), dtype=torch.int64, device=device)
        self.seen_classes = torch.zeros_like(self.old_classes)

    @property
    def old(self) -> int:
        """How many classes past tasks brought."""
        return sum(self.task_sizes[:-1])

    @property
    def seen(self) -> int:
        """The same with the current task's."""
        return sum(self.task_sizes)

    def set(self, task_sizes: tuple[int, ...]) -> None:
        """Set how many classes each task brought."""
        self.task_sizes = task_sizes
        # In place: what is recorded reads them there.
        self.old_classes.fill_(self.old)
        self.seen_classes.fill_(self.seen)


class Method(ABC, Generic[ConfigT, NetworkT]):
    """One way to learn a stream of tasks. It never sees an optimizer, a device or a file.

    Attributes:
        settings: The class of its config; a subclass without settings of its own inherits it.
        heads: Names of the classifiers that are fitted after a task, the main one last.
        stream: The classes seen so far.
        fan_out: Whether a ResNet starts scaled by its fan-out, as the published learning rates of
            contrastive methods expect, or as torch makes it, as those of classifiers do.
        passes: Passes over the visible samples in `select_exemplars`, for the progress bar.
        streams: Whether the memory is filled while a task streams by, by `admit`; otherwise it is
            refilled at the end of a task, by `select_exemplars`.
        reservoir: For methods that stream: how many samples of the current task are held beside
            the memory, for `select_exemplars` to choose from both; 0 makes the memory itself the
            reservoir.
        replays: How many batches of the memory are replayed beside each of the task; 0 mixes what
            it holds with the task in proportion.
        by_task: Whether all of the memory is replayed beside each batch, in parts by past task.
        views: How often every sample of a batch comes up, augmented anew: (views · B) rows.
        fit_heads_on_memory: Whether heads are fitted to the memory after the task alone.
        joint: Whether all tasks are learned at once.
        per_class: Names of extras that hold one number a class.
    """

    settings: ClassVar[type[Config]] = Config
    heads: tuple[str, ...]
    fan_out: bool = False
    passes: int = 0
    streams: bool = False
    reservoir: int = 0
    replays: int = 0
    by_task: bool = False
    views: int = 1
    fit_heads_on_memory: bool = False
    joint: bool = False
    per_class: tuple[str, ...] = ()

    def __init__(self, config: ConfigT, network: NetworkT):
        self.config = config
        self.network = network
        self.stream = SeenClasses(network.mean.device)

    @staticmethod
    @abstractmethod
    def make_network(
        config: ConfigT, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> NetworkT:
        """The network this method trains, with room for `classes`."""

    @classmethod
    def main_head(cls) -> str:
        """The head that `predict` uses, and that decides: the last of `heads`."""
        return cls.heads[-1]

    @property
    def old(self) -> int:
        """How many classes past tasks brought: 0..old-1."""
        return self.stream.old

    @property
    def seen(self) -> int:
        """How many classes past tasks and the current one brought: 0..seen-1."""
        return self.stream.seen

    @property
    def old_classes(self) -> Tensor:
        """`old` as a tensor, which losses use so that compiled they serve every task."""
        return self.stream.old_classes

    @property
    def seen_classes(self) -> Tensor:
        """`seen` likewise."""
        return self.stream.seen_classes

    def begin_task(self, new_classes: int) -> None:
        """A task with that many classes never seen before is about to be learned."""
        self.stream.set((*self.stream.task_sizes, new_classes))

    def before_step(self, batch: Batch) -> None:
        """Called before every training step with its batch; never compiled."""

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss by name; their sum is minimised."""

    def auxiliary_losses(self, batch: Batch) -> list[Tensor]:
        """Other losses, whose gradients `gradient_coefficients` weighs; none by default."""
        return []

    def gradient_coefficients(self, products: Tensor) -> Tensor:
        """How much of each auxiliary loss's gradient to add to that of the loss.

        Args:
            products: Inner products of all gradients with one another, that of the loss first and
                then those of the T auxiliary losses, float64 (1 + T, 1 + T) on the CPU.

        Returns:
            The coefficients, (T,).
        """
        return products.new_zeros(len(products) - 1)

    def admit(
        self, slots: Tensor, kept: dict[str, Tensor], memory: Memory, generator: torch.Generator
    ) -> Tensor:
        """For methods that stream: where the task's samples of a step go; to a reservoir.

        Args:
            slots: Where a reservoir puts each of them, or -1 for nowhere, (N,) on the CPU.
            kept: What the step left to be kept with them, by name, (N, ...).
            memory: As it is before them.
            generator: Source of randomness, on the CPU.

        Returns:
            The slots to use, (N,) on the CPU.
        """
        return slots

    def select_exemplars(
        self, visible: Visible, capacity: int, generator: torch.Generator
    ) -> Exemplars:
        """Choose at most `capacity` of the visible samples at the end of a task; none by default.

        Args:
            visible: The samples to choose from.
            capacity: How many may be kept.
            generator: Source of randomness, on the CPU.
        """
        labels = visible.labels
        return Exemplars(labels.new_empty(0), torch.empty(0, device=labels.device))

    def blank_extras(self, count: int) -> dict[str, Tensor]:
        """What stands in for extras while nothing has been kept, (count, ...) each."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What the losses of the current task use beside the network, by name."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """The network's parameters with their learning rates."""
        return [ParameterGroup(list(self.network.parameters()), self.config.learning_rate)]

    def frozen_copy(self) -> NetworkT:
        """The network as it is now, as a teacher in eval mode; call it without gradients."""
        return copy.deepcopy(self.network).eval()
