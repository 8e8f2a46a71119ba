"""The order of an epoch: how samples of the task and of the memory are mixed into batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.errors import InputError


@dataclass(frozen=True)
class Mix:
    """How many samples of each kind every batch has; shapes stay the same all task long.

    Attributes:
        task: Samples of the current task in a batch.
        replay: Replayed samples in a batch.
        steps: Batches of an epoch.
    """

    task: int
    replay: int
    steps: int

    @property
    def batch(self) -> int:
        """Samples of a batch."""
        return self.task + self.replay


def proportional_mix(
    task: int, memory: int, batch_size: int, replay_share: float | None = None
) -> Mix:
    """The mix for a task and a memory of these sizes.

    Args:
        task: Samples of the task.
        memory: Samples of the memory.
        batch_size: Samples of a batch; all samples at once where there are fewer.
        replay_share: Share of replayed samples in a batch; None takes them in proportion.
    """
    if task < 1:
        raise InputError("a task needs at least one sample")
    batch = min(batch_size, task + memory)
    share = memory / (memory + task) if replay_share is None else replay_share
    replay = 0
    if memory and share > 0:
        # Rounding must not leave a memory unused, nor a task unlearned.
        replay = min(max(1, round(batch * share)), batch - 1)
    # As many as all samples fill, and enough for every sample of the task.
    steps = max(-(-(task + memory) // batch), -(-task // (batch - replay)))
    return Mix(batch - replay, replay, steps)


def fixed_mix(task: int, batch_size: int, replayed: int) -> Mix:
    """The mix of batches of the task alone with `replayed` samples beside each."""
    if task < 1:
        raise InputError("a task needs at least one sample")
    batch = min(batch_size, task)
    return Mix(batch, replayed, -(-task // batch))


def draw_replay(
    kept: Tensor, most: int, how: Mix, replays: int, generator: torch.Generator
) -> Tensor:
    """Indices into a memory that a stream fills, a row for every batch: (steps, replayed).

    Each of a batch's `replays` parts is drawn without replacement from what is kept by then, and
    repeated where that is less. While nothing is kept, an index is 0.

    Args:
        kept: From how many samples every batch draws, int64 (steps,).
        most: How many there can be.
        how: The mix.
        replays: Into how many parts the replayed samples of a batch fall.
        generator: Source of randomness, on the CPU.
    """
    each = how.replay // replays
    keys = torch.rand(how.steps, replays, max(1, most), generator=generator)
    keys = keys.masked_fill(torch.arange(keys.shape[2]) >= kept[:, None, None], -1.0)
    order = keys.topk(min(each, keys.shape[2]), dim=2).indices
    place = torch.arange(each) % kept.clamp(1, each)[:, None]
    drawn = order.gather(2, place[:, None].expand(-1, replays, -1)).flatten(1)
    return torch.where(kept[:, None] > 0, drawn, 0)


def epoch_indices(
    task: int, memory: int, how: Mix, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Indices into the task and into the memory, a row for every batch: (steps, samples of it).

    Each kind is passed through in random order, and again in a new order where an epoch needs
    more than there are.
    """
    of_task = _repeated_permutation(task, how.task * how.steps, generator)
    of_memory = _repeated_permutation(memory, how.replay * how.steps, generator)
    return of_task.view(how.steps, how.task), of_memory.view(how.steps, how.replay)


def _repeated_permutation(size: int, length: int, generator: torch.Generator) -> Tensor:
    if length == 0:
        return torch.empty(0, dtype=torch.int64, device=generator.device)
    rounds = [
        torch.randperm(size, generator=generator, device=generator.device)
        for _ in range(-(-length // size))
    ]
    return torch.cat(rounds)[:length]
