"""Recipes that ship with the package: one file a method, keyed by benchmark and memory.

    seq-cifar10:                    the benchmark
      learning_rate: 0.03           settings for every memory
      memory:
        200: {logit_weight: 0.1}    what a memory of 200 has beside them
        500: {logit_weight: 0.2}

A recipe is named after its benchmark, method and memory, such as `seq-cifar10/derpp-200`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from cclis.errors import InputError, did_you_mean
from cclis.settings.yaml_files import read_yaml

FOLDER = Path(str(resources.files("cclis.settings"))) / "recipes"


def recipe_names(method: str | None = None) -> list[str]:
    """The names of all recipes, or of a method's."""
    methods = [method] if method else sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [
        f"{benchmark}/{of}-{memory}"
        for of in methods
        for benchmark, recipe in _recipes(of).items()
        for memory in recipe["memory"]
    ]


def recipe_for(benchmark: str, method: str, memory: int | None) -> str | None:
    """The name of the recipe for a benchmark and a memory, or for the nearest memory to it.

    Without a memory, the smallest; None where the benchmark has no recipe for the method.
    """
    sizes = list(_recipes(method).get(benchmark, {}).get("memory", ()))
    if not sizes:
        return None
    nearest = min(sizes, key=lambda size: (abs(size - memory), size) if memory else (size, 0))
    return f"{benchmark}/{method}-{nearest}"


def recipe_settings(name: str | None) -> dict[str, Any]:
    """The settings of a recipe by name, with its benchmark, method and memory; none for None."""
    if name is None:
        return {}
    benchmark, _, rest = name.rpartition("/")
    method, _, size = rest.rpartition("-")
    recipe = _recipes(method).get(benchmark, {"memory": {}})
    memory = int(size) if size.isdecimal() else -1
    if memory not in recipe["memory"]:
        raise InputError(
            f"unknown recipe '{name}'.{did_you_mean(name, recipe_names())} `cclis benchmarks` "
            "lists them all"
        )
    common = {key: value for key, value in recipe.items() if key != "memory"}
    named = {"benchmark": benchmark, "method": method, "memory": memory}
    return {**named, **common, **(recipe["memory"][memory] or {})}


def recipe_memory(name: str) -> int:
    """The memory that a recipe was made for."""
    memory: int = recipe_settings(name)["memory"]
    return memory


@cache
def _recipes(method: str) -> dict[str, Any]:
    # Only plain names: a method from elsewhere, `module:Class`, has no recipe here.
    path = FOLDER / f"{method}.yaml"
    return read_yaml(path) if method.isalnum() and path.is_file() else {}
