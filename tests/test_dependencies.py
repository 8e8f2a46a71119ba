"""The package imports what pyproject.toml declares, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import cclis

SOURCE = Path(cclis.__file__).parent
DISTRIBUTIONS = packages_distributions()
EXTRAS = ("tune", "tensorboard")
"""Those that the package itself imports; "dev" is for its tests."""


def normalised(requirement: str) -> str:
    """The name of a distribution, without versions and extras, as package indexes compare it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def imported(source: str) -> Iterator[str]:
    """Every module that a file imports, wherever in it; not those of its own package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def distributions(modules: Iterable[str]) -> set[str]:
    """The distributions that modules outside the standard library come from."""
    found = set()
    for module in modules:
        top = module.split(".")[0]
        if module == "torch.utils.tensorboard":  # does nothing but import another package
            found.add("tensorboard")
        elif top != "cclis" and top not in sys.stdlib_module_names:
            found.add(normalised(DISTRIBUTIONS.get(top, [top])[0]))
    return found


def test_imports_equal_declared_dependencies() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["project"]["dependencies"] + [
        requirement
        for extra in EXTRAS
        for requirement in project["project"]["optional-dependencies"][extra]
    ]
    files = sorted(SOURCE.rglob("*.py"))
    found = distributions(name for path in files for name in imported(path.read_text("utf-8")))
    assert found == {normalised(requirement) for requirement in declared}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "def f():\n    import yaml.nodes, os\n    from PIL import Image\nfrom . import x\n"
    assert list(imported(source)) == ["yaml.nodes", "os", "PIL"]
    assert distributions(imported(source)) == {"pyyaml", "pillow"}
    assert distributions(["torch.utils.tensorboard", "cclis.files"]) == {"tensorboard"}
    assert distributions(["not_installed.module"]) == {"not-installed"}
