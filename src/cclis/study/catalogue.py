"""What each table and figure of the paper asks, and what users do: pure data."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cclis.methods.registry import imported
from cclis.settings import ClassifierConfig, Config

Axis = Literal["memory", "distill_weight"]
CIFAR10, CIFAR100, TINY = "seq-cifar10", "seq-cifar100", "seq-tinyimagenet"
ACCURACY = (("class_il", "accuracy"), ("task_il", "accuracy"))
FORGETTING = (("class_il", "forgetting"), ("task_il", "forgetting"))
AXES: dict[Axis, str] = {"memory": "memory (samples)", "distill_weight": "λ, weight of the PRD"}


@dataclass(frozen=True)
class Variant:
    """A row of a study.

    Attributes:
        name: What it is called, as the paper does.
        method: How it learns.
        settings: What it has other than the recipe.
        not_on: Benchmarks on which the paper leaves it out.
    """

    name: str
    method: str = "cclis"
    settings: Mapping[str, Any] = field(default_factory=dict)
    not_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """What a table or a figure of the paper asks.

    Attributes:
        place: Where it stands in the paper, or what it is.
        about: What it asks.
        variants: Its rows; none stand for every method there is.
        memories: How many samples may be kept.
        benchmarks: Where the paper tries it.
        scores: Which numbers it shows, as (scenario, kind).
        axis: What its figure is drawn along, if it has one.
        maps: Whether its figure is a map of the embeddings of each variant.
    """

    place: str
    about: str
    variants: tuple[Variant, ...]
    memories: tuple[int, ...] = (200,)
    benchmarks: tuple[str, ...] = (CIFAR10,)
    scores: tuple[tuple[str, str], ...] = ACCURACY
    axis: Axis | None = None
    maps: bool = False

    @property
    def rows(self) -> tuple[Variant, ...]:
        """Its variants; those of a study of all methods include what has been imported since."""
        return self.variants or every_method()


METHODS = (
    Variant("ER", "er"),
    Variant("iCaRL", "icarl"),
    Variant("GEM", "gem", not_on=(TINY,)),
    Variant("GSS", "gss"),
    Variant("DER", "der"),
    Variant("Co2L", "co2l"),
    Variant("GCR", "gcr"),
    Variant("CCLIS", "cclis"),
)


def every_method() -> tuple[Variant, ...]:
    """The methods of the paper by its names, then the others."""
    named = {variant.method: variant for variant in (*METHODS, Variant("DER++", "derpp"))}
    others = {method: Variant(method, method) for method in imported() if method not in named}
    return (*named.values(), *others.values())


NEITHER = {"selection": "random", "distillation": False}
ABLATION = (
    Variant("w/o IS and PRD", settings=NEITHER),
    Variant("w/ IS only", settings={"distillation": False}),
    Variant("w/ PRD only", settings={"selection": "random"}),
    Variant("CCLIS"),
)
STUDIES: dict[str, Study] = {
    "methods": Study("Comparison", "Methods side by side.", ()),
    "table1": Study(
        "Table 1",
        "Accuracy of all methods.",
        METHODS,
        (200, 500),
        (CIFAR10, CIFAR100, TINY),
    ),
    "table2": Study(
        "Tables 2 and 6",
        "Average forgetting of all methods; lower is better.",
        METHODS,
        (200, 500),
        (CIFAR10, CIFAR100, TINY),
        scores=FORGETTING,
    ),
    "ablation-is-prd": Study(
        "Table 3",
        "What importance sampling (IS) and prototype-instance relation distillation (PRD) add.",
        ABLATION,
    ),
    "ablation-rbs": Study(
        "Table 4",
        "Replay buffer selection (RBS) by score alone, or with the importance weights that take "
        "its bias out (IS); both without distillation.",
        (
            Variant("RBS only", settings={"importance_sampling": False, "distillation": False}),
            Variant("IS", settings={"distillation": False}),
        ),
        (200, 500),
    ),
    "buffers": Study(
        "Table 7",
        "The ablation of Table 3 with memories from 50 to 500 samples.",
        ABLATION,
        (50, 100, 200, 300, 400, 500),
        axis="memory",
    ),
    "backbones": Study(
        "Table 8",
        "Deeper networks, with neither importance sampling nor distillation and with both.",
        tuple(
            Variant(f"ResNet-{depth}, {name}", settings={"encoder": f"resnet{depth}", **settings})
            for depth in (18, 34, 50)
            for name, settings in (("w/o IS and PRD", NEITHER), ("CCLIS", {}))
        ),
        (100, 300),
    ),
    "losses": Study(
        "Table 9",
        "The contrastive losses alone, without distillation, with a memory chosen at random: "
        "CCLIS's symmetric contrast with prototypes, and Co2L's asymmetric one of instances.",
        (
            Variant("asymmetric supervised contrast (Co2L)", "co2l", {"distill_weight": 0.0}),
            Variant("symmetric prototype NCE (CCLIS)", settings=NEITHER),
        ),
        (200, 500),
        (CIFAR10, CIFAR100),
    ),
    "lambda": Study(
        "Figure 2",
        "Accuracy against λ, the weight of the distillation. The paper prints no numbers in this "
        "figure: its two points are those of Table 3, without distillation and with λ = 0.6.",
        tuple(
            Variant(f"λ = {weight:g}", settings={"distill_weight": weight})
            for weight in (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)
        ),
        axis="distill_weight",
    ),
    "tsne": Study(
        "Figure 3",
        "Where the samples that the memory keeps lie among test samples, flattened by t-SNE, in "
        "the first run of each: Co2L chooses them at random, CCLIS by its proposal. The paper says "
        "that it finds those of CCLIS at the edges of the clusters.",
        (Variant("Co2L", "co2l"), Variant("CCLIS")),
        maps=True,
    ),
}


@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are.

    Attributes:
        about: In words.
        seeds: Unless others are asked for.
        benchmark: Where, unless asked for; None takes the study's own.
        first_epochs: Of the first task at most, where a recipe says how many.
        epochs: Of the tasks at most.
        classifier_epochs: The same for methods trained by cross-entropy.
        settings: What else is other than in the recipes, where a method has it.
    """

    about: str
    seeds: tuple[int, ...]
    benchmark: str | None = None
    first_epochs: int = sys.maxsize
    epochs: int = sys.maxsize
    classifier_epochs: int = sys.maxsize
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, config: Config) -> Config:
        """These settings at this scale."""
        most = self.classifier_epochs if isinstance(config, ClassifierConfig) else self.epochs
        changed = {name: v for name, v in self.settings.items() if hasattr(config, name)}
        changed["epochs"] = min(config.epochs, most)
        if config.first_epochs is not None:
            changed["first_epochs"] = min(config.first_epochs, self.first_epochs)
        return dataclasses.replace(config, **changed)


SCALES: dict[str, Scale] = {
    "paper": Scale("The recipes as they are.", (0, 1, 2)),
    "short": Scale(
        "The recipes with fewer epochs: 50 of the first task and 20 of the others at most, 10 for "
        "methods trained by cross-entropy, 20 for probes. The paper's numbers beside it took up "
        "to 500, 100, 100 and 100.",
        (0, 1, 2),
        first_epochs=50,
        epochs=20,
        classifier_epochs=10,
        settings={"probe_epochs": 20},
    ),
    "smoke": Scale(
        "One epoch of a tiny network on 10 images of a class: this shows that everything runs, "
        "and nothing about the methods.",
        (0,),
        benchmark="split-digits",
        first_epochs=1,
        epochs=1,
        classifier_epochs=1,
        settings={
            **{"limit": 10, "width": 4, "batch_size": 32},
            **{"probe_epochs": 1, "mean_passes": 1, "score_passes": 1},
        },
    ),
}
