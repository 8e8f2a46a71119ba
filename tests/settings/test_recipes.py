"""Every recipe gives the settings that it gave when it was a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cclis.errors import InputError
from cclis.methods import make_config
from cclis.settings import recipe_for, recipe_names, recipe_settings

BEFORE = json.loads(Path(__file__).with_name("recipes.json").read_text(encoding="utf-8"))


def settings_of(recipe: str) -> dict[str, Any]:
    settings = recipe_settings(recipe)
    return make_config(settings.pop("method"), settings).to_dict()


def test_no_recipe_was_lost() -> None:
    assert len(BEFORE["recipes"]) == 71
    assert BEFORE["recipes"].keys() <= set(recipe_names())


@pytest.mark.parametrize("method", BEFORE["defaults"])
def test_recipes_have_the_settings_that_they_had(method: str) -> None:
    defaults = BEFORE["defaults"][method]
    of_method = [name for name in BEFORE["recipes"] if f"/{method}-" in name]
    assert of_method
    for name in of_method:
        expected, resolved = defaults | BEFORE["recipes"][name], settings_of(name)
        assert {key: resolved[key] for key in expected} == expected, name


@pytest.mark.parametrize("method", BEFORE["defaults"])
def test_each_has_the_name_of_its_row(method: str) -> None:
    for name in recipe_names(method):
        settings = recipe_settings(name)
        assert name == f"{settings['benchmark']}/{settings['method']}-{settings['memory']}"
        assert recipe_for(settings["benchmark"], method, settings["memory"]) == name


@pytest.mark.parametrize("name", ["er-200", "seq-cifar10/er-201", "seq-cifar10/er-x", "x/er-200"])
def test_what_is_no_recipe_is_refused_with_those_near_it(name: str) -> None:
    with pytest.raises(InputError, match=rf"unknown recipe '{name}'. Did you mean .*er-"):
        recipe_settings(name)


@pytest.mark.parametrize("method", ["my_module:ER", "../er", "er.yaml", ""])
def test_a_method_from_outside_has_none(method: str) -> None:
    assert recipe_for("seq-cifar10", method, 200) is None
