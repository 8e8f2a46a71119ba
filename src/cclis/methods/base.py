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
        proposal: g_k of the replayed samples, -1 for those of the task, (B,). Beside a stream it
            is 1 for replayed samples, and 0 while nothing is kept and copies stand in for them.
        extras: What was kept with the replayed samples, by name, (R, ...).
        sizes: How many samples are of the task, and of each replay after it.
        keep: A method may put here, by name, what to keep with the samples of the task.
    """

    images: Tensor
    labels: Tensor
    proposal: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    keep: dict[str, Tensor] = field(default_factory=dict)

    def part(self, number: int) -> Batch:
        """The samples of the task (0), or of one replay (1, ...)."""
        first = sum(self.sizes[:number])
        rows = slice(first, first + self.sizes[number])
        of_replays = slice(first - self.sizes[0], first - self.sizes[0] + self.sizes[number])
        extras = {name: value[of_replays] for name, value in self.extras.items()} if number else {}
        return Batch(self.images[rows], self.labels[rows], self.proposal[rows], extras)


@dataclass(frozen=True)
class Visible:
    """What there is to choose from at the end of a task: the memory as it was, then the task.

    Attributes:
        labels: Classes of the samples, (N,).
        represent: What the network makes of them under a fresh augmentation at every call, or as
            they are with `augmented=False`.
        extras: What was kept with those of the memory, by name, (M, ...).
    """

    labels: Tensor
    represent: Callable[..., Representation]
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
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


def random_choice(labels: Tensor, capacity: int, generator: torch.Generator) -> Kept:
    """As many samples of every class, all with the same odds."""
    proposal = normalise(torch.zeros(len(labels), device=labels.device), labels)
    indices = select(proposal, labels, capacity, generator=generator)
    return Kept(indices, proposal[indices])


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


class Method(ABC, Generic[ConfigT, NetworkT]):
    """One way to learn a stream of tasks. It never sees an optimizer, a device or a file.

    Attributes:
        settings: The class of its config; a subclass without settings of its own inherits it.
        heads: Names of the classifiers this method is judged by.
        old: Classes of past tasks: 0..old-1.
        seen: Classes of past tasks and the current one: 0..seen-1.
        old_classes: `old` as a tensor, which losses use so that compiled they serve every task.
        seen_classes: `seen` likewise.
        fan_out: Whether a ResNet starts scaled by its fan-out, as the published learning rates of
            contrastive methods expect, or as torch makes it, as those of classifiers do.
        passes: How often `keep` asks what the network makes of the visible samples.
        streams: Whether the memory is filled while a task streams by, by `admit`; otherwise it is
            refilled at the end of a task, by `keep`.
        reservoir: For methods that stream: how many samples of the current task are held beside
            the memory, for `keep` to choose from both; 0 makes the memory itself the reservoir.
        replays: How many batches of the memory are replayed beside each of the task; 0 mixes what
            it holds with the task in proportion.
        by_task: Whether all of the memory is replayed beside each batch, in parts by past task.
        views: How often every sample of a batch comes up, augmented anew: (views · B) rows.
        judged_by_memory: Whether heads are fitted to the memory after the task alone.
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
    judged_by_memory: bool = False
    joint: bool = False
    per_class: tuple[str, ...] = ()

    def __init__(self, config: ConfigT, network: NetworkT):
        self.config = config
        self.network = network
        self.old = self.seen = 0
        self.old_classes = network.mean.new_zeros((), dtype=torch.int64)
        self.seen_classes = network.mean.new_zeros((), dtype=torch.int64)

    @staticmethod
    @abstractmethod
    def make_network(
        config: ConfigT, encoder: nn.Module, channels: int, features: int, classes: int
    ) -> NetworkT:
        """The network this method trains, with room for `classes`."""

    def begin_task(self, new_classes: int) -> None:
        """A task with that many classes never seen before is about to be learned."""
        self.count(self.seen, self.seen + new_classes)

    def count(self, old: int, seen: int) -> None:
        """Set how many classes are old and how many have been seen."""
        self.old, self.seen = old, seen
        self.old_classes.fill_(old)
        self.seen_classes.fill_(seen)

    def before_step(self, batch: Batch) -> None:
        """Called before every step of training, with what it will see; never compiled."""

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss by name; their sum is minimised."""

    def probes(self, batch: Batch) -> list[Tensor]:
        """Other losses, whose gradients `steer` sees; none by default."""
        return []

    def steer(self, products: Tensor) -> Tensor:
        """How much of each probe's gradient to add to that of the loss; asked where there are any.

        Args:
            products: Inner products of all gradients with one another, that of the loss first and
                then those of the T `probes`, float64 (1 + T, 1 + T) on the CPU.

        Returns:
            Factors of the probes' gradients, (T,).
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

    def keep(self, visible: Visible, capacity: int, generator: torch.Generator) -> Kept:
        """Choose at most `capacity` of the visible samples at the end of a task; none by default.

        Args:
            visible: The samples to choose from.
            capacity: How many may be kept.
            generator: Source of randomness, on the CPU.
        """
        labels = visible.labels
        return Kept(labels.new_empty(0), torch.empty(0, device=labels.device))

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
