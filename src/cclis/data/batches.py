"""Composition of batches: which samples of the task and of the memory they contain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cclis.errors import InputError


@dataclass(frozen=True)
class Mix:
    """Size of the batches of a task; it is the same for all of them.

    Attributes:
        task: Samples of the current task per batch.
        replay: Replayed samples per batch.
        steps: Batches per epoch.
    """

    task: int
    replay: int
    steps: int

    @property
    def batch(self) -> int:
        """Samples per batch."""
        return self.task + self.replay


def proportional_mix(
    task: int, memory: int, batch_size: int, replay_share: float | None = None
) -> Mix:
    """Mix with a given share of replayed samples, by default the memory's share of all samples.

    Args:
        task: Number of samples of the task.
        memory: Number of samples in the memory.
        batch_size: Samples per batch; less if there are fewer samples in all.
        replay_share: Share of replayed samples in a batch; None for the memory's share.
    """
    if task < 1:
        raise InputError("a task needs at least one sample")
    batch = min(batch_size, task + memory)
    share = memory / (memory + task) if replay_share is None else replay_share
    replay = 0
    if memory and share > 0:
        # After rounding, there is at least one sample of each.
        replay = min(max(1, round(batch * share)), batch - 1)
    # Enough steps for all samples together, and for every sample of the task.
    steps = max(-(-(task + memory) // batch), -(-task // (batch - replay)))
    return Mix(batch - replay, replay, steps)


def fixed_mix(task: int, batch_size: int, replayed: int) -> Mix:
    """Mix with `replayed` samples in addition to each batch of the task."""
    if task < 1:
        raise InputError("a task needs at least one sample")
    batch = min(batch_size, task)
    return Mix(batch, replayed, -(-task // batch))


def draw_replay(
    stored: Tensor, capacity: int, mix: Mix, replays: int, generator: torch.Generator
) -> Tensor:
    """Draw the replayed samples of an epoch from a memory that grows during it.

    Each of the `replays` parts of a batch is drawn without replacement. If the memory has fewer
    samples than a part, they are repeated. If it is empty, all indices are 0.

    Args:
        stored: Number of samples in the memory at each step, int64 (steps,).
        capacity: Largest possible number of samples.
        mix: Sizes of the batches.
        replays: Number of parts of the replayed samples of a batch.
        generator: Random generator on the CPU.

    Returns:
        Indices into the memory, int64 (steps, replay).
    """
    size = mix.replay // replays
    keys = torch.rand(mix.steps, replays, max(1, capacity), generator=generator)
    keys = keys.masked_fill(torch.arange(keys.shape[2]) >= stored[:, None, None], -1.0)
    order = keys.topk(min(size, keys.shape[2]), dim=2).indices
    position = torch.arange(size) % stored.clamp(1, size)[:, None]
    drawn = order.gather(2, position[:, None].expand(-1, replays, -1)).flatten(1)
    return torch.where(stored[:, None] > 0, drawn, 0)


def epoch_indices(
    task: int, memory: int, mix: Mix, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Shuffle the samples of an epoch.

    Samples of the task and of the memory are each taken in random order. If an epoch needs more
    than there are, they are shuffled again.

    Args:
        task: Number of samples of the task.
        memory: Number of samples in the memory.
        mix: Sizes of the batches.
        generator: Random generator.

    Returns:
        Indices into the task (steps, task) and into the memory (steps, replay), int64.
    """
    task_indices = _repeated_permutation(task, mix.task * mix.steps, generator)
    memory_indices = _repeated_permutation(memory, mix.replay * mix.steps, generator)
    return task_indices.view(mix.steps, mix.task), memory_indices.view(mix.steps, mix.replay)


def _repeated_permutation(size: int, length: int, generator: torch.Generator) -> Tensor:
    if length == 0:
        return torch.empty(0, dtype=torch.int64, device=generator.device)
    rounds = [
        torch.randperm(size, generator=generator, device=generator.device)
        for _ in range(-(-length // size))
    ]
    return torch.cat(rounds)[:length]
