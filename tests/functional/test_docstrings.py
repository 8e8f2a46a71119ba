"""Every exported function shows its use, and what it shows is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from cclis import functional

MODULES = [module.name for module in pkgutil.iter_modules(functional.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"cclis.functional.{name}")).failed == 0


@pytest.mark.parametrize("name", functional.__all__)
def test_every_exported_function_has_an_example(name: str) -> None:
    assert ">>>" in getattr(functional, name).__doc__


def test_no_module_is_named_like_an_exported_function() -> None:
    assert not set(MODULES) & set(functional.__all__)
