"""How many images a second several runs make of one GPU together, against one run alone.

    python benchmarks/sharing.py [--method er] [--runs 1 2 4] [--mps] [--out results/speed/sharing]

Each run is a process that learns random 32×32 images by the method's recipe for Seq-CIFAR-10. All
start to count when the last one has compiled, and count for as long. With --mps their kernels run
side by side through NVIDIA's Multi-Process Service, which is started for the time; without it they
take turns. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from methods import PART, images_of, recipe_config
from summary import write_summary

from cclis.engine.devices import device_name
from cclis.engine.events import EpochEnded
from cclis.engine.trainer import Trainer
from cclis.methods.registry import OURS

CONTROL = "nvidia-cuda-mps-control"


def learn(method: str, quick: bool, seconds: float, ready: Barrier, found: Queue[float]) -> None:
    """Images a second of one run, put into `found`."""
    small = {"width": 4, "threads": 1} if quick else {}
    config = recipe_config(method, epochs=10**6, first_epochs=None, **small)
    trainer = Trainer(config, (32, 32, 3), 2)
    count = 128 if quick else PART
    begun = None
    for event in trainer.learn(images_of(count, 0), 2):
        if not isinstance(event, EpochEnded):
            continue
        if begun is None:
            # The first epoch compiles, warms up and records.
            ready.wait()
            begun = time.perf_counter()
        elif (passed := time.perf_counter() - begun) > seconds:
            found.put(event.record.epoch * count / passed)
            break
    # Nobody stops while another still counts.
    ready.wait()


def together(method: str, runs: int, quick: bool, seconds: float) -> list[float]:
    """Images a second of each of several runs at once."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(runs), context.Queue()
    given = (method, quick, seconds, ready, found)
    processes = [context.Process(target=learn, args=given) for _ in range(runs)]
    for process in processes:
        process.start()
    rates = [found.get() for _ in processes]
    for process in processes:
        process.join()
    return rates


@contextmanager
def side_by_side(yes: bool) -> Iterator[None]:
    """NVIDIA's Multi-Process Service for what is started within."""
    if not yes:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ |= dict.fromkeys(names, folder)
        subprocess.run([CONTROL, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input=b"quit\n", check=True)
            for name in names:
                del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=OURS, default="er")
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--mps", action="store_true", help="kernels side by side, not in turns")
    parser.add_argument("--out", type=Path, default=Path("results/speed/sharing"))
    arguments = parser.parse_args()
    quick = not torch.cuda.is_available()
    rows = []
    with side_by_side(arguments.mps):
        for runs in arguments.runs:
            rates = together(arguments.method, runs, quick, arguments.seconds)
            rows.append({"runs": runs, "images_per_second": sum(rates), "each": rates})
            times = sum(rates) / rows[0]["images_per_second"]
            print(
                f"{runs} at once: {sum(rates):9,.0f} images/s together, {times:.2f} × the first row"
            )
    device = device_name(torch.device("cpu" if quick else "cuda"))
    result = {"method": arguments.method, "mps": arguments.mps, "rows": rows}
    suffix = f"-{arguments.method}{'-mps' * arguments.mps}"
    write_summary(arguments.out, device, result, suffix)


if __name__ == "__main__":
    main()
