"""The shape of the package: imports point one way, the command starts fast, methods stay small."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cclis
from cclis.methods.registry import OURS, get
from tools.house import drawing, imports

SOURCE = Path(cclis.__file__).parent
LAYERS = (
    {"errors"},
    {"files", "progress"},
    {"settings"},
    {"functional"},
    {"data"},
    {"nn"},
    {"memory"},
    {"methods"},
    {"engine"},
    {"evaluation"},
    {"runs"},
    {"report"},
    {"experiment"},
    {"learner"},
    {"study", "tune"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    for room, others in imports().items():
        for other in others:
            assert LEVEL[other] < LEVEL[room], f"{room} must not import {other}"


def test_every_module_has_a_layer() -> None:
    assert {layer(path) for path in modules()} == set(LEVEL)


def test_the_top_level_holds_the_rooms_and_little_else() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    assert modules == {"__init__", "__main__", "learner", "memory", "errors", "files", "progress"}


def test_no_file_is_long() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 450, path


def test_the_picture_of_the_house_is_that_of_the_imports() -> None:
    root = SOURCE.parents[1]
    assert (root / "docs" / "house.svg").read_text() == drawing(imports())


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from cclis.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "choose settings on a validation split" in done.stdout


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "methods").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_a_method_never_sees_an_optimizer_a_device_or_a_file(path: Path) -> None:
    text = path.read_text()
    for word in ("torch.optim", ".to(", ".cuda", "open(", "Path"):
        assert word not in text, f"{path.name} mentions {word}"


def test_a_method_fits_one_screen() -> None:
    for name in OURS:
        lines = inspect.getsource(get(name)).splitlines()
        assert len(lines) <= 90, name


def test_nothing_unpickles_but_the_restricted_reader_of_cifar() -> None:
    for path in modules():
        text = path.read_text()
        assert "torch.load" not in text, path
        assert "import pickle" not in text or path.stem == "cifar_pickle", path
