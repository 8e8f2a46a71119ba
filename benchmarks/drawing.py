"""Drawing what an epoch replays and takes in by one thread, against all threads, on this machine.

    python benchmarks/drawing.py [--epochs 30] [--pause 0.3] [--out results/speed/drawing]

An epoch of ER on a task of Seq-CIFAR-10 with a memory of 200. Between two epochs the threads have
nothing to do for a while, as in training on a GPU, and fall asleep. Prints and writes the median
seconds of both ways, their ratio, and the longest.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from summary import write_summary

from cclis.data.batches import Mix, draw_replay
from cclis.engine.devices import device_name, one_thread
from cclis.functional.exemplars import reservoir_slots

MEMORY, SEEN = 200, 50_000
EPOCH = Mix(task=32, replay=32, steps=313)


def draw(rng: torch.Generator) -> None:
    kept = torch.full((EPOCH.steps,), MEMORY)
    draw_replay(kept, MEMORY, EPOCH, 1, rng)
    reservoir_slots(SEEN, MEMORY, EPOCH.task, generator=rng, batches=EPOCH.steps)


def seconds(rng: torch.Generator, pause: float) -> float:
    time.sleep(pause)
    started = time.perf_counter()
    draw(rng)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--out", type=Path, default=Path("results/speed/drawing"))
    arguments = parser.parse_args()
    rng = torch.Generator().manual_seed(0)
    every, one = [], []
    for _ in range(arguments.epochs):
        every.append(seconds(rng, arguments.pause))
        with one_thread():
            one.append(seconds(rng, arguments.pause))
    found = {
        "pause": arguments.pause,
        "all_seconds": median(every),
        "one_seconds": median(one),
        "ratio": median(every) / median(one),
        "all_longest": max(every),
        "one_longest": max(one),
    }
    print(json.dumps(found))
    write_summary(arguments.out, device_name(torch.device("cpu")), found)


if __name__ == "__main__":
    main()
