"""Every setting of a run, as frozen dataclasses; the command line and the YAML come from them.

The groups below are mixed into one flat `Config`, so that a person writes `--epochs 20`, while a
function that needs only the network's settings asks for `NetworkOptions`. Each method has its own
`Config` with its own fields and defaults, listed in `CONFIGS`. No torch here: `--help` is fast.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from cclis.errors import InputError, unknown

Precision = Literal["auto", "bf16", "tf32", "fp32"]
Encoder = Literal["auto", "conv", "resnet18", "resnet34", "resnet50"]
Crop = Literal["resized", "padded", "none"]
Selection = Literal["proposal", "random"]
Placement = Literal["auto", "device", "host"]
Schedule = Literal["cosine", "constant"]
Sampler = Literal["grid", "tpe"]


class Options:
    """A group of settings that checks itself."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            _check(name, getattr(self, name), hint)


@dataclass(frozen=True)
class StreamOptions(Options):
    """The stream of tasks."""

    benchmark: str = "split-digits"
    """What to learn; `cclis benchmarks` lists the names."""
    data: str | None = None
    """Folder of the datasets, or the folder or file of your own data [default: a cache folder]."""
    tasks: int | list[int] | None = None
    """Number of tasks, or how many classes each has [default: as the benchmark is defined]."""
    class_order: int | None = None
    """Seed that permutes the order in which classes arrive [default: the dataset's order]."""
    image_size: int | None = None
    """Side that images of an image folder are resized to [default: as they are]."""
    skip_corrupt: bool = False
    """Leave out images of an image folder that cannot be read, instead of stopping."""
    limit: int | None = None
    """Samples of each class to use, of the training and of the test split [default: all]."""
    validation: float | None = None
    """Share of each class's training samples, drawn by the seed, that is kept from training and
    tested on; the test split is not touched [default: test on the test split]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.tasks, list) and (not self.tasks or min(self.tasks) < 1):
            raise InputError(f"tasks must hold at least one class each, not {self.tasks}")


@dataclass(frozen=True)
class RunOptions(Options):
    """The run itself."""

    method: str = "cclis"
    """How to learn it, such as er; `cclis benchmarks` lists the names."""
    memory: int = 200
    """How many samples of past tasks may be kept."""
    seed: int = 0
    """Seed of everything random."""
    output: str | None = None
    """Run folder, new or empty [default: a new one under runs/]."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda."""
    threads: int | None = None
    """CPU threads of this process [default: torch's choice]."""
    precision: Precision = "auto"
    """Arithmetic of the network; auto is bf16 on a GPU, fp32 elsewhere. Losses are in 32 bits."""
    compile: bool | None = None
    """Compile the training step, on a GPU into a CUDA graph [default: on a GPU]."""
    deterministic: bool = False
    """Kernels that give the same bits every time, where a GPU has faster ones that do not."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; one is also written after every task and on a signal."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, into the run folder."""
    start_from: str | None = None
    """A run whose first task to take over; settings that matter to it must be the same."""
    map_samples: int = 1000
    """Test samples on the map of the report; 0 draws none."""
    images: Placement = "auto"
    """Where a task's images lie: on the GPU, or on the host, from where batches are fetched ahead;
    auto takes the host where they would fill half of the GPU's free memory."""


@dataclass(frozen=True)
class TuneOptions(Options):
    """What `cclis tune` tries."""

    sampler: Sampler = "grid"
    """Try every point of the grid, or what Optuna's TPE suggests, pruned where it lags behind."""
    trials: int | None = None
    """Points to try in all, over all workers [default: the whole grid; 50 with tpe]."""
    seeds: int = 5
    """Runs of each point, with seeds from --seed on, that its accuracy is averaged over."""
    grid: str | None = None
    """YAML file of what to try, such as `learning_rate: [0.1, 1.0]`; with tpe also ranges, such as
    `learning_rate: {low: 0.01, high: 1.0, log: true}` [default: one for the method, the paper's for
    cclis, without the settings given as flags]."""
    storage: str | None = None
    """Database URL of the study [default: SQLite, study.db in the output folder]. Workers share the
    output folder too: there they see which points are taken, and by whom."""


@dataclass(frozen=True)
class NetworkOptions(Options):
    """The network."""

    encoder: Encoder = "auto"
    """Encoder; auto takes conv for grey images up to 28 pixels, resnet18 otherwise."""
    width: int = 64
    """Channels of the encoder's first stage."""


@dataclass(frozen=True)
class AugmentationOptions(Options):
    """What happens to every training image, drawn anew each time."""

    crop: Crop = "resized"
    """Random resized crop, random shift with zero padding, or none."""
    crop_scale: float = 0.2
    """Smallest share of the image's area that a resized crop keeps."""
    padding: int = 4
    """Largest shift of a padded crop, in pixels."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter: float = 0.8
    """Probability of changing brightness, contrast, saturation and hue."""
    jitter_strength: float = 1.0
    """How far the jitter may go: at 1, factors of 0.6 to 1.4 and a tenth of the colour circle."""
    grayscale: float = 0.2
    """Probability of turning grey."""
    blur: float = 0.0
    """Probability of a Gaussian blur."""


@dataclass(frozen=True)
class TrainingOptions(Options):
    """The training loop."""

    epochs: int = 50
    """Epochs of every task."""
    first_epochs: int | None = None
    """Epochs of the first task [default: as the others]."""
    batch_size: int = 64
    """Samples of a batch, replayed ones included unless a method replays beside the batch."""
    learning_rate: float = 0.1
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    warmup_epochs: int = 10
    """Epochs of linear warm-up at the start of each task; a fifth of the epochs at most."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: down to a thousandth along a cosine, or constant."""


@dataclass(frozen=True)
class EmbeddingOptions(Options):
    """Methods that learn from embeddings."""

    embedding: int = 128
    """Dimensions of the unit-norm embedding."""


@dataclass(frozen=True)
class MixOptions(Options):
    """Methods that mix what the memory holds with the task."""

    replay_share: float | None = None
    """Share of replayed samples in a batch [default: in proportion, memory to task]."""


@dataclass(frozen=True)
class ProbeOptions(Options):
    """The linear probe that accuracy is measured by after every task."""

    probe_epochs: int = 100
    """Epochs of the linear probe."""
    probe_learning_rate: float = 0.01
    """Learning rate of the linear probe, times 0.2 after 60, 75 and 90 % of its epochs."""
    probe_batch_size: int = 256
    """Batch size of the linear probe."""
    paper_probe_learning_rate: float | None = None
    """Learning rate of a second probe, the head linear_paper [default: no such probe]."""


@dataclass(frozen=True)
class MeansOptions(Options):
    """The class means that accuracy is measured by after every task."""

    mean_passes: int = 10
    """Augmented passes over the visible samples from which class means are taken."""


@dataclass(frozen=True)
class EvaluationOptions(ProbeOptions, MeansOptions):
    """All settings of classifiers that are fitted after every task."""


@dataclass(frozen=True)
class Config(
    TrainingOptions,
    AugmentationOptions,
    NetworkOptions,
    RunOptions,
    StreamOptions,
):
    """All settings that every method has."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ready for YAML or JSON."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def after_first_task(self) -> set[str]:
        """Settings that change nothing before the first task has been trained."""
        names = {"memory"}
        for kind in (MixOptions, EvaluationOptions):
            names |= names_of(kind)
        if isinstance(self, StreamReplayOptions):
            names.remove("memory")  # which is filled and replayed from the first step on
        return names | {"epochs"} if self.first_epochs else names


@dataclass(frozen=True)
class CCLISOptions(Options):
    """The method cclis."""

    temperature: float = 0.5
    """τ of the contrastive loss and of the proposal."""
    distill_weight: float = 0.6
    """λ: weight of the distillation."""
    teacher_temperature: float = 0.1
    """κ_past of the distillation."""
    student_temperature: float = 0.2
    """κ_cur of the distillation."""
    prototype_learning_rate: float = 0.01
    """Learning rate of the prototypes."""
    score_passes: int = 5
    """Augmented passes over which a sample's score is averaged."""
    importance_sampling: bool = True
    """Weigh samples that the proposal selected by it (Eq. 10); false weighs all alike."""
    selection: Selection = "proposal"
    """Odds of being kept: the proposal (Eq. 12), or equal, and then none is weighted."""
    distillation: bool = True
    """Distil the previous model's prototype-instance relations (Eq. 14)."""


@dataclass(frozen=True)
class CCLISConfig(CCLISOptions, EmbeddingOptions, MixOptions, EvaluationOptions, Config):
    """Settings of `cclis`."""

    def after_first_task(self) -> set[str]:
        """Settings that change nothing before the first task has been trained."""
        first = {"temperature", "prototype_learning_rate"}
        own = names_of(CCLISOptions)
        return super().after_first_task() | (own - first)


@dataclass(frozen=True)
class Co2LOptions(Options):
    """The method co2l."""

    temperature: float = 0.5
    """τ of the contrastive loss."""
    distill_weight: float = 1.0
    """λ: weight of the distillation."""
    teacher_temperature: float = 0.01
    """κ* of the distillation."""
    student_temperature: float = 0.2
    """κ of the distillation."""


@dataclass(frozen=True)
class Co2LConfig(Co2LOptions, EmbeddingOptions, MixOptions, EvaluationOptions, Config):
    """Settings of `co2l`."""

    method: str = "co2l"


@dataclass(frozen=True)
class StreamReplayOptions(Options):
    """Methods that replay beside every batch of the task."""

    replay_batch_size: int = 32
    """Samples replayed beside every batch of the task."""


@dataclass(frozen=True)
class ClassifierConfig(Config):
    """What methods with a classifier, trained by cross-entropy, have in common."""

    epochs: int = 50
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    warmup_epochs: int = 0
    schedule: Schedule = "constant"
    crop: Crop = "padded"
    jitter: float = 0.0
    grayscale: float = 0.0


@dataclass(frozen=True)
class ERConfig(StreamReplayOptions, ClassifierConfig):
    """Settings of `er`."""

    method: str = "er"


@dataclass(frozen=True)
class ICaRLConfig(MixOptions, MeansOptions, ClassifierConfig):
    """Settings of `icarl`."""

    method: str = "icarl"
    weight_decay: float = 1e-5


@dataclass(frozen=True)
class GEMOptions(Options):
    """The method gem."""

    memory_strength: float = 0.5
    """γ: how far a step leans towards every past task."""
    gradient_ridge: float = 0.0
    """Added to the product of a past task's gradient with itself; 0.001 in the authors' code."""
    expected_classes: int | None = None
    """For how many classes the memory has room from the start; none fills it with those so far."""


@dataclass(frozen=True)
class GEMConfig(GEMOptions, ClassifierConfig):
    """Settings of `gem`."""

    method: str = "gem"
    learning_rate: float = 0.03


@dataclass(frozen=True)
class DEROptions(Options):
    """The methods der, derpp and gcr."""

    logit_weight: float = 0.3
    """α: weight of the distance from stored logits."""


@dataclass(frozen=True)
class DERConfig(DEROptions, StreamReplayOptions, ClassifierConfig):
    """Settings of `der`."""

    method: str = "der"
    learning_rate: float = 0.03


@dataclass(frozen=True)
class GSSConfig(StreamReplayOptions, ClassifierConfig):
    """Settings of `gss`."""

    method: str = "gss"
    learning_rate: float = 0.03


@dataclass(frozen=True)
class DERPPOptions(Options):
    """The methods derpp and gcr."""

    label_weight: float = 0.5
    """β: weight of the cross-entropy of replayed labels."""


@dataclass(frozen=True)
class DERPPConfig(DERPPOptions, DERConfig):
    """Settings of `derpp`."""

    method: str = "derpp"
    logit_weight: float = 0.1


@dataclass(frozen=True)
class GCROptions(Options):
    """The method gcr."""

    candidates: int | None = None
    """Samples of a task, at random, that its coreset is chosen from; they are held, and replayed,
    beside the memory until the task ends. The more there are, the more a coreset weighs [default:
    as many as the memory holds]."""
    weight_ridge: float = 0.5
    """Price of large weights in the coreset."""


@dataclass(frozen=True)
class GCRConfig(GCROptions, DERPPConfig):
    """Settings of `gcr`."""

    method: str = "gcr"


@dataclass(frozen=True)
class FinetuneConfig(EvaluationOptions, ClassifierConfig):
    """Settings of `finetune`: cross-entropy on one task after another, nothing kept."""

    method: str = "finetune"
    memory: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_memory(self)


@dataclass(frozen=True)
class JointConfig(ClassifierConfig):
    """Settings of `joint`: all tasks at once."""

    method: str = "joint"
    memory: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_memory(self)


def _refuse_memory(config: Config) -> None:
    if config.memory:
        raise InputError(f"{config.method} keeps no samples: memory must be 0, not {config.memory}")


NUMBERS = {int: numbers.Integral, float: numbers.Real}
"""What counts as a number, numpy's included."""

CONFIGS: dict[str, type[Config]] = {
    "cclis": CCLISConfig,
    "co2l": Co2LConfig,
    "er": ERConfig,
    "icarl": ICaRLConfig,
    "der": DERConfig,
    "derpp": DERPPConfig,
    "gcr": GCRConfig,
    "gem": GEMConfig,
    "gss": GSSConfig,
    "finetune": FinetuneConfig,
    "joint": JointConfig,
}

_AT_LEAST_ONE = {
    "epochs", "first_epochs", "width", "embedding", "image_size", "tasks",
    "limit", "threads", "replay_batch_size", "candidates", "trials", "seeds",
    "probe_epochs", "probe_batch_size", "mean_passes", "score_passes", "expected_classes",
}  # fmt: skip
_NOT_NEGATIVE = {
    "memory", "seed", "padding", "momentum", "weight_decay", "warmup_epochs", "distill_weight",
    "class_order", "checkpoint_minutes", "logit_weight", "label_weight",
    "memory_strength", "gradient_ridge", "weight_ridge", "map_samples",
}  # fmt: skip
_POSITIVE = {
    "learning_rate", "probe_learning_rate", "paper_probe_learning_rate", "prototype_learning_rate",
    "temperature", "teacher_temperature", "student_temperature", "crop_scale",
}  # fmt: skip
_SHARE = {"flip", "jitter", "grayscale", "blur", "crop_scale", "replay_share"}
_LONGEST_YAML = 1 << 16
_DEEPEST_YAML = 100
_LARGEST = {"threads": 4096}
_STRONGEST_JITTER = 2.5  # beyond it a factor could turn negative and invert the image


def _check(name: str, value: Any, hint: Any) -> None:
    if not any(_fits(value, kind) for kind in (get_args(hint) if _is_union(hint) else (hint,))):
        if get_origin(hint) is Literal:
            raise unknown(name, str(value), get_args(hint))
        raise InputError(f"{name} must be {_in_words(hint)}, not {value!r}")
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return
    if isinstance(value, numbers.Integral) and abs(int(value)) > _LARGEST.get(name, 2**63 - 1):
        raise InputError(f"{name} must be at most {_LARGEST.get(name, 2**63 - 1)}")
    number = float(value)
    for names, holds, rule in (
        (_AT_LEAST_ONE, number >= 1, "at least 1"),
        (_NOT_NEGATIVE, number >= 0, "0 or more"),
        (_POSITIVE, number > 0, "greater than 0"),
        (_SHARE, 0 <= number <= 1, "between 0 and 1"),
        ({"validation"}, 0 < number < 1, "more than 0 and less than 1"),
        ({"batch_size"}, number >= 2, "at least 2, for batch normalisation"),
        ({"jitter_strength"}, 0 <= number <= _STRONGEST_JITTER, "between 0 and 2.5"),
    ):
        if name in names and not (math.isfinite(number) and holds):
            raise InputError(f"{name} must be {rule}, not {value}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, NUMBERS.get(kind, kind))


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's own."""
    return value.item() if hasattr(value, "item") else value


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType)


def _in_words(hint: Any) -> str:
    kinds = get_args(hint) if _is_union(hint) else (hint,)
    return " or ".join("None" if k is type(None) else getattr(k, "__name__", str(k)) for k in kinds)


def config_class(method: str) -> type[Config]:
    """The settings of a method."""
    if method not in CONFIGS:
        raise unknown("method", method, CONFIGS)
    return CONFIGS[method]


def names_of(kind: type[Any]) -> set[str]:
    """The settings that a group of them or a config has."""
    return {field.name for field in dataclasses.fields(kind)}


def methods_with(setting: str) -> list[str]:
    """The methods that have a setting of that name."""
    return [method for method, kind in CONFIGS.items() if setting in names_of(kind)]


def setting_of(methods: Sequence[str]) -> str:
    """Whose setting it is, in words."""
    *others, last = methods
    return f"a setting of {', '.join(others)}{' and ' if others else ''}{last} alone"


def make_config(method: str, settings: dict[str, Any]) -> Config:
    """The config of a method with these settings; an unknown one is refused by name."""
    kind = config_class(method)
    names = names_of(kind)
    for name in settings:
        if name not in names and (others := methods_with(name)):
            raise InputError(f"{name} is {setting_of(others)}, not of {method}")
        if name not in names:
            raise unknown(f"setting of {method}", name, names)
    return kind(**{**settings, "method": method})


def keeps_samples(method: str) -> bool:
    """Whether a method has a memory."""
    return CONFIGS[method].memory > 0


def recipes() -> list[str]:
    """Names of the recipes that ship with the package, such as seq-cifar10/cclis-200."""
    root = _recipe_root()
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe that ships with the package."""
    if name not in recipes():
        raise unknown("recipe", name, recipes())
    return _recipe_root() / f"{name}.yaml"


def recipe_for(benchmark: str, method: str, memory: int | None) -> str | None:
    """The recipe for this row of the paper, or the one tuned for the nearest memory."""
    sizes = {
        int(name.rsplit("-", 1)[1]): name
        for name in recipes()
        if name.rsplit("-", 1)[0] == f"{benchmark}/{method}"
    }
    if not sizes:
        return None
    return sizes[min(sizes, key=lambda size: (abs(size - memory), size) if memory else (size, 0))]


class _SettingsLoader(yaml.SafeLoader):
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
_SettingsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def recipe_settings(benchmark: str, method: str, memory: int | None) -> dict[str, Any]:
    """What `recipe_for` says by name; nothing where there is no recipe."""
    recipe = recipe_for(benchmark, method, memory)
    return {} if recipe is None else read_yaml(recipe_path(recipe))


def _refuse_endless(text: str) -> None:
    """Refuse YAML that is short and takes for ever."""
    depth = 0
    for event in yaml.parse(text):
        # References let a few lines unfold into gigabytes.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("settings do not refer to each other by *name")
        # What lies n brackets deep takes n² steps.
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            raise ValueError("settings do not lie so deep in one another")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds settings by name."""
    try:
        if path.stat().st_size > _LONGEST_YAML:
            raise InputError(f"cannot read {path}: it is too long for a file of settings")
        text = path.read_text(encoding="utf-8")
        _refuse_endless(text)
        loaded = yaml.load(text, Loader=_SettingsLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from None
    except (AttributeError, LookupError, OverflowError):
        # PyYAML looks at what claims to be a number or a date only by what it fails at.
        raise InputError(f"cannot read {path}: a value is not what it claims to be") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} must hold settings as 'name: value' lines")
    return loaded


def _recipe_root() -> Path:
    return Path(str(resources.files("cclis.settings"))) / "recipes"
