"""The baselines against those of Mammoth, its own code.

    python benchmarks/mammoth.py CHECKOUT [--benchmark split-digits] [--data FOLDER]
        [--methods er ...] [--sides mammoth ours] [--seeds 10] [--jobs N]
        [--out results/experiments/mammoth]

CHECKOUT is a clone of https://github.com/aimagelab/mammoth. Its models learn the same tasks as ours
with the same network, settings and augmentation, on a GPU where there is one: the network is
compiled there, and theirs has 32 bits where ours has 16. What they import and do not need for that
(torchvision, kornia, its datasets and its command line) is stood in for; GEM needs quadprog. Mirror
images, of which its iCaRL takes means, are left out where the augmentation has none. Its GSS
compares gradients of images that are not normalised, though the network learns from images that
are; as `gss normalised` it compares those. Prints accuracies after every task, and writes JSON
after every run.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
from summary import write_summary
from torch import Tensor, nn

from cclis import load_benchmark
from cclis.data.benchmarks import BENCHMARKS, Benchmark, Task
from cclis.data.images import ImageSet
from cclis.engine.devices import device_name
from cclis.engine.randomness import seeded
from cclis.engine.trainer import Trainer
from cclis.evaluation.accuracy import evaluate
from cclis.methods import make_config
from cclis.nn.compiling import allow_shapes
from cclis.nn.network import feature_dimension, make_encoder
from cclis.runs.records import SCENARIOS
from cclis.settings import Config, recipe_for, recipe_settings

METHODS = ("er", "der", "derpp", "icarl", "gem", "gss", "gss normalised")
STOOD_IN_FOR = (
    *("torchvision", "torchvision.transforms", "torchvision.transforms.functional"),
    *("kornia", "datasets", "utils.args", "utils.kornia_utils"),
)
SIDES = ("mammoth", "ours")
Accuracies = dict[str, float]

MEMORY = {"split-digits": 100}
"""Samples that may be kept, where not 200."""
TEST_BATCH = 500

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def memory_of(benchmark: str) -> int:
    return MEMORY.get(benchmark, 200)


def settings_of(benchmark: Benchmark, method: str, seed: int) -> Config:
    memory = memory_of(benchmark.name)
    settings = recipe_settings(recipe_for(benchmark.name, method, memory))
    return make_config(settings.pop("method"), {**settings, "memory": memory, "seed": seed})


def ours(benchmark: Benchmark, method: str, seed: int) -> Iterator[Accuracies]:
    """Accuracies of this package after every task."""
    config, tests = settings_of(benchmark, method, seed), []
    trainer = Trainer(config, benchmark.image_shape, benchmark.classes)
    for task, classes in zip(benchmark, benchmark.task_sizes, strict=True):
        *_, learned = trainer.learn(task.train, classes)
        tests.append(task.test)
        heads, sizes = trainer.method.heads, trainer.task_sizes
        found = evaluate(trainer.inference, heads, learned.visible, tests, sizes, config, seed)
        (judged,) = found.accuracies.values()
        yield {name: statistics.mean(getattr(judged, name)) for name in SCENARIOS}


class Transform:
    """What Mammoth's kornia transforms are: applied to whole batches, without gradients."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self._function = function

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return self._function(images)

    @property
    def transforms(self) -> Transform:
        return self


class StandIn(ModuleType):
    """A module that has everything, for nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Backbone(nn.Module):
    """The network of ours, as Mammoth's models call theirs."""

    device = DEVICE

    def __init__(self, config: Config, benchmark: Benchmark):
        super().__init__()
        self.encoder = make_encoder(config, benchmark.image_shape)
        features = feature_dimension(self.encoder, benchmark.image_shape)
        self.classifier = nn.Linear(features, benchmark.classes)
        if DEVICE.type == "cuda":
            allow_shapes()
            self.encoder.compile(dynamic=False, mode="reduce-overhead")

    def forward(self, images: Tensor, returnt: str = "out") -> Tensor:
        features: Tensor = self.encoder(images)
        return features if returnt == "features" else self.classifier(features)

    def get_grads(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])


class Loader:
    """Batches of a task: augmented images, labels, images as they are."""

    def __init__(self, task: ImageSet, batch_size: int, augment: Transform):
        # As its datasets have them: grey images as tensors, others as arrays.
        images = task.images.clone()
        self.dataset = SimpleNamespace(
            data=images[..., 0] if images.shape[-1] == 1 else images.numpy(),
            targets=task.labels.numpy().copy(),
            not_aug_transform=True,
        )
        self._batch_size, self._augment = batch_size, augment

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        labels = torch.as_tensor(np.asarray(self.dataset.targets))
        for rows in torch.split(torch.randperm(len(labels)), self._batch_size):
            plain = as_floats(self.dataset.data[rows])
            yield self._augment(plain), labels[rows].to(DEVICE), plain


def as_floats(images: Tensor | np.ndarray) -> Tensor:
    """uint8 (N, H, W) or (N, H, W, C) to (N, C, H, W) within [0, 1]."""
    rows = torch.as_tensor(images).to(DEVICE)
    return (rows[:, None] if rows.dim() == 3 else rows.permute(0, 3, 1, 2)).float() / 255


def mirrored(images: Tensor, probability: float) -> Tensor:
    """Each by chance."""
    if not probability:
        return images
    which = torch.rand(len(images), 1, 1, 1, device=images.device) < probability
    return torch.where(which, images.flip(-1), images)


def cropped(images: Tensor, padding: int) -> Tensor:
    """Each shifted by chance, zeros moving in."""
    padded = F.pad(images, (padding,) * 4)
    side = images.shape[-1]
    shifts = torch.randint(0, 2 * padding + 1, (len(images), 2)).tolist()
    shifted = [p[:, y : y + side, x : x + side] for p, (y, x) in zip(padded, shifts, strict=True)]
    return torch.stack(shifted)


def import_models(checkout: Path) -> None:
    """Make `models` of Mammoth importable."""
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(checkout))
    for name in STOOD_IN_FOR:
        module = sys.modules[name] = StandIn(name)
        parent, _, own = name.rpartition(".")
        if parent in STOOD_IN_FOR:
            setattr(sys.modules[parent], own, module)
    sys.modules["utils.args"].ArgumentParser = argparse.ArgumentParser  # type: ignore[attr-defined]
    sys.modules["utils.kornia_utils"].KorniaAugNoGrad = Transform  # type: ignore[attr-defined]
    sys.modules["utils.kornia_utils"].to_kornia_transform = lambda of: of  # type: ignore[attr-defined]


def model_of(name: str) -> Any:
    module = __import__(f"models.{name}", fromlist=[name])
    return next(kind for kind in vars(module).values() if getattr(kind, "NAME", None) == name)


def theirs(benchmark: Benchmark, method: str, seed: int) -> Iterator[Accuracies]:
    """Accuracies of Mammoth after every task."""
    name, _, changed = method.partition(" ")
    config: Any = settings_of(benchmark, name, seed)
    tasks, sizes = list(benchmark), benchmark.task_sizes
    starts = [0, *accumulate(sizes)]
    torch.manual_seed(seed)
    np.random.seed(seed)
    with seeded(seed, "network"):
        backbone = Backbone(config, benchmark).to(DEVICE)
    std, mean = torch.std_mean(
        as_floats(tasks[0].train.images), (0, 2, 3), correction=0, keepdim=True
    )
    normalise = Transform(lambda images: (images - mean.to(images)) / std.to(images))
    augment = Transform(
        lambda images: normalise(mirrored(cropped(images, config.padding), config.flip))
    )
    sys.modules["torchvision.transforms.functional"].hflip = (  # type: ignore[attr-defined]
        lambda images: mirrored(images, float(config.flip > 0))
    )
    arguments = Namespace(
        buffer_size=config.memory,
        batch_size=config.batch_size,
        minibatch_size=getattr(config, "replay_batch_size", config.batch_size),
        optimizer="sgd",
        lr=config.learning_rate,
        optim_wd=0.0,
        optim_mom=0.0,
        optim_nesterov=False,
        opt_wd=config.weight_decay,
        alpha=getattr(config, "logit_weight", 0),
        beta=getattr(config, "label_weight", 0),
        gamma=getattr(config, "memory_strength", 0),
        batch_num=1,
        gss_minibatch_size=None,
        use_original_icarl_transform=0,
        compute_theoretical_best=0,
        label_perc=1,
        nowand=1,
        device=None,
    )
    dataset = SimpleNamespace(
        N_CLASSES=benchmark.classes,
        N_TASKS=len(tasks),
        N_CLASSES_PER_TASK=sizes[0],
        SETTING="class-il",
        args=arguments,
        get_normalization_transform=lambda: normalise,
        get_offsets=lambda task: (starts[task], starts[task + 1]),
        TEST_TRANSFORM=normalise,
    )
    model = model_of(name)(
        backbone, nn.CrossEntropyLoss(), arguments, SimpleNamespace(transforms=[augment]), dataset
    )
    model.buffer.device = DEVICE
    if changed:
        compare = model.get_grads
        model.get_grads = lambda images, labels: compare(normalise(images), labels)
    for task in tasks:
        dataset.train_loader = Loader(task.train, config.batch_size, augment)
        model.net.train()
        model.meta_begin_task(dataset)
        for epoch in range(config.epochs):
            for batch in dataset.train_loader:
                model.meta_observe(*batch, epoch=epoch)
        model.meta_end_task(dataset)
        yield accuracies(model, tasks[: task.index + 1], normalise)


@torch.no_grad()
def accuracies(model: Any, tasks: list[Task], normalise: Transform) -> Accuracies:
    """In % over all classes and over those of a task, averaged over tasks."""
    model.net.eval()
    found: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for task in tasks:
        batches = task.test.images.split(TEST_BATCH)
        scores = torch.cat([model(normalise(as_floats(batch))).cpu() for batch in batches])
        known = torch.full_like(scores, -torch.inf)
        known[:, task.classes] = scores[:, task.classes]
        for name, by in zip(SCENARIOS, (scores, known), strict=True):
            right = by.argmax(dim=1) == task.test.labels
            found[name].append(100 * right.double().mean().item())
    return {name: statistics.mean(values) for name, values in found.items()}


@cache
def stream(name: str, data: Path | None) -> Benchmark:
    return load_benchmark(name, data)


def begin(checkout: Path) -> None:
    """Make a process ready to learn."""
    torch.set_num_threads(1)
    import_models(checkout)


def learned(job: tuple[str, str, int, str, Path | None]) -> Accuracies:
    """Accuracies of one side, method and seed after the last task."""
    side, method, seed, name, data = job
    learn = ours if side == "ours" else theirs
    for task, found in enumerate(learn(stream(name, data), method, seed), start=1):
        print(
            f"{side:8} {method:15} seed {seed}  task {task}  "
            f"Class-IL {found['class_il']:.2f}  Task-IL {found['task_il']:.2f}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="split-digits")
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, help="runs at once [default: one a core]")
    parser.add_argument("--out", type=Path, default=Path("results/experiments/mammoth"))
    arguments = parser.parse_args()
    asked = ["git", "-C", str(arguments.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    rows = [
        (side, method)
        for side in arguments.sides
        for method in arguments.methods
        if side == "mammoth" or " " not in method
    ]
    where = arguments.benchmark, arguments.data
    jobs = [(*row, seed, *where) for row in rows for seed in range(arguments.seeds)]
    found: dict[str, Any] = {
        "commit": commit,
        "benchmark": arguments.benchmark,
        "memory": memory_of(arguments.benchmark),
        **{side: {} for side in SIDES},
    }
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, spawned, begin, (arguments.checkout,)) as pool:
        for (side, method, *_), run in zip(jobs, pool.map(learned, jobs), strict=True):
            row = found[side].setdefault(method, {name: [] for name in SCENARIOS})
            for name, accuracy in run.items():
                row[name].append(accuracy)
            write_summary(arguments.out, device_name(DEVICE), found, f"-{arguments.benchmark}")


if __name__ == "__main__":
    main()
