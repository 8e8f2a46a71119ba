"""ContinualLearner: learn one task after another from your own arrays, and predict."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cclis.data.images import ImageSet, as_array, as_uint8_images
from cclis.engine.randomness import seeded
from cclis.engine.trainer import Trainer
from cclis.errors import InputError, as_input_errors, unknown
from cclis.evaluation.heads import Head, View, fit, heads_for
from cclis.files import read_tensors, write_tensors
from cclis.methods import make_config, recorded
from cclis.nn.network import Representation
from cclis.progress import QUIET, Progress
from cclis.runs.checkpoints import FORMAT
from cclis.settings import Config, names_of

COSINE_TEMPERATURE = 0.1
"""Cosines are divided by this before they become probabilities."""
OF_A_RUN = names_of(Config, run_only=True)
"""Settings that say what a run learns and where it is kept; a learner is told by `learn`."""
ROOM = 16
"""Classes a new learner has room for; it is doubled as they come. Not many more than there are: DER
matches the mean over all of it, so that empty room weakens it."""


class ContinualLearner:
    """A model that keeps learning new classes without forgetting the old ones.

    Args:
        method: How to learn; `cclis benchmarks` lists the methods.
        memory: How many samples of past tasks may be kept; 200 by default, where any are kept.
        encoder: Your own encoder, a module that turns images (B, C, H, W) into features (B, D),
            instead of one that the setting `encoder` names; it is copied.
        head: The classifier to predict with; the method's last by default.
        progress: Whether to show what goes on.
        settings: Any other setting, as on the command line: epochs=20, seed=1, device="cuda".
    """

    def __init__(
        self,
        method: str = "cclis",
        memory: int | None = None,
        *,
        encoder: nn.Module | str | None = None,
        head: str | None = None,
        progress: bool = False,
        **settings: Any,
    ):
        if not isinstance(method, str):
            raise InputError(f"method must be a name, not {method!r}")
        if not isinstance(head, str | None):
            raise InputError(f"head must be a name, not {head!r}")
        if isinstance(encoder, str):
            settings["encoder"] = encoder
        elif encoder is not None and not isinstance(encoder, nn.Module):
            raise InputError(f"encoder must be a module or a name, not {type(encoder).__name__}")
        for name, value in settings.items():
            if name in OF_A_RUN:
                raise InputError(f"{name} is a setting of `cclis train`, not of a learner")
            if getattr(value, "ndim", 0):
                raise InputError(f"{name} must be a single value, not an array")
        if memory is not None:
            settings["memory"] = memory
        self.config = make_config(method, settings)
        heads = heads_for(recorded(method).heads, self.config)
        self._head_name = head or heads[-1]
        if self._head_name not in heads:
            raise unknown(f"head of {method}", self._head_name, heads)
        self._encoder = encoder if isinstance(encoder, nn.Module) else None
        self._progress = Progress() if progress else QUIET
        self._trainer: Trainer | None = None
        self._head: Head | None = None
        self._classes: list[Any] = []

    @property
    def classes(self) -> list[Any]:
        """The classes learned so far, in order of arrival, as they were given."""
        return list(self._classes)

    def learn(self, images: Any, labels: Any, *, again: bool = False) -> ContinualLearner:
        """Learn a task: images of classes not seen before. They are not needed afterwards.

        If it fails or is interrupted, the learner is as it was before and may be told again.

        Args:
            images: (N, H, W), (N, H, W, C) or (N, C, H, W); uint8, or floats within [0, 1].
            labels: (N,): integers or strings, one an image.
            again: Whether classes learned before may come up again.
        """
        pixels = as_uint8_images(images)
        names = _labels(labels, len(pixels))
        given = sorted(set(names))
        if self._classes and type(given[0]) is not type(self._classes[0]):
            raise InputError(
                f"labels were {type(self._classes[0]).__name__}s before; now {given[0]!r}"
            )
        new = [name for name in given if name not in self._classes]
        if len(new) < len(given) and not again:
            known = next(name for name in given if name in self._classes)
            raise InputError(
                f"class {known!r} was learned before; a task brings new classes, unless again=True"
            )
        if self._classes and recorded(self.config.method).joint:
            raise InputError(
                f"{self.config.method} learns all tasks at once: give their samples to one learn()"
            )
        arrival = {name: index for index, name in enumerate([*self._classes, *new])}
        task = ImageSet(pixels, torch.tensor([arrival[name] for name in names]))
        trainer = self._trainer or Trainer(
            self.config, task.shape, ROOM, encoder=self._encoder, progress=self._progress
        )
        classes = len(self._classes) + len(new)
        if 0 < self.config.memory < classes:
            warnings.warn(
                f"a memory of {self.config.memory} is smaller than the {classes} classes: some "
                "keep no sample",
                stacklevel=2,
            )
        # An encoder of one's own may draw from torch's global generators, as dropout does.
        purpose, device = ("learner", len(trainer.task_sizes)), trainer.fabric.device
        with trainer.all_or_nothing(), seeded(self.config.seed, *purpose, device=device):
            learned = trainer.learn(task, len(new), again=again)
            view = View(trainer.inference, learned.visible, classes, self.config, self.config.seed)
            self._head = fit(self._head_name, view)
        self._trainer = trainer
        self._classes += new
        return self

    def predict(self, images: Any) -> NDArray[Any]:
        """The class of every image, as it was given to `learn`, (N,)."""
        best = self._scores(images).argmax(dim=1).cpu().numpy()
        predicted: NDArray[Any] = np.asarray(self._classes)[best]
        return predicted

    def predict_proba(self, images: Any) -> NDArray[np.float32]:
        """How likely each class is for every image, (N, classes) in the order of `classes`."""
        scores = self._scores(images)
        head = self._fitted()[1]
        if head.on == "embeddings":
            scores = scores / COSINE_TEMPERATURE
        return scores.softmax(dim=1).cpu().numpy()

    def save(self, path: str | Path) -> None:
        """Write the learner to one file, so that a loaded one goes on exactly as this would."""
        trainer, head = self._fitted()
        tensors, description = trainer.state()
        tensors |= {"head.weight": head.weight, "head.bias": head.bias}
        description |= {
            "head": {"name": self._head_name, "on": head.on},
            "labels": self._classes,
            "own_encoder": self._encoder is not None,
            "format": FORMAT,
        }
        with as_input_errors(f"cannot write {str(path)!r}"):
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
        encoder: nn.Module | None = None,
        device: str | None = None,
        progress: bool = False,
    ) -> ContinualLearner:
        """Read a learner that `save` wrote.

        Args:
            path: The file.
            encoder: Your own encoder, where the learner was made with one.
            device: Where to compute from now on [default: as before].
            progress: Whether to show what goes on.
        """
        with as_input_errors(f"{str(path)!r} is not a saved learner"):
            return cls._loaded(path, encoder, device, progress)

    @classmethod
    def _loaded(
        cls, path: str | Path, encoder: nn.Module | None, device: str | None, progress: bool
    ) -> ContinualLearner:
        tensors, description = read_tensors(Path(path))
        needed = {"head", "labels", "config", "own_encoder", "image_shape", "classes", "task_sizes"}
        if not needed <= description.keys() or not {"head.weight", "head.bias"} <= tensors.keys():
            raise InputError(f"{path} is not a saved learner")
        if description.get("format") != FORMAT:
            made = description.get("format", "an older one")
            raise InputError(f"{path} has the format {made}; this cclis reads {FORMAT}")
        if description["own_encoder"] and encoder is None:
            raise InputError(f"{path} was learned with your own encoder; pass it as encoder=")
        name, on = description["head"]["name"], description["head"]["on"]
        labels, sizes = description["labels"], description["task_sizes"]
        if (
            not isinstance(name, str)
            or not isinstance(labels, list)
            or {type(label) for label in labels} not in ({int}, {str})
            or not len(labels) == len(set(labels)) == sum(sizes)
            or any(type(size) is not int or size < 0 for size in sizes)
            or description["position"] is not None
        ):
            raise InputError(f"{path} is not a saved learner: its head or its labels are of no use")
        settings = {k: v for k, v in description["config"].items() if k not in OF_A_RUN}
        settings["device"] = device or settings["device"]
        named = settings.pop("encoder")
        learner = cls(
            settings.pop("method"),
            settings.pop("memory"),
            encoder=encoder or named,
            head=name,
            progress=progress,
            **settings,
        )
        trainer = Trainer.from_state(
            tensors, description, encoder=encoder, device=device, progress=learner._progress
        )
        here = trainer.fabric.device
        weight, bias = tensors["head.weight"].to(here), tensors["head.bias"].to(here)
        head = Head(on, weight, bias)
        with torch.no_grad():
            features = torch.zeros(1, trainer.features, device=here)
            blank = Representation(features, trainer.method.network.project(features))
            if head.scores(blank).shape != (1, len(labels)) or bias.shape != (len(labels),):
                raise InputError(f"{path} is not a saved learner: its head does not fit its labels")
        learner._trainer, learner._head, learner._classes = trainer, head, labels
        return learner

    def _scores(self, images: Any) -> Tensor:
        trainer, head = self._fitted()
        pixels = as_uint8_images(images)
        if tuple(pixels.shape[1:]) != trainer.image_shape:
            raise InputError(
                f"images of (height, width, channels) {tuple(pixels.shape[1:])}, "
                f"but {trainer.image_shape} were learned"
            )
        return head.scores(trainer.inference(pixels))

    def _fitted(self) -> tuple[Trainer, Head]:
        if self._trainer is None or self._head is None:
            raise InputError("nothing has been learned yet; call learn(images, labels) first")
        return self._trainer, self._head


def _labels(labels: Any, count: int) -> list[Any]:
    array = as_array(labels, "labels")
    if array.dtype == object and all(isinstance(name, str) for name in array.flat):
        array = array.astype(str)
    if array.shape != (count,):
        raise InputError(f"{count} images need as many labels, not an array of {array.shape}")
    if array.dtype.kind not in "iuU":
        raise InputError(f"labels must be integers or strings, not {array.dtype}")
    if array.dtype.kind == "U" and not all(isinstance(name, str) for name in labels):
        raise InputError("labels must be all integers or all strings, not a mixture")
    plain: list[Any] = array.tolist()
    return plain
