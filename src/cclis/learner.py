"""ContinualLearner: learn one task after another from your own arrays, and predict."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cclis.data.images import ImageSet, as_array, as_uint8_images
from cclis.engine.events import TaskLearned
from cclis.engine.randomness import seeded
from cclis.engine.snapshot import Snapshot
from cclis.engine.trainer import Trainer
from cclis.errors import InputError, as_input_errors, os_errors, unknown
from cclis.evaluation.heads import Head, View, fit, heads_for
from cclis.files import read_tensors, write_tensors
from cclis.methods import Method, get, make_config, recorded
from cclis.nn.network import Representation
from cclis.progress import QUIET, Progress
from cclis.runs.checkpoints import FORMAT
from cclis.settings import Config, names_of

COSINE_TEMPERATURE = 0.1
"""Cosines are divided by this before they become probabilities."""
ROOM = 16
"""Classes a new learner has room for; it is doubled as they come. Not many more than there are: DER
matches the mean over all of it, so that empty room weakens it."""


@dataclass(frozen=True, eq=False)
class Published:
    """What a learner knows after a task. It is replaced as a whole and never changed.

    Attributes:
        snapshot: The network, the memory, and what training needs to continue.
        head: The classifier to predict with.
        classes: As they were given to `learn`, in order of arrival.
    """

    snapshot: Snapshot
    head: Head
    classes: tuple[Any, ...]

    def scores(self, images: Any) -> Tensor:
        """Score of every class for every image, (N, classes)."""
        pixels, shape = as_uint8_images(images), tuple(self.snapshot.description["image_shape"])
        if tuple(pixels.shape[1:]) != shape:
            raise InputError(
                f"images of (height, width, channels) {tuple(pixels.shape[1:])}, "
                f"but {shape} were learned"
            )
        inference = self.snapshot.inference
        represented = inference(pixels)
        with inference.numerics():
            return self.head.scores(represented)


class ContinualLearner:
    """A model that keeps learning new classes without forgetting the old ones.

    Learning works on a copy of what is known, and publishes it when the task is done. Predicting
    and saving read what is published: they may run in other threads meanwhile, and a task that
    fails or is interrupted leaves the learner as it was.

    Args:
        method: How to learn: a name that `cclis benchmarks` lists, "package.module:Class", or a
            class.
        memory: Number of samples of past tasks that may be kept; 200 by default, where any are.
        encoder: Your own encoder, a module that turns images (B, C, H, W) into features (B, D),
            instead of one that the setting `encoder` names; it is copied.
        head: The classifier to predict with [default: the method's own].
        progress: Whether to show progress.
        settings: Any other setting, as on the command line: epochs=20, seed=1, device="cuda".
    """

    def __init__(
        self,
        method: str | type[Method[Any, Any]] = "cclis",
        memory: int | None = None,
        *,
        encoder: nn.Module | str | None = None,
        head: str | None = None,
        progress: bool = False,
        **settings: Any,
    ):
        if not isinstance(method, str | type):
            raise InputError(f"method must be a name or a class, not {method!r}")
        if not isinstance(head, str | None):
            raise InputError(f"head must be a name, not {head!r}")
        if isinstance(encoder, str):
            settings["encoder"] = encoder
        elif encoder is not None and not isinstance(encoder, nn.Module):
            raise InputError(f"encoder must be a module or a name, not {type(encoder).__name__}")
        for name, value in settings.items():
            if name in names_of(Config, run_only=True):
                raise InputError(f"{name} is a setting of `cclis train`, not of a learner")
            if getattr(value, "ndim", 0):
                raise InputError(f"{name} must be a single value, not an array")
        if memory is not None:
            settings["memory"] = memory
        self.config = make_config(method, settings)
        self._method = get(method)
        heads = heads_for(self._method.heads, self.config)
        self._head = head or self._method.main_head()
        if self._head not in heads:
            raise unknown(f"head of {self.config.method}", self._head, heads)
        self._own_encoder = isinstance(encoder, nn.Module)
        self._initial_encoder = copy.deepcopy(encoder) if isinstance(encoder, nn.Module) else None
        self._progress = progress
        self._published: Published | None = None
        self._trainer: Trainer | None = None  # holds what is published, ready to learn on

    @property
    def classes(self) -> list[Any]:
        """The classes learned so far, in order of arrival, as they were given."""
        return [] if self._published is None else list(self._published.classes)

    def learn(self, images: Any, labels: Any, *, again: bool = False) -> ContinualLearner:
        """Learn a task: images of classes not seen before. They are not needed afterwards.

        If it fails or is interrupted, the learner is as it was before and learn() may be repeated.

        Args:
            images: (N, H, W), (N, H, W, C) or (N, C, H, W); uint8, or floats within [0, 1].
            labels: (N,): integers or strings, one an image.
            again: Whether classes learned before may come up again.
        """
        before = self._published
        known = () if before is None else before.classes
        pixels = as_uint8_images(images)
        task, new = self._task(pixels, _labels(labels, len(pixels)), known, again=again)
        classes = (*known, *new)
        if 0 < self.config.memory < len(classes):
            warnings.warn(
                f"a memory of {self.config.memory} is smaller than the {len(classes)} classes: "
                "some keep no sample",
                stacklevel=2,
            )
        if before is not None:
            before.snapshot.free()
        # It is taken away: whatever happens until it is put back, what is published stands.
        trainer, self._trainer = self._trainer, None
        trainer = trainer or self._new_trainer(before, task.shape)
        # An encoder of one's own may draw from torch's global generators, as dropout does.
        purpose, device = ("learner", len(trainer.task_sizes)), trainer.fabric.device
        with seeded(self.config.seed, *purpose, device=device):
            (learned,) = (
                event
                for event in trainer.learn(task, len(new), again=again)
                if isinstance(event, TaskLearned)
            )
            seed = self.config.seed
            view = View(trainer.inference, learned.visible, len(classes), self.config, seed)
            head = fit(self._head, view)
        published = Published(Snapshot.of(trainer), head, classes)
        trainer.free()
        if self._published is not before:
            raise InputError("another thread called learn() meanwhile: its task stands")
        self._published = published
        self._trainer, self._initial_encoder = trainer, None
        return self

    def predict(self, images: Any) -> NDArray[Any]:
        """The class of every image, as it was given to `learn`, (N,)."""
        published = self._fitted()
        best = published.scores(images).argmax(dim=1).cpu().numpy()
        predicted: NDArray[Any] = np.asarray(published.classes)[best]
        return predicted

    def predict_proba(self, images: Any) -> NDArray[np.float32]:
        """How likely each class is for every image, (N, classes) in the order of `classes`."""
        published = self._fitted()
        scores = published.scores(images)
        if published.head.on == "embeddings":
            scores = scores / COSINE_TEMPERATURE
        return scores.softmax(dim=1).cpu().numpy()

    def save(self, path: str | Path) -> None:
        """Write the learner to one file, so that a loaded one continues exactly as this would."""
        published = self._fitted()
        head = published.head
        tensors = {**published.snapshot.tensors, "head.weight": head.weight, "head.bias": head.bias}
        description = published.snapshot.description | {
            "head": {"name": self._head, "on": head.on},
            "labels": list(published.classes),
            "own_encoder": self._own_encoder,
            "format": FORMAT,
        }
        with as_input_errors(f"cannot write {str(path)!r}"), os_errors():
            path = Path(path)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot make {path.parent}: {error.strerror}") from None
            write_tensors(path, tensors, description)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        method: str | type[Method[Any, Any]] | None = None,
        encoder: nn.Module | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> ContinualLearner:
        """Read a learner that `save` wrote.

        Args:
            path: The file.
            method: The method, where it is not one of this package: a file does not decide what
                is imported.
            encoder: Your own encoder, where the learner was made with one.
            device: Where to compute from now on [default: as before].
            progress: Whether to show progress.
        """
        if method is not None:
            get(method)
        with as_input_errors(f"{str(path)!r} is not a saved learner"), os_errors():
            return cls._loaded(path, encoder, device, progress)

    @classmethod
    def _loaded(
        cls, path: str | Path, encoder: nn.Module | None, device: str | None, progress: bool
    ) -> ContinualLearner:
        tensors, description = read_tensors(Path(path))
        _check_description(path, tensors, description)
        if description["own_encoder"] and encoder is None:
            raise InputError(f"{path} was learned with your own encoder; pass it as encoder=")
        recorded(str(description["config"]["method"]))
        of_runs = names_of(Config, run_only=True)
        settings = {k: v for k, v in description["config"].items() if k not in of_runs}
        settings["device"] = device or settings["device"]
        named, labels = settings.pop("encoder"), description["labels"]
        learner = cls(
            memory=settings.pop("memory"),
            encoder=encoder or named,
            head=description["head"]["name"],
            progress=progress,
            **settings,
        )
        trainer = Trainer.from_state(
            tensors, description, encoder=encoder, device=device, progress=learner._display
        )
        here = trainer.fabric.device
        weight, bias = tensors["head.weight"].to(here), tensors["head.bias"].to(here)
        head = Head(description["head"]["on"], weight, bias)
        with torch.no_grad():
            features = torch.zeros(1, trainer.features, device=here)
            blank = Representation(features, trainer.method.network.project(features))
            if head.scores(blank).shape != (1, len(labels)) or bias.shape != (len(labels),):
                raise InputError(f"{path} is not a saved learner: its head does not fit its labels")
        learner._published = Published(Snapshot.of(trainer), head, tuple(labels))
        learner._trainer, learner._initial_encoder = trainer, None
        return learner

    def __getstate__(self) -> dict[str, Any]:
        # What is published is enough to continue from; a trainer holds its device.
        return {**vars(self), "_trainer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        get(self._method)  # known by its name from now on, as if it had been named

    @property
    def _display(self) -> Progress:
        return Progress() if self._progress else QUIET

    def _task(
        self, pixels: Tensor, names: list[Any], known: tuple[Any, ...], *, again: bool
    ) -> tuple[ImageSet, list[Any]]:
        """The samples with their classes in order of arrival, and the classes that are new."""
        given = sorted(set(names))
        if known and type(given[0]) is not type(known[0]):
            raise InputError(f"labels were {type(known[0]).__name__}s before; now {given[0]!r}")
        new = [name for name in given if name not in known]
        if len(new) < len(given) and not again:
            old = next(name for name in given if name in known)
            raise InputError(
                f"class {old!r} was learned before; a task brings new classes, unless again=True"
            )
        if known and self._method.joint:
            raise InputError(
                f"{self.config.method} learns all tasks at once: give their samples to one learn()"
            )
        arrival = {name: index for index, name in enumerate([*known, *new])}
        return ImageSet(pixels, torch.tensor([arrival[name] for name in names])), new

    def _new_trainer(self, published: Published | None, shape: tuple[int, int, int]) -> Trainer:
        """A trainer that holds what is published, or nothing yet."""
        if published is None:
            encoder = self._initial_encoder
            return Trainer(
                self.config,
                shape,
                ROOM,
                method=self._method,
                encoder=encoder,
                progress=self._display,
            )
        snapshot = published.snapshot
        own = snapshot.network.encoder if self._own_encoder else None
        return snapshot.trainer(self._method, own, self._display)

    def _fitted(self) -> Published:
        if self._published is None:
            raise InputError("nothing has been learned yet; call learn(images, labels) first")
        return self._published


def _check_description(
    path: str | Path, tensors: dict[str, Tensor], description: dict[str, Any]
) -> None:
    """Refuse a file that is no saved learner."""
    needed = {"head", "labels", "config", "own_encoder", "image_shape", "classes", "task_sizes"}
    if not needed <= description.keys() or not {"head.weight", "head.bias"} <= tensors.keys():
        raise InputError(f"{path} is not a saved learner")
    if description.get("format") != FORMAT:
        made = description.get("format", "an older one")
        raise InputError(f"{path} has the format {made}; this cclis reads {FORMAT}")
    labels, sizes = description["labels"], description["task_sizes"]
    if (
        not isinstance(description["head"]["name"], str)
        or not isinstance(labels, list)
        or {type(label) for label in labels} not in ({int}, {str})
        or not all(_lasts(label) for label in labels)
        or not len(labels) == len(set(labels)) == sum(sizes)
        or any(type(size) is not int or size < 0 for size in sizes)
        or description["position"] is not None
    ):
        raise InputError(f"{path} is not a saved learner: its head or its labels are invalid")


def _labels(labels: Any, count: int) -> list[Any]:
    array = as_array(labels, "labels")
    if array.dtype == object and all(isinstance(name, str) for name in array.flat):
        array = array.astype(str)
    if array.shape != (count,):
        raise InputError(f"{count} images need as many labels, not an array of {array.shape}")
    plain: list[Any] = array.tolist()
    # What cannot be told apart in the array can in what was given.
    for name in plain if array.dtype.kind in "iu" else labels:
        if isinstance(name, int | np.integer | str) and not _lasts(name):
            raise InputError(
                f"label {name!r} would become another one: an integer must fit into 64 bits, with "
                "its sign, and a string must not end with a NUL character"
            )
    if array.dtype.kind not in "iuU":
        raise InputError(f"labels must be integers or strings, not {array.dtype}")
    if array.dtype.kind == "U" and not all(isinstance(name, str) for name in labels):
        raise InputError("labels must be all integers or all strings, not a mixture")
    return plain


def _lasts(label: int | np.integer[Any] | str) -> bool:
    """Whether a label stays what it is in an array of labels."""
    if isinstance(label, str):
        return not label.endswith("\0")
    return -(2**63) <= int(label) < 2**63
