from __future__ import annotations

import threading

import pytest
import torch

from cclis.engine.devices import device_name, make_fabric, on_host, one_thread, peak_memory
from cclis.engine.randomness import (
    generator,
    globally_seeded,
    restore_rng_state,
    rng_state,
    seed_for,
    seeded,
)
from cclis.errors import InputError
from cclis.settings import RunOptions


def test_threads_and_precision_are_as_asked() -> None:
    before = torch.get_num_threads()
    try:
        fabric = make_fabric(RunOptions(device="cpu", threads=2, precision="bf16"))
        assert torch.get_num_threads() == 2
        assert device_name(fabric.device).endswith("2 threads")
        with fabric.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        fabric = make_fabric(RunOptions(device="cpu"))
        assert torch.get_num_threads() == 2
        with fabric.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    finally:
        torch.set_num_threads(before)


def test_one_thread_does_not_bind_others_that_begin_meanwhile() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    try:
        torch.set_num_threads(2)
        with one_thread():
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
            found.append(torch.get_num_threads())
        assert [*found, torch.get_num_threads()] == [2, 1, 2]
    finally:
        torch.set_num_threads(before)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no cuda device"):
        make_fabric(RunOptions(device="cuda"))
    with pytest.raises(InputError, match="device must be one of"):
        make_fabric(RunOptions(device="tpu"))
    assert make_fabric(RunOptions()).device.type == "cpu"


def test_every_purpose_has_a_seed_of_its_own() -> None:
    seeds = {seed_for(s, *p) for s in range(20) for p in (("a",), ("b",), ("a", 1), ("a1",))}
    assert len(seeds) == 80
    one, again = generator("cpu", 3, "x"), generator("cpu", 3, "x")
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=again))


def test_the_global_generator_is_put_back() -> None:
    before = torch.get_rng_state()
    with seeded(1, "network"):
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(1, "network"):
        assert torch.equal(torch.rand(2), first)


def test_peak_memory_counts_what_is_in_use() -> None:
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(64, 2**20)
    assert peak_memory(torch.device("cpu")) >= held.nbytes
    assert before > 0


def test_all_global_generators_come_back() -> None:
    import json
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    tensors, numbers = rng_state()
    tensors = {name: state.clone() for name, state in tensors.items()}
    first = draw()
    assert draw() != first
    restore_rng_state(tensors, json.loads(json.dumps(numbers)))
    assert draw() == first


def test_a_seed_for_all_global_generators_is_put_back() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    tensors, numbers = rng_state()
    found = []
    for seed in (1, 1, 2):
        with globally_seeded(seed):
            found.append(draw())
    assert found[0] == found[1] != found[2]
    again, numbers_again = rng_state()
    assert torch.equal(again["torch"], tensors["torch"])
    assert numbers_again == numbers


def test_images_stay_on_the_host_as_asked_or_where_a_gpu_is_too_small(monkeypatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    assert not on_host(RunOptions(), 1 << 30, gpu)
    assert on_host(RunOptions(), 3 << 30, gpu)
    assert not on_host(RunOptions(images="device"), 3 << 30, gpu)
    assert on_host(RunOptions(images="host"), 1, gpu)
    assert not on_host(RunOptions(), 1 << 40, cpu)
