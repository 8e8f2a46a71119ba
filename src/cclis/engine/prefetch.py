"""Batches of images brought from the host to a GPU while it works on others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

AHEAD = 2
"""Batches under way while another is worked on."""


def prefetch(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The same batches on the device, one after another.

    From the host they reach a GPU through page-locked memory on a stream of their own, so that
    neither waits for the other.
    """
    if device.type != "cuda":
        yield from batches
        return
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for batch in batches:
        if batch.device.type == "cuda":
            yield batch
            continue
        with torch.cuda.stream(aside):
            # The page-locked copy is not used again before it has arrived: torch sees to it.
            under_way.append(
                (batch.pin_memory().to(device, non_blocking=True), aside.record_event())
            )
        if len(under_way) > AHEAD:
            yield _arrived(*under_way.popleft())
    while under_way:
        yield _arrived(*under_way.popleft())


def _arrived(batch: Tensor, copied: torch.cuda.Event) -> Tensor:
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(copied)
    batch.record_stream(current)
    return batch
