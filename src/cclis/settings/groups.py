"""The groups of settings that methods share, and the config that joins them.

Groups are mixed into one flat `Config`, so that a person writes `--epochs 20`, while a function
that needs only the network's settings asks for `NetworkOptions`. Every method has its own config,
beside its class in `methods/`. No torch here: `--help` is fast.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from cclis.errors import InputError
from cclis.settings.fields import Options, names_of, plain, setting

Precision = Literal["auto", "bf16", "tf32", "fp32"]
Encoder = Literal["auto", "conv", "resnet18", "resnet34", "resnet50"]
Crop = Literal["resized", "padded", "none"]
Placement = Literal["auto", "device", "host"]
Schedule = Literal["cosine", "constant"]


@dataclass(frozen=True)
class StreamOptions(Options):
    """The stream of tasks."""

    benchmark: str = setting(
        "split-digits",
        "What to learn; `cclis benchmarks` lists the names.",
        kind="row",
        run_only=True,
    )
    data: str | None = setting(
        None,
        "Folder of the datasets, or the folder or file of your own data [default: a cache folder].",
        kind="place",
        resumable=True,
        run_only=True,
    )
    tasks: int | list[int] | None = setting(
        None,
        "Number of tasks, or how many classes each has [default: as the benchmark is defined].",
        minimum=1,
        run_only=True,
    )
    class_order: int | None = setting(
        None,
        "Seed that permutes the order in which classes arrive [default: the dataset's order].",
        minimum=0,
        run_only=True,
    )
    image_size: int | None = setting(
        None,
        "Side that images of an image folder are resized to [default: as they are].",
        minimum=1,
        run_only=True,
    )
    skip_corrupt: bool = setting(
        False,
        "Leave out images of an image folder that cannot be read, instead of stopping.",
        run_only=True,
    )
    limit: int | None = setting(
        None,
        "Samples of each class to use, of the training and of the test split [default: all].",
        minimum=1,
        run_only=True,
        in_recipe=False,
    )
    validation: float | None = setting(
        None,
        "Share of each class's training samples, drawn by the seed, that is kept from training and "
        "tested on; the test split is not touched [default: test on the test split].",
        above=0,
        below=1,
        run_only=True,
        in_recipe=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks == []:
            raise InputError("tasks must hold at least one class each, not []")


@dataclass(frozen=True)
class RunOptions(Options):
    """Method, seed, devices and output."""

    method: str = setting(
        "cclis",
        "Method: a name such as er (`cclis benchmarks` lists them), or a class of your "
        "own, package.module:Class.",
        kind="row",
    )
    memory: int = setting(
        200,
        "Number of samples of past tasks that may be kept.",
        minimum=0,
        kind="row",
        first_task=False,
    )
    seed: int = setting(0, "Random seed.", minimum=0, kind="row", in_recipe=False)
    recipe: str | None = setting(
        None,
        "Recipe that other settings start from, such as seq-cifar10/er-200, or none [default: the "
        "one for the benchmark, the method and the nearest memory; none with --config].",
        kind="record",
        run_only=True,
    )
    output: str | None = setting(
        None,
        "Run folder, new or empty [default: a new one under runs/].",
        kind="place",
        run_only=True,
    )
    device: str = setting(
        "auto", "Where to compute: auto, cpu, cuda.", kind="hardware", resumable=True
    )
    threads: int | None = setting(
        None,
        "CPU threads of this process [default: torch's choice].",
        minimum=1,
        maximum=4096,
        kind="hardware",
    )
    precision: Precision = setting(
        "auto",
        "Arithmetic of the network; auto is bf16 on a GPU, fp32 elsewhere. Losses are in float32.",
    )
    compile: bool | None = setting(
        None,
        "Compile the training step, on a GPU into a CUDA graph [default: on a GPU].",
        kind="hardware",
    )
    deterministic: bool = setting(
        False,
        "Use deterministic kernels on a GPU; they are slower.",
    )
    checkpoint_minutes: float = setting(
        5.0,
        "Minutes between checkpoints; one is also written after every task and on a signal.",
        minimum=0,
        kind="record",
        resumable=True,
        run_only=True,
    )
    tensorboard: bool = setting(
        False,
        "Also write TensorBoard's event files, into the run folder.",
        kind="record",
        resumable=True,
        run_only=True,
    )
    start_from: str | None = setting(
        None,
        "Run folder whose trained first task is reused; settings that affect it must be equal.",
        kind="place",
        run_only=True,
    )
    map_samples: int = setting(
        1000,
        "Test samples in the t-SNE map of the report; 0 draws no map.",
        minimum=0,
        kind="record",
        resumable=True,
    )
    images: Placement = setting(
        "auto",
        "Where a task's images lie: on the GPU, or on the host, from where batches are fetched "
        "ahead; auto takes the host where they would fill half of the GPU's free memory.",
        kind="hardware",
        resumable=True,
    )
    heads: list[str] | None = setting(
        None,
        "Classifiers that are fitted and reported after every task, such as [means, linear]; the "
        "method's own is always among them [default: all of the method's].",
        kind="record",
        first_task=False,
        run_only=True,
    )


@dataclass(frozen=True)
class NetworkOptions(Options):
    """The network."""

    encoder: Encoder = setting(
        "auto", "Encoder; auto takes conv for grey images up to 28 pixels, resnet18 otherwise."
    )
    width: int = setting(64, "Channels of the encoder's first stage.", minimum=1)


@dataclass(frozen=True)
class AugmentationOptions(Options):
    """What happens to every training image, drawn anew each time."""

    crop: Crop = setting("resized", "Random resized crop, random shift with zero padding, or none.")
    crop_scale: float = setting(
        0.2, "Smallest share of the image's area that a resized crop keeps.", above=0, maximum=1
    )
    padding: int = setting(4, "Largest shift of a padded crop, in pixels.", minimum=0)
    flip: float = setting(0.5, "Probability of a horizontal flip.", minimum=0, maximum=1)
    jitter: float = setting(
        0.8,
        "Probability of changing brightness, contrast, saturation and hue.",
        minimum=0,
        maximum=1,
    )
    jitter_strength: float = setting(
        1.0,
        "How far the jitter may go: at 1, factors of 0.6 to 1.4 and a tenth of the colour circle.",
        minimum=0,
        maximum=2.5,  # beyond it a factor could turn negative and invert the image
    )
    grayscale: float = setting(0.2, "Probability of turning grey.", minimum=0, maximum=1)
    blur: float = setting(0.0, "Probability of a Gaussian blur.", minimum=0, maximum=1)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """The training loop."""

    epochs: int = setting(50, "Epochs of every task.", minimum=1)
    first_epochs: int | None = setting(
        None, "Epochs of the first task [default: as the others].", minimum=1
    )
    batch_size: int = setting(
        64,
        "Samples of a batch, replayed ones included unless a method replays beside the batch.",
        minimum=2,
        because="batch normalisation needs them",
    )
    learning_rate: float = setting(0.1, "Learning rate after the warm-up.", above=0, stability=True)
    momentum: float = setting(0.9, "Momentum of SGD.", minimum=0, stability=True)
    weight_decay: float = setting(1e-4, "Weight decay of SGD.", minimum=0, stability=True)
    warmup_epochs: int = setting(
        10,
        "Epochs of linear warm-up at the start of each task; a fifth of the epochs at most.",
        minimum=0,
    )
    schedule: Schedule = setting(
        "cosine",
        "Learning rate after the warm-up: down to a thousandth along a cosine, or constant.",
    )


@dataclass(frozen=True)
class EmbeddingOptions(Options):
    """The embedding."""

    embedding: int = setting(128, "Dimensions of the unit-norm embedding.", minimum=1)


@dataclass(frozen=True)
class MixOptions(Options):
    """Replay mixed into the batch."""

    replay_share: float | None = setting(
        None,
        "Share of replayed samples in a batch [default: in proportion, memory to task].",
        minimum=0,
        maximum=1,
        first_task=False,
    )


@dataclass(frozen=True)
class StreamReplayOptions(Options):
    """Replay beside the batch."""

    replay_batch_size: int = setting(
        32, "Samples replayed beside every batch of the task.", minimum=1
    )


@dataclass(frozen=True)
class ProbeOptions(Options):
    """The linear probe that accuracy is measured by after every task."""

    probe_epochs: int = setting(100, "Epochs of the linear probe.", minimum=1, first_task=False)
    probe_learning_rate: float = setting(
        0.01,
        "Learning rate of the linear probe, times 0.2 after 60, 75 and 90 % of its epochs.",
        above=0,
        first_task=False,
    )
    probe_batch_size: int = setting(
        256, "Batch size of the linear probe.", minimum=1, first_task=False
    )
    paper_probe_learning_rate: float | None = setting(
        None,
        "Learning rate of a second probe, the head linear_paper [default: no such probe].",
        above=0,
        first_task=False,
    )


@dataclass(frozen=True)
class MeansOptions(Options):
    """The class means that accuracy is measured by after every task."""

    mean_passes: int = setting(
        10,
        "Augmented passes over the visible samples from which class means are taken.",
        minimum=1,
        first_task=False,
    )


@dataclass(frozen=True)
class EvaluationOptions(ProbeOptions, MeansOptions):
    """All settings of classifiers that are fitted after every task."""


@dataclass(frozen=True)
class Config(TrainingOptions, AugmentationOptions, NetworkOptions, RunOptions, StreamOptions):
    """All settings that every method has."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ready for YAML or JSON."""
        return {name: plain(value) for name, value in dataclasses.asdict(self).items()}

    def after_first_task(self) -> set[str]:
        """Settings that change nothing before the first task has been trained."""
        names = names_of(type(self), first_task=False)
        if isinstance(self, StreamReplayOptions):
            names.discard("memory")  # which is filled and replayed from the first step on
        return names | {"epochs"} if self.first_epochs else names


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
class NoMemoryConfig(ClassifierConfig):
    """What methods that keep no samples have in common."""

    memory: int = setting(
        0,
        "0, as nothing is kept.",
        minimum=0,
        maximum=0,
        because="this method keeps no samples",
        kind="row",
        first_task=False,
    )
