"""The runs of a study, and where each lies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from cclis.errors import InputError
from cclis.methods.registry import keeps_samples, make_config, slug
from cclis.runs.directory import Run
from cclis.runs.records import Result, changed_settings, in_words
from cclis.settings import Config, merge, not_learned, recipe_for, recipe_settings
from cclis.study.catalogue import Scale, Study, Variant


@dataclass(frozen=True)
class Planned:
    """A run of a study.

    Attributes:
        variant: The row it belongs to.
        changed: What it has other than the recipe, but for the scale.
        config: Its settings, with the folder it lies in.
    """

    variant: Variant
    changed: str
    config: Config

    @property
    def path(self) -> Path:
        """Its run directory."""
        return Path(str(self.config.output))

    @property
    def name(self) -> str:
        """What its run directory is called."""
        return self.path.name

    @property
    def log(self) -> Path:
        """Its output while it runs."""
        return self.path.with_name(f"{self.name}.log")

    @cached_property
    def first_task(self) -> str:
        """Every setting that matters to the first task."""
        kind = type(self.config)
        free = not_learned(kind)
        free |= self.config.after_first_task()
        settings = {name: v for name, v in self.config.to_dict().items() if name not in free}
        return json.dumps(settings)

    @property
    def begun(self) -> bool:
        """Whether there is a run to resume."""
        return (self.path / "config.yaml").is_file()

    @property
    def result(self) -> Result:
        """Its result; an InputError if there is none."""
        return Run(self.path).result

    @property
    def finished(self) -> bool:
        """Whether it need not be run again."""
        with suppress(InputError):
            return bool(self.result)
        return False


def plan(
    study: Study,
    *,
    benchmarks: Sequence[str],
    seeds: Sequence[int],
    scale: Scale,
    folder: Path,
    data: str | None = None,
    stream: Mapping[str, Any] | None = None,
    device: str = "auto",
) -> list[Planned]:
    """The runs of a study, row by row; `stream` holds settings that all of them have."""
    runs = []
    for benchmark, memory, variant in product(benchmarks, study.memories, study.rows):
        keeps = keeps_samples(variant.method)
        again = not keeps and memory != study.memories[0]
        if benchmark in variant.not_on or again:
            continue
        full = _full(variant, benchmark, memory if keeps else 0, stream or {})
        changed = in_words(changed_settings(full.to_dict()))
        words = [
            benchmark,
            slug(variant.method),
            str(full.memory),
            *changed.replace(",", "").split(),
        ]
        if data and of_own_data(benchmark):
            words.insert(1, Path(data).stem)
        for seed in seeds:
            path = folder / "runs" / "-".join([*words, f"seed{seed}"])
            config = dataclasses.replace(
                scale.of(full), seed=seed, output=str(path), data=data, device=device
            )
            runs.append(Planned(variant, changed, config))
    return runs


def of_own_data(benchmark: str) -> bool:
    """Whether what a benchmark is lies with its data."""
    from cclis.data.benchmarks import BENCHMARKS

    return BENCHMARKS[benchmark].sizes is None


def _full(variant: Variant, benchmark: str, memory: int, stream: Mapping[str, Any]) -> Config:
    """The settings of a variant as the paper has it."""
    recipe = recipe_for(benchmark, variant.method, memory)
    row = {"benchmark": benchmark, "memory": memory, "recipe": recipe}
    settings = merge(recipe_settings(recipe), row, stream, variant.settings)
    settings.pop("method", None)
    return make_config(variant.method, settings)
