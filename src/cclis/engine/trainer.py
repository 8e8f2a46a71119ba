"""The training loop: one task after another, for every method and every device."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cclis.config import Config, make_config
from cclis.data.augment import draw_chances
from cclis.data.batches import epoch, mix
from cclis.data.images import ImageSet
from cclis.engine.device import generator, make_fabric, seeded
from cclis.engine.inference import Inference
from cclis.engine.optimizer import Optimizer
from cclis.engine.schedule import Schedule
from cclis.engine.step import Step
from cclis.errors import InputError
from cclis.memory import Memory
from cclis.methods import METHODS
from cclis.nn.network import feature_dimension, make_encoder
from cclis.progress import QUIET, Progress

Record = dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """What learning a task left behind.

    Attributes:
        visible: The samples that were visible: the memory as it was, then the task.
        images: How many images the steps went through.
        seconds: How long it took, scoring and selection included.
    """

    visible: ImageSet
    images: int
    seconds: float


class Trainer:
    """Learns tasks by a method. After a task, its data may be deleted.

    Args:
        config: All settings.
        image_shape: Height, width and channels of the images to come.
        classes: For how many classes to make room at first.
        encoder: Your own encoder instead of the one that `config` names; it is copied.
        progress: Where to show what goes on.
    """

    def __init__(
        self,
        config: Config,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        encoder: nn.Module | None = None,
        progress: Progress = QUIET,
    ):
        self.config, self.image_shape, self._progress = config, image_shape, progress
        self.fabric = make_fabric(config)
        kind = METHODS[config.method]
        with seeded(config.seed, "network"):
            encoder = copy.deepcopy(encoder) if encoder else make_encoder(config, image_shape)
            features = feature_dimension(encoder.cpu(), image_shape)
            network = kind.make_network(config, encoder, image_shape[2], features, classes)
        network = self.fabric.to_device(network)
        if self.fabric.device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)
        self.method = kind(config, network)
        self.memory = Memory(config.memory)
        self.inference = Inference(network, self.fabric, config)
        self.task_sizes: list[int] = []
        self._order = generator(self.fabric.device, config.seed, "order")
        self._augment = generator(self.fabric.device, config.seed, "augment")
        self._keep = generator("cpu", config.seed, "keep")
        groups = self.method.parameter_groups()
        self._optimizer = Optimizer(groups, config, self.fabric.device)
        self._step = Step(self.method, self._optimizer, self.fabric, config)

    def learn(
        self,
        task: ImageSet,
        new_classes: int,
        on_epoch: Callable[[Record], None] = lambda record: None,
    ) -> Learned:
        """Learn a task whose classes are the next `new_classes` in order of arrival.

        If it fails or is interrupted, everything is as it was before.
        """
        self._check(task, new_classes)
        with self.all_or_nothing():
            return self._learn(task, new_classes, on_epoch)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block fails or is interrupted, everything is as it was before."""
        tensors, description = self.state()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        try:
            yield
        except BaseException:
            self.restore(before, description)
            raise

    def _learn(
        self, task: ImageSet, new_classes: int, on_epoch: Callable[[Record], None]
    ) -> Learned:
        started = time.perf_counter()
        task = task.to(self.fabric.device)
        if not self.task_sizes:
            self.method.network.normalise_to(task.images)
        self._make_room(self.method.seen + new_classes)
        self.method.begin_task(new_classes)
        self._step.begin_task()
        images = self._train(task, on_epoch)
        visible = self.memory.visible(task)
        self._refill(visible)
        self.task_sizes.append(new_classes)
        return Learned(visible, images, time.perf_counter() - started)

    def _train(self, task: ImageSet, on_epoch: Callable[[Record], None]) -> int:
        config, index = self.config, len(self.task_sizes)
        epochs = config.first_epochs if index == 0 and config.first_epochs else config.epochs
        how = mix(len(task), len(self.memory), config.batch_size, config.replay_share)
        schedule = Schedule(epochs, how.steps, config.warmup_epochs)
        started, done = time.perf_counter(), 0
        self.method.network.train()
        with self._progress.bar(f"task {index + 1}  training", epochs * how.steps) as bar:
            for number in range(epochs):
                totals: dict[str, Tensor] = {}
                for chosen, replayed in epoch(len(task), len(self.memory), how, self._order):
                    rate = self._optimizer.set_learning_rates(schedule, done)
                    for name, value in self._step(*self._batch(task, chosen, replayed)).items():
                        totals[name] = totals.get(name, torch.zeros_like(value)) + value
                    done += 1
                    bar.advance()
                # Once an epoch the numbers come to the host; a step never waits for them.
                losses = {name: float(total) / how.steps for name, total in totals.items()}
                loss = sum(losses.values())
                speed = done * how.batch / (time.perf_counter() - started)
                bar.advance(0, note=f"loss {loss:.3f}  {speed:,.0f} img/s")
                self._stop_unless_finite(loss, index, number)
                on_epoch(
                    {
                        "task": index,
                        "epoch": number,
                        "loss": loss,
                        "losses": losses,
                        "learning_rate": rate,
                        "images_per_second": speed,
                    }
                )
        return done * how.batch

    def _batch(self, task: ImageSet, chosen: Tensor, replayed: Tensor) -> tuple[Tensor, ...]:
        images, labels = task.images[chosen], task.labels[chosen]
        proposal = torch.ones(len(chosen), device=images.device)
        if self.memory.samples is not None and len(replayed):
            past = self.memory.samples[replayed]
            images = torch.cat([images, past.images])
            labels = torch.cat([labels, past.labels])
            proposal = torch.cat([proposal, self.memory.proposal[replayed]])
        return images, labels, proposal, draw_chances(len(labels), self._augment)

    def _refill(self, visible: ImageSet) -> None:
        title = f"task {len(self.task_sizes) + 1}  scoring"
        with self._progress.bar(title, self.method.passes) as bar:

            def embed() -> Tensor:
                bar.advance()
                return self.inference(visible.images, self._augment).embeddings

            kept = self.method.keep(visible.labels, self.memory.capacity, embed, self._keep)
        self.memory.replace(visible[kept.indices], kept.proposal)

    def _make_room(self, classes: int) -> None:
        room = self.method.network.classes
        if classes > room:
            self._give_room(max(classes, 2 * room))

    def _give_room(self, classes: int) -> None:
        network = self.method.network
        if classes == network.classes:
            return
        replaced = network.widen(classes, generator("cpu", self.config.seed, "widen", classes))
        self._optimizer.replace(replaced)

    def _check(self, task: ImageSet, new_classes: int) -> None:
        if task.shape != self.image_shape:
            raise InputError(
                f"images of (height, width, channels) {task.shape}, "
                f"but the first task had {self.image_shape}"
            )
        if len(task) < 2:
            raise InputError("a task needs at least two samples")
        low, high = self.method.seen, self.method.seen + new_classes
        if new_classes < 1 or int(task.labels.min()) < low or int(task.labels.max()) >= high:
            raise InputError(
                f"labels out of range: this task's classes are {low} to {high - 1}, "
                f"but labels reach from {int(task.labels.min())} to {int(task.labels.max())}"
            )

    def _stop_unless_finite(self, loss: float, task: int, number: int) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"the loss became {loss} in epoch {number + 1} of task {task + 1}: "
                f"try a lower learning_rate than {self.config.learning_rate:g}"
            )

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Everything needed to go on after this task, as tensors and a description."""
        tensors = {f"network.{k}": v for k, v in self.method.network.state_dict().items()}
        tensors |= {f"memory.{name}": value for name, value in self.memory.state().items()}
        tensors |= {f"momentum.{name}": value for name, value in self._optimizer.state().items()}
        for name in ("order", "augment", "keep"):
            tensors[f"generator.{name}"] = getattr(self, f"_{name}").get_state()
        description = {
            "config": self.config.to_dict(),
            "image_shape": list(self.image_shape),
            "classes": self.method.network.classes,
            "task_sizes": list(self.task_sizes),
        }
        return tensors, description

    @classmethod
    def from_state(
        cls,
        tensors: dict[str, Tensor],
        description: Record,
        *,
        encoder: nn.Module | None = None,
        device: str | None = None,
        progress: Progress = QUIET,
    ) -> Trainer:
        """A trainer that goes on where `state` was taken, on any device."""
        settings = dict(description["config"])
        settings["device"] = device or settings["device"]
        config = make_config(settings.pop("method"), settings)
        height, width, channels = description["image_shape"]
        trainer = cls(
            config,
            (height, width, channels),
            description["classes"],
            encoder=encoder,
            progress=progress,
        )
        trainer.restore(tensors, description)
        return trainer

    def restore(self, tensors: dict[str, Tensor], description: Record) -> None:
        """Take over the tensors of a `state` that belongs to the same settings."""
        here = {name: tensor.to(self.fabric.device) for name, tensor in tensors.items()}
        self._give_room(description["classes"])
        try:
            self.method.network.load_state_dict(_under("network.", here))
        except RuntimeError as error:
            raise InputError(f"these weights belong to another network: {error}") from None
        self.memory.load(_under("memory.", here))
        self._optimizer.load(_under("momentum.", here))
        for name in ("order", "augment", "keep"):
            stored: torch.Generator = getattr(self, f"_{name}")
            state = tensors[f"generator.{name}"]
            # A state from another kind of device does not fit; that generator starts afresh.
            if stored.get_state().shape == state.shape:
                stored.set_state(state.cpu())
        self.task_sizes = list(description["task_sizes"])
        self.method.count(sum(self.task_sizes[:-1]), sum(self.task_sizes))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
