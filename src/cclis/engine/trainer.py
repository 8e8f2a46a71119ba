"""The training loop: one task after another, for every method and every device."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cclis.data.images import ImageSet
from cclis.engine.devices import make_fabric, on_host, out_of_memory, peak_memory
from cclis.engine.inference import Inference
from cclis.engine.optimizer import Optimizer
from cclis.engine.randomness import generator, seeded
from cclis.engine.replay import Replay
from cclis.engine.schedule import Schedule
from cclis.engine.step import Step
from cclis.errors import InputError, as_input_errors
from cclis.memory import Memory
from cclis.methods import Batch, Visible, recorded, recorded_config
from cclis.nn.compiling import compiles
from cclis.nn.network import Representation, build_checked, feature_dimension, make_encoder
from cclis.progress import QUIET, Progress
from cclis.settings import Config, names_of

Record = dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """What learning a task left behind.

    Attributes:
        visible: The samples that heads are fitted to: the memory as it was, then the task.
        seconds: How long it took, scoring and selection included.
        diagnosis: How good the choice of what is kept was, where the method says.
    """

    visible: ImageSet
    seconds: float
    diagnosis: dict[str, Any]


@dataclass
class Position:
    """How far the training of a task has come.

    Attributes:
        classes: How many classes the task brings.
        drawn: States of the generators that an epoch is drawn from, before the current one.
        epoch: Epochs done.
        step: Steps of the current epoch done.
        done: Steps of the task done.
        totals: Sums of the loss's terms over these steps.
    """

    classes: int
    drawn: dict[str, Tensor]
    epoch: int = 0
    step: int = 0
    done: int = 0
    totals: dict[str, Tensor] = field(default_factory=dict)


class Trainer:
    """Learns tasks by a method. After a task, its data may be deleted.

    Attributes:
        images: How many images its steps have gone through.
        features: How many features its encoder gives.

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
        kind = recorded(config.method)
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
        self.task_sizes: list[int] = []
        self.images = 0
        self._steps = 1
        self._position: Position | None = None
        self._replay = Replay(self.method, self.memory, config, self.fabric.device)
        groups = self.method.parameter_groups()
        self._optimizer = Optimizer(groups, config, self.fabric.device)
        self._step = Step(self.method, self._optimizer, self.fabric, config)

    def learn(
        self,
        task: ImageSet,
        new_classes: int,
        on_epoch: Callable[[Record], None] = lambda record: None,
        on_step: Callable[[], None] = lambda: None,
        on_trained: Callable[[], None] = lambda: None,
        *,
        again: bool = False,
    ) -> Learned:
        """Learn a task whose classes are the next `new_classes` in order of arrival.

        If it fails or is interrupted, everything is as it was before. A trainer restored from the
        middle of a task goes on from there.

        Args:
            task: The samples.
            new_classes: How many classes they bring.
            on_epoch: Called with a record of every epoch.
            on_step: Called after every step; `state` taken there is complete.
            on_trained: Called when only the memory is left to be refilled; likewise.
            again: Whether samples of classes learned before may be among them.
        """
        self._check(task, new_classes, again)
        with self.all_or_nothing():
            try:
                return self._learn(task, new_classes, on_epoch, on_step, on_trained)
            except (RuntimeError, ValueError) as error:
                said = self._in_words(error)
                if out_of_memory(error):
                    _let_go(error)
                    said = self._too_large(len(task))
                if said is None:
                    raise
                raise InputError(said) from None

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
        self,
        task: ImageSet,
        new_classes: int,
        on_epoch: Callable[[Record], None],
        on_step: Callable[[], None],
        on_trained: Callable[[], None],
    ) -> Learned:
        started = time.perf_counter()
        device = self.fabric.device
        stay = on_host(self.config, task.images.nbytes, device)
        task = task.to(device, images="cpu" if stay else device)
        if self._position is None:
            if not self.task_sizes:
                self.method.network.fit_normalisation(task.images)
            self._make_room(self.method.seen + new_classes)
            self.method.begin_task(new_classes)
            self._position = Position(new_classes, self._replay.drawn())
        self._train(task, self._position, on_epoch, on_step)
        on_trained()
        visible = self.memory.visible(task)
        diagnosis: dict[str, Any] = {}
        if not self.method.streams:
            diagnosis = self._refill(visible)
        elif self.memory.reservoir and self.memory.seen and self.memory.samples is not None:
            # Unless the choice has been made: a first task may be taken over from another run.
            diagnosis = self._refill(self.memory.samples)
        self._position = None
        self.task_sizes.append(new_classes)
        seen = self.fitted_to(visible)
        return Learned(seen, time.perf_counter() - started, diagnosis)

    def fitted_to(self, visible: ImageSet) -> ImageSet:
        """What heads are fitted to, of what was visible during a task that has been learned."""
        kept = self.memory.samples
        return kept if self.method.judged_by_memory and kept is not None else visible

    def _train(
        self,
        task: ImageSet,
        position: Position,
        on_epoch: Callable[[Record], None],
        on_step: Callable[[], None],
    ) -> None:
        config, index, epochs = self.config, len(self.task_sizes), self._epochs
        how, sizes = self._replay.mix(len(task), self.task_sizes)
        constant = config.schedule == "constant"
        schedule = Schedule(epochs, how.steps, config.warmup_epochs, constant)
        started, before = time.perf_counter(), position.done
        self.inference.forget()
        self._step.begin_task(before, sizes)
        self._steps = how.steps
        self.method.network.train()
        title, steps = f"task {index + 1}  training", epochs * how.steps
        with self._progress.bar(title, steps, done=before) as bar:
            while position.epoch < epochs:
                for batch, slots in self._replay.batches(task, how, position.step):
                    rate = self._optimizer.set_learning_rates(schedule, position.done)
                    losses, kept = self._step(batch)
                    for name, value in losses.items():
                        so_far = position.totals.get(name)
                        # A recorded step writes its next losses to the same place.
                        position.totals[name] = value.clone() if so_far is None else so_far + value
                    if self.method.streams:
                        self._replay.take_in(batch, how.task, slots, kept)
                    position.step += 1
                    position.done += 1
                    self.images += how.batch
                    bar.advance()
                    if self.fabric.device.type == "cpu":
                        self.stop_if_failed()
                    if position.step < how.steps:
                        on_step()
                self.stop_if_failed()
                # Once an epoch the numbers come to the host; a step never waits for them.
                means = {name: float(sum_) / how.steps for name, sum_ in position.totals.items()}
                loss = sum(means.values())
                speed = (position.done - before) * how.batch / (time.perf_counter() - started)
                bar.advance(
                    0, note=self._note(f"{position.epoch + 1}/{epochs}", means, rate, speed)
                )
                on_epoch(
                    {
                        "task": index,
                        "epoch": position.epoch,
                        "step": position.done,
                        "loss": loss,
                        "losses": means,
                        "learning_rate": rate,
                        "images_per_second": speed,
                    }
                )
                position.epoch, position.step, position.totals = position.epoch + 1, 0, {}
                position.drawn = self._replay.drawn()
                on_step()
        self._step.forget()

    def _note(self, epoch: str, terms: dict[str, float], rate: float, speed: float) -> str:
        """Two lines about an epoch."""
        loss = f"loss {sum(terms.values()):.3f}"
        if len(terms) > 1:
            loss += f" = {' + '.join(f'{name} {value:.3f}' for name, value in terms.items())}"
        place = "GPU memory" if self.fabric.device.type == "cuda" else "memory"
        used = f"{peak_memory(self.fabric.device) / 2**30:.1f} GiB of {place} at most"
        room = self.memory.capacity + self.memory.reservoir
        kept = [f"replay {len(self.memory)}/{room}"] * bool(room)
        return "\n".join(
            " · ".join(line)
            for line in (
                [f"epoch {epoch}", loss, f"lr {rate:.3g}"],
                [f"{speed:,.0f} img/s", *kept, used],
            )
        )

    @property
    def _epochs(self) -> int:
        """Of the current task."""
        first = self.config.first_epochs if not self.task_sizes else None
        return first or self.config.epochs

    def _refill(self, visible: ImageSet) -> dict[str, Any]:
        index, seed = len(self.task_sizes), self.config.seed
        augment_rng = generator(self.fabric.device, seed, "score", index)
        with self._progress.bar(f"task {index + 1}  scoring", self.method.passes) as bar:

            def represent(*, augmented: bool = True) -> Representation:
                bar.advance()
                return self.inference(visible.images, augment_rng if augmented else None)

            rng = generator("cpu", seed, "keep", index)
            choice = Visible(visible.labels, represent, self.memory.extras)
            kept = self.method.keep(choice, self.memory.capacity, rng)
        self.memory.replace(visible[kept.indices], kept.proposal, kept.extras)
        return kept.diagnosis

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
        for name in self.method.per_class:
            self.memory.widen(name, classes)

    def _check(self, task: ImageSet, new_classes: int, again: bool) -> None:
        if task.shape != self.image_shape:
            raise InputError(
                f"images of (height, width, channels) {task.shape}, "
                f"but the first task had {self.image_shape}"
            )
        if len(task) < 2:
            raise InputError("a task needs at least two samples")
        (height, width, _), padding = self.image_shape, self.config.padding
        if self.config.crop == "padded" and padding >= min(height, width):
            raise InputError(
                f"a padding of {padding} can push images of {height}×{width} out of sight: it must "
                "be smaller than their sides"
            )
        if self._position is not None and self._position.classes != new_classes:
            raise InputError(
                f"a task of {self._position.classes} classes was begun, not one of {new_classes}"
            )
        high = sum(self.task_sizes) + new_classes
        low = 0 if again else high - new_classes
        least, most = int(task.labels.min()), int(task.labels.max())
        if new_classes < (0 if again else 1) or least < low or most >= high:
            raise InputError(
                f"labels out of range: this task's classes are {low} to {high - 1}, "
                f"but labels reach from {least} to {most}"
            )

    def _in_words(self, error: Exception) -> str | None:
        """What to say instead of what torch says, where the settings are the cause."""
        if "more than 1 value per channel" in str(error) and 1 in self._step.sizes[1:]:
            more = "memory" if self.method.by_task else "replay_batch_size"
            return (
                "batch normalisation needs two samples at least, but a part of the memory that is "
                f"replayed by itself has one: a larger {more} helps"
            )
        if any(words in str(error) for words in ("can't allocate memory", "not enough memory")):
            return "this machine's memory is too small for these images and sizes of batches"
        return None

    def _too_large(self, samples: int) -> str:
        """What to say when the GPU's memory is full: the largest halving of the batch that fits."""
        batch = min(self.config.batch_size, samples)
        height, width, _ = self.image_shape
        smaller = "use smaller images (image_size) or width"
        if self._position is not None and self._position.epoch == self._epochs:
            return f"the GPU's memory is too small to score images of {height}×{width}: {smaller}"
        said = f"the GPU's memory is too small for batches of {batch} images of {height}×{width}"
        self._step.forget()
        self.inference.forget()
        while batch > 2:
            batch //= 2
            # A quarter more, for what libraries ask for besides.
            if self._fits(batch + batch // 4):
                return f"{said}; batch_size {batch} would fit"
        return f"{said}, and for smaller ones: {smaller}"

    def _fits(self, batch: int) -> bool:
        height, width, channels = self.image_shape
        device, past = self.fabric.device, self._step.sizes[1:]
        rows = (batch + sum(past)) * self.method.views
        torch.cuda.empty_cache()
        try:
            labels = torch.arange(rows, device=device) % max(1, self.method.seen)
            images = torch.zeros(rows, channels, height, width, device=device)
            proposal = torch.ones(rows, device=device)
            extras = self.method.blank_extras(sum(past))
            # To compile every size takes minutes; what is not compiled needs rather more memory.
            with torch.compiler.set_stance("force_eager"), self.fabric.autocast():
                trial = Batch(images, labels, proposal, extras, (batch, *past))
                self.method.before_step(trial)
                terms = [*self.method.probes(trial), *self.method.losses(trial).values()]
            self.fabric.backward(torch.stack(terms).sum())
            self._optimizer.zero_grad()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            _let_go(error)
            self._optimizer.zero_grad()
            return False
        return True

    def stop_if_failed(self) -> None:
        """Refuse to go on if a step was not finite; on a GPU this waits for all steps so far."""
        failed, steps = self._step.failed, self._steps
        if failed is not None:
            of_stability = names_of(type(self.config), stability=True)
            scales = [
                f"{name} {value:g}"
                for name, value in self.config.to_dict().items()
                if name in of_stability
            ]
            raise InputError(
                f"the loss or its gradient was no longer finite in task {len(self.task_sizes) + 1},"
                f" epoch {failed // steps + 1}, step {failed % steps + 1} of {steps} "
                f"({', '.join(scales)}, precision {self.config.precision}); a lower learning_rate "
                "may help"
            )

    @property
    def steps(self) -> int | None:
        """Steps of the current task done; None between tasks."""
        return None if self._position is None else self._position.done

    @property
    def epoch(self) -> int:
        """Epochs of the current task done; 0 between tasks."""
        return 0 if self._position is None else self._position.epoch

    def state(self) -> tuple[dict[str, Tensor], Record]:
        """Everything needed to go on from here, as tensors and a description."""
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
        description: Record,
        *,
        encoder: nn.Module | None = None,
        device: str | None = None,
        progress: Progress = QUIET,
    ) -> Trainer:
        """A trainer that goes on where `state` was taken, on any device."""
        with as_input_errors("not a state that this cclis wrote"):
            settings = dict(description["config"])
            settings["device"] = device or settings["device"]
            config = recorded_config(settings)
            height, width, channels = description["image_shape"]
            shape, classes = (int(height), int(width), int(channels)), int(description["classes"])
            # A small file may claim a network of any size: compared before it takes memory. What
            # the encoder gives, and one of your own, are not known by then.
            with torch.device("meta"):
                blank = make_encoder(config, shape) if encoder is None else nn.Identity()
                kind = recorded(config.method)
                claimed = kind.make_network(config, blank, shape[2], 1, classes)
            there = strip_prefix("network.", tensors)
            for name, value in claimed.state_dict().items():
                if name not in there or value.numel() > there[name].numel():
                    raise InputError(f"these weights belong to another network: {name} differs")
            kept = tensors.get("memory.images")
            if kept is not None and kept.shape[1:] != shape:
                raise InputError(f"images of {shape} were learned, but others are kept")
        trainer = cls(config, shape, classes, encoder=encoder, progress=progress)
        trainer.restore(tensors, description)
        return trainer

    def restore(self, tensors: dict[str, Tensor], description: Record) -> None:
        """Take over the tensors of a `state` that belongs to the same settings."""
        with as_input_errors("not a state that this cclis wrote"):
            self._restore(tensors, description)

    def _restore(self, tensors: dict[str, Tensor], description: Record) -> None:
        here = {name: tensor.to(self.fabric.device) for name, tensor in tensors.items()}
        self._give_room(description["classes"])
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
        self.task_sizes = list(description["task_sizes"])
        position = description["position"]
        if position is None:
            self._position = None
            self.method.count(sum(self.task_sizes[:-1]), sum(self.task_sizes))
        else:
            totals = {name: here[f"total.{name}"] for name in description["terms"]}
            self._position = Position(drawn=self._replay.drawn(), totals=totals, **position)
            seen = sum(self.task_sizes)
            self.method.count(seen, seen + position["classes"])
            self.method.load(strip_prefix("method.", here))


def _let_go(error: BaseException | None) -> None:
    """Frames of the failed step, and of what failed before it, hold what filled the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
