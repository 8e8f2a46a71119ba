"""The replay memory: the kept samples themselves, never indices into data that is gone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.errors import InputError
from cclis.functional.precision import at_least_float32

OWN = ("images", "labels", "proposal")
"""What every sample has; other names are extras."""
PASSED = ("seen", "past")
"""Counts of what passed by."""


class Memory:
    """At most `capacity` samples with their labels, proposals and extras.

    It is either given all its samples at the end of a task, or one here and there while a stream
    passes by. With a reservoir it is both: while a task streams by, some of its samples are held
    as well, and at the end of the task it is given all that may stay.

    Attributes:
        seen: How many samples have passed by; with a reservoir, of the current task.
        past: With a reservoir, how many passed by before.

    Args:
        capacity: How many samples it holds between tasks.
        reservoir: How many of the current task it holds beside them.
    """

    def __init__(self, capacity: int, reservoir: int = 0):
        if capacity < 0:
            raise InputError(f"memory must be 0 or more, not {capacity}")
        self.capacity, self.reservoir = capacity, reservoir
        self.seen = self.past = 0
        self._rows: dict[str, Tensor] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def previous(self) -> int:
        """How many of what it holds were there before the stream."""
        return self._count - min(self.seen, self.reservoir or self.capacity)

    def replay_sizes(self, passed: Tensor) -> Tensor:
        """Of how many of the stream's samples replay draws when so many have passed by, (N,).

        At most of as many as the memory keeps; beside what was there before, at most of so many
        that they have the share which a reservoir of all tasks would give them.
        """
        held = passed.clamp(max=min(self.capacity, self.reservoir or self.capacity))
        if not self.previous:
            return held
        return torch.minimum(held, self.previous * passed // max(1, self.past))

    @property
    def samples(self) -> ImageSet | None:
        """What is kept, or None while nothing is."""
        return ImageSet(self._kept("images"), self._kept("labels")) if self._count else None

    @property
    def proposal(self) -> Tensor:
        """g_k of every kept sample, float32 or wider, (N,).

        Normalised over what was visible of its class when it was drawn; 1 for a sample of a stream.
        """
        return self._kept("proposal") if self._count else torch.empty(0)

    @property
    def extras(self) -> dict[str, Tensor]:
        """Whatever else was kept with the samples, by name, (N, ...)."""
        return {name: self._kept(name) for name in self._rows if name not in OWN}

    def visible(self, task: ImageSet) -> ImageSet:
        """Everything there is to see while learning a task: the memory, then the task."""
        return task if self.samples is None else ImageSet.concatenate(self.samples, task)

    def replace(
        self, samples: ImageSet, proposal: Tensor, extras: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep these samples and no others."""
        if len(samples) > self.capacity:
            raise InputError(f"{len(samples)} samples do not fit a memory of {self.capacity}")
        self._take(samples, proposal, extras or {})
        self.past, self.seen = self.past + self.seen, 0

    def _take(self, samples: ImageSet, proposal: Tensor, extras: Mapping[str, Tensor]) -> None:
        if proposal.shape != samples.labels.shape:
            raise InputError(f"{len(samples)} samples need as many proposals, not {len(proposal)}")
        device = samples.labels.device
        rows = {"images": samples.images, "labels": samples.labels}
        rows["proposal"] = at_least_float32(proposal)
        # Indexing may have given a view: a copy lets the data it came from go.
        self._rows = {k: v.clone().to(device) for k, v in {**rows, **extras}.items()}
        self._count = len(samples)

    def insert(self, slots: Tensor, samples: ImageSet, extras: Mapping[str, Tensor]) -> None:
        """Take in what a stream brings.

        Args:
            slots: Where each sample goes, or -1 for nowhere, int64 on the CPU (N,). Free slots are
                given in order, and none twice.
            samples: As many samples.
            extras: What to keep with them, (N, ...).
        """
        self.seen += len(samples)
        taken = (slots >= 0).nonzero()[:, 0]
        if not len(taken):
            return
        there = samples.labels.device
        new = {"images": samples.images, "labels": samples.labels, **extras}
        new["proposal"] = torch.ones(len(samples), device=there)
        self._rows = self._rows or {k: v[:0] for k, v in new.items()}
        count, room = int(slots.max()) + 1, len(self._rows["labels"])
        if count > room:
            # Not for all of its capacity at once: as much may never come.
            more = min(max(count, 2 * room), self.capacity + self.reservoir) - room
            for name, rows in self._rows.items():
                self._rows[name] = torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
        # Without waiting for the device: what is not page-locked has been read when a call returns.
        chosen, place = (rows.to(there, non_blocking=True) for rows in (taken, slots[taken]))
        for name, rows in self._rows.items():
            rows[place] = new[name][chosen].to(rows.dtype)
        self._count = max(self._count, count)

    def widen(self, name: str, width: int) -> None:
        """Give an extra of one number a class, (N, classes), room for more or fewer classes."""
        if name in self._rows:
            rows = self._rows[name]
            wider = rows.new_zeros(len(rows), width)
            same = min(width, rows.shape[1])
            wider[:, :same] = rows[:, :same]
            self._rows[name] = wider

    def state(self) -> dict[str, Tensor]:
        """What is kept, as tensors by name."""
        kept = {name: self._kept(name) for name in self._rows if self._count}
        passed = {name: getattr(self, name) for name in PASSED}
        return {**kept, **{name: torch.tensor(count) for name, count in passed.items() if count}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._rows, self._count = {}, 0
        self.seen, self.past = (int(state[name]) if name in state else 0 for name in PASSED)
        if not state.keys() - set(PASSED):
            return
        if not state.keys() >= set(OWN):
            raise InputError(f"a memory needs {', '.join(OWN)}; there are {', '.join(state)}")
        extras = {name: v for name, v in state.items() if name not in (*OWN, *PASSED)}
        if len(state["labels"]) > self.capacity + (self.reservoir if self.seen else 0):
            count = len(state["labels"])
            raise InputError(f"{count} samples do not fit a memory of {self.capacity}")
        self._take(ImageSet(state["images"], state["labels"]), state["proposal"], extras)
        if self.reservoir and self.previous and not self.past:
            raise InputError("an earlier cclis kept this memory and did not count what passed by")

    def _kept(self, name: str) -> Tensor:
        return self._rows[name][: self._count]
