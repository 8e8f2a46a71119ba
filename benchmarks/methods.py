"""What one task costs with every method, relative to ER, on this machine.

    python benchmarks/methods.py [--quick] [--out results/speed-methods]

Each method learns two tasks of random 32×32 images with its own batch size; the second, with a
memory and, where the method has one, a teacher, is timed without what compiling and recording take.
A task of Seq-CIFAR-10 has 10,000 images and the epochs of the method's recipe. Prints and writes
JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from cclis.config import make_config, read_yaml, recipe_for, recipe_path
from cclis.data.images import ImageSet
from cclis.engine.device import device_name
from cclis.engine.trainer import Trainer
from cclis.experiment import versions
from cclis.methods import METHODS

TASK = 10_000
"""Images of a task of Seq-CIFAR-10."""


def images_of(count: int, first: int) -> ImageSet:
    chance = torch.Generator().manual_seed(first)
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=chance)
    return ImageSet(images, torch.arange(count) % 2 + first)


def cost(method: str, count: int, epochs: int, width: int) -> dict[str, float]:
    """Images of the task a second, and seconds of a whole task, for a method's second task."""
    memory = 0 if method in ("finetune", "joint") else 200
    recipe = recipe_for("seq-cifar10", method, memory)
    settings: dict[str, Any] = {} if recipe is None else read_yaml(recipe_path(recipe))
    whole = int(settings.get("epochs", 50))
    settings |= {"method": method, "memory": memory, "width": width}
    settings |= {"epochs": epochs, "first_epochs": 1}
    trainer = Trainer(make_config(settings.pop("method"), settings), (32, 32, 3), 10)
    ends: list[float] = []
    trainer.learn(images_of(count, 0), 2)
    started = time.perf_counter()
    learned = trainer.learn(images_of(count, 2), 2, lambda _: ends.append(time.perf_counter()))
    # The first epoch compiles, warms up and records.
    an_epoch = (ends[-1] - ends[0]) / (epochs - 1)
    after = started + learned.seconds - ends[-1]
    return {
        "images_per_second": count / an_epoch,
        "task_seconds": whole * an_epoch * TASK / count + after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small batches alone")
    parser.add_argument("--out", type=Path, default=Path("results/speed-methods"))
    arguments = parser.parse_args()
    small = arguments.quick or not torch.cuda.is_available()
    count, epochs, width = (128, 2, 8) if small else (5_120, 4, 64)
    found = {}
    for method in METHODS:
        found[method] = cost(method, count, epochs, width)
        print(json.dumps({method: found[method]}), flush=True)
    for method, numbers in found.items():
        numbers["times_er"] = numbers["task_seconds"] / found["er"]["task_seconds"]
        print(f"{method:10} {numbers['times_er']:6.2f} × ER", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "device": device_name(device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "images": count,
        "width": width,
        "methods": found,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "-".join(device_name(device).lower().replace(",", "").split())
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
