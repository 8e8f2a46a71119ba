"""`cclis benchmarks`: list benchmarks, methods and recipes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cclis.cli.parser import Parser
from cclis.progress import Screen
from cclis.settings import recipe_names


def run(arguments: Sequence[str]) -> None:
    """Show what there is to learn, how, and with which recipes."""
    Parser(prog="cclis benchmarks", description="List benchmarks and methods.").parse_args(
        list(arguments)
    )

    from rich.table import Table

    from cclis.data.benchmarks import BENCHMARKS
    from cclis.methods import available

    table = Table("benchmark", "tasks", "what it is", title_justify="left")
    for name, spec in BENCHMARKS.items():
        sizes = f"{len(spec.sizes)} × {spec.sizes[0]} classes" if spec.sizes else "--tasks"
        table.add_row(name, sizes, spec.about)
    memories: dict[tuple[str, str], list[str]] = defaultdict(list)
    for recipe in recipe_names():
        benchmark, _, row = recipe.rpartition("/")
        method, _, memory = row.rpartition("-")
        memories[method, benchmark].append(memory)
    tuned = [name for name in BENCHMARKS if any(b == name for _, b in memories)]
    recipes = Table("method", *tuned, title="Recipes, by memory", title_justify="left")
    for method in available():
        recipes.add_row(method, *(", ".join(memories[method, name]) or "–" for name in tuned))
    out = Screen()
    out.print(table)
    out.print(recipes)
    out.print("A recipe is named BENCHMARK/METHOD-MEMORY, such as seq-cifar10/cclis-200.")
