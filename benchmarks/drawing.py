"""Drawing what an epoch replays and takes in by one thread, against all threads, on this machine.

    python benchmarks/drawing.py [--epochs 30] [--pause 0.3]

An epoch of ER on a task of Seq-CIFAR-10 with a memory of 200. Between two epochs the threads have
nothing to do for a while, as in training on a GPU, and fall asleep. Prints the median seconds of
both ways, their ratio, and the longest.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch

from cclis.data.batches import Mix, draw_beside
from cclis.exemplars import reservoir_slots

MEMORY, SEEN = 200, 50_000
EPOCH = Mix(task=32, replay=32, steps=313)


def draw(chance: torch.Generator) -> None:
    kept = torch.full((EPOCH.steps,), MEMORY)
    draw_beside(kept, MEMORY, EPOCH, 1, chance)
    reservoir_slots(SEEN, MEMORY, EPOCH.task, generator=chance, batches=EPOCH.steps)


def seconds(threads: int, epochs: int, pause: float) -> list[float]:
    torch.set_num_threads(threads)
    chance, found = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        time.sleep(pause)
        started = time.perf_counter()
        draw(chance)
        found.append(time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.3)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    every = seconds(threads, arguments.epochs, arguments.pause)
    one = seconds(1, arguments.epochs, arguments.pause)
    found = {
        "threads": threads,
        "all_seconds": median(every),
        "one_seconds": median(one),
        "ratio": median(every) / median(one),
        "all_longest": max(every),
        "one_longest": max(one),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
