"""Settings: their groups, bounds and roles, YAML files and recipes."""

from cclis.settings.commands import StudyOptions, TuneOptions
from cclis.settings.compare import not_learned, refuse_differences
from cclis.settings.fields import (
    Info,
    Options,
    check_value,
    info_of,
    names_of,
    own_names,
    setting,
    types_of,
)
from cclis.settings.groups import (
    AugmentationOptions,
    ClassifierConfig,
    Config,
    EmbeddingOptions,
    EvaluationOptions,
    MeansOptions,
    MixOptions,
    NetworkOptions,
    NoMemoryConfig,
    ProbeOptions,
    RunOptions,
    StreamOptions,
    StreamReplayOptions,
    TrainingOptions,
)
from cclis.settings.merge import merge
from cclis.settings.recipes import recipe_for, recipe_names, recipe_settings
from cclis.settings.yaml_files import read_yaml, read_yaml_lines

__all__ = [
    "AugmentationOptions",
    "ClassifierConfig",
    "Config",
    "EmbeddingOptions",
    "EvaluationOptions",
    "Info",
    "MeansOptions",
    "MixOptions",
    "NetworkOptions",
    "NoMemoryConfig",
    "Options",
    "ProbeOptions",
    "RunOptions",
    "StreamOptions",
    "StreamReplayOptions",
    "StudyOptions",
    "TrainingOptions",
    "TuneOptions",
    "check_value",
    "info_of",
    "merge",
    "names_of",
    "not_learned",
    "own_names",
    "read_yaml",
    "read_yaml_lines",
    "recipe_for",
    "recipe_names",
    "recipe_settings",
    "refuse_differences",
    "setting",
    "types_of",
]
