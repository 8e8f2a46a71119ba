"""Random generators: one for each purpose, all seeded by the run's seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_for(seed: int, *purpose: str | int) -> int:
    """A different seed for each purpose, so that draws for one never shift those for another."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generator(device: torch.device | str, seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on `device` for one purpose."""
    return torch.Generator(device=device).manual_seed(seed_for(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generator, and the GPU's, for one purpose; restore both afterwards."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed_for(seed, *purpose))
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed_for(seed, *purpose))
        yield


@contextmanager
def globally_seeded(seed: int) -> Iterator[None]:
    """Seed all global generators (torch, random, numpy), and restore them afterwards."""
    before = rng_state()
    torch.manual_seed(seed_for(seed, "torch"))
    random.seed(seed_for(seed, "python"))
    np.random.seed(seed_for(seed, "numpy") % 2**32)
    try:
        yield
    finally:
        restore_rng_state(*before)


def rng_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """States of all global generators; a custom encoder may draw from them.

    Returns:
        The states of torch's generators as tensors, and of the others as values for JSON.
    """
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_rng_state(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(tensors["torch"].cpu())
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"].cpu())
    version, state, gauss = numbers["python"]
    random.setstate((version, tuple(state), gauss))
    np.random.set_state(tuple(numbers["numpy"]))
