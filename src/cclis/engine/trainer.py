"""The training loop: one task after another, for every method and every device."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from cclis.data.batches import Mix
from cclis.data.images import ImageSet
from cclis.engine.advice import free_frames, in_words, too_large
from cclis.engine.checks import check_claims, check_classes, check_memory, check_task
from cclis.engine.devices import make_fabric, numerics, on_host, out_of_memory, peak_memory
from cclis.engine.events import EpochEnded, Event, StepDone, TaskLearned, TaskTrained
from cclis.engine.inference import Inference
from cclis.engine.optimizer import Optimizer
from cclis.engine.position import Position
from cclis.engine.randomness import generator, seeded
from cclis.engine.records import Epoch
from cclis.engine.replay import Replay
from cclis.engine.schedule import Schedule
from cclis.engine.step import Step
from cclis.errors import InputError, as_input_errors
from cclis.files import strip_prefix
from cclis.memory import Memory
from cclis.methods import Method, Visible, recorded, recorded_config
from cclis.nn.compiling import compiles
from cclis.nn.network import Representation, build_checked, feature_dimension, make_encoder
from cclis.progress import QUIET, Bar, Progress
from cclis.settings import Config, names_of

Description = dict[str, Any]
"""The part of a state that JSON can hold."""


class Trainer:
    """Learns tasks by a method. After a task, its data may be deleted.

    It works in place: a task that is not learned to its end leaves it unusable until a state is
    restored.

    Attributes:
        images: How many images its steps have gone through.
        features: How many features its encoder gives.

    Args:
        config: All settings.
        image_shape: Height, width and channels of the images to come.
        classes: For how many classes to make room at first.
        method: The class of the method [default: the one that `config` names].
        encoder: Your own encoder instead of the one that `config` names; it is copied.
        progress: Where to show progress.
    """

    def __init__(
        self,
        config: Config,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        method: type[Method[Any, Any]] | None = None,
        encoder: nn.Module | None = None,
        progress: Progress = QUIET,
    ):
        self.config, self.image_shape, self._progress = config, image_shape, progress
        self.fabric = make_fabric(config)
        kind = method or recorded(config.method)
        with seeded(config.seed, "network"):
            if encoder is None:
                encoder = make_encoder(config, image_shape, fan_out=kind.fan_out)
            else:
                encoder = copy.deepcopy(encoder)
                for name, value in encoder.state_dict().items():
                    if not isinstance(value, Tensor):
                        raise InputError(f"the encoder's {name} is no tensor and cannot be saved")
            own, channels = encoder.cpu(), image_shape[2]
            self.features = feature_dimension(own, image_shape)
            network = build_checked(
                lambda: kind.make_network(config, own, channels, self.features, classes)
            )
        try:
            network = self.fabric.to_device(network)
        except torch.OutOfMemoryError:
            raise InputError("the network does not fit into the GPU's memory") from None
        if compiles(config, self.fabric.device):
            network.compile_encoder()
        if self.fabric.device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)
        self.method = kind(config, network)
        self.memory = Memory(config.memory, self.method.reservoir if config.memory else 0)
        self.inference = Inference(network, self.fabric, config)
        self.images = 0
        self._learning = False
        self._position: Position | None = None
        self._replay = Replay(self.method, self.memory, config, self.fabric.device)
        groups = self.method.parameter_groups()
        self._optimizer = Optimizer(groups, config, self.fabric.device)
        self._step = Step(self.method, self._optimizer, self.fabric, config)

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """How many classes each task brought that has been learned to its end."""
        sizes = self.method.stream.task_sizes
        return sizes if self._position is None else sizes[:-1]

    @property
    def steps(self) -> int | None:
        """Steps of the current task done; None between tasks."""
        return None if self._position is None else self._position.done

    @property
    def trained_epochs(self) -> float:
        """Epochs of the current task done, parts included; 0 between tasks."""
        return 0.0 if self._position is None else self._position.trained_epochs

    def learn(
        self, task: ImageSet, new_classes: int, *, again: bool = False
    ) -> Generator[Event, None, None]:
        """Learn a task whose classes are the next `new_classes` in order of arrival.

        A trainer restored from the middle of a task continues there.

        Args:
            task: The samples.
            new_classes: How many classes they bring.
            again: Whether samples of classes learned before may be among them.

        Yields:
            What happened, in order. `state` is complete at every event; at the last one,
            `TaskLearned`, everything is done.
        """
        check_task(task, self.image_shape, self.config)
        begun = None if self._position is None else self._position.classes
        check_classes(task, new_classes, sum(self.task_sizes), begun, again=again)
        if self._learning:
            raise RuntimeError("this trainer was stopped in the middle of a task: restore a state")
        if self.fabric.device.type == "cpu":
            momentum = self.config.momentum > 0 and not self._optimizer.state()
            check_memory(len(task), self.method, self.features, momentum=momentum)
        return self._learn(task, new_classes)

    def _learn(self, task: ImageSet, new_classes: int) -> Generator[Event, None, None]:
        self._learning = True
        try:
            yield from self._train(task, new_classes)
        except (RuntimeError, ValueError) as error:
            said = in_words(error, self.method, self._step.sizes)
            if out_of_memory(error):
                free_frames(error)
                said = self._too_large(len(task))
            if said is None:
                raise
            raise InputError(said) from None

    def _train(self, task: ImageSet, new_classes: int) -> Generator[Event, None, None]:
        """All of a task: its epochs, then the memory."""
        started = time.perf_counter()
        device = self.fabric.device
        stay = on_host(self.config, task.images.nbytes, device)
        task = task.to(device, images="cpu" if stay else device)
        if self._position is None:
            if not self.task_sizes:
                self.method.network.fit_normalisation(task.images)
            self._make_room(self.method.seen + new_classes)
            drawn = self._replay.drawn()
            self.method.begin_task(new_classes)
            self._position = Position(new_classes, drawn)
        yield from self._train_epochs(task, self._position)
        yield TaskTrained()
        visible = self.memory.visible(task)
        diagnosis: dict[str, Any] = {}
        if not self.method.streams:
            diagnosis = self._refill(visible)
        elif self.memory.reservoir and self.memory.seen and self.memory.samples is not None:
            # Unless the choice has been made: a first task may be taken over from another run.
            diagnosis = self._refill(self.memory.samples)
        self._position, self._learning = None, False
        seconds = time.perf_counter() - started
        yield TaskLearned(self.head_samples(visible), seconds, diagnosis)

    def head_samples(self, visible: ImageSet) -> ImageSet:
        """What heads are fitted to, of what was visible during a task that has been learned."""
        kept = self.memory.samples
        return kept if self.method.fit_heads_on_memory and kept is not None else visible

    def _train_epochs(self, task: ImageSet, position: Position) -> Generator[Event, None, None]:
        config, index, epochs = self.config, len(self.task_sizes), self.epochs
        mix, sizes = self._replay.mix(len(task), self.task_sizes)
        constant = config.schedule == "constant"
        schedule = Schedule(epochs, mix.steps, config.warmup_epochs, constant)
        started, before = time.perf_counter(), position.done
        self.inference.forget()
        self._step.begin_task(before, sizes, mix.steps)
        self.method.network.train()
        title, steps = f"task {index + 1}  training", epochs * mix.steps
        try:
            with self._progress.bar(title, steps, done=before) as bar:
                while position.epoch < epochs:
                    for _ in self._steps(task, position, mix, schedule, bar):
                        if position.step < mix.steps:
                            yield StepDone(position.epoch + position.step / mix.steps)
                    self.stop_if_failed()
                    # Once an epoch the numbers come to the host; a step never waits for them.
                    means = {name: float(x) / mix.steps for name, x in position.totals.items()}
                    images = (position.done - before) * mix.batch
                    speed = images / (time.perf_counter() - started)
                    rate = self._optimizer.learning_rate
                    done = index, position.epoch, position.done
                    epoch = Epoch(*done, sum(means.values()), means, rate, speed)
                    bar.advance(0, note=self._note(epoch, epochs))
                    position.epoch, position.step, position.totals = position.epoch + 1, 0, {}
                    position.drawn = self._replay.drawn()
                    yield EpochEnded(epoch)
                    yield StepDone(position.epoch)
        finally:
            self._step.forget()

    def _steps(
        self, task: ImageSet, position: Position, mix: Mix, schedule: Schedule, bar: Bar
    ) -> Generator[None, None, None]:
        """Take the steps that are left of an epoch, and yield after each."""
        for batch, slots in self._replay.batches(task, mix, position.step):
            self._optimizer.set_learning_rates(schedule, position.done)
            losses, to_store = self._step(batch)
            position.add(losses)
            if self.method.streams:
                with numerics(self.config, self.fabric.device):
                    self._replay.take_in(batch, mix.task, slots, to_store)
            self.images += mix.batch
            bar.advance()
            if self.fabric.device.type == "cpu":
                self.stop_if_failed()
            yield

    def _note(self, epoch: Epoch, epochs: int) -> str:
        """Two lines about an epoch."""
        loss = f"loss {epoch.loss:.3f}"
        if len(epoch.losses) > 1:
            loss += f" = {' + '.join(f'{name} {x:.3f}' for name, x in epoch.losses.items())}"
        place = "GPU memory" if self.fabric.device.type == "cuda" else "memory"
        used = f"{peak_memory(self.fabric.device) / 2**30:.1f} GiB of {place} at most"
        room = self.memory.capacity + self.memory.reservoir
        kept = [f"replay {len(self.memory)}/{room}"] * bool(room)
        return "\n".join(
            " · ".join(line)
            for line in (
                [f"epoch {epoch.epoch + 1}/{epochs}", loss, f"lr {epoch.learning_rate:.3g}"],
                [f"{epoch.images_per_second:,.0f} img/s", *kept, used],
            )
        )

    @property
    def epochs(self) -> int:
        """Epochs of the current task, or of the next one between tasks."""
        first = self.config.first_epochs if not self.task_sizes else None
        return first or self.config.epochs

    def _refill(self, visible: ImageSet) -> dict[str, Any]:
        index, seed = len(self.task_sizes), self.config.seed
        augment_rng = generator(self.fabric.device, seed, "score", index)
        with (
            numerics(self.config, self.fabric.device),
            self._progress.bar(f"task {index + 1}  scoring", self.method.passes) as bar,
        ):

            def represent(*, augmented: bool = True) -> Representation:
                bar.advance()
                return self.inference(visible.images, augment_rng if augmented else None)

            rng = generator("cpu", seed, "keep", index)
            choice = Visible(visible.labels, represent, self.memory.extras)
            exemplars = self.method.select_exemplars(choice, self.memory.capacity, rng)
        chosen = visible[exemplars.indices]
        self.memory.replace(chosen, exemplars.proposal, exemplars.extras)
        return exemplars.diagnosis

    def _make_room(self, classes: int) -> None:
        room = self.method.network.classes
        if classes > room:
            self._resize(max(classes, 2 * room))

    def _resize(self, classes: int) -> None:
        """Make room for this many classes."""
        network = self.method.network
        if classes == network.classes:
            return
        replaced = network.widen(classes, generator("cpu", self.config.seed, "widen", classes))
        self._optimizer.replace(replaced)
        for name in self.method.per_class:
            self.memory.widen(name, classes)

    def _too_large(self, samples: int) -> str:
        self.inference.forget()
        if self._position is not None and self._position.epoch == self.epochs:
            height, width, _ = self.image_shape
            return (
                f"the GPU's memory is too small to score images of {height}×{width}: use smaller "
                "images (image_size) or width"
            )
        batch = min(self.config.batch_size, samples)
        sizes = (batch, *self._step.sizes[1:])
        return too_large(self.method, self.fabric, self._optimizer, self.image_shape, sizes)

    def free(self) -> None:
        """Give back the memory that only learning and passes need."""
        self._optimizer.zero_grad()
        self.inference.forget()

    def stop_if_failed(self) -> None:
        """Raise an InputError if a step was not finite; on a GPU this waits for all steps."""
        failed, steps = self._step.failed, self._step.steps
        if failed is None:
            return
        known = names_of(type(self.config), stability=True)
        settings = [f"{k} {v:g}" for k, v in self.config.to_dict().items() if k in known]
        raise InputError(
            f"the loss or its gradient was no longer finite in task {len(self.task_sizes) + 1}, "
            f"epoch {failed // steps + 1}, step {failed % steps + 1} of {steps} "
            f"({', '.join(settings)}, precision {self.config.precision}); a lower learning_rate "
            "may help"
        )

    def state(self) -> tuple[dict[str, Tensor], Description]:
        """Everything needed to continue from here, as tensors and a description."""
        tensors = {f"network.{k}": v for k, v in self.method.network.state_dict().items()}
        tensors |= {f"memory.{name}": value for name, value in self.memory.state().items()}
        tensors |= {f"momentum.{name}": value for name, value in self._optimizer.state().items()}
        for name, source in self._replay.generators.items():
            tensors[f"generator.{name}"] = source.get_state()
        position = self._position
        if position is not None:
            tensors |= {f"method.{name}": value for name, value in self.method.state().items()}
            tensors |= {f"total.{name}": value for name, value in position.totals.items()}
            tensors |= {f"generator.{name}": state for name, state in position.drawn.items()}
        description = {
            "config": self.config.to_dict(),
            "image_shape": list(self.image_shape),
            "classes": self.method.network.classes,
            "task_sizes": list(self.task_sizes),
            "position": position
            and {name: getattr(position, name) for name in ("classes", "epoch", "step", "done")},
            # The order of sums: tensors come back from a file in another.
            "terms": [] if position is None else list(position.totals),
        }
        return tensors, description

    @classmethod
    def from_state(
        cls,
        tensors: dict[str, Tensor],
        description: Description,
        *,
        method: type[Method[Any, Any]] | None = None,
        encoder: nn.Module | None = None,
        device: str | None = None,
        progress: Progress = QUIET,
    ) -> Trainer:
        """A trainer that continues where `state` was taken, on any device."""
        with as_input_errors("not a state that this cclis wrote"):
            settings = dict(description["config"])
            settings["device"] = device or settings["device"]
            kind = method or recorded(str(settings["method"]))
            config = recorded_config(settings, kind)
            height, width, channels = description["image_shape"]
            shape, classes = (int(height), int(width), int(channels)), int(description["classes"])
            check_claims(tensors, config, kind, shape, classes, own_encoder=encoder is not None)
        trainer = cls(config, shape, classes, method=kind, encoder=encoder, progress=progress)
        trainer.restore(tensors, description)
        return trainer

    def restore(self, tensors: dict[str, Tensor], description: Description) -> None:
        """Take over the tensors of a `state` that belongs to the same settings."""
        with as_input_errors("not a state that this cclis wrote"):
            self._restore(tensors, description)

    def _restore(self, tensors: dict[str, Tensor], description: Description) -> None:
        here = {name: tensor.to(self.fabric.device) for name, tensor in tensors.items()}
        self._resize(description["classes"])
        own, given = self.method.network.state_dict(), strip_prefix("network.", here)
        for name in sorted(own.keys() | given.keys()):
            if name not in own or name not in given or own[name].shape != given[name].shape:
                raise InputError(f"these weights belong to another network: {name} differs")
        self.method.network.load_state_dict(given)
        self.memory.load(strip_prefix("memory.", here))
        self._optimizer.load(strip_prefix("momentum.", here))
        for name, source in self._replay.generators.items():
            state = tensors[f"generator.{name}"]
            # A state from another kind of device does not fit; that generator starts afresh.
            if source.get_state().shape == state.shape:
                source.set_state(state.cpu())
        sizes, position = tuple(description["task_sizes"]), description["position"]
        self._learning = False
        if position is None:
            self._position = None
            self.method.stream.set(sizes)
        else:
            totals = {name: here[f"total.{name}"] for name in description["terms"]}
            self._position = Position(drawn=self._replay.drawn(), totals=totals, **position)
            self.method.stream.set((*sizes, int(position["classes"])))
            self.method.load(strip_prefix("method.", here))
