"""Batches of a task together with what the memory replays, and what the memory takes in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cclis.data.augment import draw_uniforms
from cclis.data.batches import Mix, draw_replay, epoch_indices, fixed_mix, proportional_mix
from cclis.data.images import ImageSet
from cclis.engine.devices import one_thread
from cclis.engine.prefetch import prefetch
from cclis.engine.randomness import generator
from cclis.functional.exemplars import reservoir_slots
from cclis.memory import Memory
from cclis.methods import Method
from cclis.settings import Config, MixOptions, StreamReplayOptions

ON_THE_HOST = ("replay", "admit")
"""What a memory replays and takes in is decided on the host, which knows how far it is filled."""
GENERATORS = ("order", "augment", *ON_THE_HOST)
"""Generators that continue from step to step; all others are seeded anew for every task."""
OF_AN_EPOCH = ("order", "replay")
"""Generators from which all steps of an epoch are drawn at its start."""

Inputs = dict[str, Tensor]


class Replay:
    """Composes batches as a method wants them, from one task and one memory.

    Args:
        method: How many replays there are, of what, and what the memory takes in.
        memory: What there is to replay.
        config: Batch sizes and the seed.
        device: Where batches are needed.
    """

    def __init__(
        self, method: Method[Any, Any], memory: Memory, config: Config, device: torch.device
    ):
        self._method, self._memory, self._config = method, memory, config
        self._device = device
        self._tasks = torch.empty(0, dtype=torch.int64, device=device)
        self.generators = {
            name: generator("cpu" if name in ON_THE_HOST else device, config.seed, name)
            for name in GENERATORS
        }

    def drawn(self) -> dict[str, Tensor]:
        """States of the generators `OF_AN_EPOCH`."""
        return {name: self.generators[name].get_state() for name in OF_AN_EPOCH}

    def mix(self, samples: int, task_sizes: Sequence[int]) -> tuple[Mix, tuple[int, ...]]:
        """The mix of a batch, and the sizes of its parts where these are kept apart.

        Args:
            samples: Of the task.
            task_sizes: Classes of each task before.
        """
        config, method = self._config, self._method
        if method.by_task:
            how = fixed_mix(samples, config.batch_size, len(self._memory))
            self._tasks = self._task_of_each(task_sizes)
            of_tasks = self._tasks.bincount(minlength=len(task_sizes)).tolist()
            return how, (how.task, *(size for size in of_tasks if size))
        if not method.replays:
            share = config.replay_share if isinstance(config, MixOptions) else None
            return proportional_mix(samples, len(self._memory), config.batch_size, share), ()
        assert isinstance(config, StreamReplayOptions)
        each = config.replay_batch_size
        how = fixed_mix(samples, config.batch_size, method.replays * each)
        return how, (how.task, *[each] * method.replays)

    def batches(self, task: ImageSet, how: Mix, done: int) -> Iterator[tuple[Inputs, Tensor]]:
        """For the steps of an epoch of which some are done: inputs, and where new samples go."""
        with one_thread():
            plan = self._plan(len(task), how, done)
        of_task, of_memory, slots = (rows[done:] for rows in plan)
        chosen = (task.images[indices] for indices in of_task.to(task.images.device))
        fed, labels = prefetch(chosen, self._device), task.labels[of_task]
        of_the_task = {
            "proposal": torch.ones(how.task, device=self._device),
            **self._masks(how.task, replayed=False, padding=False),
        }
        for images, known, replayed, where in zip(fed, labels, of_memory, slots, strict=True):
            new = {"images": images, "labels": known, **of_the_task}
            past = self._past(new, replayed) if how.replay else {}
            rows = {k: torch.cat([v, past.pop(k)]) if k in past else v for k, v in new.items()}
            views = self._method.views
            if views > 1:
                rows = {name: torch.cat([value] * views) for name, value in rows.items()}
            uniforms = draw_uniforms(how.batch * views, self.generators["augment"])
            yield {**rows, **past, "uniforms": uniforms}, where

    def take_in(self, batch: Inputs, count: int, slots: Tensor, kept: dict[str, Tensor]) -> None:
        """After a step of a method that streams: the memory takes in what the method admits.

        Args:
            batch: The step's inputs; the first `count` rows are of the task.
            count: How many.
            slots: Where a reservoir puts them.
            kept: What the step left to be kept with them.
        """
        new = ImageSet(batch["images"][:count], batch["labels"][:count])
        slots = self._method.admit(slots, kept, self._memory, self.generators["admit"])
        self._memory.insert(slots, new, kept)

    def _plan(self, samples: int, how: Mix, done: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every step of an epoch: samples of the task, of the memory, slots of a reservoir."""
        order, nowhere = self.generators["order"], torch.empty(how.steps, 0, dtype=torch.int64)
        if not self._method.replays and not self._method.by_task:
            return *epoch_indices(samples, len(self._memory), how, order), nowhere
        of_task, _ = epoch_indices(samples, 0, Mix(how.task, 0, how.steps), order)
        if self._method.by_task:
            return of_task, self._tasks.argsort(stable=True).expand(how.steps, -1), nowhere
        rng, replays = self.generators["replay"], self._method.replays
        if not self._method.streams:
            most = len(self._memory)
            kept = torch.full((how.steps,), most)
            return of_task, self._here(draw_replay(kept, most, how, replays, rng)), nowhere
        seen, before = self._memory.seen - done * how.task, self._memory.previous
        passed = seen + how.task * torch.arange(how.steps)
        kept = before + self._memory.replay_sizes(passed)
        # Not all of the capacity: less may have passed by when the epoch ends.
        most = before + min(self._memory.capacity, int(passed[-1]))
        of_memory = self._here(draw_replay(kept, most, how, replays, rng))
        room = self._memory.reservoir or self._memory.capacity
        slots = reservoir_slots(seen, room, how.task, generator=rng, batches=how.steps)
        slots = torch.where(slots < 0, slots, before + slots)
        return of_task, of_memory, slots.view(how.steps, how.task)

    def _past(self, new: Inputs, replayed: Tensor) -> Inputs:
        """The replayed samples; while nothing has been kept, copies of the task's stand in."""
        samples = self._memory.samples
        if samples is None:
            rows = torch.arange(len(replayed), device=self._device) % len(new["labels"])
            return {
                **{name: new[name][rows] for name in ("images", "labels")},
                "proposal": torch.ones(len(replayed), device=self._device),
                **self._masks(len(replayed), replayed=True, padding=True),
                **self._method.blank_extras(len(replayed)),
            }
        past = samples[replayed]
        extras = {name: rows[replayed] for name, rows in self._memory.extras.items()}
        proposal = self._memory.proposal[replayed]
        masks = self._masks(len(replayed), replayed=True, padding=False)
        return {
            **{"images": past.images, "labels": past.labels, "proposal": proposal},
            **masks,
            **extras,
        }

    def _masks(self, count: int, **masks: bool) -> Inputs:
        """The masks of a batch for samples that are alike."""
        return {name: torch.full((count,), yes, device=self._device) for name, yes in masks.items()}

    def _task_of_each(self, task_sizes: Sequence[int]) -> Tensor:
        """The task of every sample in the memory, (N,)."""
        if self._memory.samples is None:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        ends = self._here(torch.tensor(task_sizes)).cumsum(dim=0)
        return torch.searchsorted(ends, self._memory.samples.labels, right=True)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)
