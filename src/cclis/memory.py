"""The replay memory. It stores the samples themselves, not indices into data that is gone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cclis.data.images import ImageSet
from cclis.errors import InputError
from cclis.functional.precision import at_least_float32

REQUIRED = ("images", "labels", "proposal")
"""Tensors that every memory has. All others are extras."""
COUNTS = ("seen", "past")
"""Numbers of samples of the stream."""


class Memory:
    """At most `capacity` samples with their labels, proposals and extras.

    Samples come in by `replace`, all at once at the end of a task, or by `insert`, a few at a time
    from a stream. A memory with a reservoir uses both: during a task, `insert` adds samples of the
    task beside the stored ones, and at its end `replace` sets those that stay.

    Attributes:
        seen: Number of samples of the stream so far; with a reservoir, of the current task only.
        past: With a reservoir, number of samples of the tasks before.

    Args:
        capacity: Maximum number of samples between tasks.
        reservoir: Maximum number of samples of the current task beside them.
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
        """Number of stored samples from before the current stream."""
        return self._count - min(self.seen, self.reservoir or self.capacity)

    def replay_sizes(self, passed: Tensor) -> Tensor:
        """Number of the stream's samples that replay draws from.

        It is bounded by the capacity. Beside samples from before the stream it is also bounded so
        that old and new samples have the shares they would have in one reservoir of all tasks.

        Args:
            passed: Number of samples of the stream so far, int64 (N,).

        Returns:
            int64 (N,).
        """
        stored = passed.clamp(max=min(self.capacity, self.reservoir or self.capacity))
        if not self.previous:
            return stored
        return torch.minimum(stored, self.previous * passed // max(1, self.past))

    @property
    def samples(self) -> ImageSet | None:
        """The stored samples, or None if the memory is empty."""
        return ImageSet(self._stored("images"), self._stored("labels")) if self._count else None

    @property
    def proposal(self) -> Tensor:
        """g_k of every stored sample, float32 or float64, (N,).

        Normalised over the samples of its class that were visible at the selection; 1 for samples
        of a stream.
        """
        return self._stored("proposal") if self._count else torch.empty(0)

    @property
    def extras(self) -> dict[str, Tensor]:
        """Other tensors stored with the samples, by name, (N, ...)."""
        return {name: self._stored(name) for name in self._rows if name not in REQUIRED}

    def visible(self, task: ImageSet) -> ImageSet:
        """All samples available while learning a task: those of the memory, then the task's."""
        return task if self.samples is None else ImageSet.concatenate(self.samples, task)

    def replace(
        self, samples: ImageSet, proposal: Tensor, extras: Mapping[str, Tensor] | None = None
    ) -> None:
        """Store these samples instead of all others."""
        if len(samples) > self.capacity:
            raise InputError(f"{len(samples)} samples do not fit a memory of {self.capacity}")
        self._store(samples, proposal, extras or {})
        self.past, self.seen = self.past + self.seen, 0

    def _store(self, samples: ImageSet, proposal: Tensor, extras: Mapping[str, Tensor]) -> None:
        if proposal.shape != samples.labels.shape:
            raise InputError(f"{len(samples)} samples need as many proposals, not {len(proposal)}")
        device = samples.labels.device
        rows = {"images": samples.images, "labels": samples.labels}
        rows["proposal"] = at_least_float32(proposal)
        # Copied, because a view would keep the task's data alive.
        self._rows = {k: v.clone().to(device) for k, v in {**rows, **extras}.items()}
        self._count = len(samples)

    def insert(self, slots: Tensor, samples: ImageSet, extras: Mapping[str, Tensor]) -> None:
        """Store samples of a stream.

        Args:
            slots: Slot of each sample, or -1 not to store it, int64 (N,), on the CPU. Free slots
                must be used in order, and no slot twice.
            samples: The N samples.
            extras: Other tensors to store with them, by name, (N, ...).
        """
        self.seen += len(samples)
        stored = (slots >= 0).nonzero()[:, 0]
        if not len(stored):
            return
        device = samples.labels.device
        new = {"images": samples.images, "labels": samples.labels, **extras}
        new["proposal"] = torch.ones(len(samples), device=device)
        self._rows = self._rows or {k: v[:0] for k, v in new.items()}
        count, room = int(slots.max()) + 1, len(self._rows["labels"])
        if count > room:
            # Doubled rather than allocated in full: the stream may be shorter than the capacity.
            more = min(max(count, 2 * room), self.capacity + self.reservoir) - room
            for name, rows in self._rows.items():
                self._rows[name] = torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
        # Safe without waiting: memory that is not pinned has been read when the call returns.
        source, target = (rows.to(device, non_blocking=True) for rows in (stored, slots[stored]))
        for name, rows in self._rows.items():
            rows[target] = new[name][source].to(rows.dtype)
        self._count = max(self._count, count)

    def widen(self, name: str, width: int) -> None:
        """Resize an extra with one value per class, (N, classes), to `width` classes."""
        if name in self._rows:
            rows = self._rows[name]
            resized = rows.new_zeros(len(rows), width)
            common = min(width, rows.shape[1])
            resized[:, :common] = rows[:, :common]
            self._rows[name] = resized

    def state(self) -> dict[str, Tensor]:
        """The stored samples and the counts, as tensors by name."""
        stored = {name: self._stored(name) for name in self._rows if self._count}
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**stored, **{name: torch.tensor(count) for name, count in counts.items() if count}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`."""
        self._rows, self._count = {}, 0
        self.seen, self.past = (int(state[name]) if name in state else 0 for name in COUNTS)
        if not state.keys() - set(COUNTS):
            return
        if not state.keys() >= set(REQUIRED):
            raise InputError(f"a memory needs {', '.join(REQUIRED)}, but has {', '.join(state)}")
        extras = {name: v for name, v in state.items() if name not in (*REQUIRED, *COUNTS)}
        if len(state["labels"]) > self.capacity + (self.reservoir if self.seen else 0):
            count = len(state["labels"])
            raise InputError(f"{count} samples do not fit a memory of {self.capacity}")
        self._store(ImageSet(state["images"], state["labels"]), state["proposal"], extras)
        if self.reservoir and self.previous and not self.past:
            raise InputError(
                "this memory comes from an earlier cclis, which did not count the samples of the "
                "stream; learn again from the start"
            )

    def _stored(self, name: str) -> Tensor:
        return self._rows[name][: self._count]
