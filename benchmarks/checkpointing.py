"""What checkpoints cost: seconds of a save, as a share of the training between two of them.

    python benchmarks/checkpointing.py [--out results/speed/checkpointing]

A ResNet-18 with its teacher and a memory of 500 images of 32×32, in the middle of the second task,
saved as `cclis train` does: brought from the device, packed, hashed, written, synced.
Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from summary import write_summary

from cclis.data.images import ImageSet
from cclis.engine.devices import device_name
from cclis.engine.trainer import Trainer
from cclis.methods import make_config
from cclis.runs.checkpoints import Checkpoints

REPEATS = 10


def save_again_and_again(trainer: Trainer) -> tuple[list[float], int]:
    """Seconds of each save of a trainer as it is, and the size of the file."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        checkpoints, times = Checkpoints(Path(folder)), []
        for number in range(REPEATS):
            started = time.perf_counter()
            checkpoints.save(f"task-1-step-{number}", trainer.state())
            times.append(time.perf_counter() - started)
        return times, (Path(folder) / f"task-1-step-{number}.safetensors").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/speed/checkpointing"))
    arguments = parser.parse_args()
    settings = {"encoder": "resnet18", "batch_size": 64, "epochs": 1, "memory": 500}
    trainer = Trainer(make_config("cclis", settings), (32, 32, 3), 10)
    images = torch.randint(0, 256, (640, 32, 32, 3), dtype=torch.uint8)
    labels = torch.arange(640) % 2
    for _ in trainer.learn(ImageSet(images, labels), 2):
        pass
    next(trainer.learn(ImageSet(images, labels + 2), 2))
    times, size = save_again_and_again(trainer)
    minutes, seconds = trainer.config.checkpoint_minutes, statistics.median(times)
    result = {
        "megabytes": size / 1e6,
        "seconds_median": seconds,
        "seconds_longest": max(times),
        "every_minutes": minutes,
        "share_of_training": seconds / (60 * minutes),
    }
    print(json.dumps(result, indent=2))
    write_summary(arguments.out, device_name(trainer.fabric.device), result)


if __name__ == "__main__":
    main()
