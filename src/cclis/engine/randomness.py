"""Random generators: one for every purpose, seeded from a run's seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A seed of its own for every purpose, so that draws for one never shift those for another."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generator(device: torch.device | str, seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on a device for one purpose."""
    return torch.Generator(device=device).manual_seed(seed_for(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Torch's global generator, and a GPU's, seeded for one purpose, and put back afterwards."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed_for(seed, *purpose))
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed_for(seed, *purpose))
        yield


@contextmanager
def globally_seeded(seed: int) -> Iterator[None]:
    """All global generators seeded, and put back afterwards."""
    before = rng_state()
    torch.manual_seed(seed_for(seed, "torch"))
    random.seed(seed_for(seed, "python"))
    np.random.seed(seed_for(seed, "numpy") % 2**32)
    try:
        yield
    finally:
        restore_rng_state(*before)


def rng_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The states of all global generators, which an encoder of one's own may draw from.

    As tensors, and as numbers that JSON can hold.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, place, gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), place, gauss, cached],
    }


def restore_rng_state(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
    """Take back what `rng_state` gave."""
    torch.set_rng_state(tensors["torch"].cpu())
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"].cpu())
    version, state, gauss = numbers["python"]
    random.setstate((version, tuple(state), gauss))
    np.random.set_state(tuple(numbers["numpy"]))
