"""What Seq-CIFAR-10 costs with every method, relative to ER, on this machine.

    python benchmarks/methods.py [--quick] [--methods er gss ...] [--out results/speed/methods]

Each method learns five tasks of random 32×32 images with its own batch size, a part of each task
and a few epochs of it. All but a task's first epoch are timed, so without compiling and recording,
and the median counts. What a task costs is all steps of the method's recipe over a whole task, and
the choice of what to keep, as long as it took after the last; a run is its five tasks. The last is
the dearest: a full memory, a teacher where the method has one, and for GEM the most past tasks. Of
joint training, which has all images in one task, these are as many steps.
Prints, and writes what was asked for as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from summary import write_summary

from cclis.data.images import ImageSet
from cclis.engine.devices import device_name
from cclis.engine.events import EpochEnded
from cclis.engine.trainer import Trainer
from cclis.methods import keeps_samples, make_config
from cclis.methods.registry import OURS
from cclis.settings import Config, recipe_for, recipe_settings

TASK = 10_000
"""Images of a task of Seq-CIFAR-10."""
TASKS = 5
PART = 4096
"""Images of a task that are learned here."""
EPOCHS = 4


def images_of(count: int, first: int) -> ImageSet:
    rng = torch.Generator().manual_seed(first)
    images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=rng)
    return ImageSet(images, torch.arange(count) % 2 + first)


def recipe_config(method: str, **changed: Any) -> Config:
    """A method's recipe for Seq-CIFAR-10 and, where it keeps samples, a memory of 200; changed."""
    memory = 200 if keeps_samples(method) else 0
    settings = recipe_settings(recipe_for("seq-cifar10", method, memory)) | {
        "memory": memory,
        **changed,
    }
    return make_config(settings.pop("method"), settings)


def cost(method: str, count: int, width: int, epochs: int) -> dict[str, Any]:
    """Images of the last task a second, and the seconds of each task, its selection and a run."""
    recipe = recipe_config(method)
    whole, first = recipe.epochs, recipe.first_epochs or recipe.epochs
    config = recipe_config(method, width=width, epochs=epochs, first_epochs=None)
    trainer = Trainer(config, (32, 32, 3), 2 * TASKS)
    training = []
    for task in range(TASKS):
        # With a memory mixed in, a whole task has fewer steps than its part would say.
        steps = trainer._replay.mix(TASK, trainer.task_sizes)[0].steps
        ends = [
            (event.record.step, time.perf_counter())
            for event in trainer.learn(images_of(count, 2 * task), 2)
            if isinstance(event, EpochEnded)
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # The first epoch compiles, warms up and records.
        each = [(then - t) / (n - m) for (m, t), (n, then) in pairwise(ends)]
        an_epoch = steps * median(each)
        training.append((whole if task else first) * an_epoch)
    selection = (time.perf_counter() - ends[-1][1]) * TASK / count
    seconds = [of_task + selection for of_task in training]
    return {
        "images_per_second": TASK / an_epoch,
        "selection_seconds": selection,
        "task_seconds": seconds,
        "run_seconds": sum(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small batches alone")
    parser.add_argument("--methods", nargs="+", choices=OURS, default=list(OURS), help="beside er")
    parser.add_argument(
        "--out", type=Path, default=Path("results/speed/methods"), help="folder to write into"
    )
    arguments = parser.parse_args()
    small = arguments.quick or not torch.cuda.is_available()
    count, width, epochs = (32, 4, 2) if small else (PART, 64, EPOCHS)
    found = {}
    for method in dict.fromkeys(["er", *arguments.methods]):
        found[method] = cost(method, count, width, epochs)
        print(json.dumps({method: found[method]}), flush=True)
    for method, numbers in found.items():
        numbers["times_er"] = numbers["run_seconds"] / found["er"]["run_seconds"]
        last = numbers["task_seconds"][-1] / found["er"]["task_seconds"][-1]
        print(
            f"{method:10} {numbers['run_seconds']:7,.0f} s a run of Seq-CIFAR-10, "
            f"{numbers['times_er']:5.2f} × ER; the last task {numbers['images_per_second']:7,.0f} "
            f"img/s, {numbers['task_seconds'][-1]:5,.0f} s, {last:5.2f} × ER",
            flush=True,
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {"images": count, "width": width, "methods": found}
    write_summary(arguments.out, device_name(device), result)


if __name__ == "__main__":
    main()
