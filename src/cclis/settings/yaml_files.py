"""YAML files of settings, read strictly and in bounded time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from cclis.errors import InputError
from cclis.files import read_bytes

LONGEST = 1 << 16
"""Bytes of the longest file that is read."""
DEEPEST = 100
"""Levels of brackets: what lies n levels deep takes n² steps to read."""


class _Loader(yaml.SafeLoader):
    """Refuses what is given twice, where YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        mapping = super().construct_mapping(node, deep)
        given = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in given:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key}' is given twice", problem_mark=key_node.start_mark
                )
            given.add(key)
        return mapping


# YAML 1.1 takes 1e-3 for a word, as it has no point, and 1.5e3, as its exponent has no sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds settings by name."""
    return read_yaml_lines(path)[0]


def read_yaml_lines(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The same, and in which line of the file each setting stands, from 1."""
    try:
        text = read_bytes(path, LONGEST).decode()
        _refuse_aliases_and_depth(text)
        loaded = yaml.load(text, Loader=_Loader)
        node = yaml.compose(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from None
    except (AttributeError, LookupError, OverflowError):
        # PyYAML notices only by an error of its own that a value is no number or date.
        raise InputError(f"cannot read {path}: a value is not what it claims to be") from None
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path} must hold settings as 'name: value' lines")
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    return loaded, lines


def _refuse_aliases_and_depth(text: str) -> None:
    """Refuse YAML that is short and takes for ever."""
    depth = 0
    for event in yaml.parse(text):
        # References let a few lines unfold into gigabytes.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("settings do not refer to each other by *name")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels of brackets")
