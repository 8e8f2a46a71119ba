"""Which classifier the representation of a CCLIS run allows, and which of its parts is the limit.

    python benchmarks/heads.py RUN [--data FOLDER] [--out results/experiments/heads]

After the last task of a run, its test accuracy (Class-IL, mean over tasks) under classifiers that
differ in one point each: trained prototypes or class means; means of the memory, of the memory
weighted by 1/g, or of all training data, which no learner may keep; embeddings or the encoder's
features; distances alike in all directions or by the classes' common covariance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SHRINKAGE = 0.1
"""Share of the round covariance in the common one; results hardly change from 0.01 to 0.3."""


def unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def class_means(x: Array, y: Array, classes: int, weights: Array | None = None) -> Array:
    weights = np.ones(len(y)) if weights is None else weights
    return np.stack(
        [np.average(x[y == c], axis=0, weights=weights[y == c]) for c in range(classes)]
    )


def accuracy(scores: Array, labels: Array, task_size: int) -> float:
    right = scores.argmax(axis=1) == labels
    tasks = labels // task_size
    return float(np.mean([right[tasks == t].mean() for t in range(tasks.max() + 1)]) * 100)


def discriminant(x: Array, y: Array, classes: int) -> tuple[Array, Array]:
    """Weights and biases of nearest means under the classes' common covariance."""
    means = class_means(x, y, classes)
    covariance = np.mean([np.cov(x[y == c].T, bias=True) for c in range(classes)], axis=0)
    round_ = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * round_
    weight = np.linalg.solve(covariance, means.T).T
    return weight, -0.5 * (weight * means).sum(axis=1)


def variants(found: dict[str, Array], task_size: int) -> list[dict[str, Any]]:
    """Accuracy under each classifier.

    Args:
        found: `test`, `visible`, `old`: dicts of embeddings, features, labels; `proposal` of the
            visible samples, 1 for the task's; `prototypes`.
        task_size: Classes of a task.
    """
    test, visible, old = (found[name] for name in ("test", "visible", "old"))
    prototypes = unit(found["prototypes"])
    classes = len(prototypes)
    means = class_means(visible["embeddings"], visible["labels"], classes)
    weighted = class_means(visible["embeddings"], visible["labels"], classes, 1 / found["proposal"])
    everything = class_means(
        np.concatenate([visible["embeddings"], old["embeddings"]]),
        np.concatenate([visible["labels"], old["labels"]]),
        classes,
    )
    features = class_means(visible["features"], visible["labels"], classes)
    weight, bias = discriminant(visible["features"], visible["labels"], classes)
    in_embeddings = discriminant(visible["embeddings"], visible["labels"], classes)
    e, f = test["embeddings"], test["features"]
    scores = {
        "trained prototypes": e @ prototypes.T,
        "class means of what is visible": e @ unit(means).T,
        "both joined (the head `prototype`)": e @ unit(prototypes + unit(means)).T,
        "class means, memory weighted by 1/g": e @ unit(weighted).T,
        "class means of all training data": e @ unit(everything).T,
        "common covariance, embeddings": e @ in_embeddings[0].T + in_embeddings[1],
        "class means of features": unit(f) @ unit(features).T,
        "common covariance, features": f @ weight.T + bias,
    }
    return [
        {"classifier": name, "class_il": accuracy(s, test["labels"], task_size)}
        for name, s in scores.items()
    ]


def representations(run_folder: str, data: str | None) -> tuple[dict[str, Any], Any]:
    import torch

    from cclis.data.benchmarks import load_benchmark
    from cclis.engine.trainer import Trainer
    from cclis.runs.directory import Run

    run = Run.open(run_folder)
    config = run.config
    benchmark = load_benchmark(config.benchmark, data or config.data, limit=config.limit)
    last = len(benchmark) - 1
    trainer = Trainer.from_state(*run.checkpoints.load(f"task-{last - 1}"))
    memory, proposal = trainer.memory.samples, trainer.memory.proposal.cpu().numpy()
    trainer.restore(*run.checkpoints.load(f"task-{last}"))
    rng = torch.Generator(device=trainer.fabric.device).manual_seed(0)

    def represent(images: Any, labels: Any, passes: int) -> dict[str, Array]:
        """Over augmented passes, or as they are."""
        parts = [trainer.inference(images, rng if passes else None) for _ in range(passes or 1)]
        return {
            "embeddings": torch.cat([p.embeddings for p in parts]).cpu().numpy(),
            "features": torch.cat([p.features for p in parts]).cpu().numpy(),
            "labels": labels.cpu().repeat(passes or 1).numpy(),
        }

    def joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    task = benchmark[last].train
    remembered = represent(memory.images, memory.labels, 10)
    return {
        "test": joined([represent(t.test.images, t.test.labels, 0) for t in benchmark]),
        "visible": joined([remembered, represent(task.images, task.labels, 1)]),
        "old": joined(
            [
                represent(benchmark[i].train.images, benchmark[i].train.labels, 1)
                for i in range(last)
            ]
        ),
        "proposal": np.concatenate([np.tile(proposal, 10), np.ones(len(task))]),
        "prototypes": trainer.method.network.prototypes.detach().cpu().numpy(),
    }, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("results/experiments/heads"))
    arguments = parser.parse_args()
    found, config = representations(arguments.run, arguments.data)
    sizes = json.loads((Path(arguments.run) / "result.json").read_text())["task_sizes"]
    rows = variants(found, sizes[0])
    for row in rows:
        print(f"{row['class_il']:6.2f}  {row['classifier']}")
    name = f"{config.benchmark}-{config.method}-{config.memory}-seed{config.seed}"
    about = {key: getattr(config, key) for key in ("benchmark", "method", "memory", "seed")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "classifiers": rows}, indent=2)
    (arguments.out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
