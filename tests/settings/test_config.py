from __future__ import annotations

import dataclasses

import pytest

from cclis.data.benchmarks import BENCHMARKS
from cclis.errors import InputError
from cclis.methods import get, keeps_samples, make_config
from cclis.methods.finetune import FinetuneConfig
from cclis.settings import (
    ClassifierConfig,
    Config,
    info_of,
    names_of,
    read_yaml,
    recipe_for,
    recipe_names,
    recipe_settings,
)
from tests.conftest import CONFIGS, QUICK

PAPER = {
    "batch_size": 512,
    "learning_rate": 1.0,
    "prototype_learning_rate": 0.01,
    "temperature": 0.5,
    "teacher_temperature": 0.1,
    "student_temperature": 0.2,
    "distill_weight": 0.6,
    "first_epochs": 500,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "encoder": "resnet18",
}


@pytest.mark.parametrize("memory", [200, 500])
@pytest.mark.parametrize(
    ("benchmark", "epochs", "scale", "blur"),
    [
        ("seq-cifar10", 100, 0.2, 0.0),
        ("seq-cifar100", 100, 0.2, 0.0),
        ("seq-tinyimagenet", 50, 0.1, 0.5),
    ],
)
def test_recipes_hold_the_papers_settings(
    benchmark: str, epochs: int, scale: float, blur: float, memory: int
) -> None:
    settings = recipe_settings(f"{benchmark}/cclis-{memory}")
    config = make_config(settings.pop("method"), settings)
    assert (config.benchmark, config.memory, config.epochs) == (benchmark, memory, epochs)
    assert (config.crop_scale, config.blur) == (scale, blur)
    assert {name: getattr(config, name) for name in PAPER} == PAPER


def test_every_recipe_is_a_config() -> None:
    assert len(recipe_names()) >= 7
    for name in recipe_names():
        settings = recipe_settings(name)
        config = make_config(settings.pop("method"), settings)
        assert name == f"{config.benchmark}/{config.method}-{config.memory}"


COMPARED = ("cclis", "co2l", "er", "icarl", "der", "derpp", "gcr", "gem", "gss")


def test_there_is_a_recipe_for_every_row_of_the_paper() -> None:
    for benchmark in ("seq-cifar10", "seq-cifar100", "seq-tinyimagenet"):
        for method in (*COMPARED, "finetune", "joint"):
            for memory in (200, 500) if keeps_samples(method) else (0,):
                settings = recipe_settings(f"{benchmark}/{method}-{memory}")
                config = make_config(settings.pop("method"), settings)
                assert config.encoder == "resnet18"
                if isinstance(config, ClassifierConfig):
                    assert config.epochs == (100 if benchmark == "seq-tinyimagenet" else 50)


def test_recipes_expect_the_classes_that_come() -> None:
    every = [recipe_settings(name) for name in recipe_names()]
    expecting = [settings for settings in every if "expected_classes" in settings]
    assert len(expecting) == 2
    for settings in expecting:
        assert settings["expected_classes"] == sum(BENCHMARKS[settings["benchmark"]].sizes or ())


def test_the_recipe_for_a_row_is_the_nearest_in_memory() -> None:
    assert recipe_for("seq-cifar10", "cclis", 500) == "seq-cifar10/cclis-500"
    assert recipe_for("seq-cifar10", "cclis", 300) == "seq-cifar10/cclis-200"
    assert recipe_for("seq-cifar10", "cclis", 5000) == "seq-cifar10/cclis-500"
    assert recipe_for("seq-cifar10", "cclis", None) == "seq-cifar10/cclis-200"
    assert recipe_for("npz", "cclis", 200) is None


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"memory": -1}, "memory must be 0 or more, not -1"),
        ({"seed": -3}, "seed must be 0 or more"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"learning_rate": 0.0}, "learning_rate must be greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be greater than 0"),
        ({"temperature": float("inf")}, "temperature must be greater than 0"),
        ({"replay_share": 1.5}, "replay_share must be between 0 and 1"),
        ({"tasks": []}, "tasks must hold"),
        ({"tasks": [2, 0]}, "tasks must be at least 1"),
        ({"encoder": "resnet81"}, "Did you mean 'resnet18'"),
        ({"precision": "64"}, "unknown precision"),
        ({"epohcs": 3}, "Did you mean epochs"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        make_config("cclis", settings)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'cclis'"):
        get("ccliss")


def test_finetune_has_no_memory() -> None:
    assert FinetuneConfig().memory == 0
    with pytest.raises(InputError, match="memory must be 0, not 10: this method keeps no samples"):
        make_config("finetune", {"memory": 10})


def test_a_config_is_frozen_and_round_trips() -> None:
    config = make_config("cclis", QUICK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]
    settings = config.to_dict()
    assert make_config(settings.pop("method"), settings) == config


@pytest.mark.parametrize("kind", CONFIGS.values())
def test_every_setting_is_documented(kind: type[Config]) -> None:
    for name in names_of(kind):
        doc = info_of(kind, name).doc
        assert len(doc) > 5, name
        assert doc[0] in doc[0].upper() + "0κτλαβγ", name


def test_every_method_has_settings_of_its_own_name() -> None:
    for name, kind in CONFIGS.items():
        config = make_config(name, {})
        assert type(config) is kind
        assert config.method == name


def test_a_setting_of_another_method_says_whose_it_is() -> None:
    with pytest.raises(InputError, match="memory_strength is a setting of gem alone, not of er"):
        make_config("er", {"memory_strength": 1.0})
    with pytest.raises(InputError, match="a setting of er, der, derpp, gcr and gss alone, not of"):
        make_config("gem", {"replay_batch_size": 3})
    with pytest.raises(InputError, match=r"er has no setting 'memroy'. Did you mean memory"):
        make_config("er", {"memroy": 1})


def test_numbers_may_be_written_as_people_write_them(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("numbers: [1e-3, 1E2, -2e+1, 1.5e3, 2., 0.1]\nwords: [1e, e3, 1e3x, '1e3']\n")
    assert read_yaml(path) == {
        "numbers": [0.001, 100, -20, 1500, 2, 0.1],
        "words": ["1e", "e3", "1e3x", "1e3"],
    }


@pytest.mark.parametrize("content", ["- 1\n", "a: [1\n", "just text\n"])
def test_a_yaml_file_without_settings_is_refused(tmp_path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=r"bad\.yaml"):
        read_yaml(path)


def test_settings_that_lie_deep_in_one_another_are_refused(tmp_path) -> None:
    path = tmp_path / "deep.yaml"
    # The first level is the file's own; what lies side by side does not add up.
    for content in ("[" * 99 + "]" * 99, "[" + "[], " * 200 + "]", "{a: " * 99 + "1" + "}" * 99):
        path.write_text(f"a: {content}")
        assert list(read_yaml(path)) == ["a"]
    # Not closed: refused for its depth, before the end is seen.
    for content in ("[" * 100, "{a: " * 100, "[" * 20_000):
        path.write_text(f"a: {content}")
        with pytest.raises(InputError, match=r"deep\.yaml: more than 100 levels"):
            read_yaml(path)


@pytest.mark.parametrize(
    "value",
    ["!!bool foo", '!!int ""', '!!float ""', "!!timestamp foo", "1" + ":1" * 300 + ".0"],
)
def test_a_value_that_is_not_what_it_claims_to_be_is_refused(tmp_path, value: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"epochs: {value}\n")
    with pytest.raises(InputError, match=r"bad\.yaml: a value is not what it claims to be"):
        read_yaml(path)


def test_a_file_too_long_for_settings_is_refused(tmp_path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("epochs: 1\n" + "#" * 65_526)
    assert read_yaml(path) == {"epochs": 1}
    path.write_text("epochs: 1\n" + "#" * 65_527)
    with pytest.raises(InputError, match=r"long\.yaml: it is too long"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("epochs: 1\nseed: 2\nepochs: 3\n", r"'epochs' is given twice(.|\n)*line 3"),
        ("learning_rate: {low: 1, low: 2}\n", "'low' is given twice"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused(tmp_path, content: str, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"bad\.yaml: {part}"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"epochs": 1.5}, "epochs must be int, not 1.5"),
        ({"epochs": "3"}, "epochs must be int, not '3'"),
        ({"epochs": True}, "epochs must be int, not True"),
        ({"first_epochs": "x"}, "first_epochs must be int or None"),
        ({"tasks": [2, 2.5]}, "tasks must be int or list"),
        ({"distillation": 1}, "distillation must be bool, not 1"),
        ({"benchmark": 3}, "benchmark must be str, not 3"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        make_config("cclis", settings)


def test_a_whole_number_is_a_fine_learning_rate() -> None:
    assert make_config("cclis", {"learning_rate": 1}).learning_rate == 1


@pytest.mark.parametrize("settings", [{"seed": 10**400}, {"batch_size": 2**64}, {"epochs": 2**70}])
def test_numbers_beyond_all_use_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match="must be at most"):
        make_config("cclis", settings)
