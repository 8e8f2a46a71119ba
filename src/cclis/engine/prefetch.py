"""Copying batches of images to a GPU in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

AHEAD = 2
"""Number of batches that are copied in advance."""


def prefetch(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the batches on the device.

    Batches on the host are copied to a GPU through pinned memory on a separate stream, so that
    copies and computations overlap.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for batch in batches:
        if batch.device.type == "cuda":
            yield batch
            continue
        with torch.cuda.stream(copies):
            # torch does not reuse the pinned memory before the copy is done.
            on_device = batch.pin_memory().to(device, non_blocking=True)
            pending.append((on_device, copies.record_event()))
        if len(pending) > AHEAD:
            yield _wait_for(*pending.popleft())
    while pending:
        yield _wait_for(*pending.popleft())


def _wait_for(batch: Tensor, copied: torch.cuda.Event) -> Tensor:
    """Let the current stream wait for a batch that was copied on another stream."""
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(copied)
    batch.record_stream(current)
    return batch
